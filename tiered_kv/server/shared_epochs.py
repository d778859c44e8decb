"""Epochs of a cache whose lowest tier is shared: a reset on one machine counts for all that use the bucket.

A namespace's base epoch is the highest number among the objects ``_tiered_kv/epochs/<namespace>/<number>``; a
retirement adds the next one, so it needs no atomic create and two at once do no harm. The bucket is asked and told in
the background, because one that does not answer must not hold up the server's loop: a session whose question found no
answer gets an epoch of this machine alone, which is never wrong and never shared.

A retirement that the bucket could not be told is owed: this machine remembers it durably, tells the bucket as soon as
that answers, also after a restart, and opens no session with a shared epoch before. Called by ``sessions.py``.
"""

import hashlib
import logging
import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tiered_kv.errors import Closed, TierUnavailable
from tiered_kv.machine import machine_name
from tiered_kv.server.epochs import Epochs
from tiered_kv.tiers.object_store import OWN, ObjectStore

logger = logging.getLogger(__name__)

Submit = Callable[[Callable[[], None]], None]
"""Runs a task in another thread and wakes the server's loop when it is done."""

EPOCHS: Final = f"{OWN}/epochs/"
RETRY_S: Final = 10.0
"""How often the bucket is told again of a reset that it did not hear of."""

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

    Threads: one owner, the server's loop; what other threads found out comes through ``_answers`` (item assignment is
    atomic) and ``_told`` (a deque: appends are atomic).
    """

    def __init__(
        self,
        local: Epochs,
        store: ObjectStore,
        submit: Submit,
        *,
        root: Path,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``local`` are this machine's own epochs, for sessions that open while the bucket does not answer."""
        self._local = local
        self._store = store
        self._submit = submit
        self._monotonic = monotonic
        self._machine = hashlib.sha256(f"{machine_name()} {root}".encode()).hexdigest()[:16]
        self._asked: set[bytes] = set()
        self._answers: dict[bytes, int | None] = {}
        self._owed = dict.fromkeys(local.owed, 0)  # which retirement of it the bucket has to hear of, counted from here
        self._retirements = 0
        self._telling: set[bytes] = set()
        self._told: deque[tuple[bytes, int, bool]] = deque()
        self._again_s = monotonic()

    def base(self, digest: bytes) -> str | None:
        """The epoch that a newcomer of a namespace uses; None until the bucket has answered: ask again."""
        if digest not in self._asked:
            self._asked.add(digest)
            if digest in self._owed:
                self._tell(digest)
            else:
                self._submit(lambda: self._ask(digest))
            return None
        if digest in self._telling:
            return None
        if digest in self._owed:  # told in vain
            self._asked.discard(digest)
            return self._own(digest)
        if digest not in self._answers:
            return None
        self._asked.discard(digest)  # the next session asks anew: another machine may have reset by then
        number = self._answers.pop(digest)
        return self._own(digest) if number is None else f"shared-{number}"

    def _own(self, digest: bytes) -> str:
        return f"{self._local.base(digest)}-of-{self._machine}"

    def retire(self, digest: bytes) -> str:
        """Retire the base epoch durably on this machine, and tell the bucket; returns a private one.

        Raises:
            TierUnavailable: It is not durable; the old epoch is still in force.
        """
        private = self._local.retire(digest, owes=True)
        self._retirements += 1
        self._owed[digest] = self._retirements
        self._tell(digest)
        return private

    def is_told(self, digest: bytes) -> bool:
        """Whether the bucket has heard of the namespace's resets, or did not answer when it was told."""
        return digest not in self._telling

    def turn(self) -> None:
        """Take in how telling the bucket went; tell it again what it did not hear. Call it often."""
        while self._told:
            digest, retirement, is_told = self._told.popleft()
            self._telling.discard(digest)
            if not is_told:
                self._again_s = self._monotonic() + RETRY_S
            elif self._owed[digest] != retirement:  # another reset meanwhile
                self._tell(digest)
            else:
                self._paid(digest)
        if self._owed and self._monotonic() >= self._again_s:
            self._again_s = self._monotonic() + RETRY_S
            for digest in self._owed:
                self._tell(digest)

    def _paid(self, digest: bytes) -> None:
        del self._owed[digest]
        try:
            self._local.pay(digest)
        except TierUnavailable as exc:  # the next start tells the bucket once more, which costs hits only
            logger.warning("the bucket heard of a reset; that could not be noted here. %s", exc)
        if digest in self._asked:
            self._submit(lambda: self._ask(digest))

    def _tell(self, digest: bytes) -> None:
        if digest not in self._telling:
            self._telling.add(digest)
            retirement = self._owed[digest]
            self._submit(lambda: self._put_next(digest, retirement))

    def _put_next(self, digest: bytes, retirement: int) -> None:
        is_told = False
        try:
            self._store.put(f"{self._folder(digest)}{self._highest(digest) + 1}", b"retired the number before\n")
            is_told = True
        except (TierUnavailable, Closed) as exc:
            logger.warning(
                "the bucket could not be told of a reset: until it is, engines that start on other machines find what "
                "was stored before. next_try_s=%g %s",
                RETRY_S,
                exc,
            )
        finally:
            self._told.append((digest, retirement, is_told))

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
