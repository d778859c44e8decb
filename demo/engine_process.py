"""One engine process of the demo: ``engine_process.py ROLE CHANNEL``, started by ``run.py``.

Asks its engine what its role says and writes ``build/demo/ROLE.json``. Its standard output is vLLM's log; what the user
should read goes line by line to the file descriptor CHANNEL.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import scenario
from engine import Answer, Engine
from report import Phase

Say = Callable[[str], None]
BATCH = 8


def main() -> None:
    role, channel = sys.argv[1], int(sys.argv[2])
    os.set_inheritable(channel, False)  # the cache server outlives this process and must not hold the pipe open
    with os.fdopen(channel, "w", buffering=1) as pipe:
        result = _ROLES[role](lambda text: print(text, file=pipe))
    path = scenario.FILES / f"{role}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")


def plain(say: Say) -> dict[str, Any]:
    """Plain vLLM: choose two questions whose answers rounding cannot turn, and note answers and KV."""
    from tiered_kv.testing.model import DEMO, build_model

    say(f"model: Llama, {DEMO.parameters / 1e6:.0f} M parameters, bfloat16, seeded weights")
    build_model(scenario.MODEL, shape=DEMO)
    engine = _start(say, scenario.PLAIN, None)
    say(f"choosing two questions with clear answers, out of {scenario.CANDIDATES} random ones")
    references: dict[int, Answer] = {}
    for question in _promising(engine):
        engine.forget()
        answer = engine.ask(scenario.prompt(question), scenario.ANSWER_TOKENS, logprobs=True)
        if answer.margin is not None and answer.margin >= scenario.MARGIN_MIN:
            references[question] = answer
            say(f"question {question}: {answer.ttft_s:.2f} s to the first token without any cache")
        if len(references) == 2:
            break
    else:
        raise RuntimeError(f"fewer than two questions have a margin of {scenario.MARGIN_MIN}. found={list(references)}")
    engine.close()
    return {
        "questions": list(references),
        "answers": [asdict(answer) for answer in references.values()],
        "block_tokens": engine.block_tokens(),
        "model": {"parameters": DEMO.parameters, **asdict(DEMO)},
    }


def _promising(engine: Engine) -> list[int]:
    """Questions by the margin they had behind vLLM's own prefix cache, best first, in as few batches as needed."""
    margins: dict[int, float] = {}
    engine.ask(scenario.prompt(0), 1)
    for first in range(0, scenario.CANDIDATES, BATCH):
        batch = range(first, min(first + BATCH, scenario.CANDIDATES))
        found = engine.ask_all([scenario.prompt(question) for question in batch], scenario.ANSWER_TOKENS)
        margins |= dict(zip(batch, found, strict=True))
        if sum(margin >= 2 * scenario.MARGIN_MIN for margin in margins.values()) >= 2:
            break
    return sorted(margins, key=lambda question: -margins[question])


def first(say: Say) -> dict[str, Any]:
    """A fresh cache: compute the prompt, then answer it from host memory."""
    reference = _read(scenario.PLAIN)
    engine = _start(say, scenario.FIRST, scenario.CONNECTOR)
    question = reference["questions"][0]
    say("cold: nothing is cached, the whole prompt is computed")
    cold = engine.ask(scenario.prompt(question), scenario.ANSWER_TOKENS)
    before = engine.cache_counters()
    engine.forget()
    say("warm_host: vLLM's own prefix cache was emptied, its KV overwritten with zeros")
    warm = engine.ask(scenario.prompt(question), scenario.ANSWER_TOKENS)
    counters = engine.cache_counters()
    engine.close()
    expected = reference["answers"][0]
    # Nothing was loaded yet: the KV is compared with what vLLM computes without the connector.
    is_same = cold.cached_tokens == 0 and cold.kv_digests == expected["kv_digests"]
    phases = [
        _phase("cold", cold, expected["tokens"], is_same or None),
        _phase("warm_host", warm, expected["tokens"], _is_prefix_equal(warm, cold.kv_digests, reference)),
    ]
    return {"phases": phases, "cold_kv_digests": cold.kv_digests, "counters": {"cold": before, "warm_host": counters}}


def second(say: Say) -> dict[str, Any]:
    """After a restart: the same question from disk, then another question about the same document."""
    reference = _read(scenario.PLAIN)
    computed = _read(scenario.FIRST)["cold_kv_digests"]
    engine = _start(say, scenario.SECOND, scenario.CONNECTOR)
    say("warm_disk: this process and its cache server never saw the prompt")
    disk = engine.ask(scenario.prompt(reference["questions"][0]), scenario.ANSWER_TOKENS)
    before = engine.cache_counters()
    engine.forget()
    say("warm_other_suffix: another question about the same document")
    other = engine.ask(scenario.prompt(reference["questions"][1]), scenario.ANSWER_TOKENS)
    counters = engine.cache_counters()
    engine.close()
    answers = [answer["tokens"] for answer in reference["answers"]]
    phases = [
        _phase("warm_disk", disk, answers[0], _is_prefix_equal(disk, computed, reference)),
        _phase("warm_other_suffix", other, answers[1], _is_prefix_equal(other, computed, reference)),
    ]
    return {"phases": phases, "counters": {"warm_disk": before, "warm_other_suffix": counters}}


def _start(say: Say, role: str, connector: dict[str, Any] | None) -> Engine:
    say("starting vLLM" + ("" if connector is None else " with TieredKVConnector"))
    engine = Engine(scenario.MODEL, scenario.ENGINE, connector)
    say("warming up with an unrelated prompt")
    engine.ask(scenario.warm_up_prompt(role), scenario.ANSWER_TOKENS)
    return engine


def _read(role: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((scenario.FILES / f"{role}.json").read_text())
    return content


def _is_prefix_equal(answer: Answer, computed: list[str], reference: dict[str, Any]) -> bool:
    """Whether the loaded blocks, at least one, hold the bytes that were computed cold."""
    blocks = answer.cached_tokens // reference["block_tokens"]
    return 0 < blocks <= len(answer.kv_digests) and answer.kv_digests[:blocks] == computed[:blocks]


def _phase(name: str, answer: Answer, expected: list[int], kv_bytes_equal: bool | None) -> dict[str, Any]:
    prompt_tokens = scenario.SHARED_TOKENS + scenario.QUESTION_TOKENS
    phase = Phase(
        name, prompt_tokens, answer.cached_tokens, round(answer.ttft_s, 4), answer.tokens == expected, kv_bytes_equal
    )
    return asdict(phase)


_ROLES = {scenario.PLAIN: plain, scenario.FIRST: first, scenario.SECOND: second}

if __name__ == "__main__":
    main()
