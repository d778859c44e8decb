"""A detector of data races in torch code that uses streams and events, for machines without a GPU.

The code under test runs on CPU tensors in program order, so its results are those of a run without any concurrency.
What is simulated is *order*: host threads, streams and events carry vector clocks, and each operation on known memory
is noted with the bytes it reads and writes. Two accesses to one byte, of which one writes, must be ordered by the
clocks. So a missing wait is found in every run that reaches the two accesses.

What the clocks take for ordered, as CUDA does:

- an operation on device memory goes to the current stream of its thread: after all that this stream was given before,
  and after all that the thread knows of. The thread does not know when it ends.
- ``Event.record`` takes the stream's clock, ``Stream.wait_event`` and ``Event.synchronize`` give it to a stream or to a
  thread.
- a copy between host and device without ``non_blocking`` is waited for by its thread, but not the kernel that fills a
  strided destination behind it.

Owns the clocks and the log of accesses. What stands in for torch's names is in ``device.py``, what crosses between host
threads in ``handover.py``. Threads: any, under one lock.
"""

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

PIECES_MAX = 4096
"""A view of more separate runs of bytes counts as all that it spans."""


class Actor(NamedTuple):
    """What does one thing after another: a host thread, a stream, or a copy beside its stream."""

    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"


class Clock(dict[Actor, int]):
    """How far each actor is known to have come."""

    def join(self, other: Mapping[Actor, int]) -> None:
        for actor, time in other.items():
            if self.get(actor, 0) < time:
                self[actor] = time


class Range(NamedTuple):
    """Bytes from ``low`` to below ``high``, by address."""

    low: int
    high: int
    is_write: bool


class _Access(NamedTuple):
    low: int
    high: int
    is_write: bool
    actor: Actor
    time: int
    what: str


@dataclass(slots=True)
class _Memory:
    """An allocation, and the accesses to it that a later one may race with."""

    low: int
    high: int
    on_device: bool
    log: list[_Access] = field(default_factory=list)


