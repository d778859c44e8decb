"""What the scheduler side remembers of one request: its keys, its lookup, its load and how far it was stored."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.rolling import PrefixKeys
from tiered_kv.server.answers import LookupAnswer
from tiered_kv.vllm.controls import NO_CONTROLS, Controls
from tiered_kv.vllm.extras import RequestExtras
from tiered_kv.vllm.storable import final_tokens


@dataclass(slots=True)
class Lookup:
    """A lookup that was sent.

    Attributes:
        start: First chunk that is leased; those before it were in the GPU's prefix cache when it was sent.
        given_up: The request was answered without it; it only tells what need not be stored.
        is_counted: What it gave was counted.
        answer, told_s: As it was looked at last, and when it was first.
    """

    id: int
    generation: int
    start: int
    sent_s: float
    answered_s: float | None = None
    given_up: bool = False
    is_counted: bool = False
    answer: LookupAnswer | None = None
    told_s: float = 0.0

    def waits_s(self, answer: LookupAnswer, turn_s: float, now_s: float) -> tuple[float, float]:
        """How long it has been waited for since the request's turn, now and when this answer came."""
        if answer is not self.answer:
            self.answer, self.told_s = answer, now_s
        return now_s - turn_s, self.told_s - turn_s


@dataclass(slots=True)
class RequestState:
    """One request of vLLM.

    Attributes:
        controls: What the request itself asked for.
        prompt_tokens: Length of its prompt when it was last looked at; only a streaming session's grows.
        resets: How many cache resets had happened when the request was first seen; an older request is never stored.
        renewal: The lookup that replaces ``lookup`` once it is answered; until then both hold their leases.
        number: Of its arrival (``turns.py``).
        asked_s, turn_s: When vLLM asked for it last, and when its turn began, which it pays for; None: it did not.
        asked_step, pauses: In which step that was, and how many turns began because it had not been asked for.
        first_s: Since when nobody is admitted before it, if it waits for room.
        is_asked_anew: In this turn its lookup was made anew, and is not again.
        held: Leading chunks the hierarchy holds, as last told.
        offer: Tokens computed on the GPU and tokens offered beyond them, as last answered.
        loading_keys: Keys whose chunks are being copied for this request now.
        storable: Whole chunks that were computed and may be stored, counted as ``store_chunks``.
        stored: Chunks that were dealt with by the store path: those between it and ``storable`` still wait for slots.
        unstored: Where those that will not be stored any more end, counted as dropped. After a preemption all three
            begin again.
        short_since_s: When less was found than another engine had told (``handover.py``), and when it was asked for
            again last, and how often; ``is_short`` once it was waited for in vain.
    """

    request: Any
    extras: RequestExtras
    resets: int
    controls: Controls = NO_CONTROLS
    keys: PrefixKeys | None = None
    namespace: bytes = b""
    prompt_tokens: int = field(default=0, init=False)
    lookup: Lookup | None = None
    renewal: Lookup | None = None
    number: int | None = None
    asked_s: float = 0.0
    turn_s: float | None = None
    asked_step: int = 0
    pauses: int = 0
    first_s: float | None = None
    is_asked_anew: bool = False
    held: int = 0
    offer: tuple[int, int] = (0, 0)
    loading_keys: Sequence[bytes] = ()
    loading_lookup: Lookup | None = None
    storable: int = 0
    stored: int = 0
    unstored: int = 0
    short_since_s: float | None = None
    asked_again_s: float = 0.0
    asks_again: int = 0
    is_short: bool = False
    is_load_failed: bool = False
    is_queued_again: bool = False
    is_load_stale: bool = False
    is_finished: bool = False

    def __post_init__(self) -> None:
        self.prompt_tokens = self.request.num_prompt_tokens

    @property
    def is_loading(self) -> bool:
        """Whether workers may be copying into this request's blocks."""
        return self.loading_lookup is not None

    def queue_again_once(self) -> bool:
        """Whether vLLM is to ask once more before it hears that nothing is left to load after a failure.

        A request whose load failed holds no blocks any more, and vLLM (0.32) leaves it in front of those that do. If it
        does not fit then, none behind it is ever admitted, and it waits for their blocks: for ever. Asking again puts
        it into the queue where it belongs.
        """
        is_first = self.is_load_failed and not self.is_queued_again
        self.is_queued_again = self.is_load_failed
        return is_first

    @property
    def may_read(self) -> bool:
        """Whether the request may be given what others computed; vLLM says no where it wants prompt logprobs."""
        if self.request.skip_reading_prefix_cache or self.controls.skips_load:
            return False
        return self.extras.may_look_up

    @property
    def has_new_input(self) -> bool:
        """Whether a streaming session was given more input since it was last looked at."""
        return bool(self.request.num_prompt_tokens != self.prompt_tokens)

    def update_keys(self, namespace: Namespace, chunk_tokens: int) -> PrefixKeys:
        """The request's keys, computed once and extended as tokens become final.

        Raises:
            Unaccountable: The request's extras cannot be accounted for; it must be left alone.
        """
        old = self.keys if self.namespace == namespace.digest else None
        if self.has_new_input:
            self._check_session()
        if old is None or self.has_new_input:
            self.keys, self.namespace = PrefixKeys(namespace, chunk_tokens), namespace.digest
            self.prompt_tokens = self.request.num_prompt_tokens
        assert self.keys is not None
        self._extend(self.keys, chunk_tokens)
        if old is not None and self.keys is not old and self.keys.keys[: len(old.keys)] != old.keys:
            self.extras.refuse("streaming input rewrote what its session had computed")
        return self.keys

    def _extend(self, keys: PrefixKeys, chunk_tokens: int) -> None:
        tokens = self.request._all_token_ids
        count = final_tokens(self.request) // chunk_tokens
        if count > len(keys.keys):
            is_all = count == len(tokens) // chunk_tokens
            keys.extend(tokens if is_all else tokens[: count * chunk_tokens], self.extras.extras_for)

    def _check_session(self) -> None:
        """A streaming session was given more input: its keys are made anew, to see that they go on where they ended.

        They do, because only final tokens get keys. Except that vLLM up to 0.32 drops everything before the new input
        when an answer ends right after its request was preempted; it has the tokens twice then, and they differ.
        """
        request = self.request
        if request._all_token_ids[: request.num_prompt_tokens] != request.prompt_token_ids:
            self.extras.refuse("vLLM lost tokens of a streaming session")
        self.extras.read_again()
