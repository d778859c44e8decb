"""The disk tier when the operating system says no: full, too large, read-only, in the way. Real errors, no mocks."""

import contextlib
import itertools
import os
import resource
import shutil
import sqlite3
import subprocess
import threading

import pytest

from tests.kit.storage.disk_probe import blob_files, blob_path, du_bytes, open_disk, slot_of, temp_files
from tiered_kv.errors import CapacityExceeded, ChunkCorrupt, ChunkMismatch, ConfigError, TierUnavailable
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.testing.faults import Fault, FaultyTier, at, seeded
from tiered_kv.tiers.disk.tier import DiskTier
from tiered_kv.tiers.wrappers.verified import VerifiedTier

CHAIN = SampleChain(payload_bytes=256 << 10)
SMALL = SampleChain()
NO_CHECK = -(1 << 40)
"""As ``min_free_bytes``: let the write itself meet the full file system."""


def read(tier, name, chain=CHAIN):
    buffer = bytearray(chain.form.blob_bytes)
    return bytes(buffer) if tier.get_into(name, memoryview(buffer)) else None


def fill_until_refused(tier):
    """Blobs stored before the tier had no room, and why it had none."""
    stored = []
    while True:
        blob = CHAIN.blob(len(stored))
        try:
            tier.put(blob.name, slot_of(blob.data))
        except CapacityExceeded as exc:
            return stored, str(exc)
        stored.append(blob)


def nothing_is_left(root, tier, used_bytes=0):
    assert temp_files(root) == []
    assert tier.usage().used_bytes == used_bytes == du_bytes(root / "blobs")


@pytest.fixture
def mount(tmp_path):
    """Mounts a new file system in memory; skips where that is not allowed."""
    mounted = []

    def mount_new(options, kind="tmpfs", point=None):
        point = point or tmp_path / "mounted"
        point.mkdir(exist_ok=True)
        if os.geteuid() != 0 or shutil.which("mount") is None:
            pytest.skip("mounting needs root and mount(8)")
        done = subprocess.run(["mount", "-t", kind, "-o", options, "none", point], check=False, capture_output=True)
        if done.returncode:
            pytest.skip(f"mounting is not allowed here: {done.stderr!r}")
        mounted.append(point)
        return point

    yield mount_new
    for point in mounted:
        subprocess.run(["umount", point], check=True)


# -- no room ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct_io", [None, False])
def test_a_full_file_system_refuses_the_put_and_keeps_what_was_stored(mount, direct_io):
    root = mount("size=3m")
    tier = open_disk(root, 64 << 20, min_free_bytes=NO_CHECK, direct_io=direct_io)
    stored, refusal = fill_until_refused(tier)
    assert "errno=ENOSPC" in refusal and len(stored) > 4
    nothing_is_left(root, tier, du_bytes(root / "blobs"))
    assert all(read(tier, blob.name) == blob.data for blob in stored)
    assert tier.delete(stored[0].name)
    again = CHAIN.blob(19)
    tier.put(again.name, again.view())
    assert read(tier, again.name) == again.data
    tier.close()


def test_a_file_system_without_inodes_refuses_the_put(mount):
    root = mount("size=8m,nr_inodes=20")
    tier = open_disk(root, 4 << 20)
    stored, refusal = fill_until_refused(tier)
    assert "errno=ENOSPC" in refusal and tier.usage().blob_count == len(stored)
    nothing_is_left(root, tier, du_bytes(root / "blobs"))
    tier.close()


def test_a_full_file_system_costs_the_index_a_warning_and_nothing_else(mount, caplog):
    root = mount("size=3m")
    tier = open_disk(root, 64 << 20, min_free_bytes=NO_CHECK)
    fill_until_refused(tier)
    free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
    (root / "ballast").write_bytes(bytes(free))
    for _ in range(3):
        tier.flush()
    failures = [record for record in caplog.records if "index not written" in record.getMessage()]
    assert len(failures) == 1
    (root / "ballast").unlink()
    count = tier.usage().blob_count
    tier.close()
    tier = open_disk(root, 64 << 20)
    assert tier.usage().blob_count == count
    assert [info.record.chunk_index for info in tier.scan()] == list(range(count))  # recency was written after all
    tier.close()


