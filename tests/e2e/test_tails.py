"""Tails on a real engine: a prompt is found to its last whole block, and answers are those without the cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.server.probe import figures, server_pid, wait_for, wait_written
from tests.kit.server.processes import end_softly
from tests.kit.storage.disk_probe import blob_files
from tests.kit.vllm.cached_engine import CHUNK, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import BLOCK_TOKENS, Answer, computed_alone, random_prompt
from tiered_kv.keys.tail_keys import tail_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SETTINGS = {"tail_tokens": BLOCK_TOKENS, "save_decode": True}
WHOLE = 5 * CHUNK
FIRST = random_prompt(3600, WHOLE + 100)
PROMPTS = {
    "first": FIRST,
    "continued": FIRST + random_prompt(3601, 30),
    "fork inside the tail": FIRST[: WHOLE + 70] + random_prompt(3602, 60),
    "fork at a block": FIRST[: WHOLE + 2 * BLOCK_TOKENS] + random_prompt(3603, 50),
    "whole chunks": FIRST[:WHOLE],
    "shorter": FIRST[: WHOLE + 50],
    "whole tail": FIRST[: WHOLE + 3 * BLOCK_TOKENS],
}
TURNS = 8
OTHERS_MAX = 60


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> dict[str, Answer]:
    return computed_alone(tiny_model, PROMPTS, max_tokens=6)


@pytest.fixture
def engine(tiny_model: Path, tmp_path: Path) -> Iterator[CachedEngine]:
    with cached_engine(tiny_model, tmp_path, SETTINGS) as engine:
        yield engine


def ask(engine: CachedEngine, plain: dict[str, Answer], name: str) -> int:
    """Tokens of a prompt that were not computed; its answer is the plain one."""
    (answer,) = engine.ask(PROMPTS[name], max_tokens=6)
    assert_same(answer, plain[name])
    return answer.cached_tokens


def test_each_prompt_finds_as_many_whole_blocks_as_it_shares(engine: CachedEngine, plain: dict[str, Answer]) -> None:
    tail = 3 * BLOCK_TOKENS  # of 100 tokens and 5 generated ones
    assert [ask(engine, plain, "first") for _ in range(2)] == [0, WHOLE + tail]
    assert [ask(engine, plain, "fork inside the tail") for _ in range(2)] == [WHOLE, WHOLE + 4 * BLOCK_TOKENS]
    assert [ask(engine, plain, "fork at a block") for _ in range(2)] == [WHOLE, WHOLE + 3 * BLOCK_TOKENS]
    assert [ask(engine, plain, "shorter") for _ in range(2)] == [WHOLE, WHOLE + BLOCK_TOKENS]
    assert ask(engine, plain, "whole chunks") == WHOLE
    assert ask(engine, plain, "first") == WHOLE + tail, "still its own"
    whole = ask(engine, plain, "whole tail")
    assert whole in (WHOLE + tail, WHOLE + tail - 1), "vLLM computes its last token again"
    assert ask(engine, plain, "continued") == WHOLE + tail


def test_a_session_finds_all_that_vllms_own_cache_would_and_leaves_one_tail(tiny_model: Path, tmp_path: Path) -> None:
    """And so it does with a new server, from disk."""
    prompt = random_prompt(3610, WHOLE + 7)
    expected, found = [0], []
    with cached_engine(tiny_model, tmp_path, SETTINGS) as engine:
        for turn in range(TURNS):
            (answer,) = engine.ask(prompt, max_tokens=9)
            found.append(answer.cached_tokens)
            prompt = prompt + list(answer.tokens)
            expected.append((len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
            prompt = prompt + random_prompt(3611 + turn, 60 + 29 * turn)
            wait_for(lambda: figures(tmp_path)["hierarchy"]["host_tails"] <= 1, "old tails to go")
        assert found == expected[:-1]
        wait_written(tmp_path)
        assert len(list(blob_files(tmp_path))) == (expected[-1]) // CHUNK, "no tail is a file yet"
        counters = engine.scheduler_side.counters
        ends = {name: n for name, n in counters.items() if n and name.startswith("tail") and name != "tail_loads"}
        assert ends.pop("tail_offers") == sum(ends.values()), ends
        assert counters["store_chunks"] == counters["stores"] + counters["store_held"]
        pid = server_pid(tmp_path)
    end_softly(pid)
    with cached_engine(tiny_model, tmp_path, SETTINGS) as engine:
        first, again = (engine.ask(prompt, max_tokens=1)[0] for _ in range(2))
    assert (first.cached_tokens, again.cached_tokens) == (expected[-1], len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS)
    assert_same(again, first)


@pytest.mark.parametrize("is_removed", [False, True], ids=["kept", "removed"])
def test_after_a_restart_a_prompts_end_is_found_on_disk(
    tiny_model: Path, tmp_path: Path, plain: dict[str, Answer], is_removed: bool
) -> None:
    """And without its file the whole chunks, so it was the tail that gave the rest."""
    tail = 3 * BLOCK_TOKENS
    with cached_engine(tiny_model, tmp_path, SETTINGS) as engine:
        assert ask(engine, plain, "first") == 0
        wait_for(lambda: figures(tmp_path)["hierarchy"]["host_tails"] == 1, "the tail")
        wait_written(tmp_path)
        assert tail_files(tmp_path) == []
        pid = server_pid(tmp_path)
    end_softly(pid)
    (file,) = tail_files(tmp_path)
    if is_removed:
        file.unlink()
    with cached_engine(tiny_model, tmp_path, SETTINGS) as engine:
        assert ask(engine, plain, "continued") == (WHOLE if is_removed else WHOLE + tail)
        assert engine.scheduler_side.counters["tail_loads"] == (not is_removed)
        wait_for(lambda: not file.exists(), "the older tail to go: a longer one continues it")


def test_a_prompts_end_comes_back_from_disk_when_host_memory_has_lost_it(
    tiny_model: Path, tmp_path: Path, plain: dict[str, Answer]
) -> None:
    """As after a pause with much traffic; a prompt that forks inside the tail gets none of it."""
    settings = SETTINGS | {"host_bytes": "16MiB"}
    with cached_engine(tiny_model, tmp_path, settings) as engine:
        assert ask(engine, plain, "first") == 0
        wait_for(lambda: figures(tmp_path)["hierarchy"]["host_tails"] == 1, "the tail")
        number = 0
        while not tail_files(tmp_path) or figures(tmp_path)["hierarchy"]["host_tails"]:
            number += 1
            assert number < OTHERS_MAX, "host memory never lets go of it"
            engine.ask(random_prompt(3700 + number, 4 * CHUNK), max_tokens=1)
            wait_written(tmp_path)
        assert ask(engine, plain, "fork inside the tail") == WHOLE
        assert ask(engine, plain, "continued") == WHOLE + 3 * BLOCK_TOKENS


def test_by_default_sessions_and_follow_ups_leave_tails_and_questions_behind_one_beginning_none(
    tiny_model: Path, tmp_path: Path
) -> None:
    system, prompt = random_prompt(3800, WHOLE), random_prompt(3801, WHOLE + 70)
    questions = [[*system, *random_prompt(3810 + number, 40 + 30 * number)] for number in range(6)]
    with cached_engine(tiny_model, tmp_path) as engine:
        counters = engine.scheduler_side.counters
        for question in questions:
            engine.ask(question, max_tokens=6)
        first, again = (engine.ask(prompt, max_tokens=6)[0] for _ in range(2))
        assert (first.cached_tokens, again.cached_tokens) == (0, WHOLE)
        assert_same(again, first)
        assert (counters["tail_offers"], figures(tmp_path)["hierarchy"]["host_tails"]) == (0, 0)
        found = []
        for turn in range(3):
            (answer,) = engine.ask(prompt, max_tokens=6)
            found.append(answer.cached_tokens)
            prompt = [*prompt, *answer.tokens, *random_prompt(3820 + turn, 20)]
        assert found == [WHOLE, WHOLE, WHOLE + 3 * BLOCK_TOKENS], "the second one was gone on from"
        named = random_prompt(3830, WHOLE + 70)
        for expected in (0, WHOLE + 2 * BLOCK_TOKENS):
            (answer,) = engine.ask(named, max_tokens=6, session_id="run")
            assert answer.cached_tokens == expected
        stored = counters["tails"]
        engine.ask(random_prompt(3840, WHOLE + 70), max_tokens=6, session_id="over", release=True)
        assert counters["tails"] == stored, "nobody goes on from a session that is over"


def test_edits_regenerated_answers_and_forks_of_a_session_find_what_is_predicted(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Before and after a restart of the server, with tails that have generated tokens in them."""
    asked: dict[str, tuple[list[int], Answer]] = {}
    engine: CachedEngine

    def found(name: str, prompt: list[int]) -> int:
        (answer,) = engine.ask(prompt, max_tokens=12)
        asked[name] = prompt, answer
        return answer.cached_tokens - WHOLE

    def prompt_and_answer(name: str) -> list[int]:
        prompt, answer = asked[name]
        return [*prompt, *answer.tokens]

    def edited(prompt: list[int], place: int, seed: int) -> list[int]:
        return [*prompt[:place], *random_prompt(seed, 5), *prompt[place + 5 :], *random_prompt(seed + 1, 20)]

    with cached_engine(tiny_model, tmp_path, {"tail_tokens": BLOCK_TOKENS}) as engine:
        assert found("first", random_prompt(3900, WHOLE + 120)) == -WHOLE
        turn = [*prompt_and_answer("first"), *random_prompt(3901, 22)]
        assert found("turn", turn) == 128, "8 generated tokens"
        assert found("answered again", turn) == 0, "its tail ends inside its answer"
        answered = prompt_and_answer("turn")
        assert found("fork behind the tail", [*answered[: WHOLE + 163], *random_prompt(3902, 9)]) == 160
        assert found("fork in the tail", [*answered[: WHOLE + 150], *random_prompt(3903, 40)]) == 0
        assert found("edit in the tail", edited(turn, WHOLE + 60, 3904)) == 0
        gone_on = [*prompt_and_answer("edit in the tail"), *random_prompt(3906, 9)]
        assert found("edit in the tail, gone on", gone_on) == 160
        assert found("edit before the tail", edited(turn, WHOLE - 100, 3907)) == -CHUNK
        gone_on = [*prompt_and_answer("edit before the tail"), *random_prompt(3909, 9)]
        assert found("edit before the tail, gone on", gone_on) == 160
        assert found("last turn", [*answered, *random_prompt(3910, 40)]) == 160
        wait_written(tmp_path)
        pid = server_pid(tmp_path)
    end_softly(pid)
    assert len(tail_files(tmp_path)) == 2, "of each chunk with tails the newest"
    last = prompt_and_answer("last turn")
    with cached_engine(tiny_model, tmp_path, {"tail_tokens": BLOCK_TOKENS}) as engine:
        assert found("restart: edit in the tail", edited(last, WHOLE + 60, 3911)) == 0
        assert found("restart: edit before the tail", edited(last, WHOLE - 100, 3913)) == -CHUNK
        assert found("restart: fork in the tail", [*last[: WHOLE + 188], *random_prompt(3915, 5)]) == 0
        assert found("restart: answered again", asked["last turn"][0]) == 192
        assert found("restart: gone on", [*last, *random_prompt(3916, 5)]) == 192
    expected = computed_alone(tiny_model, {name: prompt for name, (prompt, _) in asked.items()}, max_tokens=12)
    for name, (_, answer) in asked.items():
        assert_same(answer, expected[name])


def tail_files(root: Path) -> list[Path]:
    return [path for path in blob_files(root) if tail_tokens(bytes.fromhex(path.stem))]
