"""A storing server that is killed again and again over one directory, and what must hold after every kill.

A lane is one directory with two engines (server/traffic.py) that store and look up without pause. Its server is the one
that the engines start. A round kills it at a moment drawn from the seed, looks at what it left, opens the directory
again, at times with another kill while it opens, and looks again.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.kit.server.clients import SmallEngine, hello, settings
from tests.kit.server.probe import figures, lock_holder, server_pid, wait_for
from tests.kit.server.processes import end_server, is_alive
from tests.kit.server.traffic import EngineTraffic, Habits, payload_of, turn_until
from tests.kit.storage.disk_probe import blob_files, du_bytes
from tests.kit.storage.stored_blobs import BlobReader, S3Bucket, SharedBucket
from tiered_kv.errors import TieredKVError
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.server.client import BACKOFF_LAST_S

RESERVE_BYTES = 64 << 20
"""Of ``disk_bytes``, for metadata: what is above is for blobs."""

STORM_S = 0.25
OPENING_S = 0.06
OPENING_SHARE = 0.2
MID_WRITE_SHARE = 0.4
MID_WRITE_WAIT_S = 0.5
PATIENCE_S = 300.0
"""Of everything here: the machine may have much else to do."""

HITS_WANTED = 4
ROOMY_SHARE = 0.6
ROOM = {"full": 4 << 20, "roomy": 96 << 20, "bucket": 4 << 20}
"""Room for blobs. ``full``: the disk evicts all the time. ``roomy``: it never does, so whatever the server said is on
disk must be there. ``bucket``: a full disk in front of an object store, so that uploads are under way, too."""


def temp_count(directory: Path) -> int:
    try:
        return len(os.listdir(directory))
    except FileNotFoundError:
        return 0


class KilledServer:
    """One lane.

    Threads: one owner; a killer thread lives within a round.

    Attributes:
        counts: ``kills``, ``kills_while_opening``, ``torn`` (kills that left temp files), ``uploads_cut`` (uploads that
            left a temp file in a shared directory), ``rounds_at_limit`` (the disk was full), ``hit_chunks`` after
            restarts, ``durable`` (chunks that were said to be on disk, looked for after kills), ``evicted`` (of those,
            not there any more), and more.
    """

    def __init__(self, place: Path, kind: str, seed: object, bucket: SharedBucket | S3Bucket | None = None) -> None:
        self._place, self._kind, self._bucket = place, kind, bucket
        self._draw = random.Random(f"{kind} {seed}")
        self._number = 0
        self.counts: Counter[str] = Counter()
        self._open()

    def _open(self) -> None:
        """Begin on a new directory."""
        self._number += 1
        self.root = self._place / f"{self._kind}-{self._number}"
        self.disk_bytes = RESERVE_BYTES + ROOM[self._kind]
        given: dict[str, Any] = {"disk_bytes": self.disk_bytes, "host_bytes": "8MiB", "start_timeout_s": PATIENCE_S}
        if self._bucket is not None:
            given |= {"disk_path": str(self.root)} | self._bucket.settings
        self.config = settings(self.root, **given)
        self._blobs = BlobReader(self.root / "blobs")
        self._durable: set[bytes] = set()
        self._asked: dict[bytes, PrefixKeys] = {}
        self._engines = self._join()

    def _join(self) -> list[EngineTraffic]:
        """New engines, which are ready and ask nothing yet."""
        habits = Habits(hold_s=0.01)
        engines = [
            EngineTraffic(self.config, f"engine-{number}", random.Random(self._draw.random()), habits, is_watching=True)
            for number in range(2)
        ]
        for one in engines:
            one.is_asking = False
        turn_until(engines, lambda: all(one.engine.client.is_ready for one in engines), "the sessions")
        return engines

    def close(self) -> None:
        self._leave()
        end_server(self.root)

    def _leave(self) -> None:
        """The engines end, and what they heard is kept."""
        for one in self._engines:
            one.close()
            self._durable |= one.durable
            self._durable -= one.gone
            self._asked |= one.asked
            self.counts.update(one.counts)
        self._engines = []

    # -- a round -------------------------------------------------------------------------------------------------

    def round(self) -> None:
        """Store, be killed, look, open again, look again.

        Raises:
            AssertionError: Something is not as it must be; names the file or the key.
        """
        self._storm()
        self._look_at_what_is_left()
        while self._draw.random() < OPENING_SHARE:
            self._kill_while_opening()
        with hello(self.config):
            self._look_at_what_was_opened()
            self._engines = self._join()
        self._look_up()
        assert not self.counts["wrong_chunks"], f"wrong bytes were loaded. chunks={self.counts['wrong_chunks']}"
        if self._kind == "roomy" and du_bytes(self.root / "blobs") > ROOMY_SHARE * ROOM["roomy"]:
            self.close()
            self._open()

    def _storm(self) -> None:
        pid = server_pid(self.root)
        killer = threading.Thread(target=self._kill, args=(pid, random.Random(self._draw.random())))
        for one in self._engines:
            one.is_asking, one.may_join = True, False
            one.engine.client._backoff_s = BACKOFF_LAST_S  # as after many losses: it starts no server behind our back
        killer.start()
        turn_until(self._engines, lambda: not is_alive(pid), "the kill")
        killer.join()
        self.counts["kills"] += 1
        # What it said last is still in the sockets.
        turn_until(self._engines, lambda: not any(one.engine.client.is_ready for one in self._engines), "the losses")
        self._leave()

    def _kill(self, pid: int, draw: random.Random) -> None:
        """Wait for the moment: any, or one at which a write is under way."""
        is_mid_write = draw.random() < MID_WRITE_SHARE
        time.sleep(draw.random() * STORM_S)
        end_s = time.monotonic() + MID_WRITE_WAIT_S
        while is_mid_write and not temp_count(self.root / "tmp") and time.monotonic() < end_s:
            time.sleep(0)
        os.kill(pid, signal.SIGKILL)

    def _kill_while_opening(self) -> None:
        """Start a server and kill it between its taking the lock and a moment after its first answer."""

        def start() -> None:
            try:
                hello(self.config).close()
            except TieredKVError:
                self.counts["failed_starts"] += 1  # it was killed before it was ready

        starter = threading.Thread(target=start)
        starter.start()

        def is_begun() -> bool:
            return not starter.is_alive() or lock_holder(self.root) is not None

        wait_for(is_begun, "a server that opens the directory", deadline_s=PATIENCE_S)
        time.sleep(self._draw.random() * OPENING_S)
        if (pid := lock_holder(self.root)) is not None:
            os.kill(pid, signal.SIGKILL)
            self.counts["kills"] += 1
            self.counts["kills_while_opening"] += 1
        starter.join()
        self._end_starting()
        self._look_at_what_is_left()

    def _end_starting(self) -> None:
        """The starter may have tried again: end that one, too."""
        if (pid := lock_holder(self.root)) is not None:
            os.kill(pid, signal.SIGKILL)
            self.counts["kills"] += 1
        wait_for(lambda: lock_holder(self.root) is None, "the end of the server")

    # -- what must hold ------------------------------------------------------------------------------------------

    def _look_at_what_is_left(self) -> None:
        """Nobody runs: the limit holds as it is, and what has a blob's name is a whole blob."""
        used = du_bytes(self.root / "blobs", self.root / "tmp") + RESERVE_BYTES
        assert used <= self.disk_bytes, f"over the limit after a kill. used={used} disk_bytes={self.disk_bytes}"
        self.counts["rounds_at_limit"] += used > 0.9 * ROOM[self._kind] + RESERVE_BYTES
        self.counts["torn"] += temp_count(self.root / "tmp") > 0
        self._check_blobs()
        there = {path.name.partition(".")[0] for path in blob_files(self.root)}
        missing = {key.hex() for key in self._durable} - there
        self.counts["durable"] += len(self._durable)
        self.counts["evicted"] += len(missing)
        if self._kind == "roomy":
            assert not missing, f"said to be on disk, never evicted, and gone: {sorted(missing)[:5]}"
        self._durable = {key for key in self._durable if key.hex() in there}

    def _check_blobs(self) -> None:
        before = self._blobs.read
        problems = self._blobs.problems()
        self.counts["blobs_read"] += self._blobs.read - before
        if self._bucket is not None:
            problems += self._bucket.problems()
            self.counts["bucket_blobs_read"] = self._bucket.read
            self.counts["uploads_cut"] = max(self.counts["uploads_cut"], self._bucket.cut_uploads())
        assert not problems, "\n".join(problems)

    def _look_at_what_was_opened(self) -> None:
        """A server has opened the directory, and nobody stores yet."""
        check_opened(self.root, self.disk_bytes)
        self._check_blobs()

    def _look_up(self) -> None:
        """Prefixes that are on disk are hit, and their bytes are right."""
        there = {path.name.partition(".")[0] for path in blob_files(self.root)}
        found: list[tuple[int, PrefixKeys]] = []
        for keys in self._asked.values():
            leading = next((i for i, key in enumerate(keys.keys) if key.hex() not in there), len(keys.keys))
            found.append((leading, keys))
        found.sort(key=lambda row: row[0])
        for leading, keys in found[-HITS_WANTED:]:
            if leading:
                hit = load(self._engines[0].engine, keys.keys[:leading], keys.digests[:leading])
                assert hit == leading, f"{hit} of {leading} chunks on disk were hit"
                self.counts["hit_chunks"] += hit
        self.counts["rounds_with_hits"] += bool(found and found[-1][0])
        self._asked = {keys.keys[-1]: keys for leading, keys in found if leading}


