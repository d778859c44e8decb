"""A real engine over a disk that is damaged, filled and cleared under it: no request fails, no answer changes.

One engine lives through all of it, its cache on a file system of its own. In each case files of prompts that are no
longer in host memory are changed behind the server's back; then the prompts are asked for, and once more when they were
stored again. The single faults with every detail, without an engine: tests/faults/test_fifteen_faults.py.
"""

import contextlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.server.probe import figures, is_serving, server_pid, wait_for, wait_written
from tests.kit.storage.disk_probe import blob_files, du_bytes, temp_files
from tests.kit.vllm.cached_engine import CHUNK, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import Answer, drain, generate, random_prompt, running

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CHUNK_BYTES = 528_384
DISK_BYTES = 160 << 20
MAX_TOKENS = 4
JUNK = [random_prompt(900 + i, 3 * CHUNK + 10) for i in range(4)]
"""Asked for in between: they push everything else out of host memory, which holds as many chunks."""

Files = dict[int, Path]
"""The files of a prompt's chunks, by the chunks' positions."""
Damage = Callable[[Files, Files], object]
"""What happens to the files of a prompt, and of another one."""


def rewrite(path: Path, change: Callable[[bytearray], object]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def flip(data: bytearray) -> None:
    data[-5000] ^= 1


def clear_end(data: bytearray) -> None:
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)


