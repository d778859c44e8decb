"""vLLM's host memory as the server can share it: the file behind the rows, and uses that the server makes of them.

vLLM cuts its host memory for offloading out of one file in shared memory, which it maps in every process and whose
name it removes. Its descriptor is lent to the server, which reads blobs from its disk into rows and writes rows into
files by itself; no thread here copies anything, and no slot of the server is in between.
"""

import fcntl
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Any, Final

import numpy as np

from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.server import protocol as m
from tiered_kv.server.client import SchedulerClient
from tiered_kv.server.row_loan import RowLoan

logger = logging.getLogger("vllm." + __name__)

FENCE_S: Final = 5.0
"""A server that was asked for rows back and says nothing for so long is ended: requests wait for them."""

LOOK_MAX_S: Final = 1.0
"""Of that, what counts at most between two looks. An engine that looks less often stood still itself, and so may its
server have, as where a container is paused; or the answer is behind more than a socket holds."""

STORED_MAX: Final = m.ROW_USES_MAX // 2
"""Rows that the server may be writing, of all jobs together. As many again may be read: 256 MiB by pages."""


class NotShared(Exception):
    """The rows are in no file that another process could map; the text says why."""


def shared_region(rows: "np.ndarray[Any, Any]") -> int:
    """A descriptor of the file that holds these rows, one after the other from its start; the caller's.

    Args:
        rows: uint8 of shape (rows, bytes of a row).

    Raises:
        NotShared: There is none.
        OSError: This process has no descriptor left to find it by.
    """
    if not rows.size or not rows.flags.c_contiguous:
        raise NotShared("the rows do not follow each other")
    start = int(rows.__array_interface__["data"][0])
    file, offset = _file_at(start)
    if _file_at(start + rows.nbytes - 1) != (file, offset + rows.nbytes - 1) or offset:
        raise NotShared(f"the rows are not the beginning of one file. offset={offset}")
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = int(name)
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) == file and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR:
                return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
        except OSError:  # closed meanwhile, by another thread
            continue
    raise NotShared("no descriptor of the rows' file is open for reading and writing")


def _file_at(address: int) -> tuple[tuple[int, int], int]:
    """The file that is mapped there to be shared, by device and inode, and the place in it."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            span, mode, offset, device, inode = line.split(None, 5)[:5]
            first, last = (int(one, 16) for one in span.split("-"))
            if first <= address < last:
                if not mode.startswith("rw") or mode[3] != "s" or inode == "0":
                    break
                major, minor = (int(one, 16) for one in device.split(":"))
                return (os.makedev(major, minor), int(inode)), int(offset, 16) + address - first
    raise NotShared("the rows are memory of this process alone")


class UseEnd(Enum):
    """How a use of a row ended. ELSEWHERE: the chunk is not on this machine's disk, and comes through a slot."""

    GOOD = "good"
    BAD = "bad"
    ELSEWHERE = "elsewhere"


@dataclass(slots=True)
class _Use:
    """One use that is not over.

    Attributes:
        number: The row's place in its job.
        waited_s: How long its job has waited for nothing but this; None: it does not.
    """

    job: int
    number: int
    generation: int
    is_load: bool
    waited_s: float | None = None


