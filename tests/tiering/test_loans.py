"""Loans: a chunk in host memory stays in its slot while a peer reads it, whatever else wants the slot."""

from tests.kit.tiering.world import SMALL, LruStory, SelectiveStory, Story, chunks_of
from tiered_kv.tiering.loans import LENT_SHARE
from tiered_kv.tiering.quotas import Quota
from tiered_kv.tiering.types import HOST, Limits, Outcome, Read, Seal, SlotLoan

PROMPT = (1, 2, 3)


def lend(story: Story, path: tuple[int, ...]) -> SlotLoan | Outcome:
    return story.tiering.lend(SMALL.namespace, SMALL.key(path))


def held_here(story: Story, path: tuple[int, ...], namespace: bytes = SMALL.namespace) -> int:
    return story.tiering.held_here(namespace, SMALL.prefix(path)[0])


def test_a_chunk_that_is_lent_is_not_evicted_and_goes_once_nobody_reads_it():
    story = Story(host_bytes=400, capacities=())
    story.store(PROMPT)
    first, second = lend(story, (1,)), lend(story, (1,))
    assert isinstance(first, SlotLoan) and isinstance(second, SlotLoan)
    assert (first.slot, first.size_bytes) == (second.slot, SMALL.slot_bytes)
    assert story.tiering.usage()["lent_bytes"] == SMALL.slot_bytes, "it is in one slot"
    for loan in (first, second):
        story.flush_host(avoid=())
        assert story.entry((1,)).slot == first.slot and not story.is_in_host((1, 2))
        story.tiering.end_loan(loan.id)
    assert story.tiering.usage()["lent_bytes"] == 0
    story.flush_host(avoid=PROMPT)


def test_an_operator_removes_no_chunk_that_is_lent():
    story = Story(capacities=())
    story.store(PROMPT)
    loan = lend(story, (1,))
    assert isinstance(loan, SlotLoan)
    count = story.remove(HOST, SMALL.namespace, None, leaves_holes=False)
    assert (count.removed, count.kept) == (2, 1)
    story.tiering.end_loan(loan.id)
    assert story.remove(HOST, SMALL.namespace, None, leaves_holes=False).removed == 1


def test_what_is_not_sealed_or_not_here_or_of_another_namespace_is_not_lent():
    story = Story()
    story.commit_prefix((1,))
    assert lend(story, (1,)) is Outcome.MISSING and held_here(story, (1,)) == 0
    story.end_every(Seal)
    assert isinstance(lend(story, (1,)), SlotLoan) and held_here(story, PROMPT) == 1
    assert lend(story, (2,)) is Outcome.MISSING
    assert story.tiering.lend(b"another one.....", SMALL.key((1,))) is Outcome.MISSING
    assert held_here(story, (1,), b"another one.....") == 0


def test_a_chunk_that_is_only_on_its_way_up_is_not_lent_but_counts_where_disk_has_it():
    story = Story(host_bytes=160)
    story.keep_only_below(PROMPT)
    assert (lend(story, (1,)), held_here(story, PROMPT)) == (Outcome.MISSING, 3)
    story.ask(PROMPT)
    assert story.waiting(Read) and lend(story, (1,)) is Outcome.MISSING
    story.finish_all()
    assert isinstance(lend(story, (1,)), SlotLoan)


def test_what_only_a_shared_tier_has_does_not_count():
    story = Story(host_bytes=160, is_last_shared=True)
    story.keep_only_below(PROMPT)
    assert held_here(story, PROMPT) == 0


def test_a_tail_is_not_lent():
    story = Story()
    story.store(PROMPT)
    assert story.commit_tail(story.session, PROMPT, "a", 4)
    story.finish_all()
    key = SMALL.tail(PROMPT, "a").key
    assert story.tiering.index.get(key) is not None
    assert story.tiering.lend(SMALL.namespace, key) is Outcome.MISSING
    assert story.tiering.held_here(SMALL.namespace, [key]) == 0


def test_loans_take_a_share_of_memory_and_none_of_what_lookups_lease():
    story = Story(host_bytes=400, capacities=(), limits=Limits())
    story.store((1, 2, 3, 4, 5, 6, 7, 8))
    most = int(400 * LENT_SHARE) // SMALL.slot_bytes
    loans = [lend(story, path) for path in chunks_of((1, 2, 3, 4, 5, 6, 7, 8))]
    assert [isinstance(loan, SlotLoan) for loan in loans] == [True] * most + [False] * (8 - most)
    assert loans[most:] == [Outcome.NO_ROOM] * (8 - most)
    assert isinstance(lend(story, (1,)), SlotLoan), "what is lent already takes no more room"
    assert (story.counted("loans"), story.counted("loans_refused")) == (most + 1, 8 - most)
    lookup = story.ask((1, 2, 3, 4, 5, 6, 7, 8))
    assert story.figures(lookup) == (8, 8, 8, True)
    assert story.tiering.usage()["leased_bytes"] == 8 * SMALL.slot_bytes


