"""Pins of prompts, sent to the server once the prompts' chunks are stored.

Requests ask for pins themselves; and a prompt that another engine continues gets one without a time, so that it is
written at once.

A pin names one chunk and keeps the prefix before it, so of a prompt only the deepest chunk that is held is pinned. A
chunk that is still being copied may yet be dropped; the pin waits until that is known, which takes seconds at most.
Called by the scheduler side.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tiered_kv.server.client import SchedulerClient
from tiered_kv.vllm.save_queue import SaveQueue

WAITING_MAX: Final = 1024
"""Pins that wait for copies to end. More are dropped and counted: copies end within seconds."""


@dataclass(slots=True)
class _Wanted:
    """A pin that waits for its chunks.

    Attributes:
        held_key: The deepest chunk that tiering said it holds.
        deeper: Keys of the chunks behind it, the deepest first.
        ttl_s: 0: it need not be kept, only be written at once where the other engine may read it.
    """

    generation: int
    held_key: bytes | None
    deeper: Sequence[bytes]
    ttl_s: float

    @property
    def kind(self) -> str:
        """First word of its counters."""
        return "pins" if self.ttl_s else "handovers"


class RequestPins:
    """Pins on their way to the server.

    Only its own methods write its fields. Threads: vLLM's scheduler thread only.
    """

    def __init__(self, client: SchedulerClient, stores: SaveQueue, counters: Counter[str]) -> None:
        self._client = client
        self._saves = stores
        self._counters = counters
        self._waiting: deque[_Wanted] = deque()

    def want(self, keys: Sequence[bytes], held: int, ttl_s: float) -> None:
        """Pin the deepest of a prompt's chunks that is held; the first ``held`` of ``keys`` are known to be."""
        if len(self._waiting) >= WAITING_MAX:
            self._counters["pins_dropped"] += 1
            return
        held = min(held, len(keys))
        held_key = keys[held - 1] if held else None
        self._waiting.append(_Wanted(self._client.generation, held_key, keys[held:][::-1], ttl_s))
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
        self._counters["pins_dropped"] += len(self._waiting)
        self._waiting.clear()

    def _tell(self, wanted: _Wanted) -> None:
        key = next(filter(self._saves.is_stored, wanted.deeper), wanted.held_key)
        if key is None:
            self._counters[f"{wanted.kind}_of_nothing"] += 1
        elif self._client.pin(key, wanted.ttl_s):
            self._counters[f"{wanted.kind}_sent"] += 1
        else:
            self._counters[f"{wanted.kind}_dropped"] += 1
