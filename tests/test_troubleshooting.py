"""docs/troubleshooting.md: what refers to it finds its heading, and every message in it is one of the code's."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_docs import anchors
from tiered_kv.ops.findings import NO_HITS, SECTIONS, TROUBLESHOOTING, ok, warning

OF_CHECKS = {"disk content", "object content", "disk test", "object test", "O_DIRECT"}
"""Names of checks that are put together from a tier's name, and one whose finding is written in a branch."""


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / TROUBLESHOOTING).read_text()


def test_every_reference_of_a_verb_leads_to_a_heading(page: str) -> None:
    for reference in {NO_HITS, *SECTIONS.values()}:
        document, _, anchor = reference.partition("#")
        assert document == TROUBLESHOOTING and anchor in anchors(page), reference


def test_every_check_of_doctor_has_a_section(repository: Path) -> None:
    named = set(OF_CHECKS)
    for module in (repository / "tiered_kv" / "ops").glob("doctor*.py"):
        for call in ast.walk(ast.parse(module.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("warning", "error"):
                first = call.args[0]
                named |= {first.value} if isinstance(first, ast.Constant) else set()
    assert len(named) > 15
    assert named == set(SECTIONS)


def test_only_what_has_to_be_done_refers_to_a_section() -> None:
    assert ok("room", "enough").see == ""
    assert warning("room", "little").see == f"{TROUBLESHOOTING}#disk-full"


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text of a module; what is put into an f-string stands as ``*``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)


def messages(page: str) -> list[str]:
    """What stands in backquotes in the first column of tables of messages, but for names of metrics."""
    tables = re.findall(r"^\| ?(.*?) ?\|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page, flags=re.MULTILINE)
    rows = "".join(rows for header, rows in tables if header not in ("", "section", "Model"))
    first_cells = re.findall(r"^\| (.*?) \|", rows, flags=re.MULTILINE)
    quoted = [message for cell in first_cells for message in re.findall(r"`([^`]+)`", cell)]
    return [message for message in quoted if not message.startswith("vllm:")]


@pytest.mark.parametrize(("name", "count"), [("troubleshooting", 50), ("quickstart-gpu", 5)])
def test_every_message_of_the_tables_is_one_of_the_code(repository: Path, name: str, count: int) -> None:
    said = "\n".join(
        text for module in (repository / "tiered_kv").rglob("*.py") for text in texts(ast.parse(module.read_text()))
    )
    shown = messages((repository / "docs" / f"{name}.md").read_text())
    assert len(shown) >= count
    spelt = {message: {message, message.replace(" ", "_"), re.sub(r"[0-9]+", "%.0f", message)} for message in shown}
    assert [message for message, ways in spelt.items() if not any(way in said for way in ways)] == []
