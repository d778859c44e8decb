"""`ls`, `du`, `tree`, `inspect` and `export`: on a directory, in a bucket, and beside a running server."""

import json
import os
import pty
import re
import shutil
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import safetensors
from safetensors import safe_open

from tests.kit.s3 import S3
from tests.kit.server import object_nodes
from tests.kit.server.clients import CHUNK as SERVED_CHUNK
from tests.kit.server.clients import SmallEngine, content, settings
from tests.kit.server.probe import wait_written
from tests.kit.server.processes import end_server
from tests.kit.storage.disk_probe import open_disk
from tests.kit.storage.stored_prompts import CHUNK, Model, tokens
from tests.kit.verbs import Tier, complaint, directory_tier, report, run, s3_tier, tier_of
from tiered_kv.chunks.header import CHUNK_INDEX, HEADER_XXH3
from tiered_kv.engine.self_test import self_test_format
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.namespace import SELF_TEST_NAMESPACE
from tiered_kv.keys.naming import BlobName, object_path, relative_path
from tiered_kv.ops.storage import FOR_GOOD
from tiered_kv.testing.blobs import SampleChain

ONE = Model()
TWO = Model(weights="user:other", fields={"tp": 2, "kv_dtype": "fp8"})
SIZE = 8192
FIRST, SECOND = tokens(1, 4), tokens(1, 2) + tokens(2, 3)  # two chunks in common
SPACE = ONE.namespace.digest.hex()


def stocked(tier: Tier) -> Tier:
    """Two prompts of one model that begin alike, one of another."""
    with tier.open() as storage:
        ONE.store(storage, FIRST, SECOND)
        TWO.store(storage, FIRST)
    return tier


@pytest.fixture(scope="module", params=["disk", "s3"])
def still(request, tmp_path_factory) -> Tier:
    """A directory and a bucket that no test changes."""
    if request.param == "s3":
        return stocked(s3_tier(request.getfixturevalue("s3")))
    return stocked(directory_tier(tmp_path_factory.mktemp("still") / "kv"))


@pytest.fixture(params=["disk", "s3"])
def tier(request, tmp_path: Path) -> Tier:
    """A directory and a bucket that a test may change."""
    return stocked(tier_of(request, tmp_path))


@pytest.fixture
def disk(tmp_path: Path) -> Tier:
    """A directory that a test may change."""
    return stocked(directory_tier(tmp_path / "kv"))


def kind(tier: Tier) -> str:
    return "object" if tier.uri.startswith("s3:") else "disk"


def put(tier: Tier, number: int, data: bytes) -> None:
    """Overwrite the bytes of chunk ``number`` of the first prompt, behind everybody's back."""
    name = ONE.names(FIRST)[number]
    with tier.open() as storage:
        if kind(tier) == "object":
            storage.store.put(object_path(name), data)
        else:
            (storage.root / "blobs" / relative_path(name)).write_bytes(data)


def sound_bytes(number: int) -> bytearray:
    return bytearray(ONE.blobs(FIRST)[number][1])


def age(tier: Tier, ages_s: dict[bytes, float]) -> None:
    """Make files older than they are, and forget the index with their uses."""
    root = Path(tier.uri.removeprefix("file://"))
    shutil.rmtree(root / "index")
    for path in (root / "blobs").rglob("*.safetensors"):
        then_s = time.time() - ages_s.get(bytes.fromhex(path.stem), 0)
        os.utime(path, (then_s, then_s))


# -- ls ---------------------------------------------------------------------------------------------------------------


