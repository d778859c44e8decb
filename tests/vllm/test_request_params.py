"""What a request may ask of the cache, read from real requests of vLLM: never an error, always told and counted."""

import inspect
import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tiered_kv.keys.tags import NO_TAG, session_name, tag_digest
from tiered_kv.server.pins import PIN_TTL_MAX_S
from tiered_kv.vllm.logs import WARNINGS_EVERY_S, WARNINGS_MAX
from tiered_kv.vllm.request_params import NO_PARAMS, RequestParams, RequestParamsReader

pytestmark = pytest.mark.vllm


def request(params: object) -> Request:
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params})
    return Request("the-request", [1, 2, 3], sampling, None)


class Reading:
    """A reader and what it has counted and said."""

    def __init__(self, *peers: str, sessions_need_owner: bool = False) -> None:
        self.counters: Counter[str] = Counter()
        self.now_s = 0.0
        self.reader = RequestParamsReader(
            self.counters, lambda: self.now_s, peers, sessions_need_owner=sessions_need_owner
        )

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


def test_a_router_chooses_among_the_peers_of_the_settings() -> None:
    reading = Reading("https://a:1", "https://b:1")
    assert reading.read({"tiered_kv.peer": "https://b:1"}) == RequestParams(peer="https://b:1")
    assert not reading.counters


@pytest.mark.parametrize("value", ["https://\ud800:7460", "https://b:99999", "http://b:1", 7, "https://a..b:1"])
def test_what_is_no_url_is_left_out_where_peers_are_found(value: Any) -> None:
    reading = Reading("dns://peers:1")
    assert reading.read({"tiered_kv.peer": value}) == RequestParams()
    assert reading.read({"tiered_kv.peer": "https://10.0.0.7:1"}) == RequestParams(peer="https://10.0.0.7:1")


@pytest.mark.parametrize(
    "value", ["https://evil:1", "https://a:1/", "https://a:2", "http://a:1", "a:1", "", 7, ["x"], True]
)
def test_a_peer_that_is_none_of_the_settings_is_left_out(caplog: pytest.LogCaptureFixture, value: Any) -> None:
    """Never an address of the request's own choice: it would have us connect to whatever a client names."""
    counters: Counter[str] = Counter()
    reader = RequestParamsReader(counters, lambda: 0.0, ("https://a:1", "https://b:1"))
    assert reader.read(request({"tiered_kv.peer": value, "tiered_kv.skip_save": True})) == RequestParams(
        skips_save=True
    )
    assert counters == {"control_refused": 1}
    assert "one of the setting peers" in caplog.text


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True, "skip_save": True, 3: 4}, [1], "text"])
def test_a_request_without_our_names_asks_for_nothing(params: object) -> None:
    reading = Reading()
    assert reading.read(params) == NO_PARAMS
    assert not reading.counters


def test_a_session_is_named_by_a_digest_that_another_tag_does_not_share() -> None:
    reading = Reading()
    given = {"tiered_kv.session_id": "run", "tiered_kv.tag": "tenant-a", "tiered_kv.prefetch": "other"}
    found = reading.read(given)
    assert found.session == session_name("run", tag_digest("tenant-a")) != session_name("run", NO_TAG)
    assert found.prefetches == session_name("other", tag_digest("tenant-a"))
    ends = {"tiered_kv.session_id": "run", "tiered_kv.release": True, "tiered_kv.demote": True}
    assert reading.read(ends) == RequestParams(session=session_name("run", NO_TAG), releases=True, demotes=True)
    assert not reading.counters


