"""The copy engine on memory of the CPU: everything is done at once, so that real and simulated engines run through it.

What is shown by that: which bytes go where, jobs, marks, held saves and loads before the forward pass, in vLLM's own
order of calls. What is not: races, which ``races.py`` finds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from tiered_kv.chunks import transfer
from tiered_kv.chunks.cuda import Cuda
from tiered_kv.chunks.device_copy import CopyEngine
from tools.gpu_proof.devices import DryDevice

SLICE_BYTES = 1 << 16
"""Small, so that chunks of tiny models take several."""


@contextmanager
def copies_as_on_a_device(*, direct_bytes: int, cuda: Cuda | None = None) -> Iterator[list[CopyEngine]]:
    """Workers that are made inside the ``with`` block copy through an engine; yields all that were made.

    Args:
        cuda: What they pin host memory with; None: they pin none.
    """
    made: list[CopyEngine] = []

    def engine_for(device: torch.device) -> CopyEngine:
        on = DryDevice(has_batch=True)
        on.cuda = cuda
        made.append(CopyEngine(on, slice_bytes=SLICE_BYTES, direct_bytes=direct_bytes))
        return made[-1]

    with mock.patch.object(transfer, "engine_for", engine_for):
        yield made
