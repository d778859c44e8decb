"""Where computed chunks went: each that may be stored is stored, known to be held, or dropped for a counted reason.

Counts by vLLM's own requests, at the connector's door, and knows nothing of how far the store path came with each.
"""

from typing import Any

STATE_ENDS = frozenset({"state_held", "states", "states_failed"})
"""Counters in which a state that vLLM offered ends, beside ``state_dropped_<reason>``."""

TAIL_ENDS = frozenset({"tail_held", "tails", "tails_failed"})
"""Counters in which a tail that a request ended with ends, beside ``tail_dropped_<reason>``."""

OUTCOMES = ("store_held", "stores", "stores_failed")
DROPPED = "store_dropped_"


class StoreAccounts:
    """Counts the whole chunks that one engine computed and may store.

    Attributes:
        computed: Chunks, anew after each preemption: vLLM computes them again or finds them somewhere.
    """

    def __init__(self, scheduler: Any) -> None:
        self.computed = 0
        self._requests = scheduler.requests
        self._side = scheduler.connector._scheduler.side
        self._reached: dict[str, int] = {}
        plan, finish = scheduler.connector.build_connector_meta, scheduler.connector.request_finished_all_groups

        def counted_plan(output: Any) -> Any:
            for request_id in output.preempted_req_ids or ():
                self._reached.pop(request_id, None)
            for request_id, tokens in output.num_scheduled_tokens.items():
                request = self._requests[request_id]
                self._reach(request, request.num_computed_tokens + tokens)
            return plan(output)

        def counted_finish(request: Any, *arguments: Any) -> Any:
            state = self._side.state(request.request_id)
            if state is not None and not state.is_loading:
                self._reach(request, request.num_computed_tokens)
            self._reached.pop(request.request_id, None)
            return finish(request, *arguments)

        scheduler.connector.build_connector_meta = counted_plan
        scheduler.connector.request_finished_all_groups = counted_finish

    def _reach(self, request: Any, computed_tokens: int) -> None:
        state = self._side.state(request.request_id)
        if state is None or state.params.skips_save or not state.extras.is_accountable:
            return
        known = request.num_prompt_tokens
        if state.params.saves_generated(self._side._request_saves._config.save_decode):
            known = max(known, request.num_tokens - 1)
        chunks = min(computed_tokens, known, request.num_tokens) // self._side._request_saves._config.chunk_tokens
        if (more := chunks - self._reached.get(request.request_id, 0)) > 0:
            self._reached[request.request_id] = chunks
            self.computed += more

    def wrong(self) -> list[str]:
        """What does not add up once the engine is at rest."""
        counters = self._side.counters
        outcomes = {n: c for n, c in counters.items() if n in OUTCOMES or n.startswith(DROPPED)}
        parts = counters["state_parts_stored"] + counters["state_parts_dropped"]
        ends = sum(c for n, c in counters.items() if n in STATE_ENDS or n.startswith("state_dropped_"))
        if ends != counters["state_offers"] or parts % (len(self._side.saves._groups.states) or 1):
            return [f"{counters['state_offers']} states were offered, and went to {dict(counters)}"]
        tails = sum(c for n, c in counters.items() if n in TAIL_ENDS or n.startswith("tail_dropped_"))
        if tails != counters["tail_offers"]:
            return [f"{counters['tail_offers']} requests ended with a tail, and these went to {dict(counters)}"]
        if sum(outcomes.values()) == counters["store_chunks"] == self.computed:
            return []
        return [
            f"{self.computed} chunks were computed, store_chunks={counters['store_chunks']}, and went to {outcomes}"
        ]
