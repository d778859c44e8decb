"""`tiered-kv gc`: what nobody can use goes, and nothing else."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.kit.storage.places import Place, open_place
from tests.kit.storage.stored_prompts import CHUNK, Model, tokens
from tiered_kv.cli.app import app
from tiered_kv.errors import TierUnavailable
from tiered_kv.fleet.layout import MemberReport, encode, session_path
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.namespace import SELF_TEST_NAMESPACE
from tiered_kv.ops.garbage import Garbage, MinimumAges, collect, find
from tiered_kv.ops.object_storage import ObjectStorage
from tiered_kv.ops.storage import Content
from tiered_kv.server.epochs import EpochFile

HOUR_S, DAY_S = 3600.0, 86400.0


@pytest.fixture(params=["disk", "shared", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with open_place(request.param, tmp_path, request.getfixturevalue) as place:
        yield place


def base_model(place: Place, number: int) -> Model:
    return Model(epoch=f"{'base' if place.is_disk else 'shared'}-{number}")


def retire(place: Place, model: Model) -> None:
    """What a reset leaves: an epoch in force that is higher by one."""
    digest = Model(epoch="", weights=model.weights).namespace.digest
    if place.is_disk:
        assert place.directory is not None
        EpochFile(place.directory).retire(digest)
    else:
        place.put(f"_tiered_kv/epochs/{digest.hex()}/1", b"retired the number before\n")


def garbage_at(place: Place, after_s: float, *, is_collected: bool = False) -> Garbage:
    """What ``gc`` would find so much later, by the clock of this machine."""
    with place.open() as storage:
        garbage = find(storage, storage.look(), MinimumAges(), time.time() + after_s)
        if is_collected:
            collect(storage, garbage)
        return garbage


def kinds(garbage: Garbage) -> list[tuple[str, bytes | None, int]]:
    return [(item.kind, item.space, item.count) for item in garbage.items]


def store(place: Place, model: Model, *prompts: list[int]) -> list[str]:
    with place.open() as storage:
        return [storage.path(name) for name in model.store(storage, *prompts)]


def blobs(paths: set[str]) -> set[str]:
    return {path for path in paths if path.endswith(".safetensors")}


def test_orphans_go_once_they_are_old_and_nothing_else(place: Place) -> None:
    model, prompt = base_model(place, 0), tokens(1, 5)
    branch = store(place, model, prompt[:CHUNK] + tokens(2, 3))
    paths = store(place, model, prompt)
    place.delete(paths[2])
    kept = place.content()
    garbage = garbage_at(place, 0)
    assert kinds(garbage) == [] and "2 chunks behind a gap stay" in garbage.notes[0]

    garbage = garbage_at(place, HOUR_S, is_collected=True)
    assert kinds(garbage) == [("orphans", model.namespace.digest, 2)]
    assert [(item.removed, item.removed_bytes) for item in garbage.items] == [(2, garbage.size_bytes)]
    assert place.content() == {path: data for path, data in kept.items() if path not in paths[3:]}
    assert {*branch, *paths[:2]} <= place.paths()
    assert kinds(garbage_at(place, HOUR_S)) == []


def test_an_orphan_stays_for_a_young_or_a_pinned_chunk_behind_it(tmp_path: Path) -> None:
    place, model = Place.disk(tmp_path), Model()
    paths = store(place, model, tokens(1, 6))
    other = store(place, model, tokens(2, 4))
    (tmp_path / paths[1]).unlink()
    (tmp_path / other[0]).unlink()
    with place.open() as storage:
        storage.pin([model.names(tokens(2, 4))[2]], time.time() + 10 * DAY_S)
    for path in (*paths[2:4], paths[5], *other[1:]):
        os.utime(tmp_path / path, (1e9, 1e9))
    lose_index(tmp_path)
    code, report = place.run("gc", "--yes")
    assert [(item["kind"], item["count"], item["removed"]) for item in report["items"]] == [("orphans", 2, 2)]
    assert code == 0 and "5 chunks behind a gap stay" in report["notes"][0]
    assert blobs(place.paths()) == {paths[0], *paths[2:5], *other[1:3]}


def test_what_was_young_when_a_long_listing_began_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent may have come behind the place that the listing had reached."""
    place, list_all, late_s = Place.shared(tmp_path / "bucket"), ObjectStorage.look, [0.0]
    paths = store(place, base_model(place, 0), tokens(1, 3))
    place.delete(paths[0])

    def list_for_an_hour(storage: ObjectStorage, *given: object) -> Content:
        content = list_all(storage, *given)
        late_s[0] += HOUR_S
        return content

    now_s = time.time()
    monkeypatch.setattr(ObjectStorage, "look", list_for_an_hour)
    monkeypatch.setattr(time, "time", lambda: now_s + late_s[0])
    code, report = place.run("gc", "--yes")
    assert (code, report["items"]) == (0, []) and "2 chunks behind a gap stay" in report["notes"][0]


