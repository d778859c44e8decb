"""The two sides of a grant, each alone: what a server may PUT, and what a leader may promise."""

import pytest

from tiered_kv.errors import CapacityExceeded, TierUnavailable
from tiered_kv.fleet.grants import GrantLedger
from tiered_kv.fleet.layout import MemberReport, encode, session_path
from tiered_kv.fleet.member import LocalBudget
from tiered_kv.fleet.timing import Timing

PACE = Timing(ahead_bytes=1000)


class Time:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Time()


@pytest.fixture
def account(clock):
    account = LocalBudget(PACE, clock)
    assert account.open()
    account.grant(1000, clock.now)
    return account


# -- a server's side --------------------------------------------------------------------------------------------------


def test_no_more_than_granted_is_reserved(account):
    account.reserve(600)
    with pytest.raises(CapacityExceeded, match="used up"):
        account.reserve(500)
    account.finished(600, False)
    account.reserve(1000)
    account.finished(1000, True)
    with pytest.raises(CapacityExceeded):
        account.reserve(1)
    assert account.report(1, 1, False, []).spent_bytes == 1000


def test_a_grant_that_nobody_confirms_runs_out(account, clock):
    clock.now = PACE.grant_use_s
    with pytest.raises(CapacityExceeded, match="not confirmed"):
        account.reserve(1)
    account.grant(5000, clock.now)  # too late: the bytes may be somebody else's by now
    with pytest.raises(CapacityExceeded):
        account.reserve(1)
    assert not account.is_current()
    assert account.open()
    account.grant(5000, clock.now)
    account.reserve(5000)


def test_whatever_was_begun_ends_before_the_report_is_too_old(clock):
    assert PACE.grant_use_s + PACE.put_timeout_s + PACE.settle_s < PACE.expiry_s


def test_an_unknown_outcome_stays_in_flight_and_then_counts_as_stored(account, clock):
    account.reserve(400)
    account.finished(400, None)
    assert not account.is_drained() and not account.open()
    assert account.report(1, 1, False, []).spent_bytes == 0
    clock.now = PACE.settle_s
    assert account.is_drained()
    assert account.report(2, 1, False, []).spent_bytes == 400


def test_a_session_begins_only_when_nothing_is_in_flight(account):
    account.reserve(100)
    account.shut()
    assert not account.open()
    account.finished(100, True)
    assert account.open()
    assert account.report(1, 2, False, []).spent_bytes == 0


def test_idle_bytes_are_given_back_when_room_is_tight(account, clock):
    account.reserve(10)
    account.finished(10, True)
    clock.now = 1.0
    assert account.report(1, 1, True, []).returned_bytes == 1000 - 10 - 20
    account.reserve(20)
    with pytest.raises(CapacityExceeded):
        account.reserve(1)


# -- the leader's side ------------------------------------------------------------------------------------------------


class Reports:
    """The servers' reports, as a store shows them."""

    def __init__(self):
        self.objects = {}
        self.failing = {}
        self._stamp = 0

    def say(self, name, **content):
        self._stamp += 1
        self.objects[session_path(name)] = (
            encode(MemberReport(**{"seq": self._stamp, "term": 1} | content)),
            self._stamp,
        )

    def list(self, prefix):
        from tiered_kv.tiers.object.medium import ObjectInfo

        return iter([ObjectInfo(path, len(data), float(stamp)) for path, (data, stamp) in self.objects.items()])

    def get_many(self, paths, size_max):
        return [self.failing.get(path) or self.objects.get(path, (None,))[0] for path in paths]


@pytest.fixture
def reports():
    return Reports()


@pytest.fixture
def fleet(reports, clock):
    return GrantLedger(reports, PACE, clock, 1, 6400)


def listed(fleet, size_bytes):
    fleet.begin_list()
    fleet.end_list(size_bytes, 0, 0)


def test_nothing_is_granted_before_the_first_list(fleet, reports):
    reports.say("a.1", goal_bytes=500)
    fleet.refresh("")
    fleet.grant()
    assert fleet.granted_to("a.1") == 0 and not fleet.lacks_room


def test_grants_and_what_is_there_never_pass_the_limit(fleet, reports, clock):
    for name in ("a.1", "b.1", "c.1"):
        reports.say(name, goal_bytes=10_000, needed_bytes=500)
    fleet.refresh("")
    listed(fleet, 5000)
    for _ in range(20):
        fleet.grant()
        granted = sum(fleet.granted_to(name) for name in ("a.1", "b.1", "c.1"))
        assert 0 < granted <= 6400 - 100 - 5000
    assert fleet.room() >= 0 and fleet.lacks_room


def test_more_servers_have_more_room_for_their_logs(reports, clock):
    fleet = GrantLedger(reports, PACE, clock, 1, 1 << 40)
    for number in range(40):
        reports.say(f"s{number}.1")
        fleet.refresh("")
        assert fleet.reserve_bytes() == max(16, number + 1) << 20
    small = GrantLedger(reports, PACE, clock, 1, 6400)
    small.refresh("")
    assert small.reserve_bytes() == 100, "never more than a small part of the limit"


