"""Metrics, health and readiness over HTTP: what they say, also when the server is busy, starting or gone."""

import contextlib
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.samples.figures import server, tier
from tests.kit.server.probe import wait_for
from tiered_kv.errors import ConfigError, TierUnavailable
from tiered_kv.metrics.figures import ServerFigures
from tiered_kv.server import http
from tiered_kv.server.http import LastFigures, OperationsPort


class Asked:
    """A server that answers as a test says, and a clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.answer: ServerFigures | None = server(1.0)
        self.count = 0
        self.last = LastFigures(self.ask, lambda: self.now_s)

    def ask(self) -> ServerFigures:
        self.count += 1
        if self.answer is None:
            raise TierUnavailable("busy")
        return self.answer


def test_a_busy_server_is_told_of_by_its_last_figures_for_a_while():
    asked = Asked()
    assert asked.last.get() == (asked.answer, 0.0)
    before, asked.answer = asked.answer, None
    asked.now_s += 30
    assert asked.last.get() == (before, 30.0)
    asked.now_s += 31
    with pytest.raises(TierUnavailable, match="does not answer: busy"):
        asked.last.get()
    asked.answer = server(90.0)
    assert asked.last.get() == (asked.answer, 0.0)


def test_a_server_that_never_answered_has_no_last_figures():
    asked = Asked()
    asked.answer = None
    with pytest.raises(TierUnavailable, match="does not answer: busy"):
        asked.last.get()


def test_scrapes_that_come_together_share_one_question():
    asked = Asked()
    first, _ = asked.last.get()
    asked.now_s += http.FRESH_S / 2
    assert asked.last.get()[0] is first
    assert asked.count == 1
    asked.now_s += http.FRESH_S
    asked.last.get()
    assert asked.count == 2


@pytest.fixture
def metrics() -> Iterator[OperationsPort]:
    one = OperationsPort("127.0.0.1", 0)
    yield one
    one.close()


def beside(metrics: OperationsPort, path: str) -> str:
    return metrics.url.replace("/metrics", path)


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


def test_a_server_that_does_not_answer_costs_a_scrape_a_moment_and_is_a_503(
    metrics: OperationsPort, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http, "ASK_S", 0.2)
    with tempfile.TemporaryDirectory(prefix="tkv-") as directory, socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{directory}/s")
        silent.listen()
        metrics.start(f"{directory}/s")
        status, text = fetch(metrics.url)
    assert status == 503
    assert "does not answer" in text


def test_nobody_there_is_a_503_and_any_other_path_a_404(metrics: OperationsPort, tmp_path: Path):
    metrics.start(str(tmp_path / "none"))
    status, text = fetch(metrics.url)
    assert status == 503
    assert "no server answers" in text
    assert fetch(beside(metrics, "/")) == (404, "there is no '/' here, but /metrics, /healthz, /readyz\n")


def test_a_scrape_is_in_the_format_that_is_asked_for(metrics: OperationsPort, tmp_path: Path):
    metrics.start(str(tmp_path / "none"))
    metrics._http.figures = LastFigures(lambda: server(1.0))
    families = {family.name for family in text_string_to_metric_families(fetch(metrics.url)[1])}
    assert {"tiered_kv_asked_tokens", "tiered_kv_used_bytes"} <= families
    request = urllib.request.Request(metrics.url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        assert answer.read().endswith(b"# EOF\n")


@pytest.mark.parametrize("wanted", ["application/openmetrics-text; version=one", "text/plain; version=1.x"])
def test_a_scrape_in_a_format_that_is_none_gets_the_usual_one(metrics: OperationsPort, tmp_path: Path, wanted: str):
    metrics.start(str(tmp_path / "none"))
    metrics._http.figures = LastFigures(lambda: server(1.0))
    request = urllib.request.Request(metrics.url, headers={"Accept": wanted})
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        assert b"tiered_kv_asked_tokens" in answer.read()


def test_a_port_that_is_taken_is_a_wrong_setting(metrics: OperationsPort):
    port = int(metrics.url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(ConfigError, match=rf"--metrics-port: nothing can listen at 127.0.0.1 port {port}"):
        OperationsPort("127.0.0.1", port)


def test_an_address_of_the_other_kind_is_listened_at_too(tmp_path: Path):
    try:
        one = OperationsPort("::1", 0)
    except ConfigError as exc:
        pytest.skip(f"no IPv6 here: {exc}")
    one.start(str(tmp_path / "none"))
    assert one.url.startswith("http://[::1]:")
    assert fetch(one.url)[0] == 503
    one.close()


def test_while_it_starts_a_server_is_healthy_and_not_ready(metrics: OperationsPort):
    assert fetch(beside(metrics, "/healthz")) == (200, "starting\n")
    assert fetch(beside(metrics, "/readyz")) == (503, "starting\n")
    assert fetch(metrics.url) == (503, "starting\n")


def test_readiness_follows_the_tiers(metrics: OperationsPort):
    asked = Asked()
    metrics._http.figures = asked.last
    assert fetch(beside(metrics, "/readyz")) == (200, "ready\n")
    open_tier = tier("disk", breaker="open", breaker_reason="no answer for 10 s")
    asked.answer, asked.now_s = server(2.0, tiers=[open_tier]), asked.now_s + 1
    status, text = fetch(beside(metrics, "/readyz"))
    assert (status, text) == (503, "disk tier is left alone (open): no answer for 10 s\n")
    assert fetch(beside(metrics, "/healthz")) == (200, "ok\n"), "to start it again would not help"
    asked.answer, asked.now_s = server(3.0), asked.now_s + 1
    assert fetch(beside(metrics, "/readyz")) == (200, "ready\n")


def test_other_machines_that_are_away_leave_this_one_ready(metrics: OperationsPort):
    """Or a machine that is down would take its peers out of service with it, and a start-up probe restart them."""
    asked = Asked()
    metrics._http.figures = asked.last
    asked.answer = server(1.0, tiers=[tier("disk"), tier("peers", breaker="open", breaker_reason="no peer answers")])
    assert fetch(beside(metrics, "/readyz")) == (200, "ready\n")


def test_a_server_that_is_silent_is_not_ready_at_once_and_not_healthy_after_a_minute(metrics: OperationsPort):
    asked = Asked()
    asked.answer = None
    metrics._http.figures = asked.last
    assert fetch(beside(metrics, "/readyz"))[0] == 503
    assert fetch(beside(metrics, "/healthz"))[0] == 200, "it may be busy with its first turn"
    asked.answer = server(1.0)
    assert fetch(beside(metrics, "/readyz"))[0] == 200
    asked.answer, asked.now_s = None, asked.now_s + 59
    assert fetch(beside(metrics, "/readyz")) == (503, "the cache server does not answer since 59 s\n")
    assert fetch(beside(metrics, "/healthz"))[0] == 200
    asked.now_s += 2
    assert fetch(beside(metrics, "/healthz"))[0] == 503


# -- who only holds connections ----------------------------------------------------------------------------------------


def address(metrics: OperationsPort) -> tuple[str, int]:
    return "127.0.0.1", int(metrics.url.rpartition(":")[2].partition("/")[0])


def handlers() -> int:
    """Threads of connections."""
    return sum("process_request_thread" in one.name for one in threading.enumerate())


@pytest.fixture
def silent(metrics: OperationsPort, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """Opens more connections than are allowed, each with half a head, and closes them."""
    monkeypatch.setattr(http._Handler, "timeout", 600.0)  # their silence alone does not end them
    before = handlers()
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(2 * http.CONNECTIONS_MAX):
            made.append(stack.enter_context(socket.create_connection(address(metrics), timeout=20)))
            made[-1].sendall(b"GET /metrics HTTP/1.1\r\nHost:")
        yield made
    wait_for(lambda: handlers() == before, "the end of their threads")


def test_silent_connections_are_bounded_and_lock_nobody_out(metrics: OperationsPort, silent: list[socket.socket]):
    metrics._http.figures = LastFigures(lambda: server(1.0))
    assert fetch(beside(metrics, "/healthz")) == (200, "ok\n")
    assert fetch(metrics.url)[0] == 200
    wait_for(lambda: handlers() <= http.REQUESTS_MAX, "the end of the oldest ones")
    assert silent[-1].send(b" x\r\n\r\n"), "the youngest one is still heard"
    assert silent[-1].recv(100).startswith(b"HTTP/1.0 200")


def test_a_head_that_trickles_is_cut_off(metrics: OperationsPort, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "REQUEST_S", 0.3)
    with socket.create_connection(address(metrics), timeout=20) as slow:
        slow.setblocking(False)

        def is_cut() -> bool:
            try:
                slow.send(b"G")
                return slow.recv(1) == b""
            except BlockingIOError:
                return False
            except ConnectionError:
                return True

        wait_for(is_cut, "its end", deadline_s=15)
    assert fetch(beside(metrics, "/healthz")) == (200, "starting\n")


@pytest.mark.parametrize(("lines", "line_bytes"), [(1, 60_000), (98, 1000)])
def test_a_head_that_is_too_long_is_refused_before_all_of_it_is_held(
    metrics: OperationsPort, lines: int, line_bytes: int
):
    line = b"x: " + b"a" * line_bytes + b"\r\n"
    with socket.create_connection(address(metrics), timeout=20) as client:
        with contextlib.suppress(ConnectionError):  # it ends before all is sent
            client.sendall(b"GET /healthz HTTP/1.1\r\n" + lines * line + b"\r\n")
        assert client.recv(100).startswith(b"HTTP/1.0 431")
    request = urllib.request.Request(beside(metrics, "/healthz"), headers={"x": "a" * (http.HEAD_BYTES_MAX // 2)})
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.status == 200


def test_a_full_port_closes_newcomers_until_an_answer_is_through(
    metrics: OperationsPort, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http, "CONNECTIONS_MAX", 2)
    asked, answers = threading.Semaphore(0), threading.Event()

    def ask() -> ServerFigures:
        asked.release()
        assert answers.wait(20)
        return server(1.0)

    metrics._http.figures = LastFigures(ask)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(fetch, metrics.url) for _ in range(2)]
        assert asked.acquire(timeout=20)
        wait_for(lambda: len(metrics._http._open) == 2, "both scrapes")
        with socket.create_connection(address(metrics), timeout=20) as newcomer:
            assert newcomer.recv(1) == b""
        answers.set()
        assert [one.result()[0] for one in waiting] == [200, 200]
    wait_for(lambda: not metrics._http._open, "the end of both")
    assert fetch(metrics.url)[0] == 200


def test_who_waits_in_line_for_a_silent_server_waits_once():
    """Threads queue while one asks: its failure is theirs, or the last one would wait for all in front of it."""
    asked = Asked()
    asked.answer = None
    started, goes_on = threading.Event(), threading.Event()

    def ask() -> ServerFigures:
        started.set()
        assert goes_on.wait(20)
        asked.now_s += 2.0
        return asked.ask()

    asked.last = LastFigures(ask, lambda: asked.now_s)
    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(asked.last.get)
        assert started.wait(20)
        came = threading.Barrier(8, timeout=20)

        def get() -> None:
            came.wait()
            asked.last.get()

        others = [threads.submit(get) for _ in range(7)]
        came.wait()
        wait_for(lambda: threading.active_count() >= 8, "the line")
        time.sleep(0.2)  # the barrier is just before the line
        goes_on.set()
        for one in [first, *others]:
            with pytest.raises(TierUnavailable, match="busy"):
                one.result(20)
    assert asked.count == 1
    asked.answer = server(1.0)
    assert asked.last.get() == (asked.answer, 0.0)