@pytest.mark.parametrize(
    ("options", "left"), [("size=6m", 0), ("size=6m", 40 << 10), ("size=6m,nr_inodes=40", None)], ids=str
)
def test_a_start_on_a_full_file_system_keeps_the_order_of_use(mount, caplog, options, left):
    root = mount(options)
    order = stored_in_another_order(root)
    ballast = exhausted(root, left)
    tier = open_disk(root, 64 << 20, min_free_bytes=NO_CHECK)
    assert [info.record.chunk_index for info in tier.scan()] == order
    assert "disk index is only read" in caplog.text and not list(root.glob("index.damaged-*"))
    tier.record_use([CHAIN.name(order[0])])
    tier.flush()  # nor can it now
    for path in ballast:
        path.unlink()
    tier.close()
    tier = open_disk(root, 64 << 20, min_free_bytes=NO_CHECK)
    assert [info.record.chunk_index for info in tier.scan()] == [*order[1:], order[0]]
    tier.close()


def test_an_index_that_was_cut_off_in_a_write_is_read_on_a_full_file_system(mount):
    root = mount("size=6m")
    order = stored_in_another_order(root)
    database = root / "index" / "cache.db"
    with contextlib.closing(sqlite3.connect(database)) as connection:  # as a kill in the middle of a flush leaves it
        with connection:
            connection.execute("UPDATE Settings SET value = value")
        left = {path.name: path.read_bytes() for path in database.parent.iterdir()}
    for name, content in left.items():
        (database.parent / name).write_bytes(content)
    assert set(left) == {"cache.db", "cache.db-wal", "cache.db-shm"}
    exhausted(root, 0)
    tier = open_disk(root, 64 << 20, min_free_bytes=NO_CHECK)
    assert [info.record.chunk_index for info in tier.scan()] == order
    tier.close()


def test_a_damaged_index_is_moved_aside_on_a_full_file_system_too(mount):
    root = mount("size=6m")
    order = stored_in_another_order(root)
    with sqlite3.connect(root / "index" / "cache.db") as connection:
        connection.execute("UPDATE Cache SET value = x'00112233'")
    connection.close()
    exhausted(root, 0)
    tier = open_disk(root, 64 << 20, min_free_bytes=NO_CHECK)
    assert sorted(info.record.chunk_index for info in tier.scan()) == sorted(order)
    assert [path.name for path in root.glob("index.damaged-*")] == ["index.damaged-1"]
    tier.close()


def stored_in_another_order(root):
    """Five blobs, the first of them used last; the order that an open finds."""
    tier = open_disk(root, 64 << 20, min_free_bytes=NO_CHECK)
    for index in range(5):
        blob = CHAIN.blob(index)
        tier.put(blob.name, slot_of(blob.data))
    tier.record_use([CHAIN.name(0)])
    tier.close()
    return [1, 2, 3, 4, 0]


def exhausted(root, left):
    """Files that leave so many bytes, or no inode at all."""
    if left is not None:
        status = os.statvfs(root)
        (root / "ballast").write_bytes(bytes(status.f_bavail * status.f_frsize - left))
        return [root / "ballast"]
    made = []
    with contextlib.suppress(OSError):
        for number in itertools.count():
            (root / f"ballast-{number}").touch()
            made.append(root / f"ballast-{number}")
    return made


