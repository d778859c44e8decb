"""Every name of vLLM that this package relies on, and the check that they are there and mean what they did.

No version of vLLM is refused by its number. Instead, when a connector is made, the names below are compared with the
vLLM that is installed: a hook that it no longer has, a function that can no longer be called as it is called here, a
field that is gone, each is a *difference*, and an engine with one is refused by name, before anything of it is used.
What no comparison of names can see, where bytes lie, the layout test proves on the tensors (``chunks/layout_test.py``).

Owns three things:

- ``USES``: what is used, as data. The check reads it at run time, the drift tests read it for every version that is
  here, and a test finds what the package uses beside it (tests/vllm/test_compat.py).
- The names of vLLM that no interface promises, each behind a function of this module; other modules use none.
- The names that other modules import of vLLM (``IMPORTED``). Where one is gone an empty class stands in, so that the
  check can say so instead of Python while it imports the connector.

Must not import vLLM at its top: vLLM loads ``plugin.py``, which needs names from here, while it is still imported.
"""

import ast
import dataclasses
import difflib
import dis
import functools
import importlib
import inspect
import logging
import re
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from tiered_kv.errors import ConfigError, UnsupportedModel
from tiered_kv.version import __version__

if TYPE_CHECKING:
    from vllm.config import get_current_vllm_config_or_none as get_current_vllm_config_or_none
    from vllm.distributed.kv_events import BlockRemoved as BlockRemoved
    from vllm.distributed.kv_events import BlockStored as BlockStored
    from vllm.distributed.kv_events import KVCacheEvent as KVCacheEvent
    from vllm.distributed.kv_transfer import get_kv_transfer_group as get_kv_transfer_group
    from vllm.distributed.kv_transfer import has_kv_transfer_group as has_kv_transfer_group
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1 as KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata as KVConnectorHandshakeMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata as KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole as KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults as KVConnectorTransferResults,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata as KVConnectorWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA as SupportsHMA
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics as KVConnectorPromMetrics
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats as KVConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector as MultiConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingWorkerMetadata as OffloadingWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats as OffloadingConnectorStats,
    )
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys as generate_block_hash_extra_keys
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash as maybe_convert_block_hash
    from vllm.v1.core.kv_cache_utils import to_event_extra_keys as to_event_extra_keys
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind as get_kv_cache_spec_kind
    from vllm.v1.kv_offload.base import Locality as Locality
    from vllm.v1.kv_offload.base import LookupResult as LookupResult
    from vllm.v1.kv_offload.base import Medium as Medium
    from vllm.v1.kv_offload.base import OffloadingCounterMetadata as OffloadingCounterMetadata
    from vllm.v1.kv_offload.base import OffloadingEvent as OffloadingEvent
    from vllm.v1.kv_offload.base import OffloadingGaugeMetadata as OffloadingGaugeMetadata
    from vllm.v1.kv_offload.base import RequestOffloadingContext as RequestOffloadingContext
    from vllm.v1.kv_offload.tiering.base import JobResult as JobResult
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager as SecondaryTierManager
    from vllm.v1.metrics.cache_hit_source import CacheHitSource as CacheHitSource
    from vllm.v1.request import RequestStatus as RequestStatus

logger = logging.getLogger("vllm." + __name__)

FIRST_VERSION: Final = (0, 30)
"""From here on a connector can report a failed load per request, and the names of ``USES`` begin."""

PROVEN: Final = ((0, 30), (0, 32))
"""Minor versions of vLLM on which every change to this package is tested. Another one starts with a warning."""

NEWEST: Final = (10**6, 0)
"""What a version that is no number counts as: a build from somebody's own sources."""

OLDEST: Final = (0, 0)
"""What it counts as where something is right from a certain version on only."""

V1: Final = "vllm.distributed.kv_transfer.kv_connector.v1"
BASE: Final = f"{V1}.base:KVConnectorBase_V1"
SPECS: Final = "vllm.v1.kv_cache_interface"
UTILS: Final = "vllm.v1.core.kv_cache_utils"
OUTPUT: Final = "vllm.v1.core.sched.output"
CONFIG: Final = "vllm.config"
OFFLOAD: Final = "vllm.v1.kv_offload"
FACTORY: Final = "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"

DRAFTS: Final = "drafts"
STATES: Final = "recurrent layers"
SLEEP: Final = "sleep mode"
OFFLOADING: Final = "a tier of ours below vLLM's offloading"
EVENTS: Final = "KV events"
LAYOUT: Final = "the KV layout of an accelerator: vLLM chooses, and pages that lie apart are served without the cache"
DEVICE: Final = f"{LAYOUT}; and requests without a LoRA adapter, once a step had both kinds, as on a CPU"

_MARK: Final = "_tiered_kv_wrapped"

IMPORTED: Final = {
    "BlockRemoved": "vllm.distributed.kv_events",
    "BlockStored": "vllm.distributed.kv_events",
    "CacheHitSource": "vllm.v1.metrics.cache_hit_source",
    "KVCacheEvent": "vllm.distributed.kv_events",
    "JobResult": f"{OFFLOAD}.tiering.base",
    "KVConnectorBase_V1": f"{V1}.base",
    "KVConnectorHandshakeMetadata": f"{V1}.base",
    "KVConnectorMetadata": f"{V1}.base",
    "KVConnectorPromMetrics": f"{V1}.metrics",
    "KVConnectorRole": f"{V1}.base",
    "KVConnectorStats": f"{V1}.metrics",
    "KVConnectorTransferResults": f"{V1}.base",
    "KVConnectorWorkerMetadata": f"{V1}.base",
    "Locality": f"{OFFLOAD}.base",
    "LookupResult": f"{OFFLOAD}.base",
    "Medium": f"{OFFLOAD}.base",
    "MultiConnector": f"{V1}.multi_connector",
    "OffloadingConnectorStats": f"{V1}.offloading.metrics",
    "OffloadingCounterMetadata": f"{OFFLOAD}.base",
    "OffloadingEvent": f"{OFFLOAD}.base",
    "OffloadingWorkerMetadata": f"{V1}.offloading.common",
    "OffloadingGaugeMetadata": f"{OFFLOAD}.base",
    "RequestOffloadingContext": f"{OFFLOAD}.base",
    "RequestStatus": "vllm.v1.request",
    "SecondaryTierManager": f"{OFFLOAD}.tiering.base",
    "SupportsHMA": f"{V1}.base",
    "generate_block_hash_extra_keys": UTILS,
    "get_current_vllm_config_or_none": CONFIG,
    "get_kv_cache_spec_kind": SPECS,
    "get_kv_transfer_group": "vllm.distributed.kv_transfer",
    "has_kv_transfer_group": "vllm.distributed.kv_transfer",
    "maybe_convert_block_hash": UTILS,
    "to_event_extra_keys": UTILS,
}
"""What other modules import of vLLM through this one: name -> module."""

