"""What the demo does: its prompts, its settings and where its files are.

Values only: no vLLM, no torch, and no I/O but a look at the CPU, so that the orchestrator starts at once. Used by
``run.py`` (which starts the processes), ``engine_process.py`` (which is one of them) and ``report.py``.
"""

import random
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = REPOSITORY / "build" / "models" / "demo"
FILES = REPOSITORY / "build" / "demo"
CACHE = REPOSITORY / "build" / "demo-cache"
"""The disk directory of the first two engines."""

OTHER_CACHE = REPOSITORY / "build" / "demo-cache-2"
"""The disk directory of the third: empty, as on another machine."""

RESULT = REPOSITORY / "build" / "demo.json"

SHARED_TOKENS = 3_100
"""The document all questions are about. Not a multiple of a chunk (256), as documents are not."""

QUESTION_TOKENS = 40
ANSWER_TOKENS = 8
WARM_UP_TOKENS = 1_024
"""Long enough that the connector measures the engine's prefill rate, from which it judges what is worth waiting for."""

CANDIDATES = 32
PLAIN, FIRST, SECOND, THIRD = "plain", "first", "second", "third"
ROLES = {
    PLAIN: "plain vLLM",
    FIRST: "first engine",
    SECOND: "second engine",
    THIRD: "third engine",
}

URI_VARIABLE = "TIERED_KV_DEMO_URI"
"""Tells an engine process the bucket's URI, which holds no secret; absent where there is no S3 server."""

ENVIRONMENT = {
    # The engine in the process that looks at its paged KV; with its own process it could not be compared.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # "auto" would pin the process, and every process it starts later, to single cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Under enforce_eager only a function of three lines would be compiled: 17 s, and a C++ compiler would be needed.
    "TORCH_COMPILE_DISABLE": "1",
    # A thread that waits for the other sleeps. One that spins keeps a busy machine from running the one it waits for:
    # with one foreign process on two cores, the first token of a warm prompt took from 0.15 to 4 s; so, 0.15 to 0.3 s.
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def _dtype() -> str:
    """bfloat16 where the CPU computes in it; emulated it is 60 times slower than float32 (measured on AVX2: 0.5 GFLOP/s
    instead of 32), and the demo would take a quarter of an hour."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return "float32"
    return "bfloat16" if words & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"


ENGINE: dict[str, Any] = {
    "dtype": _dtype(),
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 4_096,
    "disable_log_stats": True,
}

CONNECTOR: dict[str, Any] = {"disk_bytes": "4GiB", "strict": True}
"""What a user would write besides the places; everything else is the default."""

_VOCABULARY = 8_192
_RESERVED = 3
_DOCUMENT_SEED, _WARM_UP_SEED, _QUESTION_SEED = 1, 100, 1_000


def cache(role: str) -> Path:
    """The disk directory of an engine, which its cache server owns."""
    return OTHER_CACHE if role == THIRD else CACHE


def connector(role: str, bucket_uri: str | None) -> dict[str, Any]:
    """An engine's settings: a bucket with a local disk in front of it, or without a bucket the local disk alone."""
    if bucket_uri is None:
        return {"storage_uri": cache(role).as_uri(), **CONNECTOR}
    return {"storage_uri": bucket_uri, "disk_path": str(cache(role)), **CONNECTOR}


def warm_up_prompt(role: str) -> list[int]:
    """Shares no block with the document, nor with another process's warm-up, which the cache would remember."""
    return _tokens(_WARM_UP_SEED + list(ROLES).index(role), WARM_UP_TOKENS)


def prompt(question: int) -> list[int]:
    """The document followed by one of the ``CANDIDATES`` questions."""
    return _tokens(_DOCUMENT_SEED, SHARED_TOKENS) + _tokens(_QUESTION_SEED + question, QUESTION_TOKENS)


def _tokens(seed: int, count: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(_RESERVED, _VOCABULARY) for _ in range(count)]
