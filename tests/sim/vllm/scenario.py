"""Scenarios of the simulator: what clients, operators and machines do to an engine, drawn from a seed, and its end.

A seed fixes the engine, the requests and what happens to them. Copy threads, sockets and the cache server are real, so
when things happen relative to each other differs between runs of one seed.
"""

import faulthandler
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from tests.kit.server.probe import is_serving, server_pid, wait_for
from tests.kit.server.processes import end_server, kill_server
from tests.kit.storage.disk_probe import blob_files
from tests.sim.vllm.checks import leaks, offloading_leaks, server_hits, server_leaks, unanswered, undrafted_blobs
from tests.sim.vllm.engine import MAX_MODEL_LEN, Setup, SimulatedEngine
from tests.sim.vllm.families import DRAFTS, LAYER_OUTERMOST, MATCH_UNIT, STATES
from tests.sim.vllm.faults import CopyFaults
from tests.sim.vllm.model import VOCAB
from tiered_kv.chunks.header import PEEK_BYTES, peek
from tiered_kv.keys.state_keys import is_state

IDLE_S = 0.0005
"""vLLM's busy loop sleeps a millisecond after a step without work."""
RUN_MAX_S = 90.0
STANDSTILL_S = 10.0
TRUNKS = 3
PROMPT_MAX = 130
ANSWER_MAX = 48
SESSION_START_MAX = 50


@dataclass(frozen=True)
class Moves:
    """How likely each thing is: per turn of the engine's loop, per request, or per wave of requests."""

    abort: float = 0.0
    reset: float = 0.0
    new_weights: float = 0.0
    kill_server: float = 0.0
    freeze_server: float = 0.0
    session: float = 0.0
    duplicate: float = 0.0
    skip_reading: float = 0.0
    skip_save: float = 0.0
    skip_load: float = 0.0
    forget_gpu: float = 0.0
    restart: float = 0.0
    follow_up: float = 0.0
    lose_blobs: float = 0.0


