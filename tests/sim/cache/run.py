"""The cache simulation: one seed, one schedule of the cache's own engine in virtual time, judged by a dictionary."""

import contextlib
import logging
import os
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from types import SimpleNamespace
from unittest import mock

from tests.kit.engine_world import Path
from tests.sim.cache.clients import STUCK_S, Client, Manners, Request
from tests.sim.cache.media import Bucket, Disk
from tests.sim.cache.mishaps import Mishaps
from tests.sim.cache.node import Node
from tests.sim.cache.oracle import Asked, prefix
from tests.sim.cache.plan import PARTS, Ask, Plan, Window, draw_plan
from tests.sim.virtual_time import Hub, PromiseBroken
from tiered_kv.engine import engine, self_test
from tiered_kv.tiering.index import Entry


class SimulationFailed(AssertionError):
    """A check failed; the message holds all that is needed to see why."""

    def __init__(self, plan: Plan, hub: Hub, cause: BaseException) -> None:
        last = traceback.extract_tb(cause.__traceback__)[-1]
        self.reason = f"{type(cause).__name__} at {PurePath(last.filename).name}:{last.lineno}: {cause}"
        self.again = f"python scripts/simulate.py --first {plan.seed} --seeds 1"
        parts = [f"seed {plan.seed}: {self.reason}", f"again: {self.again}", "-- plan", *plan.lines()]
        super().__init__("\n".join([*parts, f"-- the last {len(hub.recent)} events", *hub.recent]))


@dataclass(frozen=True, slots=True)
class Result:
    """What one schedule did.

    Attributes:
        digest: Of its whole trace.
        counts: Requests, hits, faults and what else happened how often.
    """

    seed: int
    digest: str
    events: int
    virtual_s: float
    bytes_compared: int
    counts: Counter[str] = field(default_factory=Counter)


