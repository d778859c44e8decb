"""`tiered-kv evict`: what goes and what stays, in a directory, in a bucket, and under a running server."""

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.clients import SmallEngine, settings
from tests.kit.server.probe import figures, socket_of, wait_written
from tests.kit.storage.stored_prompts import CHUNK, Model, tokens
from tests.kit.verbs import Tier, complaint, directory_tier, refuse_deletions, report, run, tier_of
from tiered_kv.keys.naming import relative_path
from tiered_kv.ops.server_link import ServerLink
from tiered_kv.ops.storage import FOR_GOOD, RemovalTotals

ONE, TWO = Model(), Model(weights="two")
SIZE = 8192
FIRST, SECOND = tokens(1, 4), tokens(1, 2) + tokens(2, 1)  # begin alike


@pytest.fixture(params=["disk", "s3"])
def tier(request, tmp_path: Path) -> Tier:
    """Two prompts of one model that begin alike, one of another."""
    made = tier_of(request, tmp_path)
    with made.open() as storage:
        ONE.store(storage, FIRST, SECOND)
        TWO.store(storage, FIRST)
    return made


def there(tier: Tier, model: Model, prompt: list[int]) -> list[bool]:
    """Which chunks of a prompt are there, with the bytes that were stored."""
    with tier.open() as storage:
        found = [(storage.read(name), data) for name, data in model.blobs(prompt)]
    assert all(held in (None, data) for held, data in found)
    return [held is not None for held, _ in found]


def evict(tier: Tier, *arguments: object):
    return report("evict", tier.uri, *tier.sets(), *arguments)


def test_a_key_goes_with_everything_behind_it(tier: Tier) -> None:
    key = ONE.names(FIRST)[1].key.hex()
    done = evict(tier, "--key", key[:12], "--yes")
    assert (done["selected"], done["pinned"], done["is_dry_run"]) == (4, 0, False)
    assert done["tiers"][0] | {"tier": "", "removed_bytes": 0} == {
        "tier": "",
        "removed": 4,
        "removed_bytes": 0,
        "kept": 0,
        "missing": 0,
        "failed": 0,
    }
    assert done["namespaces"] == [{"namespace": ONE.namespace.digest.hex(), "chunks": 4, "size_bytes": 4 * SIZE}]
    assert there(tier, ONE, FIRST) == [True, False, False, False] and there(tier, ONE, SECOND)[1:] == [False, False]
    assert all(there(tier, TWO, FIRST))


def test_a_dry_run_and_an_unanswered_question_change_nothing(tier: Tier) -> None:
    assert evict(tier, "--all", "--dry-run")["selected"] == 9
    said = complaint("evict", tier.uri, *tier.sets(), "--all", code=5)
    assert "9 chunks go from" in said and "Say --yes" in said
    assert all(there(tier, ONE, FIRST) + there(tier, ONE, SECOND) + there(tier, TWO, FIRST))


def test_a_namespace_goes_alone_or_limits_the_rest(tier: Tier) -> None:
    space = TWO.namespace.digest.hex()
    assert evict(tier, "--namespace", space[:8], "--bytes", SIZE + 1, "--yes")["tiers"][0]["removed"] == 2
    assert there(tier, TWO, FIRST) == [True, True, False, False]
    assert evict(tier, "--namespace", space, "--yes")["tiers"][0]["removed"] == 2
    assert there(tier, TWO, FIRST) == [False] * 4 and all(there(tier, ONE, FIRST))


def test_pinned_prefixes_stay_whatever_is_asked(tier: Tier) -> None:
    with tier.open() as storage:
        storage.pin([ONE.names(FIRST)[2]], FOR_GOOD)
    done = evict(tier, "--all", "--yes")
    assert (done["pinned"], done["pinned_bytes"], done["tiers"][0]["removed"]) == (3, 3 * SIZE, 6)
    assert there(tier, ONE, FIRST) == [True, True, True, False]
    text = run("evict", tier.uri, *tier.sets(), "--all", "--yes").stdout
    assert "nothing to remove" in text and "3 chunks, 24 KiB, stay because of pins" in text


