"""Disaggregated prefill: a producer's promise of stored tokens, a consumer's wait.

A producer's answer leaves vLLM with the step that computed the prompt's end; the last chunks are copied meanwhile and
committed after the engine's next step. A router can hand the request to the consumer before that. So the answer's
``kv_transfer_params`` carry ``tiered_kv.stored_tokens``, which a router passes on with the request, as vLLM's do::

    producer: answer {"kv_transfer_params": {"tiered_kv.stored_tokens": 1024}} ---> router ---> consumer: request

The request's tag goes with it, because what the consumer stores of the request has the same owner.

The amount comes from a client, so it is believed no further than the prompt goes, for no longer than computing the
missing part would take, and the server is asked at ever longer intervals.

Owns the promise and the wait for it. Called by the scheduler side, in vLLM's scheduler thread; never blocks: waiting is
answering "ask again".
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from tiered_kv.config import Config
from tiered_kv.keys.tags import NO_TAG
from tiered_kv.server.client import SchedulerClient
from tiered_kv.vllm.engine_role import EngineRole
from tiered_kv.vllm.kv_groups import CacheGroups
from tiered_kv.vllm.request_lookups import RequestLookups
from tiered_kv.vllm.request_params import STORED_TOKENS, TAG
from tiered_kv.vllm.requests import RequestState
from tiered_kv.vllm.save_queue import ALL_DONE
from tiered_kv.vllm.wait_policy import PrefillRate

ASK_AGAIN_S: Final = 0.01
"""Between the first two lookups for what is not there yet; twice as long after each. A producer's chunks are committed
one step after its answer, so an honest promise is found by the first few; and a client may claim anything, so no claim
costs the server more lookups than the wait has doublings (10 in 10 s), and a renewal between two that are far apart.
All of them count as one."""


class DisaggregatedPrefill:
    """Makes a producer's promises and waits for another producer's.

    Writes of each :class:`RequestState`: ``short_since_s``, ``asked_again_s``, ``asks_again`` and ``is_short``. Holds
    no state of its own.

    Threads: vLLM's scheduler thread only.
    """

    def __init__(
        self,
        config: Config,
        client: SchedulerClient,
        groups: CacheGroups,
        role: EngineRole,
        lookups: RequestLookups,
        prefill: PrefillRate,
        counters: Counter[str],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the parts.

        Args:
            counters: Gets ``handovers_awaited`` and ``handovers_short``.
            role: An engine that stores and never loads is a producer: its requests go on to another engine.
        """
        self._config = config
        self._client = client
        self._groups = groups
        self._drafts = role.drafts
        self._lookups = lookups
        self._prefill = prefill
        self._counters = counters
        self._is_producer = not role.may_load
        self._monotonic = monotonic

    def promise(self, state: RequestState) -> dict[str, Any] | None:
        """The parameters of a finished request's answer: its prompt's tokens stored or on their way, and its tag."""
        if not (self._is_producer or _goes_on(state.request)):
            return None
        if not 0 < state.stored < ALL_DONE:  # nothing, or a part that is not known any more
            return None
        if getattr(state.request, "tiered_kv_has_promise", False):
            return None  # by another of ours below MultiConnector, which ends the engine where two give the same name
        state.request.tiered_kv_has_promise = True
        whole = min(state.stored, state.request.num_prompt_tokens // self._config.chunk_tokens)
        tag = {} if state.params.tag == NO_TAG else {TAG: state.request.kv_transfer_params[TAG]}
        return {STORED_TOKENS: whole * self._config.chunk_tokens, **tag}

    def matched(self, state: RequestState, computed_tokens: int, matched: int | None) -> int | None:
        """Answer vLLM where ``matched`` tokens beyond ``computed_tokens`` are held and more may be promised."""
        if matched is None or (missing := self._missing(state, computed_tokens, matched)) <= 0:
            return matched
        now_s = self._monotonic()
        if state.short_since_s is None:
            state.short_since_s = now_s
            self._counters["handovers_awaited"] += 1
        if not self._goes_on_waiting(state, missing, now_s):
            self._counters["handovers_short"] += not state.is_short
            state.is_short = True
            return matched
        if not state.asks_again or now_s - state.asked_again_s >= ASK_AGAIN_S * 2 ** (state.asks_again - 1):
            state.asked_again_s = now_s
            state.asks_again += 1
            self._lookups.ask_anew(state)  # the next question sends a new one
        return None

    def awaits(self, state: RequestState, computed_tokens: int) -> bool:
        """Whether :meth:`matched` would answer "ask again" now if nothing were held."""
        missing = self._missing(state, computed_tokens, 0)
        return missing > 0 and self._goes_on_waiting(state, missing, self._monotonic())

    def _missing(self, state: RequestState, computed_tokens: int, matched: int) -> int:
        """Tokens that are promised and could be loaded, beyond those that are held."""
        if not state.params.stored_tokens:
            return 0
        if state.is_load_failed or not state.may_read or not self._client.is_ready:
            return 0  # what is promised could not be loaded
        chunk_tokens = self._config.chunk_tokens
        promised = min(state.params.stored_tokens, state.request.num_prompt_tokens) // chunk_tokens * chunk_tokens
        # Not all that is held may be loaded; waiting for the rest would be in vain.
        tokens = state.request.num_tokens
        loadable = self._groups.loadable_tokens(promised, tokens, chunk_tokens, self._drafts)
        return loadable - computed_tokens - matched

    def _goes_on_waiting(self, state: RequestState, missing_tokens: int, now_s: float) -> bool:
        since_s = now_s if state.short_since_s is None else state.short_since_s
        return not state.is_short and now_s - since_s <= self._longest_s(missing_tokens)

    def _longest_s(self, missing_tokens: int) -> float:
        """As long as computing them would take: what was promised is stored but for a rare drop."""
        if self._config.promotion_wait_ms is not None:
            return self._config.promotion_wait_ms / 1e3
        return min(missing_tokens / self._prefill.tokens_per_s, self._config.promotion_deadline_ms / 1e3)


def _goes_on(request: Any) -> bool:
    """Whether a router has marked the request as one that another engine answers, as those of vLLM do."""
    params = request.kv_transfer_params
    return isinstance(params, Mapping) and params.get("do_remote_decode") is True
