"""Verbs over models with recurrent layers: a state is part of its prefix, whatever is done with either."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.clients import CHUNK as SMALL_CHUNK
from tests.kit.server.clients import SmallEngine, settings
from tests.kit.server.probe import server_pid, wait_ended, wait_for, wait_written
from tests.kit.server.processes import end_server
from tests.kit.storage.places import Place, open_place, reasons
from tests.kit.storage.stored_prompts import CHUNK, Model, tokens
from tests.kit.verbs import run
from tiered_kv.chunks.header import PEEK_BYTES
from tiered_kv.errors import ConfigError
from tiered_kv.keys.naming import BlobName
from tiered_kv.ops.forest import Forest
from tiered_kv.ops.garbage import HOUR_S, MinimumAges, find
from tiered_kv.ops.storage import Content

PARTS = 3
MODEL = Model(state_parts=PARTS, payload_bytes=8192)
BLOB_BYTES = MODEL.form.blob_bytes
PROMPT = tokens(1, 6)
FORK = PROMPT[: 3 * CHUNK] + tokens(2, 2)
CHUNKS = 6 + 2
"""Chunks of both prompts."""


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with open_place(request.param, tmp_path, request.getfixturevalue) as place:
        fill(place)
        yield place


@pytest.fixture
def disk(tmp_path: Path) -> Place:
    place = Place.disk(tmp_path / "cache")
    fill(place)
    return place


def fill(place: Place) -> None:
    """Two prompts that fork after three chunks, states of one behind chunks 2 and 5, of the other behind chunk 4."""
    with place.open() as storage:
        MODEL.store(storage, PROMPT, FORK)
        MODEL.store_states(storage, PROMPT, 2, 5)
        MODEL.store_states(storage, FORK, 4)


def test_doctor_counts_the_state_to_what_one_request_may_hold(disk: Place) -> None:
    small = ("--set", "host_bytes=64MiB", "--set", "disk_bytes=160MiB", "--set", f"chunk_tokens={CHUNK}")
    report = json.loads(run("doctor", disk.uri, *small, "--json").stdout)
    (said,) = [one["text"] for one in report["findings"] if one["check"] == "chunks"]
    leased = int((64 << 20) * 0.375) // BLOB_BYTES
    assert f"one request may load {(leased - PARTS) * CHUNK} tokens" in said


def state(boundary: int, prompt: list[int] = PROMPT) -> list[BlobName]:
    return [name for name, _ in MODEL.states(prompt, boundary)]


def remove(place: Place, *names: BlobName) -> None:
    """Behind everybody's back."""
    with place.open() as storage:
        for name in names:
            place.delete(storage.path(name))


def held(place: Place, *names: BlobName) -> list[bool]:
    with place.open() as storage:
        return storage.contains(names)


def content_of(place: Place) -> Content:
    with place.open() as storage:
        return storage.look()


def key(name: BlobName) -> str:
    return name.key.hex()


# -- looking ----------------------------------------------------------------------------------------------------------


def test_listings_tell_chunks_and_states_apart(place: Place) -> None:
    _, listed = place.run("ls", "--limit", 0)
    (space,) = listed["namespaces"]
    states = {key(name) for at, prompt in ((2, PROMPT), (5, PROMPT), (4, FORK)) for name in state(at, prompt)}
    assert (space["chunks"], space["states"], space["state_parts"]) == (CHUNKS + 9, 3, 9)
    assert (space["state_bytes"], space["chunks_behind_states"]) == (9 * BLOB_BYTES, 2), "one behind each last state"
    assert {chunk["key"] for chunk in listed["chunks"] if chunk["is_state"]} == states
    assert all(chunk["tokens"] == (0 if chunk["is_state"] else CHUNK) for chunk in listed["chunks"])
    (taken,) = place.run("du")[1]["namespaces"]
    assert [taken[name] for name in ("states", "state_parts", "state_bytes")] == [3, 9, 9 * BLOB_BYTES]
    stat = place.run("stat")[1]["storage"]
    assert stat["tokens"] == stat["namespaces"][0]["tokens"] == CHUNKS * CHUNK, "a state has no tokens of its own"
    assert (stat["namespaces"][0]["states"], stat["chunks"]) == (3, CHUNKS + 9)


