"""Engines without vLLM: a scheduler and its workers as real clients of a real server process.

A worker's "paged KV" is one byte per chunk, so a slot's content says which chunk it should hold.
"""

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.server.probe import wait_for
from tests.kit.server.processes import end_server, private_runtime
from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.config import Config
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.namespace import FORMAT_VERSION, REQUIRED_FIELDS
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.keys.state_keys import state_records
from tiered_kv.keys.tags import NO_TAG, tag_digest
from tiered_kv.server import protocol as m
from tiered_kv.server.client import SchedulerClient
from tiered_kv.server.connect import read_message, say_hello
from tiered_kv.server.worker_client import WorkerClient, pages_on_the_wire
from tiered_kv.tiering.slots import SLOTS_PER_SLAB_MAX
from tiered_kv.tiering.types import LookupAnswer

BLOCK = 16
CHUNK = 64
PAGES = (LayerPage("layer.0", "BF16", (2, BLOCK, 64), "HNC"), LayerPage("layer.1", "BF16", (2, BLOCK, 64), "HNC"))
ANSWER_S = 20.0
STORED_BY = "tiered_kv/0.9.1 vllm/0.32.1 cuda/FLASH_ATTN"


def settings(root: Path, **more: Any) -> Config:
    """Settings of a small cache in ``root``; its slots are 36 KiB."""
    given = {
        "storage_uri": f"file://{root}",
        "host_bytes": "8MiB",
        "disk_bytes": "160MiB",
        "chunk_tokens": CHUNK,
        "drain_s": 5.0,
        "start_timeout_s": 20.0,
    }
    return Config.from_mapping(given | more)


def namespace_fields(weights: str = "w", state_parts: int = 0) -> bytes:
    """What all workers of an engine say of their model; it has recurrent layers whose states have so many parts."""
    skipped = ("geometry", "epoch", "block_tokens", "chunk_tokens")
    fields: dict[str, Any] = {name: None for name in REQUIRED_FIELDS if name not in skipped}
    states = {"recurrent_state": [{"layers": [f"mixer.{part}"]} for part in range(state_parts)]} if state_parts else {}
    return json.dumps(fields | states | {"format_version": FORMAT_VERSION, "weights": weights}).encode()


def worker_part(
    rank: int = 0,
    world_size: int = 1,
    *,
    weights: str = "w",
    pages: Sequence[LayerPage] = PAGES,
    stored_by: str = STORED_BY,
    state_parts: int = 0,
    pins: bool = False,
) -> m.JoinWorker:
    """A rank's part of a session."""
    sizes = BLOCK, CHUNK, namespace_fields(weights, state_parts), pages_on_the_wire(pages)
    return m.JoinWorker(rank, world_size, *sizes, stored_by=stored_by, pins=pins)


def hello(config: Config, role: str = "admin", engine_id: str = "", generation: int = 0) -> socket.socket:
    """A connection that has said Hello and nothing more."""
    sock, _ = say_hello(config, role, engine_id, generation)
    return sock


def tell(sock: socket.socket, *messages: m.Message) -> None:
    """Send messages."""
    for message in messages:
        sock.sendall(m.frame(message))


def refusal(sock: socket.socket) -> str:
    """Why the server refuses this client; fails if it sends anything else."""
    message = read_message(sock)
    assert isinstance(message, m.Refused), message
    return message.reason


def poll_until(client: SchedulerClient, condition: Any, what: str) -> None:
    """Poll a scheduler client until ``condition()`` holds."""

    def is_met() -> bool:
        client.poll()
        return bool(condition())

    wait_for(is_met, what, deadline_s=ANSWER_S)


