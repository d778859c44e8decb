"""What a vLLM engine was started with, reduced to what may change its KV: the namespace's field ``settings``.

Owns reading ``VllmConfig`` and ``vllm.envs`` by the table in ``config_fields.py`` and writing any value in one
canonical form. Must not judge a field: the table does. A field that the table does not know enters, and is said once in
the log. Called once by the worker, when vLLM registers its KV cache: every default is resolved by then.
"""

import dataclasses
import enum
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path, PurePath
from typing import Any, Final

import torch
from vllm import envs

from tiered_kv.errors import ConfigError
from tiered_kv.vllm.config_fields import ENVIRONMENT, OFF, OFF_UNLESS_SET, TABLE, Section

logger = logging.getLogger("vllm." + __name__)

DEPTH_MAX: Final = 12
"""Nesting of a value, below the record's own limit: an object that holds itself ends there."""

TEXT_MAX: Final = 4096
"""Characters of one value in the record; a longer one enters as a digest."""

DERIVED: Final = frozenset({
    "model_arch_config", "original_max_model_len", "attention_chunk_size", "encoder_config",
    "hf_image_processor_config", "runner_type", "convert_type", "config_updated", "use_v2_model_runner",
})  # fmt: skip
"""Attributes that vLLM sets on a part beside its fields, made from these and from the model's config and files."""

_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")
_ABSENT: Final = object()


def kv_settings(vllm_config: Any) -> dict[str, object]:
    """Everything that may change KV and no other field of the namespace says: part -> field -> value.

    Raises:
        ConfigError: A file that a setting names cannot be read.
    """
    found: dict[str, dict[str, object]] = {}
    unknown = []
    for path, name, value, kind in _rows(vllm_config):
        if kind == "unknown":
            unknown.append(f"{path}.{name}".removeprefix("."))
        # Every part but the outermost has a name.
        found.setdefault(path or "vllm_config", {})[name] = _entry(f"{path}.{name}", value, kind)
    if unknown:
        _say_unknown(tuple(unknown))
    return dict(found)


def kind_of(path: str, name: str) -> str:
    """What the table says of a field: enters, file, secret, elsewhere, cannot or part; ``unknown`` if nothing."""
    return _kinds(path).get(name, "unknown")


def plain(value: object, depth: int = 0) -> object:
    """Any value in one form that is equal on every machine and after a restart: JSON without floats.

    Floats become their ``repr``, classes and functions their full names, enums their names, sets sorted lists,
    dataclasses and objects what they hold. Never an address in memory: every start would be a namespace of its own.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return f"sha256:{hashlib.sha256(value).hexdigest()}"
    if isinstance(value, PurePath | torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    if isinstance(value, type) or (hasattr(value, "__qualname__") and hasattr(value, "__module__")):
        return f"{value.__module__}.{value.__qualname__}"
    if depth >= DEPTH_MAX:
        return f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Mapping):
        return {str(plain(name, depth + 1)): plain(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item, depth + 1) for item in value), key=_written)
    return _object(value, depth)


def _object(value: object, depth: int) -> object:
    """An object of somebody's class: its fields if it has any, else its text, in which an address is cut out."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        fields = _fields(value)
    except Exception as exc:  # somebody's code: vLLM must start all the same, without the cache
        raise ConfigError(f"a setting of vLLM cannot be read, so it cannot be compared. class={name} {exc!r}") from exc
    if isinstance(fields, str):
        return _ADDRESS.sub("", fields)
    return {"class": name, "fields": plain(fields, depth + 1)}


def _fields(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)) or callable(dump := getattr(value, "to_dict", None)):
        return dump()
    if type(value).__repr__ is object.__repr__:
        slots = [vars(of).get("__slots__", ()) for of in type(value).__mro__]
        names = {name for some in slots for name in ((some,) if isinstance(some, str) else some)}
        held = {name: getattr(value, name, None) for name in names - {"__dict__", "__weakref__"}} | getattr(
            value, "__dict__", {}
        )
        return {name: item for name, item in held.items() if not callable(item)}
    return str(value)


def _rows(vllm_config: Any) -> Iterator[tuple[str, str, object, str]]:
    """Every field that enters: part, name, value and what the table says of it."""
    yield from _part("", vllm_config)
    yield from _environment()


def _part(path: str, config: Any) -> Iterator[tuple[str, str, object, str]]:
    for name in _names(config):
        kind, value = kind_of(path, name), getattr(config, name, None)
        below = f"{path}.{name}".removeprefix(".")
        if kind == "part":
            if value is not None:
                yield from _part(below, value)
        elif kind in ("enters", "file", "secret", "unknown") and OFF.get(below, _ABSENT) != value:
            yield path, name, value, kind


def _names(config: Any) -> list[str]:
    """The fields of a part, and what else was set on it: a later version's field, or a plain object's in a test."""
    fields = [field.name for field in dataclasses.fields(config)] if dataclasses.is_dataclass(config) else []
    known = {*fields, *dir(type(config))}
    # What vLLM itself sets beside the fields is derived from them: private, or an attribute of the class.
    return fields + [name for name in getattr(config, "__dict__", {}) if name not in known and not _is_derived(name)]


def _is_derived(name: str) -> bool:
    return name.startswith("_") or name in DERIVED


def _environment() -> Iterator[tuple[str, str, object, str]]:
    for name, read in envs.environment_variables.items():
        kind = kind_of(ENVIRONMENT, name)
        if kind in ("enters", "unknown") and (name not in OFF_UNLESS_SET.split() or name in os.environ):
            yield ENVIRONMENT, name, read(), kind


def _entry(name: str, value: object, kind: str) -> object:
    if kind == "file":
        return None if value is None else _file_digest(name, str(value))
    written = plain(value)
    # Of an unknown setting nobody knows whether it is a secret, and records lie in buckets.
    is_hidden = kind in ("secret", "unknown") and not (value is None or isinstance(value, bool) or written in ({}, []))
    text = _written(written)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}" if is_hidden or len(text) > TEXT_MAX else written


def _file_digest(name: str, path: str) -> str:
    try:
        return f"sha256:{hashlib.sha256(Path(path).read_bytes()).hexdigest()}"
    except OSError as exc:
        raise ConfigError(f"the file that {name.removeprefix('.')} names cannot be read. reason={exc}") from exc


def _written(value: object) -> str:
    return json.dumps(value, sort_keys=True)


@cache
def _kinds(path: str) -> Mapping[str, str]:
    section = TABLE.get(path)
    return {} if section is None else dict(rows(section))


def rows(section: Section) -> Iterator[tuple[str, str]]:
    """Every row of a section: the field and its kind."""
    for kind, names in (
        ("enters", section.enters),
        ("file", section.files),
        ("secret", section.secret),
        ("part", section.parts),
        *(("elsewhere", names) for names in section.elsewhere.values()),
        *(("cannot", names) for names in section.cannot.values()),
    ):
        for name in names.split():
            yield name, kind


@cache
def _say_unknown(names: tuple[str, ...]) -> None:
    """Once per process."""
    logger.warning(
        "vLLM has settings that this version of tiered_kv does not know; they are part of the cache's identity, so "
        "engines share only where they are equal. settings=%s",
        ",".join(names),
    )
