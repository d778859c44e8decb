"""What an operator can do with a tier: the same promises for a directory, a shared directory and a bucket."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tests.kit.storage.stored_prompts import CHUNK, Model, tokens
from tiered_kv.errors import ConfigError, DirectoryLocked, TierUnavailable
from tiered_kv.keys.naming import BlobName, object_path, relative_path
from tiered_kv.ops import disk_storage
from tiered_kv.ops.disk_storage import DiskStorage
from tiered_kv.ops.forest import Forest
from tiered_kv.ops.open import open_storage
from tiered_kv.ops.storage import FOR_GOOD, RemovalTotals, Storage
from tiered_kv.tiers.disk.index import read_index
from tiered_kv.tiers.disk.tier import DiskTier

FAR_S = 4_000_000_000.0


@pytest.fixture(params=["disk", "shared", "s3"])
def opened(request, tmp_path: Path):
    """A tier of each kind, opened anew by every call."""
    if request.param == "s3":
        s3 = request.getfixturevalue("s3")
        uri, settings = s3.uri(s3.new_prefix()), {"storage_options": s3.options()}
    elif request.param == "shared":
        uri, settings = f"shared+file://{tmp_path}/bucket", {}
    else:
        (tmp_path / "disk").mkdir()
        uri, settings = f"file://{tmp_path}/disk", {"disk_bytes": "1GiB"}
    return lambda: open_storage(uri, settings)


def keys(blobs) -> set[bytes]:
    return {blob.name.key for blob in blobs}


def test_what_was_written_is_listed_with_its_ancestry_and_read_back(opened) -> None:
    model, prompt = Model(), tokens(1, 3)
    with opened() as storage:
        names = model.store(storage, prompt, prompt[:CHUNK] + tokens(2, 1))
    with opened() as storage:
        content = storage.look()
        expected = dict(model.blobs(prompt) + model.blobs(prompt[:CHUNK] + tokens(2, 1)))
        assert keys(content.blobs) == {name.key for name in expected} and len(content.blobs) == 4
        for blob in content.blobs:
            name = next(name for name in expected if name == blob.name)
            assert (blob.name.parent, blob.name.chunk_index) == (name.parent, name.chunk_index)
            assert storage.read(blob) == expected[name] and storage.read(blob, 100) == expected[name][:100]
            assert blob.size_bytes >= len(expected[name]) and blob.used_s >= blob.written_s > 1_700_000_000
        assert content.records[names[0].namespace].namespace == model.namespace
        assert content.records[names[0].namespace].chunk_tokens == CHUNK
        assert (content.strays, content.notes) == ([], [])
        assert storage.contains([names[1], BlobName(names[0].namespace, bytes(16), bytes(16), 1)]) == [True, False]
        assert storage.read(BlobName(names[0].namespace, bytes(16), bytes(16), 1)) is None
        assert storage.records().keys() == content.records.keys()


def test_a_second_write_leaves_what_is_there(opened) -> None:
    name, data = Model().blobs(tokens(1, 1))[0]
    with opened() as storage:
        assert storage.write(name, memoryview(data))
        assert not storage.write(name, memoryview(data[:4096] + bytes(len(data) - 4096)))
        assert storage.read(name) == data


def test_a_removal_counts_what_goes(opened) -> None:
    with opened() as storage:
        names = Model().store(storage, tokens(1, 4))
        content = storage.look()
        seen: list[int] = []
        removal = storage.remove(
            [b for b in content.blobs if b.name.chunk_index >= 2], lambda done, _: seen.append(done)
        )
        assert (removal.removed, removal.kept) == (2, 0) and seen[-1] == 2
        assert removal.removed_bytes == sum(b.size_bytes for b in content.blobs if b.name.chunk_index >= 2)
        assert storage.contains(names) == [True, True, False, False]
    with opened() as storage:
        assert keys(storage.look().blobs) == {name.key for name in names[:2]}


def test_a_server_that_goes_on_deleting_is_waited_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than for one that deletes nothing: what is left then is said to have failed."""
    with DiskStorage(root, limit_bytes=1 << 30) as storage:
        Model().store(storage, tokens(1, 5))
        blobs = list(storage.look().blobs)
        files, now_s = [root / storage.path(blob.name) for blob in blobs], [0.0]

        def delete_one(_: float) -> None:
            now_s[0] += 0.9 * disk_storage.REMOVAL_WAIT_S
            if files:
                files.pop().unlink()

        clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=delete_one)
        monkeypatch.setattr(disk_storage, "time", clock)
        assert storage._wait_gone(blobs, storage._files_of(blobs), 0, lambda *_: None) == []


