"""Headers say what a frame is, and everything that is not one is refused by its kind."""

import random
import struct
from typing import Any

import msgspec
import pytest
import xxhash

from tests.frames import make_frame
from tierkv import frame
from tierkv.errors import TierKVError
from tierkv.fidelity import Fidelity
from tierkv.frame import Header, Refusal
from tierkv.part import Part

HEADER = Header(
    codec_id=2, flags=frame.DERIVED, fidelity=Fidelity.SAFE, tokens=64, position=128, generation=3,
    fingerprint=b"f" * 32, key=b"k" * 32, namespace=b"n" * 16, artifact=b"a" * 32,
    part=Part(1, 2, 3, 4, 5), raw_bytes=10_000, epoch=77, segments=(5000, 100),
)  # fmt: skip


def changed(**fields: Any) -> Header:
    return msgspec.structs.replace(HEADER, **fields)


def edited(*edits: tuple[int, str, int]) -> bytes:
    """Return a header with fields overwritten and its checksum made again."""
    data = bytearray(frame.pack(HEADER))
    for offset, code, value in edits:
        struct.pack_into(code, data, offset, value)
    struct.pack_into("<Q", data, 200, 0)
    struct.pack_into("<Q", data, 200, xxhash.xxh3_64_intdigest(data))
    return bytes(data)


def test_a_header_reads_back() -> None:
    data = frame.pack(HEADER)
    assert frame.parse(data) == HEADER
    assert frame.parse(data + bytes(100)) == HEADER
    assert len(data) == HEADER.header_bytes == frame.header_bytes(2) == 256
    assert HEADER.payload_bytes == 5100
    assert HEADER.frame_bytes == 5356


def test_the_byte_map_is_the_one_of_the_document() -> None:
    """docs/FORMAT.md, section 3."""
    data = frame.pack(changed(checksums=(b"1" * 16, b"2" * 16)))
    assert data[:4] == b"TKVF"
    assert struct.unpack_from("<HHHHBBH", data, 4) == (
        1, 256, 2, frame.DERIVED | frame.SEALED, 2, 0, 2,
    )  # fmt: skip
    assert struct.unpack_from("<IIQ", data, 16) == (64, 128, 3)
    assert data[32:64] == b"f" * 32
    assert data[64:96] == b"k" * 32
    assert data[96:112] == b"n" * 16
    assert data[112:144] == b"a" * 32
    assert struct.unpack_from("<5H", data, 144) == (1, 2, 3, 4, 5)
    assert data[154:160] == bytes(6)
    assert struct.unpack_from("<QQ", data, 160) == (10_000, 5100)
    assert data[176:192] == bytes(16)
    assert struct.unpack_from("<Q", data, 192) == (77,)
    assert struct.unpack_from("<Q16s", data, 208) == (5000, b"1" * 16)
    assert struct.unpack_from("<Q16s", data, 232) == (100, b"2" * 16)


@pytest.mark.parametrize(
    ("segments", "size"), [(1, 256), (2, 256), (3, 320), (4, 320), (5, 384), (128, 3328)]
)
def test_headers_take_multiples_of_64_bytes(segments: int, size: int) -> None:
    assert frame.header_bytes(segments) == size <= frame.MAX_HEADER_BYTES
    header = changed(segments=(1,) * segments)
    assert len(frame.pack(header)) == size
    assert frame.parse(frame.pack(header)) == header


@pytest.mark.parametrize("segments", [(), (1,) * 129, (frame.MAX_PAYLOAD_BYTES, 1)])
def test_what_is_out_of_bounds_is_not_packed(segments: tuple[int, ...]) -> None:
    with pytest.raises(TierKVError, match="segments"):
        frame.pack(changed(segments=segments))


