"""A bucket, several servers and a network in one deterministic simulation: one seed, one run.

Each server has two threads, as in production: one calls ``turn``, one PUTs. Only one thread of the world runs at a
time; every request to the store is a point at which another may. Simulated: latencies, replies that get lost (before or
after the request was applied, also long after), stores that fail for a while, servers frozen at any request for longer
than every expiry, crashes, restarts, clocks of different origin and rate.

Not simulated, because no protocol without fencing can survive it: a PUT of a blob that lands later than its deadline
plus ``settle_s`` after it was begun (a machine frozen in the middle of a PUT).
"""

import heapq
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tiered_kv.errors import CapacityExceeded, TierUnavailable
from tiered_kv.keys.naming import BlobName, object_path, parse_object_path
from tiered_kv.tiers.bucket.keeper import BucketKeeper, KeeperConfig
from tiered_kv.tiers.bucket.pace import Pace

PACE = Pace(
    expiry_s=20.0,
    put_timeout_s=6.0,
    settle_s=2.0,
    heartbeat_s=2.0,
    recency_s=20.0,
    pass_s=60.0,
    hole_grace_s=90.0,
    usage_s=5.0,
    epoch_s=10.0,
    delete_batch=3,
    ahead_bytes=400,
    watch_s=20.0,
)
EPOCH_S = 1_700_000_000.0


class Crashed(BaseException):
    """Ends a thread of a simulated server that was killed."""


@dataclass(slots=True)
class Stored:
    """An object and since when one of that name is there."""

    data: bytes
    modified_s: float
    there_since: float


@dataclass(slots=True)
class Faults:
    """How often what goes wrong, per request."""

    failing: float = 0.0
    lost_reply: float = 0.0
    late: float = 0.0
    frozen: float = 0.0


class World:
    """Time, the bucket, and whoever acts. Invariants are checked by ``watchers`` after every change of the bucket."""

    def __init__(self, seed: str) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.objects: dict[str, Stored] = {}
        self.faults = Faults()
        self.watchers: list[Callable[[], None]] = []
        self.on_delete: Callable[[str, list[str]], None] = lambda server, paths: None
        self.failure: BaseException | None = None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._baton = threading.Semaphore(0)

    def at(self, when: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, event))

    def run_until(self, when: float) -> None:
        """Let everything that is due happen."""
        while self._events and self._events[0][0] <= when:
            self.now, _, event = heapq.heappop(self._events)
            event()
            if self.failure is not None:
                raise self.failure
        self.now = when

    def resume(self, actor: "Actor") -> None:
        """Hand control to a thread until it waits again."""
        actor.turn.release()
        self._baton.acquire()

    def give_back(self) -> None:
        self._baton.release()

    def changed(self) -> None:
        for watcher in self.watchers:
            watcher()

    def put(self, path: str, data: bytes) -> None:
        old = self.objects.get(path)
        self.objects[path] = Stored(data, EPOCH_S + self.now, old.there_since if old else self.now)
        self.changed()

    def blobs(self) -> dict[str, Stored]:
        return {path: stored for path, stored in self.objects.items() if parse_object_path(path) is not None}

    def blob_bytes(self) -> int:
        return sum(len(stored.data) for stored in self.blobs().values())


class Actor:
    """One thread of a simulated server."""

    def __init__(self, world: World, work: Callable[["Actor"], None], start_s: float) -> None:
        self.world = world
        self.turn = threading.Semaphore(0)
        self.is_killed = False
        self.is_over = False
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()
        world.at(start_s, lambda: world.resume(self))

    def wait(self, seconds: float) -> None:
        """Let others go on for that long."""
        self.world.at(self.world.now + seconds, self._wake)
        self.world.give_back()
        self.turn.acquire()
        if self.is_killed:
            raise Crashed

    def _wake(self) -> None:
        if not self.is_over:
            self.world.resume(self)

    def _run(self, work: Callable[["Actor"], None]) -> None:
        self.turn.acquire()
        try:
            if not self.is_killed:
                work(self)
        except Crashed:
            pass
        except BaseException as exc:  # noqa: BLE001  # handed to the thread that runs the world
            self.world.failure = exc
        self.is_over = True
        self.world.give_back()


@dataclass(frozen=True, slots=True)
class Listed:
    """What a simulated LIST tells."""

    path: str
    size_bytes: int
    modified_s: float


