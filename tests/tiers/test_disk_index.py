"""The persisted index: what it remembers, what it refuses to run, and how it is rebuilt when it is damaged."""

import logging
import os
import shutil
import sqlite3
import subprocess
import sys

import msgspec
import pytest
import xxhash

from tests.kit.samples.old_index import OLD_MAGICS, packed, write_old_index
from tests.kit.storage.disk_probe import blob_files, open_disk
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.tags import NO_TAG
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.tiers.base import BlobInfo
from tiered_kv.tiers.disk.index import (
    LISTED_SIZE,
    LISTED_USE,
    DiskIndex,
    IndexDamaged,
    IndexRow,
    PackedShard,
    Shard,
    is_on_local_disk,
    is_on_network,
    pack_rows,
    reads_by_address,
    unpack_rows,
)
from tiered_kv.tiers.disk.ledger import DiskLedger

CHAIN = SampleChain()
LINES = ["", "tiered_kv/0.9.1 vllm/0.32.0 cpu/amx", "tiered_kv/0.9.1 vllm/0.32.1 cpu/amx"]


def rows(*numbers, space=bytes(16)):
    return [
        IndexRow(
            ChunkRecord(space, bytes([n]) * 16, bytes([n + 1]) * 16, n, bytes([n]) * 32, bytes([n]) * 16, LINES[n % 3]),
            *(4096 * n, n << 40, n << 20),
        )
        for n in numbers
    ]


def whole(of):
    """All that rows tell, by key, also what records are equal without."""
    return {
        row.record.key: (*msgspec.structs.astuple(row.record), row.size_bytes, row.use_seq, row.used_s) for row in of
    }


def test_a_shard_whose_blobs_are_gone_is_written_once_more_and_then_forgotten():
    ledger, (row,) = DiskLedger(1 << 20), rows(1)
    info = BlobInfo(row.record, 4096)
    ledger.reserve(4096, 1 << 20)
    ledger.commit(info, 4096)
    assert len(ledger.take_dirty()[Shard.of(info.name)]) == 1
    ledger.forget(info.name)
    assert ledger.take_dirty() == {Shard.of(info.name): []}
    ledger.mark_all_dirty()
    assert ledger.take_dirty() == {}


def told(shards):
    return {shard: whole(of.values()) for shard, of in shards.items()}


def stored(tmp_path, count=6):
    """A closed directory with ``count`` blobs, and their names."""
    tier = open_disk(tmp_path)
    for index in range(count):
        tier.put(CHAIN.name(index), CHAIN.blob(index).view())
    tier.close()
    return [CHAIN.name(index) for index in range(count)]


def scanned(tmp_path):
    """Names in the order that a new process sees."""
    tier = open_disk(tmp_path)
    names = [info.name for info in tier.scan()]
    tier.close()
    return names


def warnings(caplog):
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def damaged_copies(tmp_path):
    return sorted(path.name for path in tmp_path.glob("index.damaged-*"))


# -- rows -------------------------------------------------------------------------------------------------------------


def test_rows_survive_packing_and_a_new_process(tmp_path):
    shard, other = Shard(bytes(16), 0xAB), Shard(b"\xff" * 16, 0)
    DiskIndex(tmp_path).write({shard: rows(1, 2), other: rows(3, space=other.namespace)})
    assert told(DiskIndex(tmp_path).load()) == {
        shard: whole(rows(1, 2)),
        other: whole(rows(3, space=other.namespace)),
    }
    DiskIndex(tmp_path).write({shard: []})
    assert set(DiskIndex(tmp_path).load()) == {other}


@pytest.mark.parametrize("position", [0, 4, 12, 16, 18, 150, -1])
def test_a_value_with_one_flipped_bit_is_refused(position):
    value = bytearray(pack_rows(rows(1, 2)))
    assert unpack_rows(bytes(value), bytes(16))
    value[position] ^= 1
    with pytest.raises(IndexDamaged):
        unpack_rows(bytes(value), bytes(16))


@pytest.mark.parametrize("length", [0, 3, 11, 13, 17, 100, 111, 117])
def test_a_cut_value_is_refused(length):
    with pytest.raises(IndexDamaged):
        unpack_rows(pack_rows(rows(1, 2))[:length], bytes(16))


