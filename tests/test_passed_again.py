"""What `make test` says of a test that failed once (scripts/passed_again.py), on real runs of pytest."""

import subprocess
import sys
from pathlib import Path

TESTS = '''
from pathlib import Path
import pytest

def met_a_clock(name):
    seen = Path(__file__).with_name(name)
    is_first = not seen.exists()
    seen.touch()
    return is_first

@pytest.mark.parametrize("what", ["a clock", "nothing"])
def test_races(what):
    """Fails once, with one of the two."""
    assert what == "nothing" or not met_a_clock("call"), "one of three was not there"

class TestPeers:
    def test_is_wrong(self):
        assert 1 == 2, "it is so each time"

    def test_races_too(self):
        for _ in range(100):
            pass
        assert not met_a_clock("method"), "the other one"

@pytest.fixture
def server():
    if met_a_clock("setup"):
        raise RuntimeError("no server yet")

def test_of_a_server(server):
    pass
'''


def run_twice(root: Path, repository: Path) -> str:
    """Run the tests there as scripts/test does, then once more what failed; what is said of it."""
    pytest_here = [sys.executable, "-m", "pytest", "-q", "--rootdir", ".", "-c", "/dev/null", "-o", "cache_dir=cache"]
    results = ["--junitxml", "first.xml", "-o", "junit_family=xunit1"]
    for more in (["-n", "1", *results], ["--last-failed", "--last-failed-no-failures=none"]):
        subprocess.run([*pytest_here, *more, "tests"], cwd=root, check=False, capture_output=True)
    said = subprocess.run(
        [sys.executable, repository / "scripts" / "passed_again.py", "first.xml", "cache"],
        cwd=root, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return said.stdout


def test_what_passed_when_it_was_run_again_is_named_with_the_end_of_its_failure(tmp_path: Path, repository) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text(TESTS)
    said = run_twice(tmp_path, repository).splitlines()

    named = [line.split(": ", 1)[1] for line in said if line.startswith("RACE")]
    assert sorted(named) == [
        "tests/test_one.py::TestPeers::test_races_too",
        "tests/test_one.py::test_of_a_server",
        "tests/test_one.py::test_races[a clock]",
    ]
    for told in ("one of three was not there", "the other one", "no server yet"):
        assert any(line.startswith("    | ") and told in line for line in said), told
    assert not any("it is so each time" in line for line in said), "what failed again is no race"
