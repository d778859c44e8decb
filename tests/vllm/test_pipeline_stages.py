"""Two pipeline stages with different layers: one blob holds both, and each stage loads its own.

Here are vLLM's configuration and KV cache layout for uneven stages, our connector in both roles and a real server, but
no model: KV is numbers that name layer and block. Two even stages of a real engine are in tests/e2e/test_ranks.py.
"""

from collections.abc import Iterator
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.utils import allocate_kv_cache

from tests.kit.server.probe import figures, wait_for, wait_written
from tests.kit.server.processes import end_server
from tests.kit.vllm.cached_engine import settings
from tests.kit.vllm.starting import models_are_inspected_here
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.vllm.step import BlockRun, ChunkCopy, LoadJob, SaveJob, StepMetadata

pytestmark = pytest.mark.vllm

BLOCK, CHUNK, BLOCKS = 32, 64, 16
STAGES = {0: {0: 2, 1: 2, 2: 2}, 1: {3: 4, 4: 2}}
"""Stage -> layer -> KV heads: the stages differ in layers and in bytes."""


def layer_name(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn"


def pipeline_config(folder: Path, root: Path) -> Any:
    LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, architectures=["LlamaForCausalLM"], dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip
    transfer = KVTransferConfig(
        kv_connector="TieredKVConnector",
        kv_role="kv_both",
        kv_connector_extra_config=settings(root, chunk_tokens=CHUNK, host_bytes="64MiB"),
    )
    with models_are_inspected_here():
        config = EngineArgs(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=256, block_size=BLOCK,
            num_gpu_blocks_override=BLOCKS, pipeline_parallel_size=2, distributed_executor_backend="mp",
            kv_transfer_config=transfer,
        ).create_engine_config()  # fmt: skip
    config.cache_config.kv_cache_layout = "LBHNC"
    layer = SimpleNamespace(get_attn_backend=lambda: CPUAttentionBackend)
    for number in range(5):
        config.compilation_config.static_forward_context[layer_name(number)] = layer
    return config


class Stage:
    """One stage's worker: its layers' paged KV and its connector."""

    def __init__(self, config: Any, rank: int, kv_cache_config: Any) -> None:
        config = copy(config)
        config.parallel_config = copy(config.parallel_config)
        config.parallel_config.rank = rank
        self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_cache_config)
        layout = config.cache_config.get_resolved_kv_cache_layout()
        self.layers = allocate_kv_cache(kv_cache_config, torch.device("cpu"), layout)
        self.connector.register_kv_caches(self.layers)

    def fill(self) -> None:
        """Give every block of every layer a content of its own."""
        for name, layer in self.layers.items():
            for block in range(layer.shape[0]):
                layer[block] = int(name.split(".")[2]) * 32 + block

    def step(self, step: StepMetadata) -> Any:
        """One step without a forward pass: what vLLM calls, in its order."""
        self.connector.bind_connector_metadata(step)
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        results = self.connector.get_transfer_results(set())
        report = self.connector.build_connector_worker_meta()
        self.connector.clear_connector_metadata()
        return results, report


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "cache"
    end_server(tmp_path / "cache")


@pytest.fixture
def engine(tmp_path: Path, root: Path) -> Iterator[tuple[list[Stage], Any]]:
    """Both stages, and the scheduler's session."""
    config = pipeline_config(tmp_path / "model", root)
    specs = [
        {
            layer_name(number): FullAttentionSpec(
                block_size=BLOCK, num_kv_heads=heads, head_size=8, dtype=torch.bfloat16
            )
            for number, heads in layers.items()
        }
        for layers in STAGES.values()
    ]
    per_rank = get_kv_cache_configs(config, specs, [1 << 24] * 2)
    for kv_cache_config in per_rank:
        kv_cache_config.kv_cache_layout = "LBHNC"
    stages = [Stage(config, rank, kv_cache_config) for rank, kv_cache_config in enumerate(per_rank)]
    scheduler_config = generate_scheduler_kv_cache_config(per_rank)
    scheduler = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, scheduler_config)
    yield stages, scheduler._scheduler.side._client
    scheduler.shutdown()
    for stage in stages:
        stage.connector.shutdown()


def chunk_copy(slot: int, blocks: tuple[int, int]) -> ChunkCopy:
    return ChunkCopy(slot, (BlockRun(0, blocks),))


def run_until(stages: list[Stage], step: StepMetadata, is_done: Any) -> list[Any]:
    """Do a step's work on all stages, and empty steps until each has reported."""
    said = [[stage.step(step)] for stage in stages]
    empty = StepMetadata(step.generation, step.session)
    for stage, results in zip(stages, said, strict=True):
        wait_for(lambda stage=stage, results=results: results.append(stage.step(empty)) or is_done(results), "a report")
    return said


def test_each_stage_saves_and_loads_its_own_layers_of_one_blob(engine: tuple[list[Stage], Any], root: Path) -> None:
    stages, client = engine
    for stage in stages:
        stage.fill()
    computed = [{name: layer.clone() for name, layer in stage.layers.items()} for stage in stages]
    keys = PrefixKeys(client.namespace, CHUNK)
    keys.extend(range(2 * CHUNK))
    client.wake()
    wait_for(lambda: client.poll() or client.credit_count >= 2, "slots")
    slots = [client.take_slot() for _ in range(2)]

    copies = (chunk_copy(slots[0], (5, 2)), chunk_copy(slots[1], (9, 3)))
    save = StepMetadata(client.generation, client.info, (), (SaveJob(1, client.generation, copies),))
    reports = run_until(stages, save, lambda said: any(report is not None for _, report in said))
    for said in reports:
        (report,) = [report for _, report in said if report is not None]
        assert report.ranks_done == {1: 1} and not report.failed
    records = [ChunkRecord(client.namespace.digest, keys.keys[i], keys.parent(i), i, keys.digests[i]) for i in range(2)]
    client.commit(list(zip(slots, records, strict=True)))
    wait_written(root)

    for stage in stages:
        for layer in stage.layers.values():
            layer.zero_()
    lookup = client.lookup(keys.keys, keys.digests)
    wait_for(lambda: client.poll() or client.lookups[lookup].ready == 2, "both chunks")
    found = client.lookups[lookup].slots
    copies = (chunk_copy(found[0], (1, 4)), chunk_copy(found[1], (7, 6)))
    load = StepMetadata(client.generation, client.info, (LoadJob("r", client.generation, copies),), ())
    for said in run_until(stages, load, lambda said: any(results.finished_recving for results, _ in said)):
        assert [results.failed_recving for results, _ in said if results.finished_recving] == [set()]
    client.release(lookup)

    for stage, before in zip(stages, computed, strict=True):
        for name, layer in stage.layers.items():
            for source, target in {5: 1, 2: 4, 9: 7, 3: 6}.items():
                assert torch.equal(layer[target], before[name][source]), (name, source)
            assert not layer[[0, 2, 3, 5, 8, 9]].any(), "blocks that nobody asked for stay as they are"
    (session,) = figures(root)["sessions"]
    assert session["workers"] == 2
    with safe_open(next(root.glob("blobs/*/*/*.safetensors")), framework="pt") as content:
        names = {name for name in content.keys() if name != "_pad"}  # noqa: SIM118 - not a mapping
    assert names == {f"rank{rank}/{layer_name(number)}" for rank, layers in STAGES.items() for number in layers}
