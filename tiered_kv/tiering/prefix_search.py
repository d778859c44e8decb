"""How much of a prefix a shared tier has: a k-ary search by probes, because asking for every chunk would be a storm.

A tier that takes many names at once (``TierSpec.names_at_once``) is asked for all of them, in one probe. Of the others:

What a tier holds is closed under prefixes, up to holes (rule 5), so "is chunk i there" is true up to some i and
false behind it. The first probe asks for the first unknown chunk alone, because most prompts are not there at all;
then up to ``PROBES_AT_ONCE`` chunks at a time, evenly spread over what is still unknown. 512 unknown chunks take at
most 22 probes in 4 rounds::

    1       7 of 511             7 of 63              7 of 7
    [0] ->  |  |  |  |  |  |  |  ->  |  |  |  |  |  |  |  ->  |||||||

An answer that is wrong by the time it is used, and a hole, are ordinary misses when the chunk is read. Chunks that are
not there are remembered for a while, so that a prompt that is asked for again costs nothing; so are those that are.

Owns searches, probes in flight and the memory of absences. Must not touch lookups. Called by tiering.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.state_keys import state_records
from tiered_kv.tiering.index import BlobState, Index
from tiered_kv.tiering.stats import Outbox
from tiered_kv.tiering.types import Probe, TierSpec

PROBES_AT_ONCE = 7
SEARCHES_MAX = 256
"""Searches at once; past it a lookup does not search: a storm of new prompts must not become a storm of requests."""

STATES_ASKED_MAX = 4 * PROBES_AT_ONCE
"""Boundaries of one prefix."""

ABSENCES_MAX = 1 << 16
"""Remembered per generation."""

FOUND_BESIDE_MAX = 1 << 18
"""Chunks that are found while the tier is out, until it is back; what is beyond them counts as absent."""


_LOST = frozenset({BlobState.DELETING, BlobState.CORRUPT, BlobState.FOREIGN})


@dataclass(slots=True, eq=False)
class PrefixSearch:
    """One search.

    Attributes:
        low: Chunks before it are there, as far as is known.
        high: Chunks from here on are not, or do not exist.
        lookup: Id of the lookup it works for. That may be closed by now: the rest is for the next one.
        told: Chunks that were taken into the index.
        answers: Of this round, by position.
        waiting: Positions of this round that have no answer yet.
        names_at_once: Blobs that one question may name.
        hint: Where the tier is to look first. Somebody knows more than was remembered: absences do not count.
    """

    namespace: bytes
    keys: Sequence[bytes]
    digests: Sequence[bytes]
    low: int
    high: int
    lookup: int = 0
    told: int = 0
    is_first_round: bool = True
    is_over: bool = False
    answers: dict[int, bool] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    names_at_once: int = 1
    hint: str = ""

    @property
    def is_done(self) -> bool:
        return self.low >= self.high

    def record(self, position: int) -> ChunkRecord:
        """What names the chunk at a position."""
        parent = self.keys[position - 1] if position else self.namespace
        return ChunkRecord(self.namespace, self.keys[position], parent, position, self.digests[position])

    def next_positions(self) -> list[int]:
        """Where to ask in the next round."""
        count = self.high - self.low
        if self.names_at_once > 1:
            return list(range(self.low, min(self.low + self.names_at_once, self.high)))
        if self.is_first_round:
            return [self.low]
        if count <= PROBES_AT_ONCE:
            return list(range(self.low, self.high))
        return [self.low + part * count // (PROBES_AT_ONCE + 1) for part in range(1, PROBES_AT_ONCE + 1)]

    def narrow(self) -> None:
        """Take the round's answers in: the first absence counts, whatever was found behind it."""
        absent = [position for position, is_there in self.answers.items() if not is_there]
        self.high = min([*absent, self.high])
        there = [position for position, is_there in self.answers.items() if is_there and position < self.high]
        self.low = max([position + 1 for position in there], default=self.low)
        self.answers.clear()
        self.is_first_round = False


@dataclass(slots=True, eq=False)
class StateSearch(PrefixSearch):
    """A search for the deepest state along a prefix that is there: boundary by boundary, the deepest first.

    Position ``i`` is the last part of the state behind ``keys[len(keys) - 1 - i]``: where it is, the parts before it
    are. No more than ``STATES_ASKED_MAX`` boundaries are asked for: states are few, and the last ones of a prefix are
    what earlier requests left.

    Attributes:
        parts: Of a state.
        found: The chunk whose state is there; None: no state was found.
    """

    parts: int = 0
    found: ChunkRecord | None = None

    def before(self, position: int) -> ChunkRecord:
        """The chunk in front of the boundary at a position."""
        return PrefixSearch.record(self, len(self.keys) - 1 - position)

    def record(self, position: int) -> ChunkRecord:
        return state_records(self.before(position), self.parts)[-1]

    def next_positions(self) -> list[int]:
        return list(range(self.low, min(self.low + PROBES_AT_ONCE, self.high)))

    def narrow(self) -> None:
        """Take the round's answers in: the deepest state that is there ends the search."""
        there = [position for position, is_there in self.answers.items() if is_there]
        if there:
            self.found = self.before(min(there))
        self.low = self.high if there else max([*self.answers, self.low - 1]) + 1
        self.answers.clear()


