"""Families of models with recurrent layers, each through everything that may happen to a state (``state_run.py``).

What is asked of every family, in loads into zeroed blocks: tokens equal and log-probabilities equal to the last digit
where a prompt runs alone; hits of vLLM's own length from host memory, after a restart from disk, and from a bucket; at
forks; after aborted and failed loads, a killed server, preemption; with a part lost between lookup and load.

Minutes for each family, so all of it runs under ``make prove`` or with ``TIERED_KV_MODELS=1``; the ordinary run has
``test_recurrent_state.py``. vLLM 0.32's CPU build computes LFM2 depending on the batch, so of what runs together only
its hits are judged.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit.counts import only_in_proofs
from tests.kit.module_process import REPOSITORY, module_environment
from tests.kit.s3 import S3
from tests.kit.server.object_nodes import s3_place
from tests.kit.vllm.cached_engine import LOGPROB_TOLERANCE
from tests.kit.vllm.harness import Answer
from tests.kit.vllm.state_run import FAILING, MAX_TOKENS, PREEMPTED, StateRun, run_family
from tests.kit.vllm.tiny_models import build_kind
from tests.kit.vllm.wrong_loads import WRONG_WAYS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), only_in_proofs]

ONE_BLOCK = {"max_num_batched_tokens": 256}
"""Of Mamba 2 the CPU build computes one block a step only."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next, steps of half a block": ("qwen3_next", {"max_num_batched_tokens": 128}),
    "qwen3_next, steps of a block": ("qwen3_next", {"max_num_batched_tokens": 256}),
    "qwen3_next": ("qwen3_next", {}),
    "granite4": ("granite4", ONE_BLOCK),
    "falcon_h1": ("falcon_h1", ONE_BLOCK),
    "nemotron_h": ("nemotron_h", ONE_BLOCK),
    "lfm2": ("lfm2", {}),
}
"""Kind and options."""

QWEN3_5 = "qwen3_5"
"""vLLM imports torchvision for it, and a stub of that is not to be met by other tests: it has a process of its own."""

TORCHVISION = '''"""Nothing but names: whatever is imported from here exists, and is a class of nothing."""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0.0"
MODES = ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")


class Names(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), dict.fromkeys(MODES, 0))


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Names(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())
'''

if os.environ.get("TIERED_KV_STATE_FAMILY") == QWEN3_5:
    FAMILIES = {QWEN3_5: (QWEN3_5, {})}


@pytest.fixture(scope="module", params=list(FAMILIES))
def run(request: pytest.FixtureRequest, repository: Path, s3: S3, tmp_path_factory: pytest.TempPathFactory) -> StateRun:
    """What the engines of a family did."""
    kind, options = FAMILIES[request.param]
    model = build_kind(repository / "build" / "models", kind)
    return run_family(model, options, tmp_path_factory.mktemp(kind), s3_place(s3, s3.new_prefix()))


def is_exact(run: StateRun) -> bool:
    """Whether vLLM itself gives one answer, whatever else runs beside it."""
    return "lfm2" not in run.model.name


def is_steady(run: StateRun) -> bool:
    """Whether vLLM gives one answer in a batch, too: where a step takes less than a block, others move its end.

    Then plain vLLM answers otherwise than to the same prompt alone: ``test_plain_vllm_answers_in_a_batch_as_alone``.
    """
    return is_exact(run) and run.options.get("max_num_batched_tokens", run.block) >= run.block


def deviation(ours: Answer, theirs: Answer) -> float:
    """The largest difference of a log-probability."""
    pairs = zip(ours.logprobs, theirs.logprobs, strict=True)
    return max(abs(a - b) for mine, their in pairs for a, b in zip(mine, their, strict=True))


def assert_right(run: StateRun, where: str, *names: str) -> None:
    """The answers of plain vLLM, to the last digit."""
    for name in names or run.answers[where]:
        ours, theirs = run.answers[where][name], run.plain[name]
        assert (where, name, ours.tokens) == (where, name, theirs.tokens)
        assert (where, name, ours.logprobs) == (where, name, theirs.logprobs)


