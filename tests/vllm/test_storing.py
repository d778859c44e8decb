"""Which chunks of a request are stored, and when, step by step through the scheduler's side (rule 9)."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request, RequestStatus

from tests.kit.server.clients import BLOCK, CHUNK, SmallEngine, poll_until
from tests.kit.server.processes import stopped_server
from tiered_kv.vllm.engine_role import EngineRole
from tiered_kv.vllm.identity.adapters import Adapters
from tiered_kv.vllm.kv_groups import CacheGroup, CacheGroups
from tiered_kv.vllm.scheduler import SchedulerSide
from tiered_kv.vllm.step import BlockRun, ChunkCopy, SaveJob, SaveReport, StepMetadata
from tiered_kv.vllm.worker import WorkerSide

pytestmark = pytest.mark.vllm

PER_CHUNK = CHUNK // BLOCK
GROUPS = CacheGroups([CacheGroup(0, BLOCK, PER_CHUNK, PER_CHUNK)])
WINDOWED = CacheGroups([CacheGroup(0, BLOCK, PER_CHUNK, 1, window_tokens=BLOCK + 1)])
BOTH = EngineRole(may_load=True, may_store=True, has_prefix_caching=False)
BLOCKS = 100


class Steps:
    """A scheduler's side over vLLM's real block pool, and one request of three chunks and a bit."""

    def __init__(
        self,
        engine: SmallEngine,
        first_token: int,
        name: str = "r",
        *,
        groups: CacheGroups = GROUPS,
        is_answered: bool = True,
        params: dict[str, Any] | None = None,
    ) -> None:
        self.engine = engine
        self.side = SchedulerSide(engine.config, engine.client, Adapters(""), groups, BOTH)
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=BLOCK)
        self.side.bind_block_pool(self.pool)
        tokens = list(range(first_token, first_token + 3 * CHUNK + 5))
        extra_args = {"kv_transfer_params": params} if params else None
        self.request = Request(name, tokens, SamplingParams(max_tokens=99, extra_args=extra_args), None)
        self.blocks: list[Any] = []
        self.side.add_request(self.request)
        poll_until(engine.client, lambda: engine.client.credit_count >= 3, "slots")
        if is_answered:
            self.until_answered()

    def until_answered(self) -> None:
        lookups = self.engine.client.lookups
        poll_until(self.engine.client, lambda: all(one.is_answered for one in lookups.values()), "the answer")

    def admit(self) -> None:
        self.request.status = RequestStatus.RUNNING
        self.blocks = self.pool.get_new_blocks(-(-self.request.num_tokens // BLOCK))

    @property
    def tables(self) -> tuple[list[int]]:
        return ([block.block_id for block in self.blocks],)

    def step(self, tokens: int = 0, *, preempted: bool = False) -> StepMetadata:
        """A step of vLLM's that schedules so many of the request's tokens."""
        name = self.request.request_id
        metadata = self.side.plan_step(
            SimpleNamespace(
                preempted_req_ids={name} if preempted else set(),
                num_scheduled_tokens={name: tokens} if tokens else {},
                kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: self.tables),
            )
        )
        self.request.num_computed_tokens += tokens
        return metadata

    def take_back(self) -> None:
        """vLLM takes the request's blocks."""
        self.pool.free_blocks(reversed(self.blocks))
        self.blocks = []

    def finish(self) -> dict[str, Any] | None:
        promise = self.side.finish_request(self.request, self.tables)
        self.take_back()
        return promise

    @property
    def free(self) -> int:
        return BLOCKS - 1 - self.pool.get_num_free_blocks()

    def outcomes(self) -> Counter[str]:
        return Counter({name: n for name, n in self.side.counters.items() if n and name.startswith("store")})


def chunks_of(metadata: StepMetadata) -> list[tuple[int, ...]]:
    """The blocks of each chunk that a step saves."""
    return [copy.groups[0].block_ids for job in metadata.saves for copy in job.copies]