def test_what_was_long_unused_goes(tmp_path: Path) -> None:
    tier = directory_tier(tmp_path / "kv")
    with tier.open() as storage:
        ONE.store(storage, FIRST, SECOND)
    shutil.rmtree(tmp_path / "kv" / "index")  # which knows when they were stored
    old_s = time.time() - 30 * 86400
    for name in ONE.names(FIRST):
        os.utime(tmp_path / "kv" / "blobs" / relative_path(name), (old_s, old_s))
    assert evict(tier, "--older-than", "60d", "--dry-run")["selected"] == 0
    assert evict(tier, "--older-than", "7d", "--yes")["tiers"][0]["removed"] == 2
    assert there(tier, ONE, FIRST) == [True, True, False, False] and all(there(tier, ONE, SECOND))


def test_where_nothing_tells_when_chunks_were_used_that_is_said(tier: Tier, tmp_path: Path) -> None:
    """A directory without its index, and a bucket whose servers keep no limit: the most used prompt went by its age."""
    said = "nothing here tells when chunks were used: they count as used when they were written"
    if tier.uri.startswith("file:"):
        assert evict(tier, "--older-than", "7d", "--dry-run")["notes"] == []
        shutil.rmtree(tmp_path / "kv" / "index")
    for asked in ("--older-than=7d", "--bytes=1KiB", "--to=1KiB"):
        assert evict(tier, asked, "--dry-run")["notes"] == [said]
    assert evict(tier, "--all", "--dry-run")["notes"] == []


def test_an_index_that_cannot_be_looked_at_is_told(tmp_path: Path) -> None:
    """It counted as none."""
    made = directory_tier(tmp_path / "kv")
    with made.open() as storage:
        ONE.store(storage, FIRST)
    shutil.rmtree(tmp_path / "kv" / "index")
    (tmp_path / "kv" / "index").symlink_to("index")  # to itself
    (said,) = report("ls", made.uri)["notes"]
    assert said.startswith("times of use are those of writing, because the index cannot be read")
    assert evict(made, "--older-than", "7d", "--dry-run")["notes"] == [said], "once"


def test_a_share_of_the_capacity_is_what_is_left(tmp_path: Path) -> None:
    tier = directory_tier(tmp_path / "kv")
    with tier.open() as storage:
        ONE.store(storage, tokens(3, 20))
    path = ["evict", tier.uri]
    assert report(*path, "--set", f"disk_bytes={100 * SIZE}", "--to", "15%", "--dry-run")["selected"] == 5
    assert report(*path, "--set", f"disk_bytes={100 * SIZE}", "--to", "50%", "--dry-run")["selected"] == 0
    assert report(*path, "--to", 10 * SIZE, "--yes")["tiers"][0]["removed"] == 10
    assert there(tier, ONE, tokens(3, 20)) == [True] * 10 + [False] * 10
    assert "the capacity is not known" in complaint(*path, "--to", "80%")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "say what shall go"),
        (["--bytes", "1GiB", "--all"], "contradict each other"),
        (["--bytes", "1GiB", "--to", "1GiB"], "contradict each other"),
        (["--bytes", "much"], "option --bytes: expected a size such as 4GiB"),
        (["--to", "120%"], "option --to: expected at most 100%"),
        (["--older-than", "soon"], "option --older-than: expected a time such as 12h"),
        (["--key", "abcd" * 4], "no chunk here has a key"),
        (["--namespace", "abcdabcd"], "no namespace here begins"),
        (["--tier", "disk", "--all"], "option --tier goes with --server"),
        (["--server", "unix:///x", "--all"], "name either the storage URI or --server"),
    ],
)
def test_orders_that_mean_nothing_are_refused(tmp_path: Path, arguments: list[str], expected: str) -> None:
    tier = directory_tier(tmp_path / "kv")
    with tier.open() as storage:
        ONE.store(storage, tokens(1, 1))
    assert expected in complaint("evict", tier.uri, *arguments, "--yes")
    assert there(tier, ONE, tokens(1, 1)) == [True]