class WorldStore:
    """The bucket as one server sees it; satisfies ``layout.Objects``."""

    def __init__(self, world: World, server: "Server") -> None:
        self._world = world
        self._server = server
        self.listed_since = 0.0

    def get(self, path: str, size_max: int | None = None) -> bytes | None:
        del size_max
        self._request()
        stored = self._world.objects.get(path)
        return stored.data if stored else None

    def put(self, path: str, data: bytes | memoryview) -> None:
        self._change(lambda: self._world.put(path, bytes(data)))

    def create(self, path: str, data: bytes | memoryview) -> bool:
        created: list[bool] = []

        def apply() -> None:
            created.append(path not in self._world.objects)
            if created[-1]:
                self._world.put(path, bytes(data))

        self._change(apply)
        return created[0]

    def head(self, path: str) -> Listed | None:
        self._request()
        stored = self._world.objects.get(path)
        return Listed(path, len(stored.data), float(int(stored.modified_s))) if stored else None

    def list(self, prefix: str) -> Iterator[Listed]:
        if not prefix:
            self.listed_since = self._world.now
        after = ""
        while True:
            self._request()
            paths = sorted(path for path in self._world.objects if path.startswith(prefix) and path > after)
            for path in paths[:7]:
                stored = self._world.objects[path]
                yield Listed(path, len(stored.data), float(int(stored.modified_s)))
            if len(paths) <= 7:
                return
            after = paths[6]

    def delete(self, paths: Sequence[str]) -> None:
        if not paths:
            return

        def apply() -> None:
            for path in paths:
                self._world.objects.pop(path, None)
            self._world.on_delete(self._server.name, list(paths))
            self._world.changed()

        self._change(apply)

    def creates_atomically(self) -> bool:
        return True

    def _request(self) -> None:
        world, faults = self._world, self._world.faults
        actor = self._server.current()
        if world.draw.random() < faults.frozen and actor is self._server.turner:
            actor.wait(world.draw.uniform(5, 150))
        actor.wait(world.draw.expovariate(20))
        if world.draw.random() < faults.failing:
            actor.wait(world.draw.uniform(0, PACE.put_timeout_s))
            raise TierUnavailable("the simulated store failed")

    def _change(self, apply: Callable[[], None]) -> None:
        self._request()
        world, faults = self._world, self._world.faults
        actor = self._server.current()
        if world.draw.random() < faults.late:
            # The client gives up at its deadline; the request is applied some time before settle_s has passed.
            world.at(world.now + world.draw.uniform(0, PACE.put_timeout_s * 0.8), apply)
            actor.wait(world.draw.uniform(0, PACE.put_timeout_s * 0.1))
            raise TierUnavailable("the simulated store did not answer in time")
        apply()
        if world.draw.random() < faults.lost_reply:
            raise TierUnavailable("the simulated reply was lost")
        actor.wait(world.draw.expovariate(20))


@dataclass(slots=True)
class Chain:
    """Names of one prefix."""

    namespace: bytes
    number: int

    def name(self, index: int) -> BlobName:
        key = self.key(index)
        return BlobName(self.namespace, key, self.key(index - 1) if index else self.namespace, index)

    def key(self, index: int) -> bytes:
        return random.Random(f"{self.namespace.hex()} {self.number} {index}").randbytes(16)


@dataclass
class Server:
    """A simulated server: a keeper, the thread that turns it, and a thread that PUTs."""

    world: World
    name: str
    config: KeeperConfig
    chains: list[Chain]
    blob_bytes: int = 100
    pace: Pace = PACE
    start_s: float = 0.0
    stored_count: int = 0
    refused_count: int = 0
    in_flight: int = 0
    holes_made: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        draw = self.world.draw
        rate, origin = draw.uniform(0.98, 1.02), draw.uniform(0, 1e6)
        self.store = WorldStore(self.world, self)
        self._running: Actor | None = None
        self.is_alive = True
        self.keeper = BucketKeeper(
            self.store, self.config, self.pace, lambda: origin + self.world.now * rate, server_id=self.name
        )
        for chain in self.chains:
            self.keeper.serve(chain.namespace)
        self.turner = Actor(self.world, self._turn, self.world.now + self.start_s)
        self.writer = Actor(self.world, self._write, self.world.now + self.start_s)

    def current(self) -> Actor:
        """The thread that is making a request."""
        me = threading.current_thread()
        return self.turner if me is self.turner._thread else self.writer

    def crash(self) -> None:
        """SIGKILL: no thread of it goes on; what it sent may still land."""
        self.is_alive = False
        self.turner.is_killed = self.writer.is_killed = True

    def close(self) -> None:
        """End it in an orderly way, from one of its own threads, at its next turn."""
        self.is_alive = False

    def _turn(self, actor: Actor) -> None:
        while self.is_alive:
            self.keeper.turn()
            actor.wait(self.world.draw.uniform(0.8, 1.2))
        while not self.writer.is_over:
            actor.wait(0.5)
        self.keeper.close()

    def _write(self, actor: Actor) -> None:
        draw = self.world.draw
        while self.is_alive:
            actor.wait(draw.expovariate(2))
            chain = draw.choice(self.chains)
            index = 0
            while object_path(chain.name(index)) in self.world.objects:
                index += 1
            self.keeper.record_use([chain.name(i) for i in range(index)][: draw.randrange(1, 30)])
            if draw.random() < 0.1 and index:
                index = draw.randrange(index)  # somebody else stored it, too: replaced by equal bytes
            self._put(actor, chain.name(index))

    def _put(self, actor: Actor, name: BlobName) -> None:
        world, draw, size = self.world, self.world.draw, self.blob_bytes
        try:
            self.keeper.reserve(size)
        except CapacityExceeded:
            self.refused_count += 1
            return
        self.in_flight += size
        world.changed()
        begun, path = world.now, object_path(name)
        chance = draw.random()
        outcome: bool | None = True
        if chance < world.faults.late:
            # Nobody will know: it lands within its deadline plus settle_s, after the client gave up, or never.
            lands = begun + draw.uniform(0, 0.97 * (PACE.put_timeout_s + PACE.settle_s) / 1.02)
            if draw.random() < 0.7:
                world.at(lands, lambda: world.put(path, bytes(size)))
            actor.wait(PACE.put_timeout_s / 1.02)
            outcome = None
        elif chance < world.faults.late + world.faults.failing:
            actor.wait(draw.uniform(0, PACE.put_timeout_s))
            outcome = False
        else:
            actor.wait(min(draw.expovariate(3), PACE.put_timeout_s * 0.9))
        self.in_flight -= size
        if outcome:
            world.put(path, bytes(size))
            self.stored_count += 1
        self.keeper.finished(size, outcome)
