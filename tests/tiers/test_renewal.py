"""Credentials that end while a store is used, with services that give them, then fail, and are there again."""

import asyncio
import json
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from tests.kit.raw_server import Asked, RawServer, refusal
from tests.kit.server.probe import wait_for
from tiered_kv.errors import TierUnavailable
from tiered_kv.location import parse_location
from tiered_kv.tiers.object.errors import NoIdentity
from tiered_kv.tiers.object.loop_client import run_on_loop
from tiered_kv.tiers.object.renewal import Renewal, identifying
from tiered_kv.tiers.object.store import ObjectStore

AT_ONCE: Final = 12
LATE: Final = "the client or its credentials did not come in time"
BEFORE_S: Final = 250
"""Of a token that still counts, and that Google's and Azure's clients would not use without asking for another."""


def answer(status: int, body: object = b"", **headers: str) -> bytes:
    """An answer in JSON, or as it is."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Said", f"Content-Length: {len(data)}", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + data


class TokenService:
    """Google's metadata server and Azure's, which give tokens until they are told to hang.

    Attributes:
        lifetime_s: Of the tokens it gives.
        unanswered_count: Questions that hang or hung.
    """

    def __init__(self) -> None:
        self.lifetime_s = BEFORE_S
        self.unanswered_count = 0
        self.works = threading.Event()
        self.works.set()

    def __call__(self, asked: Asked) -> bytes | None:
        if not self.works.is_set():
            self.unanswered_count += 1
            self.works.wait(600)
        target, ours = asked.line.split()[1], {"Metadata_Flavor": "Google"}
        if "token" in target:
            ends = str(int(time.time()) + self.lifetime_s)
            given = {"access_token": "t", "token_type": "Bearer", "expires_in": self.lifetime_s, "expires_on": ends}
            return answer(200, given | {"resource": "https://storage.azure.com"}, **ours)
        if "service-accounts" in target:
            return answer(200, {"email": "a@b", "scopes": [], "aliases": []}, **ours)
        return answer(200, b"googleapis.com" if "universe" in target else b"project", **ours)


def holds_nothing(asked: Asked) -> bytes:
    """What a bucket of Google's or a container of Azure's says of any object."""
    asked.read_body()
    if asked.headers["Authorization"] is None:
        return answer(401, {"error": {"code": 401, "message": "Anonymous caller does not have access"}})
    if "x-ms-version" in asked.headers:
        return answer(404, x_ms_error_code="BlobNotFound")
    return answer(404, {"error": {"code": 404, "message": "No such object"}})


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment in which nothing says who asks."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "GCE_", "AZURE_", "CLOUDSDK_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    serve_google(monkeypatch, "127.0.0.1:9")


def serve_google(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Name a metadata server, as GCE_METADATA_HOST would have before Google's client was imported."""
    monkeypatch.setattr("google.auth.compute_engine._metadata._GCE_METADATA_HOST", host)
    monkeypatch.setenv("GCE_METADATA_IP", host)


@contextmanager
def google(monkeypatch: pytest.MonkeyPatch, service: TokenService, timeout_s: float) -> Iterator[ObjectStore]:
    with RawServer(holds_nothing) as bucket, RawServer(service) as metadata:
        serve_google(monkeypatch, metadata.url.removeprefix("http://"))
        try:
            yield ObjectStore(parse_location("gs://bucket/p", {"endpoint_url": bucket.url}), timeout_s=timeout_s)
        finally:
            service.works.set()


@contextmanager
def azure(
    monkeypatch: pytest.MonkeyPatch,
    service: TokenService,
    timeout_s: float,
    certificate: tuple[str, str],
    say: Callable[[Asked], bytes] = holds_nothing,
) -> Iterator[ObjectStore]:
    """Azure's client gives tokens to nobody without TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    trusted = ssl.create_default_context(cafile=certificate[0])
    monkeypatch.setattr("aiohttp.connector._SSL_CONTEXT_VERIFIED", trusted)  # made when it was imported
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "ManagedIdentityCredential")
    with RawServer(say, context) as container, RawServer(service) as metadata:
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", metadata.url)
        options = {"account_name": "a", "account_host": container.url.removeprefix("https://")}
        try:
            yield ObjectStore(parse_location("az://container/p", options), timeout_s=timeout_s)
        finally:
            service.works.set()


@pytest.fixture(params=["gs", "az"])
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, nobody: None) -> Callable[..., Any]:
    """Opens a store whose service gives tokens."""
    monkeypatch.setattr("tiered_kv.tiers.object.renewal.FRESH_S", -1.0)
    if request.param == "gs":
        return lambda service, timeout_s: google(monkeypatch, service, timeout_s)
    certificate = request.getfixturevalue("certificate")
    return lambda service, timeout_s: azure(monkeypatch, service, timeout_s, certificate)


def is_answered(store: ObjectStore) -> bool:
    try:
        return store.get("x") is None
    except TierUnavailable:
        return False


def said_at_once(store: ObjectStore) -> list[str]:
    """What several reads say that are made together, as at a server's start."""

    def read(number: int) -> str:
        try:
            store.get_into(f"x{number}", memoryview(bytearray(4)))
        except TierUnavailable as exc:
            return str(exc)
        return "nothing"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(read, range(AT_ONCE)))


