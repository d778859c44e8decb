"""vLLM's engine core with simulated workers: its real schedulers, its real aggregation, its order of calls.

Owns how a configuration is built without a model, and the two loops of ``v1/engine/core.py``: ``step`` (schedule, run,
update) and ``step_with_batch_queue`` (async scheduling: the next step is scheduled before the last one is known, and a
rank runs what it was sent when it gets to it). Everything that crosses a process boundary in vLLM is copied.
"""

import json
import random
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from transformers import LlamaConfig
from vllm import envs
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.kit.vllm.starting import models_are_inspected_here
from tests.sim.vllm import families
from tests.sim.vllm.accounts import StoreAccounts
from tests.sim.vllm.families import BLOCK_TOKENS, LARGE_BLOCK_TOKENS
from tests.sim.vllm.model import Model, Reference
from tests.sim.vllm.runner import Findings, SimulatedWorker
from tiered_kv.vllm.plugin import register

try:  # from 0.33 on
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    get_global_kv_cache_groups = None

MAX_MODEL_LEN = 160


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How an engine is run.

    Attributes:
        windows: One entry per layer: its sliding window in tokens, None for full attention.
        family: Layers of other kinds instead, by name (``families.py``).
        is_hybrid: Layers with windows get KV cache groups of their own.
        is_replicated: All ranks hold the same KV, as with MLA or more ranks than KV heads.
        match_unit: Of vLLM's prefix cache, in tokens; None: a block.
        drafted_len: Longest sequence that a draft takes, of families with a draft.
        retention: vLLM's ``prefix_cache_retention_interval``, which says what states it keeps.
        block_hash: vLLM's ``--prefix-caching-hash-algo``.
        late: Chance that a rank has not begun a step when the next one is scheduled (async scheduling only).
        offloading: vLLM's own offloading instead of our connector: its ``kv_connector_extra_config``.
    """

    is_v2: bool = False
    is_async: bool = False
    ranks: int = 1
    windows: tuple[int | None, ...] = (None, None)
    family: str = ""
    is_hybrid: bool = False
    is_replicated: bool = False
    layout: str = "LBHNC"
    pool_blocks: int = 64
    token_budget: int = 64
    requests_max: int = 8
    draft_tokens: int = 0
    policy: str = "fcfs"
    has_prefix_caching: bool = True
    match_unit: int | None = None
    drafted_len: int = MAX_MODEL_LEN
    retention: int | None = 0
    block_hash: str = "sha256"
    late: float = 0.5
    connector: Mapping[str, Any] = field(default_factory=dict)
    offloading: Mapping[str, Any] | None = None

    @property
    def kinds(self) -> tuple[families.Kind, ...]:
        """The layers by their specs."""
        if self.family:
            return tuple(self._with_drafts(kind) for kind in families.FAMILIES[self.family])
        changes = {"max_tp_shards": 1 if self.is_replicated else None}
        return tuple(families.windowed(w, **changes) if w else families.full(**changes) for w in self.windows)

    def _with_drafts(self, kind: families.Kind) -> families.Kind:
        """A recurrent layer has a block more for the state behind each token that is guessed."""
        spec: Any = kind.spec
        if not isinstance(spec, MambaSpec):
            return kind
        return replace(kind, spec=replace(spec, num_speculative_blocks=self.draft_tokens))

    @property
    def block_tokens(self) -> int:
        """What ``--block-size`` would be."""
        return LARGE_BLOCK_TOKENS if self.family in families.LARGE_BLOCKS else BLOCK_TOKENS

    @property
    def pool_blocks_min(self) -> int:
        """Blocks for one request of the longest kind, as vLLM counts them, and the null block."""
        if self.family:
            return self._family_blocks_min
        whole = -(-MAX_MODEL_LEN // BLOCK_TOKENS)
        if not self.is_hybrid:
            return whole + 1
        in_flight = (self.token_budget + self.draft_tokens * self.requests_max) * (2 if self.is_async else 1)
        layers = min(self.windows.count(None), len(self.windows) - self.windows.count(None))  # of one group
        blocks = [
            -(-min((w or MAX_MODEL_LEN) - 1 + in_flight, MAX_MODEL_LEN) // BLOCK_TOKENS) + 1 for w in self.windows
        ]
        return sum(blocks) // layers + 1

    @property
    def _family_blocks_min(self) -> int:
        """The same for a family: vLLM makes a group of each kind of layer, or of each layer where pages are equal."""
        in_flight = (self.token_budget + self.draft_tokens * self.requests_max) * (2 if self.is_async else 1)
        specs: dict[Any, int] = {}
        for number, kind in enumerate(self.kinds):
            spec: Any = kind.spec
            if isinstance(spec, MambaSpec):
                specs[MambaSpec, spec.block_size, number] = (
                    3 + self.draft_tokens
                )  # what it goes on from, what it computes, a copy
                continue
            whole = -(-MAX_MODEL_LEN // spec.block_size)
            if hasattr(spec, "max_admission_blocks_per_request"):
                whole = spec.max_admission_blocks_per_request(in_flight, MAX_MODEL_LEN)
            place = getattr(spec, "sliding_window", 0) if self.block_tokens == LARGE_BLOCK_TOKENS else number
            specs[type(spec), spec.block_size, place] = whole
        return sum(specs.values()) + 1


@dataclass
class _Answer:
    """A request as its client sees it.

    Attributes:
        tokens: Its prompt and the answer so far.
        given: Tokens that were answered, over all turns of a session.
    """

    tokens: list[int]
    reference: Reference
    given: int = 0
    finish_reason: Any = None


@dataclass
class _Step:
    """A step that was sent to the workers and what they have answered so far."""

    output: Any
    results: list[Any]


class SimulatedEngine:
    """An engine core and its workers."""

    def __init__(self, setup: Setup, seed: int = 0, weights: int = 1) -> None:
        self.setup = setup
        self.findings = Findings()
        self.answers: dict[str, _Answer] = {}
        self.preemptions = 0
        self._random = random.Random(seed)
        self.model = Model([kind.layer(number) for number, kind in enumerate(setup.kinds)], weights)
        self.config = _config(setup)
        with _runner(is_v2=setup.is_v2):
            per_rank = self._kv_cache_configs()
            for config in per_rank:
                config.kv_cache_layout = setup.layout
            kv_cache_config = generate_scheduler_kv_cache_config(per_rank)
            self.config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
            block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, self.config)
            for config in (kv_cache_config, *per_rank):
                config.hash_block_size = hash_block_size
            # As in vLLM: workers register their KV caches before the scheduler exists.
            self.workers = [
                SimulatedWorker(self.config, rank, per_rank[rank], self.model, self.findings)
                for rank in range(setup.ranks)
            ]
            self.scheduler = self.config.scheduler_config.get_scheduler_cls()(
                vllm_config=self.config,
                kv_cache_config=kv_cache_config,
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=block_size,
                hash_block_size=hash_block_size,
                log_stats=True,
            )
            self._queue_max = self.config.max_concurrent_batches
        self.groups = len(kv_cache_config.kv_cache_groups)
        self.connector = self.scheduler.connector
        if setup.offloading is None:
            self.accounts = StoreAccounts(self.scheduler)
        else:  # vLLM's engine core asks its workers, and tells its scheduler
            said = {(0, rank): worker.connector.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
            self.connector.set_xfer_handshake_metadata_pp_aware(said)
        self._aggregator = KVOutputAggregator.from_connector(self.connector, setup.ranks)
        hash_function = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(hash_block_size, hash_function)
        self._queue: deque[_Step] = deque()
        self._inboxes: list[deque[_Step]] = [deque() for _ in self.workers]

    def _kv_cache_configs(self) -> list[Any]:
        specs = {layer.name: kind.spec for layer, kind in zip(self.model.layers, self.setup.kinds, strict=True)}
        ranks, layers = self.setup.ranks, [dict(specs) for _ in range(self.setup.ranks)]
        groups = [get_global_kv_cache_groups(self.config, layers)] if get_global_kv_cache_groups else []
        configs: list[Any] = get_kv_cache_configs(self.config, layers, [1 << 30] * ranks, *groups)
        return configs

    @property
    def row_tier(self) -> Any:
        """Our tier below vLLM's own offloading."""
        (tier,) = self.connector.scheduler.manager.secondary_tiers
        return tier

    # -- requests ----------------------------------------------------------------------------------------------

    def add(self, request_id: str, prompt: list[int], parameters: Any, **more: Any) -> None:
        """A client sends a request, or more input to a session (``resumable``) of that id; the last one ends it."""
        request = Request(request_id, list(prompt), parameters, None, block_hasher=self._hasher, **more)
        self.scheduler.add_request(request)
        if request_id in self.answers:
            self._session_went_on(request_id)
        else:
            self.answers[request_id] = _Answer(list(prompt), Reference(self.model))

    def abort(self, request_id: str) -> None:
        """A client goes away."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def unfinished(self) -> list[str]:
        """Requests that vLLM still answers."""
        return [id_ for id_, request in self.scheduler.requests.items() if not request.is_finished()]

    # -- the loop ----------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether vLLM's busy loop would go on."""
        return bool(self.scheduler.has_requests() or self._queue)

    def step(self) -> bool:
        """One turn of the busy loop; returns whether any token was scheduled in it."""
        if self._queue_max > 1:
            return self._step_with_queue()
        if not self.scheduler.has_requests():
            return False
        step = self._schedule()
        self._update(step)
        if self.setup.draft_tokens and step.output.total_num_scheduled_tokens:
            self.scheduler.update_draft_token_ids(self.workers[0].draft_tokens())
        return bool(step.output.total_num_scheduled_tokens)

    def _step_with_queue(self) -> bool:
        is_model_run = False
        if self.scheduler.has_requests():
            step = self._schedule()
            self._queue.appendleft(step)
            is_model_run = bool(step.output.total_num_scheduled_tokens)
            if len(self._queue) < self._queue_max and (is_model_run or self.scheduler.has_requests()):
                return is_model_run
        if self._queue:
            self._update(self._queue.pop())
        return is_model_run

    def _schedule(self) -> _Step:
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        step = _Step(output, [None] * len(self.workers))
        for inbox in self._inboxes:
            inbox.append(step)
        for rank in self._random.sample(range(len(self.workers)), len(self.workers)):
            if self._queue_max == 1 or self._random.random() > self.setup.late:
                self._run_until(step, rank)
        return step

    def _run_until(self, step: _Step, rank: int) -> None:
        """Let a rank do what it was sent, up to and including this step."""
        while step.results[rank] is None:
            sent = self._inboxes[rank].popleft()
            sent.results[rank] = deepcopy(self.workers[rank].execute(deepcopy(sent.output)))

    def _update(self, step: _Step) -> None:
        for rank in range(len(self.workers)):
            self._run_until(step, rank)
        sampled = [result.sampled_token_ids for result in step.results]
        if any(other != sampled[0] for other in sampled):
            self.findings.add(f"ranks sampled different tokens: {sampled}")
        result = self._aggregator.aggregate(step.results)
        for outputs in self.scheduler.update_from_output(step.output, result).values():
            for output in outputs.outputs:
                self._answered(output)

    def _answered(self, output: Any) -> None:
        answer = self.answers[output.request_id]
        for token in output.new_token_ids:
            expected = answer.reference.of(answer.tokens).next_token(len(answer.tokens) - 1)
            if token != expected:
                self.findings.wrong_answers += 1
                self.findings.add(f"{output.request_id} says {token} instead of {expected} at {len(answer.tokens)}")
            answer.tokens.append(token)
            answer.given += 1
        if output.finish_reason is not None:
            answer.finish_reason = output.finish_reason
            self._session_went_on(output.request_id)

    def _session_went_on(self, request_id: str) -> None:
        """vLLM drops what was sampled last in a session's turn when the next turn begins."""
        if request := self.scheduler.requests.get(request_id):
            self.answers[request_id].tokens = list(request.all_token_ids)

    def finish_steps(self) -> None:
        """Take in the results of all steps that were sent."""
        while self._queue:
            self._update(self._queue.pop())

    def replace_weights(self) -> None:
        """What a weight update does: an idle engine gets other weights, and everything computed before is dropped."""
        self.finish_steps()
        self.model.weights += 1
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    def close(self) -> None:
        """End the connectors."""
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.connector.shutdown()


