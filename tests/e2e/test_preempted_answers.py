"""A request that vLLM preempts while it answers: it comes back, finds what it had computed, and asks for no answer.

Its own tokens look like a prompt's then. But no prompt has them yet: they stay in host memory, and go to disk when the
next turn has them.
"""

from pathlib import Path

import pytest

from tests.kit.server.probe import figures, wait_written
from tests.kit.storage.disk_probe import blob_files
from tests.kit.vllm.cached_engine import CHUNK, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import BLOCK_TOKENS, Answer, as_answer, random_prompt, reset_gpu_cache
from tiered_kv.keys.tail_keys import tail_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPTS = {name: random_prompt(3800 + number, CHUNK + 140) for number, name in enumerate(("one", "other"))}
ANSWER_TOKENS = 200
PROMPT_CHUNKS, CHUNKS = 1, (CHUNK + 140 + ANSWER_TOKENS - 1) // CHUNK
OPTIONS = {"num_gpu_blocks_override": 36, "max_model_len": 4 * CHUNK, "max_num_batched_tokens": 512}
"""Both prompts fit, and one of them with its answer."""


def test_it_goes_on_from_what_it_had_and_its_answer_is_written_when_a_prompt_has_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    with cached_engine(tiny_model, tmp_path, {"tail_tokens": BLOCK_TOKENS}, **OPTIONS) as engine:
        plain = {name: computed(engine, prompt) for name, prompt in PROMPTS.items()}
        lengths = engine.watch_preemptions()
        answers = dict(zip(PROMPTS, engine.ask(*PROMPTS.values(), max_tokens=ANSWER_TOKENS), strict=True))
        assert lengths and max(lengths) > CHUNKS * CHUNK, "nobody was preempted behind a chunk of its answer"
        for name, answer in answers.items():
            assert answer.finish_reason == "length"
            assert_same(answer, plain[name])
        wait_written(tmp_path)
        counters = figures(tmp_path)["counters"]
        assert counters["answers"] == len(PROMPTS) * (CHUNKS - PROMPT_CHUNKS)
        assert counters.get("answers_asked", 0) == 0, "a request is no prompt that has its own answer"
        assert len(chunk_files(tmp_path)) == len(PROMPTS) * PROMPT_CHUNKS

        prompt = [*PROMPTS["one"], *answers["one"].tokens, *random_prompt(3810, 20)]
        (follow_up,) = engine.ask(prompt, max_tokens=1)
        found = (len(PROMPTS["one"]) + ANSWER_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert follow_up.cached_tokens == found, "all that it had computed but for its last token, with a tail"
        assert_same(follow_up, computed(engine, prompt, max_tokens=1))
        wait_written(tmp_path)
        assert figures(tmp_path)["counters"]["answers_asked"] == CHUNKS - PROMPT_CHUNKS
        assert len(chunk_files(tmp_path)) == len(PROMPTS) * PROMPT_CHUNKS + CHUNKS - PROMPT_CHUNKS


def computed(engine: CachedEngine, prompt: list[int], max_tokens: int = ANSWER_TOKENS) -> Answer:
    """The answer to a prompt that is neither found nor stored, alone."""
    from vllm import SamplingParams

    reset_gpu_cache(engine.llm)
    alone = {"kv_transfer_params": {"tiered_kv.skip_save": True, "tiered_kv.skip_load": True}}
    wanted = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=2, extra_args=alone
    )
    (output,) = engine.llm.generate([{"prompt_token_ids": prompt}], wanted, use_tqdm=False)
    assert not output.num_cached_tokens
    return as_answer(output)


def chunk_files(root: Path) -> list[Path]:
    return [path for path in blob_files(root) if not tail_tokens(bytes.fromhex(path.stem))]
