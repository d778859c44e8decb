"""What each namespace keeps at least, and takes at most, of a tier that several use.

Owns the quotas that engines stated and the count of what each namespace takes of each tier; ``host_tier.py`` and
``secondary_tier.py`` ask it before they evict and before they fill. Pure, like tiering it belongs to.

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
class Quota:
    """Of each tier's limit; ``slot_bytes`` is the size of the namespace's chunks in host memory."""

    at_least: float = 0.0
    at_most: float = 1.0
    slot_bytes: int = 0


class Quotas:
    """Quotas by namespace; a namespace without one keeps nothing and takes all it gets.

    Threads: one owner, tiering.
    """

    def __init__(self) -> None:
        self._quotas: dict[bytes, Quota] = {}
        self._watchers: list[Callable[[bytes, bool], None]] = []

    def watch(self, tell: Callable[[bytes, bool], None]) -> None:
        """Call ``tell`` when a namespace gets a quota, and when it loses it."""
        self._watchers.append(tell)

    def set(self, namespace: bytes, quota: Quota) -> None:
        """From now on; a quota that asks for nothing is none."""
        if quota.at_least == 0 and quota.at_most >= 1:
            self.drop(namespace)
            return
        is_new = namespace not in self._quotas
        self._quotas[namespace] = quota
        for tell in self._watchers if is_new else ():
            tell(namespace, True)

    def drop(self, namespace: bytes) -> None:
        """The namespace has no quota any more. Idempotent."""
        if self._quotas.pop(namespace, None) is not None:
            for tell in self._watchers:
                tell(namespace, False)

    def get(self, namespace: bytes) -> Quota | None:
        return self._quotas.get(namespace)

    def namespaces(self) -> list[bytes]:
        """Those that have a quota."""
        return list(self._quotas)

    def floor_bytes(self, slot_bytes: int, capacity_bytes: int) -> int:
        """What all namespaces with chunks of this size keep of a capacity."""
        kept = (quota.at_least for quota in self._quotas.values() if quota.slot_bytes == slot_bytes)
        return int(sum(kept) * capacity_bytes)


class NamespaceUsage:
    """What each namespace takes of one tier.

    Units: bytes. Threads: one owner, the tier.
    """

    def __init__(self, quotas: Quotas, capacity: Callable[[], int | None]) -> None:
        """Nothing is taken yet; ``capacity`` tells the tier's limit as of now."""
        self._capacity = capacity
        self._quotas = quotas
        self._bytes: dict[bytes, int] = {}

    @property
    def capacity_bytes(self) -> int | None:
        """What quotas are of; None: the tier has no limit here, and quotas mean nothing."""
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
        quota = self._quotas.get(namespace)
        if quota is None or (capacity_bytes := self.capacity_bytes) is None:
            return False
        return self._bytes.get(namespace, 0) - size_bytes < int(quota.at_least * capacity_bytes)

    def excess_bytes(self, namespace: bytes, size_bytes: int) -> int:
        """How much of the namespace's own has to go before it takes so much more; negative: nothing."""
        quota = self._quotas.get(namespace)
        if quota is None or self.capacity_bytes is None:
            return -1
        return self._bytes.get(namespace, 0) + size_bytes - self.most_bytes(namespace)

    def most_bytes(self, namespace: bytes) -> int:
        """The most it may take; call only where there is a limit."""
        quota, capacity_bytes = self._quotas.get(namespace), self.capacity_bytes
        assert capacity_bytes is not None
        return capacity_bytes if quota is None else int(quota.at_most * capacity_bytes)

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
