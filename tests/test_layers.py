"""The layers and the sizes of docs/architecture.md, so that `make test` holds them as `make check` does."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FILE_LINES_MAX = 500  # until files end where their concepts do, whatever they count
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 6

FORBIDDEN = {
    "an upward import": ("tiers/open.py", "import tiered_kv.engine"),
    "a sibling's import": ("cli/extra.py", "import tiered_kv.vllm"),
    "vllm outside its door": ("engine/extra.py", "import vllm"),
    "torch outside transfer": ("chunks/extra.py", "import torch"),
    "fsspec outside object_store": ("tiers/extra.py", "import fsspec"),
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


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def parameter_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([n for n in names if n not in ("self", "cls")])


def oversized(source: str) -> list[str]:
    tree = ast.parse(source)
    found = []
    if (lines := len(source.splitlines())) > FILE_LINES_MAX:
        found.append(f"{lines} lines")
    for function in functions(tree):
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > FUNCTION_LINES_MAX:
            found.append(f"{function.name}: {lines} lines")
        if (count := parameter_count(function)) > PARAMETERS_MAX and not is_command(function):
            found.append(f"{function.name}: {count} parameters")
    return found


def is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A command of the CLI: its parameters are the options a user may give."""
    return any("command" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_files_and_functions_stay_small(repository: Path) -> None:
    modules = sorted((repository / "tiered_kv").rglob("*.py"))
    assert modules
    found = {str(m.relative_to(repository)): oversized(m.read_text()) for m in modules}
    assert {module: sizes for module, sizes in found.items() if sizes} == {}


def test_every_module_says_what_it_owns(repository: Path) -> None:
    modules = [m for m in (repository / "tiered_kv").rglob("*.py") if m.read_text().strip()]
    silent = [str(m.relative_to(repository)) for m in modules if ast.get_docstring(ast.parse(m.read_text())) is None]
    assert silent == []


def test_the_size_check_notices() -> None:
    long = "def long():\n" + "    pass\n" * FUNCTION_LINES_MAX
    wide = "def wide(self, a, b, c, d, e, f, *, g): pass\n"
    assert oversized(long + wide) == ["long: 71 lines", "wide: 7 parameters"]
    assert oversized("x = 1\n" * (FILE_LINES_MAX + 1)) == [f"{FILE_LINES_MAX + 1} lines"]
