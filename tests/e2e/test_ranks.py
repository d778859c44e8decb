"""Two tensor-parallel ranks, each a process of its own: one blob holds both their parts, for both ranks or for none."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_probe import figures, wait_ended, wait_written
from cached_engine import CHUNK, settings
from counts import seed
from safetensors import safe_open
from vllm_harness import random_prompt
from vllm_process import EngineProcess

pytestmark = pytest.mark.vllm

PROMPTS = [random_prompt(700 + i, 2 * CHUNK + 40 + 50 * i) for i in range(3)]
WAIT_MS = 100_000
"""Two ranks that spin on two cores leave the server next to nothing."""


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Iterator[Any]:
    engines: list[EngineProcess] = []

    def starting(root: Path) -> EngineProcess:
        engines.append(
            EngineProcess(
                tiny_model,
                settings(root, promotion_wait_ms=WAIT_MS, lookup_timeout_ms=60_000),
                tmp_path / "engine.log",
                tensor_parallel_size=2,
                environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
            )
        )
        return engines[-1]

    yield starting
    for engine in engines:
        engine.close()


def cached(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["cached_tokens"] for answer in answers]


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


@pytest.mark.timeout(400)
def test_two_ranks_store_one_blob_and_load_it_after_a_restart(start: Any, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    first = start(root)
    cold = first.ask(*PROMPTS, max_tokens=6)
    wait_written(root)
    assert first.reset()
    from_host = first.ask(*PROMPTS, max_tokens=6)
    (session,) = figures(root)["sessions"]
    first.close()
    wait_ended(root)

    assert session["workers"] == 2
    assert cached(cold) == [0] * 3 and cached(from_host) == [2 * CHUNK] * 3
    assert tokens(from_host) == tokens(cold)
    blobs = sorted(root.glob("blobs/*/*/*.safetensors"))
    assert len(blobs) == 6
    for blob in blobs:
        with safe_open(blob, framework="pt") as content:
            ranks = {name.partition("/")[0] for name in content.keys() if name != "_pad"}  # noqa: SIM118
            assert ranks == {"rank0", "rank1"}
    spoiled = random.Random(seed()).choice(blobs)
    data = bytearray(spoiled.read_bytes())
    data[-5000] ^= 1  # of the last rank's part
    spoiled.write_bytes(data)

    second = start(root)
    from_disk = second.ask(*PROMPTS, max_tokens=6)
    assert tokens(from_disk) == tokens(cold)
    assert sorted(cached(from_disk)) in ([0, 2 * CHUNK, 2 * CHUNK], [CHUNK, 2 * CHUNK, 2 * CHUNK])
    assert figures(root)["counters"]["read_failed_corrupt"] == 1
