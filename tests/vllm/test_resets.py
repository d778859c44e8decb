"""A reset waits for the server, in vLLM's scheduler thread: no longer than it takes to know that it is dead or hung."""

import logging
from collections.abc import Callable

import pytest

from tiered_kv.vllm.resets import wait_until_durable

pytestmark = pytest.mark.vllm

PROMISED_S = 5.0
"""docs/architecture.md: the call returns when the server has confirmed, or after 5 s."""


class Session:
    """A scheduler's session whose server has been asked to retire the epoch, and a clock that only sleeping moves."""

    def __init__(self, event: Callable[["Session"], None] = lambda session: None, at_s: float = 0.0) -> None:
        self.now_s, self.slept = 70.0, 0
        self.started_s = self.now_s
        self.info: object = object()
        self.is_ready, self.generation = False, 3
        self._event, self._at_s = event, at_s

    @property
    def waited_s(self) -> float:
        return self.now_s - self.started_s

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds < 0.05, "the loop of the scheduler must not sleep through an answer"
        self.now_s += seconds

    def poll(self) -> None:
        if self.waited_s >= self._at_s:
            self._event(self)

    def wait(self) -> float:
        wait_until_durable(self, self.poll, monotonic=lambda: self.now_s, sleep=self.sleep)  # type: ignore[arg-type]
        return self.waited_s


def confirmed(session: Session) -> None:
    session.is_ready = True


def lost(session: Session) -> None:
    session.info, session.generation = None, session.generation + 1


def joined_anew(session: Session) -> None:
    session.generation += 1


def test_a_server_that_never_answers_is_waited_for_no_longer_than_promised(caplog: pytest.LogCaptureFixture) -> None:
    waited_s = Session().wait()
    assert PROMISED_S <= waited_s < PROMISED_S + 0.05
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "the reset holds for this engine but is not durable" in record.getMessage()
    assert f"waited_s={PROMISED_S:.1f}" in record.getMessage()


@pytest.mark.parametrize("at_s", [0.0, 0.5, PROMISED_S - 0.1])
def test_it_ends_with_the_confirmation(caplog: pytest.LogCaptureFixture, at_s: float) -> None:
    assert at_s <= Session(confirmed, at_s).wait() < at_s + 0.05
    assert caplog.records == []


@pytest.mark.parametrize("event", [lost, joined_anew])
def test_it_ends_with_the_session(caplog: pytest.LogCaptureFixture, event: Callable[[Session], None]) -> None:
    assert 1.0 <= Session(event, 1.0).wait() < 1.05
    assert "not durable" in caplog.text


def test_an_engine_without_a_session_does_not_wait(caplog: pytest.LogCaptureFixture) -> None:
    session = Session()
    session.info = None
    assert session.wait() == 0
    assert "not durable" in caplog.text