def cached(run: StateRun, where: str, *names: str) -> dict[str, int]:
    return {name: run.answers[where][name].cached_tokens for name in names or run.answers[where]}


def hits(run: StateRun, *names: str) -> dict[str, int]:
    """vLLM's own hit of each prompt."""
    return {name: run.hit_tokens(name) for name in names}


def first_tokens(answer: Answer, count: int) -> Answer:
    return replace(answer, tokens=answer.tokens[:count], logprobs=answer.logprobs[:count])


def assert_near(ours: Answer, theirs: Answer) -> None:
    """The same tokens; in a batch of another shape the last bits of log-probabilities may differ."""
    assert ours.tokens == theirs.tokens
    assert deviation(ours, theirs) < LOGPROB_TOLERANCE


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_hits_are_as_long_as_vllms_own_and_answers_the_same(run: StateRun, where: str) -> None:
    names = run.names("length ")
    assert {name: run.own[name].cached_tokens for name in names} == hits(run, *names), "vLLM's own hits"
    assert set(cached(run, "cold", *names).values()) == {0}
    assert cached(run, where, *names) == hits(run, *names)
    assert_right(run, "cold", *names)
    assert_right(run, where, *names)


def test_another_machine_goes_on_from_the_bucket(run: StateRun) -> None:
    names = list(run.answers["bucket, elsewhere"])
    assert cached(run, "bucket, elsewhere") == hits(run, *names)
    assert run.facts["searches"], "nothing was looked for in the bucket"
    assert_right(run, "bucket, elsewhere", *names[:-1])


def test_a_follow_up_goes_on_from_the_turn_before(run: StateRun) -> None:
    assert cached(run, "cold", "stem", "long", "turn") == {
        "stem": 0,
        "long": run.hit_tokens("stem"),
        "turn": run.hit_tokens("long"),
    }
    assert cached(run, "disk", "turn") == hits(run, "turn")
    assert_right(run, "cold", "stem")
    if is_exact(run):
        assert_right(run, "cold", "long", "turn")
        assert_right(run, "disk", "turn")


