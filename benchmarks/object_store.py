"""Blobs to and from an object store: the tier as production stacks it, against what it could be at best.

    python benchmarks/object_store.py [--runs N] [--mib 16 32] [--in-flight 1 4 16] [--busy] [--only ours http]
    python benchmarks/object_store.py --goals

Starts its own S3 server (scripts/s3-server, bluestore), or uses TIERED_KV_TEST_S3_ENDPOINT with AWS_* and the bucket
TIERED_KV_TEST_S3_BUCKET; deletes what it stores as it goes and needs about 2 GB of disk and 1.5 GB of memory. Prints
a table and writes build/object_store.json. Medians; in every run all contenders take their turn, in changing order,
because the server on the same machine takes most of it. What was got is compared, every byte, except s3fs' (which gives
no memory of ours back).

    ours      VerifiedTier(ObjectTier(ObjectStore)): a get ends with verified bytes in a page-aligned slot, a put starts
              from one and creates conditionally
    store     ObjectStore alone: puts that replace, and nothing verified
    loop      as ours, with the bodies on s3fs' event loop: what ours was, and is where threads cannot honour a setting
    s3fs      the same client settings; pipe_file of bytes that lie ready, cat_file to new bytes, one request each
    obstore   if it is installed (pip install obstore), unsigned payload: put from the slot, get copied into it
    crt       if it is installed (pip install awscrt): the library below LMCache's S3 tier, one request per blob
    lmcache   LMCache's own S3 adapter, in a process of its environment (scripts/rivals makes that), with 4 threads
    http      http.client on presigned URLs, no checks: what the server and the network give
    memcpy    slot to slot, one thread

With --busy a thread computes in pure Python all the while, as a scheduler does; CPU figures then mean nothing.

With --goals ours, lmcache and http take their turns, idle and beside a busy thread, and a second table says for 16 and
32 MiB what was wanted and what was reached. About 4 minutes on 2 cores.
"""

import argparse
import http.client
import io
import json
import mmap
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch
from urllib.parse import urlsplit

import bench_report

from tiered_kv.chunks.geometry import ChunkGeometry, LayerPage
from tiered_kv.chunks.header import BlobFormat
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.naming import BlobName
from tiered_kv.location import Location, parse_location
from tiered_kv.tiers.object.loop_bodies import LoopBodies
from tiered_kv.tiers.object.s3 import s3_options
from tiered_kv.tiers.object.store import ObjectStore
from tiered_kv.tiers.object.tier import ObjectTier
from tiered_kv.tiers.wrappers.verified import VerifiedTier

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "scripts"))

from s3_service import REGION, Bucket, open_bucket  # noqa: E402  # shared with tests and demo

OWN_SERVER = ("--store=bluestore", "--size-gib=12")
NAMESPACE = bytes(16)
PREFIX = f"benchmark-{os.getpid()}"
"""Of everything that this run stores in the bucket."""

WAYS = ("ours", "store", "loop", "s3fs", "obstore", "crt", "lmcache", "http")
GOAL_WAYS = ("ours", "lmcache", "http")
TOTAL_MIB = 256
CPU_S_PER_GB_MAX = {"get": 0.45, "put": 0.30}
HTTP_SHARE_LEAST = 0.95
LMCACHE_SHARE_LEAST = 1.0
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Blobs:
    """Sealed blobs in page-aligned slots, their names, and a slot per blob to get them back into."""

    form: BlobFormat
    names: list[BlobName]
    slots: list[memoryview]
    targets: list[memoryview]


class UnfitError(Exception):
    """A contender cannot take part; the message says why."""


class Contender(Protocol):
    """One way to move blobs."""

    def timed(self, what: str, in_flight: int, *, is_busy: bool) -> dict[str, float]:
        """Put or get them all: ``gb_per_s`` and ``cpu_s_per_gb``."""

    def close(self) -> None: ...


