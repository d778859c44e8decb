"""Epochs: how ``reset_cache`` makes old KV unreachable without touching a byte of it.

A namespace's base epoch is a number kept in the disk tier's directory. A reset raises it durably, so every later start
uses a fresh epoch, and gives the calling engine a random private epoch that nobody else, nor its own restart, adopts.
With a bucket the directory also says which resets the bucket has not heard of yet, and the highest number that was seen
there (``shared_epochs.py``).

Writing lasts as long as the disk likes (fsync), and every engine's lookups wait for the server's loop: so the loop
hands what is to be written to another thread, and confirms a reset only when that has said that it is durable.
"""

import logging
import os
import re
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from tiered_kv.errors import ConfigError, TierUnavailable
from tiered_kv.tiers.disk_io import read_small_file, replace_small_file, write_new_file

logger = logging.getLogger(__name__)

EPOCHS_FILE: Final = "epochs.json"
BYTES_MAX: Final = 16 << 20
"""A number of each of 300,000 namespaces."""

_OWED: Final = "owed:"
"""Before a digest: a reset of that namespace is not in the bucket yet."""
_OWED_NAME = re.compile(f"{_OWED}([0-9a-f]{{32}})")
_SEEN: Final = "seen:"
"""Before a digest: the highest number that this machine has seen in the bucket."""

Numbers = dict[str, int]
Submit = Callable[[Callable[[], None]], None]
"""Runs a task in another thread and wakes the server's loop when it is done."""

_PRIVATE = re.compile(r"private-[0-9a-f]{32}")


def is_private_epoch(epoch: str) -> bool:
    """Whether this is the epoch of one engine since its reset."""
    return _PRIVATE.fullmatch(epoch) is not None


def read_epochs(root: Path) -> dict[str, int]:
    """The numbers of a directory: by base digest in hex, and a floor for all of them under the empty name.

    Names that are no digest say what is owed to a bucket, and what was seen there.

    Raises:
        ValueError: The file is damaged.
        TierUnavailable: It cannot be read.
    """
    path = root / EPOCHS_FILE
    try:
        return msgspec.json.decode(read_small_file(path, BYTES_MAX), type=dict[str, int])
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise TierUnavailable(f"cannot read the epochs. path={path}: {exc}") from exc


@dataclass(frozen=True, slots=True)
class _Change:
    """One thing to be written.

    Attributes:
        digest: The namespace whose base epoch it retires; empty if none.
        private: The private epoch of the engine that waits for it; empty if none does.
    """

    apply: Callable[[Numbers], object]
    digest: bytes = b""
    private: str = ""


def _at_once(task: Callable[[], None]) -> None:
    """For tools and tests, which have nothing else to do meanwhile."""
    task()


