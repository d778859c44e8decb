"""Namespace: everything that must be equal for KV bytes to be comparable.

Owns the canonical record, its digest and the comparison of two records. Must not know how the fields are found out
(the vLLM door does that) nor where a record is stored (the tiers do). Called by the vLLM door, the server and the CLI.

A record is JSON, and equal facts must give equal bytes on every machine and in every version of Python. Therefore
floats are refused (their text is nobody's contract): callers pass them as ``repr`` strings, which also keeps ``1`` and
``1.0`` apart.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from tiered_kv.errors import ConfigError

FORMAT_VERSION: Final = 3
"""Version of the blob, of the key derivation and of the record, together: a change to any of them is a new one."""

DIGEST_BYTES: Final = 16
MAX_RECORD_BYTES: Final = 1 << 20
"""6,000 layers (64 ranks of 100) take about 700 KiB; a record that is larger is not one of ours."""

MAX_DEPTH: Final = 32
"""Nesting of lists and dicts; configs of models seen so far stay below 8."""

MIN_INT: Final = -(2**63)
MAX_INT: Final = 2**64 - 1

SELF_TEST_NAMESPACE: Final = b"tiered_kv-test-1"
"""Digest of the namespace of the blobs of self-tests, which no SHA-256 of a record yields in practice."""

REQUIRED_FIELDS: Final = (
    "format_version",  # FORMAT_VERSION
    "weights",  # identity of the weights: HF commit, or digest of headers, sizes and sampled bytes, or model_id
    "text_config",  # the HF text config less cosmetic fields; holds RoPE and its scaling
    "kv_dtype",
    "quantization",
    "attention_backend",
    "kv_layout",
    "geometry",  # the canonical page per layer; never the number of blocks, outer strides or offsets
    "max_model_len",  # LongRoPE picks its factors by it
    "kv_scales",  # digest of the KV scales
    "block_tokens",
    "chunk_tokens",
    "tp",
    "pp",
    "dcp",
    "model_runner",  # generation of vLLM's model runner
    "vllm_version",  # minor version of vLLM, "0.32"; None where versions share
    "kv_encoding",  # what the bytes of a page mean where name and shape do not say it: per layer kind, the ISA, fp8
    "settings",  # every other setting of the engine that may change KV, by its name in vLLM's configuration
    "epoch",  # what a reset changes
)
"""Fields that every record has; what is unknown or does not apply is ``None``, never left out. More are allowed."""

ADDED_FIELDS: Final = {"vllm_version": 3, "kv_encoding": 3, "settings": 3}
"""Fields that records of earlier format versions lack: such a record is still read, for ``ls`` and ``evict``."""

FIRST_STORED_BY: Final = "first_stored_by"
"""Stands beside a record where it is kept, and is no part of it: who opened the namespace there first
(``stored_by.py``). So no field of a record may have this name."""

ABSENT: Final = "(absent)"
"""Stands in a ``FieldDifference`` for a field that one side does not have."""


class FieldDifference(NamedTuple):
    """One field in which two namespaces differ, e.g. ``("text_config.rope_theta", "10000.0", "500000.0")``."""

    path: str
    left: object
    right: object


@dataclass(frozen=True)
class Namespace:
    """One cache identity.

    Built by ``from_fields`` and ``from_record`` only, which check their arguments.

    Attributes:
        record: Canonical JSON: sorted keys, no spaces, ASCII, no floats.
        sha256: SHA-256 of ``record``; what the rolling prefix digests start from.
        digest: First 16 bytes of ``sha256``; names the namespace in paths, headers and messages, and starts the keys.
    """

    record: bytes
    sha256: bytes = field(init=False)
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        sha256 = hashlib.sha256(self.record).digest()
        object.__setattr__(self, "sha256", sha256)
        object.__setattr__(self, "digest", sha256[:DIGEST_BYTES])

    @classmethod
    def from_fields(cls, fields: Mapping[str, object]) -> "Namespace":
        """Write the canonical record of ``fields``; tuples are written as lists.

        Raises:
            ConfigError: A required field is missing, a value is not of JSON's exact types (a float, a set, a key that
                is not a string), nesting is too deep or the record too large.
        """
        return cls._of(dict(fields), REQUIRED_FIELDS)

    @classmethod
    def _of(cls, fields: dict[str, object], required: Iterable[str]) -> "Namespace":
        _check_value(fields, "", 0)
        missing = [name for name in required if name not in fields]
        if missing:
            raise ConfigError(f"namespace lacks required fields. missing={','.join(missing)}")
        if FIRST_STORED_BY in fields:
            raise ConfigError(f"a namespace has no field {FIRST_STORED_BY}: who stores changes no KV")
        record = _canonical(fields)
        if len(record) > MAX_RECORD_BYTES:
            raise ConfigError(f"namespace record is too large. limit={MAX_RECORD_BYTES} observed={len(record)}")
        return cls(record)

    @classmethod
    def from_record(cls, record: bytes) -> "Namespace":
        """Read a stored record, which must be canonical byte for byte; one of an earlier format version has its fields.

        Raises:
            ConfigError: It is not a record that ``from_fields`` of its version could have written.
        """
        if len(record) > MAX_RECORD_BYTES:
            raise ConfigError(f"namespace record is too large. limit={MAX_RECORD_BYTES} observed={len(record)}")
        namespace = cls._of_its_version(_parse(record))
        if namespace.record != record:
            raise ConfigError("namespace record is not canonical JSON (order, spaces, escapes or a repeated key)")
        return namespace

    @classmethod
    def _of_its_version(cls, fields: dict[str, Any]) -> "Namespace":
        said = fields.get("format_version")
        version = said if isinstance(said, int) and not isinstance(said, bool) else FORMAT_VERSION
        return cls._of(fields, [name for name in REQUIRED_FIELDS if version >= ADDED_FIELDS.get(name, 0)])

    def described(self, stored_by: str) -> bytes:
        """The record as it is kept beside the blobs, with the line of its first writer; empty: unknown."""
        return _canonical(self.fields | {FIRST_STORED_BY: stored_by}) if stored_by else self.record

    @classmethod
    def from_described(cls, data: bytes) -> tuple["Namespace", object]:
        """Read a record kept beside the blobs; its spacing and order may be those of a person.

        Returns:
            The namespace, and what stands there for the first who stored; None where nothing does.

        Raises:
            ConfigError: It is not a record, of whatever version.
        """
        fields = _parse(data)
        first = fields.pop(FIRST_STORED_BY, None)
        return cls._of_its_version(fields), first

    def in_epoch(self, epoch: str) -> "Namespace":
        """The same of another epoch; a record of an earlier format version stays one."""
        return self._of_its_version(self.fields | {"epoch": epoch})

    @property
    def fields(self) -> dict[str, Any]:
        """The record as a fresh dict; parsed on every call, so not for hot paths."""
        parsed: dict[str, Any] = json.loads(self.record)
        return parsed


def diff(a: Namespace, b: Namespace) -> list[FieldDifference]:
    """List the fields in which two namespaces differ, in order of their paths; empty when they are equal."""
    left = dict(_leaves(a.fields, ()))
    right = dict(_leaves(b.fields, ()))
    result = []
    for path in sorted(left.keys() | right.keys(), key=_sort_key):
        here, there = left.get(path, ABSENT), right.get(path, ABSENT)
        # Written out, True and 1 differ; compared as Python objects they do not. A field may hold ABSENT's own text.
        if (path in left) != (path in right) or _canonical(here) != _canonical(there):
            result.append(FieldDifference(_render(path), here, there))
    return result


def _parse(record: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(record)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"namespace record is not JSON. reason={exc}") from exc
    if not isinstance(fields, dict):
        raise ConfigError(f"namespace record is not an object. observed={type(fields).__name__}")
    return fields


_Path = tuple[str | int, ...]


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def _check_value(value: object, path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ConfigError(f"namespace is nested too deep. limit={MAX_DEPTH} field={path}")
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise ConfigError(f"namespace keys must be strings. field={path} key={name!r}")
            _check_value(item, f"{path}.{name}" if path else name, depth + 1)
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            _check_value(item, f"{path}[{position}]", depth + 1)
    elif isinstance(value, int):
        if not MIN_INT <= value <= MAX_INT:
            raise ConfigError(f"namespace integers have at most 64 bits. field={path}")
    elif not (value is None or isinstance(value, str)):
        hint = " (pass repr(value))" if isinstance(value, float) else ""
        raise ConfigError(
            f"namespace values are int, str, bool, None, list or dict{hint}. "
            f"field={path} observed={type(value).__name__}"
        )


def _leaves(value: object, path: _Path) -> Iterator[tuple[_Path, object]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(item, (*path, name))
    elif isinstance(value, list) and value:
        for position, item in enumerate(value):
            yield from _leaves(item, (*path, position))
    else:
        yield path, value


def _render(path: _Path) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _sort_key(path: _Path) -> tuple[tuple[int, int, str], ...]:
    return tuple((0, part, "") if isinstance(part, int) else (1, 0, part) for part in path)
