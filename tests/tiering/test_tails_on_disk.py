"""Tails on disk: written when host memory lets go of them, found after a restart, and gone with what continues them."""

import msgspec
import pytest

from tests.kit.spaces import Space
from tests.kit.tiering.oracle import Blob
from tests.kit.tiering.world import SMALL, Path, Story, chunks_of
from tiered_kv.keys.tags import NO_TAG
from tiered_kv.tiering.admission import SECOND_TOUCH
from tiered_kv.tiering.index import BlobState
from tiered_kv.tiering.tails import TAILS_MAX
from tiered_kv.tiering.types import HOST, Delete, Limits, Outcome, Read, Write

DISK, BUCKET = 1, 2
FEW_CHUNKS = Limits().few_chunks
PROMPT = tuple(range(FEW_CHUNKS))
NEXT = (*PROMPT, 99)


class DiskTailStory(Story):
    """A story whose long prompt has tails; host memory is small, so that it is soon full of others."""

    def __init__(self, host_bytes: int = 160, **settings: object) -> None:
        super().__init__(host_bytes, **settings)  # type: ignore[arg-type]

    def store(self, path: Path, session: int | None = None) -> None:
        """Chunk by chunk: there are few credits."""
        session = session or self.session
        for chunk in chunks_of(path):
            assert self.commit(session, chunk), "no credit left"
            self.finish_all()
        self.tiering.touch_prefix(self.spaces[session].key(path))

    def keep(self, name: str, path: Path = PROMPT) -> None:
        assert self.commit_tail(self.session, path, name), "no credit left"
        self.finish_all()

    def key(self, name: str, path: Path = PROMPT) -> bytes:
        return SMALL.tail(path, name).key

    def tail(self, name: str, path: Path = PROMPT):  # type: ignore[no-untyped-def]
        return self.tiering.index.get(self.key(name, path))

    def on_disk(self, *names: str) -> list[str]:
        return [name for name in names if self.key(name) in self.media[DISK]]

    def push_out(self) -> None:
        """Everything leaves host memory."""
        self.flush_host(avoid=PROMPT)

    def seek(self, path: Path = NEXT, start: int = 0) -> int:
        lookup = self.lookup(self.session, path, start, wants_tails=True)
        self.step()
        return lookup

    def tails(self, lookup: int) -> list[tuple[bytes, bool]]:
        """Digests of the tails that it was told of, and whether it may load them."""
        return [(tail.digest, tail.slot is not None) for tail in self.answer(lookup).tails]

    def write_of(self, name: str) -> int:
        """Where in the line the write of a tail waits."""
        return next(n for n, job in enumerate(self.jobs) if isinstance(job, Write) and job.record.key == self.key(name))

    def evict_until_written(self, name: str) -> None:
        """Host memory fills until the write of a tail begins."""
        for number in range(1000):
            if any(isinstance(job, Write) and job.record.key == self.key(name) for job in self.jobs):
                return
            for place in reversed(range(len(self.jobs))):
                self.finish(place)
            if self.commit(self.session, (5000 + number,)):
                self.step()
        raise AssertionError("no write of a tail began")


def digest(name: str) -> bytes:
    return SMALL.tail(PROMPT, name).prefix_sha256


def stored(name: str = "a", **settings: object) -> DiskTailStory:
    story = DiskTailStory(**settings)  # type: ignore[arg-type]
    story.store(PROMPT)
    story.keep(name)
    return story


def test_it_is_written_when_host_memory_lets_go_of_it_and_not_before():
    story = stored()
    assert story.on_disk("a") == [] and story.tiering.pending_writes == 0
    story.push_out()
    assert story.on_disk("a") == ["a"] and story.tail("a").slot is None
    assert story.tiering.stats[HOST].tails == 0 and story.tiering.stats[DISK].tails == 1
    assert story.counted("tail_saved") == 1


def test_it_is_promoted_with_its_prefix_and_ready_once_it_is_there():
    story = stored()
    story.push_out()
    lookup = story.seek()
    assert story.tails(lookup) == [(digest("a"), False)], "told of at once"
    assert [run.chunks for run in story.answer(lookup).arriving] == [FEW_CHUNKS, 1]
    story.finish_all()
    assert story.tails(lookup) == [(digest("a"), True)]
    answer = story.answer(lookup)
    assert answer.is_done and answer.ready == FEW_CHUNKS
    assert story.tail("a").slot == answer.tails[0].slot and story.tail("a").leases == 1
    story.release(lookup)
    assert story.tail("a").leases == 0 and story.on_disk("a") == ["a"], "the file stays: the next restart finds it"


