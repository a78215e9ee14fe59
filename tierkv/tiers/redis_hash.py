"""How a frame lies in Redis, and how frames are carried over one connection (docs/FORMAT.md).

One hash per frame, so that Redis evicts, expires and deletes a frame as a unit. Its fields are the
meta record "m" and the frame's bytes, cut into pieces "p0", "p1" and so on.

A frame is written under a name of its writer's own, an HSET for each piece, and published by one
Lua call that renames it when it has all its fields. So it is there whole or not at all, whoever
dies, races or is evicted in between. One HSET of all pieces would be as safe, but then the server
copies them after the last byte, while nothing is on its way.

`PIECE_BYTES` lies just under a power of two: with a few bytes of overhead 1 MiB exactly would take
1.25 MiB of the server's memory. It also stays below the lowest limit that a server can set on one
argument (1 MiB). Smaller pieces cost speed, larger ones waste more in the last piece.

The functions raise LostError and then leave outcomes that are not decided as they were.
"""

import secrets
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tierkv import frame
from tierkv.tier import DONE, FrameId, Item, Outcome, Status
from tierkv.tiers.resp import Buffer, Connection, LostError, Refused, Reply, request

PIECE_BYTES = (1 << 20) - 4096
WRITE_WINDOW_BYTES = 4 << 20
READ_WINDOW_BYTES = 3 << 20
"""Bytes on their way at once; two requests are allowed whatever their size. What is asked for lies
in the server's output until it is sent: more than this leaves its caches."""
UNPUBLISHED_S = 900
"""What a writer that died left behind goes after this time."""
WINDOW_REQUESTS = 64
TAIL_BYTES = 64 << 10
"""A last piece up to this is read by one request with the one before: blocks are powers of two, so
most frames are their header longer than whole pieces."""
LOOKUP_BATCH = 4096

LOOKUP = b"*3\r\n$4\r\nHGET\r\n$%d\r\n%b\r\n$1\r\nm\r\n"
PUBLISH = b"""
if redis.call('HLEN', KEYS[1]) ~= tonumber(ARGV[1]) then return 0 end
redis.call('UNLINK', KEYS[2])
redis.call('RENAME', KEYS[1], KEYS[2])
return redis.call('EXPIRE', KEYS[2], ARGV[2])
"""
_META = struct.Struct("<QHHB3xQ16s")

EVICTED = Outcome(Status.FAILED, "some of it was evicted before the rest was written")

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


class _Put(NamedTuple):
    """A piece to write with what goes before the first one and behind the last one."""

    job: Job
    buffers: list[Buffer]
    nbytes: int
    replies: int
    last: bool


class _Ask(NamedTuple):
    """Pieces to read by one request; the first one comes with the meta record."""

    job: Job
    number: int
    pieces: list[list[memoryview]]
    nbytes: int
    last: bool

    @property
    def stop(self) -> int:
        """Bytes of the frame up to the last piece's end."""
        return self.number * PIECE_BYTES + self.nbytes

    def request(self) -> bytes:
        meta = (b"m",) if self.number == 0 else ()
        fields = [b"p%d" % (self.number + at) for at in range(len(self.pieces))]
        return request(b"HMGET", self.job.key, *meta, *fields)


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
    link: Connection, prefix: bytes, jobs: Sequence[Job], ttl_s: int, outcomes: list[Outcome | None]
) -> Refused | None:
    """Write frames; after an error reply no more are sent, and it is returned."""
    refused: Refused | None = None
    names = [unpublished(prefix, job.key) for job in jobs]
    pairs = zip(jobs, names, strict=True)
    puts = (put for job, name in pairs for put in _puts(job, name, ttl_s))
    ahead, sent, flying = next(puts, None), deque[_Put](), 0
    while sent or (ahead is not None and refused is None):
        while (
            refused is None
            and ahead is not None
            and _room(len(sent), flying + ahead.nbytes, WRITE_WINDOW_BYTES)
        ):
            link.send(ahead.buffers)
            sent.append(ahead)
            flying += ahead.nbytes
            ahead = next(puts, None)
        put = sent.popleft()
        reply: Reply = None
        for _ in range(put.replies):
            reply = link.reply()
            if isinstance(reply, Refused):
                refused = refused or reply
        flying -= put.nbytes
        if put.last and (reply == 1 or refused is None):
            outcomes[put.job.number] = DONE if reply == 1 else EVICTED
    if refused is not None:
        link.send([request(b"UNLINK", name) for name in names])
        for job in jobs:
            link.reply()
            outcomes[job.number] = outcomes[job.number] or judged(refused)
    return refused