DEFAULTS: Final[Mapping[str, Any]] = {"CacheHitSource": None, "to_event_extra_keys": list}
"""What stands in where a version has a name not yet: vLLM 0.30 publishes extra keys as they are."""


def __getattr__(name: str) -> Any:
    """A name of ``IMPORTED``, or an empty class of that name where this vLLM has none: the check refuses it."""
    if name not in IMPORTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(importlib.import_module(IMPORTED[name]), name)
    except (ImportError, AttributeError):
        found = DEFAULTS.get(name, type(name, (), {}))
    globals()[name] = found
    return found


# -- what is used ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Use:
    """One name of vLLM that this package relies on.

    Attributes:
        place: Module, or ``module:Class``.
        name: What of it; empty: the module or class itself.
        call: How it is called, without ``self``: ``"blocks"``, ``"request, *, group="``. None: it is not called here.
        override: Our class whose method of that name vLLM calls.
        since: First version that has it; for earlier ones there is a default.
        feature: Only engines that have this rely on it.
        without: What does not work without it, if nothing wrong comes of that. Empty: an engine is refused.
    """

    place: str
    name: str
    call: str | None = None
    override: str = ""
    since: tuple[int, int] = FIRST_VERSION
    feature: str = ""
    without: str = ""

    @property
    def where(self) -> str:
        """Its dotted name."""
        return f"{self.place}.{self.name}".replace(":", ".").removesuffix(".")


@dataclass(frozen=True, slots=True)
class Difference:
    """A use that this vLLM does not meet.

    Attributes:
        what: What was expected, and what is there.
    """

    use: Use
    what: str

    def __str__(self) -> str:
        return f"{self.use.where}: {self.what}"


def _reads(place: str, names: str, **traits: Any) -> list[Use]:
    return [Use(place, name, **traits) for name in names.split()]


def _calls(place: str, **calls: str) -> list[Use]:
    return [Use(place, name, call) for name, call in calls.items()]


def _overrides(place: str, override: str, names: str, **traits: Any) -> list[Use]:
    return [Use(place, name, override=override, **traits) for name in names.split()]


OURS: Final = "tiered_kv.vllm.connector:TieredKVConnector"

HOOKS: Final = (
    *_overrides(
        BASE,
        OURS,
        "__init__ build_kv_connector_stats build_prom_metrics get_required_kvcache_layout requires_kv_delivery "
        "bind_gpu_block_pool on_new_request "
        "get_num_new_matched_tokens update_state_after_alloc build_connector_meta update_connector_output "
        "request_finished has_pending_push_work has_pending_block_frees reset_cache take_events get_kv_connector_stats "
        "register_kv_caches handle_preemptions start_load_kv wait_for_layer_load save_kv_layer wait_for_save "
        "get_transfer_results "
        "build_connector_worker_meta shutdown",
    ),
    *_overrides(f"{V1}.base:SupportsHMA", OURS, "request_finished_all_groups"),
    *_overrides(
        BASE, OURS, "get_external_cache_hit_sources", since=(0, 32), without="vLLM's metric of where hits came from"
    ),
    *_overrides(BASE, OURS, "unregister_kv_caches", since=(0, 33), without="waiting for running copies before a sleep"),
    *_overrides(f"{V1}.base:KVConnectorWorkerMetadata", "tiered_kv.vllm.step:SaveReport", "aggregate"),
    *_overrides(f"{V1}.metrics:KVConnectorStats", "tiered_kv.vllm.engine_metrics:TieredKVStats", "reset is_empty"),
    *_overrides(f"{V1}.metrics:KVConnectorStats", "tiered_kv.vllm.engine_metrics:TieredKVStats", "aggregate reduce"),
    *_overrides(
        f"{V1}.metrics:KVConnectorPromMetrics", "tiered_kv.vllm.prometheus:TieredKVPromMetrics", "__init__ observe"
    ),
    *_overrides(
        f"{OFFLOAD}.tiering.base:SecondaryTierManager",
        "tiered_kv.vllm.offloading:TieredKVTier",
        "lookup submit_store submit_load get_finished_jobs take_events drain_jobs on_new_request on_request_finished "
        "on_schedule_end has_pending_work shutdown build_metric_definitions get_stats",
        feature=OFFLOADING,
    ),
)
"""Methods of ours that vLLM calls."""

LEFT_TO_VLLM: Final = {
    "bind_connector_metadata": "keeps the step's metadata",
    "bind_kv_cache_manager": "calls bind_gpu_block_pool",
    "clear_connector_metadata": "forgets the step's metadata",
    "finish_forward": "copies follow an event of the model's stream, not the forward pass",
    "get_block_ids_with_load_errors": "failed loads are reported per request",
    "get_finished": "get_transfer_results replaces it",
    "get_finished_count": "every rank reports every load",
    "get_handshake_metadata": "workers tell our server what they are",
    "get_kv_connector_kv_cache_events": "events come from the scheduler's side",
    "get_loaded_kv_cache_group_ids": "all prefix-cacheable groups, which is what is loaded",
    "get_mem_pool_context": "the KV cache lies in vLLM's own memory",
    "has_connector_metadata": "whether the step's metadata is there",
    "register_finished_partial_tail": "for states inside a block, which are not stored",
    "requires_piecewise_for_cudagraph": "nothing is done per layer",
    "reset_capture_state": "nothing is captured",
    "restore_kv_caches": "the tensors lie where they were before the sleep",
    "role": "as given at construction",
    "set_host_xfer_buffer_ops": "for accelerators whose host copies vLLM makes",
    "set_xfer_handshake_metadata": "no handshake through vLLM",
    "set_xfer_handshake_metadata_pp_aware": "no handshake through vLLM",
    "supports_divergent_local_hybrid_hits": "hits are the same for all groups",
    "supports_sleep_mode": "it is supported",
}
"""Methods of vLLM that we do not override, each with what its default does for us. A new one has to be put here or
overridden, after its code was read; until then an engine names it in its warning."""

