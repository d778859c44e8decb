"""What went wrong with an object store, in words an operator can act on.

Owns the table from error codes and exceptions to words. Judges by codes and class names and never imports a client:
every fsspec backend brings its own exceptions. Shows no text of the store longer than a line. Called by
``tiers/object/store.py`` and ``tiers/object/tier.py``.
"""

import email.utils
import errno
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Final

TEXT_MAX: Final = 200

_KEY = "check AWS_ACCESS_KEY_ID or key in storage_options"
_SECRET = "check AWS_SECRET_ACCESS_KEY or secret in storage_options"
_ALLOWED = (
    "check the key and that it may get, put, delete and list there "
    "(without leave to list, a store refuses missing objects, too)"
)
_EXPIRED = "the credentials have expired; renew them, or let the environment do it (instance role, profile)"
_SSO = "the credentials have expired, or nobody has logged in: run `aws sso login` as the user whom the server runs as"
_SESSION = "the store refuses the session token; check AWS_SESSION_TOKEN or token in storage_options"
_REGION = "the bucket is in another region; set the option region of storage_uri or AWS_DEFAULT_REGION"
_ELSEWHERE = (
    "what answers there sends requests elsewhere: check endpoint_url (http in place of https), "
    "or the bucket is in another region: the option region of storage_uri or AWS_DEFAULT_REGION"
)
_LATE = "the client or its credentials did not come in time; check the program, role or service that gives them"
_CLOCK = "this machine's clock is too far from the store's; set the clock (NTP)"
_SLOW = "the store asks for fewer requests; lower storage_concurrency if this stays"
_AZURE_KEY = "check account_name, account_key and sas_token in storage_options, or AZURE_STORAGE_* in the environment"

_BY_CODE: Final[dict[str, str]] = {
    "InvalidAccessKeyId": f"the store refuses these credentials: it does not know the access key; {_KEY}",
    "SignatureDoesNotMatch": f"the store refuses these credentials: the secret does not fit the key; {_SECRET}",
    "AccessDenied": f"the store refuses these credentials; {_ALLOWED}",
    "AllAccessDisabled": f"the store refuses these credentials; {_ALLOWED}",
    "AccountProblem": f"the store refuses these credentials; {_ALLOWED}",
    "InvalidSecurity": f"the store refuses these credentials; {_ALLOWED}",
    "Forbidden": f"the store refuses these credentials; {_ALLOWED}",
    "Unauthorized": f"the store refuses these credentials; {_ALLOWED}",
    "401": f"the store refuses these credentials; {_ALLOWED}",
    "403": f"the store refuses these credentials; {_ALLOWED}",
    "400": "the store refuses the request without a reason, often because the credentials have expired",
    "407": "the proxy that HTTPS_PROXY or HTTP_PROXY names wants a user and a password in its address; "
    "a store that needs no proxy belongs in NO_PROXY",
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "RequestExpired": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": _SESSION,
    "InvalidTokenId": _SESSION,  # MinIO's, also of one that has expired
    "RequestTimeTooSkewed": _CLOCK,
    "PermanentRedirect": _REGION,
    "TemporaryRedirect": _REGION,
    "301": _ELSEWHERE,
    "302": _ELSEWHERE,
    "307": _ELSEWHERE,
    "308": _ELSEWHERE,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "SlowDown": _SLOW,
    "Throttling": _SLOW,
    "ThrottlingException": _SLOW,
    "TooManyRequests": _SLOW,
    "RequestLimitExceeded": _SLOW,
    "429": _SLOW,
    "503": _SLOW,
    "ServiceUnavailable": _SLOW,
    "RequestTimeout": "the store gave up waiting for the request's bytes",
    "InvalidBucketName": "the store says that this is no name for a bucket; check storage_uri",
    "NotImplemented": "the store does not know this kind of request",
    "501": "the store does not know this kind of request",
    "ConditionalRequestConflict": "another writer was at the same object at the same moment",
    "OperationAborted": "another writer was at the same object at the same moment",
    "AuthenticationFailed": f"the store refuses these credentials: they do not fit the account or ended; {_AZURE_KEY}",
    "AuthorizationFailure": f"the store refuses these credentials; {_ALLOWED}, and that no SAS token has ended",
    "AuthorizationPermissionMismatch": f"the store refuses these credentials; {_ALLOWED}",
    "NoAuthenticationInformation": f"the store refuses these credentials: there were none; {_AZURE_KEY}",
    "ContainerBeingDeleted": "the container is being deleted",
    "ServerBusy": _SLOW,
}

