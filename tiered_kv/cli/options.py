"""Arguments and options that several verbs share, and what becomes of them."""

from typing import TYPE_CHECKING, Annotated

import typer

from tiered_kv.cli.settings import Settings, parse_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiered_kv.admin.forest import Forest
    from tiered_kv.admin.storage import Content, Storage, StoredBlob
    from tiered_kv.keys.naming import BlobName

__all__ = [
    "AsJson",
    "NamespaceOption",
    "Settings",
    "StoredByOption",
    "Uri",
    "Yes",
    "find_chunk",
    "find_namespace",
    "find_pin",
    "open_uri",
]

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

DIGITS_MIN = 4
"""Fewest digits of a digest or key that may stand for it."""


def open_uri(uri: str, more: list[str] | None, *, to_change: bool = False) -> "Storage":
    """The tier a URI names, with the settings of ``--set``. The caller closes it.

    Args:
        to_change: The verb may write or remove something: a directory that is not ours is refused.
    """
    import atexit
    import gc

    from tiered_kv.admin.open import open_storage

    atexit.register(gc.freeze)  # at its end Python would look for garbage once more, among a million objects
    return open_storage(uri, parse_settings(more), to_change=to_change)


def find_namespace(content: "Content", text: str | None) -> bytes | None:
    """The namespace that ``--namespace`` means; None for all.

    Raises:
        ConfigError: There is none like that, or more than one.
    """
    from tiered_kv.errors import ConfigError

    if text is None:
        return None
    prefix = _digits(text, "--namespace")
    spaces = set(content.records) | {blob.name.namespace for blob in content.blobs}
    found = sorted(space for space in spaces if space.hex().startswith(prefix))
    if len(found) != 1:
        shown = ", ".join(space.hex() for space in (found or sorted(spaces))[:10]) or "none"
        what = "more than one namespace begins" if found else "no namespace here begins"
        raise ConfigError(f"option --namespace: {what} with {prefix}; there are: {shown}")
    return found[0]


def find_chunk(forest: "Forest", text: str) -> "StoredBlob":
    """The chunk whose key is ``text`` or begins with it.

    Raises:
        ConfigError: There is none like that, or more than one.
    """
    from tiered_kv.errors import ConfigError

    prefix = _digits(text, "KEY")
    found = [blob for (_, key), blob in forest.blobs.items() if key.hex().startswith(prefix)]
    if len(found) != 1:
        what = f"{len(found)} chunks have keys that begin" if found else "no chunk here has a key that begins"
        hint = ": write more of it" if found else ": `tiered-kv ls URI` lists them"
        raise ConfigError(f"{what} with {prefix}{hint}")
    return found[0]


def find_pin(pins: "Mapping[BlobName, float]", text: str) -> "BlobName | None":
    """The pinned chunk whose key is ``text`` or begins with it; None if there is none.

    Raises:
        ConfigError: There is more than one like that.
    """
    from tiered_kv.errors import ConfigError

    prefix = _digits(text, "KEY")
    found = [name for name in pins if name.key.hex().startswith(prefix)]
    if len(found) > 1:
        raise ConfigError(f"{len(found)} pinned chunks have keys that begin with {prefix}: write more of it")
    return found[0] if found else None


def _digits(text: str, what: str) -> str:
    from tiered_kv.errors import ConfigError

    digits = text.lower()
    if not DIGITS_MIN <= len(digits) <= 32 or any(digit not in "0123456789abcdef" for digit in digits):
        raise ConfigError(f"{what}: expected {DIGITS_MIN} to 32 hex digits, got {text[:100]!r}")
    return digits
