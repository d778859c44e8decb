"""Which chunks were used when, in a store that has no touch: small logs, dated by the store's own clock.

A server collects the keys it used and writes them as one object now and then; the object's LastModified says when.
The leader merges logs into base objects and removes them. Bases are named by term and number and all that exist are
read, so a leader that was overtaken while merging takes nothing away.

::

    log   b"TKVuse1\\n"  key[16] ...
    base  b"TKVuses\\n"  (key[16] used_s[u32 little-endian, seconds since 1970]) ...

Content of another form counts as absent and stays: it is not ours to merge. Owns the objects below
``_tiered_kv/recency/``. Called by the keeper's turn; ``record`` by any thread.
"""

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

from tiered_kv.errors import TierUnavailable
from tiered_kv.fleet.layout import BASES, RECENCY, Info, Objects, fetch_many
from tiered_kv.fleet.listing import Listing, seconds
from tiered_kv.fleet.timing import Timing
from tiered_kv.keys.naming import NAME_BYTES, BlobName

LOG_MAGIC: Final = b"TKVuse1\n"
BASE_MAGIC: Final = b"TKVuses\n"
KEYS_MAX: Final = 1 << 16
"""Keys of one log: 1 MiB."""
BASE_ROWS: Final = 200_000
"""Rows of one base object: 4 MB, well within one operation's deadline."""
OBJECT_BYTES_MAX: Final = 8 << 20
READS_AT_ONCE: Final = 16
"""Logs and bases that are read at once: 16 MiB of logs, and no more than 128 MiB of whatever else has their names."""

_ROW = struct.Struct("<16sI")


class UseLog:
    """Uses of one server that are not in the bucket yet.

    Threads: ``record`` any; ``flush`` one at a time.
    """

    def __init__(self, store: Objects, timing: Timing, clock: Callable[[], float], server_id: str) -> None:
        self._store = store
        self._timing = timing
        self._clock = clock
        self._prefix = f"{RECENCY}{server_id}/"
        self._lock = threading.Lock()
        self._keys: dict[bytes, None] = {}
        self._number = 0
        self._flushed_at = clock()
        self.dropped_count = 0
        """Uses that no room was left for."""

    def record(self, names: Iterable[BlobName]) -> None:
        """Remember these uses; the oldest are dropped beyond the bound."""
        with self._lock:
            for name in names:
                self._keys.pop(name.key, None)
                self._keys[name.key] = None
            while len(self._keys) > KEYS_MAX:
                del self._keys[next(iter(self._keys))]
                self.dropped_count += 1

    def is_empty(self) -> bool:
        """Whether nothing waits to be written."""
        with self._lock:
            return not self._keys

    def is_due(self) -> bool:
        with self._lock:
            return bool(self._keys) and (
                self._clock() - self._flushed_at >= self._timing.recency_s or len(self._keys) > KEYS_MAX // 2
            )

    def flush(self) -> None:
        """Write what was collected as one object; keeps it when the store fails."""
        with self._lock:
            keys = list(self._keys)
        self._flushed_at = self._clock()
        if not keys:
            return
        self._store.put(f"{self._prefix}{self._number:012d}", LOG_MAGIC + b"".join(keys))
        self._number += 1
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)


class UseSink(Protocol):
    """Whoever is told of uses; ``Listing`` is one."""

    def use(self, key: bytes, used_s: int) -> None: ...


class UseReader:
    """Reads logs and bases into a listing, and merges them.

    Threads: one at a time.
    """

    def __init__(self, store: Objects) -> None:
        self._store = store
        self.malformed: list[str] = []
        """Paths of what is neither a log nor a base."""

    def read(self, listing: UseSink) -> Iterator[list[Info]]:
        """Read every log and base there is, several at once, and apply them.

        Yields:
            Those that were applied since the last time; others are gone, or none of ours.

        Raises:
            TierUnavailable: The store failed.
        """
        sources = list(self._store.list(RECENCY))
        for start in range(0, len(sources), READS_AT_ONCE):
            part = sources[start : start + READS_AT_ONCE]
            found = zip(part, self._fetch(part), strict=True)
            yield [source for source, data in found if self._apply(source, data, listing)]

    def _fetch(self, sources: Sequence[Info]) -> Iterator[bytes | None]:
        """What is in them. One that fails is asked for again: a pass reads thousands, and one failure ends it."""
        paths = [source.path for source in sources]
        found = fetch_many(self._store, paths, OBJECT_BYTES_MAX)
        failed = [path for path, data in zip(paths, found, strict=True) if isinstance(data, TierUnavailable)]
        again = iter(fetch_many(self._store, failed, OBJECT_BYTES_MAX))
        for first in found:
            data = next(again) if isinstance(first, TierUnavailable) else first
            if isinstance(data, TierUnavailable):
                raise data
            yield data

    def _apply(self, source: Info, data: bytes | None, listing: UseSink) -> bool:
        if data is None:
            return False
        magic, body = data[: len(LOG_MAGIC)], memoryview(data)[len(LOG_MAGIC) :]
        if magic == LOG_MAGIC and len(body) % NAME_BYTES == 0:
            used_s = seconds(source.modified_s)
            for start in range(0, len(body), NAME_BYTES):
                listing.use(bytes(body[start : start + NAME_BYTES]), used_s)
        elif magic == BASE_MAGIC and len(body) % _ROW.size == 0:
            for key, used_s in _ROW.iter_unpack(body):
                listing.use(key, used_s)
        else:
            self.malformed.append(source.path)
            return False
        return True

    def merge(self, label: str, listing: Listing, sources: Sequence[Info], grain_s: float) -> tuple[int, list[str]]:
        """Write one base in place of what was read; what it replaces goes only after it is there.

        Returns:
            Bytes written, and the paths removed.
        """
        written: dict[str, int] = {}
        for part, data in enumerate(_parts(listing, grain_s)):
            path = f"{BASES}{label}-{part}"
            self._store.put(path, data)
            written[path] = len(data)
        old = [source.path for source in sources if source.path not in written]
        self._store.delete(old)
        return sum(written.values()), old


def _parts(listing: Listing, grain_s: float) -> Iterator[bytes]:
    rows: list[bytes] = []
    for key, used_s in listing.logged_uses(grain_s):
        rows.append(_ROW.pack(key, used_s))
        if len(rows) == BASE_ROWS:
            yield BASE_MAGIC + b"".join(rows)
            rows = []
    if rows:
        yield BASE_MAGIC + b"".join(rows)
