"""The waiting rule as it is set by default, on a real engine: a fast tier is waited for, a slow one is not (rule 8).

Everywhere else engines are told to wait for as long as it takes, so that a busy machine changes no outcome. Here the
engine decides by what it measured; what it decided is read from counters and from the tokens that were not computed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.faults.proxy import Fault, FaultProxy, Mode
from tests.kit.s3 import S3
from tests.kit.server.object_nodes import object_figures, s3_place, wait_uploaded
from tests.kit.server.probe import figures, wait_ended, wait_for
from tests.kit.vllm.cached_engine import CHUNK, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import Answer, close_llm, generate, make_llm, random_prompt, running
from tiered_kv.vllm import request_lookups

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CHUNKS = 11
PROMPTS = [random_prompt(seed, CHUNKS * CHUNK + 60) for seed in range(4)]
NEVER_STORED = [random_prompt(seed, CHUNKS * CHUNK + 60) for seed in (10, 11)]
MAX_TOKENS = 4
STEP_TOKENS = 128
"""Many small steps: the model is so small that a prefill in one step is hardly slower than a busy machine's disk."""
DRIPPING = Fault(Mode.DRIP, kinds={"GET"}, path=".safetensors", bytes_per_s=50_000)
"""A chunk takes ten seconds then: longer than any machine needs to compute all of a prompt."""


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> list[Answer]:
    """What vLLM answers without any cache of ours."""
    with running(tiny_model) as llm:
        return generate(llm, PROMPTS, max_tokens=MAX_TOKENS)


@pytest.fixture
def proxy(s3: S3) -> Iterator[FaultProxy]:
    with FaultProxy(s3.endpoint_url) as proxy:
        yield proxy
        proxy.set()


def default_engine(model: Path, root: Path, storage: dict[str, Any]) -> CachedEngine:
    """An engine whose operator said where and how much, and nothing about waiting."""
    settings = {"host_bytes": "256MiB", "disk_bytes": "1GiB", "strict": True} | storage
    return CachedEngine(make_llm(model, settings, max_num_batched_tokens=STEP_TOKENS), root)


def test_an_engine_with_default_settings_waits_for_its_disk(
    tiny_model: Path, tmp_path: Path, plain: list[Answer]
) -> None:
    """Memory is empty after the restart, so every hit came from disk, and was waited for by the measured rule."""
    storage = {"storage_uri": f"file://{tmp_path}"}
    first = default_engine(tiny_model, tmp_path, storage)
    try:
        cold = first.ask(*PROMPTS, max_tokens=MAX_TOKENS)
        assert [answer.cached_tokens for answer in cold] == [0] * len(PROMPTS)
    finally:
        close_llm(first.llm)
    wait_ended(tmp_path)

    second = default_engine(tiny_model, tmp_path, storage)
    try:
        assert second.scheduler_side._wait_policy._fixed_s is None
        assert figures(tmp_path)["hierarchy"]["host_ready_chunks"] == 0
        # Until a prefill was measured, the engine is taken for one so fast that nothing is worth waiting for.
        for prompt in NEVER_STORED:
            generate(second.llm, [prompt], max_tokens=MAX_TOKENS)
        warm = [second.ask(prompt, max_tokens=MAX_TOKENS)[0] for prompt in PROMPTS]
        counters = dict(second.scheduler_side.counters)
        ready = figures(tmp_path)["hierarchy"]["host_ready_chunks"]
    finally:
        close_llm(second.llm)

    for ours, theirs in zip(warm, plain, strict=True):
        assert_same(ours, theirs)
    cached = [answer.cached_tokens for answer in warm]
    # A disk that stands still just then loses by the rule, and the prompt is computed: on a busy machine one or two do.
    assert sum(cached) >= len(PROMPTS) * CHUNKS * CHUNK // 2, f"{cached} {counters}"
    assert counters["load_tokens"] == sum(cached)
    assert ready >= sum(cached) // CHUNK


