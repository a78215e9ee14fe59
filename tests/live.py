"""A client of a real sidecar that puts and gets real KV, and knows what each block may become."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.kvtc_rigs import PART, place_at, text_like
from tests.move_rigs import IDENTITY, RAW_BYTES, TOKENS, Stored, decoded, read_all, registry
from tests.sidecars import connect
from tests.stores import fill
from tierkv import calls, frame
from tierkv.codec import BY_CODEC_ID, BY_LEVELS, PROFILES
from tierkv.explain import Explanation, from_wire
from tierkv.fidelity import Fidelity
from tierkv.reservation import Written
from tierkv.stat import StoreStat
from tierkv.stat import from_wire as stat_from_wire


class Live:
    """One client; `stored` has every block that it put, `sessions` whose chains they are.

    `puts` names the profiles of their puts, one after the other.
    """

    def __init__(self, path: Path, *puts: str) -> None:
        self.puts = puts
        self.client = connect(path)
        self.client.introduce(IDENTITY)
        self.codecs = registry()
        self.stored: dict[bytes, Stored] = {}
        self.sessions: set[int] = set()

    def fields(self, keys: Sequence[bytes], fidelity: int) -> dict[str, Any]:
        return {
            "namespace": "one", "fingerprint": IDENTITY.fingerprint, "keys": b"".join(keys),
            "parts": PART.pack(), "fidelity": int(fidelity), "position": 0,
            "tokens_per_block": TOKENS,
        }  # fmt: skip

    def put(self, keys: Sequence[bytes], name: str) -> int:
        """Put a chain in a profile; returns how many of its blocks became visible."""
        held = self.client.put(
            calls.PutCall(
                **self.fields(keys, Fidelity.SAFE), profiles=(name,), family=IDENTITY.family,
                artifacts=self.codecs.artifacts((name,)), raw_bytes=RAW_BYTES.to_bytes(8, "little"),
            )
        )  # fmt: skip
        if held is None:
            return 0
        written = []
        for index, unit in enumerate(held.units):
            one = self.stored.setdefault(keys[unit], self.made(keys[unit], unit, name))
            fill(held.payload(index), one.payload)
            written.append(Written(PROFILES[name].number, one.segments))
        return held.commit_written(written)

    def made(self, key: bytes, number: int, name: str) -> Stored:
        codec, position = self.codecs.named(name), number * TOKENS
        block = text_like(TOKENS, int.from_bytes(key[:4], "little"), position)
        out = torch.empty(codec.bound(RAW_BYTES), dtype=torch.uint8)
        segments = codec.encode(block, out, place_at(position))
        return Stored(block, out[: sum(segments)].numpy().tobytes(), segments, codec, position)

    def get(
        self, keys: Sequence[bytes], fidelity: int = Fidelity.SAFE
    ) -> list[tuple[frame.Header, torch.Tensor]]:
        """Return header and decoded block of all that a reader gets."""
        reply = self.client.match(
            calls.MatchCall(
                **self.fields(keys, fidelity), raw_bytes=RAW_BYTES, linear=1e-3, deadline_s=30.0
            )
        )
        if reply.pending:
            reply = self.client.wait(reply.match, 30.0)
        transfer = self.client.get(reply.match, reply.blocks) if reply.blocks else None
        if transfer is None:
            self.client.release(reply.match)
            return []
        return read_all(self.codecs, transfer)

    def expected(self, key: bytes, header: frame.Header) -> torch.Tensor:
        """Return what a block must decode to in the profile of a frame, made here."""
        one = self.stored[key]
        payload, segments = one.payload, tuple(length for length in header.segments if length)
        profile = BY_LEVELS.get((header.codec_id, len(segments)), BY_CODEC_ID[header.codec_id])
        codec = self.codecs.named(profile.name)
        assert codec.artifact == header.artifact
        if codec.id == one.codec.id:
            assert segments == one.segments[: len(segments)]
        else:
            out = torch.empty(codec.bound(RAW_BYTES), dtype=torch.uint8)
            assert codec.encode(one.block, out, place_at(one.position)) == segments
            payload = out.numpy().tobytes()
        return decoded(self.codecs, header, payload[: sum(segments)])

    def explain(self, key: bytes) -> Explanation:
        wire = self.client._channel.call(calls.ExplainCall(key=key))
        assert isinstance(wire, dict)
        return from_wire(wire)

    def stat(self) -> StoreStat:
        wire = self.client.stat()
        assert wire is not None
        return stat_from_wire(wire)

    def count(self, name: str) -> int:
        return self.stat().counters.get(name, 0)

    def settle(self, timeout_s: float = 60.0) -> StoreStat:
        """Return the counters once nothing is on its way down any more."""
        end = time.monotonic() + timeout_s
        while (stat := self.stat()).write_behind.queued_frames or stat.write_behind.going_bytes:
            assert time.monotonic() < end, "copies never arrive"
            time.sleep(0.02)
        return stat
