"""Blobs on s3fs' event loop, in pieces between the socket and the caller's memory: for what threads cannot honour.

Owns the loan of the caller's memory to another thread. A whole blob in fresh memory costs more than its transfer
(docs/decisions/0006-object-client.md), hence the loan. Which locations need it: ``s3.py``.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Final, Self

from tiered_kv.tiers.object.errors import IncompleteRead, TakenUnsure, is_conflict, is_taken
from tiered_kv.tiers.object.loop_calls import LoopCalls
from tiered_kv.tiers.object.medium import check_expected
from tiered_kv.tiers.object.s3_answers import (
    CONFLICT_WAIT_S,
    CREATE_TRIES,
    first_bytes,
    is_beyond_the_end,
    was_asked_before,
    whole_bytes,
)

PIECE_BYTES: Final = 256 << 10
"""Small enough to come from memory that was used a moment ago, large enough that the turns of a loop do not count."""


class BufferLoan:
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

    def __init__(self, loan: BufferLoan) -> None:
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


class LoopBodies:
    """Blobs through s3fs' client.

    Threads: any.
    """

    def __init__(self, calls: LoopCalls) -> None:
        self._calls = calls

    def get_into(self, key: str, path: str, buffer: memoryview) -> None:
        with BufferLoan(buffer) as loan:
            self._calls.run(self._get_into(key, path, loan))

    async def _get_into(self, key: str, path: str, loan: BufferLoan) -> None:
        try:
            answer = await self._calls.call("get_object", Key=key, Range=first_bytes(loan.size_bytes))
        except OSError as exc:
            if not is_beyond_the_end(exc):
                raise
            check_expected(path, 0, loan.size_bytes)
            return
        body, offset = answer["Body"], 0
        try:
            check_expected(path, whole_bytes(answer), loan.size_bytes)
            while piece := await body.read(PIECE_BYTES):
                loan.take(offset, piece)
                offset += len(piece)
        finally:
            body.close()
        if offset != loan.size_bytes:
            raise IncompleteRead(f"observed={offset} expected={loan.size_bytes}")

    def put(self, key: str, data: memoryview, condition: Mapping[str, str]) -> None:
        if len(data) <= PIECE_BYTES and not condition:  # aiohttp sends bytes again unheard: a create would meet its own
            self._calls.run(self._put(key, bytes(data), condition))
            return
        with BufferLoan(data) as loan:
            self._calls.run(self._put(key, LoanBody(loan), condition))

    async def _put(self, key: str, data: bytes | LoanBody, condition: Mapping[str, Any]) -> None:
        is_unclear = False
        for left in reversed(range(CREATE_TRIES)):
            try:
                await self._calls.call("put_object", Key=key, Body=data, **condition)
                return
            except OSError as exc:
                is_unclear |= was_asked_before(exc)
                if is_unclear and is_taken(exc):
                    raise TakenUnsure from exc
                if not (left and is_conflict(exc)):
                    raise
            await asyncio.sleep(CONFLICT_WAIT_S)

    def close(self) -> None:
        """Nothing to give back: the connections are the calls'."""
