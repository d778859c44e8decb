"""Spreads memory that a thread takes over all sockets, so that no GPU has all of the arena across the link.

A thread takes memory from its own node, and the arena is given its memory by a few threads of the server: without this,
GPUs of the other socket copy through the link between the two. Not run on a machine with two nodes: tests look at what
is read from ``/sys`` and at what the kernel is asked for.

Nothing happens on one node, where the operator has set a policy for the process (numactl), or where the kernel refuses.
"""

from __future__ import annotations

import ctypes
import logging
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

NODES: Final = Path("/sys/devices/system/node")
_DEFAULT, _INTERLEAVE = 0, 3
_NODES_MAX = 1024
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}  # set_mempolicy and get_mempolicy; glibc has neither

Syscall = Callable[..., int]
"""A system call by number: what it returns, or -1 with errno set."""


@contextmanager
def interleaved(nodes: Path = NODES, syscall: Syscall | None = None) -> Iterator[None]:
    """Take memory from all nodes in turn, in this thread and as long as the context lasts.

    Args:
        nodes: Where the kernel lists its nodes.
        syscall: Of this machine's C library, unless a test gives another one.
    """
    numbers, calls = memory_nodes(nodes), _CALLS.get(platform.machine())
    if len(numbers) < 2 or calls is None:
        yield
        return
    set_policy, get_policy = calls
    call = syscall or _syscall()
    mode = ctypes.c_int()
    # Where the operator has bound the process to nodes, or spread it, that is what he wants.
    is_ours = call(get_policy, ctypes.byref(mode), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0)) == 0
    if not is_ours or mode.value != _DEFAULT or call(set_policy, _INTERLEAVE, *_mask(numbers)) != 0:
        _say_once()
        yield
        return
    try:
        yield
    finally:
        call(set_policy, _DEFAULT, None, ctypes.c_ulong(0))


def memory_nodes(nodes: Path = NODES) -> list[int]:
    """Nodes that have both processors and memory: the GPU's own memory is a node too on some machines (GH200)."""
    found = None
    for name in ("online", "has_cpu", "has_memory"):
        try:
            listed = _numbers((nodes / name).read_text())
        except (OSError, ValueError):
            continue  # a kernel without NUMA, or without this list
        found = listed if found is None else found & listed
    return sorted(found or ())


def _numbers(text: str) -> set[int]:
    """A kernel's list: ``0-1,4``."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    return {number for number in numbers if number < _NODES_MAX}


def _mask(numbers: list[int]) -> tuple[ctypes.Array[ctypes.c_ulong], ctypes.c_ulong]:
    """Nodes as the kernel takes them: words of bits, and one more than the number of bits that it may look at."""
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    words = (ctypes.c_ulong * (_NODES_MAX // bits))()
    for number in numbers:
        words[number // bits] |= 1 << number % bits
    return words, ctypes.c_ulong(_NODES_MAX + 1)


@cache
def _say_once() -> None:
    logger.info("the arena's memory is not interleaved: the process has a policy, or the kernel refused")


def _syscall() -> Syscall:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc.syscall
