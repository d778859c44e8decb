"""What can be known of a tier from the tier itself: sums over a look at all of it, and who keeps a bucket.

Reads only; ``bucket_state.py`` reads what a bucket's servers leave there. For a tier whose server runs, the figures of
that say more (``server_link.py``).
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tiered_kv.admin.listing import set_self_test_apart
from tiered_kv.admin.storage import Content, Progress, Storage, StoredBlob, no_progress
from tiered_kv.server.paths import read_info


class NamespaceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of one namespace.

    Attributes:
        namespace: Its digest in hex digits.
        chunks, bytes: What is stored.
        chunk_tokens: Tokens of a chunk; None where no record says so.
        tokens: In all its chunks; None likewise.
        pinned_chunks: Chunks with a pin of their own.
        last_used_unix_s: When a chunk of it was used last; None without chunks.
    """

    namespace: str
    chunks: int
    bytes: int
    chunk_tokens: int | None
    tokens: int | None
    pinned_chunks: int
    last_used_unix_s: float | None


class BucketServer(msgspec.Struct, frozen=True, kw_only=True):
    """One server of a bucket, by its last report.

    Attributes:
        session: Its id and the number of its session.
        term: The term it follows.
        reported_unix_s: When, by the store's clock.
        granted_bytes, spent_bytes: What it may put and has put since the session began; None: no grant is known.
        stored_chunks: How many it put.
        namespaces: How many it serves.
    """

    session: str
    term: int
    reported_unix_s: float
    granted_bytes: int | None
    spent_bytes: int
    stored_chunks: int
    namespaces: int


class BucketState(msgspec.Struct, frozen=True, kw_only=True):
    """Who keeps a bucket within its limits.

    Attributes:
        term: Number of the newest lease; None: nobody ever led.
        leader: Id of the server that holds it; None: its lease cannot be read.
        is_closed: The leader gave the lead up; nobody leads until the next server needs to.
        is_tight: Room is short.
        renewed_unix_s: When the leader showed its last sign of life, by the store's clock.
        capacity_bytes, ttl_s: The limits in force; None: none.
        used_bytes, blobs: What the leader wrote down last; None: nothing.
        servers: Those that keep to grants; servers without limits report nothing while nobody leads.
    """

    term: int | None
    leader: str | None
    is_closed: bool
    is_tight: bool
    renewed_unix_s: float | None
    capacity_bytes: int | None
    ttl_s: float | None
    used_bytes: int | None
    blobs: int | None
    servers: list[BucketServer]


class StorageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A tier by itself, without what a server knows.

    Attributes:
        uri: As it may be shown.
        kind: ``disk`` or ``object``.
        chunks, bytes: Blobs and what they take.
        tokens: In all chunks whose namespace says how many a chunk has.
        capacity_bytes: The limit in force or given; None: not known, or none.
        free_bytes: Free space of the file system; None for an object store.
        own_bytes: Records, indexes, leases, logs: what is kept beside blobs.
        strays, stray_bytes: Files or objects that are no blob, or not one that can be read there.
        stray_kinds: The same by kind: ``name``, ``damaged``, ``foreign``, ``temp``.
        pinned_chunks: Chunks with a pin of their own.
        last_used_unix_s: When any chunk was used last; None without chunks.
        namespaces: The largest first.
        bucket: Who keeps it within its limits; None for a directory.
    """

    uri: str
    kind: str
    chunks: int
    bytes: int
    tokens: int
    capacity_bytes: int | None
    free_bytes: int | None
    own_bytes: int
    strays: int
    stray_bytes: int
    stray_kinds: dict[str, int]
    pinned_chunks: int
    last_used_unix_s: float | None
    namespaces: list[NamespaceFigures]
    bucket: BucketState | None


def survey(storage: Storage, progress: Progress = no_progress) -> tuple[StorageFigures, list[str]]:
    """Look at all of a tier; returns the sums and what may make them incomplete, in words.

    Raises:
        TierUnavailable: The medium cannot be read.
    """
    content = storage.look(progress)
    set_self_test_apart(content)
    notes = list(content.notes)
    free, bucket = None, None
    if storage.kind == "disk":
        free = _free_bytes(root_of(storage))
        notes.extend(_left_behind(root_of(storage)))
    else:
        from tiered_kv.admin.bucket_state import read_bucket  # noqa: PLC0415 - its client takes long to import

        bucket = read_bucket(storage)
    spaces = _namespaces(content)
    kinds = sorted({stray.kind for stray in content.strays})
    figures = StorageFigures(
        uri=storage.uri,
        kind=storage.kind,
        chunks=len(content.blobs),
        bytes=content.blob_bytes,
        tokens=sum(space.tokens or 0 for space in spaces),
        capacity_bytes=storage.capacity_bytes() if bucket is None else bucket.capacity_bytes,
        free_bytes=free,
        own_bytes=content.own_bytes,
        strays=len(content.strays),
        stray_bytes=sum(stray.size_bytes for stray in content.strays),
        stray_kinds={kind: sum(stray.kind == kind for stray in content.strays) for kind in kinds},
        pinned_chunks=sum(space.pinned_chunks for space in spaces),
        last_used_unix_s=_last_used_s(content.blobs),
        namespaces=spaces,
        bucket=bucket,
    )
    return figures, notes


def _namespaces(content: Content) -> list[NamespaceFigures]:
    blobs: dict[bytes, list[StoredBlob]] = {space: [] for space in content.records}
    for blob in content.blobs:
        blobs.setdefault(blob.name.namespace, []).append(blob)
    found = []
    for space, stored in blobs.items():
        record = content.records.get(space)
        chunk_tokens = record.chunk_tokens if record is not None else None
        found.append(
            NamespaceFigures(
                namespace=space.hex(),
                chunks=len(stored),
                bytes=sum(blob.size_bytes for blob in stored),
                chunk_tokens=chunk_tokens,
                tokens=None if chunk_tokens is None else chunk_tokens * len(stored),
                pinned_chunks=sum(blob.pinned_until_s > 0 for blob in stored),
                last_used_unix_s=_last_used_s(stored),
            )
        )
    return sorted(found, key=lambda space: (-space.bytes, space.namespace))


def _last_used_s(blobs: Iterable[StoredBlob]) -> float | None:
    return max((blob.used_s for blob in blobs), default=None)


def root_of(storage: Storage) -> Path:
    """The directory of a disk tier."""
    return Path(storage.uri.removeprefix("file://"))


def _free_bytes(root: Path) -> int:
    space = os.statvfs(root)
    return space.f_bavail * space.f_frsize


def _left_behind(root: Path) -> list[str]:
    """What to say of a server that has the directory and does not answer, or of what one left that was killed."""
    info = read_info(root)
    if info is None:
        return []
    return [f"a server (pid {info.pid}) has this directory and does not answer, or was killed and left its description"]
