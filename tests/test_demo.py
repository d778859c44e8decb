"""The demo's own code, without its engines: what it promises, what it writes, how it fails.

The run itself is ``make demo``: four engine processes, a minute or two, and an exit code.
"""

import importlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import s3_service
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
        report.Phase("cold", 3_040, 0, 4.0, True, True, {}),
        report.Phase("warm_host", 3_040, 2_700, 1.0, True, True, {"disk": 0, "object": 0}),
        report.Phase("warm_disk", 3_040, 2_700, 1.0, True, True, {"disk": 38 << 20, "object": 0}),
        report.Phase("warm_other_suffix", 3_040, 2_700, 3.9, True, True, {"disk": 0, "object": 0}),
        report.Phase("warm_object", 3_040, 2_700, 4.0, True, True, {"disk": 0, "object": 38 << 20}),
    ]


def test_a_run_that_just_keeps_the_promises_breaks_none(report, phases):
    assert report.broken_promises(phases, SHARED_TOKENS, {}) == []


def test_cold_kv_that_cannot_be_compared_is_no_broken_promise(report, phases):
    phases[0] = replace(phases[0], kv_bytes_equal=None)

    assert report.broken_promises(phases, SHARED_TOKENS, {}) == []


def test_a_phase_that_was_skipped_is_no_broken_promise_but_one_that_was_not_is(report, phases):
    assert report.broken_promises(phases[:-1], SHARED_TOKENS, {"warm_object": "no S3 server"}) == []
    assert len(report.broken_promises(phases[:-1], SHARED_TOKENS, {})) == 1
    assert len(report.broken_promises(phases[:-2], SHARED_TOKENS, {"warm_object": "no S3 server"})) == 1


@pytest.mark.parametrize(
    ("index", "change", "told"),
    [
        (0, {"cached_tokens": 1}, "cold: 1 tokens were cached"),
        (0, {"tokens_equal": False}, "cold: the answer differs"),
        (1, {"cached_tokens": 2_699}, "warm_host: only 2699 of 3000"),
        (2, {"cached_tokens": 0}, "warm_disk: only 0 of 3000"),
        (3, {"cached_tokens": 0}, "warm_other_suffix: only 0 of 3000"),
        (4, {"cached_tokens": 2_699}, "warm_object: only 2699 of 3000"),
        (1, {"tokens_equal": False}, "warm_host: the answer differs"),
        (3, {"tokens_equal": False}, "warm_other_suffix: the answer differs"),
        (4, {"tokens_equal": False}, "warm_object: the answer differs"),
        (2, {"kv_bytes_equal": False}, "warm_disk: the loaded KV differs"),
        (3, {"kv_bytes_equal": None}, "warm_other_suffix: the loaded KV differs"),
        (4, {"kv_bytes_equal": False}, "warm_object: the loaded KV differs"),
        (1, {"ttft_s": 1.001}, "warm_host: the first token took 1.001 s"),
        (2, {"ttft_s": 4.0}, "warm_disk: the first token took 4.000 s"),
        (4, {"ttft_s": 4.001}, "warm_object: the first token took 4.001 s"),
        (0, {"ttft_s": 3.999}, "warm_host: the first token took 1.000 s"),
        (1, {"read_bytes": {"disk": 1, "object": 0}}, "warm_host: the KV was read from ['disk'], not from host memory"),
        (2, {"read_bytes": {"disk": 9, "object": 1}}, "warm_disk: the KV was read from ['disk', 'object'], not from d"),
        (2, {"read_bytes": {"disk": 0}}, "warm_disk: the KV was read from no tier, not from disk"),
        (3, {"read_bytes": {"object": 5}}, "warm_other_suffix: the KV was read from ['object'], not from host memory"),
        (4, {"read_bytes": {"disk": 5, "object": 0}}, "warm_object: the KV was read from ['disk'], not from object"),
    ],
)
def test_each_broken_promise_is_told(report, phases, index, change, told):
    phases[index] = replace(phases[index], **change)

    assert report.broken_promises(phases, SHARED_TOKENS, {})[0].startswith(told)


def test_a_missing_phase_is_told(report, phases):
    assert len(report.broken_promises(phases[1:], SHARED_TOKENS, {})) == 1
    assert len(report.broken_promises([], SHARED_TOKENS, {})) == 1


