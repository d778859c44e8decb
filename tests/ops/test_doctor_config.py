"""What `doctor` says of the JSON that vLLM gets: a table of good and bad ones, and no secret in any answer."""

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.config import Config, size_text
from tiered_kv.ops.doctor_config import TRANSFER_FIELDS, check_host_default, check_settings, read_text
from tiered_kv.ops.findings import DoctorFinding

URI = "file:///var/cache/tiered_kv"


OTHER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def transfer(**changes: Any) -> dict[str, Any]:
    whole = {
        "kv_connector": "TieredKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"storage_uri": URI},
    }
    return {name: value for name, value in (whole | changes).items() if value is not ...}


def offloading(tier: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """vLLM's own offloading with our tier below it."""
    ours = {"type": "TieredKVTier", "module_path": "tiered_kv.vllm.offloading", "storage_uri": URI} | (tier or {})
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 1 << 35,
        "block_size": 256,
        "secondary_tiers": [{"type": "example"}, ours],
    }
    extra = {name: value for name, value in (extra | changes).items() if value is not ...}
    return transfer(kv_connector="OffloadingConnector", kv_connector_extra_config=extra)


def several(*connectors: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Connectors below vLLM's MultiConnector."""
    given = {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"connectors": list(connectors)}}
    return transfer(kv_connector="MultiConnector", **(given | changes))


def examined(given: object) -> list[DoctorFinding]:
    """All findings about a text, as the verb collects them."""
    read = read_text(given if isinstance(given, str) else json.dumps(given))
    findings = list(read.findings)
    if read.settings is not None:
        findings += check_settings(read.settings)[1]
    return findings


GOOD = {
    "our settings alone": {"storage_uri": URI},
    "the whole of it": transfer(),
    "with a module path": transfer(kv_connector_module_path="tiered_kv.vllm"),
    "with the policy": transfer(kv_load_failure_policy="recompute"),
    "with what vLLM knows": transfer(engine_id="e", kv_port=1, kv_buffer_device="cpu", enable_permute_local_kv=False),
    "one of several connectors": transfer(
        kv_connector="MultiConnector",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": [OTHER, transfer()]},
    ),
    "a tier below vLLM's own offloading": offloading(),
    "numbers in quotes, as vLLM takes them": offloading(cpu_bytes_to_use=str(1 << 35), block_size="256"),
    "rows in blocks": offloading(block_size=..., blocks_per_chunk=16),
    "a policy of vLLM's own offloading": offloading() | {"kv_load_failure_policy": "fail"},
    "the same with vLLM's words": offloading(
        {"locality": "LOCAL", "enable_kv_events": True, "backpressure": {"policy_cls": "DropStorePolicy"}},
        backpressure={"backpressure_cls": "EMABackpressureDetector"},
        offload_prompt_only=False,
    ),
    "a bucket with limits": {
        "storage_uri": "s3://bucket/kv",
        "storage_bytes": "2TiB",
        "storage_ttl": "7d",
        "disk_path": "/var/cache/tiered_kv",
        "disk_bytes": "200GiB",
    },
    "a null": {"storage_uri": URI, "host_bytes": None},
}


@pytest.mark.parametrize("name", GOOD)
def test_good_ones_have_nothing_to_mend(name: str) -> None:
    findings = examined(GOOD[name])
    assert [f for f in findings if f.status != "ok"] == []
    assert any(f.check == "settings" for f in findings)


