"""The cache for library users: chunks in, the longest held prefix out, without vLLM.

Owns nothing of its own: it opens the directory's server in a thread of this process, or, where another process holds
the directory, connects to that one. Either way it is a client like any other, so there is one code path. Bytes are
copied between the caller and slots of the arena; what they mean is the caller's business.
"""

import ctypes
import logging
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec

from tiered_kv.chunks.geometry import ChunkGeometry, LayerPage
from tiered_kv.config import Config
from tiered_kv.errors import Closed, ConfigError, DirectoryLocked, TierUnavailable
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.namespace import FORMAT_VERSION
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.keys.stored_by import encoding_text, stored_by
from tiered_kv.machine import forgotten_in_children
from tiered_kv.server import protocol as m
from tiered_kv.server.client import SchedulerClient
from tiered_kv.server.compose import serve
from tiered_kv.server.server import Server
from tiered_kv.server.worker_client import WorkerClient, pages_on_the_wire
from tiered_kv.tiering.slots import SLOTS_PER_SLAB_MAX
from tiered_kv.tiering.types import LookupAnswer, SlotId
from tiered_kv.version import __version__

logger = logging.getLogger(__name__)

POLL_S = 0.001
ANSWER_S = 10.0
"""A first answer takes a server that is heavily loaded less than a second; one that is stopped or hangs gives none."""
UNREAD_REFERENCES = 2
"""Of an attribute's value, as ``sys.getrefcount`` counts them: the attribute's and the call's."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The longest prefix of some tokens that the cache holds, valid inside the ``with`` block of :meth:`Cache.load`.

    Attributes:
        chunks: Read-only payloads, one per chunk, ``chunk_bytes`` long.
        tokens: Tokens they cover.
    """

    chunks: tuple[memoryview, ...]
    tokens: int


