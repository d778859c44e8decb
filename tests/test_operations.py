"""docs/operations.md is true: its JSON is accepted, its messages and request counts come from a real server."""

import json
import re
import socket
from pathlib import Path

import pytest

from tests.kit.faults.proxy import Fault, FaultProxy, Mode
from tests.kit.s3 import S3
from tests.kit.samples.formats import golden_geometry
from tiered_kv.chunks.header import BlobFormat
from tiered_kv.config import Config
from tiered_kv.errors import TierUnavailable
from tiered_kv.fleet.timing import Timing
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.naming import BlobName
from tiered_kv.location import parse_location
from tiered_kv.tiers.object.errors import BadKeyFile, NoGoogleKeys, NoIdentity, explain
from tiered_kv.tiers.object.store import ObjectStore
from tiered_kv.tiers.object.tier import ObjectTier
from tiered_kv.tiers.wrappers import breaker

NAMESPACE = bytes(range(16))


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / "operations.md").read_text()


def blocks(page: str) -> list[dict]:
    return [json.loads(block) for block in re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)]


def promised(page: str) -> set[str]:
    """The texts of the table of messages."""
    table = page[page.index("| The message has |") : page.index("## Capacity and age")]
    return set(re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE))


def test_configurations_shown_are_valid(page: str) -> None:
    shown = [block for block in blocks(page) if "kv_connector" in block]
    configs = [Config.from_mapping(block["kv_connector_extra_config"]) for block in shown]

    assert {config.location().scheme for config in configs} == {"s3", "gs", "az", "shared+file", "mooncake"}
    assert all(block["kv_connector"] == "TieredKVConnector" and block["kv_role"] == "kv_both" for block in shown)


def test_compose_configuration_reaches_the_server_of_the_compose_file(page: str, repository: Path) -> None:
    defaults = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", (repository / "docker-compose.yml").read_text()))
    (config,) = [
        Config.from_mapping(block["kv_connector_extra_config"])
        for block in blocks(page)
        if "tiered-kv-secret" in json.dumps(block)
    ]
    options = config.location().options

    assert config.location().path.startswith(f"{defaults['TIERED_KV_BUCKET']}/")
    assert options["endpoint_url"] == f"http://127.0.0.1:{defaults['TIERED_KV_MINIO_PORT']}"
    assert (options["key"], options["secret"]) == (defaults["MINIO_ROOT_USER"], defaults["MINIO_ROOT_PASSWORD"])


def test_policy_allows_four_actions_below_the_prefix(page: str) -> None:
    (policy,) = [block for block in blocks(page) if "Statement" in block]
    objects, bucket = policy["Statement"]

    assert objects["Action"] == ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"]
    assert objects["Resource"] == "arn:aws:s3:::my-bucket/kv/*"
    assert bucket["Action"] == "s3:ListBucket"
    assert bucket["Resource"] == "arn:aws:s3:::my-bucket"


def test_numbers_are_those_of_the_code(page: str) -> None:
    pace, text = Timing(), " ".join(page.split())
    for fact in (
        f"down to {pace.low_water:.0%} of the limit".replace("%", " %"),
        f"up to {pace.delete_batch} blobs",
        f"at most every {pace.pass_s / 60:.0f} minutes",
        f"expire in {pace.expiry_s:.0f} s",
        f"for {breaker.OPEN_FIRST_S:.0f} s at first, up to {breaker.OPEN_LAST_S:.0f} s",
        f"within `storage_timeout_s` ({Config(storage_uri='memory://x').storage_timeout_s:.0f} s)",
    ):
        assert fact in text, fact
    assert breaker.FAILURES_MAX == 5
    assert "Five failures in a row" in text


# --- messages --------------------------------------------------------------------------------------------------------


def failure(s3: S3, prefix: str, timeout_s: float = 30.0, **changes: object) -> str:
    """What a put says against the server, with other options."""
    uri = changes.pop("uri", s3.uri(prefix))
    options = {**s3.options(), **changes}
    store = ObjectStore(parse_location(str(uri), options), timeout_s=timeout_s)
    try:
        with pytest.raises(TierUnavailable) as caught:
            store.put("x", b"data")
    finally:
        store.close()
    assert s3.secret_key not in str(caught.value)
    return str(caught.value)


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_messages_of_wrong_settings(s3: S3, page: str) -> None:
    prefix = s3.new_prefix()
    said = {
        "the secret does not fit the key": failure(s3, prefix, secret="x" * 40),
        "it does not know the access key": failure(s3, prefix, key="nobody"),
        "there is no bucket": failure(s3, prefix, uri="s3://no-such-bucket-here/p"),
        "the connection was refused": failure(s3, prefix, endpoint_url=f"http://127.0.0.1:{unused_port()}"),
        "the file that the option": failure(s3, prefix, verify="/no/such/ca.pem"),
        "the TLS connection failed": failure(s3, prefix, endpoint_url=s3.endpoint_url.replace("http:", "https:")),
        "the store's host name is not known here (DNS)": failure(
            s3, prefix, endpoint_url="http://no-such-host.invalid:9000"
        ),
    }
    for words, message in said.items():
        assert words in message
        assert words in promised(page)
    assert s3.paths(prefix) == []


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("the store refuses these credentials", Fault(Mode.STATUS, status=403)),
        ("the store asks for fewer requests", Fault(Mode.STATUS, status=503)),
        ("the store failed inside", Fault(Mode.STATUS, status=500)),
        ("the store did not answer in time", Fault(Mode.SILENCE)),
        ("the connection was cut", Fault(Mode.RESET)),
    ],
)
def test_messages_of_a_failing_server(s3: S3, page: str, words: str, fault: Fault) -> None:
    with FaultProxy(s3.endpoint_url) as proxy:
        proxy.set(fault)
        timeout_s = 5.0 if fault.mode is Mode.SILENCE else 30.0
        message = failure(s3, s3.new_prefix(), timeout_s=timeout_s, endpoint_url=proxy.url)

    assert words in message
    assert words in promised(page)


