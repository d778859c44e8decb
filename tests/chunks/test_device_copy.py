"""The copy engine on a simulated GPU: no races in random lives, every wait needed, and all bytes right.

What no simulation shows (rates, and that CUDA behaves as modelled) is for a GPU. A life is run again by its number:
``TIERED_KV_SEED=<n> TIERED_KV_LIVES=1``.
"""

import gc
import logging
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.kit.counts import count, seed
from tests.kit.gpu.device import GPU, SimulatedGpu, simulated_gpu
from tests.kit.gpu.lives import Plan, Rank, live, read, write
from tests.kit.gpu.pools import LAYOUTS, Shape, packed_pool, uniform_pool
from tests.kit.mutants import mutants
from tiered_kv.chunks import device as device_module
from tiered_kv.chunks import device_copy, pinned
from tiered_kv.chunks.cuda import CudaError
from tiered_kv.chunks.device import CudaDevice, TorchDevice, device_of
from tiered_kv.chunks.device_copy import CopyEngine, DeviceJob, plan_rows
from tiered_kv.chunks.layout_test import self_test
from tiered_kv.chunks.paged_layer import PagedLayer
from tiered_kv.chunks.transfer import PagedKV, engine_for
from tiered_kv.errors import UnsupportedModel

ONE_GROUP = ((Shape("LBNHC", 3, 2, 4, 8),),)
LIVES = count("LIVES", 12)
WAIT_SEEDS = count("WAIT_SEEDS", 2)
BATCH = 50
"""Lives of one test."""

WITH_WAITS = (
    (CopyEngine, "__init__"),
    (device_copy._Lane, "next_slice"),
    (DeviceJob, "wait"),
    (DeviceJob, "_save"),
    (DeviceJob, "_load"),
)
NEEDED = {
    "device.current_stream().synchronize()": ("staged", "direct"),
    "taken.free.synchronize()": ("staged",),
    "self._done.synchronize()": ("staged", "direct"),
    "lane.kernels.wait_event(self._mark)": ("staged", "direct of saves"),
    "lane.copies.wait_event(gathered)": ("staged", "direct"),
    "lane.copies.wait_event(self._mark)": ("direct",),
    "lane.kernels.wait_event(arrived)": ("staged", "direct"),
}
"""Each wait of the engine, and the lives that need it. A direct load waits for its mark on the stream of copies."""


def plan(shapes=ONE_GROUP, **traits):
    """A rank of one group; slices of 16 + 200 bytes, so that each chunk takes several."""
    defaults = {
        "seed": 0,
        "stored_blocks": (4,),
        "states": (),
        "slice_bytes": 216,
        "ring_slices": 2,
        "direct_bytes": 1 << 40,
        "kind": "cuda",
    }
    return Plan(shapes=shapes, **(defaults | traits))


def races_of(plan):
    outcome = live(plan)
    assert not outcome.wrong
    return outcome.races


# -- random lives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(seed(), seed() + LIVES, BATCH))
def test_no_life_has_a_race_or_a_wrong_byte(first):
    compared = 0
    for number in range(first, min(first + BATCH, seed() + LIVES)):
        outcome = live(Plan.draw(number))
        assert not outcome.races, (number, outcome.races[:3])
        assert not outcome.wrong, (number, outcome.wrong[:3])
        compared += outcome.compared
    assert compared >= 4


def waits():
    return [
        pytest.param(owner, name, mutant, id=f"{name}: {mutant.dropped}")
        for owner, name in WITH_WAITS
        for mutant in mutants(getattr(owner, name))
        if "wait_event" in mutant.dropped or "synchronize" in mutant.dropped
    ]


@pytest.mark.parametrize(("owner", "name", "mutant"), waits())
def test_every_wait_is_needed(owner, name, mutant, monkeypatch):
    """In 19 of 20 lives at least, whatever the timing would have been."""
    kinds = {kind.partition(" ")[0] for kind in NEEDED[mutant.dropped]}
    if name == "_load" and mutant.dropped.startswith("lane.kernels.wait_event(self._mark)"):
        kinds = {"staged"}
    for kind in sorted(kinds):
        plans = [Plan.draw(number).with_many_slices(direct=kind == "direct") for number in range(WAIT_SEEDS)]
        assert not any(races_of(one) for one in plans)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, mutant.function)
            found = [live(one).races for one in plans]
        assert sum(map(bool, found)) * 20 >= 19 * len(plans), f"{kind}: {[len(races) for races in found]}"
        if mutant.dropped == "taken.free.synchronize()":
            # The row numbers, which the host writes, and staging, which a stream writes.
            assert all(any("write by thread" in race for race in races) for races in found)
            assert all(any("write by stream" in race for race in races) for races in found)


