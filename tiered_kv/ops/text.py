"""Parse and format operators' text: option values, counts, reasons, printable names."""

from collections.abc import Callable
from typing import TypeVar

from tiered_kv.errors import ConfigError

T = TypeVar("T")


def option_value(option: str, parse: Callable[[object], T], text: str) -> T:
    """What ``parse`` (``config.parse_size``, ``config.parse_time_s``) makes of an option's text.

    Raises:
        ConfigError: Nothing; the message names the option.
    """
    try:
        return parse(text)
    except ValueError as exc:
        raise ConfigError(f"option {option}: {exc}, got {text[:100]!r}") from exc


def without_paths(said: object) -> str:
    """A reason without absolute paths: they are printed beside it, or are private."""
    return " ".join(word for word in str(said).split(" ") if not word.startswith("path="))


def counted(count: int, noun: str, verb: str = "") -> str:
    """So many of something, and what they do: ``1 chunk``, ``2 chunks``, ``1 chunk stays``; words that take an s."""
    what = f"{count} {noun}{'' if count == 1 else 's'}"
    return f"{what} {verb}{'s' if count == 1 else ''}" if verb else what


def printable(text: str, length_max: int) -> str:
    """Foreign text made safe for a terminal: no control characters, at most ``length_max`` long."""
    clean = "".join(letter if letter.isprintable() else "?" for letter in text)
    return clean if len(clean) <= length_max else f"{clean[: length_max - 3]}..."
