"""What requests say to our tier below vLLM's offloading, and what is worth waiting for, in a real engine."""

import itertools
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.probe import counted, in_memory, server_pid, wait_for, wait_written
from tests.kit.storage.disk_probe import blob_files
from tests.kit.vllm.cached_engine import assert_same
from tests.kit.vllm.harness import Answer, as_answer, random_prompt, reset_gpu_cache, zero_kv
from tests.kit.vllm.offloading_engine import ROW_TOKENS, ask, offloading_engine, on_disk, step, tier_of
from tiered_kv.ops.server_link import ServerLink
from tiered_kv.tiers.disk.pins import read_pins
from tiered_kv.vllm.row_waits import RETRY_S

pytestmark = pytest.mark.vllm

NUMBERS = itertools.count()
ROWS = 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offloading") / "cache"


@pytest.fixture(scope="module")
def llm(tiny_model: Path, root: Path) -> Iterator[Any]:
    """With rows for one prompt beside the one that runs, so that each comes from below; it waits while that pays."""
    with offloading_engine(tiny_model, on_disk(root), rows=2 * ROWS + 2, promotion_wait_ms="auto") as made:
        yield made


def files(root: Path) -> int:
    return len(blob_files(root))


def say(llm: Any, root: Path, prompt: list[int], given: dict[str, Any] | None = None, *hints: Any) -> Answer:
    """One request with parameters and hints; what it stores is on disk when this returns."""
    from vllm import SamplingParams
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    reset_gpu_cache(llm)
    zero_kv(llm)
    params = {f"tiered_kv.{name}": value for name, value in (given or {}).items()}
    sampling = SamplingParams(
        temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=2,
        extra_args={"kv_transfer_params": params},
    )  # fmt: skip
    actions = [KvHintAction(kind, kind, "1", payload) for kind, payload in hints]
    vllm = llm.llm_engine
    more = {"kv_hints": KvHintsEnvelope("1", "m", actions)} if actions else {}
    vllm.add_request(f"request-{next(NUMBERS)}", {"prompt_token_ids": prompt}, sampling, **more)
    done: list[Any] = []
    while not done:
        done = [output for output in vllm.step() if output.finished]
    wait_for(lambda: not step(llm), "jobs to end, and hints to be sent")
    wait_written(root)
    return as_answer(done[0])


def push_out(llm: Any, first: int) -> None:
    """What is in vLLM's rows is in none of them any more; not all at once, as rows that are being written stay."""
    for number in range(first, first + 4):
        ask(llm, random_prompt(number, ROWS * ROW_TOKENS + 20))


def test_only_what_is_read_faster_than_computed_is_promoted(llm: Any, root: Path) -> None:
    """The rates are the engine's and the disk's own; then the engine is said to be as fast, or as slow, as none is."""
    prompt, tier = random_prompt(1, ROWS * ROW_TOKENS + 20), tier_of(llm)
    (cold,) = ask(llm, prompt)
    assert tier.waits._prefill.tokens_per_s, "no prefill was measured"
    push_out(llm, 100)
    wait_written(root)
    with ServerLink.of_directory(root) as link:
        link.evict("host", b"", None, holes=True)
    counts: list[tuple[str, int, str]] = []
    count = tier._metrics.count

    def note(name: str, number: int, label: str = "") -> None:
        counts.append((name, number, label))
        count(name, number, label)

    tier._metrics.count = note
    try:
        tier.waits._prefill.tokens_per_s = 1e12
        (computed,) = ask(llm, prompt)
        push_out(llm, 200)
        tier.waits._prefill.tokens_per_s = 1.0
        (loaded,) = ask(llm, prompt)
    finally:
        tier._metrics.count = count
    assert (computed.cached_tokens, loaded.cached_tokens) == (0, ROWS * ROW_TOKENS)
    assert ("not_loaded", ROWS, "too_slow") in counts
    assert_same(computed, cold)
    assert_same(loaded, cold)


