"""What came into each tier and what left it, counted by why; and which chunks, for sessions that asked to be told.

For every tier, what came less what left is what is there, in chunks and in bytes; the tiers' own checks assert it. Owns
the sums and the events that were not delivered yet, and nothing else. Written by ``host_tier.py`` and the secondary
tiers; read by the server. Also counts what ended lookups asked for and what they got, in chunks, by the tier that gave
them: filled by ``lookups.py``, emptied by the engine, which knows how many tokens a chunk of a namespace has.

    tier     came                          left
    host     new, promoted                 evicted, removed, damaged
    others   written, found, kept          evicted, removed, missing, corrupt, foreign, forgotten

``found`` was there at the start, or was put there by another machine; ``kept`` could not be deleted; ``removed``
because an operator said so, or as a tail that something continues now; ``damaged`` in its slot; ``forgotten`` is a blob
of a shared tier that may still be there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Final

from tiered_kv.tiering.types import HOST, Job, TierEvents

if TYPE_CHECKING:
    from tiered_kv.tiering.index import Entry

EVENTS_MAX = 1 << 16
"""Events that wait to be told; a bound on memory for the time between two steps. Of the rest is told that they are
lost."""


@dataclass(slots=True)
class TierStats:
    """One tier's sums since the start.

    Attributes:
        inserted, removed: Chunks, by cause.
        inserted_bytes, removed_bytes: The same in bytes; 0 for blobs that others put into a shared tier.
        tails: How many of what is there are tails.
    """

    inserted: Counter[str] = field(default_factory=Counter)
    removed: Counter[str] = field(default_factory=Counter)
    inserted_bytes: int = 0
    removed_bytes: int = 0
    tails: int = 0

    @property
    def chunks(self) -> int:
        """Chunks that are there."""
        return self.inserted.total() - self.removed.total()

    @property
    def size_bytes(self) -> int:
        """Bytes that are there."""
        return self.inserted_bytes - self.removed_bytes


class Stats:
    """The stats of all tiers, and the events for sessions that watch their namespace.

    Attributes:
        undelivered: TierEvents that were not told because too many waited.

    Threads: one owner, tiering.
    """

    def __init__(self, tier_count: int) -> None:
        """Start at zero; ``tier_count`` is of all tiers, host memory included."""
        self.undelivered = self._undelivered_before = 0
        self._tiers = [TierStats() for _ in range(tier_count)]
        self._watchers: dict[int, bytes] = {}  # namespace by session
        self._events: list[tuple[bytes, int, bool, bytes]] = []

    def __getitem__(self, tier: int) -> TierStats:
        return self._tiers[tier]

    def inserted(self, entry: Entry, tier: int, cause: str, *, is_usable: bool = True) -> None:
        """A chunk is in a tier now."""
        stats = self._tiers[tier]
        stats.inserted[cause] += 1
        stats.tails += entry.tail_tokens > 0
        stats.inserted_bytes += _size_bytes(entry, tier)
        if is_usable:
            self._note(entry, tier, is_here=True)

    def removed(self, entry: Entry, tier: int, cause: str) -> None:
        """A chunk is in a tier no more, or is on its way out."""
        stats = self._tiers[tier]
        stats.removed[cause] += 1
        stats.tails -= entry.tail_tokens > 0
        stats.removed_bytes += _size_bytes(entry, tier)
        self._note(entry, tier, is_here=False)

    # -- sessions that are told --------------------------------------------------------------------------------

    def watch(self, session: int, namespace: bytes) -> None:
        """Tell a session from now on which chunks of its namespace came and left."""
        self._watchers[session] = namespace

    def unwatch(self, session: int) -> None:
        """Tell a session no more. Idempotent."""
        self._watchers.pop(session, None)

    def republish(self, entry: Entry, tiers: list[int]) -> None:
        """Say once more where a chunk is: somebody may have missed it when it came."""
        for tier in tiers:
            self._note(entry, tier, is_here=True)

    def _note(self, entry: Entry, tier: int, *, is_here: bool) -> None:
        if entry.record.namespace not in self._watchers.values():
            return
        if len(self._events) >= EVENTS_MAX:
            self.undelivered += 1
            return
        self._events.append((entry.record.namespace, tier, is_here, entry.record.key))

    def take_events(self) -> Iterator[TierEvents]:
        """What to tell, in the order it happened; neighbours of one kind are one message, one without keys a loss."""
        events, self._events = self._events, []
        for kind, group in groupby(events, key=lambda event: event[:3]):
            namespace, tier, is_here = kind
            keys = tuple(key for *_, key in group)
            for session in [s for s, watched in self._watchers.items() if watched == namespace]:
                yield TierEvents(session, tier, is_here, keys)
        if self.undelivered > self._undelivered_before:
            self._undelivered_before = self.undelivered
            yield from (TierEvents(session, HOST, False, ()) for session in self._watchers)


def _size_bytes(entry: Entry, tier: int) -> int:
    return entry.slot_bytes if tier == HOST else entry.blob_bytes[tier]


@dataclass(slots=True)
class Outbox:
    """Where the parts of tiering put what they produce; each may append to all three.

    Attributes:
        jobs: To be performed, in order; taken by the engine.
        counters: What happened how often, since the start.
    """

    stats: Stats
    jobs: list[Job] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)


DECISIONS: Final = ("ready", "awaited", "took_what_arrived", "not_awaited", "miss")
"""What became of a lookup. ``ready``: all that was promised was in host memory. ``awaited``: some of it came up from a
secondary tier, and the client had it all. ``took_what_arrived``: the client was content with less than was on its way,
or gave up what was still being looked for. ``not_awaited``: it took nothing of what was on its way. ``miss``: there was
nothing."""


@dataclass(slots=True)
class HitCounts:
    """Sums over ended lookups of one namespace.

    ``prefix`` chunks = those the client had no need of (before ``start``) + ``asked`` ones; ``asked`` = ``hits`` of all
    tiers + what was missed.

    Attributes:
        lookups: How many ended.
        prefix: Chunks of the prefixes looked up.
        asked: Chunks from ``start`` on.
        hits: Chunks that were ready, by the tier they were read from for this lookup; ``HOST``: they were in host
            memory, or on their way into it from a client, when the lookup wanted them.
        decisions: What became of the lookups that asked for anything, by ``DECISIONS``.
    """

    lookups: int = 0
    prefix: int = 0
    asked: int = 0
    hits: Counter[int] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)


LOADS_MAX: Final = 1 << 12
"""Loads in parts that are not counted yet; of more the oldest is counted as it is."""


@dataclass(slots=True)
class _LoadParts:
    """What was looked up and read for one load until now."""

    namespace: bytes
    prefix: int = 0
    start: int = 0
    sources: list[int] = field(default_factory=list)
    has_more: bool = False


class HitStats:
    """Sums by namespace since the last :meth:`take`.

    A *load* may be looked up and read in parts, also from several tiers. It is counted once, when it has ended.

    Threads: one owner, tiering.
    """

    def __init__(self) -> None:
        self._by_namespace: dict[bytes, HitCounts] = {}
        self._loads: dict[tuple[int, int], _LoadParts] = {}  # by session and number

    def ended(
        self,
        namespace: bytes,
        prefix: int,
        start: int,
        sources: Sequence[int],
        *,
        has_more: bool,
        part_of: tuple[int, int] | None = None,
    ) -> None:
        """Count a lookup of ``prefix`` chunks, wanted from ``start`` on.

        Args:
            sources: What gave those that were ready.
            has_more: More was on its way, or being looked for.
            part_of: The load that this is a part of, by session and number; None: of none.
        """
        if part_of is not None:
            load = self._loads.setdefault(part_of, _LoadParts(namespace))
            load.prefix += prefix
            load.start += min(start, prefix)
            load.sources += sources
            load.has_more |= has_more
            if len(self._loads) > LOADS_MAX:
                self.load_ended(*next(iter(self._loads)))
            return
        chunks = self._by_namespace.setdefault(namespace, HitCounts())
        chunks.lookups += 1
        chunks.prefix += prefix
        chunks.asked += max(0, prefix - start)
        chunks.hits.update(sources)
        if prefix > start:
            chunks.decisions[_decision(sources, has_more=has_more)] += 1

    def load_ended(self, session: int, number: int) -> None:
        """Count a load, of which no part comes any more; an unknown one has none."""
        load = self._loads.pop((session, number), None)
        if load is not None:
            self.ended(load.namespace, load.prefix, load.start, load.sources, has_more=load.has_more)

    def session_ended(self, session: int) -> None:
        """Count the loads of a session, which has ended."""
        for part_of in [one for one in self._loads if one[0] == session]:
            self.load_ended(*part_of)

    def take(self) -> Mapping[bytes, HitCounts]:
        """The sums, which begin at zero again."""
        taken, self._by_namespace = self._by_namespace, {}
        return taken


def _decision(sources: Sequence[int], *, has_more: bool) -> str:
    if not sources:
        return "not_awaited" if has_more else "miss"
    if has_more:
        return "took_what_arrived"
    return "ready" if all(source == HOST for source in sources) else "awaited"
