"""Recurrent states and drafts in the simulator: vLLM's real specs, block managers and schedulers, both runners.

Each of the wrong ways that real engines show by a log-probability only (``tests/e2e/test_recurrent_state.py``,
``tests/e2e/test_drafts.py``) must be noticed here, too, or the seeds prove nothing. A seed is run again with
``TIERED_KV_SEED=<n> TIERED_KV_STATE_SEEDS=1``.
"""

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.kit.counts import count, seed
from tests.kit.server.probe import wait_written
from tests.kit.server.processes import end_server
from tests.sim.vllm.asking import AskedEngine, come_to_rest, parameters, random_tokens, settings
from tests.sim.vllm.checks import leaks, server_leaks, undrafted_blobs
from tests.sim.vllm.engine import Setup, SimulatedEngine
from tests.sim.vllm.families import DRAFTS, MATCH_UNIT, STATES
from tests.sim.vllm.faults import (
    last_block_of_a_draft_is_loaded,
    loads_are_synchronous,
    states_loaded_at_the_last_token,
    states_saved_by_position,
    undrafted_blocks_are_stored,
)
from tests.sim.vllm.scenario import Plan, run_scenario
from tiered_kv.errors import UnsupportedModel
from tiered_kv.vllm import connector
from tiered_kv.vllm.compat import ask_for_state

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

BLOCK = 8
"""Of states, and so a chunk."""
RUNNERS = ("v1", "v2")
KINDS = tuple(dict.fromkeys((*sorted(STATES), *DRAFTS)))
SEEDS = count("STATE_SEEDS", len(KINDS))
SEEN_IN_200 = (
    "loads", "loads_failed", "stores", "states", "state_parts_stored", "state_parts_dropped", "state_dropped_partial",
    "store_dropped_undrafted", "preemptions", "aborts", "aborts_while_loading", "restarts", "resets", "kills",
    "freezes", "follow_ups", "lost_states", "lost_chunks", "hit_chunks_host", "hit_chunks_disk", "accepted_drafts",
    "rejected_drafts", "checked_draft_tokens", "undrafted_tokens", "block_copies",
)  # fmt: skip
"""What must have happened in so many seeds, or they show less than they should."""


@pytest.fixture(scope="module")
def totals():
    """What all seeds of this run did."""
    return Counter()


