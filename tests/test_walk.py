"""docs/walk.md: every stop of the walk exists, and the walk answers its own questions."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STOP = re.compile(r"`([\w/]+\.py):([\w.]+)`")
FILE = re.compile(r"`([\w/]+\.py)`")

ANSWERS = {
    1: {"vllm/requests.py:RequestState.update_keys", "keys/prefix_keys.py:PrefixKeys.extend"}
    | {"vllm/requests.py:final_tokens"},
    2: {"vllm/scheduler.py:SchedulerSide.matched_tokens"},
    3: {"vllm/save_queue.py:SaveQueue.queue", "vllm/save_queue.py:SaveQueue._unpin"},
    4: {"vllm/worker.py:WorkerSide._copy", "chunks/transfer.py:RankKV.gather", "chunks/transfer.py:RankKV.scatter"},
    5: {"chunks/header.py:BlobFormat.seal", "chunks/header.py:BlobFormat.verify"},
    6: {"tiering/index.py:Index.held_prefix", "engine/performer.py:Performer._read"},
    7: {"tiering/secondary_tier.py:SecondaryTier.start_or_wait"},
    8: {"engine/performer.py:Performer._copy"},
    9: {"engine/performer.py:Performer.perform", "tiering/lookups.py:Promotions.ended"},
    10: {"tiering/host_tier.py:HostTier.take_for_load", "tiering/lookups.py:Promotions._take_from_stores"},
}
"""The stops that answer each question."""


CALLS = (
    ("vllm/request_lookups.py:RequestLookups.keys", "update_keys"),
    ("vllm/request_lookups.py:RequestLookups._sent", "lookup"),
    ("vllm/request_lookups.py:RequestLookups._sent", "keys"),
    ("vllm/scheduler.py:SchedulerSide.plan_step", "start_jobs"),
    ("vllm/save_queue.py:SaveQueue.queue", "ChunkRecord"),
    ("vllm/save_queue.py:SaveQueue.finished", "_unpin"),
    ("server/server.py:Server._turn", "step"),
    ("server/sessions.py:Sessions.commit", "commit"),
    ("tiering/tiering.py:Tiering.commit", "enqueue_write"),
    ("tiering/write_through.py:WriteThrough.sealed", "start_or_wait"),
    ("tiering/secondary_tier.py:SecondaryTier.written", "enqueue_write"),
    ("engine/performer.py:Performer._perform", "_copy"),
    ("engine/performer.py:Performer._copy", "put"),
    ("engine/performer.py:Performer._read", "get_into"),
    ("tiering/tiering.py:Tiering.lookup", "held_prefix"),
    ("tiering/lookups.py:Lookups.extend", "_lease"),
    ("tiering/lookups.py:Promotions.start", "take_for_load"),
    ("tiering/lookups.py:Promotions._take_slot", "_take_from_stores"),
    ("tiering/lookups.py:Promotions.ended", "keep_promoted"),
    ("vllm/scheduler.py:SchedulerSide._matched_tokens", "_offer"),
    ("vllm/scheduler.py:SchedulerSide._matched_tokens", "unanswered"),
    ("vllm/scheduler.py:SchedulerSide.allocated", "claim"),
    ("vllm/scheduler.py:SchedulerSide.loads_finished", "release"),
)
"""Steps of the walk: who calls what, by the names in its source."""


@cache
def walk() -> str:
    return (ROOT / "docs" / "walk.md").read_text()


def stops() -> list[tuple[str, str]]:
    return list(dict.fromkeys(STOP.findall(walk())))


def names(path: Path) -> set[str]:
    """Functions and classes of a module, with what classes define and inherit within it."""
    found: set[str] = set()
    classes: dict[str, set[str]] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            own = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            classes[node.name] = own
            found |= {node.name, *(f"{node.name}.{name}" for name in own)}
    return found


@pytest.mark.parametrize("stop", stops(), ids=":".join)
def test_every_stop_of_the_walk_exists(stop: tuple[str, str]) -> None:
    file, name = stop
    assert name in names(ROOT / "tiered_kv" / file)


@pytest.mark.parametrize(("caller", "callee"), CALLS, ids=lambda name: name.rpartition(":")[2])
def test_a_stop_calls_the_next(caller: str, callee: str) -> None:
    file, name = caller.split(":")
    tree: ast.AST = ast.parse((ROOT / "tiered_kv" / file).read_text())
    for part in name.split("."):
        tree = next(
            n for n in ast.iter_child_nodes(tree) if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part
        )
    called = {
        c.func.attr if isinstance(c.func, ast.Attribute) else getattr(c.func, "id", "")
        for c in ast.walk(tree)
        if isinstance(c, ast.Call)
    }
    assert callee in called


def test_every_file_that_the_walk_names_exists() -> None:
    files = set(FILE.findall(walk())) - {"tests/test_walk.py"}
    assert files
    assert not [file for file in files if not (ROOT / "tiered_kv" / file).is_file()]


def test_the_walk_goes_all_the_way() -> None:
    numbered = [int(number) for number in re.findall(r"^(\d+)\. ", walk().partition("## Ten questions")[0], re.M)]
    assert numbered == list(range(1, 31)) and len(stops()) >= len(numbered)
    folders = {file.partition("/")[0] for file, _ in stops()}
    assert {"vllm", "keys", "server", "tiering", "engine", "chunks", "tiers"} <= folders


def test_the_walk_answers_its_ten_questions() -> None:
    questions = walk().partition("## Ten questions")[2]
    assert [int(number) for number in re.findall(r"^(\d+)\. ", questions, re.M)] == list(ANSWERS)
    assert not STOP.search(questions), "the reader finds the answers on the walk"
    walked = {":".join(stop) for stop in stops()}
    assert not {number: answers - walked for number, answers in ANSWERS.items() if answers - walked}
