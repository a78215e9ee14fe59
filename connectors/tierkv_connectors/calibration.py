"""What a calibration learns from a transformers model: KV of text, and what errors in it cost."""

from collections.abc import Callable, Sequence

import torch

from tierkv.errors import invalid
from tierkv.identity import Identity
from tierkv.part import Part
from tierkv_codecs.codec import SINKS
from tierkv_codecs.kvtc_calibrate import HELD, Rows
from tierkv_codecs.lab.subject import Kv, LayerKv
from tierkv_codecs.rope import unrope
from tierkv_connectors.subject import TransformersSubject, cache_of

CONTEXT, CONTINUATION = 1024, 128
GRADIENTS = 32
"""Sequences whose gradients are taken; more changes the metric little."""
SEED = 1
COST_TURNS = 8

Progress = Callable[[str, float], None]


class CalibrationSubject(TransformersSubject):
    """A model that also says how its predictions depend on the KV of their prefix."""

    def gradients(self, kv: Kv, ids: torch.Tensor, generator: torch.Generator) -> Kv:
        """Return the gradient of the log likelihood of a continuation with respect to KV.

        Args:
            kv: of the prefix.
            ids: [1, token], the continuation; each next token is drawn from the model's own
                prediction, so that the mean of squared gradients is the curvature of the KL
                divergence (the Fisher information).
            generator: for the draws.
        """
        leaves = [LayerKv(*(side.clone().requires_grad_() for side in layer)) for layer in kv]
        predicted = self._run(ids, cache_of(leaves))[0].log_softmax(-1)
        drawn = torch.multinomial(predicted.detach().exp(), 1, generator=generator)
        predicted.gather(1, drawn).sum().backward()
        return [
            LayerKv(*(torch.zeros_like(side) if side.grad is None else side.grad for side in layer))
            for layer in leaves
        ]


def sequences_of(documents: Sequence[Sequence[int]], tokens: int) -> list[torch.Tensor]:
    """Cut tokenised documents into sequences; documents take turns until there are `tokens`.

    Raises: TierKVError (invalid): the documents are too short.
    """
    size = CONTEXT + CONTINUATION
    cut = [
        [torch.tensor(ids[at : at + size]) for at in range(0, len(ids) - size + 1, size)]
        for ids in documents
    ]
    turns = max(map(len, cut), default=0)
    found = [one[turn] for turn in range(turns) for one in cut if turn < len(one)]
    if len(found) < HELD:
        raise invalid(
            f"the text gives {len(found)} sequences of {size} tokens, at least {HELD} are needed:"
            " give longer or more files"
        )
    return found[: max(-(-tokens // (CONTEXT - SINKS)), HELD)]


def part_of(identity: Identity) -> Part:
    """Return the part that an artifact of this model codes. Raises: TierKVError (invalid)."""
    if len(identity.groups) > 1:
        raise invalid(
            f"{identity.model} has {len(identity.groups)} KV groups (layers of different windows or"
            " sizes); kvtc calibrates models of one group: use int8 or int4 for this one"
        )
    if any(layer.k_dim != layer.v_dim for layer in identity.layers):
        raise invalid(
            f"{identity.model} has keys and values of different sizes: kvtc cannot code it"
        )
    return Part.whole(identity)


def capture(
    subject: CalibrationSubject, sequences: Sequence[torch.Tensor], progress: Progress
) -> Rows:
    """Run the model over sequences; one in HELD is held out from the basis."""
    layers = subject.identity.layers
    count, every = CONTEXT - SINKS, max(len(sequences) // GRADIENTS, 1)
    rows: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    sums: list[torch.Tensor] = []
    costs = torch.full((len(sequences), count), torch.nan)
    generator = torch.Generator().manual_seed(SEED)
    for number, ids in enumerate(sequences):
        kv = subject.prefill(ids[None, :CONTEXT])
        for side, values in zip(rows, _flat(kv, slice(SINKS, CONTEXT), subject), strict=True):
            side.append(values.transpose(0, 1).reshape(count, -1).half())
        if number % every == 0:
            slopes = subject.gradients(kv, ids[None, CONTEXT:], generator)
            coded = slice(SINKS, CONTEXT - CONTINUATION)
            found = _alike(_flat(slopes, coded, subject))
            cost = cost_of(found)
            costs[number, : len(cost)] = cost
            # A few tokens cost so much that they would be the whole metric: anchors have their own.
            usual = 1 / cost.clamp(min=1.0)
            moments = [
                torch.einsum("lthi,lthj->lhij", side * share[:, None, None], side).flatten(0, 1)
                for share in (usual, 1 - usual)
                for side in found
            ]
            sums = [old + new for old, new in zip(sums, moments, strict=True)] if sums else moments
        progress("reading", (number + 1) / len(sequences))
    used = len(range(0, len(sequences), every)) * (CONTEXT - CONTINUATION - SINKS)
    held = torch.arange(len(sequences) * count) // count % HELD == HELD - 1
    keys, values = (torch.cat(side) for side in rows)
    assert len(layers) == len(sums[0]) // layers[0].kv_heads
    first, second, *costly = (one / used for one in sums)
    return Rows(keys, values, (first, second), (costly[0], costly[1]), held, costs.flatten())


def cost_of(slopes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what an error in each token costs, beside the tokens' geometric mean [token].

    That of a token is the mean over heads of its squared gradient over the head's usual one, which
    is a mean over tokens of theirs over their costs: both are found in turn (as Tyler's estimator
    of scatter finds them), since a few tokens would be the whole mean otherwise.

    Args:
        slopes: gradients [layer, token, head, dim] of keys and of values.
    """
    energies = torch.cat([side.square().sum(3).transpose(0, 1).flatten(1) for side in slopes], 1)
    energies = energies + energies.mean() * 1e-6
    cost = torch.ones(len(energies))
    for _ in range(COST_TURNS):
        usual = (energies / cost[:, None]).mean(0)
        cost = (energies / usual).mean(1)
        cost = cost / cost.log().mean().exp()
    return cost


def _alike(slopes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return gradients of a sequence in units of their root mean square: sequences count alike."""
    scale = torch.stack([side.square().mean() for side in slopes]).mean().sqrt()
    return [side / scale for side in slopes]


def _flat(kv: Kv, span: slice, subject: CalibrationSubject) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys without RoPE and values, float32 [layer, token, head, dim], of some tokens."""
    keys, values = (
        torch.stack([layer[side][0].detach() for layer in kv]).transpose(1, 2) for side in (0, 1)
    )
    return unrope(keys, subject.identity.layers, 0)[:, span], values[:, span].float()
