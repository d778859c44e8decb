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
clock, nothing drawn. Called by ``tiering.py``.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

import msgspec

SAMPLES_MAX: Final = 1 << 15
"""Chunks that are sampled at most, 10 MB. With half as many a drawn trace of Zipf's law was missed by 1.5 points."""

HALVINGS_MAX: Final = 24
"""The lowest rate is one chunk of 16 million."""

DROPPED_SHARE: Final = 8
"""Of a full sample that covers the span, one part in so many goes: the chunks that were used longest ago."""

DROPPED_AT_ONCE: Final = 1024
"""Of what is to go from the sample, so many chunks go with each use of others: half a millisecond."""

MOMENTS_PER_SAMPLE: Final = 2
"""Moments that are told apart before the empty ones are left out: that takes milliseconds, and must be rare."""

STORED_TOGETHER: Final = 16
"""Chunks that came one after the other, with no use between them, and count as used at one moment: two of the
parts in which the server takes a message in. With a moment for each, stores alone would fill the list of moments."""

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


class _Moment(msgspec.Struct, eq=False, gc=False):
    """What was used at one time: the chunks that were used last then refer to it.

    So its number may change without a look at any of them. The garbage collector does not know of moments (``Entry``).
    """

    number: int
    chunk_bytes: int


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
        self._last_uses: dict[bytes, _Moment] = {}  # of each sampled chunk
        self._leaving: list[bytes] = []  # of these, what is to go, if it was not used after that moment
        self._leaving_until = 0
        self._moments: list[_Moment | None] = []  # oldest first; None: no chunk was used last then
        self._stores: _Moment | None = None  # of what was stored last
        self._stores_left = 0  # chunks that may still join it
        moments_max = -(-samples_max * MOMENTS_PER_SAMPLE // GROUP) * GROUP
        self._left_bytes = [0] * moments_max  # by moment: of the chunks that were used last then
        self._group_bytes = [0] * (moments_max // GROUP)  # by group of moments

    @property
    def rate(self) -> float:
        """The share of all keys that is sampled now."""
        return 1 / (1 << self._halvings)

    @property
    def sample_count(self) -> int:
        """Chunks that are sampled now."""
        return len(self._last_uses)

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
        if not is_sampled or key in self._last_uses or namespace not in self._curves:
            return
        newest = self._moments[-1] if self._moments else None
        if newest is not None and newest is self._stores and newest.chunk_bytes == chunk_bytes and self._stores_left:
            self._stores_left -= 1
            self._last_uses[key] = newest
            self._add_bytes(newest, chunk_bytes)
            self._keep_size()
        else:
            self._use((key,), chunk_bytes, None)
            self._stores, self._stores_left = self._moments[-1], STORED_TOGETHER - 1

    def _use(self, keys: Sequence[bytes], chunk_bytes: int, curve: Curve | None) -> None:
        limit = self._limit
        moment = _Moment(len(self._moments), chunk_bytes)
        sampled = dict.fromkeys([key for key in keys if key < limit] if self._halvings else keys, moment)
        if not sampled:
            return
        runs = [(before, len(list(run))) for before, run in groupby(map(self._last_uses.get, sampled))]
        if curve is not None:
            self._count(runs, chunk_bytes, curve)
        for before, count in runs:
            if before is not None:
                self._take_chunks(before, count)
        self._moments.append(moment)
        self._add_bytes(moment, len(sampled) * chunk_bytes)
        self._last_uses.update(sampled)
        self._keep_size()
        if len(self._moments) == len(self._left_bytes):
            self._renumber()

    def _keep_size(self) -> None:
        self._drop(DROPPED_AT_ONCE)
        while len(self._last_uses) > self._samples_max:
            if not self._leaving:
                self._shrink()
            self._drop(max(DROPPED_AT_ONCE, len(self._last_uses) - self._samples_max))

    def _count(self, runs: Iterable[tuple[_Moment | None, int]], chunk_bytes: int, curve: Curve) -> None:
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

    def _bytes_since(self, moment: _Moment) -> int:
        """Sampled bytes that were used after a moment."""
        group, newest = moment.number // GROUP, len(self._moments) // GROUP
        newer = sum(self._group_bytes[group + 1 : newest + 1])
        return newer + sum(self._left_bytes[moment.number + 1 : (group + 1) * GROUP])

    def _add_bytes(self, moment: _Moment, size_bytes: int) -> None:
        self._left_bytes[moment.number] += size_bytes
        self._group_bytes[moment.number // GROUP] += size_bytes

    def _take_chunks(self, moment: _Moment, count: int) -> None:
        """So many chunks were used later, or have gone."""
        self._add_bytes(moment, -count * moment.chunk_bytes)
        if not self._left_bytes[moment.number]:
            self._moments[moment.number] = None

    def _shrink(self) -> None:
        """The sample is full: sample half as many keys, or forget what was used longest ago if it covers the span.

        What is to go does so bit by bit; until then distances come out a little too long.
        """
        covered_bytes = sum(self._group_bytes) << self._halvings
        kept_bytes = covered_bytes - covered_bytes // DROPPED_SHARE
        if kept_bytes < self._span_bytes and self._halvings < HALVINGS_MAX:
            self._halvings += 1
            limit = self._limit = (1 << 64 - self._halvings).to_bytes(8, "big")
            self._leaving = [key for key in self._last_uses if key >= limit]
            self._leaving_until = len(self._moments)
        else:
            last = self._leaving_until = self._last_of_the_oldest(len(self._last_uses) // DROPPED_SHARE)
            self._leaving = [key for key, moment in self._last_uses.items() if moment.number <= last]

    def _last_of_the_oldest(self, count: int) -> int:
        """The number of the moment in which the chunk was used last that so many others were used before."""
        for group, group_bytes in enumerate(self._group_bytes):
            for moment in self._moments[group * GROUP : (group + 1) * GROUP] if group_bytes else ():
                if moment is not None:
                    count -= self._left_bytes[moment.number] // moment.chunk_bytes
                    if count < 0:
                        return moment.number
        return -1

    def _drop(self, count: int) -> None:
        """Some of what is to go leaves the sample."""
        for key in self._leaving[-count:]:
            moment = self._last_uses[key]
            if moment.number <= self._leaving_until:
                del self._last_uses[key]
                self._take_chunks(moment, 1)
        del self._leaving[-count:]

    def _renumber(self) -> None:
        """Leave out the moments since which all of their chunks were used, or have gone."""
        until = self._leaving_until + 1
        self._leaving_until = sum(moment is not None for moment in self._moments[:until]) - 1
        left_bytes = list(filter(None, self._left_bytes))
        moments = [moment for moment in self._moments if moment is not None]
        for number, moment in enumerate(moments):
            moment.number = number
        self._moments = [*moments]
        left_bytes += [0] * (len(self._left_bytes) - len(left_bytes))
        self._left_bytes = left_bytes
        self._group_bytes = [sum(left_bytes[first : first + GROUP]) for first in range(0, len(left_bytes), GROUP)]

    def check_integrity(self) -> None:
        """Assert that the bytes of moments are those of the chunks."""
        left = Counter(moment.number for moment in self._last_uses.values())
        for number, moment in enumerate(self._moments):
            assert moment is None or moment.number == number, "a moment has another one's number"
            left_bytes = 0 if moment is None else left[number] * moment.chunk_bytes
            assert self._left_bytes[number] == left_bytes, "bytes of a moment drifted"
        assert all(self._moments[moment.number] is moment for moment in self._last_uses.values()), "a moment was left"
        for group in range(len(self._moments) // GROUP + 1):
            group_bytes = sum(self._left_bytes[group * GROUP : (group + 1) * GROUP])
            assert self._group_bytes[group] == group_bytes, "bytes of a group drifted"
        assert len(self._last_uses) <= self._samples_max, "the sample passes its limit"
        assert len(self._moments) < len(self._left_bytes), "there is no room for one more moment"


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
