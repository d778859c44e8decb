"""A worker's jobs on a simulated GPU: marks that travel with them, two threads, and what waits for what."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.kit.counts import count, seed
from tests.kit.gpu.device import simulated_gpu
from tests.kit.gpu.lives import Plan
from tests.kit.gpu.pools import Shape
from tests.kit.gpu.worker_lives import WorkerLife
from tests.kit.mutants import mutants
from tiered_kv.chunks.device_copy import CopyEngine
from tiered_kv.vllm import compat
from tiered_kv.vllm.supported import copies_blocks, features
from tiered_kv.vllm.worker import WorkerSide

pytestmark = pytest.mark.vllm

LIVES = count("WORKER_LIVES", 6)


def drawn(number):
    return replace(Plan.draw(number), states=(), kind="cuda")


def small(**traits):
    shape = Shape("LBNHC", 2, 1, 4, 8)
    plan = Plan(0, ((shape,),), (2,), (), 1 << 12, 2, 1 << 40, "cuda")
    return replace(plan, **traits)


def races_of_lives(numbers):
    races = []
    for number in numbers:
        with simulated_gpu() as machine:
            life = WorkerLife(machine, drawn(number), is_v2=bool(number % 2))
            life.run()
            races += machine.detector.races
    return races


@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize("number", range(seed(), seed() + LIVES))
def test_no_life_of_a_worker_has_a_race_or_a_wrong_byte(number, is_v2):
    with simulated_gpu() as machine:
        life = WorkerLife(machine, drawn(number), is_v2)
        life.run()
        assert machine.detector.races == []
    assert life.wrong == []
    assert life.compared > 5
    assert machine.prepared.count("device") == machine.prepared.count("capture") > 0


def test_a_report_before_the_bytes_is_found(monkeypatch):
    (mutant,) = [one for one in mutants(WorkerSide._copy) if one.dropped == "job.wait()"]
    monkeypatch.setattr(WorkerSide, "_copy", mutant.function)
    assert races_of_lives(range(2))


@pytest.mark.parametrize("is_v2", [False, True])
def test_a_mark_of_an_earlier_step_is_found(monkeypatch, is_v2):
    with simulated_gpu() as machine:
        life = WorkerLife(machine, drawn(1), is_v2)
        old = life.side._mark()
        monkeypatch.setattr(WorkerSide, "_mark", lambda side: old)
        life.run()
        assert machine.detector.races


@pytest.fixture
def world():
    with simulated_gpu() as machine:
        yield lambda **traits: WorkerLife(machine, small(states=traits.pop("states", ())), **traits)


def test_runner_v1_gets_its_samples_before_a_save_is_queued(world):
    life = world(is_v2=False)
    life.step([], life._new_chunk())
    assert len(life.side._held) == 1 and not life.side._running, "sampling comes now"
    life.step([], None)  # an empty step is enough
    assert not life.side._held
    life.side.finish_copies()
    life.take_reports()
    assert life.compared == 1 and life.wrong == []
    life.side.close()


def test_runner_v2_has_sampled_when_it_asks_for_saves(world):
    life = world(is_v2=True)
    life.step([], life._new_chunk())
    assert not life.side._held
    life.side.finish_copies()
    life.take_reports()
    assert life.compared == 1
    life.side.close()


@pytest.mark.parametrize("end", ["finish_copies", "close"])
def test_saves_that_were_held_are_copied_when_the_engine_sleeps_resets_or_ends(world, end):
    life = world(is_v2=False)
    life.step([], life._new_chunk())
    getattr(life.side, end)()
    life.take_reports()
    assert life.compared == 1 and life.wrong == []
    life.side.close()


def test_what_waits_for_the_arena_is_given_up_when_the_memory_may_go(world):
    """It would begin with the next step, which an engine in its caller's process makes also while it sleeps."""
    life = world(is_v2=True)
    client, life.side._client, life.side._is_joining, life.side._joining_generation = life.side._client, None, True, 0
    life.step([], life._new_chunk())
    life.side.finish_copies()
    assert life.side.take_finished_saves().failed == {1}
    life.side._joined.append(client)
    life.step([], None)
    assert not life.side._running and life.side.take_finished_saves() is None
    life.side.close()


