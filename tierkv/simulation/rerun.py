"""Rerun: the record of a live service through a fresh Catalog and policy, answer by answer."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tierkv.allowance import Allowed
from tierkv.catalog import Catalog, Unit
from tierkv.codec import BY_NUMBER
from tierkv.cost import Rates, Recompute
from tierkv.errors import invalid
from tierkv.part import Part
from tierkv.policies.choice import Opening, make_policy
from tierkv.policy import ServicePolicy
from tierkv.record import Event, read_record
from tierkv.use import Use


class Rerun(NamedTuple):
    """What came of a record: answers compared, by name, and the first that differs."""

    policy: str
    answers: Counter[str]
    different: int
    first: str
    """Of the answers that differ, for people; empty when all are the same."""


def rerun(path: Path) -> Rerun:
    """Take a record through a fresh policy. Raises: TierKVError (invalid): it is none."""
    catalog, policy = Catalog([]), make_policy(Opening("lru", [], [], []))
    answers: Counter[str] = Counter()
    different, first = 0, ""
    for number, event in enumerate(read_record(path)):
        if event.name == "open":
            catalog = Catalog(*event.arguments)
        elif event.name == "policy":
            policy = make_policy(msgspec.convert(event.arguments[0], Opening))
        elif event.name in _ASKED:
            answers[event.name] += 1
            answer = _ASKED[event.name](policy, catalog, event.arguments)
            if answer != event.answer:
                different += 1
                first = first or f"event {number}, {event.name}: {event.answer} became {answer}"
        elif event.name in _TOLD:
            _TOLD[event.name](policy, catalog, event.arguments)
        else:
            _change(catalog, event)
    return Rerun(policy.name, answers, different, first)


def _use(values: list[Any]) -> Use:
    use = Use._make(values)
    return use._replace(
        parts=tuple(use.parts),
        recompute=Recompute(*use.recompute),
        windowed=tuple(use.windowed),
    )


_TOLD: dict[str, Callable[[ServicePolicy, Catalog, list[Any]], object]] = {
    "used": lambda policy, view, a: policy.used(view, _use(a[0])),
    "measured": lambda policy, view, a: policy.measured(view, [Rates(*one) for one in a[0]]),
    "touched": lambda policy, view, a: policy.touched(view, a[0]),
    "found": lambda policy, view, a: policy.found(view, a[0]),
    "forgot": lambda policy, _, a: policy.forgot(a[0]),
    "terms": lambda policy, view, a: policy.terms(view, a[0]),
}


def _reclaim(policy: ServicePolicy, view: Catalog, given: list[Any]) -> list[list[int]]:
    moves = policy.reclaim(view, given[0], given[1], at_once=given[2])
    return [list(move) for move in moves]


_ASKED: dict[str, Callable[[ServicePolicy, Catalog, list[Any]], Any]] = {
    "picks": lambda policy, _, a: [*policy.picks(a[0], a[1], [BY_NUMBER[one] for one in a[2]])],
    "offered": lambda policy, view, a: policy.offered(view, *a),
    "admits": lambda policy, view, a: policy.admits(view, *a),
    "victims": lambda policy, view, a: policy.victims(view, *a),
    "reclaim": _reclaim,
    "keeps": lambda policy, view, a: policy.keeps(view, *a),
    "stranded": lambda policy, view, a: policy.stranded(view, *a),
    "oldest": lambda policy, _, a: policy.oldest(*a),
}
"""Answers as the record writes them."""


def _column(value: Any) -> Any:  # noqa: ANN401
    return np.frombuffer(value[1], value[0]) if isinstance(value, list) else value


def _change(catalog: Catalog, event: Event) -> None:
    given = event.arguments
    match event.name:
        case "part_number":
            catalog.part_number(Part.unpack(given[0]))
        case "allowance":
            catalog.allowances.number({one: Allowed(*new) for one, new in given[0].items()})
        case "begin":
            catalog.begin(given[0], [Unit(*values) for values in given[1]])
        case "begin_alike" | "adopt":
            columns = {name: _column(value) for name, value in given[3].items()}
            getattr(catalog, event.name)(*given[:3], columns)
        case "restate":
            catalog.restate(given[0], **given[1])
        case "commit" | "abort" | "leave" | "gone" | "hold" | "unhold" | "resize" | "let_encode":
            getattr(catalog, event.name)(*given)
        case _:
            raise invalid(f"event {event.name[:80]!r} is of another release")