# -- other versions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", OLD_MAGICS)
def test_rows_of_an_older_version_are_read_without_what_it_did_not_have(tmp_path, caplog, version):
    shard, other = Shard(bytes(16), 0xAB), Shard(b"\xff" * 16, 0)
    write_old_index(tmp_path, {shard: rows(1, 2)}, OLD_MAGICS[version])
    newer = rows(3, space=other.namespace)
    DiskIndex(tmp_path).write({other: newer})  # as a flush does that finds one directory changed
    lacking = {"stored_by": ""} | ({"tag": NO_TAG} if version == 1 else {})
    older = [msgspec.structs.replace(row, record=msgspec.structs.replace(row.record, **lacking)) for row in rows(1, 2)]
    assert told(DiskIndex(tmp_path).load()) == {shard: whole(older), other: whole(newer)}
    assert not caplog.records and not damaged_copies(tmp_path)


def test_a_flipped_bit_in_the_magic_does_not_make_rows_of_another_version():
    """Eleven rows of version 2 have the length of thirteen of version 1; every seed is another one."""
    second, first = packed(rows(*range(11)), OLD_MAGICS[2]), packed(rows(*range(13)), OLD_MAGICS[1])
    assert len(second) == len(first)
    for value in (pack_rows(rows(*range(11))), second, first):
        for magic in (b"TKX2", b"TKX3", b"TKX4"):
            if not value.startswith(magic):
                with pytest.raises(IndexDamaged, match="checksum"):
                    unpack_rows(magic + value[4:], bytes(16))


def test_who_stored_is_written_once_for_a_shard_and_is_one_object_in_memory():
    many = rows(*(n for n in range(1, 151) if n % 3))
    value = pack_rows(many)
    assert all(value.count(line.encode()) == 1 for line in LINES[1:])
    found = unpack_rows(value, bytes(16))
    assert whole(found.values()) == whole(many)
    assert len({id(row.record.stored_by) for row in found.values()}) == 2


@pytest.mark.parametrize("magic", [b"TKX4", *OLD_MAGICS.values()])
def test_what_a_listing_takes_of_a_shard_is_what_its_rows_say(magic):
    of = rows(*range(40))
    shard = PackedShard(pack_rows(of) if magic == b"TKX4" else packed(of, magic), bytes(16))
    listed, full = shard.listed(), shard.rows()
    assert len(shard) == len(listed) == len(full) == 40 and list(listed) == list(full)
    origins = shard.origins([row[4] for row in listed.values()])
    for (key, parent, index, size, _, used_s), (tag, line), row in zip(listed.values(), origins, of, strict=True):
        told = full[row.record.key]
        assert (key, parent, index, size, used_s) == (
            *(row.record.key, row.record.parent, row.record.chunk_index),
            *(row.size_bytes, row.used_s),
        )
        assert (tag, line) == (told.record.tag, told.record.stored_by)
        assert size == listed[key][LISTED_SIZE] and used_s == listed[key][LISTED_USE]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\x05ab",
        b"\x01\x00\x00\x00\x04some",
        b"\x01\x00\x00\x00\x02\xc3\xa9",
        bytes(4) + bytes(107),
        bytes(4) + bytes(108),  # a row whose line is not there
    ],
)
def test_a_value_with_a_right_checksum_that_nobody_could_have_written_is_damage(body):
    value = b"TKX4" + xxhash.xxh3_64_intdigest(body, seed=4).to_bytes(8, "little") + body
    with pytest.raises(IndexDamaged, match="cannot be read"):
        unpack_rows(value, bytes(16))


def test_an_index_of_a_later_version_is_no_damage_and_rebuilt_by_a_scan(tmp_path, caplog):
    names = stored(tmp_path)
    found = DiskIndex(tmp_path).load()
    write_old_index(tmp_path, {shard: list(of.values()) for shard, of in found.items()}, magic=b"TKX5")
    with caplog.at_level(logging.INFO, "tiered_kv"):
        assert set(scanned(tmp_path)) == set(names)
    assert "of another version: rebuilding it by a scan" in caplog.text
    assert not warnings(caplog) and not damaged_copies(tmp_path)
    assert {key for of in DiskIndex(tmp_path).load().values() for key in of} == {name.key for name in names}


# -- recency ----------------------------------------------------------------------------------------------------------


def test_recency_survives_a_restart(tmp_path):
    names = stored(tmp_path)
    assert scanned(tmp_path) == names
    tier = open_disk(tmp_path)
    tier.record_use([names[2], names[0]])
    tier.close()
    expected = [names[1], names[3], names[4], names[5], names[2], names[0]]
    assert scanned(tmp_path) == expected
    tier = open_disk(tmp_path)  # the counter goes on where it was
    tier.record_use([names[1]])
    tier.close()
    assert scanned(tmp_path) == [*expected[1:], names[1]]


def test_order_does_not_follow_file_times(tmp_path):
    names = stored(tmp_path)
    for path in blob_files(tmp_path):
        os.utime(path, (len(path.name) + path.stat().st_ino % 7, 12345))
    assert scanned(tmp_path) == names


