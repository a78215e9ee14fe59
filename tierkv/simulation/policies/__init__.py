"""Policies by name: the service's, and what it is compared with, one file each.

`arc`, `s3fifo` and `belady` meet blocks as published, front to back. The others, and the
`-tail-first` forms, use a chain from its tail, so that the head stays longest.
"""

from collections.abc import Callable
from typing import NamedTuple

from tierkv.policies.lru import Lru
from tierkv.policy import Policy
from tierkv.simulation.policies.arc import Arc
from tierkv.simulation.policies.belady import Belady, next_uses
from tierkv.simulation.policies.gdsf import Gdsf
from tierkv.simulation.policies.order import PromptOrder
from tierkv.simulation.policies.s3fifo import S3Fifo
from tierkv.simulation.traces import Accesses


class Contender(NamedTuple):
    """A policy for equal blocks.

    `make` takes the capacity in blocks and the trace, which only `belady` looks at. `in_runs` says
    that what goes never depends on what has just come: missing blocks may come several at a time.
    """

    make: Callable[[int, Accesses], Policy]
    tail_first: bool = True
    in_runs: bool = False


CONTENDERS = {
    "lru": Contender(lambda *_: Lru(1), in_runs=True),
    "lru-prompt-order": Contender(lambda *_: PromptOrder(Lru(1)), tail_first=False, in_runs=True),
    "arc": Contender(lambda blocks, _: PromptOrder(Arc([blocks])), tail_first=False),
    "arc-tail-first": Contender(lambda blocks, _: Arc([blocks])),
    "s3fifo": Contender(lambda blocks, _: PromptOrder(S3Fifo([blocks])), tail_first=False),
    "s3fifo-tail-first": Contender(lambda blocks, _: S3Fifo([blocks])),
    "gdsf": Contender(lambda *_: Gdsf(1, lambda _view, _row: 1.0)),
    "belady": Contender(
        lambda blocks, trace: Belady(blocks, next_uses(trace.ids)), tail_first=False
    ),
}
