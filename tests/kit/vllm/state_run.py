"""One family of models with recurrent layers through everything that may happen to a state, on few engines.

An engine without the cache answers first. Then engines behind it: one that computes and loads from host memory, one
after a restart, from disk and with too few blocks, and one on another machine, from a bucket. Every load is into
zeroed blocks. :class:`StateRun` keeps what they did; ``tests/e2e/test_state_models.py`` judges it.
"""

import os
import random
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from tests.kit.counts import seed
from tests.kit.server.object_nodes import Place, wait_uploaded
from tests.kit.server.probe import figures, server_pid, wait_ended, wait_for, wait_written
from tests.kit.storage.disk_probe import blob_files
from tests.kit.vllm.cached_engine import CachedEngine, cached_engine
from tests.kit.vllm.harness import (
    Answer,
    as_answer,
    drain,
    generate,
    random_prompt,
    reset_gpu_cache,
    running,
    zero_kv,
)
from tests.kit.vllm.wrong_loads import WRONG_WAYS, abort_during_load, failing_copies
from tiered_kv.chunks.header import PEEK_BYTES, peek
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.keys.state_keys import is_state, state_records

MAX_TOKENS: Final = 6
POOL_BLOCKS: Final = 40
"""Of the engine with too few: sixteen requests want some two hundred."""

PREEMPTED: Final = 4

FAILING: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "first": lambda number, _: number == 0,
    "last": lambda number, count: number == count - 1,
    "all": lambda *_: True,
}
"""Copies of a load that fail; the last one is of the state."""


