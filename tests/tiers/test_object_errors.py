"""What goes wrong with an object store is told in words that say what to do."""

import errno
import socket
import ssl
import time
from email.utils import formatdate

import pytest
from aiohttp import ClientPayloadError, ServerDisconnectedError
from botocore import exceptions as boto
from s3fs.errors import translate_boto_error

from tests.kit.missing import needed
from tests.kit.raw_server import RawServer
from tiered_kv.errors import TierUnavailable
from tiered_kv.location import parse_location
from tiered_kv.tiers.object.errors import (
    IncompleteRead,
    NoIdentity,
    code_of,
    explain,
    is_conflict,
    is_full,
    is_missing,
    is_of_identity,
    is_taken,
    is_without_create,
    status_of,
)
from tiered_kv.tiers.object.store import ObjectStore


def answered(code, status=400, message="words of the store", **more):
    """What s3fs raises for an error the store answered with."""
    response = {
        "Error": {"Code": code, "Message": message, **more},
        "ResponseMetadata": {"HTTPStatusCode": status, "RetryAttempts": 0},
    }
    return translate_boto_error(boto.ClientError(response, "GetObject"))


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        (
            "InvalidAccessKeyId",
            403,
            "refuses these credentials: it does not know the access key; check AWS_ACCESS_KEY_ID",
        ),
        ("SignatureDoesNotMatch", 403, "refuses these credentials: the secret does not fit the key; check AWS_SECRET"),
        ("AccessDenied", 403, "refuses these credentials; check the key and that it may get, put, delete and list"),
        ("403", 403, "refuses these credentials; check the key"),
        ("SomethingNew", 403, "refuses these credentials; check the key"),
        ("ExpiredToken", 400, "the credentials have expired; renew them"),
        ("InvalidToken", 400, "refuses the session token; check AWS_SESSION_TOKEN"),
        ("InvalidTokenId", 403, "refuses the session token; check AWS_SESSION_TOKEN"),
        ("400", 400, "often because the credentials have expired"),
        ("RequestTimeTooSkewed", 403, "clock is too far from the store's; set the clock"),
        ("NoSuchBucket", 404, "there is no bucket 'bkt'; create it (e.g. `aws s3 mb s3://bkt`) or mend storage_uri"),
        ("InvalidBucketName", 400, "no name for a bucket"),
        ("PermanentRedirect", 301, "the bucket is in another region; set the option region"),
        ("AuthorizationHeaderMalformed", 400, "the bucket is in another region"),
        ("SlowDown", 503, "asks for fewer requests"),
        ("503", 503, "asks for fewer requests"),
        ("ServiceUnavailable", 503, "asks for fewer requests"),
        ("Throttling", 429, "asks for fewer requests"),
        ("InternalError", 500, "the store failed inside (HTTP 500 InternalError)"),
        ("502", 502, "the store failed inside (HTTP 502 502)"),
        ("GatewayTimeout", 504, "the store failed inside (HTTP 504 GatewayTimeout)"),
        ("NotImplemented", 501, "does not know this kind of request"),
        ("QuotaExceeded", 403, "no room left"),
        ("XMinioStorageFull", 507, "no room left"),
        ("ConditionalRequestConflict", 409, "another writer was at the same object"),
        ("407", 407, "the proxy that HTTPS_PROXY or HTTP_PROXY names wants a user"),
        ("RequestTimeout", 400, "gave up waiting for the request's bytes"),
    ],
)
def test_an_answer_of_the_store_is_put_into_words(code, status, expected):
    error = answered(code, status)
    assert code_of(error) == code and status_of(error) == status
    assert expected in explain(error, "bkt")


