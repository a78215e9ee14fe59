"""Kept: what both sides of the connector agree on about the KV of one engine."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TypeVar

import msgspec

from tierkv.calls import MatchCall, PutCall
from tierkv.codec import profile_of
from tierkv.errors import invalid
from tierkv.fidelity import CLASSES, Fidelity
from tierkv.identity import Identity
from tierkv.key import KEY_BYTES, Extras, root_key
from tierkv.part import Part
from tierkv.windows import pack
from tierkv_codecs import CodecRegistry
from tierkv_connectors.calibrated import codecs_with
from tierkv_connectors.prefill import PrefillCost
from tierkv_connectors.vllm.groups import KvGroup
from tierkv_connectors.vllm.ranks import ALONE, Ranks, parts_of

S = TypeVar("S", bound=msgspec.Struct)

LEAST_BLOCK_TOKENS = 128
"""Tokens of a store block, at least: shorter ones cost more for each byte."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config`: every field has a default.

    `socket` "" is the sidecar's usual place; `deadline_s` bounds the wait for one load.
    """

    socket: str = ""
    private: bool = False
    """Start a sidecar that ends with this engine, instead of using the one at `socket`."""
    settings: str = ""
    """Settings file of the private sidecar; "": the defaults."""
    namespace: str = "default"
    tokens_per_block: int = 0
    """0: the least multiple of the engine's block of at least 128 tokens."""
    weights: str = ""
    """Names the weights when the model directory cannot be trusted to."""
    deadline_s: float = 5.0
    timeout_s: float = 1.0
    """Longest that one call to the sidecar may take."""
    load: bool = True
    save: bool = True
    fidelity: str = "exact"
    """Class of what requests are served that do not ask for another one."""
    profiles: tuple[str, ...] = ("raw", "lossless")
    """What saves may encode to, as far as the class and the sidecar's gate allow."""
    artifact: str = ""
    """File of `tierkv calibrate`, for profiles of kvtc."""
    save_share: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 0.25
    """Most of the time that copies of saves may take while the engine computes."""
    save_queue_bytes: Annotated[int, msgspec.Meta(ge=0)] = 1 << 30
    """Raw bytes that may wait to be saved; what comes on top of them is given up."""
    flush_s: Annotated[float, msgspec.Meta(ge=0.0)] = 3.0
    """Longest that an engine that ends goes on saving. vLLM kills its workers after 5 s."""
    parallel_sizes: tuple[int, ...] = ()
    """Tensor-parallel sizes of other engines of the model, whose blocks are looked up too."""
    experimental_cuda: bool = False
    """Keep KV that lies on a GPU: compiled and tested against its CPU twin, but not run there."""


def options_of(extra: Mapping[str, Any]) -> Options:
    """Return the options of a connector. Raises: TierKVError (invalid) naming the wrong one."""
    options = checked("kv_connector_extra_config", dict(extra), Options)
    class_of(options.fidelity)
    for name in options.profiles:
        profile_of(name)
    return options


def class_of(name: str) -> Fidelity:
    """Return the class of a name. Raises: TierKVError (invalid) naming the known ones."""
    try:
        return CLASSES[name]
    except KeyError:
        raise invalid(f"fidelity {name!r} is not known; use one of {', '.join(CLASSES)}") from None


def check_device(kind: str, options: Options) -> None:
    """Refuse a kind of device that cannot be copied from, or has not been asked for.

    Raises: TierKVError (invalid) with the reason.
    """
    if kind == "cuda" and not options.experimental_cuda:
        raise invalid(
            "its KV lies on a GPU: copies there are tested against their CPU twin but have not run "
            "on a GPU yet; to try them, set experimental_cuda in kv_connector_extra_config"
        )
    if kind not in {"cpu", "cuda"}:
        raise invalid(f"its KV lies on {kind}: only CPU and CUDA are supported")


def checked(where: str, found: object, kind: type[S]) -> S:
    """Return what `found` says as a `kind`. Raises: TierKVError (invalid) naming what is wrong."""
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise invalid(f"{where}: {error}; it may have {known}") from None


