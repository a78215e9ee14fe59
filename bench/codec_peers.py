"""Codecs of other projects, as candidates of `bench.codecs`, where they are installed.

Lossless libraries are given the block's bytes as they are; "high byte" means that numpy splits the
values, the library codes the more significant byte and the other is stored. Lossy ones are given
what they ask for, and their code's length is all that a reader needs.
"""

import importlib
import types
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

from tierkv_codecs.tensors import bits_of, bytes_of

Coder = Callable[[Any], Any]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Candidate:
    """Two functions over a block: `encode` gives the code and its length, `decode` the values."""

    name: str
    encode: Callable[[torch.Tensor], tuple[Any, int]]
    decode: Callable[[Any, torch.Tensor], None]
    lossy: bool = False


def whole(name: str, compress: Coder, decompress: Coder) -> Candidate:
    """Return a library that is given the block's bytes as they are."""

    def encode(block: torch.Tensor) -> tuple[Any, int]:
        code = compress(bytes_of(block).numpy().data)
        return code, len(code)

    def decode(code: Any, out: torch.Tensor) -> None:  # noqa: ANN401 - each library has its own
        bytes_of(out).numpy()[:] = np.frombuffer(decompress(code), np.uint8)

    return Candidate(name, encode, decode)


def high_byte(name: str, compress: Coder, decompress: Coder) -> Candidate:
    """Return a library that codes the more significant bytes; the others are stored."""

    def encode(block: torch.Tensor) -> tuple[tuple[Bytes, Any], int]:
        values = bits_of(block).reshape(-1).numpy().view("<u2")
        code = compress((values >> 8).astype(np.uint8).data)
        low = values.astype(np.uint8)
        return (low, code), low.size + len(code)

    def decode(code: tuple[Bytes, Any], out: torch.Tensor) -> None:
        values = bits_of(out).reshape(-1).numpy().view("<u2")
        values[:] = np.frombuffer(decompress(code[1]), np.uint8)
        np.left_shift(values, 8, out=values)
        np.bitwise_or(values, code[0], out=values)

    return Candidate(f"{name}, high byte", encode, decode)


def always() -> Iterator[Candidate]:
    """Yield what is installed with tierkv or Python."""
    reader = zstandard.ZstdDecompressor()
    for level in (1, -1):
        writer = zstandard.ZstdCompressor(level=level)
        yield whole(f"zstd {level}", writer.compress, reader.decompress)
        yield high_byte(f"zstd {level}", writer.compress, reader.decompress)

    def huffman(data: Any) -> bytes:  # noqa: ANN401 - any buffer
        writer = zlib.compressobj(1, zlib.DEFLATED, 15, 9, zlib.Z_HUFFMAN_ONLY)
        return writer.compress(data) + writer.flush()

    yield high_byte("zlib huffman only", huffman, zlib.decompress)


def zipnn() -> Iterator[Candidate]:
    # Its compress changes its input in place, so it is given a copy.
    for threads in (0, 1):
        nn = importlib.import_module("zipnn").ZipNN(
            input_format="byte", bytearray_dtype="bfloat16", threads=threads
        )

        def compress(data: Any, nn: Any = nn) -> Any:  # noqa: ANN401 - an untyped library
            return nn.compress(bytearray(data))

        yield whole(f"zipnn bf16, threads={threads}", compress, nn.decompress)


def lz4() -> Iterator[Candidate]:
    library = importlib.import_module("lz4.block")
    yield whole("lz4", library.compress, library.decompress)
    yield high_byte("lz4", library.compress, library.decompress)


def isal() -> Iterator[Candidate]:
    library = importlib.import_module("isal.isal_zlib")
    for level in (0, 1):
        compress = partial(library.compress, level=level)
        yield high_byte(f"isa-l deflate {level}", compress, library.decompress)


def zlib_ng() -> Iterator[Candidate]:
    library = importlib.import_module("zlib_ng.zlib_ng")
    yield high_byte("zlib-ng 1", partial(library.compress, level=1), library.decompress)


def blosc2() -> Iterator[Candidate]:
    library = importlib.import_module("blosc2")
    library.set_nthreads(1)
    for codec, level, shuffle in (("LZ4", 5, "BITSHUFFLE"), ("ZSTD", 1, "SHUFFLE")):
        compress = partial(
            library.compress2,
            typesize=2,
            codec=getattr(library.Codec, codec),
            clevel=level,
            filters=[getattr(library.Filter, shuffle)],
            nthreads=1,
        )
        decompress = partial(library.decompress2, nthreads=1)
        yield whole(f"blosc2 {codec.lower()} + {shuffle.lower()}", compress, decompress)


