"""One server of the cache simulation: the real engine over the real wrappers, with simulated media, threads and memory.

Owns what dies with a server. The wrappers are stacked by ``tiers/open.py`` and the self-test at start is
``server/compose.py``'s; between them and the media sits ``FaultyTier``.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from tests.kit.engine_world import GEOMETRIES, NAMESPACES
from tests.sim.cache.executor import SimExecutor
from tests.sim.cache.faults import FaultSource
from tests.sim.cache.media import Bucket, Disk, SimDisk, SimStore, Speed
from tests.sim.cache.oracle import CHUNKS, Chunk, label
from tests.sim.cache.promises import Promise, SimArena
from tests.sim.virtual_time import Hub, SimClock
from tiered_kv.chunks.arena import create_slabs
from tiered_kv.engine.engine import Engine
from tiered_kv.engine.executor import LOCAL_THREADS, Pool
from tiered_kv.engine.self_test import self_test_format
from tiered_kv.errors import TierUnavailable
from tiered_kv.fleet.keeper import BucketKeeper, KeeperConfig
from tiered_kv.fleet.timing import Timing
from tiered_kv.keys.namespace import SELF_TEST_NAMESPACE
from tiered_kv.metrics.recorder import Recorder
from tiered_kv.server import compose
from tiered_kv.testing.faults import FaultyTier
from tiered_kv.tiering.index import BlobState
from tiered_kv.tiering.leases import OVERFLOW
from tiered_kv.tiering.lookups import LookupRequest
from tiered_kv.tiering.quotas import Quota
from tiered_kv.tiering.tiering import Tiering
from tiered_kv.tiering.types import LeaseEnd, LookupUpdate, SlotGrant, SlotId, SlotRecall
from tiered_kv.tiers import open as stacking
from tiered_kv.tiers.base import Tier
from tiered_kv.tiers.object.store import ObjectStore
from tiered_kv.tiers.object.tier import ObjectTier

PACE = Timing(
    expiry_s=16.0,
    put_timeout_s=4.0,
    settle_s=2.0,
    heartbeat_s=2.0,
    recency_s=10.0,
    pass_s=30.0,
    hole_grace_s=40.0,
    usage_s=10.0,
    epoch_s=5.0,
    ahead_bytes=2 << 14,
    watch_s=15.0,
)
TICK_S = 0.5
"""How often the server's loop turns when nobody wakes it."""

BUSY_STEPS_MAX = 2000
"""Turns of the loop in a row of which each says that there is more to do at once."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a node is made of, drawn once per schedule."""

    host_bytes: int
    disk_speed: Speed | None
    bucket_speed: Speed | None
    remote_threads: int
    admissions: Mapping[str, str]
    shares: Mapping[str, tuple[float, float]]


