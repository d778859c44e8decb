"""The leader's passes over the bucket: list it, merge recency, collect holes, expire, evict.

A pass is a generator that stops often, so that a turn lists or deletes for a bounded time and the lease is renewed in
between, however many blobs there are. Before each batch of deletions it asks again whether this server still leads.
Foreign objects are counted and never deleted; blobs of namespaces that nobody serves are left alone unless told
otherwise, and so are pinned ones with the prefixes before them: the pass's own LIST tells the pins. Must not grant
anything. Called by the keeper's turn while it leads.

Threads: one at a time.
"""

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from tiered_kv.errors import TierUnavailable
from tiered_kv.fleet.grants import GrantLedger
from tiered_kv.fleet.layout import RECENCY, ROOT, Info, Objects, parse_pin_path
from tiered_kv.fleet.lease import BucketLimits, Lease
from tiered_kv.fleet.listing import Listing
from tiered_kv.fleet.recency import UseReader
from tiered_kv.fleet.timing import Timing
from tiered_kv.keys.naming import object_path, parse_object_path

_log = logging.getLogger(__name__)

STRIDE = 256
"""Listed objects between two looks at the clock."""
STRETCH_MAX = 6
"""A pass is put off for at most so many times ``pass_s``: the last one may have taken long because of a pause."""

LIST_SHARE = 20
"""Listing takes at most one part in so many of the time, unless somebody needs room."""


@dataclass(slots=True)
class GCStats:
    """What passes did, since this server started."""

    passes: int = 0
    last_pass_s: float = 0.0
    evicted_blobs: int = 0
    evicted_bytes: int = 0
    expired_blobs: int = 0
    expired_bytes: int = 0
    holes_collected: int = 0
    merged_logs: int = 0
    malformed_logs: int = 0
    has_warned: bool = field(default=False, repr=False)


@dataclass(slots=True)
class _Batchful:
    """Rows to delete and what to count them as."""

    rows: list[int]
    kind: str


