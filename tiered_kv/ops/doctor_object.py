"""Check an object store: credentials, endpoint, features, speed and content.

Writes a test blob, a few small objects below ``_tiered_kv/probe/``, and removes all of them. Where credentials come
from is said in words; no value of an option is ever shown.
"""

import os
import re
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Final
from urllib.parse import parse_qs, urlsplit

from tiered_kv.config import Config, size_text
from tiered_kv.engine.clock import SystemClock
from tiered_kv.engine.self_test import SELF_TEST_FORMATS, self_test
from tiered_kv.errors import TierUnavailable
from tiered_kv.fleet import layout
from tiered_kv.fleet.recency import BASE_MAGIC, LOG_MAGIC
from tiered_kv.keys.namespace import MAX_RECORD_BYTES, SELF_TEST_NAMESPACE
from tiered_kv.keys.naming import parse_object_path
from tiered_kv.location import is_usable_endpoint
from tiered_kv.ops.doctor_disk import judged
from tiered_kv.ops.findings import DoctorFinding, DoctorMeasurement, error, has_error, measured, ok, warning
from tiered_kv.ops.object_storage import ObjectStorage
from tiered_kv.ops.storage import Content, NamespaceRecord, StoredBlob
from tiered_kv.ops.text import counted
from tiered_kv.server.epochs import EPOCHS
from tiered_kv.tiers.disk.scan import NAMESPACE_FILE
from tiered_kv.tiers.object.medium import ObjectInfo
from tiered_kv.tiers.object.store import ObjectStore
from tiered_kv.tiers.object.tier import ObjectTier
from tiered_kv.tiers.wrappers.verified import VerifiedTier

ROUND_TRIPS: Final = 5
ROUND_TRIP_SLOW_S: Final = 0.25
SKEW_MAX_S: Final = 60.0
LISTED_MAX: Final = 20_000
"""Objects that are listed: 20 requests. A bucket may hold millions, and a check should end."""

READ_MAX: Final = 64
"""Objects whose content is looked at, a GET each: as many as a fleet of some size has."""

_BASE = re.compile(re.escape(layout.BASES) + r"[0-9]+-[0-9]+-[0-9]+")
_LOG = re.compile(re.escape(layout.RECENCY) + rf"(?!base/){layout.SERVER_ID.pattern}/[0-9]+")
_NAME_ALONE = re.compile(rf"{re.escape(EPOCHS)}[0-9a-f]{{32}}/[0-9]{{1,15}}|{layout.ROOT}/probe/[0-9a-f]{{32}}")

NAMES_SHOWN: Final = 3
NAME_CHARS_SHOWN: Final = 120

LOOPBACK: Final = ("127.", "localhost", "[::1]", "::1")


def check_object(
    config: Config, storage: ObjectStorage, clock: Callable[[], float] = time.time
) -> tuple[list[DoctorFinding], list[DoctorMeasurement], Content]:
    """Run all checks of the store; those that need an answer end with the first that gets none.

    Returns:
        Findings, measurements, and the first blobs of the store with their records; empty after an error.
    """
    findings = [*_credentials(config), *_endpoint(config)]
    measurements: list[DoctorMeasurement] = []
    content = Content()
    store = storage.store
    try:
        atomic = _conditional_create(config, store)
        findings.append(atomic)
        findings.append(_round_trip(store, measurements))
        tier = ObjectTier(store, io_concurrency=config.storage_concurrency)  # not closed: the store is not its own
        tested, more = judged("object", self_test(VerifiedTier(tier, SELF_TEST_FORMATS.get), SystemClock()))
        findings.append(tested)
        measurements += more
        if not has_error([tested]):
            findings += [_clock_skew(store, clock), *_other_limits(config, storage)]
            content, own = _list(store)
            findings += _foreign(store, own)
    except TierUnavailable as exc:
        findings.append(error("object store", _shown(exc), _hint(exc)))
    return findings, measurements, content


def _shown(exc: TierUnavailable) -> str:
    """The client's message, which contains the remedy, without the path of the probe."""
    text = str(exc).removeprefix("object store: ")
    return " ".join(word for word in text.split(" ") if not word.startswith(("path=", "timeout_s=")))


def _hint(exc: TierUnavailable) -> str:
    words = {
        "did not answer in time": "raise storage_timeout_s, or look for a firewall on the way",
        "Forbidden": "compare the key's rights with the policy in docs/operations.md",
    }
    return next((hint for word, hint in words.items() if word in str(exc)), "docs/operations.md lists the messages")


