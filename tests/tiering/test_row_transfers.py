"""Uses of lent rows, as tiering decides on them: each ends once, and what it leaves behind is as with slots."""

import itertools
import random
from collections.abc import Iterable
from itertools import pairwise

import pytest

from tests.kit.counts import count, seed
from tests.kit.tiering.world import SMALL, Path, chunks_of, tier_specs
from tiered_kv.tiering import row_transfers
from tiered_kv.tiering.index import BlobState
from tiered_kv.tiering.lookups import LookupRequest
from tiered_kv.tiering.tiering import Tiering
from tiered_kv.tiering.types import (
    Delete,
    Grow,
    Job,
    Outcome,
    Read,
    ReadRow,
    RowsEnded,
    RowUse,
    Seal,
    SlotGrant,
    Write,
    WriteRow,
)
from tiered_kv.tiering.write_through import WRITES_MAX


class Rows:
    """Tiering with one session that lends rows; jobs end when and as a test says."""

    def __init__(self, capacity: int | None = None, *, is_last_shared: bool = False) -> None:
        capacities = (capacity, None) if is_last_shared else (capacity,)
        self.tiering = Tiering(400, tier_specs(capacities, is_last_shared=is_last_shared))
        self.tiering.restored(1)
        self.session = self.tiering.open_session(SMALL.namespace, SMALL.slot_bytes)
        self.jobs: list[Job] = []
        self.credits: list[int] = []
        self.ends: dict[int, str] = {}
        self.failed: set[WriteRow] = set()
        self.behind: dict[WriteRow, WriteRow] = {}  # what was handed out while its parent's write had not ended
        self._last = 0
        self.step()
        self.end_every(Grow)

    def step(self) -> None:
        for job in self.tiering.take_jobs():
            if isinstance(job, WriteRow):
                running = {one.record.key: one for one in self.jobs if isinstance(one, WriteRow)}
                if (parent := running.get(job.record.parent)) is not None:
                    self.behind[job] = parent
            self.jobs.append(job)
        for update in self.tiering.take_updates():
            if isinstance(update, RowsEnded):
                for end in ("good", "bad", "elsewhere"):
                    for number in getattr(update, end):
                        assert number not in self.ends, "a use ended twice"
                        self.ends[number] = end
            elif isinstance(update, SlotGrant):
                self.credits += update.slots
        self.tiering.check_integrity()

    def use(self, load: int = 0) -> RowUse:
        self._last += 1
        return RowUse(self.session, self._last, self._last, load)

    def store(self, *paths: Path) -> list[RowUse]:
        rows = [(self.use(), SMALL.record(path)) for path in paths]
        self.tiering.store_rows(self.session, rows)
        self.step()
        return [use for use, _ in rows]

    def load(self, *paths: Path, load: int = 0) -> list[RowUse]:
        records = [SMALL.record(path) for path in paths]
        rows = [(self.use(load), record.key, record.prefix_sha256) for record in records]
        self.tiering.load_rows(self.session, rows, b"")
        self.step()
        return [use for use, _, _ in rows]

    def commit(self, path: Path) -> None:
        self.tiering.commit(self.session, self.credits.pop(), SMALL.record(path))
        self.step()

    def waiting(self, *kinds: type[Job]) -> list[Job]:
        return [job for job in self.jobs if isinstance(job, kinds)]

    def end(self, job: Job, outcome: Outcome = Outcome.OK) -> None:
        """Report a job. Of a row that is written behind another, that one's comes first, and decides."""
        if isinstance(job, WriteRow) and (parent := self.behind.pop(job, None)) is not None:
            if parent in self.jobs:
                self.end(parent, Outcome.OK if outcome in (Outcome.ROW_GONE, Outcome.ROW_CHANGED) else outcome)
            if parent in self.failed and outcome is not Outcome.ROW_GONE:
                outcome = Outcome.NO_PARENT
        self.jobs.remove(job)
        match job:
            case WriteRow():
                self.failed |= {job} if outcome is not Outcome.OK else set()
                self.tiering.row_written(job, outcome)
            case ReadRow():
                self.tiering.row_read(job, outcome, None, None)
            case Write():
                self.tiering.written(job, outcome)
            case Read():
                self.tiering.read(job, outcome)
            case Seal():
                self.tiering.sealed(job, outcome)
            case Delete():
                self.tiering.deleted(job.tier, job.record, outcome)
            case Grow():
                self.tiering.grown(job, outcome)
            case _:
                raise AssertionError(f"no such job is expected: {job}")
        self.step()

    def end_every(self, *kinds: type[Job], outcome: Outcome = Outcome.OK) -> None:
        while jobs := self.waiting(*kinds):
            self.end(jobs[0], outcome)

    def told(self, uses: Iterable[RowUse]) -> list[str | None]:
        return [self.ends.get(use.id) for use in uses]

    def is_below(self, path: Path) -> bool:
        entry = self.tiering.index.get(SMALL.key(path))
        return entry is not None and entry.blobs[1] is BlobState.PRESENT


