"""docs/pictures.md is what the verbs print."""

import re
import subprocess
import sys
from pathlib import Path


def shape(page: str) -> tuple[str, list[str]]:
    """Everything but times up to `top`; of `top`, whose figures differ every time, the words that head its lines."""
    still, _, live = page.partition("## top\n")
    return re.sub(r"\b\d+(s|min|h) ago", "ago", still), re.findall(
        r"^(?:\$ .*|[a-z][a-z/ ]*?)(?=  |$)", live, re.MULTILINE
    )


def test_the_pictures_are_made_by_their_script(repository: Path, tmp_path: Path) -> None:
    """After a change: python scripts/cli_pictures.py"""
    command = [sys.executable, repository / "scripts" / "cli_pictures.py", tmp_path / "made.md"]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    shown = shape((repository / "docs" / "pictures.md").read_text())
    assert shape((tmp_path / "made.md").read_text()) == shown
    assert {"tokens/s", "tier", "host", "disk"} <= set(shown[1]), "the part about top was read"
