"""vLLM's offloading without an engine: its tiering manager and host memory with our tier, driven as its scheduler does.

Of one engine there are requests, in the place of its scheduler and its worker: prompts are looked up, loaded, computed
and stored row by row, preempted, aborted, and finished, with vLLM's calls in vLLM's order
(``kv_connector/v1/offloading/scheduler.py`` of 0.32). The GPU is no more than the time that a copy takes.

After every step each row of host memory is compared with what must lie there:

- a row that vLLM calls ready has the bytes of its key, as the weights of the day made them;
- a row that is nobody's, or that the GPU is to fill, has what it had before: only a load that runs may change a row,
  and once it was told how that ended nothing does (a late byte);
- of a group's row only the group's bytes change.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from tests.kit.server.clients import STORED_BY, namespace_fields
from tests.kit.vllm.asking_tier import AskingTier
from tests.kit.vllm.row_accounts import check_accounts
from tiered_kv.vllm.identity.rows import RowIdentity
from tiered_kv.vllm.offloading import TieredKVTier
from tiered_kv.vllm.row_groups import RowGroup

TOKENS, ROW_BYTES = 16, 4096
WHOLE = (RowGroup(0, TOKENS),)
GROUPS = (
    RowGroup(0, TOKENS, None, ((0, 1024),)),
    RowGroup(1, TOKENS, None, ((512, 512), (2048, 256))),
    RowGroup(2, TOKENS, 1, ((64, 256), (3072, 1024))),
)
RUNNING_MAX = 3
COPY_STEPS_MAX = 4
ROWS_A_STEP = 3

WAITING, LOADING, ARRIVED, RUNNING, OVER = "waiting", "loading", "arrived", "running", "over"


def row_name(tokens: Sequence[int], group: RowGroup) -> bytes:
    """vLLM's key of the last of these rows: a hash that chains them all, and the group's number."""
    return hashlib.sha256(repr(list(tokens)).encode()).digest() + group.number.to_bytes(4, "big")


@lru_cache(maxsize=1 << 14)
def content(key: bytes, weights: str) -> "np.ndarray[Any, Any]":
    """What the model computes for a row."""
    return np.frombuffer(hashlib.shake_128(weights.encode() + key).digest(ROW_BYTES), np.uint8)


@dataclass(eq=False)
class Ask:
    """A request.

    Attributes:
        rows: What its rows are made of, the answer's too.
        prompt: How many of them are its prompt.
        phase: Where it stands.
        local: Leading rows that the GPU has by itself.
        hit: Rows that it has once what it loads is here.
        computed: Rows that are on the GPU; ``stored`` of them were offered to vLLM's host memory.
        copies: Copies between the GPU and host memory that run for it.
        has_run: vLLM's scheduler named it as a new one.
        is_told: vLLM was told of its end.
    """

    context: Any
    rows: list[int]
    prompt: int
    phase: str = WAITING
    local: int = 0
    hit: int = 0
    known: int = 0
    computed: int = 0
    stored: int = 0
    copies: int = 0
    has_run: bool = False
    is_told: bool = False

    @property
    def name(self) -> str:
        return str(self.context.req_id)

    def key(self, group: RowGroup, place: int) -> Any:
        return row_name(self.rows[: place + 1], group)

    def know(self, rows: int, groups: Sequence[RowGroup]) -> None:
        """Tokens of so many rows are there, and vLLM has made their keys."""
        for group in groups:
            for place in range(self.known, rows):
                self.context.set_offload_key_position(self.key(group, place), (place + 1) * TOKENS)
        self.known = max(self.known, rows)


@dataclass(eq=False)
class _Copy:
    """Of the worker: rows to the GPU or from it."""

    ask: Ask
    keys: set[Any]
    rows: dict[Any, int]
    is_load: bool
    steps: int


@dataclass
class _Plan:
    """One step, as vLLM's scheduler has planned it."""

    new: list[Ask] = field(default_factory=list)
    resumed: list[Ask] = field(default_factory=list)
    preempted: list[Ask] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)


