"""Explain why a prompt is a hit in a tier, or where it stops being one.

One listing of the tier answers which chunks are there, which other chunks continue a prefix and what the other
namespaces have: an object store tells children and namespaces by a LIST only, so asking for the prompt's chunks one by
one would come on top of it. Of the chosen namespace's hits the headers are read, too (one request each in an object
store), because a name alone proves nothing. Payloads are not: ``verify`` does that.

How much of what is here an engine would be offered is worked out as the server and the scheduler side do: with
recurrent layers up to the deepest boundary whose state is here, with a draft as far as vLLM's own prefix cache would.

Called by the command line; owns the reasons, not their layout.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import msgspec

from tiered_kv.chunks.header import PEEK_BYTES, ParsedHeader, peek, read_header
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch, ConfigError
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.namespace import Namespace, diff
from tiered_kv.keys.naming import BlobName, object_path, relative_path
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.keys.state_keys import state_records
from tiered_kv.keys.tail_keys import tail_tokens
from tiered_kv.ops.findings import NO_HITS
from tiered_kv.ops.prompts import prompt_keys
from tiered_kv.ops.report import Report
from tiered_kv.ops.storage import Content, NamespaceRecord, Progress, Reader, StoredBlob, is_private, no_progress
from tiered_kv.ops.text import counted, without_paths

DIFFERENCES_MAX: Final = 50

RETIRED: Final = "of use to engines alone that have not been reset, or not ended since"
"""What a hit in a retired namespace is."""

BLOCK_DROPPERS: Final = frozenset({"eagle", "eagle3", "mtp"})
"""Drafts that take at each position the token behind it: vLLM gives up the last block of a hit for them."""

WINDOWED: Final = frozenset({"sliding_attention", "chunked_attention"})
"""Kinds of layers whose last token cannot be computed alone behind a prompt that was loaded whole
(``vllm/kv_groups.py``)."""


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


class Boundary(msgspec.Struct, frozen=True, kw_only=True):
    """A place in the prompt from which an engine with recurrent layers could go on, as far as its state is here.

    Attributes:
        tokens: Tokens before it.
        state: ``here``; ``part``: some parts of it are missing or bad; ``unreachable``: it is here, and a chunk before
            it is not; ``last_token``: it is here, and of no use to this prompt, whose last token has to be computed
            (with some drafts its last block).
        text: The same in words.
    """

    tokens: int
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
        is_retired: Whether a reset retired its epoch, as far as the tier knows.
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
        namespace: The namespace that is explained; null where none can be: without a record, or of rows.
        chosen_by: Why this one, in words.
        is_retired: Whether a reset retired its epoch, as far as the tier knows; null without a namespace.
        prompt_tokens: Tokens in the file.
        chunk_tokens: Tokens of a chunk.
        prompt_chunks: Full chunks of the prompt.
        tail_tokens: Tokens behind the last full chunk, which are stored as tails only (setting ``tail_tokens``).
        tail_hit_tokens: Of the tokens behind ``here_chunks`` those of a tail that is here; 0 where none is. Offered by
            engines with that setting, beyond ``hit_tokens``.
        hit_chunks: Leading chunks that an engine would read from this tier.
        hit_tokens: Tokens that an engine of this namespace would be offered for this prompt; where it is retired, no
            engine that starts now is one.
        hit_text: Why it is so many, in words.
        here_chunks: Leading chunks that are here, whether a hit may bring them or not.
        here_tokens: The same in tokens.
        state_parts: Of how many parts a state of the model's recurrent layers consists; 0: it has none.
        boundaries: Boundaries of the prompt at which any part of a state is here, the deepest first.
        draft: vLLM's name of the method by which a draft with KV of its own guesses; null where there is none.
        siblings: Chunks of other prompts at the position of the first miss, continuing the same prefix; null without a
            miss.
        runs: The prompt, chunk by chunk.
        others: Other namespaces with some of the prompt, the longest part first.
        notes: What may make the answer incomplete.
        see: Where the documentation tells what to do about a miss, or a hit in a retired namespace; null without one.
    """

    uri: str
    namespace: str | None
    chosen_by: str
    is_retired: bool | None
    prompt_tokens: int
    chunk_tokens: int | None
    prompt_chunks: int | None
    tail_tokens: int | None
    tail_hit_tokens: int
    hit_chunks: int
    hit_tokens: int
    hit_text: str
    here_chunks: int
    here_tokens: int
    state_parts: int
    boundaries: list[Boundary]
    draft: str | None
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
        is_retired: No engine that starts now uses it: a reset retired its epoch, as far as this tier knows, or
            it is the private one of an engine that was reset.
    """

    namespace: Namespace
    chunk_tokens: int
    keys: PrefixKeys = field(repr=False)
    hits: int
    used_s: float
    is_retired: bool
    state_parts: int = 0

    @property
    def hit_tokens(self) -> int:
        return self.hits * self.chunk_tokens

    @property
    def draft_method(self) -> str | None:
        """vLLM's name of how a draft with KV of its own guesses; None where there is none."""
        draft = self.namespace.fields.get("draft")
        method = draft.get("method") if isinstance(draft, dict) else None
        return method if isinstance(method, str) else None

    @property
    def has_windows(self) -> bool:
        """Whether layers attend to a part of the tokens before them, as the model's configuration says."""
        config = self.namespace.fields["text_config"]
        if not isinstance(config, dict):
            return False
        kinds = config.get("layer_types")
        if isinstance(kinds, list):
            return not WINDOWED.isdisjoint(map(str, kinds))
        return bool(config.get("sliding_window") or config.get("attention_chunk_size"))

    @property
    def is_hybrid(self) -> bool:
        """Whether an engine with a draft has several KV cache groups, so that vLLM matches as with several."""
        draft = self.namespace.fields.get("draft")
        return isinstance(draft, dict) and "kv_cache_groups" in draft

    @property
    def drops_block(self) -> bool:
        """Whether vLLM gives up the last block of a prefix that it matched (``vllm/drafts.py``)."""
        fields = self.namespace.fields
        settings = fields["draft"].get("settings") if isinstance(fields.get("draft"), dict) else None
        is_off = isinstance(settings, dict) and bool(settings.get("disable_eagle_block_drop"))
        return self.draft_method in BLOCK_DROPPERS and not is_off


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
        ConfigError: The namespace that is wanted cannot be explained.
    """
    notes = list(content.notes)
    stored = _Stored(storage.kind, content)
    candidates = _candidates(storage, stored, content, tokens, salt, notes)
    if wanted is not None:
        chosen = next((c for c in candidates if c.namespace.digest == wanted), None)
        if chosen is None:
            record = content.records.get(wanted) or NamespaceRecord.missing(wanted)
            raise ConfigError(f"option --namespace: {wanted.hex()} cannot be explained: {_why_left_out(record)}")
        reason = "named by --namespace"
    elif not candidates:
        return _nothing(storage.uri, len(tokens), notes)
    else:
        chosen, reason = _choose(candidates)
    size = chosen.chunk_tokens
    headers = _Headers(storage)
    states = _states(headers, stored, chosen, len(tokens) // size, progress)
    here = next((i for i, (state, _) in enumerate(states) if state is not State.HERE), len(states))
    siblings = stored.siblings(chosen, here) if here < len(states) else None
    offer = _offer(headers, stored, chosen, here, len(tokens))
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
        tail_hit_tokens=_tail_here(headers, stored, chosen, here, tokens),
        hit_chunks=-(-offer.tokens // size),
        hit_tokens=offer.tokens,
        hit_text=f"{RETIRED}: {offer.text}" if chosen.is_retired else offer.text,
        here_chunks=here,
        here_tokens=here * size,
        state_parts=chosen.state_parts,
        boundaries=offer.boundaries,
        draft=chosen.draft_method,
        siblings=siblings,
        runs=_runs(states, here, siblings or 0, size),
        others=[_other(chosen, other) for other in others],
        notes=notes,
        see=None if 0 < len(tokens) // size == here and offer.is_all and not chosen.is_retired else NO_HITS,
    )


def _candidates(
    storage: Reader, stored: "_Stored", content: Content, tokens: Sequence[int], salt: str, notes: list[str]
) -> list[Candidate]:
    """Every namespace that can be explained; ``notes`` gets the others."""
    epochs, candidates = storage.epochs(), []
    for record in content.records.values():
        if record.namespace is None or not record.chunk_tokens or record.is_of_rows:
            notes.append(f"namespace {record.digest.hex()} was left out: {_why_left_out(record)}")
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
                record.state_parts,
            )
        )
    return candidates


def _why_left_out(record: NamespaceRecord) -> str:
    """Why nobody but an engine can say which keys a prompt has in a namespace."""
    if record.is_of_rows:
        return "its chunks are rows of vLLM's own offloading, and vLLM's block hashes name them, which only it computes"
    return record.problem or "it has no chunk_tokens"


def _nothing(uri: str, token_count: int, notes: list[str]) -> ExplainReport:
    """No namespace of the tier has a record from which the prompt's keys follow."""
    return ExplainReport(
        uri=uri,
        namespace=None,
        chosen_by="",
        is_retired=None,
        prompt_tokens=token_count,
        chunk_tokens=None,
        prompt_chunks=None,
        tail_tokens=None,
        tail_hit_tokens=0,
        hit_chunks=0,
        hit_tokens=0,
        hit_text="no namespace here can be explained",
        here_chunks=0,
        here_tokens=0,
        state_parts=0,
        boundaries=[],
        draft=None,
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
        self.tails: dict[tuple[bytes, bytes], list[BlobName]] = {}  # by namespace and the chunk before them
        self._children: Counter[tuple[bytes, bytes, int]] = Counter()
        for blob in content.blobs:
            name = blob.name
            self.used_s[name.namespace] = max(blob.used_s, self.used_s.get(name.namespace, 0.0))
            if tail_tokens(name.key):
                self.tails.setdefault((name.namespace, name.parent), []).append(name)
            elif not blob.is_state:
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
    headers: "_Headers", stored: _Stored, chosen: Candidate, count: int, progress: Progress
) -> list[tuple[State, str]]:
    """State of every chunk, with the reason where the state alone does not give it."""
    states: list[tuple[State, str]] = []
    is_broken = False
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