class PrefixSearches:
    """All searches of one shared tier.

    Threads: one owner, tiering.
    """

    def __init__(self, tier: int, spec: TierSpec, index: Index, outbox: Outbox) -> None:
        """No search runs; ``tier`` is the number of the shared tier."""
        self.tier = tier
        self._spec = spec
        self._index = index
        self._jobs = outbox.jobs
        self._counters = outbox.counters
        self._count = 0
        self._probing: dict[bytes, list[tuple[PrefixSearch, int]]] = {}  # by key: who waits for the answer
        self._absent: dict[bytes, None] = {}
        self._absent_before: dict[bytes, None] = {}

    def begin(
        self, namespace: bytes, keys: Sequence[bytes], digests: Sequence[bytes], low: int, hint: str = ""
    ) -> PrefixSearch | None:
        """Look for chunks from ``low`` on, first where the hint says; None where there is nothing to ask.

        The caller calls :meth:`advance` next.
        """
        if low >= len(keys) or not self._may_ask or (self._is_absent(keys[low]) and not hint):
            return None
        if self._count >= SEARCHES_MAX:
            self._counters["search_refused"] += 1
            return None
        self._counters["searches"] += 1
        self._count += 1
        return PrefixSearch(
            namespace, keys, digests, low, len(keys), told=low, names_at_once=self._spec.names_at_once, hint=hint
        )

    def begin_states(
        self, namespace: bytes, keys: Sequence[bytes], digests: Sequence[bytes], above: int, parts: int
    ) -> StateSearch | None:
        """Look for the deepest state behind more than ``above`` chunks of a prefix; None where there is nothing to ask.

        The caller calls :meth:`advance` next.
        """
        count = min(len(keys) - above, STATES_ASKED_MAX)
        if count <= 0 or not self._may_ask:
            return None
        if self._count >= SEARCHES_MAX:
            self._counters["search_refused"] += 1
            return None
        self._counters["state_searches"] += 1
        self._count += 1
        return StateSearch(namespace, keys, digests, 0, count, parts=parts)

    def advance(self, search: PrefixSearch) -> None:
        """Ask the next round's questions. Afterwards the search is done, or waits for at least one probe."""
        if not self._may_ask:
            search.high = search.low
        while not search.is_done and not search.waiting:
            asked = [search.record(p) for p in search.next_positions() if self._must_ask(search, p)]
            at_once = search.names_at_once
            for start in range(0, len(asked), at_once):
                self._counters["probes"] += 1
                self._jobs.append(Probe(self.tier, tuple(asked[start : start + at_once]), search.hint))
            if not search.waiting:
                search.narrow()  # all answers were known
        if search.is_done:
            self._end(search)

    def probed(self, job: Probe, held: int | None) -> list[PrefixSearch]:
        """A probe ended; returns the searches whose round it completed, narrowed, for the caller to go on with.

        Args:
            held: How many of its blobs are there, from the first on; None: it got no answer.
        """
        if held is None and self._is_out and self._spec.is_asked_while_out:
            held = 0  # what has no answer may be there once the tier is back; until then it is with nobody else
        if held is not None and held < len(job.records):
            self.count_as_absent(job.records[held].key)  # those behind it were not looked at
        completed = []
        for index, record in enumerate(job.records):
            for search, position in self._probing.pop(record.key):
                search.waiting.discard(position)
                if held is None:
                    search.high = search.low  # nobody knows: no more questions, and nothing is remembered
                search.answers[position] = held is not None and index < held
                if not search.waiting:
                    if not search.is_done:
                        search.narrow()
                    completed.append(search)
        return completed

    def stop(self, search: PrefixSearch) -> None:
        """The rest of the answer is of no use."""
        search.high = search.low
        if not search.waiting:
            self._end(search)

    def switched(self) -> None:
        """The tier is out from now on, or back: neither what was found beside it nor what was not counts any more."""
        self._index.found_beside[self.tier].clear()
        self._absent, self._absent_before = {}, {}

    def found(self, key: bytes) -> None:
        """A search found a chunk: while the tier is out, beside it."""
        beside = self._index.found_beside[self.tier]
        if self._is_out and self._spec.is_asked_while_out and len(beside) < FOUND_BESIDE_MAX:
            beside.add(key)

    @property
    def _is_out(self) -> bool:
        return not self._index.readable[self.tier]

    @property
    def _may_ask(self) -> bool:
        return not self._is_out or self._spec.is_asked_while_out

    def age_absences(self) -> None:
        """Forget what was found absent before the last call; a steady pace of calls bounds how long it counts."""
        self._absent_before, self._absent = self._absent, {}

    def _end(self, search: PrefixSearch) -> None:
        if not search.is_over:
            search.is_over = True
            self._count -= 1

    def _must_ask(self, search: PrefixSearch, position: int) -> bool:
        """Have a position answered: by what is known, by a probe that is under way, or by one that has to begin."""
        key = search.record(position).key
        entry = self._index.get(key)
        state = BlobState.ABSENT if entry is None else entry.blobs[self.tier]
        if state is BlobState.PRESENT and (not self._is_out or key in self._index.found_beside[self.tier]):
            search.answers[position] = True
        elif (self._is_absent(key) and not search.hint) or state in _LOST:
            search.answers[position] = False
        else:
            search.waiting.add(position)
            askers = self._probing.setdefault(key, [])
            askers.append((search, position))
            return len(askers) == 1
        return False

    def _is_absent(self, key: bytes) -> bool:
        return key in self._absent or key in self._absent_before

    def count_as_absent(self, key: bytes) -> None:
        """The tier is not asked for a chunk for a while."""
        if len(self._absent) >= ABSENCES_MAX:
            self.age_absences()
        self._absent[key] = None

    def check_integrity(self) -> None:
        """Assert that every search that waits is waited for."""
        searches = {id(search): search for askers in self._probing.values() for search, _ in askers}
        assert self._count == len(searches), "searches drifted"
        for search in searches.values():
            asked = {p for askers in self._probing.values() for s, p in askers if s is search}
            assert asked == search.waiting, "a probe was lost"
