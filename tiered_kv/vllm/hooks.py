"""The scheduler role: its parts, and the order in which each hook reaches them.

Every hook of vLLM's scheduler passes here, and the order is decided nowhere else. The scheduler side acts; the meter,
the events and the warning about long prompts only read what it did::

    hook of the connector         1st                       2nd                      why in this order
    on_new_request                side.add_request          events.note              a request has keys only then
    get_num_new_matched_tokens    side.goes_on_waiting      nothing, if it does      nothing new to count
                                  side.matched_tokens       meter.offered            counts what vLLM is answered
    update_state_after_alloc      side.allocated            meter.allocated          the load has begun by then
    build_connector_meta          side.plan_step            warning, events.note     the session may have changed; the
                                                                                     step's chunks have keys by then
    update_connector_output       saves.reset, if another connector's load failed: what was copied may be wrong
                                  side.saves_finished       side.loads_finished      a report of adapters comes first:
                                                                                     a load may be stale by it
                                  side.loads_finished       meter.loads_finished     only what vLLM is to hear of
    request_finished              events.note               side.finish_request      afterwards nothing is known of it
    get_kv_connector_stats        events, meter             meter.take               lookups that ended since
    take_events                   events.take
    vLLM empties its block pool   pins end                  events.publish_again     vLLM says that all blocks are gone

Owns that order and the parts' construction. Must not decide what a request loads or stores: the scheduler side does.
Called by the connector, in vLLM's scheduler thread.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from tiered_kv.config import Config
from tiered_kv.errors import TieredKVError
from tiered_kv.server.client import SchedulerClient
from tiered_kv.vllm.compat import before_emptying
from tiered_kv.vllm.engine_metrics import SchedulerMeter, TieredKVStats, hit_sources
from tiered_kv.vllm.engine_role import EngineRole
from tiered_kv.vllm.identity.adapters import Adapters, adapter_numerics, mixes_up_adapters
from tiered_kv.vllm.kv_events import EventGroup, EventPublisher
from tiered_kv.vllm.kv_groups import CacheGroups
from tiered_kv.vllm.load_admission import LongestPrompt
from tiered_kv.vllm.resets import commit_last
from tiered_kv.vllm.scheduler import SchedulerSide
from tiered_kv.vllm.step import SaveReport, StepMetadata
from tiered_kv.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

logger = logging.getLogger("vllm." + __name__)


class SchedulerHooks:
    """The parts of one engine's scheduler role.

    Attributes:
        side: Decides and acts. The other parts read it and never write to it.

    Holds no state but its parts; each says who writes its own. Threads: vLLM's scheduler thread only.
    """

    def __init__(
        self, config: Config, vllm_config: Any, kv_cache_config: Any, transfer_config: Any, groups: CacheGroups
    ) -> None:
        """Connect to the server and wait until its session is open, at most ``start_timeout_s``.

        Raises:
            TieredKVError: With ``strict``: no session was opened.
        """
        logger.info("settings: %s", config.describe())
        events = vllm_config.kv_events_config
        has_events = events is not None and events.enable_kv_cache_events
        world_size = vllm_config.parallel_config.world_size
        self._client = SchedulerClient(
            config, transfer_config.engine_id, world_size, is_watching=has_events, rejoins=True
        )
        self._client.rest()  # until the first request
        _wait_for_session(config, self._client)
        adapters = Adapters(adapter_numerics(vllm_config), world_size, mixes_up=mixes_up_adapters(vllm_config))
        role = EngineRole.of(vllm_config, transfer_config)
        self.side = SchedulerSide(config, self._client, adapters, groups, role)
        self._meter = SchedulerMeter(self._client, self.side.counters, config.chunk_tokens)
        longest, parts = int(vllm_config.model_config.max_model_len), len(groups.states)
        self._longest_prompt = LongestPrompt(config, self._client, longest, parts)
        self._longest_prompt.check()
        self._events: EventPublisher | None = None
        if has_events:
            self._events = EventPublisher(self._client, EventGroup.of(groups, kv_cache_config), config.chunk_tokens)

    def bind_block_pool(self, block_pool: Any, find_worker: Callable[[], WorkerSide | None]) -> None:
        """Take vLLM's block pool.

        Args:
            find_worker: The worker side in this process, if there is one.
        """
        self.side.bind_block_pool(block_pool)
        if (worker := find_worker()) is not None:
            worker.before_leaving = partial(
                commit_last, self.side.saves, worker, self._client, self.side.saves_finished
            )
        before_emptying(block_pool, lambda: self.side.let_go_of_blocks(find_worker()))
        if self._events is not None:
            before_emptying(block_pool, self._events.publish_again)

    # -- a request's way through the scheduler -----------------------------------------------------------------

    def new_request(self, request: Any) -> None:
        """vLLM has a new request."""
        self.side.add_request(request)
        self._note(request.request_id)

    def matched_tokens(self, request: Any, computed_tokens: int) -> int | None:
        """Tokens beyond ``computed_tokens`` that can be loaded; None: ask again."""
        if self.side.goes_on_waiting(request, computed_tokens):
            return None  # as it was answered and counted before
        matched = self.side.matched_tokens(request, computed_tokens)
        self._meter.offered(self.side.state(request.request_id), matched)
        return matched

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """vLLM gave a request blocks, the last ``external_tokens`` of them to be loaded."""
        self.side.allocated(request, blocks.get_block_ids() if external_tokens else (), external_tokens)
        self._meter.allocated(self.side.state(request.request_id), external_tokens)

    def hit_sources(self, request: Any, external_tokens: int) -> dict[Any, int]:
        """Tokens that a request is loading, by the tier that gave them, in vLLM's words."""
        return hit_sources(self._meter.sources(request.request_id)) if external_tokens else {}

    def finish_request(self, request: Any, tables: tuple[list[int], ...]) -> dict[str, Any] | None:
        """A request ends; returns what its answer carries to another engine."""
        state = self.side.state(request.request_id)
        promise = self.side.finish_request(request, tables)
        if self._events is not None:
            self._events.note(state)  # its last chunks may be stored after it is gone
        return promise

    # -- every step --------------------------------------------------------------------------------------------

    def plan_step(self, output: Any) -> StepMetadata:
        """vLLM planned a step; returns the work of the workers in it."""
        metadata = self.side.plan_step(output)
        self._longest_prompt.check()
        if self._events is not None:
            for request_id in output.num_scheduled_tokens:
                state = self.side.state(request_id)
                if state is not None and not self._events.is_noted(state):
                    self._events.note(state)
        return metadata

    def step_ended(self, output: Any) -> None:
        """The workers' reports of a step are here; takes out of them the loads that vLLM must not hear of yet."""
        if output.invalid_block_ids:
            # Another connector's load failed (ours are reported per request): what was copied meanwhile may be wrong.
            self.side.saves.reset()
        if isinstance(output.kv_connector_worker_meta, SaveReport):
            self.side.saves_finished(output.kv_connector_worker_meta)
        if output.finished_recving:
            finished, failed = output.finished_recving, output.failed_recving
            output.finished_recving = finished - self.side.loads_finished(finished, failed)
            self._meter.loads_finished(output.finished_recving, failed)

    def take_stats(self) -> TieredKVStats | None:
        """What was measured since the last call."""
        while self._client.ended:
            ended = self._client.ended.popleft()
            self._meter.lookup_ended(ended)
            if self._events is not None:
                self._events.lookup_ended(ended)
        return self._meter.take()

    def take_events(self) -> "Iterable[KVCacheEvent]":
        """KV events since the last call."""
        return () if self._events is None else self._events.take()

    def close(self) -> None:
        """End the session. Idempotent."""
        self.side.close()

    def _note(self, request_id: str) -> None:
        """Remember what events need of a request's chunks."""
        if self._events is not None:
            self._events.note(self.side.state(request_id))


def _wait_for_session(config: Config, client: SchedulerClient) -> None:
    if client.wait_ready(config.start_timeout_s):
        return
    reason = client.refusal or f"no session within {config.start_timeout_s:g} s"
    if config.strict:
        client.close()
        raise TieredKVError(f"the cache is not ready: {reason}")
    logger.error("this engine starts without the cache: %s", reason)
