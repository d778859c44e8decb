"""The command line: its verbs, its exit codes, and what it says when something is wrong."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.server.clients import SmallEngine, poll_until, settings
from tests.kit.server.probe import server_pid, wait_ended
from tests.kit.server.processes import freeze, start_serve
from tests.kit.storage.stored_prompts import Model, tokens
from tests.kit.verbs import directory_tier
from tiered_kv import __version__
from tiered_kv.config import Config

Command = Callable[..., subprocess.CompletedProcess[str]]
Serve = Callable[..., tuple[subprocess.Popen[str], str]]

LIMITS = ("--host-bytes", "8MiB", "--disk-bytes", "160MiB")


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def test_help_names_the_verbs_and_the_exit_codes(cli: Command) -> None:
    for arguments in ((), ("--help",)):
        result = cli(*arguments)
        assert result.returncode == (0 if arguments else 2)
        said = " ".join((result.stdout + result.stderr).split())
        for word in ("serve", "stat", "config", "Exit codes: 0 done", "3 another server or command owns the directory"):
            assert word in said
    for verb in ("serve", "stat", "config"):
        assert "Exit codes: 0 done" in cli(verb, "--help").stdout


def test_the_version_is_printed(cli: Command) -> None:
    assert cli("--version").stdout == f"tiered-kv {__version__}\n"


def test_every_setting_is_listed_with_default_and_help(cli: Command) -> None:
    listed = json.loads(cli("config", "--json").stdout)["settings"]
    assert [row["name"] for row in listed] == [setting.name for setting in Config.settings()]
    assert {row["name"]: row["default"] for row in listed}["chunk_tokens"] == "256"
    table = cli("config").stdout
    for setting in Config.settings():
        assert setting.name in table and setting.help[:30] in table


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_serve_says_when_it_serves_and_drains_on_a_signal(serve: Serve, root: Path, number: int) -> None:
    process, line = serve(f"file://{root}", *LIMITS)
    assert line.startswith(f"serving file://{root} pid={process.pid} socket=unix:///")
    one = SmallEngine.start(settings(root))
    one.store(30)
    one.client.poll()
    one.close()
    assert process.poll() is None, "it outlives its clients"
    process.send_signal(number)
    assert ended(process) == (0, "")
    two = SmallEngine.start(settings(root))
    assert two.hits(30) == 30
    two.close()
    wait_ended(root)


def test_serve_goes_on_behind_nohup_when_its_terminal_is_gone(root: Path) -> None:
    process, line = start_serve(f"file://{root}", *LIMITS, before=("nohup",))
    try:
        assert line.startswith("serving ")
        process.send_signal(signal.SIGHUP)
        one = SmallEngine.start(settings(root))
        one.store(3)
        one.wait_hits(3)
        assert process.poll() is None and server_pid(root) == process.pid, "not a server that the engine started"
        one.close()
    finally:
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 0


def test_serve_writes_what_was_committed_before_the_signal(serve: Serve, root: Path) -> None:
    process, _ = serve(f"file://{root}", *LIMITS)
    one = SmallEngine.start(settings(root))
    poll_until(one.client, lambda: one.client.credit_count >= 20, "credits")
    freeze(process.pid)
    one.store(20)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    assert ended(process)[0] == 0
    one.close()
    two = SmallEngine.start(settings(root))
    assert two.hits(20) == 20
    two.close()
    wait_ended(root)


def test_serve_listens_where_it_is_told(serve: Serve, cli: Command, root: Path, runtime_directory: Path) -> None:
    place = runtime_directory / "named.sock"
    _, line = serve(f"file://{root}", *LIMITS, "--socket", place)
    assert line.endswith(f"socket=unix://{place}\n")
    one = SmallEngine.start(settings(root, server=f"unix://{place}"))
    one.store(3)
    one.wait_hits(3)
    one.close()
    assert json.loads(cli("stat", "--server", f"unix://{place}", "--json").stdout)["server"]["directory"] == str(root)


def test_serve_ends_with_2_for_a_wrong_setting(cli: Command, root: Path) -> None:
    for arguments, expected in (
        ((f"file://{root}", "--host-bytes", "many"), "setting host_bytes: expected a size such as 4GiB"),
        ((f"file://{root}", "--disk-bytes", "1MiB"), "disk capacity leaves no room for blobs"),
        ((f"file://{root}", "--drain-s", "-1"), "setting drain_s: expected a number from 0 to 3600, got -1.0"),
        ((f"file://{root}", "--socket", "relative"), "option --socket: expected an absolute path"),
        ((f"file://{root}", "--socket", "unix:///x.sock"), "expected an absolute path without unix://"),
        ((f"file://{root}", "--metrics-host", "0.0.0.0"), "option --metrics-host: nothing listens there: give"),
        ((f"file://{root}", "--host-bytes", "8"), "a number without a unit is bytes"),
        ((f"file://{root}", "--log-level", "loud"), "option --log-level: expected debug"),
        (("s3://AKIA:hidden@bucket/x",), "Credentials belong into storage_options or the environment"),
        ((f"file://{root}", "--no-such-option"), "No such option"),
        ((), "Missing argument"),
    ):
        result = cli("serve", *arguments)
        assert (result.returncode, result.stdout) == (2, "")
        assert expected in result.stderr
        assert "hidden" not in result.stderr and "Traceback" not in result.stderr


def test_serve_ends_with_3_where_another_server_serves(serve: Serve, cli: Command, root: Path) -> None:
    process, _ = serve(f"file://{root}", *LIMITS)
    result = cli("serve", f"file://{root}", *LIMITS)
    assert result.returncode == 3
    assert f"another server owns the directory. pid={process.pid} socket=" in result.stderr


def test_serve_ends_with_1_where_the_storage_cannot_be_used(cli: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = cli("serve", f"file://{tmp_path}/file/cache", *LIMITS)
    assert result.returncode == 1
    assert (
        result.stderr.startswith("tiered-kv: disk operation failed: Not a directory.") and "file/cache" in result.stderr
    )
    assert result.stderr.count("\n") == 1


def test_any_setting_can_be_given_and_a_bucket_is_served(cli, serve, root: Path) -> None:
    uri = f"shared+file://{root}/bucket"
    disk = ("--set", f"disk_path={root}/disk")
    process, line = serve(uri, *disk, "--set", "storage_bytes=1GiB", "--host-bytes", "64MiB", "--disk-bytes", "1GiB")
    assert line.startswith(f"serving {uri} ")
    figures = json.loads(cli("stat", uri, *disk, "--json").stdout)["server"]
    assert [(tier["name"], tier["breaker"]) for tier in figures["tiers"]] == [("disk", "closed"), ("object", "closed")]
    assert figures["tiers"][1]["capacity_bytes"] == 1 << 30 and figures["tiers"][1]["bucket"]["role"] == "leader"
    shown = cli("stat", uri, *disk).stdout
    assert "bucket: leader, term 1" in shown and "in use" in shown
    process.terminate()
    assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["disk_path"], "expected NAME=VALUE, got 'disk_path'"),
        (["=1"], "expected NAME=VALUE"),
        (["storage_bytes=1GiB", "storage_bytes=2GiB"], "storage_bytes is given twice"),
        (["drain_s=1"], "drain_s is given twice"),
        (["storage_byte=1GiB"], "did you mean storage_bytes"),
    ],
)
def test_a_wrong_setting_says_what_is_wrong(cli, root: Path, settings: list[str], expected: str) -> None:
    more = [word for setting in settings for word in ("--set", setting)]
    done = cli("serve", f"shared+file://{root}/bucket", "--drain-s", "2", *more)
    assert done.returncode == 2 and expected in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("evict", "{}", "--all", "--dry-run"),
        ("stat", "{}"),
        ("doctor", "{}"),
        ("cp", "{}", "file:///tmp/nowhere"),
        ("warm", "{}", "--from", "file:///tmp/nowhere"),
    ],
)
def test_a_tier_is_named_once(cli, tmp_path: Path, words: tuple[str, ...]) -> None:
    """A second name won: `evict` removed there, and reported the first."""
    tier = directory_tier(tmp_path / "kv")
    done = cli(*(word.format(tier.uri) for word in words), "--set", f"storage_uri=file://{tmp_path}")
    assert (done.returncode, done.stderr) == (2, "tiered-kv: option --set: storage_uri is given twice\n")


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_verb_does_without_streams_that_its_starter_closed(tmp_path: Path, closed: str) -> None:
    tier, command = directory_tier(tmp_path / "kv"), f'exec "$@" {closed}'
    with tier.open() as storage:
        Model().store(storage, tokens(1, 1))
    for arguments, code in ((("config",), 0), (("evict", tier.uri, "--all"), 5), (("ls", "file:///no"), 2)):
        words = ["sh", "-c", command, "sh", sys.executable, "-m", "tiered_kv.cli", *arguments]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        if closed == "2>&-" and code == 2:
            assert done.stdout == "", "an error is no result"


def test_an_error_log_on_a_full_disk_keeps_no_verb_from_making_room(tmp_path: Path) -> None:
    """`evict ... 2>>/var/log/evict.log`, and /var is what is full: it ended before it removed anything."""
    tier = directory_tier(tmp_path / "kv")
    with tier.open() as storage:
        Model().store(storage, tokens(1, 3), tag="tenant-a")
    (tmp_path / "kv" / "pins.json").write_text("{}")  # is told, and `--tag` needs no pins
    for arguments, code in (
        (("evict", tier.uri, "--tag", "nobody", "--yes"), 0),
        (("ls", tier.uri, "--limit", "1"), 0),
        (("ls", "file:///no"), 2),
        (("evict", tier.uri, "--all"), 5),
        (("verify", tier.uri, "--sample", "0%"), 2),
    ):
        words = [sys.executable, "-m", "tiered_kv.cli", *arguments]
        with open("/dev/full", "w") as full:
            done = subprocess.run(words, stdout=subprocess.PIPE, stderr=full, text=True, check=False, timeout=60)
        assert done.returncode == code, (arguments, done)
    (tmp_path / "kv" / "pins.json").unlink()
    person, terminal = pty.openpty()
    os.write(person, b"y\n")
    words = [sys.executable, "-m", "tiered_kv.cli", "evict", tier.uri, "--tag", "tenant-a"]
    with open("/dev/full", "w") as full, open(terminal, "rb") as stdin:
        done = subprocess.run(
            words, stdin=stdin, stdout=subprocess.PIPE, stderr=full, text=True, check=False, timeout=60
        )
    os.close(person)
    assert done.returncode == 0 and "removed 3 chunks" in done.stdout


@pytest.mark.parametrize(
    ("output", "expected"), [("full", "tiered-kv: [Errno 28] No space left on device\n"), ("", "")]
)
def test_output_that_nobody_takes_is_told_in_a_sentence_or_not_at_all(output: str, expected: str) -> None:
    """A device that is full, and a pipe whose reader has seen enough; with a buffer, as users have it."""
    if output:
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, out = os.pipe()
        os.close(reader)
    words = [sys.executable, "-m", "tiered_kv.cli", "config"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        words, stdout=out, stderr=subprocess.PIPE, text=True, env=environment, check=False, timeout=60
    )
    os.close(out)
    assert (done.returncode, done.stderr) == (1, expected)
