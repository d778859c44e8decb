"""Epochs: how ``reset_cache`` makes old KV unreachable without touching a byte of it.

A namespace's base epoch is a number kept in the disk tier's directory. A reset raises it durably, so every later start
uses a fresh epoch, and gives the calling engine a random private epoch that nobody else, nor its own restart, adopts.
With a bucket the directory also says which resets the bucket has not heard of yet (``shared_epochs.py``).
"""

import logging
import os
import re
import secrets
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


_PRIVATE = re.compile(r"private-[0-9a-f]{32}")


def is_private_epoch(epoch: str) -> bool:
    """Whether this is the epoch of one engine since its reset."""
    return _PRIVATE.fullmatch(epoch) is not None


def read_epochs(root: Path) -> dict[str, int]:
    """The numbers of a directory: by base digest in hex, and a floor for all of them under the empty name.

    Names that are no digest say what is owed to a bucket.

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


class Epochs:
    """Base epochs by namespace digest (computed with an empty epoch).

    Threads: one owner, the server's loop.
    """

    def __init__(self, root: Path) -> None:
        """Read the epochs; a damaged file retires every base epoch of the directory.

        Raises:
            ConfigError: The file is sound and says something else: it is somebody's, and stays as it is.
            TierUnavailable: The file cannot be read, or a fresh one cannot be written.
        """
        self._path = root / EPOCHS_FILE
        self._numbers: dict[str, int] = {}
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
        self._save(numbers)
        self._numbers = numbers
        logger.warning("epochs.json was unreadable; a fresh epoch starts. kept=%s error=%s", damaged.name, reason)

    def base(self, digest: bytes) -> str:
        """The epoch that newcomers of a namespace use."""
        floor = self._numbers.get("", 0)
        return f"base-{floor + self._numbers.get(digest.hex(), 0)}"

    def retire(self, digest: bytes, *, owes: bool = False) -> str:
        """Retire the base epoch durably; returns a private one for the caller.

        Args:
            owes: Remember with it that the bucket has to hear of this.

        Raises:
            TierUnavailable: The new base epoch could not be written; the old one is still in force elsewhere.
        """
        numbers = {**self._numbers, digest.hex(): self._numbers.get(digest.hex(), 0) + 1}
        if owes:
            numbers[_OWED + digest.hex()] = 1
        self._save(numbers)
        # Only now: an epoch that others adopt here but that a restart does not know would be adopted twice, before and
        # after a later reset.
        self._numbers = numbers
        return f"private-{secrets.token_hex(16)}"

    @property
    def owed(self) -> list[bytes]:
        """Namespaces with a reset that the bucket has not heard of."""
        return [bytes.fromhex(found[1]) for name in self._numbers if (found := _OWED_NAME.fullmatch(name))]

    def pay(self, digest: bytes) -> None:
        """The bucket has heard of this namespace's resets.

        Raises:
            TierUnavailable: That could not be written.
        """
        numbers = {name: number for name, number in self._numbers.items() if name != _OWED + digest.hex()}
        self._save(numbers)
        self._numbers = numbers

    def turn(self) -> None:
        """Nothing goes on in the background."""

    def is_told(self, digest: bytes) -> bool:
        """Whether everybody who may hear of a reset has; what is in the directory is."""
        del digest
        return True

    def _save(self, numbers: dict[str, int]) -> None:
        try:
            # Lasting: unlike a blob, a lost epoch would serve stale KV.
            replace_small_file(self._path, msgspec.json.encode(numbers), is_lasting=True)
            directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as exc:
            raise TierUnavailable(f"cannot write the epochs. path={self._path}: {exc}") from exc
