"""The server's loop: sockets in, engine steps, updates out. One thread owns everything; I/O threads are the engine's.

Started by ``server/__main__.py``. A client that breaks the protocol, does not read, or asks for other limits is
refused or closed; nothing a client sends can stop the loop.
"""

import logging
import math
import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import msgspec

from tiered_kv.config import Config
from tiered_kv.engine.engine import Engine
from tiered_kv.errors import ConfigError, ProtocolError, TierUnavailable
from tiered_kv.machine import forgotten_in_children
from tiered_kv.metrics.recorder import Recorder
from tiered_kv.server import protocol as m
from tiered_kv.server.connection import Connection
from tiered_kv.server.directory import release_stale_arena_locks
from tiered_kv.server.hints import Hints
from tiered_kv.server.lending import Lending
from tiered_kv.server.orders import Orders
from tiered_kv.server.sessions import Sessions
from tiered_kv.server.stats import FigureSource
from tiered_kv.tiering.types import HOST
from tiered_kv.version import __version__

logger = logging.getLogger(__name__)

CLIENTS_MAX = 512
WATCHED_MAX = 512
"""Worker processes whose exit is awaited, also after their connections are gone."""

TICK_S = 0.1
HELLO_S = 10.0
"""Who connects and does not say Hello for this long is disconnected."""

FIRST_CLIENT_S = 30.0
"""An embedded server that nobody ever joins ends after this long."""

LINGER_S = 0.5
"""An embedded server waits this long for the next client: after a lost session all clients of an engine reconnect."""

ACCEPT_PAUSE_S = 1.0
"""Without free descriptors nobody is accepted for this long; those who wait in the queue stay there."""

FINAL_READS_MAX = 64
"""Of a client that is being dropped: what a socket's buffer holds, however fast the client goes on writing."""

HEAR_S = 0.0004
"""How long a turn of the loop takes in what clients said; the rest is for the next one. With the engine's ``SLICE_S`` a
turn of a server that fills takes 1.3 ms of CPU, and who asks waits for two at most. Threads that seal small blobs
hold the interpreter half of the time, so a turn may take twice that: with 0.7 ms each one answer in a hundred took more
than 5 ms."""

REASON_CHARS_MAX = 2000
_ROLES = ("scheduler", "worker", "cache", "admin", "door")
_WORKERS, _SCHEDULERS = ("worker", "cache"), ("scheduler", "cache")
_VISITORS = ("admin", "door")
"""Those for whom alone an embedded server does not go on."""

Callback = Callable[[int], None]
_OVER: Final = object()


class Route(NamedTuple):
    """Which roles may send a message, and what handles it: at once, or in steps between which others are answered."""

    roles: tuple[str, ...]
    handle: Callable[[Connection, Any], Iterator[None] | None]


