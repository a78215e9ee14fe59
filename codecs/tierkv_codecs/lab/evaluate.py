"""Evaluate: what each profile does to a model's answers, domain by domain.

The model computes a prefix once; its KV, rounded to the engine's dtype, is the reference. Every
profile sends that KV through frames and the same continuation is teacher-forced on what comes back.
The continuation's own KV is exact in both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from tierkv.errors import invalid
from tierkv_codecs.codec import Codec, CodecError, CodecRegistry
from tierkv_codecs.lab import measures
from tierkv_codecs.lab.measures import Predictions
from tierkv_codecs.lab.passages import NEEDLE, Passage, needles, of_documents
from tierkv_codecs.lab.roundtrip import Cutter, Weight, changed
from tierkv_codecs.lab.subject import Attention, Kv, LayerKv, Subject
from tierkv_codecs.lab.texts import Document

KEYS, VALUES, ATTENTION = "keys", "values", "attention"
KINDS = (KEYS, VALUES, ATTENTION)
BATCH = 4
"""Sequences that go through the model together: more are faster and take more memory."""


class Suite(NamedTuple):
    """How much is measured: sequences per domain, tokens of prefix and of continuation."""

    name: str
    sequences: int
    context: int = 1024
    continuation: int = 128


SUITES = {suite.name: suite for suite in (Suite("quick", 8), Suite("full", 32))}


@dataclass
class Tally:
    """What one profile did in one domain."""

    profile: str
    domain: str
    lossy: bool
    artifact: bytes
    documents: list[str] = field(default_factory=list)
    """Of each sequence."""
    predictions: list[Predictions] = field(default_factory=list)
    needle_ok: int = 0
    needle_n: int = 0
    """Needles that the model finds in exact KV."""
    weight: Weight = field(default_factory=Weight)
    errors: Mapping[str, list[list[float]]] = field(default_factory=dict)
    """By kind: for each layer the squared norms of the difference and of the exact tensor."""

    def relative(self, kind: str) -> list[float]:
        """Return a kind's relative error of each layer."""
        return [(lost / exact) ** 0.5 if exact else 0.0 for lost, exact in self.errors[kind]]


class Results(NamedTuple):
    """Everything that was measured, by (profile, domain); profiles and domains in order."""

    suite: Suite
    profiles: tuple[str, ...]
    domains: tuple[str, ...]
    tallies: Mapping[tuple[str, str], Tally]


class Step(NamedTuple):
    """Progress: what is being done, and the share of all work that is behind it."""

    text: str
    share: float


class _Reference(NamedTuple):
    """A batch of passages on exact KV."""

    passages: Sequence[Passage]
    kv: Kv
    ids: torch.Tensor
    """Of the continuations."""
    logs: torch.Tensor
    """Log probabilities."""
    attention: Attention
    outputs: list[torch.Tensor]


def passages_of(
    subject: Subject, documents: Sequence[Document], suite: Suite
) -> dict[str, list[Passage]]:
    """Return what is read in each domain, needles last. Raises: TierKVError (invalid)."""
    domains: dict[str, list[Document]] = {}
    for document in documents:
        domains.setdefault(document.domain, []).append(document)
    if NEEDLE in domains or not domains:
        raise invalid(f"texts have domains of their own, and {NEEDLE!r} is the lab's")
    found = {
        domain: of_documents(
            mine, subject.tokens, suite.sequences, suite.context, suite.continuation
        )
        for domain, mine in domains.items()
    }
    found[NEEDLE] = needles(documents, subject.tokens, suite.sequences, suite.context)
    return found


