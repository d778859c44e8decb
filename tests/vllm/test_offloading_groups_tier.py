"""Our tier below vLLM's offloading, for a model of several groups of layers: a real server, no engine."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.kit.server.clients import STORED_BY, namespace_fields
from tests.kit.server.probe import wait_for, wait_written
from tests.kit.storage.disk_probe import blob_path
from tests.kit.vllm.tiny_adapters import adapter_files, lora
from tiered_kv.errors import TieredKVError
from tiered_kv.keys.row_names import row_key
from tiered_kv.ops.server_link import ServerLink
from tiered_kv.tiers.base import BlobName
from tiered_kv.vllm.row_groups import RowGroup

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOKENS, ROW_BYTES = 16, 64
FULL = RowGroup(0, TOKENS, None, ((0, 48),))
OTHER = RowGroup(1, TOKENS, None, ((0, 24),))
STATE = RowGroup(2, TOKENS, 1, ((4, 8), (40, 16)))
OLD = 0xA7


def key(group: RowGroup, number: int) -> Any:
    return number.to_bytes(32, "big") + group.number.to_bytes(4, "big")


class Engine:
    """What vLLM's manager does with a tier, a request at a time."""

    def __init__(self, root: Path, **more: Any) -> None:
        from tiered_kv.vllm.identity.rows import RowIdentity
        from tiered_kv.vllm.offloading import TieredKVTier

        groups = [SimpleNamespace(tokens_per_block=TOKENS, group_id=number) for number in range(3)]
        config = SimpleNamespace(groups=groups, cache=SimpleNamespace(blocks_per_chunk=1))
        spec = SimpleNamespace(config=config, kv_events_config=SimpleNamespace(enable_kv_cache_events=True))
        self.memory = np.full((64, ROW_BYTES), OLD, np.uint8)
        self.tier = TieredKVTier(
            offloading_spec=spec, primary_kv_view=memoryview(self.memory), tier_type="ours",
            storage_uri=f"file://{root}", host_bytes="64MiB", disk_bytes="256MiB", strict=True,
            lookup_timeout_ms=20_000, **({"promotion_wait_ms": 20_000} | more),
        )  # fmt: skip
        identity = RowIdentity(namespace_fields(), STORED_BY, (FULL, OTHER, STATE))
        self.tier.begin([identity], "engine")
        self._last = 0

    def request(self, rows: int) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        self._last += 1
        context = ReqContext(req_id=f"request {self._last}")
        for number in range(rows):
            for group in (FULL, OTHER, STATE):
                context.set_offload_key_position(key(group, number), (number + 1) * TOKENS)
        self.tier.on_new_request(context)
        return context

    def run(self, context: Any, keys: list[Any], first_row: int, *, is_load: bool) -> Any:
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._last += 1
        rows = np.arange(first_row, first_row + len(keys))
        job = TransferJob(self._last, keys, rows, is_load, context)
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        results: list[Any] = []

        def is_over() -> bool:
            results.extend(self.tier.get_finished_jobs())
            return bool(results)

        wait_for(is_over, "the job")
        return results[0]

    def step(self, *, preempted: tuple[str, ...] = ()) -> None:
        self.tier.on_schedule_end(SimpleNamespace(new_req_ids=(), preempted_req_ids=preempted))

    def look(self, context: Any, *keys: Any) -> list[str]:
        """The answers of a step in which vLLM looks at these keys."""
        answers = [self.tier.lookup(one, context).name for one in keys]
        self.step()
        return answers

    def look_until(self, context: Any, *keys: Any) -> list[str]:
        """Those of the first step in which none is RETRY."""
        found: list[list[str]] = []

        def are_known() -> bool:
            found.append(self.look(context, *keys))
            return "RETRY" not in found[-1]

        wait_for(are_known, "answers")
        return found[-1]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path / "cache")
    yield made
    made.tier.shutdown()