def reported(metadata: StepMetadata, *, failed: bool = False) -> SaveReport:
    ids = [job.job_id for job in metadata.saves]
    return SaveReport(dict.fromkeys(ids, 1), failed=set(ids) if failed else set())


def test_chunks_that_the_last_step_completed_are_pinned_when_the_request_ends(engine: SmallEngine) -> None:
    """No step follows that could pin them, and vLLM takes the blocks back right after it has said so."""
    steps = Steps(engine, 100_000)
    steps.admit()
    ids = steps.tables[0]
    steps.request.num_computed_tokens = 3 * CHUNK + 5
    steps.finish()

    assert steps.side.has_work, "vLLM makes no step for what waits"
    assert steps.free == 3 * PER_CHUNK, "pinned: whole chunks, and not the rest of the prompt"
    metadata = steps.step()
    assert chunks_of(metadata) == [tuple(ids[i : i + PER_CHUNK]) for i in range(0, 3 * PER_CHUNK, PER_CHUNK)]
    steps.side.saves_finished(reported(metadata))
    assert steps.free == 0
    assert not steps.side.has_work
    assert steps.outcomes() == {"store_chunks": 3, "stores": 3}
    lookup, answer = engine.look_up(3, first_token=100_000)
    assert answer.held == 3
    engine.client.release(lookup)


@pytest.mark.parametrize(
    ("generated", "param", "stored"),
    [(60, None, [False, False, False, True]), (59, None, [False] * 3), (60, False, [False] * 3)],
    ids=["whole", "the last token is missing", "not wanted"],
)
def test_an_answers_chunk_is_committed_as_one_and_ends_before_the_last_token(
    engine: SmallEngine,
    monkeypatch: pytest.MonkeyPatch,
    generated: int,
    param: bool | None,
    stored: list[bool],
) -> None:
    first = 400_000 + 1000 * generated + 500 * (param is None)
    steps = Steps(engine, first, f"answered-{first}", params={"tiered_kv.save_decode": param})
    steps.request.append_output_token_ids(list(range(generated)))
    steps.admit()
    poll_until(engine.client, lambda: engine.client.credit_count >= 4, "slots")
    steps.request.num_computed_tokens = steps.request.num_tokens  # a step that runs ahead counts what is not known yet
    steps.finish()
    committed: list[bool] = []
    commit = engine.client.commit

    def watched(chunks: Any, answers: Any) -> None:
        committed.extend(slot in answers for slot, _ in sorted(chunks, key=lambda one: one[1].chunk_index))
        commit(chunks, answers)

    monkeypatch.setattr(engine.client, "commit", watched)
    steps.side.saves_finished(reported(steps.step()))
    assert committed == stored
    assert steps.outcomes() == {"store_chunks": len(stored), "stores": len(stored)}


def test_what_another_engine_is_promised_is_to_be_written_at_once(engine: SmallEngine) -> None:
    """Where only second touches are written, it would not be there for the other engine."""
    steps = Steps(engine, 150_000)
    steps.request.kv_transfer_params = {"do_remote_decode": True}
    steps.admit()
    steps.request.num_computed_tokens = 3 * CHUNK + 5
    assert steps.finish() == {"tiered_kv.stored_tokens": 3 * CHUNK}
    assert not steps.side.counters["handovers_sent"], "a copy may still fail"
    steps.side.saves_finished(reported(steps.step()))
    assert steps.side.counters["handovers_sent"] == 1


def test_what_had_no_slot_while_the_request_ran_is_pinned_when_it_ends(engine: SmallEngine) -> None:
    steps = Steps(engine, 200_000)
    steps.admit()
    taken, engine.client._credits = engine.client._credits, type(engine.client._credits)()
    metadata = steps.step(3 * CHUNK + 5)
    assert not metadata.saves
    assert not steps.side.has_work, "nothing waits that could not be preempted"
    steps.finish()
    assert steps.free == 3 * PER_CHUNK
    engine.client._credits = taken
    metadata = steps.step()
    assert len(chunks_of(metadata)) == 3
    steps.side.saves_finished(reported(metadata))
    assert steps.outcomes() == {"store_chunks": 3, "stores": 3}


