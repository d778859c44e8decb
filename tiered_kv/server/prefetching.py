"""Prefetches: prefixes that come up into host memory before a request asks for them.

A prefetch is a lookup in the session of an engine that serves the namespace, as the request's own would be, of which
only the server knows. It is the last in that session's line for leases, so it never takes room from a request; it ends
once all that it can have is there, and leaves its chunks as the most recently used ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tiered_kv.engine.engine import Engine
from tiered_kv.tiering.lookups import LookupRequest
from tiered_kv.tiering.types import LeaseEnd, LookupUpdate, Turn, Update

AT_ONCE_MAX: Final = 64
TENANT_MAX: Final = 8
"""Prefetches at once, in all and of one tag, or without any."""

PREFETCH_MAX_S: Final = 30.0
LAST_PRIORITY: Final = 1 << 62
"""Behind every priority that vLLM gives a request."""


@dataclass(frozen=True, slots=True)
class WantedPrefix:
    """What a prefetch is of, from its beginning.

    Attributes:
        state_parts: Of the state behind it that a model with recurrent layers goes on from; 0: it has none.
        owner: The user's session whose it is; empty: nobody's.
    """

    namespace: bytes
    keys: Sequence[bytes]
    digests: Sequence[bytes]
    state_parts: int = 0
    owner: bytes = b""


@dataclass(frozen=True, slots=True)
class _Running:
    tenant: bytes
    until_s: float


class Prefetching:
    """All prefetches of a server.

    Threads: the server's loop only.
    """

    def __init__(self, engine: Engine, is_open: Callable[[int], bool]) -> None:
        """Start without any; ``is_open`` tells of a session of the engine whether it still is."""
        self._engine = engine
        self._is_open = is_open
        self._running: dict[tuple[int, int], _Running] = {}
        self._of_tenant: Counter[bytes] = Counter()
        self._number = 0

    def begin(self, session: int, prefix: WantedPrefix, tenant: bytes) -> bool:
        """Begin with one in an engine's session; False: too many run already."""
        if len(self._running) >= AT_ONCE_MAX or self._of_tenant[tenant] >= TENANT_MAX:
            self._engine.count("prefetches_refused")
            return False
        self._number += 1
        turn: Turn = LAST_PRIORITY, self._number
        wish = LookupRequest(
            prefix.keys,
            prefix.digests,
            turn=turn,
            state_parts=prefix.state_parts,
            owner=prefix.owner,
            is_prefetch=True,
        )
        lookup = self._engine.lookup(session, wish)
        self._running[session, lookup] = _Running(tenant, self._engine.clock.monotonic() + PREFETCH_MAX_S)
        self._of_tenant[tenant] += 1
        self._engine.count("prefetches")
        return True

    def take(self, update: Update) -> bool:
        """Hear of a prefetch; False: the update is of something else."""
        if not isinstance(update, LookupUpdate | LeaseEnd):
            return False
        place = update.session, update.lookup
        if place not in self._running:
            return False
        if isinstance(update, LeaseEnd) or update.answer.is_done:
            self._end(place)
        return True

    def step(self) -> None:
        """End what takes too long, and forget what ended with its session; the loop only."""
        if self._running:
            now_s = self._engine.clock.monotonic()
            for place, one in list(self._running.items()):
                if now_s >= one.until_s or not self._is_open(place[0]):
                    self._end(place)

    def _end(self, place: tuple[int, int]) -> None:
        tenant = self._running.pop(place).tenant
        self._of_tenant[tenant] -= 1
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]
        self._engine.release(*place, is_asked_anew=True)  # not counted as what a request got
