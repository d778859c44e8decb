"""Whether rows are loaded: by what vLLM's scheduler plans, and by what the server says that reading takes."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tiered_kv.vllm.row_waits import RETRY_S, RowWaits
from tiered_kv.vllm.wait_policy import PREFILL_TOKENS_PER_S_DEFAULT, TRUSTED_SHARE, UNPROVEN_SHARE

pytestmark = pytest.mark.vllm

ROW = 256


class Engine:
    """Steps of vLLM's scheduler, at times of the test's."""

    def __init__(self, fixed_ms: float | None = None, deadline_ms: float = 10_000) -> None:
        self.now_s = 0.0
        self.waits = RowWaits(fixed_ms, deadline_ms, monotonic=lambda: self.now_s)

    def step(
        self, tokens: dict[str, int], new: Sequence[tuple[str, int, int]] = (), cached: Sequence[tuple[str, int]] = ()
    ) -> None:
        """Plan a step: new requests with prompt and computed tokens, running ones with computed tokens."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = tokens
        more: dict[str, Any] = {"mm_features": [], "sampling_params": SamplingParams(), "pooling_params": None}
        output.scheduled_new_reqs = [
            NewRequestData(
                req_id=name,
                prompt_token_ids=[1] * prompt,
                block_ids=([],),
                num_computed_tokens=computed,
                lora_request=None,
                **more,
            )
            for name, prompt, computed in new
        ]
        output.scheduled_cached_reqs = CachedRequestData.make_empty()
        output.scheduled_cached_reqs.req_ids = [name for name, _ in cached]
        output.scheduled_cached_reqs.num_computed_tokens = [computed for _, computed in cached]
        self.waits.step(output)


def prefilling(tokens_per_s: int, **settings: Any) -> RowWaits:
    """An engine that has prefilled at this rate, behind tokens that were loaded."""
    engine = Engine(**settings)
    engine.step({"a": tokens_per_s}, new=[("a", 2 * tokens_per_s, tokens_per_s)])
    engine.now_s = 1.0
    engine.step({"a": 1}, cached=[("a", 2 * tokens_per_s)])
    engine.now_s = 9.0  # what generates says nothing of prefill
    engine.step({"a": 1}, cached=[("a", 2 * tokens_per_s + 1)])
    return engine.waits


def test_rows_are_worth_what_computing_them_takes() -> None:
    waits = prefilling(1_000)
    limit_s = TRUSTED_SHARE * ROW / 1_000
    assert waits.worth([(1, limit_s), (4, 4 * limit_s)], ROW) == 4
    assert waits.worth([(1, limit_s), (4, 4.1 * limit_s)], ROW) == 1
    assert waits.worth([(1, 1.1 * limit_s), (4, 4 * limit_s)], ROW) == 4, "a tier that answers late and is fast"
    assert waits.worth([(1, 1.1 * limit_s), (4, 4.4 * limit_s)], ROW) == 0
    assert waits.worth([], ROW) == 0
    assert waits.load_s(1_000, is_measured=True) == TRUSTED_SHARE
    assert waits.load_s(1e9, is_measured=True) == 10


def test_what_nobody_has_measured_is_tried_and_given_little_time() -> None:
    waits = prefilling(1_000)
    assert waits.worth([(1, 0.0), (4, None)], ROW) == 4
    assert waits.load_s(1_000, is_measured=False) == waits.search_s(1_000, 5.0) == UNPROVEN_SHARE
    assert waits.search_s(1e6, 5.0) == 5.0


def test_before_a_prefill_nothing_slow_is_waited_for() -> None:
    limit_s = TRUSTED_SHARE * ROW / PREFILL_TOKENS_PER_S_DEFAULT
    assert [Engine().waits.worth([(1, seconds)], ROW) for seconds in (limit_s, 1.01 * limit_s)] == [1, 0]


def test_a_time_that_was_set_holds_whatever_was_measured() -> None:
    waits = prefilling(1_000, fixed_ms=70_000)
    assert waits.worth([(1, 1e6), (4, None)], ROW) == 4
    assert waits.load_s(1, is_measured=True) == waits.load_s(1, is_measured=False) == 70
    assert waits.search_s(1, 1.0) == 1.0
    assert prefilling(1_000, fixed_ms=0).worth([(1, 0.0)], ROW) == 0


def test_what_is_too_slow_is_tried_again_now_and_then_and_not_at_once() -> None:
    engine = Engine()
    engine.now_s = 100.0
    assert not engine.waits.tries_again(), "it was measured just now"
    engine.now_s += RETRY_S - 1
    assert not engine.waits.tries_again()
    engine.now_s += 1
    assert [engine.waits.tries_again() for _ in range(3)] == [True, False, False]
    engine.now_s += RETRY_S
    assert [engine.waits.tries_again() for _ in range(3)] == [True, False, False]


def test_a_request_that_tries_again_does_so_for_all_its_groups_and_leaves_alone_what_is_worth_it() -> None:
    from tiered_kv.vllm.offloading import TieredKVTier, _Request

    engine, first, second = Engine(), _Request(0, {}), _Request(0, {})
    tier = SimpleNamespace(waits=engine.waits)

    def believed(request: _Request, *read_s: float) -> list[float | None]:
        parts = [(rows, one) for rows, one in enumerate(read_s, 1)]
        return [one for _, one in TieredKVTier._believed(tier, request, parts, ROW, ROW)]  # type: ignore[arg-type]

    assert believed(first, 50.0, math.inf) == [50.0, math.inf]
    engine.now_s += RETRY_S
    assert believed(second, 0.0) == [0.0], "all of it comes in time"
    assert believed(first) == []
    assert believed(first, 50.0, math.inf) == [None, None]
    assert believed(first, 0.0, math.inf) == [0.0, None], "what is worth it is still"
    assert believed(second, math.inf) == [math.inf]
    assert believed(first, math.inf) == [None]


def test_what_is_too_slow_behind_rows_that_are_not_is_tried_again_where_these_come_in_that_time() -> None:
    from tiered_kv.vllm.offloading import TieredKVTier, _Request

    engine = Engine()
    tier = SimpleNamespace(waits=engine.waits)
    row_s = ROW / PREFILL_TOKENS_PER_S_DEFAULT

    def retries(*parts: tuple[int, float | None], groups: int = 1) -> int:
        found, row_tokens = 0, ROW / groups
        for _ in range(100):
            engine.now_s += RETRY_S
            believed = TieredKVTier._believed(tier, _Request(0, {}), parts, row_tokens, ROW)  # type: ignore[arg-type]
            found += engine.waits.worth(believed, row_tokens) == parts[-1][0]
        return found

    assert retries((1, 0.0), (200, math.inf)) >= 99, "a common beginning in memory or on disk, the rest in a bucket"
    assert retries((100, 5 * row_s), (200, math.inf)) == 100
    assert retries((100, 40 * row_s), (200, math.inf)) == 0, "they would be lost: a retry waits 10 rows' time"
    assert retries((100, 8 * row_s), (200, math.inf), groups=2) == 100, "each group's load waits as long"


def test_requests_that_are_over_are_forgotten() -> None:
    from vllm.v1.core.sched.output import SchedulerOutput

    engine = Engine()
    engine.step({"a": 100}, new=[("a", 100, 0)])
    output = SchedulerOutput.make_empty()
    output.finished_req_ids = {"a", "unknown"}
    engine.waits.step(output)
    assert not engine.waits._prompts
