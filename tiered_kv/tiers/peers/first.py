"""Peers in front of a bucket: what another machine has comes from there, all else as without peers.

They are one tier, for the bucket is where everything is kept, and where a prefix ends is one question. Writes, deletes,
limits, the breaker and ``contains``, which says whether a blob need not be uploaded, are the bucket's. Owns which of
the two is asked. Stacked by ``tiers/open.py``.
"""

import dataclasses
from collections.abc import Callable, Sequence

from tiered_kv.errors import ChunkCorrupt, ChunkMismatch, TierUnavailable
from tiered_kv.tiers.base import BlobName, Tier, TierWrapper
from tiered_kv.tiers.peers.peer import NAMES_MAX


class PeersFirst(TierWrapper):
    """A bucket that is asked for what peers do not give. Whatever becomes of a peer, the bucket is asked next.

    Threads: any.
    """

    def __init__(self, peers: Tier, bucket: Tier, is_promised: Callable[[BlobName], bool]) -> None:
        """Take both, which are closed with this.

        Args:
            peers: Verifies by itself.
            is_promised: Whether a peer has said that it has a blob. No other is asked of peers: each could be.
        """
        super().__init__(bucket)
        self.traits = dataclasses.replace(bucket.traits, names_at_once=NAMES_MAX, is_asked_while_out=True)
        self._peers = peers
        self._is_promised = is_promised

    def get_into(self, name: BlobName, buffer: memoryview) -> bool:
        if self._is_promised(name):
            try:
                if self._peers.get_into(name, buffer):
                    return True
            except (ChunkCorrupt, ChunkMismatch, TierUnavailable):
                pass  # said in the log where it concerns the peer, and counted as the peers'
        return self.inner.get_into(name, buffer)

    def count_held(self, names: Sequence[BlobName], hint: str = "") -> int:
        """How many of these blobs anybody has, from the first on: what peers lack the bucket may have.

        Raises:
            TierUnavailable: The bucket failed, and no peer has any.
        """
        try:
            count = self._peers.count_held(names, hint)
        except TierUnavailable:  # as above
            count = 0
        try:
            return count + self._count_in_bucket(names[count:])
        except TierUnavailable:
            if not count:
                raise
            return count  # these can be read; of the others nobody knows, and the bucket's breaker has heard of it

    def _count_in_bucket(self, names: Sequence[BlobName]) -> int:
        """The first name alone, because most prompts are not there at all; then ever larger steps, then halves.

        What a bucket holds is closed under prefixes, up to holes; one that is skipped is a miss when it is read.
        """
        low, high, step, is_bounded = 0, len(names), 1, False
        while low < high:
            place = (low + high - 1) // 2 if is_bounded else min(low + step, high) - 1
            if self.inner.contains(names[place]):
                low, step = place + 1, 2 * step
            else:
                high, is_bounded = place, True
        return low

    def flush(self) -> None:
        try:
            self._peers.flush()
        finally:
            self.inner.flush()

    def close(self) -> None:
        try:
            self._peers.close()
        finally:
            self.inner.close()