class RowUses:
    """Uses of rows by the server.

    A use is over when the server says so, or can touch no row any more (``server/row_loan.py``); never because somebody
    has waited long enough.

    Threads: the scheduler's. :meth:`lend` from any.

    Attributes:
        reading: Uses that read into rows.
    """

    def __init__(self, client: SchedulerClient) -> None:
        self._client = client
        self._lent: deque[RowLoan] = deque()
        self._loans: dict[int, RowLoan] = {}
        self._uses: dict[int, _Use] = {}
        self._of_jobs: dict[int, dict[int, None]] = {}  # their numbers, by job: thousands may end at once
        self._running: Counter[int] = Counter()  # uses that are not over, by the generation of their session
        self._asked_back = 0  # of these, those that were
        self._looked_s = 0.0  # when these were looked at last
        self._numbers = count(1)
        self.reading = 0

    def lend(self, loan: RowLoan) -> None:
        """A session's server has the rows from now on."""
        self._lent.append(loan)

    def _take_lent(self) -> None:
        while self._lent:
            loan = self._lent.popleft()
            earlier = self._loans.get(loan.generation)
            if earlier is None or earlier.is_over:
                self._loans[loan.generation] = loan
            else:  # workers that joined once more: the first server has the rows still
                loan.forget()

    @property
    def is_lent(self) -> bool:
        """Whether the server of the session that is open has the rows."""
        self._take_lent()
        loan_now = self._loans.get(self._client.generation)
        return loan_now is not None and self._client.is_ready and not loan_now.is_over

    def store(self, job: int, rows: Sequence[tuple[int, int, ChunkRecord]]) -> bool:
        """Have rows written: of each its place in the job, the row and its chunk. False: nothing has begun."""
        if len(self._uses) - self.reading + len(rows) > STORED_MAX:
            return False  # the server would end the session, and with it all that it reads and writes
        begun = self._begin(job, [number for number, _, _ in rows], is_load=False)
        told = [(use, row, record) for use, (_, row, record) in zip(begun, rows, strict=True)]
        return self._unless(begun, is_begun=self._client.store_rows(told))

    def load(self, job: int, rows: Sequence[tuple[int, int, bytes]], session: bytes) -> bool:
        """Have rows read: of each its place in the job, the row and the chunk's name. False: nothing has begun."""
        begun = self._begin(job, [number for number, _, _ in rows], is_load=True)
        told = [(use, row, name) for use, (_, row, name) in zip(begun, rows, strict=True)]
        return self._unless(begun, is_begun=self._client.load_rows(told, session, job))

    def _begin(self, job: int, numbers: Sequence[int], *, is_load: bool) -> list[int]:
        begun = []
        generation = self._client.generation  # now: if the session is lost while this is sent, it is of this one
        for number in numbers:
            use = next(self._numbers)
            self._uses[use] = _Use(job, number, generation, is_load)
            begun.append(use)
        if begun:
            self._of_jobs.setdefault(job, {}).update(dict.fromkeys(begun))
        self._running[generation] += len(begun)
        self.reading += is_load * len(begun)
        return begun

    def _unless(self, begun: Sequence[int], *, is_begun: bool) -> bool:
        for use in () if is_begun else begun:
            self._end(use)
        return is_begun

    def _end(self, number: int) -> _Use | None:
        use = self._uses.pop(number, None)
        if use is not None:
            self.reading -= use.is_load
            self._running[use.generation] -= 1
            self._asked_back -= use.waited_s is not None
            del self._of_jobs[use.job][number]
            if not self._of_jobs[use.job]:
                del self._of_jobs[use.job]
        return use

    def take_back(self, job: int) -> None:
        """Have what runs of a job ended as soon as can be; call it once."""
        self._looked_s = time.monotonic()
        wanted = [(number, self._uses[number]) for number in self._of_jobs.get(job, ())]
        for _, use in wanted:
            use.waited_s = 0.0
        self._asked_back += len(wanted)
        here = [number for number, use in wanted if use.generation == self._client.generation]
        if here:
            self._client.take_rows_back(here)

    def take_ended(self) -> Iterator[tuple[int, int, UseEnd]]:
        """What is over: job, place in the job, how."""
        while self._client.rows_ended:
            ended = self._client.rows_ended.popleft()
            for end, numbers in (
                (UseEnd.GOOD, ended.good),
                (UseEnd.BAD, ended.bad),
                (UseEnd.ELSEWHERE, ended.elsewhere),
            ):
                for number in numbers:
                    if (use := self._end(number)) is not None:
                        yield use.job, use.number, end
        current = self._client.generation
        if self._asked_back or self._running[current] != len(self._uses):  # else nobody but the server ends any
            yield from self._without_word()
        self._take_lent()  # an engine without jobs asks for none, and servers may come and go
        for generation in [one for one in self._loans if one != current and not self._running[one]]:
            self._loans.pop(generation).forget()
            del self._running[generation]

    def _without_word(self) -> Iterator[tuple[int, int, UseEnd]]:
        """End uses of sessions that are lost, and a server that was asked for rows back and does not answer."""
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, LOOK_MAX_S), now_s
        for number, use in list(self._uses.items()):
            loan = self._loans.get(use.generation)
            if use.generation != self._client.generation and (loan is None or loan.is_over):
                self._end(number)
                yield use.job, use.number, UseEnd.BAD
            elif loan is not None and use.waited_s is not None:
                use.waited_s += passed_s
                if use.waited_s > FENCE_S:
                    loan.end_server()

    def close(self) -> None:
        """Nobody waits for anything any more."""
        while self._lent:
            self._lent.popleft().forget()
        while self._loans:
            self._loans.popitem()[1].forget()