def test_a_file_system_never_holds_more_than_the_capacity_under_a_mixed_storm(mount):
    """tmpfs tells its exact use in one call, so here deletes and overwrites may run beside the sampler."""
    root = mount("size=32m")
    capacity = 5 << 20
    tier = DiskTier(root, capacity, min_free_bytes=0, metadata_reserve_bytes=2 << 20)
    slots = [(CHAIN.name(index), slot_of(CHAIN.blob(index).data)) for index in range(24)]
    samples = []

    def churn(number):
        for turn in range(60):
            with contextlib.suppress(CapacityExceeded):
                tier.put(*slots[(number * 7 + turn * 5) % len(slots)])
            if turn % 3 == 0:
                tier.delete(slots[(number + turn) % len(slots)][0])

    threads = [threading.Thread(target=churn, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        status = os.statvfs(root)
        samples.append((status.f_blocks - status.f_bfree) * status.f_frsize)
    for thread in threads:
        thread.join()
    assert 1 << 20 < max(samples) <= capacity
    nothing_is_left(root, tier, du_bytes(root / "blobs"))
    tier.close()


@pytest.mark.parametrize("direct_io", [None, False])
@pytest.mark.parametrize("limit", [64 << 10, (64 << 10) + 100, 4096])
def test_a_file_size_limit_refuses_the_put(tmp_path, direct_io, limit):
    tier = open_disk(tmp_path, direct_io=direct_io)
    small = resource.getrlimit(resource.RLIMIT_FSIZE)
    child = os.fork()
    if child == 0:  # the limit is the process's own
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, small[1]))
            tier.put(CHAIN.name(0), slot_of(CHAIN.blob(0).data))
        except CapacityExceeded as exc:
            code = 0 if "EFBIG" in str(exc) and not temp_files(tmp_path) and not tier.usage().used_bytes else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    nothing_is_left(tmp_path, tier)
    tier.close()


def test_a_blob_below_a_mount_that_refuses_o_direct_is_read_all_the_same(mount, tmp_path):
    """The probe at open asks the directory, and a part of it may lie elsewhere."""
    root = tmp_path / "disk"
    tier, blob = open_disk(root), CHAIN.blob(0)
    if not tier.direct_reads:
        pytest.skip("needs a local disk with O_DIRECT, and huge pages: TMPDIR lies elsewhere")
    tier.put(blob.name, slot_of(blob.data))
    path = blob_path(root, blob.name)
    mount("mode=0700", "ramfs", path.parent)
    path.write_bytes(blob.data[:4096])
    os.truncate(path, len(blob.data))  # the rest is no page of anything
    with pytest.raises(OSError, match="Invalid argument"):
        os.open(path, os.O_RDONLY | os.O_DIRECT)
    assert read(tier, blob.name) == path.read_bytes()
    tier.close()


def test_a_file_system_without_o_direct_is_used_through_the_page_cache(mount):
    root = mount("mode=700", kind="ramfs")
    with pytest.raises(ConfigError, match="the file system refuses it"):
        open_disk(root, min_free_bytes=NO_CHECK, direct_io=True)
    tier = open_disk(root, min_free_bytes=NO_CHECK)
    assert not tier.direct_io
    tier.put(CHAIN.name(0), slot_of(CHAIN.blob(0).data))
    assert read(tier, CHAIN.name(0)) == CHAIN.blob(0).data
    tier.close()


# -- no access --------------------------------------------------------------------------------------------------------


@pytest.fixture
def frozen():
    """Makes a directory refuse new names, gives what ends that; root needs the immutable flag for it, others a mode."""
    undo = []

    def freeze(directory):
        if os.geteuid() == 0:
            if shutil.which("chattr") is None or subprocess.run(["chattr", "+i", directory], check=False).returncode:
                pytest.skip("root needs chattr +i on this file system to be refused")
            undo.append(["chattr", "-i", directory])
        else:
            directory.chmod(0o500)
            undo.append(["chmod", "700", directory])
        return lambda: subprocess.run(undo.pop(), check=True)

    yield freeze
    for command in undo:
        subprocess.run(command, check=True)


@pytest.mark.parametrize("where", ["tmp", "blobs"])
def test_a_directory_that_refuses_writes_makes_the_tier_unavailable(tmp_path, frozen, where):
    tier = open_disk(tmp_path)
    frozen(tmp_path / where)
    with pytest.raises(TierUnavailable, match=r"operation=put errno=(EPERM|EACCES) path="):
        tier.put(CHAIN.name(0), CHAIN.blob(0).view())
    nothing_is_left(tmp_path, tier)
    tier.close()


