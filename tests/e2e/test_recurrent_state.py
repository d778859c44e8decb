"""Models with recurrent layers on the real engine: a hit brings the state at its end, or is none.

Every hit is judged with vLLM's own cache empty and all blocks zeroed, by log-probabilities equal to the last digit:
what is left over of an earlier run cannot help a load that brought too little, or came too late.
"""

import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.counts import count, seed
from tests.kit.s3 import S3
from tests.kit.server.object_nodes import s3_place, wait_uploaded
from tests.kit.server.probe import figures, server_pid, wait_ended, wait_for, wait_written
from tests.kit.storage.disk_probe import blob_files
from tests.kit.verbs import explained_hit, report
from tests.kit.vllm.cached_engine import CachedEngine, cached_engine
from tests.kit.vllm.harness import Answer, drain, generate, random_prompt, reset_gpu_cache, running, zero_kv
from tests.kit.vllm.tiny_models import build_kind
from tests.kit.vllm.wrong_loads import WRONG_WAYS
from tiered_kv.chunks.header import PEEK_BYTES, peek
from tiered_kv.keys.state_keys import is_state, state_records
from tiered_kv.vllm.scheduler import SchedulerSide

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

BLOCK = 256
"""vLLM's unified block for the tiny models."""

ONE_BLOCK = {"max_num_batched_tokens": BLOCK}
"""Of Mamba 2 vLLM 0.32's CPU build computes one block a step only."""

OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_next": {},
    "granite4": ONE_BLOCK,
    "falcon_h1": ONE_BLOCK,
    "nemotron_h": ONE_BLOCK,
}

KINDS = list(OPTIONS) if count("MODELS", 0) else ["qwen3_next", "granite4"]
LENGTHS = [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK + 7]
MAX_TOKENS = 6
FEW = 16
SLOT_BYTES = 135_168
"""Of the tiny Qwen3-Next: a block of its one layer that attends, and a header."""
DISK_RESERVE = 64 << 20


def options(kind: str) -> dict[str, Any]:
    return {"block_size": None, "max_num_seqs": 16} | OPTIONS[kind]


@pytest.fixture(scope="module")
def models(repository: Path) -> Path:
    return repository / "build" / "models"


@pytest.fixture
def qwen(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CachedEngine]:
    """Three layers of gated delta nets and one that attends; at its end every state that vLLM offered is accounted."""
    offered = count_offers(monkeypatch)
    with cached_engine(build_kind(models, "qwen3_next"), tmp_path / "cache", **options("qwen3_next")) as engine:
        yield engine
        drain(engine.llm)
        counters = engine.scheduler_side.counters
        ends = {n: c for n, c in counters.items() if n in STATE_ENDS or n.startswith("state_dropped_")}
        assert sum(ends.values()) == counters["state_offers"] == len(offered), ends


STATE_ENDS = ("state_held", "states", "states_failed")


def count_offers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Request and boundary of every state that vLLM hands over from now on."""
    offered: list[tuple[str, int]] = []
    plan = SchedulerSide.plan_step

    def counted(self: SchedulerSide, output: Any) -> Any:
        for name, blocks in output.kv_connector_block_state.boundary_state_offloads.items():
            offered.extend((name, tokens) for tokens in {boundary for _, _, boundary in blocks})
        return plan(self, output)

    monkeypatch.setattr(SchedulerSide, "plan_step", counted)
    return offered


def hit_tokens(length: int) -> int:
    """What vLLM's own prefix cache gives of a prompt that is asked again."""
    return (length - 1) // BLOCK * BLOCK


def ask_afresh(engine: CachedEngine, *prompts: list[int]) -> list[Answer]:
    """Answers of an engine that has nothing left: its own cache is empty and its blocks are zeros."""
    reset_gpu_cache(engine.llm)
    zero_kv(engine.llm)
    return engine.ask(*prompts, max_tokens=MAX_TOKENS)


def cold_answers(engine: CachedEngine, *prompts: list[int]) -> list[Answer]:
    """Answers to prompts that are new, one at a time."""
    answers = [engine.ask(prompt, max_tokens=MAX_TOKENS)[0] for prompt in prompts]
    assert [answer.cached_tokens for answer in answers] == [0] * len(prompts)
    return answers


