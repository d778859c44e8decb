"""vLLM's connector: a facade that delegates every hook to the part for its role.

Decides nothing and holds no state but its part.

Loaded by ``kv_connector="TieredKVConnector"`` through the plugin entry point, or with
``kv_connector_module_path="tiered_kv.vllm"``. The scheduler role has several parts, and ``hooks.py`` is where each of
them sees each hook; the worker role has one, ``worker.py``.
"""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from tiered_kv.config import Config
from tiered_kv.errors import TieredKVError
from tiered_kv.vllm.compat import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    MultiConnector,
    SupportsHMA,
    check_class,
    check_vllm,
    get_current_vllm_config_or_none,
    get_kv_transfer_group,
    has_kv_transfer_group,
    step_metadata,
)
from tiered_kv.vllm.engine_metrics import TieredKVStats, stats_of
from tiered_kv.vllm.hooks import SchedulerHooks
from tiered_kv.vllm.kv_groups import cache_groups, chunk_tokens_of
from tiered_kv.vllm.kv_layout import required_layout
from tiered_kv.vllm.logs import show_our_logs
from tiered_kv.vllm.plugin import register
from tiered_kv.vllm.prometheus import TieredKVPromMetrics
from tiered_kv.vllm.step import SaveReport, StepMetadata
from tiered_kv.vllm.supported import check_drafts, check_groups, check_states, check_supported, features
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

logger = logging.getLogger("vllm." + __name__)

register()  # MultiConnector looks classes up by name, also when this one came by module path


class TieredKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores KV in tiers below the GPU and loads the longest prefix held there.

    Has one part, by its role, or none where the engine is not supported: then every hook answers "nothing".

    Threads: vLLM's scheduler thread (scheduler role) or its model runner's (worker role).
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Refuse a vLLM for which Python could make no connector, before Python says so in words of its own."""
        check_class(cls)
        made: Self = super().__new__(cls)
        return made

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role not in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER):
            raise ValueError(f"a connector is made for the scheduler or for a worker. role={role!r}")
        show_our_logs()
        self._settings: Any = vllm_config.kv_transfer_config
        config = Config.from_mapping(self._settings.kv_connector_extra_config)
        self._scheduler: SchedulerHooks | None = None
        self._worker: WorkerSide | None = None
        try:
            check_vllm(features(vllm_config, kv_cache_config))
            _recompute_failed_loads(self._settings)
            # The kind of KV first: with states vLLM's block size is nothing that chunk_tokens could be a multiple of.
            check_groups(kv_cache_config)
            config = replace(config, chunk_tokens=chunk_tokens_of(kv_cache_config, config.chunk_tokens))
            check_supported(vllm_config, config.chunk_tokens)
            check_states(vllm_config, kv_cache_config)
            check_drafts(vllm_config, kv_cache_config)
            groups = cache_groups(vllm_config, kv_cache_config, config.chunk_tokens)
        except TieredKVError as exc:
            if config.strict:
                raise
            logger.error("this engine serves without the cache: %s", exc)
            return
        engine_id = self._settings.engine_id
        assert engine_id is not None
        if role is KVConnectorRole.WORKER:
            self._worker = WorkerSide(config, vllm_config, kv_cache_config, engine_id)
        else:
            self._scheduler = SchedulerHooks(config, vllm_config, kv_cache_config, self._settings, groups)

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

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        return required_layout(vllm_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache drops stores when it must; no request waits for them."""
        return False

    # -- scheduler role ----------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.bind_block_pool(gpu_block_pool, lambda: _worker_here(self._settings))

    def on_new_request(self, request: "Request") -> None:
        if self._scheduler is not None:
            self._scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        matched = self._scheduler.matched_tokens(request, num_computed_tokens)
        return matched, bool(matched)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: "Request", num_external_tokens: int) -> dict[Any, int]:
        """By tier, for vLLM's own metric of where cached prompt tokens came from (0.32 and later ask)."""
        return {} if self._scheduler is None else self._scheduler.hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return StepMetadata(0, None) if self._scheduler is None else self._scheduler.plan_step(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        if self._scheduler is not None:
            self._scheduler.step_ended(connector_output)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None if self._scheduler is None else self._scheduler.finish_request(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.side.has_work

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.side.saves.frees_soon()

    def reset_cache(self) -> bool | None:
        """Never False: vLLM would refuse to sleep or pause for what is safe already, and only not durable yet."""
        if self._scheduler is not None:
            self._scheduler.side.reset()
        return True

    def take_events(self) -> "Iterable[KVCacheEvent]":
        return () if self._scheduler is None else self._scheduler.take_events()

    # -- both roles --------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> TieredKVStats | None:
        if self._worker is not None:
            return self._worker.copied.take()
        return None if self._scheduler is None else self._scheduler.take_stats()

    # -- worker role -------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Sleep takes the KV cache's memory away and wake-up brings it back where it was.

        vLLM 0.33 and later ask; for earlier ones see ``compat.before_sleep``.
        """
        if self._worker is not None:
            self._worker.finish_copies()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called by both of vLLM's runners in every step, before anything of it is queued; blocks are pinned anyway."""
        if self._worker is not None:
            assert isinstance(kv_connector_metadata, StepMetadata)
            self._worker.begin_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._step())

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
        metadata = step_metadata(self)
        assert isinstance(metadata, StepMetadata)
        return metadata

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()


def _recompute_failed_loads(transfer_config: Any) -> None:
    """Have vLLM recompute requests whose loads fail; its default ends them. It reads the policy after this."""
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
            theirs = connector._settings
            if theirs.kv_connector_extra_config == transfer_config.kv_connector_extra_config:
                return connector._worker
    return None
