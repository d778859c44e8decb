"""The order in which the chunks of one tier are evicted: suffix before prefix. The registry of eviction policies.

Owns membership, and the rule that a chunk always goes before its parent; which one is worth least is the policy's
business (``eviction_policy.py``). A namespace with a quota (``quotas.py``) has a policy of its own, by the same clock,
so that what it keeps is never walked over. Called by ``host_tier.py`` and ``secondary_tier.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import merge

from tiered_kv.tiering.eviction_policy import EvictionPolicy, UseClock
from tiered_kv.tiering.index import Entry, Index
from tiered_kv.tiering.lru import Lru
from tiered_kv.tiering.multi_queue import MultiQueue
from tiered_kv.tiering.quotas import Quotas

EVICTION_POLICIES: dict[str, type[EvictionPolicy]] = {"multi-queue": MultiQueue, "lru": Lru}
"""Policies by the names of the setting ``eviction``."""


class EvictionOrder:
    """Entries of the index, first to go first.

    Threads: one owner.
    """

    def __init__(self, tier: int, index: Index, quotas: Quotas, policy: type[EvictionPolicy]) -> None:
        """Start empty. A chunk is in at most one order of each ``tier``."""
        self._tier = tier
        self._index = index
        self._new = policy
        self._clock = UseClock()
        self._common = self._new_policy()
        self._own: dict[bytes, EvictionPolicy] = {}
        for namespace in quotas.namespaces():
            self._own[namespace] = self._new_policy()
        quotas.watch(self._regroup)

    def _new_policy(self) -> EvictionPolicy:
        return self._new(self._index.uses_of, self._clock)

    def _regroup(self, namespace: bytes, has_quota: bool) -> None:
        if has_quota:
            policy = self._own[namespace] = self._new_policy()
            self._common.move(policy, lambda key: self._entry(key).record.namespace == namespace)
        else:
            self._own.pop(namespace).move(self._common, lambda _: True)

    def _policy(self, namespace: bytes) -> EvictionPolicy:
        return self._own.get(namespace, self._common)

    def add(self, entry: Entry) -> None:
        """Begin to order the chunk, as recently used as its parent, or as just used where its parent is not ordered.

        If chunks behind it are ordered already, it and the prefix before it count as just used: chunks come in any
        order, and it has to go after the ones and before the other.
        """
        policy, parent = self._policy(entry.record.namespace), self._index.parent(entry)
        if entry.ordered_children[self._tier]:
            policy.add(entry.record.key, None)
            policy.record_use(e.record.key for e in self._index.prefix(entry)[1:])
        else:
            policy.add(entry.record.key, entry.record.parent if parent else None)
        self._index.set_ordered(entry, self._tier, is_ordered=True)

    def remove(self, entry: Entry) -> None:
        """Order the chunk no more."""
        self._policy(entry.record.namespace).remove(entry.record.key)
        self._index.set_ordered(entry, self._tier, is_ordered=False)

    def record_use(self, namespace: bytes, prefix: Iterable[bytes]) -> None:
        """Note the use of a prefix, from its deepest chunk to its root; chunks that are not ordered are ignored."""
        self._policy(namespace).record_use(prefix)

    def __iter__(self) -> Iterator[Entry]:
        return self.candidates()

    def candidates(self, may_go: Callable[[Entry], bool] | None = None, only: bytes | None = None) -> Iterator[Entry]:
        """Chunks, first to go first; the order must not change while it is walked.

        Args:
            may_go: Asked right before a chunk is given, after what was done with the chunks before it: once it says no,
                nothing more of that chunk's namespace is given. It must not say no to a namespace without a quota.
            only: Of this namespace alone; if it has no quota, of all that have none.
        """
        policies = [self._common, *self._own.values()] if only is None else [self._policy(only)]
        streams = [self._stream(policy, may_go) for policy in policies]
        merged = streams[0] if len(streams) == 1 else merge(*streams, key=lambda one: -one[0])
        return (entry for _, entry in merged)

    def _stream(self, policy: EvictionPolicy, may_go: Callable[[Entry], bool] | None) -> Iterator[tuple[int, Entry]]:
        for rank, key in policy.candidates():
            entry = self._entry(key)
            if may_go is not None and not may_go(entry):
                return
            yield rank, entry

    def _entry(self, key: bytes) -> Entry:
        entry = self._index.get(key)
        assert entry is not None, "a chunk is ordered that nobody knows"
        return entry

    def __contains__(self, entry: Entry) -> bool:
        return bool(entry.ordered >> self._tier & 1) and entry.record.key in self._policy(entry.record.namespace)

    def __len__(self) -> int:
        return len(self._common) + sum(map(len, self._own.values()))

    def check_integrity(self) -> None:
        """Assert that chunks go before their parents."""
        gone: set[Entry] = set()
        for entry in self:
            gone.add(entry)
            for child in entry.children:
                assert child not in self or child in gone, "a chunk goes before its child"
        assert len(gone) == len(self), "ordered chunks were miscounted"
        for namespace, policy in self._own.items():
            assert {self._entry(key).record.namespace for key in policy} <= {namespace}, "a chunk is in another's order"
