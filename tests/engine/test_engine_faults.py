"""Every operation of a tier fails in turn, in every way: the bytes stay right and the engine goes on."""

import logging

import pytest

from tests.kit.counts import count, seed
from tests.kit.engine_world import BLOB_BYTES, EngineWorld
from tiered_kv.errors import TierUnavailable
from tiered_kv.testing.faults import Fault, FaultyTier, at, seeded
from tiered_kv.testing.memory import MemoryTier

SHARED = (1, 2, 3)
PREFIXES = [(*SHARED, 4), (*SHARED, 5, 6), (9, 8, 7), (6, 5), (7, 7)]
HOST_BYTES = 8 * BLOB_BYTES
CAPACITY_BYTES = 12 * BLOB_BYTES


def started(tier):
    """A running engine; a scan that fails ends the start, and the next one is a new operation."""
    try:
        return EngineWorld(tier, HOST_BYTES)
    except TierUnavailable:
        return EngineWorld(tier, HOST_BYTES)


def a_day(tier):
    """Ask for prefixes and store them, more than host memory and the tier hold; then start again and do the same."""
    for _ in range(2):
        world = started(tier)
        session = world.open()
        world.settle()
        for prefix in PREFIXES * 2:
            assert 0 <= world.loaded(session, prefix) <= len(prefix)
            world.store(session, prefix)
        for prefix in PREFIXES:
            world.loaded(session, prefix)
        world.clock.advance(60)
        world.settle()
        world.check_idle()
        yield world, session
        world.close_session(session)
        world.abandon()


def operations_of_a_day():
    tier = FaultyTier(MemoryTier(CAPACITY_BYTES), at({}))
    for _ in a_day(tier):
        pass
    return tier.operation_count


OPERATIONS = operations_of_a_day()


@pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.value)
def test_one_failing_operation_costs_misses_and_nothing_else(fault):
    assert OPERATIONS > 40
    for number in range(OPERATIONS):
        memory = MemoryTier(CAPACITY_BYTES)
        tier = FaultyTier(memory, at({number: fault}))
        for world, session in a_day(tier):
            world.store(session, (3, 3, 3))
            assert world.loaded(session, (3, 3, 3)) == 3, f"operation {number}: the engine does not store any more"


@pytest.mark.parametrize("number", range(seed(), seed() + count("SEEDS", 20)))
def test_a_tier_that_fails_often_costs_misses_and_nothing_else(number):
    plan = seeded(number, 0.3)
    tier = FaultyTier(MemoryTier(CAPACITY_BYTES), lambda operation: plan(operation) if operation else None)
    world = EngineWorld(tier, HOST_BYTES)
    session = world.open()
    world.settle()
    for prefix in PREFIXES * 4:
        world.store(session, prefix)
        world.loaded(session, prefix)
    world.check_idle()
    world.close()


def test_a_dead_tier_leaves_host_memory_as_a_cache(caplog):
    memory = MemoryTier()
    tier = FaultyTier(memory, lambda number: Fault.ERROR if number else None)
    world = EngineWorld(tier, HOST_BYTES)
    session = world.open()
    world.settle()
    for number in range(30):
        world.store(session, (number, 1))
        assert world.loaded(session, (number, 1)) == 2
    assert memory.names == []
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING and "outcome=unavailable" in r.getMessage()]
    assert len(warnings) == 1, "one warning per interval, not one per blob"
    world.clock.advance(11)
    world.store(session, (99,))
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING and "outcome=unavailable" in r.getMessage()]
    assert len(warnings) == 2
    world.close()
