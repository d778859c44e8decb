"""Several servers and one bucket in a seeded simulation: the limit holds at every step, whatever fails.

``TIERED_KV_SEEDS`` sets the number of seeds, ``TIERED_KV_SEED`` where they start.
"""

import logging

import pytest

from tests.kit.counts import count, seed
from tests.sim.bucket.world import Chain, Faults, Server, World
from tiered_kv.fleet.keeper import KeeperConfig
from tiered_kv.fleet.layout import pin_path
from tiered_kv.keys.naming import object_path, parse_object_path

BLOB_BYTES = 100
OURS, THEIRS = b"\x11" * 16, b"\x22" * 16
SEEDS = range(seed(), seed() + count("SEEDS", 4))


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="tiered_kv")


class Run:
    """One seed: servers, faults, and what must hold after every change."""

    def __init__(self, name, servers=3, capacity_blobs=60):
        self.world = World(name)
        draw = self.world.draw
        self.capacity = capacity_blobs * BLOB_BYTES + 4096  # the keepers' own objects count, too
        self.config = KeeperConfig(storage_bytes=self.capacity)
        self.servers = []
        self.began_within = False
        self.peak = 0
        self.theirs = [object_path(Chain(THEIRS, 0).name(index)) for index in range(5)]
        for path in self.theirs:
            self.world.put(path, bytes(BLOB_BYTES))
        for number in range(draw.randrange(3)):  # what an earlier fleet left; may be more than the limit
            for index in range(draw.randrange(50)):
                self.world.put(object_path(Chain(OURS, number).name(index)), bytes(BLOB_BYTES))
        there = [Chain(OURS, 0).name(index) for index in range(3)]
        self.pinned = [object_path(name) for name in there if object_path(name) in self.world.objects]
        if len(self.pinned) == len(there):
            self.world.put(pin_path(there[-1], 0), b"")
        for _ in range(servers):
            self.start(draw.uniform(0, 30))
        self.world.watchers.append(self.check)
        self.world.on_delete = self.check_delete

    def start(self, after_s=0.0):
        chains = [Chain(OURS, number) for number in range(4)]
        name = f"s{len(self.servers)}"
        self.servers.append(Server(self.world, name, self.config, chains, BLOB_BYTES, start_s=after_s))

    def alive(self):
        return [server for server in self.servers if server.is_alive]

    def check(self):
        """The limit, counting what may still land; no two terms' grants in use; other namespaces untouched."""
        used = self.world.blob_bytes()
        flying = sum(server.in_flight for server in self.servers if server.is_alive)
        if not self.began_within:
            self.began_within = used <= self.capacity
        if self.began_within:
            self.peak = max(self.peak, used)
            assert used <= self.capacity, f"{used} of {self.capacity} bytes at {self.world.now_s:.2f} s"
            assert used + flying <= self.capacity or not self.is_granted(), f"in flight past the limit: {flying}"
        assert all(path in self.world.objects for path in self.theirs)
        assert len(self.terms_in_use()) <= 1, f"grants of several terms in use: {self.terms_in_use()}"

    def is_granted(self):
        return any(server.keeper._budget.granted_bytes for server in self.servers)

    def terms_in_use(self):
        """Terms on whose grants somebody could begin a PUT now."""
        found = set()
        for server in self.servers:
            account = server.keeper._budget
            is_valid = account._is_open and account._clock() < account._valid_until and account._available() > 0
            if server.is_alive and is_valid:
                found.add(server.keeper._member.term)
        return found

    def check_delete(self, server, paths):
        """Of what the leader's LIST found, no parent goes before its child."""
        store = next(s.store for s in self.servers if s.name == server)
        assert len(self.pinned) < 3 or not set(self.pinned) & set(paths), "a pinned prefix was deleted"
        keys = {name.key for name in map(parse_object_path, paths) if name is not None}
        for path, stored in self.world.blobs().items():
            if stored.there_since < store.listed_since:
                assert parse_object_path(path).parent not in keys, f"a parent went before its child {path}"

    def calm_down(self):
        """No faults for a while: afterwards there is one leader, and everybody can store."""
        self.world.faults = Faults()
        self.world.run(200)
        before = {server.name: server.stored_count for server in self.alive()}
        self.world.run(120)
        roles = [server.keeper.figures()["role"] for server in self.alive()]
        assert roles.count("leader") == 1, roles
        for server in self.alive():
            assert server.stored_count > before[server.name], f"{server.name} could not store for two minutes"
            assert server.keeper.figures()["malformed"] == 0

    def holes(self, older_than_s):
        keys = {parse_object_path(path).key for path in self.world.blobs()}
        return [
            path
            for path, stored in self.world.blobs().items()
            if (name := parse_object_path(path)).chunk_index
            and name.parent not in keys
            and stored.there_since < self.world.now_s - older_than_s
        ]

    def end(self):
        self.world.watchers.clear()
        self.world.on_delete = lambda server, paths: None
        for server in self.servers:
            server.crash()
        self.world.run(1000)


