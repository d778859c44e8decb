"""Objects of a Mooncake pool by key, with deadlines: what its master answers, in words and in this package's errors.

Owns which options reach Mooncake's client and what its codes mean. The client itself is in a process of its own
(``client_process.py``), started by the first call and again by the next one after it ended. Called by ``tier.py``.
"""

import importlib.util
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Final

from tiered_kv.chunks.header import PEEK_BYTES, refuse_foreign
from tiered_kv.errors import CapacityExceeded, ChunkCorrupt, Closed, ConfigError, TierUnavailable
from tiered_kv.location import MOONCAKE_VARIABLE, Location
from tiered_kv.tiers.mooncake.client_process import END_S, ClientProcess
from tiered_kv.tiers.mooncake.messages import PoolAnswer, Request, Settings
from tiered_kv.tiers.object.medium import Deadline

logger = logging.getLogger(__name__)

LANES_MAX: Final = 8
"""Calls at once. Each has memory of the size of the largest blob it moved, for as long as the process lives."""

START_S: Final = 30.0
"""For the process to find its master; a call waits for it no longer than for anything else."""

PIECE_BYTES: Final = 1 << 20
"""Of a blob on its way from a lane into a slot: what was copied is hashed while it is in the processor's cache."""

NO_ROOM: Final = (-200, -1700)
"""No segment has room, or there is none; the tenant's quota is used up."""

ABSENT: Final = (-703, -704)
"""Somebody is just putting it; it is not there."""

TAKEN: Final = -705
DOES_NOT_FIT: Final = -600

WORDS: Final[dict[int, str]] = {
    -707: "the object's lease ended before all of it had come",
    -800: "the transfer failed; check that the machine that holds the object runs and can be reached from here",
    -801: "the bytes do not have the checksum that Mooncake keeps of them",
    -900: "the master does not answer; check that it runs",
    -901: "the master did not answer in time",
    -1010: "this master is not the one in charge; name that one in storage_uri",
}


