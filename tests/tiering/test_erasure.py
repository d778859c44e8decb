"""Erasing what was stored under a tag: all behind it goes along, nothing of it is written later, what stays is told."""

from dataclasses import replace

import msgspec
import pytest

from tests.kit.spaces import Space
from tests.kit.tiering.world import Story, chunks_of
from tiered_kv.keys.tags import NO_TAG
from tiered_kv.tiering import removal
from tiered_kv.tiering.index import BlobState, Index
from tiered_kv.tiering.types import HOST, Copy, Delete, Outcome, Probe, Read, Seal, Write

DISK, BUCKET = 1, 2
SPACE = Space(b"small-namespace-", 10, is_tagged=True)


class Tenants(Story):
    """A story in which a chunk is that tenant's whose number ends its path."""

    def __init__(self, **more):
        super().__init__(**more)
        self.spaces[self.session] = SPACE

    def restore(self, tier, space, path):
        super().restore(tier, SPACE, path)


def last(steps):
    """The count that an erasure ends with, made at once."""
    *between, count = steps
    assert between == [None] * len(between)
    return count


def erase(story, tier, tenant, namespace=b""):
    """Erase a tenant's chunks; then let jobs wait, and check everything."""
    counts = last(story.tiering.erasing(tier, namespace, SPACE.tag((tenant,))))
    story.step()
    story.check()
    return counts


def test_a_tag_goes_from_memory_and_disk_with_all_behind_it_and_nothing_else():
    story = Tenants()
    story.store((1, 7, 2))  # 7 is asked for after 1, and 2 after 7
    story.store((1, 3))
    assert erase(story, HOST, 7) == (2, 0, 0)
    assert erase(story, DISK, 7) == (2, 0, 0)
    story.finish_all()
    assert story.is_in_host((1,)) and story.is_below((1,)) and story.is_below((1, 3))
    assert not any(story.is_in_host(chunk) or story.is_below(chunk) for chunk in ((1, 7), (1, 7, 2)))
    assert erase(story, DISK, 7) == erase(story, HOST, 7) == (0, 0, 0)


def test_another_namespace_stays_if_one_is_named():
    story = Tenants()
    story.store((7,))
    assert erase(story, DISK, 7, b"another-namespac") == (0, 0, 0)
    assert erase(story, DISK, 7, SPACE.namespace) == (1, 0, 0)


def test_the_first_tag_stays_and_is_no_part_of_what_a_chunk_is():
    story = Tenants()
    story.store((7,))
    assert erase(story, HOST, 7) == (1, 0, 0)
    slot = story.credits[story.session].pop(0)
    record = SPACE.record((7,))
    changed = msgspec.structs.replace(record, tag=SPACE.tag((8,)))
    assert changed == record and hash(changed) == hash(record)
    story.tiering.commit(story.session, slot, changed)
    assert story.counted("store_collision") == 0
    (seal,) = [job for job in story.tiering._outbox.jobs if isinstance(job, Seal)]
    assert seal.record.tag == SPACE.tag((7,)), "it is on disk under the first tag"


@pytest.mark.parametrize("is_sealed", [False, True])
def test_what_waits_to_be_written_is_dropped_and_not_written_later(is_sealed):
    story = Tenants(capacities=(None,))
    story.store((1,))
    for chunk in ((1, 7), (1, 7, 2)):
        story.commit(story.session, chunk)
    story.step()
    while is_sealed and story.waiting(Seal):
        story.end(Seal)
    writing = len(story.waiting(Write))
    assert writing == is_sealed, "the child waits for its parent"
    removed, kept, _ = erase(story, DISK, 7)
    assert (removed, kept) == (0, writing)
    story.finish_all()
    assert story.is_below((1, 7)) == bool(writing) and not story.is_below((1, 7, 2))
    assert story.counted("write_dropped_erased") >= 1
    erase(story, DISK, 7)
    erase(story, HOST, 7)
    story.finish_all()
    assert not story.is_below((1, 7)) and not story.is_in_host((1, 7))


