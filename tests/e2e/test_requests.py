"""Every kind of request vLLM takes, on real engines with blocks for two of them: the right hits and the right answers.

One engine with asynchronous scheduling, one without and one that guesses tokens ahead are run first, all requests of a
kind in turn; then plain vLLM answers the same prompts. Engines run one at a time, so the runs are made by one fixture
and judged by the tests.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.kit.counts import count, seed
from tests.kit.server.probe import figures, wait_for, wait_written
from tests.kit.vllm.cached_engine import CHUNK, LOGPROB_TOLERANCE, MARGIN, CachedEngine, cached_engine
from tests.kit.vllm.guessing_engine import ANSWER_TOKENS, guess
from tests.kit.vllm.guessing_engine import parameters as guessing_parameters
from tests.kit.vllm.harness import (
    BLOCK_TOKENS,
    Answer,
    as_answer,
    drain,
    generate,
    kv_fingerprint,
    random_prompt,
    reset_gpu_cache,
    running,
)
from tests.kit.vllm.mixed_requests import Outcome, run_mix, wishes
from tiered_kv.keys.naming import BlobName
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.tiers.disk.pins import read_pins

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

SMALL = {"num_gpu_blocks_override": 44, "max_num_batched_tokens": 384, "max_model_len": 1344}
"""Blocks for 1376 tokens: one request of the longest kind, or several short ones until they grow."""

SETTINGS = {"save_decode": True, "pinned_share": 0.5}
MIXES = count("MIXES", 1)
MORE_MIXES = 5
"""How far an engine gets while a lookup is answered differs from run to run, and with it who is preempted."""

MODES = ("async", "sync")
NOTHING_LEFT = {"leased": 0, "blocks lost": 0, "requests left": 0, "has work": False}


@dataclass
class Run:
    """What one engine did.

    Attributes:
        answers: Prompts and answers, by the kind of request they were.
        facts: What was observed beside the answers.
        left: What the engine still held when it was quiet.
        theirs: Plain vLLM's answers to the same prompts, as long as the longest of ours.
    """

    answers: dict[str, list[tuple[tuple[int, ...], Answer]]] = field(default_factory=dict)
    facts: dict[Any, Any] = field(default_factory=dict)
    left: dict[str, object] = field(default_factory=dict)
    theirs: dict[tuple[int, ...], Answer] = field(default_factory=dict)

    def note(self, kind: str, prompt: list[int], answer: Answer) -> Answer:
        self.answers.setdefault(kind, []).append((tuple(prompt), answer))
        return answer

    def assert_plain(self, kind: str) -> None:
        """Answers of a kind are plain vLLM's."""
        assert self.answers[kind]
        for prompt, ours in self.answers[kind]:
            assert_as_sure(ours, self.theirs[prompt])


def assert_as_sure(ours: Answer, theirs: Answer) -> None:
    """rule 12 for long answers: tokens are equal as far as plain vLLM is sure of every one of them."""
    sure = next(
        (i for i, (best, second, *_) in enumerate(theirs.logprobs) if best - second < MARGIN), len(theirs.tokens)
    )
    length = min(sure, len(ours.tokens))
    assert ours.tokens[:length] == theirs.tokens[:length]
    assert abs(ours.logprobs[0][0] - theirs.logprobs[0][0]) <= LOGPROB_TOLERANCE


def parameters(max_tokens: int, **more: Any) -> Any:
    from vllm import SamplingParams

    given = {"temperature": 0.0, "logprobs": 2} | more
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, **given)


def put(engine: CachedEngine, prompt: list[int], max_tokens: int, **more: Any) -> Any:
    """One request with an empty GPU prefix cache and all stores before it done; vLLM's own output."""
    reset_gpu_cache(engine.llm)
    prompts = [{"prompt_token_ids": list(prompt)}]
    (output,) = engine.llm.generate(prompts, parameters(max_tokens, **more), use_tqdm=False)
    drain(engine.llm)
    return output


def equal_blocks(computed: dict[str, str], loaded: dict[str, str]) -> int:
    """Blocks with the same bytes when they were computed and after they were loaded."""
    return sum(computed[key] == loaded[key] for key in computed.keys() & loaded.keys())


def controlled(**controls: Any) -> dict[str, Any]:
    """Sampling parameters that carry controls of ours."""
    return {"extra_args": {"kv_transfer_params": {f"tiered_kv.{name}": value for name, value in controls.items()}}}


# -- what is put to an engine ----------------------------------------------------------------------------------------


