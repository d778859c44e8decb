"""Provenance of a chunk: package, engine and encoding, one line in its header.

Keys and namespaces say which bytes may be taken for each other; a patch release of vLLM or of this package changes
neither, or every release would empty the cache. So a version that stores wrong bytes is found by this line instead:
``tiered_kv/0.9.1 vllm/0.32.0 CPU_ATTN/cpu/amx``. It is no part of a key nor of a namespace, and nothing decides by it
what is loaded. What an operator selects by it: ``conditions.py``.

    line       "tiered_kv/" version " " door "/" version " " encoding
    version    1 to 24 (of the package) or 40 (of the door) of A-Z a-z 0-9 . + ! _ -
    door       1 to 12 of a-z 0-9 _, a letter first: "vllm"; "cache" for ``tiered_kv.Cache``
    encoding   1 to 39 printable ASCII characters but space, quote and backslash; "-" where the door does not know

Called by the doors, which know it, by ``chunks/header.py``, and by whoever reads a line that somebody else wrote.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

STORED_BY_CHARS_MAX: Final = 128
"""The longest line that the grammar allows."""

UNKNOWN: Final = ""
"""Where nobody said: a blob of an older format, or one that a search found and nobody has read."""

NO_ENCODING: Final = "-"

DOORS: Final = ("vllm", "vllm_rows", "cache", "copy")
"""What stores: the connector, the tier below vLLM's own offloading, library users, and a copy of blobs that do not say
it themselves."""

_PACKAGE_CHARS_MAX, _VERSION_CHARS_MAX, _ENCODING_CHARS_MAX = 24, 40, 39
_LINE = re.compile(
    rf"tiered_kv/([A-Za-z0-9.+!_-]{{1,{_PACKAGE_CHARS_MAX}}}) "
    rf"([a-z][a-z0-9_]{{0,11}})/([A-Za-z0-9.+!_-]{{1,{_VERSION_CHARS_MAX}}}) "
    rf"([!#-\[\]-~]{{1,{_ENCODING_CHARS_MAX}}})"
)
_NOT_IN_VERSIONS = re.compile(r"[^A-Za-z0-9.+!_-]")
_NOT_IN_ENCODINGS = re.compile(r"[^!#-\[\]-~]")

_SHARED_MAX: Final = 1 << 10
_shared: dict[str, str] = {UNKNOWN: UNKNOWN}


@dataclass(frozen=True, slots=True)
class StoredBy:
    """A line in its parts.

    Attributes:
        package: Version of tiered_kv that copied the KV.
        door: What computed it, one of ``DOORS`` or of those of a later version.
        version: The door's version, whole: ``0.32.0+cpu``.
        encoding: How KV lies in the pages, as the door calls it; long ones are cut.
    """

    package: str
    door: str
    version: str
    encoding: str

    @classmethod
    def parse(cls, line: str) -> "StoredBy":
        """Read a line.

        Raises:
            ValueError: It is none; says what one is and shows the beginning of what was given.
        """
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(
                "who stored a chunk reads like 'tiered_kv/0.9.1 vllm/0.32.0 CPU_ATTN/cpu/amx'. "
                f"observed={line[:STORED_BY_CHARS_MAX]!a}"
            )
        return cls(*found.groups())

    def __str__(self) -> str:
        return f"tiered_kv/{self.package} {self.door}/{self.version} {self.encoding}"


def stored_by(package: str, door: str, version: str, encoding: str | None) -> str:
    """The line of a door; characters of version and encoding that have no place in it become ``_``.

    A version that is too long loses its local part, then its end; the end of a long encoding becomes a digest, so that
    two long ones stay two.
    """
    text = _NOT_IN_ENCODINGS.sub("_", encoding or NO_ENCODING)
    if len(text) > _ENCODING_CHARS_MAX:
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        text = f"{text[: _ENCODING_CHARS_MAX - 9]}~{digest}"
    parts = _version(package, _PACKAGE_CHARS_MAX), door, _version(version, _VERSION_CHARS_MAX), text
    return str(StoredBy.parse(str(StoredBy(*parts))))


def encoding_text(encodings: Iterable[object]) -> str:
    """The encodings of a model's layers in one word, each once and in order: ``CPU_ATTN/cpu/amx,FLASHINFER/cuda``.

    Only text is one; whatever else a library user says of an encoding is in the namespace's record alone.
    """
    texts = ("/".join(one.split()) for one in encodings if isinstance(one, str))
    return ",".join(dict.fromkeys(filter(None, texts)))


def _version(text: str, chars_max: int) -> str:
    clean = _NOT_IN_VERSIONS.sub("_", text) or "_"
    if len(clean) > chars_max:
        clean = clean.partition("+")[0] or clean
    return clean[:chars_max]


def shared_line(line: str) -> str:
    """The same line, checked, in the same object for every chunk: an index of a million chunks has few lines.

    Threads: any.

    Raises:
        ValueError: It is no line, and not ``UNKNOWN``.
    """
    known = _shared.get(line)
    if known is not None:
        return known
    StoredBy.parse(line)
    if len(_shared) > _SHARED_MAX:  # somebody makes them up: what is in use stays, where it is used
        _shared.clear()
        _shared[UNKNOWN] = UNKNOWN
    return _shared.setdefault(line, line)
