"""What copies and pinning cost a model, and a model copies.

One model decodes: a graph of memory-bound products with small copies in and out. One prefills: products that take every
multiprocessor, of which the copies need some.

Needs a GPU. What a copy is charged with is the whole difference of a step; a real step hides some of it.
"""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from tiered_kv.chunks.device_copy import RING_SLICES, SLICE_BYTES
from tiered_kv.chunks.pinned import PIN_REST, WINDOW_BYTES
from tools.gpu_proof.host_memory import GIB, MIB, HostMemory
from tools.gpu_proof.section import Proof, gigabytes_per_s, percentiles
from tools.gpu_proof.shapes import REAL
from tools.gpu_proof.world import WAYS, World, world

LAYERS, WIDTH, BATCH, REPEATS = 48, 8192, 64, 4
STEPS, STEPS_ALONE = 80, 120
ENGINES = (("staged", SLICE_BYTES, RING_SLICES), ("staged", 4 * MIB, 3), ("direct", SLICE_BYTES, RING_SLICES))
"""The first is what workers have."""
SHAPES = (REAL[0], REAL[4], REAL[9])
PREFILL_SHAPES = (REAL[0], REAL[3])
PREFILL_WIDTH, PREFILL_PRODUCTS, PREFILL_STEPS = 8192, 12, 30
PINNED, PINNING_STEPS = 6, 20
BUSY_S, STEP_S = (0.0, 3e-3, 10e-3), 10e-3
"""For how much of each 10 ms the model's thread keeps the interpreter: a copy thread asks for it ten times a slice."""
PINNING = {
    "all at once": (GIB, 0),
    "windows": (WINDOW_BYTES, 0),
    "windows and rests, as a worker": (WINDOW_BYTES, PIN_REST),
}
"""Bytes registered by one call, and for how many times as long the thread then rests."""


class _Steps:
    """What is timed: ``step`` ends when the GPU has done it."""

    def step(self) -> None:
        raise NotImplementedError

    def steps(self, count: int) -> dict[str, float]:
        """Milliseconds of so many."""
        took = []
        for _ in range(count):
            started_s = time.perf_counter()
            self.step()
            took.append((time.perf_counter() - started_s) * 1e3)
        return {f"{name}_ms": value for name, value in percentiles(took).items()}


class _Prefill(_Steps):
    """One step: products bound by arithmetic."""

    def __init__(self, device: torch.device) -> None:
        shape = (PREFILL_WIDTH, PREFILL_WIDTH)
        self._state, self._weights = (torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.01 for _ in range(2))

    def step(self) -> None:
        for _ in range(PREFILL_PRODUCTS):
            self._state @ self._weights
        ended = torch.cuda.Event(blocking=True)
        ended.record()
        ended.synchronize()


class _Decode(_Steps):
    """One step: inputs up, a graph, sampled ids down on a side stream, and the host waits for them."""

    def __init__(self, device: torch.device) -> None:
        make = {"device": device, "dtype": torch.bfloat16}
        self._weights = [torch.randn(WIDTH, WIDTH, **make) * 0.01 for _ in range(LAYERS)]
        self._state = torch.randn(BATCH, WIDTH, **make)
        self._side = torch.cuda.Stream()
        self._host = [torch.zeros(1024, dtype=torch.int32).pin_memory() for _ in range(6)]
        self._inputs = [torch.zeros(1024, dtype=torch.int32, device=device) for _ in self._host]
        self._sampled = torch.zeros(BATCH, dtype=torch.int32).pin_memory()
        self._state @ self._weights[0]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            state = self._state
            for _ in range(REPEATS):
                for weights in self._weights:
                    state = state @ weights
            self._result = state

    def step(self) -> None:
        for device, host in zip(self._inputs, self._host, strict=True):
            device.copy_(host, non_blocking=True)
        self._graph.replay()
        current, sampled = torch.cuda.current_stream(), torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._side):
            self._side.wait_stream(current)
            self._sampled.copy_(self._inputs[0][:BATCH], non_blocking=True)
            sampled.record(self._side)
        sampled.synchronize()


