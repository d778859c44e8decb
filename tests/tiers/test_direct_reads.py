"""First reads from disk go around the page cache: which do, and that what is in their way costs no byte and no read."""

import errno
import fcntl
import mmap
import os
import resource
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kit.storage.disk_probe import CHAIN, blob_path, fill, open_disk, read, slot_of
from tiered_kv.errors import ChunkCorrupt, TierUnavailable
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.tiers.disk import files
from tiered_kv.tiers.disk.files import READ_PIECE_BYTES
from tiered_kv.tiers.disk.first_reads import SLOW_BYTES_S, FirstReads
from tiered_kv.tiers.wrappers.verified import VerifiedTier

LONG = SampleChain(payload_bytes=3 * READ_PIECE_BYTES)


def resident_bytes(path):
    """What of a file is in the page cache, as util-linux counts it."""
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", str(path)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def open_on_local_disk(root):
    tier = open_disk(root)
    if not tier.direct_reads:
        tier.close()
        pytest.skip("needs a local disk with O_DIRECT, and huge pages: TMPDIR lies elsewhere")
    return tier


def fill_cold(tier, root, count, chain=CHAIN):
    """As a server does, from aligned memory: what is written leaves nothing in the page cache."""
    blobs = [chain.blob(index) for index in range(count)]
    for blob in blobs:
        memory = mmap.mmap(-1, len(blob.data))
        memory.write(blob.data)
        tier.put(blob.name, memoryview(memory))
        assert resident_bytes(blob_path(root, blob.name)) == 0
    return blobs


@pytest.fixture
def flags_of_reads(monkeypatch):
    """Of every ``preadv`` of a blob's file: whether it went around the page cache."""
    real, seen = os.preadv, []

    def noted(descriptor, buffers, offset):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors"):  # not the probe at open
            seen.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    monkeypatch.setattr("tiered_kv.tiers.disk.first_reads.SLOW_BYTES_S", 0)  # a busy machine makes any disk slow
    return seen


@pytest.mark.parametrize(
    "payload_bytes", [4096, READ_PIECE_BYTES - 4096, READ_PIECE_BYTES, 3 * READ_PIECE_BYTES + 8192]
)
def test_a_first_read_leaves_the_page_cache_alone_and_what_comes_back_fills_it(tmp_path, flags_of_reads, payload_bytes):
    chain = SampleChain(payload_bytes=payload_bytes)
    tier = open_on_local_disk(tmp_path)
    blobs = fill_cold(tier, tmp_path, 3, chain)
    path = blob_path(tmp_path, blobs[0].name)
    assert [read(tier, blob) for blob in blobs] == [blob.data for blob in blobs]
    assert resident_bytes(path) == 0
    assert all(flags_of_reads)
    flags_of_reads.clear()
    assert read(tier, blobs[0]) == blobs[0].data
    assert resident_bytes(path) == len(blobs[0].data)
    assert not any(flags_of_reads)
    assert read(tier, blobs[0]) == blobs[0].data
    assert resident_bytes(blob_path(tmp_path, blobs[1].name)) == 0
    tier.close()


@pytest.mark.parametrize(("payload_pieces", "reads"), [(2, 1), (3, 2), (8, 7)])
def test_the_last_piece_is_long_rather_than_one_more(tmp_path, flags_of_reads, payload_pieces, reads):
    tier = open_on_local_disk(tmp_path)
    (blob,) = fill_cold(tier, tmp_path, 1, SampleChain(payload_bytes=payload_pieces * READ_PIECE_BYTES))
    assert read(tier, blob) == blob.data
    assert flags_of_reads == [True] * reads
    tier.close()


