"""What a scheduler's client knows of its session and of its lookups, as it is told by the server. Values only."""

from collections.abc import Sequence
from dataclasses import dataclass

from tiered_kv.hierarchy.plan import SlotId


@dataclass(slots=True)
class LookupAnswer:
    """What is known of a lookup now; see :class:`tiered_kv.hierarchy.plan.LookupUpdate`.

    Attributes:
        is_ended: The server has ended its leases: nothing may be read from its slots any more.
    """

    held: int = 0
    slots: Sequence[SlotId] = ()
    ready: int = 0
    is_done: bool = False
    parts: Sequence[tuple[int, float | None]] = ()
    unknown: int = 0
    search_s: float | None = None
    sources: bytes = b""
    queued: int = 0
    is_answered: bool = False
    is_ended: bool = False


@dataclass(frozen=True, slots=True)
class EndedLookup:
    """A lookup that was released.

    Attributes:
        generation: Of the session it belonged to.
        keys: The prefix that was looked up; chunks from ``start`` on were wanted.
        answer: What was known of it then.
        is_asked_anew: Another one of the same request has replaced it: it does not count.
    """

    id: int
    generation: int
    keys: Sequence[bytes]
    start: int
    answer: LookupAnswer
    is_asked_anew: bool = False

    @property
    def asked(self) -> int:
        """Chunks that were wanted."""
        return max(0, len(self.keys) - self.start)


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What workers must know of a session to copy for it."""

    generation: int
    slot_bytes: int
    payload_offset: int
    rank_offsets: tuple[int, ...]
