"""`tiered-kv top`: one object or block per interval, on a terminal a picture, and clean ends."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import Result

from tests.kit.server.clients import CHUNK, SmallEngine, payload_bytes, settings
from tests.kit.server.probe import wait_ended
from tests.kit.server.processes import kill_server
from tests.kit.verbs import run
from tiered_kv.cli.top import TopReport

TOP = [sys.executable, "-m", "tiered_kv.cli", "top"]


def top(*arguments: object) -> Result:
    return run("top", *arguments)


def reports(text: str) -> list[TopReport]:
    return [msgspec.convert(json.loads(line), TopReport) for line in text.splitlines()]


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: object) -> subprocess.Popen[str]:
        command = [*TOP, *map(str, arguments)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_what_happens_between_polls_is_told_once(root: Path, start) -> None:
    one = SmallEngine.start(settings(root))
    one.store(30)
    one.close()
    wait_ended(root)
    two = SmallEngine.start(settings(root))
    process = start(f"file://{root}", "--interval", 0.1, "--json")
    (first,) = reports(process.stdout.readline())
    assert first.directory == str(root) and first.rates.interval_s >= 0.1
    assert (first.rates.asked_tokens_per_s, first.rates.hit_share) == (0, None)
    assert two.hits(40) == 30
    sums: Counter[str] = Counter()
    while sums["asked"] < 40 * CHUNK:
        (found,) = reports(process.stdout.readline())
        now, (host, disk) = found.rates, found.rates.tiers
        for name, rate in (
            ("asked", now.asked_tokens_per_s),
            ("hit", now.hit_tokens_per_s),
            ("host", host.hit_tokens_per_s),
            ("disk", disk.hit_tokens_per_s),
            ("bytes", disk.read_bytes_per_s),
            ("reads", disk.reads_per_s),
        ):
            sums[name] += round(rate * now.interval_s)
    assert sums == {
        "asked": 40 * CHUNK,
        "hit": 30 * CHUNK,
        "host": 0,
        "disk": 30 * CHUNK,
        "bytes": 30 * (payload_bytes() + 4096),
        "reads": 30,
    }
    assert now.hit_share == 0.75
    assert (disk.chunks, disk.breaker, disk.failures_per_s) == (30, "closed", 0)
    two.close()


def test_count_is_the_number_of_lines_or_blocks(engine: SmallEngine, root: Path) -> None:
    found = reports(top(f"file://{root}", "--interval", 0.1, "--count", 3, "--json").stdout)
    assert len(found) == 3
    assert found[0].rates.uptime_s < found[1].rates.uptime_s < found[2].rates.uptime_s
    text = top(f"file://{root}", "--interval", 0.1, "--count", 2).stdout
    assert len(re.findall(r"^tokens/s ", text, flags=re.MULTILINE)) == 2
    assert len(re.findall(r"^disk +.* in use$", text, flags=re.MULTILINE)) == 2
    assert "\x1b" not in text


def test_without_a_server_it_says_so(root: Path) -> None:
    root.mkdir()
    done = top(f"file://{root}")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "no server is running for it; `tiered-kv stat` shows" in done.stderr
    assert os.listdir(root) == []


def test_an_interval_has_bounds(root: Path) -> None:
    assert top(f"file://{root}", "--interval", 0).exit_code == 2
    assert top(f"file://{root}", "--count", 0).exit_code == 2


def test_it_ends_when_the_server_goes_away(engine: SmallEngine, root: Path, start) -> None:
    process = start(f"file://{root}", "--interval", 0.1, "--json")
    assert reports(process.stdout.readline())
    kill_server(root)
    rest, errors = process.communicate(timeout=30)
    reports(rest)  # whole lines only
    assert process.returncode == 1
    assert errors.startswith("tiered-kv: the server went away while it was asked") and errors.count("\n") == 1


def test_it_ends_with_ctrl_c_and_when_nobody_reads(engine: SmallEngine, root: Path, start) -> None:
    process = start(f"file://{root}", "--interval", 0.1)
    assert "tokens/s" in "".join(process.stdout.readline() for _ in range(3))
    process.send_signal(signal.SIGINT)
    assert (process.communicate(timeout=30)[1], process.returncode) == ("", 0)
    process = start(f"file://{root}", "--interval", 0.1)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(30) == 0
    assert process.stderr.read() == ""


def on_a_terminal(root: Path, terminal: str, until: bytes, sign: signal.Signals) -> tuple[int, bytes]:
    """What `top` shows on a terminal of that kind until ``until`` was shown twice and the signal came; its exit."""
    near, far = pty.openpty()
    environment = os.environ | {"TERM": terminal, "COLUMNS": "200", "LINES": "40"}
    command = [*TOP, f"file://{root}", "--interval", "0.2"]
    process = subprocess.Popen(command, stdin=far, stdout=far, stderr=far, env=environment)
    os.close(far)
    shown = b""
    end_s = time.monotonic() + 60
    while shown.count(until) < 2 and time.monotonic() < end_s:
        if select.select([near], [], [], 1)[0]:
            shown += os.read(near, 1 << 16)
    process.send_signal(sign)
    while select.select([near], [], [], 10)[0]:
        try:
            shown += os.read(near, 1 << 16)
        except OSError:  # the other end is closed
            break
    os.close(near)
    return process.wait(30), shown


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_terminal_shows_a_picture_until_a_signal(
    engine: SmallEngine, root: Path, sign: signal.Signals, code: int
) -> None:
    ended, shown = on_a_terminal(root, "xterm", b"hit tokens/s", sign)
    assert shown.count(b"hit tokens/s") >= 2
    assert b"\x1b[?1049h" in shown and b"\x1b[?1049l" in shown, "the terminal was not given back"
    assert b"Traceback" not in shown
    assert ended == code


def test_a_terminal_that_cannot_replace_what_it_shows_gets_blocks(engine: SmallEngine, root: Path) -> None:
    ended, shown = on_a_terminal(root, "dumb", b"hit tokens/s", signal.SIGINT)
    assert shown.count(b"hit tokens/s") >= 2 and b"\x1b" not in shown
    assert ended == 0
