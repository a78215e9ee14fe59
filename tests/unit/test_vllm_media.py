"""Requests with images: placeholder tokens are alike, the images are not."""

from types import SimpleNamespace
from typing import Any

from tests.vllm_double import EngineDouble, prompts
from tierkv_connectors.vllm.media import is_named, media_extras

CAT, DOG = "c" * 64, "d" * 64


def image(name: str, offset: int, length: int = 20) -> Any:
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(modality="image", identifier=name, mm_hash=name, mm_position=position)


def test_blocks_have_the_hashes_of_what_they_hold() -> None:
    items = [image(CAT, 10), image(DOG, 30, 2)]
    found = media_extras(items, 16, 0, 4)
    assert found == {
        0: {"media0": f"image:{CAT}@10+20"},
        1: {"media0": f"image:{CAT}@-6+20", "media1": f"image:{DOG}@14+2"},
    }
    assert media_extras(items, 16, 1, 4) == {0: found[1]}
    assert media_extras(items, 16, 0, 1) == {0: found[0]}
    assert media_extras(items, 16, 2, 4) == {}
    assert media_extras([image(CAT, 10, 23)], 16, 0, 4).keys() == {0, 1, 2}


def test_names_that_clients_gave_are_not_hashes() -> None:
    assert is_named([])
    assert is_named([image(CAT, 0), image(CAT * 2, 30)])
    for name in ("cat", CAT[1:], CAT + "c", CAT.upper(), f"law:{CAT}"):
        assert not is_named([image(CAT, 0), image(name, 30)])
    tower = image(f"law:{CAT}", 0)  # LoRA of the encoder: vLLM puts its name before the hash
    tower.mm_hash = CAT
    assert is_named([tower])


def test_r05_another_image_is_another_block(engine: EngineDouble) -> None:
    tokens = next(prompts(1, 100))

    def hits(*items: Any) -> int:
        request = engine.ask(tokens)
        request.mm_features.extend(items)
        engine.scheduler.ended(request)  # ask again, now with its media
        engine.scheduler.arrived(request)
        engine.admit(request)
        engine.compute(request, engine.wait(request, request.external), 20)
        engine.end(request)
        engine.settle()
        return request.external

    assert hits(image(CAT, 40)) == 0
    assert hits(image(CAT, 40)) == 96
    assert hits(image(DOG, 40)) == 32, "what lies before the image is shared"
    assert hits(image(CAT, 41)) == 32
    assert hits(image(CAT, 40, 21)) == 32
    assert hits() == 32
    assert hits(image(CAT, 40), image(DOG, 70)) == 64
