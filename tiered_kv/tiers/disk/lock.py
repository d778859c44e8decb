"""The exclusive lock of a disk directory: at most one server writes into it at a time.

Owns ``server.lock``. Reads, but never writes, ``server.json``, in which the holder tells newcomers its socket. Called
by ``tier.py``.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import time
from pathlib import Path

from tiered_kv.errors import DirectoryLocked, TierUnavailable
from tiered_kv.machine import forgotten_in_children
from tiered_kv.tiers.disk.files import read_small_file

LOCK_FILE = "server.lock"
ARENA_LOCK = re.compile(r"arena-[0-9a-f]{16}\.lock")
HOLDER_FILE = "server.json"
HOLDER_BYTES_MAX = 64 << 10
SHOWN_MAX = 200


class DirectoryLock:
    """An advisory lock that the kernel drops when its holder dies, so a crash leaves nothing to clean up."""

    def __init__(self, root: Path) -> None:
        """Take the lock without waiting.

        Raises:
            DirectoryLocked: Another process holds it; the message names the process and its socket where known.
            TierUnavailable: The lock file cannot be opened or locked.
        """
        self._path = path = os.fspath(root / LOCK_FILE)
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as exc:
            raise TierUnavailable(f"cannot open the lock file. errno={exc.errno} path={path}") from exc
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(self._descriptor)
            if exc.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise DirectoryLocked(f"another server owns the directory. {_holder(root)} path={root}") from exc
            raise TierUnavailable(f"cannot lock the directory. errno={exc.errno} path={path}") from exc
        self._status = os.fstat(self._descriptor)  # of an open file: it stays what it is
        self._held = True
        self._checked_s = 0.0
        forgotten_in_children(self)

    def check(self, age_s: float = 0.0) -> None:
        """Make sure that the directory is still the locked one: who removes it removes the lock, and may be followed.

        Args:
            age_s: So old a look, of any thread, may be.

        Raises:
            TierUnavailable: The lock file is gone or another one.
        """
        now_s = time.monotonic()
        if now_s - self._checked_s < age_s:
            return
        try:
            is_ours = os.path.samestat(os.stat(self._path, follow_symlinks=False), self._status)
        except OSError as exc:
            raise TierUnavailable(f"the directory or its lock is gone. errno={exc.errno} path={self._path}") from exc
        if not is_ours:
            raise TierUnavailable(f"the directory was replaced; its lock is not ours. path={self._path}")
        self._checked_s = now_s

    def release(self) -> None:
        """Give the directory back. Idempotent."""
        if self._held:
            self._held = False
            # Explicitly, not by the close alone: a child that is just being started may hold a copy of the descriptor.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            with contextlib.suppress(OSError):  # unlocked, and the descriptor is gone whatever close answers
                os.close(self._descriptor)

    def forget_after_fork(self) -> None:
        """In a child of this process: do not hold it for longer than the parent does, nor give it back for that."""
        if self._held:
            self._held = False
            os.close(self._descriptor)


def _holder(root: Path) -> str:
    try:
        record = json.loads(read_small_file(root / HOLDER_FILE, HOLDER_BYTES_MAX))
        return f"pid={int(record['pid'])} socket={ascii(str(record['socket'])[:SHOWN_MAX])[1:-1]}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return "pid=unknown socket=unknown"  # a CLI command holds it, or a server that is only starting
