"""Settings: vLLM's ``kv_connector_extra_config`` (or a CLI's flags) to one frozen, validated value.

The only place that sees untyped settings. Unknown names and wrong values are errors that name the nearest known name,
what was expected and what was given. Values are plain data; nothing here opens or creates anything.
"""

import difflib
import hashlib
import ipaddress
import json
import os
import re
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tiered_kv.errors import ConfigError
from tiered_kv.location import EXAMPLE, Location, parse_location, redact
from tiered_kv.machine import memory_limit_bytes

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}iB"] = 1 << (10 * _power)
    _UNITS[f"{_letter}B"] = 1000**_power

SIZE_MAX = (1 << 63) - 1
LIMIT_MIN = 64 << 10
"""Of host memory and of a bucket: less holds no chunk of any model that is served. A disk tier says its own least."""

MIN_FREE_BYTES_DEFAULT = 1 << 30
HOST_BYTES_DEFAULT_MAX = 8 << 30
HOST_SHARE_DEFAULT = 0.1
OFFLOADING_HOST_BYTES = 1 << 30
OFFLOADING_ROWS = 64
"""Below vLLM's offloading host memory is vLLM's, and what goes through slots needs few: of so many a session may lease
24, and its loads have half of these at once, about as many as a bucket is read with (``storage_concurrency``)."""

DISK_SHARE_DEFAULT = 0.1
TIME_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
TTL_SHORT_S = 600
"""A shorter one loses what is in use, because uses are written once a minute; who writes 7 means days."""

TTL_MAX_S = 100 * 366 * 86400
BUCKET_SETTINGS = ("storage_bytes", "storage_ttl", "single_writer", "evict_other_namespaces")


def parse_size(value: object) -> int:
    """Bytes of ``4294967296``, ``"4GiB"``, ``"500 MB"``.

    Raises:
        ValueError: Not a positive size.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("expected a size such as 4GiB or a number of bytes")
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"expected a size such as 4GiB; units are {', '.join(u for u in _UNITS if u)}")
        size = float(match[1]) * _UNITS[match[2]]
        value = (
            (int(match[1]) * _UNITS[match[2]] if match[1].isdigit() else int(size))
            if size <= SIZE_MAX
            else SIZE_MAX + 1
        )
    if not 0 < value <= SIZE_MAX:
        raise ValueError("expected a size above zero and below 8 EiB")
    return value


def _limit(value: object) -> int:
    """A size that a tier may have: ``"host_bytes": 8`` means GiB to who writes it, and would hold nothing."""
    size = parse_size(value)
    if size < LIMIT_MIN:
        raise ValueError("expected a size of at least 64KiB, such as 4GiB; a number without a unit is bytes")
    return size


def parse_time_s(value: object) -> float:
    """Seconds of ``3600``, ``"90m"``, ``"12h"``, ``"7d"``.

    Raises:
        ValueError: Not a positive time.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([smhd])\s*", value)
        seconds = float(match[1]) * TIME_UNITS_S[match[2]] if match else 0.0
        expected = "expected a time such as 12h or 7d, with its unit (s, m, h or d)"
    else:
        seconds = value if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
        expected = "expected a time such as 12h or 7d (units s, m, h, d) or a number of seconds from 1"
    if not 1 <= seconds <= TTL_MAX_S:
        raise ValueError(expected)
    return float(seconds)


def _number(low: float, high: float) -> Callable[[object], float]:
    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"expected a number from {low:g} to {high:g}")
        return float(value)

    return parse


def _positive_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError("expected a whole number above zero")
    return value


def _tail_tokens(value: object) -> int | None:
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError('expected "auto", 0 or a whole number of tokens')
    return value


