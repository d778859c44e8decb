"""Whose the chunks of a tier are: read from headers where a listing does not tell.

A directory's index knows the tag of every blob. A bucket's listing does not: names there are for everybody who may
list, and a tag in them would tell who has how much. So the first bytes of each object are read, several at once: one
ranged GET for each (docs/decisions/0019-tenant-tags.md has what that takes). Called by ``cli/evict.py``, ``cli/ls.py``.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tiered_kv.admin.storage import Content, Progress, Storage, StoredBlob, no_progress
from tiered_kv.chunks.header import PEEK_BYTES, peek
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch, ConfigError
from tiered_kv.keys.tags import NO_TAG, tag_digest

AT_ONCE: Final = 1000


def parse_tag(text: str) -> bytes:
    """The digest of what ``--tag`` says.

    Raises:
        ConfigError: It is no tag. The message does not show it.
    """
    try:
        return tag_digest(text)
    except ValueError as exc:
        raise ConfigError(f"option --tag: expected {exc}") from exc


def read_tags(storage: Storage, content: Content, namespace: bytes | None, progress: Progress = no_progress) -> None:
    """Fill in the tags that a listing left open, of one namespace or of all.

    Modifies:
        ``content``: its blobs, less those that are gone by now, and its notes.

    Raises:
        TierUnavailable: The tier gives no answer, so nobody knows whose the rest is.
    """
    unknown = [b for b in content.blobs if b.tag is None and namespace in (None, b.name.namespace)]
    problems: Counter[str] = Counter()
    if unknown:
        tags = _read_all(storage, unknown, problems, progress)
        still_there = (blob for blob in content.blobs if tags.get(blob, NO_TAG) is not None)
        content.blobs = [blob._replace(tag=tags.get(blob, blob.tag)) for blob in still_there]
    problems["another version"] += sum(stray.kind == "foreign" for stray in content.strays)
    problems["damaged"] += sum(stray.kind == "damaged" for stray in content.strays)
    if count := problems["another version"]:
        content.notes.append(
            f"{count} chunks of another format version or namespace do not tell whose they are, and stay"
        )
    if count := problems["damaged"]:
        content.notes.append(
            f"{count} chunks have a damaged header, so that nobody knows whose they are: `tiered-kv verify` names them"
        )


def _read_all(
    storage: Storage, blobs: list[StoredBlob], problems: Counter[str], progress: Progress
) -> dict[StoredBlob, bytes | None]:
    """The tag of each blob; None where it is gone."""

    def read(blob: StoredBlob) -> tuple[bytes | None, str]:
        data = storage.read(blob, PEEK_BYTES)
        if data is None:
            return None, ""
        try:
            return peek(data).tag, ""
        except ChunkMismatch:
            return NO_TAG, "another version"
        except ChunkCorrupt:
            return NO_TAG, "damaged"

    found: dict[StoredBlob, bytes | None] = {}
    with ThreadPoolExecutor(storage.readers, thread_name_prefix="tags") as pool:
        try:
            for start in range(0, len(blobs), AT_ONCE):
                part = blobs[start : start + AT_ONCE]
                for blob, (tag, problem) in zip(part, pool.map(read, part), strict=True):
                    found[blob] = tag
                    problems[problem] += 1
                progress(len(found), len(blobs))
        finally:
            pool.shutdown(cancel_futures=True)  # when one raised, the others need not be asked
    return found
