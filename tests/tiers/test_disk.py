"""What the disk tier promises beyond the contract: bytes, modes, names, ownership, the scan at open."""

import json
import mmap
import os
import shutil
import stat
import threading

import pytest

from tests.kit.storage.disk_probe import CHAIN, blob_files, blob_path, du_bytes, fill, open_disk, read, temp_files
from tiered_kv.chunks.header import CHUNK_INDEX
from tiered_kv.errors import (
    CapacityExceeded,
    ChunkCorrupt,
    ChunkMismatch,
    ConfigError,
    TierUnavailable,
)
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.tiers.base import BlobName
from tiered_kv.tiers.disk.files import READ_PIECE_BYTES, is_aligned
from tiered_kv.tiers.disk.index import DiskIndex
from tiered_kv.tiers.disk.tier import DiskTier, metadata_reserve
from tiered_kv.tiers.wrappers.verified import VerifiedTier


def test_a_put_that_waited_publishes_nothing_in_a_directory_that_another_server_has_by_then(tmp_path):
    tier, blob = open_disk(tmp_path), CHAIN.blob(0)

    def lose_the_lock():
        (tmp_path / "server.lock").unlink()
        (tmp_path / "server.lock").touch()
        return True

    with pytest.raises(TierUnavailable, match="its lock is not ours"):
        tier.put_if(blob.name, blob.view(), lose_the_lock)
    assert blob_files(tmp_path) == temp_files(tmp_path) == []
    assert tier.usage().used_bytes == 0
    with pytest.raises(TierUnavailable, match="its lock is not ours"):
        tier.put(blob.name, blob.view())
    tier.close()


# -- capacity ---------------------------------------------------------------------------------------------------------


def test_usage_is_what_du_says_also_after_a_restart(tmp_path):
    tier = open_disk(tmp_path)
    blobs = fill(tier, 20)
    tier.delete(blobs[3].name)
    tier.put(blobs[4].name, CHAIN.blob(4, version=1).view())
    before = tier.usage()
    assert before.used_bytes == du_bytes(tmp_path / "blobs") > 0
    tier.close()
    tier = open_disk(tmp_path)
    assert tier.usage() == before
    tier.close()


def test_metadata_reserve_is_taken_off_first(tmp_path):
    assert metadata_reserve(1 << 30) == 64 << 20
    assert metadata_reserve(100 << 30) == 1 << 30
    tier = DiskTier(tmp_path, 128 << 20, min_free_bytes=0)
    assert tier.usage().capacity_bytes == 64 << 20
    tier.close()


def test_a_capacity_without_room_for_blobs_is_refused_with_its_numbers(tmp_path):
    with pytest.raises(ConfigError, match=r"capacity=68157439 metadata_reserve=67108864 least=68157440"):
        DiskTier(tmp_path / "d", (65 << 20) - 1)
    assert not (tmp_path / "d").exists()


