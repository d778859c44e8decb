"""One engine of ``gpu_engine.py``: takes a job as a line on standard input, and writes samples as lines of JSON.

What is slow and needs no GPU, the imports, is done before the job is read, so that it overlaps with other engines'
work. A sample is written when it was taken: what an engine measured before it failed, or was ended, is there. Must be
in an environment of ``gpu_engine.py``'s. Not a benchmark by itself.
"""

import itertools
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "demo")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import xxhash  # noqa: E402
from bench_report import percentile  # noqa: E402  # beside this script
from engine import Answer, Engine  # noqa: E402  # the demo's files are scripts
from vllm.config import KVTransferConfig  # noqa: E402

MODULE_PATH = "tiered_kv.vllm"
CHUNK_TOKENS = 256
"""A hit may leave so many tokens at the prompt's end to be computed."""

LINK_BYTES = 1 << 30
DECODED = 160
BESIDE = 32
"""Tokens that are decoded alone before the long prompt comes."""


class TimedEngine(Engine):
    """The demo's engine, with fingerprints that are cheap for GiB of KV, and a request that decodes beside another."""

    has_digests = True

    @property
    def kv_bytes_per_token(self) -> float:
        """Of all layers, as they lie in this engine's paged KV."""
        return float(sum(layer.nbytes for layer in self._kv_layers()) / self._blocks / self.block_tokens())

    @property
    def _blocks(self) -> int:
        return int(self._core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks)

    def _kv_digests(self, hashes: Sequence[bytes]) -> list[str]:
        """As the demo's, but one copy per layer, and a hash that keeps up with it: nobody wants to deceive here."""
        if not self.has_digests:
            return []
        pool = self._core.scheduler.kv_cache_manager.block_pool
        found = list(itertools.takewhile(bool, (pool.get_cached_block(one, [0]) for one in hashes)))
        ids = torch.tensor([blocks[0].block_id for blocks in found])
        digests = [xxhash.xxh3_128() for _ in found]
        for layer in self._kv_layers():
            axis = next((a for a, n in enumerate(layer.shape) if n >= self._blocks and n % self._blocks == 0), None)
            if axis is None:
                raise RuntimeError(f"no axis of blocks. blocks={self._blocks} shape={list(layer.shape)}")
            blocks = layer.movedim(axis, 0)
            part = blocks.shape[0] // self._blocks  # kernel blocks may be smaller
            rows = (ids[:, None] * part + torch.arange(part)).flatten().to(layer.device)
            copied = blocks.index_select(0, rows).contiguous().view(torch.uint8).cpu().numpy()
            for digest, row in zip(digests, copied.reshape(len(found), -1), strict=True):
                digest.update(row.data)
        return [digest.hexdigest() for digest in digests]

    def decode(self, short: Sequence[int], beside: Sequence[int] | None) -> tuple[list[float], int]:
        """Decode ``DECODED`` tokens; after ``BESIDE`` of them another request comes, with one token to answer.

        Returns:
            The seconds between tokens from when the other one had its answer, or from ``BESIDE`` on where there is
            none; and how many tokens of the other's prompt were not computed.
        """
        from vllm import SamplingParams

        engine, counted_from, cached = self._llm.llm_engine, BESIDE, 0
        times: list[float] = []

        def add(name: str, prompt: Sequence[int], tokens: int) -> None:
            greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            engine.add_request(name, {"prompt_token_ids": list(prompt)}, greedy)

        add("decoding", short, DECODED)
        while engine.has_unfinished_requests():
            is_answered = False
            for output in self._step():
                if output.request_id.startswith("beside"):
                    is_answered, cached = True, output.num_cached_tokens or 0
                elif len(output.outputs[0].token_ids) > len(times):
                    times.append(time.perf_counter())
                    if len(times) == BESIDE and beside is not None:
                        add("beside", beside, 1)
            if is_answered:  # in one step with a token of the first, whichever of the two is named first
                counted_from = len(times)
        self.drain()
        return [float(gap) for gap in np.diff(times[counted_from - 1 :])], cached


