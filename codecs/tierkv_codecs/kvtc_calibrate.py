"""Calibration of `kvtc`: from the KV of some text to an artifact.

The basis is that of a principal component analysis in a metric. An error e in the keys (or values)
of one head costs about e' F e of KL divergence, where F is the second moment of the gradient of the
model's own log likelihood with respect to them. Features are weighted by the square root of F of
their head, so that the squared error of coefficients, which the plan minimises and to which one
step for all of them is best, is the KL that it costs; keys and values share one budget.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from tierkv.errors import invalid
from tierkv_codecs import kvtc_plan
from tierkv_codecs.kvtc_anchor_fit import FIRST_RANGE, fit_anchors
from tierkv_codecs.kvtc_anchors import Anchors
from tierkv_codecs.kvtc_artifact import HEEDED, WIDE, Artifact, ArtifactHeader, Side, pack
from tierkv_codecs.kvtc_basis import Basis, fit, weighted, weights
from tierkv_codecs.kvtc_drift import drift_of
from tierkv_codecs.kvtc_grades import coefficients_of
from tierkv_codecs.kvtc_heed import AHEAD, Heed, budgets_of, fit_heed
from tierkv_codecs.kvtc_measure import Measured, first_table, measure, probabilities, refine_table
from tierkv_codecs.kvtc_rans import ESCAPE, FIRST_SYMBOLS, NONE, SHIFTS
from tierkv_codecs.kvtc_rows import Rows as Centred

HEADROOM = 1.4
"""A level's budget is what its ratio leaves, less this factor: `kvtc@8x` is to realise 9 (as in the
paper, whose entropy stage comes on top of the nominal ratio) with headers and drift, and on
documents that cost more than held-out ones, as code does (it has more costly tokens, too)."""
VALUES = 1.5
"""What an error of values counts beside one of keys of the same F: a part of it is alike from token
to token, and a head's output adds that part up. Measured on SmolLM2-135M: 1.4 (prose), 3 (code)."""
ANCHORS = 0.07
"""Share of the bits of the coarsest level that anchors take: at it they then lose a hundredth of
what the other tokens do, and their one step is fine enough for all levels."""
ANCHOR_BITS = 6
"""Where anchors are rare, they get no more than so many bits for each feature."""
LEAST = 64
"""Anchors are learned from at least so many rows, those of the highest scores."""
HELD = 8
"""One row in so many, in runs of whole sequences, is held out."""
DRIFT_BLOCK, DRIFT_BLOCKS = 128, 128
"""Drift is measured on so many blocks of so many tokens."""
DRIFT_STEP = 1.5
"""Drift is rounded to so many times its root mean square: about a bit and a half each."""
SLAB = 512
FAINT = 0.35
"""Components of a smaller standard deviation, in steps, are never worth a bit."""
SAMPLED = 16
"""One component in so many is looked at to find the step."""
SLOPE = np.log(2) / 6
"""Squared steps of error that a bit saves in a uniform quantiser of many cells."""

Progress = Callable[[str, float], None]


class Rows(NamedTuple):
    """Calibration KV of one part: float16 [rows, features] of both sides, and their metrics.

    metrics: float32 [layers x heads, d, d] of both sides, for which no token counts more than a
    usual one; costly: what that leaves out of the mean over tokens. held: bool [rows], set for the
    sequences that the basis must not see. costs: float32 [rows], what an error in each costs beside
    others, NaN where it is not known.
    """

    keys: torch.Tensor
    values: torch.Tensor
    metrics: tuple[torch.Tensor, torch.Tensor]
    costly: tuple[torch.Tensor, torch.Tensor]
    held: torch.Tensor
    costs: torch.Tensor