@contextmanager
def no_descriptors(root: Path) -> Iterator[None]:
    """The server can open no file: each read fails."""
    pid = server_pid(root)
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))  # those that it has stay
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def test_a_disk_of_which_a_read_has_failed_is_not_left_alone_for_ever(
    llm: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a read that failed nothing is expected of a tier, and nobody reads from it but for what is expected."""
    prompt, tier, fillers = random_prompt(51, ROW_TOKENS + 20), tier_of(llm), itertools.count(5000, 10)

    def leave_on_disk_alone() -> None:
        push_out(llm, next(fillers))
        wait_written(root)
        with ServerLink.of_directory(root) as link:
            link.evict("host", b"", None, holes=True)
        tier.waits._prefill.tokens_per_s = 1.0

    def again() -> Answer:
        leave_on_disk_alone()
        (answer,) = ask(llm, prompt)
        return answer

    (cold,) = ask(llm, prompt)
    leave_on_disk_alone()
    with no_descriptors(root):
        (failed,) = ask(llm, prompt)
    assert failed.cached_tokens == 0
    now_s = time.monotonic()
    monkeypatch.setattr(tier.waits, "_monotonic", lambda: now_s)
    assert again().cached_tokens == 0, "nothing is expected of the disk"
    now_s += RETRY_S
    retried, measured = again(), again()
    assert (retried.cached_tokens, measured.cached_tokens) == (ROW_TOKENS, ROW_TOKENS)
    for answer in (failed, retried, measured):
        assert_same(answer, cold)


def test_a_sessions_end_and_hints_are_carried_out(llm: Any, root: Path) -> None:
    tier_of(llm).waits._prefill.tokens_per_s = 1.0
    mine, others = random_prompt(11, ROWS * ROW_TOKENS + 5), random_prompt(12, ROWS * ROW_TOKENS + 5)
    before = files(root)
    first = say(llm, root, mine, {"session_id": "mine"})
    kept = say(llm, root, others, {"session_id": "others"}, ("kv.retain", {"ttl": "5m"}), ("kv.unheard", {}))
    wait_for(lambda: counted(root, "session_states") == 2, "states of both")
    wait_for(lambda: len(read_pins(root)) == 1, "the pin of what is retained")
    assert files(root) == before + 2 * ROWS
    again = say(llm, root, mine, {"session_id": "mine"}, ("kv.release", {}))
    wait_for(lambda: files(root) == before + ROWS, "the end of one session")
    say(llm, root, random_prompt(13, 40), {"session_id": "others", "release": True})
    wait_for(lambda: counted(root, "session_ends") == 2, "the end of the other")
    assert files(root) == before + ROWS, "what is retained stays"
    assert_same(again, first)
    assert_same(say(llm, root, others), kept)


def test_a_session_that_is_about_to_go_on_is_brought_up(llm: Any, root: Path) -> None:
    prompt = random_prompt(21, ROWS * ROW_TOKENS + 5)
    say(llm, root, prompt, {"session_id": "paused"}, ("kv.demote", {}))
    with ServerLink.of_directory(root) as link:
        link.evict("host", b"", None, holes=True)
    assert in_memory(root) == 0
    say(llm, root, random_prompt(22, 40), {"prefetch": "paused"})
    wait_for(lambda: in_memory(root) == ROWS, "its rows in the server's memory")


@pytest.mark.parametrize(("level", "hit"), [(0, ROWS * ROW_TOKENS), (1, 0)])
def test_a_sleep_that_clears_caches_is_a_reset_and_another_is_none(llm: Any, root: Path, level: int, hit: int) -> None:
    """vLLM's CPU build keeps the memory in a sleep; pausing, resetting and going on are its own."""
    tier, prompt = tier_of(llm), random_prompt(30 + level, ROWS * ROW_TOKENS + 5)
    tier.waits._prefill.tokens_per_s = 1.0
    first = say(llm, root, prompt)
    core = llm.llm_engine.engine_core.engine_core
    core.sleep(level)
    assert core.is_sleeping()
    core.wake_up(["scheduling"] if level == 0 else None)
    wait_for(lambda: not step(llm) and tier._jobs.is_ready, "a session")
    tier.waits._prefill.tokens_per_s = 1.0
    asked = say(llm, root, prompt)
    tier.waits._prefill.tokens_per_s = 1.0
    push_out(llm, 300 + 10 * level)
    tier.waits._prefill.tokens_per_s = 1.0
    again = say(llm, root, prompt)
    assert (asked.cached_tokens, again.cached_tokens) == (hit, ROWS * ROW_TOKENS)
    assert_same(asked, first)
    assert_same(again, first)
