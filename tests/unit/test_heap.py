"""The heap: what is free goes back to the system."""

import subprocess
import sys

import pytest

HOLES = """
import ctypes
from tierkv import heap

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
MIB = 1 << 20

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 // MIB

libc.free(libc.malloc(30 * MIB))  # from now on the heap has blocks of that size too
before, large, small = resident(), [], []
for _ in range(16):
    large.append(libc.malloc(8 * MIB))
    ctypes.memset(large[-1], 1, 8 * MIB)
    small.append(libc.malloc(64 << 10))
for block in large:
    libc.free(block)
kept = resident() - before
heap.trim()
print(kept, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc keeps freed memory; others do not say")
def test_free_memory_goes_back_to_the_system() -> None:
    found = subprocess.run(
        [sys.executable, "-c", HOLES], check=True, capture_output=True, text=True
    )
    kept, after = map(int, found.stdout.split())
    assert kept > 100, "the C library kept nothing: there is nothing to give back"
    assert after < 16
