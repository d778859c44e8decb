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

A key of vLLM's names a chunk's prefix and one group of layers. Of full attention a request needs all rows of its
prefix, of layers that forget those of the window, or the one state, that continue at its end; these are stored at few
ends only, and vLLM looks for them from the prompt's end on::

    full attention  [0][1][2][3][4][5][6][7]         one question for all of them: how many are held
    window of 2                    [4][5]            a question each, from where full attention ends
    state                              [5]  ->  a hit of six rows

So a request's rows of full attention are not promoted before one of each of these was found: most prompts that share a
beginning have no state where they part.

Another engine may ask through a tier of vLLM's beside ours (``p2p``), which passes its keys on (``ParentManager``).
Such a request has keys and no prompt, so each row is looked for by its name.
"""

import functools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.config import Config
from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.keys.row_names import GROUP_BYTES, RowNames
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
    canonical_pages,
    end_offloading,
    key_positions,
    offloading_config,
    secondary_tiers,
)
from tiered_kv.vllm.drafts import Drafts
from tiered_kv.vllm.identity.adapters import Adapter, Unaccountable
from tiered_kv.vllm.identity.rows import RowIdentity, row_identity
from tiered_kv.vllm.logs import show_our_logs
from tiered_kv.vllm.request_params import NO_PARAMS, SAVE_DECODE, RequestParams, RequestParamsReader
from tiered_kv.vllm.row_adapters import RowAdapters, report_adapters, salted
from tiered_kv.vllm.row_groups import RowGroup, of_all_ranks, on_rank, row_groups
from tiered_kv.vllm.row_hints import RowHints, has_hints
from tiered_kv.vllm.row_jobs import Find, RowJobs
from tiered_kv.vllm.row_metrics import DROPPED, HINTS, LOADED, NOT_LOADED, STORED, RowMetrics, definitions
from tiered_kv.vllm.row_waits import RowWaits
from tiered_kv.vllm.undrafted import UndraftedTokens

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

logger = logging.getLogger("vllm." + __name__)

SHARE_MAX: Final = 0.5
"""Of vLLM's rows, what the hits of requests that wait may take together."""

SEARCH_S: Final = 1.0
"""Longest wait for chunks that a search in a bucket may still find."""

ASKED_MAX: Final = 32
"""Rows of windows and states that are asked for at a time, for one request and group."""

ROOM_S: Final = 1.0
"""Longest wait for room among vLLM's rows, which others' hits have."""

IDENTITY_SETTINGS: Final = ("model_id", "share_vllm_versions")
"""Settings of a tier that are part of the name of what it stores."""


@dataclass(slots=True)
class _Rows:
    """One request's rows of one group of layers.

    Attributes:
        theirs: vLLM's keys: of full attention those of the prefix, else in the order of their first use.
        places: Of layers that forget: by vLLM's key, its place among them.
        names: What they are called here.
        salt: Of these names, where the request has an adapter (``row_adapters.py``).
        ours: The names, where they are not vLLM's keys.
        find: The question how many are held.
        held: Leading chunks that may be had, and are worth it; None: not known yet.
        is_measured: How fast they would come is known.
        step: The last one in which it was answered "ask again".
        asked: Of layers that forget: rows that were asked for.
        found: And those of which the answer is known.
        found_end: How many tokens end with the deepest one that was found.
        is_named: Another engine asks for them, by their names alone.
    """

    group: RowGroup
    theirs: list[bytes] = field(default_factory=list)
    places: dict[bytes, int] = field(default_factory=dict)
    names: RowNames | None = None
    find: Find | None = None
    held: int | None = None
    is_measured: bool = True
    step: int = -1
    asked: dict[bytes, Find] = field(default_factory=dict)
    found: dict[bytes, bool] = field(default_factory=dict)
    found_end: int = 0
    is_named: bool = False
    salt: bytes = b""
    ours: list[bytes] = field(default_factory=list)

    @property
    def forgets(self) -> bool:
        """Rows are looked for one by one: no row needs those before it, or nobody says which these are."""
        return self.is_named or self.group.window_rows is not None

    def place(self, key: bytes) -> int:
        """Of a row of layers that forget."""
        if key not in self.places:
            self.places[key] = len(self.theirs)
            self.theirs.append(key)
        return self.places[key]

    def place_in_prefix(self, key: bytes, end: int | None) -> int | None:
        """Of a row of full attention that ends with so many tokens; None: it is no whole row."""
        place = -1 if end is None else end // self.group.tokens - 1
        return place if 0 <= place < len(self.theirs) and self.theirs[place] == key else None


@dataclass(slots=True)
class _Request:
    """What is known of one request; kept in vLLM's context of it.

    Attributes:
        params: What it says to us.
        running: Parts of its jobs that run.
        resets: How often the cache had been reset when it came.
        rows: By the group's number.
        seen: Keys of vLLM's context that were looked at.
        hits: vLLM's keys of chunks that are answered as hits, while it waits.
        waits_since_s: Since when it waits for room among vLLM's rows, in one step after the other.
        step: The last one in which anything of it was looked up.
        is_open: Rows of full attention may be promoted.
        adapter: The LoRA adapter that it has.
        is_left_alone: Nobody knows which one it has, or what the engine serves now, or it has streaming input.
        prefix: All of its rows, where they are those of one prefix: of full attention, in one group.
        may_look_up: Whether ranks hold that adapter, as of ``step``.
        was_closed: They would have been, and so vLLM has asked for windows and states since.
        is_retry: It loads rows that are too slow, by what was measured (:meth:`RowWaits.tries_again`).
        is_waiting: For one of these vLLM was told to ask again, since the step began.
        again_since_s: Since when vLLM was told nothing but to ask again, in one step after the other.
    """

    resets: int
    rows: dict[int, _Rows]
    params: RequestParams = NO_PARAMS
    running: int = 0
    seen: int = 0
    hits: set[bytes] = field(default_factory=set)
    waits_since_s: float | None = None
    step: int = -1
    is_open: bool = False
    was_closed: bool = False
    is_waiting: bool = False
    again_since_s: float | None = None
    adapter: Adapter | None = None
    is_left_alone: bool = False
    may_look_up: bool = True
    is_retry: bool = False
    prefix: _Rows | None = None

    def of(self, key: bytes) -> _Rows | None:
        return self.rows.get(int.from_bytes(key[-GROUP_BYTES:], "big"))

    @property
    def forgetting(self) -> list[_Rows]:
        return [one for one in self.rows.values() if one.forgets]

    def prefix_tokens(self) -> float | None:
        """Tokens of which all asked groups of full attention are held; None: it is not known yet."""
        tokens = math.inf
        for one in self.rows.values():
            if one.find is not None and not one.forgets:
                if one.held is None:
                    return None
                tokens = min(tokens, one.held * one.group.tokens)
        return tokens


