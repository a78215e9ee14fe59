"""Codecs: pure functions between a block of KV and bytes. One line here adds one.

Names and ids agree with the profiles in `tierkv.codec`, which is all that the core knows of them.
"""

from tierkv_codecs.codec import (
    NO_ARTIFACT,
    SINKS,
    Codec,
    CodecError,
    CodecRegistry,
    Place,
    Unsuited,
)
from tierkv_codecs.lossless import Lossless
from tierkv_codecs.raw import Raw

__all__ = [
    "CODECS",
    "NO_ARTIFACT",
    "SINKS",
    "Codec",
    "CodecError",
    "CodecRegistry",
    "Lossless",
    "Place",
    "Raw",
    "Unsuited",
]

CODECS = CodecRegistry([Raw(), Lossless()])