def test_a_tree_branches_where_prompts_part_and_not_where_states_are(disk: Place) -> None:
    (space,) = disk.run("tree")[1]["namespaces"]
    stem = space["runs"][0]
    assert (stem["level"], stem["chunks"], stem["states"], stem["continued"]) == (0, 3, 1, 2)
    assert sorted((run["chunks"], run["states"], run["state_bytes"]) for run in space["runs"][1:]) == [
        (2, 1, PARTS * BLOB_BYTES),
        (3, 1, PARTS * BLOB_BYTES),
    ]
    assert space["hanging_chunks"] == 0


def test_what_people_read_says_states(disk: Place) -> None:
    words = {verb: run(verb, disk.uri).stdout for verb in ("ls", "du", "stat", "tree")}
    assert "3, 108 KiB" in words["ls"] and "3, 108 KiB" in words["du"] and "3, 108 KiB" in words["stat"], words
    assert "1 state of 36 KiB" in words["tree"] and "continued 2 ways" in words["tree"]


def test_a_part_is_inspected_and_exported_as_what_it_is(place: Place, tmp_path: Path) -> None:
    part = state(5)[1]
    code, found = place.run("inspect", key(part))
    assert (code, found["is_sound"], found["is_state"], found["tokens"]) == (0, True, True, 0)
    assert [tensor["name"] for tensor in found["tensors"]] == ["rank0/state", "_pad"]
    assert found["is_reachable"] and len(found["chain"]) == 5 + 1
    code, exported = place.run("export", key(part), tmp_path / "part.safetensors")
    assert (code, exported["is_sound"]) == (0, True)
    assert (tmp_path / "part.safetensors").read_bytes() == dict(MODEL.states(PROMPT, 5))[part]


# -- explain ----------------------------------------------------------------------------------------------------------


def explained(place: Place, prompt: list[int], tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "prompt.json").write_text(json.dumps(prompt))
    code, report = place.run("explain", "--tokens", tmp_path / "prompt.json")
    assert code == 0
    return report


