"""Explain why a prompt is a hit in a tier, or where it stops being one.

One listing of the tier answers which chunks are there, which other chunks continue a prefix and what the other
namespaces have: an object store tells children and namespaces by a LIST only, so asking for the prompt's chunks one by
one would come on top of it. Of the chosen namespace's hits the headers are read, too (one request each in an object
store), because a name alone proves nothing. Payloads are not: ``verify`` does that.

Called by the command line; owns the reasons, not their layout.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import msgspec

from tiered_kv.chunks.header import PEEK_BYTES, ParsedHeader, peek, read_header
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch, ConfigError
from tiered_kv.keys.namespace import Namespace, diff
from tiered_kv.keys.naming import BlobName, object_path, relative_path
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.ops.findings import NO_HITS
from tiered_kv.ops.prompts import prompt_keys
from tiered_kv.ops.report import Report
from tiered_kv.ops.storage import Content, Progress, Reader, StoredBlob, is_private, no_progress
from tiered_kv.ops.text import without_paths

DIFFERENCES_MAX: Final = 50


class State(Enum):
    """What became of one chunk of the prompt."""

    HERE = "here"
    MISSING = "missing"
    UNREACHABLE = "unreachable"
    """Stored, behind one that is not."""
    DAMAGED = "damaged"
    FOREIGN = "foreign"
    COLLISION = "collision"
    """The key is taken by a chunk of other tokens."""


class ChunkRun(msgspec.Struct, frozen=True, kw_only=True):
    """Neighbouring chunks of the prompt of which the same can be said.

    Attributes:
        first: Position of the first chunk, from 0.
        last: Position of the last chunk, included.
        first_token: Position of the first token.
        last_token: Position of the last token, included.
        state: ``here``; ``missing``: not stored; ``unreachable``: stored behind one that is not; ``damaged``;
            ``foreign``: of another namespace or format version; ``collision``: the key is taken by other tokens.
        text: The same in words, with the reason.
    """

    first: int
    last: int
    first_token: int
    last_token: int
    state: str
    text: str


class IdentityDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A field in which another namespace differs from the explained one.

    Attributes:
        field: Path in the namespace's record, e.g. ``text_config.rope_theta``.
        here: Value in the explained namespace, any JSON; null for all of the geometry.
        there: Value in the other one.
        meaning: What the field means, if that is not plain; else empty.
    """

    field: str
    here: Any
    there: Any
    meaning: str


class OtherNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """Another namespace of the tier that has some of the prompt.

    Attributes:
        namespace: Digest.
        chunks: Leading chunks of the prompt that are stored there.
        tokens: The same in tokens.
        used_s: When any chunk of it was used last.
        is_retired: Whether ``reset_cache`` retired its epoch, as far as the tier knows.
        differs: What keeps an engine of the explained namespace from using it; at most 50 fields.
    """

    namespace: str
    chunks: int
    tokens: int
    used_s: float
    is_retired: bool
    differs: list[IdentityDifference]


