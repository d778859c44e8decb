"""The store path's pins: taken when a chunk is queued, given back exactly once, whatever becomes of the chunk."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool

from tiered_kv.config import Config
from tiered_kv.keys.namespace import REQUIRED_FIELDS, Namespace
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.keys.tags import NO_TAG, tag_digest
from tiered_kv.tiering.tails import TAILS_MAX
from tiered_kv.vllm.engine_role import EngineRole
from tiered_kv.vllm.kv_groups import NULL_BLOCK, CacheGroup, CacheGroups
from tiered_kv.vllm.request_params import NO_PARAMS
from tiered_kv.vllm.request_saves import RequestSaves
from tiered_kv.vllm.save_queue import COPY_SOON_S, QUEUED_MAX_S, SaveQueue
from tiered_kv.vllm.step import BlockRun, SaveReport

pytestmark = pytest.mark.vllm

BLOCKS = 200
PER_CHUNK = 4
GROUPS = CacheGroups([CacheGroup(0, 16, PER_CHUNK, PER_CHUNK)])
NAMESPACE = Namespace.from_fields(dict.fromkeys(REQUIRED_FIELDS, "test") | {"format_version": 1})


@dataclass
class Server:
    """What the store path needs of a session: slots to take, and what came back."""

    credits: deque[int] = field(default_factory=deque)
    committed: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    tags: list[bytes] = field(default_factory=list)
    given_back: list[int] = field(default_factory=list)
    tails: list[tuple[int, bytes, int]] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)
    generation: int = 0
    world_size: int = 1
    namespace: Any = NAMESPACE
    info: Any = field(default_factory=SimpleNamespace)

    @property
    def credit_count(self) -> int:
        return len(self.credits)

    def take_slot(self) -> int | None:
        return self.credits.popleft() if self.credits else None

    def commit(self, chunks: Any, answers: Any) -> None:
        self.committed += [slot for slot, _ in chunks]
        self.answers += answers
        self.tags += [record.tag for _, record in chunks]

    def commit_tail(self, slot: int, record: Any) -> None:
        self.tails.append((slot, record.key))

    def drop_tails(self, keys: Any) -> None:
        self.dropped += keys

    def give_back(self, slots: list[int]) -> None:
        self.given_back += slots


def state_to_store(tokens: int) -> Any:
    """A request with a prompt of so many tokens, none of them computed, as ``RequestSaves`` knows it."""
    return SimpleNamespace(
        request=SimpleNamespace(request_id="r", num_computed_tokens=0, num_tokens=tokens, num_prompt_tokens=tokens),
        params=NO_PARAMS,
        extras=SimpleNamespace(is_accountable=True, may_store=True),
        is_from_before_reset=False,
        held=0,
        storable=0,
        stored=0,
        unstored=0,
    )


class World:
    """A store path over vLLM's real block pool."""

    def __init__(self, world_size: int = 1, pinned_share: float = 0.5, groups: CacheGroups = GROUPS) -> None:
        config = Config(storage_uri="file:///unused", chunk_tokens=64, pinned_share=pinned_share)
        self.groups = groups
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=16)
        self.server = Server(world_size=world_size)
        self.counters: Counter[str] = Counter()
        self.now_s = 0.0
        self.saves = SaveQueue(config, self.server, groups, self.counters, lambda: self.now_s)  # type: ignore[arg-type]
        self.saves.bind_block_pool(self.pool)

    def request_saves(self, keys: PrefixKeys, drafted: Callable[[int], int], **settings: Any) -> RequestSaves:
        """The part that hands chunks to the queue, for requests with these keys; ``drafted``: of so many chunks."""
        config = Config(storage_uri="file:///unused", chunk_tokens=64, **settings)
        role = EngineRole(may_load=True, may_store=True, has_prefix_caching=True)
        lookups: Any = SimpleNamespace(keys=lambda state: keys, update_held=lambda state: None)
        undrafted: Any = SimpleNamespace(drafted_chunks=lambda tables, chunks: drafted(chunks))
        server: Any = self.server
        return RequestSaves(config, server, role, self.groups, lookups, self.saves, undrafted, self.counters)

    def prompt(self, chunks: int, first: int = 0) -> tuple[PrefixKeys, list[int]]:
        keys = PrefixKeys(NAMESPACE, 64)
        keys.extend([first, *range(64 * chunks - 1)])
        return keys, [block.block_id for block in self.pool.get_new_blocks(PER_CHUNK * chunks)]

    def free(self, ids: list[int]) -> None:
        """The request ends: vLLM gives its blocks back."""
        self.pool.free_blocks(reversed([self.pool.blocks[i] for i in ids]))

    @property
    def free_blocks(self) -> int:
        return self.pool.get_num_free_blocks()


