"""Laws of frames: they read back, any flipped bit shows, prefixes are frames, lies cost nothing."""

import itertools
import struct
import tracemalloc

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.frames import make_frame
from tierkv import frame
from tierkv.fidelity import Fidelity
from tierkv.frame import Header, Refusal
from tierkv.part import Part

U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))


def of_length(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    segments = draw(st.lists(st.integers(0, 1 << 22), min_size=1, max_size=128))
    sealed = draw(st.booleans())
    checksum = of_length(16)
    return Header(
        codec_id=draw(U16),
        flags=draw(U16) & ~frame.SEALED,
        fidelity=draw(st.sampled_from(Fidelity)),
        tokens=draw(U32),
        position=draw(U32),
        generation=draw(U64),
        fingerprint=draw(of_length(32)),
        key=draw(of_length(32)),
        namespace=draw(of_length(16)),
        artifact=draw(of_length(32)),
        part=Part(*draw(st.tuples(*[U16] * 5))),
        raw_bytes=draw(st.integers(sum(segments), 2**64 - 1)),
        epoch=draw(U64),
        segments=tuple(segments),
        checksums=tuple(draw(checksum) for _ in segments) if sealed else (),
    )


@given(headers(), st.binary(max_size=64))
def test_headers_read_back_whatever_follows(header: Header, rest: bytes) -> None:
    assert frame.parse(frame.pack(header) + rest) == header


@given(headers(), st.data())
def test_any_flipped_bit_of_a_header_is_noticed(header: Header, data: st.DataObject) -> None:
    packed = bytearray(frame.pack(header))
    bit = data.draw(st.integers(0, len(packed) * 8 - 1))
    packed[bit // 8] ^= 1 << bit % 8
    assert isinstance(frame.parse(packed), Refusal)


def test_every_bit_of_one_header_is_covered() -> None:
    packed = bytearray(make_frame(1, segments=3).data[:320])
    for bit in range(len(packed) * 8):
        packed[bit // 8] ^= 1 << bit % 8
        assert isinstance(frame.parse(packed), Refusal), bit
        packed[bit // 8] ^= 1 << bit % 8
    assert isinstance(frame.parse(packed), Header)


@given(st.integers(256, 9000), st.integers(1, 8), st.data())
def test_any_flipped_bit_of_a_sealed_payload_is_noticed(
    payload: int, segments: int, data: st.DataObject
) -> None:
    sample = make_frame(1, nbytes=frame.header_bytes(segments) + payload, segments=segments)
    broken = bytearray(sample.data)
    bit = data.draw(st.integers(sample.header.header_bytes * 8, len(broken) * 8 - 1))
    broken[bit // 8] ^= 1 << bit % 8
    assert frame.parse(broken) == sample.header
    assert not frame.verify(sample.header, [broken])


@given(st.integers(0, 5000), st.integers(1, 12), st.data())
def test_any_prefix_of_segments_is_a_frame(
    payload: int, segments: int, data: st.DataObject
) -> None:
    sample = make_frame(1, nbytes=frame.header_bytes(segments) + payload, segments=segments)
    header = frame.truncate(sample.header, data.draw(st.integers(1, segments)))
    start = sample.header.header_bytes
    kept = sample.data[start : start + header.payload_bytes]
    shorter = bytearray(frame.pack(header) + kept)
    assert frame.parse(shorter) == header
    assert frame.verify(header, [shorter])
    assert header.key == sample.header.key


@given(st.lists(st.integers(0, 5000), max_size=6), st.integers(0, 9), st.data())
def test_a_frame_is_the_same_in_any_pieces(
    cuts: list[int], segments: int, data: st.DataObject
) -> None:
    sample = make_frame(2, nbytes=7000, segments=segments + 1)
    places = sorted({min(cut, 7000) for cut in cuts} | {0, 7000})
    pieces = [bytearray(sample.data[a:b]) for a, b in itertools.pairwise(places)]
    assert frame.verify(sample.header, pieces)


HOSTILE = st.one_of(
    st.binary(max_size=5000),
    st.binary(min_size=208, max_size=5000).map(lambda data: b"TKVF\1\0" + data[6:]),
)


@given(HOSTILE)
def test_junk_is_refused(data: bytes) -> None:
    assert isinstance(frame.parse(data), Refusal)


@given(
    st.lists(st.tuples(st.integers(4, 319), of_length(8)), min_size=1, max_size=6),
)
def test_lies_under_a_sound_checksum_cost_no_memory(edits: list[tuple[int, bytes]]) -> None:
    """Who can make the checksum can write any length; none is believed before it is bounded."""
    data = bytearray(make_frame(1, segments=3).data[:320])
    for at, value in edits:
        data[at : at + 8] = value
    del data[320:]
    struct.pack_into("<Q", data, 200, 0)
    size = min(max(struct.unpack_from("<H", data, 6)[0], 208), len(data))
    struct.pack_into("<Q", data, 200, xxhash.xxh3_64_intdigest(data[:size]))
    tracemalloc.start()
    try:
        parsed = frame.parse(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    if isinstance(parsed, Header):
        assert len(parsed.segments) <= frame.MAX_SEGMENTS
        assert parsed.payload_bytes <= frame.MAX_PAYLOAD_BYTES
        assert parsed.payload_bytes <= frame.payload_bound(parsed.raw_bytes)
        assert not frame.verify(parsed, [data])


@given(
    segments=st.integers(1, 9),
    kept=st.integers(1, 9),
    cuts=st.lists(st.sampled_from([4096, 8192, 12_288]), max_size=5),
    steps=st.lists(st.integers(1, 40_000), max_size=12),
    flip=st.none() | st.integers(0, 1 << 20),
)
def test_a_frame_watched_while_it_arrives_is_judged_as_afterwards(
    segments: int, kept: int, cuts: list[int], steps: list[int], flip: int | None
) -> None:
    """Also where only the first segments are there, and where it comes a second time."""
    sample = make_frame(3, nbytes=30_000, segments=segments)
    head = sample.header.header_bytes
    nbytes = head + sum(sample.header.segments[:kept])
    pieces = sample.pieces(cuts)
    if flip is not None:
        at = head + flip % (30_000 - head)
        (view,) = frame.cut(pieces, at, 1)
        view[0] ^= 1
    header = frame.shortened(sample.header, nbytes)
    assert header is not None
    watch = frame.Watch(pieces)
    assert watch.verified(header) is None
    for stop in [*sorted(min(step, nbytes) for step in steps), nbytes, 1000, nbytes]:
        watch.landed(stop)
    assert watch.verified(header) is frame.verify(header, pieces)
    watch.landed(nbytes // 2)
    assert watch.verified(header) is None


def test_a_watch_says_nothing_of_what_is_no_frame() -> None:
    sample = make_frame(3, nbytes=30_000)
    watch = frame.Watch([memoryview(bytearray(32_768))])
    watch.landed(30_000)
    assert watch.verified(sample.header) is None
    unsealed = make_frame(3, nbytes=30_000, seal=False)
    watch = frame.Watch(unsealed.pieces())
    watch.landed(30_000)
    assert watch.verified(unsealed.header) is False