def test_a_put_that_would_leave_too_little_free_space_is_refused(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    tier = open_disk(tmp_path, min_free_bytes=2 * free)
    with pytest.raises(CapacityExceeded, match="file system is too full"):
        fill(tier, 1)
    assert blob_files(tmp_path) == temp_files(tmp_path) == []
    assert tier.usage().used_bytes == 0
    tier.close()


def test_what_is_written_meanwhile_is_taken_off_the_last_look_at_free_space(tmp_path, monkeypatch):
    monkeypatch.setattr("tiered_kv.tiers.disk.tier.LOOK_AGE_S", 1e9)
    tier = open_disk(tmp_path)
    size = fill(tier, 1) and tier.usage().used_bytes
    looks = []
    monkeypatch.setattr(
        "tiered_kv.tiers.disk.tier.free_bytes", lambda _: looks.append(1) or (5 * size if len(looks) == 1 else 0)
    )
    tier._room = -1e9, 0
    blobs = [CHAIN.blob(number) for number in range(1, 9)]
    for blob in blobs[:5]:
        tier.put(blob.name, memoryview(blob.data))
    assert len(looks) == 1
    with pytest.raises(CapacityExceeded, match="file system is too full"):
        tier.put(blobs[5].name, memoryview(blobs[5].data))
    tier.close()


def test_that_there_is_no_room_is_not_said_by_an_old_look(tmp_path, monkeypatch):
    monkeypatch.setattr("tiered_kv.tiers.disk.tier.LOOK_AGE_S", 1e9)
    tier = open_disk(tmp_path)
    free = [0]
    monkeypatch.setattr("tiered_kv.tiers.disk.tier.free_bytes", lambda _: free[0])
    tier._room = -1e9, 0
    with pytest.raises(CapacityExceeded):
        fill(tier, 1)
    free[0] = 1 << 30
    fill(tier, 1)
    tier.close()


def test_a_directory_that_is_replaced_by_a_link_after_a_look_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tiered_kv.tiers.disk.tier.LOOK_AGE_S", 1e9)
    root, elsewhere = tmp_path / "d", tmp_path / "elsewhere"
    tier = open_disk(root)
    (blob,) = fill(tier, 1)
    path = blob_path(root, blob.name)
    path.parent.rename(elsewhere)
    path.parent.symlink_to(elsewhere)
    before = sorted(elsewhere.iterdir())
    with pytest.raises(TierUnavailable, match="ENOTDIR"):
        tier.put(blob.name, memoryview(blob.data))
    assert sorted(elsewhere.iterdir()) == before
    tier.close()


def test_a_directory_that_is_replaced_after_a_look_at_its_lock_gets_no_blob(tmp_path, monkeypatch):
    monkeypatch.setattr("tiered_kv.tiers.disk.tier.LOOK_AGE_S", 1e9)
    root = tmp_path / "d"
    tier = open_disk(root)
    (blob,) = fill(tier, 1)
    root.rename(tmp_path / "away")
    other = open_disk(root)
    with pytest.raises(TierUnavailable, match="was replaced"):
        tier.put(blob.name, memoryview(blob.data))
    assert blob_files(root) == temp_files(root) == []
    other.close()
    tier.close()


def test_a_directory_that_is_removed_after_a_look_at_its_lock_is_not_made_anew(tmp_path, monkeypatch):
    """Or the next server would find a directory that is neither empty nor ours, and refuse it."""
    monkeypatch.setattr("tiered_kv.tiers.disk.tier.LOOK_AGE_S", 1e9)
    root = tmp_path / "d"
    tier = open_disk(root)
    (blob,) = fill(tier, 1)
    shutil.rmtree(root)
    with pytest.raises(TierUnavailable, match="is gone"):
        tier.put(blob.name, memoryview(blob.data))
    assert not root.exists()
    tier.close()
    next_tier = open_disk(root)
    fill(next_tier, 1)
    next_tier.close()


def test_a_capacity_that_shrank_refuses_puts_until_room_is_made(tmp_path):
    tier = open_disk(tmp_path, 4 << 20)
    blobs = fill(tier, 200)
    tier.close()
    tier = open_disk(tmp_path, 2 << 20)
    usage = tier.usage()
    assert usage.used_bytes > usage.capacity_bytes == 2 << 20
    assert len(list(tier.scan())) == 200
    extra = CHAIN.blob(200)
    for info in list(tier.scan()):
        if tier.usage().used_bytes + info.size_bytes <= 2 << 20:
            break
        with pytest.raises(CapacityExceeded, match="disk tier is full"):
            tier.put(extra.name, extra.view())
        assert tier.delete(info.name)
    tier.put(extra.name, extra.view())
    assert read(tier, extra) == extra.data
    assert read(tier, blobs[-1]) == blobs[-1].data  # the oldest went, not the newest
    assert tier.usage().used_bytes == du_bytes(tmp_path / "blobs") <= 2 << 20
    tier.close()


def test_overwriting_needs_room_for_both_until_the_rename(tmp_path):
    tier = open_disk(tmp_path, 1 << 20)
    with pytest.raises(CapacityExceeded):
        fill(tier, 100)
    full = tier.usage()
    with pytest.raises(CapacityExceeded):
        tier.put(CHAIN.name(0), CHAIN.blob(0, version=1).view())
    assert read(tier, CHAIN.blob(0)) == CHAIN.blob(0).data
    assert tier.usage() == full
    tier.close()


def test_disk_never_holds_more_than_the_limit_during_a_write_storm(tmp_path):
    """Only puts, so that what a walk adds up was there at one moment."""
    limit = 2 << 20
    tier = open_disk(tmp_path, limit)
    refused = [0] * 8
    samples = []

    def store(number):
        chain = SampleChain(seed=number)
        for index in range(40):
            try:
                tier.put(chain.name(index), chain.blob(index).view())
            except CapacityExceeded:
                refused[number] += 1

    threads = [threading.Thread(target=store, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        samples.append((du_bytes(tmp_path / "blobs", tmp_path / "tmp"), tier.usage().used_bytes))
    for thread in threads:
        thread.join()
    assert max(max(sample) for sample in samples) <= limit
    assert sum(refused) == 320 - len(blob_files(tmp_path)) > 0
    assert tier.usage().used_bytes == du_bytes(tmp_path / "blobs") > limit - len(CHAIN.blob(0).data)
    tier.close()


# -- files ------------------------------------------------------------------------------------------------------------


def test_files_are_for_the_owner_only_whatever_the_umask(tmp_path):
    old = os.umask(0)
    try:
        tier = open_disk(tmp_path / "d")
        fill(tier, 3)
        tier.describe(CHAIN.namespace, b"{}")
        tier.flush()
        tier.close()
    finally:
        os.umask(old)
    found = [tmp_path / "d", *(tmp_path / "d").rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_file()} == {0o600}


def test_temp_files_of_a_dead_process_are_swept_at_open(tmp_path):
    open_disk(tmp_path).close()
    (tmp_path / "tmp" / "4711-0").write_bytes(bytes(1 << 20))
    tier = open_disk(tmp_path)
    assert temp_files(tmp_path) == []
    assert tier.usage().used_bytes == 0
    tier.close()


def test_aligned_and_unaligned_buffers_store_the_same_bytes(tmp_path):
    tier = open_disk(tmp_path)
    first, second = CHAIN.blob(0), CHAIN.blob(1)
    slot = memoryview(mmap.mmap(-1, len(first.data) + 4096))
    aligned, shifted = slot[: len(first.data)], slot[1 : len(first.data) + 1]
    assert is_aligned(aligned)
    assert not is_aligned(shifted)
    assert not is_aligned(first.view())
    aligned[:] = first.data
    tier.put(first.name, aligned)
    shifted[:] = second.data
    tier.put(second.name, shifted)
    for blob in (first, second):
        assert blob_path(tmp_path, blob.name).read_bytes() == blob.data
        for view in (aligned, shifted):
            assert tier.get_into(blob.name, view)
            assert view == blob.data
    tier.close()


def test_a_blob_file_opens_as_safetensors(tmp_path):
    from safetensors import safe_open

    tier = open_disk(tmp_path)
    [blob] = fill(tier, 1)
    tier.close()
    with safe_open(blob_path(tmp_path, blob.name), framework="numpy") as file:
        assert file.metadata()["key"] == blob.name.key.hex()


def test_a_vanished_file_is_a_miss_and_its_bytes_come_back(tmp_path):
    tier = open_disk(tmp_path)
    blobs = fill(tier, 3)
    for blob in blobs:
        blob_path(tmp_path, blob.name).unlink()
    assert read(tier, blobs[0]) is None
    assert not tier.contains(blobs[1].name)
    assert not tier.delete(blobs[2].name)
    assert (tier.usage().used_bytes, tier.usage().blob_count) == (0, 0)
    tier.close()


def test_a_fan_out_directory_that_vanished_is_made_again(tmp_path):
    tier = open_disk(tmp_path)
    [blob] = fill(tier, 1)
    path = blob_path(tmp_path, blob.name)
    path.unlink()
    path.parent.rmdir()
    path.parent.parent.rmdir()
    tier.put(blob.name, blob.view())
    assert read(tier, blob) == blob.data
    tier.close()


def test_directories_whose_last_blob_was_deleted_do_not_stay(tmp_path):
    """A server that lives for weeks sees thousands of namespaces come and go, with up to 256 directories each."""
    tier = open_disk(tmp_path)
    blobs = fill(tier, 40)
    namespace = tmp_path / "blobs" / blobs[0].name.namespace.hex()
    stranger = blobs[0].name.key[:1].hex()
    (namespace / stranger / "notes.txt").touch()
    for blob in blobs:
        assert tier.delete(blob.name)
        assert {path.name for path in namespace.iterdir()} == {stranger, *(p.parent.name for p in blob_files(tmp_path))}
    tier.put(blobs[1].name, blobs[1].view())
    assert read(tier, blobs[1]) == blobs[1].data
    tier.close()


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory"])
def test_what_is_no_regular_file_is_never_read_as_a_blob(tmp_path, kind):
    tier = open_disk(tmp_path)
    blobs = fill(tier, 2)
    path = blob_path(tmp_path, blobs[0].name)
    path.unlink()
    if kind == "symlink":
        path.symlink_to(blob_path(tmp_path, blobs[1].name))
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises((TierUnavailable, ChunkCorrupt), match=r"ELOOP|wrong size"):
        read(tier, blobs[0])
    tier.close()


def test_namespace_record_is_written_once_and_parses_to_the_same(tmp_path):
    record = b'{"b":[1,{"x":"\xc3\xa9"}],"a":0.5}'
    tier = open_disk(tmp_path)
    tier.describe(CHAIN.namespace, record)
    path = tmp_path / "blobs" / CHAIN.namespace.hex() / "namespace.json"
    assert json.loads(path.read_bytes()) == json.loads(record)
    before = path.stat()
    tier.describe(CHAIN.namespace, record)
    assert path.stat().st_ino == before.st_ino  # not written again
    path.write_bytes(b"")  # what a power failure may leave of a renamed file
    tier.describe(CHAIN.namespace, record)
    assert json.loads(path.read_bytes()) == json.loads(record)
    assert temp_files(tmp_path) == []
    assert tier.usage().used_bytes == 0
    tier.close()
    assert open_and_count_unreadable(tmp_path) == 0


def test_records_of_namespaces_without_blobs_go_and_nothing_else_does(tmp_path):
    """With each reset of an engine begins a namespace: a record and a directory of each would stay for good."""
    tier = open_disk(tmp_path)
    (held,) = fill(tier, 1)
    (evicted,) = fill(tier, 1, SampleChain(seed=1))
    for namespace in (held.name.namespace, evicted.name.namespace, *(bytes([number]) * 16 for number in range(9))):
        tier.describe(namespace, b"{}")
    blobs = tmp_path / "blobs"
    space = [blobs / (bytes([number]) * 16).hex() for number in range(9)]
    (space[0] / "notes.txt").touch()
    (space[1] / "notes").mkdir()
    (space[2] / "00").mkdir()  # empty, as an earlier version left them
    (space[3] / "00").mkdir()
    (space[3] / "00" / "notes.txt").touch()
    (space[4] / "namespace.json").unlink()
    (space[4] / "namespace.json").symlink_to(tmp_path / "tiered_kv.json")
    (blobs / "mine").mkdir()
    (blobs / ("a" * 32)).symlink_to(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "00").mkdir(parents=True)
    (elsewhere / "namespace.json").touch()
    (blobs / ("b" * 32)).symlink_to(elsewhere)
    os.chown(space[5] / "namespace.json", 4711, -1)
    tier.delete(evicted.name)
    before = {*blobs.iterdir()}
    tier.remove_ended_namespaces()
    gone = {blobs / evicted.name.namespace.hex(), space[2], *space[6:]}
    assert {*blobs.iterdir()} == before - gone and gone < before
    assert all((path / "namespace.json").is_file() for path in (*space[:2], space[3], space[5]))
    assert (tmp_path / "tiered_kv.json").is_file()
    assert {path.name for path in elsewhere.iterdir()} == {"00", "namespace.json"}
    assert read(tier, held) == held.data
    assert (blobs / held.name.namespace.hex() / "namespace.json").is_file()
    tier.describe(evicted.name.namespace, b"{}")
    tier.put(evicted.name, evicted.view())
    assert read(tier, evicted) == evicted.data
    tier.close()


def open_and_count_unreadable(root):
    tier = open_disk(root)
    tier.close()
    return tier.unreadable_count


# -- the scan at open -------------------------------------------------------------------------------------------------


def replant(tmp_path, data, name):
    """A directory with a good blob (chunk 0) and ``data`` under ``name``, opened without an index."""
    tier = open_disk(tmp_path, direct_io=False)
    fill(tier, 1)
    tier.close()
    path = blob_path(tmp_path, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path, open_disk(tmp_path)


def flipped(data, position):
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def test_a_broken_header_found_by_the_scan_is_removed(tmp_path):
    for number, data in enumerate([b"", b"x" * 12288, flipped(CHAIN.blob(5).data, 3), CHAIN.blob(6).data]):
        path, tier = replant(tmp_path / str(number), data, CHAIN.name(5))
        assert not path.exists()
        assert tier.unreadable_count == 1
        assert [info.name for info in tier.scan()] == [CHAIN.name(0)]
        assert tier.usage().used_bytes == du_bytes(tmp_path / str(number) / "blobs")
        tier.close()


def test_a_flipped_namespace_in_our_own_header_is_damage_and_removed(tmp_path):
    data = CHAIN.blob(5).data
    position = data.index(CHAIN.namespace.hex().encode())
    path, tier = replant(tmp_path, flipped(data, position), CHAIN.name(5))
    assert not path.exists()
    tier.close()


def test_a_broken_header_with_a_position_that_no_chunk_can_have_is_removed(tmp_path):
    data = bytearray(CHAIN.blob(5).data)
    data[CHUNK_INDEX.offset] ^= 8  # one bit: the first of ten digits is 8
    path, tier = replant(tmp_path, bytes(data), CHAIN.name(5))
    tier.record_use([CHAIN.name(0)])
    tier.flush()  # a row that the index has no room for would keep all others out of it
    assert not path.exists() and tier.unreadable_count == 1
    assert [key for rows in DiskIndex(tmp_path).load().values() for key in rows] == [CHAIN.name(0).key]
    tier.close()


def test_an_intact_blob_of_another_namespace_is_counted_and_never_touched(tmp_path):
    data = SampleChain(seed=1).blob(5).data
    name = CHAIN.name(5)
    path, tier = replant(tmp_path, data, name)
    ours = CHAIN.blob(5)
    with pytest.raises(ChunkMismatch, match="foreign file"):
        tier.put(name, ours.view())
    assert not tier.delete(name)
    assert path.read_bytes() == data
    assert tier.unreadable_count == 1
    assert [info.name for info in tier.scan()] == [CHAIN.name(0)]
    assert tier.usage().used_bytes == du_bytes(tmp_path / "blobs")
    assert tier.usage().blob_count == 1
    tier.close()


def test_misnamed_files_are_counted_as_used_and_left_alone(tmp_path):
    open_disk(tmp_path).close()
    (tmp_path / "blobs" / "notes.txt").write_bytes(bytes(5000))
    tier = open_disk(tmp_path)
    assert tier.unreadable_count == 1
    assert tier.usage().used_bytes == 8192
    assert tier.usage().blob_count == 0
    tier.close()
    assert (tmp_path / "blobs" / "notes.txt").exists()


# -- threads and names ------------------------------------------------------------------------------------------------


def test_threads_that_put_one_name_leave_one_file_and_exact_accounts(tmp_path):
    tier = open_disk(tmp_path)
    versions = [CHAIN.blob(0, version=version) for version in range(2)]
    barrier = threading.Barrier(2)

    def store(blob):
        for _ in range(50):
            barrier.wait()
            tier.put(blob.name, blob.view())

    threads = [threading.Thread(target=store, args=(blob,)) for blob in versions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(tier, versions[0]) in {blob.data for blob in versions}
    assert tier.usage().used_bytes == du_bytes(tmp_path / "blobs") == 12288
    assert temp_files(tmp_path) == []
    tier.close()


def test_names_must_be_sixteen_bytes_each(tmp_path):
    tier = open_disk(tmp_path)
    with pytest.raises(ValueError, match="16"):
        tier.contains(BlobName(b"short", b"key"))
    tier.close()


@pytest.mark.parametrize("payload_bytes", [4096, 8192, 65536])
def test_a_blob_of_another_namespace_and_any_size_is_foreign_to_a_get(tmp_path, payload_bytes):
    tier = open_disk(tmp_path)
    tier.put(CHAIN.name(0), CHAIN.blob(0).view())
    other = SampleChain(seed=1, payload_bytes=payload_bytes).blob(0)
    blob_path(tmp_path, CHAIN.name(0)).write_bytes(other.data)
    with pytest.raises(ChunkMismatch, match="namespace"):
        VerifiedTier(tier, {CHAIN.namespace: CHAIN.form}.get).get_into(
            CHAIN.name(0), memoryview(bytearray(CHAIN.form.blob_bytes))
        )
    tier.close()


def test_a_blob_of_several_pieces_is_read_in_order_and_checked_while_it_comes(tmp_path):
    chain = SampleChain(payload_bytes=2 * READ_PIECE_BYTES + 4096)
    tier = open_disk(tmp_path)
    blob = chain.blob(0)
    tier.put(blob.name, blob.view())
    buffer, seen = bytearray(len(blob.data)), []
    assert tier.get_into_by_pieces(blob.name, memoryview(buffer), seen.append)
    assert bytes(buffer) == blob.data
    assert seen == [READ_PIECE_BYTES, 2 * READ_PIECE_BYTES, len(blob.data)]
    verified = VerifiedTier(tier, {chain.namespace: chain.form}.get)
    buffer[:] = bytes(len(buffer))
    assert verified.get_into(blob.name, memoryview(buffer))
    assert bytes(buffer) == blob.data
    path = blob_path(tmp_path, blob.name)
    for at in (0, 5000, READ_PIECE_BYTES - 1, READ_PIECE_BYTES, 2 * READ_PIECE_BYTES, len(blob.data) - 1):
        damaged = bytearray(blob.data)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ChunkCorrupt):
            verified.get_into(blob.name, memoryview(buffer))
    path.write_bytes(blob.data)
    assert verified.get_into(blob.name, memoryview(buffer))
    tier.close()


def test_what_a_first_read_got_wrong_is_forgotten_by_the_second(tmp_path, monkeypatch):
    """The hash of a read that failed must not go into the next one's."""
    chain = SampleChain(payload_bytes=READ_PIECE_BYTES)
    tier = open_disk(tmp_path)
    blob = chain.blob(0)
    tier.put(blob.name, blob.view())
    real, reads = os.preadv, []

    def wrong_once(descriptor, buffers, offset):
        count = real(descriptor, buffers, offset)
        if not reads:
            buffers[0][4096] ^= 1
        reads.append(offset)
        return count

    monkeypatch.setattr(os, "preadv", wrong_once)
    buffer = bytearray(len(blob.data))
    assert VerifiedTier(tier, {chain.namespace: chain.form}.get).get_into(blob.name, memoryview(buffer))
    assert bytes(buffer) == blob.data
    assert reads == [0, READ_PIECE_BYTES] * 2
    tier.close()
