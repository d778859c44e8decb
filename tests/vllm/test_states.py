"""States of recurrent layers in the connector: which blocks they are in, what is pinned, what names them."""

import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

from tests.vllm.test_kv_layout import BLOCKS, NAMES, full, group_config
from tests.vllm.test_save_queue import NAMESPACE, World
from tiered_kv.chunks.layout_test import self_test
from tiered_kv.chunks.transfer import RankKV
from tiered_kv.config import Config
from tiered_kv.errors import ConfigError, UnsupportedModel
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.keys.state_keys import state_records
from tiered_kv.keys.tags import NO_TAG
from tiered_kv.metrics.names import ENGINE_EVENTS
from tiered_kv.vllm.drafts import Drafts
from tiered_kv.vllm.engine_role import EngineRole
from tiered_kv.vllm.identity.record import recurrent_state
from tiered_kv.vllm.kv_groups import NULL_BLOCK, CacheGroup, CacheGroups, chunk_tokens_of
from tiered_kv.vllm.kv_layout import rank_pages, state_pages
from tiered_kv.vllm.request_params import RequestParams
from tiered_kv.vllm.request_saves import RequestSaves
from tiered_kv.vllm.save_queue import QUEUED_MAX_S
from tiered_kv.vllm.step import BlockRun, ChunkCopy, SaveReport
from tiered_kv.vllm.supported import check_groups, check_states
from tiered_kv.vllm.undrafted import UndraftedBlocks

pytestmark = pytest.mark.vllm

BLOCK = 64
STATES = [f"model.layers.{n}.mixer" for n in (2, 3, 4, 5)]


def mamba(**changes):
    fields = {"block_size": BLOCK, "shapes": ((3, 10), (4, 5)), "dtypes": (torch.bfloat16, torch.float32)}
    return MambaSpec(**fields | {"mamba_cache_mode": "align"} | changes)


def hybrid(spec=None) -> KVCacheConfig:
    """Two groups of recurrent layers, attention between them."""
    spec = spec or mamba()
    return group_config(
        KVCacheGroupSpec(STATES[:2], spec),
        KVCacheGroupSpec(NAMES, full(block_size=BLOCK)),
        KVCacheGroupSpec(STATES[2:], spec),
    )


def tensors(content=140, page=512):
    """As vLLM registers them: states of bytes, a page apart; attention beside them."""
    kv = {name: torch.zeros(BLOCKS, 2, BLOCK, 16, dtype=torch.bfloat16) for name in NAMES}
    for name in STATES:
        memory = torch.zeros(BLOCKS * page, dtype=torch.int8)
        kv[name] = torch.as_strided(memory, (BLOCKS, 1, 1, content), (page, content, content, 1))
    return kv