@dataclass(slots=True)
class _TierJob:
    """One of vLLM's jobs; of each group of layers it has rows, one part is run.

    Attributes:
        rows: How many it has.
        undrafted: Of these, those without the draft's KV.
        whole: Whole ones of a known group, and none of those: they are in a part.
        parts: That run.
        good: vLLM's keys of those stored or loaded.
    """

    id: int
    request: _Request
    rows: int
    is_load: bool
    undrafted: int = 0
    whole: int = 0
    parts: int = 0
    good: list[bytes] = field(default_factory=list)
    seconds: float = 0.0
    copied_bytes: int = 0


class _Requests(dict["TieredKVTier", _Request]):
    """One request, by tier: vLLM's context of it keeps one object of a class, for all tiers."""


class TieredKVTier(SecondaryTierManager):
    """Keeps rows of vLLM's host memory in the tiers of a server of ours.

    Threads: vLLM's scheduler thread only.
    """

    medium: ClassVar[Any] = Medium.STORAGE
    _identities: Sequence[RowIdentity] = ()
    """What the workers said when the engine joined; ``_is_changed`` once they say something else."""

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
        blocks = int(spec.config.cache.blocks_per_chunk)
        self._row_tokens = row_tokens(spec.config)
        config = Config.from_mapping({**settings, "chunk_tokens": self._row_tokens})
        self._config = config.below_offloading(self.block_size_bytes)
        logger.info("settings: %s", self._config.describe())
        self._rows = np.frombuffer(primary_kv_view.cast("B"), np.uint8).reshape(-1, self.block_size_bytes)
        self._hits_max = max(1, int(SHARE_MAX * len(self._rows)))
        numbers = [int(getattr(one, "group_id", 0)) for one in groups]
        self._groups = [
            RowGroup(number, int(one.tokens_per_block) * blocks) for number, one in zip(numbers, groups, strict=True)
        ]
        self.adapters: RowAdapters | None = None  # where the engine takes any
        self.undrafted = UndraftedTokens(None)
        self._stream = ""  # id of the last streaming session that came; vLLM's rows are mixed up from the first one on
        self._jobs: RowJobs | None = None
        self._refusal = "no worker has said yet what this engine serves"
        self._requests: dict[str, _Request] = {}  # those that wait and have hits
        self._known: dict[str, _Request] = {}  # all that are not over
        self._hits = self._step = self._resets = 0
        self._has_polled = False  # in this step: vLLM asks for finished jobs once in each, first of all
        self._has_events = enable_kv_events and bool(offloading_spec.kv_events_config.enable_kv_cache_events)
        self._events: list[Any] = []
        self._parts: dict[int, tuple[_TierJob, _Rows, list[bytes]]] = {}  # what runs, and vLLM's keys of its rows
        self._last_part = 0
        self._stores: list[tuple[TransferJob, _Request]] = []  # those of this step, which have not begun
        self._failed: list[Any] = []  # results of jobs that never began
        self._is_told = self._has_refused_hints = self._is_changed = False
        self._metrics = RowMetrics()
        self._said: Counter[str] = Counter()  # by the reader of requests' parameters
        self._params = RequestParamsReader(
            self._said,
            time.monotonic,
            self._config.peers or (),
            without=(SAVE_DECODE,),
            sessions_need_owner=self._config.sessions_need_owner,
        )
        self._hints: RowHints | None = None
        self._ended: deque[_Request] = deque()  # those that are over and have something to say
        self.waits = RowWaits(self._config.promotion_wait_ms, self._config.promotion_deadline_ms)
        self._asking: Any = None  # vLLM's context that it asked with last, and its hits: it asks for each by itself
        self._asking_hits: set[bytes] = set()
        self._is_hit = LookupResult.HIT  # reading it from the class takes as long as the rest of a hit
        self._ends: list[int] = []

    @property
    def settings(self) -> Config:
        """As they were given, with the tokens of a row as ``chunk_tokens``."""
        return self._config

    # -- joining -------------------------------------------------------------------------------------------------------

    def begin(self, identities: Collection[RowIdentity], engine_id: str) -> None:
        """The workers have said what the engine is: join the server.

        From vLLM 0.33 on they are asked again when an engine wakes up. It has its session still; one that serves
        something else than before, or cannot say what, is left alone from then on.

        Raises:
            TieredKVError: With ``strict``, they cannot be served.
        """
        if self._jobs is not None:
            if list(identities) != self._identities:
                self._leave_alone()
            return
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
        if first.groups:
            self._groups = list(of_all_ranks(one.groups for one in identities))
        stored_bytes = max(one.stored_bytes for one in self._groups) or self.block_size_bytes
        row = LayerPage("row", "U8", (stored_bytes,), "B")
        pages = pages_on_the_wire([row], {"row": "vllm-offloading-row"})
        tokens = self._row_tokens
        join = m.JoinWorker(0, 1, tokens, tokens, first.fields, pages, stored_by=first.stored_by)
        self._identities = list(identities)
        self._jobs = RowJobs(self._config, f"{engine_id}-rows", join, self._rows)
        self._hints = RowHints(self._jobs)
        if self._jobs.wait_ready(self._config.start_timeout_s):
            self._refusal = ""
            return
        self._refusal = self._jobs.client.refusal or f"no session within {self._config.start_timeout_s:g} s"
        if self._config.strict:
            raise TieredKVError(f"the tier is not ready: {self._refusal}")
        logger.error("this engine starts without the tier %s: %s", self.tier_type, self._refusal)

    def _leave_alone(self) -> None:
        self._is_changed = True
        for name, request in self._known.items():
            self._no_longer_waits(name)
            request.is_left_alone = True
        logger.error(
            "this engine says after a sleep that it serves something else than before: it goes on without the tier %s. "
            "Start it anew",
            self.tier_type,
        )

    # -- what is held --------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: "ReqContext") -> Any:
        self._no_longer_waits(req_context.req_id)  # ids of requests may come again
        self.undrafted.forget(req_context.req_id)
        request = _Request(self._resets, {one.number: _Rows(one) for one in self._groups})
        if len(self._groups) == 1 and self._groups[0].window_rows is None:
            (request.prefix,) = request.rows.values()
        request.is_open = request.prefix is not None or not request.forgetting
        request.params = self._read_params(req_context)
        is_stream = bool(self._stream) and str(req_context.req_id) == self._stream
        request.is_left_alone = self._is_changed or is_stream
        if self.adapters is not None:
            self._take_adapter(self.adapters, request, req_context.req_id)
        self._asking = None
        if (of_tiers := req_context.get_state(_Requests)) is None:
            req_context.set_state(of_tiers := _Requests())
        of_tiers[self] = self._known[req_context.req_id] = request
        return RequestOffloadingContext()

    def begin_stream(self, name: str) -> None:
        """A streaming session comes: it is left alone, and nothing more is stored of this engine.

        vLLM 0.32's offloading takes each later input of a session for new blocks behind those that it knew, so rows get
        names of one place and KV of another. Its host memory gives them to whoever asks, and whose own rows are wrong
        then.
        """
        if not self._stream:
            logger.error(
                "a request with streaming input came: vLLM's offloading gives its KV wrong names, so of this engine "
                "nothing is stored in the tier %s any more, until it is started anew. Use TieredKVConnector for such "
                "requests. request=%s",
                self.tier_type,
                name,
            )
        self._stream = name

    def _request(self, req_context: "ReqContext") -> _Request | None:
        of_tiers = req_context.get_state(_Requests)
        return None if of_tiers is None else of_tiers.get(self)

    @staticmethod
    def _take_adapter(adapters: RowAdapters, request: _Request, name: str) -> None:
        try:
            request.adapter, salt = adapters.salt_of(name)
        except Unaccountable as exc:
            adapters.tell(exc)
            request.is_left_alone = True
            return
        for rows in request.rows.values():
            rows.salt = salt

    def _may_load(self, request: _Request) -> bool:
        """Whether what is held for a request fits the adapter that ranks hold now, or will load."""
        if self.adapters is None or request.adapter is None or request.is_left_alone:
            return not request.is_left_alone
        return self.adapters.may_look_up(request.adapter)

    def _may_store(self, request: _Request) -> bool:
        if request.params.skips_save or request.resets != self._resets or request.is_left_alone or self._stream:
            return False
        return self.adapters is None or self.adapters.may_store(request.adapter)

    def _read_params(self, req_context: "ReqContext") -> RequestParams:
        params = self._params.read(req_context, str(req_context.req_id))
        if not (has_hints(params) or params.prefetches):
            return params
        if len(self._groups) > 1 or self._groups[0].window_rows is not None:
            self._said["control_refused"] += 1
            if not self._has_refused_hints:
                self._has_refused_hints = True
                logger.warning(
                    "sessions, pins and kv_hints of requests are not carried out: this model has several groups of "
                    "layers, or layers that forget, whose rows are kept one by one. Use TieredKVConnector for them"
                )
            return RequestParams(params.skips_save, params.skips_load, tag=params.tag, peer=params.peer)
        if params.prefetches and self._hints is not None:
            self._hints.prefetch(params)
        return params

    def lookup(self, key: "OffloadKey", req_context: "ReqContext") -> Any:
        if req_context is self._asking and key in self._asking_hits:
            return self._is_hit
        request = self._request(req_context)
        if request is not None:
            self._asking, self._asking_hits = req_context, request.hits
            if key in request.hits:
                return self._is_hit
        if request is None or request.params.skips_load or request.is_left_alone or self._jobs is None:
            self._tell_refusal()
            return LookupResult.MISS
        rows = request.of(key)
        if rows is None or rows.step == self._step or not self._jobs.is_ready:
            return LookupResult.MISS  # vLLM waits for the first such key of a prefix, and asks for no more of it
        self._take_keys(request, req_context)
        if not request.seen:  # vLLM's scheduler says where keys lie in a prompt before it asks for them
            for of_group in request.rows.values():
                of_group.is_named = True
        if request.step != self._step:
            if request.step < self._step - 1:  # it stood in the queue, where vLLM asks for nothing: no wait of ours
                request.again_since_s = request.waits_since_s = None
            request.step = self._step
            request.may_look_up = self._may_load(request)
            self._take_answers(self._jobs, request, req_context)
        if not request.may_look_up:
            return LookupResult.MISS
        if rows.forgets:
            return self._look_at_one(self._jobs, request, rows, key, req_context)
        place = rows.place_in_prefix(key, key_positions(req_context).get(key))
        if place is None:
            return LookupResult.MISS  # the end of a prompt, which is no whole row
        held = rows.held if rows.held is not None else self._ask(self._jobs, request, rows, place)
        if held is None:
            return self._again(request, rows)
        if place >= held:
            return LookupResult.MISS
        if not request.is_open:
            request.was_closed = True
            return self._again(request, rows)
        if place >= self._useful(request, rows):  # once all is known: what was found first is not the deepest
            return LookupResult.MISS
        return self._take_hit(request, rows, place, req_context)

    def _again(self, request: _Request, rows: _Rows) -> Any:
        """Have vLLM ask again in its next step, but not for ever."""
        if self._is_late(request):
            return LookupResult.MISS
        if not rows.forgets:
            rows.step = self._step
        return LookupResult.RETRY

    def _is_late(self, request: _Request) -> bool:
        now_s = time.monotonic()
        if request.again_since_s is None:
            request.again_since_s = now_s
        return now_s - request.again_since_s > max(SEARCH_S, self._config.lookup_timeout_ms / 1e3) + ROOM_S

    def _take_hit(self, request: _Request, rows: _Rows, place: int, req_context: "ReqContext") -> Any:
        """Answer for a row that is held, and of a prefix those behind it, within the limit of all that wait."""
        held = place + 1 if rows.forgets else min(rows.held or 0, self._useful(request, rows))
        room = min(held - place, self._hits_max - self._hits)
        if room > 0:
            before = len(request.hits)
            if room == len(key_positions(req_context)):  # all of them: a set is made faster of a dictionary
                request.hits = self._asking_hits = set(key_positions(req_context))
            else:
                request.hits.update(rows.theirs[place : place + room])
            self._hits += len(request.hits) - before  # chunks behind it may have been counted
            request.waits_since_s = request.again_since_s = None
            self._requests[req_context.req_id] = request
            return self._is_hit
        now_s = time.monotonic()
        if request.waits_since_s is None:
            request.waits_since_s = now_s
        if self._hits > len(request.hits) and now_s - request.waits_since_s < ROOM_S:
            return self._again(request, rows)  # another request goes first
        self._cut(request, rows, [rows.theirs[place]])
        self._metrics.count(NOT_LOADED, 1, "no_room")
        return LookupResult.MISS

    def _ask(self, jobs: RowJobs, request: _Request, rows: _Rows, place: int) -> int | None:
        """Leading chunks that are held, once that is known; vLLM has those before ``place``."""
        if rows.find is None:
            names, params = self._names(jobs, rows), request.params
            if names is not None:
                rows.find = jobs.find(names, place, session=params.session, peer=params.peer)
            if rows.find is None:
                return 0  # nobody answers now: what waits for other reasons asks again
        return self._take_held(jobs, request, rows)

    def _take_held(self, jobs: RowJobs, request: _Request, rows: _Rows) -> int | None:
        """The answer to a question for a prefix, less what is faster computed."""
        find, tokens = rows.find, rows.group.tokens
        assert find is not None
        held = jobs.answer(find, self.waits.search_s((len(rows.theirs) - find.first) * tokens, SEARCH_S))
        if held is not None:
            # Rows of all groups of full attention come at the same time, and save the same tokens.
            prefixes = sum(not one.forgets for one in request.rows.values())
            parts = self._believed(request, find.parts, tokens / prefixes, tokens)
            worth = find.first + self.waits.worth(parts, tokens / prefixes)
            self._metrics.count(NOT_LOADED, max(0, held - max(worth, find.first)), "too_slow")
            rows.is_measured = all(read_s is not None for _, read_s in parts)
            rows.held = min(held, worth) if held > find.first else held
        return rows.held

    def _believed(
        self, request: _Request, parts: Sequence[tuple[int, float | None]], row_tokens: float, load_tokens: float
    ) -> Sequence[tuple[int, float | None]]:
        """What is held and when it would be here; of what is too slow, now and then nobody knows when.

        For all of the request's groups of layers then: a hit needs rows of each. But not where what is worth it needs
        longer than such a load is waited for: it would be computed although a read is faster.

        Args:
            row_tokens: That a row saves to compute, as :meth:`RowWaits.worth` has it.
            load_tokens: The same by which a load of its group is waited for.
        """
        if not parts or (worth := self.waits.worth(parts, row_tokens)) == parts[-1][0]:
            return parts
        worth_s = next((read_s for rows, read_s in parts if rows == worth and read_s is not None), 0.0)
        if worth_s > self.waits.load_s(parts[-1][0] * load_tokens, is_measured=False):
            return parts
        request.is_retry = request.is_retry or self.waits.tries_again()
        return [(rows, None if rows > worth else read_s) for rows, read_s in parts] if request.is_retry else parts

    # -- layers that forget --------------------------------------------------------------------------------------------

    def _take_answers(self, jobs: RowJobs, request: _Request, req_context: "ReqContext") -> None:
        """Once in a step: what is known now, also of what vLLM does not ask for again; and whether that is all."""
        forgetting = request.forgetting
        for rows in request.rows.values():
            if rows.find is not None and rows.held is None:
                self._take_held(jobs, request, rows)
        for rows in forgetting:
            for key in list(rows.asked):
                self._take_one(jobs, request, rows, key, key_positions(req_context).get(key, 0))
        if request.was_closed:
            answered = [rows.found.values() for rows in forgetting if rows.found]
            are_found = bool(answered) and all(map(any, answered)) and not any(rows.asked for rows in forgetting)
            # Else vLLM asks again although it waits for none of them: its own memory has them.
            request.is_open |= are_found or not request.is_waiting
            if are_found:  # now: vLLM looks at full attention first, and has all promoted that is a hit
                ends = key_positions(req_context)
                for rows in forgetting:
                    rows.found_end = max((ends.get(key, 0) for key, found in rows.found.items() if found), default=0)
        request.is_waiting = False

    def _take_one(self, jobs: RowJobs, request: _Request, rows: _Rows, key: bytes, end: int) -> None:
        """The answer to a question for one row of layers that forget, if it is there.

        A hit needs as many rows as the window has, and saves all tokens up to its end.
        """
        find = rows.asked[key]
        if rows.is_named:
            end = rows.group.tokens  # what is before it, whoever asks has or has not
        if (held := jobs.answer(find, self.waits.search_s(end, SEARCH_S))) is None:
            return
        del rows.asked[key]
        row_tokens = end / max(rows.group.window_rows or 1, 1)
        parts = self._believed(request, find.parts, row_tokens, row_tokens)
        is_worth = self.waits.worth(parts, row_tokens) > 0
        self._metrics.count(NOT_LOADED, int(held > 0 and not is_worth), "too_slow")
        rows.is_measured &= all(read_s is not None for _, read_s in parts)
        rows.found[key] = held > 0 and is_worth

    def _look_at_one(self, jobs: RowJobs, request: _Request, rows: _Rows, key: bytes, req_context: "ReqContext") -> Any:
        """Whether a row of a window or a state is held: of no use behind the prefix that is. Or one that is named."""
        end, tokens = key_positions(req_context).get(key), rows.group.tokens
        if not rows.is_named:
            prefix_tokens = request.prefix_tokens()
            if prefix_tokens is None:
                request.is_waiting = True
                return self._again(request, rows)
            # vLLM rounds the prefix up to a row of this group, and wants one more beside a draft.
            if end is None or end % tokens or end - 2 * tokens >= prefix_tokens:
                return LookupResult.MISS
        found = rows.found.get(key)
        if found is None and key not in rows.asked and len(rows.asked) < ASKED_MAX:
            place, names = rows.place(key), self._names(jobs, rows)
            find = (
                None if names is None or self._is_late(request) else jobs.find(names, place, peer=request.params.peer)
            )
            if find is None:
                found = rows.found[key] = False
            else:
                rows.asked[key] = find
        if found is None:
            request.is_waiting = True
            return self._again(request, rows)
        if not found:
            return LookupResult.MISS
        rows.found_end = max(rows.found_end, end or 0)
        return self._take_hit(request, rows, rows.places[key], req_context)

    def _useful(self, request: _Request, rows: _Rows) -> int:
        """Leading rows of full attention that a hit may have, by what was found of windows and states.

        vLLM's own memory may have the end of a window of which the rest was found here.
        """
        ends = [
            one.found_end + (one.group.window_rows + 1) * one.group.tokens
            for one in request.rows.values()
            if one.found_end and one.group.window_rows is not None
        ]
        return -(-min(ends) // rows.group.tokens) if ends else len(rows.theirs)

    def _names(self, jobs: RowJobs, rows: _Rows) -> RowNames | None:
        namespace = jobs.namespace
        if namespace is None:
            return None
        if rows.names is None or rows.names.namespace is not namespace:
            names = rows.ours if rows.salt else rows.theirs
            rows.names = RowNames(namespace, names, is_chain=not rows.forgets)
        if rows.salt:
            rows.ours += [salted(rows.salt, key) for key in islice(rows.theirs, len(rows.ours), None)]
        return rows.names

    def _take_keys(self, request: _Request, req_context: "ReqContext") -> None:
        """Take in the keys of full attention's rows that became whole since the last look."""
        positions = key_positions(req_context)
        if len(positions) == request.seen:
            return
        ends = list(islice(positions.values(), request.seen, None))
        if request.prefix is not None and not request.prefix.is_named:  # in one go: hundreds come with a prompt
            theirs = request.prefix.theirs
            if ends == self._whole_ends(len(theirs), len(ends)):
                theirs.extend(islice(positions, request.seen, None))
                request.seen = len(positions)
                return
        for key, end in zip(islice(positions, request.seen, None), ends, strict=True):
            of_key = request.of(key)
            if of_key is not None and not of_key.forgets and end == (len(of_key.theirs) + 1) * of_key.group.tokens:
                of_key.theirs.append(key)
        request.seen = len(positions)

    def _whole_ends(self, first: int, count: int) -> list[int]:
        """Where rows end, in tokens, of a model whose layers are one group; made once, as numbers take time to make."""
        tokens = self._groups[0].tokens
        known = self._ends
        if len(known) < first + count:
            known.extend(range((len(known) + 1) * tokens, (first + count + 1) * tokens, tokens))
        return known[first : first + count]

    def _tell_refusal(self) -> None:
        has_joined = self._jobs is not None and self._jobs.is_ready  # maybe later than the start waited
        if self._refusal and not self._is_told and not has_joined:
            self._is_told = True
            logger.warning("nothing is found in the tier %s: %s", self.tier_type, self._refusal)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: "TransferJob", *_: Any, **__: Any) -> None:
        job, request = job_metadata, self._request(job_metadata.req_context)
        self._no_longer_waits(job.req_context.req_id)  # it computes
        if request is None or not self._may_store(request):
            self._never_began(job, "not_wanted")
        else:
            self._stores.append((job, request))

    def submit_load(self, job_metadata: "TransferJob", *_: Any, **__: Any) -> None:
        job, request = job_metadata, self._request(job_metadata.req_context)
        if request is None:
            self._never_began(job)
        elif not self._begin(job, request, is_load=True):
            for rows in request.rows.values():
                self._cut(request, rows, [key for key in job.keys if request.of(key) is rows])

    def _begin_stores(self) -> None:
        """Begin what vLLM submitted since the last step, from the beginnings of prompts on.

        Of several ranks' reports vLLM takes a later job before the one whose rows it follows, where these came at once.
        A row whose predecessor is neither stored nor on its way is not stored.
        """
        stores, self._stores = self._stores, []
        if len(stores) > 1:
            stores.sort(key=lambda one: _first_end(one[0]))
        for job, request in stores:
            self._begin(job, request, is_load=False)

    def _begin(self, job: "TransferJob", request: _Request, *, is_load: bool) -> bool:
        """Run a job's parts; False where none can be run."""
        made, params = _TierJob(job.job_id, request, len(job.keys), is_load), request.params
        self._take_keys(request, job.req_context)
        drafted = math.inf if is_load else self.undrafted.first(job.req_context.req_id)
        if drafted < math.inf:
            made.undrafted = sum(end > drafted for end in _ends(job))
        for rows, pairs in self._by_group(job, request, drafted):
            names = None if self._jobs is None else self._names(self._jobs, rows)
            if self._jobs is None or names is None:
                break
            self._last_part += 1
            made.parts += 1
            request.running += 1
            made.whole += len(pairs)
            self._parts[self._last_part] = (made, rows, [rows.theirs[place] for place, _ in pairs])
            if is_load:
                wait_s = self.waits.load_s(self._saved_tokens(rows, pairs, job), is_measured=rows.is_measured)
                self._jobs.load(self._last_part, names, pairs, wait_s, rows.group.spans, params.session)
            else:
                self._jobs.store(self._last_part, names, pairs, params.tag, rows.group.spans, params.session)
        if not made.parts:
            has_session = self._jobs is not None and self._jobs.is_ready
            why = "undrafted" if made.undrafted else "not_whole"
            self._never_began(job, why if has_session else "no_session")
        return made.parts > 0

    @staticmethod
    def _saved_tokens(rows: _Rows, pairs: list[tuple[int, int]], job: "TransferJob") -> int:
        """Tokens that need not be computed if these rows are loaded."""
        if rows.is_named or not rows.forgets:
            return len(pairs) * rows.group.tokens
        positions = key_positions(job.req_context)
        return max(positions.get(rows.theirs[place], 0) for place, _ in pairs)

    def _by_group(
        self, job: "TransferJob", request: _Request, tokens: float
    ) -> Iterable[tuple[_Rows, list[tuple[int, int]]]]:
        """A job's rows by their group, each with its place, in that order.

        But those that are no whole rows, or end behind so many tokens.
        """
        positions = key_positions(job.req_context)
        found: dict[int, list[tuple[int, int]]] = {}
        for key, row in zip(job.keys, job.chunk_ids, strict=True):
            rows = request.of(key)
            if rows is None or positions.get(key, 0) > tokens:
                continue
            if not rows.forgets:
                place = rows.place_in_prefix(key, positions.get(key))
            else:
                is_whole = rows.is_named or positions.get(key, 1) % rows.group.tokens == 0
                place = rows.place(key) if is_whole else None
            if place is not None:
                found.setdefault(rows.group.number, []).append((place, int(row)))
        return [(request.rows[number], sorted(pairs)) for number, pairs in found.items()]

    def _never_began(self, job: "TransferJob", why: str = "failed") -> None:
        """Tell the end of a job at once; one of no rows has all of them."""
        self._tell_refusal()
        if job.is_promotion:
            self._metrics.count(NOT_LOADED, len(job.keys), "failed")
        else:
            self._metrics.count(DROPPED, len(job.keys), why)
        self._failed.append(JobResult(job.job_id, success=not job.keys))

    def get_finished_jobs(self) -> Iterable[Any]:
        self._has_polled = True
        if self._stores:
            self._begin_stores()
        results, self._failed = self._failed, []
        for done in () if self._jobs is None else self._jobs.take_done():
            job, rows, keys = self._parts.pop(done.job)
            job.parts -= 1
            job.request.running -= 1
            is_right = not job.is_load or self._may_load(job.request)  # the adapter may have changed meanwhile
            good = [key for key, is_good in zip(keys, done.good, strict=True) if is_good and is_right]
            job.good += good
            job.seconds = max(job.seconds, done.seconds)
            job.copied_bytes += done.copied_bytes
            if job.is_load and len(good) < len(keys):
                # What did not come is a miss from now on, or it would be loaded again for ever.
                came = set(good)
                self._cut(job.request, rows, [key for key in keys if key not in came])
            if not job.parts:
                results.append(self._result(job))
        return results

    def _cut(self, request: _Request, rows: _Rows, keys: list[bytes]) -> None:
        """What lies there is a miss from now on, and of a prefix what is behind it."""
        if not keys:
            return
        if rows.forgets:
            rows.found.update(dict.fromkeys(keys, False))
            lost = request.hits.intersection(keys)
        else:
            gone = set(keys)
            rows.held = min(rows.held or 0, next((n for n, key in enumerate(rows.theirs) if key in gone), 0))
            lost = request.hits.intersection(rows.theirs[rows.held :])
        request.hits -= lost
        self._hits -= len(lost)

    def _result(self, job: _TierJob) -> Any:
        is_whole = len(job.good) == job.rows
        if job.is_load:
            self._metrics.count(LOADED, len(job.good))
            self._metrics.count(NOT_LOADED, job.rows - len(job.good), "failed")
        else:
            self._metrics.count(STORED, len(job.good))
            self._metrics.count(DROPPED, job.undrafted, "undrafted")
            self._metrics.count(DROPPED, job.rows - job.undrafted - job.whole, "not_whole")
            self._metrics.count(DROPPED, job.whole - len(job.good), "failed")
        if self._has_events and job.good and not job.is_load:
            event = OffloadingEvent(keys=job.good, medium=self.medium, removed=False, locality=self.locality)
            self._events.append(event)
        return JobResult(
            job.id,
            success=is_whole,
            successful_keys=tuple(job.good) if job.is_load and job.good and not is_whole else None,
            transfer_time=job.seconds,
            transfer_bytes=job.copied_bytes,
        )

    # -- a request's end, and the step's -------------------------------------------------------------------------------

    def begin_step(self, output: Any) -> None:
        """Take in a step that vLLM's scheduler has planned, before vLLM says the same in part."""
        self.waits.step(output)
        self.undrafted.step(output)
        for name in output.scheduled_cached_reqs.resumed_req_ids:  # vLLM names its tiers new requests only
            self._no_longer_waits(name)

    def on_schedule_end(self, context: "ScheduleEndContext") -> None:
        self._step += 1
        for name in context.new_req_ids:
            self._no_longer_waits(name)
        for name in context.preempted_req_ids:
            self._no_longer_waits(name)
            if (request := self._known.get(name)) is not None:
                self._ask_anew(request)
        if self._jobs is not None and (self._jobs.is_running or not self._has_polled):
            self._jobs.poll()  # loads of this step begin; an answer to what it asked is hardly there yet
        self._has_polled = False
        self._go_on_with_hints()
        is_serving = self._jobs is not None and self._jobs.is_ready
        client = None if self._jobs is None else self._jobs.client
        self._metrics.watch(client, is_serving=is_serving)

    def on_request_finished(self, req_context: "ReqContext") -> None:
        self._no_longer_waits(req_context.req_id)
        self.undrafted.forget(req_context.req_id)  # nothing of it is stored any more
        request = self._request(req_context)
        self._asking = None
        if self._known.get(req_context.req_id) is request:
            self._known.pop(req_context.req_id, None)
        if request is None or self._jobs is None:
            return
        if has_hints(request.params):
            self._take_keys(request, req_context)
            self._ended.append(request)
        self._forget_questions(self._jobs, request)

    @staticmethod
    def _forget_questions(jobs: RowJobs, request: _Request) -> None:
        for rows in request.rows.values():
            for find in (*rows.asked.values(), *([rows.find] if rows.find is not None else [])):
                jobs.forget(find)

    def _ask_anew(self, request: _Request) -> None:
        """It was preempted: what was not held when it came may have been stored since, by the request itself, too."""
        if self._jobs is not None:
            self._forget_questions(self._jobs, request)
        for rows in request.rows.values():
            rows.find, rows.held, rows.is_measured, rows.found_end = None, None, True, 0
            rows.asked.clear()
            rows.found.clear()
        request.is_open = request.prefix is not None or not request.forgetting
        request.was_closed = request.is_waiting = False
        request.waits_since_s = request.again_since_s = None

    def _go_on_with_hints(self) -> None:
        """Once in a step: what requests that are over, and whose jobs are, want the server to know."""
        if self._said:
            self._metrics.count(HINTS, self._said["control_refused"], "refused")
            self._metrics.count(HINTS, self._said["hints_unknown"], "unknown")
            self._said.clear()
        jobs, hints = self._jobs, self._hints
        if jobs is None or hints is None or not (self._ended or hints.is_waiting or hints.outcomes):
            return
        for _ in range(len(self._ended)):
            request = self._ended.popleft()
            if request.running:
                self._ended.append(request)
                continue
            (rows,) = request.rows.values()
            if request.resets == self._resets and (names := self._names(jobs, rows)) is not None:
                hints.ended(request.params, names)
            else:
                hints.outcomes.append("dropped")
        hints.go_on()
        for outcome, number in Counter(hints.outcomes).items():
            self._metrics.count(HINTS, number, outcome)
        hints.outcomes.clear()

    def has_pending_work(self) -> bool:
        """Whether vLLM should go on with its steps: something is to be told of requests that are over."""
        return bool(self._ended) or (self._hints is not None and self._hints.is_waiting)

    def _no_longer_waits(self, name: str) -> None:
        """The request runs, or is over: its hits push out nobody's any more."""
        request = self._requests.pop(name, None)
        if request is not None:
            self._hits -= len(request.hits)
            request.hits.clear()

    # -- the rest ------------------------------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003 - vLLM's
        return definitions()

    def get_stats(self) -> Any:
        return self._metrics.take()

    def take_events(self) -> Iterable[Any]:
        events, self._events = self._events, []
        return events

    def drain_jobs(self) -> None:
        """End all jobs, and take what is held for another model's: vLLM calls this when it resets its caches.

        It tells a tier of that in no other way, and after new weights the old KV must not be found: neither by this
        engine nor by one that starts later, as after a reset of the connector (``server/epochs.py``). vLLM resets them
        for a sleep and a pause, too.
        """
        for job, _ in self._stores:
            self._never_began(job, "not_wanted")
        self._stores.clear()
        if self._jobs is not None:
            self._jobs.drain()
            self._jobs.reset()
        if self._hints is not None:
            self._hints.drop()
        for name in list(self._requests):
            self._no_longer_waits(name)
        self._resets += 1

    def shutdown(self) -> None:
        """Leave the server, which goes on writing what it has. Idempotent."""
        if self._jobs is not None:
            self._jobs.close()
        self._rows = self._rows[:0].copy()  # vLLM unmaps them