def calibrate(rows: Rows, header: ArtifactHeader, progress: Progress) -> bytes:
    """Return the file of the artifact; `realised`, `errors` and `step` of `header` are replaced.

    Raises: TierKVError (invalid) when there are too few rows.
    """
    features = rows.keys.shape[1]
    train = int((~rows.held).sum())
    if train < features or not bool(rows.held.any()):
        raise invalid(
            f"{train} tokens cannot give a basis of {features} features: give text of at least"
            f" {2 * features} tokens, in sequences of which one in {HELD} is held out"
        )
    bases: list[Basis] = []
    metrics = (rows.metrics[0], VALUES * rows.metrics[1])
    for values, metric in zip((rows.keys, rows.values), metrics, strict=True):

        def on_step(done: float, before: int = len(bases)) -> None:
            progress("basis", (before + done) / 2)

        bases.append(fit(values, metric, rows.held, on_step))
    targets = [32 * features / (ratio * HEADROOM) for ratio in header.ratios]
    return plan(rows, bases, targets, header, progress)


def plan(
    rows: Rows,
    bases: Sequence[Basis],
    targets: Sequence[float],
    header: ArtifactHeader,
    progress: Progress,
) -> bytes:
    """Return the artifact for given bases and bits per token of each level, from the coarsest."""
    values = (rows.keys, rows.values)
    heed, score = _heed(rows, bases)
    chosen = score > heed.cuts[-1]
    chosen[score.topk(min(LEAST, len(score))).indices] = True
    anchors, spent = _anchors(rows, bases, chosen, targets[0], heed.shares[-1])
    shares = heed.shares[:-1]
    budgets = budgets_of([target - spent for target in targets], shares)
    step = _step(values, bases, rows.held, budgets[-1])
    measured = []
    for at, (of_side, basis) in enumerate(zip(values, bases, strict=True)):
        measured.append(_measured(of_side, basis, step, rows.held))
        progress("errors", (at + 1) / 2)
    shifts = nested_plans([(of.error, of.bits) for of in measured], budgets)
    progress("plan", 1.0)
    together = list(zip(values, bases, measured, shifts, strict=True))
    first, second = (_side(basis, of, plans, step) for _, basis, of, plans in together)
    errors = np.stack(
        [_errors(part[rows.held], basis, of, plans, step) for part, basis, of, plans in together],
        axis=1,
    )
    bits = [
        sum(_bits(of, plans[number]) for _, _, of, plans in together)
        for number in range(len(budgets))
    ]
    last = len(targets)
    realised = [
        32
        * rows.keys.shape[1]
        / (
            spent
            + sum(
                share * bits[min(level + AHEAD[grade], last)] for grade, share in enumerate(shares)
            )
        )
        for level in range(last)
    ]
    found = msgspec.structs.replace(
        header,
        errors=tuple(map(tuple, errors.tolist())),
        realised=tuple(realised),
        step=step,
        grades=AHEAD,
        cuts=heed.cuts,
    )
    weights_of = heed.weights[:, : min(len(first.basis), len(second.basis))] * step
    return _with_drift(found, (first, second), weights_of, anchors, rows)


def _heed(rows: Rows, bases: Sequence[Basis]) -> tuple[Heed, torch.Tensor]:
    """Learn which tokens' errors cost much, from coefficients in steps of 1; return all scores."""
    known = rows.costs.isfinite()
    first = slice(0, min(HEEDED, rows.keys.shape[1]))
    keys, values = (
        coefficients(part, basis, 1.0, first)
        for part, basis in zip((rows.keys, rows.values), bases, strict=True)
    )
    heed = fit_heed((keys[:, known], values[:, known]), rows.costs[known])
    return heed, heed.weights[0] @ keys + heed.weights[1] @ values


def _anchors(
    rows: Rows, bases: Sequence[Basis], chosen: torch.Tensor, bits: float, share: float
) -> tuple[Anchors, float]:
    """Return how rows that are chosen are coded, and the bits per token of all that they take."""
    metrics = (rows.costly[0], VALUES * rows.costly[1])
    unweights = torch.stack([weights(metric)[1] for metric in metrics])
    pairs = zip((rows.keys, rows.values), bases, strict=True)
    centred = torch.stack([part[chosen].float() - basis.mean for part, basis in pairs])
    most = float(ANCHOR_BITS * centred.shape[2] * 2)
    wanted = min(ANCHORS * bits / share, most) if share else most
    anchors, taken = fit_anchors(centred, rows.held[chosen], unweights, wanted)
    return anchors, share * taken


