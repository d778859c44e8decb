"""Two servers, as processes, share a limited bucket on a real S3 server; the one that leads is killed."""

import os
import signal
import subprocess
import time
from contextlib import suppress

import msgspec
import pytest

from tests.kit.module_process import module_command, module_environment
from tests.kit.server import bucket_process
from tests.kit.server.bucket_process import NAMESPACE, PACE, Order, chain_of
from tiered_kv.fleet.layout import Term
from tiered_kv.keys.naming import object_path, parse_object_path
from tiered_kv.testing.blobs import SampleChain

BLOBS_PER_CHAIN = 40
CHAINS_PER_SERVER = 25
CAPACITY_BLOBS = 900  # of 2,000 offered; fits one page of a LIST, so that what we measure is close to one moment
WAIT_S = 100.0


class Bucket:
    """The bucket from outside."""

    def __init__(self, s3, client, prefix):
        self._bucket, self._client, self._prefix = s3.bucket, client, prefix
        self.peak_bytes = 0

    def sizes(self):
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=f"{self._prefix}/")
        start = len(self._prefix) + 1
        return {item["Key"][start:]: item["Size"] for page in pages for item in page.get("Contents", [])}

    def blobs(self):
        return {path: size for path, size in self.sizes().items() if parse_object_path(path)}

    def get(self, path):
        return self._client.get_object(Bucket=self._bucket, Key=f"{self._prefix}/{path}")["Body"].read()

    def put(self, path, data):
        self._client.put_object(Bucket=self._bucket, Key=f"{self._prefix}/{path}", Body=data)

    def leader(self):
        """Who holds the highest term, and which one that is."""
        while terms := sorted(path for path in self.sizes() if path.startswith("_tiered_kv/lease/")):
            with suppress(self._client.exceptions.NoSuchKey):  # a new leader has just removed the old terms
                content = msgspec.json.decode(self.get(terms[-1]), type=Term)
                return content.holder, int(terms[-1].rpartition("/")[2])
        return "", 0

    def orphans(self):
        names = [parse_object_path(path) for path in self.blobs()]
        keys = {name.key for name in names}
        return [name for name in names if name.chunk_index and name.parent not in keys]


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
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_two_servers_keep_a_bucket_within_its_limit_and_survive_their_leader(s3):
    prefix = s3.new_prefix()
    blob_bytes = len(chain_of(0).blob(0).data)
    limit = CAPACITY_BLOBS * blob_bytes
    other = SampleChain(seed=999)
    with s3.client() as client:
        bucket = Bucket(s3, client, prefix)
        for index in range(0, 20, 2):  # with holes: not ours to collect either
            bucket.put(object_path(other.name(index)), other.blob(index).data)
        theirs = set(bucket.blobs())
        servers = []
        for number in range(2):
            seeds = list(range(CHAINS_PER_SERVER * number, CHAINS_PER_SERVER * (number + 1)))
            order = Order(s3.uri(prefix), s3.options(), f"server-{number}", limit, seeds, BLOBS_PER_CHAIN)
            servers.append(ServerProcess(order))
        try:
            until(bucket, limit, lambda: sum(server.poll()[0] for server in servers) >= 800)
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
        check_contents(bucket, theirs, other)
        print(f"peak {bucket.peak_bytes / limit:.3f} of the limit")
        assert bucket.peak_bytes > limit * 0.8


def check_contents(bucket, theirs, other):
    """Whole blobs only, each with its parent; the other namespace as it was."""
    known = {
        object_path(chain.name(i)): (chain, i)
        for chain in map(chain_of, range(2 * CHAINS_PER_SERVER))
        for i in range(BLOBS_PER_CHAIN)
    }
    known |= {object_path(other.name(index)): (other, index) for index in range(20)}
    found = bucket.blobs()
    assert theirs <= set(found)
    assert len(found) > CAPACITY_BLOBS / 2
    for path in found:
        chain, index = known[path]
        assert bucket.get(path) == chain.blob(index).data
        assert index == 0 or path in theirs or object_path(chain.name(index - 1)) in found
