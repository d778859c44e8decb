"""The tier of other machines' disks: a blob that a peer has comes from there, verified, or it is a miss.

Read only: nothing is put, deleted or listed, and what a peer gives wrongly is neither believed nor removed. Owns the
order in which peers are asked. Verifies by itself, peer by peer, so that a bad blob of one leaves room for the next.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tiered_kv.chunks.header import BlobFormat
from tiered_kv.errors import CapacityExceeded, ChunkCorrupt, ChunkMismatch, Closed, TierUnavailable
from tiered_kv.tiers.base import BlobInfo, BlobName, Tier, TierTraits, Usage
from tiered_kv.tiers.object.medium import Deadline
from tiered_kv.tiers.peers.peer import Peer

QUESTION_S: Final = 0.5
"""Longest wait for "has anybody this blob?", all peers together: a request may be waiting."""

LEAST_S: Final = 0.1
"""With less time than this no further peer is asked: its breaker would open for the slowness of another one."""


class PeersTier(Tier):
    """Blobs that other machines have.

    Threads: any; the order of the peers is replaced as a whole.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        formats: Callable[[bytes], BlobFormat | None],
        *,
        timeout_s: float,
        io_concurrency: int,
    ) -> None:
        """Ask ``peers``, which the tier closes.

        Args:
            timeout_s: Longest time of one read, all peers together.
        """
        self.traits = TierTraits("peers", io_concurrency, is_shared=True, is_read_only=True)
        self._peers = tuple(peers)
        self._formats = formats
        self._timeout_s = timeout_s
        self._is_closed = threading.Event()

    def get_into(self, name: BlobName, buffer: memoryview) -> bool:
        """Read a blob from the first peer that gives the right bytes; False when those that answered have none.

        Raises:
            ChunkMismatch: The namespace is not known here.
            TierUnavailable: No peer answered within the time. The buffer's content is undefined.
        """
        form = self._formats(name.namespace)
        if form is None:
            raise ChunkMismatch(f"no format is known for the namespace. namespace={name.namespace.hex()}")
        return self._first(Deadline(self._timeout_s), lambda peer, left: peer.get_into(name, buffer, form, left))

    def contains(self, name: BlobName) -> bool:
        """Whether a peer says that it has the blob.

        Raises:
            TierUnavailable: No peer answered.
        """
        return self._first(Deadline(min(QUESTION_S, self._timeout_s)), lambda peer, left: peer.contains(name, left))

    def _first(self, deadline: Deadline, ask: Callable[[Peer, Deadline], bool]) -> bool:
        """Ask one peer after the other, the one that had something last first."""
        if self._is_closed.is_set():
            raise Closed("the peers' tier is closed")
        has_answer, reason = False, "no time was left"
        for peer in self._peers:
            if deadline.left_s() < LEAST_S:
                break
            try:
                if ask(peer, deadline):
                    self._peers = (peer, *(other for other in self._peers if other is not peer))
                    return True
                has_answer = True
            except (ChunkCorrupt, ChunkMismatch):
                has_answer = True  # what lies costs a miss; the peer has said so in the log, and counts it
            except TierUnavailable as exc:
                reason = str(exc)
        if not has_answer:
            raise TierUnavailable(f"no peer answers. last={reason}")
        return False

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
        self._is_closed.set()
        for peer in self._peers:
            peer.close()