class Server:
    """One node's cache server.

    Threads: :meth:`run` in one thread; :meth:`stop` from any thread or signal handler.
    """

    def __init__(
        self,
        engine: Engine,
        sessions: Sessions,
        listener: socket.socket,
        config: Config,
        recorder: Recorder,
        *,
        root: Path,
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._listener = listener
        self._config = config
        self._clock = engine.clock
        self.server_id = os.urandom(8).hex()
        self._figures = FigureSource(engine, recorder, config, server_id=self.server_id, root=root)
        self._root = root
        self._orders = Orders(engine)
        self._hints = Hints(engine, sessions)
        self._lending = Lending(engine, config.peer_timeout_s)
        self._routes = self._all_routes()
        self._selector = selectors.DefaultSelector()
        self._connections: set[Connection] = set()
        self._unheard: dict[Connection, Iterator[None]] = {}  # who said something, and the steps of taking it in
        self._pidfds: dict[Connection, int] = {}
        self._parting: set[Connection] = set()  # of workers that were hung up on and may have the arena mapped
        self._disk_bytes = config.disk_bytes or (
            None if config.disk_root() is None else engine.tiers[HOST + 1].usage().capacity_bytes
        )
        self._idle_since_s: float | None = None
        self._accept_again_s: float | None = None
        self._is_stopping = False
        self._is_hurried = False
        self._has_served = False
        self._old_arenas: int | None = None
        forgotten_in_children(self)

    # -- the loop ----------------------------------------------------------------------------------------------

    def run(self, *, until_idle: bool, is_found: Callable[[], bool] = lambda: True) -> None:
        """Serve until told to stop, not found any more or, with ``until_idle``, left by all; then drain and close."""
        self._begin_to_listen()
        self._register(self._engine.executor.fileno(), selectors.EVENT_READ, lambda _mask: None)
        self._idle_since_s = self._clock.monotonic()
        try:
            while not self._is_stopping and is_found() and not (until_idle and self._has_ended()):
                self._turn(TICK_S)
            was_idle = until_idle and not self._is_stopping
            since_s = self._idle_since_s if was_idle else None
            self._stop_listening()
            self._drain(self._clock.monotonic() if since_s is None else since_s)
        finally:
            for connection in list(self._connections):
                self._close(connection)
            for connection in list(self._pidfds):
                self._unwatch(connection)
            for connection in list(self._parting):
                self._part(connection)
            self._selector.close()

    def stop(self, _signal: int = 0, _frame: FrameType | None = None) -> None:
        """End the loop after the current turn; the drain follows."""
        self._is_stopping = True

    def listen_to(self, listener: socket.socket) -> None:
        """Accept from another socket than before; between two turns of the loop."""
        self._stop_listening()
        self._listener = listener
        self._begin_to_listen()

    def _begin_to_listen(self) -> None:
        self._listener.setblocking(False)
        self._register(self._listener.fileno(), selectors.EVENT_READ, self._accept)

    def _stop_listening(self) -> None:
        if self._accept_again_s is None:
            self._selector.unregister(self._listener.fileno())
        self._accept_again_s = None
        self._listener.close()

    def forget_after_fork(self) -> None:
        """In a child of a process with a server in it: listen to nobody, or clients would wait for its answer."""
        self._listener.close()
        self._selector.close()
        for connection in self._connections:
            connection.sock.close()

    def install_signal_handlers(self) -> None:
        """SIGTERM and SIGINT drain and end the server, and so does the end of its terminal, unless under nohup."""
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGINT, self.stop)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            signal.signal(signal.SIGHUP, self.stop)

    def _turn(self, timeout_s: float) -> None:
        wait_s = self._engine.wait_s
        timeout_s = timeout_s if wait_s is None else min(timeout_s, wait_s)
        is_busy = self._is_hurried or self._unheard or self._orders or self._sessions.users.wants_turn
        for key, mask in self._selector.select(0 if is_busy else timeout_s):
            callback: Callback = key.data
            callback(mask)
        self._hear()
        self._orders.go_on()
        if self._arenas_are_free():
            self._sessions.open_complete()
        for update in self._engine.step():
            try:
                self._sessions.tell(update)
            except OSError as exc:
                logger.info("client gone. %s", exc)
                self._drop_owner(update.session)
            except ProtocolError as exc:
                logger.warning("client dropped. %s", exc)
                self._drop_owner(update.session)
        self._is_hurried = self._sessions.end_leases()  # somebody may wait for the room
        self._lending.step(Connection.close_soon)
        self._sessions.pinning.step()
        self._sessions.users.step()
        self._sessions.prefetching.step()
        self._watch_writes()
        for connection in [c for c in self._connections if c.is_closing]:
            self._hear_scheduler(connection)
            self._close(connection)
        for connection in [c for c in self._pidfds if not self._sessions.awaits_exit(c)]:
            self._unwatch(connection)
        self._drop_silent()

    def _drop_silent(self) -> None:
        now_s = self._clock.monotonic()
        for connection in [c for c in self._connections if not c.role and now_s - c.accepted_s > HELLO_S]:
            logger.warning("client said nothing and was disconnected. pid=%d waited_s=%g", connection.pid, HELLO_S)
            self._close(connection)
        if self._accept_again_s is not None and now_s >= self._accept_again_s:
            self._accept_again_s = None
            self._register(self._listener.fileno(), selectors.EVENT_READ, self._accept)

    def _drop_owner(self, session: int) -> None:
        """A session's client is gone: take in what it said before it left, its commits above all, then close."""
        group = self._sessions.owner(session)
        if group is None or group.scheduler is None or group.scheduler.is_closing:
            return
        self._hear_out(group.scheduler)
        group.scheduler.close_soon()

    def _drain(self, since_s: float) -> None:
        """Write what was accepted, for at most ``drain_s`` since the last client left or the order to stop came."""
        deadline_s = since_s + self._config.drain_s
        self._turn(0)
        for connection in list(self._connections):  # what clients have sent already
            self._hear_out(connection)
        self._engine.save_tails()
        self._turn(0)
        while self._engine.pending_writes and self._clock.monotonic() < deadline_s:
            self._turn(min(TICK_S, max(deadline_s - self._clock.monotonic(), 0)))
        left = self._engine.pending_writes
        if left:
            logger.warning("drain ended with chunks unwritten. chunks=%d drain_s=%g", left, self._config.drain_s)

    def _has_ended(self) -> bool:
        now_s = self._clock.monotonic()
        roles = {connection.role for connection in self._connections}
        if not roles <= {"", *_VISITORS} or self._sessions.groups or self._orders:
            self._idle_since_s = None
            return False
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        if "" in roles:  # who it is comes next; a visitor, each time, must not begin the time anew
            return False
        idle_s = now_s - self._idle_since_s
        if not self._has_served:
            return idle_s > FIRST_CLIENT_S
        return idle_s > LINGER_S and (not self._engine.pending_writes or idle_s > self._config.drain_s)

    # -- sockets -----------------------------------------------------------------------------------------------

    def _register(self, fd: int, mask: int, callback: Callback) -> None:
        self._selector.register(fd, mask, callback)

    def _accept(self, _mask: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as exc:  # out of descriptors or memory: the listener stays readable, so look away for a while
            logger.warning("cannot accept clients; trying again in %g s: %s", ACCEPT_PAUSE_S, exc)
            self._selector.unregister(self._listener.fileno())
            self._accept_again_s = self._clock.monotonic() + ACCEPT_PAUSE_S
            return
        connection = Connection(sock, self._clock.monotonic())
        if connection.uid != os.getuid():
            reason = f"this server serves uid {os.getuid()} only, the client has uid {connection.uid}"
            self._refuse(connection, "config", reason)
            connection.close()
        elif len(self._connections) >= CLIENTS_MAX:
            self._refuse(connection, "unavailable", f"the server has too many clients. max={CLIENTS_MAX}")
            connection.close()
        else:
            self._connections.add(connection)
            self._register(sock.fileno(), selectors.EVENT_READ, lambda mask: self._ready(connection, mask))

    def _ready(self, connection: Connection, mask: int) -> None:
        if mask & selectors.EVENT_READ and connection not in self._unheard:
            self._unheard[connection] = self._steps(connection)
        if mask & selectors.EVENT_WRITE:
            try:
                connection.flush()
            except OSError as exc:
                logger.info("client gone. pid=%d role=%s: %r", connection.pid, connection.role, exc)
                self._hear_out(connection)
                connection.close_soon()

    def _steps(self, connection: Connection) -> Iterator[None]:
        """Take in what a client said, in its order."""
        for message in connection.receive():
            steps = self._handle(connection, message)
            if steps is not None:
                yield from steps
            yield

    def _hear(self) -> None:
        """Take in what clients said, in turns, for ``HEAR_S``; while more jobs end than are taken in, a step of each.

        What is not taken in stays in the client's socket, and soon fills it: then the client waits.
        """
        until_s = self._clock.monotonic() + HEAR_S
        once = len(self._unheard) if self._engine.is_behind else math.inf
        heard = 0
        while self._unheard and heard < once:
            self._hear_step(next(iter(self._unheard)))
            heard += 1
            if self._clock.monotonic() >= until_s:
                break

    def _hear_step(self, connection: Connection) -> None:
        steps = self._unheard.pop(connection)
        if connection.is_closing:
            return
        try:
            if next(steps, _OVER) is not _OVER:
                self._unheard[connection] = steps
        except ConfigError as exc:
            self._refuse(connection, "config", str(exc))
        except TierUnavailable as exc:
            self._refuse(connection, "unavailable", str(exc))
        except ProtocolError as exc:
            self._refuse(connection, "protocol", str(exc))
        except OSError as exc:
            logger.info("client gone. pid=%d role=%s: %r", connection.pid, connection.role, exc)
            connection.close_soon()

    def _hear_out(self, connection: Connection) -> None:
        """Take in all that a client has sent, its commits above all: what it said last counts, also if it is gone."""
        for _ in range(FINAL_READS_MAX):
            if connection not in self._unheard:
                if connection.is_closing or not connection.has_input():
                    return
                self._unheard[connection] = self._steps(connection)
            while connection in self._unheard:
                self._hear_step(connection)

    def _hear_scheduler(self, worker: Connection) -> None:
        """A worker leaves, which ends its session: what the scheduler said before that counts."""
        scheduler = self._sessions.scheduler_of(worker)
        if scheduler is not None and scheduler is not worker:
            self._hear_out(scheduler)

    def _refuse(self, connection: Connection, kind: str, reason: str) -> None:
        reason = reason[:REASON_CHARS_MAX]
        logger.warning("client refused. pid=%d kind=%s reason=%s", connection.pid, kind, reason)
        try:
            connection.send(m.Refused(kind, reason))
        except (ProtocolError, OSError):
            logger.debug("the refused client is gone. pid=%d", connection.pid)
        connection.close_soon()

    def _watch_writes(self) -> None:
        for connection in self._connections:
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
            if self._selector.get_key(connection.sock.fileno()).events != mask:
                self._selector.modify(
                    connection.sock.fileno(), mask, self._selector.get_key(connection.sock.fileno()).data
                )

    def _close(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._unheard.pop(connection, None)
        self._selector.unregister(connection.sock.fileno())
        if not connection.has_ended and self._sessions.awaits_exit(connection):
            connection.hang_up()
            self._parting.add(connection)
            self._register(connection.sock.fileno(), selectors.EVENT_READ, lambda _mask: self._hear_parting(connection))
        else:
            connection.close()
        self._sessions.disconnected(connection)
        self._orders.left(connection)
        self._lending.disconnected(connection)
        if connection.has_ended and connection not in self._pidfds:
            # Its process cannot be watched. A client closes its end after unmapping, and a kernel that ends a process
            # unmaps its memory before it closes its files.
            self._sessions.exited(connection)

    def _hear_parting(self, connection: Connection) -> None:
        """A worker that was hung up on goes on living, and says here that it has unmapped the arena."""
        if connection not in self._parting:
            return
        try:
            for message in connection.receive():
                if isinstance(message, m.Unmapped):
                    self._sessions.unmapped(connection)
        except (ProtocolError, OSError):
            self._part(connection)

    def _part(self, connection: Connection) -> None:
        if connection not in self._parting:
            return
        self._parting.discard(connection)
        self._selector.unregister(connection.sock.fileno())
        connection.close()
        if connection.has_ended and connection not in self._pidfds:
            self._sessions.exited(connection)  # as in _close

    def _all_routes(self) -> dict[type[m.Message], Route]:
        """Every message that a client may send once it has said Hello."""
        sessions = self._sessions
        return {
            m.JoinWorker: Route(_WORKERS, self._join_worker),
            m.Decline: Route(_WORKERS, self._decline),
            m.Pinned: Route(_WORKERS, sessions.pinned),
            m.LendRows: Route(_WORKERS, sessions.lend_rows),
            m.StoreRows: Route(_SCHEDULERS, sessions.store_rows),
            m.LoadRows: Route(_SCHEDULERS, sessions.load_rows),
            m.LoadEnded: Route(_SCHEDULERS, sessions.load_ended),
            m.TakeRowsBack: Route(_SCHEDULERS, sessions.take_rows_back),
            m.Unmapped: Route(_WORKERS, self._unmapped),
            m.JoinScheduler: Route(_SCHEDULERS, sessions.join_scheduler),
            m.Lookup: Route(_SCHEDULERS, sessions.lookup),
            m.Claim: Route(_SCHEDULERS, sessions.claim),
            m.Follow: Route(_SCHEDULERS, sessions.follow),
            m.Release: Route(_SCHEDULERS, sessions.release),
            m.Commit: Route(_SCHEDULERS, sessions.commit),
            m.CommitTail: Route(_SCHEDULERS, sessions.commit_tail),
            m.DropTails: Route(_SCHEDULERS, sessions.drop_tails),
            m.GiveBack: Route(_SCHEDULERS, sessions.give_back),
            m.Rest: Route(_SCHEDULERS, lambda connection, _: sessions.rest(connection)),
            m.Wake: Route(_SCHEDULERS, lambda connection, _: sessions.wake(connection)),
            m.Pin: Route(_SCHEDULERS, sessions.pin),
            m.SessionState: Route(_SCHEDULERS, sessions.session_state),
            m.Hint: Route((*_SCHEDULERS, "admin"), self._hints.take),
            m.NamespaceRequest: Route(("admin",), self._hints.describe),
            m.Reset: Route(_SCHEDULERS, lambda connection, _: sessions.reset(connection)),
            m.StatRequest: Route(_ROLES, self._stat),
            m.Evict: Route(("admin",), self._orders.take),
            m.JoinDoor: Route(("door",), self._lending.join),
            m.HeldRequest: Route(("door",), self._lending.count),
            m.Borrow: Route(("door",), self._lending.lend),
            m.Repay: Route(("door",), self._lending.repaid),
            m.Given: Route(("door",), self._lending.given),
        }

    def _handle(self, connection: Connection, message: m.Message) -> Iterator[None] | None:
        if isinstance(message, m.Hello):
            self._hello(connection, message)
            return None
        if not connection.role:
            raise ProtocolError("the first message must be Hello")
        route = self._routes[type(message)]
        if connection.role not in route.roles:
            raise ProtocolError(f"a client of role {connection.role} may not send {type(message).__name__}")
        return route.handle(connection, message)

    def _stat(self, connection: Connection, _: m.StatRequest) -> None:
        figures = self._figures.now(len(self._connections), [group.describe() for group in self._sessions.groups])
        connection.send(m.Stat(msgspec.json.encode(figures)))

    def _decline(self, connection: Connection, decline: m.Decline) -> None:
        self._check_watched()
        if self._watch(connection):
            self._sessions.decline(connection, decline)

    def _hello(self, connection: Connection, hello: m.Hello) -> None:
        if connection.role:
            raise ProtocolError("Hello is said once")
        if hello.protocol != m.PROTOCOL:
            raise ProtocolError(
                f"the server (pid {os.getpid()}, version {__version__}) speaks protocol {m.PROTOCOL}, the client "
                f"(version {hello.version[:100]}) speaks {hello.protocol}: stop the older one"
            )
        if hello.role not in _ROLES:
            raise ProtocolError(f"unknown role {hello.role[:100]!a}")
        is_name = len(hello.engine_id) <= m.NAME_CHARS_MAX and (hello.engine_id or "-").isprintable()
        if not is_name or not 0 <= hello.generation <= m.GENERATION_MAX:
            raise ProtocolError(f"bad engine id or generation. generation={hello.generation}")
        check_limits(hello, self._config, self._disk_bytes)
        connection.welcome(hello.role, hello.engine_id, hello.generation)
        self._has_served |= hello.role not in _VISITORS
        slabs = len(self._engine.arena.slab_fds)
        connection.send(m.Welcome(m.PROTOCOL, __version__, self.server_id, os.getpid(), slabs, str(self._root)))

    def _join_worker(self, connection: Connection, join: m.JoinWorker) -> None:
        self._check_watched()
        if not self._watch(connection):  # first: a worker that is not watched would be waited for without end
            return
        self._sessions.join_worker(connection, join)
        fds = self._engine.arena.slab_fds
        for start in range(0, len(fds), m.SLABS_PER_FRAME):
            part = fds[start : start + m.SLABS_PER_FRAME]
            connection.send(m.Slabs(len(part)), part)

    # -- processes that map the arena ----------------------------------------------------------------------------

    def _check_watched(self) -> None:
        if len(self._pidfds) >= WATCHED_MAX:
            raise TierUnavailable(f"the server has too many workers. workers={len(self._pidfds)} max={WATCHED_MAX}")

    def _watch(self, connection: Connection) -> bool:
        """Learn when the client's process exits; False when it has exited already.

        Where nothing is held until then, the turn of the loop ends the watch.
        """
        if connection in self._pidfds:
            return True
        try:
            pidfd = connection.open_pidfd()
        except ProcessLookupError:
            self._sessions.exited(connection)
            connection.close_soon()
            return False
        if pidfd is not None:
            self._pidfds[connection] = pidfd
            self._register(pidfd, selectors.EVENT_READ, lambda _mask: self._exited(connection))
        return True

    def _unwatch(self, connection: Connection) -> None:
        pidfd = self._pidfds.pop(connection, None)
        if pidfd is not None:
            self._selector.unregister(pidfd)
            os.close(pidfd)

    def _unmapped(self, connection: Connection, _: m.Unmapped) -> None:
        self._hear_scheduler(connection)
        self._sessions.unmapped(connection)

    def _exited(self, connection: Connection) -> None:
        self._unwatch(connection)
        self._part(connection)
        self._hear_scheduler(connection)
        self._sessions.exited(connection)

    def _arenas_are_free(self) -> bool:
        """Whether no process maps the arena of an earlier server of this directory any more.

        Workers hold a shared lock on ``arena-<server id>.lock`` while they map that server's arena; the kernel drops it
        with the process. Allocating before would hold the host memory twice.
        """
        if self._old_arenas != 0:
            before = self._old_arenas
            self._old_arenas = release_stale_arena_locks(self._root, own_id=self.server_id)
            if self._old_arenas and self._old_arenas != before:
                logger.warning(
                    "sessions wait until the arenas of earlier servers are unmapped, or can be asked about. n=%d",
                    self._old_arenas,
                )
        return self._old_arenas == 0


def check_limits(hello: m.Hello, config: Config, disk_bytes: int | None) -> None:
    """Compare the limits a client names with those the server runs with (rule 6).

    Raises:
        ConfigError: They differ; the message names both.
    """
    for name, wanted, given, is_default in (
        ("host_bytes", hello.host_bytes, config.resolved_host_bytes(), config.host_bytes is None),
        ("disk_bytes", hello.disk_bytes, disk_bytes, config.disk_bytes is None),
        ("min_free_bytes", hello.min_free_bytes, config.min_free_bytes, False),
    ):
        if wanted is not None and wanted != given:
            default = " (the default)" if is_default else ""
            raise ConfigError(
                f"the server of this directory (pid {os.getpid()}) runs with {name}={given}{default}, this client was "
                f"configured with {name}={wanted}: use one value, or leave it out here"
            )
    storage = config.location().storage
    if hello.storage and hello.storage != storage:
        raise ConfigError(
            f"the server of this directory (pid {os.getpid()}) keeps it in front of {storage}, this client names "
            f"{hello.storage[:500]}: use one storage_uri, or another disk_path"
        )
