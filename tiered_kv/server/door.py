"""The door: a process beside the server that gives other machines the blobs of this machine, over HTTPS.

Read only: GET of one blob whose namespace and key are named, and a POST that asks how much of a prefix is there, with
this hour's token; everything else is refused. Started by the server, ends with it: a pipe from the server is its
standard input. Here are its start and its end; who is connected is in ``door_listener.py``, how it gives way to the
engine in ``door_pace.py``, what peers are answered in ``door_blobs.py``, how it comes by host memory in
``door_memory.py``.
"""

import contextlib
import ctypes
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from tiered_kv.config import Config, parse_address
from tiered_kv.errors import ConfigError
from tiered_kv.machine import repeat_in_log
from tiered_kv.server.door_blobs import DoorBlobs
from tiered_kv.server.door_listener import ANSWER_S, Listener
from tiered_kv.server.door_memory import HostMemory
from tiered_kv.tiers.peers.fleet_key import FleetKey

logger = logging.getLogger(__name__)

START_S: Final = 20.0
RESTART_S: Final = 1.0
RESTART_MAX_S: Final = 30.0
"""Waits before a door is started again: twice as long each time, and from the first on once one lived for the last."""

_SET_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG


class DoorSettings(msgspec.Struct, frozen=True):
    """What the server tells its door.

    Attributes:
        root: Of the disk tier; None: there is none.
        key: The fleet's, as the server had it at its start: the file may change.
        serve_bytes_s: None: as fast as it goes.
        server: The server's socket; None: nothing is given from host memory.
        directory: The server's.
        answer_s: Longest time in which a peer takes an answer.
        tells_reads: The server is to hear what peers have read: there is a bucket, which it may not have put it into.
    """

    root: str | None
    host: str
    port: int
    key: bytes
    serve_bytes_s: int | None
    server: str | None
    directory: str
    answer_s: float
    tells_reads: bool


def _memory(settings: DoorSettings) -> HostMemory | None:
    if settings.server is None:
        return None
    return HostMemory(settings.server, Path(settings.directory), tells_reads=settings.tells_reads)


def _listen(settings: DoorSettings, memory: HostMemory | None) -> Listener:
    """Take the port.

    Raises:
        OSError: The port cannot be had.
    """
    key = FleetKey(settings.key)
    root = None if settings.root is None else Path(settings.root)
    blobs = DoorBlobs(root, settings.serve_bytes_s, memory)

    def accepts(token: str) -> bool:
        return key.accepts(token, time.time())

    return Listener(
        settings.host, settings.port, key.server_context(), accepts, blobs.answer, answer_s=settings.answer_s
    )


def _end_with_the_server(listener: Listener) -> None:
    sys.stdin.buffer.read()
    listener.close()


def _end_with_the_memory(memory: HostMemory, listener: Listener) -> None:
    """A server that lives starts another door, which joins it anew."""
    memory.run()
    listener.close()


def _in_background(task: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=task, args=arguments, name=f"tiered_kv-door{task.__name__}", daemon=True).start()


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _main() -> int:
    # Also where it was stopped: while it lives it keeps the memory of a server that is dead, and the next one waits.
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGHUP):  # from a terminal they are for the server, which ends its door
        signal.signal(number, signal.SIG_IGN)
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=DoorSettings)
    memory = _memory(settings)
    try:
        listener = _listen(settings, memory)
    except OSError as exc:
        _say(f"error {exc}")
        return 1
    _say(f"ready {listener.port}")
    _in_background(_end_with_the_server, listener)
    if memory is not None:
        _in_background(_end_with_the_memory, memory, listener)
    listener.run()
    return 0