@dataclass(frozen=True)
class Plan:
    """One seed's scenario.

    Attributes:
        waves: Requests per wave; the next one comes when the engine is at rest.
        is_chatty: Short prompts and long answers, so that requests grow and are preempted.
    """

    seed: int
    setup: Setup
    moves: Moves
    copies: CopyFaults
    waves: tuple[int, ...]
    is_chatty: bool

    @classmethod
    def draw(cls, seed: int, root: Path, *, is_v2: bool, is_async: bool, family: str = "") -> "Plan":
        """The scenario of a seed; every seed has some of the moves and faults, none has all.

        With a family of layers of other kinds the seed draws everything else.
        """
        source = random.Random(seed)

        def sometimes(chance: float, most: float) -> float:
            return source.random() * most if source.random() < chance else 0.0

        is_hybrid = source.random() < 0.5
        windows = source.choice([(None, None), (None, None, 9)]) if not is_hybrid else _hybrid(source)
        chunk_tokens = source.choice([8, 16, 24])
        connector = {
            "storage_uri": f"file://{root}",
            "host_bytes": source.choice(["256KiB", "1MiB", "8MiB"]),
            "disk_bytes": "160MiB",
            "chunk_tokens": chunk_tokens,
            "model_id": "simulated",
            "strict": True,
            "lookup_timeout_ms": source.choice([1, 250, 5000, 5000]),
            "promotion_wait_ms": source.choice(["auto", 0, 5000, 5000]),
            "pinned_share": source.choice([0.1, 0.3, 0.5]),
            "save_decode": source.random() < 0.5,
            "tail_tokens": random.Random(f"tails {seed}").choice([None, 4, 8]),
        }
        setup = Setup(
            is_v2=is_v2,
            is_async=is_async,
            ranks=source.choice([1, 2]),
            is_replicated=source.random() < 0.2,
            windows=windows,
            is_hybrid=is_hybrid,
            layout=source.choice(["LBHNC", "LBNHC", "BLHNC", "BLNHC"]),
            token_budget=source.choice([16, 48, 160]),
            requests_max=source.choice([3, 8]),
            draft_tokens=source.choice([0, 0, 2, 3]),
            policy=source.choice(["fcfs", "priority"]),
            has_prefix_caching=source.random() < 0.8,
            late=source.random(),
            connector=connector,
        )
        if family:
            layout = setup.layout if family in LAYER_OUTERMOST else source.choice(["BLHNC", "BLNHC"])
            setup = replace(setup, family=family, is_hybrid=True, is_replicated=False, layout=layout)
        if family in STATES:
            # vLLM keeps states for its prefix cache only, and with drafts they are refused.
            setup = replace(setup, has_prefix_caching=True, draft_tokens=setup.draft_tokens if family in DRAFTS else 0)
        if family in DRAFTS:
            drafted_len = source.choice([MAX_MODEL_LEN, 100])
            setup = replace(setup, draft_tokens=max(1, setup.draft_tokens), drafted_len=drafted_len)
        if family in STATES:
            # Further states at every block or every other one, and none but the last.
            retention = source.choice([0, 0, None, 2 * setup.block_tokens])
            unit = MATCH_UNIT.get(family)
            setup = replace(setup, match_unit=unit, retention=None if unit else retention)
        spare_blocks = source.choice([0, 8, 30, 100])
        setup = replace(setup, pool_blocks=setup.pool_blocks_min + spare_blocks)
        moves = Moves(
            abort=sometimes(0.7, 0.1),
            reset=sometimes(0.2, 0.02),
            new_weights=sometimes(0.2, 0.02),
            kill_server=sometimes(0.1, 0.02),
            freeze_server=sometimes(0.15, 0.03),
            # vLLM's own KV of a session is wrong when drafts are dropped at a turn's end; a test of its own. And as it
            # cannot preempt sessions between turns, those that hold all blocks of a small pool wait for each other.
            session=0.0 if setup.draft_tokens or spare_blocks < 100 else sometimes(0.8, 0.6),
            duplicate=sometimes(0.5, 0.4),
            skip_reading=sometimes(0.5, 0.3),
            skip_save=sometimes(0.4, 0.3),
            skip_load=sometimes(0.4, 0.3),
            forget_gpu=source.choice([0.0, 0.5, 1.0]),
            restart=source.choice([0.0, 0.0, 0.5]),
        )
        if family in STATES or family in DRAFTS:
            moves = replace(moves, follow_up=sometimes(0.7, 0.5), lose_blobs=sometimes(0.5, 0.5))
        copies = CopyFaults(
            seed, sometimes(0.7, 0.8), failing_loads=sometimes(0.4, 0.3), failing_saves=sometimes(0.3, 0.3)
        )
        waves = tuple(source.randrange(2, 10) for _ in range(source.randrange(3, 6)))
        return cls(seed, setup, moves, copies, waves, source.random() < 0.5)


def _hybrid(source: random.Random) -> tuple[int | None, ...]:
    """Layers of which vLLM makes several groups; windows shorter and longer than a chunk."""
    window = source.choice([5, 9, 16, 30])
    return source.choice([(None, window), (None, window, window), (window, None, window, None, window, window)])