def chat(engine: CachedEngine, run: Run) -> None:
    """A conversation whose second turn contains the first one's answer."""
    first = random_prompt(1, 720)
    (answer,) = engine.ask(first, max_tokens=60)
    computed = kv_fingerprint(engine.llm)
    second = [*first, *answer.tokens, *random_prompt(2, 100)]
    (again,) = engine.ask(second, max_tokens=8)
    run.facts["chat blocks"] = equal_blocks(computed, kv_fingerprint(engine.llm))
    run.note("chat", first, answer)
    run.note("chat", second, again)


def prompt_logprobs(engine: CachedEngine, run: Run) -> None:
    """Requests that may not read caches: they store, and what is stored is not loaded for them."""
    prompt = random_prompt(3, 600)
    loads = engine.scheduler_side.counters["loads"]
    outputs = [put(engine, prompt, 4, prompt_logprobs=1) for _ in range(2)]
    outputs.append(put(engine, prompt, 4, skip_reading_prefix_cache=True))
    run.facts["loads for prompt logprobs"] = engine.scheduler_side.counters["loads"] - loads
    run.facts["prompt logprobs"] = [chosen(output) for output in outputs[:2]]
    for output in outputs:
        run.note("prompt_logprobs", prompt, as_answer(output))
    run.note("prompt_logprobs", prompt, as_answer(put(engine, prompt, 4)))


def chosen(output: Any) -> list[float]:
    """Log probabilities of a prompt's own tokens."""
    return [at[token].logprob for token, at in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True) if at]


def several_answers(engine: CachedEngine, run: Run) -> None:
    """``n`` answers to a prompt that is stored."""
    prompt = random_prompt(4, 600)
    run.note("several", prompt, engine.ask(prompt, max_tokens=12)[0])
    loaded = engine.scheduler_side.counters["load_tokens"]
    output = put(engine, prompt, 12, n=3, temperature=1.0, top_k=1)
    run.facts["several loaded"] = engine.scheduler_side.counters["load_tokens"] - loaded
    for one in list(output.outputs):
        output.outputs = [one]
        run.note("several", prompt, as_answer(output))


def controls(engine: CachedEngine, run: Run) -> None:
    """What a request asks of the cache itself."""
    unsaved, saved, pinned = (random_prompt(5 + i, 600) for i in range(3))
    put(engine, unsaved, 4, **controlled(skip_save=True))
    run.facts["cached after skip_save"] = put(engine, unsaved, 4, **controlled(skip_save=True)).num_cached_tokens
    run.note("controls", saved, as_answer(put(engine, saved, 4)))
    run.note("controls", saved, as_answer(put(engine, saved, 4, **controlled(skip_load=True))))
    run.note("controls", saved, as_answer(put(engine, saved, 4)))
    refused = engine.scheduler_side.counters["control_refused"]
    run.note("controls", saved, as_answer(put(engine, saved, 4, **controlled(skip_load="no", skip_loads=True))))
    run.facts["refused"] = engine.scheduler_side.counters["control_refused"] - refused
    run.note("controls", pinned, as_answer(put(engine, pinned, 4, **controlled(pin_ttl_s=600))))
    wait_for(lambda: bool(read_pins(engine.root)), "pins.json")
    namespace = engine.scheduler_side._client.namespace
    keys = PrefixKeys(namespace, CHUNK)
    keys.extend(pinned)
    run.facts["pins"], run.facts["deepest chunk"] = read_pins(engine.root), BlobName(namespace.digest, keys.keys[1])


def streaming(engine: CachedEngine, run: Run) -> None:
    """A session: input, answer, more input; and then its whole text as a request of its own."""
    for number, is_queued in enumerate((False, True) if has_sessions() else ()):
        reset_gpu_cache(engine.llm)
        inputs = [random_prompt(20 + 5 * number + i, length) for i, length in enumerate((300, 240, 90, 130))]
        text: list[int] = []
        for given, answer in zip(inputs, session(engine, f"s{number}", inputs, is_queued=is_queued), strict=True):
            text += given
            run.note("streaming", text, answer)
            text += answer.tokens[:-1]  # vLLM takes the last one back
        drain(engine.llm)
        computed = kv_fingerprint(engine.llm)
        run.note("streaming whole", text, engine.ask(text, max_tokens=8)[0])
        run.facts.setdefault("streaming blocks", []).append(equal_blocks(computed, kv_fingerprint(engine.llm)))


def has_sessions() -> bool:
    """Whether this vLLM's sessions are stored; an older one's are left alone, because it mixes up their tokens."""
    from vllm import __version__

    return not __version__.startswith("0.30.")


