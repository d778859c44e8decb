"""Paged KV on the device, chunks of it, and slots for them in pinned host memory: what a worker has, without vLLM."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tiered_kv.chunks.device import TorchDevice
from tiered_kv.chunks.device_copy import RING_SLICES, SLICE_BYTES, CopyEngine
from tiered_kv.chunks.pinned import WINDOW_BYTES
from tiered_kv.chunks.transfer import CopyJob, RankKV
from tools.gpu_proof.host_memory import GIB, MIB, HostMemory
from tools.gpu_proof.section import Proof
from tools.gpu_proof.shapes import Shape, place

CHUNK_TOKENS: Final = 256
STAGED_ONLY: Final = 1 << 62
DIRECT_ALWAYS: Final = 1
WAYS: Final = ("staged", "direct")
DRY_LAYERS: Final = 3


class World:
    """Chunks at random places of a pool: half of them to be saved from, half of them to be loaded into."""

    def __init__(
        self,
        proof: Proof,
        shape: Shape,
        *,
        pool_bytes: int = 6 * GIB,
        host_bytes: int = 4 * GIB,
        chunk_tokens: int = CHUNK_TOKENS,
        chunks: int = 64,
    ) -> None:
        """Allocate it.

        Args:
            pool_bytes, host_bytes: At most; less where so many chunks need less.
        """
        self.proof = proof
        self.shape = shape.scaled(min(DRY_LAYERS, shape.layers)) if proof.is_dry else shape
        self.per_chunk: Final = max(1, chunk_tokens // self.shape.tokens)
        chunk_bytes = self.shape.block_bytes * self.per_chunk
        fitting = min(proof.size(pool_bytes) // (2 * chunk_bytes), proof.size(host_bytes) // chunk_bytes)
        self.chunks: Final = max(2, min(chunks, fitting))
        self.blocks: Final = 2 * self.per_chunk * self.chunks + 2
        self.raw: Final = torch.empty(self.blocks * self.shape.block_bytes, dtype=torch.uint8, device=proof.device)
        self.placed: Final = place(self.raw, self.shape, self.blocks)
        self.chunk_bytes: Final = chunk_bytes
        self.memory: Final = HostMemory(-(-self.chunks * chunk_bytes // (2 * MIB)) * 2 * MIB)
        if cuda := proof.cuda():
            self.memory.register(cuda, window_bytes=WINDOW_BYTES)
        order = np.random.default_rng(0).permutation(self.blocks).tolist()
        picked = [order[i * self.per_chunk : (i + 1) * self.per_chunk] for i in range(2 * self.chunks)]
        self.sources: Final[Sequence[list[int]]] = picked[: self.chunks]
        self.targets: Final[Sequence[list[int]]] = picked[self.chunks :]

    @property
    def nbytes(self) -> int:
        """Of all chunks."""
        return self.chunks * self.chunk_bytes

    def view(self, chunk: int) -> memoryview:
        """The same as the cache hands it out."""
        return self.memory.view(chunk * self.chunk_bytes, self.chunk_bytes)

    def slot(self, chunk: int) -> npt.NDArray[np.uint8]:
        """A chunk's bytes on the host."""
        return self.memory.array[chunk * self.chunk_bytes : (chunk + 1) * self.chunk_bytes]

    def engine(
        self, way: str, *, slice_bytes: int = SLICE_BYTES, ring_slices: int = RING_SLICES, device: Any = None
    ) -> RankKV:
        """A rank that copies it: ``staged``, ``direct`` or as a worker chooses (``chosen``)."""
        least = {"staged": STAGED_ONLY, "direct": DIRECT_ALWAYS, "chosen": None}[way]
        used: TorchDevice = device or self.proof.engine_device(has_batch=way != "staged")
        size = max(64 << 10, int(slice_bytes / 256)) if self.proof.is_dry else slice_bytes
        made = CopyEngine(used, slice_bytes=size, ring_slices=ring_slices, direct_bytes=least)
        pages = [placed.page for placed in self.placed]
        tensors = {placed.page.layer: placed.tensor for placed in self.placed}
        return RankKV([pages], tensors, [self.per_chunk], engine=made)

    def save(self, rank: RankKV, mark: Any = None) -> CopyJob:
        """Begin to save every chunk; the caller waits."""
        job = rank.begin("save", mark or rank.mark())
        for ids, chunk in zip(self.sources, range(self.chunks), strict=True):
            rank.gather([ids], self.view(chunk), job)
        job.launch()
        return job

    def load(self, rank: RankKV, mark: Any = None, *, firsts: Sequence[int] = ()) -> CopyJob:
        """Begin to load every chunk, each from its block ``firsts`` on; the caller waits."""
        job = rank.begin("load", mark or rank.mark())
        for chunk, ids in enumerate(self.targets):
            first = firsts[chunk] if firsts else 0
            rank.scatter(self.view(chunk), [(first, ids[first:])], job)
        job.launch()
        return job

    def expected_slot(self, before: npt.NDArray[np.uint8], chunk: int) -> bytes:
        """What saving a chunk has to give, page by page."""
        return b"".join(
            before[placed.bytes_of(block)].tobytes() for placed in self.placed for block in self.sources[chunk]
        )

    def expect_loaded(self, expected: npt.NDArray[np.uint8], chunk: int, first: int) -> None:
        """Do in ``expected`` what loading a chunk has to do, page by page."""
        slot, at = self.slot(chunk), 0
        for placed in self.placed:
            size = placed.page.page_bytes
            for number, block in enumerate(self.targets[chunk]):
                if number >= first:
                    expected[placed.bytes_of(block)] = slot[at + number * size : at + (number + 1) * size]
            at += self.per_chunk * size

    def close(self) -> None:
        """Give the memory back."""
        self.memory.close()
        if not self.proof.is_dry:
            torch.cuda.empty_cache()


@contextmanager
def world(proof: Proof, shape: Shape, **options: Any) -> Iterator[World]:
    """A world that is given back at the end."""
    made = World(proof, shape, **options)
    try:
        yield made
    finally:
        made.close()