def store(engine: Engine, rows: int, *states: int) -> None:
    keys = [key(FULL, n) for n in range(rows)] + [key(OTHER, n) for n in range(rows)]
    keys += [key(STATE, n) for n in states]
    assert engine.run(engine.request(rows), keys, 0, is_load=False).success


def test_only_the_groups_bytes_of_a_row_are_stored_and_loaded(engine: Engine) -> None:
    engine.memory[:] = np.random.default_rng(1).integers(0, 256, engine.memory.shape, np.uint8)
    store(engine, 2, 1)
    before = engine.memory.copy()
    context = engine.request(2)
    keys = [key(FULL, 0), key(FULL, 1), key(OTHER, 1), key(STATE, 1)]
    engine.memory[:] = OLD
    assert engine.run(context, keys, 10, is_load=True).success
    for row, (group, source) in enumerate([(FULL, 0), (FULL, 1), (OTHER, 3), (STATE, 4)], 10):
        expected = np.full(ROW_BYTES, OLD, np.uint8)
        for start, length in group.spans:
            expected[start : start + length] = before[source][start : start + length]
        assert np.array_equal(engine.memory[row], expected)
    assert (engine.memory[:10] == OLD).all() and (engine.memory[14:] == OLD).all()


def test_jobs_that_vllm_submits_in_the_wrong_order_are_stored_whole(engine: Engine) -> None:
    """Of several ranks' reports vLLM may take a later job's before the one it follows: no row is lost by that."""
    from vllm.v1.kv_offload.tiering.base import TransferJob

    context, results = engine.request(4), []
    for number, first in enumerate((2, 0)):
        keys = [key(FULL, first), key(FULL, first + 1)]
        engine.tier.submit_store(TransferJob(number, keys, np.arange(2), False, context))
    wait_for(lambda: results.extend(engine.tier.get_finished_jobs()) or len(results) == 2, "the jobs")
    assert {(one.job_id, one.success) for one in results} == {(0, True), (1, True)}
    assert engine.run(engine.request(4), [key(FULL, n) for n in range(4)], 10, is_load=True).success


def test_states_are_found_one_by_one_and_then_the_prefix(engine: Engine) -> None:
    store(engine, 6, 1)
    context = engine.request(6)
    states = [key(STATE, n) for n in range(5, -1, -1)]
    answers = engine.look_until(context, key(FULL, 0), key(OTHER, 0), *states)
    assert answers == ["HIT", "HIT", "MISS", "MISS", "MISS", "MISS", "HIT", "MISS"]
    # Full attention behind the row after the state is of no use.
    assert engine.look(context, *(key(FULL, n) for n in range(6))) == ["HIT"] * 4 + ["MISS"] * 2


def test_what_lies_behind_the_last_state_that_is_held_takes_no_room_from_it(engine: Engine) -> None:
    """Else a long common beginning with a state early in it has no hit at all, and pushes other prompts' rows out."""
    store(engine, 6, 1)
    engine.tier._hits_max = 9  # rows of full attention up to two behind the state's, twice, and the state
    context = engine.request(6)
    wanted = [key(group, 0) for group in (FULL, OTHER)] + [key(STATE, n) for n in range(5, 0, -1)]
    assert engine.look_until(context, *wanted) == ["HIT", "HIT", "MISS", "MISS", "MISS", "MISS", "HIT"]
    assert engine.tier._hits == 9


def test_a_state_that_was_found_first_cuts_nothing_while_a_deeper_one_is_not_known(engine: Engine) -> None:
    store(engine, 6, 1, 5)
    context, jobs = engine.request(6), engine.tier._jobs
    assert engine.look(context, key(FULL, 5)) == ["RETRY"]
    request = engine.tier._request(context)
    find = request.rows[FULL.number].find
    wait_for(lambda: not jobs.poll() and jobs.client.lookups[find.lookup].is_answered, "the answer for full attention")
    request.rows[STATE.number].found_end = 2 * TOKENS  # as where vLLM has looked at the first one's row
    assert engine.look(context, key(FULL, 5)) == ["RETRY"]