class MooncakeClient:
    """A pool, seen from one server.

    Threads: any, at any time until ``close``; the process and its start are guarded by a lock. Every call ends within
    ``timeout_s``. Every method raises TierUnavailable for whatever the pool does, and Closed after ``close``.

    Attributes:
        uri: Where it is, safe to show.
        lane_count: Calls that can be under way at once.
        started_count: How often Mooncake's client was started.
    """

    def __init__(self, location: Location, *, timeout_s: float = 10.0, concurrency: int = LANES_MAX) -> None:
        """Name a pool; nothing is started yet.

        Raises:
            ConfigError: The package is not installed.
        """
        if importlib.util.find_spec("mooncake") is None:
            raise ConfigError(
                "mooncake:// needs the package mooncake-transfer-engine: pip install mooncake-transfer-engine "
                "(without a GPU: mooncake-transfer-engine-non-cuda)"
            )
        self.uri = str(location)
        self.timeout_s = timeout_s
        self.lane_count = min(concurrency, LANES_MAX)
        self.started_count = 0
        self._options = location.options
        self._master = location.path.partition("/")[0]
        self._lock = threading.Lock()
        self._process: ClientProcess | None = None
        self._start: Future[ClientProcess] | None = None
        self._is_closed = False

    def put(self, key: str, blob: memoryview) -> None:
        """Store an object; one that is there stays.

        Raises:
            CapacityExceeded: No machine of the pool has room for it.
        """
        with self._exchange(Request("put", [key], len(blob)), "put", blob) as (answer, _):
            code = answer.codes[0]
            if code in NO_ROOM:
                raise CapacityExceeded(f"the pool has no room, or no machine gives it memory. pool={self.uri}")
            if code not in (0, TAKEN):
                raise self._failure("put", code)

    def get_into(self, key: str, buffer: memoryview, on_piece: Callable[[int], None], namespace: bytes) -> bool:
        """Read an object into ``buffer``; False when it is not there.

        Raises:
            ChunkMismatch: It has another size, and is a sound blob of another namespace or version.
            ChunkCorrupt: It has another size.
        """
        size = len(buffer)
        with self._exchange(Request("get", [key], size), "get") as (answer, descriptor):
            code = answer.codes[0]
            if code == size:
                done = 0
                while done < size:
                    done += os.preadv(descriptor, [buffer[done : done + PIECE_BYTES]], done)
                    on_piece(done)
                return True
            if code in ABSENT:
                return False
            observed = answer.size_bytes if code == DOES_NOT_FIT else code
            if observed < 0 or observed == size:
                raise self._failure("get", code)
            refuse_foreign(os.pread(descriptor, PEEK_BYTES, 0) if 0 <= code < size else b"", namespace)
            raise ChunkCorrupt(f"blob has the wrong size. observed={observed} expected={size} key={key}")

    def count_held(self, keys: Sequence[str]) -> int:
        """How many of these are there, from the first on."""
        with self._exchange(Request("exist", list(keys)), "exist") as (answer, _):
            for count, code in enumerate(answer.codes):
                if code != 1:
                    if code < 0 and code not in ABSENT:
                        raise self._failure("exist", code)
                    return count
            return len(answer.codes)

    def delete(self, key: str) -> bool:
        """Remove an object, whoever may be reading it; False when it was not there."""
        with self._exchange(Request("delete", [key]), "delete") as (answer, _):
            code = answer.codes[0]
            if code < 0 and code not in ABSENT:
                raise self._failure("delete", code)
            return code >= 0

    def close(self) -> None:
        """End the process; calls under way end with it. Idempotent."""
        with self._lock:
            self._is_closed = True
            process, self._process = self._process, None
            start = self._start
        if process is not None and process.owner_pid == os.getpid():
            process.close()
        elif start is not None:
            wait([start], END_S)  # it sees that it is not wanted any more

    @contextmanager
    def _exchange(
        self, request: Request, operation: str, blob: memoryview | None = None
    ) -> Iterator[tuple[PoolAnswer, int]]:
        """Ask, and have the lane's memory for as long as the block runs."""
        deadline = Deadline(self.timeout_s)
        try:
            process = self._running(deadline)
        except OSError as exc:
            raise self._failure(operation, cause=exc) from exc
        try:
            lane = process.take(deadline)
        except OSError as exc:
            if isinstance(exc, ConnectionError):
                process.kill()
            raise self._failure(operation, cause=exc) from exc
        is_answered = True
        try:
            try:
                lane.fit(request.size_bytes)
                if blob is not None:
                    _write(lane.descriptor, blob)
                is_answered = False
                lane.ask(request)
                answer = lane.answer(deadline.left_s())
                if answer is None:
                    raise TimeoutError(f"no answer within {self.timeout_s:g} s")
                is_answered = True
            except OSError as exc:
                if isinstance(exc, ConnectionError):
                    process.kill()  # it is dead, and the next call starts another one
                raise self._failure(operation, cause=exc) from exc
            yield answer, lane.descriptor
        finally:
            process.give(lane, is_answered=is_answered)

    def _running(self, deadline: Deadline) -> ClientProcess:
        """The process, started if there is none: in a thread of its own, because a start may take longer than a call.

        Raises:
            OSError: It cannot be started, or does not find the master, or not yet.
        """
        with self._lock:
            if self._is_closed:
                raise Closed("the Mooncake pool is closed")
            process = self._process
            if process is not None and process.owner_pid == os.getpid():
                if process.is_running:
                    return process
                process.kill()  # it is dead; this closes its pipes
                logger.warning("Mooncake's client process ended and is started again. pool=%s", self.uri)
            self._process = None
            if self._start is None or self._start.done():
                self._start = self._begun()
            start = self._start
        try:
            return start.result(max(deadline.left_s(), 0.001))
        except TimeoutError:
            if start.done():
                raise
            raise TimeoutError(
                "Mooncake's client is being started and has not found its master yet; check that this is its RPC port"
            ) from None

    def _begun(self) -> "Future[ClientProcess]":
        """A start under way.

        Raises:
            OSError: The machine has no thread to spare now; the next call tries again.
        """
        start: Future[ClientProcess] = Future()
        try:
            threading.Thread(target=self._begin, args=(start,), name="tiered_kv-mooncake", daemon=True).start()
        except RuntimeError as exc:
            raise OSError(f"Mooncake's client cannot be started now: {exc}") from exc
        return start

    def _begin(self, start: "Future[ClientProcess]") -> None:
        try:
            deadline = Deadline(START_S)
            process = ClientProcess(*self._plan(deadline), self.lane_count, deadline)
        except OSError as exc:
            start.set_exception(exc)
            return
        except Exception as exc:  # noqa: BLE001 - whoever waits for the start raises it: no thread, an impossible option
            start.set_exception(OSError(f"Mooncake's client cannot be started: {exc!r}"))
            return
        with self._lock:
            is_wanted = not self._is_closed
            if is_wanted:
                self._process = process
                self.started_count += 1
        if not is_wanted:
            process.close()
        start.set_result(process)

    def _plan(self, deadline: Deadline) -> tuple[Settings, dict[str, str]]:
        """What the process is told, and its environment.

        Raises:
            OSError: Nobody listens where the master should.
        """
        host, _, port = self._master.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), max(deadline.left_s(), 0.001)) as connection:
            own_address = connection.getsockname()[0]
        options = self._options
        settings = Settings(
            master=self._master,
            local_hostname=str(options.get("local_hostname", own_address)),
            metadata_server=str(options.get("metadata_server", "P2PHANDSHAKE")),
            protocol=str(options.get("protocol", "tcp")),
            rdma_devices=str(options.get("rdma_devices", "")),
            segment_bytes=int(str(options.get("global_segment_size", 0))),
            tenant_id=str(options.get("tenant_id", "default")),
            lanes=[],
        )
        half_ms = str(int(self.timeout_s * 500))  # so that it is Mooncake that gives up, and its lane is free again
        environment = {
            "MC_LOG_LEVEL": "ERROR",
            "MC_RPC_TIMEOUT_MS": half_ms,
            "MC_RPC_CONNECT_TIMEOUT_MS": half_ms,
            "MC_STORE_CLIENT_SETUP_RETRIES": "1",
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(max(1, min(2, int(self.timeout_s / 2)))),
        }
        environment |= os.environ
        environment |= {name: str(value) for name, value in options.items() if MOONCAKE_VARIABLE.fullmatch(name)}
        return settings, environment

    def _failure(self, operation: str, code: int = 0, cause: OSError | None = None) -> TierUnavailable:
        words = WORDS.get(code, "Mooncake failed")
        if cause is not None:
            words = _cause(cause)
        number = f" code={code}" if code else ""
        return TierUnavailable(f"mooncake: {operation} failed: {words}. pool={self.uri}{number}")


def _write(descriptor: int, blob: memoryview) -> None:
    """Copy into a lane; a write may take less than all."""
    written = 0
    while written < len(blob):
        written += os.pwrite(descriptor, blob[written:], written)


def _cause(exc: OSError) -> str:
    if isinstance(exc, ConnectionRefusedError):
        return "the connection was refused: nothing listens there; check that the master runs and its port"
    if isinstance(exc, socket.gaierror):
        return "the master's host name is not known here (DNS)"
    return exc.strerror or str(exc) or type(exc).__name__
