"""docs/proofs: what was run is said with a commit that anybody can check out, and passed there."""

import json
import subprocess
from pathlib import Path

import pytest


def records(repository: Path) -> dict[str, dict[str, object]]:
    """Name of each record -> its content; ``mutations.json`` has one per section."""
    found = {}
    for path in sorted((repository / "docs" / "proofs").glob("*.json")):
        content = json.loads(path.read_text())
        found |= {path.stem: content} if "commit" in content else {f"{path.stem} {k}": v for k, v in content.items()}
    return found


def test_every_record_names_a_commit_of_this_history(repository: Path) -> None:
    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(("git", *arguments), cwd=repository, capture_output=True, text=True, check=False)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs the whole history: not in a shallow clone, nor outside of one")
    found = records(repository)
    assert found
    elsewhere = {
        n: r["commit"] for n, r in found.items() if git("merge-base", "--is-ancestor", r["commit"], "HEAD").returncode
    }
    assert not elsewhere


def test_every_record_is_of_a_clean_tree_that_passed(repository: Path) -> None:
    bad = {
        n for n, r in records(repository).items() if r["is_dirty"] or r.get("exit_code", 0) or r.get("wrong_chunks", 0)
    }
    assert bad == set()
