"""Ours beside other connectors in vLLM's MultiConnector: with vLLM's example connector, and twice."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.probe import figures, wait_written
from tests.kit.vllm.cached_engine import CHUNK, TAIL, CachedEngine, assert_same, cached_engine, settings
from tests.kit.vllm.harness import Answer, drain, generate, kv_fingerprint, kv_layers, random_prompt, running

pytestmark = pytest.mark.vllm

PROMPT = random_prompt(850, 4 * CHUNK + TAIL)
SAVED_BY_EXAMPLE = len(PROMPT) // 32 * 32


def ours(root: Path, role: str = "kv_both") -> dict[str, Any]:
    extra = settings(root)
    return {"kv_connector": "TieredKVConnector", "kv_role": role, "kv_connector_extra_config": extra}


def example(folder: Path) -> dict[str, Any]:
    extra = {"shared_storage_path": str(folder)}
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@contextmanager
def engine_with(
    model: Path, root: Path, *connectors: dict[str, Any], policy: str = "recompute", **more: Any
) -> Iterator[CachedEngine]:
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": list(connectors)},
    )
    with cached_engine(model, root, kv_transfer_config=transfer, **more) as engine:
        yield engine


@contextmanager
def warnings() -> Iterator[list[str]]:
    """What the connector warns of; vLLM's loggers do not pass messages on to where caplog listens."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    ours = logging.getLogger("vllm.tiered_kv.vllm.connector")
    ours.addHandler(handler)
    yield texts
    ours.removeHandler(handler)


def sides(engine: CachedEngine) -> list[Any]:
    """The scheduler's sides of our connectors, in the order in which they are configured."""
    children = engine.scheduler.connector._connectors
    return [child._scheduler.side for child in children if hasattr(child, "_scheduler")]


def assert_at_rest(engine: CachedEngine, root: Path) -> None:
    """No lease and no pin is left of what one connector offered and another loaded."""
    wait_written(root)
    state = figures(root)["hierarchy"]
    assert (state["leased_bytes"], state["lookups"]) == (0, 0)
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Answer:
    with running(tiny_model) as llm:
        return generate(llm, [PROMPT])[0]


def test_beside_the_example_connector_both_store_and_the_first_that_has_it_loads(
    tiny_model: Path, tmp_path: Path, plain: Answer
) -> None:
    root, folder = tmp_path / "cache", tmp_path / "example"
    connectors = (example(folder), ours(root))
    with engine_with(tiny_model, root, *connectors, disable_log_stats=False) as engine:
        (side,) = sides(engine)
        (cold,) = engine.ask(PROMPT)
        (from_example,) = engine.ask(PROMPT)
        loads_beside_example = side.counters["loads"]
        assert_at_rest(engine, root)
        shutil.rmtree(folder)
        (from_ours,) = engine.ask(PROMPT)
        assert_at_rest(engine, root)
        metrics = {metric.name for metric in engine.llm.get_metrics()}

    assert cold.cached_tokens == 0 and side.counters["stores"] == 4
    assert (from_example.cached_tokens, loads_beside_example) == (SAVED_BY_EXAMPLE, 0)
    assert (from_ours.cached_tokens, side.counters["loads"]) == (4 * CHUNK, 1)
    assert any("tiered_kv" in name for name in metrics)
    for answer in (cold, from_example, from_ours):
        assert_same(answer, plain)


class FailingLoads:
    """The example connector's worker side, whose loads bring zeros and say so, as a real one reports a failure."""

    def __init__(self, connector: Any, layers: list[Any], patch: pytest.MonkeyPatch) -> None:
        self._load, self._connector, self._layers = connector.start_load_kv, connector, layers
        self._failed: set[int] = set()
        self.count = 0
        patch.setattr(connector, "start_load_kv", self.start_load_kv)
        patch.setattr(connector, "get_block_ids_with_load_errors", self.take_failed)

    def start_load_kv(self, context: Any, **more: Any) -> None:
        self._load(context, **more)
        for request in self._connector._get_connector_metadata().requests:
            if not request.is_store:
                blocks = set((request.slot_mapping // 32).tolist())
                for layer in self._layers:
                    layer[sorted(blocks)] = 0
                self._failed |= blocks
                self.count += 1

    def take_failed(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed


def test_what_another_connector_could_not_load_is_not_stored_by_ours(
    tiny_model: Path, tmp_path: Path, plain: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, folder = tmp_path / "cache", tmp_path / "example"
    with engine_with(tiny_model, root, example(folder), ours(root)) as engine:
        from vllm import SamplingParams
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        (side,) = sides(engine)
        unsaved = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"tiered_kv.skip_save": True}})
        unsaved.detokenize = False
        engine.llm.generate([{"prompt_token_ids": PROMPT}], unsaved, use_tqdm=False)
        drain(engine.llm)
        stored_before = side.counters["stores"]
        group: Any = get_kv_transfer_group()
        loads = FailingLoads(group._connectors[0], kv_layers(engine.llm), monkeypatch)
        (recomputed,) = engine.ask(PROMPT)
        monkeypatch.undo()
        assert_at_rest(engine, root)
        after = []
        for _ in range(2):
            shutil.rmtree(folder)
            after += engine.ask(PROMPT)

    assert (stored_before, loads.count) == (0, 1)
    for answer in (recomputed, *after):
        assert_same(answer, plain)
    assert after[1].cached_tokens == 4 * CHUNK
    assert side.counters["store_dropped_reset"] > 0, "chunks were gathered while the load was still believed"


def test_two_of_ours_on_two_directories_store_both_and_either_loads_byte_for_byte(
    tiny_model: Path, tmp_path: Path, plain: Answer
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    connectors = (ours(one, "kv_producer"), ours(other))
    with warnings() as warned, engine_with(tiny_model, one, *connectors, policy="fail") as engine:
        first, second = sides(engine)
        (cold,) = engine.ask(PROMPT)
        computed = kv_fingerprint(engine.llm)
        (warm,) = engine.ask(PROMPT)
        loaded = kv_fingerprint(engine.llm)
        for root in (one, other):
            assert_at_rest(engine, root)
        counters = [side.counters for side in (first, second)]
        drain(engine.llm)

    assert [(c["stores"], c["loads"]) for c in counters] == [(4, 0), (4, 1)]
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 4 * CHUNK)
    assert loaded == computed
    assert [len(list(root.glob("blobs/*/*/*.safetensors"))) for root in (one, other)] == [4, 4]
    assert_same(cold, plain)
    assert_same(warm, plain)
    assert 'Give MultiConnector "kv_load_failure_policy": "recompute"' in warned[0]
