"""`tiered-kv warm` and `cp`: between directories and buckets, and through a running server."""

import json
import shutil
import stat
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.kit.faults.proxy import Fault, FaultProxy, Mode
from tests.kit.s3 import S3
from tests.kit.server.clients import CHUNK as SMALL_CHUNK
from tests.kit.server.clients import PAGES, STORED_BY, SmallEngine, poll_until, settings, worker_part
from tests.kit.server.probe import figures, socket_of, wait_for, wait_written
from tests.kit.server.processes import end_server
from tests.kit.storage.stored_prompts import Model, tokens
from tests.kit.verbs import Tier, complaint, directory_tier, explained_hit, report, run, s3_tier
from tiered_kv.chunks.header import BlobFormat
from tiered_kv.cli import warm as warm_verb
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.naming import BlobName, relative_path
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.keys.tags import NO_TAG, tag_digest
from tiered_kv.ops import copy_targets, copying
from tiered_kv.ops.forest import Forest
from tiered_kv.ops.object_storage import ObjectStorage
from tiered_kv.ops.open import open_storage
from tiered_kv.server.client import SchedulerClient
from tiered_kv.server.epochs import EPOCHS, NOTE
from tiered_kv.server.members import recorded_geometry
from tiered_kv.server.worker_client import WorkerClient

ONE, TWO = Model(), Model(weights="two")
KEY, OTHER = ONE.names(tokens(1, 4))[0].key.hex(), TWO.namespace.digest.hex()
GOLDEN = Path(__file__).parents[1] / "golden"
FIRST, SECOND = tokens(1, 4), tokens(2, 3)


def stocked(tier: Tier) -> Tier:
    with tier.open() as storage:
        ONE.store(storage, FIRST, SECOND)
        TWO.store(storage, FIRST)
    return tier


@pytest.fixture(params=["disk to disk", "disk to s3", "s3 to disk"])
def pair(request, tmp_path: Path) -> tuple[Tier, Tier]:
    """A stocked tier and an empty one."""
    left, _, right = request.param.partition(" to ")
    kinds = {
        "disk": lambda name: directory_tier(tmp_path / name),
        "s3": lambda name: s3_tier(request.getfixturevalue("s3")),
    }
    return stocked(kinds[left]("source")), kinds[right]("target")


def arguments(source: Tier, target: Tier) -> list[str]:
    return [source.uri, target.uri, *target.sets(), *source.sets("--from-set")]


def there(tier: Tier, model: Model, prompt: list[int]) -> int:
    """How many chunks of a prompt are there, each with the bytes that were stored."""
    with tier.open() as storage:
        found = [(storage.read(name), data) for name, data in model.blobs(prompt)]
        if any(held is not None for held, _ in found):
            assert storage.records()[model.namespace.digest].namespace == model.namespace
    assert all(held in (None, data) for held, data in found)
    return sum(held is not None for held, _ in found)


def in_vain(*arguments: object):
    """What a copy prints that leaves nothing in its target."""
    done = run(*arguments, "--json")
    assert done.exit_code == 4, done.output
    return json.loads(done.stdout)


def test_everything_is_copied_once(pair: tuple[Tier, Tier]) -> None:
    source, target = pair
    done = report("warm", target.uri, "--from", source.uri, *target.sets(), *source.sets("--from-set"))
    assert (done["selected"], done["copied"], done["copied_bytes"]) == (11, 11, 11 * 8192)
    assert (done["there"], done["corrupt"], done["left_out"], done["full"]) == (0, 0, 0, None)
    assert (done["source"], done["target"]) == (source.uri, target.uri)
    assert [there(target, *what) for what in ((ONE, FIRST), (ONE, SECOND), (TWO, FIRST))] == [4, 3, 4]
    again = report("cp", *arguments(source, target))
    assert (again["copied"], again["there"]) == (0, 11)
    text = run("cp", *arguments(source, target)).stdout
    assert "copied 0 chunks" in text and "11 were there already" in text


def test_a_prefix_a_namespace_and_an_amount(pair: tuple[Tier, Tier]) -> None:
    source, target = pair
    assert report("cp", *arguments(source, target), "--key", ONE.names(FIRST)[2].key.hex()[:12])["copied"] == 3
    assert [there(target, *what) for what in ((ONE, FIRST), (ONE, SECOND), (TWO, FIRST))] == [3, 0, 0]
    space = TWO.namespace.digest.hex()
    limited = report("cp", *arguments(source, target), "--namespace", space, "--bytes", 2 * 8192)
    assert limited["copied"] == 2 and there(target, TWO, FIRST) == 2
    assert report("cp", *arguments(source, target), "--namespace", space[:6])["copied"] == 2