class RowWatch:
    """Host memory, row by row, and what must lie in it.

    Attributes:
        lent: Rows that a load which is not over fills, and how many bytes of which row it may change.
    """

    def __init__(self, memory: "np.ndarray[Any, Any]", groups: Sequence[RowGroup]) -> None:
        self.memory = memory
        memory[:] = 0xA7
        self._known = memory.copy()
        self._groups = {one.number: one for one in groups}
        self.lent: dict[int, bytes] = {}

    def spans(self, key: bytes) -> tuple[tuple[int, int], ...]:
        """What of a row belongs to its group."""
        return self._groups[int.from_bytes(key[-4:], "big")].spans or ((0, ROW_BYTES),)

    def write(self, row: int, value: "np.ndarray[Any, Any]") -> None:
        """The GPU's worker fills a row."""
        self.memory[row] = value
        self._known[row] = value

    def begin(self, key: bytes, row: int) -> None:
        """A load of the tier may change a row from now on."""
        assert row not in self.lent, f"two loads fill one row. row={row}"
        self.lent[row] = key

    def end(self, row: int) -> None:
        """That is over: whatever lies there now stays."""
        key, was = self.lent.pop(row), self._known[row].copy()
        now = self.memory[row].copy()
        for start, length in self.spans(key):
            was[start : start + length] = now[start : start + length]
        assert np.array_equal(was, now), f"a load changed other bytes of its row than its group's. row={row}"
        self._known[row] = now

    def check(self) -> None:
        """Nothing has changed but rows that are lent."""
        changed = np.flatnonzero((self.memory != self._known).any(axis=1))
        late = [int(row) for row in changed if int(row) not in self.lent]
        assert not late, f"bytes came into rows that nobody loads into. rows={late}"

    def is_of(self, row: int, key: bytes, weights: str) -> bool:
        expected = content(key, weights)
        return all(
            np.array_equal(self.memory[row, start : start + length], expected[start : start + length])
            for start, length in self.spans(key)
        )


