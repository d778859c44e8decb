"""A real vLLM engine in this process: ask it, time it, and look at its paged KV.

The one file of the demo that knows vLLM's insides. Called by ``engine_process.py``, which must have the environment of
``scenario.ENVIRONMENT``, and by ``tools/gpu_e2e`` for engines on any device.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DRAIN_DEADLINE_S = 60.0

YIELD_S = 0.001
"""What vLLM's own engine process sleeps after a step in which the model did not run, so that the threads that copy KV
get the interpreter; an engine in process leaves it to its caller. Measured without: loads of 3 ms took up to 2 s."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one prompt gave.

    Attributes:
        ttft_s: From handing the request to the engine until its first token was there.
        cached_tokens: Prompt tokens that vLLM did not compute.
        margin: Smallest lead of the best token over the second, in log probability; None where it was not asked for.
        kv_digests: For each whole block of the prompt, in order, the digest of its bytes in all layers.
    """

    tokens: list[int]
    cached_tokens: int
    ttft_s: float
    margin: float | None
    kv_digests: list[str]


class Engine:
    """vLLM, stepped by hand so that the first token can be timed and the KV read at rest."""

    def __init__(
        self,
        model: Path,
        options: Mapping[str, Any],
        connector: Mapping[str, Any] | None,
        module_path: str | None = None,
    ) -> None:
        """Start it.

        Args:
            connector: The connector's settings; None: plain vLLM.
            module_path: Where vLLM finds the connector if tiered_kv is not installed as a package.
        """
        from vllm import LLM
        from vllm.config import KVTransferConfig

        options = dict(options)
        if connector is not None:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="TieredKVConnector",
                kv_connector_module_path=module_path,
                kv_role="kv_both",
                kv_connector_extra_config=dict(connector),
            )
        self._llm = LLM(model=str(model), **options)
        self._client = self._llm.llm_engine.engine_core
        self._core: Any = self._client.engine_core
        self._asked = 0

    def ask(self, prompt: Sequence[int], max_tokens: int, *, logprobs: bool = False) -> Answer:
        """Answer one prompt greedily, let stores finish, and fingerprint the prompt's KV."""
        self._asked += 1
        engine = self._llm.llm_engine
        started_s = time.perf_counter()
        engine.add_request(f"demo-{self._asked}", {"prompt_token_ids": list(prompt)}, _sampling(max_tokens, logprobs))
        hashes = [hash_ for r in self._core.scheduler.requests.values() for hash_ in r.block_hashes]
        first_token_s, output = None, None
        while engine.has_unfinished_requests():
            for output in self._step():
                if first_token_s is None and output.outputs[0].token_ids:
                    first_token_s = time.perf_counter()
        assert output is not None and first_token_s is not None, "the engine finished without an answer"
        self.drain()
        return Answer(
            tokens=list(output.outputs[0].token_ids),
            cached_tokens=output.num_cached_tokens or 0,
            ttft_s=first_token_s - started_s,
            margin=_margin(output) if logprobs else None,
            kv_digests=self._kv_digests(hashes),
        )

    def ask_all(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[float]:
        """Answer all prompts in one batch; each one's margin."""
        inputs = [{"prompt_token_ids": list(p)} for p in prompts]
        return [_margin(o) for o in self._llm.generate(inputs, _sampling(max_tokens, True), use_tqdm=False)]

    def forget(self) -> None:
        """Empty vLLM's own prefix cache and overwrite the paged KV, so that what is there next was computed or loaded.

        Raises:
            RuntimeError: vLLM refused, because a request or a store still holds blocks.
        """
        import torch

        self.drain()
        if self._llm.reset_prefix_cache() is not True:
            raise RuntimeError("reset_prefix_cache() did not return True: blocks are still held")
        for layer in self._kv_layers():
            layer.zero_()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the next step may run on another stream

    def drain(self) -> None:
        """Step until neither the scheduler nor the connector has work left; an idle engine in process does not step.

        Raises:
            TimeoutError: There still is work after ``DRAIN_DEADLINE_S``.
        """
        end_s = time.monotonic() + DRAIN_DEADLINE_S
        while self._core.scheduler.has_requests():
            if time.monotonic() > end_s:
                raise TimeoutError(f"the engine still has work. deadline_s={DRAIN_DEADLINE_S:g}")
            self._client.get_output()
            time.sleep(YIELD_S)

    def cache_counters(self) -> dict[str, float]:
        """What the connector counted, for the curious; empty without one."""
        hooks = getattr(self._core.scheduler.connector, "_scheduler", None)
        if hooks is None:
            return {}
        side = hooks.side
        return {"prefill_tokens_per_s": round(side.prefill.tokens_per_s, 1), **dict(sorted(side.counters.items()))}

    def block_tokens(self) -> int:
        """Tokens in one of vLLM's blocks."""
        return int(self._core.scheduler.block_size)

    def description(self) -> dict[str, Any]:
        """What the engine became, of what vLLM chooses by itself."""
        runner = self._core.model_executor.driver_worker.worker.model_runner
        layers = self._kv_layers()
        return {
            "model_runner": f"{type(runner).__module__}.{type(runner).__name__}",
            "kv_layout": runner.vllm_config.cache_config.kv_cache_layout,
            "kv_dtype": str(layers[0].dtype),
            "kv_shape": list(layers[0].shape),
            "kv_strides": list(layers[0].stride()),
        }

    def close(self) -> None:
        """End the engine; its connector leaves the cache server, which ends with its last client."""
        self._client.shutdown()

    def _step(self) -> list[Any]:
        outputs: list[Any] = self._llm.llm_engine.step()
        if not outputs:
            time.sleep(YIELD_S)
        return outputs

    def _kv_layers(self) -> list[Any]:
        return list(self._core.model_executor.driver_worker.worker.model_runner.kv_caches)

    def _kv_digests(self, hashes: Sequence[bytes]) -> list[str]:
        """Digests of the blocks that vLLM's prefix cache knows by these hashes, up to the first it does not."""
        import torch

        pool = self._core.scheduler.kv_cache_manager.block_pool
        layers = self._kv_layers()
        parts = [layer.shape[0] // pool.num_gpu_blocks for layer in layers]  # kernel blocks may be smaller
        digests = []
        for block_hash in hashes:
            blocks = pool.get_cached_block(block_hash, [0])
            if not blocks:
                break
            digest = hashlib.sha256()
            for layer, part in zip(layers, parts, strict=True):
                first = blocks[0].block_id * part
                digest.update(layer[first : first + part].contiguous().view(torch.uint8).cpu().numpy().tobytes())
            digests.append(digest.hexdigest()[:32])
        return digests


def _sampling(max_tokens: int, logprobs: bool) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=2 if logprobs else None
    )


def _margin(output: Any) -> float:
    leads = []
    for at in output.outputs[0].logprobs:
        best, second, *_ = sorted((candidate.logprob for candidate in at.values()), reverse=True)
        leads.append(best - second)
    return float(min(leads))