@pytest.mark.parametrize("number", range(seed(), seed() + SEEDS))
def test_seed(number, tmp_path, totals):
    """One family after the other; each under both runners and both schedulers."""
    family, mode = KINDS[number % len(KINDS)], (number + number // len(KINDS)) % 4
    plan = Plan.draw(number, tmp_path / "cache", is_v2=bool(mode & 1), is_async=bool(mode & 2), family=family)
    outcome = run_scenario(plan, tmp_path / "cache")
    totals.update(outcome.counts, seeds=1)
    print(f"family={family} seed={number} mode={mode} {dict(outcome.counts)}")
    assert not outcome.wrong, "\n".join([f"family={family} seed={number}", repr(plan), *outcome.wrong])
    assert outcome.counts["checked_tokens"] and not outcome.counts["wrong_tokens"]
    assert not outcome.counts["wrong_draft_tokens"]


def test_the_seeds_did_what_they_are_for(totals):
    if totals["seeds"] < 200:
        pytest.skip("says something of a whole set of seeds only")
    print(dict(totals))
    assert [name for name in SEEN_IN_200 if not totals[name]] == []


class Asked(AskedEngine):
    """One family's engine. What it is asked runs to its end, and its GPU forgets everything behind it."""

    def __init__(self, root, family, runner="v1", **changes):
        setup = Setup(
            family=family,
            is_hybrid=True,
            is_v2=runner == "v2",
            is_async=runner == "v2",
            layout="BLHNC",
            requests_max=2,
            token_budget=48,
            match_unit=MATCH_UNIT.get(family),
            retention=None if family in MATCH_UNIT else 0,
            draft_tokens=2 if family in DRAFTS else 0,
            connector=settings(root),
        )
        setup = replace(setup, **changes)
        self.setup = replace(setup, pool_blocks=setup.pool_blocks_min)
        self.root = root
        self.engine = SimulatedEngine(self.setup)

    def ask(self, *prompts, max_tokens=9):
        """Answer prompts at once, and say how many tokens were loaded for them."""
        before = self.counters["load_tokens"]
        for prompt in prompts:
            self.engine.add(f"r{len(self.engine.answers)}", prompt, parameters(max_tokens))
        come_to_rest(self.engine)
        assert self.engine.scheduler.reset_prefix_cache()
        return self.counters["load_tokens"] - before

    def run_unstored(self, *prompts):
        """Answer prompts at once as without the cache, with what the GPU has."""
        for prompt in prompts:
            unstored = parameters(2)
            unstored.extra_args = {"kv_transfer_params": {"tiered_kv.skip_save": True, "tiered_kv.skip_load": True}}
            self.engine.add(f"r{len(self.engine.answers)}", prompt, unstored)
        come_to_rest(self.engine)


@pytest.fixture
def asked(tmp_path):
    made = []

    def make(family, runner="v1", **changes):
        made.append(Asked(tmp_path / "cache", family, runner, **changes))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()
        end_server(one.root)


def prompt(tokens, number=1):
    return random_tokens(random.Random(number), tokens)


LENGTHS = (7, 8, 9, 16, 17, 61, 96)


@pytest.mark.parametrize(("family", "runner"), [("state", "v1"), ("state_window", "v2"), ("state_tail", "v2")])
def test_a_prompt_goes_on_from_its_last_state(asked, family, runner):
    """At most at the boundary before its last token; one at a time, then two at once, from memory and from disk."""
    one = asked(family, runner, ranks=2)
    prompts = [prompt(length, length) for length in LENGTHS]
    assert [one.ask(each) for each in prompts] == [0] * len(prompts)
    whole = [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
    assert [one.ask(each) for each in prompts] == whole
    assert one.ask(*prompts) >= sum(whole), "one that is preempted loads again"
    wait_written(one.root)
    one.engine.close()
    end_server(one.root)
    before, one.engine = one.findings.wrong, SimulatedEngine(one.setup)
    assert [one.ask(each) for each in prompts] == whole
    assert before == one.findings.wrong == [] and not one.counters["loads_failed"]
    assert leaks(one.engine) == [] and server_leaks(one.engine, one.root) == []


FORKS = {"state": 40, "state_window": 40, "state_draft": 32}
"""Where prompts that share 43 tokens go on; a draft's last block is given up."""


@pytest.mark.parametrize(("family", "runner"), [("state", "v1"), ("state_window", "v2"), ("state_draft", "v1")])
def test_a_fork_that_only_the_cache_knows_gets_a_state(asked, family, runner):
    """As vLLM does for one that its own cache knows: the second prompt leaves it there, the third goes on from it."""
    one, stem = asked(family, runner), prompt(43)
    assert [one.ask(stem + prompt(20, number)) for number in (2, 3, 4)] == [0, 0, FORKS[family]]
    assert one.counters["state_forks"] == 1
    assert one.findings.wrong == []


def test_a_request_that_stores_nothing_leaves_no_state_at_its_fork(asked):
    one, stem, unsaved = asked("state"), prompt(43), parameters(2)
    one.ask(stem + prompt(20, 2))
    unsaved.extra_args = {"kv_transfer_params": {"tiered_kv.skip_save": True}}
    one.engine.add("unsaved", stem + prompt(20, 3), unsaved)
    come_to_rest(one.engine)
    assert one.engine.scheduler.reset_prefix_cache()
    assert one.ask(stem + prompt(20, 4)) == 0 and one.counters["state_forks"] == 1
    assert one.ask(stem + prompt(20, 5)) == 40
    assert one.findings.wrong == []


@pytest.mark.parametrize("family", ["state", "state_draft"])
def test_a_fork_is_asked_for_until_the_request_is_admitted(asked, family):
    """vLLM begins anew each time that it finds no room for a request."""
    one, stem = asked(family, requests_max=4), prompt(43)
    one.ask(stem + prompt(20, 2))
    before = one.counters["lookups"]
    for name, wanted in (("a", prompt(150, 5)), ("b", prompt(150, 6)), ("fork", stem + prompt(20, 3))):
        one.engine.add(name, wanted, parameters(4))
    come_to_rest(one.engine)
    assert one.engine.scheduler.reset_prefix_cache()
    assert one.counters["lookups"] > before and one.counters["state_forks"] == 1
    assert one.ask(stem + prompt(20, 4)) == FORKS[family]
    assert one.findings.wrong == [] and leaks(one.engine) == []


def test_a_fork_behind_what_a_lookup_may_bring_gets_its_state_where_it_is_of_use(asked, tmp_path):
    """And once: what can never be leased looks as if it were not there."""
    few = settings(tmp_path / "cache") | {"host_bytes": 19 * 8192}
    one, stem = asked("state", connector=few), prompt(43)
    hits = [one.ask(stem + prompt(20, number)) for number in range(2, 7)]
    assert hits == [0, 0, 32, 32, 32]
    assert one.counters["state_forks"] == 1
    assert one.findings.wrong == []


@pytest.mark.parametrize("family", ["state", "state_draft"])
@pytest.mark.parametrize("length", [48, 49, 50, 61])
@pytest.mark.parametrize("vllms_block", [BLOCK, BLOCK // 2])
def test_a_prompt_that_is_held_whole_gets_a_state_at_its_last_boundary(asked, family, length, vllms_block):
    """Also where vLLM's scheduler takes half a block for one, as its CPU build does in a process of its own."""
    one = asked(family)
    one.engine.scheduler.cache_config.block_size = vllms_block
    one.ask(prompt(90))
    assert one.ask(prompt(90)[:length]) == 0
    assert one.counters["state_forks"] == 1
    assert one.ask(prompt(90)[:length]) == (length // 8 - 1 if family == "state_draft" else (length - 1) // 8) * 8
    assert one.findings.wrong == []


def test_a_fork_of_vllms_own_cache_stays_where_it_is_further(asked):
    """Of what vLLM has here the cache lost the end; and the other way round."""
    request = SimpleNamespace(shared_prefix_boundary=16)
    assert [ask_for_state(request, tokens) for tokens in (8, 16, 24)] == [False, False, True]
    assert request.shared_prefix_boundary == 24
    assert not ask_for_state(SimpleNamespace(), 8), "a vLLM that makes none"


def test_a_state_inside_a_block_is_left_alone(asked):
    """With ``prefix_match_unit`` vLLM hands over the state of a prompt's last unit, too, in a copy of its block.

    It has no chunk to follow, so it is counted and not stored; vLLM's own cache goes on from it.
    """
    one = asked("state_tail")
    copies = []
    schedule = one.engine.scheduler.schedule
    one.engine.scheduler.schedule = lambda: copies.append((out := schedule()).kv_cache_block_copies or []) or out
    one.engine.add("first", prompt(31), parameters(2))
    one.engine.add("second", prompt(31), parameters(2))
    come_to_rest(one.engine)
    one.engine.add("third", prompt(31), parameters(2))
    come_to_rest(one.engine)
    assert sum(map(len, copies)) and one.counters["state_dropped_partial"]
    assert not one.counters["loads"], "vLLM's own cache goes further"
    assert one.engine.scheduler.reset_prefix_cache()
    assert one.ask(prompt(31)) == 24
    assert one.findings.wrong == []


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("retention", "is_wrong"), [(0, True), (2 * BLOCK, True), (None, False)])
def test_vllm_itself_is_wrong_where_two_requests_of_a_step_go_on_inside_a_block(
    asked, monkeypatch, runner, retention, is_wrong
):
    """Why this is refused: nothing is stored or loaded here. Once it fails, newer versions may be served."""
    monkeypatch.setattr(connector, "check_states", lambda *_: None)
    one = asked("state_tail", runner, retention=retention, token_budget=160)
    one.run_unstored(prompt(19))
    one.run_unstored(*[prompt(19) + prompt(80, 2)] * 2)
    assert bool(one.findings.wrong) == is_wrong
    assert not one.counters["stores"] and not one.counters["loads"]


@pytest.mark.parametrize("retention", [0, 2 * BLOCK])
def test_hits_inside_a_block_are_refused_where_vllm_is_wrong(asked, retention):
    with pytest.raises(UnsupportedModel, match="without --prefix-match-unit"):
        asked("state_tail", retention=retention)


# -- wrong ways --------------------------------------------------------------------------------------------------------


def assert_noticed(one, loaded):
    """Wrong KV was loaded and read, and the text is another one."""
    assert loaded
    assert one.findings.wrong_tokens and one.findings.wrong_answers


@pytest.mark.parametrize("runner", RUNNERS)
def test_synchronous_load_of_a_state_is_noticed(asked, runner):
    one = asked("state", runner)
    one.ask(prompt(61))
    with loads_are_synchronous(one.engine):
        loaded = one.ask(prompt(61))
    assert_noticed(one, loaded)


@pytest.mark.parametrize("runner", RUNNERS)
def test_state_that_is_not_the_one_vllm_hands_over_is_noticed(asked, runner):
    one = asked("state", runner)
    with states_saved_by_position():
        one.ask(*(prompt(61, n) for n in range(4)))
    loaded = one.ask(*(prompt(61, n) for n in range(4)))
    assert_noticed(one, loaded)


@pytest.mark.parametrize("runner", RUNNERS)
def test_state_behind_a_prompts_last_token_is_noticed(asked, runner):
    one = asked("state", runner)
    one.ask(prompt(65))
    assert one.ask(prompt(65)[:64]) == 0, "its last boundary has no state"
    assert one.findings.wrong == []
    with states_loaded_at_the_last_token():
        loaded = one.ask(prompt(65)[:64])
    assert_noticed(one, loaded)


@pytest.mark.parametrize("runner", RUNNERS)
def test_last_block_of_a_draft_is_noticed(asked, runner):
    """Two prompts that differ right behind a chunk: the draft's last slot in it is of the first one's next token."""
    one, common = asked("draft_eagle", runner), prompt(48)
    one.ask(common + prompt(13, 2))
    assert one.ask(common + prompt(13, 3)) == 44
    assert one.findings.wrong == [] and not one.findings.neighbour_draft_tokens
    with last_block_of_a_draft_is_loaded():
        assert one.ask(common + prompt(13, 4)) == 48
    assert one.findings.neighbour_draft_tokens and not one.findings.wrong_answers


def test_draft_that_is_stored_where_it_did_not_run_is_noticed(asked):
    """Runner V1 drafts for no request of a step whose longest is too long for the draft."""
    one = asked("draft_model", drafted_len=40)
    one.ask(prompt(61))
    wait_written(one.root)
    assert one.counters["store_dropped_undrafted"] and not undrafted_blobs(one.root)
    with undrafted_blocks_are_stored():
        one.ask(prompt(61, 2))
    wait_written(one.root)
    assert undrafted_blobs(one.root)


def test_guesses_are_as_good_as_the_drafts_kv(asked):
    """As many are right behind a load as without; a draft's KV that is lost costs them."""
    one, rates = asked("draft_model"), []
    for _ in range(2):
        before = one.findings.accepted_drafts
        one.ask(prompt(61), max_tokens=40)
        rates.append(one.findings.accepted_drafts - before)
    assert rates[0] == rates[1] > 10
    assert one.counters["load_tokens"] == 56


# -- what the simulator has found --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "chunks"), [("state", 7), ("state_tail", 7), ("mla_windows", 7), ("replayed", 7)])
def test_what_vllms_own_cache_has_is_not_leased(asked, family, chunks):
    """Also where its hashes are of other units than the chunks' blocks: they were not recognised then."""
    one, starts = asked(family, "v2"), []
    client = one.engine.connector._scheduler.side.client
    look_up = client.lookup
    client.lookup = lambda keys, digests, start, *rest, **more: (
        starts.append(start) or look_up(keys, digests, start, *rest, **more)
    )
    for n in range(2):
        one.engine.add(f"r{n}", prompt(61), parameters(1))
        come_to_rest(one.engine)
    assert starts == [0, chunks]
    assert not one.counters["loads"] and one.findings.wrong == []
