"""Drafts on real engines: their KV comes back with the model's, and a hit is as long as vLLM's own.

For each kind of draft an engine without the cache answers first, and again from its own prefix cache; then an engine
behind the cache, cold and from host memory, and one more after a restart, from disk. All paged KV is zeroed before a
load. What a draft guesses never changes an answer: that the draft's own KV is back shows in how many guesses are right,
with a draft that has the model's own weights.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.kit.counts import count, only_in_proofs
from tests.kit.server.probe import wait_ended, wait_written
from tests.kit.verbs import explained_hit
from tests.kit.vllm.cached_engine import CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import (
    BLOCK_TOKENS,
    Answer,
    drain,
    forget_parallel_groups,
    generate,
    random_prompt,
    reset_gpu_cache,
    running,
    zero_kv,
)
from tests.kit.vllm.tiny_drafts import eagle3_head, eagle_head, mimo
from tests.kit.vllm.tiny_models import build_kind
from tests.kit.vllm.wrong_loads import abort_during_load

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

B = BLOCK_TOKENS
LENGTHS = (B - 1, B, B + 1, 2 * B, 2 * B + 1, 300)
SMALL_CHUNKS = {"chunk_tokens": B}
"""A chunk per block, so that what vLLM's own cache finds can be found here, too."""

WIDE_CHUNK = 4 * B
FOLLOW_UP = 40
GUESSED = 48
"""Tokens of an answer in which the right guesses are counted."""

Engines = tuple[Path, dict[str, Any]]


@dataclass
class Run:
    """What the engines of one kind of draft did.

    Attributes:
        own: By prompt length: computed, and from vLLM's own prefix cache.
        cold, host, disk: By prompt length, behind the cache.
        accepted: Right guesses and all guesses: without the cache, loaded, and loaded with the draft's KV zeroed.
    """

    own: dict[int, tuple[Answer, Answer]] = field(default_factory=dict)
    cold: dict[int, Answer] = field(default_factory=dict)
    host: dict[int, Answer] = field(default_factory=dict)
    disk: dict[int, Answer] = field(default_factory=dict)
    turns: dict[str, Answer] = field(default_factory=dict)
    accepted: dict[str, tuple[int, int]] = field(default_factory=dict)
    long: dict[str, Answer] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def eagle(tiny: Path, folder: Path) -> Engines:
    return tiny, _speculative("eagle", eagle_head(folder / "eagle", tiny))


def eagle3(tiny: Path, folder: Path) -> Engines:
    return tiny, _speculative("eagle3", eagle3_head(folder / "eagle3", tiny))


def mtp(tiny: Path, folder: Path) -> Engines:
    model = mimo(folder / "mimo", folder)
    return model, {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}


def draft_model(tiny: Path, folder: Path) -> Engines:
    """A draft that has the model's own weights, so that its guesses are right."""
    return tiny, _speculative("draft_model", tiny)


def eagle3_beside_windows(tiny: Path, folder: Path) -> Engines:
    """A head that attends to all beside gpt-oss, of which every other layer has a window."""
    forget_parallel_groups()
    model = build_kind(folder, "gpt_oss")
    return model, _speculative("eagle3", eagle3_head(folder / "eagle3", model))


def _speculative(method: str, path: Path, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "model": str(path), "num_speculative_tokens": 2} | more}


KINDS: Mapping[str, Callable[[Path, Path], Engines]] = {
    "eagle": eagle,
    "eagle3": eagle3,
    "mtp": mtp,
    "draft_model": draft_model,
    "eagle3_beside_windows": eagle3_beside_windows,
}


def is_beside_windows(kind: str) -> bool:
    return kind.endswith("_beside_windows")