def test_pins_are_kept_replaced_and_ended(opened) -> None:
    with opened() as storage:
        names = Model().store(storage, tokens(1, 3))
        storage.pin(names[1:], FAR_S)
        storage.pin(names[2:], FOR_GOOD)
        storage.pin(names[:1], 1.0)  # long over
    with opened() as storage:
        assert {name: until for name, until in storage.pins().items() if until > 2} == {
            names[1]: FAR_S,
            names[2]: FOR_GOOD,
        }
        shown = {blob.name.key: blob.pinned_until_s for blob in storage.look().blobs}
        assert (shown[names[1].key], shown[names[2].key]) == (FAR_S, FOR_GOOD)
        assert keys(
            b for b in storage.look().blobs if (b.name.namespace, b.name.key) in Forest(storage.look().blobs).pinned()
        ) >= {name.key for name in names}
        assert storage.unpin(names[1:]) == 2 and storage.unpin(names[1:]) == 0
        assert not set(storage.pins()) & set(names[1:])


def test_what_is_no_blob_is_a_stray_and_can_be_removed(opened, request) -> None:
    with opened() as storage:
        names = Model().store(storage, tokens(1, 2))
        place = put_stray(storage, names[0])
        (stray,) = storage.look().strays
        assert (stray.path, stray.kind) == (place, "name") and stray.size_bytes > 0
        assert storage.remove_strays([stray]) == RemovalTotals(1, stray.size_bytes)
        assert storage.look().strays == [] and storage.contains(names) == [True, True]


def put_stray(storage: Storage, name: BlobName) -> str:
    if storage.kind == "disk":
        path = storage.root / "blobs" / name.namespace.hex() / "notes.txt"
        path.write_text("somebody's")
        return str(path.relative_to(storage.root))
    storage.store.put(f"{name.namespace.hex()}/notes.txt", b"somebody's")
    return f"{name.namespace.hex()}/notes.txt"


def test_records_that_lie_are_told(opened) -> None:
    other = Model(weights="other").namespace
    with opened() as storage:
        (name, *_) = Model().store(storage, tokens(1, 1))
        for data, problem in (
            (other.record, "is that of"),
            (b"{", "cannot be understood"),
            (b"[1]", "cannot be understood"),
        ):
            put_record(storage, name.namespace, data)
            record = storage.records()[name.namespace]
            assert record.namespace is None and problem in record.problem and record.chunk_tokens is None


def put_record(storage: Storage, space: bytes, data: bytes) -> None:
    if storage.kind == "disk":
        (storage.root / "blobs" / space.hex() / "namespace.json").write_bytes(data)
    else:
        storage.store.put(f"{space.hex()}/namespace.json", data)


# --- directories -----------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def test_looking_changes_nothing_and_takes_no_lock(root: Path) -> None:
    tier = DiskTier(root, 1 << 30)
    for name, data in Model().blobs(tokens(1, 3)):
        tier.put(name, memoryview(data))
    tier.flush()
    before = snapshot(root)
    with open_storage(f"file://{root}") as storage:
        assert len(storage.look().blobs) == 3
        with pytest.raises(DirectoryLocked, match="let the server do it"):
            storage.write(*((name, memoryview(data)) for name, data in Model().blobs(tokens(2, 1))).__next__())
    assert snapshot(root) == before
    tier.close()


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    """Files with size and time."""
    found = {path: path.stat() for path in root.rglob("*") if path.is_file()}
    return {str(path): (status.st_size, status.st_mtime_ns) for path, status in found.items()}


