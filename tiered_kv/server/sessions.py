"""Sessions: one engine's scheduler and workers, joined into one owner of leases and slots.

Workers come before their scheduler, each with its part of the geometry; when all are in, the namespace is known and
the session opens. The scheduler client alone owns leases and reservations (DESIGN rule 1). When it is lost, its slots
stay quarantined until every worker that mapped the arena has unmapped it or has exited: it may still be copying.
"""

from __future__ import annotations

import logging

from tiered_kv.engine.engine import Engine
from tiered_kv.errors import ConfigError, ProtocolError, TierUnavailable
from tiered_kv.hierarchy.plan import CreditGrant, CreditRecall, LeaseEnd, LookupUpdate, Moves, SlotId, Update
from tiered_kv.keys.namespace import Namespace
from tiered_kv.server import messages as m
from tiered_kv.server.connection import Connection
from tiered_kv.server.epochs import Epochs
from tiered_kv.server.groups import (
    Group,
    Member,
    check_join,
    check_same_engine,
    check_scheduler,
    chunk_record,
    keys_of,
    namespace_of,
    other_world,
)
from tiered_kv.server.pinning import Pinning
from tiered_kv.server.shared_epochs import SharedEpochs
from tiered_kv.server.shares import ServerShares
from tiered_kv.server.telling import ready_message, tell_lookup, tell_moves

logger = logging.getLogger(__name__)

LOOKUPS_MAX = 1 << 18
"""Of one engine at once: one per waiting request."""


