"""Checks of an object store: how it is reached, what it can do, how fast it is, what lies there.

Writes a test blob, a few small objects below ``_tiered_kv/probe/``, and removes all of them. Where credentials come
from is said in words; no value of an option is ever shown.
"""

import os
import statistics
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tiered_kv.admin.disk_storage import read_record
from tiered_kv.admin.doctor_disk import judged
from tiered_kv.admin.findings import Finding, Measurement, error, has_error, ok, warning
from tiered_kv.admin.object_storage import ObjectStorage
from tiered_kv.admin.storage import NamespaceRecord, StoredBlob
from tiered_kv.config import Config, size_text
from tiered_kv.engine.clock import SystemClock
from tiered_kv.engine.self_test import SELF_TEST_NAMESPACE, self_test, self_test_format
from tiered_kv.errors import TierUnavailable
from tiered_kv.keys.namespace import MAX_RECORD_BYTES
from tiered_kv.keys.naming import parse_object_path
from tiered_kv.tiers.disk_scan import NAMESPACE_FILE
from tiered_kv.tiers.object_store import OWN, ObjectStore
from tiered_kv.tiers.object_tier import ObjectTier
from tiered_kv.tiers.wrappers.verified import VerifiedTier

ROUND_TRIPS: Final = 5
ROUND_TRIP_SLOW_S: Final = 0.25
SKEW_MAX_S: Final = 60.0
LISTED_MAX: Final = 20_000
"""Objects that are looked at: 20 requests. A bucket may hold millions, and a check should end."""

LOOPBACK: Final = ("127.", "localhost", "[::1]", "::1")


@dataclass(slots=True)
class Listing:
    """What lies in an object store, as far as it was listed."""

    blobs: list[StoredBlob] = field(default_factory=list)
    records: dict[bytes, NamespaceRecord] = field(default_factory=dict)
    is_whole: bool = True


def check_object(
    config: Config, storage: ObjectStorage, clock: Callable[[], float] = time.time
) -> tuple[list[Finding], list[Measurement]]:
    """All checks of the store; those that need an answer end with the first that gets none."""
    findings = [*_credentials(config), *_endpoint(config)]
    measurements: list[Measurement] = []
    store = storage.store
    try:
        atomic = _conditional_create(config, store)
        findings.append(atomic)
        findings.append(_round_trip(store, measurements))
        tier = ObjectTier(store, io_concurrency=config.storage_concurrency)  # not closed: the store is not its own
        tested, more = judged("object", self_test(VerifiedTier(tier, _FORMATS.get), SystemClock()))
        findings.append(tested)
        measurements += more
        if not has_error([tested]):
            findings += [_clock_skew(store, clock), *_other_limits(config, storage)]
    except TierUnavailable as exc:
        findings.append(error("object store", _shown(exc), _hint(exc)))
    return findings, measurements


_FORMATS: Final = {SELF_TEST_NAMESPACE: self_test_format()}


def _shown(exc: TierUnavailable) -> str:
    """What the client says, which names what to do, too; without the path of the probe."""
    text = str(exc).removeprefix("object store: ")
    return " ".join(word for word in text.split(" ") if not word.startswith(("path=", "timeout_s=")))


def _hint(exc: TierUnavailable) -> str:
    words = {
        "did not answer in time": "raise storage_timeout_s, or look for a firewall on the way",
        "Forbidden": "compare the key's rights with the policy in docs/operations.md",
    }
    return next((hint for word, hint in words.items() if word in str(exc)), "docs/operations.md lists the messages")


# -- without asking the store -----------------------------------------------------------------------------------------


def _credentials(config: Config) -> list[Finding]:
    """Where the client takes its credentials from: the first place, in the order in which it looks."""
    location = config.location()
    options = location.options
    if location.scheme in ("memory", "shared+file"):
        return []
    if location.scheme != "s3":
        named = sorted(set(options) & {"token", "account_key", "connection_string", "sas_token"})
        return [ok("credentials", f"from {' and '.join(named) or 'the environment'}")]
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


