"""Conditions that select chunks by the software that stored them: ``vllm<0.32.1``.

Other examples: ``tiered_kv==0.9.0``, ``encoding=CPU_ATTN/cpu/amx``.

A condition is a name, a comparison and a value. ``tiered_kv`` and the doors (``vllm``, ``cache``) compare versions in
the order of PEP 440, so 0.32.1rc1 comes before 0.32.1. A local part (``+cpu``) counts only where the condition has one,
and ``==0.32.*`` takes all of 0.32. A door's name selects only what that door stored, also with ``!=``. ``encoding``
knows ``=`` and ``!=``, of the whole text or, with ``*`` at its end, of how it begins.

Not the specifiers of PEP 440: these leave pre-releases out of ``<0.32.1``, which an operator who looks for everything
before the mend must not miss.

Called by the command line and, because only a server knows what is in its memory, by the server.
"""

import operator
import re
from collections.abc import Callable, Iterable
from typing import Final

from packaging.version import InvalidVersion, Version

from tiered_kv.errors import ConfigError
from tiered_kv.keys.stored_by import DOORS, UNKNOWN, StoredBy

CONDITIONS_MAX: Final = 16
CONDITION_CHARS_MAX: Final = 80
EXAMPLES: Final = "'vllm<0.32.1', 'tiered_kv==0.9.0', 'vllm==0.32.*', 'encoding=CPU_ATTN/cpu/amx'"

_ENCODING: Final = "encoding"
_CONDITION = re.compile(r"\s*([a-z_]+)\s*(<=|>=|==|!=|=|<|>)\s*([!-~]+)\s*")
_ORDERS: Final[dict[str, Callable[[Version, Version], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_EQUALS: Final = ("==", "!=")

Test = Callable[[StoredBy], bool | None]
"""Whether a line meets a condition; None: it cannot be compared."""


class Conditions:
    """Conditions that all have to be met.

    Threads: one at a time.

    Attributes:
        texts: As they were given.
        incomparable: Lines that were asked about and do not order, because a version in them is none by PEP 440.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        """Read conditions.

        Raises:
            ConfigError: One of them is none, or there is none, or too many; says what one looks like.
        """
        self.texts = tuple(texts)
        if not 0 < len(self.texts) <= CONDITIONS_MAX:
            raise ConfigError(f"expected 1 to {CONDITIONS_MAX} conditions such as {EXAMPLES}, got {len(self.texts)}")
        self._tests = [_parse(text) for text in self.texts]
        self._exact = [exact for text in self.texts if (exact := _exact_release(text)) is not None]
        self._known: dict[str, bool] = {UNKNOWN: False}
        self.incomparable: set[str] = set()

    def matches(self, line: str) -> bool:
        """Whether a chunk with this line is selected. An unknown line never is, nor one that cannot be compared."""
        if line not in self._known:
            self._known[line] = self._decide(line)
        return self._known[line]

    def longer(self, lines: Iterable[str]) -> dict[str, set[str]]:
        """Versions in these lines that begin as a condition's does and are not it, by the condition that means them.

        ``vllm=0.32`` is 0.32.0 alone; who writes it may have meant ``vllm==0.32.*``.
        """
        found: dict[str, set[str]] = {}
        for line in lines:
            for name, start in self._exact:
                version = _version_in(StoredBy.parse(line), name)
                if version is not None and _begins(version, start, "==") and not _compare(version, start, "=="):
                    found.setdefault(f"{name}=={start}.*", set()).add(version)
        return found

    def _decide(self, line: str) -> bool:
        told = StoredBy.parse(line)
        results = [test(told) for test in self._tests]
        if False not in results and None in results:
            self.incomparable.add(line)
        return all(results)


def _parse(text: str) -> Test:
    found = _CONDITION.fullmatch(text) if len(text) <= CONDITION_CHARS_MAX else None
    names = ("tiered_kv", *DOORS, _ENCODING)
    if found is None or found[1] not in names:
        raise ConfigError(
            f"expected a condition such as {EXAMPLES}: one of {', '.join(names)}, then <, <=, ==, !=, >= or >, then a "
            f"version or an encoding; got {text[:CONDITION_CHARS_MAX]!a}"
        )
    name, sign, value = found[1], "==" if found[2] == "=" else found[2], found[3]
    if name == _ENCODING:
        return _encoding_test(sign, value, text)
    compare = _version_test(sign, value, text)
    return lambda told: compare(version) if (version := _version_in(told, name)) is not None else False


def _exact_release(text: str) -> tuple[str, Version] | None:
    """The name and the version of a condition that means one release."""
    found = _CONDITION.fullmatch(text)
    if found is None or found[1] == _ENCODING or found[2] not in ("=", "=="):
        return None
    version = _version_of(found[3])
    return (found[1], version) if version is not None and str(version) == version.base_version else None


def _version_in(told: StoredBy, name: str) -> str | None:
    if name == "tiered_kv":
        return told.package
    return told.version if told.door == name else None


def _encoding_test(sign: str, value: str, text: str) -> Test:
    if sign not in _EQUALS:
        raise ConfigError(f"encodings have no order: expected encoding=NAME or encoding!=NAME, got {text!a}")
    if value.endswith("*"):
        return lambda told: told.encoding.startswith(value[:-1]) == (sign == "==")
    return lambda told: (told.encoding == value) == (sign == "==")


def _version_test(sign: str, value: str, text: str) -> Callable[[str], bool | None]:
    if value.endswith(".*") and sign in _EQUALS:
        start = _version_of(value[:-2])
        if start is None or str(start) != start.base_version:
            raise ConfigError(f"expected a version's beginning such as 0.32.* after {sign}, got {text!a}")
        return lambda version: _begins(version, start, sign)
    wanted = _version_of(value)
    if wanted is None:
        if sign not in _EQUALS or "*" in value:
            raise ConfigError(f"expected a version such as 0.32.1 after {sign}, got {text!a}")
        return lambda version: (version == value) == (sign == "==")
    return lambda version: _compare(version, wanted, sign)


def _begins(version: str, start: Version, sign: str) -> bool:
    found = _version_of(version)
    if found is None:
        return sign == "!="
    padded = found.release + (0,) * len(start.release)
    is_same = (found.epoch, padded[: len(start.release)]) == (start.epoch, start.release)
    return is_same == (sign == "==")


def _compare(version: str, wanted: Version, sign: str) -> bool | None:
    found = _version_of(version)
    if found is None:
        return sign == "!=" if sign in _EQUALS else None
    if wanted.local is None:
        found = Version(found.public)
    return _ORDERS[sign](found, wanted)


def _version_of(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None
