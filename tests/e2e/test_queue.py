"""A queue does not turn the cache off: requests that wait find what they would find one at a time, on real engines.

Leases have a limit, so what a queue wants at once is cut; docs/decisions/0025-leases-end.md says what becomes of it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.clients import SmallEngine
from tests.kit.server.clients import settings as small_settings
from tests.kit.server.probe import figures, wait_for, wait_written
from tests.kit.vllm.cached_engine import CHUNK, TAIL, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import Answer, drain, generate, random_prompt, running
from tiered_kv.ops.server_link import ServerLink

pytestmark = pytest.mark.vllm

CHUNK_BYTES = 528_384
CHUNKS = 3
PROMPTS = [random_prompt(900 + n, CHUNKS * CHUNK + TAIL) for n in range(24)]
LIMITS = {"host_bytes": 8 * CHUNKS * CHUNK_BYTES, "disk_bytes": "256MiB"}


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> list[Answer]:
    with running(tiny_model) as llm:
        return generate(llm, PROMPTS)


def store(engine: CachedEngine, prompts: list[list[int]]) -> None:
    """Have prompts on disk, and nothing of them in host memory."""
    for prompt in prompts:
        engine.ask(prompt)
        wait_written(engine.root)
    with ServerLink.of_directory(engine.root) as link:
        link.evict("host", b"", None, holes=True)


def cached(answers: list[Answer]) -> list[int]:
    return [answer.cached_tokens for answer in answers]


@pytest.fixture
def engine(tiny_model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[CachedEngine]:
    more: dict[str, Any] = getattr(request, "param", {})
    with cached_engine(tiny_model, tmp_path / "cache", LIMITS | more) as made:
        yield made


def test_a_queue_hits_what_its_prompts_hit_one_at_a_time(engine: CachedEngine, plain: list[Answer]) -> None:
    store(engine, PROMPTS)
    alone = [engine.ask(prompt)[0] for prompt in PROMPTS]
    with ServerLink.of_directory(engine.root) as link:
        link.evict("host", b"", None, holes=True)

    together = engine.ask(*PROMPTS)

    assert cached(alone) == [CHUNKS * CHUNK] * len(PROMPTS)
    assert sum(cached(together)) >= 0.95 * sum(cached(alone)), cached(together)
    for ours, theirs in zip(together, plain, strict=True):
        assert_same(ours, theirs)
    usage = figures(engine.root)
    assert usage["counters"]["lease_cap_reached"], "there was room for all: nothing was proved"
    wait_for(lambda: not figures(engine.root)["hierarchy"]["leased_bytes"], "leases to end")


@pytest.mark.parametrize("engine", [{"lease_s": 1.0}], indirect=True)
def test_an_engine_that_admits_none_of_its_queue_takes_nobodys_hits(engine: CachedEngine, plain: list[Answer]) -> None:
    """vLLM steps such an engine only inside ``generate``: between two calls it is an engine that stands still."""
    from vllm import SamplingParams

    store(engine, PROMPTS[:8])
    chunks = SmallEngine.start(small_settings(engine.root, **LIMITS), "neighbour", weights="other")
    try:
        for number in range(4):
            chunks.store(CHUNKS, first_token=number * 1_000_000)
            wait_written(engine.root)
        with ServerLink.of_directory(engine.root) as link:
            link.evict("host", b"", None, holes=True)
        parameters = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        core = engine.llm.llm_engine
        for number, prompt in enumerate(PROMPTS[:8]):
            core.add_request(f"queued-{number}", {"prompt_token_ids": list(prompt)}, parameters)
        wait_for(lambda: figures(engine.root)["counters"].get("lease_cap_reached", 0) > 0, "the cap")

        hits = [chunks.hits(CHUNKS, first_token=number * 1_000_000) for number in range(4)]

        assert hits == [CHUNKS] * 4
        wait_for(lambda: figures(engine.root)["hierarchy"]["leased_bytes"] == 0, "leases to end by the clock")
    finally:
        chunks.close()

    answers = {}
    while core.has_unfinished_requests():
        answers.update({one.request_id: one for one in core.step() if one.finished})
    drain(engine.llm)
    assert [answers[f"queued-{n}"].num_cached_tokens for n in range(8)] == [CHUNKS * CHUNK] * 8
    assert [answers[f"queued-{n}"].outputs[0].token_ids[0] for n in range(8)] == [one.tokens[0] for one in plain[:8]]
