"""Directories of a large cache are read by other processes, while the caller works on what these have found.

A help and no more: whatever they do not tell, the caller reads itself (``entries.py``). Called by ``scan.py``.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self

from tiered_kv.tiers.disk import entries
from tiered_kv.tiers.disk.entries import Entries

logger = logging.getLogger(__name__)

PROCESSES_MAX: Final = 4
BATCH: Final = 64
"""Directories that one process reads before it ends: a tenth of a second and more, of a cache that is worth it."""

_Batch = dict[str, Entries]


class ReadAhead:
    """Reads directories in other processes, in the order given, as many at once as there are cores.

    Threads: one owner. What is read and not taken yet is held: 32 bytes a file.
    """

    def __init__(self, directories: Sequence[str], suffix: str) -> None:
        """Begin. With one core nothing is read ahead.

        Args:
            suffix: Ends the name of a blob (``entries.read_entries``).
        """
        self._suffix = suffix
        self._batches: dict[str, Future[_Batch]] = {}
        self._pool: ThreadPoolExecutor | None = None
        processes = min(PROCESSES_MAX, len(os.sched_getaffinity(0)))
        if processes < 2 or not directories:
            return
        # Threads that wait for one process each.
        self._pool = ThreadPoolExecutor(processes, thread_name_prefix="tiered_kv-listing")
        try:
            for start in range(0, len(directories), BATCH):
                batch = directories[start : start + BATCH]
                self._batches |= dict.fromkeys(batch, self._pool.submit(self._read, batch))
        except RuntimeError as exc:  # no thread to be had
            logger.debug("directories are not read ahead: %s", exc)

    def take(self, directory: str) -> Entries | None:
        """What a directory has, once; None: it was not read."""
        batch = self._batches.pop(directory, None)
        return None if batch is None else batch.result().pop(directory, None)

    def _read(self, directories: Sequence[str]) -> _Batch:
        asked = b"".join(os.fsencode(directory) + b"\0" for directory in directories)
        command = [sys.executable, "-I", "-S", entries.__file__, self._suffix]
        try:
            done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
        except OSError as exc:  # no process to be had
            logger.debug("directories are not read ahead: %s", exc)
            return {}
        return dict(zip(directories, entries.unpack(done.stdout), strict=False))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
