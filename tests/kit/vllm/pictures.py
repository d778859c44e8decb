"""Prompts with images for the tiny model that reads them; called by tests of images."""

from typing import Any, Final

from tests.kit.vllm.harness import random_prompt
from tests.kit.vllm.sharing import LENGTH
from tests.kit.vllm.tiny_models import IMAGE_ID, IMAGE_SIDE, IMAGE_TOKENS

TEXT_VOCAB: Final = 1000
"""Ids below the model's special words."""


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