def test_a_load_begins_before_the_forward_pass_of_its_step_and_once(world):
    life = world(is_v2=True)
    life.step([], life._new_chunk())
    life.side.finish_copies()
    life.take_reports()
    submitted = []
    submit = life.side._submit
    life.side._submit = lambda *task: submitted.append(task[0]) or submit(*task)
    (loads,) = [life._new_loads() or life._new_loads() or life._new_loads()]
    metadata = life.step(loads, None)
    assert submitted == ["load"] * len(loads) != []
    life.side.finish_copies()
    life.take_reports()
    assert life.wrong == []
    life.side.start_loads(metadata)  # where vLLM did not call the hook before
    assert submitted == ["load"] * 2 * len(loads)
    life.side.finish_copies()
    life.side.take_finished_loads()
    life.side.close()


def test_where_vllm_copies_blocks_a_load_waits_for_the_forward_pass(world):
    """It may copy another state, or the beginning of another block, into the block in the same step."""
    life = world(is_v2=True)
    life.side._loads_early = False
    life.step([], life._new_chunk())
    life.side.finish_copies()
    life.take_reports()
    submitted = []
    life.side._submit = lambda *task: submitted.append(task[0])
    (loads,) = [life._new_loads() or life._new_loads() or life._new_loads()]
    metadata = life.step(loads, None)
    assert life.side._begun is None
    assert submitted == ["load"] * len(loads) != []
    assert metadata.loads == tuple(loads)
    life.side.close()


def test_a_launch_that_fails_fails_its_job_and_the_worker_goes_on(world, monkeypatch, caplog):
    life = world(is_v2=True)
    with monkeypatch.context() as patch:
        patch.setattr(CopyEngine, "begin", lambda *_: (_ for _ in ()).throw(RuntimeError("no launch")))
        life.step([], life._new_chunk())
        life.side.finish_copies()
    report = life.side.take_finished_saves()
    assert report.failed == {1} == set(report.ranks_done)
    assert "no launch" in caplog.text
    life._saving.clear()
    life.step([], life._new_chunk())
    life.side.finish_copies()
    life.take_reports()
    assert life.compared == 1 and life.wrong == []
    life.side.close()


def test_the_load_and_the_save_thread_do_not_wait_for_each_other(world, monkeypatch):
    import threading

    life = world(is_v2=True)
    life.step([], life._new_chunk())
    life.side.finish_copies()
    life.take_reports()
    go_on = threading.Event()
    gather = type(life.rank.paged).gather
    monkeypatch.setattr(
        type(life.rank.paged), "gather", lambda *copy: (go_on.wait(20), gather(*copy))[1]
    )  # the save stands still
    life.step([], life._new_chunk())
    loads = life._new_loads() or life._new_loads() or life._new_loads()
    life.step(loads, None)
    for _ in range(2000):
        if len(life.side._loads_done) == len(loads):
            break
        threading.Event().wait(0.01)
    assert len(life.side._loads_done) == len(loads) != 0
    go_on.set()
    life.side.finish_copies()
    life.take_reports()
    assert life.wrong == []
    life.side.close()


def groups(*specs):
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


@pytest.mark.parametrize(
    ("blocks", "unit", "copies"),
    [((16,), None, False), ((16, 16), None, False), ((16,), 16, False), ((64,), 16, True), ((16, 64), None, True)],
)
def test_hits_that_end_inside_a_block_are_copied_by_vllm(blocks, unit, copies):
    config = SimpleNamespace(cache_config=SimpleNamespace(prefix_match_unit=unit))
    specs = [SimpleNamespace(block_size=size) for size in blocks]
    assert copies_blocks(config, groups(*specs)) is copies