class ExplainReport(Report, frozen=True, kw_only=True):
    """What ``explain`` finds of one prompt.

    Attributes:
        uri: The tier.
        namespace: The namespace that is explained; null where no namespace has a record that can be read.
        chosen_by: Why this one, in words.
        is_retired: Whether ``reset_cache`` retired its epoch, as far as the tier knows; null without a namespace.
        prompt_tokens: Tokens in the file.
        chunk_tokens: Tokens of a chunk.
        prompt_chunks: Full chunks of the prompt.
        tail_tokens: Tokens behind the last full chunk, which are never stored.
        hit_chunks: Leading chunks that an engine would get from this tier.
        hit_tokens: The same in tokens.
        siblings: Chunks of other prompts at the position of the first miss, continuing the same prefix; null without a
            miss.
        runs: The prompt, chunk by chunk.
        others: Other namespaces with some of the prompt, the longest part first.
        notes: What may make the answer incomplete.
        see: Where the documentation tells what to do about a miss; null without one.
    """

    uri: str
    namespace: str | None
    chosen_by: str
    is_retired: bool | None
    prompt_tokens: int
    chunk_tokens: int | None
    prompt_chunks: int | None
    tail_tokens: int | None
    hit_chunks: int
    hit_tokens: int
    siblings: int | None
    runs: list[ChunkRun]
    others: list[OtherNamespace]
    notes: list[str]
    see: str | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A namespace of the tier, and how much of the prompt it has by the names of its blobs.

    Attributes:
        hits: Leading chunks of the prompt that are stored.
        used_s: When any of its chunks was used last; 0 if it has none.
        is_retired: No engine that starts now uses it: ``reset_cache`` retired its epoch, as far as this tier knows, or
            it is the private one of an engine that was reset.
    """

    namespace: Namespace
    chunk_tokens: int
    keys: PrefixKeys = field(repr=False)
    hits: int
    used_s: float
    is_retired: bool

    @property
    def hit_tokens(self) -> int:
        return self.hits * self.chunk_tokens


def explain(
    storage: Reader,
    tokens: Sequence[int],
    content: Content,
    *,
    wanted: bytes | None = None,
    salt: str = "",
    progress: Progress = no_progress,
) -> ExplainReport:
    """Explain a prompt chunk by chunk.

    Args:
        content: The result of ``storage.look()``.
        wanted: Digest of the namespace to explain; None: choose one.

    Raises:
        ConfigError: The namespace that is wanted has no record that can be read.
    """
    notes = list(content.notes)
    stored = _Stored(storage.kind, content)
    epochs, candidates = storage.epochs(), []
    for record in content.records.values():
        if record.namespace is None or not record.chunk_tokens:
            notes.append(f"namespace {record.digest.hex()} was left out: {record.problem or 'it has no chunk_tokens'}")
            continue
        keys = prompt_keys(record.namespace, record.chunk_tokens, tokens, salt)
        candidates.append(
            Candidate(
                record.namespace,
                record.chunk_tokens,
                keys,
                stored.leading(_names(record.namespace, keys)),
                stored.used_s.get(record.digest, 0.0),
                is_private(record.namespace) or epochs.has_retired(record.namespace),
            )
        )
    if wanted is not None:
        chosen = next((c for c in candidates if c.namespace.digest == wanted), None)
        if chosen is None:
            raise ConfigError(f"option --namespace: {wanted.hex()} has no record that can be read, so no keys either")
        reason = "named by --namespace"
    elif not candidates:
        return _nothing(storage.uri, len(tokens), notes)
    else:
        chosen, reason = _choose(candidates)
    size = chosen.chunk_tokens
    states = _states(storage, stored, chosen, len(tokens) // size, progress)
    hit_chunks = next((i for i, (state, _) in enumerate(states) if state is not State.HERE), len(states))
    siblings = stored.siblings(chosen, hit_chunks) if hit_chunks < len(states) else None
    others = sorted((c for c in candidates if c is not chosen and c.hits), key=lambda c: (-c.hit_tokens, -c.used_s))
    return ExplainReport(
        uri=storage.uri,
        namespace=chosen.namespace.digest.hex(),
        chosen_by=reason,
        is_retired=chosen.is_retired,
        prompt_tokens=len(tokens),
        chunk_tokens=size,
        prompt_chunks=len(tokens) // size,
        tail_tokens=len(tokens) % size,
        hit_chunks=hit_chunks,
        hit_tokens=hit_chunks * size,
        siblings=siblings,
        runs=_runs(states, hit_chunks, siblings or 0, size),
        others=[_other(chosen, other) for other in others],
        notes=notes,
        see=None if 0 < len(tokens) // size == hit_chunks else NO_HITS,
    )


def _nothing(uri: str, token_count: int, notes: list[str]) -> ExplainReport:
    """No namespace of the tier has a record that can be read."""
    return ExplainReport(
        uri=uri,
        namespace=None,
        chosen_by="",
        is_retired=None,
        prompt_tokens=token_count,
        chunk_tokens=None,
        prompt_chunks=None,
        tail_tokens=None,
        hit_chunks=0,
        hit_tokens=0,
        siblings=None,
        runs=[],
        others=[],
        notes=notes,
        see=NO_HITS,
    )


def _choose(candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
    """The namespace with most of the prompt, else the one used last; of one model the epoch that is in force."""
    best = max(candidates, key=lambda c: (c.hit_tokens, c.used_s))
    if best.is_retired:
        live = [c for c in candidates if not c.is_retired and _is_same_model(best.namespace, c.namespace)]
        if live:
            current = max(live, key=lambda c: (c.hit_tokens, c.used_s))
            return current, "the epoch in force of the model that has most of the prompt"
    if len(candidates) == 1:
        return best, "the only one here"
    return best, "it has most of the prompt" if best.hits else "none has any of the prompt; this one was used last"


def _is_same_model(one: Namespace, other: Namespace) -> bool:
    return [difference.path for difference in diff(one, other)] == ["epoch"]


class _Stored:
    """The blobs of a listing, as a server would find them.

    In an object store a blob's name contains its ancestry, and a server requests the whole name.
    """

    def __init__(self, kind: str, content: Content) -> None:
        self._is_object = kind == "object"
        self.blobs = {self._ident(blob.name): blob for blob in content.blobs}
        self.strays = {stray.path: stray for stray in content.strays}
        self.used_s: dict[bytes, float] = {}
        self._children: Counter[tuple[bytes, bytes, int]] = Counter()
        for blob in content.blobs:
            name = blob.name
            self.used_s[name.namespace] = max(blob.used_s, self.used_s.get(name.namespace, 0.0))
            self._children[name.namespace, name.parent, name.chunk_index] += 1

    def _ident(self, name: BlobName) -> tuple[object, ...]:
        ancestry = (name.parent, name.chunk_index) if self._is_object else ()
        return (name.namespace, name.key, *ancestry)

    def __contains__(self, name: BlobName) -> bool:
        return self._ident(name) in self.blobs

    def leading(self, names: Sequence[BlobName]) -> int:
        """How many of them are there before the first that is not."""
        return next((i for i, name in enumerate(names) if name not in self), len(names))

    def get(self, name: BlobName) -> StoredBlob | None:
        return self.blobs.get(self._ident(name))

    def stray(self, name: BlobName) -> tuple[State, str] | None:
        """What lies under the blob's name, if it is no blob of ours."""
        found = self.strays.get(object_path(name) if self._is_object else f"blobs/{relative_path(name)}")
        if found is None:
            return None
        state = State.FOREIGN if found.kind == "foreign" else State.DAMAGED
        return state, without_paths(found.reason)

    def siblings(self, chosen: Candidate, index: int) -> int:
        """Chunks of other prompts that stand at ``index`` and go on where this prompt's chunk before it ends."""
        space = chosen.namespace.digest
        own = chosen.keys.keys[index] if index < len(chosen.keys.keys) else b""
        is_there = BlobName(space, own, chosen.keys.parent(index), index) in self if own else False
        return self._children[space, chosen.keys.parent(index), index] - is_there


