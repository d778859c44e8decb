"""SIGKILL a storing process at random moments, many times over one directory: nothing it published may be wrong.

``TIERED_KV_KILLS`` sets the number of kills, ``TIERED_KV_SEED`` repeats a run.
"""

import os
import random
import signal
import time

import pytest

from tests.kit.storage.disk_probe import blob_files, du_bytes, open_disk, slot_of, temp_files
from tiered_kv.errors import CapacityExceeded
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.tiers.wrappers.verified import VerifiedTier

KILLS = int(os.environ.get("TIERED_KV_KILLS", "40"))
LIMIT_BYTES = 5 << 20
CHAIN = SampleChain(payload_bytes=256 << 10)


def store_for_ever(root, seed, slots, report):
    """The child: puts, overwrites, deletes, uses and flushes, and tells the parent when each of them begins."""
    draw = random.Random(seed)
    tier = open_disk(root, LIMIT_BYTES)
    while True:
        os.write(report, b".")
        name, slot = draw.choice(slots)
        chance = draw.random()
        if chance < 0.70:
            try:
                tier.put(name, slot)
            except CapacityExceeded:
                for info in list(tier.scan())[:4]:
                    tier.delete(info.name)
        elif chance < 0.80:
            tier.delete(name)
        elif chance < 0.90:
            tier.record_use([name])
        elif chance < 0.95:
            tier.describe(CHAIN.namespace, b'{"format":1}')
        else:
            tier.flush()


def kill_once(root, seed, slots):
    """Let a child store until a random moment of a random operation, then kill it."""
    draw = random.Random(f"kill {seed}")
    reports, report = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store_for_ever(root, seed, slots, report)
        finally:
            os._exit(1)
    os.close(report)
    operations = draw.randrange(1, 40)
    while operations > 0 and (seen := os.read(reports, operations)):
        operations -= len(seen)
    moment = time.perf_counter() + draw.random() * 0.002  # a put takes about a millisecond: land anywhere in it
    while time.perf_counter() < moment:
        pass
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(reports)
    assert os.WIFSIGNALED(status), "the child failed before it was killed"


def check_directory(root, contents):
    """What a fresh start finds."""
    assert du_bytes(root / "blobs", root / "tmp") <= LIMIT_BYTES
    disk = open_disk(root, LIMIT_BYTES)
    tier = VerifiedTier(disk, {CHAIN.namespace: CHAIN.form}.get)
    assert temp_files(root) == []
    assert disk.unreadable_count == 0
    names = [info.name for info in tier.scan()]
    buffer = bytearray(CHAIN.form.blob_bytes)
    for name in names:
        assert tier.get_into(name, memoryview(buffer))
        assert buffer in contents[name]
    usage = disk.usage()
    assert usage.used_bytes == du_bytes(root / "blobs") <= LIMIT_BYTES
    assert usage.blob_count == len(names) == len(blob_files(root))
    disk.close()
    return len(names)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_at_random_moments_leave_only_whole_blobs_and_exact_accounts(tmp_path):
    seed = int(os.environ.get("TIERED_KV_SEED", random.randrange(1 << 32)))
    print(f"TIERED_KV_SEED={seed} TIERED_KV_KILLS={KILLS}")
    blobs = [CHAIN.blob(index, version) for index in range(24) for version in range(2)]
    contents = {blob.name: [] for blob in blobs}
    for blob in blobs:
        contents[blob.name].append(blob.data)
    slots = [(blob.name, slot_of(blob.data)) for blob in blobs]
    found, torn = [], 0
    for number in range(KILLS):
        kill_once(tmp_path, f"{seed} {number}", slots)
        torn += bool(temp_files(tmp_path))
        found.append(check_directory(tmp_path, contents))
    print(f"blobs found after each kill: {found}; kills in the middle of a write: {torn}")
    assert max(found) > 10
