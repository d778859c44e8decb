"""Upgrade and rollback: directories that each version wrote, and two format versions that share a disk and a bucket.

``tests/golden/cache_v<n>.tar.xz`` is a cache directory as this package wrote it at format version n, kept for ever: a
later version reads it, or leaves it alone. It holds the first six chunks of ``SmallEngine``'s prompt 0 and was made by
``python -m tests.deploy.test_upgrade``.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import tiered_kv
from tests.kit.samples.old_index import OLD_MAGICS, write_old_index
from tests.kit.server.clients import ANSWER_S, SmallEngine, poll_until, settings, worker_part
from tests.kit.server.probe import figures, wait_ended, wait_written
from tests.kit.server.processes import private_runtime
from tiered_kv.chunks import header as f
from tiered_kv.config import Config
from tiered_kv.errors import ConfigError
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.namespace import FORMAT_VERSION
from tiered_kv.keys.naming import parse_path
from tiered_kv.server.client import SchedulerClient
from tiered_kv.server.protocol import PROTOCOL
from tiered_kv.server.worker_client import WorkerClient
from tiered_kv.tiers.disk.files import allocated_bytes
from tiered_kv.tiers.disk.index import IndexRow, Shard

GOLDEN = Path(__file__).parents[1] / "golden"
CHUNKS = 6
REPOSITORY = Path(__file__).parents[2]
PACKAGE = Path(tiered_kv.__file__).parent

SERVE_ONE_ENGINE = """
import json, sys
from contextlib import closing
from tests.kit.server.clients import SmallEngine
from tests.kit.server.probe import wait_for, figures
from tiered_kv.config import Config
config = Config.from_mapping(json.loads(sys.argv[1]))
with closing(SmallEngine.start(config)) as engine:
    _, found = engine.look_up(6)
    hits = engine.hits(6)
    assert hits == found.ready
    if not hits:
        engine.store(6)
        engine.wait_hits(6)
    wait_for(lambda: figures(config.disk_root())["pending_writes"] == 0, "the writes")
