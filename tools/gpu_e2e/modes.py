"""The modes, and what an engine of a mode is given. Values only: no vLLM, no torch."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

PLAIN, FIRST, SECOND = "plain", "first", "second"
ROLES: Final = (PLAIN, FIRST, SECOND)
CHECK: Final = "check"
"""The role of an engine that is started before all modes, to see whether one can be."""

CUDA, CPU = "cuda", "cpu"

MODULE_PATH: Final = "tiered_kv.vllm"
"""The connector by its module, so that the package needs not be installed."""

MODULES: Final = (
    "tiered_kv.vllm",
    "vllm.compilation.backends",
    "vllm.compilation.cuda_graph",
    "vllm.compilation.passes.pass_manager",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.model_loader.dummy_loader",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.structured_output",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_model_runner",
)
"""What the engines of the modes, and of ``benchmarks/gpu_engine.py``, import late, each for itself."""


@dataclass(frozen=True)
class Mode:
    """A way to run vLLM.

    Attributes:
        options: Of the engine, beside those that all modes have.
        environment: For its processes.
    """

    name: str
    device: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    """What is asked.

    Attributes:
        model: Of ``tiered_kv.testing.model``: ``TINY`` or ``DEMO``.
        vocabulary: Token ids are drawn below it.
        candidates: Questions of which two with clear answers are chosen.
    """

    model: str
    vocabulary: int
    shared_tokens: int
    question_tokens: int = 40
    answer_tokens: int = 8
    candidates: int = 32

    def prompt(self, question: int) -> list[int]:
        """The document that all questions are about, and a question."""
        return self._tokens(1, self.shared_tokens) + self._tokens(1_000 + question, self.question_tokens)

    def warm_up_prompt(self, role: str) -> list[int]:
        """Shares no block with the document, nor with another role's."""
        return self._tokens(100 + ROLES.index(role), 600)

    def _tokens(self, seed: int, count: int) -> list[int]:
        source = random.Random(seed)
        return [source.randrange(3, self.vocabulary) for _ in range(count)]


SCENARIOS: Final = {
    "demo": Scenario("DEMO", 8_192, 3_100),
    "tiny": Scenario("TINY", 1_024, 1_100),
}
"""A model of 100 M parameters, or one that starts in seconds."""

EAGER: Final = {"enforce_eager": True}
SIZES: Final = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 96, 128]}
"""Of the batches that are captured: 9 instead of vLLM's 51, each of which costs time at every start. A warm prompt's
remainder, fewer than 128 tokens behind whole chunks of 256, is a replayed graph, as a decode step is."""

GRAPHS: Final = {"compilation_config": SIZES}
V1: Final = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
V2: Final = {"VLLM_USE_V2_MODEL_RUNNER": "1"}

MODES: Final = (
    # The most telling first: a run may not have the time for all.
    Mode("eager", CUDA, EAGER),
    Mode("graphs", CUDA, GRAPHS),
    Mode("fp8-graphs", CUDA, GRAPHS | {"kv_cache_dtype": "fp8"}),
    Mode("triton-graphs", CUDA, GRAPHS | {"attention_backend": "TRITON_ATTN"}),
    Mode("flash-v2-graphs", CUDA, GRAPHS | {"attention_backend": "FLASH_ATTN"}, V2),
    # CUDA graphs without torch.compile: proven also where a torch that vLLM does not pin cannot compile.
    Mode("full-graphs", CUDA, {"compilation_config": SIZES | {"mode": 0, "cudagraph_mode": "FULL"}}),
    Mode("flash-v1-eager", CUDA, EAGER | {"attention_backend": "FLASH_ATTN"}, V1),
    Mode("flash-v1-graphs", CUDA, GRAPHS | {"attention_backend": "FLASH_ATTN"}, V1),
    Mode("flash-lbnhc-eager", CUDA, EAGER | {"attention_backend": "FLASH_ATTN"}, {"VLLM_KV_CACHE_LAYOUT": "LBNHC"}),
    Mode("triton-eager", CUDA, EAGER | {"attention_backend": "TRITON_ATTN"}),
    Mode("fp8-eager", CUDA, EAGER | {"kv_cache_dtype": "fp8"}),
    Mode("cpu-eager", CPU, EAGER),
)

OPTIONS: Final = {"skip_tokenizer_init": True, "max_model_len": 4_096, "disable_log_stats": True, "seed": 0}
DEVICE_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    CUDA: {
        # A given size of the KV, because vLLM would measure what is free, and fails where another mode's engine frees
        # memory meanwhile. The share is then only what has to be free when an engine starts.
        "kv_cache_memory_bytes": 2 << 30,
        "gpu_memory_utilization": 0.1,
    },
    CPU: {},
}

ENVIRONMENT: Final = {
    # The engine in the process that looks at its paged KV; with its own process it could not be compared.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
DEVICE_ENVIRONMENT: Final[Mapping[str, Mapping[str, str]]] = {
    # Without FlashInfer vLLM's sampler fails at its import, though greedy answers never use it.
    CUDA: {"VLLM_USE_FLASHINFER_SAMPLER": "0"},
    # As the demo's, with the reasons there (demo/scenario.py).
    CPU: {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    },
}


def connector(cache: Path, device: str) -> dict[str, Any]:
    """The connector's settings; a load is waited for however slow the disk, so that each phase shows its tier."""
    return {
        "storage_uri": cache.as_uri(),
        "host_bytes": "2GiB" if device == CUDA else "512MiB",
        "disk_bytes": "4GiB",
        "strict": True,
        "promotion_wait_ms": 30_000,
        "lookup_timeout_ms": 30_000,
    }
