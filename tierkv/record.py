"""Record: everything that a policy is told and asked, and its answers, as a file.

`serve --record FILE` puts a recorder around the policy and its Catalog: every change of a placement
goes into the file, and so does every call of the policy, in the order of the store's lock. A policy
sees nothing else, no clock and no chance, so `simulation.rerun` takes the file through a fresh
Catalog and a fresh policy and must find the same answers.

A file is a sequence of records: u32 bytes, then an event in msgpack, [name, arguments, answer].
The first is `open`, with the names of the tiers, the second `policy`. An event that is cut short at
the end of the file is not there.
"""

import struct
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from tierkv.allowance import Allowance, Allowances
from tierkv.catalog import Catalog, Column, Rows, Unit
from tierkv.codec import Profile
from tierkv.cost import Rates
from tierkv.errors import invalid, unavailable
from tierkv.explain import Dropped, Terms
from tierkv.part import Part
from tierkv.plan import Move
from tierkv.policies.choice import Opening, make_policy
from tierkv.policy import Picked, ServicePolicy
from tierkv.use import Use

MAGIC = b"tierkv.record 1\n"
BUFFER_BYTES = 1 << 20
MAX_EVENT_BYTES = 1 << 30
_SIZE = struct.Struct("<I")


class Event(msgspec.Struct, frozen=True, array_like=True):
    """A change of the Catalog, or a call of the policy with its answer."""

    name: str
    arguments: list[Any]
    answer: Any = None


class Recorder:
    """Writes events; under the store's lock. Raises: TierKVError: the file cannot be made."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: BinaryIO = path.open("wb", BUFFER_BYTES)
        except OSError as error:
            raise unavailable(f"cannot record to {path}: {error.strerror}") from error
        self._file.write(MAGIC)
        self._encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode

    def catalog(self, tiers: Sequence[str], cuts: Sequence[int]) -> Catalog:
        """Return a Catalog whose changes are recorded."""
        self.write(Event("open", [list(tiers), list(cuts)]))
        return _RecordedCatalog(tiers, cuts, self)

    def policy(self, opening: Opening) -> ServicePolicy:
        """Return a new policy whose calls are recorded."""
        self.write(Event("policy", [opening]))
        return _RecordedPolicy(make_policy(opening), self)

    def write(self, event: Event) -> None:
        """Add an event. One that cannot be written ends the record, not the store."""
        if self._file.closed:
            return
        body = self._encode(event)
        try:
            self._file.write(_SIZE.pack(len(body)) + body)
        except OSError:
            self.close()

    def close(self) -> None:
        """End the record. Idempotent."""
        try:
            self._file.close()
        except OSError:
            return


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.tobytes()]
    if isinstance(value, array):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(type(value))


def read_record(path: Path) -> Iterator[Event]:
    """Go through the events of a record. Raises: TierKVError (invalid)."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise invalid(f"{path} is not a record of `tierkv serve --record`")
        while len(head := file.read(_SIZE.size)) == _SIZE.size:
            (size,) = _SIZE.unpack(head)
            body = file.read(min(size, MAX_EVENT_BYTES))
            if len(body) < size:
                return
            try:
                yield msgspec.msgpack.decode(body, type=Event)
            except msgspec.DecodeError as error:
                raise invalid(f"{path}: an event cannot be read: {error}") from error


def is_record(path: Path) -> bool:
    """Return whether a file begins as a record does."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class _RecordedAllowances(Allowances):
    """Allowances whose new numbers go into a record."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def number(self, allowance: Allowance) -> int:
        """See `Allowances`."""
        before = len(self)
        number = super().number(allowance)
        if len(self) > before:
            self._recorder.write(Event("allowance", [dict(allowance)]))
        return number


