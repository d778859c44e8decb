"""A second door: our tiers under vLLM's own offloading (``OffloadingConnector`` with ``TieringOffloadingSpec``).

vLLM moves KV between GPU and its own host memory, one row a chunk; below that it asks tiers, one key at a time. This
one is named in its configuration, and everything else there is a setting of ours::

    {"type": "TieredKVTier", "module_path": "tiered_kv.vllm.offloading", "storage_uri": "file:///var/cache/kv"}

:class:`TieredKVTier` answers vLLM's questions from what :class:`~tiered_kv.vllm.row_jobs.RowJobs` knows.
:func:`join_offloading` is called for every connector of vLLM (``plugin.py``): the tier is made in the scheduler's
process and has to be told by a worker what the engine is (``identity/rows.py``); vLLM's handshake carries that.

vLLM calls a tier in its scheduler's thread, without a guard: nothing here blocks or raises, but ``drain_jobs``, which
waits for running copies. Three things vLLM leaves to its tiers, each of which ends or starves an engine:

- A request with more hits than host memory has rows would be promoted for ever, each chunk pushing another out; so
  would several that wait. Hits of all requests that wait together have a limit (``SHARE_MAX``).
- "Ask again" has no time limit there: it has one here.
- What could not be loaded must be a miss for that request, or it is loaded again for ever.
"""

import functools
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.config import Config
from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.keys.tags import NO_TAG, tag_digest
from tiered_kv.server import protocol as m
from tiered_kv.server.worker_client import pages_on_the_wire
from tiered_kv.vllm.compat import (
    JobResult,
    KVConnectorRole,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
    SecondaryTierManager,
    key_positions,
    offloading_config,
    secondary_tiers,
)
from tiered_kv.vllm.identity.rows import RowIdentity, row_identity
from tiered_kv.vllm.logs import show_our_logs
from tiered_kv.vllm.request_params import SKIP_LOAD, SKIP_SAVE, TAG
from tiered_kv.vllm.row_jobs import Find, RowJobs, RowNames

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

logger = logging.getLogger("vllm." + __name__)

SHARE_MAX: Final = 0.5
"""Of vLLM's rows, what the hits of requests that wait may take together."""

SEARCH_S: Final = 1.0
"""Longest wait for chunks that a search in a bucket may still find."""

LOAD_S: Final = 1.0
SLOWEST_PREFILL_TOKENS_PER_S: Final = 1_000
"""A load is waited for as long as this prefill would take, at least ``LOAD_S``: vLLM tells a tier of no rate."""

IDENTITY_SETTINGS: Final = ("model_id", "share_vllm_versions")
"""Settings of a tier that are part of the name of what it stores."""


@dataclass(slots=True)
class _Request:
    """What is known of one request; kept in vLLM's context of it.

    Attributes:
        resets: How often the cache had been reset when it came.
        theirs: vLLM's keys of its prefix.
        places: By vLLM's key, its chunk's index.
        seen: Keys of vLLM's context that were looked at.
        names: What they are called here.
        held: Leading chunks that may be had; None: not known yet.
        hits: vLLM's keys of chunks that are answered as hits, while it waits.
        waits_s: Since when it waits for room among vLLM's rows.
        step: The last one in which it was answered "ask again".
    """

    resets: int
    may_read: bool = True
    may_store: bool = True
    tag: bytes = NO_TAG
    theirs: list[bytes] = field(default_factory=list)
    places: dict[bytes, int] = field(default_factory=dict)
    seen: int = 0
    names: RowNames | None = None
    find: Find | None = None
    held: int | None = None
    hits: set[bytes] = field(default_factory=set)
    waits_s: float | None = None
    step: int = -1


class _Requests(dict["TieredKVTier", _Request]):
    """One request, by tier: vLLM's context of it keeps one object of a class, for all tiers."""