def swap(one: Path, other: Path) -> None:
    aside = one.with_suffix(".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


DAMAGES: dict[str, tuple[Damage, int, str]] = {
    "F2 second half zeros": (lambda own, _: rewrite(own[1], clear_end), 1, "read_failed_corrupt"),
    "F3 cut short": (lambda own, _: os.truncate(own[0], 70_000), 0, "read_failed_corrupt"),
    "F3 longer": (lambda own, _: os.truncate(own[1], CHUNK_BYTES + 4096), 1, "read_failed_corrupt"),
    "F4 a bit flipped": (lambda own, _: rewrite(own[1], flip), 1, "read_failed_corrupt"),
    "F5 swapped": (lambda own, other: swap(own[0], other[0]), 0, "read_failed_corrupt"),
    "F12 removed": (lambda own, _: own[1].unlink(), 1, "read_failed_missing"),
    "F14 a date in ten years": (lambda own, _: [os.utime(file, (2e9, 2e9)) for file in own.values()], 2, ""),
}
"""Damage, chunks that are served all the same, and the counter that has to move."""

PROMPTS = {name: random_prompt(800 + number, 2 * CHUNK + 60) for number, name in enumerate(DAMAGES)}
OTHER = random_prompt(850, 2 * CHUNK + 60)
LATE = [random_prompt(860 + i, CHUNK + 30) for i in range(3)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of its own where mounting is allowed, else a directory."""
    point = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=256m,mode=700", "none", str(point)]
    is_mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    yield point / "cache"
    if is_mounted:
        subprocess.run(["umount", "-l", point], check=True)


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> dict[str, Answer]:
    prompts = [*PROMPTS.values(), OTHER, *LATE, *JUNK]
    with running(tiny_model) as llm:
        answers = generate(llm, prompts, max_tokens=MAX_TOKENS)
    return {str(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}


class World:
    """The engine, and what plain vLLM answers."""

    def __init__(self, engine: CachedEngine, plain: dict[str, Answer]) -> None:
        self.engine = engine
        self.root = engine.root
        self._plain = plain

    def ask(self, *prompts: list[int]) -> list[int]:
        """Cached tokens of each prompt; every answer is held against plain vLLM's."""
        answers = self.engine.ask(*prompts, max_tokens=MAX_TOKENS)
        for prompt, ours in zip(prompts, answers, strict=True):
            assert ours.finish_reason == "length"
            assert_same(ours, self._plain[str(prompt)])
        return [answer.cached_tokens for answer in answers]

    def forget_host(self) -> None:
        for prompt in JUNK:
            self.ask(prompt)

    def files(self, prompt: list[int]) -> Files:
        from tiered_kv.keys.prefix_keys import PrefixKeys

        keys = PrefixKeys(self.engine.scheduler_side._client.namespace, CHUNK)
        keys.extend(prompt)
        there = {path.stem: path for path in blob_files(self.root)}
        return {number: there[key.hex()] for number, key in enumerate(keys.keys) if key.hex() in there}

    def counted(self, name: str) -> int:
        counters: dict[str, int] = figures(self.root)["counters"]
        return counters.get(name, 0)

    def log(self) -> str:
        return (self.root / "server.log").read_text()

    def assert_sound(self) -> None:
        """I3 and I4: nothing is leased, left over or counted wrongly, and the limit holds."""
        drain(self.engine.llm)
        wait_written(self.root)
        state = figures(self.root)
        (disk,) = state["tiers"]
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        assert (state["hierarchy"]["leased_bytes"], state["hierarchy"]["lookups"]) == (0, 0)
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert temp_files(self.root) == []
        assert disk["used_bytes"] == du_bytes(self.root / "blobs") <= disk["capacity_bytes"]


@pytest.fixture(scope="module")
def world(tiny_model: Path, place: Path, plain: dict[str, Answer]) -> Iterator[World]:
    limits = {"host_bytes": 12 * CHUNK_BYTES, "disk_bytes": DISK_BYTES, "min_free_bytes": 1}
    with cached_engine(tiny_model, place, limits) as engine:
        world = World(engine, plain)
        for prompt in [*PROMPTS.values(), OTHER, *JUNK]:
            assert world.ask(prompt) == [0]
        wait_written(place)
        yield world


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_costs_a_recompute_and_is_repaired(world: World, name: str) -> None:
    damage, served, counter = DAMAGES[name]
    world.forget_host()
    before, told = world.counted(counter), len(world.log())
    damage(world.files(PROMPTS[name]), world.files(OTHER))
    during = world.ask(PROMPTS[name])
    wait_written(world.root)
    counted, said = world.counted(counter), world.log()[told:]
    world.ask(OTHER)
    world.forget_host()
    after = world.ask(PROMPTS[name], OTHER)

    assert during == [served * CHUNK]
    assert after == [2 * CHUNK] * 2, "what was damaged is not served again"
    assert counted > before or not counter
    assert not re.search("Traceback|ERROR", said), said
    world.assert_sound()


def test_corruption_is_told_with_its_place_and_cause(world: World) -> None:
    """Once in ten seconds: the counters have the number."""
    found = re.search(r"outcome=corrupt operation=read tier=disk blob=(\S+) cause=\S.*", world.log())
    assert found
    assert (world.root / "blobs" / found[1]).parent.is_dir()


def test_full_file_system_drops_stores_and_takes_them_again(world: World, place: Path) -> None:
    """F6: other files than ours fill it.

    A chunk whose write failed is idle, was never asked for, and so is among the first to go for the slot of a later
    store: each prompt is asked for again before the next one is stored.
    """
    if not place.parent.is_mount():
        pytest.skip("mounting needs root")
    ballast = place.parent / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            continue
    before = world.counted("write_failed_no_room")
    during, again = [], []
    for prompt in LATE:
        during += world.ask(prompt)
        wait_written(world.root)
        again += world.ask(prompt)
    counted = world.counted("write_failed_no_room")
    ballast.unlink()
    world.forget_host()
    world.ask(*LATE)
    world.forget_host()
    after = world.ask(*LATE)

    assert (during, again) == ([0] * 3, [CHUNK] * 3), "host memory serves"
    assert counted > before
    assert re.search(
        r"outcome=no_room operation=write tier=disk blob=\S+ cause=(file system is too full|.*ENOSPC)", world.log()
    )
    assert after == [CHUNK] * 3
    world.assert_sound()


def test_files_removed_at_any_moment_cost_recomputes(world: World) -> None:
    """F12: ``rm`` in a loop while requests load."""
    is_over = threading.Event()

    def remove() -> None:
        while not is_over.wait(0.02):
            for file in blob_files(world.root)[::3]:
                file.unlink(missing_ok=True)

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for prompt in [*PROMPTS.values(), *JUNK]:
            world.ask(prompt)
    finally:
        is_over.set()
        remover.join()
    prompts = list(PROMPTS.values())[:3]
    for prompt in prompts:
        world.ask(prompt)
    world.forget_host()
    after = [world.ask(prompt)[0] for prompt in prompts]
    assert after == [2 * CHUNK] * 3, "hits come back"


def test_directory_removed_under_the_server_is_filled_anew_by_another(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F7, and F15 on top of it: at first the machine has no thread left to look for a server."""
    old, start = server_pid(world.root), threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name.startswith("tiered_kv"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    monkeypatch.setattr("tiered_kv.server.connect.THREAD_RETRY_S", 0.1)
    shutil.rmtree(world.root)
    prompts = list(PROMPTS.values())[:3]
    wait_for(lambda: _one_step(world) and not world.engine.scheduler_side._client.is_ready, "the loss")
    during = world.ask(*prompts)
    monkeypatch.undo()

    def is_joined() -> bool:
        _one_step(world)
        return is_serving(world.root) and [s["state"] for s in figures(world.root)["sessions"]] == ["ready"]

    wait_for(is_joined, "a session with another server")
    for prompt in prompts:
        world.ask(prompt)
    wait_written(world.root)
    after = [world.ask(prompt)[0] for prompt in prompts]

    assert during == [0] * 3
    assert server_pid(world.root) != old
    assert after == [2 * CHUNK] * 3
    world.assert_sound()


def _one_step(world: World) -> bool:
    """An engine learns of a lost server while it works, so give it something to do."""
    generate(world.engine.llm, [[5, 6, 7]], max_tokens=1)
    return True
