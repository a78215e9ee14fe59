"""Codecs: pure functions between a block of KV and bytes. One line here adds one.

Names and ids agree with the profiles in `tierkv.codec`, which is all that the core knows of them.
"""

from tierkv_codecs.codec import Codec, CodecError, CodecRegistry
from tierkv_codecs.lossless import Lossless
from tierkv_codecs.raw import Raw

__all__ = ["CODECS", "Codec", "CodecError", "CodecRegistry", "Lossless", "Raw"]

CODECS = CodecRegistry()
CODECS.add(Raw())
CODECS.add(Lossless())
