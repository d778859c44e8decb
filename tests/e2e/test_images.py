"""Prompts with images on a real engine: the same image hits, another one never does, though the tokens are the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cached_engine import CHUNK, CachedEngine, assert_same, cached_engine
from sharing import HIT, LENGTH, ask, assert_apart
from tiny_models import IMAGE_ID, IMAGE_SIDE, IMAGE_TOKENS, build_kind
from vllm_harness import random_prompt

pytestmark = pytest.mark.vllm

TEXT_VOCAB = 1000
"""Ids below the model's special words."""


@pytest.fixture(scope="module")
def engine(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CachedEngine]:
    model = build_kind(repository / "build" / "models", "idefics3")
    options = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2}, "max_model_len": 1024}
    with cached_engine(model, tmp_path_factory.mktemp("cache"), **options) as made:
        yield made


def image(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    shape = (IMAGE_SIDE, IMAGE_SIDE, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def picture_prompt(seed: int, *images: Any, at: int = 100, identity: str | None = None) -> dict[str, Any]:
    """A prompt of text with images at token ``at``, and how vLLM is told who they are."""
    text = random_prompt(seed, LENGTH - (IMAGE_TOKENS + 3) * len(images), vocab=TEXT_VOCAB)  # 3 words mark an image
    prompt = {
        "prompt_token_ids": text[:at] + [IMAGE_ID] * len(images) + text[at:],
        "multi_modal_data": {"image": list(images)},
    }
    return prompt | ({"multi_modal_uuids": {"image": [identity] * len(images)}} if identity else {})


def test_prompts_with_other_images_never_share(engine):
    answers = assert_apart(engine, *((picture_prompt(1, image(seed)), None) for seed in (1, 2)))

    assert answers[0].tokens != answers[1].tokens, "the image does not change the answer"


def test_order_of_images_counts(engine):
    assert_apart(engine, *((picture_prompt(2, image(a), image(b)), None) for a, b in ((1, 2), (2, 1))))


def test_image_at_another_place_is_another_prompt_from_there_on(engine):
    places = [CHUNK + 40, CHUNK + 41, CHUNK - 1]

    stored, later, earlier = (ask(engine, picture_prompt(3, image(1), at=place)) for place in places)

    assert [answer.cached_tokens for answer in (stored, later, earlier)] == [0, CHUNK, 0]


def test_identity_that_the_user_gives_an_image_is_respected(engine):
    answers = assert_apart(engine, *((picture_prompt(4, image(1), identity=name), None) for name in ("x", "y")))
    trusted = ask(engine, picture_prompt(4, image(2), identity="x"))

    # Whoever names images answers for them: vLLM does not look at the second one either.
    assert trusted.cached_tokens == HIT
    assert_same(trusted, answers[0])