def _ends(job: "TransferJob") -> list[int]:
    """Of each of a job's rows, how many tokens end with it."""
    positions = key_positions(job.req_context)
    return [positions.get(key, 0) for key in job.keys]


def _first_end(job: "TransferJob") -> int:
    return min(_ends(job), default=0)


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
        pages: dict[str, Any] = {}
        register = connector.register_kv_caches

        def register_kv_caches(kv_caches: dict[str, Any]) -> None:
            pages.update(kv_caches)
            register(kv_caches)

        connector.register_kv_caches = register_kv_caches
        identity = functools.partial(_identity, vllm_config, kv_cache_config, extra_config, pages)
        connector.get_handshake_metadata = identity
        if vllm_config.lora_config is not None:
            report_adapters(connector, int(vllm_config.parallel_config.rank))
        return
    tiers = [one for one in secondary_tiers(connector) if isinstance(one, TieredKVTier)]
    if not tiers:
        _tell_unmade(extra_config)
    adapters = None if vllm_config.lora_config is None else RowAdapters(vllm_config)
    if adapters is not None:
        adapters.listen(connector)
        for tier in tiers:
            tier.adapters = adapters
    _listen_for_streams(connector, tiers)
    for tier in tiers:
        tier.undrafted = UndraftedTokens(Drafts.of(vllm_config))
    plan = connector.build_connector_meta

    def build_connector_meta(scheduler_output: Any) -> Any:
        if adapters is not None:
            adapters.begin_step(scheduler_output)
        for tier in tiers:
            tier.begin_step(scheduler_output)
        return plan(scheduler_output)

    connector.build_connector_meta = build_connector_meta

    def take(content: dict[tuple[int, int], Any]) -> None:
        identities = [
            one if isinstance(one, RowIdentity) else RowIdentity(refusal=f"rank {rank} did not say what it serves")
            for rank, one in sorted(content.items())
        ]
        try:
            for number, tier in enumerate(tiers):
                tier.begin(identities, f"{vllm_config.kv_transfer_config.engine_id}-{number}")
        except TieredKVError:
            try:
                end_offloading(connector)
            except Exception as exc:  # noqa: BLE001  # vLLM's own end; the refusal is what has to be told
                logger.warning("vLLM's offloading did not end; its host memory may stay in /dev/shm. cause=%r", exc)
            raise

    connector.set_xfer_handshake_metadata_pp_aware = take


