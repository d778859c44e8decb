"""Counts and times of one engine's use of the cache, as vLLM's connector stats.

:class:`SchedulerMeter` and :class:`CopyMeter` measure; they change nothing but that the server is asked for its figures
every few seconds while the engine steps, and the answer is taken whenever it is here (rule 2). vLLM takes what they
measured once a step as :class:`TieredKVStats` and carries it from workers and scheduler to its log and to the API
server, where ``prometheus.py`` turns it into metrics. Stats are plain numbers under names of that module, so that they
survive vLLM's pickle and msgpack::

    {"counters": {name: {labels: amount}}, "gauges": {name: {labels: value}}, "samples": {name: [seconds, ...]}}

``labels`` are the values of a metric's labels, joined by commas; none of them has a comma in it. Called by ``hooks.py``
after the scheduler side, and by the worker side.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from tiered_kv.metrics.figures import HOST_NAME, ServerFigures
from tiered_kv.metrics.names import ShownIn, engine_event
from tiered_kv.server.client import EndedLookup, SchedulerClient
from tiered_kv.tiering.types import HOST, LookupAnswer
from tiered_kv.vllm.compat import CacheHitSource, KVConnectorStats
from tiered_kv.vllm.prometheus import COUNTED_BY_SERVER, server_values
from tiered_kv.vllm.requests import RequestState, SentLookup

logger = logging.getLogger(__name__)

SAMPLES_MAX: Final = 1 << 14
"""Samples of one histogram kept until vLLM takes them: it does every step, and its log every ten seconds."""

_PARTS: Final = ("counters", "gauges", "samples")

FIGURES_INTERVAL_S: Final = 2.0
"""How often the server is asked for its figures: a millisecond of its time, and 10 kB."""


@dataclass
class TieredKVStats(KVConnectorStats):
    """Counters add up, of gauges the last counts, samples are kept one by one.

    Threads: none of its own; one owner at a time, who alone writes.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part in _PARTS:
            self.data.setdefault(part, {})

    def reset(self) -> None:
        self.data = {part: {} for part in _PARTS}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def count(self, name: str, amount: float, *labels: str) -> None:
        """Add to a counter; nothing is nothing."""
        if amount:
            values = self.data["counters"].setdefault(name, {})
            key = ",".join(labels)
            values[key] = values.get(key, 0) + amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        self.data["gauges"].setdefault(name, {})[",".join(labels)] = value

    def sample(self, name: str, seconds: float) -> None:
        """Add an observation to a histogram."""
        samples = self.data["samples"].setdefault(name, [])
        if len(samples) < SAMPLES_MAX:
            samples.append(seconds)

    def counted(self, name: str, label: str | None = None) -> float:
        """A counter's amount over all its labels, or those that begin with ``label``."""
        values: dict[str, float] = self.data["counters"].get(name, {})
        return sum(amount for key, amount in values.items() if label is None or key.split(",")[0] == label)

    def aggregate(self, other: KVConnectorStats) -> "TieredKVStats":
        """Take in what another worker, or a later step, measured."""
        assert isinstance(other, TieredKVStats)
        for name, values in other.data["counters"].items():
            for key, amount in values.items():
                self.count(name, amount, key)
        for name, values in other.data["gauges"].items():
            self.data["gauges"].setdefault(name, {}).update(values)
        for name, samples in other.data["samples"].items():
            for seconds in samples:
                self.sample(name, seconds)
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log line shows of an interval."""
        lines: dict[str, int | float] = {}
        asked = self.counted("asked_tokens", "host")
        if asked:
            lines["Asked tokens"] = round(asked)
            lines["Hit rate (%)"] = round(100 * self.counted("hit_tokens") / asked, 1)
        for title, name in (("Loaded", "loaded"), ("Stored", "stored")):
            if tokens := self.counted(f"{name}_tokens"):
                lines[f"{title} tokens"] = round(tokens)
            if size_bytes := self.counted(f"{name}_bytes"):
                lines[f"{title} MB"] = round(size_bytes / 1e6, 1)
        for title, name in (("load", "load_seconds"), ("save", "save_seconds"), ("lookup", "lookup_wait_seconds")):
            if samples := self.samples(name):
                lines[f"Mean {title} (ms)"] = round(1e3 * sum(samples) / len(samples), 2)
        for title, name in (("Failures", "failures"), ("Dropped chunks", "dropped_chunks")):
            if count := self.counted(name):
                lines[title] = round(count)
        return lines

    def samples(self, name: str) -> list[float]:
        """Observations of a histogram."""
        found: list[float] = self.data["samples"].get(name, [])
        return found


def stats_of(data: dict[str, Any] | None) -> TieredKVStats:
    """The stats that were sent as plain data; empty ones without."""
    return TieredKVStats(data={} if data is None else dict(data))


@dataclass(slots=True)
class _Outcome:
    """How a lookup ended, as far as is known."""

    decision: str = ""
    lookup_wait_s: float = 0.0
    promotion_wait_s: float | None = None
    is_waiting: bool = False


class SchedulerMeter:
    """Measures one engine's scheduler side.

    Only its own methods write its fields; of the client it empties ``figures``. Threads: vLLM's scheduler thread only.
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
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}

    # -- a request's way through the scheduler -----------------------------------------------------------------

    def offered(self, state: RequestState | None, matched: int | None) -> None:
        """A request was answered ``matched`` tokens; the same question comes again until it is admitted.

        Of a wait the begin and the end have to be told, not each question in between.
        """
        lookup = None if state is None else state.lookup
        if lookup is None or lookup.answered_s is None or lookup.generation != self._client.generation:
            return
        outcome = self._outcomes.get(lookup.id)
        if outcome is None:
            outcome = self._outcomes[lookup.id] = _Outcome(lookup_wait_s=lookup.answered_s - lookup.sent_s)
        if outcome.is_waiting or matched is None:
            outcome.promotion_wait_s = self._monotonic() - lookup.answered_s
            outcome.is_waiting = matched is None
        if lookup.given_up:
            self._given_up(lookup, self._outcomes.pop(lookup.id))
        elif matched is not None:
            answer = self._client.lookups.get(lookup.id)
            is_whole = answer is None or not _has_more(answer)
            has_waited = outcome.promotion_wait_s is not None
            outcome.decision = ("awaited" if has_waited else "ready") if is_whole else "took_what_arrived"

    def _given_up(self, lookup: SentLookup, outcome: _Outcome) -> None:
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
            place = chunk - first_chunk
            source = answer.sources[place] if place < len(answer.sources) else HOST  # a tail
            tokens[source] += min(end, (chunk + 1) * size) - max(computed, chunk * size)
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
        """Count a lookup's asked, hit and missed tokens of each tier, from the top down."""
        if ended.is_asked_anew:
            self._outcomes.pop(ended.id, None)
            return
        info = self._client.info
        slot_bytes = 0 if info is None else info.slot_bytes
        hits = Counter(ended.answer.sources[: _hit_chunks(ended)])
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
        """Stats since the last call, None if there are none; also requests the server's figures when they are due."""
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
            event = engine_event(name)
            match event.shown_in:
                case ShownIn.OWN_METRIC if name == "stores":
                    self._stats.count("stored_tokens", change * self._chunk_tokens)
                case ShownIn.OWN_METRIC:
                    self._stats.count(name, change)
                case ShownIn.DROPPED_CHUNKS | ShownIn.FAILURES | ShownIn.EVENTS as shown:
                    self._stats.count(shown.value, change, event.label or name)

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
        values = {(name, labels): value for name, labels, value in server_values(figures)}
        for name, labels in self._told.keys() - values.keys():
            if name in COUNTED_BY_SERVER:  # by a server that is no more; this one has not counted any
                values[name, labels] = 0.0
        for (name, labels), value in values.items():
            self._stats.set(name, value, *labels)
        self._told = values
        self._stats.set("server_figures_time_seconds", time.time())

    def _tier(self, place: int) -> str:
        return self._client.tiers[place] if place < len(self._client.tiers) else HOST_NAME


def _hit_chunks(ended: EndedLookup) -> int:
    """Chunks that the lookup got; of one for a state those before it, if all is there."""
    answer = ended.answer
    if not ended.state_parts:
        return answer.ready
    wanted = answer.boundary - ended.start + ended.state_parts
    return answer.boundary - ended.start if answer.boundary and answer.ready == wanted else 0


def _has_more(answer: LookupAnswer) -> bool:
    """Whether more of the prefix was on its way, or being looked for."""
    return not answer.is_done and len(answer.slots) + answer.unknown + answer.queued > answer.ready


class CopyMeter:
    """Measures the copies of one rank.

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
    names = {HOST_NAME: CacheHitSource.HOST, "disk": CacheHitSource.DISK}
    sources: Counter[Any] = Counter()
    for tier, count in tokens.items():
        sources[names.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)] += count
    return dict(sources)
