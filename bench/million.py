"""Million: a log of many small frames on the real disk, whose keys are chains of real prompts."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.engine import FINGERPRINT, PARTS
from tierkv import frame
from tierkv.fidelity import Fidelity
from tierkv.key import chain_keys, root_key
from tierkv.namespace import digest_of
from tierkv.part import Part
from tierkv.tier import ALIGN, FrameId, Item, Status
from tierkv.tiers.host import aligned
from tierkv.tiers.nvme import NvmeSettings, NvmeTier

TOKENS_PER_BLOCK = 256
PROMPT_TOKENS = 128 << 10
CHAIN = PROMPT_TOKENS // TOKENS_PER_BLOCK
FRAME_BYTES = 4096
PAYLOAD = FRAME_BYTES - frame.header_bytes(1)
SPARE_BYTES = 3 << 30
"""Room in the log for what is written while it is measured."""
_BATCH = 2048


def prompt(number: int) -> NDArray[np.int32]:
    """Return the tokens of a chain's prompt, the same in every run."""
    return np.random.default_rng(number).integers(0, 128_000, PROMPT_TOKENS, dtype=np.int32)


def keys_of_prompt(tokens: NDArray[np.int32]) -> bytes:
    """Return a prompt's keys: what an engine computes for every request."""
    return chain_keys(root_key(FINGERPRINT), tokens, TOKENS_PER_BLOCK)


def log_settings(folder: Path, placements: int) -> NvmeSettings:
    """Return settings of a log with room for the frames and for what is put meanwhile."""
    size = placements * (FRAME_BYTES + 256) + SPARE_BYTES
    return NvmeSettings(path=str(folder), size_bytes=size, free_floor_bytes=0)


def build(folder: Path, placements: int) -> int:
    """Write the frames of whole chains, about `placements`; returns how many were written."""
    tier = NvmeTier(log_settings(folder, placements))
    memory = aligned(_BATCH * ALIGN)
    payload = np.random.default_rng(0).bytes(PAYLOAD)
    first = _header(bytes(32), 0)
    sealed = frame.seal(first, [bytearray(frame.pack(first) + payload)])
    for at in range(0, len(memory), ALIGN):
        memory[at + frame.header_bytes(1) : at + ALIGN] = payload
    written = 0
    for batch in _batches(placements // CHAIN):
        items = []
        for number, (key, position) in enumerate(batch):
            piece = memory[number * ALIGN : (number + 1) * ALIGN]
            header = msgspec.structs.replace(sealed, key=key, position=position)
            piece[: header.header_bytes] = frame.pack(header)
            locator = tier.reserve(FRAME_BYTES)
            assert locator is not None
            items.append(Item(FrameId(key, header.part), locator, FRAME_BYTES, [piece]))
        outcomes = tier.write(items)
        assert all(outcome.status is Status.DONE for outcome in outcomes), outcomes[:3]
        written += len(items)
    tier.close()
    return written


def _batches(chains: int) -> Iterator[list[tuple[bytes, int]]]:
    batch: list[tuple[bytes, int]] = []
    for number in range(chains):
        keys = keys_of_prompt(prompt(number))
        batch += [(keys[at * 32 : at * 32 + 32], at * TOKENS_PER_BLOCK) for at in range(CHAIN)]
        if len(batch) >= _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _header(key: bytes, position: int) -> frame.Header:
    return frame.Header(
        codec_id=1, flags=0, fidelity=Fidelity.EXACT, tokens=TOKENS_PER_BLOCK, position=position,
        generation=0, fingerprint=FINGERPRINT, key=key, namespace=digest_of("bench"),
        artifact=bytes(32), part=Part.unpack(PARTS), raw_bytes=PAYLOAD, epoch=0,
        segments=(PAYLOAD,),
    )  # fmt: skip
