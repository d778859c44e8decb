"""A server that stands still while vLLM is short of blocks: vLLM preempts as without a cache, and no step is empty.

Steps are counted, not timed: one in which requests run and none gets a token is empty. The time is measured by
``benchmarks/frozen_server.py --pressure``.
"""

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.probe import server_pid
from tests.kit.server.processes import freeze
from tests.kit.vllm.cached_engine import assert_same, cached_engine
from tests.kit.vllm.harness import Answer, drain, generate, random_prompt, running

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

CHUNK_BYTES = 528_384
PROMPTS = [random_prompt(4200 + i, 300 + 40 * i) for i in range(8)]
MAX_TOKENS = 70
OPTIONS: dict[str, Any] = {
    "num_gpu_blocks_override": 80,
    "max_num_batched_tokens": 384,
    "max_model_len": 2048,
    "async_scheduling": False,
}


@dataclass
class Steps:
    """What vLLM's scheduler did.

    Attributes:
        empty: Longest row of steps in which requests ran, none got a token, and no copy was under way.
        copying: The same where a copy was, which ends by itself.
    """

    preempted: int = 0
    empty: int = 0
    copying: int = 0
    _rows: dict[str, int] = field(default_factory=lambda: {"empty": 0, "copying": 0})

    def watch(self, scheduler: Any) -> "Steps":
        schedule = scheduler.schedule

        def watched(*arguments: Any) -> Any:
            is_running = bool(scheduler.running)
            output = schedule(*arguments)
            self.preempted += len(output.preempted_req_ids or ())
            side = scheduler.connector._scheduler.side if scheduler.connector is not None else None
            kind = "copying" if side is not None and side.saves._jobs else "empty"
            if is_running and not output.total_num_scheduled_tokens:
                self._rows[kind] += 1
                setattr(self, kind, max(getattr(self, kind), self._rows[kind]))
            else:
                self._rows = {"empty": 0, "copying": 0}
            return output

        scheduler.schedule = watched
        return self


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> tuple[list[Answer], Steps]:
    with running(tiny_model, **OPTIONS) as llm:
        steps = Steps().watch(llm.llm_engine.engine_core.engine_core.scheduler)
        return generate(llm, PROMPTS, max_tokens=MAX_TOKENS), steps


def test_vllm_preempts_as_without_a_cache_while_its_server_stands_still(
    tiny_model: Path, tmp_path: Path, plain: tuple[list[Answer], Steps]
) -> None:
    expected, without = plain
    assert without.preempted, "the pool was large enough: nothing was put under pressure"
    assert without.empty == 0
    settings = {"host_bytes": 12 * CHUNK_BYTES, "lookup_timeout_ms": 50.0}
    with cached_engine(tiny_model, tmp_path, settings, **OPTIONS) as engine:
        side = engine.scheduler_side
        pid = server_pid(engine.root)
        steps = Steps().watch(engine.scheduler)
        try:
            freeze(pid)
            answers = generate(engine.llm, PROMPTS, max_tokens=MAX_TOKENS)
            assert side._client.is_ready, "the session ended: nothing was stored or put off"
            assert side._client.credit_count == 0, "there were slots for all: nothing had to wait"
        finally:
            os.kill(pid, signal.SIGCONT)
        drain(engine.llm)
        counters = side.counters
        dropped = {name: n for name, n in counters.items() if name.startswith("store_dropped_")}
        pool = engine.scheduler.kv_cache_manager.block_pool
        assert pool.num_gpu_blocks - pool.get_num_free_blocks() == 1
    assert steps.preempted
    assert steps.empty <= 1, "blocks that chunks kept while they waited are free in the next step"
    assert sum(dropped.values()), "every chunk found a slot: this test proves nothing"
    accounted = counters["stores"] + counters["store_held"] + counters["stores_failed"] + sum(dropped.values())
    assert accounted == counters["store_chunks"]
    for ours, theirs in zip(answers, expected, strict=True):
        assert ours.cached_tokens == 0
        assert_same(ours, theirs)