def test_what_is_in_the_page_cache_is_read_from_there_the_first_time_too(tmp_path, flags_of_reads):
    chain = SampleChain(payload_bytes=2 * READ_PIECE_BYTES)
    tier = open_on_local_disk(tmp_path)
    whole, part = fill_cold(tier, tmp_path, 2, chain)
    blob_path(tmp_path, whole.name).read_bytes()
    with blob_path(tmp_path, part.name).open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        file.read(4096)
    assert 0 < resident_bytes(blob_path(tmp_path, part.name)) < len(part.data)
    assert read(tier, whole) == whole.data
    assert not any(flags_of_reads)
    flags_of_reads.clear()
    assert read(tier, part) == part.data
    assert all(flags_of_reads)
    tier.close()


@pytest.mark.parametrize("lacking", ["has_huge_pages", "is_on_local_disk", "supports_direct_io"])
def test_where_reads_cannot_be_direct_they_use_the_page_cache(tmp_path, monkeypatch, flags_of_reads, lacking):
    monkeypatch.setattr(f"tiered_kv.tiers.disk.tier.{lacking}", lambda *_: False)
    tier = open_disk(tmp_path)
    blob = fill(tier, 1)[0]
    assert not tier.direct_reads
    assert read(tier, blob) == blob.data
    assert flags_of_reads
    assert not any(flags_of_reads)
    tier.close()


def test_a_buffer_that_no_device_could_write_into_is_filled_from_staging_memory(tmp_path, flags_of_reads):
    tier = open_on_local_disk(tmp_path)
    blob = fill_cold(tier, tmp_path, 1, SampleChain(payload_bytes=READ_PIECE_BYTES + 4096))[0]
    memory = bytearray(len(blob.data) + 1)
    assert tier.get_into(blob.name, memoryview(memory)[1:])
    assert bytes(memory) == b"\0" + blob.data
    assert all(flags_of_reads)
    tier.close()


def test_threads_that_read_around_the_page_cache_at_once_do_not_mix_their_bytes(tmp_path, flags_of_reads):
    chain = SampleChain(payload_bytes=3 * READ_PIECE_BYTES)
    tier = open_on_local_disk(tmp_path)
    blobs = fill_cold(tier, tmp_path, 8, chain)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda blob: read(tier, blob), blobs)) == [blob.data for blob in blobs]
    assert all(flags_of_reads)
    tier.close()


def test_a_blob_cut_or_damaged_on_the_way_around_the_page_cache_is_told(tmp_path, flags_of_reads):
    chain = SampleChain(payload_bytes=2 * READ_PIECE_BYTES)
    tier = open_on_local_disk(tmp_path)
    cut, flipped_blob, odd = fill_cold(tier, tmp_path, 3, chain)
    os.truncate(blob_path(tmp_path, cut.name), READ_PIECE_BYTES)
    with blob_path(tmp_path, flipped_blob.name).open("r+b") as file:
        file.seek(READ_PIECE_BYTES + 5000)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    os.truncate(blob_path(tmp_path, odd.name), len(odd.data) + 1)
    verified = VerifiedTier(tier, {chain.namespace: chain.form}.get)
    buffer = memoryview(bytearray(len(cut.data)))
    with pytest.raises(ChunkCorrupt):
        tier.get_into(cut.name, buffer)
    with pytest.raises(ChunkCorrupt):
        verified.get_into(flipped_blob.name, buffer)
    assert flags_of_reads[0]
    with pytest.raises(ChunkCorrupt, match="wrong size"):
        tier.get_into(odd.name, buffer)
    tier.close()


def test_a_child_reads_after_its_parent_did(tmp_path):
    """Memory that is kept from children would be no memory there."""
    tier = open_on_local_disk(tmp_path)
    first, second = fill_cold(tier, tmp_path, 2)
    assert read(tier, first) == first.data
    child = os.fork()
    if child == 0:
        try:
            is_right = read(tier, second) == second.data
        except BaseException:  # noqa: BLE001  # it must not go on as a second pytest
            is_right = False
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    tier.close()


