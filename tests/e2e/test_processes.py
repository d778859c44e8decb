"""vLLM with engine core and worker in processes of their own, as people run it; the connector is found by its name."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.probe import figures, is_serving, server_pid, wait_ended, wait_for, wait_written
from tests.kit.vllm.cached_engine import CHUNK, assert_same, cached_engine, settings
from tests.kit.vllm.engine_process import EngineProcess
from tests.kit.vllm.harness import Answer, generate, random_prompt, running

pytestmark = pytest.mark.vllm

PROMPTS = [random_prompt(400 + i, 800 + 50 * i) for i in range(8)]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> list[Answer]:
    with running(tiny_model) as llm:
        return generate(llm, PROMPTS, max_tokens=6)


@pytest.fixture
def start(tiny_model: Path, log: Path) -> Iterator[Any]:
    engines: list[EngineProcess] = []

    def starting(root: Path, **options: Any) -> EngineProcess:
        engines.append(EngineProcess(tiny_model, settings(root), log, **options))
        return engines[-1]

    yield starting
    for engine in engines:
        engine.close()


def answers(said: list[dict[str, Any]]) -> list[Answer]:
    return [
        Answer(tuple(a["tokens"]), tuple(tuple(at) for at in a["logprobs"]), a["cached_tokens"], a["finish_reason"])
        for a in said
    ]


def whole_chunks(prompts: list[list[int]]) -> list[int]:
    return [len(prompt) // CHUNK * CHUNK for prompt in prompts]


@pytest.mark.timeout(300)
def test_an_engine_of_several_processes_outlives_its_server_and_another_hits_what_it_stored(
    start: Any, tiny_model: Path, tmp_path: Path, plain: list[Answer]
) -> None:
    """From host memory, while the server is killed, from the next server's disk, and in an engine of one process."""
    root = tmp_path / "cache"
    first = start(root)
    cold = answers(first.ask(*PROMPTS, max_tokens=6))
    wait_written(root)
    assert first.reset()
    from_host = answers(first.ask(*PROMPTS, max_tokens=6))
    assert first.reset()
    first.send(*PROMPTS, max_tokens=6)
    os.kill(server_pid(root), signal.SIGKILL)
    killed = answers(first.receive())

    def has_session() -> bool:
        first.ask([5, 6, 7], max_tokens=1)
        return is_serving(root) and [s["state"] for s in figures(root)["sessions"]] == ["ready"]

    wait_for(has_session, "a new session")
    assert first.reset()
    from_disk = answers(first.ask(*PROMPTS, max_tokens=6))
    first.close()
    wait_ended(root)
    with cached_engine(tiny_model, root) as second:
        restarted = second.ask(*PROMPTS, max_tokens=6)

    assert [a.cached_tokens for a in cold] == [0] * len(PROMPTS)
    for hits in (from_host, from_disk, restarted):
        assert [a.cached_tokens for a in hits] == whole_chunks(PROMPTS)
    for round_ in (cold, from_host, killed, from_disk, restarted):
        for ours, theirs in zip(round_, plain, strict=True):
            assert ours.finish_reason == "length"
            assert_same(ours, theirs)
