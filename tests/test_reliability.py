"""docs/reliability.md: every row names a test that is there, and every fault has a row."""

import re
from pathlib import Path

DOCUMENT = Path("docs") / "reliability.md"
FAULTS = {f"F{number}" for number in range(1, 16)}


def rows(repository: Path) -> list[list[str]]:
    """The cells of the table of faults."""
    text = (repository / DOCUMENT).read_text().partition("## Faults")[2]
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_row_names_a_test_that_is_there(repository: Path) -> None:
    table = rows(repository)
    assert len(table) > 20
    for row in table:
        assert len(row) == 6, row
        named = re.findall(r"`(tests/[a-z0-9_/]+\.py)(?:::([a-z0-9_]+))?`", row[-1])
        assert named, f"no test is named: {row[0]}"
        for file, function in named:
            source = (repository / file).read_text()
            assert not function or f"def {function}(" in source, f"{file} has no {function}"


def test_every_fault_has_a_row(repository: Path) -> None:
    found: set[str] = set()
    for row in rows(repository):
        for first, last in re.findall(r"\bF(\d+)(?:-F(\d+))?", row[0]):
            found |= {f"F{number}" for number in range(int(first), int(last or first) + 1)}
    assert found == FAULTS
