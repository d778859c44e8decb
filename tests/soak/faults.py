"""Faults of a soak, drawn from its seed, one after the other in each of three lanes that run beside one another:
the object store's, the machines', and what an operator does.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.soak.node import Node
from tests.soak.stores import Store

MACHINE = {
    "server killed": 3,
    "server stopped": 3,
    "client killed": 3,
    "disk full": 2,
    "bit flipped on disk": 2,
    "file truncated": 2,
    "file removed": 2,
    "bit flipped in the bucket": 1,
    "object removed": 1,
    "reset": 1,
}
OPERATOR = ("verify", "verify the bucket", "evict", "evict from host", "pin", "gc", "stat", "du")
STOPPED_S = 2.0
FULL_S = 2.0
STORE_S = 4.0
DAMAGED_OBJECTS = 4


@dataclass(frozen=True, slots=True)
class Pace:
    """Mean pauses between two faults of a lane, in seconds."""

    machine_s: float
    store_s: float
    operator_s: float


@dataclass(slots=True)
class Faults:
    """All lanes.

    Threads: one per lane, from ``start`` to ``end``; ``_lock`` guards the counts.

    Attributes:
        spared: Machines whose server is not killed any more.
        counts: How often what was done.
    """

    nodes: list[Node]
    store: Store
    pace: Pace
    seed: int
    spared: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _failures: list[BaseException] = field(default_factory=list)

    def start(self) -> None:
        for lane, pause_s in (
            (self._machine, self.pace.machine_s),
            (self._store, self.pace.store_s),
            (self._operator, self.pace.operator_s),
        ):
            draw = random.Random(f"{self.seed} {lane.__name__}")
            thread = threading.Thread(target=self._run, args=(lane, pause_s, draw), name="soak-faults")
            thread.start()
            self._threads.append(thread)

    def end(self) -> None:
        """End every fault; nothing fails any more afterwards.

        Raises:
            RuntimeError: A lane ended by itself: the soak is wrong, not what it tests.
        """
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        self.store.mend()
        if self._failures:
            raise RuntimeError("a lane of faults ended by itself") from self._failures[0]

    def check(self) -> None:
        if self._failures:
            self.end()

    def _run(self, lane: Callable[[random.Random], str], pause_s: float, draw: random.Random) -> None:
        try:
            while not self._is_over.wait(2 * pause_s * draw.random()):
                done = lane(draw)
                with self._lock:
                    self.counts[done] += bool(done)
        except BaseException as exc:  # noqa: BLE001 - raised again by end()
            self._failures.append(exc)

    def _store(self, draw: random.Random) -> str:
        fault = draw.choice(self.store.faults)
        self.store.fail(fault)
        self._is_over.wait(2 * STORE_S * draw.random())
        self.store.mend()
        return fault

    def _operator(self, draw: random.Random) -> str:
        verb = draw.choice(OPERATOR)
        return f"tiered-kv {verb}" if draw.choice(self.nodes).operate(verb) else ""

    def _machine(self, draw: random.Random) -> str:
        node = draw.choice(self.nodes)
        fault = draw.choices(list(MACHINE), list(MACHINE.values()))[0]
        done = True
        if fault == "server killed":
            done = node.name not in self.spared and node.kill_server()
        elif fault == "server stopped":
            done = node.stop_server(2 * STOPPED_S * draw.random())
        elif fault == "client killed":
            node.kill_client()
        elif fault == "disk full":
            done = node.fill_disk(2 * FULL_S * draw.random())
        elif fault == "reset":
            done = node.reset()
        elif fault in ("bit flipped in the bucket", "object removed"):
            blobs = sorted(self.store.blobs())
            for path in draw.sample(blobs, min(len(blobs), DAMAGED_OBJECTS)):
                self.store.damage(path, "remove" if fault == "object removed" else "flip", draw)
            done = bool(blobs)
        else:
            how = {"bit flipped on disk": "flip", "file truncated": "truncate", "file removed": "remove"}[fault]
            done = node.damage(how)
        return fault if done else ""