def test_blobs_the_index_does_not_know_are_oldest_and_the_deepest_goes_first(tmp_path):
    names = stored(tmp_path, 3)
    shutil.copytree(tmp_path / "index", tmp_path / "kept")
    tier = open_disk(tmp_path)
    for index in (3, 4):
        tier.put(CHAIN.name(index), CHAIN.blob(index).view())
    tier.close()
    shutil.rmtree(tmp_path / "index")
    (tmp_path / "kept").rename(tmp_path / "index")  # as if the process had been killed before a flush
    assert scanned(tmp_path) == [CHAIN.name(4), CHAIN.name(3), *names]


def test_flush_persists_without_a_close(tmp_path):
    names = stored(tmp_path)
    tier = open_disk(tmp_path)
    tier.record_use([names[0]])
    tier.flush()
    found = DiskIndex(tmp_path).load()
    row = found[Shard.of(names[0])][names[0].key]
    assert row.use_seq == max(row.use_seq for shard in found.values() for row in shard.values())
    tier.close()


def test_deleted_blobs_leave_the_index(tmp_path):
    names = stored(tmp_path)
    tier = open_disk(tmp_path)
    for name in names[1:]:
        tier.delete(name)
    tier.close()
    assert [row.record.key for shard in DiskIndex(tmp_path).load().values() for row in shard.values()] == [names[0].key]


def test_rows_without_a_file_are_dropped_and_forgotten(tmp_path):
    names = stored(tmp_path)
    for path in blob_files(tmp_path)[:2]:
        path.unlink()
    kept = scanned(tmp_path)
    assert len(kept) == 4 and set(kept) < set(names)
    assert sum(len(shard) for shard in DiskIndex(tmp_path).load().values()) == 4


# -- damage -----------------------------------------------------------------------------------------------------------


def garbage_everywhere(index):
    (index / "cache.db").write_bytes(b"not a database at all" * 1000)


def garbage_in_the_values(index):
    with sqlite3.connect(index / "cache.db") as connection:
        connection.execute("UPDATE Cache SET value = x'00112233'")
    connection.close()