PREPARE_WEIGHTS: Final = "_prepare_weights"
LOAD_WEIGHTS: Final = "load_weights"
LOAD_ADAPTER: Final = "_load_adapter"

LOADERS: Final = (
    Use("vllm.model_executor.model_loader.default_loader:DefaultModelLoader", PREPARE_WEIGHTS,
        without="names of weights: model_id has to be set"),
    Use("vllm.model_executor.model_loader.base_loader:BaseModelLoader", LOAD_WEIGHTS,  # of sharded states
        without="names of weights: model_id has to be set"),
    Use("vllm.model_executor.model_loader.sharded_state_loader:ShardedStateLoader", "iterate_over_files",
        without="names of weights: model_id has to be set"),
    Use("vllm.lora.worker_manager:WorkerLoRAManager", LOAD_ADAPTER, without="caching of requests with adapters"),
)  # fmt: skip
"""What ``loader_watch.py`` wraps, and what reads the files that it notes of a sharded state."""

SCALES: Final = Use("vllm.v1.attention.backends.triton_attn:TritonAttentionImpl", "_ensure_scale_caches")
"""What writes into pages that a load may have filled. Compared where it was imported: it takes a GPU's packages."""

ALLOCATOR: Final = Use("vllm.device_allocator", "get_mem_allocator_instance", "", feature=SLEEP,
                       without="waiting for running copies before a sleep, up to vLLM 0.32")  # fmt: skip
"""What takes the KV cache's memory away, in a sleep or alone; wrapped where no hook tells of it."""