def test_a_third_prompt_hits_at_the_fork_of_two(run: StateRun) -> None:
    """vLLM makes a state at the fork when the second one comes by."""
    names = run.names("fork ")
    forks = {name: int(name.split()[1]) // run.block * run.block for name in names[2::3]}
    assert cached(run, "memory", *names) == hits(run, *names) | forks
    if is_exact(run):
        assert_right(run, "memory", *names)


def test_a_third_prompt_hits_at_a_fork_that_vllm_has_forgotten(run: StateRun) -> None:
    """The second one finds it in our cache, and vLLM makes a state there for it."""
    names = run.names("lost ")
    assert cached(run, "forgotten", *names) == dict(zip(names, (0, 0, 2 * run.block), strict=True))
    if is_exact(run):
        assert_right(run, "forgotten", *names)


def test_plain_vllm_answers_in_a_batch_as_alone_where_steps_end_at_blocks(run: StateRun) -> None:
    """The control: what is not compared below differs without this package, too."""
    names = run.names("many ")
    alone = run.answers["alone, no cache"]
    worst = max(deviation(run.plain[name], alone[name]) for name in names)
    print(f"{run.model.name} {run.options}: plain vLLM in a batch and alone differ by up to {worst:.3f}")
    if is_exact(run):
        assert (worst < LOGPROB_TOLERANCE) == is_steady(run)


def test_sixteen_at_once_also_with_too_few_blocks(run: StateRun) -> None:
    """With too few, requests are preempted amid their answers, and vLLM answers otherwise then: see below."""
    names = run.names("many ")
    assert cached(run, "together") == hits(run, *names)
    for where in ("cold together", "together", "few blocks"):
        assert {answer.finish_reason for answer in run.answers[where].values()} == {"length"}
        for name in names if is_steady(run) else ():
            ours, theirs = run.answers[where][name], run.plain[name]
            count = 1 if where == "few blocks" else MAX_TOKENS
            assert_near(first_tokens(ours, count), first_tokens(theirs, count))


def test_preempted_requests_load_again_and_answer_as_preempted_ones_without_the_cache(run: StateRun) -> None:
    """Not as those that nothing happened to: vLLM computes the tokens generated so far again, together."""
    ours, theirs = run.answers["preempted"], run.answers["preempted, no cache"]
    assert len(ours) == len(theirs) == PREEMPTED
    assert run.facts["loads with preemption"] > sum(run.hit_tokens(name) > 0 for name in ours)
    for name in ours if is_steady(run) else ():
        assert (name, ours[name].tokens, ours[name].logprobs) == (name, theirs[name].tokens, theirs[name].logprobs)


@pytest.mark.parametrize("which", FAILING)
def test_a_load_that_fails_is_computed_and_the_next_one_loads(run: StateRun, which: str) -> None:
    assert run.facts[f"failed {which}"], "no copy failed"
    assert cached(run, f"failed {which}") == {"long": 0}
    assert cached(run, f"after failed {which}") == hits(run, "long")
    for where in (f"failed {which}", f"after failed {which}"):
        if is_exact(run):
            assert_right(run, where)
    assert run.facts["counters"]["loads_failed"] == len(FAILING)


def test_an_abort_during_a_load_leaves_nothing(run: StateRun) -> None:
    assert run.facts["aborted"], "no load ran"
    assert cached(run, "after the abort") == hits(run, "long")
    assert run.facts["left"] == run.facts["left with few blocks"] == (0, 0, False)
    if is_exact(run):
        assert_right(run, "after the abort")


def test_a_killed_server_costs_misses_and_hits_come_back(run: StateRun) -> None:
    assert cached(run, "server killed") == {"long": 0}
    assert cached(run, "next server") == hits(run, "long")
    if is_exact(run):
        assert_right(run, "server killed")
        assert_right(run, "next server")


def test_what_is_lost_between_lookup_and_load_is_computed_and_the_next_one_finds_the_state_before(
    run: StateRun,
) -> None:
    """No fallback within a request: its lookup promised a state that is gone, so it computes; nothing else is known."""
    assert cached(run, "part of a state lost") == {"turn": 0}
    assert cached(run, "asked once more") == {"turn": run.hit_tokens("long")}
    name = f"length {2 * run.block + 1}"
    assert cached(run, "chunk lost") == {name: 0}
    assert cached(run, "chunk stored again") == hits(run, name)
    assert_right(run, "chunk lost")
    assert_right(run, "chunk stored again")
    if is_exact(run):
        assert_right(run, "part of a state lost")
        assert_right(run, "asked once more")


@pytest.mark.parametrize("way", WRONG_WAYS)
def test_each_wrong_way_is_noticed(run: StateRun, way: str) -> None:
    """The others could not fail if these were not seen: they change log-probabilities and nothing else."""
    wrong, right = run.answers[f"wrong: {way}"]["long"], run.answers["after what was wrong"]["long"]
    assert wrong.cached_tokens == right.cached_tokens == run.hit_tokens("long")
    assert wrong.logprobs != right.logprobs
    if is_exact(run):
        assert_right(run, "after what was wrong")


def test_qwen3_5_in_a_process_with_a_stub_of_torchvision(tmp_path: Path) -> None:
    if FAMILIES.keys() == {QWEN3_5}:
        pytest.skip("this is that process")
    stub = tmp_path / "torchvision" / "__init__.py"
    stub.parent.mkdir()
    stub.write_text(TORCHVISION)
    more = {"TIERED_KV_STATE_FAMILY": QWEN3_5, "TIERED_KV_MODELS": "1"}
    search = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        (sys.executable, "-m", "pytest", "-q", "-n0", "--timeout=1100", __file__),
        cwd=REPOSITORY,
        env=module_environment() | {"PYTHONPATH": search} | more,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout and "failed" not in done.stdout
