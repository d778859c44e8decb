"""Tails in host memory: found behind what is held, never anywhere else, few, and gone when something continues them."""

from tests.kit.tiering.world import SMALL, Path, Story
from tiered_kv.tiering.tails import TAILS_MAX
from tiered_kv.tiering.types import HOST, Limits, LookupAnswer

FEW_CHUNKS = Limits().few_chunks

PROMPT = (1, 2, 3)


class TailStory(Story):
    """A story whose prompts have tails."""

    def keep(self, path: Path, name: str, tokens: int = 4) -> None:
        assert self.commit_tail(self.session, path, name, tokens), "no credit left"
        self.finish_all()

    def seek(self, path: Path, start: int = 0) -> int:
        lookup = self.lookup(self.session, path, start, wants_tails=True)
        self.finish_all()
        return lookup

    def tails(self, lookup: int) -> list[bytes]:
        return [tail.digest for tail in self.answer(lookup).tails]

    @property
    def count(self) -> int:
        return self.tiering.usage()["host_tails"]


def digest(path: Path, name: str) -> bytes:
    return SMALL.tail(path, name).prefix_sha256


def test_a_tail_is_leased_behind_all_that_is_held_and_only_to_who_wants_it():
    story = TailStory()
    story.store(PROMPT)
    story.keep(PROMPT, "a", 4)
    lookup = story.seek((*PROMPT, 9))
    answer = story.answer(lookup)
    assert (answer.held, answer.ready, answer.is_done) == (3, 3, True)
    assert [(tail.tokens, tail.digest) for tail in answer.tails] == [(4, digest(PROMPT, "a"))]
    entry = story.tiering.index.get(SMALL.tail(PROMPT, "a").key)
    assert entry is not None and (entry.slot, entry.leases) == (answer.tails[0].slot, 1)
    assert story.answer(story.ask((*PROMPT, 9))) == LookupAnswer(
        held=3, slots=answer.slots, ready=3, is_done=True, sources=bytes(3), is_answered=True
    )
    story.release(lookup)
    assert entry.leases == 0


def test_behind_a_longer_or_a_shorter_prefix_it_is_not_offered():
    story = TailStory()
    story.store((*PROMPT, 4))
    story.keep(PROMPT, "a")
    assert story.tails(story.seek((*PROMPT, 4))) == [], "a whole chunk goes on from there"
    assert story.tails(story.seek((1, 2, 8))) == []
    assert story.tails(story.seek((*PROMPT, 5))) == [digest(PROMPT, "a")]


def test_a_lookup_that_wants_nothing_of_what_is_held_is_told_of_tails():
    """The GPU has the prompt; its engine is about to store what continues the tail."""
    story = TailStory()
    story.store(PROMPT)
    story.keep(PROMPT, "a")
    for start in (3, 5):
        lookup = story.seek((*PROMPT, 4, 5), start)
        assert story.tails(lookup) == [digest(PROMPT, "a")] and story.answer(lookup).slots == ()


def test_it_stays_in_host_memory_and_goes_before_the_chunks_in_front_of_it():
    story = TailStory(capacities=(None, None))
    story.store(PROMPT)
    story.keep(PROMPT, "a")
    key = SMALL.tail(PROMPT, "a").key
    story.release(story.seek((*PROMPT, 9)))
    story.finish_all()
    assert all(key not in medium for medium in story.media.values())
    assert not story.tiering.pending_writes
    story.flush_host(avoid=PROMPT)
    assert story.tiering.index.get(key) is None and story.count == 0
    assert all(SMALL.key(PROMPT) in medium for medium in story.media.values())
    assert story.tails(story.seek((*PROMPT, 9))) == []


def test_what_is_continued_goes_at_once_or_when_its_lease_ends():
    story = TailStory()
    story.store(PROMPT)
    story.keep(PROMPT, "a")
    story.keep(PROMPT, "b")
    lookup = story.seek((*PROMPT, 4))
    story.drop_tail(story.session, PROMPT, "a")
    story.step()
    assert story.count == 2, "a load may be copying it"
    story.release(lookup)
    story.step()
    assert story.count == 1 and story.counted("tail_superseded") == 1
    story.drop_tail(story.session, PROMPT, "b")
    assert story.count == 0 and story.counted("tail_superseded") == 2


def test_only_tails_are_dropped_and_only_ones_own():
    story = TailStory()
    other = story.open_space(b"another-namespac", SMALL.slot_bytes)
    story.store(PROMPT)
    story.keep(PROMPT, "a")
    story.tiering.drop_tails(other, [SMALL.tail(PROMPT, "a").key])
    story.tiering.drop_tails(story.session, [SMALL.key(PROMPT), bytes(16)])
    story.step()
    assert story.count == 1 and story.is_in_host(PROMPT)


