"""Upgrade and rollback: a directory that version 1 wrote, and two format versions that share a disk and a bucket.

``tests/golden/cache_v1.tar.xz`` is a cache directory as this package wrote it at format version 1, kept for ever: a
later version reads it, or leaves it alone. It holds the first six chunks of ``SmallEngine``'s prompt 0 and was made by
``PYTHONPATH=tests/support python tests/deploy/test_upgrade.py``.
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
from cache_clients import SmallEngine, settings
from cache_probe import wait_ended

import tiered_kv
from tiered_kv.config import Config
from tiered_kv.keys.namespace import FORMAT_VERSION
from tiered_kv.server.messages import PROTOCOL

GOLDEN = Path(__file__).parents[1] / "golden" / "cache_v1.tar.xz"
CHUNKS = 6
SUPPORT = Path(__file__).parents[1] / "support"
PACKAGE = Path(tiered_kv.__file__).parent

SERVE_ONE_ENGINE = """
import json, sys
from contextlib import closing
from cache_clients import SmallEngine
from cache_probe import wait_for, figures
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
        "server/messages.py": (f"PROTOCOL = {PROTOCOL}\n", f"PROTOCOL = {PROTOCOL + 1}\n"),
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
    wanted = {name: value for name, value in asdict(given).items() if value is not None}
    parents = [str(SUPPORT)] if place is None else [str(place), str(SUPPORT)]
    done = subprocess.run(
        [sys.executable, "-c", SERVE_ONE_ENGINE, json.dumps(wanted, default=str)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(parents)},
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.fixture(autouse=True)
def runtime_directory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="tkv-") as directory:
        patch.setenv("XDG_RUNTIME_DIR", directory)
        yield


def files(root: Path) -> dict[str, bytes]:
    """Blobs and records of a directory, by path; what servers keep for themselves is left out."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.suffix == ".safetensors" or path.name == "namespace.json"
    }


def test_a_directory_of_version_1_is_read(tmp_path: Path) -> None:
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / "cache"
    before = files(root)
    assert sum(name.endswith(".safetensors") for name in before) == CHUNKS
    with closing(SmallEngine.start(settings(root))) as engine:
        engine.wait_hits(CHUNKS)  # promoted from disk; compares the bytes
        assert engine.hits(CHUNKS + 2) == CHUNKS
    wait_ended(root)
    assert files(root) == before


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
        with tarfile.open(GOLDEN, "x:xz") as archive:
            for name in files(root):
                archive.add(root / name, arcname=f"cache/{name}")


if __name__ == "__main__":
    write_golden()
