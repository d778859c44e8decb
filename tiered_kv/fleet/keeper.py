"""Keeps a shared bucket within its limits: the one face of this package towards the object tier.

A keeper reports, follows the leader of the bucket or becomes it, and hands out what was granted. It has no thread:
``turn`` is called about once a second by one thread at a time, everything else by any thread and without I/O. A server
without limits of its own respects a leader if there is one. Why it is safe: docs/decisions/0007-bucket-capacity.md.

=====================  =====================================================
field                  who touches it
=====================  =====================================================
``_budget``           any thread (own lock)
``_uses``              any thread (own lock)
``_namespaces``        any thread, replaced as a whole under ``_serving``; the one served last at the end
``_usage``             written by ``turn``, read by any thread as a whole
everything else        ``turn`` and ``close``, under ``_turn_lock``
=====================  =====================================================
"""

import logging
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tiered_kv.errors import ChunkCorrupt, Closed, ConfigError, TierUnavailable
from tiered_kv.fleet.gc import GCStats
from tiered_kv.fleet.grants import GrantLedger
from tiered_kv.fleet.layout import NAMESPACES_MAX, SERVER_ID, USAGE, BucketUsage, Objects, decode, encode, fetch
from tiered_kv.fleet.leader import LeaderTerm
from tiered_kv.fleet.lease import BucketLimits, Lease, View
from tiered_kv.fleet.member import LocalBudget, Membership
from tiered_kv.fleet.recency import UseLog
from tiered_kv.fleet.timing import Timing
from tiered_kv.keys.naming import BlobName
from tiered_kv.machine import since_boot_s

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeeperConfig:
    """What the operator decides about a shared bucket.

    Attributes:
        storage_bytes: Most bytes below the root; None: unlimited.
        storage_ttl_s: Blobs unused for longer are deleted; None: never.
        is_single_writer: This server is the only one that writes; needed where the store cannot create atomically.
        evicts_other_namespaces: Also evict blobs of namespaces that no live server serves.
    """

    storage_bytes: int | None = None
    storage_ttl_s: float | None = None
    is_single_writer: bool = False
    evicts_other_namespaces: bool = False