def test_what_was_put_since_the_reports_before_a_list_counts_on(fleet, reports):
    reports.say("a.1", goal_bytes=400, needed_bytes=100)
    fleet.refresh("")
    listed(fleet, 0)
    fleet.grant()
    granted = fleet.granted_to("a.1")
    assert granted == 400
    fleet.begin_list()  # its report says nothing was PUT yet; it may be PUT at any moment of the LIST
    reports.say("a.1", spent_bytes=400, goal_bytes=400)
    fleet.refresh("")
    fleet.end_list(400, 0, 1)
    assert fleet.room() == 6400 - 100 - 800
    listed(fleet, 400)
    assert fleet.room() == 6400 - 100 - 400


def test_a_session_that_ends_counts_until_the_next_list(fleet, reports):
    reports.say("a.1", goal_bytes=400, needed_bytes=100)
    fleet.refresh("")
    listed(fleet, 0)
    fleet.grant()
    fleet.begin_list()
    reports.objects.clear()
    fleet.refresh("")
    fleet.end_list(0, 0, 0)
    assert fleet.room() == 6400 - 100 - 400
    listed(fleet, 0)
    assert fleet.room() == 6400 - 100


def test_a_server_of_an_older_term_is_waited_for_until_it_is_dead(fleet, reports, clock):
    reports.say("a.1", term=0)
    fleet.refresh("")
    assert fleet.waits_for() == ["a.1"]
    for _ in range(5):
        clock.now += PACE.expiry_s / 2
        reports.say("a.1", term=0)
        fleet.refresh("")
        assert fleet.waits_for() == ["a.1"]
    clock.now += PACE.expiry_s + 1
    fleet.refresh("")
    assert fleet.waits_for() == []


def test_a_leader_that_was_frozen_does_not_call_the_living_dead(fleet, reports, clock):
    reports.say("a.1")
    fleet.refresh("")
    clock.now += 100 * PACE.expiry_s
    reports.say("a.1")
    fleet.refresh("")
    assert len(fleet.live()) == 1


def test_a_report_that_cannot_be_read_leaves_its_server_alive_and_the_others_answered(fleet, reports, clock):
    for name in ("a.1", "b.1"):
        reports.say(name, goal_bytes=400, needed_bytes=100)
    fleet.refresh("")
    listed(fleet, 0)
    reports.failing[session_path("a.1")] = TierUnavailable("503")
    for _ in range(5):
        clock.now += PACE.expiry_s
        reports.say("b.1", goal_bytes=400, needed_bytes=100)
        fleet.refresh("")
    assert len(fleet.live()) == 2, "nobody has seen that it does not change"
    assert [fleet.answers()[name].seq for name in ("a.1", "b.1")] == [1, 7]
    reports.failing.clear()
    fleet.refresh("")
    assert set(fleet.answers()) == {"b.1"}


def test_a_session_that_was_never_read_is_not_overlooked(fleet, reports):
    """It may be writing on grants of an older term: without it the first LIST could begin too early."""
    reports.say("a.1", term=0)
    reports.failing[session_path("a.1")] = TierUnavailable("503")
    with pytest.raises(TierUnavailable):
        fleet.refresh("")
    reports.failing.clear()
    fleet.refresh("")
    assert fleet.waits_for() == ["a.1"]


def test_the_dead_are_never_answered_again(fleet, reports, clock):
    reports.say("a.1", goal_bytes=100)
    fleet.refresh("")
    clock.now += PACE.expiry_s + 1
    fleet.refresh("")
    reports.say("a.1", goal_bytes=100)
    fleet.refresh("")
    assert fleet.answers() == {}
    reports.say("a.2", goal_bytes=100)
    fleet.refresh("")
    assert set(fleet.answers()) == {"a.2"}


def test_a_report_that_was_gone_and_is_back_is_answered_no_more(fleet, reports):
    """What it was granted nobody knows any more: counted from nothing, it would wait for all it ever stored."""
    reports.say("a.1", goal_bytes=100, needed_bytes=100)
    fleet.refresh("")
    listed(fleet, 0)
    fleet.grant()
    reports.objects.clear()
    fleet.refresh("")
    reports.say("a.1", spent_bytes=100, goal_bytes=200, needed_bytes=100)
    fleet.refresh("")
    assert fleet.answers() == {}
    reports.say("a.2", goal_bytes=100, needed_bytes=100)
    fleet.refresh("")
    fleet.grant()
    assert fleet.answers()["a.2"].granted_bytes == 100


def test_the_leader_before_is_not_waited_for_when_its_lease_ran_out(fleet, reports):
    reports.say("old.3", term=0)
    fleet.assume_gone("old.3")
    fleet.refresh("")
    assert fleet.waits_for() == []
