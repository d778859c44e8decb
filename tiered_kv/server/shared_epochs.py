"""Epochs of a cache whose lowest tier is shared: a reset on one machine counts for all that use the bucket.

A namespace's base epoch is the highest number among the objects ``_tiered_kv/epochs/<namespace>/<number>``; a
retirement adds the next one, so it needs no atomic create and two at once do no harm. The bucket is asked and told in
the background, because one that does not answer must not hold up the server's loop: a session whose question found no
answer gets an epoch of this machine alone, which is never wrong and never shared.

Whoever owns the bucket may delete any of these objects, e.g. by a lifecycle rule on their age, and no retired epoch may
come back by that. So the number that begins a namespace, also one that lost its objects, is a random one: what is
forgotten is never guessed again. The objects of retired epochs are deleted, so that none is left to be the highest. A
number below one that this machine has seen is not believed. And the number in force is written anew every few hours,
so that in use it does not age: losing it is safe, but costs the hits.

A retirement that the bucket could not be told is owed: this machine remembers it durably, tells the bucket as soon as
that answers, also after a restart, and opens no session with a shared epoch before. Called by ``sessions.py``.
"""

import hashlib
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from tiered_kv.errors import Closed, TierUnavailable
from tiered_kv.machine import machine_name
from tiered_kv.server.epochs import Epochs, Submit
from tiered_kv.tiers.object_store import OWN, ObjectInfo, ObjectStore

logger = logging.getLogger(__name__)

EPOCHS: Final = f"{OWN}/epochs/"
RETRY_S: Final = 10.0
"""How often the bucket is told again of a reset that it did not hear of."""
REFRESH_S: Final = 6 * 3600.0
"""How often a number in force is written anew. The shortest lifecycle rule of S3 is a day."""
FIRST_BITS: Final = 48
"""Of the random number that begins a namespace: every version of this package reads up to 15 digits."""
JUMP_BITS: Final = 36
"""Of the random step above the highest known number, where the bucket has lost it."""

NOTE: Final = b"numbers below are retired\n"
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


