"""What goes wrong in a simulated engine on purpose: slow and failing copies, and mistakes that must be noticed.

``CopyFaults`` are part of every scenario. The others are negative controls: each breaks one rule that keeps KV right,
so a simulator that does not notice them proves nothing.
"""

import itertools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import xxhash

from tiered_kv.chunks import header as f
from tiered_kv.chunks.header import read_header
from tiered_kv.chunks.transfer import CopyJob, PagedKV
from tiered_kv.vllm.drafts import Drafts
from tiered_kv.vllm.kv_groups import CacheGroups
from tiered_kv.vllm.request_lookups import RequestLookups
from tiered_kv.vllm.request_saves import RequestSaves
from tiered_kv.vllm.step import BlockRun
from tiered_kv.vllm.undrafted import UndraftedBlocks

LATE_S = 0.05


class InjectedFailure(Exception):
    """A copy that fails on purpose."""


@dataclass
class CopyFaults:
    """How copies between paged KV and slots behave: each draws by itself, so often one rank alone is hit.

    Attributes:
        slow: Share of copies that take up to ``slow_s``.
        failing_loads: Share of copies into paged KV that fail.
        failing_saves: Share of copies out of it that fail.
    """

    seed: int = 0
    slow: float = 0.0
    slow_s: float = 0.01
    failing_loads: float = 0.0
    failing_saves: float = 0.0

    @contextmanager
    def active(self) -> Iterator[None]:
        """All copies in this process behave so."""
        source = random.Random(self.seed)
        gather, scatter = PagedKV.add_gather, PagedKV.add_scatter

        def trouble(failing: float) -> None:
            if source.random() < self.slow:
                time.sleep(source.random() * self.slow_s)
            if source.random() < failing:
                raise InjectedFailure("injected")

        def troubled_gather(paged: PagedKV, *arguments: Any, **more: Any) -> Any:
            trouble(self.failing_saves)
            return gather(paged, *arguments, **more)

        def troubled_scatter(paged: PagedKV, *arguments: Any, **more: Any) -> Any:
            trouble(self.failing_loads)
            return scatter(paged, *arguments, **more)

        with mock.patch.multiple(PagedKV, add_gather=troubled_gather, add_scatter=troubled_scatter):
            yield


@contextmanager
def first_load_fails() -> Iterator[None]:
    """The next copy into paged KV fails, and all others work."""
    scatter = PagedKV.add_scatter
    calls = itertools.count()

    def fail_once(paged: PagedKV, *arguments: Any, **more: Any) -> Any:
        if next(calls) == 0:
            raise InjectedFailure("injected")
        return scatter(paged, *arguments, **more)

    with mock.patch.object(PagedKV, "add_scatter", fail_once):
        yield


# -- negative controls -------------------------------------------------------------------------------------------------


class _NoPins:
    """vLLM's block pool for a connector that does not hold the blocks it stores."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def touch(self, blocks: object) -> None:
        """Nothing."""

    def free_blocks(self, blocks: object) -> None:
        """Nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def store_without_pins(engine: Any) -> None:
    """Blocks that are being stored may be given to other requests."""
    stores = engine.connector._scheduler.side.saves
    stores.bind_block_pool(_NoPins(engine.scheduler.kv_cache_manager.block_pool))


@contextmanager
def loads_reported_early() -> Iterator[None]:
    """Loads are reported at once, and their bytes arrive later."""
    scatter = PagedKV.add_scatter
    late: list[threading.Timer] = []

    def later(paged: PagedKV, job: CopyJob, src: memoryview, *arguments: Any, **more: Any) -> None:
        kept = memoryview(bytearray(src))
        late.append(threading.Timer(LATE_S, scatter, (paged, job, kept, *arguments), more))
        late[-1].start()

    with mock.patch.object(PagedKV, "add_scatter", later):
        yield
    for timer in late:
        timer.join()


def save_before_forward(engine: Any) -> None:
    """Every worker gathers what it saves before the step that computes it."""
    for worker in engine.workers:
        connector = worker.connector
        save = connector.wait_for_save

        def save_now(save: Any = save, side: Any = connector._worker) -> None:
            save()
            with side._idle:
                side._idle.wait_for(lambda: side._running == 0)

        worker.before_forward = save_now
        connector.wait_for_save = lambda: None


def change_stored_tokens(root: Path, layer: str = "") -> int:
    """Change a few bytes in every blob of a directory and make its checksums right again; returns how many blobs.

    The bytes lie in the first block of the first layer, or of one by name: every load of the chunk's beginning reads
    it.
    """
    changed = 0
    for path in (root / "blobs").rglob("*.safetensors"):
        blob = bytearray(path.read_bytes())
        parsed = read_header(memoryview(blob))
        size = parsed.header.header_bytes
        blob[size + next(entry.offset_bytes for entry in parsed.tensors if layer in entry.name)] ^= 1
        header = blob[:size]
        header[f.PAYLOAD_XXH3.slice] = xxhash.xxh3_128(bytes(blob[size:])).hexdigest().encode()
        header[f.HEADER_XXH3.slice] = f.header_hash(header).encode("ascii")
        path.write_bytes(header + blob[size:])
        changed += 1
    return changed


