"""Engines that pin the arena: while one has it mapped, a real server changes no page of it, whatever it stores.

What a GPU would read is looked at, not what the server says: a driver that holds pages (``tests/kit/page_holder.py``).
"""

import random
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from tests.kit.counts import seed
from tests.kit.page_holder import PageHolder
from tests.kit.server.clients import ANSWER_S, BLOCK, PAGES, SmallEngine, settings, worker_part
from tests.kit.server.probe import figures, wait_for
from tests.kit.server.processes import kill_server
from tests.kit.verbs import run
from tiered_kv.chunks.arena import Arena
from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.chunks.pinned import PinnedArena
from tiered_kv.server import protocol as m
from tiered_kv.server.client import SchedulerClient
from tiered_kv.server.worker_client import WorkerClient
from tiered_kv.tiering.slots import SLABS_WANTED, SLOTS_PER_SLAB_MAX


def pages(content: int) -> tuple[LayerPage, ...]:
    return tuple(LayerPage(f"layer.{layer}", "BF16", (2, BLOCK, content), "HNC") for layer in range(2))


LARGE_PAGES, LARGER_PAGES = pages(160), pages(230)
HOST_BYTES = 8 << 20
FULL = HOST_BYTES // SLABS_WANTED
ROUNDS = 12


class PinningEngine(SmallEngine):
    """An engine whose worker registers a slab before it writes into it, as the real one does."""

    @classmethod
    def join(cls, root: Path, name: str, pages: Any, driver: PageHolder, *, pins: bool) -> "PinningEngine":
        config = settings(root, host_bytes=HOST_BYTES)
        worker = WorkerClient(config, name, 0, worker_part(weights=name, pages=pages, pins=pins))
        worker.pinned = PinnedArena(cast(Any, driver), worker.arena, 0)
        worker.pinned.pin_all()
        client = SchedulerClient(config, name, 1)
        assert client.wait_ready(ANSWER_S), client.refusal
        return cls(client, worker, config, name, name)

    def payload(self, slot: int) -> memoryview:
        assert self.worker.pinned is not None
        self.worker.pinned.pin_slab(slot // SLOTS_PER_SLAB_MAX)
        return super().payload(slot)

    def end(self) -> None:
        self.client.close()
        self.worker.leave()


def memory(arena: Arena) -> list[int]:
    return [arena.memory_bytes(slab) for slab in range(len(arena.slab_fds))]


def reclaimed(root: Path) -> int:
    return int(figures(root)["counters"].get("slab_reclaimed", 0))


def fill(engine: PinningEngine) -> None:
    """Store until all host memory is in slabs, which are not full where nobody pins, and register each of them.

    On a busy machine a slab may come late, and what is stored meanwhile takes the slots of what was stored before.
    """
    arena, pinned, info = engine.worker.arena, engine.worker.pinned, engine.client.info
    assert pinned is not None and info is not None
    for turn in range(100):
        engine.store(100, (1000 + turn) * 1_000_000)
        if sum(memory(arena)) > HOST_BYTES - info.slot_bytes:
            break
    else:
        pytest.fail(f"host memory did not fill: {memory(arena)}")
    for slab, size_bytes in enumerate(memory(arena)):
        if size_bytes:
            pinned.pin_slab(slab)


def take_turns(
    root: Path, engines: list[PinningEngine], least: int = 2, until: Callable[[list[int]], bool] = bool
) -> list[list[int]]:
    """Store more than host memory holds, by engines of two slot sizes in turn, until slabs changed their slot size.

    Returns what slabs had after every turn; of the last one ``until`` holds.
    """
    draw = random.Random(seed())
    seen = []
    for turn in range(100):
        engine = engines[turn % 2]
        engine.store(draw.randrange(60, 160), turn * 1_000_000)
        seen.append(memory(engine.worker.arena))
        if turn >= ROUNDS and reclaimed(root) >= least and until(seen[-1]):
            return seen
    pytest.fail(f"too few slabs changed their slot size: {seen[-1]}")


@pytest.fixture
def engines(root: Path) -> Iterator[Any]:
    started: list[PinningEngine] = []

    def start(driver: PageHolder, *, pins: bool, prefix: str = "", larger: Any = LARGE_PAGES) -> list[PinningEngine]:
        one = PinningEngine.join(root, f"{prefix}small", PAGES, driver, pins=pins)
        started.append(one)
        fill(one)
        other = PinningEngine.join(root, f"{prefix}large", larger, PageHolder(), pins=pins)
        started.append(other)
        return [one, other]

    yield start
    for engine in started:
        engine.end()


@pytest.mark.timeout(120)
def test_what_a_gpu_reads_is_what_the_cpu_wrote_while_slabs_change_their_slot_size(root: Path, engines: Any) -> None:
    driver = PageHolder()
    both = engines(driver, pins=True)
    seen = take_turns(root, both)
    for before, after in pairwise(seen):
        assert all(new >= old for old, new in zip(before, after, strict=True)), "memory was taken from a slab"
    assert [size for size in seen[-1] if size] == [FULL] * SLABS_WANTED
    for slab in range(len(seen[-1])):
        both[0].worker.pinned.pin_slab(slab)
    assert driver.held_bytes == HOST_BYTES
    assert driver.stale() == []
    both[0].worker.pinned = None


@pytest.mark.timeout(120)
def test_without_that_a_gpu_would_read_what_nobody_stored(root: Path, engines: Any) -> None:
    """The same where the server believes that nobody pins: the check above can fail.

    With slots of which a slab holds another number of bytes: slabs of an equal size may keep their pages by chance.
    """
    driver = PageHolder()
    both = engines(driver, pins=False, larger=LARGER_PAGES)
    take_turns(root, both, until=lambda _: driver.stale() != [])
    both[0].worker.pinned = None


@pytest.mark.timeout(120)
def test_memory_is_taken_from_slabs_again_after_the_last_pinning_engine(root: Path, engines: Any) -> None:
    both = engines(PageHolder(), pins=True)
    take_turns(root, both)
    for engine in both:
        engine.end()
    wait_for(lambda: not figures(root)["sessions"], "the sessions' end")
    # A slot size that is new: it takes the slabs of the one that nobody uses any more.
    plain = engines(PageHolder(), pins=False, prefix="plain-", larger=LARGER_PAGES)
    take_turns(root, plain, until=lambda sizes: any(0 < size < FULL for size in sizes))  # cut to their slots, as ever


@pytest.mark.timeout(120)
def test_slabs_that_had_other_sizes_before_are_pinned_as_they_are(root: Path, engines: Any) -> None:
    """Engines that do not pin have used the arena first, and one of them goes on."""
    plain = engines(PageHolder(), pins=False, prefix="plain-")
    take_turns(root, plain)
    plain[1].end()
    driver = PageHolder()
    late = PinningEngine.join(root, "late", LARGER_PAGES, driver, pins=True)
    take_turns(root, [plain[0], late], least=reclaimed(root) + 2)
    assert driver.held_bytes > 0 and driver.stale() == []
    late.worker.pinned = None
    late.end()


def test_a_killed_server_leaves_no_registration_behind(root: Path) -> None:
    driver = PageHolder()
    engine = PinningEngine.join(root, "small", PAGES, driver, pins=True)
    engine.store(10)
    assert driver.held_bytes > 0
    kill_server(root)
    engine.worker.wait_lost()
    engine.worker.leave()
    assert driver.held_bytes == 0
    engine.client.close()


def test_a_worker_that_said_it_pins_nothing_may_not_say_what_it_pinned(root: Path) -> None:
    engine = PinningEngine.join(root, "small", PAGES, PageHolder(), pins=False)
    engine.worker._sock.sendall(m.frame(m.Pinned(1 << 20, 0.1)))
    engine.wait_lost()
    engine.end()


def test_the_server_says_what_is_pinned(root: Path) -> None:
    driver = PageHolder()
    engine = PinningEngine.join(root, "small", PAGES, driver, pins=True)
    engine.store(10)
    engine.worker._populate_some()
    while engine.worker._populate_some():
        pass

    def session() -> dict[str, Any]:
        [row] = figures(root)["sessions"]
        return dict(row)

    wait_for(lambda: session()["pinned_bytes"] == driver.held_bytes > 0, "the worker's word")
    assert session()["pinning_s"] > 0
    assert re.search(r"\d MiB in \d+\.\d s +ready", run("stat", f"file://{root}").stdout)
    engine.end()