@contextmanager
def _runner(*, is_v2: bool) -> Iterator[None]:
    """vLLM asks its environment which model runner it uses; its own check of the configuration, done before, finds no
    Triton on a CPU and refuses V2.
    """
    with mock.patch.object(envs, "VLLM_USE_V2_MODEL_RUNNER", is_v2, create=True):
        yield


@cache
def _model_folder() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="tiered_kv_simulator")
    LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=1024, architectures=["LlamaForCausalLM"], dtype="bfloat16",
    ).save_pretrained(folder.name)  # fmt: skip
    return folder


@cache
def _eagle_folder() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="tiered_kv_simulator")
    config = json.loads((Path(_model_folder().name) / "config.json").read_text())
    (Path(folder.name) / "config.json").write_text(json.dumps(config | {"architectures": ["EagleLlamaForCausalLM"]}))
    return folder


@cache
def _mtp_folder() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="tiered_kv_simulator")
    config = json.loads((Path(_model_folder().name) / "config.json").read_text())
    config |= {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (Path(folder.name) / "config.json").write_text(json.dumps(config))
    return folder


def _transfer(setup: Setup) -> KVTransferConfig:
    if setup.offloading is not None:
        register()
        settings = json.loads(json.dumps(setup.offloading))  # vLLM writes into it
        return KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=settings
        )
    return KVTransferConfig(
        kv_connector="TieredKVConnector",
        kv_connector_module_path="tiered_kv.vllm",
        kv_role="kv_both",
        kv_connector_extra_config=dict(setup.connector),
    )


