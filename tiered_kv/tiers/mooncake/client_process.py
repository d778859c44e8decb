"""The parent's side of the process that holds Mooncake's client: its start, its lanes, its end.

A lane is a socket and a piece of memory. One call at a time uses it: bytes are copied between the lane and the caller's
memory, and Mooncake knows no other address. So a transfer that ends late, however late, changes a lane and never a
slot. A lane whose call has missed its deadline is used again only when Mooncake has answered that call.
Called by ``client.py``.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from queue import Empty, LifoQueue
from typing import Final

import msgspec

from tiered_kv.machine import repeat_in_log
from tiered_kv.tiers.mooncake.messages import MESSAGE_BYTES_MAX, PoolAnswer, Request, Settings
from tiered_kv.tiers.object.medium import Deadline

logger = logging.getLogger(__name__)

END_S: Final = 3.0
"""For the process to take back what it gave to the pool; then it is killed."""

ENDED: Final = "Mooncake's client process ended: see the log"

LOOK_S: Final = 0.05
"""Between two looks for lanes whose late answers have come."""


class Lane:
    """One side of a lane; used by the thread that took it.

    Attributes:
        descriptor: Its memory, read and written as a file: these calls let the server's other threads run.
        size_bytes: Of that memory.
    """

    def __init__(self) -> None:
        self.socket, self.other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.descriptor = -1
        self.size_bytes = 0
        self._is_told = True

    def fit(self, size_bytes: int) -> None:
        """Have memory for so many bytes.

        Raises:
            OSError: There is none.
        """
        if size_bytes <= self.size_bytes:
            return
        descriptor = os.memfd_create("tiered_kv-mooncake", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor, self.size_bytes, self._is_told = descriptor, size_bytes, False

    def ask(self, request: Request) -> None:
        """Send a request, with the memory if the process does not have it yet.

        Raises:
            OSError: The process is gone.
        """
        try:
            if self._is_told:
                self.socket.send(msgspec.msgpack.encode(request))
                return
            told = msgspec.structs.replace(request, memory_bytes=self.size_bytes)
            socket.send_fds(self.socket, [msgspec.msgpack.encode(told)], [self.descriptor])
            self._is_told = True
        except ConnectionError:
            raise ConnectionResetError(ENDED) from None

    def answer(self, wait_s: float) -> PoolAnswer | None:
        """The answer to what was asked; None: it has not come in this time.

        Raises:
            OSError: The process is gone.
        """
        self.socket.settimeout(max(wait_s, 0.0))
        try:
            data = self.socket.recv(MESSAGE_BYTES_MAX)
        except (BlockingIOError, TimeoutError):
            return None
        except ConnectionError:  # it died before it had read what was asked
            data = b""
        finally:
            self.socket.settimeout(None)
        if not data:
            raise ConnectionResetError(ENDED)
        return msgspec.msgpack.decode(data, type=PoolAnswer)

    def close(self) -> None:
        self.socket.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class ClientProcess:
    """One process and its lanes.

    Attributes:
        owner_pid: Whose child it is: not of a process that was forked later.

    Threads: any. Free lanes are in a queue, lanes that wait for a late answer in ``_late``; all others belong to the
    thread that took them. What leaves and enters these two and ``_is_over`` is guarded by ``_lock``.
    """

    def __init__(self, settings: Settings, environment: Mapping[str, str], lane_count: int, deadline: Deadline) -> None:
        """Start it and wait until it has found the pool.

        Raises:
            OSError: It has not; the text says why.
        """
        self.owner_pid = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._free: LifoQueue[Lane] = LifoQueue()  # the one used last first: the others need no memory
        self._late: set[Lane] = set()
        self._lock = threading.Lock()
        self._lane_count = lane_count
        self._is_over = False
        lanes = [Lane() for _ in range(lane_count)]
        theirs = [lane.other.fileno() for lane in lanes]
        for lane in lanes:
            self._free.put(lane)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tiered_kv.tiers.mooncake.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                pass_fds=theirs,
            )
            said = self._process.stderr
            threading.Thread(target=repeat_in_log, args=(said, logger), name="tiered_kv-mooncake", daemon=True).start()
            self._begin(msgspec.structs.replace(settings, lanes=theirs), deadline)
        except BaseException:
            self.kill()
            raise
        finally:
            for lane in lanes:
                lane.other.close()

    def _begin(self, settings: Settings, deadline: Deadline) -> None:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        timer = threading.Timer(max(deadline.left_s(), 0.0), process.kill)
        timer.start()
        try:
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
            process.stdin.flush()
            word, _, rest = process.stdout.readline().decode(errors="replace").strip().partition(" ")
        except BrokenPipeError:
            word, rest = "", ""
        finally:
            timer.cancel()
        if word == "ready":
            return
        if deadline.left_s() <= 0:
            raise TimeoutError("no master of Mooncake answered in time; check that this is its RPC port")
        raise OSError(rest or f"Mooncake's client ended at its start (status {process.wait()}): see the log")

    @property
    def is_running(self) -> bool:
        return not self._is_over and self._process is not None and self._process.poll() is None

    def take(self, deadline: Deadline) -> Lane:
        """A free lane, which :meth:`give` takes back.

        Raises:
            OSError: There is none. Where all wait for answers that do not come, the process has been killed.
        """
        while True:
            late_count = self._look_for_late_answers()
            if late_count == self._lane_count:
                self.kill()
                raise ConnectionResetError("no call got an answer, and Mooncake's client is started again")
            if self._is_over:
                raise ConnectionResetError(ENDED)
            try:
                return self._free.get(timeout=min(max(deadline.left_s(), 0.001), LOOK_S))
            except Empty:
                if deadline.left_s() <= 0:
                    raise TimeoutError("all lanes to Mooncake's client are in use") from None

    def give(self, lane: Lane, *, is_answered: bool) -> None:
        """Take a lane back; one whose call was not answered is not used before it is."""
        with self._lock:
            if self._is_over:
                lane.close()
            elif is_answered:
                self._free.put(lane)
            else:
                self._late.add(lane)

    def _look_for_late_answers(self) -> int:
        """Free the lanes whose answers have come by now; says how many have not.

        Raises:
            OSError: The process is gone.
        """
        with self._lock:
            for lane in list(self._late):
                if lane.answer(0.0) is not None:
                    self._late.discard(lane)
                    self._free.put(lane)
            return len(self._late)

    def close(self) -> None:
        """Let it leave the pool, and end it."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it is gone already
                self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        self.kill()

    def kill(self) -> None:
        """End it at once; whoever waits for an answer hears of it. Idempotent."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # what could not be written any more
                        pipe.close()
        with self._lock:
            self._is_over = True
            lanes, self._late = list(self._late), set()
            with suppress(Empty):
                while True:
                    lanes.append(self._free.get_nowait())
            for lane in lanes:
                lane.close()
