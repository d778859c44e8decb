"""Disaggregated prefill: a producer tells how much of a prompt it stores, a consumer waits a little for that much.

A producer's answer leaves vLLM with the step that computed the prompt's end; the last chunks are copied meanwhile and
committed after the engine's next step. A router can hand the request to the consumer before that. So the answer's
``kv_transfer_params`` carry ``tiered_kv.stored_tokens``, which a router passes on with the request, as vLLM's do::

    producer: answer {"kv_transfer_params": {"tiered_kv.stored_tokens": 1024}} ---> router ---> consumer: request

With it goes the request's tag, because what the consumer stores of the request is the same one's.

The amount comes from whoever sends the request, so it is believed no further than the prompt goes, for no longer than
computing the missing part would take, and at ever longer intervals.

Owns what is told and how long is waited. Called by the connector around the scheduler side, in vLLM's scheduler thread;
never blocks: waiting is answering "ask again".
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from tiered_kv.config import Config
from tiered_kv.keys.tags import NO_TAG
from tiered_kv.server.client import SchedulerClient
from tiered_kv.vllm.controls import STORED_TOKENS, TAG
from tiered_kv.vllm.requests import RequestState
from tiered_kv.vllm.scheduler import SchedulerSide
from tiered_kv.vllm.stores import ALL_DONE

ASK_AGAIN_S: Final = 0.01
"""Between the first two lookups for what is not there yet; twice as long after each. A producer's chunks are committed
one step after its answer, so an honest claim is found by the first few; and whoever sends a request may claim anything,
so no claim costs the server more lookups than the wait has doublings (10 in 10 s)."""


class Handover:
    """What a producer tells of its requests, and how a consumer takes it.

    Threads: vLLM's scheduler thread only.
    """

    def __init__(
        self,
        config: Config,
        client: SchedulerClient,
        side: SchedulerSide,
        *,
        is_producer: bool,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``is_producer``: the engine stores and never loads, so that its requests go on to another engine."""
        self._config = config
        self._client = client
        self._side = side
        self._is_producer = is_producer
        self._monotonic = monotonic

    def told(self, state: RequestState | None) -> dict[str, Any] | None:
        """What a finished request's answer carries: the tokens of its prompt stored or on their way, and its tag."""
        if state is None or not (self._is_producer or _goes_on(state.request)):
            return None
        if not 0 < state.stored < ALL_DONE:  # nothing, or a part that is not known any more
            return None
        if getattr(state.request, "tiered_kv_is_told", False):
            return None  # by another of ours below MultiConnector, which ends the engine where two tell the same name
        state.request.tiered_kv_is_told = True
        self._side.pin(state, 0)  # where only second touches are written, the other engine's would come too late
        whole = min(state.stored, state.request.num_prompt_tokens // self._config.chunk_tokens)
        tag = {} if state.controls.tag == NO_TAG else {TAG: state.request.kv_transfer_params[TAG]}
        return {STORED_TOKENS: whole * self._config.chunk_tokens, **tag}

    def matched(self, request: Any, computed_tokens: int, matched: int | None) -> int | None:
        """What to answer where ``matched`` tokens beyond ``computed_tokens`` are there: less than was told may be."""
        state = self._side.state(request.request_id)
        if matched is None or state is None or not state.controls.stored_tokens:
            return matched
        if state.is_load_failed or not state.may_read or not self._client.is_ready:
            return matched
        told = min(state.controls.stored_tokens, request.num_prompt_tokens)
        missing = told // self._config.chunk_tokens * self._config.chunk_tokens - computed_tokens - matched
        if missing <= 0:
            return matched
        now_s = self._monotonic()
        if state.short_since_s is None:
            state.short_since_s = now_s
            self._side.counters["handovers_awaited"] += 1
        if state.is_short or now_s - state.short_since_s > self._longest_s(missing):
            self._side.counters["handovers_short"] += not state.is_short
            state.is_short = True
            return matched
        if not state.asks_again or now_s - state.asked_again_s >= ASK_AGAIN_S * 2 ** (state.asks_again - 1):
            state.asked_again_s = now_s
            state.asks_again += 1
            lookup, state.lookup = state.lookup, None  # so that the side sends a new one when it is asked next
            if lookup is not None and lookup.generation == self._client.generation:
                self._client.release(lookup.id)
        return None

    def _longest_s(self, missing_tokens: int) -> float:
        """As long as computing them would take: what was told is stored but for a rare drop."""
        if self._config.promotion_wait_ms is not None:
            return self._config.promotion_wait_ms / 1e3
        return min(missing_tokens / self._side.prefill.tokens_per_s, self._config.promotion_deadline_ms / 1e3)


def _goes_on(request: Any) -> bool:
    """Whether a router has marked the request as one that another engine answers, as those of vLLM do."""
    params = request.kv_transfer_params
    return isinstance(params, Mapping) and params.get("do_remote_decode") is True
