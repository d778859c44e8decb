"""Engines with a vLLM that is not the one this package was made with: a version to come, as far as it can be had today.

Copies of the installed vLLM that work, each changed in one way. What is refused is refused by name, and with ``strict``
off served without the cache where vLLM can still call a connector that does nothing.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.kit.counts import count, only_in_proofs
from tests.kit.vllm.changed_vllm import Edit, copy_of_vllm, outcomes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

STRICT_AND_NOT = [{"strict": True}, {"strict": False}]
BLOCK_POOL, MANAGERS = "v1/core/block_pool.py", "v1/core/single_type_kv_cache_manager.py"
NEW_SPEC = "@dataclass(frozen=True, kw_only=True)\nclass LatestAttentionSpec(FullAttentionSpec): pass\n"
REGISTER = "KVCacheSpecRegistry.register(LatestAttentionSpec, FullAttentionManager, FullAttentionSpec)"
ATTENTION = "model_executor/layers/attention/attention.py"

WITHOUT_CACHE: dict[str, tuple[dict[str, list[Edit]], str]] = {
    "a renamed hook": (
        {"**": [(r"\bget_transfer_results\b", "take_transfer_results")]},
        r"KVConnectorBase_V1.get_transfer_results: it is gone, there is take_transfer_results",
    ),
    "a changed signature": (
        {
            BLOCK_POOL: [(r"def touch\(self, blocks: Sequence\[KVCacheBlock\]\)", "def touch(self, blocks, holder)")],
            MANAGERS: [(r"\.block_pool\.touch\(new_computed_blocks\)", ".block_pool.touch(new_computed_blocks, 0)")],
        },
        "BlockPool.touch: called as (blocks), takes (self, blocks, holder)",
    ),
    "a new spec class": (
        {
            "v1/kv_cache_interface.py": [
                (r"(?m)^@dataclass\(frozen=True, kw_only=True\)\nclass MLAAttentionSpec", NEW_SPEC + r"\g<0>"),
            ],
            ATTENTION: [
                (r"(?m)^    FullAttentionSpec,$", "    FullAttentionSpec,\n    LatestAttentionSpec,"),
                (r"return FullAttentionSpec\(", "return LatestAttentionSpec("),
            ],
            MANAGERS: [
                (r"(?m)^    FullAttentionSpec,$", "    FullAttentionSpec,\n    LatestAttentionSpec,"),
                (r"(?m)^    # FullAttentionSpec subclasses.*$", f"    {REGISTER}"),
            ],
        },
        "KV cache of this kind cannot be stored: .*spec=LatestAttentionSpec",
    ),
}  # fmt: skip
"""What is changed, and what the refusal says."""

NOT_AT_ALL: dict[str, tuple[dict[str, list[Edit]], str]] = {
    "a renamed hook that vLLM asks every connector for": (
        {"**": [(r"\bget_num_new_matched_tokens\b", "get_new_matched_tokens")]},
        "get_new_matched_tokens: vLLM asks for it: abstract method",
    ),
    "a hook with another signature": (
        {
            "distributed/kv_transfer/kv_connector/v1/base.py": [
                (r"def on_new_request\(self, request: \"Request\"\)", 'def on_new_request(self, request, arrival)')
            ],
        },
        "on_new_request: vLLM declares method (self, request, arrival), tiered_kv has method (self, request)",
    ),
}  # fmt: skip
"""The same where no connector of ours could be called, with ``strict`` or without."""


@pytest.mark.parametrize("change", WITHOUT_CACHE if count("MODELS", 0) else ["a new spec class"])
def test_what_differs_is_refused_by_name_or_served_without_the_cache(
    tiny_model: Path, tmp_path: Path, change: str
) -> None:
    edits, said = WITHOUT_CACHE[change]
    copy = copy_of_vllm(tmp_path / "copy", edits)
    (refused, served), log = outcomes(copy, tiny_model, tmp_path / "cache", STRICT_AND_NOT)

    _assert_says(refused["refused"], said)
    assert served["path"].startswith(str(copy)) and not served["has_cache"]
    first, second = served["answers"]
    assert first[0] == second[0] == 0, "tokens that came from a cache"
    assert first[1:] == second[1:]
    assert "this engine serves without the cache" in log
    _assert_says(log.partition("this engine serves without the cache")[2], said)


@only_in_proofs
@pytest.mark.parametrize("change", NOT_AT_ALL)
def test_a_connector_that_could_not_be_called_is_refused_in_any_case(
    tiny_model: Path, tmp_path: Path, change: str
) -> None:
    edits, said = NOT_AT_ALL[change]
    copy = copy_of_vllm(tmp_path / "copy", edits)
    answers, _ = outcomes(copy, tiny_model, tmp_path / "cache", STRICT_AND_NOT)

    for answer in answers:
        _assert_says(answer["refused"], said)


def test_a_version_far_ahead_serves_with_a_warning(tiny_model: Path, tmp_path: Path) -> None:
    copy = copy_of_vllm(tmp_path / "copy", {}, version="0.99.0")
    (served,), log = outcomes(copy, tiny_model, tmp_path / "cache", [{"strict": True}])

    assert served["vllm"] == "0.99.0" and served["has_cache"]
    assert "vLLM 0.99.0 is untested with tiered_kv. Every name and signature that is used of it is there" in log
    computed, loaded = served["answers"]
    assert (computed[0], loaded[0]) == (0, 512)
    assert loaded[1] == computed[1]
    assert _flat(loaded[2]) == pytest.approx(_flat(computed[2]), abs=0.1)


def _flat(logprobs: Any) -> list[float]:
    return [value for position in logprobs for value in position]


def _assert_says(text: str, said: str) -> None:
    """That all parts of ``said`` are in the text, in order."""
    for part in said.split(".*"):
        assert part in text
        text = text.partition(part)[2]
