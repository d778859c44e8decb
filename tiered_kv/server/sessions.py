"""Sessions: one engine's scheduler and workers, joined into one owner of leases and slots.

Workers come before their scheduler, each with its part of the geometry; when all are in, the namespace is known and
the session opens. The scheduler client alone owns leases and reservations (rule 1). When it is lost, its slots
stay quarantined until every worker that mapped the arena has unmapped it or has exited: it may still be copying.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from tiered_kv.chunks.geometry import ChunkGeometry
from tiered_kv.chunks.header import BlobFormat
from tiered_kv.engine.engine import Engine
from tiered_kv.engine.lent_rows import LentRows
from tiered_kv.errors import ConfigError, ProtocolError, TierUnavailable
from tiered_kv.keys.chunk_record import KEY_BYTES, PREFIX_DIGEST_BYTES, ChunkRecord
from tiered_kv.keys.namespace import DIGEST_BYTES, Namespace
from tiered_kv.keys.row_names import row_digest, row_key
from tiered_kv.keys.stored_by import shared_line
from tiered_kv.keys.tags import shared_tag
from tiered_kv.keys.tail_keys import tail_tokens
from tiered_kv.metrics.figures import HOST_NAME, SessionFigures
from tiered_kv.server import protocol as m
from tiered_kv.server.connection import Connection
from tiered_kv.server.epochs import Epochs
from tiered_kv.server.members import (
    check_join,
    check_same_engine,
    check_scheduler,
    geometry_of,
    namespace_of,
    parts_of,
    stored_by_all,
)
from tiered_kv.server.pins import Pinning
from tiered_kv.server.prefetching import Prefetching
from tiered_kv.server.quotas import ServerQuotas
from tiered_kv.server.user_sessions import UserSessions
from tiered_kv.tiering.lookups import LookupRequest
from tiered_kv.tiering.quotas import Quota
from tiered_kv.tiering.types import (
    LeaseEnd,
    LoadDamaged,
    LookupAnswer,
    LookupUpdate,
    RowsEnded,
    RowUse,
    SlotGrant,
    SlotId,
    SlotRecall,
    TierEvents,
    Update,
)

logger = logging.getLogger(__name__)

LOOKUPS_MAX = 1 << 18
"""Of one engine at once: one per waiting request."""

MOVES_OUTBOX_MAX = 1 << 20
"""Bytes that may wait for a scheduler before it is not told of moves any more: they are hints, and must not be what
ends the session of an engine that is slow to read."""

END_S = 0.001
"""How long a turn of the loop takes to end leases that were told to end: those of a thousand requests that came at once
are over at once, too."""

COMMITTED_AT_ONCE = 8
"""Chunks or lent rows of one message that one step takes in: 0.1 to 0.2 ms of the 0.4 that clients have in a turn."""

TAKEN_BACK_AT_ONCE = 32
"""Lent rows of one message whose uses one step ends: less than a millisecond. A client waits for all of them."""

KEYS_MAX = m.FRAME_BYTES_MAX // (2 * KEY_BYTES)
"""Keys of one message, within what a frame may hold."""


@dataclass(slots=True)
class GroupWorker:
    """A worker of a group.

    Attributes:
        is_mapped: Until it said that it unmapped the arena, or its process exited.
        pinned: What it said last of the memory it pinned.
    """

    connection: Connection
    join: m.JoinWorker
    is_mapped: bool = True
    pinned: m.Pinned = m.Pinned(0, 0.0)


@dataclass(slots=True)
class GroupLookup:
    """A lookup that the scheduler has not released.

    Attributes:
        client_id: Its number for the scheduler.
        is_question: It ends with its answer.
        told: The last answer that the scheduler was told.
    """

    client_id: int
    is_question: bool
    told: LookupAnswer | None = None


@dataclass(slots=True)
class Group:
    """One generation of one engine.

    Attributes:
        sessions: Engine sessions of this group: the last one is current, earlier ones (before a reset) only drain.
        rank_offsets: Where each rank's bytes start in the payload; ranks with equal KV start at the same place.
        private_epoch: That of the engine, if a reset in an earlier generation gave it one.
        rejoins: Its engine opens another session where this one ends.
        is_alone: It shares nothing, because the bucket did not answer when it opened.
        granted: Slots the scheduler holds empty, per session.
        lookups: The scheduler's lookup id -> (engine session, engine lookup id).
        by_engine: What is known of each, by the latter.
        is_watching: The scheduler is told which chunks come and go.
        lacks_moves: Not of all of them: it is slow to read.
        quota: What the engine says that its namespace keeps and may take, if it says anything.
        slot_bytes: Size of its slots, once the geometry is known.
        stored_by: What headers say of who stored its chunks.
        lease_s: How long its lookups hold leases that they do not claim.
        ending: Lookups whose leases' end was said and may not be in the scheduler's socket yet, by their engine ids.
        decliners: Connections of workers that cannot take part, until their processes exit.
        lent: Rows that the engine lent, if it did.
        row_uses: Uses of these that are not over, by their numbers.
    """

    engine_id: str
    generation: int
    scheduler: Connection | None = None
    world_size: int = 0
    members: dict[int, GroupWorker] = field(default_factory=dict)
    sessions: list[int] = field(default_factory=list)
    granted: dict[int, set[int]] = field(default_factory=dict)
    namespace: Namespace | None = None
    geometry: ChunkGeometry | None = None
    rank_offsets: list[int] = field(default_factory=list)
    base_digest: bytes = b""
    private_epoch: str = ""
    rejoins: bool = False
    is_alone: bool = False
    lookups: dict[int, tuple[int, int]] = field(default_factory=dict)
    by_engine: dict[tuple[int, int], GroupLookup] = field(default_factory=dict)
    decliners: set[Connection] = field(default_factory=set)
    declined: str = ""
    is_watching: bool = False
    lacks_moves: bool = False
    quota: Quota | None = None
    slot_bytes: int = 0
    stored_by: str = ""
    lease_s: float = math.inf
    ending: deque[tuple[int, int]] = field(default_factory=deque)
    lent: LentRows | None = None
    row_uses: dict[int, RowUse] = field(default_factory=dict)
    is_ready: bool = False
    is_lost: bool = False

    @property
    def name(self) -> str:
        return f"{self.engine_id}/{self.generation}"

    @property
    def is_empty(self) -> bool:
        """Whether nobody takes part, or waits to be heard."""
        return self.scheduler is None and not self.members and not self.decliners

    @property
    def joins(self) -> list[m.JoinWorker]:
        """All workers' parts, by rank; call when all are in."""
        return [self.members[rank].join for rank in range(self.world_size)]

    def set_geometry(self) -> None:
        """Combine all workers' parts into what a chunk looks like.

        Raises:
            ConfigError, ValueError: They give no geometry.
        """
        geometry = geometry_of(self.joins)
        self.rank_offsets = [geometry.rank_segments(part)[0].offset_bytes for part in parts_of(self.joins)]
        self.geometry = geometry
        self.stored_by = stored_by_all(self.joins)
        self.slot_bytes = BlobFormat(bytes(DIGEST_BYTES), geometry).blob_bytes

    def describe(self) -> SessionFigures:
        """Figures for ``stat``."""
        return SessionFigures(
            engine=self.name,
            namespace=self.namespace.digest.hex() if self.namespace else None,
            workers=len(self.members),
            pinned_bytes=sum(member.pinned.size_bytes for member in self.members.values() if member.is_mapped),
            pinning_s=sum(member.pinned.seconds for member in self.members.values()),
            declined=len(self.decliners),
            state="lost" if self.is_lost else "ready" if self.is_ready else "joining",
        )

    def is_drained(self, session: int) -> bool:
        """Whether the scheduler holds no slot and no lookup of a session any more, and knows of all rows' ends.

        Asked at each release behind a reset: what is of the session from before it comes first in both.
        """
        if self.granted[session] or any(owner == session for owner, _ in self.by_engine):
            return False
        return all(use.session != session for use in self.row_uses.values())


