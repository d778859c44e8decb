"""A cache over a real directory, one fault, and what must hold whatever the fault was.

The engine is stepped by hand, the tier is the disk tier with every wrapper, so a scene takes milliseconds. The
invariants are those of ``FaultScene.check``:

    I1  every promised byte is the byte that was stored: compared at every turn (``EngineWorld``)
    I2  every request is answered, without time passing but what the scene lets pass
    I3  the engine is alive: what is stored after the fault is loaded, and nothing ended in an undeclared error
    I4  no lease, no lookup and no temp file is left; usage is what ``du`` says, and within the limit
    I5  the matching counter moved, and a line of the log names cause and place
"""

import logging
import re
from collections.abc import Callable
from pathlib import Path

from tests.kit.engine_world import BLOB_BYTES, SPACES, EngineWorld
from tests.kit.storage.disk_probe import RESERVE_BYTES, blob_files, blob_path, du_bytes, open_disk, temp_files
from tiered_kv.metrics.recorder import Recorder
from tiered_kv.testing.faults import FaultyTier, Plan, SlowHook
from tiered_kv.tiers.base import BlobName, Tier
from tiered_kv.tiers.disk.tier import DiskTier
from tiered_kv.tiers.wrappers.breaker import OPEN_LAST_S

PREFIX = (1, 2, 3)
HOST_BYTES = 8 * BLOB_BYTES
LIMIT_BYTES = 96 * BLOB_BYTES
OTHERS = [(100 + number,) for number in range(2 * HOST_BYTES // BLOB_BYTES)]
"""Prompts of a chunk each that push everything else out of host memory and leave it on disk."""


class LogLines(logging.Handler):
    """What the package logs as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class FaultScene:
    """One cache over ``root``, started, with a session of the namespace "small"."""

    def __init__(
        self,
        root: Path,
        *,
        plan: Plan | None = None,
        hook: SlowHook | None = None,
        limit_bytes: int = LIMIT_BYTES,
        host_bytes: int = HOST_BYTES,
    ) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        self.host_bytes = host_bytes
        self.log = LogLines()
        self.counted: dict[str, int] = {}
        self._plan = plan
        self._hook = hook
        logging.getLogger("tiered_kv").addHandler(self.log)
        self.open()

    def open(self) -> None:
        """Start over the directory."""
        self.disk: DiskTier = open_disk(self.root, self.limit_bytes, min_free_bytes=-(1 << 40))
        try:
            medium: Tier = self.disk
            if self._plan is not None or self._hook is not None:
                medium = FaultyTier(self.disk, self._plan or (lambda _number: None), self._hook)
            self.world = EngineWorld(medium, self.host_bytes, recorder=Recorder())
        except BaseException:
            self.disk.close()
            raise
        self.session = self.world.open()
        self.world.settle()

    def restart(self) -> None:
        """End in order and start again."""
        self._note_counters()
        self.world.close()
        self.open()

    def crash(self) -> None:
        """End as a SIGKILL would: nothing is drained or persisted; the kernel drops the lock."""
        self._note_counters()
        self.world.abandon()
        self.disk._lock.release()
        self.open()

    def end(self) -> None:
        """Give everything back."""
        logging.getLogger("tiered_kv").removeHandler(self.log)
        self.world.close()

    # -- what requests do ----------------------------------------------------------------------------------------------

    def store(self, path: tuple[int, ...]) -> None:
        self.world.store(self.session, path)

    def load(self, path: tuple[int, ...] = PREFIX) -> int:
        """Chunks a request gets, every byte compared."""
        return self.world.loaded(self.session, path)

    def forget_host(self) -> None:
        """Push what was stored so far out of host memory."""
        for path in OTHERS:
            self.store(path)

    def pass_time(self, seconds: float = OPEN_LAST_S + 1) -> None:
        """Let time pass: by default so much that a breaker tries its tier again."""
        self.world.clock.advance(seconds)
        self.world.settle()

    # -- what is on disk -----------------------------------------------------------------------------------------------

    def file(self, path: tuple[int, ...], space: str = "small") -> Path:
        """The file of a chunk."""
        one = SPACES[space]
        return blob_path(self.root, BlobName(one.namespace, one.key(path)))

    @property
    def is_open(self) -> bool:
        """Whether the disk's breaker is open."""
        return self.world.opened[0].breaker.is_open

    def counter(self, name: str) -> int:
        """A counter of tiering over all starts of this scene."""
        return self.counted.get(name, 0) + self.world.tiering.counters[name]

    def _note_counters(self) -> None:
        for name, number in self.world.tiering.counters.items():
            self.counted[name] = self.counted.get(name, 0) + number

    def notice(self) -> None:
        """Have the tier look for every blob it counts: what was removed behind its back counts until somebody looks."""
        for info in list(self.disk.scan()):
            self.disk.contains(info.name)

    # -- invariants ----------------------------------------------------------------------------------------------------

    def check(self, counter: str = "", line: str = "") -> None:
        """The invariants; ``counter`` must have moved, ``line`` must be found in a line of the log."""
        recovered = (7, 7, 7)
        self.store(recovered)
        assert self.load(recovered) == len(recovered), "the engine does not store any more"
        self.world.check_idle()
        assert temp_files(self.root) == []
        used = self.disk.usage().used_bytes
        assert used == du_bytes(self.root / "blobs") <= self.limit_bytes
        assert du_bytes(self.root / "blobs", self.root / "tmp") <= self.limit_bytes + RESERVE_BYTES
        assert self.disk.usage().blob_count == len(blob_files(self.root))
        assert not counter or self.counter(counter) > 0, f"{counter} did not move: {self.world.tiering.counters}"
        assert not line or any(re.search(line, said) for said in self.log.lines), (line, self.log.lines)


Damage = Callable[[FaultScene], None]
"""Does something to the stored blobs behind the cache's back."""