def test_blocks_stay_pinned_until_every_rank_has_copied() -> None:
    world = World(world_size=2)
    keys, ids = world.prompt(3)
    world.server.credits.extend([10, 11, 12])

    assert world.saves.queue(keys, (ids,), range(3), held=0, tag=NO_TAG) == (3, False)
    (job,) = world.saves.start_jobs()
    world.free(ids)
    assert world.free_blocks == BLOCKS - 1 - 3 * PER_CHUNK

    world.saves.finished(SaveReport({job.job_id: 1}))
    assert world.free_blocks == BLOCKS - 1 - 3 * PER_CHUNK
    assert world.server.committed == []

    world.saves.finished(SaveReport({job.job_id: 1}))
    assert world.free_blocks == BLOCKS - 1
    assert world.server.committed == [10, 11, 12]
    assert not world.saves.has_work


def test_chunks_behind_the_prompt_are_committed_as_an_answers() -> None:
    world = World()
    keys, ids = world.prompt(4)
    world.server.credits.extend([10, 11, 12, 13])
    world.saves.queue(keys, (ids,), range(3), held=0, tag=NO_TAG, prompt_chunks=2)
    world.saves.queue(keys, (ids,), range(3, 4), held=0, tag=NO_TAG, prompt_chunks=4)  # it is a prompt's meanwhile
    (job,) = world.saves.start_jobs()
    world.saves.finished(SaveReport({job.job_id: 1}))
    assert (world.server.committed, world.server.answers) == ([10, 11, 12, 13], [12])


def test_job_that_failed_on_one_rank_is_never_committed() -> None:
    world = World(world_size=2)
    keys, ids = world.prompt(2)
    world.server.credits.extend([10, 11])
    world.saves.queue(keys, (ids,), range(2), held=0, tag=NO_TAG)
    (job,) = world.saves.start_jobs()

    world.saves.finished(SaveReport({job.job_id: 1}, failed={job.job_id}))
    world.saves.finished(SaveReport({job.job_id: 1}))
    world.free(ids)

    assert world.server.committed == []
    assert world.server.given_back == [10, 11]
    assert world.free_blocks == BLOCKS - 1


def test_held_and_stored_chunks_are_not_queued_again() -> None:
    world = World()
    keys, ids = world.prompt(4)
    world.server.credits.extend(range(10))
    world.saves.queue(keys, (ids,), range(4), held=2, tag=NO_TAG)
    (job,) = world.saves.start_jobs()
    assert len(job.copies) == 2
    world.saves.queue(keys, (ids,), range(4), held=2, tag=NO_TAG)
    assert world.saves.start_jobs() == ()  # still being copied

    world.saves.finished(SaveReport({job.job_id: 1}))
    world.saves.queue(keys, (ids,), range(4), held=2, tag=NO_TAG)
    assert world.saves.start_jobs() == ()  # stored

    world.saves.not_held(keys.keys[3:], world.now_s)
    world.saves.queue(keys, (ids,), range(4), held=2, tag=NO_TAG)
    (again,) = world.saves.start_jobs()
    assert len(again.copies) == 1