USES: Final = (
    *HOOKS,
    *LOADERS,
    ALLOCATOR,
    # scheduler
    *_calls(
        "vllm.v1.core.block_pool:BlockPool",
        touch="blocks",
        free_blocks="blocks",
        get_cached_block="block_hash, group_ids",
        get_num_free_blocks="",
        reset_prefix_cache="",
    ),
    *_reads("vllm.v1.core.block_pool:BlockPool", "blocks num_gpu_blocks"),
    *_reads(f"{UTILS}:KVCacheBlock", "block_id ref_cnt"),
    *_calls(UTILS, generate_block_hash_extra_keys="request, start, end, first_item"),
    Use(UTILS, "maybe_convert_block_hash", "block_hash", feature=EVENTS),
    Use(UTILS, "to_event_extra_keys", "keys", since=(0, 31), feature=EVENTS),
    Use("vllm.v1.core.kv_cache_manager:KVCacheBlocks", "get_block_ids", ""),
    *_reads(f"{OUTPUT}:SchedulerOutput", "num_scheduled_tokens preempted_req_ids kv_connector_block_state"),
    Use(f"{OUTPUT}:KVConnectorBlockState", "get_block_ids", "request_id"),
    Use(f"{OUTPUT}:KVConnectorBlockState", "boundary_state_offloads", feature=STATES),
    *_reads(
        "vllm.v1.outputs:KVConnectorOutput",
        "finished_recving failed_recving invalid_block_ids kv_connector_worker_meta",
    ),
    *_reads(
        "vllm.v1.request:Request",
        "request_id status priority num_tokens num_prompt_tokens num_computed_tokens num_output_tokens "
        "prompt_token_ids all_token_ids block_hashes lora_request cache_salt mm_features prompt_embeds "
        "prompt_is_token_ids resumable kv_transfer_params skip_reading_prefix_cache",
    ),
    Use("vllm.v1.request:Request", "shared_prefix_boundary", feature=STATES,
        without="states at forks that vLLM's own cache does not know"),
    Use("vllm.v1.request:Request", "session_id", since=(0, 32), without="sessions that requests name to vLLM alone"),
    Use("vllm.v1.request:Request", "kv_hints", since=(0, 32), without="hints that requests bring to vLLM alone"),
    Use("vllm.v1.kv_hints:KvHintsEnvelope", "actions", since=(0, 32),
        without="hints that requests bring to vLLM alone"),
    *_reads("vllm.v1.kv_hints:KvHintAction", "action_type payload", since=(0, 32),
            without="hints that requests bring to vLLM alone"),
    *_reads("vllm.v1.request:RequestStatus", "WAITING PREEMPTED"),
    *_reads("vllm.lora.request:LoRARequest", "lora_name lora_path lora_int_id adapter_id name is_3d_lora_weight"),
    Use("vllm.lora.utils", "get_adapter_absolute_path", "path", without="hits of an adapter's first request"),
    *_reads("vllm.multimodal.inputs:MultiModalFeatureSpec", "mm_position identifier modality"),
    *_reads("vllm.multimodal.inputs:PlaceholderRange", "offset length"),
    # connector
    *_reads(f"{V1}.base:KVConnectorRole", "SCHEDULER WORKER"),
    Use(f"{V1}.base", "KVConnectorTransferResults", "*, finished_recving=, failed_recving="),
    Use(f"{V1}.base", "KVConnectorMetadata"),
    Use(BASE, "_get_connector_metadata", ""),
    Use(f"{V1}.metrics:KVConnectorPromMetrics", "per_engine_labelvalues"),
    Use(f"{V1}.metrics:KVConnectorStats", "data"),
    Use(f"{V1}.multi_connector:MultiConnector", "sub_connectors"),
    Use(FACTORY, "register_connector", "name, module_path, class_name"),
    Use(FACTORY, "create_connector", "config, role, kv_cache_config", feature=OFFLOADING),
    # our tier below vLLM's own offloading
    *_reads(f"{V1}.base", "KVConnectorHandshakeMetadata", feature=OFFLOADING),
    *_reads(BASE, "get_handshake_metadata set_xfer_handshake_metadata_pp_aware", feature=OFFLOADING),
    *_reads(f"{OUTPUT}:SchedulerOutput", "scheduled_new_reqs scheduled_cached_reqs finished_req_ids",
            feature=OFFLOADING),
    *_reads(f"{OUTPUT}:NewRequestData", "req_id num_computed_tokens", feature=OFFLOADING),
    Use(f"{OUTPUT}:NewRequestData", "prompt_len", since=(0, 32), feature=OFFLOADING),
    *_reads(f"{OUTPUT}:CachedRequestData", "req_ids num_computed_tokens resumed_req_ids", feature=OFFLOADING),
    Use(f"{V1}.offloading_connector:OffloadingConnector", "scheduler", feature=OFFLOADING),
    Use("vllm.distributed.kv_transfer.kv_transfer_state", "ensure_kv_transfer_shutdown", "", feature=OFFLOADING),
    Use(BASE, "shutdown", "", feature=OFFLOADING),
    Use(f"{V1}.offloading.config", "build_offloading_config", "vllm_config, kv_cache_config", feature=OFFLOADING),
    *_reads(f"{OFFLOAD}.config:OffloadingConfig", "groups cache parallel canonical_layout replicated_layout "
            "worker_kv_bytes_per_block", feature=OFFLOADING),
    Use(f"{OFFLOAD}.config:OffloadingParallelConfig", "is_parallelism_agnostic", since=(0, 32), feature=OFFLOADING),
    Use(f"{V1}.offloading.canonical_mapping", "derive_canonical_mappings", "vllm_config, kv_cache_config, kv_caches",
        since=(0, 32), feature=OFFLOADING),
    Use(f"{OFFLOAD}.base:CanonicalPageMapping", "canonical_page_size_bytes", since=(0, 32), feature=OFFLOADING),
    *_reads(BASE, "register_kv_caches on_new_request update_connector_output build_connector_worker_meta",
            feature=OFFLOADING),
    *_reads(f"{V1}.offloading.common:OffloadingWorkerMetadata", "completed_jobs transfer_stats",
            since=(0, 32), feature=OFFLOADING),
    *_reads(f"{OFFLOAD}.config:OffloadingGroupConfig", "group_id tokens_per_block", since=(0, 32), feature=OFFLOADING),
    *_reads(f"{SPECS}:KVCacheTensor", "layers layer_stride block_stride offset", since=(0, 32), feature=OFFLOADING),
    *_reads(f"{SPECS}:KVCacheConfig", "kv_cache_tensors", feature=OFFLOADING),
    Use(f"{SPECS}:AttentionSpec", "unpadded_page_size_bytes", since=(0, 32), feature=OFFLOADING),
    *_reads(f"{OFFLOAD}.base", "Locality", feature=OFFLOADING),
    *_reads(f"{OFFLOAD}.base", "OffloadingCounterMetadata OffloadingGaugeMetadata", since=(0, 32), feature=OFFLOADING),
    Use(f"{V1}.offloading.metrics", "OffloadingConnectorStats", since=(0, 32), feature=OFFLOADING),
    *_reads(f"{V1}.offloading.metrics:OffloadingConnectorStats", "increase_counter set_gauge",
            since=(0, 32), feature=OFFLOADING),
    *_reads(f"{OFFLOAD}.base:LookupResult", "HIT MISS RETRY", feature=OFFLOADING),
    *_reads(f"{OFFLOAD}.base:Medium", "STORAGE", feature=OFFLOADING),
    *_reads(f"{OFFLOAD}.base:ReqContext", "req_id kv_transfer_params get_state set_state", feature=OFFLOADING),
    Use(f"{OFFLOAD}.base:ReqContext", "kv_hints", since=(0, 32), feature=OFFLOADING,
        without="hints of requests below vLLM's offloading"),
    Use(f"{OFFLOAD}.base:ReqContext", "_offload_key_positions", since=(0, 32), feature=OFFLOADING),
    Use(f"{OFFLOAD}.base:ScheduleEndContext", "new_req_ids", feature=OFFLOADING),
    Use(f"{OFFLOAD}.base:ScheduleEndContext", "preempted_req_ids", feature=OFFLOADING),
    Use(f"{OFFLOAD}.base", "OffloadingEvent", "*, keys=, medium=, removed=, locality=", feature=OFFLOADING),
    Use(f"{OFFLOAD}.base", "RequestOffloadingContext", feature=OFFLOADING),
    Use(f"{OFFLOAD}.tiering.base", "JobResult",
        "job_id, *, success=, successful_keys=, transfer_time=, transfer_bytes=", since=(0, 32), feature=OFFLOADING),
    Use(f"{OFFLOAD}.tiering.base:SecondaryTierManager", "block_size_bytes", since=(0, 31), feature=OFFLOADING),
    *_reads(f"{OFFLOAD}.tiering.base:TransferJob", "job_id keys chunk_ids is_promotion req_context",
            feature=OFFLOADING),
    *_calls("vllm.distributed.kv_transfer", get_kv_transfer_group="", has_kv_transfer_group=""),
    *_calls(CONFIG, get_current_vllm_config_or_none=""),
    Use("vllm.logger", "init_logger", "name"),
    *_reads("vllm.v1.metrics.cache_hit_source:CacheHitSource", "HOST DISK EXTERNAL_UNSPECIFIED", since=(0, 32),
            without="vLLM's metric of where hits came from"),
    Use("vllm.distributed.kv_events", "KVCacheEvent", feature=EVENTS),
    Use("vllm.distributed.kv_events", "BlockStored",
        "*, block_hashes=, parent_block_hash=, token_ids=, block_size=, lora_id=, lora_name=, medium=, extra_keys=, "
        "group_idx=, kv_cache_spec_kind=, locality=", feature=EVENTS),
    Use("vllm.distributed.kv_events", "BlockRemoved", "*, block_hashes=, medium=, group_idx=, locality=",
        feature=EVENTS),
    # KV cache
    Use(SPECS, "get_kv_cache_spec_kind", "spec", feature=EVENTS),
    *_reads(f"{SPECS}:KVCacheConfig", "num_blocks kv_cache_groups kv_cache_layout"),
    Use(f"{SPECS}:KVCacheConfig", "kv_tp_replicas", since=(0, 31)),
    Use(f"{SPECS}:KVCacheConfig", "hash_block_size", since=(0, 33),
        without="hits in a unit of vLLM's own choice: it is taken to be that of the blocks"),
    *_reads(f"{SPECS}:KVCacheGroupSpec", "layer_names kv_cache_spec host_resident enable_kv_transfer"),
    *_reads(f"{SPECS}:KVCacheSpec", "block_size prefix_cacheable tokens_per_state"),
    Use(f"{SPECS}:KVCacheSpec", "dcp_sharded", since=(0, 31)),
    *_reads(f"{SPECS}:AttentionSpec", "dtype kv_quant_mode"),
    *_reads(f"{SPECS}:KVQuantMode", "is_per_token_head"),
    *_reads(f"{SPECS}:FullAttentionSpec", "non_causal"),
    *_reads(f"{SPECS}:MLAAttentionSpec", "non_causal_multi_token_decode"),
    *_reads(f"{SPECS}:SlidingWindowSpec", "sliding_window extra_retained_tokens"),
    *_reads(f"{SPECS}:ChunkedLocalAttentionSpec", "attention_chunk_size"),
    *_reads(f"{SPECS}:UniformTypeKVCacheSpecs", "kv_cache_specs"),
    *_reads(f"{SPECS}:MambaSpec", "shapes dtypes mamba_type mamba_cache_mode num_speculative_blocks "
            "tp_replicated", feature=STATES),
    Use(f"{SPECS}:KVCacheSpec", "state_content_size_bytes", feature=STATES),
    SCALES,
    Use("vllm.model_executor.custom_op", "op_registry_oot"),
    # configuration
    *_reads(f"{CONFIG}:VllmConfig", "model_config parallel_config cache_config scheduler_config speculative_config "
            "lora_config load_config kv_transfer_config kv_events_config compilation_config attention_config "
            "use_v2_model_runner quant_config"),
    *_reads(f"{CONFIG}:ModelConfig", "model revision code_revision seed dtype quantization quantization_config "
            "max_model_len hf_config hf_text_config multimodal_config is_encoder_decoder trust_remote_code "
            "pooler_config is_prefix_caching_supported is_hybrid "
            "model_weights architectures hf_overrides"),
    *_reads(f"{CONFIG}:ModelConfig", "rswa_window is_diffusion",
            without="refusing models whose answers have other KV than prompts"),
    Use("vllm.model_executor.models", "ModelRegistry"),
    Use("vllm.model_executor.models.registry:_ModelRegistry", "resolve_model_cls", "architectures, model_config"),
    *_reads(f"{CONFIG}:ModelConfig", "enable_sleep_mode enable_cumem_allocator",
            without="waiting for running copies before a sleep"),
    *_reads(f"{CONFIG}:MultiModalConfig", "mm_processor_cache_gb"),
    *_reads(f"{CONFIG}:ParallelConfig", "rank world_size tensor_parallel_size pipeline_parallel_size nnodes_within_dp "
            "decode_context_parallel_size prefill_context_parallel_size enable_elastic_ep"),
    *_reads(f"{CONFIG}:CacheConfig", "block_size cache_dtype enable_prefix_caching"),
    Use(f"{CONFIG}:CacheConfig", "prefix_caching_hash_algo", feature=OFFLOADING),
    *_reads(f"{CONFIG}:CacheConfig", "prefix_match_unit prefix_cache_retention_interval", feature=STATES,
            without="refusing what vLLM 0.32 and 0.33 do wrong with prefix_match_unit"),
    *_reads(f"{CONFIG}:SchedulerConfig", "policy max_num_batched_tokens"),
    *_reads(f"{CONFIG}:LoadConfig", "load_format model_loader_extra_config download_dir"),
    *_reads(f"{CONFIG}:LoRAConfig", "lora_dtype target_modules"),
    *_reads(f"{CONFIG}:KVTransferConfig", "kv_connector kv_role engine_id kv_connector_extra_config is_kv_consumer "
            "is_kv_producer kv_load_failure_policy"),
    *_reads(f"{CONFIG}:KVEventsConfig", "enable_kv_cache_events"),
    *_reads(f"{CONFIG}:CompilationConfig", "static_forward_context"),
    *_reads(f"{CONFIG}:AttentionConfig", "hisparse_config"),
    Use(f"{CONFIG}:VllmConfig", "aux_output_config", since=(0, 31)),
    Use(f"{CONFIG}:AuxOutputConfig", "enable_return_routed_experts", since=(0, 31)),
    *_reads(f"{CONFIG}:VllmConfig", "device_config", without=DEVICE),
    *_reads(f"{CONFIG}:DeviceConfig", "device_type", without=DEVICE),
    *_reads(f"{CONFIG}:ModelConfig", "use_mla", without=LAYOUT),
    *_reads(f"{CONFIG}:SpeculativeConfig", "method num_speculative_tokens"),
    *_reads(f"{CONFIG}:SpeculativeConfig", "draft_model_config draft_parallel_config draft_load_config "
            "parallel_drafting num_speculative_tokens_per_batch_size", feature=DRAFTS),
    *_reads(f"{CONFIG}:SpeculativeConfig", "moe_backend kv_cache_dtype use_heterogeneous_vocab "
            "index_share_for_mtp_iteration disable_eagle_block_drop", feature=DRAFTS),
    Use(f"{CONFIG}:SpeculativeConfig", "use_eagle_block_drop", "", feature=DRAFTS),
    Use(f"{CONFIG}:SpeculativeConfig", "use_multi_module_mtp", "", feature=DRAFTS),
    # environment and platform
    *_reads("vllm", "__version__"),
    *_reads("vllm.envs", "environment_variables VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_BATCH_INVARIANT"),
    *_reads("vllm.platforms", "current_platform"),
    *_reads("vllm.platforms:Platform", "_enum"),
    *_calls("vllm.platforms:Platform", is_rocm="", fp8_dtype="", get_device_capability=""),
)  # fmt: skip
"""Every name. A row is one name, so that a test can take each away by itself."""