@dataclass
class StateRun:
    """What the engines of one family did.

    Attributes:
        block: vLLM's unified block.
        prompts: By name.
        plain: Answers of the engine without the cache, by the prompt's name.
        own: The same, from vLLM's own prefix cache.
        answers: Behind the cache, by where from and the prompt's name.
    """

    model: Path
    options: dict[str, Any]
    block: int = 0
    prompts: dict[str, list[int]] = field(default_factory=dict)
    plain: dict[str, Answer] = field(default_factory=dict)
    own: dict[str, Answer] = field(default_factory=dict)
    answers: dict[str, dict[str, Answer]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def names(self, start: str) -> list[str]:
        return [name for name in self.prompts if name.startswith(start)]

    def note(self, where: str, name: str, answer: Answer) -> None:
        self.answers.setdefault(where, {})[name] = answer

    def ask(self, engine: CachedEngine, where: str, *names: str) -> None:
        """Ask prompts at once, of an engine that has nothing left: its own cache is empty, its blocks are zeros."""
        reset_gpu_cache(engine.llm)
        zero_kv(engine.llm)
        answers = engine.ask(*(self.prompts[name] for name in names), max_tokens=MAX_TOKENS)
        for name, answer in zip(names, answers, strict=True):
            self.note(where, name, answer)

    def hit_tokens(self, name: str) -> int:
        """What vLLM's own prefix cache gives of a prompt that is asked again."""
        return (len(self.prompts[name]) - 1) // self.block * self.block


def run_family(model: Path, options: dict[str, Any], root: Path, place: Place) -> StateRun:
    """Run all engines, one after the other."""
    run = StateRun(model, {"block_size": None, "max_num_seqs": 16} | options)
    _without_the_cache(run)
    disk = root / "disk"
    with cached_engine(model, disk, **run.options) as engine:
        _from_memory(run, engine)
    wait_ended(disk)
    with cached_engine(model, disk, **run.options, num_gpu_blocks_override=POOL_BLOCKS) as engine:
        _from_disk(run, engine)
    wait_ended(disk)
    _through_a_bucket(run, root, place)
    return run


def _through_a_bucket(run: StateRun, root: Path, place: Place) -> None:
    """One machine computes, another one that shares nothing with it but a bucket loads."""
    names = [run.names("length ")[-3], run.names("length ")[-1], "long", "turn"]
    for machine in ("here", "elsewhere"):
        extra = {"storage_uri": place.uri, "storage_options": place.options, "disk_path": str(root / machine)}
        with cached_engine(run.model, root / machine, extra, **run.options) as engine:
            for name in names:
                run.ask(engine, f"bucket, {machine}", name)
            wait_uploaded(root / machine)
            run.facts["searches"] = figures(root / machine)["counters"].get("state_searches", 0)
        wait_ended(root / machine)


def _make_prompts(run: StateRun) -> None:
    block = run.block
    for length in (block - 1, block, block + 1, 2 * block, 2 * block + 1, 3 * block + 7):
        run.prompts[f"length {length}"] = random_prompt(length, length)
    run.prompts["long"] = random_prompt(7, 3 * block + 7)
    run.prompts["stem"] = run.prompts["long"][: 2 * block + 5]
    for shared in (2 * block - 20, 2 * block, 2 * block + 20):
        stem = random_prompt(shared, shared)
        for number in range(3):
            run.prompts[f"fork {shared} {number}"] = [*stem, *random_prompt(10 + number, block)]
    for number in range(3):
        run.prompts[f"lost {number}"] = [*random_prompt(5, 2 * block + 20), *random_prompt(20 + number, block)]
    draw = random.Random(seed())
    for number in range(16):  # ends that decoding carries over a boundary, so that a request needs one more block
        length = draw.randint(1, 3) * block + draw.randint(2 - MAX_TOKENS, 4)
        run.prompts[f"many {number}"] = random_prompt(100 + number, length)


def _without_the_cache(run: StateRun) -> None:
    with running(run.model, **run.options) as llm:
        run.block = llm.llm_engine.engine_core.engine_core.scheduler.block_size
        _make_prompts(run)

        def answer(name: str) -> None:
            reset_gpu_cache(llm)
            (run.plain[name],) = generate(llm, [run.prompts[name]], max_tokens=MAX_TOKENS)

        for name in [*run.names("length "), "stem", "long", *run.names("fork "), *run.names("lost ")]:
            answer(name)
            if name.startswith("length "):
                (run.own[name],) = generate(llm, [run.prompts[name]], max_tokens=MAX_TOKENS)
        reset_gpu_cache(llm)
        many = run.names("many ")
        answers = generate(llm, [run.prompts[name] for name in many], max_tokens=MAX_TOKENS)
        run.plain |= dict(zip(many, answers, strict=True))
        for name in many:
            reset_gpu_cache(llm)
            (alone,) = generate(llm, [run.prompts[name]], max_tokens=MAX_TOKENS)
            run.note("alone, no cache", name, alone)
        run.answers["preempted, no cache"] = preempted_answers(llm, run)
        run.prompts["turn"] = [*run.prompts["long"], *run.plain["long"].tokens, *random_prompt(8, run.block + 30)]
        answer("turn")


def _from_memory(run: StateRun, engine: CachedEngine) -> None:
    for name in [*run.names("length "), "stem", "long", "turn"]:
        run.ask(engine, "cold", name)
    for name in run.names("length "):
        run.ask(engine, "memory", name)
    _forks(run, engine)
    for name in run.names("lost "):
        run.ask(engine, "forgotten", name)
    run.ask(engine, "cold together", *run.names("many "))
    run.ask(engine, "together", *run.names("many "))
    for where, which in FAILING.items():
        with failing_copies(engine, which) as failed:
            run.ask(engine, f"failed {where}", "long")
        run.facts[f"failed {where}"] = len(failed)
        run.ask(engine, f"after failed {where}", "long")
    run.facts["aborted"] = abort_during_load(engine, run.prompts["long"])
    run.ask(engine, "after the abort", "long")
    _in_wrong_ways(run, engine)
    _kill_the_server(run, engine)
    run.facts["left"] = _what_is_left(engine)
    run.facts["counters"] = dict(engine.scheduler_side.counters)


def _forks(run: StateRun, engine: CachedEngine) -> None:
    """Two prompts that share a stem come by while vLLM knows the stem; then both of them, and a third, afresh."""
    names = run.names("fork ")
    for pair in zip(names[::3], names[1::3], strict=True):
        reset_gpu_cache(engine.llm)
        for name in pair:
            (answer,) = generate(engine.llm, [run.prompts[name]], max_tokens=MAX_TOKENS)
            run.note("passing by", name, answer)
    for name in names:
        run.ask(engine, "memory", name)


def _in_wrong_ways(run: StateRun, engine: CachedEngine) -> None:
    for name, spoil in WRONG_WAYS.items():
        with pytest.MonkeyPatch.context() as patch:
            spoil(patch, engine)
            run.ask(engine, f"before: {name}", "stem")
            run.ask(engine, f"wrong: {name}", "long")
    run.ask(engine, "after what was wrong", "long")


def _kill_the_server(run: StateRun, engine: CachedEngine) -> None:
    wait_written(engine.root)
    os.kill(server_pid(engine.root), signal.SIGKILL)
    zero_kv(engine.llm)
    reset_gpu_cache(engine.llm)
    (lost,) = generate(engine.llm, [run.prompts["long"]], max_tokens=MAX_TOKENS)
    run.note("server killed", "long", lost)

    def has_session() -> bool:
        generate(engine.llm, [[5, 6, 7]], max_tokens=1)
        return bool(engine.scheduler_side.client.is_ready)

    wait_for(has_session, "a new session")
    run.ask(engine, "next server", "long")


def _from_disk(run: StateRun, engine: CachedEngine) -> None:
    _lose_what_was_found(run, engine)
    for name in [*run.names("length "), "turn", "turn"]:  # the last one's state was lost, and is stored again
        run.ask(engine, "disk", name)
    run.ask(engine, "few blocks", *run.names("many "))
    loads = engine.scheduler_side.counters["loads"]
    run.answers["preempted"] = preempted_answers(engine.llm, run)
    run.facts["loads with preemption"] = engine.scheduler_side.counters["loads"] - loads
    run.facts["left with few blocks"] = _what_is_left(engine)


def preempted_answers(llm: Any, run: StateRun) -> dict[str, Answer]:
    """Answers to requests of which vLLM takes all blocks once they have begun; what they had is loaded or computed."""
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False, logprobs=2)
    core, scheduler = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler
    outputs: list[Any] = []
    for name in run.names("many ")[:PREEMPTED]:  # one by one: steps of one block have no room for a second prompt
        reset_gpu_cache(llm)
        zero_kv(llm)
        core.add_request(name, {"prompt_token_ids": run.prompts[name]}, wanted)
        while not any(request.num_output_tokens for request in scheduler.running):
            outputs += core.step()
        assert llm.reset_prefix_cache(reset_running_requests=True)
        zero_kv(llm)
        while core.has_unfinished_requests():
            outputs += core.step()
    return {output.request_id: as_answer(output) for output in outputs if output.finished}