# -- without asking the store -----------------------------------------------------------------------------------------


def _credentials(config: Config) -> list[DoctorFinding]:
    """Where the client takes its credentials from: the first place, in the order in which it looks."""
    location = config.location()
    options = location.options
    if location.scheme in ("memory", "shared+file"):
        return []
    if location.scheme == "gs":
        return [_google_credentials(options)]
    if location.scheme == "az":
        return [_azure_credentials(options)]
    if options.get("anon") is True:
        return [warning("credentials", "none: the option anon asks without", "a cache needs leave to write")]
    if "key" in options or "secret" in options:
        if ("key" in options) != ("secret" in options):
            return [error("credentials", "key and secret belong together, and one is missing", "name both, or neither")]
        hint = "whoever may list this machine's processes can read them there; the environment is better"
        return [warning("credentials", "from key and secret of storage_options or the URI", hint)]
    if "profile" in options:
        return [ok("credentials", "from the profile that the option profile names")]
    return [_environments_credentials()]


def _environments_credentials() -> DoctorFinding:
    environment = os.environ
    if environment.get("AWS_ACCESS_KEY_ID"):
        temporary = ", with a session token" if environment.get("AWS_SESSION_TOKEN") else ""
        text = f"from AWS_ACCESS_KEY_ID in the environment{temporary}"
        if not environment.get("AWS_SECRET_ACCESS_KEY"):
            return error("credentials", f"{text}, but AWS_SECRET_ACCESS_KEY is missing", "set both")
        return ok("credentials", text)
    if environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE"):
        return ok("credentials", "from the profile that AWS_PROFILE names")
    if environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return ok("credentials", "from the role of a web identity (AWS_WEB_IDENTITY_TOKEN_FILE)")
    files = (
        environment.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        environment.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    # An empty name is a directory, and no file. Of a user without name and home, as containers have them,
    # Path.expanduser raises, and Path.is_file where the home is another user's; botocore takes what these give.
    if any(os.path.isfile(os.path.expanduser(name)) for name in files):
        return ok("credentials", "from the user's AWS configuration files")
    return ok("credentials", "none named: from the role of the container or instance, if it has one")


def _google_credentials(options: Mapping[str, object]) -> DoctorFinding:
    """In the order in which gcsfs looks."""
    if options.get("token") == "anon":
        return warning("credentials", "none: the option token asks without", "a cache needs leave to write")
    if "token" in options:
        return ok("credentials", "from token of storage_options or the URI")
    if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return ok("credentials", "from the file that GOOGLE_APPLICATION_CREDENTIALS names")
    return ok("credentials", "none named: from gcloud's login or the instance's service account, if it has one")


def _azure_credentials(options: Mapping[str, object]) -> DoctorFinding:
    """In the order in which adlfs looks."""
    ends_s = _sas_end(options)
    shown = "" if ends_s is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ends_s))
    until = f"; the SAS token ends at {shown}" if shown else ""
    if ends_s is not None and ends_s - time.time() < SAS_ENDS_SOON_S:
        if ends_s < time.time():
            return error("credentials", f"the SAS token ended at {shown}", "replace it; servers read it as they start")
        return warning("credentials", f"the SAS token ends at {shown}", "replace it, and restart servers, before that")
    named = [name for name in ("connection_string", "account_key", "sas_token", "client_secret") if name in options]
    if named:
        return ok("credentials", f"from {' and '.join(named)} of storage_options or the URI{until}")
    variables = [f"AZURE_STORAGE_{name}" for name in ("CONNECTION_STRING", "ACCOUNT_KEY", "SAS_TOKEN", "CLIENT_SECRET")]
    found = [name for name in variables if os.environ.get(name)]
    if found:
        return ok("credentials", f"from {' and '.join(found)} in the environment{until}")
    return ok("credentials", "none named: from a managed identity or Azure's command line, if there is one")


SAS_ENDS_SOON_S: Final = 7 * 86400.0