def test_all_waits_are_tried():
    assert {parameters.values[2].dropped for parameters in waits()} == NEEDED.keys()


# -- the layout test -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_test_has_no_race(layout):
    with simulated_gpu() as machine:
        pool = uniform_pool(Shape(layout, 3, 3, 4, 6), 13, 0)
        machine.detector.device_memory(pool.raw)
        before = pool.raw.clone()
        self_test(PagedKV(pool.pages, pool.tensors, 4, CopyEngine(machine.device(), slice_bytes=256)))
        assert machine.detector.races == []
    assert torch.equal(pool.raw, before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mark_from_before_the_writes_is_a_race(layout):
    """As the layout test was: the event of the copies was recorded when they were planned."""
    with simulated_gpu() as machine:
        pool = uniform_pool(Shape(layout, 3, 3, 4, 6), 13, 0)
        machine.detector.device_memory(pool.raw)
        paged = PagedKV(pool.pages, pool.tensors, 4, CopyEngine(machine.device(), slice_bytes=256))
        mark = paged.mark()
        for layer in paged.layers:
            layer.write_block(3, layer.read_block(5))
        paged.gather([3, 1, 2, 0], memoryview(bytearray(paged.group_bytes)), mark).wait()
        is_dense = layout.endswith("HNC")  # then torch waits for the write
        assert bool(machine.detector.races) is not is_dense


# -- failures ----------------------------------------------------------------------------------------------------------


class LaunchFailed(RuntimeError):
    """What a launch raises here."""


def failing_at(monkeypatch, number):
    """Let the launch of that number fail: torch's copies, indexed or not, waits, and the driver's batched copies."""
    left = [number]

    def guarded(call):
        def launch(*arguments, **named):
            left[0] -= 1
            if left[0] == -1:
                raise LaunchFailed("no")
            return call(*arguments, **named)

        return launch

    from tests.kit.gpu.device import SimulatedEvent, SimulatedStream

    monkeypatch.setattr(SimulatedStream, "wait_event", guarded(SimulatedStream.wait_event))
    monkeypatch.setattr(SimulatedEvent, "record", guarded(SimulatedEvent.record))
    monkeypatch.setattr(SimulatedGpu, "copy_batch", guarded(SimulatedGpu.copy_batch))
    torch_here = SimpleNamespace(**{name: getattr(torch, name) for name in ("Tensor", "uint8", "int64")})
    torch_here.index_select, torch_here.from_numpy = guarded(torch.index_select), guarded(torch.from_numpy)
    monkeypatch.setattr(device_copy, "torch", torch_here)
    for name in ("copy_", "index_copy_"):
        monkeypatch.setattr(torch.Tensor, name, guarded(getattr(torch.Tensor, name)))
    return left


def life_with_a_failure(monkeypatch, direct, number):
    """A save or a load whose launch fails, and what comes after; returns whether one failed, and the races."""
    with simulated_gpu() as machine:
        rank = Rank(plan(direct_bytes=1 if direct else 1 << 40), machine, machine.device())
        (pool,), paged = rank.pools, rank.paged
        ids, others = (3, 1, 2, 7), (5, 6, 8, 9)
        write(pool, ids)
        marks, failed = [paged.mark()], False
        with monkeypatch.context() as patch:
            left = failing_at(patch, number)
            for direction in ("save", "load"):
                job = paged.begin(direction, marks[-1])
                try:
                    if direction == "save":
                        paged.gather((ids,), rank.view(0), job)
                    else:
                        paged.scatter(rank.view(0), [(0, others)], job)
                    job.launch()
                except LaunchFailed:
                    failed = True
                job.wait()
            assert failed is (left[0] < 0)
        rank.slot(0).zero_()  # the slot and the blocks are somebody else's
        write(pool, (*ids, *others))
        wanted = pool.read(ids)
        job = paged.begin("save", paged.mark())
        paged.gather((ids,), rank.view(1), job)
        job.launch()
        job.wait()
        rank.slot(1).sum()
        assert rank.slot(1).numpy().tobytes() == wanted, "the engine goes on"
        return failed, machine.detector.races


@pytest.mark.parametrize("direct", [False, True])
def test_a_launch_that_fails_fails_its_job_and_leaves_nothing_running(monkeypatch, direct):
    number = 0
    while True:
        failed, races = life_with_a_failure(monkeypatch, direct, number)
        assert races == [], number
        if not failed:
            break
        number += 1
    assert number > 10


@pytest.mark.parametrize("mutant", list(mutants(device_copy._Lane.settle)), ids=lambda mutant: mutant.dropped)
def test_what_was_launched_before_a_failure_is_waited_for(monkeypatch, mutant):
    monkeypatch.setattr(device_copy._Lane, "settle", mutant.function)
    assert any(life_with_a_failure(monkeypatch, False, number)[1] for number in range(80))


def test_a_chunk_that_cannot_begin_leaves_the_others_of_its_job_to_be_waited_for():
    with simulated_gpu() as machine:
        rank = Rank(plan(), machine, machine.device())
        job = rank.paged.begin("save", rank.paged.mark())
        rank.paged.gather(((1, 2, 3, 4),), rank.view(0), job)
        with pytest.raises(ValueError, match="outside the pool"):
            rank.paged.gather(((1, 2, 3, 400),), rank.view(1), job)
        job.wait()
        rank.slot(0).zero_()
        write(rank.pools[0], (1, 2, 3, 4))
        assert machine.detector.races == []


def test_copies_without_a_mark_are_refused():
    with simulated_gpu() as machine:
        rank = Rank(plan(), machine, machine.device())
        with pytest.raises(ValueError, match="needs a mark"):
            rank.paged.begin("load", None)
        with pytest.raises(ValueError, match="needs a mark"):
            rank.paged.groups[0].gather((1, 2, 3, 4), rank.view(0))


# -- plans and slices --------------------------------------------------------------------------------------------------


def test_layers_with_an_indexer_are_one_run():
    """DeepSeek V3.2: 61 layers whose pages are 41,984 and 8,448 bytes; joined by equal pages alone they are 122."""
    mla = Shape("LBHNC", 61, 1, 64, 656, "U8")
    with simulated_gpu() as machine:
        pool = packed_pool([mla, Shape("LBHNC", 61, 1, 64, 132, "U8")], 3, 0)
        layers = [PagedLayer(page, pool.tensors[page.layer]) for page in pool.pages]
        (run,) = plan_rows(layers, 4, CopyEngine(machine.device()))
        assert run.row_bytes == 256
        assert run.size_bytes == 4 * 61 * (41984 + 8448)


@pytest.mark.parametrize("size", [1000, 997])
def test_a_page_larger_than_a_slice_is_copied(size):
    """997 is a prime: no larger row than a byte divides it."""
    shapes = ((Shape("LBHNC", 2, 1, 1, size, "U8"),),)
    assert races_of(plan(shapes, slice_bytes=16 + 300)) == []


def test_small_chunks_share_a_slice():
    with simulated_gpu() as machine:
        rank = Rank(plan(slice_bytes=1 << 16), machine, machine.device())
        lane = rank.engine._lanes["save"]
        job = rank.paged.begin("save", rank.paged.mark())
        for slot in range(6):
            rank.paged.gather(((1, 2, 3, slot + 4),), rank.view(slot), job)
        assert lane.turns == 0
        job.launch()
        job.wait()
        assert lane.turns == 1 and job.is_done()
        assert rank.slot(5).numpy().tobytes() == rank.pools[0].read((1, 2, 3, 9))


def begun(rank, direction, ids):
    """A job that saves the blocks ``ids`` into slot 0, or loads them from there, before its launch."""
    job = rank.paged.begin(direction, rank.paged.mark())
    if direction == "save":
        rank.paged.gather((ids,), rank.view(0), job)
    else:
        rank.paged.scatter(rank.view(0), ((0, ids),), job)
    return job


def one_job(rank, direction, ids):
    """The same to its end."""
    job = begun(rank, direction, ids)
    job.launch()
    job.wait()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("direction", ["save", "load"])
def test_behind_a_job_nothing_uses_the_memory_of_the_engine(direction, direct):
    """vLLM's sleep unmaps staging memory with the KV as soon as no copy runs; a copy there would end the context."""
    with simulated_gpu() as machine:
        rank = Rank(plan(direct_bytes=1 if direct else 1 << 40), machine, machine.device())
        one_job(rank, direction, (4, 5, 8, 9))
        machine.unmap()
        assert machine.detector.races == []


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("direction", ["save", "load"])
def test_a_few_bytes_the_other_way_lie_between_the_copies_of_two_slices(monkeypatch, direction, direct):
    """On an H100 a stream that always has a copy ready kept the copy engine from the model's for 40 ms."""
    ids = (4, 5, 8, 9)
    with simulated_gpu() as machine:
        rank = Rank(plan(direct_bytes=1 if direct else 1 << 40), machine, machine.device())
        lane, order = rank.engine._lanes[direction], []
        few = lane.few_bytes if direction == "save" else lane.few_bytes_host
        access = machine.detector.access

        def noted(actor, ranges, what):
            if actor == lane.copies.actor:
                written = [one.low for one in ranges if one.is_write]
                order.append("few" if written == [few.data_ptr()] else "slice")
            access(actor, ranges, what)

        monkeypatch.setattr(machine.detector, "access", noted)
        one_job(rank, direction, ids)
    slices = "".join(one[0] for one in order).split("f")
    assert slices.pop(0) == "", "in front of each slice, so that the end of a job is the end of them, too"
    assert len(slices) == lane.turns > 1
    assert all(slices), "each slice has copies"


def test_row_numbers_of_a_load_do_not_wait_for_the_slices_behind_it(monkeypatch):
    """They cross the link as the slices do, so they are queued with theirs, in front."""
    with simulated_gpu() as machine:
        rank = Rank(plan(), machine, machine.device())
        lane, streams = rank.engine._lanes["load"], []
        send = device_copy._Slice.send_rows

        def sent(taken):
            streams.append(machine.detector.stream)
            send(taken)

        monkeypatch.setattr(device_copy._Slice, "send_rows", sent)
        one_job(rank, "load", (4, 5, 8, 9))
    assert set(streams) == {lane.copies.actor} and len(streams) == lane.turns


def test_a_slice_takes_no_more_row_numbers_than_it_has_room_for(monkeypatch):
    monkeypatch.setattr(device_copy, "INDEX_ROWS", 5)
    assert races_of(plan(slice_bytes=1 << 16)) == []


def test_fragments_go_directly_only_where_all_of_a_chunk_are_large():
    """Pages of 128 bytes without gaps: blocks that follow each other are one fragment."""
    with simulated_gpu() as machine:
        rank = Rank(plan(direct_bytes=256), machine, machine.device())
        slices = {}
        for name, ids in {"pairs": (4, 5, 8, 9), "single": (4, 5, 8, 11)}.items():
            job = rank.paged.begin("save", rank.paged.mark())
            rank.paged.gather((ids,), rank.view(0), job)
            slices[name] = {piece.is_direct for piece in job._pending}
            job.launch()
            job.wait()
            assert rank.slot(0).numpy().tobytes() == rank.pools[0].read(ids)
        assert slices == {"pairs": {True}, "single": {False}}


@pytest.mark.parametrize("direct", [False, True])
def test_no_copy_touches_two_windows_of_host_memory(monkeypatch, direct):
    """CUDA refuses a copy that spans two registrations."""
    for module in (device_copy, pinned):
        monkeypatch.setattr(module, "WINDOW_BYTES", 96)
    one = plan(direct_bytes=1 if direct else 1 << 40)
    assert races_of(one) == []
    with simulated_gpu() as machine:
        rank = Rank(one, machine, machine.device())
        job = rank.paged.begin("save", rank.paged.mark())
        seen = []
        append = DeviceJob._append
        monkeypatch.setattr(DeviceJob, "_append", lambda job, piece: (seen.append(piece), append(job, piece))[1])
        rank.paged.gather(((4, 5, 6, 9),), rank.view(3), job)
        job.launch()
        job.wait()
        assert rank.slot(3).numpy().tobytes() == rank.pools[0].read((4, 5, 6, 9))
    (piece,) = seen
    spans = [(piece.slot.ctypes.data + start, size) for start, size in piece.spans()]
    cut = device_copy._cut_to_windows(piece.fragments())
    spans += zip(cut.host.tolist(), cut.sizes.tolist(), strict=True)
    assert all(start // 96 == (start + size - 1) // 96 for start, size in spans)
    assert sum(size for _, size in spans) == 2 * piece.size_bytes


def test_loads_go_directly_from_smaller_fragments_on_than_saves():
    """Beside a prefill a staged copy waits for multiprocessors; a save has the time."""
    ids, shape = (4, 5, 8, 9), ((Shape("LBHNC", 1, 1, 1, 64 << 10, "U8"),),)
    with simulated_gpu() as machine:
        rank = Rank(plan(shape, direct_bytes=None, slice_bytes=1 << 20), machine, machine.device())
        assert all(run.may_be_direct for run in rank.paged.groups[0]._copier.runs)
        direct = {}
        for direction in ("save", "load"):
            job = begun(rank, direction, ids)
            direct[direction] = {piece.is_direct for piece in job._pending}
            job.launch()
            job.wait()
        assert rank.slot(0).numpy().tobytes() == rank.pools[0].read(ids)
    assert direct == {"save": {False}, "load": {True}}


def test_the_fragments_of_a_direct_piece_are_looked_for_once(monkeypatch):
    found = []
    joined = device_copy._joined
    monkeypatch.setattr(device_copy, "_joined", lambda follows: found.append(1) or joined(follows))
    with simulated_gpu() as machine:
        rank = Rank(plan(direct_bytes=256, slice_bytes=1 << 14), machine, machine.device())
        job = rank.paged.begin("save", rank.paged.mark())
        rank.paged.gather(((4, 5, 8, 9),), rank.view(0), job)
        pieces = list(job._pending)
        job.launch()
        job.wait()
    assert [piece.is_direct for piece in pieces] == [True] and len(found) == 1


@pytest.mark.parametrize("direction", ["save", "load"])
def test_a_batched_copy_that_is_refused_is_staged_and_so_is_all_behind_it(monkeypatch, caplog, direction):
    calls = []

    def refuse(*_):
        calls.append(1)
        raise CudaError("cuMemcpyBatchAsync failed. code=1", "cuMemcpyBatchAsync", 1)

    monkeypatch.setattr(SimulatedGpu, "copy_batch", refuse)
    ids = (4, 5, 8, 9)
    with simulated_gpu() as machine:
        rank = Rank(plan(direct_bytes=256), machine, machine.device())
        for _ in range(2):
            one_job(rank, direction, ids)
            assert rank.slot(0).numpy().tobytes() == rank.pools[0].read(ids)
    assert len(calls) == 1 and caplog.text.count("batched copies were refused") == 1


def test_a_log_handler_that_keeps_the_refusal_of_a_batched_copy_does_not_keep_the_slot(monkeypatch, caplog):
    """The error's frames hold the slot, so the arena could not be unmapped."""

    def refuse(*_):
        raise CudaError("cuMemcpyBatchAsync failed. code=1", "cuMemcpyBatchAsync", 1)

    monkeypatch.setattr(SimulatedGpu, "copy_batch", refuse)
    with simulated_gpu() as machine:
        rank = Rank(plan(direct_bytes=256), machine, machine.device())
        job = rank.paged.begin("save", rank.paged.mark())
        rank.paged.gather(((4, 5, 8, 9),), rank.view(0), job)
        slot = weakref.ref(job._held[0])
        job.launch()
        job.wait()
        del job
        gc.collect()
        assert slot() is None
    assert "batched copies were refused" in caplog.text and "code=1" in caplog.text


def test_nothing_is_direct_where_the_driver_has_no_batched_copies():
    with simulated_gpu() as machine:
        machine.has_batch = False
        for device in (machine.device(), machine.device("torch"), CudaDevice(GPU, None)):
            rank = Rank(plan(direct_bytes=1), machine, device)
            assert not any(run.may_be_direct for run in rank.paged.groups[0]._copier.runs)


# -- memory and threads ------------------------------------------------------------------------------------------------


def test_memory_is_the_same_for_every_model_and_said_in_the_log(caplog):
    caplog.set_level(logging.INFO)
    with simulated_gpu() as machine:
        engine = CopyEngine(machine.device())
    assert engine.memory_bytes == 2 * 3 * ((16 << 20) + 8 * (1 << 16)) == 99 << 20
    assert "copies use 99 MiB of memory on cuda:1: 3 slices of 16 MiB and row numbers, each way" in caplog.text
    assert "direct=loads from 65536 bytes, saves from 262144 bytes" in caplog.text


def test_states_and_groups_share_the_memory_of_their_rank():
    shapes = ((Shape("LBNHC", 2, 1, 4, 8),), (Shape("BLHNC", 3, 1, 4, 8),))
    with simulated_gpu() as machine:
        rank = Rank(
            plan(shapes, stored_blocks=(2, 1), states=(Shape("LBHNC", 1, 1, 1, 40, "U8"),)), machine, machine.device()
        )
        assert len(machine.streams) == 4
        assert {group._engine for group in (*rank.paged.groups, *rank.paged.states)} == {rank.engine}


def test_a_device_without_memory_for_staging_is_refused():
    class Full(TorchDevice):
        def empty(self, count, dtype):
            raise torch.OutOfMemoryError("no memory")

    with simulated_gpu(), pytest.raises(UnsupportedModel, match="no staging memory"):
        CopyEngine(Full(GPU))


def test_row_numbers_are_copied_from_pageable_memory_where_none_is_pinned(caplog):
    with simulated_gpu() as machine:
        machine.pinned_fails = True
        rank = Rank(plan(), machine, machine.device())
        rank.paged.groups[0].gather((1, 2, 3, 4), rank.view(0), rank.paged.mark()).wait()
        assert rank.slot(0).numpy().tobytes() == rank.pools[0].read((1, 2, 3, 4))
    assert "no pinned memory for row numbers" in caplog.text


@pytest.mark.parametrize(("kind", "prepared"), [("cuda", ["device", "capture"]), ("torch", ["device"])])
def test_a_copying_thread_has_its_device_and_writes_what_inference_made(kind, prepared):
    with simulated_gpu() as machine:
        rank = Rank(plan(), machine, machine.device(kind))
        with rank.paged.copying():
            assert torch.is_inference_mode_enabled()
        assert machine.prepared == prepared


def test_waits_sleep_and_kernels_go_ahead_of_the_models():
    with simulated_gpu() as machine:
        engine = CopyEngine(machine.device(), slice_bytes=64)
        engine.mark()
        assert machine.blocking_events == 1
        for lane in engine._lanes.values():
            assert (lane.kernels.priority, lane.copies.priority) == (-1, 0)


def test_what_copies_on_a_device(monkeypatch, caplog):
    assert engine_for(torch.device("cpu")) is None
    monkeypatch.setattr(
        device_module.Cuda,
        "loaded",
        lambda: SimpleNamespace(has_batch=True, takes_host_pointers=[True, False].__getitem__),
    )
    assert device_of(torch.device("cuda", 0)).copy_batch is not None
    assert device_of(torch.device("cuda", 1)).copy_batch is None, "batched copies would end the process there"
    other = device_of(torch.device("xpu", 0))
    assert type(other) is TorchDevice and other.cuda is None
    assert "have never been run, and use no pinned memory. device=xpu:0" in caplog.text

    def none():
        raise CudaError("none is loaded")

    monkeypatch.setattr(device_module.Cuda, "loaded", none)
    bare = device_of(torch.device("cuda", 0))
    assert bare.copy_batch is None and bare.cuda is None, "nothing is pinned, and it is served"
    assert "none is loaded" in caplog.text


def test_one_group_alone_makes_an_engine_of_its_own_on_a_device(monkeypatch):
    """For tools that copy one group; a rank shares one."""
    from tiered_kv.chunks import transfer

    with simulated_gpu() as machine:
        pool = uniform_pool(Shape("BLNHC", 2, 2, 4, 8), 9, 0)
        machine.detector.device_memory(pool.raw)
        monkeypatch.setattr(transfer, "engine_for", lambda device: CopyEngine(machine.device(), slice_bytes=512))
        paged = PagedKV(pool.pages, pool.tensors, 2)
        slot = np.zeros(paged.group_bytes, np.uint8)
        paged.gather((1, 4), memoryview(slot), paged.mark()).wait()
        assert slot.tobytes() == pool.read((1, 4))
        paged.scatter(memoryview(slot), (6,), 1, paged.mark()).wait()
        read(pool, (6,))
        assert pool.read((6,)) == pool.read((4,))
        assert machine.detector.races == []