class RaceDetector:
    """The clocks of a simulated machine.

    Attributes:
        races: What was found, in words.
        operations: How many operations were looked at.
    """

    def __init__(self) -> None:
        self.races: list[str] = []
        self.operations = 0
        self.lock = threading.RLock()
        self._numbers = count(1)
        self._clocks: dict[Actor, Clock] = {}
        self._memory: list[_Memory] = []
        self._lows: list[int] = []
        self._thread = threading.local()
        self.model_stream = self.new_actor("stream")

    # -- memory ------------------------------------------------------------------------------------------------

    def device_memory(self, *tensors: torch.Tensor) -> None:
        """Take the tensors' storages for memory of the device; they must outlive the detector."""
        self._add(tensors, on_device=True)

    def host_memory(self, *tensors: torch.Tensor) -> None:
        """Take the tensors' storages for host memory whose accesses count."""
        self._add(tensors, on_device=False)

    def _add(self, tensors: Sequence[torch.Tensor], *, on_device: bool) -> None:
        with self.lock:
            for tensor in tensors:
                storage = tensor.untyped_storage()
                low = storage.data_ptr()
                self._memory.append(_Memory(low, low + storage.nbytes(), on_device))
            self._memory.sort(key=lambda memory: memory.low)
            self._lows = [memory.low for memory in self._memory]

    def _memory_at(self, address: int) -> _Memory | None:
        position = bisect_right(self._lows, address) - 1
        if position < 0 or address >= self._memory[position].high:
            return None
        return self._memory[position]

    def is_device(self, address: int) -> bool:
        """Whether an address lies on the device."""
        memory = self._memory_at(address)
        return memory is not None and memory.on_device

    def is_known(self, address: int) -> bool:
        """Whether accesses to an address count."""
        return self._memory_at(address) is not None

    # -- clocks ------------------------------------------------------------------------------------------------

    def new_actor(self, kind: str) -> Actor:
        """One more actor."""
        with self.lock:
            actor = Actor(kind, next(self._numbers))
            self._clocks[actor] = Clock()
            return actor

    @property
    def me(self) -> Actor:
        """The calling thread. Not by its identifier: Python gives that to another thread later."""
        if not hasattr(self._thread, "actor"):
            self._thread.actor = self.new_actor("thread")
        actor: Actor = self._thread.actor
        return actor

    @property
    def stream(self) -> Actor:
        """The calling thread's current stream."""
        stream: Actor = getattr(self._thread, "stream", self.model_stream)
        return stream

    def set_stream(self, stream: Actor) -> None:
        """Make a stream the current one of this thread."""
        self._thread.stream = stream

    @contextmanager
    def on_stream(self, stream: Actor) -> Iterator[None]:
        """The same for the length of a block."""
        before = self.stream
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def clock_of(self, actor: Actor) -> Clock:
        """A copy of what an actor knows, after one more step of its own: what others may get to know of it."""
        with self.lock:
            clock = self._clocks[actor]
            if actor.kind != "thread":
                clock.join(self._clocks[self.me])  # what a stream is given comes after all that its thread knows
            clock[actor] = clock.get(actor, 0) + 1
            return Clock(clock)

    def learn(self, actor: Actor, clock: Mapping[Actor, int]) -> None:
        """An actor gets to know what is in ``clock``."""
        with self.lock:
            if actor.kind != "thread":
                self._clocks[actor].join(self._clocks[self.me])
            self._clocks[actor].join(clock)

    # -- accesses ----------------------------------------------------------------------------------------------

    def access(self, actor: Actor, ranges: Iterable[Range], what: str) -> None:
        """Note an operation, and compare it with what it is not ordered after."""
        with self.lock:
            self.operations += 1
            clock = self.clock_of(actor)
            for one in _merged(ranges):
                memory = self._memory_at(one.low)
                if memory is not None:
                    self._compare(memory, _Access(*one, actor, clock[actor], what), clock)

    def _compare(self, memory: _Memory, new: _Access, clock: Clock) -> None:
        low, high = new.low, new.high
        kept = [old for old in memory.log if old[1] <= low or high <= old[0]]  # by position: most entries end here
        for old in memory.log if len(kept) < len(memory.log) else ():
            if old.high <= low or high <= old.low:
                continue
            is_ordered = old.time <= clock.get(old.actor, 0)
            if not is_ordered and (old.is_write or new.is_write):
                self.races.append(f"{_told(new)} is not ordered after {_told(old)}")
            is_covered = low <= old.low and old.high <= high
            # What races with the old one, and is ordered after the new one, does not exist; so the new one is enough.
            if not (is_covered and is_ordered and (new.is_write or not old.is_write)):
                kept.append(old)
        kept.append(new)
        memory.log = kept

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have the operations of this thread noted."""
        with _Watch(self):
            yield


def _told(access: _Access) -> str:
    return f"{access.what} ({'write' if access.is_write else 'read'} by {access.actor} at {access.low:#x})"


def _merged(ranges: Iterable[Range]) -> Iterator[Range]:
    """Neighbours joined: rows that follow each other are one access."""
    for is_write in (False, True):
        low = high = -1
        for one in sorted(one for one in ranges if one.is_write is is_write):
            if one.low > high:
                if high > 0:
                    yield Range(low, high, is_write)
                low, high = one.low, one.high
            high = max(high, one.high)
        if high > 0:
            yield Range(low, high, is_write)


# -- what torch does ---------------------------------------------------------------------------------------------------


def bytes_of(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """First and last address of each run of bytes that a view covers."""
    if tensor.numel() == 0:
        return []
    low, size = tensor.data_ptr(), tensor.element_size()
    spanned = (sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * size
    dense = 1
    outer: list[tuple[int, int]] = []
    for extent, step in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda both: both[1]):
        if extent > 1 and step == dense and not outer:
            dense *= extent
        elif extent > 1:
            outer.append((extent, step))
    starts = [low]
    for extent, step in outer:
        if len(starts) * extent > PIECES_MAX:
            return [(low, low + spanned)]
        starts = [start + number * step * size for start in starts for number in range(extent)]
    return [(start, start + dense * size) for start in starts]


def _rows(grid: torch.Tensor, index: torch.Tensor) -> list[tuple[int, int]]:
    row = grid.shape[1] * grid.element_size()
    return [(grid.data_ptr() + int(number) * row, grid.data_ptr() + (int(number) + 1) * row) for number in index]


class _Watch(TorchDispatchMode):
    """Tells a detector what each operation of this thread reads and writes, and performs it."""

    def __init__(self, detector: RaceDetector) -> None:
        super().__init__()
        self._detector = detector

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::copy_":
            self._copy(*args, **kwargs)
        elif name == "aten::index_select" and "out" in kwargs:
            grid, _, index = args
            self._note([*_rows(grid, index), *bytes_of(index)], bytes_of(kwargs["out"]), name)
        elif name == "aten::index_copy_":
            grid, _, index, source = args
            self._note([*bytes_of(source), *bytes_of(index)], _rows(grid, index), name)
        elif not any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns):
            tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
            written = [
                value
                for declared, value in zip(func._schema.arguments, args, strict=False)
                if isinstance(value, torch.Tensor) and declared.alias_info is not None and declared.alias_info.is_write
            ]
            reads = [piece for tensor in tensors for piece in bytes_of(tensor)]
            self._note(reads, [piece for tensor in written for piece in bytes_of(tensor)], name)
        return func(*args, **kwargs)  # a view touches no memory

    def _note(self, reads: Sequence[tuple[int, int]], writes: Sequence[tuple[int, int]], what: str) -> None:
        detector = self._detector
        ranges = [Range(*piece, False) for piece in reads] + [Range(*piece, True) for piece in writes]
        ranges = [one for one in ranges if detector.is_known(one.low)]
        if ranges:
            on_device = any(detector.is_device(one.low) for one in ranges)
            detector.access(detector.stream if on_device else detector.me, ranges, what)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
        detector = self._detector
        self._note(bytes_of(source), bytes_of(target), "copy_")
        to_device = detector.is_device(target.data_ptr())
        crosses = to_device != detector.is_device(source.data_ptr())
        if crosses and not non_blocking and (target.is_contiguous() or not to_device):
            detector.learn(detector.me, detector.clock_of(detector.stream))
