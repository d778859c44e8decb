"""Us beside our rivals: what each gives a real vLLM, all up at once and taking turns.

    make bench-rivals [ARGS="--repeats 7 --keep"]

Engines on CPU, each an engine core in a process of its own, with a small model whose KV is as large as that of an 8B
model (32 layers, 8 KV heads of 128, bfloat16: 128 KiB a token) and 1 GiB of paged KV:

    plain     vLLM alone
    ours      TieredKVConnector over host memory and disk
    lmcache   LMCacheMPConnector and its server, over host memory and ``fs_native`` (an environment of its own)
    native    vLLM's OffloadingConnector: its host memory and ``fs`` tiers, with a thread of ours in place of the
              GPU's copies (``tests/kit/vllm/host_offloading.py``): vLLM itself refuses the CPU build
    example   vLLM's ExampleConnector: a file per layer; its "memory" is the page cache

A repetition takes one prompt that nobody saw
through all of them, in an order that turns by one each time: computed, from memory (vLLM's own prefix cache emptied
before; plain's stays), from cold disk (memory tiers emptied, pages dropped). The first
repetition is not counted. Every answer's token and log-probability are compared with those of the computed one.

Medians with the least and the most, in milliseconds. What is unfair stands in docs/performance.md.
"""

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench_report as report

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

from disk_io import drop  # noqa: E402  # beside this script
from end_to_end import evict  # noqa: E402
from serving import ServedEngine, ours, prompts  # noqa: E402

from tiered_kv.testing.model import ModelShape, build_model  # noqa: E402

LMCACHE_PYTHON = REPOSITORY / ".cache" / "lmcache" / "bin" / "python"
MODEL = REPOSITORY / "build" / "models" / "kv8b"
KV8B = ModelShape(
    layers=32,
    hidden=512,
    intermediate=512,
    heads=8,
    kv_heads=8,
    head_dim=128,
    vocab=8192,
    weight_std=0.057,
    head_std=0.18,
)
SYSTEMS = ("plain", "ours", "lmcache", "native", "example")
CASES = ("computed", "memory", "disk")
HOST_GIB = 1.5
STILL_S = 1.0
DEADLINE_S = 120.0
COLUMNS = {
    "system": "system", "case": "case", "ms": "ms", "least": "least", "most": "most", "beside_plain": "x plain's own",
    "beside_ours": "ours / it", "cached_tokens": "tokens not computed", "differs": "most difference of logprob",
}  # fmt: skip


@dataclass
class System:
    """One system under test.

    Attributes:
        folder: Where its files are; None: it has none.
        empty_memory: Empties its memory tier.
        wait_stored: Waits until what was computed is on disk.
    """

    name: str
    engine: ServedEngine
    folder: Path | None = None
    empty_memory: Callable[[], None] = lambda: None
    wait_stored: Callable[[], None] = lambda: None
    taken_ms: dict[str, list[float]] = field(default_factory=dict)
    cached: dict[str, set[int]] = field(default_factory=dict)
    differs: dict[str, float] = field(default_factory=dict)

    def note(self, case: str, prompt: Sequence[int], expected: tuple[int, float] | None) -> tuple[int, float]:
        """Ask once; returns token and log-probability, which must be the expected ones as far as rounding goes."""
        timed = self.engine.ttft(prompt)
        if expected is not None:
            if timed.token != expected[0]:
                raise RuntimeError(f"wrong token. system={self.name} case={case} expected={expected} observed={timed}")
            self.differs[case] = max(self.differs.get(case, 0.0), abs(timed.logprob - expected[1]))
        self.taken_ms.setdefault(case, []).append(1e3 * timed.ttft_s)
        self.cached.setdefault(case, set()).add(timed.cached_tokens)
        return timed.token, timed.logprob

    def repetition(self, prompt: Sequence[int]) -> None:
        """Take a prompt through all cases."""
        self.engine.forget()
        expected = self.note("computed", prompt, None)
        if self.folder is None:
            self.note("memory", prompt, expected)
            return
        self.wait_stored()
        self.engine.forget()
        self.note("memory", prompt, expected)
        self.wait_stored()
        self.engine.forget()
        self.empty_memory()
        drop([path for path in self.folder.rglob("*") if path.is_file()])
        self.note("disk", prompt, expected)
        self.wait_stored()

    def forget_figures(self) -> None:
        """Do not count what was measured until now."""
        self.taken_ms, self.cached, self.differs = {}, {}, {}


def until_still(folder: Path) -> None:
    """Wait until nothing was written into a folder for a while: how one waits for a system that does not say."""
    deadline_s, before, since_s = time.monotonic() + DEADLINE_S, -1, time.monotonic()
    while time.monotonic() < deadline_s:
        size = 0
        for path in folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                size += path.stat().st_size
        if size != before:
            before, since_s = size, time.monotonic()
        elif time.monotonic() - since_s > STILL_S:
            return
        time.sleep(0.05)
    raise TimeoutError(f"never still. folder={folder}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def lmcache_server(folder: Path, log: Path, mode: str) -> Iterator[tuple[int, int]]:
    """LMCache's server over host memory and ``fs_native``; gives its port, and that of its HTTP."""
    port, http = free_port(), free_port()
    adapter = {"type": "fs_native", "base_path": str(folder), "num_workers": 4}
    command = [
        *(str(LMCACHE_PYTHON), "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--http-host", "127.0.0.1", "--http-port", str(http), "--chunk-size", "256"),
        *("--l1-size-gb", str(HOST_GIB), "--eviction-policy", "LRU", "--l2-adapter", json.dumps(adapter)),
        *("--supported-transfer-mode", mode),
    ]
    quiet = os.environ | {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=quiet, start_new_session=True)
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"LMCache's server does not answer. code={process.poll()} log={log}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{http}/", timeout=1):
                break
            time.sleep(0.2)
        yield port, http
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def clear_lmcache(http: int) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{http}/cache/clear", method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()


