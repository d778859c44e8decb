"""Two servers, as processes, share a limited bucket on a real server; the one that leads is killed."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import pytest

from tests.kit.counts import count
from tests.kit.module_process import module_command, module_environment
from tests.kit.server import bucket_process
from tests.kit.server.bucket_process import NAMESPACE, PACE, Order, chain_of
from tests.kit.stores.session import ATOMIC
from tests.kit.stores.store import S3Objects
from tiered_kv.fleet.layout import Term
from tiered_kv.keys.naming import object_path, parse_object_path
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.tiers.object.shared_directory import TEMPORARY

BLOBS_PER_CHAIN = 40
WAIT_S = 100.0


@dataclass(frozen=True)
class Scale:
    """How much is offered, and how much may be there: less than half, and one page of a LIST, so that what we measure
    is close to one moment."""

    chains_per_server: int
    capacity_blobs: int
    pause_s: float  # between two looks, which a small server or a mount serves slowly

    @property
    def first_part(self):
        """Blobs that are stored before the leader is killed."""
        return 2 * self.chains_per_server * BLOBS_PER_CHAIN * 2 // 5


CHAINS = count("BUCKET_CHAINS", 8)  # of each server; 25 under make prove
LARGE, SMALL = Scale(CHAINS, CHAINS * 36, 0.02), Scale(5, 180, 0.2)


class Bucket:
    """The bucket from outside."""

    def __init__(self, objects, prefix, scale):
        self._objects, self._prefix, self.pause_s = objects, prefix, scale.pause_s
        self.peak_bytes = 0

    def sizes(self):
        return self._objects.sizes(self._prefix)

    def blobs(self):
        return {path: size for path, size in self.sizes().items() if parse_object_path(path)}

    def get(self, path):
        return self._objects.get(self._prefix, path)

    def put(self, path, data):
        self._objects.put(self._prefix, path, data)

    def leader(self):
        """Who holds the highest term, and which one that is."""
        while terms := sorted(path for path in self.sizes() if path.startswith("_tiered_kv/lease/")):
            data = self.get(terms[-1])
            if data is not None:  # else a new leader has just removed the old terms
                return msgspec.json.decode(data, type=Term).holder, int(terms[-1].rpartition("/")[2])
        return "", 0

    def orphans(self):
        names = [parse_object_path(path) for path in self.blobs()]
        keys = {name.key for name in names}
        return [name for name in names if name.chunk_index and name.parent not in keys]


class Directory:
    """What lies below a mount; temporary files are nobody's objects."""

    def __init__(self, mount):
        self._mount = mount

    def put(self, prefix, path, data):
        (self._mount / prefix / path).parent.mkdir(parents=True, exist_ok=True)
        (self._mount / prefix / path).write_bytes(data)

    def get(self, prefix, path):
        with suppress(FileNotFoundError):
            return (self._mount / prefix / path).read_bytes()
        return None

    def sizes(self, prefix):
        root, found = self._mount / prefix, {}
        for place, _, names in os.walk(root):
            for name in names:
                path = os.path.relpath(os.path.join(place, name), root)
                with suppress(FileNotFoundError):
                    if not path.startswith(TEMPORARY):
                        found[path] = os.stat(root / path).st_size
        return found


class ServerProcess:
    """One process; its lines are read by ``poll``."""

    def __init__(self, order):
        self.id = order.server_id
        self._process = subprocess.Popen(
            module_command(bucket_process.__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=module_environment(),
        )
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
        self._text = b""
        os.set_blocking(self._process.stdout.fileno(), False)

    def poll(self):
        """Blobs stored so far, and whether it has offered all."""
        text = self._process.stdout.read()
        self._text += text or b""
        lines = self._text.decode().split("\n")
        stored = [int(line.split()[1]) for line in lines if line.startswith("stored") and len(line.split()) == 2]
        return (stored or [0])[-1], "done" in lines

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def end(self):
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        if self._process.poll() is None:
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
        self._process.stdout.close()
        return self._process.returncode


def until(bucket, limit_bytes, condition):
    """Measure the bucket again and again until the condition holds; it must never be over its limit."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        used = sum(bucket.sizes().values())
        bucket.peak_bytes = max(bucket.peak_bytes, used)
        assert used <= limit_bytes, f"over the limit: {used} of {limit_bytes} bytes"
        time.sleep(bucket.pause_s)


@pytest.fixture(params=["s3", "cephfs", *ATOMIC])
def place(request):
    """An empty prefix in a bucket: how much fits the server, each process's URI, options, and a look from outside."""
    if request.param == "s3":
        s3 = request.getfixturevalue("s3")
        prefix = s3.new_prefix()
        with s3.client() as client:
            yield LARGE, [s3.uri(prefix)] * 2, s3.options(), Bucket(S3Objects(client, s3.bucket), prefix, LARGE)
        return
    if request.param == "cephfs":
        system, name = request.getfixturevalue("cephfs"), request.getfixturevalue("cephfs").new_name()
        uris = [f"shared+file://{mount}/{name}" for mount in system.mounts]
        yield SMALL, uris, {}, Bucket(Directory(system.mounts[0]), name, SMALL)
        return
    served = request.getfixturevalue("stores")(request.param)
    prefix = served.new_prefix()
    yield SMALL, [served.uri(prefix)] * 2, served.options(), Bucket(served, prefix, SMALL)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_two_servers_keep_a_bucket_within_its_limit_and_survive_their_leader(place):
    scale, uris, options, bucket = place
    limit = scale.capacity_blobs * len(chain_of(0).blob(0).data)
    other = SampleChain(seed=999)
    for index in range(0, 20, 2):  # with holes: not ours to collect either
        bucket.put(object_path(other.name(index)), other.blob(index).data)
    theirs = set(bucket.blobs())
    servers = []
    for number in range(2):
        seeds = list(range(scale.chains_per_server * number, scale.chains_per_server * (number + 1)))
        servers.append(ServerProcess(Order(uris[number], options, f"server-{number}", limit, seeds, BLOBS_PER_CHAIN)))
    try:
        until(bucket, limit, lambda: sum(server.poll()[0] for server in servers) >= scale.first_part)
        holder, term = bucket.leader()
        leader = next(server for server in servers if server.id == holder)
        (survivor,) = [server for server in servers if server is not leader]
        leader.kill()
        killed_at = time.monotonic()
        until(bucket, limit, lambda: bucket.leader() == (survivor.id, term + 1))
        print(f"handed over after {time.monotonic() - killed_at:.1f} s, expiry {PACE.expiry_s} s")
        until(bucket, limit, lambda: survivor.poll()[1])
        until(bucket, limit, lambda: not [n for n in bucket.orphans() if n.namespace == NAMESPACE])
        assert survivor.end() == 0
    finally:
        for server in servers:
            server.end()
    check_contents(bucket, scale, theirs, other)
    print(f"peak {bucket.peak_bytes / limit:.3f} of the limit")
    assert bucket.peak_bytes > limit * 0.8


def check_contents(bucket, scale, theirs, other):
    """Whole blobs only, each with its parent; the other namespace as it was."""
    known = {
        object_path(chain.name(i)): (chain, i)
        for chain in map(chain_of, range(2 * scale.chains_per_server))
        for i in range(BLOBS_PER_CHAIN)
    }
    known |= {object_path(other.name(index)): (other, index) for index in range(20)}
    found = bucket.blobs()
    assert theirs <= set(found)
    assert len(found) > scale.capacity_blobs / 2
    for path in found:
        chain, index = known[path]
        assert bucket.get(path) == chain.blob(index).data
        assert index == 0 or path in theirs or object_path(chain.name(index - 1)) in found