def _sas_end(options: Mapping[str, object]) -> float | None:
    """When the SAS token in use ends; None: there is none, or it does not say."""

    def given(name: str) -> str:
        return str(options.get(name) or os.environ.get(f"AZURE_STORAGE_{name.upper()}", ""))

    if connection := given("connection_string"):
        token = next(iter(re.findall(r"(?:^|;)\s*SharedAccessSignature=([^;]*)", connection)), "")
    else:
        token = "" if given("account_key") else given("sas_token")
    try:
        end = datetime.fromisoformat(parse_qs(token.lstrip("?")).get("se", [""])[0])
    except ValueError:
        return None
    return (end if end.tzinfo else end.replace(tzinfo=UTC)).timestamp()


CLOUDS: Final = {"s3": "Amazon S3", "gs": "Google Cloud Storage", "az": "Azure Blob Storage"}


def _endpoint_url(scheme: str, options: Mapping[str, object]) -> object:
    """The address of a server that is not the cloud's own; none: empty or None."""
    environment = os.environ
    if scheme == "s3":
        nested = options.get("client_kwargs")
        own = options.get("endpoint_url") or (nested.get("endpoint_url") if isinstance(nested, dict) else None)
        if own or environment.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
            return own
        return environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    if scheme == "gs":
        named = environment.get("STORAGE_EMULATOR_HOST", "")
        return options.get("endpoint_url") or (named if "://" in named or not named else f"http://{named}")
    text = str(options.get("connection_string") or environment.get("AZURE_STORAGE_CONNECTION_STRING", ""))
    parts = dict(part.strip().split("=", 1) for part in text.split(";") if "=" in part)
    return parts.get("BlobEndpoint")


def _endpoint(config: Config) -> list[DoctorFinding]:
    location = config.location()
    if location.scheme not in CLOUDS:
        return []
    endpoint = _endpoint_url(location.scheme, location.options)
    if not endpoint:
        return [ok("endpoint", f"{CLOUDS[location.scheme]}, encrypted")]
    if location.scheme == "s3" and not is_usable_endpoint(str(endpoint)):  # our own option was checked when it was read
        where = "AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3 or endpoint_url of client_kwargs"
        hint = "expected http://host:port or https://host, alone; what signs requests goes into AWS_ACCESS_KEY_ID"
        return [error("endpoint", f"{where} is no address that clients can use", hint)]
    parts = urlsplit(str(endpoint).lstrip())
    if parts.scheme != "http":
        return [ok("endpoint", f"{parts.scheme}, a server of its own")]
    if (parts.hostname or "").startswith(LOOPBACK):
        return [ok("endpoint", "plain HTTP, on this machine")]
    hint = "use https://: whoever sees the network can read prompts out of the KV"
    return [warning("endpoint", "plain HTTP to another machine: nothing is encrypted", hint)]


# -- asking the store -------------------------------------------------------------------------------------------------


def _conditional_create(config: Config, store: ObjectStore) -> DoctorFinding:
    is_limited = config.storage_bytes is not None or config.storage_ttl is not None
    if store.creates_atomically():
        return ok("conditional writes", "the store refuses to overwrite an object (If-None-Match)")
    text = "the store does not refuse to overwrite an object (If-None-Match)"
    if is_limited and not config.single_writer:
        hint = "leave storage_bytes and storage_ttl out, or promise single_writer"
        return error("conditional writes", f"{text}: the limits cannot be kept, and the server does not start", hint)
    return warning("conditional writes", f"{text}: blobs are written again where two servers meet")


def _round_trip(store: ObjectStore, measurements: list[DoctorMeasurement]) -> DoctorFinding:
    path, times = layout.probe_path(), []
    for _ in range(ROUND_TRIPS):
        start_s = time.perf_counter()
        store.head(path)
        times.append(time.perf_counter() - start_s)
    median_s = statistics.median(times)
    measurements.append(measured("object", "head", median_s))
    text = f"a HEAD takes {median_s * 1000:.1f} ms (median of {ROUND_TRIPS})"
    if median_s > ROUND_TRIP_SLOW_S:
        return warning("round trip", text, "hits from so far away rarely beat computing again; put a disk in front")
    return ok("round trip", text)


def _clock_skew(store: ObjectStore, clock: Callable[[], float]) -> DoctorFinding:
    """Compare the store's clock with ours: it writes the time to the second, or near it."""
    path = layout.probe_path()
    before_s = clock()
    store.put(path, b"doctor")
    try:
        found = store.head(path)
    finally:
        store.delete([path])
    if found is None:
        return error("clock", "an object is not there right after it was written", "the store must be consistent")
    skew_s = found.modified_s - before_s
    off_s = max(abs(skew_s) - 1.0, 0.0)
    if off_s > SKEW_MAX_S:
        text = f"the store's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} ours"
        hint = "set the clocks (NTP): ages are wrong, and S3 refuses requests of 15 min"
        return warning("clock", text, hint)
    return ok("clock", "the store's clock agrees with ours")