_FULL_CODES = frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "EntityTooLarge", "507"})
_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_CREATE_UNKNOWN_ERRNOS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_MISSING_CODES = frozenset({"", "NoSuchKey", "404", "NotFound", "BlobNotFound"})
_TAKEN_CODES = frozenset({"PreconditionFailed", "412", "BlobAlreadyExists"})

_BY_CLASS: Final[dict[str, str]] = {
    "NoCredentialsError": (
        "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or storage_options"
    ),
    "PartialCredentialsError": "the credentials are not complete; key and secret belong together",
    "CredentialRetrievalError": "credentials could not be fetched; check the profile or the instance's role",
    "TokenRetrievalError": _SSO,
    "SSOTokenLoadError": _SSO,
    "UnauthorizedSSOTokenError": _SSO,
    "ProfileNotFound": "there is no such profile; check the option profile or AWS_PROFILE",
    "NoRegionError": "no region is known; set the option region of storage_uri or AWS_DEFAULT_REGION",
    "InvalidRegionError": "this is no region; check the option region of storage_uri or AWS_DEFAULT_REGION",
    "CredentialUnavailableError": f"no credentials were found; check the identity, or {_AZURE_KEY}",
    "ClientAuthenticationError": f"credentials could not be fetched from an identity; check it, or {_AZURE_KEY}",
    "NoClientYet": _LATE,
    "NoGoogleKeys": "no credentials were found, so it was asked without any; name a service account's file as token in "
    "storage_options or in GOOGLE_APPLICATION_CREDENTIALS, or check the instance's service account",
    "BadKeyFile": "the file that the option token names has no key of a service account and no user's login, or is not "
    "whole; name a file of another kind, as a federated identity's, in GOOGLE_APPLICATION_CREDENTIALS instead",
    "BadEndpoint": "the address in AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3, or endpoint_url of the profile or of "
    "client_kwargs has a user or a query in it, or a space behind it, or is not http; expected http://host:port or "
    "https://host, alone",
    "OtherFileSystem": "the directory is on another file system than before; check that it is mounted, and restart the "
    "server if that is meant",
    "NotAStore": "what answers there is no S3 server; check endpoint_url and what is between here and the store",
    "NotGoogles": "what answers there is no object store; check the network and what is between here and the store",
}

_SKEW_S: Final = 840.0
"""S3 refuses what is signed 15 minutes early or late."""

_UNKNOWN_CODES = frozenset(
    {
        "400",
        "401",
        "403",
        "AuthenticationFailed",
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidSecurity",
        "InvalidToken",
        "InvalidTokenId",
        "NoAuthenticationInformation",
        "RequestExpired",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "Unauthorized",
    }
)
"""The store does not know who asks. Not ``AccessDenied``, which may be what a policy says, for ever. To a HEAD a store
says a number and no more, and a trial of a tier that is left out begins with one."""

_UNPROVEN = frozenset(
    {
        "ClientAuthenticationError",
        "ClientSSLError",
        "CredentialRetrievalError",
        "CredentialUnavailableError",
        "NoCredentialsError",
        "NoIdentity",
        "PartialCredentialsError",
        "RefreshError",
        "SSLError",
        "SSOTokenLoadError",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
    }
)
"""Of botocore, Azure, Google and Python: one side cannot show the other who it is."""

