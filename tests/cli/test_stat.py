"""`tiered-kv stat`: what a server says, and what a tier shows without one."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kit.server.clients import CHUNK, SmallEngine, payload_bytes, settings
from tests.kit.server.object_nodes import CHUNK as NODE_CHUNK
from tests.kit.server.object_nodes import Place, load, node, s3_place, store, wait_loaded, wait_uploaded
from tests.kit.server.probe import (
    figures,
    is_serving,
    server_pid,
    socket_of,
    wait_ended,
    wait_for,
    wait_written,
)
from tests.kit.server.processes import frozen
from tests.kit.storage.stored_prompts import CHUNK as STOCK_CHUNK
from tests.kit.storage.stored_prompts import Model, tokens
from tests.kit.verbs import run
from tiered_kv.cli.stat import StatReport
from tiered_kv.errors import TierUnavailable
from tiered_kv.metrics.figures import ServerFigures, sum_operations
from tiered_kv.ops.open import open_storage
from tiered_kv.ops.server_link import ServerLink
from tiered_kv.server.worker_client import decline


def report(*arguments: object) -> StatReport:
    """What ``stat --json`` says; fails on anything that its type does not name."""
    done = run("stat", *arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return msgspec.convert(json.loads(done.stdout), StatReport)


def served(*arguments: object) -> ServerFigures:
    found = report(*arguments).server
    assert found is not None
    return found


def test_a_server_that_stands_still_is_not_said_to_be_gone(engine: SmallEngine, root: Path) -> None:
    del engine
    pid, address = server_pid(root), socket_of(root)
    with ServerLink.of_socket(address, timeout_s=0.5) as link:
        with frozen(pid):
            for ask in (link.stat, lambda: ServerLink.of_socket(address, timeout_s=0.5)):
                with pytest.raises(TierUnavailable, match=r"does not answer: it hangs, was stopped, .*waited_s=0\.5"):
                    ask()


def hits(found: ServerFigures) -> dict[str, int]:
    return {hit.tier: hit.chunks for hit in found.tokens.hits}


def check_sums(found: ServerFigures, chunk_tokens: int) -> None:
    """Whatever was asked for was got from one tier or missed, in chunks and in tokens."""
    told = found.tokens
    assert told.asked_chunks == told.hit_chunks + told.missed_chunks
    assert told.asked_tokens == told.hit_tokens + told.missed_tokens
    assert told.hit_chunks == sum(hit.chunks for hit in told.hits)
    assert told.asked_tokens == told.asked_chunks * chunk_tokens
    assert told.prompt_tokens == told.prompt_chunks * chunk_tokens >= told.asked_tokens
    assert all(hit.tokens == hit.chunks * chunk_tokens for hit in told.hits)


# -- a server ---------------------------------------------------------------------------------------------------------


def test_it_shows_what_a_server_holds(engine: SmallEngine, root: Path) -> None:
    engine.store(5)
    engine.wait_hits(5)
    wait_written(root)
    both = report(f"file://{root}")
    found = both.server
    assert found is not None and both.storage is None and both.notes == []
    assert (found.directory, found.storage) == (str(root), f"file://{root}")
    assert found.hierarchy["host_capacity_bytes"] == 8 << 20
    assert found.hierarchy["host_ready_chunks"] == 5
    assert [(tier.name, tier.blobs, tier.breaker) for tier in found.tiers] == [("disk", 5, "closed")]
    assert [(one.engine, one.state) for one in found.sessions] == [("e/0", "ready")]
    assert 0 < found.uptime_s < time.time() - found.started_unix_s + 1
    text = run("stat", f"file://{root}").stdout
    assert text.startswith("tokens    ")
    for word in ("host", "8 MiB", "disk", "in use", "Operations", "Counters", "pending_writes", "e/0", str(found.pid)):
        assert word in text


def test_it_says_which_engines_take_part(engine: SmallEngine, root: Path) -> None:
    socket = socket_of(root)
    text = run("stat", "--server", socket).stdout
    assert "e/0" in text and "no engine takes part" not in text
    with ServerLink.of_socket(socket):  # or the server would end with its last client
        engine.close()
        wait_for(lambda: served("--server", socket).sessions == [], "the engine's end")
        assert "sessions  none: no engine takes part" in run("stat", "--server", socket).stdout

        decline(settings(root), "refused", "its layers are of a kind that is not cached")

        assert "without the cache: 1 worker cannot take part" in run("stat", "--server", socket).stdout


def test_what_was_not_worth_a_write_is_told_by_stat_and_top(root: Path) -> None:
    engine = SmallEngine.start(settings(root, disk_admission="second-touch"))
    engine.store(5)
    engine.wait_hits(5)
    wait_written(root)
    engine.store(2, first_token=100_000)
    wait_for(lambda: figures(root)["tiers"][0]["declined_chunks"] == 7, "what came once")
    assert figures(root)["tiers"][0]["admitted_chunks"] == 5
    assert "5 chunks admitted, 7 declined" in run("stat", f"file://{root}").stdout
    process = subprocess.Popen(
        [sys.executable, "-m", "tiered_kv.cli", "top", f"file://{root}", "--interval", "1", "--count", "2"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()  # it has polled
    engine.store(3, first_token=200_000)
    text, _ = process.communicate(timeout=20)
    assert re.search(r"^disk +0 chunks/s admitted, [0-9.]+/s not$", text, flags=re.MULTILINE)
    engine.close()


def test_tokens_add_up_and_a_load_from_disk_is_the_disks(root: Path) -> None:
    one = SmallEngine.start(settings(root))
    one.store(30)
    one.close()
    wait_ended(root)
    two = SmallEngine.start(settings(root))
    before = served(f"file://{root}")
    assert (before.tokens.asked_chunks, hits(before)) == (0, {"host": 0, "disk": 0})
    assert two.hits(40) == 30
    loaded = served(f"file://{root}")
    assert (hits(loaded), loaded.tokens.missed_chunks) == ({"host": 0, "disk": 30}, 10)
    blob_bytes = payload_bytes() + 4096
    gets = sum_operations(loaded.operations, "disk", "get", "ok")
    assert (gets.calls, gets.bytes) == (30, 30 * blob_bytes)
    assert two.hits(40) == 30
    again = served(f"file://{root}")
    assert (hits(again), again.tokens.lookups) == ({"host": 30, "disk": 30}, 2)
    assert sum_operations(again.operations, "disk", "get", "ok") == gets
    check_sums(again, CHUNK)
    text = run("stat", f"file://{root}").stdout
    assert text.startswith("tokens    5.1k asked, 3.8k hit (75 %): 38 % host, 38 % disk\n")
    (curve,) = again.curves  # of this life of the server: the second of two equal prompts is found
    assert (curve.namespace, curve.chunks, curve.found("disk", 1)) == (again.sessions[0].namespace, 80, 0.5)
    assert curve.gain("disk", 4) == 0
    assert re.search(r"^[0-9a-f]{32} +disk +50 % +\+0.0 points +\+0.0 points +\+0.0 points$", text, flags=re.MULTILINE)
    live = run("top", f"file://{root}", "--once", "--interval", 0.1).stdout
    assert re.search(r"^room +[0-9a-f]{12}: host 50 %, twice \+0.0 points; disk 50 %", live, flags=re.MULTILINE)
    two.close()


def test_bytes_written_are_those_of_the_blobs(engine: SmallEngine, root: Path) -> None:
    engine.store(7)
    engine.wait_hits(7)
    wait_written(root)
    puts = sum_operations(served(f"file://{root}").operations, "disk", "put", "ok")
    assert (puts.calls, puts.bytes) == (7, 7 * (payload_bytes() + 4096))
    assert puts.bytes == sum(path.stat().st_size for path in (root / "blobs").rglob("*.safetensors"))


def test_a_damaged_blob_is_counted(root: Path) -> None:
    one = SmallEngine.start(settings(root))
    one.store(3)
    one.close()
    wait_ended(root)
    victim = sorted((root / "blobs").rglob("*.safetensors"))[0]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    two = SmallEngine.start(settings(root))
    assert two.hits(3) < 3
    found = served(f"file://{root}")
    assert found.tiers[0].corrupt == 1
    assert "1 damaged chunks read" in run("stat", f"file://{root}").stdout
    check_sums(found, CHUNK)
    two.close()


def test_a_server_is_found_by_its_socket(engine: SmallEngine, root: Path) -> None:
    info = json.loads((root / "server.json").read_text())
    both = report("--server", f"unix://{info['socket']}")
    assert both.server is not None and both.server.pid == info["pid"] and both.storage is None


@pytest.fixture(params=["shared", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "s3":
        s3 = request.getfixturevalue("s3")
        return s3_place(s3, s3.new_prefix())
    return Place(f"shared+file://{tmp_path}/bucket")


def options(place: Place, root: Path | None = None) -> list[str]:
    given: dict[str, Any] = {"disk_path": str(root)} if root is not None else {}
    if place.options:
        given["storage_options"] = json.dumps(place.options)
    return [place.uri, *(word for name, value in given.items() for word in ("--set", f"{name}={value}"))]


def test_a_buckets_server_and_the_bucket_itself(place: Place, root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with node(place.settings(other, storage_bytes="1GiB")) as first:
        assert store(first, 1, 6) == 6
        wait_uploaded(other)
    with node(place.settings(root, storage_bytes="1GiB")) as second:
        wait_loaded(second, 1, 6)
        told = figures(root)["tokens"]
        assert load(second, 1, 6) == 6
        both = report(*options(place, root))
        found, storage = both.server, both.storage
        assert found is not None and storage is not None
        assert hits(found)["object"] == 6, "each chunk came from the bucket once"
        assert found.tokens.hit_chunks == told["hit_chunks"] + 6
        check_sums(found, NODE_CHUNK)
        disk, store_tier = found.tiers
        assert store_tier.bucket is not None and disk.bucket is None
        assert (store_tier.bucket.role, store_tier.capacity_bytes) == ("leader", 1 << 30)
        assert sum_operations(found.operations, "object", "get", "ok").calls == 6
        assert storage.bucket is not None and storage.bucket.leader == store_tier.bucket.leader
        assert (storage.bucket.term, storage.bucket.is_closed) == (store_tier.bucket.term, False)
        assert storage.capacity_bytes == 1 << 30
        check_bucket(both, chunks=6)
        text = run("stat", *options(place, root)).stdout
        assert f"bucket: leader, term {storage.bucket.term}" in text
        assert f"leader    {storage.bucket.leader}, term" in text
    left = report(*options(place, root))
    assert left.server is None and left.storage is not None and left.storage.bucket is not None
    assert left.storage.bucket.is_closed
    check_bucket(left, chunks=6)
    assert "leader    nobody; the last was" in run("stat", *options(place, root)).stdout


def check_bucket(both: StatReport, chunks: int) -> None:
    storage = both.storage
    assert storage is not None
    (space,) = [one for one in storage.namespaces if one.chunks]
    assert (storage.kind, storage.chunks, space.chunks) == ("object", chunks, chunks)
    assert storage.tokens == space.tokens == chunks * NODE_CHUNK
    assert (storage.free_bytes, storage.strays) == (None, 0)


def test_a_server_is_told_of_although_its_bucket_cannot_be_read(s3, root: Path) -> None:
    place = s3_place(s3, s3.new_prefix())
    with node(place.settings(root)):
        wrong = Place(place.uri, {**place.options, "secret": "x" * 40})
        both = report(*options(wrong, root))
        assert both.server is not None and both.storage is None
        assert "the bucket could not be read from here" in both.notes[0]
        assert "x" * 40 not in both.notes[0]


# -- a tier by itself -------------------------------------------------------------------------------------------------


def stocked(uri: str, settings: dict[str, Any]) -> tuple[Model, Model]:
    """Seven chunks of one namespace, two of another."""
    models = Model(), Model(weights="hf:" + "1" * 40)
    with open_storage(uri, settings) as storage:
        names = models[0].store(storage, tokens(1, 4), tokens(2, 3))
        models[1].store(storage, tokens(1, 2))
        storage.pin(names[:1], float("inf"))
    return models


def test_a_directory_without_a_server_is_listed(root: Path) -> None:
    root.mkdir()
    models = stocked(f"file://{root}", {})
    (root / "blobs" / "stray.txt").write_text("x")
    before = files(root)
    both = report(f"file://{root}", "--set", "disk_bytes=1GiB")
    storage = both.storage
    assert both.server is None and storage is not None and both.notes == []
    assert (storage.kind, storage.chunks, storage.tokens) == ("disk", 9, 9 * STOCK_CHUNK)
    assert [(one.namespace, one.chunks) for one in storage.namespaces] == [
        (model.namespace.digest.hex(), count) for model, count in zip(models, (7, 2), strict=True)
    ]
    assert storage.bytes == sum(one.bytes for one in storage.namespaces) >= 9 * 8192
    assert (storage.capacity_bytes, storage.strays, storage.stray_kinds) == (1 << 30, 1, {"name": 1})
    assert (storage.pinned_chunks, storage.bucket) == (1, None)
    assert storage.last_used_unix_s is not None and abs(time.time() - storage.last_used_unix_s) < 600
    assert storage.free_bytes is not None and storage.own_bytes > 0
    text = run("stat", f"file://{root}").stdout
    assert text.startswith(f"storage   file://{root}, no server is running for this directory\n")
    for word in (
        "9 in 2 namespaces",
        "strays    1 (1 name)",
        "`tiered-kv verify` names them\n",
        "pinned    1 chunk\n",
        models[1].namespace.digest.hex(),
    ):
        assert word in text
    assert files(root) == before and not is_serving(root)


def files(root: Path) -> list[Path]:
    """Everything but what SQLite keeps beside its database while it is read."""
    return sorted(path for path in root.rglob("*") if not path.name.startswith("cache.db"))


def test_a_bucket_that_no_server_ever_led_is_listed(place: Place) -> None:
    stocked(place.uri, {"storage_options": place.options} if place.options else {})
    both = report(*options(place))
    storage = both.storage
    assert both.server is None and storage is not None and storage.bucket is not None
    assert (storage.kind, storage.chunks, storage.pinned_chunks) == ("object", 9, 1)
    assert (storage.bucket.term, storage.bucket.leader, storage.bucket.servers) == (None, None, [])
    assert "leader    nobody ever led" in run("stat", *options(place)).stdout


def test_each_server_of_a_bucket_is_told_of(tmp_path: Path) -> None:
    place = Place(f"shared+file://{tmp_path}/bucket")
    roots = [tmp_path / "a", tmp_path / "b"]
    with node(place.settings(roots[0], storage_bytes="1GiB")) as first:
        with node(place.settings(roots[1], storage_bytes="1GiB")):
            assert store(first, 1, 4) == 4
            wait_uploaded(roots[0])
            storage = report(*options(place)).storage
            assert storage is not None and storage.bucket is not None
            leads = {tier["bucket"]["leader"] for root in roots for tier in figures(root)["tiers"] if tier["bucket"]}
            followers = [one for one in storage.bucket.servers if one.term == storage.bucket.term]
            assert storage.bucket.leader in leads and followers
            assert all(abs(time.time() - one.reported_unix_s) < 600 for one in storage.bucket.servers)


def test_an_empty_directory_is_no_error_and_a_missing_one_is(root: Path) -> None:
    done = run("stat", f"file://{root}")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"tiered-kv: there is no such directory. path={root}\n"
    root.mkdir()
    both = report(f"file://{root}")
    assert both.server is None and both.storage is not None
    assert (both.storage.chunks, both.storage.last_used_unix_s, both.storage.namespaces) == (0, None, [])
    assert os.listdir(root) == []


def test_a_server_that_does_not_answer_is_noted(root: Path) -> None:
    root.mkdir()
    info = {"socket": f"{root}/none.sock", "pid": 4_000_000, "version": "1", "protocol": 1}
    (root / "server.json").write_text(json.dumps(info | {"server_id": "x", "config_digest": "y"}))
    done = run("stat", f"file://{root}")
    assert done.exit_code == 0
    assert "a server (pid 4000000) has this directory and does not answer" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ((), 2, "name either the storage URI or --server"),
        (("file:///x", "--server", "unix:///x"), 2, "name either the storage URI or --server"),
        (("--server", "tcp://x"), 2, "option --server: expected unix:///path/of/socket"),
        (("--server", "unix:///nowhere/none.sock"), 1, "no server answers at unix://"),
        (("nonsense",), 2, "no scheme in it"),
    ],
)
@pytest.mark.parametrize("verb", ["stat", "top"])
def test_a_tier_or_a_server_has_to_be_named(verb: str, arguments: tuple[str, ...], code: int, expected: str) -> None:
    done = run(verb, *arguments)
    assert done.exit_code == code
    assert expected in done.stderr