def session(engine: CachedEngine, name: str, inputs: list[list[int]], *, is_queued: bool) -> list[Answer]:
    """Put a streaming session to the engine core, each input when the answer before it ended, or all at once."""
    core, processor = engine.llm.llm_engine.engine_core, engine.llm.llm_engine.input_processor
    answers: list[Answer] = []
    tokens: list[int] = []
    logprobs: list[tuple[float, ...]] = []

    def feed(given: list[int], *, is_last: bool = False) -> None:
        prompt = {"type": "token", "prompt_token_ids": list(given)}
        core.add_request(processor.process_inputs(name, prompt, parameters(12), ("generate",), resumable=not is_last))

    waiting = list(inputs)
    for given in [waiting.pop(0) for _ in range(len(waiting) if is_queued else 1)]:
        feed(given)
    while len(answers) < len(inputs):
        for output in core.get_output().outputs:
            assert output.request_id == name
            tokens += output.new_token_ids
            logprobs += [tuple(sorted(at, reverse=True)) for at in output.new_logprobs.logprobs.tolist()]
            if output.finish_reason is not None:
                answers.append(Answer(tuple(tokens), tuple(logprobs), 0, "length"))
                tokens, logprobs = [], []
                if waiting:
                    feed(waiting.pop(0))
    feed([0], is_last=True)
    return answers


def mixed(engine: CachedEngine, run: Run) -> None:
    """A busy engine, for so many mixes and then until everything that makes a mix has happened."""
    counters = engine.scheduler_side.counters
    loads, total = counters["loads"], Outcome()
    for number in range(MIXES + MORE_MIXES):
        if number >= MIXES and total.preempted and total.aborted:
            break
        reset_gpu_cache(engine.llm)
        outcome = run_mix(engine.llm, wishes(seed() + number, 20), seed() + number)
        total.aborted += outcome.aborted
        total.preempted += outcome.preempted
        run.answers.setdefault("mixed", []).extend(outcome.answers)
    drain(engine.llm)
    run.facts["mixed"] = {
        "aborted": total.aborted,
        "preempted": total.preempted,
        "loads": counters["loads"] - loads,
    }


def quiet(engine: CachedEngine, run: Run) -> None:
    wait_written(engine.root)
    wait_for(lambda: figures(engine.root)["hierarchy"]["lookups"] == 0, "released lookups")
    pool = engine.scheduler.kv_cache_manager.block_pool
    run.left = {
        "leased": figures(engine.root)["hierarchy"]["leased_bytes"],
        "blocks lost": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "requests left": len(engine.scheduler_side._requests),
        "has work": engine.scheduler_side.has_work,
    }


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    found: dict[str, Run] = {}
    for mode in MODES:
        run = found[mode] = Run()
        options = SMALL | {"async_scheduling": mode == "async", "scheduling_policy": "priority"}
        with cached_engine(tiny_model, tmp_path_factory.mktemp(mode), SETTINGS, **options) as engine:
            run.facts["is async"] = engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
            alike = (prompt_logprobs, several_answers, controls) if mode == "async" else ()
            for scenario in (chat, *alike, streaming, mixed, quiet):
                scenario(engine, run)
    run = found["guessing"] = Run()
    run.facts |= guess(tiny_model, tmp_path_factory.mktemp("guessing"), SMALL)
    for chat_of in run.facts["chats"]:
        for prompt, tokens, logprobs, cached in chat_of["turns"]:
            run.note("guessing", prompt, Answer(tuple(tokens), tuple(map(tuple, logprobs)), cached, "length"))
    answer_plainly(tiny_model, found)
    return found


def answer_plainly(model: Path, runs: dict[str, Run]) -> None:
    """Have plain vLLM answer every prompt, as long as the longest answer we got to it."""
    plain = [one for run in runs.values() for kind, of in run.answers.items() if kind != "guessing" for one in of]
    lengths: dict[tuple[int, ...], int] = {}
    for prompt, answer in plain:
        lengths[prompt] = max(lengths.get(prompt, 0), len(answer.tokens))
    theirs: dict[tuple[int, ...], Answer] = {}
    with running(model, max_model_len=1344, logprobs_mode="processed_logprobs") as llm:
        for length in sorted(set(lengths.values())):
            prompts = [prompt for prompt in lengths if lengths[prompt] == length]
            theirs |= zip(prompts, generate(llm, prompts, max_tokens=length), strict=True)
        for prompt, answer in runs["guessing"].answers["guessing"]:
            asked = {"prompt_token_ids": list(prompt)}
            (output,) = llm.generate([asked], guessing_parameters(len(answer.tokens)), use_tqdm=False)
            theirs[prompt] = as_answer(output)
        asked = {"prompt_token_ids": random_prompt(3, 600)}
        (output,) = llm.generate([asked], parameters(4, prompt_logprobs=1), use_tqdm=False)
    for run in runs.values():
        run.theirs = theirs
        run.facts["plain prompt logprobs"] = chosen(output)


