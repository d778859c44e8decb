"""Our tier and vLLM's own ``fs`` below vLLM's offloading: the same rows, the same keys, taking turns.

``ours`` lends its rows to the server, which reads and writes them itself; ``slots`` is ours where it cannot, so that
rows are copied to slots of the server's and from them.

    python benchmarks/offloading.py [--mib SIZES] [--total-mib N] [--repeats N] [--lookups N] [--keep]

All are driven as vLLM's tiering manager drives them: jobs of 32 rows of one region in shared memory, polled every
millisecond, lookups key by key until none says "ask again". Each of ours has a server of its own, and ``slots`` has
host memory for all rows of a repetition; ``disk`` is until every byte is in a file, ``store`` until vLLM has its rows
back. Before a load rows are zeroed, our host memory is emptied and pages are dropped; loaded bytes are compared. ``fs``
checks none.

``thread``: time in the tier's methods on the scheduler's thread, in all steps, for a prompt of 128k tokens in rows of
256 that is found; ``--lookups N`` measures that alone, for N prompts of small rows in turns, and beside it ``nothing``,
a tier that does nothing, what vLLM's own manager takes with that one, and ``asking``, the least that a tier can do that
asks another process: it sends the keys to one that knows nothing, and takes any answer for all of them. CPU seconds are
of this process and of our server. The first repetition does not count. On ext4 without a journal a run within minutes
of the last one pays for the files that were deleted then (docs/decisions/0045-lent-rows.md).
"""

import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import bench_report as report
import numpy as np

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY)]
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from disk_io import drop  # noqa: E402  # beside this script
from lookup import Echo  # noqa: E402

from tests.kit.server.clients import namespace_fields  # noqa: E402
from tests.kit.server.probe import figures, server_pid  # noqa: E402
from tiered_kv.ops.server_link import ServerLink  # noqa: E402
from tiered_kv.vllm.compat import key_positions  # noqa: E402

ROW_TOKENS = 256
JOB_ROWS = 32
PROMPT_ROWS = 128 * 1024 // ROW_TOKENS
POLL_S = 0.001
SMALL_BYTES = 4096
ANSWER_BYTES = 64
COLUMNS = {
    "mib": "MiB",
    "tier": "tier",
    "store": "store GB/s",
    "disk": "disk GB/s",
    "load": "cold load GB/s",
    "store_cpu": "store CPU s/GB",
    "load_cpu": "load CPU s/GB",
    "thread_ms": "thread ms, 128k",
    "thread_least_ms": "at least",
}


class Region:
    """vLLM's host memory, and what its spec tells tiers of it."""

    def __init__(self, row_bytes: int, rows: int) -> None:
        from vllm.v1.kv_offload.config import (
            OffloadingCacheConfig,
            OffloadingConfig,
            OffloadingGroupConfig,
            OffloadingModelConfig,
            OffloadingParallelConfig,
        )
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

        parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=False)
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(ROW_TOKENS, ("layer.0",), 0),),
            worker_kv_bytes_per_block=row_bytes,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id=uuid.uuid4().hex,
            model=OffloadingModelConfig("model", "bfloat16"),
            cache=OffloadingCacheConfig(tokens_per_hash=ROW_TOKENS, blocks_per_chunk=1),
            parallel=parallel,
        )
        events = SimpleNamespace(enable_kv_cache_events=False)
        self.spec = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=events)
        self._region = SharedOffloadRegion(config.engine_id, rows, None, row_bytes, row_bytes)
        self.view = self._region.create_kv_memoryview()
        self.rows = np.frombuffer(self.view.cast("B"), np.uint8).reshape(rows, row_bytes)

    def close(self) -> None:
        del self.rows
        self.view.release()
        self._region.cleanup()