def own_hit(kind: str, length: int) -> int:
    """How much vLLM's own prefix cache gives of a prompt that it has (``Drafts.hit_tokens``)."""
    if kind == "draft_model":
        return (length - 1) // B * B
    return max(0, (length if is_beside_windows(kind) else length - 1) // B * B - B)


@contextmanager
def counting(llm: Any, into: list[int]) -> Iterator[None]:
    """Count right guesses and all guesses."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    tell = scheduler.make_spec_decoding_stats
    into[:] = [0, 0]

    def told(*arguments: Any, **options: Any) -> Any:
        into[0] += options["num_accepted_tokens"]
        into[1] += options["num_draft_tokens"]
        return tell(*arguments, **options)

    scheduler.make_spec_decoding_stats = told
    try:
        yield
    finally:
        scheduler.make_spec_decoding_stats = tell


def guess(llm: Any, run: Run, name: str) -> None:
    """A long answer to one prompt, and how many of its guesses were right."""
    reset_gpu_cache(llm)
    counts: list[int] = []
    with counting(llm, counts):
        (run.long[name],) = generate(llm, [random_prompt(7, 133)], max_tokens=GUESSED)
        drain(llm)
    run.accepted[name] = (counts[0], counts[1])


def draft_tensors(llm: Any) -> list[Any]:
    """The paged KV of a separate draft model's layers."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    found = [layer.kv_cache for name, layer in layers.items() if name.startswith("draft_model.")]
    assert found
    return [tensor for of_layer in found for tensor in (of_layer if isinstance(of_layer, list) else [of_layer])]


def zero_draft_after_loads(engine: CachedEngine) -> None:
    """From now on a load brings the model's KV alone."""
    worker = engine.worker_side
    copy = worker._copy

    def without_draft(kind: str, *rest: Any) -> None:
        copy(kind, *rest)
        if kind == "load":
            for tensor in draft_tensors(engine.llm):
                tensor.zero_()

    worker._copy = without_draft


def ask(engine: CachedEngine, prompt: list[int]) -> Answer:
    zero_kv(engine.llm)
    return engine.ask(prompt)[0]


def without_the_cache(run: Run, model: Path, options: dict[str, Any]) -> None:
    with running(model, **options) as llm:
        for length in LENGTHS:
            prompt = random_prompt(length, length)
            run.own[length] = (generate(llm, [prompt])[0], generate(llm, [prompt])[0])
        first = run.own[300][0]
        (run.turns["own"],) = generate(llm, [second_turn(first)])
        guess(llm, run, "without")


def second_turn(first: Answer) -> list[int]:
    return [*random_prompt(300, 300), *first.tokens, *random_prompt(8, FOLLOW_UP)]


def behind_the_cache(run: Run, model: Path, options: dict[str, Any], root: Path) -> None:
    with cached_engine(model, root, SMALL_CHUNKS, **options) as engine:
        for length in LENGTHS:
            prompt = random_prompt(length, length)
            run.cold[length] = ask(engine, prompt)
            run.host[length] = ask(engine, prompt)
        run.turns["host"] = ask(engine, second_turn(run.cold[300]))
        run.facts["aborted while loading"] = abort_during_load(engine, random_prompt(300, 300))
        run.facts["after the abort"] = ask(engine, random_prompt(300, 300))
        guess(engine.llm, run, "cold")
        zero_kv(engine.llm)
        guess(engine.llm, run, "loaded")
        wait_written(root)
        run.facts["namespace"] = engine.scheduler_side.client.namespace.fields
    wait_ended(root)
    uri = f"file://{root}"
    run.facts["explained"] = {n: explained_hit(uri, random_prompt(n, n), root.parent) for n in LENGTHS}
    with cached_engine(model, root, SMALL_CHUNKS, **options) as engine:
        for length in LENGTHS:
            run.disk[length] = ask(engine, random_prompt(length, length))
        if options["speculative_config"]["method"] == "draft_model":
            zero_draft_after_loads(engine)
            guess(engine.llm, run, "zeroed")
        pool = engine.scheduler.kv_cache_manager.block_pool
        run.facts["left"] = (
            pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            len(engine.scheduler_side._requests),
            engine.scheduler_side.has_work,
        )


@pytest.fixture(scope="module", params=list(KINDS) if count("MODELS", 0) else ["eagle", "draft_model"])
def run(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp(request.param)
    model, options = KINDS[request.param](tiny_model, folder)
    run = Run()
    run.facts["kind"] = request.param
    without_the_cache(run, model, options)
    behind_the_cache(run, model, options, folder / "cache")
    return run


@pytest.mark.parametrize("length", LENGTHS)
def test_a_hit_is_as_long_as_vllms_own_and_the_answer_the_same(run: Run, length: int) -> None:
    computed, own = run.own[length]
    assert own.cached_tokens == own_hit(run.facts["kind"], length), "vLLM's own hit is not what it was"
    assert run.cold[length].cached_tokens == 0
    for ours in (run.cold[length], run.host[length], run.disk[length]):
        assert (ours.tokens, ours.logprobs) == (computed.tokens, computed.logprobs)
    assert run.host[length].cached_tokens == run.disk[length].cached_tokens == own.cached_tokens
    assert run.facts["explained"][length] == own.cached_tokens, "explain says another hit than the engine has"


def test_a_second_turn_goes_on_from_the_first(run: Run) -> None:
    ours, own = run.turns["host"], run.turns["own"]
    assert ours.tokens == own.tokens
    # The answer ends in the prompt's last block; of its 9 whole ones the cache gives all but what is dropped.
    assert ours.cached_tokens == 300 // B * B - (0 if run.facts["kind"] == "draft_model" else B)


def test_an_abort_during_a_load_leaves_nothing_and_the_prompt_as_it_was(run: Run) -> None:
    assert run.facts["aborted while loading"]
    after, before = run.facts["after the abort"], run.host[300]
    assert (after.tokens, after.logprobs, after.cached_tokens) == (before.tokens, before.logprobs, before.cached_tokens)
    assert run.facts["left"] == (0, 0, False)


def test_as_many_guesses_are_right_as_without_the_cache(run: Run) -> None:
    assert run.long["loaded"].cached_tokens > 0
    assert {answer.tokens for answer in run.long.values()} == {run.long["without"].tokens}
    assert run.accepted["loaded"] == run.accepted["cold"] == run.accepted["without"]
    if run.facts["kind"] == "draft_model":
        right, guesses = run.accepted["loaded"]
        assert 2 * right > guesses > 0, "a draft with the model's own weights is mostly right"
        assert 4 * run.accepted["zeroed"][0] < right, "the draft's KV decides nothing, so this test shows nothing"


def test_the_draft_is_in_the_namespace(run: Run) -> None:
    draft = run.facts["namespace"]["draft"]
    assert draft["method"] == run.facts["kind"].removesuffix("_beside_windows")
    assert ("kv_cache_groups" in draft) is is_beside_windows(run.facts["kind"])
    is_of_the_model = run.facts["kind"] in ("mtp", "draft_model")
    assert (draft["weights"] == run.facts["namespace"]["weights"]) is is_of_the_model


def test_other_weights_of_the_draft_are_another_namespace(tiny_model: Path, tmp_path: Path) -> None:
    prompt, namespaces, hits = random_prompt(5, 300), [], []
    for number, seed in enumerate((3, 4, 3)):
        head = eagle_head(tmp_path / f"head{number}", tiny_model, seed=seed)
        with cached_engine(tiny_model, tmp_path / "cache", SMALL_CHUNKS, **_speculative("eagle", head)) as engine:
            hits.append(engine.ask(prompt)[0].cached_tokens)
            namespaces.append(engine.scheduler_side.client.namespace)
            wait_written(tmp_path / "cache")
    assert hits == [0, 0, 300 // B * B - B], "the same head in another folder hits, another head does not"
    assert namespaces[0] == namespaces[2] != namespaces[1]
    assert namespaces[0].fields["weights"] == namespaces[1].fields["weights"]


def test_what_was_computed_without_the_draft_is_not_stored(tiny_model: Path, tmp_path: Path) -> None:
    """The draft takes 256 tokens here, so vLLM does not run it for a longer prompt."""
    options = _speculative("draft_model", tiny_model, max_model_len=256)
    extra = {"chunk_tokens": WIDE_CHUNK}
    with cached_engine(tiny_model, tmp_path, extra, **options) as engine:
        long, short = random_prompt(1, 300), random_prompt(2, 200)
        answers = [engine.ask(prompt)[0] for prompt in (long, long, short, short)]
        counters = engine.scheduler_side.counters
        assert counters["store_dropped_undrafted"] == 2 * (300 // WIDE_CHUNK)
        assert counters["stores"] == 200 // WIDE_CHUNK
    assert [answer.cached_tokens for answer in answers] == [0, 0, 0, 200 // WIDE_CHUNK * WIDE_CHUNK]
    assert answers[0].tokens == answers[1].tokens
    assert answers[2].tokens == answers[3].tokens


@only_in_proofs
def test_a_follow_up_finds_an_answer_beside_windows(tmp_path: Path) -> None:
    """vLLM has the block that a hit with a draft needs more back one step before an answer's chunk is whole."""
    model, options = eagle3_beside_windows(tmp_path, tmp_path)
    with cached_engine(model, tmp_path / "cache", {"chunk_tokens": 2 * WIDE_CHUNK}, **options) as engine:
        prompt = random_prompt(1, 200)
        (answer,) = engine.ask(prompt, max_tokens=100)
        counters = engine.scheduler_side.counters
        assert (counters["stores"], counters["store_dropped_window_passed"]) == (1, 0)
        follow_up = [*prompt, *answer.tokens, *random_prompt(2, FOLLOW_UP)]
        loaded = ask(engine, follow_up)
        zero_kv(engine.llm)
        (computed,) = engine.ask(follow_up, skip_load=True)
    assert (loaded.cached_tokens, computed.cached_tokens) == (2 * WIDE_CHUNK - B, 0)
    assert_same(loaded, computed)
