"""Profiles: a codec at one setting, as the core sees it. Encoding itself lives in `tierkv_codecs`.

A codec id names one byte format for ever; a changed format is a new id.
"""

import msgspec

from tierkv.errors import invalid


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of a codec.

    `ratio` (raw bytes over payload bytes) and `decode_bps` (raw bytes per second) are expectations
    that the cost model starts from. `bound_extra` is what a payload may exceed the raw bytes by.
    A progressive codec's payload has up to `segments` of them, each prefix being a coarser block;
    a block of this profile has its first `levels`, 0 where nothing can be cut.
    A block of an exact profile keeps the fidelity of what it was computed on; what a `lossy` one
    may promise is measured for each model and never stands here.
    """

    name: str
    number: int
    codec_id: int
    lossy: bool = False
    ratio: float
    decode_bps: float
    bound_extra: int = 0
    segments: int = 1
    levels: int = 0


RAW = Profile(name="raw", number=1, codec_id=1, ratio=1.0, decode_bps=float("inf"))
LOSSLESS = Profile(
    name="lossless",
    number=2,
    codec_id=2,
    ratio=1.45,
    decode_bps=1.6e9,
    bound_extra=1024,
)

INT8 = Profile(
    name="int8",
    number=3,
    codec_id=3,
    lossy=True,
    ratio=1.91,
    decode_bps=12e9,
    bound_extra=1024,
)
INT4 = Profile(
    name="int4",
    number=4,
    codec_id=4,
    lossy=True,
    ratio=3.2,
    decode_bps=3e9,
    bound_extra=1024,
)
FP8 = Profile(
    name="fp8",
    number=5,
    codec_id=5,
    lossy=True,
    ratio=1.94,
    decode_bps=12e9,
    bound_extra=1024,
)

KVTC = tuple(
    Profile(
        name=f"kvtc@{ratio}x",
        number=number,
        codec_id=6,
        lossy=True,
        ratio=1.1 * ratio,
        decode_bps=0.1e9,
        bound_extra=1024,
        segments=4,
        levels=levels,
    )
    for number, ratio, levels in ((6, 4, 4), (7, 8, 3), (8, 16, 2), (9, 32, 1))
)
"""One format at four levels: what `tierkv calibrate` makes unless it is told other ratios."""

PROFILES = {profile.name: profile for profile in (RAW, LOSSLESS, INT8, INT4, FP8, *KVTC)}
BY_NUMBER = {profile.number: profile for profile in PROFILES.values()}
BY_LEVELS = {(profile.codec_id, profile.levels): profile for profile in KVTC}
"""By codec id and count of segments, of progressive formats."""
ARTIFACT_FORMAT = 3
"""Of the calibration files that this release makes and reads."""
BY_CODEC_ID = {profile.codec_id: profile for profile in reversed(PROFILES.values())}
"""The first of each format: where only a frame's header is known, its costs count."""


def profile_of(name: str) -> Profile:
    """Return the profile of that name. Raises: TierKVError (invalid) naming the known ones."""
    try:
        return PROFILES[name]
    except KeyError:
        known = ", ".join(sorted(PROFILES))
        raise invalid(f"profile {name!r} is not known; use one of {known}") from None
