"""LMCache's in-process engine, as a peer; the Python of its own environment runs it (`peers.py`).

    python peer_lmcache.py cpu|disk BLOCK_BYTES BLOCKS FOLDER

The engine's memory is a CPU tensor and one strided copy a block moves it, on one torch thread: the
least that LMCache can do here. A line "put" or "get" on standard input is answered with seconds.
"""

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_DISABLE_BANNER": "1",
    "PYTHONHASHSEED": "0",
}
TOKENS = 256
HEADS, HEAD_DIM = 4, 128
FOUND_S = 60.0


def connector(layers: int) -> Any:  # noqa: ANN401 - a class of a library without types
    """Return the engine side: [K/V, layer, token, head * dim] in CPU memory."""
    import torch

    base = importlib.import_module("lmcache.v1.gpu_connector").GPUConnectorInterface

    class Copies(base):  # type: ignore[misc,valid-type]
        def get_shape(self, tokens: int) -> Any:  # noqa: ANN401
            return torch.Size([2, layers, tokens, HEADS * HEAD_DIM])

        def from_gpu(self, memory: Any, start: int, end: int, **more: Any) -> None:  # noqa: ANN401
            memory.tensor.copy_(more["kvcaches"][:, :, start:end])

        def to_gpu(self, memory: Any, start: int, end: int, **more: Any) -> None:  # noqa: ANN401
            more["kvcaches"][:, :, start:end].copy_(memory.tensor)

        def batched_from_gpu(self, memories: Any, starts: Any, ends: Any, **more: Any) -> None:  # noqa: ANN401
            for memory, start, end in zip(memories, starts, ends, strict=False):
                self.from_gpu(memory, start, end, **more)

        def batched_to_gpu(self, memories: Any, starts: Any, ends: Any, **more: Any) -> None:  # noqa: ANN401
            for memory, start, end in zip(memories, starts, ends, strict=False):
                self.to_gpu(memory, start, end, **more)

    return Copies()


def build(kind: str, layers: int, nbytes: int, folder: Path) -> Any:  # noqa: ANN401
    """Return an engine over RAM or over a directory with O_DIRECT."""
    import torch

    names = ("config", "metadata", "cache_engine")
    config, metadata, engine = (importlib.import_module(f"lmcache.v1.{name}") for name in names)
    chosen: dict[str, Any] = {
        "chunk_size": TOKENS, "local_cpu": kind == "cpu", "save_unfull_chunk": False,
        "max_local_cpu_size": max(1.0, 3 * nbytes / 2**30),
    }  # fmt: skip
    if kind == "disk":
        chosen |= {"local_disk": f"file://{folder}/", "max_local_disk_size": 8.0}
        chosen |= {"extra_config": {"use_odirect": True}}
    said = metadata.LMCacheMetadata(
        model_name="m", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
        kv_dtype=torch.bfloat16, kv_shape=(layers, 2, TOKENS, HEADS, HEAD_DIM), chunk_size=TOKENS,
    )  # fmt: skip
    built = engine.LMCacheEngineBuilder.get_or_create(
        "bench", config.LMCacheEngineConfig.from_defaults(**chosen), said, connector(layers),
        lambda _tensor, _source: None, lambda value, _source: value,
    )  # fmt: skip
    built.post_init()
    return built


def main() -> int:
    import torch

    kind, block_bytes, blocks, folder = sys.argv[1:]
    torch.set_num_threads(1)
    layers = int(block_bytes) // (2 * TOKENS * HEADS * HEAD_DIM * 2)
    total = int(blocks) * TOKENS
    engine = build(kind, layers, int(block_bytes) * int(blocks), Path(folder))
    source = torch.randint(-9, 9, (2, layers, total, HEADS * HEAD_DIM)).to(torch.bfloat16)
    target = torch.zeros_like(source)
    tokens = torch.arange(total, dtype=torch.int64)
    turn = 0
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "put":
            engine.clear()
            turn += 1
            asked = tokens + total * turn
            start = time.perf_counter()
            engine.store(asked, kvcaches=source)
            while kind == "disk" and engine.lookup(asked) < total:
                assert time.perf_counter() - start < FOUND_S, "store never finished"
                time.sleep(0.0005)
        else:
            start = time.perf_counter()
            found = engine.retrieve(asked, kvcaches=target)
            assert int(found.sum()) == total, f"{int(found.sum())} of {total} tokens came back"
        print(time.perf_counter() - start, flush=True)
        if turn == 1 and line.strip() == "get":
            assert torch.equal(source, target), "bytes came back that were not put"
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