def test_a_write_that_was_put_off_is_forgotten():
    story = Tenants()
    story.tiering.set_readable(DISK, False)
    story.store((7,))
    assert story.counted("write_deferred") == 1
    lookup = story.ask((7,))
    assert erase(story, HOST, 7) == (0, 1, 0), "leased"
    story.tiering.set_readable(DISK, True)
    story.finish_all()
    assert not story.is_below((7,)) and story.tiering.pending_writes == 0
    story.release(lookup)
    assert erase(story, HOST, 7) == (1, 0, 0)


def test_a_chunk_that_is_stored_again_while_it_is_deleted_is_not_written():
    story = Tenants(found=[(7,)])
    assert erase(story, DISK, 7) == (1, 0, 0)
    story.commit(story.session, (7,))
    story.step()
    story.end(Seal)
    assert erase(story, HOST, 7) == (1, 0, 0)
    story.finish_all()
    assert not story.is_below((7,)) and not story.is_in_host((7,))


def test_uploads_that_wait_are_dropped_and_the_one_that_runs_is_told():
    story = Tenants(capacities=(None, None))
    for number in (7, 8):
        story.commit(story.session, (number,))
    story.step()
    while story.waiting(Seal):
        story.end(Seal)
    while story.waiting(Write):
        story.end(Write)
    assert len(story.waiting(Copy)) == 2
    assert erase(story, DISK, 7) == (0, 1, 0), "it is being read for the upload"
    story.finish_all()
    assert erase(story, DISK, 7) == (1, 0, 0)
    assert story.is_below((8,))


def test_an_upload_that_did_not_begin_is_never_made():
    story = Tenants(capacities=(None, None), is_last_shared=True)
    story.tiering.set_readable(BUCKET, False)
    story.store((7,))
    assert story.is_below((7,)) and not story.media[BUCKET]
    assert erase(story, DISK, 7) == (1, 0, 0) and erase(story, HOST, 7) == (1, 0, 0)
    story.tiering.set_readable(BUCKET, True)
    story.finish_all()
    assert not story.media[BUCKET]


def test_chunks_before_one_in_use_stay_with_it_so_that_it_can_be_found_again():
    story = Tenants()
    story.store((7, 1, 2))
    lookup = story.ask((7, 1, 2))
    assert erase(story, HOST, 7) == (0, 3, 0)
    assert erase(story, DISK, 7) == (1, 2, 0), "the last has no chunk behind it that stays"
    story.finish_all()
    story.release(lookup)
    assert erase(story, HOST, 7) == (3, 0, 0) and erase(story, DISK, 7) == (2, 0, 0)
    story.finish_all()
    assert not any(story.is_below(chunk) or story.is_in_host(chunk) for chunk in chunks_of((7, 1, 2)))


def test_a_chunk_that_is_being_read_stays_and_so_does_what_is_before_it():
    story = Tenants(found=chunks_of((7, 1)))
    lookup = story.ask((7, 1))
    assert story.waiting(Read)
    assert erase(story, DISK, 7) == (0, 2, 0)
    story.finish_all()
    story.release(lookup)
    assert erase(story, DISK, 7) == (2, 0, 0) and erase(story, HOST, 7) == (2, 0, 0)


def test_pins_do_not_hold_an_erasure_up():
    story = Tenants(found=chunks_of((7, 1)))
    story.tiering.set_pinned(DISK, [SPACE.key((7, 1))])
    assert erase(story, DISK, 7) == (2, 0, 0)
    story.finish_all()
    assert not story.is_below((7,))


def test_a_damaged_blob_that_could_not_be_deleted_goes_too():
    story = Tenants(found=[(7,)])
    assert erase(story, DISK, 7) == (1, 0, 0)
    story.finish(0, Outcome.UNAVAILABLE)
    story.check()
    assert story.is_below((7,))
    assert erase(story, DISK, 7) == (1, 0, 0)
    story.finish_all()
    assert not story.is_below((7,))


def test_what_came_from_a_bucket_is_whose_its_header_says():
    story = Tenants(capacities=(None, None), is_last_shared=True)
    story.others_store(SPACE, (7,))
    lookup = story.ask((7,))
    while story.jobs and not story.waiting(Read):
        story.finish(0)
    (place,) = story.waiting(Read)
    (entry,) = story.tiering.index.entries()
    assert entry.record.tag == NO_TAG, "its name does not tell"
    job = story.jobs.pop(place)
    story.tiering.read(job, Outcome.OK, SPACE.tag((7,)))
    assert entry.record.tag == SPACE.tag((7,)) and entry.record == job.record
    del lookup