@pytest.mark.slow
@pytest.mark.parametrize("number", SEEDS)
def test_the_limit_holds_whatever_fails(number):
    run = Run(f"mixed {number}")
    draw = run.world.draw
    try:
        for _ in range(6):
            run.world.faults = Faults(
                failing=draw.choice([0, 0.02, 0.2]),
                lost_reply=draw.choice([0, 0.02, 0.1]),
                late=draw.choice([0, 0.02, 0.1]),
                frozen=draw.choice([0, 0.01, 0.03]),
                idle=draw.choice([0, 0.05, 0.5]),
            )
            run.world.run(draw.uniform(10, 80))
            chance = draw.random()
            if chance < 0.3 and len(run.alive()) > 1:
                draw.choice(run.alive()).crash()
                run.start(draw.uniform(0, 20))
            elif chance < 0.45 and len(run.alive()) > 1:
                draw.choice(run.alive()).close()
                run.start()
        run.calm_down()
        assert run.peak > run.capacity / 3
        assert run.holes(older_than_s=250) == []
    finally:
        run.end()


@pytest.mark.slow
@pytest.mark.parametrize("number", SEEDS)
def test_the_limit_holds_while_the_lead_goes_round(number):
    """Leaders that take leave, so that the next one begins at once, while servers are frozen on their old grants."""
    run = Run(f"round {number}", servers=4)
    draw = run.world.draw
    try:
        run.world.run(40)
        for _ in range(8):
            run.world.faults = Faults(frozen=draw.choice([0.02, 0.08]), late=0.02, idle=draw.choice([0, 0.1]))
            run.world.run(draw.uniform(10, 25))
            for server in run.alive():
                if server.keeper.figures()["role"] == "leader" and len(run.alive()) > 1:
                    server.close()
                    run.start()
        run.calm_down()
    finally:
        run.end()


@pytest.mark.slow
@pytest.mark.parametrize("number", SEEDS)
def test_the_limit_holds_while_servers_rest_and_wake_up(number):
    """Most stand still for longer than every expiry, the leader too; whoever wakes up finds others at it, or nobody."""
    run = Run(f"rest {number}", servers=4)
    draw = run.world.draw
    rested = set()
    run.world.watchers.append(lambda: rested.update(s.name for s in run.alive() if s.keeper.figures()["is_resting"]))
    try:
        for _ in range(6):
            run.world.faults = Faults(idle=0.5, frozen=draw.choice([0, 0.02]), late=0.02)
            run.world.run(draw.uniform(60, 150))
            if draw.random() < 0.4 and len(run.alive()) > 1:
                draw.choice(run.alive()).crash()
                run.start(draw.uniform(0, 20))
        assert rested, "nobody ever rested"
        run.calm_down()
    finally:
        run.end()


def test_a_simulation_repeats_itself():
    def outcome():
        run = Run("again")
        run.world.faults = Faults(failing=0.05, lost_reply=0.05, late=0.05, frozen=0.02)
        run.world.run(150)
        found = [(s.name, s.stored_count, s.refused_count) for s in run.servers], sorted(run.world.objects)
        run.end()
        return found

    assert outcome() == outcome()
