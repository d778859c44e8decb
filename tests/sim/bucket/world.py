"""A bucket, several servers and a network in one deterministic simulation: one seed, one run.

Each server has two threads, as in production: one calls ``turn``, one PUTs. Only one thread of the world runs at a
time; every request to the store is a point at which another may. Simulated: latencies, replies that get lost (before or
after the request was applied, also long after), stores that fail for a while, servers frozen at any request for longer
than every expiry, crashes, restarts, clocks of different origin and rate.

Not simulated, because no protocol without fencing can survive it: a PUT of a blob that lands later than its deadline
plus ``settle_s`` after it was begun (a machine frozen in the middle of a PUT).
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from tests.sim.virtual_time import EPOCH_S, Hub, SimClock, Task
from tiered_kv.errors import CapacityExceeded, TierUnavailable
from tiered_kv.fleet.keeper import BucketKeeper, KeeperConfig
from tiered_kv.fleet.layout import Found
from tiered_kv.fleet.timing import Timing
from tiered_kv.keys.naming import BlobName, object_path, parse_object_path

PACE = Timing(
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
    rest_after_s=15.0,
    rest_pass_s=100.0,
)
EVENTS_MAX = 1_000_000


@dataclass(slots=True)
class Stored:
    """An object and since when one of that name is there."""

    data: bytes
    modified_s: float
    there_since: float


@dataclass(slots=True)
class Faults:
    """How often what goes wrong, per request; and how often a server stores nothing for a while."""

    failing: float = 0.0
    lost_reply: float = 0.0
    late: float = 0.0
    frozen: float = 0.0
    idle: float = 0.0


class World(Hub):
    """Time and the bucket. Invariants are checked by ``watchers`` after every change of the bucket."""

    def __init__(self, seed: str) -> None:
        super().__init__(seed, EVENTS_MAX)
        self.objects: dict[str, Stored] = {}
        self.faults = Faults()
        self.watchers: list[Callable[[], None]] = []
        self.on_delete: Callable[[str, list[str]], None] = lambda server, paths: None

    def changed(self) -> None:
        for watcher in self.watchers:
            watcher()

    def put(self, path: str, data: bytes) -> None:
        old = self.objects.get(path)
        self.objects[path] = Stored(data, EPOCH_S + self.now_s, old.there_since if old else self.now_s)
        self.changed()

    def blobs(self) -> dict[str, Stored]:
        return {path: stored for path, stored in self.objects.items() if parse_object_path(path) is not None}

    def blob_bytes(self) -> int:
        return sum(len(stored.data) for stored in self.blobs().values())


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

    def get_many(self, paths: Sequence[str], size_max: int) -> list[Found]:
        """The answers come in any order, and each tells of another moment."""
        del size_max
        draw, begun_s = self._world.draw, self._world.now_s
        found: list[Found] = [None] * len(paths)
        for after_s, number in sorted((draw.expovariate(20), number) for number in range(len(paths))):
            try:
                self._answer(max(0.0, begun_s + after_s - self._world.now_s))
            except TierUnavailable as exc:
                found[number] = exc
                continue
            stored = self._world.objects.get(paths[number])
            found[number] = stored.data if stored else None
        return found

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
            self.listed_since = self._world.now_s
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
        self._answer(self._world.draw.expovariate(20))

    def _answer(self, after_s: float) -> None:
        world, faults = self._world, self._world.faults
        if world.draw.random() < faults.frozen:
            world.sleep(world.draw.uniform(5, 150))
        world.sleep(after_s)
        if world.draw.random() < faults.failing:
            world.sleep(world.draw.uniform(0, PACE.put_timeout_s))
            raise TierUnavailable("the simulated store failed")

    def _change(self, apply: Callable[[], None]) -> None:
        self._request()
        world, faults = self._world, self._world.faults
        if world.draw.random() < faults.late:
            # The client gives up at its deadline; the request is applied some time before settle_s has passed.
            world.after(world.draw.uniform(0, PACE.put_timeout_s * 0.8), apply)
            world.sleep(world.draw.uniform(0, PACE.put_timeout_s * 0.1))
            raise TierUnavailable("the simulated store did not answer in time")
        apply()
        if world.draw.random() < faults.lost_reply:
            raise TierUnavailable("the simulated reply was lost")
        world.sleep(world.draw.expovariate(20))


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
    pace: Timing = PACE
    start_s: float = 0.0
    stored_count: int = 0
    refused_count: int = 0
    in_flight: int = 0

    def __post_init__(self) -> None:
        self.store = WorldStore(self.world, self)
        self.is_alive, self.is_writing, self._is_crashed = True, True, False
        clock = SimClock(self.world)
        self.keeper = BucketKeeper(self.store, self.config, self.pace, clock.monotonic, server_id=self.name)
        for chain in self.chains:
            self.keeper.serve(chain.namespace)
        self._tasks: list[Task] = []
        for work in (self._turn, self._write_until_it_ends):
            self.world.after(self.start_s, partial(self._begin, work))

    def _begin(self, work: Callable[[], None]) -> None:
        if not self._is_crashed:
            self._tasks.append(self.world.start(work))

    def crash(self) -> None:
        """SIGKILL: no thread of it goes on; what it sent may still land."""
        self.is_alive, self._is_crashed = False, True
        for task in self._tasks:
            self.world.kill(task)

    def close(self) -> None:
        """End it in an orderly way, from one of its own threads, at its next turn."""
        self.is_alive = False

    def _turn(self) -> None:
        while self.is_alive:
            self.keeper.turn()
            self.world.sleep(self.world.draw.uniform(0.8, 1.2))
        while self.is_writing:
            self.world.sleep(0.5)
        self.keeper.close()

    def _write_until_it_ends(self) -> None:
        self._write()
        self.is_writing = False

    def _write(self) -> None:
        draw = self.world.draw
        while self.is_alive:
            self.world.sleep(draw.expovariate(2))
            if draw.random() < self.world.faults.idle:
                self.world.sleep(draw.uniform(5, 120))
            chain = draw.choice(self.chains)
            index = 0
            while object_path(chain.name(index)) in self.world.objects:
                index += 1
            self.keeper.record_use([chain.name(i) for i in range(index)][: draw.randrange(1, 30)])
            if draw.random() < 0.1 and index:
                index = draw.randrange(index)  # somebody else stored it, too: replaced by equal bytes
            self._put(chain.name(index))

    def _put(self, name: BlobName) -> None:
        world, draw, size = self.world, self.world.draw, self.blob_bytes
        try:
            self.keeper.reserve(size)
        except CapacityExceeded:
            self.refused_count += 1
            return
        self.in_flight += size
        world.changed()
        path = object_path(name)
        chance = draw.random()
        outcome: bool | None = True
        if chance < world.faults.late:
            # Nobody will know: it lands within its deadline plus settle_s, after the client gave up, or never.
            lands_s = draw.uniform(0, 0.97 * (PACE.put_timeout_s + PACE.settle_s) / 1.02)
            if draw.random() < 0.7:
                world.after(lands_s, lambda: world.put(path, bytes(size)))
            world.sleep(PACE.put_timeout_s / 1.02)
            outcome = None
        elif chance < world.faults.late + world.faults.failing:
            world.sleep(draw.uniform(0, PACE.put_timeout_s))
            outcome = False
        else:
            world.sleep(min(draw.expovariate(3), PACE.put_timeout_s * 0.9))
        self.in_flight -= size
        if outcome:
            world.put(path, bytes(size))
            self.stored_count += 1
        self.keeper.finished(size, outcome)
