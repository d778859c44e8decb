"""How fast KV moves between vLLM's paged tensors and the cache's host memory: through the connector and a real server.

    python benchmarks/host_path.py [--runs N] [--mib-per-run N] [--keep]

Both roles of the connector as vLLM calls them (``bare_engine.py``), a server process, and its shared arena: 32 layers,
8 KV heads, head size 128, bfloat16; chunks of 256 tokens (32 MiB) and of 16 (2 MiB); FlashAttention's layout with
blocks of 16 tokens, and the CPU backend's with blocks of 128 (of 16 where a chunk has no more). A run stores several
requests, loads them into other blocks, and the bytes are compared. ``blocks``: whether a request's follow each other.

    store   from the start of the step in which the last chunk is complete until its commit was sent: what holds the
            blocks, and all that the engine waits for. Slots, gather, the worker's report, commit; and waiting for slots
    seal    from then until the server has hashed the payloads and says that every chunk may be loaded
    load    from the start of the step that got the blocks until the last copy was taken in as finished
    copy_   the roofline: one ``torch.copy_`` per chunk, on one thread, between the same paged layout and ordinary
            memory that was not touched lately, as a slot was not: a buffer that every chunk is copied into stays in
            the CPU's cache, and 10 GB/s are measured where memory takes 7; of blocks that follow each other, because
            one call cannot move others

All take turns in one process; medians of ``--runs`` after one that is not counted. ``cpu`` is CPU time of engine and
server together, per GB; for stores sealing included. The disk tier is too small for any chunk, so nothing is written.
"""

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bare_engine import BareEngine
from bench_report import finish, machine, parser, table
from processes import cpu_s

LAYERS, HEADS, HEAD_SIZE = 32, 8, 128
TOKEN_BYTES = LAYERS * HEADS * 2 * HEAD_SIZE * 2
POOL_MIB = 2 << 10
HOST_MIB = 5 << 10
"""An engine holds an eighth of it ahead as empty slots: more than a run stores, as with the default of 8 GiB."""
STYLES = {"flash": ("LBNHC", 16), "cpu": ("LBHNC", 128)}
REQUESTS = 4
COLUMNS = {
    "mib": "MiB", "style": "layout", "blocks": "blocks", "store_gb_per_s": "store", "store_ratio": "x copy_",
    "store_cpu_s_per_gb": "cpu", "load_gb_per_s": "load", "load_ratio": "x copy_ ", "load_cpu_s_per_gb": "cpu ",
    "seal_gb_per_s": "seal", "gather_copy_gb_per_s": "copy_ out", "scatter_copy_gb_per_s": "copy_ in",
    "copy_cpu_s_per_gb": "cpu  ",
}  # fmt: skip


@dataclass
class Prompt:
    """A request's tokens and the blocks it has when it is stored, and others when it is loaded."""

    tokens: list[int]
    stored: list[int]
    loaded: list[int]