class OffloadingHost:
    """One engine.

    Attributes:
        asking: Asks for rows by their names, for another engine.
        weights: Of the model that computes; each reset of the caches is for new ones.
        durable: Those of which the server has heard.
        asks: Requests that are not over for vLLM.
        counts: What happened.
    """

    def __init__(
        self, source: random.Random, rows: int, settings: dict[str, Any], groups: Sequence[RowGroup], weights: str
    ) -> None:
        self._source, self._groups = source, groups
        region = SharedOffloadRegion(f"history_{uuid4().hex}", rows, None, ROW_BYTES, ROW_BYTES)
        self.primary = CPUPrimaryTierOffloadingManager(rows, region)
        view = self.primary.get_kv_memoryview()
        self.watch = RowWatch(np.frombuffer(view.cast("B"), np.uint8).reshape(rows, ROW_BYTES), groups)
        numbered = [SimpleNamespace(tokens_per_block=TOKENS, group_id=one.number) for one in groups]
        config = SimpleNamespace(groups=numbered, cache=SimpleNamespace(blocks_per_chunk=1))
        self.tier = TieredKVTier(
            offloading_spec=SimpleNamespace(config=config, kv_events_config=None),
            primary_kv_view=view,
            tier_type="ours",
            **settings,
        )
        self._listen(self.tier)
        said = tuple(groups) if any(one.spans for one in groups) else ()
        self.tier.begin([RowIdentity(namespace_fields(), STORED_BY, said)], f"history-{uuid4().hex}")
        self.asking = AskingTier(view)
        self.manager = TieringOffloadingManager(self.primary, [self.tier, self.asking])
        self.weights = self.durable = weights
        self.asks: list[Ask] = []
        self._copies: list[_Copy] = []
        self._over: list[Ask] = []  # of which vLLM is to be told
        self._preempted: list[Ask] = []  # by a reset
        self._loading: Counter[Any] = Counter()  # keys of copies to the GPU
        self.counts: Counter[str] = Counter()

    # -- what the tier does ------------------------------------------------------------------------------------------

    def _listen(self, tier: Any) -> None:
        """Hear of loads as vLLM's manager does, at the same moment."""
        submit, finished = tier.submit_load, tier.get_finished_jobs

        def submit_load(job: Any) -> None:
            params = job.req_context.kv_transfer_params or {}
            assert not params.get("tiered_kv.skip_load"), "loaded for a request that may not load"
            for key, row in zip(job.keys, job.chunk_ids, strict=True):
                self.watch.begin(bytes(key), int(row))
            submit(job)

        def get_finished_jobs() -> list[Any]:
            results = list(finished())
            for result in results:
                self._heard(result)
            return results

        tier.submit_load, tier.get_finished_jobs = submit_load, get_finished_jobs

    def _heard(self, result: Any) -> None:
        job = self.manager._jobs[result.job_id].transfer_job
        good = set(job.keys) if result.success else set(result.successful_keys or ())
        if not job.is_promotion:
            self.counts["stored" if result.success else "stores_failed"] += len(job.keys)
            return
        for key, row in zip(job.keys, job.chunk_ids, strict=True):
            if key in good:
                assert self.watch.is_of(int(row), key, self.weights), f"loaded wrong bytes. row={row} key={key.hex()}"
            self.watch.end(int(row))
        self.counts["loaded"] += len(good)
        self.counts["loads_failed"] += len(job.keys) - len(good)

    # -- clients -----------------------------------------------------------------------------------------------------

    def send(self, rows: list[int], prompt: int, params: dict[str, Any] | None = None) -> Ask:
        """A request comes."""
        context = ReqContext(req_id=uuid4().hex, kv_transfer_params=params)
        self.manager.on_new_request(context)
        ask = Ask(context, rows, prompt, local=self._source.choice([0, 0, 0, self._source.randrange(prompt)]))
        self.asks.append(ask)
        self.counts["asks"] += 1
        return ask

    def abort(self) -> None:
        """A client goes away."""
        if alive := [ask for ask in self.asks if ask.phase is not OVER]:
            self._end(self._source.choice(alive))
            self.counts["aborts"] += 1

    def ask_for(self, rows: list[int]) -> None:
        """Another engine asks for these rows, in some order."""
        if not self.asking.wanted:
            keys = [row_name(rows[: place + 1], group) for place in range(len(rows)) for group in self._groups]
            self._source.shuffle(keys)
            self.asking.got = {}
            self.asking.wanted = keys
            self.counts["asked_from_outside"] += 1

    def _end(self, ask: Ask) -> None:
        ask.phase = OVER
        self._over.append(ask)

    @property
    def is_idle(self) -> bool:
        """Whether vLLM's busy loop would stop to step."""
        return not (self.asks or self._copies or self._over or self.manager.has_pending_work())

    @property
    def is_served(self) -> bool:
        """Whether the tier has a session."""
        return self.tier._jobs is not None and self.tier._jobs.is_ready

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One turn of the busy loop."""
        if self.is_idle:
            self.check()
            return
        plan = _Plan(preempted=self._preempted)
        self._preempted = []
        self._compute(plan)
        if self._source.random() >= 0.02 or not self._preempt(plan):
            self._admit(plan)  # vLLM admits nobody in a step that preempts
        self.tier.begin_step(self._output(plan))
        names = [ask.name for ask in plan.new], [ask.name for ask in plan.preempted]
        self.manager.on_schedule_end(ScheduleEndContext(*names))
        self._offer()
        for ask in self._over:
            ask.is_told = True
            self.manager.on_request_finished(ask.context)
        self._over = []
        for one in self._copies:
            one.steps = 0 if one.ask in plan.preempted else one.steps - 1
        stores = [number for number, one in enumerate(self._copies) if one.steps <= 0 and not one.is_load]
        last = max(stores, default=-1)  # the GPU copies what is stored in its order
        self._copy([one for n, one in enumerate(self._copies) if one.steps <= 0 or (n < last and not one.is_load)])
        for ask in self.asks:
            if ask.phase is RUNNING and ask.computed == len(ask.rows):
                self._end(ask)
        self.asks = [ask for ask in self.asks if ask.phase is not OVER or ask.copies or not ask.is_told]
        self.check()

    def _preempt(self, plan: _Plan) -> bool:
        if not (running := [ask for ask in self.asks if ask.phase is RUNNING]):
            return False
        self._back(ask := self._source.choice(running))
        plan.preempted.append(ask)
        plan.tokens.pop(ask.name, None)
        self.counts["preemptions"] += 1
        return True

    @staticmethod
    def _back(ask: Ask) -> None:
        ask.phase, ask.computed, ask.local = WAITING, 0, 0

    def _compute(self, plan: _Plan) -> None:
        for ask in self.asks:
            if ask.phase is RUNNING:
                self._run(plan, ask)

    def _run(self, plan: _Plan, ask: Ask) -> None:
        plan.before[ask.name] = ask.computed * TOKENS
        is_prefill = ask.computed < ask.prompt
        until = min(ask.computed + ROWS_A_STEP, ask.prompt) if is_prefill else ask.computed + 1
        until = min(until, len(ask.rows))
        plan.tokens[ask.name] = max(1, (until - ask.computed) * TOKENS)
        ask.computed = until
        ask.know(until, self._groups)

    def _admit(self, plan: _Plan) -> None:
        """vLLM asks for each request that waits, in their order, while one more may run."""
        for ask in self.asks:
            is_full = sum(one.phase in (LOADING, ARRIVED, RUNNING) for one in self.asks) >= RUNNING_MAX
            if ask.phase is WAITING and not ask.copies and not is_full:
                self._look(ask)
            if ask.phase is ARRIVED:
                (plan.resumed if ask.has_run else plan.new).append(ask)
                ask.phase, ask.has_run, ask.computed = RUNNING, True, ask.hit
                self._run(plan, ask)

    def _look(self, ask: Ask) -> None:
        ask.know(ask.prompt, self._groups)
        hit = self._hit(ask)
        if hit is None or self._source.random() < 0.1:  # or the GPU has no room for it
            return
        ask.hit = ask.local + hit
        if not hit:
            ask.phase = ARRIVED
            return
        keys = self._keys_of_hit(ask)
        spec = self.manager.prepare_load(keys, ask.context)
        rows = dict(zip(keys, map(int, spec.chunk_ids), strict=True))
        self._check_rows(rows)
        ask.phase, ask.stored = LOADING, ask.hit
        self._loading.update(keys)
        self._begin_copy(ask, set(keys), rows, is_load=True)
        self.counts["hits"] += len(keys)

    def _keys_of_hit(self, ask: Ask) -> list[Any]:
        return [
            ask.key(group, place)
            for group in self._groups
            for place in range(ask.local if group.window_rows is None else ask.hit - group.window_rows, ask.hit)
        ]

    def _hit(self, ask: Ask) -> int | None:
        """Rows behind those of the GPU that can be loaded, as ``_lookup_complete_chunks``; None: ask again."""
        full = [one for one in self._groups if one.window_rows is None]
        states = [one for one in self._groups if one.window_rows is not None]
        most, hit, is_later = ask.known, 0, False
        wanted = [*full, *states]
        while wanted:
            groups, wanted = wanted, []
            for group in groups:
                if most - ask.local < 1:
                    return 0
                keys = [ask.key(group, place) for place in range(ask.local, most)]
                look = self._prefix if group.window_rows is None else self._last_state
                found = look(keys, ask.context)
                if found == 0:
                    return 0
                if found is None:
                    is_later = True
                else:
                    most = min(most, ask.local + found)
                if most - ask.local < hit and is_later:
                    is_later, wanted = False, [*full, *states]
                hit = most - ask.local
        if is_later:
            return None
        keys = [ask.key(group, place) for group in full for place in range(ask.local, ask.local + hit)]
        return None if any(self._loading[key] for key in keys) else hit

    def _prefix(self, keys: list[Any], context: Any) -> int | None:
        hits, is_later = 0, False
        for key in keys:
            answer = self.manager.lookup(key, context)
            if answer is LookupResult.MISS:
                break
            is_later |= answer is not LookupResult.HIT
            hits += answer is not LookupResult.RETRY
        return None if is_later else hits

    def _last_state(self, keys: list[Any], context: Any) -> int | None:
        is_later = False
        for place in range(len(keys) - 1, -1, -1):
            answer = self.manager.lookup(keys[place], context)
            if answer is LookupResult.RETRY:
                is_later = True
            elif answer is not LookupResult.MISS:
                return None if is_later or answer is LookupResult.HIT_PENDING else place + 1
        return None if is_later else 0

    def _output(self, plan: _Plan) -> Any:
        """What vLLM tells of a step, as far as the tier reads it."""
        cached = [ask for ask in self.asks if ask.name in plan.tokens and ask not in plan.new]
        return SimpleNamespace(
            finished_req_ids={ask.name for ask in self._over},
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=ask.name, prompt_len=ask.prompt * TOKENS, num_computed_tokens=plan.before[ask.name]
                )
                for ask in plan.new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[ask.name for ask in cached],
                num_computed_tokens=[plan.before[ask.name] for ask in cached],
                resumed_req_ids={ask.name for ask in plan.resumed},
            ),
            num_scheduled_tokens=plan.tokens,
        )

    # -- the worker --------------------------------------------------------------------------------------------------

    def _offer(self) -> None:
        """Offer what was computed to vLLM's host memory, whose manager offers it to the tier once it is there."""
        for ask in self.asks:
            until = ask.computed
            if ask.is_told or ask.stored >= until:
                continue
            keys = [ask.key(group, place) for group in self._groups for place in self._stored_places(ask, group)]
            made = self.manager.prepare_store(keys, ask.context)
            if made is None:
                self.counts["no_room"] += 1
                continue
            ask.stored = until
            if made.keys_to_store:
                rows = zip(made.keys_to_store, map(int, made.store_spec.chunk_ids), strict=True)
                self._begin_copy(ask, set(made.keys_to_store), dict(rows), is_load=False)

    def _stored_places(self, ask: Ask, group: RowGroup) -> Iterable[int]:
        """Of a state only that at the end of a step, or of the prompt."""
        places = range(ask.stored, ask.computed)
        return places if group.window_rows is None else places[-1:]

    def _begin_copy(self, ask: Ask, keys: set[Any], rows: dict[Any, int], *, is_load: bool) -> None:
        ask.copies += 1
        self._copies.append(_Copy(ask, keys, rows, is_load, self._source.randrange(1, COPY_STEPS_MAX)))

    def _copy(self, copies: list[_Copy]) -> None:
        """These end now."""
        for one in copies:
            self._copies.remove(one)
            one.ask.copies -= 1
            if one.is_load:
                self._check_rows(one.rows)
                self._loading.subtract(one.keys)
                self.manager.complete_load(one.keys, one.ask.context)
                if one.ask.phase is LOADING:
                    one.ask.phase = ARRIVED
            else:
                for key, row in one.rows.items():
                    self.watch.write(row, content(key, self.weights))
                self.manager.complete_store(one.keys, one.ask.context)

    def _check_rows(self, rows: dict[Any, int]) -> None:
        wrong = [row for key, row in rows.items() if not self.watch.is_of(row, key, self.weights)]
        assert not wrong, f"the GPU reads wrong rows. rows={wrong}"

    # -- resets ------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """The model gets new weights: vLLM preempts all, and empties its caches."""
        self._copy([one for one in self._copies if one.is_load])  # vLLM resets nothing while it loads
        for one in self._copies:
            one.ask.copies -= 1
        self._copies = []
        for ask in self.asks:
            if ask.phase in (RUNNING, ARRIVED):
                if ask.phase is RUNNING:
                    self._preempted.append(ask)
                self._back(ask)
            ask.local = ask.stored = 0
            if ask.phase is OVER and not ask.is_told:
                ask.is_told = True
                self.manager.on_request_finished(ask.context)
        self._over = []
        self.asks = [ask for ask in self.asks if ask.phase is not OVER]
        self.manager.reset_cache()
        assert not self.watch.lent, "a load runs on in memory that was reset"
        self.weights = uuid4().hex
        self.counts["resets"] += 1
        self.check()

    def forget(self) -> None:
        """An idle engine's rows are taken for others, all of them."""
        assert self.is_idle
        self.primary.reset_cache()

    def close(self) -> None:
        """The engine ends, whatever runs."""
        self.watch.memory = np.empty((0, 0), np.uint8)  # vLLM unmaps it
        self.asking.let_go()
        self.manager.shutdown()

    def state(self) -> dict[str, Any]:
        """What is not over, for a message."""
        asks = [
            (ask.phase, ask.prompt, len(ask.rows), ask.local, ask.hit, ask.computed, ask.copies) for ask in self.asks
        ]
        held = {name: getattr(self.tier, name) for name in ("_hits", "_parts", "_ended", "_refusal")}
        jobs = None if self.tier._jobs is None else self.tier._jobs
        return {
            "asks": asks,
            "copies": len(self._copies),
            "wanted": len(self.asking.wanted),
            "tier": held,
            "jobs": jobs and (jobs.is_ready, jobs._jobs),
        }

    # -- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare all rows, and the tier's accounts."""
        self.watch.check()
        for key, data in self.asking.got.items():
            expected = content(key, self.weights).tobytes()
            right = all(data[at : at + size] == expected[at : at + size] for at, size in self.watch.spans(key))
            assert right, f"another engine got wrong bytes. key={key.hex()}"
        self.counts["given"] += len(self.asking.got)
        self.asking.got = {}
        if self.is_served:
            self.durable = self.weights
        for key, chunk in self.primary._policy.chunks.items():
            if chunk.is_ready:
                assert self.watch.is_of(chunk.chunk_id, key, self.weights), f"wrong bytes are ready. key={key.hex()}"
        check_accounts(self.tier)