def boundaries(report: dict[str, Any]) -> list[tuple[int, str]]:
    return [(one["tokens"] // CHUNK, one["state"]) for one in report["boundaries"]]


def test_explain_ends_a_hit_where_the_last_state_is(place: Place, tmp_path: Path) -> None:
    report = explained(place, [*PROMPT, 7], tmp_path)
    assert (report["here_chunks"], report["hit_tokens"], report["state_parts"]) == (6, 5 * CHUNK, PARTS)
    assert boundaries(report) == [(5, "here"), (2, "here")]
    said = f"attention up to {6 * CHUNK}, last state at {5 * CHUNK}; at {6 * CHUNK} a hit could end, but"
    assert report["hit_text"].startswith(said)
    assert "no state is stored there" in report["hit_text"] and report["siblings"] is None and report["see"]


def test_a_state_is_no_prompt_that_continues_there(disk: Place, tmp_path: Path) -> None:
    report = explained(disk, PROMPT[: 5 * CHUNK] + tokens(3, 2), tmp_path)
    assert (report["here_chunks"], report["hit_tokens"], report["siblings"]) == (5, 5 * CHUNK, 1)


def test_explain_says_why_a_hit_is_no_longer(disk: Place, tmp_path: Path) -> None:
    exact = explained(disk, PROMPT[: 5 * CHUNK], tmp_path)
    assert exact["hit_tokens"] == 2 * CHUNK and boundaries(exact) == [(5, "last_token"), (2, "here")]
    assert "the last token is computed, so the deepest boundary for this prompt is 128" in exact["hit_text"]
    enough = explained(disk, PROMPT[: 5 * CHUNK + 1], tmp_path)
    assert (enough["hit_tokens"], enough["see"]) == (5 * CHUNK, None), "as far as one could be with all that is stored"

    remove(disk, state(5)[1])
    partial = explained(disk, PROMPT, tmp_path)
    assert partial["hit_tokens"] == 2 * CHUNK and boundaries(partial) == [(5, "part"), (2, "here")]
    assert "of the state there part 2 is missing of 3" in partial["hit_text"]

    with disk.open() as storage:
        path = storage.path(state(2)[2])
    data = disk.get(path)
    disk.put(path, data[:300] + bytes([data[300] ^ 1]) + data[301:])
    bad = explained(disk, PROMPT, tmp_path)
    assert bad["hit_tokens"] == 0 and "no state that can be used" in bad["hit_text"]
    assert "part 3 is damaged" in bad["boundaries"][1]["text"]

    remove(disk, MODEL.names(PROMPT)[1])
    gap = explained(disk, FORK, tmp_path)
    assert (gap["here_chunks"], gap["hit_tokens"]) == (1, 0) and (4, "unreachable") in boundaries(gap)
    shown = run("explain", disk.uri, "--tokens", tmp_path / "prompt.json").stdout
    assert "a chunk before it is not: no request can reach it" in shown and "after tokens" in shown


@pytest.mark.parametrize(
    ("method", "length", "offered"),
    [("mtp", 5, 2), ("mtp", 6, 5), ("mtp", 6.5, 5), ("draft_model", 5.5, 5), ("draft_model", 5, 2)],
)
def test_explain_ends_a_hit_with_states_and_a_draft_where_both_let_it(tmp_path, method, length, offered) -> None:
    place = Place.disk(tmp_path / "cache")
    model = Model(state_parts=PARTS, fields={"draft": {"method": method, "settings": {}}})
    with place.open() as storage:
        model.store(storage, PROMPT)
        model.store_states(storage, PROMPT, 2, 5)
    prompt = tokens(1, 7)[: int(length * CHUNK)]
    assert explained(place, prompt, tmp_path)["hit_tokens"] == offered * CHUNK


@pytest.mark.parametrize(
    ("method", "settings", "length", "offered"),
    [
        ("eagle", {}, 3 * CHUNK + 5, 2 * CHUNK + 16),
        ("mtp", {}, 3 * CHUNK, 2 * CHUNK),
        ("eagle3", {"disable_eagle_block_drop": True}, 3 * CHUNK + 5, 3 * CHUNK),
        ("draft_model", {}, 3 * CHUNK + 5, 3 * CHUNK),
        ("draft_model", {}, 3 * CHUNK, 3 * CHUNK - 16),
    ],
)
def test_explain_gives_up_what_a_draft_gives_up(tmp_path, method, settings, length, offered) -> None:
    """Blocks of 16 in chunks of 32."""
    place, prompt = Place.disk(tmp_path / "cache"), tokens(1, 3, tail=5)[:length]
    model = Model(fields={"draft": {"method": method, "settings": settings}})
    with place.open() as storage:
        model.store(storage, tokens(1, 3))
    report = explained(place, prompt, tmp_path)
    assert (report["draft"], report["here_tokens"], report["hit_tokens"]) == (method, 3 * CHUNK, offered)
    gives_up = method != "draft_model" and not settings
    assert ("the last block of 16 is not offered" in report["hit_text"]) == gives_up and report["see"] is None


# -- verify, gc -------------------------------------------------------------------------------------------------------


def test_sound_states_are_no_misfits(place: Place) -> None:
    """They have other tensors than chunks; here the record tells neither, so most blobs decide."""
    code, report = place.run("verify")
    assert (code, report["bad"], report["unreachable"], report["read"]) == (0, [], 0, CHUNKS + 9)


def test_a_damaged_part_is_removed_alone_and_the_rest_of_its_state_is_garbage(place: Place) -> None:
    broken = state(5)[1]
    with place.open() as storage:
        path = storage.path(broken)
    data = place.get(path)
    place.put(path, data[:PEEK_BYTES] + bytes([data[PEEK_BYTES] ^ 1]) + data[PEEK_BYTES + 1 :])
    code, report = place.run("verify", "--repair", "--yes")
    assert (code, report["removed"], report["unreachable"]) == (0, 1, 2) and reasons(report) == {}
    assert held(place, *state(5), *state(2)) == [True, False, True, True, True, True]

    with place.open() as storage:
        young = find(storage, storage.look(), MinimumAges(), time.time())
        old = find(storage, storage.look(), MinimumAges(), time.time() + HOUR_S)
    assert young.items == [], "its other parts may be under way"
    assert {(item.kind, item.count) for item in old.items} == {("partial", 1), ("orphans", 1)}
    if place.directory is not None and place.is_disk:
        for name in (state(5)[0], state(5)[2]):
            os.utime(place.directory / path_of(place, name), (1e9, 1e9))
        for file in (place.directory / "index").iterdir():
            file.unlink()
        code, report = place.run("gc", "--yes")
        assert (code, sorted(item["kind"] for item in report["items"])) == (0, ["orphans", "partial"])
        assert held(place, *state(5), *state(2), *MODEL.names(PROMPT)) == [False] * 3 + [True] * 9


def path_of(place: Place, name: BlobName) -> str:
    with place.open() as storage:
        return storage.path(name)


# -- evict ------------------------------------------------------------------------------------------------------------


def test_a_chunk_takes_its_state_and_what_is_behind_it(place: Place) -> None:
    names = MODEL.names(PROMPT)
    code, report = place.run("evict", "--key", key(names[3]), "--yes")
    assert (code, report["selected"]) == (0, 3 + PARTS)
    assert held(place, *names, *state(5)) == [True] * 3 + [False] * 6
    assert all(held(place, *state(2), *state(4, FORK), *MODEL.names(FORK)))


def test_a_part_takes_its_whole_state_and_nothing_else(disk: Place) -> None:
    code, report = disk.run("evict", "--key", key(state(5)[1]), "--yes")
    assert (code, report["selected"]) == (0, PARTS)
    assert held(disk, *state(5), *MODEL.names(PROMPT)) == [False] * 3 + [True] * 6


@pytest.mark.parametrize("chunks", range(1, 12))
def test_freeing_bytes_leaves_no_partial_state(disk: Place, chunks: int) -> None:
    code, report = disk.run("evict", "--bytes", chunks * BLOB_BYTES, "--yes")
    content = content_of(disk)
    forest = Forest(content.blobs)
    assert code == 0 and chunks <= report["selected"] < chunks + PARTS
    assert forest.partial_states(content.state_parts()) == [] and not forest.orphans
    assert len(content.blobs) == CHUNKS + 9 - report["selected"]


def test_partial_states_go_first(disk: Place) -> None:
    remove(disk, state(5)[2])
    code, report = disk.run("evict", "--bytes", 1, "--yes")
    assert (code, report["selected"]) == (0, 2) and held(disk, *state(5)[:2]) == [False, False]


def test_an_erased_tenants_state_goes_with_another_tenants_chunks_left(place: Place) -> None:
    with place.open() as storage:
        MODEL.store_states(storage, PROMPT, 3, tag="t")
    code, report = place.run("evict", "--tag", "t", "--yes")
    assert (code, report["selected"]) == (0, PARTS)
    assert held(place, *state(3), *state(2)) == [False] * 3 + [True] * 3


def test_by_namespace_and_by_who_stored_it_states_go_too(disk: Place) -> None:
    code, report = disk.run("evict", "--stored-by", "vllm<0.33", "--dry-run")
    assert (code, report["selected"]) == (0, CHUNKS + 9)
    code, report = disk.run("evict", "--namespace", MODEL.namespace.digest.hex(), "--yes")
    assert (code, report["selected"]) == (0, CHUNKS + 9) and content_of(disk).blobs == []


# -- pins -------------------------------------------------------------------------------------------------------------


def test_a_pinned_prefix_keeps_its_states(place: Place) -> None:
    names = MODEL.names(PROMPT)
    (pin,) = place.run("pin", key(names[4]))[1]["pins"]
    assert (pin["prefix_chunks"], pin["state_parts"], pin["prefix_bytes"]) == (5 + 6, 6, 11 * BLOB_BYTES)
    listed = {one["key"]: one["is_pinned"] for one in place.run("ls", "--limit", 0)[1]["chunks"]}
    kept = [*names[:5], *state(2), *state(5)]
    assert {name for name, is_pinned in listed.items() if is_pinned} == set(map(key, kept))
    assert place.run("inspect", key(state(5)[0]))[1]["is_pinned"]
    code, report = place.run("evict", "--all", "--yes")
    assert (code, report["selected"], report["pinned"]) == (0, CHUNKS + 9 - 11, 11)
    assert all(held(place, *kept)) and len(content_of(place).blobs) == len(kept)
    place.run("unpin", key(names[4]))
    place.run("evict", "--all", "--yes")
    assert content_of(place).blobs == []


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "verb"), [("disk", "cp"), ("s3", "warm")], indirect=["place"])
def test_copies_bring_states(place: Place, tmp_path: Path, verb: str) -> None:
    there = Place.disk(tmp_path / "there")
    report = copied(place, there, verb)
    assert (report["copied"], report["corrupt"], report["left_out"]) == (CHUNKS + 9, 0, 0)
    for name, data in (*MODEL.blobs(PROMPT), *MODEL.states(PROMPT, 2, 5), *MODEL.states(FORK, 4)):
        assert there.get(path_of(there, name)) == data


