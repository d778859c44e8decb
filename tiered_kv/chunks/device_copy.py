"""The copy engine of a rank whose paged KV lies on an accelerator: pages <-> slots, many chunks at a time.

Owns staging memory, streams and every wait between them. Must not decide which blocks move nor when (the worker does).
Called through ``PagedKV`` and ``RankKV`` (``transfer.py``) by the load and the save thread, and by the layout test.

A copy engine of the GPU moves long runs fast, and pages are short. So pages pass a dense staging buffer, a *slice* at a
time: pieces of as many chunks as fit, whatever their size. Each direction has a ring of slices and two streams::

    save   kernels:  wait mark | gather -> staging[i] | record gathered       gather of i + 1 runs under the copy of i
           copies:   few bytes | wait gathered | staging[i] -> slots | record free[i]
    load   copies:   few bytes | slots -> staging[i] | record arrived         needs no mark: staging is ours
           kernels:  wait mark | wait arrived | staging[i] -> pages | record free[i]

staging[i] and its row numbers are used again when the host has seen free[i]. That bounds what is queued, and the
memory: ``RING_SLICES`` slices per direction for any model. A *mark* is an event on the model's stream; what the model
queued before it is done before a copy reads or writes pages. The few bytes go the other way, and let the model's own
copies in between two slices (``let_others_in``). Behind the last event of a job nothing touches memory of the engine.

A storage is a grid of equal rows (``transfer.py``), and torch's indexed copies move them. Layers of different page
sizes share a grid of smaller rows. Where each piece of a chunk that is one run of bytes on both sides has at least
``DIRECT_BYTES`` of its direction, they go without staging and without a kernel by one call of the driver.

Which thread owns what: a lane belongs to the thread of its direction, a job to the thread that began it; nothing else
changes after construction.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tiered_kv.chunks.cuda import CudaError
from tiered_kv.chunks.device import Addresses, TorchDevice
from tiered_kv.chunks.paged_layer import PagedLayer, Rows
from tiered_kv.chunks.pinned import WINDOW_BYTES, windows
from tiered_kv.errors import UnsupportedModel

logger = logging.getLogger(__name__)

Direction = Literal["load", "save"]

SLICE_BYTES: Final = 16 << 20
"""0.3 ms of a PCIe 5 link: long against what a launch costs, short against a step."""

RING_SLICES: Final = 3
"""One is gathered, one copied, one waits, so that neither stream idles while the host prepares the next."""

INDEX_ROWS: Final = 1 << 16
"""Row numbers of one slice: a slice of smaller rows than 256 bytes holds less than ``SLICE_BYTES``."""

ROW_BYTES_MIN: Final = 256
"""Layers of different pages share a grid if its rows are not smaller: the row numbers are 3 % of the bytes then."""

DIRECT_BYTES: Final[Mapping[Direction, int]] = {"load": 64 << 10, "save": 256 << 10}
"""From these sizes of a fragment on batched copies are at least as fast as staged ones where it matters. On an H100, in
GB/s: loads of 64 KiB beside a prefill 50 against 31, alone 44 against 51; saves of 64 KiB beside a decoding model 30
against 51; saves of 256 KiB beside it 50, beside a prefill 48 against 31."""

ALIGN_BYTES: Final = 16
"""Where the rows of a grid begin in staging, so that they can be copied as words."""

WORDS: Final = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Indexed copies go element by element, so the largest that addresses allow is taken."""


@dataclass(frozen=True, slots=True)
class RowRun:
    """Layers that follow each other in the payload and lie on one grid: copied by one call for any number of chunks.

    Attributes:
        grid: The storage as rows ``[rows, words]``.
        first, step, block: For each row of a chunk's part of a slot, in the slot's order: the grid's row for block 0,
            rows from one block to the next, and which of the chunk's blocks it belongs to. Shape ``[n]`` each.
        offset_bytes: Where the run begins in the group's byte range.
        may_be_direct: Whether some choice of blocks has no fragment below the engine's limit.
        places: All rows of a chunk's part of a slot, in order.
        same_step: What every step is; None: layers differ.
    """

    grid: torch.Tensor
    row_bytes: int
    first: Rows
    step: Rows
    block: Rows
    offset_bytes: int
    may_be_direct: bool
    places: Rows
    same_step: int | None

    @property
    def size_bytes(self) -> int:
        return len(self.first) * self.row_bytes

    def rows_of(self, block_ids: Rows) -> Rows:
        """The grid's rows of a whole chunk in these blocks. An indexer's pages are tens of thousands."""
        if self.same_step is None:
            return self.first + self.step * block_ids[self.block]
        rows = np.take(block_ids * self.same_step, self.block)
        rows += self.first
        return rows


