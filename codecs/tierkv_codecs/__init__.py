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
from tierkv_codecs.fp8 import Fp8
from tierkv_codecs.int4 import Int4
from tierkv_codecs.int8 import Int8
from tierkv_codecs.lossless import Lossless
from tierkv_codecs.raw import Raw

__all__ = [
    "CODECS",
    "NO_ARTIFACT",
    "SINKS",
    "Codec",
    "CodecError",
    "CodecRegistry",
    "Fp8",
    "Int4",
    "Int8",
    "Lossless",
    "Place",
    "Raw",
    "Unsuited",
]

CODECS = CodecRegistry([Raw(), Lossless(), Int8(), Int4(), Fp8()])
