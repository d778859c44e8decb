"""The few calls of CUDA that torch does not give: registering host memory, and many copies by one call.

Through ctypes, so no call holds the GIL. Must not decide what is registered (``pinned.py``) nor what is copied. Nothing
here needs torch or a GPU to be imported. CUDA keeps the error of a failed call for the thread that made it, and torch
would raise it at its next launch: every failure is taken out of the thread before it is raised.

AMD's HIP has the same calls under its own prefix, and its batched copy is a loop inside (ROCm/clr#273), so it is not
used. Not run on an AMD GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tiered_kv.errors import TieredKVError

ORDER_STREAM: Final = 1
"""A batch reads its sources when the stream gets to it: what earlier work of the stream writes is copied."""

ORDER_ANY: Final = 3
"""A batch may read its sources at once, before earlier work of the stream ends: they are complete by now."""

_PORTABLE = 0x01  # registered for every context of the process
_CAPTURE_RELAXED = 2
_HOST_POINTER_FOR_REGISTERED = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
ALREADY_REGISTERED: Final = 712
NOT_REGISTERED: Final = 713
_BATCH_VERSION = 12080  # later ones of cuMemcpyBatchAsync take other arguments; the driver keeps this one
_RUNTIMES = {"libcudart.so": "cuda", "libamdhip64.so": "hip"}  # and the prefix of their calls


class CudaError(TieredKVError):
    """A call of the runtime or the driver failed, or there is no runtime in this process.

    Attributes:
        call: Name of the call; empty: it was none.
        code: What it returned.
    """

    def __init__(self, message: str, call: str = "", code: int = 0) -> None:
        super().__init__(message)
        self.call, self.code = call, code


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: how a batch reads its sources, and hints that only matter for managed memory."""

    _fields_ = (
        ("source_order", ctypes.c_uint),
        ("source", _Location),
        ("destination", _Location),
        ("flags", ctypes.c_uint),
    )


_BATCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # destinations
    ctypes.c_void_p,  # sources
    ctypes.c_void_p,  # sizes
    ctypes.c_size_t,
    ctypes.POINTER(_Attributes),
    ctypes.POINTER(ctypes.c_size_t),  # the first copy that each of the attributes is for
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_size_t),  # out: the copy that was refused
    ctypes.c_void_p,
)