REFUSED: dict[str, tuple[bytes, Refusal]] = {
    "nothing": (b"", Refusal.CORRUPT),
    "zeros": (bytes(4096), Refusal.CORRUPT),
    "a short header": (frame.pack(HEADER)[:207], Refusal.CORRUPT),
    "a header cut in its segments": (frame.pack(HEADER)[:240], Refusal.CORRUPT),
    "another magic": (b"TKVG" + frame.pack(HEADER)[4:], Refusal.CORRUPT),
    "a later version": (edited((4, "<H", 2)), Refusal.UNKNOWN),
    "version 0": (edited((4, "<H", 0)), Refusal.UNKNOWN),
    "a class that is not known": (edited((12, "<B", 9)), Refusal.UNKNOWN),
    "class 0": (edited((12, "<B", 0)), Refusal.UNKNOWN),
    "the zero byte": (edited((13, "<B", 1)), Refusal.CORRUPT),
    "no segments": (edited((14, "<H", 0)), Refusal.CORRUPT),
    "too many segments": (edited((14, "<H", 129)), Refusal.CORRUPT),
    "a size that does not fit its segments": (edited((6, "<H", 320)), Refusal.CORRUPT),
    "a sum of segments that is not the payload": (edited((168, "<Q", 5101)), Refusal.CORRUPT),
    "more payload than any codec makes": (edited((160, "<Q", 900)), Refusal.CORRUPT),
    "a segment of 2**64 - 1": (edited((208, "<Q", 2**64 - 1)), Refusal.CORRUPT),
    "a wrong checksum": (frame.pack(HEADER)[:200] + bytes(56), Refusal.CORRUPT),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_frame_is_refused_by_its_kind(name: str) -> None:
    data, refusal = REFUSED[name]
    assert frame.parse(data) is refusal


def test_segments_that_add_up_in_64_bits_only_are_refused() -> None:
    data = edited((208, "<Q", 2**64 - 100), (232, "<Q", 5200))
    assert frame.parse(data) is Refusal.CORRUPT


def test_flags_of_later_releases_come_through() -> None:
    header = frame.parse(edited((10, "<H", 0x8000 | frame.LOSSY)))
    assert isinstance(header, Header)
    assert header.flags == 0x8000 | frame.LOSSY


@pytest.mark.parametrize("segments", [1, 3, 128])
def test_a_seal_holds_over_any_pieces(segments: int) -> None:
    sample = make_frame(3, nbytes=60_000, segments=segments)
    for cuts in [], [4096], [8192, 4096]:
        assert frame.verify(sample.header, sample.pieces(cuts))
    assert len(sample.header.checksums) == segments


def test_a_seal_breaks_with_its_payload() -> None:
    sample = make_frame(4, nbytes=60_000, segments=3)
    for at in 320, 30_000, 59_999:
        data = bytearray(sample.data)
        data[at] ^= 1
        assert not frame.verify(sample.header, [data])
    assert not frame.verify(sample.header, [bytearray(sample.data[:-1])])
    assert not frame.verify(make_frame(4, seal=False).header, [bytearray(make_frame(4).data)])


def test_any_run_of_leading_segments_is_a_frame() -> None:
    sample = make_frame(5, nbytes=50_000, segments=4)
    for kept in 1, 2, 3, 4:
        header = frame.truncate(sample.header, kept)
        payload = sample.data[sample.header.header_bytes :][: header.payload_bytes]
        data = bytearray(frame.pack(header) + payload)
        assert frame.parse(data) == header
        assert frame.verify(header, [data])


def test_bytes_behind_a_frame_do_not_matter() -> None:
    sample = make_frame(6, nbytes=5000)
    assert frame.verify(sample.header, [bytearray(sample.data + b"rest")])


def test_content_covers_what_names_the_content_and_no_checksum() -> None:
    sealed, unsealed = make_frame(7), make_frame(7, seal=False)
    assert sealed.data[frame.CONTENT] == unsealed.data[frame.CONTENT]
    for other in make_frame(8), make_frame(7, generation=1), make_frame(7, nbytes=10_001):
        assert other.data[frame.CONTENT] != sealed.data[frame.CONTENT]


def test_cut_takes_a_run_over_pieces() -> None:
    pieces = [bytearray(b"abc"), bytearray(b""), bytearray(b"defgh"), bytearray(b"i")]
    for start in range(10):
        for length in range(11):
            got = b"".join(frame.cut(pieces, start, length))
            assert got == b"abcdefghi"[start : start + length]


def test_digest_is_of_the_bytes_and_not_of_their_pieces() -> None:
    data = bytearray(range(256)) * 8193
    assert frame.digest([data]) == xxhash.xxh3_128_digest(bytes(data))
    assert frame.digest([data[:7], data[7:]]) == frame.digest([data])
    assert frame.digest([]) == xxhash.xxh3_128_digest(b"")


@pytest.mark.parametrize("sealed", [False, True])
def test_a_stamp_packs_what_pack_does(*, sealed: bool) -> None:
    rng = random.Random(7)

    def header(number: int) -> frame.Header:
        length = rng.randrange(1, 1 << 20)
        return frame.Header(
            codec_id=2, flags=frame.DERIVED, fidelity=Fidelity.SAFE, tokens=64,
            position=number * 64, generation=1 << 60, fingerprint=bytes(range(32)),
            key=rng.randbytes(32), namespace=bytes(range(16)), artifact=rng.randbytes(32),
            part=Part(number, 0, 2, 1, 9), raw_bytes=1 << 20, epoch=1 << 62, segments=(length,),
            checksums=(rng.randbytes(16),) if sealed else (),
        )  # fmt: skip

    first = header(0)
    stamp = frame.Stamp(first)
    for number in range(1, 20):
        other = msgspec.structs.replace(header(number), artifact=first.artifact)
        packed = stamp.pack(
            other.key, other.part.pack(), other.position, other.raw_bytes, other.segments,
            other.checksums[0] if sealed else b"",
        )  # fmt: skip
        assert packed == frame.pack(other)
        assert frame.parse(packed) == other
