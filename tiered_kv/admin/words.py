"""Words that go between an operator and the rest: values of options as they are typed, reasons as they are told."""

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
    """A reason without the absolute places in it: they are told beside it, or are nobody's business."""
    return " ".join(word for word in str(said).split(" ") if not word.startswith("path="))


def counted(count: int, noun: str, verb: str = "") -> str:
    """So many of something, and what they do: ``1 chunk``, ``2 chunks``, ``1 chunk stays``; words that take an s."""
    what = f"{count} {noun}{'' if count == 1 else 's'}"
    return f"{what} {verb}{'s' if count == 1 else ''}" if verb else what