def test_nothing_is_overwritten_and_no_damage_is_copied(tmp_path: Path) -> None:
    source, target = stocked(directory_tier(tmp_path / "source")), directory_tier(tmp_path / "target")
    with target.open() as storage:
        ONE.store(storage, FIRST[: 2 * 32])
    kept = tmp_path / "target" / "blobs" / relative_path(ONE.names(FIRST)[0])
    kept.write_bytes(kept.read_bytes()[:-1] + b"!")
    bad = tmp_path / "source" / "blobs" / relative_path(ONE.names(FIRST)[2])
    bad.write_bytes(bad.read_bytes()[:-1] + b"!")
    done = report("cp", *arguments(source, target))
    assert (done["there"], done["corrupt"], done["left_out"], done["copied"]) == (2, 1, 1, 7)
    assert kept.read_bytes().endswith(b"!")
    assert "1 are damaged in the source" in run("cp", *arguments(source, target)).stdout


def test_a_new_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    source = stocked(directory_tier(tmp_path / "source"))
    fresh = tmp_path / "deep" / "fresh"
    assert report("warm", f"file://{fresh}", "--from", source.uri)["copied"] == 11
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700
    assert there(Tier(f"file://{fresh}"), ONE, FIRST) == 4


@pytest.mark.parametrize("kind", ["disk", "s3"])
def test_a_full_target_holds_whole_prefixes_and_says_so(request, tmp_path: Path, kind: str) -> None:
    source = directory_tier(tmp_path / "source")
    big = Model(payload_bytes=256 << 10)
    with source.open() as storage:
        big.store(storage, tokens(1, 6), tokens(2, 6))
    if kind == "disk":
        target = Tier(f"file://{tmp_path}/target", {"disk_bytes": (64 << 20) + (5 * 260 << 10) + 4096})
    else:
        target = s3_tier(request.getfixturevalue("s3"))
        with target.open() as storage:  # as a fleet with a limit would
            term = {"holder": "h", "counter": 1, "capacity_bytes": (5 * 260 << 10) + 4096}
            storage.store.put(f"_tiered_kv/lease/{1:020d}", json.dumps(term).encode())
    done = report("cp", *arguments(source, target))
    assert (done["copied"], done["left_out"]) == (5, 7) and done["full"]
    assert sum(there(target, big, prompt) for prompt in (tokens(1, 6), tokens(2, 6))) == 5
    with target.open() as storage:
        assert not Forest(storage.look().blobs).orphans


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["{source}", "{source}"], "source and target are the same tier"),
        (["{source}/none", "{source}"], "there is no such directory"),
        (["{source}", "{target}", "--bytes", "some"], "option --bytes: expected a size such as 4GiB"),
        (["{source}", "{target}", "--key", "abcdabcd"], "no chunk here has a key"),
        (["{source}", "{target}.txt/x"], "the directory cannot be made"),
        (["{source}", "{source}/blobs/x"], "the target lies in the source"),
        (["{source}", "{source}/../source"], "source and target are the same tier"),
        (["{source}", "{link}"], "source and target are the same tier"),
        (["{source}", "{link}/x"], "the target lies in the source"),
        (["{source}", "shared+{source}"], "source and target are the same tier"),
        (["shared+{source}", "shared+{source}/x"], "the target lies in the source"),
        (["memory://a/b", "memory://a//b/"], "source and target are the same tier"),
        (["{source}", "{target}", "--from-set", "x"], "option --from-set: expected NAME=VALUE"),
        (
            ["{source}", "{target}", "--from-set", "storage_uri={target}"],
            "option --from-set: storage_uri is given twice",
        ),
        (["{source}", "{target}", "--key", KEY, "--namespace", OTHER], "and --namespace names another"),
    ],
)
def test_what_cannot_be_copied_is_said(tmp_path: Path, given: list[str], expected: str) -> None:
    source = stocked(directory_tier(tmp_path / "source"))
    (tmp_path / "target.txt").write_text("in the way")
    (tmp_path / "link").symlink_to("source")
    places = {"source": source.uri, "target": f"file://{tmp_path}/target", "link": f"file://{tmp_path}/link"}
    assert expected in complaint("cp", *(word.format(**places) for word in given))
    assert run("verify", source.uri).exit_code == 0, "nothing was left in it"


def test_what_stays_free_on_a_disk_is_said_where_a_copy_ends_for_it(tmp_path: Path, monkeypatch) -> None:
    source = stocked(directory_tier(tmp_path / "source"))
    monkeypatch.setattr(copy_targets, "MIN_FREE_BYTES_DEFAULT", 1 << 60)
    done = in_vain("cp", source.uri, f"file://{tmp_path}/target")
    assert done["copied"] == 0 and "stay free on a disk without --set disk_bytes=SIZE" in done["full"]
    assert report("cp", source.uri, f"file://{tmp_path}/target", "--set", "disk_bytes=1GiB")["copied"] == 11


