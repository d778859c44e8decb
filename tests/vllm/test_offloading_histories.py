"""Random histories of our tier below vLLM's tiering manager: every row looked at after every step (no engine)."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit.counts import count, seed
from tests.kit.vllm.offloading_history import KINDS, HistoryPlan, OffloadingHistory
from tiered_kv.server import client, worker_client
from tiered_kv.server import protocol as m
from tiered_kv.vllm import offloading, row_jobs, row_memory
from tiered_kv.vllm.row_memory import RowUses

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

HISTORIES = count("OFFLOADING_HISTORIES", 1)
"""Of each kind."""

TURNS = count("OFFLOADING_TURNS", 300)
SEEN_IN_100 = (
    "loaded", "stored", "loads_failed", "hits", "given", "aborts", "preemptions", "no_room", "restarts", "other_limits",
    "freezes", "kills", "damaged", "resets", "emptied",
)  # fmt: skip


@pytest.fixture(scope="module")
def counts() -> Iterator[Counter[str]]:
    found: Counter[str] = Counter()
    yield found
    print(dict(found))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for seconds waits for a tenth of them: less than a server stands still here."""
    for module, name, seconds in (
        (row_memory, "FENCE_S", 0.3),
        (row_jobs, "WRITE_WAIT_S", 0.1),
        (row_jobs, "WRITE_LAST_S", 0.5),
        (row_jobs, "SLOT_WAIT_S", 0.1),
        (row_jobs, "REJOIN_S", 0.05),
        (row_jobs, "REJOIN_LAST_S", 0.2),
        (offloading, "SEARCH_S", 0.1),
        (offloading, "ROOM_S", 0.1),
        (client, "BACKOFF_LAST_S", 0.2),
    ):
        monkeypatch.setattr(module, name, seconds)


@pytest.mark.parametrize("number", range(seed(), seed() + HISTORIES))
@pytest.mark.parametrize("kind", KINDS)
def test_a_history_has_no_wrong_row_and_leaves_nothing_held(
    kind: str, number: int, root: Path, impatient: None, monkeypatch: pytest.MonkeyPatch, counts: Counter[str]
) -> None:
    if kind == "slots":  # a server that cannot be seen is lent no rows
        monkeypatch.setattr(worker_client, "server_pidfd", lambda _sock: None)
    history = OffloadingHistory(HistoryPlan.draw(number, kind, TURNS), root)
    try:
        history.run()
    finally:
        history.close()
        counts.update(history.counts, histories=1)


def test_the_histories_did_what_they_are_for(counts: Counter[str]) -> None:
    if counts["histories"] < 100:
        pytest.skip("says something of a whole set of histories only")
    assert [name for name in SEEN_IN_100 if not counts[name]] == []


def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one job are stored under each other's names."""
    store = RowUses.store

    def store_swapped(uses: RowUses, job: int, rows: Any) -> bool:
        places = [row for _, row, _ in rows]
        named = [(number, row, record) for (number, _, record), row in zip(rows, reversed(places), strict=True)]
        return store(uses, job, named)

    monkeypatch.setattr(RowUses, "store", store_swapped)


def told_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load is told to have failed while the server still reads into its rows."""
    load = RowUses.load

    def load_told_early(uses: RowUses, job: int, rows: Any, session: bytes) -> bool:
        is_begun = load(uses, job, rows, session)
        uses._client.rows_ended.append(m.RowsEnded((), tuple(uses._of_jobs[job]), ()))
        return is_begun

    monkeypatch.setattr(RowUses, "load", load_told_early)


@pytest.mark.parametrize(("does", "notices"), [(swapped, "loaded wrong bytes"), (told_early, "rows that nobody loads")])
def test_it_notices(
    does: Callable[[pytest.MonkeyPatch], None],
    notices: str,
    root: Path,
    impatient: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    does(monkeypatch)
    plan = replace(HistoryPlan.draw(0, "rows", 2000), trouble=0.0, lookup_timeout_ms=5000, promotion_wait_ms=5000)
    history = OffloadingHistory(plan, root)
    try:
        with pytest.raises(AssertionError, match=notices):
            history.run()
    finally:
        history.close()
