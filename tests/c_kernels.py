"""The copy kernels, compiled by a C compiler: CUDA's names stand for loops over the grid."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from tierkv_connectors.device.table import SOURCE, WORDS, Table

COMPILER = shutil.which("gcc") or shutil.which("cc")
GRID, BLOCK = 2, 3
"""Few threads and an odd number, so that each has several words and the last ones have fewer."""

SHIM = """
#define __global__
struct Number { unsigned int x, y; };
static struct Number gridDim, blockDim, blockIdx, threadIdx;
"""
RUN = """
void run_%(word)d(const struct Table *table, unsigned int blocks, unsigned int threads) {
    gridDim.x = blocks, gridDim.y = table->spans, blockDim.x = threads;
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
            for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
                copy_%(word)d(*table);
}
"""
Kernel = Callable[[int, Table], None]


def compiled(folder: Path) -> Kernel:
    """Return what runs a table with words of so many bytes."""
    assert COMPILER is not None
    source = SHIM + SOURCE.read_text(encoding="utf-8").replace('extern "C"', "")
    source += "".join(RUN % {"word": word} for word in WORDS)
    code, library = folder / "copy.c", folder / "copy.so"
    code.write_text(source, encoding="utf-8")
    strict = ["-std=c99", "-O1", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(
        [COMPILER, *strict, "-shared", "-fPIC", "-o", str(library), str(code)], check=True
    )
    loaded = ctypes.CDLL(str(library))

    def run(word: int, table: Table) -> None:
        getattr(loaded, f"run_{word}")(ctypes.c_void_p(table.ctypes.data), GRID, BLOCK)

    return run
