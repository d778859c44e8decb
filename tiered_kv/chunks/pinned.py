"""Pins a worker's mapping of the arena for its GPU, window by window, and ends that before the mapping goes.

Owns which parts of the slabs are registered. Must not know slots or copies: the worker says which slab it is about to
use (``pin_slab``), the thread that waits for the server's end pins ahead of that (``pin_some``). The server keeps every
page of a slab where it is meanwhile (``JoinWorker.pins``); the driver would go on with the pages it was given.

A *window* is the addresses between two multiples of :data:`WINDOW_BYTES`. It is registered by one call, or not at all,
and no copy may cross from one into the next (:func:`windows`): CUDA refuses one that touches two registrations, or one
and none (sglang#36798).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from tiered_kv.chunks.arena import SLAB_BYTES, Arena
from tiered_kv.chunks.cuda import ALREADY_REGISTERED, NOT_REGISTERED, Cuda, CudaError

logger = logging.getLogger(__name__)

WINDOW_BYTES: Final = 64 << 20
"""Registered at once: 3 ms on an H100's machine, in which the driver's lock and the process's memory map are held."""

PIN_REST: Final = 20
"""Who pins ahead rests this many times as long as a window took. Beside an H100's decode steps: without a rest they
took 6 to 48 % longer, with one of 10 times 3 %, with one of 30 no more."""

PIN_REST_MAX_S: Final = 5.0
"""The most: a window that took longer than 0.25 s waited for something, which says nothing of the next one."""


def windows(address: int, size_bytes: int) -> list[slice]:
    """Cut a range of host memory, by its address, into parts that one copy may touch."""
    parts, at, end = [], address, address + size_bytes
    while at < end:
        stop = min(_window_end(at), end)
        parts.append(slice(at - address, stop - address))
        at = stop
    return parts


