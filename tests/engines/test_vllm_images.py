"""A real vLLM that sees images: the same placeholders hold what the image is, and nothing else's.

The model is Idefics 3 in small with random weights. What an answer should be transformers says.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Idefics3ForConditionalGeneration, Idefics3Processor

from tests.engines.tiny_models import IMAGE, SEEN, SIDE, WORDS, idefics
from tests.engines.vllm_engine import Answer, Engine, needs_vllm
from tests.engines.vllm_rig import BLOCK, config, serving, stored
from tests.sidecars import Process, until

pytestmark = pytest.mark.timeout(900)

RAM_BYTES = 256 << 20
NEW = 6
BEFORE = BLOCK + 20
"""Tokens before an image, which begins in the second block and ends there."""
LENGTH = 3 * BLOCK + 10
STORED = 3 * BLOCK


def words(count: int, start: int) -> list[int]:
    return [(start + number) * 104729 % WORDS for number in range(count)]


TEXT = words(BEFORE, 0), words(LENGTH - BEFORE - len(SEEN), BEFORE)
"""Before and behind an image."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return idefics(tmp_path_factory.mktemp("idefics"))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Save two images that differ in every pixel."""
    folder, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(5)
    paths = [folder / "one.png", folder / "two.png"]
    for path in paths:
        pixels = draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return paths


@pytest.fixture(scope="module")
def right(model: Path, images: list[Path]) -> list[list[int]]:
    """Return what transformers answers about each image."""
    sees = Idefics3Processor.from_pretrained(model).image_processor
    speaks = Idefics3ForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.tensor([[*TEXT[0], *SEEN, *TEXT[1]]])
    answers = []
    for path in images:
        found = speaks.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW,
            min_new_tokens=NEW, do_sample=False,
            **sees(Image.open(path), return_tensors="pt", input_data_format="channels_last"),
        )  # fmt: skip
        answers.append(found[0, ids.shape[1] :].tolist())
    return answers


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    needs_vllm((0, 28), "its own Idefics 3 ends with an image that is not split")
    with serving(tmp_path_factory.mktemp("images"), RAM_BYTES) as one:
        yield one


@pytest.fixture(scope="module")
def engine(sidecar: Process, model: Path) -> Iterator[Engine]:
    options: dict[str, Any] = {"max_model_len": 1024, "skip_tokenizer_init": False}
    with Engine(model, sidecar.log.with_name("engine.log"), config(sidecar), **options) as engine:
        yield engine


def ask(engine: Engine, image: Path, **more: Any) -> Answer:
    """Ask about an image, with nothing in the engine's own cache."""
    assert engine.reset_prefix_cache()
    return engine.generate([[*TEXT[0], IMAGE, *TEXT[1]]], NEW, [{"image": str(image), **more}])[0]


def test_an_image_reuses_its_own_blocks_and_of_others_what_lies_before(
    engine: Engine, sidecar: Process, images: list[Path], right: list[list[int]]
) -> None:
    assert right[0] != right[1], "an image changes the answer"
    one, two = images
    cold = ask(engine, one)
    assert (cold.cached, cold.tokens) == (0, right[0])
    assert until(lambda: stored(sidecar) == STORED // BLOCK)
    other = ask(engine, two)
    assert (other.cached, other.tokens) == (BLOCK, right[1]), "nothing from the image on"
    assert until(lambda: stored(sidecar) == (2 * STORED - BLOCK) // BLOCK)
    for image, tokens in zip(images, right, strict=True):
        again = ask(engine, image)
        assert (again.cached, again.tokens) == (STORED, tokens)
    assert engine.metrics("vllm:tierkv")["vllm:tierkv_errors"] == 0


def test_an_image_that_a_client_named_is_left_alone(
    engine: Engine, sidecar: Process, images: list[Path], right: list[list[int]]
) -> None:
    """A name may stand for anything: not even what lies before the image is touched."""
    before = stored(sidecar)
    for image, tokens in zip(images, right, strict=True):
        named = ask(engine, image, multi_modal_uuids={"image": [image.stem]})
        assert (named.cached, named.tokens, named.told) == (0, tokens, None)
    assert stored(sidecar) == before