def coefficients(values: torch.Tensor, basis: Basis, step: float, part: slice) -> torch.Tensor:
    """Return coefficients float32 [components, rows], in steps, of some components."""
    vectors = (basis.vectors[:, part] / step).T.contiguous()
    wide = int((basis.variances[part].sqrt() > WIDE * step).sum())
    narrow = vectors.bfloat16()
    out = torch.empty(len(vectors), len(values))
    for start in range(0, len(values), 4096):
        some = weighted(values[start : start + 4096], basis.mean, basis.weight)
        found = out[:, start : start + 4096]
        found[wide:] = narrow[wide:] @ some.T.bfloat16()
        found[:wide] = vectors[:wide] @ some.T
    return out


def _measured(values: torch.Tensor, basis: Basis, step: float, held: torch.Tensor) -> Measured:
    rank = max(int((basis.variances.sqrt() > FAINT * step).sum()), 1)
    found = []
    for start in range(0, rank, SLAB):
        part = slice(start, min(start + SLAB, rank))
        rows = coefficients(values, basis, step, part)
        found.append(measure(rows[:, ~held].numpy(), rows[:, held].numpy()))
    return Measured(
        np.concatenate([of.error for of in found]),
        np.concatenate([of.bits for of in found]),
        np.concatenate([of.centres for of in found]),
        [counts for of in found for counts in of.counts],
    )


