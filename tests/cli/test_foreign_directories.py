"""A directory that is not ours: every verb that would write there refuses it, and nothing in it changes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.storage.stored_prompts import Model, tokens
from tests.kit.verbs import Tier, directory_tier, run
from tiered_kv.cli.exits import EXIT_FOUND, EXIT_SETTINGS

KEY = "0" * 32
REFUSALS = {
    "serve": ("serve", "{uri}", "--set", "host_bytes=64MiB"),
    "warm": ("warm", "{uri}", "--from", "{source}"),
    "cp": ("cp", "{source}", "{uri}"),
    "gc": ("gc", "{uri}", "--yes"),
    "gc --dry-run": ("gc", "{uri}", "--dry-run"),
    "evict": ("evict", "{uri}", "--all", "--yes"),
    "evict --to": ("evict", "{uri}", "--to", "1MiB", "--yes"),
    "pin": ("pin", "{uri}", KEY),
    "unpin": ("unpin", "{uri}", KEY),
    "verify": ("verify", "{uri}", "--repair", "--yes"),
}


def seen(root: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Everything in a directory that a write, a new name or a removal would change, and the directories themselves."""
    found = {}
    for path in [root, *sorted(root.rglob("*"))]:
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(root))] = status.st_ino, status.st_mode, status.st_mtime_ns, content
    return found


def foreign(path: Path) -> Path:
    """What somebody else's program keeps: names that ours has, too, and nothing that ours would write."""
    path.mkdir()
    (path / "tmp").mkdir()
    (path / "tmp" / "x").touch()
    (path / "server.json").touch()
    for file in path.rglob("*"):
        os.utime(file, (0, 0))  # old enough for whoever collects garbage
    return path


@pytest.fixture
def source(tmp_path: Path) -> Tier:
    tier = directory_tier(tmp_path / "source")
    with tier.open() as storage:
        Model().store(storage, tokens(1, 2))
    return tier


@pytest.mark.parametrize("verb", REFUSALS)
def test_a_directory_of_somebody_else_is_refused_and_stays_as_it_is(tmp_path: Path, source: Tier, verb: str) -> None:
    root = foreign(tmp_path / "d")
    before = seen(root)
    words = [word.format(uri=f"file://{root}", source=source.uri) for word in REFUSALS[verb]]
    done = subprocess.run(
        [sys.executable, "-m", "tiered_kv.cli", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == EXIT_SETTINGS, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    said = " ".join(done.stderr.split())
    assert "is not empty and has no tiered_kv.json" in said and "name a new or an empty directory" in said
    assert str(root) in said and "server.json" in said
    assert seen(root) == before


@pytest.mark.parametrize("verb", ["ls", "du", "tree"])
def test_who_looks_at_it_is_told_that_nothing_there_is_ours(tmp_path: Path, verb: str) -> None:
    root = foreign(tmp_path / "d")
    before = seen(root)
    done = run(verb, f"file://{root}")
    said = " ".join(done.stderr.split())
    assert done.exit_code == 0
    assert "has no marker of tiered_kv (tiered_kv.json), and nothing of ours is in it" in said and str(root) in said
    assert "marker" not in done.stdout
    (note,) = json.loads(run(verb, f"file://{root}", "--json").stdout)["notes"]
    assert "has no marker of tiered_kv" in note
    assert seen(root) == before


@pytest.mark.parametrize("verb", ["ls", "du", "tree", "verify"])
def test_of_an_empty_directory_and_of_ours_nothing_is_said(tmp_path: Path, source: Tier, verb: str) -> None:
    (tmp_path / "empty").mkdir()
    assert "marker" not in run(verb, f"file://{tmp_path}/empty").stderr
    assert "marker" not in run(verb, source.uri).stderr
    root = Path(source.uri.removeprefix("file://"))
    (root / "tiered_kv.json").unlink()  # as an earlier version left it
    assert "marker" not in run(verb, source.uri).stderr


def test_doctor_says_it_first_and_leaves_the_directory_alone(tmp_path: Path) -> None:
    root = foreign(tmp_path / "d")
    before = seen(root)
    done = run("doctor", f"file://{root}", "--set", "host_bytes=64MiB", "--json")
    assert done.exit_code == EXIT_FOUND, done.output
    first = json.loads(done.stdout)["findings"][0]
    assert first["status"] == "error" and "has no tiered_kv.json" in first["text"]
    assert first["see"].endswith("#not-our-directory") and "empty directory" in first["hint"]
    assert seen(root) == before


def test_a_directory_of_an_earlier_version_works_as_before(source: Tier) -> None:
    root = Path(source.uri.removeprefix("file://"))
    (root / "tiered_kv.json").unlink()
    done = run("doctor", source.uri, "--set", "host_bytes=64MiB", "--set", "disk_bytes=1GiB", "--json")
    assert "marker" not in {finding["check"] for finding in json.loads(done.stdout)["findings"]}
    assert not (root / "tiered_kv.json").exists(), "doctor leaves nothing behind"
    done = run("evict", source.uri, "--all", "--yes")
    assert done.exit_code == 0, done.output
    assert (root / "tiered_kv.json").exists() and not list(root.rglob("*.safetensors"))


def test_gc_takes_old_temp_files_of_ours_and_no_others(source: Tier) -> None:
    root = Path(source.uri.removeprefix("file://"))
    ours, theirs = root / "tmp" / "4711-3", root / "tmp" / "upload.part"
    for path in (ours, theirs):
        path.write_bytes(b"x" * 4096)
        os.utime(path, (0, 0))
    done = run("gc", source.uri, "--yes", "--json")
    assert done.exit_code == 0, done.output
    assert not ours.exists() and theirs.read_bytes() == b"x" * 4096
    assert "upload.part" in run("verify", source.uri).output
