"""One store under many engines, each unlike the first in exactly one thing: never its KV, always the right answer.

The first engine stores. Every other one must find nothing, answer as plain vLLM with the same change does, and then hit
what it stored itself. In the end the first one comes back and hits, byte for byte. Two ranks are in ``test_ranks.py``;
that each field of the namespace is needed is shown without an engine by ``tests/vllm/test_identity_mutations.py``.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.kit.counts import only_in_proofs
from tests.kit.server.probe import figures, wait_ended, wait_written
from tests.kit.vllm.cached_engine import CHUNK, MARGIN, TAIL, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import Answer, generate, kv_fingerprint, random_prompt, running

# The first test that runs starts four engines, three of them for all.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

HIT = 2 * CHUNK
PROMPTS = [random_prompt(seed, HIT + TAIL) for seed in (4000, 4002, 4006, 4008)]
"""Plain vLLM is sure of the first tokens, whichever of the changes below it has."""
MAX_TOKENS = 3
MISSES, HITS = [0] * len(PROMPTS), [HIT] * len(PROMPTS)


@dataclass(frozen=True)
class Change:
    """What an engine has other than the first.

    Attributes:
        options: vLLM's engine arguments.
        settings: Those of tiered_kv.
        has_other_weights: The model's file is replaced, its folder and its config stay.
        has_other_kv: Plain vLLM computes other numbers, so its answers are asked for anew.
        has_other_text: And they show in its tokens: so would a wrong hit.
    """

    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    has_other_weights: bool = False
    has_other_kv: bool = False
    has_other_text: bool = False


FIRST = Change()
OTHER_WEIGHTS = Change(has_other_weights=True, has_other_kv=True, has_other_text=True)


def computing(**options: Any) -> Change:
    return Change(options, has_other_kv=True, has_other_text=True)


def rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}}


def can_quantise_kv() -> bool:
    """vLLM's CPU backend holds KV in FP8 on some processors only."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    return "avx512f" in flags or "amx_tile" in flags