@contextmanager
def load_leaves_one_block(group: int) -> Iterator[None]:
    """Of each load the first block of one group's last run stays as it is, as if one fewer were needed."""
    plan = CacheGroups.load_copies

    def one_too_few(groups: CacheGroups, *arguments: Any) -> Any:
        copies: Any = plan(groups, *arguments)
        place = groups.stored.index(groups[group])
        for n in reversed(range(len(copies or ()))):
            runs = list(copies[n].groups)
            if runs[place].block_ids:
                runs[place] = BlockRun(runs[place].first_block + 1, runs[place].block_ids[1:])
                return (*copies[:n], replace(copies[n], groups=tuple(runs)), *copies[n + 1 :])
        return copies

    with mock.patch.object(CacheGroups, "load_copies", one_too_few):
        yield


@contextmanager
def prompts_loaded_whole() -> Iterator[None]:
    """A prompt of whole chunks is loaded with its last token, which vLLM then computes again, alone."""
    with mock.patch.object(CacheGroups, "loadable_tokens", lambda _groups, held, *_: held):
        yield


@contextmanager
def loads_said_to_bring_all_groups(engine: Any) -> Iterator[None]:
    """vLLM is told that loads bring the groups that are left out, too, so that it computes nothing of them again."""
    every = tuple(range(engine.groups))
    with mock.patch.object(engine.connector, "get_loaded_kv_cache_group_ids", return_value=every):
        yield


@contextmanager
def loads_are_synchronous(engine: Any) -> Iterator[None]:
    """Loads run before the forward pass of the step that admits a request, as connectors may do it.

    vLLM has copied the state to the block it computes in by then.
    """
    ask = engine.connector.get_num_new_matched_tokens

    def load_now(connector: Any) -> Any:
        load = connector.start_load_kv

        def loaded(*arguments: Any, **more: Any) -> None:
            load(*arguments, **more)
            connector._worker.finish_copies()

        return loaded

    def report_to_side(connector: Any) -> Any:
        report = connector.get_transfer_results

        def told_nobody(finished_req_ids: set[str]) -> Any:
            results = report(finished_req_ids)
            engine.connector._scheduler.side.loads_finished(results.finished_recving, results.failed_recving)
            return type(results)()

        return told_nobody

    with ExitStack() as stack:
        at_once = lambda *request: (ask(*request)[0], False)  # noqa: E731
        stack.enter_context(mock.patch.object(engine.connector, "get_num_new_matched_tokens", at_once))
        for worker in engine.workers:
            one = worker.connector
            stack.enter_context(mock.patch.object(one, "start_load_kv", load_now(one)))
            stack.enter_context(mock.patch.object(one, "get_transfer_results", report_to_side(one)))
        yield


@contextmanager
def states_saved_by_position() -> Iterator[None]:
    """A prompt's last state is taken when its request ends, from where the block table has it then."""

    def finish(saves: RequestSaves, state: Any, tables: Any) -> None:
        finish_chunks(saves, state, tables)
        tokens = (state.request.num_prompt_tokens - 1) // saves._config.chunk_tokens * saves._config.chunk_tokens
        by_group = {number: tables[number][-1] for number in saves._groups.states}
        saves._queue_state(state, tokens, by_group)

    finish_chunks = RequestSaves.finish
    with mock.patch.multiple(RequestSaves, finish=finish, _queue_states=mock.DEFAULT):
        yield


class _OneMoreToken:
    """A request that says it has one token more than it has."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._request, name)
        return value + 1 if name == "num_tokens" else value


@contextmanager
def states_loaded_at_the_last_token() -> Iterator[None]:
    """A prompt that ends at a boundary may be loaded whole: vLLM computes its last token on top of its own state."""
    send = RequestLookups._sent

    def send_for_all(lookups: RequestLookups, state: Any, start: int, counted: int = 0) -> Any:
        whole, state.request = state.request, _OneMoreToken(state.request)
        try:
            return send(lookups, state, start, counted)
        finally:
            state.request = whole

    with mock.patch.object(RequestLookups, "_sent", send_for_all):
        yield


@contextmanager
def last_block_of_a_draft_is_loaded() -> Iterator[None]:
    """A prefix is loaded up to its end, though a draft's last slot there is of another prompt's next token."""
    with mock.patch.object(Drafts, "loadable_tokens", lambda _drafts, held, *_, **__: held):
        yield


@contextmanager
def undrafted_blocks_are_stored() -> Iterator[None]:
    """Nobody notes where a draft did not run."""
    with mock.patch.object(UndraftedBlocks, "drafted_chunks", lambda _blocks, _tables, chunks: chunks):
        yield
