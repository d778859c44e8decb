"""Measuring: what the scheduler's side and the workers count and time, taken once a step as :class:`TieredKVStats`.

Reads along; decides nothing and changes nothing, but that it asks the server for its figures every few seconds while
the engine steps and takes the answer whenever it is here (DESIGN rule 2). Called by ``connector.py`` around the calls
of the scheduler's side, and by the worker's side.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from tiered_kv.metrics.figures import HOST, ServerFigures
from tiered_kv.server.client import EndedLookup, LookupAnswer, SchedulerClient
from tiered_kv.vllm.prometheus import server_values
from tiered_kv.vllm.requests import Lookup, RequestState
from tiered_kv.vllm.stats import TieredKVStats

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # up to 0.31
    CacheHitSource = None

logger = logging.getLogger(__name__)

FIGURES_INTERVAL_S: Final = 2.0
"""How often the server is asked for its figures: a millisecond of its time, and 10 kB."""

FAILURES: Final = (
    "load_window_unknown",
    "loads_failed",
    "loads_too_late",
    "lookup_not_sent",
    "lookup_session_lost",
    "lookup_timeout",
    "request_unaccountable",
    "sessions_lost",
    "stores_failed",
)
"""Counters of the scheduler's side that are failures."""

DROPPED: Final = "store_dropped_"
"""How counters begin that are chunks not stored."""

NOT_EVENTS: Final = ("load_tokens", "loads", "lookups", "promotion_not_awaited", "stores")
"""Counters that have a metric of their own."""


@dataclass(slots=True)
class _Outcome:
    """What a lookup ended in, as far as is known."""

    decision: str = ""
    lookup_wait_s: float = 0.0
    promotion_wait_s: float | None = None