@dataclass
class Outcome:
    """What a scenario did, summed up, and what was wrong at its end."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass
class _World:
    """A running scenario.

    Attributes:
        aborted: Requests whose client went away.
        limits: How many tokens each request asked for, over all turns of a session.
        never_load: Requests for which nothing may be loaded.
        sessions: Turns that open sessions have still to come.
        thaw_at: Turn at which a frozen server goes on.
        still_since_s: Since when loads have ended and nothing runs.
        is_reset_durable: No weights were replaced while there was no server to remember it.
    """

    plan: Plan
    root: Path
    engine: SimulatedEngine
    source: random.Random
    trunks: list[list[int]]
    outcome: Outcome
    sent: int = 0
    turn: int = 0
    thaw_at: int | None = None
    still_since_s: float | None = None
    is_reset_durable: bool = True
    aborted: set[str] = field(default_factory=set)
    limits: Counter[str] = field(default_factory=Counter)
    never_load: set[str] = field(default_factory=set)
    sessions: dict[str, int] = field(default_factory=dict)

    def note(self, what: str) -> None:
        """Count something that happened."""
        self.outcome.counts[what] += 1


def run_scenario(plan: Plan, root: Path) -> Outcome:
    """Run a scenario from its first request until the engine, its blocks and its server are at rest."""
    source = random.Random(plan.seed + 1)
    trunks = [[source.randrange(VOCAB) for _ in range(PROMPT_MAX)] for _ in range(TRUNKS)]
    world = _World(plan, root, SimulatedEngine(plan.setup, plan.seed), source, trunks, Outcome())
    try:
        for requests in plan.waves:
            with plan.copies.active():
                _wave(world, requests)
            if source.random() < plan.moves.forget_gpu:
                assert world.engine.scheduler.reset_prefix_cache(), "an engine at rest holds blocks"
            if plan.moves.lose_blobs and source.random() < plan.moves.lose_blobs:
                _lose_blobs(world)
            if source.random() < plan.moves.restart and world.is_reset_durable:
                _restart(world)
        _end_engine(world)
        world.outcome.counts.update(server_hits(root))
    finally:
        _thaw(world)
        world.engine.close()
        end_server(root)
    if undrafted := undrafted_blobs(root):
        world.outcome.wrong.append(f"stored, though the draft did not run: {undrafted} blobs")
    return world.outcome


def _lose_blobs(world: _World) -> None:
    """Somebody deletes files below a server that runs: states alone, chunks of attention alone, or both."""
    lost = world.source.choice(["states", "chunks", "blobs"])
    for path in sorted(blob_files(world.root)):
        with suppress(FileNotFoundError):  # the server may evict it first
            is_of_state = is_state(peek(path.read_bytes()[:PEEK_BYTES]).record)
            if lost == "blobs" or is_of_state == (lost == "states"):
                path.unlink()
                world.note(f"lost_{'states' if is_of_state else 'chunks'}")


def _wave(world: _World, requests: int) -> None:
    """Turn the engine's loop until so many requests were sent and nothing is left to do."""
    deadline_s = time.monotonic() + RUN_MAX_S
    end = world.sent + requests
    while world.sent < end or world.engine.has_work or world.sessions:
        if time.monotonic() > deadline_s:
            faulthandler.dump_traceback()
            raise TimeoutError(f"still at work: {_state(world.engine)}")
        world.turn += 1
        world.note("turns")
        if world.sent < end and world.source.random() < 0.4:
            _send(world)
        _move(world)
        _continue_sessions(world)
        if world.engine.step():
            world.still_since_s = None
        else:
            time.sleep(IDLE_S)
            _notice_standstill(world)
        _check_loading(world)
    _thaw(world)


def _notice_standstill(world: _World) -> None:
    """End the run where vLLM's scheduler keeps requests behind one that finds no room (docs/simulator.md).

    Loads have ended, nothing runs, so nothing is preempted, and nobody lets go of the blocks it lacks.
    """
    scheduler = world.engine.scheduler
    loading = [one for one in scheduler.kv_holding_waiting if one.status == RequestStatus.WAITING_FOR_REMOTE_KVS]
    arrived = all(one.request_id in scheduler.finished_recving_kv_req_ids for one in loading)
    if scheduler.running or not loading or not arrived:
        world.still_since_s = None
        return
    world.still_since_s = world.still_since_s or time.monotonic()
    if time.monotonic() - world.still_since_s > STANDSTILL_S:
        raise TimeoutError(f"vLLM stands still: {_state(world.engine)}")


def _check_loading(world: _World) -> None:
    for request in world.engine.scheduler.requests.values():
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and request.request_id in world.never_load:
            world.never_load.remove(request.request_id)
            world.outcome.wrong.append(f"{request.request_id} loads, and was told not to")


