"""What stands in for torch's streams, events and device memory, and for the driver's batched copies.

``simulated_gpu`` puts them in the place of ``torch`` in ``tiered_kv.chunks.device``, the only module that names them,
so the copy path runs unmodified. Device memory is memory of the CPU that the race detector takes for a device's.
"""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self
from unittest import mock

import torch

from tests.kit.gpu.races import Clock, RaceDetector, Range
from tiered_kv.chunks import device as device_module
from tiered_kv.chunks.cuda import ORDER_ANY
from tiered_kv.chunks.device import Addresses, CudaDevice, TorchDevice

GPU = torch.device("cuda", 1)
"""Not the first device: what forgets to set its device would get that one."""


class SimulatedStream:
    """A stream of the detector's."""

    def __init__(self, machine: "SimulatedGpu", priority: int) -> None:
        self._detector = machine.detector
        self.actor = machine.detector.new_actor("stream")
        self.priority = priority
        self.cuda_stream = self.actor.number
        machine.streams[self.cuda_stream] = self
        self._entered: list[ExitStack] = []

    def wait_event(self, event: "SimulatedEvent") -> None:
        self._detector.learn(self.actor, event.clock)

    def synchronize(self) -> None:
        self._detector.learn(self._detector.me, self._detector.clock_of(self.actor))

    def __enter__(self) -> Self:
        self._entered.append(ExitStack())
        self._entered[-1].enter_context(self._detector.on_stream(self.actor))
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().close()


class SimulatedEvent:
    """An event of the detector's. It has always passed when it is asked, and who asked may rely on that."""

    def __init__(self, machine: "SimulatedGpu") -> None:
        self._detector = machine.detector
        self.clock = Clock()

    def record(self, stream: SimulatedStream | None = None) -> None:
        self.clock = self._detector.clock_of(self._detector.stream if stream is None else stream.actor)

    def synchronize(self) -> None:
        self._detector.learn(self._detector.me, self.clock)

    def query(self) -> bool:
        self.synchronize()
        return True


class _Current:
    """A thread's stream, as ``current_stream`` gives it."""

    def __init__(self, detector: RaceDetector) -> None:
        self._detector, self.actor = detector, detector.stream

    def synchronize(self) -> None:
        self._detector.learn(self._detector.me, self._detector.clock_of(self.actor))


class SimulatedGpu:
    """One device, and the names of torch and of the driver that reach it.

    Attributes:
        blocking_events: How many events were made whose waits sleep.
        prepared: What copying threads set for themselves, in order: ``"device"``, ``"capture"``.
        pinned_fails: Whether pinned memory is refused.
        has_batch: Whether the driver has batched copies.
    """

    def __init__(self, detector: RaceDetector) -> None:
        self.detector = detector
        self.streams: dict[int, SimulatedStream] = {}
        self.blocking_events = 0
        self.prepared: list[str] = []
        self.pinned_fails = False
        self.has_batch = True
        self._allocated: list[torch.Tensor] = []

    # -- torch -------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @property
    def cuda(self) -> "SimulatedGpu":
        return self

    @property
    def accelerator(self) -> "SimulatedGpu":
        return self

    def Stream(self, device: torch.device, *, priority: int = 0) -> SimulatedStream:  # noqa: N802
        assert device == GPU
        return SimulatedStream(self, priority)

    def Event(self, device: torch.device = GPU, *, blocking: bool) -> SimulatedEvent:  # noqa: N802
        assert device == GPU
        self.blocking_events += blocking
        return SimulatedEvent(self)

    def current_stream(self, device: torch.device | int) -> Any:
        """The thread's; for a mark, which names the device, it has to be the model's."""
        assert device in (GPU, GPU.index)
        assert device != GPU or self.detector.stream == self.detector.model_stream
        return _Current(self.detector)

    def set_stream(self, stream: Any) -> None:
        self.detector.set_stream(stream.actor)

    def set_device(self, device: torch.device) -> None:
        assert device == GPU
        self.prepared.append("device")

    set_device_index = set_device

    def empty(self, count: int, *, dtype: torch.dtype, device: Any = None, pin_memory: bool = False) -> torch.Tensor:
        if pin_memory and self.pinned_fails:
            raise RuntimeError("no memory can be pinned here")
        memory = torch.zeros(count, dtype=dtype)
        if device is None:
            self.detector.host_memory(memory)
        else:
            assert device == GPU
            self.detector.device_memory(memory)
            self._allocated.append(memory)
            # torch's allocator hands out what this stream may still have to do with; who uses it elsewhere waits.
            self._note(self.detector.stream, memory, "what the memory was before")
        return memory

    def unmap(self) -> None:
        """Take back what was given out, as vLLM's sleep does: by the host, which waits for nothing."""
        for memory in self._allocated:
            self._note(self.detector.me, memory, "unmapping")

    def _note(self, actor: Any, memory: torch.Tensor, what: str) -> None:
        low = memory.data_ptr()
        self.detector.access(actor, [Range(low, low + memory.nbytes, True)], what)

    # -- the driver --------------------------------------------------------------------------------------------

    def takes_host_pointers(self, device: int) -> bool:
        return True

    def relax_capture(self) -> None:
        self.prepared.append("capture")

    def copy_batch(
        self, destinations: Addresses, sources: Addresses, sizes: Addresses, stream: int, order: int
    ) -> None:
        """Copy at once; with ``ORDER_ANY`` sources are read before the stream's earlier work has ended."""
        detector, actor = self.detector, self.streams[stream].actor
        ends = zip(sources, destinations, sizes, strict=True)
        moves = [(int(source), int(target), int(size)) for source, target, size in ends]
        reads = [Range(source, source + size, False) for source, _, size in moves]
        writes = [Range(target, target + size, True) for _, target, size in moves]
        reader = detector.new_actor("early read") if order == ORDER_ANY else actor
        detector.access(reader, reads, "batched copy")
        detector.learn(actor, detector.clock_of(reader))
        detector.access(actor, writes, "batched copy")
        for source, target, size in moves:
            ctypes.memmove(target, source, size)

    def device(self, kind: str = "cuda") -> TorchDevice:
        """What the copy engine gets of it: ``"cuda"``, or ``"torch"`` for the independent interface."""
        return CudaDevice(GPU, self) if kind == "cuda" else TorchDevice(GPU)  # type: ignore[arg-type]


class Watched:
    """A device whose copying threads are watched by the detector, too."""

    def __init__(self, device: TorchDevice, detector: RaceDetector) -> None:
        self._device, self._detector = device, detector

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    @contextmanager
    def copying(self) -> Iterator[None]:
        with self._device.copying(), self._detector.watching():
            yield


@contextmanager
def simulated_gpu() -> Iterator[SimulatedGpu]:
    """A device for the length of a ``with`` block, whose accesses by this thread are watched."""
    machine = SimulatedGpu(RaceDetector())
    with mock.patch.object(device_module, "torch", machine), machine.detector.watching():
        yield machine
