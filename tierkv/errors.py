"""The error of tierkv.

A miss, a full tier and a throttle are results (`tier.Outcome`), never errors.

An error is raised only for what the caller must change: a wrong setting, a wrong argument, a peer
of another protocol. Its message names what was wrong and the fix.
"""

import enum


class ErrorKind(enum.Enum):
    """Why a call was refused, and whether the same call can succeed later."""

    INVALID = "invalid"
    """An argument or a setting is wrong: never retry."""
    UNAVAILABLE = "unavailable"
    """A resource is missing now (memory, disk, socket, lock): retry after the fix."""
    INCOMPATIBLE = "incompatible"
    """The other side speaks another protocol or format version: never retry."""


class TierKVError(Exception):
    """An error with a kind and a message that names the fix."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def invalid(message: str) -> TierKVError:
    """Return an error for a wrong argument or setting."""
    return TierKVError(ErrorKind.INVALID, message)


def unavailable(message: str) -> TierKVError:
    """Return an error for a resource that is missing now."""
    return TierKVError(ErrorKind.UNAVAILABLE, message)


def incompatible(message: str) -> TierKVError:
    """Return an error for a peer of another protocol or format."""
    return TierKVError(ErrorKind.INCOMPATIBLE, message)