@pytest.mark.parametrize("why", ["damaged", "behind a gap", "too large"])
def test_a_source_of_which_nothing_can_be_copied_ends_with_4(tmp_path: Path, why: str) -> None:
    """It ended with 0, as if there had been nothing."""
    source, limit, said = directory_tier(tmp_path / "source"), [], "every chunk lies behind a gap"
    with source.open() as storage:
        names = ONE.store(storage, FIRST)
        if why == "behind a gap":
            storage.discard(names[:1])
    if why == "damaged":
        said = "4 files under the name of a chunk, damaged"
        for name in names:
            (tmp_path / "source" / "blobs" / relative_path(name)).write_bytes(bytes(100))
    elif why == "too large":
        limit = ["--bytes", "1KiB"]
    done = in_vain("cp", source.uri, f"file://{tmp_path}/target", *limit)
    assert done["selected"] == 0 and said in str(done["notes"])


def test_a_prefix_with_a_gap_is_not_copied(tmp_path: Path) -> None:
    source = stocked(directory_tier(tmp_path / "source"))
    (tmp_path / "source" / "blobs" / relative_path(ONE.names(FIRST)[1])).unlink()
    key = ONE.names(FIRST)[3].key.hex()
    assert "has a gap" in complaint("cp", source.uri, f"file://{tmp_path}/target", "--key", key)


def earlier(tmp_path: Path) -> Namespace:
    """The namespace of a cache of format 2, in the first epoch of a bucket."""
    with tarfile.open(GOLDEN / "cache_v2.tar.xz") as archive:
        archive.extractall(tmp_path / "v2", filter="data")
    (record,) = (tmp_path / "v2").glob("cache/blobs/*/namespace.json")
    return Namespace.from_described(record.read_bytes())[0].in_epoch("shared-0")


def test_chunks_of_an_earlier_format_are_no_damage(tmp_path: Path) -> None:
    """And neither they nor their record, which lacks fields, keep a verb from its work."""
    old, bucket = earlier(tmp_path), Tier(f"shared+file://{tmp_path}/bucket")
    with bucket.open() as storage:
        ONE.store(storage, FIRST)
        storage.write_record(old)
        name = BlobName(old.digest, bytes(16), old.digest, 0)
        storage.write(name, memoryview((GOLDEN / "blob_v2.safetensors").read_bytes()))
    text = run("cp", bucket.uri, f"shared+file://{tmp_path}/other").stdout
    assert "1 are of another format version or namespace" in text and "damaged" not in text
    done = report("cp", bucket.uri, f"file://{tmp_path}/target")
    assert (done["copied"], done["corrupt"], done["foreign"]) == (4, 0, 1)
    done = in_vain("cp", f"file://{tmp_path}/v2/cache", f"file://{tmp_path}/target")
    assert done["copied"] == 0 and done["notes"][0].startswith("6 files under the name of a chunk, damaged or of an")
    assert report("gc", bucket.uri, "--dry-run")["uri"] == bucket.uri
    assert explained_hit(bucket.uri, FIRST, tmp_path) == len(FIRST)


def test_each_note_is_printed_once(tmp_path: Path) -> None:
    source = stocked(directory_tier(tmp_path / "source"))
    (tmp_path / "source" / "blobs" / relative_path(ONE.names(FIRST)[3])).write_bytes(b"short")
    (tmp_path / "source" / "pins.json").write_text("no JSON")
    said = run("cp", source.uri, f"file://{tmp_path}/target").stderr
    assert said.count("under the name of a chunk") == 1 and said.count("pins.json") == 1


# -- through a running server ----------------------------------------------------------------------------------------


@pytest.fixture
def filled(tmp_path: Path):
    """A directory that an engine filled, and whose server goes on."""
    root = tmp_path / "filled"
    one = SmallEngine.start(settings(root))
    one.store(6)
    one.store(30, first_token=100_000)
    one.wait_hits(30, first_token=100_000)
    wait_written(root)
    yield root
    one.close()
    end_server(root)


@pytest.fixture(params=["directory", "s3"])
def source(request, filled: Path) -> Tier:
    """What that engine stored: its directory beside the running server, or a bucket it was copied to."""
    here = Tier(f"file://{filled}")
    if request.param == "directory":
        return here
    bucket = s3_tier(request.getfixturevalue("s3"))
    assert report("cp", *arguments(here, bucket))["copied"] == 36
    return bucket


def warm(root: Path, source: Tier, *more: object):
    return report("warm", f"file://{root}", "--from", source.uri, *source.sets("--from-set"), *more)


def test_a_running_server_takes_what_is_warmed_and_its_engines_hit_it(source: Tier, root: Path) -> None:
    engine = SmallEngine.start(settings(root))
    engine.store(4, first_token=700_000)
    engine.wait_hits(4, first_token=700_000)
    done = warm(root, source)
    assert (done["copied"], done["dropped"], done["left_out"], done["notes"]) == (36, 0, 0, [])
    assert (engine.hits(6), engine.hits(30, first_token=100_000), engine.hits(4, first_token=700_000)) == (6, 30, 4)
    with open_storage(f"file://{root}") as target, source.open() as from_:
        blobs = from_.look().blobs
        assert len(blobs) == 36
        assert all(payload(target.read(b.name)) == payload(from_.read(b)) for b in blobs)
    assert warm(root, source)["there"] == 36
    assert [s["engine"] for s in figures(root)["sessions"]] == ["e/0"], "the copy's own session is over"
    engine.close()


