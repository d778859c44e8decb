"""A pytest plugin for vLLM's own tests of tiers: each tier that they make is one of ours, with a real server.

Their modules are not changed: classes and helpers of theirs are replaced by name before a test runs. What they do
otherwise than vLLM's scheduler does, a stand-in makes up for:

- A tier of ours knows chunks by their place in a prompt, which the scheduler writes into each request's context. They
  have keys alone. Keys take places in the order in which they are first used: all of a test are one long prompt.
- Not all requests are announced: a stand-in announces those when they are first used.
- They wait for an answer by the queues of vLLM's tiers. Here a lookup is asked again while the answer is RETRY, as the
  scheduler does in its next steps.
- ``drain_jobs`` of ours is a reset, after which nothing is found. Their helper ``drain`` uses it to wait for jobs; here
  that polls ``get_finished_jobs``, waits until all is on disk, and empties the server's memory: what is loaded then
  comes from a file.
- Their specs name no group of layers, and their host memory has as few as 4 rows: the limit of half of them for hits is
  lifted.
- A load is the job of the request that asked for its chunks last, as their manager has it.
"""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, Medium, ReqContext, RequestOffloadingContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.example import manager as example
from vllm.v1.kv_offload.tiering.fs import manager as fs

from tests.kit.server.clients import STORED_BY, namespace_fields
from tests.kit.server.probe import wait_for, wait_written
from tests.kit.storage.disk_probe import blob_path
from tiered_kv.keys.row_names import row_key
from tiered_kv.metrics.figures import HOST_NAME
from tiered_kv.ops.server_link import ServerLink
from tiered_kv.tiers.base import BlobName
from tiered_kv.vllm import offloading
from tiered_kv.vllm.identity.rows import RowIdentity
from tiered_kv.vllm.offloading import TieredKVTier

ROW_TOKENS = 16
ANSWER_S = 20.0
TAKEN = {"locality", "enable_kv_events", "backpressure_detector"}
"""Of the settings of their tiers, those that ours takes, too."""

ONCE = "use_c_ext"
"""Their parameter for fs's two ways to a file; a tier of ours has one, so one of each pair runs."""

TIERS: list["StandIn"] = []
"""What runs; the running test ends it."""

PROMPT: dict[bytes, int] = {}
"""Keys of the running test, and where each ends in the one prompt."""

OUTCOMES = Path(__file__).parents[2] / "golden" / "vllm_tier_tests.json"
"""What of theirs passes, and what is left out, by reason."""