@pytest.mark.parametrize("sessions_need_owner", [False, True])
def test_a_session_of_nobody_can_be_left_out(caplog: pytest.LogCaptureFixture, sessions_need_owner: bool) -> None:
    """Else whoever has neither tag nor salt can end the session of anybody else who has neither."""
    reading = Reading(sessions_need_owner=sessions_need_owner)
    given = {"tiered_kv.session_id": "run", "tiered_kv.prefetch": "next", "tiered_kv.release": True}
    nobodys, tagged = reading.read(given), reading.read({**given, "tiered_kv.tag": "tenant"})
    one = request(given)
    one.cache_salt = "salt"
    salted = reading.reader.read(one)
    for params in (tagged, salted) if sessions_need_owner else (nobodys, tagged, salted):
        assert params.session and params.prefetches and params.releases
    if sessions_need_owner:
        assert nobodys == NO_PARAMS and reading.counters == {"control_refused": 3}
        assert "no owner for parameter 'tiered_kv.session_id'" in caplog.text and "'run'" not in caplog.text
    else:
        assert not reading.counters


def test_who_has_another_salt_cannot_name_a_session() -> None:
    reading = Reading()
    given = {"tiered_kv.session_id": "run", "tiered_kv.prefetch": "other", "tiered_kv.release": True}
    names = []
    for salt in (None, "", "salt", "pepper", "\ud800"):
        one = request(given)
        one.cache_salt = salt
        found = reading.reader.read(one)
        assert found.session == session_name("run", NO_TAG, salt) != found.prefetches
        names += [found.session, found.prefetches]
    assert names[:2] == names[2:4] and len(set(names)) == 8, "no salt and an empty one are the same to vLLM"
    assert not reading.counters


def test_without_its_tag_a_session_is_nobodys() -> None:
    reading = Reading()
    given = {"tiered_kv.session_id": "run", "tiered_kv.prefetch": "other", "tiered_kv.release": True}
    assert reading.read(given | {"tiered_kv.tag": 7}) == RequestParams(skips_save=True)
    assert reading.counters == {"control_refused": 2}


def test_times_may_be_words() -> None:
    reading = Reading()
    assert [reading.read({"tiered_kv.pin_ttl_s": ttl}).pin_ttl_s for ttl in ("5m", "1h", "7d")] == [300, 3600, 604800]
    assert not reading.counters


@pytest.mark.parametrize("name", ["tiered_kv.session_id", "tiered_kv.prefetch"])
@pytest.mark.parametrize("value", ["", "secret" * 50, 7, ["secret"], "secret-\ud800"])
def test_a_session_that_cannot_be_read_is_none_and_is_not_shown(
    caplog: pytest.LogCaptureFixture, name: str, value: Any
) -> None:
    reading = Reading()
    with caplog.at_level(logging.DEBUG, "tiered_kv"):
        assert reading.read({name: value}) == NO_PARAMS
    assert reading.counters == {"control_refused": 1}
    assert name in caplog.text and "1 to 256 characters" in caplog.text and "secret" not in caplog.text


def test_what_ends_a_session_needs_one(caplog: pytest.LogCaptureFixture) -> None:
    reading = Reading()
    with caplog.at_level(logging.WARNING, "tiered_kv.vllm.request_params"):
        assert reading.read({"tiered_kv.release": True, "tiered_kv.demote": False}) == NO_PARAMS
    assert reading.counters == {"control_refused": 1}
    assert "no session for parameter 'tiered_kv.release'" in caplog.text
    assert "expected tiered_kv.session_id beside it" in caplog.text


HAS_HINTS = "kv_hints" in inspect.signature(Request.__init__).parameters
"""From 0.32 on."""


def hinting(*actions: tuple[str, Any], params: Any = None, session_id: str | None = None) -> Request:
    """A request as vLLM makes it of hints and a session's name."""
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    hints = [KvHintAction(str(number), kind, "1", payload) for number, (kind, payload) in enumerate(actions)]
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params})
    more: Any = {"session_id": session_id, "kv_hints": KvHintsEnvelope("1", "m", hints)}
    return Request("the-request", [1, 2, 3], sampling, None, **more)


