"""`tiered-kv verify` and `gc` beside engines that store and load: misses or the right bytes, never an error."""

import threading
from pathlib import Path

from tests.kit.server.clients import SmallEngine, poll_until, settings
from tests.kit.server.object_nodes import Place as NodePlace
from tests.kit.server.object_nodes import load, node, store, wait_loaded, wait_uploaded
from tests.kit.server.probe import figures, wait_for, wait_written
from tests.kit.storage.disk_probe import blob_files
from tests.kit.storage.places import Place, reasons
from tiered_kv.chunks.header import PEEK_BYTES
from tiered_kv.errors import DirectoryLocked
from tiered_kv.keys.namespace import SELF_TEST_NAMESPACE
from tiered_kv.keys.naming import BlobName, relative_path
from tiered_kv.ops.garbage import MinimumAges, collect, find
from tiered_kv.ops.server_link import ServerLink
from tiered_kv.tiers.disk.index import read_index
from tiered_kv.tiers.disk.lock import DirectoryLock


def blob_paths(engine: SmallEngine, count: int, first_token: int = 0) -> list[str]:
    """Where the chunks of a prompt lie."""
    with Place.disk(engine_root(engine)).open() as storage:
        by_key = {blob.name.key: storage.path(blob.name) for blob in storage.look().blobs}
    return [by_key[key] for key in engine.keys(count, first_token).keys]


def engine_root(engine: SmallEngine) -> Path:
    return Path(engine.config.location().path)


def empty_memory(root: Path) -> None:
    """So that the next lookup has to read the disk. What was just looked up is in use for a moment longer."""

    def is_empty() -> bool:
        link.evict("host", b"", None, holes=True)
        return figures(root)["hierarchy"]["host_ready_chunks"] == 0

    with ServerLink.of_directory(root) as link:
        wait_for(is_empty, "an empty memory")


def flip(place: Place, path: str, offset: int) -> None:
    data = bytearray(place.get(path))
    data[offset] ^= 1
    place.put(path, bytes(data))


def test_corrupt_blobs_are_found_and_removed_under_a_running_server(engine: SmallEngine, root: Path) -> None:
    engine.store(20)
    engine.store(6, first_token=5000)
    engine.wait_hits(20)
    wait_written(root)
    place, paths = Place.disk(root), blob_paths(engine, 20)
    other = blob_paths(engine, 6, 5000)
    expected = {paths[9]: "payload", paths[12]: "header", paths[15]: "truncated", other[2]: "swapped"}
    flip(place, paths[9], PEEK_BYTES + 5)
    flip(place, paths[12], 160)
    place.put(paths[15], place.get(paths[15])[:100])
    place.put(other[2], place.get(other[3]))
    assert engine.client.namespace is not None
    unknown = f"blobs/{relative_path(BlobName(engine.client.namespace.digest, bytes(16)))}"  # the server knows no such
    place.put(unknown, bytes(40_000))
    place.put("blobs/notes.txt", b"mine")
    expected[unknown] = "header"

    code, report = place.run("verify")
    assert (code, reasons(report)) == (4, expected | {"blobs/notes.txt": "stray"})
    code, report = place.run("verify", "--repair", "--yes")
    assert (code, reasons(report), report["removed"]) == (4, {"blobs/notes.txt": "stray"}, len(expected))
    assert not place.paths() & set(expected) and place.get("blobs/notes.txt") == b"mine"
    assert reasons(place.run("verify")[1]) == {"blobs/notes.txt": "stray"}

    assert engine.hits(20) == 20, "host memory has sound copies, and what is asked for goes to the disk again"
    wait_written(root)
    empty_memory(root)
    assert (engine.hits(20), engine.hits(6, 5000)) == (20, 2)
    engine.store(6, first_token=5000, start=2)
    engine.wait_hits(6, 5000)
    wait_written(root)
    empty_memory(root)
    assert engine.hits(6, 5000) == 6, "what was computed again is stored again"
    assert reasons(place.run("verify")[1]) == {"blobs/notes.txt": "stray"}
    engine.close()
    wait_for(lambda: is_unlocked(root), "the server's last write")
    keys = {path.stem for path in blob_files(root)}
    assert {key.hex() for shard in read_index(root).values() for key in shard.rows()} == keys, "accounts stayed right"
    assert len(keys) == 26


def is_unlocked(root: Path) -> bool:
    try:
        DirectoryLock(root).release()
    except DirectoryLocked:
        return False
    return True


