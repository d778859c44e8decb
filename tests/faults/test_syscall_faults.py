"""Every system call of a cache's life over a nearly full directory fails in turn: open, store, look up, load, evict,
close, open again. It costs a hit or a start, and never a wrong byte, a file left behind or a byte of the accounts.

``TIERED_KV_SYSCALLS`` sets how many of the calls are tried (a sample that the seed draws); ``make prove`` tries all.
"""

import errno
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.counts import count, seed
from tests.kit.faults.scene import OTHERS, PREFIX, FaultScene
from tests.kit.faults.syscalls import SyscallFaults
from tiered_kv.errors import TieredKVError

ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EACCES": errno.EACCES, "EMFILE": errno.EMFILE}
IN_A_ROW = {"EIO": errno.EIO, "EROFS": errno.EROFS, "EDQUOT": errno.EDQUOT, "ESTALE": errno.ESTALE}
"""What a disk that is out of order for a moment gives, a quota, and a network mount."""

IN_A_ROW_MAX = 8
TRIED = count("SYSCALLS", 60)
FILLING = [(1000 + number,) for number in range(90)]


@pytest.fixture(autouse=True)
def looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By no clock: which calls there are must not hang upon how fast the run is."""
    monkeypatch.setattr("tiered_kv.tiers.disk.tier.LOOK_AGE_S", 0.0)


@pytest.fixture(scope="module")
def nearly_full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which every further store evicts."""
    root = tmp_path_factory.mktemp("nearly_full")
    scene = FaultScene(root)
    for path in FILLING:
        scene.store(path)
    scene.end()
    return root


def opened(root: Path) -> FaultScene:
    """A start that fails says so, and the next one succeeds once no call fails any more."""
    for _ in range(IN_A_ROW_MAX):
        try:
            return FaultScene(root)
        except TieredKVError:
            continue
    return FaultScene(root)


def a_life(root: Path, faults: SyscallFaults) -> Iterator[FaultScene]:
    """Yields the running cache before it is closed."""
    with faults.active():
        scene = opened(root)
        scene.store(PREFIX)
        scene.store((*PREFIX[:2], 9))
        assert scene.load() == 3, "host memory serves"
        for path in OTHERS[:10]:
            scene.store(path)
        assert 0 <= scene.load() <= 3
        assert 0 <= scene.load(FILLING[-1]) <= 1
        scene.pass_time(61)
    yield scene
    with faults.active():
        try:
            scene.end()
        except TieredKVError:  # told to whoever closes; a server's process ends here, and its lock with it
            scene.disk._lock.release()


def calls_of_a_life(root: Path) -> list[str]:
    faults = SyscallFaults(root)
    for scene in a_life(root, faults):
        assert scene.counter("lower_evicted") > 5
    return faults.calls


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("error", ERRORS)
def test_every_failing_call_costs_a_hit_and_nothing_else(tmp_path: Path, nearly_full: Path, error: str) -> None:
    shutil.copytree(nearly_full, tmp_path / "plain")
    total = len(calls_of_a_life(tmp_path / "plain"))
    assert total > 150
    chosen = random.Random(f"{error} {seed()}").sample(range(total), min(total, TRIED // len(ERRORS)))
    for number in sorted(chosen):
        root = tmp_path / str(number)
        shutil.copytree(nearly_full, root)
        faults = SyscallFaults(root, number, ERRORS[error])
        try:
            live(root, faults)
        except BaseException as exc:
            exc.add_note(f"call {number} of {total}: {faults.failed} failed with {error}")
            raise
        shutil.rmtree(root)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("error", IN_A_ROW)
def test_calls_that_fail_in_a_row_cost_hits_and_nothing_else(tmp_path: Path, nearly_full: Path, error: str) -> None:
    """So also what is done about a failure fails: the removal of a file that was not written to its end, and so on."""
    total = len(calls_of_a_life(shutil.copytree(nearly_full, tmp_path / "plain")))
    draw = random.Random(f"{seed()} {error} in a row")
    for number in draw.sample(range(total), min(total, TRIED // len(IN_A_ROW))):
        in_a_row = draw.randint(2, IN_A_ROW_MAX)
        root = shutil.copytree(nearly_full, tmp_path / str(number))
        faults = SyscallFaults(root, number, IN_A_ROW[error], in_a_row)
        try:
            live(root, faults)
        except BaseException as exc:
            exc.add_note(f"calls {number} to {number + in_a_row - 1} of {total} failed with {error}")
            raise
        shutil.rmtree(root)


def live(root: Path, faults: SyscallFaults) -> None:
    for scene in a_life(root, faults):
        scene.pass_time()
        scene.notice()
        scene.check()
    assert faults.failed, "a life has no such call"
    after = FaultScene(root)
    found = sum(after.load(path) for path in FILLING)
    assert found > len(FILLING) // 2, "one failing call cost the directory"
    after.check()
    after.end()


def test_the_count_of_calls_repeats_itself(tmp_path: Path, nearly_full: Path) -> None:
    """Else the n-th call of one run would not be the n-th of another."""
    runs = []
    for name in ("one", "other"):
        shutil.copytree(nearly_full, tmp_path / name)
        runs.append(calls_of_a_life(tmp_path / name))
    assert runs[0] == runs[1]
    assert {"open", "pwrite", "preadv", "replace", "unlink", "stat", "statvfs", "scandir", "mkdir", "close"} <= {
        *runs[0]
    }
