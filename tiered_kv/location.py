"""What a storage URI names: a local directory, or a place in an object store with the options to reach it.

Owns the grammar of URIs and of ``storage_options``, and what of them may be shown. Opens nothing and reads no
environment: who reaches the medium (``tiers/``) does that. Called by ``config.py``, the tiers and the CLI.

::

    file:///dir                           local disk
    s3://bucket/prefix?endpoint_url=...   object store; also gs:// az:// memory://
    shared+file:///dir                    object store in a directory that several machines mount
    mooncake://host:port/name             pool of a Mooncake master, shared by a fleet
    <scheme>://place?name=value           a medium that an installed package registers (docs/extending.md)
"""

import difflib
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from tiered_kv.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

EXAMPLE: Final = 'e.g. "storage_uri": "file:///var/cache/tiered_kv" or "s3://bucket/prefix"'

OBJECT_OPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "s3": ("endpoint_url", "region", "key", "secret", "token", "anon", "profile", "verify", "addressing_style"),
    "gs": ("endpoint_url", "project", "token"),
    "az": ("account_name", "account_key", "connection_string", "sas_token"),
    "memory": (),
    "shared+file": (),
}
"""Schemes of object stores, and the options each takes after ``?``."""

OTHER_SCHEMES: Final = {
    **dict.fromkeys(("s3a", "s3n", "minio"), "s3://bucket/prefix"),
    **dict.fromkeys(("http", "https"), "s3://bucket/prefix?endpoint_url=http://host:9000"),
    **dict.fromkeys(("gcs", "gcloud"), "gs://bucket/prefix"),
    **dict.fromkeys(("abfs", "abfss", "azure", "wasb", "wasbs"), "az://container/prefix"),
    **dict.fromkeys(("nfs", "cephfs", "shared"), "shared+file:///directory"),
}
"""What other programs call our stores."""

SLIP_LIKENESS: Final = 0.8
"""How like a known option a name is that means it; the other options of gcsfs and adlfs are less like these."""

CLIENT_OPTIONS: Final = ("client_kwargs", "config_kwargs", "s3_additional_kwargs", "requester_pays")
"""What ``storage_options`` may hold for s3 besides: passed on to s3fs as it is."""

MOONCAKE_OPTIONS: Final = (
    "protocol",
    "rdma_devices",
    "local_hostname",
    "metadata_server",
    "global_segment_size",
    "tenant_id",
)
"""What ``mooncake://`` takes, by the names of Mooncake's own configuration; besides variables of its environment."""

MOONCAKE_VARIABLE: Final = re.compile(r"(?:MC|MOONCAKE)_[A-Za-z0-9_]+")
"""Variables that Mooncake's client reads; an option of such a name is set in its process."""

POOL_NAME: Final = "tiered_kv"
"""What keys in a pool begin with where the URI names nothing."""

POOL_NAME_PART: Final = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]+")
POOL_NAME_MAX: Final = 128

SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
"""A scheme's name (RFC 3986, section 3.1)."""

ENDPOINT: Final = re.compile(r"((?i:https?)://[^/:@?#\s][^/%@?#\s]*)([^@?#\s]*)")
"""Of our own option, without a user, a query or a space: clients send them along, or sign without them, and the store
refuses that. First what its capitals mean nothing in; an IPv6 address may have an interface's name behind ``%``."""

MEDIA_GROUP: Final = "tiered_kv.tiers"
"""Entry points of installed packages: a scheme, and the factory of its tier."""

