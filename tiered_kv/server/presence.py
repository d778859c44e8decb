"""Whether a server can still be found: its ``server.json`` is what names it, and its directory may be removed.

Whoever clears the directory of a running server (``rm -rf``, a cleaner of old files) takes its lock and its name along.
Nobody finds that server any more, and another one may open the directory. So it ends, as after a loss of its last
client; its engines look for a server in the directory, and start one.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from tiered_kv.server.paths import ServerInfo, info_path, write_info

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0


class Presence:
    """The ``server.json`` of one server.

    Threads: one owner. It is looked at in the background, one look at a time: a file system that hangs must not hold
    up the server's loop.
    """

    def __init__(
        self, root: Path, info: ServerInfo, in_background: Callable[[Callable[[], None]], None],
        monotonic: Callable[[], float],
    ) -> None:  # fmt: skip
        """Publish who owns the directory."""
        write_info(root, info)
        self._path = info_path(root)
        self._in_background = in_background
        self._monotonic = monotonic
        self._file = self._identity()
        self._seen = self._file
        self._is_looking = False
        self._due_s = monotonic()
        self._is_lost = False

    def is_found(self) -> bool:
        """Whether the directory still named this server at the last look. Once it does not, that is final."""
        if not self._is_looking and self._monotonic() >= self._due_s:
            self._is_looking = True
            self._in_background(self.look)
        if not self._is_lost and self._seen != self._file:
            self._is_lost = True
            logger.error(
                "the directory of this server was removed or taken over, so it ends and its engines start another one. "
                "path=%s", self._path,
            )  # fmt: skip
        return not self._is_lost

    def look(self) -> None:
        """Look at the file; blocks for as long as the file system does."""
        self._seen = self._identity()
        self._due_s = self._monotonic() + LOOK_INTERVAL_S
        self._is_looking = False

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError:  # the medium does not answer: no reason to leave
            return self._file
        return status.st_dev, status.st_ino