class Cache:
    """A tiered cache of chunk payloads, keyed by the tokens before and in them.

    Threads: one at a time per call; calls from several threads take turns. A child that is forked opens its own.
    """

    def __init__(
        self, settings: Mapping[str, object] | Config, namespace: Mapping[str, object], pages: Sequence[LayerPage]
    ) -> None:
        """Open or join the cache of a directory.

        Args:
            settings: As in vLLM's ``kv_connector_extra_config``; ``storage_uri`` at least.
            namespace: Everything that must be equal for two payloads to be interchangeable
                (``keys.namespace.REQUIRED_FIELDS`` less geometry and epoch; ``block_tokens`` at least one).
                ``format_version`` is ours: whatever is given, it is that of the blobs that are written.
            pages: The layers of one block, in payload order.

        Raises:
            ConfigError: A setting is wrong, or the server refused it.
            TierUnavailable: The directory cannot be used.
        """
        config = settings if isinstance(settings, Config) else Config.from_mapping(settings)
        block_tokens = namespace.get("block_tokens")
        if not isinstance(block_tokens, int):
            raise ConfigError(f"namespace field block_tokens: expected a whole number, got {block_tokens!r}")
        self._geometry = ChunkGeometry(block_tokens, config.chunk_tokens, (tuple(pages),))
        self._config = config
        self._lock = threading.Lock()
        self._reads: dict[int, list[_ReadChunk]] = {}  # by lookup, until nobody reads them
        engine_id = f"cache-{uuid.uuid4().hex}"
        # A caller that wrote an older one down would look for old blobs, and find names taken by what it cannot read.
        fields = msgspec.json.encode({**namespace, "format_version": FORMAT_VERSION})
        line = stored_by(__version__, "cache", __version__, encoding_text([namespace.get("kv_encoding")]))
        pages_said = pages_on_the_wire(pages)
        join = m.JoinWorker(0, 1, block_tokens, config.chunk_tokens, fields, pages_said, stored_by=line)
        self._worker: WorkerClient | None = None
        self._client: SchedulerClient | None = None
        # After all that the arguments may be wrong in: its thread keeps the process from its end.
        self._server = None if config.server is not None else _ServerThread.start(config)
        try:
            self._worker = WorkerClient(config, engine_id, 0, join)
            self._client = SchedulerClient(config, engine_id, 1)
            self._client.rest()
            if not self._client.wait_ready(config.start_timeout_s):
                raise ConfigError(self._client.refusal or "the cache server opened no session")
        except BaseException:
            self.close()
            raise
        forgotten_in_children(self)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk's payload."""
        return self._geometry.data_bytes

    # -- store and load ----------------------------------------------------------------------------------------

    def store(self, tokens: Sequence[int], payload: Callable[[int], bytes | memoryview]) -> int:
        """Store the whole chunks of ``tokens`` that are not held yet; returns how many of them were taken.

        ``payload(i)`` gives chunk ``i``'s bytes and is called only for chunks that are taken. Without room for more,
        the rest is left out: a cache may always drop a store.

        Raises:
            TierUnavailable: The server is gone, or has said nothing for ``ANSWER_S``.
            ValueError: A payload has another size than ``chunk_bytes``.
        """
        with self._lock:
            client, worker = self._open()
            keys = self._keys(client, tokens)
            with self._looking_up(client, keys, start=len(keys.keys)) as lookup:
                answer = self._first_answer(client, lookup)
            client.release(lookup)
            filled: list[tuple[SlotId, ChunkRecord]] = []
            try:
                for index in range(answer.held, len(keys.keys)):
                    if client.credit_count == 0:
                        client.commit(filled)  # the server grants more once it has these
                        filled.clear()
                    slot = self._take_slot(client)
                    if slot is None:
                        return index - answer.held
                    try:
                        self._fill(client, worker, slot, payload(index))
                    except BaseException:
                        client.give_back([slot])
                        raise
                    filled.append((slot, self._record(client, keys, index)))
                return len(keys.keys) - answer.held
            finally:
                client.commit(filled)
                client.rest()

    @contextmanager
    def load(self, tokens: Sequence[int], *, timeout_s: float = 60.0) -> Iterator[Prefix]:
        """The longest prefix of ``tokens`` that is held, verified and in host memory until the block ends.

        Waits for slower tiers at most ``timeout_s``; what has not arrived by then is left out.

        Raises:
            BufferError: At the end of the block: a chunk is still read, by an array that was made of it, say. Its bytes
                stay as they are, and the prefix in host memory, until a call when nobody reads it any more. A block
                that ends with an error of its own raises that one.
            TierUnavailable: The server is gone, or has said nothing for ``ANSWER_S``.
        """
        with self._lock:
            client, worker = self._open()
            keys = self._keys(client, tokens)
            with self._looking_up(client, keys, start=0) as lookup:
                answer = self._first_answer(client, lookup)
                end_s = time.monotonic() + timeout_s
                while not answer.is_done and time.monotonic() < end_s:
                    answer = self._wait(client, lookup)
                chunks = [_ReadChunk(self._payload(client, worker, slot)) for slot in answer.slots[: answer.ready]]
        try:
            yield Prefix(tuple(chunk.view for chunk in chunks), len(chunks) * self._config.chunk_tokens)
        finally:
            with self._lock:
                self._reads[lookup] = chunks
                self._release_unread(client)
                is_read = lookup in self._reads
        if is_read:
            raise BufferError("a chunk of the prefix is still read: copy what is to be kept of it")

    # -- the rest ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the cache; a server of this process writes what it holds (at most ``drain_s``) and ends. Idempotent.

        Raises:
            BufferError: A prefix is still read. All else is closed, its memory by the next call after that.
        """
        with self._lock:
            client, server = self._client, self._server
            self._client = self._server = None
            self._release_unread(client)
        try:
            if client is not None:
                client.close()
            if self._worker is not None:
                self._worker.leave()
        finally:
            if server is not None:
                server.stop()

    def forget_after_fork(self) -> None:
        """In a child of this process: the session and the server are the parent's."""
        self._lock = threading.Lock()  # another thread may have held it
        self._client = self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> tuple[SchedulerClient, WorkerClient]:
        if self._client is None or self._worker is None:
            raise Closed("the cache was closed, or opened by the process that this one was forked from: open one here")
        if self._client.generation:
            raise TierUnavailable("the cache server went away; open the cache again")
        if self._reads:
            self._release_unread(self._client)
        return self._client, self._worker

    def _release_unread(self, client: SchedulerClient | None) -> None:
        """Let go of prefixes that nobody reads any more; without a client the cache was closed, and holds no leases."""
        for lookup, chunks in list(self._reads.items()):
            if all(chunk.release() for chunk in chunks):
                del self._reads[lookup]
                if client is not None:
                    client.release(lookup)
        if client is not None:
            client.rest()

    def _keys(self, client: SchedulerClient, tokens: Sequence[int]) -> PrefixKeys:
        assert client.namespace is not None
        keys = PrefixKeys(client.namespace, self._config.chunk_tokens)
        keys.extend(tokens)
        return keys

    @contextmanager
    def _looking_up(self, client: SchedulerClient, keys: PrefixKeys, *, start: int) -> Iterator[int]:
        """A lookup that its owner releases; where the wait for it fails, or is interrupted, it is released here."""
        is_read = start < len(keys.keys)  # its caller reads from the slots for as long as it likes
        lookup = client.lookup(keys.keys, keys.digests, start, is_claimed=is_read)
        if lookup is None:
            raise TierUnavailable("the cache server does not take lookups; it may have gone away")
        try:
            yield lookup
        except BaseException:
            client.release(lookup)
            client.rest()
            raise

    def _first_answer(self, client: SchedulerClient, lookup: int) -> LookupAnswer:
        end_s = time.monotonic() + ANSWER_S
        answer = client.lookups[lookup]
        while not answer.is_answered:
            if time.monotonic() > end_s:
                raise TierUnavailable(
                    f"the cache server has said nothing for {ANSWER_S:g} s. It may be stopped, or hang"
                )
            answer = self._wait(client, lookup)
        return answer

    def _wait(self, client: SchedulerClient, lookup: int) -> LookupAnswer:
        time.sleep(POLL_S)
        client.poll()
        answer = client.lookups.get(lookup)
        if answer is None:
            raise TierUnavailable("the cache server went away; open the cache again")
        return answer

    def _take_slot(self, client: SchedulerClient) -> SlotId | None:
        """A granted slot; a short wait lets the server grant more while others are sealed."""
        end_s = time.monotonic() + 1.0
        while (slot := client.take_slot()) is None and time.monotonic() < end_s:
            time.sleep(POLL_S)
            client.poll()
        return slot

    def _fill(self, client: SchedulerClient, worker: WorkerClient, slot: SlotId, data: bytes | memoryview) -> None:
        if len(data) != self.chunk_bytes:
            raise ValueError(f"a chunk's payload has {self.chunk_bytes} bytes. observed={len(data)}")
        with self._payload(client, worker, slot) as view:
            view[:] = data

    @staticmethod
    def _record(client: SchedulerClient, keys: PrefixKeys, index: int) -> ChunkRecord:
        assert client.namespace is not None
        digest = client.namespace.digest
        return ChunkRecord(digest, keys.keys[index], keys.parent(index), index, keys.digests[index])

    def _payload(self, client: SchedulerClient, worker: WorkerClient, slot: SlotId) -> memoryview:
        assert client.info is not None
        slab, index = divmod(slot, SLOTS_PER_SLAB_MAX)
        offset = index * client.info.slot_bytes + client.info.payload_offset
        return worker.arena.view(slab, offset, self.chunk_bytes)


