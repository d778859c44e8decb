"""`tiered-kv pin` and `unpin`: what a pin says, and that it keeps a prefix from a running server's own evictions."""

import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.kit.server.clients import SmallEngine, settings
from tests.kit.server.probe import figures, wait_for, wait_written
from tests.kit.server.processes import end_server
from tests.kit.storage.stored_prompts import Model, tokens
from tests.kit.verbs import Tier, complaint, directory_tier, report, run, tier_of
from tiered_kv.tiering.multi_queue import LEVELS

PROMPT = tokens(1, 4)
NAMES = Model().names(PROMPT)


@pytest.fixture(params=["disk", "s3"])
def tier(request, tmp_path: Path) -> Tier:
    made = tier_of(request, tmp_path)
    with made.open() as storage:
        Model().store(storage, PROMPT)
    return made


def pin(tier: Tier, *arguments: object, verb: str = "pin"):
    return report(verb, tier.uri, *tier.sets(), *arguments)


def pinned(tier: Tier) -> dict[str, float | None]:
    return {entry["key"]: entry["until_s"] for entry in pin(tier, "--list")["pins"]}


def test_a_pin_is_made_listed_changed_and_ended(tier: Tier) -> None:
    key, other = NAMES[2].key.hex(), NAMES[0].key.hex()
    (made,) = pin(tier, key[:10])["pins"]
    assert (made["key"], made["until_s"], made["prefix_chunks"], made["prefix_bytes"]) == (key, None, 3, 3 * 8192)
    before_s = time.time()
    pin(tier, other, "--ttl", "2d")
    found = pinned(tier)
    assert found[key] is None and before_s + 2 * 86400 - 1 <= found[other] <= time.time() + 2 * 86400
    pin(tier, key, "--ttl", "1h")
    assert pinned(tier)[key] < time.time() + 3601 and len(pinned(tier)) == 2
    text = run("pin", tier.uri, *tier.sets(), "--list").stdout
    assert key in text and "for 60min" in text and "24 KiB" in text
    ended = [pin(tier, key[:6], verb="unpin") for _ in range(2)]
    assert [(end["key"], end["was_pinned"]) for end in ended] == [(key, True), (key, False)]
    assert set(pinned(tier)) == {other}
    with tier.open() as storage:
        assert all(storage.contains(NAMES)), "nothing is removed"


def test_a_pin_that_has_ended_keeps_nothing(tier: Tier) -> None:
    with tier.open() as storage:
        storage.pin([NAMES[3]], time.time() - 10)
    assert pinned(tier) == {}
    assert report("evict", tier.uri, *tier.sets(), "--all", "--yes")["pinned"] == 0
    with tier.open() as storage:
        assert not any(storage.contains(NAMES))


def test_a_pin_of_a_chunk_that_is_gone_can_be_ended(tier: Tier) -> None:
    key = NAMES[3].key.hex()
    pin(tier, key)
    with tier.open() as storage:
        storage.remove([blob for blob in storage.look().blobs if blob.name == NAMES[3]])
    (listed,) = pin(tier, "--list")["pins"]
    assert (listed["is_there"], listed["prefix_chunks"]) == (False, 0)
    assert "not there" in run("pin", tier.uri, *tier.sets(), "--list").stdout
    pin(tier, key, verb="unpin")
    assert pinned(tier) == {} and "no pins" in run("pin", tier.uri, *tier.sets(), "--list").stdout


@pytest.mark.parametrize(
    ("verb", "arguments", "expected"),
    [
        ("pin", [], "name either the KEY to pin or --list"),
        ("pin", ["abcd" * 4, "--list"], "name either the KEY to pin or --list"),
        ("pin", ["--list", "--ttl", "1h"], "option --ttl goes with a KEY"),
        ("pin", ["abcd" * 4], "no chunk here has a key that begins"),
        ("pin", ["xyz"], "expected 4 to 32 hex digits"),
        ("pin", [NAMES[0].key.hex(), "--ttl", "soon"], "option --ttl: expected a time such as 12h"),
        ("unpin", ["abcd" * 4], "no chunk here has a key that begins"),
    ],
)
def test_what_cannot_be_pinned_is_said(tmp_path: Path, verb: str, arguments: list[str], expected: str) -> None:
    tier = directory_tier(tmp_path / "kv")
    with tier.open() as storage:
        Model().store(storage, PROMPT)
    assert expected in complaint(verb, tier.uri, *arguments)
    assert pinned(tier) == {}


