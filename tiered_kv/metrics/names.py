"""Every exported metric and every counted event: name, kind, unit, labels and help, stated here and nowhere else.

The server's ``/metrics`` (``exposition.py``), vLLM's metrics (``vllm/prometheus.py``, ``vllm/engine_metrics.py``) and
the CLI (``stat``, ``top``) read these tables. A new metric is a row here and the place that counts it. What a counter
means is said by its row's ``shown_in``, never by how it is spelled.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final


class MetricKind(Enum):
    """Prometheus's kinds."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class MetricName:
    """One metric.

    Attributes:
        name: Without a prefix and, of counters, without ``_total``.
        unit: Of its values; empty where it counts what it names.
        is_shown_by_engines: vLLM's metrics show it, too, as a gauge below ``server_``.
    """

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    is_shown_by_engines: bool = False


class ShownIn(Enum):
    """The metric in which a counted event is shown."""

    DROPPED_CHUNKS = "dropped_chunks"
    """A chunk that was not stored or written; the label says why."""
    FAILURES = "failures"
    """Something was tried and not got; the label says why."""
    EVENTS = "events"
    """Anything else; the label is the event's name."""
    EVICTED_CHUNKS = "evicted_chunks"
    """A chunk that made room."""
    OWN_METRIC = "own"
    """A metric of its own."""
    NOWHERE = "nowhere"
    """Another metric says the same."""


@dataclass(frozen=True, slots=True)
class EventName:
    """One thing that is counted under a name.

    Attributes:
        label: By which the metric tells it from others; empty: its name.
    """

    name: str
    shown_in: ShownIn
    label: str = ""


_COUNTER, _GAUGE = MetricKind.COUNTER, MetricKind.GAUGE
_HISTOGRAM, _INFO = MetricKind.HISTOGRAM, MetricKind.INFO

SERVER_PREFIX: Final = "tiered_kv_"