@pytest.mark.parametrize(
    ("off_s", "expected"),
    [(3600.0, "clock is too far from the store's"), (-3600.0, "clock is too far"), (60.0, "refuses these credentials")],
)
def test_a_head_that_is_refused_for_the_clock_says_so(off_s, expected):
    """Its answer has no body, so only the date in it tells."""
    said = formatdate(time.time() + off_s, usegmt=True)
    forbidden = f"HTTP/1.1 403 Forbidden\r\nDate: {said}\r\nContent-Length: 0\r\n\r\n".encode()
    with RawServer(lambda _: forbidden) as server:
        location = parse_location("s3://bucket/p", {"endpoint_url": server.url, "key": "k", "secret": "s"})
        store = ObjectStore(location)
        with pytest.raises(TierUnavailable, match=expected):
            store.head("x")
        store.close()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (boto.NoCredentialsError(), "no credentials were found; set AWS_ACCESS_KEY_ID"),
        (boto.PartialCredentialsError(provider="env", cred_var="x"), "key and secret belong together"),
        (boto.ProfileNotFound(profile="p"), "there is no such profile"),
        (boto.NoRegionError(), "no region is known; set the option region"),
        (boto.ConnectTimeoutError(endpoint_url="http://h"), "did not answer in time"),
        (boto.ReadTimeoutError(endpoint_url="http://h"), "did not answer in time"),
        (TimeoutError(), "did not answer in time"),
        (boto.ConnectionClosedError(endpoint_url="http://h"), "the connection was cut"),
        (ConnectionResetError(errno.ECONNRESET, "reset by peer"), "the connection was cut"),
        (ServerDisconnectedError(), "the connection was cut"),
        (BrokenPipeError(errno.EPIPE, "pipe"), "the connection was cut"),
        (
            ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
            "nothing listens there; check endpoint_url, that the store runs, and the proxy",
        ),
        (socket.gaierror(-2, "Name or service not known"), "host name is not known here (DNS)"),
        (ssl.SSLCertVerificationError("self-signed"), "the TLS connection failed"),
        (boto.SSLError(endpoint_url="https://h", error="bad"), "the TLS connection failed"),
        (boto.EndpointConnectionError(endpoint_url="http://h"), "the store cannot be reached"),
        (
            caused(boto.EndpointConnectionError(endpoint_url="http://h"), socket.gaierror(-2, "unknown")),
            "host name is not known here (DNS)",
        ),
        (
            boto.EndpointConnectionError(endpoint_url="http://h", error=ConnectionRefusedError(111, "refused")),
            "nothing listens there",
        ),
        (
            caused(
                boto.EndpointConnectionError(endpoint_url="http://h"),
                OSError("Multiple exceptions: Connect call failed"),
            ),
            "nothing listens there",
        ),
        (ClientPayloadError("Response payload is not completed"), "ended before all of its bytes came"),
        (caused(ClientPayloadError("cut"), ConnectionResetError(104, "reset")), "ended before all of its bytes came"),
        (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), "ended before all of its bytes came"),
        (IncompleteRead("observed=1 expected=2"), "ended before all of its bytes came"),
        (OSError(errno.ENOSPC, "No space left on device"), "no room left"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "no room left"),
        (FileNotFoundError(errno.ENOENT, "No such file"), "check that it is mounted"),
        (PermissionError(errno.EACCES, "Permission denied"), "the store refuses this: Permission denied"),
        (OSError(errno.ESTALE, "Stale file handle"), "OSError: Stale file handle"),
        (ValueError("x" * 1000 + "\nsecond line"), "ValueError: xxx"),
        (RuntimeError(), "RuntimeError: no text"),
    ],
)
def test_what_fails_on_the_way_is_put_into_words(error, expected):
    words = explain(error, "bkt")
    assert expected in words
    assert len(words) < 300 and "\n" not in words


@pytest.mark.parametrize(
    "error",
    [
        answered("ExpiredToken"),
        answered("InvalidAccessKeyId", 403),
        answered("SignatureDoesNotMatch", 403),
        answered("InvalidTokenId", 403),
        answered("Whatever", 401),
        answered("403", 403),
        answered("400"),
        boto.NoCredentialsError(),
        caused(OSError("on the way"), boto.CredentialRetrievalError(provider="p", error_msg="x")),
        boto.SSLError(endpoint_url="https://h", error="bad"),
        ssl.SSLCertVerificationError("self-signed"),
    ],
    ids=lambda error: f"{code_of(error)} {type(error).__name__}",
)
def test_what_other_credentials_may_mend_is_told(error):
    assert is_of_identity(error)


@pytest.mark.parametrize(
    "error",
    [
        answered("AccessDenied", 403),
        answered("SlowDown", 503),
        TimeoutError(),
        OSError(),
        boto.SSLError(endpoint_url="https://h", error=ssl.SSLEOFError("cut")),
        caused(ConnectionError("on the way"), ssl.SSLZeroReturnError("ended")),
    ],
    ids=lambda error: f"{code_of(error)} {type(error).__name__}",
)
def test_what_a_policy_or_a_bad_network_says_asks_for_no_other_client(error):
    assert not is_of_identity(error)