CHANGES = {
    "weights_under_the_same_name": OTHER_WEIGHTS,
    "dtype": Change({"dtype": "float32"}, has_other_kv=True),
    "rope_theta": computing(hf_overrides=rope(500_000.0)),
    "block_size": Change({"block_size": 64}),
    "chunk_tokens": Change(settings={"chunk_tokens": CHUNK // 2}),
}
PRICIER = {
    "max_model_len": Change({"max_model_len": 2048}),
    "rms_norm_eps": computing(hf_overrides={"rms_norm_eps": 0.1}),
}
QUANTISED = Change({"kv_cache_dtype": "fp8_e5m2"}, has_other_kv=True)


@dataclass
class Shared:
    """The store of all engines here, their model, and what the first one gave.

    Attributes:
        computed: Digests of the KV that the first engine computed.
        fields: The first engine's namespace.
    """

    root: Path
    model: Path
    weights: tuple[Path, Path]
    plain_first: list[Answer] = field(default_factory=list)
    plain_other_weights: list[Answer] = field(default_factory=list)
    computed: dict[str, str] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)

    def engine(self, change: Change) -> Any:
        self.place_weights(change)
        return cached_engine(self.model, self.root, change.settings, **change.options)

    def plain(self, change: Change) -> list[Answer]:
        """What an engine with this change answers that knows no cache of ours."""
        self.place_weights(change)
        with running(self.model, **change.options) as llm:
            answers = generate(llm, PROMPTS, max_tokens=MAX_TOKENS)
        assert any(answer.margin >= MARGIN for answer in answers), "plain vLLM is sure of no answer"
        return answers

    def plain_with(self, change: Change) -> list[Answer]:
        if change is OTHER_WEIGHTS:
            return self.plain_other_weights
        return self.plain(change) if change.has_other_kv else self.plain_first

    def place_weights(self, change: Change) -> None:
        shutil.copyfile(self.weights[change.has_other_weights] / "model.safetensors", self.model / "model.safetensors")


@pytest.fixture(scope="module")
def shared(tiny_model: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """The first engine has stored, and is gone."""
    from tiered_kv.testing.model import TINY, build_model

    other = build_model(repository / "build" / "models" / "tiny-seed1", seed=1, shape=TINY)
    folder = tmp_path_factory.mktemp("matrix")
    shutil.copytree(tiny_model, folder / "model")
    made = Shared(folder / "cache", folder / "model", (tiny_model, other))
    made.plain_other_weights, made.plain_first = made.plain(OTHER_WEIGHTS), made.plain(FIRST)
    with made.engine(FIRST) as engine:
        answers = ask(engine)
        made.computed = kv_fingerprint(engine.llm)
        made.fields = namespace_fields(engine)
        wait_written(made.root)
    assert cached(answers) == MISSES
    assert_right(answers, made.plain_first)
    wait_ended(made.root)
    return made


def ask(engine: CachedEngine) -> list[Answer]:
    return engine.ask(*PROMPTS, max_tokens=MAX_TOKENS)


def cached(answers: list[Answer]) -> list[int]:
    return [answer.cached_tokens for answer in answers]


def namespace_fields(engine: CachedEngine) -> dict[str, Any]:
    fields: dict[str, Any] = engine.scheduler_side._client.namespace.fields
    return fields


def differing(ours: list[Answer], theirs: list[Answer]) -> int:
    return sum(a.tokens != b.tokens for a, b in zip(ours, theirs, strict=True) if b.margin >= MARGIN)


def assert_right(ours: list[Answer], plain: list[Answer]) -> None:
    for answer, theirs in zip(ours, plain, strict=True):
        assert_same(answer, theirs)


def assert_hits_nothing_but_its_own(engine: CachedEngine, plain: list[Answer]) -> None:
    """The prompts are computed, answered rightly and stored; then hit, with the bytes and answers as computed."""
    cold = ask(engine)
    computed = kv_fingerprint(engine.llm)
    warm = ask(engine)

    assert (cached(cold), cached(warm)) == (MISSES, HITS)
    assert kv_fingerprint(engine.llm) == computed
    assert_right(cold, plain)
    assert_right(warm, plain)


def assert_is_a_cache_of_its_own(shared: Shared, change: Change) -> None:
    plain = shared.plain_with(change)
    if change.has_other_text:
        assert differing(shared.plain_first, plain) >= 1, "a wrong hit would go unnoticed in the tokens"
    with shared.engine(change) as engine:
        assert_hits_nothing_but_its_own(engine, plain)
        wait_written(shared.root)


@pytest.mark.parametrize("name", CHANGES)
def test_one_thing_changed_is_a_cache_of_its_own(shared: Shared, name: str) -> None:
    assert_is_a_cache_of_its_own(shared, CHANGES[name])


@only_in_proofs
@pytest.mark.parametrize("name", PRICIER)
def test_other_things_changed_are_caches_of_their_own(shared: Shared, name: str) -> None:
    assert_is_a_cache_of_its_own(shared, PRICIER[name])


@only_in_proofs
@pytest.mark.skipif(not can_quantise_kv(), reason="FP8 KV on a CPU needs AVX-512 or AMX")
def test_quantised_kv_is_a_cache_of_its_own(shared: Shared) -> None:
    assert_is_a_cache_of_its_own(shared, QUANTISED)


def test_without_the_weights_in_the_namespace_the_answers_are_wrong(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the tests above could not fail: this engine takes the first one's KV for its own."""
    from tiered_kv.vllm import worker

    read: Callable[..., dict[str, object]] = worker.base_fields
    monkeypatch.setattr(worker, "base_fields", lambda *given: read(*given) | {"weights": shared.fields["weights"]})
    with shared.engine(OTHER_WEIGHTS) as engine:
        misled = ask(engine)
        assert namespace_fields(engine) == shared.fields

    assert cached(misled) == HITS
    assert differing(misled, shared.plain_other_weights) >= 2


def test_what_does_not_touch_kv_changes_nothing(shared: Shared, tiny_model: Path) -> None:
    """Another folder, other limits of the scheduler, another share of host memory: the first engine's chunks hit."""
    wait_ended(shared.root)
    options = {"num_gpu_blocks_override": 200, "max_num_seqs": 3, "max_num_batched_tokens": 1024, "seed": 7}

    with cached_engine(tiny_model, shared.root, {"host_bytes": "128MiB"}, **options) as engine:
        answers = ask(engine)
        loaded = kv_fingerprint(engine.llm)

    assert cached(answers) == HITS
    assert loaded == shared.computed
    assert_right(answers, shared.plain_first)


def test_first_engine_hits_again_until_its_epoch_ends(shared: Shared) -> None:
    wait_ended(shared.root)
    with shared.engine(FIRST) as engine:
        answers = ask(engine)
        loaded = kv_fingerprint(engine.llm)
        reads = [row for row in figures(shared.root)["operations"] if row["operation"] == "get"]

        assert engine.llm.reset_prefix_cache(reset_connector=True) is True
        assert_hits_nothing_but_its_own(engine, shared.plain_first)
        changed = {name for name, value in namespace_fields(engine).items() if shared.fields[name] != value}

    assert cached(answers) == HITS
    assert loaded == shared.computed
    assert_right(answers, shared.plain_first)
    assert sum(row["calls"] for row in reads if row["outcome"] == "ok") >= sum(HITS) // CHUNK
    assert changed == {"epoch"}
