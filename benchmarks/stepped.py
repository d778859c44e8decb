"""vLLM whose model computes nothing, for benchmarks of what moves its KV: its scheduler, its block pool, both roles.

Parent side: :class:`SteppedEngine`. Child side: ``python stepped.py``, which takes orders as ``serving.py`` does. vLLM
starts as always, with a model, paged KV and any connector; then this process runs the steps in the engine core's place:
vLLM's scheduler, vLLM's calls of the worker's connector around a forward pass, and in place of that pass known bytes
written into the blocks that it would fill. So a step costs little besides the connector, and every byte that comes back
is compared. Not a benchmark by itself.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from processes import cpu_s
from serving import ServedEngine, prompts, serve, start_vllm

PATIENT = {"lookup_timeout_ms": 20_000, "promotion_wait_ms": 60_000}
"""Our settings behind such an engine: it computes in no time, so by itself our cache would find no wait worth it."""

HOOKS = (
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
    *("update_connector_output", "request_finished", "request_finished_all_groups", "get_kv_connector_stats"),
)
"""What vLLM's scheduler calls of a connector in a step."""

CHUNK_TOKENS = 256
"""The unit of storage of every system: what of a prompt can be loaded is a multiple of it."""

COPY_TURNS = 4
"""Parts of the roofline's memory, of which each copy takes the next: 1 GiB for 256 MiB."""

POLL_S = 0.001
"""As long as vLLM's engine core sleeps after a step that computes nothing."""
DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Stored:
    """A prompt's store, from the start of its last step.

    Attributes:
        begun_s, begun_cpu_s: That start, on the machine's monotonic clock, and the CPU time of all processes by then.
        free_s: Seconds until its blocks are free.
        loadable_s: Seconds until all of it may be loaded.
        cpu_s: CPU time of all processes until then.
    """

    begun_s: float
    begun_cpu_s: float
    free_s: float
    loadable_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """Seconds until the KV of a prompt is in its blocks: from the step that got them, and from its arrival.

    Attributes:
        cpu_s: CPU time of all processes since its arrival.
    """

    copy_s: float
    total_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Copied:
    """As many bytes by one copy for each chunk and layer: seconds, and CPU seconds, out of the blocks and into them."""

    out_s: float
    in_s: float
    out_cpu_s: float
    in_cpu_s: float


@dataclass(frozen=True, slots=True)
class LookedUp:
    """One lookup: seconds in the connector's hooks on the scheduler's thread, until its answer, and what it was."""

    thread_s: float
    answer_s: float
    tokens: int


class SteppedEngine(ServedEngine):
    """The parent's side of one engine. Prompts are named by their seed.

    Threads: one.
    """

    SCRIPT: ClassVar[str] = __file__

    def __init__(self, log: Path, transfer: Mapping[str, Any] | None, **options: Any) -> None:
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | dict(options.pop("environment", {}))
        super().__init__(log, transfer, environment=environment, **options)

    def store(self, seed: int, tokens: int, helpers: Sequence[int] = ()) -> Stored:
        """Compute a prompt, with bytes that no other seed has; ``helpers`` are pids whose CPU time counts, too."""
        return Stored(**self._call("store", seed=seed, tokens=tokens, helpers=helpers))

    def load(self, seed: int, tokens: int, helpers: Sequence[int] = ()) -> Loaded:
        """Load what was stored last, all whole chunks of it, into zeroed blocks, and compare.

        Raises:
            RuntimeError: Other bytes came, or fewer. The child says so in its log.
        """
        return Loaded(**self._call("load", seed=seed, tokens=tokens, helpers=helpers))

    def copy(self, seed: int, tokens: int) -> Copied:
        """The roofline of both: plain copies between blocks that follow each other and memory not touched lately."""
        return Copied(**self._call("copy", seed=seed, tokens=tokens))

    def look_up(self, seed: int, tokens: int) -> LookedUp:
        """Ask what is known of a prompt, and let go of it."""
        return LookedUp(**self._call("look_up", seed=seed, tokens=tokens))


