"""How a frame lies in Redis, and how frames are carried over one connection (docs/FORMAT.md).

One hash per frame, so that Redis evicts, expires and deletes a frame as a unit. One HSET writes it:
it is there whole or not at all, and a writer that dies leaves nothing behind. Its fields are the
meta record "m" and the frame's bytes, cut into pieces "p0", "p1" and so on.

`PIECE_BYTES` lies just under a power of two: with a few bytes of overhead 1 MiB exactly would take
1.25 MiB of the server's memory. It also stays below the lowest limit that a server can set on one
argument (1 MiB). Smaller pieces cost speed, larger ones waste more in the last piece.

The functions raise LostError and then leave outcomes that are not decided as they were.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tierkv import frame
from tierkv.tier import DONE, FrameId, Item, Outcome, Status
from tierkv.tiers.resp import Buffer, Connection, LostError, Refused, Reply, request

PIECE_BYTES = (1 << 20) - 4096
GROUP_PIECES = 8
"""Pieces of one HMGET: what the server copies into its output at once."""
WINDOW_BYTES = 4 << 20
"""Bytes on their way at once; two requests are allowed whatever their size."""
WINDOW_REQUESTS = 64
LOOKUP_BATCH = 4096

LOOKUP = b"*3\r\n$4\r\nHGET\r\n$%d\r\n%b\r\n$1\r\nm\r\n"
_META = struct.Struct("<QHHB3xQ16s")

EVICTED = Outcome(Status.FAILED, "gone as soon as it was written")

Check = Callable[[Reply], None]
"""Takes the reply to the opening request of a batch. Raises: LostError."""


class Meta(NamedTuple):
    """The meta record of a stored frame: what a lookup must know without the frame's bytes."""

    nbytes: int
    codec_id: int
    flags: int
    fidelity: int
    generation: int
    namespace: bytes

    def pack(self) -> bytes:
        """Return the 40 bytes of field "m"."""
        return _META.pack(*self)

    def same(self, other: "Meta") -> bool:
        """Whether two frames under one id hold the same: generation and namespace may differ."""
        return self[:4] == other[:4]


class Job(NamedTuple):
    """One item of a batch: its number there, its key in Redis and, for a write, its meta record."""

    number: int
    key: bytes
    item: Item
    meta: Meta | None = None
    replaces: bool = False


class _Ask(NamedTuple):
    """Some pieces of one item, fetched with one HMGET; the first fetches the meta record too."""

    job: Job
    first: int
    pieces: list[list[memoryview]]
    nbytes: int
    last: bool

    def request(self) -> bytes:
        numbers = range(self.first, self.first + len(self.pieces))
        meta = (b"m",) if self.first == 0 else ()
        return request(b"HMGET", self.job.key, *meta, *(b"p%d" % number for number in numbers))


def key_of(prefix: bytes, id_: FrameId) -> bytes:
    """Return the key of a frame: hex, so that it can be typed into redis-cli."""
    name = f"{id_.key.hex()}{id_.part.pack().hex()}:{id_.generation}"
    return prefix + name.encode()


def meta_of(item: Item) -> Meta | None:
    """Return the meta record of a frame in memory, None when it is not a frame of this length."""
    header = frame.parse(item.pieces[0])
    if isinstance(header, frame.Refusal) or header.frame_bytes != item.nbytes:
        return None
    return Meta(
        item.nbytes, header.codec_id, header.flags, header.fidelity, header.generation,
        header.namespace,
    )  # fmt: skip


def holds(item: Item) -> bool:
    """Whether an item's memory can hold its frame."""
    return 0 < item.nbytes <= sum(map(len, item.pieces))


def judged(refused: Refused) -> Outcome:
    """Return the outcome of an item whose command got an error reply."""
    status = {"OOM": Status.FULL, "WRONGTYPE": Status.CORRUPT}.get(refused.code, Status.FAILED)
    return Outcome(status, refused.text)


def find(
    link: Connection, opening: bytes, check: Check, keys: Sequence[bytes]
) -> list[Meta | Refused | None]:
    """Return what is stored under each key; None: nothing."""
    found: list[Meta | Refused | None] = []
    for start in range(0, len(keys), LOOKUP_BATCH):
        some = keys[start : start + LOOKUP_BATCH]
        link.send([opening + b"".join([LOOKUP % (len(key), key) for key in some])])
        check(link.reply())
        found += [_meta(link.reply()) for _ in some]
    return found


def _meta(reply: Reply) -> Meta | Refused | None:
    if isinstance(reply, bytes):
        if len(reply) != _META.size:
            return Refused("WRONGTYPE", "the meta record is not one")
        return Meta(*_META.unpack(reply))
    if isinstance(reply, int):
        raise LostError("not the reply to HGET")
    return reply


