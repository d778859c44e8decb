"""A fleet on one bucket, in virtual time: hundreds of servers, to see what grows with them and what breaks first.

The keepers are the product's: reports, grants, election, garbage collection. Simulated are the bucket
(``fleet_store.py``), clocks that run apart, and what servers do: store, use, join, leave, stand still, die. A server
turns as the object tier has it turn, once a second or as soon as the turn before has ended, and puts one blob at a
time; one that is refused is tried again every second, as the server's upload queue does.

Noted, not asserted, because the same run shows where a fleet is too large: bytes beyond the limit, PUTs on grants of an
overtaken term, leaders that act at the same time, servers that cannot store.
"""

import time
from collections import Counter
from dataclasses import dataclass, field

from tests.sim.bucket.fleet_store import Bucket, FleetStore, Service, Tally
from tests.sim.virtual_time import EPOCH_S, Hub, SimClock, Task
from tiered_kv.errors import CapacityExceeded, TierUnavailable
from tiered_kv.fleet.keeper import BucketKeeper, KeeperConfig
from tiered_kv.fleet.layout import LEASES
from tiered_kv.fleet.timing import Timing
from tiered_kv.keys.naming import BlobName, object_path

TURN_S = 1.0
"""How often a server's keeper has a turn (``flush_interval_s`` of the object tier)."""

RETRY_S = 1.0
CHAIN_CHUNKS = 32
NAMESPACE = b"\x11" * 16
FILLED_SHARE = 0.9
EVENTS_MAX = 100_000_000


@dataclass(frozen=True, slots=True)
class Plan:
    """One run.

    Attributes:
        blobs_per_server: What the limit has room for.
        stores_per_s: Blobs that each server wants to store.
        uses_per_s: Chunks whose use each server tells, besides those it stores.
    """

    servers: int
    seed: int = 0
    blobs_per_server: int = 500
    blob_bytes: int = 2 << 20
    stores_per_s: float = 0.2
    uses_per_s: float = 1.0
    service: Service = field(default_factory=Service)
    timing: Timing = field(default_factory=lambda: Timing.for_timeout(10.0))

    @property
    def capacity_bytes(self) -> int:
        return self.servers * self.blobs_per_server * self.blob_bytes


@dataclass(frozen=True, slots=True)
class LeaderTurn:
    """One turn of a leader: virtual time it took, CPU time of the product in it, requests."""

    seconds: float
    cpu_s: float
    requests: int


class Server:
    """A server: the product's keeper, the thread that turns it, and PUTs as events."""

    def __init__(self, fleet: "Fleet", number: int, start_s: float) -> None:
        plan, draw = fleet.plan, fleet.draw
        self.number = number
        self.frozen_until_s = 0.0
        self.is_alive, self._is_crashed, self._is_putting = True, False, False
        self.waiting_since_s: float | None = None
        self._fleet = fleet
        self._last: BlobName | None = None
        self.store = FleetStore(fleet.bucket, self)
        name = f"kv-node-{number:04d}-{draw.randrange(1, 1 << 16)}-{draw.randbytes(4).hex()}"
        config = KeeperConfig(storage_bytes=plan.capacity_bytes)
        self.keeper = BucketKeeper(self.store, config, plan.timing, SimClock(fleet).monotonic, server_id=name)
        self.keeper.serve(NAMESPACE)
        self._task: Task | None = None
        fleet.after(start_s, self._begin)

    # -- what the others see -------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        return self.is_alive and self.keeper._term_led is not None

    @property
    def acts(self) -> bool:
        """Whether it leads and may grant and delete on the strength of that."""
        return self.leads and self.keeper._lease.may_act()

    @property
    def session_count(self) -> int:
        """Sessions it has begun."""
        return self.keeper._member._number

    def created(self, path: str) -> None:
        """The store created an object for it."""
        if path.startswith(LEASES):
            self._fleet.led_at_s.append(self._fleet.now_s)

    # -- what happens to it --------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """SIGKILL; a PUT that was begun lands."""
        self.is_alive, self._is_crashed = False, True
        if self._task is not None:
            self._fleet.kill(self._task)

    def close(self) -> None:
        """End in an orderly way, with the next turn."""
        self.is_alive = False

    def freeze(self, seconds: float) -> None:
        """Stand still, as a machine that is suspended."""
        self.frozen_until_s = self._fleet.now_s + seconds

    # -- its thread ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self.is_alive:
            self._fleet.after(self._fleet.gap_s(self._fleet.plan.stores_per_s), self._want)
            self._task = self._fleet.start(self._turn_until_it_ends)

    def _turn_until_it_ends(self) -> None:
        fleet = self._fleet
        while self.is_alive:
            begun_s, was_leader = fleet.now_s, self.leads
            cpu_s, requests = time.thread_time() - self.store.cpu_s, self.store.request_count
            self.keeper.turn()
            if was_leader and self.leads:
                cpu_s = time.thread_time() - self.store.cpu_s - cpu_s
                fleet.leader_turns.append(LeaderTurn(fleet.now_s - begun_s, cpu_s, self.store.request_count - requests))
            fleet.sleep(max(0.0, begun_s + TURN_S - fleet.now_s))
        while self._is_putting:
            fleet.sleep(RETRY_S)
        self.keeper.close()

    # -- its PUTs ------------------------------------------------------------------------------------------------------

    def _want(self) -> None:
        """Store the next blob, now or as soon as there is room."""
        fleet = self._fleet
        if not self.is_alive:
            return
        if self.frozen_until_s > fleet.now_s:
            fleet.after(self.frozen_until_s - fleet.now_s, self._want)
            return
        if not fleet.is_storing:
            self.waiting_since_s = None
            self._use()
            fleet.after(fleet.gap_s(fleet.plan.stores_per_s), self._want)
            return
        if self.waiting_since_s is None:
            self.waiting_since_s = fleet.now_s
        size = fleet.plan.blob_bytes
        try:
            self.keeper.reserve(size)
        except CapacityExceeded:
            fleet.refused_count += 1
            fleet.after(RETRY_S, self._want)
            return
        fleet.note_put(self, fleet.now_s - self.waiting_since_s)
        self.waiting_since_s, self._is_putting = None, True
        service = fleet.bucket.service
        fleet.after(min(fleet.bucket.seconds(service.request_s + service.body_s), 9.0), lambda: self._land(size))

    def _land(self, size: int) -> None:
        fleet = self._fleet
        name = self._next_name()
        try:
            fleet.bucket.count("put blob")
            fleet.bucket.put(object_path(name), b"", size)
            is_stored = True
        except TierUnavailable:
            is_stored = False
        if not self._is_crashed:
            fleet.after(max(0.0, self.frozen_until_s - fleet.now_s), lambda: self._learn(name, is_stored=is_stored))

    def _learn(self, name: BlobName, *, is_stored: bool) -> None:
        fleet = self._fleet
        self._is_putting = False
        self.keeper.finished(fleet.plan.blob_bytes, is_stored)
        if is_stored:
            self._last = name
            self.keeper.record_use([name])
        self._use()
        fleet.after(fleet.gap_s(fleet.plan.stores_per_s), self._want)

    def _next_name(self) -> BlobName:
        """The chunk behind the one stored last, while that is there; else the first of another prefix."""
        key, last = self._fleet.draw.randbytes(16), self._last
        if last is None or last.chunk_index + 1 == CHAIN_CHUNKS or object_path(last) not in self._fleet.bucket.objects:
            return BlobName(NAMESPACE, key, NAMESPACE, 0)
        return BlobName(NAMESPACE, key, last.key, last.chunk_index + 1)

    def _use(self) -> None:
        fleet = self._fleet
        if fleet.is_using:
            count = round(fleet.plan.uses_per_s / fleet.plan.stores_per_s)
            self.keeper.record_use(fleet.draw.choices(fleet.old, k=count))