def evaluate(
    subject: Subject,
    codecs: Sequence[Codec],
    registry: CodecRegistry,
    documents: Sequence[Document],
    suite: Suite,
    on_step: Callable[[Step], None] = lambda _step: None,
) -> Results:
    """Measure codecs on a model.

    Args:
        subject: the model.
        codecs: to measure, one for each profile.
        registry: of every codec whose frames may have to be read, lossless among them.
        documents: to read; never those that an artifact was calibrated on.
        suite: how much.
        on_step: told before each step.

    Raises:
        TierKVError (invalid): documents that are too short, a context that blocks do not divide.
        CodecError: a codec that calls itself exact and is not.
    """
    passages = passages_of(subject, documents, suite)
    cutter = Cutter(subject.identity, suite.context)
    tallies = {
        (codec.name, domain): Tally(codec.name, domain, codec.lossy, codec.artifact)
        for domain in passages
        for codec in codecs
    }
    batches = [
        (domain, mine[at : at + BATCH])
        for domain, mine in passages.items()
        for at in range(0, len(mine), BATCH)
    ]
    # A prefill costs about what two and a half profiles do.
    costs, done = 2.5 + len(codecs), 0.0
    for number, (domain, batch) in enumerate(batches):
        on_step(Step(f"{domain}: exact KV", done / (len(batches) * costs)))
        reference = _reference(subject, cutter, batch)
        done += 2.5
        for codec in codecs:
            on_step(Step(f"{domain}: {codec.name}", done / (len(batches) * costs)))
            if number == 0:  # kernels compile at their first call
                _warm(cutter, reference, codec, registry)
            tally = tallies[codec.name, domain]
            restored = cutter.through(reference.kv, codec, registry, tally.weight)
            _score(subject, cutter, reference, restored, tally)
            done += 1
    names = tuple(codec.name for codec in codecs)
    return Results(suite, names, tuple(passages), tallies)


def _reference(subject: Subject, cutter: Cutter, batch: Sequence[Passage]) -> _Reference:
    prefix = torch.tensor([passage.prefix for passage in batch])
    ids = torch.tensor([passage.continuation for passage in batch])
    kv = cutter.rounded(subject.prefill(prefix))
    logits, attention = subject.watch(kv, ids)
    logs = torch.log_softmax(logits, -1)
    return _Reference(batch, kv, ids, logs, attention, list(attention.outputs(kv)))


def _warm(cutter: Cutter, reference: _Reference, codec: Codec, registry: CodecRegistry) -> None:
    one = [LayerKv(layer.keys[:1], layer.values[:1]) for layer in reference.kv]
    cutter.through(one, codec, registry, Weight())


def _score(
    subject: Subject, cutter: Cutter, reference: _Reference, restored: Kv, tally: Tally
) -> None:
    logs = reference.logs
    if tally.lossy:
        logs = torch.log_softmax(subject.proceed(restored, reference.ids), -1)
    elif any(changed(reference.kv, restored)):
        raise CodecError(f"{tally.profile} calls itself exact, and KV came back different")
    if not bool(torch.isfinite(logs).all()):
        raise CodecError(f"{tally.profile} made of finite KV something that is not")
    for row, passage in enumerate(reference.passages):
        scored = slice(passage.scored.start, passage.scored.stop)
        targets = torch.tensor(passage.targets[scored])
        exact = reference.logs[row, scored]
        found = measures.compare(exact, logs[row, scored], targets)
        tally.documents.append(passage.document)
        tally.predictions.append(found)
        if passage.domain == NEEDLE and bool((exact.argmax(-1) == targets).all()):
            tally.needle_n += 1
            tally.needle_ok += bool(found.right.all())
    _add_errors(cutter, reference, restored, tally)


def _add_errors(cutter: Cutter, reference: _Reference, restored: Kv, tally: Tally) -> None:
    layers = len(reference.kv)
    if not tally.errors:
        tally.errors = {kind: [[0.0, 0.0] for _ in range(layers)] for kind in KINDS}
    coded = cutter.coded()
    outputs = reference.attention.outputs(restored) if tally.lossy else reference.outputs
    for number, (exact, found, output) in enumerate(
        zip(reference.kv, restored, outputs, strict=True)
    ):
        pairs = {
            KEYS: (exact.keys[:, :, coded], found.keys[:, :, coded]),
            VALUES: (exact.values[:, :, coded], found.values[:, :, coded]),
            ATTENTION: (reference.outputs[number], output),
        }
        for kind, (one, other) in pairs.items():
            sums = tally.errors[kind][number]
            lost, norm = measures.relative_error(one, other)
            sums[0] += lost
            sums[1] += norm


def kl_of(tally: Tally) -> list[np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Return the KL of every token, sequence by sequence."""
    return [one.kl for one in tally.predictions]
