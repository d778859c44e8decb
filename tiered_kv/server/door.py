"""The door: a process beside the server that gives other machines the blobs of this machine's disk, over HTTPS.

Read only: HEAD and GET of one blob whose namespace and key are named, with this hour's token; everything else is
refused. It reads the disk tier's files by itself, so the server's loop has no part in it, and it gives way to the
engine (nice 10). Started by the server, ends with it: a pipe from the server is its standard input.
"""

import asyncio
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web

from tiered_kv.config import Config, parse_address
from tiered_kv.errors import ConfigError
from tiered_kv.keys.naming import BlobName, relative_path
from tiered_kv.tiers.disk.files import open_to_read
from tiered_kv.tiers.peers.fleet_key import FleetKey
from tiered_kv.tiers.peers.peer import BLOBS_PATH

logger = logging.getLogger(__name__)

BODIES_MAX: Final = 64
"""Blobs that are sent at once; who asks for more is told to come again (503)."""

BODY_S: Final = 60.0
"""Longest time in which a reader takes one blob."""

BURST_S: Final = 1.0
"""How much of ``peer_serve_bytes_s`` may be used ahead."""

PIECE_BYTES: Final = 1 << 20
START_S: Final = 20.0
RESTART_S: Final = 1.0
NICE: Final = 10

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class DoorSettings(msgspec.Struct, frozen=True):
    """What the server tells its door; ``serve_bytes_s`` None: as fast as it goes."""

    root: str
    host: str
    port: int
    key_file: str
    serve_bytes_s: int | None


class Budget:
    """Bytes per second that may be sent.

    Threads: one owner. Units: bytes, seconds.
    """

    def __init__(self, bytes_per_s: int | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._paid_until_s = 0.0

    def take(self, size_bytes: int, now_s: float) -> bool:
        """Take room for a body; False: there is none now."""
        if self._bytes_per_s is None:
            return True
        if self._paid_until_s > now_s + BURST_S:
            return False
        self._paid_until_s = max(self._paid_until_s, now_s) + size_bytes / self._bytes_per_s
        return True


class Door:
    """Answers questions.

    Threads: the loop's only; files are opened and read in threads.
    """

    def __init__(self, settings: DoorSettings, key: FleetKey) -> None:
        self._blobs = Path(settings.root) / "blobs"
        self._key = key
        self._budget = Budget(settings.serve_bytes_s)
        self._bodies = 0

    def application(self) -> web.Application:
        """What aiohttp serves."""
        application = web.Application(middlewares=[self._authorize], client_max_size=0)
        application.router.add_get(f"{BLOBS_PATH}/{{namespace:[0-9a-f]{{32}}}}/{{key:[0-9a-f]{{32}}}}", self._blob)
        return application

    @web.middleware
    async def _authorize(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Refuse who has no token of this hour, whatever is asked for."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not self._key.accepts(token, time.time()):
            return web.Response(status=401)
        return await handler(request)

    async def _blob(self, request: web.Request) -> web.StreamResponse:
        names = bytes.fromhex(request.match_info["namespace"]), bytes.fromhex(request.match_info["key"])
        path = self._blobs / relative_path(BlobName(*names))
        descriptor = await asyncio.to_thread(_open_blob, path)
        if descriptor is None:
            return web.Response(status=404)
        try:
            size_bytes = os.fstat(descriptor).st_size
            response = web.StreamResponse(headers={"Content-Length": str(size_bytes)})
            if request.method == "HEAD":
                await response.prepare(request)
                return response
            if self._bodies >= BODIES_MAX or not self._budget.take(size_bytes, time.monotonic()):
                return web.Response(status=503)
            self._bodies += 1
            try:
                async with asyncio.timeout(BODY_S):
                    await response.prepare(request)
                    await _send(response, descriptor, size_bytes)
            finally:
                self._bodies -= 1
            return response
        finally:
            os.close(descriptor)


def _open_blob(path: Path) -> int | None:
    """Open a blob's file; None: there is none, or something that is no plain file has its name."""
    try:
        descriptor = open_to_read(path)
    except OSError:  # a miss, whatever it is: the disk tier of this machine's own server tells of a sick disk
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return descriptor


async def _send(response: web.StreamResponse, descriptor: int, size_bytes: int) -> None:
    offset = 0
    while offset < size_bytes:
        piece = await asyncio.to_thread(os.pread, descriptor, min(PIECE_BYTES, size_bytes - offset), offset)
        if not piece:
            raise ConnectionResetError("the blob was cut while it was sent")
        await response.write(piece)
        offset += len(piece)
    await response.write_eof()


async def _serve(settings: DoorSettings, key: FleetKey) -> None:
    """Listen, say so, and serve until standard input ends."""
    runner = web.AppRunner(Door(settings, key).application(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.host, settings.port, ssl_context=key.server_context())
        await site.start()
        _say(f"ready {runner.addresses[0][1]}")
        await asyncio.to_thread(sys.stdin.buffer.read)
    finally:
        await runner.cleanup()


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _main() -> int:
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C in a terminal is for the server, which ends its door
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=DoorSettings)
    try:
        asyncio.run(_serve(settings, FleetKey.read(Path(settings.key_file))))
    except (ConfigError, OSError) as exc:
        _say(f"error {exc}")
        return 1
    return 0


class DoorProcess:
    """The door of a running server; one that ends by itself is started again.

    Attributes:
        port: Where it listens.

    Threads: made and closed by one; a thread of its own waits for the process.
    """

    def __init__(self, config: Config) -> None:
        """Start the door and wait until it listens.

        Raises:
            ConfigError: It cannot.
        """
        root, listen, key_file = config.disk_root(), config.peer_listen, config.peer_key_file
        assert root is not None and listen is not None and key_file is not None, "settings were checked"
        host, port = parse_address(listen)
        self._settings = DoorSettings(str(root), host, port, str(key_file), config.peer_serve_bytes_s)
        self._closing = threading.Event()
        self._process, self.port = self._start()
        self._settings = msgspec.structs.replace(self._settings, port=self.port)
        self._thread = threading.Thread(target=self._watch, name="tiered_kv-door", daemon=True)
        self._thread.start()
        logger.info("blobs of this machine's disk are given to peers. address=%s port=%d", host, self.port)

    def _start(self) -> tuple[subprocess.Popen[bytes], int]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tiered_kv.server.door"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(START_S, process.kill)
        timer.start()
        try:
            process.stdin.write(msgspec.json.encode(self._settings) + b"\n")
            process.stdin.flush()
            word, _, rest = process.stdout.readline().decode(errors="replace").strip().partition(" ")
        except BrokenPipeError:
            word, rest = "error", "it ended before it was ready"
        finally:
            timer.cancel()
        if word != "ready":
            _end(process)
            listen = f"{self._settings.host}:{self._settings.port}"
            raise ConfigError(f"setting peer_listen: the door cannot listen at {listen}: {rest or 'see the log'}")
        return process, int(rest)

    def _watch(self) -> None:
        while not self._closing.is_set():
            self._process.wait()
            if self._closing.wait(RESTART_S):
                return
            logger.warning("the door to peers ended and is started again. status=%s", self._process.returncode)
            _end(self._process)
            try:
                self._process, _ = self._start()
            except (ConfigError, OSError) as exc:
                logger.warning("the door to peers cannot be started; trying again in %g s. %s", RESTART_S, exc)

    def close(self) -> None:
        """End the door. Idempotent."""
        self._closing.set()
        _end(self._process)
        self._thread.join()
        _end(self._process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # it holds nothing that could be lost
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


if __name__ == "__main__":
    sys.exit(_main())
