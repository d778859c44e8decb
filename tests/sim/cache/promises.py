"""What clients of the cache simulation were promised: slots in real shared memory, compared with the oracle's bytes."""

import mmap
from collections.abc import Callable, Sequence

from tests.sim.cache.oracle import CHUNKS, Chunk
from tiered_kv.chunks.arena import Arena
from tiered_kv.errors import CapacityExceeded
from tiered_kv.tiering.slots import SLOTS_PER_SLAB_MAX
from tiered_kv.tiering.types import LookupAnswer, SlotId


class SimArena(Arena):
    """Real shared memory, which the machine may refuse."""

    is_refused = False
    _kept: Sequence[int] = ()

    def allocate(self, slab: int, size_bytes: int) -> None:
        if self.is_refused:
            raise CapacityExceeded("the simulated machine has no memory")
        super().allocate(slab, size_bytes)

    def keep_pages(self, sizes: Sequence[int], *, is_kept: bool) -> None:
        super().keep_pages(sizes, is_kept=is_kept)
        self._kept = self._memory() if is_kept else []

    def check_kept(self, host_bytes: int) -> None:
        """Assert that a GPU which had pinned all of it could go on with that, and that it is not too much."""
        if not self._kept:
            return
        now = self._memory()
        assert all(new >= old for new, old in zip(now, self._kept, strict=True)), "a pinned slab was cut"
        assert sum(now) <= host_bytes + len(now) * mmap.PAGESIZE, "pinned slabs take more than host memory"
        self._kept = now

    def _memory(self) -> list[int]:
        return [self.memory_bytes(slab) for slab in range(len(self.slab_fds))]

    def copy_of(self, slab: int, first: int, end: int) -> bytes:
        """Bytes of a slab."""
        return self._maps[slab][first:end]


class Promise:
    """A lookup of a client, and the bytes it was promised.

    Attributes:
        update: The latest; None until there is one.
        is_claimed: A load began before the lease's end was told.
        leased_s: Since when, at the latest, it has leases.
    """

    def __init__(self, session: int, slot_bytes: int, chunks: tuple[Chunk, ...], start: int) -> None:
        self.session = session
        self.start = start
        self.chunks = chunks
        self.update: LookupAnswer | None = None
        self.on_update: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None
        self.is_claimed = False
        self.leased_s: float | None = None
        self._slot_bytes = slot_bytes
        self._places: list[tuple[int, int, int, Chunk]] = []

    def learn(self, update: LookupAnswer) -> None:
        before = self.update
        if before is not None:
            assert before.ready <= update.ready, "a promise was taken back"
            assert before.slots[: before.ready] == update.slots[: before.ready], "a promised slot was exchanged"
        self.update = update
        for number in range(len(self._places), update.ready):
            slab, index = divmod(update.slots[number], SLOTS_PER_SLAB_MAX)
            made = self.chunks[self.start + number]
            base = index * self._slot_bytes
            self._places.append((slab, base + made.first, base + made.end, made))
        self.on_update()

    @property
    def ready(self) -> int:
        return self.update.ready if self.update is not None else 0

    @property
    def has_slots(self) -> bool:
        return self.update is not None and bool(self.update.slots)

    def slots(self) -> tuple[SlotId, ...]:
        """What may be read now."""
        return self.update.slots[: self.update.ready] if self.update is not None else ()

    def compare(self, arena: SimArena) -> int:
        """Assert that every promised byte is the key's; returns how many there are."""
        count = 0
        for slab, first, end, made in self._places:
            found = arena.copy_of(slab, first, end)
            if found != made.payload:
                other = next((c.label for c in CHUNKS.values() if c.payload == found), "no chunk")
                raise AssertionError(f"promised bytes are wrong. chunk={made.label} found={other}")
            count += end - first
        return count
