"""Real vLLM engines inside the test process, and a look at their paged KV.

Owns how tests start, drain and close an engine of the CPU build, and how they read its KV bytes. Import it before vLLM:
it sets the environment that vLLM reads once. vLLM and torch are imported on the first engine, so collecting tests is
quick. Called by tests marked ``vllm`` only.
"""

import dataclasses
import gc
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import xxhash

from tests.kit.vllm.starting import import_vllm, models_are_inspected_here

ENVIRONMENT = {
    # Scheduler, worker and test in one process: an engine starts in 1 s instead of 15 and its insides can be read.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # "auto" pins the test process, and every process it starts later, to single cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The only thing compiled under enforce_eager is a function of three lines for logprobs: 17 s and a C++ compiler.
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
os.environ.update(ENVIRONMENT)

BLOCK_TOKENS = 32
"""The CPU backend takes multiples of 32 only."""

KV_BYTES = 256 * 1024 * 1024
"""128 Ki tokens of the tiny model. vLLM fills the memory with zeros: 1 GiB takes half a second of every start."""

DRAIN_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one prompt gave.

    Attributes:
        tokens: The generated token ids (greedy).
        logprobs: For each generated token the best candidates' log probabilities, best first.
        cached_tokens: Prompt tokens that were not computed, whatever cache they came from.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[float, ...], ...]
    cached_tokens: int
    finish_reason: str | None

    @property
    def margin(self) -> float:
        """The smallest lead of the best token over the second, over all positions."""
        return min(best - second for best, second, *_ in self.logprobs)


def has_lookahead_hashes() -> bool:
    """Whether block hashes cover the token behind a block where a draft reads it, as of vLLM 0.33.

    But only in engines without a connector: their prefix cache then gives up no block (``VllmConfig``). All others give
    up the last one, as before.
    """
    from vllm.config import SpeculativeConfig

    return any(one.name == "disable_lookahead_block_hashes" for one in dataclasses.fields(SpeculativeConfig))


def make_llm(model: Path, connector: Mapping[str, Any] | None = None, **overrides: Any) -> Any:
    """Start an engine in this process, behind tiered_kv if ``connector`` (its extra config) is given.

    End it with ``close_llm``. ``overrides`` are vLLM's own engine arguments and win over the defaults here. With a
    draft its prefix cache is always that of an engine with a connector (:func:`has_lookahead_hashes`).
    """
    import_vllm()
    from vllm import LLM
    from vllm.config import KVTransferConfig

    options: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "block_size": BLOCK_TOKENS,
        "enforce_eager": True,
        "dtype": "bfloat16",
        # Without AVX-512 vLLM's CPU build keeps recurrent states as bfloat16, and a block is half as large then.
        "mamba_ssm_cache_dtype": "float32",
        "max_model_len": 4096,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 4096,
        "max_logprobs": 5,
        "disable_log_stats": True,
        "kv_cache_memory_bytes": KV_BYTES,
    }
    if connector is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="TieredKVConnector",
            kv_connector_module_path="tiered_kv.vllm",
            kv_role="kv_both",
            kv_connector_extra_config=dict(connector),
        )
    options |= overrides
    if connector is None and (draft := options.get("speculative_config")) and has_lookahead_hashes():
        options["speculative_config"] = draft | {"disable_lookahead_block_hashes": True}
    try:
        is_async = bool(options.get("async_scheduling"))
        with (
            _modules_stay_frozen(),
            models_are_inspected_here(),
            _kernels_are_replaced_once(),
            _schedules_as_asked(is_async=is_async),
        ):
            return LLM(**options)
    except BaseException:
        # The worker's connector is a global of vLLM's; an engine that failed to start leaves it to the next one.
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        ensure_kv_transfer_shutdown()
        raise


def close_llm(llm: Any) -> None:
    """End the engine and give its memory back; the next one may start in the same process."""
    with _modules_stay_frozen():
        llm.llm_engine.engine_core.shutdown()
    gc.collect()


_replaced: list[bool] = []  # one, once an engine of this process has replaced Triton's kernels


@contextmanager
def _kernels_are_replaced_once() -> Iterator[None]:
    """Keep vLLM from replacing Triton's kernels for each engine anew, by replacements of replacements.

    It looks at each name of each module that was imported for that: a third of a start.
    """
    from vllm.platforms.cpu import CpuPlatform

    if not _replaced:
        yield
        _replaced.append(True)
        return
    with mock.patch.object(CpuPlatform, "register_triton_kernel_overrides", create=True):  # new in 0.32
        yield


def _modules_stay_frozen() -> Any:
    """Keep vLLM from freezing its engine as well, whose garbage ``close_llm`` finds, and from letting all go again."""
    return mock.patch.multiple(gc, freeze=mock.DEFAULT, unfreeze=mock.DEFAULT)


