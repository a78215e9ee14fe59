"""Copies past the caches give what torch's own copies give, and write nothing else."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierkv_codecs import copies
from tierkv_codecs.copies import LEAST_BYTES, LINE, copy, runs_of
from tierkv_connectors.device.host import HostLane

EDGE = 2 * LINE
View = Callable[[torch.Tensor], torch.Tensor]


def noise(nbytes: int, seed: int = 5) -> torch.Tensor:
    """Return bytes of all values, none of them 0."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (nbytes,), dtype=torch.uint8, generator=draw)


@given(
    extra=st.integers(0, 3 * LINE), to=st.integers(0, LINE), of=st.integers(0, LINE)
)  # fmt: skip
def test_a_run_wherever_it_begins_and_ends(extra: int, to: int, of: int) -> None:
    size = LEAST_BYTES + extra
    memory = torch.zeros(EDGE + size + EDGE, dtype=torch.uint8)
    source, place = noise(of + size)[of:], memory[to : to + size]
    assert runs_of(place, source) is not None
    copy(place, source)
    assert torch.equal(place, source)
    assert int(memory.count_nonzero()) == size, "bytes beside it were written"


LAYOUTS: dict[str, tuple[View, View]] = {
    "heads before tokens": (lambda one: one.transpose(1, 2), lambda one: one),
    "tokens before heads": (lambda one: one, lambda one: one.transpose(1, 2)),
    "every other layer": (lambda one: one[::2], lambda one: one[1::2]),
    "half of each vector": (lambda one: one[..., :32], lambda one: one[..., 32:]),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8])
def test_runs_with_steps_between_them(name: str, dtype: torch.dtype) -> None:
    views = [make(torch.zeros(16, 64, 64, 64, dtype=dtype)) for make in LAYOUTS[name]]
    sources = [make(torch.zeros(16, 64, 64, 64, dtype=dtype)) for make in LAYOUTS[name]]
    for view, source in zip(views, sources[::-1], strict=True):
        source.copy_(noise(source.numel()).view(source.shape))
        copy(view, source)
        assert torch.equal(view, source)
        whole = torch.empty(0, dtype=dtype).set_(view.untyped_storage())
        assert int(whole.count_nonzero()) == view.numel(), "bytes beside it were written"


def test_what_is_left_to_torch() -> None:
    long = torch.zeros(LEAST_BYTES // 4 + 1, 2, dtype=torch.float32)
    assert runs_of(long, long.clone()) is not None
    assert runs_of(long[:, 0], long[:, 1]) is None, "runs of one value"
    assert runs_of(long.view(-1)[:64], long.view(-1)[64:128]) is None, "stays in a cache"
    assert runs_of(long, long.clone().view(torch.int32)) is None, "values are turned into others"
    assert runs_of(long, long.to("meta")) is None, "not in host memory"
    rows = torch.zeros(LEAST_BYTES // 64, 96, dtype=torch.uint8)
    assert runs_of(rows[:, :64], rows[:, 32:]) is None, "rows that begin within a line"


def test_nothing_is_copied_twice_or_left_out_of_none() -> None:
    empty = torch.zeros(0, 5)
    copy(empty, empty.clone())
    alone = torch.zeros(1, 1, LEAST_BYTES, dtype=torch.uint8)
    copy(alone, noise(LEAST_BYTES).view(1, 1, -1))
    assert torch.equal(alone.view(-1), noise(LEAST_BYTES))
    broadcast = torch.full((1,), 7, dtype=torch.uint8).expand(LEAST_BYTES)
    copy(alone.view(-1), broadcast)
    assert bool((alone == 7).all())


def test_a_lane_of_host_memory_has_compiled_what_it_needs() -> None:
    copies.compile_ahead.cache_clear()
    HostLane()
    assert copies.compile_ahead.cache_info().misses == 1
    assert copies._copy.signatures  # type: ignore[attr-defined]