def test_a_prefix_is_copied_with_its_states_and_none_is_cut_by_a_limit(disk: Place, tmp_path: Path) -> None:
    there = Place.disk(tmp_path / "there")
    assert copied(disk, there, "cp", "--key", key(MODEL.names(PROMPT)[4]))["copied"] == 5 + 6
    assert all(held(there, *MODEL.names(PROMPT)[:5], *state(2), *state(5)))
    for number in range(1, CHUNKS + 9):
        there = Place.disk(tmp_path / f"there-{number}")
        copied(disk, there, "cp", "--bytes", number * BLOB_BYTES)
        content = content_of(there)
        forest = Forest(content.blobs)
        assert forest.partial_states({MODEL.namespace.digest: PARTS}) == [] and not forest.orphans


def copied(source: Place, target: Place, verb: str, *more: object) -> dict[str, Any]:
    names = [source.uri, target.uri] if verb == "cp" else [target.uri, "--from", source.uri]
    sets = [w for n, v in source.settings.items() for w in ("--from-set", f"{n}={json.dumps(v)}")]
    result = run(verb, *names, *sets, *more, "--json")
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_doctor_has_nothing_against_states(disk: Place) -> None:
    _, report = disk.run("doctor")
    assert not [finding for finding in report["findings"] if "misfit" in str(finding) or "damaged" in str(finding)]