def end_read(story, tenant):
    """A read of a tenant's chunk ends well, and its header says whose it is."""
    (place,) = story.waiting(Read, (tenant,))
    job = story.jobs.pop(place)
    assert story._perform(job, None) is Outcome.OK
    story.tiering.read(job, Outcome.OK, SPACE.tag((tenant,)))


def test_what_is_being_read_from_a_bucket_is_dropped_when_its_header_says_that_it_was_erased():
    """An erasure finds nothing of it yet; then it would be here, and be written to the disk."""
    story = Tenants(capacities=(None, None), is_last_shared=True)
    lookups = {}
    for tenant in (7, 8):
        story.others_store(SPACE, (tenant,))
        lookups[tenant] = story.ask((tenant,))
    while story.waiting(Probe):
        story.end(Probe)
        story.step()
    for tier in (HOST, DISK, HOST):
        assert erase(story, tier, 7) == (0, 0, 0)
    for tenant in (7, 8):
        end_read(story, tenant)
        story.step()
    assert (story.answer(lookups[7]).held, story.answer(lookups[8]).held) == (0, 1)
    assert not story.is_in_host((7,)) and story.is_in_host((8,)), "nobody else's goes"
    for lookup in lookups.values():
        story.release(lookup)
    story.ask((7,))
    while story.waiting(Probe):
        story.end(Probe)
        story.step()
    end_read(story, 7)
    assert story.is_in_host((7,)), "what begins later is another matter"
    assert erase(story, HOST, 7).kept == 1


def test_what_is_stored_after_an_erasure_is_not_the_erased_tenants():
    """A bucket's blobs are known here after they were erased there, too, and would lend it their tag."""
    story = Tenants(capacities=(None, None), is_last_shared=True)
    story.store((7, 1))
    assert story.media[BUCKET]
    for tier in (HOST, DISK):
        assert erase(story, tier, 7) == (2, 0, 0)
    story.finish_all()
    story.media[BUCKET].clear()
    story.commit_record(story.session, msgspec.structs.replace(SPACE.record((7,)), tag=SPACE.tag((8,))))
    (seal,) = [job for job in story.tiering._outbox.jobs if isinstance(job, Seal)]
    assert seal.record.tag == SPACE.tag((8,))
    story.step()
    story.finish_all()
    assert story.media[BUCKET], "it is written there again"
    assert erase(story, HOST, 8) == erase(story, DISK, 8) == (1, 0, 0)


def test_what_is_in_use_is_known_to_be_in_a_bucket_after_an_erasure():
    story = Tenants(capacities=(None, None), is_last_shared=True)
    story.store((7,))
    lookup = story.ask((7,))
    assert erase(story, HOST, 7) == (0, 1, 0)
    assert story.tiering.index.get(SPACE.key((7,))).blobs[BUCKET] is BlobState.PRESENT
    story.release(lookup)
    assert erase(story, HOST, 7) == erase(story, DISK, 7) == (1, 0, 0)
    story.finish_all()
    assert story.tiering.index.get(SPACE.key((7,))) is None


def counts_of(steps):
    """The counts that an erasure ends with, part by part."""
    return (count for count in steps if count is not None)


def test_many_chunks_go_in_parts_the_deepest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "ERASED_AT_ONCE", 3)
    story = Tenants()
    story.store((1, 2, 3, 4, 5))
    story.store((2, 7))
    counts = []
    for count in counts_of(story.tiering.erasing(1, b"", SPACE.tag((1,)))):
        counts.append(count)
        story.finish_all()
        assert [story.is_below((1, 2, 3)[:depth]) for depth in (1, 2, 3)] == [count.left > 0] * 2 + [False]
    assert counts == [(3, 0, 2), (2, 0, 0)] and story.is_below((2,)) and not story.is_below((1,))