def _names(namespace: Namespace, keys: PrefixKeys) -> list[BlobName]:
    return [BlobName(namespace.digest, key, keys.parent(i), i) for i, key in enumerate(keys.keys)]


def _states(
    storage: Reader, stored: _Stored, chosen: Candidate, count: int, progress: Progress
) -> list[tuple[State, str]]:
    """State of every chunk, with the reason where the state alone does not give it."""
    states: list[tuple[State, str]] = []
    headers, is_broken = _Headers(storage), False
    for index, name in enumerate(_names(chosen.namespace, chosen.keys)):
        blob = stored.get(name)
        if blob is None:
            state = stored.stray(name) or (State.MISSING, "")
        elif is_broken:
            state = (State.UNREACHABLE, "")
        else:
            state = headers.judge(name, blob, chosen.keys.digests[index])
        is_broken |= state[0] is not State.HERE
        states.append(state)
        progress(index + 1, count)
    return states


class _Headers:
    """Reads blobs' headers in one request each: all of a namespace have the length of the first."""

    def __init__(self, storage: Reader) -> None:
        self._storage = storage
        self._length = PEEK_BYTES

    def judge(self, name: BlobName, blob: StoredBlob, prefix_sha256: bytes) -> tuple[State, str]:
        """Whether a stored blob is, by its header, the prompt's chunk."""
        try:
            header = self._read(name)
        except ChunkMismatch as exc:
            return State.FOREIGN, without_paths(str(exc))
        except ChunkCorrupt as exc:
            return State.DAMAGED, without_paths(str(exc))
        if header is None:
            return State.MISSING, "it was removed a moment ago"
        said = header.header.record
        if said.namespace != name.namespace:
            return State.FOREIGN, f"its header names namespace {said.namespace.hex()}"
        if said.key != name.key:
            return State.DAMAGED, "its header names another key"
        if said.prefix_sha256 != prefix_sha256:
            return State.COLLISION, "its header names other tokens: a collision of keys, or damage"
        if self._storage.kind == "object" and blob.size_bytes != header.blob_bytes:
            return State.DAMAGED, f"it has {blob.size_bytes} bytes instead of {header.blob_bytes}"
        return State.HERE, ""

    def _read(self, name: BlobName) -> ParsedHeader | None:
        data = self._storage.read(name, self._length)
        if data is None:
            return None
        wanted = peek(data).header_bytes
        if wanted > len(data) == self._length:
            self._length = wanted
            data = self._storage.read(name, wanted)
            if data is None:
                return None
        return read_header(memoryview(data))


