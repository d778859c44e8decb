"""A whole engine in one thread: real blobs, a real arena, any tier, and clients that compare every byte.

Every chunk's payload follows from its key, so a slot can be judged without remembering what was put into it.
"""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.kit.fake_clock import FakeClock
from tests.kit.samples.formats import sample_namespace
from tests.kit.spaces import Space
from tests.kit.step_executor import StepExecutor
from tiered_kv.chunks.arena import Arena, create_slabs
from tiered_kv.chunks.geometry import ChunkGeometry, LayerPage
from tiered_kv.chunks.header import BlobFormat
from tiered_kv.engine.engine import Engine
from tiered_kv.engine.executor import Executor
from tiered_kv.engine.self_test import self_test_format
from tiered_kv.keys.namespace import SELF_TEST_NAMESPACE, Namespace
from tiered_kv.metrics.recorder import Recorder
from tiered_kv.tiering.lookups import LookupRequest
from tiered_kv.tiering.types import LeaseEnd, Limits, LookupAnswer, LookupUpdate, SlotGrant, SlotId, SlotRecall, Update
from tiered_kv.tiers.base import Tier
from tiered_kv.tiers.open import OpenTier, wrapped
from tiered_kv.tiers.wrappers.verified import VerifiedTier

Path = tuple[int, ...]
Choose = Callable[[int], int]

BLOB_BYTES = 12288
"""Of the smaller geometry; the larger one takes 16384."""


def geometry(page_bytes: int) -> ChunkGeometry:
    """Two ranks of two layers; the payload is no multiple of 4096, so it is padded."""
    pages = tuple(LayerPage(f"layer.{n}", "U8", (1, page_bytes), "NC") for n in range(2))
    return ChunkGeometry(block_tokens=4, chunk_tokens=8, ranks=(pages, pages))


GEOMETRIES: Mapping[str, ChunkGeometry] = {"small": geometry(1000), "large": geometry(1500), "other": geometry(1000)}
NAMESPACES: Mapping[str, Namespace] = {name: sample_namespace(epoch=name) for name in GEOMETRIES}
SPACES: Mapping[str, Space] = {
    name: Space(NAMESPACES[name].digest, BlobFormat(NAMESPACES[name].digest, GEOMETRIES[name]).blob_bytes)
    for name in GEOMETRIES
}


def payload_of(key: bytes, size_bytes: int) -> bytes:
    """The KV bytes of a chunk."""
    return hashlib.shake_128(key).digest(size_bytes)


class _Errors(logging.Handler):
    """Collects what the engine logs as an error: a failure that no part declared."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(f"{record.getMessage()} {record.exc_info}")


@dataclass(slots=True)
class Asked:
    """A lookup of a client."""

    session: int
    path: Path
    start: int
    update: LookupAnswer | None = None


@dataclass(slots=True)
class Client:
    """One session's client."""

    space: Space
    form: BlobFormat
    data_bytes: int
    credits: list[SlotId] = field(default_factory=list)


