"""Epochs: how a reset makes old KV unreachable without touching a byte of it.

The base epoch of a namespace is a number. A reset raises it durably, so every later start uses a fresh epoch, and gives
the calling engine a random private epoch that nobody else, nor its own restart, adopts. The number lies in the disk
tier's directory (``epochs.json``, :class:`EpochFile`). With a bucket it lies there (:class:`BucketEpochs`), so that a
reset on one machine counts for all that use the bucket; then the directory also remembers which resets the bucket does
not have yet, and the highest number that was seen there. Sessions use
:class:`Epochs`, with a bucket or without.

**File.** Writing lasts as long as the disk likes (fsync), and every engine's lookups wait for the server's loop: so the
loop hands what is to be written to another thread, and confirms a reset only when that has said that it is durable.

**Bucket.** The epoch in force is the highest number among the objects ``_tiered_kv/epochs/<namespace>/<number>``; a
retirement adds the next one, so it needs no atomic create and two at once do no harm. The bucket is read and written in
the background, because one that does not answer must not hold up the server's loop: a session whose question found no
answer gets an epoch of this machine alone, which is never wrong and never shared. The bucket is asked again as long as
there is such a session, and once it answers the session ends and its engine opens the next, which shares.

The bucket's owner may delete any of these objects, e.g. by a lifecycle rule on their age, and no retired epoch may
come back by that. So the number that begins a namespace, also one that lost its objects, is a random one: what is
forgotten is never guessed again. The objects of retired epochs are deleted, so that none is left to be the highest. A
number below one that this machine has seen is not believed. And the number in force is written anew every few hours,
so that in use it does not age: losing it is safe, but costs the hits.

A retirement that the bucket does not have is owed: this machine remembers it durably, writes it as soon as the bucket
answers, also after a restart, and opens no session with a shared epoch before. Called by ``sessions.py``.
"""

import hashlib
import logging
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from tiered_kv.errors import Closed, ConfigError, TierUnavailable
from tiered_kv.fleet.layout import ROOT
from tiered_kv.machine import machine_name
from tiered_kv.tiers.disk.files import read_small_file, replace_small_file, write_new_file
from tiered_kv.tiers.object.medium import ObjectInfo
from tiered_kv.tiers.object.store import ObjectStore

logger = logging.getLogger(__name__)

EPOCHS_FILE: Final = "epochs.json"
BYTES_MAX: Final = 16 << 20
"""A number of each of 300,000 namespaces."""
_OWED: Final = "owed:"
"""Before a digest: a reset of that namespace is not in the bucket yet."""
_OWED_NAME = re.compile(f"{_OWED}([0-9a-f]{{32}})")
_SEEN: Final = "seen:"
"""Before a digest: the highest number that this machine has seen in the bucket."""
EPOCHS: Final = f"{ROOT}/epochs/"
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
_PRIVATE = re.compile(r"private-[0-9a-f]{32}")