def test_a_pinned_prefix_outlives_what_a_full_server_stores_until_it_is_unpinned(root: Path) -> None:
    """The disk holds about 60 chunks and host memory fewer; many more are stored behind each other."""
    with closing(SmallEngine.start(settings(root, host_bytes="2MiB", disk_bytes=(64 << 20) + 60 * 40960))) as engine:
        uri, key = f"file://{root}", engine.keys(5).keys[2].hex()
        engine.store(5)
        engine.wait_hits(5)
        wait_written(root)
        report("pin", uri, key)
        wait_for_flushes(root)
        outlast(engine, root, 1)
        assert engine.hits(5) == 3, "the pinned chunk and those before it; what was behind it has gone"
        report("unpin", uri, key)
        wait_for_flushes(root)
        outlast(engine, root, 2)
        assert engine.hits(5) == 0, "the prefix stays although it is not pinned any more"


def test_a_disk_that_pins_hold_above_its_limit_is_told(root: Path) -> None:
    """A limit that was lowered: nothing more was stored, and neither log, `stat` nor `doctor` said why."""
    with closing(SmallEngine.start(settings(root))) as engine:
        engine.store(60)
        engine.wait_hits(60)
        wait_written(root)
        report("pin", f"file://{root}", engine.keys(60).keys[59].hex())
    end_server(root)
    limits = {"host_bytes": "2MiB", "disk_bytes": (64 << 20) + 40 * 40960}
    sets = [word for name, value in limits.items() for word in ("--set", f"{name}={value}")]
    said = "hardly anything else can be stored"
    assert said in run("doctor", f"file://{root}", *sets).stdout
    with closing(SmallEngine.start(settings(root, **limits))) as engine:
        (disk,) = figures(root)["tiers"]
        assert disk["kept_by_pins_bytes"] == disk["used_bytes"] > disk["capacity_bytes"]
        assert "pinned, more than its capacity" in run("stat", f"file://{root}").stdout
        assert said in run("doctor", f"file://{root}", *sets).stdout
        log = (root / "server.log").read_text()
        assert log.count("pins keep most of a tier, or more than its limit") == 1
        report("unpin", f"file://{root}", engine.keys(60).keys[59].hex())
        wait_for_flushes(root)
        assert figures(root)["tiers"][0]["kept_by_pins_bytes"] == 0
        assert said not in run("doctor", f"file://{root}", *sets).stdout


def test_while_pins_cannot_be_read_from_the_start_nothing_is_evicted(root: Path) -> None:
    """They counted as none: a restart with a slip in the file, or with that of a later version, cost every pin."""
    config = settings(root, host_bytes="2MiB", disk_bytes=(64 << 20) + 60 * 40960)
    with closing(SmallEngine.start(config)) as engine:
        engine.store(5)
        engine.wait_hits(5)
        wait_written(root)
        report("pin", f"file://{root}", engine.keys(5).keys[4].hex())
    end_server(root)
    pins = (root / "pins.json").read_text()
    (root / "pins.json").write_text(pins[:-2])
    with closing(SmallEngine.start(config)) as engine:
        outlast(engine, root, 1)
        assert engine.hits(5) == 5
        assert "nothing is evicted until" in (root / "server.log").read_text()
        warned = run("doctor", f"file://{root}").stdout
        assert "pins" in warned and "mend or remove the file" in warned
        (root / "pins.json").write_text(pins)
        wait_for_flushes(root)
        outlast(engine, root, 2)
        assert engine.hits(5) == 5
        report("unpin", f"file://{root}", engine.keys(5).keys[4].hex())
        wait_for_flushes(root)
        outlast(engine, root, 3)
        assert engine.hits(5) == 0, "evictions go on"


def outlast(engine: SmallEngine, root: Path, part: int) -> None:
    """Store 120 chunks of other prompts as often as what was asked for may lie unused (an age for each level)."""
    for number in range(2 * LEVELS):
        for prompt in range(6):
            engine.store(20, first_token=part * 100_000_000 + number * 1_000_000 + 10_000 * prompt)
            wait_written(root)


def wait_for_flushes(root: Path) -> None:
    """Until the server has read the pins as they are now."""
    before = flush_count(root)
    wait_for(lambda: flush_count(root) >= before + 2, "the pins to be read")  # the first may have begun before


def flush_count(root: Path) -> int:
    """How often the server has looked after its disk tier, the pins included."""
    return sum(row["calls"] for row in figures(root)["operations"] if row["operation"] == "flush")