PREFIX = chunks_of((1, 2, 3))


def test_a_row_is_told_once_its_chunk_is_in_the_tier_and_takes_no_host_memory() -> None:
    rows = Rows()
    uses = rows.store(*PREFIX)
    assert rows.tiering.pending_writes == 3 and [job.use for job in rows.waiting(WriteRow)] == uses
    for number in range(3):
        assert rows.told(uses) == ["good"] * number + [None] * (3 - number)
        rows.end(rows.waiting(WriteRow)[0])
    assert rows.told(uses) == ["good"] * 3 and all(map(rows.is_below, PREFIX))
    assert rows.tiering.usage()["host_ready_chunks"] == 0 and not rows.waiting(Seal)
    loads = rows.load(*PREFIX, (9,))
    assert rows.told(loads) == [None, None, None, "bad"]
    rows.end_every(ReadRow)
    assert rows.told(loads)[:3] == ["good"] * 3
    (counts,) = rows.tiering.hit_stats.take().values()
    assert (counts.asked, counts.hits) == (4, {1: 3})


def test_a_load_is_counted_once_in_however_many_parts_and_steps_it_comes() -> None:
    rows = Rows()
    rows.store(*PREFIX, (7,))
    rows.end_every(WriteRow)
    rows.load(*PREFIX[:2], load=1)
    rows.load((7,), load=2)
    rows.end(rows.waiting(ReadRow)[0])
    rows.load(PREFIX[2], (9,), load=1)
    rows.end_every(ReadRow)
    rows.load((8,), load=3)
    assert not rows.tiering.hit_stats.take(), "counted before its end"
    for load in (1, 2, 2, 4):
        rows.tiering.load_ended(rows.session, load)
    (counts,) = rows.tiering.hit_stats.take().values()
    assert (counts.lookups, counts.asked, counts.hits, counts.decisions) == (2, 5, {1: 4}, {"awaited": 2})
    rows.tiering.take_rows_back(rows.load((7,), load=5))
    rows.step()
    rows.tiering.close_session(rows.session)
    (counts,) = rows.tiering.hit_stats.take().values()
    assert (counts.lookups, counts.asked, counts.hits.total(), counts.decisions) == (2, 2, 0, {"miss": 2})


def test_a_chunk_whose_row_is_being_written_is_not_held_by_anybody() -> None:
    rows = Rows()
    rows.store((1,))
    assert rows.told(rows.load((1,))) == ["bad"]
    assert rows.tiering.index.held_prefix(SMALL.namespace, [SMALL.key((1,))], [SMALL.record((1,)).prefix_sha256]) == []


@pytest.mark.parametrize("outcome", [Outcome.NO_ROOM, Outcome.UNAVAILABLE, Outcome.FOREIGN])
def test_a_failed_write_ends_badly_with_all_behind_it(outcome: Outcome) -> None:
    rows = Rows()
    uses = rows.store(*PREFIX)
    rows.end(rows.waiting(WriteRow)[0], outcome)
    assert rows.told(uses) == ["bad", None, None]
    rows.end_every(WriteRow)
    assert rows.told(uses) == ["bad"] * 3 and rows.tiering.pending_writes == 0
    assert rows.tiering.counters["row_dropped_no_parent"] == 2
    assert len(rows.tiering.index) == (outcome is Outcome.FOREIGN)


