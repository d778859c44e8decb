"""What the connector measured since it was last asked, in the form that vLLM carries from workers and scheduler to logs
and metrics.

Plain numbers under names of ``prometheus.py``, so that they survive vLLM's pickle and msgpack::

    {"counters": {name: {labels: amount}}, "gauges": {name: {labels: value}}, "samples": {name: [seconds, ...]}}

``labels`` are the values of a metric's labels, joined by commas; none of them has a comma in it.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

SAMPLES_MAX: Final = 1 << 14
"""Kept of one histogram until somebody takes them; vLLM takes them every step, its log every ten seconds."""

_PARTS: Final = ("counters", "gauges", "samples")


@dataclass
class TieredKVStats(KVConnectorStats):
    """Counters add up, of gauges the last counts, samples are kept one by one.

    Threads: none of its own; one owner at a time.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part in _PARTS:
            self.data.setdefault(part, {})

    def reset(self) -> None:
        self.data = {part: {} for part in _PARTS}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def count(self, name: str, amount: float, *labels: str) -> None:
        """Add to a counter; nothing is nothing."""
        if amount:
            values = self.data["counters"].setdefault(name, {})
            key = ",".join(labels)
            values[key] = values.get(key, 0) + amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        self.data["gauges"].setdefault(name, {})[",".join(labels)] = value

    def sample(self, name: str, seconds: float) -> None:
        """Add an observation to a histogram."""
        samples = self.data["samples"].setdefault(name, [])
        if len(samples) < SAMPLES_MAX:
            samples.append(seconds)

    def counted(self, name: str, label: str | None = None) -> float:
        """A counter's amount over all its labels, or those that begin with ``label``."""
        values: dict[str, float] = self.data["counters"].get(name, {})
        return sum(amount for key, amount in values.items() if label is None or key.split(",")[0] == label)

    def aggregate(self, other: KVConnectorStats) -> "TieredKVStats":
        """Take in what another worker, or a later step, measured."""
        assert isinstance(other, TieredKVStats)
        for name, values in other.data["counters"].items():
            for key, amount in values.items():
                self.count(name, amount, key)
        for name, values in other.data["gauges"].items():
            self.data["gauges"].setdefault(name, {}).update(values)
        for name, samples in other.data["samples"].items():
            for seconds in samples:
                self.sample(name, seconds)
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log line shows of an interval."""
        lines: dict[str, int | float] = {}
        asked = self.counted("asked_tokens", "host")
        if asked:
            lines["Asked tokens"] = round(asked)
            lines["Hit rate (%)"] = round(100 * self.counted("hit_tokens") / asked, 1)
        for title, name in (("Loaded", "loaded"), ("Stored", "stored")):
            if tokens := self.counted(f"{name}_tokens"):
                lines[f"{title} tokens"] = round(tokens)
            if size_bytes := self.counted(f"{name}_bytes"):
                lines[f"{title} MB"] = round(size_bytes / 1e6, 1)
        for title, name in (("load", "load_seconds"), ("save", "save_seconds"), ("lookup", "lookup_wait_seconds")):
            if samples := self.samples(name):
                lines[f"Mean {title} (ms)"] = round(1e3 * sum(samples) / len(samples), 2)
        for title, name in (("Failures", "failures"), ("Dropped chunks", "dropped_chunks")):
            if count := self.counted(name):
                lines[title] = round(count)
        return lines

    def samples(self, name: str) -> list[float]:
        """Observations of a histogram."""
        found: list[float] = self.data["samples"].get(name, [])
        return found


def stats_of(data: dict[str, Any] | None) -> TieredKVStats:
    """The stats that were sent as plain data; empty ones without."""
    return TieredKVStats(data={} if data is None else dict(data))