SERVER_METRICS: Final = (
    MetricName("build", _INFO, "Version of the server."),
    MetricName("start_time_seconds", _GAUGE, "When the server started.", unit="seconds"),
    MetricName(
        "figures_age_seconds", _GAUGE, "Age of these figures; above 0 while the server is busy.", unit="seconds"
    ),
    MetricName("clients", _GAUGE, "Connections to the server, this one included.", unit="connections"),
    MetricName("sessions", _GAUGE, "Engines that take part.", ("state",), unit="sessions"),
    MetricName("pinned_bytes", _GAUGE, "Host memory that workers have pinned for their GPUs, added up.", unit="bytes"),
    MetricName("pinning_seconds", _GAUGE, "Time that these workers took to pin it, added up.", unit="seconds"),
    MetricName("open_lookups", _GAUGE, "Lookups that have not ended.", unit="lookups"),
    MetricName("leased_bytes", _GAUGE, "Host memory that lookups hold.", unit="bytes", is_shown_by_engines=True),
    MetricName(
        "pending_writes", _GAUGE, "Chunks written before the server ends.", unit="chunks", is_shown_by_engines=True
    ),
    MetricName("lookups", _COUNTER, "Lookups that ended.", unit="lookups"),
    MetricName("prompt_tokens", _COUNTER, "Tokens of prompts looked up, in whole chunks.", unit="tokens"),
    MetricName("asked_tokens", _COUNTER, "Of those, tokens the engine did not have itself.", unit="tokens"),
    MetricName(
        "hit_tokens", _COUNTER, "Asked tokens that were got, by the tier that gave them.", ("tier",), unit="tokens"
    ),
    MetricName("decisions", _COUNTER, "Lookups by what became of them.", ("decision",), unit="lookups"),
    MetricName("missed_tokens", _COUNTER, "Asked tokens that were not got.", unit="tokens"),
    MetricName(
        "used_bytes",
        _GAUGE,
        "Bytes held; of a bucket by all servers.",
        ("tier",),
        unit="bytes",
        is_shown_by_engines=True,
    ),
    MetricName(
        "capacity_bytes",
        _GAUGE,
        "Limit; no sample where there is none.",
        ("tier",),
        unit="bytes",
        is_shown_by_engines=True,
    ),
    MetricName(
        "chunks", _GAUGE, "Chunks held; of a bucket by all servers.", ("tier",), unit="chunks", is_shown_by_engines=True
    ),
    MetricName(
        "queue_chunks", _GAUGE, "Chunks that wait to be written.", ("tier",), unit="chunks", is_shown_by_engines=True
    ),
    MetricName("queue_bytes", _GAUGE, "Host memory held by waiting writes.", ("tier",), unit="bytes"),
    MetricName(
        "jobs",
        _GAUGE,
        "Operations handed to threads and not ended.",
        (
            "tier",
            "operation",
        ),
        unit="operations",
    ),
    MetricName("breaker_open", _GAUGE, "1 while the tier is left out.", ("tier",), is_shown_by_engines=True),
    MetricName("breaker_opened", _COUNTER, "How often the tier was left out.", ("tier",), is_shown_by_engines=True),
    MetricName(
        "corrupt_reads", _COUNTER, "Reads whose bytes were damaged.", ("tier",), unit="reads", is_shown_by_engines=True
    ),
    MetricName(
        "admissions",
        _COUNTER,
        "Chunks that came, by whether they were to be written.",
        (
            "tier",
            "decision",
        ),
        unit="chunks",
    ),
    MetricName("bucket_leader", _GAUGE, "1 where this server keeps the bucket within its limits.", ("tier",)),
    MetricName(
        "stored_chunks",
        _COUNTER,
        "Chunks that came into a tier, by how.",
        (
            "tier",
            "how",
        ),
        unit="chunks",
        is_shown_by_engines=True,
    ),
    MetricName(
        "removed_chunks",
        _COUNTER,
        "Chunks that left a tier, by why.",
        (
            "tier",
            "why",
        ),
        unit="chunks",
        is_shown_by_engines=True,
    ),
    MetricName(
        "stored_bytes", _COUNTER, "Bytes that came into a tier.", ("tier",), unit="bytes", is_shown_by_engines=True
    ),
    MetricName("removed_bytes", _COUNTER, "Bytes that left a tier.", ("tier",), unit="bytes", is_shown_by_engines=True),
    MetricName(
        "resident_chunks",
        _GAUGE,
        "Chunks this server knows to be there: stored less removed.",
        ("tier",),
        unit="chunks",
        is_shown_by_engines=True,
    ),
    MetricName(
        "resident_bytes",
        _GAUGE,
        "Their bytes, less those that others stored.",
        ("tier",),
        unit="bytes",
        is_shown_by_engines=True,
    ),
    MetricName(
        "operations",
        _COUNTER,
        "Operations on tiers that ended.",
        (
            "tier",
            "operation",
            "outcome",
        ),
        unit="operations",
        is_shown_by_engines=True,
    ),
    MetricName(
        "operation_seconds",
        _COUNTER,
        "Time they took together.",
        (
            "tier",
            "operation",
            "outcome",
        ),
        unit="seconds",
        is_shown_by_engines=True,
    ),
    MetricName(
        "operation_bytes",
        _COUNTER,
        "Bytes moved by those that were ok.",
        (
            "tier",
            "operation",
        ),
        unit="bytes",
        is_shown_by_engines=True,
    ),
    MetricName(
        "curve_found_share",
        _GAUGE,
        "Share of the prompts' chunks that a tier of so many times its size would find, estimated.",
        ("namespace", "tier", "times"),
    ),
    MetricName(
        "evicted_chunks",
        _COUNTER,
        "Chunks removed by this server to make room.",
        ("tier",),
        unit="chunks",
        is_shown_by_engines=True,
    ),
    MetricName(
        "dropped_chunks",
        _COUNTER,
        "Chunks that were not written, by the reason.",
        ("reason",),
        unit="chunks",
        is_shown_by_engines=True,
    ),
    MetricName("events", _COUNTER, "Everything else that is counted.", ("event",)),
)
"""What ``serve --metrics-port`` shows, in its order."""

ENGINE_PREFIX: Final = "vllm:tiered_kv_"
"""vLLM removes metrics whose names begin with ``vllm:`` when an engine starts again in the same process."""

