"""The engine of the demo: a process with a real model that answers what its order says.

It reads one order from standard input and writes one line of JSON for each thing it did.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tierkv.fidelity import CLASSES, Fidelity

if TYPE_CHECKING:
    import torch

    from tierkv_connectors.transformers import PrefixCache

DOCUMENT_TOKENS = 2800
QUESTIONS = (
    "In one sentence: what is this document about?",
    "Which keyword starts a statement that tests a condition?",
)
NEW_TOKENS = 24
WARM_UP_TOKENS = 64
SCORED_TOKENS = 128
"""So many more tokens of the document are teacher-forced behind the last prompt, to compare what
the model says on exact KV with what it says on KV that has lost something."""
FLUSH_S = 60.0
LOAD_S = 60.0
"""Longer than loading takes on a machine that is busy with other things: all is to be reused."""
SYSTEM = "You answer questions about a document."


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine process is for."""

    model: str
    socket: str
    name: str = ""
    """Of the answer."""
    prompt: list[int] = []
    """Answer this once, with the cache. Empty: hold the whole conversation, then say how the last
    answer is given without a cache."""
    vllm: str = ""
    """Python that has vLLM, for the engine of `demo_vllm`."""
    profiles: tuple[str, ...] = ("raw", "lossless")
    artifact: str = ""
    fidelity: str = Fidelity.EXACT.label
    scores: str = ""
    """File of what the model says on exact KV: made by the conversation, compared with by others.
    "": nothing is compared."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """One answered prompt."""

    name: str
    prompt: list[int]
    tokens: list[int]
    text: str
    ttft_s: float
    reused: int
    sources: dict[str, int]
    kl: float | None = None
    """Mean KL in nats per token of what the model says next, from what it says on exact KV."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The model is loaded."""

    seconds: float
    block_tokens: int
    block_bytes: int


class Durable(msgspec.Struct, frozen=True, kw_only=True, tag="durable"):
    """What a restart of the sidecar will find again."""

    blocks: int
    of: int


Event = Answer | Ready | Durable


def tell(event: Event) -> None:
    """Write one event to whoever started this process."""
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()


def document() -> str:
    """Return a real text that every Python brings along: its chapter on compound statements."""
    from pydoc_data.topics import topics

    return str(topics["compound"])


class Words:
    """A model's tokenizer, and the conversation in its tokens."""

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self.end: int | None = self._tokenizer.eos_token_id

    def converse(self, ask: Callable[[str, list[int]], Answer]) -> list[int]:
        """Ask every question about the document; returns the last prompt, which has all before."""
        prompt: list[int] = []
        for number, question in enumerate(QUESTIONS, 1):
            prompt = prompt + self._turn(question) if prompt else self._opening(question)
            answer = ask(f"turn {number}", prompt)
            if number < len(QUESTIONS):
                prompt = prompt + answer.tokens
        return prompt

    def text(self, tokens: list[int]) -> str:
        """Return tokens as text."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def more(self) -> list[int]:
        """Return the tokens of the document that follow those of the conversation."""
        return self._ids(document())[DOCUMENT_TOKENS:][:SCORED_TOKENS]

    def _opening(self, question: str) -> list[int]:
        start = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
        head = self._ids(start)
        return head + self._ids(document())[:DOCUMENT_TOKENS] + self._turn(question, "\n\n")

    def _turn(self, question: str, before: str = "<|im_end|>\n<|im_start|>user\n") -> list[int]:
        return self._ids(f"{before}{question}<|im_end|>\n<|im_start|>assistant\n")

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


class Engine:
    """A model, its tokenizer, a cache of prefixes, and the same model without one."""

    def __init__(self, order: Order) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        from tierkv.client import Client
        from tierkv.part import Part
        from tierkv_connectors.calibrated import codecs_with
        from tierkv_connectors.sidecar import SidecarChannel
        from tierkv_connectors.transformers import PrefixCache, identity_of

        logging.disable_progress_bar()
        started = time.perf_counter()
        self._words = Words(order.model)
        # In float32 a prefix computed at once and one that was loaded give the same tokens.
        model = AutoModelForCausalLM.from_pretrained(
            order.model, dtype=torch.float32, local_files_only=True
        ).eval()
        identity = identity_of(model)
        self.cached = PrefixCache(
            Client(SidecarChannel(order.socket, client="demo")),
            model,
            profiles=order.profiles,
            fidelity=CLASSES[order.fidelity],
            codecs=codecs_with(order.artifact, identity, Part.whole(identity)),
        )
        self.cached.deadline_s = LOAD_S
        self._model, self._scores = model, order.scores
        nowhere = Path(order.socket).with_name("nowhere.sock")
        self.alone = PrefixCache(Client(SidecarChannel(nowhere, client="demo")), model)
        self.alone.generate(range(WARM_UP_TOKENS), 1)
        block = self.cached.identity.tokens_per_block
        size = self.cached.part.raw_bytes(self.cached.identity)
        seconds = time.perf_counter() - started
        tell(Ready(seconds=seconds, block_tokens=block, block_bytes=size))

    def answer(
        self, name: str, prefix_cache: "PrefixCache", prompt: list[int], *, scored: bool = False
    ) -> Answer:
        """Answer a prompt and tell of it; scored: and of the loss, if anything is compared."""
        done = prefix_cache.generate(prompt, NEW_TOKENS, self._words.end)
        answer = Answer(
            name=name,
            prompt=prompt,
            tokens=done.tokens,
            text=self._words.text(done.tokens),
            ttft_s=done.ttft_s,
            reused=done.reused,
            sources=done.sources,
            kl=self._kl(prompt) if scored and self._scores else None,
        )
        tell(answer)
        return answer

    def _kl(self, prompt: list[int]) -> float:
        """Return how far what the model says on loaded KV is from what it says on exact KV."""
        import numpy as np
        import torch

        exact = torch.from_numpy(np.load(self._scores))
        found = self._said(self.cached, prompt)
        return float((exact.exp() * (exact - found)).sum(-1).mean().clamp(min=0))

    def _said(self, prefix_cache: "PrefixCache", prompt: list[int]) -> "torch.Tensor":
        """Return log probabilities [token, vocabulary] of what follows more of the document."""
        import torch

        from tierkv_connectors.transformers import cache_argument

        more = self._words.more()
        cache, reused = prefix_cache.load(prompt)
        ids = torch.tensor([prompt[reused:] + more])
        with torch.inference_mode():
            more_of: dict[str, Any] = {cache_argument(self._model): cache}
            logits = self._model(
                input_ids=ids, use_cache=True, logits_to_keep=len(more), **more_of
            ).logits
        return torch.log_softmax(logits[0], -1)

    def converse(self) -> None:
        """Ask every question about the document, then the last one again without the cache."""
        prompt = self._words.converse(lambda name, asked: self.answer(name, self.cached, asked))
        blocks = len(prompt) // self.cached.identity.tokens_per_block
        self.answer("cold", self.alone, prompt)
        if self._scores:
            import numpy as np

            np.save(self._scores, self._said(self.alone, prompt).numpy())
        tell(Durable(blocks=self.cached.flush(prompt, FLUSH_S), of=blocks))


def main() -> int:
    """Do what the order on standard input says."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    engine = Engine(order)
    if order.prompt:
        engine.answer(order.name, engine.cached, order.prompt, scored=True)
    else:
        engine.converse()
    return 0


if __name__ == "__main__":
    sys.exit(main())