class StandIn(TieredKVTier):
    """A tier of ours that takes what their tiers take."""

    shared: Path
    """The directory of tiers that are given none: one server for all of them."""
    made = 0

    def __init__(
        self, *, offloading_spec: Any, primary_kv_view: Any, tier_type: str, root_dir: str | None = None, **given: Any
    ) -> None:
        StandIn.made += 1
        self.root = self.shared if root_dir is None else Path(root_dir) / "cache"
        self.submitted: set[int] = set()
        self.last_asked: dict[bytes, Any] = {}
        super().__init__(
            offloading_spec=_with_a_group(offloading_spec),
            primary_kv_view=primary_kv_view if isinstance(primary_kv_view, memoryview) else _rows(4, 16),
            tier_type=tier_type,
            storage_uri=f"file://{self.root}",
            host_bytes="64MiB",
            disk_bytes="256MiB",
            promotion_wait_ms=20_000,
            strict=True,
            **{name: value for name, value in given.items() if name in TAKEN},
        )
        identity = RowIdentity(namespace_fields(f"weights {StandIn.made}"), STORED_BY)
        self.begin([identity], f"theirs-{StandIn.made}")
        TIERS.append(self)

    def know(self, req_context: Any, keys: Iterable[bytes]) -> None:
        """Announce a request, and give it the prompt with these keys in it."""
        for key in keys:
            PROMPT.setdefault(key, (len(PROMPT) + 1) * ROW_TOKENS)
        for key, end in PROMPT.items():
            req_context.set_offload_key_position(key, end)
        if self._request(req_context) is None:
            TieredKVTier.on_new_request(self, req_context)

    def lookup(self, key: Any, req_context: Any) -> Any:
        self.know(req_context, [key])
        self.last_asked[key] = req_context
        end_s = time.monotonic() + ANSWER_S
        while (answer := super().lookup(key, req_context)) is LookupResult.RETRY and time.monotonic() < end_s:
            time.sleep(0.001)
            TieredKVTier.on_schedule_end(self, ScheduleEndContext(new_req_ids=[], preempted_req_ids=()))
        return answer

    def submit_store(self, job_metadata: Any, *_: Any, **__: Any) -> None:
        self.know(job_metadata.req_context, job_metadata.keys)
        self.submitted.add(job_metadata.job_id)
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: Any, *_: Any, **__: Any) -> None:
        contexts = [self.last_asked[key] for key in job_metadata.keys if key in self.last_asked]
        job = replace(job_metadata, req_context=(contexts or [job_metadata.req_context])[0])
        self.know(job.req_context, job.keys)
        self.submitted.add(job.job_id)
        super().submit_load(job)

    def get_finished_jobs(self) -> Iterable[Any]:
        results = list(super().get_finished_jobs())
        self.submitted.difference_update(one.job_id for one in results)
        return results

    def results(self) -> list[Any]:
        """Those of all jobs that run, once they are over."""
        found: list[Any] = []

        def are_over() -> bool:
            found.extend(StandIn.get_finished_jobs(self))
            return not self.submitted

        wait_for(are_over, "jobs to end", deadline_s=ANSWER_S)
        return found

    # What their tests read of vLLM's tiers.

    @property
    def events(self) -> list[Any] | None:
        return self._events if self._has_events else None

    @property
    def _store_job_keys(self) -> dict[int, list[bytes]]:
        return {job.id: keys for job, _, keys in self._parts.values() if not job.is_load}

    @property
    def file_mapper(self) -> Any:
        return SimpleNamespace(get_file_name=self._file_name)

    def _file_name(self, key: bytes) -> str:
        assert self._jobs is not None and self._jobs.namespace is not None
        return str(blob_path(self.root, BlobName(self._jobs.namespace.digest, row_key(self._jobs.namespace, key))))

    @property
    def _lookup_manager(self) -> Any:
        """Its batch: requests of which the server is asked at the moment."""
        requests = [self._request(context) for context in self.last_asked.values()]
        return SimpleNamespace(_lookup_batch=[one for one in requests if one is not None and one.rows[0].held is None])


class Stored:
    """What a test says a tier has: ``chunks[key] = True`` stores a row under that key, as an earlier request."""

    def __init__(self, tier: StandIn) -> None:
        self._tier = tier
        self._job = -1

    def __setitem__(self, key: bytes, is_there: bool) -> None:
        job = TransferJob(self._job, [key], np.zeros(1, np.int64), False, ReqContext(req_id="earlier"))
        self._job -= 1
        StandIn.submit_store(self._tier, job)
        (result,) = self._tier.results()
        assert result.success

    def __contains__(self, key: bytes) -> bool:
        probe = ReqContext(req_id="probe")
        answer = StandIn.lookup(self._tier, key, probe) if key in PROMPT else LookupResult.MISS
        TieredKVTier.on_request_finished(self._tier, probe)
        return answer is LookupResult.HIT

    def __len__(self) -> int:
        return sum(key in self for key in list(PROMPT))


class Immediate(StandIn):
    """In place of their example: a job is over once it was submitted, and the tier calls itself host memory."""

    medium = Medium.CPU

    def __init__(self, **given: Any) -> None:
        self.completed_jobs: list[Any] = []
        super().__init__(**given)
        self.chunks = Stored(self)

    def submit_store(self, job_metadata: Any, *_: Any, **__: Any) -> None:
        super().submit_store(job_metadata)
        self.completed_jobs += self.results()

    def submit_load(self, job_metadata: Any, *_: Any, **__: Any) -> None:
        super().submit_load(job_metadata)
        self.completed_jobs += self.results()

    def get_finished_jobs(self) -> Iterable[Any]:
        completed, self.completed_jobs = self.completed_jobs, []
        return [*completed, *super().get_finished_jobs()]

    def get_num_chunks(self) -> int:
        return len(self.chunks)


