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

from tierkv import heap
from tierkv.codec import LOSSLESS
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
BATCH_TOKENS = 4096
"""Sequences of so many tokens of prefix go through the model together, at least one: more are
faster and take more memory (of SmolLM2-135M about 1.5 GB)."""


class Suite(NamedTuple):
    """How much is measured: sequences per domain, tokens of prefix and of continuation.

    `tail` tokens at the end of a prefix stay exact.
    """

    name: str
    sequences: int
    context: int = 1024
    continuation: int = 128
    tail: int = 0


SUITES = {suite.name: suite for suite in (Suite("quick", 8), Suite("full", 32))}


@dataclass
class Tally:
    """What one profile did in one domain; `fallback` took the blocks that it could not."""

    profile: str
    domain: str
    lossy: bool
    artifact: bytes
    fallback: str = LOSSLESS.name
    documents: list[str] = field(default_factory=list)
    """Of each sequence."""
    predictions: list[Predictions] = field(default_factory=list)
    needle_ok: int = 0
    needle_n: int = 0
    """Needles that the model finds in exact KV."""
    weight: Weight = field(default_factory=Weight)
    errors: Mapping[str, list[list[float]]] = field(default_factory=dict)
    """By kind: for each layer the squared norms of the difference and of the exact tensor."""

    def add(self, other: "Tally") -> None:
        """Add what it did with other sequences of the domain."""
        self.documents += other.documents
        self.predictions += other.predictions
        self.needle_ok += other.needle_ok
        self.needle_n += other.needle_n
        self.weight.add(other.weight)
        self.errors = {
            kind: (np.array(of) + np.array(self.errors[kind])).tolist() if self.errors else of
            for kind, of in other.errors.items()
        }

    def relative(self, kind: str) -> list[float]:
        """Return a kind's relative error of each layer."""
        return [(lost / exact) ** 0.5 if exact else 0.0 for lost, exact in self.errors[kind]]


class Results(NamedTuple):
    """Everything that was measured, by (profile, domain); profiles and domains in order."""

    suite: Suite
    profiles: tuple[str, ...]
    domains: tuple[str, ...]
    tallies: Mapping[tuple[str, str], Tally]
    """With lossless as fallback, until `fallbacks.settle` chose others."""
    others: Mapping[tuple[str, str, str], Tally] = {}
    """By (profile, domain, fallback): the same with each other fallback that was tried."""


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
    fallbacks: Sequence[Codec] = (),
) -> Results:
    """Measure codecs on a model.

    Args:
        subject: the model.
        codecs: to measure, one for each profile.
        registry: of every codec whose frames may have to be read, lossless among them.
        documents: to read; never those that an artifact was calibrated on.
        suite: how much.
        on_step: told before each step.
        fallbacks: each is tried for the blocks that a codec cannot take, beside lossless.

    Raises:
        TierKVError (invalid): documents that are too short, a context that blocks do not divide.
        CodecError: a codec that calls itself exact and is not.
    """
    passages = passages_of(subject, documents, suite)
    cutter = Cutter(subject.identity, suite.context, suite.tail)
    table = _Table(subject, cutter, registry, tuple(passages), codecs, fallbacks)
    size = max(BATCH_TOKENS // suite.context, 1)
    batches = [
        (domain, mine[at : at + size])
        for domain, mine in passages.items()
        for at in range(0, len(mine), size)
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
            table.measure(domain, reference, codec)
            done += 1
        del reference  # before the next one is made: each holds its prefixes' KV twice
        heap.trim()  # or the heap grows by some 300 MB a batch
    names = tuple(codec.name for codec in codecs)
    return Results(suite, names, tuple(passages), table.tallies, table.others)


class _Table:
    """The tallies of an evaluation while it runs."""

    def __init__(
        self,
        subject: Subject,
        cutter: Cutter,
        registry: CodecRegistry,
        domains: Sequence[str],
        codecs: Sequence[Codec],
        fallbacks: Sequence[Codec],
    ) -> None:
        self._subject = subject
        self._cutter = cutter
        self._registry = registry
        self._fallbacks = fallbacks
        self.tallies = {
            (codec.name, domain): _empty(codec, domain) for codec in codecs for domain in domains
        }
        self.others = {
            (codec.name, domain, other.name): _empty(codec, domain, other)
            for codec in codecs
            for domain in domains
            for other in self._others(codec)
        }

    def measure(self, domain: str, reference: _Reference, codec: Codec) -> None:
        """Send a batch through a codec, once more with each fallback where one was needed."""
        first = self._measured(domain, reference, codec, None)
        self.tallies[codec.name, domain].add(first)
        for other in self._others(codec):
            found = first
            if first.weight.fallbacks:
                found = self._measured(domain, reference, codec, other)
            self.others[codec.name, domain, other.name].add(found)

    def _others(self, codec: Codec) -> list[Codec]:
        return [one for one in self._fallbacks if codec.lossy and one.name != codec.name]

    def _measured(
        self, domain: str, reference: _Reference, codec: Codec, fallback: Codec | None
    ) -> Tally:
        tally, cutter = _empty(codec, domain, fallback), self._cutter
        restored = cutter.through(reference.kv, codec, self._registry, tally.weight, fallback)
        _score(self._subject, cutter, reference, restored, tally)
        return tally


def _empty(codec: Codec, domain: str, fallback: Codec | None = None) -> Tally:
    other = LOSSLESS.name if fallback is None else fallback.name
    return Tally(codec.name, domain, codec.lossy, codec.artifact, other)


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
    tally.errors = {kind: [[0.0, 0.0] for _ in reference.kv] for kind in KINDS}
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
            tally.errors[kind][number] = list(measures.relative_error(one, other))
