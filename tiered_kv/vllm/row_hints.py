"""What requests below vLLM's offloading want the server to know: pins of prompts, states and ends of users' sessions.

The same as the connector tells (``request_pins.py``), when a request is over and its rows are stored. A tier does not
know how much of a prompt is held, since vLLM's own memory answers first; so the server is asked once, and told of the
deepest row that it has. Called by the tier, in vLLM's scheduler thread; never blocks.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from tiered_kv.keys.row_names import RowNames
from tiered_kv.vllm.request_params import RequestParams
from tiered_kv.vllm.row_jobs import Find, RowJobs

WAITING_MAX: Final = 1024
"""Requests whose answers are waited for. More are dropped and counted: an answer takes milliseconds."""

SENT: Final = "sent"
DROPPED: Final = "dropped"
OF_NOTHING: Final = "of_nothing"


def has_hints(params: RequestParams) -> bool:
    """Whether a request wants anything of this when it is over."""
    return bool(params.session) or params.pin_ttl_s is not None


@dataclass(frozen=True, slots=True)
class _Ended:
    """A request that is over."""

    params: RequestParams
    names: RowNames
    find: Find


class RowHints:
    """What is on its way to the server.

    Attributes:
        outcomes: What became of it, one word each, for the tier to count and take away.
    """

    def __init__(self, jobs: RowJobs) -> None:
        self._jobs = jobs
        self._waiting: deque[_Ended] = deque()
        self.outcomes: list[str] = []

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def prefetch(self, params: RequestParams) -> None:
        """Have a user's session in the server's memory soon."""
        self._note(self._jobs.client.hint("prefetch", params.prefetches, params.tag))

    def ended(self, params: RequestParams, names: RowNames) -> None:
        """A request is over, whose jobs are; ask how much of it is held."""
        find = None
        if names.names and len(self._waiting) < WAITING_MAX:
            find = self._jobs.find(names, len(names.names), session=params.session, may_search=False)
        if find is not None:
            self._waiting.append(_Ended(params, names, find))
        else:
            self._end_session(params)
            self.outcomes.append(DROPPED if names.names else OF_NOTHING)

    def go_on(self) -> None:
        """Tell what is known by now; once in a step."""
        for _ in range(len(self._waiting)):
            one = self._waiting.popleft()
            if (held := self._jobs.answer(one.find, 0.0)) is None:
                self._waiting.append(one)
            else:
                self._tell(one, held)

    def drop(self) -> None:
        """The caches are reset: what was computed before is invalid."""
        for one in self._waiting:
            self._jobs.forget(one.find)
            self.outcomes.append(DROPPED)
        self._waiting.clear()

    def _tell(self, one: _Ended, held: int) -> None:
        client, params = self._jobs.client, one.params
        if not held or one.names.namespace is not self._jobs.namespace:
            self.outcomes.append(OF_NOTHING)
        else:
            key = one.names.key(held - 1)
            if params.session:
                self._note(client.tell_state(params.session, params.tag, key))
            if params.pin_ttl_s is not None:
                self._note(client.pin(key, params.pin_ttl_s, params.tag))
        self._end_session(params)

    def _end_session(self, params: RequestParams) -> None:
        """After its state: what else the request says of its session."""
        for action in params.session_hints:
            self._note(self._jobs.client.hint(action, params.session, params.tag))

    def _note(self, is_sent: bool) -> None:
        self.outcomes.append(SENT if is_sent else DROPPED)