def _config(setup: Setup) -> Any:
    """vLLM's configuration, as far as schedulers and connectors read it."""
    drafts: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": setup.draft_tokens, "prompt_lookup_max": 3}
    if method := families.DRAFTS.get(setup.family):
        drafts = {
            "method": method, "num_speculative_tokens": setup.draft_tokens, "max_model_len": setup.drafted_len
        }  # fmt: skip
        if method != "mtp":
            drafts["model"] = str(Path((_eagle_folder() if method == "eagle" else _model_folder()).name))
    with models_are_inspected_here():
        config = EngineArgs(
            model=str(Path((_mtp_folder() if method == "mtp" else _model_folder()).name)),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=setup.requests_max,
            max_num_batched_tokens=setup.token_budget + setup.draft_tokens * setup.requests_max,
            num_gpu_blocks_override=setup.pool_blocks,
            tensor_parallel_size=setup.ranks,
            distributed_executor_backend="mp",
            enable_prefix_caching=setup.has_prefix_caching,
            prefix_caching_hash_algo=setup.block_hash,
            scheduling_policy=setup.policy,
            disable_hybrid_kv_cache_manager=not setup.is_hybrid,
            speculative_config=drafts if setup.draft_tokens else None,
            async_scheduling=False,
            kv_transfer_config=_transfer(setup),
        ).create_engine_config()
    # The CPU backend takes other block sizes and layouts, and no async scheduling with n-grams; the schedulers do.
    config.scheduler_config.async_scheduling = setup.is_async
    config.cache_config.block_size = setup.block_tokens
    config.cache_config.kv_cache_layout = setup.layout
    config.cache_config.prefix_match_unit = setup.match_unit
    if setup.family in families.STATES:
        config.cache_config.mamba_block_size = setup.block_tokens
        config.cache_config.mamba_cache_mode = "align"
        config.cache_config.prefix_cache_retention_interval = setup.retention
    backend = SimpleNamespace(get_attn_backend=lambda: CPUAttentionBackend)
    for number in range(len(setup.kinds)):
        config.compilation_config.static_forward_context[f"model.layers.{number}.attn"] = backend
    return config