@pytest.mark.parametrize(("at_once", "looks"), [(3, 2), (10, 2), (20, 1), (100, 1)])
def test_the_index_is_looked_at_once_however_many_parts_there_are(monkeypatch, at_once, looks) -> None:
    """And once more after several of them. Before, each looked at all of it."""
    monkeypatch.setattr(removal, "ERASED_AT_ONCE", at_once)
    story = Tenants(host_bytes=20_000)
    for first in range(1, 21):
        story.store((first, 50))
    looked_at = []
    walk = Index.walk

    def count_walked(index):
        for entry in walk(index):
            looked_at.append(entry)
            yield entry

    monkeypatch.setattr(Index, "walk", count_walked)
    counts = list(counts_of(story.tiering.erasing(HOST, b"", SPACE.tag((50,)))))
    assert sum(count.removed for count in counts) == 20 and len(counts) == -(-20 // at_once)
    assert len(looked_at) == 40 * looks


def test_what_comes_under_the_tag_between_two_parts_goes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "ERASED_AT_ONCE", 3)
    story = Tenants()
    story.store((1, 2, 3, 7))
    for first in (4, 5, 6):
        story.store((first, 7))
    counts = []
    for count in counts_of(story.tiering.erasing(HOST, b"", SPACE.tag((7,)))):
        counts.append(count)
        if len(counts) == 1:
            story.store((8, 7))
            story.store((9, 7))
    assert counts == [(3, 0, 1), (3, 0, 0)]
    assert not any(story.is_in_host((first, 7)) for first in range(4, 10))


def test_what_cannot_be_deleted_is_told_to_be_there_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever goes on has to see that it does not become less."""
    monkeypatch.setattr(removal, "ERASED_AT_ONCE", 3)
    story = Tenants()
    story.store((1, 2, 3, 4, 5))
    lefts = []
    for count in counts_of(story.tiering.erasing(1, b"", SPACE.tag((1,)))):
        lefts.append(count.left)
        story.step()
        story.end_every(Delete, fault=Outcome.UNAVAILABLE)
        if len(lefts) == 4:
            break
    assert lefts[0] == 2 and lefts[1] >= lefts[0] and 0 not in lefts


def test_an_erasure_works_in_steps_of_few_chunks_and_looks_at_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the whole index in one go, nor again for each part of it."""
    monkeypatch.setattr(removal, "STEP", 4)
    monkeypatch.setattr(removal, "REMOVED_AT_ONCE", 4)
    story = Tenants(host_bytes=20_000)
    for first in range(1, 21):
        story.store((first, 50, 51))
    looked_at = []
    original = type(story.tiering._host).remove

    def remove(tier, entry, **more):
        looked_at.append(entry)
        return original(tier, entry, **more)

    monkeypatch.setattr(type(story.tiering._host), "remove", remove)
    steps, most = 0, 0
    for count in story.tiering.erasing(HOST, b"", SPACE.tag((50,))):
        most, looked_at[:] = max(most, len(looked_at)), []
        steps += count is None
    assert count == (40, 0, 0) and most <= 4
    assert 60 // 4 <= steps <= (60 + 40 + 40) // 4


