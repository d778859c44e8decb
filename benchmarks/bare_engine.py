"""vLLM without a model, for benchmarks: its configuration, requests and block pool, and both roles of the connector.

What vLLM's engine core would call is called here in its order; nothing is computed. The cache server is a real process
of its own, and scheduler and worker share this one, as they do in vLLM on one device.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY)]

from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.block_pool import BlockPool  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

from tests.kit.server.probe import server_pid  # noqa: E402
from tests.kit.vllm.engine_identities import LAYER, engine_config  # noqa: E402
from tiered_kv.vllm.connector import TieredKVConnector  # noqa: E402

LAYOUTS = {"LBNHC": (0, 1, 3, 2, 4), "LBHNC": (0, 1, 2, 3, 4)}
"""Axes [layer, block, head, token, content] as they lie in memory: FlashAttention's layout, and the CPU backend's."""


class BareEngine:
    """One engine of one rank behind the cache.

    Attributes:
        scheduler: The connector's scheduler role; there is one once :meth:`open` was called.
        kv: The paged KV as it lies in memory, five axes in the order of the layout.
    """

    def __init__(self, root: Path, settings: dict[str, Any], shape: tuple[int, int, int, int]) -> None:
        """``shape``: layers, KV heads, head size and tokens of a block. ``settings`` are the cache's."""
        self.root = root
        self.layers, self.heads, self.head_size, self.block_tokens = shape
        self._names = [LAYER.replace("0", str(number)) for number in range(self.layers)]
        given = {"storage_uri": f"file://{root}", "model_id": "benchmark", "strict": True} | settings
        transfer = KVTransferConfig(
            kv_connector="TieredKVConnector",
            kv_connector_module_path="tiered_kv.vllm",
            kv_role="kv_both",
            kv_connector_extra_config=given,
        )
        folder = root.parent / f"{root.name}-model"
        more = {"max_model_len": 1 << 18, "block_size": self.block_tokens, "kv_transfer_config": transfer}
        self._config = engine_config(folder, hf_overrides={"max_position_embeddings": 1 << 18}, **more)
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(self.block_tokens, hash_function)
        self.scheduler: Any = None
        self.worker: Any = None
        self._spec: Any = None

    def open(self, blocks: int, layout: str = "LBNHC") -> None:
        """Make the paged KV and start both roles, the worker first."""
        fields = {"num_kv_heads": self.heads, "head_size": self.head_size, "dtype": torch.bfloat16}
        group = KVCacheGroupSpec(self._names, FullAttentionSpec(block_size=self.block_tokens, **fields))
        self._spec = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group], kv_cache_layout=layout
        )
        order = LAYOUTS[layout]
        extents = (self.layers, blocks, self.heads, self.block_tokens, 2 * self.head_size)
        size = 2 * self.layers * blocks * self.heads * self.block_tokens * 2 * self.head_size
        raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        self.kv = raw.view(torch.bfloat16).view([extents[axis] for axis in order])
        logical = self.kv.permute([order.index(axis) for axis in range(5)])
        self.worker = TieredKVConnector(self._config, KVConnectorRole.WORKER, self._spec)
        self.worker.register_kv_caches({name: logical[number] for number, name in enumerate(self._names)})
        self.open_scheduler()

    def open_scheduler(self) -> None:
        """Start the scheduler role; its workers are there."""
        self.scheduler = TieredKVConnector(self._config, KVConnectorRole.SCHEDULER, self._spec)
        self.pool = BlockPool(self._spec.num_blocks, enable_caching=True, hash_block_size=self.block_tokens)
        self.scheduler.bind_gpu_block_pool(self.pool)

    @property
    def client(self) -> Any:
        """The scheduler's session with the server."""
        return self.scheduler._scheduler.side._client

    @property
    def server_pid(self) -> int:
        return server_pid(self.root)

    # -- what vLLM does ----------------------------------------------------------------------------------------

    def request(self, name: str, tokens: list[int]) -> Request:
        """A request that was just received; its block hashes are vLLM's own work."""
        return Request(name, tokens, SamplingParams(max_tokens=1), None, block_hasher=self._hasher)

    def step(self, scheduled: dict[str, int], tables: Mapping[str, Sequence[int]]) -> int:
        """One step in which these requests compute so many tokens: returns how many jobs the worker was given."""
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            preempted_req_ids=None,
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (tables[name],)),
        )
        metadata = self.scheduler.build_connector_meta(output)
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        self.worker.clear_connector_metadata()
        return len(metadata.loads) + len(metadata.saves)

    def take_results(self) -> None:
        """The worker's copies have ended: tell the scheduler, as vLLM does after a step."""
        self.worker._worker.finish_copies()
        results = self.worker.get_transfer_results(set())
        output = KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.scheduler.update_connector_output(output)
        self.scheduler.get_kv_connector_stats()

    def allocate(self, request: Request, block_ids: Sequence[int], tokens: int) -> None:
        """vLLM has given the request blocks, and loads so many tokens into them."""
        blocks = SimpleNamespace(get_block_ids=lambda: (list(block_ids),))
        self.scheduler.update_state_after_alloc(request, blocks, tokens)

    def finish(self, request: Request) -> None:
        self.scheduler.request_finished_all_groups(request, ([],))

    def close(self) -> None:
        """End both roles and the server."""
        pid = self.server_pid
        for role in (self.scheduler, self.worker):
            if role is not None:
                role.shutdown()
        os.kill(pid, signal.SIGKILL)
