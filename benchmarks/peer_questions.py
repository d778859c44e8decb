"""What it takes to ask peers whether they have a chunk, by how many are named: they are asked one after the other.

    python benchmarks/peer_questions.py [--peers N ...] [--questions N] [--keep]

A real door over TLS on loopback, named so many times, as if each name were another machine: of one question a door at
a time answers anyway. One thread asks, or seven, as a search's round does. Milliseconds per question that nobody can
answer; to each peer of a real fleet add the round trip of the network. ``CPU`` is the asking process's, per question.
"""

import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench_report import REPOSITORY, finish, machine, parser, table

import sys  # isort: skip

sys.path[:0] = [str(REPOSITORY)]

from tests.kit.storage.disk_probe import open_disk  # noqa: E402
from tiered_kv.config import Config  # noqa: E402
from tiered_kv.server.door import DoorProcess  # noqa: E402
from tiered_kv.testing.blobs import SampleChain  # noqa: E402
from tiered_kv.tiering.prefix_search import PROBES_AT_ONCE  # noqa: E402
from tiered_kv.tiers.peers.fleet_key import FleetKey  # noqa: E402
from tiered_kv.tiers.peers.found import PeerFinder  # noqa: E402
from tiered_kv.tiers.peers.peer import Peer  # noqa: E402
from tiered_kv.tiers.peers.tier import PeersTier  # noqa: E402

COLUMNS = {
    "peers": "peers",
    "threads": "threads",
    "median_ms": "median ms",
    "longest_ms": "longest",
    "cpu_ms": "CPU ms",
}


def measure(url: str, key: FleetKey, peers: int, threads: int, questions: int) -> dict[str, Any]:
    """One row: so many questions by each thread."""
    chain, context = SampleChain(payload_bytes=1 << 16), key.client_context()
    tier = PeersTier(
        PeerFinder([f"https://peer-{number}:1" for number in range(peers)], None),
        lambda _: Peer(url, key, context, time.monotonic),  # one door is all of them
        {chain.namespace: chain.form}.get,
        timeout_s=5.0,
        io_concurrency=threads,
    )

    def ask(number: int) -> list[float]:
        taken = []
        for index in range(questions):
            begun_s = time.perf_counter()
            if tier.contains(chain.name(1 + (number * questions + index) % 1000)):
                raise RuntimeError("the door has a blob that was never stored")
            taken.append(1e3 * (time.perf_counter() - begun_s))
        return taken

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: tier.contains(chain.name(1)), range(4 * threads)))  # connects
        cpu_s = time.process_time()
        taken = [value for some in pool.map(ask, range(threads)) for value in some]
        cpu_s = time.process_time() - cpu_s
    tier.close()
    return {
        "peers": peers,
        "threads": threads,
        "median_ms": round(statistics.median(taken), 2),
        "longest_ms": round(max(taken), 2),
        "cpu_ms": round(1e3 * cpu_s / len(taken), 2),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--peers", type=int, nargs="+", default=[1, 4, 16])
    options.add_argument("--questions", type=int, default=30, help="of each thread")
    given = options.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="tkv-") as work:
        root, file = Path(work) / "disk", Path(work) / "key"
        file.touch(0o600)
        file.write_text(os.urandom(32).hex())
        disk = open_disk(root)
        blob = SampleChain(payload_bytes=1 << 16).blob(0)
        disk.put(blob.name, blob.view())
        disk.close()
        settings = {"storage_uri": f"file://{root}", "peer_listen": "127.0.0.1:0", "peer_key_file": str(file)}
        door = DoorProcess(Config.from_mapping(settings))
        try:
            print("\n".join(table([], COLUMNS)), flush=True)
            for peers in given.peers:
                for threads in (1, PROBES_AT_ONCE):
                    url = f"https://127.0.0.1:{door.port}"
                    rows.append(measure(url, FleetKey.read(file), peers, threads, given.questions))
                    print(table([rows[-1]], COLUMNS)[-1], flush=True)
        finally:
            door.close()
    finish("peer_questions", rows, machine("peer_questions"), is_kept=given.keep)


if __name__ == "__main__":
    main()
