"""The benchmarks of the hot paths run and say what they measured; how fast they are is not asked here."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.counts import only_in_proofs
from tests.kit.vllm.cached_engine import LOGPROB_TOLERANCE

pytestmark = pytest.mark.vllm


@pytest.fixture
def run(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    import bench_report as report

    monkeypatch.setattr(report, "REPOSITORY", tmp_path)

    def run(name: str, *arguments: str) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        __import__(name).main()
        told = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert told == json.loads((tmp_path / "build" / f"{name}.json").read_text())
        assert {"cores", "memory_gib", "python", "date", "command"} <= told["machine"].keys()
        return told["results"]

    return run


@pytest.mark.timeout(400)  # vLLM is imported, on a busy machine for minutes
def test_programs_that_pages_name_and_no_test_runs_can_be_begun(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need a file system in user space or a proxy, and minutes; that they could not begin nobody saw."""
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    for program in ("disk_faults", "object_faults"):
        __import__(program)


def test_lookups_of_every_case_are_timed(run, tmp_path):
    rows = run("lookup", "--runs", "2", "--sizes", "300", "--tokens", "512", "1024", "--steps", "0", "1")
    assert [(row["tokens"], row["case"], row["steps"]) for row in rows] == [
        (tokens, case, steps)
        for tokens in (512, 1024)
        for case in ("disk", "host", "miss")
        for steps in ("told", "1 ms")
    ]
    for row in rows:
        assert row["requests"] == 2 and row["asked"] >= 1
        assert row["total_ms"] >= row["new_ms"] > 0
        assert row["hash_ms"] > 0 < row["ping_ms"]
    draws("lookup", tmp_path)


def test_copies_are_timed_beside_their_roofline(run, tmp_path):
    tiny = ["--mib-per-run", "32", "--pool-mib", "96", "--host-mib", "256"]
    rows = run("host_path", "--runs", "1", "--chunk-tokens", "16", "--styles", "flash", *tiny)
    assert [(row["mib"], row["style"], row["blocks"]) for row in rows] == [
        (2, "flash", "consecutive"),
        (2, "flash", "random"),
    ]
    for row in rows:
        assert min(row[f"{what}_gb_per_s"] for what in ("store", "load", "gather_copy", "scatter_copy", "seal")) > 0
        assert row["store_ratio"] > 0 < row["load_ratio"]
    draws("host_path", tmp_path)


@only_in_proofs  # tests/e2e/test_tails.py and test_answers.py have sessions on a real engine
def test_scaled_sessions_run_on_a_real_engine_and_answers_save_what_they_should(run):
    """All that is loaded is right, as far as the model can tell: with wrong KV it would choose other tokens."""
    ours_all = ("ours", "ours, no names", "ours, no tails", "ours, no tails, no answers")
    taken = ("--sessions", "2", "--turns", "3", "--systems", "plain, KV zeroed", *ours_all)
    plain, zeroed, ours, unnamed, no_tails, without = run("agents_engine", *taken)
    assert {row["follow_ups"] for row in (plain, ours, unnamed, no_tails, without)} == {4}
    assert plain["prompt_mean"] == ours["prompt_mean"] == without["prompt_mean"]
    computed = [row["computed_mean"] for row in (plain, ours, unnamed, no_tails, without)]
    assert computed == sorted(computed) and computed[0] > 0 and computed[-1] < plain["prompt_mean"]
    assert ours["answers"] >= ours["answers_asked"] and without["answers"] == 0
    assert ours["chunks_written"] == no_tails["chunks_written"] > 0
    assert ours["tails"] > unnamed["tails"] > no_tails["tails"] == without["tails"] == no_tails["tails_written"] == 0
    assert 0 < ours["tails_written"] <= 2
    for row in (ours, unnamed, no_tails, without):
        assert row["apart_most"] <= LOGPROB_TOLERANCE and row["lead_most"] <= LOGPROB_TOLERANCE
    assert zeroed["computed_mean"] == plain["computed_mean"], "the hits are those of plain"
    assert zeroed["apart_mean"] > LOGPROB_TOLERANCE and zeroed["lead_most"] > LOGPROB_TOLERANCE


@only_in_proofs  # it is run before a GPU is
@pytest.mark.timeout(240)  # three engines, one after the other, and two cores that others may use
def test_a_gpu_s_engines_find_what_they_computed_byte_for_byte(run):
    arguments = ("--shape", "tiny", "--tokens", "1100", "--repeats", "1", "--budget-s", "200")
    rows = run("gpu_engine", *arguments, "--systems", "ours", "ours again", "native")
    assert [row for row in rows if row["verdict"] != "right"] == []
    found = {(row["system"], row["phase"]): row["cached_tokens"] for row in rows if "ttft_ms" in row}
    assert found == {
        ("ours", "computed"): 0,
        ("ours", "prefix cache"): 1024,
        ("ours", "host memory"): 1024,
        ("ours again", "disk"): 1024,
        ("ours again", "prefix cache"): 1024,
        ("native", "computed"): 0,
        ("native", "prefix cache"): 1024,
        ("native", "host memory"): 1024,
    }
    hits = [row for row in rows if "more_ms" in row]
    assert [row["loaded_mib"] for row in hits] == [2.0] * 3
    assert all(row["gaps"] > 100 for row in rows if row["phase"].startswith("decode"))


def test_an_engine_that_is_out_of_time_is_a_row_that_says_so(run):
    """It had not even started: the imports take longer."""
    rows = run(
        "gpu_engine", "--shape", "tiny", "--tokens", "600", "--systems", "ours again", "plain", "--budget-s", "3.1"
    )
    told = [(row["system"], row["verdict"], row["message"]) for row in rows]
    assert told[0] == ("ours again", "failed", "not begun: ours computed nothing that could be found")
    assert told[1] in [("plain", "failed", f"{what}: the budget is used") for what in ("ended", "not begun")]


def test_an_engine_that_measured_nothing_has_failed(run):
    import gpu_engine  # type: ignore[import-not-found]  # the fixture knows where

    (row,) = gpu_engine._rows(gpu_engine.Run("plain", None, Path(), Path()))
    assert (row["system"], row["verdict"]) == ("plain", "failed")


def test_a_block_with_other_bytes_or_a_hit_that_is_none_is_wrong(run):
    import gpu_engine_process as process  # type: ignore[import-not-found]  # the fixture knows where

    def wrong(phase: str, cached: int, digests: list[str], computed: list[str] | None) -> Any:
        return process.wrong_of(phase, process.Answer([1], cached, 0.1, None, digests), 1100, 128, computed)

    computed = [str(number) for number in range(8)]
    assert not wrong("computed", 0, computed, []) and not wrong("disk", 1024, computed, computed)
    assert "where none can be" in wrong("computed", 128, computed, [])
    assert "only 7 blocks" in wrong("computed", 0, computed[:7], [])
    assert "one content" in wrong("computed", 0, ["0"] * 8, [])
    assert "not 1024 to 1099" in wrong("disk", 0, computed, computed)
    assert "1 of 8 blocks differ" in wrong("disk", 1024, [*computed[:7], "x"], computed)
    assert "8 blocks 0 and 8" in wrong("disk", 1024, computed, [])
    assert not wrong("prefix cache", 1024, [], None) and wrong("prefix cache", 896, [], None)


def draws(name: str, folder: Path) -> None:
    """The chart of what was just measured can be drawn."""
    pytest.importorskip("matplotlib")
    import charts

    charts.draw(name, folder / "build" / f"{name}.json", folder / f"{name}.png")
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