class Threaded:
    """A way that moves one blob in the calling thread; ``index`` says which, any thread may ask for any."""

    blobs: Blobs
    gives_targets = True
    """What is got lies in the blobs' targets."""

    def put(self, index: int) -> None:
        raise NotImplementedError

    def get(self, index: int) -> None:
        raise NotImplementedError

    def timed(self, what: str, in_flight: int, *, is_busy: bool) -> dict[str, float]:
        size, count, is_checked = (
            self.blobs.form.blob_bytes,
            len(self.blobs.slots),
            what == "get" and self.gives_targets,
        )
        if is_checked:
            for target in self.blobs.targets:
                target[:] = bytes(len(target))
        with busy(is_busy):
            figures = timed(getattr(self, what), count, in_flight, size)
        pairs = zip(self.blobs.targets, self.blobs.slots, strict=True)
        if is_checked and any(bytes(target) != bytes(slot) for target, slot in pairs):  # memoryviews compare slowly
            raise RuntimeError(f"other bytes came back. way={type(self).__name__}")
        return figures


class LMCache:
    """LMCache's client in its own process; its blobs are its own, of the same size."""

    def __init__(self, bucket: Bucket, blobs: Blobs) -> None:
        from host_bucket import lmcache_adapter, open_host_bucket
        from lmcache_client import LMCacheClient
        from rival_systems import LMCACHE_PYTHON

        if not LMCACHE_PYTHON.exists():
            raise UnfitError("it is not installed. do: scripts/rivals")
        if bucket.directory is None:
            raise UnfitError("it needs a server of this repository. do: unset TIERED_KV_TEST_S3_ENDPOINT")
        self.bucket = open_host_bucket(bucket)
        self.place = tempfile.TemporaryDirectory(prefix="tkv-")
        self.log = Path(self.place.name) / "lmcache.log"
        adapter, size = lmcache_adapter(self.bucket), blobs.form.blob_bytes
        with self.telling():
            self.client = LMCacheClient(self.log, adapter, f"{PREFIX}/lmcache", size, len(blobs.slots))

    def timed(self, what: str, in_flight: int, *, is_busy: bool) -> dict[str, float]:
        with self.telling():
            return self.client.timed(what, in_flight, is_busy=is_busy)

    def close(self) -> None:
        self.client.close()
        self.place.cleanup()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Show the log of a process that ended by itself."""
        try:
            yield
        except RuntimeError:
            sys.stderr.write(self.log.read_text()[-3000:])
            raise


class Ours(Threaded):
    def __init__(self, location: Location, blobs: Blobs, in_flight: int) -> None:
        store = ObjectStore(location, timeout_s=TIMEOUT_S, concurrency=in_flight)
        self.tier = VerifiedTier(ObjectTier(store), lambda _: blobs.form)
        self.blobs = blobs

    def put(self, index: int) -> None:
        self.tier.put(self.blobs.names[index], self.blobs.slots[index])

    def get(self, index: int) -> None:
        if not self.tier.get_into(self.blobs.names[index], self.blobs.targets[index]):
            raise RuntimeError(f"a blob that was put is not there. index={index}")

    def close(self) -> None:
        self.tier.close()


class Loop(Ours):
    def __init__(self, location: Location, blobs: Blobs, in_flight: int) -> None:
        super().__init__(location, blobs, in_flight)
        with patch("tiered_kv.tiers.object.s3._open_bodies", LoopBodies):
            self.put(0)  # the way of bodies is chosen with the first one


class Store(Threaded):
    def __init__(self, location: Location, blobs: Blobs, in_flight: int) -> None:
        self.store = ObjectStore(location, timeout_s=TIMEOUT_S, concurrency=in_flight)
        self.blobs = blobs

    def put(self, index: int) -> None:
        self.store.put(f"store/{index}", self.blobs.slots[index])

    def get(self, index: int) -> None:
        self.store.get_into(f"store/{index}", self.blobs.targets[index])

    def close(self) -> None:
        self.store.close()


class Crt(Threaded):
    def __init__(self, bucket: Bucket, location: Location, blobs: Blobs) -> None:
        from awscrt import auth, s3

        keys = auth.AwsCredentialsProvider.new_static(bucket.credentials.access_key, bucket.credentials.secret_key)
        signing = s3.create_default_s3_signing_config(region=REGION, credential_provider=keys)
        self.client: Any = s3.S3Client(
            region=REGION,
            tls_mode=s3.S3RequestTlsMode.DISABLED,
            signing_config=signing,
            part_size=64 << 20,  # one request per blob, as everybody else here
            multipart_upload_threshold=1 << 30,
        )
        self.host = urlsplit(bucket.endpoint_url).netloc
        self.path = f"/{location.path}/crt"
        self.blobs = blobs

    def put(self, index: int) -> None:
        from awscrt.s3 import S3RequestType

        slot = self.blobs.slots[index]
        self.ask("PUT", S3RequestType.PUT_OBJECT, index, [("Content-Length", str(len(slot)))], io.BytesIO(slot))

    def get(self, index: int) -> None:
        from awscrt.s3 import S3RequestType

        target = self.blobs.targets[index]

        def take(chunk: bytes, offset: int, **_: object) -> None:
            target[offset : offset + len(chunk)] = chunk

        self.ask("GET", S3RequestType.GET_OBJECT, index, [], None, on_body=take)

    def ask(self, method: str, kind: object, index: int, headers: list[Any], body: Any, **more: object) -> None:
        from awscrt.http import HttpHeaders, HttpRequest

        head = HttpHeaders([("Host", self.host), *headers])
        request = HttpRequest(method, f"{self.path}/{index}", head, body_stream=body)
        self.client.make_request(type=kind, request=request, **more).finished_future.result(TIMEOUT_S)

    def close(self) -> None:
        """Its connections go with the object."""


class S3fs(Threaded):
    gives_targets = False

    def __init__(self, location: Location, blobs: Blobs, in_flight: int) -> None:
        import s3fs

        options = s3_options(location, TIMEOUT_S, in_flight) | {"asynchronous": False}
        self.filesystem: Any = s3fs.S3FileSystem(**options)
        self.root = location.path
        self.blobs = blobs
        self.size = len(blobs.slots[0])
        self.ready = [bytes(slot) for slot in blobs.slots]

    def put(self, index: int) -> None:
        self.filesystem.pipe_file(f"{self.root}/s3fs/{index}", self.ready[index])

    def get(self, index: int) -> None:
        data = self.filesystem.cat_file(f"{self.root}/s3fs/{index}", start=0, end=self.size)
        if len(data) != self.size:
            raise RuntimeError(f"short answer. observed={len(data)} expected={self.size}")

    def close(self) -> None:
        """fsspec closes its connections with the object."""


class Obstore(Threaded):
    def __init__(self, bucket: Bucket, location: Location, blobs: Blobs) -> None:
        from obstore.store import S3Store

        self.store: Any = S3Store(
            bucket.name,
            prefix=location.path.partition("/")[2] + "/obstore",
            endpoint=bucket.endpoint_url,
            access_key_id=bucket.credentials.access_key,
            secret_access_key=bucket.credentials.secret_key,
            region=REGION,
            virtual_hosted_style_request=False,
            unsigned_payload=True,
            client_options={"allow_http": True, "timeout": f"{TIMEOUT_S:.0f}s"},
        )
        self.blobs = blobs

    def put(self, index: int) -> None:
        self.store.put(str(index), self.blobs.slots[index], use_multipart=False)

    def get(self, index: int) -> None:
        self.blobs.targets[index][:] = memoryview(self.store.get(str(index)).bytes()).cast("B")

    def close(self) -> None:
        """Its connections go with the object."""


class Http(Threaded):
    def __init__(self, bucket: Bucket, location: Location, blobs: Blobs) -> None:
        self.blobs = blobs
        self.connections = threading.local()
        self.address = urlsplit(bucket.endpoint_url).netloc
        prefix = location.path.partition("/")[2]
        self.urls: dict[str, list[str]] = {}
        with bucket.client(signature_version="s3v4") as signer:
            for method in ("put_object", "get_object"):
                self.urls[method] = [
                    signer.generate_presigned_url(
                        method, {"Bucket": bucket.name, "Key": f"{prefix}/http/{index}"}
                    ).partition(self.address)[2]
                    for index in range(len(blobs.slots))
                ]

    def put(self, index: int) -> None:
        self.ask("PUT", self.urls["put_object"][index], self.blobs.slots[index]).read()

    def get(self, index: int) -> None:
        answer, target, offset = self.ask("GET", self.urls["get_object"][index], None), self.blobs.targets[index], 0
        while offset < len(target):
            count = answer.readinto(target[offset:])
            if count == 0:
                raise RuntimeError(f"short answer. observed={offset} expected={len(target)}")
            offset += count
        answer.read()

    def ask(self, method: str, url: str, body: memoryview | None) -> http.client.HTTPResponse:
        if not hasattr(self.connections, "own"):
            self.connections.own = http.client.HTTPConnection(self.address, timeout=TIMEOUT_S, blocksize=1 << 20)
        self.connections.own.request(method, url, body=body, headers={"Content-Length": str(len(body or b""))})
        answer: http.client.HTTPResponse = self.connections.own.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"unexpected status. status={answer.status} text={answer.read(500)!r}")
        return answer

    def close(self) -> None:
        """Connections go with the threads."""


def aligned(size: int) -> memoryview:
    """A page-aligned buffer whose pages were touched, as a slot of the arena is."""
    buffer = mmap.mmap(-1, size)
    buffer.write(bytes(size))
    return memoryview(buffer)


def make_blobs(mib: int, count: int) -> Blobs:
    """Sealed blobs of ``mib`` MiB and a header, different in name and content."""
    layers = [LayerPage(str(layer), "U8", (1, 16, mib << 11), "HNC") for layer in range(32)]
    form = BlobFormat(NAMESPACE, ChunkGeometry(block_tokens=16, chunk_tokens=16, ranks=(tuple(layers),)))
    content = os.urandom(form.payload_bytes)
    names, slots = [], []
    for index in range(count):
        key = bytes([index % 256]) + index.to_bytes(15, "big")
        slot = aligned(form.blob_bytes)
        slot[form.header_bytes :] = content
        slot[form.header_bytes : form.header_bytes + 16] = key
        form.seal(slot, ChunkRecord(NAMESPACE, key, NAMESPACE, 0, bytes(32)), 0)
        names.append(BlobName(NAMESPACE, key, NAMESPACE, 0))
        slots.append(slot)
    return Blobs(form, names, slots, [aligned(form.blob_bytes) for _ in range(count)])


def timed(work: Callable[[int], None], count: int, in_flight: int, size: int) -> dict[str, float]:
    """Do ``work`` for every index, shared out between threads."""
    failures: list[BaseException] = []

    def run(first: int) -> None:
        try:
            for index in range(first, count, in_flight):
                work(index)
        except BaseException as exc:
            failures.append(exc)
            raise

    workers = [threading.Thread(target=run, args=(number,)) for number in range(in_flight)]
    cpu, start = cpu_seconds(), time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    elapsed, used, gigabytes = time.perf_counter() - start, cpu_seconds() - cpu, size * count / 1e9
    if failures:
        raise failures[0]
    return {"gb_per_s": gigabytes / elapsed, "cpu_s_per_gb": used / gigabytes}


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def busy(is_wanted: bool) -> Iterator[None]:
    """A thread that computes for as long as the block."""
    is_over = threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    if is_wanted:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if is_wanted:
            thread.join()


def make_contenders(bucket: Bucket, blobs: Blobs, in_flight: int, only: list[str]) -> dict[str, Contender]:
    """Those that were asked for; none named: all that can take part."""
    options = {"region": REGION, **bucket.credentials.options()}
    location = parse_location(bucket.uri(PREFIX), options)
    makers: dict[str, Callable[[], Contender]] = {
        "ours": lambda: Ours(location, blobs, in_flight),
        "store": lambda: Store(location, blobs, in_flight),
        "loop": lambda: Loop(location, blobs, in_flight),
        "s3fs": lambda: S3fs(location, blobs, in_flight),
        "http": lambda: Http(bucket, location, blobs),
        "obstore": lambda: Obstore(bucket, location, blobs),
        "crt": lambda: Crt(bucket, location, blobs),
        "lmcache": lambda: LMCache(bucket, blobs),
    }
    contenders = {}
    for name in only or makers:
        try:
            contenders[name] = makers[name]()
        except (ImportError, UnfitError) as exc:
            if only:
                raise
            print(f"{name} is left out: {exc}", file=sys.stderr)
    return contenders


def measure(bucket: Bucket, mib: int, in_flight: int, options: argparse.Namespace, report: Callable[..., None]) -> None:
    """All contenders for one size and number in flight, in every run."""
    blobs = make_blobs(mib, max(TOTAL_MIB // mib, in_flight))
    contenders = make_contenders(bucket, blobs, in_flight, options.only)
    size, count = blobs.form.blob_bytes, len(blobs.slots)
    buckets = [bucket, *(one.bucket for one in contenders.values() if isinstance(one, LMCache))]
    for contender in contenders.values():  # connections, signers and the atomic-create probe are made once
        for what in ("put", "get"):
            contender.timed(what, in_flight, is_busy=False)
    empty(buckets)
    for run in range(options.runs):
        names = sorted(contenders)
        for name in names[run % len(names) :] + names[: run % len(names)]:
            for is_busy in options.busy:
                for what in ("put", "get"):
                    report(
                        mib,
                        in_flight,
                        run,
                        name,
                        what,
                        is_busy,
                        contenders[name].timed(what, in_flight, is_busy=is_busy),
                    )
                empty(buckets)
        report(mib, in_flight, run, "memcpy", "get", False, timed(lambda i: copy(blobs, i), count, 1, size))
    for contender in contenders.values():
        contender.close()


def empty(buckets: list[Bucket]) -> None:
    for bucket in buckets:
        bucket.empty(PREFIX)


def copy(blobs: Blobs, index: int) -> None:
    blobs.targets[index][:] = blobs.slots[index]


def table(results: list[dict[str, Any]]) -> list[str]:
    """One line per cell: medians of GB/s and CPU-s/GB, and the median of ours and store to http run by run."""
    ways = [name for name in (*WAYS, "memcpy") if any(r["way"] == name for r in results)]
    lines = ["| MiB | in flight | | " + " | ".join(ways) + " | ours, store / http |", "|---" * (len(ways) + 4) + "|"]
    for mib, in_flight, what in sorted({(r["mib"], r["in_flight"], r["what"]) for r in results}):
        cell = [r for r in results if (r["mib"], r["in_flight"], r["what"]) == (mib, in_flight, what)]
        shown = []
        for way in ways:
            own = [r for r in cell if r["way"] == way]
            figures = [statistics.median(r[key] for r in own) for key in ("gb_per_s", "cpu_s_per_gb")] if own else []
            shown.append(f"{figures[0]:.2f}, {figures[1]:.2f}" if figures else "-")
        speeds = {(r["way"], r["run"]): r["gb_per_s"] for r in cell}
        ratios = ", ".join(ratio(speeds, way) for way in ("ours", "store"))
        lines.append(f"| {mib} | {in_flight} | {what} | " + " | ".join(shown) + f" | {ratios} |")
    return lines


def ratio(speeds: dict[tuple[str, int], float], way: str, other: str = "http") -> str:
    """The median of a way's speed to another's, run by run."""
    runs = {run for name, run in speeds if name == way} & {run for name, run in speeds if name == other}
    return f"{statistics.median(speeds[way, run] / speeds[other, run] for run in runs):.2f}" if runs else "-"


def goals(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was wanted and what was reached, cell by cell: medians, of ratios run by run."""
    rows: list[dict[str, Any]] = []
    for mib, in_flight, what, is_busy in sorted({(r["mib"], r["in_flight"], r["what"], r["busy"]) for r in results}):
        cell = [
            r for r in results if (r["mib"], r["in_flight"], r["what"], r["busy"]) == (mib, in_flight, what, is_busy)
        ]
        ours = [r["cpu_s_per_gb"] for r in cell if r["way"] == "ours"]
        if not ours:
            continue  # memcpy alone
        about = {"mib": mib, "in_flight": in_flight, "what": what, "busy": is_busy}
        speeds = {(r["way"], r["run"]): r["gb_per_s"] for r in cell}
        for other, least in (("lmcache", LMCACHE_SHARE_LEAST), ("http", HTTP_SHARE_LEAST)):
            reached = ratio(speeds, "ours", other)
            if reached != "-":
                row = {"goal": f"of {other}'s GB/s", "wanted": f">= {least:g}", "reached": float(reached)}
                rows.append({**about, **row, "is_met": float(reached) >= least})
        if not is_busy:
            reached_s, most = round(statistics.median(ours), 2), CPU_S_PER_GB_MAX[what]
            row = {"goal": "CPU-s/GB", "wanted": f"<= {most:g}", "reached": reached_s, "is_met": reached_s <= most}
            rows.append({**about, **row})
    return rows


