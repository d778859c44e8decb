"""vLLM's own offloading on its CPU build: its tiering spec, a worker that copies by the CPU in place of the GPU's.

vLLM refuses to offload where there is no GPU; all but the worker (manager, tiers, connector) is vLLM's.
Named in ``kv_connector_extra_config`` as ``spec_name`` ``HostTieringSpec``, ``spec_module_path`` this module. A best
case of a thing that no user of the CPU build can have. For benchmarks and tests.
"""

import ctypes
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.gpu_worker import _canonical_block_sizes
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostOffloadingWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM is untyped here
    """Copies pages between paged KV in host memory and vLLM's shared region, in a thread, in the order of submission.

    What is submitted was computed: the CPU build computes in the calling thread.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        region: SharedOffloadRegion,
        *,
        is_canonical: bool = False,
    ) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region
        self._refs = kv_caches.group_data_refs
        self._paged = [one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in kv_caches.tensors]
        self._is_canonical = is_canonical
        if is_canonical:
            cells = _canonical_block_sizes(self._refs, len(kv_caches.tensors))
            self._rows = [region.create_next_canonical_view(cell * blocks_per_chunk) for cell in cells]
        else:
            self._rows = [
                region.create_next_worker_view(one.page_size_bytes * blocks_per_chunk) for one in kv_caches.tensors
            ]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-offloading")
        self._running: dict[int, Future[TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        return self._submit(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(job_id, dst_spec, src_spec, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        ended = [job_id for job_id, running in self._running.items() if running.done()]
        return [self._running.pop(job_id).result() for job_id in ended]

    def wait(self, job_ids: set[int]) -> None:
        wait([self._running[job_id] for job_id in job_ids if job_id in self._running])

    def shutdown(self) -> None:
        self._thread.shutdown()
        self._paged.clear()
        self._rows.clear()
        self._region.cleanup()

    def _submit(self, job_id: int, paged: GPULoadStoreSpec, rows: BlockIDsLoadStoreSpec, *, is_store: bool) -> bool:
        self._running[job_id] = self._thread.submit(self._copy, job_id, paged, rows, is_store)
        return True

    def _copy(
        self, job_id: int, paged: GPULoadStoreSpec, rows: BlockIDsLoadStoreSpec, is_store: bool
    ) -> TransferResult:
        started_s, size_bytes, block_at, row_at = time.perf_counter(), 0, 0, 0
        for group, (count, first) in enumerate(zip(paged.group_sizes, paged.block_indices, strict=True)):
            if not count:
                continue
            # The group's first and last row may be there in part: its blocks begin amid the first one.
            skip = first % self._blocks_per_chunk
            row_count = -(-(skip + count) // self._blocks_per_chunk)
            blocks = paged.block_ids[block_at : block_at + count].astype(np.int64)
            places = skip + np.arange(count, dtype=np.int64)
            row_ids = rows.block_ids[row_at : row_at + row_count].astype(np.int64)[places // self._blocks_per_chunk]
            size_bytes += self._copy_group(group, blocks, row_ids, places % self._blocks_per_chunk, is_store=is_store)
            block_at, row_at = block_at + count, row_at + row_count
        return TransferResult(job_id, True, size_bytes, time.perf_counter() - started_s)

    def _copy_group(
        self, group: int, blocks: Sequence[int], rows: Sequence[int], places: Sequence[int], *, is_store: bool
    ) -> int:
        total = 0
        for ref in self._refs[group]:
            paged, stored = self._paged[ref.tensor_idx], self._rows[ref.tensor_idx]
            page = stored.shape[1] // self._blocks_per_chunk
            near = paged.data_ptr() + np.asarray(blocks) * paged.stride(0)
            far = stored.data_ptr() + np.asarray(rows) * stored.stride(0) + np.asarray(places) * page
            if is_store and self._is_canonical:  # ranks with the same bytes take turns
                numbers = np.asarray(rows) * self._blocks_per_chunk + np.asarray(places)
                is_ours = numbers % ref.mapping.num_writers == ref.mapping.writer_index
                near, far = near[is_ours], far[is_ours]
            for near_at, far_at, size in self._fragments(ref):
                targets, sources = (far + far_at, near + near_at) if is_store else (near + near_at, far + far_at)
                for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
                    ctypes.memmove(target, source, size)
                total += len(targets) * size
        return total

    def _fragments(self, ref: CanonicalKVCacheRef) -> list[tuple[int, int, int]]:
        """Where each piece of a page lies in it, where in the row's cell, and its bytes."""
        if not self._is_canonical:
            return [(0, 0, ref.page_size_bytes)]
        return [
            (
                run.local_offset + at * run.local_stride,
                run.canonical_offset + at * run.canonical_stride,
                run.fragment_size,
            )
            for run in ref.mapping.runs
            for at in range(run.num_fragments)
        ]


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiers behind a worker that needs no GPU."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        worker = self._worker
        if worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            is_canonical = bool(self.config.canonical_layout)
            if is_canonical:
                self._validate_canonical_refs(kv_caches)
            worker = HostOffloadingWorker(kv_caches, self.blocks_per_chunk, region, is_canonical=is_canonical)
            self._worker = worker
        return worker
