"""Tails in the simulator: a prompt is found to its last whole block, whoever goes on from there; never a wrong byte.

vLLM's real scheduler and block pool, the real server; a model that checks every token of KV that it attends to.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit.counts import count, seed
from tests.kit.server.clients import poll_until
from tests.kit.server.probe import figures, wait_for
from tests.kit.server.processes import end_server
from tests.sim.vllm.asking import AskedEngine, come_to_rest, parameters, random_tokens, settings
from tests.sim.vllm.checks import leaks, server_leaks
from tests.sim.vllm.engine import Setup, SimulatedEngine
from tests.sim.vllm.families import BLOCK_TOKENS
from tests.sim.vllm.scenario import Plan, run_scenario
from tiered_kv.tiering.tails import TAILS_MAX
from tiered_kv.vllm.request_lookups import RequestLookups
from tiered_kv.vllm.requests import FoundTail

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

CHUNK = 16
WHOLE = 5 * CHUNK
TAIL_ENDS = ("tail_held", "tails", "tails_failed")
SEEDS = count("TAIL_SEEDS", 4)
SEEN = ("tails", "tail_loads", "loads")


class TailedEngine(AskedEngine):
    """An engine that keeps tails, asked one prompt after the other with an empty GPU."""

    def __init__(self, root: Path, **more: Any) -> None:
        self.root = root
        extra = {"tail_tokens": BLOCK_TOKENS, "save_decode": False, **more.pop("extra", {})}
        self.setup = Setup(connector=settings(root, CHUNK) | extra, pool_blocks=200, **more)
        self.engine = SimulatedEngine(self.setup)
        self.sent = 0

    def ask(
        self, prompt: list[int], answer: int = 3, *, forgets: bool = True, salt: str | None = None, **controls: Any
    ) -> tuple[int, list[int]]:
        """How many tokens a prompt loads, and the prompt with its answer."""
        if forgets:
            assert self.engine.scheduler.reset_prefix_cache()
        before, self.sent = self.counters["load_tokens"], self.sent + 1
        given = parameters(answer)
        given.extra_args = {"kv_transfer_params": {f"tiered_kv.{name}": value for name, value in controls.items()}}
        self.engine.add(f"r{self.sent}", prompt, given, cache_salt=salt)
        side = self.engine.connector._scheduler.side
        poll_until(side.client, lambda: all(one.is_answered for one in side.client.lookups.values()), "the answer")
        come_to_rest(self.engine)
        return self.counters["load_tokens"] - before, list(self.engine.answers[f"r{self.sent}"].tokens)

    @property
    def kept(self) -> int:
        """Tails in the server now."""
        count: int = figures(self.root)["hierarchy"]["host_tails"]
        return count

    def restart(self, *, server: bool) -> None:
        """Another engine takes over; without a new server it comes before the last one has left."""
        before = self.engine
        if server:
            before.close()
            end_server(self.root)
        self.engine = SimulatedEngine(self.setup)
        before.close()

    def end(self) -> None:
        """Nothing was wrong, nothing is left, and every tail is accounted for."""
        ends = sum(n for name, n in self.counters.items() if name in TAIL_ENDS or name.startswith("tail_dropped_"))
        assert ends == self.counters["tail_offers"], self.counters
        assert self.engine.findings.wrong == [] and self.engine.findings.checked_tokens
        assert self.engine.accounts.wrong() == [] and leaks(self.engine) == []
        assert server_leaks(self.engine, self.root) == []


@pytest.fixture(params=["v1 sync", "v2 async"])
def tailed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TailedEngine]:
    runner, mode = request.param.split()
    yield from ended(TailedEngine(tmp_path / "cache", is_v2=runner == "v2", is_async=mode == "async"))


@pytest.fixture
def default(tmp_path: Path) -> Iterator[TailedEngine]:
    """Which tails it keeps nobody has said."""
    yield from ended(TailedEngine(tmp_path / "cache", extra={"tail_tokens": "auto", "save_decode": True}))


def ended(world: TailedEngine) -> Iterator[TailedEngine]:
    try:
        yield world
        world.end()
    finally:
        world.engine.close()
        end_server(world.root)


def prompt(seed: int, tokens: int) -> list[int]:
    return random_tokens(random.Random(seed), tokens)


def test_the_same_prompt_and_what_goes_on_from_it_load_its_tail(tailed: TailedEngine) -> None:
    first = prompt(1, WHOLE + 11)
    assert tailed.ask(first)[0] == 0
    assert tailed.ask(first)[0] == WHOLE + 8, "two blocks of eleven tokens"
    assert tailed.ask(first + prompt(2, 3))[0] == WHOLE + 8
    assert tailed.counters["tail_loads"] == 2 and tailed.counters["tails"] >= 1


def test_a_prompt_that_ends_with_its_tail_is_loaded_whole(tailed: TailedEngine) -> None:
    first = prompt(1, WHOLE + 8)
    _, answered = tailed.ask(first)
    again, repeated = tailed.ask(first)
    assert (again, repeated) == (WHOLE + 8, answered), "vLLM computes the last token again"


def test_a_fork_inside_a_tail_gets_the_chunks_before_it_and_a_tail_of_its_own(tailed: TailedEngine) -> None:
    first = prompt(1, WHOLE + 12)
    other = first[: WHOLE + 6] + prompt(2, 6)
    tailed.ask(first)
    assert tailed.ask(other)[0] == WHOLE
    assert tailed.ask(other)[0] == WHOLE + 12
    assert tailed.ask(first)[0] == WHOLE + 12 and tailed.kept == 2


def test_a_tail_does_not_answer_for_a_shorter_prompt(tailed: TailedEngine) -> None:
    first = prompt(1, WHOLE + 12)
    tailed.ask(first)
    assert tailed.ask(first[: WHOLE + 10])[0] == WHOLE
    assert tailed.ask(first[: WHOLE + 10])[0] == WHOLE + 8 and tailed.kept == 2


def test_a_prompt_of_one_chunk_and_a_block_has_one(tailed: TailedEngine) -> None:
    first = prompt(1, CHUNK + BLOCK_TOKENS)
    tailed.ask(first)
    assert tailed.ask(first + prompt(2, 3))[0] == CHUNK + BLOCK_TOKENS and tailed.kept == 1


def test_prompts_of_whole_chunks_and_without_one_have_no_tail(tailed: TailedEngine) -> None:
    for first in (prompt(1, WHOLE), prompt(2, WHOLE + BLOCK_TOKENS - 1), prompt(3, CHUNK - 1)):
        tailed.ask(first)
        assert tailed.ask(first)[0] == len(first) // CHUNK * CHUNK
    assert tailed.counters["tail_offers"] == 0 and tailed.kept == 0


@pytest.mark.parametrize("forgets", [True, False])
def test_a_session_that_grows_leaves_one_tail(tailed: TailedEngine, forgets: bool) -> None:
    """Each turn's tail goes when the next turn's chunk or longer tail has it, also where all of it is on the GPU."""
    tokens = prompt(1, WHOLE + 6)
    loaded = []
    for turn in range(8):
        count, tokens = tailed.ask(tokens + prompt(10 + turn, 1 + turn % 7), forgets=forgets)
        loaded.append(count)
        wait_for(lambda: tailed.kept <= 1, "old tails to go", deadline_s=10.0)
    assert not forgets or all(loaded[1:])
    assert tailed.counters["tails"] >= 4


def test_turns_that_come_before_they_are_answered_leave_one_tail(tailed: TailedEngine) -> None:
    """Their lookups are too early to be told of the tail before; the engine remembers it."""
    side = tailed.engine.connector._scheduler.side
    tokens = prompt(1, WHOLE + 6)
    for turn in range(6):
        tokens = tokens + prompt(20 + turn, 5)
        tailed.engine.add(f"quick {turn}", tokens, parameters(2))
        come_to_rest(tailed.engine)
        tokens = list(tailed.engine.answers[f"quick {turn}"].tokens)
        assert sum(map(len, side.saves._tails.values())) <= 1
    wait_for(lambda: tailed.kept <= 1, "old tails to go", deadline_s=10.0)
    assert tailed.counters["tails"] >= 2


def test_of_many_conversations_with_one_beginning_an_engine_remembers_as_many_tails_as_are_kept(
    tailed: TailedEngine,
) -> None:
    saves = tailed.engine.connector._scheduler.side.saves
    beginning = prompt(1, WHOLE)
    for number in range(3 * TAILS_MAX):
        tailed.ask([*beginning, *prompt(10 + number, 5)])
    assert tailed.counters["tails"] == 3 * TAILS_MAX
    assert sum(map(len, saves._tails.values())) == tailed.kept == TAILS_MAX


def test_a_tail_of_generated_tokens_is_found_by_the_next_turn(tmp_path: Path) -> None:
    world = TailedEngine(tmp_path / "cache", extra={"save_decode": True})
    try:
        _, answered = world.ask(prompt(1, WHOLE - 2), answer=11)
        assert world.ask(answered + prompt(2, 5))[0] == WHOLE + 8, "but for the last token, which is not computed"
        world.end()
    finally:
        world.engine.close()
        end_server(world.root)


def test_another_engine_finds_it_and_a_new_server_the_whole_chunks(tailed: TailedEngine) -> None:
    first = prompt(1, WHOLE + 8)
    tailed.ask(first)
    tailed.restart(server=False)
    assert tailed.ask(first)[0] == WHOLE + 8
    tailed.restart(server=True)
    assert tailed.ask(first)[0] == WHOLE, "a tail stays in host memory"
    assert tailed.ask(first)[0] == WHOLE + 8


def test_what_was_computed_before_a_reset_is_never_found(tailed: TailedEngine) -> None:
    first = prompt(1, WHOLE + 8)
    tailed.ask(first)
    tailed.engine.replace_weights()
    assert tailed.ask(first)[0] == 0
    assert tailed.ask(first)[0] == WHOLE + 8


def test_a_load_of_a_tail_alone_whose_lease_has_ended_is_computed(
    tailed: TailedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prompt(1, WHOLE + 8)
    tailed.ask(first)
    tailed.ask(first[:WHOLE])  # the GPU has the chunks before it now
    client = tailed.engine.connector._scheduler.side.client
    monkeypatch.setattr(client, "is_leased", lambda *_: False)
    assert tailed.ask(first + prompt(2, 12), forgets=False)[0] == 8
    assert (tailed.counters["loads_too_late"], tailed.counters["tail_loads"]) == (1, 1)


def test_by_default_a_conversation_leaves_a_tail_from_its_second_turn_on(default: TailedEngine) -> None:
    found, tokens = [], prompt(1, WHOLE + 6)
    for turn in range(5):
        loaded, tokens = default.ask([*tokens, *prompt(10 + turn, 1)], answer=3)
        found.append(loaded)
    assert found == [0, WHOLE, WHOLE + 12, CHUNK + WHOLE, CHUNK + WHOLE + 4]
    assert default.counters["tails"] == 3, "one turn ended with a whole chunk"
    wait_for(lambda: default.kept == 1, "old tails to go", deadline_s=10.0)


def test_by_default_questions_behind_one_beginning_leave_no_tail(default: TailedEngine) -> None:
    beginning = prompt(1, WHOLE)
    for number in range(8):
        default.ask([*beginning, *prompt(10 + number, 5 + 3 * number)])
        default.ask([*prompt(50 + number, CHUNK + 5)])
    assert default.counters["tail_offers"] == default.kept == 0


def test_by_default_a_named_session_leaves_a_tail_until_it_is_over(default: TailedEngine) -> None:
    first, other = prompt(1, WHOLE + 9), prompt(2, WHOLE + 9)
    assert [default.ask(first, session_id="run")[0] for _ in range(2)] == [0, WHOLE + 8]
    default.ask(other, session_id="over", release=True)
    default.ask(prompt(3, WHOLE + 9), session_id="unread", skip_save=True)
    wait_for(
        lambda: figures(default.root)["counters"].get("session_chunks_released") == 5,
        "its chunks to go",
        deadline_s=10.0,
    )
    assert default.kept == 1, "the first one's alone"
    assert default.ask(other)[0] == 0, "what was released is gone"


def test_by_default_a_tail_that_was_found_is_followed_by_another_one(default: TailedEngine) -> None:
    """A new engine has seen no conversation."""
    _, tokens = default.ask(prompt(1, WHOLE + 6), session_id="run")
    default.restart(server=False)
    found, tokens = default.ask([*tokens, *prompt(2, 3)])
    assert found == WHOLE + 8 and default.counters["tails"] == 1


def test_by_default_an_application_that_gives_all_requests_one_name_leaves_few_tails(default: TailedEngine) -> None:
    """And the conversations among them leave theirs, from the second turn on."""
    for number in range(10):
        default.ask(prompt(100 + number, WHOLE + 9), session_id="application")
    assert default.counters["tail_offers"] == default.counters["tails"] == 4
    _, first = default.ask(prompt(200, WHOLE + 6), session_id="application")
    _, second = default.ask([*first, *prompt(201, 1)], session_id="application")
    assert default.counters["tails"] == 5
    assert default.ask([*second, *prompt(202, 7)], session_id="application")[0] == WHOLE + 12
    assert default.ask(prompt(203, WHOLE + 9), session_id="another one")[0] == 0
    assert default.counters["tails"] == 7


def test_by_default_nobody_goes_on_from_a_prompt_under_another_salt(default: TailedEngine) -> None:
    """Whether another tenant has sent a prompt no tail tells, and no tail of another tenant is found."""
    first = prompt(1, WHOLE + 8)
    gone_on = [*first, *prompt(2, 4)]
    default.ask(first, 1, salt="a", session_id="run")
    assert default.counters["tails"] == 1
    assert [default.ask(gone_on, 1, salt=salt)[0] for salt in ("b", None)] == [0, 0]
    assert default.counters["tails"] == default.counters["tail_offers"] == 1
    assert default.ask(gone_on, 1, salt="a")[0] == WHOLE + 8
    assert default.counters["tails"] == 2


def test_no_tail_is_kept_or_found_where_none_is_wanted(tmp_path: Path) -> None:
    for world in ended(TailedEngine(tmp_path / "cache", extra={"tail_tokens": 0})):
        first = prompt(1, WHOLE + 9)
        assert [world.ask(first, session_id="run")[0] for _ in range(3)] == [0, WHOLE, WHOLE]
        assert world.counters["tail_offers"] == world.kept == 0


def test_requests_of_one_prompt_at_once_get_right_answers(tailed: TailedEngine) -> None:
    first = prompt(1, WHOLE + 11)
    tailed.ask(first)
    assert tailed.engine.scheduler.reset_prefix_cache()
    for number in range(6):
        tailed.engine.add(f"at once {number}", first[: WHOLE + 5 + number], parameters(3))
    come_to_rest(tailed.engine)
    assert tailed.counters["loads"]


@pytest.mark.parametrize("windows", [(None, 9), (9, 9)])
def test_where_a_part_of_a_chunk_is_not_right_by_itself_no_tail_is_kept(
    tmp_path: Path, windows: tuple[int | None, ...]
) -> None:
    world = TailedEngine(tmp_path / "cache", windows=windows, is_hybrid=True)
    try:
        first = prompt(1, WHOLE + 8)
        world.ask(first)
        assert world.ask(first)[0] <= WHOLE and world.kept == 0
        assert world.counters["tail_dropped_unsupported"] == world.counters["tail_offers"] > 0
        world.end()
    finally:
        world.engine.close()
        end_server(world.root)


def test_a_tail_that_is_not_compared_with_the_prompts_tokens_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negative control: the simulator sees KV of other tokens."""
    world = TailedEngine(tmp_path / "cache")
    try:
        first = prompt(1, WHOLE + 12)
        world.ask(first)

        def believed(self: Any, state: Any, lookup: Any, answer: Any) -> Any:
            return tuple(FoundTail(lookup.id, answer.held, tail.tokens, b"", tail.slot) for tail in answer.tails)

        monkeypatch.setattr(RequestLookups, "_found_tails", believed)
        assert world.ask(first[: WHOLE + 2] + prompt(2, 12))[0] == WHOLE + 12
        assert world.engine.findings.wrong_tokens
    finally:
        world.engine.close()
        end_server(world.root)


