"""transformers: keep the KV of prompts and answers across calls, processes and machines.

    cache = PrefixCache(client, model)
    past, reused = cache.load(input_ids)  # a DynamicCache of the first `reused` tokens
    ... run the model on input_ids[reused:] ...
    cache.store(all_ids, past)  # prompt and generated tokens

`generate` does all three. One request at a time, batch 1, no padding: token i has position i. The
weights must stay what they were when the PrefixCache was made.
"""

import inspect
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from tierkv.calls import MAX_UNITS, FlushCall, MatchCall, PutCall
from tierkv.client import Client, Transfer
from tierkv.codec import profile_of
from tierkv.errors import invalid
from tierkv.fidelity import Fidelity
from tierkv.frame import DERIVED, LOSSY, Header
from tierkv.key import Extras, chain_keys, root_key
from tierkv.part import Part
from tierkv.reservation import Reservation, Written
from tierkv_codecs import CODECS, CodecRegistry
from tierkv_connectors.device.host import HostLane
from tierkv_connectors.edge import Edge
from tierkv_connectors.pages import UnitCopier
from tierkv_connectors.prefill import PrefillCost
from tierkv_connectors.sources import tokens_by_tier
from tierkv_connectors.transformers_identity import (
    TOKENS_PER_BLOCK,
    identity_of,
    refuse_unsafe,
)
from tierkv_connectors.views import Piece, Views

__all__ = ["TOKENS_PER_BLOCK", "Generated", "PrefixCache", "identity_of"]

DEADLINE_S = 10.0

Ids = Sequence[int] | npt.NDArray[np.int32] | torch.Tensor


class Generated(NamedTuple):
    """What `generate` did. `sources` counts the reused tokens by the tier they came from."""

    tokens: list[int]
    ttft_s: float
    reused: int
    sources: dict[str, int]
    stored: int


