"""The copy engine on memory of the CPU: everything is done at once, so that real and simulated engines run through it.

What is shown by that: which bytes go where, jobs, marks, held saves and loads before the forward pass, in vLLM's own
order of calls. What is not: races, which ``races.py`` finds.
"""

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from tiered_kv.chunks import transfer
from tiered_kv.chunks.cuda import Cuda
from tiered_kv.chunks.device import Addresses, CopyBatch, TorchDevice
from tiered_kv.chunks.device_copy import CopyEngine

SLICE_BYTES = 1 << 16
"""Small, so that chunks of tiny models take several."""


class _Immediate:
    """A stream or an event on which nothing ever waits."""

    def wait_event(self, event: object) -> None:
        return

    def record(self, stream: object) -> None:
        return

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True


class ImmediateDevice(TorchDevice):
    """The CPU as a device."""

    @property
    def copy_batch(self) -> CopyBatch | None:
        return self._copy_batch

    def stream(self, *, for_kernels: bool) -> Any:
        return _Immediate()

    def current_stream(self) -> Any:
        return _Immediate()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def event(self) -> Any:
        return _Immediate()

    def pinned(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int64)

    @contextmanager
    def copying(self) -> Iterator[None]:
        with torch.inference_mode():
            yield

    def _copy_batch(
        self, destinations: Addresses, sources: Addresses, sizes: Addresses, stream: Any, is_written_by_stream: bool
    ) -> None:
        for target, source, size in zip(destinations, sources, sizes, strict=True):
            ctypes.memmove(int(target), int(source), int(size))


@contextmanager
def copies_as_on_a_device(*, direct_bytes: int, cuda: Cuda | None = None) -> Iterator[list[CopyEngine]]:
    """Workers that are made inside the ``with`` block copy through an engine; yields all that were made.

    Args:
        cuda: What they pin host memory with; None: they pin none.
    """
    made: list[CopyEngine] = []

    def engine_for(device: torch.device) -> CopyEngine:
        on = ImmediateDevice(device)
        on.cuda = cuda
        made.append(CopyEngine(on, slice_bytes=SLICE_BYTES, direct_bytes=direct_bytes))
        return made[-1]

    with mock.patch.object(transfer, "engine_for", engine_for):
        yield made
