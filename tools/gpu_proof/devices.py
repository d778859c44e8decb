"""Devices to prove on: the GPU as the cache uses it, one whose waits can be left out, and a stand-in for no GPU."""

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch

from tiered_kv.chunks.cuda import Cuda
from tiered_kv.chunks.device import Addresses, CopyBatch, CudaDevice, TorchDevice

MARK, GATHERED, ARRIVED, REUSE, DONE = "mark", "gathered", "arrived", "reuse", "done"
WAITS: Final = (MARK, GATHERED, ARRIVED, REUSE, DONE)
"""Every wait of the copy engine (``device_copy.py``): for the model, between the two streams of each direction, before
a place of the ring is used again, and of the host before it reports."""


class DryDevice(TorchDevice):
    """This machine's memory as if it were a GPU's, whose streams do everything at once: for a dry run and for tests.

    It shows where bytes go, and nothing about their order.
    """

    def __init__(self, *, has_batch: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self._has_batch = has_batch

    @property
    def copy_batch(self) -> CopyBatch | None:
        return _move if self._has_batch else None

    def stream(self, *, for_kernels: bool) -> Any:
        return DryStream(for_kernels=for_kernels)

    def current_stream(self) -> Any:
        return DryStream(for_kernels=False)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext(stream)

    def event(self) -> Any:
        return DryEvent()

    def pinned(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int64)

    @contextmanager
    def copying(self) -> Iterator[None]:
        with torch.inference_mode():
            yield


def _move(
    destinations: Addresses, sources: Addresses, sizes: Addresses, _stream: Any, _is_written_by_stream: bool
) -> None:
    for destination, source, size in zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(destination, source, size)


class DryEvent:
    """Has always passed."""

    def record(self, _stream: Any) -> None:
        return

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class DryStream:
    """Counts what it is told to wait for."""

    def __init__(self, *, for_kernels: bool) -> None:
        self.for_kernels: Final = for_kernels
        self.waited: Final[list[Any]] = []

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)

    def synchronize(self) -> None:
        return


class Leaky:
    """A device of which one kind of wait of the copy engine is left out, to see whether the proof notices.

    Attributes:
        left_out: How many waits were.
        streams: Those of the engine, and whether they are for kernels.

    Wraps the device that the engine gets; the engine's code runs as it is. Which wait is which follows from who waits
    for what: streams for kernels wait for marks and for what arrived, those for copies for what was gathered (and for
    marks, of copies without staging), the host for a place of the ring. ``DONE`` is the caller's own wait.
    """

    def __init__(self, device: TorchDevice, without: str = "") -> None:
        assert without in ("", *WAITS)
        self.without: Final = without
        self.left_out = 0
        self.is_last = False
        self._device = device
        self.streams: Final[list[tuple[bool, Any]]] = []
        self._marks: set[int] = set()
        self._kept: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def mark(self) -> Any:
        """As the engine's ``mark``: an event behind what this thread has queued."""
        event = self._device.event()
        event.record(self._device.current_stream())
        self._marks.add(id(event))
        self._kept.append(event)  # so that no later event has its id
        return event

    @contextmanager
    def last_wait(self) -> Iterator[None]:
        """Around the wait for a whole job, which is the caller's."""
        self.is_last = True
        yield
        self.is_last = False

    def stream(self, *, for_kernels: bool) -> Any:
        inner = self._device.stream(for_kernels=for_kernels)
        self.streams.append((for_kernels, inner))
        return _LeakyStream(self, inner, for_kernels=for_kernels)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return self._device.on(stream.inner)

    def event(self) -> Any:
        return _LeakyEvent(self, self._device.event())

    @property
    def copy_batch(self) -> CopyBatch | None:
        inner = self._device.copy_batch
        if inner is None:
            return None

        def copy(
            destinations: Addresses, sources: Addresses, sizes: Addresses, stream: Any, is_written_by_stream: bool
        ) -> None:
            inner(destinations, sources, sizes, stream.inner, is_written_by_stream)

        return copy

    def is_left_out(self, kind: str) -> bool:
        """Whether a wait of this kind is to be left out; counts it."""
        self.left_out += kind == self.without
        return kind == self.without

    def is_mark(self, event: Any) -> bool:
        """Whether an event is a mark."""
        return id(event) in self._marks


class _LeakyStream:
    def __init__(self, owner: Leaky, inner: Any, *, for_kernels: bool) -> None:
        self.inner = inner
        self._owner, self._for_kernels = owner, for_kernels

    def wait_event(self, event: Any) -> None:
        kind = MARK if self._owner.is_mark(event) else ARRIVED if self._for_kernels else GATHERED
        if not self._owner.is_left_out(kind):
            self.inner.wait_event(event.inner if isinstance(event, _LeakyEvent) else event)

    def synchronize(self) -> None:
        self.inner.synchronize()


class _LeakyEvent:
    """Of the engine: its ``synchronize`` is the wait before a place of the ring is used again, or the caller's last."""

    def __init__(self, owner: Leaky, inner: Any) -> None:
        self.inner = inner
        self._owner = owner

    def record(self, stream: Any) -> None:
        self.inner.record(stream.inner if isinstance(stream, _LeakyStream) else stream)

    def query(self) -> bool:
        return bool(self.inner.query())

    def synchronize(self) -> None:
        if not self._owner.is_left_out(DONE if self._owner.is_last else REUSE):
            self.inner.synchronize()


class _WithoutBatch(CudaDevice):
    """As a worker uses it where the driver has no batched copies; all else that CUDA has is there."""

    @property
    def copy_batch(self) -> CopyBatch | None:
        return None


def cuda_device(device: torch.device, *, has_batch: bool = True) -> CudaDevice:
    """The GPU as a worker uses it; without ``has_batch`` everything is staged."""
    return (CudaDevice if has_batch else _WithoutBatch)(device, Cuda.loaded())
