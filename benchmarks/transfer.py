"""How fast KV pages move between the paged pool and a slot, against one memcpy of as many bytes.

    python benchmarks/transfer.py [--rounds N]

Prints a table and then one line of JSON. Shape: 32 layers, 8 KV heads, head size 128, bfloat16, chunks of 256 tokens
(32 MiB). ``paged`` is what tiered_kv does, the others are what it was chosen from. Medians; every copy takes another
chunk of a 1 GiB pool, so that caches do not flatter. ``turns`` counts how often another Python thread ran during the
copies: 0 means that the copy held the GIL. The pool comes from torch, as vLLM's does: numpy's own memory begins 16
bytes behind a cache line, and copies into that take twice as long.
"""

import argparse
import ctypes
import json
import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import torch

from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.chunks.transfer import PagedKV

LAYERS, HEADS, HEAD_SIZE, CHUNK_TOKENS = 32, 8, 128, 256
POOL_BYTES = 1 << 30


class Case:
    """One pool of paged KV, one slot in shared memory, and the ways to copy between them."""

    def __init__(self, block_tokens: int, consecutive: bool) -> None:
        content = 2 * HEAD_SIZE
        self.page = HEADS * block_tokens * content * 2
        self.blocks = CHUNK_TOKENS // block_tokens
        self.pool_blocks = POOL_BYTES // (LAYERS * self.page)
        self.chunk_bytes = LAYERS * self.blocks * self.page
        self.raw = torch.ones(LAYERS * self.pool_blocks * self.page, dtype=torch.uint8)
        pool = self.raw.view(torch.bfloat16).view(LAYERS, self.pool_blocks, HEADS, block_tokens, content)
        pages = [LayerPage(str(i), "BF16", (HEADS, block_tokens, content), "HNC") for i in range(LAYERS)]
        self.paged = PagedKV(pages, {str(i): pool[i] for i in range(LAYERS)}, self.blocks)
        fd = os.memfd_create("slot")
        os.ftruncate(fd, self.chunk_bytes)
        self.slot = memoryview(mmap.mmap(fd, self.chunk_bytes))
        os.close(fd)
        self.slot_bytes = np.frombuffer(self.slot, dtype=np.uint8)
        self.slot_bytes[:] = 1
        self.slot_tensor = torch.frombuffer(self.slot, dtype=torch.uint8)
        rng = np.random.default_rng(0)
        starts = rng.permutation(self.pool_blocks - self.blocks)[:64]
        scattered = [rng.permutation(self.pool_blocks)[: self.blocks] for _ in starts]
        self.ids: cycle[Any] = cycle([np.arange(x, x + self.blocks) for x in starts] if consecutive else scattered)
        last = LAYERS * (self.pool_blocks - self.blocks)
        self.offsets = cycle([int(row) * self.page for row in rng.permutation(last)[:64]])

    def ways(self) -> dict[str, Callable[[], object]]:
        rows = self.raw.numpy().reshape(-1, self.page)
        voids = self.raw.numpy().view(f"V{self.page}")
        slot_rows = self.slot_bytes.reshape(-1, self.page)
        slot_voids = self.slot_bytes.view(f"V{self.page}")
        first = np.arange(LAYERS)[:, None] * self.pool_blocks
        layers = self.raw.view(LAYERS, self.pool_blocks, self.page)
        slots = self.slot_tensor.view(LAYERS, self.blocks, self.page)

        pool_address, slot_address = self.raw.data_ptr(), self.slot_tensor.data_ptr()

        def index() -> Any:
            return (first + next(self.ids)).ravel()

        def pool_part() -> torch.Tensor:
            offset = next(self.offsets)
            return self.raw[offset : offset + self.chunk_bytes]

        def index_select() -> None:
            ids = torch.from_numpy(next(self.ids))
            for layer, slot in zip(layers, slots, strict=True):
                torch.index_select(layer, 0, ids, out=slot)

        def index_copy() -> None:
            ids = torch.from_numpy(next(self.ids))
            for layer, slot in zip(layers, slots, strict=True):
                layer.index_copy_(0, ids, slot)

        def memmove(to_slot: bool) -> None:
            for place, row in enumerate(index().tolist()):
                ours, theirs = slot_address + place * self.page, pool_address + row * self.page
                ctypes.memmove(*((ours, theirs) if to_slot else (theirs, ours)), self.page)

        return {
            "gather memcpy": lambda: ctypes.memmove(slot_address, pool_address + next(self.offsets), self.chunk_bytes),
            "gather torch copy_": lambda: self.slot_tensor.copy_(pool_part()),
            "gather paged": lambda: self.paged.gather(next(self.ids), self.slot),
            "gather numpy fancy": lambda: np.copyto(slot_rows, rows[index()]),
            "gather torch index_select": index_select,
            "gather ctypes memmove": lambda: memmove(to_slot=True),
            "scatter memcpy": lambda: ctypes.memmove(pool_address + next(self.offsets), slot_address, self.chunk_bytes),
            "scatter torch copy_": lambda: pool_part().copy_(self.slot_tensor),
            "scatter paged": lambda: self.paged.scatter(self.slot, next(self.ids)),
            "scatter paged, all but the first": lambda: self.paged.scatter(self.slot, next(self.ids)[1:], 1),
            "scatter numpy set void": lambda: voids.__setitem__(index(), slot_voids),
            "scatter numpy put void": lambda: voids.put(index(), slot_voids, mode="clip"),
            "scatter torch index_copy_": index_copy,
            "scatter ctypes memmove": lambda: memmove(to_slot=False),
        }

    def bytes_of(self, way: str) -> int:
        return self.chunk_bytes * (self.blocks - 1) // self.blocks if "all but" in way else self.chunk_bytes


