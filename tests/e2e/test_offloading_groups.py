"""Models of several groups of layers below vLLM's own offloading: windows, recurrent state, a draft beside windows.

For each kind an engine without the cache answers first. Then one with our tier computes and stores, out of host memory
that was full of another pattern before; one loads from disk after a restart, with the same rows byte for byte; and one
has less host memory than all prompts want. The hit that is wanted is the one of vLLM's own host memory.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.kit.counts import count
from tests.kit.s3 import S3
from tests.kit.server.object_nodes import s3_place, wait_uploaded
from tests.kit.server.probe import figures, wait_ended, wait_written
from tests.kit.storage.disk_probe import blob_files
from tests.kit.vllm.cached_engine import assert_same
from tests.kit.vllm.harness import Answer, generate, random_prompt, running
from tests.kit.vllm.offloading_engine import MAX_TOKENS, ask, manager_of, offloading_engine, on_disk, tier_of
from tests.kit.vllm.tiny_drafts import eagle3_head
from tests.kit.vllm.tiny_models import build_kind

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PATTERN = 0xA7
"""What vLLM's rows are full of before anything is stored: other prompts' KV."""

PATTERN_RUN = bytes([PATTERN]) * 48

ONE_BLOCK = {"max_num_batched_tokens": 160}
"""Of Mamba 2 the CPU build computes one block a step only."""

LENGTHS = (500, 700, 900)
SHARED = 480
"""Prompts that part there: a multiple of the blocks of all kinds."""

PROMPTS = [random_prompt(9_000 + length, length) for length in LENGTHS]
FORKS = [[*random_prompt(9_100, SHARED), *random_prompt(9_200 + number, 200)] for number in range(2)]


def gpt_oss_with_a_draft(models: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    model = build_kind(models, "gpt_oss")
    head = eagle3_head(folder / "eagle3", model)
    return model, {"speculative_config": {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}}


KINDS: dict[str, dict[str, Any]] = {
    "gemma3": {},
    "gemma3_wide": {},
    "mistral": {},
    "lfm2": {},
    "qwen3_next": {},
    "granite4": ONE_BLOCK,
    "nemotron_h": ONE_BLOCK,
    "gpt_oss and eagle3": {},
}
"""vLLM's options."""

TRIED = list(KINDS) if count("MODELS", 0) else ["gemma3", "granite4", "gpt_oss and eagle3"]


