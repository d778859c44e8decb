"""A seeded mix of requests as a busy server gets them, put to a real engine in this process.

Shared and fresh prefixes of many lengths, priorities, several answers to one prompt, requests that may not read caches
or not write ours, aborts at any step. Every answer is greedy, so it can be compared with plain vLLM's.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.kit.vllm.harness import Answer, as_answer, random_prompt

TOKENS_MAX = 56


@dataclass(frozen=True, slots=True)
class Wish:
    """One request to come.

    Attributes:
        n: Answers to the prompt; all of them greedy.
        skips_reading: vLLM's own switch for requests that may not read prefix caches.
        controls: Our own, through ``kv_transfer_params``.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    priority: int
    n: int = 1
    skips_reading: bool = False
    controls: dict[str, Any] = field(default_factory=dict)

    def parameters(self) -> Any:
        """vLLM's sampling parameters for it."""
        from vllm import SamplingParams

        several = {"n": self.n, "temperature": 1.0, "top_k": 1} if self.n > 1 else {"temperature": 0.0}
        return SamplingParams(
            max_tokens=self.max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=2,
            skip_reading_prefix_cache=self.skips_reading or None,
            extra_args={"kv_transfer_params": self.controls} if self.controls else None,
            **several,
        )


@dataclass
class Outcome:
    """What became of a mix.

    Attributes:
        answers: Finished requests' prompts and answers, each answer of several by itself.
        preempted: How often vLLM took a running request's blocks.
    """

    answers: list[tuple[tuple[int, ...], Answer]] = field(default_factory=list)
    aborted: int = 0
    preempted: int = 0


def wishes(seed: int, count: int) -> list[Wish]:
    """``count`` requests over a few stems, in the order in which they come."""
    source = random.Random(seed)
    stems = [random_prompt(1000 * seed + i, 1200) for i in range(3)]
    result: list[Wish] = []
    for i in range(count):
        stem = source.choice(stems)[: source.choice([0, 0, 256, 256, 300, 300, 512, 700, 1100])]
        prompt = (*stem, *random_prompt(1_000_000 + 1000 * seed + i, source.randrange(1, 150)))
        if source.random() < 0.2 and result:
            prompt = source.choice(result).prompt  # somebody asks the same again
        result.append(
            Wish(
                prompt,
                source.randrange(1, TOKENS_MAX + 1),
                source.randrange(3),
                n=2 if source.random() < 0.15 else 1,
                skips_reading=source.random() < 0.15,
                controls={
                    name: True for name in ("tiered_kv.skip_save", "tiered_kv.skip_load") if source.random() < 0.1
                },
            )
        )
    return result


def run_mix(
    llm: Any,
    mix: list[Wish],
    seed: int,
    *,
    abort_share: float = 0.01,
    follow_up_share: float = 0.0,
    longest: int = 0,
    between: Callable[[random.Random], None] | None = None,
) -> Outcome:
    """Put a mix to an engine, a few requests at a time, and abort some of them at any step.

    Args:
        follow_up_share: Of the requests, which go on from an answer to one before instead.
        longest: Tokens that the prompt of such a request has at most.
        between: Called after each step, with what is drawn from.
    """
    source, outcome = random.Random(seed), Outcome()
    core = llm.llm_engine
    scheduler = core.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request

    def counting(*arguments: Any, **options: Any) -> Any:
        outcome.preempted += 1
        return preempt(*arguments, **options)

    scheduler._preempt_request = counting
    waiting = list(enumerate(mix))
    live: dict[str, Wish] = {}
    while waiting or core.has_unfinished_requests():
        while waiting and (source.random() < 0.6 or not core.has_unfinished_requests()):
            number, wish = waiting.pop(0)
            if follow_up_share and outcome.answers and source.random() < follow_up_share:
                before, answer = source.choice(outcome.answers)
                wish = replace(wish, prompt=(*before, *answer.tokens, *wish.prompt[-20:])[:longest])
            prompt = {"prompt_token_ids": list(wish.prompt)}
            core.add_request(f"{seed}-{number}", prompt, wish.parameters(), priority=wish.priority)
            live[f"{seed}-{number}"] = wish
        if live and source.random() < abort_share:
            victim = source.choice(list(live))
            core.abort_request([victim])
            del live[victim]
            outcome.aborted += 1
        for output in core.step():
            if output.finished and output.request_id in live:
                prompt_ids = live.pop(output.request_id).prompt
                for one in list(output.outputs):
                    output.outputs = [one]
                    outcome.answers.append((prompt_ids, as_answer(output)))
        if between is not None:
            between(source)
    scheduler._preempt_request = preempt
    return outcome
