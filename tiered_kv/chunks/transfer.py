"""Copies between vLLM's paged KV and one rank's bytes of a slot: gather for stores, scatter for loads.

Owns the copying (``PagedKV``, one KV cache group) and where the groups lie in a rank's byte range (``RankKV``). Must
not decide which blocks move nor when (the worker does), nor look into a header. Called by the worker's copy threads;
``mark`` by the thread that runs the model. On an accelerator ``device_copy.py`` copies, on the CPU this file does.

A layer's tensor is a view ``[B, H, N, C]`` (blocks, KV heads, tokens, content) whose strides express the layout; dim 0
counts kernel blocks where those are smaller than vLLM's blocks. What has to hold is that a block's page is one dense
run of bytes; blocks may lie any distance apart. A tensor's storage is then a grid of equal rows, a page is a few
consecutive rows, and many layers are copied by one indexed copy::

    storage   | origin | row | row | row | ...            row = gcd(page, distance of blocks) bytes
    page of block b in layer l = rows  first[l] + b * step[l] ... + pages_rows - 1

On the CPU numpy copies the rows: one call for all layers that share a storage, on the calling thread alone and without
the GIL. torch's index_select and index_copy_ would start OpenMP threads beside vLLM's bound ones and are slower;
``put`` and assignments of void items hold the GIL. benchmarks/transfer.py measures them all.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tiered_kv.chunks.device import device_of
from tiered_kv.chunks.device_copy import CopyEngine, DeviceJob, Direction, RowRun, plan_rows
from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.chunks.paged_layer import PagedLayer, Rows
from tiered_kv.errors import UnsupportedModel

LOGICAL_AXES: Final = "KHNC"
"""Axes of one block's elements in logical order; K counts the kernel blocks and is there only if there are several."""

Mark = Any
"""An event behind what the model's thread had queued when it was taken; None on the CPU, where nothing is queued."""


class CopyJob(Protocol):
    """Copies of one direction that are waited for together, behind one mark.

    They may begin at once, and all have begun after ``launch``. Until ``wait`` has returned, also after an error,
    neither the blocks nor the slots may be given to anyone else. Threads: the one that began the job.
    """

    def launch(self) -> None:
        """Begin what has not begun."""

    def is_done(self) -> bool:
        """Whether every byte of what has begun has arrived; never blocks."""

    def wait(self) -> None:
        """Block until every byte of what has begun has arrived. What has not begun never will."""


class _AlreadyDone:
    def launch(self) -> None:
        return

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return


_DONE: Final = _AlreadyDone()


@dataclass(frozen=True)
class _Run:
    """Layers that follow each other in the payload and share a storage and a row size: copied by one call.

    Attributes:
        grid: The storage as rows ``[rows, bytes]``.
        first: Row of block 0 per layer, shaped for broadcasting to [layers, blocks, rows of a page].
        step: Rows from one block to the next per layer, of the same shape.
        offset_bytes: Where the run begins in the group's byte range.
    """

    grid: torch.Tensor
    first: Rows
    step: Rows
    page_rows: int
    offset_bytes: int
    size_bytes: int

    def rows_of(self, block_ids: Rows) -> Rows:
        return self.first + self.step * block_ids[None, :, None] + np.arange(self.page_rows, dtype=np.intp)

    def slot_rows(self, slot: npt.NDArray[np.uint8], blocks: int) -> npt.NDArray[np.uint8]:
        """The run's bytes of the slot as [layers, blocks, rows of a page, bytes]."""
        part = slot[self.offset_bytes : self.offset_bytes + self.size_bytes]
        return part.reshape(len(self.first), blocks, self.page_rows, -1)


