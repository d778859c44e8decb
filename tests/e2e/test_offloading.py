"""Our tier below vLLM's own offloading, in a real engine: ``OffloadingConnector``, its tiering manager, and our server.

vLLM refuses to offload where there is no GPU, so a worker that copies by the CPU takes the GPU's place
(``tests/kit/vllm/host_offloading.py``); all else is vLLM's. A new engine's host memory is empty, so a hit there comes
from below it.
"""

import shutil
from pathlib import Path

import pytest

from tests.kit.s3 import S3
from tests.kit.server.object_nodes import s3_place, wait_uploaded
from tests.kit.server.probe import figures, wait_ended, wait_for, wait_written
from tests.kit.server.processes import kill_server
from tests.kit.storage.disk_probe import blob_files
from tests.kit.vllm.cached_engine import assert_same
from tests.kit.vllm.engine_process import EngineProcess
from tests.kit.vllm.harness import (
    Answer,
    generate,
    kv_fingerprint,
    make_llm,
    random_prompt,
    reset_gpu_cache,
    running,
    zero_kv,
)
from tests.kit.vllm.offloading_engine import (
    MAX_TOKENS,
    ROW_BYTES,
    ROW_TOKENS,
    ask,
    extra_config,
    offloading,
    offloading_engine,
    on_disk,
    step,
    tier_of,
)
from tiered_kv.config import Config

pytestmark = pytest.mark.vllm

PROMPTS = [random_prompt(5_000 + n, 5 * ROW_TOKENS + 20) for n in range(4)]
ROWS = 5
HIT = ROWS * ROW_TOKENS