def _one_of(*known: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in known:
            raise ValueError(f"expected {' or '.join(known)}")
        return str(value)

    return parse


_eviction = _one_of("multi-queue", "lru")
_admission = _one_of("all", "second-touch")


def _options(value: object) -> dict[str, object]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError("expected a mapping of option names to values")
    try:
        plain: dict[str, object] = json.loads(json.dumps(dict(value)))  # they are passed to another process
    except (TypeError, ValueError):
        raise ValueError("expected a mapping of option names to plain values, as in JSON") from None
    return plain


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("expected a non-empty string")
    return value


def _directory(value: object) -> Path:
    path = Path(_text(value))
    if not path.is_absolute() or "\0" in str(path):
        raise ValueError("expected an absolute path")
    return path


def _wait(value: object) -> float | None:
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 600_000:
        raise ValueError('expected "auto" or a number from 0 to 600000')
    return float(value)


def _socket(value: object) -> str:
    text = _text(value)
    if not text.startswith("unix:///") or text == "unix:///" or "\0" in text:
        raise ValueError("expected the socket of a running server, unix:///path/of/socket")
    return text


PEERS_MAX = 16
"""Peers are asked one after the other."""

BUCKETS_PEERS = "bucket"
"""Names, among the peers, every machine of the bucket that listens."""

_LABEL = "[0-9A-Za-z_](?:[0-9A-Za-z_-]{0,61}[0-9A-Za-z_])?"
_PEER_ADDRESS = re.compile(
    rf"(?:(?P<name>{_LABEL}(?:\.{_LABEL})*\.?)|\[(?P<v6>[0-9A-Fa-f:.]+)\]):(?P<port>[1-9][0-9]{{0,4}})"
)


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``0.0.0.0:7460`` or ``[::]:7460``.

    Raises:
        ValueError: It is none.
    """
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
        is_plain = text == parts.netloc and "@" not in text
    except ValueError:  # its own words say less
        host, port, is_plain = None, None, False
    if host is None or port is None or not is_plain:
        raise ValueError("expected HOST:PORT such as 0.0.0.0:7460, a port up to 65535")
    return host, port


def is_peer_address(text: str) -> bool:
    """Whether a text is a host's name or address that can be asked for, and a port: what nobody stumbles over later."""
    found = _PEER_ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        return False
    if found["name"] is not None:
        return len(found["name"]) <= 253
    try:
        ipaddress.IPv6Address(found["v6"])
    except ValueError:
        return False
    return True


def _address(value: object) -> str:
    text = value if isinstance(value, str) else ""  # a port alone is what people write
    parse_address(text)
    return text


def _peers(value: object) -> tuple[str, ...]:
    expected = f"expected a list of 1 to {PEERS_MAX} of https://HOST:PORT, dns://NAME:PORT and {BUCKETS_PEERS}"
    if isinstance(value, str) or not isinstance(value, list | tuple) or not 1 <= len(value) <= PEERS_MAX:
        raise ValueError(expected)
    for place in value:
        scheme, _, address = place.partition("://") if isinstance(place, str) else ("", "", "")
        if place != BUCKETS_PEERS and (scheme not in ("https", "dns") or not is_peer_address(address)):
            raise ValueError(expected)
    if len(set(value)) != len(value):
        raise ValueError(f"{expected}, each once")
    return tuple(value)


def peer_url(value: object) -> str:
    """The URL of a peer, checked.

    Raises:
        ValueError: It is none.
    """
    scheme, _, address = value.partition("://") if isinstance(value, str) else ("", "", "")
    if not isinstance(value, str) or scheme != "https" or not is_peer_address(address):
        raise ValueError("expected a URL such as https://node-a:7460")
    return value


def _uri(value: object) -> str:
    text = _text(value)
    try:
        urlsplit(text)
    except ValueError as exc:
        raise ValueError(f"expected a URI such as file:///var/cache/tiered_kv ({exc})") from exc
    if not text.isprintable():
        raise ValueError("expected a URI without control characters")
    return text


@dataclass(frozen=True, slots=True)
class Setting:
    """What can be told of one setting without a value: for documentation and the CLI."""

    name: str
    default: str
    help: str


def _setting(parse: Callable[[object], Any], text: str, default: Any = None, *, shown: str | None = None) -> Any:
    """A setting; ``shown`` is how its default is written where that is not the value itself."""
    return field(default=default, hash=parse is not _options, metadata={"parse": parse, "help": text, "shown": shown})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a user can set. One line of help each; `docs/configuration.md` is made from these."""

    storage_uri: str = _setting(
        _uri,
        "lowest tier: file:///absolute/dir is the local disk tier, s3://bucket/prefix an object store, "
        "mooncake://host:port/name a Mooncake pool (required)",
        "",
    )
    storage_options: Mapping[str, object] | None = _setting(
        _options, "options of the object store, e.g. endpoint_url, region, key, secret; default: the environment's"
    )
    storage_bytes: int | None = _setting(_limit, "limit of the object store, all servers together; default: none")
    storage_ttl: float | None = _setting(parse_time_s, "age after which unused objects are deleted, e.g. 7d")
    storage_timeout_s: float = _setting(_number(0.1, 600), "longest wait for one operation of the object store", 10.0)
    storage_concurrency: int = _setting(_positive_int, "transfers to and from the object store at once", 16)
    single_writer: bool = _setting(
        _boolean, "promise that one server writes to a store without conditional writes", default=False
    )
    evict_other_namespaces: bool = _setting(
        _boolean, "let the limit delete other models' objects below the URI, too", default=False
    )
    host_bytes: int | None = _setting(
        _limit,
        "host memory of the server; default min(10 % of the memory limit, 8 GiB), below vLLM's offloading no more than "
        "1 GiB or 64 rows",
    )
    disk_path: Path | None = _setting(_directory, "local disk tier in front of an object store; an error with file://")
    disk_bytes: int | None = _setting(parse_size, "limit of the disk tier; default 10 % of the free space")
    min_free_bytes: int = _setting(
        parse_size, "free space to leave on the disk tier's file system", MIN_FREE_BYTES_DEFAULT, shown="1GiB"
    )
    eviction: str = _setting(_eviction, "what leaves host memory and disk first: multi-queue or lru", "multi-queue")
    disk_admission: str = _setting(
        _admission, "what is written to disk: all, or second-touch: only what is asked for or stored again", "all"
    )
    storage_admission: str = _setting(_admission, "the same for the object store: all or second-touch", "all")
    min_share: float | None = _setting(
        _number(0, 1), "share of host memory and disk that this model keeps from others", shown="0.0"
    )
    max_share: float | None = _setting(
        _number(0.001, 1), "share of host memory and disk that this model may take", shown="1.0"
    )
    chunk_tokens: int = _setting(
        _positive_int,
        "tokens in one chunk; a multiple of vLLM's block size (models with recurrent layers: that block)",
        256,
    )
    save_decode: bool = _setting(
        _boolean, "keep generated tokens, too; written to disk and bucket when a prompt has them", default=True
    )
    tail_tokens: int | None = _setting(
        _tail_tokens,
        "keep prompts' ends below a chunk in host memory and on disk, in steps of so many tokens; 0: none; auto: in "
        "whole blocks, of requests that name a session or go on from an earlier prompt",
        shown="auto",
    )
    request_pin_share: float = _setting(_number(0, 0.5), "share of each tier's limit that requests may pin", 0.1)
    tag_pin_share: float = _setting(_number(0, 1), "share of what requests may pin that those of one tag may", 0.5)
    sessions_need_owner: bool = _setting(
        _boolean, "ignore session_id of requests that have neither tag nor cache_salt", default=False
    )
    peers: tuple[str, ...] | None = _setting(
        _peers,
        'machines that are read from, before the bucket: ["https://node-b:7460", "dns://NAME:7460", "bucket"]',
    )
    peer_listen: str | None = _setting(
        _address, "HOST:PORT where other machines may read this one's memory and disk, e.g. 0.0.0.0:7460"
    )
    peer_url: str | None = _setting(
        peer_url, "where other machines reach peer_listen, e.g. https://node-a:7460; default: this machine's address"
    )
    peer_key_file: Path | None = _setting(_directory, "file with the 64 hex digits that all these machines share")
    peer_timeout_s: float = _setting(
        _number(0.1, 600), "longest wait for one blob of the peers, and longest loan of one in memory to them", 5.0
    )
    peer_serve_bytes_s: int | None = _setting(parse_size, "most bytes per second given to peers; default: no limit")
    server: str | None = _setting(
        _socket, "unix:///path of a running `tiered-kv serve`; default: the directory's server, started if none runs"
    )
    model_id: str | None = _setting(_text, "names the weights; promises that equal names mean equal weights")
    share_vllm_versions: bool = _setting(
        _boolean,
        "share with other minor versions of vLLM and transformers; promises that these compute equal KV",
        default=False,
    )
    strict: bool = _setting(_boolean, "refuse to start rather than serve without the cache", default=False)
    lookup_timeout_ms: float = _setting(_number(1, 60_000), "longest wait for the server's first answer", 250.0)
    promotion_wait_ms: float | None = _setting(
        _wait, "longest wait for chunks from a slower tier; auto: never slower than recomputing", shown="auto"
    )
    promotion_deadline_ms: float = _setting(_number(1, 600_000), "bound of an automatic wait", 10_000.0)
    lease_s: float = _setting(_number(1, 3600), "how long a request that is not admitted keeps its chunks leased", 30.0)
    drain_s: float = _setting(_number(0, 3600), "longest time a server without clients writes what it holds", 30.0)
    start_timeout_s: float = _setting(_number(1, 600), "longest wait for the server to start", 30.0)
    pinned_share: float = _setting(
        _number(0.001, 0.5),
        "share of vLLM's blocks that chunks waiting for a slot may keep from requests; not of pins",
        0.1,
    )

    host_bytes_default: int | None = None  # no setting: see below_offloading
    is_guest: bool = False  # no setting: see as_guest

    @classmethod
    def from_mapping(cls, settings: Mapping[str, object]) -> "Config":
        """Validate settings as a user wrote them.

        Raises:
            ConfigError: A name is unknown, a value is of the wrong kind, or settings contradict each other.
        """
        known = {f.name: f.metadata for f in cls._fields()}
        values: dict[str, Any] = {}
        for name, value in settings.items():
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ";"
                raise ConfigError(f"unknown setting {name!r}{hint} known settings: {', '.join(sorted(known))}")
            if value is None:
                continue
            try:
                values[name] = known[name]["parse"](value)
            except ValueError as exc:
                raise ConfigError(f"setting {name}: {exc}, got {_safe(name, value)!r}") from exc
        config = cls(**values)
        config._check_storage()
        config._check_peers()
        if config.min_share and config.max_share and config.min_share > config.max_share:
            raise ConfigError(
                f"min_share={config.min_share:g} is more than max_share={config.max_share:g}: what this model keeps is "
                "part of what it may take"
            )
        return config

    @classmethod
    def _fields(cls) -> list[Field[Any]]:
        """Those that are settings."""
        return [one for one in fields(cls) if one.metadata]

    def __repr__(self) -> str:
        return f"Config({self.describe()})"

    def below_offloading(self, row_bytes: int = 0) -> "Config":
        """The same for a tier below vLLM's offloading: a server that it starts has little host memory by default.

        Args:
            row_bytes: Of one of vLLM's rows; 0: not known.
        """
        least = max(OFFLOADING_HOST_BYTES, OFFLOADING_ROWS * row_bytes)
        return replace(self, host_bytes_default=min(least, _host_bytes_default()))

    def as_guest(self) -> "Config":
        """The same for a command that joins the server of a directory, whatever storage and memory that one has."""
        return replace(self, is_guest=True)

    def location(self) -> Location:
        """What ``storage_uri`` and ``storage_options`` name.

        Raises:
            ConfigError: They name no place, or an option is unknown.
        """
        if not self.storage_uri:
            raise ConfigError(f"setting storage_uri is required, {EXAMPLE}")
        return parse_location(self.storage_uri, self.storage_options)

    def _check_storage(self) -> None:
        location = self.location()
        if location.kind == "extension" and self.storage_admission != "all":
            raise ConfigError("storage_admission is only for object stores")
        for name in BUCKET_SETTINGS if location.kind == "pool" else ():
            if getattr(self, name):
                raise ConfigError(
                    f"{name} is only for object stores: a Mooncake pool is as large as the memory that its machines "
                    "give, and its master evicts"
                )
        if location.kind != "disk":
            if self.disk_path is None and self.disk_bytes is not None:
                raise ConfigError(
                    "disk_bytes is the limit of a local disk tier: set disk_path, or storage_bytes instead"
                )
            if self.disk_path is None and self.disk_admission != "all":
                raise ConfigError(
                    "disk_admission is of a local disk tier: set disk_path, or storage_admission for the bucket"
                )
            return
        if self.disk_path is not None:
            raise ConfigError("disk_path is only for object stores: with file:// the URI itself is the disk tier")
        if self.storage_admission != "all":
            raise ConfigError("storage_admission is only for object stores: with file:// it is disk_admission")
        for name in BUCKET_SETTINGS:
            if getattr(self, name):
                raise ConfigError(f"{name} is only for object stores: with file:// the limit is disk_bytes")

    def _check_peers(self) -> None:
        used = [name for name in ("peers", "peer_listen") if getattr(self, name) is not None]
        if used and self.location().kind in ("pool", "extension"):
            raise ConfigError(f"{used[0]} is for file:// and object stores, not for {self.location().scheme}://")
        if self.peers is not None and BUCKETS_PEERS in self.peers and self.location().kind != "object":
            raise ConfigError(
                f"setting peers: {BUCKETS_PEERS!r} needs an object store as storage_uri; name URLs or dns://"
            )
        if self.peer_url is not None and self.peer_listen is None:
            raise ConfigError("peer_url is for peer_listen: set it, too")
        if used and self.peer_key_file is None:
            raise ConfigError(f"{used[0]} needs peer_key_file, the secret that these machines share")
        if self.peer_key_file is not None and not used:
            raise ConfigError("peer_key_file is for peers and peer_listen: set one of them")
        if self.peer_serve_bytes_s is not None and self.peer_listen is None:
            raise ConfigError("peer_serve_bytes_s is for peer_listen: set it, too")

    def admissions(self) -> dict[str, str]:
        """What each secondary tier takes, by its name."""
        return {"disk": self.disk_admission, "object": self.storage_admission, "mooncake": self.storage_admission}

    def disk_root(self) -> Path | None:
        """The directory of the local disk tier: what file:// names, or ``disk_path``; None without a disk tier."""
        location = self.location()
        return Path(location.path) if location.kind == "disk" else self.disk_path

    def server_directory(self) -> Path:
        """Where a server of these settings has its lock, description and log: the disk tier, if there is one.

        Otherwise a directory of this user for this URI and host, which whoever uses it must make and check
        (``server/directory.py``).

        Raises:
            ConfigError: Such a one cannot be made anywhere.
        """
        root = self.disk_root()
        if root is not None:
            return root
        state = os.environ.get("XDG_STATE_HOME", "")
        try:
            base = state if os.path.isabs(state) else tempfile.gettempdir()
        except FileNotFoundError as exc:
            raise ConfigError(
                f"no directory for the server's own files can be written; set XDG_STATE_HOME. {exc}"
            ) from exc
        # A home directory may be mounted on many machines, and each has a server of its own.
        place = f"{socket.gethostname()} {self.location().identity}"
        return Path(base) / f"tiered_kv-{os.getuid()}" / f"state-{hashlib.sha256(place.encode()).hexdigest()[:16]}"

    def warnings(self) -> list[str]:
        """What a server should say once at its start about settings that are allowed and may surprise."""
        location, said = self.location(), []
        if location.kind == "object" and self.storage_bytes is None and self.storage_ttl is None:
            said.append(f"{location} has no limit: nothing is ever deleted there; set storage_bytes or storage_ttl")
        if location.kind == "object" and self.storage_ttl is not None and self.storage_ttl < TTL_SHORT_S:
            said.append(
                f"storage_ttl is {self.storage_ttl:g} s, and what nobody used for so long is deleted from {location}: "
                "a number without a unit is seconds, 7 days are 7d; uses are written once a minute"
            )
        if location.kind == "pool" and self.disk_root() is None:
            said.append(
                f"resets are remembered in XDG_STATE_HOME or /tmp, by the host's name, which {location} may outlive: "
                "then KV from before a reset is found again; set disk_path"
            )
        return said

    def resolved_host_bytes(self) -> int:
        """``host_bytes``, or its default on this machine."""
        return self.host_bytes or self.host_bytes_default or _host_bytes_default()

    def resolved_disk_bytes(self, existing_bytes: int = 0) -> int:
        """``disk_bytes``, or its default: a share of what is free, counting what the cache holds already."""
        if self.disk_bytes is not None:
            return self.disk_bytes
        root = self.disk_root()
        if root is None:
            raise ConfigError("there is no disk tier: storage_uri is an object store, and disk_path is not set")
        while not root.exists():
            root = root.parent
        space = os.statvfs(root)
        return int((space.f_bavail * space.f_frsize + existing_bytes) * DISK_SHARE_DEFAULT)

    @property
    def expected_min_free_bytes(self) -> int | None:
        """``min_free_bytes`` where it is not the default: what a client expects of a server that runs already."""
        return None if self.min_free_bytes == MIN_FREE_BYTES_DEFAULT else self.min_free_bytes

    @classmethod
    def settings(cls) -> list[Setting]:
        """Every setting with its default and one line of help."""
        return [Setting(f.name, f.metadata["shown"] or _shown(f.default), f.metadata["help"]) for f in cls._fields()]

    def digest(self) -> str:
        """Short name of what a server serves within which limits; two clients of one server must agree on it.

        A directory is not in it: it may be mounted in several places, and what lies in it says who serves it.
        """
        limits = f"{self.resolved_host_bytes()} {self.disk_bytes} {self.min_free_bytes}"
        location = self.location()
        if location.kind != "disk":
            limits += f" {location.identity} " + " ".join(str(getattr(self, name)) for name in BUCKET_SETTINGS)
        return hashlib.sha256(limits.encode()).hexdigest()[:16]

    def to_mapping(self) -> dict[str, object]:
        """Settings as plain values that :meth:`from_mapping` takes back, to pass to another process.

        A server that is started with them takes the default of who starts it.
        Secrets included: through a pipe, never on a command line, in an environment or in a log (:meth:`describe`).
        """
        values = {f.name: getattr(self, f.name) for f in self._fields()}
        values["host_bytes"] = self.host_bytes or self.host_bytes_default
        for name in ("promotion_wait_ms", "tail_tokens"):
            values[name] = "auto" if values[name] is None else values[name]
        return {k: str(v) if isinstance(v, Path) else v for k, v in values.items() if v is not None}

    def describe(self) -> dict[str, object]:
        """Settings as plain values for a log line, with secrets redacted."""
        return {name: _safe(name, value) for name, value in self.to_mapping().items()}


def _host_bytes_default() -> int:
    return min(int(memory_limit_bytes() * HOST_SHARE_DEFAULT), HOST_BYTES_DEFAULT_MAX)


def _safe(name: str, value: object) -> object:
    """A value as it may be shown: of URIs no user and query, of options the names alone."""
    if name == "storage_uri" and isinstance(value, str):
        return redact(value)
    if name == "storage_uri" and isinstance(value, Mapping | list):  # options in its place
        return f"<{type(value).__name__}>"
    if name == "storage_options":
        return dict.fromkeys(value, "***") if isinstance(value, Mapping) else "***"
    return value


def _shown(default: object) -> str:
    if default is None:
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


def size_text(size_bytes: int) -> str:
    """A size as people write it: ``4 GiB``, ``1.5 GiB``."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(size_bytes.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{size_bytes / (1 << 10 * power):.1f}".removesuffix(".0") + f" {units[power]}"