class Samples:
    """The file of samples."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a")  # noqa: SIM115  # as long as the process
        self.failures = 0

    def add(self, phase: str, **fields: Any) -> None:
        self._file.write(json.dumps({"phase": phase, **fields}) + "\n")
        self._file.flush()

    @contextmanager
    def guarded(self, phase: str) -> Iterator[None]:
        """What fails here is a sample of its own, and the next phase is tried."""
        try:
            yield
        except Exception as exc:  # noqa: BLE001  # whatever it is, the next phase is worth trying
            traceback.print_exc()
            self.failures += 1
            self.add(phase, failed=f"{type(exc).__name__}: {exc}"[:300])


def main() -> int:
    """Do the job."""
    ready_s = time.perf_counter()
    line = sys.stdin.readline()
    if not line.strip():
        return 0  # nobody wants this engine any more
    job: dict[str, Any] = json.loads(line)
    samples = Samples(job["samples"])
    begun_s = time.perf_counter()
    engine: TimedEngine | None = None
    with samples.guarded("start"):
        options = dict(job["options"])
        if job["transfer"] is not None:
            options["kv_transfer_config"] = KVTransferConfig(**job["transfer"])
        engine = TimedEngine(Path(job["model"]), options, job["connector"], MODULE_PATH)
        samples.add("start", seconds=time.perf_counter() - begun_s, waited_s=begun_s - ready_s)
    if engine is not None:
        try:
            _measure(engine, job, samples)
        finally:
            with samples.guarded("end"):
                engine.close()
    return 1 if samples.failures else 0


def _measure(engine: TimedEngine, job: dict[str, Any], samples: Samples) -> None:
    role, tokens = job["role"], job["tokens"]
    engine.has_digests = False
    with samples.guarded("facts"):
        samples.add("facts", **engine.description(), kv_bytes_per_token=engine.kv_bytes_per_token)
    with samples.guarded("warm-up"):
        began_s = time.perf_counter()
        prompt = _prompt(job, f"warm-up {role}", tokens)
        engine.ask(prompt, 1)
        engine.ask(prompt, 1)  # a hit computes little, by other kernels
        if job["digests"] is None and job["hit"]:
            engine.forget()
            engine.ask(prompt, 1)
        samples.add("warm-up", seconds=time.perf_counter() - began_s)
    with samples.guarded("link"):
        if torch.cuda.is_available():
            samples.add("link", gb_per_s=_link_gb_per_s())
    for number in range(job["repeats"]):
        prompt = _prompt(job, f"asked {number}", tokens)
        if job["digests"] is None:
            computed = _ask(engine, samples, "computed", number, prompt, [])
        else:
            computed = job["digests"].get(str(number), [])
            _ask(engine, samples, job["hit"], number, prompt, computed)
        _ask(engine, samples, "prefix cache", number, prompt, None)
        if job["digests"] is None and job["hit"]:
            with samples.guarded(job["hit"]):
                engine.forget()
                _ask(engine, samples, job["hit"], number, prompt, computed)
    if job["digests"] is None:
        for number, beside in enumerate([None, _prompt(job, f"beside {role}", tokens)]):
            phase = "decode" if beside is None else "decode beside a store"
            with samples.guarded(phase):
                gaps, cached = engine.decode(_prompt(job, f"decode {number}", 64), beside)
                times = {
                    "itl_p50_ms": 1e3 * statistics.median(gaps),
                    "itl_p99_ms": 1e3 * percentile(gaps, 0.99),
                    "itl_max_ms": 1e3 * max(gaps),
                }
                samples.add(phase, cached_tokens=cached, is_right=cached == 0, gaps=len(gaps), **times)


def _ask(
    engine: TimedEngine, samples: Samples, phase: str, number: int, prompt: list[int], computed: list[str] | None
) -> list[str]:
    """Ask and judge; the digests of the prompt's blocks.

    Args:
        computed: What they were when they were computed; empty: now they are; None: nobody looks at them.
    """
    digests: list[str] = []
    with samples.guarded(phase):
        engine.has_digests = computed is not None
        answer = engine.ask(prompt, 1)
        wrong = wrong_of(phase, answer, len(prompt), engine.block_tokens(), computed)
        fields = {"ttft_s": answer.ttft_s, "cached_tokens": answer.cached_tokens, "is_right": not wrong, "wrong": wrong}
        if phase == "computed":
            fields["digests"] = answer.kv_digests
        samples.add(phase, number=number, **fields)
        digests += answer.kv_digests
    return digests


def wrong_of(phase: str, answer: Answer, tokens: int, block: int, computed: list[str] | None) -> str:
    """What is wrong with an answer, or nothing.

    Args:
        tokens: Of the prompt.
        block: Tokens of one of vLLM's blocks.
        computed: As ``_ask`` has it.
    """
    cached = answer.cached_tokens
    if phase == "computed":
        if cached:
            return f"{cached} tokens were found where none can be"
        if len(answer.kv_digests) < (tokens - 1) // block:
            return f"only {len(answer.kv_digests)} blocks can be looked at"
        return "" if len(set(answer.kv_digests)) == len(answer.kv_digests) else "blocks of one content"
    tail = block if computed is None else max(block, CHUNK_TOKENS)
    least = (tokens - 1) // tail * tail
    if not least <= cached < tokens:
        return f"{cached} tokens were found, not {least} to {tokens - 1}"
    if computed is None:
        return ""
    blocks = cached // block
    if len(computed) < blocks or len(answer.kv_digests) < blocks:
        return f"of {blocks} blocks {len(computed)} and {len(answer.kv_digests)} can be compared"
    differ = sum(a != b for a, b in zip(computed[:blocks], answer.kv_digests[:blocks], strict=True))
    return f"{differ} of {blocks} blocks differ from what was computed" if differ else ""


def _link_gb_per_s() -> float:
    """A pinned copy to the GPU, the best of three: what no load can pass."""
    source = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(4):  # the first warms up
        torch.cuda.synchronize()
        begun_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun_s)
    return LINK_BYTES / min(times[1:]) / 1e9


def _prompt(job: dict[str, Any], name: str, tokens: int) -> list[int]:
    source = random.Random(name)
    return [source.randrange(3, job["vocabulary"]) for _ in range(tokens)]


if __name__ == "__main__":
    sys.exit(main())
