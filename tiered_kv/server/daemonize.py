"""Leaving the client's world: what a server must not inherit from the vLLM worker that happens to start it.

vLLM pins a worker to one core and binds its memory to one node; a server with that inheritance would hash and copy on
that same core, and take the whole machine's cache from one node. Called by ``server/__main__.py``, before any thread.
"""

import ctypes
import logging
import os
import platform
import resource
import signal
import sys
from typing import Final

logger = logging.getLogger(__name__)

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "s390x": 269}
_MPOL_DEFAULT = 0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_HEAP = ((_M_ARENA_MAX, 2), (_M_MMAP_THRESHOLD, 128 << 10), (_M_TRIM_THRESHOLD, 128 << 10))
_CPUS_MAX = 8192
"""Bits of the affinity mask; the kernel keeps those of processors that exist and that the cpuset allows."""

SWITCH_S: Final = 0.0003


def let_loop_answer() -> None:
    """Have a thread that computes make way for the server's loop after 0.3 ms, where Python waits for 5.

    Seals, writes and reads of small chunks are as much Python as the loop is, in eight threads and more.
    """
    sys.setswitchinterval(SWITCH_S)


def detach() -> None:
    """Leave the process tree, the session and the signal mask of the process that started this one."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def use_whole_machine() -> None:
    """Give up the limits that were set for the process that started this one; what fails is logged."""
    raise_descriptor_limit()
    keep_heap_small()
    _use_all_processors()
    _use_all_memory()


def raise_descriptor_limit() -> None:
    """Two descriptors per client and two per slab: more than the usual soft limit of 1024 allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def keep_heap_small() -> None:
    """Have glibc give memory back, which by default it keeps in ever more pieces.

    Two heaps for some 45 threads, where each had its own: what a thread frees stays in its heap. And large blocks from
    the kernel, always: glibc raises that threshold to the size of the largest block ever freed, and bodies and answers
    of a megabyte then leave holes between what lives on (docs/decisions/0012 has the figures). Before any thread; other
    C libraries have neither.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in _HEAP:
            mallopt(ctypes.c_int(option), ctypes.c_int(value))


def _use_all_processors() -> None:
    """Run on every processor that the cpuset allows."""
    try:
        os.sched_setaffinity(0, range(_CPUS_MAX))
    except OSError as exc:
        logger.warning("the processor affinity could not be reset: %s", exc)


def _use_all_memory() -> None:
    """Take memory from every node that the cpuset allows. Python has no set_mempolicy(2), so libc is called."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        logger.warning("the memory policy was not reset: unknown machine. machine=%s", platform.machine())
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(_MPOL_DEFAULT), None, ctypes.c_ulong(0)) != 0:
        code = ctypes.get_errno()
        if code != 38:  # ENOSYS: a kernel without NUMA has no policy to reset
            logger.warning("the memory policy could not be reset: %s", os.strerror(code))