def test_a_blob_that_cannot_be_deleted_still_counts(tmp_path, frozen):
    tier = open_disk(tmp_path)
    tier.put(CHAIN.name(0), CHAIN.blob(0).view())
    before = tier.usage()
    frozen(blob_path(tmp_path, CHAIN.name(0)).parent)
    with pytest.raises(TierUnavailable, match="operation=delete"):
        tier.delete(CHAIN.name(0))
    assert tier.usage() == before
    assert read(tier, CHAIN.name(0)) == CHAIN.blob(0).data
    tier.close()


def test_a_temp_file_that_could_not_be_removed_goes_when_it_can_be(tmp_path, frozen, caplog):
    tier, undo = open_disk(tmp_path), []
    blob = CHAIN.blob(0)  # the directory turns read-only in the middle of a write
    assert not tier.put_if(blob.name, blob.view(), lambda: undo.append(frozen(tmp_path / "tmp")))
    for _ in range(2):
        tier.flush()
        assert len(temp_files(tmp_path)) == 1 and tier.usage().used_bytes == du_bytes(tmp_path / "tmp")
    undo.pop()()
    tier.flush()
    nothing_is_left(tmp_path, tier)
    assert caplog.text.count("cannot remove a temp file") == 1
    tier.close()


def test_a_temp_file_that_could_not_be_removed_stays_in_a_directory_of_another_server(tmp_path, frozen):
    root, undo = tmp_path / "kv", []
    tier, blob = open_disk(root), CHAIN.blob(0)
    assert not tier.put_if(blob.name, blob.view(), lambda: undo.append(frozen(root / "tmp")))
    undo.pop()()
    [left] = temp_files(root)
    root.rename(tmp_path / "moved")
    other = open_disk(root)
    left.write_bytes(b"another server's, with the same process id in its container")
    tier.flush()
    assert temp_files(root) == [left]
    other.close()
    tier.close()


def test_a_namespace_is_described_although_somebody_cleared_the_temp_files(tmp_path):
    """As a put is stored then: the first of a namespace may well be the first write since."""
    tier = open_disk(tmp_path)
    shutil.rmtree(tmp_path / "tmp")
    tier.describe(CHAIN.namespace, b'{"model": "m"}')
    assert (tmp_path / "blobs" / CHAIN.namespace.hex() / "namespace.json").is_file()
    tier.close()


@pytest.mark.parametrize(("options", "left"), [("size=3m", 0), ("size=3m,nr_inodes=40", None)], ids=str)
def test_a_start_on_a_full_disk_writes_around_the_page_cache_once_there_is_room(mount, options, left):
    root = mount(options)
    tier = open_disk(root, 64 << 20, min_free_bytes=NO_CHECK)
    is_direct = tier.direct_io
    tier.close()
    ballast = exhausted(root, left)
    tier = open_disk(root, 64 << 20, min_free_bytes=NO_CHECK)
    is_direct_still = tier.direct_io
    for path in ballast:
        path.unlink()
    blob = CHAIN.blob(0)
    tier.put(blob.name, slot_of(blob.data))
    assert read(tier, blob.name) == blob.data
    tier.close()
    assert is_direct_still == is_direct


def test_a_file_where_a_directory_belongs_makes_the_tier_unavailable(tmp_path):
    tier = open_disk(tmp_path)
    (tmp_path / "blobs" / CHAIN.namespace.hex()).write_bytes(b"")
    for call in (
        lambda: tier.put(CHAIN.name(0), CHAIN.blob(0).view()),
        lambda: read(tier, CHAIN.name(0)),
        lambda: tier.contains(CHAIN.name(0)),
        lambda: tier.delete(CHAIN.name(0)),
        lambda: tier.describe(CHAIN.namespace, b"{}"),
    ):
        with pytest.raises(TierUnavailable, match=r"errno=(ENOTDIR|EEXIST)"):
            call()
    assert temp_files(tmp_path) == []
    assert tier.usage().used_bytes == 0
    tier.close()