def test_without_a_state_no_row_of_full_attention_is_promoted(engine: Engine) -> None:
    store(engine, 4)
    context = engine.request(4)
    states = [key(STATE, n) for n in range(3, -1, -1)]
    seen: list[list[str]] = []

    def are_missing() -> bool:
        seen.append(engine.look(context, key(FULL, 0), key(OTHER, 0), *states))
        return set(seen[-1][2:]) == {"MISS"}  # then vLLM computes the prompt

    wait_for(are_missing, "answers")
    assert not any("HIT" in answers for answers in seen)


def test_nothing_is_promoted_while_one_group_of_the_prefix_is_not_known(engine: Engine) -> None:
    """Then no state was asked for either: none is held."""
    store(engine, 4)
    context, jobs = engine.request(4), engine.tier._jobs
    assert engine.look(context, key(FULL, 0)) == ["RETRY"]
    find = engine.tier._request(context).rows[FULL.number].find
    wait_for(lambda: not jobs.poll() and jobs.client.lookups[find.lookup].is_answered, "the answer for one group")
    for _ in range(2):
        answers = engine.look(context, key(FULL, 0), key(OTHER, 0), *(key(STATE, n) for n in range(3, -1, -1)))
        assert "HIT" not in answers


def test_a_prefix_that_vllm_no_longer_asks_for_keeps_no_request_waiting(engine: Engine) -> None:
    """What another group lacks cuts it to rows that vLLM's own memory has: its answer is taken all the same."""
    store(engine, 2)
    context = engine.request(4)
    states = [key(STATE, n) for n in range(1, -1, -1)]
    assert engine.look(context, key(FULL, 2), key(OTHER, 2), *states) == ["RETRY"] * 4
    assert engine.look_until(context, key(FULL, 2), *states) == ["MISS"] * 3


def test_states_in_vllms_own_memory_let_the_prefix_be_promoted(engine: Engine) -> None:
    """Those it does not ask for; of the others none is there."""
    store(engine, 4)
    context = engine.request(4)
    assert engine.look_until(context, key(FULL, 0), key(OTHER, 0), key(STATE, 3)) == ["HIT", "HIT", "MISS"]


def test_nobody_is_told_to_ask_again_for_ever(engine: Engine) -> None:
    store(engine, 2, 1)
    context = engine.request(2)
    assert engine.look(context, key(FULL, 0)) == ["RETRY"]
    engine.tier._request(context).again_since_s = -1e6
    assert engine.look(context, key(STATE, 1)) == ["MISS"]


def test_questions_of_a_request_that_goes_away_go_with_it(engine: Engine) -> None:
    """Whoever waits for no answer has it nowhere: else each client that hangs up would leave some, for ever."""
    context, client = engine.request(2), engine.tier._jobs.client
    assert engine.look(context, key(FULL, 0), key(OTHER, 0)) == ["RETRY"] * 2
    assert len(client.lookups) == 2
    engine.tier.on_request_finished(context)
    assert not client.lookups


def test_a_request_that_stood_in_the_queue_is_answered_when_its_turn_comes(engine: Engine) -> None:
    """vLLM asks all that wait while a request may begin, and none while too many run."""
    store(engine, 2, 1)
    context, wanted = engine.request(2), [key(FULL, 0), key(OTHER, 0), key(STATE, 1)]
    assert engine.look(context, key(FULL, 0)) == ["RETRY"]
    engine.tier._request(context).again_since_s = -1e6
    engine.step()
    assert engine.look_until(context, *wanted) == ["HIT"] * 3


def test_a_preempted_request_finds_what_it_stored_itself(engine: Engine) -> None:
    context, wanted = engine.request(2), [key(FULL, 0), key(OTHER, 0), key(STATE, 1)]
    assert engine.look_until(context, *wanted) == ["MISS"] * 3
    keys = [key(group, number) for group in (FULL, OTHER) for number in range(2)]
    assert engine.run(context, [*keys, key(STATE, 1)], 0, is_load=False).success
    assert engine.look_until(context, *wanted) == ["MISS"] * 3, "it runs, and nothing was asked anew"
    engine.step(preempted=(context.req_id,))
    assert engine.look_until(context, *wanted) == ["HIT"] * 3
    engine.tier.on_request_finished(context)
    assert not engine.tier._known