def lossy(name: str, encode: Coder, decode: Coder, size: Callable[[Any], int]) -> Candidate:
    """Return a library that is given float32 values [layer, K/V, head, token, dim]."""

    def encoded(block: torch.Tensor) -> tuple[Any, int]:
        code = encode(block.transpose(2, 3).float().contiguous())
        return code, size(code)

    def decoded(code: Any, out: torch.Tensor) -> None:  # noqa: ANN401
        found = torch.as_tensor(np.asarray(decode(code))).float()
        out.copy_(found.reshape(out.transpose(2, 3).shape).transpose(2, 3))

    return Candidate(name, encoded, decoded, lossy=True)


def torch_alone() -> Iterator[Candidate]:
    """Yield the few lines that everybody writes first."""

    def fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = values.abs().amax((3, 4), keepdim=True) / 448
        return (values / scale).to(torch.float8_e4m3fn), scale

    def int8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = values.abs().amax(-1, keepdim=True) / 127
        return (values / scale).round_().to(torch.int8), scale.half()

    def back(code: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return code[0].float() * code[1].float()

    def size(code: tuple[torch.Tensor, ...]) -> int:
        return sum(part.nbytes for part in code)

    yield lossy("torch fp8, scale per head", fp8, back, size)
    yield lossy("torch int8, scale per token-head", int8, back, size)


def lifeboat() -> Iterator[Candidate]:
    base = importlib.import_module("lifeboat_cache.compress.base")
    importlib.import_module("lifeboat_cache.compress")
    for name in ("fp8", "kvtc", "turboquant", "lbq"):
        codec = base.create_codec(name, types.SimpleNamespace())

        def encode(values: torch.Tensor, codec: Any = codec) -> Any:  # noqa: ANN401
            return codec.encode(values.numpy())

        yield lossy(f"lifeboat {name}", encode, codec.decode, len)


def pyturboquant_cpu() -> Iterator[Candidate]:
    library = importlib.import_module("pyturboquant_cpu")

    def size(code: Any) -> int:  # noqa: ANN401
        fields = vars(code).values() if hasattr(code, "__dict__") else code
        arrays = [one for one in fields if isinstance(one, np.ndarray | bytes | bytearray)]
        return sum(one.nbytes if isinstance(one, np.ndarray) else len(one) for one in arrays)

    def encode(values: torch.Tensor) -> Any:  # noqa: ANN401
        return library.quantize_mse(values.numpy().reshape(-1, values.shape[-1]), 4)

    yield lossy("pyturboquant-cpu mse 4 bit", encode, library.dequantize_mse, size)


def tierkv_core() -> Iterator[Candidate]:
    """Yield another project's codec, which has a name like ours."""
    library = importlib.import_module("tierkv_core")

    def encode(values: torch.Tensor) -> bytes:
        return bytes(library.TurboQuant(values.shape[-1]).encode(values.numpy().tobytes()))

    def decode(code: bytes) -> Any:  # noqa: ANN401
        return np.frombuffer(bytes(library.TurboQuant(64).decode(code)), np.float32)

    yield lossy("tierkv-core (PyPI) int8", encode, decode, len)


def lmcache() -> Iterator[Candidate]:
    """Yield LMCache's CacheGen, with the bins that it has for models of 7 and 8 billion weights."""
    basics, encoder, decoder = (
        importlib.import_module(f"lmcache.storage_backend.serde.cachegen_{name}")
        for name in ("basics", "encoder", "decoder")
    )

    def bins(layers: int, fine: int) -> torch.Tensor:
        return torch.where(torch.arange(layers) < fine, 32.0, 16.0)

    def encode(values: torch.Tensor) -> bytes:
        layers, _, _, tokens, _ = values.shape
        sides = bins(layers, 10), bins(layers, 2)
        kv = values.transpose(2, 3).contiguous()
        return bytes(encoder.encode_function(kv, None, *sides, tokens).to_bytes())

    def decode(code: bytes) -> torch.Tensor:
        found = basics.CacheGenGPUEncoderOutput.from_bytes(code)
        layers, tokens, _ = found.max_tensors_key.shape
        room = torch.zeros((tokens, found.cdf.shape[0] * found.cdf.shape[1]), dtype=torch.uint8)
        coded = decoder.decode_function_gpu(found.cdf, found.data_chunks, layers, tokens, room)
        scales = found.max_tensors_key, found.max_tensors_value
        sides = [
            decoder.do_dequantize(side, bins(layers, fine), scale)
            for side, fine, scale in zip(coded, (10, 2), scales, strict=True)
        ]
        whole = torch.stack(sides, 1).view(layers, 2, tokens, found.num_heads, found.head_size)
        return whole.transpose(2, 3)

    yield lossy("LMCache CacheGen", encode, decode, len)


OPTIONAL = (zipnn, lz4, isal, zlib_ng, blosc2, lifeboat, pyturboquant_cpu, tierkv_core, lmcache)


def peers() -> tuple[list[Candidate], list[str]]:
    """Return the candidates that can be measured here, and the libraries that cannot."""
    found, absent = [*always(), *torch_alone()], []
    for make in OPTIONAL:
        try:
            found.extend(make())
        except ImportError:
            absent.append(make.__name__)
    return found, absent