def test_what_was_read_is_remembered_within_a_bound(tmp_path, monkeypatch, flags_of_reads):
    monkeypatch.setattr("tiered_kv.tiers.disk.first_reads.READ_LATELY_COUNT", 2)
    tier = open_on_local_disk(tmp_path)
    blobs = fill_cold(tier, tmp_path, 3)
    for blob in (*blobs, blobs[2], blobs[0]):
        assert read(tier, blob) == blob.data
    assert flags_of_reads == [True, True, True, False, True]
    tier.close()


# -- slow disks -------------------------------------------------------------------------------------------------------


def test_first_reads_are_slow_when_several_were_and_fast_again_when_others_are():
    reads = FirstReads()
    size_bytes, slow_s, fast_s = 8 << 20, 2 * (8 << 20) / SLOW_BYTES_S, (8 << 20) / SLOW_BYTES_S / 8
    seen = []
    for seconds in [slow_s] * 8 + [fast_s] * 12:
        reads.took(size_bytes, seconds)
        seen.append(reads.are_fast)
    assert seen[0] and not seen[7] and seen[-1]
    assert seen == [True] * seen.index(False) + [False] * seen.count(False) + [True] * (
        20 - seen.index(False) - seen.count(False)
    )
    for _ in range(100):
        reads.took(READ_PIECE_BYTES - 1, 1.0)
    assert reads.are_fast, "opening a file takes time on any disk"


def test_on_a_slow_disk_a_first_read_fills_the_page_cache(tmp_path, monkeypatch, flags_of_reads):
    tier = open_on_local_disk(tmp_path)
    monkeypatch.setattr("tiered_kv.tiers.disk.first_reads.SLOW_BYTES_S", 1 << 60)
    blobs = fill_cold(tier, tmp_path, 4, LONG)
    assert [read(tier, blob) for blob in blobs[:3]] == [blob.data for blob in blobs[:3]]
    assert [resident_bytes(blob_path(tmp_path, blob.name)) for blob in blobs] == [0, *[len(blobs[1].data)] * 2, 0]
    monkeypatch.setattr("tiered_kv.tiers.disk.first_reads.SLOW_BYTES_S", 0)
    flags_of_reads.clear()
    assert read(tier, blobs[3]) == blobs[3].data
    assert all(flags_of_reads)
    tier.close()


# -- files that change meanwhile --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "left_bytes", [0, READ_PIECE_BYTES, READ_PIECE_BYTES + 1000, READ_PIECE_BYTES + 4096, 2 * READ_PIECE_BYTES - 1]
)
def test_a_file_that_is_cut_while_it_is_read_is_damage_wherever_it_is_cut(tmp_path, flags_of_reads, left_bytes):
    """Not a disk that fails, of which nothing would be read for a while."""
    tier = open_on_local_disk(tmp_path)
    blob = fill_cold(tier, tmp_path, 1, LONG)[0]

    def cut(done_bytes):
        if done_bytes == READ_PIECE_BYTES:
            os.truncate(blob_path(tmp_path, blob.name), left_bytes)

    with pytest.raises(ChunkCorrupt, match="cut while it was read"):
        tier.get_into_by_pieces(blob.name, memoryview(bytearray(len(blob.data))), cut)
    assert flags_of_reads[0]
    tier.close()


def test_a_blob_that_is_replaced_or_removed_while_it_is_read_is_read_as_it_was(tmp_path, flags_of_reads):
    tier = open_on_local_disk(tmp_path)
    replaced, removed = fill_cold(tier, tmp_path, 2, LONG)
    newer = LONG.blob(0, version=1)
    verified = VerifiedTier(tier, {LONG.namespace: LONG.form}.get)

    for blob, change in (
        (replaced, lambda: tier.put(newer.name, slot_of(newer.data))),
        (removed, lambda: tier.delete(removed.name)),
    ):
        buffer, changes = bytearray(len(blob.data)), [change]
        assert tier.get_into_by_pieces(
            blob.name, memoryview(buffer), lambda _, changes=changes: changes and changes.pop()()
        )
        assert bytes(buffer) == blob.data and not changes
    assert all(flags_of_reads)
    assert read(tier, removed) is None
    buffer = bytearray(len(newer.data))
    assert verified.get_into(newer.name, memoryview(buffer)) and bytes(buffer) == newer.data
    tier.close()