print(hits)
"""


STAY = """
import json, sys
from contextlib import closing
from tests.kit.server.clients import SmallEngine
from tiered_kv.config import Config
with closing(SmallEngine.start(Config.from_mapping(json.loads(sys.argv[1])))):
    print("here", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def next_version(tmp_path: Path) -> Path:
    """This package as its next format and protocol: a copy with the two numbers raised."""
    place = tmp_path / "next"
    shutil.copytree(PACKAGE, place / "tiered_kv", ignore=shutil.ignore_patterns("__pycache__"))
    raised = {
        "keys/namespace.py": (
            f"FORMAT_VERSION: Final = {FORMAT_VERSION}",
            f"FORMAT_VERSION: Final = {FORMAT_VERSION + 1}",
        ),
        "server/protocol.py": (f"PROTOCOL = {PROTOCOL}\n", f"PROTOCOL = {PROTOCOL + 1}\n"),
    }
    for name, (now, then) in raised.items():
        path = place / "tiered_kv" / name
        text = path.read_text()
        assert text.count(now) == 1
        path.write_text(text.replace(now, then))
    return place


def engine_of(place: Path | None, given: Config) -> int:
    """An engine of this version (None) or of the package at ``place``: joins, looks up, stores if there is nothing.

    Returns:
        How many chunks it hit before it stored. It has compared their bytes.
    """
    done = subprocess.run(
        [sys.executable, "-c", SERVE_ONE_ENGINE, as_text(given)],
        capture_output=True,
        text=True,
        env=environment_of(place),
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def as_text(given: Config) -> str:
    """Settings for another process."""
    wanted = {name: value for name, value in asdict(given).items() if value is not None and name != "is_guest"}
    return json.dumps(wanted, default=str)


def environment_of(place: Path | None) -> dict[str, str]:
    """That of a process with this version (None) or the package at ``place``, and this version's kit."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(place or PACKAGE.parent), str(REPOSITORY)])}


@pytest.fixture(autouse=True)
def runtime_directory() -> Iterator[None]:
    with private_runtime():
        yield


def files(root: Path) -> dict[str, bytes]:
    """Blobs and records of a directory, by path; what servers keep for themselves is left out."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.suffix == ".safetensors" or path.name == "namespace.json"
    }


def unpack(version: int, place: Path) -> Path:
    """The golden directory of a version."""
    with tarfile.open(GOLDEN / f"cache_v{version}.tar.xz") as archive:
        archive.extractall(place, filter="data")
    assert sum(name.endswith(".safetensors") for name in files(place / "cache")) == CHUNKS
    return place / "cache"


def test_a_directory_of_this_version_is_read(tmp_path: Path) -> None:
    root = unpack(FORMAT_VERSION, tmp_path)
    before = files(root)
    with closing(SmallEngine.start(settings(root))) as engine:
        engine.wait_hits(CHUNKS)  # promoted from disk; compares the bytes
        assert engine.hits(CHUNKS + 2) == CHUNKS
    wait_ended(root)
    assert files(root) == before


def rows_of(root: Path) -> dict[Shard, list[IndexRow]]:
    """What a server knows of a directory's blobs, whatever their version: all of them have these fields there."""
    shards: dict[Shard, list[IndexRow]] = {}
    for path in (root / "blobs").rglob("*.safetensors"):
        name, data = parse_path(str(path.relative_to(root / "blobs"))), path.read_bytes()[:4096]
        assert name is not None
        parent, digest = (bytes.fromhex(data[field.slice].decode()) for field in (f.PARENT, f.PREFIX_SHA256))
        index, size = int(data[f.CHUNK_INDEX.slice]), allocated_bytes(path.stat())
        row = IndexRow(ChunkRecord(name.namespace, name.key, parent, index, digest), size, 100 - index, 0)
        shards.setdefault(Shard.of(name), []).append(row)
    return shards


@pytest.mark.parametrize("version", OLD_MAGICS)
def test_what_an_older_version_wrote_makes_room_as_it_did_before(tmp_path: Path, version: int) -> None:
    """A full disk after an upgrade: the old chunks are in the old index, so they count as chunks and go."""
    root = unpack(version, tmp_path)
    old = set(files(root))
    write_old_index(root, rows_of(root), OLD_MAGICS[version])
    room = sum(row.size_bytes for rows in rows_of(root).values() for row in rows)
    with closing(SmallEngine.start(settings(root, disk_bytes=(65 << 20) + room))) as engine:
        assert engine.hits(CHUNKS) == 0, "keys of another version are others"
        used = next(tier for tier in figures(root)["tiers"] if tier["name"] == "disk")
        assert used["blobs"] == CHUNKS
        for first_token in range(0, 4000, 100):  # 240 chunks of 40 KiB, where the limit has room for 1 MiB and six
            engine.store(CHUNKS, first_token)
            wait_written(root)
    wait_ended(root)
    left = set(files(root))
    assert not {name for name in old & left if name.endswith(".safetensors")} and len(left) > 2 * CHUNKS
    assert not list(root.glob("index.damaged-*"))


@pytest.mark.parametrize("version", OLD_MAGICS)
def test_without_its_index_what_an_older_version_wrote_is_counted_and_left_alone(tmp_path: Path, version: int) -> None:
    root = unpack(version, tmp_path)
    before = files(root)
    with closing(SmallEngine.start(settings(root))) as engine:
        assert engine.hits(CHUNKS) == 0
        engine.store(CHUNKS)
        engine.wait_hits(CHUNKS)
        wait_written(root)
    wait_ended(root)
    after = files(root)
    assert before.items() <= after.items() and len(after) == 2 * len(before)
    listed = cli("ls", f"file://{root}", "--json")
    assert listed["chunk_count"] == CHUNKS
    assert [bad["reason"] for bad in cli("verify", f"file://{root}", "--json", code=4)["bad"]] == ["version"] * CHUNKS
    (old,) = {name.split("/")[1] for name in before}
    done = cli("evict", f"file://{root}", "--namespace", old, "--yes", "--json")
    assert done["selected"] == 0
    (text,) = done["notes"]
    assert f"{CHUNKS} blobs" in text and text.endswith(f"end the server and remove blobs/{old}")
    assert files(root) == after, "what nobody can select stays"


@pytest.mark.parametrize("version", OLD_MAGICS)
def test_what_an_older_version_wrote_goes_by_its_namespace_and_by_no_condition(tmp_path: Path, version: int) -> None:
    """Nothing of it says who stored it; an operator names its namespace, whose record is still read."""
    root = unpack(version, tmp_path)
    write_old_index(root, rows_of(root), OLD_MAGICS[version])
    uri = f"file://{root}"
    (space,) = cli("ls", uri, "--json")["namespaces"]
    assert (space["problem"], space["stored_by"], space["first_stored_by"]) == (None, {}, None)
    done = cli("evict", uri, "--stored-by", "tiered_kv>=0", "--yes", "--json")
    assert done["selected"] == 0
    assert done["notes"][0].startswith(f"{CHUNKS} chunks were stored by a version that did not say who it was")
    done = cli("evict", uri, "--namespace", space["namespace"], "--yes", "--json")
    assert done["tiers"][0]["removed"] == CHUNKS
    assert not [name for name in files(root) if name.endswith(".safetensors")]


def test_an_upgrade_and_a_rollback_on_one_disk(tmp_path: Path, next_version: Path) -> None:
    """One after the other in the same directory: each finds what it wrote, and neither touches the other's."""
    root = tmp_path / "cache"
    assert engine_of(None, settings(root)) == 0
    wait_ended(root)
    ours = files(root)
    assert engine_of(next_version, settings(root)) == 0, "the next version read what it does not know"
    wait_ended(root)
    both = files(root)
    assert len(both) == 2 * len(ours) and ours.items() <= both.items()
    assert engine_of(None, settings(root)) == CHUNKS, "the rollback finds what was there before the upgrade"
    wait_ended(root)
    assert engine_of(next_version, settings(root)) == CHUNKS
    wait_ended(root)
    assert files(root) == both


def test_an_engine_that_comes_too_early_is_refused_and_joins_once_the_other_version_is_gone(
    tmp_path: Path, next_version: Path
) -> None:
    root = tmp_path / "cache"
    other = subprocess.Popen(
        [sys.executable, "-c", STAY, as_text(settings(root))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment_of(next_version),
        cwd="/",
    )
    with other:
        assert other.stdout is not None and other.stdout.readline() == "here\n"
        with closing(SchedulerClient(settings(root), "e", 1)) as client:
            assert not client.wait_ready(ANSWER_S)
            assert f"speaks protocol {PROTOCOL + 1}" in (client.refusal or "")
            with pytest.raises(ConfigError, match=f"speaks protocol {PROTOCOL + 1}"):
                WorkerClient(settings(root), "e", client.generation, worker_part())
            other.communicate("")
            wait_ended(root)
            worker = WorkerClient(settings(root), "e", client.generation, worker_part())  # as vLLM's tries again
            poll_until(client, lambda: client.is_ready, "the session")
            worker.leave()


def test_two_versions_live_beside_each_other_in_one_bucket(tmp_path: Path, next_version: Path) -> None:
    bucket = tmp_path / "bucket"

    def node(name: str) -> Config:
        """A machine of its own: an empty disk in front of the bucket."""
        more = {"storage_uri": f"shared+file://{bucket}", "storage_bytes": "1GiB", "promotion_wait_ms": 20_000}
        return settings(tmp_path / name, disk_path=str(tmp_path / name), **more)

    assert [engine_of(None, node("a")), engine_of(next_version, node("b"))] == [0, 0]
    blobs = {name for name in files(bucket) if name.endswith(".safetensors")}
    assert len(blobs) == 2 * CHUNKS
    assert [engine_of(None, node("c")), engine_of(next_version, node("d"))] == [CHUNKS, CHUNKS]
    uri = f"shared+file://{bucket}"
    verified = cli("verify", uri, "--repair", "--yes", "--json", code=4)
    assert [bad["reason"] for bad in verified["bad"]] == ["version"] * CHUNKS, "the other's are named, and left alone"
    assert cli("gc", uri, "--yes", "--json")["items"] == []
    assert {name for name in files(bucket) if name.endswith(".safetensors")} == blobs


def cli(*arguments: str, code: int = 0) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tiered_kv.cli", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def write_golden() -> None:
    """Make the golden directory; once per format version, under the version's name."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "cache"
        assert engine_of(None, settings(root)) == 0
        wait_ended(root)
        with tarfile.open(GOLDEN / f"cache_v{FORMAT_VERSION}.tar.xz", "x:xz") as archive:
            for name in files(root):
                archive.add(root / name, arcname=f"cache/{name}")


if __name__ == "__main__":
    write_golden()
