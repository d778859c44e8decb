"""The walk over a directory: what each file is, without changing any."""

import os
import sys
import threading

import pytest

from tiered_kv.testing.blobs import SampleChain
from tiered_kv.tiers.disk.entries import pack, read_entries, unpack
from tiered_kv.tiers.disk.index import read_index
from tiered_kv.tiers.disk.read_ahead import ReadAhead
from tiered_kv.tiers.disk.scan import Kind, walk
from tiered_kv.tiers.disk.tier import DiskTier

CAPACITY = 96 << 20


@pytest.fixture
def stored(tmp_path):
    """A directory with four blobs, as an index remembers them."""
    chain = SampleChain()
    tier = DiskTier(tmp_path, CAPACITY, min_free_bytes=0)
    for index in range(4):
        blob = chain.blob(index)
        tier.put(blob.name, blob.view())
    tier.close()
    return tmp_path / "blobs", chain


def files_below(blobs):
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in blobs.rglob("*")}


def path_of(blobs, name):
    return next(blobs.rglob(f"{name.key.hex()}.safetensors"))


def test_blobs_of_the_index_are_told_without_a_read_and_others_by_their_header(stored, tmp_path):
    blobs, chain = stored
    index = {shard: packed.rows() for shard, packed in read_index(tmp_path).items()}
    for found in walk(blobs, index):
        assert found.kind is Kind.INDEXED and found.header is None and found.row is not None
    for found in walk(blobs, {}):
        assert found.kind is Kind.READ and found.row is None
        assert (found.header.record.key, found.header.record.parent) == (found.name.key, found.name.parent)
    names = {chain.blob(index).name for index in range(4)}
    told = {(found.name.key, found.name.parent, found.name.chunk_index) for found in walk(blobs, index)}
    assert told == {(name.key, name.parent, name.chunk_index) for name in names}


def test_every_other_file_has_its_kind_and_none_is_touched(stored, tmp_path):
    blobs, chain = stored
    paths = [path_of(blobs, chain.blob(index).name) for index in range(4)]
    paths[0].write_bytes(bytes(8192))
    os.truncate(paths[1], 100)
    paths[2].rename(paths[2].with_name("notes.txt"))
    paths[3].rename(paths[3].with_name(f"{'0' * 32}.safetensors"))  # one of another key, in its directory or not
    before = files_below(blobs)
    kinds = {os.path.basename(found.relative): found.kind for found in walk(blobs, {})}
    assert kinds[paths[0].name] is kinds[paths[1].name] is Kind.DAMAGED and kinds["notes.txt"] is Kind.STRAY
    assert kinds[f"{'0' * 32}.safetensors"] in (Kind.DAMAGED, Kind.STRAY) and len(kinds) == 4
    assert files_below(blobs) == before


def test_a_link_a_pipe_and_a_directory_under_a_blobs_name_are_no_blobs(stored, tmp_path):
    blobs, chain = stored
    index = {shard: packed.rows() for shard, packed in read_index(tmp_path).items()}
    link, pipe, directory = (path_of(blobs, chain.blob(i).name) for i in range(3))
    os.rename(link, tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    pipe.unlink()
    os.mkfifo(pipe)
    directory.unlink()
    directory.mkdir()
    found = {file.path: file.kind for file in walk(blobs, index)}
    assert found[str(link)] is found[str(pipe)] is Kind.STRAY and str(directory) not in found
    assert sorted(kind.value for kind in found.values()) == ["indexed", "stray", "stray"]


def test_directories_read_ahead_say_what_reading_them_here_says(stored, tmp_path, monkeypatch):
    """Names of all kinds, a directory that is gone, and one that comes after it."""
    blobs, _ = stored
    here = sorted(str(path) for path in blobs.glob("*/*") if path.is_dir())
    (blobs / "odd").mkdir()
    os.mkfifo(blobs / "odd" / f"{'ab' * 16}.safetensors")
    (blobs / "odd" / os.fsdecode(b"\xff\n name")).touch()
    (blobs / "odd" / f"{'AB' * 16}.safetensors").touch()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("tiered_kv.tiers.disk.read_ahead.BATCH", 3)
    wanted = [*here, str(blobs / "odd"), str(blobs / "gone")]
    with ReadAhead(wanted, ".safetensors") as ahead:
        for directory in [*here, str(blobs / "odd")]:
            told, known = ahead.take(directory), read_entries(directory, ".safetensors")
            assert told is not None, "another process has read it"
            assert (sorted(told.files()), sorted(told.others)) == (sorted(known.files()), sorted(known.others))
        assert len(known.others) == 3 and ahead.take(str(blobs / "gone")) is None
    assert list(unpack(pack(known))) == [known]
    assert list(unpack(pack(known)[:-1])) == [], "what was cut off is not there"


@pytest.mark.parametrize(
    ("python", "is_python"), [(sys.executable, True), ("/nowhere/python", False), ("/bin/false", False)]
)
def test_a_large_directory_is_walked_to_its_end_whether_or_not_others_read_it(
    stored, tmp_path, monkeypatch, python, is_python
):
    blobs, _ = stored
    (blobs / "notes.txt").touch()
    index = {shard: packed.rows() for shard, packed in read_index(tmp_path).items()}
    known = {(found.kind, found.path, found.written_s, found.size_bytes) for found in walk(blobs, index)}
    taken = []
    monkeypatch.setattr("tiered_kv.tiers.disk.scan.READ_AHEAD_FROM", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(sys, "executable", python)
    take = ReadAhead.take
    monkeypatch.setattr(ReadAhead, "take", lambda self, directory: taken.append(take(self, directory)) or taken[-1])
    assert {(found.kind, found.path, found.written_s, found.size_bytes) for found in walk(blobs, index)} == known
    assert len(known) == 5 and any(taken) is is_python


def test_a_large_directory_is_walked_to_its_end_where_no_thread_is_to_be_had(stored, tmp_path, monkeypatch):
    def refused(_):
        raise RuntimeError("can't start new thread")

    blobs, _ = stored
    index = {shard: packed.rows() for shard, packed in read_index(tmp_path).items()}
    known = {found.path for found in walk(blobs, index)}
    monkeypatch.setattr("tiered_kv.tiers.disk.scan.READ_AHEAD_FROM", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(threading.Thread, "start", refused)
    assert known and {found.path for found in walk(blobs, index)} == known