Numbers = dict[str, int]
Submit = Callable[[Callable[[], None]], None]
"""Runs a task in another thread and wakes the server's loop when it is done."""


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
    which nobody finds them. Another that begins the bucket at the same time may still put a higher number after this
    returns: ask again when the copy is made.

    Args:
        digest: The namespace's, computed with an empty epoch.

    Raises:
        TierUnavailable: The bucket does not answer.
    """
    there = read_shared_epochs(store).get(digest.hex(), 0)
    if not there and number:
        store.put(f"{EPOCHS}{digest.hex()}/{number}", NOTE)
        there = read_shared_epochs(store).get(digest.hex(), number)  # another may have begun: the higher number counts
    return there


def begin_directory_with(root: Path, digest: bytes, number: int, *, is_used: bool) -> int | None:
    """The same for a directory that the caller owns; None: its epochs are damaged, and its next server begins afresh.

    Args:
        is_used: Chunks of the namespace are there already, or may be, of other epochs that engines here use.

    Raises:
        TierUnavailable: Its epochs cannot be read or written.
    """
    try:
        numbers = read_epochs(root)
    except ValueError:
        return None
    floor, there = numbers.get("", 0), numbers.get(digest.hex())
    if there is None and not is_used and number > floor:
        there = number - floor
        _save(root / EPOCHS_FILE, numbers | {digest.hex(): there})
    return floor + (there or 0)


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


class EpochFile:
    """Numbers of this machine's directory, by namespace digest (computed with an empty epoch).

    Threads: one owner, the server's loop. One save at a time runs where ``submit`` runs it; it reads nothing of this
    object and hands its result over through ``_saved`` (a deque: appends are atomic).
    """

    def __init__(self, root: Path, submit: Submit = _at_once) -> None:
        """Read the epochs; a damaged file retires every base epoch of the directory.

        Raises:
            ConfigError: The file is sound and says something else: it is somebody's, and stays as it is.
            TierUnavailable: The file cannot be read, or a fresh one cannot be written.
        """
        self.root = root
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
        if not self.is_durable(digest):
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

    def is_durable(self, digest: bytes) -> bool:
        """Whether no reset of the namespace waits to be written."""
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


class BucketEpochs:
    """Numbers of namespaces in a bucket, as objects.

    Threads: any; every call blocks for as long as the bucket does. ``seen`` gives the highest number of a namespace
    that this machine has seen, 0 if none.
    """

    def __init__(self, store: ObjectStore, seen: Callable[[bytes], int]) -> None:
        self._store = store
        self._seen = seen

    def retire(self, digest: bytes) -> None:
        """Add a number above all others.

        Raises:
            TierUnavailable, Closed: The bucket does not answer; call again.
        """
        there = self._numbers(digest)
        number = self._fresh(digest, there)
        self._store.put(self._path(digest, number), NOTE)
        self._delete_below(number, there)  # or it has failed: a rule may leave one of them the highest

    def agreed(self, digest: bytes) -> int:
        """The number in force; where there is none that can be believed, a new one.

        Raises:
            TierUnavailable, Closed: The bucket does not answer.
        """
        there, seen = self._numbers(digest), self._seen(digest)
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

    def refresh(self, digest: bytes, number: int) -> None:
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
        highest, seen = self._highest(there), self._seen(digest)
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


@dataclass(frozen=True, slots=True)
class _Look:
    """A question whether the bucket tells a namespace's epoch by now; ``answers`` is filled by another thread.

    Attributes:
        due_s: When the next one may follow.
    """

    due_s: float
    answers: list[bool]


class Epochs:
    """Base and private epochs of a server's sessions, kept by its directory and, if there is one, by its bucket.

    Threads: one owner, the server's loop. Results of background tasks come through the lists of ``_asked`` and
    ``_looks`` and through ``_told`` (appends are atomic).
    """

    def __init__(
        self,
        file: EpochFile,
        submit: Submit = _at_once,
        store: ObjectStore | None = None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without a ``store`` the file alone counts; with one, for sessions that open while the bucket is away."""
        self._file = file
        self._submit = submit
        self._bucket = None if store is None else BucketEpochs(store, file.seen)
        self._monotonic = monotonic
        self._machine = hashlib.sha256(f"{machine_name()} {file.root}".encode()).hexdigest()[:16]
        self._asked: dict[bytes, list[int | None]] = {}  # by namespace that a session waits for: its answer
        self._owed = {} if store is None else dict.fromkeys(file.owed, 0)  # the retirement that the bucket lacks
        self._retirements = 0
        self._telling: set[bytes] = set()
        self._told: deque[tuple[bytes, int, bool]] = deque()
        self._looks: dict[bytes, _Look] = {}  # by namespace of which a session has an epoch of this machine alone
        self._unsaved: dict[bytes, None] = {}  # retirements that are not durable here yet
        self._in_force: dict[bytes, int] = {}  # what sessions were given last
        self._again_s = monotonic()
        self._refresh_due_s = monotonic() + REFRESH_S

    def base(self, digest: bytes) -> str | None:
        """The epoch that a new session of a namespace uses; None until file and bucket have answered: call again."""
        if self._bucket is None:
            return self._file.base(digest)
        if digest in self._unsaved:
            return None
        if digest not in self._asked:
            if digest in self._owed:
                self._asked[digest] = []
                self._tell(digest)
            else:
                self._ask(digest)
            return None
        if digest in self._telling:
            return None
        if digest in self._owed:  # the bucket did not take it
            self.forget(digest)
            return self._own(digest)
        if not self._asked[digest]:
            return None
        (number,) = self._asked[digest]
        self.forget(digest)  # the next session asks anew: another machine may have reset by then
        if number is None:
            return self._own(digest)
        self._in_force[digest] = number
        self._file.note_seen(digest, number)
        return f"shared-{number}"

    def forget(self, digest: bytes) -> None:
        """Nobody waits for :meth:`base` any more, or who does asks anew: an answer that lay about may be old."""
        self._asked.pop(digest, None)

    def _own(self, digest: bytes) -> str:
        return f"{self._file.base(digest)}-of-{self._machine}"

    def is_own(self, epoch: str) -> bool:
        """Whether this is an epoch of this machine alone, in place of the bucket's."""
        return epoch.endswith(f"-of-{self._machine}")

    def is_back(self, digest: bytes) -> bool:
        """Whether the bucket answers by now what it did not answer when a session opened; call it often.

        It is asked every ``RETRY_S``, for the first time that long after the first call, and that long after True.
        """
        now_s = self._monotonic()
        look = self._looks.get(digest)
        if look is None or (look.answers and now_s >= look.due_s):
            is_first = look is None
            look = self._looks[digest] = _Look(now_s + RETRY_S, [False] if is_first else [])
            if not is_first:
                self._submit(partial(self._look, digest, look.answers))
        if digest in self._owed or digest in self._telling or not any(look.answers):
            return False
        del self._looks[digest]
        return True

    def _look(self, digest: bytes, answers: list[bool]) -> None:
        assert self._bucket is not None
        is_answered = False
        try:
            self._bucket.agreed(digest)
            is_answered = True
        except (TierUnavailable, Closed) as exc:
            logger.debug("the bucket does not tell a namespace's epoch yet. %s", exc)
        finally:
            answers.append(is_answered)

    def retire(self, digest: bytes) -> str:
        """Begin to retire the base epoch in the file and then in the bucket; returns a private one.

        The caller uses the private one once :meth:`is_settled` and :meth:`check` let it.

        Raises:
            TierUnavailable: As :meth:`check`, where that is known at once.
        """
        private = self._file.retire(digest, owes=self._bucket is not None)
        if self._bucket is not None:
            self._retirements += 1
            self._owed[digest] = self._retirements
            self._unsaved[digest] = None
            self._tell_saved()
        return private

    def check(self, private: str) -> None:
        """Fail where the reset behind a private epoch did; the engine needs no more than this machine's memory of it.

        Raises:
            TierUnavailable: It could not be written; the old epoch is still in force.
        """
        self._file.check(private)

    def is_settled(self, digest: bytes) -> bool:
        """Whether file and bucket have the namespace's resets, or the bucket did not take them when it was asked."""
        if self._bucket is None:
            return self._file.is_durable(digest)
        return digest not in self._unsaved and digest not in self._telling

    def turn(self) -> None:
        """Take in what was written, and write again what the bucket did not take. Call it often."""
        self._file.turn()
        if self._bucket is not None:
            self._turn_bucket(self._bucket)

    def _turn_bucket(self, bucket: BucketEpochs) -> None:
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
                self._submit(partial(bucket.refresh, digest, number))

    def _tell_saved(self) -> None:
        """Send the bucket those resets that are durable here by now, so that no crash leaves one half done."""
        for digest in [digest for digest in self._unsaved if self._file.is_durable(digest)]:
            del self._unsaved[digest]
            if digest in self._file.owed:
                self._tell(digest)
            else:  # it could not be written: that reset never was
                self._owed.pop(digest, None)

    def _paid(self, digest: bytes) -> None:
        del self._owed[digest]
        self._file.pay(digest)
        if digest in self._asked:  # what was answered meanwhile may be from before the reset
            self._ask(digest)

    def _tell(self, digest: bytes) -> None:
        if digest not in self._telling and digest not in self._unsaved and digest in self._owed:
            self._telling.add(digest)
            self._submit(partial(self._put_next, digest, self._owed[digest]))

    def _put_next(self, digest: bytes, retirement: int) -> None:
        assert self._bucket is not None
        is_told = False
        try:
            self._bucket.retire(digest)
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
        self._asked[digest] = []
        self._submit(partial(self._answer, digest, self._asked[digest]))

    def _answer(self, digest: bytes, answer: list[int | None]) -> None:
        assert self._bucket is not None
        try:
            answer.append(self._bucket.agreed(digest))
        except (TierUnavailable, Closed) as exc:
            logger.warning("session opens with an epoch of this machine alone: nothing of it is shared. %s", exc)
            answer.append(None)
