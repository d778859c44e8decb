"""Composition root: settings to a running server. The only place that builds an engine from real parts."""

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tiered_kv.chunks.arena import Arena, create_slabs
from tiered_kv.config import Config
from tiered_kv.engine.clock import Clock, SystemClock
from tiered_kv.engine.engine import Engine
from tiered_kv.engine.executor import LOCAL_THREADS, Pool, ThreadExecutor
from tiered_kv.engine.self_test import SELF_TEST_FORMATS, self_test
from tiered_kv.errors import ConfigError, TierUnavailable
from tiered_kv.keys.namespace import SELF_TEST_NAMESPACE
from tiered_kv.machine import memory_limit_bytes
from tiered_kv.metrics.recorder import Recorder
from tiered_kv.server.directory import (
    DirectoryWatch,
    ServerInfo,
    info_path,
    refuse_foreign_info,
    release_stale_arena_locks,
    server_directory,
    socket_place,
)
from tiered_kv.server.epochs import EpochFile, Epochs
from tiered_kv.server.listening import Listening
from tiered_kv.server.pins import Pinning
from tiered_kv.server.protocol import PROTOCOL
from tiered_kv.server.server import Server
from tiered_kv.server.sessions import Sessions
from tiered_kv.tiers.disk.files import mapped_errors
from tiered_kv.tiers.disk.lock import DirectoryLock
from tiered_kv.tiers.disk.marker import claim, require_ours
from tiered_kv.tiers.object.store import ObjectStore
from tiered_kv.tiers.open import OpenTier, open_tiers
from tiered_kv.version import __version__

logger = logging.getLogger("tiered_kv.server")

FIRST_TURNS = 3
"""Turns of a shared tier's keeper that may pass before the first write finds room."""

PUBLISH_TRIES = 3
PUBLISH_ROOM_BYTES = 64 << 10
"""For the server's description, and for what whoever has filled the disk takes of it meanwhile."""


def build_engine(config: Config, recorder: Recorder) -> tuple[Engine, ObjectStore | None]:
    """Open tiers, run their self-tests and scan them; returns the engine and the client of its object store.

    Raises:
        ConfigError, DirectoryLocked, TierUnavailable: As the tiers say.
        TierUnavailable: With ``strict``, a self-test failed.
    """
    clock = SystemClock()
    formats = dict(SELF_TEST_FORMATS)
    with ExitStack() as undo:  # in a library's process, a failed start must not leave the directory locked
        opened = open_tiers(config, formats.get, recorder, clock.monotonic)
        tiers = [one.tier for one in opened]
        for tier in tiers:
            undo.callback(tier.close)
        tiering = Engine.build_tiering(
            config.resolved_host_bytes(), tiers, eviction=config.eviction, admissions=config.admissions()
        )
        arena = Arena(create_slabs(tiering.slots.slab_count))
        undo.callback(arena.close)
        executor = ThreadExecutor(_threads(config, opened))
        undo.callback(executor.close)
        engine = Engine(tiers, arena, tiering, executor, clock, formats)
        for number, one in zip(engine.tiers, opened, strict=True):
            engine.guards.add(number, one.breaker, one.trial)
            _test(engine, number, one, clock, is_strict=config.strict)
        _remove_empty(config.disk_root())
        engine.start()
        undo.pop_all()
        return engine, opened[-1].store


def _threads(config: Config, opened: list[OpenTier]) -> dict[Pool, int]:
    threads = dict(LOCAL_THREADS)
    if opened[-1].tier.traits.is_shared:
        threads |= dict.fromkeys((Pool.REMOTE_LOAD, Pool.REMOTE_STORE), config.storage_concurrency)
    return threads


def _remove_empty(root: Path | None) -> None:
    """Remove what the self-test's blob lay in, which nothing else does; trials that come later leave it again."""
    if root is None:
        return
    place = root / "blobs" / SELF_TEST_NAMESPACE.hex()
    for directory in (*place.glob("??"), place):
        with contextlib.suppress(OSError):  # not empty, where a blob could not be deleted; or not there
            directory.rmdir()


def _test(engine: Engine, number: int, one: OpenTier, clock: Clock, *, is_strict: bool) -> None:
    """Write, read, verify and delete one blob. A tier that fails is left out until a later trial succeeds.

    Raises:
        TierUnavailable: It failed, and ``is_strict``.
    """
    name = one.tier.traits.name
    result = self_test(one.trial, clock)
    for _ in range(FIRST_TURNS):
        if result.failure is not None or result.size_bytes or one.tier.traits.is_read_only:
            break
        one.trial.flush()  # a shared tier may first have to be granted room
        result = self_test(one.trial, clock)
    if result.failure is None and not result.size_bytes:
        if one.tier.traits.is_read_only:
            logger.info("self-test passed. tier=%s is_read_only=true", name)
        else:
            logger.warning("self-test passed without a write: no room. tier=%s", name)
        return
    if result.failure is None:
        engine.sample_reads(number, result)
        logger.info(
            "self-test passed. tier=%s write_s=%.4f read_s=%.4f reads_at_once=%d together_s=%.4f",
            *(name, result.write_s, result.read_s, result.reads_at_once, result.together_s),
        )
        return
    if is_strict and not one.tier.traits.is_read_only:  # two machines that wait for each other would never start
        raise TierUnavailable(f"the self-test of the {name} tier failed (strict): {result.failure}")
    logger.error("self-test failed; the tier is left out and tried again. tier=%s reason=%s", name, result.failure)
    one.breaker.trip(result.failure)


