"""What a cache server that stands still costs vLLM's steps: a real engine with a live one, a frozen one, and no cache.

    python benchmarks/frozen_server.py [--rounds N] [--prompts N] [--tokens N] [--pressure [--repeats N]]

The CPU build in this process, so that the time of each step can be taken: from the call of the engine core's
``get_output`` to its return, without asynchronous scheduling. Per round new prompts are answered in one batch. While
the server is frozen (SIGSTOP), the first request waits for its lookup until ``lookup_timeout_ms`` (here 50 ms), and the
engine steps on; shown are the times of steps, and beside them of whole rounds. Rounds alternate between live and frozen
on one engine, so that a busy machine is the same for both. ``hooks`` is what a step spends in the connector's own hooks
of the scheduler's side.

With ``--pressure`` the pool holds 80 blocks and the answers are long, so that vLLM preempts, and host memory has room
for 12 chunks, so that chunks wait for slots: shown is the longest time in which requests run and no token is scheduled.
The three take turns, on a new engine each time, ``--repeats`` times; one maximum of thousands of steps is the machine's
as often as the engine's, so shown are the median of the repeats' longest times and the longest of all.

Builds a model with seeded weights under build/. Prints a table and writes build/frozen_server.json
(``frozen_server_pressure.json``).
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from bench_report import finish, machine, percentile, table

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY)]

from tests.kit.server.probe import server_pid, wait_written  # noqa: E402
from tests.kit.vllm.cached_engine import settings  # noqa: E402
from tests.kit.vllm.harness import close_llm, drain, generate, make_llm, random_prompt  # noqa: E402  # before vLLM
from tiered_kv.testing.model import TINY, build_model  # noqa: E402

HOOKS = (
    "add_request",
    "matched_tokens",
    "allocated",
    "loads_finished",
    "plan_step",
    "saves_finished",
    "finish_request",
)
LOOKUP_TIMEOUT_MS = 50.0


class Steps:
    """Times of an engine's steps, and of the connector's hooks in each.

    Attributes:
        step_s, hooks_s: One entry per step that was kept.
    """

    def __init__(self, llm: Any, side: Any) -> None:
        self.step_s: list[float] = []
        self.hooks_s: list[float] = []
        self._in_hooks = 0.0
        core = llm.llm_engine.engine_core
        core.get_output = self._timed_step(core.get_output)
        for name in HOOKS if side is not None else ():
            setattr(side, name, self._timed_hook(getattr(side, name)))

    def _timed_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            self._in_hooks = 0.0
            began_s = time.perf_counter()
            try:
                return step(*arguments)
            finally:
                self.step_s.append(time.perf_counter() - began_s)
                self.hooks_s.append(self._in_hooks)

        return run

    def _timed_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **more: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return hook(*arguments, **more)
            finally:
                self._in_hooks += time.perf_counter() - began_s

        return run

    def take(self) -> tuple[list[float], list[float]]:
        """What was measured since the last call."""
        taken = self.step_s, self.hooks_s
        self.step_s, self.hooks_s = [], []
        return taken


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """The server stands still for the length of a ``with`` block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def one_round(
    llm: Any, steps: Steps, first: int, options: argparse.Namespace
) -> tuple[list[float], list[float], float]:
    """New prompts in one batch; the times of the steps, of the hooks in them, and of the whole round."""
    steps.take()
    began_s = time.perf_counter()
    generate(llm, [random_prompt(first + i, options.tokens) for i in range(options.prompts)], max_tokens=16)
    whole_s = time.perf_counter() - began_s
    return *steps.take(), whole_s