def test_what_the_gpu_has_is_not_copied_again_where_a_request_did_not_wait_for_the_answer(engine: SmallEngine) -> None:
    """It is held already, stored by another engine and loaded by this one, which only the answer says."""
    engine.store(2, first_token=250_000)
    engine.wait_hits(2, first_token=250_000)
    with stopped_server(engine.root):
        steps = Steps(engine, 250_000, is_answered=False)
        steps.admit()
        steps.side.allocated(steps.request, steps.tables, 0)
        steps.request.num_computed_tokens = 2 * CHUNK
        assert not steps.step(CHUNK + 5).saves
    steps.until_answered()
    assert chunks_of(steps.step(1)) == [tuple(steps.tables[0][2 * PER_CHUNK : 3 * PER_CHUNK])]
    assert steps.outcomes() == {"store_chunks": 3, "store_held": 2}
    assert not engine.client.lookups, "its leases outlive what it was kept for"


def test_where_windows_pass_a_chunk_is_queued_in_its_own_step_whether_answered_or_not(engine: SmallEngine) -> None:
    """A request that reads no cache waits for no answer, and by the next step vLLM has the blocks back."""
    with stopped_server(engine.root):
        steps = Steps(engine, 270_000, groups=WINDOWED, is_answered=False)
        steps.admit()
        steps.side.allocated(steps.request, steps.tables, 0)
        metadata = steps.step(3 * CHUNK + 5)
    assert chunks_of(metadata) == [(steps.tables[0][end * PER_CHUNK - 1],) for end in (1, 2, 3)]
    steps.finish()


def test_a_preempted_request_is_stored_from_its_first_chunk_again(engine: SmallEngine) -> None:
    steps = Steps(engine, 300_000)
    steps.admit()
    metadata = steps.step(3 * CHUNK)
    assert len(chunks_of(metadata)) == 3
    steps.side.saves_finished(reported(metadata, failed=True))  # or they would be known to be stored
    steps.take_back()
    steps.request.status, steps.request.num_computed_tokens = RequestStatus.PREEMPTED, 0
    steps.step(preempted=True)

    steps.admit()
    poll_until(engine.client, lambda: engine.client.credit_count >= 3, "slots")
    steps.until_answered()
    metadata = steps.step(2 * CHUNK)
    assert chunks_of(metadata) == [tuple(steps.tables[0][i : i + PER_CHUNK]) for i in (0, PER_CHUNK)]
    steps.side.saves_finished(reported(metadata))
    steps.finish()
    assert steps.outcomes() == {"store_chunks": 5, "stores": 2, "stores_failed": 3}


def test_what_a_preempted_request_still_had_to_store_is_counted(engine: SmallEngine) -> None:
    steps = Steps(engine, 400_000)
    steps.admit()
    taken, engine.client._credits = engine.client._credits, type(engine.client._credits)()
    steps.step(3 * CHUNK)
    steps.take_back()
    assert steps.pool.get_num_free_blocks() == BLOCKS - 1, "preemption frees what plain vLLM's would"
    steps.request.status, steps.request.num_computed_tokens = RequestStatus.PREEMPTED, 0
    engine.client._credits = taken
    assert not steps.step(preempted=True).saves
    steps.finish()
    assert steps.outcomes() == {"store_chunks": 3, "store_dropped_preempted": 3}


def test_a_request_that_waits_for_blocks_gets_those_of_chunks_that_wait_for_slots(engine: SmallEngine) -> None:
    """vLLM asks nobody for blocks when it cannot admit a request: nothing runs, and nothing else would free them."""
    steps = Steps(engine, 500_000)
    steps.admit()
    steps.request.num_computed_tokens = 3 * CHUNK + 5
    taken, engine.client._credits = engine.client._credits, type(engine.client._credits)()
    steps.finish()
    other = Request("other", list(range(BLOCK * (BLOCKS - 4))), SamplingParams(max_tokens=1), None)
    steps.side.add_request(other)
    steps.step()
    assert steps.free == 0
    assert steps.outcomes() == {"store_chunks": 3, "store_dropped_blocks_wanted": 3}
    engine.client._credits = taken
    steps.side.finish_request(other, ())


