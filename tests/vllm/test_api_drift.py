"""Our connector's methods against ``KVConnectorBase_V1`` of every vLLM in the window.

vLLM calls the connector by name and position; a method that a later version renames, extends or adds is found here,
before an engine finds it.
"""

import ast
import inspect

import pytest
from vllm.lora.worker_manager import WorkerLoRAManager

from tests.kit.vllm.connector_api import BASE, declared, recorded, sources
from tiered_kv.vllm.connector import TieredKVConnector
from tiered_kv.vllm.identity.loader_watch import watch_loaders, watched_loaders
from tiered_kv.vllm.supported import FIRST_VERSION, REFUSED_FROM

WINDOW = recorded()

LEFT_TO_VLLM = {
    "bind_connector_metadata": "keeps the step's metadata",
    "bind_kv_cache_manager": "calls bind_gpu_block_pool",
    "clear_connector_metadata": "forgets the step's metadata",
    "finish_forward": "copies follow an event of the model's stream, not the forward pass",
    "get_block_ids_with_load_errors": "failed loads are reported per request",
    "get_finished": "get_transfer_results replaces it",
    "get_finished_count": "every rank reports every load",
    "get_handshake_metadata": "workers tell our server what they are",
    "get_kv_connector_kv_cache_events": "events come from the scheduler's side",
    "get_loaded_kv_cache_group_ids": "all prefix-cacheable groups, which is what is loaded",
    "get_mem_pool_context": "the KV cache lies in vLLM's own memory",
    "get_required_kvcache_layout": "any block-contiguous layout is copied as it is",
    "handle_preemptions": "blocks that are being saved are pinned",
    "has_connector_metadata": "whether the step's metadata is there",
    "register_finished_partial_tail": "for states inside a block, which are not stored",
    "requires_piecewise_for_cudagraph": "nothing is done per layer",
    "reset_capture_state": "nothing is captured",
    "restore_kv_caches": "the tensors lie where they were before the sleep",
    "role": "as given at construction",
    "set_host_xfer_buffer_ops": "for accelerators whose host copies vLLM makes",
    "set_xfer_handshake_metadata": "no handshake through vLLM",
    "set_xfer_handshake_metadata_pp_aware": "no handshake through vLLM",
    "supports_divergent_local_hybrid_hits": "hits are the same for all groups",
    "supports_sleep_mode": "it is supported",
}
"""Methods of vLLM that we do not override, each with what its default does for us. A new one has to be put here or
overridden, after its code was read."""


def ours() -> dict[str, str]:
    """Our public methods, described like vLLM's."""
    found = {}
    for name, member in vars(TieredKVConnector).items():
        if name.startswith("_"):
            continue
        kind = type(member).__name__ if isinstance(member, classmethod | staticmethod | property) else "method"
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        parameters = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
        found[name] = f"{kind} {inspect.Signature(parameters)}"
    return found


def accepts(ours: str, theirs: str) -> bool:
    """Whether a call that fits vLLM's declaration fits ours: same kind, same names in the same order, more optional."""
    (kind, mine), (their_kind, wanted) = (_parts(text) for text in (ours, theirs))
    if kind != their_kind or bool(wanted.kwarg) > bool(mine.kwarg) or bool(wanted.vararg) > bool(mine.vararg):
        return False
    names, wanted_names = ([a.arg for a in arguments.posonlyargs + arguments.args] for arguments in (mine, wanted))
    required, wanted_required = (
        len(arguments.posonlyargs + arguments.args) - len(arguments.defaults) for arguments in (mine, wanted)
    )
    keyword_only = {a.arg for a, default in zip(mine.kwonlyargs, mine.kw_defaults, strict=True) if default is None}
    return names[: len(wanted_names)] == wanted_names and required <= wanted_required and not keyword_only


