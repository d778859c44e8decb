"""What a peer delivers over a link: a prefix of 32k tokens, verified, between two network namespaces.

    python benchmarks/peers.py [--mib SIZES] [--chunks N] [--gbit RATES] [--readers COUNTS] [--turns N]

Needs root, ``ip`` and ``tc``. Two namespaces are joined by a veth pair, whose giving end is limited by ``tc tbf``; rate
0 is without a limit. In one the door gives the files of a disk tier that lie in the page cache, in the other the tier
of peers reads and verifies them, over TLS, by so many threads. ``link`` is the blobs' bits over the link's rate;
``cpu`` and ``door`` are the CPU seconds per GB of the reader and of the door. ``openssl`` is the roofline of one
connection: OpenSSL's own client reads a file from OpenSSL's own server, and looks at nothing. All rows of a link are
measured in each of so many turns: medians, and the least and most of ``link``. Prints a table, then JSON. Everything is
on one machine: both ends share its cores.
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench_report import machine

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY)]

from tests.kit.storage.disk_probe import open_disk  # noqa: E402
from tiered_kv.config import Config  # noqa: E402
from tiered_kv.server.door import DoorProcess  # noqa: E402
from tiered_kv.testing.blobs import SampleChain  # noqa: E402
from tiered_kv.tiers.peers.fleet_key import FleetKey  # noqa: E402
from tiered_kv.tiers.peers.found import PeerFinder  # noqa: E402
from tiered_kv.tiers.peers.peer import Peer  # noqa: E402
from tiered_kv.tiers.peers.tier import PeersTier  # noqa: E402

GIVER, TAKER, PORT, OPENSSL_PORT = "10.213.7.1", "10.213.7.2", 7460, 7461
ROOFLINE_BYTES = 256 << 20
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def run(*command: str) -> None:
    subprocess.run(command, check=True)


@contextmanager
def two_namespaces(gbit: float) -> Iterator[tuple[str, str]]:
    """Their names; what the first sends is limited."""
    names = [f"tkv{os.getpid()}{end}" for end in "ab"]
    with ExitStack() as undo:
        for name in names:
            run("ip", "netns", "add", name)
            undo.callback(run, "ip", "netns", "del", name)
        ends = [f"tkv{end}{os.getpid()}" for end in "ab"]
        run("ip", "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for name, end, address in zip(names, ends, (GIVER, TAKER), strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", end)
            run("ip", "-n", name, "link", "set", end, "up")
        if gbit:
            limit = ("rate", f"{gbit:g}gbit", "burst", "1mb", "latency", "20ms")
            run("tc", "-n", names[0], "qdisc", "add", "dev", ends[0], "root", "tbf", *limit)
        yield names[0], names[1]


def give(directory: Path) -> None:
    """Be the giving machine until standard input ends."""
    given = {"storage_uri": f"file://{directory}/disk", "peer_key_file": f"{directory}/key"}
    door = DoorProcess(Config.from_mapping(given | {"peer_listen": f"{GIVER}:{PORT}"}))
    assert door._process is not None
    print(door._process.pid, flush=True)
    sys.stdin.read()
    door.close()


def take(directory: Path, mib: int, chunks: int, readers: int) -> None:
    """Be the taking machine: read every chunk once and say how long it took."""
    chain, key = SampleChain(payload_bytes=mib << 20), FleetKey.read(directory / "key")
    tier = PeersTier(
        PeerFinder([f"https://{GIVER}:{PORT}"], None),
        lambda url: Peer(url, key, key.client_context(), time.monotonic),
        {chain.namespace: chain.form}.get,
        timeout_s=60.0,
        io_concurrency=readers,
    )
    buffers = [memoryview(bytearray(chain.form.blob_bytes)) for _ in range(readers)]

    def read_some(reader: int) -> None:
        for index in range(reader, chunks, readers):
            assert tier.get_into(chain.name(index), buffers[reader]), f"chunk {index} is not there"

    with ThreadPoolExecutor(readers) as threads:
        list(threads.map(lambda _: tier.contains(chain.name(0)), range(readers)))  # connects
        started_s, cpu_s = time.perf_counter(), time.process_time()
        list(threads.map(read_some, range(readers)))
        seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    tier.close()
    print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "bytes": chunks * chain.form.blob_bytes}))


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def openssl_files(directory: Path, size_bytes: int) -> Path:
    """A folder for OpenSSL's own server: ``file``, of random bytes, with a certificate and its key; made once."""
    files = directory / "openssl"
    if not files.exists():
        files.mkdir()
        (files / "file").write_bytes(os.urandom(size_bytes))
        made = "openssl req -x509 -newkey ed25519 -nodes -days 2 -subj /CN=benchmark -keyout key.pem -out cert.pem"
        subprocess.run(made.split(), cwd=files, check=True, capture_output=True)
    return files


