"""Hints of a gateway over HTTP, at a server as users start it: who may, what is understood, and what comes of it."""

import http.client
import json
import socket
import subprocess
import urllib.parse
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.clients import CHUNK, SmallEngine, settings
from tests.kit.server.probe import counted, figures, wait_for, wait_written
from tests.kit.storage.disk_probe import blob_files
from tiered_kv.keys.extras import Salt, encode
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.keys.tags import session_name, tag_digest
from tiered_kv.server.hint_requests import BODY_BYTES_MAX
from tiered_kv.tiers.disk.pins import read_pins

LIMITS = ("--host-bytes", "2MiB", "--disk-bytes", "160MiB", "--metrics-port", 0)
TOKEN = "0123456789abcdef-a-token"


def port_of(line: str) -> int:
    return urllib.parse.urlsplit(line.rstrip("\n").partition(" metrics=")[2]).port or 0


def post(port: int, path: str, body: object, token: str | None = TOKEN) -> tuple[int, dict[str, Any]]:
    """What comes back; a body that is no bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with closing(connection):
        connection.request("POST", path, data, headers)
        answer = connection.getresponse()
        assert answer.headers["Content-Type"] == "application/json"
        return answer.status, json.loads(answer.read())


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def hints(serve, root: Path, token_file: Path) -> Iterator[tuple[SmallEngine, int]]:
    """An engine on a server that takes hints, and the port."""
    _, line = serve(f"file://{root}", *LIMITS, "--hints-token-file", token_file)
    with closing(SmallEngine.start(settings(root, host_bytes=None, disk_bytes=None))) as one:
        yield one, port_of(line)


def churn(one: SmallEngine) -> None:
    for number in range(2, 12):
        one.store(20, first_token=number * 1_000_000)
        wait_written(one.root)


def test_a_prompt_named_by_its_tokens_is_prefetched_and_pinned(hints, root: Path) -> None:
    one, port = hints
    one.store(6)
    churn(one)
    tokens = list(range(6 * CHUNK + 5))
    assert post(port, "/prefetch", {"token_ids": tokens}) == (202, {"action": "prefetch", "chunks": 6})
    wait_for(lambda: figures(root)["flows"][0]["stored"].get("promoted") == 6, "its chunks")
    assert one.hits(6) == 6
    namespace = one.client.namespace.digest.hex()
    body = {"token_ids": tokens[: 4 * CHUNK], "namespace": namespace[:8], "ttl": "5m"}
    assert post(port, "/pin", body) == (200, {"action": "pin", "chunks": 4})
    wait_for(lambda: [name.key for name in read_pins(root)] == [one.keys(4).keys[-1]], "pins.json")
    assert post(port, "/pin", {"token_ids": [7] * CHUNK, "ttl": 60})[0] == 404
    assert (counted(root, "hints_prefetch"), counted(root, "hints_pin"), counted(root, "hints_of_nothing")) == (1, 1, 1)


def test_a_session_is_prefetched_pinned_and_released_by_its_name_and_tag(hints, root: Path) -> None:
    one, port = hints
    tag = tag_digest("tenant-a")
    session = session_name("run-17", tag, "pepper")
    one.store(6)
    wait_written(root)
    one.client.tell_state(session, tag, one.keys(6).keys[-1])
    wait_for(lambda: counted(root, "session_states") == 1, "the state")
    churn(one)
    mine = {"session_id": "run-17", "tag": "tenant-a", "cache_salt": "pepper"}
    for missing in ("tag", "cache_salt"):
        assert post(port, "/prefetch", mine | {missing: None})[0] == 404, "another tenant's"
    assert post(port, "/prefetch", mine) == (202, {"action": "prefetch", "chunks": 6})
    assert one.hits(6, session=session) == 6
    files = len(blob_files(root))
    assert post(port, "/release", mine) == (200, {"action": "release"})
    wait_for(lambda: len(blob_files(root)) == files - 6, "its files")
    assert one.hits(6) == 0
    assert post(port, "/release", mine)[0] == 404
    assert post(port, "/pin", mine | {"ttl": "1h"})[0] == 404


def test_a_salted_prompt_is_another_one(hints, root: Path) -> None:
    one, port = hints
    keys = PrefixKeys(one.client.namespace, CHUNK)
    salted = encode([Salt("pepper")])
    tokens = list(range(2 * CHUNK))
    keys.extend(tokens, lambda index: b"" if index else salted)
    one.store_keys(keys)
    wait_for(lambda: one.hits_of(keys) == 2, "the seals")
    assert post(port, "/pin", {"token_ids": tokens, "ttl": 60})[0] == 404
    assert post(port, "/pin", {"token_ids": tokens, "ttl": 60, "cache_salt": "pepper"})[1]["chunks"] == 2


def test_without_an_engine_a_prompt_has_no_namespace(serve, root: Path, token_file: Path) -> None:
    _, line = serve(f"file://{root}", *LIMITS, "--hints-token-file", token_file)
    for path, body in (("/prefetch", {"token_ids": [1] * CHUNK}), ("/prefetch", {"session_id": "x"})):
        status, answer = post(port_of(line), path, body)
        assert status == 409 and "no engine of this namespace is connected" in answer["error"]


def test_without_a_token_file_nobody_may(serve, root: Path) -> None:
    _, line = serve(f"file://{root}", *LIMITS)
    status, answer = post(port_of(line), "/release", {"session_id": "x"})
    assert status == 403 and "--hints-token-file" in answer["error"]


def test_a_token_that_was_replaced_is_no_longer_taken(serve, root: Path, token_file: Path) -> None:
    """Who leaked one can end that without ending the server, whose host memory would be cold then."""
    process, line = serve(f"file://{root}", *LIMITS, "--hints-token-file", token_file)
    port, other = port_of(line), "another-token-of-16"

    def statuses() -> tuple[int, int]:
        first, second = (post(port, "/release", {"session_id": "x"}, token)[0] for token in (TOKEN, other))
        return first, second

    assert statuses() == (404, 401)  # nothing is known of the session
    new = token_file.with_suffix(".new")
    new.write_text(other)
    new.chmod(0o600)
    new.rename(token_file)
    assert statuses() == (401, 404)
    token_file.chmod(0o644)
    assert statuses() == (503, 503)
    status, answer = post(port, "/release", {"session_id": "x"})
    assert status == 503 and "its log" in answer["error"] and str(token_file) not in answer["error"]
    token_file.chmod(0o600)
    assert statuses() == (401, 404)
    process.terminate()
    log = process.communicate()[1]
    assert log.count("chmod 0600") == 1 and TOKEN not in log and other not in log


@pytest.mark.parametrize(
    ("path", "body", "token", "status", "reason"),
    [
        ("/release", {"session_id": "x"}, None, 401, "Authorization: Bearer"),
        ("/release", {"session_id": "x"}, "another-token-of-16", 401, "Authorization: Bearer"),
        ("/burn", {}, TOKEN, 404, "/prefetch, /pin, /release"),
        ("/release", b"{", TOKEN, 400, "JSON object as documented"),
        ("/release", b"\xff\xfe", TOKEN, 400, "JSON object as documented"),
        ("/release", b"[" * 100_000, TOKEN, 400, "JSON object as documented"),
        ("/release", {}, TOKEN, 400, "expected session_id"),
        ("/release", {"token_ids": [1]}, TOKEN, 400, "expected session_id"),
        ("/release", {"session_id": ""}, TOKEN, 400, "session_id: expected 1 to 256"),
        ("/release", {"session_id": "x", "tag": "y" * 257}, TOKEN, 400, "tag: expected 1 to 256"),
        ("/prefetch", {}, TOKEN, 400, "either session_id or token_ids"),
        ("/prefetch", {"session_id": "x", "token_ids": [1]}, TOKEN, 400, "either session_id or token_ids"),
        ("/prefetch", {"token_ids": [1, 2]}, TOKEN, 400, f"one chunk of {CHUNK}, got 2"),
        ("/prefetch", {"token_ids": [-1]}, TOKEN, 400, "token_ids"),
        ("/prefetch", {"token_ids": [1 << 32]}, TOKEN, 400, "token_ids"),
        ("/prefetch", {"token_ids": ["x"]}, TOKEN, 400, "token_ids"),
        ("/prefetch", {"token_ids": [1], "namespace": "../.."}, TOKEN, 400, "hex digits"),
        ("/prefetch", {"token_ids": [1], "namespace": "0" * 32}, TOKEN, 409, "first digits of one of these"),
        ("/prefetch", {"session_id": "x", "ttl": 5}, TOKEN, 400, "ttl is for /pin"),
        ("/prefetch", {"session_ids": "x"}, TOKEN, 400, "unknown field"),
        ("/pin", {"session_id": "x"}, TOKEN, 400, "expected ttl"),
        ("/pin", {"session_id": "x", "ttl": "soon"}, TOKEN, 400, "ttl: expected a time"),
        ("/pin", {"session_id": "x", "ttl": "8d"}, TOKEN, 400, "ttl: expected at most"),
        ("/pin", {"session_id": "x", "ttl": True}, TOKEN, 400, "JSON object as documented"),
        ("/pin", {"session_id": "x", "ttl": "5m"}, TOKEN, 404, "nothing is known"),
    ],
)
def test_what_cannot_be_done_is_told(
    shared_hints: int, path: str, body: object, token: str | None, status: int, reason: str
) -> None:
    answered, answer = post(shared_hints, path, body, token)
    assert answered == status and reason in answer["error"], answer


@pytest.fixture(scope="module")
def shared_hints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server with an engine that all tests of errors share."""
    from tests.kit.server.processes import start_serve

    place = tmp_path_factory.mktemp("shared")
    token = place / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    process, line = start_serve(f"file://{place}/cache", *LIMITS, "--hints-token-file", token)
    config = settings(place / "cache", host_bytes=None, disk_bytes=None)
    try:
        with closing(SmallEngine.start(config)):
            yield port_of(line)
    finally:
        process.kill()
        process.communicate()