BOOLEANS: Final = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed storage URI.

    Attributes:
        kind: ``pool`` for ``mooncake``; ``extension`` for a medium that another package registers.
        path: The directory, absolute, for ``file`` and ``shared+file``; as the URI says it for an extension;
            ``host:port/name`` for a pool; otherwise ``bucket/prefix`` without a slash at either end.
        options: What reaches the store, credentials included; never shown.
    """

    kind: Literal["disk", "object", "pool", "extension"]
    scheme: str
    path: str
    options: Mapping[str, object] = field(default_factory=dict, repr=False, hash=False)

    def __str__(self) -> str:
        """The URI without options, safe to show."""
        return f"{self.scheme}://{self.path}"

    @property
    def storage(self) -> str:
        """What two clients of one server must agree on: ``disk``, or the object store."""
        return "disk" if self.kind == "disk" else self.identity

    @property
    def identity(self) -> str:
        """Names the place: equal for two clients that reach the same objects, without anything secret."""
        if self.kind == "pool":
            tenant = str(self.options.get("tenant_id", "default"))
            return str(self) if tenant == "default" else f"{self}@{tenant}"
        endpoint = self.options.get("endpoint_url") or (_azure_account(self.options) if self.scheme == "az" else None)
        return f"{self}@{redact(str(endpoint)).rstrip('/')}" if endpoint else str(self)


def _azure_account(options: Mapping[str, object]) -> object:
    """The storage account that options name, by itself or in a connection string; None: the environment names it."""
    if account := options.get("account_name"):
        return account
    pairs = (part.partition("=") for part in str(options.get("connection_string", "")).split(";"))
    named = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return named.get("accountname") or named.get("blobendpoint")


def parse_location(uri: str, storage_options: Mapping[str, object] | None = None) -> Location:
    """Parse a storage URI; ``storage_options`` win over the options in its query.

    Raises:
        ConfigError: The URI names no place, or an option is unknown. The message shows no option's value.
    """
    shown = f"storage_uri {redact(uri)!r}"
    try:
        parts = urlsplit(uri)
    except ValueError as exc:
        raise ConfigError(f"{shown}: not a URI ({exc}), {EXAMPLE}") from exc
    if parts.scheme == "file":
        return _disk(parts.netloc, parts.path, bool(parts.query or parts.fragment), storage_options, shown)
    if not parts.scheme:
        raise ConfigError(f"{shown}: no scheme in it: {_with_scheme(uri)}")
    if parts.scheme == "mooncake":
        return _pool(parts, storage_options or {}, shown)
    if parts.scheme not in OBJECT_OPTIONS and registered_medium(parts.scheme) is not None:
        if "@" in parts.netloc or parts.fragment:
            raise ConfigError(f"{shown}: no credentials and no # in it; credentials belong into storage_options")
        named = _named(parts.query, shown, "?name=value", is_strict=False)
        path = _unquoted(f"{parts.netloc}{parts.path}", shown)
        return Location("extension", parts.scheme, path, {**named, **(storage_options or {})})
    if parts.scheme not in OBJECT_OPTIONS:
        raise ConfigError(f"{shown}: {_unknown_scheme(parts.scheme)}")
    if parts.fragment:
        raise ConfigError(f"{shown}: nothing may stand after #; write # as %23")
    options = _query(parts.scheme, parts.query, shown)
    options.update(_checked(parts.scheme, storage_options or {}))
    if parts.scheme == "shared+file":
        # One place has one name, as a bucket's prefix has. Not "..": behind a symbolic link that is another place.
        whole = _directory(parts.netloc, parts.path, shown)
        path = "/" + "/".join(part for part in whole.split("/") if part not in ("", "."))
    else:
        path = _bucket_path(parts.scheme, parts.netloc, parts.path, shown)
    return Location("object", parts.scheme, path, options)


def _unknown_scheme(scheme: str) -> str:
    here = OTHER_SCHEMES.get(scheme)
    hint = f"; did you mean {here}?" if here else ""
    return f"unknown scheme {scheme!r}{hint}; known: file, {', '.join(OBJECT_OPTIONS)}, mooncake; {EXAMPLE}"


def is_usable_endpoint(url: str) -> bool:
    """Whether S3's clients can use an address that they read in the environment, a profile or their own options.

    A user or a query they send along, or sign without it, and the store refuses what comes of that; a space behind the
    port is not part of any. Capitals in the scheme, a space before it and what stands after ``#`` are fine.
    """
    try:
        parts = urlsplit(url.lstrip())
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(re.fullmatch(r"[^@\s]+", parts.netloc)) and not parts.query


def directory_uri(path: str | os.PathLike[str]) -> str:
    """The URI of a local directory, as readable as it may be: what would be read as something else is escaped."""
    text = os.fspath(path).replace("%", "%25")
    return f"file://{text.replace('?', '%3F').replace('#', '%23')}"


def _with_scheme(text: str) -> str:
    """What to write in place of a text that names no scheme; of an absolute path the very URI, if nothing is hidden."""
    if text.startswith("/") and text.strip("/") and redact(text) == text:
        return f"a directory is written file://{quote(text)}"
    return f"a directory is written file:///absolute/path, a bucket s3://bucket/prefix; {EXAMPLE}"


def registered_medium(scheme: str) -> "EntryPoint | None":
    """The factory that an installed package registers for a scheme, not loaded yet; None: there is none.

    Raises:
        ConfigError: Two packages register the scheme: which one is meant nobody can say.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415  # for schemes that are not our own only

    found = entry_points(group=MEDIA_GROUP, name=scheme) if scheme else ()
    if len(found) > 1:
        raise ConfigError(f"several installed packages register the scheme {scheme!r}: uninstall all but one")
    return next(iter(found), None)