def lose_index(root: Path) -> None:
    """Without the index times of use are those of the files."""
    for path in (root / "index").iterdir():
        path.unlink()


def test_old_temp_files_go(place: Place) -> None:
    paths = store(place, base_model(place, 0), tokens(1, 2))
    left = {"disk": "tmp/1-2", "shared": "_tiered_kv/tmp/host-1-" + "cd" * 16, "s3": "_tiered_kv/probe/" + "ab" * 16}
    path = left["disk" if place.is_disk else "s3" if place.s3 else "shared"]
    place.put(path, b"half a blob")
    assert kinds(garbage_at(place, 0)) == []
    garbage = garbage_at(place, 2 * HOUR_S, is_collected=True)
    assert [(item.kind, item.count, item.removed) for item in garbage.items] == [("temp", 1, 1)]
    with pytest.raises(Exception, match="NoSuchKey|No such file"):
        place.get(path)
    assert set(paths) <= place.paths()
    assert kinds(garbage_at(place, 2 * HOUR_S)) == []


def test_what_is_left_of_temp_files_is_not_said_to_be_gone(tmp_path: Path) -> None:
    """Another user's, or, as here, without one: what is no plain file any more."""
    place = Place.disk(tmp_path)
    store(place, base_model(place, 0), tokens(1, 1))
    for name in ("1-2", "1-3"):
        place.put(f"tmp/{name}", b"half a blob")
    with place.open() as storage:
        garbage = find(storage, storage.look(), MinimumAges(), time.time() + 2 * HOUR_S)
        (tmp_path / "tmp/1-3").unlink()
        (tmp_path / "tmp/1-3").symlink_to(tmp_path / "elsewhere")
        collect(storage, garbage)
    (item,) = garbage.items
    assert (item.count, item.removed, item.removed_bytes * 2) == (2, 1, garbage.size_bytes)
    assert garbage.notes == ["1 temp file stays: another user's, or nothing that we write"]


def test_what_a_killed_self_test_left_goes(local_place: Place) -> None:
    """4 MiB under a namespace that no engine has."""
    place = local_place
    name = f"{SELF_TEST_NAMESPACE.hex()}/00/{'00' * 16}"
    place.put(f"blobs/{name}.safetensors" if place.is_disk else f"{name}.0000000.{name[:32]}.safetensors", selftest())
    assert kinds(garbage_at(place, 0)) == []
    garbage = garbage_at(place, 2 * HOUR_S, is_collected=True)
    assert [(item.kind, item.count, item.removed) for item in garbage.items] == [("temp", 1, 1)]
    assert blobs(place.paths()) == set()


def selftest() -> bytes:
    from tiered_kv.engine.self_test import self_test_format

    form = self_test_format()
    data = bytearray(form.blob_bytes)
    form.seal(memoryview(data), ChunkRecord(SELF_TEST_NAMESPACE, bytes(16), SELF_TEST_NAMESPACE, 0, bytes(32)), 1)
    return bytes(data)


def test_a_namespace_that_a_reset_retired_goes_with_its_record(place: Place) -> None:
    old, new = base_model(place, 0), base_model(place, 1)
    private, other = Model(epoch="private-" + "ab" * 16), Model(epoch=old.epoch, weights="other")
    store(place, old, tokens(1, 3))
    retire(place, old)
    kept = {path for model in (new, private, other) for path in store(place, model, tokens(1, 2))}
    with place.open() as storage:
        kept |= {storage.record_path(model.namespace.digest) for model in (new, private, other)}
    before = place.content()
    if not place.is_disk:
        assert kinds(garbage_at(place, 0)) == [], "an engine elsewhere may not have heard of the reset"
    assert kinds(garbage_at(place, HOUR_S)) == [("retired", old.namespace.digest, 3)]
    assert place.content() == before
    garbage = garbage_at(place, HOUR_S, is_collected=True)
    assert [item.removed for item in garbage.items] == [3]
    epochs = {path for path in place.paths() if path.startswith("_tiered_kv/epochs/")}
    assert place.content() == {path: before[path] for path in kept | epochs}
    if place.is_disk:
        assert place.directory is not None
        assert not (place.directory / "blobs" / old.namespace.digest.hex()).exists()
    assert kinds(garbage_at(place, HOUR_S)) == []