class Sessions:
    """All groups of a server.

    Threads: the server's loop only.
    """

    def __init__(self, engine: Engine, epochs: Epochs, pinning: Pinning) -> None:
        self._engine = engine
        self.pinning = pinning
        self.users = UserSessions(engine, pinning.keeps)
        self.prefetching = Prefetching(engine, self._has_session)
        self._epochs = epochs
        self._quotas = ServerQuotas(engine)
        self._groups: dict[tuple[str, int], Group] = {}
        self._by_session: dict[int, Group] = {}

    @property
    def groups(self) -> list[Group]:
        return list(self._groups.values())

    def _has_session(self, session: int) -> bool:
        group = self._by_session.get(session)
        return group is not None and not group.is_lost

    def owner(self, session: int) -> Group | None:
        """The group of an engine session."""
        return self._by_session.get(session)

    def scheduler_of(self, member: Connection) -> Connection | None:
        """The scheduler of the group that a connection is in, if there is one."""
        group = self._groups.get((member.engine_id, member.generation))
        return None if group is None else group.scheduler

    # -- joining -----------------------------------------------------------------------------------------------

    def join_worker(self, connection: Connection, join: m.JoinWorker) -> None:
        """Take in a worker's geometry.

        Raises:
            ConfigError: No cache can be made of it, or it does not fit the other members.
            ProtocolError: The rank is taken or out of range, or the connection has joined already.
            TierUnavailable: The session of this generation was lost.
        """
        if connection.has_joined:
            raise ProtocolError("a connection joins once")
        check_join(join)
        group = self._find(connection)
        if join.rank in group.members:
            other = group.members[join.rank].connection
            raise ProtocolError(
                f"rank {join.rank} of engine {group.name} has joined already, as pid {other.pid}: two engines must not "
                "share an engine id"
            )
        if group.scheduler is not None and join.world_size != group.world_size:
            raise ConfigError(other_world(group, join.world_size))
        for member in group.members.values():
            check_same_engine(join, member.join)
        group.members[join.rank] = GroupWorker(connection, join)
        self._keep(group, connection)
        self._keep_memory()  # before this worker is sent the slabs

    def decline(self, connection: Connection, decline: m.Decline) -> None:
        """A worker cannot take part: the session will never open.

        Raises:
            ProtocolError: The connection has joined already.
            TierUnavailable: The session of this generation was lost.
        """
        if connection.has_joined:
            raise ProtocolError("a connection joins once")
        group = self._find(connection)
        group.declined = decline.reason
        group.decliners.add(connection)
        self._keep(group, connection)

    def join_scheduler(self, connection: Connection, join: m.JoinScheduler) -> None:
        """Take in a scheduler.

        Raises:
            ConfigError: Its workers were told another world size.
            ProtocolError: The engine has one in this generation, or the world size is out of range.
            TierUnavailable: The session of this generation was lost.
        """
        group = self._find(connection)
        if group.scheduler is not None:
            raise ProtocolError(
                f"engine {group.name} has a scheduler already, pid {group.scheduler.pid}: two engines must not share "
                "an engine id"
            )
        quota = check_scheduler(join)
        for member in group.members.values():
            if member.join.world_size != join.world_size:
                group.world_size = join.world_size
                raise ConfigError(other_world(group, member.join.world_size))
        group.scheduler, group.world_size, group.private_epoch = connection, join.world_size, join.epoch
        group.is_watching, group.quota, group.lease_s = join.is_watching, quota, join.lease_s
        group.rejoins = join.rejoins
        self._keep(group, connection)

    def _find(self, connection: Connection) -> Group:
        key = (connection.engine_id, connection.generation)
        group = self._groups.get(key) or Group(*key)
        if group.is_lost:
            raise TierUnavailable(f"session {group.name} was lost; join with the next generation")
        return group

    def _keep(self, group: Group, connection: Connection) -> None:
        connection.has_joined = True
        self._groups[group.engine_id, group.generation] = group

    def open_complete(self) -> None:
        """Open every session whose members are all in, and end those that a session of now would be better than."""
        self._epochs.turn()
        self._end_alone()
        self._quotas.turn()
        for group in self.groups:
            if group.scheduler is None or group.is_ready or group.is_lost:
                continue
            try:
                if group.declined:
                    raise ConfigError(group.declined)
                if not group.sessions and len(group.members) == group.world_size:
                    self._open(group)
                self._tell_ready(group)
            except (ConfigError, ValueError) as exc:
                logger.warning("session refused. engine=%s reason=%s", group.name, exc)
                self._refuse(group, "config", str(exc))
            except TierUnavailable as exc:
                logger.warning("session over: its reset is not durable. engine=%s reason=%s", group.name, exc)
                self._refuse(group, "unavailable", str(exc))
            except (ProtocolError, OSError) as exc:
                self._lose(group, f"client lost while the session opened: {exc}")

    def _end_alone(self) -> None:
        """End sessions that opened while the bucket did not answer, once it does: their engines' next ones share."""
        alone: dict[bytes, list[Group]] = {}
        for group in self._groups.values():
            if group.is_alone and group.is_ready and group.rejoins and not group.is_lost:
                alone.setdefault(group.base_digest, []).append(group)
        for digest, groups in alone.items():
            if self._epochs.is_back(digest):
                for group in groups:
                    self._lose(group, "it shared nothing, and the bucket answers again: the engine's next one shares")

    def _refuse(self, group: Group, kind: str, reason: str) -> None:
        assert group.scheduler is not None
        try:
            group.scheduler.send(m.Refused(kind, reason))
        except (ProtocolError, OSError):
            logger.debug("the refused scheduler is gone. engine=%s", group.name)
        self._lose(group, "refused")

    def _open(self, group: Group) -> None:
        group.set_geometry()
        base = namespace_of(group.joins, epoch="")
        group.base_digest = base.digest
        epoch = group.private_epoch or self._epochs.base(base.digest)
        if epoch is not None:
            namespace = namespace_of(group.joins, epoch)
            group.is_alone = self._epochs.is_own(epoch)
            self._quotas.check(namespace.digest, group.quota, group.slot_bytes)
            self._start(group, namespace)

    def _start(self, group: Group, namespace: Namespace) -> None:
        assert group.geometry is not None
        session, _ = self._engine.open_session(namespace, group.geometry, group.stored_by, group.lease_s)
        self._quotas.opened(session, namespace.digest, group.quota, group.slot_bytes)
        self._engine.rest(session)  # until its scheduler, which may be idle and deaf, says that it wants slots
        group.sessions.append(session)
        group.granted[session] = set()
        if group.lent is not None:
            self._engine.take_rows(session, group.lent)
        group.namespace = namespace
        group.is_ready = False
        self._by_session[session] = group
        if group.is_watching:
            self._engine.watch(session, namespace.digest)

    def _tell_ready(self, group: Group) -> None:
        """Say ``Ready`` once the session's first slots have memory: before that a promotion would find no slot.

        Raises:
            TierUnavailable: The reset that this session comes from is not durable; it must not go on.
        """
        namespace = group.namespace
        if namespace is None or group.geometry is None or group.scheduler is None:
            return
        self._epochs.check(str(namespace.fields["epoch"]))
        blob_format = self._engine.format_of(namespace.digest)
        has_epoch = self._epochs.is_settled(group.base_digest)
        if blob_format is None or not has_epoch or not self._engine.has_memory(blob_format.blob_bytes):
            return
        group.is_ready = True
        group.scheduler.send(ready_message(self._engine, group, blob_format))
        logger.info(
            "session open. engine=%s namespace=%s chunk_bytes=%d",
            group.name,
            namespace.digest.hex(),
            blob_format.blob_bytes,
        )

    def reset(self, connection: Connection) -> None:
        """The engine's KV is invalid: retire the base epoch and move the engine to a private one.

        The engine hears ``Ready`` when the retirement is durable (``_tell_ready``).

        Raises:
            ProtocolError: The connection has no open session.
        """
        group = self.owned(connection)
        epoch = self._epochs.retire(group.base_digest)
        group.is_alone = False  # the private one is what this engine keeps, whatever the bucket says
        old = group.sessions[-1]
        self._engine.suspend_session(old)
        self._quotas.closed(old, is_reset=True)  # before the next one states the same again
        self._start(group, namespace_of(group.joins, epoch))
        self._close_drained(group)

    def _close_drained(self, group: Group) -> None:
        """End the sessions from before a reset whose slots and leases are all back."""
        for session in [s for s in group.sessions[:-1] if group.is_drained(s)]:
            self._engine.close_session(session)
            group.sessions.remove(session)
            del group.granted[session], self._by_session[session]

    def _take_back(self, group: Group, session: int, slot: SlotId) -> None:
        group.granted[session].discard(slot)
        self._engine.give_back(session, slot)

    # -- work --------------------------------------------------------------------------------------------------

    def lookup(self, connection: Connection, lookup: m.Lookup) -> None:
        """Start a lookup.

        Raises:
            ProtocolError: Lengths do not match, or the id is in use.
        """
        group = self.owned(connection)
        assert group.namespace is not None
        keys, digests = keys_of(lookup, group.namespace)
        if lookup.lookup in group.lookups:
            raise ProtocolError(f"bad lookup. id={lookup.lookup} is in use")
        if len(group.lookups) >= LOOKUPS_MAX:
            raise ProtocolError(f"too many lookups at once. max={LOOKUPS_MAX}")
        session = group.sessions[-1]
        self.users.goes_on(lookup.session)
        wish = LookupRequest(
            keys,
            digests,
            lookup.start,
            lookup.turn,
            is_claimed=lookup.is_claimed,
            state_parts=lookup.state_parts,
            owner=lookup.session,
            may_search=lookup.may_search,
            wants_tails=lookup.wants_tails,
            hint=lookup.hint,
            leases=lookup.leases,
            counted=lookup.counted,
            load=lookup.load,
            is_followed=lookup.is_followed,
        )
        engine_id = self._engine.lookup(session, wish)
        group.lookups[lookup.lookup] = (session, engine_id)
        group.by_engine[session, engine_id] = GroupLookup(lookup.lookup, is_question=not lookup.leases)

    def claim(self, connection: Connection, claim: m.Claim) -> None:
        """A load begins; the leases of an unknown id have ended."""
        found = self.owned(connection).lookups.get(claim.lookup)
        if found is not None:
            self._engine.claim(*found)

    def follow(self, connection: Connection, follow: m.Follow) -> None:
        """Tell how much of a lookup is ready, and of parts from now on; the end of an unknown id was told."""
        found = self.owned(connection).lookups.get(follow.lookup)
        if found is not None:
            self._engine.follow(*found)

    def release(self, connection: Connection, release: m.Release) -> None:
        """End a lookup; an unknown id was released before."""
        group = self.owned(connection)
        found = group.lookups.get(release.lookup)
        if found is not None:
            self._release(group, found, is_asked_anew=release.is_asked_anew)

    def _release(self, group: Group, engine_id: tuple[int, int], *, is_asked_anew: bool = False) -> None:
        lookup = group.by_engine.pop(engine_id, None)
        if lookup is not None:
            del group.lookups[lookup.client_id]
            self._engine.release(*engine_id, is_asked_anew=is_asked_anew)
            self._close_drained(group)

    def end_leases(self) -> bool:
        """Release lookups whose end is in their schedulers' sockets, for ``END_S``; says whether there were any.

        Not a moment earlier: a scheduler that reads its socket to the end must find it there before anybody can have
        written into a slot that it still copies from. One that does not read keeps its slots, within its share.
        """
        has_ended = False
        until_s = self._engine.clock.monotonic() + END_S
        for group in self.groups:
            if group.is_lost or group.scheduler is None or group.scheduler.wants_write:
                continue
            while group.ending:
                self._release(group, group.ending.popleft(), is_asked_anew=True)
                has_ended = True
                if self._engine.clock.monotonic() >= until_s:
                    break
        return has_ended

    def commit(self, connection: Connection, commit: m.Commit) -> Iterator[None]:
        """Take filled slots in, in steps. What its scheduler says next comes after the last of them.

        Raises:
            ProtocolError: A slot was not granted to this engine, or a record is none of its chunks.
        """
        group = self.owned(connection)
        session = group.sessions[-1]
        parents = {record.parent for _, record in commit.chunks}
        for number, (slot, record) in enumerate(commit.chunks):
            if number and not number % COMMITTED_AT_ONCE:
                yield
            try:
                made = checked_record(group, record)
                self._engine.commit(session, slot, made, is_answer=slot in commit.answers)
            except KeyError as exc:
                raise ProtocolError(f"slot {slot} was not granted to engine {group.name}") from exc
            group.granted[session].discard(slot)
        for _, record in commit.chunks:
            if record.key not in parents:
                self._engine.touch_prefix(record.key)

    def commit_tail(self, connection: Connection, commit: m.CommitTail) -> None:
        """Take in a slot that was filled with a tail.

        Raises:
            ProtocolError: The slot was not granted to this engine, or the record is no tail of its chunks.
        """
        group = self.owned(connection)
        session = group.sessions[-1]
        chunk_tokens = 0 if group.geometry is None else group.geometry.chunk_tokens
        tokens = tail_tokens(commit.record.key)
        if not 0 < tokens < chunk_tokens or not commit.record.chunk_index:
            raise ProtocolError(
                "a committed tail is none. "
                f"tokens={tokens} chunk_tokens={chunk_tokens} chunk_index={commit.record.chunk_index}"
            )
        try:
            self._engine.commit_tail(session, commit.slot, checked_record(group, commit.record))
        except KeyError as exc:
            raise ProtocolError(f"slot {commit.slot} was not granted to engine {group.name}") from exc
        group.granted[session].discard(commit.slot)

    def drop_tails(self, connection: Connection, drop: m.DropTails) -> None:
        """Remove tails that something committed continues; unknown ones are gone already."""
        self._engine.drop_tails(self.owned(connection).sessions[-1], drop.keys)

    def lend_rows(self, connection: Connection, lend: m.LendRows) -> None:
        """Take an engine's rows on loan; says why not where that cannot be.

        Raises:
            ProtocolError: No worker that is alone sends this, or not once, or without descriptors.
            TierUnavailable: This process has no room for the descriptors.
        """
        fds = connection.take_descriptors()
        try:
            if len(fds) < 2 and connection.lacks_descriptors:
                raise TierUnavailable(
                    "the server has no descriptor left for an engine's rows: raise its limit (ulimit -n)"
                )
            group, member = self._groups.get((connection.engine_id, connection.generation)), self._member(connection)
            if group is None or member is None or group.is_lost or group.lent is not None or len(fds) != 2:
                raise ProtocolError(f"rows are lent once, by a worker that has joined. descriptors={len(fds)}")
            refusal = self._engine.takes_rows() or loan_problem(member.join, lend)
            if not refusal:
                (region_fd, lifeline_fd), fds = fds, []
                try:
                    group.lent = LentRows(region_fd, lifeline_fd, lend.rows, lend.row_bytes)
                except ConfigError as exc:
                    refusal = str(exc)
            if group.lent is not None:
                for session in group.sessions:
                    self._engine.take_rows(session, group.lent)
        finally:
            for fd in fds:
                os.close(fd)
        logger.info(
            "rows lent. engine=%s rows=%d row_bytes=%d refusal=%s", group.name, lend.rows, lend.row_bytes, refusal
        )
        connection.send(m.RowsTaken(refusal))

    def store_rows(self, connection: Connection, store: m.StoreRows) -> Iterator[None]:
        """Write lent rows to the disk, in steps.

        Raises:
            ProtocolError: There is no open session on the connection, it lent no such rows, or a record is none of its.
        """
        group = self.owned(connection)
        session = group.sessions[-1]
        parents = {record.parent for _, _, record in store.rows}
        for first in range(0, len(store.rows), COMMITTED_AT_ONCE):
            if first:
                yield
            part = store.rows[first : first + COMMITTED_AT_ONCE]
            rows = [(self._use(group, use, row), checked_record(group, record)) for use, row, record in part]
            self._engine.store_rows(session, rows)
        for _, _, record in store.rows:
            if record.key not in parents:
                self._engine.touch_prefix(record.key)

    def load_rows(self, connection: Connection, load: m.LoadRows) -> Iterator[None]:
        """Read chunks into lent rows, in steps.

        Raises:
            ProtocolError: There is no open session on the connection, or it lent no such rows.
        """
        group = self.owned(connection)
        space = self.space_of(connection)
        self.users.goes_on(load.session)
        session = group.sessions[-1]
        for first in range(0, len(load.rows), COMMITTED_AT_ONCE):
            if first:
                yield
            rows = [
                (self._use(group, use, row, load.load), row_key(space, name), row_digest(space, name))
                for use, row, name in load.rows[first : first + COMMITTED_AT_ONCE]
            ]
            self._engine.load_rows(session, rows, load.session)

    def load_ended(self, connection: Connection, ended: m.LoadEnded) -> None:
        """Count a load; one of which nothing was looked up or read is ignored.

        Raises:
            ProtocolError: There is no open session on the connection.
        """
        for session in self.owned(connection).sessions:  # it may have begun before a reset
            self._engine.load_ended(session, ended.load)

    def take_rows_back(self, connection: Connection, back: m.TakeRowsBack) -> Iterator[None]:
        """End uses of lent rows, in steps: those behind first, or they would be dropped with the first one.

        Raises:
            ProtocolError: There is no open session on the connection.
        """
        group = self.owned(connection)
        for end in range(len(back.uses), 0, -TAKEN_BACK_AT_ONCE):
            if end < len(back.uses):
                yield
            part = back.uses[max(0, end - TAKEN_BACK_AT_ONCE) : end]
            uses = [group.row_uses[use] for use in part if use in group.row_uses]
            for session in group.sessions:
                self._engine.end_rows(session, [use for use in uses if use.session == session])

    @staticmethod
    def _use(group: Group, number: int, row: int, load: int = 0) -> RowUse:
        if group.lent is None or row >= group.lent.rows or number in group.row_uses:
            raise ProtocolError(f"no such row was lent, or a use is numbered as another. use={number} row={row}")
        if len(group.row_uses) >= m.ROW_USES_MAX:
            raise ProtocolError(f"too many uses of lent rows at once. max={m.ROW_USES_MAX}")
        use = group.row_uses[number] = RowUse(group.sessions[-1], number, row, load)
        return use

    def give_back(self, connection: Connection, give_back: m.GiveBack) -> None:
        """Take unused slots back, also of sessions before a reset.

        Raises:
            ProtocolError: A slot was not granted to this engine.
        """
        group = self.owned(connection)
        for slot in give_back.slots:
            session = next((s for s in group.sessions if slot in group.granted[s]), None)
            if session is None:
                raise ProtocolError(f"slot {slot} was not granted to engine {group.name}")
            self._take_back(group, session, slot)
        self._close_drained(group)

    def rest(self, connection: Connection) -> None:
        """Take back the slots of the current session, and grant it none until it wakes.

        Raises:
            ProtocolError: There is no open session on the connection.
        """
        group = self.owned(connection)
        session = group.sessions[-1]
        self._engine.rest(session)
        group.granted[session].clear()
        connection.send(m.Rested())

    def wake(self, connection: Connection) -> None:
        """Grant the session slots from now on.

        Raises:
            ProtocolError: There is no open session on the connection, or it has not heard ``Ready``.
        """
        group = self.owned(connection)
        if not group.is_ready:
            raise ProtocolError("a session wakes once it has heard Ready")
        self._engine.wake(group.sessions[-1])

    def pin(self, connection: Connection, pin: m.Pin) -> None:
        """Keep a chunk and the prefix before it, if there is room for that.

        Raises:
            ProtocolError: There is no open session on the connection, or the pin is none.
        """
        self.pinning.pin(self.space_of(connection).digest, pin)

    def session_state(self, connection: Connection, state: m.SessionState) -> None:
        """A request of a user's session is over.

        Raises:
            ProtocolError: There is no open session on the connection, or the state is none.
        """
        self.users.told(self.space_of(connection).digest, state)

    def space_of(self, connection: Connection) -> Namespace:
        """The namespace of the open session whose scheduler this is.

        Raises:
            ProtocolError: There is none.
        """
        namespace = self.owned(connection).namespace
        assert namespace is not None, "an open session without a namespace"
        return namespace

    def open_spaces(self) -> dict[bytes, tuple[Namespace, int]]:
        """Namespaces that engines serve now, by their digests, each with a session of the engine for it."""
        ready = [group for group in self.groups if group.is_ready and not group.is_lost]
        return {group.namespace.digest: (group.namespace, group.sessions[-1]) for group in ready if group.namespace}

    def owned(self, connection: Connection) -> Group:
        """The group whose scheduler this is, with an open session.

        Raises:
            ProtocolError: There is none.
        """
        group = self._groups.get((connection.engine_id, connection.generation))
        if group is None or group.scheduler is not connection or not group.sessions or group.is_lost:
            raise ProtocolError("no open session on this connection; join as a scheduler and wait for Ready")
        return group

    def tell(self, update: Update) -> None:
        """Pass an update of the engine on to its session.

        Raises:
            ProtocolError, ConnectionError: The session's client is lost.
        """
        group = self._by_session.get(update.session)
        if self.prefetching.take(update) or group is None or group.scheduler is None or group.is_lost:
            return
        current = group.sessions[-1]
        match update:
            case SlotGrant(session, slots):
                group.granted[session].update(slots)
                if session != current:  # granted just before a reset: the scheduler never hears of them
                    for slot in slots:
                        self._take_back(group, session, slot)
                    self._close_drained(group)
                else:
                    group.scheduler.send(m.Credits(list(slots)))
            case SlotRecall(session, slots) if session == current and group.is_ready:
                group.scheduler.send(m.Recall(list(slots)))
            case RowsEnded(_, good, bad, elsewhere):
                for number in (*good, *bad, *elsewhere):
                    group.row_uses.pop(number, None)
                group.scheduler.send(m.RowsEnded(list(good), list(bad), list(elsewhere)))
                self._close_drained(group)
            case LookupUpdate(session, lookup, answer) if (session, lookup) in group.by_engine:
                told = group.by_engine[session, lookup]
                tell_lookup(self._engine, group, told, answer)
                if answer.is_done and told.is_question:
                    self._release(group, (session, lookup))  # its client does not say so
            case LeaseEnd(session, lookup) | LoadDamaged(session, lookup) if (session, lookup) in group.by_engine:
                if isinstance(update, LeaseEnd):
                    group.ending.append((session, lookup))
                group.scheduler.send(m.Ended(group.by_engine[session, lookup].client_id))
            case TierEvents(session) if session == current and group.is_ready:
                group.lacks_moves = tell_moves(group.scheduler, update, lacks_some=group.lacks_moves)

    # -- leaving -----------------------------------------------------------------------------------------------

    def unmapped(self, connection: Connection) -> None:
        """A worker has unmapped the arena.

        Raises:
            ProtocolError: It is no member of a session.
        """
        if not self._leave(connection, "unmapped the arena"):
            raise ProtocolError("this client maps no arena")

    def pinned(self, connection: Connection, pinned: m.Pinned) -> None:
        """A worker has pinned more of the arena, or could not.

        Raises:
            ProtocolError: It is no member of a session, or it said that it pins nothing.
        """
        member = self._member(connection)
        if member is None or not member.join.pins:
            raise ProtocolError("this client pins no arena")
        member.pinned = pinned

    def _member(self, connection: Connection) -> GroupWorker | None:
        group = self._groups.get((connection.engine_id, connection.generation))
        members = group.members.values() if group is not None else ()
        return next((one for one in members if one.connection is connection), None)

    def awaits_exit(self, connection: Connection) -> bool:
        """Whether something is held until this client's process exits."""
        group = self._groups.get((connection.engine_id, connection.generation))
        if group is None:
            return False
        mapped = (member.connection for member in group.members.values() if member.is_mapped)
        return connection in group.decliners or connection in mapped

    def exited(self, connection: Connection) -> None:
        """A worker's process has exited, so it maps nothing any more."""
        group = self._groups.get((connection.engine_id, connection.generation))
        if group is not None and connection in group.decliners:
            group.decliners.discard(connection)
            if group.is_empty:
                del self._groups[group.engine_id, group.generation]
        self._leave(connection, "exited")

    def _leave(self, connection: Connection, how: str) -> bool:
        group = self._groups.get((connection.engine_id, connection.generation))
        member = self._member(connection)
        if group is None or member is None:
            return False
        member.is_mapped = False
        self._lose(group, f"worker pid {connection.pid} {how}")
        self._keep_memory()
        return True

    def _keep_memory(self) -> None:
        """Slabs keep their pages while a process that pins them may have them mapped, also of a lost session."""
        members = (member for group in self.groups for member in group.members.values())
        self._engine.keep_memory(is_kept=any(member.is_mapped and member.join.pins for member in members))

    def disconnected(self, connection: Connection) -> None:
        """A member's connection is gone, and with it the session."""
        group = self._groups.get((connection.engine_id, connection.generation))
        if group is None:
            return
        members = [member.connection for member in group.members.values()]
        if connection is group.scheduler or connection in members:
            who = "scheduler" if connection is group.scheduler else "worker"
            self._lose(group, f"{who} pid {connection.pid} disconnected")

    def _lose(self, group: Group, reason: str) -> None:
        if not group.is_lost:
            group.is_lost = True
            logger.info("session over. engine=%s reason=%s", group.name, reason)
            for session in group.sessions:
                self._engine.suspend_session(session)
            if group.lent is not None:
                group.lent.close()
            if group.base_digest and not group.sessions:
                self._epochs.forget(group.base_digest)  # the next one must not open with what this one was told
            if group.scheduler is not None:
                group.scheduler.close_soon()  # tells it; workers stay until they say that they unmapped
        if any(member.is_mapped for member in group.members.values()):
            return
        for session in group.sessions:
            self._engine.close_session(session)
            self._quotas.closed(session)
            del self._by_session[session]
        del self._groups[group.engine_id, group.generation]