def assert_equal(ours: list[Answer], theirs: list[Answer]) -> None:
    """The same tokens with the same log-probabilities, to the last digit."""
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in theirs]
    assert [answer.logprobs for answer in ours] == [answer.logprobs for answer in theirs]


def stored(root: Path) -> tuple[list[Path], list[Path]]:
    """Blobs of chunks and of states in a directory."""
    files = sorted(blob_files(root))
    states = [path for path in files if is_state(peek(path.read_bytes()[:PEEK_BYTES]).record)]
    return [path for path in files if path not in states], states


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_asked_again_hits_as_in_vllms_own_cache(models: Path, tmp_path: Path, kind: str) -> None:
    """From host memory, and after a restart from disk."""
    model, root = build_kind(models, kind), tmp_path / "cache"
    prompts = [random_prompt(n, n) for n in LENGTHS]
    with running(model, **options(kind)) as llm:
        plain = [generate(llm, [prompt], max_tokens=MAX_TOKENS)[0] for prompt in prompts]
        own = [generate(llm, [prompt], max_tokens=MAX_TOKENS)[0] for prompt in prompts]
    with cached_engine(model, root, **options(kind)) as engine:
        cold = cold_answers(engine, *prompts)
        again = [ask_afresh(engine, prompt)[0] for prompt in prompts]
        wait_written(root)
        counters = dict(engine.scheduler_side.counters)
    wait_ended(root)
    chunks, states = stored(root)
    explained = [explained_hit(f"file://{root}", prompt, tmp_path) for prompt in prompts]
    verified = report("verify", f"file://{root}")
    with cached_engine(model, root, **options(kind)) as engine:
        restarted = [ask_afresh(engine, prompt)[0] for prompt in prompts]

    assert [answer.cached_tokens for answer in own] == list(map(hit_tokens, LENGTHS))
    assert [answer.cached_tokens for answer in again] == list(map(hit_tokens, LENGTHS))
    assert [answer.cached_tokens for answer in restarted] == list(map(hit_tokens, LENGTHS))
    assert explained == list(map(hit_tokens, LENGTHS)), "explain says another hit than the engine has"
    assert (verified["bad"], verified["read"]) == ([], len(chunks) + len(states))
    for answers in (cold, again, restarted):
        assert_equal(answers, plain)
    assert len(chunks) == sum(n // BLOCK for n in LENGTHS)
    assert counters["stores"] == sum((n + MAX_TOKENS - 1) // BLOCK for n in LENGTHS) > len(chunks), "no answer's chunk"
    assert counters["states"] == sum(n > BLOCK for n in LENGTHS) and len(states) == counters["state_parts_stored"]


def test_an_engine_on_another_machine_goes_on_from_the_bucket(models: Path, tmp_path: Path, s3: S3) -> None:
    model, place = build_kind(models, "qwen3_next"), s3_place(s3, s3.new_prefix())
    disk, prompts = tmp_path / "disk", [random_prompt(n, n) for n in (2 * BLOCK, 3 * BLOCK + 7)]
    extra = {"storage_uri": place.uri, "storage_options": place.options, "disk_path": str(disk)}
    with cached_engine(model, disk, extra, **options("qwen3_next")) as engine:
        cold = cold_answers(engine, *prompts)
        wait_uploaded(disk)
    wait_ended(disk)
    shutil.rmtree(disk)
    with cached_engine(model, disk, extra, **options("qwen3_next")) as engine:
        there = [ask_afresh(engine, prompt)[0] for prompt in prompts]
        promoted = figures(disk)["counters"].get("state_searches", 0)
    assert [answer.cached_tokens for answer in there] == [BLOCK, 3 * BLOCK]
    assert_equal(there, cold)
    assert promoted, "nothing was looked for in the bucket"


def test_a_turn_goes_on_from_the_state_of_the_turn_before(qwen: CachedEngine) -> None:
    first = random_prompt(1, 2 * BLOCK + 50)
    (answer,) = cold_answers(qwen, first)
    second = [*first, *answer.tokens, *random_prompt(2, 100)]
    reset_gpu_cache(qwen.llm)
    (ours,) = ask_afresh(qwen, second)
    with_more = [*second, *ours.tokens, *random_prompt(3, 2 * BLOCK)]
    (grown,) = ask_afresh(qwen, with_more)
    assert ours.cached_tokens == 2 * BLOCK and grown.cached_tokens == hit_tokens(len(second))
    (again,) = ask_afresh(qwen, second)
    assert_equal([again], [ours])


@pytest.mark.parametrize("shared", [2 * BLOCK - 20, 2 * BLOCK, 2 * BLOCK + 20])
def test_prompts_that_fork_hit_what_vllm_makes_states_for(qwen: CachedEngine, shared: int) -> None:
    """vLLM makes one at the fork when a second prompt comes by; from then on it serves all others, after a loss too."""
    stem = random_prompt(1, shared)
    prompts = [[*stem, *random_prompt(10 + n, BLOCK)] for n in range(4)]
    own = [generate(qwen.llm, [prompt], max_tokens=MAX_TOKENS)[0] for prompt in prompts[:3]]
    drain(qwen.llm)
    ours = [ask_afresh(qwen, prompt)[0] for prompt in prompts]
    fork, last = shared // BLOCK * BLOCK, hit_tokens(len(prompts[0]))
    assert [answer.cached_tokens for answer in own] == [0, fork if fork == last else 0, fork]
    assert [answer.cached_tokens for answer in ours] == [
        *(hit_tokens(len(prompt)) for prompt in prompts[:3]),
        fork,
    ]
    assert [a.tokens for a in ours[:3]] == [a.tokens for a in own]


def test_a_fork_that_vllm_has_forgotten_gets_a_state_too(models: Path, tmp_path: Path) -> None:
    """What the cache holds shows where the second prompt forks; it leaves a state there, also for the next engine."""
    model, root = build_kind(models, "qwen3_next"), tmp_path / "cache"
    stem = random_prompt(1, 2 * BLOCK + 20)
    prompts = [[*stem, *random_prompt(10 + n, BLOCK)] for n in range(4)]
    with running(model, **options("qwen3_next")) as llm:
        plain = [generate(llm, [prompt], max_tokens=MAX_TOKENS)[0] for prompt in prompts[:1]]
        for prompt in prompts[1:]:
            reset_gpu_cache(llm)
            plain += generate(llm, [prompt], max_tokens=MAX_TOKENS)
    ours = list[Answer]()
    for some in (prompts[:1], prompts[1:3], prompts[3:]):
        with cached_engine(model, root, **options("qwen3_next")) as engine:
            ours += [ask_afresh(engine, prompt)[0] for prompt in some]
            wait_written(root)
        wait_ended(root)
    assert [answer.cached_tokens for answer in ours] == [0, 0, 2 * BLOCK, 2 * BLOCK]
    assert_equal(ours, plain)


def test_many_at_once(qwen: CachedEngine) -> None:
    draw = random.Random(seed())
    prompts = [random_prompt(100 + n, draw.randint(BLOCK + 1, 5 * BLOCK)) for n in range(16)]
    cold = cold_answers(qwen, *prompts)
    together = ask_afresh(qwen, *prompts)
    assert [answer.cached_tokens for answer in together] == [hit_tokens(len(prompt)) for prompt in prompts]
    assert [answer.tokens for answer in together] == [answer.tokens for answer in cold]
    for ours, theirs in zip(together, cold, strict=True):
        pairs = zip(ours.logprobs, theirs.logprobs, strict=True)
        assert all(abs(a - b) < 0.01 for mine, their in pairs for a, b in zip(mine, their, strict=True))


def test_a_lost_state_or_chunk_costs_its_hit_and_no_more(models: Path, tmp_path: Path) -> None:
    model, root = build_kind(models, "qwen3_next"), tmp_path / "cache"
    first = random_prompt(1, 2 * BLOCK + 9)
    longer = [*first, *random_prompt(2, 2 * BLOCK)]
    with cached_engine(model, root, **options("qwen3_next")) as engine:
        cold = [ask_afresh(engine, prompt)[0] for prompt in (first, longer)]
        wait_written(root)
    wait_ended(root)
    assert [answer.cached_tokens for answer in cold] == [0, 2 * BLOCK]
    kept = tmp_path / "kept"
    shutil.copytree(root, kept)
    chunks, states = stored(root)

    def after(*lost: Path, is_flipped: bool = False) -> Answer:
        shutil.rmtree(root)
        shutil.copytree(kept, root)
        for path in lost:
            if is_flipped:
                data = bytearray(path.read_bytes())
                data[-5000] ^= 1
                path.write_bytes(data)
            else:
                path.unlink()
        with cached_engine(model, root, **options("qwen3_next")) as engine:
            (answer,) = ask_afresh(engine, longer)
        wait_ended(root)
        return answer

    def at(files: list[Path], index: int) -> list[Path]:
        return [path for path in files if peek(path.read_bytes()[:PEEK_BYTES]).record.chunk_index == index]

    assert after().cached_tokens == 4 * BLOCK
    (last,) = at(chunks, 3)
    names = {record.key for record in state_records(peek(last.read_bytes()[:PEEK_BYTES]).record, 3)}
    deepest = [path for path in states if peek(path.read_bytes()[:PEEK_BYTES]).record.key in names]
    assert len(deepest) == 3, "three groups of recurrent layers"
    answers = {
        "no deepest state": (after(*deepest), 2 * BLOCK),
        "a part of it is gone": (after(deepest[1]), 2 * BLOCK),
        "no first chunk": (after(*at(chunks, 0)), 0),
        "a bit of the state flipped": (after(deepest[2], is_flipped=True), 0),
    }
    for what, (answer, cached) in answers.items():
        assert (what, answer.cached_tokens, answer.tokens) == (what, cached, cold[1].tokens)


def test_a_killed_server_costs_misses_and_hits_come_back(qwen: CachedEngine) -> None:
    prompts = [random_prompt(n, n) for n in (2 * BLOCK + 1, 3 * BLOCK + 7)]
    cold = cold_answers(qwen, *prompts)
    wait_written(qwen.root)
    os.kill(server_pid(qwen.root), signal.SIGKILL)
    zero_kv(qwen.llm)
    reset_gpu_cache(qwen.llm)
    lost = [generate(qwen.llm, [prompt], max_tokens=MAX_TOKENS)[0] for prompt in prompts]

    def has_session() -> bool:
        generate(qwen.llm, [[5, 6, 7]], max_tokens=1)
        return bool(qwen.scheduler_side.client.is_ready)

    wait_for(has_session, "a new session")
    back = [ask_afresh(qwen, prompt)[0] for prompt in prompts]
    assert [answer.cached_tokens for answer in back] == [2 * BLOCK, 3 * BLOCK]
    assert_equal(lost, cold)
    assert_equal(back, cold)


def test_requests_aborted_at_random_moments_leave_nothing_behind(qwen: CachedEngine) -> None:
    from vllm import SamplingParams

    prompts = [random_prompt(100 + n, 2 * BLOCK + 10 * n) for n in range(1, 7)]
    cold = cold_answers(qwen, *prompts)
    draw, core = random.Random(seed()), qwen.llm.llm_engine
    parameters = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    for turn in range(6):
        reset_gpu_cache(qwen.llm)
        zero_kv(qwen.llm)
        names = [f"{turn}-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            core.add_request(name, {"prompt_token_ids": prompt}, parameters)
        victims = draw.sample(names, 4)
        while core.has_unfinished_requests():
            if victims and draw.random() < 0.5:
                core.abort_request([victims.pop()])
            core.step()
        drain(qwen.llm)
    again = [ask_afresh(qwen, prompt)[0] for prompt in prompts]
    assert [answer.cached_tokens for answer in again] == [2 * BLOCK] * len(prompts)
    assert_equal(again, cold)
    assert not qwen.scheduler_side.has_work and not qwen.scheduler_side._loading


WRONG_PROMPT = random_prompt(7, 3 * BLOCK + 7)


@pytest.fixture(scope="module")
def right_answer(models: Path) -> Answer:
    """Of plain vLLM."""
    with running(build_kind(models, "qwen3_next"), **options("qwen3_next")) as llm:
        (plain,) = generate(llm, [WRONG_PROMPT], max_tokens=MAX_TOKENS)
    return plain


def test_each_wrong_way_is_noticed(models: Path, tmp_path: Path, right_answer: Answer) -> None:
    """The other tests could not fail if these were not seen: they change log-probabilities and nothing else."""
    before, wrong = WRONG_PROMPT[: 2 * BLOCK + 5], dict[str, Answer]()
    with cached_engine(build_kind(models, "qwen3_next"), tmp_path / "cache", **options("qwen3_next")) as engine:
        cold_answers(engine, before)
        (first,) = ask_afresh(engine, WRONG_PROMPT)
        for name, spoil in WRONG_WAYS.items():
            with pytest.MonkeyPatch.context() as patch:
                spoil(patch, engine)
                ask_afresh(engine, before)
                (wrong[name],) = ask_afresh(engine, WRONG_PROMPT)
        (right,) = ask_afresh(engine, WRONG_PROMPT)
    assert (first.cached_tokens, first.logprobs) == (2 * BLOCK, right_answer.logprobs)
    assert (right.cached_tokens, right.logprobs) == (3 * BLOCK, right_answer.logprobs)
    for name, ours in wrong.items():
        assert (name, ours.cached_tokens) == (name, 3 * BLOCK)
        assert ours.logprobs != right_answer.logprobs, name


def test_a_prefix_longer_than_its_states_is_stored_once_and_offered_nowhere(qwen: CachedEngine) -> None:
    """A fork that only this cache knows: without a state there, what is held is no hit; nor is it stored again.

    The second prompt leaves a state there, and the third is offered it.
    """
    stem = random_prompt(1, 2 * BLOCK + 20)
    prompts = [[*stem, *random_prompt(10 + n, BLOCK)] for n in range(3)]
    counters = qwen.scheduler_side.counters
    (first,) = ask_afresh(qwen, prompts[0])
    before = counters.copy()
    (second,) = ask_afresh(qwen, prompts[1])
    told = _lookups(qwen, 2)
    assert first.cached_tokens == second.cached_tokens == 0
    assert counters["loads"] == told["hit_tokens"] == 0 and told["decisions"]["miss"] == 2
    assert counters["stores"] - before["stores"] == 1, "the chunk behind the fork"
    assert counters["states"] - before["states"] == 2 and counters["state_forks"] == 1
    (third,) = ask_afresh(qwen, prompts[2])
    assert third.cached_tokens == 2 * BLOCK


def _lookups(engine: CachedEngine, ended: int) -> dict[str, Any]:
    """What the server counts of lookups, once so many have ended."""
    wait_for(lambda: figures(engine.root)["tokens"]["lookups"] >= ended, f"{ended} lookups")
    told: dict[str, Any] = figures(engine.root)["tokens"]
    return told


def test_states_are_evicted_first_and_what_is_left_of_a_prompt_is_right(models: Path, tmp_path: Path) -> None:
    """Room for few chunks in memory and on disk, so that prompts push each other's states out."""
    model, root = build_kind(models, "qwen3_next"), tmp_path / "cache"
    prompts = [random_prompt(60 + n, 2 * BLOCK + 1 + n) for n in range(8)]
    small = {"host_bytes": FEW * SLOT_BYTES, "disk_bytes": DISK_RESERVE + FEW * SLOT_BYTES}
    with cached_engine(model, root, small, **options("qwen3_next")) as engine:
        cold = cold_answers(engine, *prompts)
        wait_written(root)
        chunks, states = stored(root)
        assert len(chunks) * 3 > 2 * len(states), "chunks and states of a prompt went together"
        found = [ask_afresh(engine, prompt)[0] for prompt in reversed(prompts)][::-1]
        again = ask_afresh(engine, *prompts)
        evicted = figures(root)["counters"]
    hits = {answer.cached_tokens for answer in found}
    assert hits <= {0, 2 * BLOCK} and len(hits) == 2, "nothing was evicted, or everything"
    assert_equal(found, cold)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in cold]
    assert evicted["host_evicted"]
