"""Shares on a real server: stated by engines when they join, kept on real disk and memory, seen in ``stat``."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.engine_world import BLOB_BYTES, EngineWorld
from tests.kit.fake_clock import FakeClock
from tests.kit.server.clients import SmallEngine, hello, poll_until, refusal, settings, tell, worker_part
from tests.kit.server.probe import figures, wait_for, wait_written
from tiered_kv.errors import ConfigError
from tiered_kv.server import protocol as m
from tiered_kv.server.client import SchedulerClient
from tiered_kv.server.quotas import HOLD_S, ServerQuotas
from tiered_kv.server.worker_client import WorkerClient
from tiered_kv.testing.memory import MemoryTier
from tiered_kv.tiering.quotas import Quota

EngineStarter = Callable[..., SmallEngine]
Held = tuple[ServerQuotas, Callable[[bytes], float], FakeClock]

SMALL = {"host_bytes": "4MiB", "disk_bytes": "68MiB"}
"""After the reserve for metadata about 100 blobs of 36 KiB fit on disk."""


def fill(engine: SmallEngine, root: Path, prompts: int, first: int = 0) -> None:
    for prompt in range(first, first + prompts):
        engine.store(8, first_token=prompt * 1_000_000)
        wait_written(root)


def namespace_row(root: Path, engine: SmallEngine) -> dict[str, Any]:
    assert engine.client.namespace is not None
    digest = engine.client.namespace.digest.hex()
    (row,) = [row for row in figures(root)["namespaces"] if row["namespace"] == digest]
    return row


def hit_prompts(engine: SmallEngine, prompts: int) -> int:
    return sum(engine.hits(8, first_token=prompt * 1_000_000) == 8 for prompt in range(prompts))


def test_a_model_keeps_its_minimum_while_another_fills_the_disk(engine: EngineStarter, root: Path) -> None:
    quiet = engine("quiet", weights="q", min_share=0.4, **SMALL)
    noisy = engine("noisy", weights="n", **SMALL)
    fill(quiet, root, 4)
    row = namespace_row(root, quiet)
    assert (row["min_share"], row["max_share"]) == (0.4, 1.0) and row["disk_bytes"] == 32 * 36 * 1024
    fill(noisy, root, 30)
    state = figures(root)
    assert state["counters"]["lower_evicted"] > 100, "the other was not pressed hard enough to prove anything"
    assert namespace_row(root, quiet)["disk_bytes"] == row["disk_bytes"]
    assert hit_prompts(quiet, 4) == 4, "and every byte of it can still be had"
    assert state["tiers"][0]["used_bytes"] <= state["tiers"][0]["capacity_bytes"]


def test_without_a_minimum_the_same_traffic_leaves_nothing(engine: EngineStarter, root: Path) -> None:
    quiet = engine("quiet", weights="q", **SMALL)
    noisy = engine("noisy", weights="n", **SMALL)
    fill(quiet, root, 4)
    fill(noisy, root, 30)
    assert hit_prompts(quiet, 4) == 0


def test_a_model_does_not_pass_its_maximum(engine: EngineStarter, root: Path) -> None:
    greedy = engine("greedy", weights="g", max_share=0.25, **SMALL)
    fill(greedy, root, 20)
    row, state = namespace_row(root, greedy), figures(root)
    assert 0 < row["disk_bytes"] <= 0.25 * state["tiers"][0]["capacity_bytes"]
    assert 0 < row["host_bytes"] <= 0.25 * (4 << 20)
    assert greedy.hits(8, first_token=19_000_000) == 8, "what it stored last"
    assert greedy.hits(8, first_token=0) == 0


def test_minima_that_are_more_than_there_is_are_refused_by_name(engine: EngineStarter, root: Path) -> None:
    first = engine("first", weights="a", min_share=0.7)
    worker = WorkerClient(settings(root), "second", 0, worker_part(weights="b"))
    client = SchedulerClient(settings(root, min_share=0.4), "second", 1)
    try:
        assert not client.wait_ready(20)
        assert first.client.namespace is not None and client.refusal is not None
        assert (
            "min_share=0.4" in client.refusal and f"{first.client.namespace.digest.hex()} keeps 0.7" in client.refusal
        )
    finally:
        client.close()
        worker.leave()
    first.store(3)
    assert first.hits(3) == 3, "who was there first is not touched"


def test_a_maximum_that_holds_next_to_nothing_is_refused(root: Path) -> None:
    config = settings(root, max_share=0.01)
    worker = WorkerClient(config, "tiny", 0, worker_part())
    client = SchedulerClient(config, "tiny", 1)
    try:
        assert not client.wait_ready(20)
        assert client.refusal is not None and "81.9 KiB of host memory, less than 4 chunks of 36 KiB" in client.refusal
    finally:
        client.close()
        worker.leave()


def test_a_minimum_outlives_its_engine_for_a_while_and_not_a_reset(engine: EngineStarter, root: Path) -> None:
    quiet = engine("quiet", weights="q", min_share=0.4, **SMALL)
    noisy = engine("noisy", weights="n", **SMALL)
    fill(quiet, root, 4)
    quiet.close()
    wait_for(lambda: len(figures(root)["sessions"]) == 1, "the session's end")
    fill(noisy, root, 30)
    again = engine("quiet-again", weights="q", min_share=0.4, **SMALL)
    assert hit_prompts(again, 4) == 4
    before = again.client.namespace
    again.client.reset()
    poll_until(again.client, lambda: again.client.is_ready and again.client.namespace != before, "the new epoch")
    assert before is not None
    assert namespace_row(root, again)["min_share"] == 0.4
    wait_for(
        lambda: all(r["min_share"] == 0 for r in figures(root)["namespaces"] if r["namespace"] == before.digest.hex()),
        "the end of the old epoch's share",
    )
    fill(noisy, root, 30, first=100)
    assert before.digest.hex() not in {row["namespace"] for row in figures(root)["namespaces"] if row["disk_bytes"]}


def test_a_copy_into_the_running_server_leaves_its_engines_share(engine: EngineStarter, root: Path) -> None:
    first = engine("first", min_share=0.3, max_share=0.9)
    copy = engine("copy")
    copy.store(2)
    copy.close()
    row = namespace_row(root, first)
    assert (row["min_share"], row["max_share"]) == (0.3, 0.9)


def test_engines_of_one_model_that_differ_go_by_the_newest(engine: EngineStarter, root: Path) -> None:
    first = engine("first", min_share=0.2)
    second = engine("second", min_share=0.3)
    assert namespace_row(root, first)["min_share"] == 0.3
    assert "engines of one model state other shares" in (root / "server.log").read_text()
    second.close()
    first.store(2)
    assert first.hits(2) == 2


@pytest.mark.parametrize(
    "share", [(-0.1, 1.0), (None, 0.0), (0.6, 0.5), (0.0, 1.5), (float("nan"), 1.0), (0.0, float("inf")), (1.1, None)]
)
def test_shares_out_of_range_are_refused(
    shared: Path, engine_id: str, share: tuple[float | None, float | None]
) -> None:
    with hello(settings(shared), "scheduler", engine_id) as sock:
        tell(sock, m.JoinScheduler(1, min_share=share[0], max_share=share[1]))
        assert "shares out of range" in refusal(sock)


@pytest.fixture
def held() -> Iterator[Held]:
    """Who keeps what, without a server: time passes as the test says."""
    clock = FakeClock()
    world = EngineWorld(MemoryTier(), clock=clock)
    given = world.engine.tiering.quotas
    yield ServerQuotas(world.engine), lambda name: (given.get(name) or Quota()).at_least, clock
    world.close()


def test_a_share_is_held_for_an_hour_after_the_last_session(held: Held) -> None:
    shares, kept, clock = held
    for session in (1, 2):
        shares.opened(session, b"a", Quota(0.5), BLOB_BYTES)
    shares.closed(1)
    clock.advance(10 * HOLD_S)
    shares.turn()
    assert kept(b"a") == 0.5, "there is another session"
    shares.closed(2)
    clock.advance(HOLD_S - 1)
    shares.turn()
    assert kept(b"a") == 0.5
    clock.advance(1)
    shares.turn()
    assert kept(b"a") == 0
    shares.turn()


def test_who_comes_back_in_time_keeps_its_share_for_good(held: Held) -> None:
    shares, kept, clock = held
    shares.opened(1, b"a", Quota(0.5), BLOB_BYTES)
    shares.closed(1)
    clock.advance(HOLD_S / 2)
    shares.opened(2, b"a", Quota(0.5), BLOB_BYTES)
    clock.advance(2 * HOLD_S)
    shares.turn()
    assert kept(b"a") == 0.5


def test_those_that_are_gone_make_way_for_those_that_are_here(held: Held) -> None:
    shares, kept, clock = held
    for session, name in enumerate((b"a", b"b", b"c")):
        shares.opened(session, name, Quota(0.3), BLOB_BYTES)
    shares.closed(1)
    clock.advance(1)
    shares.closed(0)
    shares.check(b"d", Quota(0.7), BLOB_BYTES)
    shares.opened(4, b"d", Quota(0.3), BLOB_BYTES)
    assert [kept(name) for name in (b"a", b"b", b"c", b"d")] == [0.3, 0, 0.3, 0.3], "the longest gone went first"
    with pytest.raises(ConfigError, match=r"min_share=0.5 .* \(63 keeps 0.3, 64 keeps 0.3\)"):
        shares.check(b"e", Quota(0.5), BLOB_BYTES)


def test_who_would_be_left_with_nothing_is_refused_and_so_is_who_would_leave_nothing(held: Held) -> None:
    shares, _, _ = held
    shares.opened(1, b"a", Quota(0.9), BLOB_BYTES)
    for newcomer in (None, Quota(0.1)):
        with pytest.raises(
            ConfigError, match=r"61 keeps 0.9\): that leaves 62 19.2 KiB of host memory, less than 4 chunks"
        ):
            shares.check(b"b", newcomer, BLOB_BYTES)
    shares.opened(1, b"a", Quota(0.3), BLOB_BYTES)
    shares.check(b"b", Quota(), BLOB_BYTES)
    shares.opened(2, b"b", Quota(), BLOB_BYTES)
    with pytest.raises(ConfigError, match="that leaves 62 19.2 KiB"):
        shares.check(b"a", Quota(0.9), BLOB_BYTES)


def test_a_reset_that_would_keep_too_much_keeps_nothing(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    shares, kept, _ = held
    for session in (1, 2):
        shares.opened(session, b"a", Quota(0.6), BLOB_BYTES)
    shares.closed(1, is_reset=True)
    shares.opened(3, b"private", Quota(0.6), BLOB_BYTES)
    assert "share not kept after a reset" in caplog.text and (kept(b"a"), kept(b"private")) == (0.6, 0)
    shares.closed(2, is_reset=True)
    assert kept(b"a") == 0
    shares.closed(2)
    assert kept(b"a") == 0, "closed once, whoever says it again"


def test_an_engine_alone_keeps_its_share_through_resets(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    shares, kept, _ = held
    shares.opened(1, b"a", Quota(0.9), BLOB_BYTES)
    for session, name in ((2, b"b"), (3, b"c")):
        shares.closed(session - 1, is_reset=True)
        shares.opened(session, name, Quota(0.9), BLOB_BYTES)
    assert [kept(name) for name in (b"a", b"b", b"c")] == [0, 0, 0.9] and not caplog.records


def test_who_says_nothing_changes_nothing(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    """A copy joins as an engine of the model would."""
    shares, kept, clock = held
    shares.opened(1, b"a", Quota(0.5), BLOB_BYTES)
    shares.opened(2, b"a", None, BLOB_BYTES)
    assert kept(b"a") == 0.5
    shares.closed(1)
    clock.advance(HOLD_S - 1)
    shares.closed(2)
    shares.opened(3, b"a", None, BLOB_BYTES)
    assert kept(b"a") == 0.5, "held for the one that went"
    clock.advance(1)
    shares.turn()
    assert kept(b"a") == 0 and not caplog.records
    shares.opened(4, b"a", Quota(0.2), BLOB_BYTES)
    assert kept(b"a") == 0.2 and not caplog.records


def test_what_counted_goes_on_to_count_when_its_engine_goes(held: Held) -> None:
    """An older statement was not checked beside what others were given since."""
    shares, kept, _ = held
    shares.opened(1, b"a", Quota(0.6), BLOB_BYTES)
    shares.opened(2, b"a", Quota(0.1), BLOB_BYTES)
    shares.opened(3, b"b", Quota(0.5), BLOB_BYTES)
    shares.closed(2)
    assert (kept(b"a"), kept(b"b")) == (0.1, 0.5)
    shares.check(b"b", Quota(0.5), BLOB_BYTES)
    shares.check(b"c", None, BLOB_BYTES)
    shares.closed(1)
    assert kept(b"a") == 0.1, "held as it counted"


def test_a_copy_does_not_make_of_what_is_held_what_must_stay(held: Held) -> None:
    shares, kept, _ = held
    shares.opened(1, b"a", Quota(0.6), BLOB_BYTES)
    shares.closed(1)
    shares.opened(2, b"a", None, BLOB_BYTES)
    assert kept(b"a") == 0.6
    shares.check(b"b", Quota(0.6), BLOB_BYTES)
    shares.opened(3, b"b", Quota(0.6), BLOB_BYTES)
    assert (kept(b"a"), kept(b"b")) == (0, 0.6)
