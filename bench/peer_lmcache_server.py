"""LMCache's server, as a peer; the Python of its own environment runs it (`peers.py`).

    python peer_lmcache_server.py BLOCK_BYTES BLOCKS

`lmcache server` in a process of its own, and the client of `lmcache bench server --mode cpu
--transfer-mode lmcache_driven`: the server copies between its memory and the engine's, both in
POSIX shared memory. Engine blocks have 16 tokens, vLLM's size; longer ones are stored and never
found. What is timed is store, and retrieve without the lookup before it, which polls. A line "put"
or "get" on standard input is answered with seconds.
"""

import importlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_DISABLE_BANNER": "1",
    "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "1",
}
TOKENS = 256
PAGE_TOKENS = 16
HEADS, HEAD_DIM = 4, 128
START_S = 90.0
FOUND_S = 10.0


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(port: int, memory_gib: float, log: Any) -> "subprocess.Popen[bytes]":  # noqa: ANN401
    """Start the server and return when its port answers."""
    command = [
        str(Path(sys.executable).with_name("lmcache")), "server", "--host", "127.0.0.1",
        "--port", str(port), "--http-port", str(free_port()), "--chunk-size", str(TOKENS),
        "--supported-transfer-mode", "lmcache_driven", "--l1-size-gb", str(memory_gib),
        "--eviction-policy", "LRU",
    ]  # fmt: skip
    server = subprocess.Popen(command, stdout=log, stderr=log)
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return server
        time.sleep(0.1)
    raise TimeoutError("lmcache server did not start")


def connect(port: int, block_bytes: int, blocks: int) -> Any:  # noqa: ANN401
    """Return LMCache's own bench client with room for `blocks` blocks."""
    bench = "lmcache.cli.commands.bench.server_bench"
    layers = block_bytes // (2 * TOKENS * HEADS * HEAD_DIM * 2)
    pages = (blocks + 1) * TOKENS // PAGE_TOKENS
    shape = f"(2,{pages},{PAGE_TOKENS},{HEADS},{HEAD_DIM}):bfloat16:{layers}"
    config = importlib.import_module(f"{bench}.config").BenchConfig(
        rpc_url=f"tcp://127.0.0.1:{port}", http_url="", mode="cpu", tp_size=1, use_mla=False,
        transfer_mode="lmcache_driven", num_tokens=blocks * TOKENS, kvcache_shape_spec=shape,
        num_blocks=pages, block_size=PAGE_TOKENS,
    )  # fmt: skip
    client = importlib.import_module(f"{bench}.client").ServerBenchClient(config, lambda _: None)
    client.start()
    return client


def measure(client: Any, blocks: int) -> None:  # noqa: ANN401
    """Answer lines with seconds."""
    turn = asked = 0
    print("ready", flush=True)
    for line in sys.stdin:
        turn += line.strip() == "put"
        asked += 1
        request = client.create_request(turn, f"r{asked}", "warm")
        tokens = request.num_full_tokens
        hits = client.lookup(request).hit_chunks
        if line.strip() == "put":
            assert hits == 0, "a new prompt was there already"
            start = time.perf_counter()
            result = client.store(request, 0, tokens)
        else:
            until = time.monotonic() + FOUND_S
            while hits < blocks and time.monotonic() < until:
                client.end_session(request)
                time.sleep(0.1)
                asked += 1
                request = client.create_request(turn, f"r{asked}", "warm")
                hits = client.lookup(request).hit_chunks
            assert hits == blocks, f"{hits} of {blocks} blocks were there"
            start = time.perf_counter()
            result = client.retrieve(request, 0, tokens)
        seconds = time.perf_counter() - start
        assert result is not None, line
        assert result.succeeded, line
        client.end_session(request)
        print(seconds, flush=True)


def main() -> int:
    block_bytes, blocks = map(int, sys.argv[1:])
    memory_gib = max(2.0, 3 * block_bytes * blocks / 2**30)
    with tempfile.TemporaryFile() as log:
        port = free_port()
        server = serve(port, memory_gib, log)
        try:
            measure(connect(port, block_bytes, blocks), blocks)
        finally:
            server.terminate()
            server.wait(20)
    return 0


if __name__ == "__main__":
    sys.exit(main())