def store(
    link: Connection, jobs: Sequence[Job], ttl_s: int, outcomes: list[Outcome | None]
) -> Refused | None:
    """Write frames; after an error reply no more are sent, and it is returned."""
    refused: Refused | None = None
    sent = flying = 0
    for done, job in enumerate(jobs):
        while (
            sent < len(jobs)
            and refused is None
            and _room(sent - done, flying, jobs[sent].item.nbytes)
        ):
            link.send(list(_store_buffers(jobs[sent], ttl_s)))
            flying += jobs[sent].item.nbytes
            sent += 1
        if done < sent:
            if job.replaces:
                link.reply()
            stored, expires = link.reply(), link.reply()
            flying -= job.item.nbytes
            if isinstance(stored, Refused):
                refused = refused or stored
                outcomes[job.number] = judged(stored)
            else:
                kept = isinstance(stored, int) and expires == 1
                outcomes[job.number] = DONE if kept else EVICTED
        elif refused is not None:
            outcomes[job.number] = judged(refused)
    return refused


def _room(requests: int, flying: int, nbytes: int) -> bool:
    """Whether one request more may be on its way."""
    fits = flying + nbytes <= WINDOW_BYTES and requests < WINDOW_REQUESTS
    return fits or requests < 2  # noqa: PLR2004, one is worked on while the next arrives


def _store_buffers(job: Job, ttl_s: int) -> Iterator[Buffer]:
    assert job.meta is not None, "only a write has a meta record"
    pieces = _cut(job.item)
    words = 4 + 2 * len(pieces)
    head = request(b"UNLINK", job.key) if job.replaces else b""
    head += b"*%d\r\n$4\r\nHSET\r\n$%d\r\n%b\r\n" % (words, len(job.key), job.key)
    head += b"$1\r\nm\r\n$%d\r\n%b\r\n" % (_META.size, job.meta.pack())
    for number, views in enumerate(pieces):
        name = b"p%d" % number
        yield head + b"$%d\r\n%b\r\n$%d\r\n" % (len(name), name, sum(map(len, views)))
        yield from views
        head = b"\r\n"
    yield head + request(b"EXPIRE", job.key, b"%d" % ttl_s)


def load(
    link: Connection,
    opening: bytes,
    check: Check,
    jobs: Sequence[Job],
    live: Callable[[Meta], bool],
    outcomes: list[Outcome | None],
) -> None:
    """Read frames into their pieces.

    Args:
        link: the connection.
        opening: a request that goes first.
        check: takes its reply.
        jobs: what to read; every item holds its frame.
        live: whether a frame found may be given out.
        outcomes: gets the outcome of each job at its number.
    """
    asks = [ask for job in jobs for ask in _asks(job)]
    sent = flying = 0
    outcome = DONE
    for done, ask in enumerate(asks):
        batch = [] if done else [opening]
        while sent < len(asks) and _room(sent - done, flying, asks[sent].nbytes):
            batch.append(asks[sent].request())
            flying += asks[sent].nbytes
            sent += 1
        if batch:
            link.send([b"".join(batch)])
        if done == 0:
            check(link.reply())
        received = _receive(link, ask, live)
        flying -= ask.nbytes
        outcome = received if ask.first == 0 or outcome is DONE else outcome
        if ask.last:
            outcomes[ask.job.number] = outcome


def _receive(link: Connection, ask: _Ask, live: Callable[[Meta], bool]) -> Outcome:
    refused = link.array(len(ask.pieces) + (ask.first == 0))
    if refused is not None:
        return judged(refused)
    outcome = DONE
    if ask.first == 0:
        outcome = _agrees(_meta(link.reply()), ask.job.item, live)
    for views in ask.pieces:
        length, expected = link.fill(views), sum(map(len, views))
        if length != expected and outcome is DONE:
            if length < 0 and ask.first:
                outcome = Outcome(Status.MISSING, "went away while it was read")
            else:
                outcome = Outcome(Status.CORRUPT, f"a piece of {length} bytes, not {expected}")
    return outcome


def _agrees(meta: Meta | Refused | None, item: Item, live: Callable[[Meta], bool]) -> Outcome:
    if meta is None:
        return Outcome(Status.MISSING)
    if isinstance(meta, Refused):
        return judged(meta)
    if not live(meta):
        return Outcome(Status.MISSING, "cleared")
    if meta.nbytes != item.nbytes:
        return Outcome(Status.MISSING, f"a frame of {meta.nbytes} bytes is there instead")
    return DONE


def _asks(job: Job) -> Iterator[_Ask]:
    pieces = _cut(job.item)
    for first in range(0, len(pieces), GROUP_PIECES):
        some = pieces[first : first + GROUP_PIECES]
        nbytes = sum(len(view) for views in some for view in views)
        yield _Ask(job, first, some, nbytes, first + len(some) == len(pieces))


def _cut(item: Item) -> list[list[memoryview]]:
    """Return the views of an item's memory that make up each piece."""
    out: list[list[memoryview]] = []
    rest, room = item.nbytes, 0
    for view in item.pieces:
        at = 0
        while rest and at < len(view):
            if room == 0:
                out.append([])
                room = min(PIECE_BYTES, rest)
            part = view[at : at + room]
            out[-1].append(part)
            at += len(part)
            room -= len(part)
            rest -= len(part)
    return out
