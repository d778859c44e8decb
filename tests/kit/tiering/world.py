"""Short sentences for tests of tiering: store a prefix, ask for one, end a job this way or that.

Builds on the oracle (oracle.py), so every step in every test also checks everything the oracle knows.
"""

from collections.abc import Sequence

from tests.kit.spaces import Space
from tests.kit.tiering.oracle import World
from tiered_kv.tiering.admission import ALL, SECOND_TOUCH
from tiered_kv.tiering.multi_queue import LEVELS
from tiered_kv.tiering.tiering import Tiering
from tiered_kv.tiering.types import Delete, Grow, Job, Limits, LookupAnswer, Outcome, Read, Seal, TierSpec, Write

SMALL = Space(b"small-namespace-", 10)
LARGE = Space(b"large-namespace-", 15)

Path = tuple[int, ...]


def tier_specs(
    capacities: Sequence[int | None],
    admissions: Sequence[str] = (),
    *,
    is_last_shared: bool = False,
    names_at_once: int = 1,
    is_asked_while_out: bool = False,
) -> list[TierSpec]:
    """The tiers of these capacities; those without a named admission take everything."""
    named = [*admissions, *[ALL] * len(capacities)]
    last = len(capacities) - 1
    return [
        TierSpec(
            capacity,
            named[number],
            is_shared=is_last_shared and number == last,
            names_at_once=names_at_once,
            is_asked_while_out=is_asked_while_out,
        )
        for number, capacity in enumerate(capacities)
    ]


def chunks_of(path: Path) -> list[Path]:
    """Every chunk of a prefix, root first."""
    return [path[:depth] for depth in range(1, len(path) + 1)]


class Story(World):
    """A world in which one session of ``SMALL`` is open and memory has begun to grow."""

    eviction = "multi-queue"
    admissions: Sequence[str] = ()

    def __init__(
        self,
        host_bytes: int = 400,
        capacities: Sequence[int | None] = (None,),
        limits: Limits | None = None,
        found: Sequence[Path] = (),
        *,
        found_behind: Sequence[Path] = (),
        is_last_shared: bool = False,
        names_at_once: int = 1,
        is_asked_while_out: bool = False,
    ) -> None:
        """Start; ``found`` are prefixes whose last chunk is in the first secondary tier already, least used first.

        ``found_behind`` are those in the second.
        """
        specs = tier_specs(
            capacities,
            self.admissions,
            is_last_shared=is_last_shared,
            names_at_once=names_at_once,
            is_asked_while_out=is_asked_while_out,
        )
        tiering = Tiering(host_bytes, specs, limits, eviction=self.eviction)
        super().__init__(tiering, list(capacities))
        for tier, paths in enumerate((found, found_behind), 1):
            for path in paths:
                self.restore(tier, SMALL, path)
        for tier in self.media:
            self.tiering.restored(tier)
        self.session = self.open(SMALL)
        self.finish_all()

    def open_large(self) -> int:
        """Open a session of the larger slot size and let memory come."""
        return self.open_space(LARGE.namespace, LARGE.slot_bytes)

    def open_space(self, namespace: bytes, slot_bytes: int) -> int:
        session = self.open(Space(namespace, slot_bytes))
        self.finish_all()
        return session

    # -- stores --------------------------------------------------------------------------------------------------------

    def commit_prefix(self, path: Path, session: int | None = None) -> None:
        """Commit every chunk of a prefix; seals and writes stay where they are."""
        session = session or self.session
        for chunk in chunks_of(path):
            assert self.commit(session, chunk), "no credit left"
            self.step()
        self.tiering.touch_prefix(self.spaces[session].key(path))

    def store(self, path: Path, session: int | None = None) -> None:
        """Commit a prefix and let all jobs end well."""
        self.commit_prefix(path, session)
        self.finish_all()

    def store_without_writes(self, path: Path) -> None:
        """Commit and seal one chunk, let memory grow, and leave its write waiting."""
        assert self.commit(self.session, path), "no credit left"
        self.step()
        self.end_every(Seal)
        self.end_every(Grow)

    def keep_only_below(self, path: Path) -> None:
        """Store a prefix, then so many others that host memory has none of it left."""
        self.store(path)
        self.flush_host(avoid=path)

    def flush_host(self, avoid: Path = ()) -> None:
        """Store single chunks until the oldest of everything is out of host memory, also if it was asked for."""
        slots = self.tiering.slots.slot_count_max(SMALL.slot_bytes)
        for number in range(LEVELS * slots):
            self.store((1000 + number,))
        assert not any(self.is_in_host(chunk) for chunk in chunks_of(avoid))

    # -- lookups -------------------------------------------------------------------------------------------------------

    def ask(self, path: Path, start: int = 0, session: int | None = None, *, owner: bytes = b"") -> int:
        """Look a prefix up; jobs stay where they are. ``owner`` is a user's session."""
        lookup = self.lookup(session or self.session, path, start, owner=owner)
        self.step()
        return lookup

    def ask_anew(self, before: int, path: Path) -> int:
        """Look a prefix up again for the request of an earlier lookup, in place of that."""
        counted = self.answer(before).held
        lookup = self.lookup(self.lookups[before].session, path, self.lookups[before].start, counted=counted)
        self.step()
        self.release(before, is_asked_anew=True)
        return lookup

    def uses(self, path: Path) -> list[int]:
        """How often each known chunk of a prefix was asked for, root first."""
        found = [self.entry(chunk) for chunk in chunks_of(path)]
        return [entry.uses for entry in found if entry is not None]

    def answer(self, lookup: int) -> LookupAnswer:
        """What the session was told last."""
        update = self.lookups[lookup].update
        assert update is not None, "the session was told nothing"
        return update

    def figures(self, lookup: int) -> tuple[int, int, int, bool]:
        """Held, promised, ready and done of a lookup's answer."""
        update = self.answer(lookup)
        return update.held, len(update.slots), update.ready, update.is_done

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def waiting(self, kind: type[Job], path: Path | None = None, space: Space = SMALL) -> list[int]:
        """Places of the waiting jobs of a kind, for one chunk or for any."""
        return [
            place
            for place, job in enumerate(self.jobs)
            if isinstance(job, kind) and (path is None or _key(job) == space.key(path))
        ]

    def end(self, kind: type[Job], path: Path | None = None, fault: Outcome | None = None) -> Outcome:
        """End the first waiting job of a kind."""
        return self.finish(self.waiting(kind, path)[0], fault)

    def end_every(self, kind: type[Job], fault: Outcome | None = None) -> None:
        """End all jobs of a kind that wait now, and those of that kind that follow."""
        while self.waiting(kind):
            self.end(kind, fault=fault)

    # -- what is where -------------------------------------------------------------------------------------------------

    def entry(self, path: Path, space: Space = SMALL):  # type: ignore[no-untyped-def]
        """The index's entry of a chunk, or None."""
        return self.tiering.index.get(space.key(path))

    def is_in_host(self, path: Path, space: Space = SMALL) -> bool:
        entry = self.entry(path, space)
        return entry is not None and entry.slot is not None

    def is_below(self, path: Path, tier: int = 1) -> bool:
        return SMALL.key(path) in self.media[tier]

    def counted(self, name: str) -> int:
        return self.tiering.counters[name]


def _key(job: Job) -> bytes | None:
    return job.record.key if isinstance(job, Seal | Read | Write | Delete) else None


class SelectiveStory(Story):
    """The same where every secondary tier takes only what was asked for or stored a second time."""

    admissions = (SECOND_TOUCH, SECOND_TOUCH)


class LruStory(Story):
    """The same with plain LRU, for tests of that order."""

    eviction = "lru"