class Fragments(NamedTuple):
    """Bytes that are one run on both sides: addresses on the device and on the host, sizes; one each."""

    device: Addresses
    host: Addresses
    sizes: Addresses


@dataclass(slots=True)
class _Piece:
    """Rows of one run and one chunk that move in the same slice.

    Attributes:
        rows: Rows of the grid, in the slot's order.
        places: Which rows of the run's part of the slot they are, ascending.
        slot: The run's part of the slot.
        staging_bytes: Where they begin in the slice.
    """

    run: RowRun
    rows: Rows
    places: Rows
    slot: npt.NDArray[np.uint8]
    is_direct: bool
    staging_bytes: int = 0
    _fragments: Fragments | None = None

    @property
    def size_bytes(self) -> int:
        return len(self.rows) * self.run.row_bytes

    def cut(self, rows: int) -> tuple["_Piece", "_Piece"]:
        """The first ``rows`` rows, and the others."""
        head = _Piece(self.run, self.rows[:rows], self.places[:rows], self.slot, self.is_direct)
        return head, _Piece(self.run, self.rows[rows:], self.places[rows:], self.slot, self.is_direct)

    def spans(self) -> list[tuple[int, int]]:
        """Where the rows lie in ``slot``: first byte and size of each run of consecutive ones, within a window."""
        size, address = self.run.row_bytes, self.slot.ctypes.data
        first, count = int(self.places[0]), len(self.places)
        if int(self.places[-1]) - first + 1 == count:
            return _within_windows(address, first * size, count * size)
        starts, counts = _joined(self.places[1:] == self.places[:-1] + 1)
        spans = []
        for start, length in zip((self.places[starts] * size).tolist(), (counts * size).tolist(), strict=True):
            spans += _within_windows(address, start, length)
        return spans

    def fragments(self) -> Fragments:
        """The rows, those that are neighbours on both sides joined; looked for once."""
        if self._fragments is None:
            self._fragments = self._find_fragments()
        return self._fragments

    def _find_fragments(self) -> Fragments:
        together = (self.rows[1:] == self.rows[:-1] + 1) & (self.places[1:] == self.places[:-1] + 1)
        starts, counts = _joined(together)
        size = self.run.row_bytes
        return Fragments(
            self.run.grid.data_ptr() + self.rows[starts].astype(np.int64) * size,
            self.slot.ctypes.data + self.places[starts].astype(np.int64) * size,
            counts.astype(np.int64) * size,
        )


def _within_windows(address: int, start: int, size: int) -> list[tuple[int, int]]:
    """Cut bytes of a slot that lies at an address: first byte and size of each part within a window."""
    return [(start + part.start, part.stop - part.start) for part in windows(address + start, size)]


def _joined(follows: npt.NDArray[np.bool_]) -> tuple[Rows, Rows]:
    """Where runs of followers begin, and how long they are; ``follows`` says it of all but the first."""
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    return starts, np.diff(np.append(starts, len(follows) + 1))


def _cut_to_windows(fragments: Fragments) -> Fragments:
    """Fragments whose host side lies in one window each; hardly any is cut."""
    device, host, sizes = fragments
    if bool((host // WINDOW_BYTES == (host + sizes - 1) // WINDOW_BYTES).all()):
        return fragments
    rows = [
        (page + part.start, slot + part.start, part.stop - part.start)
        for page, slot, size in zip(device.tolist(), host.tolist(), sizes.tolist(), strict=True)
        for part in windows(slot, size)
    ]
    return Fragments(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)))