def open_systems(stack: ExitStack, work: Path, names: Sequence[str], mode: str) -> list[System]:
    """Start all of them, one after the other."""
    options = {"model": str(MODEL), "dtype": "bfloat16"}
    space = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    systems = []

    def started(name: str, transfer: dict[str, Any] | None, **more: Any) -> ServedEngine:
        engine = ServedEngine(work / f"{name}.log", transfer, **({"environment": space} | more), **options)
        stack.callback(engine.close)
        return engine

    for name in names:
        folder = work / name
        folder.mkdir()
        if name == "plain":
            systems.append(System(name, started(name, None)))
        elif name == "ours":
            root = folder / "cache"
            settings = {"storage_uri": root.as_uri(), "disk_bytes": "8GiB", "host_bytes": "1.5GiB", "strict": True}
            engine = started(name, ours(settings))
            systems.append(
                System(name, engine, root, lambda root=root: evict(root, "host"), lambda root=root: until_still(root))
            )
        elif name == "lmcache":
            port, http = stack.enter_context(lmcache_server(folder, work / "lmcache-server.log", mode))
            extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port, "lmcache.mp.mp_transfer_mode": mode}
            transfer = {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
            quiet = space | {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}
            engine = started(name, transfer, python=LMCACHE_PYTHON, environment=quiet)
            systems.append(
                System(
                    name,
                    engine,
                    folder,
                    lambda http=http: clear_lmcache(http),
                    lambda folder=folder: until_still(folder),
                )
            )
        elif name == "native":
            extra = {
                "spec_name": "HostTieringSpec",
                "spec_module_path": "tests.kit.vllm.host_offloading",
                "cpu_bytes_to_use": int(HOST_GIB * 2**30),
                "block_size": 256,
                "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
            }
            transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
            here = space | {"PYTHONPATH": str(REPOSITORY)}
            engine = started(name, transfer, environment=here)
            systems.append(
                System(name, engine, folder, engine.forget_connectors, lambda folder=folder: until_still(folder))
            )
        else:
            extra = {"shared_storage_path": str(folder)}
            transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
            systems.append(
                System(name, started(name, transfer), folder, wait_stored=lambda folder=folder: until_still(folder))
            )
    return systems


def figures(systems: Sequence[System]) -> list[dict[str, Any]]:
    """A row for each case of each system."""
    medians = {(one.name, case): statistics.median(ms) for one in systems for case, ms in one.taken_ms.items()}
    rows = []
    for case in CASES:
        for one in systems:
            if case not in one.taken_ms:
                continue
            ms, own = medians[one.name, case], medians.get(("plain", "computed" if case == "computed" else "memory"))
            mine = medians.get(("ours", case))
            rows.append(
                {
                    "system": one.name,
                    "case": case,
                    "ms": round(ms, 1),
                    "least": round(min(one.taken_ms[case]), 1),
                    "most": round(max(one.taken_ms[case]), 1),
                    "beside_plain": round(ms / own, 2) if own else None,
                    "beside_ours": round(mine / ms, 2) if mine and one.name not in ("ours", "plain") else None,
                    "cached_tokens": ", ".join(map(str, sorted(one.cached[case]))),
                    "differs": one.differs.get(case),
                }
            )
    return rows


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2_064)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS)
    parser.add_argument("--mode", default="lmcache_driven", help="LMCache's transfer mode")
    options = parser.parse_args()
    names = options.systems or SYSTEMS
    build_model(MODEL, shape=KV8B)
    with tempfile.TemporaryDirectory(prefix="tkv-", ignore_cleanup_errors=True) as directory, ExitStack() as stack:
        work = Path(directory)
        try:
            systems = open_systems(stack, work, names, options.mode)
            for number, prompt in enumerate(prompts(9, options.repeats + 1, options.tokens)):
                turn = number % len(systems)
                for one in systems[turn:] + systems[:turn]:
                    one.repetition(prompt)
                    if number == 0:
                        one.forget_figures()
        except BaseException:
            for log in sorted(work.glob("*.log")):
                sys.stderr.write(f"== {log.name}\n{log.read_text()[-3000:]}\n")
            raise
    rows = figures(systems)
    print("\n".join(report.table(rows, COLUMNS)))
    facts = report.machine("rivals", prompt_tokens=options.tokens, repeats=options.repeats, lmcache_mode=options.mode)
    report.finish("rivals", rows, facts, is_kept=options.keep)


if __name__ == "__main__":
    main()
