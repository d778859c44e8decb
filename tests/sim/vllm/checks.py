"""What a simulated engine at rest must not hold any more, and what its clients must have got."""

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from tests.kit.server.probe import figures, is_serving, wait_for
from tests.kit.storage.disk_probe import blob_files
from tests.kit.vllm.row_accounts import check_accounts, tier_leaks
from tests.sim.vllm.engine import SimulatedEngine
from tests.sim.vllm.model import UNDRAFTED


def unanswered(engine: SimulatedEngine, asked: Mapping[str, int], aborted: Collection[str]) -> list[str]:
    """Requests that were not answered in full."""
    wrong = []
    for request_id, tokens in asked.items():
        answer = engine.answers[request_id]
        if request_id not in aborted and answer.given != tokens:
            wrong.append(f"{request_id} got {answer.given} tokens of {tokens}: {answer.finish_reason}")
    return wrong


def leaks(engine: SimulatedEngine) -> list[str]:
    """Blocks, requests and work that are left in vLLM or in the connector."""
    scheduler, side = engine.scheduler, engine.connector._scheduler.side
    pool = scheduler.kv_cache_manager.block_pool
    found = {
        "blocks held": [block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null],
        "blocks missing from the pool": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "requests in the scheduler": list(scheduler.requests),
        "blocks to be freed": list(scheduler.deferred_frees),
        "requests in the connector": list(side._requests),
        "keys being loaded": dict(side._loading),
        "loads not sent": list(side._loads),
        "stores": side.saves.has_work,
        "pending work": engine.connector.has_pending_push_work(),
        "copies in workers": sum(worker.connector._worker._running for worker in engine.workers),
    }
    return [f"{what} left: {left}" for what, left in found.items() if left]


def offloading_leaks(engine: SimulatedEngine) -> list[str]:
    """Blocks, requests and rows that are left in vLLM, its offloading or our tier below it."""
    scheduler, offloading, tier = engine.scheduler, engine.connector.scheduler, engine.row_tier
    pool = scheduler.kv_cache_manager.block_pool
    check_accounts(tier)
    found = {
        "blocks missing from the pool": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "requests in the scheduler": list(scheduler.requests),
        "requests in vLLM's offloading": list(offloading._req_status),
        "jobs in vLLM's offloading": list(offloading._jobs),
        "in the tier": tier_leaks(tier),
    }
    return [f"{what} left: {left}" for what, left in found.items() if left]


def undrafted_blobs(root: Path) -> int:
    """Blobs with KV of tokens for which the draft did not run: without it, but with a right checksum."""
    mark = UNDRAFTED.to_bytes(8, "little") * 4  # all words of a token and head
    return sum(mark in path.read_bytes() for path in blob_files(root))


def content(value: Any) -> Any:
    """A copy of everything that a scheduler's output says, to compare it with what it says later."""
    if is_dataclass(value):  # the block state is a window into vLLM's own tables
        names = [one.name for one in fields(value) if one.name != "kv_connector_block_state"]
        return {name: content(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {key: content(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [content(one) for one in value]
    return set(value) if isinstance(value, set) else repr(value)


def server_leaks(engine: SimulatedEngine, root: Path) -> list[str]:
    """Leases and lookups that are left in the server; one that was killed holds nothing."""
    left = ""

    def is_released() -> bool:
        nonlocal left
        engine.connector._scheduler.side.poll()  # what could not be sent at once is sent now
        try:
            usage = figures(root)["hierarchy"]
        except (ConnectionError, AssertionError):  # it was killed while it was asked
            return not is_serving(root)
        left = f"left in the server: {usage['leased_bytes']} bytes leased, {usage['lookups']} lookups"
        return not usage["leased_bytes"] and not usage["lookups"]

    try:
        wait_for(is_released, "leases", deadline_s=10.0)
    except TimeoutError:
        return [left]
    return []


def server_hits(root: Path) -> dict[str, Any]:
    """Chunks that a server found, by the tier they came from; nothing when there is none any more."""
    try:
        hits = figures(root)["tokens"]["hits"]
    except (ConnectionError, AssertionError):  # it was killed, or ends because its last client left
        return {}
    return {f"hit_chunks_{hit['tier']}": hit["chunks"] for hit in hits}
