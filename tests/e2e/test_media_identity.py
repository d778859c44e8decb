"""How images are named and processed is part of what a key says: engines that differ in it share no image's KV."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.kit.vllm.cached_engine import assert_same, cached_engine
from tests.kit.vllm.harness import Answer
from tests.kit.vllm.pictures import image, picture_prompt
from tests.kit.vllm.sharing import HIT, ask
from tests.kit.vllm.tiny_models import build_kind

# Each test starts two or three engines.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": {"image": 2},
    "max_model_len": 1024,
    "mm_processor_cache_gb": 0,
}
UNHASHED = OPTIONS | {"enable_prefix_caching": False}


@pytest.fixture(scope="module")
def model(repository: Path) -> Path:
    return build_kind(repository / "build" / "models", "idefics3")


def answer(model: Path, root: Path, prompt: dict[str, Any], **options: Any) -> list[Answer]:
    """Two answers of one engine of its own."""
    with cached_engine(model, root, **options) as engine:
        return [ask(engine, prompt), ask(engine, prompt)]


def test_another_image_is_no_hit_where_vllm_only_counts_images(model: Path, tmp_path: Path) -> None:
    """Engine one's n-th image and engine two's have one name there: no image's KV is stored or loaded."""
    stored = answer(model, tmp_path / "kv", picture_prompt(11, image(1)), **UNHASHED)
    other = answer(model, tmp_path / "kv", picture_prompt(11, image(2)), **UNHASHED)
    plain = answer(model, tmp_path / "apart", picture_prompt(11, image(2)), **UNHASHED)

    assert [a.cached_tokens for a in (*stored, *other)] == [0, 0, 0, 0]
    assert_same(other[0], plain[0])
    assert stored[0].logprobs != plain[0].logprobs, "the image does not change the answer"


def test_text_still_hits_where_vllm_only_counts_images(model: Path, tmp_path: Path) -> None:
    text = {"prompt_token_ids": picture_prompt(12)["prompt_token_ids"]}
    first, again = answer(model, tmp_path / "kv", text, **UNHASHED)

    assert [first.cached_tokens, again.cached_tokens] == [0, HIT]
    assert_same(again, first)


def test_options_of_the_processor_make_another_cache(model: Path, tmp_path: Path) -> None:
    dark = {"mm_processor_kwargs": {"image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]}}
    prompt = picture_prompt(13, image(1))
    stored = answer(model, tmp_path / "kv", prompt, **OPTIONS)
    other = answer(model, tmp_path / "kv", prompt, **OPTIONS, **dark)
    plain = answer(model, tmp_path / "apart", prompt, **OPTIONS, **dark)

    assert [a.cached_tokens for a in (*stored, *other)] == [0, HIT, 0, HIT]
    assert_same(other[0], plain[0])
    assert_same(other[1], plain[0])
    assert stored[0].logprobs != plain[0].logprobs, "the options do not change the answer"


def test_an_edited_file_of_the_processor_makes_another_cache(model: Path, tmp_path: Path) -> None:
    """And the file as it was finds what was stored."""
    ours = Path(shutil.copytree(model, tmp_path / "model"))
    file = ours / "preprocessor_config.json"
    as_it_was = file.read_text()
    prompt = picture_prompt(14, image(1))

    stored = answer(ours, tmp_path / "kv", prompt, **OPTIONS)
    file.write_text(json.dumps(json.loads(as_it_was) | {"image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]}))
    other = answer(ours, tmp_path / "kv", prompt, **OPTIONS)
    plain = answer(ours, tmp_path / "apart", prompt, **OPTIONS)
    file.write_text(as_it_was)
    back = answer(ours, tmp_path / "kv", prompt, **OPTIONS)

    assert [a.cached_tokens for a in (*stored, *other, *back)] == [0, HIT, 0, HIT, HIT, HIT]
    assert_same(other[0], plain[0])
    assert_same(back[0], stored[0])
    assert stored[0].logprobs != plain[0].logprobs, "the file does not change the answer"
