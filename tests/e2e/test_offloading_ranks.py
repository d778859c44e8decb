"""Our tier below vLLM's offloading with two ranks, each a process of its own, and with one rank after a restart.

With ``canonical_layout`` a row is the same for any number of ranks. vLLM's own worker code and simulated caches say so
in ``tests/vllm/test_rows_of_ranks.py``; here engines do.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.kit.counts import only_in_proofs
from tests.kit.server.operator_server import operator_server
from tests.kit.server.probe import figures, wait_for, wait_written
from tests.kit.storage.disk_probe import blob_files
from tests.kit.vllm.cached_engine import assert_same
from tests.kit.vllm.engine_process import EngineProcess
from tests.kit.vllm.harness import Answer, generate, random_prompt, running
from tests.kit.vllm.offloading_engine import MAX_TOKENS, ROW_TOKENS, ask, extra_config, offloading_engine

pytestmark = [pytest.mark.vllm, pytest.mark.cores]

ROWS = 3
HIT = ROWS * ROW_TOKENS
PROMPTS = [random_prompt(9_100 + n, HIT + 20) for n in range(2)]


def on_two_ranks(model: Path, root: Path, place: dict[str, Any], log: Path, *prompts: list[int]) -> list[Answer]:
    """Answers of an engine of two ranks; what it stores of them is in files when this returns."""
    engine = EngineProcess(
        model,
        extra_config(place, is_canonical=True),
        log,
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        niceness=5,  # ranks spin while they wait for one another
        tensor_parallel_size=2,
    )
    try:
        answers = engine.ask(*prompts, max_tokens=MAX_TOKENS)
        rows = len(prompts) * ROWS
        wait_for(lambda: engine.ask([5, 6, 7], max_tokens=1) and len(blob_files(root)) == rows, "rows", deadline_s=120)
    finally:
        engine.close()
    assert "rows go through slots" not in log.read_text()
    return [
        Answer(tuple(a["tokens"]), tuple(map(tuple, a["logprobs"])), a["cached_tokens"], a["finish_reason"])
        for a in answers
    ]


def on_one_rank(model: Path, place: dict[str, Any], *prompts: list[int]) -> list[Answer]:
    with offloading_engine(model, place, is_canonical=True) as llm:
        return ask(llm, *prompts)


@only_in_proofs
@pytest.mark.timeout(900)
def test_canonical_rows_of_two_ranks_are_found_by_one_and_those_of_one_by_two(tiny_model: Path, tmp_path: Path) -> None:
    """One engine of two ranks between two of one: its four processes take nearly all of the time to start."""
    root = tmp_path / "cache"
    with running(tiny_model) as llm:
        plain = generate(llm, PROMPTS, max_tokens=MAX_TOKENS)
    place = {"storage_uri": f"file://{root}", "host_bytes": None}
    with operator_server(root) as server:
        cold = on_one_rank(tiny_model, place | {"server": server}, PROMPTS[0])
        wait_written(root)
        assert len(blob_files(root)) == ROWS
    with operator_server(root) as server:
        found = on_two_ranks(tiny_model, root, place | {"server": server}, tmp_path / "two.log", *PROMPTS)
        wait_written(root)
        assert figures(root)["hierarchy"]["host_ready_chunks"] == 0, "rows went through slots"
        first_counters = figures(root)["counters"]
    with operator_server(root) as server:
        again = on_one_rank(tiny_model, place | {"server": server}, *PROMPTS)
        wait_written(root)
        counters = figures(root)["counters"]
    assert len(blob_files(root)) == 2 * ROWS and len({blob.parts[-3] for blob in blob_files(root)}) == 1

    assert [one.cached_tokens for one in cold] == [0]
    assert [one.cached_tokens for one in found] == [HIT, 0]
    assert [one.cached_tokens for one in again] == [HIT] * 2
    for ours in (cold, found, again):
        for one, theirs in zip(ours, plain, strict=False):
            assert_same(one, theirs)
    assert not first_counters.get("read_failed_corrupt") and not counters.get("read_failed_corrupt")
