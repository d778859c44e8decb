"""The order in which rows of one prefix get into the tier, with tasks that run when a test says so."""

import pytest

from tests.kit.engine_world import SPACES, Path
from tests.kit.fake_clock import FakeClock
from tests.kit.step_executor import Noting, StepExecutor
from tiered_kv.engine.row_writes import TURN_S, RowWrite, RowWrites
from tiered_kv.tiering.types import RowUse, WriteRow

SPACE = SPACES["small"]


PREFIX = ((1,), (1, 2), (1, 2, 3), (1, 2, 3, 4))


def row(number: int, path: Path) -> WriteRow:
    return WriteRow(1, SPACE.record(path), RowUse(1, number, number))


def test_a_chunk_that_is_handed_out_again_is_waited_for_by_what_comes_behind_it() -> None:
    """Its first write has failed, and was reported in the very turn in which the second one began."""
    executor = StepExecutor()
    failed, again, child = row(1, (1,)), row(2, (1,)), row(3, (1, 2))
    followed: dict[WriteRow, bool] = {}

    def perform(write: RowWrite) -> bool:
        if write.job is again:
            executor.step()  # another thread begins with the child meanwhile
        followed[write.job] = write.follows(lambda: False)  # its row is taken back: it waits for nobody
        return write.job is again

    writes = RowWrites(executor, 0, perform, FakeClock())
    writes.add(failed)
    writes.all_added()
    executor.step()
    writes.reported(failed)
    writes.add(again)
    writes.all_added()
    writes.add(child)
    while executor.step():
        pass
    assert followed == {failed: True, again: True, child: False}, "the child did not wait for its parent"
    writes.reported(again)
    writes.reported(child)
    writes.all_added()
    assert not writes._writes, "what was written is remembered for ever"


def test_a_prefix_whose_tasks_have_ended_gets_new_ones_for_what_comes_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else rows of a prompt that is stored step by step would never be written, once so many steps were."""
    monkeypatch.setattr("tiered_kv.engine.row_writes.WRITES_AT_ONCE", 2)
    executor = Noting()

    def perform(write: RowWrite) -> bool:
        executor.seen.append(write.job)
        return write.follows(lambda: True)

    writes = RowWrites(executor, 0, perform, FakeClock())
    jobs = [row(number, path) for number, path in enumerate(PREFIX)]
    for job in jobs:  # the owner takes in none of their ends meanwhile
        writes.add(job)
        while executor.step():
            pass
    assert executor.written == jobs and executor.seen[-1] == "notified"
    assert all(write._parent is None for write, _ in writes._writes.values()), "a prompt's rows are a chain in memory"


def test_a_task_makes_way_for_others_and_goes_on_behind_them() -> None:
    executor, clock = Noting(), FakeClock()

    def perform(write: RowWrite) -> bool:
        executor.seen.append(write.job)
        clock.advance(2 * TURN_S)
        return True

    writes = RowWrites(executor, 0, perform, clock)
    jobs = [row(number, path) for number, path in enumerate(PREFIX)]
    writes.add(jobs[0])
    executor.step()
    executor.waiting.clear()  # one task is enough here
    for job in jobs[1:]:
        writes.add(job)
    while len(executor.waiting) > 1:
        executor.waiting.pop()
    executor.waiting.append(lambda: executor.seen.append("another"))
    while executor.step():
        pass
    assert executor.written == [*jobs[:2], "another", *jobs[2:]] and executor.seen[-1] == "notified"


def test_after_the_end_nothing_more_is_written() -> None:
    """A prompt has thousands of rows, and a server that ends waits for what its threads do."""
    executor = Noting()

    def perform(write: RowWrite) -> bool:
        executor.seen.append(write.job)
        writes.close()
        return True

    writes = RowWrites(executor, 0, perform, FakeClock())
    jobs = [row(number, path) for number, path in enumerate(PREFIX)]
    for job in jobs:
        writes.add(job)
    while executor.step():
        pass
    assert executor.written == jobs[:1]
