"""Lookups of requests: sends them, keeps their answers fresh, releases them.

A request has one lookup, whose leases keep its chunks in host memory until it is released. A lookup whose answer may
have grown old is made anew (a renewal); until the newer one is answered, both hold their leases::

    add_request ──> sent ──> answered ──> claimed by a load ──> released
                     │          │  └──> renewed: the older one of the two is released
                     │          └─────> given up: the request is admitted without it
                     └────────────────> given up: no answer in time, or the session is lost

Owns lookups and the keys that they name. Must not decide what a request is offered (``scheduler.py``) nor for how long
it waits (``wait_policy.py``). Called by the scheduler side and its parts, in vLLM's scheduler thread; never blocks on
the socket, and waits milliseconds at most for the keys of a long prompt.
"""

import logging
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from tiered_kv.config import Config
from tiered_kv.keys.prefix_keys import PrefixKeys
from tiered_kv.server.client import SchedulerClient
from tiered_kv.tiering.types import LookupAnswer
from tiered_kv.vllm.compat import PagedBlocks
from tiered_kv.vllm.engine_role import EngineRole
from tiered_kv.vllm.identity.adapters import Unaccountable
from tiered_kv.vllm.kv_groups import CacheGroups
from tiered_kv.vllm.logs import RareWarnings
from tiered_kv.vllm.requests import FoundTail, RequestState, SentLookup, final_tokens
from tiered_kv.vllm.save_queue import SaveQueue
from tiered_kv.vllm.wait_policy import FRESH_S, WaitingQueue

logger = logging.getLogger(__name__)

FOLLOWED_CHUNKS: Final = 64
"""Of so few chunks the server tells part by part: they may be waited for by milliseconds. Of more it is asked to where
a wait comes to its end: each message costs the scheduler's thread 0.1 to 0.2 ms."""

HASHING_MAX_S: Final = 0.05
"""A request that vLLM asks for does not wait longer for its keys, which long prompts before it may hold up."""


