"""A worker whose server dies at the worst moment: the arena is unmapped, whatever copy was just about to begin."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit.server.clients import settings, worker_part
from tests.kit.server.probe import wait_for
from tests.kit.server.processes import kill_server
from tiered_kv.server.client import SchedulerClient
from tiered_kv.vllm.step import BlockRun, ChunkCopy, LoadJob
from tiered_kv.vllm.worker import CopyThread, WorkerSide

pytestmark = pytest.mark.vllm

WAIT_S = 20.0


class SlowKV:
    """Paged KV whose copy goes on until it is told to end; it holds its view meanwhile, as a real one does."""

    rank_bytes = 64
    engine = None

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.fails = False

    def copying(self) -> Any:
        return nullcontext()

    def begin(self, direction: str, mark: object) -> Any:
        return SimpleNamespace(launch=lambda: None, wait=lambda: None)

    def scatter(self, view: memoryview, groups: Sequence[Any], job: Any) -> None:
        with view[:1]:
            self.begun.set()
            assert self.may_end.wait(WAIT_S)
        if self.fails:
            held = view[:1]
            raise RuntimeError(f"a copy that fails while it holds {held}")


class World:
    """A worker's side with a real server, and a watching thread whose unmapping the test holds up and observes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        config = settings(root)
        vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0, world_size=1))
        self.side = WorkerSide(config, vllm_config, SimpleNamespace(), "e")
        self.kv = SlowKV()
        self.side._paged, self.side._join = self.kv, worker_part()  # type: ignore[assignment]
        self.side._threads = {"load": CopyThread("load")}
        self.client = self.side._client = self.side._new_client(0)
        self.scheduler = SchedulerClient(config, "e", 1)
        assert self.scheduler.wait_ready(WAIT_S)
        self.leaving, self.may_leave, self.has_left = threading.Event(), threading.Event(), threading.Event()
        self.trouble: list[BaseException] = []
        self._leave, self.client.leave = self.client.leave, self._held_up  # type: ignore[method-assign]

    def _held_up(self) -> None:
        self.leaving.set()
        assert self.may_leave.wait(WAIT_S)
        try:
            self._leave()
        except BaseException as exc:  # noqa: BLE001  # the test says what it is
            self.trouble.append(exc)
        self.has_left.set()

    def step(self, session: Any) -> Any:
        """A step with one load; ``session`` is called when the worker asks how slots lie."""

        class Step:
            generation = 0
            loads = (LoadJob("r", 0, (ChunkCopy(0, (BlockRun(0, (1,)),)),)),)

            @property
            def session(self) -> Any:
                return session()

        return Step()

    def close(self) -> None:
        self.may_leave.set()
        self.kv.may_end.set()
        self.scheduler.close()
        self.side.close()


@pytest.fixture
def world(root: Path) -> Iterator[World]:
    world = World(root)
    yield world
    world.close()


def test_no_copy_begins_between_the_last_look_at_copies_and_the_unmapping(world: World) -> None:
    """The server dies after the worker has chosen its client; nothing is counted as running when the watcher looks."""
    session = world.scheduler.info

    def server_dies() -> Any:
        kill_server(world.root)
        assert world.leaving.wait(WAIT_S), "the watching thread saw no copy and goes on to unmap"
        return session

    step = world.step(server_dies)
    world.side._submit("load", step, step.loads[0])
    wait_for(lambda: world.kv.begun.is_set() or world.side._loads_done, "the copy, or its report")
    world.may_leave.set()
    assert world.has_left.wait(WAIT_S)
    world.kv.may_end.set()

    assert world.trouble == [], "the arena stays mapped, and the next server waits for that"
    assert world.side.take_finished_loads() == ({"r"}, {"r"}), "it is recomputed"
    assert not world.kv.begun.is_set()


def test_a_copy_that_runs_is_finished_before_the_arena_of_a_dead_server_is_unmapped(world: World) -> None:
    step = world.step(lambda: world.scheduler.info)
    world.side._submit("load", step, step.loads[0])
    assert world.kv.begun.wait(WAIT_S)
    kill_server(world.root)
    wait_for(lambda: world.client.is_lost, "the watching thread")
    assert not world.leaving.is_set()
    world.kv.may_end.set()
    assert world.leaving.wait(WAIT_S)
    world.may_leave.set()
    assert world.has_left.wait(WAIT_S) and world.trouble == []
    assert world.side.take_finished_loads() == ({"r"}, set())


def test_a_log_handler_that_keeps_the_error_of_a_copy_does_not_keep_the_arena(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The error's frames hold a view of the arena; as long as one is mapped, the next server waits."""
    world.kv.fails = True
    world.kv.may_end.set()
    step = world.step(lambda: world.scheduler.info)
    world.side._submit("load", step, step.loads[0])
    wait_for(lambda: world.side.take_finished_loads() == ({"r"}, {"r"}), "the copy's report")
    kill_server(world.root)
    world.may_leave.set()
    assert world.has_left.wait(WAIT_S) and world.trouble == []
    assert "a copy that fails" in caplog.text
