"""Chooses the chunks of each request that are stored.

A step completes some; the rest of a request follows when it ends, and its tail if it is kept: what is left behind its
last whole chunk, in whole units. With ``tail_tokens`` all requests' tails are kept, without it those of requests that
are likely to be gone on from (docs/decisions/0048-tails-by-default.md).

Owns how far each request was stored, and counts every chunk that was computed and is not stored, once, with its reason,
and so every state that vLLM offers and every tail that a request ends with.
The chunks themselves wait in ``save_queue.py``. Called by the scheduler side, in vLLM's scheduler thread.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tiered_kv.config import Config
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.server.client import SchedulerClient
from tiered_kv.vllm.conversations import Conversations
from tiered_kv.vllm.engine_role import EngineRole
from tiered_kv.vllm.kv_groups import NULL_BLOCK, BlockTables, CacheGroups
from tiered_kv.vllm.request_lookups import RequestLookups
from tiered_kv.vllm.requests import RequestState, storable_tokens
from tiered_kv.vllm.save_queue import ALL_DONE, SaveQueue
from tiered_kv.vllm.undrafted import UndraftedBlocks

logger = logging.getLogger(__name__)


class RequestSaves:
    """Hands chunks of requests to the save queue.

    Writes of each :class:`RequestState`: ``storable``, ``stored`` and ``unstored``. Of its own it has where
    conversations ended.

    Threads: vLLM's scheduler thread only.
    """

    def __init__(
        self,
        config: Config,
        client: SchedulerClient,
        role: EngineRole,
        groups: CacheGroups,
        lookups: RequestLookups,
        queue: SaveQueue,
        undrafted: UndraftedBlocks,
        counters: Counter[str],
    ) -> None:
        """``counters`` gets ``store_chunks`` and the ``store_dropped_*`` of chunks that never reach the queue.

        And the same of tails: ``tail_offers`` and ``tail_dropped_*``.
        """
        self._config = config
        self._tail_unit = groups.tail_unit(config.tail_tokens, config.chunk_tokens, role.drafts)
        self._conversations = Conversations()
        if config.tail_tokens and not self._tail_unit:
            logger.warning(
                "no tails are kept. They need attention to all tokens, no draft's KV, and chunk_tokens above the least "
                "common multiple of tail_tokens and the block size. tail_tokens=%d chunk_tokens=%d block_tokens=%d",
                config.tail_tokens,
                config.chunk_tokens,
                groups.block_tokens,
            )
        self._groups = groups
        self._passed_tokens = groups.passed_tokens
        self._client = client
        self._role = role
        self._lookups = lookups
        self._queue = queue
        self._undrafted = undrafted
        self._counters = counters

    def step(self, requests: Mapping[str, RequestState], output: Any) -> None:
        """Queue the chunks that this step of vLLM completes."""
        if not self._role.may_store:
            return
        for request_id, tokens in output.num_scheduled_tokens.items():
            if (state := requests.get(request_id)) is None:
                continue
            computed = state.request.num_computed_tokens + tokens
            end = self._count_storable(state, computed)
            if not self._client.is_ready or (end <= state.stored and not self._is_passing(state, computed)):
                continue
            if (tables := output.kv_connector_block_state.get_block_ids(request_id)) is not None:
                self._queue_chunks(state, end, tables, is_ending=False)
                if self._is_passing(state, computed):
                    self._queue.passed.keep(request_id, state.stored, tables, computed)
        if self._groups.states:
            self._queue_states(requests, output)

    def _queue_states(self, requests: Mapping[str, RequestState], output: Any) -> None:
        """Queue the states that vLLM hands over in this step, behind the chunks before them.

        Only now and only from these blocks: a request keeps no earlier state, and computes the next one in place. vLLM
        hands over what a load brought, too, which is stored.
        """
        for request_id, offers in output.kv_connector_block_state.boundary_state_offloads.items():
            state, is_preempted = requests.get(request_id), request_id in (output.preempted_req_ids or ())
            blocks: dict[int, dict[int, int]] = {}
            for number, block, tokens in offers:
                by_group = blocks.setdefault(tokens, {})
                if block != NULL_BLOCK:
                    by_group[number] = block
            for tokens, by_group in sorted(blocks.items()):
                self._counters["state_offers"] += 1
                if is_preempted:
                    self._counters["state_dropped_preempted"] += 1
                elif state is None:
                    self._counters["state_dropped_unaccountable"] += 1
                elif (end := self._queue_state(state, tokens, by_group)) is not None:
                    self._counters[end] += 1

    def _queue_state(self, state: RequestState, tokens: int, by_group: Mapping[int, int]) -> str | None:
        """Queue a state; or the counter that it ends in."""
        chunks, rest = divmod(tokens, self._config.chunk_tokens)
        if state.is_from_before_reset:
            return "state_dropped_reset"
        if tokens == state.loaded_tokens:
            return "state_held"
        if state.params.skips_save or not state.extras.may_store or chunks > state.storable:
            return "state_dropped_not_storable"
        if rest or by_group.keys() != set(self._groups.states):
            return "state_dropped_partial"
        if not self._client.is_ready:
            return "state_dropped_no_session"
        keys = self._lookups.keys(state)
        if keys is None or not 0 < chunks <= len(keys.keys):
            return "state_dropped_unaccountable"
        blocks = [by_group[number] for number in self._groups.states]
        is_answer = chunks > self._prompt_chunks(state)
        self._queue.queue_state(keys, chunks, blocks, state.params.tag, is_answer=is_answer)
        return None

    def finish(self, state: RequestState, tables: BlockTables) -> None:
        """Queue what is left of a request that ends: its blocks are still whole."""
        if not self._role.may_store:
            return
        end = self._count_storable(state, state.request.num_computed_tokens)
        if self._client.is_ready:
            self._queue_chunks(state, end, tables, is_ending=True)
            self._leave_unstored(state, "preempted")  # by a reset of the GPU's cache, since the last step
        self._leave_unstored(state, "no_session")
        if self._config.tail_tokens or (self._tail_unit and self._is_likely_gone_on_from(state)):
            self._offer_tail(state, tables)

    def _is_likely_gone_on_from(self, state: RequestState) -> bool:
        """Whether a request that ends is one of a conversation, as far as is known."""
        chunks, rest = divmod(int(state.request.num_prompt_tokens), self._config.chunk_tokens)
        if state.keys is None or len(state.keys.keys) < chunks or state.params.skips_save:
            return False
        if not state.extras.is_accountable:
            return False

        def name(chunk: int, tokens: int) -> bytes | None:
            named = self._lookups.tail_name(state, chunk, tokens)
            return named and named[0]

        has_gone_on = self._conversations.goes_on(state.keys.keys[:chunks], rest - rest % self._tail_unit, name)
        goes_on, session = has_gone_on or bool(state.tails), state.params.session
        _, length = self._tail_of(state)
        if session and (goes_on or (length and not state.params.releases)):
            return self._conversations.believes(session, goes_on=goes_on)
        return goes_on

    def _tail_of(self, state: RequestState) -> tuple[int, int]:
        """Whole chunks of a request that ends, and the tokens of its tail behind them; 0: it has none."""
        tokens = self._storable_tokens(state, state.request.num_computed_tokens)
        chunks, rest = divmod(tokens, self._config.chunk_tokens)
        return chunks, rest - rest % (self._tail_unit or self._groups.block_tokens) if chunks else 0

    def _offer_tail(self, state: RequestState, tables: BlockTables) -> None:
        """Queue the tail of a request that ends, if it has one behind a whole chunk."""
        if state.params.skips_save:
            return
        chunks, length = self._tail_of(state)
        if not length:
            return
        self._counters["tail_offers"] += 1
        if (end := self._queue_tail(state, tables, chunks, length)) is not None:
            self._counters[end] += 1

    def _queue_tail(self, state: RequestState, tables: BlockTables, chunks: int, length: int) -> str | None:
        """Queue a tail of so many tokens behind so many chunks; or the counter that it ends in."""
        if not self._tail_unit or getattr(state.request, "resumable", False):
            return "tail_dropped_unsupported"
        if not self._client.is_ready:
            return "tail_dropped_no_session"
        if state.is_from_before_reset:
            return "tail_dropped_reset"
        if not state.extras.may_store or not chunks <= state.stored < ALL_DONE:
            return "tail_dropped_not_storable"
        keys, name = self._lookups.keys(state), self._lookups.tail_name(state, chunks, length)
        if keys is None or name is None:
            return "tail_dropped_unaccountable"
        if any(tail.chunk == chunks and tail.tokens >= length for tail in state.tails):
            return "tail_held"
        older = self._older_tails(state, keys, chunks, length)
        return self._queue.queue_tail(keys, tables, chunks, length, name, state.params.tag, older)

    def _continued_tails(self, state: RequestState, keys: PrefixKeys, chunks: range) -> dict[int, list[bytes]]:
        """Keys of tails that whole chunks continue, by the chunk's index."""
        if not self._tail_unit:
            return {}
        found = {index: self._older_tails(state, keys, index, self._config.chunk_tokens) for index in chunks}
        return {index: older for index, older in found.items() if older}

    def _older_tails(self, state: RequestState, keys: PrefixKeys, chunk: int, tokens: int) -> list[bytes]:
        """Keys of tails that so many tokens of the request from a chunk's start on continue.

        Those that the server told of, and those that were queued here and that it may not have had then.
        """
        older = [tail.key for tail in state.tails if tail.chunk == chunk and tail.tokens < tokens]
        for key, length in self._queue.tails_behind(keys.parent(chunk)).items():
            name = self._lookups.tail_name(state, chunk, length) if length < tokens and key not in older else None
            if name is not None and name[0] == key:
                older.append(key)
        return older

    def preempted(self, state: RequestState) -> None:
        """Forget how far a request came: vLLM took its blocks, and computes or loads them anew."""
        self._leave_unstored(state, "preempted")
        state.storable = state.stored = state.unstored = 0
        self._queue.passed.let_go(state.request.request_id)

    def _count_storable(self, state: RequestState, computed_tokens: int) -> int:
        """How many chunks are whole, and may be stored, once this step has run (rule 9)."""
        if state.params.skips_save or not state.extras.is_accountable:
            return 0
        chunks = self._storable_tokens(state, computed_tokens) // self._config.chunk_tokens
        if (more := chunks - state.storable) > 0:
            state.storable = chunks
            self._counters["store_chunks"] += more
            if state.stored == ALL_DONE:
                self._counters["store_dropped_window_passed"] += more
        return chunks

    def _storable_tokens(self, state: RequestState, computed_tokens: int) -> int:
        saves_generated = state.params.saves_generated(self._config.save_decode)
        return storable_tokens(state.request, computed_tokens, saves_generated=saves_generated)

    def _queue_chunks(self, state: RequestState, end: int, tables: BlockTables, *, is_ending: bool) -> None:
        """Queue the chunks before ``end`` that were not dealt with yet.

        A request that was admitted before its lookup was answered waits for the next step: what the GPU had of it may
        be held, and would be copied again. Not where windows pass, by the next step vLLM may have their blocks back.
        """
        if state.storable <= max(state.stored, state.unstored):
            return
        if not (is_ending or self._groups.has_windows) and self._lookups.is_awaited(state):
            return
        if (keys := self._lookups.keys(state)) is None:
            self._leave_unstored(state, "unaccountable")
        elif state.is_from_before_reset:
            self._leave_unstored(state, "reset")
        elif not state.extras.may_store:  # with its next step it may
            if is_ending:
                self._leave_unstored(state, "adapter_not_told")
        elif end > state.stored:
            self._lookups.update_held(state)
            tables = self._queue.passed.whole_tables(state.request.request_id, tables)
            drafted = max(state.stored, self._undrafted.drafted_chunks(tables, end))
            chunks = range(state.stored, drafted)
            queued = self._queue.queue(
                keys,
                tables,
                chunks,
                held=state.held,
                tag=state.params.tag,
                prompt_chunks=self._prompt_chunks(state),
                older_tails=self._continued_tails(state, keys, range(max(chunks.start, state.held), chunks.stop)),
                is_ending=is_ending,
            )
            if queued.reached > state.stored or queued.has_passed:
                self._queue.passed.let_go(state.request.request_id)
            state.stored = queued.reached
            if queued.has_passed:
                self._leave_unstored(state, "window_passed")
                state.stored = ALL_DONE
            elif is_ending and drafted < end:  # until then the draft's KV may still be written
                self._leave_unstored(state, "undrafted")

    def _is_passing(self, state: RequestState, computed: int) -> bool:
        """Whether vLLM frees something before the next step of the chunk that is not whole yet, and it will be stored.

        Asked for every request in every step: a table is a copy of its length.
        """
        chunk_tokens = self._config.chunk_tokens
        if computed < state.stored * chunk_tokens + self._passed_tokens or state.stored < state.storable:
            return False
        is_prompt = (state.stored + 1) * chunk_tokens <= state.request.num_prompt_tokens
        if not is_prompt and not state.params.saves_generated(self._config.save_decode):
            return False
        if state.params.skips_save or state.is_from_before_reset or not state.extras.is_accountable:
            return False
        return state.extras.may_store and self._queue.passed.lacks(state.request.request_id, state.stored, computed)

    def _prompt_chunks(self, state: RequestState) -> int:
        """Leading chunks without a generated token. A session's answers are its prompt with its next input."""
        return int(state.request.num_prompt_tokens) // self._config.chunk_tokens

    def _leave_unstored(self, state: RequestState, reason: str) -> None:
        """Count chunks that were computed and are not stored, each once."""
        if (dropped := state.storable - max(state.stored, state.unstored)) > 0:
            self._counters[f"store_dropped_{reason}"] += dropped
            state.unstored = state.storable