def _runs(states: Sequence[tuple[State, str]], hit_chunks: int, siblings: int, chunk_tokens: int) -> list[ChunkRun]:
    """Join neighbours of one state and text; the first miss is a run of its own, with its details."""
    starts: list[tuple[int, State, str]] = []
    for index, (state, reason) in enumerate(states):
        if index == hit_chunks:
            behind = sum(other is State.UNREACHABLE for other, _ in states[index:])
            text = _first_miss(index, (state, reason), siblings, behind)
        else:
            text = _TEXTS[state] + (f": {reason}" if reason else "")
        if hit_chunks in (index, index - 1) or not starts or starts[-1][1:] != (state, text):
            starts.append((index, state, text))
    ends = [first for first, _, _ in starts[1:]] + [len(states)] * bool(starts)
    return [
        ChunkRun(
            first=first,
            last=end - 1,
            first_token=first * chunk_tokens,
            last_token=end * chunk_tokens - 1,
            state=state.value,
            text=text,
        )
        for (first, state, text), end in zip(starts, ends, strict=True)
    ]


_TEXTS: Final = {
    State.HERE: "here",
    State.MISSING: "not stored",
    State.UNREACHABLE: "stored, but no request can reach it: one before it is missing",
    State.DAMAGED: "damaged, so a miss",
    State.FOREIGN: "not of this namespace or format, so a miss",
    State.COLLISION: "another prompt's chunk, so a miss",
}


def _first_miss(index: int, state: tuple[State, str], siblings: int, behind: int) -> str:
    kind, reason = state
    text = _TEXTS[kind] + (f": {reason}" if reason else "")
    if kind is not State.MISSING or reason:
        return f"{text}; the first miss, everything behind it is computed again"
    if behind:
        return f"{text}: evicted or deleted; {_chunks(behind)} of this prompt behind it can be reached no more"
    if siblings and index:
        return f"{text}: first diverging chunk; other prompts continue here with {_chunks(siblings, 'other ')}"
    if siblings:
        return (
            f"{text}: it diverges in its first chunk; other prompts begin with {_chunks(siblings, 'other ')} "
            "(a salt, a LoRA adapter or an image changes the keys from here on)"
        )
    if index:
        return f"{text}: nothing was ever stored behind the chunk before it, or it was evicted"
    return f"{text}: no prompt of this namespace is stored here"


def _chunks(count: int, word: str = "") -> str:
    return f"{count} {word}chunk{'' if count == 1 else 's'}"


# -- namespaces beside each other -------------------------------------------------------------------------------------


def _other(chosen: Candidate, other: Candidate) -> OtherNamespace:
    """Another namespace, with the fields in which it differs, those of the geometry as one."""
    found: dict[str, IdentityDifference] = {}
    for one in diff(chosen.namespace, other.namespace):
        is_geometry = one.path.startswith("geometry[")
        path = "geometry" if is_geometry else one.path
        here, there = (None, None) if is_geometry else (one.left, one.right)
        found.setdefault(
            path, IdentityDifference(field=path, here=here, there=there, meaning=_meaning(path, other, chosen))
        )
    return OtherNamespace(
        namespace=other.namespace.digest.hex(),
        chunks=other.hits,
        tokens=other.hit_tokens,
        used_s=other.used_s,
        is_retired=other.is_retired,
        differs=list(found.values())[:DIFFERENCES_MAX],
    )


def _meaning(path: str, other: Candidate, chosen: Candidate) -> str:
    """What a difference in this field means, for fields that surprise; else empty."""
    if path == "epoch":
        if other.is_retired:
            return "reset_cache retired the epoch of the other one"
        return "reset_cache retired the epoch of this one" if chosen.is_retired else "before or after a reset_cache"
    return _MEANINGS.get(re.split(r"[.\[]", path, maxsplit=1)[0], "")


_MEANINGS: Final = {
    "weights": "another model, another revision, or a path read as another",
    "max_model_len": "LongRoPE models compute other KV for other lengths",
    "chunk_tokens": "setting chunk_tokens",
    "block_tokens": "vLLM's --block-size",
    "kv_dtype": "vLLM's --kv-cache-dtype",
    "tp": "vLLM's --tensor-parallel-size",
    "pp": "vLLM's --pipeline-parallel-size",
    "dcp": "vLLM's --decode-context-parallel-size",
    "attention_backend": "vLLM's attention backend, chosen by machine and version",
    "kv_layout": "vLLM's KV layout, chosen by backend and version",
    "model_runner": "vLLM's model runner",
    "vllm_version": "another minor version of vLLM; setting share_vllm_versions",
    "kv_encoding": "attention backends, a CPU's instructions or a GPU's FP8: chosen by machine and version",
    "settings": "a setting of vLLM that may change KV: start the engines alike",
    "geometry": "layers or pages of another shape or order",
}
