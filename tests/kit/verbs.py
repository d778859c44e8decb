"""Verbs of the command line, run in this process, and tiers for them to act on."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.kit.s3 import S3
from tiered_kv.cli.main import app
from tiered_kv.ops import disk_storage
from tiered_kv.ops.disk_storage import DiskStorage
from tiered_kv.ops.open import open_storage
from tiered_kv.ops.storage import Content, Storage


def run(*arguments: object) -> Result:
    """One call of `tiered-kv`, with nobody at a terminal."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def report(*arguments: object) -> Any:
    """What a verb that succeeds prints with ``--json``."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def explained_hit(uri: str, prompt: list[int], folder: Path) -> int:
    """How many tokens `explain` says an engine would be offered; ``folder`` is none of the tier's."""
    file = folder / "prompt.json"
    file.write_text(json.dumps(prompt))
    hit: int = report("explain", uri, "--tokens", file)["hit_tokens"]
    return hit


def complaint(*arguments: object, code: int = 2) -> str:
    """What a verb that fails says."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.stderr


def refuse_deletions(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Have a directory's server fail to delete what a command lists from now on, and the command not wait for it."""
    blobs, elsewhere, look = root / "blobs", root.with_name("elsewhere"), DiskStorage.look

    def look_and_move(storage: DiskStorage, *given: Any) -> Content:
        if blobs.is_symlink():
            blobs.unlink()
            elsewhere.rename(blobs)
        content = look(storage, *given)
        blobs.rename(elsewhere)
        blobs.symlink_to(elsewhere)  # nothing of ours is deleted behind a link, whoever may
        return content

    patch.setattr(DiskStorage, "look", look_and_move)
    patch.setattr(disk_storage, "REMOVAL_WAIT_S", 0.5)


@dataclass(frozen=True)
class Tier:
    """A tier as a user names it."""

    uri: str
    settings: dict[str, object] = field(default_factory=dict, repr=False)

    def sets(self, option: str = "--set") -> list[str]:
        """The settings as arguments."""
        return [word for name, value in self.settings.items() for word in (option, f"{name}={json.dumps(value)}")]

    def open(self) -> Storage:
        return open_storage(self.uri, self.settings)


def directory_tier(path: Path) -> Tier:
    """A directory that is there, with a limit that no test reaches."""
    path.mkdir()
    return Tier(f"file://{path}", {"disk_bytes": 1 << 30})


def tier_of(request: pytest.FixtureRequest, place: Path) -> Tier:
    """An empty tier of the kind that a fixture's parameter names: ``disk`` or ``s3``."""
    return s3_tier(request.getfixturevalue("s3")) if request.param == "s3" else directory_tier(place / "kv")


def s3_tier(s3: S3) -> Tier:
    """A fresh prefix of the test's bucket."""
    return Tier(s3.uri(s3.new_prefix()), {"storage_options": s3.options()})