def test_the_end_of_a_prompt_inside_a_row_is_neither_stored_nor_found(engine: Engine) -> None:
    """vLLM makes keys for such ends, too; the rest of that row's block is of another prompt."""
    context = engine.request(1)
    inside = key(STATE, 99)
    context.set_offload_key_position(inside, TOKENS + 4)
    result = engine.run(context, [key(STATE, 0), inside], 0, is_load=False)
    assert not result.success
    assert engine.look_until(context, inside, key(STATE, 0)) == ["MISS", "HIT"]


def counted(engine: Engine) -> dict[tuple[str, ...], float]:
    """What vLLM took since the last time: by name and label."""
    from tiered_kv.vllm.row_metrics import PREFIX, definitions

    stats, known = engine.tier.get_stats(), definitions()
    found = {}
    for name, values in stats.data["data"].items() if stats is not None else ():
        for labels, value in values.items():
            assert len(labels) == len(known[name].labelnames)
            found[name.removeprefix(PREFIX), *labels] = value
    return found


def test_every_row_is_counted_once_by_how_it_ended(engine: Engine) -> None:
    store(engine, 2, 1)
    assert counted(engine) == {("stored",): 5}
    context = engine.request(4)
    inside = key(STATE, 99)
    context.set_offload_key_position(inside, TOKENS + 4)
    engine.run(context, [key(STATE, 0), inside], 0, is_load=False)
    engine.run(context, [key(FULL, 0), key(STATE, 3)], 10, is_load=True)
    engine.tier._resets += 1
    engine.run(context, [key(STATE, 2)], 0, is_load=False)
    engine.step()
    assert counted(engine) == {
        ("stored",): 1, ("dropped", "not_whole"): 1, ("dropped", "not_wanted"): 1, ("loaded",): 1,
        ("not_loaded", "failed"): 1, ("serving",): 1,
    }  # fmt: skip


