"""Threads that run tasks: both pools, priorities, notifications, and the end."""

import os
import re
import select
import subprocess
import sys
import threading

import pytest

from tests.kit.fake_clock import FakeClock
from tests.kit.module_process import module_environment
from tests.kit.step_executor import StepExecutor
from tiered_kv.engine.executor import Pool, ThreadExecutor

STACK_BYTES = 256 << 20
REFUSED = f"""
import os, resource, threading
from pathlib import Path
from tiered_kv.engine.executor import ThreadExecutor
from tiered_kv.errors import TierUnavailable

descriptors = len(os.listdir("/proc/self/fd"))
threading.stack_size({STACK_BYTES})
size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limits = size_bytes + 4 * {STACK_BYTES}, resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, limits)
try:
    ThreadExecutor()
except TierUnavailable as exc:
    print(exc)
print("threads", threading.active_count(), "descriptors", len(os.listdir("/proc/self/fd")) - descriptors)
"""


@pytest.fixture
def executor():
    executor = ThreadExecutor(dict.fromkeys(Pool, 1))
    yield executor
    executor.close()


def test_a_machine_that_refuses_a_thread_is_told_of_and_none_is_left():
    """Its address space holds a few of their stacks: as good as a limit of processes, which does not bind root.

    In a process of its own: whatever else maps memory beside the tests would meet the limit, too.
    """
    command = [sys.executable, "-c", REFUSED]
    done = subprocess.run(command, env=module_environment(), capture_output=True, text=True, check=True)
    said, left = done.stdout.splitlines()
    assert re.search(r"raise the limit of .*threads.* started=[1-9] wanted=16", said)
    assert left == "threads 1 descriptors 0"


def wait(executor):
    assert select.select([executor.fileno()], [], [], 30)[0], "nobody notified"
    executor.drain_notifications()


def test_a_task_runs_in_a_thread_of_its_pool_and_wakes_the_owner(executor):
    names = []

    def task():
        names.append(threading.current_thread().name)
        executor.notify()

    for pool in Pool:
        executor.submit(pool, 0, task)
        wait(executor)
    assert names == [f"tiered_kv-{pool.value}-0" for pool in Pool]
    assert select.select([executor.fileno()], [], [], 0)[0] == []
    executor.drain_notifications()


def test_many_reports_wake_the_owner_once_and_one_after_that_again(executor):
    for _ in range(2):
        for _ in range(3):
            executor.notify()
        wait(executor)
        assert select.select([executor.fileno()], [], [], 0)[0] == []


def test_a_report_in_the_middle_of_a_look_does_not_silence_those_behind_it(executor, monkeypatch):
    real = os.eventfd_read

    def read(descriptor):
        executor.notify()
        return real(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "eventfd_read", read)
        executor.drain_notifications()
    executor.notify()
    wait(executor)


def test_lower_numbers_go_first_and_equal_ones_in_order(executor):
    gate, order = threading.Event(), []
    executor.submit(Pool.STORE, 0, gate.wait)
    for priority, name in [(2, "c"), (1, "a"), (1, "b"), (2, "d")]:
        executor.submit(Pool.STORE, priority, lambda name=name: order.append(name))
    executor.submit(Pool.STORE, 3, executor.notify)
    gate.set()
    wait(executor)
    assert order == ["a", "b", "c", "d"]


def test_a_load_does_not_wait_behind_a_store(executor):
    gate = threading.Event()
    executor.submit(Pool.STORE, 0, gate.wait)
    executor.submit(Pool.LOAD, 0, executor.notify)
    wait(executor)
    gate.set()


def test_a_task_that_raises_is_logged_and_its_thread_lives(executor, caplog):
    executor.submit(Pool.LOAD, 0, lambda: 1 // 0)
    executor.submit(Pool.LOAD, 0, executor.notify)
    wait(executor)
    assert "a task raised" in caplog.text
    caplog.clear()


def test_closing_finishes_what_runs_and_forgets_what_waits():
    executor = ThreadExecutor(dict.fromkeys(Pool, 1))
    gate, begun, done = threading.Event(), threading.Event(), []

    def long():
        begun.set()
        gate.wait()
        done.append("running")

    executor.submit(Pool.LOAD, 0, long)
    begun.wait()
    executor.submit(Pool.LOAD, 0, lambda: done.append("waiting"))
    closing = threading.Thread(target=executor.close)
    closing.start()
    gate.set()
    closing.join()
    executor.close()
    assert done == ["running"]
    assert not [t for t in threading.enumerate() if t.name.startswith("tiered_kv-")]


def test_the_stepping_executor_runs_one_chosen_task_at_a_time():
    executor, order = StepExecutor(), []
    for name in "abcd":
        executor.submit(Pool.LOAD, 0, lambda name=name: order.append(name))
    assert executor.step(lambda waiting: waiting - 2) and executor.step()
    assert order == ["c", "a"] and executor.fileno() == -1
    executor.close()
    assert not executor.step()


def test_the_fake_clock_moves_when_told():
    clock = FakeClock(5.0)
    clock.advance(2.5)
    assert clock.monotonic() == 7.5 and clock.wall() == 1_700_000_007
