"""State of one request: its keys, its lookup, its load, how far it was stored.

Only tokens that are known for good get keys and are stored (rule 9)::

    token ids     |------- prompt -------|-- generated --|last|
    KV            computed as far as the scheduler has come; the last token's never
    named         [......................................)
    stored        [......................................)   without ``save_decode`` up to the prompt's end only

The last generated token stays out. Its KV is computed by a later step, if at all; a streaming session may cut it off
and go on with other tokens; and behind it lie drafts, of which vLLM counts as computed what may still be rejected. What
is before it is never touched again: an accepted draft is a token like any other, and a rejected one's place is written
again before the token that takes it is known to the scheduler.
"""

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, NoReturn

from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.prefix_keys import PrefixKeys, keys_in_parts
from tiered_kv.tiering.types import LookupAnswer, SlotId, Tail
from tiered_kv.vllm.request_extras import RequestExtras
from tiered_kv.vllm.request_params import NO_PARAMS, RequestParams

HASHED_AT_ONCE: Final = 32768
"""Tokens whose keys vLLM's thread computes itself, in 0.3 to 0.6 ms. Keys that another thread computes may be there a
step later, which is nothing beside loading or computing more tokens than these."""


class FoundTail(NamedTuple):
    """A tail that the server holds and that a request's own tokens begin with.

    Attributes:
        lookup: Id of the lookup whose answer names it.
        chunk: The chunk that it is the beginning of.
        tokens: Its length.
        slot: Leased to that lookup. None: it is on disk, or on its way up.
    """

    lookup: int
    chunk: int
    tokens: int
    key: bytes
    slot: SlotId | None


@dataclass(slots=True)
class SentLookup:
    """A lookup that was sent.

    Written by ``request_lookups.py``, but ``is_counted`` by ``engine_metrics.py``.

    Attributes:
        start: First chunk that is leased; those before it were in the GPU's prefix cache when it was sent.
        asked: Chunks of the prompt that were asked about; None: all.
        counted: Leading chunks whose use by the request lookups before it have counted, or that it has had itself.
        given_up: The request was answered without it; it only shows which chunks need not be stored.
        is_counted: Its outcome was counted.
        is_followed: The server tells of parts of it as they are ready.
        followed_s, followed: Since when, and what was known then, if it does not so from the beginning.
        tails: Of the newest answer, those of other requests, too.
    """

    id: int
    generation: int
    start: int
    sent_s: float
    asked: int | None = None
    answered_s: float | None = None
    given_up: bool = False
    is_counted: bool = False
    is_followed: bool = False
    followed_s: float | None = None
    followed: LookupAnswer | None = None
    tails: tuple[Tail, ...] = ()
    counted: int = 0


class Wait(NamedTuple):
    """Why a request was answered "ask again", and how long the same question gets the same answer.

    Until then, unless anything else of it has changed: ``SchedulerSide.goes_on_waiting`` compares.

    Attributes:
        lookup, answer, keys: Of the request, the newest then.
        computed, tokens: What the GPU had of it, and its length.
        turn_s: When its turn began.
        tokens_per_s: The engine's prefill rate.
        until_s: It waits so long.
        looks_ahead: Not if the next question may come later than that.
    """

    lookup: SentLookup
    answer: LookupAnswer
    keys: PrefixKeys | None
    computed: int
    tokens: int
    turn_s: float | None
    tokens_per_s: float
    until_s: float
    looks_ahead: bool