class SchedulerMeter:
    """Counts for one engine.

    Threads: vLLM's scheduler thread only.
    """

    def __init__(
        self,
        client: SchedulerClient,
        counters: Mapping[str, int],
        chunk_tokens: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._counters = counters
        self._chunk_tokens = chunk_tokens
        self._monotonic = monotonic
        self._counted: dict[str, int] = {}
        self._outcomes: dict[int, _Outcome] = {}
        self._generation = client.generation
        self._loading: dict[str, Counter[int]] = {}
        self._stats = TieredKVStats()
        self._ask_at_s = float("-inf")
        self._is_connected: bool | None = None
        self._has_warned = False

    # -- a request's way through the scheduler -----------------------------------------------------------------

    def offered(self, state: RequestState | None, matched: int | None) -> None:
        """A request was answered ``matched`` tokens; the same question comes again until it is admitted."""
        lookup = None if state is None else state.lookup
        if lookup is None or lookup.answered_s is None or lookup.generation != self._client.generation:
            return
        answered = _Outcome(lookup_wait_s=lookup.answered_s - lookup.sent_s)
        if lookup.given_up:
            self._given_up(lookup, self._outcomes.pop(lookup.id, answered))
            return
        outcome = self._outcomes.setdefault(lookup.id, answered)
        if matched is None:
            outcome.promotion_wait_s = self._monotonic() - lookup.answered_s
        else:
            answer = self._client.lookups.get(lookup.id)
            is_whole = answer is None or not _has_more(answer)
            has_waited = outcome.promotion_wait_s is not None
            outcome.decision = ("awaited" if has_waited else "ready") if is_whole else "took_what_arrived"

    def _given_up(self, lookup: Lookup, outcome: _Outcome) -> None:
        """A lookup gave nothing; it was released a moment ago."""
        ended = next((one for one in reversed(self._client.ended) if one.id == lookup.id), None)
        if ended is not None and not lookup.is_counted:
            lookup.is_counted = True
            outcome.decision = "not_awaited" if _has_more(ended.answer) else "miss"
            self._count_outcome(ended, outcome)

    def _count_outcome(self, ended: EndedLookup, outcome: _Outcome) -> None:
        if not ended.asked or not outcome.decision:
            return
        self._stats.count("decisions", 1, outcome.decision)
        self._stats.sample("lookup_wait_seconds", outcome.lookup_wait_s)
        if outcome.promotion_wait_s is not None:
            self._stats.sample("promotion_wait_seconds", outcome.promotion_wait_s)

    def allocated(self, state: RequestState | None, external_tokens: int) -> None:
        """A request was given blocks, the last ``external_tokens`` of them to be loaded."""
        lookup = None if state is None else state.loading_lookup
        if state is None or lookup is None or not external_tokens:
            return
        answer = self._client.lookups.get(lookup.id) if lookup.generation == self._client.generation else None
        if answer is not None and not answer.is_ended:
            computed, _ = state.offer
            span = (computed, computed + external_tokens)
            self._loading[state.request.request_id] = self._by_source(answer, lookup.start, span)

    def _by_source(self, answer: LookupAnswer, first_chunk: int, span: tuple[int, int]) -> Counter[int]:
        """Tokens of ``span`` by the place of the tier that gave them."""
        size, (computed, end) = self._chunk_tokens, span
        tokens: Counter[int] = Counter()
        for chunk in range(computed // size, -(-end // size)):
            tokens[answer.sources[chunk - first_chunk]] += min(end, (chunk + 1) * size) - max(computed, chunk * size)
        return tokens

    def sources(self, request_id: str) -> dict[str, int]:
        """Tokens that a request is loading now, by the tier that gave them."""
        return {self._tier(place): tokens for place, tokens in self._loading.get(request_id, Counter()).items()}

    def loads_finished(self, request_ids: Iterable[str], failed_ids: Iterable[str]) -> None:
        """Every rank has reported these loads."""
        failed = set(failed_ids)
        for request_id in request_ids:
            tokens = self._loading.pop(request_id, None)
            if tokens is not None and request_id not in failed:
                for place, count in tokens.items():
                    self._stats.count("loaded_tokens", count, self._tier(place))

    def lookup_ended(self, ended: EndedLookup) -> None:
        """Count what a lookup asked each tier for and what it got, from the top down."""
        if ended.is_asked_anew:
            self._outcomes.pop(ended.id, None)
            return
        info = self._client.info
        slot_bytes = 0 if info is None else info.slot_bytes
        hits = Counter(ended.answer.sources[: ended.answer.ready])
        asked = ended.asked
        for place, tier in enumerate(self._client.tiers if asked else ()):
            for name, chunks in (("asked", asked), ("hit", hits[place]), ("missed", asked - hits[place])):
                self._stats.count(f"{name}_tokens", chunks * self._chunk_tokens, tier)
                if name != "missed":
                    self._stats.count(f"{name}_bytes", chunks * slot_bytes, tier)
            asked -= hits[place]
        self._count_outcome(ended, self._outcomes.pop(ended.id, _Outcome()))

    # -- every step --------------------------------------------------------------------------------------------

    def take(self) -> TieredKVStats | None:
        """What was measured since the last call; None if nothing. Also keeps the server's figures coming."""
        if self._client.generation != self._generation:
            self._generation = self._client.generation
            self._outcomes.clear()
        self._take_counters()
        self._take_figures()
        if self._client.is_ready != self._is_connected:
            self._is_connected = self._client.is_ready
            self._stats.set("connected", float(self._is_connected))
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, TieredKVStats()
        return taken

    def _take_counters(self) -> None:
        for name, value in self._counters.items():
            change = value - self._counted.get(name, 0)
            if not change:
                continue
            self._counted[name] = value
            if name in ("loads", "lookups"):
                self._stats.count(name, change)
            elif name == "stores":
                self._stats.count("stored_tokens", change * self._chunk_tokens)
            elif name.startswith(DROPPED):
                self._stats.count("dropped_chunks", change, name.removeprefix(DROPPED))
            elif name in FAILURES:
                self._stats.count("failures", change, name)
            elif name not in NOT_EVENTS:
                self._stats.count("events", change, name)

    def _take_figures(self) -> None:
        now_s = self._monotonic()
        if now_s >= self._ask_at_s and self._client.ask_figures():
            self._ask_at_s = now_s + FIGURES_INTERVAL_S
        text, self._client.figures = self._client.figures, None
        if text is None:
            return
        try:
            figures = msgspec.json.decode(text, type=ServerFigures)
        except (ValueError, RecursionError) as exc:  # ValueError: every error of msgspec's
            if not self._has_warned:
                logger.warning("the server's figures are not shown, it is of another version. cause=%.200s", exc)
            self._has_warned = True
            return
        for name, labels, value in server_values(figures):
            self._stats.set(name, value, *labels)
        self._stats.set("server_figures_time_seconds", time.time())

    def _tier(self, place: int) -> str:
        return self._client.tiers[place] if place < len(self._client.tiers) else HOST


def _has_more(answer: LookupAnswer) -> bool:
    """Whether more of the prefix was on its way, or being looked for."""
    return not answer.is_done and len(answer.slots) + answer.unknown + answer.queued > answer.ready


class CopyMeter:
    """Counts copies of one rank.

    Threads: copy threads add (appends are atomic), the model runner's thread takes.
    """

    def __init__(self) -> None:
        self._ended: deque[tuple[str, float, int]] = deque()

    def ended(self, kind: str, seconds: float, size_bytes: int) -> None:
        """All copies of a job, ``load`` or ``save``, ended well."""
        self._ended.append((kind, seconds, size_bytes))

    def take(self) -> TieredKVStats | None:
        """What was copied since the last call; None if nothing."""
        if not self._ended:
            return None
        stats = TieredKVStats()
        while self._ended:
            kind, seconds, size_bytes = self._ended.popleft()
            stats.sample(f"{kind}_seconds", seconds)
            stats.count({"load": "loaded_bytes", "save": "stored_bytes"}[kind], size_bytes)
        return stats


def hit_sources(tokens: Mapping[str, int]) -> dict[Any, int]:
    """Tokens by tier in vLLM's words for where cached KV came from (0.32 and later ask)."""
    assert CacheHitSource is not None, "this version of vLLM does not ask"
    names = {HOST: CacheHitSource.HOST, "disk": CacheHitSource.DISK}
    sources: Counter[Any] = Counter()
    for tier, count in tokens.items():
        sources[names.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)] += count
    return dict(sources)