def test_it_is_used_with_its_prefix_and_goes_right_before_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Story, "eviction", "lru")
    story = stored()
    story.push_out()
    story.seek()
    order = list(story.tiering._tiers[DISK].order)
    last = [story.entry(PROMPT[:depth]) for depth in range(len(PROMPT), 0, -1)]
    first = order.index(story.tail("a"))
    assert order[first : first + 1 + len(last)] == [story.tail("a"), *last]


def test_after_a_restart_it_is_found():
    story = DiskTailStory(found=[PROMPT[: depth + 1] for depth in range(FEW_CHUNKS)])
    story.restore_tail(DISK, SMALL, PROMPT, "a")
    story.tiering.restored(DISK)
    lookup = story.seek()
    story.finish_all()
    assert story.tails(lookup) == [(digest("a"), True)]


def test_a_crash_that_left_two_leaves_the_newest():
    story = DiskTailStory(found=[PROMPT[: depth + 1] for depth in range(FEW_CHUNKS)])
    for name in "ab":
        story.restore_tail(DISK, SMALL, PROMPT, name)
    story.tiering.restored(DISK)
    story.finish_all()
    assert story.on_disk("a", "b") == ["b"]


def test_a_lookup_that_wants_nothing_of_what_is_held_is_told_and_reads_nothing():
    story = stored()
    story.push_out()
    lookup = story.seek(start=FEW_CHUNKS)
    assert story.tails(lookup) == [(digest("a"), False)] and story.answer(lookup).is_done
    assert not story.waiting(Read)


def test_nobody_reads_it_who_does_not_want_tails():
    story = stored()
    story.push_out()
    story.ask(NEXT)
    story.finish_all()
    assert story.tail("a").slot is None


def test_what_continues_it_removes_its_file():
    story = stored()
    story.push_out()
    story.drop_tail(story.session, PROMPT, "a")
    story.finish_all()
    assert story.on_disk("a") == [] and story.tail("a") is None and story.counted("tail_superseded") == 1
    used = story.tiering.tier_usage(DISK).used_bytes
    assert used == SMALL.slot_bytes * len(story.media[DISK]), "to the byte"


@pytest.mark.parametrize("is_written_first", [True, False])
def test_what_continues_it_while_it_is_written_removes_it_after_that(is_written_first: bool):
    story = stored()
    story.evict_until_written("a")
    if is_written_first:
        story.finish(story.write_of("a"))
    story.drop_tail(story.session, PROMPT, "a")
    story.finish_all()
    assert story.on_disk("a") == [] and story.tail("a") is None


def test_what_continues_it_while_it_is_read_removes_it_after_the_lookup():
    story = stored()
    story.push_out()
    lookup = story.seek()
    story.drop_tail(story.session, PROMPT, "a")
    story.finish_all()
    assert story.tails(lookup) == [(digest("a"), True)] and story.on_disk("a") == ["a"]
    story.release(lookup)
    story.finish_all()
    assert story.on_disk("a") == [] and story.tail("a") is None


def test_of_a_chunks_tails_the_newest_is_written_and_takes_the_place_of_the_one_before():
    story = stored("a")
    story.keep("b")
    story.push_out()
    assert story.on_disk("a", "b") == ["b"] and story.counted("tail_saved") == 1
    story.release(story.seek())  # the chunks are in host memory again
    story.finish_all()
    story.keep("c")
    story.push_out()
    assert story.on_disk("a", "b", "c") == ["c"] and story.tail("b") is None


def test_behind_few_chunks_none_is_written():
    story = DiskTailStory()
    short = PROMPT[:-1]
    story.store(short)
    story.keep("a", short)
    story.push_out()
    assert story.tail("a", short) is None and story.counted("tail_saved") == 0


def test_without_the_chunk_before_it_on_disk_none_is_written():
    story = DiskTailStory()
    story.tiering.set_readable(DISK, False)
    story.store(PROMPT)
    story.keep("a")
    story.push_out()
    assert story.tail("a") is None and story.on_disk("a") == []


def test_a_bucket_has_none():
    story = stored(capacities=(None, None), is_last_shared=True)
    story.push_out()
    story.release(story.seek())
    story.finish_all()
    assert story.on_disk("a") == ["a"] and story.key("a") not in story.media[BUCKET]
    assert SMALL.key(PROMPT) in story.media[BUCKET]