def test_stores_of_what_is_there_end_well_at_once_and_those_without_parent_badly() -> None:
    rows = Rows()
    first = rows.store((1,))
    assert rows.told(rows.store((2, 3))) == ["bad"]
    rows.end_every(WriteRow)
    assert rows.told([*first, *rows.store((1,))]) == ["good", "good"]
    rows.commit((5,))
    assert rows.told(rows.store((5,))) == ["good"]
    assert rows.told(rows.load((5,))) == ["elsewhere"]


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.NO_ROOM])
def test_a_row_whose_chunk_is_just_written_from_another_row_is_told_as_that_write_ends(outcome: Outcome) -> None:
    rows = Rows()
    first, second, third = rows.store(*PREFIX), rows.store(*PREFIX), rows.store((1,))
    assert rows.told([*first, *second, *third]) == [None] * 7 and len(rows.waiting(WriteRow)) == 3
    rows.tiering.take_rows_back(third)
    rows.step()
    assert rows.told(third) == ["bad"] and rows.told([*first, *second]) == [None] * 6
    rows.end(rows.waiting(WriteRow)[0], outcome)
    if outcome is Outcome.OK:
        assert rows.told([*first, *second]) == 2 * ["good", None, None]
    rows.end_every(WriteRow)
    is_good = outcome is Outcome.OK
    assert rows.told([*first, *second]) == ["good" if is_good else "bad"] * 6
    assert rows.tiering.counters["written"] == 3 * is_good and rows.tiering.counters["store_duplicate"] == 4


def test_a_row_that_waits_for_the_write_of_another_that_is_taken_back_ends_as_that_write_does() -> None:
    rows = Rows()
    first, second = rows.store((1,), (1, 2)), rows.store((1,), (1, 2))
    rows.tiering.take_rows_back(first)
    rows.step()
    assert rows.told(first) == ["bad", "bad"] and rows.told(second) == [None, None]
    rows.end(rows.waiting(WriteRow)[0])  # it was in the file before the row was taken back
    rows.end(rows.waiting(WriteRow)[0], Outcome.ROW_GONE)
    assert rows.told(second) == ["good", "bad"] and rows.is_below((1,))


def test_a_row_that_waits_for_the_write_of_another_and_is_taken_back_leaves_that_write_alone() -> None:
    rows = Rows()
    prefix = chunks_of(tuple(range(WRITES_MAX + 1)))
    first = rows.store(*prefix)
    again = rows.store(prefix[-1])  # just queued, from the row of the first one
    rows.tiering.take_rows_back(again)
    rows.step()
    assert rows.told([*first, *again]) == [*[None] * len(prefix), "bad"]
    rows.end_every(WriteRow)
    assert rows.told(first) == ["good"] * len(prefix) and rows.is_below(prefix[-1])


def test_a_row_that_finds_a_blob_bad_which_is_just_promoted_leaves_it_to_the_promotion() -> None:
    rows = Rows()
    rows.store((1,))
    rows.end_every(WriteRow)
    (load,) = rows.load((1,))
    record = SMALL.record((1,))
    lookup = rows.tiering.lookup(rows.session, LookupRequest([record.key], [record.prefix_sha256], is_claimed=True))
    rows.step()
    assert rows.waiting(Read)
    rows.end(rows.waiting(ReadRow)[0], Outcome.CORRUPT)
    assert rows.told([load]) == ["bad"] and rows.is_below((1,)) and not rows.waiting(Delete)
    rows.end(rows.waiting(Read)[0], Outcome.CORRUPT)
    rows.tiering.release(rows.session, lookup)
    rows.step()
    assert len(rows.waiting(Delete)) == 1 and not rows.is_below((1,))
    rows.end_every(Delete)
    assert len(rows.tiering.index) == 0


def test_a_slot_with_the_chunk_of_a_row_is_no_second_write() -> None:
    rows = Rows()
    uses = rows.store((1,))
    rows.commit((1,))
    rows.end_every(Seal)
    assert not rows.waiting(Write)
    rows.end_every(WriteRow)
    assert rows.told(uses) == ["good"] and rows.tiering.counters["written"] == 1
    assert rows.told(rows.load((1,))) == ["elsewhere"]