def test_rows_that_were_reported_stored_and_dropped_are_told_of_once(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """The server's own figures, with one counter changed: what makes it drop a write is proven where it does."""
    import json

    client = engine.tier._jobs.client
    taken: list[Any] = []

    def have_come() -> bool:
        client.poll()
        taken.append(client.figures)
        return client.figures is not None

    assert client.ask_figures()
    wait_for(have_come, "figures")
    figures = json.loads(taken[-1])

    def told(**drops: int) -> tuple[dict[tuple[str, ...], float], int]:
        """What is counted of these drops, and how often it was said."""
        counters = {f"write_dropped_{reason}": count for reason, count in drops.items()}
        client.figures = json.dumps(figures | {"counters": counters}).encode()
        engine.tier._metrics.watch(client, is_serving=True)
        # A logger that passes records on, too, gives each of them twice.
        said = {id(one) for one in caplog.records if "reported stored were dropped" in one.getMessage()}
        return {name: count for name, count in counted(engine).items() if name[0] == "unwritten"}, len(said)

    logger = logging.getLogger("vllm.tiered_kv.vllm.row_metrics")
    logger.addHandler(caplog.handler)
    try:
        assert told(source_evicted=3, erased=2) == ({}, 0), "one was in a file, the other was not to be"
        assert told(evicted=7) == told(evicted=7) == ({("unwritten", "evicted"): 7}, 1)
        assert told(no_room=1) == ({("unwritten", "evicted"): 0, ("unwritten", "no_room"): 1}, 1), "the next server"
    finally:
        logger.removeHandler(caplog.handler)


def test_rows_that_were_reported_stored_and_that_a_full_disk_refused_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(tmp_path / "cache", min_free_bytes="1000TiB")
    logger = logging.getLogger("vllm.tiered_kv.vllm.row_metrics")
    logger.addHandler(caplog.handler)
    try:
        store(engine, 2, 1)
        told: dict[tuple[str, ...], float] = {}

        def is_told() -> bool:
            client = engine.tier._jobs.client
            client.ask_figures()
            client.poll()
            engine.step()
            told.update(counted(engine))
            return ("unwritten", "failed_no_room") in told

        wait_for(is_told, "the rows that the disk refused")
    finally:
        logger.removeHandler(caplog.handler)
        engine.tier.shutdown()
    assert told["stored",] == 5
    assert any("the disk does not take rows" in one.getMessage() for one in caplog.records)


def test_a_row_of_a_prefix_that_does_not_come_is_a_miss_and_what_lies_behind_it(engine: Engine, tmp_path: Path) -> None:
    """Else vLLM has it loaded again for ever."""
    store(engine, 4, 3)
    root, context, wanted = tmp_path / "cache", engine.request(4), [key(FULL, number) for number in range(4)]
    engine.look_until(context, wanted[0], key(OTHER, 0), key(STATE, 3))
    assert engine.look(context, *wanted) == ["HIT"] * 4
    wait_written(root)
    space = engine.tier._jobs.namespace
    blob_path(root, BlobName(space.digest, row_key(space, wanted[2]))).unlink()
    link = ServerLink.of_directory(root)
    assert link is not None
    with link:
        link.evict("host", b"", None, holes=True)
    result = engine.run(context, wanted, 10, is_load=True)
    assert (result.success, set(result.successful_keys)) == (False, set(wanted[:2]))
    assert engine.look(context, *wanted) == ["HIT", "HIT", "MISS", "MISS"]


def test_a_state_that_does_not_come_is_a_miss_and_the_rest_of_the_job_is_told(engine: Engine) -> None:
    store(engine, 2, 1)
    context = engine.request(4)
    keys = [key(FULL, 0), key(FULL, 1), key(STATE, 3)]
    result = engine.run(context, keys, 10, is_load=True)
    assert (result.success, set(result.successful_keys)) == (False, {key(FULL, 0), key(FULL, 1)})
    assert engine.look(context, key(STATE, 3)) == ["MISS"]


def full(rows: int, first: int = 0) -> list[Any]:
    return [key(FULL, number) for number in range(first, rows)]


def test_stores_that_a_reset_finds_not_begun_are_told_and_never_begin(engine: Engine) -> None:
    """VLLM submits them behind a step and asserts that a reset leaves none: else the engine ends."""
    from vllm.v1.kv_offload.tiering.base import TransferJob

    context = engine.request(2)
    for number in range(2):
        engine.tier.submit_store(TransferJob(number, full(2), np.arange(2), False, context))
    engine.tier.drain_jobs()
    results = list(engine.tier.get_finished_jobs())
    assert [(one.job_id, one.success) for one in results] == [(0, False), (1, False)]
    assert not engine.tier._jobs.is_running and not engine.tier._parts


def test_a_request_from_before_a_reset_stores_nothing_behind_it(engine: Engine) -> None:
    """What it goes on from was computed with the weights from before."""
    before = engine.request(2)
    engine.tier.drain_jobs()
    wait_for(lambda: engine.tier._jobs.poll() or engine.tier._jobs.is_ready, "the session behind the reset")
    assert not engine.run(before, full(2), 0, is_load=False).success
    assert not engine.run(engine.request(2), full(2), 10, is_load=True).successful_keys
    assert engine.run(engine.request(2), full(2), 0, is_load=False).success


def test_routers_are_told_of_what_is_stored_and_of_no_load(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "cache", enable_kv_events=True)
    try:
        assert engine.run(engine.request(4), [*full(2), key(FULL, 3)], 0, is_load=False).success is False
        ((told),) = engine.tier.take_events()
        assert (list(told.keys), told.removed) == (full(2), False), "behind a gap nothing is stored"
        assert engine.run(engine.request(2), full(2), 10, is_load=True).success
        assert not engine.tier.take_events()
    finally:
        engine.tier.shutdown()


def test_workers_that_say_different_things_are_a_refusal(engine: Engine) -> None:
    from tiered_kv.vllm.identity.rows import RowIdentity

    said = [RowIdentity(namespace_fields(), STORED_BY), RowIdentity(namespace_fields("another"), STORED_BY)]
    joined, engine.tier._jobs = engine.tier._jobs, None  # as it begins
    with pytest.raises(TieredKVError, match="workers of one engine disagree on what they serve"):
        engine.tier.begin(said, "another engine")
    engine.tier._jobs = joined


def test_a_row_of_several_groups_of_full_attention_is_worth_its_part_of_the_tokens(tmp_path: Path) -> None:
    """Both have to be read, and save the same prefill."""
    engine = Engine(tmp_path / "cache", promotion_wait_ms=None)
    try:
        store(engine, 4, 3)
        context, jobs = engine.request(4), engine.tier._jobs
        engine.look(context, key(FULL, 0), key(OTHER, 0))
        request = engine.tier._request(context)
        finds = [request.rows[group.number].find for group in (FULL, OTHER)]
        wait_for(
            lambda: not jobs.poll() and all(jobs.client.lookups[one.lookup].is_answered for one in finds), "answers"
        )
        # 4 rows take 64 tokens, 3.2 ms at the rate that is assumed before the first prefill.
        for find, read_s in zip(finds, (1.2e-3, 0.7e-3), strict=True):
            jobs.client.release(find.lookup)
            find.held, find.parts = 4, [(4, read_s)]
        engine.tier._take_answers(jobs, request, context)
        assert [request.rows[group.number].held for group in (FULL, OTHER)] == [0, 4]
    finally:
        engine.tier.shutdown()


def test_hits_that_nobody_elses_stand_in_the_way_of_are_cut_at_once(engine: Engine) -> None:
    """More than may ever be hits together: nothing comes free by waiting."""
    store(engine, 4, 3)
    engine.tier._hits_max = 3
    context = engine.request(4)
    seen: list[list[str]] = []

    def has_hits() -> bool:
        seen.append(engine.look(context, key(FULL, 0), key(OTHER, 0), key(STATE, 3)))
        return "HIT" in seen[-1]

    wait_for(has_hits, "hits")
    assert seen[-1] == ["HIT", "MISS", "MISS"]


def test_rows_of_an_adapter_that_changed_while_they_were_loaded_are_misses(engine: Engine, tmp_path: Path) -> None:
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from tiered_kv.vllm.row_adapters import RowAdapters, RowReport

    config = SimpleNamespace(lora_dtype="auto", target_modules=None)
    adapters = RowAdapters(SimpleNamespace(lora_config=config, parallel_config=SimpleNamespace(world_size=1)))
    context = ReqContext(req_id="with an adapter")
    for number in range(2):
        context.set_offload_key_position(key(FULL, number), (number + 1) * TOKENS)
    connector = SimpleNamespace(
        on_new_request=lambda _: engine.tier.on_new_request(context), update_connector_output=lambda _: None
    )
    adapters.listen(connector)
    engine.tier.adapters = adapters
    adapter = lora("adapter", adapter_files(tmp_path / "adapter", 1))
    connector.on_new_request(SimpleNamespace(request_id=context.req_id, lora_request=adapter))

    def told(stamps: Any) -> None:
        report = RowReport(adapters={1: {0: stamps}})
        connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report))

    told(engine.tier._request(context).adapter.stamps)
    assert engine.run(context, full(2), 0, is_load=False).success
    assert engine.run(context, full(2), 10, is_load=True).success
    engine.tier.submit_load(TransferJob(99, full(2), np.arange(20, 22), True, context))
    told("another one's")
    results: list[Any] = []
    wait_for(lambda: results.extend(engine.tier.get_finished_jobs()) or bool(results), "the job")
    assert (results[0].success, results[0].successful_keys) == (False, None)
    assert engine.look(context, *full(2)) == ["MISS", "MISS"]
