"""A driver that holds pages as the GPU's does: what it was given stays in its hands, whatever the file has later.

A page that is spliced into a pipe is not copied: the pipe refers to the page itself, as a registration does. Read from
there, it gives what is in that very page now, and so what a GPU would read. No root and no GPU is needed.
"""

import ctypes
import fcntl
import os

from tiered_kv.chunks.cuda import CudaError

PAGE = 4096
_F_SETPIPE_SZ = 1031


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))


class PageHolder:
    """Stands for :class:`~tiered_kv.chunks.cuda.Cuda` where pages and not calls are looked at."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, int, int]] = {}  # by address: size and the pipe's two ends
        self._libc = ctypes.CDLL(None, use_errno=True)

    def set_device(self, index: int) -> None:
        """Any will do."""

    def relax_capture(self) -> int:
        """Nothing is captured."""
        return 0

    def set_capture_mode(self, mode: int) -> int:
        return mode

    def register(self, address: int, size_bytes: int) -> None:
        """Hold the pages that are there now."""
        for start, (size, _, _) in self._held.items():
            if start < address + size_bytes and address < start + size:
                raise CudaError("registered already", code=712)
        read, write = os.pipe()
        fcntl.fcntl(write, _F_SETPIPE_SZ, size_bytes)
        part = _Range(address, size_bytes)
        done = self._libc.vmsplice(write, ctypes.byref(part), ctypes.c_size_t(1), 0)
        assert done == size_bytes, f"the pipe took {done} of {size_bytes} bytes: {os.strerror(ctypes.get_errno())}"
        self._held[address] = (size_bytes, read, write)

    def unregister(self, address: int) -> None:
        """Let them go."""
        if address not in self._held:
            raise CudaError("not registered", code=713)
        _, read, write = self._held.pop(address)
        os.close(read)
        os.close(write)

    @property
    def held_bytes(self) -> int:
        """Of all pages."""
        return sum(size for size, _, _ in self._held.values())

    def stale(self) -> list[int]:
        """Addresses of pages where the CPU has another page by now. Writes into all of them."""
        found = []
        for address, (size, read, _) in self._held.items():
            for start in range(address, address + size, PAGE):
                ctypes.memmove(start, start.to_bytes(8, "little"), 8)
            seen = self._seen(read, size)
            found += [
                address + at for at in range(0, size, PAGE) if seen[at : at + 8] != (address + at).to_bytes(8, "little")
            ]
        return found

    def _seen(self, read: int, size_bytes: int) -> bytes:
        """What is in the pages of a pipe, which keeps them: a second one gets references to them, too."""
        far, near = os.pipe()
        try:
            fcntl.fcntl(near, _F_SETPIPE_SZ, size_bytes)
            done = self._libc.tee(read, near, ctypes.c_size_t(size_bytes), 0)
            assert done == size_bytes, f"{done} of {size_bytes} bytes: {os.strerror(ctypes.get_errno())}"
            seen = b""
            while len(seen) < size_bytes:
                seen += os.read(far, size_bytes - len(seen))
            return seen
        finally:
            os.close(far)
            os.close(near)
