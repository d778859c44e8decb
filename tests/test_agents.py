"""What ``benchmarks/agents.py`` says of agents' sessions: its arithmetic by hand, its hierarchy beside limits."""

import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

from agents import OURS, RIVALS
from agents_hierarchy import BUCKET, DISK, AgentReplay, GpuPool, Sizes, Speeds
from agents_rivals import lmcache, native, optimum
from agents_trace import Turn, computed_by_unit, read

TRACE = Path(__file__).resolve().parent / "data" / "agent_sessions_small.jsonl"
AMPLE = 1 << 30
CHUNK = 256


def written(path: Path, *sessions: list[list[float]]) -> Path:
    path.write_text("".join(json.dumps({"session": "s", "requests": requests}) + "\n" for requests in sessions))
    return path


@pytest.fixture
def few(tmp_path: Path) -> list[Turn]:
    """A prompt of 1,000 tokens answered by 100; one that goes on; one that edits the first behind 10 blocks."""
    requests = [[0.0, 1000, 100, -1, 0, 15], [10.0, 1500, 50, 0, 15, 23], [90.0, 1400, 50, 0, 10, 21]]
    return read(written(tmp_path / "few.jsonl", requests), CHUNK)


def test_the_page_names_systems_that_there_are(repository: Path) -> None:
    page = (repository / "docs" / "agents.md").read_text()
    named = [shlex.split(names) for names in re.findall(r"--systems((?:\s+(?:\"[^\"]+\"|\w+))+)", page)]
    assert len(named) >= 3
    assert {name for names in named for name in names} <= {*OURS, *RIVALS}


def test_what_a_turn_shares_with_its_parent(few: list[Turn]) -> None:
    first, goes_on, edits = few
    assert (first.shared, goes_on.shared, edits.shared) == (0, 1000, 640)
    assert (goes_on.shared_answered, edits.shared_answered) == (1100, 640)
    assert (first.gap_s, goes_on.gap_s, edits.gap_s) == (None, 10, 90)
    assert [len(turn.chunks) for turn in few] == [3, 5, 5]
    assert goes_on.chunks[:4] == first.answered and first.answered[:3] == first.chunks
    assert edits.chunks[:2] == first.chunks[:2]
    assert set(edits.chunks[2:]).isdisjoint(first.chunks + goes_on.chunks)


