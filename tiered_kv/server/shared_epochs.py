"""Epochs of a cache whose lowest tier is shared: a reset on one machine counts for all that use the bucket.

A namespace's base epoch is the highest number among the objects ``_tiered_kv/epochs/<namespace>/<number>``; a
retirement adds the next one, so it needs no atomic create and two at once do no harm. Asked in the background when a
session opens, because a bucket that does not answer must not hold up the server's loop; a session whose question found
no answer gets an epoch of this machine alone, which is never wrong and never shared. Called by ``sessions.py``.
"""

import hashlib
import logging
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tiered_kv.errors import Closed, TierUnavailable
from tiered_kv.server.epochs import Epochs
from tiered_kv.tiers.object_store import OWN, ObjectStore

logger = logging.getLogger(__name__)

Submit = Callable[[Callable[[], None]], None]
"""Runs a task in another thread and wakes the server's loop when it is done."""

EPOCHS: Final = f"{OWN}/epochs/"
_PATH = re.compile(r"([0-9a-f]{32})/([0-9]{1,15})")
_NUMBER = re.compile(r".*/([0-9]{1,15})")


def read_shared_epochs(store: ObjectStore) -> dict[str, int]:
    """The numbers of a bucket, by base digest in hex.

    Raises:
        TierUnavailable: The bucket does not answer.
    """
    numbers: dict[str, int] = {}
    for info in store.list(EPOCHS):
        found = _PATH.fullmatch(info.path.removeprefix(EPOCHS))
        if found is not None:
            numbers[found[1]] = max(int(found[2]), numbers.get(found[1], 0))
    return numbers


class SharedEpochs:
    """Base epochs kept in the bucket.

    Threads: one owner, the server's loop; answers come from other threads through ``_answers`` (item assignment is
    atomic).
    """

    def __init__(self, local: Epochs, store: ObjectStore, submit: Submit, *, root: Path) -> None:
        """``local`` are this machine's own epochs, for sessions that open while the bucket does not answer."""
        self._local = local
        self._store = store
        self._submit = submit
        self._machine = hashlib.sha256(f"{socket.gethostname()} {root}".encode()).hexdigest()[:16]
        self._asked: set[bytes] = set()
        self._answers: dict[bytes, int | None] = {}

    def base(self, digest: bytes) -> str | None:
        """The epoch that a newcomer of a namespace uses; None until the bucket has answered: ask again."""
        if digest not in self._asked:
            self._asked.add(digest)
            self._submit(lambda: self._ask(digest))
            return None
        if digest not in self._answers:
            return None
        self._asked.discard(digest)  # the next session asks anew: another machine may have reset by then
        number = self._answers.pop(digest)
        if number is not None:
            return f"shared-{number}"
        return f"{self._local.base(digest)}-of-{self._machine}"

    def retire(self, digest: bytes) -> str:
        """Retire the base epoch durably, here and in the bucket; returns a private one. Blocks on the bucket.

        Raises:
            TierUnavailable: It is not durable; the old epoch is still in force elsewhere.
        """
        private = self._local.retire(digest)
        self._store.put(f"{self._folder(digest)}{self._highest(digest) + 1}", b"retired the number before\n")
        return private

    def _ask(self, digest: bytes) -> None:
        try:
            self._answers[digest] = self._highest(digest)
        except (TierUnavailable, Closed) as exc:
            logger.warning("session opens with an epoch of this machine alone: nothing of it is shared. %s", exc)
            self._answers[digest] = None

    def _highest(self, digest: bytes) -> int:
        found = (_NUMBER.fullmatch(info.path) for info in self._store.list(self._folder(digest)))
        return max((int(match[1]) for match in found if match is not None), default=0)

    @staticmethod
    def _folder(digest: bytes) -> str:
        return f"{EPOCHS}{digest.hex()}/"