ENGINE_METRICS: Final = (
    MetricName("lookups", _COUNTER, "Lookups that this engine sent.", unit="lookups"),
    MetricName(
        "asked_tokens",
        _COUNTER,
        "Tokens this engine asked a tier for: what its GPU and the tiers above did not have.",
        ("tier",),
        unit="tokens",
    ),
    MetricName("hit_tokens", _COUNTER, "Of those, tokens the tier gave.", ("tier",), unit="tokens"),
    MetricName("missed_tokens", _COUNTER, "Of those, tokens the tier did not give.", ("tier",), unit="tokens"),
    MetricName("asked_bytes", _COUNTER, "The asked tokens as bytes of blobs.", ("tier",), unit="bytes"),
    MetricName("hit_bytes", _COUNTER, "The hit tokens as bytes of blobs.", ("tier",), unit="bytes"),
    MetricName("loads", _COUNTER, "Requests whose KV this engine began to load.", unit="requests"),
    MetricName(
        "loaded_tokens",
        _COUNTER,
        "Tokens loaded into this engine's GPU blocks, by the tier that gave them to the lookup.",
        ("tier",),
        unit="tokens",
    ),
    MetricName(
        "loaded_bytes",
        _COUNTER,
        "Bytes copied from host memory into this engine's GPU blocks, all ranks.",
        unit="bytes",
    ),
    MetricName("stored_tokens", _COUNTER, "Tokens this engine stored into host memory.", unit="tokens"),
    MetricName(
        "stored_bytes", _COUNTER, "Bytes copied from this engine's GPU blocks to host memory, all ranks.", unit="bytes"
    ),
    MetricName(
        "decisions",
        _COUNTER,
        "What lookups of this engine ended in: ready, awaited, took_what_arrived, not_awaited, miss.",
        ("decision",),
        unit="lookups",
    ),
    MetricName("failures", _COUNTER, "What this engine tried and did not get, by the reason.", ("reason",)),
    MetricName(
        "dropped_chunks", _COUNTER, "Chunks this engine did not store, by the reason.", ("reason",), unit="chunks"
    ),
    MetricName("events", _COUNTER, "Everything else that this engine's scheduler side counts.", ("event",)),
    MetricName(
        "lookup_wait_seconds", _HISTOGRAM, "Time from a lookup until its answer, seen by this engine.", unit="seconds"
    ),
    MetricName(
        "promotion_wait_seconds",
        _HISTOGRAM,
        "Time a request of this engine waited for chunks on their way from below.",
        unit="seconds",
    ),
    MetricName(
        "load_seconds", _HISTOGRAM, "Time of one request's copy from host memory to the GPU, per rank.", unit="seconds"
    ),
    MetricName(
        "save_seconds", _HISTOGRAM, "Time of one step's copies from the GPU to host memory, per rank.", unit="seconds"
    ),
    MetricName("connected", _GAUGE, "1 while this engine has a session with its cache server."),
    MetricName(
        "server_figures_time_seconds",
        _GAUGE,
        "When the cache server last told this engine the server_ figures, unix time.",
        unit="seconds",
    ),
)
"""What an engine shows of itself in vLLM's ``/metrics``."""

_DROPPED, _FAILURES, _EVENTS = ShownIn.DROPPED_CHUNKS, ShownIn.FAILURES, ShownIn.EVENTS

