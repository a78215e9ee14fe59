"""Codecs on real KV: `python -m bench.codecs [--json] [--artifact FILE]`.

Every codec of tierkv and of the other projects that are installed encodes and decodes the same
block: bf16 KV of an English prompt from the small real model, in canonical order, behind its first
128 tokens. Speeds are raw bytes per second of CPU time of the whole process on one torch thread, so
a library's own threads are counted; our codecs write into memory that is there, as a store's is,
and others, which make memory of their own, do that; candidates take turns within a round, so that a
busy machine slows all of them; the table gives the median over the rounds and the quartiles. Errors
are relative L2 norms of keys, of values, and of softmax(q K^T / sqrt(dim)) V with the block's last
64 keys as stand-in queries. What quality costs answers is measured by `tierkv eval`, not here.

Libraries that are not installed are shown as absent. `bench/peers.sh lmcache codecs` makes an
environment that has them all; its Python (`~/.cache/tierkv/peers/codecs/bin/python`) then runs
this. LMCache's KIVI is none: it gives back its input.
"""

import argparse
import json
import platform
import pydoc_data.topics
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bench.codec_peers import Candidate, peers
from tierkv.identity import LayerSpec
from tierkv.part import Part
from tierkv_codecs import CODECS, Codec, Place
from tierkv_codecs.kvtc import codecs_of
from tierkv_codecs.kvtc_artifact import read
from tierkv_codecs.tensors import bits_of
from tierkv_connectors.identities import layer_specs
from tierkv_connectors.models import smollm2

POSITION = 128
"""Of the block's first token: no sinks, which lossy codecs store as they are."""
QUERIES = 64


@dataclass(frozen=True)
class Result:
    """Ratio, GB of raw bytes per CPU second (quartiles), and relative errors."""

    name: str
    lossy: bool
    ratio: float
    encode_gbps: tuple[float, float, float]
    decode_gbps: tuple[float, float, float]
    k_error: float
    v_error: float
    attention_error: float


def real_kv(model: Path, tokens: int) -> torch.Tensor:
    """Return the bf16 KV of an English prompt as [layer, K/V, token, head, dim]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    names = ("assignment", "objects", "class", "typesseq", "specialnames")
    text = "\n".join(pydoc_data.topics.topics[name] for name in names)
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


def layers_of(model: Path) -> tuple[LayerSpec, ...]:
    """Return what the model's config says of its layers."""
    from transformers import AutoConfig

    return layer_specs(AutoConfig.from_pretrained(model))


def own(codec: Codec, layers: tuple[LayerSpec, ...], block: torch.Tensor) -> Candidate:
    """Return one of our codecs, which writes where a store's memory already lies."""
    place = Place(layers, Part(0, 0, len(layers), 0, layers[0].kv_heads), POSITION)
    out = torch.zeros(codec.bound(block.numel() * block.itemsize), dtype=torch.uint8)

    def encode(block: torch.Tensor) -> tuple[Any, int]:
        segments = codec.encode(block, out, place)
        return (out[: sum(segments)], segments), sum(segments)

    def decode(code: tuple[torch.Tensor, tuple[int, ...]], out: torch.Tensor) -> None:
        codec.decode(*code, out, place)

    return Candidate(f"tierkv {codec.name}", encode, decode, codec.lossy)


def measure(block: torch.Tensor, found: list[Candidate], rounds: int) -> list[Result]:
    """Measure all candidates in turn, `rounds` times after one for warming up."""
    gigabytes = block.numel() * block.itemsize / 1e9
    times: dict[str, tuple[list[float], list[float]]] = {one.name: ([], []) for one in found}
    sizes: dict[str, int] = {}
    errors: dict[str, tuple[float, float, float]] = {}
    out = torch.empty_like(block)
    for turn in range(rounds + 1):
        for one in found:
            start = time.process_time()
            code, sizes[one.name] = one.encode(block)
            middle = time.process_time()
            one.decode(code, out)
            end = time.process_time()
            if turn == 0:
                assert one.lossy or torch.equal(bits_of(out), bits_of(block)), one.name
                errors[one.name] = errors_of(out, block)
                bits_of(out).zero_()
                continue
            times[one.name][0].append(gigabytes / max(middle - start, 1e-9))
            times[one.name][1].append(gigabytes / max(end - middle, 1e-9))
    results = []
    for one in found:
        encode, decode = (quartiles(side) for side in times[one.name])
        ratio = gigabytes * 1e9 / sizes[one.name]
        results.append(Result(one.name, one.lossy, ratio, encode, decode, *errors[one.name]))
    return results


def errors_of(out: torch.Tensor, block: torch.Tensor) -> tuple[float, float, float]:
    """Return the relative errors of keys, values and attention."""
    found, exact = out.float(), block.float()
    pairs = [(found[:, 0], exact[:, 0]), (found[:, 1], exact[:, 1])]
    queries = exact[:, 0, -QUERIES:].transpose(1, 2)
    pairs.append((attention(queries, found), attention(queries, exact)))
    keys, values, attended = (round(float((a - b).norm() / b.norm()), 5) for a, b in pairs)
    return keys, values, attended


def attention(queries: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    keys, values = kv[:, 0].transpose(1, 2), kv[:, 1].transpose(1, 2)
    weights = torch.softmax(queries @ keys.transpose(2, 3) / keys.shape[3] ** 0.5, -1)
    return weights @ values


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
        **{name: metadata.version(name) for name in ("torch", "numpy", "numba", "zstandard")},
    }


def main() -> int:
    arguments = argparse.ArgumentParser(description="Measure codecs on real KV.")
    arguments.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments.add_argument("--tokens", type=int, default=256, help="of the block")
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--artifact", type=Path, help="of `tierkv calibrate`: kvtc codecs, too")
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    model = smollm2()
    block = real_kv(model, POSITION + chosen.tokens)[:, :, POSITION:].contiguous()
    layers = layers_of(model)
    others, absent = peers()
    ours = [*CODECS.all(), *(codecs_of(read(chosen.artifact)) if chosen.artifact else ())]
    found = [*(own(codec, layers, block) for codec in ours), *others]
    results = measure(block, found, max(chosen.rounds, 2))
    if chosen.json:
        rows = [asdict(result) for result in results]
        size = block.numel() * block.itemsize
        print(json.dumps({**machine(), "raw_bytes": size, "results": rows, "absent": absent}))
        return 0
    print(f"{tuple(block.shape)} bf16, {machine()}")
    print(
        f"{'candidate':32} {'ratio':>6} {'encode GB/s':>20} {'decode GB/s':>20}"
        f" {'K err':>7} {'V err':>7} {'attn':>7}"
    )
    for result in sorted(results, key=lambda one: -one.ratio):
        speeds = [
            f"{at[1]:.2f} ({at[0]:.2f}-{at[2]:.2f})"
            for at in (result.encode_gbps, result.decode_gbps)
        ]
        errors = (result.k_error, result.v_error, result.attention_error)
        lost = " ".join(f"{error:7.4f}" for error in errors) if result.lossy else "exact"
        print(f"{result.name:32} {result.ratio:6.3f} {speeds[0]:>20} {speeds[1]:>20} {lost}")
    for name in absent:
        print(f"{name:32} absent")
    return 0


if __name__ == "__main__":
    sys.exit(main())