class BucketKeeper:
    """One server's part in keeping a bucket within its limits.

    Threads: any; ``turn`` and ``close`` exclude each other.
    """

    def __init__(
        self,
        store: Objects,
        config: KeeperConfig,
        timing: Timing | None = None,
        clock: Callable[[], float] = since_boot_s,
        server_id: str | None = None,
    ) -> None:
        """Ask the store whether it can be led; nothing is written before the first ``turn``.

        Args:
            clock: Must go on while the machine is suspended: the others count this server for gone meanwhile.

        Raises:
            ConfigError: Limits are set, the store does not create atomically, and ``single_writer`` is not set.
        """
        self._store = store
        self._config = config
        self._timing = timing or Timing()
        self._clock = clock
        self.server_id = server_id or _new_server_id()
        if SERVER_ID.fullmatch(self.server_id) is None:
            raise ValueError(f"a server's id is made of letters, digits, - and _. observed={self.server_id}")
        self._limits = BucketLimits(config.storage_bytes, config.storage_ttl_s)
        self._may_lead = config.storage_bytes is not None or config.storage_ttl_s is not None
        self._budget = LocalBudget(self._timing, clock)
        self._uses = UseLog(store, self._timing, clock, self.server_id)
        self._lease = Lease(store, self._timing, clock, self.server_id)
        self._member = Membership(store, self._timing, self._budget, clock, self.server_id)
        self._namespaces: tuple[str, ...] = ()
        self._serving = threading.Lock()
        self._turn_lock = threading.Lock()
        self._is_closed = False
        self._is_capable = not self._may_lead or config.is_single_writer
        self._term_led: LeaderTerm | None = None
        self._was_overtaken = False
        self._leader_id = ""
        self._sweep = GCStats()
        self._usage = UsageObject(store, self._timing, clock, self._budget)
        self._watched_at = self._exchanged_at = float("-inf")
        self._ignored: View | None = None
        self._is_ignoring = False
        self._is_resting = False
        self._said: dict[str, float] = {}
        self._malformed_count = 0
        try:
            self._ask_whether_capable()
        except TierUnavailable as exc:
            self._say("the bucket cannot be reached yet: nothing is stored until it answers. cause=%s", exc)

    # -- any thread, no I/O -------------------------------------------------------------------------------------------

    def reserve(self, size_bytes: int) -> None:
        """Take bytes for a PUT that begins at once.

        Raises:
            CapacityExceeded: Nothing is granted at the moment, or not enough.
        """
        self._budget.reserve(size_bytes)

    def finished(self, size_bytes: int, stored: bool | None) -> None:
        """Tell how a reserved PUT ended; None: nobody knows, it may land for a while yet."""
        self._budget.finished(size_bytes, stored)

    def expect(self) -> None:
        """Puts will follow soon: a server at rest asks for a grant, which takes as long as a prompt to be computed."""
        self._budget.expect()

    def record_use(self, names: Iterable[BlobName]) -> None:
        """Note uses; written now and then. What is used is served: resets make namespaces that push others out."""
        known = list(names)
        self._uses.record(known)
        for namespace in {name.namespace for name in known}:
            self.serve(namespace)

    def forget(self, size_bytes: int) -> None:
        """Note that this server deleted a blob."""
        self._budget.forget(size_bytes)

    def serve(self, namespace: bytes) -> None:
        """This server serves a namespace from now on: its blobs may be evicted and expire."""
        digits = namespace.hex()
        with self._serving:
            if digits not in self._namespaces[-1:]:
                others = (one for one in self._namespaces if one != digits)
                self._namespaces = (*others, digits)[-NAMESPACES_MAX:]

    @property
    def capacity_bytes(self) -> int | None:
        """The limit this server is set to; None: unlimited."""
        return self._limits.capacity_bytes

    def usage(self) -> BucketUsage:
        """Last known use of the whole bucket and what this server changed since."""
        return self._usage.now()

    def figures(self) -> dict[str, int | float | str]:
        """What an operator wants to see."""
        role = "leader" if self._term_led else "follower" if self._member.term is not None else "alone"
        sweep = self._sweep
        return {
            "role": role,
            "is_resting": self._is_resting,
            "term": self._lease.term or self._member.term or 0,
            "leader": self._leader_id,
            "granted_bytes": self._budget.granted_bytes,
            "spent_bytes": self._budget.spent_bytes,
            "refused_puts": self._budget.refused_count,
            "used_bytes": self.usage().used_bytes,
            "evicted_blobs": sweep.evicted_blobs,
            "evicted_bytes": sweep.evicted_bytes,
            "expired_blobs": sweep.expired_blobs,
            "expired_bytes": sweep.expired_bytes,
            "holes_collected": sweep.holes_collected,
            "passes": sweep.passes,
            "last_pass_s": sweep.last_pass_s,
            "merged_logs": sweep.merged_logs,
            "dropped_uses": self._uses.dropped_count,
            "malformed": self._malformed_count + sweep.malformed_logs,
        }

    # -- the turn -----------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Do what is due. Blocks on the store; a failing store is logged and tried again the next time.

        Raises:
            Closed: After ``close``.
        """
        with self._turn_lock:
            if self._is_closed:
                raise Closed("this bucket keeper was closed")
            try:
                self._turn()
            except (TierUnavailable, ChunkCorrupt, ConfigError) as exc:
                self._say("keeping the bucket within its limits failed for now and goes on later. cause=%s", exc)

    def close(self) -> None:
        """Write what was used, give grants and lease up. Idempotent; a failing store only costs the others a wait.

        Uses of a bucket that nobody limits are not written: who would remove them again is the leader.
        """
        with self._turn_lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._budget.set_free(False)
            is_limited = self._may_lead or self._is_keeping()
            for step in (*((self._uses.flush,) if is_limited else ()), self._member.leave, self._resign):
                try:
                    step()
                except (TierUnavailable, ChunkCorrupt) as exc:
                    _log.warning("could not take leave of the bucket: the others wait for an expiry. cause=%s", exc)

    def _turn(self) -> None:
        if not self._is_capable:
            self._ask_whether_capable()
        self._is_resting = self._rests_idle()
        if self._is_resting:
            return
        if self._term_led is None:
            self._follow()
        if self._term_led is not None:
            self._lead(self._term_led)
        if self._uses.is_due() and self._is_keeping():
            self._uses.flush()
        if not self._is_ignoring:
            self._usage.refresh(self._term_led.ledger if self._term_led else None)

    def _rests_idle(self) -> bool:
        """Whether this server exchanges nothing for now, because nothing was stored or used here for a while.

        A follower leaves; its next PUT is refused and makes it begin a session. A leader stays the leader.
        """
        if self._budget.idle_s() < self._timing.rest_after_s or not self._uses.is_empty():
            return False
        if self._term_led is not None:
            return self._term_led.rests(self._member.session)
        if not self._may_lead and self._is_ignoring:
            return (
                False  # nobody limits the bucket, as far as is known: it looks once in ``watch_s`` whether that holds
            )
        self._member.leave()
        self._lease.forget()
        return True

    def _is_keeping(self) -> bool:
        return self._term_led is not None or self._member.term is not None

    def _ask_whether_capable(self) -> None:
        if not self._is_capable:
            if not self._store.creates_atomically():
                raise ConfigError(
                    "this store cannot create an object only if it is absent, so several servers cannot agree on who "
                    "enforces storage_bytes and storage_ttl: set single_writer if no other server writes to it, or "
                    "remove the limits"
                )
            self._is_capable = True

    # -- following ----------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        now = self._clock()
        if self._rests(now):
            return
        self._exchanged_at = now
        # Report, then look, then believe: what a report is answered counts only if no higher term existed after it.
        self._member.report(self._namespaces)
        view = self._lease.look()
        self._watched_at = self._clock()
        if self._may_take(view):
            self._take(view)
            return
        if view is None or (not self._may_lead and self._is_over(view)):
            self._ignore(view)
            return
        self._ignored, self._is_ignoring = None, False
        if view.content is None:
            self._malformed_count += bool(view.data)  # no data: a new term began between LIST and GET
            return
        self._note_leader(view.content.holder, BucketLimits(view.content.capacity_bytes, view.content.ttl_s))
        self._budget.set_free(view.content.capacity_bytes is None)
        self._member.follow(view.term, view.content, self._namespaces)

    def _rests(self, now: float) -> bool:
        if not self._may_lead and self._member.term is None and self._is_ignoring:
            return now - self._watched_at < self._timing.watch_s
        return now - self._exchanged_at < self._timing.heartbeat_s and not self._budget.is_hungry()

    def _is_over(self, view: View) -> bool:
        """Whether a server without limits may do as if there were no leader."""
        if self._ignored is not None and (self._ignored.term, self._ignored.data) == (view.term, view.data):
            return True
        closed = view.content is not None and view.content.is_closed
        return closed or view.unchanged_s >= 2 * self._timing.expiry_s

    def _ignore(self, view: View | None) -> None:
        """No leader: a server with limits waits to become one, a server without does as it likes."""
        self._ignored, self._is_ignoring = view, True
        self._leader_id = ""
        if not self._may_lead:
            self._member.leave()
            self._budget.set_free(True)

    def _may_take(self, view: View | None) -> bool:
        if not self._may_lead or not self._is_capable:
            return False
        if view is None or (self._config.is_single_writer and not self._was_overtaken):
            return True
        if view.content is not None and (view.content.is_closed or view.content.holder == self.server_id):
            return True  # our own: a create whose reply was lost
        return view.unchanged_s >= self._timing.expiry_s

    def _note_leader(self, holder: str, limits: BucketLimits) -> None:
        if holder == self._leader_id:
            return
        self._leader_id = holder
        if not self._may_lead:
            _log.warning(
                "another server limits this bucket, so this one keeps within its grants. leader=%s storage_bytes=%s "
                "storage_ttl_s=%s",
                holder,
                limits.capacity_bytes,
                limits.ttl_s,
            )
        elif limits != self._limits:
            _log.warning(
                "the leader of the bucket enforces other limits than this server is set to, and the leader's count: "
                "give every server the same. leader=%s storage_bytes=%s ours=%s storage_ttl_s=%s ours=%s",
                holder,
                limits.capacity_bytes,
                self._limits.capacity_bytes,
                limits.ttl_s,
                self._limits.ttl_s,
            )

    # -- leading ------------------------------------------------------------------------------------------------------

    def _take(self, view: View | None) -> None:
        taken = self._lease.take(view, self._limits, by_force=self._config.is_single_writer)
        if taken is None:
            return
        term_led = LeaderTerm(self._store, self._timing, self._clock, self._lease, self._limits)
        if self._config.is_single_writer:
            term_led.ledger.assume_all_gone()
        elif taken.holder_is_gone and view is not None and view.content is not None and view.content.session:
            term_led.ledger.assume_gone(view.content.session)
        term_led.collector.evicts_all = self._config.evicts_other_namespaces
        term_led.collector.sweep = self._sweep
        self._term_led = term_led
        self._leader_id = self.server_id
        self._budget.set_free(self._limits.capacity_bytes is None)
        _log.info("this server leads the bucket. term=%d server=%s", taken.term, self.server_id)

    def _lead(self, term_led: LeaderTerm) -> None:
        term_led.advance(self._member, self._budget, self._namespaces)
        if self._lease.term is None:
            is_overtaken = self._lease.was_overtaken
            reason = "another server leads the bucket now" if is_overtaken else "the lease is gone from the bucket"
            _log.info("this server leads no more: %s. server=%s", reason, self.server_id)
            if is_overtaken and self._config.is_single_writer and not self._was_overtaken:
                self._was_overtaken = True
                _log.warning(
                    "single_writer is set, but another server writes to this bucket: unset it on both, or give each a "
                    "prefix of its own. server=%s",
                    self.server_id,
                )
            self._end_term()

    def _end_term(self) -> None:
        if self._term_led is not None:
            self._malformed_count += self._term_led.ledger.malformed_count
        self._term_led = None
        self._budget.shut()

    def _resign(self) -> None:
        if self._term_led is not None:
            self._lease.resign(self._limits)
        self._end_term()

    def _say(self, message: str, cause: Exception) -> None:
        """Log trouble; the same text once in a while only."""
        now = self._clock()
        text = str(cause)
        if now - self._said.get(text, float("-inf")) < self._timing.trouble_s:
            return
        self._said = {said: at for said, at in self._said.items() if now - at < self._timing.trouble_s}
        self._said[text] = now
        _log.warning(message, text)


class UsageObject:
    """The last known figures, and what this server changed since.

    Owns the object ``_tiered_kv/usage``, which the leader writes and everybody reads.

    Threads: ``now`` any; ``refresh`` the keeper's turn.
    """

    def __init__(self, store: Objects, timing: Timing, clock: Callable[[], float], budget: LocalBudget) -> None:
        self._store = store
        self._timing = timing
        self._clock = clock
        self._budget = budget
        self._known = BucketUsage(0, 0)
        self._written: BucketUsage | None = None
        self._has_warned = False
        self._exchanged_at = float("-inf")

    def now(self) -> BucketUsage:
        """The figures last read or written, and what this server changed since."""
        changed_bytes, changed_count = self._budget.changes()
        known = self._known
        return BucketUsage(
            max(0, known.used_bytes + changed_bytes), max(0, known.blob_count + changed_count), known.term
        )

    def refresh(self, ledger: GrantLedger | None) -> None:
        """Take the leader's figures: from ``ledger`` if this server leads and has counted, else from the bucket.

        Raises:
            TierUnavailable: The store failed.
        """
        now = self._clock()
        is_due = now - self._exchanged_at >= self._timing.usage_s
        if ledger is not None and ledger.is_counted:
            self._learn(BucketUsage(ledger.used_bytes(), ledger.blob_count(), ledger.term))
            if is_due and self._known != self._written:
                self._exchanged_at = now
                if self._may_write():
                    self._store.put(USAGE, encode(self._known))
                    self._written = self._known
        elif is_due:
            self._exchanged_at = now
            found = decode(fetch(self._store, USAGE), BucketUsage)
            if found is not None and found != self._known:
                self._learn(found)

    def _may_write(self) -> bool:
        """Whether the name is free or holds figures: asked before the first write, and again while it does not."""
        if self._written is not None:
            return True
        data = fetch(self._store, USAGE)
        is_foreign = data is not None and decode(data, BucketUsage) is None
        if is_foreign and not self._has_warned:
            _log.warning("left alone: it has the name of the bucket's figures and holds none. path=%s", USAGE)
        self._has_warned = is_foreign
        return not is_foreign

    def _learn(self, figures: BucketUsage) -> None:
        self._budget.take_changes()
        self._known = figures


def _new_server_id() -> str:
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:60] or "server"
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
