"""Pages: what a block costs between an engine's memory and the arena: `python -m bench.pages`.

A block of SmolLM2-135M (30 layers, 3 heads of 64, 128 tokens) as vLLM's attention on a CPU has it,
keys as [dim, token]. Contenders take turns over blocks that no cache holds, in CPU time of the one
thread: torch's `copy_` of the same bytes in order, torch's own copies of the views, and those of
the device.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.timing import machine, spread, take_turns
from tierkv_connectors.device.host import HostDevice
from tierkv_connectors.views import Piece, Views, gather, scatter

LAYERS, HEADS, DIM, TOKENS = 30, 3, 64, 128
ENGINE_TOKENS = (32, 128)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BLOCKS = 48
TURNS, WARM, SEED = 200, 20, 11


class Memory:
    """An engine's memory, and as many blocks in order."""

    def __init__(self, dtype: torch.dtype, engine_tokens: int) -> None:
        rows = BLOCKS * TOKENS // engine_tokens
        kv = torch.randn(LAYERS, rows, HEADS, 2, engine_tokens * DIM).to(dtype)
        keys = kv[:, :, :, 0].view(LAYERS, rows, HEADS, DIM, engine_tokens)
        values = kv[:, :, :, 1].view(LAYERS, rows, HEADS, engine_tokens, DIM)
        self._keys, self._values = keys.permute(0, 1, 4, 2, 3), values.transpose(2, 3)
        self._rows = TOKENS // engine_tokens
        self.blocks = torch.randn(BLOCKS, LAYERS, 2, TOKENS, HEADS, DIM).to(dtype)
        self.others = self.blocks.clone()

    def views(self, number: int) -> Views:
        rows = slice(number * self._rows, (number + 1) * self._rows)
        whole = slice(0, LAYERS), slice(0, TOKENS)
        return [Piece(*whole, self._keys[:, rows], self._values[:, rows])]


def contenders(memory: Memory, draw: random.Random) -> dict[str, Callable[[], float]]:
    lane, blocks = HostDevice().lane(memory.blocks[0].nbytes), memory.blocks

    def timed(copy: Callable[[Views, int], object]) -> Callable[[], float]:
        def run() -> float:
            number = draw.randrange(BLOCKS)
            views = memory.views(number)
            started = time.thread_time()
            copy(views, number)
            return time.thread_time() - started

        return run

    return {
        "a plain copy": timed(lambda _, number: blocks[number].copy_(memory.others[number])),
        "save, torch": timed(lambda views, number: gather(views, blocks[number])),
        "save": timed(lambda views, number: lane.gather(views, blocks[number])),
        "load, torch": timed(lambda views, number: scatter(blocks[number], views)),
        "load": timed(lambda views, number: lane.scatter(blocks[number], views)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.pages", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line for programs")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rows = list[dict[str, Any]]()
    for name, dtype in DTYPES.items():
        for tokens in ENGINE_TOKENS:
            memory = Memory(dtype, tokens)
            turns = take_turns(contenders(memory, random.Random(SEED)), TURNS, WARM, SEED)
            for what, seconds in turns.items():
                low, median, high = (round(one * 1e3, 3) for one in spread(seconds))
                rows.append({
                    "what": what, "dtype": name, "engine_tokens": tokens, "turns": TURNS,
                    "block_bytes": memory.blocks[0].nbytes, "ms": median, "iqr": [low, high],
                })  # fmt: skip
    if asked.json:
        print(json.dumps({**machine(), "rows": rows}))
        return 0
    for row in rows:
        low, high = row["iqr"]
        where = f"{row['dtype']}, {row['engine_tokens']} tokens"
        print(f"{where}: {row['what']}: {row['ms']} ms ({low} to {high})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