def run(proof: Proof) -> None:
    """Measure it."""
    if proof.is_dry:
        proof.headline = "nothing decodes without a GPU"
        return
    slowest = 0.0
    with torch.cuda.stream(torch.cuda.Stream()):
        decode = _Decode(proof.device)
        decode.steps(20)
        alone = decode.steps(STEPS_ALONE)
        proof.note(beside="nothing", **alone)
        _beside_pinning(proof, decode, alone)
        for shape in SHAPES:
            with world(proof, shape, pool_bytes=4 * GIB) as made:
                for engine in ENGINES:
                    slower = _beside_copies(proof, decode, alone, made, *engine)
                    slowest = max(slowest, slower if engine == ENGINES[0] else 0.0)
        del decode
        prefill = _Prefill(proof.device)
        prefill.steps(5)
        alone = prefill.steps(PREFILL_STEPS)
        proof.note(beside="nothing, prefill", **alone)
        for shape in PREFILL_SHAPES:
            with world(proof, shape, pool_bytes=4 * GIB) as made:
                for way in WAYS:
                    _beside_copies(proof, prefill, alone, made, way, SLICE_BYTES, RING_SLICES, "prefill, ")
        with world(proof, REAL[0], pool_bytes=4 * GIB) as made:
            for busy_s in BUSY_S:
                _beside_an_interpreter(proof, made, busy_s)
    proof.headline = f"a decode step is at most {slowest:.1f} % slower beside copies at the rate they reach"


def _beside_copies(
    proof: Proof, model: _Steps, alone: dict[str, float], made: World, way: str, size: int, ring: int, of: str = ""
) -> float:
    rank = made.engine(way, slice_bytes=size, ring_slices=ring)
    slowest = 0.0
    for side in ("save", "load"):
        begin = made.save if side == "save" else made.load

        def copy(begin: Callable[..., Any] = begin) -> int:
            begin(rank).wait()
            return made.nbytes

        with _beside(copy, rank.copying) as moved:
            started_s, before = time.perf_counter(), moved[0]
            steps = model.steps(STEPS if not of else PREFILL_STEPS)
            rate = gigabytes_per_s(moved[0] - before, time.perf_counter() - started_s)
        slower = _slower(steps, alone)
        slowest = max(slowest, slower)
        name = f"{of}{made.shape.name}, {way}, {size >> 20} MiB x {ring}, {side}"
        proof.note(beside=name, gb_per_s=rate, slower_percent=slower, **steps)
    return slowest


def _beside_pinning(proof: Proof, decode: _Decode, alone: dict[str, float]) -> None:
    """One lock of the driver, one of the process's memory map: what a step notices of pinning in the background."""
    cuda = proof.cuda()
    assert cuda is not None
    for name, (size, rest) in PINNING.items():
        memories = [HostMemory(GIB) for _ in range(PINNED)]
        left = [part for memory in memories for part in memory.windows(size)]
        done: list[int] = []

        def pin(left: Any = left, done: Any = done, rest: int = rest) -> int:
            if not left:
                time.sleep(1e-3)
                return 0
            address, part_bytes = left.pop(0)
            started_s = time.perf_counter()
            cuda.register(address, part_bytes)
            done.append(address)
            time.sleep(rest * (time.perf_counter() - started_s))
            return int(part_bytes)

        # Once, as a worker does: what is pinned again and again disturbs by its unpinning.
        with _beside(pin, lambda: proof.engine_device(has_batch=True).copying()) as moved:
            steps = decode.steps(PINNING_STEPS)
        slower = _slower(steps, alone)
        proof.note(beside=f"pinning: {name}", registered_gib=moved[0] / GIB, slower_percent=slower, **steps)
        for address in done:
            cuda.unregister(address)
        for memory in memories:
            memory.close()


def _beside_an_interpreter(proof: Proof, made: World, busy_s: float) -> None:
    """What copies get of the link while another thread of their process runs Python, as a model runner does."""
    rank = made.engine("chosen")

    def run_python() -> int:
        end_s = time.perf_counter() + busy_s
        while time.perf_counter() < end_s:
            pass
        time.sleep(STEP_S - busy_s)
        return 0

    with _beside(run_python, nullcontext), rank.copying():
        save = gigabytes_per_s(made.nbytes, proof.median_s(lambda: made.save(rank).wait(), 3))
        load = gigabytes_per_s(made.nbytes, proof.median_s(lambda: made.load(rank).wait(), 3))
    proof.note(beside=f"an interpreter that is busy for {busy_s * 1e3:g} of {STEP_S * 1e3:g} ms", save=save, load=load)


def _slower(steps: dict[str, float], alone: dict[str, float]) -> float:
    return (steps["mean_ms"] / alone["mean_ms"] - 1) * 100


class _beside:  # noqa: N801 - reads as a sentence where it is used
    """An action over and over in a thread of its own, for the time of the block."""

    def __init__(self, action: Callable[[], int], around: Callable[[], Any]) -> None:
        self._action, self._around = action, around
        self._stop = threading.Event()
        self._moved = [0]
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with self._around(), torch.cuda.stream(torch.cuda.Stream()):
                while not self._stop.is_set():
                    self._moved[0] += self._action()
        except BaseException as exc:  # noqa: BLE001 - in a thread: raised at the end of the block
            self._failed.append(exc)

    def __enter__(self) -> list[int]:
        self._thread.start()
        time.sleep(0.05)
        return self._moved

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failed:
            raise self._failed[0]
