"""vLLM's connector: picks the side for its role and delegates; holds no state of its own and decides nothing.

Loaded by ``kv_connector="TieredKVConnector"`` through the plugin entry point, or with
``kv_connector_module_path="tiered_kv.vllm"``.
"""

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.logger import init_logger

from tiered_kv.config import Config
from tiered_kv.errors import TieredKVError
from tiered_kv.server.client import SchedulerClient
from tiered_kv.vllm.extras import Adapters
from tiered_kv.vllm.identity import block_tokens, check_supported
from tiered_kv.vllm.metadata import SaveReport, StepMetadata
from tiered_kv.vllm.plugin import register
from tiered_kv.vllm.scheduler import Abilities, SchedulerSide
from tiered_kv.vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.tiered_kv.connector")

register()  # MultiConnector looks classes up by name, also when this one came by module path


class TieredKVConnector(KVConnectorBase_V1):
    """Keeps KV in host memory and below, and loads the longest verified prefix of every new request.

    Threads: vLLM's scheduler thread (scheduler role) or its model runner's (worker role).
    """

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _show_our_logs()
        config = Config.from_mapping(self._kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        _recompute_failed_loads(self._kv_transfer_config)
        try:
            check_supported(vllm_config, config.chunk_tokens)
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
            self._scheduler = self._open_scheduler(config, vllm_config, kv_cache_config, engine_id)

    def _open_scheduler(
        self, config: Config, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", engine_id: str
    ) -> SchedulerSide:
        logger.info("settings: %s", config.describe())
        client = SchedulerClient(config, engine_id, vllm_config.parallel_config.world_size)
        if not client.wait_ready(config.start_timeout_s):
            reason = client.refusal or f"no session within {config.start_timeout_s:g} s"
            if config.strict:
                client.close()
                raise TieredKVError(f"the cache is not ready: {reason}")
            logger.error("this engine starts without the cache: %s", reason)
        lora = vllm_config.lora_config
        return SchedulerSide(
            config,
            client,
            Adapters(str(lora.lora_dtype) if lora is not None else ""),
            block_tokens(vllm_config, kv_cache_config),
            Abilities(
                may_load=self._kv_transfer_config.is_kv_consumer,
                may_store=self._kv_transfer_config.is_kv_producer,
                has_prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
            ),
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache drops stores when it must; no request waits for them."""
        return False

    # -- scheduler role ----------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: "Request") -> None:
        if self._scheduler is not None:
            self._scheduler.add_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        matched = self._scheduler.matched_tokens(request, num_computed_tokens)
        return matched, bool(matched)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        if self._scheduler is not None:
            block_ids = blocks.get_block_ids()[0] if num_external_tokens else []
            self._scheduler.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        if self._scheduler is None:
            return StepMetadata(0, None)
        return self._scheduler.plan_step(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        if self._scheduler is None:
            return
        if isinstance(connector_output.kv_connector_worker_meta, SaveReport):
            self._scheduler.saves_finished(connector_output.kv_connector_worker_meta)
        if connector_output.finished_recving:
            self._scheduler.loads_finished(connector_output.finished_recving, connector_output.failed_recving)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finish_request(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_work

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.stores.has_work

    def reset_cache(self) -> bool | None:
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # -- worker role -------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)

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


def _show_our_logs() -> None:
    """vLLM configures its own loggers only: give ours its handlers, once, unless the application has done so."""
    ours, theirs = logging.getLogger("tiered_kv"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
