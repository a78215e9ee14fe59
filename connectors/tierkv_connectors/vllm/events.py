"""Events: tells vLLM's event stream which blocks the sidecar has, for routers to follow.

What is said is what the engine saw: a block is *stored* when a save of this engine was committed or
a match found it, and *removed* when a match that asked for it did not, or all was forgotten. So a
block that the sidecar gives up is removed from the stream with the next request that wants it, not
before. The stream knows blocks by vLLM's own hashes of them, several for one store block.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tierkv.fidelity import FIDELITIES
from tierkv.key import KEY_BYTES

MEDIA = {"host": "CPU"}
"""vLLM's name of a tier's medium; what has none is STORAGE."""
LOCAL = "LOCAL"
MAX_ANNOUNCED = 1 << 17
"""Store blocks that are followed; the one unheard of for longest is said to be removed."""

Make = Callable[..., Any]


class Types(NamedTuple):
    """vLLM's classes of events, and its way to write a block's hash.

    Fields that they lack are left out: older versions know neither a tier's name nor sessions.
    """

    stored: Any
    removed: Any
    hash: Callable[[Any], Any]

    def make(self, kind: Any, **fields: Any) -> Any:  # noqa: ANN401 -- vLLM's own
        """Return an event of one of the classes."""
        return kind(**{name: fields[name] for name in kind.__struct_fields__ if name in fields})


class Asker(NamedTuple):
    """Of a request, what its blocks' events say."""

    hashes: Sequence[Any]
    """vLLM's, one for each `hash_tokens` tokens."""
    token_ids: Sequence[int]
    lora: tuple[int | None, str | None]
    session: str | None


def asker_of(request: Any) -> Asker:  # noqa: ANN401 -- vLLM's own, whose versions differ
    """Return what events say of one of vLLM's requests."""
    lora = getattr(request, "lora_request", None)
    named = (lora.lora_int_id, lora.lora_name) if lora is not None else (None, None)
    session = getattr(request, "session_id", None)
    return Asker(request.block_hashes, request.all_token_ids, named, session)


class _Draft(NamedTuple):
    fields: dict[str, Any]
    writers: int
    """Ranks that have still to save their part."""


class _Block(NamedTuple):
    hashes: tuple[Any, ...]
    medium: str
    fidelity: int


class Events:
    """One engine's events. Used by the scheduler's thread only.

    Args:
        types: of the events.
        tokens: of a store block.
        hash_tokens: of a block as vLLM hashes them, of which a store block has a whole number.
        writers: ranks that each save a part of every block.
    """

    def __init__(self, types: Types, tokens: int, hash_tokens: int, writers: int = 1) -> None:
        self._writers = writers
        self._types = types
        self._ratio, self._hash_tokens = tokens // hash_tokens, hash_tokens
        self._announced: OrderedDict[bytes, _Block] = OrderedDict()
        self._drafts: dict[bytes, _Draft] = {}
        self._queue: deque[Any] = deque()

    def offered(self, asker: Asker, keys: bytes, start: int) -> None:
        """Note whose blocks a save offers: those from store block `start` on."""
        for number, key in enumerate(_cut(keys)):
            if number >= start:
                self._drafts[key] = _Draft(self._fields(asker, number), self._writers)

    def saved(self, offered: bytes, stored: bytes, fidelity: int) -> None:
        """Hear from one rank that a save is over, and which blocks it made visible, in RAM."""
        made = set(_cut(stored))
        for key in _cut(offered):
            draft = self._drafts.pop(key, None)
            if draft is not None and key in made:
                if draft.writers > 1:
                    self._drafts[key] = draft._replace(writers=draft.writers - 1)
                else:
                    self._store(key, draft.fields, MEDIA["host"], fidelity)

    def looked_up(
        self, asker: Asker, keys: bytes, found: int, sources: Iterable[tuple[str, int]],
        asked: int, held: int = 0,
    ) -> None:  # fmt: skip
        """Hear how many blocks of a chain a match found, by tier in order, at the class `asked`.

        Of the first `held` it says nothing: the engine had them itself.
        """
        tiers = [""] * held + [tier for tier, count in sources for _ in range(count)]
        for number, key in enumerate(_cut(keys)):
            if number < held:
                continue
            known = self._announced.get(key)
            if number < found:
                medium = MEDIA.get(tiers[number], "STORAGE") if number < len(tiers) else "STORAGE"
                if known is None or known.medium != medium:
                    self._store(key, self._fields(asker, number), medium, asked)
                else:
                    self._announced.move_to_end(key)
            elif known is not None and known.fidelity >= asked:
                self._remove(key)

    def forgotten(self) -> None:
        """Hear that nothing will be found any more."""
        self._drafts.clear()
        for key in list(self._announced):
            self._remove(key)

    def take(self) -> Iterator[Any]:
        """Yield what has been said since the last call."""
        while self._queue:
            yield self._queue.popleft()

    def _fields(self, asker: Asker, number: int) -> dict[str, Any]:
        """Return the fields of a store block's event, none where vLLM has not hashed all of it."""
        start, stop = number * self._ratio, (number + 1) * self._ratio
        if len(asker.hashes) < stop:
            return {}
        convert = self._types.hash
        size = self._hash_tokens
        return {
            "block_hashes": [convert(one) for one in asker.hashes[start:stop]],
            "parent_block_hash": convert(asker.hashes[start - 1]) if start else None,
            "token_ids": list(asker.token_ids[start * size : stop * size]),
            "block_size": size,
            "lora_id": asker.lora[0],
            "lora_name": asker.lora[1],
            "session_id": asker.session,
        }

    def _store(self, key: bytes, fields: dict[str, Any], medium: str, fidelity: int) -> None:
        if not fields:
            return
        self._remove(key)
        self._queue.append(
            self._types.make(
                self._types.stored, **fields, medium=medium, locality=LOCAL,
                ownership=_owner(fidelity),
            )
        )  # fmt: skip
        self._announced[key] = _Block(tuple(fields["block_hashes"]), medium, fidelity)
        if len(self._announced) > MAX_ANNOUNCED:
            self._remove(next(iter(self._announced)))

    def _remove(self, key: bytes) -> None:
        known = self._announced.pop(key, None)
        if known is not None:
            self._queue.append(
                self._types.make(
                    self._types.removed, block_hashes=list(known.hashes), medium=known.medium,
                    locality=LOCAL, ownership=_owner(known.fidelity),
                )
            )  # fmt: skip


def _owner(fidelity: int) -> str:
    """Return the field that names tier and class."""
    return f"tierkv/{FIDELITIES[fidelity].label}"


def _cut(keys: bytes) -> Iterator[bytes]:
    return (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
