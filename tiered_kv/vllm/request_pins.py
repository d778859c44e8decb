"""What requests want the server to know once their chunks are stored: pins of prompts, and states of users' sessions.

Requests ask for pins themselves; and a prompt that another engine continues gets one without a time, so that it is
written at once. A request of a user's session tells how far that has come, and whether it has ended.

Each names one chunk, the deepest of a prompt that is held, and means the prefix up to it. A chunk that is still being
copied may yet be dropped; what is told waits until that is known, which takes seconds at most. Called by the scheduler
side.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tiered_kv.keys.tags import NO_TAG
from tiered_kv.server.client import SchedulerClient
from tiered_kv.vllm.save_queue import SaveQueue

WAITING_MAX: Final = 1024
"""What waits for copies to end. More is dropped and counted: copies end within seconds."""


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """A request of a user's session is over.

    Attributes:
        session: The session's name, and its owner's tag.
        actions: Hints of the session that follow (``protocol.Hint``).
    """

    session: bytes
    tag: bytes
    actions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _PinFor:
    """A request's pin: for how long, and whose."""

    ttl_s: float
    tag: bytes


@dataclass(slots=True)
class _Wanted:
    """What waits for its chunks.

    Attributes:
        held_key: The deepest chunk that tiering said it holds.
        deeper: Keys of the chunks behind it, the deepest first.
        what: How long they are pinned, and whose pin it is; 0: they need not be kept, only be written at once where
            the other engine may read them. Or the session whose state they are.
    """

    generation: int
    held_key: bytes | None
    deeper: Sequence[bytes]
    what: _PinFor | SessionEnd

    @property
    def kind(self) -> str:
        """First word of its counters."""
        if isinstance(self.what, SessionEnd):
            return "session_states"
        return "pins" if self.what.ttl_s else "handovers"


class RequestPins:
    """Pins and states of sessions on their way to the server.

    Only its own methods write its fields. Threads: vLLM's scheduler thread only.
    """

    def __init__(self, client: SchedulerClient, stores: SaveQueue, counters: Counter[str]) -> None:
        self._client = client
        self._saves = stores
        self._counters = counters
        self._waiting: deque[_Wanted] = deque()

    def want(self, keys: Sequence[bytes], held: int, ttl_s: float, tag: bytes = NO_TAG) -> None:
        """Pin the deepest of a prompt's chunks that is held; the first ``held`` of ``keys`` are known to be."""
        self._want(keys, held, _PinFor(ttl_s, tag))

    def want_state(self, keys: Sequence[bytes], held: int, end: SessionEnd) -> None:
        """Tell that a user's session has come as far as the deepest of these chunks that is held; it may have ended."""
        self._want(keys, held, end)

    def prefetch(self, session: bytes, tag: bytes) -> None:
        """Have a user's session in host memory soon."""
        self._hint("prefetch", session, tag)

    def _want(self, keys: Sequence[bytes], held: int, what: _PinFor | SessionEnd) -> None:
        held = min(held, len(keys))
        held_key = keys[held - 1] if held else None
        wanted = _Wanted(self._client.generation, held_key, keys[held:][::-1], what)
        if len(self._waiting) >= WAITING_MAX:
            self._counters[f"{wanted.kind}_dropped"] += 1
            return
        self._waiting.append(wanted)
        self.send()

    def send(self) -> None:
        """Send every pin whose chunks are stored or dropped by now."""
        for _ in range(len(self._waiting)):
            wanted = self._waiting.popleft()
            if wanted.generation != self._client.generation or not self._client.is_ready:
                self._counters[f"{wanted.kind}_dropped"] += 1  # keys of another session name nothing in this one
            elif any(map(self._saves.is_under_way, wanted.deeper)):
                self._waiting.append(wanted)
            else:
                self._tell(wanted)

    def reset(self) -> None:
        """Drop all pins: what was computed before is invalid."""
        for wanted in self._waiting:
            self._counters[f"{wanted.kind}_dropped"] += 1
        self._waiting.clear()

    def _tell(self, wanted: _Wanted) -> None:
        key = next(filter(self._saves.is_stored, wanted.deeper), wanted.held_key)
        if key is None:
            self._counters[f"{wanted.kind}_of_nothing"] += 1
        elif self._is_told(key, wanted.what):
            self._counters[f"{wanted.kind}_sent"] += 1
        else:
            self._counters[f"{wanted.kind}_dropped"] += 1
        if isinstance(wanted.what, SessionEnd):
            for action in wanted.what.actions:
                self._hint(action, wanted.what.session, wanted.what.tag)

    def _is_told(self, key: bytes, what: _PinFor | SessionEnd) -> bool:
        if isinstance(what, SessionEnd):
            return self._client.tell_state(what.session, what.tag, key)
        return self._client.pin(key, what.ttl_s, what.tag)

    def _hint(self, action: str, session: bytes, tag: bytes) -> None:
        is_sent = self._client.hint(action, session, tag)
        self._counters["hints_sent" if is_sent else "hints_dropped"] += 1