def _other_limits(config: Config, storage: ObjectStorage) -> list[DoctorFinding]:
    current = storage.capacity_bytes()
    if current is None or current == config.storage_bytes:
        return []
    ours = "none" if config.storage_bytes is None else size_text(config.storage_bytes)
    text = f"other servers keep this place within storage_bytes {size_text(current)}; here it is {ours}"
    return [warning("limits", text, "give all servers of a bucket the same limits: the leader's count")]


def _foreign(store: ObjectStore, own: list[ObjectInfo]) -> list[DoctorFinding]:
    """Name foreign objects below our own prefix.

    Servers leave them alone and count them as absent, so a lease or a report under one of these names may be missing
    for no visible reason.
    """
    paths, read = [], 0
    for info in own[:LISTED_MAX]:
        check = _content_check(info.path)
        if check is None:
            is_ours = (
                _NAME_ALONE.fullmatch(info.path) is not None
                or layout.parse_pin_path(info.path) is not None
                or layout.parse_peer_path(info.path) is not None
            )
        else:
            read += 1
            is_ours = read > READ_MAX or check(store, info.path)
        if not is_ours:
            paths.append(info.path)
    if not paths:
        return []
    shown = ", ".join(ascii(path[:NAME_CHARS_SHOWN])[1:-1] for path in paths[:NAMES_SHOWN])
    more = f" and {len(paths) - NAMES_SHOWN} more" if len(paths) > NAMES_SHOWN else ""
    part = f" (of the first {LISTED_MAX} there)" if len(own) > LISTED_MAX else ""
    be = "is" if len(paths) == 1 else "are"
    text = f"{counted(len(paths), 'object')} below {layout.ROOT}/ {be} none of ours{part}: {shown}{more}"
    hint = "servers leave them alone and count them as absent; move them, or give the cache a prefix of its own"
    return [warning("foreign objects", text, hint)]


def _content_check(path: str) -> Callable[[ObjectStore, str], bool] | None:
    """The check of an object's content that proves it ours; None where only its name can."""
    if layout.parse_lease_path(path) is not None:
        return _holding(layout.Term)
    if layout.parse_session_path(path) is not None:
        return _holding(layout.MemberReport)
    if path == layout.USAGE:
        return _holding(layout.BucketUsage)
    if _BASE.fullmatch(path):
        return _beginning(BASE_MAGIC)
    return _beginning(LOG_MAGIC) if _LOG.fullmatch(path) else None


def _holding(kind: type) -> Callable[[ObjectStore, str], bool]:
    def check(store: ObjectStore, path: str) -> bool:
        data = layout.fetch(store, path)
        return data is None or layout.decode(data, kind) is not None  # None: deleted since it was listed

    return check


def _beginning(magic: bytes) -> Callable[[ObjectStore, str], bool]:
    def check(store: ObjectStore, path: str) -> bool:
        data = store.get_head(path, len(magic))
        return data is None or data == magic

    return check


def _list(store: ObjectStore) -> tuple[Content, list[ObjectInfo]]:
    """List the beginning of the store once: its blobs with their records, and the objects below our own prefix."""
    infos = list(islice(store.list(""), LISTED_MAX + 1))
    blobs = [
        StoredBlob(name, info.size_bytes, info.modified_s, info.modified_s, 0.0)
        for info in infos[:LISTED_MAX]
        if (name := parse_object_path(info.path)) is not None and name.namespace != SELF_TEST_NAMESPACE
    ]
    content = Content(blobs, is_whole=len(infos) <= LISTED_MAX)
    for space in sorted({blob.name.namespace for blob in content.blobs}):
        record = store.get(f"{space.hex()}/{NAMESPACE_FILE}", 2 * MAX_RECORD_BYTES)
        content.records[space] = NamespaceRecord.parse(space, record)
    if content.is_whole:
        return content, [info for info in infos if info.path.startswith(f"{layout.ROOT}/")]
    return content, list(islice(store.list(f"{layout.ROOT}/"), LISTED_MAX + 1))  # which may come behind all those blobs
