"""An engine's role: whether it loads and stores, and the settings its decisions need."""

from dataclasses import dataclass
from typing import Any

from tiered_kv.vllm.drafts import Drafts
from tiered_kv.vllm.request_extras import hashes_media


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRole:
    """An engine's part, from its ``kv_role`` and its own settings.

    Attributes:
        has_drafts: It decodes speculatively.
        drafts: How, where its draft keeps KV.
        has_media_hashes: vLLM names images, videos and sounds by their content.
        is_by_priority: vLLM admits requests by priority, not by arrival.
        step_tokens: vLLM's budget of tokens for one step.
    """

    may_load: bool
    may_store: bool
    has_prefix_caching: bool
    has_drafts: bool = False
    drafts: Drafts | None = None
    has_media_hashes: bool = True
    is_by_priority: bool = False
    step_tokens: int = 8192

    @classmethod
    def of(cls, vllm_config: Any, transfer_config: Any) -> "EngineRole":
        """Read it; ``transfer_config`` is that of this connector, which below MultiConnector is not the engine's."""
        return cls(
            may_load=transfer_config.is_kv_consumer,
            may_store=transfer_config.is_kv_producer,
            has_prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
            has_drafts=vllm_config.speculative_config is not None,
            drafts=Drafts.of(vllm_config),
            has_media_hashes=hashes_media(vllm_config),
            is_by_priority=vllm_config.scheduler_config.policy == "priority",
            step_tokens=int(vllm_config.scheduler_config.max_num_batched_tokens),
        )
