"""Lossless coding of real KV: `python -m bench.lossless [--json] [--tokens N] [--rounds N]`.

Every candidate encodes and decodes the same block: bf16 KV of an English prompt from the small real
model, in canonical order. Speeds are raw bytes per second of CPU time of the whole process, so a
library's own threads are counted; candidates take turns within a round, so that a busy machine
slows all of them; the table gives the median over the rounds and the quartiles. "high byte" means
that numpy splits the values, the library codes the more significant byte and the other is stored.
Libraries that are not installed are shown as absent; they are:

    pip install zipnn lz4 isal zlib-ng blosc2
"""

import argparse
import importlib
import json
import platform
import pydoc_data.topics
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

from tierkv.part import Part
from tierkv_codecs import CODECS, Place
from tierkv_codecs.tensors import bits_of, bytes_of
from tierkv_connectors.models import smollm2

Coder = Callable[[Any], Any]
Bytes = NDArray[np.uint8]

NOWHERE = Place((), Part(0, 0, 1, 0, 1), 0)
"""Exact codecs do not look at it."""


@dataclass(frozen=True)
class Candidate:
    """Two functions over a block: `encode` gives the code and its length, `decode` the values."""

    name: str
    encode: Callable[[torch.Tensor], tuple[Any, int]]
    decode: Callable[[Any, torch.Tensor], None]


@dataclass(frozen=True)
class Result:
    """Ratio, and GB of raw bytes per CPU second: lower quartile, median, upper quartile."""

    name: str
    ratio: float
    encode: tuple[float, float, float]
    decode: tuple[float, float, float]


def real_kv(model: Path, tokens: int) -> torch.Tensor:
    """Return the bf16 KV of an English prompt as [layer, K/V, token, head, dim]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    text = "\n".join(pydoc_data.topics.topics[name] for name in ("assignment", "objects", "class"))
    ids = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt").input_ids
    if ids.shape[1] < tokens:
        raise SystemExit(f"the prompt has only {ids.shape[1]} tokens; ask for fewer")
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    cache = DynamicCache(config=network.config)
    with torch.inference_mode():
        network(ids[:, :tokens], cache=cache, logits_to_keep=1)
    cached: list[Any] = cache.layers  # whose declared type has layers without keys, too
    layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cached]
    return torch.stack(layers).transpose(2, 3).contiguous()


def own(name: str) -> Candidate:
    """Return one of our codecs."""
    codec = CODECS.named(name)

    def encode(block: torch.Tensor) -> tuple[torch.Tensor, int]:
        out = torch.empty(codec.bound(block.numel() * block.itemsize), dtype=torch.uint8)
        length = sum(codec.encode(block, out, NOWHERE))
        return out[:length], length

    def decode(code: torch.Tensor, out: torch.Tensor) -> None:
        codec.decode(code, (code.numel(),), out, NOWHERE)

    return Candidate(f"tierkv {name}", encode, decode)


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
    yield own("raw")
    yield own("lossless")
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


OPTIONAL = (zipnn, lz4, isal, zlib_ng, blosc2)


def candidates() -> tuple[list[Candidate], list[str]]:
    """Return the candidates that can be measured here, and the libraries that cannot."""
    found, absent = list(always()), []
    for make in OPTIONAL:
        try:
            found.extend(make())
        except ImportError:
            absent.append(make.__name__)
    return found, absent


def measure(block: torch.Tensor, found: list[Candidate], rounds: int) -> list[Result]:
    """Measure all candidates in turn, `rounds` times after one for warming up."""
    gigabytes = block.numel() * block.itemsize / 1e9
    out = torch.empty_like(block)
    times: dict[str, tuple[list[float], list[float]]] = {one.name: ([], []) for one in found}
    sizes: dict[str, int] = {}
    for turn in range(rounds + 1):
        for one in found:
            start = time.process_time()
            code, sizes[one.name] = one.encode(block)
            middle = time.process_time()
            one.decode(code, out)
            end = time.process_time()
            if turn == 0:
                assert torch.equal(bits_of(out), bits_of(block)), one.name
                bits_of(out).zero_()
                continue
            times[one.name][0].append(gigabytes / max(middle - start, 1e-9))
            times[one.name][1].append(gigabytes / max(end - middle, 1e-9))
    return [
        Result(one.name, gigabytes * 1e9 / sizes[one.name], *map(quartiles, times[one.name]))
        for one in found
    ]


def quartiles(speeds: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(speeds, n=4)
    return round(low, 3), round(middle, 3), round(high, 3)


def machine() -> dict[str, str]:
    """Say what was measured, and where."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "commit": commit.stdout.strip(),
        "cpu": cpu[0].partition(": ")[2] if cpu else platform.machine(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "numpy", "zstandard")},
    }


def main() -> int:
    arguments = argparse.ArgumentParser(description="Measure lossless codecs on real KV.")
    arguments.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments.add_argument("--tokens", type=int, default=256)
    arguments.add_argument("--rounds", type=int, default=25)
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    block = real_kv(smollm2(), chosen.tokens)
    found, absent = candidates()
    results = measure(block, found, max(chosen.rounds, 2))
    if chosen.json:
        rows = [asdict(result) for result in results]
        size = block.numel() * block.itemsize
        print(json.dumps({**machine(), "raw_bytes": size, "results": rows, "absent": absent}))
        return 0
    print(f"{tuple(block.shape)} bf16, {machine()}")
    print(f"{'candidate':28} {'ratio':>6} {'encode GB/s':>20} {'decode GB/s':>20}")
    for result in sorted(results, key=lambda one: -one.ratio):
        speeds = [f"{at[1]:.2f} ({at[0]:.2f}-{at[2]:.2f})" for at in (result.encode, result.decode)]
        print(f"{result.name:28} {result.ratio:6.3f} {speeds[0]:>20} {speeds[1]:>20}")
    for name in absent:
        print(f"{name:28} absent")
    return 0


if __name__ == "__main__":
    sys.exit(main())
