"""What a worker under vLLM's own offloading says of its rows, so that the tier can join the server with it.

A row of vLLM's host memory holds one chunk of one group of layers: all ranks, layers and blocks, as vLLM's worker laid
them out. Its bytes mean the same only under all that the connector's chunks depend on (``record.py``), and under how
rows are cut. The tier lives in the scheduler's process, which has neither the attention layers nor the files that were
read; so a worker computes the fields, and vLLM's handshake carries them over (``offloading.py``).

vLLM's block hashes are names here. They chain tokens, media and salts; where they do not name content (media by a
counter, a seed that every process draws anew) the engine is refused. Of adapters they have name and path; what was
loaded from there is added (``row_adapters.py``).
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import vllm

from tiered_kv.config import Config
from tiered_kv.errors import TieredKVError, UnsupportedModel
from tiered_kv.keys.stored_by import encoding_text, stored_by
from tiered_kv.version import __version__
from tiered_kv.vllm.compat import KVConnectorHandshakeMetadata, check_vllm
from tiered_kv.vllm.identity.record import base_fields, page_encodings, with_experts
from tiered_kv.vllm.request_extras import hashes_media
from tiered_kv.vllm.row_groups import RowGroup
from tiered_kv.vllm.supported import check_drafts, check_groups, check_layers, check_states, check_supported, features

DOOR: Final = "vllm_rows"
"""What ``stored_by`` calls this door."""

SEEDLESS: Final = frozenset({"sha256", "sha256_cbor"})
"""Hash algorithms whose first hash is the same in every process."""

SEEDED: Final = frozenset({"xxhash", "xxhash_cbor"})
"""Those whose first hash is drawn anew by every process, unless ``PYTHONHASHSEED`` is set."""


@dataclass(frozen=True)
class RowIdentity(KVConnectorHandshakeMetadata):
    """What a worker tells the tier.

    Attributes:
        fields: The namespace's fields but geometry and epoch, as JSON; equal on all ranks.
        stored_by: The line of ``keys/stored_by.py``.
        groups: Of which rows are stored, and what of them this rank has.
        refusal: Why this engine is not served; then the others are empty.
    """

    fields: bytes = b""
    stored_by: str = ""
    groups: tuple[RowGroup, ...] = ()
    refusal: str = ""


def row_identity(
    vllm_config: Any,
    kv_cache_config: Any,
    config: Config,
    rows: Mapping[str, object],
    row_groups: tuple[RowGroup, ...],
    *,
    is_for_any_ranks: bool = False,
) -> RowIdentity:
    """Name what this engine's rows hold; call it in a worker, after its KV caches were registered.

    Args:
        config: The tier's settings, with ``chunk_tokens`` as rows have them.
        rows: How rows are cut, plain values: part of the name.
        row_groups: With what this rank has of a row.
        is_for_any_ranks: Rows are the same with another tensor parallelism.
    """
    try:
        check_vllm(features(vllm_config, kv_cache_config))
        check_groups(kv_cache_config)
        _check_stages(vllm_config)
        _check_names(vllm_config)
        check_supported(vllm_config, config.chunk_tokens)
        check_states(vllm_config, kv_cache_config)
        check_drafts(vllm_config, kv_cache_config)
        check_layers(vllm_config, kv_cache_config)
        encodings = with_experts(vllm_config, page_encodings(vllm_config, kv_cache_config))
        fields = base_fields(vllm_config, kv_cache_config, config)
    except (TieredKVError, ValueError) as exc:
        return RowIdentity(refusal=str(exc))
    fields["rows"] = {
        **rows,
        "encodings": _encodings(encodings),
        "block_hash": str(vllm_config.cache_config.prefix_caching_hash_algo),
        "hash_seed": os.environ.get("PYTHONHASHSEED"),
        "layers": [list(group.layer_names) for group in kv_cache_config.kv_cache_groups],
    }
    if is_for_any_ranks:
        fields["tp"] = None
        if isinstance(draft := fields.get("draft"), dict):
            draft["tp"] = None
    line = stored_by(__version__, DOOR, vllm.__version__, encoding_text(encodings.values()))
    return RowIdentity(json.dumps(fields, sort_keys=True).encode(), line, row_groups)


def _encodings(by_layer: Mapping[str, str]) -> object:
    """Of layers that are encoded otherwise, each with its own: the bytes of a row do not say which layer is which."""
    kinds = sorted(set(by_layer.values()))
    return kinds if len(kinds) < 2 else dict(by_layer)


def _check_stages(vllm_config: Any) -> None:
    """Refuse pipeline stages: each has layers of its own, and a row's name has one list of them for all ranks.

    Raises:
        UnsupportedModel: The message says what to do.
    """
    if (stages := int(vllm_config.parallel_config.pipeline_parallel_size)) > 1:
        raise UnsupportedModel(
            "pipeline stages are not supported below vLLM's offloading. Use TieredKVConnector. "
            f"pipeline_parallel_size={stages}"
        )


def _check_names(vllm_config: Any) -> None:
    """Refuse where vLLM's name of a row is not that of its content.

    Raises:
        UnsupportedModel: The message says why and what to do.
    """
    if vllm_config.model_config.multimodal_config is not None and not hashes_media(vllm_config):
        raise UnsupportedModel("vLLM counts images instead of hashing them: set mm_processor_cache_gb above 0")
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm not in SEEDLESS | SEEDED:
        raise UnsupportedModel(f"unknown block hash. Set --prefix-caching-hash-algo sha256. algorithm={algorithm}")
    if algorithm in SEEDED and os.environ.get("PYTHONHASHSEED") in (None, "random"):
        raise UnsupportedModel(
            "block hashes differ between processes: set --prefix-caching-hash-algo sha256, or PYTHONHASHSEED to one "
            f"number for all of them. algorithm={algorithm}"
        )