def begin_with(store: ObjectStore, digest: bytes, number: int) -> int:
    """Have a bucket that has no number of a namespace begin with this one; returns the number in force.

    For copies of another bucket, where that number must be in force: this bucket would begin with one of its own, under
    which nobody finds them.

    Args:
        digest: The namespace's, computed with an empty epoch.

    Raises:
        TierUnavailable: The bucket does not answer.
    """
    there = read_shared_epochs(store).get(digest.hex(), 0)
    if not there:
        store.put(f"{EPOCHS}{digest.hex()}/{number}", NOTE)
    return there or number


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
        self._unsaved: dict[bytes, str] = {}  # retirements that are not durable here yet, and their private epochs
        self._in_force: dict[bytes, int] = {}  # what sessions were told last
        self._again_s = monotonic()
        self._refresh_due_s = monotonic() + REFRESH_S

    def base(self, digest: bytes) -> str | None:
        """The epoch that a newcomer of a namespace uses; None until the bucket has answered: ask again."""
        if digest in self._unsaved:
            return None
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
        if number is None:
            return self._own(digest)
        self._in_force[digest] = number
        self._local.note_seen(digest, number)
        return f"shared-{number}"

    def _own(self, digest: bytes) -> str:
        return f"{self._local.base(digest)}-of-{self._machine}"

    def retire(self, digest: bytes) -> str:
        """Begin to retire the base epoch on this machine and then in the bucket; returns a private one.

        Raises:
            TierUnavailable: As ``Epochs.retire``.
        """
        private = self._local.retire(digest, owes=True)
        self._retirements += 1
        self._owed[digest] = self._retirements
        self._unsaved[digest] = private
        self._tell_saved()
        return private

    def check(self, private: str) -> None:
        """As ``Epochs.check``: what counts for the engine is that this machine remembers its reset.

        Raises:
            TierUnavailable: It could not be written; the old epoch is still in force.
        """
        self._local.check(private)

    def is_told(self, digest: bytes) -> bool:
        """Whether the bucket has heard of the namespace's resets, or did not answer when it was told."""
        return digest not in self._unsaved and digest not in self._telling

    def turn(self) -> None:
        """Take in how telling the bucket went; tell it again what it did not hear. Call it often."""
        self._local.turn()
        self._tell_saved()
        while self._told:
            digest, retirement, is_told = self._told.popleft()
            self._telling.discard(digest)
            if not is_told:
                self._again_s = self._monotonic() + RETRY_S
            elif self._owed.get(digest) != retirement:  # another reset meanwhile
                self._tell(digest)
            else:
                self._paid(digest)
        if self._owed and self._monotonic() >= self._again_s:
            self._again_s = self._monotonic() + RETRY_S
            for digest in self._owed:
                self._tell(digest)
        if self._monotonic() >= self._refresh_due_s:
            self._refresh_due_s = self._monotonic() + REFRESH_S
            for digest, number in self._in_force.items():
                self._submit(partial(self._refresh, digest, number))

    def _tell_saved(self) -> None:
        """Tell the bucket of the resets that are durable here by now, so that no crash leaves one half told."""
        for digest in [digest for digest in self._unsaved if self._local.is_told(digest)]:
            del self._unsaved[digest]
            if digest in self._local.owed:
                self._tell(digest)
            else:  # it could not be written: that reset never was
                self._owed.pop(digest, None)

    def _paid(self, digest: bytes) -> None:
        del self._owed[digest]
        self._local.pay(digest)
        if digest in self._asked:
            self._submit(lambda: self._ask(digest))

    def _tell(self, digest: bytes) -> None:
        if digest not in self._telling and digest not in self._unsaved and digest in self._owed:
            self._telling.add(digest)
            self._submit(partial(self._put_next, digest, self._owed[digest]))

    def _put_next(self, digest: bytes, retirement: int) -> None:
        is_told = False
        try:
            there = self._numbers(digest)
            number = self._fresh(digest, there)
            self._store.put(self._path(digest, number), NOTE)
            self._delete_below(number, there)  # or the telling has failed: a rule may leave one of them the highest
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
            self._answers[digest] = self._agreed(digest)
        except (TierUnavailable, Closed) as exc:
            logger.warning("session opens with an epoch of this machine alone: nothing of it is shared. %s", exc)
            self._answers[digest] = None

    def _agreed(self, digest: bytes) -> int:
        """The number in force; where there is none that can be believed, a new one."""
        there, seen = self._numbers(digest), self._local.seen(digest)
        highest = self._highest(there)
        if highest < seen or not there:
            if seen:
                logger.warning(
                    "the bucket has lost the number of a namespace's epoch, so a new one begins and what is stored of "
                    "it is not found any more: exempt %s from lifecycle rules. namespace=%s seen=%d there=%d",
                    EPOCHS,
                    digest.hex(),
                    seen,
                    highest,
                )
            self._store.put(self._path(digest, self._fresh(digest, there)), NOTE)
            there = self._numbers(digest)  # another machine may have done the same: the higher number counts for both
            highest = self._highest(there)
        try:
            self._delete_below(highest, there)
            if time.time() - there[highest].modified_s > REFRESH_S:
                self._renew(digest, highest)
        except TierUnavailable as exc:  # a bucket that may only be read from: those who write to it do it
            logger.info("a namespace's epoch was read and could not be tended. %s", exc)
        return highest

    def _refresh(self, digest: bytes, number: int) -> None:
        """Keep the number from ageing. One that is gone stays so: a retirement may have come and gone with it."""
        try:
            if self._highest(self._numbers(digest)) == number:
                self._renew(digest, number)
        except (TierUnavailable, Closed) as exc:
            logger.info("a namespace's epoch was not written anew; next_try_s=%g %s", REFRESH_S, exc)

    def _renew(self, digest: bytes, number: int) -> None:
        self._store.put(self._path(digest, number), NOTE)
        there = self._numbers(digest)
        self._delete_below(self._highest(there), there)  # retired at this moment, it must not come back

    def _numbers(self, digest: bytes) -> dict[int, ObjectInfo]:
        found = ((_NUMBER.fullmatch(info.path), info) for info in self._store.list(self._folder(digest)))
        return {int(match[1]): info for match, info in found if match is not None}

    def _fresh(self, digest: bytes, there: dict[int, ObjectInfo]) -> int:
        """A number above all others that nobody has used; where some were forgotten, the next one may have been."""
        highest, seen = self._highest(there), self._local.seen(digest)
        if there and highest >= seen:
            return highest + 1
        return seen + 1 + secrets.randbits(JUMP_BITS if seen else FIRST_BITS)

    @staticmethod
    def _highest(there: dict[int, ObjectInfo]) -> int:
        return max(there, default=0)

    def _delete_below(self, number: int, there: dict[int, ObjectInfo]) -> None:
        self._store.delete([info.path for below, info in there.items() if below < number])

    @staticmethod
    def _folder(digest: bytes) -> str:
        return f"{EPOCHS}{digest.hex()}/"

    def _path(self, digest: bytes, number: int) -> str:
        return f"{self._folder(digest)}{number}"