SPEC_FIELDS: Final = frozenset({
    "block_size", "dcp_sharded", "block_stride_alignment", "is_draft", "max_tp_shards", "num_kv_heads", "head_size",
    "dtype", "head_size_v", "kv_quant_mode", "page_size_padded", "num_head_slots", "state_content_bytes",
    "tokens_per_state", "sliding_window", "attention_chunk_size", "non_causal", "cache_dtype_str",
    "topk_buffer_width", "alignment", "model_version", "cache_role", "is_index_group_leader", "storage_block_size",
    "non_causal_multi_token_decode", "extra_retained_tokens", "bounded_replay", "shapes", "dtypes", "mamba_type",
    "mamba_cache_mode", "num_speculative_blocks", "num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment",
    "num_heads", "tp_replicated", "kv_cache_specs",
})  # fmt: skip
"""Fields of vLLM's KV cache specs whose meaning was read. Another one may say that a block holds other tokens."""

GROUP_FIELDS: Final = frozenset({
    "layer_names", "kv_cache_spec", "is_eagle_group", "host_resident", "enable_kv_transfer", "role",
})  # fmt: skip
"""The same of a group of layers."""


# -- the check ---------------------------------------------------------------------------------------------------------


def check_vllm(features: Collection[str] = (), version: str = "") -> None:
    """Refuse a vLLM that differs in what is used of it; warn about one that was never tried.

    Args:
        features: What the engine has, of ``DRAFTS``, ``STATES`` and ``EVENTS``.
        version: Instead of the installed one's.

    Raises:
        ConfigError: Something is gone or can no longer be called as it is called here; the message names it.
    """
    version = version or vllm_version()
    found = [one for one in differences(release(version)) if one.use.feature in ("", *features)]
    if fatal := [one for one in found if not one.use.without]:
        raise ConfigError(refusal(fatal, version))
    _warn(version, tuple(f"{one.use.without} ({one})" for one in found), tuple(new_hooks()))


