"""Blocks as feature rows: the fused kernels do what their torch twins do, and come back."""

import numpy as np
import pytest
import torch

from tierkv.identity import LayerSpec, Rope
from tierkv_codecs.kvtc_rows import plain_rows_of, plain_write_rows, rows_of, write_rows

DIM, HEADS, TOKENS = 16, 3, 11
ROPES = [
    Rope(theta=1e4, rotary_dim=DIM),
    Rope(kind="none"),
    Rope(theta=1e6, rotary_dim=DIM // 2),
    Rope(theta=1e5, rotary_dim=DIM, interleaved=True),
    Rope(kind="linear", theta=1e4, rotary_dim=DIM, scaling='{"factor": 4.0}'),
]
LAYERS = tuple(LayerSpec(kv_heads=HEADS, k_dim=DIM, v_dim=DIM, rope=rope) for rope in ROPES)
FEATURES = len(LAYERS) * HEADS * DIM
ORDER = np.random.default_rng(3).permutation(TOKENS)


def block_of(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn((len(LAYERS), 2, TOKENS, HEADS, DIM), generator=generator).to(dtype)


def means() -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.randn((2, FEATURES), generator=torch.Generator().manual_seed(2))
    return both[0], both[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernels_do_what_torch_does(dtype: torch.dtype) -> None:
    block = block_of(dtype)
    for found, plain in zip(
        rows_of(block, LAYERS, 77, means()), plain_rows_of(block, LAYERS, 77, means()), strict=True
    ):
        torch.testing.assert_close(found.exact, plain.exact, rtol=0, atol=1e-6)
        assert torch.equal(found.narrow, found.exact.bfloat16())
    keys, values = plain_rows_of(block, LAYERS, 77, means())
    rows = (keys.exact, values.exact)
    out, plain_out = torch.empty_like(block), torch.empty_like(block)
    write_rows(rows, LAYERS, 77, means(), ORDER, out)
    plain_write_rows(rows, LAYERS, 77, means(), ORDER, plain_out)
    torch.testing.assert_close(out, plain_out, rtol=2**-7, atol=1e-6)


def test_rows_come_back_into_any_strides() -> None:
    block = block_of(torch.float32)
    keys, values = rows_of(block, LAYERS, 5, means())
    pages = torch.zeros((len(LAYERS), 2, HEADS, 40, DIM))
    view = pages.transpose(2, 3)[:, :, 8 : 8 + TOKENS]
    write_rows((keys.exact[ORDER], values.exact[ORDER]), LAYERS, 5, means(), ORDER, view)
    torch.testing.assert_close(view, block, rtol=0, atol=1e-5)
    assert not pages[..., :8, :].any()
    assert not pages[..., 8 + TOKENS :, :].any()


def test_a_run_of_layers_is_written_alone() -> None:
    block = block_of(torch.float32)
    keys, values = rows_of(block, LAYERS, 5, means())
    part = slice(HEADS * DIM, 3 * HEADS * DIM)
    out = torch.zeros_like(block)
    sides = (keys.exact[ORDER, part].contiguous(), values.exact[ORDER, part].contiguous())
    first, second = means()
    write_rows(sides, LAYERS[1:3], 5, (first[part], second[part]), ORDER, out[1:3])
    torch.testing.assert_close(out[1:3], block[1:3], rtol=0, atol=1e-5)
    assert not out[0].any()
    assert not out[3:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_a_dtype_cannot_hold_becomes_its_largest(dtype: torch.dtype) -> None:
    rows = torch.full((TOKENS, FEATURES), 3.4e38), torch.full((TOKENS, FEATURES), -1e38)
    zero = torch.zeros(FEATURES)
    out = torch.empty((len(LAYERS), 2, TOKENS, HEADS, DIM), dtype=dtype)
    write_rows(rows, LAYERS, 0, (zero, zero), ORDER, out)
    assert out.isfinite().all()