def unpublished(prefix: bytes, key: bytes) -> bytes:
    """Return a new name to write a frame under; in a cluster it lies where the frame's key does."""
    return b"%b{%b}%b" % (prefix, key, secrets.token_hex(8).encode())


def _room(requests: int, flying: int, window: int) -> bool:
    """Whether one request more may be on its way, which makes it so many bytes."""
    fits = flying <= window and requests < WINDOW_REQUESTS
    return fits or requests < 2  # noqa: PLR2004, one is worked on while the next arrives


def _puts(job: Job, name: bytes, ttl_s: int) -> Iterator[_Put]:
    assert job.meta is not None, "only a write has a meta record"
    pieces = _cut(job.item)
    # The record goes first: what is left of a hash that was evicted meanwhile has none.
    head = request(b"HSET", name, b"m", job.meta.pack())
    head += request(b"EXPIRE", name, b"%d" % UNPUBLISHED_S)
    fields = b"%d" % (len(pieces) + 1)
    publish = request(b"EVAL", PUBLISH, b"2", name, job.key, fields, b"%d" % ttl_s)
    for number, views in enumerate(pieces):
        field, nbytes = b"p%d" % number, sum(map(len, views))
        first, last = number == 0, number + 1 == len(pieces)
        words = (len(name), name, len(field), field, nbytes)
        head += b"*4\r\n$4\r\nHSET\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n" % words
        tail = b"\r\n" + (publish if last else b"")
        yield _Put(job, [head, *views, tail], nbytes, 1 + 2 * first + last, last)
        head = b""


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
    # The server answers nothing before it has copied all that it was asked for at once.
    link.send([opening + asks[0].request()])
    check(link.reply())
    sent, flying, outcome = 1, asks[0].nbytes, DONE
    for done, ask in enumerate(asks):
        batch: list[bytes] = []
        while sent < len(asks) and _room(
            sent - done, flying + asks[sent].nbytes, READ_WINDOW_BYTES
        ):
            batch.append(asks[sent].request())
            flying += asks[sent].nbytes
            sent += 1
        if batch:
            link.send([b"".join(batch)])
        received = _receive(link, ask, live)
        flying -= ask.nbytes
        outcome = received if ask.number == 0 or outcome is DONE else outcome
        if ask.job.item.watch is not None and outcome is DONE:
            ask.job.item.watch.landed(ask.stop)
        if ask.last:
            outcomes[ask.job.number] = outcome


def _receive(link: Connection, ask: _Ask, live: Callable[[Meta], bool]) -> Outcome:
    first = ask.number == 0
    refused = link.array(len(ask.pieces) + first)
    if refused is not None:
        return judged(refused)
    outcome = _agrees(_meta(link.reply()), ask.job.item, live) if first else DONE
    for number, views in enumerate(ask.pieces, ask.number):
        length = link.fill(views)
        if length == sum(map(len, views)) or outcome is not DONE:
            continue
        if length < 0 and number:
            outcome = Outcome(Status.MISSING, "went away while it was read")
        else:
            outcome = Outcome(Status.CORRUPT, f"piece {number} has {length} bytes")
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
    stop, tail = len(pieces), job.item.nbytes % PIECE_BYTES
    whole = stop - 1 if stop > 1 and 0 < tail <= TAIL_BYTES else stop
    for number in range(whole):
        last = number + 1 == whole
        nbytes = job.item.nbytes - number * PIECE_BYTES if last else PIECE_BYTES
        yield _Ask(job, number, pieces[number : stop if last else number + 1], nbytes, last)


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
