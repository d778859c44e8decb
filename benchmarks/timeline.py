"""One request from arrival to first token, where its prefix is on a cold disk: what happens when.

    python benchmarks/timeline.py [--repeats N] [--tokens N] [--from disk|host]

The CPU build in this process and a real server in its own; the model's KV is as large as that of an 8B model (128 KiB a
token, ``rivals.py``). Before each request vLLM's prefix cache and our host memory are emptied and the files' pages are
dropped. The connector's calls note when they come; shown are the medians of the requests, in ms since their arrival.

Prints a table and writes build/timeline.json.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_report as report

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY)]

from disk_io import drop  # noqa: E402  # beside this script
from end_to_end import evict  # noqa: E402
from rivals import KV8B, MODEL  # noqa: E402
from serving import prompts  # noqa: E402

from tests.kit.server.probe import wait_written  # noqa: E402
from tests.kit.vllm.cached_engine import settings  # noqa: E402
from tests.kit.vllm.harness import close_llm, generate, make_llm, reset_gpu_cache  # noqa: E402  # before vLLM
from tiered_kv.testing.model import build_model  # noqa: E402

IDLE_S = 0.001
COLUMNS = {"event": "event", "ms": "ms", "least": "least", "most": "most"}


class Timeline:
    """Notes when a request's events happen; those of a name are told apart by their order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, float]] = []

    def note(self, event: str) -> None:
        self.events.append((event, time.perf_counter()))

    def wrap(self, owner: Any, name: str, event: str, *, is_noted: Callable[[Any], bool] = lambda _: True) -> None:
        """Note the beginning and the end of each call whose result is of interest."""
        call = getattr(owner, name)

        def timed(*arguments: Any, **more: Any) -> Any:
            began_s = time.perf_counter()
            result = call(*arguments, **more)
            if is_noted(result):
                self.events += [(f"{event}: begins", began_s), (f"{event}: ends", time.perf_counter())]
            return result

        setattr(owner, name, timed)

    def take(self, start_s: float) -> dict[str, float]:
        """Milliseconds since ``start_s``, of the first event of each name."""
        taken: dict[str, float] = {}
        for event, at_s in sorted(self.events, key=lambda one: one[1]):
            taken.setdefault(event, 1e3 * (at_s - start_s))
        self.events = []
        return taken


def watch(llm: Any) -> Timeline:
    """Note what the connector of an engine in this process does."""
    line = Timeline()
    core = llm.llm_engine.engine_core.engine_core
    step = core.step_fn

    def step_as_served() -> Any:
        """As the loop of an engine that is a process of its own: it sleeps after a step that computes nothing."""
        outputs, computed = step()
        if not computed:
            time.sleep(IDLE_S)
        return outputs, computed

    core.step_fn = step_as_served
    side = core.scheduler.connector._scheduler.side
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    copier = get_kv_transfer_group()._worker
    line.wrap(side._client, "lookup", "lookup is sent")
    line.wrap(side, "matched_tokens", "vLLM hears of the hit", is_noted=bool)
    line.wrap(side, "allocated", "blocks are allocated")
    line.wrap(copier, "_copy", "copy")
    line.wrap(copier, "take_finished_loads", "the load is reported", is_noted=lambda result: bool(result[0]))
    line.wrap(core.model_executor, "execute_model", "the forward pass", is_noted=lambda output: output is not None)
    poll = side._client.poll

    def polled() -> None:
        poll()
        for answer in side._client.lookups.values():
            if answer.is_answered:
                line.note(f"{answer.ready} of {len(answer.slots)} chunks are ready")

    side._client.poll = polled
    return line


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2_064)
    parser.add_argument("--source", choices=("disk", "host"), default="disk")
    options = parser.parse_args()
    build_model(MODEL, shape=KV8B)
    taken: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="tkv-") as directory:
        root = Path(directory) / "cache"
        llm = make_llm(MODEL, settings(root, host_bytes="1.5GiB", disk_bytes="8GiB"), kv_cache_memory_bytes=1 << 30)
        line = watch(llm)
        for number, prompt in enumerate(prompts(9, options.repeats + 1, options.tokens)):
            generate(llm, [prompt], max_tokens=1)
            reset_gpu_cache(llm)
            wait_written(root)
            if options.source == "disk":
                evict(root, "host")
                drop([path for path in root.rglob("*") if path.is_file()])
            line.take(0)
            start_s = time.perf_counter()
            generate(llm, [prompt], max_tokens=1)
            line.note("first token")
            if number:
                taken.append(line.take(start_s))
            reset_gpu_cache(llm)
        close_llm(llm)
    rows = []
    for event in sorted(taken[0], key=taken[0].__getitem__):
        times = [one[event] for one in taken if event in one]
        if 2 * len(times) > len(taken):
            shown = {"ms": statistics.median(times), "least": min(times), "most": max(times)}
            rows.append({"event": event} | {name: round(ms, 1) for name, ms in shown.items()})
    rows.sort(key=lambda row: row["ms"])
    print("\n".join(report.table(rows, COLUMNS)))
    facts = report.machine("timeline", prompt_tokens=options.tokens, repeats=options.repeats, source=options.source)
    report.finish("timeline", rows, facts, is_kept=options.keep)


if __name__ == "__main__":
    main()
