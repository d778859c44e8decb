"""What is measured and announced of one engine, kept apart from what decides: reads along with the scheduler's side.

Called by ``connector.py`` around the calls of :class:`~tiered_kv.vllm.scheduler.SchedulerSide`. Must not change it.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tiered_kv.server.client import SchedulerClient
from tiered_kv.vllm.events import Announcer
from tiered_kv.vllm.meter import SchedulerMeter
from tiered_kv.vllm.scheduler import SchedulerSide
from tiered_kv.vllm.stats import TieredKVStats

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent


class Observer:
    """One engine's meter and, where vLLM publishes events, its announcer.

    Threads: vLLM's scheduler thread only.
    """

    def __init__(self, side: SchedulerSide, client: SchedulerClient, chunk_tokens: int, announcer: Announcer | None):
        self._side = side
        self._client = client
        self._meter = SchedulerMeter(client, side.counters, chunk_tokens)
        self._announcer = announcer

    def added(self, request: Any) -> None:
        """A request is new."""
        if self._announcer is not None:
            self._announcer.note(self._side.state(request.request_id))

    def offered(self, request: Any, matched: int | None) -> None:
        """A request was offered so many tokens, or told to ask again."""
        self._meter.offered(self._side.state(request.request_id), matched)

    def allocated(self, request: Any, external_tokens: int) -> None:
        """A request was given blocks."""
        self._meter.allocated(self._side.state(request.request_id), external_tokens)

    def sources(self, request: Any) -> dict[str, int]:
        """Tokens that a request is loading, by the tier that gave them."""
        return self._meter.sources(request.request_id)

    def planned(self, output: Any) -> None:
        """A step was planned: chunks that it completes have keys now."""
        if self._announcer is not None:
            for request_id in output.num_scheduled_tokens:
                state = self._side.state(request_id)
                if state is not None and not self._announcer.is_noted(state):
                    self._announcer.note(state)

    def loads_finished(self, request_ids: set[str], failed_ids: set[str]) -> None:
        """Loads were reported by every rank."""
        self._meter.loads_finished(request_ids, failed_ids)

    def finishing(self, request: Any) -> None:
        """A request ends; its last chunks may be stored after it is gone."""
        if self._announcer is not None:
            self._announcer.note(self._side.state(request.request_id))

    def pool_emptied(self) -> None:
        """vLLM empties its own prefix cache."""
        if self._announcer is not None:
            self._announcer.tell_again()

    def take_stats(self) -> TieredKVStats | None:
        """What was measured in this step."""
        while self._client.ended:
            ended = self._client.ended.popleft()
            self._meter.lookup_ended(ended)
            if self._announcer is not None:
                self._announcer.lookup_ended(ended)
        return self._meter.take()

    def take_events(self) -> "Iterable[KVCacheEvent]":
        """What was announced in this step."""
        return () if self._announcer is None else self._announcer.take()