def _tell_unmade(extra_config: Mapping[str, Any]) -> None:
    """VLLM reads ``secondary_tiers`` with one spec, and passes over them with any other.

    Raises:
        ConfigError: One of them is ``strict``.
    """
    text = (
        "secondary_tiers names a tier of tiered_kv, and vLLM made none: it finds and stores nothing. Expected "
        f'"spec_name": "TieringOffloadingSpec" beside secondary_tiers. spec_name={extra_config.get("spec_name")}'
    )
    if any(one.get("strict") for one in our_tiers(extra_config)):
        raise ConfigError(text)
    logger.error(text)


def _listen_for_streams(connector: Any, tiers: Collection[TieredKVTier]) -> None:
    """Have tiers hear of streaming sessions before vLLM tells them of the request."""
    begin = connector.on_new_request

    def on_new_request(request: Any) -> None:
        if getattr(request, "resumable", False):
            for tier in tiers:
                tier.begin_stream(str(request.request_id))
        begin(request)

    connector.on_new_request = on_new_request


def _identity(vllm_config: Any, kv_cache_config: Any, extra_config: Any, kv_caches: Mapping[str, Any]) -> RowIdentity:
    """What this worker's engine is."""
    offloading = offloading_config(vllm_config, kv_cache_config)
    tiers = our_tiers(extra_config)
    if any(tier.get(name) != tiers[0].get(name) for tier in tiers for name in IDENTITY_SETTINGS):
        return RowIdentity(refusal=f"tiers of one engine say one thing of its model: {', '.join(IDENTITY_SETTINGS)}")
    ours = {name: value for name, value in tiers[0].items() if name in ("storage_uri", *IDENTITY_SETTINGS)}
    is_canonical = bool(offloading.canonical_layout)
    try:
        config = Config.from_mapping({**ours, "chunk_tokens": row_tokens(offloading)})
        pages = canonical_pages(vllm_config, kv_cache_config, kv_caches) if is_canonical else None
        groups = row_groups(offloading, kv_cache_config, pages)
    except TieredKVError as exc:
        return RowIdentity(refusal=str(exc))
    rows: dict[str, object] = {
        "blocks_per_chunk": int(offloading.cache.blocks_per_chunk),
        "canonical_layout": is_canonical,
        "replicated_layout": bool(offloading.replicated_layout),
    }
    if any(one.spans for one in groups):
        rows["groups"] = [[one.number, one.tokens, one.window_rows, one.spans] for one in groups]
    is_for_any_ranks = has_rows_for_any_ranks(offloading)
    if not is_for_any_ranks:
        rows["worker_kv_bytes_per_block"] = int(offloading.worker_kv_bytes_per_block)
        rows["world_size"] = int(offloading.parallel.world_size)
        rows["page_bytes"] = [int(group.kv_cache_spec.page_size_bytes) for group in kv_cache_config.kv_cache_groups]
    rank = 0 if is_canonical or offloading.replicated_layout else int(offloading.parallel.rank)
    rank_bytes = int(offloading.worker_kv_bytes_per_block) * int(offloading.cache.blocks_per_chunk)
    of_rank = on_rank(groups, rank, rank_bytes)
    return row_identity(vllm_config, kv_cache_config, config, rows, of_rank, is_for_any_ranks=is_for_any_ranks)


def has_rows_for_any_ranks(offloading: Any) -> bool:
    """Whether rows are the same for engines of another tensor parallelism, which then share them.

    vLLM says so of canonical rows whose pages it could certify, and of MLA's, of which all ranks have the same. It says
    so of direct rows of full attention, too, and they are not the same: ranks come first in them, then layers
    (tests/vllm/test_row_groups.py).
    """
    if offloading.canonical_layout:
        return bool(offloading.parallel.is_parallelism_agnostic)
    return bool(offloading.replicated_layout)


def row_tokens(offloading: Any) -> int:
    """Tokens of the longest row."""
    return max(int(one.tokens_per_block) for one in offloading.groups) * int(offloading.cache.blocks_per_chunk)
