"""Scrub a tier: read its blobs, report the bad ones, remove those that are corrupt.

Reads several blobs at once: the payload's hash runs without the GIL, so threads help on disk as they do in a bucket.
Says only what it saw twice: a blob may be replaced, and a network may lie, while it is read. Called by
``cli/verify.py``.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import ceil
from typing import Final, NamedTuple

import msgspec

from tiered_kv.chunks.arena import SLAB_BYTES
from tiered_kv.chunks.header import MAX_HEADER_BYTES, read_header
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch, TierUnavailable
from tiered_kv.keys.conditions import Conditions
from tiered_kv.keys.namespace import SELF_TEST_NAMESPACE
from tiered_kv.keys.naming import BlobName
from tiered_kv.keys.stored_by import UNKNOWN
from tiered_kv.ops.blob_check import CORRUPT, REASONS, Expectation, Form, Verdict, judge
from tiered_kv.ops.forest import Forest
from tiered_kv.ops.storage import Content, NamespaceRecord, Progress, Reader, Storage, StoredBlob, Stray, no_progress

READERS: Final = {"disk": 4, "object": 8}
BUFFERED_BYTES: Final = 256 << 20
"""What all readers together may hold."""

AT_ONCE: Final = 1000
SAMPLES: Final = 4
"""Headers read to learn the size of a namespace's blobs, where its record does not declare it."""

SILENT_MAX: Final = 16
"""Objects in a row that a store does not give: it is the store that is bad, not they."""


