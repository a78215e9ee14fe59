"""transformers with a real model: what a prefix cache gives is what the model gives without one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.sidecars import Process, connect, until
from tierkv import frame
from tierkv.cache import TierKV
from tierkv.channel import EmbeddedChannel
from tierkv.client import Client
from tierkv.settings import Settings
from tierkv.tiers.host import HostSettings
from tierkv_connectors.transformers import PrefixCache

BLOCK = 32
NEW = 8
HEADER = frame.header_bytes(1)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def text(model_dir: Path) -> list[int]:
    from pydoc_data.topics import topics

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return list(tokenizer(topics["with"])["input_ids"])


@pytest.fixture
def store() -> Iterator[TierKV]:
    opened = TierKV.open(Settings(host=HostSettings(size_bytes=64 << 20)))
    yield opened
    opened.close(0.0)


@pytest.fixture(params=["embedded", "sidecar"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    if request.param == "embedded":
        opened: TierKV = request.getfixturevalue("store")
        client = Client(EmbeddedChannel(opened, opened.host.view, timeout_s=30.0))
        yield client
        client.close()
        return
    process = Process(tmp_path)
    process.start()
    client = connect(process.path)
    yield client
    client.close()
    process.stop()


def prefix_cache(client: Client, model: Any, profile: str = "raw") -> PrefixCache:
    return PrefixCache(client, model, tokens_per_block=BLOCK, profiles=(profile,))


def cold(model: Any, prompt: list[int], count: int = NEW, **more: Any) -> list[int]:
    """Ask the model itself, with its own loop and its own cache."""
    ids = torch.tensor([prompt])
    done = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        **more,
    )
    return list(done[0, len(prompt) :].tolist())


@pytest.mark.parametrize("profile", ["raw", "lossless"])
def test_a_hit_continues_as_the_model_would(
    client: Client, model: Any, text: list[int], profile: str
) -> None:
    prompt = text[: 6 * BLOCK + 5]
    first = prefix_cache(client, model, profile).generate(prompt, NEW)
    assert (first.reused, first.stored) == (0, 6)
    again = prefix_cache(client, model, profile).generate(prompt, NEW)
    assert (again.reused, again.sources) == (6 * BLOCK, {"host": 6 * BLOCK})
    assert first.tokens == again.tokens == cold(model, prompt)


def test_generated_tokens_are_reused_in_the_next_turn(
    client: Client, model: Any, text: list[int]
) -> None:
    prompt = text[: 2 * BLOCK - 4]
    answer = prefix_cache(client, model).generate(prompt, NEW)
    follow_up = prompt + answer.tokens + text[-20:]
    second = prefix_cache(client, model).generate(follow_up, NEW)
    assert second.reused == 2 * BLOCK
    assert second.tokens == cold(model, follow_up)


def test_the_generate_of_transformers_takes_a_loaded_cache(
    store: TierKV, model: Any, text: list[int]
) -> None:
    client = Client(EmbeddedChannel(store, store.host.view))
    prompt = text[: 3 * BLOCK + 7]
    prefix_cache(client, model).generate(prompt, 1)
    past, reused = prefix_cache(client, model).load(prompt)
    assert reused == 3 * BLOCK
    assert cold(model, prompt, cache=past) == cold(model, prompt)
    client.close()


@pytest.mark.parametrize("blocks", [1, 3])
def test_r10_whole_prompts_in_the_store(
    store: TierKV, model: Any, text: list[int], blocks: int
) -> None:
    client = Client(EmbeddedChannel(store, store.host.view))
    prefix_cache(client, model).generate(text[: 4 * BLOCK], 1)
    for count in (blocks * BLOCK - 1, blocks * BLOCK, blocks * BLOCK + 1):
        done = prefix_cache(client, model).generate(text[:count], 4)
        assert done.reused == (count - 1) // BLOCK * BLOCK
        assert done.tokens == cold(model, text[:count], 4)
    client.close()


def test_r11_a_frame_damaged_in_the_arena_is_a_miss(
    store: TierKV, model: Any, text: list[int]
) -> None:
    client = Client(EmbeddedChannel(store, store.host.view))
    prompt = text[: 4 * BLOCK + 1]
    prefix_cache(client, model).generate(prompt, 1)
    arena, page = store.host.view, store.host.page_bytes
    third = [
        at
        for at in range(0, len(arena), page)
        if isinstance(header := frame.parse(arena[at : at + HEADER]), frame.Header)
        and header.position == 2 * BLOCK
    ]
    assert len(third) == 1
    arena[third[0] + 100] ^= 1
    done = prefix_cache(client, model).generate(prompt, NEW)
    assert done.reused == 2 * BLOCK
    assert done.tokens == cold(model, prompt)
    client.close()


def test_generation_goes_on_when_the_sidecar_is_killed(
    model: Any, text: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(tmp_path)
    process.start()
    client = connect(process.path)
    ours = prefix_cache(client, model)
    prompt = text[: 3 * BLOCK + 1]
    ours.generate(prompt, 1)
    step, steps = ours._step, 0

    def kill_after_two(*args: Any) -> int:
        nonlocal steps
        steps += 1
        if steps == 2:
            process.kill()
        return step(*args)

    monkeypatch.setattr(ours, "_step", kill_after_two)
    expected = cold(model, prompt)
    during = ours.generate(prompt, NEW)
    assert (during.reused, during.stored, during.tokens) == (3 * BLOCK, 0, expected)
    gone = ours.generate(prompt, NEW)
    assert (gone.reused, gone.tokens) == (0, expected)
    process.start()
    assert until(lambda: client.stat() is not None)
    assert ours.generate(prompt, NEW).stored == 3
    assert ours.generate(prompt, NEW).reused == 3 * BLOCK
    assert not ours.edge.failures
    client.close()
    process.stop()