def test_ls_lists_namespaces_and_chunks(still: Tier) -> None:
    found = report("ls", still.uri, *still.sets())
    assert (found["uri"], found["tier"], found["notes"]) == (still.uri, kind(still), [])
    assert [(n["namespace"], n["chunks"], n["size_bytes"], n["chunk_tokens"]) for n in found["namespaces"]] == [
        (SPACE, 7, 7 * SIZE, CHUNK),
        (TWO.namespace.digest.hex(), 4, 4 * SIZE, CHUNK),
    ]
    assert [(n["model"], n["epoch"], n["problem"]) for n in found["namespaces"]] == [
        ("hf:0123456789ab bfloat16", "base-0", None),
        ("user:other fp8 tp=2", "base-0", None),
    ]
    expected = {
        (name.key.hex(), name.namespace.hex(), name.chunk_index)
        for model, prompt in ((ONE, FIRST), (ONE, SECOND), (TWO, FIRST))
        for name in model.names(prompt)
    }
    assert {(c["key"], c["namespace"], c["chunk_index"]) for c in found["chunks"]} == expected
    assert (found["chunk_count"], found["chunk_bytes"], len(found["chunks"])) == (11, 11 * SIZE, 11)
    for chunk in found["chunks"]:
        assert (chunk["tokens"], chunk["size_bytes"], chunk["tier"]) == (CHUNK, SIZE, kind(still))
        assert (chunk["is_pinned"], chunk["pinned_until_s"]) == (False, None)
        assert time.time() - 300 < chunk["written_s"] <= chunk["used_s"] < time.time() + 300


def test_ls_prints_whole_keys_into_a_pipe(still: Tier) -> None:
    done = run("ls", still.uri, *still.sets(), "--sort", "key", "--limit", "3", "--namespace", SPACE[:6])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "Namespaces" and lines[3:5] == ["", "Chunks"]
    keys = sorted({name.key.hex() for prompt in (FIRST, SECOND) for name in ONE.names(prompt)})
    assert [line.split()[0] for line in lines[6:]] == keys[:3]
    assert "3 of 7 chunks are shown; --limit 0 shows all" in done.stderr


def test_ls_sorts_limits_and_turns_around(disk: Tier) -> None:
    names = ONE.names(FIRST)
    age(disk, {name.key: 86400.0 * (number + 1) for number, name in enumerate(names)})

    def keys(*arguments: str) -> list[str]:
        chunks = report("ls", disk.uri, "--namespace", SPACE, "--limit", "0", *arguments)["chunks"]
        return [c["key"] for c in chunks]

    depth = keys("--sort", "depth")
    assert set(depth[:1]) == {names[0].key.hex()} and keys("--sort", "depth", "--reverse") == depth[::-1]
    assert keys("--sort", "age")[-1] == names[3].key.hex(), "written four days ago"
    assert keys("--sort", "used")[-2:] == [names[2].key.hex(), names[3].key.hex()]
    assert set(keys("--sort", "used")[:2]) < {name.key.hex() for name in ONE.names(SECOND)}
    assert len(report("ls", disk.uri, "--limit", "2")["chunks"]) == 2
    assert report("ls", disk.uri, "--limit", "2")["chunk_count"] == 11


def test_ls_older_than_counts_a_use_of_a_chunk_for_its_prefix(disk: Tier) -> None:
    names = ONE.names(FIRST)
    age(disk, {name.key: 10 * 86400.0 for name in names})
    found = report("ls", disk.uri, "--older-than", "7d")
    assert {c["key"] for c in found["chunks"]} == {names[2].key.hex(), names[3].key.hex()}, "the rest is SECOND's, too"
    assert (found["chunk_count"], found["chunk_bytes"]) == (2, 2 * SIZE)
    assert report("ls", disk.uri, "--older-than", "11d")["chunks"] == []


def test_ls_shows_pins_and_what_they_keep(tier: Tier) -> None:
    names = ONE.names(FIRST)
    until_s = round(time.time()) + 86400
    with tier.open() as storage:
        storage.pin([names[1]], until_s)
        storage.pin([names[3]], FOR_GOOD)
    chunks = {c["key"]: c for c in report("ls", tier.uri, *tier.sets())["chunks"]}
    assert [chunks[name.key.hex()]["is_pinned"] for name in names] == [True] * 4
    assert [chunks[name.key.hex()]["pinned_until_s"] for name in names] == [None, until_s, None, None]
    assert not any(chunks[name.key.hex()]["is_pinned"] for name in ONE.names(SECOND)[2:])


