"""The worker side: copies between paged KV and slots, each reported exactly once.

Copies are never timed out and never dropped half way (rule 1): what was started is finished and then reported,
and the arena is unmapped only when nothing copies from it or into it any more.

    field                        written by
    _client, _joining_generation the model runner's thread; the join itself runs in a thread that hands its result over
    _is_joining, _early          in _joined (a deque: appends are atomic)
    _loads_done, _saves_done     filled by copy threads, emptied by the model runner's thread (deques as well)
    _running                     copy threads and the model runner's, under _idle; so is a client's is_lost, which the
                                 watching thread sets before it waits for the copies: none begins after that
    _held                        the model runner's thread adds, whoever asks for copies takes, under _idle
    copied                       copy threads append, the model runner's thread takes
    _paged, _join, _threads, _cuda,
    _device, _loads_early        register(), once, in the model runner's thread
    before_leaving               a scheduler side in this process, before the first step
"""

import contextlib
import json
import logging
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import vllm

from tiered_kv.chunks.cuda import Cuda
from tiered_kv.chunks.device_copy import Direction
from tiered_kv.chunks.layout_test import self_test
from tiered_kv.chunks.pinned import PinnedArena
from tiered_kv.chunks.transfer import Mark, RankKV
from tiered_kv.config import Config
from tiered_kv.errors import TieredKVError, TierUnavailable, UnsupportedModel
from tiered_kv.keys.stored_by import encoding_text, stored_by
from tiered_kv.server import protocol as m
from tiered_kv.server.client import SessionInfo
from tiered_kv.server.connect import Background
from tiered_kv.server.worker_client import WorkerClient, decline, pages_on_the_wire
from tiered_kv.tiering.slots import SLOTS_PER_SLAB_MAX
from tiered_kv.version import __version__
from tiered_kv.vllm.compat import before_sleep, can_sleep
from tiered_kv.vllm.engine_metrics import CopyMeter
from tiered_kv.vllm.identity.loader_watch import adapter_loads
from tiered_kv.vllm.identity.record import base_fields, page_encodings, with_experts
from tiered_kv.vllm.kv_groups import cache_groups
from tiered_kv.vllm.kv_layout import rank_pages, state_pages
from tiered_kv.vllm.step import ChunkCopy, LoadJob, SaveJob, SaveReport, StepMetadata
from tiered_kv.vllm.supported import check_layers, copies_blocks

logger = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.5
BACKOFF_LAST_S = 30.0


class CopyThread:
    """One thread that performs the copies of one direction in order."""

    def __init__(self, name: str) -> None:
        """Start it.

        Raises:
            TierUnavailable: The machine has no thread left.
        """
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"tiered_kv-{name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as exc:
            raise TierUnavailable(f"cannot start a thread for copies: {exc}") from exc

    def submit(self, task: Callable[[], None]) -> None:
        """Queue a task; it reports by itself and must not raise."""
        self._tasks.put(task)

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


class _Task(NamedTuple):
    """A job that was not submitted yet, and the mark that it waits for on the device."""

    kind: Direction
    step: StepMetadata
    job: LoadJob | SaveJob
    mark: Mark


def _stored_by(encodings: Iterable[str]) -> str:
    """The line in the headers of this worker's blobs: exact versions, and the encodings of its layers."""
    return stored_by(__version__, "vllm", vllm.__version__, encoding_text(encodings))