def cut_in_half(index):
    os.truncate(index / "cache.db", (index / "cache.db").stat().st_size // 2 + 100)


def table_dropped(index):
    with sqlite3.connect(index / "cache.db") as connection:
        connection.execute("DROP TABLE Cache")
        connection.execute("CREATE TABLE Cache (x)")
    connection.close()


def foreign_key(index):
    with sqlite3.connect(index / "cache.db") as connection:
        connection.execute("UPDATE Cache SET key = 'other/' || rowid")
    connection.close()


def a_file_in_its_place(index):
    shutil.rmtree(index)
    index.write_bytes(b"x")


DAMAGES = [
    garbage_everywhere,
    garbage_in_the_values,
    cut_in_half,
    table_dropped,
    foreign_key,
    a_file_in_its_place,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_index_is_moved_aside_and_rebuilt_with_one_warning(tmp_path, caplog, damage):
    names = stored(tmp_path)
    damage(tmp_path / "index")
    assert set(scanned(tmp_path)) == set(names)
    [warning] = warnings(caplog)
    assert "disk index unusable" in warning.getMessage()
    assert damaged_copies(tmp_path) == ["index.damaged-1"]
    caplog.clear()
    assert set(scanned(tmp_path)) == set(names)
    assert warnings(caplog) == []
    assert sum(len(shard) for shard in DiskIndex(tmp_path).load().values()) == 6


def test_only_the_last_damaged_index_is_kept(tmp_path):
    stored(tmp_path)
    for _ in range(3):
        garbage_everywhere(tmp_path / "index")
        scanned(tmp_path)
    assert damaged_copies(tmp_path) == ["index.damaged-3"]


def test_a_missing_index_is_rebuilt_without_a_warning(tmp_path, caplog):
    names = stored(tmp_path)
    shutil.rmtree(tmp_path / "index")
    assert scanned(tmp_path) == list(reversed(names))  # no recency: the deepest first
    assert warnings(caplog) == []


def test_an_index_locked_by_another_process_is_moved_aside(tmp_path, caplog):
    names = stored(tmp_path)
    script = (
        "import sqlite3, sys\n"
        "connection = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "connection.execute('BEGIN EXCLUSIVE')\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-S", "-c", script, str(tmp_path / "index" / "cache.db")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"locked\n"
        assert set(scanned(tmp_path)) == set(names)
        holder.stdin.close()
    assert damaged_copies(tmp_path) == ["index.damaged-1"]
    assert "locked" in warnings(caplog)[0].getMessage()


def test_an_index_damaged_while_the_tier_is_open_is_written_anew(tmp_path):
    names = stored(tmp_path)
    tier = open_disk(tmp_path)
    garbage_everywhere(tmp_path / "index")
    tier.record_use([names[0]])
    tier.close()
    assert damaged_copies(tmp_path) == ["index.damaged-1"]
    assert scanned(tmp_path) == [*names[1:], names[0]]


def test_a_pickled_row_is_never_unpickled(tmp_path):
    names = stored(tmp_path)
    trap = tmp_path / "executed"
    program = b"cos\nmkdir\n(V" + str(trap).encode() + b"\ntR."  # what an unpickler would run
    with sqlite3.connect(tmp_path / "index" / "cache.db") as connection:
        connection.execute("UPDATE Cache SET value = ?, mode = 4", (program,))
    connection.close()
    assert set(scanned(tmp_path)) == set(names)
    assert not trap.exists()
    assert damaged_copies(tmp_path) == ["index.damaged-1"]


def test_a_row_cannot_name_a_file_to_read_or_to_remove(tmp_path):
    names = stored(tmp_path)
    victim = tmp_path / "victim"
    victim.write_bytes(b"x")
    with sqlite3.connect(tmp_path / "index" / "cache.db") as connection:
        connection.execute("UPDATE Cache SET filename = '../victim'")
    connection.close()
    tier = open_disk(tmp_path)
    tier.record_use(names)
    tier.close()
    assert victim.exists()
    assert damaged_copies(tmp_path) == ["index.damaged-1"]


# -- where there is no index ------------------------------------------------------------------------------------------

MOUNTS = """\
/dev/vda / ext4 rw 0 0
server:/export /mnt/shared nfs4 rw 0 0
/dev/vdb /mnt/shared/scratch xfs rw 0 0
//host/share /mnt/with\\040space cifs rw 0 0
user@host: /home/me/far fuse.sshfs rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
bucket /mnt/bucket fuse.juicefs rw 0 0
share /mnt/share virtiofs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/var/cache", False),
        ("/mnt/shared/cache", True),
        ("/mnt/sharedness", False),
        ("/mnt/shared/scratch/cache", False),
        ("/mnt/with space/cache", True),
        ("/home/me/far", True),
        ("/dev/shm/x", False),
    ],
)
def test_network_mounts_are_told_from_local_ones(tmp_path, path, expected):
    assert is_on_network(tmp_path.__class__(path), MOUNTS) is expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/var/cache", True),
        ("/dev/shm/x", True),
        ("/mnt/shared/cache", True),
        ("/mnt/with space/cache", False),
        ("/home/me/far", False),
        ("/mnt/bucket/cache", False),
        ("/mnt/share", False),
        ("not absolute", False),
    ],
)
def test_file_systems_that_may_fill_a_readers_pages_later_are_told_from_others(tmp_path, path, expected):
    assert reads_by_address(tmp_path.__class__(path), MOUNTS) is expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/var/cache", True),
        ("/mnt/shared/scratch/cache", True),
        ("/dev/shm/x", False),
        ("/mnt/shared/cache", False),
        ("/mnt/bucket/cache", False),
        ("/mnt/share", False),
    ],
)
def test_disks_of_this_machine_are_told_from_memory_and_networks(tmp_path, path, expected):
    assert is_on_local_disk(tmp_path.__class__(path), MOUNTS) is expected


@pytest.mark.parametrize(
    "name", ["d\u00e4t\u00e4", "da ta", "a\\b", "tab\tline\n", "page\x0cnext\x85line\u2028", "not utf-8 \udcff"]
)
def test_a_mount_point_may_have_any_name(tmp_path, name):
    written = "".join(f"\\{ord(one):03o}" if one in " \t\n\\" else one for one in name)
    mounts = f"/dev/vda / ext4 rw 0 0\nserver:/x /mnt/{written} nfs4 rw 0 0\n"
    path = tmp_path.__class__(f"/mnt/{name}/cache")
    assert is_on_network(path, mounts) and not is_on_local_disk(path, mounts)


def test_a_directory_whose_name_looks_like_a_variable_is_the_one_that_is_used(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TIERED_KV_ELSEWHERE", "elsewhere")
    root = tmp_path / "$TIERED_KV_ELSEWHERE" / "kv"
    root.parent.mkdir()
    names = stored(root)
    assert [path.name for path in tmp_path.iterdir()] == ["$TIERED_KV_ELSEWHERE"]
    assert "reads as a variable: no index" in caplog.text
    assert set(scanned(root)) == set(names)
