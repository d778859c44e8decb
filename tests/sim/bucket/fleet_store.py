"""The bucket of a simulated fleet: what lies in it, how long requests take, and how many of which kind there were.

Unlike the one of ``world.py`` it injects no faults of single requests and looks cheap enough for hundreds of servers:
paths are kept in order, blobs are sizes without bytes, and sums are kept instead of made.
"""

import heapq
import time
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from tests.sim.virtual_time import EPOCH_S, Hub
from tiered_kv.errors import TierUnavailable
from tiered_kv.fleet.layout import Found

ENTRY_BYTES = 250
"""Of a LIST's answer for each object, beside its name: LastModified, ETag, Size, StorageClass and their tags (S3)."""

READS = frozenset({"get", "head", "list"})


@dataclass(frozen=True, slots=True)
class Service:
    """How a store serves. Times are medians; one request in a hundred takes three times that.

    Attributes:
        request_s: Of a request with a small body or none.
        page_s: Of a full page of a LIST, beyond that.
        page_objects: On a full page.
        delete_s: Of each object of a batch, beyond that.
        body_s: Of a blob's body, beyond that.
        writes_per_s: PUTs and DELETEs it takes, S3's figure for one prefix; those beyond are answered 503.
        reads_per_s: The same of GET, HEAD and LIST.
        failing_share: Of requests, that fail for no reason.
        reads_at_once: Of a caller that asks for several objects together.
    """

    request_s: float = 0.02
    page_s: float = 0.08
    page_objects: int = 1000
    delete_s: float = 0.0004
    body_s: float = 0.08
    writes_per_s: int = 3500
    reads_per_s: int = 5500
    failing_share: float = 0.0
    reads_at_once: int = 16


@dataclass(frozen=True, slots=True)
class Stored:
    """An object, and what a LIST tells of it; ``data`` of a blob is empty."""

    path: str
    data: bytes
    size_bytes: int
    modified_s: float


@dataclass(slots=True)
class Tally:
    """Requests of one phase of a run.

    Attributes:
        requests: By kind.
        seconds: By second and whether they read: how many.
        refused_requests: Answered 503, or lost.
        listed_bytes: Of the answers to LISTs, about.
    """

    requests: Counter[str] = field(default_factory=Counter)
    seconds: Counter[tuple[int, bool]] = field(default_factory=Counter)
    refused_requests: int = 0
    listed_bytes: int = 0

    def most_per_s(self, *, reads: bool) -> int:
        """Most requests of a second."""
        return max((count for (_, is_read), count in self.seconds.items() if is_read == reads), default=0)


class Bucket:
    """Objects in the order of a LIST, and the store's side of every request."""

    def __init__(self, hub: Hub, service: Service) -> None:
        self.hub = hub
        self.service = service
        self.objects: dict[str, Stored] = {}
        self._paths: list[str] = []
        self.used_bytes = self.most_bytes = 0
        self.tally = Tally()

    def fill(self, sizes: dict[str, int], modified_s: float) -> None:
        """Blobs that lay there before; only at the beginning."""
        assert not self.objects
        self.objects = {path: Stored(path, b"", size, modified_s) for path, size in sizes.items()}
        self._paths = sorted(self.objects)
        self.used_bytes = sum(sizes.values())
        self.most_bytes = self.used_bytes

    def put(self, path: str, data: bytes, size_bytes: int) -> None:
        old = self.objects.get(path)
        if old is None:
            insort(self._paths, path)
        self.objects[path] = Stored(path, data, size_bytes, float(int(EPOCH_S + self.hub.now_s)))
        self.used_bytes += size_bytes - (old.size_bytes if old else 0)
        self.most_bytes = max(self.most_bytes, self.used_bytes)

    def remove(self, path: str) -> None:
        old = self.objects.pop(path, None)
        if old is not None:
            del self._paths[bisect_left(self._paths, path)]
            self.used_bytes -= old.size_bytes

    def page(self, prefix: str, after: str) -> list[Stored]:
        """The next page of a LIST."""
        start = bisect_right(self._paths, after) if after else bisect_left(self._paths, prefix)
        found = []
        for path in self._paths[start : start + self.service.page_objects]:
            if not path.startswith(prefix):
                break
            found.append(self.objects[path])
        self.tally.listed_bytes += sum(len(one.path) + ENTRY_BYTES for one in found)
        return found

    def seconds(self, median_s: float) -> float:
        """How long a request takes this time."""
        return median_s * self.hub.draw.lognormvariate(0, 0.47)

    def count(self, kind: str) -> None:
        """Take a request in.

        Raises:
            TierUnavailable: There were too many in this second.
        """
        tally, is_read = self.tally, kind in READS
        slot = int(self.hub.now_s), is_read
        tally.requests[kind] += 1
        tally.seconds[slot] += 1
        if tally.seconds[slot] > (self.service.reads_per_s if is_read else self.service.writes_per_s):
            tally.refused_requests += 1
            raise TierUnavailable("the simulated store asks for fewer requests (503)")
        if self.service.failing_share and self.hub.draw.random() < self.service.failing_share:
            tally.refused_requests += 1
            raise TierUnavailable("the simulated store failed")


