"""One engine of a mode: ``python -m tools.gpu_e2e.engine_process JOB.json``, started by ``runner.py``.

Writes what it saw where the job says. Its standard output is vLLM's log. Asks as the demo does, on any device, and by
the demo's own modules (``demo/asking.py``, and ``demo/engine.py``, which knows vLLM's insides).
"""

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "demo"))
import asking
from engine import Answer, Engine

from tools.gpu_e2e.modes import CHECK, FIRST, MODULE_PATH, MODULES, PLAIN, SECOND, Scenario


def main() -> None:
    """Run the role of the job."""
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    scenario = Scenario(**job["scenario"])
    roles = {CHECK: _check, PLAIN: _plain, FIRST: _first, SECOND: _second}
    Path(job["result"]).write_text(json.dumps(roles[job["role"]](job, scenario)))


def _check(job: dict[str, Any], scenario: Scenario) -> dict[str, Any]:
    """Import what the engines of all modes import, those modules too that vLLM imports late; then one token.

    Raises:
        ImportError: Something is missing; all that is, not the first alone.
    """
    missing = dict.fromkeys(why for module in MODULES if (why := _why_not_imported(module)))
    if missing:
        raise ImportError("; ".join(missing))
    engine = Engine(Path(job["model"]), job["options"], None, MODULE_PATH)
    engine.ask(scenario.prompt(0), 1)
    engine.close()
    return {}


def _why_not_imported(module: str) -> str:
    try:
        importlib.import_module(module)
    except ImportError as exc:
        # Another release lays vLLM's modules out otherwise; its engine will say what it lacks.
        if module.startswith("vllm.") and exc.name and module.startswith(exc.name):
            return ""
        return str(exc)
    return ""


def _plain(job: dict[str, Any], scenario: Scenario) -> dict[str, Any]:
    """Plain vLLM: two questions whose answers rounding cannot turn, their answers and their KV."""
    engine = _start(job, scenario)
    answers = asking.clear_answers(engine, scenario.prompt, scenario.candidates, scenario.answer_tokens, lambda _: None)
    description = engine.description()
    engine.close()
    return {
        "questions": list(answers),
        "answers": [asdict(answer) for answer in answers.values()],
        "block_tokens": engine.block_tokens(),
        "engine": description,
    }


def _first(job: dict[str, Any], scenario: Scenario) -> dict[str, Any]:
    """A fresh cache: compute the prompt, then answer it from host memory."""
    plain = job["plain"]
    engine = _start(job, scenario)
    cold, _ = _ask(engine, job, scenario, plain["questions"][0])
    engine.forget()
    warm, read = _ask(engine, job, scenario, plain["questions"][0])
    counters = engine.cache_counters()
    engine.close()
    is_same = cold.cached_tokens == 0 and cold.kv_digests == plain["answers"][0]["kv_digests"]
    expected = plain["answers"][0]["tokens"]
    phases = [
        _phase("cold", cold, expected, is_same or None, {}, scenario),
        _phase("warm_host", warm, expected, _is_prefix_equal(warm, cold.kv_digests, plain), read, scenario),
    ]
    return {"phases": phases, "cold_kv_digests": cold.kv_digests, "counters": counters}


def _second(job: dict[str, Any], scenario: Scenario) -> dict[str, Any]:
    """After a restart: the same question from disk, then another one about the same document."""
    plain, computed = job["plain"], job["cold_kv_digests"]
    engine = _start(job, scenario)
    disk, disk_read = _ask(engine, job, scenario, plain["questions"][0])
    engine.forget()
    other, other_read = _ask(engine, job, scenario, plain["questions"][1])
    counters = engine.cache_counters()
    engine.close()
    answers = [answer["tokens"] for answer in plain["answers"]]
    phases = [
        _phase("warm_disk", disk, answers[0], _is_prefix_equal(disk, computed, plain), disk_read, scenario),
        _phase("warm_other_suffix", other, answers[1], _is_prefix_equal(other, computed, plain), other_read, scenario),
    ]
    return {"phases": phases, "counters": counters}


def _start(job: dict[str, Any], scenario: Scenario) -> Engine:
    engine = Engine(Path(job["model"]), job["options"], job["connector"], MODULE_PATH)
    engine.ask(scenario.warm_up_prompt(job["role"]), scenario.answer_tokens)
    return engine


def _ask(engine: Engine, job: dict[str, Any], scenario: Scenario, question: int) -> tuple[Answer, dict[str, int]]:
    return asking.ask(engine, Path(job["cache"]), scenario.prompt(question), scenario.answer_tokens)


def _is_prefix_equal(answer: Answer, computed: list[str], plain: dict[str, Any]) -> bool:
    return asking.is_prefix_equal(answer, computed, plain["block_tokens"])


def _phase(
    name: str,
    answer: Answer,
    expected: list[int],
    kv_bytes_equal: bool | None,
    read_bytes: dict[str, int],
    scenario: Scenario,
) -> dict[str, Any]:
    return {
        "name": name,
        "prompt_tokens": scenario.shared_tokens + scenario.question_tokens,
        "cached_tokens": answer.cached_tokens,
        "ttft_s": round(answer.ttft_s, 4),
        "tokens_equal": answer.tokens == expected,
        "kv_bytes_equal": kv_bytes_equal,
        "read_bytes": read_bytes,
    }


if __name__ == "__main__":
    main()
