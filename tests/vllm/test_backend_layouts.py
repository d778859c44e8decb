"""Every layout that vLLM's backends give a KV cache is copied byte for byte, and the layout is asked for where needed.

The caches are made by the backends' own code (``tests/kit/vllm/backend_layouts.py``); the reference goes page by page.
They are copied by the CPU's path and by the engine of accelerators, staged and by batched copies, whose device is a
stand-in here. No kernel has run on them: ROCm's and XPU's backends take the same path and were never run on a card.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm import envs

from tests.kit.vllm.backend_layouts import BLOCKS, CASES, Cache, Case, allocate, resolved, vllm_config
from tiered_kv.chunks.device_copy import CopyEngine
from tiered_kv.chunks.layout_test import self_test
from tiered_kv.chunks.transfer import RankKV
from tiered_kv.errors import UnsupportedModel
from tiered_kv.vllm.connector import TieredKVConnector
from tiered_kv.vllm.kv_groups import CacheGroups
from tiered_kv.vllm.kv_layout import rank_pages, required_layout
from tools.gpu_proof.devices import DryDevice

CHUNK_BLOCKS = 4
SLICE_BYTES = 24 << 10
"""Less than most of the layers' pages take here, so that a chunk goes several times round the ring."""

ENGINES = {
    "cpu": lambda: None,
    "staged": lambda: CopyEngine(DryDevice(), slice_bytes=SLICE_BYTES, ring_slices=2),
    "direct": lambda: CopyEngine(DryDevice(has_batch=True), slice_bytes=SLICE_BYTES, ring_slices=2, direct_bytes=1),
}
"""What copies: the CPU itself, or the engine of accelerators in either of its ways."""


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    chosen = CASES[request.param]
    monkeypatch.setattr(envs, "VLLM_KV_CACHE_LAYOUT", chosen.user_layout, raising=False)
    return chosen


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> CopyEngine | None:
    return ENGINES[request.param]()


def made(case: Case, engine: CopyEngine | None, device: str = "cuda"):
    config = vllm_config(case, device)
    layout = resolved(case, config)
    cache = allocate(case, config)
    block_tokens = max(group.kv_cache_spec.block_size for group in cache.config.kv_cache_groups)
    groups = CacheGroups.of(cache.config, CHUNK_BLOCKS * block_tokens)
    pages = rank_pages(cache.kv, cache.config, groups)
    return layout, cache, pages, RankKV(pages, cache.kv, [group.stored_blocks for group in groups], engine=engine)


def reference(cache: Cache, layers, ids) -> bytes:
    return b"".join(cache.raw[place].tobytes() for place in cache.pages(layers, ids))


def test_what_vllm_resolves_is_what_the_case_says(case: Case) -> None:
    assert resolved(case, vllm_config(case)).name == case.layout


def test_a_gathered_chunk_is_its_pages_one_behind_the_other(case: Case, engine: CopyEngine | None) -> None:
    _, cache, pages, rank = made(case, engine)
    ids = [[7, 2, 9, 4][: group.blocks_per_chunk] for group in rank.groups]
    slot = bytearray(rank.rank_bytes)

    job = rank.begin("save", rank.mark())
    rank.gather(ids, memoryview(slot), job)
    job.launch()
    job.wait()

    expected = b"".join(
        reference(cache, [page.layer for page in of_group], of_ids) for of_group, of_ids in zip(pages, ids, strict=True)
    )
    assert bytes(slot) == expected


