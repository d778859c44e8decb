"""vLLM as it is served, for benchmarks: an engine core in a process of its own, and a process that asks it and times.

Parent side: :class:`ServedEngine`. Child side: ``python serving.py``, one JSON line per order on standard input and one
per answer on a descriptor of its own. Several engines may be up at once; only the one that was asked works, so two of
them can take turns within a run. Not a benchmark by itself.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = REPOSITORY / "build" / "models" / "demo"
VOCABULARY = 8_192
RESERVED = 3
WARM_UPS = 10
FORGET_DEADLINE_S = 60.0

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    # "auto" would pin the engine, and the cache server that it starts, to single cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    # A thread that waits for the other sleeps, rather than to keep a core from whoever is measured.
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True, slots=True)
class Timed:
    """One request: seconds to its first token, the prompt tokens that were not computed, and what the token was."""

    ttft_s: float
    cached_tokens: int
    token: int
    logprob: float


def ours(settings: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config`` with our connector."""
    return {"kv_connector": "TieredKVConnector", "kv_role": "kv_both", "kv_connector_extra_config": dict(settings)}


def prompts(seed: int, count: int, tokens: int) -> list[list[int]]:
    """Prompts of which no two share a block, nor one with those of another seed."""
    draw = random.Random(f"prompts {seed}")
    return [[draw.randrange(RESERVED, VOCABULARY) for _ in range(tokens)] for _ in range(count)]


class ServedEngine:
    """An engine and the process that asks it.

    Attributes:
        SCRIPT: What that process runs.
        pid: That process; the engine core is a child of it.

    Threads: one.
    """

    SCRIPT: ClassVar[str] = __file__

    def __init__(
        self,
        log: Path,
        transfer: Mapping[str, Any] | None = None,
        *,
        python: Path | str = sys.executable,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Start it; returns when it answers.

        Args:
            transfer: vLLM's ``kv_transfer_config``; None: plain vLLM.
            python: An interpreter that has vLLM.
            environment: More variables than ``ENVIRONMENT``, or others.
            options: vLLM's own engine arguments.
        """
        self._log = log
        reader, writer = os.pipe()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(python), self.SCRIPT, str(writer), json.dumps({"transfer": transfer, "options": options})],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[writer],
                env=os.environ | ENVIRONMENT | dict(environment or {}),
            )
        os.close(writer)
        self.pid = self._process.pid
        self._answers = os.fdopen(reader)
        self._read()

    def ttft(self, prompt: Sequence[int], **controls: Any) -> Timed:
        """Answer one prompt with one token; ``controls`` are its ``kv_transfer_params``, without their prefix."""
        return Timed(**self._call("ttft", prompt=prompt, controls=controls))

    def batch_s(self, batch: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Seconds to answer all of these, handed over at once."""
        seconds: float = self._call("batch", batch=batch, max_tokens=max_tokens)["seconds"]
        return seconds

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, once no request and no store holds blocks."""
        self._call("forget")

    def forget_connectors(self) -> None:
        """Have the connector forget what it has in memory; ours forgets all, and is not asked this way."""
        self._call("forget", reset_connector=True)

    def close(self) -> None:
        """End it. Idempotent."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(60)
        self._answers.close()

    def _call(self, order: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"order": order, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"the engine's process ended. code={self._process.wait()} log={self._log}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def warm_up(engine: ServedEngine, tokens: int) -> None:
    """Ask until a prompt comes back from the cache: its server is there, has memory, and the prefill rate is measured.

    Raises:
        RuntimeError: None of ``WARM_UPS`` prompts did.
    """
    for prompt in prompts(0, WARM_UPS, tokens):
        engine.ttft(prompt)
        engine.forget()
        if engine.ttft(prompt).cached_tokens:
            return
    raise RuntimeError(f"the cache never answered. prompts={WARM_UPS}")


@contextmanager
def served(log: Path, connector: Mapping[str, Any] | None = None, **options: Any) -> Iterator[ServedEngine]:
    """An engine for the length of a ``with`` block; ``connector`` are our connector's settings, None: plain vLLM."""
    engine = ServedEngine(log, None if connector is None else ours(connector), **options)
    try:
        yield engine
    finally:
        engine.close()


def build_model_once() -> None:
    """The demo's model, where the engines look for it."""
    from tiered_kv.testing.model import DEMO, build_model

    build_model(MODEL, shape=DEMO)


def start_vllm(transfer: Mapping[str, Any] | None, options: Mapping[str, Any]) -> Any:
    """vLLM in this process, as the benchmarks have it; arguments as :class:`ServedEngine` has them."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    arguments: dict[str, Any] = {
        "model": str(MODEL),
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 4_096,
        "max_num_batched_tokens": 4_096,
        "block_size": 32,
        "disable_log_stats": True,
        **options,
    }
    if transfer is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
    return LLM(**arguments)


class _Child:
    """The process that asks."""

    def __init__(self, transfer: Mapping[str, Any] | None, options: Mapping[str, Any]) -> None:
        self._llm = start_vllm(transfer, options)
        self._asked = 0

    def ttft(self, prompt: list[int], controls: Mapping[str, Any]) -> dict[str, Any]:
        self._asked += 1
        engine = self._llm.llm_engine
        started_s = time.perf_counter()
        engine.add_request(f"ask-{self._asked}", {"prompt_token_ids": prompt}, self._sampling(1, controls))
        while True:
            for output in engine.step():
                if answer := output.outputs[0].token_ids:
                    taken_s = time.perf_counter() - started_s
                    logprob = output.outputs[0].logprobs[0][answer[0]].logprob
                    cached = output.num_cached_tokens or 0
                    return {"ttft_s": taken_s, "cached_tokens": cached, "token": answer[0], "logprob": logprob}

    def batch(self, batch: list[list[int]], max_tokens: int) -> dict[str, Any]:
        inputs = [{"prompt_token_ids": prompt} for prompt in batch]
        started_s = time.perf_counter()
        self._llm.generate(inputs, self._sampling(max_tokens), use_tqdm=False)
        return {"seconds": time.perf_counter() - started_s}

    def forget(self, **options: bool) -> dict[str, Any]:
        end_s = time.monotonic() + FORGET_DEADLINE_S
        while self._llm.reset_prefix_cache(**options) is not True:
            if time.monotonic() > end_s:
                raise TimeoutError(f"blocks are still held. deadline_s={FORGET_DEADLINE_S:g}")
            time.sleep(0.005)
        return {}

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    @staticmethod
    def _sampling(max_tokens: int, controls: Mapping[str, Any] | None = None) -> Any:
        from vllm import SamplingParams

        params = {f"tiered_kv.{name}": value for name, value in (controls or {}).items()}
        extra = {"kv_transfer_params": params} if params else None
        return SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra, logprobs=1
        )


def serve(child_class: Callable[[Mapping[str, Any] | None, Mapping[str, Any]], Any]) -> None:
    """The child's side: make ``child_class`` of what the parent gave, and call its methods as they are ordered."""
    channel = int(sys.argv[1])
    os.set_inheritable(channel, False)  # engine core and cache server must not hold the pipe open
    given = json.loads(sys.argv[2])
    with os.fdopen(channel, "w", buffering=1) as answers:
        child = child_class(given["transfer"], given["options"])
        print(json.dumps({}), file=answers)
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps(getattr(child, asked.pop("order"))(**asked)), file=answers)
        child.close()


if __name__ == "__main__":
    serve(_Child)