def test_an_answer_that_is_older_than_a_store_does_not_have_it_stored_again() -> None:
    """It was asked for before the chunk was committed, and comes after it."""
    world = World()
    keys, ids = world.prompt(2)
    world.server.credits.extend(range(10))
    asked_s, world.now_s = world.now_s, 1.0
    world.saves.queue(keys, (ids,), range(2), held=0, tag=NO_TAG)
    (job,) = world.saves.start_jobs()
    world.saves.finished(SaveReport({job.job_id: 1}))
    world.saves.not_held(keys.keys, asked_s)
    assert all(map(world.saves.is_stored, keys.keys))
    world.saves.queue(keys, (ids,), range(2), held=0, tag=NO_TAG)
    assert world.saves.start_jobs() == ()
    world.now_s = 2.0
    world.saves.not_held(keys.keys, world.now_s)  # evicted since
    world.saves.queue(keys, (ids,), range(2), held=0, tag=NO_TAG)
    (again,) = world.saves.start_jobs()
    assert len(again.copies) == 2


def test_what_is_stored_has_the_tag_of_the_request_that_stored_it_first() -> None:
    world = World()
    keys, ids = world.prompt(3)
    world.server.credits.extend(range(10))
    one, other = tag_digest("one"), tag_digest("other")
    world.saves.queue(keys, (ids,), range(2), held=0, tag=one)
    world.saves.queue(keys, (ids,), range(3), held=0, tag=other)
    (job,) = world.saves.start_jobs()
    world.saves.finished(SaveReport({job.job_id: 1}))
    assert world.server.tags == [one, one, other]


def test_a_live_request_keeps_its_own_blocks_until_there_is_a_slot() -> None:
    """What merely waits costs vLLM nothing: a request that is preempted gives all its blocks at once."""
    world = World()
    keys, ids = world.prompt(8)
    world.server.credits.extend([10, 11, 12])

    assert world.saves.queue(keys, (ids,), range(8), held=0, tag=NO_TAG) == (3, False)
    (job,) = world.saves.start_jobs()
    assert len(job.copies) == 3
    assert not world.saves.has_waiting
    world.saves.finished(SaveReport({job.job_id: 1}))
    assert not world.saves.has_work

    assert world.saves.queue(keys, (ids,), range(3, 8), held=0, tag=NO_TAG) == (3, False)
    world.server.credits.extend(range(20, 30))
    assert world.saves.queue(keys, (ids,), range(3, 8), held=0, tag=NO_TAG) == (8, False)
    (job,) = world.saves.start_jobs()
    world.saves.finished(SaveReport({job.job_id: 1}))
    assert world.server.committed == [10, 11, 12, 20, 21, 22, 23, 24]


def test_what_a_request_leaves_is_pinned_whole_and_stored_as_slots_come() -> None:
    """No share of the pool ends a prompt early where nobody wants its blocks."""
    world = World(pinned_share=0.02)
    keys, ids = world.prompt(40)

    assert world.saves.queue(keys, (ids,), range(40), held=0, tag=NO_TAG, is_ending=True) == (40, False)
    world.free(ids)
    for slot in range(40):
        world.now_s += 0.9 * QUEUED_MAX_S  # slots come slowly, but they come
        world.server.credits.append(slot)
        (job,) = world.saves.start_jobs()
        world.saves.finished(SaveReport({job.job_id: 1}))
    assert world.server.committed == list(range(40))
    assert world.free_blocks == BLOCKS - 1
    assert world.counters == {"stores": 40}