def block_tokens(engine_tokens: int, wanted: int) -> int:
    """Return the tokens of a store block: a multiple of the engine's.

    Args:
        engine_tokens: of an engine block; where groups have blocks of several sizes, their least
            common multiple, at which the engine's own hits end.
        wanted: by the options; 0: the least that will do.

    Raises: TierKVError (invalid) when `wanted` is none.
    """
    if wanted % engine_tokens:
        raise invalid(
            f"tokens_per_block is {wanted}: it must be a multiple of {engine_tokens}, "
            "the tokens of a block of this engine"
        )
    return wanted or -(-LEAST_BLOCK_TOKENS // engine_tokens) * engine_tokens


@dataclass(frozen=True)
class Kept:
    """One engine's KV, as the store names it."""

    identity: Identity
    groups: tuple[KvGroup, ...]
    options: Options
    ranks: Ranks = ALONE

    @property
    def fidelity(self) -> Fidelity:
        """The class that requests are served unless they say otherwise."""
        return CLASSES[self.options.fidelity]

    @property
    def tokens(self) -> int:
        """Tokens of a store block."""
        return self.identity.tokens_per_block

    @cached_property
    def fails_whole(self) -> bool:
        """Whether a load that did not fill everything has to be reported as one that failed.

        vLLM finds the request of a block that was not filled, and the last token before it that
        can be gone on from, only where one group keeps all blocks.
        """
        engine_groups = {share.engine_group for group in self.groups for share in group.shares}
        return len(engine_groups) > 1 or self.groups[0].window is not None

    @cached_property
    def windows(self) -> bool:
        """Whether some KV group is only kept inside a window."""
        return any(group.window is not None for group in self.groups)

    @cached_property
    def raw_bytes(self) -> int:
        """Raw bytes of a store block, over all KV groups and heads."""
        return sum(
            Part.whole(self.identity, group.number).raw_bytes(self.identity)
            for group in self.groups
        )

    @cached_property
    def own_bytes(self) -> int:
        """Raw bytes of this worker's parts of a store block: the most that a save of it copies."""
        return self.raw_bytes // self.ranks.shards

    @cached_property
    def stored_shards(self) -> tuple[int, ...]:
        """Runs of heads in which blocks are looked up: this engine's, then those of others."""
        heads = self.identity.layers[0].kv_heads
        others = {min(size, heads) for size in self.options.parallel_sizes} - {self.ranks.shards}
        return self.ranks.shards, *sorted(size for size in others if heads % size == 0)

    def codecs(self) -> CodecRegistry:
        """Return the codecs of the engine's profiles and all others that may be read.

        Raises: TierKVError: the artifact cannot be read, or is not for this engine; a profile that
            none of them has.
        """
        if self.options.artifact and (len(self.groups) > 1 or self.ranks.shards > 1):
            raise invalid(
                "an artifact is for all layers and heads at once, which no worker has here"
            )
        whole = Part.whole(self.identity)
        codecs = codecs_with(self.options.artifact, self.identity, whole)
        for name in self.options.profiles:
            codecs.named(name)
        return codecs

    def ratio(self, group: int) -> int:
        """Return how many engine blocks a store block of a KV group has."""
        return self.tokens // self.groups[group].engine_tokens

    def fingerprint(self, epoch: int) -> bytes:
        """Return the identity's fingerprint in a later epoch: what was kept before is not found."""
        return msgspec.structs.replace(self.identity, epoch=epoch).fingerprint

    def root(self, fingerprint: bytes, extras: Extras) -> bytes:
        """Return the parent of the first block of a request with these extras."""
        # The namespace too: what another tenant stores must not stand in this one's place.
        return root_key(fingerprint, {**extras, "namespace": self.options.namespace})

    def match_call(
        self,
        fingerprint: bytes,
        keys: bytes,
        fidelity: Fidelity,
        deadline_s: float,
        cost: PrefillCost,
        shards: int,
        held: int = 0,
    ) -> MatchCall:
        """Return the question for a chain at a class, as stored in so many runs of heads.

        `held` store blocks of it are in the engine's own cache.
        """
        parts = [
            (part, group.blocks_needed(self.tokens))
            for group in self.groups
            for part in parts_of(self.identity, group.number, shards)
        ]
        windows = [blocks for _, blocks in parts]
        return MatchCall(
            namespace=self.options.namespace,
            fingerprint=fingerprint,
            keys=keys,
            parts=b"".join(part.pack() for part, _ in parts),
            fidelity=fidelity,
            position=0,
            tokens_per_block=self.tokens,
            raw_bytes=self.raw_bytes,
            linear=cost.linear,
            quadratic=cost.quadratic,
            deadline_s=deadline_s,
            windows=pack(windows) if any(windows) else b"",
            held=min(held, len(keys) // KEY_BYTES),
        )

    def claim_call(
        self, fingerprint: bytes, keys: bytes, fidelity: Fidelity, parts: Sequence[Part]
    ) -> MatchCall:
        """Return the question again for the units that a worker fetches of somebody's match."""
        return MatchCall(
            namespace=self.options.namespace,
            fingerprint=fingerprint,
            keys=keys,
            parts=b"".join(part.pack() for part in parts),
            fidelity=fidelity,
            position=0,
            tokens_per_block=self.tokens,
            raw_bytes=self.raw_bytes,
        )

    def put_call(
        self,
        fingerprint: bytes,
        keys: bytes,
        fidelity: Fidelity,
        artifacts: tuple[bytes, ...],
        group: int,
        start: int,
    ) -> PutCall:
        """Return the offer of this worker's part of a run that was computed on a prefix of a class.

        `keys` are those of the blocks from `start` on, which is 0 but for KV groups with a window.
        """
        part = self.ranks.own(self.identity, group)
        return PutCall(
            namespace=self.options.namespace,
            fingerprint=fingerprint,
            keys=keys,
            parts=part.pack(),
            raw_bytes=part.raw_bytes(self.identity).to_bytes(8, "little"),
            fidelity=fidelity,
            position=start * self.tokens,
            tokens_per_block=self.tokens,
            profiles=self.options.profiles,
            family=self.identity.family,
            artifacts=artifacts,
            derived=fidelity < Fidelity.EXACT,
        )


def engine_name() -> str:
    """Return what the sidecar calls a process of this engine."""
    return f"vllm-{os.getpid()}"
