"""Settings: vLLM's ``kv_connector_extra_config`` (or a CLI's flags) to one frozen, validated value.

The only place that sees untyped settings. Unknown names and wrong values are errors that name the nearest known name,
what was expected and what was given. Values are plain data; nothing here opens or creates anything.
"""

import difflib
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tiered_kv.errors import ConfigError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}iB"] = 1 << (10 * _power)
    _UNITS[f"{_letter}B"] = 1000**_power

SIZE_MAX = (1 << 63) - 1
MIN_FREE_BYTES_DEFAULT = 1 << 30
HOST_BYTES_DEFAULT_MAX = 8 << 30
HOST_SHARE_DEFAULT = 0.1
DISK_SHARE_DEFAULT = 0.1
OBJECT_SCHEMES = frozenset({"s3", "gs", "az", "memory", "shared+file"})


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
    if not path.is_absolute():
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
    if not text.startswith("unix:///") or text == "unix:///":
        raise ValueError("expected the socket of a running server, unix:///path/of/socket")
    return text


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
    return field(default=default, metadata={"parse": parse, "help": text, "shown": shown})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a user can set. One line of help each; `docs/configuration.md` is made from these."""

    storage_uri: str = _setting(_uri, "lowest tier: file:///absolute/dir is the local disk tier (required)", "")
    host_bytes: int | None = _setting(
        parse_size, "host memory of the server; default min(10 % of the memory limit, 8 GiB)"
    )
    disk_path: Path | None = _setting(_directory, "local disk tier in front of an object store; an error with file://")
    disk_bytes: int | None = _setting(parse_size, "limit of the disk tier; default 10 % of the free space")
    min_free_bytes: int = _setting(
        parse_size, "free space to leave on the disk tier's file system", MIN_FREE_BYTES_DEFAULT, shown="1GiB"
    )
    chunk_tokens: int = _setting(_positive_int, "tokens in one chunk; a multiple of vLLM's block size", 256)
    server: str | None = _setting(_socket, "unix:///path of a running `tiered-kv serve`; default: one is started")
    model_id: str | None = _setting(_text, "names the weights; promises that equal names mean equal weights")
    strict: bool = _setting(_boolean, "refuse to start rather than serve without the cache", default=False)
    lookup_timeout_ms: float = _setting(_number(1, 60_000), "longest wait for the server's first answer", 250.0)
    promotion_wait_ms: float | None = _setting(
        _wait, "longest wait for chunks from a slower tier; auto: never slower than recomputing", shown="auto"
    )
    promotion_deadline_ms: float = _setting(_number(1, 600_000), "bound of an automatic wait", 10_000.0)
    lease_s: float = _setting(_number(1, 3600), "how long a request that is not admitted keeps its chunks leased", 30.0)
    drain_s: float = _setting(_number(0, 3600), "longest time a server without clients writes what it holds", 30.0)
    start_timeout_s: float = _setting(_number(1, 600), "longest wait for the server to start", 30.0)
    pinned_share: float = _setting(_number(0.001, 0.5), "share of vLLM's blocks that stores may pin at once", 0.1)

    @classmethod
    def from_mapping(cls, settings: Mapping[str, object]) -> "Config":
        """Validate settings as a user wrote them.

        Raises:
            ConfigError: A name is unknown, a value is of the wrong kind, or settings contradict each other.
        """
        known = {f.name: f.metadata for f in fields(cls)}
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
                given = redact(value) if name == "storage_uri" and isinstance(value, str) else value
                raise ConfigError(f"setting {name}: {exc}, got {given!r}") from exc
        config = cls(**values)
        config.disk_root()
        return config

    def disk_root(self) -> Path:
        """The directory of the local disk tier.

        Raises:
            ConfigError: The URI names no directory, or names a kind of storage this version does not have.
        """
        example = 'e.g. "storage_uri": "file:///var/cache/tiered_kv"'
        if not self.storage_uri:
            raise ConfigError(f"setting storage_uri is required, {example}")
        uri = urlsplit(self.storage_uri)
        if uri.scheme in OBJECT_SCHEMES:
            raise ConfigError(
                f"storage_uri {redact(self.storage_uri)!r}: object stores are not in this version yet; "
                f"use a local directory, {example}"
            )
        if uri.scheme != "file":
            raise ConfigError(f"storage_uri {redact(self.storage_uri)!r}: unknown scheme {uri.scheme!r}, {example}")
        if uri.netloc not in ("", "localhost") or not _is_directory(unquote(uri.path)):
            raise ConfigError(
                f"storage_uri {redact(self.storage_uri)!r}: expected three slashes and an absolute directory, {example}"
            )
        if uri.query or uri.fragment:
            raise ConfigError(
                f"storage_uri {redact(self.storage_uri)!r}: file:// takes no options after the path; "
                "write ? as %3F and # as %23"
            )
        if self.disk_path is not None:
            raise ConfigError("disk_path is only for object stores: with file:// the URI itself is the disk tier")
        return Path(unquote(uri.path))

    def resolved_host_bytes(self) -> int:
        """``host_bytes``, or its default on this machine."""
        if self.host_bytes is not None:
            return self.host_bytes
        return min(int(memory_limit_bytes() * HOST_SHARE_DEFAULT), HOST_BYTES_DEFAULT_MAX)

    def resolved_disk_bytes(self, existing_bytes: int = 0) -> int:
        """``disk_bytes``, or its default: a share of what is free, counting what the cache holds already."""
        if self.disk_bytes is not None:
            return self.disk_bytes
        root = self.disk_root()
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
        return [Setting(f.name, f.metadata["shown"] or _shown(f.default), f.metadata["help"]) for f in fields(cls)]

    def digest(self) -> str:
        """Short name of the limits a server runs with; two clients of one directory must agree on them."""
        limits = f"{self.resolved_host_bytes()} {self.disk_bytes} {self.min_free_bytes}"
        return hashlib.sha256(limits.encode()).hexdigest()[:16]

    def to_mapping(self) -> dict[str, object]:
        """Settings as plain values that :meth:`from_mapping` takes back, to pass to another process."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["promotion_wait_ms"] = "auto" if self.promotion_wait_ms is None else self.promotion_wait_ms
        return {k: str(v) if isinstance(v, Path) else v for k, v in values.items() if v is not None}

    def describe(self) -> dict[str, object]:
        """Settings as plain values for a log line, with secrets redacted."""
        return {**self.to_mapping(), "storage_uri": redact(self.storage_uri)}


