"""Where the chunks of a tier come from: whose they are and who stored them, by their headers where nothing else tells.

A directory's index knows both of every blob. A bucket's listing does not: names there are for everybody who may list,
and a tag in them would tell who has how much. So the first bytes of each object are read, several at once: one ranged
GET for each (docs/decisions/0019-tenant-tags.md has what that takes). Called by ``cli/evict.py``, ``cli/ls.py`` and
``cli/verify.py``.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from tiered_kv.admin.storage import Content, Progress, Storage, StoredBlob, no_progress
from tiered_kv.admin.words import counted
from tiered_kv.chunks.header import PEEK_BYTES, peek
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch, ConfigError
from tiered_kv.keys.conditions import Conditions
from tiered_kv.keys.stored_by import UNKNOWN
from tiered_kv.keys.tags import NO_TAG, tag_digest

AT_ONCE: Final = 1000
LINES_SHOWN: Final = 3


class _Told(NamedTuple):
    """What a header told of its blob, or why it told nothing."""

    tag: bytes = NO_TAG
    stored_by: str | None = None
    problem: str = ""
    is_there: bool = True


def parse_tag(text: str) -> bytes:
    """The digest of what ``--tag`` says.

    Raises:
        ConfigError: It is no tag. The message does not show it.
    """
    try:
        return tag_digest(text)
    except ValueError as exc:
        raise ConfigError(f"option --tag: expected {exc}") from exc


def parse_stored_by(texts: Sequence[str] | None) -> Conditions | None:
    """What ``--stored-by`` says, all of it; None where it was not said.

    Raises:
        ConfigError: It is no condition.
    """
    if not texts:
        return None
    try:
        return Conditions(texts)
    except ConfigError as exc:
        raise ConfigError(f"option --stored-by: {exc}") from exc


def read_origins(storage: Storage, content: Content, namespace: bytes | None, progress: Progress = no_progress) -> None:
    """Fill in the tags and storers that a listing left open, of one namespace or of all.

    Modifies:
        ``content``: its blobs, less those that are gone by now, and its notes.

    Raises:
        TierUnavailable: The tier gives no answer, so nobody knows whose the rest is.
    """
    unknown = [b for b in content.blobs if b.tag is None and namespace in (None, b.name.namespace)]
    problems: Counter[str] = Counter()
    if unknown:
        told = _read_all(storage, unknown, progress)
        problems.update(one.problem for one in told.values())
        content.blobs = [_filled_in(blob, told.get(blob)) for blob in content.blobs if _is_there(told.get(blob))]
    if text := note_on_foreign(content, namespace):
        content.notes.append(text)
    problems["damaged"] += sum(stray.kind == "damaged" for stray in content.strays)
    if count := problems["another version"]:
        content.notes.append(
            f"{count} chunks of another format version or namespace do not tell whose they are nor who stored them, "
            "and stay: `tiered-kv evict --namespace` removes a namespace whole"
        )
    if count := problems["damaged"]:
        content.notes.append(
            f"{count} chunks have a damaged header, so that nobody knows whose they are nor who stored them: "
            "`tiered-kv verify` names them"
        )


def note_on_foreign(content: Content, namespace: bytes | None) -> str:
    """What has a blob's name and a header that is not ours to read, so that no selection means it; empty without any.

    Args:
        namespace: None: in all of the tier.
    """
    below = "blobs/" if namespace is None else f"blobs/{namespace.hex()}/"
    count = sum(stray.kind == "foreign" and stray.path.startswith(below) for stray in content.strays)
    if not count:
        return ""
    return (
        f"{counted(count, 'blob')} of another format version or namespace that no index tells of cannot be selected, "
        f"not even by --namespace: to be rid of them, end the server and remove {below.rstrip('/')}"
        f"{'/NAMESPACE by its digits (`tiered-kv verify` names them)' if namespace is None else ''}"
    )


def _is_there(told: _Told | None) -> bool:
    return told is None or told.is_there


def _filled_in(blob: StoredBlob, told: _Told | None) -> StoredBlob:
    return blob if told is None else blob._replace(tag=told.tag, stored_by=told.stored_by)


def notes_on_storers(blobs: Iterable[StoredBlob], conditions: Conditions, namespace: bytes | None) -> list[str]:
    """What conditions cannot say of these blobs, in words; nothing where they could be told of all."""
    counts: Counter[str | None] = Counter()  # None: not told, and noted already
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
    return notes


def _read_all(storage: Storage, blobs: list[StoredBlob], progress: Progress) -> dict[StoredBlob, _Told]:
    def read(blob: StoredBlob) -> _Told:
        data = storage.read(blob, PEEK_BYTES)
        if data is None:
            return _Told(is_there=False)
        try:
            header = peek(data)
        except ChunkMismatch:
            return _Told(problem="another version")
        except ChunkCorrupt:
            return _Told(problem="damaged")
        return _Told(header.tag, header.stored_by)

    found: dict[StoredBlob, _Told] = {}
    with ThreadPoolExecutor(storage.readers, thread_name_prefix="origins") as pool:
        try:
            for start in range(0, len(blobs), AT_ONCE):
                part = blobs[start : start + AT_ONCE]
                found.update(zip(part, pool.map(read, part), strict=True))
                progress(len(found), len(blobs))
        finally:
            pool.shutdown(cancel_futures=True)  # when one raised, the others need not be asked
    return found
