"""docs/rules.md: thirteen rules, each held by tests that are there; whoever names a rule names one of them."""

import re
import subprocess
from pathlib import Path

import pytest

RULES = range(1, 14)


@pytest.fixture
def sections(repository: Path) -> dict[int, str]:
    """Number of a rule -> its section."""
    text = (repository / "docs" / "rules.md").read_text()
    parts = re.split(r"^## (\d+)\. ", text, flags=re.MULTILINE)[1:]
    return dict(zip(map(int, parts[::2]), parts[1::2], strict=True))


def test_there_are_thirteen_and_each_names_tests_that_are_there(repository: Path, sections: dict[int, str]) -> None:
    assert list(sections) == list(RULES)
    for number, section in sections.items():
        named = re.findall(r"`(tests/[a-z0-9_/]+\.py)(?:::([a-z0-9_]+))?`", section.partition("\nHeld by ")[2])
        assert named, f"nothing holds rule {number}"
        for file, function in named:
            source = (repository / file).read_text()
            assert not function or f"def {function}(" in source, f"rule {number}: {file} has no {function}"


def test_whoever_names_a_rule_names_one_of_them(repository: Path) -> None:
    command = ("git", "ls-files", "*.py", "*.md")
    files = subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True).stdout.splitlines()
    named = {
        (file, int(number))
        for file in files
        for number in re.findall(r"\brules? (\d+)\b", (repository / file).read_text(), flags=re.IGNORECASE)
    }
    assert len(named) > 20
    assert {(file, number) for file, number in named if number not in RULES} == set()