@dataclass(slots=True, eq=False)
class RequestState:
    """One request of vLLM.

    Every field is written in vLLM's scheduler thread, by one part of the scheduler side:

    ======================  ==========================================================================================
    ``request_lookups.py``  ``lookup``, ``renewal``, ``counted``, ``held``, ``tails``, ``hashing_s``, ``is_asked_anew``
                            (the waiting queue clears it)
    ``wait_policy.py``      ``number``, ``asked_s``, ``asked_step``, ``step_s``, ``turn_s``, ``pauses``, ``first_s``
    ``request_saves.py``    ``storable``, ``stored``, ``unstored``
    ``disaggregated.py``    ``short_since_s``, ``asked_again_s``, ``asks_again``, ``is_short``
    ``scheduler.py``        ``wait``, ``offer``, ``fork``, ``loaded_tokens``, ``loading_keys``, ``loading_lookup`` (it
                            takes ``lookup`` over), ``is_load_*``, ``is_finished``, ``is_from_before_reset``
    this class              ``keys``, ``namespace``, ``hashing``, ``prompt_tokens``, ``is_queued_again``
    ======================  ==========================================================================================

    Attributes:
        params: The request's own parameters for the cache.
        hashing, hashing_s: The keys of a long prompt, while another thread computes them and until they are taken;
            when that began.
        prompt_tokens: Length of its prompt when that was read last; only a streaming session's grows.
        lookup: What the server was asked; with its leases until it is released.
        renewal: The lookup that replaces ``lookup`` once it is answered; until then both hold their leases.
        counted: Leading chunks whose use by it counted with a lookup that another one has replaced.
        held: Leading chunks that the hierarchy holds, by the last answer.
        tails: What it holds of the chunk behind them, the longest last.
        is_asked_anew: In this turn its lookup was made anew, and is not again.
        number: Of its arrival.
        asked_s, asked_step: When vLLM asked for it last, and in which step.
        step_s: How long before that it had asked in the same turn; 0: it had not.
        turn_s: When its turn began, which it pays for; None: it has not.
        pauses: How many turns began because vLLM had not asked for it.
        first_s: Since when it is the next to be admitted, if it waits for room.
        wait: What it waits for, as last answered; None: it does not, or has to be looked at whole.
        offer: Tokens computed on the GPU and tokens offered beyond them, as last answered.
        fork: Where the prompt leaves what is held, if vLLM is asked to keep a state there; in tokens. 0 once admitted.
        loaded_tokens: Where the last load that was planned ends: a state there came with it.
        loading_keys: Keys whose chunks are being copied for this request now.
        loading_lookup: The lookup whose leases that load holds.
        is_load_failed: A load failed; vLLM asks again, and the answer is to compute.
        is_load_stale: A reset came while the load ran: its bytes must not be used.
        is_queued_again: The answer was "ask again" once after a failed load.
        is_finished: The request is over; a load still copies into its blocks.
        was_preempted: It had all that it asks for; a streaming session's until it gets more input.
        is_from_before_reset: The cache was reset while the request lived, so it is never stored.
        storable: Whole chunks that were computed and may be stored, counted as ``store_chunks``.
        stored: Chunks that the save queue has dealt with: those between it and ``storable`` still wait for slots.
        unstored: End of the chunks that will not be stored any more, counted as dropped. After a preemption all three
            begin again.
        short_since_s: Since when less is held than another engine had promised.
        asked_again_s, asks_again: When another lookup was sent for the rest, and how many were.
        is_short: The rest was waited for in vain.
    """

    request: Any
    extras: RequestExtras
    params: RequestParams = NO_PARAMS
    keys: PrefixKeys | None = None
    namespace: bytes = b""
    hashing: "Future[PrefixKeys] | None" = None
    hashing_s: float = 0.0
    prompt_tokens: int = field(default=0, init=False)
    lookup: SentLookup | None = None
    renewal: SentLookup | None = None
    number: int | None = None
    asked_s: float = 0.0
    turn_s: float | None = None
    asked_step: int = 0
    step_s: float = 0.0
    pauses: int = 0
    first_s: float | None = None
    is_asked_anew: bool = False
    counted: int = 0
    held: int = 0
    tails: tuple[FoundTail, ...] = ()
    wait: Wait | None = None
    offer: tuple[int, int] = (0, 0)
    fork: int = 0
    loaded_tokens: int = 0
    loading_keys: Sequence[bytes] = ()
    loading_lookup: SentLookup | None = None
    storable: int = 0
    stored: int = 0
    unstored: int = 0
    short_since_s: float | None = None
    asked_again_s: float = 0.0
    asks_again: int = 0
    is_short: bool = False
    is_from_before_reset: bool = False
    is_load_failed: bool = False
    is_queued_again: bool = False
    is_load_stale: bool = False
    is_finished: bool = False
    was_preempted: bool = False

    def __post_init__(self) -> None:
        self.prompt_tokens = self.request.num_prompt_tokens

    @property
    def is_loading(self) -> bool:
        """Whether workers may be copying into this request's blocks."""
        return self.loading_lookup is not None

    def queue_again_once(self) -> bool:
        """Whether vLLM is to ask once more, after a failed load, before the answer is that nothing can be loaded.

        A request whose load failed holds no blocks any more, and vLLM (0.32) leaves it in front of those that do. If it
        does not fit then, none behind it is ever admitted, and it waits for their blocks: for ever. Asking again puts
        it into the queue where it belongs.
        """
        is_first = self.is_load_failed and not self.is_queued_again
        self.is_queued_again = self.is_load_failed
        return is_first

    @property
    def may_read(self) -> bool:
        """Whether the request may load KV."""
        return not self.reads_nothing and self.extras.may_look_up

    @property
    def reads_nothing(self) -> bool:
        """Whether it never loads KV: it says so, or vLLM does, where its answer is made of all of the prompt's tokens.

        These are requests for log-probabilities of a prompt (also ``echo`` with ``logprobs``), or a vector per token.
        """
        return bool(self.request.skip_reading_prefix_cache) or self.params.skips_load

    @property
    def has_new_input(self) -> bool:
        """Whether a streaming session was given more input since it was last looked at."""
        return bool(self.request.num_prompt_tokens != self.prompt_tokens)

    def begin_hashing(self, hasher: Executor, namespace: Namespace, chunk_tokens: int) -> bool:
        """Have another thread compute the keys of a long prompt that has none yet; ``update_keys`` takes them.

        A streaming session's prompt may be rewritten, and is left to its owner's thread. Returns whether this began.
        """
        tokens, chunks = self.request.all_token_ids, final_tokens(self.request) // chunk_tokens
        is_known = self.keys is not None and self.namespace == namespace.digest
        is_session = getattr(self.request, "resumable", False)
        if self.hashing or is_known or is_session or chunks * chunk_tokens <= HASHED_AT_ONCE:
            return False
        self.hashing = hasher.submit(keys_in_parts, namespace, chunk_tokens, tokens, self.extras.extras_for, chunks)
        return True

    @property
    def is_hashing(self) -> bool:
        """Whether another thread still computes the keys."""
        return self.hashing is not None and not self.hashing.done()

    def update_keys(self, namespace: Namespace, chunk_tokens: int) -> PrefixKeys:
        """The request's keys, computed once and extended as tokens become final.

        Waits for another thread that computes them: for milliseconds.

        Raises:
            Unaccountable: The request's extras cannot be accounted for; it must be left alone.
        """
        if self.hashing is not None:
            hashing, self.hashing = self.hashing, None
            try:
                self.keys = hashing.result()
            except ValueError as exc:
                self._leave_alone(exc)
            assert self.keys is not None
            self.namespace = self.keys.parent(0)
        old = self.keys if self.namespace == namespace.digest else None
        if self.has_new_input:
            self._check_session()
        if old is None or self.has_new_input:
            self.was_preempted &= not (self.prompt_tokens and self.has_new_input)
            self.keys, self.namespace = PrefixKeys(namespace, chunk_tokens), namespace.digest
            self.prompt_tokens = self.request.num_prompt_tokens
        assert self.keys is not None
        self._extend(self.keys, chunk_tokens)
        if old is not None and self.keys is not old and self.keys.keys[: len(old.keys)] != old.keys:
            self.extras.refuse("streaming input rewrote what its session had computed")
        return self.keys

    def _extend(self, keys: PrefixKeys, chunk_tokens: int) -> None:
        tokens = self.request.all_token_ids
        try:
            keys.extend(tokens, self.extras.extras_for, final_tokens(self.request) // chunk_tokens)
        except ValueError as exc:
            self._leave_alone(exc)

    def tail_name(self, chunk: int, tokens: int) -> tuple[bytes, bytes]:
        """Key and digest of its tail of so many final tokens where a chunk begins; the chunk before has a key.

        Raises:
            Unaccountable: As for ``update_keys``.
        """
        assert self.keys is not None
        try:
            return self.keys.tail(self.request.all_token_ids, chunk, tokens, self.extras.extras_of_tail(chunk, tokens))
        except ValueError as exc:
            self._leave_alone(exc)

    def _leave_alone(self, reason: ValueError) -> NoReturn:
        """A token id has no name: vLLM checks none where it has no tokenizer, and several ranks compute with any."""
        self.extras.refuse(str(reason))

    def _check_session(self) -> None:
        """A streaming session was given more input: its keys are made anew, to see that they go on where they ended.

        They do, because only final tokens get keys. Except that vLLM up to 0.32 drops everything before the new input
        when an answer ends right after its request was preempted; it has the tokens twice then, and they differ.
        """
        request = self.request
        if request.all_token_ids[: request.num_prompt_tokens] != request.prompt_token_ids:
            self.extras.refuse("vLLM lost tokens of a streaming session")
        self.extras.read_again()


def final_tokens(request: Any) -> int:
    """Leading tokens whose ids are known and will not change."""
    return int(min(max(request.num_prompt_tokens, request.num_tokens - 1), request.num_tokens))


def storable_tokens(request: Any, computed_tokens: int, *, saves_generated: bool) -> int:
    """Leading tokens that may be stored once the steps up to ``computed_tokens`` have run."""
    return min(computed_tokens, final_tokens(request) if saves_generated else request.num_prompt_tokens)