class Fleet(Hub):
    """Time, the bucket and its servers.

    Attributes:
        old: Blobs that lay in the bucket before; some are gone by now.
        is_storing: Whether servers want to store; where not, they use what is there, if ``is_using``.
        tallies: Requests of each phase.
        waits_s: How long each PUT was refused before it began.
        stored_by: PUTs begun under terms after ``since_term``, by the number of their server.
        refused_count: Attempts that were refused.
        backward_count: PUTs on grants of a term that others' PUTs had left behind.
        led_at_s: When each term was created.
        acting_max: Most leaders that could act at the same time, as seen once a second.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(f"fleet {plan.servers} {plan.seed}", EVENTS_MAX)
        self.plan = plan
        self.bucket = Bucket(self, plan.service)
        self.is_storing = self.is_using = True
        self.tallies = [self.bucket.tally]
        self.waits_s: list[float] = []
        self.stored_by: Counter[int] = Counter()
        self.since_term = 0
        self.refused_count = self.backward_count = self.acting_max = 0
        self.led_at_s: list[float] = []
        self.term_puts_at_s: dict[int, float] = {}
        self.leader_turns: list[LeaderTurn] = []
        self.old = self._fill()
        self.servers: list[Server] = []
        for _ in range(plan.servers):
            self.join(self.draw.uniform(0, 10))
        self._watch()

    def _fill(self) -> list[BlobName]:
        """Blobs of earlier days, in whole chains."""
        count = int(self.plan.servers * self.plan.blobs_per_server * FILLED_SHARE)
        names: list[BlobName] = []
        for number in range(count):
            depth = number % CHAIN_CHUNKS
            parent = names[-1].key if depth else NAMESPACE
            names.append(BlobName(NAMESPACE, self.draw.randbytes(16), parent, depth))
        self.bucket.fill({object_path(name): self.plan.blob_bytes for name in names}, EPOCH_S - 86_400.0)
        return names

    # -- servers -------------------------------------------------------------------------------------------------------

    def join(self, after_s: float = 0.0) -> None:
        """A new server."""
        self.servers.append(Server(self, len(self.servers), after_s))

    def alive(self) -> list[Server]:
        return [server for server in self.servers if server.is_alive]

    def leader(self) -> Server | None:
        return next((server for server in self.servers if server.leads), None)

    def gap_s(self, per_s: float) -> float:
        return self.draw.expovariate(per_s)

    # -- what is noted -------------------------------------------------------------------------------------------------

    @property
    def over_bytes(self) -> int:
        """Most that ever lay beyond the limit."""
        return max(0, self.bucket.most_bytes - self.plan.capacity_bytes)

    def note_put(self, server: Server, waited_s: float) -> None:
        """A PUT begins."""
        self.waits_s.append(waited_s)
        term = server.keeper._member.term or 0
        if term > self.since_term:
            self.stored_by[server.number] += 1
        self.backward_count += term < max(self.term_puts_at_s, default=0)
        self.term_puts_at_s.setdefault(term, self.now_s)

    def _watch(self) -> None:
        self.acting_max = max(self.acting_max, sum(server.acts for server in self.servers))
        self.after(1.0, self._watch)

    def begin(self, since_term: int = 0) -> None:
        """Count anew."""
        self.since_term = since_term
        self.bucket.tally = Tally()
        self.tallies.append(self.bucket.tally)
        self.waits_s, self.leader_turns = [], []
        self.stored_by = Counter()
        self.refused_count = 0

    def end(self) -> None:
        """Nothing goes on."""
        for server in self.servers:
            server.crash()