def checked_record(group: Group, record: ChunkRecord) -> ChunkRecord:
    """A committed chunk's record, complete with who stored it.

    It shares the namespace, the tag and the line with all others: the index keeps a million of them.

    Raises:
        ProtocolError: It is no chunk of the group's namespace.
    """
    assert group.namespace is not None
    namespace = group.namespace.digest
    if record.namespace != namespace:
        raise ProtocolError(f"a committed chunk is of another namespace. observed={record.namespace.hex()}")
    if (record.parent == namespace) != (record.chunk_index == 0):
        raise ProtocolError(f"a committed chunk is not where its parent says. chunk_index={record.chunk_index}")
    try:
        line = shared_line(record.stored_by) or group.stored_by
    except ValueError as exc:
        raise ProtocolError(f"a committed chunk does not say in a known way who stored it: {exc}") from exc
    return msgspec.structs.replace(record, namespace=namespace, tag=shared_tag(record.tag), stored_by=line)


def keys_of(lookup: m.Lookup, namespace: Namespace) -> tuple[list[bytes], list[bytes]]:
    """A lookup's keys and digests; where it brings names of rows, those of the namespace.

    Raises:
        ProtocolError: Their lengths do not match, or the lookup starts behind them.
    """
    count, rest = divmod(len(lookup.keys), KEY_BYTES)
    is_twice = bool(count and lookup.names)
    if rest or is_twice or len(lookup.digests) != count * PREFIX_DIGEST_BYTES:
        raise ProtocolError(
            f"bad lookup. id={lookup.lookup} keys={len(lookup.keys)} digests={len(lookup.digests)} "
            f"names={len(lookup.names)}"
        )
    if not 0 <= lookup.start <= count + len(lookup.names):
        raise ProtocolError(f"bad lookup. id={lookup.lookup} start={lookup.start} chunks={count + len(lookup.names)}")
    if names := lookup.names:
        return [row_key(namespace, name) for name in names], [row_digest(namespace, name) for name in names]
    keys = [lookup.keys[i : i + KEY_BYTES] for i in range(0, len(lookup.keys), KEY_BYTES)]
    digests = [lookup.digests[i : i + PREFIX_DIGEST_BYTES] for i in range(0, len(lookup.digests), PREFIX_DIGEST_BYTES)]
    return keys, digests