def _step(
    sides: Sequence[torch.Tensor], bases: Sequence[Basis], held: torch.Tensor, budget: float
) -> float:
    """Return the step at which one step for every component that is worth it takes the budget.

    Found on a sample of components and rows. Where all steps are equal error is least, so the
    finest level is nearly free of a mixture, and by powers of two the coarser ones are close.
    """
    samples, rows = [], torch.cat([held.nonzero()[:4096, 0], (~held).nonzero()[:8192, 0]])
    for values, basis in zip(sides, bases, strict=True):
        some = weighted(values[rows], basis.mean, basis.weight)
        samples.append((some @ basis.vectors[:, SAMPLED // 2 :: SAMPLED]).T.contiguous())
    seen = min(int(held.sum()), 4096)
    sample = torch.cat(samples)
    low, high = (float(sample.std(1).max()) * 2.0**power for power in (-30, 2))
    for _ in range(20):
        middle = (low * high) ** 0.5
        scaled = (sample / middle).numpy()
        of = measure(scaled[:, seen:], scaled[:, :seen])
        worth = of.error[:, NONE] - of.error[:, 0] > SLOPE * of.bits[:, 0]
        if SAMPLED * float(of.bits[worth, 0].sum()) > budget:
            low = middle
        else:
            high = middle
    return high


def nested_plans(
    choices: Sequence[tuple[np.ndarray, np.ndarray]], budgets: Sequence[float]
) -> list[np.ndarray]:
    """Return shifts int8 [levels, components] of each side: every level refines the one before."""
    unit = max(1, round(sum(len(error) for error, _ in choices) / 12000))
    plans: list[list[np.ndarray]] = [[] for _ in choices]
    current = [kvtc_plan.Choices(*of) for of in choices]
    for budget in budgets:
        units = int(budget / unit)
        tables = [kvtc_plan.solve(of, units, unit) for of in current]
        shares = kvtc_plan.split(tables[0], tables[1], units)
        for side, (table, share) in enumerate(zip(tables, shares, strict=True)):
            shifts = table.plan(share)
            if plans[side]:
                shifts = np.minimum(shifts, plans[side][-1])
            plans[side].append(shifts)
            current[side] = kvtc_plan.Choices(*choices[side]).nested(shifts)
    return [np.stack(of) for of in plans]


def _with_drift(
    header: ArtifactHeader,
    sides: tuple[Side, Side],
    heed: torch.Tensor,
    anchors: Anchors,
    rows: Rows,
) -> bytes:
    """Return the file with the drift of blocks of calibration values measured, level by level."""
    levels = len(header.ratios)
    shape = (levels, len(sides[1].mean), FIRST_SYMBOLS)
    artifact = Artifact(header, sides, torch.zeros(shape, dtype=torch.int16), heed, anchors, b"")
    starts = range(0, len(rows.values) - DRIFT_BLOCK + 1, DRIFT_BLOCK)
    found: list[list[torch.Tensor]] = [[] for _ in range(levels)]
    for start in starts[:: max(len(starts) // DRIFT_BLOCKS, 1)]:
        keys, values = (
            part[start : start + DRIFT_BLOCK].float() - side.mean
            for part, side in zip((rows.keys, rows.values), sides, strict=True)
        )
        block = coefficients_of(artifact, (Centred.of(keys), Centred.of(values)), levels - 1)
        groups = block.groups(artifact, levels - 1)
        drifted = drift_of(artifact, values, groups, levels)
        for into, one in zip(found, drifted, strict=True):
            into.append(one)
    weighted_drift = [torch.stack(into) for into in found]
    steps = [max(DRIFT_STEP * float(part.square().mean().sqrt()), 1e-6) for part in weighted_drift]
    tables = np.zeros(shape)
    for part, step, table in zip(weighted_drift, steps, tables, strict=True):
        whole = (part / step).round().clamp(-ESCAPE, ESCAPE).to(torch.int64).numpy() + ESCAPE
        for row in whole:
            table[np.arange(len(row)), row] += 1
    drift_table = torch.from_numpy(probabilities(tables).astype(np.int16))
    full = msgspec.structs.replace(header, drift_steps=tuple(steps))
    return pack(full, sides, drift_table, heed, anchors)


def _bits(of: Measured, shifts: np.ndarray) -> float:
    index = shifts[:, None].astype(np.int64)
    return float(np.take_along_axis(of.bits, index, 1).sum())


def _side(basis: Basis, of: Measured, shifts: np.ndarray, step: float) -> Side:
    coded = np.flatnonzero(shifts[-1] < NONE)
    rank = int(coded.max()) + 1 if len(coded) else 1
    shifts = shifts[:, :rank]
    deviation = basis.variances[:rank].sqrt().numpy() / step
    natural = np.ceil(np.log2(np.maximum(deviation / FIRST_RANGE, 1.0)))
    coarsest = np.where(shifts < NONE, shifts, 0).max(0)
    start = np.minimum(np.maximum(natural, coarsest), SHIFTS - 1).astype(np.int8)
    picked = np.minimum(shifts, SHIFTS - 1).astype(np.int64)
    centres = np.stack([of.centres[np.arange(rank), level] for level in picked])
    vectors = basis.vectors[:, :rank].T.contiguous()
    blocks, dim, _ = basis.weight.shape
    apart = vectors.view(rank, blocks, dim).transpose(0, 1)
    rows = torch.bmm(apart, basis.weight).transpose(0, 1).reshape(rank, -1) / step
    counts = of.counts[:rank]
    return Side(
        mean=basis.mean,
        basis=rows.bfloat16(),
        wide=rows[: max(int((deviation > WIDE).sum()), 1)],
        root=basis.unweight * step,
        deviation=torch.from_numpy(deviation.astype(np.float32)),
        shifts=torch.from_numpy(shifts.astype(np.int8)),
        start=torch.from_numpy(start),
        centres=torch.from_numpy(centres),
        first=torch.from_numpy(first_table(counts, start).astype(np.int16)),
        refine=torch.from_numpy(refine_table(counts).astype(np.int16).reshape(rank, -1)),
    )


def _errors(
    held: torch.Tensor, basis: Basis, of: Measured, shifts: np.ndarray, step: float
) -> np.ndarray:
    """Return the mean squared error of a held-out row at each level, in squared steps."""
    whole = sum(
        float(weighted(held[start : start + 4096], basis.mean, basis.weight).square().sum())
        for start in range(0, len(held), 4096)
    )
    outside = max(whole / step**2 / len(held) - float(of.error[:, NONE].sum()), 0.0)
    index = shifts.astype(np.int64)
    cut = [np.take_along_axis(of.error, level[:, None], 1).sum() for level in index]
    return outside + np.array(cut)