class RequestLookups:
    """Sends, renews and releases the lookups of requests.

    Writes of each :class:`RequestState`: ``keys`` (through ``update_keys``), ``lookup``, ``renewal``, ``counted``,
    ``held``, ``tails`` and ``is_asked_anew``. Of its own it has vLLM's block pool.

    Attributes:
        hashing: Requests whose keys a thread computes, and that are not looked up yet.

    Threads: vLLM's scheduler thread only. One of its own computes the keys of long prompts.
    """

    def __init__(
        self,
        config: Config,
        client: SchedulerClient,
        groups: CacheGroups,
        role: EngineRole,
        saves: SaveQueue,
        waiting_queue: WaitingQueue,
        counters: Counter[str],
        monotonic: Callable[[], float],
    ) -> None:
        """Take the parts.

        Args:
            saves: Hears which keys the hierarchy does not hold, so that they may be stored again.
            waiting_queue: Gives each lookup its request's place in vLLM's order.
            counters: Gets ``lookups``, ``lookup_*`` and ``request_unaccountable``.
        """
        self._config = config
        self._client = client
        self._groups = groups
        self._role = role
        self._saves = saves
        self._waiting_queue = waiting_queue
        self._counters = counters
        self._monotonic = monotonic
        self._warnings = RareWarnings(logger, monotonic)
        self._tail_unit = groups.tail_unit(config.tail_tokens, config.chunk_tokens, role.drafts)
        self._blocks: PagedBlocks | None = None
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="tiered_kv-keys")
        self.hashing: deque[RequestState] = deque()

    def bind_block_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool, which says what the GPU's prefix cache has."""
        self._blocks = PagedBlocks(block_pool)

    def keys(self, state: RequestState) -> PrefixKeys | None:
        """The request's keys as far as its tokens are final; None without a session, or if it must be left alone."""
        namespace = self._client.namespace
        if namespace is None or not state.extras.is_accountable:
            return None
        try:
            return state.update_keys(namespace, self._config.chunk_tokens)
        except Unaccountable as exc:
            self.left_alone(exc)
            return None

    def left_alone(self, reason: object, since: str = " from here on") -> None:
        """Count a request that is neither looked up nor stored, and say so."""
        self._counters["request_unaccountable"] += 1
        self._warnings.warn("request neither looked up nor stored%s. reason=%s", since, reason)

    def tail_name(self, state: RequestState, chunk: int, tokens: int) -> tuple[bytes, bytes] | None:
        """Key and digest of the request's tail of so many final tokens where a chunk begins, if it can be named."""
        if state.keys is None or not 0 < chunk <= len(state.keys.keys):
            return None
        try:
            return state.tail_name(chunk, tokens)
        except Unaccountable as exc:
            self.left_alone(exc)
            return None

    # -- sending -----------------------------------------------------------------------------------------------

    def send(self, state: RequestState, start: int) -> SentLookup | None:
        """Look up the request's chunks, of which those from ``start`` on are leased; None if nothing was sent.

        Nothing is yet while another thread computes the keys (``sends_soon``).
        """
        if self._is_hashing(state):
            return None
        state.lookup = self._sent(state, start, state.counted)
        self._counters["lookups"] += state.lookup is not None
        return state.lookup

    def send_for_new(self, state: RequestState) -> SentLookup | None:
        """Look up a request that is new or was preempted: what the GPU's prefix cache has now needs no lease."""
        return self.send(state, self._cached_chunks(state))

    def _is_hashing(self, state: RequestState) -> bool:
        """Whether the request's keys have to be waited for; begins to compute those of a long prompt."""
        namespace, chunk_tokens = self._client.namespace, self._config.chunk_tokens
        if namespace and state.extras.is_accountable and state.begin_hashing(self._hasher, namespace, chunk_tokens):
            state.hashing_s = self._monotonic()
            self.hashing.append(state)
        is_hashing = state.is_hashing and not self._hashes_itself(state)
        if not is_hashing and state in self.hashing:
            self.hashing.remove(state)
        return is_hashing

    def _hashes_itself(self, state: RequestState) -> bool:
        """Whether vLLM has waited long enough for another thread: its own does the work, or waits for its end."""
        if self._monotonic() - state.hashing_s <= HASHING_MAX_S:
            return False
        if state.hashing is not None and state.hashing.cancel():
            state.hashing = None
        return True

    def sends_soon(self, state: RequestState) -> bool:
        """Whether the request's lookup is sent once its keys are computed."""
        return state.hashing is not None and state.extras.is_accountable and self._client.is_ready

    def awaits_keys(self, state: RequestState, now_s: float) -> bool:
        """Whether a request without a lookup waits for the thread that computes its keys, before all others that do."""
        if not self.hashing or self.hashing[0] is not state or state.hashing is None or state.hashing.done():
            return False
        return self.sends_soon(state) and now_s - state.hashing_s <= HASHING_MAX_S

    def send_hashed(self) -> None:
        """Look up the requests whose keys have been computed meanwhile."""
        while self.hashing and not self.hashing[0].is_hashing:
            state = self.hashing.popleft()
            if state.lookup is not None or state.is_finished or state.is_loading:
                continue
            if self._waiting_queue.is_waiting(state):
                self.send_for_new(state)
            elif self.send(state, sys.maxsize) is not None:
                self.admitted_without(state)  # long ago: it only shows what need not be stored

    def _cached_chunks(self, state: RequestState) -> int:
        """Leading whole chunks that the GPU's prefix cache has now."""
        if not self._role.may_load or not state.may_read:
            return sys.maxsize  # no lease is wanted; the lookup only shows what need not be stored
        if not self._role.has_prefix_caching or self._blocks is None:
            return 0
        cached = self._groups.cached_chunks(state.request.block_hashes, self._blocks.cached)
        if self._role.drafts is not None and self._role.drafts.drops_block:
            return max(0, cached - 1)  # vLLM gives up the last block that it finds there, too
        return cached

    def _sent(self, state: RequestState, start: int, counted: int = 0) -> SentLookup | None:
        keys = self.keys(state)
        if keys is None or not keys.keys or not self._client.is_ready:
            return None
        names, digests, parts = keys.keys, keys.digests, len(self._groups.states)
        if parts:
            chunk, tokens, drafts = self._config.chunk_tokens, state.request.num_tokens, self._role.drafts
            # Of use before the last token only: vLLM computes that one again, on top of a state that has it.
            count = (drafts.hit_tokens(tokens, chunk, is_hybrid=True) if drafts else tokens - 1) // chunk
            names, digests = names[:count], digests[:count]
        if state.was_preempted:
            counted = len(names)  # its own answer is among them, and no prompt has that yet
        turn = self._waiting_queue.turn_of(state)
        is_short = len(names) - start <= FOLLOWED_CHUNKS
        is_followed = is_short or self._config.promotion_wait_ms == 0  # where all that is here at its turn counts
        lookup_id = self._client.lookup(
            names,
            digests,
            min(start, len(names)),
            turn,
            state_parts=parts,
            wants_tails=bool(self._tail_unit),
            session=state.params.session,
            hint=state.params.peer,
            counted=counted,
            is_followed=is_followed,
        )
        if lookup_id is None:
            self._counters["lookup_not_sent"] += 1
            return None
        asked = len(names) if parts else None
        sent = (lookup_id, self._client.generation, start, self._monotonic(), asked)
        return SentLookup(*sent, counted=counted, is_followed=is_followed)

    def follow(self, lookup: SentLookup, answer: LookupAnswer) -> None:
        """Have the server tell what is ready now, beyond this answer, and of more as it comes."""
        lookup.is_followed, lookup.followed, lookup.followed_s = True, answer, self._monotonic()
        self._client.follow(lookup.id)

    # -- answers -----------------------------------------------------------------------------------------------

    def answer(self, state: RequestState, lookup: SentLookup) -> LookupAnswer | None:
        """The newest answer to a lookup; None while there is none, or if its session is lost."""
        answer = self._client.lookups.get(lookup.id) if lookup.generation == self._client.generation else None
        if answer is None or not answer.is_answered:
            return None
        is_first = lookup.answered_s is None
        if is_first or answer.held != state.held or answer.tails != lookup.tails:
            # The first answer; or a search found more, or a promotion failed: what is not held must be stored again.
            lookup.answered_s = lookup.answered_s or self._monotonic()
            state.held, lookup.tails = answer.held, answer.tails
            state.tails = self._found_tails(state, lookup, answer)
            self._saves.not_held(state.keys.keys[answer.held : lookup.asked] if state.keys else (), lookup.sent_s)
        if lookup.given_up:
            self.give_up(lookup)  # it was kept for what it shows
        return answer

    def _found_tails(self, state: RequestState, lookup: SentLookup, answer: LookupAnswer) -> tuple[FoundTail, ...]:
        """The tails of an answer that this very request's tokens begin with, the longest last."""
        chunk, chunk_tokens = answer.held, self._config.chunk_tokens
        found = []
        for tail in answer.tails if self._tail_unit else ():
            is_fit = tail.tokens < chunk_tokens and tail.tokens % self._tail_unit == 0
            if not is_fit or chunk * chunk_tokens + tail.tokens > final_tokens(state.request):
                continue
            if (name := self.tail_name(state, chunk, tail.tokens)) is not None and name[1] == tail.digest:
                found.append(FoundTail(lookup.id, chunk, tail.tokens, name[0], tail.slot))
        return tuple(sorted(found, key=lambda one: one.tokens))

    def tail(self, state: RequestState, lookup: SentLookup, answer: LookupAnswer) -> FoundTail | None:
        """The longest tail that may be loaded with all chunks before it, which are ready."""
        ready = [tail for tail in state.tails if tail.slot is not None and tail.lookup == lookup.id]
        if not ready or answer.is_ended:
            return None
        return ready[-1] if lookup.start + answer.ready == ready[-1].chunk else None

    def coming_tail(self, state: RequestState, lookup: SentLookup, answer: LookupAnswer) -> FoundTail | None:
        """The longest tail that may be on its way up with all chunks before it."""
        coming = [tail for tail in state.tails if tail.slot is None and tail.lookup == lookup.id]
        if not coming or answer.is_done or answer.is_ended:
            return None
        return coming[-1] if lookup.start + len(answer.slots) == coming[-1].chunk else None

    def update_held(self, state: RequestState) -> None:
        """Bring ``state.held`` up to date."""
        if state.lookup is not None:
            self.answer(state, state.lookup)

    def is_awaited(self, state: RequestState) -> bool:
        """Whether a first answer may still come, which says what need not be stored."""
        if state.is_hashing:
            return True
        lookup = state.lookup
        if lookup is None or lookup.answered_s is not None or self._is_overdue(lookup):
            return False
        return self.answer(state, lookup) is None

    def unanswered(self, state: RequestState, lookup: SentLookup) -> int | None:
        """What to offer a request whose lookup has no answer: nothing yet (None), or nothing at all (0)."""
        if lookup.generation != self._client.generation:
            self._counters["lookup_session_lost"] += 1
            lookup.given_up = True
            return 0
        if not self._is_overdue(lookup):
            return None
        self._counters["lookup_timeout"] += 1
        self._client.waited_in_vain()  # the next requests do not wait
        self.give_up(lookup)
        return 0

    @property
    def timeout_s(self) -> float:
        """How long a first answer is waited for."""
        return self._config.lookup_timeout_ms / 1e3

    def _is_overdue(self, lookup: SentLookup) -> bool:
        """Whether a first answer is waited for no longer."""
        is_lost = lookup.generation != self._client.generation
        is_late = self._monotonic() - lookup.sent_s > self.timeout_s
        return is_lost or is_late or self._client.is_silent

    # -- renewals ----------------------------------------------------------------------------------------------

    def awaits_renewal(self, state: RequestState, lookup: SentLookup, answer: LookupAnswer) -> bool:
        """Whether the request's turn waits for a newer answer; sends the renewal, at most once per turn."""
        if state.renewal is not None:
            return True
        if state.is_asked_anew or not self._is_outdated(state, lookup, answer):
            return False
        state.is_asked_anew = True
        return self._renew(state, lookup, answer)

    def take_renewal(self, state: RequestState) -> None:
        """Replace the lookup by its renewal once that is answered; drop a renewal that stays without an answer."""
        if (renewal := state.renewal) is None or state.lookup is None:
            return
        is_current = renewal.generation == self._client.generation
        answer = self._client.lookups.get(renewal.id) if is_current else None
        if answer is not None and answer.is_answered:
            self._client.release(state.lookup.id, is_asked_anew=True)
            state.lookup, state.renewal = renewal, None
        elif self._is_overdue(renewal):
            self._counters["lookup_timeout"] += is_current
            self.drop_renewal(state)

    def keep_fresh(self, states: Iterable[RequestState]) -> None:
        """Renew outdated lookups of the next requests, so that their chunks are here when their turn comes."""
        for state in states:
            self.take_renewal(state)
            if state.lookup is None or self._waiting_queue.is_asked_for(state):
                continue
            answer = self.answer(state, state.lookup)
            if answer is not None and self._is_outdated(state, state.lookup, answer):
                self._renew(state, state.lookup, answer)

    def _is_outdated(self, state: RequestState, lookup: SentLookup, answer: LookupAnswer) -> bool:
        """Whether a new lookup may find more: the leases ended, or it is old and found less than all."""
        if lookup.given_up or state.renewal is not None:
            return False
        is_short = state.keys is not None and lookup.start + answer.ready < len(state.keys.keys)
        is_old = answer.is_done and self._monotonic() - lookup.sent_s > FRESH_S
        return answer.is_ended or (is_old and is_short)

    def _renew(self, state: RequestState, lookup: SentLookup, answer: LookupAnswer) -> bool:
        """Look the request up again from where it was; what is leased stays so until the answer is here."""
        state.renewal = self._sent(state, lookup.start, self._counted(lookup, answer))
        self._counters["lookup_renewed"] += state.renewal is not None
        return state.renewal is not None

    def _counted(self, lookup: SentLookup, answer: LookupAnswer) -> int:
        """Leading chunks whose use by the request has counted, with this lookup and those before it."""
        return max(lookup.counted, answer.boundary if self._groups.states else answer.held)

    def ask_anew(self, state: RequestState) -> None:
        """Release what the request has; the next question sends a new lookup, and of all that one counts."""
        lookup = state.lookup
        if lookup is not None and lookup.generation == self._client.generation:
            if (answer := self._client.lookups.get(lookup.id)) is not None:
                state.counted = self._counted(lookup, answer)
            self._client.release(lookup.id, is_asked_anew=True)
        state.lookup = None
        self.drop_renewal(state)

    # -- ending ------------------------------------------------------------------------------------------------

    def admitted_without(self, state: RequestState) -> None:
        """The request goes on without its lookup, which is released once it has shown what need not be stored."""
        if state.lookup is None or state.lookup.given_up:
            return
        if self.is_awaited(state):
            state.lookup.given_up = True
        else:
            self.give_up(state.lookup)

    def give_up(self, lookup: SentLookup) -> None:
        """Release a lookup whose request goes on without it; it still shows what need not be stored."""
        lookup.given_up = True
        self._client.release(lookup.id)

    def drop(self, state: RequestState) -> None:
        """Release what the request has; the next question sends a new lookup."""
        self.drop_renewal(state)
        lookup, state.lookup = state.lookup, None
        if lookup is not None and lookup.generation == self._client.generation:
            self._client.release(lookup.id)

    def ended(self, state: RequestState) -> None:
        """The request is over: release what it has, and compute nothing more for it."""
        self.drop(state)
        if state.hashing is not None and state.hashing.cancel():
            self.hashing.remove(state)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._hasher.shutdown(cancel_futures=True)

    def drop_renewal(self, state: RequestState) -> None:
        """Release the renewal alone, if there is one."""
        renewal, state.renewal = state.renewal, None
        if renewal is not None and renewal.generation == self._client.generation:
            self._client.release(renewal.id, is_asked_anew=True)