class Driver:
    """One tier, called as vLLM's manager calls it."""

    def __init__(self, name: str, tier: Any, root: Path) -> None:
        self.name = name
        self.tier = tier
        self.root = root
        self._job = 0
        self.thread_s = 0.0

    def timed(self, method: Callable[..., Any], *arguments: Any) -> Any:
        started_s = time.perf_counter()
        result = method(*arguments)
        self.thread_s += time.perf_counter() - started_s
        return result

    def request(self, keys: list[bytes]) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        context = ReqContext(uuid.uuid4().hex)
        self.timed(self.tier.on_new_request, context)
        for number, key in enumerate(keys):
            context.set_offload_key_position(key, (number + 1) * ROW_TOKENS)
        return context

    def look_up(self, keys: list[bytes], context: Any) -> None:
        """As vLLM's ``_maximal_prefix_lookup`` does, in steps, until all are found."""
        from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext

        answers = [LookupResult.RETRY]
        while LookupResult.RETRY in answers:
            self.timed(self.tier.get_finished_jobs)  # first of all in a step
            answers = self.timed(self._ask, keys, context)
            self.timed(self.tier.on_schedule_end, ScheduleEndContext((), ()))
            time.sleep(POLL_S)
        assert answers == [LookupResult.HIT] * len(keys), "what was stored is not found"

    def _ask(self, keys: list[bytes], context: Any) -> list[Any]:
        """A step's lookups: on after "ask again", and no further than the first miss."""
        from vllm.v1.kv_offload.base import LookupResult

        answers, look_up, miss = [], self.tier.lookup, LookupResult.MISS
        for key in keys:
            answers.append(look_up(key, context))
            if answers[-1] is miss:
                break
        return answers

    def run(self, keys: list[bytes], context: Any, *, is_load: bool) -> float:
        """Seconds until all jobs are reported."""
        from vllm.v1.kv_offload.tiering.base import TransferJob

        started_s, open_jobs = time.perf_counter(), set()
        for first in range(0, len(keys), JOB_ROWS):
            part = keys[first : first + JOB_ROWS]
            rows = np.arange(first, first + len(part), dtype=np.int32)
            job = TransferJob(self._job, part, rows, is_load, context)
            self.timed(self.tier.submit_load if is_load else self.tier.submit_store, job)
            open_jobs.add(self._job)
            self._job += 1
        while open_jobs:
            for result in self.timed(self.tier.get_finished_jobs):
                assert result.success, f"{self.name}: a job failed"
                open_jobs.remove(result.job_id)
            time.sleep(POLL_S)
        return time.perf_counter() - started_s

    def settle(self) -> None:
        """Wait until everything is in files."""

    def forget(self) -> None:
        """Nothing is in memory any more."""
        drop([path for path in self.root.rglob("*") if path.is_file()])

    def cpu_s(self) -> float:
        return time.process_time()


def nothing() -> Any:
    """A tier that does nothing: whatever it is asked for is there, whatever it is given is stored."""
    from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

    class Nothing(SecondaryTierManager):  # type: ignore[misc]  # vLLM is untyped here
        def __init__(self) -> None:
            super().__init__(None, memoryview(b""), "nothing")
            self._results: list[Any] = []
            self._is_hit = LookupResult.HIT

        def on_new_request(self, _context: Any) -> Any:
            return RequestOffloadingContext()

        def lookup(self, _key: Any, _context: Any) -> Any:
            return self._is_hit

        def submit_store(self, job: Any) -> None:
            self._results.append(JobResult(job.job_id, success=True))

        submit_load = submit_store

        def get_finished_jobs(self) -> list[Any]:
            results, self._results = self._results, []
            return results

        def drain_jobs(self) -> None:
            """There are none."""

    return Nothing()


def asking(echo: Echo) -> Any:
    """The roofline of tiers that ask another process: a message with a prompt's keys, an answer, a hit for each."""
    from vllm.v1.kv_offload.base import LookupResult

    class Asking(type(nothing())):  # type: ignore[misc]  # vLLM is untyped here
        def __init__(self) -> None:
            super().__init__()
            self._is_retry = LookupResult.RETRY
            self._asked: list[bytes] = []
            self._held: set[bytes] = set()

        def on_new_request(self, context: Any) -> Any:
            self._asked, self._held = [], set()
            return super().on_new_request(context)

        def lookup(self, key: Any, context: Any) -> Any:
            if key in self._held:
                return self._is_hit
            if not self._asked:
                self._asked = list(key_positions(context))
                body = b"".join(self._asked)
                echo.near.sendall(len(body).to_bytes(4, "little") + ANSWER_BYTES.to_bytes(4, "little") + body)
            return self._is_retry

        def get_finished_jobs(self) -> list[Any]:
            if self._asked and not self._held and echo.is_answered():
                echo.near.recv(ANSWER_BYTES)
                self._held = set(self._asked)
            finished: list[Any] = super().get_finished_jobs()
            return finished

    return Asking()