def test_recency_comes_from_the_index_and_survives(root: Path) -> None:
    names = [name for name, _ in Model().blobs(tokens(1, 2))]
    with open_storage(f"file://{root}") as storage:
        Model().store(storage, tokens(1, 2))
    for name in names:
        os.utime(root / "blobs" / relative_path(name), (1_600_000_000, 1_600_000_000))
    tier = DiskTier(root, 1 << 30)
    tier.record_use([names[0]])
    tier.close()
    with open_storage(f"file://{root}") as storage:
        used = {blob.name.key: blob.used_s for blob in storage.look().blobs}
    assert used[names[0].key] > 1_700_000_000 and {
        row.used_s for shard in read_index(root).values() for row in shard.rows().values()
    }


def test_the_index_tells_of_each_blob_what_its_header_does(root: Path) -> None:
    """Of all in a directory that are as the index says, of some that are not, and of none."""
    model, prompt = Model(), tokens(1, 20)
    with open_storage(f"file://{root}") as storage:
        names = model.store(storage, prompt) + model.store(storage, prompt[:CHUNK] + tokens(2, 200))[1:]
        tail, blob = model.tail(prompt, 3, 8)
        assert storage.write(tail, memoryview(blob))
        for name, blob in model.blobs(tokens(3, 60), tag="mine"):
            assert storage.write(name, memoryview(blob))
            names.append(name)
        storage.pin([names[5], names[-1]], FAR_S)
    assert len(names) > 256, "some directories have several"
    for name in names[::10]:  # as another size than the index says
        path = root / "blobs" / relative_path(name)
        with path.open("ab") as file:
            file.write(bytes(70_000))
        os.utime(path, (1_800_000_000, 1_800_000_000))

    def listed() -> dict[bytes, tuple[object, ...]]:
        with open_storage(f"file://{root}") as storage:
            content = storage.look()
        assert (content.strays, content.notes) == ([], []) and len(content.blobs) == len(names) + 1
        assert sum(blob.tail_tokens for blob in content.blobs) == 8
        return {
            blob.name.key: (blob.name.parent, blob.name.chunk_index, *msgspec.structs.astuple(blob)[1:])
            for blob in content.blobs
        }

    uses = {key: row.used_s for shard in read_index(root).values() for key, row in shard.rows().items()}
    by_index = listed()
    (root / "index" / "cache.db").unlink()
    by_header = listed()
    assert by_index.keys() == by_header.keys() and len({told[-2] for told in by_header.values()}) == 2
    for key, told in by_header.items():
        written_s, known = told[3], by_index[key]
        assert (*known[:4], *known[5:]) == (*told[:4], *told[5:])
        assert known[4] == max(written_s, uses[key]) and told[4] == written_s, "the index alone knows the last use"


@pytest.mark.parametrize("damage", ["gone", "garbage", "locked away"])
def test_an_index_that_cannot_be_read_costs_only_times(root: Path, damage: str) -> None:
    with open_storage(f"file://{root}") as storage:
        Model().store(storage, tokens(1, 3))
    database = root / "index" / "cache.db"
    if damage == "gone":
        database.unlink()
    elif damage == "garbage":
        database.write_bytes(b"no database" * 1000)
    else:
        database.unlink()
        database.mkdir()
    with open_storage(f"file://{root}") as storage:
        content = storage.look()
    assert len(content.blobs) == 3 and all(blob.name.parent for blob in content.blobs)
    assert bool(content.notes) is (damage != "gone")


def test_pins_that_cannot_be_read_are_told_and_never_overwritten(root: Path) -> None:
    with open_storage(f"file://{root}") as storage:
        names = Model().store(storage, tokens(1, 1))
        for text in (
            "{",
            '{"version": 2, "pins": {}}',
            '{"version": 1, "pins": {"xyz": 0}}',
            '{"version":1,"pins":{"00":0}}',
        ):
            (root / "pins.json").write_text(text)
            assert any("pins" in line for line in storage.look().notes)
            with pytest.raises(TierUnavailable, match="mend or remove the file"):
                storage.pin(names, FOR_GOOD)
            assert (root / "pins.json").read_text() == text


