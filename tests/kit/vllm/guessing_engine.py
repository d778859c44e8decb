"""An engine behind the cache that guesses tokens ahead (ngram speculative decoding), in a process of its own.

vLLM's ngram drafter imports numba, and after that no further engine of the CPU build starts in the process. Run as a
module with the model, the cache's directory and a file for what happened; :func:`guess` is the test's end of it.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.kit.module_process import module_command, module_environment
from tests.kit.vllm.cached_engine import CachedEngine, cached_engine
from tests.kit.vllm.harness import as_answer, drain, kv_fingerprint, random_prompt, reset_gpu_cache

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
VOCABULARY = [11, 12, 13]
"""Of answers: over so few tokens some guesses are right."""

ANSWER_TOKENS = 120


def parameters(max_tokens: int) -> Any:
    """vLLM's sampling parameters, also for whoever answers the same prompts plainly."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        logprobs=2,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        allowed_token_ids=VOCABULARY,
    )


def guess(model: Path, root: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Run the engine; returns ``drafts``, ``accepted``, ``left``, and two ``chats``: with ``save_decode`` and without.

    Each has two turns ``[prompt, tokens, logprobs, cached_tokens]``, and how many blocks of the first turn were
    ``equal_blocks`` when they were loaded for the second: vLLM's own are right once a request has ended.
    """
    told = root / "told.json"
    root.mkdir(exist_ok=True)
    given = json.dumps(options | {"speculative_config": DRAFTS, "logprobs_mode": "processed_logprobs"})
    done = subprocess.run(
        module_command(__name__, model, root / "cache", told, given),
        env=module_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(told.read_text())
    return result


def _main(model: str, root: str, told: str, options: str) -> None:
    facts: dict[str, Any] = {"drafts": 0, "accepted": 0, "chats": []}
    extra = {"save_decode": True, "pinned_share": 0.5}
    with cached_engine(Path(model), Path(root), extra, **json.loads(options)) as engine:
        _count_drafts(engine, facts)
        side = engine.scheduler_side
        for number, saves in enumerate((True, False)):
            saving = side._request_saves
            saving._config = replace(saving._config, save_decode=saves)
            facts["chats"].append(_chat(engine, number))
        drain(engine.llm)
        pool = engine.scheduler.kv_cache_manager.block_pool
        facts["left"] = [pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), len(side._requests), side.has_work]
    Path(told).write_text(json.dumps(facts))


def _count_drafts(engine: CachedEngine, facts: dict[str, Any]) -> None:
    tell = engine.scheduler.make_spec_decoding_stats

    def counting(*arguments: Any, **options: Any) -> Any:
        facts["drafts"] += options["num_draft_tokens"]
        facts["accepted"] += options["num_accepted_tokens"]
        return tell(*arguments, **options)

    engine.scheduler.make_spec_decoding_stats = counting


def _chat(engine: CachedEngine, number: int) -> dict[str, Any]:
    first = random_prompt(41 + number, 720)
    turns = [_ask(engine, first, ANSWER_TOKENS)]
    computed = kv_fingerprint(engine.llm)
    turns.append(_ask(engine, [*first, *turns[0][1], *random_prompt(50 + number, 40)], 8))
    loaded = kv_fingerprint(engine.llm)
    equal = sum(computed[key] == loaded[key] for key in computed.keys() & loaded.keys())
    return {"turns": turns, "equal_blocks": equal}


def _ask(engine: CachedEngine, prompt: list[int], max_tokens: int) -> list[Any]:
    reset_gpu_cache(engine.llm)
    (output,) = engine.llm.generate([{"prompt_token_ids": prompt}], parameters(max_tokens), use_tqdm=False)
    drain(engine.llm)
    answer = as_answer(output)
    return [prompt, answer.tokens, answer.logprobs, answer.cached_tokens]


if __name__ == "__main__":
    _main(*sys.argv[1:])
