"""Hostile bytes to frames and hostile calls to the store: a refusal or a miss, and nothing else."""

import random
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import xxhash

from tests.frames import make_frame
from tests.stores import BLOCK, ONE, TWO, Rig, chain, packed
from tierkv import calls, frame
from tierkv.errors import ErrorKind, TierKVError
from tierkv.part import Part

FUZZ_S = 3.0
FUZZ_TURNS = 60_000


def mutated(rng: random.Random, seed: bytes) -> bytearray:
    """Change a frame as bit rot, a torn write or an attacker would; half get a sound checksum."""
    data = bytearray(seed)
    for _ in range(rng.choice([1, 1, 2, 5, 40])):
        at = rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + 8] = rng.randbytes(8)
            case 2:
                data[at : at + 8] = rng.choice([bytes(8), b"\xff" * 8])
            case 3:
                del data[at:]
            case _:
                data[at:at] = rng.randbytes(rng.randrange(20))
        if len(data) < 8:
            return data
    if rng.random() < 0.5 and len(data) >= 208:
        size = min(max(struct.unpack_from("<H", data, 6)[0], 208), len(data))
        struct.pack_into("<Q", data, 200, 0)
        struct.pack_into("<Q", data, 200, xxhash.xxh3_64_intdigest(data[:size]))
    return data