def goal_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| MiB | in flight | | beside | goal | wanted | reached | |", "|---" * 8 + "|"]
    for row in rows:
        beside, met = "a busy thread" if row["busy"] else "nothing", "met" if row["is_met"] else "**missed**"
        cells = (row["mib"], row["in_flight"], row["what"], beside, row["goal"], row["wanted"], row["reached"], met)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def machine(bucket: Bucket) -> dict[str, object]:
    disk = subprocess.run(
        ["findmnt", "--noheadings", "--output", "SOURCE,FSTYPE", "--target", str(REPOSITORY)],
        capture_output=True,
        text=True,
        check=False,
    )
    return bench_report.machine("object_store", disk=" ".join(disk.stdout.split()), server=bucket.server)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, help="default: 5, with --goals 3")
    parser.add_argument("--mib", type=int, nargs="+", help="default: 4 16 32, with --goals 16 32")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--busy", action="store_true", help="beside a thread that computes in pure Python")
    parser.add_argument("--only", nargs="+", default=[], choices=WAYS)
    parser.add_argument("--goals", action="store_true", help="ours, lmcache and http, idle and busy, against the goals")
    options = parser.parse_args()
    if options.goals and (options.busy or options.only):
        parser.error("--goals chooses who takes part and what beside: leave out --busy and --only")
    options.runs = options.runs or (3 if options.goals else 5)
    options.mib = options.mib or ([16, 32] if options.goals else [4, 16, 32])
    options.only = list(GOAL_WAYS) if options.goals else options.only
    options.busy = [False, True] if options.goals else [options.busy]
    results: list[dict[str, Any]] = []

    def report(
        mib: int, in_flight: int, run: int, way: str, what: str, is_busy: bool, figures: dict[str, float]
    ) -> None:
        about = {"mib": mib, "in_flight": in_flight, "run": run, "way": way, "what": what, "busy": is_busy}
        results.append({**about, **figures})
        shown = f"{figures['gb_per_s']:6.2f} GB/s {figures['cpu_s_per_gb']:6.2f} CPU-s/GB{' busy' if is_busy else ''}"
        print(f"{mib:3} MiB {in_flight:2} in flight  run {run}  {way:8} {what}  {shown}", flush=True)

    with open_bucket("bench", PREFIX, own_options=OWN_SERVER) as bucket:
        for mib in options.mib:
            for in_flight in options.in_flight:
                measure(bucket, mib, in_flight, options, report)
        facts = machine(bucket)
    for is_busy in options.busy:
        beside = " beside a busy thread" if is_busy else ""
        print(f"\nGB/s and CPU-s per GB of the client{beside}, medians:\n")
        print("\n".join(table([r for r in results if r["busy"] == is_busy])))
    reached = goals(results) if options.goals else []
    if reached:
        print("\n" + "\n".join(goal_table(reached)))
    target = REPOSITORY / "build" / "object_store.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({"machine": facts, "results": results, "goals": reached}, indent=1) + "\n")
    print(json.dumps({"machine": facts, "goals": reached, "file": str(target.relative_to(REPOSITORY))}))


if __name__ == "__main__":
    main()
