"""The copy kernels without a GPU: NVRTC takes the source; run as C it does what the twin does."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvidia import cuda_nvrtc

from tests.c_kernels import COMPILER, Kernel, compiled
from tests.vllm_layouts import BLOCKS, MAKE, TOKENS, Engine, pattern
from tierkv_connectors.device import table as table_module
from tierkv_connectors.device.table import AXES, SOURCE, SPANS, TABLE, WORDS, tables
from tierkv_connectors.views import Views, gather, scatter

IDS = ([4, 1, 2, 5], [3], [1, 2, 3, 4])


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    if COMPILER is None:
        pytest.skip("no C compiler here to run the kernels with")
    return compiled(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(params=list(MAKE))
def engine(request: pytest.FixtureRequest) -> Engine:
    return MAKE[request.param]()


def launch(kernel: Kernel, views: Views, block: torch.Tensor, *, to_pages: bool) -> list[int]:
    """Copy by the kernel; returns the bytes of a word of each launch."""
    launches = list(tables(views, block, block.data_ptr(), to_pages=to_pages))
    for word, table in launches:
        kernel(word, table)
    return [word for word, _ in launches]


@pytest.mark.parametrize("block_ids", IDS, ids=str)
def test_a_gather_is_the_twin_s(kernel: Kernel, engine: Engine, block_ids: list[int]) -> None:
    engine.write(list(range(1, BLOCKS)), pattern(BLOCKS - 1))
    views = engine.layout().views(block_ids)
    found, wanted = torch.zeros_like(block := pattern(len(block_ids))), torch.zeros_like(block)
    gather(views, wanted)
    launch(kernel, views, found, to_pages=False)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("block_ids", IDS, ids=str)
def test_a_scatter_is_the_twin_s(
    kernel: Kernel, engine: Engine, block_ids: list[int], skip: int
) -> None:
    """And it writes to nothing else: all of the engine's memory is compared."""
    before = pattern(BLOCKS - 1)
    block = pattern(len(block_ids) + skip, seed=1)
    views = engine.layout().views(block_ids, skip)
    results = []
    for copy in (
        lambda: scatter(block, views),
        lambda: launch(kernel, views, block, to_pages=True),
    ):
        engine.write(list(range(1, BLOCKS)), before)
        copy()
        results.append([tensor.clone() for tensor in engine.tensors])
    assert all(map(torch.equal, *results))


def test_blocks_that_lie_apart_are_one_launch_of_wide_words(kernel: Kernel) -> None:
    engine = MAKE["kv first"]()
    views = engine.layout().views([4, 1, 3, 5])
    block = torch.zeros_like(pattern(4))
    assert launch(kernel, views, block, to_pages=False) == [8]


def test_memory_that_is_not_aligned_is_copied_in_narrow_words(kernel: Kernel) -> None:
    engine = MAKE["kv first"]()
    views = engine.layout().views([2])
    wanted = pattern(1)
    engine.write([2], wanted)
    memory = torch.zeros(wanted.numel() + 1, dtype=wanted.dtype)
    found = memory[1:].view(wanted.shape)
    assert launch(kernel, views, found, to_pages=False) == [2]
    assert torch.equal(found, wanted)


def test_more_spans_than_a_table_holds_are_several(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "SPANS", 5)
    engine = MAKE["kv first"]()
    wanted = pattern(3)
    engine.write([5, 1, 3], wanted)
    found = torch.zeros_like(wanted)
    words = launch(kernel, engine.layout().views([5, 1, 3]), found, to_pages=False)
    assert len(words) == -(-2 * 3 * len(engine.tensors) // 5)
    assert torch.equal(found, wanted)


def test_a_block_may_be_bytes_elsewhere(kernel: Kernel) -> None:
    """On a device the block's bytes are in staging memory, not where the tensor is."""
    engine, wanted = MAKE["LBNHC"](), pattern(2)
    engine.write([3, 1], wanted)
    elsewhere = torch.zeros_like(wanted)
    views = engine.layout().views([3, 1])
    untouched = torch.zeros_like(wanted)
    for word, table in tables(views, untouched, elsewhere.data_ptr(), to_pages=False):
        kernel(word, table)
    assert torch.equal(elsewhere, wanted)
    assert not untouched.any()


def test_a_table_is_the_kernel_s_struct_and_fits_its_arguments() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    assert f"#define AXES {AXES}\n" in text
    assert f"#define SPANS {SPANS}\n" in text
    fields = [(name, TABLE[name].base, TABLE[name].shape) for name in TABLE.names or ()]
    aligned = np.dtype(fields, align=True)
    assert aligned.itemsize == TABLE.itemsize <= 4096
    assert pattern(1).shape[2] == TOKENS


class Nvrtc:
    """NVIDIA's compiler, without its driver."""

    def __init__(self) -> None:
        folder = Path(next(iter(cuda_nvrtc.__path__))) / "lib"
        self.library = ctypes.CDLL(str(next(folder.glob("libnvrtc.so.*"))))

    def call(self, name: str, *args: Any) -> int:
        return int(getattr(self.library, f"nvrtc{name}")(*args))

    def compile(self, source: str, architecture: str) -> bytes:
        program = ctypes.c_void_p()
        assert not self.call(
            "CreateProgram", ctypes.byref(program), source.encode(), b"copy.cu", 0, None, None
        )
        options = (ctypes.c_char_p * 2)(f"-arch={architecture}".encode(), b"-std=c++17")
        failed = self.call("CompileProgram", program, len(options), options)
        log = self.text("ProgramLog", program)
        assert not failed, log.decode()
        return self.text("CUBIN", program)

    def text(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        assert not self.call(f"Get{what}Size", program, ctypes.byref(size))
        out = ctypes.create_string_buffer(size.value)
        assert not self.call(f"Get{what}", program, out)
        return out.raw


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nvrtc_compiles_the_kernels(architecture: str) -> None:
    code = Nvrtc().compile(SOURCE.read_text(encoding="utf-8"), architecture)
    assert code.startswith(b"\x7fELF")
    for word in WORDS:
        assert f".text.copy_{word}\0".encode() in code


def test_nvrtc_sees_what_is_wrong() -> None:
    with pytest.raises(AssertionError, match="undefined"):
        Nvrtc().compile("__global__ void f() { nothing = 1; }", "sm_80")