def chunks(root: Path) -> int:
    return len(blob_files(root))


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> list[Answer]:
    with running(tiny_model) as llm:
        return generate(llm, PROMPTS, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def stored(tiny_model: Path, plain: list[Answer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with all prompts; each test works on a copy of its own."""
    root = tmp_path_factory.mktemp("offloading") / "cache"
    with offloading_engine(tiny_model, on_disk(root)) as llm:
        # The first alone: what a step computes of a prompt depends in its last bits on what else is in the step.
        for cold, theirs in zip([*ask(llm, PROMPTS[0]), *ask(llm, *PROMPTS[1:])], plain, strict=True):
            assert_same(cold, theirs)
            assert cold.cached_tokens == 0
        wait_written(root)
        assert figures(root)["hierarchy"]["reserved_slots"] == 0, "an idle engine holds slots"
    wait_ended(root)
    assert chunks(root) == ROWS * len(PROMPTS)
    return root


@pytest.fixture
def root(stored: Path, tmp_path: Path) -> Path:
    shutil.copytree(stored, tmp_path / "cache")
    return tmp_path / "cache"


def test_prompts_come_back_from_disk_after_a_restart_byte_for_byte(
    tiny_model: Path, plain: list[Answer], root: Path
) -> None:
    with running(tiny_model) as llm:
        generate(llm, PROMPTS[:1], max_tokens=1)
        computed = kv_fingerprint(llm)
    with offloading_engine(tiny_model, on_disk(root)) as llm:
        reset_gpu_cache(llm)
        zero_kv(llm)
        generate(llm, PROMPTS[:1], max_tokens=1)
        loaded = kv_fingerprint(llm)
        warm = ask(llm, *PROMPTS)
        assert chunks(root) == ROWS * len(PROMPTS)
    assert loaded == computed
    assert [one.cached_tokens for one in warm] == [HIT] * len(PROMPTS)
    for one, theirs in zip(warm, plain, strict=True):
        assert_same(one, theirs)


def test_another_machine_finds_them_in_the_bucket(
    tiny_model: Path, plain: list[Answer], s3: S3, tmp_path: Path
) -> None:
    place = s3_place(s3, s3.new_prefix())
    uri = {"storage_uri": place.uri, "storage_options": place.options}
    for machine, hit in (("first", 0), ("second", HIT)):
        disk = tmp_path / machine
        with offloading_engine(tiny_model, uri | {"disk_path": str(disk)}) as llm:
            answers = ask(llm, *PROMPTS)
            wait_uploaded(disk)
        assert [one.cached_tokens for one in answers] == [hit] * len(PROMPTS)
        for one, theirs in zip(answers, plain, strict=True):
            assert_same(one, theirs)


def test_vllms_metrics_have_our_rows(tiny_model: Path, root: Path) -> None:
    """Through vLLM's own loggers, from the scheduler to the page that Prometheus reads."""
    with offloading_engine(tiny_model, on_disk(root), options={"disable_log_stats": False}) as llm:
        ask(llm, PROMPTS[0], random_prompt(77, 2 * ROW_TOKENS + 5))
        values = {one.name: one.value for one in llm.get_metrics() if one.name.startswith("vllm:tiered_kv_rows_")}
    assert values["vllm:tiered_kv_rows_loaded"] == ROWS
    assert values["vllm:tiered_kv_rows_stored"] == 2
    assert values["vllm:tiered_kv_rows_serving"] == 1


def test_a_killed_server_costs_misses_and_hits_come_back(tiny_model: Path, plain: list[Answer], root: Path) -> None:
    """Host memory has rows for two prompts, so each comes from below it."""
    with offloading_engine(tiny_model, on_disk(root), rows=2 * ROWS + 2) as llm:
        (warm,) = ask(llm, PROMPTS[0])
        kill_server(root)
        missed = [answer for prompt in PROMPTS[1:] for answer in ask(llm, prompt)]
        wait_for(lambda: not step(llm) and tier_of(llm)._jobs.is_ready, "a new session")
        (again,) = ask(llm, PROMPTS[0])
    assert (warm.cached_tokens, again.cached_tokens) == (HIT, HIT)
    assert missed[0].cached_tokens == 0
    for one, theirs in zip([warm, *missed, again], [*plain, plain[0]], strict=True):
        assert_same(one, theirs)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "deleted"])
def test_what_is_damaged_is_computed_and_stored_again(
    tiny_model: Path, plain: list[Answer], root: Path, damage: str
) -> None:
    for path in blob_files(root):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        if damage == "deleted":
            path.unlink()
        else:
            path.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    with offloading_engine(tiny_model, on_disk(root)) as llm:
        answers = ask(llm, *PROMPTS)
        wait_written(root)
    wait_ended(root)
    with offloading_engine(tiny_model, on_disk(root)) as llm:
        mended = ask(llm, *PROMPTS)
    assert [one.cached_tokens for one in answers] == [0] * len(PROMPTS)
    assert [one.cached_tokens for one in mended] == [HIT] * len(PROMPTS)
    for one, again, theirs in zip(answers, mended, plain, strict=True):
        assert_same(one, theirs)
        assert_same(again, theirs)


@pytest.mark.parametrize("rows", [4, 6, 12])
def test_requests_that_want_more_rows_than_there_are_end_and_are_right(
    tiny_model: Path, plain: list[Answer], root: Path, rows: int
) -> None:
    """Each hit takes a row from another; without a limit the engine promotes for ever."""
    with offloading_engine(tiny_model, on_disk(root), rows=rows) as llm:
        answers = ask(llm, *PROMPTS, *PROMPTS)
    assert sum(one.cached_tokens for one in answers) >= ROW_TOKENS
    for one, theirs in zip(answers, plain * 2, strict=True):
        assert_same(one, theirs)


def test_a_prompt_computed_in_steps_is_stored_whole_and_comes_through_a_small_arena(
    tiny_model: Path, plain: list[Answer], tmp_path: Path
) -> None:
    """Each step stores a part whose chunks follow those of the step before; then a lookup may lease three slots."""
    root = tmp_path / "cache"
    for hit, slots in ((0, 128), (HIT, 8)):
        tier = on_disk(root) | {"host_bytes": slots * (ROW_BYTES + 4096)}
        with offloading_engine(tiny_model, tier, options={"max_num_batched_tokens": ROW_TOKENS}) as llm:
            answers = ask(llm, *PROMPTS)
            wait_written(root)
        wait_ended(root)
        assert [one.cached_tokens for one in answers] == [hit] * len(PROMPTS)
        for one, theirs in zip(answers, plain, strict=True):
            assert_same(one, theirs)
        assert chunks(root) == ROWS * len(PROMPTS)


def test_after_a_reset_nothing_older_is_found(tiny_model: Path, plain: list[Answer], root: Path) -> None:
    with offloading_engine(tiny_model, on_disk(root)) as llm:
        (before,) = ask(llm, PROMPTS[0])
        assert llm.reset_prefix_cache(reset_connector=True)
        wait_for(lambda: not step(llm) and tier_of(llm)._jobs.is_ready, "a session of its own")
        asked = [ask(llm, prompt)[0] for prompt in (PROMPTS[1], PROMPTS[1])]
        assert figures(root)["hierarchy"]["sessions"] == 1
        wait_written(root)
    with offloading_engine(tiny_model, on_disk(root)) as llm:
        (later,) = ask(llm, PROMPTS[1])
    # The next engine's KV is again under an epoch that everybody shares, and that one is new.
    assert [one.cached_tokens for one in (before, *asked, later)] == [HIT, 0, HIT, 0]
    for one in (*asked, later):
        assert_same(one, plain[1])


def test_rows_computed_without_the_draft_are_not_stored(tiny_model: Path, plain: list[Answer], tmp_path: Path) -> None:
    """The draft takes 512 tokens: vLLM runs it neither for a longer prompt nor for what is computed beside one."""
    draft = {"method": "draft_model", "model": str(tiny_model), "num_speculative_tokens": 2, "max_model_len": 512}
    long, short, beside = PROMPTS[0], PROMPTS[1][: 3 * ROW_TOKENS + 5], PROMPTS[2][: 2 * ROW_TOKENS + 5]
    options = {"speculative_config": draft, "disable_log_stats": False}
    with offloading_engine(tiny_model, on_disk(tmp_path), options=options, row_bytes=2 * ROW_BYTES) as llm:
        (alone,) = ask(llm, short)
        answer, _ = ask(llm, long, beside)
        values = {(one.name, one.labels.get("reason")): getattr(one, "value", None) for one in llm.get_metrics()}
        wait_written(tmp_path)
        assert chunks(tmp_path) == values["vllm:tiered_kv_rows_stored", None] == 3
        assert values["vllm:tiered_kv_rows_dropped", "undrafted"] == ROWS + 2
    wait_ended(tmp_path)
    with offloading_engine(tiny_model, on_disk(tmp_path), options=options, row_bytes=2 * ROW_BYTES) as llm:
        found = [ask(llm, prompt)[0] for prompt in (short, beside)]
    assert [one.cached_tokens for one in found] == [3 * ROW_TOKENS, 0]
    assert_same(answer, plain[0])
    assert_same(found[0], alone)


@pytest.mark.timeout(600)  # three processes, beside other engines
def test_an_engine_of_several_processes_is_joined_by_its_workers_word(
    tiny_model: Path, plain: list[Answer], root: Path, tmp_path: Path
) -> None:
    """vLLM's handshake carries it from the worker's process to the scheduler's."""
    engine = EngineProcess(tiny_model, extra_config(on_disk(root)), tmp_path / "engine.log")
    try:
        answers = engine.ask(*PROMPTS, max_tokens=MAX_TOKENS)
    finally:
        engine.close()
    assert [one["cached_tokens"] for one in answers] == [HIT] * len(PROMPTS)
    for one, theirs in zip(answers, plain, strict=True):
        assert tuple(one["tokens"]) == theirs.tokens


def test_a_server_that_an_engine_starts_has_little_host_memory_unless_it_is_named(
    tiny_model: Path, plain: list[Answer], tmp_path: Path
) -> None:
    root, usual = tmp_path / "cache", Config.from_mapping(on_disk(tmp_path)).resolved_host_bytes()
    for hit in (0, HIT):
        with offloading_engine(tiny_model, on_disk(root) | {"host_bytes": None}) as llm:
            (answer,) = ask(llm, PROMPTS[0])
            here = figures(root)["hierarchy"]["host_capacity_bytes"]
            assert here == tier_of(llm)._jobs.client.host_bytes == min(usual, 1 << 30)
            wait_written(root)
        wait_ended(root)
        assert answer.cached_tokens == hit
        assert_same(answer, plain[0])


def test_a_wrong_setting_ends_the_start_with_its_name(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="unknown setting 'host_byte'; did you mean host_bytes"):
        make_llm(tiny_model, **offloading(on_disk(tmp_path) | {"host_byte": 1}))


def test_a_refused_start_leaves_no_host_memory_taken(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM says nothing to its connectors where a start fails. Its file in shared memory would outlive the process."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr("vllm.distributed.kv_transfer.ensure_kv_transfer_shutdown", lambda: None)  # as the kit does
    settings = offloading(on_disk(tmp_path))
    engine_id = settings["kv_transfer_config"].engine_id
    with pytest.raises(Exception, match="block hashes differ between processes"):
        make_llm(tiny_model, **settings, prefix_caching_hash_algo="xxhash")
    assert not list(Path("/dev/shm").glob(f"vllm_offload_{engine_id}*"))
