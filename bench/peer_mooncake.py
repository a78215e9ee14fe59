"""Mooncake's store, as a peer; the Python of its own environment runs it (`peers.py`).

    python peer_mooncake.py local|remote BLOCK_BYTES BLOCKS

Blocks go from and to registered memory in batches, its fastest way. `local`: the segment is this
process's; `remote`: another process owns it and TCP lies between, as between an engine and a
sidecar without RDMA. A line "put" or "get" on standard input is answered with seconds.
"""

import importlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

os.environ |= {
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "2",
}
MIB = 1 << 20
START_S = 30.0


def free_ports(count: int) -> list[int]:
    """Return loopback ports that were free a moment ago."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def start_master(rpc: int, http: int, metrics: int) -> "subprocess.Popen[bytes]":
    """Start the master and return when its port answers."""
    command = [
        str(Path(sys.executable).with_name("mooncake_master")), "--rpc_port", str(rpc),
        "--enable_http_metadata_server=true", "--http_metadata_server_host=127.0.0.1",
        f"--http_metadata_server_port={http}", "--metrics_host=127.0.0.1",
        f"--metrics_port={metrics}", "--rpc_address=127.0.0.1", "--default_kv_lease_ttl=10000",
    ]  # fmt: skip
    quiet = subprocess.DEVNULL
    master = subprocess.Popen(command, stdout=quiet, stderr=quiet)
    until = time.monotonic() + START_S
    while time.monotonic() < until and master.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", rpc)) == 0:
                time.sleep(1.0)  # its metadata server comes a little later
                return master
        time.sleep(0.1)
    raise TimeoutError("mooncake_master did not start")


def connect(rpc: int, http: int, segment: int) -> Any:  # noqa: ANN401 - a library without types
    """Return a store that gives `segment` bytes to the pool."""
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    metadata = f"http://127.0.0.1:{http}/metadata"
    address = f"127.0.0.1:{rpc}"
    failed = store.setup("127.0.0.1", metadata, segment, 512 * MIB, "tcp", "", address)
    assert not failed, f"setup failed with {failed}"
    return store


def own() -> int:
    """Own a segment until standard input ends: python peer_mooncake.py own BYTES RPC HTTP."""
    segment, rpc, http = map(int, sys.argv[2:])
    store = connect(rpc, http, segment)
    print("ready", flush=True)
    sys.stdin.read()
    store.close()
    return 0


def measure(store: Any, block_bytes: int, blocks: int) -> None:  # noqa: ANN401
    """Answer lines with seconds."""
    total = block_bytes * blocks
    source = np.random.default_rng(0).integers(0, 256, total, dtype=np.uint8)
    target = np.zeros(total, np.uint8)
    for memory in (source, target):
        assert store.register_buffer(memory.ctypes.data, total) == 0
    froms = [source.ctypes.data + index * block_bytes for index in range(blocks)]
    tos = [target.ctypes.data + index * block_bytes for index in range(blocks)]
    sizes = [block_bytes] * blocks
    keys: list[str] = []
    turn = 0
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "put":
            store.remove_all(True)  # noqa: FBT003 - the name is not documented
            turn += 1
            keys = [f"{turn}.{index}" for index in range(blocks)]
            start = time.perf_counter()
            done = store.batch_put_from(keys, froms, sizes)
            seconds = time.perf_counter() - start
            assert not any(done), f"put failed with {done[:3]}"
        else:
            start = time.perf_counter()
            got = store.batch_get_into(keys, tos, sizes)
            seconds = time.perf_counter() - start
            assert got == sizes, f"get failed with {got[:3]}"
        print(seconds, flush=True)
        if turn == 1 and line.strip() == "get":
            assert np.array_equal(source, target), "bytes came back that were not put"


def main() -> int:
    if sys.argv[1] == "own":
        return own()
    kind, block_bytes, blocks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rpc, http, metrics = free_ports(3)
    segment = max(512 * MIB, 3 * block_bytes * blocks)
    children = [start_master(rpc, http, metrics)]
    try:
        if kind == "remote":
            command = [sys.executable, __file__, "own", str(segment), str(rpc), str(http)]
            pipe = subprocess.PIPE
            owner = subprocess.Popen(command, stdin=pipe, stdout=pipe)
            children.append(owner)
            assert owner.stdout is not None
            while owner.stdout.readline().strip() != b"ready":
                assert owner.poll() is None, "the segment's owner ended"
        store = connect(rpc, http, 0 if kind == "remote" else segment)
        time.sleep(1.0)
        measure(store, block_bytes, blocks)
        store.close()
    finally:
        for child in reversed(children):
            child.terminate()
            child.wait(10)
    return 0


if __name__ == "__main__":
    sys.exit(main())
