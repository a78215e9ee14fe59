"""Calibrations: the artifacts that `[store] artifacts` names, for the codec worker.

They are looked at before anything starts, and only as far as can be told without the codecs, which
the sidecar's loop must not import: what they are of, their levels, their digest, and whether the
gate has measured them. The worker reads them whole, and only if they are still the same.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import msgspec

from tierkv.codec import ARTIFACT_FORMAT, PROFILES
from tierkv.errors import TierKVError, invalid, unavailable
from tierkv.gate import Gate
from tierkv.settings import Settings

MAX_HEAD_BYTES = 16 << 20
_SIZE_BYTES = 8


class Calibration(NamedTuple):
    """A file, its digest, and the model that it was made for."""

    path: Path
    digest: bytes
    model: str


class _About(msgspec.Struct, frozen=True):
    """What is read of an artifact's header."""

    format: int
    model: str
    ratios: tuple[float, ...]


def calibrations_of(settings: Settings, gate: Gate | None) -> tuple[Calibration, ...]:
    """Return the artifacts that the settings name.

    Raises: TierKVError: one cannot be used, or none can; says what to do about it.
    """
    if not settings.store.artifacts:
        return ()
    if settings.nvme is None and settings.redis is None:
        raise invalid(
            "[store] artifacts encode copies that leave RAM, and there is no tier for them to go"
            " to: add [nvme] or [redis], or take artifacts out"
        )
    found: dict[bytes, Calibration] = {}
    for path in map(Path, settings.store.artifacts):
        try:
            one = _read(path)
        except OSError as error:
            raise unavailable(
                f"[store] artifacts: cannot read {path}: {error.strerror or error}"
            ) from error
        except TierKVError as error:
            raise invalid(f"[store] artifacts: {path}: {error}") from error
        if one.digest in found:
            raise invalid(f"[store] artifacts: {path} is {found[one.digest].path} again")
        _check_gate(one, gate)
        found[one.digest] = one
    return tuple(found.values())


def _read(path: Path) -> Calibration:
    """Return what a file says of itself. Raises: OSError, TierKVError (invalid)."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_SIZE_BYTES), "little")
        head = file.read(size) if size <= MAX_HEAD_BYTES else b""
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").digest()
    try:
        about = msgspec.json.decode(json.loads(head)["__metadata__"]["tierkv.kvtc"], type=_About)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise invalid("it is no calibration artifact: make one with `tierkv calibrate`") from error
    if about.format != ARTIFACT_FORMAT:
        raise invalid(
            f"it has artifact format {about.format}, this release reads {ARTIFACT_FORMAT}: make it"
            " again with `tierkv calibrate`"
        )
    for level, ratio in enumerate(about.ratios, 1):
        profile = PROFILES.get(f"kvtc@{ratio:g}x")
        if profile is None or profile.levels != level:
            shown = ", ".join(f"{one:g}" for one in sorted(about.ratios))
            raise invalid(
                f"its ratios are {shown}; the sidecar encodes with the usual ones: calibrate"
                " without --ratios"
            )
    return Calibration(path, digest, about.model)


def _check_gate(one: Calibration, gate: Gate | None) -> None:
    """Refuse an artifact of which no profile may be used. Raises: TierKVError (invalid)."""
    name = f"[store] artifacts: {one.path} (digest {one.digest.hex()[:16]}, of {one.model})"
    fix = "measure it with `tierkv eval --artifact` and name the result in [store] gate"
    if gate is None:
        raise invalid(f"{name} may not be used without a gate: {fix}")
    measured = [entry for entry in gate.entries if entry.artifact == one.digest.hex()]
    if not measured:
        raise invalid(f"{name} is not what the gate has measured: {fix}")
    if all(gate.verdict(entry).fidelity is None for entry in measured):
        raise invalid(f"{name}: the gate rejects all of its profiles: take it out")
