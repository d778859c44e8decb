"""The caller's memory on loan to a request that runs on another thread and may be given up before it ends.

A request that missed its deadline goes on for a moment on its own thread. By then the caller may have given the slot to
another blob, so not a byte of it may be read or written any more: every access is under the loan's lock, and ending the
loan takes that lock once. Pieces are copied, never lent on: a transport keeps what it could not send yet.

Why at all: a whole blob in fresh memory costs more than its transfer (docs/decisions/0006-object-client.md). Called by
``object_media.py``.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Final, Self

PIECE_BYTES: Final = 256 << 10
"""Small enough to come from memory that was used a moment ago, large enough that the turns of a loop do not count."""


class Loan:
    """A piece of the caller's memory until the ``with`` block ends.

    Threads: the block is one thread, ``take`` and ``give`` may be another.

    Raises:
        asyncio.CancelledError: From ``take`` and ``give``, once the loan has ended: whoever asks was given up.
    """

    def __init__(self, memory: memoryview) -> None:
        self._lock = threading.Lock()
        self._memory: memoryview | None = memory
        self.size_bytes = len(memory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._memory = None

    def take(self, offset: int, data: bytes) -> None:
        """Copy ``data`` into the memory."""
        with self._lock:
            if self._memory is None:
                raise asyncio.CancelledError
            self._memory[offset : offset + len(data)] = data

    def give(self, offset: int, length: int) -> bytes:
        """Copy at most ``length`` bytes out of the memory."""
        with self._lock:
            if self._memory is None:
                raise asyncio.CancelledError
            return bytes(self._memory[offset : offset + length])


class LoanBody:
    """A request's body out of a loan: a file for botocore, which measures and may hash it, pieces for aiohttp.

    Not an ``io.IOBase``: aiohttp would read that in another thread, 64 KiB at a time.
    """

    def __init__(self, loan: Loan) -> None:
        self._loan = loan
        self._offset = 0

    def __len__(self) -> int:
        return self._loan.size_bytes

    def read(self, size: int | None = -1) -> bytes:
        length = self._loan.size_bytes if size is None or size < 0 else size
        data = self._loan.give(self._offset, length)
        self._offset += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._loan.size_bytes}[whence]
        self._offset = max(0, start + offset)
        return self._offset

    def tell(self) -> int:
        return self._offset

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """All of it, from the beginning: a request that is tried again starts anew."""
        for offset in range(0, self._loan.size_bytes, PIECE_BYTES):
            yield self._loan.give(offset, PIECE_BYTES)