def test_loans_leave_a_namespace_most_of_what_its_quota_gives_it():
    story = Story(host_bytes=400, capacities=(), limits=Limits())
    story.tiering.quotas.set(SMALL.namespace, Quota(at_most=LENT_SHARE))
    chunks = int(400 * LENT_SHARE) // SMALL.slot_bytes
    for number in range(chunks):
        story.store((number,))
    loans = [lend(story, (number,)) for number in range(chunks)]
    assert sum(isinstance(loan, SlotLoan) for loan in loans) == 1 and Outcome.NO_ROOM in loans
    story.store((100,))
    assert story.is_in_host((100,)), "what is lent is not all that the namespace may have"


def test_where_slots_are_few_one_chunk_is_lent_all_the_same():
    story = Story(host_bytes=4 * SMALL.slot_bytes, capacities=())
    story.store((1,))
    story.store((2,))
    assert isinstance(lend(story, (1,)), SlotLoan)
    assert lend(story, (2,)) is Outcome.NO_ROOM


def test_a_chunk_that_was_lent_is_as_old_as_before():
    """Also where those behind it are idle: the prefix must not count as used for each chunk that a peer reads."""
    story = LruStory(host_bytes=160, capacities=())
    for number in range(3):
        story.store((number, number))
    for path in ((0,), (0, 0)):
        loan = lend(story, path)
        assert isinstance(loan, SlotLoan)
        story.tiering.end_loan(loan.id)
    for number in range(100, 130):
        story.store((number,))
        if story.is_in_host((0,)) != story.is_in_host((1,)):
            assert not story.is_in_host((0,)), "the oldest went first"
    assert not story.is_in_host((1,))


def test_a_lookup_of_what_is_lent_holds_it_beyond_the_loan():
    story = Story(host_bytes=160, capacities=())
    story.store(PROMPT)
    loan = lend(story, (1,))
    assert isinstance(loan, SlotLoan)
    lookup = story.ask(PROMPT)
    story.tiering.end_loan(loan.id)
    story.flush_host()
    assert story.figures(lookup) == (3, 3, 3, True) and story.is_in_host(PROMPT)
    story.release(lookup)
    story.flush_host(avoid=PROMPT)


def test_a_loan_by_itself_counts_as_no_use():
    story = SelectiveStory()
    story.store(PROMPT)
    loan = lend(story, (1,))
    assert isinstance(loan, SlotLoan) and held_here(story, PROMPT) == 3
    story.tiering.end_loan(loan.id)
    story.finish_all()
    assert not any(story.is_below(chunk) for chunk in chunks_of(PROMPT)), "nobody here asked for it"


def test_what_peers_have_read_is_worth_a_write_and_so_is_the_prefix_before_it():
    story = SelectiveStory()
    story.store(PROMPT)
    story.store((7,))
    keys, _ = SMALL.prefix(PROMPT)
    story.tiering.read_by_peers(SMALL.namespace, [b"an unknown key..", keys[1], keys[1]])
    story.tiering.read_by_peers(b"another one.....", [SMALL.key((7,)), keys[2]])
    story.step()
    story.finish_all()
    assert [story.is_below(chunk) for chunk in chunks_of(PROMPT)] == [True, True, False]
    assert story.uses(PROMPT) == [1, 1, 0] and not story.is_below((7,))
    story.tiering.read_by_peers(SMALL.namespace, keys)
    story.tiering.read_by_peers(SMALL.namespace, keys)
    story.step()
    story.finish_all()
    assert story.is_below(PROMPT) and story.uses(PROMPT) == [1, 1, 1], "however often they read it"


def test_an_answer_that_peers_have_read_is_a_prompts_by_now():
    story = Story()
    assert story.commit(story.session, (1,), is_answer=True)
    story.step()
    story.finish_all()
    assert not story.is_below((1,))
    story.tiering.read_by_peers(SMALL.namespace, [SMALL.key((1,))])
    story.step()
    story.finish_all()
    assert story.is_below((1,))