class TieredKVTier(SecondaryTierManager):
    """Keeps rows of vLLM's host memory in the tiers of a server of ours.

    Threads: vLLM's scheduler thread only.
    """

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        *,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        enable_kv_events: bool = False,
        **settings: Any,
    ) -> None:
        """Take the settings; the server is joined once the engine's workers have said what they are.

        Args:
            locality: Vllm's word for whether events call this tier local or remote.
            enable_kv_events: Tell routers what is stored here, where the engine tells events at all.
            settings: Ours (docs/configuration.md), but ``chunk_tokens``: a chunk is a row.

        Raises:
            ConfigError: A setting is wrong.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        show_our_logs()
        spec, groups = offloading_spec, offloading_spec.config.groups
        self.locality = None if locality is None else Locality(locality)
        if "chunk_tokens" in settings:
            raise ConfigError("chunk_tokens: a chunk is a row of vLLM's; set blocks_per_chunk beside secondary_tiers")
        self._row_tokens = int(groups[0].tokens_per_block) * int(spec.config.cache.blocks_per_chunk)
        self._config = Config.from_mapping({**settings, "chunk_tokens": self._row_tokens})
        logger.info("settings: %s", self._config.describe())
        self._rows = np.frombuffer(primary_kv_view.cast("B"), np.uint8).reshape(-1, self.block_size_bytes)
        self._hits_max = max(1, int(SHARE_MAX * len(self._rows)))
        self._jobs: RowJobs | None = None
        self._refusal = "no worker has said yet what this engine serves"
        self._requests: dict[str, _Request] = {}  # those that wait and have hits
        self._hits = 0
        self._step = 0
        self._resets = 0
        self._has_events = enable_kv_events and bool(offloading_spec.kv_events_config.enable_kv_cache_events)
        self._events: list[Any] = []
        self._stored: dict[int, list[bytes]] = {}  # keys of running stores
        self._loading: dict[int, tuple[_Request, list[tuple[int, bytes]]]] = {}
        self._failed: list[Any] = []  # results of jobs that never began
        self._is_told = False

    @property
    def settings(self) -> Config:
        """As they were given, with the tokens of a row as ``chunk_tokens``."""
        return self._config

    # -- joining -------------------------------------------------------------------------------------------------------

    def begin(self, identities: Collection[RowIdentity], engine_id: str) -> None:
        """The workers have said what the engine is: join the server.

        Raises:
            TieredKVError: With ``strict``, they cannot be served.
        """
        first = next(iter(identities), RowIdentity(refusal="no worker has said what it serves"))
        refusal = next((one.refusal for one in identities if one.refusal), first.refusal)
        if not refusal and any(one.fields != first.fields for one in identities):
            refusal = "workers of one engine disagree on what they serve"
        if refusal:
            self._refusal = refusal
            if self._config.strict:
                raise TieredKVError(f"the tier cannot serve this engine: {refusal}")
            logger.error("this engine's offloading goes on without the tier %s: %s", self.tier_type, refusal)
            return
        row = LayerPage("row", "U8", (self.block_size_bytes,), "B")
        pages = pages_on_the_wire([row], {"row": "vllm-offloading-row"})
        tokens = self._row_tokens
        join = m.JoinWorker(0, 1, tokens, tokens, first.fields, pages, stored_by=first.stored_by)
        self._jobs = RowJobs(self._config, f"{engine_id}-rows", join, self._rows)
        if self._jobs.wait_ready(self._config.start_timeout_s):
            self._refusal = ""
            return
        self._refusal = self._jobs.client.refusal or f"no session within {self._config.start_timeout_s:g} s"
        if self._config.strict:
            raise TieredKVError(f"the tier is not ready: {self._refusal}")
        logger.error("this engine starts without the tier %s: %s", self.tier_type, self._refusal)

    # -- what is held --------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: "ReqContext") -> Any:
        self._no_longer_waits(req_context.req_id)  # ids of requests may come again
        params = req_context.kv_transfer_params
        params = params if isinstance(params, Mapping) else {}
        request = _Request(self._resets)
        request.may_read = params.get(SKIP_LOAD) is not True
        request.may_store = params.get(SKIP_SAVE) is not True
        if (tag := params.get(TAG)) is not None:
            try:
                request.tag = tag_digest(tag if isinstance(tag, str) else "")
            except ValueError as exc:
                request.may_store = False  # nobody could erase it later
                logger.warning("a request is not stored: its tag cannot be read, expected %s", exc)
        if (of_tiers := req_context.get_state(_Requests)) is None:
            req_context.set_state(of_tiers := _Requests())
        of_tiers[self] = request
        return RequestOffloadingContext()

    def _request(self, req_context: "ReqContext") -> _Request | None:
        of_tiers = req_context.get_state(_Requests)
        return None if of_tiers is None else of_tiers.get(self)

    def lookup(self, key: "OffloadKey", req_context: "ReqContext") -> Any:
        request = self._request(req_context)
        if request is not None and key in request.hits:
            return LookupResult.HIT
        if request is None or not request.may_read or self._jobs is None:
            self._tell_refusal()
            return LookupResult.MISS
        if request.step == self._step:
            return LookupResult.MISS  # vLLM waits for the first such key of a prefix, and asks for no more of it
        self._take_keys(request, req_context)
        place = request.places.get(key)
        if place is None or not self._jobs.is_ready:
            return LookupResult.MISS  # the end of a prompt, which is no whole row
        held = request.held if request.held is not None else self._ask(self._jobs, request)
        if held is None:
            return self._again(request)
        if place >= held:
            return LookupResult.MISS
        return self._hit(request, place, req_context.req_id)

    def _again(self, request: _Request) -> Any:
        request.step = self._step
        return LookupResult.RETRY

    def _hit(self, request: _Request, place: int, name: str) -> Any:
        """Answer for a chunk that is held and those behind it, within the limit of all requests that wait."""
        assert request.held is not None
        room = min(request.held - place, self._hits_max - self._hits)
        if room > 0:
            before = len(request.hits)
            request.hits.update(request.theirs[place : place + room])
            self._hits += len(request.hits) - before  # chunks behind it may have been counted
            request.waits_s = None
            self._requests[name] = request
            return LookupResult.HIT
        now_s = time.monotonic()
        if request.waits_s is None:
            request.waits_s = now_s
        if self._hits > len(request.hits) and now_s - request.waits_s < LOAD_S:
            return self._again(request)  # another request goes first
        request.held = place
        return LookupResult.MISS

    def _ask(self, jobs: RowJobs, request: _Request) -> int | None:
        """Leading chunks that are held, once that is known."""
        if request.find is None:
            names = self._names(jobs, request)
            request.find = None if names is None else jobs.find(names)
            if request.find is None:
                return 0  # nobody answers now: what waits for other reasons asks again
        request.held = jobs.answer(request.find, SEARCH_S)
        return request.held

    def _names(self, jobs: RowJobs, request: _Request) -> RowNames | None:
        namespace = jobs.namespace
        if namespace is None:
            return None
        if request.names is None or request.names.namespace is not namespace:
            request.names = RowNames(namespace)
        request.names.extend(request.theirs)
        return request.names

    def _take_keys(self, request: _Request, req_context: "ReqContext") -> None:
        """Take in the keys of chunks that became whole since the last look."""
        positions = key_positions(req_context)
        if len(positions) == request.seen:
            return
        for key, end in islice(positions.items(), request.seen, None):
            if end == (len(request.theirs) + 1) * self._row_tokens:
                request.places[key] = len(request.theirs)
                request.theirs.append(key)
        request.seen = len(positions)

    def _tell_refusal(self) -> None:
        if self._refusal and not self._is_told:
            self._is_told = True
            logger.warning("nothing is found in the tier %s: %s", self.tier_type, self._refusal)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: "TransferJob", *_: Any, **__: Any) -> None:
        job, request = job_metadata, self._request(job_metadata.req_context)
        self._no_longer_waits(job.req_context.req_id)  # it computes
        keys = list(job.keys)
        is_current = request is not None and request.may_store and request.resets == self._resets
        names = None
        if is_current and self._jobs is not None and request is not None:
            self._take_keys(request, job.req_context)
            names = self._names(self._jobs, request)
        places = [] if request is None else [request.places.get(key) for key in keys]
        if not keys or names is None or self._jobs is None or request is None or None in places:
            self._never_began(job)
            return
        pairs = [(place, int(row)) for place, row in zip(places, job.chunk_ids, strict=True) if place is not None]
        self._stored[job.job_id] = [request.theirs[place] for place, _ in sorted(pairs)]
        self._jobs.store(job.job_id, names, pairs, request.tag)

    def submit_load(self, job_metadata: "TransferJob", *_: Any, **__: Any) -> None:
        job, request = job_metadata, self._request(job_metadata.req_context)
        names = None if self._jobs is None or request is None else self._names(self._jobs, request)
        places = [] if request is None else [request.places.get(key) for key in job.keys]
        if not places or names is None or self._jobs is None or request is None or None in places:
            if request is not None and places:
                self._cut(request, 0)
            self._never_began(job)
            return
        pairs = sorted((place, int(row)) for place, row in zip(places, job.chunk_ids, strict=True) if place is not None)
        self._loading[job.job_id] = (request, [(place, request.theirs[place]) for place, _ in pairs])
        limit_s = self._config.promotion_deadline_ms / 1e3
        wait_s = max(LOAD_S, len(pairs) * self._row_tokens / SLOWEST_PREFILL_TOKENS_PER_S)
        self._jobs.load(job.job_id, names, pairs, min(wait_s, limit_s))

    def _never_began(self, job: "TransferJob") -> None:
        """Tell the end of a job at once; one of no rows has all of them."""
        self._tell_refusal()
        self._failed.append(JobResult(job.job_id, success=not job.keys))

    def get_finished_jobs(self) -> Iterable[Any]:
        results, self._failed = self._failed, []
        for done in () if self._jobs is None else self._jobs.take_done():
            if done.job in self._loading:
                results.append(self._loaded(done))
                continue
            keys = self._stored.pop(done.job)
            if self._has_events and (stored := [key for key, is_good in zip(keys, done.good, strict=True) if is_good]):
                self._events.append(
                    OffloadingEvent(keys=stored, medium=self.medium, removed=False, locality=self.locality)
                )
            results.append(
                JobResult(
                    done.job, success=all(done.good), transfer_time=done.seconds, transfer_bytes=done.copied_bytes
                )
            )
        return results

    def _cut(self, request: _Request, place: int) -> None:
        """What lies there or behind is a miss from now on."""
        request.held = min(place, request.held or 0)
        lost = request.hits.difference(request.theirs[: request.held])
        request.hits -= lost
        self._hits -= len(lost)

    def _loaded(self, done: Any) -> Any:
        """The result of a load; what did not come is a miss from now on, or it would be loaded again for ever."""
        request, chunks = self._loading.pop(done.job)
        bad = [place for (place, _), is_good in zip(chunks, done.good, strict=True) if not is_good]
        if bad:
            self._cut(request, bad[0])
        good = tuple(key for (_, key), is_good in zip(chunks, done.good, strict=True) if is_good)
        return JobResult(
            done.job,
            success=not bad,
            successful_keys=good if bad and good else None,
            transfer_time=done.seconds,
            transfer_bytes=done.copied_bytes,
        )

    # -- a request's end, and the step's -------------------------------------------------------------------------------

    def on_schedule_end(self, context: "ScheduleEndContext") -> None:
        self._step += 1
        for name in context.new_req_ids:
            self._no_longer_waits(name)
        if self._jobs is not None:
            self._jobs.poll()

    def on_request_finished(self, req_context: "ReqContext") -> None:
        self._no_longer_waits(req_context.req_id)
        request = self._request(req_context)
        if request is not None and request.find is not None and self._jobs is not None:
            self._jobs.forget(request.find)

    def _no_longer_waits(self, name: str) -> None:
        """The request runs, or is over: its hits push out nobody's any more."""
        request = self._requests.pop(name, None)
        if request is not None:
            self._hits -= len(request.hits)
            request.hits.clear()

    # -- the rest ------------------------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[Any]:
        events, self._events = self._events, []
        return events

    def drain_jobs(self) -> None:
        """End all jobs, and take what is held for another model's: vLLM calls this when it resets its caches.

        It tells a tier of that in no other way, and after new weights the old KV must not be found: neither by this
        engine nor by one that starts later, as after a reset of the connector (``server/epochs.py``). vLLM resets them
        for a sleep and a pause, too.
        """
        if self._jobs is not None:
            self._jobs.drain()
            self._jobs.reset()
        for name in list(self._requests):
            self._no_longer_waits(name)
        self._resets += 1

    def shutdown(self) -> None:
        """Leave the server, which goes on writing what it has. Idempotent."""
        if self._jobs is not None:
            self._jobs.close()
        self._rows = self._rows[:0].copy()  # vLLM unmaps them


