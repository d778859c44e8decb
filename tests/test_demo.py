"""The demo's own code, without its engines: what it promises, what it writes, how it fails.

The run itself is ``make demo``: three engine processes, a minute, and an exit code.
"""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tiered_kv.config import Config

DEMO = Path(__file__).parents[1] / "demo"
SHARED_TOKENS = 3_000


@pytest.fixture(scope="module")
def report() -> Any:
    return _demo_module("report")


@pytest.fixture(scope="module")
def scenario() -> Any:
    return _demo_module("scenario")


@pytest.fixture(scope="module")
def run() -> Any:
    return _demo_module("run")


def _demo_module(name: str) -> Any:
    if str(DEMO) not in sys.path:
        sys.path.append(str(DEMO))  # its files are scripts, which import each other from their own directory
    return importlib.import_module(name)


@pytest.fixture
def phases(report) -> list[Any]:
    """A run that keeps every promise, if only just."""
    return [
        report.Phase("cold", 3_040, 0, 4.0, True, True),
        report.Phase("warm_host", 3_040, 2_700, 1.0, True, True),
        report.Phase("warm_disk", 3_040, 2_700, 1.0, True, True),
        report.Phase("warm_other_suffix", 3_040, 2_700, 3.9, True, True),
    ]


def test_a_run_that_just_keeps_the_promises_breaks_none(report, phases):
    assert report.broken_promises(phases, SHARED_TOKENS) == []


def test_cold_kv_that_cannot_be_compared_is_no_broken_promise(report, phases):
    phases[0] = replace(phases[0], kv_bytes_equal=None)

    assert report.broken_promises(phases, SHARED_TOKENS) == []


@pytest.mark.parametrize(
    ("index", "change", "told"),
    [
        (0, {"cached_tokens": 1}, "cold: 1 tokens were cached"),
        (0, {"tokens_equal": False}, "cold: the answer differs"),
        (1, {"cached_tokens": 2_699}, "warm_host: only 2699 of 3000"),
        (2, {"cached_tokens": 0}, "warm_disk: only 0 of 3000"),
        (3, {"cached_tokens": 0}, "warm_other_suffix: only 0 of 3000"),
        (1, {"tokens_equal": False}, "warm_host: the answer differs"),
        (3, {"tokens_equal": False}, "warm_other_suffix: the answer differs"),
        (2, {"kv_bytes_equal": False}, "warm_disk: the loaded KV differs"),
        (3, {"kv_bytes_equal": None}, "warm_other_suffix: the loaded KV differs"),
        (1, {"ttft_s": 1.001}, "warm_host: the first token took 1.001 s"),
        (2, {"ttft_s": 4.0}, "warm_disk: the first token took 4.000 s"),
        (0, {"ttft_s": 3.999}, "warm_host: the first token took 1.000 s"),
    ],
)
def test_each_broken_promise_is_told(report, phases, index, change, told):
    phases[index] = replace(phases[index], **change)

    assert report.broken_promises(phases, SHARED_TOKENS)[0].startswith(told)


def test_a_missing_phase_is_told(report, phases):
    assert len(report.broken_promises(phases[:-1], SHARED_TOKENS)) == 1
    assert len(report.broken_promises([], SHARED_TOKENS)) == 1


def test_written_json_holds_the_phases_and_the_details(report, phases, tmp_path):
    path = tmp_path / "demo.json"

    report.write_json(path, phases, {"machine": report.machine()})

    content = json.loads(path.read_text())
    assert content["phases"][1] == {
        "name": "warm_host",
        "prompt_tokens": 3_040,
        "cached_tokens": 2_700,
        "ttft_s": 1.0,
        "tokens_equal": True,
        "kv_bytes_equal": True,
    }
    assert [phase["name"] for phase in content["phases"]] == ["cold", "warm_host", "warm_disk", "warm_other_suffix"]
    assert content["machine"]["cores"] >= 1
    assert list(tmp_path.iterdir()) == [path]


def test_table_fits_80_columns_and_shows_what_differs(report, phases):
    phases[2] = replace(phases[2], tokens_equal=False, kv_bytes_equal=None, ttft_s=12.5)
    console = Console(width=80)

    with console.capture() as capture:
        console.print(report.table(phases))

    lines = capture.get().splitlines()
    assert "…" not in capture.get()
    assert max(len(line) for line in lines) <= 80
    assert [line.split()[0] for line in lines[-4:]] == [phase.name for phase in phases]
    assert "4.0 x" in lines[-3] and "differ" not in lines[-3]
    assert lines[-2].split()[-2:] == ["differ", "?"]


def test_questions_share_the_document_and_warm_ups_share_nothing(scenario):
    shared = scenario.SHARED_TOKENS
    prompts = [scenario.prompt(question) for question in range(scenario.CANDIDATES)]
    warm_ups = [scenario.warm_up_prompt(role) for role in scenario.ROLES]

    assert shared >= 3_000
    assert all(prompt[:shared] == prompts[0][:shared] for prompt in prompts)
    assert len({tuple(prompt[shared:]) for prompt in prompts}) == scenario.CANDIDATES
    assert all(len(warm_up) >= 600 for warm_up in warm_ups)
    assert len({tuple(start[:16]) for start in (prompts[0], *warm_ups)}) == 1 + len(warm_ups)
    longest = len(prompts[0]) + scenario.ANSWER_TOKENS
    assert longest <= scenario.ENGINE["max_model_len"]


def test_settings_of_the_connector_are_a_users(scenario):
    config = Config.from_mapping(scenario.CONNECTOR)

    assert config.disk_root() == scenario.CACHE
    assert config.strict
    assert config.promotion_wait_ms is None, "the demo must not help the connector to wait"


def test_failed_engine_process_ends_the_demo_with_the_end_of_its_log(run, scenario, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(scenario, "FILES", tmp_path)
    monkeypatch.setitem(scenario.ROLES, "nonsense", "an engine nobody knows")

    with pytest.raises(run.DemoFailed, match=r"an engine nobody knows ended with status 1; .*nonsense\.log"):
        run._run("nonsense")

    assert "KeyError: 'nonsense'" in capsys.readouterr().out