class Cuda:
    """The runtime and the driver that this process uses.

    Threads: any. The device, the kept error and the capture mode are the calling thread's: one that calls here has set
    its device first. A new thread's device is 0, and a call would open a context there.
    """

    def __init__(self, runtime: str, driver: str | None, prefix: str = "cuda") -> None:
        """Open the libraries.

        Args:
            runtime: Path of the runtime's library.
            driver: Path or name of the driver's, or None: no batched copies.
            prefix: Of the runtime's calls.

        Raises:
            CudaError: The runtime cannot be opened or lacks a call.
        """
        self._prefix = prefix
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        try:
            library = ctypes.CDLL(runtime)
            self._register = _bound(library, f"{prefix}HostRegister", pointer, size, ctypes.c_uint)
            self._unregister = _bound(library, f"{prefix}HostUnregister", pointer)
            self._take_error = _bound(library, f"{prefix}GetLastError")
            self._set_device = _bound(library, f"{prefix}SetDevice", number)
            self._attribute = _bound(library, f"{prefix}DeviceGetAttribute", ctypes.POINTER(number), number, number)
            capture_mode = f"{prefix}ThreadExchangeStreamCaptureMode"
            self._exchange_capture_mode = _bound(library, capture_mode, ctypes.POINTER(number))
        except (OSError, AttributeError) as exc:
            raise CudaError(f"the runtime of the GPU cannot be used. library={runtime}: {exc}") from exc
        self._batch = None if driver is None else _find_batch(driver)

    @classmethod
    def loaded(cls) -> Cuda:
        """The runtime that torch has loaded: another copy of it would know nothing of torch's context.

        Raises:
            CudaError: None is loaded, or it cannot be used.
        """
        for path in _mapped_libraries():
            for name, prefix in _RUNTIMES.items():
                if os.path.basename(path).startswith(name):
                    return cls(path, "libcuda.so.1" if prefix == "cuda" else None, prefix)
        raise CudaError(f"no runtime of a GPU is loaded. looked_for={','.join(_RUNTIMES)}")

    @property
    def has_batch(self) -> bool:
        """Whether :meth:`copy_batch` can be called: with CUDA's driver from 12.8 on."""
        return self._batch is not None

    def register(self, address: int, size_bytes: int) -> None:
        """Pin a range of host memory, so that the GPU reads and writes it itself.

        Blocks: about 0.1 s per GiB in 4 KiB pages. The pages must stay what they are until :meth:`unregister`: the GPU
        goes on with these whatever the address means to the CPU.

        Raises:
            CudaError: Refused, for example because a part of the range is registered already (712).
        """
        self._check("HostRegister", self._register(address, size_bytes, _PORTABLE))

    def unregister(self, address: int) -> None:
        """End a registration; before the memory is unmapped.

        Raises:
            CudaError: No registration begins at this address (713).
        """
        self._check("HostUnregister", self._unregister(address))

    def set_device(self, index: int) -> None:
        """Let this thread's calls go to a device.

        Raises:
            CudaError: There is no such device.
        """
        self._check("SetDevice", self._set_device(index))

    def relax_capture(self) -> int:
        """Let this thread make calls that would break a CUDA graph another thread is capturing.

        Returns:
            The thread's mode before, for :meth:`set_capture_mode`.

        Raises:
            CudaError: Refused.
        """
        return self.set_capture_mode(_CAPTURE_RELAXED)

    def set_capture_mode(self, mode: int) -> int:
        """Set what this thread's calls may do beside a capture; returns what it was.

        Raises:
            CudaError: Refused.
        """
        exchanged = ctypes.c_int(mode)
        self._check("ThreadExchangeStreamCaptureMode", self._exchange_capture_mode(ctypes.byref(exchanged)))
        return exchanged.value

    def takes_host_pointers(self, device: int) -> bool:
        """Whether a device reaches registered memory by its host address, as a batched copy has to.

        Where it does not (WSL2) such a copy ends the process later, by an illegal access (sglang#40232).

        Raises:
            CudaError: There is no such device.
        """
        value = ctypes.c_int()
        code = self._attribute(ctypes.byref(value), _HOST_POINTER_FOR_REGISTERED, device)
        self._check("DeviceGetAttribute", code)
        return value.value == 1

    def copy_batch(
        self,
        destinations: npt.NDArray[np.int64],
        sources: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        stream: int,
        order: int = ORDER_STREAM,
    ) -> None:
        """Queue many copies on a stream by one call; the order among them is not defined.

        Args:
            destinations, sources, sizes: Addresses and bytes, one each per copy. Not needed after the call.
            stream: Its handle; CUDA takes no batch on the default stream.
            order: :data:`ORDER_STREAM` or :data:`ORDER_ANY`.

        Raises:
            CudaError: Refused; the message says at which copy. Those before it may run.
        """
        assert self._batch is not None, "a batched copy without a driver that has it"
        # Named here: a temporary would be freed while its bare address is in use.
        arrays = [np.ascontiguousarray(values, dtype=np.int64) for values in (destinations, sources, sizes)]
        count = len(arrays[0])
        assert all(array.shape == (count,) for array in arrays), "addresses and sizes are of different length"
        attributes, first, refused = _Attributes(order), ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = self._batch(
            *(array.ctypes.data for array in arrays),
            count,
            ctypes.byref(attributes),
            ctypes.byref(first),
            1,
            ctypes.byref(refused),
            stream,
        )
        if code:
            self._take_error()
            where = f" copy={refused.value}" if refused.value < count else ""
            name = "cuMemcpyBatchAsync"
            raise CudaError(f"{name} failed. code={code} copies={count}{where}", name, code)

    def _check(self, name: str, code: int) -> None:
        if code:
            self._take_error()
            call = self._prefix + name
            raise CudaError(f"{call} failed. code={code}", call, code)


def _bound(library: ctypes.CDLL, name: str, *arguments: Any) -> Any:
    call = getattr(library, name)
    call.argtypes, call.restype = arguments, ctypes.c_int
    return call


def _find_batch(driver: str) -> Any:
    """``cuMemcpyBatchAsync``, or None: the driver is older, or there is none."""
    try:
        find = ctypes.CDLL(driver).cuGetProcAddress_v2
    except (OSError, AttributeError):
        return None
    find.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)
    find.restype = ctypes.c_int
    found, status = ctypes.c_void_p(), ctypes.c_int()
    code = find(b"cuMemcpyBatchAsync", ctypes.byref(found), _BATCH_VERSION, 0, ctypes.byref(status))
    return _BATCH(found.value) if code == 0 and found.value else None


def _mapped_libraries() -> Iterator[str]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6:  # addresses, permissions, offset, device, inode, path
            yield words[5]
