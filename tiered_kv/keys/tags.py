"""Tags: digests of a chunk's owner, so that its chunks can be erased later; and names of users' sessions.

A tag is the operator's own name for a tenant, a user or a contract. Nothing here or below keeps its text: headers,
indexes and messages hold the first half of its SHA-256, which is enough to compare owners and does not list
them. It is no secret either: a name that is guessed gives its digest.

Called by the vLLM door, which is given tags, and by the command line, which erases by them.
"""

import hashlib
from typing import Final

TAG_BYTES: Final = 16
TAG_CHARS_MAX: Final = 256
SESSION_BYTES: Final = 16

NO_TAG: Final = bytes(TAG_BYTES)
"""Of a chunk without an owner."""

_SHARED_MAX: Final = 1 << 14
_shared: dict[bytes, bytes] = {NO_TAG: NO_TAG}


def tag_digest(text: str) -> bytes:
    """The digest of a tag, which is all that is kept of it.

    Raises:
        ValueError: It is empty, too long, or no text; says what a tag is, and not what was given.
    """
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate
        data = b""
    if not data or len(text) > TAG_CHARS_MAX:
        raise ValueError(f"1 to {TAG_CHARS_MAX} characters that UTF-8 can encode")
    return hashlib.sha256(data).digest()[:TAG_BYTES]


def session_name(text: str, tag: bytes, salt: str | None = None) -> bytes:
    """The name of a user's session: a digest, as of a tag. Under another tag or ``cache_salt`` it is another session.

    Raises:
        ValueError: As :func:`tag_digest`.
    """
    # A salt is a user's JSON string and may hold a lone surrogate, as in keys/extras.py.
    salted = hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest() if salt else b""
    return hashlib.sha256(b"session" + tag + tag_digest(text) + salted).digest()[:SESSION_BYTES]


def shared_tag(tag: bytes) -> bytes:
    """The same bytes, in the same object for every chunk: an index of a million chunks has few tags.

    Threads: any.
    """
    if len(_shared) > _SHARED_MAX:  # somebody has more: what is in use stays, where it is used
        _shared.clear()
    return _shared.setdefault(tag, tag)


def tag_text(tag: bytes | None) -> str | None:
    """A digest as people and JSON get to see it; None where there is none."""
    return None if tag is None or tag == NO_TAG else tag.hex()