def redact(uri: str) -> str:
    """A URI without user, password and query, for logs and messages; never raises.

    Everything up to the last ``@`` goes: a password that was not escaped may hold any character. What stands before
    ``://`` and is no scheme's name belongs to that: somebody wrote one slash or one colon too few.
    """
    scheme, separator, rest = uri.partition("://")
    if not SCHEME.fullmatch(scheme):
        scheme, separator, rest = "", "", uri
    if not rest.startswith("/"):  # with three slashes there is no user, and a directory may be called anything
        _, at, tail = rest.rpartition("@")
        rest = f"***@{tail}" if at else rest
    path, question, _ = rest.partition("?")
    path, hash_, _ = path.partition("#")
    return f"{scheme}{separator}{path}" + ("?***" if question else "#***" if hash_ else "")


def _disk(netloc: str, path: str, has_more: bool, options: Mapping[str, object] | None, shown: str) -> Location:
    directory = _directory(netloc, path, shown)
    if has_more:
        raise ConfigError(f"{shown}: file:// takes no options after the path; write ? as %3F and # as %23")
    if options:
        raise ConfigError(f"{shown}: storage_options are only for object stores")
    return Location("disk", "file", directory)


def _directory(netloc: str, path: str, shown: str) -> str:
    path = _unquoted(path, shown)
    is_directory = path.startswith("/") and os.path.normpath(path).strip("/") != "" and "\0" not in path
    if netloc not in ("", "localhost") or not is_directory:
        raise ConfigError(f"{shown}: expected three slashes and an absolute directory, {EXAMPLE}")
    return path


def _bucket_path(scheme: str, netloc: str, path: str, shown: str) -> str:
    if "@" in netloc or ":" in netloc:
        raise ConfigError(
            f"{shown}: expected a bucket after {scheme}://. Credentials belong into storage_options or the "
            "environment, a server's address into the option endpoint_url"
        )
    if not netloc:
        raise ConfigError(f"{shown}: names no bucket, e.g. {scheme}://bucket/prefix")
    prefix = [part for part in _unquoted(path, shown).split("/") if part]
    if any(part in (".", "..") for part in prefix):
        raise ConfigError(f"{shown}: a prefix has no . or .. in it")
    return "/".join([netloc, *prefix])


def _pool(parts: SplitResult, storage_options: Mapping[str, object], shown: str) -> Location:
    """A Mooncake master, and what the keys of this cache begin with."""
    wanted = f"{shown}: expected mooncake://HOST:PORT/name with the RPC port of a Mooncake master, 50051 by default"
    try:
        port = parts.port
    except ValueError as exc:
        raise ConfigError(f"{wanted} ({exc})") from exc
    if not parts.hostname or not port or "@" in parts.netloc or parts.fragment:
        raise ConfigError(f"{wanted}, without credentials and without #")
    name = [part for part in parts.path.split("/") if part] or [POOL_NAME]
    if not all(POOL_NAME_PART.fullmatch(part) for part in name) or len("/".join(name)) > POOL_NAME_MAX:
        raise ConfigError(
            f"{wanted}; a name has up to {POOL_NAME_MAX} letters, digits and . _ - in it, and no part of it is . or .."
        )
    options: dict[str, object] = {**_named(parts.query, shown, "?protocol=rdma"), **storage_options}
    for option, value in options.items():
        if option not in MOONCAKE_OPTIONS and MOONCAKE_VARIABLE.fullmatch(option) is None:
            raise ConfigError(f"{shown}: {_unknown(option, MOONCAKE_OPTIONS)}, and variables MC_* and MOONCAKE_*")
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise ConfigError(
                f"option {option} of storage_uri: expected a string or a whole number, got a {type(value).__name__}"
            )
    if str(options.get("protocol", "tcp")) not in ("tcp", "rdma"):
        raise ConfigError("option protocol of storage_uri: expected tcp or rdma")
    if not str(options.get("global_segment_size", 0)).isdecimal():
        raise ConfigError("option global_segment_size of storage_uri: expected a number of bytes; 0 gives no memory")
    return Location("pool", "mooncake", "/".join([parts.netloc, *name]), options)


