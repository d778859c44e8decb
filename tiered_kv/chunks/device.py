"""Streams, events and memory of the accelerator that holds the paged KV, as the copy engine asks for them.

Owns what differs between devices. ``CudaDevice`` serves NVIDIA and AMD (torch's HIP build calls itself ``cuda``);
``TorchDevice`` uses torch's device-independent interface alone and is what any other accelerator gets. Must not decide
what is copied (``device_copy.py``). Streams and events are torch's own objects.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tiered_kv.chunks.cuda import ORDER_ANY, ORDER_STREAM, Cuda, CudaError

logger = logging.getLogger(__name__)

Addresses = npt.NDArray[np.int64]
"""Addresses or sizes in bytes."""

CopyBatch = Callable[[Addresses, Addresses, Addresses, Any, bool], None]
"""Destinations, sources, sizes, a stream, and whether the stream's earlier work writes the sources."""

AHEAD_OF_MODEL: Final = -1
"""Priority of the streams with short kernels, so that they do not wait behind a prefill's; the copies follow them."""


class TorchDevice:
    """Any accelerator that torch has streams for. Not run on one: CUDA and ROCm have a class of their own.

    Attributes:
        cuda: The calls of CUDA that torch lacks, also for whoever pins host memory; None: there are none.

    Threads: any; what is current (stream, device) is the calling thread's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device: Final = device
        self.cuda: Cuda | None = None

    @property
    def copy_batch(self) -> CopyBatch | None:
        """Many copies between host and device by one call, without staging; None: there is no such call."""
        return None

    def stream(self, *, for_kernels: bool) -> Any:
        """A new stream; ``for_kernels`` asks for one that goes before the model's."""
        return torch.Stream(self.device, priority=AHEAD_OF_MODEL if for_kernels else 0)

    def current_stream(self) -> Any:
        """The calling thread's stream: in the model runner's thread that of the model."""
        return torch.accelerator.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Have this thread launch on a stream."""
        context: AbstractContextManager[Any] = stream
        return context

    def event(self) -> Any:
        """A new event, whose ``synchronize`` sleeps: one that spins takes a core and the driver's lock."""
        return torch.Event(self.device, blocking=True)

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the device."""
        return torch.empty(count, dtype=dtype, device=self.device)

    def pinned(self, count: int) -> torch.Tensor:
        """Host memory for so many row numbers, pinned: a copy from pageable memory would synchronise its stream."""
        try:
            return torch.empty(count, dtype=torch.int64, pin_memory=True)
        except RuntimeError as exc:
            logger.warning(
                "no pinned memory for row numbers: copies wait for each other. device=%s: %s", self.device, exc
            )
            return torch.empty(count, dtype=torch.int64)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Prepare the calling thread for copies: its device, and writes into tensors made in inference mode."""
        torch.accelerator.set_device_index(self.device)
        with torch.inference_mode():
            yield


class CudaDevice(TorchDevice):
    """NVIDIA and AMD.

    Threads: as :class:`TorchDevice`.
    """

    def __init__(self, device: torch.device, cuda: Cuda | None) -> None:
        """Take the calls that torch does not have; None: do without them."""
        super().__init__(device)
        self.cuda = cuda
        self._index: Final = device.index or 0
        self._has_batch = cuda is not None and cuda.has_batch and _takes_host_pointers(cuda, self._index)

    @property
    def copy_batch(self) -> CopyBatch | None:
        return self._copy_batch if self._has_batch else None

    def stream(self, *, for_kernels: bool) -> Any:
        return torch.cuda.Stream(self.device, priority=AHEAD_OF_MODEL if for_kernels else 0)

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return _OnStream(stream, self._index)

    def event(self) -> Any:
        return torch.cuda.Event(blocking=True)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """As above, and launches of this thread do not break a CUDA graph that another one captures."""
        # Not restored: a thread's first device is 0, and going back there could open a context on it.
        torch.cuda.set_device(self.device)
        if self.cuda is not None:
            self.cuda.relax_capture()
        with torch.inference_mode():
            yield

    def _copy_batch(
        self, destinations: Addresses, sources: Addresses, sizes: Addresses, stream: Any, is_written_by_stream: bool
    ) -> None:
        assert self.cuda is not None
        order = ORDER_STREAM if is_written_by_stream else ORDER_ANY
        self.cuda.copy_batch(destinations, sources, sizes, stream.cuda_stream, order)


class _OnStream:
    """As ``torch.cuda.stream`` on the thread's own device: that looks for the device four times, 80 us for a slice."""

    __slots__ = ("_before", "_index", "_stream")

    def __init__(self, stream: Any, index: int) -> None:
        self._stream, self._index = stream, index

    def __enter__(self) -> Any:
        self._before = torch.cuda.current_stream(self._index)
        torch.cuda.set_stream(self._stream)
        return self._stream

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._before)


def _takes_host_pointers(cuda: Cuda, index: int) -> bool:
    try:
        return cuda.takes_host_pointers(index)
    except CudaError as exc:
        logger.warning("no batched copies: the device does not say whether it takes host addresses. %s", exc)
        return False


def device_of(device: torch.device) -> TorchDevice:
    """What to copy with on a device of torch's."""
    if device.type != "cuda":
        logger.warning(
            "copies on a device of this type have never been run, and use no pinned memory. device=%s", device
        )
        return TorchDevice(device)
    try:
        cuda = Cuda.loaded()
    except CudaError as exc:
        logger.warning(
            "copies go without what torch lacks: pinned memory, batches, and leave to run beside a graph capture. %s",
            exc,
        )
        return CudaDevice(device, None)
    return CudaDevice(device, cuda)