def test_a_bucket_that_is_slower_than_prefill_is_not_waited_for(
    tiny_model: Path, tmp_path: Path, s3: S3, proxy: FaultProxy, plain: list[Answer]
) -> None:
    """It is computed at once; what the bucket delivers in the end is a hit for the next request, from nearer by."""
    prefix = s3.new_prefix()
    near = s3_place(s3, prefix)
    there = {"storage_uri": near.uri, "storage_options": near.options, "disk_path": str(tmp_path / "a")}
    with cached_engine(tiny_model, tmp_path / "a", there) as other:
        other.ask(PROMPTS[0], PROMPTS[1], max_tokens=1)
        wait_uploaded(tmp_path / "a")
    wait_ended(tmp_path / "a")

    far = s3_place(s3, prefix, proxy.url)
    storage = {
        "storage_uri": far.uri,
        "storage_options": far.options,
        "disk_path": str(tmp_path / "b"),
        "storage_timeout_s": 60,
    }
    engine = default_engine(tiny_model, tmp_path / "b", storage)
    try:
        proxy.set(DRIPPING)  # the server's own test of the bucket, at its start, was still quick
        proxy.forget()
        for number in (1, 0):  # the first meets a bucket that was trusted until then
            (slow,) = engine.ask(PROMPTS[number], max_tokens=MAX_TOKENS)
            assert_same(slow, plain[number])
            assert slow.cached_tokens == 0
        assert engine.scheduler_side.counters["promotion_not_awaited"] == 2, dict(engine.scheduler_side.counters)
        assert engine.scheduler_side.counters["loads"] == 0
        assert proxy.count("HEAD", prefix) > 0, "the bucket was not even asked"
        assert object_figures(tmp_path / "b")["breaker"] == "closed", "slow is not out of order"

        proxy.set()

        def has_come() -> bool:
            ready: int = figures(tmp_path / "b")["hierarchy"]["host_ready_chunks"]
            return ready == 2 * CHUNKS

        wait_for(has_come, "what the bucket delivers in the end, or was computed and stored")
        (again,) = engine.ask(PROMPTS[0], max_tokens=MAX_TOKENS)
        assert_same(again, plain[0])
        assert again.cached_tokens == CHUNKS * CHUNK
    finally:
        proxy.set()
        close_llm(engine.llm)


def test_the_same_bucket_is_waited_for_where_the_operator_says_so(
    tiny_model: Path, tmp_path: Path, s3: S3, proxy: FaultProxy, plain: list[Answer]
) -> None:
    """The control of the test above: it is the rule that does not wait, and the bytes do come."""
    prefix = s3.new_prefix()
    near = s3_place(s3, prefix)
    there = {"storage_uri": near.uri, "storage_options": near.options, "disk_path": str(tmp_path / "a")}
    with cached_engine(tiny_model, tmp_path / "a", there) as other:
        other.ask(PROMPTS[0], max_tokens=1)
        wait_uploaded(tmp_path / "a")
    wait_ended(tmp_path / "a")

    far = s3_place(s3, prefix, proxy.url)
    storage = {"storage_uri": far.uri, "storage_options": far.options, "disk_path": str(tmp_path / "b")}
    with cached_engine(tiny_model, tmp_path / "b", storage | {"storage_timeout_s": 60}) as engine:
        proxy.set(DRIPPING)
        (patient,) = engine.ask(PROMPTS[0], max_tokens=MAX_TOKENS)
        proxy.set()
    assert_same(patient, plain[0])
    assert patient.cached_tokens == CHUNKS * CHUNK


def test_a_wait_that_ends_takes_all_that_has_come_by_then(
    tiny_model: Path,
    tmp_path: Path,
    s3: S3,
    proxy: FaultProxy,
    plain: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first chunks come from disk, the others drip out of a bucket; of parts nobody tells who does not ask."""
    monkeypatch.setattr(request_lookups, "FOLLOWED_CHUNKS", 0)
    near_chunks, prefix = 5, s3.new_prefix()
    near = s3_place(s3, prefix)
    for name, prompt in ("b", PROMPTS[0][: near_chunks * CHUNK + 1]), ("a", PROMPTS[0]):
        there = {"storage_uri": near.uri, "storage_options": near.options, "disk_path": str(tmp_path / name)}
        with cached_engine(tiny_model, tmp_path / name, there) as other:
            other.ask(prompt, max_tokens=1)
            wait_uploaded(tmp_path / name)
        wait_ended(tmp_path / name)

    far = s3_place(s3, prefix, proxy.url)
    storage = {"storage_uri": far.uri, "storage_options": far.options, "disk_path": str(tmp_path / "b")}
    more = {"storage_timeout_s": 60, "promotion_wait_ms": 3000}
    with cached_engine(tiny_model, tmp_path / "b", storage | more) as engine:
        proxy.set(DRIPPING)
        followed: list[int] = []
        follow = engine.scheduler_side._client.follow
        monkeypatch.setattr(
            engine.scheduler_side._client, "follow", lambda lookup: (followed.append(lookup), follow(lookup))
        )
        (answer,) = engine.ask(PROMPTS[0], max_tokens=MAX_TOKENS)
        counters = dict(engine.scheduler_side.counters)
        proxy.set()
    assert_same(answer, plain[0])
    assert answer.cached_tokens == near_chunks * CHUNK == counters["load_tokens"]
    assert len(followed) == 1