@dataclass
class Run:
    """What the engines of one kind did: answers by engine, rows by vLLM's key."""

    model: Path
    options: dict[str, Any]
    root: Path
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    rows: dict[str, dict[bytes, bytes]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def engine(self, root: Path, rows: int = 400, place: dict[str, Any] | None = None, **more: Any) -> Any:
        return offloading_engine(
            self.model, place or on_disk(root), rows, self.options, row_bytes=82 << 10, block_size=None, **more
        )


def rows_of(llm: Any) -> dict[bytes, bytes]:
    """By vLLM's key, what of its row is the group's."""
    manager, tier = manager_of(llm), tier_of(llm)
    spans = {one.number: one.spans or ((0, tier.block_size_bytes),) for one in tier._groups}
    found = {}
    for key, chunk in manager.primary_tier._policy.chunks.items():
        row = tier._rows[chunk.chunk_id]
        found[bytes(key)] = b"".join(
            row[start : start + length].tobytes() for start, length in spans[int.from_bytes(key[-4:], "big")]
        )
    return found


@pytest.fixture(scope="module", params=TRIED)
def run(request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    models, folder = repository / "build" / "models", tmp_path_factory.mktemp("groups")
    if request.param == "gpt_oss and eagle3":
        model, options = gpt_oss_with_a_draft(models, folder)
    else:
        model, options = build_kind(models, request.param), KINDS[request.param]
    run = Run(model, options, folder / "cache")
    with running(model, **options) as llm:
        run.answers["plain"] = [generate(llm, [one], max_tokens=MAX_TOKENS)[0] for one in [*PROMPTS, *FORKS]]
    with run.engine(run.root) as llm:
        tier = tier_of(llm)
        tier._rows[:] = PATTERN
        run.facts["groups"] = tier._groups
        run.facts["row_bytes"] = tier.block_size_bytes
        run.answers["cold"] = [ask(llm, one)[0] for one in [*PROMPTS, FORKS[0]]]
        run.rows["computed"] = rows_of(llm)
        run.answers["vLLM's rows"] = [ask(llm, one)[0] for one in [*PROMPTS, FORKS[0]]]
        wait_written(run.root)
    wait_ended(run.root)
    return run


def test_a_cold_engine_answers_as_one_without_the_cache(run: Run) -> None:
    for cold, plain in zip(run.answers["cold"], run.answers["plain"], strict=False):
        assert_same(cold, plain)
        assert cold.cached_tokens == 0


def test_a_restart_finds_on_disk_what_vllms_own_rows_had(run: Run, tmp_path: Path) -> None:
    """Also for a prompt that parts from a stored one, where states exist at few places."""
    root = shutil.copytree(run.root, tmp_path / "cache")
    with run.engine(root) as llm:
        tier_of(llm)._rows[:] = PATTERN
        loaded = [ask(llm, one)[0] for one in [*PROMPTS, *FORKS]]
        rows = rows_of(llm)
    own = run.answers["vLLM's rows"]
    assert [one.cached_tokens for one in loaded[:-1]] == [one.cached_tokens for one in own]
    assert all(one.cached_tokens for one in loaded[: len(PROMPTS)])
    for one, plain in zip(loaded, run.answers["plain"], strict=True):
        assert_same(one, plain)
    common = rows.keys() & run.rows["computed"].keys()
    assert len(common) >= sum(one.cached_tokens for one in own[: len(PROMPTS)]) // 160
    assert all(rows[key] == run.rows["computed"][key] for key in common)


def test_nothing_else_that_lay_in_the_rows_was_stored(run: Run) -> None:
    groups = run.facts["groups"]
    if run.model.name in ("granite4", "gpt_oss"):  # of gemma3 both groups take the whole row
        assert any(one.stored_bytes < run.facts["row_bytes"] for one in groups)
    files = blob_files(run.root)
    assert files
    assert not [path.name for path in files if PATTERN_RUN in path.read_bytes()]


@pytest.mark.parametrize("rows", [12, 40])
def test_requests_that_want_more_rows_than_there_are_end_and_are_right(run: Run, tmp_path: Path, rows: int) -> None:
    root = shutil.copytree(run.root, tmp_path / "cache")
    with run.engine(root, rows) as llm:
        answers = ask(llm, *PROMPTS, *PROMPTS)
        assert tier_of(llm)._hits == 0
    for one, plain in zip(answers, run.answers["plain"][: len(PROMPTS)] * 2, strict=True):
        assert_same(one, plain)


def test_another_machine_finds_them_in_the_bucket(run: Run, s3: S3, tmp_path: Path) -> None:
    place = s3_place(s3, s3.new_prefix())
    uri = {"storage_uri": place.uri, "storage_options": place.options}
    for machine in ("first", "second"):
        disk = tmp_path / machine
        with run.engine(disk, place=uri | {"disk_path": str(disk)}) as llm:
            answers = [ask(llm, one)[0] for one in PROMPTS]
            wait_uploaded(disk)
    own = run.answers["vLLM's rows"][: len(PROMPTS)]
    assert [one.cached_tokens for one in answers] == [one.cached_tokens for one in own]
    for one, plain in zip(answers, run.answers["plain"], strict=False):
        assert_same(one, plain)


def test_where_no_state_or_window_is_held_nothing_is_promoted(run: Run, tmp_path: Path) -> None:
    """A prompt that goes on differently before the end of what is stored: there is no state and no window there."""
    root = shutil.copytree(run.root, tmp_path / "cache")
    parted = [*PROMPTS[2][:330], *random_prompt(9_300, 300)]
    with run.engine(root) as llm:
        (answer,) = ask(llm, parted)
        promoted = figures(root)["counters"]
    assert answer.cached_tokens == 0
    assert not promoted.get("promotions", 0), promoted
