"""Rows that the server reads and writes itself: no slot and no copy, and nothing in a row after its job's end."""

import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.kit.server.clients import namespace_fields
from tests.kit.server.probe import figures, server_pid, wait_for, wait_written
from tests.kit.server.processes import is_alive, kill_server, stopped_server
from tests.kit.storage.disk_probe import blob_files, blob_path
from tests.kit.vllm.row_engine import ROW_BYTES, ROWS, TOKENS, Rows, fill, prompt, shared_rows
from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.keys.row_names import row_key
from tiered_kv.server import protocol as m
from tiered_kv.server import worker_client
from tiered_kv.server.row_loan import server_pidfd
from tiered_kv.server.sessions import loan_problem
from tiered_kv.server.worker_client import pages_on_the_wire
from tiered_kv.tiers.base import BlobName
from tiered_kv.vllm import row_jobs, row_memory
from tiered_kv.vllm.row_memory import NotShared, UseEnd, shared_region

Start = Callable[..., Rows]


@pytest.fixture
def start(root: Path) -> Iterator[Start]:
    started: list[Rows] = []

    def begin(**more: object) -> Rows:
        started.append(Rows(root, is_shared=True, **more))
        return started[-1]

    yield begin
    for one in started:
        one.jobs.close()


def host_chunks(root: Path) -> int:
    return figures(root)["hierarchy"]["host_ready_chunks"]


def test_a_row_that_is_told_stored_is_in_a_file_and_in_no_slot(start: Start) -> None:
    rows, keys = start(), prompt(1, 40)
    before = fill(rows, 1)
    assert rows.store(keys) == [True] * 40
    assert len(blob_files(rows.root)) == 40
    assert rows.load(keys, into=100) == [True] * 40
    assert np.array_equal(rows.memory[100:140], before[:40])
    seen = figures(rows.root)
    assert host_chunks(rows.root) == 0 and seen["hierarchy"]["reserved_slots"] == 0
    assert not rows.jobs._threads._threads, "a thread of the engine copied"


