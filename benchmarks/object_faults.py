"""What a failing object store adds to a request's latency: the connector's own waiting rule over a real S3 server.

    python benchmarks/object_faults.py [--requests FAST SLOW PATIENT] [--chunks N] [--timeout-s S]

Every request is for a prefix that only the bucket has. A request's added latency is the time from its arrival until the
scheduler side answers how many tokens it may load (vLLM is told "ask again" before that); without a cache that is
nothing. Asked once a millisecond, as a scheduler that does nothing else would. For each fault a fresh node (a server
process with host memory and disk) opens while the store is well, then the fault is ordered and requests come one after
another; those that came while the breaker was open are counted apart. A request's loss is its wait less the
prefill time of the tokens it was offered: below zero where waiting paid.

    fast       the rule as shipped (vllm/wait_policy.py), for an engine that computes 1000 tokens a second
    slow       the same for 50 tokens a second: the more there is to save, the longer a request may wait
    patient    promotion_wait_ms=60000: not the default; the request waits for whatever the store does

Starts its own S3 server unless TIERED_KV_TEST_S3_ENDPOINT names one (scripts/s3_service.py), and the fault proxy of the
tests in front of it. Prints a table and writes build/object_faults.json.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_report import finish, machine, percentile, table

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

from tests.kit.faults.proxy import Fault, FaultProxy, Mode  # noqa: E402
from tests.kit.s3 import S3, open_s3  # noqa: E402
from tests.kit.server.clients import BLOCK, CHUNK, SmallEngine, settings  # noqa: E402
from tests.kit.server.object_nodes import s3_place, wait_uploaded  # noqa: E402
from tests.kit.server.probe import figures, wait_written  # noqa: E402
from tests.kit.server.processes import end_server  # noqa: E402
from tiered_kv.vllm.engine_role import EngineRole  # noqa: E402
from tiered_kv.vllm.identity.adapters import Adapters  # noqa: E402
from tiered_kv.vllm.kv_groups import CacheGroup, CacheGroups  # noqa: E402
from tiered_kv.vllm.scheduler import SchedulerSide  # noqa: E402

STEP_S = 0.001
GROUPS = CacheGroups([CacheGroup(0, BLOCK, CHUNK // BLOCK, CHUNK // BLOCK)])
PREFILL = {"fast": 1000.0, "slow": 50.0, "patient": 1000.0}
"""Rules, and the tokens per second that the engine is said to compute."""

COLUMNS = {
    "fault": "fault", "wait": "rule", "requests": "requests", "p50_ms": "p50 ms", "p99_ms": "p99 ms",
    "max_ms": "max ms", "loss_p99_ms": "p99 loss", "hits": "hits", "while_open": "breaker open",
    "open_p99_ms": "p99 ms while open",
}  # fmt: skip

NO_BUCKET = "no bucket at all"
DOWN = "down"
FAULTS: dict[str, tuple[Fault, ...]] = {
    NO_BUCKET: (),
    "none": (),
    "500": (Fault(Mode.STATUS, status=500),),
    "503 SlowDown": (Fault(Mode.STATUS, status=503),),
    "403": (Fault(Mode.STATUS, status=403),),
    "reset mid-body": (Fault(Mode.RESET),),
    "truncated body": (Fault(Mode.TRUNCATE),),
    "drip 1 kB/s": (Fault(Mode.DRIP, bytes_per_s=1000),),
    "silence": (Fault(Mode.SILENCE),),
    "every 10th silent": (Fault(Mode.SILENCE, probability=0.1),),
    DOWN: (),
}


@dataclass(frozen=True)
class Sample:
    """One request: how long it waited, what it was offered, and whether the breaker was open all along."""

    wait_s: float
    tokens: int
    is_open: bool


@dataclass(frozen=True)
class Run:
    """What all measurements share."""

    s3: S3
    prefix: str
    proxy: FaultProxy
    work: Path
    options: argparse.Namespace

    def prompt(self, number: int) -> list[int]:
        length = self.options.chunks * CHUNK
        return list(range(number * length, (number + 1) * length))


def node(run: Run, name: str, endpoint_url: str | None, *, disk_only: bool = False, **more: Any) -> SmallEngine:
    """A node on the bucket; ``disk_only``: the same without the bucket."""
    place, disk = s3_place(run.s3, run.prefix, endpoint_url), run.work / name
    bucket = {"storage_uri": place.uri, "storage_options": place.options, "disk_path": str(disk)}
    config = settings(
        disk,
        storage_timeout_s=run.options.timeout_s,
        host_bytes="64MiB",
        disk_bytes="1GiB",
        drain_s=300.0 if endpoint_url is None else 0.0,
        **({} if disk_only else bucket),
        **more,
    )
    return SmallEngine.start(config, name)


def fill(run: Run, count: int) -> None:
    """Have another node put the prefixes of all requests into the bucket."""
    other = node(run, "filler", None)
    for number in range(count):
        other.store(run.options.chunks, run.prompt(number)[0])
        wait_written(run.work / "filler")
    wait_uploaded(run.work / "filler")
    other.close()
    end_server(run.work / "filler")


@contextmanager
def failing(proxy: FaultProxy, name: str) -> Iterator[None]:
    if name == DOWN:
        proxy.down()
    proxy.set(*FAULTS[name])
    try:
        yield
    finally:
        proxy.set()
        proxy.up()


def measure(run: Run, fault: str, wait: str, count: int) -> list[Sample]:
    """The requests of one cell, one after the other."""
    more = {"promotion_wait_ms": 60_000} if wait == "patient" else {}
    name = f"{wait}-{fault}".replace(" ", "-").replace("/", "-")
    engine = node(run, name, run.proxy.url, disk_only=fault == NO_BUCKET, **more)
    side = SchedulerSide(
        engine.config,
        engine.client,
        Adapters(""),
        GROUPS,
        EngineRole(may_load=True, may_store=False, has_prefix_caching=False),
    )
    side.prefill.tokens_per_s = PREFILL[wait]
    try:
        with failing(run.proxy, fault):
            return [ask(run, side, name, number) for number in range(count)]
    finally:
        engine.close()
        end_server(run.work / name)


def ask(run: Run, side: SchedulerSide, name: str, number: int) -> Sample:
    """One request, from its arrival to the answer."""
    request = Request(f"{name}-{number}", [*run.prompt(number), 1], SamplingParams(max_tokens=1), None)
    was_open = is_left_alone(run.work / name)
    start_s = time.perf_counter()
    side.add_request(request)
    while (tokens := side.matched_tokens(request, 0)) is None:
        time.sleep(STEP_S)
    wait_s = time.perf_counter() - start_s
    is_open = was_open and is_left_alone(run.work / name)
    side.finish_request(request, [])
    side.poll()
    return Sample(wait_s, tokens, is_open)


def is_left_alone(root: Path) -> bool:
    """Whether the breaker of the object tier is open."""
    return any(tier["breaker"] != "closed" for tier in figures(root)["tiers"] if tier["name"] == "object")


def row(fault: str, wait: str, samples: list[Sample]) -> dict[str, Any]:
    waits = [sample.wait_s for sample in samples]
    losses = [sample.wait_s - sample.tokens / PREFILL[wait] for sample in samples]
    while_open = [sample.wait_s for sample in samples if sample.is_open]
    return {
        "fault": fault,
        "wait": wait,
        "requests": len(samples),
        "p50_ms": 1e3 * statistics.median(waits),
        "p99_ms": 1e3 * percentile(waits, 0.99),
        "max_ms": 1e3 * max(waits),
        "loss_p99_ms": 1e3 * percentile(losses, 0.99),
        "hits": sum(sample.tokens > 0 for sample in samples),
        "while_open": len(while_open),
        "open_p99_ms": 1e3 * percentile(while_open, 0.99) if while_open else None,
        "waits_ms": [round(1e3 * wait_s, 2) for wait_s in waits],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs=3, default=[100, 30, 10], help="per fault: fast, slow, patient")
    parser.add_argument("--chunks", type=int, default=16, help=f"per prompt, of {CHUNK} tokens")
    parser.add_argument("--timeout-s", type=float, default=2.0)
    options = parser.parse_args()
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="tkv-") as work,
        open_s3("bench") as s3,
        FaultProxy(s3.endpoint_url) as proxy,
    ):
        run = Run(s3, s3.new_prefix(), proxy, Path(work), options)
        fill(run, max(options.requests))
        for fault in FAULTS:
            for wait, count in zip(PREFILL, options.requests, strict=True):
                rows.append(row(fault, wait, measure(run, fault, wait, count)))
                print(table(rows, COLUMNS)[-1], flush=True)
        facts = machine(
            "object_faults",
            storage_timeout_s=options.timeout_s,
            prefill_tokens_per_s=PREFILL,
            prompt_tokens=options.chunks * CHUNK,
        )
    print("\nadded latency per request:\n")
    print("\n".join(table(rows, COLUMNS)))
    shipped = [cell for cell in rows if cell["wait"] != "patient"]
    late = [f"{cell['fault']} ({cell['wait']})" for cell in shipped if cell["loss_p99_ms"] >= 1e3 * options.timeout_s]
    print(
        f"shipped rule: p99 of the loss >= storage_timeout_s={options.timeout_s:g} in: {', '.join(late) or 'no case'}"
    )
    finish("object_faults", rows, facts)


if __name__ == "__main__":
    main()