class EngineWorld:
    """An engine over one tier or several, highest first; stepped by hand unless it is given another executor."""

    opened: Sequence[OpenTier] = ()

    def __init__(
        self,
        tier: Tier | Sequence[Tier],
        host_bytes: int = 16 * BLOB_BYTES,
        executor: Executor | None = None,
        limits: Limits | None = None,
        clock: FakeClock | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Start; with a ``recorder`` the tiers get every wrapper and are guarded, as in a server."""
        self.clock = clock or FakeClock()
        self.executor = executor or StepExecutor()
        formats: dict[bytes, BlobFormat] = {SELF_TEST_NAMESPACE: self_test_format()}
        media = [tier] if isinstance(tier, Tier) else tier
        tiers: list[Tier] = [VerifiedTier(one, formats.get) for one in media]
        if recorder is not None:
            self.opened = [wrapped(one, formats.get, recorder, self.clock.monotonic) for one in media]
            tiers = [one.tier for one in self.opened]
        tiering = Engine.build_tiering(host_bytes, tiers, limits)
        self.tiering = tiering
        self.arena = Arena(create_slabs(tiering.slots.slab_count))
        self.engine = Engine(tiers, self.arena, tiering, self.executor, self.clock, formats)
        for number, one in enumerate(self.opened, 1):
            self.engine.guards.add(number, one.breaker, one.trial)
        self.clients: dict[int, Client] = {}
        self.lookups: dict[int, Asked] = {}
        self.seen: defaultdict[type[Update], int] = defaultdict(int)
        self.errors = _Errors()
        logging.getLogger("tiered_kv.engine").addHandler(self.errors)
        try:
            self.engine.start()
        except BaseException:
            self.abandon()
            raise

    # -- clients -------------------------------------------------------------------------------------------------------

    def open(self, name: str = "small") -> int:
        session, form = self.engine.open_session(NAMESPACES[name], GEOMETRIES[name])
        self.clients[session] = Client(SPACES[name], form, GEOMETRIES[name].data_bytes)
        return session

    def commit(self, session: int, path: Path) -> bool:
        """Fill a granted slot with a chunk's KV and commit it; False without a credit."""
        client = self.clients[session]
        if not client.credits:
            return False
        slot = client.credits.pop(0)
        record = client.space.record(path)
        with self.engine.slot_view(slot, client.form.blob_bytes) as view:
            view[:] = b"\xee" * len(view)  # what the slot held before must not matter
            start = client.form.header_bytes
            view[start : start + client.data_bytes] = payload_of(record.key, client.data_bytes)
        self.tiering.commit(session, slot, record)
        return True

    def lookup(self, session: int, path: Path, start: int = 0, *, is_followed: bool = True) -> int:
        keys, digests = self.clients[session].space.prefix(path)
        lookup = self.tiering.lookup(session, LookupRequest(keys, digests, start, is_followed=is_followed))
        self.lookups[lookup] = Asked(session, path, start)
        return lookup

    def release(self, lookup: int) -> None:
        self.tiering.release(self.lookups.pop(lookup).session, lookup)

    def close_session(self, session: int) -> None:
        self.tiering.close_session(session)
        del self.clients[session]
        self.lookups = {i: asked for i, asked in self.lookups.items() if asked.session != session}

    # -- time ----------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One turn of the owner's loop; then compare every byte that is promised."""
        for update in self.engine.step():
            self.seen[type(update)] += 1
            match update:
                case LookupUpdate(_, lookup) if lookup in self.lookups:
                    self.lookups[lookup].update = update.answer
                case LeaseEnd(session, lookup) if lookup in self.lookups:
                    self.release(lookup)
                case SlotGrant(session, slots) if session in self.clients:
                    self.clients[session].credits.extend(slots)
                case SlotRecall(session, slots) if session in self.clients:
                    self._give_back(session, slots)
        for asked in self.lookups.values():
            self._compare(asked)

    def _give_back(self, session: int, slots: tuple[SlotId, ...]) -> None:
        unused = self.clients[session].credits
        for slot in set(unused) & set(slots):
            unused.remove(slot)
            self.tiering.give_back(session, slot)

    def _compare(self, asked: Asked) -> None:
        if asked.update is None:
            return
        client = self.clients[asked.session]
        first = asked.start + 1
        for depth, slot in enumerate(asked.update.slots[: asked.update.ready], first):
            record = client.space.record(asked.path[:depth])
            with self.engine.slot_view(slot, client.form.blob_bytes) as view:
                client.form.verify(view, record.key, record.prefix_sha256)
                start = client.form.header_bytes
                assert view[start : start + client.data_bytes] == payload_of(record.key, client.data_bytes)

    def run_one(self, choose: Choose = lambda _count: 0) -> bool:
        """Run one task of the stepping executor and one turn of the loop; False when none waits."""
        assert isinstance(self.executor, StepExecutor)
        is_run = self.executor.step(choose)
        self.step()
        return is_run

    def settle(self, choose: Choose = lambda _count: 0) -> None:
        """Run until nothing is left to do."""
        self.step()
        while self.run_one(choose):
            pass

    # -- sentences -----------------------------------------------------------------------------------------------------

    def store(self, session: int, path: Path) -> None:
        """Commit every chunk of a prefix, as credits allow, and let everything end."""
        for depth in range(1, len(path) + 1):
            self.commit(session, path[:depth])
            self.settle()

    def loaded(self, session: int, path: Path, start: int = 0) -> int:
        """Chunks of a prefix that a request gets, every byte compared."""
        lookup = self.lookup(session, path, start)
        self.settle()
        update = self.lookups[lookup].update
        assert update is not None and update.is_done, "a lookup never ended"
        self.release(lookup)
        return update.ready

    def check_idle(self) -> None:
        """Nothing is running, so nothing may be pending, leased or lost."""
        self.tiering.check_integrity()
        figures = self.tiering.usage()
        assert self.errors.messages == []
        assert self.tiering.pending_writes == 0 and figures["leased_bytes"] == 0 and figures["lookups"] == 0

    def abandon(self) -> None:
        """End as after a SIGKILL: nothing is drained, and the tier is left as it is."""
        logging.getLogger("tiered_kv.engine").removeHandler(self.errors)
        self.executor.close()
        self.arena.close()

    def close(self) -> None:
        logging.getLogger("tiered_kv.engine").removeHandler(self.errors)
        self.engine.close()
