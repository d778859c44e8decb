"""What the machine's children say: repeated in our log, and no more of it than the log has room for."""

import io
import logging

import pytest

from tiered_kv.machine import LAST_LINES, LINES_MAX, LINES_MORE, LINES_S, repeat_in_log

logger = logging.getLogger("tiered_kv.tests.child")


def said_of(caplog: pytest.LogCaptureFixture, lines: list[str], times: list[float] | None = None) -> list[str]:
    """What is logged of these lines; ``times`` of each look at the clock, the first at the start."""
    clock = iter(times or [])
    said = io.BytesIO("".join(f"{line}\n" for line in lines).encode())
    with caplog.at_level(logging.WARNING, logger.name):
        repeat_in_log(said, logger, monotonic=lambda: next(clock, 0.0))
    assert said.closed
    return caplog.messages


def test_what_a_child_says_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert said_of(caplog, ["one", "", "  two "]) == ["one", "two"]


def test_a_child_that_says_too_much_does_not_fill_the_log_and_its_last_words_are_in_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log has 1 MiB and one file before it: what the server said would be gone."""
    lines = [f"line {number}" for number in range(100_000)]
    assert said_of(caplog, lines) == [
        *lines[:LINES_MAX],
        f"a child process says too much: more lines are suppressed for up to {LINES_S:g} s",
        f"suppressed lines of a child process. lines={100_000 - LINES_MAX - LAST_LINES}",
        *lines[-LAST_LINES:],
    ]


def test_after_a_while_a_child_is_heard_again(caplog: pytest.LogCaptureFixture) -> None:
    lines = [f"line {number}" for number in range(LINES_MAX + 6)]
    times = [0.0, *[1.0] * (LINES_MAX + 5), LINES_S, LINES_S]
    assert said_of(caplog, lines, times)[LINES_MAX + 1 :] == [
        "suppressed lines of a child process. lines=5",
        lines[-1],
    ]


def test_a_child_that_goes_on_saying_too_much_is_heard_less(caplog: pytest.LogCaptureFixture) -> None:
    """At 100 lines a minute the log and the one before it were gone within two hours."""
    lines = [f"line {number}" for number in range(LINES_MAX + 1 + 2 * LINES_MORE)]
    times = [0.0, *[1.0] * (LINES_MAX + 1), LINES_S, *[LINES_S] * 2 * LINES_MORE]
    assert said_of(caplog, lines, times)[LINES_MAX + 1 :] == [
        "suppressed lines of a child process. lines=1",
        *lines[LINES_MAX + 1 : LINES_MAX + 1 + LINES_MORE],
        f"a child process says too much: more lines are suppressed for up to {LINES_S:g} s",
        *lines[LINES_MAX + 1 + LINES_MORE :],
    ]


def test_a_child_that_was_silent_since_it_said_too_much_is_heard_as_before(caplog: pytest.LogCaptureFixture) -> None:
    lines = [f"line {number}" for number in range(2 * LINES_MAX + 1)]
    times = [0.0, *[1.0] * (LINES_MAX + 1), *[3 * LINES_S] * LINES_MAX]
    assert said_of(caplog, lines, times)[LINES_MAX + 1 :] == [
        "suppressed lines of a child process. lines=1",
        *lines[LINES_MAX + 1 :],
    ]


def test_what_was_suppressed_and_is_logged_after_all_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    lines = [f"line {number}" for number in range(LINES_MAX + LAST_LINES)]
    assert said_of(caplog, lines) == [
        *lines[:LINES_MAX],
        f"a child process says too much: more lines are suppressed for up to {LINES_S:g} s",
        *lines[LINES_MAX:],
    ]