class _Child:
    """The process that steps."""

    def __init__(self, transfer: Mapping[str, Any] | None, options: Mapping[str, Any]) -> None:
        import torch
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        torch.set_num_threads(1)
        _answer_vllms_scan()
        self._llm = start_vllm(transfer, {"async_scheduling": False, **options})
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._config = self._core.vllm_config
        self._worker: Any = get_kv_transfer_group() if has_kv_transfer_group() else None
        layers = self._config.compilation_config.static_forward_context
        self._kv = {name: layer.kv_cache.view(torch.int16) for name, layer in layers.items()}
        self._block_tokens = next(iter(self._kv.values())).shape[2]
        self._pool = self._scheduler.kv_cache_manager.block_pool
        self._content: list[Any] = []
        self._asked = 0
        self._thread_s = 0.0
        self._helpers: list[int] = []
        self._host: Any = None
        self._host_turn = 0
        connector = self._scheduler.connector
        for hook in HOOKS:
            if hasattr(connector, hook):  # without a connector there is none
                setattr(connector, hook, self._timed(getattr(connector, hook)))

    def store(self, seed: int, tokens: int, helpers: list[int]) -> dict[str, Any]:
        self._helpers = helpers
        self._draw(seed, tokens)
        request, idle = self._request(seed, tokens), self._pool.get_num_free_blocks()
        self._scheduler.add_request(request)
        begun, end_s = (0.0, 0.0), time.monotonic() + DEADLINE_S
        while not request.is_finished() or self._pool.get_num_free_blocks() < idle:
            begun = self._step(request) or begun
            _check(end_s, "blocks are still held")
        begun_s, before_s = begun
        free_s = loadable_s = time.perf_counter() - begun_s
        found = 0
        while found < self._whole(tokens):
            asked = self._request(seed, tokens)
            found = self._ask(asked, end_s)
            loadable_s = time.perf_counter() - begun_s
            self._release(asked)
            _check(end_s, "what was stored is not found")
        used_s = self._cpu_s() - before_s
        return {
            "begun_s": begun_s,
            "begun_cpu_s": before_s,
            "free_s": free_s,
            "loadable_s": loadable_s,
            "cpu_s": used_s,
        }

    def load(self, seed: int, tokens: int, helpers: list[int]) -> dict[str, Any]:
        self._helpers = helpers
        for layer in self._kv.values():
            layer.zero_()
        request = self._request(seed, tokens)
        end_s, before_s = time.monotonic() + DEADLINE_S, self._cpu_s()
        arrived_s = time.perf_counter()
        self._scheduler.add_request(request)
        begun_s = loaded_s = used_s = 0.0
        while not loaded_s:
            started_s = time.perf_counter()
            output = self._scheduler.schedule()
            if not begun_s and self._blocks(request):
                begun_s = started_s
            received = self._run(output)
            if request.request_id in output.num_scheduled_tokens:  # loaded before this step, or within it
                loaded_s = time.perf_counter()
                used_s = self._cpu_s() - before_s
                self._compare(request, tokens, output)
            self._scheduler.update_from_output(output, received)
            if request.request_id in (received.kv_connector_output.finished_recving or ()):
                loaded_s = time.perf_counter()
                used_s = self._cpu_s() - before_s
            if not output.num_scheduled_tokens:
                time.sleep(POLL_S)
            _check(end_s, "what was stored is not loaded")
        while not request.is_finished():
            output = self._scheduler.schedule()
            received = self._run(output)
            if request.request_id in output.num_scheduled_tokens:
                self._compare(request, tokens, output)
            self._scheduler.update_from_output(output, received)
        self._settle()
        return {"copy_s": loaded_s - begun_s, "total_s": loaded_s - arrived_s, "cpu_s": used_s}

    def copy(self, seed: int, tokens: int) -> dict[str, Any]:
        import torch

        self._draw(seed, tokens)
        blocks = self._whole(tokens) // self._block_tokens
        if self._host is None:  # ordinary memory as large as the tiers', of which a repetition takes the next part
            shape = (COPY_TURNS, len(self._kv), blocks, *next(iter(self._kv.values())).shape[1:])
            self._host = torch.empty(shape, dtype=torch.int16).fill_(1)
        self._host_turn = (self._host_turn + 1) % COPY_TURNS
        step, pairs = CHUNK_TOKENS // self._block_tokens, []
        for layer, content, host in zip(self._kv.values(), self._content, self._host[self._host_turn], strict=True):
            layer[1 : blocks + 1] = content[:blocks]  # block 0 is vLLM's own
            pairs += [(layer[1 + at : 1 + at + step], host[at : at + step]) for at in range(0, blocks, step)]
        moments = [(time.perf_counter(), self._cpu_s())]
        for near, far in pairs:
            far.copy_(near)
        moments.append((time.perf_counter(), self._cpu_s()))
        for layer in self._kv.values():
            layer.zero_()
        moments.append((time.perf_counter(), self._cpu_s()))
        for near, far in pairs:
            near.copy_(far)
        moments.append((time.perf_counter(), self._cpu_s()))
        for layer, content in zip(self._kv.values(), self._content, strict=True):
            if not torch.equal(layer[1 : blocks + 1], content[:blocks]):
                raise RuntimeError("other bytes came back")
        (out_s, out_cpu_s), (in_s, in_cpu_s) = (
            (after[0] - before[0], after[1] - before[1])
            for before, after in ((moments[0], moments[1]), (moments[2], moments[3]))
        )
        return {"out_s": out_s, "in_s": in_s, "out_cpu_s": out_cpu_s, "in_cpu_s": in_cpu_s}

    def look_up(self, seed: int, tokens: int) -> dict[str, Any]:
        request = self._request(seed, tokens)
        started_s, self._thread_s = time.perf_counter(), 0.0
        found = self._ask(request, time.monotonic() + DEADLINE_S)
        taken = {"thread_s": self._thread_s, "answer_s": time.perf_counter() - started_s, "tokens": found}
        self._release(request)
        return taken

    def forget(self, **options: bool) -> dict[str, Any]:
        end_s = time.monotonic() + DEADLINE_S
        while not self._scheduler.reset_prefix_cache(**options):
            self._step()
            _check(end_s, "blocks are still held")
        return {}

    def close(self) -> None:
        self._core.shutdown()

    # -- what vLLM does ----------------------------------------------------------------------------------------

    def _request(self, seed: int, tokens: int) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self._asked += 1
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        hasher = self._core.request_block_hasher
        return Request(f"ask-{self._asked}", _prompt(seed, tokens), sampling, None, block_hasher=hasher)

    def _ask(self, request: Any, end_s: float) -> int:
        """Ask the connector, once a step, until it says how many tokens it has."""
        connector = self._scheduler.connector
        connector.on_new_request(request)
        while (found := connector.get_num_new_matched_tokens(request, 0)[0]) is None:
            self._step()
            _check(end_s, "a lookup has no answer")
        return int(found)

    def _step(self, request: Any = None) -> tuple[float, float] | None:
        """One step; if it takes the last tokens of ``request``: when it began, and the CPU time until then."""
        output = self._scheduler.schedule()
        begun = None
        if request is not None and request.request_id in output.num_scheduled_tokens:
            self._fill(request)
            if request.num_computed_tokens >= request.num_tokens:  # vLLM counts what it schedules
                used_s = self._cpu_s()
                begun = (time.perf_counter(), used_s)
        self._scheduler.update_from_output(output, self._run(output))
        if not output.num_scheduled_tokens:
            time.sleep(POLL_S)
        return begun

    def _run(self, output: Any) -> Any:
        """What the worker does in a step, without the forward pass; every prompt that ends gets a token."""
        from vllm.forward_context import set_forward_context
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

        names = list(output.num_scheduled_tokens)
        if output.kv_connector_metadata is not None:
            self._worker.handle_preemptions(output.kv_connector_metadata)
        with (
            set_forward_context(dict.fromkeys(self._kv), self._config),
            KVConnectorModelRunnerMixin._get_kv_connector_output(output) as transferred,
        ):
            for name, layer in self._layers().items() if names else ():
                self._worker.save_kv_layer(name, layer.kv_cache, None)
        requests = [self._scheduler.requests[name] for name in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[1] if one.num_computed_tokens >= one.num_tokens else [] for one in requests],
            kv_connector_output=transferred,
        )

    def _layers(self) -> Mapping[str, Any]:
        layers: Mapping[str, Any] = self._config.compilation_config.static_forward_context
        return layers

    def _release(self, request: Any) -> None:
        """The request ends before it was admitted."""
        from vllm.distributed.kv_transfer.kv_connector.v1 import SupportsHMA

        connector = self._scheduler.connector
        if isinstance(connector, SupportsHMA):
            connector.request_finished_all_groups(request, ([],))
        else:
            connector.request_finished(request, [])
        self._settle()

    def _settle(self) -> None:
        """Two steps, for what is said of ended requests in the next one."""
        self._step()
        self._step()

    def _cpu_s(self) -> float:
        return cpu_s() + sum(cpu_s(pid) for pid in self._helpers)

    # -- bytes -------------------------------------------------------------------------------------------------

    def _draw(self, seed: int, tokens: int) -> None:
        import torch

        blocks = -(-tokens // self._block_tokens)
        generator = torch.Generator().manual_seed(seed)
        self._content = [
            torch.randint(-(2**15), 2**15, (blocks, *layer.shape[1:]), dtype=torch.int16, generator=generator)
            for layer in self._kv.values()
        ]

    def _fill(self, request: Any) -> None:
        blocks = self._blocks(request)
        for layer, content in zip(self._kv.values(), self._content, strict=True):
            layer[blocks] = content[: len(blocks)]

    def _compare(self, request: Any, tokens: int, output: Any) -> None:
        """In the step that computes the rest."""
        import torch

        whole, loaded = self._whole(tokens), tokens - output.num_scheduled_tokens[request.request_id]
        if loaded != whole:
            raise RuntimeError(f"not all was loaded. expected={whole} observed={loaded}")
        blocks = self._blocks(request)[: whole // self._block_tokens]
        for (name, layer), content in zip(self._kv.items(), self._content, strict=True):
            if not torch.equal(layer[blocks], content[: len(blocks)]):
                raise RuntimeError(f"other bytes came back. layer={name}")

    def _blocks(self, request: Any) -> list[int]:
        (blocks,) = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return list(blocks)

    def _whole(self, tokens: int) -> int:
        """What can be loaded of a prompt: whole chunks, and never the last token."""
        return (tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return hook(*arguments, **named)
            finally:
                self._thread_s += time.perf_counter() - started_s

        return timed


def _answer_vllms_scan() -> None:
    """Let llvmlite's library object have a ``__dict__``.

    vLLM's search for kernels (``triton_utils/dispatcher.py``) asks every object of every module for one; this object
    answers to any name with a C function, on which vLLM 0.32 ends. It only comes up where a connector imports numba,
    as LMCache's does, and the engine core is in the same process.
    """
    ffi = import_module("llvmlite.binding.ffi")
    ffi.lib._fntab.setdefault("__dict__", {})


@cache
def _prompt(seed: int, tokens: int) -> list[int]:
    return prompts(seed, 1, tokens)[0]


def _check(end_s: float, what: str) -> None:
    if time.monotonic() > end_s:
        raise TimeoutError(f"{what}. deadline_s={DEADLINE_S:g}")


if __name__ == "__main__":
    serve(_Child)
