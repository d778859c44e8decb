"""A worker with a fake driver: what it registers when, and that every way out ends that before it unmaps."""

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.kit.fake_cuda import FakeCuda
from tests.kit.server.clients import settings, worker_part
from tests.kit.server.probe import figures, wait_for
from tests.kit.server.processes import kill_server
from tiered_kv.chunks.arena import SLAB_BYTES, Arena
from tiered_kv.server import worker_client
from tiered_kv.server.client import SchedulerClient
from tiered_kv.server.worker_client import WorkerClient
from tiered_kv.vllm import worker as worker_module
from tiered_kv.vllm.step import BlockRun, ChunkCopy, LoadJob, StepMetadata
from tiered_kv.vllm.worker import CopyThread, WorkerSide

pytestmark = pytest.mark.vllm

WAIT_S = 20.0
DEVICE = 2


class InstantKV:
    """Paged KV whose copies say whether their slot was registered when they began."""

    rank_bytes = 64
    engine = None

    def __init__(self, driver: FakeCuda) -> None:
        self._driver = driver
        self.pinned: list[bool] = []

    def copying(self) -> Any:
        return nullcontext()

    def begin(self, direction: str, mark: object) -> Any:
        return SimpleNamespace(launch=lambda: None, wait=lambda: None)

    def scatter(self, view: memoryview, groups: Sequence[Any], job: Any) -> None:
        address = np.frombuffer(view, np.uint8).ctypes.data
        self.pinned.append(self._driver.is_registered(address, view.nbytes, DEVICE))

    def copied_bytes(self, _: Sequence[int]) -> int:
        return 64