def test_a_store_in_line_behind_another_of_its_prompt_waits_from_its_turn_on(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes 1.5 s for each row here: by a clock of the test's, which hears of the rows one by one."""
    rows, keys = start(), prompt(1, 6)
    fill(rows, 1)
    clock = SimpleNamespace(now_s=time.monotonic(), sleep=time.sleep)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(row_jobs, "time", clock)
    take_ended = rows.jobs.uses.take_ended
    kept: list[tuple[int, int, UseEnd]] = []
    told: list[tuple[int, int, UseEnd]] = []

    def take_told() -> list[tuple[int, int, UseEnd]]:
        kept.extend(take_ended())
        heard, told[:] = list(told), []
        return heard

    monkeypatch.setattr(rows.jobs.uses, "take_ended", take_told)
    jobs = [rows.begin(keys, [(index, index) for index in (2 * n, 2 * n + 1)], is_load=False) for n in range(3)]
    wait_for(lambda: rows.jobs.poll() or len(kept) == 6, "the server to write all")
    for end in sorted(kept[:]):
        clock.now_s += row_jobs.WRITE_WAIT_S * 3 / 4
        told.append(end)
        rows.jobs.poll()
        assert not any(job.is_over for job in rows.jobs._jobs.values()), "rows in line were given up"
    assert rows.end(*jobs) == [[True, True]] * 3
    kept.clear()
    late = rows.begin(prompt(2, 2), [(0, 0), (1, 1)], is_load=False)
    wait_for(lambda: rows.jobs.poll() or len(kept) == 2, "the server to write these")
    clock.now_s += row_jobs.WRITE_WAIT_S + 1
    rows.jobs.poll()
    assert rows.jobs._jobs[late].is_asked_back or rows.jobs._jobs[late].is_over, "nothing came since its turn"
    told += kept
    assert rows.end(late) == [[True, True]], "what was told too late is in files all the same"


def test_rows_are_asked_for_in_few_messages(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, keys = start(), prompt(1, 40)
    before = fill(rows, 1)
    rows.store(keys)
    rows.jobs._read_max = 16  # at once
    load, asked = rows.jobs.uses.load, list[int]()
    monkeypatch.setattr(
        rows.jobs.uses, "load", lambda job, of, session: asked.append(len(of)) or load(job, of, session)
    )
    assert rows.load(keys, into=100) == [True] * 40
    assert np.array_equal(rows.memory[100:140], before[:40])
    assert sum(asked) == 40 and all(count >= 4 for count in asked[:-1])


def test_a_load_of_many_rows_is_not_kept_waiting_by_small_ones_behind_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, keys = start(), prompt(1, 40)
    before = fill(rows, 1)
    rows.store(keys)
    rows.jobs._read_max = 16
    rows.jobs.uses.reading += 15  # for others: one row could be asked for
    load, asked = rows.jobs.uses.load, list[int]()
    monkeypatch.setattr(rows.jobs.uses, "load", lambda job, of, session: asked.append(job) or load(job, of, session))
    large = rows.begin(keys, [(index, 100 + index) for index in range(40)], is_load=True)
    small = [rows.begin(keys, [(0, 200 + number)], is_load=True) for number in range(5)]
    rows.jobs.poll()
    rows.jobs.poll()
    assert not asked
    rows.jobs.uses.reading -= 15
    assert rows.end(large, *small) == [[True] * 40, *[[True]] * 5]
    assert asked[-5:] == small and set(asked[:-5]) == {large}
    assert np.array_equal(rows.memory[100:140], before[:40])
    assert all(np.array_equal(rows.memory[200 + number], before[0]) for number in range(5))


def test_what_is_in_the_servers_memory_comes_through_a_slot_and_the_rest_does_not(start: Start) -> None:
    rows, keys = start(), prompt(2, 30)
    before = fill(rows, 2)
    rows.store(keys)
    rows.jobs.client.look_up_rows(keys[5:12], may_search=False)  # leases: it is promoted

    def is_here() -> bool:
        rows.jobs.poll()
        return host_chunks(rows.root) == 7

    wait_for(is_here, "a promotion")
    rows.jobs._read_max = 4  # the load's rows are asked for, and end, in many parts
    first = figures(rows.root)["tokens"]
    assert rows.load(keys, into=100) == [True] * 30
    assert np.array_equal(rows.memory[100:130], before[:30])
    wait_for(lambda: figures(rows.root)["tokens"]["lookups"] > first["lookups"], "the load to be counted")
    seen = figures(rows.root)["tokens"]
    assert seen["lookups"] == first["lookups"] + 1
    assert (seen["asked_chunks"], seen["hit_chunks"]) == (first["asked_chunks"] + 30, first["hit_chunks"] + 30)
    assert seen["decisions"]["awaited"] == first["decisions"]["awaited"] + 1


def test_a_server_that_stands_still_with_rows_is_ended_and_no_row_is_touched_afterwards(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(row_memory, "FENCE_S", 0.2)
    rows, keys = start(), prompt(3, 60)
    before = fill(rows, 3)
    rows.store(keys)
    pid = server_pid(rows.root)
    job = rows.begin(keys, [(index, 100 + index) for index in range(60)], is_load=True, wait_s=0.1)
    rows.jobs.poll()  # it is told
    with caplog.at_level(logging.ERROR):
        os.kill(pid, signal.SIGSTOP)
        (good,) = rows.end(job)
    for index, is_good in enumerate(good):
        assert not is_good or np.array_equal(rows.memory[100 + index], before[index])
    if not all(good):  # it was quick otherwise, before it stood still
        assert "stands still with rows" in caplog.text and not is_alive(pid)
    else:
        os.kill(pid, signal.SIGCONT)
    rows.memory[100:] = 7
    wait_for(lambda: rows.jobs.poll() or rows.jobs.uses.is_lent, "a new loan", deadline_s=60)
    assert rows.memory[100:].min() == rows.memory[100:].max() == 7
    assert rows.load(keys, into=100) == [True] * 60


def test_rows_of_a_session_that_was_lost_come_back_when_its_server_has_let_go_of_them_and_not_before(
    start: Start,
) -> None:
    """It lives, and may be in the middle of a read; that this engine hears nothing from it any more ends no read."""
    rows, keys = start(), prompt(14, 20)
    fill(rows, 14)
    rows.store(keys)
    client = rows.jobs.client
    with stopped_server(rows.root):
        job = rows.begin(keys, [(index, 100 + index) for index in range(20)], is_load=True)
        rows.jobs.poll()  # it is told
        assert client._sock is not None
        client._sock.shutdown(socket.SHUT_RDWR)
        wait_for(lambda: rows.jobs.poll() or client.generation == 1, "the end of the session")
        for _ in range(20):
            assert not rows.jobs.take_done(), "vLLM would use the rows"
    assert rows.end(job) == [[False] * 20]
    rows.memory[100:] = 7
    wait_for(lambda: rows.jobs.poll() or rows.jobs.uses.is_lent, "a new loan", deadline_s=60)
    assert rows.memory[100:].min() == rows.memory[100:].max() == 7
    assert rows.load(keys, into=100) == [True] * 20


def test_uses_that_could_not_be_asked_for_take_nobodys_room(start: Start) -> None:
    rows, keys = start(), prompt(15, 4)
    names = rows.names(keys)
    wait_written(rows.root)
    with stopped_server(rows.root):
        rows.jobs.client.reset()  # until it is done nothing is asked for
        uses = rows.jobs.uses
        assert not uses.load(1, [(0, 5, keys[0]), (1, 6, keys[1])], b"")
        assert not uses.store(2, [(0, 7, names.record(0, bytes(16)))])
        assert (uses.reading, len(uses._uses), len(uses._of_jobs), +uses._running) == (0, 0, 0, {})


def test_rows_that_were_never_begun_come_back_from_a_server_that_goes_on_in_time(start: Start) -> None:
    rows, keys = start(), prompt(4, 20)
    fill(rows, 4)
    rows.store(keys)
    pid = server_pid(rows.root)
    with stopped_server(rows.root):
        job = rows.begin(keys, [(index, 100 + index) for index in range(20)], is_load=True, wait_s=0.05)
        for _ in range(20):
            rows.jobs.poll()
        rows.memory[100:] = 9
        going_on = threading.Timer(0.5, os.kill, (pid, signal.SIGCONT))
        going_on.start()
        rows.end(job)
        going_on.join()
    assert is_alive(pid) and rows.jobs.client.generation == 0


def test_an_engine_that_stood_still_itself_does_not_end_its_server_for_that(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a container with both is paused: the engine is the first that goes on."""
    monkeypatch.setattr(row_memory, "FENCE_S", 4.0)
    rows, keys = start(), prompt(11, 20)
    fill(rows, 11)
    rows.store(keys)
    pid = server_pid(rows.root)
    with stopped_server(rows.root):
        job = rows.begin(keys, [(index, 100 + index) for index in range(20)], is_load=True, wait_s=0.05)
        wait_for(lambda: rows.jobs.poll() or rows.jobs._jobs[job].is_asked_back, "the end of the job's time")
        time.sleep(4.5)  # it looks at nothing meanwhile
        rows.jobs.poll()
    rows.end(job)
    assert is_alive(pid) and rows.jobs.client.generation == 0


def test_an_engine_without_jobs_keeps_nothing_of_servers_that_are_gone(start: Start) -> None:
    rows = start()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        kill_server(rows.root)
        wait_for(lambda: rows.jobs.poll() or not rows.jobs.is_ready, "the end of a session", deadline_s=60)
        wait_for(lambda: rows.jobs.poll() or rows.jobs.is_ready, "another session", deadline_s=60)
    assert len(os.listdir("/proc/self/fd")) <= before + 1, "a loan is two descriptors"


def test_a_loan_that_finds_no_descriptors_leaves_none_open(start: Start) -> None:
    """It is tried again for as long as there are none, and would take one each time."""
    rows = start()
    worker, fd, taken = rows.jobs._arena._worker, shared_region(rows.memory), list[int]()
    assert worker is not None
    before, limits = os.listdir("/proc/self/fd"), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, before)) + 2, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(fd))
        os.close(taken.pop())  # enough to look at the server, and not for a pipe
        with pytest.raises(OSError, match="Too many open files"):
            worker.lend_rows(fd, ROWS, ROW_BYTES)
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert os.listdir("/proc/self/fd") == before
    os.close(fd)


def test_jobs_that_end_at_once_have_all_uses_looked_at_once_and_not_once_for_each(start: Start) -> None:
    class Counted(dict[int, Any]):
        looks = 0

        def items(self) -> Any:
            self.looks += 1
            return super().items()

    rows, keys = start(), prompt(12, 40)
    fill(rows, 12)
    rows.store(keys)
    with stopped_server(rows.root):
        jobs = [rows.begin(keys[index:], [(0, 100 + index)], is_load=True, wait_s=0.0) for index in range(40)]
        rows.jobs.uses._uses = uses = Counted(rows.jobs.uses._uses)
        wait_for(lambda: rows.jobs.poll() or rows.jobs._jobs[jobs[-1]].is_asked_back, "the end of the jobs' time")
        assert len(uses) == 40 and uses.looks <= 2, "once in a poll"
    rows.end(*jobs)
    assert not uses and not rows.jobs.uses._of_jobs


def test_every_use_ends_also_where_a_reset_overtakes_it(start: Start) -> None:
    rows, keys = start(), prompt(10, 60)
    fill(rows, 10)
    rows.store(keys)
    with stopped_server(rows.root):  # it hears both at once
        job = rows.begin(keys, [(index, 100 + index) for index in range(60)], is_load=True)
        rows.jobs.poll()
        rows.jobs.client.reset()
    rows.end(job)
    assert rows.jobs.client.generation == 0 and is_alive(server_pid(rows.root))
    rows.store(keys)
    assert figures(rows.root)["hierarchy"]["sessions"] == 1, "a session from before the reset"


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork beside threads
def test_a_server_that_may_not_be_ended_is_not_lent_rows() -> None:
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        os.setuid(65534)
        os._exit(server_pidfd(ours) is not None)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pidfd = server_pidfd(ours)
    assert pidfd is not None
    os.close(pidfd)
    ours.close()
    theirs.close()


def test_a_region_that_is_cut_costs_its_rows_and_not_the_server(start: Start) -> None:
    rows, keys = start(), prompt(5, 10)
    fill(rows, 5)
    rows.store(keys)
    pid, fd = server_pid(rows.root), shared_region(rows.memory)
    os.ftruncate(fd, ROW_BYTES)
    job = rows.begin(keys, [(index, 100 + index) for index in range(10)], is_load=True)
    other = rows.begin(prompt(6, 10), [(index, 50 + index) for index in range(10)], is_load=False)
    assert rows.end(job, other) == [[False] * 10, [False] * 10]
    os.ftruncate(fd, ROWS * ROW_BYTES)
    os.close(fd)
    assert rows.load(keys, into=100) == [True] * 10
    assert server_pid(rows.root) == pid and is_alive(pid) and rows.jobs.client.generation == 0


def test_damage_in_files_is_found_by_the_server_that_reads_into_the_rows(start: Start) -> None:
    rows, keys = start(), prompt(7, 9)
    before = fill(rows, 7)
    rows.store(keys)
    for number, path in enumerate(blob_files(rows.root)[:6]):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        if number % 3 == 0:
            path.unlink()
        else:
            path.write_bytes(data if number % 3 == 1 else data[: len(data) // 2])
    good = rows.load(keys, into=100)
    assert sum(good) == 3
    for index, is_good in enumerate(good):
        assert not is_good or np.array_equal(rows.memory[100 + index], before[index])
    wait_written(rows.root)
    assert rows.held(keys) < 9
    rows.memory[:] = before

    def is_mended() -> bool:
        return rows.store(keys) == [True] * 9

    wait_for(is_mended, "bad blobs to be deleted, and stored again")
    assert rows.load(keys, into=100) == [True] * 9
    assert np.array_equal(rows.memory[100:109], before[:9])


@pytest.mark.parametrize("why", ["second-touch", "unseen"])
def test_where_the_server_does_not_take_rows_they_go_through_slots_and_the_log_says_why(
    start: Start, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if why == "unseen":
        monkeypatch.setattr(worker_client, "server_pidfd", lambda _sock: None)
    with caplog.at_level(logging.WARNING):
        rows = start(**({"disk_admission": "second-touch"} if why == "second-touch" else {}))
    said = {"second-touch": "not every chunk is written to disk", "unseen": "the server's process cannot be seen"}
    assert f"rows go through slots of the cache server, and are copied: {said[why]}" in caplog.text
    assert not rows.jobs.uses.is_lent
    keys, before = prompt(8, 12), fill(rows, 8)
    assert rows.store(keys) == [True] * 12
    wait_for(lambda: host_chunks(rows.root) == 12, "chunks in slots")
    assert rows.load(keys, into=100) == [True] * 12
    assert np.array_equal(rows.memory[100:112], before[:12])


@pytest.mark.parametrize(
    ("page", "blocks", "chunk_bytes"),
    [
        (LayerPage("row", "U8", (ROW_BYTES,), "B"), 1, ROW_BYTES),
        (LayerPage("row", "BF16", (ROW_BYTES // 2,), "B"), 1, ROW_BYTES),
        (LayerPage("row", "BF16", (ROW_BYTES,), "B"), 1, 2 * ROW_BYTES),
        (LayerPage("row", "U8", (ROW_BYTES,), "B"), 2, 2 * ROW_BYTES),
        (LayerPage("row", "U8", (ROW_BYTES,), "B", blocks=3), 4, 3 * ROW_BYTES),
    ],
)
def test_rows_are_lent_only_where_a_chunk_has_the_bytes_of_a_row(
    page: LayerPage, blocks: int, chunk_bytes: int
) -> None:
    join = m.JoinWorker(0, 1, TOKENS, blocks * TOKENS, namespace_fields(), pages_on_the_wire([page]))
    said = loan_problem(join, m.LendRows(ROWS, ROW_BYTES))
    expected = f"a chunk is not a whole row. row_bytes={ROW_BYTES} chunk_bytes={chunk_bytes}"
    assert said == ("" if chunk_bytes == ROW_BYTES else expected)


def test_memory_of_one_process_is_no_region() -> None:
    memory = np.zeros((4, 4096), np.uint8)
    with pytest.raises(NotShared, match="this process alone"):
        shared_region(memory)
    shared = shared_rows()
    with pytest.raises(NotShared, match="beginning of one file"):
        shared_region(shared[1:])
    with pytest.raises(NotShared, match="follow each other"):
        shared_region(shared[::2])
    os.close(shared_region(shared))


def test_an_engine_without_a_descriptor_to_spare_begins_without_lending_its_rows(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    uses, memory, taken = start().jobs.uses, shared_rows(), list[int]()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        with caplog.at_level(logging.WARNING):
            assert row_jobs._lending(memory, uses) is None
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "rows go through slots of the cache server, and are copied: [Errno 24] Too many open files" in caplog.text


def test_a_store_beyond_what_a_session_may_use_at_once_does_not_begin_and_the_session_goes_on(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many jobs as there are, as where thousands of small rows wait for a disk that hangs."""
    monkeypatch.setattr(row_memory, "STORED_MAX", 12, raising=False)
    rows = start()
    fill(rows, 1)
    uses, client, ended = rows.jobs.uses, rows.jobs.client, list[tuple[int, int, UseEnd]]()
    generation = client.generation
    stores = []
    for job in range(3):
        names = rows.names(prompt(job, 10))
        stores.append([(n, 10 * job + n, names.record(n, bytes(16))) for n in range(10)])

    def have_ended(count: int) -> bool:
        client.poll()
        ended.extend(uses.take_ended())
        return len(ended) == count

    with stopped_server(rows.root):
        assert uses.store(0, stores[0]) and not uses.store(1, stores[1])
    wait_for(lambda: have_ended(10), "the first store")
    assert uses.store(2, stores[2]), "there is room again"
    wait_for(lambda: have_ended(20), "the last store")
    assert {(job, end) for job, _, end in ended} == {(0, UseEnd.GOOD), (2, UseEnd.GOOD)}
    assert client.generation == generation
    whole = rows.begin(prompt(4, 13), [(n, n) for n in range(13)], is_load=False)
    assert rows.end(whole) == [[False] * 13] and rows.store(prompt(4, 12)) == [True] * 12


def test_behind_a_row_that_does_not_come_nothing_more_is_asked_for(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM takes none of it: it is the disk of others that would be read."""
    rows, keys = start(), prompt(13, 40)
    fill(rows, 13)
    rows.store(keys)
    wait_written(rows.root)
    space = rows.jobs.namespace
    assert space is not None
    blob_path(rows.root, BlobName(space.digest, row_key(space, keys[0]))).unlink()
    rows.jobs._read_max = 4  # at once
    load, asked = rows.jobs.uses.load, list[int]()
    monkeypatch.setattr(
        rows.jobs.uses, "load", lambda job, of, session: asked.append(len(of)) or load(job, of, session)
    )
    good = rows.load(keys, into=100)
    assert not good[0] and sum(asked) < 40 and sum(good) < sum(asked)
