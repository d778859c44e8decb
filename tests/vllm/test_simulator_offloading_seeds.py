"""Random scenarios of the simulator with our tier below vLLM's own offloading: vLLM's schedulers and its manager."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.counts import count, seed
from tests.kit.vllm.offloading_engine import extra_config, on_disk
from tests.sim.vllm.scenario import Plan, run_offloading_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("quiet")]

SEEDS = count("OFFLOADING_SIMULATOR_SEEDS", 3)
SEEN_IN_50 = ("loaded", "stored", "aborts", "preemptions", "restarts", "resets", "weight_updates", "kills", "freezes")


@pytest.fixture(scope="module")
def totals() -> Iterator[Counter[str]]:
    found: Counter[str] = Counter()
    yield found
    print(dict(found))


@pytest.mark.parametrize("number", range(seed(), seed() + SEEDS))
def test_seed(number: int, tmp_path: Path, totals: Counter[str]) -> None:
    root = tmp_path / "cache"
    source = random.Random(f"offloading {number}")
    plan = Plan.draw(number, root, is_v2=False, is_async=bool(number & 1))
    setup, given = plan.setup, plan.setup.connector
    offloading = extra_config(
        on_disk(root),
        source.choice([2, 4, 16]),
        row_bytes=64 << 10,
        block_size=None,
        model_id="simulated",
        lookup_timeout_ms=given["lookup_timeout_ms"],
        promotion_wait_ms=given["promotion_wait_ms"],
        host_bytes=given["host_bytes"],
    )
    layout = "BLHNC" if setup.is_hybrid else setup.layout
    setup = replace(setup, offloading=offloading, connector={}, layout=layout)
    outcome = run_offloading_scenario(replace(plan, setup=setup), root)
    totals.update(outcome.counts, seeds=1)
    print(f"seed={number} {dict(outcome.counts)}")
    assert not outcome.wrong, "\n".join([f"seed={number}", repr(plan), *outcome.wrong])
    assert not outcome.counts["wrong_tokens"]


def test_the_seeds_did_what_they_are_for(totals: Counter[str]) -> None:
    if totals["seeds"] < 50:
        pytest.skip("says something of a whole set of seeds only")
    assert [name for name in SEEN_IN_50 if not totals[name]] == []
