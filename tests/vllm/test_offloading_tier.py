"""Our tier below vLLM's offloading without an engine: what a real one seldom does, and vLLM's tests do not ask."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.kit.server.clients import STORED_BY, namespace_fields
from tiered_kv.errors import ConfigError
from tiered_kv.vllm.identity.rows import RowIdentity

pytestmark = pytest.mark.slow

KEYS = [b"%d\0\0\0\0" % n for n in range(4)]


@pytest.fixture
def make_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    from tests.kit.vllm import their_tiers

    monkeypatch.setattr(their_tiers.StandIn, "shared", tmp_path / "cache", raising=False)
    monkeypatch.setattr(their_tiers, "TIERS", [])
    monkeypatch.setattr(their_tiers, "PROMPT", {})

    def make() -> Any:
        return their_tiers.Immediate(offloading_spec=SimpleNamespace(), primary_kv_view=rows(), tier_type="ours")

    yield make
    for tier in their_tiers.TIERS:
        tier.shutdown()


def rows() -> memoryview:
    return memoryview(np.zeros((16, 64), np.uint8))


def request(name: str = "request") -> Any:
    from vllm.v1.kv_offload.base import ReqContext

    return ReqContext(req_id=name)


def job(number: int, keys: list[bytes], context: Any) -> Any:
    from vllm.v1.kv_offload.tiering.base import TransferJob

    return TransferJob(number, keys, np.arange(len(keys)), False, context)


def test_two_tiers_of_ours_know_a_request_each_by_itself(make_tier: Callable[[], Any]) -> None:
    from vllm.v1.kv_offload.base import LookupResult

    empty, full, context = make_tier(), make_tier(), request()
    full.chunks[KEYS[0]] = True

    assert empty.lookup(KEYS[0], context) is LookupResult.MISS
    assert full.lookup(KEYS[0], context) is LookupResult.HIT


def test_hits_are_counted_once_in_whatever_order_they_are_asked_for(make_tier: Callable[[], Any]) -> None:
    """Host memory had the first chunks when the request was looked at first, and lost them while it waited."""
    from vllm.v1.kv_offload.base import LookupResult

    tier, context = make_tier(), request()
    for key in KEYS:
        tier.chunks[key] = True

    assert [tier.lookup(key, context) for key in (KEYS[2], KEYS[0])] == [LookupResult.HIT] * 2
    assert tier._hits == len(KEYS)
    tier.on_request_finished(context)
    assert tier._hits == 0


def test_a_job_of_no_rows_succeeds_and_a_load_of_unknown_chunks_fails(make_tier: Callable[[], Any]) -> None:
    from tiered_kv.vllm.offloading import TieredKVTier

    tier, context = make_tier(), request()
    TieredKVTier.on_new_request(tier, context)
    TieredKVTier.submit_store(tier, job(1, [], context))
    TieredKVTier.submit_load(tier, job(2, [], context))
    TieredKVTier.submit_load(tier, job(3, KEYS, context))

    assert {(one.job_id, one.success) for one in tier.get_finished_jobs()} == {(1, True), (2, True), (3, False)}


def test_a_tier_that_joined_late_is_not_said_to_find_nothing(
    make_tier: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    from tiered_kv.vllm.offloading import TieredKVTier

    tier, context = make_tier(), request()
    tier._refusal = "no session within 30 s"  # as the start says of a server that answers later
    TieredKVTier.on_new_request(tier, context)
    TieredKVTier.submit_load(tier, job(1, KEYS, context))

    assert [one.success for one in tier.get_finished_jobs()] == [False]
    assert "nothing is found" not in caplog.text


def test_an_engine_that_wakes_up_keeps_its_session(make_tier: Callable[[], Any]) -> None:
    """VLLM 0.33 asks workers again what they are, and tells it the tier, whenever an engine has slept."""
    from tests.kit.vllm.their_tiers import StandIn

    tier = make_tier()
    jobs = tier._jobs
    tier.begin([RowIdentity(namespace_fields(f"weights {StandIn.made}"), STORED_BY)], f"theirs-{StandIn.made}")

    assert tier._jobs is jobs
    assert jobs.is_ready
    assert not tier._is_changed


@pytest.mark.parametrize("now", [RowIdentity(b"{}", "test"), RowIdentity(refusal="cannot say"), None])
def test_an_engine_that_wakes_up_as_another_is_left_alone(
    make_tier: Callable[[], Any], now: RowIdentity | None
) -> None:
    from vllm.v1.kv_offload.base import LookupResult

    tier, before, after = make_tier(), request(), request("another")
    tier.chunks[KEYS[0]] = True
    assert tier.lookup(KEYS[0], before) is LookupResult.HIT
    tier.begin([] if now is None else [now], f"theirs-{type(tier).made}")

    assert [tier.lookup(KEYS[0], one) for one in (before, after)] == [LookupResult.MISS] * 2
    assert not any(tier._may_load(tier._request(one)) for one in (before, after))
    tier.submit_store(job(1, KEYS, after))
    assert [one.success for one in tier.completed_jobs] == [False]


def test_a_shutdown_may_be_called_again(make_tier: Callable[[], Any]) -> None:
    tier = make_tier()
    tier.shutdown()
    tier.shutdown()


TIER = {"type": "TieredKVTier", "module_path": "tiered_kv.vllm.offloading", "storage_uri": "file:///unused"}


def test_vllm_defines_our_metrics_beside_its_own() -> None:
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from tiered_kv.vllm.row_metrics import definitions

    defined = TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [TIER]})
    assert definitions().items() <= defined.items()
    assert all(name.startswith("vllm:tiered_kv_rows_") for name in definitions())


def test_a_rank_that_says_nothing_is_a_refusal(make_tier: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from tiered_kv.vllm.identity.rows import RowIdentity
    from tiered_kv.vllm.offloading import join_offloading

    tier, heard = make_tier(), []
    monkeypatch.setattr(tier, "begin", lambda identities, _: heard.extend(identities))
    manager = SimpleNamespace(secondary_tiers=[object(), tier])
    connector = SimpleNamespace(
        scheduler=SimpleNamespace(manager=manager),
        build_connector_meta=lambda output: ("plan", output),
        on_new_request=lambda _: None,
    )
    transfer = SimpleNamespace(kv_connector_extra_config={"secondary_tiers": [TIER]}, engine_id="e")
    join_offloading(
        connector, SimpleNamespace(kv_transfer_config=transfer, lora_config=None), KVConnectorRole.SCHEDULER, None
    )
    said = RowIdentity(b"{}", "line")
    connector.set_xfer_handshake_metadata_pp_aware({(0, 1): None, (0, 0): said})
    assert heard[0] == said and "rank (0, 1) did not say" in heard[1].refusal
    monkeypatch.setattr(tier, "begin_step", heard.append)
    assert connector.build_connector_meta("output") == ("plan", "output") and heard[2:] == ["output"]


@pytest.mark.parametrize("strict", [False, True])
def test_a_spec_that_makes_no_tiers_is_told_of(strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's default spec has host memory alone, and says nothing of ``secondary_tiers``."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from tiered_kv.vllm import offloading

    connector = SimpleNamespace(
        scheduler=SimpleNamespace(manager=object()), build_connector_meta=None, on_new_request=None
    )
    extra = {"spec_name": "CPUOffloadingSpec", "secondary_tiers": [TIER | {"strict": strict}]}
    transfer = SimpleNamespace(kv_connector_extra_config=extra, engine_id="e")
    config = SimpleNamespace(kv_transfer_config=transfer, lora_config=None)
    offloading.logger.addHandler(caplog.handler)
    try:
        with pytest.raises(ConfigError, match="TieringOffloadingSpec") if strict else nullcontext():
            offloading.join_offloading(connector, config, KVConnectorRole.SCHEDULER, None)
    finally:
        offloading.logger.removeHandler(caplog.handler)
    told = {one.getMessage() for one in caplog.records if one.levelname == "ERROR"}
    assert strict or any("spec_name=CPUOffloadingSpec" in text for text in told)


def test_tiers_that_name_the_model_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiered_kv.vllm import offloading

    config = SimpleNamespace(groups=[SimpleNamespace(tokens_per_block=16)], cache=SimpleNamespace(blocks_per_chunk=2))
    monkeypatch.setattr(offloading, "offloading_config", lambda *_: config)
    tiers = [TIER | {"model_id": "a"}, TIER | {"model_id": "b"}]
    identity = offloading._identity(None, None, {"secondary_tiers": tiers}, {})
    assert "model_id" in identity.refusal and not identity.fields