def serve(
    config: Config,
    *,
    until_idle: bool,
    on_ready: Callable[[ServerInfo], None],
    on_server: Callable[[Server], None] | None = None,
    listen_at: Path | None = None,
) -> None:
    """Open the directory, serve it and close it again. Blocks.

    Args:
        until_idle: End with the last client.
        on_ready: Called when clients can connect.
        on_server: Called with the server before it runs, e.g. to install signal handlers.
        listen_at: Where to listen; None: a place of its own.

    Raises:
        ConfigError, DirectoryLocked, TierUnavailable: The server could not start.
    """
    root = server_directory(config)
    _check_host_bytes(config)
    for warning in config.warnings():
        logger.warning(warning)
    recorder = Recorder()
    with ExitStack() as at_end:
        if config.disk_root() is None:  # no disk tier claims and locks it
            with mapped_errors("open", root):
                claim(root, is_private=True)
            at_end.callback(DirectoryLock(root).release)
        else:
            require_ours(root)
        refuse_foreign_info(root)
        engine, store = build_engine(config, recorder)
        at_end.callback(engine.close)
        submit, monotonic = partial(_in_background, engine), engine.clock.monotonic
        place = listen_at or socket_place(root)
        with Listening(place, submit, monotonic, is_private=listen_at is None) as listening:
            sessions = Sessions(engine, _epochs(engine, store, root), _pinning(engine, store, config))
            server = Server(engine, sessions, listening.socket, config, recorder, root=root)
            if on_server is not None:
                on_server(server)
            info = ServerInfo(
                str(listening.path), os.getpid(), __version__, PROTOCOL, server.server_id, config.digest()
            )
            watch = _publish(engine, root, info)
            at_end.callback(_leave, root, watch)  # still under the directory's lock: nobody else's files
            if config.peer_listen is not None:
                at_end.callback(_open_door(config, listening.path))
            on_ready(info)

            def is_found() -> bool:
                if not watch.is_found():
                    return False
                if (listener := listening.anew()) is not None:
                    server.listen_to(listener)
                return True

            server.run(until_idle=until_idle, is_found=is_found)
            sessions.pinning.flush()
            if not watch.is_found():
                raise TierUnavailable(f"the directory of this server was removed or taken over. path={root}")


def _publish(engine: Engine, root: Path, info: ServerInfo) -> DirectoryWatch:
    """Say in the directory who owns it; where others have filled its disk, a few blobs make way for that.

    Raises:
        ConfigError: The name is taken by a file of somebody else.
        TierUnavailable: It cannot be written.
    """
    for left in reversed(range(PUBLISH_TRIES)):
        try:
            return DirectoryWatch(root, info, partial(_in_background, engine), engine.clock.monotonic)
        except OSError as exc:
            if not (left and exc.errno in (errno.ENOSPC, errno.EDQUOT) and engine.make_room(PUBLISH_ROOM_BYTES)):
                raise TierUnavailable(f"cannot say who owns the directory. path={info_path(root)}: {exc}") from exc
    raise AssertionError("the last try neither ended well nor badly")


def _open_door(config: Config, path: Path) -> Callable[[], None]:
    """Start to give this machine's blobs to peers; returns what ends it.

    Raises:
        ConfigError: The door cannot listen, or a package is missing.
    """
    try:
        from tiered_kv.server.door import DoorProcess  # noqa: PLC0415 - its packages are an extra
    except ImportError as exc:
        raise ConfigError(f"peer_listen needs more packages: pip install cryptography h11 ({exc})") from exc
    return DoorProcess(config, path).close


def _leave(root: Path, watch: DirectoryWatch) -> None:
    watch.look()
    if not watch.is_found():
        return
    info_path(root).unlink(missing_ok=True)
    release_stale_arena_locks(root, own_id="")


def _epochs(engine: Engine, store: ObjectStore | None, root: Path) -> Epochs:
    submit = partial(_in_background, engine)
    return Epochs(EpochFile(root, submit), submit, store)


def _pinning(engine: Engine, store: ObjectStore | None, config: Config) -> Pinning:
    submit = partial(_in_background, engine)
    return Pinning(
        engine,
        submit,
        config.request_pin_share,
        disk_root=config.disk_root(),
        store=store,
        tag_share=config.tag_pin_share,
    )


def _in_background(engine: Engine, task: Callable[[], None]) -> None:
    def run() -> None:
        task()
        engine.executor.notify()

    engine.executor.submit(Pool.UPKEEP, 0, run)


def _check_host_bytes(config: Config) -> None:
    limit = memory_limit_bytes()
    if config.resolved_host_bytes() > limit:
        raise ConfigError(f"host_bytes={config.host_bytes} is more than this machine or its cgroup has. memory={limit}")