def _state(engine: SimulatedEngine) -> dict[str, Any]:
    requests = engine.scheduler.requests
    if engine.setup.offloading is not None:
        return {"requests": {name: str(request.status) for name, request in requests.items()}}
    return {
        "requests": {name: str(request.status) for name, request in requests.items()},
        "groups": engine.groups,
        "received": sorted(engine.scheduler.finished_recving_kv_req_ids),
        "free_blocks": engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "pinned_blocks": engine.connector._scheduler.side.saves._pinned,
        "scheduler": _side(engine.connector._scheduler.side, "_client", "_loads", "_loading"),
        "workers": [
            _side(worker.connector._worker, "_client", "_joining_generation", "_is_joining", "_early", "_running")
            for worker in engine.workers
        ],
    }


def _side(side: Any, *names: str) -> dict[str, Any]:
    """What a side of the connector holds; of its client the generation and whether the session is open."""
    shown = {name: getattr(side, name) for name in names}
    client = shown.pop("_client")
    return shown | {name: getattr(client, name, None) for name in ("generation", "is_ready", "is_silent")}


def _send(world: _World) -> None:
    source, moves = world.source, world.plan.moves
    tail = [source.randrange(VOCAB) for _ in range(source.choice([0, 1, 3, 12]))]
    prompt_max, answers = (PROMPT_MAX // 2, (8, ANSWER_MAX)) if world.plan.is_chatty else (PROMPT_MAX, (1, 2, 6, 16))
    is_session = source.random() < moves.session and not world.sessions
    prompt = source.choice(world.trunks)[: source.randrange(1, SESSION_START_MAX if is_session else prompt_max)] + tail
    if moves.follow_up and source.random() < moves.follow_up and not is_session:
        prompt = _follow_up(world, tail) or prompt
    answer_max = min(source.choice(answers), MAX_MODEL_LEN - len(prompt) - 1)
    for _ in range(3 if source.random() < moves.duplicate and not is_session else 1):
        controls: dict[str, Any] = {}
        if source.random() < moves.skip_save:
            controls["tiered_kv.skip_save"] = True
        if source.random() < moves.skip_load:
            controls["tiered_kv.skip_load"] = True
        skips_reading = source.random() < moves.skip_reading
        parameters = SamplingParams(
            max_tokens=answer_max,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            skip_reading_prefix_cache=skips_reading,
            extra_args={"kv_transfer_params": controls} if controls else None,
        )
        request_id = f"r{world.sent}"
        world.limits[request_id] = answer_max
        if skips_reading or "tiered_kv.skip_load" in controls:
            world.never_load.add(request_id)
        if is_session:
            world.sessions[request_id] = source.randrange(1, 5)
        world.engine.add(request_id, prompt, parameters, priority=source.randrange(3), resumable=is_session)
        world.sent += 1


def _follow_up(world: _World, tail: list[int]) -> list[int]:
    """A prompt that goes on where an answer ended; empty where none is short enough."""
    ended = [one.tokens for one in world.engine.answers.values() if one.finish_reason is not None]
    short = [tokens for tokens in ended if len(tokens) + len(tail) < MAX_MODEL_LEN - 8]
    if not short:
        return []
    world.note("follow_ups")
    return world.source.choice(short) + tail


def _continue_sessions(world: _World) -> None:
    """Clients of sessions send more input, some before the last answer is complete, and end them."""
    source, engine = world.source, world.engine
    for request_id, turns in list(world.sessions.items()):
        request = engine.scheduler.requests.get(request_id)
        if request is None or request.is_finished():
            del world.sessions[request_id]  # aborted
            continue
        is_waiting = request.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        if source.random() > (0.3 if is_waiting else 0.03):
            continue
        more = [source.randrange(VOCAB) for _ in range(source.choice([1, 5, 20]))]
        answer_max = source.choice([1, 3, 8])
        parameters = SamplingParams(max_tokens=answer_max, temperature=0.0, ignore_eos=True, detokenize=False)
        waiting = sum(
            len(one.prompt_token_ids or ()) + one.max_tokens for one in filter(None, request.streaming_queue or ())
        )
        if turns and len(request.all_token_ids) + waiting + len(more) + answer_max + ANSWER_MAX < MAX_MODEL_LEN:
            world.sessions[request_id] = turns - 1
            world.limits[request_id] += answer_max
            world.note("session_turns")
            engine.add(request_id, more, parameters, resumable=True)
        elif is_waiting:
            del world.sessions[request_id]  # input that is not resumable ends it; vLLM takes no tokens from that
            engine.add(request_id, more, parameters)


def _move(world: _World) -> None:
    """Whatever happens between two steps."""
    source, moves, engine = world.source, world.plan.moves, world.engine
    if world.thaw_at is not None and world.turn >= world.thaw_at:
        _thaw(world)
    if source.random() < moves.abort and (running := engine.unfinished()):
        request_id = source.choice(running)
        world.aborted.add(request_id)
        is_loading = engine.scheduler.requests[request_id].status == RequestStatus.WAITING_FOR_REMOTE_KVS
        world.note("aborts_while_loading" if is_loading else "aborts")
        engine.abort(request_id)
    if source.random() < moves.reset:
        world.note("resets")
        engine.scheduler.reset_prefix_cache(reset_connector=True)
    if source.random() < moves.new_weights and not world.sessions:  # an open session holds blocks: vLLM refuses
        _replace_weights(world)
    is_killed, is_frozen = source.random() < moves.kill_server, source.random() < moves.freeze_server
    if (is_killed or is_frozen) and world.thaw_at is None and is_serving(world.root):
        if is_killed:
            world.note("kills")
            kill_server(world.root)
        else:
            world.note("freezes")
            os.kill(server_pid(world.root), signal.SIGSTOP)
            world.thaw_at = world.turn + source.randrange(5, 60)


def _thaw(world: _World) -> None:
    if world.thaw_at is not None:
        with suppress(ProcessLookupError):
            os.kill(server_pid(world.root), signal.SIGCONT)
        world.thaw_at = None


def _replace_weights(world: _World) -> None:
    """As an operator does it: no new requests, what is being loaded arrives, the weights change.

    Requests that run are preempted and go on with the new weights; stores may be under way. One that was loaded must
    have been admitted: vLLM refuses to reset its cache while a waiting request holds blocks.
    """
    _thaw(world)
    engine = world.engine
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    try:
        wait_for(lambda: _is_quiet(world), "loads in flight", deadline_s=RUN_MAX_S)
    except TimeoutError:
        faulthandler.dump_traceback()
        raise TimeoutError(f"loads do not end: {_state(engine)}") from None
    if engine.connector._scheduler.side.saves.has_work:
        world.note("weight_updates_while_storing")
    engine.replace_weights()
    world.is_reset_durable &= engine.connector._scheduler.side._client.is_ready
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    world.note("weight_updates")


def _is_quiet(world: _World) -> bool:
    engine = world.engine
    if engine.step():
        world.still_since_s = None
    engine.finish_steps()
    _notice_standstill(world)
    return not (engine.scheduler.kv_holding_waiting or engine.scheduler.has_finished_requests())


def _restart(world: _World) -> None:
    """A new engine with the weights of the last update: what was stored before that must not be found again."""
    _end_engine(world)
    is_server_ended = world.source.random() < 0.5
    if is_server_ended:
        world.outcome.counts.update(server_hits(world.root))
    world.engine.close()
    if is_server_ended:
        end_server(world.root)  # what it had in memory is gone
    world.engine = SimulatedEngine(world.plan.setup, world.plan.seed, world.engine.model.weights)
    world.note("restarts")


def _end_engine(world: _World) -> None:
    """Judge an engine at rest, and add up what it did."""
    engine, outcome = world.engine, world.outcome
    _judge_answers(world)
    outcome.wrong += leaks(engine)
    outcome.wrong += engine.accounts.wrong()
    outcome.wrong += server_leaks(engine, world.root)
    outcome.counts.update(engine.connector._scheduler.side.counters)
    outcome.counts.update(
        accepted_drafts=engine.findings.accepted_drafts,
        rejected_drafts=engine.findings.rejected_drafts,
        checked_draft_tokens=engine.findings.checked_draft_tokens,
        wrong_draft_tokens=engine.findings.wrong_draft_tokens,
        neighbour_draft_tokens=engine.findings.neighbour_draft_tokens,
        undrafted_tokens=engine.findings.undrafted_tokens,
        block_copies=engine.findings.block_copies,
    )


# -- below vLLM's own offloading ---------------------------------------------------------------------------------------

NEW_WEIGHTS_SHARE = 0.3
"""Of waves: how often weights change behind one."""


def run_offloading_scenario(plan: Plan, root: Path) -> Outcome:
    """The same with a tier of ours below vLLM's offloading (``plan.setup.offloading``).

    Without what vLLM's offloading gets wrong by itself: streaming sessions, and weights that change under requests that
    run on (docs/offloading.md).
    """
    plan = replace(plan, moves=replace(plan.moves, session=0.0, new_weights=0.0, skip_load=0.0))
    source, outcome = random.Random(plan.seed + 1), Outcome()
    trunks = [[source.randrange(VOCAB) for _ in range(PROMPT_MAX)] for _ in range(TRUNKS)]
    world = _World(plan, root, _offloading_engine(plan, outcome), source, trunks, outcome)
    try:
        for requests in plan.waves:
            _wave(world, requests)
            if source.random() < plan.moves.forget_gpu:
                assert world.engine.scheduler.reset_prefix_cache(), "an engine at rest holds blocks"
            if plan.moves.lose_blobs and source.random() < plan.moves.lose_blobs:
                _lose_blobs(world)
            if source.random() < NEW_WEIGHTS_SHARE:
                _replace_weights_below_offloading(world)
            if (
                source.random() < plan.moves.restart and world.engine.row_tier._jobs.is_ready
            ):  # else a reset may not be durable
                _judge_offloading(world)
                world.engine.close()
                world.engine = _offloading_engine(plan, outcome, world.engine.model.weights)
                world.note("restarts")
        _judge_offloading(world)
    finally:
        _thaw(world)
        world.engine.close()
        end_server(root)
    return world.outcome


def _offloading_engine(plan: Plan, outcome: Outcome, weights: int = 1) -> SimulatedEngine:
    """An engine whose tier counts its rows in the outcome."""
    engine = SimulatedEngine(plan.setup, plan.seed, weights)
    metrics = engine.row_tier._metrics
    count = metrics.count

    def note(name: str, number: int, label: str = "") -> None:
        outcome.counts[f"{name} {label}".strip()] += number
        count(name, number, label)

    metrics.count = note
    return engine


def _replace_weights_below_offloading(world: _World) -> None:
    """While requests run: vLLM preempts them."""
    engine = world.engine
    for _ in range(world.source.randrange(1, 4)):
        _send(world)
    for _ in range(world.source.randrange(20)):
        engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    wait_for(lambda: _is_quiet(world), "loads in flight", deadline_s=RUN_MAX_S)
    engine.replace_weights()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    world.note("weight_updates")
    _wave(world, 0)


def _judge_offloading(world: _World) -> None:
    """Judge an engine at rest: what it answered, and what vLLM and the tier still hold."""
    _judge_answers(world)
    world.outcome.wrong += offloading_leaks(world.engine)


def _judge_answers(world: _World) -> None:
    """Judge what an engine answered, by either door, and add up how much it was."""
    engine, outcome = world.engine, world.outcome
    asked = {name: tokens for name, tokens in world.limits.items() if name in engine.answers}
    outcome.wrong += engine.findings.wrong + unanswered(engine, asked, world.aborted)
    outcome.counts.update(
        requests=len(engine.answers),
        preemptions=engine.preemptions,
        checked_tokens=engine.findings.checked_tokens,
        wrong_tokens=engine.findings.wrong_tokens,
        wrong_answers=engine.findings.wrong_answers,
    )