@pytest.fixture(scope="module")
def totals() -> Counter[str]:
    """What all seeds of this run did."""
    return Counter()


@pytest.mark.parametrize("number", range(seed(), seed() + SEEDS))
def test_seed(number: int, tmp_path: Path, totals: Counter[str]) -> None:
    """Aborts, resets, killed servers, failing copies and preemption, of sessions that go on where they ended."""
    root = tmp_path / "cache"
    drawn = Plan.draw(number, root, is_v2=bool(number & 1), is_async=bool(number & 2))
    connector = dict(drawn.setup.connector) | {"tail_tokens": 4, "chunk_tokens": 16, "host_bytes": "8MiB"}
    setup = replace(drawn.setup, windows=(None, None), is_hybrid=False, connector=connector, pool_blocks=120)
    moves = replace(drawn.moves, follow_up=0.6, duplicate=0.3, forget_gpu=1.0, skip_load=0.0, skip_reading=0.0)
    outcome = run_scenario(replace(drawn, setup=setup, moves=moves), root)
    totals.update(outcome.counts, seeds=1)
    print(f"seed={number} {dict(outcome.counts)}")
    assert not outcome.wrong, "\n".join([f"seed={number}", repr(drawn), *outcome.wrong])
    assert not outcome.counts["wrong_tokens"]


def test_the_seeds_did_what_they_are_for(totals: Counter[str]) -> None:
    if totals["seeds"] < 20:
        pytest.skip("says something of a whole set of seeds only")
    assert [name for name in SEEN if not totals[name]] == []