class PagedKV:
    """One KV cache group of one rank: moves the pages of whole blocks between vLLM's tensors and a slot.

    Threads: on the CPU any number; on a device one per direction, and ``mark`` from the model's thread.
    """

    def __init__(
        self,
        pages: Sequence[LayerPage],
        tensors: Mapping[str, torch.Tensor],
        blocks_per_chunk: int,
        engine: CopyEngine | None = None,
    ) -> None:
        """Plan the copies.

        Args:
            pages: The group's layers in payload order.
            tensors: The registered KV tensor of every layer in ``pages``; more are allowed and ignored.
            blocks_per_chunk: Blocks of one chunk that are stored for these layers.
            engine: What copies; None: the CPU, or an engine of this group alone where the tensors lie on a device.

        Raises:
            UnsupportedModel: A tensor's page is not a dense run of bytes, devices or block counts differ, or the device
                cannot copy.
        """
        if not pages or blocks_per_chunk <= 0:
            raise ValueError(f"nothing to copy. layers={len(pages)} blocks_per_chunk={blocks_per_chunk}")
        self.layers: Final = tuple(PagedLayer(page, tensors[page.layer]) for page in pages)
        for layer in self.layers:
            layer.check()
        counts = {layer.tensor.shape[0] // layer.ratio for layer in self.layers}
        devices = {layer.tensor.device for layer in self.layers}
        if len(counts) > 1 or len(devices) > 1:
            raise UnsupportedModel(f"layers differ in block count or device. blocks={counts} devices={devices}")
        self.num_blocks: Final[int] = counts.pop()
        self.blocks_per_chunk: Final = blocks_per_chunk
        self.group_bytes: Final = sum(page.page_bytes for page in pages) * blocks_per_chunk
        self._engine: Final = engine or engine_for(devices.pop())
        self._copier: _HostCopier | _DeviceCopier
        if self._engine is None:
            self._copier = _HostCopier(_plan(self.layers, blocks_per_chunk), blocks_per_chunk)
        else:
            self._copier = _DeviceCopier(plan_rows(self.layers, blocks_per_chunk, self._engine))

    def mark(self) -> Mark:
        """What the calling thread has queued on its stream until now, for copies that have to come after it."""
        return None if self._engine is None else self._engine.mark()

    def gather(self, block_ids: Sequence[int], out: memoryview, mark: Mark = None) -> CopyJob:
        """Copy one chunk's pages into ``out``, the group's byte range of a slot, behind ``mark``.

        Args:
            block_ids: The chunk's blocks in token order.
            out: Writable, ``group_bytes`` long, valid until the copy is done.
        """
        job = _begin(self._engine, "save", mark)
        self.add_gather(job, block_ids, out)
        job.launch()
        return job

    def scatter(self, src: memoryview, block_ids: Sequence[int], first_block: int = 0, mark: Mark = None) -> CopyJob:
        """Copy the chunk's blocks ``first_block`` and following from ``src`` into the blocks ``block_ids``.

        Fewer blocks than the chunk has are copied where the GPU's prefix cache already holds the others.

        Args:
            src: The group's byte range of a slot, ``group_bytes`` long, valid until the copy is done.
            block_ids: Destinations, all different, in token order.
            first_block: Which of the chunk's blocks goes to ``block_ids[0]``.
        """
        job = _begin(self._engine, "load", mark)
        self.add_scatter(job, src, block_ids, first_block)
        job.launch()
        return job

    def add_gather(self, job: CopyJob, block_ids: Sequence[int], out: memoryview) -> None:
        """:meth:`gather` as a part of a job that saves."""
        if len(block_ids) != self.blocks_per_chunk:
            raise ValueError(f"a chunk has {self.blocks_per_chunk} blocks. observed={len(block_ids)}")
        self._copier.gather(job, self._checked(block_ids, out), np.frombuffer(out, dtype=np.uint8))

    def add_scatter(self, job: CopyJob, src: memoryview, block_ids: Sequence[int], first_block: int = 0) -> None:
        """:meth:`scatter` as a part of a job that loads."""
        if first_block < 0 or not 0 < len(block_ids) <= self.blocks_per_chunk - first_block:
            raise ValueError(
                f"blocks outside the chunk. first_block={first_block} blocks={len(block_ids)} "
                f"blocks_per_chunk={self.blocks_per_chunk}"
            )
        self._copier.scatter(job, np.frombuffer(src, dtype=np.uint8), self._checked(block_ids, src), first_block)

    def _checked(self, block_ids: Sequence[int], buffer: memoryview) -> Rows:
        # numpy's clip mode would quietly copy another block: an id outside the pool must never get there.
        ids = np.asarray(block_ids, dtype=np.intp)
        if int(ids.min()) < 0 or int(ids.max()) >= self.num_blocks:
            raise ValueError(f"block id outside the pool. blocks={self.num_blocks} ids={ids.tolist()}")
        if buffer.nbytes != self.group_bytes:
            raise ValueError(f"buffer has another size. expected={self.group_bytes} observed={buffer.nbytes}")
        return ids


def engine_for(device: torch.device) -> CopyEngine | None:
    """An engine for paged KV on a device, with staging memory of its own; None on the CPU, which copies by itself.

    Raises:
        UnsupportedModel: The device has no memory left, or torch no streams for it.
    """
    return None if device.type == "cpu" else CopyEngine(device_of(device))


def _begin(engine: CopyEngine | None, direction: Direction, mark: Mark) -> CopyJob:
    return _DONE if engine is None else engine.begin(direction, mark)


class RankKV:
    """Moves whole chunks of one rank between vLLM's tensors and a slot: all groups, one behind the other.

    Block ids of different groups are different blocks of one pool, also where two groups' layers lie in the same
    memory.

    Threads: as :class:`PagedKV`.
    """

    def __init__(
        self,
        group_pages: Sequence[Sequence[LayerPage]],
        tensors: Mapping[str, Any],
        stored_blocks: Sequence[int],
        state_pages: Sequence[Sequence[LayerPage]] = (),
        engine: CopyEngine | None = None,
    ) -> None:
        """Plan the copies.

        Args:
            group_pages: The layers of every group, in payload order.
            tensors: The registered KV tensor of every layer.
            stored_blocks: For every group, how many blocks of a chunk are stored.
            state_pages: The layers of every group of recurrent layers; a part of a state is one block of them.
            engine: What copies; None: the CPU, or an engine of this rank where the tensors lie on a device.

        Raises:
            UnsupportedModel: A tensor cannot be copied (see :class:`PagedKV`), or a part of a state is larger than a
                chunk.
        """
        self.engine: Final = engine or engine_for(tensors[group_pages[0][0].layer].device)
        self.groups: Final = tuple(
            PagedKV(pages, tensors, blocks, self.engine)
            for pages, blocks in zip(group_pages, stored_blocks, strict=True)
        )
        self._block_bytes: Final = tuple(
            group.group_bytes // blocks for group, blocks in zip(self.groups, stored_blocks, strict=True)
        )
        ends = list(accumulate(group.group_bytes for group in self.groups))
        self._ranges: Final = tuple(
            slice(end - group.group_bytes, end) for group, end in zip(self.groups, ends, strict=True)
        )
        self.rank_bytes: Final = ends[-1]
        self.states: Final = tuple(PagedKV(pages, tensors, 1, self.engine) for pages in state_pages)
        for state in self.states:
            if state.group_bytes > self.rank_bytes:
                raise UnsupportedModel(
                    "the state of a group of layers does not fit into a chunk. "
                    f"first_layer={state.layers[0].page.layer} bytes={state.group_bytes} chunk_bytes={self.rank_bytes}"
                )

    def mark(self) -> Mark:
        """As :meth:`PagedKV.mark`."""
        return None if self.engine is None else self.engine.mark()

    def copying(self) -> AbstractContextManager[None]:
        """Around copies in a thread that makes nothing else: its device, and what CUDA keeps for each thread."""
        return nullcontext() if self.engine is None else self.engine.device.copying()

    def begin(self, direction: Direction, mark: Mark) -> CopyJob:
        """Begin a job whose copies read and write pages after ``mark``.

        Raises:
            ValueError: There is no mark, and the KV lies on a device.
        """
        return _begin(self.engine, direction, mark)

    def gather(self, block_ids: Sequence[Sequence[int]], out: memoryview, job: CopyJob) -> None:
        """Copy one chunk's stored blocks, given per group, into ``out``, which is ``rank_bytes`` long.

        When a later group's copy cannot begin and this raises, those before it may have begun.
        """
        self._check(out)
        for group, place, ids in zip(self.groups, self._ranges, block_ids, strict=True):
            group.add_gather(job, ids, out[place])

    def scatter(self, src: memoryview, runs: Sequence[tuple[int, Sequence[int]]], job: CopyJob) -> None:
        """Copy from ``src`` into blocks, given per group as the first stored block to copy and where the blocks go.

        Raises as :meth:`gather`.
        """
        self._check(src)
        for group, place, (first, ids) in zip(self.groups, self._ranges, runs, strict=True):
            if ids:
                group.add_scatter(job, src[place], ids, first)

    def gather_state(self, part: int, block: int, out: memoryview, job: CopyJob) -> None:
        """Copy one part of a state, which is one block, into ``out``, which is ``rank_bytes`` long; zeros behind it."""
        self._check(out)
        size = self.states[part].group_bytes
        out[size:] = bytes(self.rank_bytes - size)  # the slot may have held another prompt's KV
        self.states[part].add_gather(job, (block,), out[:size])

    def scatter_state(self, src: memoryview, part: int, block: int, job: CopyJob) -> None:
        """Copy one part of a state from ``src``, which is ``rank_bytes`` long, into a block."""
        self._check(src)
        self.states[part].add_scatter(job, src[: self.states[part].group_bytes], (block,))

    def copied_bytes(self, blocks: Sequence[int]) -> int:
        """Size of so many blocks, given per group."""
        return sum(count * size for count, size in zip(blocks, self._block_bytes, strict=True))

    def _check(self, buffer: memoryview) -> None:
        if buffer.nbytes != self.rank_bytes:
            raise ValueError(f"buffer has another size. expected={self.rank_bytes} observed={buffer.nbytes}")


def _plan(layers: Sequence[PagedLayer], blocks: int) -> list[_Run]:
    """Join neighbours in the payload whose pages lie on one grid of rows."""
    grids = [(layer, gcd(layer.page.page_bytes, layer.block_stride_bytes)) for layer in layers]
    starts = [0]
    for position, ((left, left_row), (right, right_row)) in enumerate(pairwise(grids), 1):
        same = left.tensor.untyped_storage().data_ptr() == right.tensor.untyped_storage().data_ptr()
        aligned = (right.offset_bytes - left.offset_bytes) % left_row == 0
        if not (same and aligned and left_row == right_row and left.page.page_bytes == right.page.page_bytes):
            starts.append(position)
    runs, offset = [], 0
    for start, stop in pairwise([*starts, len(layers)]):
        run = _run(layers[start:stop], grids[start][1], offset, blocks)
        runs.append(run)
        offset += run.size_bytes
    return runs


def _run(layers: Sequence[PagedLayer], row_bytes: int, offset_bytes: int, blocks: int) -> _Run:
    page_bytes = layers[0].page.page_bytes
    origin = layers[0].offset_bytes % row_bytes
    return _Run(
        grid=layers[0].rows(row_bytes),
        first=np.array([(x.offset_bytes - origin) // row_bytes for x in layers], dtype=np.intp)[:, None, None],
        step=np.array([x.block_stride_bytes // row_bytes for x in layers], dtype=np.intp)[:, None, None],
        page_rows=page_bytes // row_bytes,
        offset_bytes=offset_bytes,
        size_bytes=len(layers) * page_bytes * blocks,
    )


class _HostCopier:
    """Copies on the calling thread; numpy drops the GIL for the length of each call."""

    def __init__(self, runs: Sequence[_Run], blocks: int) -> None:
        self._runs = [(run, run.grid.numpy()) for run in runs]
        self._blocks = blocks

    def gather(self, _: CopyJob, block_ids: Rows, slot: npt.NDArray[np.uint8]) -> None:
        for run, grid in self._runs:
            # mode="raise" would copy into a temporary first, so that an error leaves out unchanged.
            out = run.slot_rows(slot, self._blocks)
            grid.take(run.rows_of(block_ids), axis=0, out=out, mode="clip")

    def scatter(self, _: CopyJob, slot: npt.NDArray[np.uint8], block_ids: Rows, first_block: int) -> None:
        for run, grid in self._runs:
            part = run.slot_rows(slot, self._blocks)[:, first_block : first_block + len(block_ids)]
            grid[run.rows_of(block_ids)] = part


class _DeviceCopier:
    """Gives one group's copies to a job of the rank's engine."""

    def __init__(self, runs: Sequence[RowRun]) -> None:
        self.runs: Final = runs

    def gather(self, job: CopyJob, block_ids: Rows, slot: npt.NDArray[np.uint8]) -> None:
        assert isinstance(job, DeviceJob)
        job.add(self.runs, block_ids, slot, 0)

    def scatter(self, job: CopyJob, slot: npt.NDArray[np.uint8], block_ids: Rows, first_block: int) -> None:
        assert isinstance(job, DeviceJob)
        job.add(self.runs, block_ids, slot, first_block)
