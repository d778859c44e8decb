"""The scheduler's side: which chunks a request loads, which it stores, and who holds what until that is done.

Lives in vLLM's engine loop, so nothing here waits or touches a tier: every answer comes from local state, which
:meth:`SchedulerSide.poll` brings up to date without blocking (DESIGN rule 2). Stores are in ``stores.py``.
"""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import RequestStatus

from tiered_kv.config import Config
from tiered_kv.server.client import LookupAnswer, SchedulerClient
from tiered_kv.vllm.adapters import Adapters, Unaccountable
from tiered_kv.vllm.controls import ControlReader
from tiered_kv.vllm.extras import RequestExtras
from tiered_kv.vllm.groups import BlockTables, CacheGroups
from tiered_kv.vllm.metadata import LoadJob, SaveReport, StepMetadata
from tiered_kv.vllm.pins import PinRequests
from tiered_kv.vllm.requests import Lookup, RequestState
from tiered_kv.vllm.resets import wait_until_durable
from tiered_kv.vllm.room import LoadRoom
from tiered_kv.vllm.storable import storable_tokens
from tiered_kv.vllm.stores import ALL_DONE, Stores
from tiered_kv.vllm.turns import FRESH_S, Turns
from tiered_kv.vllm.waiting import Patience, PrefillRate, Wait

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What this engine does with the cache, from its ``kv_role`` and its own settings."""

    may_load: bool
    may_store: bool
    has_prefix_caching: bool
    has_drafts: bool = False
    has_media_hashes: bool = True
    is_by_priority: bool = False
    step_tokens: int = 8192


class SchedulerSide:
    """One engine's scheduler-side state.

    Threads: vLLM's scheduler thread only.
    """

    def __init__(
        self,
        config: Config,
        client: SchedulerClient,
        adapters: Adapters,
        groups: CacheGroups,
        abilities: Abilities,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._client = client
        self._adapters = adapters
        self._groups = groups
        self._chunk_tokens = config.chunk_tokens
        self._abilities = abilities
        self._monotonic = monotonic
        self._requests: dict[str, RequestState] = {}
        self._loading: Counter[bytes] = Counter()
        self._loads: list[LoadJob] = []
        self._resets = 0
        self._block_pool: Any = None
        self.prefill = PrefillRate()
        self._patience = Patience(self.prefill, config.promotion_wait_ms, config.promotion_deadline_ms)
        longest_s = config.promotion_deadline_ms / 1e3
        self._turns = Turns(monotonic, longest_s, is_by_priority=abilities.is_by_priority)
        self.counters: Counter[str] = Counter()
        self.stores = Stores(config, client, groups, self.counters, monotonic)
        self._controls = ControlReader(self.counters, monotonic)
        self._pins = PinRequests(client, self.stores, self.counters)
        self._room = LoadRoom(groups, abilities.step_tokens, self.counters)

    def bind_block_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool, whose blocks stores pin."""
        self._block_pool = block_pool
        self._room.set_pool(block_pool.num_gpu_blocks - 1)  # less the null block
        self.stores.bind_block_pool(block_pool)

    def state(self, request_id: str) -> RequestState | None:
        """What is remembered of a request, for those who only look."""
        return self._requests.get(request_id)

    # -- lookup ------------------------------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """A request is new: compute its keys and send its lookup, so that the answer is here when it is asked for."""
        able = self._abilities
        traits = {"has_drafts": able.has_drafts, "has_media_hashes": able.has_media_hashes}
        extras = RequestExtras(request, self._chunk_tokens, self._adapters, **traits)
        state = RequestState(request, extras, self._resets, self._controls.read(request))
        self._requests[request.request_id] = state
        if not extras.is_accountable:
            self.counters["request_unaccountable"] += 1
            logger.warning("request neither looked up nor stored. reason=%s", extras.reason)
        self.poll()
        self._turns.came(state)
        self._send_lookup(state, self._cached_chunks(state))

    def matched_tokens(self, request: Any, computed_tokens: int) -> int | None:
        """Tokens beyond ``computed_tokens`` that can be loaded; None to be asked again at the next step.

        Called every step for every request that waits, as far as vLLM gets; sends something once per turn at most. vLLM
        discards the answer where the request may not read prefix caches.
        """
        state = self._requests.get(request.request_id)
        if state is None or not self._abilities.may_load or state.is_load_failed or not state.may_read:
            return None if state is not None and state.queue_again_once() else 0
        if state.has_new_input and self._keys(state) is None:
            self._drop_lookup(state)
            return 0
        self.poll()
        self._turns.asked(state)
        self._take_renewal(state)
        lookup = state.lookup
        if lookup is None or lookup.start * self._chunk_tokens > computed_tokens:
            self._drop_lookup(state)  # the GPU evicted what it had when the lookup was sent
            lookup = self._send_lookup(state, computed_tokens // self._chunk_tokens)
            self._turns.begin(state)
        if lookup is None or lookup.given_up:
            return 0
        answer = self._answer(state, lookup)
        if answer is None:
            matched = self._unanswered(state, lookup)
        elif answer.queued and self._patience.is_any and self._turns.is_held_up(state):
            return None
        elif self._asks_anew(state, lookup, answer):
            matched = None
        else:
            matched = self._offer(state, lookup, answer, computed_tokens)
        if matched is None:
            self._turns.waits()
        return matched

    def _asks_anew(self, state: RequestState, lookup: Lookup, answer: LookupAnswer) -> bool:
        """Whether the request's turn waits for a newer answer than the one there is."""
        if state.renewal is not None:
            return True
        if state.is_asked_anew or not self._is_outdated(state, lookup, answer):
            return False
        state.is_asked_anew = True
        return self._renew(state, lookup)

    def _is_outdated(self, state: RequestState, lookup: Lookup, answer: LookupAnswer) -> bool:
        """Whether a new lookup may find more: the leases ended, or it is old and found less than all."""
        if lookup.given_up or state.renewal is not None:
            return False
        is_short = state.keys is not None and lookup.start + answer.ready < len(state.keys.keys)
        is_old = answer.is_done and self._monotonic() - lookup.sent_s > FRESH_S
        return answer.is_ended or (is_old and is_short)

    def _renew(self, state: RequestState, lookup: Lookup) -> bool:
        """Look the request up again from where it was; what is leased stays so until the answer is here."""
        state.renewal = self._new_lookup(state, lookup.start)
        self.counters["lookup_renewed"] += state.renewal is not None
        return state.renewal is not None

    def _take_renewal(self, state: RequestState) -> None:
        """A newer answer is here, or will not come: one of the two lookups goes."""
        if (renewal := state.renewal) is None or state.lookup is None:
            return
        is_current = renewal.generation == self._client.generation
        answer = self._client.lookups.get(renewal.id) if is_current else None
        if answer is not None and answer.is_answered:
            self._client.release(state.lookup.id, is_asked_anew=True)
            state.lookup, state.renewal = renewal, None
        elif self._is_overdue(renewal):
            self.counters["lookup_timeout"] += is_current
            self._drop_renewal(state)

    def _offer(self, state: RequestState, lookup: Lookup, answer: LookupAnswer, computed: int) -> int | None:
        held = min(len(state.keys.keys) if state.keys else 0, answer.held) * self._chunk_tokens
        limit = self._groups.loadable_tokens(held, state.request.num_tokens, self._chunk_tokens)

        def beyond(chunks: int) -> int:
            return min((lookup.start + chunks) * self._chunk_tokens, limit) - computed

        arrived, promised = beyond(answer.ready), beyond(len(answer.slots))
        unknown = (answer.unknown + answer.queued) * self._chunk_tokens
        if not answer.is_done and promised + unknown > max(arrived, 0):
            parts = [(beyond(answer.ready + chunks) - max(arrived, 0), eta_s) for chunks, eta_s in answer.parts]
            assert state.turn_s is not None, "an offer to a request that nobody asks for"
            times = lookup.waits_s(answer, state.turn_s, self._monotonic())
            if self._patience.lasts(Wait(*times, max(arrived, 0), parts, unknown, answer.search_s)):
                return None
        if arrived <= 0:
            if promised + unknown > 0:
                self.counters["promotion_not_awaited"] += 1
            lookup.given_up = True
            self._client.release(lookup.id)
            return 0
        first = state.keys.keys[computed // self._chunk_tokens] if state.keys else b""
        if self._loading[first] and self._abilities.has_prefix_caching:
            return None  # another request is loading it: soon it is a GPU prefix cache hit
        if not self._room.admits(state.request.request_id, state.request.num_tokens, computed + arrived):
            return None
        state.offer = (computed, arrived)
        return arrived

    def _answer(self, state: RequestState, lookup: Lookup) -> LookupAnswer | None:
        answer = self._client.lookups.get(lookup.id) if lookup.generation == self._client.generation else None
        if answer is None or not answer.is_answered:
            return None
        if lookup.answered_s is None or answer.held != state.held:
            # The first answer; or a search found more, or a promotion failed: what is not held must be stored again.
            lookup.answered_s = lookup.answered_s or self._monotonic()
            state.held = answer.held
            self.stores.not_held(state.keys.keys[answer.held :] if state.keys else ())
        return answer

    def _unanswered(self, state: RequestState, lookup: Lookup) -> int | None:
        if lookup.generation != self._client.generation:
            self.counters["lookup_session_lost"] += 1
            lookup.given_up = True
            return 0
        if not self._is_overdue(lookup):
            return None
        self.counters["lookup_timeout"] += 1
        self._client.waited_in_vain()  # the next requests do not wait
        lookup.given_up = True
        self._client.release(lookup.id)
        return 0

    def _is_overdue(self, lookup: Lookup) -> bool:
        """Whether a first answer is waited for no longer."""
        waited_ms = (self._monotonic() - lookup.sent_s) * 1e3
        is_lost = lookup.generation != self._client.generation
        return is_lost or waited_ms > self._config.lookup_timeout_ms or self._client.is_silent

    def _send_lookup(self, state: RequestState, start: int) -> Lookup | None:
        state.lookup = self._new_lookup(state, start)
        self.counters["lookups"] += state.lookup is not None
        return state.lookup

    def _new_lookup(self, state: RequestState, start: int) -> Lookup | None:
        keys = self._keys(state)
        if keys is None or not keys.keys or not self._client.is_ready:
            return None
        turn = self._turns.of(state)
        lookup_id = self._client.lookup(keys.keys, keys.digests, min(start, len(keys.keys)), turn)
        if lookup_id is None:
            self.counters["lookup_not_sent"] += 1
            return None
        return Lookup(lookup_id, self._client.generation, start, self._monotonic())

    def _keys(self, state: RequestState) -> Any:
        namespace = self._client.namespace
        if namespace is None or not state.extras.is_accountable:
            return None
        try:
            return state.update_keys(namespace, self._chunk_tokens)
        except Unaccountable as exc:
            self.counters["request_unaccountable"] += 1
            logger.warning("request neither looked up nor stored from here on. reason=%s", exc)
            return None

    def _cached_chunks(self, state: RequestState) -> int:
        """Leading whole chunks that the GPU's prefix cache has now: these need no lease and no promotion."""
        if not self._abilities.may_load or not state.may_read:
            return sys.maxsize  # nothing is wanted; the lookup only tells what need not be stored
        if not self._abilities.has_prefix_caching or self._block_pool is None:
            return 0
        return self._groups.cached_chunks(state.request.block_hashes, self._block_pool.get_cached_block)

    def _drop_lookup(self, state: RequestState) -> None:
        self._drop_renewal(state)
        lookup, state.lookup = state.lookup, None
        if lookup is not None and lookup.generation == self._client.generation:
            self._client.release(lookup.id)

    def _drop_renewal(self, state: RequestState) -> None:
        renewal, state.renewal = state.renewal, None
        if renewal is not None and renewal.generation == self._client.generation:
            self._client.release(renewal.id, is_asked_anew=True)

    def _look_ahead(self) -> None:
        """Keep fresh what the next requests are told, so that it is in host memory when their turn comes."""
        for state in self._turns.step():
            self._take_renewal(state)
            if state.lookup is None or self._turns.has_come(state):
                continue
            answer = self._answer(state, state.lookup)
            if answer is not None and self._is_outdated(state, state.lookup, answer):
                self._renew(state, state.lookup)

    # -- load --------------------------------------------------------------------------------------------------

    def allocated(self, request: Any, tables: BlockTables, external_tokens: int) -> None:
        """Blocks for a request exist, per KV cache group: plan its load, if it has one."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        self._turns.left(request.request_id)
        self._drop_renewal(state)
        if external_tokens == 0:
            if not state.is_loading and state.lookup is not None and not state.lookup.given_up:
                state.lookup.given_up = True  # admitted without it
                self._client.release(state.lookup.id)
            return
        lookup = state.lookup
        computed, offered = state.offer
        assert lookup is not None, "a load without a lookup"
        assert external_tokens <= offered, "more tokens to load than were offered"
        answer = self._client.lookups.get(lookup.id) if lookup.generation == self._client.generation else None
        end = computed + external_tokens
        copies = None
        if answer is not None and not answer.is_ended:
            self._client.claim(lookup.id)
            copies = self._groups.load_copies(answer.slots, tables, lookup.start, (computed, end), self._chunk_tokens)
            self.counters["load_window_unknown"] += copies is None
        # Without copies - the session was lost since the offer - the job fails, and vLLM recomputes the request.
        first, last = computed // self._chunk_tokens, -(-end // self._chunk_tokens)
        state.loading_keys = state.keys.keys[first:last] if state.keys else ()
        state.loading_lookup, state.lookup = lookup, None
        self._loading.update(state.loading_keys)
        self._turns.load_began(request.request_id)
        self._room.begin(request.request_id, request.num_tokens, end)
        self._loads.append(LoadJob(request.request_id, lookup.generation, copies or ()))
        self.counters["loads"] += 1
        self.counters["load_tokens"] += external_tokens

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
            self._turns.load_ended(request_id)
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
                self._room.leave(request_id)
                del self._requests[request_id]
            elif state.is_load_failed:
                self._room.begin(request_id, state.request.num_tokens, 0)
        return stale

    def _is_right(self, state: RequestState, lookup: Lookup) -> bool:
        """Whether what was loaded for a request is what was promised."""
        is_leased = self._client.is_leased(lookup.id, lookup.generation)
        self.counters["loads_too_late"] += bool(state.loading_keys) and not is_leased
        return is_leased or not state.loading_keys

    # -- every step --------------------------------------------------------------------------------------------

    def plan_step(self, output: Any) -> StepMetadata:
        """Work for the workers in this step."""
        self.poll()
        self.prefill.step(self._monotonic(), output.num_scheduled_tokens, self._requests)
        self._room.leave(*output.num_scheduled_tokens)
        self._look_ahead()
        for request_id in output.preempted_req_ids or ():
            self._preempted(request_id, is_back=request_id in output.num_scheduled_tokens)
        if self._abilities.may_store:
            self._queue_stores(output)
        saves = self.stores.start_jobs()
        if self.stores.has_waiting and self._is_short_of_blocks(output):
            self.stores.make_room(is_standing=not output.num_scheduled_tokens)
        loads, self._loads = tuple(self._loads), []
        return StepMetadata(self._client.generation, self._client.info, loads, saves)

    def _preempted(self, request_id: str, *, is_back: bool) -> None:
        """vLLM took the request's blocks away; when it comes back, it loads what was stored of it meanwhile.

        After a reset of the GPU's cache it may be back in the very step that tells of it: then it waits for nothing.
        """
        if (state := self._requests.get(request_id)) is None:
            return
        self._leave_unstored(state, "preempted")
        state.storable = state.stored = state.unstored = 0
        if is_back:
            return
        self._drop_lookup(state)
        self._turns.came(state)
        if self._abilities.may_load and not state.is_load_failed:
            self._send_lookup(state, self._cached_chunks(state))

    def _queue_stores(self, output: Any) -> None:
        for request_id, tokens in output.num_scheduled_tokens.items():
            if (state := self._requests.get(request_id)) is None:
                continue
            end = self._count_storable(state, state.request.num_computed_tokens + tokens)
            if end <= state.stored or not self._client.is_ready:
                continue
            if (tables := output.kv_connector_block_state.get_block_ids(request_id)) is not None:
                self._queue_request(state, end, tables, is_ending=False)

    def _count_storable(self, state: RequestState, computed_tokens: int) -> int:
        """How many chunks are whole, and may be stored, once this step has run (DESIGN rule 9)."""
        if state.controls.skips_save or not state.extras.is_accountable:
            return 0
        tokens = storable_tokens(state.request, computed_tokens, saves_generated=self._config.save_decode)
        chunks = tokens // self._chunk_tokens
        if (more := chunks - state.storable) > 0:
            state.storable = chunks
            self.counters["store_chunks"] += more
            if state.stored == ALL_DONE:
                self.counters["store_dropped_window_passed"] += more
        return chunks

    def _queue_request(self, state: RequestState, end: int, tables: BlockTables, *, is_ending: bool) -> None:
        """Queue the chunks before ``end`` that were not dealt with yet."""
        if (keys := self._keys(state)) is None:
            self._leave_unstored(state, "unaccountable")
        elif state.resets != self._resets:
            self._leave_unstored(state, "reset")
        elif not state.extras.may_store:  # with its next step it may
            if is_ending:
                self._leave_unstored(state, "adapter_not_told")
        elif end > state.stored:
            if state.lookup is not None:
                self._answer(state, state.lookup)
            chunks, tag = range(state.stored, end), state.controls.tag
            state.stored = self.stores.queue(keys, tables, chunks, held=state.held, tag=tag, is_ending=is_ending)

    def _leave_unstored(self, state: RequestState, reason: str) -> None:
        """Count chunks that were computed and are not stored, each once."""
        if (dropped := state.storable - max(state.stored, state.unstored)) > 0:
            self.counters[f"store_dropped_{reason}"] += dropped
            state.unstored = state.storable

    def _is_short_of_blocks(self, output: Any) -> bool:
        """Whether a request waits that does not fit into the blocks that are free; vLLM asks nobody for more then."""
        free = self._block_pool.get_num_free_blocks()
        return any(
            self._groups.whole_blocks(state.request.num_tokens) > free
            for request_id, state in self._requests.items()
            if state.request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            and request_id not in output.num_scheduled_tokens
            and not state.is_loading
        )

    def saves_finished(self, report: SaveReport) -> None:
        """Save jobs ended on some ranks, or adapters were loaded, which is told with or before what they computed."""
        if report.adapters:
            if self._adapters.told(report.adapters):
                self.stores.reset()  # copies under way may be of either
            for state in self._requests.values():
                self._check_adapter(state)
        self.stores.finished(report)
        self._pins.send()

    def _check_adapter(self, state: RequestState) -> None:
        if state.extras.loses_adapter():
            self.counters["request_unaccountable"] += 1
            logger.warning("request neither looked up nor stored from here on. reason=%s", state.extras.reason)

    def finish_request(self, request: Any, tables: BlockTables) -> None:
        """A request is over, for whatever reason; a load of it may still be running.

        Chunks that wait for a slot, or were completed since the last step, are pinned: their blocks are still whole.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            return
        if request.num_output_tokens:  # not one that was aborted while its first step ran
            self.prefill.finished(self._monotonic(), request.request_id)
        if self._abilities.may_store and not state.is_loading:
            end = self._count_storable(state, request.num_computed_tokens)
            if self._client.is_ready:
                self._queue_request(state, end, tables, is_ending=True)
                self._leave_unstored(state, "preempted")  # by a reset of the GPU's cache, since the last step
            self._leave_unstored(state, "no_session")
        if state.controls.pin_ttl_s is not None:
            self.pin(state, state.controls.pin_ttl_s)
        self._drop_lookup(state)
        self._turns.left(request.request_id)
        state.is_finished = True
        if not state.is_loading:  # or its load still holds its blocks
            self._room.leave(request.request_id)
            del self._requests[request.request_id]

    def pin(self, state: RequestState, ttl_s: float) -> None:
        keys = self._keys(state) if state.resets == self._resets else None
        if keys is None:
            self.counters["pins_dropped"] += 1
            return
        if state.lookup is not None:
            self._answer(state, state.lookup)
        self._pins.want(keys.keys[: state.request.num_prompt_tokens // self._chunk_tokens], state.held, ttl_s)

    def poll(self) -> None:
        """Take in what the server sent; never blocks."""
        generation = self._client.generation
        self._client.poll()
        if self._client.generation != generation:
            self.counters["sessions_lost"] += 1
            self.stores.session_lost()

    def reset(self) -> None:
        """The weights changed: nothing stored before may be loaded again, nothing computed before may be stored.

        Waits for the server to make it last, seconds at most.
        """
        self._resets += 1
        for state in self._requests.values():
            self._drop_lookup(state)
            state.is_load_stale = state.is_loading
        self.stores.reset()
        self._pins.reset()
        self._client.reset()
        wait_until_durable(self._client, self.poll)

    @property
    def client(self) -> SchedulerClient:
        """This engine's session with the server."""
        return self._client

    @property
    def has_work(self) -> bool:
        """Whether blocks are pinned or copies run, so that the engine must keep stepping."""
        return self.stores.has_work or any(state.is_loading for state in self._requests.values())

    def close(self) -> None:
        """End the session. Idempotent."""
        self._client.close()