def test_a_token_is_used_until_it_expires_where_nobody_gives_another(opened: Callable[..., Any]) -> None:
    """Both clients wait for another in the last five minutes, Google's with all other calls of the process."""
    service = TokenService()
    with opened(service, 20.0) as store:
        assert is_answered(store)
        service.works.clear()
        wait_for(lambda: is_answered(store) and service.unanswered_count > 0, "another question for a token")
        assert [store.get("x"), store.get("y"), list(map(store.head, "abc"))] == [None, None, [None] * 3]
        store.close()


def test_a_service_that_hangs_is_not_taken_for_the_store(opened: Callable[..., Any]) -> None:
    service = TokenService()
    service.lifetime_s = 1
    with opened(service, 10.0) as store:
        wait_for(lambda: is_answered(store), "a first answer", deadline_s=120.0)
        service.works.clear()
        wait_for(lambda: not is_answered(store), "the end of the token")
        assert [said for said in said_at_once(store) if LATE not in said] == []
        service.lifetime_s = 3600
        service.works.set()
        wait_for(lambda: is_answered(store), "an answer with the next token", deadline_s=120.0)
        store.close()


def test_a_service_that_hangs_behind_a_challenge_is_not_taken_for_the_store(
    nobody: None, monkeypatch: pytest.MonkeyPatch, certificate: tuple[str, str]
) -> None:
    """Azure's client asks for a token of the tenant that the store names, and gives the store's 401 as the reason."""
    service = TokenService()
    service.lifetime_s = 2
    tenant = "Bearer authorization_uri=https://login.microsoftonline.com/t/oauth2/authorize"

    def challenge(asked: Asked) -> bytes:
        asked.read_body()
        service.works.clear()
        ends_s = time.time() + service.lifetime_s  # Azure's client would give the token once more until then
        wait_for(lambda: time.time() > ends_s, "the end of the token")
        return answer(401, WWW_Authenticate=f"{tenant} resource_id=https://storage.azure.com")

    with azure(monkeypatch, service, 10.0, certificate, challenge) as store:
        with pytest.raises(TierUnavailable, match=LATE):
            store.get("x")
        assert service.unanswered_count == 1
        store.close()


def test_a_program_that_hangs_is_not_taken_for_the_store(
    nobody: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text("[default]\ncredential_process = sleep 600\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with RawServer(holds_nothing) as server:
        store = ObjectStore(parse_location("s3://bucket/p", {"endpoint_url": server.url}), timeout_s=6.0)
        assert [said for said in said_at_once(store) if LATE not in said] == []
        assert server.asked == []
        store.close()


def test_a_call_that_waits_for_credentials_on_a_loop_that_stands_still_is_told_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a machine that is busy: what ends such a wait before the call's own end comes too late then."""
    loop, has_begun, goes_on = asyncio.new_event_loop(), threading.Event(), threading.Event()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    run = asyncio.run_coroutine_threadsafe

    def run_until_it_waits(*given: Any) -> Any:
        future = run(*given)
        assert has_begun.wait(60)
        return future

    def stand_still() -> None:
        has_begun.set()
        assert goes_on.wait(60)

    async def wait_for_credentials() -> None:
        async with identifying():
            stand_still()

    async def wait_for_the_store() -> None:
        async with identifying():
            pass
        stand_still()

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", run_until_it_waits)
    try:
        for call, error in ((wait_for_credentials, NoIdentity), (wait_for_the_store, TimeoutError)):
            with pytest.raises(error):
                run_on_loop(loop, call(), 0.1)
            goes_on.set()
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(60)
            has_begun.clear()
            goes_on.clear()
    finally:
        goes_on.set()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_where_google_s_client_finds_nobody_it_is_said(nobody: None, tmp_path: Path) -> None:
    """It asks without credentials then, and the store's refusal reads as if there had been some."""
    with RawServer(holds_nothing) as bucket, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "gone"))
        store = ObjectStore(parse_location("gs://bucket/p", {"endpoint_url": bucket.url}), timeout_s=20.0)
        for call in (lambda: store.get("x"), lambda: store.head("x"), lambda: store.put("x", b"x")):
            with pytest.raises(TierUnavailable, match="no credentials were found, so it was asked without any"):
                call()
        store.close()