# -- how a tier learns what the engine is ------------------------------------------------------------------------------


def our_tiers(extra_config: Any) -> list[dict[str, Any]]:
    """The tiers of ours among those that a connector's ``kv_connector_extra_config`` names."""
    named = extra_config.get("secondary_tiers", []) if extra_config else []
    tiers = [one for one in named if isinstance(one, dict)] if isinstance(named, list) else []
    return [one for one in tiers if one.get("module_path") == __name__]


def join_offloading(connector: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
    """Have the workers' side of an ``OffloadingConnector`` tell ours what it serves, if a tier of ours is below it.

    The connector is made already; its own methods are called as before.
    """
    extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
    if not our_tiers(extra_config):
        return
    if role is KVConnectorRole.WORKER:
        connector.get_handshake_metadata = functools.partial(_identity, vllm_config, kv_cache_config, extra_config)
        return
    tiers = [one for one in secondary_tiers(connector) if isinstance(one, TieredKVTier)]

    def take(content: dict[tuple[int, int], Any]) -> None:
        identities = [
            one if isinstance(one, RowIdentity) else RowIdentity(refusal=f"rank {rank} did not say what it serves")
            for rank, one in sorted(content.items())
        ]
        for number, tier in enumerate(tiers):
            tier.begin(identities, f"{vllm_config.kv_transfer_config.engine_id}-{number}")

    connector.set_xfer_handshake_metadata_pp_aware = take


def _identity(vllm_config: Any, kv_cache_config: Any, extra_config: Any) -> RowIdentity:
    """What this worker's engine is."""
    offloading = offloading_config(vllm_config, kv_cache_config)
    tokens = int(offloading.groups[0].tokens_per_block) * int(offloading.cache.blocks_per_chunk)
    tiers = our_tiers(extra_config)
    if any(tier.get(name) != tiers[0].get(name) for tier in tiers for name in IDENTITY_SETTINGS):
        return RowIdentity(refusal=f"tiers of one engine say one thing of its model: {', '.join(IDENTITY_SETTINGS)}")
    ours = {name: value for name, value in tiers[0].items() if name in ("storage_uri", *IDENTITY_SETTINGS)}
    try:
        config = Config.from_mapping({**ours, "chunk_tokens": tokens})
    except ConfigError as exc:
        return RowIdentity(refusal=str(exc))
    rows = {
        "blocks_per_chunk": int(offloading.cache.blocks_per_chunk),
        "canonical_layout": bool(offloading.canonical_layout),
        "replicated_layout": bool(offloading.replicated_layout),
        "worker_kv_bytes_per_block": int(offloading.worker_kv_bytes_per_block),
        "world_size": int(offloading.parallel.world_size),
    }
    return row_identity(vllm_config, kv_cache_config, config, rows)
