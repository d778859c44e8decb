"""Two ranks, each a process of its own: one blob holds both their parts, for both ranks or for none.

Ranks spin while they wait for one another. On two cores that leaves a cache server of their priority next to nothing,
so the engines here run at a lower one, beside a server that was started by hand.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.kit.counts import only_in_proofs, seed
from tests.kit.server.operator_server import operator_server
from tests.kit.server.probe import figures, wait_written
from tests.kit.vllm.cached_engine import CHUNK, LOGPROB_TOLERANCE, assert_same, cached_engine, settings
from tests.kit.vllm.engine_process import EngineProcess
from tests.kit.vllm.harness import BLOCK_TOKENS, Answer, random_prompt
from tests.kit.vllm.tiny_drafts import eagle_head, mimo
from tests.kit.vllm.tiny_models import build_kind
from tiered_kv.chunks.header import PEEK_BYTES, peek
from tiered_kv.keys.state_keys import is_state

pytestmark = [pytest.mark.vllm, pytest.mark.cores]

PROMPTS = [random_prompt(700 + i, 2 * CHUNK + 40 + 50 * i) for i in range(3)]

STATE_BLOCK = 256
"""vLLM's block for the tiny Qwen3-Next, also of two ranks: both states and KV are halved."""

Start = Callable[..., EngineProcess]

TENSOR = {"tensor_parallel_size": 2}
SMALL_CHUNKS = {"connector": {"chunk_tokens": BLOCK_TOKENS}, "disable_log_stats": False}
"""A chunk per block, so that what vLLM's own cache finds can be found here, too, and vLLM counts guesses."""
PIPELINE = {
    "pipeline_parallel_size": 2,
    # Eager, vLLM 0.32 fails on CPU: the second stage's buffers are made in a warm-up that is left out there. So
    # the graph is traced, for that warm-up, and then run as it is, without a compiler.
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager", "cudagraph_mode": "NONE"},
    "environment": {"TORCH_COMPILE_DISABLE": "0"},
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    engines: list[EngineProcess] = []

    def starting(model: Path, root: Path, server: str, **options: Any) -> EngineProcess:
        environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} | options.pop("environment", {})
        engine = EngineProcess(
            model,
            settings(root, server=server, **options.pop("connector", {})),
            tmp_path / "engine.log",
            environment=environment,
            niceness=5,
            **options,
        )
        engines.append(engine)
        return engine

    yield starting
    for engine in engines:
        engine.close()