def test_of_dropped_answers_the_prompt_is_shared_and_nothing_behind_it(tmp_path: Path) -> None:
    tokens = range(600, 6600, 300)
    requests = [[60.0 * n, tokens[n], 290, n - 1, tokens[n - 1] // 64 if n else 0, tokens[n] // 64] for n in range(20)]
    path = written(tmp_path / "chat.jsonl", requests)
    for share, dropped in ((0.0, 0), (0.5, 10), (1.0, 19)):
        turns = read(path, CHUNK, dropped=share)
        assert sum(turn.shared_answered == turn.shared for turn in turns[1:]) == dropped
        for before, turn in itertools.pairwise(turns):
            assert (turn.chunks[: len(before.answered)] == before.answered) == (turn.shared_answered > turn.shared)
            assert turn.chunks[: len(before.chunks)] == before.chunks


def test_reasoning_takes_room_behind_each_prompt_and_never_comes_back(tmp_path: Path) -> None:
    path = written(tmp_path / "one.jsonl", [[0, 512, 100, -1, 0, 8], [60, 1024, 100, 0, 8, 16]])
    first, second = read(path, CHUNK, reasoning=1000)
    assert (len(first.chunks), first.answered_tokens, len(first.answered)) == (2, 512 + 1099, 6)
    assert second.shared_answered == second.shared == 512
    assert set(first.answered) & set(second.answered) == set(first.chunks)


def test_what_units_and_answers_leave_to_compute(few: list[Turn]) -> None:
    left = {(row["kept"], row["unit_tokens"]): row["computed"] for row in computed_by_unit(few, (16, 256))}
    assert left == {
        ("prompts", 16): 1000 + (1500 - 992) + (1400 - 640),
        ("prompts", 256): 1000 + (1500 - 768) + (1400 - 512),
        ("prompts and answers", 16): 1000 + (1500 - 1088) + (1400 - 640),
        ("prompts and answers", 256): 1000 + (1500 - 1024) + (1400 - 512),
    }


def test_the_last_token_of_a_prompt_is_computed(tmp_path: Path) -> None:
    again = read(written(tmp_path / "again.jsonl", [[0, 512, 1, -1, 0, 8], [60, 512, 1, 0, 8, 8]]), CHUNK)[1]
    assert again.found_ever(256, with_answers=False) == 256
    replay = AgentReplay(Sizes(0, AMPLE, AMPLE), CHUNK)
    replay.run(read(tmp_path / "again.jsonl", CHUNK))
    assert [one.found for one in replay.served] == [0, 256]


def test_sessions_start_at_a_steady_rate_and_share_nothing(tmp_path: Path) -> None:
    session = [[0.0, 600, 1, -1, 0, 9]]
    path = written(tmp_path / "many.jsonl", *[session] * 4)
    turns = read(path, CHUNK, every=2, sessions_per_hour=60)
    assert [turn.time_s for turn in turns] == [0, 60]
    assert set(turns[0].chunks).isdisjoint(turns[1].chunks)


def test_the_gpu_finds_answers_while_the_parent_is_there(few: list[Turn]) -> None:
    gpu = GpuPool(AMPLE, CHUNK)
    assert gpu.found(few[1]) == 0
    gpu.use(few[0])
    assert gpu.found(few[1]) == 1088
    assert gpu.found(few[2]) == 640


@pytest.fixture(scope="module")
def turns() -> list[Turn]:
    return [turn for turn in read(TRACE, CHUNK, every=3) if len(turn.chunks) < 400]


def found(turns: list[Turn], host: int, disk: int | None, **more: str) -> int:
    replay = AgentReplay(Sizes(0, host, disk), CHUNK, **more)
    replay.run(turns)
    replay.tiering.check_integrity()
    assert sorted(one.turn.time_s for one in replay.served) == [turn.time_s for turn in turns]
    return sum(one.found for one in replay.served)


def test_ample_tiers_find_what_an_infinite_cache_finds(turns: list[Turn]) -> None:
    ever = sum(turn.found_ever(CHUNK, with_answers=True) for turn in turns)
    ample = found(turns, AMPLE, None)
    assert 0.98 * ever < ample <= ever  # a turn that arrives while its parent is computed finds less
    assert found(turns, 1 << 18, 1 << 18) < ample


@pytest.mark.parametrize(("answers", "second", "more"), [("asked", 1024, 0), ("at once", 1024, 1), ("none", 768, 0)])
def test_media_take_their_time_and_are_counted(few: list[Turn], answers: str, second: int, more: int) -> None:
    """One chunk of the first answer comes back; one of the second one's never does."""
    speeds = Speeds(prefill_tokens_per_s=1000, load_bytes_per_s=float("inf"))
    replay = AgentReplay(Sizes(0, AMPLE, None), CHUNK, answers=answers, speeds=speeds)
    replay.run(few)
    assert [one.found for one in replay.served] == [0, second, 512]
    assert [one.first_token_s for one in replay.served] == pytest.approx([1.0, (1500 - second) / 1000, 0.888])
    stored = len({chunk for turn in few for chunk in turn.chunks}) + more
    assert replay.operations == {(DISK, "Write"): stored, (BUCKET, "Copy"): stored}


def test_no_other_cache_finds_more_than_the_optimum(turns: list[Turn]) -> None:
    sizes = Sizes(0, 1 << 16, 1 << 17)
    best = sum(optimum(turns, sizes, CHUNK).tokens)
    assert 0 < sum(lmcache(turns, sizes, CHUNK).tokens) < best


@pytest.mark.vllm
def test_vllms_own_manager_finds_all_that_fits_and_less_than_the_optimum(turns: list[Turn]) -> None:
    ample, small = Sizes(0, 1 << 24, 1 << 24), Sizes(0, 1 << 16, 1 << 17)
    assert native(turns, ample, CHUNK, "lru").tokens == lmcache(turns, ample, CHUNK).tokens
    assert 0 < sum(native(turns, small, CHUNK, "arc").tokens) < sum(optimum(turns, small, CHUNK).tokens)


def test_the_section_takes_any_file_and_writes_its_json(few: list[Turn], tmp_path: Path, repository: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--trace", str(tmp_path / "few.jsonl"), "--json", str(out), "--sizes", "10k,20k,50k,bucket"]
    command = [sys.executable, "benchmarks/agents.py", *arguments]
    done = subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True)
    result = json.loads(out.read_text())
    assert result["turns"] == len(few)
    assert [row["system"] for row in result["systems"]] == list(OURS)
    assert result["systems"][0]["of_infinite_percent"] == 100
    assert "10k,20k,50k,bucket" in done.stdout


def test_a_missing_trace_and_wrong_sizes_are_named(repository: Path, tmp_path: Path) -> None:
    for arguments, told in (
        (["--trace", str(tmp_path / "none.jsonl")], "there is no trace at"),
        (["--trace", str(TRACE), "--sizes", "1M,2M"], "GPU,HOST,DISK"),
        (["--trace", str(TRACE), "--chunk-tokens", "100"], "multiple of 64"),
    ):
        command = [sys.executable, "benchmarks/agents.py", *arguments]
        done = subprocess.run(command, cwd=repository, check=False, capture_output=True, text=True)
        assert done.returncode != 0
        assert told in done.stderr


def test_a_turn_finds_its_parents_tail_and_leaves_its_own(tmp_path: Path) -> None:
    """1,500 tokens are five chunks and 220 tokens; of 1,800 eight are left, and of what edits them none is shared."""
    requests = [[0.0, 1500, 100, -1, 0, 23], [10.0, 1800, 50, 0, 23, 28], [20.0, 1790, 50, 1, 21, 27]]
    path = written(tmp_path / "tails.jsonl", requests)
    found = []
    for tail_tokens in (0, 32):
        replay = AgentReplay(Sizes(0, AMPLE, AMPLE), CHUNK, answers="none", tail_tokens=tail_tokens, tails_of_all=True)
        replay.run(read(path, CHUNK))
        found.append([one.found for one in replay.served])
        assert (replay.tails_found, replay.tails_most) == ((1, 1) if tail_tokens else (0, 0))
    assert found == [[0, 1280, 1280], [0, 1472, 1280]]
    assert replay.tiering.usage()["host_tails"] == 1, "of the last turn"


def test_a_tail_that_host_memory_lost_comes_from_disk(tmp_path: Path) -> None:
    """Another session fills host memory while the first one pauses."""
    requests = [[0.0, 1500, 100, -1, 0, 23], [1000.0, 1800, 50, 0, 23, 28]]
    other = [[float(10 + 10 * n), 4000, 10, -1, 0, 62] for n in range(6)]
    path = written(tmp_path / "tails.jsonl", requests, *([one] for one in other))
    found = {}
    for on_disk in (True, False):
        replay = AgentReplay(
            Sizes(0, 30 * CHUNK, AMPLE), CHUNK, answers="none", tail_tokens=32, tails_of_all=True, tails_on_disk=on_disk
        )
        replay.run(read(path, CHUNK, sessions_per_hour=1e6))
        found[on_disk] = [one.found for one in replay.served if one.turn.gap_s is not None]
        assert (replay.tails_written > 0, replay.tails_read) == (on_disk, int(on_disk))
    assert found == {True: [1472], False: [1280]}


def test_by_default_a_session_leaves_a_tail_from_its_second_turn_on(tmp_path: Path) -> None:
    """1,849 tokens with the answer are seven chunks and 57; the first turn's end nobody expects again."""
    requests = [[0.0, 1500, 100, -1, 0, 23], [10.0, 1800, 50, 0, 23, 28], [20.0, 2000, 50, 1, 28, 31]]
    path = written(tmp_path / "tails.jsonl", requests)
    for tails_of_all, found in ((False, [0, 1536, 1840]), (True, [0, 1584, 1840])):
        replay = AgentReplay(Sizes(0, AMPLE, AMPLE), CHUNK, tail_tokens=16, tails_of_all=tails_of_all)
        replay.run(read(path, CHUNK))
        assert [one.found for one in replay.served] == found
        assert replay.tails_left == 1 + tails_of_all
