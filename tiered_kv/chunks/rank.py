"""One rank's byte range of a slot: the pages of every KV cache group, one group behind the other.

Owns where a group's bytes lie; the copying is ``transfer.py``'s. Called by the worker's copy threads. Block ids of
different groups are different blocks of one pool, also where two groups' layers lie in the same memory.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.chunks.transfer import CopyDone, PagedKV


class RankKV:
    """Moves whole chunks of one rank between vLLM's tensors and a slot.

    Threads: as :class:`PagedKV`.
    """

    def __init__(
        self,
        group_pages: Sequence[Sequence[LayerPage]],
        tensors: Mapping[str, Any],
        stored_blocks: Sequence[int],
    ) -> None:
        """Plan the copies.

        Args:
            group_pages: The layers of every group, in payload order.
            tensors: The registered KV tensor of every layer.
            stored_blocks: For every group, how many blocks of a chunk are stored.

        Raises:
            UnsupportedModel: A tensor cannot be copied (see :class:`PagedKV`).
        """
        self.groups: Final = tuple(
            PagedKV(pages, tensors, blocks) for pages, blocks in zip(group_pages, stored_blocks, strict=True)
        )
        self._block_bytes: Final = tuple(
            group.group_bytes // blocks for group, blocks in zip(self.groups, stored_blocks, strict=True)
        )
        ends = list(accumulate(group.group_bytes for group in self.groups))
        self._ranges: Final = tuple(
            slice(end - group.group_bytes, end) for group, end in zip(self.groups, ends, strict=True)
        )
        self.rank_bytes: Final = ends[-1]

    def gather(self, block_ids: Sequence[Sequence[int]], out: memoryview, started: list[CopyDone]) -> None:
        """Copy one chunk's stored blocks, given per group, into ``out``, which is ``rank_bytes`` long.

        Every copy that begins is added to ``started``, also when a later one cannot begin and raises: until they are
        done, neither the blocks nor the slot may be given to anyone else.
        """
        self._check(out)
        for group, place, ids in zip(self.groups, self._ranges, block_ids, strict=True):
            started.append(group.gather(ids, out[place]))

    def scatter(self, src: memoryview, runs: Sequence[tuple[int, Sequence[int]]], started: list[CopyDone]) -> None:
        """Copy from ``src`` into blocks, given per group as the first stored block to copy and where the blocks go.

        ``started`` as for :meth:`gather`.
        """
        self._check(src)
        for group, place, (first, ids) in zip(self.groups, self._ranges, runs, strict=True):
            if ids:
                started.append(group.scatter(src[place], ids, first))

    def copied_bytes(self, blocks: Sequence[int]) -> int:
        """Size of so many blocks, given per group."""
        return sum(count * size for count, size in zip(blocks, self._block_bytes, strict=True))

    def _check(self, buffer: memoryview) -> None:
        if buffer.nbytes != self.rank_bytes:
            raise ValueError(f"buffer has another size. expected={self.rank_bytes} observed={buffer.nbytes}")

    def note_compute(self) -> None:
        """Remember what the model's thread has queued on its stream: later copies run after it. Free on the CPU."""
        for group in self.groups:
            group.note_compute()