@pytest.mark.parametrize("first", [0, 1])
def test_a_scattered_chunk_changes_its_pages_and_no_byte_beside_them(
    case: Case, engine: CopyEngine | None, first: int
) -> None:
    _, cache, pages, rank = made(case, engine)
    slot = np.random.default_rng(11).integers(0, 256, rank.rank_bytes, dtype=np.uint8)
    runs, expected, at = [], cache.raw.copy(), 0
    free = iter([8, 1, 10, 5, 0, 3, 6, 2])  # blocks of different groups are different blocks of one pool
    for of_group, group in zip(pages, rank.groups, strict=True):
        count = group.blocks_per_chunk
        skip = min(first, count - 1)
        ids = [next(free) for _ in range(skip, count)]
        runs.append((skip, ids))
        for layer in (page.layer for page in of_group):
            size = cache.places[layer][2]
            for number, block in enumerate(ids, skip):
                expected[cache.page(layer, block)] = slot[at + number * size : at + (number + 1) * size]
            at += count * size
    assert at == rank.rank_bytes

    job = rank.begin("load", rank.mark())
    rank.scatter(memoryview(slot), runs, job)
    job.launch()
    job.wait()

    assert np.array_equal(cache.raw, expected)


def test_the_layout_self_test_passes_and_leaves_every_byte(case: Case, engine: CopyEngine | None) -> None:
    _, cache, _, rank = made(case, engine)
    before = cache.raw.copy()
    for group in rank.groups:
        self_test(group)
    assert np.array_equal(cache.raw, before)


def test_the_cases_have_what_they_are_for() -> None:
    """A case that vLLM lays out like another one would show nothing."""
    seen = {}
    for name, case in CASES.items():
        config = vllm_config(case)
        config.cache_config.kv_cache_layout = case.layout
        cache = allocate(case, config)
        seen[name] = {tuple(place) for place in cache.places.values()}, cache
        assert all(stride >= size and BLOCKS * stride <= cache.raw.size for _, stride, size in cache.places.values())
    sizes = {name: {size for _, _, size in places} for name, (places, _) in seen.items()}
    assert sizes["FlashMLA, fp8_ds_mla"] == {64 * 656}
    assert sizes["DeepSeek V3.2: an indexer's page behind each latent"] == {64 * 656, 64 * 132}
    assert sizes["Triton, fp8 per token and head"] == {16 * 2 * (2 * 16 + 8)}
    padded = "DeepSeek V4: padded indexer pages inside each block"
    assert sizes[padded] == {64 * 656, 64 * 132} and 64 * 132 % 576 != 0
    kernel = seen["kernel blocks of 16 in blocks of 64"][1].kv
    assert {tensor.shape[0] for tensor in kernel.values()} == {4 * BLOCKS}


def config(**changes):
    fields = {
        "device_config": SimpleNamespace(device_type="cuda"),
        "model_config": SimpleNamespace(use_mla=False),
        "attention_config": SimpleNamespace(hisparse_config=None),
    }
    return SimpleNamespace(**fields | changes)


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_an_accelerator_is_asked_for_the_layout_of_vllms_own_connectors(device: str) -> None:
    """ROCm calls itself cuda, as torch does."""
    asked = config(device_config=SimpleNamespace(device_type=device))
    assert TieredKVConnector.get_required_kvcache_layout(asked) == required_layout(asked) == "LBHNC"


@pytest.mark.parametrize(
    "changes",
    [
        {"device_config": SimpleNamespace(device_type="cpu")},
        {"model_config": SimpleNamespace(use_mla=True)},
        {"model_config": None},
        {"attention_config": SimpleNamespace(hisparse_config=object())},
    ],
)
def test_nothing_is_asked_for_where_nothing_would_come_of_it(changes) -> None:
    assert required_layout(config(**changes)) is None


def test_a_vllm_without_the_names_that_are_read_is_asked_for_nothing() -> None:
    assert required_layout(SimpleNamespace()) is None


def test_rocms_own_choice_would_be_refused() -> None:
    """What asking is for."""
    case = CASES["ROCm"]
    unasked = vllm_config(case, device="cpu")
    assert resolved(case, unasked).name == "LHBNC"
    cache = allocate(case, unasked)
    with pytest.raises(UnsupportedModel, match="not one dense run"):
        rank_pages(cache.kv, cache.config, CacheGroups.of(cache.config, 64))


def test_the_cpu_backend_has_one_layout_asked_for_or_not() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert [layout.name for layout in CPUAttentionBackend.supported_kv_cache_layouts()] == ["LBHNC"]
