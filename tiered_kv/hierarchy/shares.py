"""What each namespace keeps at least, and takes at most, of a tier that several share.

Owns the shares that engines stated and the count of what each namespace takes of each tier; ``host.py`` and
``lower.py`` ask it before they evict and before they fill. Pure, like the hierarchy it belongs to.

    below its minimum      nobody else's chunks push its own out
    above its minimum      its chunks go by the order of eviction, as everybody's
    at its maximum         a new chunk pushes out one of its own

A minimum is not set aside: what its namespace does not take is everybody's until it stores. Where a medium is fuller
than its limit, minima give way. docs/decisions/0020-shares.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """Of each tier's limit; ``slot_bytes`` is the size of the namespace's chunks in host memory."""

    at_least: float = 0.0
    at_most: float = 1.0
    slot_bytes: int = 0


class Shares:
    """Shares by namespace; a namespace without one keeps nothing and takes all it gets.

    Threads: one owner, the hierarchy.
    """

    def __init__(self) -> None:
        self._shares: dict[bytes, Share] = {}
        self._watchers: list[Callable[[bytes, bool], None]] = []

    def watch(self, tell: Callable[[bytes, bool], None]) -> None:
        """Call ``tell`` when a namespace gets a share, and when it loses it."""
        self._watchers.append(tell)

    def set(self, namespace: bytes, share: Share) -> None:
        """From now on; a share that asks for nothing is none."""
        if share.at_least == 0 and share.at_most >= 1:
            self.drop(namespace)
            return
        is_new = namespace not in self._shares
        self._shares[namespace] = share
        for tell in self._watchers if is_new else ():
            tell(namespace, True)

    def drop(self, namespace: bytes) -> None:
        """The namespace has no share any more. Idempotent."""
        if self._shares.pop(namespace, None) is not None:
            for tell in self._watchers:
                tell(namespace, False)

    def get(self, namespace: bytes) -> Share | None:
        return self._shares.get(namespace)

    def namespaces(self) -> list[bytes]:
        """Those that have a share."""
        return list(self._shares)

    def floor_bytes(self, slot_bytes: int, capacity_bytes: int) -> int:
        """What all namespaces with chunks of this size keep of a capacity."""
        kept = (share.at_least for share in self._shares.values() if share.slot_bytes == slot_bytes)
        return int(sum(kept) * capacity_bytes)


class Taken:
    """What each namespace takes of one tier.

    Units: bytes. Threads: one owner, the tier.
    """

    def __init__(self, shares: Shares, capacity: Callable[[], int | None]) -> None:
        """Nothing is taken yet; ``capacity`` tells the tier's limit as of now."""
        self._capacity = capacity
        self._shares = shares
        self._bytes: dict[bytes, int] = {}

    @property
    def capacity_bytes(self) -> int | None:
        """What shares are of; None: the tier has no limit here, and shares mean nothing."""
        return self._capacity()

    def add(self, namespace: bytes, size_bytes: int) -> None:
        """It takes more; nothing changes for a size of 0."""
        if size_bytes:
            self._bytes[namespace] = self._bytes.get(namespace, 0) + size_bytes

    def remove(self, namespace: bytes, size_bytes: int) -> None:
        """It takes less."""
        if size_bytes:
            self._bytes[namespace] -= size_bytes
            if not self._bytes[namespace]:
                del self._bytes[namespace]

    def keeps(self, namespace: bytes, size_bytes: int) -> bool:
        """Whether the namespace would be below its minimum without a chunk of this size."""
        share = self._shares.get(namespace)
        if share is None or (capacity_bytes := self.capacity_bytes) is None:
            return False
        return self._bytes.get(namespace, 0) - size_bytes < int(share.at_least * capacity_bytes)

    def excess_bytes(self, namespace: bytes, size_bytes: int) -> int:
        """How much of the namespace's own has to go before it takes so much more; negative: nothing."""
        share = self._shares.get(namespace)
        if share is None or self.capacity_bytes is None:
            return -1
        return self._bytes.get(namespace, 0) + size_bytes - self.most_bytes(namespace)

    def most_bytes(self, namespace: bytes) -> int:
        """The most it may take; call only where there is a limit."""
        share, capacity_bytes = self._shares.get(namespace), self.capacity_bytes
        assert capacity_bytes is not None
        return capacity_bytes if share is None else int(share.at_most * capacity_bytes)

    def by_namespace(self) -> dict[bytes, int]:
        """What each takes now."""
        return dict(self._bytes)

    def check_integrity(self, parts: Iterable[tuple[bytes, int]]) -> None:
        """Assert that the counts are the sums of these."""
        sums: dict[bytes, int] = {}
        for namespace, size_bytes in parts:
            if size_bytes:
                sums[namespace] = sums.get(namespace, 0) + size_bytes
        assert sums == self._bytes, "what namespaces take drifted"
