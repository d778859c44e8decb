"""Questions to an engine, and which tier answered them: what the demo and ``tools/gpu_e2e`` ask alike.

Which tier the KV came from says the cache server: it is asked before and after each prompt, by ``tiered-kv stat``.
Imports neither vLLM nor torch; called by their engine processes, and by who waits for the server behind these.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine import Answer, Engine

from tiered_kv.errors import DirectoryLocked
from tiered_kv.tiers.disk.lock import DirectoryLock

MARGIN_MIN = 0.2
"""Tokens are compared only where the best leads the second by this in plain vLLM: rounding can turn a smaller lead."""

BATCH = 8
QUIET_DEADLINE_S = 60.0
QUIET_POLL_S = 0.1
SERVER_END_LIMIT_S = 60.0


def clear_answers(
    engine: Engine, prompt: Callable[[int], list[int]], candidates: int, answer_tokens: int, say: Callable[[str], None]
) -> dict[int, Answer]:
    """Two questions of the candidates whose answers rounding cannot turn, with their answers by plain vLLM.

    Raises:
        RuntimeError: There are fewer.
    """
    answers: dict[int, Answer] = {}
    for question in _promising(engine, prompt, candidates, answer_tokens):
        engine.forget()
        answer = engine.ask(prompt(question), answer_tokens, logprobs=True)
        if answer.margin is not None and answer.margin >= MARGIN_MIN:
            answers[question] = answer
            say(f"question {question}: {answer.ttft_s:.2f} s to the first token without any cache")
        if len(answers) == 2:
            return answers
    raise RuntimeError(f"fewer than two questions have a margin of {MARGIN_MIN}. found={list(answers)}")


def _promising(engine: Engine, prompt: Callable[[int], list[int]], candidates: int, answer_tokens: int) -> list[int]:
    """Questions by the margin they had behind vLLM's own prefix cache, best first, in as few batches as needed."""
    margins: dict[int, float] = {}
    engine.ask(prompt(0), 1)
    for first in range(0, candidates, BATCH):
        batch = range(first, min(first + BATCH, candidates))
        found = engine.ask_all([prompt(question) for question in batch], answer_tokens)
        margins |= dict(zip(batch, found, strict=True))
        if sum(margin >= 2 * MARGIN_MIN for margin in margins.values()) >= 2:
            break
    return sorted(margins, key=lambda question: -margins[question])


def ask(engine: Engine, cache: Path, prompt: Sequence[int], answer_tokens: int) -> tuple[Answer, dict[str, int]]:
    """Ask a question; what came, and the bytes that each tier below host memory was read for it."""
    before = _read_bytes(_quiet_figures(cache))
    answer = engine.ask(prompt, answer_tokens)
    after = _read_bytes(_figures(cache))
    return answer, {tier: size_bytes - before.get(tier, 0) for tier, size_bytes in after.items()}


def is_prefix_equal(answer: Answer, computed: list[str], block_tokens: int) -> bool:
    """Whether the loaded blocks, at least one, hold the bytes that were computed cold."""
    blocks = answer.cached_tokens // block_tokens
    return 0 < blocks <= len(answer.kv_digests) and answer.kv_digests[:blocks] == computed[:blocks]


def wait_for_server_end(cache: Path, limit_s: float = SERVER_END_LIMIT_S) -> str:
    """Wait until no server owns the directory: what it held is on disk then. Why it still does, or nothing."""
    end_s = time.monotonic() + limit_s
    while True:
        try:
            DirectoryLock(cache).release()
            return ""
        except DirectoryLocked as exc:
            if time.monotonic() > end_s:
                return f"the cache server does not end: {exc}"
        time.sleep(0.05)


def _quiet_figures(cache: Path) -> dict[str, Any]:
    """The figures of a directory's server once it has written and uploaded all: an upload reads from disk, too.

    Raises:
        TimeoutError: It still writes after ``QUIET_DEADLINE_S``.
    """
    end_s = time.monotonic() + QUIET_DEADLINE_S
    while time.monotonic() < end_s:
        figures = _figures(cache)
        if not figures["pending_writes"]:
            return figures
        time.sleep(QUIET_POLL_S)
    raise TimeoutError(f"the cache server still writes. deadline_s={QUIET_DEADLINE_S:g}")


def _figures(cache: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tiered_kv.cli", "stat", cache.as_uri(), "--json"]
    figures: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)["server"]
    return figures


def _read_bytes(figures: dict[str, Any]) -> dict[str, int]:
    """Bytes of blobs that the server has read so far, by tier."""
    result = {tier["name"]: 0 for tier in figures["tiers"]}
    for line in figures["operations"]:
        if line["operation"] == "get":
            result[line["tier"]] += line["bytes"]
    return result