def test_states_are_copied_by_vllm():
    config = SimpleNamespace(cache_config=SimpleNamespace())
    assert copies_blocks(config, groups(type("MambaSpec", (), {"block_size": 16})())) is True


# -- sleep -------------------------------------------------------------------------------------------------------------


class Allocator:
    """What takes the KV cache's memory away."""

    def __init__(self):
        self.order = []

    def sleep(self, offload_tags=None):
        self.order.append(("unmapped", offload_tags))
        return "slept"


class Copies:
    """Whose end is waited for."""

    def __init__(self, order):
        self._order = order

    def finish(self):
        self._order.append("finished")


def test_copies_end_before_vllm_takes_the_memory_away(monkeypatch):
    import vllm.device_allocator

    allocator = Allocator()
    monkeypatch.setattr(vllm.device_allocator, "get_mem_allocator_instance", lambda: allocator)
    monkeypatch.delattr(compat.KVConnectorBase_V1, "unregister_kv_caches", raising=False)
    copies = Copies(allocator.order)
    compat.before_sleep(copies.finish)
    assert allocator.sleep(offload_tags=("weights",)) == "slept"
    assert allocator.order == ["finished", ("unmapped", ("weights",))]
    gone = weakref.ref(copies)
    del copies
    gc.collect()
    assert gone() is None, "the allocator is one per process: it would keep an ended engine's KV cache"
    assert allocator.sleep() == "slept"


class DiscardingAllocator(Allocator):
    """From vLLM 0.32 on it takes the KV cache's memory away without a sleep, too."""

    def discard(self, tags):
        self.order.append(("unmapped", tags))


def test_copies_end_before_vllm_releases_the_kv_cache_alone(monkeypatch):
    """``release_kv_cache_memory`` reaches the allocator by vLLM's own backend, and by no hook."""
    backends = pytest.importorskip("vllm.device_allocator.sleep_mode_backend")
    if not hasattr(backends.CuMemBackend, "discard"):
        pytest.skip("this vLLM cannot release the KV cache alone")
    import vllm.device_allocator

    allocator = DiscardingAllocator()
    monkeypatch.setattr(vllm.device_allocator, "get_mem_allocator_instance", lambda: allocator)
    monkeypatch.delattr(compat.KVConnectorBase_V1, "unregister_kv_caches", raising=False)
    copies = Copies(allocator.order)
    compat.before_sleep(copies.finish)
    backends.CuMemBackend().discard(("kv_cache",))
    assert allocator.order == ["finished", ("unmapped", ("kv_cache",))]


@pytest.mark.parametrize("allowed", ["enable_sleep_mode", "enable_cumem_allocator"])
def test_an_engine_sleeps_wherever_its_memory_can_be_taken_away(allowed):
    """vLLM's ``sleep`` and ``release_kv_cache_memory`` ask for the allocator, not for sleep mode."""
    model = SimpleNamespace(**({"enable_sleep_mode": False, "enable_cumem_allocator": False} | {allowed: True}))
    config = SimpleNamespace(model_config=model, kv_events_config=None, speculative_config=None)
    assert features(config, groups()) == {compat.SLEEP}


def test_where_a_hook_tells_of_sleep_nothing_is_wrapped(monkeypatch):
    monkeypatch.setattr(compat.KVConnectorBase_V1, "unregister_kv_caches", lambda self: None, raising=False)
    monkeypatch.setattr(compat.importlib, "import_module", refuse_allocators(compat.importlib.import_module))
    compat.before_sleep(Copies([]).finish)


def refuse_allocators(find):
    def import_module(name):
        assert "allocator" not in name
        return find(name)

    return import_module


def test_sleep_that_nobody_tells_of_is_refused(monkeypatch):
    monkeypatch.delattr(compat.KVConnectorBase_V1, "unregister_kv_caches", raising=False)
    with pytest.raises(compat.UnsupportedModel, match="start it without sleep mode"):
        compat.before_sleep(Copies([]).finish)