@dataclass(slots=True)
class _Slice:
    """One place of a ring: staging on the device, row numbers on both sides, and the event behind its last use."""

    staging: torch.Tensor
    rows_host: torch.Tensor
    rows: torch.Tensor
    free: Any = None
    numbered: int = 0

    def number(self, arranged: "Sequence[Sequence[_Piece]]") -> "list[tuple[RowRun, torch.Tensor, torch.Tensor]]":
        """Write the row numbers of staged pieces down, for :meth:`send_rows`.

        Returns:
            For each run its row numbers on the device ``[n]`` and its rows in staging ``[n, words]``.
        """
        calls: list[tuple[RowRun, torch.Tensor, torch.Tensor]] = []
        used = 0
        for of_run in arranged:
            run, first = of_run[0].run, used
            for piece in of_run:
                # Not through numpy: pinned memory is written where the race detector of the tests sees it.
                self.rows_host[used : used + len(piece.rows)].copy_(torch.from_numpy(piece.rows))
                used += len(piece.rows)
            begin = of_run[0].staging_bytes
            staged = self.staging[begin : begin + (used - first) * run.row_bytes].view(run.grid.dtype)
            calls.append((run, self.rows[first:used], staged.view(-1, run.grid.shape[1])))
        self.numbered = used
        return calls

    def send_rows(self) -> None:
        """Queue the copy of the row numbers to the device on the current stream."""
        if self.numbered:
            self.rows[: self.numbered].copy_(self.rows_host[: self.numbered], non_blocking=True)


@dataclass(slots=True)
class _Lane:
    """One direction. Threads: one at a time."""

    direction: Direction
    kernels: Any
    copies: Any
    ring: list[_Slice]
    few_bytes: torch.Tensor
    few_bytes_host: torch.Tensor
    turns: int = 0

    def next_slice(self) -> _Slice:
        """The place of the ring that was used longest ago; waits until nothing reads or writes it any more."""
        taken = self.ring[self.turns % len(self.ring)]
        self.turns += 1
        if taken.free is not None:
            taken.free.synchronize()
        return taken

    def let_others_in(self) -> None:
        """Queue a few bytes the other way on the current stream, which is that of copies, in front of a slice.

        A GPU's copy engine serves one stream for as long as that has a copy ready: without this the few bytes of a
        model's sampled tokens waited for the end of the job (40 ms behind 2 GiB on an H100). It turns to other streams
        while this one waits for another engine: that of the other direction. Not for a kernel, which waits for a
        multiprocessor beside a prefill (9 GB/s were left of 31). In front, because a slice's event is behind them then:
        when a job has ended, vLLM's sleep may unmap this memory.
        """
        if self.direction == "save":
            self.few_bytes.copy_(self.few_bytes_host, non_blocking=True)
        else:
            self.few_bytes_host.copy_(self.few_bytes, non_blocking=True)

    def settle(self, taken: _Slice) -> None:
        """Wait for all that was queued, after a launch that failed half way: its slice has no event to wait for."""
        taken.free = None
        self.kernels.synchronize()
        self.copies.synchronize()


