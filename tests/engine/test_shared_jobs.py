"""Tasks that share jobs, as the threads of a pool and their owner see them; more in ``test_engine.py``."""

from collections.abc import Callable

from tests.kit.engine_world import SPACES
from tests.kit.fake_clock import FakeClock
from tests.kit.step_executor import Noting, StepExecutor
from tiered_kv.engine.executor import NOTIFY_INTERVAL_S, Pool
from tiered_kv.engine.shared_jobs import SharedJob, SharedJobs
from tiered_kv.tiering.types import Read, Seal

SPACE = SPACES["small"]


def shared(executor: Noting, perform: Callable[[SharedJob], None], clock: FakeClock, tasks: int = 1) -> SharedJobs:
    return SharedJobs(executor, (Pool.LOAD, 0), perform, clock, tasks)


def reads(count: int) -> list[SharedJob]:
    return [Read(1, SPACE.record((number,)), number) for number in range(count)]


def run_all(executor: StepExecutor) -> None:
    while executor.step():
        pass


def test_the_owner_is_woken_behind_the_last_job_whenever_that_ends() -> None:
    """Nothing else wakes it: what was read would wait for whatever comes next."""
    executor, jobs = Noting(), reads(5)
    shared_jobs = shared(executor, executor.seen.append, FakeClock())
    shared_jobs.add(jobs)
    shared_jobs.begin_tasks()
    run_all(executor)
    assert [one for one in executor.seen if one != "notified"] == jobs and executor.seen[-1] == "notified"


def test_seals_of_a_task_that_makes_way_go_on_in_another_one() -> None:
    executor, clock = Noting(), FakeClock()
    jobs: list[SharedJob] = [Seal(SPACE.record((number,)), number) for number in range(3)]

    def perform(job: SharedJob) -> None:
        clock.advance(2 * NOTIFY_INTERVAL_S)
        executor.seen.append(job)

    shared_jobs = shared(executor, perform, clock)
    shared_jobs.add(jobs)
    shared_jobs.begin_tasks()
    run_all(executor)  # the owner does nothing meanwhile
    assert [one for one in executor.seen if one != "notified"] == jobs and executor.seen[-1] == "notified"


def test_tasks_that_have_ended_are_not_counted_among_those_that_run() -> None:
    executor = Noting()
    shared_jobs = shared(executor, executor.seen.append, FakeClock(), tasks=2)
    for _ in range(3):
        shared_jobs.add(reads(4))
        shared_jobs.begin_tasks()
        assert len(executor.waiting) == 2
        run_all(executor)
    assert len(executor.seen) - executor.seen.count("notified") == 12 and not shared_jobs._begun_s


def test_after_the_end_nothing_more_is_begun() -> None:
    executor, jobs = Noting(), reads(4)

    def perform(job: SharedJob) -> None:
        executor.seen.append(job)
        shared_jobs.close()

    shared_jobs = shared(executor, perform, FakeClock())
    shared_jobs.add(jobs)
    shared_jobs.begin_tasks()
    run_all(executor)
    assert [one for one in executor.seen if one != "notified"] == jobs[:1]