@pytest.mark.skipif(not HAS_HINTS, reason="this vLLM has no hints")
def test_hints_say_what_parameters_say() -> None:
    reading = Reading()

    def read(*actions: tuple[str, Any], **more: Any) -> RequestParams:
        return reading.reader.read(hinting(*actions, **more))

    run, other = session_name("run", NO_TAG), session_name("other", NO_TAG)
    assert read(session_id="run") == RequestParams(session=run)
    assert read(("kv.retain", {})) == RequestParams(pin_ttl_s=300)
    assert read(("retain", {"ttl": "1h"})) == RequestParams(pin_ttl_s=3600)
    assert read(("kv.pin", {})) == RequestParams(pin_ttl_s=3600)
    assert read(("kv.pin", {"ttl": 90})) == RequestParams(pin_ttl_s=90)
    assert read(("kv.release", {}), session_id="run") == RequestParams(session=run, releases=True)
    assert read(("kv.deref", {}), session_id="run") == RequestParams(session=run, releases=True)
    assert read(("kv.demote", {}), session_id="run") == RequestParams(session=run, demotes=True)
    assert read(("kv.prefetch", {"session_id": "other"})) == RequestParams(prefetches=other)
    assert read(("kv.prefetch", {}), session_id="run") == RequestParams(session=run, prefetches=run)
    assert read(("kv.prefetch", {})) == NO_PARAMS
    said = {"tiered_kv.pin_ttl_s": 60, "tiered_kv.session_id": "other"}
    assert read(("kv.pin", {}), params=said, session_id="run") == RequestParams(session=other, pin_ttl_s=60)
    assert not reading.counters


@pytest.mark.skipif(not HAS_HINTS, reason="this vLLM has no hints")
def test_an_unknown_hint_is_ignored_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    reading = Reading()
    with caplog.at_level(logging.DEBUG, "tiered_kv"):
        given = hinting(("kv.fetch", {"from": "there"}), ("kv.burn", None), ("kv.pin", {"ttl": "5m"}), (7, 8))
        assert reading.reader.read(given) == RequestParams(pin_ttl_s=300)
    assert reading.counters == {"hints_unknown": 3} and not caplog.records


@pytest.mark.skipif(not HAS_HINTS, reason="this vLLM has no hints")
def test_a_hint_with_a_bad_payload_is_told_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    reading = Reading()
    with caplog.at_level(logging.WARNING, "tiered_kv.vllm.request_params"):
        assert reading.reader.read(hinting(("kv.pin", {"ttl": "soon"}), ("kv.release", {}))) == NO_PARAMS
    assert reading.counters == {"control_refused": 2} and '"5m" or "1h"' in caplog.text


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


def test_parameters_by_the_thousand_are_one_refusal(caplog: pytest.LogCaptureFixture) -> None:
    """Each unknown name is compared with all that are known; the tag may be any of them."""
    reading = Reading()
    many = {f"tiered_kv.{number}": True for number in range(10_000)} | {"tiered_kv.tag": "tenant-a"}
    assert reading.read(many) == RequestParams(skips_save=True)
    assert reading.counters == {"control_refused": 1}
    (record,) = caplog.records
    assert "too many parameters" in record.message and "nothing of the request is stored" in record.message
    others = {f"another.{number}": True for number in range(10_000)}
    assert reading.read(others | {"tiered_kv.skip_save": True}) == RequestParams(skips_save=True)
    assert reading.counters == {"control_refused": 1}


def test_the_page_shows_parameters_that_are_read(repository: Path) -> None:
    page = (repository / "docs" / "operations.md").read_text()
    shown = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)]
    (params,) = [block["kv_transfer_params"] for block in shown if "kv_transfer_params" in block]
    url = params["tiered_kv.peer"]
    reading = Reading(url)
    tag = tag_digest("tenant-a")
    names = {"session": session_name("run-17", tag), "prefetches": session_name("run-16", tag)}
    assert reading.read(params) == RequestParams(saves_decode=True, pin_ttl_s=3600.0, tag=tag, peer=url, **names)
    assert not reading.counters
    assert set(params) == set(re.findall(r"^\| `(tiered_kv\.\w+)` \|", page, flags=re.MULTILINE))
    assert f"from 1 to {PIN_TTL_MAX_S}:" in page