def measure(model: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows."""
    plain = make_llm(model, None, async_scheduling=False, kv_cache_memory_bytes=1 << 30)
    steps = Steps(plain, None)
    one_round(plain, steps, 0, options)  # warm
    bare = [one_round(plain, steps, 1000 * (n + 1), options) for n in range(options.rounds)]
    close_llm(plain)
    live, still = [], []
    with tempfile.TemporaryDirectory(prefix="tkv-") as root:
        given = settings(Path(root) / "cache", lookup_timeout_ms=LOOKUP_TIMEOUT_MS)
        llm = make_llm(model, given, async_scheduling=False, kv_cache_memory_bytes=1 << 30)
        side = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler.side
        steps = Steps(llm, side)
        one_round(llm, steps, 0, options)
        for number in range(options.rounds):
            live.append(one_round(llm, steps, 1_000_000 + 1000 * number, options))
            drain(llm)
            wait_written(Path(root) / "cache")
            with frozen(server_pid(Path(root) / "cache")):
                still.append(one_round(llm, steps, 2_000_000 + 1000 * number, options))
            drain(llm)
            while side._client.is_silent:  # until it has answered again
                side.poll()
                time.sleep(0.01)
        timeouts = side.counters["lookup_timeout"]
        close_llm(llm)
    assert timeouts >= options.rounds, f"the frozen server was not waited for. timeouts={timeouts}"
    return [row("no cache", bare), row("live", live), row("frozen", still)]


PRESSED = {"num_gpu_blocks_override": 80, "max_num_batched_tokens": 384, "max_model_len": 2048}


class Gaps:
    """Times between steps that scheduled tokens, while requests run.

    Attributes:
        gap_s: One entry per step that scheduled tokens.
        empty: Steps that scheduled none although requests ran.
    """

    def __init__(self, scheduler: Any) -> None:
        self.gap_s: list[float] = []
        self.empty = self.preempted = 0
        schedule = scheduler.schedule
        last_s = 0.0

        def watched(*arguments: Any) -> Any:
            nonlocal last_s
            is_running = bool(scheduler.running)
            output = schedule(*arguments)
            now_s = time.perf_counter()
            self.preempted += len(output.preempted_req_ids or ())
            self.empty += is_running and not output.total_num_scheduled_tokens
            if output.total_num_scheduled_tokens:
                self.gap_s += [now_s - last_s] if is_running else []
                last_s = now_s
            return output

        scheduler.schedule = watched


def pressed(model: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows under pressure: vLLM's blocks and the cache's slots are short."""
    servers = ("no cache", "live", "frozen")
    seen: dict[str, list[Gaps]] = {server: [] for server in servers}
    for repeat in range(options.repeats):
        for server in servers:
            seen[server].append(pressed_once(model, server, 10_000 * (repeat + 1), options.rounds))
    return [pressed_row(server, seen[server]) for server in servers]


def pressed_once(model: Path, server: str, first: int, rounds: int) -> Gaps:
    """One engine's rounds of prompts that are too long, together, for its pool."""
    with tempfile.TemporaryDirectory(prefix="tkv-") as root:
        given = settings(Path(root) / "cache", lookup_timeout_ms=LOOKUP_TIMEOUT_MS, host_bytes=12 * 528_384)
        llm = make_llm(model, None if server == "no cache" else given, async_scheduling=False, **PRESSED)
        generate(llm, [random_prompt(1, 500)], max_tokens=4)  # warm
        drain(llm)
        gaps = Gaps(llm.llm_engine.engine_core.engine_core.scheduler)
        with frozen(server_pid(Path(root) / "cache")) if server == "frozen" else nullcontext():
            for number in range(rounds):
                prompts = [random_prompt(first + 100 * number + i, 300 + 40 * i) for i in range(8)]
                generate(llm, prompts, max_tokens=70)
        close_llm(llm)
        return gaps


def pressed_row(server: str, repeats: list[Gaps]) -> dict[str, Any]:
    gap_s = [value for gaps in repeats for value in gaps.gap_s]
    longest_s = [max(gaps.gap_s) for gaps in repeats]
    return {
        "server": server,
        "steps": len(gap_s),
        "empty_steps": sum(gaps.empty for gaps in repeats),
        "preempted": sum(gaps.preempted for gaps in repeats),
        "gap_p50_ms": 1e3 * statistics.median(gap_s),
        "gap_p99_ms": 1e3 * percentile(gap_s, 0.99),
        "gap_p999_ms": 1e3 * percentile(gap_s, 0.999),
        "longest_p50_ms": 1e3 * statistics.median(longest_s),
        "longest_ms": 1e3 * max(longest_s),
    }


def row(server: str, rounds: list[tuple[list[float], list[float], float]]) -> dict[str, Any]:
    step_s = [value for one, _, _ in rounds for value in one]
    hooks_s = [value for _, one, _ in rounds for value in one]
    return {
        "server": server,
        "steps": len(step_s),
        "p50_ms": 1e3 * statistics.median(step_s),
        "p99_ms": 1e3 * percentile(step_s, 0.99),
        "max_ms": 1e3 * max(step_s),
        "hooks_p50_ms": 1e3 * statistics.median(hooks_s),
        "hooks_p99_ms": 1e3 * percentile(hooks_s, 0.99),
        "hooks_max_ms": 1e3 * max(hooks_s),
        "round_p50_ms": 1e3 * statistics.median(whole for _, _, whole in rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=4, help="per round")
    parser.add_argument("--tokens", type=int, default=600, help="per prompt")
    parser.add_argument("--pressure", action="store_true", help="with too few blocks and slots")
    parser.add_argument("--repeats", type=int, default=5, help="engines of each kind, in turns, with --pressure")
    options = parser.parse_args()
    model = build_model(REPOSITORY / "build" / "models" / "tiny", shape=TINY)
    rows = pressed(model, options) if options.pressure else measure(model, options)
    facts = machine(
        "frozen_server", lookup_timeout_ms=LOOKUP_TIMEOUT_MS, prompts=options.prompts, tokens=options.tokens
    )
    print("\n".join(table(rows, {name: name.replace("_", " ") for name in rows[0]})))
    finish(f"frozen_server{'_pressure' if options.pressure else ''}", rows, facts)


if __name__ == "__main__":
    main()
