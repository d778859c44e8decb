"""What our tier below vLLM's offloading counts and holds, compared part by part."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from tiered_kv.vllm.offloading import TieredKVTier
from tiered_kv.vllm.row_jobs import _LoadJob, _StoreJob


def check_accounts(tier: TieredKVTier) -> None:
    """Each row, slot and hit that is counted is somebody's."""
    hits = sum(len(one.hits) for one in tier._requests.values())
    assert tier._hits == hits <= tier._hits_max, f"hits are counted wrong. counted={tier._hits} hits={hits}"
    assert tier._requests.keys() <= tier._known.keys(), "a request that is over has hits"
    jobs = tier._jobs
    if jobs is None:
        return
    running = jobs._jobs.keys() | {one.job for one in jobs._done}
    assert tier._parts.keys() == running, "parts and jobs differ"
    uses = jobs.uses
    used = Counter(use.job for use in uses._uses.values())
    assert used == Counter({job.id: job.used for job in jobs._jobs.values() if job.used}), "uses of rows differ"
    assert uses.reading == sum(use.is_load for use in uses._uses.values()), "reads are counted wrong"
    assert uses._asked_back == sum(use.waited_s is not None for use in uses._uses.values())
    assert +uses._running == Counter(use.generation for use in uses._uses.values())
    loads = [job for job in jobs._jobs.values() if isinstance(job, _LoadJob)]
    assert jobs._leased == sum(piece.count for job in loads for piece in job.pieces), "leases differ"
    client = jobs.client
    stores = [job for job in jobs._jobs.values() if isinstance(job, _StoreJob) and job.generation == client.generation]
    slots = [slot for job in stores for slot in job.slots.values()]
    assert client._taken == set(slots), "slots differ"
    assert all(job.id in jobs._jobs for job, _ in jobs._storing.values()), "a job that is over stores"


def tier_leaks(tier: TieredKVTier) -> list[str]:
    """What a tier at rest still holds."""
    jobs = tier._jobs
    assert jobs is not None and tier._hints is not None
    held: dict[str, Callable[[], Any]] = {
        "requests": lambda: tier._known,
        "hits": lambda: tier._requests,
        "parts": lambda: tier._parts,
        "stores": lambda: tier._stores,
        "ended": lambda: tier._ended,
        "hints": lambda: tier._hints is not None and tier._hints.is_waiting,
        "jobs": lambda: jobs._jobs,
        "rows in line": lambda: jobs._waiting,
        "uses": lambda: jobs.uses._uses,
        "lookups": lambda: jobs.client.lookups,
        "slots": lambda: jobs.client._taken,
        "loans": lambda: len(jobs.uses._loans) > 1,
    }
    return [name for name, what in held.items() if what()]