class DoorProcess:
    """The door of a running server; one that ends by itself is started again, also if it ended as it started.

    Attributes:
        port: Where it listens, once it does.

    Threads: made and closed by one; a thread of its own waits for the process.
    """

    def __init__(self, config: Config, server: Path | None = None) -> None:
        """Start the door and wait until it listens, or is seen to need another try, which a thread makes.

        Args:
            server: The server's socket, where it listens now or soon; None: nothing is given from host memory.

        Raises:
            ConfigError: It says that it cannot listen, or the key cannot be used.
        """
        root, listen, key_file = config.disk_root(), config.peer_listen, config.peer_key_file
        assert listen is not None and key_file is not None, "settings were checked"
        host, port = parse_address(listen)
        self._settings = DoorSettings(
            None if root is None else str(root),
            host,
            port,
            FleetKey.read(key_file).secret,
            config.peer_serve_bytes_s,
            None if server is None else str(server),
            str(config.server_directory()),
            max(ANSWER_S, config.peer_timeout_s),
            tells_reads=config.location().kind == "object",
        )
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self.port = port
        try:
            self._open()
        except OSError as exc:  # of the machine, not of the settings
            logger.warning("the door to peers does not start yet; trying again. %s", exc)
        self._thread = threading.Thread(target=self._watch, name="tiered_kv-door", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        self._process, self.port = self._start()
        self._settings = msgspec.structs.replace(self._settings, port=self.port)  # peers know it by that
        logger.info("blobs of this machine are given to peers. address=%s port=%d", self._settings.host, self.port)

    def _start(self) -> tuple[subprocess.Popen[bytes], int]:
        """Start a door that listens.

        Raises:
            ConfigError: It says that it cannot listen.
            OSError: There is no process to be had, or it ended, or was silent for ``START_S``, before it said anything.
        """
        process = subprocess.Popen(
            [sys.executable, "-m", "tiered_kv.server.door"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        timer = threading.Timer(START_S, process.kill)
        try:
            timer.start()
            process.stdin.write(msgspec.json.encode(self._settings) + b"\n")
            process.stdin.flush()
            word, _, rest = process.stdout.readline().decode(errors="replace").strip().partition(" ")
        except BrokenPipeError:
            word, rest = "", ""
        except RuntimeError as exc:  # no thread for the timer
            _end(process)
            repeat_in_log(process.stderr, logger)
            raise ChildProcessError(str(exc)) from exc
        finally:
            timer.cancel()
        if word == "ready":
            return process, int(rest)
        _end(process)
        repeat_in_log(process.stderr, logger)
        if word:
            listen = f"{self._settings.host}:{self._settings.port}"
            raise ConfigError(f"setting peer_listen: the door cannot listen at {listen}: {rest or 'see the log'}")
        raise ChildProcessError(f"its process ended before it was ready. status={process.returncode}")

    def _watch(self) -> None:
        wait_s = RESTART_S
        while not self._closing.is_set():
            since_s = time.monotonic()
            if self._process is not None:
                if self._process.stderr is not None and not self._process.stderr.closed:
                    repeat_in_log(self._process.stderr, logger)
                self._process.wait()
            if time.monotonic() - since_s >= RESTART_MAX_S:  # one that is ready and dies is no better than none
                wait_s = RESTART_S
            if self._closing.wait(wait_s):
                return
            if self._process is not None:
                status = self._process.returncode
                logger.warning("the door to peers ended and is started again after %g s. status=%s", wait_s, status)
                _end(self._process)
            wait_s = min(2 * wait_s, RESTART_MAX_S)
            try:
                self._open()
            except (ConfigError, OSError) as exc:
                logger.warning("the door to peers cannot be started; trying again in %g s. %s", wait_s, exc)

    def close(self) -> None:
        """End the door. Idempotent."""
        self._closing.set()
        _end(self._process)
        self._thread.join()
        _end(self._process)
        if self._process is not None and self._process.stderr is not None:
            self._process.stderr.close()  # of one that was started meanwhile, which nobody has heard


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is None:
        return
    process.kill()  # it holds nothing that could be lost
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # it closes what it was never told, too
                pipe.close()


if __name__ == "__main__":
    sys.exit(_main())
