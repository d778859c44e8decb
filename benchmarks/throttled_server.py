"""A cache server whose disk and object store are as slow as a file says, for benchmarks.

    python benchmarks/throttled_server.py SETTINGS.json CONTROL.json

Real tiers, with a wrapper right around the medium: each read and write first takes the latency, then its share of one
bandwidth for all, as a slow device or link would. The control file is looked at before every operation::

    {"disk": {"latency_s": 0.02, "bytes_per_s": 50e6}, "object": {"latency_s": 0, "bytes_per_s": null}}

Prints ``ready``; ends with SIGTERM. Not a benchmark by itself.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import tiered_kv.tiers.open as tiers_open
from tiered_kv.config import Config
from tiered_kv.server.compose import serve
from tiered_kv.server.daemonize import keep_heap_small
from tiered_kv.server.server import Server
from tiered_kv.testing.faults import FaultyTier
from tiered_kv.tiers.base import BlobName, Tier


class Throttle:
    """Latency and bandwidth of one medium, as the control file has them. Threads: any."""

    def __init__(self, control: Path, name: str) -> None:
        self._control, self._name = control, name
        self._lock = threading.Lock()
        self._stamp = 0
        self._latency_s = 0.0
        self._bytes_per_s: float | None = None
        self._free_s = 0.0

    def wait(self, size_bytes: int) -> None:
        """Return when such an operation would be done."""
        with self._lock:
            self._look()
            now_s = time.monotonic()
            begin_s = max(now_s + self._latency_s, self._free_s)
            end_s = begin_s + (size_bytes / self._bytes_per_s if self._bytes_per_s else 0.0)
            self._free_s = end_s if self._bytes_per_s else 0.0
        time.sleep(max(0.0, end_s - now_s))

    def _look(self) -> None:
        stamp = os.stat(self._control).st_mtime_ns
        if stamp != self._stamp:
            given = json.loads(self._control.read_text()).get(self._name, {})
            self._latency_s = given.get("latency_s") or 0.0
            self._bytes_per_s = given.get("bytes_per_s")
            self._stamp, self._free_s = stamp, 0.0


class ThrottledTier(FaultyTier):
    """A medium behind a throttle: nothing fails, all of it takes its time. Threads: any."""

    def __init__(self, inner: Tier, throttle: Throttle) -> None:
        super().__init__(inner, lambda _number: None)
        self._throttle = throttle

    def put(self, name: BlobName, blob: memoryview) -> None:
        self._throttle.wait(blob.nbytes)
        super().put(name, blob)

    def get_into(self, name: BlobName, buffer: memoryview) -> bool:
        self._throttle.wait(buffer.nbytes)
        return super().get_into(name, buffer)

    def contains(self, name: BlobName) -> bool:
        self._throttle.wait(0)
        return super().contains(name)

    def delete(self, name: BlobName) -> bool:
        self._throttle.wait(0)
        return super().delete(name)


def main() -> None:
    settings, control = (Path(argument) for argument in sys.argv[1:3])
    plainly = tiers_open.wrapped

    def throttled(medium: Tier, *arguments: Any, **named: Any) -> tiers_open.OpenTier:
        return plainly(ThrottledTier(medium, Throttle(control, medium.traits.name)), *arguments, **named)

    tiers_open.wrapped = throttled
    keep_heap_small()
    serve(
        Config.from_mapping(json.loads(settings.read_text())),
        until_idle=False,
        on_ready=lambda _info: print("ready", flush=True),
        on_server=Server.install_signal_handlers,
    )


if __name__ == "__main__":
    main()