@contextlib.contextmanager
def determined(plan: Plan) -> Iterator[None]:
    """Take from the product what would differ between two runs of a seed, and what only costs time.

    Sets of entries are walked in the order of their hash, which is an address; a self-test draws its key from the
    machine and writes 4 MiB. Threads that hand over a baton do it four times as fast on one core.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})
    draw = random.Random(plan.seed)
    levels = {"tiered_kv": logging.ERROR, "tiered_kv.server": logging.CRITICAL}
    before = {name: logging.getLogger(name).level for name in levels}
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    with (
        contextlib.ExitStack() as patches,
        mock.patch.object(Entry, "__hash__", lambda entry: int.from_bytes(entry.record.key[:7], "big")),
        mock.patch.object(self_test, "TEST_BYTES", 4096),
        mock.patch.object(engine, "CONFIRMED_S", 2.0),
        mock.patch.object(self_test, "os", SimpleNamespace(urandom=draw.randbytes)),
    ):
        for (module, name), value in zip(PARTS, plan.parts, strict=False):
            patches.enter_context(mock.patch.object(module, name, value))
        try:
            yield
        finally:
            os.sched_setaffinity(0, cores)
            for name, level in before.items():
                logging.getLogger(name).setLevel(level)


def simulate(seed: int) -> Result:
    """Run one schedule.

    Raises:
        SimulationFailed: A check failed.
    """
    plan = draw_plan(seed)
    with determined(plan):
        simulation = Simulation(plan)
        try:
            return simulation.run()
        except (Exception, PromiseBroken) as exc:
            raise SimulationFailed(plan, simulation.hub, exc) from exc
        finally:
            simulation.abandon()


class Simulation:
    """One schedule."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.hub = Hub(f"schedule {plan.seed}")
        self.counts: Counter[str] = Counter()
        self.asked = Asked()
        self.bucket = Bucket(plan.bucket_bytes) if plan.has_bucket else None
        self.nodes = [
            Node(self.hub, number, machine, Disk(plan.disk_bytes) if plan.disk_bytes else None, self.bucket)
            for number, machine in enumerate(plan.machines)
        ]
        self.clients = [
            Client(self.hub, self.nodes[node], space, plan.manners, self.counts, self.asked)
            for node, space in plan.clients
        ]
        self.hub.on_event = self._check

    def run(self) -> Result:
        """All of it: what is drawn, then the end of all faults, then the proof that everything works."""
        self._schedule()
        self.hub.run(self.plan.active_s)
        self.hub.note("all faults end")
        for node in self.nodes:
            for source in node.faults.values():
                source.rates.clear()
            node.frozen_until_s = 0.0
            if node.is_up:
                node.arena.is_refused = False
                node.engine.keep_memory(is_kept=False)
        self._wait("recovered", STUCK_S, self._is_recovered, self._unwell)
        self._prove_progress()
        self._wind_down()
        for node in self.nodes:
            self.counts.update({f"fault {kind}": n for kind, n in node.struck.items()})
            self.counts.update({f"engine {name}": n for name, n in node.counters.items()})
        compared = sum(node.bytes_compared for node in self.nodes)
        return Result(self.plan.seed, self.hub.digest(), self.hub.event_count, self.hub.now_s, compared, self.counts)

    def abandon(self) -> None:
        """End what still runs; its outcome counts no more."""
        self.hub.failure = None
        for node in self.nodes:
            node.is_up = False
            with contextlib.suppress(Exception, PromiseBroken):
                node.executor.kill()
            with contextlib.suppress(Exception, PromiseBroken):
                node.leave()

    # -- what is checked after every event -----------------------------------------------------------------------------

    def _check(self) -> None:
        for node in self.nodes:
            if node.is_up:
                node.check()
        if self.hub.event_count % 256 == 0:
            for node in self.nodes:
                if node.is_up:
                    node.engine.tiering.check_integrity()
            self._check_written()
            for client in self.clients:
                for request in client.requests.values():
                    request.check()

    def _check_written(self) -> None:
        for node in self.nodes:
            self.asked.check(node.disk.blobs if node.disk is not None else ())
        self.asked.check(self.bucket.names() if self.bucket is not None else ())

    # -- what happens --------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        for node in self.nodes:
            self._boot(node)
        for client in self.clients:
            self.hub.after(self.hub.draw.uniform(0, 0.4), client.join)
        for ask in self.plan.asks:
            self.hub.after(ask.at_s, partial(self._ask, ask))
        for window in self.plan.windows:
            self.hub.after(window.begin_s, partial(self._begin, window))
            self.hub.after(window.end_s, partial(self._end, window))
        mishaps = Mishaps(self.plan, self.hub, self.nodes, self.clients, self.counts, self.asked)
        mishaps.boot = self._boot
        for mishap in self.plan.mishaps:
            self.hub.after(mishap.at_s, partial(mishaps.happen, mishap))

    def _ask(self, ask: Ask) -> None:
        self.clients[ask.client].ask(ask.path, ask.start, ask.generated)

    def _begin(self, window: Window) -> None:
        self.hub.note(f"node{window.node} {window.medium} {window.kind} begins")
        self.counts["windows"] += 1
        self.nodes[window.node].faults[window.medium].begin(window.kind)

    def _end(self, window: Window) -> None:
        self.hub.note(f"node{window.node} {window.medium} {window.kind} ends")
        self.nodes[window.node].faults[window.medium].end(window.kind)

    def _boot(self, node: Node) -> None:
        """Start a server, again and again until it starts; its clients join when they notice."""
        if node.is_up:
            return
        if not node.boot():
            self.hub.after(1.0, lambda: self._boot(node))
            return
        self.hub.note(f"node{node.number} serves, life {node.life}")
        for client in self.clients:
            if client.node is node:
                self.hub.after(self.hub.draw.uniform(0, 1.0), client.join)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _wait(self, name: str, seconds: float, is_done: Callable[[], bool], why: Callable[[], str]) -> None:
        begun_s = self.hub.now_s
        while not is_done():
            assert self.hub.now_s - begun_s < seconds, f"not {name} after {seconds:.0f} s of virtual time: {why()}"
            self.hub.run(0.5)
        self.hub.note(name)
        self.counts[f"{name}_ms"] += int(1000 * (self.hub.now_s - begun_s))

    def _is_recovered(self) -> bool:
        return not self._unwell()

    def _unwell(self) -> str:
        """What is not as it should be once all faults have ended; nothing if all is well."""
        for node in self.nodes:
            if not node.is_up or node.is_draining:
                return f"node{node.number} does not serve"
            if any(breaker.is_open for breaker in node.breakers):
                return f"node{node.number} has a breaker open"
            if node.engine.tiering.pending_writes:
                return f"node{node.number} has {node.engine.tiering.pending_writes} pending writes"
        for client in self.clients:
            if client.requests:
                return f"requests are not answered. {sorted(client.requests)}"
            if client.is_vanished:
                return "a client is in quarantine"
        return ""

    def _prove_progress(self) -> None:
        """Whatever happened before: what is stored now is there, at every node and in the lowest tier."""
        for client in self.clients:
            client.leave()
        for node in self.nodes:
            if node.disk is not None and any(minimum for minimum, _ in node.machine.shares.values()):
                node.disk.pins.clear()  # pins of one namespace and the minima of the others may leave it no room at all
        spaces = sorted({client.space for client in self.clients})
        for number, (node, space) in enumerate((node, space) for node in self.nodes for space in spaces):
            path = (1000 + number, 1)
            client = self._newcomer(node, space)
            self._load_all(client, path, "stored and loaded again")
            self._wait("in the lowest tier", STUCK_S, partial(self._is_low, client, path), self._unwell)
            client.leave()
            for other in self.nodes if self.bucket is not None else ():
                if other is not node:
                    client = self._newcomer(other, space)
                    self._load_all(client, path, "loaded at the other node")
                    client.leave()

    def _newcomer(self, node: Node, space: str) -> Client:
        client = Client(self.hub, node, space, Manners(1.0, 0.0, 0.0, 0.001, 0.001), self.counts, self.asked)
        self.clients.append(client)
        client.join()
        return client

    def _load_all(self, client: Client, path: Path, name: str) -> None:
        """Ask until all of a prefix is loaded, storing what is not held."""
        requests: list[Request] = []

        def has_all() -> bool:
            if requests and not requests[-1].is_over:
                return False
            if requests and requests[-1].got == len(path):
                return True
            request = client.ask(path, 0)
            assert request is not None, "the node does not serve"
            requests.append(request)
            return False

        self._wait(name, 60.0, has_all, lambda: f"got {[request.got for request in requests]}")

    def _is_low(self, client: Client, path: Path) -> bool:
        if self.hub.now_s % 5.0 < 0.5 and not client.requests:
            client.ask(path, 0)  # a write that was dropped is tried again when its chunk is used
        names = [one.name for one in prefix(client.space, path)]
        if self.bucket is not None:
            return self.bucket.arrived.issuperset(names)
        assert client.node.disk is not None
        return all(name in client.node.disk.blobs for name in names)

    def _wind_down(self) -> None:
        for client in self.clients:
            client.leave()
        self._wait("at rest", STUCK_S, self._is_at_rest, self._unwell)
        for node in self.nodes:
            node.executor.close()
        self._wait("idle", STUCK_S, lambda: all(node.executor.is_idle for node in self.nodes), self._unwell)
        self._check_written()
        for node in self.nodes:
            node.step()
            node.check_idle()
            node.close()

    def _is_at_rest(self) -> bool:
        for node in self.nodes:
            node.step()  # what the clients left behind may begin writes
        jobs = [job for node in self.nodes for tier in node.engine.tiers for job in node.engine.jobs(tier).values()]
        return not self._unwell() and not any(jobs)