def test_ls_of_an_empty_tier(tmp_path: Path) -> None:
    empty = directory_tier(tmp_path / "empty")
    found = report("ls", empty.uri)
    assert (found["namespaces"], found["chunks"], found["chunk_count"]) == ([], [], 0)
    assert run("ls", empty.uri).exit_code == 0 and report("du", empty.uri)["chunks"] == 0
    assert run("tree", empty.uri).stdout == "There are no chunks.\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--namespace", "zz"], "expected 4 to 32 hex digits"),
        (["--namespace", "0000ffff"], "no namespace here begins with 0000ffff"),
        (["--older-than", "soon"], "option --older-than: expected a time such as 12h or 7d"),
        (["--sort", "colour"], "--sort"),
        (["--limit", "-1"], "--limit"),
    ],
)
def test_ls_says_what_is_wrong(disk: Tier, arguments: list[str], expected: str) -> None:
    assert expected in complaint("ls", disk.uri, *arguments)


def test_a_directory_that_is_not_there_is_a_setting(tmp_path: Path) -> None:
    for verb in (["ls"], ["du"], ["tree"]):
        assert "there is no such directory" in complaint(*verb, f"file://{tmp_path}/none")


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    many = directory_tier(tmp_path / "many")
    with many.open() as storage:
        ONE.store(storage, tokens(5, 400))
    command = [sys.executable, "-m", "tiered_kv.cli", "ls", many.uri, "--limit", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"{\n"
        process.stdout.close()
        assert process.stderr.read() == b""


def test_blobs_may_lie_behind_a_symbolic_link(disk: Tier, tmp_path: Path) -> None:
    root = Path(disk.uri.removeprefix("file://"))
    (root / "blobs").rename(tmp_path / "elsewhere")
    (root / "blobs").symlink_to(tmp_path / "elsewhere")
    assert report("ls", disk.uri)["chunk_count"] == 11
    shutil.rmtree(root / "index")
    assert report("ls", disk.uri)["chunk_count"] == 11
    first = ONE.namespace.digest.hex()
    (root / "blobs" / "again").symlink_to(tmp_path / "elsewhere" / first)
    assert report("du", disk.uri)["chunks"] == 11, "but no other link is followed"


def test_keys_are_short_on_a_terminal_and_styles_obey_no_color(disk: Tier) -> None:
    """Through a pseudo-terminal, as people see it."""
    arguments = [sys.executable, "-m", "tiered_kv.cli"]
    key = ONE.names(FIRST)[0].key.hex()
    for no_color in ("", "1"):
        text = on_a_terminal([*arguments, "ls", disk.uri, "--sort", "key"], {"NO_COLOR": no_color})
        assert re.search(rf"\b{key[:12]}\b", text) and key not in text
        text = on_a_terminal([*arguments, "tree", disk.uri], {"NO_COLOR": no_color})
        assert re.search(rf"── .*{key[:12]}  2 chunks, 64 tokens, 16 KiB", text)
        assert ("\x1b[3" in text) == (not no_color)


def test_a_path_is_no_markup_to_a_terminal(tmp_path: Path) -> None:
    """A name in brackets was a style, and one with a slash ended the command in a traceback."""
    (tmp_path / "[").mkdir()
    made = directory_tier(tmp_path / "[" / "b]")
    with made.open() as storage:
        Model().store(storage, tokens(1, 1))
    (tmp_path / "[" / "b]" / "tmp").mkdir(exist_ok=True)
    left = tmp_path / "[" / "b]" / "tmp" / "123-1"
    left.write_text("x")
    os.utime(left, (1, 1))
    text = on_a_terminal([sys.executable, "-m", "tiered_kv.cli", "gc", made.uri, "--dry-run"], {})
    assert "Garbage in" in text and "/[/b]" in text and "Traceback" not in text


def on_a_terminal(command: list[str], environment: dict[str, str]) -> str:
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    given = {name: value for name, value in environment.items() if value} | {"TERM": "xterm-256color"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=os.environ | given) as process:
        os.close(theirs)
        parts = []
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # EIO: everybody at the other end has gone
                break
            if not part:
                break
            parts.append(part)
    os.close(ours)
    assert process.returncode == 0
    return b"".join(parts).decode()


# -- du ---------------------------------------------------------------------------------------------------------------


def test_du_sums_up_by_namespace_and_age(still: Tier) -> None:
    found = report("du", still.uri, *still.sets())
    assert (found["chunks"], found["chunk_bytes"]) == (11, 11 * SIZE)
    assert [(n["namespace"], n["chunks"], n["size_bytes"]) for n in found["namespaces"]] == [
        (SPACE, 7, 7 * SIZE),
        (TWO.namespace.digest.hex(), 4, 4 * SIZE),
    ]
    assert [(a["last_use"], a["chunks"], a["size_bytes"]) for a in found["ages"]] == [
        ("hour", 11, 11 * SIZE),
        ("day", 0, 0),
        ("week", 0, 0),
        ("month", 0, 0),
        ("older", 0, 0),
    ]
    assert found["own_bytes"] > 0 and (found["stray_count"], found["stray_bytes"]) == (0, 0)
    assert found["capacity_bytes"] == (1 << 30 if kind(still) == "disk" else None)


def test_what_a_self_test_left_is_a_stray_and_no_namespace(tier: Tier) -> None:
    """The blob of a server that was killed in its test; on a disk also the directory, once the blob is gone."""
    before = report("ls", tier.uri, *tier.sets())
    form, key = self_test_format(), bytes(range(16))
    data = bytearray(form.blob_bytes)
    form.seal(memoryview(data), ChunkRecord(SELF_TEST_NAMESPACE, key, SELF_TEST_NAMESPACE, 0, bytes(32)), 1)
    with tier.open() as storage:
        storage.write(BlobName(SELF_TEST_NAMESPACE, key, SELF_TEST_NAMESPACE, 0), memoryview(data))

    listed, found = report("ls", tier.uri, *tier.sets()), report("du", tier.uri, *tier.sets())
    assert listed["namespaces"] == before["namespaces"] and listed["chunk_count"] == before["chunk_count"]
    assert [n["namespace"] for n in found["namespaces"]] == [n["namespace"] for n in before["namespaces"]]
    assert (found["chunks"], found["chunk_bytes"]) == (11, 11 * SIZE)
    assert (found["stray_count"], found["stray_bytes"]) == (1, form.blob_bytes)
    assert SELF_TEST_NAMESPACE.hex() not in run("ls", tier.uri, *tier.sets()).stdout
    assert "1 (1 temp)" in run("stat", tier.uri, *tier.sets()).stdout

    with tier.open() as storage:
        storage.remove([blob for blob in storage.look().blobs if blob.name.namespace == SELF_TEST_NAMESPACE])
    found = report("du", tier.uri, *tier.sets())
    assert (len(found["namespaces"]), found["stray_count"]) == (2, 0)


def test_a_server_leaves_no_directory_of_its_self_test(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    engine = SmallEngine.start(settings(root))
    try:
        assert [path.name for path in (root / "blobs").iterdir() if path.name == SELF_TEST_NAMESPACE.hex()] == []
        engine.store(1)
        engine.wait_hits(1)
    finally:
        engine.close()
        end_server(root)


def test_du_counts_strays_and_ages(disk: Tier) -> None:
    root = Path(disk.uri.removeprefix("file://"))
    (root / "blobs" / "lost").write_bytes(b"x" * 5000)
    (root / "tmp" / "cut").write_bytes(b"x" * 100)
    age(disk, {name.key: 40 * 86400.0 for name in ONE.names(FIRST)})
    found = report("du", disk.uri, *disk.sets())
    assert found["stray_count"] == 2 and found["stray_bytes"] == 8192 + 4096
    assert {a["last_use"]: a["chunks"] for a in found["ages"]} == {
        "hour": 9,
        "day": 0,
        "week": 0,
        "month": 0,
        "older": 2,
    }
    text = run("du", disk.uri, *disk.sets()).stdout
    assert re.search(r"strays +2 +12 KiB +0\.0 %", text) and re.search(r"capacity +- +1 GiB", text)
    assert re.search(r"older +2 +16 KiB +18\.2 %", text)
    assert "unknown or unlimited" in run("du", disk.uri).stdout


# -- tree -------------------------------------------------------------------------------------------------------------


def test_tree_shows_where_prompts_part(still: Tier) -> None:
    found = report("tree", still.uri, *still.sets(), "--namespace", SPACE)
    (one,) = found["namespaces"]
    first, second = ONE.names(FIRST), ONE.names(SECOND)
    runs = {run["first_key"]: run for run in one["runs"]}
    trunk = runs[first[0].key.hex()]
    assert (trunk["chunks"], trunk["tokens"], trunk["size_bytes"]) == (2, 2 * CHUNK, 2 * SIZE)
    assert (trunk["parent"], trunk["continued"], trunk["last_key"]) == (None, 2, first[1].key.hex())
    ways = [(r["first_key"], r["chunks"], r["parent"], r["first_index"]) for r in one["runs"][1:]]
    assert sorted(ways) == sorted([(first[2].key.hex(), 2, 0, 2), (second[2].key.hex(), 3, 0, 2)])
    assert (one["prefixes"], one["hanging_chunks"], one["left_out_runs"]) == (1, 0, 0)


def test_tree_draws_lines_in_a_pipe(disk: Tier) -> None:
    names = ONE.names(FIRST)
    with disk.open() as storage:
        storage.pin([names[3]], FOR_GOOD)
        storage.remove([b for b in storage.look().blobs if b.name == ONE.names(SECOND)[2]])
    lines = run("tree", disk.uri, "--namespace", SPACE).stdout.splitlines()
    assert lines[0] == f"{SPACE}  hf:0123456789ab bfloat16"
    assert re.fullmatch(rf"├── {names[0].key.hex()}  4 chunks, 128 tokens, 32 KiB, used \d+s ago, 1 pinned", lines[1])
    assert lines[2] == "└── orphans: 2 chunks, 16 KiB; their parents are gone"


def test_tree_branches_in_plain_lines(disk: Tier) -> None:
    lines = run("tree", disk.uri, "--namespace", SPACE).stdout.splitlines()
    assert "2 chunks, 64 tokens, 16 KiB" in lines[1] and lines[1].endswith("continued 2 ways")
    assert [line[:8] for line in lines[1:]] == [f"└── {lines[1][4:8]}", "    ├── ", "    └── "]
    cut = run("tree", disk.uri, "--namespace", SPACE, "--depth", "1").stdout.splitlines()
    assert cut[2] == "    └── 5 chunks more, deeper: --depth shows them"
    short = run("tree", disk.uri, "--namespace", SPACE, "--limit", "2").stdout.splitlines()
    assert re.fullmatch(r"└── 1 line more with [23] chunks: --limit 0 shows them", short[-1])
    assert short[1].startswith("├── ") and short[2].startswith("│   └── ")


def test_a_conversation_longer_than_the_stack_is_deep(tmp_path: Path) -> None:
    count = sys.getrecursionlimit() + 100
    deep = directory_tier(tmp_path / "deep")
    names = ONE.names([7] * (count * CHUNK))
    with deep.open() as storage:
        storage.write_record(ONE.namespace)
    data = sound_bytes(0)
    for name in names:
        plant(Path(deep.uri.removeprefix("file://")), name, data)
    (found,) = report("tree", deep.uri)["namespaces"]
    assert [(run["chunks"], run["continued"]) for run in found["runs"]] == [(count, 0)]
    last = report("inspect", deep.uri, names[-1].key.hex())
    assert last["is_reachable"] and len(last["chain"]) == count - 1


def plant(root: Path, name: BlobName, data: bytearray) -> None:
    """A blob as sealed for this name, without the cost of a tier."""
    record = ChunkRecord(name.namespace, name.key, name.parent, name.chunk_index, bytes(32))
    ONE.form.seal(memoryview(data), record, 1_700_000_000)
    path = root / "blobs" / relative_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


# -- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_tells_header_record_chain_and_tensors(still: Tier) -> None:
    names = ONE.names(FIRST)
    found = report("inspect", still.uri, *still.sets(), names[1].key.hex()[:10])
    assert (found["key"], found["namespace"], found["tier"]) == (names[1].key.hex(), SPACE, kind(still))
    assert (found["is_sound"], found["header"], found["payload"]) == (True, "sound", "sound")
    assert found["prefix_sha256"] == ONE.keys(FIRST).digests[1].hex()
    assert (found["tokens"], found["header_bytes"], found["payload_bytes"], found["blob_bytes"]) == (
        CHUNK,
        4096,
        4096,
        SIZE,
    )
    assert (found["parent"], found["chunk_index"], found["created_s"]) == (names[0].key.hex(), 1, 1_700_000_000)
    assert (found["chain"], found["is_reachable"]) == ([names[0].key.hex()], True)
    assert found["children"] == sorted([names[2].key.hex(), ONE.names(SECOND)[2].key.hex()])
    assert (found["behind_chunks"], found["behind_bytes"]) == (5, 5 * SIZE)
    assert found["record"] == ONE.namespace.fields and found["record_problem"] is None
    assert [(t["name"], t["dtype"], t["shape"], t["size_bytes"]) for t in found["tensors"]] == [
        ("rank0/layer.0", "U8", [2, 2048], 4096),
        ("_pad", "U8", [0], 0),
    ]
    with still.open() as storage:
        assert found["path"] == (
            object_path(names[1]) if kind(still) == "object" else f"blobs/{relative_path(names[1])}"
        )
        assert storage.read(names[1]) == ONE.blobs(FIRST)[1][1], "it was read and nothing else"


def test_inspect_prints_it_for_people_and_never_a_token(still: Tier) -> None:
    names = ONE.names(FIRST)
    done = run("inspect", still.uri, *still.sets(), names[0].key.hex())
    assert done.exit_code == 0
    for expected in (names[0].key.hex(), "none: the first of its prefix", "complete", "rank0/layer.0", "hf:0123456789"):
        assert expected in done.stdout
    numbers = set(map(int, re.findall(r"(?<![\w.])\d{4,6}(?![\w.])", done.stdout)))
    assert not numbers & set(FIRST) - {4096, SIZE}


@pytest.mark.parametrize("where", ["header", "payload", "length", "swap"])
def test_inspect_finds_damage_and_ends_with_4(tier: Tier, where: str) -> None:
    data = sound_bytes(2)
    if where == "header":
        data[HEADER_XXH3.offset] ^= 1
    elif where == "payload":
        data[-1] ^= 1
    elif where == "length":
        data += b"x"
    else:
        data = sound_bytes(3)
    put(tier, 2, bytes(data))
    key = ONE.names(FIRST)[2].key.hex()
    done = run("inspect", tier.uri, *tier.sets(), key, "--json")
    assert done.exit_code == 4
    found = json.loads(done.stdout)
    assert not found["is_sound"] and found["key"] == key
    if where in ("payload", "length"):
        assert found["header"] == "sound"
        assert ("payload_xxh3 mismatch" if where == "payload" else "blob size mismatch") in found["payload"]
    elif where == "header":
        assert "header_xxh3" in found["header"] and found["payload"] == "unknown"
        assert found["tensors"] == [] and found["tokens"] is None
    else:
        assert f"another key than its name says. name={key}" in found["header"]
    assert run("inspect", tier.uri, *tier.sets(), ONE.names(FIRST)[1].key.hex()).exit_code == 0, (
        "its neighbour is sound"
    )


def test_inspect_and_export_ask_safetensors_whether_it_opens_the_blob(tier: Tier, tmp_path: Path, monkeypatch) -> None:
    """Of bytes that are ours by every check of ours: a reader that is not ours has the last word."""
    key = ONE.names(FIRST)[2].key.hex()
    asked: list[int] = []

    def refuses(data: bytes) -> None:
        asked.append(len(data))
        raise safetensors.SafetensorError("invalid header")

    monkeypatch.setattr(safetensors, "deserialize", refuses)
    found = json.loads(run("inspect", tier.uri, *tier.sets(), key, "--json").stdout)
    assert (found["is_sound"], found["header"]) == (False, "safetensors does not open it: invalid header")
    file = tmp_path / "chunk.safetensors"
    assert run("export", tier.uri, *tier.sets(), key, file).exit_code == 4 and not file.exists()
    assert asked == [SIZE, SIZE]


def test_inspect_finds_a_file_that_no_index_knows_and_no_header_explains(disk: Tier) -> None:
    put(disk, 2, b"not a blob")
    key = ONE.names(FIRST)[2].key.hex()
    found = json.loads(run("inspect", disk.uri, key, "--json").stdout)
    assert (found["key"], found["is_sound"], found["blob_bytes"]) == (key, False, 10)


def test_a_position_that_no_chunk_can_have_ends_no_verb(disk: Tier) -> None:
    names = ONE.names(FIRST)
    with disk.open() as storage:
        data = bytearray(storage.read(names[2]))
    data[CHUNK_INDEX.offset] ^= 8  # one bit: the first of ten digits is 8
    put(disk, 2, bytes(data))
    shutil.rmtree(Path(disk.uri.removeprefix("file://")) / "index")
    for verb in ("ls", "du", "tree", "stat"):
        assert run(verb, disk.uri).exit_code == 0, verb
    found = json.loads(run("verify", disk.uri, "--json").stdout)
    assert [(one["reason"], one["key"]) for one in found["bad"]] == [("header", names[2].key.hex())]


def test_inspect_shows_a_time_that_no_calendar_has(tmp_path: Path) -> None:
    """A header has twelve digits for it, and a file system what a wrong clock gave it."""
    chain, then_s = SampleChain(), 10**12 - 1
    data = bytearray(chain.blob(0).data)
    chain.form.seal(memoryview(data), chain.blob(0).record, then_s)
    tier = open_disk(tmp_path / "kv")
    tier.put(chain.name(0), memoryview(data))
    tier.close()
    found = run("inspect", f"file://{tmp_path}/kv", chain.key(0).hex())
    assert found.exit_code == 0, found.output
    assert f"{then_s} s since 1970" in found.stdout


def test_inspect_says_when_a_chunk_hangs_in_the_air(disk: Tier) -> None:
    names = ONE.names(FIRST)
    with disk.open() as storage:
        storage.remove([blob for blob in storage.look().blobs if blob.name == names[1]])
    found = report("inspect", disk.uri, names[3].key.hex())
    assert (found["is_reachable"], found["chain"]) == (False, [names[2].key.hex()])
    assert "2 of 3 missing: it is an orphan" in run("inspect", disk.uri, names[3].key.hex()).stdout


def test_a_key_that_is_not_there(disk: Tier, tmp_path: Path) -> None:
    for verb in (["inspect", disk.uri, "0" * 32], ["export", disk.uri, "0" * 32, str(tmp_path / "file")]):
        assert "no chunk here has a key that begins with 0000" in complaint(*verb)
    assert "expected 4 to 32 hex digits" in complaint("inspect", disk.uri, "abc")
    assert not (tmp_path / "file").exists()


# -- export -----------------------------------------------------------------------------------------------------------


def test_export_writes_a_file_that_safetensors_opens(still: Tier, tmp_path: Path) -> None:
    name, data = ONE.blobs(FIRST)[1]
    file = tmp_path / "chunk.safetensors"
    found = report("export", still.uri, *still.sets(), name.key.hex()[:12], file)
    assert (found["key"], found["file"], found["size_bytes"], found["is_sound"]) == (
        name.key.hex(),
        str(file),
        SIZE,
        True,
    )
    assert file.read_bytes() == data and file.stat().st_mode & 0o777 == 0o600
    with safe_open(file, framework="numpy") as opened:
        assert opened.metadata()["key"] == name.key.hex()
        tensor = opened.get_tensor("rank0/layer.0")
    assert tensor.shape == (2, 2048) and tensor.dtype == numpy.uint8
    assert tensor.tobytes() == data[4096:]
    assert os.listdir(tmp_path).count("chunk.safetensors") == 1
    assert not [path for path in os.listdir(tmp_path) if path.endswith(".part")]


def test_export_never_overwrites_unless_told(disk: Tier, tmp_path: Path) -> None:
    name, data = ONE.blobs(FIRST)[0]
    file = tmp_path / "mine"
    file.write_text("precious")
    assert "the file is there already; --force overwrites it" in complaint("export", disk.uri, name.key.hex(), file)
    assert file.read_text() == "precious"
    assert report("export", disk.uri, name.key.hex(), file, "--force")["file"] == str(file)
    assert file.read_bytes() == data
    nowhere = tmp_path / "none" / "file"
    assert "there is no such directory" in complaint("export", disk.uri, name.key.hex(), nowhere)
    assert sorted(os.listdir(tmp_path)) == ["kv", "mine"]


def test_export_takes_the_place_of_regular_files_alone(disk: Tier, tmp_path: Path) -> None:
    key = ONE.names(FIRST)[0].key.hex()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "directory").mkdir()
    for name in ("fifo", "link", "directory"):
        for force in ([], ["--force"]):
            said = complaint("export", disk.uri, key, tmp_path / name, *force)
            assert "no regular file and stays" in said and "overwrites" not in said
    for name in ("", ".", "..", "/"):
        assert "no name of a file" in complaint("export", disk.uri, key, name)
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode) and (tmp_path / "link").read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["directory", "fifo", "file", "kv", "link"]
    assert report("export", disk.uri, key, tmp_path / ("n" * 255))["size_bytes"] == SIZE