def test_what_is_pinned_while_somebody_is_asked_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = directory_tier(tmp_path / "kv")
    with tier.open() as storage:
        ONE.store(storage, FIRST)

    def pin_meanwhile(*_: object, **__: object) -> None:
        with tier.open() as storage:
            storage.pin([ONE.names(FIRST)[1]], FOR_GOOD)

    monkeypatch.setattr(import_module("tiered_kv.cli.evict"), "confirm", pin_meanwhile)
    done = evict(tier, "--all")
    assert (done["selected"], done["pinned"], done["tiers"][0]["removed"]) == (2, 2, 2)
    assert there(tier, ONE, FIRST) == [True, True, False, False]


def test_nothing_goes_while_pins_cannot_be_read(tmp_path: Path) -> None:
    tier = directory_tier(tmp_path / "kv")
    with tier.open() as storage:
        ONE.store(storage, FIRST)
    (tmp_path / "kv" / "pins.json").write_text("nobody's")
    assert "mend or remove the file" in complaint("evict", tier.uri, "--all", "--yes", code=1)
    assert all(there(tier, ONE, FIRST))


@pytest.mark.parametrize("order", [("--all",), ("--tag", "a")])
def test_both_blobs_of_one_key_go_from_a_bucket(tmp_path: Path, order: tuple[str, ...]) -> None:
    tier = Tier(f"shared+file://{tmp_path}")
    with tier.open() as storage:
        ONE.store(storage, FIRST, tag="a")
        path = tmp_path / storage.path(ONE.names(FIRST)[1])
    shutil.copy(path, path.with_name(path.name.replace(".0000001.", ".0000007.")))
    assert evict(tier, *order, "--yes")["tiers"][0]["removed"] == 5
    assert list(tmp_path.glob("*/*/*.safetensors")) == []


# -- while a server runs ---------------------------------------------------------------------------------------------


@pytest.fixture
def engine(root: Path):
    one = SmallEngine.start(settings(root))
    one.store(6)
    one.store(4, first_token=100_000)
    one.wait_hits(6)
    wait_written(root)
    yield one
    one.close()


def test_under_a_running_server_evicted_chunks_are_misses_and_nothing_else_changes(
    engine: SmallEngine, root: Path
) -> None:
    tier = Tier(f"file://{root}")
    key = engine.keys(6).keys[3].hex()
    assert evict(tier, "--key", key, "--yes")["tiers"][0]["removed"] == 3
    # A lookup now would find them in host memory, and the server would write them to the disk again.
    done = report("evict", "--server", socket_of(root), "--tier", "host", "--all", "--yes")
    assert (done["tiers"][0]["tier"], done["tiers"][0]["kept"]) == ("host", 0)
    assert engine.hits(6) == 3 and engine.hits(4, first_token=100_000) == 4
    engine.store(6, start=3)
    engine.wait_hits(6)


def test_an_engine_that_stores_and_loads_meanwhile_meets_misses_only(engine: SmallEngine, root: Path) -> None:
    orders = [("--bytes", 8 * 40960), ("--all",), ("--key", engine.keys(6).keys[0].hex()), ("--older-than", "1s")]
    with ThreadPoolExecutor(1) as pool:
        for number, order in enumerate(orders):
            doing = pool.submit(run, "evict", f"file://{root}", *order, "--yes", "--json")
            for first_token in range(number * 100_000, number * 100_000 + 500, 100):
                engine.store(4, first_token=first_token)
                engine.hits(4, first_token=first_token)  # compares the bytes of what it gets
                engine.hits(6)
            done = doing.result()
            assert done.exit_code == 0 or "no chunk here has a key" in done.stderr
    assert engine.client.generation == 0, "the session lives"
    engine.store(6)
    engine.wait_hits(6)


def test_a_share_is_of_the_running_servers_capacity(engine: SmallEngine, root: Path) -> None:
    capacity = next(tier["capacity_bytes"] for tier in figures(root)["tiers"] if tier["name"] == "disk")
    used = sum(blob.size_bytes for blob in Tier(f"file://{root}").open().look().blobs)
    percent = 100 * (used - 1) / capacity
    assert evict(Tier(f"file://{root}"), "--to", f"{percent:.9f}%", "--dry-run")["selected"] == 1