def test_a_loop_of_causes_ends():
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert explain(one, "b") == "ValueError: one"


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (answered("ExpiredTokenException"), "the credentials have expired"),
        (RuntimeError("Credentials were refreshed, but the refreshed credentials are still expired."), "have expired"),
        (answered("AccessDenied", 403), "what gives credentials refuses (AccessDenied); check the role"),
        (boto.CredentialRetrievalError(provider="p", error_msg="hidden"), "could not be fetched; check the profile"),
        (
            boto.SSOTokenLoadError(error_msg="hidden"),
            "the credentials have expired, or nobody has logged in: run `aws sso",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file", "/token"), "fetched: /token: No such file; check the profile"),
        (boto.ConnectTimeoutError(endpoint_url="http://h"), "the client or its credentials did not come in time"),
        (TimeoutError(), "the client or its credentials did not come in time"),
        (ValueError("no JSON"), "the client or its credentials could not be had: ValueError: no JSON"),
    ],
)
def test_what_keeps_us_from_asking_is_put_into_words_and_is_no_answer_of_the_store(cause, expected):
    error = NoIdentity(cause)
    words = explain(error, "bkt")
    assert expected in words and "hidden" not in words
    assert is_of_identity(error) is not isinstance(cause, TimeoutError), "a new client would only ask from the start"
    assert code_of(error) == "" and status_of(error) is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (answered("NoSuchKey", 404), True),
        (answered("404", 404), True),
        (FileNotFoundError("x"), True),
        (IsADirectoryError(errno.EISDIR, "x"), True),
        (NotADirectoryError(errno.ENOTDIR, "x"), True),
        (answered("NoSuchBucket", 404), False),
        (answered("AccessDenied", 403), False),
        (OSError(errno.EIO, "x"), False),
        (ConnectionResetError(), False),
    ],
)
def test_only_a_missing_object_is_missing(error, expected):
    assert is_missing(error) == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (answered("PreconditionFailed", 412), True),  # radosgw: OSError(EINVAL)
        (answered("PreconditionFailed", 412, Condition="If-None-Match"), True),  # AWS: FileExistsError
        (answered("412", 412), True),
        (FileExistsError("x"), True),
        (answered("InvalidArgument", 400), False),
        (answered("ConditionalRequestConflict", 409), False),
        (OSError(errno.EINVAL, "x"), False),
    ],
)
def test_a_refused_create_is_told_from_other_errors(error, expected):
    assert is_taken(error) == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (answered("NotImplemented", 501), True),
        (NotImplementedError("exclusive write"), True),
        (OSError(errno.ENOTSUP, "link"), True),
        (TypeError("got an unexpected keyword argument 'mode'"), True),
        (TypeError("something else"), False),
        (PermissionError(errno.EPERM, "link"), True),
        (PermissionError(errno.EACCES, "link"), False),
        (answered("AccessDenied", 403), False),
        (answered("PreconditionFailed", 412), False),
        (TimeoutError(), False),
    ],
)
def test_a_store_that_knows_no_create_is_told_from_one_that_refuses(error, expected):
    assert is_without_create(error) == expected


def test_conflicts_and_full_stores_are_recognised():
    assert is_conflict(answered("ConditionalRequestConflict", 409)) and not is_conflict(answered("NoSuchKey", 404))
    assert is_full(answered("QuotaExceeded", 403)) and is_full(OSError(errno.ENOSPC, "x"))
    assert not is_full(answered("AccessDenied", 403)) and not is_full(OSError(errno.EIO, "x"))


def test_secrets_inside_a_message_are_taken_out():
    options = {
        "key": "AKIAEXAMPLE",
        "secret": "AKIAEXAMPLE/longer",
        "client_kwargs": {"aws_session_token": "tokentoken"},
    }
    store = ObjectStore(parse_location("s3://b/p", options))
    text = "Credential=AKIAEXAMPLE secret AKIAEXAMPLE/longer at https://user:pw@host/x?X-Amz-Signature=abc tokentoken"
    assert store._scrub(text) == "Credential=*** secret *** at https://***host/x*** ***"


def test_secrets_inside_other_secrets_are_taken_out():
    needed("adlfs")
    needed("gcsfs")
    connection = (
        "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=c2VjcmV0a2V5==;EndpointSuffix=core.windows.net"
    )
    azure = ObjectStore(parse_location("az://b/p", {"connection_string": connection}))
    assert azure._scrub("cannot use AccountKey c2VjcmV0a2V5== of me") == "cannot use AccountKey *** of me"
    google = ObjectStore(parse_location("gs://b/p", {"token": {"private_key": "-----BEGIN", "type": "account"}}))
    assert google._scrub("account with -----BEGIN") == "account with ***"
