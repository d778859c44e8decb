"""Rows of vLLM's host memory through a real server: what is stored comes back, and every job ends, once.

Twice: with rows that the server reads and writes itself, and with rows of this process alone, through slots.
"""

import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.counts import seed
from tests.kit.server.probe import figures, server_pid, wait_for, wait_written
from tests.kit.server.processes import freeze, kill_server, stopped_server
from tests.kit.vllm.row_engine import ROW_BYTES, ROWS, WAIT_S, Rows, fill, prompt
from tests.kit.vllm.row_patience import patient_rows
from tiered_kv.server import protocol as m
from tiered_kv.server.client import SessionInfo
from tiered_kv.tiering.types import SlotId
from tiered_kv.vllm import row_jobs
from tiered_kv.vllm.row_jobs import PIECE_ROWS

Start = Callable[..., Rows]


@pytest.fixture(params=["shared", "own"])
def start(root: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    started: list[Rows] = []

    def begin(**more: object) -> Rows:
        started.append(Rows(root, is_shared=request.param == "shared", **more))
        assert started[-1].jobs.uses.is_lent == (request.param == "shared")
        return started[-1]

    yield begin
    for one in started:
        one.jobs.close()


def test_rows_come_back_byte_for_byte_from_memory_and_from_disk(start: Start) -> None:
    rows, keys = start(), prompt(1, 2 * PIECE_ROWS + 5)
    before = fill(rows, 1)
    assert rows.store(keys) == [True] * len(keys)
    wait_written(rows.root)
    for is_cold in (False, True):
        rows.memory[:] = 0
        if is_cold:
            rows.empty_host()
        assert rows.load(keys, into=100) == [True] * len(keys)
        assert np.array_equal(rows.memory[100 : 100 + len(keys)], before[: len(keys)])
        assert not rows.memory[:100].any() and not rows.memory[100 + len(keys) :].any(), "a row nobody asked for"


def test_closing_while_the_arena_is_being_mapped_waits_for_nobody(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that maps it has a server that lives, and would wait for its end."""
    running = start()
    is_mapping, go_on = threading.Event(), threading.Event()
    left: list[int] = []

    class SlowWorker(row_jobs.WorkerClient):
        def __init__(self, *arguments: object) -> None:
            is_mapping.set()
            assert go_on.wait(30)
            super().__init__(*arguments)  # type: ignore[arg-type]

        def leave(self) -> None:
            left.append(self.generation)
            super().leave()

    monkeypatch.setattr(row_jobs, "WorkerClient", SlowWorker)
    keeper = row_jobs.ArenaKeeper(running.jobs._config, "late", running.jobs._arena._join)
    assert is_mapping.wait(30)
    closing = threading.Thread(target=keeper.close)
    closing.start()
    wait_for(keeper._is_closed.is_set, "the close to begin")
    go_on.set()
    closing.join(20)
    assert not closing.is_alive() and left == [0]


def test_what_is_held_is_not_copied_again(start: Start) -> None:
    rows, keys = start(), prompt(2, 6)
    fill(rows, 2)
    assert rows.store(keys[:4]) == [True] * 4
    assert (rows.held(keys), rows.held(prompt(3, 2))) == (4, 0)
    assert rows.store(keys) == [True] * 6
    assert rows.done[2].copied_bytes == 2 * ROW_BYTES


def test_a_load_gives_the_rows_that_are_held_and_no_more(start: Start) -> None:
    rows, keys = start(), prompt(4, 10)
    before = fill(rows, 4)
    rows.store(keys[:7])
    rows.memory[:] = 0
    assert rows.load(keys, into=0) == [True] * 7 + [False] * 3
    assert np.array_equal(rows.memory[:7], before[:7])


def test_chunks_here_and_there_land_in_their_rows(start: Start) -> None:
    """vLLM loads what its own memory has not."""
    rows, keys = start(), prompt(5, 12)
    before = fill(rows, 5)
    rows.store(keys)
    rows.memory[:] = 0
    places = [(11, 3), (2, 50), (3, 9), (7, 1)]
    assert rows.end(rows.begin(keys, places, is_load=True)) == [[True] * 4]
    for index, row in places:
        assert np.array_equal(rows.memory[row], before[index])
    assert np.count_nonzero(rows.memory.any(axis=1)) == 4


def test_steps_that_follow_each_other_are_stored_whole(start: Start) -> None:
    """vLLM hands a step's rows over before those of the step before are stored."""
    rows, keys = start(), prompt(6, 40)
    fill(rows, 6)
    jobs = [
        rows.begin(keys, [(index, index) for index in range(at, at + 8)], is_load=False) for at in (0, 8, 16, 24, 32)
    ]
    assert rows.end(*jobs) == [[True] * 8] * 5
    assert rows.held(keys) == 40


def test_what_nobody_could_find_is_not_stored(start: Start) -> None:
    rows, keys = start(), prompt(7, 8)
    fill(rows, 7)
    assert rows.store(keys, first=3) == [False] * 5
    assert rows.held(keys) == 0
    assert rows.store(keys) == [True] * 8, "the whole of it can be stored later"


def test_a_gap_ends_what_is_stored_of_a_job(start: Start) -> None:
    """vLLM offers what its own memory had not: what is between may have been stored before, or not."""
    rows, keys = start(), prompt(18, 12)
    fill(rows, 18)
    assert rows.end(rows.begin(keys, [(index, index) for index in (0, 1, 2, 6, 7)], is_load=False)) == [
        [True] * 3 + [False] * 2
    ]
    assert rows.held(keys) == 3
    assert rows.store(keys, first=3, count=3) == [True] * 3
    assert rows.end(rows.begin(keys, [(index, index) for index in (1, 2, 6, 7)], is_load=False)) == [[True] * 4]
    assert rows.held(keys) == 8


def test_a_small_arena_carries_a_long_prompt(start: Start) -> None:
    rows, keys = start(host_bytes=8 * (ROW_BYTES + 4096)), prompt(8, 60)
    before = fill(rows, 8)
    assert rows.jobs.client.chunks_leased_max < 5
    with patient_rows():  # a busy machine needs longer than one job may wait for slots
        assert rows.store(keys) == [True] * 60
    rows.memory[:] = 0
    assert rows.load(keys, into=0) == [True] * 60
    assert np.array_equal(rows.memory[:60], before[:60])


def test_two_engines_share(start: Start) -> None:
    one, other, keys = start(), start(), prompt(9, 20)
    before = fill(one, 9)
    assert one.store(keys) == [True] * 20
    wait_for(lambda: figures(one.root)["hierarchy"]["chunks"] == 20, "the server to take all of them in")
    assert other.load(keys, into=7) == [True] * 20
    assert np.array_equal(other.memory[7:27], before[:20])


def test_jobs_of_a_server_that_is_killed_end_and_later_ones_succeed(start: Start) -> None:
    rows, keys = start(), prompt(10, 30)
    before = fill(rows, 10)
    rows.store(keys)
    wait_written(rows.root)
    for _ in range(3):
        jobs = [
            rows.begin(keys, [(index, 100 + index) for index in range(30)], is_load=True),
            rows.begin(prompt(os.getpid(), 20), [(index, index) for index in range(20)], is_load=False),
        ]
        kill_server(rows.root)
        loaded, _ = rows.end(*jobs)
        for index, is_good in enumerate(loaded):
            assert not is_good or np.array_equal(rows.memory[100 + index], before[index])
        after = rows.memory.copy()
        wait_for(lambda: rows.jobs.poll() or rows.jobs.is_ready, "a new session", deadline_s=60)
        assert np.array_equal(rows.memory, after), "a row was written after its job's end"
        rows.memory[100:] = 0
        assert rows.load(keys, into=100) == [True] * 30
        assert np.array_equal(rows.memory[100:130], before[:30])


def test_an_arena_that_is_lost_alone_is_mapped_again(start: Start) -> None:
    rows, keys = start(), prompt(19, 5)
    before = fill(rows, 19)
    rows.store(keys)
    wait_written(rows.root)
    worker = rows.jobs._arena._worker
    assert worker is not None
    worker.leave()
    wait_for(lambda: rows.jobs.poll() or not rows.jobs.is_ready, "the loss to be seen")
    wait_for(lambda: rows.jobs.poll() or rows.jobs.is_ready, "an arena", deadline_s=60)
    rows.memory[:] = 0
    assert rows.load(keys, into=3) == [True] * 5
    assert np.array_equal(rows.memory[3:8], before[:5])


def test_a_server_that_stands_still_delays_nothing_for_longer_than_it_may(start: Start) -> None:
    """And later touches no row: all copies are this process's own."""
    rows, keys = start(lookup_timeout_ms=200), prompt(11, 30)
    fill(rows, 11)
    rows.store(keys)
    with stopped_server(rows.root):
        jobs = [
            rows.begin(keys, [(index, 100 + index) for index in range(30)], is_load=True, wait_s=0.3),
            rows.begin(prompt(12, 20), [(index, index) for index in range(20)], is_load=False),
        ]
        assert rows.end(*jobs) == [[False] * 30, [False] * 20]
        assert rows.jobs.find(rows.names(keys)) is None, "nobody asks a server that is silent"
        late = rows.begin(keys, [(0, 0)], is_load=True)
        rows.jobs.drain()
        assert rows.end(late) == [[False]]
        rows.memory[:] = 7
    wait_for(lambda: rows.jobs.poll() or not rows.jobs.client.is_silent, "the server to be heard")
    assert rows.memory.min() == rows.memory.max() == 7
    assert rows.load(keys, into=0) == [True] * 30


def test_drained_jobs_are_all_told_and_nothing_is_touched_afterwards(start: Start) -> None:
    rows, keys = start(), prompt(13, 100)
    fill(rows, 13)
    rows.store(keys)
    jobs = [
        rows.begin(keys, [(index, 100 + index) for index in range(100)], is_load=True),
        rows.begin(prompt(14, 50), [(index, index) for index in range(50)], is_load=False),
    ]
    for _ in range(3):
        rows.jobs.poll()
    rows.jobs.drain()
    told = {one.job for one in rows.jobs.take_done()}
    assert told == set(jobs)
    after = rows.memory.copy()
    assert rows.load(keys[:1], into=200) == [True]  # the session goes on
    assert np.array_equal(rows.memory[:200], after[:200])


def test_after_a_reset_nothing_older_is_held(start: Start) -> None:
    rows, keys = start(), prompt(15, 5)
    fill(rows, 15)
    rows.store(keys)
    old = rows.names(keys)
    rows.jobs.drain()
    rows.jobs.reset()
    wait_for(lambda: rows.jobs.poll() or rows.jobs.is_ready, "a private epoch")
    rows.jobs.load(99, old, [(0, 0)], WAIT_S)
    assert rows.end(99) == [[False]], "names of before the reset"
    assert rows.held(keys) == 0
    assert rows.store(keys) == [True] * 5 and rows.held(keys) == 5


def test_an_answer_ends_its_question(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server keeps nothing for it any more, and its client says nothing of it."""
    rows, keys = start(), prompt(19, 6)
    fill(rows, 19)
    assert rows.store(keys[:4]) == [True] * 4
    before = figures(rows.root)["tokens"]["lookups"]
    find = rows.jobs.find(rows.names(keys))
    assert find is not None
    wait_for(lambda: figures(rows.root)["tokens"]["lookups"] == before + 1, "the end of the question")
    sent: list[m.Message] = []
    send = rows.jobs.client._send
    monkeypatch.setattr(rows.jobs.client, "_send", lambda message, **how: sent.append(message) or send(message, **how))
    wait_for(lambda: rows.jobs.poll() or rows.jobs.answer(find, 1.0) is not None, "the answer")
    assert find.held == 4 and not rows.jobs.client.lookups
    assert not any(isinstance(message, m.Release) for message in sent)


def test_random_lives_give_right_rows_and_leave_nothing_behind(start: Start) -> None:
    """Stores, loads, drains and evictions of prompts that share beginnings, many at once, in an arena that is small."""
    source = random.Random(seed())
    rows = start(host_bytes=24 * (ROW_BYTES + 4096))
    trunk = prompt(16, 40)
    prompts = [[*trunk[: source.randrange(40)], *prompt(17 + n, 20)] for n in range(6)]
    content = {key: np.random.default_rng(int.from_bytes(key[:4])).bytes(ROW_BYTES) for keys in prompts for key in keys}
    running: dict[int, tuple[list[bytes], list[tuple[int, int]], bool]] = {}
    free = set(range(ROWS))
    right = 0

    def take() -> bool:
        nonlocal right
        done = rows.jobs.take_done()
        for one in done:
            keys, places, is_load = running.pop(one.job)
            for (index, row), is_good in zip(sorted(places), one.good, strict=True):
                if is_load and is_good:
                    assert rows.memory[row].tobytes() == content[keys[index]], "another chunk's bytes"
                    right += 1
            free.update(row for _, row in places)
        return bool(done)

    for _ in range(250):
        keys = source.choice(prompts)
        is_load = source.random() < 0.5
        first = source.randrange(len(keys)) if is_load and source.random() < 0.5 else 0
        count = source.randrange(1, len(keys) - first + 1)
        if len(free) >= count and source.random() < 0.7:
            taken = source.sample(sorted(free), count)
            free -= set(taken)
            places = list(zip(range(first, first + count), taken, strict=True))
            for index, row in places:
                rows.memory[row] = 0 if is_load else np.frombuffer(content[keys[index]], np.uint8)
            running[rows.begin(keys, places, is_load=is_load)] = (keys, places, is_load)
        if source.random() < 0.02:
            rows.jobs.drain()
        if source.random() < 0.05:
            rows.empty_host()
        if running and source.random() < 0.5:
            wait_for(take, "a job to end")
    while running:  # the last may have ended above
        wait_for(take, "a job to end")
    assert right > 300
    wait_written(rows.root)

    def is_empty() -> bool:
        rows.jobs.poll()
        return figures(rows.root)["hierarchy"]["lookups"] == figures(rows.root)["hierarchy"]["leased_bytes"] == 0

    wait_for(is_empty, "lookups and leases to be given back")
    assert not (rows.jobs._storing or rows.jobs._waiting or rows.jobs._leased or rows.jobs._jobs)


def test_a_question_to_a_server_that_is_gone_is_answered_at_once(start: Start) -> None:
    """And not after the time that an answer is waited for, which is 20 s here."""
    rows, keys = start(), prompt(14, 4)
    assert rows.store(keys) == [True] * 4
    wait_written(rows.root)
    freeze(server_pid(rows.root))
    asked, left = (rows.jobs.find(rows.names(keys)) for _ in range(2))
    assert asked is not None and left is not None and rows.jobs.answer(asked, 1.0) is None
    kill_server(rows.root)
    wait_for(lambda: rows.jobs.poll() or rows.jobs.client.generation > 0, "the end of the session")
    assert rows.jobs.answer(asked, 1.0) == 0
    wait_for(lambda: rows.jobs.poll() or rows.jobs.is_ready, "another session", deadline_s=60)
    later = rows.jobs.find(rows.names(keys))
    assert later is not None
    rows.jobs.forget(left)
    wait_for(lambda: rows.jobs.poll() or rows.jobs.answer(later, 1.0) is not None, "an answer")
    assert later.held == 4 and rows.jobs.client.generation == later.generation


def test_what_was_copied_from_a_slot_whose_lease_ended_meanwhile_is_not_loaded(start: Start) -> None:
    """Somebody else may have had the slot before the copy's last byte."""
    rows, keys = start(), prompt(15, 6)
    fill(rows, 15)
    assert rows.store(keys) == [True] * 6
    rows.jobs.client.look_up_rows(keys, may_search=False)  # leases: what is on disk comes up, and goes through slots
    wait_for(lambda: rows.jobs.poll() or figures(rows.root)["hierarchy"]["host_ready_chunks"] == 6, "a promotion")
    go_on = threading.Event()
    for _ in range(row_jobs.THREADS):
        rows.jobs._threads.submit(go_on.wait)
    try:
        job = rows.begin(keys, [(index, 100 + index) for index in range(6)], is_load=True)
        made = rows.jobs._jobs[job]
        wait_for(lambda: rows.jobs.poll() or made.running == 6, "copies to be begun")
        (piece,) = made.pieces
        rows.jobs.client.release(piece.lookup)
    finally:
        go_on.set()
    assert rows.end(job) == [[False] * 6]


through_slots = pytest.mark.parametrize("start", ["own"], indirect=True)


@through_slots
def test_a_store_behind_one_that_was_given_up_ends_and_gives_its_slots_back(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can find what it stores; and vLLM keeps its rows for as long as it runs."""
    rows, keys = start(), prompt(21, 6)
    fill(rows, 21)
    take_slot, copy = rows.jobs.client.take_slot, rows.jobs._arena.copy
    with monkeypatch.context() as patched:
        patched.setattr(rows.jobs.client, "take_slot", lambda: None)
        jobs = [rows.begin(keys, [(index, index) for index in range(at, at + 2)], is_load=False) for at in (0, 2, 4)]
        wait_for(lambda: rows.jobs.poll() or len(rows.jobs._waiting) == 6, "all to wait for slots")
    first = rows.memory[0].ctypes.data

    def failing(info: Any, slot: int, row: Any, *spans: Any, is_load: bool) -> bool:
        return row.ctypes.data != first and copy(info, slot, row, *spans, is_load=is_load)

    monkeypatch.setattr(rows.jobs._arena, "copy", failing)
    assert rows.jobs.client.take_slot == take_slot
    assert rows.end(*jobs) == [[False] * 2] * 3
    assert not rows.jobs._storing
    wait_for(lambda: rows.jobs.poll() or figures(rows.root)["hierarchy"]["reserved_slots"] == 0, "slots to come back")


def with_a_slot(start: Start) -> tuple[Rows, SlotId, SessionInfo]:
    """Rows whose session has taken an empty slot."""
    rows = start()
    client = rows.jobs.client
    wait_for(lambda: client.poll() or client.take_slot() is not None, "a slot")
    (slot,), info = client._taken, client.info
    assert info is not None
    return rows, slot, info


@through_slots
def test_a_copy_is_made_in_its_own_sessions_arena_or_not_at_all(start: Start) -> None:
    """Of another session the slot is somebody else's: nobody looks at the bytes of one that is sealed once more."""
    rows, slot, info = with_a_slot(start)
    client, arena = rows.jobs.client, rows.jobs._arena
    rows.memory[0], rows.memory[1] = 3, 5
    assert arena.copy(info, slot, rows.memory[0], rows.jobs._whole, is_load=False)
    another = replace(info, generation=info.generation + 1)
    assert not arena.copy(another, slot, rows.memory[1], rows.jobs._whole, is_load=False)
    assert not arena.copy(another, slot, rows.memory[1], rows.jobs._whole, is_load=True)
    assert arena.copy(info, slot, rows.memory[2], rows.jobs._whole, is_load=True)
    assert (rows.memory[1] == 5).all() and (rows.memory[2] == 3).all()
    client.give_back([slot])


@through_slots
def test_an_arena_stays_mapped_while_something_copies_and_no_longer(start: Start) -> None:
    rows, slot, info = with_a_slot(start)
    arena = rows.jobs._arena
    with pytest.raises(ValueError, match="broadcast"):
        arena.copy(info, slot, rows.memory[0, :10], rows.jobs._whole, is_load=False)
    is_in, go_on = threading.Event(), threading.Event()

    class SlowRow:
        def __getitem__(self, part: slice) -> Any:
            is_in.set()
            assert go_on.wait(30)
            return rows.memory[0][part]

    copied: list[bool] = []
    copying = threading.Thread(
        target=lambda: copied.append(arena.copy(info, slot, SlowRow(), rows.jobs._whole, is_load=False))
    )
    copying.start()
    try:
        assert is_in.wait(30)
        arena.want(info.generation + 1)
        assert arena.generation == info.generation, "what is copied to would be unmapped"
    finally:
        go_on.set()
        copying.join()
    assert copied == [True]
    arena.want(info.generation + 1)
    assert arena.generation == -1