_CUT = frozenset({"SSLEOFError", "SSLZeroReturnError", "SSLSyscallError"})
"""Of Python: an encrypted connection ended, whoever was on it."""

_TRUNCATED = frozenset(
    {"ClientPayloadError", "ContentLengthError", "IncompleteRead", "IncompleteReadError", "ResponseStreamingError"}
)
_TIMEOUTS = frozenset({"ConnectTimeoutError", "ReadTimeoutError", "FSTimeoutError", "ServerTimeoutError"})
_RESETS = frozenset({"ConnectionClosedError", "ServerDisconnectedError", "ClientOSError"})
_STATUS_OF: Final = {"HttpError": "code"}
"""Of gcsfs; aiohttp has errors whose ``code`` no server has said."""

_PASSING = frozenset(
    {"ClientError", "ServiceRequestError", "ServiceResponseError", "IncompleteReadError", "ConnectionError"}
)
"""Of aiohttp, of Azure, of Python: what a request can die of on its way."""


class IncompleteRead(ConnectionError):
    """The body ended before its announced length."""


class TakenUnsure(FileExistsError):
    """A create met an object that an earlier request of the same call may have stored: its answer did not come."""


class MissingBucket(OSError):
    """There is no such bucket, where the client says no more than that something is not there."""


class MissingFile(OSError):
    """A file that an option names cannot be read; has the option's name."""


class OtherFileSystem(OSError):
    """A shared directory is not on the file system on which it was: its mount went away, or is another."""


class BadEndpoint(OSError):
    """The environment, a profile or the client's own options name an address that it cannot use."""


class NoClientYet(TimeoutError):
    """The client, which looks for credentials as it is made, was not there in time."""


class BadKeyFile(OSError):
    """A file that should have credentials has none that can be read."""


class NoGoogleKeys(OSError):
    """Google's client found no credentials, and its store refuses whom it does not know."""


class NoIdentity(OSError):
    """Credentials could not be found or renewed, so the store was not asked, or by nobody.

    Attributes:
        reason: Why. Not the cause: Azure's client puts the store's 401, for which it asked for another token, there.
    """

    def __init__(self, reason: BaseException) -> None:
        super().__init__()
        self.reason = reason


class NotAStore(OSError):
    """An answer that no store gives: a page of a load balancer, or of a network's portal."""


class NotGoogles(OSError):
    """The same in place of an answer of Google's JSON API."""


def is_page(status: int | None, content_type: str, *, has_etag: bool) -> bool:
    """Whether a success is a page for people: with an object a store tells the ETag, and 204 has no body."""
    return content_type.startswith("text/html") and not has_etag and status != HTTPStatus.NO_CONTENT


class Refused(OSError):
    """The store answered with a status that its client has no attribute for."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


def chain(exc: BaseException) -> Iterator[BaseException]:
    """The error and what caused it, outermost first; what a client keeps in its own attributes included.

    Not what kept us from asking the store: of files and of other services, it would read as the store's answer.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [exc]
    while pending:
        one = pending.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, NoIdentity):
            continue
        kept = getattr(one, "kwargs", None)
        inner = [getattr(one, "os_error", None), kept.get("error") if isinstance(kept, dict) else None]
        pending += [e for e in inner if isinstance(e, BaseException)]
        pending.append(one.__cause__ or (None if one.__suppress_context__ else one.__context__))


def code_of(exc: BaseException) -> str:
    """The store's error code, e.g. ``NoSuchBucket``; empty when the store said none."""
    for one in chain(exc):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code") or "")
        code = getattr(one, "error_code", None)  # Azure's
        if isinstance(code, str):
            return str(getattr(code, "value", code))
    return ""


def status_of(exc: BaseException) -> int | None:
    """The HTTP status of the store's answer; None when there was none."""
    for one in chain(exc):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            name = _STATUS_OF.get(type(one).__name__, "status")
            status = getattr(one, name, None) or getattr(one, "status_code", None)  # aiohttp's, Azure's
        if isinstance(status, int):
            return status
    return None