def test_a_page_that_was_written_and_is_not_on_the_disk_yet_is_read(tmp_path, flags_of_reads):
    tier = open_on_local_disk(tmp_path)
    blob = fill_cold(tier, tmp_path, 1, LONG)[0]
    path, at = blob_path(tmp_path, blob.name), READ_PIECE_BYTES + 8192
    with path.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), bytes(4096), at)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert resident_bytes(path) == 0
        os.pwrite(file.fileno(), blob.data[at : at + 4096], at)
    assert 0 < resident_bytes(path) < len(blob.data)
    assert read(tier, blob) == blob.data
    assert all(flags_of_reads)
    tier.close()


# -- what a machine may lack ------------------------------------------------------------------------------------------


def address_space_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * mmap.PAGESIZE


def test_where_there_is_no_memory_for_it_a_read_needs_none(tmp_path, monkeypatch, flags_of_reads):
    """The disk is well: a read that failed would count against it."""
    tier = open_on_local_disk(tmp_path)
    first, second = fill_cold(tier, tmp_path, 2, LONG)
    monkeypatch.setattr(files, "_staging", files._Staging())  # this thread has read nothing yet
    buffer = memoryview(bytearray(len(first.data)))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes() + (2 << 20), limits[1]))
    try:
        is_found = tier.get_into(first.name, buffer)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert is_found and bytes(buffer) == first.data
    assert flags_of_reads and not any(flags_of_reads)
    flags_of_reads.clear()
    assert read(tier, second) == second.data
    assert all(flags_of_reads)
    tier.close()


def test_a_kernel_without_huge_pages_for_a_process_reads_through_the_page_cache(tmp_path, monkeypatch, flags_of_reads):
    tier = open_on_local_disk(tmp_path)
    blob = fill_cold(tier, tmp_path, 1, LONG)[0]
    monkeypatch.setattr(files, "_staging", files._Staging())
    monkeypatch.setattr(files.mmap, "MADV_HUGEPAGE", 1 << 20)  # an advice that no kernel knows: EINVAL
    assert read(tier, blob) == blob.data
    assert not any(flags_of_reads)
    tier.close()


def test_a_read_that_is_refused_in_the_middle_goes_on_through_the_page_cache(tmp_path, monkeypatch, flags_of_reads):
    tier = open_on_local_disk(tmp_path)
    blob = fill_cold(tier, tmp_path, 1, LONG)[0]
    noted = os.preadv

    def refusing(descriptor, buffers, offset):
        if offset and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return noted(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    assert read(tier, blob) == blob.data
    assert flags_of_reads[0] and not any(flags_of_reads[1:])
    monkeypatch.setattr(os, "preadv", noted)
    tier.close()


def test_a_disk_that_fails_says_so_and_is_not_asked_in_another_way(tmp_path, monkeypatch):
    tier = open_on_local_disk(tmp_path)
    blob = fill_cold(tier, tmp_path, 1, LONG)[0]
    calls = []

    def failing(*asked):
        calls.append(asked)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(TierUnavailable, match="EIO"):
        read(tier, blob)
    assert len(calls) == 1
    tier.close()


def test_threads_that_have_ended_hold_nothing(tmp_path, flags_of_reads):
    tier = open_on_local_disk(tmp_path)
    blobs = fill_cold(tier, tmp_path, 48)
    sizes = []
    for blob in blobs:
        thread = threading.Thread(target=lambda blob=blob: sizes.append(read(tier, blob) == blob.data))
        thread.start()
        thread.join()
        assert sizes.pop()
        sizes.append(address_space_bytes())
    assert all(flags_of_reads)
    assert sizes[-1] - sizes[7] < 5 * (4 << 20), "each has mapped 4 MiB"
    tier.close()
