"""What a request may ask of the cache, read from real requests of vLLM: never an error, always told and counted."""

import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tiered_kv.keys.tags import tag_digest
from tiered_kv.vllm.request_params import (
    NO_PARAMS,
    PIN_TTL_MAX_S,
    WARNINGS_EVERY_S,
    WARNINGS_MAX,
    RequestParams,
    RequestParamsReader,
)

pytestmark = pytest.mark.vllm


def request(params: object) -> Request:
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params})
    return Request("the-request", [1, 2, 3], sampling, None)


class Reading:
    """A reader and what it has counted and said."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.now_s = 0.0
        self.reader = RequestParamsReader(self.counters, lambda: self.now_s)

    def read(self, params: object) -> RequestParams:
        return self.reader.read(request(params))


def test_parameters_are_read() -> None:
    reading = Reading()
    given = {"tiered_kv.skip_save": True, "tiered_kv.skip_load": False, "tiered_kv.pin_ttl_s": 90}
    assert reading.read(given) == RequestParams(skips_save=True, skips_load=False, pin_ttl_s=90.0)
    assert reading.read({"tiered_kv.pin_ttl_s": PIN_TTL_MAX_S}).pin_ttl_s == PIN_TTL_MAX_S
    assert not reading.counters


def test_a_request_may_say_whether_its_answer_is_stored() -> None:
    reading = Reading()
    for value in (True, False):
        params = reading.read({"tiered_kv.save_decode": value})
        assert [params.saves_generated(setting) for setting in (True, False)] == [value, value]
    assert [NO_PARAMS.saves_generated(setting) for setting in (True, False)] == [True, False]
    assert reading.read({"tiered_kv.save_decode": "yes"}) == NO_PARAMS
    assert reading.counters == {"control_refused": 1}


def test_of_a_tag_its_digest_is_kept() -> None:
    reading = Reading()
    assert reading.read({"tiered_kv.tag": "tenant-a"}) == RequestParams(tag=tag_digest("tenant-a"))
    assert reading.read({"tiered_kv.tag": "é" * 256}).tag == tag_digest("é" * 256)
    assert reading.read({"tiered_kv.tag": None}) == NO_PARAMS
    assert not reading.counters


@pytest.mark.parametrize("value", ["", "secret" * 50, "secret-\ud800", 7, b"secret", ["secret"], {"secret": 1}, True])
def test_a_request_whose_tag_cannot_be_read_is_not_stored(caplog: pytest.LogCaptureFixture, value: Any) -> None:
    """Stored without it, nobody could erase it. The warning names the parameter and not its value: it is a name."""
    reading = Reading()
    with caplog.at_level(logging.DEBUG, "tiered_kv"):
        assert reading.read({"tiered_kv.tag": value, "tiered_kv.skip_save": False}) == RequestParams(skips_save=True)
    assert reading.counters == {"control_refused": 1}
    text = caplog.text
    assert "bad value of parameter 'tiered_kv.tag', nothing of the request is stored" in text
    assert "1 to 256 characters" in text and "secret" not in text


@pytest.mark.parametrize("name", ["tiered_kv.tags", "tiered_kv.Tag", "tiered_kv.tag_"])
def test_a_misspelled_tag_is_a_tag_that_cannot_be_read(caplog: pytest.LogCaptureFixture, name: str) -> None:
    reading = Reading()
    with caplog.at_level(logging.DEBUG, "tiered_kv"):
        assert reading.read({name: "secret"}) == RequestParams(skips_save=True)
    assert "did you mean tiered_kv.tag?" in caplog.text and "nothing of the request is stored" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True, "skip_save": True, 3: 4}, [1], "text"])
def test_a_request_without_our_names_asks_for_nothing(params: object) -> None:
    reading = Reading()
    assert reading.read(params) == NO_PARAMS
    assert not reading.counters


def test_a_request_without_sampling_parameters_of_its_own_asks_for_nothing() -> None:
    assert Reading().reader.read(Request("id", [1], SamplingParams(max_tokens=1), None)) == NO_PARAMS


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("tiered_kv.skip_save", "yes", "true or false"),
        ("tiered_kv.skip_save", 1, "true or false"),
        ("tiered_kv.skip_load", [True], "true or false"),
        ("tiered_kv.pin_ttl_s", True, f"seconds from 1 to {PIN_TTL_MAX_S}"),
        ("tiered_kv.pin_ttl_s", "60", f"seconds from 1 to {PIN_TTL_MAX_S}"),
        ("tiered_kv.pin_ttl_s", 0.5, f"seconds from 1 to {PIN_TTL_MAX_S}"),
        ("tiered_kv.pin_ttl_s", PIN_TTL_MAX_S + 1, f"seconds from 1 to {PIN_TTL_MAX_S}"),
        ("tiered_kv.pin_ttl_s", float("nan"), f"seconds from 1 to {PIN_TTL_MAX_S}"),
        ("tiered_kv.pin_ttl_s", {"a": 1}, f"seconds from 1 to {PIN_TTL_MAX_S}"),
        ("tiered_kv.skip_saves", True, "did you mean tiered_kv.skip_save?"),
        ("tiered_kv.priority", 3, "known: tiered_kv.skip_save"),
    ],
)
def test_what_cannot_be_read_is_told_and_left_out(
    caplog: pytest.LogCaptureFixture, name: str, value: Any, expected: str
) -> None:
    reading = Reading()
    with caplog.at_level(logging.WARNING, "tiered_kv.vllm.request_params"):
        found = reading.read({name: value, "tiered_kv.skip_load": True} if name != "tiered_kv.skip_load" else {name: 3})
    assert found.skips_load is (name != "tiered_kv.skip_load") and not found.skips_save and found.pin_ttl_s is None
    assert reading.counters == {"control_refused": 1}
    (record,) = caplog.records
    text = record.getMessage()
    assert name in text and expected in text and "request='the-request'" in text
    assert expected.startswith(("did", "known")) or ascii(value if name != "tiered_kv.skip_load" else 3) in text


def test_what_a_client_sends_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    reading = Reading()
    with caplog.at_level(logging.WARNING, "tiered_kv.vllm.request_params"):
        for _ in range(3 * WARNINGS_MAX):
            reading.read({"tiered_kv." + "x\n" * 5000: "y" * 100_000, "tiered_kv.skip_save": "\x1b[2J" * 5000})
        assert len(caplog.records) == WARNINGS_MAX
        reading.now_s = WARNINGS_EVERY_S
        reading.read({"tiered_kv.skip_save": 3})
    assert len(caplog.records) == WARNINGS_MAX + 1
    assert reading.counters["control_refused"] == 6 * WARNINGS_MAX + 1
    for record in caplog.records:
        assert len(record.getMessage()) < 500 and record.getMessage().isprintable()


def test_the_page_shows_parameters_that_are_read(repository: Path) -> None:
    page = (repository / "docs" / "operations.md").read_text()
    shown = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)]
    (params,) = [block["kv_transfer_params"] for block in shown if "kv_transfer_params" in block]
    reading = Reading()
    assert reading.read(params) == RequestParams(saves_decode=True, pin_ttl_s=3600.0, tag=tag_digest("tenant-a"))
    assert not reading.counters
    assert set(params) == set(re.findall(r"^\| `(tiered_kv\.\w+)` \|", page, flags=re.MULTILINE))
    assert f"from 1 to {PIN_TTL_MAX_S}:" in page