def loan_problem(join: m.JoinWorker, lend: m.LendRows) -> str:
    """Why rows of this engine are no blobs' payloads; empty: they are."""
    chunk_bytes = geometry_of([join]).data_bytes
    if join.world_size != 1 or chunk_bytes != lend.row_bytes:
        return f"a chunk is not a whole row. row_bytes={lend.row_bytes} chunk_bytes={chunk_bytes}"
    return ""


def other_world(group: Group, workers_say: int) -> str:
    """Why a scheduler and its workers cannot form a session."""
    return (
        f"scheduler and workers of engine {group.name} disagree on world_size: the scheduler has {group.world_size}, "
        f"a worker has {workers_say}"
    )


def ready_message(engine: Engine, group: Group, blob_format: BlobFormat) -> m.Ready:
    """The session is open."""
    assert group.namespace is not None
    return m.Ready(
        record=group.namespace.record,
        slot_bytes=blob_format.blob_bytes,
        payload_offset=blob_format.header_bytes,
        rank_offsets=group.rank_offsets,
        chunks_leased_max=engine.chunks_leased_max(group.namespace.digest),
        tiers=[HOST_NAME, *(tier.traits.name for tier in engine.tiers.values())],
        host_bytes=engine.host_bytes,
    )


def tell_lookup(engine: Engine, group: Group, lookup: GroupLookup, untimed: LookupAnswer) -> None:
    """Pass on what is known of a lookup now.

    Raises:
        ProtocolError, ConnectionError: The session's client is lost.
    """
    assert group.namespace is not None and group.scheduler is not None
    answer = engine.timed(group.namespace.digest, untimed)
    told, lookup.told = lookup.told, answer
    progress = m.Progressed(lookup.client_id, answer.ready, answer.is_done, answer.arriving)
    is_progress = told is not None and progress.after(told) == answer
    group.scheduler.send(progress if is_progress else m.Updated(lookup.client_id, answer))


def tell_moves(connection: Connection, moves: TierEvents, *, lacks_some: bool) -> bool:
    """Pass on which chunks came into a tier or left it; says whether the client lacks some, as it is slow to read.

    It hears that it lacks some at once, and again when it has caught up: it may have learnt of others meanwhile.

    Args:
        moves: Without keys: some were lost before.

    Raises:
        ProtocolError, ConnectionError: The session's client is lost.
    """
    for start in range(0, len(moves.keys) or 1, KEYS_MAX):
        keys = moves.keys[start : start + KEYS_MAX]
        is_slow = connection.outbox_bytes > MOVES_OUTBOX_MAX
        if is_slow != lacks_some or not (keys or is_slow):
            connection.send(m.MOVES_LOST)
        lacks_some = is_slow
        if is_slow:
            logger.debug("moves not told, the client is slow. pid=%d chunks=%d", connection.pid, len(keys))
            break
        if keys:
            connection.send(m.Moved(moves.tier, moves.is_here, b"".join(keys)))
    return lacks_some
