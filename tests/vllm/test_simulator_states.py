"""Recurrent states and drafts in the simulator: vLLM's real specs, block managers and schedulers, both runners.

Each of the wrong ways that real engines show by a log-probability only (``tests/e2e/test_recurrent_state.py``,
``tests/e2e/test_drafts.py``) must be noticed here, too, or the seeds prove nothing. A seed is run again with
``TIERED_KV_SEED=<n> TIERED_KV_STATE_SEEDS=1``.
"""

import logging
import random
from collections import Counter
from dataclasses import replace

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

pytestmark = pytest.mark.slow

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


@pytest.fixture(autouse=True)
def _quiet():
    """Loads that fail are logged with their tracebacks; what counts is in the findings."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


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