def test_both_tiers_of_a_running_server_lose_a_namespace(engine: SmallEngine, root: Path) -> None:
    space = engine.client.namespace.digest.hex()
    other = SmallEngine.start(settings(root), "other", weights="other")
    other.store(2)
    other.wait_hits(2)
    wait_written(root)
    address = socket_of(root)
    dry = report("evict", "--server", address, "--namespace", space[:6], "--dry-run")
    assert (dry["selected"], dry["tiers"]) == (10, [])
    done = report("evict", "--server", address, "--namespace", space[:6], "--yes")
    assert [(tier["tier"], tier["removed"]) for tier in done["tiers"]] == [("disk", 10), ("host", 10)]
    assert engine.hits(6) == 0 and other.hits(2) == 2
    other.close()


def test_leased_chunks_stay_and_are_counted(engine: SmallEngine, root: Path) -> None:
    lookup, answer = engine.look_up(6)
    text = run("evict", "--server", socket_of(root), "--tier", "host", "--all", "--yes").stdout
    assert "removed 4 chunks from the server's memory" in text and "6 chunks stay because they are in use" in text
    with engine.payload(answer.slots[5]) as view:
        assert bytes(view[:1]) == bytes([5 * 7 + 1])
    engine.client.release(lookup)


def test_what_a_server_cannot_delete_is_said_to_stay_and_ends_with_4(
    engine: SmallEngine, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_deletions(root, monkeypatch)
    done = run("evict", f"file://{root}", "--all", "--yes", "--json")
    assert done.exit_code == 4, done.output
    (disk,) = json.loads(done.stdout)["tiers"]
    assert disk == {"tier": "disk", "removed": 0, "removed_bytes": 0, "kept": 0, "missing": 0, "failed": 10}
    text = run("evict", f"file://{root}", "--all", "--yes")
    assert text.exit_code == 4 and "10 chunks stay: the server could not delete them" in text.stdout


def test_chunks_that_cannot_be_looked_at_are_not_told_to_be_gone(
    engine: SmallEngine, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs, elsewhere, evict = root / "blobs", root.with_name("elsewhere"), ServerLink.evict

    def lose_and_evict(link: ServerLink, *given: Any, **more: Any) -> Any:
        blobs.rename(elsewhere)
        blobs.symlink_to(blobs)  # ELOOP, as a mount that hangs gives EIO or ESTALE
        return evict(link, *given, **more)

    monkeypatch.setattr(ServerLink, "evict", lose_and_evict)
    said = complaint("evict", f"file://{root}", "--all", "--yes", code=1)
    assert "whether a chunk is gone cannot be seen" in said and "Too many levels of symbolic links" in said
    assert len(list(elsewhere.glob("*/*/*"))) == 10
    blobs.unlink()
    elsewhere.rename(blobs)


def test_bytes_of_chunks_that_are_gone_already_are_not_counted(engine: SmallEngine, root: Path) -> None:
    with Tier(f"file://{root}").open() as storage:
        blobs = storage.look().blobs
        for blob in blobs[:4]:
            (root / storage.path(blob.name)).unlink()
        size_bytes = sum(blob.size_bytes for blob in blobs[4:])
        assert storage.remove(blobs) == RemovalTotals(6, size_bytes, missing=4)


def test_pins_keep_what_a_running_server_stores(engine: SmallEngine, root: Path) -> None:
    tier = Tier(f"file://{root}")
    report("pin", tier.uri, engine.keys(6).keys[1].hex())
    done = report("evict", "--server", socket_of(root), "--all", "--yes")
    assert done["pinned"] == 2 and [t["removed"] for t in done["tiers"]] == [8, 10]
    assert engine.hits(6) == 2 and engine.hits(4, first_token=100_000) == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--bytes", "1GiB"], "--server goes with --namespace, --key, --tag, --stored-by or --all"),
        (["--tier", "object", "--all"], "option --tier: expected host or disk"),
        ([], "say what shall go"),
    ],
)
def test_a_server_is_told_only_what_it_can_do(engine, root: Path, arguments: list[str], expected: str) -> None:
    assert expected in complaint("evict", "--server", socket_of(root), *arguments, "--yes")
    assert engine.hits(6) == 6


def test_chunk_is_what_the_sizes_here_assume() -> None:
    assert len(ONE.blobs(tokens(1, 1))[0][1]) == SIZE and CHUNK == 32