def manager_ms(keys: list[bytes]) -> float:
    """Milliseconds of the scheduler's thread that vLLM's manager takes for such a prompt, with a tier of nothing.

    In its second step the prompt is on its way to vLLM's rows.
    """
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
    from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

    region = SharedOffloadRegion(uuid.uuid4().hex, len(keys), None, SMALL_BYTES, SMALL_BYTES)
    manager = TieringOffloadingManager(CPUPrimaryTierOffloadingManager(len(keys), region), [nothing()])
    context = ReqContext(uuid.uuid4().hex)
    started_s = time.perf_counter()
    manager.on_new_request(context)
    answers: list[Any] = []
    for _ in range(2):
        answers = [manager.lookup(key, context) for key in keys]
        manager.on_schedule_end(ScheduleEndContext((), ()))
    manager.on_request_finished(context)
    taken_s = time.perf_counter() - started_s
    assert LookupResult.MISS not in answers
    manager.shutdown()
    region.cleanup()
    return taken_s * 1e3


class Ours(Driver):
    """Our tier and its server."""

    def settle(self) -> None:
        while figures(self.root)["pending_writes"]:
            time.sleep(POLL_S)

    def forget(self) -> None:
        link = ServerLink.of_directory(self.root)
        assert link is not None, "the server has gone"
        with link:
            link.evict("host", b"", None, holes=True)
        super().forget()

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{server_pid(self.root)}/stat").read_text().rpartition(")")[2].split()
        return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def drivers(region: Region, folder: Path, total_bytes: int) -> Iterator[Driver]:
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

    from tiered_kv.vllm.identity.rows import RowIdentity
    from tiered_kv.vllm.offloading import TieredKVTier
    from tiered_kv.vllm.row_memory import NotShared, shared_region

    def _not_shared(_rows: object) -> int:
        raise NotShared("the benchmark says so")

    given = {"offloading_spec": region.spec, "primary_kv_view": region.view}
    for name, host_bytes in (("ours", 64 << 20), ("slots", total_bytes * 5 // 4)):
        tier = TieredKVTier(
            **given,
            tier_type=name,
            storage_uri=f"file://{folder / name}",
            host_bytes=max(host_bytes, 8 * region.rows.shape[1], 512 << 20 if name == "slots" else 0),
            disk_bytes=16 << 30,
            promotion_wait_ms=60_000,
            strict=True,
        )
        with patch("tiered_kv.vllm.row_jobs.shared_region", shared_region if name == "ours" else _not_shared):
            tier.begin([RowIdentity(namespace_fields(), "tiered_kv/0 vllm_rows/0 -")], f"bench-{name}")
        yield Ours(name, tier, folder / name)
    yield Driver("fs", FileSystemTierManager(**given, tier_type="fs", root_dir=str(folder / "fs")), folder / "fs")


def measure(driver: Driver, region: Region, keys: list[bytes], source: Any) -> dict[str, float]:
    """One repetition of one tier: seconds, and CPU seconds."""
    region.rows[: len(keys)] = source
    context = driver.request(keys)
    cpu_s, started_s = driver.cpu_s(), time.perf_counter()
    store_s = driver.run(keys, context, is_load=False)
    driver.settle()
    disk_s, store_cpu_s = time.perf_counter() - started_s, driver.cpu_s() - cpu_s
    driver.tier.on_request_finished(context)
    driver.forget()
    region.rows[:] = 0
    context = driver.request(keys)
    driver.look_up(keys, context)
    cpu_s = driver.cpu_s()
    load_s = driver.run(keys, context, is_load=True)
    load_cpu_s = driver.cpu_s() - cpu_s
    driver.tier.on_request_finished(context)
    assert np.array_equal(region.rows[: len(keys)], source), f"{driver.name}: other bytes came back"
    return {"store": store_s, "disk": disk_s, "load": load_s, "store_cpu": store_cpu_s, "load_cpu": load_cpu_s}


def prompt_ms(driver: Driver, keys: list[bytes]) -> float:
    """Milliseconds on the scheduler's thread for a prompt of 128k tokens, all found; stores it first."""
    known = driver.request(keys)
    driver.run(keys, known, is_load=False)
    driver.settle()
    driver.tier.on_request_finished(known)
    driver.thread_s = 0.0
    context = driver.request(keys)
    driver.look_up(keys, context)
    driver.timed(driver.tier.on_request_finished, context)
    return driver.thread_s * 1e3


def run(mib: int, total_mib: int, repeats: int, folder: Path) -> list[dict[str, Any]]:
    """Rows of the table for one size."""
    row_bytes = mib << 20
    count = max(total_mib // mib, 1)
    region = Region(row_bytes, 2 * count)  # hits of ours take half of the rows
    source = np.frombuffer(os.urandom(row_bytes), np.uint8)[None].repeat(count, 0).copy()
    source[:, :8] = np.arange(count, dtype=np.uint64)[:, None].view(np.uint8)
    all_drivers = list(drivers(region, folder, total_mib << 20))
    taken: dict[str, list[dict[str, float]]] = {one.name: [] for one in all_drivers}
    for repeat in range(repeats + 1):
        turn = all_drivers if repeat % 2 else all_drivers[::-1]
        for driver in turn:
            keys = [os.urandom(32) + bytes(4) for _ in range(count)]
            taken[driver.name].append(measure(driver, region, keys, source))
    rows = []
    for driver in all_drivers:
        kept = taken[driver.name][1:]
        size_gb = count * row_bytes / 1e9
        row: dict[str, Any] = {"mib": mib, "tier": driver.name}
        for name in ("store", "disk", "load"):
            rates = sorted(size_gb / one[name] for one in kept)
            row[name], row[f"{name}_range"] = statistics.median(rates), [rates[0], rates[-1]]
        for name in ("store_cpu", "load_cpu"):
            row[name] = statistics.median(one[name] / size_gb for one in kept)
        rows.append(row)
    _time_threads(all_drivers, rows, region)
    for driver in all_drivers:
        driver.tier.shutdown()
    region.close()
    return rows


def _time_threads(all_drivers: list[Driver], rows: list[dict[str, Any]], region: Region) -> None:
    """Add the time of long prompts, where the region has rows for two."""
    if len(region.rows) < 2 * PROMPT_ROWS:
        return
    for driver, row in zip(all_drivers, rows, strict=True):
        times = []
        for _ in range(5):
            keys = [os.urandom(32) + bytes(4) for _ in range(PROMPT_ROWS)]
            times.append(prompt_ms(driver, keys))
        row["thread_ms"] = statistics.median(times)


def lookups(prompts: int, folder: Path) -> list[dict[str, Any]]:
    """Rows of the table for lookups alone; on a machine that others use the least says most."""
    region = Region(SMALL_BYTES, 2 * PROMPT_ROWS)
    all_drivers = list(drivers(region, folder, 2 * PROMPT_ROWS * SMALL_BYTES))
    echo = Echo()
    all_drivers += [Driver("asking", asking(echo), folder), Driver("nothing", nothing(), folder)]
    times: dict[str, list[float]] = {one.name: [] for one in all_drivers}
    times["vLLM's manager"] = []
    for _ in range(prompts):
        keys = [os.urandom(32) + bytes(4) for _ in range(PROMPT_ROWS)]
        for driver in all_drivers:
            times[driver.name].append(prompt_ms(driver, keys))
        times["vLLM's manager"].append(manager_ms(keys))
    for driver in all_drivers:
        driver.tier.shutdown()
    echo.close()
    region.close()
    return [
        {"tier": name, "thread_ms": statistics.median(of_tier), "thread_least_ms": min(of_tier)}
        for name, of_tier in times.items()
    ]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--mib", default="1,32", help="sizes of a row")
    parser.add_argument("--total-mib", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lookups", type=int, default=0, metavar="N", help="only lookups, of so many prompts")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if arguments.lookups:
        with tempfile.TemporaryDirectory(prefix="tiered_kv_bench") as folder:
            rows += lookups(arguments.lookups, Path(folder))
    for mib in [] if arguments.lookups else map(int, arguments.mib.split(",")):
        with tempfile.TemporaryDirectory(prefix="tiered_kv_bench") as folder:
            rows += run(mib, arguments.total_mib, arguments.repeats, Path(folder))
    print("\n".join(report.table(rows, COLUMNS)))
    report.finish("offloading", rows, report.machine("offloading"), is_kept=arguments.keep)


if __name__ == "__main__":
    main()