def _tail_here(headers: _Headers, stored: _Stored, chosen: Candidate, here: int, tokens: Sequence[int]) -> int:
    """Length of the longest tail behind the chunks that are here whose tokens are the prompt's."""
    lengths = [0]
    for name in stored.tails.get((chosen.namespace.digest, chosen.keys.parent(here)), []) if here else ():
        length, blob = tail_tokens(name.key), stored.get(name)
        if length > min(len(tokens) - here * chosen.chunk_tokens, chosen.chunk_tokens) or blob is None:
            continue
        key, digest = chosen.keys.tail(tokens, here, length)
        if key == name.key and headers.judge(name, blob, digest)[0] is State.HERE:
            lengths.append(length)
    return max(lengths)


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
        return f"{text}: evicted or deleted; {counted(behind, 'chunk')} of this prompt behind it can be reached no more"
    if siblings and index:
        return f"{text}: first diverging chunk; other prompts continue here with {counted(siblings, 'other chunk')}"
    if siblings:
        return (
            f"{text}: it diverges in its first chunk; other prompts begin with {counted(siblings, 'other chunk')} "
            "(a salt, a LoRA adapter or an image changes the keys from here on)"
        )
    if index:
        return f"{text}: nothing was ever stored behind the chunk before it, or it was evicted"
    return f"{text}: no prompt of this namespace is stored here"