def test_a_root_that_is_a_file_makes_the_tier_unavailable(tmp_path):
    (tmp_path / "root").write_bytes(b"")
    with pytest.raises(TierUnavailable, match="operation=open"):
        open_disk(tmp_path / "root")


# -- torn files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("damage", ["truncated", "extended", "second_half_zeros", "hole"])
def test_a_torn_file_is_never_served_and_can_be_replaced(tmp_path, damage, reopened):
    disk = open_disk(tmp_path)
    blob = CHAIN.blob(0)
    disk.put(blob.name, blob.view())
    path = blob_path(tmp_path, blob.name)
    size = len(blob.data)
    if damage == "truncated":
        os.truncate(path, size - 4096)
    elif damage == "extended":
        os.truncate(path, size + 1)
    elif damage == "second_half_zeros":
        path.write_bytes(blob.data[: size // 2] + bytes(size - size // 2))
    else:
        os.truncate(path, 8192)
        os.truncate(path, size)
    if reopened:
        disk.close()
        disk = open_disk(tmp_path)
    tier = VerifiedTier(disk, {CHAIN.namespace: CHAIN.form}.get)
    with pytest.raises(ChunkCorrupt):
        read(tier, blob.name)
    assert tier.delete(blob.name)
    tier.put(blob.name, blob.view())
    assert read(tier, blob.name) == blob.data
    nothing_is_left(tmp_path, disk, du_bytes(tmp_path / "blobs"))
    disk.close()


# -- every operation fails in turn ------------------------------------------------------------------------------------


def run_script(tier):
    """A day in the life; whatever fails, the next step goes on. Answers what was read, by chunk."""
    answers = []
    steps = [
        *(lambda i=i: tier.put(SMALL.name(i), SMALL.blob(i).view()) for i in range(4)),
        *(lambda i=i: answers.append((i, read(tier, SMALL.name(i), SMALL))) for i in range(5)),
        lambda: tier.contains(SMALL.name(1)),
        lambda: tier.put(SMALL.name(1), SMALL.blob(1).view()),
        lambda: tier.delete(SMALL.name(2)),
        lambda: tier.describe(SMALL.namespace, b"{}"),
        tier.flush,
        lambda: answers.extend((info.record.chunk_index, None) for info in tier.scan()),
        *(lambda i=i: answers.append((i, read(tier, SMALL.name(i), SMALL))) for i in range(5)),
    ]
    for step in steps:
        with contextlib.suppress(TierUnavailable, CapacityExceeded, ChunkCorrupt, ChunkMismatch):
            step()
    return answers


def check_aftermath(root, disk, answers):
    assert all(data in (None, SMALL.blob(index).data) for index, data in answers)
    nothing_is_left(root, disk, du_bytes(root / "blobs"))
    assert disk.usage().blob_count == len(blob_files(root)) == len(list(disk.scan()))


def count_operations(root):
    disk = open_disk(root)
    faulty = FaultyTier(disk, at({}))
    answers = run_script(VerifiedTier(faulty, {SMALL.namespace: SMALL.form}.get))
    check_aftermath(root, disk, answers)
    assert sum(data is not None for _, data in answers) == 7
    disk.close()
    return faulty.operation_count


@pytest.mark.parametrize("fault", list(Fault))
def test_one_fault_at_any_operation_never_serves_wrong_bytes(tmp_path, fault):
    total = count_operations(tmp_path / "plain")
    assert total == 20
    for number in range(total):
        root = tmp_path / str(number)
        disk = open_disk(root)
        tier = VerifiedTier(FaultyTier(disk, at({number: fault})), {SMALL.namespace: SMALL.form}.get)
        check_aftermath(root, disk, run_script(tier))
        disk.close()


@pytest.mark.parametrize("seed", range(10))
def test_many_faults_at_once_never_serve_wrong_bytes(tmp_path, seed):
    disk = open_disk(tmp_path)
    faulty = FaultyTier(disk, seeded(seed, 0.3))
    tier = VerifiedTier(faulty, {SMALL.namespace: SMALL.form}.get)
    for _ in range(5):
        check_aftermath(tmp_path, disk, run_script(tier))
    disk.close()