# -- what is expected of it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_engine_schedules_as_it_was_asked_to(runs: dict[str, Run], mode: str) -> None:
    """On the CPU vLLM turns asynchronous scheduling off, whatever it was asked."""
    assert runs[mode].facts["is async"] is (mode == "async")


@pytest.mark.parametrize("mode", MODES)
def test_a_second_turn_hits_the_answer_of_the_first(runs: dict[str, Run], mode: str) -> None:
    run = runs[mode]
    (_, first), (_, second) = run.answers["chat"]
    assert first.cached_tokens == 0
    assert second.cached_tokens == 3 * CHUNK, "the prompt's 720 tokens make two chunks, the answer makes it three"
    assert run.facts["chat blocks"] * BLOCK_TOKENS >= 3 * CHUNK, "blocks were loaded as other bytes than were computed"
    run.assert_plain("chat")


def test_prompt_logprobs_are_computed_and_stored(runs: dict[str, Run]) -> None:
    run = runs["async"]
    assert run.facts["loads for prompt logprobs"] == 0
    assert [answer.cached_tokens for _, answer in run.answers["prompt_logprobs"]] == [0, 0, 0, 512]
    for ours in run.facts["prompt logprobs"]:
        theirs = run.facts["plain prompt logprobs"]
        assert len(ours) == len(theirs) == 599
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= 0.1
    run.assert_plain("prompt_logprobs")


def test_several_answers_to_one_prompt(runs: dict[str, Run]) -> None:
    run = runs["async"]
    assert len(run.answers["several"]) == 4
    assert run.facts["several loaded"] == 512, "one of the three loads, the others then find it on the GPU"
    run.assert_plain("several")


def test_controls_do_what_they_say(runs: dict[str, Run]) -> None:
    run = runs["async"]
    assert run.facts["cached after skip_save"] == 0
    assert [answer.cached_tokens for _, answer in run.answers["controls"]] == [0, 0, 512, 512, 0]
    assert run.facts["refused"] == 2
    (pin,) = run.facts["pins"]
    assert pin == run.facts["deepest chunk"]
    run.assert_plain("controls")


@pytest.mark.parametrize("mode", MODES)
def test_streaming_sessions_are_stored_and_answered_as_plain_requests_are(runs: dict[str, Run], mode: str) -> None:
    if not has_sessions():
        pytest.skip("streaming sessions need vLLM 0.31")
    run = runs[mode]
    for (text, answer), equal in zip(run.answers["streaming whole"], run.facts["streaming blocks"], strict=True):
        assert answer.cached_tokens == len(text) // CHUNK * CHUNK
        assert equal * BLOCK_TOKENS >= answer.cached_tokens
    run.assert_plain("streaming whole")
    assert len(run.answers["streaming"]) == 8
    run.assert_plain("streaming")


@pytest.mark.parametrize("mode", MODES)
def test_a_mix_of_everything_changes_no_answer_and_leaves_nothing(runs: dict[str, Run], mode: str) -> None:
    run = runs[mode]
    assert all(run.facts["mixed"].values()), f"not a mix. seed={seed()} {run.facts['mixed']}"
    run.assert_plain("mixed")
    assert run.left == NOTHING_LEFT


def test_guessed_tokens_are_stored_only_where_they_were_right(runs: dict[str, Run]) -> None:
    """vLLM's own blocks are right when a request has ended; ours, saved while it ran, must have the same bytes."""
    run = runs["guessing"]
    assert run.facts["drafts"] > run.facts["accepted"] > 0, "no guess was wrong, or none was right"
    for chat_of, chunks in zip(run.facts["chats"], (3, 2), strict=True):  # with save_decode, and without
        (_, answer, *_), (*_, cached) = chat_of["turns"]
        assert len(answer) == ANSWER_TOKENS
        assert cached == chunks * CHUNK and chat_of["equal_blocks"] * BLOCK_TOKENS >= cached
    run.assert_plain("guessing")
    assert run.facts["left"] == [0, 0, False]
