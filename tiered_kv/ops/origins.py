"""Read the owner and the storer of chunks, from their headers where no index has them.

A directory's index knows both of every blob but the newest. A bucket's listing does not: names there are for everybody
who may list, and a tag in them would show how much each tenant has. So the first bytes of each object are read, several
at once: one ranged GET for each (docs/decisions/0019-tenant-tags.md has what that takes). Called by ``cli/options.py``.
"""

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import msgspec

from tiered_kv.chunks.header import PEEK_BYTES, peek
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch, TierUnavailable
from tiered_kv.fleet import layout
from tiered_kv.keys.conditions import Conditions
from tiered_kv.keys.naming import parse_object_path, parse_path
from tiered_kv.keys.stored_by import UNKNOWN
from tiered_kv.keys.tags import NO_TAG
from tiered_kv.ops.eviction import note_on_foreign
from tiered_kv.ops.storage import Content, Progress, Reader, StoredBlob, Stray, no_progress, parse_digest
from tiered_kv.tiers.disk.scan import NAMESPACE_FILE

AT_ONCE: Final = 1000
LINES_SHOWN: Final = 3

HERE: Final = "."
"""Not deeper than the place that was named."""


class _Told(NamedTuple):
    """Owner and storer from a blob's header, or why it has none."""

    tag: bytes = NO_TAG
    stored_by: str | None = None
    problem: str = ""
    is_there: bool = True


def read_origins(storage: Reader, content: Content, namespace: bytes | None, progress: Progress = no_progress) -> None:
    """Fill in the tags and storers that a listing left open or cannot be sure of, of one namespace or of all.

    Modifies:
        ``content``: its blobs, less those that are gone by now, its notes, and how many could not be read.

    Raises:
        TierUnavailable: The tier does not answer, so the origins of the rest, which no index tells, stay unknown.
    """
    unsure_since_s = content.unsure_since_s
    unknown = [
        b
        for b in content.blobs
        if (b.tag is None or b.written_s >= unsure_since_s) and namespace in (None, b.name.namespace)
    ]
    problems: Counter[str] = Counter()
    if unknown:
        told = _read_all(storage, unknown, progress)
        content.unread = sum(one.problem == "unreadable" for one in told.values())
        problems.update(one.problem for one in told.values())  # also where an index tells, which cannot be sure here
        content.blobs = [_filled_in(blob, told.get(blob)) for blob in content.blobs if _is_there(told.get(blob))]
    if text := note_on_foreign(content, namespace):
        content.notes.append(text)
    problems["damaged"] += content.count_strays("damaged", namespace=namespace)
    content.unjudged = problems["another version"] + problems["damaged"]
    content.unjudged += content.count_strays("foreign", namespace=namespace)
    if count := problems["another version"]:
        content.notes.append(
            f"{count} chunks of another format version or namespace do not tell whose they are nor who stored them, "
            "and stay: `tiered-kv evict --namespace` removes a namespace whole"
        )
    if count := problems["damaged"]:
        content.notes.append(
            f"{count} chunks have a damaged header, so that nobody knows for sure whose they are nor who stored "
            "them: `tiered-kv verify` names them, and with --repair it removes them"
        )
    content.unread += content.count_strays("unreadable", namespace=namespace)
    if content.unread:
        content.notes.append(
            f"{content.unread} chunks cannot be read now, so that nobody knows for sure whose they are nor who stored "
            "them: say it again when they can be; `tiered-kv verify` names them"
        )


def unfinished_writes(content: Content) -> int:
    """Files of writes that are under way or were cut off; a store's probes are none, and hold nobody's bytes."""
    return sum(stray.kind == "temp" and not layout.is_probe(stray.path) for stray in content.strays)


def caches_below(strays: Iterable[Stray]) -> list[str]:
    """Deeper prefixes, below which files have names and places as in a cache; ``HERE``: as in one of another medium."""
    found = set()
    for stray in strays:
        *above, space, shard, name = ["", "", "", *stray.path.split("/")]
        path = f"{space}/{shard}/{name}"
        if stray.kind == "name" and (parse_object_path(path) or parse_path(path)):
            found.add("/".join(filter(None, above)) or HERE)
        elif stray.kind == "name" and name == NAMESPACE_FILE and parse_digest(shard):
            found.add("/".join(filter(None, [*above, space])) or HERE)
    return sorted(found)


def _is_there(told: _Told | None) -> bool:
    return told is None or told.is_there


def _filled_in(blob: StoredBlob, told: _Told | None) -> StoredBlob:
    is_said = told is None or (told.problem and blob.tag is not None)  # by an index, if by anything
    return blob if told is None or is_said else msgspec.structs.replace(blob, tag=told.tag, stored_by=told.stored_by)


def notes_on_storers(blobs: Iterable[StoredBlob], conditions: Conditions, namespace: bytes | None) -> list[str]:
    """Notes on blobs that the conditions cannot judge; empty where they judge all."""
    counts: Counter[str | None] = Counter()  # None: unknown, and noted already
    for blob in blobs:
        if namespace in (None, blob.name.namespace):
            conditions.matches(blob.stored_by or UNKNOWN)
            counts[blob.stored_by] += 1
    notes = []
    if count := counts[UNKNOWN]:
        notes.append(
            f"{count} chunks were stored by a version that did not say who it was, and are not meant by any "
            "condition: `tiered-kv evict --namespace` removes a namespace whole"
        )
    if lines := sorted(conditions.incomparable & counts.keys()):
        shown = "; ".join(lines[:LINES_SHOWN]) + ("; ..." if len(lines) > LINES_SHOWN else "")
        notes.append(
            f"{sum(counts[line] for line in lines)} chunks were stored by a version that is neither before nor after "
            f"another, and are not meant: {shown}. Name such a version with =="
        )
    for wider, versions in sorted(conditions.longer(filter(None, counts)).items()):
        shown = ", ".join(sorted(versions)[:LINES_SHOWN]) + (", ..." if len(versions) > LINES_SHOWN else "")
        notes.append(
            f"a version is meant whole: {shown} {'is' if len(versions) == 1 else 'are'} not, and {wider} means all "
            "that begins so"
        )
    return notes


def _read_all(storage: Reader, blobs: list[StoredBlob], progress: Progress) -> dict[StoredBlob, _Told]:
    def read(blob: StoredBlob) -> _Told:
        try:
            data = storage.read(blob, PEEK_BYTES)
        except TierUnavailable:
            if blob.tag is None:
                raise
            return _Told(problem="unreadable")  # the index tells, which may have it from what lay there before
        if data is None:
            return _Told(is_there=False)
        try:
            header = peek(data)
        except ChunkMismatch:
            return _Told(problem="another version")
        except ChunkCorrupt:
            return _Told(problem="damaged")
        return _Told(header.record.tag, header.record.stored_by)

    found: dict[StoredBlob, _Told] = {}
    with ThreadPoolExecutor(storage.readers, thread_name_prefix="origins") as pool:
        try:
            for start in range(0, len(blobs), AT_ONCE):
                part = blobs[start : start + AT_ONCE]
                found.update(zip(part, pool.map(read, part), strict=True))
                progress(len(found), len(blobs))
        finally:
            pool.shutdown(cancel_futures=True)  # when one raised, the others are not read
    return found
