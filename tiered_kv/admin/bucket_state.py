"""Who keeps a bucket within its limits, read from the objects that its servers leave there for each other.

Reads only; see ``tiers/bucket/layout.py`` for what they are.
"""

from tiered_kv.admin.object_storage import ObjectStorage
from tiered_kv.admin.storage import Storage
from tiered_kv.admin.survey import BucketServer, BucketState
from tiered_kv.tiers.bucket.layout import (
    JSON_BYTES_MAX,
    LEASES,
    SERVERS,
    USAGE,
    Answer,
    Report,
    Term,
    UsageFigures,
    decode,
    parse_lease_path,
    parse_session_path,
)
from tiered_kv.tiers.object_store import ObjectInfo, ObjectStore


def read_bucket(storage: Storage) -> BucketState:
    """Who leads and who follows; a few requests and one per server.

    Raises:
        TierUnavailable: The store cannot be read.
    """
    assert isinstance(storage, ObjectStorage), storage.kind
    store = storage.store
    leases = {term: info for info in store.list(LEASES) if (term := parse_lease_path(info.path)) is not None}
    newest = max(leases, default=None)
    lease = None if newest is None else decode(store.get(leases[newest].path, JSON_BYTES_MAX), Term)
    usage = decode(store.get(USAGE, JSON_BYTES_MAX), UsageFigures)
    grants = {} if lease is None else lease.grants
    servers = [server for info in store.list(SERVERS) if (server := _server(store, info, grants)) is not None]
    return BucketState(
        term=newest,
        leader=None if lease is None else lease.holder,
        is_closed=lease is not None and lease.is_closed,
        is_tight=lease is not None and lease.is_tight,
        renewed_unix_s=None if newest is None else leases[newest].modified_s,
        capacity_bytes=None if lease is None else lease.capacity_bytes,
        ttl_s=None if lease is None else lease.ttl_s,
        used_bytes=None if usage is None else usage.used_bytes,
        blobs=None if usage is None else usage.blob_count,
        servers=sorted(servers, key=lambda server: server.session),
    )


def _server(store: ObjectStore, info: ObjectInfo, grants: dict[str, Answer]) -> BucketServer | None:
    session = parse_session_path(info.path)
    report = decode(store.get(info.path, JSON_BYTES_MAX), Report) if session is not None else None
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