def test_chunks_without_a_slot_are_dropped_with_their_descendants() -> None:
    world = World()
    keys, ids = world.prompt(3)
    other, other_ids = world.prompt(1, first=1)
    world.saves.queue(keys, (ids,), range(1), held=0, tag=NO_TAG, is_ending=True)
    world.now_s = QUEUED_MAX_S * 0.75
    world.saves.queue(keys, (ids,), range(1, 3), held=0, tag=NO_TAG, is_ending=True)
    world.saves.queue(other, (other_ids,), range(1), held=0, tag=NO_TAG, is_ending=True)
    world.now_s = QUEUED_MAX_S * 1.25

    assert world.saves.start_jobs() == ()
    world.free(ids)

    assert world.counters["store_dropped_no_slot"] == 3
    assert world.free_blocks == BLOCKS - 1 - PER_CHUNK  # the other prompt's
    world.server.credits.append(5)
    (job,) = world.saves.start_jobs()
    assert job.copies[0].groups == (BlockRun(0, tuple(other_ids)),)


def test_vllm_that_lacks_blocks_gets_those_of_chunks_that_wait_and_preempts_for_no_copy_that_hangs() -> None:
    world = World(world_size=2)
    keys, ids = world.prompt(4)
    world.server.credits.extend([10, 11])
    assert not world.saves.frees_soon()
    world.saves.queue(keys, (ids,), range(4), held=0, tag=NO_TAG, is_ending=True)
    (job,) = world.saves.start_jobs()
    assert not world.saves.frees_soon(), "the request has its blocks: nothing would be free once the copies end"
    assert world.counters["store_dropped_blocks_wanted"] == 2
    world.free(ids)
    assert world.saves.frees_soon()
    world.now_s += 1.01 * COPY_SOON_S
    assert not world.saves.frees_soon(), "vLLM would stand still for as long as a copy hangs"
    assert world.free_blocks == BLOCKS - 1 - 2 * PER_CHUNK, "a rank may still be reading these blocks"
    world.saves.finished(SaveReport({job.job_id: 2}))
    assert world.server.committed == [10, 11]
    assert world.free_blocks == BLOCKS - 1


def test_blocks_that_waiting_chunks_held_alone_are_there_at_the_next_step() -> None:
    world = World()
    keys, ids = world.prompt(4)
    world.saves.queue(keys, (ids,), range(4), held=0, tag=NO_TAG, is_ending=True)
    world.free(ids)
    assert world.saves.frees_soon()
    assert world.free_blocks == BLOCKS - 1
    assert world.counters["store_dropped_blocks_wanted"] == 4
    assert not world.saves.frees_soon()


