"""What the verbs that look share: the look itself, and how a key, an age and a pin are shown."""

import sys
from typing import TYPE_CHECKING, Final

from tiered_kv.cli.options import find_chunk
from tiered_kv.cli.output import age_text, note, progress

if TYPE_CHECKING:
    from tiered_kv.admin.forest import Forest
    from tiered_kv.admin.storage import Content, Storage, StoredBlob
    from tiered_kv.keys.conditions import Conditions

KEY_DIGITS: Final = 12
"""Of a key in a table on a terminal: enough for a verb that takes KEY, in a tier of any size."""


def look(storage: "Storage") -> "Content":
    """List a tier, with a progress bar on a terminal; what makes the list incomplete is said on standard error."""
    with progress("listing") as tick:
        content = storage.look(tick)
    for text in content.notes:
        note(text)
    return content


def look_for_origins(
    storage: "Storage", content: "Content", namespace: bytes | None, conditions: "Conditions | None" = None
) -> None:
    """Learn whose the chunks are and who stored them, which takes a request for each object of a bucket.

    Says what nobody can know, and of what the conditions can say nothing.
    """
    from tiered_kv.admin.origins import notes_on_storers, read_origins

    said = len(content.notes)
    with progress("reading headers") as tick:
        read_origins(storage, content, namespace, tick)
    if conditions is not None:
        content.notes += notes_on_storers(content.blobs, conditions, namespace)
    for text in content.notes[said:]:
        note(text)


def shortened(digits: str) -> str:
    """A key or digest: whole where a program may read it, its beginning on a terminal."""
    return digits[:KEY_DIGITS] if sys.stdout.isatty() else digits


def ago(now_s: float, then_s: float | None) -> str:
    """How long ago something was; ``-`` where nobody knows."""
    return "-" if then_s is None else f"{age_text(now_s - then_s)} ago"


def end_of(pinned_until_s: float) -> float | None:
    """The end of a pin as JSON has it: null where there is no pin, or none with an end."""
    return None if pinned_until_s in (0.0, float("inf")) else pinned_until_s


def pin_text(now_s: float, end_s: float | None, *, is_kept: bool) -> str:
    """Whether a pin keeps a chunk, its own or that of a chunk behind it, and how long its own does so."""
    if end_s is not None:
        return f"{age_text(end_s - now_s)} more"
    return "yes" if is_kept else "-"


def find_stored(content: "Content", forest: "Forest", key: str) -> "StoredBlob":
    """The chunk of a key, or what lies under its name without being one.

    Raises:
        ConfigError: There is none like that, or more than one.
    """
    from tiered_kv.admin.inspection import stray_chunk
    from tiered_kv.errors import ConfigError

    try:
        return find_chunk(forest, key)
    except ConfigError:
        stray = stray_chunk(content, key)
        if stray is None:
            raise
        return stray
