"""Two answers of a server as rates."""

import pytest

from tests.kit.samples.figures import curve, operation, server, tier, tokens
from tiered_kv.ops.rates import rates


def test_tokens_are_told_per_second_and_as_a_share():
    before = server(10.0, tokens=tokens(1000, host=500, disk=100, object=0))
    after = server(14.0, tokens=tokens(1400, host=600, disk=300, object=0))
    found = rates(before, after)
    assert (found.interval_s, found.lookups_per_s) == (4.0, 10.0)
    assert (found.asked_tokens_per_s, found.hit_tokens_per_s, found.hit_share) == (100.0, 75.0, 0.75)
    assert {one.tier: one.hit_tokens_per_s for one in found.tiers} == {"host": 25.0, "disk": 50.0, "object": 0.0}


def test_nothing_asked_for_has_no_share():
    same = tokens(1000, host=500)
    assert rates(server(1.0, tokens=same), server(2.0, tokens=same)).hit_share is None


def test_bytes_and_times_are_those_of_the_interval():
    before = server(10.0, operations=[operation("disk", "get", "ok", 100, 4000, 50.0)])
    after = server(
        12.0,
        operations=[
            operation("disk", "get", "ok", 104, 4400, 50.2),
            operation("disk", "get", "missing", 2, 0, 0.1),
            operation("disk", "put", "ok", 8, 800, 0.4),
            operation("disk", "put", "no_room", 2, 0, 0.0),
            operation("object", "contains", "unavailable", 6, 0, 6.0),
        ],
    )
    _, disk, store = rates(before, after).tiers
    assert (disk.read_bytes_per_s, disk.reads_per_s) == (200.0, 3.0)
    assert disk.read_s == pytest.approx(0.05)
    assert (disk.written_bytes_per_s, disk.writes_per_s, disk.write_s) == (400.0, 5.0, pytest.approx(0.04))
    assert disk.failures_per_s == 1.0  # what is not there is no failure
    assert (store.reads_per_s, store.read_s, store.failures_per_s) == (0.0, None, 3.0)


def test_admissions_are_told_by_tier():
    before = server(10.0, tiers=[tier("disk", admitted_chunks=5, declined_chunks=10)])
    after = server(12.0, tiers=[tier("disk", admitted_chunks=9, declined_chunks=40)])
    (disk,) = [one for one in rates(before, after).tiers if one.tier == "disk"]
    assert (disk.admitted_per_s, disk.declined_per_s) == (2.0, 15.0)


def test_drops_are_told_by_reason_and_only_while_they_happen():
    before = server(1.0, counters={"write_dropped_for_load": 5, "write_dropped_no_room": 1, "written": 9})
    after = server(
        2.0,
        counters={
            "write_dropped_for_load": 8,
            "write_dropped_no_room": 1,
            "upload_dropped_no_parent": 2,
            "written": 99,
        },
    )
    assert rates(before, after).drops_per_s == {"write_dropped_for_load": 3.0, "upload_dropped_no_parent": 2.0}


def test_states_are_those_of_the_second_answer():
    changed = tier("disk", backlog_chunks=4, queued_bytes=400, breaker="open", jobs={"get": 3, "put": 2})
    found = rates(server(1.0), server(2.0, tiers=[changed], clients=9))
    host, disk = found.tiers
    assert (found.clients, found.sessions, found.lookups) == (9, 1, 1)
    assert (host.used_bytes, host.capacity_bytes, host.chunks, host.breaker) == (2000, 4000, 5, None)
    assert (disk.backlog_chunks, disk.queued_bytes, disk.jobs, disk.breaker) == (4, 400, 5, "open")


@pytest.mark.parametrize("after", [server(5.0), server(4.0), server(9.0, server_id="another")])
def test_only_two_moments_of_one_server_have_rates(after):
    with pytest.raises(ValueError, match="one server at two moments"):
        rates(server(5.0), after)


def test_curves_are_those_of_the_second_answer():
    before = server(1.0, curves=[curve("ab", *[0.0] * 8)])
    after = server(2.0, curves=[curve("ab", 0.1, 0.25, 0.5, 0.75, 0.5, 0.75, 0.75, 1.0)])
    (found,) = rates(before, after).curves
    assert [found.gain("host", times) for times in (0.5, 1, 2, 4)] == pytest.approx([-0.15, 0, 0.25, 0.5])
    assert (found.found("disk", 2), found.gain("disk", 2)) == (0.75, 0)
    assert (found.found("object", 1), found.gain("object", 2), found.gain("disk", 8)) == (None, None, None)