class Errors(logging.Handler):
    """Collects what the engine logs as an error: a failure that no part declared."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(f"{record.getMessage()} {record.exc_info}")


class Node:
    """A server, from its start to its end; boots again over the same media.

    Attributes:
        is_up: Clients may use it.
        credits: Per open session, empty slots its client was told of.
        filling: Slots that are being filled now, and by which session.
        acknowledged: Keys of what must stay on disk because an operator pinned it and was told so.
    """

    def __init__(self, hub: Hub, number: int, machine: Machine, disk: Disk | None, bucket: Bucket | None) -> None:
        self.hub = hub
        self.number = number
        self.machine = machine
        self.disk = disk
        self.bucket = bucket
        self.struck: Counter[str] = Counter()
        self.counters: Counter[str] = Counter()
        self.faults: dict[str, FaultSource] = {}
        if disk is not None:
            self.faults["disk"] = FaultSource(hub, f"disk{number}", disk.damage, self.struck)
        if bucket is not None:
            self.faults["bucket"] = FaultSource(hub, f"bucket{number}", bucket.damage, self.struck)
        self.clock = SimClock(hub)
        self.is_up = False
        self.is_draining = False
        self.life = 0
        self.bytes_compared = 0
        self._engine: Engine | None = None
        self._pins_told: list[bytes] | None = None
        self.executor = SimExecutor(hub, {}, self.wake)
        self.frozen_until_s = 0.0
        self._is_woken = False
        self._steps = 0
        self._busy_steps = 0

    @property
    def engine(self) -> Engine:
        """The engine of this life."""
        assert self._engine is not None
        return self._engine

    # -- life ----------------------------------------------------------------------------------------------------------

    def boot(self) -> bool:
        """Start a server; False when it could not, as one that dies at its start."""
        self.life += 1
        self.credits: dict[int, list[SlotId]] = {}
        self._turns = 0
        self.promises: dict[int, Promise] = {}
        self.spaces: dict[int, str] = {}
        self.filling: dict[SlotId, int] = {}
        self.acknowledged: set[bytes] = set()
        self.errors = Errors()
        self._ended: Counter[str] = Counter()
        formats = {SELF_TEST_NAMESPACE: self_test_format()}
        self.executor = SimExecutor(self.hub, self._threads(), self.wake)
        try:
            opened = self._open_tiers(formats.get)
            tiers = [one.tier for one in opened]
            tiering = Engine.build_tiering(self.machine.host_bytes, tiers, admissions=self.machine.admissions)
            self._listen_to_pins(tiering)
            self.arena = SimArena(create_slabs(tiering.slots.slab_count))
            self._engine = Engine(tiers, self.arena, tiering, self.executor, self.clock, formats)
            self.breakers = [one.breaker for one in opened]
            for tier, one in enumerate(opened, 1):
                self.engine.guards.add(tier, one.breaker, one.trial)
                compose._test(self.engine, tier, one, self.clock, is_strict=False)
            self.engine.start()
        except TierUnavailable as exc:
            self.hub.note(f"node{self.number} does not start: {exc}")
            self.counters["failed_starts"] += 1
            self.executor.kill()
            self.leave()
            return False
        logging.getLogger("tiered_kv.engine").addHandler(self.errors)
        self.is_up, self.is_draining = True, False
        self._check_restored()
        self._tick(self.life)
        return True

    def _threads(self) -> dict[Pool, int]:
        remote = dict.fromkeys((Pool.REMOTE_LOAD, Pool.REMOTE_STORE), self.machine.remote_threads)
        return dict(LOCAL_THREADS) | (remote if self.bucket is not None else {})

    def _open_tiers(self, formats: stacking.Formats) -> list[stacking.OpenTier]:
        media: list[Tier] = []
        if self.disk is not None:
            assert self.machine.disk_speed is not None
            faults = self.faults["disk"]
            disk = SimDisk(self.hub, self.disk, self.machine.disk_speed, faults, self.clock)
            media.append(FaultyTier(disk, faults.plan, faults.meet))
        if self.bucket is not None:
            assert self.machine.bucket_speed is not None
            faults = self.faults["bucket"]
            store = cast(Any, SimStore(self.hub, self.bucket, self.machine.bucket_speed, faults, PACE.put_timeout_s))
            limits = KeeperConfig(self.bucket.capacity_bytes, evicts_other_namespaces=True)
            name = f"node{self.number}-{self.life}"
            keeper = BucketKeeper(store, limits, PACE, self.clock.monotonic, server_id=name)
            bucket = ObjectTier(cast(ObjectStore, store), keeper=keeper, io_concurrency=1)  # as SimDisk's
            media.append(FaultyTier(bucket, faults.plan, faults.meet))
        return [stacking.wrapped(medium, formats, Recorder(), self.clock.monotonic) for medium in media]

    def crash(self) -> None:
        """SIGKILL: nothing is drained, and the media keep what they have."""
        self.hub.note(f"node{self.number} crash")
        self.is_up = False
        self.executor.kill()
        self.leave()

    def close(self) -> None:
        """End in an orderly way; the executor must be idle."""
        self.hub.note(f"node{self.number} close")
        self.is_up = False
        self.executor.close()
        assert self.executor.is_idle
        for tier in self.engine.tiers.values():
            tier.close()
        self.leave()

    def leave(self) -> None:
        """Give back what a dead server held."""
        if self._engine is None:
            return
        logging.getLogger("tiered_kv.engine").removeHandler(self.errors)
        self.counters.update(self.engine.tiering.counters)
        self.counters["breaker_opened"] += sum(breaker.opened_count for breaker in self.breakers)
        self.arena.close()
        self._engine = None
        assert self.errors.messages == [], f"an undeclared failure. {self.errors.messages}"

    def _tick(self, life: int) -> None:
        if self.life == life and self.is_up:
            self.wake()
            self.hub.after(TICK_S, lambda: self._tick(life))

    # -- clients -------------------------------------------------------------------------------------------------------

    def open(self, space: str) -> int:
        lease_s = self.hub.draw.uniform(0.2, 10.0)
        session, form = self.engine.open_session(NAMESPACES[space], GEOMETRIES[space], lease_s=lease_s)
        share = Quota(*self.machine.shares[space], form.blob_bytes)
        self.engine.tiering.quotas.set(NAMESPACES[space].digest, share)
        self.credits[session], self.spaces[session] = [], space
        self.wake()
        return session

    def slot_bytes(self, session: int) -> int:
        form = self.engine.format_of(NAMESPACES[self.spaces[session]].digest)
        assert form is not None
        return form.blob_bytes

    def lookup(self, session: int, chunks: tuple[Chunk, ...], start: int) -> int:
        keys, digests = [c.record.key for c in chunks], [c.record.prefix_sha256 for c in chunks]
        self._turns += 1
        turn = (self.hub.draw.randrange(3), self._turns)
        number = self.engine.tiering.lookup(session, LookupRequest(keys, digests, start, turn))
        self.promises[number] = Promise(session, self.slot_bytes(session), chunks, start)
        self.wake()
        return number

    def release(self, number: int) -> None:
        promise = self.promises.pop(number)
        self._account(promise)
        self.engine.tiering.release(promise.session, number)
        self.wake()

    def fill(self, session: int, slot: SlotId, data: bytes, offset: int = 0) -> None:
        """A client's copy into a slot, or a part of it."""
        with self.engine.slot_view(slot, self.slot_bytes(session)) as view:
            view[offset : offset + len(data)] = data

    def suspend(self, session: int) -> None:
        """The client is lost; its processes may still copy."""
        self.engine.tiering.suspend_session(session)
        self.wake()

    def close_session(self, session: int) -> None:
        for promise in self.promises.values():
            if promise.session == session:
                self._account(promise)
        self.engine.tiering.close_session(session)
        del self.credits[session], self.spaces[session]
        self.filling = {slot: owner for slot, owner in self.filling.items() if owner != session}
        self.promises = {n: promise for n, promise in self.promises.items() if promise.session != session}
        self.wake()

    def _check_restored(self) -> None:
        """Assert that a start knows of every blob that is on its disk and was not damaged there."""
        if self.disk is None:
            return
        for name in self.disk.blobs:
            entry = self.engine.tiering.index.get(name.key)
            is_known = entry is not None and entry.blobs[1] in (BlobState.PRESENT, BlobState.DELETING)
            assert is_known or name in self.disk.damage, f"a start forgot a blob. chunk={label(name)}"

    def _account(self, promise: Promise) -> None:
        self._ended["lookups"] += 1
        self._ended["asked"] += len(promise.chunks) - promise.start
        self._ended["got"] += promise.ready

    # -- the loop ------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """The loop turns soon."""
        if not self._is_woken:
            self._is_woken = True
            self.hub.after(self.hub.draw.uniform(1e-6, 5e-4), self.step)

    def step(self) -> None:
        """One turn of the loop."""
        self._is_woken = False
        if not self.is_up:
            return
        if self.hub.now_s < self.frozen_until_s:
            self._is_woken = True
            self.hub.after(self.frozen_until_s - self.hub.now_s, self.step)
            return
        for update in self.engine.step():
            match update:
                case LookupUpdate(_, lookup) if lookup in self.promises:
                    self.promises[lookup].learn(update.answer)
                case LeaseEnd(_, lookup) if lookup in self.promises:
                    self._lease_ends(lookup)
                case SlotGrant(session, slots) if session in self.credits:
                    self._granted(session, slots)
                case SlotRecall(session, slots) if session in self.credits:
                    for slot in [slot for slot in slots if slot in self.credits[session]]:
                        self.credits[session].remove(slot)
                        self.engine.tiering.give_back(session, slot)
                    self.wake()
        self._steps += 1
        self._check_leases()
        self._go_on()
        self._note_pins()
        if self._steps % 8 == 0:
            self.check_acknowledged()

    def _go_on(self) -> None:
        """The loop turns at once while the engine says that there is more to do, which ends."""
        has_more = self.engine.wait_s == 0
        self._busy_steps = self._busy_steps + 1 if has_more else 0
        assert self._busy_steps < BUSY_STEPS_MAX, "the loop turns for nothing"
        if has_more:
            self.wake()

    def _lease_ends(self, lookup: int) -> None:
        """The client reads it at once, or a moment later; until then its slots stay as they are."""
        promise, life = self.promises[lookup], self.life
        assert not promise.is_claimed, "the leases of a running load end"
        self.counters["leases_ended"] += 1

        def read() -> None:
            if not self.is_up or self.life != life or self.promises.get(lookup) is not promise:
                return
            if not self.engine.tiering._sessions[promise.session].is_suspended:  # a lost client reads no more
                del self.promises[lookup]
                self.engine.tiering.release(promise.session, lookup, is_asked_anew=True)
                self.wake()
                promise.on_end()

        self.hub.after(self.hub.draw.expovariate(20.0), read)

    def claim(self, number: int) -> None:
        """A load begins; too late where the end was told already, and then the client will find out."""
        promise = self.promises[number]
        promise.is_claimed = not self.is_ending(number)
        self.engine.tiering.claim(promise.session, number)
        self.wake()

    def is_ending(self, number: int) -> bool:
        lookup = self.engine.tiering._lookups.get(number)
        return lookup is None or lookup.is_ending

    def _granted(self, session: int, slots: tuple[SlotId, ...]) -> None:
        promised = {slot for promise in self.promises.values() for slot in promise.slots()}
        held = {slot for granted in self.credits.values() for slot in granted} | self.filling.keys()
        for slot in slots:
            assert slot not in promised, "a leased slot was granted"
            assert slot not in held, "a slot was granted twice"
            self.fill(session, slot, b"\xee" * 256, 4000)  # a client writes whenever it likes
        self.credits[session].extend(slots)

    # -- what must hold ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert, cheaply, what must hold after every event."""
        for promise in self.promises.values():
            self.bytes_compared += promise.compare(self.arena)
        self.arena.check_kept(self.machine.host_bytes)
        slots, limits = self.engine.tiering.slots, self.engine.tiering.limits
        assert slots.assigned_bytes <= self.machine.host_bytes, "host memory is over its capacity"
        overflow = OVERFLOW if len(self.engine.tiering._sessions) > 1 else 1.0
        assert self.engine.tiering._host.leased_bytes <= self.machine.host_bytes * limits.leased_share * overflow

    def _check_leases(self) -> None:
        """Assert that what nobody claims has ended in time, by a clock that may run a little apart."""
        for number, promise in self.promises.items():
            session = self.engine.tiering._sessions[promise.session]
            if promise.is_claimed or session.is_suspended or not promise.has_slots:
                continue
            if promise.leased_s is None or promise.leased_s == math.inf:  # its time begins with the step after this one
                promise.leased_s = math.inf if promise.leased_s is None else self.hub.now_s
            is_over = self.hub.now_s - promise.leased_s > 1.05 * session.lease_s + 0.01
            assert not is_over or self.is_ending(number), f"a lease does not end. lookup={number}"

    def _note_pins(self) -> None:
        """What an operator is promised from now on: the pins tiering was just told, as far as disk has them."""
        if self._pins_told is None:
            return
        index = self.engine.tiering.index
        self.acknowledged.clear()
        for key in self._pins_told:
            entry = index.get(key)
            while entry is not None:
                if entry.blobs[1] is BlobState.PRESENT:
                    self.acknowledged.add(entry.record.key)
                entry = index.parent(entry)
        self._pins_told = None

    def _listen_to_pins(self, tiering: Tiering) -> None:
        pinning = tiering.pinning
        self._pins_told = None

        def told(tier: int, keys: Iterable[bytes] | None) -> Iterator[None]:
            pins = None if keys is None else list(keys)
            yield from pinning(tier, pins)
            if tier == 1 and self.disk is not None:
                self._pins_told = pins

        tiering.pinning = told  # type: ignore[method-assign]

    def check_acknowledged(self) -> None:
        """Assert that what was acknowledged is there, unless a fault of the medium took it."""
        index = self.engine.tiering.index
        for tier, medium in enumerate((m for m in (self.disk, self.bucket) if m is not None), 1):
            if isinstance(medium, Bucket) and medium.capacity_bytes is not None:
                continue  # others evict there
            there = set(medium.blobs) if isinstance(medium, Disk) else set(medium.names())
            for entry in index.entries():
                if entry.record.key not in CHUNKS:
                    continue  # left behind by a self-test that was cut short
                name = CHUNKS[entry.record.key].name
                if entry.blobs[tier] is BlobState.PRESENT and name not in there:
                    assert name in medium.damage, f"an acknowledged store is lost. tier={tier} chunk={label(name)}"
        if self.disk is not None:
            there = set(self.disk.blobs)
            for key in sorted(self.acknowledged):
                name = CHUNKS[key].name
                assert name in there or name in self.disk.damage, f"a pinned blob is lost. chunk={label(name)}"

    def check_idle(self) -> None:
        """Assert that nothing is left behind when nobody wants anything."""
        tiering = self.engine.tiering
        tiering.check_integrity()
        figures = tiering.usage()
        left = {name: figures[name] for name in ("leased_bytes", "lookups", "reserved_slots", "sessions")}
        assert not any(left.values()), f"something is left behind. {left}"
        assert tiering.pending_writes == 0, "writes are pending and none is running"
        served = self.engine.served().chunks  # what sessions were told, or more: the last news of a lost one
        assert (served.lookups, served.asked) == (self._ended["lookups"], self._ended["asked"]), (
            "lookups were miscounted"
        )
        assert self._ended["got"] <= served.hits.total() <= served.asked, f"hits were miscounted. {served}"
        if self.disk is not None:
            assert not self.disk.temps, "a temp file is left behind"
            told, there = self.engine.tiers[1].usage().used_bytes, self.disk.used_bytes
            assert told == there or self.disk.is_tampered, f"the disk's accounts drifted. told={told} there={there}"
        self.check_acknowledged()
