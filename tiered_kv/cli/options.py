"""Arguments and options that several verbs share, and how they are resolved."""

import atexit
import gc
import json
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from tiered_kv.cli.output import note, progress
from tiered_kv.errors import ConfigError
from tiered_kv.keys.conditions import Conditions
from tiered_kv.keys.naming import BlobName
from tiered_kv.keys.tags import tag_digest
from tiered_kv.ops.blob_table import BlobTable
from tiered_kv.ops.forest import Forest
from tiered_kv.ops.open import open_storage
from tiered_kv.ops.storage import Content, Reader, Storage, StoredBlob

Uri = Annotated[
    str, typer.Argument(help="The tier: file:///var/cache/tiered_kv, s3://bucket/prefix.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON (docs/cli-schema.json).")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", metavar="DIGITS", help="Only this namespace: its digest, or how it begins.")
]
StoredByOption = Annotated[
    list[str] | None,
    typer.Option(
        "--stored-by",
        metavar="CONDITION",
        help="Only what was stored by such versions or in such an encoding: 'vllm<0.32.1', 'tiered_kv==0.9.0', "
        "'encoding=CPU_ATTN/cpu/amx'. May be repeated: all have to be met.",
    ),
]

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any setting of `tiered-kv config`; may be repeated. Values may be JSON. Keep secrets in the environment.",
    ),
]

DIGITS_MIN = 4
"""Fewest digits of a digest or key that may stand for it."""


def open_uri(uri: str, more: list[str] | None, *, to_change: bool = False) -> Storage:
    """The tier a URI names, with the settings of ``--set``. The caller closes it.

    Args:
        to_change: The verb may write or remove something: a directory that is not ours is refused.
    """
    atexit.register(gc.freeze)  # at its end Python would look for garbage once more, among a million objects
    return open_storage(uri, parse_settings(more), to_change=to_change)


def find_namespace(content: Content, text: str | None) -> bytes | None:
    """The namespace that ``--namespace`` means; None for all.

    Raises:
        ConfigError: There is none like that, or more than one.
    """
    if text is None:
        return None
    prefix = _digits(text, "--namespace")
    spaces = content.records.keys() | BlobTable.of(content.blobs).rows().keys()
    found = sorted(space for space in spaces if space.hex().startswith(prefix))
    if len(found) != 1:
        shown = ", ".join(space.hex() for space in (found or sorted(spaces))[:10]) or "none"
        what = "more than one namespace begins" if found else "no namespace here begins"
        raise ConfigError(f"option --namespace: {what} with {prefix}; there are: {shown}")
    return found[0]


def find_chunk(forest: Forest, text: str) -> StoredBlob:
    """The chunk whose key is ``text`` or begins with it.

    Raises:
        ConfigError: There is none like that, or more than one.
    """
    prefix = _digits(text, "KEY")
    found = [blob for blob in forest.blobs if blob.name.key.hex().startswith(prefix)]
    if len(found) != 1:
        what = f"{len(found)} chunks have keys that begin" if found else "no chunk here has a key that begins"
        hint = ": write more of it" if found else ": `tiered-kv ls URI` lists them"
        raise ConfigError(f"{what} with {prefix}{hint}")
    return found[0]


def find_pin(pins: Mapping[BlobName, float], text: str) -> BlobName | None:
    """The pinned chunk whose key is ``text`` or begins with it; None if there is none.

    Raises:
        ConfigError: There is more than one like that.
    """
    prefix = _digits(text, "KEY")
    found = [name for name in pins if name.key.hex().startswith(prefix)]
    if len(found) > 1:
        raise ConfigError(f"{len(found)} pinned chunks have keys that begin with {prefix}: write more of it")
    return found[0] if found else None


def _digits(text: str, what: str) -> str:
    digits = text.lower()
    if not DIGITS_MIN <= len(digits) <= 32 or any(digit not in "0123456789abcdef" for digit in digits):
        raise ConfigError(f"{what}: expected {DIGITS_MIN} to 32 hex digits, got {text[:100]!r}")
    return digits


def parse_settings(given: Sequence[str] | None, *, option: str = "--set", names_uri: bool = False) -> dict[str, object]:
    """Settings by name; values are JSON where they can be read as such, else text.

    Args:
        option: That they were given with.
        names_uri: The command line names no storage URI, so that a setting may.

    Raises:
        ConfigError: One has no ``=``, or a name is given twice.
    """
    settings: dict[str, object] = {}
    for text in given or ():
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ConfigError(f"option {option}: expected NAME=VALUE, got {name!r}")
        if name in settings or (name == "storage_uri" and not names_uri):
            raise ConfigError(f"option {option}: {name} is given twice")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


def parse_tag(text: str) -> bytes:
    """The digest of ``--tag``.

    Raises:
        ConfigError: It is no tag. The message does not show it.
    """
    try:
        return tag_digest(text)
    except ValueError as exc:
        raise ConfigError(f"option --tag: expected {exc}") from exc


def parse_stored_by(texts: Sequence[str] | None) -> Conditions | None:
    """The conditions of ``--stored-by``; None without the option.

    Raises:
        ConfigError: It is no condition.
    """
    if not texts:
        return None
    try:
        return Conditions(texts)
    except ConfigError as exc:
        raise ConfigError(f"option --stored-by: {exc}") from exc


def look(storage: Reader) -> Content:
    """List a tier, with a progress bar on a terminal; prints notes on gaps in the listing to standard error."""
    with progress("listing") as tick:
        content = storage.look(tick)
    for text in content.notes:
        note(text)
    return content


def look_for_origins(
    storage: Reader, content: Content, namespace: bytes | None, conditions: Conditions | None = None
) -> None:
    """Read the chunks' tags and storers: one request for each object of a bucket.

    Prints notes on unreadable headers, and on chunks that the conditions cannot judge.
    """
    from tiered_kv.ops.origins import notes_on_storers, read_origins  # noqa: PLC0415 - takes the headers' parser

    said = len(content.notes)
    with progress("reading headers") as tick:
        read_origins(storage, content, namespace, tick)
    if conditions is not None:
        content.notes += notes_on_storers(content.blobs, conditions, namespace)
    for text in content.notes[said:]:
        note(text)


def find_stored(content: Content, forest: Forest, key: str) -> StoredBlob:
    """The chunk of a key, or what lies under its name without being one.

    Raises:
        ConfigError: There is none like that, or more than one.
    """
    try:
        return find_chunk(forest, key)
    except ConfigError:
        for stray in content.strays:
            blob = stray.as_blob()
            if blob is not None and blob.name.key.hex() == key.lower():
                return blob
        raise