def test_nothing_sound_is_called_bad_while_an_engine_stores_and_loads(engine: SmallEngine, root: Path) -> None:
    place, found = Place.disk(root), []
    engine.store(10)
    wait_written(root)
    is_done = threading.Event()

    def look() -> None:
        while not is_done.is_set():
            found.append(place.run("verify"))
            found.append(place.run("gc", "--yes"))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        number = 0
        while len(found) < 6 or number < 10:
            number += 1
            first_token = 1000 + number % 10 * 7919  # ten prompts again and again: stores, hits, loads from the disk
            engine.store(30, first_token)
            engine.wait_hits(30, first_token)
    finally:
        is_done.set()
        thread.join()
    assert {code for code, _ in found} == {0}, found[-1]
    assert any(report.get("read", 0) > 10 for _, report in found)
    assert engine.hits(10) == 10


def test_a_repair_while_an_engine_loads_costs_misses_only(engine: SmallEngine, root: Path) -> None:
    engine.store(30)
    engine.wait_hits(30)
    wait_written(root)
    place, paths, is_done, seen = Place.disk(root), blob_paths(engine, 30), threading.Event(), []

    def repair() -> None:
        while not is_done.is_set():
            seen.append(place.run("verify", "--repair", "--yes"))

    thread = threading.Thread(target=repair)
    thread.start()
    try:
        for index in range(29, 10, -3):
            flip(place, paths[index], PEEK_BYTES + index)
            empty_memory(root)
            assert engine.hits(30) == index, "the bytes of every hit are compared"
    finally:
        is_done.set()
        thread.join()
    code, report = place.run("verify", "--repair", "--yes")
    assert (code, reasons(report)) == (0, {})
    assert not any(code == 1 for code, _ in seen)
    empty_memory(root)
    assert engine.hits(30) == 11


def test_gc_beside_a_server_takes_retired_namespaces_and_leaves_those_in_use(engine: SmallEngine, root: Path) -> None:
    engine.store(5)
    engine.wait_hits(5)
    wait_written(root)
    assert engine.client.namespace is not None
    retired = engine.client.namespace.digest
    other = SmallEngine.start(settings(root), "other")
    other.store(4, first_token=9000)
    other.wait_hits(4, 9000)
    engine.client.reset()
    poll_until(engine.client, lambda: engine.client.is_ready and engine.client.namespace.digest != retired, "a reset")
    private = engine.client.namespace.digest
    engine.store(3)
    engine.wait_hits(3)
    wait_written(root)
    place = Place.disk(root)
    (root / "tmp" / "left").write_bytes(b"x")

    code, report = place.run("gc", "--yes", "--dead-after", "1s", "--temp-older-than", "1s")
    assert (code, report["items"]) == (0, []), "the other engine uses the retired namespace still"
    assert report["notes"] == [], "nothing was left for a time without a server"
    other.close()
    poll_until(engine.client, lambda: len(figures(root)["sessions"]) == 1, "the other engine's end")
    code, report = place.run("gc", "--yes", "--dead-after", "1s")
    (item,) = report["items"]
    assert (item["kind"], item["namespace"], item["count"], item["removed"]) == ("retired", retired.hex(), 9, 9)
    assert report["notes"] == ["a server runs: records and directories of dead namespaces are left until none does"]
    with place.open() as storage:
        assert {blob.name.namespace for blob in storage.look().blobs} == {private}
    empty_memory(root)
    assert engine.hits(3) == 3

    engine.close()
    wait_for(lambda: is_unlocked(root), "the server's end")
    code, report = place.run("gc", "--yes")
    assert [(item["kind"], item["namespace"]) for item in report["items"]] == [("empty", retired.hex())]
    with place.open() as storage:
        assert set(storage.records()) - {SELF_TEST_NAMESPACE} == {private}


def test_a_bucket_is_verified_repaired_and_collected_while_a_node_uses_it(s3, tmp_path: Path) -> None:
    with Place.bucket(s3) as place:
        where = NodePlace(place.uri, s3.options())
        with node(where.settings(tmp_path / "one")) as cache:
            store(cache, 1, 6)
            store(cache, 2, 4)
            wait_uploaded(tmp_path / "one")
            code, report = place.run("verify")
            assert (code, report["read"], report["bad"]) == (0, 10, [])
            with place.open() as storage:
                blobs = sorted(storage.look().blobs, key=lambda blob: blob.name.chunk_index)
                paths = [storage.path(blob.name) for blob in blobs if blob.name.chunk_index == 2]
                for path in paths:
                    flip(place, path, PEEK_BYTES)
                code, report = place.run("verify", "--repair", "--yes")
                assert (code, report["removed"], report["unreachable"]) == (0, 2, 3 + 1)
                garbage = find(storage, storage.look(), MinimumAges(), 1e11)
                collect(storage, garbage)
            assert [(item.kind, item.removed) for item in garbage.items] == [("orphans", 4)]
            assert (load(cache, 1, 6), load(cache, 2, 4)) == (6, 4), "this node has them on its own"
        with node(where.settings(tmp_path / "two")) as cache:
            wait_loaded(cache, 1, 2)
            assert (load(cache, 1, 6), load(cache, 2, 4)) == (2, 2)