def test_a_private_namespace_goes_when_it_was_unused_for_long(place: Place) -> None:
    private, base = Model(epoch="private-" + "ab" * 16), base_model(place, 0)
    store(place, private, tokens(1, 3))
    kept = set(store(place, base, tokens(1, 3)))
    assert kinds(garbage_at(place, DAY_S - HOUR_S)) == []
    garbage = garbage_at(place, DAY_S + HOUR_S, is_collected=True)
    assert [(item.kind, item.space, item.removed) for item in garbage.items] == [
        ("private", private.namespace.digest, 3)
    ]
    assert blobs(place.paths()) == kept


def test_a_namespace_without_a_chunk_goes(local_place: Place) -> None:
    place = local_place
    empty, full = base_model(place, 0), Model(weights="other")
    with place.open() as storage:
        storage.write_record(empty.namespace)
        record = storage.record_path(empty.namespace.digest)
        full.store(storage, tokens(1, 1))
    if not place.is_disk:
        assert kinds(garbage_at(place, HOUR_S)) == [], "an engine may be about to store its first chunk"
    garbage = garbage_at(place, 2 * DAY_S, is_collected=True)
    assert [(item.kind, item.space, item.removed) for item in garbage.items] == [("empty", empty.namespace.digest, 1)]
    assert record not in place.paths() and len(blobs(place.paths())) == 1
    if place.is_disk:
        assert place.directory is not None
        assert [p.name for p in (place.directory / "blobs").iterdir()] == [full.namespace.digest.hex()]


def test_somebodys_data_keeps_a_namespace(local_place: Place) -> None:
    place = local_place
    empty = base_model(place, 0)
    with place.open() as storage:
        storage.write_record(empty.namespace)
        record = storage.record_path(empty.namespace.digest)
    place.put(record.replace("namespace.json", "notes.txt"), b"mine")
    before = place.content()
    assert kinds(garbage_at(place, 9 * DAY_S, is_collected=True)) == []
    assert place.content() == before


def test_what_came_since_the_listing_keeps_a_namespace(local_place: Place) -> None:
    empty = base_model(local_place, 0)
    with local_place.open() as storage:
        storage.write_record(empty.namespace)
    garbage = garbage_at(local_place, 9 * DAY_S)
    assert [item.kind for item in garbage.items] == ["empty"]
    paths = store(local_place, empty, tokens(1, 2))
    with local_place.open() as storage:
        collect(storage, garbage)
    assert [item.removed for item in garbage.items] == [0]
    with local_place.open() as storage:
        assert local_place.paths() == {*paths, storage.record_path(empty.namespace.digest)}


def test_pinned_chunks_keep_a_dead_namespace(local_place: Place) -> None:
    place = local_place
    old = base_model(place, 0)
    store(place, old, tokens(1, 3))
    retire(place, old)
    with place.open() as storage:
        storage.pin(old.names(tokens(1, 3))[:1], time.time() + 90 * DAY_S)
    garbage = garbage_at(place, HOUR_S)
    assert kinds(garbage) == [] and "stays, although it is dead: chunks of it are pinned" in garbage.notes[-1]
    with place.open() as storage:
        storage.unpin(old.names(tokens(1, 3)))
    assert kinds(garbage_at(place, HOUR_S)) == [("retired", old.namespace.digest, 3)]


def test_what_was_pinned_after_the_listing_stays(local_place: Place) -> None:
    """The question whether to go on may stand for an hour."""
    model, other = base_model(local_place, 0), Model(weights="other")
    names, paths = model.names(tokens(1, 4)), store(local_place, model, tokens(1, 4))
    local_place.delete(paths[0])
    local_place.delete(store(local_place, other, tokens(1, 3))[0])
    with local_place.open() as storage:
        garbage = find(storage, storage.look(), MinimumAges(), time.time() + HOUR_S)
        assert sorted(item.count for item in garbage.items) == [2, 3]
        storage.pin([names[2]], time.time() + DAY_S)
        collect(storage, garbage)
        assert storage.contains(names) == [False, True, True, True]
        assert storage.contains(other.names(tokens(1, 3))) == [False] * 3
    assert "3 chunks stay (orphans): some were pinned after the listing" in garbage.notes[-1]


