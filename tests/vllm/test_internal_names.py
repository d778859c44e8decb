"""Names of vLLM beside the connector's interface that we use: what no type and no interface promises.

Read from the sources of every vLLM of the window that is here, so that a rename is found before an engine finds it, or
worse, before a ``getattr`` with a default hides it.
"""

import ast
from pathlib import Path

import pytest

from tests.kit.vllm.connector_api import BASE, sources

CORE, V1 = "vllm/v1/core", "vllm/distributed/kv_transfer/kv_connector/v1"
USED = {
    (f"{CORE}/block_pool.py", "BlockPool"): {
        "blocks",
        "free_blocks",
        "get_cached_block",
        "get_num_free_blocks",
        "num_gpu_blocks",
        "reset_prefix_cache",
        "touch",
    },
    (f"{CORE}/kv_cache_utils.py", "KVCacheBlock"): {"block_id", "ref_cnt"},
    (f"{CORE}/kv_cache_utils.py", ""): {
        "generate_block_hash_extra_keys",
        "maybe_convert_block_hash",
        "to_event_extra_keys",
    },
    (f"{CORE}/sched/output.py", "SchedulerOutput"): {"kv_connector_block_state"},
    (f"{CORE}/sched/output.py", "KVConnectorBlockState"): {"get_block_ids"},
    ("vllm/v1/request.py", "Request"): {"_all_token_ids", "all_token_ids", "num_prompt_tokens", "kv_transfer_params"},
    ("vllm/v1/outputs.py", "KVConnectorOutput"): {"failed_recving", "finished_recving", "invalid_block_ids"},
    ("vllm/v1/kv_cache_interface.py", "KVCacheConfig"): {
        "kv_cache_groups",
        "kv_cache_layout",
        "kv_tp_replicas",
    },
    ("vllm/v1/kv_cache_interface.py", ""): {"get_kv_cache_spec_kind"},
    ("vllm/config/kv_transfer.py", "KVTransferConfig"): {"kv_load_failure_policy"},
    ("vllm/config/compilation.py", "CompilationConfig"): {"static_forward_context"},
    (f"{V1}/base.py", "KVConnectorBase_V1"): {"_get_connector_metadata", "_kv_transfer_config"},
    (f"{V1}/metrics.py", "KVConnectorPromMetrics"): {"_counter_cls", "_gauge_cls", "_histogram_cls"},
    (f"{V1}/multi_connector.py", "MultiConnector"): {"sub_connectors"},
    ("vllm/distributed/kv_transfer/kv_connector/factory.py", "KVConnectorFactory"): {"register_connector"},
}
"""By file and class (none: the module): names that ``tiered_kv/vllm`` reads, calls, replaces or writes."""

NOT_YET = {"0.30": {"kv_tp_replicas", "to_event_extra_keys"}}
"""What a version does not have yet: ``events.py`` and ``worker.py`` have defaults for it."""


def roots() -> dict[str, Path]:
    """Minor version -> the directory that holds its ``vllm`` package."""
    return {version: Path(str(path).removesuffix(str(BASE))) for version, path in sources().items()}


def names(source: str, owner: str) -> set[str]:
    """What a class, or the module, defines: functions, fields, and attributes that its methods assign."""
    tree: ast.AST = ast.parse(source)
    if owner:
        tree = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("version", roots())
@pytest.mark.parametrize(("place", "used"), USED.items(), ids=[f"{owner or path}" for path, owner in USED])
def test_names_that_no_interface_promises_are_there(version: str, place: tuple[str, str], used: set[str]) -> None:
    path, owner = place
    gone = used - names((roots()[version] / path).read_text(), owner) - NOT_YET.get(version, set())
    assert gone == set(), f"vLLM {version} renamed what we use: read {path}, then tiered_kv/vllm"


def test_a_renamed_name_is_noticed() -> None:
    source = "class Pool:\n    size: int\n    def __init__(self):\n        self.blocks = []\n    def touch(self): ...\n"
    assert names(source, "Pool") == {"size", "blocks", "touch", "__init__"}
    assert "touch" not in names(source.replace("touch", "hold"), "Pool")
    assert names("def free(): ...\n", "") == {"free"}