# -- beside a server --------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(root: Path) -> Iterator[SmallEngine]:
    """On a disk that holds about 60 chunks, with a model of two groups of recurrent layers."""
    config = settings(root, host_bytes="2MiB", disk_bytes=(64 << 20) + 60 * 40960, eviction="lru")
    with closing(SmallEngine.start(config, state_parts=2)) as engine:
        yield engine


def test_states_beside_a_server_and_after_it(engine: SmallEngine, root: Path, tmp_path: Path) -> None:
    place, prompt = Place.disk(root), list(range(5 * SMALL_CHUNK + 1))
    engine.store(5)
    for boundary in (2, 4):
        engine.store_state(boundary)
    wait_for(lambda: engine.state_hit(5) == 4, "the deepest state")
    wait_written(root)

    def check() -> None:
        code, report = place.run("verify")
        assert (code, report["bad"], report["read"]) == (0, [], 9), "the record says what a state looks like"
        report = explained(place, prompt, tmp_path)
        assert (report["hit_tokens"], report["here_tokens"]) == (4 * SMALL_CHUNK, 5 * SMALL_CHUNK)

    check()
    code, report = place.run("verify", "--repair", "--yes")
    assert (code, report["removed"]) == (0, 0)
    code, report = place.run("evict", "--key", key(BlobName(b"", engine.keys(4).keys[3])), "--yes")
    assert (code, report["selected"], report["tiers"][0]["removed"]) == (0, 2 + 2, 4)
    empty_memory(root)
    assert engine.state_hit(5) == 2
    engine.store(5, start=3)
    engine.store_state(4)
    wait_for(lambda: engine.state_hit(5) == 4, "the state again")
    wait_written(root)
    end(engine, root)
    check()


def test_a_pinned_prefix_stays_loadable_while_a_full_server_evicts(engine: SmallEngine, root: Path) -> None:
    place = Place.disk(root)
    engine.store(5)
    engine.store_state(2)
    engine.store_state(4)
    wait_for(lambda: engine.state_hit(5) == 4, "the deepest state")
    wait_written(root)
    pinned = engine.keys(5).keys[2].hex()
    end(engine, root)
    (pin,) = place.run("pin", pinned)[1]["pins"]
    assert (pin["prefix_chunks"], pin["state_parts"]) == (3 + 2, 2)
    with closing(SmallEngine.start(engine.config, state_parts=2)) as again:
        for prompt in range(1, 6):
            again.store(20, first_token=10_000 * prompt)
            wait_written(root)
        empty_memory(root)
        assert again.state_hit(5) == 2, "the pinned chunks and their state; what was behind them has gone"


def end(engine: SmallEngine, root: Path) -> None:
    engine.close()
    os.kill(server_pid(root), signal.SIGTERM)
    wait_ended(root)


def test_a_running_server_is_warmed_with_states(engine: SmallEngine, root: Path, tmp_path: Path) -> None:
    engine.store(4)
    engine.store_state(3)
    wait_for(lambda: engine.state_hit(5) == 3, "the state")
    wait_written(root)
    other = tmp_path / "other"
    with closing(SmallEngine.start(settings(other), state_parts=2)) as there:
        result = run("warm", f"file://{other}", "--from", f"file://{root}", "--json")
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        assert (report["copied"], report["dropped"], report["left_out"]) == (4 + 2, 0, 0)
        assert there.state_hit(5) == 3
    end_server(other)


def empty_memory(root: Path) -> None:
    result = run("evict", "--server", f"unix://{socket_path(root)}", "--tier", "host", "--all", "--yes")
    assert result.exit_code == 0, result.output


def socket_path(root: Path) -> str:
    from tiered_kv.server.directory import read_info

    info = read_info(root)
    if info is None:
        raise ConfigError("no server")
    return str(info.socket)