class BadBlob(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not as it must be.

    Attributes:
        path: Relative to the tier's root.
        reason: ``header``, ``payload``: damaged there. ``truncated``, ``longer``: cut, or followed by something.
            ``swapped``: a sound blob of another key. ``misplaced``: one whose place in its prefix is not what its name,
            the index or its own header says. ``misfit``: one of another shape than its namespace has. ``foreign``: one
            of another namespace. ``version``: one of another format version. ``stray``: not a blob, by its name.
            ``unreadable``: the medium does not give its bytes. ``record``: namespace.json is missing or wrong.
        detail: Expected and observed, in words.
        namespace: Digest of the namespace by its path, null where that says none.
        key: The chunk's key by its path, null where that says none.
        size_bytes: What it takes.
        is_mended: Whether it is gone by now, or was replaced by a sound one.
    """

    path: str
    reason: str
    detail: str
    namespace: str | None
    key: str | None
    size_bytes: int
    is_mended: bool

    @property
    def is_corrupt(self) -> bool:
        """Whether it is a blob of this tier that no request can be answered with, and so may be removed."""
        return self.key is not None and self.reason in CORRUPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is read.

    Attributes:
        namespace: Only this one; None for all.
        share: Of its blobs, above 0 and at most 1.
        seed: Which of them: the same blobs for the same seed and content.
        stored_by: Only blobs whose storer matches, as far as a listing or ``origins.py`` knows it; None for all.
    """

    namespace: bytes | None = None
    share: float = 1.0
    seed: int = 0
    stored_by: Conditions | None = None

    def is_meant(self, blob: StoredBlob) -> bool:
        """Whether the blob's storer matches."""
        return self.stored_by is None or self.stored_by.matches(blob.stored_by or UNKNOWN)


@dataclass(slots=True)
class Scrub:
    """What a scrub found.

    Attributes:
        held: Blobs there are, and files under the name of one.
        read: Blobs that were read, with all of their ``read_bytes``.
        vanished: Blobs that were evicted before they could be read.
        suspects: The blobs of ``bad`` that a repair may remove, by path.
        unreachable: Sound ones behind a gap or a bad one, and parts of a state that lacks others; once the bad ones are
            gone, ``gc`` removes them.
        seconds: What the reading took.
    """

    held: int = 0
    read: int = 0
    read_bytes: int = 0
    vanished: int = 0
    seconds: float = 0.0
    bad: list[BadBlob] = field(default_factory=list)
    suspects: dict[str, StoredBlob] = field(default_factory=dict)
    unreachable: list[StoredBlob] = field(default_factory=list)

    @property
    def corrupt(self) -> list[BadBlob]:
        return [bad for bad in self.bad if bad.is_corrupt]


class _Reading(NamedTuple):
    """A blob and what became of it; no verdict: it vanished."""

    blob: StoredBlob
    verdict: Verdict | None
    read_bytes: int


def scrub(storage: Reader, content: Content, choice: Choice, progress: Progress = no_progress) -> Scrub:
    """Read and judge blobs, and everything else that was listed.

    Raises:
        TierUnavailable: The store answers nothing any more.
    """
    result, start_s = Scrub(), time.monotonic()
    everything = [blob for blob in content.blobs if choice.namespace in (None, blob.name.namespace)]
    blobs = [blob for blob in everything if choice.is_meant(blob)]
    chosen = _sample(blobs, choice)
    strays = _strays(storage, content, choice)
    doubtful = [blob for stray in strays if (blob := stray.as_blob()) is not None]
    result.held = len(blobs) + len(doubtful)
    reader = _Reader(storage, content, everything)
    forms: dict[tuple[bytes, str], dict[Form, list[StoredBlob]]] = {}  # chunks, states and tails apart
    for reading in reader.read_all([*chosen, *doubtful], progress):
        result.read_bytes += reading.read_bytes
        result.read += reading.verdict is not None
        result.vanished += reading.verdict is None
        if reading.verdict is None:
            continue
        if reading.verdict.reason:
            path, verdict = storage.path(reading.blob.name), reading.verdict
            result.bad.append(_bad(path, verdict.reason, verdict.detail, reading.blob.size_bytes, reading.blob))
            result.suspects[path] = reading.blob
        elif reading.verdict.form is not None:
            form = reading.verdict.form
            kind = reading.blob.name.namespace, "state" if form.is_state else "chunk" if form.token_count else "tail"
            forms.setdefault(kind, {}).setdefault(form, []).append(reading.blob)
    for blob, has_majority in _outvoted(forms):
        path, detail = storage.path(blob.name), "its size or tensors differ from those of the namespace's other blobs"
        result.bad.append(_bad(path, "misfit", detail, blob.size_bytes, blob if has_majority else None))
        result.suspects[path] = blob
    result.bad += [_bad(s.path, "stray", s.reason, s.size_bytes) for s in strays if s.as_blob() is None]
    result.bad += _records(storage, content, {blob.name.namespace for blob in blobs})
    order = list(REASONS)
    result.bad.sort(key=lambda bad: (order.index(bad.reason), bad.path))
    bad_paths = {bad.path for bad in result.bad}
    sound = Forest(blob for blob in everything if storage.path(blob.name) not in bad_paths)
    useless = [*sound.unreachable(), *sound.partial_states(content.state_parts())]
    result.unreachable = [blob for blob in useless if choice.is_meant(blob)]
    result.seconds = time.monotonic() - start_s
    return result


@dataclass(slots=True)
class Repair:
    """What a repair did.

    Attributes:
        bad: What the scrub found, with what is mended by now.
        problem: Why the removal ended early, in words; empty if it did not.
    """

    removed: int = 0
    removed_bytes: int = 0
    problem: str = ""
    bad: list[BadBlob] = field(default_factory=list)


def repair(storage: Storage, content: Content, found: Scrub, progress: Progress = no_progress) -> Repair:
    """Remove corrupt blobs, beside a server too; without one, the directory's index is made to agree with its files.

    What a server does not know, or does not let go, is removed behind its back in the end: to it, a file that vanished
    is an ordinary miss.

    Raises:
        DirectoryLocked: Another command works on the directory.
    """
    result, reader = Repair(), _Reader(storage, content, content.blobs)
    before = _still_bad(reader, found, found.corrupt)
    try:
        storage.remove([found.suspects[bad.path] for bad in before], progress, holes=True)
        storage.discard([found.suspects[bad.path].name for bad in _still_bad(reader, found, before)])
    except TierUnavailable as exc:  # what was found is reported all the same
        result.problem = str(exc)
    left = {bad.path for bad in _still_bad(reader, found, before)}
    gone = [bad for bad in before if bad.path not in left]
    result.removed, result.removed_bytes = len(gone), sum(bad.size_bytes for bad in gone)
    for bad in found.bad:
        is_mended = bad.is_corrupt and bad.path not in left
        result.bad.append(msgspec.structs.replace(bad, is_mended=is_mended))
    return result


def _still_bad(reader: "_Reader", found: Scrub, corrupt: Sequence[BadBlob]) -> list[BadBlob]:
    """Those of some corrupt blobs that are there and corrupt now."""
    readings = reader.read_all([found.suspects[bad.path] for bad in corrupt], no_progress)
    return [
        bad
        for bad, reading in zip(corrupt, readings, strict=True)
        if reading.verdict and (reading.verdict.reason or bad.reason == "misfit")
    ]


class _Reader:
    """Reads blobs with several threads.

    Threads: one; its own threads share what is set once, in the constructor.
    """

    def __init__(self, storage: Reader, content: Content, blobs: Sequence[StoredBlob]) -> None:
        self._storage = storage
        self._expected = {space: Expectation.of(record) for space, record in content.records.items()}
        by_space: dict[bytes, list[StoredBlob]] = {}
        for blob in blobs:
            by_space.setdefault(blob.name.namespace, []).append(blob)
        self._usual = {space: self._usual_bytes(space, some) for space, some in by_space.items()}

    def read_all(self, blobs: Sequence[StoredBlob], progress: Progress) -> Iterator[_Reading]:
        """Judge blobs, in their order.

        Raises:
            TierUnavailable: The store gives none of them any more.
        """
        largest = max((size for size in self._usual.values() if size), default=0)
        readers = max(1, min(READERS[self._storage.kind], BUFFERED_BYTES // max(largest, 1)))
        silent = 0
        with ThreadPoolExecutor(readers, thread_name_prefix="scrub") as pool:
            for start in range(0, len(blobs), AT_ONCE):
                for number, reading in enumerate(pool.map(self._read, blobs[start : start + AT_ONCE])):
                    verdict = reading.verdict
                    silent = silent + 1 if verdict is not None and verdict.reason == "unreadable" else 0
                    if verdict is not None and self._storage.kind == "object" and silent >= min(SILENT_MAX, len(blobs)):
                        pool.shutdown(wait=False, cancel_futures=True)
                        raise TierUnavailable(verdict.detail)
                    progress(start + number + 1, len(blobs))
                    yield reading

    def _read(self, blob: StoredBlob) -> _Reading:
        reading = self._read_once(blob)
        if reading.verdict is None or not reading.verdict.reason:
            return reading
        return self._read_once(blob)  # a blob that is being replaced, an answer that was cut off

    def _read_once(self, blob: StoredBlob) -> _Reading:
        usual = self._usual.get(blob.name.namespace)
        try:
            data = self._fetch(blob.name, MAX_HEADER_BYTES if usual is None else usual + 1)
        except TierUnavailable as exc:
            return _Reading(blob, Verdict("unreadable", _cause(exc)), 0)
        if data is None:
            return _Reading(blob, None, 0)
        verdict = judge(blob.name, memoryview(data), usual)
        expected = self._expected.get(blob.name.namespace)
        if verdict.form is not None and expected is not None:
            if objection := expected.objection(verdict.form):
                verdict = Verdict("misfit", objection)
            elif expected.form is not None:
                verdict = Verdict()  # it is that form: nothing to compare with the other blobs
        return _Reading(blob, verdict, len(data))

    def _fetch(self, name: BlobName, length: int) -> bytes | None:
        """The whole blob, and one byte more if there is more: what lies there may be of any size."""
        data = self._storage.read(name, length)
        if data is None or len(data) < length:
            return data
        try:
            parsed = read_header(memoryview(data))
        except (ChunkCorrupt, ChunkMismatch):
            return data
        announced = min(parsed.blob_bytes, SLAB_BYTES) + 1
        if announced <= length or parsed.header.record.namespace != name.namespace:
            return data
        return self._storage.read(name, announced)

    def _usual_bytes(self, space: bytes, blobs: Sequence[StoredBlob]) -> int | None:
        """Size of the namespace's blobs. A hint that saves requests and distinguishes reasons: it may be wrong."""
        expected = self._expected.get(space)
        if expected is not None and expected.blob_bytes is not None:
            return expected.blob_bytes
        for blob in blobs[:: max(1, len(blobs) // SAMPLES)][:SAMPLES]:
            try:
                data = self._storage.read(blob.name, MAX_HEADER_BYTES)
                parsed = None if data is None else read_header(memoryview(data))
            except (ChunkCorrupt, ChunkMismatch, TierUnavailable):
                continue
            if parsed is not None and parsed.header.record.namespace == space:
                return parsed.blob_bytes
        return None


def _sample(blobs: Sequence[StoredBlob], choice: Choice) -> Sequence[StoredBlob]:
    if choice.share >= 1:
        return blobs
    ordered = sorted(blobs, key=lambda blob: (blob.name.namespace, blob.name.key, blob.name.parent))
    return random.Random(choice.seed).sample(ordered, ceil(len(ordered) * choice.share))


def _strays(storage: Reader, content: Content, choice: Choice) -> list[Stray]:
    """What is no blob by its name or its header, less what writes leave behind: that is for ``gc``."""
    prefix = "" if choice.namespace is None else storage.record_path(choice.namespace).rpartition("/")[0] + "/"
    return [stray for stray in content.strays if stray.kind != "temp" and stray.path.startswith(prefix)]


def _bad(path: str, reason: str, detail: str, size_bytes: int, blob: StoredBlob | None = None) -> BadBlob:
    """Something bad that nothing has mended yet; ``blob`` None where it is not known to be a blob of this tier."""
    return BadBlob(
        path=path,
        reason=reason,
        detail=detail,
        namespace=None if blob is None else blob.name.namespace.hex(),
        key=None if blob is None else blob.name.key.hex(),
        size_bytes=size_bytes,
        is_mended=False,
    )


def _outvoted(
    forms: Mapping[tuple[bytes, str], Mapping[Form, Sequence[StoredBlob]]],
) -> Iterator[tuple[StoredBlob, bool]]:
    """Sound blobs that differ from the rest of their namespace, whose record does not say which are right.

    Each with whether the rest is a majority: without one it is unknown which of them may go.
    """
    for groups in forms.values():
        largest = max(groups.values(), key=len)
        is_majority = 2 * len(largest) > sum(map(len, groups.values()))
        for blobs in groups.values() if len(groups) > 1 else ():
            if blobs is not largest or not is_majority:
                yield from ((blob, is_majority) for blob in blobs)


def _records(storage: Reader, content: Content, spaces: set[bytes]) -> Iterator[BadBlob]:
    """Records that are missing or wrong, of namespaces that have blobs. A server's self-test needs none."""
    doubtful = [space for space in sorted(spaces - {SELF_TEST_NAMESPACE}) if _problem(content.records, space)]
    records = storage.records() if doubtful else {}  # again: a server may have written it meanwhile
    for space in doubtful:
        if problem := _problem(records, space):
            yield _bad(storage.record_path(space), "record", problem, 0)


def _problem(records: Mapping[bytes, NamespaceRecord], space: bytes) -> str:
    record = records.get(space)
    return "there is no namespace.json" if record is None else record.problem


def _cause(exc: TierUnavailable) -> str:
    """The operating system's reason, without the absolute path, if it is one; else the whole message."""
    cause = exc.__cause__
    return cause.strerror if isinstance(cause, OSError) and cause.strerror else str(exc)
