"""Fleets of 3 and of 20 servers in virtual time: the limit, the lead and everybody's turn; larger ones: docs/scale.md.

``TIERED_KV_SEED`` sets the seed.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.counts import seed
from tiered_kv.fleet.member import LocalBudget

Row = dict[str, Any]
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def scale(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``make bench SECTIONS=scale`` in this process: what it reports."""
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    import bench_report
    import scale as benchmark

    monkeypatch.setattr(bench_report, "REPOSITORY", tmp_path)

    def run(*arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["scale.py", "--seed", str(seed()), *arguments])
        benchmark.main()
        told: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        print(told)  # shown where a test fails
        return dict(told["results"])

    return run


def broken_promises(row: Row) -> set[str]:
    """What every fleet is promised, whatever its size, and this one did not get."""
    found = {
        "over its limit": row["over_bytes"] > 0,
        "never near its limit": row["peak_share"] < 0.93,
        "grants of two terms in use": row["backward_puts"] > 0,
        "not one leader at a time": row["leaders_acting"] != 1,
        "starved": row["starved"] + row["starved_after"] > 0 or row["ready_s"] is None or row["all_put_s"] is None,
        "grants run out": row["sessions_per_min"] > 0.25,
        "lead taken early": row["lead_s"] is not None and row["lead_s"] < 15,
    }
    return {name for name, is_broken in found.items() if is_broken}


@pytest.mark.slow
def test_fleets_keep_their_promises_and_the_searches_their_count(scale: Run) -> None:
    found = scale("--servers", "3", "20")
    assert [row["servers"] for row in found["fleets"]] == [3, 20]
    for row in found["fleets"]:
        assert broken_promises(row) == set()
    assert [(row["miss"], row["most"]) for row in found["searches"]][-1] == (1, 22), "decisions/0009"


@pytest.mark.slow
def test_a_slow_store_starves_nobody_unless_reports_are_read_one_by_one(scale: Run) -> None:
    """A tenth of a second for each request: 20 reports in a row are two, and as many more until all are answered."""
    slow = ("--servers", "20", "--latency-ms", "100")
    assert broken_promises(scale(*slow)["fleets"][0]) == set()
    assert "grants run out" in broken_promises(scale(*slow, "--reads-at-once", "1")["fleets"][0])


@pytest.mark.slow
def test_grants_that_do_not_run_out_are_noticed(scale: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalBudget, "_refusal", lambda budget, size_bytes, now: "")
    assert {"over its limit", "grants of two terms in use"} & broken_promises(scale("--servers", "3")["fleets"][0])