def test_a_row_is_written_while_somebody_still_reads_a_slot_that_was_found_damaged() -> None:
    rows = Rows()
    rows.commit((1,))
    rows.end_every(Seal)
    name = SMALL.record((1,))
    lookup = rows.tiering.lookup(rows.session, LookupRequest([name.key], [name.prefix_sha256], is_claimed=True))
    rows.end_every(Write, outcome=Outcome.CORRUPT)
    assert rows.tiering.index.get(name.key).slot is not None, "it is read from"
    uses = rows.store((1,))
    assert rows.told(uses) == [None] and rows.waiting(WriteRow)
    rows.end_every(WriteRow)
    assert rows.told(uses) == ["good"] and rows.is_below((1,))
    admitted = rows.tiering.tier_usage(1).admitted_chunks
    assert rows.told(rows.store((1,))) == ["good"] and not rows.waiting(WriteRow)
    assert rows.tiering.counters["store_duplicate"] == 1 and not rows.tiering.counters["row_dropped_not_now"]
    assert rows.tiering.tier_usage(1).admitted_chunks == admitted
    rows.tiering.release(rows.session, lookup)
    rows.step()
    loads = rows.load((1,))
    rows.end_every(ReadRow)
    assert rows.told(loads) == ["good"]


def test_a_row_that_is_taken_back_is_told_at_once_and_its_job_ends_unheard() -> None:
    rows = Rows()
    uses = rows.store(*PREFIX)
    rows.tiering.take_rows_back(uses)
    rows.step()
    assert rows.told(uses) == ["bad"] * 3 and rows.tiering.pending_writes == 3
    rows.end_every(WriteRow, outcome=Outcome.ROW_GONE)
    assert len(rows.tiering.index) == 0
    assert dropped(rows) == {"row_dropped_taken_back": 3}, "each row once, and no failure of the tier"
    uses = rows.store((1,))
    rows.end_every(WriteRow)
    loads = rows.load((1,))
    rows.tiering.take_rows_back([*uses, *loads])
    rows.step()
    assert rows.told([*uses, *loads]) == ["good", "bad"]
    rows.end_every(ReadRow)
    assert rows.is_below((1,))


@pytest.mark.parametrize("is_closed", [False, True])
def test_the_rows_of_a_session_that_is_over_are_taken_back_in_parts(
    monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    monkeypatch.setattr(row_transfers, "TAKEN_BACK_AT_ONCE", 8, raising=False)
    rows = Rows()
    prefix = chunks_of(tuple(range(WRITES_MAX + 30)))
    rows.store(*prefix)
    writing = rows.waiting(WriteRow)
    rows.tiering.suspend_session(rows.session)
    if is_closed:
        rows.tiering.close_session(rows.session)
    left = [rows.tiering.pending_writes]
    while rows.tiering.wants_turn:
        rows.step()
        left.append(rows.tiering.pending_writes)
    assert left[0] == len(prefix) and left[-1] == len(writing) == WRITES_MAX and not len(rows.tiering._rows)
    assert all(before - after <= 8 for before, after in pairwise(left)), "it was done in one step"
    assert is_closed or (set(rows.ends.values()) == {"bad"} and len(rows.ends) == len(prefix))
    rows.end_every(WriteRow, outcome=Outcome.ROW_GONE)
    assert len(rows.tiering.index) == 0 and dropped(rows) == {"row_dropped_taken_back": len(prefix)}


def test_a_read_that_ends_after_its_session_is_told_as_bad_though_its_row_was_not_taken_back_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_transfers, "TAKEN_BACK_AT_ONCE", 1)
    rows = Rows()
    rows.store(*PREFIX)
    rows.end_every(WriteRow)
    uses = rows.load(*PREFIX)
    rows.tiering.suspend_session(rows.session)  # a reset: other memory is mapped where the rows were
    rows.end_every(ReadRow)
    assert rows.told(uses) == ["bad"] * len(PREFIX) and not rows.tiering.wants_turn


def dropped(rows: Rows) -> dict[str, int]:
    """Counters of writes that were not made."""
    words = ("row_dropped", "write_dropped", "write_failed")
    return {name: count for name, count in rows.tiering.counters.items() if name.startswith(words) and count}


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.UNAVAILABLE])
def test_what_was_written_of_a_row_that_was_taken_back_takes_its_room_until_it_is_deleted(outcome: Outcome) -> None:
    rows = Rows()
    uses = rows.store((1,))
    rows.tiering.take_rows_back(uses)
    rows.end(rows.waiting(WriteRow)[0], Outcome.ROW_CHANGED)
    assert rows.told(uses) == ["bad"] and dropped(rows) == {"row_dropped_taken_back": 1}
    assert rows.tiering.tier_usage(1).used_bytes == SMALL.slot_bytes and not rows.is_below((1,))
    assert rows.told(rows.load((1,))) == ["bad"]
    rows.end(rows.waiting(Delete)[0], outcome)
    is_left = outcome is not Outcome.OK
    assert rows.tiering.tier_usage(1).used_bytes == is_left * SMALL.slot_bytes
    assert len(rows.tiering.index) == is_left and rows.told(rows.load((1,))) == ["bad"]
    again = rows.store((1,))
    rows.end_every(Delete)
    rows.end_every(WriteRow)
    assert rows.told(again) == ["good"] and rows.is_below((1,))
    assert rows.tiering.tier_usage(1).used_bytes == SMALL.slot_bytes


