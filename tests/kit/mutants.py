"""Mutants of single functions, made from their source, and the tests of a file run against them.

Mutation testing in small: leave one check of a function out, and some test must fail. Which checks there are is read
from the source, so a new one is tried as well. Only conditions and calls for their own sake are touched; what computes
a value is not. Called by the tests of mutations.
"""

import ast
import importlib.util
import inspect
import itertools
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest


class Mutant(NamedTuple):
    """A function without one of its checks, and the source of what was left out."""

    dropped: str
    function: FunctionType


def recompiled(function: FunctionType) -> FunctionType:
    """The function made anew from its source, nothing left out: what its mutants are compared with."""
    return _compiled(ast.parse(textwrap.dedent(inspect.getsource(function))), function)


def mutants(function: FunctionType) -> Iterator[Mutant]:
    """The function without each of its conditions, parts of conditions and calls for their own sake, one at a time."""
    source = textwrap.dedent(inspect.getsource(function))
    for number in itertools.count():
        tree, dropper = ast.parse(source), _Dropper(number)
        dropper.visit(tree)
        if dropper.dropped is None:
            return
        yield Mutant(dropper.dropped, _compiled(ast.fix_missing_locations(tree), function))


class _Dropper(ast.NodeTransformer):
    """Leaves out the check of that number, if there are so many."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.dropped: str | None = None

    def _is_next(self, node: ast.AST) -> bool:
        self._left -= 1
        if self._left == -1:
            self.dropped = ast.unparse(node)
        return self._left == -1

    def visit_If(self, node: ast.If) -> ast.AST:
        if self._is_next(node.test):
            node.test = ast.Constant(False)
            return node
        if isinstance(node.test, ast.BoolOp):
            neutral = isinstance(node.test.op, ast.And)
            node.test.values = [ast.Constant(neutral) if self._is_next(part) else part for part in node.test.values]
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        is_call = isinstance(node.value, ast.Call)
        return ast.Pass() if is_call and self._is_next(node) else node


def _compiled(tree: ast.Module, original: FunctionType) -> FunctionType:
    names: dict[str, Any] = {}
    exec(compile(tree, f"<mutant of {original.__qualname__}>", "exec"), dict(original.__globals__), names)
    code = names[original.__name__].__code__
    mutant = FunctionType(code, original.__globals__, original.__name__, original.__defaults__)
    mutant.__kwdefaults__ = original.__kwdefaults__
    return mutant


def first_failure(path: Path, about: str = "") -> str | None:
    """Name of the first test of a file that fails, of those with ``about`` in their names.

    The file is imported anew, so that it sees what was patched before. Fixtures are those of the file, ``tmp_path`` and
    ``monkeypatch``; tests that ask for others, or draw examples, are left out.
    """
    spec = importlib.util.spec_from_file_location(f"mutated_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, test in list(vars(module).items()):
        if not name.startswith("test_") or about not in name or hasattr(test, "hypothesis"):
            continue
        for arguments in _parameter_sets(test):
            with ExitStack() as after:
                fixtures = _Fixtures(module, after)
                try:
                    test(**arguments, **fixtures.asked_by(test, arguments))
                except _Unknown:
                    break
                except (Exception, pytest.fail.Exception):  # noqa: BLE001 - a test fails with whatever it meets
                    return f"{name}{list(arguments.values()) or ''}"
    return None


def _parameter_sets(test: Callable[..., object]) -> list[dict[str, object]]:
    sets: list[dict[str, object]] = [{}]
    for mark in getattr(test, "pytestmark", []):
        if mark.name != "parametrize":
            continue
        names, values = mark.args
        names = names.split(", ") if isinstance(names, str) else list(names)
        rows = [[value] if len(names) == 1 else list(value) for value in values]
        sets = [known | dict(zip(names, row, strict=True)) for known in sets for row in rows]
    return sets


class _Unknown(Exception):
    """A test asks for a fixture that is not known here."""


class _Fixtures:
    """The fixtures of one test; ``after`` ends them."""

    def __init__(self, module: ModuleType, after: ExitStack) -> None:
        self._module = module
        self._after = after
        self._made: dict[str, object] = {}

    def asked_by(self, function: Callable[..., object], given: dict[str, object]) -> dict[str, object]:
        return {name: self._get(name) for name in inspect.signature(function).parameters if name not in given}

    def _get(self, name: str) -> object:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> object:
        if name == "tmp_path":
            return Path(self._after.enter_context(tempfile.TemporaryDirectory()))
        if name == "monkeypatch":
            return self._after.enter_context(pytest.MonkeyPatch.context())
        fixture = getattr(getattr(self._module, name, None), "__wrapped__", None)
        if fixture is None:
            raise _Unknown(name)
        arguments = self.asked_by(fixture, {})
        if inspect.isgeneratorfunction(fixture):
            return self._after.enter_context(contextmanager(fixture)(**arguments))
        return fixture(**arguments)