@pytest.mark.parametrize("segments", [1, 3, 128])
def test_mutated_frames_are_refused_or_bounded(segments: int) -> None:
    rng = random.Random(segments)
    sample = make_frame(1, nbytes=frame.header_bytes(segments) + 600, segments=segments)
    end = time.monotonic() + FUZZ_S
    accepted = 0
    for _ in range(FUZZ_TURNS // 3):
        data = mutated(rng, sample.data)
        parsed = frame.parse(data[: frame.MAX_HEADER_BYTES])
        if isinstance(parsed, frame.Header):
            accepted += 1
            assert parsed.payload_bytes <= frame.payload_bound(parsed.raw_bytes)
            assert parsed.payload_bytes <= frame.MAX_PAYLOAD_BYTES
            assert len(frame.pack(parsed)) == parsed.header_bytes
            if frame.verify(parsed, [data]):
                assert data[parsed.header_bytes : parsed.frame_bytes] in sample.data
        if time.monotonic() > end:
            break
    assert accepted, "no mutation got past the checksum: the fuzz looks at nothing"


BIG = 2**63
KEYS = b"".join(chain(1, 3))
PUTS: dict[str, dict[str, Any]] = {
    "half a key": {"keys": KEYS[:-1]},
    "a key twice": {"keys": KEYS + KEYS[:32]},
    "more units than allowed": {"keys": bytes(range(256)) * 8 * 65_537},
    "no parts": {"parts": b""},
    "half a part": {"parts": packed(ONE)[:-1]},
    "a part twice": {"parts": packed(ONE * 2), "raw_bytes": struct.pack("<2q", 64, 64)},
    "an empty part": {"parts": Part(0, 0, 0, 0, 0).pack()},
    "raw bytes of 0": {"raw_bytes": struct.pack("<q", 0)},
    "raw bytes below 0": {"raw_bytes": struct.pack("<q", -1)},
    "raw bytes of 2**62": {"raw_bytes": struct.pack("<q", 2**62)},
    "raw bytes of no part": {"raw_bytes": b""},
    "raw bytes of half a part": {"raw_bytes": b"1234"},
    "a start behind the chain": {"start": 4},
    "a start before it": {"start": -1},
    "a short fingerprint": {"fingerprint": b"f" * 31},
    "class 0": {"fidelity": 0},
    "class 5": {"fidelity": 5},
    "a huge class": {"fidelity": BIG},
    "a position below 0": {"position": -1},
    "a position of 2**32": {"position": 2**32},
    "a huge position": {"position": BIG},
    "a block of no tokens": {"tokens_per_block": 0},
    "a block of tokens below 0": {"tokens_per_block": -64},
    "a block of 2**40 tokens": {"tokens_per_block": 2**40},
    "no profile": {"profiles": ()},
    "a profile that is none": {"profiles": ("kvtc@1000x", "")},
    "no namespace": {"namespace": ""},
    "a path for a namespace": {"namespace": "../../etc"},
    "a long namespace": {"namespace": "n" * 100_000},
    "a long session": {"session": "s" * 257},
    "a life that is no number": {"ttl_s": float("nan")},
    "a life that is over": {"ttl_s": -1.0},
    "a life without end": {"ttl_s": float("inf"), "pin": True},
}
MATCHES: dict[str, dict[str, Any]] = {
    name: fields
    for name, fields in PUTS.items()
    if not {"raw_bytes", "start", "profiles"} & set(fields)
} | {
    "a deadline that is no number": {"deadline_s": float("nan")},
    "a deadline that never comes": {"deadline_s": float("inf")},
    "a deadline of a year": {"deadline_s": 3e7},
    "a deadline that is over": {"deadline_s": -1.0},
    "costs that are no numbers": {"linear": float("nan"), "quadratic": float("nan")},
    "costs without end": {"linear": float("inf"), "quadratic": float("inf")},
    "costs below 0": {"linear": -1.0, "quadratic": -1.0},
    "raw bytes below 0": {"raw_bytes": -1},
    "huge raw bytes": {"raw_bytes": BIG},
}


def rig() -> Rig:
    """Return a store that has something to lose: a chain in RAM and below, a second only below."""
    made = Rig(8)
    assert made.put(chain(2, 6), b"below") == 6
    made.inline.drain()
    assert made.put(chain(1, 3), b"ram") == 3
    made.inline.drain()
    return made


def unharmed(made: Rig) -> None:
    """Assert that the store still does its work and that nothing is held."""
    made.inline.drain()
    made.clock.now += 3600.0
    made.store.tick()
    assert made.stat()["holds"]["matches"] == 0, "a lease without end"
    for owner in 1, 2, 7:
        made.store.disown(owner)
    made.idle()
    assert len(made.read(chain(1, 3))) == 3
    assert made.put(chain(3, 2)) == 2
    made.idle()


def refuses(act: Callable[[], Any]) -> Any:
    """Call and return the answer, None when it was refused; any other exception is a bug."""
    try:
        return act()
    except TierKVError as error:
        if error.kind is not ErrorKind.INVALID:
            raise
        return None


@pytest.mark.parametrize("name", PUTS)
def test_hostile_puts(name: str) -> None:
    made = rig()
    call = made.put_call(chain(5, 3))
    call = calls.PutCall(**{n: getattr(call, n) for n in call.__struct_fields__} | PUTS[name])
    reply = refuses(lambda: made.store.put(7, call))
    if reply is not None and reply.reservation:
        units = len(reply.units) // 4
        lengths = struct.pack(f"<{units}q", *[64] * units)
        refuses(
            lambda: made.store.commit(
                7, calls.CommitCall(reservation=reply.reservation, lengths=lengths)
            )
        )
    unharmed(made)


@pytest.mark.parametrize("session", [1, 2, 6])
@pytest.mark.parametrize("name", MATCHES)
def test_hostile_matches(name: str, session: int) -> None:
    made = rig()
    call = made.match_call(chain(session, 3))
    call = calls.MatchCall(**{n: getattr(call, n) for n in call.__struct_fields__} | MATCHES[name])
    reply = refuses(lambda: made.store.match(7, call))
    made.inline.drain()
    if reply is not None and reply.match:
        refuses(lambda: made.store.settle(7, calls.SettleCall(match=reply.match)))
        if "deadline" not in name:
            get = calls.GetCall(match=reply.match, blocks=reply.blocks)
            refuses(lambda: made.store.get(7, get))
    unharmed(made)


@pytest.mark.parametrize(
    "lengths",
    [
        b"", b"1", bytes(8), bytes(24), struct.pack("<3q", -1, -1, -1), bytes(8 * 100_000),
        struct.pack("<3q", BLOCK + 1, BLOCK + 4096, 2**62), struct.pack("<3q", 5, 0, -(2**63)),
        struct.pack("<2q", 5, 5), struct.pack("<4q", 5, 5, 5, 5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("verify", ["arrival", "always"])
def test_hostile_commits(lengths: bytes, verify: str) -> None:
    made = Rig(8, verify=verify)
    made.put(chain(1, 3), b"ram")
    made.inline.drain()
    reply = made.store.put(7, made.put_call(chain(5, 3)))
    for sums in b"", b"1" * 15, b"1" * 48, bytes(100_000):
        call = calls.CommitCall(reservation=reply.reservation, lengths=lengths, checksums=sums)
        refuses(partial(made.store.commit, 7, call))
    unharmed(made)


NUMBERS = [0, -1, 1, 2**31, 2**48, 2**63, 2**64 - 1, -(2**63)]


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_that_nobody_was_given(number: int) -> None:
    made = rig()
    store = made.store
    answers: list[calls.MatchReply] = []
    for owner in 7, -1, 2**64:
        assert store.settle(owner, calls.SettleCall(match=number)).blocks == 0
        assert store.get(owner, calls.GetCall(match=number, blocks=1)).transfer == 0
        store.release(owner, calls.ReleaseCall(match=number, transfer=number))
        assert store.commit(owner, calls.CommitCall(reservation=number, lengths=b"")).units == 0
        assert store.abort(owner, calls.AbortCall(reservation=number)).units == 0
        store.wait(owner, calls.WaitCall(match=number), answers.append)
        store.end_leases(owner)
        store.disown(owner)
    assert [answer.blocks for answer in answers] == [0] * 3
    unharmed(made)


@pytest.mark.parametrize("blocks", [0, -1, 4, 2**31, 2**63])
def test_more_blocks_than_were_matched(blocks: int) -> None:
    made = rig()
    reply = made.match(chain(1, 3), owner=7)
    assert made.store.get(7, calls.GetCall(match=reply.match, blocks=blocks)).transfer == 0
    unharmed(made)


def test_what_others_hold_cannot_be_ended() -> None:
    made = rig()
    match = made.match(chain(1, 3), owner=1)
    call = made.match_call(chain(1, 3))
    transfer = made.store.get(1, calls.GetCall(match=match.match, blocks=3)).transfer
    other = made.match(chain(1, 2), owner=1)
    held = made.store.put(1, made.put_call(chain(5, 2)))
    store = made.store
    assert store.settle(7, calls.SettleCall(match=other.match)).blocks == 0
    assert store.get(7, calls.GetCall(match=other.match, blocks=2)).transfer == 0
    store.release(7, calls.ReleaseCall(match=other.match, transfer=transfer))
    lengths = struct.pack("<2q", 5, 5)
    hostile = calls.CommitCall(reservation=held.reservation, lengths=lengths)
    assert store.commit(7, hostile).units == 0
    store.abort(7, calls.AbortCall(reservation=held.reservation))
    store.disown(7)
    holds = made.stat()["holds"]
    assert (holds["matches"], holds["transfers"], holds["reservations"]) == (1, 1, 1)
    assert call.keys == KEYS
    unharmed(made)


def test_many_puts_hold_no_more_than_ram() -> None:
    made = rig()
    for number in range(200):
        made.store.put(7, made.put_call(chain(100 + number, 3), parts=TWO))
    made.sound()
    unharmed(made)


@pytest.mark.parametrize("deadline", [float("nan"), float("inf"), -1.0, 0.0])
def test_hostile_flushes_are_answered_once(deadline: float) -> None:
    made = rig()
    answers: list[calls.FlushReply] = []
    call = calls.FlushCall(namespace="one", keys=KEYS, parts=packed(ONE), deadline_s=deadline)
    refuses(lambda: made.store.flush(call, answers.append))
    unharmed(made)
    assert len(answers) <= 1


@pytest.mark.parametrize("namespace", ["", "a b", "../x", "n" * 200])
def test_a_flush_of_no_namespace_is_refused_whole(namespace: str) -> None:
    """Nothing of it is left for the write thread, which would break the store over it."""
    made = rig()
    call = calls.FlushCall(namespace=namespace, keys=KEYS, parts=packed(ONE), deadline_s=1.0)
    answers: list[calls.FlushReply] = []
    with pytest.raises(TierKVError, match="a namespace is"):
        made.store.flush(call, answers.append)
    made.put(chain(50, 2))
    made.inline.drain()
    made.store.tick()
    unharmed(made)
    assert not answers


def test_junk_below_is_a_miss() -> None:
    """Whatever comes back from a disk: it is that block's bytes, or nothing."""
    rng = random.Random(4)
    for _ in range(60):
        made = Rig(8)
        made.put(chain(1, 4), b"sound")
        made.inline.drain()
        want = made.read(chain(1, 4))
        made.put(chain(2, 8))
        made.inline.drain()
        frames = made.lower[0].medium.frames  # type: ignore[attr-defined]
        for locator in list(frames)[:4]:
            if rng.random() < 0.5:
                frames[locator] = bytes(mutated(rng, frames[locator]))[: len(frames[locator])]
        got = made.read(chain(1, 4))
        assert got == want[: len(got)]
        made.idle()
