"""Before any end-to-end test is believed: on this model, wrong KV gives wrong answers.

Plain vLLM, its own prefix cache, no connector. If zeroed KV went unnoticed here, equal tokens would prove nothing.
"""

from pathlib import Path

import pytest

from tests.kit.vllm.harness import block_ids, generate, kv_fingerprint, random_prompt, running, zero_kv

pytestmark = pytest.mark.vllm

PROMPTS = [random_prompt(seed, 300) for seed in range(4)]


def test_zeroed_kv_changes_the_answer(tiny_model: Path) -> None:
    with running(tiny_model) as llm:
        cold = generate(llm, PROMPTS)
        warm = generate(llm, PROMPTS)
        zero_kv(llm)
        zeroed = generate(llm, PROMPTS)

    assert [a.cached_tokens for a in cold] == [0] * len(PROMPTS)
    assert [a.cached_tokens for a in warm] == [a.cached_tokens for a in zeroed] == [288] * len(PROMPTS)
    for cold_answer, warm_answer, zeroed_answer in zip(cold, warm, zeroed, strict=True):
        assert abs(warm_answer.logprobs[0][0] - cold_answer.logprobs[0][0]) <= 0.1
        assert zeroed_answer.tokens != warm_answer.tokens


def test_different_prompts_get_different_answers(tiny_model: Path) -> None:
    with running(tiny_model) as llm:
        answers = generate(llm, [random_prompt(seed, 200) for seed in range(16)])

    assert len({a.tokens for a in answers}) == 16
    assert len({token for a in answers for token in a.tokens}) > 64, "the model repeats itself"


def test_fingerprint_names_blocks_alike_in_two_engines(tiny_model: Path) -> None:
    fingerprints = []
    for _ in range(2):
        with running(tiny_model) as llm:
            generate(llm, [PROMPTS[0]])
            fingerprints.append(kv_fingerprint(llm))
            blocks = block_ids(llm)
            zero_kv(llm)
            zeroed = kv_fingerprint(llm)

    assert len(blocks) == 300 // 32
    assert fingerprints[0] == fingerprints[1]
    assert set(zeroed) == set(fingerprints[1])
    assert all(zeroed[key] != digest for key, digest in fingerprints[1].items())