def test_written_json_holds_the_phases_and_the_details(report, phases, tmp_path):
    path = tmp_path / "demo.json"

    report.write_json(path, phases, {"machine": report.machine()})

    content = json.loads(path.read_text())
    assert content["phases"][2] == {
        "name": "warm_disk",
        "prompt_tokens": 3_040,
        "cached_tokens": 2_700,
        "ttft_s": 1.0,
        "tokens_equal": True,
        "kv_bytes_equal": True,
        "read_bytes": {"disk": 38 << 20, "object": 0},
    }
    assert [phase["name"] for phase in content["phases"]] == list(report.SOURCES)
    assert content["machine"]["cores"] >= 1
    assert list(tmp_path.iterdir()) == [path]


def shown(report, phases, skipped) -> list[str]:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(report.table(phases, skipped))
    return capture.get().splitlines()


def test_table_fits_80_columns_and_shows_what_differs(report, phases):
    phases[2] = replace(phases[2], tokens_equal=False, kv_bytes_equal=None, ttft_s=12.5)

    lines = shown(report, phases, {})

    assert not any("…" in line for line in lines)
    assert max(len(line) for line in lines) <= 80
    assert [line.split()[0] for line in lines[-5:]] == [phase.name for phase in phases]
    assert "4.0 x" in lines[-4] and "differ" not in lines[-4]
    assert lines[-3].split()[-2:] == ["differ", "?"]
    assert "disk, 38 MiB" in lines[-3]
    assert "bucket, 38 MiB" in lines[-1]


def test_table_shows_a_phase_that_was_skipped(report, phases):
    lines = shown(report, phases[:-1], {"warm_object": "no S3 server"})

    assert lines[-1].split() == ["warm_object", "skipped"]


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


@pytest.mark.parametrize("uri", [None, "s3://bucket/demo-1?endpoint_url=http://127.0.0.1:9000"])
def test_settings_of_the_connector_are_a_users(scenario, uri):
    for role in (scenario.FIRST, scenario.SECOND, scenario.THIRD):
        config = Config.from_mapping(scenario.connector(role, uri))

        assert config.disk_root() == scenario.cache(role)
        assert config.strict
        assert config.promotion_wait_ms is None, "the demo must not help the connector to wait"
        assert config.location().kind == ("disk" if uri is None else "object")


def test_third_engine_has_a_disk_directory_of_its_own(scenario):
    assert scenario.cache(scenario.FIRST) == scenario.cache(scenario.SECOND) != scenario.cache(scenario.THIRD)


# --- the bucket ------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_server(monkeypatch, tmp_path) -> None:
    """A machine where no S3 server can be had."""
    script = tmp_path / "s3-server"
    script.write_text("#!/bin/sh\necho 's3-server: cannot install (not root)' >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.delenv("TIERED_KV_TEST_S3_ENDPOINT", raising=False)
    monkeypatch.setattr(s3_service, "SCRIPT", script)
    monkeypatch.setenv("PATH", str(tmp_path))  # no docker


def test_without_a_server_the_phase_is_skipped_with_the_reason(run, no_server, monkeypatch):
    monkeypatch.delenv("CI", raising=False)

    with run._bucket() as (chosen, skipped):
        assert chosen is None
        assert skipped == {"warm_object": "no S3 server: s3-server: cannot install (not root)"}


def test_without_a_server_the_demo_fails_in_ci(run, no_server, monkeypatch):
    monkeypatch.setenv("CI", "true")

    with pytest.raises(run.DemoFailed, match=r"CI=true, and there is no S3 server .*not root"), run._bucket():
        pass


def test_named_server_without_credentials_fails_the_demo(run, monkeypatch):
    monkeypatch.setenv("TIERED_KV_TEST_S3_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)

    with pytest.raises(run.DemoFailed, match=r"missing=AWS_SECRET_ACCESS_KEY$"), run._bucket():
        pass


def test_failed_engine_process_ends_the_demo_with_the_end_of_its_log(run, scenario, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(scenario, "FILES", tmp_path)
    monkeypatch.setitem(scenario.ROLES, "nonsense", "an engine nobody knows")

    with pytest.raises(run.DemoFailed, match=r"an engine nobody knows ended with status 1; .*nonsense\.log"):
        run._run("nonsense", dict(os.environ))

    assert "KeyError: 'nonsense'" in capsys.readouterr().out
