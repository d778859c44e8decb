"""Check stored bytes against the name of their blob, and name what is wrong with them.

Pure: bytes in, a verdict out. What a server checks before it serves a blob is checked here without knowing the tokens,
and more: the reason is told, because a person reads it. Called by ``ops/scrub.py``.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from tiered_kv.chunks.header import (
    PEEK_BYTES,
    BlobFormat,
    ParsedHeader,
    TensorEntry,
    check_blob,
    geometry_entries,
    read_header,
    state_entries,
)
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch, ConfigError
from tiered_kv.keys.naming import BlobName
from tiered_kv.keys.state_keys import is_state
from tiered_kv.keys.tail_keys import tail_tokens
from tiered_kv.ops.storage import NamespaceRecord
from tiered_kv.server.members import recorded_geometry

REASONS: Final = {
    "header": "the header is damaged",
    "payload": "the payload is damaged",
    "truncated": "the end is missing",
    "longer": "something follows the end",
    "swapped": "a sound blob of another key under this name",
    "misplaced": "a sound blob whose place in its prefix is not what its name, the index or its own header says",
    "misfit": "a sound blob of another shape than its namespace has",
    "foreign": "a sound blob of another namespace",
    "version": "a blob of another format version",
    "stray": "not a blob, by its name",
    "unreadable": "the medium does not give its bytes",
    "record": "namespace.json is missing or wrong",
}
"""Every reason there is, in the order of a report."""

CORRUPT: Final = frozenset({"header", "payload", "truncated", "longer", "swapped", "misplaced", "misfit"})
"""Blobs that no request can ever use. The rest may be foreign data, or may become readable again."""


class Form(NamedTuple):
    """What all chunks of a namespace have in common, or all parts of its states.

    Attributes:
        token_count: None: of a tail, which has the number that its key says.
    """

    token_count: int | None
    tensors: tuple[TensorEntry, ...]
    is_state: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What bytes are.

    Attributes:
        reason: One of ``REASONS``; empty for a sound blob.
        detail: Expected and observed, for people.
        form: Of a sound blob.
    """

    reason: str = ""
    detail: str = ""
    form: Form | None = None


@dataclass(frozen=True, slots=True)
class Expectation:
    """The form that a namespace's record declares for its blobs, as far as it declares one.

    Attributes:
        form: Of a chunk; None where the record has no geometry as servers write it.
        state_form: Of a part of a state; with ``form`` only.
        blob_bytes: Of every blob; with ``form`` only.
    """

    chunk_tokens: int | None = None
    form: Form | None = None
    state_form: Form | None = None
    blob_bytes: int | None = None

    @classmethod
    def of(cls, record: NamespaceRecord | None) -> "Expectation":
        """Read a record, which may be missing or have been written by something else than a server."""
        if record is None or record.namespace is None:
            return cls()
        try:
            geometry = recorded_geometry(record.namespace.fields)
            blob_bytes = BlobFormat(record.digest, geometry).blob_bytes
        except (ConfigError, KeyError):  # KeyError: of a data type that this version does not know
            return cls(record.chunk_tokens)
        chunk = Form(geometry.chunk_tokens, geometry_entries(geometry))
        state = Form(geometry.chunk_tokens, state_entries(geometry), is_state=True)
        return cls(record.chunk_tokens, chunk, state, blob_bytes)

    def objection(self, form: Form) -> str:
        """Why a blob of this form is none of the namespace; empty where nothing speaks against it."""
        if self.chunk_tokens is not None and form.token_count not in (None, self.chunk_tokens):
            return f"another number of tokens. expected={self.chunk_tokens} observed={form.token_count}"
        expected = self.state_form if form.is_state else self.form
        if expected is not None and form.token_count is None:
            expected = expected._replace(token_count=None)
        if expected is not None and form != expected:
            return "the tensors in its header are not those of namespace.json"
        return ""


def judge(name: BlobName, data: memoryview, usual_bytes: int | None = None) -> Verdict:
    """Check a blob against the name it is stored under; ``Expectation`` checks its form against its namespace.

    Args:
        data: The blob; of one that is too long, at least one byte more than its header announces.
        usual_bytes: Size of the namespace's blobs, if known: distinguishes a truncated blob from a damaged one.
    """
    try:
        parsed = check_blob(data)
    except ChunkMismatch as exc:
        return Verdict("version", str(exc))
    except ChunkCorrupt as exc:
        return _damage(name, data, usual_bytes, str(exc))
    return _foreign(name, parsed) or _place(name, parsed) or Verdict(form=_form(parsed))


def _damage(name: BlobName, data: memoryview, usual_bytes: int | None, why: str) -> Verdict:
    try:
        parsed = read_header(data)
    except ChunkCorrupt:
        is_cut = len(data) < (PEEK_BYTES if usual_bytes is None else usual_bytes)
        return Verdict("truncated" if is_cut else "header", why)
    if foreign := _foreign(name, parsed):  # whatever is wrong with it is not for us to judge
        return foreign
    if len(data) < parsed.blob_bytes:
        return Verdict("truncated", f"bytes are missing. expected={parsed.blob_bytes} observed={len(data)}")
    if len(data) > parsed.blob_bytes:
        return Verdict("longer", f"longer than its header says. expected={parsed.blob_bytes}")
    return Verdict("payload", why)


def _foreign(name: BlobName, parsed: ParsedHeader) -> Verdict | None:
    observed = parsed.header.record.namespace
    if observed == name.namespace:
        return None
    return Verdict("foreign", f"another namespace. expected={name.namespace.hex()} observed={observed.hex()}")


def _place(name: BlobName, parsed: ParsedHeader) -> Verdict | None:
    found = parsed.header.record
    if found.key != name.key:
        return Verdict("swapped", f"another key. expected={name.key.hex()} observed={found.key.hex()}")
    if name.parent and found.parent != name.parent:
        return Verdict("misplaced", f"another parent. expected={name.parent.hex()} observed={found.parent.hex()}")
    if name.parent and found.chunk_index != name.chunk_index:
        return Verdict("misplaced", f"another position. expected={name.chunk_index} observed={found.chunk_index}")
    if (found.chunk_index == 0) != (found.parent == found.namespace):
        return Verdict(
            "misplaced",
            f"position and parent contradict each other. index={found.chunk_index} {found.parent.hex()}",
        )
    if (tokens := tail_tokens(found.key)) and tokens != parsed.header.token_count:
        return Verdict(
            "misfit",
            f"another number of tokens than its key says. expected={tokens} observed={parsed.header.token_count}",
        )
    return None


def _form(parsed: ParsedHeader) -> Form:
    record = parsed.header.record
    return Form(None if tail_tokens(record.key) else parsed.header.token_count, parsed.tensors, is_state(record))