def test_a_chunk_that_is_written_from_a_row_that_was_taken_back_is_not_told_stored() -> None:
    rows = Rows()
    rows.tiering.take_rows_back(rows.store((1,)))
    again = rows.store((1,), (1, 2))
    rows.end_every(WriteRow, outcome=Outcome.ROW_GONE)
    assert not rows.is_below((1,)) and rows.told(again) == ["bad", "bad"]


def test_a_read_whose_row_was_taken_back_is_a_miss_and_no_failure_of_the_tier() -> None:
    rows = Rows()
    rows.store((1,))
    rows.end_every(WriteRow)
    rows.tiering.take_rows_back(rows.load((1,)))
    rows.end_every(ReadRow, outcome=Outcome.ROW_GONE)
    (counts,) = rows.tiering.hit_stats.take().values()
    assert (counts.asked, counts.hits.total()) == (1, 0)
    assert not [name for name in rows.tiering.counters if name.startswith("read_failed")]
    rows.load((1,))
    rows.end_every(ReadRow, outcome=Outcome.UNAVAILABLE)
    assert rows.tiering.counters["read_failed_unavailable"] == 1


@pytest.mark.parametrize("outcome", [Outcome.MISSING, Outcome.CORRUPT])
@pytest.mark.parametrize("is_row", [True, False])
def test_what_a_read_found_before_its_chunk_was_written_again_says_nothing_of_the_new_blob(
    outcome: Outcome, is_row: bool
) -> None:
    rows = Rows()
    rows.store((1,))
    rows.end_every(WriteRow)
    (load,) = rows.load((1,))
    list(rows.tiering.removing(1, SMALL.namespace, [SMALL.record((1,)).key], leaves_holes=True))
    rows.step()
    rows.end_every(Delete)
    if is_row:
        rows.store((1,))
    else:
        rows.commit((1,))
    rows.end_every(Seal, WriteRow, Write)
    rows.end(rows.waiting(ReadRow)[0], outcome)
    assert rows.told([load]) == ["bad"] and rows.is_below((1,)) and not rows.waiting(Delete)
    assert rows.tiering.tier_usage(1).used_bytes == SMALL.slot_bytes
    list(rows.tiering.removing(0, SMALL.namespace, None, leaves_holes=True))
    (load,) = rows.load((1,))
    rows.end(rows.waiting(ReadRow)[0], outcome)
    assert rows.told([load]) == ["bad"] and not rows.is_below((1,)), "a read of what is there now counts"


def test_a_bad_blob_is_deleted_and_the_row_that_was_lent_meanwhile_is_written_after_that() -> None:
    rows = Rows()
    rows.store((1,))
    rows.end_every(WriteRow)
    (load,) = rows.load((1,))
    rows.end(rows.waiting(ReadRow)[0], Outcome.CORRUPT)
    uses = rows.store((1,))
    assert rows.told([load, *uses]) == ["bad", None] and not rows.waiting(WriteRow)
    rows.end_every(Delete)
    rows.end_every(WriteRow)
    assert rows.told(uses) == ["good"] and rows.is_below((1,))
    (load,) = rows.load((1,))
    rows.end(rows.waiting(ReadRow)[0], Outcome.CORRUPT)
    uses = rows.store((1,))
    rows.tiering.take_rows_back(uses)
    rows.end_every(Delete)
    assert rows.told(uses) == ["bad"] and len(rows.tiering.index) == 0