@contextmanager
def _schedules_as_asked(*, is_async: bool) -> Iterator[None]:
    """Have vLLM schedule asynchronously on the CPU, too, where it is asked to: its platform turns that off unasked."""
    if not is_async:
        yield
        return
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_the_rest(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    with mock.patch.object(CpuPlatform, "check_and_update_config", staticmethod(check_the_rest)):
        yield


def forget_parallel_groups() -> None:
    """Let the next engine of this process make its own: vLLM keeps the first one's, which may lack those of experts.

    No engine may run.
    """
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


@contextmanager
def running(model: Path, connector: Mapping[str, Any] | None = None, **overrides: Any) -> Iterator[Any]:
    """An engine for the length of a ``with`` block."""
    llm = make_llm(model, connector, **overrides)
    try:
        yield llm
    finally:
        close_llm(llm)


def random_prompt(seed: int, tokens: int, *, vocab: int = 1024) -> list[int]:
    """Token ids of a prompt that no other seed shares a block with."""
    source = random.Random(seed)
    return [source.randrange(3, vocab) for _ in range(tokens)]


def generate(llm: Any, prompts: Sequence[Sequence[int]], *, max_tokens: int = 8, **controls: Any) -> list[Answer]:
    """Answer all prompts in one batch, greedily; one answer per prompt, in order.

    ``controls`` are these requests' parameters for the cache, without ``tiered_kv.`` before their names.
    """
    from vllm import SamplingParams

    params = {f"tiered_kv.{name}": value for name, value in controls.items()}
    parameters = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=2,
        extra_args={"kv_transfer_params": params} if params else None,
    )
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], parameters, use_tqdm=False)
    return [as_answer(output) for output in outputs]


def as_answer(output: Any) -> Answer:
    """What vLLM gave for a request that is finished."""
    completion = output.outputs[0]
    candidates = completion.logprobs or []
    return Answer(
        tokens=tuple(completion.token_ids),
        logprobs=tuple(tuple(sorted((c.logprob for c in at.values()), reverse=True)) for at in candidates),
        cached_tokens=output.num_cached_tokens or 0,
        finish_reason=completion.finish_reason,
    )


def drain(llm: Any, *, deadline_s: float = DRAIN_DEADLINE_S) -> None:
    """Step the engine until neither the scheduler nor its connector has work left.

    An engine in this process steps only inside ``generate``, so stores of its last step are finished here.

    Raises:
        TimeoutError: The connector still reports pending work after ``deadline_s``.
    """
    core = llm.llm_engine.engine_core.engine_core
    end = time.monotonic() + deadline_s
    while core.scheduler.has_requests():
        if time.monotonic() > end:
            raise TimeoutError(f"engine still has work. deadline_s={deadline_s}")
        llm.llm_engine.engine_core.get_output()
        os.sched_yield()


def computed_alone(model: Path, prompts: Mapping[str, list[int]], max_tokens: int) -> dict[str, Answer]:
    """Answers of an engine without the cache, each prompt computed from its first token."""
    answers = {}
    with running(model) as llm:
        for name, prompt in prompts.items():
            reset_gpu_cache(llm)
            (answers[name],) = generate(llm, [prompt], max_tokens=max_tokens)
    return answers


def reset_gpu_cache(llm: Any) -> None:
    """Forget vLLM's own prefix cache, so that the next hit can only come from tiered_kv."""
    drain(llm)
    assert llm.reset_prefix_cache() is True, "blocks are still held by a request or a store"


def kv_layers(llm: Any) -> list[Any]:
    """The paged KV tensors, one per layer, indexed by vLLM's block id in their first dimension."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return list(worker.model_runner.kv_caches)


def block_ids(llm: Any) -> dict[str, int]:
    """The blocks in vLLM's prefix cache: hex of vLLM's block hash and KV-cache group -> block id.

    vLLM's sha256 block hashes depend on the tokens alone, so they name the same block in another engine process.
    """
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    cached = pool.cached_block_hash_to_block
    return {key.hex(): cached.get_one_block(key).block_id for key in list(cached._cache)}


def kv_fingerprint(llm: Any) -> dict[str, str]:
    """The bytes of every cached block over all layers: hex of vLLM's block hash -> xxh3_128 of its pages."""
    layers = kv_layers(llm)
    return {key: pages_digest(layers, block_id) for key, block_id in block_ids(llm).items()}


def pages_digest(layers: Sequence[Any], block_id: int) -> str:
    """Digest of one block's bytes over all layers."""
    import torch

    digest = xxhash.xxh3_128()
    for layer in layers:
        digest.update(layer[block_id].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def zero_kv(llm: Any) -> None:
    """Overwrite all paged KV with zeros; vLLM's prefix cache goes on believing in it."""
    for layer in kv_layers(llm):
        layer.zero_()
