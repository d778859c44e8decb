"""Row c of ``rivals.py``: 256 MiB of KV between vLLM's blocks and an S3 bucket, and the buckets of row h.

Engines, prompts and bytes as in row b (``rival_copies.py``), with host memory and a bucket and no disk; a gateway of
this repository over a file, on the same cores. ``put`` is from the start of the prompt's step until its objects are in
the bucket: as many, and as large, as those of the first repetition, after which the bucket was waited for. ``get`` is
from the arrival of the request until the bytes are in its blocks, with host memory emptied; as many must have come over
the loopback device. Every byte is compared. The roofline, ``raw``, puts and gets 8 objects of 32 MiB in four threads by
``http.client`` on presigned addresses, and checks nothing meanwhile.

Called by ``rivals.py``. Not a benchmark by itself.
"""

import os
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from object_store import Http, make_blobs
from processes import cpu_s
from rival_copies import (
    BYTES,
    FILES,
    HOST_GIB,
    OURS,
    PROMPT_TOKENS,
    THREADS,
    Sample,
    Subject,
    row_of,
    starts,
    take_turns,
)
from rival_systems import Buckets, Setup, System, open_system, until_still
from s3_service import REGION, Bucket, open_bucket
from stepped import SteppedEngine

from tiered_kv.location import parse_location

SYSTEMS = ("ours", "lmcache")
OBJECT_BYTES_LEAST = 1 << 20
DEADLINE_S = 120.0
POLL_S = 0.01
"""A list takes the gateway's time, too."""

NOTES = ("native, example: not in this row; they have no bucket.",)
COLUMNS = {
    "system": "system", "put_gb_per_s": "store until in the bucket, GB/s", "put_least": "least", "put_most": "most",
    "get_gb_per_s": "load, GB/s", "get_least": "least", "get_most": "most", "put_ratio": "store x roofline",
    "get_ratio": "load x roofline", "put_cpu": "store CPU s/GB", "get_cpu": "load CPU s/GB",
}  # fmt: skip


def open_buckets(stack: ExitStack, size_bytes: int) -> Buckets:
    """A gateway with room for all that a row stores: nothing is deleted, because that would take others' time."""
    gib = 4 - (-size_bytes >> 30)
    own = ("--store=bluestore", f"--size-gib={gib}")
    return Buckets.on(stack.enter_context(open_bucket("bench", f"rivals-{os.getpid()}", own_options=own)))


def measure(work: Path, repeats: int, names: Sequence[str], mode: str) -> list[dict[str, Any]]:
    """Row c."""
    with ExitStack() as stack:
        buckets = open_buckets(stack, (repeats + 1) * (1 + len(SYSTEMS)) * BYTES)
        subjects = [Subject("raw", RawObjects(buckets.by_path).repetition)]
        for name in SYSTEMS:
            if name in names:
                system = open_system(stack, work, name, starts(work), Setup(HOST_GIB, mode, OURS, buckets))
                subjects.append(Subject(name, InBucket(system).repetition))
        take_turns(subjects, repeats)
    rows = [row_of(one, ("put", "get"), {"put_cpu": "put", "get_cpu": "get"}) for one in subjects]
    for row in rows:
        for what in ("put", "get"):
            row[f"{what}_ratio"] = round(row[f"{what}_gb_per_s"] / rows[0][f"{what}_gb_per_s"], 3)
    return rows


class InBucket:
    """One system's repetitions over its bucket."""

    def __init__(self, system: System[SteppedEngine]) -> None:
        assert system.objects is not None
        self._system, self._objects = system, system.objects
        self._new: tuple[int, int] | None = None

    def repetition(self, seed: int) -> Sample:
        system, engine, helpers = self._system, self._system.engine, self._system.helpers()
        known = self._objects()
        stored = engine.store(seed, PROMPT_TOKENS, helpers)
        if self._new is None:
            end_s = time.monotonic() + DEADLINE_S
            while self._new is None or (self._new[1] < BYTES and time.monotonic() < end_s):
                until_still(self._objects)  # LMCache may rest for longer before its first puts have all begun
                self._new = self._since(known)
            if self._new[1] < BYTES:
                raise RuntimeError(
                    f"not all is in the bucket. system={system.name} expected={BYTES} observed={self._new}"
                )
        self._wait_written(known)
        written_s, used_s = time.perf_counter(), sum(map(cpu_s, (engine.pid, *helpers)))
        sample = {"put": written_s - stored.begun_s, "put_cpu": used_s - stored.begun_cpu_s}
        system.wait_stored()
        engine.forget()
        system.empty_memory()
        before = loopback_bytes()
        loaded = engine.load(seed, PROMPT_TOKENS, helpers)
        if loopback_bytes() - before < BYTES:
            raise RuntimeError(f"it did not come from the bucket. system={system.name}")
        engine.forget()
        system.empty_memory()  # so that no repetition has to evict another's chunks
        return sample | {"get": loaded.total_s, "get_cpu": loaded.cpu_s}

    def _since(self, known: Mapping[str, int]) -> tuple[int, int]:
        """How many objects that hold KV are new, and how many bytes."""
        new = [size for name, size in self._objects().items() if name not in known and size >= OBJECT_BYTES_LEAST]
        return len(new), sum(new)

    def _wait_written(self, known: Mapping[str, int]) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while (observed := self._since(known)) != self._new:
            if time.monotonic() > end_s:
                raise TimeoutError(
                    f"objects are missing. system={self._system.name} {DEADLINE_S=} expected={self._new} {observed=}"
                )
            time.sleep(POLL_S)


class RawObjects:
    """The roofline's repetitions: as many bytes between objects and memory, and nothing else."""

    def __init__(self, bucket: Bucket) -> None:
        self._blobs = make_blobs(BYTES // FILES >> 20, FILES)
        options = {"region": REGION, **bucket.credentials.options()}
        self._http = Http(bucket, parse_location(bucket.uri(f"raw-{os.getpid()}"), options), self._blobs)

    def repetition(self, seed: int) -> Sample:
        content = random.Random(seed).randbytes(BYTES // FILES)
        for slot in self._blobs.slots:
            slot[-len(content) :] = content
        sample: Sample = {}
        for what in ("put", "get"):
            figures = self._http.timed(what, THREADS, is_busy=False)  # which compares
            moved_gb = sum(map(len, self._blobs.slots)) / 1e9
            sample |= {what: moved_gb / figures["gb_per_s"], f"{what}_cpu": moved_gb * figures["cpu_s_per_gb"]}
        return sample


def loopback_bytes() -> int:
    """What this machine has sent to itself since it started."""
    return int(Path("/sys/class/net/lo/statistics/rx_bytes").read_text())