def refusal(found: Sequence[Difference], version: str) -> str:
    """The message of a refusal: what differs, and what to do about it."""
    proven = ", ".join(map(_numbers, PROVEN))
    return (
        f"this vLLM is not the one that tiered_kv {__version__} knows, and serving with it could go wrong. Install a "
        f"version that is proven ({proven}), or a newer tiered_kv. version={version} "
        f"differences={len(found)}: {'; '.join(map(str, found))}"
    )


@functools.cache
def _warn(version: str, lost: Sequence[str], hooks: Sequence[str]) -> None:
    """Once per process."""
    if lost:
        logger.warning("this vLLM lacks what tiered_kv uses, so it does without: %s", "; ".join(lost))
    if release(version) in PROVEN:
        return
    logger.warning(
        "vLLM %s is untested with tiered_kv. Every name and signature that is used of it is there. proven=%s "
        "hooks_not_known=%s",
        version,
        ",".join(map(_numbers, PROVEN)),
        ",".join(hooks) or "none",
    )


def vllm_version() -> str:
    """The version of vLLM that is installed."""
    return str(importlib.import_module("vllm").__version__)


def release(version: str, unnumbered: tuple[int, int] = NEWEST) -> tuple[int, int]:
    """``(0, 32)`` of ``"0.32.1+cpu"``; ``unnumbered`` of what is no number."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else unnumbered


def _numbers(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


Find = Callable[[str], ModuleType]


def differences(
    version: tuple[int, int], uses: Iterable[Use] = USES, find: Find = importlib.import_module
) -> list[Difference]:
    """Uses that a vLLM does not meet, in the order of the table.

    Args:
        version: What it calls itself: it needs not have what came later.
        find: Gives its modules by name.
    """
    found = []
    for use in uses:
        what = _difference(use, find)
        if what and (version >= use.since or not what.startswith(GONE)):
            found.append(Difference(use, what))
    return found + list(_unmet(uses, find))


def check_class(connector: type) -> None:
    """Refuse before an instance is made, whatever ``strict`` says: vLLM would call methods that do not take its call.

    Raises:
        ConfigError: vLLM calls a method of ours in another way, or one that we have not.
    """
    found = [one for one in differences(release(vllm_version()), HOOKS) if not one.what.startswith(GONE)]
    if found or getattr(connector, "__abstractmethods__", None):
        raise ConfigError(refusal(found, vllm_version()))


GONE: Final = "it is gone"


def _difference(use: Use, find: Find) -> str:
    """What is wrong with one use; empty: nothing."""
    module, _, path = use.place.partition(":")
    if use is SCALES and module not in sys.modules:
        return ""
    try:
        owner: Any = find(module)
    except ImportError as exc:
        return f"{GONE}, its module cannot be imported ({exc})"
    if path:
        outer, owner = owner, getattr(owner, path, None)
        if owner is None:
            return f"{GONE}, the module has no such class{_similar(path, dir(outer))}"
    if use.name and not has_name(owner, use.name):
        return f"{GONE}{_similar(use.name, _names(owner))}"
    if use.override:
        return _override_difference(use, owner)
    return "" if use.call is None else _call_difference(use, owner)


def _similar(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, 2)
    return f", there is {' and '.join(near)}" if near else ""


def _call_difference(use: Use, owner: Any) -> str:
    assert use.call is not None
    parts = [part.strip() for part in use.call.split(",")]
    positional = [part for part in parts if part not in ("", "*") and not part.endswith("=")]
    keywords = {part.removesuffix("="): None for part in parts if part.endswith("=")}
    function = getattr(owner, use.name, None)
    if not callable(function):
        return f"called as ({use.call}), is no function any more"
    is_method = isinstance(owner, type) and isinstance(inspect.getattr_static(owner, use.name), FunctionType)
    try:
        signature = inspect.signature(function)
    except ValueError:
        return ""  # a function of a binary says nothing
    try:
        signature.bind(*[None] * (len(positional) + is_method), **keywords)
    except TypeError as exc:
        return f"called as ({use.call}), takes {_plain(signature)}: {exc}"
    return ""


def _plain(signature: inspect.Signature) -> str:
    """A signature without types, and without the values of defaults, of which only the presence counts."""
    parameters = [
        one.replace(annotation=one.empty, default=one.empty if one.default is one.empty else None)
        for one in signature.parameters.values()
    ]
    return str(inspect.Signature(parameters))


def _override_difference(use: Use, owner: type) -> str:
    ours = described(_ours(use.override), use.name)
    theirs = described(owner, use.name)
    return "" if accepts(ours, theirs) else f"vLLM declares {theirs}, tiered_kv has {ours}"


def _unmet(uses: Iterable[Use], find: Find) -> Iterator[Difference]:
    """Methods that vLLM's base classes ask for and ours do not have."""
    for place, override in dict.fromkeys((use.place, use.override) for use in uses if use.override):
        module, _, name = place.partition(":")
        try:
            base = getattr(find(module), name)
        except (ImportError, AttributeError):
            continue  # it is among the differences
        ours = _ours(override)
        for method in sorted(getattr(base, "__abstractmethods__", set()) & set(vars(base))):
            if getattr(getattr(ours, method, None), "__isabstractmethod__", not hasattr(ours, method)):
                asked = described(base, method)
                yield Difference(Use(place, method), f"vLLM asks for it: {asked}, tiered_kv has none")


def _ours(override: str) -> Any:
    module, _, name = override.partition(":")
    return getattr(importlib.import_module(module), name)


def new_hooks(find: Find = importlib.import_module) -> list[str]:
    """Public methods of vLLM's connector that this version knows nothing of: vLLM's default is taken."""
    found: set[str] = set()
    for place in {use.place for use in HOOKS if use.override == OURS}:
        module, _, name = place.partition(":")
        base = getattr(find(module), name, object)
        found |= {name for name in vars(base) if not name.startswith("_") and callable(getattr(base, name, None))}
    return sorted(found - {use.name for use in HOOKS} - set(LEFT_TO_VLLM))


