"""A real vLLM engine behind the cache, as end-to-end tests use it, and what "the same answer" means.

The engine runs in the test's process, so its paged KV can be read; its cache server is a process of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.vllm.harness import Answer, close_llm, drain, generate, make_llm, reset_gpu_cache

CHUNK = 256
TAIL = 20
"""Tokens behind the last whole chunk where KV is compared byte for byte: less than a block, so every block compared was
loaded. A block computed again, in a batch of another shape, may differ in its last bits on some CPUs.
"""
LOGPROB_TOLERANCE = 0.1
MARGIN = 0.2


@dataclass
class CachedEngine:
    """An engine behind the cache, its storage directory, and the insides of the connector."""

    llm: Any
    root: Path

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def scheduler_side(self) -> Any:
        return self.scheduler.connector._scheduler.side

    @property
    def worker_side(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector: Any = get_kv_transfer_group()
        return connector._worker

    def watch_preemptions(self) -> list[int]:
        """A list that gets, of each request whose blocks vLLM takes from now on, the tokens that it had."""
        lengths: list[int] = []
        preempt = self.scheduler._preempt_request

        def noting(request: Any, *arguments: Any, **options: Any) -> Any:
            lengths.append(request.num_computed_tokens)
            return preempt(request, *arguments, **options)

        self.scheduler._preempt_request = noting
        return lengths

    def ask(self, *prompts: list[int], max_tokens: int = 8, **controls: Any) -> list[Answer]:
        """Answer prompts with an empty GPU prefix cache and all earlier stores done.

        ``controls`` are parameters of these requests for the cache, without ``tiered_kv.`` before their names.
        """
        reset_gpu_cache(self.llm)
        answers = generate(self.llm, prompts, max_tokens=max_tokens, **controls)
        drain(self.llm)
        return answers


def settings(root: Path, **more: Any) -> dict[str, Any]:
    """Settings with waits long enough that a busy machine changes no outcome."""
    return {
        "storage_uri": f"file://{root}",
        "host_bytes": "256MiB",
        "disk_bytes": "1GiB",
        "strict": True,
        "promotion_wait_ms": 30_000,
        "lookup_timeout_ms": 30_000,
    } | more


@contextmanager
def cached_engine(
    model: Path, root: Path, extra: dict[str, Any] | None = None, **options: Any
) -> Iterator[CachedEngine]:
    """An engine behind a cache in ``root``, for the length of a ``with`` block."""
    llm = make_llm(model, settings(root, **(extra or {})), **options)
    try:
        yield CachedEngine(llm, root)
    finally:
        close_llm(llm)


def assert_same(ours: Answer, theirs: Answer) -> None:
    """rule 12: tokens where the plain run is sure of every one of them, the first logprob always."""
    assert abs(ours.logprobs[0][0] - theirs.logprobs[0][0]) <= LOGPROB_TOLERANCE
    if theirs.margin >= MARGIN:
        assert ours.tokens == theirs.tokens