@dataclass
class SmallEngine:
    """One engine of one rank: joins at once, stores and looks up prefixes."""

    client: SchedulerClient
    worker: WorkerClient
    config: Config
    engine_id: str
    weights: str
    stored_by: str = STORED_BY
    state_parts: int = 0
    pages: Sequence[LayerPage] = PAGES

    @property
    def root(self) -> Path:
        """The directory of its server."""
        return self.config.server_directory()

    @classmethod
    def start(
        cls,
        config: Config,
        engine_id: str = "e",
        *,
        weights: str = "w",
        stored_by: str = STORED_BY,
        state_parts: int = 0,
        pages: Sequence[LayerPage] = PAGES,
        rejoins: bool = False,
    ) -> "SmallEngine":
        part = worker_part(weights=weights, pages=pages, stored_by=stored_by, state_parts=state_parts)
        worker = WorkerClient(config, engine_id, 0, part)
        client = SchedulerClient(config, engine_id, 1, rejoins=rejoins)
        assert client.wait_ready(ANSWER_S), client.refusal
        return cls(client, worker, config, engine_id, weights, stored_by, state_parts, pages)

    def rejoin(self) -> None:
        """As vLLM does after a lost session: the scheduler by itself, the worker once it hears of the generation."""
        generation = self.client.generation
        self.worker.leave()
        part = worker_part(
            weights=self.weights, pages=self.pages, stored_by=self.stored_by, state_parts=self.state_parts
        )
        self.worker = WorkerClient(self.config, self.engine_id, generation, part)
        poll_until(self.client, lambda: self.client.is_ready, "the next session")
        assert self.client.generation == generation

    def wait_lost(self) -> None:
        """Until the session is found to be over."""
        generation = self.client.generation
        poll_until(self.client, lambda: self.client.generation > generation, "the session's end")

    def keys(self, count: int, first_token: int = 0) -> PrefixKeys:
        """The keys of a prompt of ``count`` chunks."""
        assert self.client.namespace is not None
        keys = PrefixKeys(self.client.namespace, CHUNK)
        keys.extend(range(first_token, first_token + count * CHUNK))
        return keys

    def payload(self, slot: int) -> memoryview:
        """A slot's payload, less the padding."""
        info = self.client.info
        assert info is not None
        slab, index = divmod(slot, SLOTS_PER_SLAB_MAX)
        return self.worker.arena.view(slab, index * info.slot_bytes + info.payload_offset, payload_bytes(self.pages))

    def take_slot(self) -> int:
        """A granted slot, waiting for one."""
        self.client.wake()
        poll_until(self.client, lambda: self.client.credit_count, "a slot")
        slot = self.client.take_slot()
        assert slot is not None
        return slot

    def store(
        self, count: int, first_token: int = 0, *, start: int = 0, tag: str = "", is_answer: bool = False
    ) -> None:
        """Fill and commit chunks [start, count) of a prompt or its answer, as a request with this tag would."""
        assert self.client.namespace is not None
        keys = self.keys(count, first_token)
        for index in range(start, count):
            slot = self.take_slot()
            with self.payload(slot) as view:
                view[:] = content(index, first_token, self.pages)
            digest = self.client.namespace.digest
            whose = tag_digest(tag) if tag else NO_TAG
            record = ChunkRecord(digest, keys.keys[index], keys.parent(index), index, keys.digests[index], whose)
            self.client.commit([(slot, record)], [slot] if is_answer else [])

    def store_tokens(self, tokens: list[int], session: bytes) -> PrefixKeys:
        """One request of a user's session with a prompt of its own: looked up, the rest stored, and told of; its keys.

        A chunk holds its key, again and again.
        """
        keys = self.keys_of(tokens)
        self.store_keys(keys, start=self.hits_of(keys, session))
        self.client.tell_state(session, NO_TAG, keys.keys[-1])
        return keys

    def keys_of(self, tokens: list[int]) -> PrefixKeys:
        """The keys of any prompt."""
        assert self.client.namespace is not None
        keys = PrefixKeys(self.client.namespace, CHUNK)
        keys.extend(tokens)
        return keys

    def store_keys(self, keys: PrefixKeys, start: int = 0) -> None:
        """Fill and commit the chunks of such a prompt from ``start`` on."""
        assert self.client.namespace is not None
        for index in range(start, len(keys.keys)):
            slot = self.take_slot()
            with self.payload(slot) as view:
                view[:] = named_content(keys.keys[index], self.pages)
            place = self.client.namespace.digest, keys.keys[index], keys.parent(index), index, keys.digests[index]
            self.client.commit([(slot, ChunkRecord(*place))])

    def hits_of(self, keys: PrefixKeys, session: bytes = b"") -> int:
        """How many leading chunks of such a prompt are ready; their bytes are compared with what was stored."""
        client, lookup = self.client, self.client.lookup(keys.keys, keys.digests, session=session)
        assert lookup is not None
        poll_until(client, lambda: client.lookups[lookup].is_answered and client.lookups[lookup].is_done, "the answer")
        answer = client.lookups[lookup]
        for key, slot in zip(keys.keys, answer.slots[: answer.ready], strict=False):
            with self.payload(slot) as view:
                assert view == named_content(key, self.pages)
        client.release(lookup)
        return answer.ready

    def check_slots(self, slots: Sequence[int], first_token: int = 0) -> None:
        """Leased slots hold the first chunks of a prompt."""
        for index, slot in enumerate(slots):
            with self.payload(slot) as view:
                assert view == content(index, first_token)

    def store_state(self, count: int, first_token: int = 0, *, tag: str = "", parts: int | None = None) -> None:
        """Fill and commit the state behind ``count`` chunks of a prompt; only its first ``parts``, if that is said."""
        assert self.client.namespace is not None
        keys, last = self.keys(count, first_token), count - 1
        whose = tag_digest(tag) if tag else NO_TAG
        place = self.client.namespace.digest, keys.keys[last], keys.parent(last), last, keys.digests[last], whose
        for part, record in enumerate(state_records(ChunkRecord(*place), self.state_parts)[:parts]):
            slot = self.take_slot()
            with self.payload(slot) as view:
                view[:] = content(count * 100 + part, first_token)
            self.client.commit([(slot, record)])

    def store_tail(self, count: int, tokens: int, first_token: int = 0) -> None:
        """Fill and commit the tail of so many tokens behind ``count`` chunks of a prompt."""
        assert self.client.namespace is not None
        keys = self.keys(count, first_token)
        key, digest = keys.tail(range(first_token, first_token + (count + 1) * CHUNK), count, tokens)
        slot = self.take_slot()
        with self.payload(slot) as view:
            view[:] = content(1000 + tokens, first_token)
        record = ChunkRecord(self.client.namespace.digest, key, keys.parent(count), count, digest)
        self.client.commit_tail(slot, record)

    def state_hit(self, count: int, first_token: int = 0) -> int:
        """From after how many chunks of a prompt it can go on: as an engine with recurrent layers asks."""
        keys = self.keys(count, first_token)
        lookup = self.client.lookup(keys.keys, keys.digests, state_parts=self.state_parts)
        assert lookup is not None
        client = self.client
        poll_until(client, lambda: client.lookups[lookup].is_answered and client.lookups[lookup].is_done, "the answer")
        boundary = client.lookups[lookup].boundary
        client.release(lookup)
        return boundary

    def look_up(
        self, count: int, first_token: int = 0, *, session: bytes = b"", hint: str = ""
    ) -> tuple[int, LookupAnswer]:
        """A lookup and its final answer; ``session`` names the user's session that asks."""
        keys = self.keys(count, first_token)
        lookup = self.client.lookup(keys.keys, keys.digests, session=session, hint=hint)
        assert lookup is not None
        client = self.client
        poll_until(client, lambda: client.lookups[lookup].is_answered and client.lookups[lookup].is_done, "the answer")
        return lookup, client.lookups[lookup]

    def hits(self, count: int, first_token: int = 0, *, session: bytes = b"", hint: str = "") -> int:
        """How many leading chunks of a prompt are ready; their bytes are compared with what was stored."""
        lookup, answer = self.look_up(count, first_token, session=session, hint=hint)
        for index, slot in enumerate(answer.slots[: answer.ready]):
            with self.payload(slot) as view:
                assert view == content(index, first_token, self.pages)
        self.client.release(lookup)
        return answer.ready

    def wait_hits(self, count: int, first_token: int = 0) -> None:
        """Until a whole prompt is ready: seals end a moment after their commit."""
        wait_for(lambda: self.hits(count, first_token) == count, f"{count} hits", deadline_s=ANSWER_S)

    def close(self) -> None:
        self.client.close()
        self.worker.leave()


@contextmanager
def lone_engine(**more: Any) -> Iterator[SmallEngine]:
    """An engine on a server of its own, in a directory of its own, for the length of a ``with`` block."""
    with private_runtime() as directory:
        root = directory / "cache"
        engine = SmallEngine.start(settings(root, promotion_wait_ms=20_000, **more))
        try:
            yield engine
        finally:
            engine.close()
            end_server(root)


def payload_bytes(pages: Sequence[LayerPage] = PAGES) -> int:
    """Bytes of one chunk's KV."""
    return sum(page.page_bytes for page in pages) * (CHUNK // BLOCK)


def named_content(key: bytes, pages: Sequence[LayerPage] = PAGES) -> bytes:
    """What the chunk with this key holds, if it is of a prompt of its own."""
    return key * (payload_bytes(pages) // len(key))


def content(index: int, first_token: int = 0, pages: Sequence[LayerPage] = PAGES) -> bytes:
    """What chunk ``index`` of a prompt holds."""
    return bytes([(index * 7 + first_token + 1) % 256]) * payload_bytes(pages)
