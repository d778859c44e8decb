"""Kinds of models on a real engine: what is loaded is byte for byte what was computed, and the answer is plain vLLM's.

For each kind plain vLLM answers first, then an engine behind the cache, cold and from host memory. What a kind must not
lose is checked, too: its KV cache groups, and the few blocks a layer with a sliding window holds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.kit.counts import count
from tests.kit.vllm.cached_engine import CHUNK, MARGIN, TAIL, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import Answer, drain, generate, random_prompt, reset_gpu_cache, running, zero_kv
from tests.kit.vllm.held_blocks import Held, watching
from tests.kit.vllm.tiny_models import WIDE_WINDOW, WINDOW, build_kind

pytestmark = pytest.mark.vllm

CHUNKS = [4, 4, 3, 1, 1, 1, 1]
PROMPTS = [random_prompt(seed, chunks * CHUNK + TAIL) for seed, chunks in enumerate(CHUNKS, start=1)]
STORED = [chunks * CHUNK for chunks in CHUNKS]
FORKED = PROMPTS[0][: 2 * CHUNK + 100] + random_prompt(30, 200)
"""Shares two chunks with the first prompt; the window before its fork lies inside them."""
MAX_TOKENS = 3


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        groups: vLLM's specs of its KV cache groups.
        whole: Tokens loaded of a prompt of three whole chunks. Without windows all of them (vLLM computes the last
            token again); a window would then be one token short, so the last chunk is computed.
        options: vLLM's engine arguments.
    """

    name: str
    groups: tuple[str, ...]
    whole: int = 3 * CHUNK
    options: dict[str, Any] = field(default_factory=dict)
    variant: str = ""
    window: int = WINDOW

    @property
    def windows(self) -> list[int]:
        return [number for number, spec in enumerate(self.groups) if spec.startswith("SlidingWindow")]

    @property
    def block_tokens(self) -> int:
        return int(self.options.get("block_size", 32))


FULL, WINDOWED, LATENT = "FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec"
KINDS = [
    Kind("qwen3", (FULL,)),
    Kind("gemma3", (WINDOWED, FULL), whole=2 * CHUNK),
    Kind("gemma3", (FULL,), options={"disable_hybrid_kv_cache_manager": True}, variant="-one-group"),
    Kind("gemma3_wide", (WINDOWED, FULL), whole=2 * CHUNK, window=WIDE_WINDOW),
    Kind("gpt_oss", (WINDOWED, FULL), whole=2 * CHUNK),
    Kind("mistral", (WINDOWED,), whole=2 * CHUNK),
    # vLLM's CPU backend decodes MLA in blocks of 16 only, without a prefix cache of its own, and not as it prefills.
    # Named, because where the CPU has AMX vLLM takes kernels that want bfloat16 and blocks of 32.
    Kind("deepseek_v2", (LATENT,), options={"block_size": 16, "dtype": "float32", "attention_backend": "CPU_MLA"}),
]
IN_EVERY_RUN = ("gemma3", "gemma3_wide", "mistral", "deepseek_v2")
"""The others prove no path of their own: they run under ``make prove`` (TIERED_KV_MODELS=1)."""
if not count("MODELS", 0):
    KINDS = [kind for kind in KINDS if kind.name + kind.variant in IN_EVERY_RUN]


@dataclass
class Plain:
    """What vLLM gives without a cache of ours: answers to the prompts, to the fork, and what it held meanwhile."""

    answers: list[Answer]
    forked: Answer
    groups: list[tuple[str, int]]
    blocks: int


@dataclass
class Pair:
    kind: Kind
    plain: Plain
    engine: CachedEngine


