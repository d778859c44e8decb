"""Losses of the cache server under a running engine: misses at once, hits again with the server that follows.

Restarts of the engine are in ``test_identity_matrix.py``, damage on disk in ``test_disk_faults.py``.
"""

import os
import random
import signal
from pathlib import Path

import pytest

from tests.kit.counts import seed
from tests.kit.server.probe import server_pid, wait_for, wait_written
from tests.kit.server.processes import kill_server
from tests.kit.vllm.cached_engine import CHUNK, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import drain, generate, random_prompt, running
from tiered_kv.server.directory import release_stale_arena_locks

pytestmark = pytest.mark.vllm


def test_idle_engine_lets_go_of_a_dead_servers_memory(tiny_model: Path, tmp_path: Path) -> None:
    with cached_engine(tiny_model, tmp_path) as engine:
        engine.ask(random_prompt(5, 600))
        wait_written(tmp_path)
        assert release_stale_arena_locks(tmp_path, own_id="") == 1, "the worker maps no arena"
        os.kill(server_pid(tmp_path), signal.SIGKILL)

        wait_for(lambda: release_stale_arena_locks(tmp_path, own_id="") == 0, "the old arena to be unmapped")


def test_killed_server_costs_misses_and_hits_come_back(tiny_model: Path, tmp_path: Path) -> None:
    prompts = [random_prompt(100 + i, 520 + 40 * i) for i in range(6)]
    with running(tiny_model) as llm:
        plain = generate(llm, prompts, max_tokens=6)

    with cached_engine(tiny_model, tmp_path) as engine:
        engine.ask(*prompts, max_tokens=6)
        wait_written(tmp_path)
        for _ in range(3):
            kill_server(tmp_path)
            for prompt, theirs in zip(prompts, plain, strict=True):
                (ours,) = generate(engine.llm, [prompt], max_tokens=6)
                assert ours.finish_reason == "length"
                assert_same(ours, theirs)
            wait_for(lambda: _has_session(engine), "a new session")
            (warm,) = engine.ask(prompts[-1], max_tokens=6)
            assert warm.cached_tokens == len(prompts[-1]) // CHUNK * CHUNK
            assert_same(warm, plain[-1])
        assert engine.scheduler_side.counters["sessions_lost"] == 3


def _has_session(engine: CachedEngine) -> bool:
    """An engine learns of a new server while it works, so give it something to do."""
    generate(engine.llm, [[5, 6, 7]], max_tokens=1)
    return bool(engine.scheduler_side._client.is_ready)


def test_server_killed_while_prompts_run(tiny_model: Path, tmp_path: Path) -> None:
    prompts = [random_prompt(200 + i, 700 + 30 * i) for i in range(8)]
    with running(tiny_model) as llm:
        plain = generate(llm, prompts, max_tokens=6)
    source = random.Random(seed())

    with cached_engine(tiny_model, tmp_path, max_num_batched_tokens=512) as engine:
        engine.ask(*prompts, max_tokens=6)
        wait_written(tmp_path)
        pid = server_pid(tmp_path)
        steps = source.randrange(1, 12)
        step = engine.llm.llm_engine.step
        count = 0

        def stepping() -> object:
            nonlocal count
            count += 1
            if count == steps:
                os.kill(pid, signal.SIGKILL)
            return step()

        engine.llm.llm_engine.step = stepping
        answers = engine.ask(*prompts, max_tokens=6)
        drain(engine.llm)

    assert count >= steps, "the server was never killed"
    for ours, theirs in zip(answers, plain, strict=True):
        assert ours.finish_reason == "length"
        assert_same(ours, theirs)
