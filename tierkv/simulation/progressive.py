"""What simulated engines code with loss: a gate that allows kvtc, and how long its blocks are."""

import hashlib

from tierkv.codec import KVTC
from tierkv.gate import Domain, Entry, Gate

FAMILY = hashlib.sha256(b"tierkv.simulation family").digest()
ARTIFACT = hashlib.sha256(b"tierkv.simulation artifact").digest()
_MEASURED = Domain(
    domain="prose", sequences=8, tokens=1024, kl_mean=0.02, kl_lo=0.02, kl_hi=0.02,
    kl_p99=0.05, kl_p99_hi=0.05, top1=0.99, top1_lo=0.98, dnll=0.0,
)  # fmt: skip
GATE = Gate(
    entries=tuple(
        Entry(
            model="simulated", family=FAMILY.hex(), kv_dtype="bf16", profile=profile.name,
            artifact=ARTIFACT.hex(), context=1 << 20, ratio=profile.ratio, domains=(_MEASURED,),
        )
        for profile in KVTC
    )
)  # fmt: skip


def cuts(name: bytes, raw_bytes: int) -> list[int]:
    """Return the bytes of the segments of a block at the finest level: they vary with its key."""
    whole = raw_bytes * (12 + name[0] % 20) // 100
    return [whole * share // 10 for share in (1, 2, 3, 4)]
