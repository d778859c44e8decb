"""An engine's host memory and jobs on its rows, through a real server and without vLLM."""

import mmap
import os
import random
from pathlib import Path

import numpy as np

from tests.kit.server.clients import STORED_BY, namespace_fields, settings
from tests.kit.server.probe import wait_for
from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.keys.row_names import RowNames
from tiered_kv.ops.server_link import ServerLink
from tiered_kv.server import protocol as m
from tiered_kv.server.worker_client import pages_on_the_wire
from tiered_kv.vllm.row_jobs import Done, RowJobs

ROW_BYTES, ROWS = 8192, 256
TOKENS = 64
WAIT_S = 20.0


class Rows:
    """An engine's host memory and its jobs; prompts are lists of vLLM's keys."""

    def __init__(self, root: Path, *, is_shared: bool, **more: object) -> None:
        config = settings(root, **{"lookup_timeout_ms": 20_000, "disk_bytes": "256MiB", "chunk_tokens": TOKENS} | more)
        self.memory = shared_rows() if is_shared else np.zeros((ROWS, ROW_BYTES), np.uint8)
        page = pages_on_the_wire([LayerPage("row", "U8", (ROW_BYTES,), "B")])
        join = m.JoinWorker(0, 1, TOKENS, TOKENS, namespace_fields(), page, stored_by=STORED_BY)
        self.jobs = RowJobs(config, f"rows-{os.urandom(4).hex()}", join, self.memory)
        self.root = root
        self.done: dict[int, Done] = {}
        self._last = 0
        assert self.jobs.wait_ready(20)

    def names(self, keys: list[bytes]) -> RowNames:
        assert self.jobs.namespace is not None
        return RowNames(self.jobs.namespace, keys)

    def begin(self, keys: list[bytes], places: list[tuple[int, int]], *, is_load: bool, wait_s: float = WAIT_S) -> int:
        self._last += 1
        if is_load:
            self.jobs.load(self._last, self.names(keys), places, wait_s)
        else:
            self.jobs.store(self._last, self.names(keys), places, bytes(16))
        return self._last

    def end(self, *jobs: int) -> list[list[bool]]:
        def are_done() -> bool:
            for one in self.jobs.take_done():
                assert one.job not in self.done, "a job was told twice"
                self.done[one.job] = one
            return self.done.keys() >= set(jobs)

        wait_for(are_done, "jobs to end", deadline_s=60)
        return [self.done[job].good for job in jobs]

    def store(self, keys: list[bytes], first: int = 0, count: int | None = None) -> list[bool]:
        """Store chunks from ``first`` on from the rows of the same number."""
        places = [(index, index) for index in range(first, first + (len(keys) - first if count is None else count))]
        return self.end(self.begin(keys, places, is_load=False))[0]

    def load(self, keys: list[bytes], into: int, first: int = 0) -> list[bool]:
        places = [(index, into + index) for index in range(first, len(keys))]
        return self.end(self.begin(keys, places, is_load=True))[0]

    def held(self, keys: list[bytes]) -> int:
        find = self.jobs.find(self.names(keys))
        assert find is not None
        answers: list[int | None] = []

        def is_known() -> bool:
            self.jobs.poll()
            answers.append(self.jobs.answer(find, 1.0))
            return answers[-1] is not None

        wait_for(is_known, "an answer")
        assert answers[-1] is not None
        return answers[-1]

    def empty_host(self) -> None:
        link = ServerLink.of_directory(self.root)
        assert link is not None
        with link:
            link.evict("host", b"", None, holes=True)


def shared_rows() -> np.ndarray:
    """As vLLM makes them: a file in shared memory, mapped by whoever has it."""
    fd = os.memfd_create("rows", os.MFD_CLOEXEC)
    os.ftruncate(fd, ROWS * ROW_BYTES)
    memory = mmap.mmap(fd, ROWS * ROW_BYTES)  # it keeps a descriptor of its own
    os.close(fd)
    return np.frombuffer(memory, np.uint8).reshape(ROWS, ROW_BYTES)


def prompt(number: int, count: int) -> list[bytes]:
    source = random.Random(number)
    return [source.randbytes(32) + bytes(4) for _ in range(count)]


def fill(rows: Rows, number: int) -> np.ndarray:
    """Other bytes in every row, which are returned."""
    rows.memory[:] = np.random.default_rng(number).integers(0, 256, rows.memory.shape, np.uint8)
    return rows.memory.copy()