class WorkerSide:
    """One rank's side of the connector.

    Threads: the model runner's, for every public method.
    """

    def __init__(self, config: Config, vllm_config: Any, kv_cache_config: Any, engine_id: str) -> None:
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._engine_id = engine_id
        parallel = vllm_config.parallel_config
        self._rank = int(parallel.rank)
        self._world_size = int(parallel.world_size)
        # So many consecutive ranks hold the same KV (MLA): the first of them stores it.
        self._replicas = int(getattr(kv_cache_config, "kv_tp_replicas", 1))
        self._paged: RankKV | None = None
        self._join: m.JoinWorker | None = None
        self._client: WorkerClient | None = None
        self._joined: deque[WorkerClient] = deque()
        self._joining_generation = -1
        self._is_joining = False
        self._early: list[_Task] = []
        self._held: list[_Task] = []
        self._begun: StepMetadata | None = None
        # Runner V1 samples after its connector saved, V2 before. Nothing but a device's queues makes the difference.
        self._loads_early = True
        self._samples_last = not getattr(vllm_config, "use_v2_model_runner", False)
        self._threads: dict[str, CopyThread] = {}
        self._cuda: Cuda | None = None  # where a GPU copies, and its memory can be pinned
        self._device = 0
        self._loads_done: deque[tuple[str, bool]] = deque()
        self._saves_done: deque[tuple[int, bool]] = deque()
        self._idle = threading.Condition()
        self._running = 0
        self._adapters_told, _ = adapter_loads(sys.maxsize)  # engines before this one in the process
        self.copied = CopyMeter()
        self.before_leaving: Callable[[], None] = lambda: None  # set by a scheduler's side in this process
        self._closing = threading.Event()
        self._background = Background()

    # -- start -------------------------------------------------------------------------------------------------

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Take vLLM's KV tensors, prove that their layout is understood, and join the server; blocks.

        Raises:
            TieredKVError: With ``strict``, whatever keeps this worker from taking part.
        """
        try:
            self._prepare(kv_caches)
        except (TieredKVError, ValueError) as exc:
            self._give_up(exc)
            return
        try:
            self._joining_generation = 0
            self._client = self._new_client(0)
            if self._client.pinned is not None:
                self._client.pinned.pin_all()  # here, and not again before the first step: vLLM captures graphs now
        except TieredKVError as exc:
            if self._config.strict:
                raise
            logger.error("no cache server; this engine serves without the cache until one is found. %s", exc)
            self._rejoin_in_background(None, 0)

    def _prepare(self, kv_caches: dict[str, Any]) -> None:
        groups = cache_groups(self._vllm_config, self._kv_cache_config, self._config.chunk_tokens)
        pages = rank_pages(kv_caches, self._kv_cache_config, groups)
        states = state_pages(kv_caches, self._kv_cache_config, groups.states)
        paged = RankKV(pages, kv_caches, [group.stored_blocks for group in groups.stored], states)
        for of_group in (*paged.groups, *paged.states):
            self_test(of_group)
        check_layers(self._vllm_config, self._kv_cache_config)
        fields = base_fields(self._vllm_config, self._kv_cache_config, self._config)
        encodings = page_encodings(self._vllm_config, self._kv_cache_config)
        if paged.engine is not None and can_sleep(self._vllm_config.model_config):
            before_sleep(self.finish_copies)
        if paged.engine is not None:
            self._cuda, self._device = paged.engine.device.cuda, paged.engine.device.device.index or 0
        self._join = m.JoinWorker(
            self._rank,
            self._world_size,
            groups.block_tokens,
            self._config.chunk_tokens,
            json.dumps(fields, sort_keys=True).encode(),
            pages_on_the_wire(
                [page for of_group in pages for page in of_group], with_experts(self._vllm_config, encodings)
            ),
            self._rank // self._replicas,
            _stored_by(encodings.values()),
            self._cuda is not None,
        )
        self._paged = paged
        self._loads_early = not copies_blocks(self._vllm_config, self._kv_cache_config)
        self._threads = {kind: CopyThread(kind) for kind in ("load", "save")}

    def _give_up(self, reason: Exception) -> None:
        """Serve without the cache, and let the scheduler side know why."""
        if self._config.strict:
            raise UnsupportedModel(str(reason)) from reason
        logger.error("this model is served without the cache: %s", reason)
        try:
            decline(self._config, self._engine_id, str(reason))
        except TieredKVError as exc:
            logger.warning("the scheduler side could not be told. %s", exc)

    def _new_client(self, generation: int) -> WorkerClient:
        assert self._join is not None
        client = WorkerClient(self._config, self._engine_id, generation, self._join)
        if self._cuda is not None:
            client.pinned = PinnedArena(self._cuda, client.arena, self._device)
        try:
            threading.Thread(target=self._watch, args=(client,), name="tiered_kv-watch", daemon=True).start()
        except RuntimeError as exc:
            client.leave()
            raise TierUnavailable(f"cannot start the thread that waits for the server's end: {exc}") from exc
        return client

    def _watch(self, client: WorkerClient) -> None:
        """Let go of a dead server's arena even while this engine is idle: the next server's memory waits for that."""
        client.wait_lost()
        with self._idle:
            client.is_lost = True
            self._idle.wait_for(lambda: self._running == 0)
        client.leave()

    # -- every step --------------------------------------------------------------------------------------------

    def follow(self, metadata: StepMetadata) -> None:
        """Join the scheduler's session generation, in the background."""
        self._background.go_on()
        while self._joined:
            client = self._joined.popleft()
            if client.generation == self._joining_generation:
                self._client, self._is_joining = client, False
            else:
                client.leave()
        if self._join is not None and metadata.generation > self._joining_generation:
            self._joining_generation = metadata.generation
            old, self._client = self._client, None
            self._rejoin_in_background(old, metadata.generation)
        if self._client is not None:
            self._client.pins_ahead = True  # vLLM steps, so it captures no graphs any more
        early, self._early = self._early, []
        for task in early:
            self._submit(*task)

    def _rejoin_in_background(self, old: WorkerClient | None, generation: int) -> None:
        self._is_joining = True
        # A task that waits for a thread is dropped for the next one of its name, and with it the arena to leave.
        self._background.start(f"rejoin-{generation}", partial(self._rejoin, old, generation))

    def _rejoin(self, old: WorkerClient | None, generation: int) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self._running == 0)
        if old is not None:
            old.leave()
        backoff_s = BACKOFF_FIRST_S
        while generation == self._joining_generation and not self._closing.is_set():
            try:
                client = self._new_client(generation)
                self._joined.append(client)
                if self._closing.is_set():  # asked afterwards: close() may have looked at _joined just before
                    client.leave()
                return
            except TieredKVError as exc:
                logger.warning("worker could not join; next try in %.1f s. rank=%d %s", backoff_s, self._rank, exc)
                self._closing.wait(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_LAST_S)

    def begin_step(self, metadata: StepMetadata) -> None:
        """Start this step's loads before its forward pass is launched; for KV on a device only.

        What the model's stream already has to do with their blocks (the reads of who had them, zeroing) is queued by
        now, and this step touches no block that it loads. So a load need not wait for the forward pass, unless vLLM
        may copy another block there in this step: runner V1 does so after this hook.
        """
        if self._paged is None or self._paged.engine is None:
            return
        self.follow(metadata)
        self._submit_held()
        if self._loads_early:
            self._begun = metadata
            self._start_loads(metadata)

    def start_loads(self, metadata: StepMetadata) -> None:
        """Start this step's loads, after everything that the model's stream already has to do with their blocks."""
        begun, self._begun = self._begun, None
        if begun is metadata:
            return
        self.follow(metadata)
        self._submit_held()
        self._start_loads(metadata)

    def _start_loads(self, metadata: StepMetadata) -> None:
        mark = self._mark() if metadata.loads else None
        for job in metadata.loads:
            self._submit("load", metadata, job, mark)

    def start_saves(self, metadata: StepMetadata) -> None:
        """Start this step's saves; the step's forward pass has been launched.

        Where the runner samples later, they are held until the next step begins, or until somebody waits for copies: a
        GPU copies in the order in which it is asked, so the sampled tokens would arrive behind hundreds of megabytes.
        """
        mark = self._mark() if metadata.saves else None
        for job in metadata.saves:
            if self._rank % self._replicas:
                self._report(job, succeeded=True)  # another rank stores these very bytes
            elif self._samples_last and self._paged is not None and self._paged.engine is not None:
                with self._idle:
                    self._held.append(_Task("save", metadata, job, mark))
            else:
                self._submit("save", metadata, job, mark)

    def _mark(self) -> Mark:
        return None if self._paged is None else self._paged.mark()

    def _submit_held(self) -> None:
        with self._idle:
            held, self._held = self._held, []
        for task in held:
            self._submit(*task)

    def _submit(self, kind: Direction, metadata: StepMetadata, job: LoadJob | SaveJob, mark: Mark = None) -> None:
        client, session = self._client, metadata.session
        if client is None and self._is_joining and job.generation == self._joining_generation:
            # The session opened while this worker was still mapping its arena: the job starts when that is done.
            self._early.append(_Task(kind, metadata, job, mark))
            return
        if client is None or session is None or not job.copies or client.generation != job.generation:
            self._report(job, succeeded=False)
            return
        with self._idle:
            # Looked at and counted in one go: a view that came between the watching thread's last look and its
            # unmapping would keep the arena of a dead server mapped, and the next server waits for that.
            may_copy = not client.is_lost
            self._running += may_copy
        if not may_copy:
            self._report(job, succeeded=False)
            return
        told_s, paged = time.monotonic(), self._paged
        assert paged is not None

        def task() -> None:
            succeeded = False
            try:
                with paged.copying():
                    self._copy(kind, client, session, job.copies, mark)
                succeeded = True
                self.copied.ended(kind, time.monotonic() - told_s, self._copied_bytes(job.copies))
            except Exception:  # noqa: BLE001  # nothing may leave a copy unreported; the request is recomputed
                # As text: a log handler that keeps the error would keep the arena mapped by its frames.
                logger.error("copy failed. kind=%s rank=%d\n%s", kind, self._rank, traceback.format_exc())
            finally:
                self._report(job, succeeded=succeeded)
                with self._idle:
                    self._running -= 1
                    self._idle.notify_all()

        self._threads[kind].submit(task)

    def _report(self, job: LoadJob | SaveJob, *, succeeded: bool) -> None:
        if isinstance(job, LoadJob):
            self._loads_done.append((job.request_id, succeeded))
        else:
            self._saves_done.append((job.job_id, succeeded))

    def _copy(
        self, kind: Direction, client: WorkerClient, session: SessionInfo, copies: tuple[ChunkCopy, ...], mark: Mark
    ) -> None:
        assert self._paged is not None
        offset = session.payload_offset + session.rank_offsets[self._rank]
        job = self._paged.begin(kind, mark)
        views: list[memoryview] = []
        try:
            for copy in copies:
                slab, index = divmod(copy.slot, SLOTS_PER_SLAB_MAX)
                if client.pinned is not None:
                    client.pinned.pin_slab(slab)
                view = client.arena.view(slab, index * session.slot_bytes + offset, self._paged.rank_bytes)
                views.append(view)
                if copy.state_part is not None:
                    (block,) = copy.groups[0].block_ids
                    if kind == "load":
                        self._paged.scatter_state(view, copy.state_part, block, job)
                    else:
                        self._paged.gather_state(copy.state_part, block, view, job)
                elif kind == "load":
                    self._paged.scatter(view, [(run.first_block, run.block_ids) for run in copy.groups], job)
                else:
                    self._paged.gather([run.block_ids for run in copy.groups], view, job)
            job.launch()
        finally:
            try:
                job.wait()  # also when a later one could not begin: nothing is reported while bytes move
            finally:
                # Also when a copy failed: a log handler that keeps the error must not keep the arena mapped.
                for view in views:
                    with contextlib.suppress(BufferError):  # held by the frame of the copy that failed
                        view.release()

    def _copied_bytes(self, copies: tuple[ChunkCopy, ...]) -> int:
        assert self._paged is not None
        return sum(
            self._paged.copied_bytes([len(run.block_ids) for run in copy.groups])
            if copy.state_part is None
            else self._paged.states[copy.state_part].group_bytes
            for copy in copies
        )

    # -- reports -----------------------------------------------------------------------------------------------

    def take_finished_loads(self) -> tuple[set[str], set[str]]:
        """Requests whose loads ended since the last call, and those among them whose loads failed."""
        finished: set[str] = set()
        failed: set[str] = set()
        while self._loads_done:
            request_id, succeeded = self._loads_done.popleft()
            finished.add(request_id)
            if not succeeded:
                failed.add(request_id)
        return finished, failed

    def take_finished_saves(self) -> SaveReport | None:
        """Save jobs that ended and adapters that were loaded since the last call; None when there are none.

        Loads are looked at last: a copy of what an adapter computed ended after that adapter was loaded.
        """
        report = SaveReport()
        while self._saves_done:
            job_id, succeeded = self._saves_done.popleft()
            report.ranks_done[job_id] = 1
            if not succeeded:
                report.failed.add(job_id)
        self._adapters_told, loads = adapter_loads(self._adapters_told)
        report.adapters = {number: {self._rank: stamps} for number, stamps in loads.items()}
        return report if report.ranks_done or report.adapters else None

    def finish_copies(self) -> None:
        """Start what was held, and wait until no copy runs; blocks for milliseconds.

        What waits for the arena is given up: its blocks may lie in no memory when that is mapped.
        """
        self._submit_held()
        early, self._early = self._early, []
        for task in early:
            self._report(task.job, succeeded=False)
        with self._idle:
            self._idle.wait_for(lambda: self._running == 0)

    def close(self) -> None:
        """Finish the copies, unmap the arena. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._submit_held()
        for thread in self._threads.values():
            thread.close()
        self.before_leaving()
        for client in (self._client, *self._joined):
            if client is not None:
                client.leave()
        self._client = None
