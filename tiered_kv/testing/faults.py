"""A tier that fails on purpose, at chosen or seeded operations, around any real tier.

Owns the count of operations and the plan. What a fault does, by the operation that meets it:

    fault        put                          get_into                  contains / delete / scan / flush / describe
    ERROR        TierUnavailable, no effect   TierUnavailable           TierUnavailable
    LATE_ERROR   stored, TierUnavailable      TierUnavailable           done, TierUnavailable
    FULL         CapacityExceeded             -                         -
    TORN_WRITE   second half zeros, no error  -                         -
    BIT_FLIP     -                            one bit of the answer     -
    VANISH       stored, then deleted         deleted first: False      contains: deleted first, False

A dash means that the operation works as always. ``usage``, ``figures``, ``pinned``, ``record_use`` and ``close`` never
fail and are not counted.
"""

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum

from tiered_kv.errors import CapacityExceeded, TierUnavailable
from tiered_kv.tiers.base import BlobInfo, BlobName, Tier, TierWrapper


class Fault(Enum):
    """What goes wrong; see the module's table."""

    ERROR = "error"
    LATE_ERROR = "late_error"
    FULL = "full"
    TORN_WRITE = "torn_write"
    BIT_FLIP = "bit_flip"
    VANISH = "vanish"


Plan = Callable[[int], Fault | None]
"""Takes the number of an operation, from 0, and says what happens to it."""

SlowHook = Callable[[str, BlobName | None], None]
"""Called in the caller's thread before every operation; it may block as long as the test likes."""


def at(faults: Mapping[int, Fault]) -> Plan:
    """Fail exactly these operations."""
    return faults.get


def seeded(seed: int, rate: float, faults: tuple[Fault, ...] = tuple(Fault)) -> Plan:
    """Fail each operation with probability ``rate``; the same seed and number always give the same answer."""

    def plan(number: int) -> Fault | None:
        draw = random.Random(f"{seed} {number}")
        return draw.choice(faults) if draw.random() < rate else None

    return plan


class FaultyTier(TierWrapper):
    """Meets each operation with what the plan says.

    Attributes:
        operation_count: Operations met so far, so that a test can run once without faults and then fail each in turn.

    Threads: any; numbers are given out in the order of arrival.
    """

    def __init__(self, inner: Tier, plan: Plan, on_operation: SlowHook | None = None) -> None:
        super().__init__(inner)
        self.operation_count = 0
        self._plan = plan
        self._hook = on_operation
        self._lock = threading.Lock()

    def _meet(self, operation: str, name: BlobName | None) -> Fault | None:
        if self._hook is not None:
            self._hook(operation, name)
        with self._lock:
            number = self.operation_count
            self.operation_count += 1
        fault = self._plan(number)
        if fault is Fault.ERROR:
            raise TierUnavailable(f"planned fault. operation={operation} number={number}")
        return fault

    def put(self, name: BlobName, blob: memoryview) -> None:
        fault = self._meet("put", name)
        if fault is Fault.FULL:
            raise CapacityExceeded("planned fault. operation=put")
        if fault is Fault.TORN_WRITE:
            torn = bytearray(blob)
            torn[len(torn) // 2 :] = bytes(len(torn) - len(torn) // 2)
            blob = memoryview(torn)
        self.inner.put(name, blob)
        if fault is Fault.VANISH:
            self.inner.delete(name)
        _raise_late(fault, "put")

    def get_into(self, name: BlobName, buffer: memoryview) -> bool:
        fault = self._meet("get", name)
        if fault is Fault.VANISH:
            self.inner.delete(name)
        found = self.inner.get_into(name, buffer)
        if found and fault is Fault.BIT_FLIP:
            position = random.Random(f"{name.key.hex()} {self.operation_count}").randrange(len(buffer) * 8)
            buffer[position // 8] ^= 1 << position % 8
        _raise_late(fault, "get")
        return found

    def contains(self, name: BlobName) -> bool:
        fault = self._meet("contains", name)
        if fault is Fault.VANISH:
            self.inner.delete(name)
        found = self.inner.contains(name)
        _raise_late(fault, "contains")
        return found

    def count_held(self, names: Sequence[BlobName], hint: str = "") -> int:
        return Tier.count_held(self, names, hint)  # a fault for each question

    def delete(self, name: BlobName) -> bool:
        fault = self._meet("delete", name)
        found = self.inner.delete(name)
        _raise_late(fault, "delete")
        return found

    def scan(self) -> Iterator[BlobInfo]:
        _raise_late(self._meet("scan", None), "scan")
        return self.inner.scan()

    def flush(self) -> None:
        fault = self._meet("flush", None)
        self.inner.flush()
        _raise_late(fault, "flush")

    def describe(self, namespace: bytes, record: bytes) -> None:
        fault = self._meet("describe", None)
        self.inner.describe(namespace, record)
        _raise_late(fault, "describe")


def _raise_late(fault: Fault | None, operation: str) -> None:
    """The operation was done, but its caller is told that it failed: an answer lost on the way back."""
    if fault is Fault.LATE_ERROR:
        raise TierUnavailable(f"planned fault after the fact. operation={operation}")
