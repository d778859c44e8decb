"""docs/reliability.md: every row names a test that is there, and every fault and every finding has a row."""

import re
from pathlib import Path

import pytest

DOCUMENT = Path("docs") / "reliability.md"
FAULTS = {f"F{number}" for number in range(1, 16)}
FINDINGS = {f"A{number}" for number in range(1, 12)} | {"B1"} | {f"C{number}" for number in range(1, 7)}
TABLES = {"Faults": 6, "Findings of the hostile review of November 2026": 4}
"""Heading of each section with a table, and its columns. The last one names tests."""


def rows(repository: Path, section: str) -> list[list[str]]:
    """The cells of a section's table."""
    text = (repository / DOCUMENT).read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize("section", TABLES)
def test_every_row_names_a_test_that_is_there(repository: Path, section: str) -> None:
    table = rows(repository, section)
    assert len(table) > 20
    for row in table:
        assert len(row) == TABLES[section], row
        named = re.findall(r"`(tests/[a-z0-9_/]+\.py)(?:::([a-z0-9_]+))?`", row[-1])
        assert named, f"no test is named: {row[0]}"
        assert len(named) == row[-1].count("`") // 2, f"something is named that is no test: {row[-1]}"
        for file, function in named:
            source = (repository / file).read_text()
            assert not function or f"def {function}(" in source, f"{file} has no {function}"


def test_every_fault_has_a_row(repository: Path) -> None:
    found: set[str] = set()
    for row in rows(repository, "Faults"):
        for first, last in re.findall(r"\bF(\d+)(?:-F(\d+))?", row[0]):
            found |= {f"F{number}" for number in range(int(first), int(last or first) + 1)}
    assert found == FAULTS


def test_every_finding_has_a_row_and_every_row_names_test_functions(repository: Path) -> None:
    table = rows(repository, "Findings of the hostile review of November 2026")
    assert {row[0] for row in table} == FINDINGS
    for row in table:
        assert row[-1].count("`tests/") == row[-1].count("::"), f"a file alone proves no finding: {row[-1]}"
