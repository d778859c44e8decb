"""LoRA adapters below vLLM's own offloading: what a request with one may find and store, and under what names.

vLLM's keys have an adapter's name and path, whatever lies there now, and a tier is told no more. So the hooks of vLLM's
connector are listened to: which adapter a request has, and which files its workers loaded (``identity/adapters.py``).
The name of a row is then made of vLLM's key and of the adapter's content::

    name = SHA-256(SHA-256(adapter's identity) || vLLM's key) || number of the group, 4 bytes

Equal adapters below other names or paths have other keys of vLLM's, and so share nothing.

Threads: vLLM's scheduler thread; :func:`report_adapters` in a worker.
"""

import hashlib
import logging
import sys
from dataclasses import dataclass, field
from typing import Any

from tiered_kv.keys.row_names import GROUP_BYTES
from tiered_kv.vllm.compat import OffloadingWorkerMetadata
from tiered_kv.vllm.identity.adapters import (
    Adapter,
    Adapters,
    Unaccountable,
    adapter_numerics,
    mixes_up_adapters,
)
from tiered_kv.vllm.identity.loader_watch import adapter_loads

logger = logging.getLogger("vllm." + __name__)


@dataclass
class RowReport(OffloadingWorkerMetadata):
    """vLLM's report of its offloading's workers, with what they loaded.

    Attributes:
        adapters: By vLLM's id of the adapter and by rank: stamps of the files as text.
    """

    adapters: dict[int, dict[int, str]] = field(default_factory=dict)

    def aggregate(self, other: Any) -> "RowReport":
        """Both reports as one."""
        theirs = super().aggregate(other)
        adapters = {number: dict(by_rank) for number, by_rank in self.adapters.items()}
        for number, by_rank in other.adapters.items():
            adapters.setdefault(number, {}).update(by_rank)
        return RowReport(theirs.completed_jobs, theirs.transfer_stats, adapters)


def salted(salt: bytes, key: bytes) -> bytes:
    """The name of a row that was computed with the adapter of this salt."""
    return hashlib.sha256(salt + key).digest() + key[-GROUP_BYTES:]


class RowAdapters:
    """The adapters of one engine's requests."""

    def __init__(self, vllm_config: Any) -> None:
        world_size, mixes_up = int(vllm_config.parallel_config.world_size), mixes_up_adapters(vllm_config)
        self._adapters = Adapters(adapter_numerics(vllm_config), world_size, mixes_up=mixes_up)
        self._have_adapters: dict[str, bool] = {}  # of the requests that vLLM has scheduled, by name
        self._announced: Any = None
        self._has_told = False

    def salt_of(self, req_id: str) -> tuple[Adapter | None, bytes]:
        """The adapter of the request that vLLM announces now, with the salt of its rows' names; none: no adapter.

        Raises:
            Unaccountable: Its adapter is not known by content, or vLLM may mix up that it has none: it is left alone.
        """
        request = self._announced
        if request is None or str(request.request_id) != str(req_id):
            raise Unaccountable(f"nobody says which adapter this request has. request={req_id}")
        if request.lora_request is None:
            self._adapters.check_base()
            return None, b""
        adapter = self._adapters.identity(request.lora_request)
        return adapter, hashlib.sha256(adapter.identity.encode()).digest()

    def tell(self, cause: Unaccountable) -> None:
        """Say once that requests are left alone."""
        if not self._has_told:
            self._has_told = True
            logger.warning("requests are left alone for their adapters. first=%s", cause)

    def begin_step(self, output: Any) -> None:
        """Take in a step that vLLM's scheduler has planned, before any of it is stored."""
        for name in output.finished_req_ids:
            self._have_adapters.pop(name, None)
        self._have_adapters.update((new.req_id, new.lora_request is not None) for new in output.scheduled_new_reqs)
        known = [self._have_adapters[name] for name in output.num_scheduled_tokens if name in self._have_adapters]
        if self._adapters.take_step(known):
            self._has_told = False  # who is left alone from now on has another cause

    def may_look_up(self, adapter: Adapter) -> bool:
        """Whether ranks hold, or will load, this very adapter."""
        return self._adapters.may_look_up(adapter)

    def may_store(self, adapter: Adapter | None) -> bool:
        """Whether every rank has reported this very adapter, and never another one under its id; None: it has none."""
        if adapter is not None:
            return self._adapters.is_held(adapter)
        try:
            self._adapters.check_base()
        except Unaccountable as exc:
            self.tell(exc)
            return False
        return True

    def listen(self, connector: Any) -> None:
        """Hear of requests and of workers' reports before the scheduler's side of vLLM's connector does."""
        begin, take = connector.on_new_request, connector.update_connector_output

        def on_new_request(request: Any) -> None:
            self._announced = request
            try:
                begin(request)
            finally:
                self._announced = None

        def update_connector_output(output: Any) -> None:
            report = output.kv_connector_worker_meta
            if isinstance(report, RowReport):
                self._adapters.take_reports(report.adapters)  # before the rows that were computed with them
            take(output)

        connector.on_new_request, connector.update_connector_output = on_new_request, update_connector_output


def report_adapters(connector: Any, rank: int) -> None:
    """Have a worker's side of vLLM's connector report the adapters that it loads.

    What was computed with an adapter is copied in a later step than the one that reports it.
    """
    build = connector.build_connector_worker_meta
    told, _ = adapter_loads(sys.maxsize)  # engines before this one in the process

    def build_connector_worker_meta() -> Any:
        nonlocal told
        theirs = build()
        told, loads = adapter_loads(told)
        if theirs is None and not loads:
            return None
        report = RowReport(adapters={number: {rank: stamps} for number, stamps in loads.items()})
        if theirs is not None:
            report.completed_jobs, report.transfer_stats = theirs.completed_jobs, theirs.transfer_stats
        return report

    connector.build_connector_worker_meta = build_connector_worker_meta
