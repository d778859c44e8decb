"""Copies between vLLM's paged KV and one rank's bytes of a slot: gather for stores, scatter for loads.

Owns the copying (``PagedKV``, one KV cache group) and where the groups lie in a rank's byte range (``RankKV``). Must
not decide which blocks move nor when (the worker does), nor look into a header. Called by the worker's copy threads;
``note_compute`` by the thread that runs the model. The only module outside ``tiered_kv.vllm`` that imports torch.

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

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.chunks.pinned import windows
from tiered_kv.errors import UnsupportedModel

LOGICAL_AXES: Final = "KHNC"
"""Axes of one block's elements in logical order; K counts the kernel blocks and is there only if there are several."""

DEVICE_WORD_BYTES: Final = 8
"""On a GPU rows are copied as words of this size where addresses allow; its indexed copies go element by element."""

Rows = npt.NDArray[np.intp]


class CopyDone(Protocol):
    """A copy that was started. Until it is done, neither the blocks nor the slot may be given to anyone else."""

    def is_done(self) -> bool:
        """Whether every byte has arrived; never blocks."""

    def wait(self) -> None:
        """Block until every byte has arrived."""


class _AlreadyDone:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return


_DONE: Final = _AlreadyDone()


@dataclass(frozen=True)
class PagedLayer:
    """One layer's tensor with its page, checked: where the page of a block lies in the tensor's storage, in bytes."""

    page: LayerPage
    tensor: torch.Tensor

    @cached_property
    def ratio(self) -> int:
        return self.page.shape[0] if self.page.axes.startswith("K") else 1

    @cached_property
    def offset_bytes(self) -> int:
        return int(self.tensor.storage_offset() * self.tensor.element_size())

    @cached_property
    def block_stride_bytes(self) -> int:
        return int(self.tensor.stride(0) * self.ratio * self.tensor.element_size())

    def check(self) -> None:
        tensor, name = self.tensor, self.page.layer
        if tensor.dim() != 4 or tensor.shape[0] < self.ratio or tensor.shape[0] % self.ratio:
            raise UnsupportedModel(
                "KV tensor is not [blocks, heads, tokens, content]. "
                f"layer={name} shape={tuple(tensor.shape)} kernel_blocks={self.ratio}"
            )
        inner = sum((extent - 1) * stride for extent, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
        span = (inner + (self.ratio - 1) * tensor.stride(0) + 1) * tensor.element_size()
        size = tensor[0].numel() * self.ratio * tensor.element_size()
        if not span == size == self.page.page_bytes <= self.block_stride_bytes:
            raise UnsupportedModel(
                f"a block's page is not one dense run of bytes. layer={name} span={span} size={size} "
                f"page={self.page.page_bytes} block_stride={self.block_stride_bytes}"
            )

    def read_block(self, block: int) -> npt.NDArray[Any]:
        """Copy a block's elements out by logical index, as signed integers [K, H, N, C]."""
        bits: npt.NDArray[Any] = self._bits(block).cpu().contiguous().numpy().copy()
        return bits

    def write_block(self, block: int, bits: npt.NDArray[Any]) -> None:
        """Set a block's elements by logical index; takes what ``read_block`` gives."""
        self._bits(block).copy_(torch.from_numpy(bits))

    def _bits(self, block: int) -> torch.Tensor:
        same_size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[self.tensor.element_size()]
        return self.tensor.view(same_size)[block * self.ratio : (block + 1) * self.ratio]


@dataclass(frozen=True)
class _Run:
    """Layers that follow each other in the payload and share a storage and a row size: copied by one call.

    Attributes:
        grid: The storage as rows ``[rows, bytes]``; on a GPU as words where addresses allow.
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

    Threads: on the CPU any number; on a GPU one thread at a time, and ``note_compute`` from the model's thread.
    """

    def __init__(self, pages: Sequence[LayerPage], tensors: Mapping[str, torch.Tensor], blocks_per_chunk: int) -> None:
        """Plan the copies.

        Args:
            pages: The group's layers in payload order.
            tensors: The registered KV tensor of every layer in ``pages``; more are allowed and ignored.
            blocks_per_chunk: Blocks of one chunk that are stored for these layers.

        Raises:
            UnsupportedModel: A tensor's page is not a dense run of bytes, or devices or block counts differ.
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
        runs = _plan(self.layers, blocks_per_chunk)
        self._copier: _HostCopier | _DeviceCopier
        device = devices.pop()
        if device.type == "cpu":
            self._copier = _HostCopier(runs, blocks_per_chunk)
        elif device.type == "cuda":
            self._copier = _DeviceCopier(runs, blocks_per_chunk, self.group_bytes, device)
        else:
            raise UnsupportedModel(f"KV on a device of this type cannot be copied. device={device}")

    def gather(self, block_ids: Sequence[int], out: memoryview) -> CopyDone:
        """Copy one chunk's pages into ``out``, the group's byte range of a slot.

        Args:
            block_ids: The chunk's blocks in token order.
            out: Writable, ``group_bytes`` long, valid until the copy is done.
        """
        if len(block_ids) != self.blocks_per_chunk:
            raise ValueError(f"a chunk has {self.blocks_per_chunk} blocks. observed={len(block_ids)}")
        return self._copier.gather(self._checked(block_ids, out), np.frombuffer(out, dtype=np.uint8))

    def scatter(self, src: memoryview, block_ids: Sequence[int], first_block: int = 0) -> CopyDone:
        """Copy the chunk's blocks ``first_block`` and following from ``src`` into the blocks ``block_ids``.

        Fewer blocks than the chunk has are copied where the GPU's prefix cache already holds the others.

        Args:
            src: The group's byte range of a slot, ``group_bytes`` long, valid until the copy is done.
            block_ids: Destinations, all different, in token order.
            first_block: Which of the chunk's blocks goes to ``block_ids[0]``.
        """
        if first_block < 0 or not 0 < len(block_ids) <= self.blocks_per_chunk - first_block:
            raise ValueError(
                f"blocks outside the chunk. first_block={first_block} blocks={len(block_ids)} "
                f"blocks_per_chunk={self.blocks_per_chunk}"
            )
        return self._copier.scatter(np.frombuffer(src, dtype=np.uint8), self._checked(block_ids, src), first_block)

    def note_compute(self) -> None:
        """Remember what the model's thread has queued on its stream: later copies run after it. Free on the CPU."""
        self._copier.note_compute()

    def _checked(self, block_ids: Sequence[int], buffer: memoryview) -> Rows:
        # numpy's clip mode would quietly copy another block: an id outside the pool must never get there.
        ids = np.asarray(block_ids, dtype=np.intp)
        if int(ids.min()) < 0 or int(ids.max()) >= self.num_blocks:
            raise ValueError(f"block id outside the pool. blocks={self.num_blocks} ids={ids.tolist()}")
        if buffer.nbytes != self.group_bytes:
            raise ValueError(f"buffer has another size. expected={self.group_bytes} observed={buffer.nbytes}")
        return ids


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
    ) -> None:
        """Plan the copies.

        Args:
            group_pages: The layers of every group, in payload order.
            tensors: The registered KV tensor of every layer.
            stored_blocks: For every group, how many blocks of a chunk are stored.
            state_pages: The layers of every group of recurrent layers; a part of a state is one block of them.

        Raises:
            UnsupportedModel: A tensor cannot be copied (see :class:`PagedKV`), or a part of a state is larger than a
                chunk.
        """
        self.groups: Final = tuple(
            PagedKV(pages, tensors, blocks) for pages, blocks in zip(group_pages, stored_blocks, strict=True)
        )
        self._block_bytes: Final = tuple(
            group.group_bytes // blocks for group, blocks in zip(self.groups, stored_blocks, strict=True)
        )
        ends = list(accumulate(group.group_bytes for group in self.groups))
        self._ranges: Final = tuple(
            slice(end - group.group_bytes, end) for group, end in zip(self.groups, ends, strict=True)
        )
        self.rank_bytes: Final = ends[-1]
        self.states: Final = tuple(PagedKV(pages, tensors, 1) for pages in state_pages)
        for state in self.states:
            if state.group_bytes > self.rank_bytes:
                raise UnsupportedModel(
                    "the state of a group of layers does not fit into a chunk. "
                    f"first_layer={state.layers[0].page.layer} bytes={state.group_bytes} chunk_bytes={self.rank_bytes}"
                )

    def gather(self, block_ids: Sequence[Sequence[int]], out: memoryview, started: list[CopyDone]) -> None:
        """Copy one chunk's stored blocks, given per group, into ``out``, which is ``rank_bytes`` long.

        Every copy that begins is added to ``started``, also when a later one cannot begin and raises: until they are
        done, neither the blocks nor the slot may be given to anyone else.
        """
        self._check(out)
        for group, place, ids in zip(self.groups, self._ranges, block_ids, strict=True):
            started.append(group.gather(ids, out[place]))

    def scatter(self, src: memoryview, runs: Sequence[tuple[int, Sequence[int]]], started: list[CopyDone]) -> None:
        """Copy from ``src`` into blocks, given per group as the first stored block to copy and where the blocks go.

        ``started`` as for :meth:`gather`.
        """
        self._check(src)
        for group, place, (first, ids) in zip(self.groups, self._ranges, runs, strict=True):
            if ids:
                started.append(group.scatter(src[place], ids, first))

    def gather_state(self, part: int, block: int, out: memoryview, started: list[CopyDone]) -> None:
        """Copy one part of a state, which is one block, into ``out``, which is ``rank_bytes`` long; zeros behind it."""
        self._check(out)
        size = self.states[part].group_bytes
        out[size:] = bytes(self.rank_bytes - size)  # the slot may have held another prompt's KV
        started.append(self.states[part].gather((block,), out[:size]))

    def scatter_state(self, src: memoryview, part: int, block: int, started: list[CopyDone]) -> None:
        """Copy one part of a state from ``src``, which is ``rank_bytes`` long, into a block."""
        self._check(src)
        started.append(self.states[part].scatter(src[: self.states[part].group_bytes], (block,)))

    def copied_bytes(self, blocks: Sequence[int]) -> int:
        """Size of so many blocks, given per group."""
        return sum(count * size for count, size in zip(blocks, self._block_bytes, strict=True))

    def _check(self, buffer: memoryview) -> None:
        if buffer.nbytes != self.rank_bytes:
            raise ValueError(f"buffer has another size. expected={self.rank_bytes} observed={buffer.nbytes}")

    def note_compute(self) -> None:
        """Remember what the model's thread has queued on its stream: later copies run after it. Free on the CPU."""
        for group in (*self.groups, *self.states):
            group.note_compute()


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
    tensor, page_bytes = layers[0].tensor, layers[0].page.page_bytes
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    origin = layers[0].offset_bytes % row_bytes
    count = (storage.numel() - origin) // row_bytes
    grid = storage[origin : origin + count * row_bytes].view(count, row_bytes)
    if tensor.device.type != "cpu" and (grid.data_ptr() | row_bytes | offset_bytes) % DEVICE_WORD_BYTES == 0:
        grid = grid.view(torch.int64)
    return _Run(
        grid=grid,
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

    def gather(self, block_ids: Rows, slot: npt.NDArray[np.uint8]) -> CopyDone:
        for run, grid in self._runs:
            # mode="raise" would copy into a temporary first, so that an error leaves out unchanged.
            out = run.slot_rows(slot, self._blocks)
            grid.take(run.rows_of(block_ids), axis=0, out=out, mode="clip")
        return _DONE

    def scatter(self, slot: npt.NDArray[np.uint8], block_ids: Rows, first_block: int) -> CopyDone:
        for run, grid in self._runs:
            part = run.slot_rows(slot, self._blocks)[:, first_block : first_block + len(block_ids)]
            grid[run.rows_of(block_ids)] = part
        return _DONE

    def note_compute(self) -> None:
        return


class _EventDone:
    """Done when an event recorded behind the copy has passed. Keeps the host buffer alive until then."""

    def __init__(self, stream: Any, buffer: object) -> None:
        self._buffer = buffer
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def is_done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class _DeviceCopier:
    """Copies on a stream of its own, behind what ``note_compute`` saw, through one staging buffer per direction.

    Not yet run on a GPU (README, "Status"). Copies of one direction follow each other on its stream, so the next
    gather's index_select cannot overwrite staging that an earlier copy to the host still reads.

    ===============  ==============  ===============================================
    field            owner           how it crosses
    ``_compute``     model's thread  replaced whole under ``_lock``, read under it
    all others       copy thread     not shared
    ===============  ==============  ===============================================
    """

    def __init__(self, runs: Sequence[_Run], blocks: int, group_bytes: int, device: torch.device) -> None:
        self._runs, self._blocks, self._device = runs, blocks, device
        self._lock = threading.Lock()
        self._compute = torch.cuda.Event()
        self._streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]
        self._staging = [torch.empty(group_bytes, dtype=torch.uint8, device=device) for _ in self._streams]
        self.note_compute()

    def note_compute(self) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        with self._lock:
            self._compute = event

    def gather(self, block_ids: Rows, slot: npt.NDArray[np.uint8]) -> CopyDone:
        stream, staging = self._begin(0)
        with torch.cuda.stream(stream):
            for run in self._runs:
                out = self._staged(run, staging).view(-1, run.grid.shape[1])
                torch.index_select(run.grid, 0, self._index(run, block_ids), out=out)
            for window in windows(slot.ctypes.data, slot.nbytes):
                torch.from_numpy(slot[window]).copy_(staging[window], non_blocking=True)
        return _EventDone(stream, slot)

    def scatter(self, slot: npt.NDArray[np.uint8], block_ids: Rows, first_block: int) -> CopyDone:
        stream, staging = self._begin(1)
        with torch.cuda.stream(stream):
            for window in windows(slot.ctypes.data, slot.nbytes):
                staging[window].copy_(torch.from_numpy(slot[window]), non_blocking=True)
            for run in self._runs:
                part = self._staged(run, staging)[:, first_block : first_block + len(block_ids)]
                run.grid.index_copy_(0, self._index(run, block_ids), part.reshape(-1, run.grid.shape[1]))
        return _EventDone(stream, slot)

    def _begin(self, direction: int) -> tuple[Any, torch.Tensor]:
        with self._lock:
            event = self._compute
        self._streams[direction].wait_event(event)
        return self._streams[direction], self._staging[direction]

    def _staged(self, run: _Run, staging: torch.Tensor) -> torch.Tensor:
        part = staging[run.offset_bytes : run.offset_bytes + run.size_bytes].view(run.grid.dtype)
        return part.view(len(run.first), self._blocks, run.page_rows, -1)

    def _index(self, run: _Run, block_ids: Rows) -> torch.Tensor:
        return torch.from_numpy(run.rows_of(block_ids).reshape(-1)).to(self._device)