def measure(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each way; ways take turns, so that a slow moment of the machine meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(rounds + 1):
        for name, copy in ways.items():
            start = time.perf_counter()
            copy()
            if round_number:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def turns_during(copy: Callable[[], object], repeats: int = 20) -> int:
    """How often another thread ran meanwhile; nobody asks for the GIL here, it must be given."""
    turns, stop = [0], threading.Event()

    def take_turns() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    thread = threading.Thread(target=take_turns)
    thread.start()
    seen = 0
    for _ in range(repeats):
        before = turns[0]
        copy()
        seen += turns[0] - before
    stop.set()
    sys.setswitchinterval(interval)
    thread.join()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="copies per way and case (default 15)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    results = []
    for block_tokens in (32, 128):
        for consecutive in (False, True):
            case = Case(block_tokens, consecutive)
            ways = case.ways()
            ids = "consecutive" if consecutive else "random"
            print(f"\n{block_tokens}-token blocks, {ids} ids, {case.chunk_bytes >> 20} MiB chunks")
            print(f"{'':36}{'ms':>8}{'GB/s':>8}{'x memcpy':>10}{'turns':>8}")
            medians = measure(ways, rounds)
            for way, seconds in medians.items():
                size = case.bytes_of(way)
                memcpy = case.chunk_bytes / medians[f"{way.split()[0]} memcpy"]
                row = {
                    "block_tokens": block_tokens, "ids": ids, "way": way, "ms": round(seconds * 1e3, 3),
                    "gb_per_s": round(size / seconds / 1e9, 2), "ratio_to_memcpy": round(size / seconds / memcpy, 2),
                    "turns_of_another_thread": turns_during(ways[way]),
                }  # fmt: skip
                results.append(row)
                print(
                    f"{way:36}{row['ms']:8.2f}{row['gb_per_s']:8.2f}{row['ratio_to_memcpy']:10.2f}{row['turns_of_another_thread']:8}"
                )
    print(json.dumps({"torch": torch.__version__, "numpy": np.__version__, "results": results}))


if __name__ == "__main__":
    main()
