"""Generated tokens come back: next turns, forks and edits from an engine that was restarted, so that every hit is ours.

One engine answers first turns behind a server that stays; the next one is asked what follows from them; a third one,
behind another server, what is left on disk: the answers that a prompt had. How much is not computed is predicted from
whole chunks, tokens and log-probabilities are plain vLLM's.
"""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.kit.server.operator_server import operator_server
from tests.kit.server.probe import figures, wait_written
from tests.kit.storage.disk_probe import blob_files
from tests.kit.vllm.cached_engine import CHUNK, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import Answer, generate, random_prompt, running
from tiered_kv.keys.prefix_keys import PrefixKeys

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

FIRST = random_prompt(60, 720)
EXACT = random_prompt(61, 720)
ASKED_TO_THINK = random_prompt(62, 700)
FIRST_TOKENS, EXACT_TOKENS, THOUGHT_TOKENS = 60, 48, 400
DROPPED = 200
"""Of the thought's tokens the next turn has those behind this many: as a chat template leaves out ``<think>``."""

NEXT_TOKENS = 8
AFTER_A_RESTART = "from disk: "


@dataclass
class Run:
    """What was asked after the restart: prompts by case, answers, and plain vLLM's."""

    prompts: dict[str, list[int]] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)
    plain: dict[str, Answer] = field(default_factory=dict)
    on_disk: dict[str, list[bool]] = field(default_factory=dict)
    counted: tuple[int, int] = (0, 0)

    def ask(self, engine: CachedEngine, case: str, prompt: list[int]) -> None:
        self.prompts[case] = prompt
        (self.answers[case],) = engine.ask(prompt, max_tokens=NEXT_TOKENS)


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run, root = Run(), tmp_path_factory.mktemp("answers") / "cache"
    with operator_server(root) as server:
        extra = {"server": server}
        with cached_engine(tiny_model, root, extra) as engine:
            (first,) = engine.ask(FIRST, max_tokens=FIRST_TOKENS)
            (exact,) = engine.ask(EXACT, max_tokens=EXACT_TOKENS)
            (thought,) = engine.ask(ASKED_TO_THINK, max_tokens=THOUGHT_TOKENS)
        with cached_engine(tiny_model, root, extra) as engine:
            answered = [*FIRST, *first.tokens]
            edited = [*FIRST[:300], 3 + FIRST[300] % 1000, *FIRST[301:], *first.tokens]
            for case, prompt in {
                "regenerated": FIRST,
                "forked inside a chunk": [*answered[:750], *random_prompt(63, 100)],
                "forked behind a chunk": [*answered[:770], *random_prompt(64, 100)],
                "edited": [*edited, *random_prompt(65, 60)],
                "whole chunks": answered[: 3 * CHUNK],
                "next turn": [*answered, *random_prompt(66, 100)],
                "the last token was missing": [*EXACT, *exact.tokens, *random_prompt(67, 100)],
                "reasoning dropped": [*ASKED_TO_THINK, *thought.tokens[DROPPED:], *random_prompt(68, 100)],
            }.items():
                run.ask(engine, case, prompt)
            wait_written(root)
            stems = {path.stem for path in blob_files(root)}
            for name, tokens in (("answer", answered), ("thought", [*ASKED_TO_THINK, *thought.tokens])):
                keys = PrefixKeys(engine.scheduler_side._client.namespace, CHUNK)
                keys.extend(tokens[:-1])
                run.on_disk[name] = [key.hex() in stems for key in keys.keys]
            counters = figures(root)["counters"]
            run.counted = counters["answers"], counters["answers_asked"]
    with cached_engine(tiny_model, root) as engine:
        run.ask(engine, f"{AFTER_A_RESTART}next turn", [*answered, *random_prompt(69, 100)])
        run.ask(engine, f"{AFTER_A_RESTART}reasoning kept", [*ASKED_TO_THINK, *thought.tokens, *random_prompt(70, 60)])
    with running(tiny_model) as llm:
        for case, prompt in run.prompts.items():
            (run.plain[case],) = generate(llm, [prompt], max_tokens=NEXT_TOKENS)
    return run


@pytest.mark.parametrize(
    ("case", "cached"),
    [
        ("next turn", 3 * CHUNK),
        ("regenerated", 2 * CHUNK),
        ("forked inside a chunk", 2 * CHUNK),
        ("forked behind a chunk", 3 * CHUNK),
        ("edited", CHUNK),
        ("whole chunks", 3 * CHUNK),
        ("the last token was missing", 2 * CHUNK),
        ("reasoning dropped", 2 * CHUNK),
        (f"{AFTER_A_RESTART}next turn", 3 * CHUNK),
        (f"{AFTER_A_RESTART}reasoning kept", 2 * CHUNK),
    ],
)
def test_what_follows_an_answer_hits_its_whole_chunks_and_is_answered_as_ever(run: Run, case: str, cached: int) -> None:
    assert run.answers[case].cached_tokens == cached
    assert_same(run.answers[case], run.plain[case])


def test_what_a_prompt_had_is_on_disk_and_what_none_had_is_not(run: Run) -> None:
    assert run.on_disk == {"answer": [True, True, True], "thought": [True, True, False, False]}
    assert run.counted[1] == 1 and run.counted[0] == 1 + 2
