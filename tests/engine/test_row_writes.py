"""The order in which rows of one prefix get into the tier, with tasks that run when a test says so."""

from tests.kit.engine_world import SPACES, Path
from tests.kit.fake_clock import FakeClock
from tests.kit.step_executor import StepExecutor
from tiered_kv.engine.row_writes import RowWrite, RowWrites
from tiered_kv.tiering.types import RowUse, WriteRow

SPACE = SPACES["small"]


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