def rows_that_wait_for_a_deletion() -> tuple[Rows, list[RowUse]]:
    """A chunk is stored again while its damaged blob is deleted."""
    rows = Rows()
    rows.store((1,))
    rows.end_every(WriteRow)
    rows.load((1,))
    rows.end(rows.waiting(ReadRow)[0], Outcome.CORRUPT)
    uses = rows.store((1,))
    return rows, uses


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.UNAVAILABLE])
def test_a_row_that_waits_for_a_deletion_while_its_chunk_is_erased_is_given_back(outcome: Outcome) -> None:
    rows, uses = rows_that_wait_for_a_deletion()
    *_, count = rows.tiering.erasing(1, SMALL.namespace, SMALL.record((1,)).tag)
    assert count is not None
    rows.step()
    assert rows.told(uses) == ["bad"] and dropped(rows) == {"row_dropped_erased": 1}
    rows.end(rows.waiting(Delete)[0], outcome)
    assert not rows.waiting(WriteRow) and not rows.is_below((1,)) and not len(rows.tiering._rows)
    again = rows.store((1,))
    rows.end_every(Delete)
    rows.end_every(WriteRow)
    assert rows.told(again) == ["good"] and rows.is_below((1,))


def test_a_row_that_is_being_written_while_its_chunk_is_erased_is_its_engines_when_the_write_has_ended() -> None:
    """Told before, the engine would fill it with another prompt's KV under the write."""
    rows = Rows()
    uses = rows.store((1,))
    (write,) = rows.waiting(WriteRow)
    for _ in rows.tiering.erasing(1, SMALL.namespace, SMALL.record((1,)).tag):
        pass
    rows.step()
    assert not rows.ends
    rows.end(write)
    assert rows.told(uses) == ["good"]
    rows.end_every(Delete)
    assert not len(rows.tiering._rows)


def rows_that_wait_for_deletions() -> tuple[Rows, list[RowUse], list[Job]]:
    """A prefix is stored again while the damaged blobs of its chunks are deleted, by several threads in any order."""
    rows = Rows()
    rows.store(*PREFIX)
    rows.end_every(WriteRow)
    rows.load(*PREFIX)
    rows.end_every(ReadRow, outcome=Outcome.CORRUPT)
    uses = rows.store(*PREFIX)
    deletions = rows.waiting(Delete)
    assert len(deletions) == 3 and rows.told(uses) == [None] * 3
    return rows, uses, deletions


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_rows_whose_bad_blobs_are_deleted_in_any_order_are_all_stored_again(order: tuple[int, ...]) -> None:
    """A chunk whose own blob was gone before its parent's was not written, nor any behind it."""
    rows, uses, deletions = rows_that_wait_for_deletions()
    for place in order:
        rows.end(deletions[place])
    rows.end_every(WriteRow)
    assert rows.told(uses) == ["good"] * 3 and all(map(rows.is_below, PREFIX)) and not dropped(rows)


def test_rows_behind_one_whose_bad_blob_is_still_deleted_are_stored_behind_it() -> None:
    """Theirs were never there, or are gone for long."""
    rows, uses = rows_that_wait_for_a_deletion()
    uses += rows.store((1, 2), (1, 2, 3))
    assert rows.told(uses) == [None] * 3 and not rows.waiting(WriteRow)
    rows.end_every(Delete)
    rows.end_every(WriteRow)
    assert rows.told(uses) == ["good"] * 3 and all(map(rows.is_below, PREFIX)) and not dropped(rows)


@pytest.mark.parametrize("end", ["fails", "is taken back", "is erased", "takes no writes"])
def test_rows_that_wait_behind_a_deletion_after_which_nothing_is_written_are_given_back(end: str) -> None:
    rows, uses, deletions = rows_that_wait_for_deletions()
    for place in (2, 1):
        rows.end(deletions[place])
    assert rows.told(uses) == [None] * 3
    if end == "is taken back":
        rows.tiering.take_rows_back(uses[:1])
    elif end == "is erased":
        *_, count = rows.tiering.erasing(1, SMALL.namespace, SMALL.record((1,)).tag)
        assert count is not None
    elif end == "takes no writes":
        rows.tiering.set_readable(1, False)
    rows.step()
    rows.end(deletions[0], Outcome.UNAVAILABLE if end == "fails" else Outcome.OK)
    assert rows.told(uses) == ["bad"] * 3 and not rows.waiting(WriteRow)
    assert rows.tiering.pending_writes == 0 and not len(rows.tiering._rows)
    rows.tiering.set_readable(1, True)
    again = rows.store(*PREFIX)
    rows.end_every(Delete)
    rows.end_every(WriteRow)
    assert rows.told(again) == ["good"] * 3


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.UNAVAILABLE])
def test_rows_behind_one_that_is_evicted_and_stored_again_are_stored_whatever_becomes_of_the_eviction(
    outcome: Outcome,
) -> None:
    rows = Rows(capacity=4 * SMALL.slot_bytes)
    rows.store((1,), (1, 2))
    rows.end_every(WriteRow)
    rows.tiering._tiers[1].evict(2 * SMALL.slot_bytes)
    rows.step()
    child, parent = rows.waiting(Delete)
    uses = rows.store((1,), (1, 2))
    rows.end(child)
    rows.end(parent, outcome)
    rows.end_every(WriteRow)
    assert rows.told(uses) == ["good", "good"] and rows.is_below((1,)) and rows.is_below((1, 2))