def test_what_was_stored_behind_a_dead_namespace_s_chunks_and_pinned_keeps_all_of_it(local_place: Place) -> None:
    """An engine came back to it while the question stood; its new chunk is in no listing."""
    old = base_model(local_place, 0)
    store(local_place, old, tokens(1, 3))
    retire(local_place, old)
    with local_place.open() as storage:
        garbage = find(storage, storage.look(), MinimumAges(), time.time() + HOUR_S)
        assert kinds(garbage) == [("retired", old.namespace.digest, 3)]
    store(local_place, old, tokens(1, 4))
    names = old.names(tokens(1, 4))
    with local_place.open() as storage:
        storage.pin([names[3]], time.time() + DAY_S)
        collect(storage, garbage)
        assert storage.contains(names) == [True] * 4


def test_nothing_is_collected_while_pins_cannot_be_read(tmp_path: Path) -> None:
    place = Place.disk(tmp_path)
    paths = store(place, base_model(place, 0), tokens(1, 3))
    place.delete(paths[0])
    (tmp_path / "pins.json").write_text("nobody's")
    with pytest.raises(TierUnavailable, match="mend or remove the file"):
        garbage_at(place, HOUR_S, is_collected=True)
    assert blobs(place.paths()) == set(paths[1:])


def test_what_a_server_of_the_bucket_reports_as_served_stays(tmp_path: Path) -> None:
    place = Place.shared(tmp_path / "bucket")
    old = base_model(place, 0)
    store(place, old, tokens(1, 3))
    retire(place, old)
    now_s = time.time()
    for path in place.paths():
        os.utime(tmp_path / "bucket" / path, (now_s - DAY_S, now_s - DAY_S))
    report = session_path("server-1.1")
    place.put(report, encode(MemberReport(1, 1, namespaces=[old.namespace.digest.hex(), "nonsense"])))
    assert kinds(garbage_at(place, 0)) == []
    os.utime(tmp_path / "bucket" / report, (now_s - DAY_S, now_s - DAY_S))  # left by one that died
    assert kinds(garbage_at(place, 0)) == [("retired", old.namespace.digest, 3)]


def test_epochs_that_cannot_be_read_retire_nothing(tmp_path: Path) -> None:
    place, old = Place.disk(tmp_path), Model()
    store(place, old, tokens(1, 3))
    retire(place, old)
    (tmp_path / "epochs.json").write_bytes(b"\0\0")
    code, report = place.run("gc", "--yes")
    assert (code, report["items"]) == (0, [])
    assert "which namespaces resets have retired cannot be told" in report["notes"][-1]
    assert (tmp_path / "epochs.json").read_bytes() == b"\0\0", "the server's start mends it, not we"


def test_a_dry_run_and_a_missing_yes_change_nothing(tmp_path: Path) -> None:
    place, old = Place.disk(tmp_path), Model()
    store(place, old, tokens(1, 3))
    retire(place, old)
    place.put("tmp/1-2", b"x")
    os.utime(tmp_path / "tmp/1-2", (1e9, 1e9))
    everything = files(tmp_path)
    code, report = place.run("gc", "--dry-run")
    assert (code, report["is_dry_run"]) == (0, True)
    assert [(item["kind"], item["count"], item["removed"]) for item in report["items"]] == [
        ("temp", 1, 0),
        ("retired", 3, 0),
    ]
    assert report["items"][1]["size_bytes"] == 3 * 8192
    assert place.run("gc") == (5, {})
    assert files(tmp_path) == everything
    result = CliRunner().invoke(app, ["gc", place.uri, "--yes"])
    assert result.exit_code == 0
    for text in ("retired: a namespace from before a reset", "removed 1 of 1 temp, ", "removed 3 of 3 retired, 24 KiB"):
        assert text in result.stdout
    assert "Go on?" not in result.stderr
    assert CliRunner().invoke(app, ["gc", place.uri]).stdout == f"no garbage in {place.uri}\n"


def files(root: Path) -> dict[Path, bytes]:
    """All there are, but for those that SQLite makes to read a database."""
    return {p: p.read_bytes() for p in root.rglob("*") if p.is_file() and not p.name.endswith(("-shm", "-wal"))}


@pytest.mark.parametrize("option", ["--temp-older-than", "--dead-after"])
def test_a_wrong_time_says_what_is_expected(tmp_path: Path, option: str) -> None:
    result = CliRunner().invoke(app, ["gc", f"file://{tmp_path}", option, "soon"])
    assert result.exit_code == 2 and f"option {option}: expected a time such as 12h" in result.stderr