def test_where_a_bucket_is_the_first_tier_none_is_written():
    story = stored(is_last_shared=True)
    story.push_out()
    assert story.tail("a") is None and story.key("a") not in story.media[DISK]


def test_a_selective_disk_takes_it_behind_a_chunk_that_it_took():
    class Selective(DiskTailStory):
        admissions = (SECOND_TOUCH,)

    story = Selective()
    story.store(PROMPT)
    story.keep("a")
    story.push_out()
    assert story.on_disk("a") == [] and story.tail("a") is None
    story.store(PROMPT)
    story.release(story.ask(PROMPT))
    story.finish_all()
    story.keep("b")
    story.push_out()
    assert story.on_disk("b") == ["b"]


def test_the_server_writes_them_when_it_ends():
    story = stored()
    story.tiering.save_tails()
    assert story.tiering.pending_writes == 1, "a drain waits for it"
    story.finish_all()
    assert story.on_disk("a") == ["a"] and story.tiering.pending_writes == 0


def test_more_than_the_queue_takes_are_written_when_the_server_ends():
    story = DiskTailStory(host_bytes=1000, limits=Limits(write_queue_share=0.03))
    prompts = [(number, *PROMPT[1:]) for number in range(6)]
    for prompt in prompts:
        story.store(prompt)
        story.keep("a", prompt)
    story.tiering.save_tails()
    story.finish_all()
    assert all(story.key("a", prompt) in story.media[DISK] for prompt in prompts)


def test_a_disk_without_room_loses_it_and_holds_up_nobody():
    """All that host memory may let go of are tails that the disk does not take."""
    prompts = [(number, *PROMPT[1:]) for number in range(3)]
    story = DiskTailStory(host_bytes=250, capacities=(3 * FEW_CHUNKS * SMALL.slot_bytes,))
    for prompt in prompts:
        story.store(prompt)
    for tier in (DISK,):
        story.tiering.set_pinned(tier, [SMALL.key(prompt) for prompt in prompts])
    for prompt in prompts:
        story.keep("a", prompt)
    for number in range(60):
        story.store((2000 + number,))
    assert all(story.key("a", prompt) not in story.media[DISK] for prompt in prompts)
    assert story.tiering.stats[HOST].tails == 0


@pytest.mark.parametrize("fault", [Outcome.UNAVAILABLE, Outcome.NO_ROOM, Outcome.CORRUPT])
def test_a_write_that_fails_loses_it(fault: Outcome):
    story = stored()
    story.evict_until_written("a")
    story.finish(story.write_of("a"), fault)
    assert story.tail("a") is None and story.on_disk("a") == []
    story.finish_all()


@pytest.mark.parametrize("is_claimed", [False, True])
def test_one_whose_slot_was_found_damaged_is_written_no_more(is_claimed: bool):
    """Neither when the server ends while a load still reads it, nor when its slot is wanted before the next step."""
    story = stored()
    story.evict_until_written("a")
    lookup = story.seek()
    if is_claimed:
        story.claim(lookup)
    story.finish(story.write_of("a"), Outcome.CORRUPT)
    assert story.tail("a").leases == is_claimed
    if is_claimed:
        story.tiering.save_tails()
        story.release(lookup)
    else:
        others = [(6000 + number,) for number in range(20)]
        for path in others:
            story.restore(DISK, SMALL, path)
        for path in others:  # each is read into the slot of another one
            story.lookup(story.session, path)
    story.finish_all()
    assert story.tail("a") is None and story.on_disk("a") == [] and story.counted("tail_saved") == 1


@pytest.mark.parametrize("blob", [None, Blob.CORRUPT])
def test_a_file_that_cannot_be_read_costs_the_tail_alone(blob: Blob | None):
    story = stored()
    story.push_out()
    story.damage(DISK, story.key("a"), blob)
    lookup = story.seek()
    story.finish_all()
    assert story.tails(lookup) == [] and story.answer(lookup).is_done
    assert (story.answer(lookup).held, story.answer(lookup).ready) == (FEW_CHUNKS, FEW_CHUNKS)
    assert story.tail("a") is None and story.on_disk("a") == []


def test_a_lookup_that_ends_while_it_is_read_leaves_it_for_the_next():
    story = stored()
    story.push_out()
    story.release(story.seek())
    story.finish_all()
    assert story.tail("a").slot is not None and story.tail("a").leases == 0