class CopyEngine:
    """Staging, streams and the order of copies for all KV cache groups of one rank.

    Threads: the jobs of one direction by one thread at a time; ``mark`` by any.
    """

    def __init__(
        self,
        device: TorchDevice,
        *,
        slice_bytes: int = SLICE_BYTES,
        ring_slices: int = RING_SLICES,
        direct_bytes: int | None = None,
    ) -> None:
        """Allocate the staging memory; it does not depend on the model. Blocks until the model's stream has got here.

        Args:
            direct_bytes: For both directions, in place of ``DIRECT_BYTES``.

        Raises:
            UnsupportedModel: The device has no memory left for it, or no streams.
        """
        self.device: Final = device
        self.is_direct_refused = False  # set once, by whichever thread finds it; then it stays
        self.slice_bytes: Final = slice_bytes
        self.direct_bytes: Final[Mapping[Direction, int]] = (
            DIRECT_BYTES if direct_bytes is None else dict.fromkeys(DIRECT_BYTES, direct_bytes)
        )
        self.index_rows: Final = min(INDEX_ROWS, slice_bytes)
        try:
            self._lanes: Final[dict[Direction, _Lane]] = {
                "load": self._lane("load", ring_slices),
                "save": self._lane("save", ring_slices),
            }
            # Memory that was free may be what the model's stream still works on. Other streams do not wait for that.
            device.current_stream().synchronize()
        except (RuntimeError, NotImplementedError) as exc:
            raise UnsupportedModel(f"no staging memory or streams for copies. device={device.device}: {exc}") from exc
        logger.info(
            "copies use %.0f MiB of memory on %s: %d slices of %.0f MiB and row numbers, each way. direct=%s",
            self.memory_bytes / 2**20,
            device.device,
            ring_slices,
            slice_bytes / 2**20,
            "no"
            if device.copy_batch is None
            else ", ".join(f"{name}s from {size} bytes" for name, size in self.direct_bytes.items()),
        )

    def stop_direct(self, reason: CudaError) -> None:
        """Stage everything from now on: the driver refused a batched copy."""
        if not self.is_direct_refused:
            self.is_direct_refused = True
            # Its text: a log handler that keeps the error would keep the arena mapped by the frames of the copy.
            logger.warning(
                "batched copies were refused, all copies are staged. device=%s %s", self.device.device, str(reason)
            )

    @property
    def memory_bytes(self) -> int:
        """What the engine takes of the device's memory."""
        places = [place for lane in self._lanes.values() for place in lane.ring]
        return sum(place.staging.nbytes + place.rows.nbytes for place in places)

    def mark(self) -> Any:
        """An event behind all that the calling thread has queued on its stream; goes with a job."""
        event = self.device.event()
        event.record(self.device.current_stream())
        return event

    def begin(self, direction: Direction, mark: Any) -> "DeviceJob":
        """Begin a job that runs behind ``mark``."""
        if mark is None:
            raise ValueError("a copy on a device needs a mark of what it has to wait for")
        return DeviceJob(self, direction, self._lanes[direction], mark)

    def _lane(self, direction: Direction, ring_slices: int) -> _Lane:
        device = self.device
        ring = [
            _Slice(
                staging=device.empty(self.slice_bytes, torch.uint8),
                rows_host=device.pinned(self.index_rows),
                rows=device.empty(self.index_rows, torch.int64),
            )
            for _ in range(ring_slices)
        ]
        return _Lane(
            direction,
            kernels=device.stream(for_kernels=True),
            copies=device.stream(for_kernels=False),
            ring=ring,
            few_bytes=device.empty(1, torch.int64),
            few_bytes_host=device.pinned(1),
        )