def _unquoted(path: str, shown: str) -> str:
    try:
        return unquote(path, errors="strict")
    except UnicodeDecodeError as exc:  # replaced by one sign for all of them, two places would become one
        raise ConfigError(f"{shown}: what %ff and the like stand for is not UTF-8") from exc


def _named(query: str, shown: str, example: str, *, is_strict: bool = True) -> dict[str, str]:
    """The options of a query, each once. A plus is one: secrets have it, and no option has the blank of a form."""
    try:
        pairs = parse_qsl(
            query.replace("+", "%2B"),
            keep_blank_values=True,
            strict_parsing=is_strict and bool(query),
            errors="strict",
        )
    except ValueError:
        raise ConfigError(f"{shown}: expected options such as {example}") from None
    named = dict(pairs)
    if len(named) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ConfigError(f"{shown}: option {twice} stands there twice")
    return named


def _query(scheme: str, query: str, shown: str) -> dict[str, object]:
    options: dict[str, object] = {**_named(query, shown, "?endpoint_url=http://host:9000")}
    for name in options:
        if name not in OBJECT_OPTIONS[scheme]:
            raise ConfigError(f"{shown}: {_unknown(name, OBJECT_OPTIONS[scheme])}")
    return _checked(scheme, options)


def _checked(scheme: str, options: Mapping[str, object]) -> dict[str, object]:
    """Options with their values read; names are checked where this module knows all of them (s3)."""
    checked = dict(options)
    if scheme in ("memory", "shared+file") and checked:
        raise ConfigError(f"setting storage_options: {scheme}:// takes none")
    endpoint = checked.get("endpoint_url")
    if isinstance(endpoint, str):
        found = ENDPOINT.fullmatch(endpoint)
        if not found:
            raise ConfigError(
                "option endpoint_url of storage_uri: expected http://host:port or https://host, alone: what signs "
                "requests goes into the options key and secret, or into the environment"
            )
        checked["endpoint_url"] = found[1].lower() + found[2]  # one place has one name
    if scheme != "s3":
        _refuse_slips(scheme, checked)
        return checked
    known = (*OBJECT_OPTIONS["s3"], *CLIENT_OPTIONS)
    for name, value in checked.items():
        if name not in known:
            raise ConfigError(f"setting storage_options: {_unknown(name, known)}")
        if name in ("anon", "verify") and isinstance(value, str):
            read = BOOLEANS.get(value.lower(), value if name == "verify" else None)
            if read is None:
                raise ConfigError(f"option {name} of storage_uri: expected true or false")
            checked[name] = read
        elif name == "addressing_style" and value not in ("auto", "path", "virtual"):
            raise ConfigError(f"option {name} of storage_uri: expected auto, path or virtual")
        elif name in OBJECT_OPTIONS["s3"] and name not in ("anon", "verify") and not isinstance(value, str):
            raise ConfigError(f"option {name} of storage_uri: expected a string, got a {type(value).__name__}")
    for name in ("key", "secret"):
        # Half of the requests would be signed with it, and the others with what the environment has.
        if checked.get(name) == "" and checked.get("anon") is not True:
            raise ConfigError(f"option {name} of storage_uri: it is empty; give it a value, or leave it out")
    return checked


def _refuse_slips(scheme: str, options: Mapping[str, object]) -> None:
    """Their clients ignore a name that they do not know: with ``endpoint`` prompts' KV would go to another service."""
    known = OBJECT_OPTIONS[scheme]
    for name in options:
        if name not in known and difflib.get_close_matches(name, known, n=1, cutoff=SLIP_LIKENESS):
            raise ConfigError(f"setting storage_options: {_unknown(name, known)}, and what its client takes besides")


def _unknown(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"unknown option {name!r}; {hint}known options: {', '.join(known) or 'none'}"