def test_a_row_that_waits_for_a_deletion_that_fails_is_given_back() -> None:
    rows, uses = rows_that_wait_for_a_deletion()
    rows.end(rows.waiting(Delete)[0], Outcome.UNAVAILABLE)
    assert rows.told(uses) == ["bad"] and dropped(rows) == {"row_dropped_not_now": 1}


def test_a_tier_that_takes_no_writes_keeps_nobodys_row() -> None:
    rows = Rows()
    waiting = rows.store(*PREFIX)
    rows.tiering.set_readable(1, False)
    assert rows.told(rows.store((7,))) == ["bad"]
    rows.tiering.take_rows_back(waiting)
    rows.end_every(WriteRow)
    assert rows.tiering.pending_writes == 0


def test_a_full_tier_makes_room_and_a_row_waits_for_that() -> None:
    rows = Rows(capacity=4 * SMALL.slot_bytes)
    for number in range(12):
        (use,) = rows.store((number,))
        rows.end_every(WriteRow, Delete)
        assert rows.told([use]) == ["good"]
    assert rows.tiering.tier_usage(1).used_bytes == 4 * SMALL.slot_bytes


def test_what_a_bucket_alone_has_comes_through_a_slot() -> None:
    rows = Rows(is_last_shared=True)
    rows.tiering.restore(2, SMALL.record((1,)), SMALL.slot_bytes)
    assert rows.told(rows.load((1,))) == ["elsewhere"]


@pytest.mark.parametrize("number", range(seed(), seed() + count("SEEDS", 6)))
def test_whatever_happens_each_use_ends_once_and_nothing_stays(number: int) -> None:
    source, rows = random.Random(number), Rows(capacity=9 * SMALL.slot_bytes)
    uses: list[RowUse] = []
    outcomes = [Outcome.OK] * 6 + [Outcome.MISSING, Outcome.CORRUPT, Outcome.UNAVAILABLE, Outcome.NO_ROOM]
    for _ in range(400):
        path = tuple(source.randrange(3) for _ in range(source.randrange(1, 5)))
        action = source.random()
        if action < 0.25:
            uses += rows.store(*chunks_of(path))
        elif action < 0.5:
            uses += rows.load(*chunks_of(path))
        elif action < 0.55 and rows.credits:
            rows.commit(path[:1])
        elif action < 0.6 and uses:
            rows.tiering.take_rows_back(source.sample(uses, min(len(uses), 5)))
            rows.step()
        elif rows.jobs:
            job = source.choice(rows.jobs)
            outcome = source.choice(outcomes)
            if isinstance(job, Seal | Grow):
                outcome = Outcome.OK
            if isinstance(job, Delete) and outcome is not Outcome.MISSING:
                outcome = source.choice([Outcome.OK, Outcome.OK, Outcome.UNAVAILABLE])
            if isinstance(job, WriteRow | Write) and outcome in (Outcome.MISSING, Outcome.CORRUPT):
                outcome = Outcome.UNAVAILABLE
            if isinstance(job, WriteRow) and job.use.id in rows.ends and source.random() < 0.7:
                outcome = source.choice([Outcome.ROW_GONE, Outcome.ROW_CHANGED])
            rows.end(job, outcome)
    rows.tiering.take_rows_back([use for use in uses if source.random() < 0.5])
    while rows.jobs:
        rows.end(rows.jobs[0])
    rows.step()
    assert rows.ends.keys() == {use.id for use in uses} and len(uses) > WRITES_MAX
    assert set(rows.ends.values()) == {"good", "bad", "elsewhere"}
    assert rows.tiering.pending_writes == 0 and not rows.tiering.open_rows(rows.session)
    assert not rows.tiering._rows._reads, "reads that are over are remembered"
