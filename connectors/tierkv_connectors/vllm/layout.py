"""Layout: where vLLM keeps the KV of a token in the tensors that it registers.

vLLM registers one tensor per layer. Sizes come from its KV cache config; which axis of the tensor
is which, and how a block is packed inside, comes from the name of the attention (and, on a CPU, of
its instruction set). Shapes only confirm: what does not fit is refused with the reason, and
`selftest` compares what fits with what the attention really writes.

    fused          [block, head, token, K dims and V dims], with strides of any order
    kv, block      [2, block, token, head, dim]
    block, kv      [block, 2, token, head, dim]
    CPU, vec       fused by its shape; inside a block and head lie K as [dim, token], V as
                   [token, dim]
    CPU, amx       fused by its shape; inside lie tiles, see `_amx_tiles`

When all layers lie in one storage at one distance (vLLM 0.32 and later), a block is copied for all
layers at once; else layer by layer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from tierkv.errors import invalid
from tierkv_connectors.pages import DTYPE_NAMES
from tierkv_connectors.views import Piece, Views


class Spec(Protocol):
    """vLLM's description of the KV of a layer; `_check_spec` knows what else it may have."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype


class Attention(NamedTuple):
    """What decides how a block is packed: vLLM's name of the attention and its instruction set."""

    name: str
    isa: str | None = None


class Layout:
    """Where the KV of a block is, for layers that share block ids.

    `layer_names` are in the order of the layers in a block.
    """

    def __init__(
        self,
        layer_names: Sequence[str],
        geometry: "_Geometry",
        row_axis: int,
        stacks: Sequence["_Stack"],
    ) -> None:
        self.layer_names = tuple(layer_names)
        self.blocks = geometry.blocks
        self.block_tokens = geometry.tokens
        self.heads = geometry.heads
        self.dim = geometry.dim
        self.dtype = geometry.dtype
        self.device = stacks[0].keys.device
        self._split = geometry.split
        self._row_axis = row_axis
        self._stacks = tuple(stacks)

    @property
    def layers(self) -> int:
        """How many layers a block has."""
        return len(self.layer_names)

    def views(self, block_ids: Sequence[int], skip: int = 0) -> Views:
        """Return the engine blocks of these ids, in this order, as one block.

        Args:
            block_ids: vLLM's.
            skip: engine blocks of the block that come before them and are left out.

        Raises: TierKVError (invalid) for an id that no request can have.
        """
        # Block 0 stands for "no block" in vLLM.
        if not all(0 < number < self.blocks for number in block_ids):
            raise invalid(f"block ids are 1 to {self.blocks - 1}, not {list(block_ids)}")
        return list(self._pieces(block_ids, skip * self.block_tokens))

    def memory(self, tensor: torch.Tensor, block_id: int) -> torch.Tensor:
        """Return a block as it lies in a registered tensor, whatever its order inside."""
        return tensor.narrow(self._row_axis, block_id * self._split, self._split)

    def _pieces(self, block_ids: Sequence[int], token: int) -> Iterator[Piece]:
        for first, count in _runs(block_ids):
            rows = slice(first * self._split, (first + count) * self._split)
            tokens = slice(token, token + count * self.block_tokens)
            token = tokens.stop
            for layers, keys, values in self._stacks:
                yield Piece(layers, tokens, keys[:, rows], values[:, rows])


class _Geometry(NamedTuple):
    """Sizes of a group.

    `split` is how many rows of a tensor make a block: a kernel may want rows of fewer tokens than
    the scheduler's blocks have.
    """

    blocks: int
    tokens: int
    heads: int
    dim: int
    dtype: torch.dtype
    split: int = 1

    @property
    def rows(self) -> int:
        return self.blocks * self.split

    @property
    def row_tokens(self) -> int:
        return self.tokens // self.split


class _Stack(NamedTuple):
    """Keys and values of some layers: [layer, row, token, head, dim] or finer (see Piece)."""

    layers: slice
    keys: torch.Tensor
    values: torch.Tensor


Halves = tuple[torch.Tensor, torch.Tensor]


class _Arrangement(NamedTuple):
    """The axes of a registered tensor, and how it falls into keys and values [row, token, ...]."""

    axes: tuple[str, ...]
    halves: Callable[[torch.Tensor, _Geometry], Halves]


