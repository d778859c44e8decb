"""The layers of docs/architecture.md and the length of functions, so that `make test` holds them as `make check` does.

A file ends where a concept ends and a function takes what it needs: neither has a limit.
"""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FUNCTION_LINES_MAX = 70

FORBIDDEN = {
    "an upward import": ("tiers/open.py", "import tiered_kv.engine"),
    "a sibling's import": ("cli/extra.py", "import tiered_kv.vllm"),
    "vllm outside its door": ("engine/extra.py", "import vllm"),
    "torch outside transfer": ("chunks/extra.py", "import torch"),
    "fsspec outside the object store": ("tiers/extra.py", "import fsspec"),
    "a module without a layer": ("helpers.py", ""),
}


def lint_imports(directory: Path) -> subprocess.CompletedProcess[str]:
    # PYTHONPATH rather than the editable install: the copy in `directory` is what is judged.
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    environment = {"PYTHONPATH": str(directory), "PATH": "", "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture
def package_copy(repository: Path, tmp_path: Path) -> Path:
    shutil.copytree(repository / "tiered_kv", tmp_path / "tiered_kv", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repository / "pyproject.toml", tmp_path)
    return tmp_path


def test_imports_point_down(repository: Path) -> None:
    result = lint_imports(repository)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("case", FORBIDDEN)
def test_the_contracts_notice(package_copy: Path, case: str) -> None:
    file, line = FORBIDDEN[case]
    with (package_copy / "tiered_kv" / file).open("a") as module:
        module.write(f"\n{line}\n")
    result = lint_imports(package_copy)
    assert result.returncode == 1
    assert str(file).removesuffix(".py").replace("/", ".") in result.stdout


FIND_CIRCLE = """
import graphlib, grimp
graph = grimp.build_graph("tiered_kv", cache_dir=None)
imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
try:
    graphlib.TopologicalSorter(imports).prepare()
except graphlib.CycleError as exc:
    print(*exc.args[1])
"""


def import_circle(directory: Path) -> list[str]:
    """Modules that import each other in a circle; none: an empty list."""
    environment = {"PYTHONPATH": str(directory), "PATH": ""}
    command = [sys.executable, "-c", FIND_CIRCLE]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()


def test_no_modules_import_each_other_in_a_circle(repository: Path) -> None:
    assert import_circle(repository) == []


def test_a_circle_is_noticed(package_copy: Path) -> None:
    with (package_copy / "tiered_kv" / "tiering" / "types.py").open("a") as module:
        module.write("\nimport tiered_kv.tiering.index\n")
    assert {"tiered_kv.tiering.types", "tiered_kv.tiering.index"} <= set(import_circle(package_copy))


def reaches_through(source: str) -> list[str]:
    """Uses of the state machine through an engine: the engine is its only face."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    return [f"line {node.lineno}" for node in nodes if node.attr == "tiering" and not isinstance(node.ctx, ast.Store)]


def test_nobody_reaches_through_the_engine(repository: Path) -> None:
    package = repository / "tiered_kv"
    outside = [m for m in package.rglob("*.py") if m.relative_to(package).parts[0] not in ("engine", "testing")]
    assert len(outside) > 100
    found = {str(m.relative_to(repository)): reaches_through(m.read_text()) for m in outside}
    assert {module: places for module, places in found.items() if places} == {}


def test_a_reach_through_is_noticed() -> None:
    assert reaches_through("x = 1\nself._engine.tiering.quotas.set(x)") == ["line 2"]
    assert reaches_through("from tiered_kv.tiering.types import SlotId\ntiering = 1") == []


def test_no_two_classes_have_one_name(repository: Path) -> None:
    """But for messages, which are named after what they say and written ``m.Lookup``."""
    package = repository / "tiered_kv"
    found: dict[str, list[str]] = {}
    for module in sorted(package.rglob("*.py")):
        place = str(module.relative_to(package))
        for node in ast.parse(module.read_text()).body:
            if isinstance(node, ast.ClassDef) and place != "server/protocol.py":
                found.setdefault(node.name, []).append(place)
    assert len(found) > 300
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def oversized(source: str) -> list[str]:
    sizes = {f.name: (f.end_lineno or 0) - f.lineno + 1 for f in functions(ast.parse(source))}
    return [f"{name}: {lines} lines" for name, lines in sizes.items() if lines > FUNCTION_LINES_MAX]


def test_functions_stay_small(repository: Path) -> None:
    modules = sorted((repository / "tiered_kv").rglob("*.py"))
    assert modules
    found = {str(m.relative_to(repository)): oversized(m.read_text()) for m in modules}
    assert {module: sizes for module, sizes in found.items() if sizes} == {}


def test_every_module_says_what_it_owns(repository: Path) -> None:
    modules = [m for m in (repository / "tiered_kv").rglob("*.py") if m.read_text().strip()]
    silent = [str(m.relative_to(repository)) for m in modules if ast.get_docstring(ast.parse(m.read_text())) is None]
    assert silent == []


NAMED = re.compile(r"``([\w/]+\.py)``")


def named_files(text: str | None) -> list[str]:
    """Files of ours that a docstring names; vLLM's begin with ``v1/``."""
    return [name for name in NAMED.findall(text or "") if not name.startswith("v1/")]


def named_callers(text: str | None) -> list[str]:
    """Files of which a docstring says that they call the module."""
    said = re.search(r"Called by (.*?)(?:\.\s|\.$|;|: )", (text or "").replace("\n", " "))
    return named_files(said[1]) if said else []


def test_files_that_a_module_names_are_there_and_its_callers_import_it(repository: Path) -> None:
    package = repository / "tiered_kv"
    trees = {module: ast.parse(module.read_text()) for module in sorted(package.rglob("*.py"))}
    imported = {
        module: {
            name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        }
        for module, tree in trees.items()
    }
    wrong, callers = [], 0
    for module, tree in trees.items():
        text = ast.get_docstring(tree)
        name = ".".join(module.relative_to(repository).with_suffix("").parts)
        wrong += [(name, one) for one in named_files(text) if not any(m.match(one) for m in trees)]
        using = [other for other in trees if name in imported[other]]
        for one in named_callers(text):
            callers += 1
            wrong += [(name, "is not imported by", one)] if not any(other.match(one) for other in using) else []
    assert callers > 30
    assert wrong == []


def test_a_caller_that_is_named_is_read() -> None:
    assert named_callers("Owns x (``a.py``). Called by ``b.py`` and\n``c/d.py``. Not ``e.py``.") == ["b.py", "c/d.py"]


def test_the_size_check_notices() -> None:
    long = "def long():\n" + "    pass\n" * FUNCTION_LINES_MAX
    assert oversized(long) == ["long: 71 lines"]