class Sessions:
    """All groups of a server.

    Threads: the server's loop only.
    """

    def __init__(self, engine: Engine, epochs: Epochs | SharedEpochs, pinning: Pinning) -> None:
        self._engine = engine
        self.pinning = pinning
        self._epochs = epochs
        self._shares = ServerShares(engine)
        self._groups: dict[tuple[str, int], Group] = {}
        self._by_session: dict[int, Group] = {}

    @property
    def groups(self) -> list[Group]:
        return list(self._groups.values())

    def owner(self, session: int) -> Group | None:
        """The group of an engine session."""
        return self._by_session.get(session)

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
        group.members[join.rank] = Member(connection, join)
        self._keep(group, connection)

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
        share = check_scheduler(join)
        for member in group.members.values():
            if member.join.world_size != join.world_size:
                group.world_size = join.world_size
                raise ConfigError(other_world(group, member.join.world_size))
        group.scheduler, group.world_size, group.private_epoch = connection, join.world_size, join.epoch
        group.is_watching, group.share, group.lease_s = join.is_watching, share, join.lease_s
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
        """Open every session whose members are all in."""
        self._epochs.turn()
        self._shares.turn()
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
            self._shares.check(namespace.digest, group.share, group.slot_bytes)
            self._start(group, namespace)

    def _start(self, group: Group, namespace: Namespace) -> None:
        assert group.geometry is not None
        session, _ = self._engine.open_session(namespace, group.geometry, group.stored_by, group.lease_s)
        self._shares.opened(session, namespace.digest, group.share, group.slot_bytes)
        group.sessions.append(session)
        group.granted[session] = set()
        group.namespace = namespace
        group.is_ready = False
        self._by_session[session] = group
        if group.is_watching:
            self._engine.hierarchy.index.flows.watch(session, namespace.digest)

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
        has_epoch = self._epochs.is_told(group.base_digest)
        if blob_format is None or not has_epoch or not self._engine.has_memory(blob_format.blob_bytes):
            return
        group.is_ready = True
        group.scheduler.send(ready_message(self._engine, group, blob_format))
        if group.early_credits:
            group.scheduler.send(m.Credits(group.early_credits))
            group.early_credits = []
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
        old, untold, group.early_credits = group.sessions[-1], group.early_credits, []
        self._engine.hierarchy.suspend_session(old)
        self._shares.closed(old, is_reset=True)  # before the next one states the same again
        self._start(group, namespace_of(group.joins, epoch))
        for slot in untold:
            self._take_back(group, old, slot)
        self._close_drained(group)

    def _close_drained(self, group: Group) -> None:
        """End the sessions from before a reset whose slots and leases are all back."""
        for session in [s for s in group.sessions[:-1] if group.is_drained(s)]:
            self._engine.hierarchy.close_session(session)
            group.sessions.remove(session)
            del group.granted[session], self._by_session[session]

    def _take_back(self, group: Group, session: int, slot: SlotId) -> None:
        group.granted[session].discard(slot)
        self._engine.hierarchy.give_back(session, slot)

    # -- work --------------------------------------------------------------------------------------------------

    def lookup(self, connection: Connection, lookup: m.Lookup) -> None:
        """Start a lookup.

        Raises:
            ProtocolError: Lengths do not match, or the id is in use.
        """
        group = self.owned(connection)
        keys, digests = keys_of(lookup)
        if lookup.lookup in group.lookups:
            raise ProtocolError(f"bad lookup. id={lookup.lookup} is in use")
        if len(group.lookups) >= LOOKUPS_MAX:
            raise ProtocolError(f"too many lookups at once. max={LOOKUPS_MAX}")
        session = group.sessions[-1]
        wanted = (keys, digests, lookup.start, lookup.turn)
        engine_id = self._engine.hierarchy.lookup(session, *wanted, is_claimed=lookup.is_claimed)
        group.lookups[lookup.lookup] = (session, engine_id)
        group.client_ids[session, engine_id] = lookup.lookup

    def claim(self, connection: Connection, claim: m.Claim) -> None:
        """A load begins; the leases of an unknown id have ended."""
        found = self.owned(connection).lookups.get(claim.lookup)
        if found is not None:
            self._engine.hierarchy.claim(*found)

    def release(self, connection: Connection, release: m.Release) -> None:
        """End a lookup; an unknown id was released before."""
        group = self.owned(connection)
        found = group.lookups.get(release.lookup)
        if found is not None:
            self._release(group, found, is_asked_anew=release.is_asked_anew)

    def _release(self, group: Group, lookup: tuple[int, int], *, is_asked_anew: bool = False) -> None:
        client_id = group.client_ids.pop(lookup, None)
        if client_id is not None:
            del group.lookups[client_id]
            self._engine.hierarchy.release(*lookup, is_asked_anew=is_asked_anew)
            self._close_drained(group)

    def end_leases(self) -> bool:
        """Release lookups whose end is in their schedulers' sockets; says whether there were any.

        Not a moment earlier: a scheduler that reads its socket to the end must find it there before anybody can have
        written into a slot that it still copies from. One that does not read keeps its slots, within its share.
        """
        has_ended = False
        for group in self.groups:
            if group.ending and not group.is_lost and group.scheduler is not None and not group.scheduler.wants_write:
                ending, group.ending = group.ending, []
                for lookup in ending:
                    self._release(group, lookup, is_asked_anew=True)
                has_ended = True
        return has_ended

    def commit(self, connection: Connection, commit: m.Commit) -> None:
        """Take filled slots in.

        Raises:
            ProtocolError: A slot was not granted to this engine, or a key is malformed.
        """
        group = self.owned(connection)
        hierarchy = self._engine.hierarchy
        session = group.sessions[-1]
        parents = {chunk.parent for chunk in commit.chunks}
        for chunk in commit.chunks:
            record = chunk_record(group, chunk)
            try:
                hierarchy.commit(session, chunk.slot, record)
            except KeyError as exc:
                raise ProtocolError(f"slot {chunk.slot} was not granted to engine {group.name}") from exc
            group.granted[session].discard(chunk.slot)
        for chunk in commit.chunks:
            if chunk.key not in parents:
                hierarchy.touch_prefix(chunk.key)

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
        if group is None or group.scheduler is None or group.is_lost:
            return
        current = group.sessions[-1]
        match update:
            case CreditGrant(session, slots):
                group.granted[session].update(slots)
                if session != current:  # granted just before a reset: the scheduler never hears of them
                    for slot in slots:
                        self._take_back(group, session, slot)
                    self._close_drained(group)
                elif group.is_ready:
                    group.scheduler.send(m.Credits(list(slots)))
                else:
                    group.early_credits.extend(slots)
            case CreditRecall(session, slots) if session == current and group.is_ready:
                group.scheduler.send(m.Recall(list(slots)))
            case LookupUpdate():
                tell_lookup(self._engine, group, update)
            case LeaseEnd(session, lookup) if (session, lookup) in group.client_ids:
                group.ending.append((session, lookup))
                group.scheduler.send(m.Ended(group.client_ids[session, lookup]))
            case Moves(session) if session == current and group.is_ready:
                tell_moves(group.scheduler, update)

    # -- leaving -----------------------------------------------------------------------------------------------

    def unmapped(self, connection: Connection) -> None:
        """A worker has unmapped the arena.

        Raises:
            ProtocolError: It is no member of a session.
        """
        if not self._leave(connection, "unmapped the arena"):
            raise ProtocolError("this client maps no arena")

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
        members = group.members.values() if group is not None else ()
        member = next((one for one in members if one.connection is connection), None)
        if group is None or member is None:
            return False
        member.is_mapped = False
        self._lose(group, f"worker pid {connection.pid} {how}")
        return True

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
                self._engine.hierarchy.suspend_session(session)
            if group.scheduler is not None:
                group.scheduler.close_soon()  # tells it; workers stay until they say that they unmapped
        if any(member.is_mapped for member in group.members.values()):
            return
        for session in group.sessions:
            self._engine.hierarchy.close_session(session)
            self._shares.closed(session)
            del self._by_session[session]
        del self._groups[group.engine_id, group.generation]