def test_message_of_an_answer_that_breaks_off(s3: S3, page: str) -> None:
    words = "the answer ended before all of its bytes came"
    with FaultProxy(s3.endpoint_url) as proxy:
        store = ObjectStore(parse_location(s3.uri(s3.new_prefix()), s3.options(proxy.url)), timeout_s=30.0)
        store.put("x", b"data" * 10_000)
        proxy.set(Fault(Mode.TRUNCATE))
        with pytest.raises(TierUnavailable, match=words):
            store.get("x")
        store.close()

    assert words in promised(page)


class Refused(Exception):
    """As botocore raises what a store answers."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 400}}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("ExpiredToken", "the credentials have expired"),
        ("PermanentRedirect", "the bucket is in another region"),
        ("301", "sends requests elsewhere"),
        ("RequestTimeTooSkewed", "this machine's clock is too far from the store's"),
        ("QuotaExceeded", "the store has no room left"),
        ("407", "the proxy that"),
    ],
)
def test_messages_that_only_a_real_service_sends(page: str, code: str, words: str) -> None:
    assert words in explain(Refused(code), "bucket")
    assert words in promised(page)


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (FileNotFoundError(2, "No such file", "/token"), "credentials could not be fetched"),
        (Refused("AccessDenied"), "what gives credentials refuses"),
        (TimeoutError(), "the client or its credentials did not come in time"),
        (NoGoogleKeys(), "so it was asked without any"),
        (BadKeyFile(), "the file that the option token names has no key"),
    ],
)
def test_messages_of_what_gives_credentials(page: str, cause: Exception, words: str) -> None:
    assert words in explain(NoIdentity(cause), "bucket")
    assert words in promised(page)


def test_message_of_an_address_that_no_client_can_use(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:hidden@localhost:9")
    words = "the address in AWS_ENDPOINT_URL"
    store = ObjectStore(parse_location("s3://bucket/p", {"key": "k", "secret": "s", "region": "x"}))
    with pytest.raises(TierUnavailable, match=words):
        store.get("x")
    store.close()
    assert words in promised(page)


def test_every_message_of_the_page_is_provoked_here(page: str) -> None:
    tests = Path(__file__).read_text()
    assert len(promised(page)) > 10
    assert promised(page) <= set(re.findall(r'"([^"\n]+)"', tests))


def test_message_of_missing_credentials(s3: S3, page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = ObjectStore(parse_location(s3.uri("x"), {"endpoint_url": s3.endpoint_url}), timeout_s=30.0)
    with pytest.raises(TierUnavailable, match="no credentials were found"):
        store.put("x", b"data")
    store.close()

    assert "no credentials were found" in promised(page)


# --- requests --------------------------------------------------------------------------------------------------------


def test_operations_cost_the_requests_the_page_says(s3: S3, page: str) -> None:
    form = BlobFormat(NAMESPACE, golden_geometry())
    blob = memoryview(bytearray(form.blob_bytes))
    names = [BlobName(NAMESPACE, bytes([i]) * 16, NAMESPACE, 0) for i in range(2)]
    for name in names:
        form.seal(blob, ChunkRecord(NAMESPACE, name.key, NAMESPACE, 0, bytes(32)), 0)
    with FaultProxy(s3.endpoint_url) as proxy:
        tier = ObjectTier(ObjectStore(parse_location(s3.uri(s3.new_prefix()), s3.options(proxy.url))))

        def cost(work) -> dict[str, int]:
            proxy.forget()
            work()
            return proxy.counts()

        first = cost(lambda: tier.put(names[0], blob))
        assert first == {"PUT": 3, "DELETE": 1}
        assert "once 2 PUT and 1 DELETE" in page
        assert cost(lambda: tier.put(names[1], blob)) == {"PUT": 1}
        assert "| put of a blob | 1 PUT |" in page
        assert cost(lambda: tier.get_into(names[1], blob)) == {"GET": 1}
        assert cost(lambda: tier.get_into(BlobName(NAMESPACE, b"m" * 16, NAMESPACE, 0), blob)) == {"GET": 1}
        assert "| get of a blob, there or not | 1 GET |" in page
        assert cost(lambda: tier.contains(names[1])) == {"HEAD": 1}
        assert "| is it there? | 1 HEAD |" in page
        assert cost(lambda: tier.delete(names[1])) == {"HEAD": 1, "DELETE": 1}
        assert "| deletion by a tool | 1 HEAD, 1 DELETE |" in page
        tier.close()
