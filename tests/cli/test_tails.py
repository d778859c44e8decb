"""Verbs over tails: told from chunks, counted, checked, explained, removed with their prefix, and never copied."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kit.storage.places import Place, reasons
from tests.kit.storage.stored_prompts import CHUNK, Model, tokens
from tests.kit.verbs import report, run
from tiered_kv.keys.naming import BlobName, relative_path
from tiered_kv.ops.garbage import MinimumAges, collect, find

MODEL = Model()
CHUNKS, TAIL = 5, 16
PROMPT = tokens(1, CHUNKS, tail=20)
NAME, DATA = MODEL.tail(PROMPT, CHUNKS, TAIL)


@pytest.fixture
def disk(tmp_path: Path) -> Place:
    place = Place.disk(tmp_path / "cache")
    with place.open() as storage:
        MODEL.store(storage, PROMPT)
        storage.write(NAME, memoryview(DATA))
    return place


def explained(disk: Place, prompt: list[int], folder: Path) -> Any:
    (folder / "prompt.json").write_text(json.dumps(prompt))
    return report("explain", disk.uri, "--tokens", folder / "prompt.json")


def test_ls_du_and_stat_tell_it_from_chunks(disk: Place) -> None:
    (space,) = report("ls", disk.uri)["namespaces"]
    blob_bytes = MODEL.form.blob_bytes
    assert (space["chunks"], space["tails"], space["tail_bytes"]) == (CHUNKS + 1, 1, blob_bytes)
    assert report("du", disk.uri)["namespaces"][0]["tails"] == 1
    listed = {chunk["key"]: chunk for chunk in report("ls", disk.uri)["chunks"]}
    assert (listed[NAME.key.hex()]["is_tail"], listed[NAME.key.hex()]["tokens"]) == (True, TAIL)
    assert sum(chunk["is_tail"] for chunk in listed.values()) == 1
    assert f"tail, {TAIL}" in run("ls", disk.uri).stdout
    assert report("stat", disk.uri)["storage"]["namespaces"][0]["tokens"] == CHUNKS * CHUNK + TAIL


def test_inspect_shows_its_length_and_the_chunk_before_it(disk: Place) -> None:
    shown = report("inspect", disk.uri, NAME.key.hex())
    assert (shown["is_sound"], shown["is_tail"], shown["tokens"]) == (True, True, TAIL)
    assert shown["parent"] == MODEL.names(PROMPT)[-1].key.hex() and shown["chunk_index"] == CHUNKS
    assert f"{TAIL}: a tail" in run("inspect", disk.uri, NAME.key.hex()).stdout


def test_verify_finds_it_sound_and_one_of_another_length_not(disk: Place) -> None:
    assert report("verify", disk.uri)["bad"] == []
    assert disk.directory is not None
    other = MODEL.tail(PROMPT, CHUNKS, TAIL + 1)[0]
    path = disk.directory / "blobs" / relative_path(other)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(DATA)
    done = run("verify", disk.uri, "--json")
    assert done.exit_code == 4 and list(reasons(json.loads(done.stdout)).values()) == ["swapped"]


def test_explain_finds_the_tail_of_this_prompt_and_of_no_other(disk: Place, tmp_path: Path) -> None:
    found = explained(disk, PROMPT, tmp_path)
    assert (found["here_chunks"], found["tail_hit_tokens"]) == (CHUNKS, TAIL)
    longer = explained(disk, PROMPT[:-1] + tokens(3, 2), tmp_path)
    assert (longer["here_chunks"], longer["tail_hit_tokens"], longer["siblings"]) == (CHUNKS, TAIL, 0)
    other = explained(disk, PROMPT[: CHUNKS * CHUNK] + tokens(2, 1), tmp_path)
    assert (other["here_chunks"], other["tail_hit_tokens"]) == (CHUNKS, 0)
    shorter = explained(disk, PROMPT[: CHUNKS * CHUNK + TAIL - 1], tmp_path)
    assert shorter["tail_hit_tokens"] == 0


def test_it_goes_with_the_chunks_before_it_and_before_them(disk: Place) -> None:
    assert report("evict", disk.uri, "--bytes", MODEL.form.blob_bytes, "--yes")["selected"] == 1
    assert held(disk, NAME, MODEL.names(PROMPT)[-1]) == [False, True]
    with disk.open() as storage:
        storage.write(NAME, memoryview(DATA))
    assert report("evict", disk.uri, "--key", MODEL.names(PROMPT)[0].key.hex(), "--yes")["selected"] == CHUNKS + 1
    assert held(disk, NAME) == [False]


def test_no_copy_has_it(disk: Place, tmp_path: Path) -> None:
    target = Place.disk(tmp_path / "copy")
    with target.open() as storage:
        MODEL.store(storage, PROMPT[:CHUNK])
    report("warm", target.uri, "--from", disk.uri)
    assert held(target, NAME, *MODEL.names(PROMPT)) == [False] + [True] * CHUNKS


def held(place: Place, *names: BlobName) -> list[bool]:
    with place.open() as storage:
        return storage.contains(names)


def test_gc_removes_it_behind_a_gap_and_nothing_else_does(disk: Place) -> None:
    """As a chunk: without the chunk before it nobody is told of it."""
    assert collected(disk) == 0 and held(disk, NAME) == [True]
    assert disk.directory is not None
    (disk.directory / "blobs" / relative_path(MODEL.names(PROMPT)[2])).unlink()
    assert collected(disk) == 3
    assert held(disk, NAME, *MODEL.names(PROMPT)) == [False, True, True, False, False, False]


def test_export_writes_it_as_it_is(disk: Place, tmp_path: Path) -> None:
    file = tmp_path / "tail.safetensors"
    assert report("export", disk.uri, NAME.key.hex(), file)["is_sound"]
    assert file.read_bytes() == bytes(DATA)


def collected(place: Place) -> int:
    """How many chunks `gc` removes once they are old."""
    with place.open() as storage:
        garbage = find(storage, storage.look(), MinimumAges(), time.time() + 3600)
        collect(storage, garbage)
    return sum(item.removed for item in garbage.items)
