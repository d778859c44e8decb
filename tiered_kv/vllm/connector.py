"""vLLM's connector: picks the side for its role and delegates; holds no state of its own and decides nothing.

Loaded by ``kv_connector="TieredKVConnector"`` through the plugin entry point, or with
``kv_connector_module_path="tiered_kv.vllm"``.
"""

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.logger import init_logger

from tiered_kv.config import Config
from tiered_kv.errors import TieredKVError
from tiered_kv.server.client import SchedulerClient
from tiered_kv.vllm.adapters import Adapters, adapter_numerics
from tiered_kv.vllm.events import Announcer, EventGroup
from tiered_kv.vllm.extras import hashes_media
from tiered_kv.vllm.geometry import check_groups
from tiered_kv.vllm.groups import CacheGroups
from tiered_kv.vllm.handover import Handover
from tiered_kv.vllm.identity import cache_groups, check_supported
from tiered_kv.vllm.longest_prompt import LongestPrompt
from tiered_kv.vllm.metadata import SaveReport, StepMetadata
from tiered_kv.vllm.meter import hit_sources
from tiered_kv.vllm.observer import Observer
from tiered_kv.vllm.plugin import register
from tiered_kv.vllm.prometheus import TieredKVPromMetrics
from tiered_kv.vllm.resets import before_emptying, commit_last, let_go_of_blocks
from tiered_kv.vllm.scheduler import Abilities, SchedulerSide
from tiered_kv.vllm.stats import TieredKVStats, stats_of
from tiered_kv.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.tiered_kv.connector")

register()  # MultiConnector looks classes up by name, also when this one came by module path


class TieredKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV in host memory and below, and loads the longest verified prefix of every new request.

    Threads: vLLM's scheduler thread (scheduler role) or its model runner's (worker role).
    """

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role not in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER):
            raise ValueError(f"a connector is made for the scheduler or for a worker. role={role!r}")
        _show_our_logs()
        config = Config.from_mapping(self._kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._observer: Observer | None = None
        self._handover: Handover | None = None
        self._longest_prompt: LongestPrompt | None = None
        self._worker: WorkerSide | None = None
        _recompute_failed_loads(self._kv_transfer_config)
        try:
            # The kind of KV first: with states vLLM's block size is nothing that chunk_tokens could be a multiple of.
            check_groups(kv_cache_config)
            check_supported(vllm_config, config.chunk_tokens)
            groups = cache_groups(vllm_config, kv_cache_config, config.chunk_tokens)
        except TieredKVError as exc:
            if config.strict:
                raise
            logger.error("this engine serves without the cache: %s", exc)
            return
        engine_id = self._kv_transfer_config.engine_id
        assert engine_id is not None
        if role is KVConnectorRole.WORKER:
            self._worker = WorkerSide(config, vllm_config, kv_cache_config, engine_id)
        else:
            events = vllm_config.kv_events_config
            has_events = events is not None and events.enable_kv_cache_events
            world_size = vllm_config.parallel_config.world_size
            client = SchedulerClient(config, engine_id, world_size, is_watching=has_events)
            self._longest_prompt = LongestPrompt(config, client, int(vllm_config.model_config.max_model_len))
            self._scheduler = self._open_scheduler(config, vllm_config, groups, client)
            self._longest_prompt.look()
            announcer = None
            if has_events:
                announcer = Announcer(client, EventGroup.of(groups, kv_cache_config), config.chunk_tokens)
            self._observer = Observer(self._scheduler, client, config.chunk_tokens, announcer)
            is_producer = not self._kv_transfer_config.is_kv_consumer
            self._handover = Handover(config, client, self._scheduler, is_producer=is_producer)

    def _open_scheduler(
        self, config: Config, vllm_config: "VllmConfig", groups: CacheGroups, client: SchedulerClient
    ) -> SchedulerSide:
        logger.info("settings: %s", config.describe())
        if not client.wait_ready(config.start_timeout_s):
            reason = client.refusal or f"no session within {config.start_timeout_s:g} s"
            if config.strict:
                client.close()
                raise TieredKVError(f"the cache is not ready: {reason}")
            logger.error("this engine starts without the cache: %s", reason)
        return SchedulerSide(
            config,
            client,
            Adapters(adapter_numerics(vllm_config), vllm_config.parallel_config.world_size),
            groups,
            Abilities(
                may_load=self._kv_transfer_config.is_kv_consumer,
                may_store=self._kv_transfer_config.is_kv_producer,
                has_prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
                has_drafts=vllm_config.speculative_config is not None,
                has_media_hashes=hashes_media(vllm_config),
                is_by_priority=vllm_config.scheduler_config.policy == "priority",
                step_tokens=int(vllm_config.scheduler_config.max_num_batched_tokens),
            ),
        )

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TieredKVStats:
        return stats_of(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TieredKVPromMetrics:
        return TieredKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache drops stores when it must; no request waits for them."""
        return False

    # -- scheduler role ----------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            stores = self._scheduler.stores
            self._scheduler.bind_block_pool(gpu_block_pool)
            if (worker := _worker_here(self._kv_transfer_config)) is not None:
                worker.before_leaving = partial(commit_last, stores, worker, self._scheduler.client)
            before_emptying(gpu_block_pool, lambda: let_go_of_blocks(stores, _worker_here(self._kv_transfer_config)))
            before_emptying(gpu_block_pool, self._look().pool_emptied)

    def on_new_request(self, request: "Request") -> None:
        if self._scheduler is not None:
            self._scheduler.add_request(request)
            self._look().added(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        matched = self._scheduler.matched_tokens(request, num_computed_tokens)
        if self._handover is not None:
            matched = self._handover.matched(request, num_computed_tokens, matched)
        self._look().offered(request, matched)
        return matched, bool(matched)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        if self._scheduler is not None:
            tables = blocks.get_block_ids() if num_external_tokens else ()
            self._scheduler.allocated(request, tables, num_external_tokens)
            self._look().allocated(request, num_external_tokens)

    def get_external_cache_hit_sources(self, request: "Request", num_external_tokens: int) -> dict[Any, int]:
        """By tier, for vLLM's own metric of where cached prompt tokens came from (0.32 and later ask)."""
        if self._scheduler is None or not num_external_tokens:
            return {}
        return hit_sources(self._look().sources(request))

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        if self._scheduler is None:
            return StepMetadata(0, None)
        metadata = self._scheduler.plan_step(scheduler_output)
        if self._longest_prompt is not None:
            self._longest_prompt.look()
        self._look().planned(scheduler_output)
        return metadata

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        if self._scheduler is None:
            return
        if connector_output.invalid_block_ids:
            # Another connector's load failed (ours are reported per request): what was copied meanwhile may be wrong.
            self._scheduler.stores.reset()
        if isinstance(connector_output.kv_connector_worker_meta, SaveReport):
            self._scheduler.saves_finished(connector_output.kv_connector_worker_meta)
        if connector_output.finished_recving:
            finished, failed = connector_output.finished_recving, connector_output.failed_recving
            connector_output.finished_recving = finished - self._scheduler.loads_finished(finished, failed)
            self._look().loads_finished(connector_output.finished_recving, failed)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._look().finishing(request)
            state = self._scheduler.state(request.request_id)
            self._scheduler.finish_request(request, block_ids)
            return False, None if self._handover is None else self._handover.told(state)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_work

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.stores.frees_soon()

    def reset_cache(self) -> bool | None:
        """Never False: vLLM would refuse to sleep or pause for what is safe already, and only not durable yet."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    def take_events(self) -> "Iterable[KVCacheEvent]":
        return () if self._observer is None else self._observer.take_events()

    def _look(self) -> Observer:
        assert self._observer is not None
        return self._observer

    # -- both roles --------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> TieredKVStats | None:
        if self._worker is not None:
            return self._worker.copied.take()
        return None if self._observer is None else self._observer.take_stats()

    # -- worker role -------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Sleep takes the KV cache's memory away and wake-up brings it back where it was (vLLM 0.33 and later ask)."""
        if self._worker is not None:
            self._worker.finish_copies()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            metadata = self._step()
            self._worker.follow(metadata)
            self._worker.start_loads(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are never awaited inside a forward pass: vLLM schedules a request when its load has been reported."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Chunks are saved after the forward pass, all layers at once."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.start_saves(self._step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        finished, failed = self._worker.take_finished_loads()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> SaveReport | None:
        return self._worker.take_finished_saves() if self._worker is not None else None

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()


def _recompute_failed_loads(transfer_config: Any) -> None:
    """vLLM ends a request whose load failed unless told to recompute it; it reads the policy after this."""
    if transfer_config.kv_load_failure_policy != "recompute":
        logger.info("kv_load_failure_policy was %r, now 'recompute'", transfer_config.kv_load_failure_policy)
        transfer_config.kv_load_failure_policy = "recompute"
    # Below MultiConnector vLLM reads the policy of that one, which only a worker's process lets us see, too late.
    whole = get_current_vllm_config_or_none()
    outer = transfer_config if whole is None else whole.kv_transfer_config
    if outer is not None and outer.kv_load_failure_policy != "recompute":
        logger.warning(
            'a request whose load fails will end with an error. Give %s "kv_load_failure_policy": "recompute"',
            outer.kv_connector,
        )


def _worker_here(transfer_config: Any) -> WorkerSide | None:
    """The worker's side of a scheduler's, if they share a process: then nothing but ``generate`` makes steps."""
    group: Any = get_kv_transfer_group() if has_kv_transfer_group() else None
    for connector in group.sub_connectors if isinstance(group, MultiConnector) else [group]:  # may have several of ours
        if isinstance(connector, TieredKVConnector):
            theirs = connector._kv_transfer_config
            if theirs.kv_connector_extra_config == transfer_config.kv_connector_extra_config:
                return connector._worker
    return None


def _show_our_logs() -> None:
    """vLLM configures its own loggers only: give ours its handlers, once, unless the application has done so."""
    ours, theirs = logging.getLogger("tiered_kv"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
