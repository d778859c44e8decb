"""The tier of a Mooncake pool: a blob is an object of the memory that a fleet's machines give to it.

The pool's master evicts, and nobody lists it: there is no keeper, no scan, and no knowledge of what is there but by
asking for names. Verifies no payload (``tiers/wrappers``). Opened by ``tiers/open.py``.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tiered_kv.errors import CapacityExceeded, Closed, TierUnavailable
from tiered_kv.tiers.base import BlobInfo, BlobName, Tier, TierTraits, Usage
from tiered_kv.tiers.mooncake.client import MooncakeClient

NAMES_MAX: Final = 512
"""Blobs in one question: their names are a message of some 70 KB."""


REFUSED_FIRST_S: Final = 0.5
REFUSED_LAST_S: Final = 60.0
"""A put without room makes the master evict. One that never fits, because no machine gives that much, would empty the
pool: after each refusal blobs of that size wait, up to this long."""


class _Refusals:
    """Sizes that the pool has no room for at the moment.

    Threads: any; guarded by a lock.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._size_bytes = 0
        self._wait_s = 0.0
        self._until_s = 0.0

    def check(self, size_bytes: int) -> None:
        """Let a put pass.

        Raises:
            CapacityExceeded: One that was no larger was refused a moment ago.
        """
        with self._lock:
            if self._wait_s and size_bytes >= self._size_bytes and self._monotonic() < self._until_s:
                raise CapacityExceeded("the pool had no room a moment ago")

    def refused(self, size_bytes: int) -> None:
        with self._lock:
            now_s = self._monotonic()
            if now_s >= self._until_s:  # else it was under way beside the one that was told before
                self._wait_s = min(max(2 * self._wait_s, REFUSED_FIRST_S), REFUSED_LAST_S)
                self._size_bytes, self._until_s = size_bytes, now_s + self._wait_s

    def taken(self, size_bytes: int) -> None:
        with self._lock:
            if size_bytes >= self._size_bytes:
                self._wait_s = 0.0


class MooncakeTier(Tier):
    """Blobs in a Mooncake pool.

    Threads: any.
    """

    def __init__(self, client: MooncakeClient, prefix: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Use ``client``, which the tier closes; keys begin with ``prefix``."""
        self.traits = TierTraits(
            "mooncake", client.lane_count, is_shared=True, keeps_first=True, names_at_once=NAMES_MAX
        )
        self._client = client
        self._prefix = prefix
        self._refusals = _Refusals(monotonic)
        self._is_closed = False

    def key(self, name: BlobName) -> str:
        """What a blob is called in the pool."""
        return f"{self._prefix}/{name.namespace.hex()}/{name.key.hex()}"

    def put(self, name: BlobName, blob: memoryview) -> None:
        """Store a blob unless the name is taken: equal names mean equal bytes, so then it is there already."""
        self._refusals.check(len(blob))
        try:
            self._client.put(self.key(name), blob)
        except CapacityExceeded:
            self._refusals.refused(len(blob))
            raise
        self._refusals.taken(len(blob))

    def get_into(self, name: BlobName, buffer: memoryview) -> bool:
        return self.get_into_by_pieces(name, buffer, lambda _: None)

    def get_into_by_pieces(self, name: BlobName, buffer: memoryview, on_piece: Callable[[int], None]) -> bool:
        return self._client.get_into(self.key(name), buffer, on_piece, name.namespace)

    def contains(self, name: BlobName) -> bool:
        return self._client.count_held([self.key(name)]) == 1

    def count_held(self, names: Sequence[BlobName], hint: str = "") -> int:
        del hint
        return self._client.count_held([self.key(name) for name in names])

    def delete(self, name: BlobName) -> bool:
        return self._client.delete(self.key(name))

    def scan(self) -> Iterator[BlobInfo]:
        """Refuse.

        Raises:
            TierUnavailable: Always: a pool is not listed.
        """
        if self._is_closed:
            raise Closed("the Mooncake pool is closed")
        raise TierUnavailable("a Mooncake pool cannot be listed")

    def usage(self) -> Usage:
        """Nothing: what is there only the master knows, which evicts."""
        return Usage(0, None, 0)

    def figures(self) -> dict[str, object]:
        """How often Mooncake's client was started: more than once, if it crashed or hung."""
        return {"client_starts": self._client.started_count}

    def close(self) -> None:
        self._is_closed = True
        self._client.close()
