"""What an open removes that a crash or an ended namespace left behind, and what it says of that.

Owns the names under which files of ours are written before they are renamed. A file goes only if four things say that
it is ours: the marker in the root (``marker.py``), the place, the name and the owner; and it must be a plain file.
Everything else stays and is named. Called by ``tier.py`` once, under the directory's lock.
"""

import contextlib
import logging
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Final

from tiered_kv.tiers.disk.files import is_own_file
from tiered_kv.tiers.disk.scan import NAMESPACE_FILE

logger = logging.getLogger(__name__)

TEMP_NAME: Final = re.compile(
    r"[0-9]{1,10}-[0-9]{1,19}|probe-[0-9]{1,10}(-[0-9a-f]{8})?|namespace\.json\.[0-9]{1,10}-[0-9a-f]{8}"
)
"""A file of ours in ``tmp/``: a blob or a record that is being written, or the probe for O_DIRECT."""

SMALL_TEMP_NAME: Final = re.compile(r"(tiered_kv|server|pins|epochs)\.json\.[0-9]{1,10}(-[0-9a-f]{8})?")
"""A small file of the root that is being written."""

_NAMESPACE_NAME: Final = re.compile(r"[0-9a-f]{32}")
_FAN_OUT_NAME: Final = re.compile(r"[0-9a-f]{2}")

STALE_S: Final = 3600.0
"""Age of a small file that nobody is writing any more. The command line writes pins without the directory's lock."""

LINES_MAX: Final = 20
"""Files that are named one by one in the log; of more only the number is told."""


class SweepLog:
    """Says which files were removed or left, and why: the first of each kind by name, then how many more."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._counts: Counter[tuple[str, str]] = Counter()

    def removed(self, path: Path | str, why: str) -> None:
        """A file of ours is gone."""
        self._say(logging.INFO, "removed", path, why)

    def left(self, path: Path | str, why: str) -> None:
        """Something is not ours and stays."""
        self._say(logging.WARNING, "left alone", path, why)

    def end(self) -> None:
        """Tell how many were not named."""
        for (what, why), count in self._counts.items():
            if count > LINES_MAX:
                logger.warning("%s as well: %d more. path=%s why=%s", what, count - LINES_MAX, self._root, why)
        self._counts.clear()

    def _say(self, level: int, what: str, path: Path | str, why: str) -> None:
        self._counts[what, why] += 1
        if self._counts[what, why] <= LINES_MAX:
            logger.log(level, "%s: %s. path=%s", what, why, ascii(str(path))[1:-1])


def is_own_temp_file(name: str, status: os.stat_result, owners: Collection[int]) -> bool:
    """Whether an entry of ``tmp/`` in a marked directory is a file of ours."""
    return TEMP_NAME.fullmatch(name) is not None and is_own_file(status, owners)


def sweep_temp_files(root: Path, temp: Path, owners: Collection[int], log: SweepLog) -> None:
    """Remove what cut-off writes left in ``tmp/``, and small files of the root that were never renamed.

    Raises:
        OSError: A directory cannot be listed, or a file of ours not be removed.
    """
    for entry in _entries(temp):
        status = entry.stat(follow_symlinks=False)
        if is_own_temp_file(entry.name, status, owners):
            os.unlink(entry.path)
            log.removed(entry.path, "a write that was cut off")
        else:
            log.left(entry.path, _why_not(status, owners))
    stale_s = time.time() - STALE_S
    for entry in _entries(root):
        if SMALL_TEMP_NAME.fullmatch(entry.name):
            with contextlib.suppress(FileNotFoundError):  # the command line has just renamed its own
                status = entry.stat(follow_symlinks=False)
                if is_own_file(status, owners) and status.st_mtime < stale_s:
                    os.unlink(entry.path)
                    log.removed(entry.path, "a small file whose write was cut off")


def sweep_namespaces(blobs: Path, held: Collection[bytes], owners: Collection[int], log: SweepLog) -> None:
    """Remove the directories of namespaces that have no blob: with each reset of an engine begins one more.

    An engine that opens such a namespace again writes its record again. A directory with anything else in it stays.

    Args:
        held: Namespaces with blobs.

    Raises:
        OSError: ``blobs`` cannot be listed.
    """
    names = {namespace.hex() for namespace in held}
    for entry in _entries(blobs):
        if (
            _NAMESPACE_NAME.fullmatch(entry.name)
            and entry.name not in names
            and entry.is_dir(follow_symlinks=False)
            and _remove_namespace(entry.path, owners)
        ):
            log.removed(entry.path, "a namespace without blobs")


def _remove_namespace(path: str, owners: Collection[int]) -> bool:
    records = []
    try:
        for entry in _entries(path):
            if entry.is_dir(follow_symlinks=False) and _FAN_OUT_NAME.fullmatch(entry.name):
                os.rmdir(entry.path)  # fails if anything is in it
            elif entry.name == NAMESPACE_FILE and is_own_file(entry.stat(follow_symlinks=False), owners):
                records.append(entry.path)
            else:
                return False
        for record in records:
            os.unlink(record)
        os.rmdir(path)
    except OSError:  # it stays, and costs nothing but its room
        return False
    return True


def _entries(directory: Path | str) -> "list[os.DirEntry[str]]":
    with os.scandir(directory) as entries:
        return list(entries)


def _why_not(status: os.stat_result, owners: Collection[int]) -> str:
    if stat.S_ISREG(status.st_mode) and status.st_uid not in owners:
        return "it is among the temp files and belongs to another user"
    return "it is among the temp files and none of ours"