def headers_of(exc: BaseException) -> Mapping[str, str]:
    """The headers of the store's answer, of botocore's errors, by names in small letters; none when there was none."""
    for one in chain(exc):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            headers: Mapping[str, str] = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
            return headers
    return {}


def is_missing(exc: BaseException) -> bool:
    """Whether the store says that this object is not there; a missing bucket is something else."""
    if isinstance(exc, NotAStore):
        return False  # whatever status its cause has
    if isinstance(exc, IsADirectoryError | NotADirectoryError):
        return True  # the name is part of other objects' paths, or goes on below an object
    code = code_of(exc)
    if isinstance(exc, FileNotFoundError):
        return code in _MISSING_CODES
    return bool(code) and code in _MISSING_CODES


def is_taken(exc: BaseException) -> bool:
    """Whether a conditional create was refused because the object is there."""
    return isinstance(exc, FileExistsError) or code_of(exc) in _TAKEN_CODES or status_of(exc) == 412


def is_conflict(exc: BaseException) -> bool:
    """Whether two writers met, and the store asks to try again."""
    return code_of(exc) in ("ConditionalRequestConflict", "OperationAborted", "409")


def is_passing(exc: BaseException) -> bool:
    """Whether the same request may pass when it is sent once more."""
    status = status_of(exc)
    if status is not None:
        return status >= 500 or status in (408, 429)
    return any(base.__name__ in _PASSING for base in type(exc).__mro__)


def is_of_identity(exc: BaseException) -> bool:
    """Whether one side does not take the other for who it says it is, by its keys, tokens or certificates."""
    if isinstance(exc, NoIdentity) and isinstance(exc.reason, TimeoutError):
        return False  # they are on their way: another client would ask for them anew, and wait as long
    names = {base.__name__ for error in chain(exc) for base in type(error).__mro__}
    is_unproven = bool(names & _UNPROVEN) and not names & _CUT
    return code_of(exc) in _UNKNOWN_CODES or status_of(exc) == 401 or is_unproven


def is_full(exc: BaseException) -> bool:
    """Whether the store has no room, by its own limit or by the file system's."""
    return code_of(exc) in _FULL_CODES or any(isinstance(e, OSError) and e.errno in _FULL_ERRNOS for e in chain(exc))


def is_unknown(exc: BaseException) -> bool:
    """Whether the store does not know this kind of request."""
    return code_of(exc) in ("NotImplemented", "501") or status_of(exc) == 501


def is_without_create(exc: BaseException) -> bool:
    """Whether the store does not know how to create an object only if it is absent."""
    if is_unknown(exc):
        return True
    if isinstance(exc, TypeError) and "'mode'" in str(exc):
        return True  # an fsspec file system older than exclusive writes
    return any(
        isinstance(e, NotImplementedError) or (isinstance(e, OSError) and e.errno in _CREATE_UNKNOWN_ERRNOS)
        for e in chain(exc)
        if not isinstance(e, PermissionError) or e.errno == errno.EPERM
    )


def explain(exc: BaseException, bucket: str) -> str:
    """Say what happened and what to do, in one line without values of options."""
    if isinstance(exc, NoIdentity):
        return _of_identity(exc.reason, bucket)
    code, status = code_of(exc), status_of(exc)
    if code == "NoSuchBucket":
        return f"there is no bucket {bucket!r}; create it (e.g. `aws s3 mb s3://{bucket}`) or mend storage_uri"
    if code == "ContainerNotFound" or isinstance(exc, MissingBucket):
        return f"there is no bucket or container {bucket!r}; create it or mend storage_uri"
    if code in _FULL_CODES or is_full(exc):
        return "the store has no room left"
    if code == "403" and _is_skewed(exc):
        return _CLOCK  # a HEAD is answered with a number and no more
    known = _BY_CODE.get(code)
    if known is not None:
        return known if not code or code.isdigit() else f"{known} ({code})"
    if status is not None and status >= 500:
        return f"the store failed inside (HTTP {status}{' ' + code if code else ''})"
    if str(status) in _BY_CODE:
        return f"{_BY_CODE[str(status)]} ({code or status})"
    return _local(exc) or f"{type(exc).__name__}: {_line(exc)}"


