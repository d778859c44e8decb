"""scripts/bench.py knows every benchmark there is."""

import ast
import subprocess
import sys
from pathlib import Path


def test_every_benchmark_can_be_run_by_its_name(repository: Path):
    listed = subprocess.run(
        [sys.executable, "scripts/bench.py", "--list"], cwd=repository, check=True, capture_output=True, text=True
    ).stdout.split()
    found = set()
    for path in (repository / "benchmarks").glob("*.py"):
        text = path.read_text()
        about = ast.get_docstring(ast.parse(text)) or ""
        if '__name__ == "__main__"' in text and "Not a benchmark by itself" not in about:
            found.add(path.stem)
    assert found == set(listed)


def test_an_unknown_name_is_told_with_those_that_are_known(repository: Path):
    done = subprocess.run(
        [sys.executable, "scripts/bench.py", "fast"], cwd=repository, check=False, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "unknown section: fast" in done.stderr and "host_path" in done.stderr