def test_what_is_asked_for_between_the_steps_of_an_erasure_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes were cancelled, and lookups queue them again: one is begun at once, the one behind it waits for that."""
    monkeypatch.setattr(removal, "STEP", 1)
    monkeypatch.setattr(removal, "REMOVED_AT_ONCE", 1)
    story = Tenants(host_bytes=20_000)
    story.store((1, 7, 2))
    story.store((3,))
    erase(story, DISK, 7)
    story.finish_all()
    assert story.is_in_host((1, 7)) and not story.is_below((1, 7))
    for count in story.tiering.erasing(HOST, b"", SPACE.tag((7,))):
        if count is None:
            story.release(story.lookup(story.session, (1, 7, 2)))
    assert count == (1, 1, 0)
    story.step()
    story.finish_all()
    assert story.is_below((1, 7)) and not story.is_below((1, 7, 2)) and not story.is_in_host((1, 7, 2))
    story.check()


# -- by who stored it --------------------------------------------------------------------------------------------------

BAD, GOOD = "tiered_kv/0.9.0 vllm/0.32.0 cpu/amx", "tiered_kv/0.9.0 vllm/0.32.1 cpu/amx"


def commit_by(story, who, *paths):
    """A session of ``who`` stores these chunks."""
    story.spaces[story.session] = replace(SPACE, stored_by=who)
    for path in paths:
        assert story.commit(story.session, path)


def erase_bad(story, tier):
    counts = last(story.tiering.erasing_stored_by(tier, b"", lambda line: line == BAD))
    story.step()
    story.check()
    return counts


def test_what_a_bad_version_stored_goes_with_what_good_ones_stored_behind_it():
    story = Tenants()
    commit_by(story, GOOD, (1,), (2,))
    commit_by(story, BAD, (1, 7))
    commit_by(story, GOOD, (1, 7, 2), (1, 3))
    story.finish_all()
    assert erase_bad(story, HOST) == (2, 0, 0) and erase_bad(story, DISK) == (2, 0, 0)
    story.finish_all()
    for path, is_left in {(1,): True, (2,): True, (1, 3): True, (1, 7): False, (1, 7, 2): False}.items():
        assert story.is_in_host(path) == story.is_below(path) == is_left
    assert erase_bad(story, DISK) == erase_bad(story, HOST) == (0, 0, 0)


@pytest.mark.parametrize(("first", "second"), [(BAD, GOOD), (GOOD, BAD)])
def test_a_chunk_of_which_two_stored_a_copy_is_found_by_either(first, second):
    """One's is on disk, the other's in memory, under a header that says so; either may be the bad one."""
    story = Tenants()
    commit_by(story, first, (7,))
    story.finish_all()
    assert last(story.tiering.erasing_stored_by(HOST, b"", lambda line: line == first)) == (1, 0, 0)
    story.finish_all()
    commit_by(story, second, (7,))
    (seal,) = [job for job in story.tiering._outbox.jobs if isinstance(job, Seal)]
    assert seal.record.stored_by == second, "a header says who stored these bytes, whoever stored others"
    story.step()
    story.finish_all()
    assert erase_bad(story, HOST) == (1, 0, 0) and erase_bad(story, DISK) == (1, 0, 0)
    story.finish_all()
    assert not story.is_below((7,)) and not story.is_in_host((7,))


def test_who_stored_what_came_from_a_bucket_is_said_by_its_header():
    story = Tenants(capacities=(None, None), is_last_shared=True)
    story.others_store(SPACE, (7,))
    story.ask((7,))
    while story.jobs and not story.waiting(Read):
        story.finish(0)
    (place,) = story.waiting(Read)
    (entry,) = story.tiering.index.entries()
    assert entry.storers == {""}, "its name does not tell"
    story.tiering.read(story.jobs.pop(place), Outcome.OK, SPACE.tag((7,)), BAD)
    assert entry.storers == {BAD}
    steps = story.tiering.erasing_stored_by(HOST, b"", lambda line: line == BAD)
    assert last(steps) == (0, 1, 0), "leased, and meant now"


def read_behind(story, path, who=GOOD, outcome=Outcome.OK):
    """A read of a chunk ends, and its header says who stored it."""
    (place,) = story.waiting(Read, path)
    job = story.jobs.pop(place)
    if outcome is Outcome.OK:
        assert story._perform(job, None) is Outcome.OK
        story.tiering.read(job, Outcome.OK, SPACE.tag((path[-1],)), who)
    else:
        story.tiering.read(job, outcome)
    story.step()
    story.check()


def ask_found(story, path, **more):
    """A lookup whose probes have ended."""
    lookup = story.ask(path, **more)
    while story.waiting(Probe):
        story.end(Probe)
        story.step()
    return lookup


def assert_all_is_erased(story):
    """Neither memory nor disk has any chunk of the prefix, and nothing is found behind its first one, stored anew."""
    story.finish_all()
    assert not any(story.is_in_host(path) or story.is_below(path) for path in chunks_of((7, 1, 2)))
    story.media[BUCKET].clear()
    commit_by(story, GOOD, (7,))
    story.finish_all()
    assert story.answer(ask_found(story, (7, 1, 2))).held == 1
    assert story.is_below((7,)) and not story.is_below((7, 1))


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.MISSING, Outcome.UNAVAILABLE])
@pytest.mark.parametrize("order", ["before", "between", "behind"])
def test_what_lies_behind_a_chunk_that_is_dropped_when_it_comes_goes_too(order, outcome):
    """It was computed from that: whoever computes the erased chunk anew must not find it. Nor if the one never came."""
    story = Tenants(capacities=(None, None), is_last_shared=True)
    for path in chunks_of((7, 1, 2)):
        story.others_store(SPACE, path)
    lookup = ask_found(story, (7, 1, 2))
    if order == "before":
        read_behind(story, (7, 1))
        read_behind(story, (7, 1, 2))
    for tier in (HOST, DISK, HOST):
        erase_bad(story, tier)
    if order == "between":
        read_behind(story, (7, 1, 2))
    read_behind(story, (7,), BAD, outcome)
    if order != "before":
        read_behind(story, (7, 1))
    if order == "behind":
        read_behind(story, (7, 1, 2))
    story.release(lookup)
    assert_all_is_erased(story)


def test_what_lies_behind_a_dropped_chunk_and_is_in_use_goes_once_it_is_not():
    """And is lent to nobody else meanwhile, nor written."""
    story = Tenants(capacities=(None, None), is_last_shared=True)
    for path in chunks_of((7, 1)):
        story.others_store(SPACE, path)
    first = ask_found(story, (7, 1))
    read_behind(story, (7, 1))
    user = ask_found(story, (7, 1), start=1)
    for tier in (HOST, DISK, HOST):
        erase_bad(story, tier)
    read_behind(story, (7,), BAD)
    story.release(first)
    assert story.answer(user).ready == 1 and story.is_in_host((7, 1))
    story.media[BUCKET].clear()
    commit_by(story, GOOD, (7,))
    story.finish_all()
    assert story.answer(ask_found(story, (7, 1))).held == 1 and not story.is_below((7, 1))
    story.release(user)
    story.finish_all()
    assert not story.is_in_host((7, 1)) and not story.is_below((7, 1))


def test_what_lies_behind_a_dropped_chunk_goes_from_disk_once_nothing_behind_it_is_read():
    """The disk had lost the dropped one, so nothing there said that the ones behind it were to go."""
    story = Tenants(capacities=(None, None), is_last_shared=True)
    commit_by(story, GOOD, *chunks_of((7, 1, 2)))
    story.finish_all()
    for tier, keys in ((HOST, None), (DISK, [SPACE.key((7,))])):
        story.remove(tier, b"", keys, leaves_holes=True)
        story.step()
        story.finish_all()
    lookup = story.ask((7, 1, 2))
    story.step()
    read_behind(story, (7, 1))
    for tier in (HOST, DISK, HOST):
        erase_bad(story, tier)
    read_behind(story, (7,), BAD)
    read_behind(story, (7, 1, 2))
    story.release(lookup)
    assert_all_is_erased(story)


def test_what_lies_behind_a_dropped_chunk_is_not_put_off_by_a_write_that_fails():
    story = Tenants(capacities=(None,), is_last_shared=True)
    commit_by(story, GOOD, (7,))
    story.finish_all()
    story.remove(HOST, b"", None, leaves_holes=True)
    story.step()
    lookup = story.ask((7,))
    story.step()
    commit_by(story, GOOD, (7, 1))
    story.step()
    while story.waiting(Seal):
        story.end(Seal)
        story.step()
    user = story.ask((7, 1), start=1)
    story.step()
    for tier in (HOST, 1):
        erase_bad(story, tier)
    read_behind(story, (7,), BAD)
    (place,) = story.waiting(Write, (7, 1))
    story.tiering.written(story.jobs.pop(place), Outcome.UNAVAILABLE)
    story.step()
    story.release(lookup)
    commit_by(story, GOOD, (7,))
    story.tiering.resume_writes()
    story.step()
    story.finish_all()
    entry = story.tiering.index.get(SPACE.key((7, 1)))
    assert entry is None or entry.blobs[1] is BlobState.ABSENT
    story.release(user)
    story.finish_all()
    assert story.is_below((7,)) and not story.is_below((7, 1))


def test_who_stored_is_no_part_of_what_a_chunk_is():
    record = SPACE.record((7,))
    other = msgspec.structs.replace(record, stored_by=BAD)
    assert other == record and hash(other) == hash(record)
