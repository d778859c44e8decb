"""Rows that an engine lent, with real threads and a real disk: right bytes, and none after a use is over."""

import dataclasses
import fcntl
import logging
import mmap
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path as FilePath

import pytest

from tests.kit.engine_world import BLOB_BYTES, GEOMETRIES, SPACES, EngineWorld, Path, payload_of
from tests.kit.module_process import module_environment
from tests.kit.server.probe import wait_for
from tests.kit.storage.disk_probe import blob_files, blob_path, open_disk, temp_files
from tiered_kv.engine import lent_rows
from tiered_kv.engine.executor import ThreadExecutor
from tiered_kv.engine.lent_rows import LentRows, RowGone
from tiered_kv.errors import ConfigError, TierUnavailable
from tiered_kv.tiering.types import RowsEnded, RowUse, WriteRow
from tiered_kv.tiers.base import BlobName, TierWrapper

ROWS = 24
SPACE, GEOMETRY = SPACES["small"], GEOMETRIES["small"]
ROW_BYTES = GEOMETRY.payload_bytes
HEADER_BYTES = BLOB_BYTES - ROW_BYTES
DEADLINE_S = 60


class Hanging(TierWrapper):
    """A disk whose reads or writes stop in the middle until they are let go.

    Attributes:
        late: The blob that was written and waits to be published.
        fails: How it ends then.
    """

    def __init__(self, root: FilePath) -> None:
        super().__init__(open_disk(root))
        self.hangs_reads = self.hangs_writes = self.fails = self.fails_deletes = False
        self.late: BlobName | None = None
        self.is_in, self.go_on = threading.Semaphore(0), threading.Event()

    def put(self, name: BlobName, blob: memoryview) -> None:
        self._hang(self.hangs_writes)
        self.inner.put(name, blob)

    def put_if(self, name: BlobName, blob: memoryview, is_wanted: Callable[[], bool]) -> bool:
        def asked() -> bool:
            self._hang(name == self.late)
            if self.fails and name == self.late:
                raise TierUnavailable("the disk is gone")
            return is_wanted()

        return super().put_if(name, blob, is_wanted) if self.late is None else self.inner.put_if(name, blob, asked)

    def delete(self, name: BlobName) -> bool:
        if self.fails_deletes:
            raise TierUnavailable("no delete")
        return self.inner.delete(name)

    def get_into(self, name: BlobName, buffer: memoryview) -> bool:
        buffer[: HEADER_BYTES + ROW_BYTES // 2] = b"\xbb" * (HEADER_BYTES + ROW_BYTES // 2)
        self._hang(self.hangs_reads)
        buffer[:] = b"\xcc" * len(buffer)
        return self.inner.get_into(name, buffer)

    def _hang(self, hangs: bool) -> None:
        if hangs:
            self.is_in.release()
            assert self.go_on.wait(DEADLINE_S)


class RowWorld(EngineWorld):
    """An engine over a disk, with one session that lent its rows."""

    def __init__(self, root: FilePath) -> None:
        self.disk = Hanging(root)
        super().__init__(self.disk, executor=ThreadExecutor())
        self.fd = os.memfd_create("rows")
        os.ftruncate(self.fd, ROWS * ROW_BYTES)
        self.memory = mmap.mmap(self.fd, ROWS * ROW_BYTES)
        self.watched, lifeline = os.pipe()
        self.lent = LentRows(os.dup(self.fd), lifeline, ROWS, ROW_BYTES)
        self.session = self.open()
        self.engine.take_rows(self.session, self.lent)
        self.ends: dict[int, str] = {}
        self._last = 0

    def step(self) -> None:
        for update in self.engine.step():
            if isinstance(update, RowsEnded):
                for end in ("good", "bad", "elsewhere"):
                    for number in getattr(update, end):
                        assert number not in self.ends, "a use ended twice"
                        self.ends[number] = end
        self.tiering.check_integrity()

    def until(self, *uses: RowUse) -> list[str]:
        self.step()
        while not self.ends.keys() >= {use.id for use in uses}:
            assert select.select([self.executor.fileno()], [], [], DEADLINE_S)[0], "nothing happens"
            self.step()
        return [self.ends[use.id] for use in uses]

    def use(self, row: int) -> RowUse:
        self._last += 1
        return RowUse(self.session, self._last, row)

    def row(self, row: int) -> bytes:
        return self.memory[row * ROW_BYTES : (row + 1) * ROW_BYTES]

    def fill(self, row: int, content: bytes) -> None:
        self.memory[row * ROW_BYTES : (row + 1) * ROW_BYTES] = content

    def content(self, path: Path) -> bytes:
        return payload_of(SPACE.record(path).key, GEOMETRY.data_bytes).ljust(ROW_BYTES, b"\0")

    def store(self, *placed: tuple[Path, int]) -> list[RowUse]:
        rows = [(self.use(row), SPACE.record(path)) for path, row in placed]
        for path, row in placed:
            self.fill(row, self.content(path))
        self.engine.store_rows(self.session, rows)
        return [use for use, _ in rows]

    def load(self, *placed: tuple[Path, int]) -> list[RowUse]:
        rows = [(self.use(row), SPACE.record(path).key, SPACE.record(path).prefix_sha256) for path, row in placed]
        self.engine.load_rows(self.session, rows, b"")
        return [use for use, _, _ in rows]

    def is_let_go(self) -> bool:
        return bool(select.select([self.watched], [], [], 0)[0])


@pytest.fixture
def world(tmp_path: FilePath) -> Iterator[RowWorld]:
    made = RowWorld(tmp_path)
    yield made
    made.disk.go_on.set()
    while made.tiering.pending_writes:
        made.step()
    assert made.errors.messages == []
    assert made.lent._open.isdisjoint(made.ends), "uses that are over are remembered"
    assert not made.engine._row_writes._writes, "writes that are over are remembered"
    made.lent.close()
    made.engine.close()
    made.abandon()
    os.close(made.watched)
    os.close(made.fd)


PREFIX = ((1,), (1, 2), (1, 2, 3), (1, 2, 3, 4))


def place(*paths: Path, first: int = 0) -> list[tuple[Path, int]]:
    return [(path, first + number) for number, path in enumerate(paths)]


def test_rows_are_stored_and_read_without_a_slot(world: RowWorld, tmp_path: FilePath) -> None:
    assert world.until(*world.store(*place(*PREFIX))) == ["good"] * 4
    assert len(blob_files(tmp_path)) == 4 and world.tiering.usage()["host_ready_chunks"] == 0
    assert world.until(*world.load(*place(*PREFIX, first=10))) == ["good"] * 4
    for number, path in enumerate(PREFIX):
        assert world.row(10 + number) == world.content(path)
        assert world.row(number) == world.content(path), "a store changed its row"
    assert not any(world.row(14)) and not any(world.row(9)), "a row nobody asked for"
    assert world.engine.read_bytes_per_s(1) is not None
    assert world.tiering.usage()["host_ready_chunks"] == 0


def test_rows_are_taken_only_where_a_read_that_hangs_can_be_kept_out_of_them(world: RowWorld) -> None:
    assert world.engine.takes_rows() == ""
    disk = world.engine.tiers[1]
    disk.traits = dataclasses.replace(disk.traits, reads_by_address=False)  # a directory on FUSE
    assert "may still fill memory" in world.engine.takes_rows()


def test_what_is_stored_in_a_slot_is_read_into_a_row_and_the_other_way_round(world: RowWorld) -> None:
    while not world.clients[world.session].credits:
        for update in world.engine.step():
            if type(update).__name__ == "SlotGrant":
                world.clients[world.session].credits.extend(update.slots)
    assert world.commit(world.session, (7,))
    assert world.until(*world.load(((7,), 3))) == ["elsewhere"], "it is in host memory"
    while world.tiering.pending_writes:
        world.step()
    list(world.tiering.removing(0, SPACE.namespace, None, leaves_holes=True))
    assert world.until(*world.load(((7,), 3))) == ["good"]
    assert world.row(3) == world.content((7,))
    assert world.until(*world.store(((7,), 4))) == ["good"], "it is held"
    assert world.tiering.counters["store_duplicate"] == 1


def test_children_are_written_behind_their_parents_and_not_without(world: RowWorld, tmp_path: FilePath) -> None:
    assert world.until(*world.store(((5, 6), 0))) == ["bad"]
    assert world.tiering.counters["row_dropped_no_parent"] == 1 and len(world.tiering.index) == 0
    world.disk.hangs_writes = True
    uses = world.store(*place(*PREFIX))
    world.step()
    assert world.disk.is_in.acquire(timeout=DEADLINE_S)
    assert blob_files(tmp_path) == [] and not world.ends.keys() & {use.id for use in uses}
    world.disk.go_on.set()
    assert world.until(*uses) == ["good"] * 4


@pytest.fixture
def three_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows of a prefix than it has are written beside each other."""
    monkeypatch.setattr("tiered_kv.engine.row_writes.WRITES_AT_ONCE", len(PREFIX) - 1)


def written_and_waiting(world: RowWorld, root: FilePath) -> list[RowUse]:
    """Rows of one prefix, the first of which is just not in the disk yet; of those behind it all but one have files."""
    world.disk.late = BlobName.of(SPACE.record(PREFIX[0]))
    uses = world.store(*place(*PREFIX))
    world.step()
    assert world.disk.is_in.acquire(timeout=DEADLINE_S)
    wait_for(lambda: len(temp_files(root)) == len(PREFIX) - 1, "the next row to be written beside it")
    assert blob_files(root) == [] and not world.ends
    return uses


@pytest.mark.usefixtures("three_at_once")
def test_rows_of_a_prefix_are_written_beside_each_other_and_appear_one_behind_the_other(
    world: RowWorld, tmp_path: FilePath
) -> None:
    uses = written_and_waiting(world, tmp_path)
    world.disk.go_on.set()
    assert world.until(*uses) == ["good"] * 4 and temp_files(tmp_path) == []
    assert world.until(*world.load(*place(*PREFIX, first=10))) == ["good"] * 4
    assert [world.row(10 + number) for number in range(4)] == list(map(world.content, PREFIX))


@pytest.mark.usefixtures("three_at_once")
def test_a_row_that_waits_for_the_one_before_it_is_told_when_that_is_there(
    world: RowWorld, tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not find out by looking now and then: a prompt has hundreds."""
    monkeypatch.setattr("tiered_kv.engine.row_writes.LOOK_S", 10 * DEADLINE_S)
    uses = written_and_waiting(world, tmp_path)
    world.disk.go_on.set()
    assert world.until(*uses) == ["good"] * 4


@pytest.mark.usefixtures("three_at_once")
def test_a_row_that_was_written_beside_one_that_failed_is_not_there(world: RowWorld, tmp_path: FilePath) -> None:
    uses = written_and_waiting(world, tmp_path)
    world.disk.fails = True
    world.disk.go_on.set()
    assert world.until(*uses) == ["bad"] * 4
    assert blob_files(tmp_path) == [] and temp_files(tmp_path) == [] and len(world.tiering.index) == 0
    assert world.tiering.counters["row_dropped_no_parent"] == 3
    assert world.tiering.counters["write_failed_unavailable"] == 1
    world.disk.fails, world.disk.late = False, None
    assert world.until(*world.store(*place(*PREFIX))) == ["good"] * 4


def test_a_row_that_is_handed_out_while_the_end_of_its_parents_write_waits_to_be_heard_is_not_there_either(
    world: RowWorld, tmp_path: FilePath
) -> None:
    world.disk.late, world.disk.fails = BlobName.of(SPACE.record(PREFIX[0])), True
    parent = world.store((PREFIX[0], 0))
    world.step()
    assert world.disk.is_in.acquire(timeout=DEADLINE_S)
    world.disk.go_on.set()
    wait_for(lambda: any(isinstance(job, WriteRow) for job, _ in list(world.engine._finished)), "the write to end")
    children = world.store((PREFIX[1], 1), ((1, 9), 2))  # the engine has not taken that in
    assert world.until(*parent, *children) == ["bad"] * 3
    assert blob_files(tmp_path) == [] and temp_files(tmp_path) == [] and len(world.tiering.index) == 0
    assert world.tiering.counters["row_dropped_no_parent"] == 2
    world.disk.fails, world.disk.late = False, None
    assert world.until(*world.store(*place(*PREFIX))) == ["good"] * 4
    assert world.until(*world.load(*place(*PREFIX, first=10))) == ["good"] * 4
    assert [world.row(10 + number) for number in range(4)] == list(map(world.content, PREFIX))


@pytest.mark.usefixtures("three_at_once")
def test_a_row_that_is_taken_back_between_its_write_and_its_name_is_in_no_file(
    world: RowWorld, tmp_path: FilePath
) -> None:
    uses = written_and_waiting(world, tmp_path)
    world.engine.end_rows(world.session, uses)
    assert world.until(*uses) == ["bad"] * 4
    for row in range(4):
        world.fill(row, b"\x66" * ROW_BYTES)
    world.disk.go_on.set()
    while world.tiering.pending_writes:
        world.step()
    assert blob_files(tmp_path) == [] and temp_files(tmp_path) == [] and len(world.tiering.index) == 0


@pytest.mark.usefixtures("three_at_once")
def test_a_write_that_hangs_keeps_the_threads_of_those_behind_it_no_longer_than_their_rows_are_lent(
    world: RowWorld, tmp_path: FilePath
) -> None:
    uses = written_and_waiting(world, tmp_path)
    world.engine.end_rows(world.session, uses)
    assert world.until(*uses) == ["bad"] * 4
    wait_for(lambda: len(temp_files(tmp_path)) == 1, "all but the one that hangs to give up")
    assert world.until(*world.store(((7,), 5), ((8,), 6), ((9,), 7))) == ["good"] * 3, "other prefixes go on"
    assert len(blob_files(tmp_path)) == 3 and len(temp_files(tmp_path)) == 1


def test_damage_is_found_before_the_engine_is_told(world: RowWorld, tmp_path: FilePath) -> None:
    world.until(*world.store(*place(*PREFIX)))
    files = [blob_path(tmp_path, BlobName.of(SPACE.record(path))) for path in PREFIX]
    data = bytearray(files[0].read_bytes())
    data[-7000] ^= 1
    files[0].write_bytes(data)
    os.truncate(files[1], 5000)
    files[2].unlink()
    uses = world.load(*place(*PREFIX, first=10))
    assert world.until(*uses) == ["bad", "bad", "bad", "good"]
    assert world.row(13) == world.content(PREFIX[3])
    for outcome in ("corrupt", "missing"):
        assert world.tiering.counters[f"read_failed_{outcome}"] >= 1
    while world.until(*world.store(*place(*PREFIX))) != ["good"] * 4:
        pass  # the bad blobs are just being deleted
    assert world.until(*world.load(*place(*PREFIX, first=10))) == ["good"] * 4


def test_a_row_that_was_taken_back_is_never_written_however_late_the_read(world: RowWorld) -> None:
    world.until(*world.store(*place(*PREFIX)))
    world.disk.hangs_reads = True
    uses = world.load(*place(*PREFIX[:3], first=10))  # one thread stays free
    world.step()
    for _ in uses:
        assert world.disk.is_in.acquire(timeout=DEADLINE_S)
    assert world.row(10)[0] == 0xBB, "no read was in the middle of it"
    world.engine.end_rows(world.session, uses)
    for row in range(10, 13):
        world.fill(row, b"\x55" * ROW_BYTES)  # the engine's from now on
    assert world.until(*uses) == ["bad"] * 3
    world.disk.hangs_reads = False
    again = world.load((PREFIX[0], 10))  # the row is used anew while the old read still hangs
    assert world.until(*again) == ["good"]
    world.disk.go_on.set()
    while world.engine.jobs(1)["get"]:
        world.step()
    assert world.row(10) == world.content(PREFIX[0])
    for row in range(11, 13):
        assert world.row(row) == b"\x55" * ROW_BYTES, "a read came late"
    assert world.tiering.counters["read_failed_corrupt"] == 0
    assert world.until(*world.load(*place(*PREFIX, first=10))) == ["good"] * 4


def test_rows_that_are_taken_back_before_they_are_read_say_nothing_of_the_disks_speed(world: RowWorld) -> None:
    """An engine that ends would have all others take the disk for one that gives nothing."""
    world.until(*world.store(*place(*PREFIX)))
    world.until(*world.load(*place(*PREFIX, first=10)))
    measured = world.engine.read_bytes_per_s(1)
    assert measured
    world.engine.end_rows(world.session, world.load(*place(*PREFIX, first=10)))
    world.step()
    while world.engine.jobs(1)["get"]:
        world.step()
    assert world.engine.read_bytes_per_s(1) == measured


@contextmanager
def hanging_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[threading.Semaphore]:
    """Calls on blobs' files stop after what the kernel did for each, until the block ends; the semaphore counts."""
    real, is_in, go_on = getattr(os, name), threading.Semaphore(0), threading.Event()

    def hanging(descriptor: int, given: list[memoryview] | memoryview, offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        is_blob = path.endswith(".safetensors") or f"/tmp/{os.getpid()}-" in path  # read, or written
        part = given if name == "preadv" else given[:4096]  # of a write the rest follows
        count = int(real(descriptor, part, offset))
        if is_blob and not go_on.is_set():
            is_in.release()
            assert go_on.wait(DEADLINE_S)
        return count

    with monkeypatch.context() as patched:
        patched.setattr(os, name, hanging)
        try:
            yield is_in
        finally:
            go_on.set()


def test_what_the_device_brings_late_gets_into_no_row_that_was_taken_back(
    world: RowWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, with reads of files: around the page cache they are copied into the row when they have ended."""
    world.until(*world.store(*place(*PREFIX)))
    with hanging_calls(monkeypatch, "preadv") as is_in:
        uses = world.load(*place(*PREFIX[:2], first=10))
        world.step()
        for _ in uses:
            assert is_in.acquire(timeout=DEADLINE_S)
        world.engine.end_rows(world.session, uses)
        for row in (10, 11):
            world.fill(row, b"\x55" * ROW_BYTES)
        assert world.until(*uses) == ["bad"] * 2
    while world.engine.jobs(1)["get"]:
        world.step()
    assert [world.row(row) for row in (10, 11)] == [b"\x55" * ROW_BYTES] * 2
    assert world.until(*world.load(*place(*PREFIX, first=10))) == ["good"] * 4
    assert [world.row(10 + number) for number in range(4)] == list(map(world.content, PREFIX))


def test_a_write_that_hangs_in_the_middle_of_its_bytes_stores_nothing_of_what_its_row_holds_later(
    world: RowWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: FilePath
) -> None:
    world.disk.late = BlobName.of(
        SPACE.record((9, 9))
    )  # so that the disk itself asks, behind the bytes; nobody writes it
    with hanging_calls(monkeypatch, "pwrite") as is_in:
        uses = world.store((PREFIX[0], 0))
        world.step()
        assert is_in.acquire(timeout=DEADLINE_S)
        world.engine.end_rows(world.session, uses)
        assert world.until(*uses) == ["bad"]
        again = world.store(((7,), 0))  # another chunk lies in the row, and is written from there at the same time
        world.step()
        assert is_in.acquire(timeout=DEADLINE_S)
    assert world.until(*again) == ["good"]
    while world.tiering.pending_writes:
        world.step()
    assert blob_files(tmp_path) == [blob_path(tmp_path, BlobName.of(SPACE.record((7,))))] and not temp_files(tmp_path)
    assert world.until(*world.load(((7,), 10), (PREFIX[0], 11))) == ["good", "bad"]
    assert world.row(10) == world.content((7,))
    assert world.until(*world.store(*place(*PREFIX))) == ["good"] * 4
    assert world.until(*world.load(*place(*PREFIX, first=10))) == ["good"] * 4
    assert [world.row(10 + number) for number in range(4)] == list(map(world.content, PREFIX))


def test_what_was_sealed_after_a_row_was_taken_back_is_in_no_file(world: RowWorld, tmp_path: FilePath) -> None:
    world.disk.hangs_writes = True
    uses = world.store(*place(*PREFIX))
    world.step()
    assert world.disk.is_in.acquire(timeout=DEADLINE_S)
    world.engine.end_rows(world.session, uses)
    world.fill(0, b"\x66" * ROW_BYTES)
    assert world.until(*uses) == ["bad"] * 4
    world.disk.go_on.set()
    while world.tiering.pending_writes or world.engine.jobs(1)["delete"]:
        world.step()
    assert blob_files(tmp_path) == [] and temp_files(tmp_path) == []
    assert len(world.tiering.index) == 0
    assert world.tiering.counters["row_dropped_taken_back"] == 4
    assert world.tiering.counters["write_failed_unavailable"] == 0
    world.disk.hangs_writes = False
    assert world.until(*world.store(*place(*PREFIX))) == ["good"] * 4
    assert world.until(*world.load(*place(*PREFIX, first=10))) == ["good"] * 4


def test_a_file_of_a_row_that_was_taken_back_and_that_cannot_be_deleted_is_accounted_for(
    world: RowWorld, tmp_path: FilePath
) -> None:
    world.disk.hangs_writes = world.disk.fails_deletes = True
    uses = world.store((PREFIX[0], 0))
    world.step()
    assert world.disk.is_in.acquire(timeout=DEADLINE_S)
    world.engine.end_rows(world.session, uses)
    world.disk.go_on.set()
    while world.tiering.pending_writes or world.engine.jobs(1)["delete"]:
        world.step()
    assert len(blob_files(tmp_path)) == 1
    assert world.tiering.tier_usage(1).used_bytes == BLOB_BYTES
    assert world.until(*world.load((PREFIX[0], 10))) == ["bad"], "it may not be what was sealed"
    world.disk.fails_deletes = world.disk.hangs_writes = False
    assert world.until(*world.store((PREFIX[0], 0))) == ["good"]
    assert world.until(*world.load((PREFIX[0], 10))) == ["good"]
    assert world.row(10) == world.content(PREFIX[0]) and world.tiering.tier_usage(1).used_bytes == BLOB_BYTES


def test_a_region_that_is_cut_costs_its_rows_and_nothing_else(world: RowWorld) -> None:
    world.until(*world.store(*place(*PREFIX)))
    os.ftruncate(world.fd, ROW_BYTES)
    assert world.until(*world.load((PREFIX[0], 10)), *[]) == ["bad"]
    rows = [(world.use(5), SPACE.record((9,)))]
    world.engine.store_rows(world.session, rows)
    assert world.until(rows[0][0]) == ["bad"]
    os.ftruncate(world.fd, ROWS * ROW_BYTES)
    assert world.until(*world.load((PREFIX[0], 10))) == ["good"], "the disk is not to blame"


@contextmanager
def no_descriptors() -> Iterator[None]:
    """No file can be opened by this process."""
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
    try:
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_without_descriptors_rows_are_misses_and_it_is_said_once(
    world: RowWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world.until(*world.store(*place(*PREFIX)))
    with no_descriptors():
        assert world.until(*world.load(*place(*PREFIX, first=10))) == ["bad"] * 4
        assert world.until(*world.store(*[((number,), number) for number in range(20, 24)])) == ["bad"] * 4
    (said,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert "EMFILE" in said.getMessage() and said.exc_info is None
    assert world.until(*world.load(*place(*PREFIX, first=10))) == ["good"] * 4
    assert [world.row(10 + number) for number in range(4)] == [world.content(path) for path in PREFIX]


def test_a_row_that_is_just_being_mapped_when_the_session_ends_is_neither_read_nor_left_open(
    world: RowWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.until(*world.store(*place(*PREFIX)))
    is_in, go_on, made = threading.Event(), threading.Event(), lent_rows._MappedRow

    def mapping(*given: int) -> object:
        is_in.set()
        assert go_on.wait(DEADLINE_S)
        return made(*given)

    monkeypatch.setattr(lent_rows, "_MappedRow", mapping)
    region_fd = world.lent._region_fd
    world.load((PREFIX[0], 10))
    world.step()
    assert is_in.wait(DEADLINE_S)
    world.engine.suspend_session(world.session)
    world.lent.close()
    assert world.is_let_go() and os.fstat(region_fd).st_size, "the row that is being mapped would be another file's"
    before = world.memory[:]
    go_on.set()
    while world.engine.jobs(1)["get"]:
        world.step()
    assert world.memory[:] == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(region_fd)
    inode = f" {os.fstat(world.fd).st_ino} "
    assert FilePath("/proc/self/maps").read_text().count(inode) == 1, "all of the engine's memory stays taken"
    world.engine.close_session(world.session)
    assert not world.engine._performer.lent


def test_a_session_that_ends_lets_go_of_all_rows_at_once(world: RowWorld) -> None:
    world.until(*world.store(*place(*PREFIX)))
    world.disk.hangs_reads = True
    uses = world.load(*place(*PREFIX, first=10))
    world.step()
    for _ in uses:
        assert world.disk.is_in.acquire(timeout=DEADLINE_S)
    assert not world.is_let_go()
    world.engine.suspend_session(world.session)
    world.lent.close()
    assert world.is_let_go()
    before = world.memory[:]
    world.disk.go_on.set()
    while world.engine.jobs(1)["get"]:
        world.step()
    assert world.memory[:] == before
    world.engine.close_session(world.session)


def test_a_write_that_hangs_keeps_no_memory_of_an_engine_that_has_left(
    world: RowWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: FilePath
) -> None:
    """Or all of its host memory would stay taken for as long as the disk hangs, beside that of the next engine."""
    mapped = f" {os.fstat(world.fd).st_ino} "
    world.disk.late = BlobName.of(SPACE.record((9, 9)))  # so that the disk itself asks, behind the bytes
    world.until(*world.store(((7,), 5)))
    with hanging_calls(monkeypatch, "pwrite") as is_in:
        world.store((PREFIX[0], 0))
        world.step()
        assert is_in.acquire(timeout=DEADLINE_S)
        world.engine.suspend_session(world.session)
        world.lent.close()
        wait_for(lambda: FilePath("/proc/self/maps").read_text().count(mapped) == 1, "the engine's alone to be left")
    while world.tiering.pending_writes:
        world.step()
    assert blob_files(tmp_path) == [blob_path(tmp_path, BlobName.of(SPACE.record((7,))))] and not temp_files(tmp_path)
    world.engine.close_session(world.session)


@pytest.mark.parametrize(("rows", "row_bytes"), [(ROWS + 1, ROW_BYTES), (ROWS, ROW_BYTES + 1), (0, ROW_BYTES)])
def test_a_region_that_is_none_is_refused_and_let_go(rows: int, row_bytes: int) -> None:
    fd = os.memfd_create("rows")
    os.ftruncate(fd, ROWS * ROW_BYTES)
    watched, lifeline = os.pipe()
    with pytest.raises(ConfigError, match="rows"):
        LentRows(fd, lifeline, rows, row_bytes)
    assert select.select([watched], [], [], 0)[0]
    os.close(watched)


def test_a_pipe_is_no_region() -> None:
    fd, other = os.pipe()
    watched, lifeline = os.pipe()
    with pytest.raises(ConfigError, match="regular file"):
        LentRows(fd, lifeline, 1, 4096)
    os.close(other)
    os.close(watched)


@pytest.mark.parametrize("how", ["read only", "sealed"])
def test_a_region_that_cannot_be_mapped_is_refused_before_anything_is_stored_there(how: str) -> None:
    fd = os.memfd_create("rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, ROW_BYTES)
    if how == "sealed":
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0x10)  # F_SEAL_FUTURE_WRITE
    else:
        fd, writable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC), fd
        os.close(writable)
    watched, lifeline = os.pipe()
    with pytest.raises(ConfigError, match="cannot map an engine's row"):
        LentRows(fd, lifeline, 1, ROW_BYTES)
    assert select.select([watched], [], [], 0)[0]
    os.close(watched)


def test_rows_stay_mapped_between_uses() -> None:
    name = f"rows-{os.urandom(4).hex()}"
    fd = os.memfd_create(name)
    os.ftruncate(fd, 4 * ROW_BYTES)
    memory = mmap.mmap(fd, 4 * ROW_BYTES)
    watched, lifeline = os.pipe()
    lent = LentRows(fd, lifeline, 4, ROW_BYTES)
    for number in range(8):
        use = RowUse(1, number, number % 4)
        with pytest.raises(RowGone), lent.mapped(use, HEADER_BYTES, is_read=True):
            pass
        lent.begin(use)
        with lent.mapped(use, HEADER_BYTES, is_read=True) as blob:
            assert len(blob) == BLOB_BYTES
            blob[HEADER_BYTES:] = bytes([number]) * ROW_BYTES
        lent.end([number])
        with pytest.raises(RowGone):
            lent.check(use)
        assert memory[(number % 4) * ROW_BYTES : (number % 4 + 1) * ROW_BYTES] == bytes([number]) * ROW_BYTES
        assert mapped_rows(name) == 1 + min(number + 1, 4), "beside the engine's own mapping, each row once"
    lent.close()
    lent.close()
    os.close(watched)


@contextmanager
def region(rows: int = 4, row_bytes: int = ROW_BYTES) -> Iterator[tuple[LentRows, str]]:
    """A region, and the name that its rows are mapped by."""
    name = f"rows-{os.urandom(4).hex()}"
    fd = os.memfd_create(name)
    os.ftruncate(fd, rows * row_bytes)
    watched, lifeline = os.pipe()
    lent = LentRows(fd, lifeline, rows, row_bytes)
    try:
        yield lent, name
    finally:
        lent.close()
        os.close(watched)


def test_a_row_that_two_uses_have_mapped_at_once_stays_mapped_once() -> None:
    """As where it is lent anew while an earlier write of it hangs, whose mapping is not replaced."""
    with region() as (lent, name):
        for turn in range(4):
            uses = [RowUse(1, 2 * turn + n, 0) for n in range(2)]
            for use in uses:
                lent.begin(use)
            with lent.mapped(uses[0], HEADER_BYTES, is_read=False), lent.mapped(uses[1], HEADER_BYTES, is_read=True):
                assert mapped_rows(name) == 2
        assert mapped_rows(name) == 1


def test_the_end_of_a_loan_is_seen_behind_the_end_of_its_uses_and_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, close, left = os.listdir("/proc/self/fd"), os.close, list[int]()
    with region() as (lent, name):
        late = [RowUse(1, number, number) for number in range(2)]
        for use in late:
            lent.begin(use)
        with lent.mapped(late[0], HEADER_BYTES, is_read=True) as blob:
            with monkeypatch.context() as patched:
                patched.setattr(os, "close", lambda fd: left.append(mapped_rows(name)) or close(fd))
                lent.close()
            assert left[0] == 0, "the engine was told while its row could be written"
            blob[:] = b"\x77" * len(blob)
        for use in late:
            with pytest.raises(RowGone), lent.mapped(use, HEADER_BYTES, is_read=True):
                pass
        assert mapped_rows(name) == 0
    assert os.listdir("/proc/self/fd") == before


def test_a_row_that_could_not_be_mapped_takes_no_addresses() -> None:
    """It is tried for each row that is stored or read, and a process has so many mappings."""
    row_bytes = 1 << 36  # none of it is memory: not even the file has a page
    fd = os.memfd_create("rows")
    os.ftruncate(fd, row_bytes)
    before = virtual_bytes()
    for _ in range(4):
        watched, lifeline = os.pipe()
        with pytest.raises(ConfigError, match="cannot map an engine's row"):
            LentRows(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC), lifeline, 1, row_bytes)
        os.close(watched)
    assert virtual_bytes() < before + row_bytes
    os.close(fd)


def virtual_bytes() -> int:
    return int(FilePath("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


UNREVOKED = """
import os, resource
from tiered_kv.engine.lent_rows import LentRows
from tiered_kv.tiering.types import RowUse

fd = os.memfd_create("rows")
os.ftruncate(fd, 4096)
lent, use = LentRows(fd, os.pipe()[1], 1, 4096), RowUse(1, 1, 0)
lent.begin(use)
with lent.mapped(use, 4096, is_read=True) as blob:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, -1))  # less than it has: nothing can be mapped any more
    lent.end([1])
    print("the row is the engine's, and is mapped still", flush=True)
"""


def test_a_server_that_cannot_let_go_of_a_row_ends() -> None:
    """Its end lets go of all of them; the engine would use the row while a read still fills it."""
    command = [sys.executable, "-c", UNREVOKED]
    done = subprocess.run(command, env=module_environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
    assert "cannot be unmapped: the server ends" in done.stderr


def mapped_rows(name: str) -> int:
    return sum(f"memfd:{name}" in line for line in FilePath("/proc/self/maps").read_text().splitlines())


def test_engines_together_keep_no_more_rows_mapped_than_a_process_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_rows, "IDLE_MAX", 6)
    regions, name = [], f"rows-{os.urandom(4).hex()}"
    for _ in range(4):
        fd = os.memfd_create(name)
        os.ftruncate(fd, 4 * ROW_BYTES)
        watched, lifeline = os.pipe()
        regions.append((LentRows(fd, lifeline, 4, ROW_BYTES), watched))
    for turn in range(2):
        for lent, _ in regions:
            for row in range(4):
                use = RowUse(1, 4 * turn + row, row)
                lent.begin(use)
                with lent.mapped(use, HEADER_BYTES, is_read=True):
                    assert mapped_rows(name) <= 7
    assert mapped_rows(name) == 6
    for lent, watched in regions:
        lent.close()
        os.close(watched)
    wait_for(lambda: mapped_rows(name) == 0, "rows of engines that left to be unmapped")
