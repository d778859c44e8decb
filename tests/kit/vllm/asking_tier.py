"""A tier beside ours that asks its parent for rows, as vLLM's ``p2p`` does for other engines."""

from typing import Any
from uuid import uuid4

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, ParentManager, SecondaryTierManager


class AskingTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is untyped here
    """Asks its parent for what ``wanted`` names, and copies what there is; vLLM's ``p2p`` sends it to whoever asked."""

    def __init__(self, view: memoryview) -> None:
        super().__init__(None, view, "asking")
        self._memory: Any = np.frombuffer(view.cast("B"), np.uint8).reshape(len(view), -1)
        self.wanted: list[Any] = []
        self.answers: dict[Any, LookupResult] = {}
        self.got: dict[Any, bytes] = {}
        self._context: Any = None
        self._results: list[Any] = []

    def serve_external_requests(self, parent: ParentManager) -> None:
        if not self.wanted:
            return
        if self._context is None:
            self._context = ReqContext(req_id=f"p2p:{uuid4().hex}")
            parent.on_new_request(self._context)
        self.answers = {one: parent.lookup(one, self._context) for one in self.wanted}
        if {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(self.answers.values()):
            return
        if hits := [one for one, answer in self.answers.items() if answer is LookupResult.HIT]:
            job = parent.create_store_job(hits, self._context)
            self.got = {one: self._memory[row].tobytes() for one, row in zip(job.keys, job.chunk_ids, strict=True)}
            self._results.append(JobResult(job.job_id, success=True))
        parent.on_request_finished(self._context)
        self.wanted, self._context = [], None

    def get_finished_jobs(self) -> list[Any]:
        results, self._results = self._results, []
        return results

    def submit_store(self, job_metadata: Any) -> None:
        self._results.append(JobResult(job_metadata.job_id, success=True))

    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> Any:
        return LookupResult.MISS

    def submit_load(self, job_metadata: Any) -> None:
        raise AssertionError("it has nothing")

    def drain_jobs(self) -> None:
        pass

    def has_pending_work(self) -> bool:
        return bool(self.wanted)

    def let_go(self) -> None:
        """VLLM unmaps the rows."""
        self._memory = np.empty((0, 0), np.uint8)