def test_a_chunk_has_few_tails_the_oldest_goes_and_one_in_use_stays():
    story = TailStory(host_bytes=1000)
    story.store(PROMPT)
    names = [chr(ord("a") + n) for n in range(TAILS_MAX + 1)]
    for name in names:
        story.keep(PROMPT, name)
    assert story.count == TAILS_MAX and story.counted("tail_gave_way") == 1
    lookup = story.seek((*PROMPT, 9))
    assert story.tails(lookup) == [digest(PROMPT, name) for name in names[:0:-1]], "the newest first"
    story.keep(PROMPT, "z")
    assert story.counted("tail_no_room") == 1 and story.count == TAILS_MAX, "all are leased"


def test_a_tail_without_the_chunk_before_it_is_not_taken():
    story = TailStory()
    story.keep(PROMPT, "a")
    assert story.count == 0 and story.counted("tail_refused") == 1
    story.store(PROMPT)
    story.keep(PROMPT, "a")
    story.keep(PROMPT, "a")
    assert story.count == 1 and story.counted("tail_duplicate") == 1


def test_an_operator_removes_tails_with_their_namespace_and_nothing_else_knows_them():
    story = TailStory()
    story.store(PROMPT)
    story.keep(PROMPT, "a")
    assert story.remove(HOST, SMALL.namespace, None, leaves_holes=False).removed == 4
    assert story.count == 0


def test_a_lookup_that_holds_nothing_but_a_tail_lets_go_of_it_by_the_clock():
    story = TailStory()
    story.store(PROMPT)
    story.keep(PROMPT, "a")
    session = story.tiering.open_session(SMALL.namespace, SMALL.slot_bytes, 30.0)
    story.spaces[session] = SMALL
    lookup = story.lookup(session, (*PROMPT, 4), 3, wants_tails=True)
    story.step()
    assert story.tiering.usage()["leased_bytes"] == SMALL.slot_bytes
    story.tiering.expire_leases(100.0)
    story.tiering.expire_leases(130.1)
    story.step()
    story.step()
    assert story.ended == [lookup] and story.tiering.usage()["leased_bytes"] == 0


def test_there_is_no_tail_where_leases_have_no_room():
    story = TailStory(host_bytes=100, limits=Limits(short_tails_share=1.0))  # five chunks of it may be leased
    for path in ((1, 2), (3, 4)):
        story.store(path)
        story.keep(path, "a")
    first, second = story.seek((1, 2, 9)), story.seek((3, 4, 9))
    assert (len(story.tails(first)), len(story.tails(second))) == (1, 0)
    assert story.answer(second).ready == 2, "the chunks are leased all the same"


def test_tails_behind_few_chunks_take_a_share_of_memory_the_oldest_that_nobody_uses_goes():
    story = TailStory(host_bytes=1000, limits=Limits(short_tails_share=3 * SMALL.slot_bytes / 1000))
    paths = [(n, n) for n in range(1, 6)]
    for path in paths:
        story.store(path)
    for path in paths[:3]:
        story.keep(path, "a")
    story.seek((*paths[0], 9))
    story.keep(paths[3], "a")
    found = [story.tails(story.seek((*path, 9))) for path in paths]
    assert [len(tails) for tails in found] == [1, 0, 1, 1, 0], "the first is leased, so the second went"
    assert story.counted("tail_gave_way") == 1


def test_where_all_tails_behind_few_chunks_are_in_use_there_is_no_more_of_them_but_of_others():
    story = TailStory(host_bytes=1000, limits=Limits(short_tails_share=SMALL.slot_bytes / 1000))
    long = tuple(range(1, FEW_CHUNKS + 1))
    for path in (PROMPT, long, (7,)):
        story.store(path)
    story.keep(PROMPT, "a")
    story.seek((*PROMPT, 9))
    story.keep((7,), "a")
    assert story.counted("tail_no_room") == 1 and story.count == 1
    story.keep(long, "a")
    story.keep(long, "b")
    assert story.count == 3 and story.counted("tail_no_room") == 1


def test_a_tail_behind_few_chunks_that_was_evicted_gives_its_room_back():
    story = TailStory(limits=Limits(short_tails_share=SMALL.slot_bytes / 400))
    story.store(PROMPT)
    story.keep(PROMPT, "a")
    story.flush_host(avoid=PROMPT)
    assert story.count == 0
    story.store((7, 8))
    story.keep((7, 8), "a")
    assert story.count == 1 and story.counted("tail_gave_way") == story.counted("tail_no_room") == 0
