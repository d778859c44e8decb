"""The documented schema is that of the code."""

import json
from pathlib import Path

from tiered_kv.cli.schema import reports, schema


def test_the_document_is_made_from_the_types(repository: Path) -> None:
    """After a change: python -m tiered_kv.cli.schema > docs/cli-schema.json"""
    assert json.loads((repository / "docs" / "cli-schema.json").read_text()) == schema()


def test_every_verb_that_tells_something_has_a_type() -> None:
    from tiered_kv.cli.app import VERBS

    assert set(VERBS) - set(reports()) <= {"serve", "unpin"}


def test_every_field_is_explained() -> None:
    for name, kind in schema()["$defs"].items():
        text = kind.get("description", "")
        for field in kind.get("properties", {}):
            assert field == "version" or field in text, f"{name}.{field} is not explained"