def _groups(llm: Any) -> tuple[list[tuple[str, int]], int]:
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    specs = [(type(group.kv_cache_spec).__name__, len(group.layer_names)) for group in config.kv_cache_groups]
    return specs, config.num_blocks


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name + kind.variant)
def pair(request: Any, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    kind: Kind = request.param
    model = build_kind(repository / "build" / "models", kind.name)
    with running(model, **kind.options) as llm:
        answers = generate(llm, PROMPTS, max_tokens=MAX_TOKENS)
        plain = Plain(answers, generate(llm, [FORKED], max_tokens=MAX_TOKENS)[0], *_groups(llm))
    with cached_engine(model, tmp_path_factory.mktemp("cache"), **kind.options) as engine:
        yield Pair(kind, plain, engine)


def ask(pair: Pair, *prompts: list[int]) -> tuple[list[Answer], list[Held]]:
    with watching(pair.engine.llm) as held:
        answers = [pair.engine.ask(prompt, max_tokens=MAX_TOKENS)[0] for prompt in prompts]
    return answers, held


def test_load_that_brings_nothing_changes_the_answer(pair, monkeypatch):
    prompts = [random_prompt(seed, 2 * CHUNK + TAIL) for seed in (21, 22)]
    cold, _ = ask(pair, *prompts)
    worker, copy = pair.engine.worker_side, pair.engine.worker_side._copy
    monkeypatch.setattr(worker, "_copy", lambda kind, *rest: None if kind == "load" else copy(kind, *rest))

    def empty(prompt: list[int]) -> Answer:
        reset_gpu_cache(pair.engine.llm)
        zero_kv(pair.engine.llm)
        return ask(pair, prompt)[0][0]

    without = [empty(prompt) for prompt in prompts]

    # Else equal answers would prove nothing below.
    assert [answer.cached_tokens for answer in without] == [2 * CHUNK] * 2
    assert all(a.tokens != b.tokens for a, b in zip(cold, without, strict=True))


def test_loaded_blocks_are_those_computed_and_the_answer_is_plain_vllms(pair):
    cold, computed = ask(pair, *PROMPTS)
    warm, loaded = ask(pair, *PROMPTS)

    assert [answer.cached_tokens for answer in cold] == [0] * len(PROMPTS)
    assert [answer.cached_tokens for answer in warm] == STORED
    assert sum(answer.margin >= MARGIN for answer in pair.plain.answers) >= 1, "the plain run is sure of no answer"
    for ours, theirs in zip(cold + warm, pair.plain.answers * 2, strict=True):
        assert_same(ours, theirs)
    for before, after, tokens in zip(computed, loaded, STORED, strict=True):
        pages = after.pages_before(tokens, pair.kind.block_tokens)
        assert pages
        assert pages == before.pages_before(tokens, pair.kind.block_tokens)


def test_prompt_that_forks_hits_the_chunks_before_the_fork(pair):
    ask(pair, PROMPTS[0])
    (forked,), _ = ask(pair, FORKED)

    assert forked.cached_tokens == 2 * CHUNK
    assert_same(forked, pair.plain.forked)


def test_prompt_of_whole_chunks(pair):
    prompt = random_prompt(31, 3 * CHUNK)
    (cold, warm), _ = ask(pair, prompt, prompt)

    assert (cold.cached_tokens, warm.cached_tokens) == (0, pair.kind.whole)
    assert_same(warm, cold)


def test_memory_of_sliding_windows_is_saved_as_in_plain_vllm(pair):
    prompt = random_prompt(32, 4 * CHUNK + TAIL)
    _, (_, warm) = ask(pair, prompt, prompt)

    assert _groups(pair.engine.llm) == (pair.plain.groups, pair.plain.blocks)
    assert tuple(spec for spec, _ in pair.plain.groups) == pair.kind.groups
    length = -(-(len(prompt) + MAX_TOKENS) // pair.kind.block_tokens)
    for group in range(len(pair.kind.groups)):
        if group in pair.kind.windows:
            # The window's tokens may lie in one block more than they would fill; behind them are the tail's.
            in_window = -(-(pair.kind.window - 1) // pair.kind.block_tokens) + 1
            assert warm.most[group] <= in_window + -(-(TAIL + MAX_TOKENS) // pair.kind.block_tokens)
        else:
            assert warm.most[group] == length


def test_part_in_vllms_own_prefix_cache_is_not_loaded_again(pair):
    if pair.kind.name == "deepseek_v2":
        pytest.skip("vLLM's CPU backend has no prefix cache for MLA")
    prompt = random_prompt(33, 4 * CHUNK + TAIL)
    (cold,), _ = ask(pair, prompt)
    ask(pair, prompt[:300])  # 9 blocks of 32 tokens
    loads = pair.engine.scheduler_side.counters["load_tokens"]
    (warm,) = generate(pair.engine.llm, [prompt], max_tokens=MAX_TOKENS)
    drain(pair.engine.llm)

    assert warm.cached_tokens == 4 * CHUNK
    assert pair.engine.scheduler_side.counters["load_tokens"] - loads == 4 * CHUNK - 288
    assert_same(warm, cold)
