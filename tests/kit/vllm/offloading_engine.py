"""An engine with vLLM's own offloading and our tier below it.

vLLM refuses to offload where there is no GPU, so a worker that copies by the CPU takes the GPU's place
(``host_offloading.py``); all else is vLLM's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kit.server.probe import wait_for
from tests.kit.vllm.harness import Answer, close_llm, generate, make_llm, reset_gpu_cache, zero_kv
from tests.kit.vllm.row_patience import patient_rows

MAX_TOKENS = 6
ROW_TOKENS = 128
ROW_BYTES = 256 << 10
"""Of the tiny Llama."""


def extra_config(
    place: dict[str, Any],
    rows: int = 256,
    *,
    row_bytes: int = ROW_BYTES,
    block_size: int | None = ROW_TOKENS,
    is_canonical: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """vLLM's own offloading with so many rows of host memory, and our tier below it."""
    tier = {"type": "TieredKVTier", "module_path": "tiered_kv.vllm.offloading", "strict": True, "host_bytes": "64MiB"}
    tier |= {"lookup_timeout_ms": 30_000, "promotion_wait_ms": 60_000} | place | more
    cut: dict[str, Any] = {} if block_size is None else {"block_size": block_size}
    cut |= {"canonical_layout": True} if is_canonical else {}
    return cut | {
        "spec_name": "HostTieringSpec",
        "spec_module_path": "tests.kit.vllm.host_offloading",
        "cpu_bytes_to_use": rows * row_bytes,
        "secondary_tiers": [tier],
    }


def offloading(place: dict[str, Any], rows: int = 256, **more: Any) -> dict[str, Any]:
    """The engine's settings."""
    from vllm.config import KVTransferConfig

    extra = extra_config(place, rows, **more)
    transfer = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    return {"kv_transfer_config": transfer}


def on_disk(root: Path) -> dict[str, Any]:
    return {"storage_uri": f"file://{root}", "disk_bytes": "512MiB"}


@contextmanager
def offloading_engine(
    model: Path, place: dict[str, Any], rows: int = 256, options: dict[str, Any] | None = None, **more: Any
) -> Iterator[Any]:
    """An engine for the length of a ``with`` block; ``options`` are vLLM's."""
    with patient_rows():
        llm = make_llm(model, **offloading(place, rows, **more), **(options or {}))
        try:
            yield llm
        finally:
            close_llm(llm)


def manager_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.manager


def tier_of(llm: Any) -> Any:
    (tier,) = manager_of(llm).secondary_tiers
    return tier


def ask(llm: Any, *prompts: list[int]) -> list[Answer]:
    """Answer with an empty GPU prefix cache; what is stored has left vLLM's rows when this returns."""
    reset_gpu_cache(llm)
    zero_kv(llm)
    answers = generate(llm, prompts, max_tokens=MAX_TOKENS)
    wait_for(lambda: not step(llm), "jobs to end")
    return answers


def step(llm: Any) -> bool:
    """Let the engine do a step; says whether jobs of its tier run."""
    generate(llm, [[5, 6, 7]], max_tokens=1)
    return bool(manager_of(llm).has_pending_work())