def payload(blob: bytes | None) -> bytes:
    assert blob is not None
    return blob[4096:]


@pytest.fixture
def first_bucket(tmp_path: Path) -> Tier:
    """A bucket in which an engine has stored six chunks."""
    old, bucket = tmp_path / "old", Tier(f"shared+file://{tmp_path}/first")
    one = SmallEngine.start(settings(old, storage_uri=bucket.uri, disk_path=str(old)))
    one.store(6)
    wait_written(old)
    one.close()
    end_server(old)
    return bucket


@pytest.mark.parametrize("bucket", ["first", "second"])
def test_a_server_in_front_of_a_bucket_takes_what_is_warmed(
    tmp_path: Path, root: Path, first_bucket: Tier, bucket: str
) -> None:
    """A new node's disk, from the bucket that it stands in front of, and from the one which that was copied from."""
    uri = f"shared+file://{tmp_path}/{bucket}"
    if bucket == "second":
        assert (copied := report("cp", first_bucket.uri, uri))["copied"] == 6 and copied["notes"] == []
        shutil.rmtree(tmp_path / "second" / next(iter(copied_namespaces(uri))))
    new = SmallEngine.start(settings(root, storage_uri=uri, disk_path=str(root)))
    done = warm(root, first_bucket)
    assert (done["copied"], done["dropped"], done["notes"]) == (6, 0, [])
    assert len(list((root / "blobs").glob("*/*/*.safetensors"))) == 6
    assert new.hits(6) == 6
    new.close()


def test_a_server_in_front_of_a_bucket_with_an_endpoint_takes_what_is_warmed_from_elsewhere(
    root: Path, first_bucket: Tier, s3: S3
) -> None:
    """The source says nothing of the endpoint that the server reaches its own bucket at."""
    copied = s3_tier(s3)
    assert report("cp", *arguments(first_bucket, copied))["copied"] == 6
    node = settings(root, storage_uri=copied.uri, disk_path=str(root), **copied.settings)
    new = SmallEngine.start(node)
    done = warm(root, first_bucket)
    assert (done["copied"], done["notes"]) == (6, [])
    assert len(list((root / "blobs").glob("*/*/*.safetensors"))) == 6
    new.close()


@pytest.mark.parametrize("name", ["a%20b", "a?b", "a#b", "a b"])
def test_a_server_in_a_directory_of_any_name_takes_what_is_warmed(tmp_path: Path, filled: Path, name: str) -> None:
    root = tmp_path / name
    engine = SmallEngine.start(settings(tmp_path, storage_uri=f"file://{quote(str(root))}"))
    done = report("warm", f"file://{quote(str(root))}", "--from", f"file://{filled}")
    assert (done["copied"], done["notes"]) == (36, [])
    assert report("ls", done["target"])["uri"] == done["target"], "what is told names the directory"
    engine.close()
    end_server(root)