class PrefixCache:
    """Loads and stores the KV of one model.

    `deadline_s` is the longest that a load may take; past it, what has arrived is the answer.
    """

    deadline_s = DEADLINE_S

    def __init__(  # noqa: PLR0913 -- all but two have defaults that fit
        self,
        client: Client,
        model: PreTrainedModel,
        *,
        namespace: str = "default",
        tokens_per_block: int = TOKENS_PER_BLOCK,
        fidelity: Fidelity = Fidelity.EXACT,
        profiles: Sequence[str] = ("raw", "lossless"),
        weights: str | None = None,
        extras: Extras | None = None,
        codecs: CodecRegistry = CODECS,
    ) -> None:
        """Take a client and a model.

        Args:
            client: of an embedded store or a sidecar; stays the caller's to close.
            model: decoder-only, full attention, on one device.
            namespace: the tenant.
            tokens_per_block: see `identity_of`.
            fidelity: the least that a load may serve.
            profiles: what a store may encode to, in order of preference.
            weights: see `identity_of`.
            extras: what else separates content: "lora" (name and digest), "salt" (tenant).
            codecs: that have the profiles, and every other whose frames are to be read.

        Raises: TierKVError (invalid) for a model or profile that is not supported.
        """
        extras = dict(extras or {})
        self.identity = identity_of(model, tokens_per_block, weights)
        refuse_unsafe(model, self.identity, extras)
        for name in profiles:
            profile_of(name)
        self._artifacts = codecs.artifacts(profiles)
        self.part = Part.whole(self.identity, 0)
        self.edge = Edge()
        self.cost = PrefillCost()
        self._inexact: WeakSet[DynamicCache] = WeakSet()
        """Caches that begin with KV that lost something: what is computed on them is derived."""
        self.tokens_by_tier: Counter[str] = Counter()
        """Tokens that loads reused, by the tier they came from."""
        self._client = client
        client.introduce(self.identity)
        self._model = model
        self._namespace = namespace
        self._fidelity = fidelity
        self._profiles = tuple(profiles)
        # The namespace too: what another tenant stores must not stand in this one's place.
        self._root = root_key(self.identity.fingerprint, {**extras, "namespace": namespace})
        self._raw_bytes = self.part.raw_bytes(self.identity)
        self._copier = UnitCopier(self.identity, self.part, HostLane(), codecs)
        self._cache_argument = cache_argument(model)

    def load(self, input_ids: Ids) -> tuple[DynamicCache, int]:
        """Return a cache that holds the longest usable prefix, and its length in tokens.

        The length is a multiple of `tokens_per_block` and leaves at least one token to compute. A
        store that is gone, slow or wrong gives an empty cache.

        Raises: TierKVError (invalid) when `input_ids` is not one row of token ids.
        """
        tokens = _tokens(input_ids)
        empty = DynamicCache(config=self._model.config), 0
        return self.edge.shield("load", lambda: self._load(tokens), None) or empty

    def store(self, input_ids: Ids, cache: DynamicCache) -> int:
        """Offer the full blocks of a cache to the store, which takes what it does not have.

        Args:
            input_ids: every token whose KV is in the cache, in order, the generated ones too; more
                tokens than the cache holds are fine (the last generated one is never in it).
            cache: as `load` gave it and the model extended it.

        Returns: the count of blocks that are new in the store.

        Raises: TierKVError (invalid) when `input_ids` is not one row of token ids.
        """
        tokens = _tokens(input_ids)
        return self.edge.shield("store", lambda: self._store(tokens, cache), 0)

    def flush(self, input_ids: Ids, deadline_s: float) -> int:
        """Wait until the full blocks of these tokens outlive the store's process.

        Returns: how many do at the deadline, counted up to the first that does not.

        Raises: TierKVError (invalid) when `input_ids` is not one row of token ids.
        """
        tokens = _tokens(input_ids)
        keys = chain_keys(self._root, tokens, self.identity.tokens_per_block)
        call = FlushCall(
            namespace=self._namespace, keys=keys, parts=self.part.pack(), deadline_s=deadline_s
        )
        durable = self.edge.shield("flush", lambda: self._client.flush(call), b"")
        return (durable + b"\0").index(0)

    def generate(
        self, input_ids: Ids, max_new_tokens: int, eos_token_id: int | None = None
    ) -> Generated:
        """Continue a prompt greedily, reusing and storing what can be.

        Args:
            input_ids: one row of at least one token id.
            max_new_tokens: the most tokens to add.
            eos_token_id: ends the answer when it comes; it is part of the tokens.

        Raises: TierKVError (invalid) for wrong arguments; what the model raises.
        """
        tokens = _tokens(input_ids)
        if not len(tokens) or max_new_tokens < 1:
            raise invalid("generate needs at least one prompt token and one new token")
        before = self.tokens_by_tier.copy()
        started = time.perf_counter()
        cache, reused = self.load(tokens)
        loaded = time.perf_counter()
        new = [self._step(tokens[reused:], cache)]
        ttft_s = time.perf_counter() - started
        self.cost.observe(reused, len(tokens) - reused, started + ttft_s - loaded)
        while len(new) < max_new_tokens and new[-1] != eos_token_id:
            new.append(self._step(np.array(new[-1:], np.int32), cache))
        stored = self.store(np.append(tokens, np.array(new, np.int32)), cache)
        return Generated(new, ttft_s, reused, dict(self.tokens_by_tier - before), stored)

    def _step(self, tokens: npt.NDArray[np.int32], cache: DynamicCache) -> int:
        """Run the model on the next tokens and return the likeliest one after them."""
        row = torch.from_numpy(tokens.astype(np.int64))[None].to(self._model.device)
        more: dict[str, Any] = {self._cache_argument: cache}
        with torch.inference_mode():
            logits = self._model(input_ids=row, use_cache=True, logits_to_keep=1, **more).logits
        return int(logits[0, -1].argmax())

    def _load(self, tokens: npt.NDArray[np.int32]) -> tuple[DynamicCache, int] | None:
        block = self.identity.tokens_per_block
        blocks = min((len(tokens) - 1) // block, MAX_UNITS)
        if blocks < 1:
            return None
        # Never wait longer than computing would take.
        seconds = min(self.deadline_s, self.cost.seconds(0, blocks * block) or self.deadline_s)
        deadline = time.monotonic() + seconds
        reply = self._client.match(self._match_call(tokens[: blocks * block], seconds))
        if reply.pending:
            reply = self._client.wait(reply.match, max(deadline - time.monotonic(), 0.0))
        if not reply.blocks:
            self._client.release(reply.match)
            return None
        transfer = self._client.get(reply.match, reply.blocks)
        if transfer is None:
            return None
        with transfer:
            keys, values = self._room(reply.blocks * block)
            headers = transfer.headers()
            count = self._read(transfer, headers, keys, values, deadline)
        self.tokens_by_tier.update(tokens_by_tier(reply.sources, count * block, block))
        cache = self._filled(keys, values, count * block)
        if any(header.flags & (LOSSY | DERIVED) for header in headers[:count]):
            self._inexact.add(cache)
        return cache, count * block

    def _match_call(self, tokens: npt.NDArray[np.int32], deadline_s: float) -> MatchCall:
        return MatchCall(
            namespace=self._namespace,
            fingerprint=self.identity.fingerprint,
            keys=chain_keys(self._root, tokens, self.identity.tokens_per_block),
            parts=self.part.pack(),
            fidelity=self._fidelity,
            position=0,
            tokens_per_block=self.identity.tokens_per_block,
            raw_bytes=self._raw_bytes,
            linear=self.cost.linear,
            quadratic=self.cost.quadratic,
            fetch=True,
            deadline_s=deadline_s,
        )

    def _room(self, tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return new key and value tensors of every layer, as the model's own cache has them."""
        layers, _, _, heads, dim = self._copier.shape

        def new() -> torch.Tensor:
            shape = (1, heads, tokens, dim)
            return torch.empty(shape, dtype=self._copier.dtype, device=self._model.device)

        return [new() for _ in range(layers)], [new() for _ in range(layers)]

    def _read(
        self,
        transfer: Transfer,
        headers: Sequence[Header],
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        deadline: float,
    ) -> int:
        """Fill the tensors block by block; returns how many are sound, up to the first doubt."""
        read = 0
        for number, header in enumerate(headers):
            views = self._views(keys, values, number)
            late = time.monotonic() > deadline
            if late or not self._copier.read(transfer, number, header, views):
                break
            read = number + 1
        return transfer.intact(read)

    def _views(
        self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], number: int
    ) -> Views:
        size = self.identity.tokens_per_block
        span = slice(number * size, (number + 1) * size)
        whole = slice(0, size)
        return [
            Piece(
                slice(layer, layer + 1),
                whole,
                k[:, :, span].transpose(1, 2),
                v[:, :, span].transpose(1, 2),
            )
            for layer, (k, v) in enumerate(zip(keys, values, strict=True))
        ]

    def _filled(
        self, keys: list[torch.Tensor], values: list[torch.Tensor], tokens: int
    ) -> DynamicCache:
        """Return a cache of the first tokens; it owns the tensors, which are not copied again."""
        cache = DynamicCache(config=self._model.config)
        if tokens:
            for layer, k, v in zip(layers_of(cache), keys, values, strict=True):
                layer.lazy_initialization(k, v)
                layer.keys, layer.values = k[:, :, :tokens], v[:, :, :tokens]
        return cache

    def _store(self, tokens: npt.NDArray[np.int32], cache: DynamicCache) -> int:
        block = self.identity.tokens_per_block
        blocks = min(len(tokens), cache.get_seq_length()) // block
        blocks = min(blocks, MAX_UNITS)
        if blocks < 1:
            return 0
        keys, values = self._tensors(cache, blocks * block)
        reservation = self._client.put(
            PutCall(
                namespace=self._namespace,
                fingerprint=self.identity.fingerprint,
                keys=chain_keys(self._root, tokens[: blocks * block], block),
                parts=self.part.pack(),
                raw_bytes=self._raw_bytes.to_bytes(8, "little"),
                fidelity=self._fidelity,
                position=0,
                tokens_per_block=block,
                profiles=self._profiles,
                family=self.identity.family,
                artifacts=self._artifacts,
                derived=cache in self._inexact,
            )
        )
        return 0 if reservation is None else self._write(reservation, keys, values)

    def _tensors(
        self, cache: DynamicCache, tokens: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return keys and values of every layer.

        Raises: TierKVError (invalid) when they are not those of this model.
        """
        layers, _, _, heads, dim = self._copier.shape
        found = layers_of(cache)
        if len(found) != layers:
            raise invalid(f"the cache has {len(found)} layers, the model {layers}")
        keys = [layer.keys for layer in found if layer.keys is not None]
        values = [layer.values for layer in found if layer.values is not None]
        for tensor in keys + values:
            if (
                tensor.dtype != self._copier.dtype
                or (*tensor.shape[:2], tensor.shape[3]) != (1, heads, dim)
                or tensor.shape[2] < tokens
            ):
                raise invalid(f"a layer of the cache is {tensor.dtype} {tuple(tensor.shape)}")
        return keys, values

    def _write(
        self,
        reservation: Reservation,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> int:
        copier, profiles, small = self._copier, reservation.profiles, reservation.beside
        units, beside, copied_s = list[Written](), list[Written](), 0.0
        try:
            for index, unit in enumerate(reservation.units):
                started, position = time.perf_counter(), unit * self.identity.tokens_per_block
                pieces = reservation.payload(index)
                block = copier.take(self._views(keys, values, unit), profiles, pieces)
                units.append(copier.encode(block, profiles, pieces, position))
                copied_s += time.perf_counter() - started
                if small:
                    pieces = reservation.payload_beside(index)
                    beside.append(copier.encode_beside(block, small, pieces, position))
            return reservation.commit_written(units, copied_s, beside)
        finally:
            reservation.abort()


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name under which a model takes its cache in this release of transformers."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def layers_of(cache: DynamicCache) -> list[DynamicLayer]:
    """Return the layers of a cache of plain KV. Raises: TierKVError (invalid) for any other."""
    found = [layer for layer in cache.layers if type(layer) is DynamicLayer]
    if len(found) != len(cache.layers):
        raise invalid("the cache has layers that are not DynamicLayer: it cannot be kept")
    return found


def _tokens(input_ids: Ids) -> npt.NDArray[np.int32]:
    """Return one row of ids as int32. Raises: TierKVError (invalid)."""
    ids = input_ids.cpu().numpy() if isinstance(input_ids, torch.Tensor) else np.asarray(input_ids)
    if ids.ndim == 2 and len(ids) == 1:  # noqa: PLR2004 -- a batch of one
        ids = ids[0]
    if ids.ndim != 1 or (len(ids) and not np.issubdtype(ids.dtype, np.integer)):
        raise invalid(f"input_ids is one row of integers, not {ids.dtype} {ids.shape}")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 1 << 31:
        raise invalid("token ids are 0 to 2**31 - 1")
    return ids.astype(np.int32)
