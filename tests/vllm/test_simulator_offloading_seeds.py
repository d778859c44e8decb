"""Random scenarios of the simulator with our tier below vLLM's own offloading: vLLM's schedulers and its manager."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit.counts import count, seed
from tests.kit.vllm.offloading_engine import extra_config, on_disk
from tests.sim.vllm.scenario import Plan, run_offloading_scenario
from tiered_kv.vllm.offloading import TieredKVTier

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("quiet")]

SEEDS = count("OFFLOADING_SIMULATOR_SEEDS", 3)
WRONG_WITHIN = 10
"""Seeds within which a mistake shows."""

SEEN_IN_50 = ("loaded", "stored", "aborts", "preemptions", "restarts", "resets", "weight_updates", "kills", "freezes")


@pytest.fixture(scope="module")
def totals() -> Iterator[Counter[str]]:
    found: Counter[str] = Counter()
    yield found
    print(dict(found))


def drawn(number: int, root: Path) -> Plan:
    """A seed's scenario, with few rows and what else it draws for the connector."""
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
    return replace(plan, setup=replace(setup, offloading=offloading, connector={}, layout=layout))


@pytest.mark.parametrize("number", range(seed(), seed() + SEEDS))
def test_seed(number: int, tmp_path: Path, totals: Counter[str]) -> None:
    root = tmp_path / "cache"
    plan = drawn(number, root)
    outcome = run_offloading_scenario(plan, root)
    totals.update(outcome.counts, seeds=1)
    print(f"seed={number} {dict(outcome.counts)}")
    assert not outcome.wrong, "\n".join([f"seed={number}", repr(plan), *outcome.wrong])
    assert not outcome.counts["wrong_tokens"]


def test_the_seeds_did_what_they_are_for(totals: Counter[str]) -> None:
    if totals["seeds"] < 50:
        pytest.skip("says something of a whole set of seeds only")
    assert [name for name in SEEN_IN_50 if not totals[name]] == []


def test_it_notices_rows_under_each_others_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = TieredKVTier._by_group

    def swapped(tier: TieredKVTier, job: Any, *arguments: Any) -> Any:
        for rows, pairs in places(tier, job, *arguments):
            wrong = [(place, row) for (place, _), (_, row) in zip(pairs, reversed(pairs), strict=True)]
            yield rows, pairs if job.is_promotion else wrong

    monkeypatch.setattr(TieredKVTier, "_by_group", swapped)
    wrong = 0
    for number in range(WRONG_WITHIN):
        if not wrong:
            root = tmp_path / str(number)
            wrong = run_offloading_scenario(drawn(number, root), root).counts["wrong_tokens"]
    assert wrong