def check_opened(root: Path, disk_bytes: int) -> None:
    """No orphan byte: nothing but blobs takes room, and the server knows of each of them.

    Raises:
        AssertionError: Otherwise.
    """
    left = [path.name for path in (root / "tmp").iterdir()]
    assert not left, f"temp files after the directory was opened. files={left}"
    (disk,) = [tier for tier in figures(root)["tiers"] if tier["name"] == "disk"]
    used = du_bytes(root / "blobs")
    assert disk["used_bytes"] == used, f"the server counts {disk['used_bytes']} bytes on disk, there are {used}"
    assert used + RESERVE_BYTES <= disk_bytes, f"over the limit. used={used} disk_bytes={disk_bytes}"
    assert disk["blobs"] == len(blob_files(root)), f"blobs={disk['blobs']} files={len(blob_files(root))}"


def load(engine: SmallEngine, keys: list[bytes], digests: list[bytes]) -> int:
    """How many leading chunks are hit; their bytes are compared."""

    client = engine.client
    lookup = client.lookup(keys, digests)
    assert lookup is not None

    def is_here() -> bool:
        client.poll()
        return client.lookups[lookup].is_answered and client.lookups[lookup].is_done

    wait_for(is_here, "the answer", deadline_s=PATIENCE_S)
    answer = client.lookups[lookup]
    for slot, key in zip(answer.slots[: answer.ready], keys, strict=False):
        with engine.payload(slot) as view:
            assert bytes(view) == payload_of(key), f"wrong bytes were loaded. key={key.hex()}"
    client.release(lookup)
    return answer.ready