# -- what of it an engine is offered -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Offer:
    """How far an engine would be taken.

    Attributes:
        text: Why so far.
        is_all: It is as far as one could be with everything stored.
    """

    tokens: int
    text: str
    is_all: bool
    boundaries: list[Boundary] = field(default_factory=list)


def _offer(headers: _Headers, stored: _Stored, chosen: Candidate, here: int, prompt_tokens: int) -> _Offer:
    """What of the leading chunks that are here a hit brings."""
    if chosen.state_parts:
        return _stateful_offer(headers, stored, chosen, here, prompt_tokens)
    size = chosen.chunk_tokens
    if chosen.draft_method is not None:
        return _drafted_offer(chosen, here * size, prompt_tokens)
    whole = prompt_tokens // size
    if here < whole:
        return _Offer(here * size, f"{here * size} tokens are here up to the first miss", is_all=False)
    tail = (
        f"; chunks have {size} tokens, so the last {prompt_tokens % size} are computed" if prompt_tokens % size else ""
    )
    if chosen.has_windows and whole and prompt_tokens == here * size:
        reason = "the prompt's last token is computed, and as layers attend to windows, its chunk with it"
        return _Offer((whole - 1) * size, f"every full chunk is here; {reason}", is_all=True)
    return _Offer(here * size, f"every full chunk is here{tail}", is_all=True)