def test_a_copy_into_a_server_with_little_memory_says_nothing_of_it(
    filled: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = SmallEngine.start(settings(root))
    caplog.clear()
    assert warm(root, Tier(f"file://{filled}"))["copied"] == 36
    assert not [one for one in caplog.records if one.levelname == "WARNING"]
    engine.close()


def copied_namespaces(uri: str) -> set[str]:
    return {one["namespace"] for one in report("ls", uri)["namespaces"]}


def test_a_bucket_that_was_copied_is_hit_by_engines_in_front_of_the_copy(
    tmp_path: Path, root: Path, first_bucket: Tier
) -> None:
    second = f"shared+file://{tmp_path}/second"
    assert report("cp", first_bucket.uri, second)["copied"] == 6
    engine = SmallEngine.start(settings(root, storage_uri=second, disk_path=str(root)))
    assert engine.hits(6) == 6
    engine.close()


def test_a_bucket_that_has_begun_keeps_its_epoch_and_the_copy_says_so(
    tmp_path: Path, root: Path, first_bucket: Tier
) -> None:
    second = f"shared+file://{tmp_path}/second"
    engine = SmallEngine.start(settings(root, storage_uri=second, disk_path=str(root)))
    theirs = engine.client.namespace.fields["epoch"]
    done = in_vain("cp", first_bucket.uri, second)
    assert (done["copied"], done["refused"]) == (0, 6)
    assert f"that bucket has begun {theirs} of this model" in done["notes"][0]
    done = in_vain("warm", f"file://{root}", "--from", first_bucket.uri)
    assert (done["copied"], done["refused"]) == (0, 6) and f"the server uses epoch {theirs} of this model" in done[
        "notes"
    ][0]
    assert engine.hits(6) == 0
    engine.close()


def test_a_server_that_takes_only_second_touches_takes_what_is_warmed(source: Tier, root: Path) -> None:
    engine = SmallEngine.start(settings(root, disk_admission="second-touch"))
    done = warm(root, source)
    assert (done["copied"], done["dropped"]) == (36, 0)
    assert len(list((root / "blobs").glob("*/*/*.safetensors"))) == 36
    engine.close()


def test_an_engine_that_starts_on_a_warmed_directory_hits(source: Tier, root: Path) -> None:
    assert warm(root, source, "--set", "disk_bytes=160MiB")["copied"] == 36
    engine = SmallEngine.start(settings(root))
    assert (engine.hits(6), engine.hits(30, first_token=100_000)) == (6, 30)
    engine.close()


def test_a_server_with_little_room_keeps_what_it_has(filled: Path, root: Path) -> None:
    engine = SmallEngine.start(settings(root, disk_bytes=(64 << 20) + 28 * 40960, host_bytes="2MiB"))
    engine.store(10)
    wait_written(root)
    done = warm(root, Tier(f"file://{filled}"))
    assert done["full"] and 0 < done["copied"] < 30 and done["left_out"] == 36 - done["copied"] - done["there"]
    assert engine.hits(10) == 10, "nothing was evicted for it"
    engine.close()


def test_many_models_are_copied_into_a_server_with_little_memory(filled: Path, root: Path, tmp_path: Path) -> None:
    """Each has a session, and what is granted ahead to all of them together is more than there is."""
    source = directory_tier(tmp_path / "models")
    with open_storage(f"file://{filled}") as storage, source.open() as target:
        (record,) = storage.records().values()
        assert record.namespace is not None
        for number in range(30):
            space = Namespace.from_fields(record.namespace.fields | {"weights": f"model {number}"})
            form = BlobFormat(space.digest, recorded_geometry(space.fields))
            target.write_record(space)
            keys = space.digest, bytes([number, 1] * 8), bytes([number, 2] * 8)
            for index in range(2):
                ancestry = space.digest, keys[index + 1], keys[index], index
                place = ChunkRecord(*ancestry, bytes(32), NO_TAG, STORED_BY)
                blob = bytearray(form.blob_bytes)
                form.seal(memoryview(blob), place, 1_700_000_000)
                target.write(BlobName.of(place), memoryview(blob))
    engine = SmallEngine.start(settings(root, host_bytes="2MiB"))
    done = warm(root, source)
    assert (done["copied"], done["dropped"], done["notes"]) == (60, 0, [])
    engine.store(3)
    engine.wait_hits(3)
    engine.close()


def test_what_a_server_cannot_write_is_counted_as_dropped(
    filled: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_targets, "WRITTEN_WITHIN_S", 1.0)
    engine = SmallEngine.start(settings(root))
    shutil.rmtree(root / "tmp")
    (root / "tmp").write_text("no write can begin")
    done = in_vain("warm", f"file://{root}", "--from", f"file://{filled}")
    assert (done["copied"], done["copied_bytes"], done["dropped"], done["left_out"]) == (0, 0, 36, 0)
    engine.close()


def test_a_retired_epoch_is_left_out_with_a_word(filled: Path, root: Path) -> None:
    engine = SmallEngine.start(settings(root))
    engine.client.reset()
    engine.close()
    engine = SmallEngine.start(settings(root), "later")
    assert engine.client.namespace.fields["epoch"] == "base-1"
    done = in_vain("warm", f"file://{root}", "--from", f"file://{filled}")
    assert (done["selected"], done["copied"], done["refused"]) == (0, 0, 36)
    assert "was left out: the server uses epoch base-1 of this model, and these chunks are of epoch base-0" in str(done)
    assert engine.hits(6) == 0
    engine.close()


@contextmanager
def an_engine(root: Path, name: str = "e", **more: object) -> Iterator[SmallEngine]:
    """An engine and its server, until what it has stored is written."""
    one = SmallEngine.start(settings(root, **more), name)
    try:
        yield one
        wait_written(root)
    finally:
        one.close()
        end_server(root)


def reset_between(root: Path, **more: object) -> None:
    """Six chunks from before a reset, and four that an engine stored which started after it."""
    with an_engine(root, **more) as before:
        before.store(6)
        wait_written(root)
        before.client.reset()
        poll_until(before.client, lambda: before.client.is_ready, "the reset")
    with an_engine(root, "later", **more) as after:
        after.store(4, first_token=500)


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_what_a_reset_retired_is_not_copied_and_what_came_after_is_found(tmp_path: Path, root: Path, kind: str) -> None:
    """A new directory knows nothing of the reset: its engines would load what was stored before the weights changed."""
    old, new = f"file://{tmp_path}/old", f"file://{root}"
    more: list[dict[str, str]] = [{}, {}]
    if kind == "bucket":
        old, new = f"shared+file://{tmp_path}/first", f"shared+file://{tmp_path}/second"
        more = [
            {"storage_uri": old, "disk_path": str(tmp_path / "old")},
            {"storage_uri": new, "disk_path": str(root)},
        ]
    reset_between(tmp_path / "old", **more[0])
    done = report("cp", old, new)
    assert (done["copied"], done["selected"]) == (4, 4)
    (text,) = done["notes"]
    assert "was left out, 6 chunks: a reset there retired it" in text and text.endswith(f"source={old}")
    with an_engine(root, **more[1]) as engine:
        assert (engine.hits(6), engine.hits(4, first_token=500)) == (0, 4)
    retired = text.split()[1]
    assert in_vain("cp", old, new, "--namespace", retired)["copied"] == 0
    (key,) = [one["key"] for one in report("ls", old, "--namespace", retired)["chunks"] if one["chunk_index"] == 0]
    assert "a reset there retired it" in complaint("cp", old, new, "--key", key)


def test_a_directory_that_has_begun_keeps_its_epoch_and_the_copy_says_so(tmp_path: Path, root: Path) -> None:
    with an_engine(root) as engine:
        engine.store(2, first_token=900)
    reset_between(tmp_path / "old")
    done = in_vain("cp", f"file://{tmp_path}/old", f"file://{root}")
    assert done["refused"] == 4 and "that directory has begun base-0 of this model" in done["notes"][1]
    with an_engine(root) as engine:
        assert (engine.hits(2, first_token=900), engine.hits(6), engine.hits(4, first_token=500)) == (2, 0, 0)
        engine.client.reset()
        poll_until(engine.client, lambda: engine.client.is_ready, "the reset")
    with an_engine(root, "later") as engine:
        assert engine.client.namespace.fields["epoch"] == "base-1", "the number that the source's chunks are of"
        assert engine.hits(4, first_token=500) == 0, "they were computed with the source's weights"


@pytest.mark.parametrize("damage", ["gone", "damaged"])
def test_a_namespace_without_a_record_is_left_out_where_a_reset_may_have_retired_it(
    tmp_path: Path, root: Path, damage: str
) -> None:
    old = tmp_path / "old"
    with an_engine(old) as engine:
        engine.store(6)
        wait_written(old)
        engine.client.reset()
        poll_until(engine.client, lambda: engine.client.is_ready, "the reset")
    for record in old.glob("blobs/*/namespace.json"):
        if damage == "gone":
            record.unlink()
        else:
            record.write_text("{")
    done = in_vain("cp", f"file://{old}", f"file://{root}")
    assert done["copied"] == 0 and "6 chunks: whether a reset there retired it is not known" in done["notes"][0]
    with an_engine(root) as engine:
        assert engine.hits(6) == 0


@pytest.mark.parametrize("target", ["another", "in front"])
def test_after_a_bucket_was_reset_only_a_copy_that_others_find_needs_a_reset(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """Engines whose disk stands in front of the bucket go by its epochs."""
    bucket = f"shared+file://{tmp_path}/bucket"
    with an_engine(root, storage_uri=bucket, disk_path=str(root)) as engine:
        engine.store(6)
        wait_written(root)

        def copied_and_reset(*arguments):
            done = copying.copy(*arguments)
            engine.client.reset()
            poll_until(engine.client, lambda: engine.client.is_ready, "the reset")
            return done

        monkeypatch.setattr(warm_verb, "copy", copied_and_reset)
        done = report("cp", bucket, f"{'shared+' if target == 'another' else ''}file://{tmp_path}/node")
    assert done["copied"] == 6 and ["while it was copied" in note for note in done["notes"]] == [True] * (
        target == "another"
    )


def test_a_copy_is_reported_also_where_its_source_then_does_not_tell_of_resets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = stocked(directory_tier(tmp_path / "source"))

    def copied_and_damaged(*arguments):
        done = copying.copy(*arguments)
        (tmp_path / "source" / "epochs.json").write_text("{")
        return done

    monkeypatch.setattr(warm_verb, "copy", copied_and_damaged)
    done = report("cp", source.uri, f"file://{tmp_path}/target")
    assert done["copied"] == 11 and "is not known: epochs.json cannot be understood" in done["notes"][0]


@pytest.mark.parametrize("source", ["bucket", "disk"])
def test_what_no_reset_can_have_retired_for_others_is_copied_whatever_is_known_of_epochs(
    tmp_path: Path, root: Path, source: str
) -> None:
    """A bucket's numbers are its own, and a disk in front of one goes by them: chunks without a record, and ``cp``
    from a disk with a damaged ``epochs.json``, were refused.
    """
    uri = f"shared+file://{tmp_path}/bucket"
    with an_engine(root, storage_uri=uri, disk_path=str(root)) as engine:
        engine.store(6)
    if source == "bucket":
        for record in (tmp_path / "bucket").rglob("namespace.json"):
            record.unlink()
    else:
        uri = f"file://{root}"
        (root / "epochs.json").write_text("{")
    done = report("cp", uri, f"file://{tmp_path}/target")
    assert (done["copied"], done["selected"]) == (6, 6)


def test_a_disk_that_stood_in_front_of_a_bucket_has_begun_no_epoch_of_its_own(tmp_path: Path, root: Path) -> None:
    with an_engine(root, storage_uri=f"shared+file://{tmp_path}/bucket", disk_path=str(root)) as engine:
        engine.store(1)
    reset_between(tmp_path / "old")
    assert report("cp", f"file://{tmp_path}/old", f"file://{root}")["copied"] == 4
    with an_engine(root, "alone") as engine:
        assert engine.hits(4, first_token=500) == 4


@pytest.mark.parametrize("whose", ["source", "target"])
def test_damaged_epochs_of_a_directory_are_named_and_what_to_do(tmp_path: Path, root: Path, whose: str) -> None:
    reset_between(tmp_path / "old")
    with an_engine(root):
        pass
    damaged = (tmp_path / "old" if whose == "source" else root) / "epochs.json"
    damaged.write_text("{")
    if whose == "source":
        said = complaint("cp", f"file://{tmp_path}/old", f"file://{root}", code=1)
        assert "put a sound copy of it back" in said and f"path={damaged}" in said
    else:
        done = in_vain("cp", f"file://{tmp_path}/old", f"file://{root}")
        assert done["refused"] == 4 and "a server that starts there begins afresh" in done["notes"][1]
    assert damaged.read_text() == "{"


def test_a_server_on_a_new_directory_takes_nothing_of_a_source_that_was_reset_and_says_what_to_do(
    tmp_path: Path, root: Path
) -> None:
    reset_between(tmp_path / "old")
    with an_engine(root):
        done = in_vain("cp", f"file://{tmp_path}/old", f"file://{root}")
    assert done["refused"] == 4 and "a directory and one that was reset before" in done["notes"][1]


def test_a_copy_by_way_of_a_bucket_is_not_found_after_a_reset(tmp_path: Path, root: Path) -> None:
    """The bucket knows nothing of a directory's epochs, so the directory behind it cannot begin with them."""
    reset_between(tmp_path / "old")
    bucket = f"shared+file://{tmp_path}/bucket"
    assert report("cp", f"file://{tmp_path}/old", bucket)["copied"] == 4
    assert in_vain("cp", bucket, f"file://{root}")["refused"] == 4
    with an_engine(root) as engine:
        engine.client.reset()
        poll_until(engine.client, lambda: engine.client.is_ready, "the reset")
    with an_engine(root, "later") as engine:
        assert engine.hits(4, first_token=500) == 0


def test_a_reset_of_the_source_while_it_is_copied_is_told(tmp_path: Path, root: Path, s3: S3, cli) -> None:
    """What is copied then is from before it, and engines in front of the target find it."""
    source, target = s3_tier(s3), s3_tier(s3)
    with FaultProxy(s3.endpoint_url) as proxy, ThreadPoolExecutor(1) as pool:
        with an_engine(root, storage_uri=source.uri, disk_path=str(root), **source.settings) as engine:
            engine.store(6)
            wait_written(root)
            with proxy.failing(Fault(Mode.DRIP, kinds={"GET"}, path=".safetensors", bytes_per_s=100)):
                slow = Tier(source.uri, {"storage_options": s3.options(proxy.url), "storage_timeout_s": 60})
                copying = pool.submit(cli, "cp", *arguments(slow, target), "--json")
                wait_for(lambda: proxy.count("GET", ".safetensors") > 0, "the copy")
                engine.client.reset()
                poll_until(engine.client, lambda: engine.client.is_ready, "the reset")
            done = copying.result()
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["copied"] == 6 and "was reset in" in told["notes"][0] and "while it was copied" in told["notes"][0]


@pytest.mark.parametrize("kind", ["bucket", "directory of a server", "two copies"])
def test_a_later_epoch_of_the_target_while_it_is_copied_into_is_told(
    tmp_path: Path, root: Path, s3: S3, cli, kind: str
) -> None:
    """By a reset there, or with another copy: engines in front of it do not find what is copied."""
    filled = s3_tier(s3) if kind != "directory of a server" else None
    more = {} if filled is None else {"storage_uri": filled.uri, "disk_path": str(root), **filled.settings}
    with an_engine(root, **more) as engine:
        engine.store(6)
        wait_written(root)
        base, epoch = engine.client.namespace.in_epoch("").digest, engine.client.namespace.fields["epoch"]
    if filled is None:  # a bucket with what was stored in a directory: of a kind whose epochs its server knows
        filled, target = s3_tier(s3), Tier(f"file://{tmp_path}/second", {})
        assert report("cp", f"file://{root}", filled.uri, *filled.sets())["copied"] == 6
        second = settings(tmp_path / "second")
    else:
        target = s3_tier(s3)
        second = settings(
            tmp_path / "second", storage_uri=target.uri, disk_path=str(tmp_path / "second"), **target.settings
        )
    with FaultProxy(s3.endpoint_url) as proxy, ThreadPoolExecutor(1) as pool:
        slow = Tier(filled.uri, {"storage_options": s3.options(proxy.url), "storage_timeout_s": 60})
        other = SmallEngine.start(second) if kind == "directory of a server" else None
        with proxy.failing(Fault(Mode.DRIP, kinds={"GET"}, path=".safetensors", bytes_per_s=100)):
            copying = pool.submit(cli, "cp", *arguments(slow, target), "--json")
            wait_for(lambda: proxy.count("GET", ".safetensors") > 0, "the copy")
            if kind == "two copies":  # the other one looked for an epoch before this one began
                with target.open() as storage:
                    assert isinstance(storage, ObjectStorage)
                    storage.store.put(f"{EPOCHS}{base.hex()}/{int(epoch.removeprefix('shared-')) + 1}", NOTE)
            else:
                other = other or SmallEngine.start(second)
                other.client.reset()
                poll_until(other.client, lambda: other.client.is_ready, "the reset")
        done = copying.result()
        if other is not None:
            other.close()
            end_server(tmp_path / "second")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    (text,) = told["notes"]
    assert told["copied"] == 6 and "has begun a later epoch of this model" in text and "do not find" in text


def test_a_directory_whose_chunks_have_lost_their_record_keeps_its_epoch(tmp_path: Path, root: Path) -> None:
    """They may be of this model: with another epoch its engines would not find them again."""
    with an_engine(root) as engine:
        engine.store(6)
    (record,) = root.glob("blobs/*/namespace.json")
    record.unlink()
    reset_between(tmp_path / "old")
    done = in_vain("cp", f"file://{tmp_path}/old", f"file://{root}")
    assert done["refused"] == 4 and "that directory has begun base-0 of this model" in done["notes"][1]
    with an_engine(root) as engine:
        assert (engine.hits(6), engine.hits(4, first_token=500)) == (6, 0)


@pytest.mark.parametrize("has_server", [False, True])
def test_a_copy_is_whose_its_source_was(tmp_path: Path, root: Path, has_server: bool) -> None:
    filled = tmp_path / "filled"
    engine = SmallEngine.start(settings(filled))
    engine.store(3, tag="tenant-a")
    engine.store(2, first_token=100_000)
    wait_written(filled)
    engine.close()
    end_server(filled)
    other = SmallEngine.start(settings(root)) if has_server else None
    if other is None:
        root.mkdir()
    assert warm(root, Tier(f"file://{filled}"))["copied"] == 5
    listed = report("ls", f"file://{root}", "--tag", "tenant-a")["chunks"]
    assert len(listed) == 3 and {chunk["tag"] for chunk in listed} == {tag_digest("tenant-a").hex()}
    if other is not None:
        done = report("evict", "--server", socket_of(root), "--tag", "tenant-a", "--yes")
        assert [tier["removed"] for tier in done["tiers"]] == [3, 3]
        other.close()


def test_a_record_without_geometry_is_left_out_with_a_word(tmp_path: Path, root: Path) -> None:
    engine = SmallEngine.start(settings(root))
    source = stocked(directory_tier(tmp_path / "source"))
    done = in_vain("warm", f"file://{root}", "--from", source.uri)
    assert (done["copied"], done["refused"]) == (0, 11) and len(done["notes"]) == 2
    text = run("warm", f"file://{root}", "--from", source.uri)
    assert text.exit_code == 4 and "11 are of namespaces that were left out" in text.stdout
    assert all("does not say in a known way what a chunk holds" in note for note in done["notes"])
    engine.close()


def test_chunks_of_several_ranks_go_through_a_server(tmp_path: Path, root: Path) -> None:
    first = tmp_path / "filled"
    workers, client = two_ranks(first)
    assert client.namespace is not None
    keys = PrefixKeys(client.namespace, SMALL_CHUNK)
    keys.extend(range(3 * SMALL_CHUNK))
    for index in range(3):
        while (slot := client.take_slot()) is None:
            client.poll()
        record = ChunkRecord(client.namespace.digest, keys.keys[index], keys.parent(index), index, keys.digests[index])
        client.commit([(slot, record)])
    wait_written(first)
    other_workers, other = two_ranks(root)
    assert warm(root, Tier(f"file://{first}"))["copied"] == 3
    lookup = other.lookup(keys.keys, keys.digests)
    assert lookup is not None
    while not (other.lookups[lookup].is_answered and other.lookups[lookup].is_done):
        other.poll()
    assert other.lookups[lookup].ready == 3
    for left in (client, other):
        left.close()
    for worker in (*workers, *other_workers):
        worker.leave()
    end_server(first)


def two_ranks(root: Path) -> tuple[list[WorkerClient], SchedulerClient]:
    config = settings(root)
    workers = [WorkerClient(config, "e", 0, worker_part(rank, 2, pages=PAGES)) for rank in range(2)]
    client = SchedulerClient(config, "e", 2)
    assert client.wait_ready(20), client.refusal
    return workers, client
