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

logger = logging.getLogger(__name__)

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "s390x": 269}
_MPOL_DEFAULT = 0
_M_ARENA_MAX = -8
_MALLOC_ARENAS = 2
_CPUS_MAX = 8192
"""Bits of the affinity mask; the kernel keeps those of processors that exist and that the cpuset allows."""


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
    share_malloc_arenas()
    _use_all_processors()
    _use_all_memory()


def raise_descriptor_limit() -> None:
    """Two descriptors per client and one per slab: more than the usual soft limit of 1024 allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def share_malloc_arenas() -> None:
    """Have all threads take their memory from two heaps of glibc, where each of some 45 threads had its own.

    What a thread frees stays in its heap, so bursts that different threads happen to handle add up. Its part in the
    growth that the soak sees was not measured alone (docs/decisions/0012). Before any thread; other C libraries have no
    such heaps.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(ctypes.c_int(_M_ARENA_MAX), ctypes.c_int(_MALLOC_ARENAS))


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
