"""Faults of the cache simulation's media: what is wrong with one medium now, and what that does to an operation.

Owns which kinds are on; the schedule turns them on and off. ``FaultyTier`` does what an operation meets; stalls and
slowness happen before it. Every blob that a fault may have changed behind the product's back is noted: it may be lost.
"""

from collections import Counter
from collections.abc import Mapping

from tests.sim.cache.oracle import label
from tests.sim.virtual_time import Hub
from tiered_kv.testing.faults import Fault
from tiered_kv.tiers.base import BlobName

STALL_MAX_S = 20.0
SLOWER = 20.0

_EFFECT: Mapping[str, tuple[Fault, tuple[str, ...]]] = {
    "dead": (Fault.ERROR, ()),
    "errors": (Fault.ERROR, ()),
    "late_errors": (Fault.LATE_ERROR, ()),
    "full": (Fault.FULL, ("put",)),
    "torn": (Fault.TORN_WRITE, ("put",)),
    "flips": (Fault.BIT_FLIP, ("get",)),
    "vanish": (Fault.VANISH, ("put", "get", "contains")),
}
"""What a kind does, and to which operations (none named: all)."""

_HARMS = frozenset({("torn", "put"), ("vanish", "put"), ("vanish", "get"), ("vanish", "contains"), ("flips", "get")})

RATES: Mapping[str, tuple[float, float]] = {
    "dead": (1.0, 1.0),
    "errors": (0.1, 0.7),
    "late_errors": (0.1, 0.5),
    "full": (0.3, 1.0),
    "torn": (0.1, 1.0),
    "flips": (0.1, 1.0),
    "vanish": (0.05, 0.5),
    "stall": (0.05, 0.3),
    "slow": (1.0, 1.0),
}
"""How likely an operation meets a kind while it is on: drawn between these for every window."""


class Damage:
    """Blobs of one medium that faults may have changed or removed."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def add(self, name: BlobName) -> None:
        self.keys.add(name.key)

    def __contains__(self, name: BlobName) -> bool:
        return name.key in self.keys


class FaultSource:
    """The faults of one medium, as one node meets them."""

    def __init__(self, hub: Hub, medium: str, damage: Damage, struck: Counter[str]) -> None:
        self.rates: dict[str, float] = {}
        self.medium = medium
        self._hub = hub
        self._damage = damage
        self._struck = struck
        self._operation: tuple[str, BlobName | None] = ("", None)
        self._unharmed: set[BlobName] = set()  # puts under way that no fault has met
        self._vanished: set[BlobName] = set()  # what a fault deletes, now or before

    def begin(self, kind: str) -> None:
        self.rates[kind] = self._hub.draw.uniform(*RATES[kind])

    def end(self, kind: str) -> None:
        self.rates.pop(kind, None)

    def delay_s(self, seconds: float) -> float:
        """How long a transfer takes that should take so long."""
        if "slow" in self.rates:
            self._strike("slow")
            seconds *= SLOWER
        if self._hub.draw.random() < self.rates.get("stall", 0.0):
            self._strike("stall")
            seconds += self._hub.draw.uniform(1.0, STALL_MAX_S)
        return seconds

    def is_failing(self) -> bool:
        """Whether a request fails that is not an operation of a tier."""
        rate = max(self.rates.get("dead", 0.0), self.rates.get("errors", 0.0))
        if rate and self._hub.draw.random() < rate:
            self._strike("errors")
            return True
        return False

    def meet(self, operation: str, name: BlobName | None) -> None:
        """``FaultyTier``'s hook: what is asked for next."""
        self._operation = (operation, name)

    def plan(self, number: int) -> Fault | None:
        """``FaultyTier``'s plan: what that meets."""
        del number
        operation, name = self._operation
        for kind, (fault, operations) in _EFFECT.items():
            rate = self.rates.get(kind, 0.0)
            if not rate or (operations and operation not in operations) or self._hub.draw.random() >= rate:
                continue
            if self.medium.startswith("disk") and (fault, operation) == (Fault.LATE_ERROR, "put"):
                continue  # a disk that reports a failure has published nothing (the contract of ``Tier.put``)
            self._strike(kind)
            if operation == "put" and name is not None:
                self._unharmed.discard(name)
            self._hub.note(f"{self.medium} {kind} {operation} {label(name)}")
            if name is not None and ((kind, operation) in _HARMS or (fault, operation) == (Fault.LATE_ERROR, "delete")):
                self._damage.add(name)
                if fault is Fault.VANISH:
                    self._vanished.add(name)
            return fault
        if operation == "put" and name is not None:
            self._unharmed.add(name)
        return None

    def published(self, name: BlobName) -> None:
        """A disk has the blob anew: if no fault met its put, what happened to the old one is history.

        Not said of a bucket: others write there, and a put may leave what is there.
        """
        if name in self._unharmed:
            self._unharmed.discard(name)
            self._damage.keys.discard(name.key)

    def deleted(self, name: BlobName) -> None:
        """A disk's blob was deleted: if a fault did it, it may have stalled past a put that came after it began."""
        if name in self._vanished:
            self._damage.add(name)

    def _strike(self, kind: str) -> None:
        self._struck[f"{self.medium[:-1] if self.medium[-1].isdigit() else self.medium} {kind}"] += 1
