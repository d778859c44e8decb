"""Leases end by the server's own clock, and room goes to engines by their shares."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.server.clients import SmallEngine, content, poll_until
from tests.kit.server.probe import figures, wait_for, wait_written
from tiered_kv.ops.server_link import ServerLink
from tiered_kv.tiering.slots import SLOTS_PER_SLAB_MAX

CHUNKS = 3
SLOT_BYTES = 36 << 10
LIMITS = {"host_bytes": 32 * SLOT_BYTES}
PROMPTS = 8


def leased_bytes(root: Path) -> int:
    return int(figures(root)["hierarchy"]["leased_bytes"])


def first_token(prompt: int) -> int:
    return prompt * 1_000_000


@pytest.fixture
def stored(root: Path, engine: Callable[..., SmallEngine]) -> Callable[..., SmallEngine]:
    """Engines of a server whose disk holds prompts and whose host memory holds none."""
    one = engine("storing", **LIMITS)
    for prompt in range(PROMPTS):
        one.store(CHUNKS, first_token(prompt))
        wait_written(root)
    with ServerLink.of_directory(root) as link:
        link.evict("host", b"", None, holes=True)
    return lambda name, **more: engine(name, **LIMITS, **more)


def ask(engine: SmallEngine, prompt: int) -> int:
    """Look a prompt up as an engine does whose requests are admitted in this order."""
    keys = engine.keys(CHUNKS, first_token(prompt))
    lookup = engine.client.lookup(keys.keys, keys.digests, turn=(0, prompt))
    assert lookup is not None
    return lookup


def fill_the_cap(engine: SmallEngine) -> list[int]:
    """Ask for more than may be leased, and load none of it."""
    lookups = [ask(engine, prompt) for prompt in range(PROMPTS)]
    answers = engine.client.lookups
    poll_until(engine.client, lambda: any(answers[one].queued for one in lookups), "the cap")
    poll_until(engine.client, lambda: answers[lookups[0]].ready == CHUNKS, "the first prompt")
    return lookups


def test_leases_that_nobody_claims_end_by_the_servers_clock(root: Path, stored: Callable[..., SmallEngine]) -> None:
    one = stored("idle", lease_s=1.0)
    lookups = fill_the_cap(one)
    one.client.claim(lookups[0])

    # The engine does nothing any more: it neither asks nor reads.
    wait_for(lambda: leased_bytes(root) == CHUNKS * SLOT_BYTES, "all but the claimed leases to end", deadline_s=60)

    one.client.poll()
    assert one.client.is_leased(lookups[0], 0), "a load runs, and its leases ended"
    assert not one.client.is_leased(lookups[1], 0)
    assert one.client.lookups[lookups[1]].is_ended and not one.client.lookups[lookups[1]].slots
    assert figures(root)["counters"]["lease_expired"] >= 2


def test_a_claim_that_comes_too_late_is_found_out(root: Path, stored: Callable[..., SmallEngine]) -> None:
    one = stored("late", lease_s=1.0)
    lookups = fill_the_cap(one)
    slots = one.client.lookups[lookups[0]].slots
    wait_for(lambda: leased_bytes(root) == 0, "leases to end", deadline_s=60)

    # It has not read its socket yet, so it believes in its leases, claims them and copies.
    assert one.client.lookups[lookups[0]].slots == slots
    one.client.claim(lookups[0])

    assert not one.client.is_leased(lookups[0], 0)


def test_a_queue_does_not_take_another_engines_share(root: Path, stored: Callable[..., SmallEngine]) -> None:
    hog = stored("hog")
    fill_the_cap(hog)
    cap_bytes = leased_bytes(root)

    other = stored("other")  # asks for what is on disk alone, and what nobody else wants first
    assert [other.hits(CHUNKS, first_token(prompt)) for prompt in (PROMPTS - 1, PROMPTS - 2)] == [CHUNKS] * 2

    assert figures(root)["counters"]["lease_gave_way"]
    assert leased_bytes(root) <= cap_bytes


def test_an_engine_that_does_not_read_keeps_its_slots_until_it_does(
    root: Path, stored: Callable[..., SmallEngine]
) -> None:
    """What was not said to it cannot end: it may copy from these slots, and would never know."""
    one = stored("deaf", lease_s=1.0)
    lookups = fill_the_cap(one)
    held = leased_bytes(root)
    while one.client.ask_figures() and len(one.client._outbox) == 0:
        pass  # answers that it does not read fill its socket, and then the server's own queue
    wait_for(
        lambda: figures(root)["counters"].get("lease_expired", 0) > 0, "the leases' time to be over", deadline_s=60
    )
    assert leased_bytes(root) == held

    poll_until(one.client, lambda: one.client.lookups[lookups[0]].is_ended, "the end of a lease")
    wait_for(lambda: leased_bytes(root) == 0, "leases to end", deadline_s=60)


def test_whoever_was_promised_chunks_hears_that_one_is_damaged_and_finds_its_slots_as_they_were(
    root: Path, engine: Callable[..., SmallEngine]
) -> None:
    """Its write to disk finds it out, here once it is wanted there: until then the chunk stays in host memory alone."""
    one = engine("reads", disk_admission="second-touch", **LIMITS)
    client = one.client
    one.store(CHUNKS)
    keys = one.keys(CHUNKS)
    loads, waits = [
        client.lookup(keys.keys, keys.digests, is_claimed=is_claimed, may_search=False) for is_claimed in (True, False)
    ]
    assert loads is not None and waits is not None
    poll_until(client, lambda: all(client.lookups[each].ready == CHUNKS for each in (loads, waits)), "all chunks")
    slots = client.lookups[loads].slots
    assert client.info is not None
    slab, index = divmod(slots[1], SLOTS_PER_SLAB_MAX)
    with one.worker.arena.view(slab, index * client.info.slot_bytes, client.info.payload_offset) as header:
        header[:] = bytes(len(header))  # somebody wrote past the end of another slot

    assert client.pin(keys.keys[-1], 0.0), "wanted below, with no lease"

    poll_until(client, lambda: all(client.lookups[each].is_ended for each in (loads, waits)), "the word of it")
    assert not client.is_leased(loads, client.generation), "what was read of it would count"
    assert figures(root)["counters"]["lease_damaged"] == 2
    assert leased_bytes(root) == CHUNKS * SLOT_BYTES, "a running load may still read"
    with one.payload(slots[2]) as view:
        assert view == content(2)
    client.release(loads)
    wait_for(lambda: one.hits(CHUNKS) == 1, "the damaged chunk to go")
    one.store(CHUNKS, start=1)
    one.wait_hits(CHUNKS)
