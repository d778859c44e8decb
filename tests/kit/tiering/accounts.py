"""Double-entry bookkeeping beside the oracle: what lookups asked for and got, what is where, what came and went.

Nothing in here reads the counts that it checks: they are made from what sessions were told and from the index's states.
"""

from collections import Counter

from tests.kit.tiering.oracle import Asked, World
from tiered_kv.tiering.index import Entry, Index
from tiered_kv.tiering.types import HOST

Place = tuple[int, bytes]


class Accounts:
    """The accounts of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._told: dict[int, set[Place]] = {}
        self._ended: Counter[bytes] = Counter()
        self._asked: Counter[bytes] = Counter()
        self._got: Counter[bytes] = Counter()
        self._is_known: dict[bytes, bool] = {}  # what was got; not of lookups whose session was told nothing more
        self._lost_answers = 0
        self._watch_answers(world.tiering.index)

    # -- lookups -------------------------------------------------------------------------------------------------------

    def release(self, lookup: int) -> None:
        """End a lookup that was told everything."""
        self._count(lookup, is_known=True)
        self._world.release(lookup)

    def close(self, session: int) -> None:
        """End a session, and with it its lookups."""
        is_known = session not in self._world.suspended
        for lookup in [i for i, asked in self._world.lookups.items() if asked.session == session]:
            self._count(lookup, is_known=is_known)
        self.unwatch(session)
        self._world.suspend(session)
        self._world.close(session)

    def _count(self, lookup: int, *, is_known: bool) -> None:
        asked = self._world.lookups[lookup]
        assert asked.update is not None, "a session was not told of its lookup"
        self._note(asked, is_known=is_known)

    def _note(self, asked: Asked, *, is_known: bool) -> None:
        namespace = self._world.spaces[asked.session].namespace
        self._ended[namespace] += 1
        self._asked[namespace] += max(0, len(asked.keys) - asked.start)
        self._got[namespace] += asked.update.ready if asked.update is not None else 0
        self._is_known[namespace] = is_known and self._is_known.get(namespace, True)

    def check_served(self) -> None:
        """Assert that tiering counted the lookups that ended since the last call, by tier, and no others."""
        for asked in self._world.gave_way:  # told nothing more once their leases are to end
            self._note(asked, is_known=False)
        self._world.gave_way.clear()
        served = dict(self._world.tiering.hit_stats.take())
        assert {name: chunks.lookups for name, chunks in served.items()} == self._ended
        for namespace, chunks in served.items():
            assert chunks.asked == self._asked[namespace] <= chunks.prefix
            assert set(chunks.hits) <= {HOST, *self._world.media}
            hits = chunks.hits.total()
            assert hits == self._got[namespace] if self._is_known[namespace] else hits >= self._got[namespace]
            assert hits <= chunks.asked
        for counts in (self._ended, self._asked, self._got):
            counts.clear()
        self._is_known.clear()

    # -- who watches ---------------------------------------------------------------------------------------------------

    def watch(self, session: int) -> None:
        """Have a session told what comes and goes; what is there before, it has to know."""
        self._world.step()
        self._take()
        namespace = self._world.spaces[session].namespace
        self._world.tiering.stats.watch(session, namespace)
        self._told[session] = self._places(namespace)

    def unwatch(self, session: int) -> None:
        """A session that is lost is told nothing more."""
        self._told.pop(session, None)

    def _take(self) -> None:
        for moves in self._world.moves:
            assert moves.session in self._told or moves.session in self._world.suspended, "told without being asked"
            places = {(moves.tier, key) for key in moves.keys}
            told = self._told.get(moves.session, set())
            if moves.is_here:
                told |= places
            else:
                told -= places
        self._world.moves.clear()

    def check_told(self) -> None:
        """Assert that sessions that watch know of every chunk in which tier it is."""
        self._take()
        for session, told in self._told.items():
            assert told == self._places(self._world.spaces[session].namespace), "a session believes what is not so"

    def _places(self, namespace: bytes) -> set[Place]:
        index = self._world.tiering.index
        entries = [entry for entry in index.entries() if entry.record.namespace == namespace]
        return {(tier, entry.record.key) for entry in entries for tier in index.tiers_with(entry)}

    # -- answers -------------------------------------------------------------------------------------------------------

    def _watch_answers(self, index: Index) -> None:
        """Count the answers that go before anybody asked for them."""
        remove_if_gone = index.remove_if_gone

        def remove_and_count(entry: Entry) -> None:
            is_unasked = entry.is_unasked and index.get(entry.record.key) is entry
            remove_if_gone(entry)
            self._lost_answers += is_unasked and index.get(entry.record.key) is not entry

        index.remove_if_gone = remove_and_count  # type: ignore[method-assign]

    def check_answers(self) -> None:
        """Assert that every answer that came was asked for, was lost before that, or waits for it."""
        counters = self._world.tiering.counters
        waiting = sum(entry.is_unasked for entry in self._world.tiering.index.entries())
        assert counters["answers"] - counters["answers_asked"] == self._lost_answers + waiting

    # -- what came and went --------------------------------------------------------------------------------------------

    def check_flows(self) -> None:
        """Assert, at rest, that what came into each tier less what left it is there."""
        index = self._world.tiering.index
        entries = index.entries()
        for tier in (HOST, *self._world.media):
            here = [entry for entry in entries if tier in index.tiers_with(entry)]
            stats = self._world.tiering.stats[tier]
            kept = len([e for e in entries if e.blobs[tier].value == "corrupt"])
            assert stats.chunks == stats.inserted.total() - stats.removed.total() == len(here) + kept
