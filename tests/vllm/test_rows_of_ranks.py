"""Rows of engines of other tensor parallelism: canonical ones are the same bytes, direct ones are not.

One model's KV is laid out as ranks of vLLM have it, registered with vLLM's own worker side, and copied into rows and
back as vLLM's mappings say (``tests/kit/vllm/host_offloading.py``).
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from tests.kit.vllm.host_offloading import HostOffloadingWorker
from tiered_kv.vllm.compat import canonical_pages
from tiered_kv.vllm.offloading import has_rows_for_any_ranks
from tiered_kv.vllm.row_groups import RowGroup, row_groups

pytestmark = pytest.mark.vllm

BLOCKS, TOKENS, HEADS, HEAD_SIZE, LAYERS = 8, 4, 2, 8, 2
KV = torch.randn(LAYERS, BLOCKS, HEADS, TOKENS, 2 * HEAD_SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()
"""Of the whole model: of each layer and block, all heads."""

LATENT = KV[:, :, :1, :, :HEAD_SIZE].contiguous().squeeze(2)
PAGE_BYTES = 4096
ROWS = (1, 3)


def specs(kind: str, ranks: int) -> list[Any]:
    """The spec of each group of layers on one of so many ranks."""
    if kind == "mla":
        return [MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=HEAD_SIZE, dtype=torch.bfloat16)]
    heads = max(1, HEADS // ranks)
    sizes = {"block_size": TOKENS, "num_kv_heads": heads, "head_size": HEAD_SIZE, "dtype": torch.bfloat16}
    full = FullAttentionSpec(**sizes)
    return [full, SlidingWindowSpec(**sizes, sliding_window=8)] if kind == "windows" else [full]


class Ranks:
    """The ranks of one engine, and their rows; block ``n`` of each layer has the model's KV of block ``n``."""

    def __init__(self, kind: str, ranks: int, *, is_canonical: bool, blocks_per_row: int) -> None:
        self._kind, self._per_row, self._is_canonical = kind, blocks_per_row, is_canonical
        self._specs = specs(kind, ranks)
        page = self._specs[0].page_size_bytes
        layers = [[f"{group}.{layer}" for layer in range(LAYERS)] for group in range(len(self._specs))]
        tensors = [KVCacheTensor(LAYERS * BLOCKS * page, names, BLOCKS * page, page) for names in layers]
        groups = [KVCacheGroupSpec(names, spec) for names, spec in zip(layers, self._specs, strict=True)]
        self.kv_cache_config = KVCacheConfig(BLOCKS, tensors, groups)
        self.offloading = SimpleNamespace(
            groups=[SimpleNamespace(group_id=n, tokens_per_block=TOKENS) for n in range(len(groups))],
            cache=SimpleNamespace(blocks_per_chunk=blocks_per_row), parallel=SimpleNamespace(world_size=ranks),
            replicated_layout=False, worker_kv_bytes_per_block=LAYERS * page,
        )  # fmt: skip
        part = LAYERS * page * blocks_per_row
        self._name, row = f"test_{uuid4().hex}", -(-part * ranks // PAGE_BYTES) * PAGE_BYTES
        self.regions = [SharedOffloadRegion(self._name, 4, rank, row, part) for rank in range(ranks)]
        self.rows = self.regions[0].create_kv_memoryview()
        self.caches = [self._caches(rank, ranks) for rank in range(ranks)]
        self._workers = [self._register(rank, ranks) for rank in range(ranks)]
        pages = canonical_pages(self._config(0, ranks), self.kv_cache_config, self.caches[0]) if is_canonical else None
        self.groups: tuple[RowGroup, ...] = row_groups(self.offloading, self.kv_cache_config, pages)

    def _caches(self, rank: int, ranks: int) -> dict[str, torch.Tensor]:
        """Groups lie over each other on the GPU."""
        if self._kind == "mla":
            own = LATENT.clone()
        else:
            heads = max(1, HEADS // ranks)
            first = rank * HEADS // ranks
            own = KV[:, :, first : first + heads].clone()
        return {
            name: own[at] for group in self.kv_cache_config.kv_cache_groups for at, name in enumerate(group.layer_names)
        }

    @staticmethod
    def _config(rank: int, ranks: int) -> Any:
        parallel = SimpleNamespace(
            tensor_parallel_size=ranks, prefill_context_parallel_size=1, decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1, world_size=ranks, rank=rank,
        )  # fmt: skip
        return SimpleNamespace(
            parallel_config=parallel, model_config=SimpleNamespace(get_total_num_kv_heads=lambda: HEADS)
        )

    def _register(self, rank: int, ranks: int) -> HostOffloadingWorker:
        made: list[HostOffloadingWorker] = []

        def get_worker(kv_caches: Any) -> HostOffloadingWorker:
            made.append(
                HostOffloadingWorker(kv_caches, self._per_row, self.regions[rank], is_canonical=self._is_canonical)
            )
            return made[0]

        config = SimpleNamespace(canonical_layout=self._is_canonical, parallel=SimpleNamespace(rank=rank))
        spec = SimpleNamespace(replicated_layout=False, config=config, get_worker=get_worker)
        side = OffloadingConnectorWorker(spec, self._config(rank, ranks), self.kv_cache_config)
        side.register_kv_caches(self.caches[rank])
        return made[0]

    def copy(self, group: int, *, is_store: bool) -> None:
        """Between blocks 0, 1, ... of a group and ``ROWS``, on each rank."""
        count = len(ROWS) * self._per_row
        sizes = [count if n == group else 0 for n in range(len(self._specs))]
        blocks = GPULoadStoreSpec(list(range(count)), sizes, [0] * len(sizes))
        for worker in self._workers:
            (worker.submit_store if is_store else worker.submit_load)(1, *(
                (blocks, CPULoadStoreSpec(list(ROWS))) if is_store else (CPULoadStoreSpec(list(ROWS)), blocks)
            ))  # fmt: skip
            worker.wait({1})
            assert [one.success for one in worker.get_finished()] == [True]

    def stored(self, group: int) -> list[bytes]:
        """What our tier stores of the rows."""
        rows = np.frombuffer(self.rows.cast("B"), np.uint8).reshape(4, -1)
        spans = self.groups[group].spans or ((0, rows.shape[1]),)
        return [b"".join(rows[row, at : at + size].tobytes() for at, size in spans) for row in ROWS]

    def fill(self, group: int, stored: list[bytes]) -> None:
        """Load rows that another engine stored; what else is in them is old."""
        rows = np.frombuffer(self.rows.cast("B"), np.uint8).reshape(4, -1)
        rows[:] = 0xA7
        for row, content in zip(ROWS, stored, strict=True):
            at = 0
            for start, size in self.groups[group].spans:
                rows[row, start : start + size] = np.frombuffer(content[at : at + size], np.uint8)
                at += size
            assert at == len(content), "rows of another size"

    def close(self) -> None:
        self.rows.release()
        for worker in self._workers:
            worker.shutdown()


@pytest.fixture
def made() -> Iterator[list[Ranks]]:
    engines: list[Ranks] = []
    yield engines
    for one in engines:
        one.close()


@pytest.mark.parametrize(("kind", "blocks_per_row"), [("full", 1), ("full", 2), ("mla", 2), ("windows", 1)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_canonical_rows_of_other_ranks_are_the_same_and_fit(
    kind: str, blocks_per_row: int, ranks: int, made: list[Ranks]
) -> None:
    """Four ranks have two heads twice, and MLA's latent four times: each is in a row once."""
    made += [Ranks(kind, n, is_canonical=True, blocks_per_row=blocks_per_row) for n in (1, ranks)]
    one, several = made
    assert one.groups == several.groups
    for group in range(len(one.groups)):
        for engine in made:
            engine.copy(group, is_store=True)
        stored = one.stored(group)
        assert stored == several.stored(group) and len(set(stored)) == len(ROWS)

        for cache in several.caches:
            expected = {name: tensor.clone() for name, tensor in cache.items()}
            for tensor in cache.values():
                tensor[: len(ROWS) * blocks_per_row] = 0
            cache["expected"] = expected  # type: ignore[assignment]
        several.fill(group, stored)
        several.copy(group, is_store=False)
        for cache in several.caches:
            expected = cache.pop("expected")  # type: ignore[assignment]
            assert all(torch.equal(cache[name], tensor) for name, tensor in expected.items())


def test_direct_rows_of_other_ranks_are_not_the_same_although_vllm_says_so(made: list[Ranks]) -> None:
    """In a row of two ranks a layer's heads lie apart, behind the other layer's of the first rank."""
    made += [Ranks("full", n, is_canonical=False, blocks_per_row=1) for n in (1, 2)]
    for engine in made:
        engine.copy(0, is_store=True)
    one, two = (engine.stored(0) for engine in made)
    assert [len(row) for row in one] == [len(row) for row in two]
    assert all(a != b and sorted(a) == sorted(b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("canonical", "agnostic", "replicated", "answer"),
    [(True, True, False, True), (True, False, False, False), (False, True, False, False), (False, False, True, True)],
)
def test_who_shares_with_other_ranks(canonical: bool, agnostic: bool, replicated: bool, answer: bool) -> None:
    parallel = SimpleNamespace(is_parallelism_agnostic=agnostic)
    offloading = SimpleNamespace(canonical_layout=canonical, replicated_layout=replicated, parallel=parallel)
    assert has_rows_for_any_ranks(offloading) is answer
