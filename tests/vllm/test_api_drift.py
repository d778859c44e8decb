"""Our connector's methods against ``KVConnectorBase_V1`` of every vLLM in the window.

vLLM calls the connector by name and position; a method that a later version renames, extends or adds is found here,
before an engine finds it.
"""

import ast
import re

import pytest
from vllm.lora.worker_manager import WorkerLoRAManager

from tests.kit.vllm.connector_api import BASE, declared, recorded, sources
from tiered_kv.vllm.compat import FIRST_VERSION, LEFT_TO_VLLM, LOADERS, PROVEN, accepts, described
from tiered_kv.vllm.connector import TieredKVConnector
from tiered_kv.vllm.identity.loader_watch import ADAPTER_FILES, watch_loaders, watched_loaders

WINDOW = recorded()


def ours() -> dict[str, str]:
    """Our public methods, described like vLLM's."""
    return {name: described(TieredKVConnector, name) for name in vars(TieredKVConnector) if not name.startswith("_")}


@pytest.mark.parametrize("use", LOADERS, ids=lambda use: use.where)
def test_what_is_watched_is_there_in_the_versions_here(use):
    module, _, owner = use.place.partition(":")
    for version, base in sources().items():
        if version not in WINDOW:
            continue
        tree = ast.parse((base.parents[len(BASE.parents) - 2].parent / f"{module.replace('.', '/')}.py").read_text())
        (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
        names = [node.name for node in found.body if isinstance(node, ast.FunctionDef)]
        assert use.name in names, f"vLLM {version} reads its files elsewhere: tiered_kv/vllm/identity/loader_watch.py"


def test_an_adapter_s_files_are_those_that_vllm_reads():
    for version, base in sources().items():
        lora = base.parents[len(BASE.parents) - 2].parent / "vllm/lora"
        text = "".join((lora / name).read_text() for name in ("lora_model.py", "peft_helper.py"))
        read = set(re.findall(r'join\(lora_(?:dir|path), "([^"]+)"\)', text))
        assert read == set(ADAPTER_FILES), f"vLLM {version} reads others: tiered_kv/vllm/identity/loader_watch.py"


def test_every_loader_of_vllm_that_names_its_files_is_wrapped():
    watch_loaders()
    default, sharded = watched_loaders()
    assert hasattr(default._prepare_weights, "_tiered_kv_watched")
    assert hasattr(sharded.load_weights, "_tiered_kv_watched")
    assert hasattr(WorkerLoRAManager._load_adapter, "_tiered_kv_watched")


def test_the_record_has_every_version_from_the_first_on_and_the_proven_ones():
    assert list(WINDOW) == [f"{FIRST_VERSION[0]}.{FIRST_VERSION[1] + place}" for place in range(len(WINDOW))]
    assert {f"{major}.{minor}" for major, minor in PROVEN} <= set(WINDOW)


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
        ("method (self)", "method (self, *, more)", False),
        ("method (self, **kwargs)", "method (self, *, more)", True),
    ],
)
def test_comparison_tells_what_a_call_would_notice(mine, theirs, fits):
    assert accepts(mine, theirs) is fits