_SERVER_EVENTS: Final = (
    EventName("answers", _EVENTS),
    EventName("answers_asked", _EVENTS),
    EventName("delete_failed", _EVENTS),
    EventName("hint_requests_refused", _EVENTS),
    EventName("hints_demote", _EVENTS),
    EventName("hints_of_nothing", _EVENTS),
    EventName("hints_pin", _EVENTS),
    EventName("hints_prefetch", _EVENTS),
    EventName("hints_refused", _EVENTS),
    EventName("hints_release", _EVENTS),
    EventName("hints_without_engine", _EVENTS),
    EventName("host_evicted", ShownIn.EVICTED_CHUNKS),
    EventName("lease_cap_reached", _EVENTS),
    EventName("lease_damaged", _EVENTS),
    EventName("lease_expired", _EVENTS),
    EventName("lease_gave_way", _EVENTS),
    EventName("line_full", _EVENTS),
    EventName("loans", _EVENTS),
    EventName("loans_overdue", _EVENTS),
    EventName("loans_refused", _EVENTS),
    EventName("lower_evicted", ShownIn.EVICTED_CHUNKS),
    EventName("peer_questions_refused", _EVENTS),
    EventName("prefetches", _EVENTS),
    EventName("prefetches_refused", _EVENTS),
    EventName("probes", _EVENTS),
    EventName("promotion_without_slot", _EVENTS),
    EventName("read_failed_corrupt", _EVENTS),
    EventName("read_failed_foreign", _EVENTS),
    EventName("read_failed_missing", _EVENTS),
    EventName("read_failed_no_room", _EVENTS),
    EventName("read_failed_no_source", _EVENTS),
    EventName("read_failed_unavailable", _EVENTS),
    EventName("request_pins", _EVENTS),
    EventName("request_pins_in_force", _EVENTS),
    EventName("request_pins_nowhere", _EVENTS),
    EventName("request_pins_of_nothing", _EVENTS),
    EventName("request_pins_refused", _EVENTS),
    EventName("request_pins_refused_of_tag", _EVENTS),
    EventName("restore_conflict", _EVENTS),
    EventName("seal_failed", _EVENTS),
    EventName("row_dropped_erased", _DROPPED),
    EventName("row_dropped_no_parent", _DROPPED),
    EventName("row_dropped_no_room", _DROPPED),
    EventName("row_dropped_not_now", _DROPPED),
    EventName("row_dropped_over_share", _DROPPED),
    EventName("row_dropped_taken_back", _DROPPED),
    EventName("search_refused", _EVENTS),
    EventName("searches", _EVENTS),
    EventName("session_chunks_demoted", _EVENTS),
    EventName("session_chunks_released", _EVENTS),
    EventName("session_ends", _EVENTS),
    EventName("session_ends_of_nothing", _EVENTS),
    EventName("session_releases_dropped", _EVENTS),
    EventName("session_states", _EVENTS),
    EventName("session_states_of_nothing", _EVENTS),
    EventName("slab_reclaimed", _EVENTS),
    EventName("slab_refused", _EVENTS),
    EventName("state_searches", _EVENTS),
    EventName("store_collision", _EVENTS),
    EventName("store_duplicate", _EVENTS),
    EventName("tail_duplicate", _EVENTS),
    EventName("tail_gave_way", _EVENTS),
    EventName("tail_no_room", _EVENTS),
    EventName("tail_refused", _EVENTS),
    EventName("tail_saved", _EVENTS),
    EventName("tail_stored", _EVENTS),
    EventName("tail_superseded", _EVENTS),
    EventName("upload_dropped_no_parent", _DROPPED),
    EventName("upload_prefix_lost", _EVENTS),
    EventName("uploaded", _EVENTS),
    EventName("write_deferred", _EVENTS),
    EventName("write_dropped_erased", _DROPPED),
    EventName("write_dropped_evicted", _DROPPED),
    EventName("write_dropped_for_load", _DROPPED),
    EventName("write_dropped_no_parent", _DROPPED),
    EventName("write_dropped_no_room", _DROPPED),
    EventName("write_dropped_over_share", _DROPPED),
    EventName("write_dropped_queue_full", _DROPPED),
    EventName("write_dropped_seal_failed", _DROPPED),
    EventName("write_dropped_source_evicted", _DROPPED),
    EventName("write_failed_corrupt", _EVENTS),
    EventName("write_failed_foreign", _EVENTS),
    EventName("write_failed_missing", _EVENTS),
    EventName("write_failed_no_room", _EVENTS),
    EventName("write_failed_no_source", _EVENTS),
    EventName("write_failed_unavailable", _EVENTS),
    EventName("write_put_off_no_room", _EVENTS),
    EventName("write_put_off_unavailable", _EVENTS),
    EventName("written", _EVENTS),
)