class World:
    """One engine whose worker side pins; every unmapping is observed."""

    def __init__(self, root: Path, driver: FakeCuda, *, pins: bool = True) -> None:
        self.root, self.driver, self.config = root, driver, settings(root)
        vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0, world_size=1))
        self.side = WorkerSide(self.config, vllm_config, SimpleNamespace(), "e")
        self.kv = InstantKV(driver)
        self.side._prepare = self._prepare  # type: ignore[method-assign]
        self.pins = pins
        self.unmapped_with: list[int] = []  # registrations that were left when slabs were unmapped

    def _prepare(self, _: Any) -> None:
        self.side._paged, self.side._join = self.kv, worker_part(pins=self.pins)  # type: ignore[assignment]
        self.side._threads = {kind: CopyThread(kind) for kind in ("load", "save")}
        self.side._cuda, self.side._device = (self.driver.cuda if self.pins else None), DEVICE

    def start(self) -> None:
        self.side.register({})
        self.scheduler = SchedulerClient(self.config, "e", 1)
        assert self.scheduler.wait_ready(WAIT_S)
        wait_for(self._has_slot, "a slot")
        self.slot = self.scheduler.take_slot()

    def _has_slot(self) -> bool:
        self.scheduler.poll()
        return bool(self.scheduler.credit_count)

    @property
    def client(self) -> WorkerClient:
        client = self.side._client
        assert client is not None
        return client

    def step(self, generation: int = 0) -> StepMetadata:
        return SimpleNamespace(generation=generation, session=self.scheduler.info, loads=(), saves=())  # type: ignore[return-value]

    def load(self) -> None:
        """One copy out of the granted slot, to its end."""
        assert self.slot is not None
        self.side.follow(self.step())
        job = LoadJob("r", 0, (ChunkCopy(self.slot, (BlockRun(0, (1,)),)),))
        self.side._submit("load", self.step(), job)
        wait_for(lambda: bool(self.side._loads_done), "the copy's report")
        assert self.side.take_finished_loads() == ({"r"}, set())

    def close(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.close()
        self.side.close()


@pytest.fixture
def start(root: Path, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    """Start a world in which every unmapping of an arena notes how many registrations of it are left."""
    worlds: list[World] = []
    close = Arena.close

    def close_and_look(arena: Arena, **kept: Any) -> None:
        for slab in range(len(arena.slab_fds)) if arena._maps else ():
            worlds[0].unmapped_with.append(fake_cuda.registered_in(arena.address(slab), SLAB_BYTES))
        close(arena, **kept)

    monkeypatch.setattr(Arena, "close", close_and_look)

    def begin(*, pins: bool = True) -> World:
        worlds.append(World(root, fake_cuda, pins=pins))
        worlds[0].start()
        return worlds[0]

    yield begin
    for world in worlds:
        world.close()


def is_clean(world: World) -> bool:
    """An arena was unmapped, and nothing of it was registered at that moment."""
    return bool(world.unmapped_with) and not any(world.unmapped_with) and world.driver.registrations == 0


def test_a_slab_is_registered_before_the_first_copy_of_a_slot_in_it(start: Callable[..., World]) -> None:
    world = start()
    world.load()
    world.load()
    assert world.kv.pinned == [True, True]


def test_what_has_memory_when_tensors_are_registered_is_registered_before_that_returns(
    start: Callable[..., World], root: Path, fake_cuda: FakeCuda
) -> None:
    first = start()
    first.side.close()
    assert is_clean(first)
    second = World(root, fake_cuda)
    second.side.register({})
    arena = second.client.arena
    total = sum(arena.memory_bytes(slab) for slab in range(len(arena.slab_fds)))
    assert second.client.pinned is not None and second.client.pinned.pinned_bytes == total > 0
    second.close()


def test_nothing_is_registered_ahead_between_the_tensors_and_the_first_step(
    start: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM captures its CUDA graphs then."""
    asked: list[float] = []
    pin_some = worker_module.PinnedArena.pin_some

    def noted(pinned: Any) -> bool:
        asked.append(time.monotonic())
        return pin_some(pinned)

    monkeypatch.setattr(worker_module.PinnedArena, "pin_some", noted)
    world = start()
    wait_for(lambda: not world.client._populate_some(), "all to be mapped")
    assert asked == [] and not world.client.pins_ahead
    world.side.follow(world.step())
    wait_for(lambda: bool(asked), "the thread that waits for the server")


def test_the_thread_that_pins_ahead_rests_after_each_window(
    start: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a rest it held the driver's lock beside every decode step."""
    rests_s = [0.05, 0.06, 0.07]
    rests_ms: list[int] = []

    def pin_a_window(pinned: Any) -> bool:
        if not rests_s:
            return False
        pinned.rest_s = rests_s.pop(0)
        return True

    class Poll:
        def __init__(self) -> None:
            self._poll = select.poll()

        def register(self, *what: Any) -> None:
            self._poll.register(*what)

        def poll(self, rest_ms: int) -> Any:
            rests_ms.append(rest_ms)
            return self._poll.poll(rest_ms)

    monkeypatch.setattr(worker_module.PinnedArena, "pin_some", pin_a_window)
    monkeypatch.setattr(worker_client, "select", SimpleNamespace(poll=Poll, POLLIN=select.POLLIN))
    world = start()
    world.side.follow(world.step())
    wait_for(lambda: not rests_s and rests_ms[-1] == worker_client.POPULATE_EVERY_MS, "the windows")
    assert [rest for rest in rests_ms if rest not in (0, worker_client.POPULATE_EVERY_MS)] == [50, 60, 70]


def test_a_rest_keeps_no_memory_from_being_mapped_and_ends_with_the_server(
    start: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as long as the driver makes it."""
    asked: list[float] = []

    def pin_a_window(pinned: Any) -> bool:
        pinned.rest_s = 1_000.0
        asked.append(time.monotonic())
        return True

    monkeypatch.setattr(worker_module.PinnedArena, "pin_some", pin_a_window)
    world = start()
    world.load()
    wait_for(lambda: bool(asked), "the rest to begin")
    arena = world.client.arena
    slab = len(arena.slab_fds) - 1
    arena.allocate(slab, 1 << 20)
    wait_for(lambda: arena._populated[slab] == 1 << 20, "what came during the rest to be mapped")
    assert len(asked) == 1
    kill_server(world.root)
    wait_for(lambda: is_clean(world), "the watching thread to unmap")


def test_a_server_that_is_killed_leaves_no_registration(start: Callable[..., World]) -> None:
    world = start()
    world.load()
    assert world.driver.registrations > 0
    kill_server(world.root)
    wait_for(lambda: is_clean(world), "the watching thread to unmap")


def test_a_worker_that_joins_again_registers_its_new_mapping(start: Callable[..., World]) -> None:
    world = start()
    world.load()
    world.side.follow(world.step(generation=1))
    wait_for(lambda: bool(world.unmapped_with), "the old arena")
    assert not any(world.unmapped_with)
    wait_for(lambda: bool(world.side._joined) or world.side._client is not None, "the new one")
    world.side.follow(world.step(generation=1))
    assert world.client.generation == 1 and world.client.pinned is not None and world.client.pins_ahead
    world.client.pinned.pin_all()
    assert world.driver.registrations > 0
    world.close()
    assert is_clean(world)


def test_a_worker_that_closes_ends_its_registrations_first(start: Callable[..., World]) -> None:
    world = start()
    world.load()
    world.close()
    assert is_clean(world)


def test_a_worker_that_joins_again_just_as_it_closes_leaves_nothing_behind(start: Callable[..., World]) -> None:
    """It closes between the new client's arrival and its being seen, so only the joining thread knows of it."""
    world = start()
    joined: list[WorkerClient] = []

    class LateForClose(deque[WorkerClient]):
        def append(self, client: WorkerClient) -> None:
            assert client.pinned is not None
            client.pinned.pin_all()
            joined.append(client)
            world.side.close()
            super().append(client)

    old, world.side._client = world.side._client, None
    world.side._joined = LateForClose()
    world.side._joining_generation = 1
    world.side._rejoin(old, 1)
    assert joined[0].pinned is not None and joined[0].pinned.pinning_s > 0
    assert joined[0]._lock_fd < 0 and is_clean(world)


def test_without_threads_for_two_generations_the_old_arena_is_left_once_there_are_some(
    start: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = start()
    old, begin = world.client, threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("tiered_kv-rejoin"):
            raise RuntimeError("can't start new thread")
        begin(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for generation in (1, 2):
            world.side.follow(world.step(generation))
    world.side._background._again_s = 0
    world.side.follow(world.step(2))
    wait_for(lambda: old._lock_fd < 0, "the leaving", deadline_s=WAIT_S)
    world.close()
    assert is_clean(world)


def test_a_client_that_was_left_before_its_watching_thread_came_to_run_is_not_watched(
    start: Callable[..., World],
) -> None:
    client = start().client
    client.leave()
    client.wait_lost()


def test_the_observer_sees_an_unmapping_that_forgets_them(
    start: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The four tests above can fail."""
    world = start()
    world.load()
    with monkeypatch.context() as patch:
        patch.setattr(worker_module.PinnedArena, "release", lambda _: set())
        world.side.close()
    assert any(world.unmapped_with)


def test_a_refusal_is_one_warning_and_copies_go_on(
    start: Callable[..., World], fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    fake_cuda.refuse_after(0)
    world = start()
    world.load()
    world.load()
    assert world.kv.pinned == [False, False]
    warnings = [record for record in caplog.records if "is not pinned" in record.getMessage()]
    assert len(warnings) == 1
    world.close()
    assert is_clean(world)


def test_the_cpu_path_registers_nothing_and_tells_nothing(start: Callable[..., World]) -> None:
    world = start(pins=False)
    world.load()
    assert world.client.pinned is None and world.driver.registrations == 0
    [session] = figures(world.root)["sessions"]
    assert session["pinned_bytes"] == 0
