"""The tier of other machines: a blob that a peer has comes from there, verified, or it is a miss.

Read only: nothing is put, deleted or listed, and what a peer gives wrongly is neither believed nor removed. Owns the
order in which peers are asked. Verifies by itself, peer by peer, so that a bad blob of one leaves room for the next.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tiered_kv.chunks.header import BlobFormat
from tiered_kv.config import PEERS_MAX
from tiered_kv.errors import CapacityExceeded, ChunkCorrupt, ChunkMismatch, Closed, TierBusy, TierUnavailable
from tiered_kv.tiers.base import BlobInfo, BlobName, Tier, TierTraits, Usage
from tiered_kv.tiers.object.medium import Deadline
from tiered_kv.tiers.peers.found import FIND_S, PeerFinder
from tiered_kv.tiers.peers.peer import NAMES_MAX, Peer

logger = logging.getLogger(__name__)

QUESTION_S: Final = 0.5
"""Longest wait for "how much of this prefix has anybody?", all peers together: a request may be waiting."""

LEAST_S: Final = 0.1
"""With less time than this no further peer is asked: its breaker would open for the slowness of another one."""

PROMISES_MAX: Final = 1 << 16
"""Blobs of which is remembered who said that it has them: a hint, where to ask first."""


class _Promise:
    """A peer's answer that it has some blobs."""

    __slots__ = ("peer",)

    def __init__(self, peer: Peer) -> None:
        self.peer = peer


