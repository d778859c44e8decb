"""Which reads of blobs go around the page cache: the first of each, while the disk is fast.

What comes back goes through it: memory that nobody else wants is a second chance for it. On a disk that is slow that
chance is worth more than what the page cache costs: a first read goes through it, too (docs/decisions/0003).
Owns what was read lately and how long it took. Called by ``tier.py``.
"""

import threading
from collections import OrderedDict
from typing import Final

from tiered_kv.tiers.disk.files import READ_PIECE_BYTES

READ_LATELY_COUNT: Final = 1 << 15
"""Blobs whose reading is remembered: of 32 MiB each 1 TiB, more than a page cache holds. Up to 6 MiB of memory."""

SLOW_BYTES_S: Final = 128 << 20
"""Of one read, beside three others: a disk of half a GB/s. Reading again from a slower one costs more than keeping."""

_REMEMBERED: Final = 8
"""First reads over which their speed is an average, the last ones counting most."""


class FirstReads:
    """The last ``READ_LATELY_COUNT`` different blobs that were read, and how fast the disk gave the last of them.

    Threads: any; one lock. Units: bytes, seconds.
    """

    def __init__(self) -> None:
        """Nothing was read; the disk is taken for fast."""
        self._keys: OrderedDict[bytes, None] = OrderedDict()  # in the order of their first reading
        self._s_per_byte = 0.0
        self._lock = threading.Lock()

    @property
    def are_fast(self) -> bool:
        """Whether reading a blob once more is cheaper than keeping it in the page cache."""
        return self._s_per_byte * SLOW_BYTES_S < 1

    def begins(self, key: bytes) -> bool:
        """Whether this read of a blob is the first; the blob is remembered from now on."""
        with self._lock:
            if key in self._keys:
                return False
            self._keys[key] = None
            if len(self._keys) > READ_LATELY_COUNT:
                self._keys.popitem(last=False)
            return True

    def took(self, size_bytes: int, seconds: float) -> None:
        """A first read has ended, whichever way it went. Of a small blob it says little of the disk."""
        if size_bytes >= READ_PIECE_BYTES:
            with self._lock:
                self._s_per_byte += (seconds / size_bytes - self._s_per_byte) / _REMEMBERED
