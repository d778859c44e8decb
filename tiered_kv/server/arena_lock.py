"""Who maps which server's arena: a shared file lock per mapping process, dropped by the kernel when it exits."""

import fcntl
import logging
import os
import re
from pathlib import Path

from tiered_kv.errors import ConfigError
from tiered_kv.tiers.disk_io import is_own_file

logger = logging.getLogger(__name__)

_NAME = re.compile(r"arena-[0-9a-f]{16}\.lock")


def _path(root: Path, server_id: str) -> Path:
    return root / f"arena-{server_id}.lock"


def hold_arena_lock(root: Path, server_id: str) -> int:
    """Note that this process maps the arena of ``server_id``; close the returned descriptor after unmapping.

    Raises:
        ConfigError: The directory cannot be written from here.
    """
    try:
        fd = os.open(_path(root, server_id), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise ConfigError(f"cannot lock the arena in the server's directory: {exc}") from exc
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def release_stale_arena_locks(root: Path, own_id: str) -> int:
    """Remove the lock files of other servers that nobody holds; returns how many are held still."""
    held = 0
    for path in root.glob("arena-*.lock"):
        if path == _path(root, own_id) or _NAME.fullmatch(path.name) is None:
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as exc:
            logger.warning("not a lock file of ours, left alone. path=%s: %s", path, exc)
            continue
        try:
            status = os.fstat(fd)
            if status.st_size or not is_own_file(status, (os.geteuid(),)):
                logger.warning("not a lock file of ours, left alone. path=%s owner=%d", path, status.st_uid)
                continue
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            logger.info("removed: the lock of an arena that nobody maps any more. path=%s", path)
        except BlockingIOError:
            held += 1
        finally:
            os.close(fd)
    return held