def _environments_credentials() -> Finding:
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
    if any(Path(name).expanduser().exists() for name in files):
        return ok("credentials", "from the user's AWS configuration files")
    return ok("credentials", "none named: from the role of the container or instance, if it has one")


def _endpoint(config: Config) -> list[Finding]:
    location = config.location()
    if location.scheme != "s3":
        return []
    endpoint = (
        location.options.get("endpoint_url")
        or os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
    )
    if not endpoint:
        return [ok("endpoint", "Amazon S3, encrypted")]
    parts = urlsplit(str(endpoint))
    if parts.scheme != "http":
        return [ok("endpoint", f"{parts.scheme}, a server of its own")]
    if (parts.hostname or "").startswith(LOOPBACK):
        return [ok("endpoint", "plain HTTP, on this machine")]
    hint = "use https://: whoever sees the network can read prompts out of the KV"
    return [warning("endpoint", "plain HTTP to another machine: nothing is encrypted", hint)]


# -- asking the store -------------------------------------------------------------------------------------------------


def _conditional_create(config: Config, store: ObjectStore) -> Finding:
    is_limited = config.storage_bytes is not None or config.storage_ttl is not None
    if store.creates_atomically():
        return ok("conditional writes", "the store refuses to overwrite an object (If-None-Match)")
    text = "the store does not refuse to overwrite an object (If-None-Match)"
    if is_limited and not config.single_writer:
        hint = "leave storage_bytes and storage_ttl out, or promise single_writer"
        return error("conditional writes", f"{text}: the limits cannot be kept, and the server does not start", hint)
    return warning("conditional writes", f"{text}: blobs are written again where two servers meet")


def _round_trip(store: ObjectStore, measurements: list[Measurement]) -> Finding:
    path, times = f"{OWN}/probe/{uuid.uuid4().hex}", []
    for _ in range(ROUND_TRIPS):
        start_s = time.perf_counter()
        store.head(path)
        times.append(time.perf_counter() - start_s)
    median_s = statistics.median(times)
    measurements.append(Measurement("object", "head", median_s))
    text = f"a HEAD takes {median_s * 1000:.1f} ms (median of {ROUND_TRIPS})"
    if median_s > ROUND_TRIP_SLOW_S:
        return warning("round trip", text, "hits from so far away rarely beat computing again; put a disk in front")
    return ok("round trip", text)


def _clock_skew(store: ObjectStore, clock: Callable[[], float]) -> Finding:
    """Compare the store's clock with ours: it writes the time to the second, or near it."""
    path = f"{OWN}/probe/{uuid.uuid4().hex}"
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


def _other_limits(config: Config, storage: ObjectStorage) -> list[Finding]:
    current = storage.capacity_bytes()
    if current is None or current == config.storage_bytes:
        return []
    ours = "none" if config.storage_bytes is None else size_text(config.storage_bytes)
    text = f"other servers keep this place within storage_bytes {size_text(current)}; here it is {ours}"
    return [warning("limits", text, "give all servers of a bucket the same limits: the leader's count")]


def list_some(storage: ObjectStorage) -> Listing:
    """The first blobs of the store, and the records of their namespaces.

    Raises:
        TierUnavailable: The store does not answer.
    """
    listing = Listing()
    for number, info in enumerate(storage.store.list("")):
        if number >= LISTED_MAX:
            listing.is_whole = False
            break
        name = parse_object_path(info.path)
        if name is not None and name.namespace != SELF_TEST_NAMESPACE:
            listing.blobs.append(StoredBlob(name, info.size_bytes, info.modified_s, info.modified_s, 0.0))
    for space in sorted({blob.name.namespace for blob in listing.blobs}):
        record = storage.store.get(f"{space.hex()}/{NAMESPACE_FILE}", 2 * MAX_RECORD_BYTES)
        listing.records[space] = read_record(space, record)
    return listing