@pytest.mark.parametrize(("is_standing", "kept"), [(False, BLOCKS // 10 // PER_CHUNK), (True, 0)])
def test_a_request_that_is_not_admitted_gets_all_but_a_share(is_standing: bool, kept: int) -> None:
    world = World(pinned_share=0.1)
    keys, ids = world.prompt(8)
    world.saves.queue(keys, (ids,), range(8), held=0, tag=NO_TAG, is_ending=True)
    world.free(ids)
    world.saves.make_room(is_standing=is_standing)
    assert world.free_blocks == BLOCKS - 1 - kept * PER_CHUNK
    assert world.counters["store_dropped_blocks_wanted"] == 8 - kept
    world.server.credits.extend(range(8))
    copies = [copy for job in world.saves.start_jobs() for copy in job.copies]
    assert [copy.groups for copy in copies] == [
        (BlockRun(0, tuple(ids[first : first + PER_CHUNK])),) for first in range(0, kept * PER_CHUNK, PER_CHUNK)
    ], "parents are kept, and their descendants dropped"


def test_windows_are_pinned_before_vllm_frees_them_and_within_the_share() -> None:
    windowed = CacheGroups([CacheGroup(0, 16, PER_CHUNK, PER_CHUNK), CacheGroup(1, 16, PER_CHUNK, 1, window_tokens=17)])
    world = World(pinned_share=0.1, groups=windowed)
    keys, ids = world.prompt(8)
    _, others = world.prompt(8)
    reached = world.saves.queue(keys, (ids, others), range(8), held=0, tag=NO_TAG).reached
    assert reached == BLOCKS // 10 // (PER_CHUNK + 1)
    world.free(others)  # the windows have passed
    world.server.credits.extend(range(8))
    (job,) = world.saves.start_jobs()
    assert len(job.copies) == reached
    passed = [NULL_BLOCK] * len(others)
    assert world.saves.queue(keys, (ids, passed), range(reached, 8), held=0, tag=NO_TAG) == (reached, True)


def test_lost_session_lets_go_of_queued_blocks_and_waits_for_running_copies() -> None:
    world = World()
    keys, ids = world.prompt(2)
    world.server.credits.append(10)
    world.saves.queue(keys, (ids,), range(2), held=0, tag=NO_TAG, is_ending=True)
    (job,) = world.saves.start_jobs()
    world.free(ids)

    world.server.generation, world.server.info = 1, None
    world.saves.session_lost()
    assert world.free_blocks == BLOCKS - 1 - PER_CHUNK  # a worker may still be reading them

    world.saves.finished(SaveReport({job.job_id: 1}))
    assert world.free_blocks == BLOCKS - 1
    assert world.server.committed == world.server.given_back == []


def test_copies_from_before_a_reset_are_given_back() -> None:
    world = World()
    keys, ids = world.prompt(1)
    world.server.credits.append(10)
    world.saves.queue(keys, (ids,), range(1), held=0, tag=NO_TAG)
    (job,) = world.saves.start_jobs()

    world.saves.reset()
    world.saves.finished(SaveReport({job.job_id: 1}))

    assert world.server.committed == []
    assert world.server.given_back == [10]


def test_a_pool_that_only_copies_hold_can_be_emptied_and_what_they_bring_is_thrown_away() -> None:
    world = World(world_size=2)
    keys, ids = world.prompt(4)
    world.server.credits.extend([10, 11])
    world.saves.queue(keys, (ids,), range(4), held=0, tag=NO_TAG, is_ending=True)  # two get slots, two wait for some
    (job,) = world.saves.start_jobs()
    world.saves.finished(SaveReport({job.job_id: 1}))
    world.free(ids)
    assert world.pool.reset_prefix_cache() is False

    world.saves.let_go()
    assert world.pool.reset_prefix_cache() is True
    assert world.saves.has_work
    others = world.pool.get_new_blocks(BLOCKS - 1)  # every block is somebody else's now

    world.saves.finished(SaveReport({job.job_id: 1}))
    assert (world.server.committed, world.server.given_back) == ([], [10, 11])
    assert all(block.ref_cnt == 1 for block in others)
    assert not world.saves.has_work


def test_copies_go_on_where_requests_hold_blocks_anyway() -> None:
    """vLLM cannot empty its pool then, so nothing is gained by dropping stores."""
    for is_shared in (True, False):
        world = World()
        keys, ids = world.prompt(1)
        world.server.credits.append(10)
        world.saves.queue(keys, (ids,), range(1), held=0, tag=NO_TAG)
        (job,) = world.saves.start_jobs()
        if not is_shared:
            world.free(ids)
            world.pool.get_new_blocks(1)

        world.saves.let_go()
        world.saves.finished(SaveReport({job.job_id: 1}))
        assert world.server.committed == [10]


# -- tails -------------------------------------------------------------------------------------------------------------

TAIL = 32
NAME = b"t" * 16, bytes(32)


def queue_tail(world: World, keys: PrefixKeys, ids: list[int], older: tuple[bytes, ...] = ()) -> str | None:
    """The tail of two blocks behind two chunks."""
    return world.saves.queue_tail(keys, (ids,), 2, TAIL, NAME, NO_TAG, older)


def test_a_tail_is_pinned_once_per_block_and_committed_behind_its_chunks() -> None:
    world = World()
    keys, ids = world.prompt(3)
    world.server.credits.extend(range(3))
    world.saves.queue(keys, (ids,), range(2), held=0, tag=NO_TAG, older_tails={1: [b"old"]}, is_ending=True)
    assert queue_tail(world, keys, ids, (b"older",)) is None
    assert queue_tail(world, keys, ids) == "tail_held", "on its way"
    world.free(ids)
    assert world.free_blocks == BLOCKS - 1 - 2 * PER_CHUNK - 2
    (job,) = world.saves.start_jobs()
    own = ids[2 * PER_CHUNK :]
    assert job.copies[-1].groups == (BlockRun(0, (own[0], own[1], own[1], own[1])),)
    assert world.server.tails == world.server.dropped == []
    world.saves.finished(SaveReport({job.job_id: 1}))
    assert (world.server.committed, world.server.tails) == ([0, 1], [(2, NAME[0])])
    assert world.server.dropped == [b"old", b"older"]
    assert world.free_blocks == BLOCKS - 1 and not world.saves.has_work
    assert +world.counters == {"stores": 2, "tails": 1} and not world.saves.is_stored(NAME[0])
    assert world.saves.tails_behind(keys.parent(2)) == {NAME[0]: TAIL}


def test_a_tail_is_remembered_until_something_continues_it() -> None:
    world = World()
    keys, ids = world.prompt(3)
    world.server.credits.extend(range(2))
    queue_tail(world, keys, ids)
    older = {2: [NAME[0]]}
    world.saves.queue(keys, (ids,), range(2, 3), held=0, tag=NO_TAG, older_tails=older, is_ending=True)
    (job,) = world.saves.start_jobs()
    world.saves.finished(SaveReport({job.job_id: 1}))
    assert world.server.dropped == [NAME[0]] and world.saves.tails_behind(keys.parent(2)) == {}
    world.server.credits.append(2)
    queue_tail(world, keys, ids)
    world.saves.session_lost()
    assert world.saves.tails_behind(keys.parent(2)) == {}


def test_of_many_tails_behind_one_chunk_the_newest_are_remembered() -> None:
    """Many conversations leave a common beginning; the server lets go of the older ones' tails, too."""
    world = World(pinned_share=1.0)
    keys, ids = world.prompt(3)
    names = [number.to_bytes(16, "big") for number in range(3 * TAILS_MAX)]
    for key in [*names, names[-2]]:
        world.server.credits.append(0)
        world.saves.queue_tail(keys, (ids,), 2, TAIL, (key, bytes(32)), NO_TAG, ())
        (job,) = world.saves.start_jobs()
        world.saves.finished(SaveReport({job.job_id: 1}))
    assert list(world.saves.tails_behind(keys.parent(2))) == [*names[-TAILS_MAX:-2], names[-1], names[-2]]


def test_a_tail_waits_for_a_slot_only_where_few_do() -> None:
    """An idle engine's slots come back a moment after its next request: a short one must not be over before them."""
    world = World(pinned_share=2.5 * PER_CHUNK / BLOCKS)
    keys, ids = world.prompt(3)
    world.saves.queue(keys, (ids,), range(2), held=0, tag=NO_TAG, is_ending=True)
    assert queue_tail(world, keys, ids) == "tail_dropped_no_slot", "two chunks wait already"
    assert queue_tail(world, keys, ids[:9]) == "tail_dropped_no_slot"
    world.server.credits.extend(range(3))
    assert queue_tail(world, keys, ids[:9]) == "tail_dropped_not_storable", "vLLM has one of its blocks back"


def test_a_tail_whose_copy_failed_is_counted_and_continues_nothing() -> None:
    world = World()
    keys, ids = world.prompt(3)
    world.server.credits.append(0)
    queue_tail(world, keys, ids, (b"older",))
    (job,) = world.saves.start_jobs()
    world.saves.finished(SaveReport({job.job_id: 1}, failed={job.job_id}))
    assert (world.server.given_back, world.server.tails, world.server.dropped) == ([0], [], [])
    assert +world.counters == {"tails_failed": 1}


def test_a_tail_that_is_let_go_of_is_counted_apart_from_chunks() -> None:
    world = World()
    keys, ids = world.prompt(3)
    world.server.credits.append(0)
    queue_tail(world, keys, ids)
    world.saves.reset()
    assert +world.counters == {"tail_dropped_reset": 1} and not world.saves.has_work