def test_export_refuses_a_damaged_blob_unless_told(disk: Tier, tmp_path: Path) -> None:
    data = sound_bytes(2)
    data[5000] ^= 4
    put(disk, 2, bytes(data))
    key, file = ONE.names(FIRST)[2].key.hex(), tmp_path / "file"
    said = complaint("export", disk.uri, key, file, code=4)
    assert "the blob is damaged: payload_xxh3 mismatch" in said and "--unverified" in said
    assert not file.exists()
    found = report("export", disk.uri, key, file, "--unverified")
    assert not found["is_sound"] and "payload_xxh3 mismatch" in found["reason"]
    assert file.read_bytes() == data


# -- beside a running server ------------------------------------------------------------------------------------------


def store_slowly(engine: SmallEngine, prompts: int, chunks: int) -> None:
    for number in range(1, prompts + 1):
        engine.store(chunks, first_token=10_000 * number)
        time.sleep(0.05)


def test_verbs_look_while_an_engine_stores_and_loads(root: Path, tmp_path: Path) -> None:
    engine = SmallEngine.start(settings(root))
    engine.store(8)
    engine.wait_hits(8)
    uri, counts = f"file://{root}", [0]
    with ThreadPoolExecutor(1) as pool:
        stored = pool.submit(store_slowly, engine, prompts=20, chunks=8)
        while not stored.done():
            found = report("ls", uri, "--limit", "0")
            assert found["notes"] == [] and found["chunk_count"] == len(found["chunks"])
            assert report("du", uri)["chunks"] >= found["chunk_count"] >= counts[-1], "nothing is evicted here"
            assert report("tree", uri)["notes"] == []
            counts.append(found["chunk_count"])
        stored.result()
    wait_written(root)
    assert report("ls", uri)["chunk_count"] == 8 * 21 > counts[1]
    assert 0 < report("du", uri)["capacity_bytes"] < 160 << 20, "the server's limit, less its reserve"
    (space,) = report("tree", uri, "--limit", "0")["namespaces"]
    assert [run["chunks"] for run in space["runs"]] == [8] * 21 and space["hanging_chunks"] == 0

    key, file = engine.keys(8).keys[5].hex(), tmp_path / "exported"
    found = report("inspect", uri, key)
    assert (found["is_sound"], found["tokens"], found["chunk_index"]) == (True, SERVED_CHUNK, 5)
    report("export", uri, key, file)
    assert file.read_bytes()[found["header_bytes"] :].startswith(content(5))
    assert engine.hits(8) == 8 and engine.hits(8, first_token=10_000) == 8, "looking cost the engine nothing"
    engine.close()