def _fused(tensor: torch.Tensor, geometry: _Geometry) -> Halves:
    keys, values = tensor.transpose(1, 2).split(geometry.dim, dim=-1)
    return keys, values


def _kv_first(tensor: torch.Tensor, _geometry: _Geometry) -> Halves:
    return tensor[0], tensor[1]


def _kv_second(tensor: torch.Tensor, _geometry: _Geometry) -> Halves:
    return tensor[:, 0], tensor[:, 1]


def _keys_transposed(tensor: torch.Tensor, geometry: _Geometry) -> Halves:
    rows, heads, tokens, dim = geometry.rows, geometry.heads, geometry.row_tokens, geometry.dim
    keys, values = _dense(tensor, geometry).unbind(2)
    return (
        keys.view(rows, heads, dim, tokens).permute(0, 3, 1, 2),
        values.view(rows, heads, tokens, dim).transpose(1, 2),
    )


def _amx_tiles(tensor: torch.Tensor, geometry: _Geometry) -> Halves:
    """Undo what AMX multiplies: 16 columns of two neighbours each.

    They are neighbours along the dim in keys, along the token in values.
    """
    if geometry.dtype.itemsize != 2:  # noqa: PLR2004 -- a column is four bytes
        raise invalid(f"AMX tiles of {geometry.dtype} are not supported")
    rows, heads, tokens, dim = geometry.rows, geometry.heads, geometry.row_tokens, geometry.dim
    keys, values = _dense(tensor, geometry).unbind(2)
    return (
        keys.view(rows, heads, tokens // 16, dim // 2, 16, 2).permute(0, 2, 4, 1, 3, 5),
        values.view(rows, heads, dim // 16, tokens // 2, 16, 2).permute(0, 3, 5, 1, 2, 4),
    )


def _dense(tensor: torch.Tensor, geometry: _Geometry) -> torch.Tensor:
    """Return the tensor as [row, head, K/V, all of the half]."""
    if tensor.stride()[2:] != (2 * geometry.dim, 1):
        raise invalid(f"a block and head is not in one run of memory: strides {tensor.stride()}")
    return tensor.view(geometry.rows, geometry.heads, 2, geometry.row_tokens * geometry.dim)


_FUSED = ("row", "head", "token", "fused")
_BY_STRIDES = (
    _Arrangement(_FUSED, _fused),
    _Arrangement(("kv", "row", "token", "head", "dim"), _kv_first),
    _Arrangement(("row", "kv", "token", "head", "dim"), _kv_second),
)
_TRANSPOSED = (_Arrangement(_FUSED, _keys_transposed),)
_CPU = "CPU_ATTN"
_ARRANGEMENTS: dict[Attention, Sequence[_Arrangement]] = {
    Attention("FLASH_ATTN"): _BY_STRIDES,
    Attention("FLASHINFER"): _BY_STRIDES,
    Attention("FLEX_ATTENTION"): _BY_STRIDES,
    Attention("TRITON_ATTN"): _BY_STRIDES,
    Attention(_CPU, "amx"): (_Arrangement(_FUSED, _amx_tiles),),
    Attention(_CPU, "vec"): _TRANSPOSED,
    Attention(_CPU, "vec16"): _TRANSPOSED,
}


def layout_of(
    blocks: int,
    spec: Spec,
    names: Sequence[str],
    kv_caches: Mapping[str, torch.Tensor],
    attention: Attention,
) -> Layout:
    """Return the layout of some layers of one group, in the tensors that vLLM registered.

    Args:
        blocks: how many the engine has.
        spec: of the group.
        names: of the layers, in their order in a block.
        kv_caches: vLLM's tensors by layer.
        attention: of these layers.

    Raises: TierKVError (invalid) saying why there is none.
    """
    tensors = [_tensor(kv_caches, name, spec) for name in names]
    _check_alike(names, tensors)
    geometry = _geometry(blocks, spec)
    arrangement, geometry = _arrangement(attention, tensors[0], geometry)
    halves = [arrangement.halves(tensor, geometry) for tensor in tensors]
    return Layout(names, geometry, arrangement.axes.index("row"), _stacks(halves))


def _tensor(kv_caches: Mapping[str, object], name: str, spec: Spec) -> torch.Tensor:
    tensor = kv_caches.get(name)
    if not isinstance(tensor, torch.Tensor):
        raise invalid(f"{name} is registered as {type(tensor).__name__}, not as a tensor")
    if tensor.dtype != spec.dtype:
        raise invalid(f"{name} is {tensor.dtype}, its spec says {spec.dtype}")
    return tensor


def _check_alike(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    first = tensors[0]
    for name, tensor in zip(names, tensors, strict=True):
        if (tensor.shape, tensor.stride(), tensor.device) != (
            first.shape,
            first.stride(),
            first.device,
        ):
            raise invalid(f"{name} is arranged otherwise than {names[0]}")
    if len({tensor.data_ptr() for tensor in tensors}) != len(tensors):
        raise invalid("layers share one KV cache: not supported yet")


def _geometry(blocks: int, spec: Spec) -> _Geometry:
    kind = type(spec).__name__
    if kind not in {"FullAttentionSpec", "SlidingWindowSpec"}:
        raise invalid(f"KV of kind {kind}: only plain attention is supported yet")
    name = DTYPE_NAMES.get(spec.dtype)
    if name is None or name.startswith("fp8"):
        raise invalid(f"a KV cache of {spec.dtype} is not supported yet")
    plain = {
        "kv_quant_mode": 0,
        "tokens_per_state": 1,
        "head_size_v": spec.head_size,
        "num_head_slots": spec.num_kv_heads,
        "state_content_bytes": 2 * spec.head_size * spec.dtype.itemsize,
    }
    for field, value in plain.items():
        found = getattr(spec, field, None)
        if found not in (None, value):
            raise invalid(f"KV with {field} {found} instead of {value} is not supported yet")
    return _Geometry(blocks, spec.block_size, spec.num_kv_heads, spec.head_size, spec.dtype)


def _arrangement(
    attention: Attention, tensor: torch.Tensor, geometry: _Geometry
) -> tuple[_Arrangement, _Geometry]:
    known = _ARRANGEMENTS.get(attention)
    if known is None:
        raise invalid(f"how {attention} packs its KV is not known")
    fitting = [
        (arrangement, fitted)
        for arrangement in known
        if (fitted := _fitted(tensor.shape, arrangement.axes, geometry)) is not None
    ]
    if len(fitting) != 1:
        raise invalid(
            f"a KV cache of shape {tuple(tensor.shape)} fits {len(fitting)} arrangements of "
            f"{attention.name} with {geometry}"
        )
    return fitting[0]


def _fitted(shape: Sequence[int], axes: Sequence[str], geometry: _Geometry) -> _Geometry | None:
    """Return the geometry with the split that the shape has; None when it is of another."""
    if len(shape) != len(axes):
        return None
    split, rest = divmod(shape[axes.index("row")], geometry.blocks)
    if rest or not split or geometry.tokens % split:
        return None
    fitted = geometry._replace(split=split)
    sizes = {
        "row": fitted.rows,
        "token": fitted.row_tokens,
        "head": fitted.heads,
        "kv": 2,
        "dim": fitted.dim,
        "fused": 2 * fitted.dim,
    }
    return fitted if list(shape) == [sizes[axis] for axis in axes] else None


def _stacks(halves: Sequence[Halves]) -> list[_Stack]:
    keys = _stacked([keys for keys, _ in halves])
    values = _stacked([values for _, values in halves])
    if keys is not None and values is not None:
        return [_Stack(slice(0, len(halves)), keys, values)]
    return [
        _Stack(slice(layer, layer + 1), keys[None], values[None])
        for layer, (keys, values) in enumerate(halves)
    ]


def _stacked(layers: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return tensors of one storage, at one distance from each other, as one tensor."""
    first = layers[0]
    offsets = [layer.storage_offset() for layer in layers]
    steps = {after - before for before, after in pairwise(offsets)} or {0}
    storages = {layer.untyped_storage().data_ptr() for layer in layers}
    if len(storages) != 1 or len(steps) != 1 or min(steps) < 0:
        return None
    return first.as_strided((len(layers), *first.shape), (*steps, *first.stride()), offsets[0])


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of following ids as first and count: a run is one piece."""
    start = 0
    for at in range(1, len(block_ids) + 1):
        if at == len(block_ids) or block_ids[at] != block_ids[at - 1] + 1:
            yield block_ids[start], at - start
            start = at
