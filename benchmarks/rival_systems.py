"""The systems that ``rivals.py`` compares: how each is started, emptied and waited for. Not a benchmark by itself.

plain     vLLM alone
ours      TieredKVConnector over host memory and disk
lmcache   LMCacheMPConnector and its server, over host memory and ``fs_native`` (an environment of its own)
native    vLLM's OffloadingConnector: its host memory and ``fs`` tiers, with a thread of ours in place of the
          GPU's copies (``tests/kit/vllm/host_offloading.py``): vLLM itself refuses the CPU build
example   vLLM's ExampleConnector: a file per layer; its "memory" is the page cache

With ``Setup.buckets`` ours and lmcache have a bucket each, of one gateway, in place of disk.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

from end_to_end import evict  # noqa: E402  # beside this script
from host_bucket import lmcache_adapter, object_sizes, open_host_bucket  # noqa: E402
from processes import tree  # noqa: E402
from s3_service import REGION, Bucket  # noqa: E402
from serving import ServedEngine, ours  # noqa: E402

from tests.kit.ports import free_port  # noqa: E402
from tests.kit.server.probe import server_pid  # noqa: E402
from tiered_kv.config import Config  # noqa: E402
from tiered_kv.ops.doctor_server import left_regions  # noqa: E402

LMCACHE_PYTHON = REPOSITORY / ".cache" / "lmcache" / "bin" / "python"
LMCACHE_ENGINE = "lmcache engine_driven"
"""A second LMCache beside ``lmcache``, in the transfer mode in which the engine copies."""

QUIET = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}
STILL_S = 1.0
DEADLINE_S = 120.0


Engine = TypeVar("Engine", bound=ServedEngine)


class Start(Protocol[Engine]):  # type: ignore[misc]  # what it gives is all it is variant in
    """Starts an engine for a system: its name, vLLM's ``kv_transfer_config``, options of :class:`ServedEngine`."""

    def __call__(self, name: str, transfer: Mapping[str, Any] | None, **options: Any) -> Engine: ...


@dataclass(frozen=True)
class System(Generic[Engine]):
    """One system under test.

    Attributes:
        folder: Where its files are; None: it has none.
        objects: Sizes of its objects in its bucket, by name; None: it has none.
        empty_memory: Empties its memory tier.
        wait_stored: Waits until what was computed is on disk, or in the bucket.
        helpers: Pids of its processes besides the engine's.
    """

    name: str
    engine: Engine
    folder: Path | None = None
    objects: Callable[[], Mapping[str, int]] | None = None
    empty_memory: Callable[[], object] = lambda: None
    wait_stored: Callable[[], object] = lambda: None
    helpers: Callable[[], Sequence[int]] = tuple

    def processes(self) -> list[int]:
        """Pids of all that it consists of."""
        return [*tree(self.engine.pid), *self.helpers()]


@dataclass(frozen=True, slots=True)
class Setup:
    """How the systems are set up.

    Attributes:
        host_gib: Host memory of each.
        lmcache_mode: LMCache's transfer mode.
        ours: More settings of ours.
        buckets: What stores in place of disk.
    """

    host_gib: float = 1.5
    lmcache_mode: str = "lmcache_driven"
    ours: Mapping[str, Any] = field(default_factory=dict)
    buckets: "Buckets | None" = None


@dataclass(frozen=True, slots=True)
class Buckets:
    """Two on one gateway: ``by_path`` for whoever can name it so, ``by_host`` for LMCache."""

    by_path: Bucket
    by_host: Bucket

    @classmethod
    def on(cls, bucket: Bucket) -> "Buckets":
        return cls(bucket, open_host_bucket(bucket))


def open_system(
    stack: ExitStack,
    work: Path,
    name: str,
    start: Start[Engine],
    setup: Setup = Setup(),
) -> System[Engine]:
    """Start one of the systems; it ends with the stack."""
    folder = work / name
    folder.mkdir()
    if name == "plain":
        return System(name, _started(stack, start(name, None)))
    return _OPEN[name](stack, work, name, start, setup)


def _started(stack: ExitStack, engine: Engine) -> Engine:
    stack.callback(engine.close)
    return engine


def _open_ours(stack: ExitStack, work: Path, name: str, start: Start[Engine], setup: Setup) -> System[Engine]:
    root = work / name / "cache"
    settings: dict[str, Any] = {"host_bytes": f"{setup.host_gib}GiB", "strict": True, **setup.ours}
    objects = None
    if setup.buckets is None:
        settings |= {"storage_uri": root.as_uri(), "disk_bytes": "8GiB"}
    else:
        bucket, prefix = setup.buckets.by_path, f"{name}-{os.getpid()}"
        options = {"region": REGION, **bucket.credentials.options()}
        settings |= {"storage_uri": bucket.uri(prefix), "storage_options": options}
        root = Config(storage_uri=settings["storage_uri"], storage_options=options).server_directory()
        objects = partial(object_sizes, bucket, f"{prefix}/")
    engine = _started(stack, start(name, ours(settings)))
    return System(
        name,
        engine,
        root if objects is None else None,
        objects,
        lambda: evict(root, "host"),
        lambda: until_still(objects or root),  # what vLLM has not handed over yet is in no figure of the server
        lambda: [server_pid(root)],
    )


