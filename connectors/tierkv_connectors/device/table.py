"""Table: what the copy kernel is told.

A *span* is a pair of addresses, in an engine's pages and in a block, from which the same words are
copied, counted by up to `AXES` axes with strides of their own on either side. Spans that differ in
nothing but their addresses go in one table, and a table is one launch. Tables go to the kernel by
value: nothing has to be kept, or copied to the device, until it has run.
"""

from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tierkv_connectors.views import Views

SOURCE = Path(__file__).with_name("copy.cu")
AXES = 8
SPANS = 240
"""Of one table at most: a kernel's arguments have 4 KiB."""
MAX_WORDS = 1 << 32
WORDS = (8, 4, 2, 1)
"""Bytes that a thread copies at once."""

TABLE = np.dtype(
    [
        ("spans", "<u4"),
        ("words", "<u4"),
        ("to_pages", "<u4"),
        ("axes", "<u4"),
        ("sizes", "<u4", AXES),
        ("page_steps", "<i8", AXES),
        ("block_steps", "<i8", AXES),
        ("pages", "<u8", SPANS),
        ("blocks", "<u8", SPANS),
    ]
)
"""`struct Table` of copy.cu."""

Table = npt.NDArray[np.void]


class Axis(NamedTuple):
    """An axis of a span: its size in words and its strides in bytes."""

    size: int
    page: int
    block: int


class Shape(NamedTuple):
    """What spans of one table share: bytes of a word, and the axes, the last one fastest."""

    word: int
    axes: tuple[Axis, ...]


def tables(
    views: Views, block: torch.Tensor, at: int, *, to_pages: bool
) -> Iterator[tuple[int, Table]]:
    """Yield the tables that copy views from or to a block, each with the bytes of its word.

    Args:
        views: of the block; any device.
        block: canonical, contiguous; only its shape counts.
        at: address of the memory that the block's bytes are copied from or to.
        to_pages: scatter instead of gather.
    """
    spans: dict[Shape, list[tuple[int, int]]] = {}
    known: dict[tuple[object, ...], Shape] = {}  # views are many, and alike but for their place
    layer, half, token, head = (step * block.element_size() for step in block.stride()[:4])
    for piece in views:
        start = at + piece.layers.start * layer + piece.tokens.start * token
        start += (piece.heads.start or 0) * head
        for number, tensor in enumerate((piece.keys, piece.values)):
            page, address = tensor.data_ptr(), start + number * half
            alike = (
                tensor.shape, tensor.stride(), page % WORDS[0], address % WORDS[0],
                piece.layers.step,
            )  # fmt: skip
            shape = known.get(alike)
            if shape is None:
                place = block[piece.layers, number, piece.tokens, piece.heads]
                place = place.view(tensor.shape)
                shape = known[alike] = _shape(tensor, place, address)
            spans.setdefault(shape, []).append((page, address))
    for shape, pairs in spans.items():
        for first in range(0, len(pairs), SPANS):
            yield shape.word, _table(shape, pairs[first : first + SPANS], to_pages=to_pages)


def _shape(tensor: torch.Tensor, place: torch.Tensor, address: int) -> Shape:
    """Return how a tensor and its place at an address are walked, in the widest words that fit."""
    item = tensor.element_size()
    axes = _joined(
        Axis(size, page * item, there * item)
        for size, page, there in zip(tensor.shape, tensor.stride(), place.stride(), strict=True)
    )
    if not axes or not axes[-1].page == axes[-1].block == item:
        return Shape(item, tuple(axes))
    run = axes.pop().size * item
    steps = [step for axis in axes for step in (axis.page, axis.block)]
    fits = (run, tensor.data_ptr(), address, *steps)
    word = next(word for word in WORDS if not any(number % word for number in fits))
    return Shape(word, (*axes, Axis(run // word, word, word)))


def _joined(axes: Iterable[Axis]) -> list[Axis]:
    """Join axes that are one run on both sides, and leave out those of one element."""
    joined: list[Axis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        last = joined[-1] if joined else None
        if last and (last.page, last.block) == (axis.page * axis.size, axis.block * axis.size):
            joined[-1] = Axis(last.size * axis.size, axis.page, axis.block)
        else:
            joined.append(axis)
    return joined


def _table(shape: Shape, pairs: list[tuple[int, int]], *, to_pages: bool) -> Table:
    table: Table = np.zeros((), TABLE)
    axes = len(shape.axes)
    words = prod(axis.size for axis in shape.axes)
    assert axes <= AXES, f"more than {AXES} axes: {shape}"
    assert words < MAX_WORDS, f"a span of {words} words"
    table["spans"], table["words"] = len(pairs), words
    table["to_pages"], table["axes"] = to_pages, axes
    for number, axis in enumerate(shape.axes):
        table["sizes"][number] = axis.size
        table["page_steps"][number] = axis.page
        table["block_steps"][number] = axis.block
    addresses = np.array(pairs, np.uint64)
    table["pages"][: len(pairs)], table["blocks"][: len(pairs)] = addresses.T
    return table
