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

import asking
import scenario
from engine import Answer, Engine
from report import Phase

Say = Callable[[str], None]


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

    say(f"model: Llama, {DEMO.parameters / 1e6:.0f} M parameters, {scenario.ENGINE['dtype']}, seeded weights")
    build_model(scenario.MODEL, shape=DEMO)
    engine = _start(say, scenario.PLAIN)
    say(f"choosing two questions with clear answers, out of {scenario.CANDIDATES} random ones")
    references = asking.clear_answers(engine, scenario.prompt, scenario.CANDIDATES, scenario.ANSWER_TOKENS, say)
    engine.close()
    return {
        "questions": list(references),
        "answers": [asdict(answer) for answer in references.values()],
        "block_tokens": engine.block_tokens(),
        "model": {"parameters": DEMO.parameters, **asdict(DEMO)},
    }


def first(say: Say) -> dict[str, Any]:
    """A fresh cache: compute the prompt, then answer it from host memory."""
    reference = _read(scenario.PLAIN)
    expected = reference["answers"][0]
    engine = _start(say, scenario.FIRST)
    say("cold: nothing is cached, the whole prompt is computed")
    cold, _ = _ask(engine, scenario.FIRST, reference["questions"][0])
    before = engine.cache_counters()
    engine.forget()
    say("warm_host: vLLM's own prefix cache was emptied, its KV overwritten with zeros")
    warm, warm_bytes = _ask(engine, scenario.FIRST, reference["questions"][0])
    counters = engine.cache_counters()
    engine.close()
    # Nothing was loaded yet: the KV is compared with what vLLM computes without the connector.
    is_same = cold.cached_tokens == 0 and cold.kv_digests == expected["kv_digests"]
    is_prefix_same = _is_prefix_equal(warm, cold.kv_digests, reference)
    phases = [
        _phase("cold", cold, expected["tokens"], is_same or None, {}),
        _phase("warm_host", warm, expected["tokens"], is_prefix_same, warm_bytes),
    ]
    return {"phases": phases, "cold_kv_digests": cold.kv_digests, "counters": {"cold": before, "warm_host": counters}}


def second(say: Say) -> dict[str, Any]:
    """After a restart: the same question from disk, then another question about the same document."""
    reference = _read(scenario.PLAIN)
    computed = _read(scenario.FIRST)["cold_kv_digests"]
    engine = _start(say, scenario.SECOND)
    say("warm_disk: this process and its cache server never saw the prompt")
    disk, disk_bytes = _ask(engine, scenario.SECOND, reference["questions"][0])
    before = engine.cache_counters()
    engine.forget()
    say("warm_other_suffix: another question about the same document")
    other, other_bytes = _ask(engine, scenario.SECOND, reference["questions"][1])
    counters = engine.cache_counters()
    engine.close()
    answers = [answer["tokens"] for answer in reference["answers"]]
    phases = [
        _phase("warm_disk", disk, answers[0], _is_prefix_equal(disk, computed, reference), disk_bytes),
        _phase("warm_other_suffix", other, answers[1], _is_prefix_equal(other, computed, reference), other_bytes),
    ]
    return {"phases": phases, "counters": {"warm_disk": before, "warm_other_suffix": counters}}


def third(say: Say) -> dict[str, Any]:
    """As on another machine: empty host memory, an empty disk directory, the same bucket."""
    reference = _read(scenario.PLAIN)
    computed = _read(scenario.FIRST)["cold_kv_digests"]
    engine = _start(say, scenario.THIRD)
    say("warm_object: memory and disk are empty, as on another machine; only the bucket is the same")
    answer, read_bytes = _ask(engine, scenario.THIRD, reference["questions"][0])
    counters = engine.cache_counters()
    engine.close()
    expected = reference["answers"][0]["tokens"]
    is_prefix_same = _is_prefix_equal(answer, computed, reference)
    phases = [_phase("warm_object", answer, expected, is_prefix_same, read_bytes)]
    return {"phases": phases, "counters": {"warm_object": counters}}


def _start(say: Say, role: str) -> Engine:
    """An engine; with the connector unless it is the plain one."""
    has_cache = role != scenario.PLAIN
    say("starting vLLM" + (" with TieredKVConnector" if has_cache else ""))
    connector = scenario.connector(role, os.environ.get(scenario.URI_VARIABLE)) if has_cache else None
    engine = Engine(scenario.MODEL, scenario.ENGINE, connector)
    say("warming up with an unrelated prompt")
    engine.ask(scenario.warm_up_prompt(role), scenario.ANSWER_TOKENS)
    return engine


def _ask(engine: Engine, role: str, question: int) -> tuple[Answer, dict[str, int]]:
    return asking.ask(engine, scenario.cache(role), scenario.prompt(question), scenario.ANSWER_TOKENS)


def _read(role: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((scenario.FILES / f"{role}.json").read_text())
    return content


def _is_prefix_equal(answer: Answer, computed: list[str], reference: dict[str, Any]) -> bool:
    return asking.is_prefix_equal(answer, computed, reference["block_tokens"])


def _phase(
    name: str, answer: Answer, expected: list[int], kv_bytes_equal: bool | None, read_bytes: dict[str, int]
) -> dict[str, Any]:
    prompt_tokens = scenario.SHARED_TOKENS + scenario.QUESTION_TOKENS
    ttft_s = round(answer.ttft_s, 4)
    return asdict(
        Phase(name, prompt_tokens, answer.cached_tokens, ttft_s, answer.tokens == expected, kv_bytes_equal, read_bytes)
    )


_ROLES = {scenario.PLAIN: plain, scenario.FIRST: first, scenario.SECOND: second, scenario.THIRD: third}

if __name__ == "__main__":
    main()
