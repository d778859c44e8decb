"""Miss-ratio curves, online: what share of the prompts a cache of another size would find.

SHARDS (Waldspurger, Park, Garthwaite, Ahmad, "Efficient MRC Construction with SHARDS", FAST 2015), the variant of
fixed size: chunks are sampled by their keys, which are hashes, and the reuse distances of the sample, divided by its
rate, are those of all. The reuse distance of a chunk is what was used since its last use, in bytes with itself: an LRU
cache finds it if it has at least that size (Mattson et al. 1970). docs/decisions/0038-miss-ratio-curves.md has figures.

What is special about prefixes:

- A chunk is found only together with the prefix before it. That needs no care here: a parent is used whenever its child
  is, and counts as used after it, so its distance is never longer. What counts is whole prompts, from their roots.
- The chunks of a prompt are used at one moment, a *moment* for short, root youngest. The LRU stack is a list of moments
  with the bytes that are left of each, and a lookup asks for one sum per run of chunks of one moment, not per chunk.

All namespaces share one stack, as they share the tiers, and each has its own histogram of distances. Pure: no I/O, no
clock, nothing drawn. Called by ``tiering.py`` and ``lookups.py``.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

SAMPLES_MAX: Final = 1 << 15
"""Chunks that are sampled at most, 10 MB. With half as many a drawn trace of Zipf's law was missed by 1.5 points."""

HALVINGS_MAX: Final = 24
"""The lowest rate is one chunk of 16 million."""

DROPPED_SHARE: Final = 8
"""Of a full sample that covers the span, one part in so many goes: the chunks that were used longest ago."""

MOMENTS_PER_SAMPLE: Final = 4
"""Moments that are told apart before the empty ones are left out: that takes milliseconds, and must be rare."""

GROUP: Final = 256
"""Moments whose bytes are also kept as one sum."""

STEPS: Final = 16
"""Distances are counted in steps of a 16th to a 32nd of their size."""

NAMESPACES_MAX: Final = 16
"""With curves; of more, that which was looked up longest ago loses its own. All are told, so there must be few."""

COUNTED_MAX: Final = 1 << 22
"""Chunks of looked up prompts after which a namespace's counts are halved: what is older fades. 10,000 prompts of 100k
tokens, in chunks of 256."""

ASKED_ANEW_MAX: Final = 1 << 12
"""Ended lookups that are expected once more."""


@dataclass(slots=True)
class Curve:
    """What is known of one namespace's prompts.

    Attributes:
        chunks: Of prompts that were looked up.
        sampled: The same as the sample has it: of those in it, each counts for as many as the rate says.
        distances: How many of the latter have a reuse distance, by :func:`_bucket`.
    """

    chunks: float = 0.0
    sampled: float = 0.0
    distances: array[float] = field(default_factory=lambda: array("d", bytes(8 * (_bucket((1 << 63) - 1) + 1))))

    def found_share(self, size_bytes: int) -> float:
        """Share of the prompts' chunks that an LRU cache of this size would have found; 0 if there were none.

        The sample has more or fewer chunks than it should, most of all because a few of them, the beginnings of
        many prompts, are asked for all the time: the difference is counted as found at once (SHARDS-adj).
        """
        if not self.chunks or size_bytes <= 0:
            return 0.0
        last = _bucket(size_bytes)
        low, width = _range(last)
        found = sum(self.distances[:last]) + self.distances[last] * (size_bytes - low + 1) / width
        return min(1.0, max(0.0, (found + self.chunks - self.sampled) / self.chunks))

    def halve(self) -> None:
        """Let all counts weigh half of what they do."""
        self.chunks /= 2
        self.sampled /= 2
        self.distances = array("d", (count / 2 for count in self.distances))