def _drafted_offer(chosen: Candidate, here_tokens: int, prompt_tokens: int) -> _Offer:
    """As far as vLLM's own prefix cache would go with a draft (``Drafts`` in ``vllm/drafts.py``)."""
    block = int(chosen.namespace.fields["block_tokens"])
    dropped = block if chosen.drops_block else 0
    most = (prompt_tokens if dropped and chosen.is_hybrid else prompt_tokens - 1) // block * block
    offered = max(0, min(here_tokens, most) - dropped)
    reasons = [f"{here_tokens} tokens are here"]
    if most < here_tokens:
        reasons.append(f"with a draft the prompt's last token is computed, and with it its block: {most}")
    if dropped and here_tokens:
        reasons.append(
            f"the last block of {block} is not offered: the draft ({chosen.draft_method}) wrote its end for the token "
            "behind it, which may be another one"
        )
    wished = max(0, min(prompt_tokens // chosen.chunk_tokens * chosen.chunk_tokens, most) - dropped)
    return _Offer(offered, "; ".join(reasons), is_all=offered == wished)


def _stateful_offer(headers: _Headers, stored: _Stored, chosen: Candidate, here: int, prompt_tokens: int) -> _Offer:
    """Up to the deepest boundary before the last token whose state is here with every chunk before it."""
    size, keys = chosen.chunk_tokens, chosen.keys
    # A dropped block leaves more than the last token to compute (vllm/drafts.py).
    deepest = max(0, prompt_tokens // size - 1) if chosen.drops_block else (prompt_tokens - 1) // size
    boundaries: list[Boundary] = []
    for chunks in range(len(keys.keys), 0, -1):
        is_found = any(one.state == "here" for one in boundaries)
        state = _state_at(None if is_found else headers, stored, chosen, chunks)
        if state is None:
            continue
        kind, text = state
        if kind == "here" and chunks > here:
            kind, text = "unreachable", "here, but a chunk before it is not: no request can reach it"
        elif kind == "here" and chunks > deepest:
            kind = "last_token"
            text = "here, but of no use to this prompt, of which more has to be computed"
        boundaries.append(Boundary(tokens=chunks * size, state=kind, text=text))
    offered = next((one.tokens for one in boundaries if one.state == "here"), 0)
    wished = min(here, deepest) * size
    last = f"last state at {offered}" if offered else "no state that can be used"
    reasons = [f"attention up to {here * size}, {last}"]
    if here > deepest:
        why = "the last block is not offered with this draft" if chosen.drops_block else "the last token is computed"
        reasons.append(f"{why}, so the deepest boundary for this prompt is {deepest * size}")
    if offered < wished:
        parts = next((one for one in boundaries if one.tokens == wished), None)
        what = "no state is stored there" if parts is None else f"of the state there {parts.text}"
        reasons.append(
            f"at {wished} a hit could end, but {what}: vLLM makes states at the last boundary of a prompt and where "
            "prompts fork"
        )
    return _Offer(offered, "; ".join(reasons), is_all=offered == deepest * size, boundaries=boundaries)


def _state_at(headers: _Headers | None, stored: _Stored, chosen: Candidate, chunks: int) -> tuple[str, str] | None:
    """What of the state behind so many chunks is here, without ``headers`` by names alone; None: nothing."""
    space, keys, last = chosen.namespace.digest, chosen.keys, chunks - 1
    chunk = ChunkRecord(space, keys.keys[last], keys.parent(last), last, keys.digests[last])
    wrong: list[str] = []
    seen = 0
    for number, record in enumerate(state_records(chunk, chosen.state_parts), start=1):
        name = BlobName.of(record)
        blob = stored.get(name)
        if blob is None:
            found = stored.stray(name) or (State.MISSING, "")
        else:
            found = headers.judge(name, blob, record.prefix_sha256) if headers is not None else (State.HERE, "")
        seen += found[0] is not State.MISSING
        if found[0] is not State.HERE:
            wrong.append(f"part {number} is {found[0].value}" + (f" ({found[1]})" if found[1] else ""))
    if not seen:
        return None
    return ("part", f"{', '.join(wrong)} of {chosen.state_parts}") if wrong else ("here", "here")


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
            return "a reset retired the epoch of the other one"
        return "a reset retired the epoch of this one" if chosen.is_retired else "before or after a reset"
    fitting = [name for name in _MEANINGS if path == name or path.startswith((f"{name}.", f"{name}["))]
    return _MEANINGS[max(fitting, key=len)] if fitting else ""


NULLS: Final = "<null>"
"""The field of a config that lists what it says null of (``vllm/identity/record.py``)."""

NULLS_TEXT: Final = "a config.json says null of and another leaves out: take one and the same"

_MEANINGS: Final = {
    "weights": "another model, another revision, or a path read as another",
    "text_config": "the model's config.json, as --hf-overrides and --hf-config-path change it",
    f"text_config.{NULLS}": f"what {NULLS_TEXT}",
    "outer_config_sha256": "the model's config.json around its text_config: encoders of images, ids of tokens for them",
    "model_dtype": "vLLM's --dtype",
    "quantization": "vLLM's --quantization and its options",
    "draft": "the draft: vLLM's --speculative-config, or the draft's files",
    f"draft.config.{NULLS}": f"what {NULLS_TEXT}",
    "format_version": "stored by another version of tiered_kv",
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
    "transformers_version": "another minor version of transformers; setting share_vllm_versions",
    "model_code": "what a plugin or a script has registered in the place of vLLM's classes, or its code",
    "kv_encoding": "attention backends, a CPU's instructions or a GPU's FP8: chosen by machine and version",
    "settings": "a setting of vLLM that may change KV: start the engines alike",
    "settings.environment": "an environment variable of vLLM that may change KV: start the engines alike",
    "settings.model_files": "a file beside the weights, or code that the model runs: give all machines the same files",
    "settings.device_capability": "GPUs of another generation compute quantised products otherwise",
    "geometry": "layers or pages of another shape or order",
}