BAD: dict[str, tuple[object, str, str, str]] = {
    "no JSON": ('{"storage_uri": "x",', "json", "this is no JSON: line 1", ""),
    "single quotes": ("{'storage_uri': 'x'}", "json", "this is no JSON: line 1, column 2", "quotes"),
    "empty": ("", "json", "this is no JSON", ""),
    "NaN": ('{"storage_uri": NaN}', "json", "NaN is not a value that JSON has", ""),
    "too deep": ("[" * 100_000, "json", "nested too deep", ""),
    "a list": ([1], "json", "expected an object, got a list", "storage_uri"),
    "a text": ("\"file:///x\"", "json", "expected an object, got a text", ""),
    "no connector": (transfer(kv_connector=...), "connector", "there is none", "TieredKVConnector"),
    "a misspelled connector": (transfer(kv_connector="TieredKvConnector"), "connector", "it is 'TieredKv", "Tiered"),
    "another connector": (transfer(kv_connector="LMCacheConnectorV1"), "connector", "'LMCacheConnectorV1'", ""),
    "several without ours": (
        transfer(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": [OTHER]}),
        "connector",
        "there is none",
        "",
    ),
    "another module": (transfer(kv_connector_module_path="lmcache.x"), "connector", "lmcache.x", "tiered_kv.vllm"),
    "no role": (transfer(kv_role=...), "role", "there is no kv_role", "kv_both"),
    "a misspelled role": (transfer(kv_role="kv_boht"), "role", "'kv_boht'", "kv_both"),
    "a number as role": (transfer(kv_role=1), "role", "'1'", "kv_both"),
    "another policy": (transfer(kv_load_failure_policy="ignore"), "load failures", "neither", "leave it out"),
    "an unknown field": (transfer(kv_rol="kv_both"), "connector", "knows no field 'kv_rol'", "did you mean kv_role?"),
    "a setting in the wrong place": (transfer(host_bytes="8GiB"), "connector", "'host_bytes'", "extra_config"),
    "settings that are none": (transfer(kv_connector_extra_config=[]), "settings", "got a list", ""),
    "no URI": ({}, "settings", "storage_uri is required", ""),
    "no settings": (transfer(kv_connector_extra_config=...), "settings", "storage_uri is required", ""),
    "an unknown setting": ({"storage_uri": URI, "host_byte": 1}, "settings", "'host_byte'", "did you mean host_bytes?"),
    "a size that is none": ({"storage_uri": URI, "host_bytes": "8 gigs"}, "settings", "got '8 gigs'", ""),
    "a scheme that is none": ({"storage_uri": "ftp://x/y"}, "settings", "unknown scheme 'ftp'", ""),
    "a relative path": ({"storage_uri": "file://cache"}, "settings", "three slashes", ""),
    "a disk below a disk": ({"storage_uri": URI, "disk_path": "/x"}, "settings", "only for object stores", ""),
    "a limit of no bucket": ({"storage_uri": URI, "storage_bytes": 10**9}, "settings", "storage_bytes is only for", ""),
    "a limit of no disk": ({"storage_uri": "s3://b/p", "disk_bytes": 1}, "settings", "set disk_path", ""),
    "offloading without ours": (offloading(secondary_tiers=[{"type": "fs"}]), "connector", "no tier of ours", "type"),
    "offloading that is none": (
        transfer(kv_connector="OffloadingConnector", kv_connector_extra_config=[]),
        "connector",
        "got a list",
        "spec_name",
    ),
    "a tier without its module": (offloading({"module_path": "x"}), "connector", "does not find", "offloading"),
    "a tier misspelled": (offloading({"type": "TieredKVTier2"}), "connector", "'TieredKVTier2'", "TieredKVTier"),
    "another spec": (offloading(spec_name="CPUOffloadingSpec"), "connector", "'CPUOffloadingSp", "Tiering"),
    "no spec": (offloading(spec_name=...), "connector", "there is none", "TieringOffloadingSpec"),
    "one of several without a role": (several(OTHER, transfer(kv_role=...)), "role", "TieredKVConnector in Multi", ""),
    "one of several with another role": (several(OTHER, transfer(kv_role="both")), "role", "'both'", "kv_both"),
    "another one without a role": (several({"kv_connector": "Nixl"}, transfer()), "role", "Nixl in Multi", ""),
    "an unknown field in one of several": (
        several(OTHER, transfer(kv_rol=1)), "connector", "TieredKVConnector in MultiConnector: vLLM knows no", "kv_role"
    ),
    "an engine in one of several": (several(OTHER, transfer(engine_id="e")), "connector", "engine_id", "beside"),
    "a module of several": (several(transfer(), kv_connector_module_path="x"), "connector", "does not start", "out"),
    "a tier below several": (several(OTHER, offloading()), "connector", "never joins its server", "outermost"),
    "ours beside a tier below several": (several(transfer(), offloading()), "connector", "never joins", "outermost"),
    "a module of offloading": (
        offloading() | {"kv_connector_module_path": "tiered_kv.vllm"}, "connector", "looks for Offloading", "leave it"
    ),
    "no policy of offloading": (offloading() | {"kv_load_failure_policy": "x"}, "load failures", "neither", ""),
    "two sizes of rows": (offloading(blocks_per_chunk=16), "rows", "block_size and blocks_per_chunk", "leave out one"),
    "rows of nothing": (offloading(block_size=0), "rows", "block_size is not a number", "256"),
    "rows of no number": (offloading(block_size="16 blocks"), "rows", "block_size is not a number", "256"),
    "host memory with a unit": (offloading(cpu_bytes_to_use="32GiB"), "rows", "cpu_bytes_to_use is not", "34359738368"),
    "no host memory": (offloading(cpu_bytes_to_use=...), "rows", "cpu_bytes_to_use is not", "34359738368"),
    "a threshold of stores": (offloading(store_threshold=2), "connector", "store_threshold is none", "second-touch"),
    "an unknown eviction": (offloading(eviction_policy="lfu"), "connector", "eviction_policy is 'lfu'", "lru, arc"),
    "a locality that is none": (offloading({"locality": "local"}), "connector", "locality is 'local'", "LOCAL, REMOTE"),
    "backpressure of no class": (offloading({"backpressure": {}}), "connector", "no backpressure_cls", "EMA"),
    "tokens of a chunk": (offloading({"chunk_tokens": 256}), "settings", "chunk_tokens is none", "block_size"),
    "a tier's unknown setting": (offloading({"disk_byte": 1}), "settings", "'disk_byte'", "did you mean disk_bytes?"),
    "an unknown option": (
        {"storage_uri": "s3://b/p", "storage_options": {"endpoint": "x"}}, "settings", "did you mean endpoint_url?", ""
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_ones_are_errors_that_say_what_to_do(name: str) -> None:
    given, check, text, hint = BAD[name]
    errors = [f for f in examined(given) if f.status == "error"]
    assert [f.check for f in errors] == [check]
    assert text in errors[0].text and hint in errors[0].hint


WARNED = {
    "stores only": (transfer(kv_role="kv_producer"), "role", "stores only"),
    "loads only": (transfer(kv_role="kv_consumer"), "role", "loads only"),
    "one of several stores only": (several(OTHER, transfer(kv_role="kv_producer")), "role", "stores only"),
    "a role that offloading does not read": (offloading() | {"kv_role": "kv_producer"}, "role", "has no effect"),
    "fail": (transfer(kv_load_failure_policy="fail"), "load failures", "has no effect"),
    "old fields": (transfer(kv_rank=0), "connector", "kv_rank"),
    "two of ours": (
        transfer(
            kv_connector="MultiConnector",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"connectors": [transfer(), transfer()]},
        ),
        "connector",
        "the first is checked",
    ),
    "a policy below MultiConnector": (
        transfer(
            kv_connector="MultiConnector",
            kv_connector_extra_config={"connectors": [transfer(kv_load_failure_policy="recompute")]},
        ),
        "load failures",
        "vLLM reads the policy of MultiConnector",
    ),
    "a misspelled name beside tiers": (
        offloading(canonical_layuot=True), "connector", "'canonical_layuot' beside secondary_tiers has no effect"
    ),
    "a setting of ours beside tiers": (offloading(host_bytes="8GiB"), "connector", "'host_bytes' beside"),
    "a text for yes or no": (offloading(canonical_layout="false"), "connector", "canonical_layout is a text"),
    "a tier's text for yes or no": (offloading({"enable_kv_events": "no"}), "connector", "enable_kv_events is a text"),
    "rows of one block": (offloading(block_size=...), "rows", "many small files"),
    "two tiers of ours": (
        offloading(secondary_tiers=2 * offloading()["kv_connector_extra_config"]["secondary_tiers"][1:]),
        "connector",
        "the first is checked",
    ),
    "no limit": ({"storage_uri": "s3://b/p"}, "settings", "has no limit"),
    "single writer of no limit": (
        {"storage_uri": "s3://b/p", "single_writer": True}, "settings", "single_writer has no effect"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WARNED)
def test_what_works_and_surprises_is_a_warning(name: str) -> None:
    given, check, text = WARNED[name]
    findings = examined(given)
    assert [f for f in findings if f.status == "error"] == []
    assert any(f.status == "warning" and f.check == check and text in f.text for f in findings)


def test_of_a_tier_it_is_said_what_host_memory_a_server_has_that_nobody_named() -> None:
    assert read_text(json.dumps(offloading())).is_tier and not read_text(json.dumps(transfer())).is_tier
    small = Config.from_mapping({"storage_uri": URI}).below_offloading()
    (finding,) = check_host_default(small)
    assert f"takes up to {size_text(small.resolved_host_bytes())}" in finding.text and finding.status == "ok"
    assert "TieredKVConnector shares the directory" in finding.text
    assert check_host_default(Config.from_mapping({"storage_uri": URI, "host_bytes": "2GiB"})) == []


def test_every_wrong_setting_is_told_not_the_first_alone() -> None:
    findings = examined({"storage_uri": URI, "host_bytes": "x", "drain_s": -1, "chunk_token": 256, "strict": False})
    errors = [f.text for f in findings if f.status == "error"]
    assert len(errors) == 3
    assert all(any(word in text for text in errors) for word in ("host_bytes", "drain_s", "chunk_token"))


@pytest.mark.parametrize(
    "given",
    [
        {"storage_uri": "s3://AKIA:hidden@bucket/p"},
        {"storage_uri": "s3://b/p?secret=hidden&key=AKIA&nonsense=1"},
        {"storage_uri": "s3://b/p", "storage_options": {"secret": "hidden", "keys": "hidden"}},
        {"storage_uri": "s3://b/p", "storage_options": "hidden"},
        {"storage_uri": URI, "storage_options": {"secret": "hidden"}},
        '{"storage_options": {"secret": "hidden"',
        transfer(secret="hidden"),
        transfer(kv_connector_extra_config="hidden"),
    ],
)
def test_secrets_are_in_no_finding(given: object) -> None:
    findings = examined(given)
    assert any(f.status == "error" for f in findings)
    assert not any("hidden" in f.text + f.hint for f in findings)


def test_vllm_has_the_fields_that_are_let_pass() -> None:
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or not vllm.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    source = Path(vllm.submodule_search_locations[0], "config", "kv_transfer.py").read_text()  # importing it takes 5 s
    (kind,) = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "KVTransferConfig"]
    known = {n.target.id for n in kind.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    assert set(TRANSFER_FIELDS) == known