def _window_end(address: int) -> int:
    return (address // WINDOW_BYTES + 1) * WINDOW_BYTES


class PinnedArena:
    """Registrations of one mapping of the arena.

    Attributes:
        pinned_bytes: Registered now.
        pinning_s: Time that registering took so far, in all threads together.
        rest_s: For how long :meth:`pin_some` is best left alone, so that a model hardly notices it.
        is_refused: The driver took no more: the rest stays pageable, and copies of it are slower.

    Threads: ``pin_slab`` and ``pin_some`` from any; ``pin_all`` from the one that registers vLLM's tensors; ``release``
    once no copy runs and none begins.

        field                       guarded by
        _parts, _pinned_to          _lock; _pinned_to is read without it: it grows when all before it is registered
        _foreign                    _lock, for changes; slabs below a registration that is not this object's
        _kept                       _lock; slabs whose registrations the driver did not end
        pinned_bytes, pinning_s     the same, read by whoever reports them
        _is_released                _lock
    """

    def __init__(self, cuda: Cuda, arena: Arena, device: int) -> None:
        """Take a mapping; nothing is registered yet.

        Args:
            device: Index of the GPU that copies; a registration is made for it, in whichever thread.
        """
        self.pinned_bytes = 0
        self.pinning_s = 0.0
        self.rest_s = 0.0
        self.is_refused = False
        self._cuda, self._arena, self._device = cuda, arena, device
        self._lock = threading.Lock()
        self._thread = threading.local()
        slabs = range(len(arena.slab_fds))
        self._bases = [arena.address(slab) for slab in slabs]
        self._parts: list[list[tuple[int, int]]] = [[] for _ in slabs]  # offset and size, in order
        self._pinned_to = [0 for _ in slabs]
        self._foreign: set[int] = set()
        self._kept: set[int] = set()
        self._is_released = False

    def pin_all(self) -> None:
        """Register all memory that slabs have now. Blocks: about 0.1 s per GiB."""
        with self._lock:
            if self._takes_calls(self._set_device):
                for slab in range(len(self._bases)):
                    if not self.is_refused:
                        self._pin_to(slab, self._arena.memory_bytes(slab))

    def pin_slab(self, slab: int) -> None:
        """Register a slab before a copy uses a slot of it.

        A slot is granted when its slab has all its memory, so there is nothing left to register after this. Costs a
        system call where that is so already. What cannot be registered is copied as pageable memory.

        Raises:
            CudaError: The slab lies below a registration of other pages. It must not be copied: the GPU would read and
                write those.
        """
        size_bytes = self._arena.memory_bytes(slab)
        if self._pinned_to[slab] >= size_bytes:
            return
        with self._lock:
            if self._takes_calls(self._enter_thread):
                self._pin_to(slab, size_bytes)
            if self.is_refused:
                self._end_partial_window(slab)
            if slab in self._foreign:
                raise CudaError(f"host memory is registered by somebody else, and is not copied. slab={slab}")

    def pin_some(self) -> bool:
        """Register one whole window that has got its memory; says whether there may be more.

        What a slab has beyond its last whole window comes with its first use: it may be just growing.
        """
        for slab, base in enumerate(self._bases):
            end = min(_window_end(base + self._pinned_to[slab]) - base, SLAB_BYTES)
            may_pin = not self.is_refused and slab not in self._foreign
            if may_pin and self._pinned_to[slab] < end <= self._arena.memory_bytes(slab):
                with self._lock:
                    if self._takes_calls(self._enter_thread):
                        before_s = self.pinning_s
                        self._pin_to(slab, end)
                        self.rest_s = min(PIN_REST * (self.pinning_s - before_s), PIN_REST_MAX_S)
                        return True
        return False

    def release(self) -> set[int]:
        """End all registrations, before the arena is unmapped. Idempotent, and so is what it returns.

        Returns:
            Slabs that the driver did not let go of. Their addresses must stay mapped while this process lives: what got
            them next would be copied from and to the old pages.
        """
        with self._lock:
            if self._is_released:
                return self._kept
            self._is_released = True
            if not any(self._parts):
                return self._kept
            failed = self._failure(self._set_device)
            before: list[int] = []  # this thread's mode; vLLM may capture graphs in another one
            failed = self._failure(lambda: before.append(self._cuda.relax_capture())) or failed
            for slab, (base, parts) in enumerate(zip(self._bases, self._parts, strict=True)):
                while parts:
                    offset, size = parts.pop()
                    error = self._failure(partial(self._cuda.unregister, base + offset))
                    if error is not None:
                        failed = error
                        self._kept |= {slab} if error.code != NOT_REGISTERED else set()
                    self.pinned_bytes -= size
            if before:
                failed = self._failure(lambda: before.append(self._cuda.set_capture_mode(before[0]))) or failed
        if failed is not None:
            logger.warning(
                "the GPU's driver did not let go of all host memory. device=%d slabs_left_mapped=%d %s",
                self._device,
                len(self._kept),
                failed,
            )
        return self._kept

    # -- with the lock held ------------------------------------------------------------------------------------

    def _takes_calls(self, prepare: Callable[[], None]) -> bool:
        """Whether anything may be registered, in this thread, which is prepared for it."""
        if self._is_released or self.is_refused:
            return False
        return self._tried(prepare)

    def _pin_to(self, slab: int, end: int) -> None:
        """Register a slab's windows up to ``end``; none more of one that somebody else has registered."""
        while self._pinned_to[slab] < end and slab not in self._foreign:
            if not self._tried(lambda: self._pin_window(slab, end)):
                return

    def _pin_window(self, slab: int, end: int) -> None:
        base, parts = self._bases[slab], self._parts[slab]
        started_s = time.perf_counter()
        self._end_partial_window(slab)
        start = self._pinned_to[slab]
        stop = min(_window_end(base + start) - base, end)
        try:
            self._cuda.register(base + start, stop - start)
        except CudaError as exc:
            if exc.code != ALREADY_REGISTERED:
                raise
            # No refusal of the others: they are tried, for such a registration may lie below several slabs.
            self._foreign.add(slab)
            logger.warning(
                "host memory is registered by somebody else and is not copied. device=%d slab=%d: %s",
                self._device,
                slab,
                exc,
            )
            return
        parts.append((start, stop - start))
        self.pinned_bytes += stop - start
        self.pinning_s += time.perf_counter() - started_s
        self._pinned_to[slab] = stop

    def _end_partial_window(self, slab: int) -> None:
        """End the registration of a window that is registered in part, if the slab's last one is.

        The slab's memory ended within the window then, and there is more now: it serves other slots, none of which is
        copied before this.
        """
        parts = self._parts[slab]
        if not parts or not (self._bases[slab] + self._pinned_to[slab]) % WINDOW_BYTES:
            return
        start, size = parts[-1]
        self._cuda.unregister(self._bases[slab] + start)
        parts.pop()
        self._pinned_to[slab] = start
        self.pinned_bytes -= size

    def _tried(self, call: Callable[[], None]) -> bool:
        """Make a call; after one that failed nothing more is registered, and that is said once."""
        error = self._failure(call)
        if error is not None:
            self.is_refused = True
            logger.warning(
                "host memory is not pinned any further: copies of the rest are slower, all else is as before. "
                "device=%d pinned_bytes=%d: %s",
                self._device,
                self.pinned_bytes,
                error,
            )
        return error is None

    @staticmethod
    def _failure(call: Callable[[], None]) -> CudaError | None:
        try:
            call()
        except CudaError as exc:
            return exc
        return None

    def _set_device(self) -> None:
        self._cuda.set_device(self._device)

    def _enter_thread(self) -> None:
        """Once per thread. Not in the thread that captures graphs: it would capture in another mode."""
        if not getattr(self._thread, "is_entered", False):
            self._cuda.set_device(self._device)
            self._cuda.relax_capture()
            self._thread.is_entered = True
