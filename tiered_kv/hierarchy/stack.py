"""The tiers below host memory, as one thing: the front tier, those behind it, and the searches of a shared last one.

Owns how they are tied together and what concerns all of them. Called by the hierarchy.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from tiered_kv.hierarchy.admission import Admission
from tiered_kv.hierarchy.back import BackTier
from tiered_kv.hierarchy.front import FrontTier
from tiered_kv.hierarchy.host import HostMemory
from tiered_kv.hierarchy.index import Entry, HostState, Index
from tiered_kv.hierarchy.lower import LowerTier
from tiered_kv.hierarchy.plan import Job
from tiered_kv.hierarchy.searches import Searches

CLAIMS_AT_ONCE = 1000


class LowerTiers:
    """All lower tiers, highest first.

    Attributes:
        front: The first; None if there is none.
        searches: What a shared last tier may have; None if the last is not shared.

    Threads: one owner, the hierarchy.
    """

    def __init__(self, index: Index, host: HostMemory, jobs: list[Job], counters: Counter[str]) -> None:
        self.front: FrontTier | None = None
        self.searches: Searches | None = None
        self._all: list[LowerTier] = []
        self._back: list[BackTier] = []
        self._opened: set[bytes] = set()
        self._to_claim: deque[Entry] = deque()
        self._index = index
        self._host = host
        self._jobs = jobs
        self._counters = counters

    def open(
        self,
        capacities: Sequence[int | None],
        admissions: Sequence[str],
        queue_limit_bytes: int,
        *,
        is_last_shared: bool,
    ) -> None:
        """Start with empty tiers; see :class:`~tiered_kv.hierarchy.hierarchy.Hierarchy`."""
        for number, capacity in enumerate(capacities):
            if number == 0:
                self.front = FrontTier(capacity, self._index, self._host, self._jobs, self._counters)
                self.front.queue_limit_bytes = queue_limit_bytes
                self._all.append(self.front)
            else:
                self._back.append(BackTier(self._all[-1], capacity, self._index, self._jobs, self._counters))
                self._all.append(self._back[-1])
        for lower, rule in zip(self._all, admissions, strict=False):  # what is not named takes everything
            lower.admission = Admission(rule)
        if is_last_shared:
            last = self._all[-1]
            last.is_shared, last.capacity_bytes = True, None
            self.searches = Searches(last, self._index, self._jobs, self._counters)

    def __getitem__(self, tier: int) -> LowerTier:
        return self._all[tier]

    def __iter__(self) -> Iterator[LowerTier]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def pending(self) -> int:
        """Chunks that are to be written, to any of them."""
        return sum(lower.pending for lower in self._all)

    def claim_again(self, prefix: Sequence[Entry]) -> None:
        """A prefix is used, given root first: a write that was dropped gets another chance."""
        for entry in prefix:
            if self.front is not None and entry.host in (HostState.READY, HostState.SEALING):
                self.front.claim(entry)
            for back in self._back:
                back.claim_known(entry)

    def want(self, entry: Entry) -> None:
        """A chunk is wanted again, though no lookup says so: it and the prefix before it are admitted now.

        One that was found at start is claimed when its namespace's first session opens (:meth:`claim_found`).
        """
        wanted = self._index.want(entry)
        if entry.record.namespace in self._opened:
            self.claim_again(wanted)

    def set_pinned(self, tier: int, keys: Iterable[bytes]) -> None:
        """Keep these chunks, and the prefixes before them, in a tier; what is pinned is worth a write everywhere."""
        pins = list(keys)
        self._all[tier].set_pinned(pins)
        for entry in filter(None, map(self._index.get, pins)):
            self.want(entry)

    def claim_found(self, namespace: bytes) -> None:
        """Queue again what an earlier life did not upload: the size of a namespace's blobs is known from now on."""
        if namespace in self._opened:
            return
        self._opened.add(namespace)
        if not self._back:
            return
        self._to_claim.extend(entry for entry in self._index.entries() if entry.record.namespace == namespace)

    def claim_some(self) -> None:
        """Go on with that, a bounded part at a time: there may be a hundred thousand, and the owner must not stop."""
        for _ in range(min(CLAIMS_AT_ONCE, len(self._to_claim))):
            entry = self._to_claim.popleft()
            if self._index.get(entry.record.key) is entry:
                for back in self._back:
                    back.claim_known(entry)

    def resume(self) -> None:
        """A tier that had no room or gave no answer may do better now."""
        for lower in self._all:
            lower.resume()

    def record_use(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        """Note the use of a prefix, deepest chunk first."""
        for lower in self._all:
            lower.order.record_use(namespace, keys)

    def figures(self) -> dict[str, int]:
        """Bytes and counts per tier."""
        figures = {}
        for tier, lower in enumerate(self._all):
            figures[f"tier{tier}_used_bytes"] = lower.used_bytes
            figures[f"tier{tier}_queued_bytes"] = lower.queued_bytes
            figures[f"tier{tier}_pending_writes"] = lower.pending
            figures[f"tier{tier}_backlog"] = lower.backlog
            figures[f"tier{tier}_chunks"] = lower.blob_count
            figures[f"tier{tier}_admitted"] = lower.admission.admitted
            figures[f"tier{tier}_declined"] = lower.admission.declined
        return figures

    def check_integrity(self) -> None:
        """Assert the invariants of every tier."""
        for lower in self._all:
            lower.check_integrity()
        if self.searches is not None:
            self.searches.check_integrity()