def test_it_is_stored_again_while_its_file_is_there():
    story = stored()
    story.push_out()
    story.release(story.seek(PROMPT, FEW_CHUNKS))
    story.keep("a")
    assert story.tail("a").slot is not None and story.counted("tail_stored") == 2
    story.push_out()
    assert story.on_disk("a") == ["a"] and story.counted("tail_saved") == 1, "not written once more"


def test_the_disk_evicts_it_before_the_chunk_in_front_of_it():
    story = DiskTailStory(capacities=((FEW_CHUNKS + 1) * SMALL.slot_bytes,))
    story.store(PROMPT)
    story.keep("a")
    story.tiering.save_tails()
    story.finish_all()
    assert story.on_disk("a") == ["a"]
    assert story.commit(story.session, (77,))
    story.finish_all()
    assert story.on_disk("a") == [] and SMALL.key(PROMPT) in story.media[DISK]


def stored_with_a_tag():
    """A prompt of a tenant, without its tail."""
    tagged = Space(b"tagged-namespace", 10, is_tagged=True)
    story = DiskTailStory()
    session = story.open(tagged)
    story.finish_all()
    for depth in range(1, FEW_CHUNKS + 1):
        assert story.commit(session, PROMPT[:depth])
        story.finish_all()
    return story, session, tagged


def test_what_is_erased_by_tag_takes_its_tails_along():
    story, session, tagged = stored_with_a_tag()
    assert story.commit_tail(session, PROMPT, "a")
    story.tiering.save_tails()
    story.finish_all()
    key = tagged.tail(PROMPT, "a").key
    assert key in story.media[DISK]
    for tier in (HOST, DISK):
        *_, count = story.tiering.erasing(tier, tagged.namespace, tagged.tag(PROMPT))
        assert count is not None and count.kept == 0
    story.finish_all()
    assert key not in story.media[DISK] and story.tiering.index.get(key) is None


def test_the_end_of_a_users_session_takes_its_tails_along():
    story = stored()
    story.tiering.take_ownership(SMALL.namespace, SMALL.key(PROMPT), b"somebody")
    story.push_out()
    assert story.on_disk("a") == ["a"]
    keys = [SMALL.key(PROMPT[:depth]) for depth in range(FEW_CHUNKS, 0, -1)]
    *_, count = story.tiering.releasing(keys, b"somebody", [], lambda _: False)
    assert count == (FEW_CHUNKS + 1, 0)
    story.finish_all()
    assert story.on_disk("a") == [] and not story.is_below(PROMPT[:1])


def test_a_deletion_that_fails_is_no_end_of_the_tail_and_costs_nothing():
    story = stored()
    story.push_out()
    story.drop_tail(story.session, PROMPT, "a")
    story.step()
    story.end(Delete, None, Outcome.UNAVAILABLE)
    story.finish_all()
    assert story.on_disk("a") == ["a"]
    lookup = story.seek()
    story.finish_all()
    assert story.tails(lookup) == [(digest("a"), True)], "it is what its digest says"


def test_a_disk_that_does_not_delete_leaves_no_chunk_more_tails_than_there_are_to_be():
    """A deletion that hangs is on its way: the tail counts no more, and is not what gives way again and again."""
    story = stored("a")
    story.push_out()
    for number in range(3 * TAILS_MAX):
        if not story.tiering.usage()["reserved_slots"] and not story.credits[story.session]:
            break
        assert story.commit_tail(story.session, PROMPT, f"next {number}")
        story.step()
        if any(isinstance(job, Delete) for job in story.jobs):
            assert story.tail("a").blobs[DISK] is BlobState.DELETING
        entry = story.tiering.index.get(SMALL.key(PROMPT))
        held = [one for one in story.tiering.index.tails_behind(entry) if story.tiering.index.is_held(one)]
        assert len(held) <= TAILS_MAX, f"after {number + 1} more"
    assert story.waiting(Delete), "the first one's file went"
    story.finish_all()
    assert story.on_disk("a") == []


def test_a_tail_that_is_stored_once_more_is_erased_with_who_stored_it():
    """The start knows it by its file's name: whose it is stands in its header, or is said when it comes again."""
    story, session, tagged = stored_with_a_tag()
    record = tagged.tail(PROMPT, "a")
    nobodys = msgspec.structs.replace(record, tag=NO_TAG)
    story._restore(DISK, nobodys, tagged.slot_bytes)
    story._tails[record.prefix_sha256] = record.key
    assert story.commit_tail(session, PROMPT, "a")
    story.finish_all()
    assert story.tiering.index.get(record.key).record.tag == tagged.tag(PROMPT)