def _is_skewed(exc: BaseException) -> bool:
    """Whether the store's answer has a date so far from this machine's that it takes nothing that is signed here."""
    try:
        said_s = email.utils.parsedate_to_datetime(headers_of(exc).get("date", "")).timestamp()
    except (ValueError, OverflowError):
        return False
    return abs(said_s - time.time()) > _SKEW_S


def _of_identity(cause: BaseException, bucket: str) -> str:
    """Words for credentials that could not be found or renewed."""
    code, status = code_of(cause), status_of(cause)
    if _BY_CODE.get(code) == _EXPIRED or "credentials are still expired" in str(cause):  # botocore has no class for it
        return _EXPIRED
    if code or status is not None:
        answer = code or f"HTTP {status}"
        return f"what gives credentials refuses ({answer}); check the role, its trust, and the token or key for it"
    names = _class_names([cause])
    if isinstance(cause, TimeoutError) or names & _TIMEOUTS:
        return _LATE
    if isinstance(cause, OSError) and cause.filename:
        return f"credentials could not be fetched: {cause.filename}: {cause.strerror}; check the profile and AWS_*"
    if "RefreshError" in names:  # Google's
        said = " ".join(str(cause.args[0] if cause.args else cause).split())[:TEXT_MAX]
        return f"what gives credentials refuses or is not there ({said}); check the account, its key and the network"
    words = _of_class(names)
    return words or f"the client or its credentials could not be had: {explain(cause, bucket)}"


def _class_names(errors: Iterable[BaseException]) -> set[str]:
    return {base.__name__ for error in errors for base in type(error).__mro__}


def _of_class(names: set[str]) -> str | None:
    """Words for the first of the known classes."""
    return next((words for name, words in _BY_CLASS.items() if name in names), None)


def _local(exc: BaseException) -> str | None:
    """Words for what failed on this side of the network, or on a mounted file system."""
    errors = list(chain(exc))
    names = _class_names(errors)
    if (words := _of_class(names)) is not None:
        return words
    if any(isinstance(e, socket.gaierror) for e in errors) or "ClientConnectorDNSError" in names:
        return "the store's host name is not known here (DNS); check endpoint_url and the network"
    if any(isinstance(e, ssl.SSLError) for e in errors) or names & {"SSLError", "ClientSSLError"}:
        return "the TLS connection failed; check endpoint_url (http or https) and the option verify (CA bundle)"
    if any(isinstance(e, ConnectionRefusedError) or "Connect call failed" in str(e) for e in errors):
        return (
            "the connection was refused: nothing listens there; check endpoint_url, that the store runs, and the proxy "
            "if HTTPS_PROXY or HTTP_PROXY names one"
        )
    if names & _TRUNCATED:
        return "the answer ended before all of its bytes came"
    if names & _TIMEOUTS or any(isinstance(e, TimeoutError) for e in errors):
        return "the store did not answer in time"
    if names & _RESETS or any(isinstance(e, ConnectionError) for e in errors):
        return "the connection was cut"
    if "EndpointConnectionError" in names:
        return "the store cannot be reached; check endpoint_url and the network"
    if isinstance(exc, MissingFile):
        return f"the file that the option {exc} names cannot be read; check its path and rights, in this container"
    if isinstance(exc, FileNotFoundError):
        return "the directory is not there; check that it is mounted"
    if isinstance(exc, PermissionError):
        return f"the store refuses this: {_line(exc)}"
    return None


def _line(exc: BaseException) -> str:
    text = " ".join((getattr(exc, "strerror", None) or str(exc)).split())
    return text[:TEXT_MAX] or "no text"