def has_name(owner: Any, name: str) -> bool:
    """Whether a module or class has a name: an attribute, a field, or what its methods assign to their instance."""
    if not isinstance(owner, type):
        return hasattr(owner, name)
    return hasattr(owner, name) or name in _fields(owner) or any(name in _assigned(one) for one in owner.__mro__)


def _names(owner: Any) -> set[str]:
    own = set(dir(owner))
    if isinstance(owner, type):
        own |= _fields(owner) | {name for one in owner.__mro__ for name in {*vars(one), *_assigned(one)}}
    return own


def _fields(owner: type) -> set[str]:
    return {name for one in owner.__mro__ for name in inspect.get_annotations(one)}


@functools.cache
def _assigned(owner: type) -> frozenset[str]:
    """Attributes that a class's methods assign, by their bytecode: ``self.blocks = ...``."""
    found = set()
    for member in vars(owner).values():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if isinstance(function, FunctionType):
            code = inspect.unwrap(function).__code__
            found |= set(_stored(code, code.co_varnames[:1]))
    return frozenset(found)


def _stored(code: CodeType, instance: Sequence[str]) -> Iterator[str]:
    """Attributes that a method stores into its first argument; also into what is not clearly another object."""
    loaded: object = None
    for step in dis.get_instructions(code):
        last = loaded[-1] if isinstance(loaded, tuple) and loaded else loaded  # Python 3.13 loads two names at once
        if step.opname == "STORE_ATTR" and (not isinstance(last, str) or last in instance):
            yield step.argval
        loaded = step.argval


def described(owner: type, name: str) -> str:
    """What a method is and takes, e.g. ``"abstract method (self, request)"``."""
    member = inspect.getattr_static(owner, name)
    kind = type(member).__name__ if isinstance(member, classmethod | staticmethod | property) else "method"
    function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    abstract = "abstract " if getattr(member, "__isabstractmethod__", False) else ""
    if not callable(function):
        return f"{abstract}{type(member).__name__} ()"
    return f"{abstract}{kind} {_plain(inspect.signature(function))}"


def accepts(ours: str, theirs: str) -> bool:
    """Whether a call that fits vLLM's declaration fits ours: same kind, same names in the same order, more optional."""
    (kind, mine), (their_kind, wanted) = (_parts(text) for text in (ours, theirs))
    if kind != their_kind or bool(wanted.kwarg) > bool(mine.kwarg) or bool(wanted.vararg) > bool(mine.vararg):
        return False
    names, wanted_names = ([a.arg for a in arguments.posonlyargs + arguments.args] for arguments in (mine, wanted))
    required, wanted_required = (
        len(arguments.posonlyargs + arguments.args) - len(arguments.defaults) for arguments in (mine, wanted)
    )
    keywords, wanted_keywords = ({a.arg for a in arguments.kwonlyargs} for arguments in (mine, wanted))
    needed = {a.arg for a, default in zip(mine.kwonlyargs, mine.kw_defaults, strict=True) if default is None}
    if not mine.kwarg and not wanted_keywords <= keywords | set(names):
        return False
    return names[: len(wanted_names)] == wanted_names and required <= wanted_required and not needed