class Case:
    """One chunk size and layout: an engine, a server and the roofline's buffer."""

    def __init__(self, root: Path, chunk_tokens: int, style: str, given: argparse.Namespace) -> None:
        layout, block_tokens = STYLES[style]
        block_tokens = min(block_tokens, chunk_tokens)
        run_bytes = given.mib_per_run << 20
        settings = {
            "host_bytes": given.host_mib << 20, "disk_bytes": "65MiB", "chunk_tokens": chunk_tokens,
            "pinned_share": 0.5, "drain_s": 0.0, "lookup_timeout_ms": 60_000, "promotion_wait_ms": 60_000,
            "start_timeout_s": 60.0,
        }  # fmt: skip
        self.engine = BareEngine(root, settings, (LAYERS, HEADS, HEAD_SIZE, block_tokens))
        self.chunk_tokens, self.style = chunk_tokens, style
        self.per_chunk = chunk_tokens // block_tokens
        self.blocks = (given.pool_mib << 20) // (TOKEN_BYTES * block_tokens)
        self.engine.open(self.blocks, layout)
        self.chunks = run_bytes // REQUESTS // (TOKEN_BYTES * chunk_tokens)  # of one request
        self.run_bytes = REQUESTS * self.chunks * TOKEN_BYTES * chunk_tokens
        chunk = (LAYERS, self.per_chunk, TOKEN_BYTES // LAYERS * block_tokens)
        self.buffers = torch.ones(
            (-(-(given.pool_mib << 20) // (TOKEN_BYTES * chunk_tokens)), *chunk), dtype=torch.uint8
        )
        self._turn = 0
        self.pages = self.engine.kv.view(torch.uint8).view(LAYERS, self.blocks, -1)
        self._numbers = count()
        self._rng = np.random.default_rng(0)

    def prompts(self, *, follow: bool) -> list[Prompt]:
        """New prompts, on blocks of which no two have one in common; block 0 is vLLM's null block."""
        need = self.chunks * self.per_chunk
        if follow:
            starts = 1 + need * self._rng.permutation((self.blocks - 1) // need)[: 2 * REQUESTS]
            places = [list(range(start, start + need)) for start in starts.tolist()]
        else:
            ids = 1 + self._rng.permutation(self.blocks - 1)[: 2 * REQUESTS * need]
            places = ids.reshape(2 * REQUESTS, need).tolist()
        rng = random.Random(next(self._numbers))
        made = []
        for stored, loaded in zip(places[::2], places[1::2], strict=True):
            tokens = [rng.randrange(1 << 17) for _ in range(self.chunks * self.chunk_tokens + 1)]
            made.append(Prompt(tokens, stored, loaded))
        return made

    def _cpu_s(self) -> float:
        return cpu_s() + cpu_s(self.engine.server_pid)

    def store(self, prompts: list[Prompt]) -> dict[str, float]:
        engine, hooks = self.engine, self.engine.scheduler
        counters = hooks._scheduler.side.counters
        requests = [engine.request(f"store-{next(self._numbers)}", prompt.tokens) for prompt in prompts]
        for request in requests:
            hooks.on_new_request(request)
            while hooks.get_num_new_matched_tokens(request, 0)[0] is None:
                time.sleep(1e-4)
        wanted = counters["stores"] + REQUESTS * self.chunks
        scheduled = {request.request_id: len(request._all_token_ids) for request in requests}
        tables = {request.request_id: prompt.stored for request, prompt in zip(requests, prompts, strict=True)}
        used_s, started_s = self._cpu_s(), time.perf_counter()
        engine.step(scheduled, tables)
        engine.take_results()
        while counters["stores"] < wanted:
            if not engine.step(scheduled, tables):  # the requests live: their chunks wait for slots, unpinned
                time.sleep(5e-5)  # slots are on their way
            engine.take_results()
        committed_s = time.perf_counter()
        for prompt in prompts:
            self._wait_sealed(prompt)
        sealed_s, used_s = time.perf_counter(), self._cpu_s() - used_s
        for request in requests:
            engine.finish(request)
        return {"store": committed_s - started_s, "seal": sealed_s - committed_s, "store_cpu": used_s}

    def _wait_sealed(self, prompt: Prompt) -> None:
        request = self.engine.request(f"seal-{next(self._numbers)}", prompt.tokens)
        self.engine.scheduler.on_new_request(request)
        while (found := self.engine.scheduler.get_num_new_matched_tokens(request, 0)[0]) is None:
            time.sleep(5e-5)
        if found != len(prompt.tokens) - 1:
            raise RuntimeError(f"not all that was stored is there. tokens={len(prompt.tokens)} found={found}")
        self.engine.finish(request)

    def load(self, prompts: list[Prompt]) -> dict[str, float]:
        engine, hooks = self.engine, self.engine.scheduler
        requests = [engine.request(f"load-{next(self._numbers)}", prompt.tokens) for prompt in prompts]
        for request, prompt in zip(requests, prompts, strict=True):
            hooks.on_new_request(request)
            while (found := hooks.get_num_new_matched_tokens(request, 0)[0]) is None:
                time.sleep(1e-4)
            engine.allocate(request, prompt.loaded, found)
        used_s, started_s = self._cpu_s(), time.perf_counter()
        engine.step({}, {})
        engine.take_results()
        taken = {"load": time.perf_counter() - started_s, "load_cpu": self._cpu_s() - used_s}
        failed = hooks._scheduler.side.counters["loads_failed"]
        for request, prompt in zip(requests, prompts, strict=True):
            engine.finish(request)
            if failed or not torch.equal(self.pages[:, prompt.loaded], self.pages[:, prompt.stored]):
                raise RuntimeError(f"what was loaded is not what was stored. failed={failed}")
        return taken

    def roofline(self, what: str) -> dict[str, float]:
        """As many bytes by ``torch.copy_``: ``gather`` out of the paged KV, or ``scatter`` into it."""
        chunks = REQUESTS * self.chunks
        starts = self._rng.integers(1, self.blocks - self.per_chunk, chunks).tolist()
        parts = [self.pages[:, start : start + self.per_chunk] for start in starts]
        buffers = [self.buffers[(self._turn + number) % len(self.buffers)] for number in range(chunks)]
        self._turn += chunks
        used_s, started_s = self._cpu_s(), time.perf_counter()
        for part, buffer in zip(parts, buffers, strict=True):
            if what == "gather":
                buffer.copy_(part)
            else:
                part.copy_(buffer)
        return {f"{what}_copy": time.perf_counter() - started_s, f"{what}_copy_cpu": self._cpu_s() - used_s}


def measure(case: Case, runs: int) -> list[dict[str, Any]]:
    """A row for blocks that follow each other and one for blocks that do not."""
    taken: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    first: dict[str, float] = {}
    for run in range(runs + 1):
        for follow, samples in taken.items():
            prompts = case.prompts(follow=follow)
            sample = case.roofline("gather") | case.store(prompts) | case.load(prompts)
            sample |= case.roofline("scatter")  # last: it overwrites what the load is compared with
            first = first or sample
            if run:
                samples.append(sample)
    gb = case.run_bytes / 1e9
    rows = []
    for follow, samples in taken.items():
        median = {what: statistics.median(sample[what] for sample in samples) for what in samples[0]}
        row: dict[str, Any] = {
            "mib": TOKEN_BYTES * case.chunk_tokens >> 20,
            "style": case.style,
            "blocks": "consecutive" if follow else "random",
            "runs": len(samples),
            "mib_per_run": case.run_bytes >> 20,
        }
        for what in ("store", "seal", "load", "gather_copy", "scatter_copy"):
            row[f"{what}_gb_per_s"] = round(gb / median[what], 2)
        for what, copy in (("store", "gather_copy"), ("load", "scatter_copy")):
            row[f"{what}_ratio"] = round(median[copy] / median[what], 3)
            row[f"{what}_pair_ratio"] = round(statistics.median(s[copy] / s[what] for s in samples), 3)
        for what in ("store_cpu", "load_cpu"):
            row[f"{what}_s_per_gb"] = round(median[what] / gb, 3)
        row["copy_cpu_s_per_gb"] = round((median["gather_copy_cpu"] + median["scatter_copy_cpu"]) / gb / 2, 3)
        row["first_store_gb_per_s"], row["first_load_gb_per_s"] = (
            round(gb / first["store"], 2),
            round(gb / first["load"], 2),
        )
        rows.append(row)
        print(table([row], COLUMNS)[-1], flush=True)
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=9)
    options.add_argument("--mib-per-run", type=int, default=512)
    options.add_argument("--pool-mib", type=int, default=POOL_MIB, help="paged KV, and the roofline's memory")
    options.add_argument("--host-mib", type=int, default=HOST_MIB, help="the server's host memory")
    options.add_argument("--chunk-tokens", type=int, nargs="+", default=[256, 16])
    options.add_argument("--styles", nargs="+", choices=STYLES, default=list(STYLES))
    given = options.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print("\n".join(table([], COLUMNS)), flush=True)
    for chunk_tokens in given.chunk_tokens:
        for style in given.styles:
            with tempfile.TemporaryDirectory(prefix="tkv-", ignore_cleanup_errors=True) as work:
                case = Case(Path(work) / "cache", chunk_tokens, style, given)
                try:
                    rows += measure(case, given.runs)
                finally:
                    case.engine.close()
    finish("host_path", rows, machine("host_path", torch=torch.__version__), is_kept=given.keep)


if __name__ == "__main__":
    main()