class Machine(Protocol):
    """What the store has to know of the server that asks."""

    @property
    def frozen_until_s(self) -> float: ...
    def created(self, path: str) -> None: ...


class FleetStore:
    """The bucket as one server sees it; satisfies ``layout.Objects``.

    Attributes:
        cpu_s: CPU time that its own thread spent in here, which is the simulation's and not the product's.
        request_count: Requests of this server's keeper.
    """

    def __init__(self, bucket: Bucket, machine: Machine) -> None:
        self._bucket = bucket
        self._machine = machine
        self.cpu_s = 0.0
        self.request_count = 0

    def get(self, path: str, size_max: int | None = None) -> bytes | None:
        del size_max
        with self._own():
            self._request("get", self._bucket.service.request_s)
            found = self._bucket.objects.get(path)
            return found.data if found else None

    def get_many(self, paths: Sequence[str], size_max: int) -> list[Found]:
        """Each answer comes when it comes, and tells of that moment."""
        del size_max
        bucket, service = self._bucket, self._bucket.service
        found: list[Found] = [None] * len(paths)
        with self._own():
            begun_s, free_s = bucket.hub.now_s, [0.0] * service.reads_at_once
            due: list[tuple[float, int]] = []
            for number in range(len(paths)):
                end_s = free_s[0] + bucket.seconds(service.request_s)
                heapq.heapreplace(free_s, end_s)
                due.append((end_s, number))
            for end_s, number in sorted(due):
                try:
                    self._answer("get", max(0.0, begun_s + end_s - bucket.hub.now_s))
                except TierUnavailable as exc:
                    found[number] = exc
                    continue
                stored = bucket.objects.get(paths[number])
                found[number] = stored.data if stored else None
        return found

    def put(self, path: str, data: bytes | memoryview) -> None:
        with self._own():
            self._request("put", self._bucket.service.request_s)
            self._bucket.put(path, bytes(data), len(data))

    def create(self, path: str, data: bytes | memoryview) -> bool:
        with self._own():
            self._request("put", self._bucket.service.request_s)
            if path in self._bucket.objects:
                return False
            self._bucket.put(path, bytes(data), len(data))
            self._machine.created(path)
            return True

    def head(self, path: str) -> Stored | None:
        with self._own():
            self._request("head", self._bucket.service.request_s)
            return self._bucket.objects.get(path)

    def list(self, prefix: str) -> Iterator[Stored]:
        bucket, after = self._bucket, ""
        while True:
            with self._own():
                self._request("list", bucket.service.request_s)
                page = bucket.page(prefix, after)
                bucket.hub.sleep(bucket.seconds(bucket.service.page_s * len(page) / bucket.service.page_objects))
            yield from page
            if len(page) < bucket.service.page_objects:
                return
            after = page[-1].path

    def delete(self, paths: Sequence[str]) -> None:
        if not paths:
            return
        with self._own():
            service = self._bucket.service
            self._request("delete", service.request_s + service.delete_s * len(paths))
            for path in paths:
                self._bucket.remove(path)

    def creates_atomically(self) -> bool:
        return True

    def _request(self, kind: str, median_s: float) -> None:
        self._answer(kind, self._bucket.seconds(median_s))

    def _answer(self, kind: str, seconds: float) -> None:
        """Wait until the answer comes, and until this machine goes on if it stands still by then.

        Raises:
            TierUnavailable: The store refused, or failed.
        """
        hub = self._bucket.hub
        self.request_count += 1
        hub.sleep(seconds)
        while self._machine.frozen_until_s > hub.now_s:
            hub.sleep(self._machine.frozen_until_s - hub.now_s)
        self._bucket.count(kind)

    @contextmanager
    def _own(self) -> Iterator[None]:
        begun_s = time.thread_time()
        try:
            yield
        finally:
            self.cpu_s += time.thread_time() - begun_s