def _parts(text: str) -> tuple[str, ast.arguments]:
    kind, _, parameters = text.removeprefix("abstract ").partition(" ")
    function = ast.parse(f"def f{parameters}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return kind, function.args


def unknown_traits(spec: Any, known: Collection[str]) -> list[str]:
    """Fields of a KV cache spec, or of a group with ``GROUP_FIELDS``, that are set and that nobody here has read."""
    if not dataclasses.is_dataclass(spec):
        return []
    return [
        f"{field.name}={getattr(spec, field.name, None)!r}"
        for field in dataclasses.fields(spec)
        if field.name not in known and not _is_default(field, getattr(spec, field.name, None))
    ]


def _is_default(field: "dataclasses.Field[Any]", value: object) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(field.default_factory() == value)
    return field.default is not dataclasses.MISSING and bool(field.default == value)


# -- names without a promise -------------------------------------------------------------------------------------------


def step_metadata(connector: Any) -> Any:
    """The metadata of the step that a worker's connector is in; vLLM's own connectors read it like this."""
    return connector._get_connector_metadata()


def platform_name(platform: Any) -> str:
    """``"cpu"``, ``"cuda"``, ``"rocm"``: its public ``device_type`` is the same for the last two."""
    return str(platform._enum.name).lower()


def model_class(model_config: Any) -> type:
    """The class that vLLM makes of this configuration: its own, or one that a plugin or a script has registered."""
    from vllm.model_executor.models import ModelRegistry  # noqa: PLC0415 - the model was loaded, so this was, too

    made: type = ModelRegistry.resolve_model_cls(model_config.architectures, model_config)[0]
    return made


def replaced_layers() -> list[type]:
    """The classes that plugins gave vLLM in the place of its layers and operations (``register_oot``)."""
    from vllm.model_executor import custom_op  # noqa: PLC0415 - the model was loaded, so this was, too

    return list(custom_op.op_registry_oot.values())


def overwrites_scales(impl: Any) -> bool:
    """Whether an attention backend sets the scales of all pages at its first forward pass."""
    return hasattr(impl, SCALES.name)


def expert_precisions(method: Any) -> list[Any] | None:
    """The dtypes of a quantised expert layer's inputs and weights, as vLLM chose them; None: it is not quantised."""
    config = getattr(method, "moe_quant_config", None)
    if config is None or getattr(config, "_w1", None) is None:
        return None
    return [getattr(getattr(config, part, None), "dtype", None) for part in ("_a1", "_a2", "_w1", "_w2")]


class PagedBlocks:
    """vLLM's block pool, as far as it is used here: by the numbers of blocks.

    Holds no state but the pool. Threads: vLLM's scheduler thread only.
    """

    __slots__ = ("_pool",)

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    @property
    def count(self) -> int:
        """All blocks, the null block among them."""
        return int(self._pool.num_gpu_blocks)

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return int(self._pool.get_num_free_blocks())

    def hold(self, numbers: Sequence[int]) -> None:
        """Pin blocks, so that vLLM gives them to no other request."""
        self._pool.touch([self._pool.blocks[number] for number in numbers])

    def let_go(self, numbers: Sequence[int]) -> None:
        """End such pins, of the last block first: vLLM evicts in that order."""
        self._pool.free_blocks([self._pool.blocks[number] for number in reversed(numbers)])

    def holders(self, number: int) -> int:
        """How many hold a block."""
        return int(self._pool.blocks[number].ref_cnt)

    def cached(self, block_hash: Any, groups: list[int]) -> object:
        """The blocks of a hash in some KV cache groups; None: the prefix cache lacks one."""
        return self._pool.get_cached_block(block_hash, groups)


def session_id_of(request: Any) -> object:
    """What a request says to vLLM (0.32) is its user's session; None: nothing."""
    return getattr(request, "session_id", None)


def kv_hints_of(request: Any) -> list[tuple[str, Mapping[str, object]]]:
    """Type and payload of the hints that a request of vLLM (0.32) brings, in their order."""
    envelope = getattr(request, "kv_hints", None)
    actions = getattr(envelope, "actions", None) or ()
    return [(str(one.action_type), one.payload if isinstance(one.payload, Mapping) else {}) for one in actions]


def ask_for_state(request: Any, tokens: int) -> bool:
    """Have vLLM keep the states of recurrent layers behind so many of a prompt's tokens, a whole number of blocks.

    It ends a step there, as at a fork that it finds in its own cache. That one it sets whenever it considers to admit
    the request, right before it asks its connector, so a connector has to ask each time.

    Returns:
        Whether vLLM would not have kept it, or one behind more tokens, by itself.
    """
    own = getattr(request, "shared_prefix_boundary", None)
    if own is None or own >= tokens:
        return False
    request.shared_prefix_boundary = tokens
    return True


def before_emptying(block_pool: Any, let_go: Callable[[], None]) -> None:
    """Have ``let_go`` called whenever vLLM is about to forget all blocks of its pool; there is no hook for that."""
    empty = block_pool.reset_prefix_cache

    def reset_prefix_cache() -> bool:
        let_go()
        return bool(empty())

    block_pool.reset_prefix_cache = reset_prefix_cache


def can_sleep(model_config: Any) -> bool:
    """Whether vLLM can take the KV cache's memory away: its engine sleeps wherever that allocator is, when told to."""
    return bool(
        getattr(model_config, "enable_sleep_mode", False) or getattr(model_config, "enable_cumem_allocator", False)
    )


def before_sleep(finish: Callable[[], None]) -> None:
    """Have ``finish`` called before vLLM takes the KV cache's memory away, in any way; from 0.33 on a hook says so.

    Args:
        finish: A method. Its object is not kept: the allocator is one for all engines of the process.

    Raises:
        UnsupportedModel: Neither is there: a copy that runs while vLLM sleeps would end the engine.
    """
    if hasattr(importlib.import_module(f"{V1}.base").KVConnectorBase_V1, "unregister_kv_caches"):
        return
    try:
        allocator = importlib.import_module(ALLOCATOR.place).get_mem_allocator_instance()
        ways = {"sleep": allocator.sleep}
    except (ImportError, AttributeError, RuntimeError) as exc:
        raise UnsupportedModel(f"this vLLM does not say when it sleeps; start it without sleep mode: {exc}") from exc

    if (discard := getattr(allocator, "discard", None)) is not None:  # 0.32's release_kv_cache_memory
        ways["discard"] = discard
    for name, take_away in ways.items():
        setattr(allocator, name, _behind(weakref.WeakMethod(finish), take_away))


def _behind(reference: "weakref.WeakMethod[Callable[[], None]]", take_away: Callable[..., Any]) -> Callable[..., Any]:
    """``take_away``, called when copies have ended, as long as there is whoever makes them."""

    @functools.wraps(take_away)
    def without_copies(*arguments: Any, **named: Any) -> Any:
        if (finish_copies := reference()) is not None:
            finish_copies()
        return take_away(*arguments, **named)

    return without_copies


def key_positions(req_context: Any) -> dict[bytes, int]:
    """vLLM's keys of all whole chunks of a request, and how many of its tokens end with each, in order per group.

    vLLM promises to give the position of a key, and not all keys.
    """
    positions: dict[bytes, int] = req_context._offload_key_positions
    return positions


def secondary_tiers(connector: Any) -> list[Any]:
    """The tiers that vLLM made for its ``OffloadingConnector``, in the scheduler's process; none where it has none."""
    return list(getattr(connector.scheduler.manager, "secondary_tiers", ()))


def end_offloading(connector: Any) -> None:
    """End vLLM's offloading in this process, both sides of it, of an engine that does not start.

    vLLM ends a start that fails without a word to its connectors, and the file of its host memory stays.
    """
    connector.shutdown()
    importlib.import_module("vllm.distributed.kv_transfer.kv_transfer_state").ensure_kv_transfer_shutdown()


def offloading_config(vllm_config: Any, kv_cache_config: Any) -> Any:
    """How vLLM's offloading cuts rows."""
    return importlib.import_module(f"{V1}.offloading.config").build_offloading_config(vllm_config, kv_cache_config)


def canonical_pages(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> dict[str, int]:
    """By layer, bytes of a page in vLLM's canonical layout, of all ranks together; call it in a worker.

    Args:
        kv_caches: What vLLM registered with the connector.
    """
    derive = importlib.import_module(f"{V1}.offloading.canonical_mapping").derive_canonical_mappings
    mappings = derive(vllm_config, kv_cache_config, kv_caches)
    return {layer: int(one.canonical_page_size_bytes) for layer, one in mappings.items()}


def after_connector_is_made(made: Callable[[Any, Any, Any, Any], None]) -> None:
    """Have ``made`` called with each connector of this process, its configuration, role and KV caches. Idempotent.

    What it raises keeps the engine from starting.
    """
    factory = importlib.import_module(FACTORY.partition(":")[0]).KVConnectorFactory
    create = factory.create_connector
    if getattr(create, _MARK, False):
        return

    signature = inspect.signature(create)

    @functools.wraps(create)
    def create_connector(*arguments: Any, **named: Any) -> Any:
        connector = create(*arguments, **named)
        given = signature.bind(*arguments, **named).arguments
        if given.keys() >= {"config", "role", "kv_cache_config"}:  # of a vLLM that says it otherwise nothing is told
            made(connector, given["config"], given["role"], given["kv_cache_config"])
        return connector

    setattr(create_connector, _MARK, True)
    factory.create_connector = staticmethod(create_connector)