def _lose_what_was_found(run: StateRun, engine: CachedEngine) -> None:
    """The server has read its directory and believes in what is deleted now: the read behind the lookup fails."""
    _files(run, engine, "turn")[1][-1].unlink()
    for where in ("part of a state lost", "asked once more"):
        run.note(where, "turn", _ask_unstored(run, engine, "turn"))
    name = f"length {2 * run.block + 1}"
    _files(run, engine, name)[0][0].unlink()
    run.ask(engine, "chunk lost", name)
    run.ask(engine, "chunk stored again", name)


def _ask_unstored(run: StateRun, engine: CachedEngine, name: str) -> Answer:
    """Ask without storing, so that what is lost stays lost."""
    from vllm import SamplingParams

    reset_gpu_cache(engine.llm)
    zero_kv(engine.llm)
    wanted = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False, logprobs=2)
    wanted.extra_args = {"kv_transfer_params": {"tiered_kv.skip_save": True}}
    (output,) = engine.llm.generate([{"prompt_token_ids": run.prompts[name]}], wanted, use_tqdm=False)
    drain(engine.llm)
    return as_answer(output)


def _what_is_left(engine: CachedEngine) -> tuple[int, int, bool]:
    drain(engine.llm)
    pool = engine.scheduler.kv_cache_manager.block_pool
    taken = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    return taken, len(engine.scheduler_side._requests), engine.scheduler_side.has_work


def stored_files(root: Path) -> tuple[list[Path], list[Path]]:
    """Blobs of chunks and of states in a directory."""
    files = blob_files(root)
    states = [path for path in files if is_state(_record(path))]
    return [path for path in files if path not in states], states


def _record(path: Path) -> Any:
    return peek(path.read_bytes()[:PEEK_BYTES]).record


def _files(run: StateRun, engine: CachedEngine, name: str) -> tuple[list[Path], list[Path]]:
    """Files of a prompt's chunks, and of the deepest state that is of use to it."""
    side = engine.scheduler_side
    keys = PrefixKeys(side.client.namespace, run.block)
    keys.extend(run.prompts[name])
    chunks, states = ({_record(path).key: path for path in files} for files in stored_files(engine.root))
    before = _record(chunks[keys.keys[run.hit_tokens(name) // run.block - 1]])
    parts = [record.key for record in state_records(before, len(side._groups.states))]
    return [chunks[key] for key in keys.keys if key in chunks], [states[key] for key in parts]
