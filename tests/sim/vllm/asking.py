"""What simulator tests that plan their own requests share: settings, prompts, a loop until the engine is at rest."""

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from tests.sim.vllm.engine import SimulatedEngine
from tests.sim.vllm.model import VOCAB
from tests.sim.vllm.scenario import IDLE_S


def settings(root: Path, chunk_tokens: int = 8) -> dict[str, Any]:
    """The connector's settings: patient, and with room for everything."""
    return {
        "storage_uri": f"file://{root}", "host_bytes": "8MiB", "disk_bytes": "160MiB", "chunk_tokens": chunk_tokens,
        "model_id": "simulated", "strict": True, "lookup_timeout_ms": 30_000, "promotion_wait_ms": 30_000,
        "pinned_share": 0.5,
    }  # fmt: skip


def random_tokens(source: random.Random, tokens: int) -> list[int]:
    """A prompt."""
    return [source.randrange(VOCAB) for _ in range(tokens)]


def parameters(max_tokens: int) -> SamplingParams:
    """A request for so many tokens, whatever they are."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


class AskedEngine:
    """An engine that a test asks, with what it counted and what was wrong.

    Attributes:
        engine: May be replaced by a later one.
    """

    engine: SimulatedEngine

    @property
    def counters(self) -> Counter[str]:
        """What its connector counted so far; a copy."""
        return Counter(self.engine.connector._scheduler.side.counters)

    @property
    def findings(self) -> Any:
        """What its model found wrong."""
        return self.engine.findings


def come_to_rest(engine: SimulatedEngine) -> None:
    """Turn the engine's loop until nothing is left to do."""
    deadline_s = time.monotonic() + 60
    while engine.has_work:
        assert time.monotonic() < deadline_s, "the engine does not come to rest"
        if not engine.step():
            time.sleep(IDLE_S)