def test_a_pin_keeps_a_blob_of_an_open_tier(root: Path) -> None:
    tier = DiskTier(root, 1 << 30)
    assert not tier.pinned()
    name = Model().names(tokens(1, 1))[0]
    with open_storage(f"file://{root}") as storage:
        storage.pin([name], FAR_S)
    tier.flush()
    assert set(tier.pinned()) == {name.key}
    (root / "pins.json").write_text("{")
    tier.flush()
    assert set(tier.pinned()) == {name.key}, "nobody said otherwise"
    tier.close()


def test_a_place_that_is_none_is_told(tmp_path: Path) -> None:
    for uri, expected in (
        (f"file://{tmp_path}/nowhere", "there is no such directory"),
        ("ftp://somewhere", "unknown scheme"),
    ):
        with pytest.raises(ConfigError, match=expected):
            open_storage(uri)


def test_headers_that_do_not_fit_their_place_are_strays(root: Path) -> None:
    other = Model(weights="other")
    with open_storage(f"file://{root}") as storage:
        names = Model().store(storage, tokens(1, 3))
    blobs = root / "blobs"
    (blobs / relative_path(names[0])).write_bytes(b"torn" * 3000)
    (blobs / relative_path(names[1])).write_bytes(other.blobs(tokens(1, 2))[1][1] + bytes(4096))
    with open_storage(f"file://{root}") as storage:
        strays = {stray.path: stray for stray in storage.look().strays}
        kinds = [strays[f"blobs/{relative_path(name)}"].kind for name in names[:2]]
        assert kinds == ["damaged", "foreign"] and not any(str(root) in stray.reason for stray in strays.values())
        assert keys(storage.look().blobs) == {names[2].key}
        assert keys(Forest(storage.look().blobs).unreachable()) == {names[2].key}


# --- buckets ---------------------------------------------------------------------------------------------------------


def test_use_in_a_bucket_is_what_its_logs_say(tmp_path: Path) -> None:
    from tiered_kv.fleet.recency import UseLog
    from tiered_kv.fleet.timing import Timing

    with open_storage(f"shared+file://{tmp_path}/bucket") as storage:
        names = Model().store(storage, tokens(1, 2))
        os.utime(tmp_path / "bucket" / object_path(names[0]), (1_600_000_000, 1_600_000_000))
        os.utime(tmp_path / "bucket" / object_path(names[1]), (1_600_000_000, 1_600_000_000))
        log = UseLog(storage.store, Timing(), lambda: 0.0, "server-1")
        log.record([names[1]])
        log.flush()
        content = storage.look()
        used = {blob.name.key: blob.used_s for blob in content.blobs}
        assert used[names[0].key] == 1_600_000_000 and used[names[1].key] > 1_700_000_000
        forest = Forest(content.blobs)
        dated = dict(zip((blob.name for blob in forest.blobs), forest.last_uses(), strict=True))
        assert dated[names[0]] == used[names[1].key], "a use of a chunk is one of its prefix"
        storage.store.put("_tiered_kv/recency/x/000000000000", b"garbage")
        assert storage.look().notes == ["1 logs of use cannot be understood and were left out"]


def test_the_limit_of_a_bucket_is_that_of_its_newest_lease(tmp_path: Path) -> None:
    with open_storage(f"shared+file://{tmp_path}/bucket") as storage:
        assert storage.capacity_bytes() is None
        for term, capacity in ((1, 5), (2, 7)):
            path = f"_tiered_kv/lease/{term:020d}"
            storage.store.put(path, json.dumps({"holder": "s", "counter": 1, "capacity_bytes": capacity}).encode())
        assert storage.capacity_bytes() == 7