def test_bodies_are_bounded_and_are_not_read_before_it_is_known_who_asks(shared_hints: int) -> None:
    for length, expected in (
        (str(BODY_BYTES_MAX + 1), 413),
        ("9" * 5000, 413),
        ("-1", 411),
        ("many", 411),
        (None, 411),
    ):
        with socket.create_connection(("127.0.0.1", shared_hints), timeout=30) as sock:
            line = b"" if length is None else f"Content-Length: {length}\r\n".encode()
            sock.sendall(b"POST /release HTTP/1.1\r\n" + f"Authorization: Bearer {TOKEN}\r\n".encode() + line + b"\r\n")
            assert sock.recv(64).split()[1] == str(expected).encode()
    with socket.create_connection(("127.0.0.1", shared_hints), timeout=30) as sock:
        sock.sendall(b"POST /release HTTP/1.1\r\nContent-Length: 100000\r\n\r\n")
        assert sock.recv(64).split()[1] == b"401"
    status, answer = post(shared_hints, "/prefetch", {"token_ids": [1] * 500_000})
    assert status == 202, answer


def test_who_sends_all_of_a_body_before_it_reads_hears_why_it_was_refused(shared_hints: int) -> None:
    body = b" " * BODY_BYTES_MAX
    with socket.create_connection(("127.0.0.1", shared_hints), timeout=30) as sock:
        sock.sendall(b"POST /release HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert sock.recv(64).split()[1] == b"401"


def test_refusals_are_counted(shared_hints: int) -> None:
    def refused() -> int:
        connection = http.client.HTTPConnection("127.0.0.1", shared_hints, timeout=30)
        with closing(connection):
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        (line,) = [one for one in text.splitlines() if 'event="hint_requests_refused"' in one]
        return int(float(line.rpartition(" ")[2]))

    before = refused()
    post(shared_hints, "/release", {})
    post(shared_hints, "/release", {}, None)
    assert refused() == before + 2


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [("short", 0o600, "16 to 1024 characters"), (TOKEN, 0o644, "chmod 0600"), (None, 0, "cannot read")],
)
def test_a_bad_token_file_is_a_wrong_setting(
    cli, root: Path, tmp_path: Path, content: str | None, mode: int, reason: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    done: subprocess.CompletedProcess[str] = cli("serve", f"file://{root}", *LIMITS, "--hints-token-file", path)
    assert done.returncode == 2 and "option --hints-token-file" in done.stderr and reason in done.stderr
    assert not root.exists() and TOKEN not in done.stderr


def test_hints_need_the_port(cli, root: Path, token_file: Path) -> None:
    done = cli("serve", f"file://{root}", "--hints-token-file", token_file)
    assert done.returncode == 2 and "--metrics-port" in done.stderr
