"""Loads that are wrong in one way each, to show that a test would notice; and loads that fail, or are aborted.

Every way patches the connector of an engine in this process. What takes a ``MonkeyPatch`` lasts as long as that.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import pytest

from tests.kit.vllm.cached_engine import CachedEngine
from tests.kit.vllm.harness import drain, reset_gpu_cache
from tiered_kv.chunks.transfer import CopyJob, RankKV
from tiered_kv.vllm.connector import TieredKVConnector

WrongWay = Callable[[pytest.MonkeyPatch, CachedEngine], None]


def zeroed_state(monkeypatch: pytest.MonkeyPatch, engine: CachedEngine) -> None:
    """States come as zeros."""

    def scatter(self: RankKV, src: memoryview, part: int, block: int, job: CopyJob) -> None:
        for layer in self.states[part].layers:
            layer.tensor[block].zero_()

    monkeypatch.setattr(RankKV, "scatter_state", scatter)


def zeroed_attention(monkeypatch: pytest.MonkeyPatch, engine: CachedEngine) -> None:
    """Attention's KV comes as zeros."""

    def scatter(self: RankKV, src: memoryview, runs: Any, job: CopyJob) -> None:
        for group, (_, ids) in zip(self.groups, runs, strict=True):
            for layer in group.layers:
                layer.tensor[list(ids)] = 0

    monkeypatch.setattr(RankKV, "scatter", scatter)


def synchronous(monkeypatch: pytest.MonkeyPatch, engine: CachedEngine) -> None:
    """vLLM copies the state from the block before the load has filled it."""
    ask = TieredKVConnector.get_num_new_matched_tokens
    load = TieredKVConnector.start_load_kv
    report = TieredKVConnector.get_transfer_results
    side = engine.scheduler_side

    def at_once(self: Any, request: Any, computed: int) -> tuple[int | None, bool]:
        return ask(self, request, computed)[0], False

    def load_now(self: Any, context: Any, **kwargs: Any) -> None:
        load(self, context, **kwargs)
        self._worker.finish_copies()

    def tell_nobody(self: Any, finished_req_ids: set[str]) -> Any:
        results = report(self, finished_req_ids)
        side.loads_finished(results.finished_recving, results.failed_recving)
        return type(results)()

    monkeypatch.setattr(TieredKVConnector, "get_transfer_results", tell_nobody)
    monkeypatch.setattr(TieredKVConnector, "get_num_new_matched_tokens", at_once)
    monkeypatch.setattr(TieredKVConnector, "start_load_kv", load_now)


def first_loaded(monkeypatch: pytest.MonkeyPatch, engine: CachedEngine) -> None:
    """The state of the first load from now on comes with every later one, too."""
    scatter = RankKV.scatter_state
    kept: dict[int, bytes] = {}

    def give(self: RankKV, src: memoryview, part: int, block: int, job: CopyJob) -> None:
        scatter(self, memoryview(kept.setdefault(part, bytes(src))), part, block, job)

    monkeypatch.setattr(RankKV, "scatter_state", give)


WRONG_WAYS: Final[Mapping[str, WrongWay]] = {
    "zeroed state": zeroed_state,
    "zeroed attention": zeroed_attention,
    "synchronous load": synchronous,
    "state of the boundary before": first_loaded,
}
"""The last one needs a load up to the boundary before first."""


@contextmanager
def failing_copies(engine: CachedEngine, which: Callable[[int, int], bool]) -> Iterator[list[int]]:
    """Loads fail at the copies that ``which`` chooses by number and count; gives the numbers that failed."""
    worker, failed = engine.worker_side, list[int]()
    copy = worker._copy

    def or_fail(kind: str, client: Any, session: Any, copies: Any, mark: Any) -> None:
        for number, one in enumerate(copies):
            if kind == "load" and which(number, len(copies)):
                failed.append(number)
                raise OSError(f"injected at copy {number} of {len(copies)}")
            copy(kind, client, session, (one,), mark)

    worker._copy = or_fail
    try:
        yield failed
    finally:
        del worker._copy


def abort_during_load(engine: CachedEngine, prompt: list[int]) -> bool:
    """Put a request and abort it while its load runs; returns whether one ran."""
    from vllm import SamplingParams

    reset_gpu_cache(engine.llm)
    side, worker = engine.scheduler_side, engine.worker_side
    submit, held = worker._submit, list[tuple[Any, ...]]()
    worker._submit = lambda *job: held.append(job)
    vllm_engine = engine.llm.llm_engine
    vllm_engine.add_request("aborted", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=4, detokenize=False))
    while not held:
        vllm_engine.step()
    (state,) = side._requests.values()
    vllm_engine.abort_request([state.request.request_id], internal=True)
    was_loading = bool(state.is_loading)
    worker._submit = submit
    for job in held:
        submit(*job)
    drain(engine.llm)
    return was_loading
