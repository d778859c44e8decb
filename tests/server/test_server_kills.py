"""SIGKILL a storing server at random moments, again and again over one directory: nothing wrong, nothing left behind.

``TIERED_KV_SERVER_KILLS`` sets the number of kills in all, ``TIERED_KV_SEED`` repeats a run. What was counted is
written to build/server_kills.json.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.kit.counts import count, seed
from tests.kit.faults.killed_server import KilledServer
from tests.kit.s3 import S3
from tests.kit.storage.stored_blobs import S3Bucket, SharedBucket

KILLS = count("SERVER_KILLS", 20)
SHARES = {"full": 0.4, "roomy": 0.3, "bucket": 0.3}
ON_S3 = 0.1
"""Kills on a real S3 server besides, of a full count."""

FULL = 200
"""From so many kills on the count is a full one."""

RESULT = Path(__file__).parent.parent.parent / "build" / "server_kills.json"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {"seed": seed(), "lanes": {}}
    yield found
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def kill_all(lane: KilledServer, kills: int) -> dict[str, Any]:
    """Rounds until enough kills were made; what was counted."""
    start_s = time.monotonic()
    try:
        while lane.counts["kills"] < kills:
            lane.round()
    finally:
        lane.close()
    counted = {**lane.counts, "seconds": round(time.monotonic() - start_s, 1)}
    print(counted)
    assert counted["compared_bytes"] > 0 and counted["wrong_chunks"] == 0
    assert counted["rounds_with_hits"] > 0 and counted["durable"] > counted["evicted"]
    return counted


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("start", [seed()])
def test_after_every_kill_bytes_are_right_and_accounts_exact(
    tmp_path: Path, results: dict[str, Any], kind: str, start: int
) -> None:
    bucket = SharedBucket(tmp_path / "shared") if kind == "bucket" else None
    counted = results["lanes"][kind] = kill_all(
        KilledServer(tmp_path, kind, start, bucket), round(KILLS * SHARES[kind])
    )
    assert counted["rounds_at_limit"] > 0 or kind == "roomy" or KILLS < FULL


@pytest.mark.skipif(KILLS < FULL, reason="seconds of an S3 server: runs under make prove, or with more kills")
@pytest.mark.parametrize("start", [seed()])
def test_a_server_in_front_of_s3_is_killed_while_it_uploads(
    tmp_path: Path, s3: S3, results: dict[str, Any], start: int
) -> None:
    bucket = S3Bucket(s3, s3.new_prefix())
    counted = kill_all(KilledServer(tmp_path, "bucket", start, bucket), round(KILLS * ON_S3))
    assert counted["bucket_blobs_read"] > 0
    results["lanes"]["s3"] = counted


# -- the checks see what they look for: servers that are broken on purpose ---------------------------------------------

BREAK = {
    "publishes before the write is complete": (
        "full",
        "truncated|blob size|checksum|hash",
        """
        publish = disk.DiskTier._publish
        def _publish(self, temp, target, info, reserved_bytes):
            with open(temp, "rb") as file:
                whole = file.read()
            os.truncate(temp, len(whole) // 2)
            publish(self, temp, target, info, reserved_bytes)
            time.sleep(0.02)
            with open(self._path(info.name), "r+b") as file:
                file.write(whole)
        disk.DiskTier._publish = _publish
        """,
    ),
    "leaves temp files": ("full", "temp files after", "disk.sweep_temp_files = lambda *given: None"),
    "forgets its limit": ("full", "over the limit", "disk.MIN_METADATA_RESERVE_BYTES = 32 << 20"),
    "says that it wrote": (
        "roomy",
        "said to be on disk",
        """
        publish = disk.DiskTier._publish
        def _publish(self, temp, target, info, reserved_bytes):
            publish(self, temp, target, info, reserved_bytes)
            if info.name.key[0] < 64 and info.name.namespace != b"tiered_kv-test-1":
                os.unlink(self._path(info.name))
        disk.DiskTier._publish = _publish
        """,
    ),
}


@pytest.mark.parametrize("what", BREAK)
def test_a_server_that_is_broken_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    kind, complaint, lines = BREAK[what]
    place = tmp_path / "broken"
    place.mkdir()
    body = "import os, time\nfrom tiered_kv.tiers.disk import tier as disk\n"
    (place / "sitecustomize.py").write_text(body + dedent(lines))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")])))
    with pytest.raises(AssertionError, match=complaint):
        kill_all(KilledServer(tmp_path, kind, what), kills=30)
