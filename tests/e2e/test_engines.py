"""Several engines on one machine share one server: two data-parallel replicas, and an engine of another start."""

from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.operator_server import operator_server
from tests.kit.server.probe import figures, wait_for, wait_written
from tests.kit.vllm.cached_engine import CHUNK, TAIL, assert_same, cached_engine, settings
from tests.kit.vllm.harness import Answer, generate, random_prompt, running
from tests.kit.vllm.replicas_process import Replicas

pytestmark = pytest.mark.vllm

FIRST, SECOND = random_prompt(900, 4 * CHUNK + TAIL), random_prompt(901, 3 * CHUNK + TAIL)


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> list[Answer]:
    with running(tiny_model) as llm:
        return generate(llm, [FIRST, SECOND], max_tokens=6)


def as_answer(said: dict[str, Any]) -> Answer:
    return Answer(
        tuple(said["tokens"]), tuple(map(tuple, said["logprobs"])), said["cached_tokens"], said["finish_reason"]
    )


@pytest.mark.timeout(900)
def test_replicas_and_another_engine_load_from_host_memory_what_any_of_them_computed(
    tiny_model: Path, tmp_path: Path, plain: list[Answer]
) -> None:
    root = tmp_path / "cache"
    with operator_server(root) as server:
        shared = settings(root, server=server)
        replicas = Replicas(tiny_model, shared, tmp_path / "replicas.log")
        try:
            cold = as_answer(replicas.ask(0, FIRST))
            wait_written(root)
            on_the_other = as_answer(replicas.ask(1, FIRST))
            with cached_engine(tiny_model, root, {"server": server}) as own:
                (on_own,) = own.ask(FIRST, max_tokens=6)
                (own_cold,) = own.ask(SECOND, max_tokens=6)
                wait_written(root)
                from_own = as_answer(replicas.ask(1, SECOND))
                state = figures(root)
        finally:
            replicas.close()
        wait_for(lambda: figures(root)["sessions"] == [], "the end of all sessions")

    engines = [session["engine"].partition("/")[0] for session in state["sessions"]]
    assert len(set(engines)) == 3
    assert len({name.partition("_dp")[0] for name in engines}) == 2
    assert sorted(name[-4:] for name in engines if "_dp" in name) == ["_dp0", "_dp1"]
    assert {hit["tier"]: hit["chunks"] for hit in state["tokens"]["hits"]} == {"host": 4 + 4 + 3, "disk": 0}
    assert [a.cached_tokens for a in (cold, on_the_other, on_own)] == [0, 4 * CHUNK, 4 * CHUNK]
    assert [a.cached_tokens for a in (own_cold, from_own)] == [0, 3 * CHUNK]
    assert_same(cold, plain[0])
    assert_same(on_the_other, plain[0])
    assert_same(on_own, plain[0])
    assert_same(own_cold, plain[1])
    assert_same(from_own, plain[1])