@pytest.mark.parametrize("content", ["", '{"type": "service_account", "pri', "{}", '{"type": "external_account"}'])
def test_a_file_that_has_no_key_of_google_s_is_said(nobody: None, tmp_path: Path, content: str) -> None:
    token = tmp_path / "token.json"
    token.write_text(content)
    store = ObjectStore(parse_location("gs://bucket/p", {"token": str(token)}), timeout_s=20.0)
    with pytest.raises(TierUnavailable, match="the file that the option token names has no key"):
        store.get("x")
    store.close()


def test_a_program_that_is_gone_when_a_request_is_sent_again_is_no_missing_object(
    nobody: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """botocore signs each try anew: with credentials that ended meanwhile the program's absence was the object's."""
    program, ends_s = tmp_path / "program", int(time.time()) + 12
    given = {"Version": 1, "AccessKeyId": "AKIA", "SecretAccessKey": "hidden"}
    given |= {"Expiration": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(ends_s))}
    program.write_text(f"#!/bin/sh\necho '{json.dumps(given)}'\n")
    program.chmod(0o700)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {program}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")

    def fail_once_they_end(asked: Asked) -> bytes:
        program.unlink(missing_ok=True)
        wait_for(lambda: time.time() > ends_s, "the end of the credentials")
        return refusal(503, "SlowDown")

    with RawServer(fail_once_they_end) as server:
        store = ObjectStore(parse_location("s3://bucket/p", {"endpoint_url": server.url}), timeout_s=40.0)
        with pytest.raises(TierUnavailable, match="credentials could not be fetched: .*program"):
            assert store.head("x") is not None, "an object that nobody asked for"
        store.close()


def test_what_had_expired_when_it_was_given_is_not_asked_for_with_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service whose clock is behind ours gives such, and its store takes them."""
    monkeypatch.setattr("tiered_kv.tiers.object.renewal.ENDING_FRESH_S", 3600.0)
    asked = []

    async def ask() -> str:
        asked.append(None)
        return "token"

    async def use() -> None:
        renewal = Renewal(ask, lambda _token, _seconds: True)
        for _ in range(50):
            assert await renewal.current() == "token"

    asyncio.run(use())
    assert len(asked) == 1


def test_a_call_does_not_chase_tokens_that_have_expired_whenever_they_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine whose clock is ahead, and a tenant's challenge: while one was fetched the other was over, for ever."""
    azure = pytest.importorskip("tiered_kv.tiers.object.azure")
    monkeypatch.setattr("tiered_kv.tiers.object.renewal.ENDING_FRESH_S", 0.0)
    loop, sent = asyncio.new_event_loop(), []

    class Found:
        get_token = close = None

        async def get_token_info(self, *_: object, **__: object) -> SimpleNamespace:
            return SimpleNamespace(token="token", expires_on=time.time() - 100)

    tokens = azure._SeldomTokens(Found())

    async def ask() -> str:
        for options in ({}, {"tenant_id": "of the challenge"}):
            await tokens.get_token_info("storage", options=options)
            sent.append(options)
        return "answered"

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        assert run_on_loop(loop, azure._ask(ask), 10.0) == "answered"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    assert [bool(options) for options in sent] == [False, False, True]


def test_what_has_expired_since_it_was_given_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.tiers.object.renewal.ENDING_FRESH_S", 3600.0)
    given, over = iter(["first", "second"]), set()

    async def ask() -> str:
        return next(given)

    async def use() -> None:
        renewal = Renewal(ask, lambda token, seconds: token in over or seconds > 0)
        assert await renewal.current() == await renewal.current() == "first"
        over.add("first")
        assert await renewal.current() == "second"

    asyncio.run(use())