def test_verbs_look_at_a_bucket_while_a_node_stores_and_loads(s3: S3, root: Path) -> None:
    prefix = s3.new_prefix()
    tier, looks = Tier(s3.uri(prefix), {"storage_options": s3.options()}), 0
    with object_nodes.node(object_nodes.s3_place(s3, prefix).settings(root, storage_bytes="1GiB")) as cache:
        with ThreadPoolExecutor(1) as pool:
            stored = pool.submit(lambda: [object_nodes.store(cache, seed, 8) for seed in range(6)])
            while not stored.done() or not looks:
                for verb in ("ls", "du", "tree"):
                    assert report(verb, tier.uri, *tier.sets())["notes"] == []
                looks += 1
            assert stored.result() == [8] * 6
        object_nodes.wait_uploaded(root)
        assert report("ls", tier.uri, *tier.sets())["chunk_count"] == len(object_nodes.blob_paths(s3, prefix)) == 48
        assert report("du", tier.uri, *tier.sets())["capacity_bytes"] == 1 << 30, "the servers' agreement"
        (space,) = report("tree", tier.uri, *tier.sets())["namespaces"]
        assert [run["chunks"] for run in space["runs"]] == [8] * 6 and space["hanging_chunks"] == 0
        assert report("inspect", tier.uri, *tier.sets(), space["runs"][0]["last_key"])["is_sound"]
        assert [object_nodes.load(cache, seed, 8) for seed in range(6)] == [8] * 6
