"""Adapters below vLLM's offloading: what its workers report, and what becomes of requests of which nobody says it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

from tests.kit.vllm.tiny_adapters import adapter_files, lora
from tiered_kv.vllm.identity import loader_watch
from tiered_kv.vllm.identity.adapters import Unaccountable
from tiered_kv.vllm.row_adapters import RowAdapters, RowReport, report_adapters, salted

pytestmark = pytest.mark.vllm


def adapters(ranks: int = 1, device: str = "cuda") -> RowAdapters:
    config, parallel = SimpleNamespace(lora_dtype="auto", target_modules=None), SimpleNamespace(world_size=ranks)
    devices = SimpleNamespace(device_type=device)
    return RowAdapters(SimpleNamespace(lora_config=config, parallel_config=parallel, device_config=devices))


def connector(seen: list[Any]) -> Any:
    return SimpleNamespace(on_new_request=seen.append, update_connector_output=seen.append)


def request(name: str, adapter: Any) -> Any:
    return SimpleNamespace(request_id=name, lora_request=adapter)


def test_reports_of_ranks_are_put_together_with_vllms_own() -> None:
    first = RowReport(completed_jobs={1: 1, 2: 1}, adapters={7: {0: "a"}})
    second = RowReport(completed_jobs={2: 1}, adapters={7: {1: "a"}, 8: {1: "b"}})
    both = first.aggregate(second)
    assert isinstance(both, OffloadingWorkerMetadata)
    assert both.completed_jobs == {1: 1, 2: 2}
    assert both.adapters == {7: {0: "a", 1: "a"}, 8: {1: "b"}}
    assert first.adapters == {7: {0: "a"}}


def test_a_worker_reports_each_load_once_and_passes_on_what_vllm_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_watch, "_adapter_loads", {3: (1, "an engine before")})
    theirs: list[Any] = [None, OffloadingWorkerMetadata(completed_jobs={5: 1}), None]
    worker = SimpleNamespace(build_connector_worker_meta=lambda: theirs.pop(0))
    report_adapters(worker, rank=1)
    loader_watch._note_adapter(9, "stamps")
    loaded, finished, nothing = (worker.build_connector_worker_meta() for _ in range(3))
    assert (loaded.adapters, loaded.completed_jobs) == ({9: {1: "stamps"}}, {})
    assert (finished.adapters, finished.completed_jobs) == ({}, {5: 1})
    assert nothing is None


def test_rows_are_stored_once_every_rank_has_told_of_this_very_adapter(tmp_path: Path) -> None:
    known = adapters(ranks=2)
    seen: list[Any] = []
    folder = adapter_files(tmp_path / "a", 1)
    found: list[Any] = []
    heard = SimpleNamespace(
        on_new_request=lambda one: found.append(known.salt_of(one.request_id)), update_connector_output=seen.append
    )
    known.listen(heard)
    heard.on_new_request(request("r", lora("a", folder)))
    ((adapter, salt),) = found
    assert adapter is not None and len(salt) == 32 and not known.may_store(adapter)
    for rank, stamps, may in ((0, adapter.stamps, False), (1, adapter.stamps, True), (1, "others", False)):
        report = RowReport(adapters={1: {rank: stamps}})
        heard.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report))
        assert known.may_store(adapter) is may
    assert len(seen) == 3, "vLLM did not hear of it"


def test_a_request_of_which_nobody_says_the_adapter_is_left_alone(tmp_path: Path) -> None:
    known = adapters()
    seen: list[Any] = []
    heard = connector(seen)
    known.listen(heard)
    with pytest.raises(Unaccountable, match="nobody says"):
        known.salt_of("r")
    heard.on_new_request(request("r", None))
    with pytest.raises(Unaccountable, match="nobody says"):
        known.salt_of("r")  # it was announced, and that is over
    known._announced = request("r", lora("gone", tmp_path / "gone"))
    with pytest.raises(Unaccountable, match="cannot be read"):
        known.salt_of("r")


def test_names_of_one_key_differ_by_adapter_and_keep_the_group() -> None:
    key = bytes(32) + (7).to_bytes(4, "big")
    names = {salted(bytes([n]) * 32, key) for n in range(3)}
    assert len(names) == 3 and all(name[-4:] == key[-4:] and len(name) == 36 for name in names)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_requests_without_an_adapter_end_with_the_first_step_in_which_vllms_cpu_build_mixes_them_up(
    device: str,
) -> None:
    """It takes the adapter of another request for them; from then on its own rows may be wrong, too."""
    known, found = adapters(device=device), list[Any]()
    heard = SimpleNamespace(
        on_new_request=lambda one: found.append(known.salt_of(one.request_id)), update_connector_output=found.append
    )
    known.listen(heard)

    def step(*names: str, new: tuple[Any, ...] = (), ended: tuple[str, ...] = ()) -> bool:
        arrived = [SimpleNamespace(req_id=one.request_id, lora_request=one.lora_request) for one in new]
        tokens = dict.fromkeys(names, 1)
        known.begin_step(
            SimpleNamespace(scheduled_new_reqs=arrived, finished_req_ids=set(ended), num_scheduled_tokens=tokens)
        )
        return known.may_store(None)

    base, adapted = request("base", None), request("adapted", object())
    assert step("base", new=(base,)) and step("base")
    assert step("adapted", new=(adapted,)), "the other one is not in this step"
    assert step("adapted", ended=("base",))
    assert step("adapted", "base", new=(base,)) is (device == "cuda")
    assert step("base", ended=("adapted",)) is (device == "cuda"), "and never again"
    if device == "cpu":
        with pytest.raises(Unaccountable, match="an engine of its own"):
            heard.on_new_request(request("later", None))
    else:
        heard.on_new_request(request("later", None))
        assert found == [(None, b"")]