class PeersTier(Tier):
    """Blobs that other machines have.

    Threads: any; the peers in their order are replaced as a whole, the promises are guarded by a lock; ``flush`` is
    called by one at a time, and has one look at a time.
    """

    def __init__(
        self,
        finder: PeerFinder,
        connect: Callable[[str], Peer],
        formats: Callable[[bytes], BlobFormat | None],
        *,
        timeout_s: float,
        io_concurrency: int,
        monotonic: Callable[[], float] = time.monotonic,
        is_alone: bool = True,
    ) -> None:
        """Ask the peers that are found: at once, if the settings name them all, else at the first flush.

        Args:
            connect: Makes the peer of a URL, which the tier closes.
            timeout_s: Longest time of one read, all peers together.
            is_alone: No bucket is asked next: what a peer promised and does not give is sought at the others.
        """
        self.traits = TierTraits("peers", io_concurrency, is_shared=True, is_read_only=True, names_at_once=NAMES_MAX)
        self._finder = finder
        self._connect = connect
        self._monotonic = monotonic
        self._formats = formats
        self._timeout_s = timeout_s
        self._is_closed = threading.Event()
        self._lock = threading.Lock()
        self._peers: tuple[Peer, ...] = ()
        self._promises: dict[bytes, _Promise] = {}  # by key: who said last that it has the blob
        self._is_alone = is_alone
        self._look: threading.Thread | None = None
        self._find_due_s = monotonic()
        if finder.is_fixed:
            self._find()
            self._find_due_s = math.inf

    def get_into(self, name: BlobName, buffer: memoryview) -> bool:
        """Read a blob from the first peer that gives the right bytes; False when those that answered have none.

        Raises:
            ChunkMismatch: The namespace is not known here.
            TierUnavailable: No peer answered within the time. The buffer's content is undefined.
            TierBusy: One did, and had no time for it.
        """
        form = self._formats(name.namespace)
        if form is None:
            raise ChunkMismatch(f"no format is known for the namespace. namespace={name.namespace.hex()}")
        with self._lock:
            promise = self._promises.get(name.key)
        holder = None if promise is None else promise.peer

        def ask(peer: Peer, left: Deadline) -> bool:
            try:
                is_given = peer.get_into(name, buffer, form, left)
            except (ChunkCorrupt, ChunkMismatch):
                self._broken(promise, peer, name)
                raise
            if not is_given:
                self._broken(promise, peer, name)
            return is_given

        return self._first(Deadline(self._timeout_s), ask, holder, is_alone=holder is not None and not self._is_alone)

    def is_promised(self, name: BlobName) -> bool:
        """Whether a peer has said of late that it has the blob; asks nobody."""
        with self._lock:
            return name.key in self._promises

    def contains(self, name: BlobName) -> bool:
        """Whether a peer says that it has the blob.

        Raises:
            TierUnavailable: No peer answered.
        """
        return self.count_held([name]) == 1

    def count_held(self, names: Sequence[BlobName], hint: str = "") -> int:
        """How many of these blobs the peers say they have, from the first on: what one lacks the next may have.

        Args:
            hint: The URL of the peer that is asked first, if it is one of ours.

        Raises:
            TierUnavailable: No peer answered.
        """
        count = 0

        def ask(peer: Peer, left: Deadline) -> bool:
            nonlocal count
            held = peer.count_held(names[count:], left)
            self._remember(peer, names[count : count + held])
            count += held
            return count == len(names)

        hinted = next((peer for peer in self._peers if peer.url == hint), None)
        self._first(Deadline(min(QUESTION_S, self._timeout_s)), ask, hinted)
        return count

    def _remember(self, peer: Peer, names: Sequence[BlobName]) -> None:
        promise = _Promise(peer)
        with self._lock:
            for name in names if peer in self._peers else ():  # it may be gone by now
                self._promises[name.key] = promise
            while len(self._promises) > PROMISES_MAX:
                del self._promises[next(iter(self._promises))]

    def _broken(self, promise: _Promise | None, peer: Peer, name: BlobName) -> None:
        """The peer did not give what it promised. A promise that came while it was asked is a newer one, and stays."""
        with self._lock:
            if promise is not None and promise.peer is peer and self._promises.get(name.key) is promise:
                del self._promises[name.key]

    def flush(self) -> None:
        """Look for peers, now and then, in a thread of its own: a resolver has no deadline, and others wait."""
        if self._monotonic() >= self._find_due_s and (self._look is None or not self._look.is_alive()):
            self._find_due_s = self._monotonic() + FIND_S
            self._look = threading.Thread(target=self._find, name="tiered_kv-peers", daemon=True)
            self._look.start()

    def _find(self) -> None:
        """Peers that were found before stay what they are, with what is known of them."""
        before = {peer.url: peer for peer in self._peers}
        known = list(before)
        urls = self._finder.find(known)
        found = [before.pop(url) if url in before else self._connect(url) for url in urls]
        with self._lock:
            self._peers = tuple(found)
            gone = set(before.values())
            self._promises = {key: promise for key, promise in self._promises.items() if promise.peer not in gone}
        for url in urls if not self._finder.is_fixed else ():
            if url not in known:
                logger.info("a peer was found. peer=%s", url)
        for peer in gone:
            logger.info("a peer is gone. peer=%s", peer.url)
            peer.close()

    def _first(
        self,
        deadline: Deadline,
        ask: Callable[[Peer, Deadline], bool],
        likely: Peer | None,
        *,
        is_alone: bool = False,
    ) -> bool:
        """Ask one peer after the other until one has it (all): the likely one first, then who had something last.

        Those that are left alone are passed over, or dead ones would hide the living. With ``is_alone`` only the likely
        one is asked.
        """
        if self._is_closed.is_set():
            raise Closed("the peers' tier is closed")
        known = self._peers if likely is None else _in_front(likely, () if is_alone else self._peers)
        has_answer, is_busy, reason = not known, False, "all are left alone"
        for place, peer in enumerate([peer for peer in known if not peer.breaker.is_shut][:PEERS_MAX]):
            if place and deadline.left_s() < LEAST_S:
                break
            try:
                if ask(peer, deadline):
                    self._had_something(peer)
                    return True
                has_answer = True
            except (ChunkCorrupt, ChunkMismatch):
                has_answer = True  # what lies costs a miss; the peer has said so in the log, and counts it
            except TierUnavailable as exc:
                is_busy |= isinstance(exc, TierBusy)
                reason = str(exc)
        if not has_answer:
            raise (TierBusy if is_busy else TierUnavailable)(f"no peer answers. last={reason}")
        return False

    def _had_something(self, peer: Peer) -> None:
        with self._lock:
            if peer in self._peers:  # it may be gone by now
                self._peers = _in_front(peer, self._peers)

    def put(self, name: BlobName, blob: memoryview) -> None:
        """Refuse.

        Raises:
            CapacityExceeded: Always: there is no room in what is only read.
        """
        raise CapacityExceeded(f"peers are read only. key={name.key.hex()} size_bytes={len(blob)}")

    def delete(self, name: BlobName) -> bool:
        """Nothing of ours is there."""
        del name
        return False

    def scan(self) -> Iterator[BlobInfo]:
        """Nothing: peers are not listed."""
        return iter(())

    def usage(self) -> Usage:
        """Nothing of ours is there."""
        return Usage(0, None, 0)

    def close(self) -> None:
        """Close the peers; one that a look finds at this moment is never asked."""
        self._is_closed.set()
        for peer in self._peers:
            peer.close()


def _in_front(peer: Peer, peers: tuple[Peer, ...]) -> tuple[Peer, ...]:
    return (peer, *(other for other in peers if other is not peer))
