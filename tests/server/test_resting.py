"""A session that stores nothing holds no slots: those it holds while nobody polls stand in the way of other sizes."""

from collections.abc import Callable
from pathlib import Path

from tests.kit.server.clients import SmallEngine, poll_until, worker_part
from tests.kit.server.probe import figures, wait_for
from tiered_kv.server.worker_client import WorkerClient

EngineStarter = Callable[..., SmallEngine]


def reserved(root: Path) -> int:
    return int(figures(root)["hierarchy"]["reserved_slots"])


def held(engine: SmallEngine) -> int:
    """Slots that the client has, once it has them all."""
    poll_until(engine.client, lambda: engine.client.credit_count == reserved(engine.root) > 0, "as many as granted")
    return engine.client.credit_count


def test_a_session_that_rests_holds_no_slots_and_a_lookup_wakes_it(engine: EngineStarter, root: Path) -> None:
    one = engine("one")
    assert held(one)
    one.client.rest()
    wait_for(lambda: reserved(root) == 0, "no slot of its")
    one.client.poll()
    assert one.client.is_resting and one.client.credit_count == 0
    assert one.hits(1) == 0
    assert not one.client.is_resting and held(one)
    one.store(3)
    one.wait_hits(3)


def test_slots_granted_on_the_way_to_a_rest_are_not_used(engine: EngineStarter, root: Path) -> None:
    """They lie in the socket when the session rests, and are somebody else's by the time it is read."""
    one = engine("one")
    for round_ in range(20):
        one.store(2, 1000 * round_)  # for which others are granted: not polled for
        one.client.rest()
        if round_ % 2:
            wait_for(lambda: reserved(root) == 0, "no slot of its")
        one.client.wake()
        assert held(one)
    for round_ in range(20):
        one.wait_hits(2, 1000 * round_)


def test_a_session_that_fills_a_slot_does_not_rest(engine: EngineStarter, root: Path) -> None:
    one = engine("one")
    slot = one.take_slot()
    one.client.rest()
    assert not one.client.is_resting
    one.client.give_back([slot])
    one.client.rest()
    wait_for(lambda: reserved(root) == 0, "no slot of its")


def test_a_session_goes_on_resting_after_a_reset(engine: EngineStarter, root: Path) -> None:
    one = engine("one")
    assert held(one)
    one.client.rest()
    one.client.reset()
    poll_until(one.client, lambda: one.client.is_ready, "the private epoch")
    wait_for(lambda: reserved(root) == 0, "no slot of its")
    one.client.wake()
    one.store(2)
    one.wait_hits(2)


def test_a_session_that_opens_while_nobody_polls_holds_no_slots(engine: EngineStarter, root: Path) -> None:
    """An engine whose last request ended while it had no session does not step, but its session opens all the same."""
    one = engine("one")
    assert held(one)
    one.worker.leave()
    one.wait_lost()
    one.client.rest()
    part = worker_part(weights=one.weights, stored_by=one.stored_by)
    one.worker = WorkerClient(one.config, one.engine_id, one.client.generation, part)
    wait_for(lambda: [session["state"] for session in figures(root)["sessions"]] == ["ready"], "the next session")
    assert reserved(root) == 0
    one.client.wake()
    poll_until(one.client, lambda: one.client.is_ready, "the session")
    one.store(2)
    one.wait_hits(2)


def test_an_engine_that_is_lost_while_it_rests_goes_on_resting(engine: EngineStarter, root: Path) -> None:
    one = engine("one")
    one.client.rest()
    one.worker.leave()
    one.wait_lost()
    one.rejoin()
    wait_for(lambda: reserved(root) == 0, "no slot of its")
    one.client.wake()
    one.store(2)
    one.wait_hits(2)
