"""The soak (scripts/soak.py) in a small size, with every check but the slope of memory, and what judges that slope."""

import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from tests.kit.counts import seed
from tests.kit.server.processes import is_alive, start_time, still_running
from tests.soak.faults import Pace
from tests.soak.judgement import SLOPE_MAX_MIB_PER_H, SPAN_S, trend
from tests.soak.run import Plan, Soak
from tests.soak.stores import DirectoryStore

MINUTES_20 = [float(second) for second in range(600)]
"""Samples of the second half of a soak."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("start", [seed()])
def test_a_small_soak_leaves_nothing_behind(tmp_path: Path, start: int) -> None:
    plan = Plan(start, faults_s=8, recovery_s=1, again_s=1, pace=Pace(0.3, 1.5, 1.5), nodes=1, clients=2, gap_s=0.02)
    soak = Soak(plan, DirectoryStore(tmp_path / "bucket"), tmp_path)
    soak.run()
    assert [check for check, verdict in soak.verdicts.items() if not verdict["holds"]] == []
    assert len(+soak.faults) >= 3, "hardly anything was done to it"


@pytest.mark.skipif(not os.access("/proc/sys/kernel/ns_last_pid", os.W_OK), reason="only root may choose numbers")
def test_a_process_that_was_given_the_number_of_one_that_ended_is_another() -> None:
    numbers = Path("/proc/sys/kernel/ns_last_pid")
    ours = subprocess.Popen(["sleep", "600"])
    noted = [(ours.pid, start_time(ours.pid))]
    assert still_running(noted) == [ours.pid]
    ours.kill()
    ours.wait()
    assert still_running(noted) == []
    time.sleep(0.05)  # start times are kept in ticks of 10 ms, and no machine gives all its numbers out in one

    for _ in range(200):  # another process of this machine may take the number first
        numbers.write_text(str(ours.pid - 1))
        theirs = subprocess.Popen(["sleep", "600"])
        try:
            if theirs.pid == ours.pid:
                assert is_alive(ours.pid)
                assert still_running(noted) == []
                return
        finally:
            theirs.kill()
            theirs.wait()
    pytest.skip("the number went to others each time")


# -- what "flat" means -------------------------------------------------------------------------------------------------


def series(per_hour_mib: float, *, noise_mib: float = 2.0, start: int = 0, step_mib: float = 0.0) -> list[float]:
    """Sizes over ten minutes: 60 MiB, a leak, noise, and a step in the last third."""
    draw = random.Random(start)
    return [
        60 + per_hour_mib * time_s / 3600 + draw.gauss(0, noise_mib) + step_mib * (time_s > 450)
        for time_s in MINUTES_20
    ]


@pytest.mark.parametrize("start", range(20))
def test_noise_is_flat_and_a_leak_below_it_is_not(start: int) -> None:
    assert trend(MINUTES_20, series(0, start=start)).is_flat
    leaking = trend(MINUTES_20, series(2 * SLOPE_MAX_MIB_PER_H, start=start))
    assert not leaking.is_flat
    assert leaking.last_mib <= leaking.middle_mib * 1.05 + 8, "found by its slope alone"


def test_a_sawtooth_is_flat() -> None:
    assert trend(MINUTES_20, [60 + time_s % 40 / 4 for time_s in MINUTES_20]).is_flat


def test_growth_at_the_start_does_not_count() -> None:
    assert trend(MINUTES_20, [60 - max(0.0, 150 - time_s) / 3 for time_s in MINUTES_20]).is_flat


def test_a_late_step_is_not_flat_also_where_the_slope_is_not_judged() -> None:
    assert not trend(MINUTES_20, series(0, step_mib=15)).is_flat
    short = [time_s * SPAN_S / 1000 for time_s in MINUTES_20]
    found = trend(short, series(0, step_mib=15))
    assert found.slope_mib_per_h is None
    assert not found.is_flat


def test_a_few_samples_are_not_judged() -> None:
    with pytest.raises(ValueError, match="needs 6 samples"):
        trend([1.0, 2.0], [1.0, 2.0])
