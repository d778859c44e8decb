"""Sum up a tier from its listing, and read which server leads a bucket.

Reads only. For a tier whose server runs, that server's own figures say more (``server_link.py``). What a bucket's
servers leave there for each other is described in ``fleet/layout.py``.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tiered_kv.fleet import layout
from tiered_kv.ops.blob_table import BlobTable, part
from tiered_kv.ops.disk_storage import DiskStorage
from tiered_kv.ops.forest import Forest
from tiered_kv.ops.listing import set_self_test_apart
from tiered_kv.ops.object_storage import ObjectStorage, newest_lease
from tiered_kv.ops.storage import Content, Progress, Reader, no_progress
from tiered_kv.server.directory import read_info
from tiered_kv.tiers.disk.files import free_bytes
from tiered_kv.tiers.object.medium import ObjectInfo
from tiered_kv.tiers.object.store import ObjectStore


class StoredNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of one namespace.

    Attributes:
        namespace: Its digest in hex digits.
        chunks, bytes: What is stored, parts of states included.
        states, state_parts, state_bytes: Boundaries at which the state of the model's recurrent layers is stored, the
            chunks that are parts of states, and what these take; 0 where it has none.
        chunks_behind_states: Chunks behind the last state of their prefix, which no hit brings.
        chunk_tokens: Tokens of a chunk; None where no record says so.
        tokens: In all its chunks, tails included, less the parts of states; None likewise.
        pinned_chunks: Chunks with a pin of their own.
        last_used_unix_s: When a chunk of it was used last; None without chunks.
    """

    namespace: str
    chunks: int
    bytes: int
    states: int
    state_parts: int
    state_bytes: int
    chunks_behind_states: int
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
        stray_kinds: The same by kind: ``name``, ``damaged``, ``unreadable``, ``foreign``,
            ``temp``.
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
    namespaces: list[StoredNamespace]
    bucket: BucketState | None


def summarize(storage: Reader, progress: Progress = no_progress) -> tuple[StorageFigures, list[str]]:
    """Look at all of a tier; returns the sums and what may make them incomplete, in words.

    Raises:
        TierUnavailable: The medium cannot be read.
    """
    content = storage.look(progress)
    set_self_test_apart(content)
    notes = list(content.notes)
    free, bucket = None, None
    if isinstance(storage, DiskStorage):
        free = free_bytes(storage.root)
        notes.extend(_left_behind(storage.root))
    elif isinstance(storage, ObjectStorage):
        bucket = read_bucket(storage.store)
    table = BlobTable.of(content.blobs)
    spaces = _namespaces(content, table)
    kinds = sorted({stray.kind for stray in content.strays})
    figures = StorageFigures(
        uri=storage.uri,
        kind=storage.kind,
        chunks=len(table),
        bytes=table.size_bytes,
        tokens=sum(space.tokens or 0 for space in spaces),
        capacity_bytes=storage.capacity_bytes() if bucket is None else bucket.capacity_bytes,
        free_bytes=free,
        own_bytes=content.own_bytes,
        strays=len(content.strays),
        stray_bytes=sum(stray.size_bytes for stray in content.strays),
        stray_kinds={kind: sum(stray.kind == kind for stray in content.strays) for kind in kinds},
        pinned_chunks=sum(space.pinned_chunks for space in spaces),
        last_used_unix_s=max(table.used_s, default=None),
        namespaces=spaces,
        bucket=bucket,
    )
    return figures, notes


def _namespaces(content: Content, table: BlobTable) -> list[StoredNamespace]:
    spaces: dict[bytes, Sequence[int]] = dict.fromkeys(content.records, ()) | dict(table.rows())
    parts, found = content.state_parts(), []
    forest = Forest(table if parts else ())  # who follows whom matters to states only
    for space, rows in spaces.items():
        record = content.records.get(space)
        chunk_tokens = record.chunk_tokens if record is not None else None
        tails = [table.tails[row] for row in rows if row in table.tails] if table.tails else []
        states = forest.sum_up_states(map(table.__getitem__, rows), parts.get(space, 0))
        found.append(
            StoredNamespace(
                namespace=space.hex(),
                chunks=len(rows),
                bytes=sum(part(table.sizes, rows)),
                states=states.states,
                state_parts=states.parts,
                state_bytes=states.size_bytes,
                chunks_behind_states=states.chunks_behind,
                chunk_tokens=chunk_tokens,
                tokens=None
                if chunk_tokens is None
                else chunk_tokens * (len(rows) - states.parts - len(tails)) + sum(tails),
                pinned_chunks=len(table.pinned.keys() & rows) if table.pinned else 0,
                last_used_unix_s=max(part(table.used_s, rows), default=None),
            )
        )
    return sorted(found, key=lambda space: (-space.bytes, space.namespace))


def _left_behind(root: Path) -> list[str]:
    """What to say of a server that has the directory and does not answer, or of what one left that was killed."""
    info = read_info(root)
    if info is None:
        return []
    return [f"a server (pid {info.pid}) has this directory and does not answer, or was killed and left its description"]


# -- who keeps a bucket ------------------------------------------------------------------------------------------------


def read_bucket(store: ObjectStore) -> BucketState:
    """Who leads and who follows; a few requests and one per server.

    Raises:
        TierUnavailable: The store cannot be read.
    """
    newest = newest_lease(store)
    lease = None if newest is None else newest.content
    usage = layout.decode(store.get(layout.USAGE, layout.JSON_BYTES_MAX), layout.BucketUsage)
    grants = {} if lease is None else lease.grants
    servers = [server for info in store.list(layout.SERVERS) if (server := _server(store, info, grants)) is not None]
    return BucketState(
        term=None if newest is None else newest.term,
        leader=None if lease is None else lease.holder,
        is_closed=lease is not None and lease.is_closed,
        is_tight=lease is not None and lease.is_tight,
        renewed_unix_s=None if newest is None else newest.renewed_s,
        capacity_bytes=None if lease is None else lease.capacity_bytes,
        ttl_s=None if lease is None else lease.ttl_s,
        used_bytes=None if usage is None else usage.used_bytes,
        blobs=None if usage is None else usage.blob_count,
        servers=sorted(servers, key=lambda server: server.session),
    )


def _server(store: ObjectStore, info: ObjectInfo, grants: dict[str, layout.Answer]) -> BucketServer | None:
    session = layout.parse_session_path(info.path)
    report = (
        layout.decode(store.get(info.path, layout.JSON_BYTES_MAX), layout.MemberReport) if session is not None else None
    )
    if session is None or report is None:
        return None
    grant = grants.get(session)
    return BucketServer(
        session=session,
        term=report.term,
        reported_unix_s=info.modified_s,
        granted_bytes=None if grant is None else grant.granted_bytes,
        spent_bytes=report.spent_bytes,
        stored_chunks=report.stored_count,
        namespaces=len(report.namespaces),
    )
