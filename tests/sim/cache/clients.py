"""Clients of the cache simulation: engines with a session each, and their requests, as events.

A request does what vLLM's connector does: looks its prefix up, waits for what is promised (some for ever, some until
their patience ends), loads under a lease, computes, stores what nobody holds, and ends. Owns no bytes but what it
writes into granted slots.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tests.kit.engine_world import Path
from tests.sim.cache.node import Node
from tests.sim.cache.oracle import Asked, Chunk, prefix
from tests.sim.virtual_time import Hub

STUCK_S = 240.0
"""Longest that anything may wait, faults included: every stall, every back-off and every retry together are less."""


@dataclass(frozen=True, slots=True)
class Manners:
    """How requests behave, drawn once per schedule."""

    patience_s: float
    impatient: float
    abort: float
    load_s: float
    compute_s: float


class Client:
    """One engine: a session at one node, opened again under every life of its server."""

    def __init__(self, hub: Hub, node: Node, space: str, manners: Manners, counts: Counter[str], asked: Asked) -> None:
        self.hub = hub
        self.node = node
        self.space = space
        self.manners = manners
        self.counts = counts
        self.asked = asked
        self.session: int | None = None
        self.life = 0
        self.requests: dict[int, Request] = {}
        self.is_vanished = False
        self.has_left = False

    @property
    def is_joined(self) -> bool:
        return self.session is not None and self.node.is_up and self.node.life == self.life and not self.is_vanished

    def join(self) -> None:
        """Open a session, unless there is one."""
        is_wanted = not (self.is_joined or self.is_vanished or self.has_left)
        if is_wanted and self.node.is_up and not self.node.is_draining:
            self.session, self.life = self.node.open(self.space), self.node.life
            self.hub.note(f"node{self.node.number} session {self.session} {self.space}")

    def ask(self, path: Path, start: int, generated: int = 0) -> "Request | None":
        """Begin a request, which generates so many chunks at the end of the path."""
        self.join()
        if not self.is_joined:
            self.counts["without_server"] += 1
            return None
        self.counts["requests"] += 1
        start = min(start, len(path) - generated - 1)
        request = Request(self, self.counts["requests"], prefix(self.space, path), start, generated)
        self.requests[request.number] = request
        return request

    def lose(self) -> None:
        """The server is gone: requests go on without it."""
        for request in list(self.requests.values()):
            request.finish("lost its server")
        self.session = None

    def vanish(self, quarantine_s: float, *, then_back: bool) -> None:
        """Killed: leases and slots stay until its processes are gone, and until then they write to their slots."""
        if not self.is_joined:
            return
        session, life = self.session, self.life
        assert session is not None
        self.hub.note(f"node{self.node.number} client of session {session} vanishes")
        self.is_vanished = True
        self.node.suspend(session)
        for request in list(self.requests.values()):
            request.finish("vanished", releases=False)

        def scribble() -> None:
            if self.node.is_up and self.node.life == life:
                for slot in self.node.credits[session]:
                    self.node.fill(session, slot, b"\xdd" * 512, 4096)

        def gone() -> None:
            if self.node.is_up and self.node.life == life:
                self.node.close_session(session)
            self.is_vanished, self.session = not then_back, None
            self.join()

        self.hub.after(quarantine_s / 2, scribble)
        self.hub.after(quarantine_s, gone)

    def leave(self) -> None:
        """End for good."""
        self.close()
        self.has_left = True

    def close(self) -> None:
        """End the session in an orderly way."""
        for request in list(self.requests.values()):
            request.finish("closed")
        if self.is_joined:
            assert self.session is not None
            self.node.close_session(self.session)
        self.session = None


class Request:
    """One request; see the module's text."""

    def __init__(self, client: Client, number: int, chunks: tuple[Chunk, ...], start: int, generated: int) -> None:
        self.client = client
        self.number = number
        self.chunks = chunks
        self.prompt = chunks[: len(chunks) - generated]
        self.start = start
        self.begun_s = client.hub.now_s
        self.lookup: int | None = None
        self.is_over = False
        self.got = 0
        self._is_loading = False
        assert client.session is not None
        self.session = client.session
        self._begin()

    def _note(self, text: str) -> None:
        self.client.hub.note(f"node{self.client.node.number} request {self.number} {text}")

    def _begin(self) -> None:
        client, hub = self.client, self.client.hub
        self._note(f"asks for {self.prompt[-1].label} from {self.start}, and makes {self.chunks[-1].label}")
        self._look_up()
        if hub.draw.random() < client.manners.impatient:
            hub.after(hub.draw.expovariate(1 / client.manners.patience_s), self._load)
        if hub.draw.random() < client.manners.abort:
            hub.after(hub.draw.expovariate(2.0), lambda: self.finish("aborted"))

    def _ended(self) -> None:
        """Its leases have ended: it asks anew, or finds that what it copied is of no use and computes all of it."""
        self.lookup = None
        self.client.counts["leases_ended"] += 1
        if not self._is_loading and not self.is_over:
            self._look_up()

    def _look_up(self) -> None:
        node = self.client.node
        self.client.asked.has_prompt(self.prompt)
        self.lookup = node.lookup(self.session, self.prompt, self.start)
        node.promises[self.lookup].on_update = self._told
        node.promises[self.lookup].on_end = self._ended

    def _told(self) -> None:
        assert self.lookup is not None
        update = self.client.node.promises[self.lookup].update
        if update is not None and update.is_done:
            self.client.hub.after(0.0, self._load)

    def _load(self) -> None:
        """Scatter what is promised, under the lease; every event until it ends compares the bytes."""
        if self.is_over or self._is_loading:
            return
        assert self.lookup is not None
        self._is_loading = True
        promise = self.client.node.promises[self.lookup]
        self.got = promise.ready
        self.held = promise.update.held if promise.update is not None else 0
        self._note(f"loads {self.got} of {len(self.prompt) - self.start}, held {self.held}")
        self.client.counts["asked"] += len(self.prompt) - self.start
        self.client.counts["hits"] += self.got
        self.client.node.claim(self.lookup)
        hub = self.client.hub
        hub.after(hub.draw.uniform(0, self.client.manners.load_s) if self.got else 0.0, self._loaded)

    def _loaded(self) -> None:
        if self.is_over:
            return
        if self.lookup is None:
            self.client.counts["loads_too_late"] += 1
            self.client.counts["hits"] -= self.got
            self.got = 0
        else:
            self.client.node.release(self.lookup)
            self.lookup = None
        self._compute(self.start + self.got)

    def _compute(self, depth: int) -> None:
        """Compute a chunk and store it unless it is held, then the next one."""
        hub = self.client.hub
        if self.is_over or not self.client.is_joined:
            return
        if depth >= len(self.chunks):
            self.client.node.engine.tiering.touch_prefix(self.chunks[-1].record.key)
            self.finish("ends")
            return

        def computed() -> None:
            if self.is_over or not self.client.is_joined:
                return
            if depth >= self.held or hub.draw.random() < 0.05:
                self._store(self.chunks[depth], lambda: self._compute(depth + 1))
            else:
                self._compute(depth + 1)

        hub.after(hub.draw.uniform(0, self.client.manners.compute_s), computed)

    def _store(self, made: Chunk, then: Callable[[], None]) -> None:
        """Gather into a granted slot, as two halves with time between them, and commit it; without one do not store."""
        node, session = self.client.node, self.session
        granted = node.credits[session]
        if not granted:
            self.client.counts["stores_dropped"] += 1
            then()
            return
        slot = granted.pop(0)
        half = len(made.payload) // 2
        node.filling[slot] = session
        node.fill(session, slot, made.payload[:half], made.first)

        def gathered() -> None:
            if not node.is_up or node.life != self.client.life or session not in node.credits:
                return
            if self.client.is_vanished or self.client.session != session:
                return
            node.fill(session, slot, made.payload[half:], made.first + half)
            del node.filling[slot]
            is_answer = made.record.chunk_index >= len(self.prompt)
            if is_answer:
                self.client.asked.has_generated(made)
            node.engine.tiering.commit(session, slot, made.record, is_answer=is_answer)
            self.client.counts["stores"] += 1
            node.wake()
            then()

        self.client.hub.after(self.client.hub.draw.uniform(0, 0.01), gathered)

    def finish(self, how: str, *, releases: bool = True) -> None:
        """End, however: leases go back."""
        if self.is_over:
            return
        self.is_over = True
        self._note(how)
        self.client.counts[f"request {how}"] += 1
        self.client.requests.pop(self.number, None)
        if self.lookup is not None and releases and self.client.is_joined:
            self.client.node.release(self.lookup)
        self.lookup = None

    def check(self) -> None:
        """Assert that it does not wait for ever."""
        waited_s = self.client.hub.now_s - self.begun_s
        assert waited_s < STUCK_S, f"a request is stuck. request={self.number} waited_s={waited_s:.1f}"
