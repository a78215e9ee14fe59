"""Shelves: how each part that a worker reads or writes lies in the engine's memory.

A worker writes the parts of its own heads. It reads them too, or parts that engines of another
parallel size have stored: wider ones, of whose heads it copies its own, and narrower ones, several
for its own heads.
"""

from collections.abc import Sequence

from tierkv.part import Part
from tierkv_codecs import CodecRegistry
from tierkv_connectors.device import Lane
from tierkv_connectors.pages import UnitCopier
from tierkv_connectors.views import Views
from tierkv_connectors.vllm.group_layout import GroupLayout, Heads
from tierkv_connectors.vllm.kept import Kept
from tierkv_connectors.vllm.ranks import parts_of, shared_heads


class Shelf:
    """One part: its place in the engine's memory, and what copies it."""

    def __init__(
        self,
        part: Part,
        layout: GroupLayout,
        heads: Heads | None,
        reader: UnitCopier,
        writer: UnitCopier,
    ) -> None:
        self.part = part
        self.reader = reader
        self.writer = writer
        self._layout = layout
        self._heads = heads

    def views(self, blocks: Sequence[Sequence[int]], skip: int = 0) -> Views:
        """Return engine blocks, ids by share, as one block. Raises: TierKVError (invalid)."""
        return self._layout.views(blocks, skip, self._heads)


class Shelves:
    """All shelves of a worker, made when they are first asked for."""

    def __init__(
        self,
        kept: Kept,
        layouts: Sequence[GroupLayout],
        reads: Lane,
        writes: Lane,
        codecs: CodecRegistry,
    ) -> None:
        self._kept = kept
        self._layouts = layouts
        self._lanes = reads, writes
        self._codecs = codecs
        self._known: dict[Part, Shelf] = {}

    def own(self, group: int) -> Shelf:
        """Return the shelf of a KV group's part that this worker has."""
        return self._of(self._kept.ranks.own(self._kept.identity, group))

    def over(self, group: int, shards: int) -> list[Shelf]:
        """Return the shelves of the parts that have this worker's heads, stored in so many runs."""
        identity = self._kept.identity
        mine = self._kept.ranks.own(identity, group)
        return [
            self._of(part)
            for part in parts_of(identity, group, shards)
            if shared_heads(mine, part)[0] < shared_heads(mine, part)[1]
        ]

    def _of(self, part: Part) -> Shelf:
        shelf = self._known.get(part)
        if shelf is None:
            mine = self._kept.ranks.own(self._kept.identity, part.group)
            start, stop = shared_heads(mine, part)
            heads = Heads(
                slice(start - part.head_start, stop - part.head_start),
                slice(start - mine.head_start, stop - mine.head_start),
            )
            reader, writer = (
                UnitCopier(self._kept.identity, part, lane, self._codecs) for lane in self._lanes
            )
            layout = self._layouts[part.group]
            shelf = Shelf(part, layout, None if part == mine else heads, reader, writer)
            self._known[part] = shelf
        return shelf
