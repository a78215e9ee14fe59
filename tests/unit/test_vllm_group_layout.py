"""KV groups whose layers lie in several engine groups, and parts with other heads than a worker's.

Every arrangement of an engine; both shares lie in the same tensors, under block ids of their own.
"""

import pytest
import torch

from tests.c_kernels import COMPILER, Kernel, compiled
from tests.vllm_layouts import BLOCKS, HEADS, LAYERS, MAKE, TOKENS, Engine, pattern
from tierkv_connectors.device.table import tables
from tierkv_connectors.views import Views, gather, scatter
from tierkv_connectors.vllm.group_layout import GroupLayout, Heads
from tierkv_connectors.vllm.groups import Share

EVEN, ODD = ((0, 2, 4), (1, 3, 5)), ((0, 1, 5), (2, 3, 4))
IDS = [4, 1], [2, 5]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    if COMPILER is None:
        pytest.skip("no C compiler here to run the kernels with")
    return compiled(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(params=list(MAKE))
def engine(request: pytest.FixtureRequest) -> Engine:
    return MAKE[request.param]()


def group(engine: Engine, places: tuple[tuple[int, ...], ...]) -> GroupLayout:
    shares = [Share(at, tuple(engine.names), mine) for at, mine in enumerate(places)]
    return GroupLayout(shares, lambda _: engine.layout())


def written(engine: Engine, places: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """Let the engine write both shares; returns the block that they are."""
    layers = 2 * LAYERS
    block = torch.zeros(layers, *pattern(2).shape[1:], dtype=pattern(1).dtype)
    for share, (ids, mine) in enumerate(zip(IDS, places, strict=True)):
        block[list(mine)] = pattern(2, seed=share)
        engine.write(ids, pattern(2, seed=share))
    return block


def both_ways(kernel: Kernel, views: Views, block: torch.Tensor, *, to_pages: bool) -> None:
    for word, table in tables(views, block, block.data_ptr(), to_pages=to_pages):
        kernel(word, table)


@pytest.mark.parametrize("places", [EVEN, ODD], ids=["even", "odd"])
def test_a_block_has_the_model_s_order(
    kernel: Kernel, engine: Engine, places: tuple[tuple[int, ...], ...]
) -> None:
    wanted = written(engine, places)
    views = group(engine, places).views(IDS)
    found, by_kernel = torch.zeros_like(wanted), torch.zeros_like(wanted)
    gather(views, found)
    both_ways(kernel, views, by_kernel, to_pages=False)
    assert torch.equal(found, wanted)
    assert torch.equal(by_kernel, wanted)


def test_layers_that_lie_evenly_are_one_piece() -> None:
    engine = MAKE["cpu"]()
    assert len(group(engine, EVEN).views(IDS)) == 4, "two shares of two runs"
    assert len(group(engine, ODD).views(IDS)) == 2 * LAYERS + 2, "only 2, 3, 4 lie evenly"


@pytest.mark.parametrize(("wide", "mine"), [(4, 0), (4, 2), (1, 0), (1, 1)])
def test_heads_are_a_part_s_or_a_worker_s(
    kernel: Kernel, engine: Engine, wide: int, mine: int
) -> None:
    """A part of four heads, of which the worker has two; a part of one of the worker's two."""
    if wide == 4:
        heads = Heads(slice(mine, mine + HEADS), slice(0, HEADS))
    else:
        heads = Heads(slice(0, 1), slice(mine, mine + 1))
    before, block = written(engine, EVEN), torch.randn(2 * LAYERS, 2, 2 * TOKENS, wide, 16)
    block = block.to(before.dtype)
    wanted = before.clone()
    wanted[:, :, :, heads.engine] = block[:, :, :, heads.block]
    layout = group(engine, EVEN)
    for copy in ("twin", "kernel"):
        written(engine, EVEN)
        views = layout.views(IDS, heads=heads)
        if copy == "twin":
            scatter(block, views)
        else:
            both_ways(kernel, views, block, to_pages=True)
        found = torch.zeros_like(before)
        gather(layout.views(IDS), found)
        assert torch.equal(found, wanted), copy
    others = [number for number in range(1, BLOCKS) if number not in {*IDS[0], *IDS[1]}]
    rest = torch.zeros_like(pattern(len(others)))
    gather(engine.layout().views(others), rest)
    assert not rest.any()
