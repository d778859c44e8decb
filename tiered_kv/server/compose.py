"""Composition root: settings to a running server. The only place that builds an engine from real parts."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tiered_kv import __version__
from tiered_kv.chunks.arena import Arena, create_slabs
from tiered_kv.config import Config, memory_limit_bytes
from tiered_kv.engine.clock import Clock, SystemClock
from tiered_kv.engine.engine import Engine
from tiered_kv.engine.executor import ThreadExecutor
from tiered_kv.engine.self_test import SELF_TEST_NAMESPACE, self_test, self_test_format
from tiered_kv.errors import ConfigError
from tiered_kv.metrics.recorder import Recorder
from tiered_kv.server.arena_lock import release_stale_arena_locks
from tiered_kv.server.messages import PROTOCOL
from tiered_kv.server.paths import ServerInfo, disk_directory, info_path, socket_path, write_info
from tiered_kv.server.server import Server
from tiered_kv.server.spawn import bind
from tiered_kv.tiers.base import Tier
from tiered_kv.tiers.open import open_tiers

logger = logging.getLogger("tiered_kv.server")


def build_engine(config: Config, recorder: Recorder) -> Engine:
    """Open tiers, run their self-tests and scan them.

    Raises:
        ConfigError, DirectoryLocked, TierUnavailable: As the tiers say.
    """
    clock = SystemClock()
    formats = {SELF_TEST_NAMESPACE: self_test_format()}
    with ExitStack() as undo:  # in a library's process, a failed start must not leave the directory locked
        tiers = open_tiers(config, formats.get, recorder, clock.monotonic)
        for tier in tiers:
            undo.callback(tier.close)
        hierarchy = Engine.build_hierarchy(config.resolved_host_bytes(), tiers)
        arena = Arena(create_slabs(hierarchy.slots.slab_count))
        undo.callback(arena.close)
        executor = ThreadExecutor()
        undo.callback(executor.close)
        engine = Engine(tiers, arena, hierarchy, executor, clock, formats)
        for number, tier in enumerate(tiers):
            _test(engine, number, tier, clock)
        engine.start()
        undo.pop_all()
        return engine


def _test(engine: Engine, number: int, tier: Tier, clock: Clock) -> None:
    result = self_test(tier, clock)
    if result.failure is None:
        engine.sample_read(number, result.size_bytes, result.read_s)
    log = logger.info if result.failure is None else logger.error
    log(
        "self-test. tier=%s result=%s write_s=%.4f read_s=%.4f",
        tier.traits.name,
        result.failure or "ok",
        result.write_s,
        result.read_s,
    )


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
    root = disk_directory(config)
    _check_host_bytes(config)
    recorder = Recorder()
    engine = build_engine(config, recorder)
    try:
        path = listen_at or socket_path(root)
        with _listening(path) as listener:
            server = Server(engine, listener, config, SystemClock(), recorder, root=root)
            if on_server is not None:
                on_server(server)
            info = ServerInfo(str(path), os.getpid(), __version__, PROTOCOL, server.server_id, config.digest())
            write_info(root, info)
            on_ready(info)
            server.run(until_idle=until_idle)
    finally:
        # Still under the directory's lock: nobody else's files.
        try:
            info_path(root).unlink(missing_ok=True)
            release_stale_arena_locks(root, own_id="")
        finally:
            engine.close()


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    listener = bind(path)
    try:
        yield listener
    finally:
        listener.close()
        path.unlink(missing_ok=True)


def _check_host_bytes(config: Config) -> None:
    limit = memory_limit_bytes()
    if config.resolved_host_bytes() > limit:
        raise ConfigError(f"host_bytes={config.host_bytes} is more than this machine or its cgroup has. memory={limit}")