class _RecordedCatalog(Catalog):
    """A Catalog whose changes go into a record."""

    def __init__(self, tiers: Sequence[str], cuts: Sequence[int], recorder: Recorder) -> None:
        super().__init__(tiers, cuts)
        self._recorder = recorder
        self.allowances = _RecordedAllowances(recorder)

    def _note(self, name: str, *arguments: object) -> None:
        self._recorder.write(Event(name, list(arguments)))

    def part_number(self, part: Part) -> int:
        """See `Catalog`."""
        new = len(self.parts)
        number = super().part_number(part)
        if number == new:
            self._note("part_number", part.pack())
        return number

    def begin(self, tier: int, new: Sequence[Unit]) -> list[int]:
        """See `Catalog`."""
        self._note("begin", tier, [list(unit) for unit in new])
        return super().begin(tier, new)

    def begin_alike(
        self, tier: int, part: int, keys: bytes, columns: Mapping[str, Column]
    ) -> list[int]:
        """See `Catalog`."""
        self._note("begin_alike", tier, part, keys, dict(columns))
        return super().begin_alike(tier, part, keys, columns)

    def commit(self, rows: Rows) -> None:
        """See `Catalog`."""
        self._note("commit", list(rows))
        super().commit(rows)

    def abort(self, rows: Rows) -> None:
        """See `Catalog`."""
        self._note("abort", list(rows))
        super().abort(rows)

    def leave(self, rows: Rows) -> None:
        """See `Catalog`."""
        self._note("leave", list(rows))
        super().leave(rows)

    def gone(self, rows: Rows) -> None:
        """See `Catalog`."""
        self._note("gone", list(rows))
        super().gone(rows)

    def hold(self, rows: Rows) -> None:
        """See `Catalog`."""
        self._note("hold", list(rows))
        super().hold(rows)

    def unhold(self, rows: Rows) -> list[int]:
        """See `Catalog`."""
        self._note("unhold", list(rows))
        return super().unhold(rows)

    def resize(self, row: int, nbytes: int, allocated: int, locator: int) -> None:
        """See `Catalog`."""
        self._note("resize", row, nbytes, allocated, locator)
        super().resize(row, nbytes, allocated, locator)

    def let_encode(self, artifacts: Collection[bytes]) -> None:
        """See `Catalog`."""
        self._note("let_encode", sorted(artifacts))
        super().let_encode(artifacts)

    def restate(self, row: int, **columns: int) -> None:
        """See `Catalog`."""
        self._note("restate", row, columns)
        super().restate(row, **columns)

    def adopt(
        self, tier: int, part: int, keys: bytes, columns: dict[str, npt.NDArray[Any]]
    ) -> npt.NDArray[np.int32]:
        """See `Catalog`."""
        self._note("adopt", tier, part, keys, columns)
        return super().adopt(tier, part, keys, columns)


class _RecordedPolicy:
    """A policy whose calls and answers go into a record. See `ServicePolicy`."""

    def __init__(self, policy: ServicePolicy, recorder: Recorder) -> None:
        self._policy = policy
        self._recorder = recorder
        self.name = policy.name

    def _note(self, name: str, *arguments: object, answer: object = None) -> None:
        self._recorder.write(Event(name, list(arguments), answer))

    def used(self, view: Catalog, use: Use) -> None:
        """Record and pass on."""
        self._note("used", list(use))
        self._policy.used(view, use)

    def measured(self, view: Catalog, rates: Sequence[Rates]) -> None:
        """Record and pass on."""
        self._note("measured", [list(one) for one in rates])
        self._policy.measured(view, rates)

    def touched(self, view: Catalog, rows: Rows) -> None:
        """Record and pass on."""
        self._note("touched", list(rows))
        self._policy.touched(view, rows)

    def found(self, view: Catalog, rows: Rows) -> None:
        """Record and pass on."""
        self._note("found", list(rows))
        self._policy.found(view, rows)

    def forgot(self, rows: Rows) -> None:
        """Record and pass on."""
        self._note("forgot", list(rows))
        self._policy.forgot(rows)

    def picks(self, keys: bytes, known: Sequence[bool], choices: Sequence[Profile]) -> Picked:
        """Ask and record."""
        answer = self._policy.picks(keys, known, choices)
        self._note("picks", keys, list(known), [one.number for one in choices], answer=[*answer])
        return answer

    def offered(self, view: Catalog, tier: int, keys: Sequence[bytes]) -> int:
        """Ask and record."""
        answer = self._policy.offered(view, tier, keys)
        self._note("offered", tier, list(keys), answer=answer)
        return answer

    def admits(self, view: Catalog, tier: int, rows: Rows) -> list[bool]:
        """Ask and record."""
        answer = self._policy.admits(view, tier, rows)
        self._note("admits", tier, list(rows), answer=answer)
        return answer

    def victims(self, view: Catalog, tier: int, need: int) -> list[int]:
        """Ask and record."""
        answer = self._policy.victims(view, tier, need)
        self._note("victims", tier, need, answer=answer)
        return answer

    def reclaim(self, view: Catalog, tier: int, need: int, *, at_once: bool) -> list[Move]:
        """Ask and record."""
        answer = self._policy.reclaim(view, tier, need, at_once=at_once)
        self._note("reclaim", tier, need, at_once, answer=[list(move) for move in answer])
        return answer

    def keeps(self, view: Catalog, tier: int, rows: Rows) -> list[bool]:
        """Ask and record."""
        answer = self._policy.keeps(view, tier, rows)
        self._note("keeps", tier, list(rows), answer=answer)
        return answer

    def stranded(self, view: Catalog, rows: Rows) -> list[int]:
        """Ask and record."""
        answer = self._policy.stranded(view, rows)
        self._note("stranded", list(rows), answer=answer)
        return answer

    def oldest(self, rows: Rows) -> list[int]:
        """Ask and record."""
        answer = self._policy.oldest(rows)
        self._note("oldest", list(rows), answer=answer)
        return answer

    def terms(self, view: Catalog, row: int) -> Terms:
        """Ask, and record that it was asked: it may have learnt."""
        self._note("terms", row)
        return self._policy.terms(view, row)

    @property
    def last_drop(self) -> Dropped | None:
        """See `explain.Explainer`."""
        return self._policy.last_drop
