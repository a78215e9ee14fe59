"""Explain: why a block is where it is, and why the last drop was made, in numbers.

A policy gives `Terms` of one placement; the store adds what the Catalog says of the block's copies.
"""

from typing import Any, NamedTuple, Protocol

import msgspec

from tierkv.catalog import Catalog, State
from tierkv.codec import BY_NUMBER
from tierkv.errors import incompatible, invalid
from tierkv.fidelity import FIDELITIES
from tierkv.key import KEY_BYTES


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that could be done: what is left then, and what that earns, a second."""

    does: str
    leaves: str
    earns: float
    """Seconds saved a second, less rent, of the whole block."""
    loss_per_byte: float
    """What that loses for each byte that it frees, a second."""


class Terms(NamedTuple):
    """What a policy says of one placement."""

    because: str
    numbers: dict[str, float]
    choices: tuple[Choice, ...] = ()


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """One placement of a block."""

    tier: str
    state: str
    profile: str
    fidelity: str
    nbytes: int
    allocated: int
    held: int
    may_become: dict[str, float] = {}
    """Lossy profiles that the gate allows, with their loss in nats per token."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an `ExplainCall`. Numbers are in seconds and bytes; names end in their unit."""

    key: str
    policy: str
    because: str
    copies: tuple[Copy, ...] = ()
    numbers: dict[str, float] = {}
    choices: tuple[Choice, ...] = ()


class Dropped(NamedTuple):
    """A drop, with what was known when it was made."""

    key: bytes
    tier: str
    nbytes: int
    terms: Terms


class Explainer(Protocol):
    """What a policy tells of its decisions."""

    name: str

    def terms(self, view: Catalog, row: int) -> Terms:
        """Return why a placement is worth what it is."""

    @property
    def last_drop(self) -> Dropped | None:
        """The last placement that was given up for room, None when there was none."""


def explain(view: Catalog, policy: Explainer, key: bytes) -> Explanation:
    """Say why a block is where it is. Raises: TierKVError (invalid): the key is none."""
    if len(key) != KEY_BYTES:
        raise invalid(f"a key has {KEY_BYTES} bytes, {2 * KEY_BYTES} hex digits, not {len(key)}")
    rows = [row for part in range(len(view.parts)) for row in view.copies(view.head(key, part))]
    if not rows:
        because = "no tier has a copy: it was never put, was given up, or was cleared"
        return Explanation(key=key.hex(), policy=policy.name, because=because)
    terms = policy.terms(view, rows[-1])
    return Explanation(
        key=key.hex(),
        policy=policy.name,
        because=terms.because,
        copies=tuple(_copy(view, row) for row in rows),
        numbers=terms.numbers,
        choices=terms.choices,
    )


def explain_last_drop(policy: Explainer) -> Explanation:
    """Say why the last drop was made."""
    drop = policy.last_drop
    if drop is None:
        return Explanation(key="", policy=policy.name, because="nothing was given up for room yet")
    terms = drop.terms
    return Explanation(
        key=drop.key.hex(),
        policy=policy.name,
        because=f"{drop.nbytes} bytes of {drop.tier} went: {terms.because}",
        numbers=terms.numbers,
        choices=terms.choices,
    )


def to_wire(explanation: Explanation) -> dict[str, Any]:
    """Return the dict that answers an `ExplainCall`."""
    wire: dict[str, Any] = msgspec.to_builtins(explanation)
    return wire


def from_wire(wire: dict[str, Any]) -> Explanation:
    """Read the answer to an `ExplainCall`. Raises: TierKVError: it is not one."""
    try:
        return msgspec.convert(wire, Explanation)
    except msgspec.ValidationError as error:
        raise incompatible(f"the explanation cannot be read ({error}): upgrade") from error


def _copy(view: Catalog, row: int) -> Copy:
    known = BY_NUMBER.get(view.profile[row])
    return Copy(
        tier=view.tiers[view.tier[row]],
        state=State(view.state[row]).name.lower(),
        profile=known.name if known else "unknown",
        fidelity=FIDELITIES[view.fidelity[row]].label if view.fidelity[row] else "unknown",
        nbytes=view.nbytes[row],
        allocated=view.allocated[row],
        held=view.holds[row],
        may_become={BY_NUMBER[one].name: new.kl for one, new in view.allowed(row).items()},
    )
