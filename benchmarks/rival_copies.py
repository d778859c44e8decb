"""Rows a and b of ``rivals.py``: 256 MiB of KV between vLLM's blocks and host memory, and disk.

Engines whose model computes nothing (``stepped.py``), all of a row up at once and in turns. The KV is that of Llama 3.1
8B, 128 KiB a token; a repetition is a prompt of 2,048 tokens and 16 more: 8 chunks of 32 MiB, with bytes that no other
repetition has. Its blocks are zeroed before a load, and every byte is compared after it.

Row a: ``free`` is from the start of the prompt's step until its blocks are free, ``loadable`` until a lookup finds all
of it, ``load`` from the step that got blocks until the bytes are in them. The roofline, ``memcpy``, is ``torch.copy_``,
one for each chunk and layer, on one thread, between the same layers and memory that was not touched lately.

Row b: ``disk`` is from the start of the prompt's step until its files are whole: as many, and as large, as those of the
first repetition, after which the folder was waited for. ``cold`` and ``warm`` are from the arrival of the request until
the bytes are in its blocks, with host memory emptied; for ``cold`` with the pages dropped, of which none may be
resident (``fincore``). The roofline, ``raw``, writes as many files of 32 MiB in four threads, temp name and rename, and
reads them whole.

Called by ``rivals.py``. Not a benchmark by itself.
"""

import contextlib
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from disk_io import cpu_seconds, drop, read, slot, write
from processes import cpu_s
from rival_systems import LMCACHE_ENGINE, REPOSITORY, Setup, System, open_system, until_still
from rival_turns import summary, turned
from stepped import PATIENT, SteppedEngine

from tiered_kv.testing.model import ModelShape, build_model

MODEL = REPOSITORY / "build" / "models" / "copies"
SHAPE = ModelShape(
    layers=32,
    hidden=64,
    intermediate=64,
    heads=8,
    kv_heads=8,
    head_dim=128,
    vocab=8192,
    weight_std=0.16,
    head_std=0.2,
)
SYSTEMS = ("ours", "lmcache", "native")
TOKENS = 2_048
PROMPT_TOKENS = TOKENS + 16
"""Half a block more: ExampleConnector does not find a prompt whose whole blocks end less than two tokens before it."""

BYTES = TOKENS * SHAPE.kv_bytes_per_token
FILES, THREADS = 8, 4
HOST_GIB = 1.0
"""Host memory of each: a repetition takes a quarter of it, and empties it."""

SEED = 100
FILE_BYTES_LEAST = 1 << 20
DEADLINE_S = 120.0
POLL_S = 0.001
OURS = {"pinned_share": 0.5, **PATIENT}
"""By default a tenth of vLLM's blocks may wait for slots: here 3 chunks of 8, of a paged KV of four such prompts."""
HOST_COLUMNS = {
    "system": "system", "free_gb_per_s": "store until blocks are free, GB/s", "free_least": "least",
    "free_most": "most",
    "loadable_gb_per_s": "until loadable, GB/s", "loadable_least": "least", "loadable_most": "most",
    "load_gb_per_s": "load, GB/s", "load_least": "least", "load_most": "most", "loadable_ratio": "store x roofline",
    "load_ratio": "load x roofline", "store_cpu": "store CPU s/GB", "load_cpu": "load CPU s/GB",
}  # fmt: skip
HOST_NOTES = (
    "native: no time until blocks are free; it frees them at once, and a step that needs one waits for its copy.",
    "example: not in this row; it has no host memory, only files.",
)
DISK_COLUMNS = {
    "system": "system", "disk_gb_per_s": "store until on disk, GB/s", "disk_least": "least", "disk_most": "most",
    "cold_gb_per_s": "cold load, GB/s", "cold_least": "least", "cold_most": "most",
    "warm_gb_per_s": "warm load, GB/s", "warm_least": "least", "warm_most": "most",
    "store_cpu": "store CPU s/GB", "cold_cpu": "cold CPU s/GB", "warm_cpu": "warm CPU s/GB",
}  # fmt: skip

Sample = dict[str, float]
"""Of one repetition: seconds by figure, and CPU seconds by figure with ``_cpu``."""


@dataclass
class Subject:
    """What takes part in the turns."""

    name: str
    repetition: Callable[[int], Sample]
    taken: list[Sample] = field(default_factory=list)


