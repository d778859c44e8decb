"""The server process: settings from standard input, readiness to standard output.

``python -m tiered_kv.server`` is what a client starts when it finds no server (``connect.py``): it detaches, serves and
ends with its last client. ``tiered-kv serve`` calls :func:`tiered_kv.server.compose.serve` in the foreground instead.

It answers one line: ``ready``, ``locked <who>`` or ``error <why>``.
"""

import contextlib
import errno
import gc
import io
import logging
import logging.handlers
import os
import re
import stat
import sys
import time
from pathlib import Path

import msgspec

from tiered_kv.config import Config
from tiered_kv.errors import DirectoryLocked, TieredKVError
from tiered_kv.server.compose import serve
from tiered_kv.server.connect import is_answering
from tiered_kv.server.daemonize import detach, let_loop_answer, use_whole_machine
from tiered_kv.server.directory import ServerInfo, log_path, read_info, server_directory
from tiered_kv.server.server import Server
from tiered_kv.tiers.disk.files import make_root, read_head
from tiered_kv.tiers.disk.marker import MARKER_FILE, claim

logger = logging.getLogger("tiered_kv.server")

LOG_BYTES_MAX = 1 << 20
RETRY_S = 0.05
HEAD_BYTES = 64
_RECORD = re.compile(rb"\0*\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ \S")


def _log_to(path: Path) -> None:
    _refuse_foreign(path.with_name(f"{path.name}.1"))  # what a rotation replaces; the log itself is asked when opened
    handler = _PrivateLog(path, maxBytes=LOG_BYTES_MAX, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _refuse_foreign(path: Path) -> None:
    """Check that a file which has the log's name begins as our log does.

    Raises:
        OSError: It does not, and so it is not written to.
    """
    try:
        head = read_head(path, HEAD_BYTES)
    except (FileNotFoundError, BlockingIOError):
        return
    if head.strip(b"\0") and _RECORD.match(head) is None:
        raise OSError(errno.EEXIST, "not a log file of ours, move it away", str(path))


class _PrivateLog(logging.handlers.RotatingFileHandler):
    """A log for this user alone, also after it was rotated, and never one through which another file is written.

    Where somebody moves the file away or removes it, as a rotation of all logs does, the next line begins another.
    """

    def emit(self, record: logging.LogRecord) -> None:
        stream = self.stream
        if stream is not None and not self._is_there(stream):
            self.stream = None  # as the rotation does: opened for the next record
            with contextlib.suppress(OSError):  # what a full disk did not take of it is lost with it
                stream.close()
        super().emit(record)

    def _is_there(self, stream: io.TextIOWrapper) -> bool:
        try:
            return os.path.samestat(os.stat(self.baseFilename, follow_symlinks=False), os.fstat(stream.fileno()))
        except FileNotFoundError:
            # Not in a directory that was emptied under us: who owns it next finds nothing of ours in it.
            return not os.path.lexists(os.path.join(os.path.dirname(self.baseFilename), MARKER_FILE))
        except OSError:  # the medium does not answer: no reason to begin another
            return True

    def _open(self) -> io.TextIOWrapper:
        _refuse_foreign(Path(self.baseFilename))
        return open(self.baseFilename, "a", encoding="utf-8", errors="backslashreplace", opener=_open_private)


def _open_private(path: str, flags: int) -> int:
    """Open a log file.

    Raises:
        OSError: It is a symbolic link, a FIFO, or a file with a second name.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(fd)
        raise OSError(errno.EINVAL, "not a log file of ours, remove it", path)
    os.fchmod(fd, 0o600)
    return fd


class _Report:
    """The pipe to the client that started this process; one answer, and the client may be gone."""

    def __init__(self) -> None:
        self._fd: int | None = os.dup(1)

    def answer(self, text: str) -> None:
        """Answer, unless that was done: a server may also fail later."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        line = " ".join(text.split()) + "\n"
        try:
            os.write(fd, line.encode())
        except BrokenPipeError:
            logger.info("the client that started this server is gone already")
        os.close(fd)


def _main() -> int:
    config = Config.from_mapping(msgspec.json.decode(sys.stdin.buffer.read()))
    report = _Report()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    detach()
    let_loop_answer()
    try:
        root = server_directory(config)
        make_root(root)
        claim(root, is_private=config.disk_root() is None)  # before the log, the first file of ours
        _log_to(log_path(root))
        use_whole_machine()
    except (TieredKVError, OSError) as exc:
        report.answer(f"error the directory cannot be used: {exc}")
        return 1
    return _serve_when_free(config, root, report)


def _serve_when_free(config: Config, root: Path, report: _Report) -> int:
    """Serve, once the directory is not locked by a server that is just draining."""
    deadline_s = time.monotonic() + config.start_timeout_s / 2  # the client still waits then, and hears who holds it

    def on_ready(info: ServerInfo) -> None:
        # The index of what was found at start lives as long as the process: a collection need not walk it every time.
        gc.collect()
        gc.freeze()
        logger.info("serving. pid=%d socket=%s settings=%s", info.pid, info.socket, config.describe())
        report.answer("ready")

    while True:
        try:
            serve(config, until_idle=True, on_ready=on_ready, on_server=Server.install_signal_handlers)
            return 0
        except DirectoryLocked as exc:
            holder = read_info(root)
            if (holder is not None and is_answering(holder.socket)) or time.monotonic() > deadline_s:
                report.answer(f"locked {exc}")
                return 0
            time.sleep(RETRY_S)
        except (TieredKVError, OSError) as exc:
            logger.error("the server could not start or go on. %s", exc)
            report.answer(f"error {exc}")
            return 1
        except Exception as exc:
            # A bug of ours: the state cannot be trusted, so the process ends. Clients lose hits and start another.
            logger.exception("the server ends because of an internal error")
            report.answer(f"error internal error, see {log_path(root)}: {exc!r}")
            raise


if __name__ == "__main__":
    sys.exit(_main())
