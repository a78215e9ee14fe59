"""Requests whose blocks vLLM's own prefix cache must not share, and drafts that are no tokens."""

from random import Random
from types import SimpleNamespace

import pytest

from tests.vllm_double import Asked, EngineDouble, finish, over, prompts
from tests.vllm_memory import following, kept_of
from tierkv.cache import TierKV
from tierkv.fidelity import Fidelity
from tierkv_connectors.vllm.apart import Apart

LAW = SimpleNamespace(lora_name="law")


def salt(apart: Apart, content: str, own: str | None = None) -> str | None:
    request = Asked("r", [1, 2, 3], cache_salt=own, lora_request=LAW, block_hashes=["vLLM's"])
    apart.separate(request, Fidelity.EXACT, content)
    if request.cache_salt != own:
        assert request.block_hashes == [(request.cache_salt, (1, 2, 3))], "named anew"
    return request.cache_salt


def test_r04_another_content_under_an_adapter_s_name_has_blocks_of_its_own() -> None:
    apart = Apart(Fidelity.EXACT)
    assert [salt(apart, one) for one in ("law@a", "law@a")] == [None, None], "vLLM's own names"
    second, third = salt(apart, "law@b"), salt(apart, "law@c")
    assert second is not None
    assert len({second, third, None}) == 3
    assert [salt(apart, one) for one in ("law@a", "law@b", "law@c")] == [None, second, third]
    tenant = salt(apart, "law@b", "tenant")
    assert tenant is not None
    assert tenant.startswith("tenant ")
    assert salt(Apart(Fidelity.EXACT), "law@b") is None
    assert salt(apart, "") is None, "no adapter"


def test_r04_an_adapter_of_unknown_content_leaves_its_name_to_nobody() -> None:
    apart = Apart(Fidelity.EXACT)
    apart.left_alone(Asked("r", [1]))
    apart.left_alone(Asked("r", [1], lora_request=LAW))
    assert salt(apart, "law@a") is not None


@pytest.mark.parametrize("first", ["wishes", "content"])
def test_r04_requests_that_are_left_alone_are_kept_apart_too(
    engine: EngineDouble, first: str
) -> None:
    """What they leave in the engine's cache is computed on by others, which are stored."""
    content: dict[str, str | None] = {"lora": "law@a"}
    engine.scheduler._extras_of = lambda _: content if content["lora"] else None  # type: ignore[assignment,return-value]
    tokens = next(prompts(1, 60))

    def asked(**wishes: object) -> str | None:
        request = engine.made(tokens, **wishes)
        request.lora_request = LAW
        engine.scheduler.arrived(request)
        engine.scheduler.ended(request)
        return request.cache_salt

    assert asked() is None
    if first == "wishes":
        content["lora"] = "law@b"
        assert asked(stroe=1) is not None
    else:
        content["lora"] = None
        assert asked() is None
        content["lora"] = "law@a"
        assert asked() is not None


def right(tokens: list[int], count: int) -> list[int]:
    """Return the next tokens."""
    found = list(tokens)
    for _ in range(count):
        found.append(following(found))
    return found[len(tokens) :]


@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_never_stored(store: TierKV, seed: int) -> None:
    """Each step computes three drafts behind the known tokens, some of which are rejected."""
    engine, random = over(store, kept_of(4, 16), blocks=128), Random(seed)
    request = engine.ask(next(prompts(10 + seed, 40)))
    engine.admit(request)
    computed, first, rejected = 0, True, 0
    while request.num_tokens < 140:
        accepted = random.randrange(4)
        sampled = right(request.all_token_ids, accepted + 1)
        request.drafts = [*sampled[:accepted], *[5] * (3 - accepted)]
        rejected += 3 - accepted
        known = request.num_tokens
        engine.grow(request)
        request.all_token_ids.pop()  # only its blocks were wanted
        engine.step({request.request_id: (request, computed, known + 3 - computed, first)})
        computed, first = known + accepted, False
        request.all_token_ids += sampled
    request.drafts = []
    engine.grow(request)
    engine.compute(request, computed)
    engine.check(request)
    engine.end(request)
    assert rejected
    engine.settle()
    other = over(store, kept_of(4, 16), blocks=128)
    assert other.run(request.all_token_ids).external >= 128
    finish(other)
    finish(engine)
