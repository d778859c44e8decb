"""Another engine's questions, which a tier of vLLM's beside ours passes on: vLLM's own manager, a real server.

vLLM's ``p2p`` tier needs a network of GPUs; what it does with its parent (``serve_external_requests``) is done here by
a tier that copies (``tests/kit/vllm/asking_tier.py``).
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from tests.kit.server.clients import STORED_BY, namespace_fields
from tests.kit.server.probe import wait_for
from tests.kit.vllm.asking_tier import AskingTier
from tiered_kv.vllm.identity.rows import RowIdentity
from tiered_kv.vllm.offloading import TieredKVTier
from tiered_kv.vllm.row_groups import RowGroup

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOKENS, ROW_BYTES, ROWS = 16, 4096, 64
FULL, STATE = RowGroup(0, TOKENS, None, ((0, 512),)), RowGroup(1, TOKENS, 1, ((64, 256),))


def key(group: RowGroup, number: int) -> Any:
    return number.to_bytes(32, "big") + group.number.to_bytes(4, "big")


class Offloading:
    """vLLM's tiering manager with our tier and one that asks."""

    def __init__(self, root: Path) -> None:
        region = SharedOffloadRegion(f"test_{uuid4().hex}", ROWS, None, ROW_BYTES, ROW_BYTES)
        self.primary = CPUPrimaryTierOffloadingManager(ROWS, region)
        view = self.primary.get_kv_memoryview()
        self.memory = np.frombuffer(view.cast("B"), np.uint8).reshape(ROWS, ROW_BYTES)
        groups = [SimpleNamespace(tokens_per_block=TOKENS, group_id=number) for number in range(2)]
        config = SimpleNamespace(groups=groups, cache=SimpleNamespace(blocks_per_chunk=1))
        self.tier = TieredKVTier(
            offloading_spec=SimpleNamespace(config=config, kv_events_config=None), primary_kv_view=view,
            tier_type="ours", storage_uri=f"file://{root}", host_bytes="64MiB", disk_bytes="256MiB", strict=True,
            lookup_timeout_ms=20_000, promotion_wait_ms=20_000,
        )  # fmt: skip
        self.tier.begin([RowIdentity(namespace_fields(), STORED_BY, (FULL, STATE))], "engine")
        self.asking = AskingTier(view)
        self.manager = TieringOffloadingManager(self.primary, [self.tier, self.asking])

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext([], ()))

    def store(self, rows: int) -> dict[Any, bytes]:
        """Of a prompt of so many rows, all of full attention and the last one's state; then vLLM's memory is empty."""
        context = ReqContext(req_id="prompt")
        keys = [*(key(FULL, n) for n in range(rows)), key(STATE, rows - 1)]
        for one in keys:
            context.set_offload_key_position(one, (int.from_bytes(one[:32], "big") + 1) * TOKENS)
        self.manager.on_new_request(context)
        chosen = self.manager.prepare_store(keys, context).store_spec.chunk_ids
        content = np.random.default_rng(1).integers(0, 256, (len(keys), ROW_BYTES), np.uint8)
        self.memory[chosen] = content
        self.manager.complete_store(keys, context)
        self.manager.on_request_finished(context)
        wait_for(lambda: self.step() or not self.manager.has_pending_work(), "stores")
        self.primary.reset_cache()
        self.memory[:] = 0xA7
        return {one: row.tobytes() for one, row in zip(keys, content, strict=True)}

    def ask(self, *keys: Any) -> tuple[dict[Any, str], dict[Any, bytes]]:
        self.asking.wanted = list(keys)
        wait_for(lambda: self.step() or not self.asking.wanted, "an answer")
        wait_for(lambda: self.step() or not self.manager.has_pending_work(), "the job")
        return {one: answer.name for one, answer in self.asking.answers.items()}, self.asking.got


@pytest.fixture
def offloading(tmp_path: Path) -> Iterator[Offloading]:
    made = Offloading(tmp_path / "cache")
    yield made
    made.memory = np.empty(0)
    made.asking.let_go()
    made.manager.shutdown()


def test_another_engine_gets_what_only_our_tier_holds_byte_for_byte(offloading: Offloading) -> None:
    """More rows than are asked for at a time, out of order, with ones that nobody has between them."""
    stored = offloading.store(40)
    strangers = [key(FULL, n) for n in (100, 101)]
    keys = [*reversed(list(stored)), *strangers]
    answers, got = offloading.ask(*keys)
    # Half of vLLM's rows are for hits of requests that wait.
    assert set(answers) == set(keys) and [answers[one] for one in strangers] == ["MISS", "MISS"]
    hits = [one for one, answer in answers.items() if answer == "HIT"]
    assert len(hits) == ROWS // 2 and set(got) == set(hits)
    for one in hits:
        group = STATE if one == key(STATE, 39) else FULL
        for at, size in group.spans:
            assert got[one][at : at + size] == stored[one][at : at + size]
    assert offloading.tier._hits == 0, "the limit of hits is counted on for ever"


def test_a_question_leaves_our_own_requests_alone(offloading: Offloading) -> None:
    stored = offloading.store(4)
    offloading.ask(key(FULL, 2))
    offloading.primary.reset_cache()
    context = ReqContext(req_id="again")
    for n in range(4):
        context.set_offload_key_position(key(FULL, n), (n + 1) * TOKENS)
    context.set_offload_key_position(key(STATE, 3), 4 * TOKENS)
    offloading.manager.on_new_request(context)
    keys = list(stored)

    def are_hits() -> bool:
        answers = {offloading.manager.lookup(one, context) for one in keys}
        offloading.step()
        return answers == {LookupResult.HIT}

    wait_for(are_hits, "hits")