def roofline(directory: Path, giving: str, taking: str) -> tuple[float, float, float]:
    """Seconds in which OpenSSL's client reads ``ROOFLINE_BYTES`` from OpenSSL's server over the same link, and the CPU
    seconds of both."""
    files = openssl_files(directory, ROOFLINE_BYTES)
    inside = ["ip", "netns", "exec"]
    listen = f"openssl s_server -HTTP -accept {GIVER}:{OPENSSL_PORT} -cert cert.pem -key key.pem -tls1_3"
    with subprocess.Popen(
        [*inside, giving, *listen.split()],
        cwd=files,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
    ) as server:
        assert server.stdout is not None
        while "ACCEPT" not in server.stdout.readline():
            assert server.poll() is None, "openssl s_server ended"
        ask = f"openssl s_client -quiet -connect {GIVER}:{OPENSSL_PORT} -tls1_3"
        started_s = time.perf_counter()
        with subprocess.Popen(
            [*inside, taking, *ask.split()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as client:
            assert client.stdin is not None and isinstance(client.stdout, io.BufferedReader)
            client.stdin.write(b"GET /file HTTP/1.0\r\n\r\n")
            client.stdin.flush()
            count = 0
            while count < ROOFLINE_BYTES and (part := client.stdout.read1(1 << 20)):
                count += len(part)
            seconds, taken_s, given_s = time.perf_counter() - started_s, cpu_s(client.pid), cpu_s(server.pid)
            client.kill()
        server.kill()
    assert count >= ROOFLINE_BYTES, f"openssl gave {count} bytes"
    return seconds, taken_s, given_s


def measure(directory: Path, mib: int, chunks: int, gbit: float, readers: list[int]) -> Iterator[dict[str, Any]]:
    """Rows for one size and one link."""
    with two_namespaces(gbit) as (giving, taking):
        seconds, taken_s, given_s = roofline(directory, giving, taking)
        yield row("openssl", mib, gbit, 1, ROOFLINE_BYTES, seconds, taken_s, given_s)
        script = [sys.executable, __file__, "--directory", str(directory)]
        inside = ["ip", "netns", "exec"]
        with subprocess.Popen(
            [*inside, giving, *script, "--give"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as giver:
            assert giver.stdin is not None and giver.stdout is not None
            door = int(giver.stdout.readline())
            for count in readers:
                options = ["--take", "--mib", str(mib), "--chunks", str(chunks), "--readers", str(count)]
                before_s = cpu_s(door)
                said = subprocess.run([*inside, taking, *script, *options], check=True, capture_output=True, text=True)
                told = json.loads(said.stdout)
                cpus = told["cpu_s"], cpu_s(door) - before_s
                yield row("peers", mib, gbit, count, told["bytes"], told["seconds"], *cpus)
            giver.stdin.close()


def row(
    what: str, mib: int, gbit: float, readers: int, size_bytes: int, seconds: float, taken_s: float, given_s: float
) -> dict[str, Any]:
    """One measurement."""
    gb = size_bytes / 1e9
    return {
        "what": what,
        "mib": mib,
        "gbit": gbit,
        "readers": readers,
        "seconds": seconds,
        "gb_per_s": gb / seconds,
        "link": gb * 8 / seconds / gbit if gbit else None,
        "reader_cpu_s_per_gb": taken_s / gb,
        "door_cpu_s_per_gb": given_s / gb,
    }


def medians(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of those of the same measurement; ``links`` has the least and the most."""
    links = [one["link"] for one in turns if one["link"] is not None]
    return {
        name: statistics.median(one[name] for one in turns) if isinstance(value, float) else value
        for name, value in turns[0].items()
    } | {"turns": len(turns), "links": [min(links), max(links)] if links else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--chunks", type=int, default=128, help="of 256 tokens each")
    parser.add_argument("--gbit", type=float, nargs="+", default=[2, 8, 0])
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--give", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--take", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.give:
        give(options.directory)
        return
    if options.take:
        take(options.directory, options.mib[0], options.chunks, options.readers[0])
        return
    if os.geteuid():
        parser.error("namespaces need root")
    rows = []
    print(
        f"{'what':>8} {'MiB':>4} {'Gbit/s':>7} {'readers':>8} {'s':>7} {'GB/s':>6} {'cpu':>6} {'door':>6} "
        f"{'link':>6}  least to most of {options.turns}"
    )
    for mib in options.mib:
        with tempfile.TemporaryDirectory(prefix="tkv-") as name:
            directory = Path(name)
            (directory / "key").touch(0o600)
            (directory / "key").write_text(os.urandom(32).hex())
            chain = SampleChain(payload_bytes=mib << 20)
            disk = open_disk(directory / "disk", 2 * options.chunks * (mib << 20) + (64 << 20))
            for index in range(options.chunks):
                blob = chain.blob(index)
                disk.put(blob.name, blob.view())
            disk.close()
            for path in (directory / "disk").rglob("*.safetensors"):
                path.read_bytes()  # into the page cache: the link is measured, not the disk
            os.sync()  # what is written back meanwhile takes a core's memory and time
            for gbit in options.gbit:
                turns = [
                    list(measure(directory, mib, options.chunks, gbit, options.readers)) for _ in range(options.turns)
                ]
                for one in map(medians, zip(*turns, strict=True)):
                    rows.append(one)
                    link = "{:>6.2f}  {:.2f} to {:.2f}".format(one["link"], *one["links"]) if one["links"] else ""
                    print(
                        f"{one['what']:>8} {mib:>4} {gbit:>7g} {one['readers']:>8} {one['seconds']:>7.2f} "
                        f"{one['gb_per_s']:>6.2f} {one['reader_cpu_s_per_gb']:>6.2f} "
                        f"{one['door_cpu_s_per_gb']:>6.2f} {link}",
                        flush=True,
                    )
    print(json.dumps(machine("peers") | {"rows": rows}))


if __name__ == "__main__":
    main()