class MissRatioCurves:
    """The sampled LRU stack of all prompts, and a curve for each namespace.

    A call takes time for the keys that it is given, and now and then a few milliseconds for the whole sample.

    Units: bytes. Threads: one owner, tiering.
    """

    def __init__(self, span_bytes: int, samples_max: int = SAMPLES_MAX) -> None:
        """Start empty.

        Args:
            span_bytes: The largest cache of interest; what was used before more than that is forgotten, so that the
                rate does not fall for ever.
            samples_max: Chunks that are sampled at most.
        """
        self._span_bytes = span_bytes
        self._samples_max = samples_max
        self._curves: OrderedDict[bytes, Curve] = OrderedDict()
        self._halvings = 0
        self._limit = b""  # keys below it are sampled; unused while all are
        self._moments: dict[bytes, int] = {}  # of the last use of each sampled chunk
        moments_max = -(-samples_max * MOMENTS_PER_SAMPLE // GROUP) * GROUP
        self._left_bytes = [0] * moments_max  # by moment: of the chunks that were used last then
        self._chunk_bytes = [0] * moments_max  # by moment: of one of them
        self._group_bytes = [0] * (moments_max // GROUP)  # by group of moments
        self._next = 0

    @property
    def rate(self) -> float:
        """The share of all keys that is sampled now."""
        return 1 / (1 << self._halvings)

    @property
    def sample_count(self) -> int:
        """Chunks that are sampled now."""
        return len(self._moments)

    def curves(self) -> dict[bytes, Curve]:
        """By namespace; what was looked up most recently comes last. The caller does not change them."""
        return dict(self._curves)

    def looked_up(self, namespace: bytes, keys: Sequence[bytes], chunk_bytes: int) -> None:
        """Count and use the chunks of a prompt, given whole and root first, whether they are held or not."""
        if not keys:
            return
        curve = self._curves.get(namespace)
        if curve is None:
            curve = self._curves[namespace] = Curve()
            if len(self._curves) > NAMESPACES_MAX:
                self._curves.popitem(last=False)
        self._curves.move_to_end(namespace)
        if curve.chunks + len(keys) > COUNTED_MAX:
            curve.halve()
        curve.chunks += len(keys)
        self._use(keys, chunk_bytes, curve)

    def used(self, keys: Sequence[bytes], chunk_bytes: int) -> None:
        """Use the chunks of a prompt that was counted before."""
        self._use(keys, chunk_bytes, None)

    def stored(self, namespace: bytes, key: bytes, chunk_bytes: int) -> None:
        """A chunk came. Use it if no prompt had it yet: an answer's is found by the next prompt, which has it."""
        is_sampled = not self._halvings or key < self._limit
        if is_sampled and key not in self._moments and namespace in self._curves:
            self._use((key,), chunk_bytes, None)

    def _use(self, keys: Sequence[bytes], chunk_bytes: int, curve: Curve | None) -> None:
        limit = self._limit
        sampled = dict.fromkeys([key for key in keys if key < limit] if self._halvings else keys, self._next)
        if not sampled:
            return
        runs = [(moment, len(list(run))) for moment, run in groupby(map(self._moments.get, sampled))]
        if curve is not None:
            self._count(runs, chunk_bytes, curve)
        for moment, count in runs:
            if moment is not None:
                self._add_bytes(moment, -count * self._chunk_bytes[moment])
        self._chunk_bytes[self._next] = chunk_bytes
        self._add_bytes(self._next, len(sampled) * chunk_bytes)
        self._moments.update(sampled)
        self._next += 1
        while len(self._moments) > self._samples_max:
            self._shrink()
        if self._next == len(self._left_bytes):
            self._rebuild(self._moments)

    def _count(self, runs: Iterable[tuple[int | None, int]], chunk_bytes: int, curve: Curve) -> None:
        """Count the distances of a prompt's sampled chunks, as of before it is used::

        what was used since the run's moment      its chunks nearer to the root      the chunk
        ------------------------------------      -----------------------------      ---------
        sampled bytes / rate                  +   sampled bytes / rate            +  its bytes
        """
        weight = 1 << self._halvings
        for moment, count in runs:
            curve.sampled += count * weight
            if moment is None:  # the first use that is known of
                continue
            distance = self._bytes_since(moment) * weight + chunk_bytes
            step = chunk_bytes * weight
            while count and distance <= self._span_bytes:
                bucket = _bucket(distance)
                low, width = _range(bucket)
                inside = min(count, -(-(low + width - distance) // step))
                curve.distances[bucket] += inside * weight
                count -= inside
                distance += inside * step

    def _bytes_since(self, moment: int) -> int:
        """Sampled bytes that were used after a moment."""
        group, newest = moment // GROUP, self._next // GROUP
        newer = sum(self._group_bytes[group + 1 : newest + 1])
        return newer + sum(self._left_bytes[moment + 1 : (group + 1) * GROUP])

    def _add_bytes(self, moment: int, size_bytes: int) -> None:
        self._left_bytes[moment] += size_bytes
        self._group_bytes[moment // GROUP] += size_bytes

    def _shrink(self) -> None:
        """The sample is full: sample half as many keys, or forget what was used longest ago if it covers the span."""
        covered_bytes = sum(self._group_bytes) << self._halvings
        kept_bytes = covered_bytes - covered_bytes // DROPPED_SHARE
        if kept_bytes < self._span_bytes and self._halvings < HALVINGS_MAX:
            self._halvings += 1
            limit = self._limit = (1 << 64 - self._halvings).to_bytes(8, "big")
            self._rebuild({key: moment for key, moment in self._moments.items() if key < limit})
        else:
            last = sorted(self._moments.values())[len(self._moments) // DROPPED_SHARE]
            self._rebuild({key: moment for key, moment in self._moments.items() if moment > last})

    def _rebuild(self, kept: dict[bytes, int]) -> None:
        """Keep only these chunks, and number their moments anew."""
        numbers = {moment: number for number, moment in enumerate(sorted(set(kept.values())))}
        self._chunk_bytes[: len(numbers)] = [self._chunk_bytes[moment] for moment in numbers]
        self._moments = {key: numbers[moment] for key, moment in kept.items()}
        self._next = len(numbers)
        self._left_bytes = [0] * len(self._left_bytes)
        self._group_bytes = [0] * len(self._group_bytes)
        for moment, count in Counter(self._moments.values()).items():
            self._add_bytes(moment, count * self._chunk_bytes[moment])

    def check_integrity(self) -> None:
        """Assert that the bytes of moments are those of the chunks."""
        left = Counter(self._moments.values())
        for moment in range(self._next):
            left_bytes = left[moment] * self._chunk_bytes[moment]
            assert self._left_bytes[moment] == left_bytes, "bytes of a moment drifted"
        for group in range(self._next // GROUP + 1):
            group_bytes = sum(self._left_bytes[group * GROUP : (group + 1) * GROUP])
            assert self._group_bytes[group] == group_bytes, "bytes of a group drifted"
        assert len(self._moments) <= self._samples_max, "the sample passes its limit"
        assert self._next < len(self._left_bytes), "there is no room for one more moment"


class OpenPrompts:
    """Prompts that are being looked up, by the key of their last chunk: who asks again is not counted again.

    A scheduler looks a prompt up anew when its leases ended or its answer is old, before or after the first lookup
    ends. Of several requests that ask for one prompt at once, the first counts: none finds what no other has stored.

    Threads: one owner, tiering.
    """

    def __init__(self) -> None:
        self._open: Counter[bytes] = Counter()
        self._asked_anew: OrderedDict[bytes, None] = OrderedDict()

    def begins(self, last: bytes) -> bool:
        """A lookup begins; says whether it is the prompt's first."""
        is_first = not self._open[last] and last not in self._asked_anew
        self._asked_anew.pop(last, None)
        self._open[last] += 1
        return is_first

    def ends(self, last: bytes, *, is_asked_anew: bool) -> None:
        """A lookup ended; its prompt may be looked up once more for the same request."""
        self._open[last] -= 1
        if self._open[last]:
            return
        del self._open[last]
        if is_asked_anew:
            self._asked_anew[last] = None
            if len(self._asked_anew) > ASKED_ANEW_MAX:
                self._asked_anew.popitem(last=False)


def _bucket(size_bytes: int) -> int:
    """The number of the step in which a size lies: exact below 32, then 16 steps for every doubling."""
    shift = max(0, size_bytes.bit_length() - STEPS.bit_length())
    return shift * STEPS + (size_bytes >> shift)


def _range(bucket: int) -> tuple[int, int]:
    """The smallest size of a step, and how many sizes it has."""
    shift = max(0, bucket // STEPS - 1)
    return (bucket - shift * STEPS) << shift, 1 << shift