def host(work: Path, repeats: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """Row a; LMCache in both of its transfer modes."""
    with ExitStack() as stack:
        start = starts(work)
        roofline = start("memcpy", None)
        stack.callback(roofline.close)
        subjects = [Subject("memcpy", partial(_copied, roofline))]
        for name in SYSTEMS:
            if name in names:
                system = open_system(stack, work, name, start, Setup(HOST_GIB, ours=OURS))
                subjects.append(Subject(name, partial(_hosted, system)))
        if "lmcache" in names:
            system = open_system(stack, work, LMCACHE_ENGINE, start, Setup(HOST_GIB, "engine_driven"))
            subjects.append(Subject(LMCACHE_ENGINE, partial(_hosted, system)))
        take_turns(subjects, repeats)
    rows = [
        row_of(one, ("free", "loadable", "load"), {"store_cpu": "loadable", "load_cpu": "load"}) for one in subjects
    ]
    for row in rows:
        for what in ("loadable", "load"):
            row[f"{what}_ratio"] = round(row[f"{what}_gb_per_s"] / rows[0][f"{what}_gb_per_s"], 3)
    return rows


def disk(work: Path, repeats: int, names: Sequence[str], mode: str) -> list[dict[str, Any]]:
    """Row b."""
    raw = work / "raw"
    raw.mkdir()
    subjects = [
        Subject("raw, O_DIRECT", RawFiles(raw, os.O_DIRECT).repetition),
        Subject("raw, buffered", RawFiles(raw, 0).repetition),
    ]
    with ExitStack() as stack:
        start = starts(work)
        for name in (*SYSTEMS, "example"):
            if name in names:
                system = open_system(stack, work, name, start, Setup(HOST_GIB, mode, OURS))
                subjects.append(Subject(name, OnDisk(system).repetition))
        take_turns(subjects, repeats)
    cpu = {"store_cpu": "disk", "cold_cpu": "cold", "warm_cpu": "warm"}
    return [row_of(one, ("disk", "cold", "warm"), cpu) for one in subjects]


def starts(work: Path) -> Callable[..., SteppedEngine]:
    """Starts engines of this row's KV, with a log each."""
    build_model(MODEL, shape=SHAPE)

    def start(name: str, transfer: Mapping[str, Any] | None, **more: Any) -> SteppedEngine:
        space = {"VLLM_CPU_KVCACHE_SPACE": "1"} | more.pop("environment", {})
        return SteppedEngine(
            work / f"{name}.log", transfer, environment=space, model=str(MODEL), dtype="bfloat16", **more
        )

    return start


def take_turns(subjects: Sequence[Subject], repeats: int) -> None:
    """Take a sample of each in every repetition."""
    for number in range(repeats + 1):
        for one in turned(subjects, number):
            sample = one.repetition(SEED + number)
            if number:  # the first is not counted
                one.taken.append(sample)


def _copied(engine: SteppedEngine, seed: int) -> Sample:
    copied = engine.copy(seed, PROMPT_TOKENS)
    store = {"free": copied.out_s, "loadable": copied.out_s, "loadable_cpu": copied.out_cpu_s}
    return store | {"load": copied.in_s, "load_cpu": copied.in_cpu_s}


def _hosted(system: System[SteppedEngine], seed: int) -> Sample:
    engine, helpers = system.engine, system.helpers()
    stored = engine.store(seed, PROMPT_TOKENS, helpers)
    engine.forget()
    system.wait_stored()  # what is still written to disk would take the cores of the load
    loaded = engine.load(seed, PROMPT_TOKENS, helpers)
    engine.forget()
    system.empty_memory()  # so that no repetition has to evict another's chunks
    sample = {"loadable": stored.loadable_s, "loadable_cpu": stored.cpu_s}
    if system.name != "native":  # which frees them at once, and has a step that needs them wait for the copy
        sample["free"] = stored.free_s
    return sample | {"load": loaded.copy_s, "load_cpu": loaded.cpu_s}


class OnDisk:
    """One system's repetitions over disk."""

    def __init__(self, system: System[SteppedEngine]) -> None:
        assert system.folder is not None
        self._system, self._folder = system, system.folder
        self._new: tuple[int, int] | None = None

    def repetition(self, seed: int) -> Sample:
        system, engine, helpers = self._system, self._system.engine, self._system.helpers()
        known = self._files()
        stored = engine.store(seed, PROMPT_TOKENS, helpers)
        if self._new is None:
            until_still(self._folder)
            self._new = _extent(self._files() - known)
            if self._new[1] < BYTES:
                raise RuntimeError(f"not all is on disk. system={system.name} expected={BYTES} observed={self._new}")
        self._wait_written(known)
        written_s, used_s = time.perf_counter(), sum(map(cpu_s, (engine.pid, *helpers)))
        sample = {"disk": written_s - stored.begun_s, "disk_cpu": used_s - stored.begun_cpu_s}
        files = sorted(self._files() - known)
        for case in ("cold", "warm"):
            system.wait_stored()
            engine.forget()
            system.empty_memory()
            if case == "cold":
                forget_pages(files)
            else:
                for path in files:
                    path.read_bytes()  # O_DIRECT leaves nothing in the page cache
            before = disk_read_bytes()
            loaded = engine.load(seed, PROMPT_TOKENS, helpers)
            if case == "cold" and disk_read_bytes() - before < BYTES:
                raise RuntimeError(f"it was not read from disk. system={system.name}")
            sample |= {case: loaded.total_s, f"{case}_cpu": loaded.cpu_s}
        engine.forget()
        return sample

    def _files(self) -> set[Path]:
        """What holds KV; indexes and such are smaller."""
        found = set()
        for path in self._folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                if path.is_file() and path.stat().st_size >= FILE_BYTES_LEAST:
                    found.add(path)
        return found

    def _wait_written(self, known: set[Path]) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while _extent(self._files() - known) != self._new:
            if time.monotonic() > end_s:
                raise TimeoutError(f"files are missing. system={self._system.name} {DEADLINE_S=} expected={self._new}")
            time.sleep(POLL_S)


def _extent(files: set[Path]) -> tuple[int, int]:
    """How many, and how many bytes."""
    size = 0
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            size += path.stat().st_size
    return len(files), size


class RawFiles:
    """The roofline's repetitions: as many bytes between files and memory, and nothing else."""

    def __init__(self, folder: Path, flags: int) -> None:
        self._folder, self._flags = folder, flags
        self._slots = [slot(BYTES // FILES) for _ in range(FILES)]
        self._pool = ThreadPoolExecutor(THREADS)

    def repetition(self, seed: int) -> Sample:
        paths = [self._folder / f"{seed}-{self._flags}-{number}" for number in range(FILES)]
        content = random.Random(seed).randbytes(len(self._slots[0]))
        for one in self._slots:
            one[:] = content
        sample = self._timed("disk", write, paths)
        for case in ("cold", "warm"):
            if case == "cold":
                forget_pages(paths)
            else:
                for path in paths:
                    path.read_bytes()
            for one in self._slots:
                one[:] = bytes(len(one))
            sample |= self._timed(case, read, paths)
            if any(one != content for one in self._slots):
                raise RuntimeError("other bytes came back")
        for path in paths:
            path.unlink()
        return sample

    def _timed(self, what: str, work: Callable[[Path, memoryview, int], None], paths: Sequence[Path]) -> Sample:
        used_s, begun_s = cpu_seconds(), time.perf_counter()
        list(self._pool.map(work, paths, self._slots, [self._flags] * FILES))
        return {what: time.perf_counter() - begun_s, f"{what}_cpu": cpu_seconds() - used_s}


def forget_pages(paths: Sequence[Path]) -> None:
    """Drop these files from the page cache.

    Raises:
        RuntimeError: Some stayed.
    """
    drop(list(paths))
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", *map(str, paths)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    if resident := sum(map(int, done.stdout.split())):
        raise RuntimeError(f"pages stayed in memory. bytes={resident} of={len(paths)} files")


def disk_read_bytes() -> int:
    """What this machine has read from its disks since it started; Linux counts sectors of 512 bytes."""
    statistics_files = [disk / "stat" for disk in Path("/sys/block").iterdir() if (disk / "device").exists()]
    return sum(int(path.read_text().split()[2]) * 512 for path in statistics_files)


def row_of(subject: Subject, figures: Sequence[str], cpu: Mapping[str, str]) -> dict[str, Any]:
    """GB/s of each figure that the subject has, and CPU seconds for a GB."""
    row: dict[str, Any] = {"system": subject.name}
    for what in figures:
        if what in subject.taken[0]:
            row |= summary(what, "gb_per_s", [BYTES / 1e9 / one[what] for one in subject.taken])
    for name, what in cpu.items():
        row[name] = round(statistics.median(one[f"{what}_cpu"] for one in subject.taken) / BYTES * 1e9, 3)
    return row
