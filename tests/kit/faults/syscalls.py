"""The n-th system call below a directory fails, for tests that try every n (SQLite's way of testing I/O errors), or so
many calls from there on.

Calls are counted where Python makes them: the functions of ``os`` that take a path or a descriptor, and ``open``. What
C libraries do by themselves is not seen (the index's SQLite has tests of its own).
"""

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BY_PATH = ("open", "stat", "lstat", "unlink", "replace", "rename", "mkdir", "rmdir", "scandir", "listdir", "statvfs")
BY_DESCRIPTOR = ("pwrite", "preadv", "pread", "fstat", "fsync", "close")


class SyscallFaults:
    """Counts the calls that concern ``root`` and fails one of them, or some in a row.

    Attributes:
        calls: The names of the calls so far.
        failed: The name of the call that failed last; empty until then.
    """

    def __init__(self, root: Path, fail_at: int | None = None, error: int = 0, in_a_row: int = 1) -> None:
        self.calls: list[str] = []
        self.failed = ""
        self._root = str(root)
        self._failing = range(0) if fail_at is None else range(fail_at, fail_at + in_a_row)
        self._error = error
        self._descriptors: set[int] = set()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Count and fail within this block. One at a time, and one thread."""
        real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in (*BY_PATH, *BY_DESCRIPTOR)}
        real_open = builtins.open
        for name in BY_PATH:
            setattr(os, name, self._by_path(name, real[name]))
        for name in BY_DESCRIPTOR:
            setattr(os, name, self._by_descriptor(name, real[name]))
        builtins.open = io.open = self._by_path("open", real_open)
        try:
            yield
        finally:
            builtins.open = io.open = real_open
            for name, function in real.items():
                setattr(os, name, function)

    def _by_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if isinstance(path, int) or not os.fsdecode(path).startswith(self._root):
                return real(path, *arguments, **options)
            self._count(name, path)
            result = real(path, *arguments, **options)
            if isinstance(result, int) and name == "open":
                self._descriptors.add(result)
            return result

        return call

    def _by_descriptor(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int, *arguments: Any, **options: Any) -> Any:
            if descriptor not in self._descriptors:
                return real(descriptor, *arguments, **options)
            if name == "close":  # as the kernel does: the descriptor is gone whatever close answers
                self._descriptors.discard(descriptor)
                real(descriptor)
                self._count(name)
                return None
            self._count(name)
            return real(descriptor, *arguments, **options)

        return call

    def _count(self, name: str, path: Any = "") -> None:
        number = len(self.calls)
        self.calls.append(name)
        if number in self._failing:
            self.failed = name
            raise OSError(self._error, os.strerror(self._error), os.fsdecode(path) or None)