@dataclass(slots=True)
class DeviceJob:
    """Copies of one direction that are waited for together. Threads: one, the one of its direction.

    A slice is launched as soon as it is full, the last one by ``launch``.
    """

    _engine: CopyEngine
    _direction: Direction
    _lane: _Lane
    _mark: Any
    _pending: list[_Piece] = field(default_factory=list)
    _runs: set[int] = field(default_factory=set)
    _bytes: int = 0
    _rows: int = 0
    _done: Any = None
    _held: list[npt.NDArray[np.uint8]] = field(default_factory=list)

    def add(self, runs: Sequence[RowRun], block_ids: Rows, slot: npt.NDArray[np.uint8], first_block: int) -> None:
        """Copy the blocks ``first_block`` and following of a chunk, from or to the group's byte range ``slot``.

        Raises:
            RuntimeError: A launch failed. What was launched has ended; what was not launched is not copied.
        """
        self._held.append(slot)
        for run in runs:
            if len(block_ids) > run.block[-1]:
                places, rows = run.places, run.rows_of(block_ids)
            else:
                kept = (run.block >= first_block) & (run.block < first_block + len(block_ids))
                places = np.flatnonzero(kept)
                rows = run.first[places] + run.step[places] * block_ids[run.block[places] - first_block]
            part = slot[run.offset_bytes : run.offset_bytes + run.size_bytes]
            piece = _Piece(run, rows, places, part, is_direct=False)
            may_be_direct = run.may_be_direct and not self._engine.is_direct_refused
            piece.is_direct = (
                may_be_direct and int(piece.fragments().sizes.min()) >= self._engine.direct_bytes[self._direction]
            )
            self._append(piece)

    def launch(self) -> None:
        """Launch what is left.

        Raises:
            RuntimeError: As :meth:`add`.
        """
        if not self._pending:
            return
        pieces, self._pending = self._pending, []
        self._runs, self._bytes, self._rows = set(), 0, 0
        try:
            self._launch(pieces)
        except CudaError as exc:  # of the driver's batched copies; torch's own errors are others
            self._engine.stop_direct(exc)
            self._launch(pieces)

    def _launch(self, pieces: Sequence[_Piece]) -> None:
        if self._engine.is_direct_refused:
            for piece in pieces:
                piece.is_direct = False  # the slice has room for all of its pieces
        taken = self._lane.next_slice()
        try:
            if self._direction == "save":
                self._save(taken, pieces)
            else:
                self._load(taken, pieces)
        except BaseException:
            self._lane.settle(taken)
            raise
        self._done = taken.free

    def is_done(self) -> bool:
        """Whether all that was launched has arrived; never blocks."""
        return self._done is None or bool(self._done.query())

    def wait(self) -> None:
        """Block until all that was launched has arrived; let go of the slots."""
        if self._done is not None:
            self._done.synchronize()
        self._held.clear()
        self._pending.clear()

    def _append(self, piece: _Piece) -> None:
        """Put a piece into the slice, and into following ones what has no room in it."""
        engine, size = self._engine, piece.run.row_bytes
        while True:
            padding = 0 if id(piece.run) in self._runs else ALIGN_BYTES
            room = min((engine.slice_bytes - self._bytes - padding) // size, engine.index_rows - self._rows)
            if room > 0:
                taken, rest = piece.cut(room) if room < len(piece.rows) else (piece, None)
                self._pending.append(taken)
                self._runs.add(id(piece.run))
                self._bytes += padding + taken.size_bytes
                self._rows += len(taken.rows)
                if rest is None:
                    return
                piece = rest
            self.launch()

    # -- one slice ---------------------------------------------------------------------------------------------

    def _save(self, taken: _Slice, pieces: Sequence[_Piece]) -> None:
        device, lane = self._engine.device, self._lane
        gathered, free = device.event(), device.event()
        arranged = _arranged(pieces)
        calls = taken.number(arranged)
        with device.on(lane.kernels):
            taken.send_rows()
            lane.kernels.wait_event(self._mark)
            for run, rows, staged in calls:
                torch.index_select(run.grid, 0, rows, out=staged)
            gathered.record(lane.kernels)
        with device.on(lane.copies):
            lane.let_others_in()
            lane.copies.wait_event(gathered)  # which is behind the mark, as direct copies have to be
            for ours, staged in _staged(taken, arranged):
                ours.copy_(staged, non_blocking=True)
            self._copy_directly(pieces)
            free.record(lane.copies)
        taken.free = free

    def _load(self, taken: _Slice, pieces: Sequence[_Piece]) -> None:
        device, lane = self._engine.device, self._lane
        arrived, free = device.event(), device.event()
        arranged = _arranged(pieces)
        calls = taken.number(arranged)
        with device.on(lane.copies):
            lane.let_others_in()
            taken.send_rows()  # by the stream of kernels they would wait for the slices behind this one
            for ours, staged in _staged(taken, arranged):
                staged.copy_(ours, non_blocking=True)
            if any(piece.is_direct for piece in pieces):
                lane.copies.wait_event(self._mark)
                self._copy_directly(pieces)
            arrived.record(lane.copies)
        with device.on(lane.kernels):
            lane.kernels.wait_event(self._mark)
            lane.kernels.wait_event(arrived)
            for run, rows, staged in calls:
                run.grid.index_copy_(0, rows, staged)
            free.record(lane.kernels)
        taken.free = free

    def _copy_directly(self, pieces: Sequence[_Piece]) -> None:
        """Copy between pages and slots without staging, on the stream of copies."""
        direct = [_cut_to_windows(piece.fragments()) for piece in pieces if piece.is_direct]
        if not direct:
            return
        pages, slots, sizes = (np.concatenate(column) for column in zip(*direct, strict=True))
        copy_batch = self._engine.device.copy_batch
        assert copy_batch is not None, "a run may be direct only where there is a call for it"
        if self._direction == "save":
            copy_batch(slots, pages, sizes, self._lane.copies, True)
        else:
            copy_batch(pages, slots, sizes, self._lane.copies, False)


def _staged(taken: _Slice, arranged: Sequence[Sequence[_Piece]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each run of consecutive bytes of staged pieces its place in a slot and in staging."""
    pairs = []
    for of_run in arranged:
        for piece in of_run:
            at = piece.staging_bytes
            for start, size in piece.spans():
                pairs.append((torch.from_numpy(piece.slot[start : start + size]), taken.staging[at : at + size]))
                at += size
    return pairs


def _arranged(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """The staged pieces by run, and where each lies in staging: those of one run follow each other."""
    by_run: dict[int, list[_Piece]] = {}
    for piece in pieces:
        if not piece.is_direct:
            by_run.setdefault(id(piece.run), []).append(piece)
    at = 0
    for of_run in by_run.values():
        at = -(-at // ALIGN_BYTES) * ALIGN_BYTES
        for piece in of_run:
            piece.staging_bytes = at
            at += piece.size_bytes
    return list(by_run.values())


# -- plans -------------------------------------------------------------------------------------------------------------


def plan_rows(layers: Sequence[PagedLayer], blocks: int, engine: CopyEngine) -> list[RowRun]:
    """Join neighbours in the payload that lie on one grid of rows.

    Args:
        layers: Of one KV cache group, in payload order.
        blocks: Of one chunk.
    """
    joined: list[tuple[list[PagedLayer], int]] = []
    for layer in layers:
        own = math.gcd(layer.page.page_bytes, layer.block_stride_bytes)
        if joined and joined[-1][0][0].shares_storage(layer):
            run, row = joined[-1]
            common = math.gcd(row, own, layer.offset_bytes - run[0].offset_bytes)
            if common == row == own or common >= ROW_BYTES_MIN:
                run.append(layer)
                joined[-1] = (run, common)
                continue
        joined.append(([layer], own))
    runs, offset = [], 0
    for run, row in joined:
        made = _row_run(run, _fitting(row, engine.slice_bytes - ALIGN_BYTES), offset, blocks, engine)
        runs.append(made)
        offset += made.size_bytes
    return runs


def _fitting(row_bytes: int, most_bytes: int) -> int:
    """The largest row that divides this one and fits into a slice."""
    parts = -(-row_bytes // most_bytes)
    while row_bytes % parts:
        parts += 1
    return row_bytes // parts


def _row_run(
    layers: Sequence[PagedLayer], row_bytes: int, offset_bytes: int, blocks: int, engine: CopyEngine
) -> RowRun:
    grid, origin = layers[0].rows(row_bytes), layers[0].offset_bytes % row_bytes
    word = next(word for word in WORDS if (grid.data_ptr() | row_bytes) % word.itemsize == 0)
    first, step, block = [], [], []
    for layer in layers:
        page_rows = layer.page.page_bytes // row_bytes
        first.append(np.tile((layer.offset_bytes - origin) // row_bytes + np.arange(page_rows, dtype=np.intp), blocks))
        step.append(np.full(blocks * page_rows, layer.block_stride_bytes // row_bytes, dtype=np.intp))
        block.append(np.repeat(np.arange(blocks, dtype=np.intp), page_rows))
    strides = {layer.block_stride_bytes for layer in layers}
    smallest = [
        layer.page.page_bytes * (blocks if layer.page.page_bytes == layer.block_stride_bytes else 1) for layer in layers
    ]
    return RowRun(
        grid=grid.view(word),
        row_bytes=row_bytes,
        first=np.concatenate(first),
        step=np.concatenate(step),
        block=np.concatenate(block),
        offset_bytes=offset_bytes,
        may_be_direct=engine.device.copy_batch is not None and min(smallest) >= min(engine.direct_bytes.values()),
        places=np.arange(sum(map(len, first)), dtype=np.intp),
        same_step=strides.pop() // row_bytes if len(strides) == 1 else None,
    )