def _shown(default: object) -> str:
    if default is None:
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


def size_text(size_bytes: int) -> str:
    """A size as people write it: ``4 GiB``, ``1.5 GiB``."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(size_bytes.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{size_bytes / (1 << 10 * power):.1f}".removesuffix(".0") + f" {units[power]}"


def _is_directory(path: str) -> bool:
    return path.startswith("/") and os.path.normpath(path).strip("/") != "" and "\0" not in path


def redact(uri: str) -> str:
    """A URI without user, password and query, for logs and messages; never raises.

    Everything up to the last ``@`` goes: a password that was not escaped may hold any character.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        scheme, rest = "", uri
    if not rest.startswith("/"):  # with three slashes there is no user, and a directory may be called anything
        _, at, tail = rest.rpartition("@")
        rest = f"***@{tail}" if at else rest
    path, question, _ = rest.partition("?")
    path, hash_, _ = path.partition("#")
    return f"{scheme}{separator}{path}" + ("?***" if question else "#***" if hash_ else "")


def memory_limit_bytes(cgroup: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Memory this process may use: the machine's, or less where its cgroup or one above it says so."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _limit_files(cgroup, membership):
        try:
            text = path.read_text().strip()
        except OSError:
            continue  # the other version of cgroups, or no limit file at the root: the machine's memory holds
        if text.isdigit():
            limit = min(limit, int(text))
    return limit


def _limit_files(cgroup: Path, membership: Path) -> list[Path]:
    """Where limits of this process may stand; lines of ``membership`` are ``id:controllers:/path``."""
    result = [cgroup / "memory.max", cgroup / "memory" / "memory.limit_in_bytes"]
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return result  # no cgroups here
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root, name = cgroup, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroup / "memory", "memory.limit_in_bytes"
        else:
            continue
        place = root / path.lstrip("/")
        while place != root and root in place.parents:
            result.append(place / name)
            place = place.parent
    return result
