"""`tiered-kv serve` for whoever starts and stops it: health, readiness, the end by SIGTERM, logs for machines."""

import json
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from tests.kit.faults.proxy import Fault, FaultProxy, Mode
from tests.kit.s3 import S3
from tests.kit.server.clients import SmallEngine, settings
from tests.kit.server.object_nodes import s3_place, wait_uploaded
from tests.kit.server.probe import figures, wait_for
from tests.kit.server.processes import frozen

LIMITS = ("--host-bytes", "8MiB", "--disk-bytes", "160MiB")


def ask(line: str, path: str) -> tuple[int, str]:
    """What the port of a server answers; status 0: nobody is there."""
    url = line.rstrip("\n").partition(" metrics=")[2].replace("/metrics", path)
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()
    except OSError:
        return 0, ""


def test_readiness_turns_red_and_green_as_the_bucket_does(serve, s3: S3, root: Path) -> None:
    with FaultProxy(s3.endpoint_url) as proxy:
        place = s3_place(s3, s3.new_prefix(), proxy.url)
        proxy.set(Fault(Mode.STATUS, status=403))
        more = ("--set", f"disk_path={root}", "--set", f"storage_options={json.dumps(place.options)}")
        process, line = serve(place.uri, *LIMITS, *more, "--metrics-port", 0)
        status, why = ask(line, "/readyz")
        assert status == 503
        assert why.startswith("object tier is left alone (open): ") and "refuses these credentials" in why
        assert ask(line, "/healthz") == (200, "ok\n"), "to start it again would help nobody"
        proxy.set()
        wait_for(lambda: ask(line, "/readyz") == (200, "ready\n"), "the bucket to be used")
        client = {"storage_uri": place.uri, "storage_options": place.options, "disk_path": str(root)}
        with closing(SmallEngine.start(settings(root, **client))) as one:
            one.store(5)
            one.wait_hits(5)
            wait_uploaded(root)
            proxy.set(Fault(Mode.STATUS, status=403))
            one.store(20, first_token=5000)  # the breaker opens after five failures in a row
            wait_for(lambda: ask(line, "/readyz")[0] == 503, "the bucket to be left alone")
        proxy.set()
        wait_for(lambda: ask(line, "/readyz")[0] == 200, "the bucket to be used again")
        assert process.poll() is None


def test_a_server_that_stands_still_is_not_ready_and_goes_on_when_it_is_let_go(serve, root: Path) -> None:
    process, line = serve(f"file://{root}", *LIMITS, "--metrics-port", 0)
    assert ask(line, "/readyz") == (200, "ready\n")
    url = line.rstrip("\n").partition(" metrics=")[2].replace("metrics", "readyz")
    with frozen(process.pid), pytest.raises((TimeoutError, urllib.error.URLError)):
        urllib.request.urlopen(url, timeout=0.5)  # its port stands still with it: a probe fails by its own time limit
    wait_for(lambda: ask(line, "/readyz") == (200, "ready\n"), "it to go on")


def test_sigterm_under_load_ends_readiness_and_loses_nothing_that_was_acknowledged(serve, root: Path) -> None:
    """Acknowledged: written to disk by the server's own word, or still to be written when the order came."""
    process, line = serve(f"file://{root}", *LIMITS, "--drain-s", 60, "--metrics-port", 0)
    one = SmallEngine.start(settings(root, host_bytes=None, disk_bytes=None))
    for number in range(40):
        one.store(4, first_token=1000 * number)
    wait_for(lambda: figures(root)["hierarchy"]["host_ready_chunks"] == 160, "the commits")
    process.terminate()
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    assert ask(line, "/readyz")[0] == 0, "nobody is there any more"
    one.close()
    process, line = serve(f"file://{root}", *LIMITS, "--metrics-port", 0)
    assert ask(line, "/readyz") == (200, "ready\n")
    again = SmallEngine.start(settings(root, host_bytes=None, disk_bytes=None))
    assert [again.hits(4, first_token=1000 * number) for number in range(40)] == [4] * 40
    again.close()


def test_logs_for_machines_are_one_json_object_a_line(serve, root: Path) -> None:
    process, _ = serve(f"file://{root}", *LIMITS, "--log-format", "json", "--log-level", "info")
    before_s = time.time()
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    lines = [json.loads(line) for line in errors.splitlines()]
    assert lines
    for line in lines:
        assert set(line) >= {"time", "level", "logger", "message", "pid"}
        assert line["level"] in ("info", "warning") and line["pid"] == process.pid
    (passed,) = [line for line in lines if line["message"].startswith("self-test passed.")]
    assert passed["logger"] == "tiered_kv.server"
    assert passed["tier"] == "disk" and float(passed["read_s"]) >= 0
    stamp = time.mktime(time.strptime(passed["time"][:19], "%Y-%m-%dT%H:%M:%S")) - time.timezone
    assert abs(stamp - before_s) < 600


def test_an_unknown_log_format_is_a_wrong_setting(cli, root: Path) -> None:
    done = cli("serve", f"file://{root}", *LIMITS, "--log-format", "xml")
    assert done.returncode == 2
    assert "option --log-format: expected text or json, got 'xml'" in done.stderr
    assert not root.exists()