class Epochs:
    """Base epochs by namespace digest (computed with an empty epoch).

    Threads: one owner, the server's loop. One save at a time runs where ``submit`` runs it; it reads nothing of this
    object and hands its result over through ``_saved`` (a deque: appends are atomic).
    """

    def __init__(self, root: Path, submit: Submit = _at_once) -> None:
        """Read the epochs; a damaged file retires every base epoch of the directory.

        Raises:
            ConfigError: The file is sound and says something else: it is somebody's, and stays as it is.
            TierUnavailable: The file cannot be read, or a fresh one cannot be written.
        """
        self._path = root / EPOCHS_FILE
        self._submit = submit
        self._numbers: Numbers = {}  # what is durable
        self._waiting: list[_Change] = []
        self._saving: list[_Change] = []
        self._saved: deque[tuple[Numbers, TierUnavailable | None]] = deque()
        self._failed: dict[str, TierUnavailable] = {}
        try:
            self._numbers = read_epochs(root)
        except msgspec.ValidationError as exc:
            raise ConfigError(
                f"epochs.json in the cache directory is not what a cache server writes, so it stays: move it away. "
                f"path={self._path}: {exc!s:.100}"
            ) from exc
        except ValueError as exc:
            self._start_afresh(exc)

    def _start_afresh(self, reason: ValueError) -> None:
        """Which epochs were retired is unknown, so every base epoch of this directory is retired at once."""
        damaged = self._path.with_name(f"epochs.damaged-{secrets.token_hex(4)}.json")
        try:
            # A copy: until the fresh file takes its place, the damaged one must stand, or a crash in between would
            # leave none, and with it the first epochs in force.
            write_new_file(damaged, read_small_file(self._path, BYTES_MAX), is_lasting=True)
        except OSError as exc:
            raise TierUnavailable(f"cannot keep the damaged epochs. path={damaged}: {exc}") from exc
        numbers = {"": secrets.randbits(48)}
        _save(self._path, numbers)
        self._numbers = numbers
        logger.warning("epochs.json was unreadable; a fresh epoch starts. kept=%s error=%s", damaged.name, reason)

    def base(self, digest: bytes) -> str | None:
        """The epoch that newcomers of a namespace use; None while a reset of it is being written: ask again."""
        if not self.is_told(digest):
            return None
        floor = self._numbers.get("", 0)
        return f"base-{floor + self._numbers.get(digest.hex(), 0)}"

    def retire(self, digest: bytes, *, owes: bool = False) -> str:
        """Begin to retire the base epoch; returns a private one for the caller, to be used once ``check`` lets it.

        Args:
            owes: Remember with it that the bucket has to hear of this.

        Raises:
            TierUnavailable: As ``check``, where that is known at once.
        """

        def change(numbers: Numbers) -> None:
            numbers[digest.hex()] = numbers.get(digest.hex(), 0) + 1
            if owes:
                numbers[_OWED + digest.hex()] = 1

        private = f"private-{secrets.token_hex(16)}"
        self._waiting.append(_Change(change, digest, private))
        self.turn()
        self.check(private)
        return private

    def check(self, private: str) -> None:
        """See to it that nobody goes on with a reset that failed.

        Raises:
            TierUnavailable: The new base epoch could not be written; the old one is still in force elsewhere.
        """
        failure = self._failed.pop(private, None)
        if failure is not None:
            raise failure

    @property
    def owed(self) -> list[bytes]:
        """Namespaces with a reset that the bucket has not heard of."""
        return [bytes.fromhex(found[1]) for name in self._numbers if (found := _OWED_NAME.fullmatch(name))]

    def pay(self, digest: bytes) -> None:
        """Note that the bucket has heard of this namespace's resets."""
        self._waiting.append(_Change(lambda numbers: numbers.pop(_OWED + digest.hex(), None)))
        self.turn()

    def seen(self, digest: bytes) -> int:
        """The highest number of a namespace that this machine has seen in the bucket, 0 if none. Any thread."""
        return self._numbers.get(_SEEN + digest.hex(), 0)

    def note_seen(self, digest: bytes, number: int) -> None:
        """Remember a number of the bucket, if it is a higher one."""
        name = _SEEN + digest.hex()
        if number > self._numbers.get(name, 0):
            self._waiting.append(_Change(lambda numbers: numbers.update({name: max(number, numbers.get(name, 0))})))
            self.turn()

    def turn(self) -> None:
        """Take in what was written, and have written what waits. Call it often."""
        while self._saved or (self._waiting and not self._saving):
            if self._saved:
                self._take(*self._saved.popleft())
            else:
                self._saving, self._waiting = self._waiting, []
                numbers = dict(self._numbers)
                for change in self._saving:
                    change.apply(numbers)
                self._submit(partial(self._write, numbers))

    def _take(self, numbers: Numbers, failure: TierUnavailable | None) -> None:
        changes, self._saving = self._saving, []
        if failure is None:
            # Only now: an epoch that others adopt here but that a restart does not know would be adopted twice, before
            # and after a later reset.
            self._numbers = numbers
            return
        self._failed.update({change.private: failure for change in changes if change.private})
        if not all(change.private for change in changes):  # costs hits: the bucket is told once more, or forgets
            logger.warning("what the bucket has heard or has told of resets could not be noted here. %s", failure)

    def _write(self, numbers: Numbers) -> None:
        failure: TierUnavailable | None = None
        try:
            _save(self._path, numbers)
        except TierUnavailable as exc:
            failure = exc
        self._saved.append((numbers, failure))

    def is_told(self, digest: bytes) -> bool:
        """Whether everybody who may hear of a reset of the namespace has: what is in the directory is."""
        return all(change.digest != digest for change in (*self._saving, *self._waiting))


def _save(path: Path, numbers: Numbers) -> None:
    try:
        # Lasting: unlike a blob, a lost epoch would serve stale KV.
        replace_small_file(path, msgspec.json.encode(numbers), is_lasting=True)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as exc:
        raise TierUnavailable(f"cannot write the epochs. path={path}: {exc}") from exc