def _parts(text: str) -> tuple[str, ast.arguments]:
    kind, _, parameters = text.removeprefix("abstract ").partition(" ")
    function = ast.parse(f"def f{parameters}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return kind, function.args


WATCHED = {
    "vllm/model_executor/model_loader/default_loader.py": "DefaultModelLoader._prepare_weights",
    "vllm/model_executor/model_loader/sharded_state_loader.py": "ShardedStateLoader._prepare_weights",
    "vllm/lora/worker_manager.py": "WorkerLoRAManager._load_adapter",
}
"""What ``loads.py`` wraps. Where one is missing, weights need ``model_id`` and adapters are not cached."""


@pytest.mark.parametrize("file", WATCHED)
def test_what_is_watched_is_there_in_the_versions_here(file):
    owner, method = WATCHED[file].split(".")
    for version, base in sources().items():
        if version not in WINDOW:
            continue
        tree = ast.parse((base.parents[len(BASE.parents) - 2].parent / file).read_text())
        (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
        names = [node.name for node in found.body if isinstance(node, ast.FunctionDef)]
        assert method in names, f"vLLM {version} reads its files elsewhere: tiered_kv/vllm/identity/loader_watch.py"


def test_every_loader_of_vllm_that_names_its_files_is_wrapped():
    watch_loaders()
    for loader in watched_loaders():
        assert hasattr(loader._prepare_weights, "_tiered_kv_watched")
    assert hasattr(WorkerLoRAManager._load_adapter, "_tiered_kv_watched")


def test_every_version_of_the_window_is_recorded():
    minors = range(FIRST_VERSION[1], REFUSED_FROM[1])
    assert list(WINDOW) == [f"{FIRST_VERSION[0]}.{minor}" for minor in minors]


def test_the_record_says_what_the_versions_here_declare():
    there = {version: path for version, path in sources().items() if version in WINDOW}
    assert there, "not even the installed vLLM is in the window"
    for version, path in there.items():
        assert declared(path) == WINDOW[version], f"record {version} anew: tests/kit/vllm/connector_api.py"


@pytest.mark.parametrize("version", WINDOW)
def test_our_methods_take_what_vllm_passes(version):
    unfit = {
        name: (mine, theirs)
        for name, mine in ours().items()
        if (theirs := WINDOW[version].get(name)) is not None and not accepts(mine, theirs)
    }
    assert not unfit


@pytest.mark.parametrize("version", WINDOW)
def test_every_method_of_vllm_is_overridden_or_left_to_it_on_purpose(version):
    theirs = set(WINDOW[version])
    assert theirs - set(ours()) - set(LEFT_TO_VLLM) == set(), "new in vLLM: read it, then override it or say why not"
    abstract = {name for name, text in WINDOW[version].items() if text.startswith("abstract ")}
    assert abstract <= set(ours())


def test_no_method_of_ours_is_unknown_to_all_versions_and_no_excuse_is_stale():
    known = set().union(*WINDOW.values())
    assert set(ours()) <= known, "nothing calls it"
    assert set(LEFT_TO_VLLM) <= known
    assert not set(LEFT_TO_VLLM) & set(ours())


@pytest.mark.parametrize(
    ("mine", "theirs", "fits"),
    [
        ("method (self, request)", "abstract method (self, request)", True),
        ("method (self, request, more=None)", "method (self, request)", True),
        ("method (self, context, **kwargs)", "method (self, context, **kwargs)", True),
        ("method (self, request)", "method (self, request, tokens)", False),
        ("method (self, tokens)", "method (self, request)", False),
        ("method (self, request, more)", "method (self, request)", False),
        ("method (self, request)", "method (self, request=None)", False),
        ("method (self, context)", "method (self, context, **kwargs)", False),
        ("method (self)", "property (self)", False),
        ("method (self, *, more)", "method (self)", False),
    ],
)
def test_comparison_tells_what_a_call_would_notice(mine, theirs, fits):
    assert accepts(mine, theirs) is fits
