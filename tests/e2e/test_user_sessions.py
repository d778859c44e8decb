"""Users' sessions on a real engine: an end frees what is its own, hints are carried out, answers stay as they are."""

import inspect
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.probe import counted, in_memory, wait_for, wait_written
from tests.kit.storage.disk_probe import blob_files
from tests.kit.vllm.cached_engine import CHUNK, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import Answer, as_answer, drain, random_prompt, reset_gpu_cache
from tiered_kv.tiers.disk.pins import read_pins

pytestmark = pytest.mark.vllm

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CachedEngine]:
    with cached_engine(tiny_model, tmp_path_factory.mktemp("place") / "kv") as made:
        yield made


def ask(engine: CachedEngine, prompt: Sequence[int], controls: dict[str, Any] | None = None, **more: Any) -> Answer:
    """One request with an empty GPU prefix cache; what it stores is on disk when this returns."""
    from vllm import SamplingParams

    reset_gpu_cache(engine.llm)
    params = {f"tiered_kv.{name}": value for name, value in (controls or {}).items()}
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=4,
        ignore_eos=True,
        detokenize=False,
        logprobs=2,
        extra_args={"kv_transfer_params": params},
    )
    vllm = engine.llm.llm_engine
    vllm.add_request(f"request-{next(NUMBERS)}", {"prompt_token_ids": list(prompt)}, sampling, **more)
    done: list[Any] = []
    while not done:
        done = [output for output in vllm.step() if output.finished]
    drain(engine.llm)
    wait_written(engine.root)
    return as_answer(done[0])


def hints(*actions: tuple[str, dict[str, Any]]) -> Any:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    return KvHintsEnvelope("1", "m", [KvHintAction(kind, kind, "1", payload) for kind, payload in actions])


def has_hints() -> bool:
    """Whether this vLLM takes hints and names of sessions: from 0.32 on."""
    from vllm.v1.engine.llm_engine import LLMEngine

    return "kv_hints" in inspect.signature(LLMEngine.add_request).parameters


def files(engine: CachedEngine) -> int:
    return len(blob_files(engine.root))


def test_a_sessions_end_frees_its_own_chunks_and_shared_ones_stay(engine: CachedEngine) -> None:
    system, mine, theirs = random_prompt(1, CHUNK), random_prompt(2, 2 * CHUNK), random_prompt(3, CHUNK)
    before = in_memory(engine.root), files(engine)
    states = counted(engine.root, "session_states")
    first = ask(engine, [*system, *mine[:CHUNK], 5], {"session_id": "mine"})
    follow_up = ask(engine, [*system, *mine, 7], {"session_id": "mine"})
    other = ask(engine, [*system, *theirs, 9], {"session_id": "theirs"})
    assert [answer.cached_tokens for answer in (first, follow_up, other)] == [0, 2 * CHUNK, CHUNK]
    wait_for(lambda: counted(engine.root, "session_states") == states + 3, "what is told")
    assert (in_memory(engine.root), files(engine)) == (before[0] + 4, before[1] + 4)
    ended = ask(engine, [*system, *mine, 7], {"session_id": "mine", "release": True})
    assert ended.cached_tokens == 3 * CHUNK
    assert_same(ended, follow_up)
    wait_for(lambda: (in_memory(engine.root), files(engine)) == (before[0] + 2, before[1] + 2), "its own two chunks")
    again = ask(engine, [*system, *theirs, 9], {"session_id": "theirs"})
    assert again.cached_tokens == 2 * CHUNK
    assert_same(again, other)
    anew = ask(engine, [*system, *mine, 7])
    assert anew.cached_tokens == CHUNK, "what went is computed anew"
    assert_same(anew, follow_up)


@pytest.mark.skipif("not has_hints()", reason="this vLLM has no hints")
def test_vllms_own_session_and_hints_are_carried_out(engine: CachedEngine) -> None:
    prompt, other = random_prompt(11, 2 * CHUNK + 20), random_prompt(12, CHUNK + 20)
    first = ask(engine, prompt, session_id="run")
    before = in_memory(engine.root)
    ask(engine, other, session_id="other", kv_hints=hints(("kv.demote", {}), ("kv.unheard", {})))
    wait_for(lambda: in_memory(engine.root) == before, "the demotion of the other one's chunk")
    assert engine.scheduler_side.counters["hints_unknown"] == 1
    ask(engine, random_prompt(13, 40), kv_hints=hints(("kv.prefetch", {"session_id": "other"})))
    wait_for(lambda: in_memory(engine.root) == before + 1, "the prefetch of it")
    ask(engine, other, session_id="other", kv_hints=hints(("kv.retain", {"ttl": "5m"})))
    wait_for(lambda: len(read_pins(engine.root)) == 1, "pins.json")
    stored = files(engine)
    again = ask(engine, prompt, session_id="run", kv_hints=hints(("kv.release", {})))
    assert again.cached_tokens == 2 * CHUNK
    assert_same(again, first)
    wait_for(lambda: (in_memory(engine.root), files(engine)) == (before - 1, stored - 2), "the end of the session")
    released = counted(engine.root, "session_ends")
    ask(engine, other, session_id="other", kv_hints=hints(("kv.release", {})))
    wait_for(lambda: counted(engine.root, "session_ends") == released + 1, "the other one's end")
    assert files(engine) == stored - 2, "what is retained stays"
