"""A tier that stops to answer is taken out of tiering, tried now and then, and serves again without a restart."""

import pytest

from tests.kit.engine_world import EngineWorld
from tiered_kv.engine.stalls import STALL_S
from tiered_kv.metrics.recorder import Recorder
from tiered_kv.testing.faults import Fault, FaultyTier
from tiered_kv.testing.memory import MemoryTier
from tiered_kv.tiering.lookups import LookupRequest
from tiered_kv.tiers.wrappers.breaker import OPEN_LAST_S, BreakerState

PREFIX = (1, 2, 3)


class Guarded:
    """An engine over a shared tier behind a breaker, which fails while ``fault`` says so."""

    def __init__(self):
        self.fault = None
        self.memory = MemoryTier(is_shared=True)
        self.faulty = FaultyTier(self.memory, lambda _number: self.fault)
        self.world = EngineWorld(self.faulty, recorder=Recorder())
        self.breaker = self.world.opened[0].breaker
        self.session = self.world.open()
        self.world.settle()

    def pass_time(self, seconds=OPEN_LAST_S):
        self.world.clock.advance(seconds)
        self.world.settle()

    def forget_host(self):
        for number in range(40):
            self.world.store(self.session, (1000 + number,))


@pytest.fixture
def guarded():
    guarded = Guarded()
    yield guarded
    guarded.world.close()


def test_hits_end_while_the_tier_is_down_and_come_back_without_a_restart(guarded):
    world = guarded.world
    world.store(guarded.session, PREFIX)
    guarded.forget_host()
    guarded.fault = Fault.ERROR
    for _ in range(6):
        assert world.loaded(guarded.session, PREFIX) == 0
    assert guarded.breaker.state is BreakerState.OPEN
    before = guarded.faulty.operation_count
    assert not world.engine.read_bytes_per_s(1), "nothing is expected of it"
    assert world.loaded(guarded.session, PREFIX) == 0
    assert guarded.faulty.operation_count == before, "a request paid for a tier that is down"
    guarded.pass_time()
    assert guarded.breaker.is_open and guarded.faulty.operation_count > before
    guarded.fault = None
    guarded.pass_time()
    assert not guarded.breaker.is_open and world.engine.read_bytes_per_s(1), "the trial measured it anew"
    assert world.loaded(guarded.session, PREFIX) == 3


def test_what_was_stored_meanwhile_is_written_when_the_tier_is_back(guarded):
    world = guarded.world
    guarded.breaker.trip("down")
    guarded.fault = Fault.ERROR
    world.store(guarded.session, PREFIX)
    assert guarded.memory.names == [] and world.loaded(guarded.session, PREFIX) == 3
    guarded.fault = None
    guarded.pass_time()
    assert len(guarded.memory.names) == 3 and world.tiering.pending_writes == 0


def test_a_trial_that_breaks_is_a_trial_that_failed(guarded, monkeypatch):
    """Of whatever it broke: without its end there is never another one, and the tier is lost until a restart."""
    guarded.breaker.trip("down")

    def broken(*_):
        raise BufferError("cannot close exported pointers exist")

    with monkeypatch.context() as patch:
        patch.setattr("tiered_kv.engine.guards.self_test", broken)
        guarded.pass_time()
        assert guarded.breaker.state is BreakerState.OPEN
    guarded.world.errors.messages.clear()
    guarded.pass_time()
    assert not guarded.breaker.is_open


def test_a_tier_that_reads_but_does_not_write_stays_out(guarded):
    guarded.breaker.trip("down")
    puts = []

    def fail_puts(number):
        return Fault.ERROR if number in puts else None

    guarded.faulty._plan = fail_puts
    puts.extend(range(10_000))
    guarded.pass_time()
    assert guarded.breaker.is_open
    puts.clear()
    guarded.pass_time()
    assert not guarded.breaker.is_open


def with_a_prefix_below():
    """A tier of which host memory has other chunks only."""
    faulty = FaultyTier(MemoryTier(), lambda _number: None)
    world = EngineWorld(faulty, recorder=Recorder())
    session = world.open()
    world.settle()
    world.store(session, PREFIX)
    for number in range(40):
        world.store(session, (1000 + number,))
    return faulty, world, session


def test_a_local_tier_that_hangs_is_left_alone_until_it_answers():
    """Nothing fails: a read does not come back. Requests are answered from memory, and the hung one harms nobody."""
    faulty, world, session = with_a_prefix_below()
    asked = []

    def hang(operation, _name):
        if operation == "get" and not asked:
            asked.append(operation)
            world.clock.advance(STALL_S + 1)  # the other threads and the owner go on meanwhile
            world.step()
            assert world.opened[0].breaker.is_open and "has not ended for 11 s" in world.opened[0].breaker.reason
            before = faulty.operation_count
            assert world.tiering.lookup(session, LookupRequest(*world.clients[session].space.prefix((1000,))))
            world.step()
            assert faulty.operation_count == before, "a request was sent to a medium that hangs"

    faulty._hook = hang
    assert 0 < world.loaded(session, PREFIX) <= 3
    assert asked == ["get"]
    world.clock.advance(OPEN_LAST_S)
    world.settle()
    assert not world.opened[0].breaker.is_open
    world.store(session, (5, 5))
    assert world.loaded(session, (5, 5)) == 2
    world.close()


def test_what_still_hangs_when_its_tier_answers_again_does_not_take_it_out_once_more():
    """Its thread comes back when the medium lets it, which may be never."""
    faulty, world, session = with_a_prefix_below()
    states = []

    def hang(operation, _name):
        if operation == "get" and not states:
            world.clock.advance(STALL_S + 1)
            world.step()
            states.append(world.opened[0].breaker.is_open)
            world.clock.advance(OPEN_LAST_S)
            world.settle()  # a trial, in another thread
            states.append(world.opened[0].breaker.is_open)
            world.clock.advance(STALL_S + 1)
            world.settle()
            states.append(world.opened[0].breaker.is_open)

    faulty._hook = hang
    world.loaded(session, PREFIX)
    assert states == [True, False, False]
    world.close()


def test_a_trial_that_has_ended_wakes_the_owner(guarded, monkeypatch):
    """Nothing else may happen for a long time: the tier would stay out until then."""
    woken = []
    guarded.breaker.trip("down")
    guarded.world.clock.advance(OPEN_LAST_S)
    guarded.world.step()
    monkeypatch.setattr(guarded.world.executor, "notify", lambda: woken.append(len(guarded.world.engine.guards._ended)))
    guarded.world.executor.step()
    assert woken[-1] == 1
    guarded.world.settle()
    assert not guarded.breaker.is_open