class _ReadChunk:
    """A chunk's payload while somebody reads it.

    Arrays made of a view, and its slices, are views of the same memory that its ``release`` does not count. They all
    refer to the object that the first view was made of.
    """

    def __init__(self, payload: memoryview) -> None:
        self._owner = (ctypes.c_char * len(payload)).from_buffer(payload)
        self.view = memoryview(self._owner).cast("B").toreadonly()

    def release(self) -> bool:
        """End the view; whether nobody reads the chunk any more."""
        try:
            self.view.release()
        except BufferError:
            return False
        return sys.getrefcount(self._owner) == UNREAD_REFERENCES


class _ServerThread:
    """The directory's server in a thread of this process."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._server: Server | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tiered_kv-server")

    @classmethod
    def start(cls, config: Config) -> "_ServerThread | None":
        """Serve the directory; None when another process does.

        Raises:
            ConfigError, TierUnavailable: The directory cannot be served.
        """
        thread = cls(config)
        thread._thread.start()
        thread._ready.wait()
        if thread._failure is None:
            return thread
        thread._thread.join()
        if isinstance(thread._failure, DirectoryLocked):
            logger.info("joining the directory's server. %s", thread._failure)
            return None
        raise thread._failure

    def _run(self) -> None:
        def keep(server: Server) -> None:
            self._server = server

        try:
            serve(self._config, until_idle=False, on_ready=lambda _info: self._ready.set(), on_server=keep)
        except BaseException as exc:  # noqa: BLE001 - handed to the thread that opens the cache
            self._failure = exc
        finally:
            self._ready.set()

    def stop(self) -> None:
        """Drain and end."""
        if self._server is not None:
            self._server.stop()
        self._thread.join()