def _open_lmcache(stack: ExitStack, work: Path, name: str, start: Start[Engine], setup: Setup) -> System[Engine]:
    folder, mode = work / name, setup.lmcache_mode
    objects, adapter = None, {"type": "fs_native", "base_path": str(folder), "num_workers": 4}
    if setup.buckets is not None:
        objects, adapter = partial(object_sizes, setup.buckets.by_host), lmcache_adapter(setup.buckets.by_host)
    server = stack.enter_context(lmcache_server(adapter, work / f"{name}-server.log", mode, setup.host_gib))
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port, "lmcache.mp.mp_transfer_mode": mode}
    transfer = _transfer("LMCacheMPConnector", extra)
    engine = _started(stack, start(name, transfer, python=LMCACHE_PYTHON, environment=QUIET))
    return System(
        name,
        engine,
        folder if objects is None else None,
        objects,
        server.clear,
        lambda: until_still(objects or folder),
        lambda: tree(server.pid),
    )


def _open_native(stack: ExitStack, work: Path, name: str, start: Start[Engine], setup: Setup) -> System[Engine]:
    folder = work / name
    extra = {
        "spec_name": "HostTieringSpec",
        "spec_module_path": "tests.kit.vllm.host_offloading",
        "cpu_bytes_to_use": int(setup.host_gib * 2**30),
        "block_size": 256,
        "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
    }
    here = {"PYTHONPATH": str(REPOSITORY)}
    stack.callback(_remove_left_regions)
    engine = _started(stack, start(name, _transfer("OffloadingConnector", extra), environment=here))
    return System(name, engine, folder, empty_memory=engine.forget_connectors, wait_stored=lambda: until_still(folder))


def _remove_left_regions() -> None:
    """Host memory of engines that ended otherwise than vLLM expects: of two runs nothing is left for a third."""
    for place in left_regions():
        place.unlink()


def _open_example(stack: ExitStack, work: Path, name: str, start: Start[Engine], _: Setup) -> System[Engine]:
    folder = work / name
    engine = _started(stack, start(name, _transfer("ExampleConnector", {"shared_storage_path": str(folder)})))
    return System(name, engine, folder, wait_stored=lambda: until_still(folder))


_OPEN: dict[str, Callable[..., System[Any]]] = {
    "ours": _open_ours,
    "lmcache": _open_lmcache,
    LMCACHE_ENGINE: _open_lmcache,
    "native": _open_native,
    "example": _open_example,
}


def _transfer(connector: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": dict(extra)}


def until_still(place: Path | Callable[[], Mapping[str, int]]) -> None:
    """Wait until nothing was written into a folder, or a bucket, for a while: how one waits for what does not say."""
    deadline_s, before, since_s = time.monotonic() + DEADLINE_S, -1, time.monotonic()
    while time.monotonic() < deadline_s:
        size = sum(sizes(place) if isinstance(place, Path) else place().values())
        if size != before:
            before, since_s = size, time.monotonic()
        elif time.monotonic() - since_s > STILL_S:
            return
        time.sleep(0.05)
    raise TimeoutError(f"never still. place={place}")


def sizes(folder: Path) -> list[int]:
    """Sizes of all files below a folder in which others write meanwhile."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                found.append(path.stat().st_size)
    return found


@dataclass(frozen=True, slots=True)
class LMCacheServer:
    """A running one.

    Attributes:
        port: Where engines reach it.
        http: The port of its HTTP.
    """

    port: int
    http: int
    pid: int

    def clear(self) -> None:
        """Empty its host memory, also of what it counts as being read: nothing is, when a benchmark empties it."""
        address, body = f"http://127.0.0.1:{self.http}/cache/clear", json.dumps({"tier": "l1", "force": True}).encode()
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()


@contextmanager
def lmcache_server(adapter: Mapping[str, object], log: Path, mode: str, host_gib: float) -> Iterator[LMCacheServer]:
    """LMCache's server over host memory and what ``adapter`` says, as long as the ``with`` block."""
    port, http = free_port(), free_port()
    command = [
        *(str(LMCACHE_PYTHON), "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--http-host", "127.0.0.1", "--http-port", str(http), "--chunk-size", "256"),
        *("--l1-size-gb", str(host_gib), "--eviction-policy", "LRU", "--l2-adapter", json.dumps(dict(adapter))),
        *("--supported-transfer-mode", mode),
    ]
    if mode == "engine_driven":  # its best options; shared memory excludes lazy allocation
        command += ["--shm-name", f"lmcache-{port}", "--no-l1-use-lazy"]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | QUIET, start_new_session=True
        )
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"LMCache's server does not answer. code={process.poll()} log={log}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{http}/", timeout=1):
                break
            time.sleep(0.2)
        yield LMCacheServer(port, http, process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for left in Path("/dev/shm").glob(f"*lmcache-{port}"):  # nobody else would: it was killed
            left.unlink()
