"""Calls in flight: who closes lets no more in, and waits for those that are inside.

Called by ``tier.py``, around every operation: so it is no generator, which would take as long as a system call.
"""

import threading
from pathlib import Path

from tiered_kv.errors import Closed


class Calls:
    """A context for each call.

    Threads: any; one lock.
    """

    def __init__(self, root: Path) -> None:
        """Let calls in. ``root`` is named in what refuses them later."""
        self._root = root
        self._gate = threading.Condition()
        self._active = 0
        self._is_closed = False

    def __enter__(self) -> None:
        with self._gate:
            if self._is_closed:
                raise Closed(f"the disk tier is closed. path={self._root}")
            self._active += 1

    def __exit__(self, *_: object) -> None:
        with self._gate:
            self._active -= 1
            if not self._active:
                self._gate.notify_all()

    def close(self) -> bool:
        """Let no more in and wait for those inside; False: that was done before."""
        with self._gate:
            if self._is_closed:
                return False
            self._is_closed = True
            self._gate.wait_for(lambda: self._active == 0)
            return True
