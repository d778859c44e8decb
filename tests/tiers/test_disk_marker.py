"""Whose a directory is: what is marked, what is recognised, what is refused, and what an open may remove."""

import errno
import json
import logging
import os
import sqlite3
import tarfile
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.kit.faults.syscalls import SyscallFaults
from tests.kit.storage.disk_probe import blob_path, open_disk
from tiered_kv.errors import ConfigError, DirectoryLocked, TierUnavailable
from tiered_kv.server.directory import ServerInfo, refuse_foreign_info, write_info
from tiered_kv.server.protocol import PROTOCOL
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.tiers.disk.marker import CONTENT, MARKER_FILE, Standing, claim, look_at, require_ours
from tiered_kv.tiers.disk.sweep import LINES_MAX, STALE_S

CHAIN = SampleChain()
STRANGER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def everything(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """What a write, a new name or a removal would change."""
    return {
        str(path.relative_to(root)): (path.lstat().st_ino, path.lstat().st_mtime_ns, _bytes(path))
        for path in [root, *sorted(root.rglob("*"))]
    }


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() and not path.is_symlink() else b""


def make(root: Path, *names: str) -> None:
    """Files and, where a name ends with a slash, directories."""
    for name in names:
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()


def used(root: Path) -> Path:
    """A cache directory with a few blobs and a record."""
    tier = open_disk(root)
    for index in range(3):
        tier.put(CHAIN.name(index), CHAIN.blob(index).view())
    tier.close()
    return root


def lines(caplog: pytest.LogCaptureFixture, start: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(start)]


# -- fresh directories ------------------------------------------------------------------------------------------------


def test_a_fresh_directory_is_marked_before_anything_else_is_written(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    claim(root)
    assert [path.name for path in root.iterdir()] == [MARKER_FILE]
    assert json.loads((root / MARKER_FILE).read_bytes())["package"] == "tiered_kv"
    assert (root / MARKER_FILE).stat().st_mode & 0o777 == 0o600
    before = (root / MARKER_FILE).stat()
    open_disk(root).close()
    assert os.path.samestat((root / MARKER_FILE).stat(), before), "a marked directory is not marked again"


def test_what_a_fresh_file_system_has_is_no_content(tmp_path: Path) -> None:
    make(tmp_path, "lost+found/")
    open_disk(tmp_path).close()
    assert (tmp_path / MARKER_FILE).read_bytes() == CONTENT and (tmp_path / "lost+found").is_dir()


def test_what_others_do_at_the_same_moment_is_no_content(tmp_path: Path) -> None:
    """Another server that is marking the directory, also one that was killed while it did; doctor's scratch."""
    make(tmp_path, f"{MARKER_FILE}.4711-0123abcd", "doctor-x1_abc23/tmp/")
    open_disk(tmp_path).close()
    assert look_at(tmp_path).standing is Standing.OURS


def test_of_many_that_open_a_fresh_directory_one_gets_it_and_none_is_refused(tmp_path: Path) -> None:
    for number in range(15):
        results = opened_at_once(tmp_path / str(number), 6)
        assert sorted(results) == ["locked"] * 5 + ["open"]
        assert not list((tmp_path / str(number)).glob(f"{MARKER_FILE}.*")), "a temp file of the marker is left"


def opened_at_once(root: Path, openers: int) -> list[str]:
    """What becomes of so many that open a directory at the same moment; the one that gets it holds it to the end."""
    results: list[str] = []
    begin, end = threading.Barrier(openers), threading.Barrier(openers)

    def opens() -> None:
        begin.wait()
        try:
            tier = open_disk(root)
        except DirectoryLocked:
            results.append("locked")
            end.wait()
        except BaseException as exc:
            results.append(repr(exc))
            end.wait()
            raise
        else:
            results.append("open")
            end.wait()
            tier.close()

    threads = [threading.Thread(target=opens) for _ in range(openers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("left", [b"", CONTENT[:1], CONTENT[:20], b"\0" * len(CONTENT)])
def test_a_marker_that_a_power_failure_left_half_written_is_written_again(tmp_path: Path, left: bytes) -> None:
    (tmp_path / MARKER_FILE).write_bytes(left)
    open_disk(tmp_path).close()
    assert (tmp_path / MARKER_FILE).read_bytes() == CONTENT


# -- refused ----------------------------------------------------------------------------------------------------------

FOREIGN = {
    "the issue's": ("tmp/x", "server.json"),
    "a scratch directory": ("tmp/",),
    "our lock's name alone": ("server.lock",),
    "our lock and a log": ("server.lock", "server.log", "tmp/"),
    "all our names and a file": ("server.lock", "blobs/", "tmp/", "notes.txt"),
    "all our names and a temp file": ("server.lock", "blobs/", "tmp/upload.part"),
    "all our names and somebody's blobs": ("server.lock", "blobs/image.bin", "tmp/"),
    "a namespace without a chunk of ours": ("server.lock", f"blobs/{'ab' * 16}/cd/{'cd' * 16}.safetensors"),
    "an index": ("index/cache.db",),
    "a file called like a fresh file system's directory": ("lost+found",),
    "a hidden file": (".bashrc",),
}


@pytest.mark.parametrize("names", FOREIGN.values(), ids=FOREIGN)
def test_a_directory_that_is_not_ours_is_refused_and_not_touched(tmp_path: Path, names: tuple[str, ...]) -> None:
    make(tmp_path, *names)
    before = everything(tmp_path)
    for refuses in (open_disk, claim, require_ours):
        with pytest.raises(ConfigError, match="is not empty and has no tiered_kv.json.* name a new or an empty direc"):
            refuses(tmp_path)
    assert everything(tmp_path) == before


MARKERS: dict[str, Callable[[Path], object]] = {
    "a link to a marker": lambda path: (path.with_name("real").write_bytes(CONTENT), path.symlink_to("real")),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a FIFO": os.mkfifo,
    "a directory": lambda path: path.mkdir(),
    "of a newer version": lambda path: path.write_bytes(CONTENT.replace(b"1}", b"2}")),
    "of another package": lambda path: path.write_bytes(b'{"package": "other", "version": 1}'),
    "no object": lambda path: path.write_bytes(b"[1]"),
    "no version": lambda path: path.write_bytes(b'{"package": "tiered_kv", "version": true}'),
    "garbage": lambda path: path.write_bytes(b"\xff\xfe"),
    "large": lambda path: path.write_bytes(CONTENT * 100),
}


@pytest.mark.parametrize("marker", MARKERS)
def test_a_marker_that_is_not_ours_is_refused_whatever_else_is_there(tmp_path: Path, marker: str) -> None:
    root = used(tmp_path)
    (root / MARKER_FILE).unlink()
    MARKERS[marker](root / MARKER_FILE)
    before = everything(root)
    with pytest.raises(ConfigError, match=r"marker of the directory is not one of ours, so nothing was touched: \w+"):
        open_disk(root)
    assert everything(root) == before


def test_a_half_written_marker_is_no_leave_to_take_what_is_beside_it(tmp_path: Path) -> None:
    make(tmp_path, MARKER_FILE, "tmp/x")
    before = everything(tmp_path)
    with pytest.raises(ConfigError, match=r"its tiered_kv\.json says nothing"):
        open_disk(tmp_path)
    assert everything(tmp_path) == before


# -- earlier versions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_a_directory_of_an_earlier_version_is_recognised_and_marked(
    tmp_path: Path, repository: Path, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    with tarfile.open(repository / "tests" / "golden" / f"cache_v{version}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / "cache"
    make(root, "notes.txt")  # which earlier versions did not mind
    require_ours(root)
    assert not (root / MARKER_FILE).exists(), "a look marks nothing"
    caplog.set_level(logging.INFO)
    open_disk(root).close()
    assert (root / MARKER_FILE).read_bytes() == CONTENT
    assert len(lines(caplog, "a cache directory of an earlier version is marked as ours")) == 1
    assert (root / "notes.txt").exists() and len(list(root.rglob("*.safetensors"))) == 6


@pytest.mark.parametrize("version", [1, 2])
def test_a_record_alone_tells_an_earlier_version(tmp_path: Path, repository: Path, version: int) -> None:
    """Also one that lacks the fields which records have now."""
    with tarfile.open(repository / "tests" / "golden" / f"cache_v{version}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / "cache"
    for path in root.rglob("*.safetensors"):
        path.unlink()
    assert look_at(root).standing is Standing.EARLIER
    next(root.rglob("namespace.json")).write_text("{}")
    assert look_at(root).standing is Standing.FOREIGN


def test_blobs_without_a_record_tell_an_earlier_version(tmp_path: Path) -> None:
    root = used(tmp_path)
    (root / MARKER_FILE).unlink()
    (root / "server.lock").unlink()
    assert look_at(root).standing is Standing.EARLIER
    for path in root.rglob("*.safetensors"):
        path.write_bytes(b"x" * 8192)
    assert look_at(root).standing is Standing.FOREIGN, "names alone prove nothing"


def test_an_empty_directory_of_an_earlier_version_is_recognised_by_its_lock(tmp_path: Path) -> None:
    open_disk(tmp_path).close()
    (tmp_path / MARKER_FILE).unlink()
    make(tmp_path, "server.log", "pins.lock", "epochs.json", "tmp/123-4", "tmp/probe-77", f"arena-{'ab' * 8}.lock")
    assert look_at(tmp_path).standing is Standing.EARLIER
    open_disk(tmp_path).close()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_private_directory_of_an_earlier_version_is_known_by_its_place_and_names(tmp_path: Path) -> None:
    make(tmp_path, "server.lock", "epochs.json")
    assert look_at(tmp_path).standing is Standing.FOREIGN
    assert look_at(tmp_path, is_private=True).standing is Standing.EARLIER
    make(tmp_path, "letter.txt")
    with pytest.raises(ConfigError, match=r"letter\.txt"):
        claim(tmp_path, is_private=True)


@needs_root
def test_root_marks_the_directory_of_a_user_for_that_user(tmp_path: Path) -> None:
    root = used(tmp_path / "cache")
    (root / MARKER_FILE).unlink()
    os.chown(root, STRANGER, STRANGER)
    assert claim(root) == {STRANGER, 0}
    assert (root / MARKER_FILE).stat().st_uid == STRANGER


# -- what an open removes ---------------------------------------------------------------------------------------------


def test_an_open_removes_its_own_temp_files_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = used(tmp_path)
    ours = ["tmp/4711-12", "tmp/probe-4711", "tmp/probe-4711-0123abcd", "tmp/namespace.json.4711-0123abcd"]
    stale = ["pins.json.4711-0123abcd", "server.json.4711"]
    theirs = ["tmp/x", "tmp/4711-12.part", "tmp/probe-x", "tmp/1-2-3", "tmp/.4711-1", "pins.json.bak"]
    young = ["epochs.json.4711-0123abcd"]
    make(root, *ours, *stale, *theirs, *young, "tmp/12-3/")
    (root / "tmp" / "13-4").symlink_to(root / "tmp" / "x")
    for name in stale:
        os.utime(root / name, (1, (root / name).stat().st_mtime - STALE_S - 60))
    caplog.set_level(logging.INFO)
    tier = open_disk(root)
    tier.put(CHAIN.name(3), CHAIN.blob(3).view())
    tier.close()
    assert [name for name in ours + stale if os.path.lexists(root / name)] == []
    assert [name for name in (*theirs, *young, "tmp/12-3", "tmp/13-4") if not os.path.lexists(root / name)] == []
    said = lines(caplog, "removed: ")
    assert sorted(line.rpartition("path=")[2] for line in said) == sorted(str(root / name) for name in ours + stale)
    assert len(lines(caplog, "left alone: ")) == len([name for name in theirs if "tmp/" in name]) + 2


def test_of_many_removed_files_some_are_named_and_the_rest_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = used(tmp_path)
    make(root, *(f"tmp/4711-{n}" for n in range(LINES_MAX + 7)))
    caplog.set_level(logging.INFO)
    open_disk(root).close()
    assert list((root / "tmp").iterdir()) == []
    assert len(lines(caplog, "removed: a write that was cut off")) == LINES_MAX
    assert len(lines(caplog, "removed as well: 7 more")) == 1


def test_a_name_that_is_taken_among_the_temp_files_is_passed_over(tmp_path: Path) -> None:
    root = used(tmp_path)
    for number in range(5):
        (root / "tmp" / f"{os.getpid()}-{number}").symlink_to("/nowhere")
    tier = open_disk(root)
    tier.put(CHAIN.name(3), CHAIN.blob(3).view())
    assert tier.contains(CHAIN.name(3))
    tier.close()
    assert len(list((root / "tmp").iterdir())) == 5


@needs_root
def test_files_of_another_user_stay_whatever_they_are_called(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = used(tmp_path)
    broken = blob_path(root, CHAIN.name(1))
    make(root, "tmp/4711-1")
    broken.write_bytes(b"x" * 8192)
    for path in (broken, root / "tmp" / "4711-1"):
        os.chown(path, STRANGER, STRANGER)
    tier = open_disk(root)
    assert tier.unreadable_count == 1
    tier.close()
    assert broken.read_bytes() == b"x" * 8192 and (root / "tmp" / "4711-1").exists()
    assert len(lines(caplog, "left alone: it is among the temp files and belongs to another user")) == 1
    assert lines(caplog, "removed: ") == []


def test_a_broken_blob_is_removed_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = used(tmp_path)
    broken = blob_path(root, CHAIN.name(1))
    broken.write_bytes(b"x" * 16384)
    caplog.set_level(logging.INFO)
    open_disk(root).close()
    assert not broken.exists() and blob_path(root, CHAIN.name(0)).exists()
    assert [line for line in lines(caplog, "removed: its header is not") if str(broken) in line]


def with_tables(database: Path) -> None:
    database.parent.mkdir(exist_ok=True)
    database.unlink(missing_ok=True)
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER)")
        connection.execute("INSERT INTO orders VALUES (42)")
        connection.commit()


INDEXES: dict[str, Callable[[Path], object]] = {
    "another program's files": lambda index: (index / "postings.bin").write_bytes(b"precious"),
    "another program's database": lambda index: with_tables(index / "cache.db"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_that_is_not_ours_stays_and_the_tier_goes_without(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = used(tmp_path)
    INDEXES[case](root / "index")
    before = everything(root / "index")
    for _ in range(2):
        tier = open_disk(root)
        assert {info.name.key for info in tier.scan()} == {CHAIN.key(index) for index in range(3)}
        tier.record_use([CHAIN.name(0)])
        tier.flush()
        tier.close()
    assert everything(root / "index") == before
    assert len(lines(caplog, "index/ is not ours and stays")) == 2


def test_of_what_is_called_a_damaged_index_only_ours_is_removed(tmp_path: Path) -> None:
    root = used(tmp_path)
    make(root, "index.damaged-1/cache.db", "index.damaged-2/thesis.tex", "index.damaged-by-hand/cache.db")
    (root / "index" / "cache.db").write_bytes(b"garbage" * 1000)
    tier = open_disk(root)
    assert len(list(tier.scan())) == 3
    tier.close()
    found = sorted(path.name for path in root.glob("index*"))
    assert found == ["index", "index.damaged-2", "index.damaged-3", "index.damaged-by-hand"]
    assert (root / "index.damaged-2" / "thesis.tex").exists()
    assert (root / "index.damaged-3" / "cache.db").read_bytes() == b"garbage" * 1000


PASSING = ("EIO", "ESTALE", "EMFILE", "ENFILE", "ENOMEM", "ETIMEDOUT", "ENOTCONN")


@pytest.mark.parametrize("name", PASSING)
def test_what_the_medium_does_not_give_now_is_not_said_to_be_somebody_elses(tmp_path: Path, name: str) -> None:
    """The advice was to name another directory, or to move server.json away, under which its server ends."""
    claim(tmp_path)
    write_info(tmp_path, ServerInfo("/run/x.sock", 1, "0.9.1", PROTOCOL, "0" * 16, ""))
    for look in (require_ours, refuse_foreign_info):
        counted = SyscallFaults(tmp_path)
        with counted.active():
            look(tmp_path)
        for number in range(len(counted.calls)):
            failing = SyscallFaults(tmp_path, number, getattr(errno, name), in_a_row=99)
            with failing.active(), pytest.raises(TierUnavailable, match=name if look is require_ours else None):
                look(tmp_path)
