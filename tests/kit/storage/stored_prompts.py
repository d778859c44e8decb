"""Stored prompts: real namespaces, real keys of real tokens, sealed blobs, in any storage the command line can open."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tests.kit.samples.formats import namespace_fields
from tiered_kv.chunks.geometry import ChunkGeometry, LayerPage
from tiered_kv.chunks.header import BlobFormat, read_header
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.naming import BlobName
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.keys.state_keys import state_records
from tiered_kv.keys.tags import NO_TAG, tag_digest
from tiered_kv.ops.storage import Storage

STORED_BY = "tiered_kv/0.9.1 vllm/0.32.1 cuda/FLASH_ATTN"

CHUNK = 32
"""Tokens of a chunk."""


def tokens(seed: int, chunks: int, tail: int = 0) -> list[int]:
    """A prompt of so many chunks and some tokens; prompts of one seed begin alike."""
    return [random.Random(f"{seed} {i}").randrange(1 << 17) for i in range(chunks * CHUNK + tail)]


@dataclass(frozen=True)
class Model:
    """One namespace.

    Attributes:
        payload_bytes: Of a chunk; a multiple of 4096. A blob has a header of 4096 bytes before it.
        state_parts: Of a state of its recurrent layers; 0: it has none.
    """

    weights: str = "hf:0123456789abcdef0123456789abcdef01234567"
    epoch: str = "base-0"
    payload_bytes: int = 4096
    fields: dict[str, object] = field(default_factory=dict)
    state_parts: int = 0

    @property
    def namespace(self) -> Namespace:
        given = {"weights": self.weights, "epoch": self.epoch, "block_tokens": 16, "chunk_tokens": CHUNK}
        states = {"recurrent_state": [{"layers": [f"mixer.{n}"]} for n in range(self.state_parts)]}
        return Namespace.from_fields(namespace_fields(**(given | self.fields | (states if self.state_parts else {}))))

    @property
    def form(self) -> BlobFormat:
        page = LayerPage("layer.0", "U8", (self.payload_bytes // 2,), "C")
        return BlobFormat(self.namespace.digest, ChunkGeometry(16, CHUNK, ((page,),)))

    def keys(self, prompt: Sequence[int]) -> PrefixKeys:
        keys = PrefixKeys(self.namespace, CHUNK)
        keys.extend(prompt)
        return keys

    def names(self, prompt: Sequence[int]) -> list[BlobName]:
        keys = self.keys(prompt)
        return [BlobName(self.namespace.digest, key, keys.parent(i), i) for i, key in enumerate(keys.keys)]

    def blobs(self, prompt: Sequence[int], tag: str = "", stored_by: str = STORED_BY) -> list[tuple[BlobName, bytes]]:
        """The prompt's blobs; equal prompts of equal tags give equal bytes."""
        keys, form, made = self.keys(prompt), self.form, []
        for index, name in enumerate(self.names(prompt)):
            data = bytearray(form.blob_bytes)
            data[form.header_bytes :] = random.Random(name.key).randbytes(self.payload_bytes)
            whose = tag_digest(tag) if tag else NO_TAG
            place = name.namespace, name.key, name.parent, index
            form.seal(memoryview(data), ChunkRecord(*place, keys.digests[index], whose, stored_by), 1_700_000_000)
            made.append((name, bytes(data)))
        return made

    def states(
        self, prompt: Sequence[int], *boundaries: int, tag: str = "", stored_by: str = STORED_BY
    ) -> list[tuple[BlobName, bytes]]:
        """The parts of the states behind so many chunks of a prompt, boundary by boundary."""
        form, made = self.form, []
        for boundary in boundaries:
            whole = dict(self.blobs(prompt, tag, stored_by))
            chunk = read_header(memoryview(whole[self.names(prompt)[boundary - 1]])).header.record
            for record in state_records(chunk, self.state_parts):
                data = bytearray(form.blob_bytes)
                data[form.header_bytes :] = random.Random(record.key).randbytes(self.payload_bytes)
                form.seal(memoryview(data), msgspec.structs.replace(record, stored_by=stored_by), 1_700_000_000)
                made.append((BlobName.of(record), bytes(data)))
        return made

    def store_states(
        self, storage: Storage, prompt: Sequence[int], *boundaries: int, tag: str = "", stored_by: str = STORED_BY
    ) -> list[BlobName]:
        """Write the states behind so many chunks of a prompt that is stored; returns the names of their parts."""
        made = self.states(prompt, *boundaries, tag=tag, stored_by=stored_by)
        for name, data in made:
            storage.write(name, memoryview(data))
        return [name for name, _ in made]

    def tail(self, prompt: Sequence[int], chunks: int, length: int) -> tuple[BlobName, bytes]:
        """The tail of so many tokens behind so many chunks of a prompt."""
        keys, form = self.keys(prompt), self.form
        key, digest = keys.tail(prompt, chunks, length)
        data = bytearray(form.blob_bytes)
        data[form.header_bytes :] = random.Random(key).randbytes(self.payload_bytes)
        record = ChunkRecord(self.namespace.digest, key, keys.parent(chunks), chunks, digest, NO_TAG, STORED_BY)
        form.seal(memoryview(data), record, 1_700_000_000)
        return BlobName.of(record), bytes(data)

    def store(
        self, storage: Storage, *prompts: Sequence[int], tag: str = "", stored_by: str = STORED_BY
    ) -> list[BlobName]:
        """Write the record and all chunks of the prompts; returns the names of the last prompt's."""
        storage.write_record(self.namespace, stored_by)
        names: list[BlobName] = []
        for prompt in prompts:
            names = []
            for name, data in self.blobs(prompt, tag, stored_by):
                storage.write(name, memoryview(data))
                names.append(name)
        return names


def fingerprint(data: bytes) -> str:
    """Short name of some bytes, to compare what was stored with what came back."""
    return hashlib.sha256(data).hexdigest()[:16]
