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
FOUND_S = 30.0
PAUSE_S = 0.5


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


class Peer:
    """Stores and retrieves prompts of `blocks` blocks; each store has a prompt of its own."""

    def __init__(self, client: Any, blocks: int) -> None:  # noqa: ANN401
        self._client = client
        self._blocks = blocks
        self._turn = self._asked = 0

    def put(self) -> float:
        """Store a new prompt and return the seconds.

        A full server acknowledges at once what it does not store, and evicts a little later: what
        does not come back whole afterwards is stored again.
        """
        until = time.monotonic() + FOUND_S
        while time.monotonic() < until:
            self._turn += 1
            request, hits = self._look()
            assert hits == 0, "a new prompt was there already"
            start = time.perf_counter()
            result = self._client.store(request, 0, request.num_full_tokens)
            seconds = time.perf_counter() - start
            assert result is not None
            assert result.succeeded
            self._client.end_session(request)
            if self._fetch()[0] == self._blocks:
                return seconds
            time.sleep(PAUSE_S)
        raise TimeoutError("what was stored is never found")

    def get(self) -> float:
        """Retrieve the prompt that was stored last and return the seconds."""
        hits, seconds = self._fetch()
        assert hits == self._blocks, f"{hits} of {self._blocks} blocks were there"
        return seconds

    def _fetch(self) -> tuple[int, float]:
        """Retrieve what is there, which is not evicted after a lookup before it is retrieved."""
        request, hits = self._look()
        start = time.perf_counter()
        result = self._client.retrieve(request, 0, hits * TOKENS)
        seconds = time.perf_counter() - start
        assert result is None or result.succeeded
        self._client.end_session(request)
        return hits, seconds

    def _look(self) -> tuple[Any, int]:
        """Return a request for the prompt of this turn and how many of its blocks are there."""
        self._asked += 1
        request = self._client.create_request(self._turn, f"r{self._asked}", "warm")
        return request, self._client.lookup(request).hit_chunks


def measure(peer: Peer) -> None:
    """Answer lines with seconds."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(peer.put() if line.strip() == "put" else peer.get(), flush=True)


def main() -> int:
    block_bytes, blocks = map(int, sys.argv[1:])
    memory_gib = max(2.0, 3 * block_bytes * blocks / 2**30)
    with tempfile.TemporaryFile() as log:
        port = free_port()
        server = serve(port, memory_gib, log)
        try:
            measure(Peer(connect(port, block_bytes, blocks), blocks))
        finally:
            server.terminate()
            server.wait(20)
    return 0


if __name__ == "__main__":
    sys.exit(main())