def asked_twice(engine: EngineProcess, root: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Answers to the prompts, and again with an empty GPU prefix cache when all chunks are on disk."""
    cold = engine.ask(*PROMPTS, max_tokens=6)
    wait_written(root)
    assert engine.reset()
    return cold, engine.ask(*PROMPTS, max_tokens=6)


def cached(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["cached_tokens"] for answer in answers]


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def asked_of_one_rank(model: Path, root: Path, server: str) -> list[Answer]:
    with cached_engine(model, root, {"server": server}) as engine:
        answers = engine.ask(*PROMPTS, max_tokens=6)
        wait_written(root)
    return answers


def as_answers(answers: list[dict[str, Any]]) -> list[Answer]:
    return [
        Answer(tuple(a["tokens"]), tuple(map(tuple, a["logprobs"])), a["cached_tokens"], a["finish_reason"])
        for a in answers
    ]


def parts(blob: Path) -> set[str]:
    """Ranks whose KV a blob holds."""
    return {name.partition("/")[0] for name in layers(blob)}


def layers(blob: Path) -> list[str]:
    """Names of a blob's tensors: ``rank0/model.layers.0.self_attn.attn``."""
    with safe_open(blob, framework="pt") as content:
        return sorted(name for name in content.keys() if name != "_pad")  # noqa: SIM118 - not a mapping


def metadata(blob: Path) -> dict[str, str]:
    with safe_open(blob, framework="pt") as content:
        named: dict[str, str] = content.metadata()
        return named


def spoil_two_prompts(blobs: list[Path]) -> None:
    """Damage the last rank's part of one prompt's second chunk, and delete the first chunk of another."""
    chosen = random.Random(seed())
    damaged = chosen.choice([blob for blob in blobs if int(metadata(blob)["chunk_index"]) == 1])
    data = bytearray(damaged.read_bytes())
    data[-5000] ^= 1
    damaged.write_bytes(data)
    others = [blob for blob in blobs if int(metadata(blob)["chunk_index"]) == 0]
    chosen.choice([blob for blob in others if metadata(blob)["key"] != metadata(damaged)["parent"]]).unlink()


@pytest.mark.timeout(900)
def test_two_ranks_store_one_blob_and_load_it_after_a_restart(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    """In a store that one rank alone filled before, of whose KV nothing is taken, and which it hits in the end."""
    root = tmp_path / "cache"
    with operator_server(root) as server:
        alone = asked_of_one_rank(tiny_model, root, server)
        of_one_rank = set(root.glob("blobs/*/*/*.safetensors"))
        first = start(tiny_model, root, server, **TENSOR)
        cold, from_host = asked_twice(first, root)
        (session,) = figures(root)["sessions"]
        first.close()

    assert session["workers"] == 2
    assert cached(cold) == [0] * 3 and cached(from_host) == [2 * CHUNK] * 3
    assert tokens(from_host) == tokens(cold)
    blobs = sorted(set(root.glob("blobs/*/*/*.safetensors")) - of_one_rank)
    assert len(blobs) == len(of_one_rank) == 6
    assert [parts(blob) for blob in blobs] == [{"rank0", "rank1"}] * 6

    with operator_server(root) as server:
        second = start(tiny_model, root, server, **TENSOR)
        spoil_two_prompts(blobs)
        from_disk = second.ask(*PROMPTS, max_tokens=6)
        counters = figures(root)["counters"]
        second.close()
        again = asked_of_one_rank(tiny_model, root, server)

    assert [(answer.cached_tokens, answer.tokens) for answer in again] == [(2 * CHUNK, one.tokens) for one in alone]
    for ours, theirs in zip(as_answers(cold), alone, strict=True):
        assert_same(ours, theirs)
    assert tokens(from_disk) == tokens(cold)
    assert sorted(cached(from_disk)) == [0, CHUNK, 2 * CHUNK], "a chunk that one rank lost is lost for both"
    assert counters["read_failed_corrupt"] == 1


@only_in_proofs  # the simulator has equal ranks, too
@pytest.mark.timeout(900)
def test_kv_that_both_ranks_hold_is_stored_once_and_loaded_by_both(
    start: Start, repository: Path, tmp_path: Path
) -> None:
    """With MLA. vLLM 0.30 does not tell that it is the same, and ranks with one KV head of several do not, either."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    model, root = build_kind(repository / "build" / "models", "deepseek_v2"), tmp_path / "cache"
    with operator_server(root) as server:
        # Blocks of 16, and no prefix cache of its own: what vLLM's CPU backend can do with MLA.
        engine = start(model, root, server, **TENSOR, block_size=16, dtype="float32", attention_backend="CPU_MLA")
        cold, from_host = asked_twice(engine, root)
        engine.close()

    assert cached(cold) == [0] * 3 and cached(from_host) == [2 * CHUNK] * 3
    for ours, theirs in zip(from_host, cold, strict=True):
        assert ours["tokens"][0] == theirs["tokens"][0]
        assert ours["logprobs"][0] == pytest.approx(theirs["logprobs"][0], abs=LOGPROB_TOLERANCE)
    blobs = sorted(root.glob("blobs/*/*/*.safetensors"))
    assert len(blobs) == 6
    ranks = {"rank0"} if hasattr(KVCacheConfig, "kv_tp_replicas") else {"rank0", "rank1"}
    assert [parts(blob) for blob in blobs] == [ranks] * 6


@only_in_proofs  # the simulator has states on two ranks, too
@pytest.mark.timeout(900)
def test_two_ranks_store_states_in_parts_of_both_and_go_on_from_them_after_a_restart(
    start: Start, repository: Path, tmp_path: Path
) -> None:
    model, root = build_kind(repository / "build" / "models", "qwen3_next"), tmp_path / "cache"
    prompts = [random_prompt(n, n) for n in (STATE_BLOCK + 1, 2 * STATE_BLOCK, 3 * STATE_BLOCK + 7)]
    hits = [(len(prompt) - 1) // STATE_BLOCK * STATE_BLOCK for prompt in prompts]
    runs: list[list[Answer]] = []
    for times in (3, 1):
        with operator_server(root) as server:
            engine = start(model, root, server, **TENSOR, block_size=None)
            for _ in range(times):
                runs.append(as_answers([engine.ask(prompt, max_tokens=6)[0] for prompt in prompts]))
                wait_written(root)
                assert engine.reset()
            counters = figures(root)["counters"]
            engine.close()

    # Its scheduler takes half a block for one here: the second asking leaves a state behind the first of two blocks.
    cold, again, from_host, from_disk = runs
    cached = [[answer.cached_tokens for answer in run] for run in runs]
    assert cached == [[0] * 3, [hits[0], 0, hits[2]], hits, hits]
    for ours, theirs in zip([*again, *from_host, *from_disk], [*cold, *cold, *cold], strict=True):
        assert (ours.tokens, ours.logprobs) == (theirs.tokens, theirs.logprobs)
    states = [
        blob for blob in root.glob("blobs/*/*/*.safetensors") if is_state(peek(blob.read_bytes()[:PEEK_BYTES]).record)
    ]
    assert states and {frozenset(parts(blob)) for blob in states} == {frozenset({"rank0", "rank1"})}
    assert not counters.get("read_failed_corrupt")


def drafts(kind: str, tiny: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A model, and vLLM's setting of its draft: an EAGLE head, its own MTP layer, or a draft with the same weights."""
    if kind == "mtp":
        return mimo(folder / "mimo", folder), {"method": "mtp", "num_speculative_tokens": 1}
    draft = eagle_head(folder / "eagle", tiny) if kind == "eagle" else tiny
    return tiny, {"method": kind, "model": str(draft), "num_speculative_tokens": 2}


@only_in_proofs  # the simulator has drafts on two ranks, too
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["eagle", "mtp", "draft_model"])
def test_two_ranks_store_and_load_their_parts_of_a_drafts_kv(
    start: Start, tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    """Hits, answers and right guesses as those of vLLM's own prefix cache, from memory and after a restart."""
    model, speculative = drafts(kind, tiny_model, tmp_path)
    root, prompt = tmp_path / "cache", random_prompt(7, 133)
    runs: list[tuple[Answer, list[int]]] = []
    for again in (("own", "host"), ("disk",)):
        with operator_server(root) as server:
            engine = start(model, root, server, **TENSOR, **SMALL_CHUNKS, speculative_config=speculative)
            if "own" in again:
                assert cached(engine.ask(prompt, max_tokens=1)) == [0]
            for where in again:
                if where == "host":
                    wait_written(root)
                    assert engine.reset()
                before = engine.guesses()
                (answer,) = as_answers(engine.ask(prompt, max_tokens=48))
                runs.append((answer, [now - then for now, then in zip(engine.guesses(), before, strict=True)]))
            wait_written(root)
            engine.close()

    (own, own_guesses), (host, host_guesses), (disk, disk_guesses) = runs
    assert own.cached_tokens == (128 if kind == "draft_model" else 96)
    assert (host.cached_tokens, disk.cached_tokens) == (own.cached_tokens, own.cached_tokens)
    for ours in (host, disk):
        assert (ours.tokens, ours.logprobs) == (own.tokens, own.logprobs)
    assert host_guesses == disk_guesses == own_guesses and own_guesses[1] > 0
    assert kind != "draft_model" or own_guesses[0] > own_guesses[1] // 2, "a draft with the model's weights is right"
    assert {frozenset(parts(blob)) for blob in root.glob("blobs/*/*/*.safetensors")} == {frozenset({"rank0", "rank1"})}


@only_in_proofs  # tests/vllm/test_pipeline_stages.py does without a model
@pytest.mark.timeout(900)
def test_two_pipeline_stages_store_one_blob_and_each_loads_its_own_layers(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    root = tmp_path / "cache"
    with operator_server(root) as server:
        engine = start(tiny_model, root, server, **PIPELINE)
        cold, from_host = asked_twice(engine, root)
        engine.close()

    assert cached(cold) == [0] * 3 and cached(from_host) == [2 * CHUNK] * 3
    assert tokens(from_host) == tokens(cold)
    blobs = sorted(root.glob("blobs/*/*/*.safetensors"))
    assert len(blobs) == 6
    expected = ["rank0/model.layers.0.self_attn.attn", "rank1/model.layers.1.self_attn.attn"]
    assert [layers(blob) for blob in blobs] == [expected] * 6