class Delayed(Immediate):
    """In place of the tier of ``test_backpressure.py``: stores are over, and told when the test says so."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.blocks = self.chunks
        self._held_jobs: list[Any] = []
        self._request_policy: Any = None

    def submit_store(self, job_metadata: Any, *_: Any, **__: Any) -> None:
        StandIn.submit_store(self, job_metadata)
        self._held_jobs += self.results()

    def release_jobs(self) -> None:
        self.completed_jobs += self._held_jobs
        self._held_jobs = []

    def drain_jobs(self) -> None:
        super().drain_jobs()
        self.release_jobs()

    def on_new_request(self, req_context: Any) -> Any:
        answer = super().on_new_request(req_context)
        return answer if self._request_policy is None else RequestOffloadingContext(policy=self._request_policy)

    def get_num_blocks(self) -> int:
        return len(self.blocks)


def make_obj_tier(
    num_blocks: int = 4, offloading_spec: Any = None, primary_kv_view: memoryview | None = None, **given: Any
) -> tuple[StandIn, Any]:
    """In place of ``_make_tier`` of ``test_obj_tier.py``: its agent says how each copy ends."""
    agent = SimpleNamespace(check_xfer_state=lambda handle: "DONE")
    view = _rows(num_blocks, 1024) if primary_kv_view is None else primary_kv_view
    spec = SimpleNamespace() if offloading_spec is None else offloading_spec
    tier = StandIn(offloading_spec=spec, primary_kv_view=view, tier_type="obj", **given)
    assert tier._jobs is not None
    copy = tier._jobs._arena.copy

    def copy_if_agreed(*arguments: Any, **named: Any) -> bool:
        return agent.check_xfer_state(None) != "ERR" and copy(*arguments, **named)

    tier._jobs._arena.copy = copy_if_agreed  # type: ignore[method-assign]
    return tier, agent


def drain(tier: StandIn) -> list[Any]:
    """In place of theirs: the results of all jobs; then what is stored is on disk and nowhere else."""
    found = tier.results()
    wait_written(tier.root)
    link = ServerLink.of_directory(tier.root)
    assert link is not None, "no server"
    with link:
        link.evict(HOST_NAME, b"", None, holes=True)
    return found


def lookup_and_wait(tier: StandIn, keys: list[Any], ctx: Any, timeout: float = 1.0) -> list[Any]:
    """In place of theirs: the answers for all keys of a request."""
    tier.know(ctx, keys)
    return [tier.lookup(key, ctx) for key in keys]


def _rows(count: int, row_bytes: int) -> memoryview:
    return np.zeros((count, row_bytes), np.uint8).data


def _with_a_group(spec: Any) -> Any:
    cache, groups = SimpleNamespace(blocks_per_chunk=1), [SimpleNamespace(tokens_per_block=ROW_TOKENS)]
    events = getattr(spec, "kv_events_config", None)
    return SimpleNamespace(config=SimpleNamespace(groups=groups, cache=cache), kv_events_config=events)


REPLACED: dict[str, dict[str, Any]] = {
    "test_backpressure": {"DelayedSecondaryTierManager": Delayed},
    "test_factory": {},
    "test_fs_tier": {"drain": drain, "lookup_and_wait": lookup_and_wait},
    "test_obj_tier": {"_make_tier": make_obj_tier, "drain": drain, "lookup_and_wait": lookup_and_wait},
    "test_tiering_offloading": {},
}
"""Names of theirs that mean ours here, by module."""


# -- the plugin --------------------------------------------------------------------------------------------------------


def pytest_configure() -> None:
    offloading.SHARE_MAX = 8.0  # type: ignore[misc]
    fs.FileSystemTierManager = StandIn
    example.ExampleSecondaryTierManager = Immediate


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {name for names in json.loads(OUTCOMES.read_text())["left_out"].values() for name in names}
    if missing := left_out - {item.nodeid.partition("[")[0] for item in items}:
        raise pytest.UsageError(f"left out, and not there: {sorted(missing)}")
    chosen: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        assert isinstance(item, pytest.Function)
        module, parameters = item.module, getattr(item, "callspec", SimpleNamespace(params={})).params
        name = item.nodeid.partition("[")[0]
        is_chosen = name not in left_out and not parameters.get(ONCE)
        (chosen if is_chosen else others).append(item)
        for known, ours in REPLACED[module.__name__].items():
            setattr(module, known, partial(ours, ctx=module._CTX) if ours is lookup_and_wait else ours)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


@pytest.fixture(autouse=True, scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    StandIn.shared = tmp_path_factory.mktemp("shared") / "cache"
    keeper = Immediate(offloading_spec=None, primary_kv_view=None, tier_type="keeper")
    yield
    keeper.shutdown()


@pytest.fixture(autouse=True)
def one_prompt(shared_server: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test has a prompt and requests of its own, and has to make a tier of ours."""
    before = StandIn.made
    TIERS.clear()
    PROMPT.clear()
    if (context := getattr(request.module, "_CTX", None)) is not None:
        context._state.clear()
        context._offload_key_positions.clear()
    yield
    for tier in TIERS:
        tier.shutdown()
    assert StandIn.made > before, "no tier of ours took part"