def test_chunks_that_end_without_a_session_are_counted(engine: SmallEngine) -> None:
    steps = Steps(engine, 600_000)
    steps.admit()
    info, engine.client.info = engine.client.info, None
    steps.step(3 * CHUNK)
    steps.finish()
    engine.client.info = info
    assert steps.outcomes() == {"store_chunks": 3, "store_dropped_no_session": 3}
    assert steps.free == 0


def test_blocks_are_planned_once_however_often_vllm_tells_of_them(engine: SmallEngine) -> None:
    """vLLM calls ``update_state_after_alloc`` for a load, and again when the request goes on behind it."""
    engine.store(3, first_token=700_000)
    engine.wait_hits(3, first_token=700_000)
    steps = Steps(engine, 700_000)
    matched: list[int | None] = []
    poll_until(
        engine.client, lambda: matched.append(steps.side.matched_tokens(steps.request, 0)) or matched[-1], "a hit"
    )
    assert matched[-1] == 3 * CHUNK
    steps.admit()
    steps.side.allocated(steps.request, steps.tables, 3 * CHUNK)
    steps.side.allocated(steps.request, (), 0)  # before it was loaded: nothing may let go of the leases
    assert len(steps.step().loads) == 1
    assert engine.client.lookups, "the lease ended while workers may copy from its slots"
    steps.side.loads_finished({"r"}, set())
    steps.request.num_computed_tokens = 3 * CHUNK
    steps.side.allocated(steps.request, (), 0)
    metadata = steps.step(5)
    assert (metadata.loads, metadata.saves) == ((), ())
    steps.finish()
    assert steps.side.counters["loads"] == 1
    assert steps.side.counters["load_tokens"] == 3 * CHUNK
    assert steps.outcomes() == {"store_chunks": 3, "store_held": 3}
    assert not engine.client.lookups


OF_VLLM_0_30: dict[str, int] = {}
"""What its configuration of the KV cache tells of ranks that hold equal KV, as with MLA: there is no such field."""


def worker(engine: SmallEngine, rank: int, told: dict[str, int]) -> WorkerSide:
    """A rank that never joined the server."""
    parallel = SimpleNamespace(rank=rank, world_size=2)
    return WorkerSide(engine.config, SimpleNamespace(parallel_config=parallel), SimpleNamespace(**told), "e")


@pytest.mark.parametrize(
    ("told", "storing"), [(OF_VLLM_0_30, {0, 1}), ({"kv_tp_replicas": 1}, {0, 1}), ({"kv_tp_replicas": 2}, {0})]
)
def test_every_rank_stores_its_own_kv_unless_vllm_tells_that_another_holds_the_same(
    engine: SmallEngine, told: dict[str, int], storing: set[int]
) -> None:
    """MLA on several ranks of vLLM 0.30 is stored once per rank: twice the size, and right."""
    copy = ChunkCopy(0, (BlockRun(0, tuple(range(PER_CHUNK))),))
    copying = set()
    for rank in range(2):
        side = worker(engine, rank, told)
        side.start_saves(StepMetadata(0, None, saves=(SaveJob(7, 0, (copy,)),)))
        report = side.take_finished_saves()
        assert report is not None and report.ranks_done == {7: 1}
        if report.failed:  # it wanted to copy, and has no server
            copying.add(rank)
        side.close()
    assert copying == storing


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_job_that_every_rank_skipped_is_reported(engine: SmallEngine, replicas: int) -> None:
    """Or its blocks would be pinned for ever."""
    job = SaveJob(7, 0, ())
    report = SaveReport()
    for rank in range(2):
        side = worker(engine, rank, {"kv_tp_replicas": replicas})
        side.start_saves(StepMetadata(0, None, saves=(job,)))
        told = side.take_finished_saves()
        assert told is not None
        report = report.aggregate(told)
        side.close()
    assert report.ranks_done == {7: 2}
    assert report.failed == {7}, "nothing was copied"
