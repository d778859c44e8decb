"""Prompts with images on a real engine: the same image hits, another one never does, though the tokens are the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.vllm.cached_engine import CHUNK, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.pictures import image, picture_prompt
from tests.kit.vllm.sharing import HIT, ask, assert_apart
from tests.kit.vllm.tiny_models import build_kind

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CachedEngine]:
    model = build_kind(repository / "build" / "models", "idefics3")
    options = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2}, "max_model_len": 1024}
    with cached_engine(model, tmp_path_factory.mktemp("cache"), **options) as made:
        yield made


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
