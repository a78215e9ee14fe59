"""Codecs of an engine: the fixed ones, and those of its model's calibration artifact."""

from pathlib import Path

from tierkv.identity import Identity
from tierkv.part import Part
from tierkv_codecs import CODECS, CodecRegistry
from tierkv_codecs.kvtc import codecs_of
from tierkv_codecs.kvtc_artifact import read


def codecs_with(artifact: str | Path, identity: Identity, part: Part) -> CodecRegistry:
    """Return the codecs of all, with those of the artifact file; "": none.

    Raises: TierKVError: the file cannot be read, or was calibrated for another model or part.
    """
    if not artifact:
        return CODECS
    found = read(Path(artifact))
    found.check(identity, part)
    return CodecRegistry([*CODECS.all(), *codecs_of(found)])