class GarbageCollector:
    """Passes of one term."""

    def __init__(
        self,
        store: Objects,
        timing: Timing,
        clock: Callable[[], float],
        lease: Lease,
        ledger: GrantLedger,
        limits: BucketLimits,
    ) -> None:
        self._store = store
        self._timing = timing
        self._clock = clock
        self._lease = lease
        self._ledger = ledger
        self._limits = limits
        self._pass: Generator[bool, None, None] | None = None
        self._started_at = 0.0
        self._ended_at = float("-inf")
        self._gap_s = 0.0
        self._number = 0
        self._foreign: set[str] = set()
        self.evicts_all = False
        self.sweep = GCStats()

    def step(self) -> None:
        """Begin a pass if one is due, and go on with it for at most a slice of time.

        Raises:
            TierUnavailable: The store failed; the pass is given up and begun anew later.
        """
        if self._pass is None:
            if not self._is_due():
                return
            self._started_at = self._clock()
            self._pass = self._run()
        until = self._clock() + self._timing.slice_s
        try:
            for must_wait in self._pass:
                if must_wait or self._clock() >= until:
                    return
        except TierUnavailable:
            self._end(2 * self._timing.heartbeat_s)
            raise
        self._pass = None

    def may_rest(self) -> bool:
        """Whether no pass is under way, nor needed where nobody stores: then only age makes blobs go."""
        if self._pass is not None or not self._ledger.is_counted or self._ledger.lacks_room:
            return False
        if self._limits.ttl_s is None:
            return True
        rest_s = max(self._timing.pass_s, min(self._limits.ttl_s / 10, self._timing.rest_pass_s))
        return self._clock() - self._ended_at < rest_s

    def _is_due(self) -> bool:
        if not self._ledger.is_counted:
            return self._clock() - self._ended_at >= self._gap_s and not self._ledger.waits_for()
        idle_s = self._clock() - self._ended_at
        if self._ledger.lacks_room and idle_s >= self._gap_s:
            return True
        pass_s = self._timing.pass_s
        if self._limits.ttl_s is not None:
            pass_s = min(pass_s, max(self._limits.ttl_s / 10, 2 * self._timing.heartbeat_s))
        return idle_s >= max(pass_s, min(LIST_SHARE * self.sweep.last_pass_s, STRETCH_MAX * self._timing.pass_s))

    def _end(self, gap_s: float) -> None:
        self._pass = None
        self._ledger.abandon_list()
        self._ended_at = self._clock()
        self._gap_s = gap_s

    # -- one pass -----------------------------------------------------------------------------------------------------

    def _run(self) -> Generator[bool, None, None]:
        """Work, and stop now and then; True: go on in the next turn only."""
        self._ledger.begin_list()
        listing, total, own = Listing(), 0, 0
        logs: dict[str, int] = {}
        pins: dict[str, int] = {}
        for number, info in enumerate(self._store.list("")):
            total += info.size_bytes
            name = parse_object_path(info.path)
            if name is not None:
                listing.add(name, info.size_bytes, info.modified_s)
            elif info.path.startswith(f"{ROOT}/"):
                own += info.size_bytes
                if info.path.startswith(RECENCY):
                    logs[info.path] = info.size_bytes
                elif parse_pin_path(info.path) is not None:
                    pins[info.path] = info.size_bytes
            if number % STRIDE == STRIDE - 1:
                yield False
        self._ledger.end_list(total, own, len(listing))
        yield False
        listing.seal()
        yield False
        yield from self._merge_uses(listing, logs)
        now_s = self._lease.store_now()
        found = 0
        if now_s is not None:
            pinned = listing.with_prefixes(self._keys_in_force(pins, now_s))
            yield False
            for part in self._plan(listing, now_s, pinned):
                found += len(part.rows)
                yield from self._delete(listing, part)
        self.sweep.passes += 1
        self.sweep.last_pass_s = self._clock() - self._started_at
        # A pass that found nothing to delete will find nothing a moment later either.
        gap_s = self._timing.pass_s / 10 if not found else max(self._timing.heartbeat_s, 2 * self.sweep.last_pass_s)
        self._end(min(gap_s, self._timing.pass_s / 10))

    def _keys_in_force(self, pins: dict[str, int], now_s: float) -> list[bytes]:
        """Pinned keys; pins that have ended are deleted."""
        keys: list[bytes] = []
        ended: list[str] = []
        for path, size_bytes in pins.items():
            pin = parse_pin_path(path)
            if pin is not None and (pin[1] == 0 or pin[1] > now_s):
                keys.append(pin[0].key)
            elif size_bytes == 0:  # a pin is empty; what has content is not ours to remove
                ended.append(path)
        for start in range(0, len(ended), self._timing.delete_batch):
            part = ended[start : start + self._timing.delete_batch]
            if not self._still_leads():
                break  # whoever leads now sees them in its own list
            self._store.delete(part)
        return keys

    def _merge_uses(self, listing: Listing, logs: dict[str, int]) -> Generator[bool, None, None]:
        reader = UseReader(self._store)
        sources: list[Info] = []
        for applied in reader.read(listing):
            sources += applied
            yield False
        self._note_foreign(reader.malformed)
        if any(not self._is_own_base(source.path) for source in sources) and self._still_leads():
            self._number += 1
            label = f"{self._ledger.term:020d}-{self._number}"
            written_bytes, merged = reader.merge(label, listing, sources, self._timing.epoch_s)
            self._ledger.own_changed(written_bytes - sum(logs.get(path, 0) for path in merged))
            self.sweep.merged_logs += len(merged)
        listing.use_prefixes()  # after the base is written: it holds what was told, not what follows from it

    def _note_foreign(self, paths: list[str]) -> None:
        """Count what is no log of use, once each, and say that it stays."""
        if found := set(paths) - self._foreign:
            self._foreign |= found
            self.sweep.malformed_logs += len(found)
            _log.warning("left alone: %d objects have names of logs of use and are none. path=%s", len(found), RECENCY)

    def _is_own_base(self, path: str) -> bool:
        return f"/base/{self._ledger.term:020d}-" in path

    def _plan(self, listing: Listing, now_s: float, pinned: bytearray) -> list[_Batchful]:
        spaces = None if self.evicts_all else self._ledger.namespaces()
        taken = bytearray(pinned)
        plan = [_Batchful(listing.holes(spaces, now_s - self._timing.hole_grace_s, pinned), "hole")]
        for row in plan[0].rows:
            taken[row] = 1
        if self._limits.ttl_s is not None:
            plan.append(_Batchful(listing.expired(spaces, now_s - self._limits.ttl_s, taken), "expired"))
        if self._limits.capacity_bytes is not None:
            freed = sum(listing.size_bytes(row) for part in plan for row in part.rows)
            excess = self._excess_bytes(freed)
            rows = listing.oldest(spaces, excess, self._timing.epoch_s, taken)
            evicted = sum(listing.size_bytes(row) for row in rows)
            left = self._ledger.room() + freed + evicted
            if evicted < excess and left < max(self._ledger.low_room(), self._ledger.needed_bytes()):
                self._warn(len(listing), sum(pinned))
            plan.append(_Batchful(rows, "evicted"))
        return [part for part in plan if part.rows]

    def _excess_bytes(self, freed: int) -> int:
        """Bytes to evict beyond those that go anyway, down to the low-water mark; 0 while there is room enough."""
        capacity = self._limits.capacity_bytes
        assert capacity is not None
        room = self._ledger.room() + freed
        if room >= self._ledger.low_room() and not self._ledger.lacks_room:
            return 0
        goal = max(int(capacity * (1 - self._timing.low_water)), min(self._ledger.needed_bytes(), capacity // 2))
        return max(0, goal - room)

    def _warn(self, blob_count: int, pinned_count: int) -> None:
        if self.sweep.has_warned:
            return
        self.sweep.has_warned = True
        _log.warning(
            "the bucket is full of what this fleet may not evict, so nothing more is stored: raise storage_bytes, "
            "delete or unpin what nobody needs, or set evict_other_namespaces. storage_bytes=%d used_bytes=%d blobs=%d "
            "pinned_blobs=%d",
            self._limits.capacity_bytes,
            self._ledger.used_bytes(),
            blob_count,
            pinned_count,
        )

    def _still_leads(self) -> bool:
        return self._lease.may_act() and self._lease.check()

    def _delete(self, listing: Listing, part: _Batchful) -> Generator[bool, None, None]:
        size = self._timing.delete_batch
        for start in range(0, len(part.rows), size):
            rows = part.rows[start : start + size]
            while not self._lease.may_act():
                yield True  # the keeper renews the lease first, or learns that it is lost
            if not self._lease.check():
                raise TierUnavailable("this server no longer leads the bucket: the pass is given up")
            self._store.delete([object_path(listing.name(row)) for row in rows])
            size_bytes = sum(listing.size_bytes(row) for row in rows)
            self._ledger.freed(size_bytes, len(rows))
            self._count(part.kind, len(rows), size_bytes)
            yield False

    def _count(self, kind: str, blobs: int, size_bytes: int) -> None:
        if kind == "hole":
            self.sweep.holes_collected += blobs
        elif kind == "expired":
            self.sweep.expired_blobs += blobs
            self.sweep.expired_bytes += size_bytes
        else:
            self.sweep.evicted_blobs += blobs
            self.sweep.evicted_bytes += size_bytes
