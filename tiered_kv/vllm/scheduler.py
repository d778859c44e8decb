"""The scheduler side: decides what each request loads and stores.

Lives in vLLM's engine loop, so nothing here waits or touches a tier: every answer comes from local state, which
:meth:`SchedulerSide.poll` brings up to date without blocking (rule 2). What each part does::

    RequestLookups        asks the server for a request's chunks, and keeps the answers fresh
    WaitingQueue          whose turn it is among the requests that vLLM has not admitted
    WaitPolicy            whether waiting for chunks on their way pays
    LoadAdmission         which loads may be in flight together
    DisaggregatedPrefill  what a producer promises with its answer, and how long a consumer waits for it
    RequestSaves          which chunks of a request are stored
    SaveQueue             chunks on their way into slots, and the pins of their blocks
    UndraftedBlocks       blocks that lack the draft's KV, which are not stored
    RequestPins           pins that requests ask for, and what is told of users' sessions

This module decides what a request is offered, plans its load, and follows it to its end.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tiered_kv.config import Config
from tiered_kv.server.client import SchedulerClient
from tiered_kv.tiering.types import PROGRESS_INTERVAL_S, LookupAnswer
from tiered_kv.vllm.compat import PagedBlocks, RequestStatus, ask_for_state
from tiered_kv.vllm.disaggregated import DisaggregatedPrefill
from tiered_kv.vllm.engine_role import EngineRole
from tiered_kv.vllm.identity.adapters import Adapters
from tiered_kv.vllm.kv_groups import BlockTables, CacheGroups
from tiered_kv.vllm.load_admission import LoadAdmission
from tiered_kv.vllm.request_extras import RequestExtras
from tiered_kv.vllm.request_lookups import RequestLookups
from tiered_kv.vllm.request_params import RequestParamsReader
from tiered_kv.vllm.request_pins import RequestPins, SessionEnd
from tiered_kv.vllm.request_saves import RequestSaves
from tiered_kv.vllm.requests import FoundTail, RequestState, SentLookup, Wait
from tiered_kv.vllm.resets import let_go_of_blocks, wait_until_durable
from tiered_kv.vllm.save_queue import SaveQueue
from tiered_kv.vllm.step import ChunkCopy, LoadJob, SaveReport, StepMetadata
from tiered_kv.vllm.undrafted import UndraftedBlocks
from tiered_kv.vllm.wait_policy import REPLY_MAX_S, PrefillRate, WaitingQueue, WaitPolicy, WaitState
from tiered_kv.vllm.worker import WorkerSide


class SchedulerSide:
    """One engine's scheduler-side state.

    Attributes:
        counters: What happened, by name; every part adds to it, ``engine_metrics.py`` reads it.
        saves: The save queue, which pins vLLM's blocks.

    Of its own it has the requests (``_requests``, from arrival until the request is over and nothing copies into its
    blocks), the keys being loaded, each as often as requests load it (``_loading``), and the load jobs that leave with
    the next step (``_loads``). The fields of a request are written by the parts that :class:`RequestState` names.

    Threads: vLLM's scheduler thread only.
    """

    def __init__(
        self,
        config: Config,
        client: SchedulerClient,
        adapters: Adapters,
        groups: CacheGroups,
        role: EngineRole,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._adapters = adapters
        self._groups = groups
        self._chunk_tokens = config.chunk_tokens
        self._role = role
        self._monotonic = monotonic
        self._requests: dict[str, RequestState] = {}
        self._loading: Counter[bytes] = Counter()
        self._loads: list[LoadJob] = []
        self._blocks: PagedBlocks | None = None
        self.counters: Counter[str] = Counter()
        self._params_reader = RequestParamsReader(
            self.counters, monotonic, config.peers or (), sessions_need_owner=config.sessions_need_owner
        )
        self.prefill = PrefillRate()
        self._wait_policy = WaitPolicy(self.prefill, config.promotion_wait_ms, config.promotion_deadline_ms)
        longest_s = config.promotion_deadline_ms / 1e3
        self._waiting_queue = WaitingQueue(monotonic, longest_s, is_by_priority=role.is_by_priority)
        self._admission = LoadAdmission(groups, role.step_tokens, self.counters)
        self.saves = SaveQueue(config, client, groups, self.counters, monotonic)
        self._lookups = RequestLookups(
            config, client, groups, role, self.saves, self._waiting_queue, self.counters, monotonic
        )
        self._undrafted = UndraftedBlocks(role.drafts, groups)
        self._request_saves = RequestSaves(
            config, client, role, groups, self._lookups, self.saves, self._undrafted, self.counters
        )
        self._pins = RequestPins(client, self.saves, self.counters)
        self._disaggregated = DisaggregatedPrefill(
            config, client, groups, role, self._lookups, self.prefill, self.counters, monotonic
        )

    def bind_block_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool, whose blocks saves pin."""
        self._blocks = PagedBlocks(block_pool)
        self._admission.set_pool(self._blocks.count - 1)  # less the null block
        self._lookups.bind_block_pool(block_pool)
        self.saves.bind_block_pool(block_pool)

    def state(self, request_id: str) -> RequestState | None:
        """State of a request, to be read only."""
        return self._requests.get(request_id)

    # -- offer -------------------------------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """A request is new: compute its keys and send its lookup, so that the answer is here when vLLM asks."""
        traits = {"has_drafts": self._role.has_drafts, "has_media_hashes": self._role.has_media_hashes}
        extras = RequestExtras(request, self._chunk_tokens, self._adapters, **traits)
        state = RequestState(request, extras, self._params_reader.read(request))
        self._requests[request.request_id] = state
        if not extras.is_accountable:
            self._lookups.left_alone(extras.reason, since="")
        self.counters["requests_reading_nothing"] += state.reads_nothing
        self.poll()
        self._client.wake()  # also for a request that is stored and not looked up
        if state.params.prefetches:
            self._pins.prefetch(state.params.prefetches, state.params.tag)
        self._waiting_queue.add(state)
        self._lookups.send_for_new(state)

    def goes_on_waiting(self, request: Any, computed_tokens: int) -> bool:
        """Whether the answer is "ask again" because it was, and nothing has changed since.

        Most questions of a wait are answered so; :meth:`matched_tokens` would answer the same, by a longer way. An
        engine of short steps asks a hundred times for what comes in a few parts, and from one step to the next the
        processor's caches forget us: what counts is how little is touched here, functions included.
        """
        state, client = self._requests.get(request.request_id), self._client
        if state is None:
            return False
        if client.has_news():
            if state.wait is None:
                return False
            self.poll()
        now_s, wait, lookup = self._monotonic(), state.wait, state.lookup
        if wait is None:
            return lookup is None and self._goes_on_hashing(state, now_s)
        return (
            lookup is wait.lookup
            and client.lookups.get(lookup.id) is wait.answer
            and now_s + (now_s - state.asked_s if wait.looks_ahead else 0.0) <= wait.until_s
            and not lookup.given_up
            and lookup.generation == client.generation
            and state.renewal is None
            and state.keys is wait.keys
            and state.turn_s == wait.turn_s
            and state.prompt_tokens == request.num_prompt_tokens
            and wait.tokens == request.num_tokens
            and wait.computed == computed_tokens
            and wait.tokens_per_s == self.prefill.tokens_per_s
            and not client.is_silent
            and not self._lookups.hashing
            and state.extras.may_look_up
            and self._waiting_queue.goes_on(state, now_s)
        )

    def _goes_on_hashing(self, state: RequestState, now_s: float) -> bool:
        """The same of a request whose keys are being computed."""
        if not self._lookups.awaits_keys(state, now_s) or not state.may_read:
            return False
        if not self._waiting_queue.goes_on(state, now_s):
            return False
        self._waiting_queue.begin_turn(state)
        return True

    def matched_tokens(self, request: Any, computed_tokens: int) -> int | None:
        """Tokens beyond ``computed_tokens`` that can be loaded; None to be asked again at the next step.

        Called every step for every request that waits, as far as vLLM gets; sends something once per turn at most. vLLM
        discards the answer where the request may not read prefix caches.
        """
        state = self._requests.get(request.request_id)
        if state is None or not self._role.may_load or state.is_load_failed or not state.may_read:
            return None if state is not None and state.queue_again_once() else 0
        matched = self._matched_tokens(state, computed_tokens)
        return self._disaggregated.matched(state, computed_tokens, matched)

    def _matched_tokens(self, state: RequestState, computed_tokens: int) -> int | None:
        """The same by what the server holds."""
        if state.has_new_input and self._lookups.keys(state) is None:
            self._lookups.drop(state)
            return 0
        self.poll()
        self._waiting_queue.asked(state)
        state.wait = None
        self._lookups.take_renewal(state)
        lookup = state.lookup
        if lookup is None or lookup.start * self._chunk_tokens > computed_tokens:
            self._lookups.ask_anew(state)  # the GPU evicted what it had when the lookup was sent
            lookup = self._lookups.send(state, computed_tokens // self._chunk_tokens)
            self._waiting_queue.begin_turn(state)
        if lookup is not None and self._groups.states:
            self._ask_for_state_at_fork(state, lookup, computed_tokens)
        if lookup is None and self._lookups.sends_soon(state):
            self._waiting_queue.hold_up_others()
            return None
        if lookup is None or lookup.given_up:
            return 0
        answer = self._lookups.answer(state, lookup)
        has_all = self._has_all(state, lookup, computed_tokens)
        if has_all and not (answer is None and self._needs_held(state)):
            return 0
        if answer is None:
            matched = self._lookups.unanswered(state, lookup)
            if matched is None and not has_all:
                self._note_wait(state, lookup, computed_tokens, lookup.sent_s + self._lookups.timeout_s)
        elif answer.in_line and self._wait_policy.may_wait and self._waiting_queue.is_held_up(state):
            return None
        elif self._lookups.awaits_renewal(state, lookup, answer):
            matched = None
        else:
            matched = self._offer(state, lookup, answer, computed_tokens)
        if matched is None:
            self._waiting_queue.hold_up_others()
        return matched

    def _awaits_more(
        self,
        state: RequestState,
        lookup: SentLookup,
        answer: LookupAnswer,
        progress: tuple[int, Sequence[tuple[int, float | None]], int],
        computed: int,
    ) -> bool:
        """Whether a request waits for more; then it is noted. ``progress``: arrived tokens, parts, unknown tokens.

        Of parts of many chunks the server tells only from when the end of the wait is near: most end before, by all
        being here. Without that the request would go on without what has come since; so it does not before it has an
        answer, unless what it knows is new.
        """
        assert state.turn_s is not None, "a wait of a request that vLLM does not ask for"
        now_s, told_s = self._monotonic(), self._client.told_s[lookup.id]
        wait = WaitState(told_s - state.turn_s, *progress, answer.search_s)
        until_s = state.turn_s + self._wait_policy.longest_s(wait)
        if not lookup.is_followed:
            if now_s > until_s and now_s <= told_s + PROGRESS_INTERVAL_S:
                return False
            if now_s + state.step_s <= until_s - PROGRESS_INTERVAL_S:
                self._note_wait(state, lookup, computed, until_s - PROGRESS_INTERVAL_S, looks_ahead=True)
                return True
            self._lookups.follow(lookup, answer)
        if lookup.followed_s is not None and answer is lookup.followed:
            until_s = max(until_s, lookup.followed_s + REPLY_MAX_S)
        if now_s > until_s:
            return False
        self._note_wait(state, lookup, computed, until_s)
        return True

    def _note_wait(
        self, state: RequestState, lookup: SentLookup, computed: int, until_s: float, *, looks_ahead: bool = False
    ) -> None:
        """Remember how long a request waits, unless more than is compared may end that.

        Where it waits for room among leases, others do; and where there are states, each question asks vLLM for one. A
        session that was lost as the server was asked what is ready has no answer any more, as the next question finds.
        """
        answer, request = self._client.lookups.get(lookup.id), state.request
        if answer is not None and not answer.in_line and not self._groups.states:
            asked = (lookup, answer, state.keys, computed, request.num_tokens, state.turn_s, self.prefill.tokens_per_s)
            state.wait = Wait(*asked, until_s, looks_ahead)

    def _needs_held(self, state: RequestState) -> bool:
        """Whether the request is not admitted before it is known what is held of it.

        Chunks are queued once that is known; where windows pass, vLLM may have taken their blocks back by then.
        """
        return self._groups.has_windows and self._may_store(state)

    def _has_all(self, state: RequestState, lookup: SentLookup, computed_tokens: int) -> bool:
        """Whether the GPU has all that a hit could reach if everything were held, so that no answer could add to it."""
        if lookup.asked is not None:
            return computed_tokens >= lookup.asked * self._chunk_tokens
        held = len(state.keys.keys if state.keys else ()) * self._chunk_tokens
        tokens = state.request.num_tokens
        return computed_tokens >= self._groups.loadable_tokens(held, tokens, self._chunk_tokens, self._role.drafts)

    def _may_store(self, state: RequestState) -> bool:
        """Whether what is computed for the request may be stored, as far as is known."""
        is_asked_for = self._role.may_store and not state.params.skips_save
        return is_asked_for and state.extras.may_store and not state.is_from_before_reset

    def _ask_for_state_at_fork(self, state: RequestState, lookup: SentLookup, computed: int) -> None:
        """Have vLLM keep a state where the prompt leaves what is held, so that the next prompt goes on from there.

        vLLM does so at forks that its own cache knows; what is held may be of an earlier engine, or of another machine.
        Asked for each time, also when the lookup was given up: until it admits the request, vLLM begins anew.
        """
        if not lookup.given_up:
            state.fork = self._fork(state, lookup)
        if state.fork <= computed or not ask_for_state(state.request, state.fork):
            state.fork = 0

    def _fork(self, state: RequestState, lookup: SentLookup) -> int:
        """The last boundary that the prompt shares with what is held, where that has no state; 0: none is missing.

        Also where the prompt is held whole. vLLM keeps a state at its last boundary by itself, but not where its CPU
        build runs the scheduler in a process of its own and no block size was given: that takes half a block for one
        (0.32: ``EngineCoreProc`` ends with ``VllmConfig.__post_init__``, which resets ``cache_config.block_size``).
        """
        answer = self._lookups.answer(state, lookup)
        if answer is None or answer.is_ended or answer.unknown or answer.queued or lookup.asked is None:
            return 0
        if not self._may_store(state):
            return 0
        held = answer.held
        if held < lookup.asked and self._role.drafts is not None:
            held -= self._role.drafts.drops_block  # the prompt leaves it there, and vLLM computes its last block again
        chunks = min(held, self._client.chunks_leased_max - len(self._groups.states))  # of use to a lookup at all
        return chunks * self._chunk_tokens if answer.boundary < chunks else 0

    def _offer(self, state: RequestState, lookup: SentLookup, answer: LookupAnswer, computed: int) -> int | None:
        held = min(len(state.keys.keys) if state.keys else 0, answer.held) * self._chunk_tokens
        tokens = state.request.num_tokens
        limit = self._groups.loadable_tokens(held, tokens, self._chunk_tokens, self._role.drafts)

        coming = self._lookups.coming_tail(state, lookup, answer) if state.tails else None

        def beyond(slots: int) -> int:
            """Tokens behind ``computed`` that so many of the answer's slots give, or these and a tail."""
            if coming is not None and slots > len(answer.slots):
                return coming.chunk * self._chunk_tokens + coming.tokens - computed
            if not self._groups.states:
                return min((lookup.start + slots) * self._chunk_tokens, limit) - computed
            wanted = answer.boundary - lookup.start + len(self._groups.states)
            return answer.boundary * self._chunk_tokens - computed if answer.boundary and slots == wanted else 0

        if self._groups.states and computed % self._chunk_tokens:
            self._lookups.give_up(lookup)  # vLLM goes on inside a block, from a state that only it has
            return 0
        arrived, promised = beyond(answer.ready), beyond(len(answer.slots) + (coming is not None))
        if state.tails and (tail := self._lookups.tail(state, lookup, answer)) is not None:
            arrived = max(arrived, tail.chunk * self._chunk_tokens + tail.tokens - computed)
        unknown = (answer.unknown + answer.queued) * self._chunk_tokens
        if not answer.is_done and promised + unknown > max(arrived, 0):
            parts = [(beyond(answer.ready + slots) - max(arrived, 0), eta_s) for slots, eta_s in answer.parts]
            assert state.turn_s is not None, "an offer to a request that vLLM does not ask for"
            if self._awaits_more(state, lookup, answer, (max(arrived, 0), parts, unknown), computed):
                return None
        if arrived <= 0:
            if self._disaggregated.awaits(state, computed):
                return 0  # it is asked anew; a lookup that was given up counts
            if promised + unknown > 0:
                self.counters["promotion_not_awaited"] += 1
            self._lookups.give_up(lookup)
            return 0
        place = computed // self._chunk_tokens
        first = state.keys.keys[place : place + 1] if state.keys else []  # none where a tail is all that is loaded
        if first and self._loading[first[0]] and self._role.has_prefix_caching:
            return None  # another request is loading it: soon it is a GPU prefix cache hit
        if not self._admission.admits(state.request.request_id, state.request.num_tokens, computed + arrived):
            return None
        state.offer = (computed, arrived)
        return arrived

    # -- load --------------------------------------------------------------------------------------------------

    def allocated(self, request: Any, tables: BlockTables, external_tokens: int) -> None:
        """Blocks for a request exist, per KV cache group: plan its load, if it has one."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        self._waiting_queue.remove(request.request_id)
        self._lookups.drop_renewal(state)
        self.counters["state_forks"] += bool(state.fork)
        state.fork = 0
        if external_tokens == 0:
            if not state.is_loading:
                self._lookups.admitted_without(state)
            return
        lookup = state.lookup
        computed, offered = state.offer
        assert lookup is not None, "a load without a lookup"
        assert external_tokens <= offered, "more tokens to load than were offered"
        answer = self._client.lookups.get(lookup.id) if lookup.generation == self._client.generation else None
        end = computed + external_tokens
        copies, tail = None, None
        if answer is not None and not answer.is_ended:
            self._client.claim(lookup.id)
            tail = self._lookups.tail(state, lookup, answer)
            tail = tail if tail is not None and end > tail.chunk * self._chunk_tokens else None
            copies = self._load_copies(lookup, answer, tail, tables, (computed, end))
            self.counters["tail_loads"] += tail is not None and copies is not None
            self.counters["load_window_unknown"] += copies is None
            self._undrafted.loaded(tables, computed, end)
        # Without copies - the session was lost since the offer - the job fails, and vLLM recomputes the request.
        first, last = computed // self._chunk_tokens, -(-end // self._chunk_tokens)
        state.loading_keys = [*(state.keys.keys[first:last] if state.keys else ()), *([tail.key] if tail else ())]
        state.loading_lookup, state.lookup, state.loaded_tokens = lookup, None, end
        self._loading.update(state.loading_keys)
        self._waiting_queue.load_began(request.request_id)
        self._admission.begin(request.request_id, request.num_tokens, end)
        self._loads.append(LoadJob(request.request_id, lookup.generation, copies or ()))
        self.counters["loads"] += 1
        self.counters["load_tokens"] += external_tokens

    def _load_copies(
        self,
        lookup: SentLookup,
        answer: LookupAnswer,
        tail: FoundTail | None,
        tables: BlockTables,
        span: tuple[int, int],
    ) -> tuple[ChunkCopy, ...] | None:
        """Copies for the tokens of a span, with the states or the tail at its end; None where not all can be filled."""
        slots = answer.slots
        if tail is not None and tail.slot is not None:
            slots = (*answer.slots[: answer.ready], tail.slot)
        copies = self._groups.load_copies(slots, tables, lookup.start, span, self._chunk_tokens)
        if not self._groups.states or copies is None:
            return copies
        if span[1] != answer.boundary * self._chunk_tokens:
            return None  # vLLM took less than was offered, and no state is there
        slots = answer.slots[answer.boundary - lookup.start :]
        states = self._groups.state_copies(slots, tables, span[1] // self._chunk_tokens)
        return None if states is None else copies + states

    def loads_finished(self, request_ids: set[str], failed_ids: set[str]) -> set[str]:
        """Every rank has reported these loads; nothing copies from their slots any more.

        Returns those that vLLM must not hear of: while they ran a reset came or the request's adapter changed, or their
        leases ended before the server heard that they began. They are reported again, as failed.
        """
        stale: set[str] = set()
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is None or state.loading_lookup is None:
                continue  # another connector's request
            self._loading.subtract(state.loading_keys)
            self._loading += Counter()  # forget keys at zero
            self._waiting_queue.load_ended(request_id)
            if request_id not in failed_ids and not self._is_right(state, state.loading_lookup):
                state.is_load_stale = True
            if state.loading_lookup.generation == self._client.generation:
                self._client.release(state.loading_lookup.id)
            state.loading_keys = ()
            is_stale = state.is_load_stale or not state.extras.may_look_up
            if is_stale and not state.is_finished and request_id not in failed_ids:
                state.is_load_stale = False
                stale.add(request_id)
                self._loads.append(LoadJob(request_id, self._client.generation, ()))  # without copies: it fails
                continue
            state.loading_lookup = None
            if request_id in failed_ids:
                # vLLM asks again for a request whose load failed; without this memory it would load and fail for ever.
                state.is_load_failed = True
                self.counters["loads_failed"] += 1
            if state.is_finished:
                self._admission.leave(request_id)
                del self._requests[request_id]
            elif state.is_load_failed:
                self._admission.begin(request_id, state.request.num_tokens, 0)
        self._rest_when_idle()
        return stale

    def _is_right(self, state: RequestState, lookup: SentLookup) -> bool:
        """Whether the leases held until the load had begun, so that its bytes are right."""
        is_leased = self._client.is_leased(lookup.id, lookup.generation)
        self.counters["loads_too_late"] += bool(state.loading_keys) and not is_leased
        return is_leased or not state.loading_keys

    # -- every step --------------------------------------------------------------------------------------------

    def plan_step(self, output: Any) -> StepMetadata:
        """Work for the workers in this step."""
        self.poll()
        self.prefill.step(self._monotonic(), output.num_scheduled_tokens, self._requests)
        self._admission.leave(*output.num_scheduled_tokens)
        self._lookups.keep_fresh(self._waiting_queue.end_step())
        for request_id in output.preempted_req_ids or ():
            self._preempted(request_id, is_back=request_id in output.num_scheduled_tokens)
        self._undrafted.step(self._requests, output)
        states = map(self._requests.get, output.num_scheduled_tokens)
        if self._adapters.take_step(state.request.lora_request is not None for state in states if state):
            self._check_adapters()
        self._request_saves.step(self._requests, output)
        saves = self.saves.start_jobs()
        is_standing = not output.num_scheduled_tokens
        keeps_blocks = self.saves.has_waiting or (is_standing and self.saves.passed.blocks)
        if keeps_blocks and self._is_short_of_blocks(output):
            self.saves.make_room(is_standing=is_standing)
        self._pins.send()  # chunks that they waited for may have been dropped
        loads, self._loads = tuple(self._loads), []
        self._rest_when_idle()
        return StepMetadata(self._client.generation, self._client.info, loads, saves)

    def _preempted(self, request_id: str, *, is_back: bool) -> None:
        """vLLM took the request's blocks away; when it comes back, it loads the part that was stored meanwhile.

        After a reset of the GPU's cache it may be back in the very step that reports the preemption: then it waits for
        nothing.
        """
        if (state := self._requests.get(request_id)) is None:
            return
        self._request_saves.preempted(state)
        if is_back:
            return
        state.was_preempted = True
        self._lookups.drop(state)
        self._waiting_queue.add(state)
        if self._role.may_load and not state.is_load_failed:
            self._lookups.send_for_new(state)

    def _is_short_of_blocks(self, output: Any) -> bool:
        """Whether a request waits that does not fit into the free blocks; vLLM has no hook for that."""
        assert self._blocks is not None
        free = self._blocks.free
        return any(
            self._groups.whole_blocks(state.request.num_tokens) > free
            for request_id, state in self._requests.items()
            if state.request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            and request_id not in output.num_scheduled_tokens
            and not state.is_loading
        )

    def saves_finished(self, report: SaveReport) -> None:
        """Take the ranks' reports: save jobs that ended, and adapters loaded, which come no later than their copies."""
        if report.adapters:
            if self._adapters.take_reports(report.adapters):
                self.saves.reset()  # copies under way may be of either
            self._check_adapters()
        self.saves.finished(report)
        self._pins.send()
        self._rest_when_idle()

    def _rest_when_idle(self) -> None:
        """Without requests vLLM stops to step, and nobody answers the server when it wants slots back."""
        if not self._requests and not self.saves.has_work:
            self._client.rest()

    def _check_adapters(self) -> None:
        for state in self._requests.values():
            if state.extras.loses_adapter():
                self._lookups.left_alone(state.extras.reason)

    def finish_request(self, request: Any, tables: BlockTables) -> dict[str, Any] | None:
        """A request is over, for whatever reason; a load of it may still be running.

        Chunks that wait for a slot, or were completed since the last step, are pinned: their blocks are still whole.
        Returns what the request's answer carries to another engine, if one goes on with it.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            return None
        if request.num_output_tokens:  # not one that was aborted while its first step ran
            self.prefill.finished(self._monotonic(), request.request_id)
        if not state.is_loading:
            self._request_saves.finish(state, tables)
        self.saves.passed.let_go(request.request_id)
        if state.params.session:
            self._tell_session(state)  # before pins: what these touch is not taken for the session's own
        if state.params.pin_ttl_s is not None:
            self._pin_prompt(state, state.params.pin_ttl_s)
        self._lookups.ended(state)
        self._waiting_queue.remove(request.request_id)
        state.is_finished = True
        if not state.is_loading:  # or its load still holds its blocks
            self._admission.leave(request.request_id)
            del self._requests[request.request_id]
        promise = self._disaggregated.promise(state)
        if promise is not None:
            self._pin_prompt(state, 0)  # where only second touches are written, the other engine's would come too late
        return promise

    def _tell_session(self, state: RequestState) -> None:
        """Tell how far the user's session has come, and that it has ended if it has, once its chunks are stored."""
        params = state.params
        keys = None if state.is_from_before_reset else self._lookups.keys(state)
        if keys is not None:
            self._lookups.update_held(state)
        names = keys.keys if keys is not None else []
        self._pins.want_state(names, state.held, SessionEnd(params.session, params.tag, params.session_hints))

    def _pin_prompt(self, state: RequestState, ttl_s: float) -> None:
        """Pin the prompt's chunks once they are stored; with a time of 0 they are only written at once."""
        keys = None if state.is_from_before_reset else self._lookups.keys(state)
        if keys is None:
            self.counters["pins_dropped"] += 1
            return
        self._lookups.update_held(state)
        prompt = keys.keys[: state.request.num_prompt_tokens // self._chunk_tokens]
        self._pins.want(prompt, state.held, ttl_s, state.params.tag)

    def poll(self) -> None:
        """Take the server's messages; never blocks."""
        generation = self._client.generation
        self._client.poll()
        if self._client.generation != generation:
            self.counters["sessions_lost"] += 1
            self.saves.session_lost()
        self._lookups.send_hashed()

    def reset(self) -> None:
        """The weights changed: nothing stored before may be loaded again, nothing computed before may be stored.

        Waits for the server to make it last, seconds at most.
        """
        for state in self._requests.values():
            state.is_from_before_reset = True
            self._lookups.drop(state)
            state.is_load_stale = state.is_loading
        self.saves.reset()
        self._pins.reset()
        self._client.reset()
        wait_until_durable(self._client, self.poll)

    def let_go_of_blocks(self, worker: WorkerSide | None) -> None:
        """End pins of blocks before vLLM empties its pool, with the copies of a worker in this process."""
        let_go_of_blocks(self.saves, worker, self.saves_finished)
        self._pins.send()

    @property
    def client(self) -> SchedulerClient:
        """This engine's session with the server."""
        return self._client

    @property
    def has_work(self) -> bool:
        """Whether blocks are pinned or copies run, so that the engine must keep stepping."""
        return self.saves.has_work or any(state.is_loading for state in self._requests.values())

    def close(self) -> None:
        """End the session. Idempotent."""
        self._client.close()
        self._lookups.close()