def test_states_are_parts_and_the_chunk_is_vllms_block():
    groups = CacheGroups.of(hybrid(), BLOCK)
    assert groups.states == (0, 2)
    assert list(groups) == [CacheGroup(1, BLOCK, 1, 1)]
    assert chunk_tokens_of(hybrid(), 256) == BLOCK
    assert chunk_tokens_of(group_config(KVCacheGroupSpec(NAMES, full())), 256) == 256
    with pytest.raises(ConfigError, match="chunk_tokens=128"):
        CacheGroups.of(hybrid(), 2 * BLOCK)
    with pytest.raises(ConfigError, match=r"block_sizes=\[32, 64, 32\]"):
        CacheGroups.of(hybrid(mamba(block_size=BLOCK // 2)), BLOCK)


def test_a_load_fills_the_state_at_its_end_and_nothing_before():
    groups = CacheGroups.of(hybrid(), BLOCK)
    tables = [[NULL_BLOCK, NULL_BLOCK, 7], [1, 2, 3], [NULL_BLOCK, NULL_BLOCK, 8]]
    assert groups.load_copies([50, 51, 52], tables, 0, (0, 3 * BLOCK), BLOCK) == tuple(
        ChunkCopy(50 + n, (BlockRun(0, (1 + n,)),)) for n in range(3)
    )
    assert groups.state_copies([60, 61], tables, 3) == (
        ChunkCopy(60, (BlockRun(0, (7,)),), 0),
        ChunkCopy(61, (BlockRun(0, (8,)),), 1),
    )
    assert groups.state_copies([60], tables, 3) is None, "a part without a slot"
    assert groups.state_copies([60, 61], tables, 2) is None, "vLLM has no block there"
    assert groups.state_copies([60, 61], tables, 4) is None


def test_vllms_own_prefix_reaches_as_far_as_its_states():
    groups = CacheGroups.of(hybrid(), BLOCK)
    attention, states = {"a", "b", "c"}, {"a", "b"}
    cached = lambda key, numbers: key in (attention if numbers == [1] else states)  # noqa: E731
    assert groups.cached_chunks(["a", "b", "c", "d"], cached) == 2
    states.clear()
    assert groups.cached_chunks(["a", "b", "c", "d"], cached) == 0


def test_states_come_back_as_they_were_and_the_rest_of_the_slot_is_zeros():
    config, kv = hybrid(), tensors()
    groups = CacheGroups.of(config, BLOCK)
    paged = RankKV(rank_pages(kv, config, groups), kv, [1], state_pages(kv, config, groups.states))
    for of_group in (*paged.groups, *paged.states):
        self_test(of_group)
    for name in STATES:
        kv[name].copy_(torch.randint(-128, 127, kv[name].shape, dtype=torch.int8))
    before = {name: kv[name].clone() for name in STATES}
    slots = [bytearray(b"\xee" * paged.rank_bytes) for _ in range(2)]
    save, load = paged.begin("save", None), paged.begin("load", None)
    for part, slot in enumerate(slots):
        paged.gather_state(part, 4, memoryview(slot), save)
        assert set(slot[paged.states[part].group_bytes :]) == {0}
    for part, slot in enumerate(slots):
        paged.scatter_state(memoryview(slot), part, 6, load)
    for name in STATES:
        assert torch.equal(kv[name][6], before[name][4])
        others = [block for block in range(BLOCKS) if block != 6]
        assert torch.equal(kv[name][others], before[name][others])


def test_a_state_larger_than_a_chunk_is_refused():
    config, kv = hybrid(), tensors()
    groups = CacheGroups.of(config, BLOCK)
    pages = [rank_pages(kv, config, groups)[0][:1]]
    small = {NAMES[0]: torch.zeros(BLOCKS, 1, BLOCK, 1, dtype=torch.bfloat16)} | {n: kv[n] for n in STATES}
    page = pages[0][0].__class__(NAMES[0], "BF16", (1, BLOCK, 1), "HNC")
    with pytest.raises(UnsupportedModel, match=r"does not fit into a chunk.*bytes=280 chunk_bytes=128"):
        RankKV([[page]], small, [1], state_pages(kv, config, groups.states))


@pytest.mark.parametrize("shape", [(BLOCKS, 1, 1, 139), (BLOCKS, 140)])
def test_a_tensor_that_is_no_state_is_refused_by_name(shape):
    kv = tensors() | {STATES[1]: torch.zeros(shape, dtype=torch.int8)}
    with pytest.raises(UnsupportedModel, match=rf"layer={STATES[1]}"):
        state_pages(kv, hybrid(), (0, 2))


REFUSED = {
    "kept at no boundary": mamba(mamba_cache_mode="all"),
    "several equal ranks": mamba(tp_replicated=True),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_states_that_could_not_be_right_are_refused(reason):
    with pytest.raises(UnsupportedModel, match=rf"{reason}.*first_layer={STATES[0]}"):
        check_groups(hybrid(REFUSED[reason]))
    with pytest.raises(UnsupportedModel, match="recurrent layers only"):
        check_groups(group_config(KVCacheGroupSpec(STATES, mamba())))
    check_groups(hybrid())


def config_of_states(method=None, **changes):
    parallel = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1} | changes
    transfer = SimpleNamespace(kv_role=parallel.pop("kv_role", "kv_both"))
    speculative = None if method is None else SimpleNamespace(method=method)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        kv_transfer_config=transfer,
        speculative_config=speculative,
        cache_config=SimpleNamespace(prefix_match_unit=None, prefix_cache_retention_interval=0),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline_parallel_size": 2},
        {"kv_role": "kv_producer"},
        {"method": "ngram"},
        {"method": "eagle"},
        {"method": "draft_model"},
    ],
)
def test_states_that_are_spread_or_drafted_in_ways_never_run_are_refused(changes):
    config = config_of_states(**changes)
    with pytest.raises(UnsupportedModel, match="not supported yet"):
        check_states(config, hybrid())
    check_states(config, group_config(KVCacheGroupSpec(NAMES, full())))


@pytest.mark.parametrize(("unit", "interval", "is_refused"), [(16, 0, True), (16, None, False), (BLOCK, 0, False)])
def test_hits_inside_a_block_are_refused_where_vllm_does_not_keep_every_state(unit, interval, is_refused):
    config = config_of_states()
    config.cache_config = SimpleNamespace(prefix_match_unit=unit, prefix_cache_retention_interval=interval)
    with pytest.raises(UnsupportedModel, match="interval None") if is_refused else nullcontext():
        check_states(config, hybrid())
    check_states(config, group_config(KVCacheGroupSpec(NAMES, full())))


def test_blocks_of_two_sizes_give_hits_inside_the_larger_one():
    """Without ``prefix_match_unit`` vLLM's unit is their greatest common divisor."""
    config = group_config(KVCacheGroupSpec(STATES, mamba()), KVCacheGroupSpec(NAMES, full(block_size=BLOCK // 2)))
    with pytest.raises(UnsupportedModel, match=f"prefix_match_unit={BLOCK // 2}"):
        check_states(config_of_states(), config)


def test_states_with_drafts_are_served_and_a_request_holds_a_block_more_for_each_guess():
    config = hybrid(mamba(num_speculative_blocks=2))
    check_groups(config)
    check_states(config_of_states(method="mtp"), config)
    plain, drafted = CacheGroups.of(hybrid(), BLOCK), CacheGroups.of(config, BLOCK)
    assert drafted.whole_blocks(BLOCK) - plain.whole_blocks(BLOCK) == 2 * len(drafted.states)
    assert drafted.peak_blocks(BLOCK, 0, BLOCK) - plain.peak_blocks(BLOCK, 0, BLOCK) == 2 * len(drafted.states)


@pytest.mark.parametrize(
    ("drops_block", "tokens", "boundary"),
    [
        (False, 128, 64),
        (False, 129, 128),
        (True, 63, 0),
        (True, 64, 0),
        (True, 128, 64),
        (True, 129, 64),
        (True, 192, 128),
    ],
)
def test_the_last_boundary_with_a_draft_is_the_one_at_which_vllm_keeps_a_state(drops_block, tokens, boundary):
    from vllm.v1.kv_cache_interface import get_mamba_prefill_checkpoint_position

    assert get_mamba_prefill_checkpoint_position(tokens, 64, drop_eagle_block=drops_block) == boundary
    assert Drafts(drops_block, draft_tokens=2, drafted_len=4096).hit_tokens(tokens, 64, is_hybrid=True) == boundary


def test_what_a_state_consists_of_is_part_of_the_identity():
    assert recurrent_state(group_config(KVCacheGroupSpec(NAMES, full()))) == []
    said = recurrent_state(hybrid())
    assert [one["layers"] for one in said] == [STATES[:2], STATES[2:]]
    others = [mamba(shapes=((4, 10), (4, 5))), mamba(dtypes=(torch.bfloat16, torch.bfloat16))]
    assert all(recurrent_state(hybrid(spec)) != said for spec in others), "wider by a draft; another precision"


class TestSaveQueue:
    PARTS = CacheGroups([CacheGroup(1, 64, 1, 1)], (0, 2))

    def world(self, slots=10, **more):
        world = World(groups=self.PARTS, **more)
        world.server.credits.extend(range(slots))
        return world

    def keys(self) -> PrefixKeys:
        keys = PrefixKeys(NAMESPACE, 64)
        keys.extend(list(range(64 * 3)))
        return keys

    def blocks(self, world: World) -> list[int]:
        return [block.block_id for block in world.pool.get_new_blocks(2)]

    @pytest.mark.parametrize("is_answer", [False, True])
    def test_parts_are_pinned_until_they_are_copied_and_committed_by_name(self, is_answer):
        world, keys = self.world(), self.keys()
        free = world.free_blocks
        blocks = self.blocks(world)
        committed = []
        commit = world.server.commit
        world.server.commit = lambda chunks, answers: (committed.extend(chunks), commit(chunks, answers))
        world.saves.queue_state(keys, 2, blocks, NO_TAG, is_answer=is_answer)
        world.free(blocks)  # vLLM goes on and lets them go
        assert world.free_blocks == free - 2
        (job,) = world.saves.start_jobs()
        assert job.copies == tuple(ChunkCopy(n, (BlockRun(0, (block,)),), n) for n, block in enumerate(blocks))
        world.saves.finished(SaveReport(ranks_done={job.job_id: 1}))
        assert world.free_blocks == free
        chunk = ChunkRecord(NAMESPACE.digest, keys.keys[1], keys.parent(1), 1, keys.digests[1])
        assert [record for _, record in committed] == state_records(chunk, 2)
        assert world.server.answers == (world.server.committed if is_answer else [])
        assert +world.counters == {"states": 1, "state_parts_stored": 2}, "no chunk was stored"

    def test_what_is_on_its_way_is_not_copied_again_and_what_was_stored_is_for_it_may_be_evicted(self):
        world, keys = self.world(), self.keys()
        world.saves.queue_state(keys, 2, self.blocks(world), NO_TAG)
        world.saves.queue_state(keys, 2, self.blocks(world), NO_TAG)
        assert world.counters["state_held"] == 1
        for _ in range(2):
            (job,) = world.saves.start_jobs()
            world.saves.finished(SaveReport(ranks_done={job.job_id: 1}))
            world.saves.queue_state(keys, 2, self.blocks(world), NO_TAG)
        assert world.counters["states"] == 2 and world.counters["state_parts_stored"] == 4

    def test_chunks_leave_slots_for_the_state_behind_them(self):
        world, keys = self.world(slots=4), self.keys()
        blocks = [block.block_id for block in world.pool.get_new_blocks(3)]
        left = world.saves.queue(keys, [[], blocks, []], range(3), held=0, tag=NO_TAG)
        world.saves.queue_state(keys, 3, self.blocks(world), NO_TAG)
        assert left == (2, False)
        (job,) = world.saves.start_jobs()
        assert [copy.state_part for copy in job.copies] == [None, None, 0, 1]

    def test_without_slots_a_bounded_number_waits_and_gives_its_blocks_back(self):
        world, keys = self.world(slots=0, pinned_share=0.01), self.keys()
        free = world.free_blocks
        for chunks in (1, 2, 3):
            blocks = self.blocks(world)
            world.saves.queue_state(keys, chunks, blocks, NO_TAG)
            world.free(blocks)
        assert world.counters["state_dropped_no_slot"] == 2 and world.free_blocks == free - 2
        world.now_s += 2 * QUEUED_MAX_S
        world.saves.start_jobs()
        assert world.free_blocks == free and world.counters["state_parts_dropped"] == 2
        assert world.counters["state_dropped_no_slot"] == 3, "counted once, whatever the number of parts"
        assert world.counters["store_dropped_no_slot"] == 0


STATE_ENDS = ("state_held", "states", "states_failed")


def ends_of(counters) -> dict[str, int]:
    """The counters that states end in."""
    return {n: c for n, c in counters.items() if c and (n in STATE_ENDS or n.startswith("state_dropped_"))}


class Offers:
    """Requests whose states vLLM offers, over a save queue."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.server.is_ready = True
        self.keys = PrefixKeys(NAMESPACE, BLOCK)
        self.keys.extend(list(range(BLOCK * 8)))
        lookups = SimpleNamespace(keys=lambda state: self.keys)
        config = Config(storage_uri="file:///unused", chunk_tokens=BLOCK)
        role = EngineRole(may_load=True, may_store=True, has_prefix_caching=True)
        undrafted = UndraftedBlocks(None, TestSaveQueue.PARTS)
        self.saves = RequestSaves(
            config, world.server, role, TestSaveQueue.PARTS, lookups, world.saves, undrafted, world.counters
        )
        self.requests = {}

    def request(self, name: str, **changes):
        fields = {"loaded_tokens": 0, "storable": 8, "is_from_before_reset": False} | changes
        params = RequestParams(skips_save=fields.pop("skips_save", False))
        extras = SimpleNamespace(may_store=fields.pop("may_store", True))
        request = SimpleNamespace(num_prompt_tokens=8 * 64)
        self.requests[name] = SimpleNamespace(request=request, params=params, extras=extras, **fields)

    def offer(self, name: str, tokens: int, *, groups=(0, 2), is_null=False, preempted=()) -> None:
        """vLLM hands a state over, and uses its blocks again after the step."""
        ids = [block.block_id for block in self.world.pool.get_new_blocks(len(groups))]
        given = [(group, NULL_BLOCK if is_null else block, tokens) for group, block in zip(groups, ids, strict=True)]
        state = SimpleNamespace(boundary_state_offloads={name: given})
        self.saves.step(
            self.requests,
            SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=set(preempted), kv_connector_block_state=state),
        )
        self.world.free(ids)


class TestEveryOfferedStateIsCountedOnce:
    def offers(self, **more) -> Offers:
        world = World(groups=TestSaveQueue.PARTS, **more)
        world.server.credits.extend(range(100))
        return Offers(world)

    @pytest.mark.parametrize(
        ("request_is", "offer_is", "end"),
        [
            ({}, {"preempted": ["r"]}, "state_dropped_preempted"),
            ({"is_from_before_reset": True}, {}, "state_dropped_reset"),
            ({"loaded_tokens": 2 * BLOCK}, {}, "state_held"),
            ({"skips_save": True}, {}, "state_dropped_not_storable"),
            ({"may_store": False}, {}, "state_dropped_not_storable"),
            ({"storable": 1}, {}, "state_dropped_not_storable"),
            ({}, {"groups": (0,)}, "state_dropped_partial"),
            ({}, {"is_null": True}, "state_dropped_partial"),
            ({}, {"tokens": 2 * BLOCK + 16}, "state_dropped_partial"),
            ({"storable": 99}, {"tokens": 9 * BLOCK}, "state_dropped_unaccountable"),
        ],
    )
    def test_what_is_not_queued_says_why(self, request_is, offer_is, end):
        offers = self.offers()
        offers.request("r", **request_is)
        offers.offer("r", **{"tokens": 2 * BLOCK} | offer_is)
        assert ends_of(offers.world.counters) == {end: 1} and offers.world.counters["state_offers"] == 1
        assert not offers.world.saves.has_waiting

    def test_without_a_session_or_a_request(self):
        offers = self.offers()
        offers.offer("unknown", BLOCK)
        offers.request("r")
        offers.world.server.is_ready = False
        offers.offer("r", BLOCK)
        assert ends_of(offers.world.counters) == {"state_dropped_unaccountable": 1, "state_dropped_no_session": 1}

    def test_a_state_of_which_one_part_failed_is_none(self):
        offers = self.offers()
        world = offers.world
        offers.request("r")
        world.server.credits.clear()
        world.server.credits.append(0)
        offers.offer("r", BLOCK)
        (first,) = world.saves.start_jobs()
        world.server.credits.append(1)
        (second,) = world.saves.start_jobs()
        world.saves.finished(SaveReport({first.job_id: 1}, failed={first.job_id}))
        assert ends_of(world.counters) == {}
        world.saves.finished(SaveReport({second.job_id: 1}))
        assert ends_of(world.counters) == {"states_failed": 1}

    def test_a_part_that_is_queued_twice_gives_both_of_its_blocks_back(self):
        offers = self.offers()
        world = offers.world
        free = world.free_blocks
        offers.request("r")
        world.server.credits.clear()
        world.server.credits.append(0)
        offers.offer("r", BLOCK)
        (job,) = world.saves.start_jobs()
        world.saves.finished(SaveReport({job.job_id: 1}))
        offers.offer("r", BLOCK)  # of the first only the second part is on its way
        world.now_s += 2 * QUEUED_MAX_S
        world.saves.start_jobs()
        assert ends_of(world.counters) == {"state_dropped_no_slot": 2}
        assert world.free_blocks == free and not world.saves.has_work

    @pytest.mark.parametrize("seed", range(40))
    def test_whatever_happens(self, seed):
        draw = random.Random(seed)
        offers = self.offers(pinned_share=0.05, world_size=2)
        world = offers.world
        world.server.credits.clear()
        free, jobs, offered = world.free_blocks, [], 0
        for step in range(60):
            name = f"r{step}"
            offers.request(
                name,
                loaded_tokens=draw.choice([0, 0, 0, BLOCK]),
                is_from_before_reset=draw.random() < 0.1,
                storable=draw.choice([8, 8, 2]),
            )
            for _ in range(draw.randrange(4)):
                offered += 1
                world.server.is_ready = draw.random() < 0.9
                preempted = [name] if draw.random() < 0.1 else []
                offers.offer(
                    name, draw.randint(1, 8) * BLOCK, groups=draw.choice([(0, 2)] * 9 + [(2,)]), preempted=preempted
                )
            world.server.credits.extend(range(draw.choice([0, 0, 1, 3])))
            jobs += [job.job_id for job in world.saves.start_jobs() for _ in range(2)]
            draw.shuffle(jobs)
            for _ in range(draw.randrange(3) if jobs else 0):
                job = jobs.pop()
                world.saves.finished(SaveReport({job: 1}, failed={job} if draw.random() < 0.2 else set()))
                if not jobs:
                    break
            draw.choice(
                [
                    *[lambda: None] * 12,
                    world.saves.reset,
                    world.saves.session_lost,
                    world.saves.let_go,
                    world.saves.frees_soon,
                    lambda: world.saves.make_room(is_standing=draw.random() < 0.5),
                ]
            )()
            if draw.random() < 0.03:
                world.server.generation += 1
            world.now_s += draw.choice([0.0, 0.1, QUEUED_MAX_S])
        world.saves.session_lost()
        for job in jobs:
            world.saves.finished(SaveReport({job: 1}))
        ends = ends_of(world.counters)
        assert sum(ends.values()) == offered == world.counters["state_offers"], ends
        assert world.free_blocks == free and not world.saves.has_work
        assert set(ends) <= ENGINE_EVENTS.keys()
