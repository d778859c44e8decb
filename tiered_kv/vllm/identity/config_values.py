"""The namespace's field ``settings``: those of vLLM's settings that may change KV.

Owns reading ``VllmConfig`` and ``vllm.envs`` by the table in ``config_fields.py``; ``canonical.py`` writes the values.
Must not judge a field: the table does. A field that the table does not know enters, and is said once in the log. Called
once by the worker, when vLLM registers its KV cache: every default is resolved by then.
"""

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from vllm import envs

from tiered_kv.errors import ConfigError
from tiered_kv.vllm.identity.canonical import digest, plain, written
from tiered_kv.vllm.identity.config_fields import ENVIRONMENT, OFF, OFF_UNLESS_SET, TABLE, Section

logger = logging.getLogger("vllm." + __name__)

TEXT_MAX: Final = 4096
"""Characters of one value in the record; a longer one enters as a digest."""

DERIVED: Final = frozenset({
    "model_arch_config", "original_max_model_len", "attention_chunk_size", "encoder_config",
    "hf_image_processor_config", "runner_type", "convert_type", "config_updated", "use_v2_model_runner",
})  # fmt: skip
"""Attributes that vLLM sets on a part beside its fields, made from these and from the model's config and files."""

READ: Final = frozenset({"enters", "file", "secret", "unknown"})
"""Kinds of fields that enter in every model."""

_ABSENT: Final = object()


def kv_settings(vllm_config: Any, *, has_states: bool = False) -> dict[str, object]:
    """Everything that may change KV and no other field of the namespace says: part -> field -> value.

    Args:
        has_states: The model has recurrent layers, so that what they alone read enters, too.

    Raises:
        ConfigError: A file that a setting names cannot be read, or a value cannot be compared.
    """
    found: dict[str, dict[str, object]] = {}
    unknown = []
    for path, name, value, kind in _rows(vllm_config, READ | {"recurrent"} if has_states else READ):
        if kind == "unknown":
            unknown.append(f"{path}.{name}".removeprefix("."))
        # Every part but the outermost has a name.
        found.setdefault(path or "vllm_config", {})[name] = _entry(f"{path}.{name}", value, kind)
    if unknown:
        _say_unknown(tuple(unknown))
    return dict(found)


def kind_of(path: str, name: str) -> str:
    """The table's kind of a field: a name of ``Section``'s, or ``unknown`` without a row."""
    return _kinds(path).get(name, "unknown")


def _rows(vllm_config: Any, kinds: frozenset[str]) -> Iterator[tuple[str, str, object, str]]:
    """Every field of the kinds that are read: part, name, value and the table's kind."""
    yield from _part("", vllm_config, kinds)
    yield from _environment(kinds)


def _part(path: str, config: Any, kinds: frozenset[str]) -> Iterator[tuple[str, str, object, str]]:
    for name in _names(config):
        kind, value = kind_of(path, name), getattr(config, name, None)
        below = f"{path}.{name}".removeprefix(".")
        if kind == "part":
            if value is not None:
                yield from _part(below, value, kinds)
        elif kind in kinds and OFF.get(below, _ABSENT) != value:
            yield path, name, value, kind


def _names(config: Any) -> list[str]:
    """The fields of a part and its other attributes: a later version's field, or a plain object's in a test."""
    fields = [field.name for field in dataclasses.fields(config)] if dataclasses.is_dataclass(config) else []
    known = {*fields, *dir(type(config))}
    # What vLLM itself sets beside the fields is derived from them: private, or an attribute of the class.
    return fields + [name for name in getattr(config, "__dict__", {}) if name not in known and not _is_derived(name)]


def _is_derived(name: str) -> bool:
    return name.startswith("_") or name in DERIVED


def _environment(kinds: frozenset[str]) -> Iterator[tuple[str, str, object, str]]:
    for name, read in envs.environment_variables.items():
        kind = kind_of(ENVIRONMENT, name)
        if kind in kinds and (name not in OFF_UNLESS_SET.split() or name in os.environ):
            yield ENVIRONMENT, name, read(), kind


def _entry(name: str, value: object, kind: str) -> object:
    if kind == "file":
        return None if value is None else file_digest(name, str(value))
    try:
        form = plain(value)
    except ConfigError as exc:
        raise ConfigError(f"{exc} setting={name.removeprefix('.')}") from exc
    # An unknown setting may be a secret, and records lie in buckets.
    is_hidden = kind in ("secret", "unknown") and not (value is None or isinstance(value, bool) or form in ({}, []))
    text = written(form)
    return digest(text) if is_hidden or len(text) > TEXT_MAX else form


def file_digest(name: str, path: str) -> str:
    """Digest of the file that a setting names.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return digest(Path(path).read_bytes())
    except OSError as exc:
        raise ConfigError(f"the file that {name.removeprefix('.')} names cannot be read. reason={exc}") from exc


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
        ("recurrent", section.recurrent),
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