_ENGINE_EVENTS: Final = (
    EventName("control_refused", _EVENTS),
    EventName("handovers_awaited", _EVENTS),
    EventName("handovers_dropped", _EVENTS),
    EventName("handovers_of_nothing", _EVENTS),
    EventName("handovers_sent", _EVENTS),
    EventName("handovers_short", _EVENTS),
    EventName("hints_dropped", _EVENTS),
    EventName("hints_sent", _EVENTS),
    EventName("hints_unknown", _EVENTS),
    EventName("load_tokens", ShownIn.NOWHERE),
    EventName("load_window_unknown", _FAILURES),
    EventName("loads", ShownIn.OWN_METRIC),
    EventName("loads_failed", _FAILURES),
    EventName("loads_put_off", _EVENTS),
    EventName("loads_too_late", _FAILURES),
    EventName("lookup_not_sent", _FAILURES),
    EventName("lookup_renewed", _EVENTS),
    EventName("lookup_session_lost", _FAILURES),
    EventName("lookup_timeout", _FAILURES),
    EventName("lookups", ShownIn.OWN_METRIC),
    EventName("pins_dropped", _EVENTS),
    EventName("pins_of_nothing", _EVENTS),
    EventName("pins_sent", _EVENTS),
    EventName("promotion_not_awaited", ShownIn.NOWHERE),
    EventName("request_unaccountable", _FAILURES),
    EventName("requests_reading_nothing", _EVENTS),
    EventName("sessions_lost", _FAILURES),
    EventName("session_states_dropped", _EVENTS),
    EventName("session_states_of_nothing", _EVENTS),
    EventName("session_states_sent", _EVENTS),
    EventName("state_dropped_blocks_wanted", _EVENTS),
    EventName("state_dropped_no_session", _EVENTS),
    EventName("state_dropped_no_slot", _EVENTS),
    EventName("state_dropped_not_storable", _EVENTS),
    EventName("state_dropped_partial", _EVENTS),
    EventName("state_dropped_pool_emptied", _EVENTS),
    EventName("state_dropped_preempted", _EVENTS),
    EventName("state_dropped_reset", _EVENTS),
    EventName("state_dropped_session_lost", _EVENTS),
    EventName("state_dropped_unaccountable", _EVENTS),
    EventName("state_forks", _EVENTS),
    EventName("state_held", _EVENTS),
    EventName("state_offers", _EVENTS),
    EventName("state_parts_dropped", _EVENTS),
    EventName("state_parts_stored", _EVENTS),
    EventName("states", _EVENTS),
    EventName("states_failed", _FAILURES),
    EventName("store_chunks", _EVENTS),
    EventName("store_dropped_adapter_not_told", _DROPPED, "adapter_not_told"),
    EventName("store_dropped_blocks_wanted", _DROPPED, "blocks_wanted"),
    EventName("store_dropped_undrafted", _DROPPED, "undrafted"),
    EventName("store_dropped_no_session", _DROPPED, "no_session"),
    EventName("store_dropped_no_slot", _DROPPED, "no_slot"),
    EventName("store_dropped_pool_emptied", _DROPPED, "pool_emptied"),
    EventName("store_dropped_preempted", _DROPPED, "preempted"),
    EventName("store_dropped_reset", _DROPPED, "reset"),
    EventName("store_dropped_session_lost", _DROPPED, "session_lost"),
    EventName("store_dropped_unaccountable", _DROPPED, "unaccountable"),
    EventName("store_dropped_window_passed", _DROPPED, "window_passed"),
    EventName("store_held", _EVENTS),
    EventName("stores", ShownIn.OWN_METRIC),
    EventName("stores_failed", _FAILURES),
    EventName("tail_dropped_blocks_wanted", _EVENTS),
    EventName("tail_dropped_no_session", _EVENTS),
    EventName("tail_dropped_no_slot", _EVENTS),
    EventName("tail_dropped_not_storable", _EVENTS),
    EventName("tail_dropped_pool_emptied", _EVENTS),
    EventName("tail_dropped_reset", _EVENTS),
    EventName("tail_dropped_session_lost", _EVENTS),
    EventName("tail_dropped_unaccountable", _EVENTS),
    EventName("tail_dropped_unsupported", _EVENTS),
    EventName("tail_held", _EVENTS),
    EventName("tail_loads", _EVENTS),
    EventName("tail_offers", _EVENTS),
    EventName("tails", _EVENTS),
    EventName("tails_failed", _FAILURES),
)

SERVER_EVENTS: Final = {event.name: event for event in _SERVER_EVENTS}
"""Counters of the tiering and of the server, by name."""

ENGINE_EVENTS: Final = {event.name: event for event in _ENGINE_EVENTS}
"""Counters of an engine's scheduler side, by name."""


def server_event(name: str) -> EventName:
    """The row of a server's counter; of a server of another version a counter may have none and is an event."""
    return SERVER_EVENTS.get(name) or EventName(name, ShownIn.EVENTS)


def engine_event(name: str) -> EventName:
    """The row of a counter of the scheduler side; one without a row is an event, and a test says that it lacks one."""
    return ENGINE_EVENTS.get(name) or EventName(name, ShownIn.EVENTS)
