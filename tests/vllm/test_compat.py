"""The table of what is used of vLLM: true of the vLLM that is installed, complete, and no row of it is idle.

Each row is taken away by itself, from a copy of vLLM's class or module in which that one name is another, as a version
to come may have it, and the check has to say so by name.
"""

import __future__

import ast
import copy
import functools
import importlib
import inspect
import logging
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from tiered_kv.errors import ConfigError
from tiered_kv.vllm import compat, plugin
from tiered_kv.vllm.compat import (
    BASE,
    DRAFTS,
    EVENTS,
    FIRST_VERSION,
    GROUP_FIELDS,
    HOOKS,
    IMPORTED,
    LEFT_TO_VLLM,
    NEWEST,
    OURS,
    PROVEN,
    SCALES,
    SPEC_FIELDS,
    STATES,
    USES,
    Use,
    check_class,
    check_vllm,
    differences,
    has_name,
    new_hooks,
    release,
    unknown_traits,
)
from tiered_kv.vllm.connector import TieredKVConnector

PACKAGE = Path(compat.__file__).parents[1]
INSTALLED = release(vllm.__version__)
THERE = [use for use in USES if use.since <= INSTALLED]
importlib.import_module(SCALES.place.partition(":")[0])  # compared only where something else has imported it


# -- copies of vLLM that differ in one name ----------------------------------------------------------------------------


class Renamed(ast.NodeTransformer):
    """A class in which names are others, where they are defined and wherever its methods use them of their instance."""

    def __init__(self, names: set[str]) -> None:
        self.names, self.seen = names, set[str]()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.name = self._of(node.name)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            node.attr = self._of(node.attr)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if isinstance(node.ctx, ast.Store):
            node.id = self._of(node.id)
        return node

    def _of(self, name: str) -> str:
        self.seen.add(name)
        return f"{name}2" if name in self.names else name


class OneMore(ast.NodeTransformer):
    """A class in which a method takes one argument more that nobody passes."""

    def __init__(self, name: str) -> None:
        self.names, self.seen = {name}, set[str]()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.seen.add(node.name)
        if node.name in self.names:
            node.args.args.insert(len(node.args.args) - len(node.args.defaults), ast.arg("one_more"))
        return node


def changed(owner: Any, transformer: Any) -> Any:
    """A class of vLLM, or a function of a module, made anew from its changed source."""
    tree = ast.fix_missing_locations(transformer.visit(ast.parse(source(owner))))
    missing = transformer.names - transformer.seen
    assert not missing, f"{owner} does not define these, name the class that does: {missing}"
    namespace = dict(vars(importlib.import_module(owner.__module__)))
    flags = __future__.annotations.compiler_flag if "annotations" in namespace else 0
    exec(compile(tree, "changed", "exec", flags, dont_inherit=True), namespace)  # vLLM's own source
    return namespace[owner.__name__]


@functools.cache
def source(owner: Any) -> str:
    """Python looks for a class by parsing its whole file, each time."""
    return textwrap.dedent(inspect.getsource(owner))


def finds(place: str, replaced: dict[str, Any | None]) -> Callable[[str], ModuleType]:
    """``import_module`` with names of one module replaced; None: gone."""
    wanted = place.partition(":")[0]

    def find(name: str) -> ModuleType:
        module = importlib.import_module(name)
        if name != wanted:
            return module
        other = ModuleType(name)
        vars(other).update({key: value for key, value in vars(module).items() if key not in {*replaced, "__getattr__"}})
        vars(other).update({key: value for key, value in replaced.items() if value is not None})
        return other

    return find


def without(place: str, names: set[str]) -> Callable[[str], ModuleType]:
    """A vLLM in which these names of a class or module are others."""
    module, _, path = place.partition(":")
    if not path:
        return finds(module, dict.fromkeys(names))
    return finds(module, {path: changed(getattr(importlib.import_module(module), path), Renamed(names))})


def names_of(found: list[compat.Difference]) -> set[str]:
    return {one.use.where for one in found}


# -- the vLLM that is installed ----------------------------------------------------------------------------------------


def test_nothing_differs_in_the_vllm_that_is_installed() -> None:
    assert [str(one) for one in differences(INSTALLED)] == []
    assert new_hooks() == [], "read it, then override it or say in LEFT_TO_VLLM why not"
    check_class(TieredKVConnector)


PLACES = sorted({use.place for use in THERE})


@pytest.mark.parametrize("place", PLACES)
def test_every_name_that_is_gone_is_noticed_and_named(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [use for use in THERE if use.place == place and use.name not in ("", "__init__")]
    if place == "vllm.envs":
        rows = [use for use in rows if use.name != "environment_variables"]
        for use in rows:
            monkeypatch.delitem(envs.environment_variables, use.name)
        found = differences(NEWEST, rows)
    else:
        found = differences(NEWEST, rows, without(place, {use.name for use in rows}))

    told = {one.use: str(one) for one in found}
    assert rows or place == f"{compat.V1}.base"
    for use in rows:  # and what took its place is named, too
        assert told[use].startswith(f"{use.where}: it is gone"), use
        assert ":" not in place or f"{use.name}2" in told[use], use


def name_of(use: Use) -> str:
    return f"{use.where}-{use.override.rpartition(':')[2]}"


CALLED = [
    use for use in THERE if (use.call is not None or use.override) and use.name != "requires_kv_delivery" and use.name
]


@pytest.mark.parametrize("use", CALLED, ids=name_of)
def test_each_signature_that_takes_more_is_noticed_and_named(use: Use) -> None:
    module, _, path = use.place.partition(":")
    namespace = importlib.import_module(module)
    if path:
        owner = getattr(namespace, path)
        find = finds(module, {path: changed(owner, OneMore(use.name))})
    elif isinstance(function := getattr(namespace, use.name), type):
        keywords = [part.strip().removesuffix("=") for part in (use.call or "").split(",") if part.endswith("=")]
        find = finds(module, {use.name: _without(function, keywords[-1])})
    else:
        find = finds(module, {use.name: changed(function, OneMore(use.name))})
    found = [one for one in differences(NEWEST, [use], find) if one.use == use]

    assert len(found) == 1
    assert "one_more" in str(found[0]) or "unexpected keyword" in str(found[0])


def _without(owner: type, keyword: str) -> Any:
    """What is called like a class that does not take one of its keywords."""
    signature = inspect.signature(owner)

    def made(*_: object, **__: object) -> None: ...

    made.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[one for name, one in signature.parameters.items() if name != keyword]
    )
    return made


def test_a_module_that_is_gone_is_named() -> None:
    def find(name: str) -> ModuleType:
        if name == "vllm.v1.core.block_pool":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return importlib.import_module(name)

    found = differences(NEWEST, find=find)
    found = [one for one in found if not one.use.without]
    assert {one.use.place for one in found} == {"vllm.v1.core.block_pool:BlockPool"}
    assert "No module named 'vllm.v1.core.block_pool'" in str(found[0])


def test_a_method_that_vllm_asks_for_and_we_have_not_is_named() -> None:
    base = compat.KVConnectorBase_V1
    asked = type(base)("KVConnectorBase_V1", (base,), {"warm_up": _abstract, "cool_down": lambda self: None})
    find = finds(BASE, {"KVConnectorBase_V1": asked})

    assert [str(one) for one in differences(INSTALLED, find=find)] == [
        f"{BASE.replace(':', '.')}.warm_up: vLLM asks for it: abstract method (self, request), tiered_kv has none"
    ]
    assert new_hooks(find) == ["cool_down", "warm_up"]


def _abstract(self: Any, request: Any) -> None: ...


_abstract.__isabstractmethod__ = True  # type: ignore[attr-defined]


def test_a_connector_that_python_could_not_make_is_refused_with_our_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TieredKVConnector, "__abstractmethods__", frozenset({"warm_up"}))
    monkeypatch.setattr(compat.KVConnectorBase_V1, "warm_up", _abstract, raising=False)
    monkeypatch.setattr(
        compat.KVConnectorBase_V1, "__abstractmethods__", compat.KVConnectorBase_V1.__abstractmethods__ | {"warm_up"}
    )
    with pytest.raises(ConfigError, match=r"KVConnectorBase_V1\.warm_up: vLLM asks for it"):
        TieredKVConnector(None, None, None)


# -- what comes of a difference ----------------------------------------------------------------------------------------


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Messages of the module's logger; vLLM's loggers do not pass them on to where caplog listens."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    compat.logger.addHandler(handler)
    compat._warn.cache_clear()
    yield messages
    compat.logger.removeHandler(handler)


@pytest.mark.parametrize("version", [f"0.{minor}.1+cpu" for _, minor in PROVEN])
def test_proven_versions_start_silently(logged: list[str], version: str) -> None:
    check_vllm((), version)
    assert not logged


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0rc1", "0.99.0", "1.0.0", "dev", "0.29.0"])
def test_other_versions_start_with_one_warning(logged: list[str], version: str) -> None:
    for _ in range(2):
        check_vllm({DRAFTS, STATES, EVENTS}, version)
    *lacks, message = logged
    assert len(lacks) <= 1 and all("sleep" in text for text in lacks), "what later versions have"
    assert message.startswith(f"vLLM {version} is untested with tiered_kv")
    assert f"proven={','.join(f'0.{minor}' for _, minor in PROVEN)}" in message


def test_the_installed_version_is_proven() -> None:
    assert INSTALLED in PROVEN and PROVEN[0] == FIRST_VERSION


def test_a_refusal_says_what_differs_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("vllm.v1.core.block_pool.BlockPool.touch")
    with pytest.raises(ConfigError) as refused:
        check_vllm((), "0.99.0")
    text = str(refused.value)
    assert "version=0.99.0 differences=1: vllm.v1.core.block_pool.BlockPool.touch: it is gone" in text
    assert "Install a version that is proven (0.30, 0.32)" in text


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("vllm.config.SpeculativeConfig.use_eagle_block_drop", DRAFTS),
        ("vllm.v1.core.kv_cache_utils.to_event_extra_keys", EVENTS),
    ],
)
def test_what_a_feature_needs_concerns_only_engines_that_have_it(
    monkeypatch: pytest.MonkeyPatch, name: str, feature: str
) -> None:
    monkeypatch.delattr(name)
    check_vllm({DRAFTS, STATES, EVENTS} - {feature})
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        check_vllm({feature})


def test_what_can_be_done_without_is_a_warning(logged: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("vllm.lora.worker_manager.WorkerLoRAManager._load_adapter")
    check_vllm()
    (message,) = logged
    assert (
        "does without: caching of requests with adapters (vllm.lora.worker_manager.WorkerLoRAManager._load" in message
    )


def test_a_class_that_is_gone_is_named_with_those_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("vllm.lora.worker_manager.WorkerLoRAManager")
    (found,) = [text for text in map(str, differences(INSTALLED)) if "WorkerLoRAManager" in text]
    assert "the module has no such class, there is LRUCacheWorkerLoRAManager" in found


def test_vllm_finds_the_connector_by_its_name() -> None:
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("TieredKVConnector") is TieredKVConnector


def test_what_a_version_has_not_yet_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("vllm.v1.core.kv_cache_utils.to_event_extra_keys")
    assert differences((0, 30)) == []
    assert names_of(differences((0, 31))) == {"vllm.v1.core.kv_cache_utils.to_event_extra_keys"}


def test_a_name_that_cannot_be_imported_leaves_the_connector_importable() -> None:
    assert isinstance(compat.__getattr__("KVConnectorStats"), type)
    before = dict(IMPORTED)
    try:
        IMPORTED["ClassOfLate"] = "vllm.module_of_late"
        IMPORTED["OtherOfLate"] = "vllm.v1.request"
        assert compat.ClassOfLate.__name__ == "ClassOfLate"
        assert compat.OtherOfLate.__mro__ == (compat.OtherOfLate, object)
    finally:
        IMPORTED.clear()
        IMPORTED.update(before)
        vars(compat).pop("ClassOfLate", None), vars(compat).pop("OtherOfLate", None)
    with pytest.raises(AttributeError, match="no attribute 'NoName'"):
        compat.__getattr__("NoName")


# -- specs -------------------------------------------------------------------------------------------------------------


def test_fields_of_the_specs_here_are_known() -> None:
    specs = importlib.import_module(compat.SPECS)
    known = {"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec", "MambaSpec"}
    known |= {"ChunkedLocalAttentionSpec", "CircularBufferSpec", "UniformTypeKVCacheSpecs"}
    for name in known:
        assert set(inspect.signature(getattr(specs, name)).parameters) <= SPEC_FIELDS, name
    assert set(inspect.signature(specs.KVCacheGroupSpec).parameters) <= GROUP_FIELDS


def test_a_field_nobody_has_read_counts_once_it_is_set() -> None:
    @dataclass
    class Spec:
        block_size: int
        sink_tokens: int = 0
        rows: int | None = None

    assert unknown_traits(Spec(16), SPEC_FIELDS) == []
    assert unknown_traits(Spec(16, sink_tokens=4), SPEC_FIELDS) == ["sink_tokens=4"]
    assert unknown_traits(Spec(16, 4, 2), SPEC_FIELDS) == ["sink_tokens=4", "rows=2"]
    assert unknown_traits(Spec(16, 4), {"block_size", "sink_tokens"}) == []


# -- the table is complete ---------------------------------------------------------------------------------------------

BY_DUCK: dict[str, str] = {
    "impl": "of an attention layer",
    "isa": "of an attention layer, on the CPU",
    "kv_cache_dtype": "of an attention layer",
    "routed_experts": "of an expert layer, from 0.33 on",
    "quant_method": "of an expert layer",
    "moe_quant_config": "of an expert layer's method",
    "dtype": "of a description of weights",
    "model_type": "of a HF config",
    "vocab_size": "of a HF config",
    "auto_map": "of a HF config",
    "name_or_path": "of a HF config",
    "tensorizer_config_dict": "of a LoRA request, before 0.32",
    "name": "of an enumeration's member",
    "value": "of an enumeration's member",
    "calculate_kv_scales": "gone before 0.30, refused should it come back",
    "get_attn_backend": "of layers that have a backend",
    "nnodes": "of configurations without nnodes_within_dp",
    "cp_kv_cache_interleave_size": "either of two names",
    "dcp_kv_cache_interleave_size": "either of two names",
    "tiered_kv_has_promise": "our own mark on a request",
    "to_dict": "of any setting's value",
    "model_dump": "of any setting's value",
}
"""Names that are asked for by ``getattr`` or ``hasattr`` and that no class of vLLM promises, with where they are."""


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((PACKAGE / "vllm").rglob("*.py")):
        yield path, ast.parse(path.read_text())


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Modules of vLLM, and the names taken out of them, that a source imports when it runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "vllm")
        yield from imports(node)


def has_row(module: str, name: str) -> bool:
    whole = {use.place for use in USES}
    return (
        (module, name) in {(use.place, use.name) for use in USES}
        or f"{module}:{name}" in whole
        or (not name and module in whole)
        or any(place.startswith(f"{module}.{name}") for place in whole)
    )


def test_every_import_of_vllm_has_a_row() -> None:
    found = {one for path, tree in sources() for one in imports(tree)} | {(of, name) for name, of in IMPORTED.items()}
    assert len(found) > 20
    assert {one for one in found if not has_row(*one)} == set()
    assert not has_row("vllm.v1.request", "NoRow") and not has_row("vllm.nowhere", "")


def test_what_type_checkers_see_is_what_is_imported() -> None:
    tree = ast.parse(Path(compat.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert dict(_taken(block)) == IMPORTED


def _taken(block: ast.If) -> Iterator[tuple[str, str]]:
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        yield from ((alias.name, node.module or "") for alias in node.names)


def private_names(tree: ast.AST) -> set[str]:
    """Names with an underscore that a source uses of an object and does not define itself."""
    own: set[str] = set()
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute):
            (own if isinstance(node.ctx, ast.Store) else used).add(node.attr)
    used |= set(asked_for(tree))
    return {name for name in used - own if name.startswith("_") and not name.endswith("__")}


def asked_for(tree: ast.AST) -> Iterator[str]:
    """Names that a source asks for as text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            yield from (str(one.value) for one in node.args[1:2] if isinstance(one, ast.Constant))


def test_no_private_name_of_vllm_is_used_elsewhere() -> None:
    used = {path.name: names for path, tree in sources() if (names := private_names(tree))}
    assert set(used) == {"compat.py"}
    assert used["compat.py"] >= {"_get_connector_metadata", "_enum"}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f(request): return request._all_token_ids", {"_all_token_ids"}),
        ("class C(Base):\n    def f(self): return self._settings", {"_settings"}),
        ("class C:\n    def __init__(self): self._settings = 1\n    def f(self): return self._settings", set()),
        ("def f(x): return getattr(x, '_w1', None)", {"_w1"}),
        ("def f(x): return x.__class__", set()),
    ],
)
def test_a_private_name_is_found(source: str, names: set[str]) -> None:
    assert private_names(ast.parse(source)) == names


def test_every_name_asked_for_as_text_has_a_row_or_a_reason() -> None:
    asked = {name for path, tree in sources() if path.name != "compat.py" for name in asked_for(tree)}
    rows = {use.name for use in USES}
    unknown = {name for name in asked - rows - set(BY_DUCK) if not name.startswith("__")}
    assert unknown == set(), "a rename would silently take the default"
    assert set(BY_DUCK) <= asked | set(asked_for(ast.parse(Path(compat.__file__).read_text()))), "a stale reason"


def test_the_table_has_no_row_twice_and_hooks_are_our_methods() -> None:
    keys = [(use.place, use.name, use.override) for use in USES]
    assert len(keys) == len(set(keys))
    ours = {name for name in vars(TieredKVConnector) if not name.startswith("_")}
    assert {use.name for use in HOOKS if use.override == OURS} - {"__init__"} == ours
    assert not set(LEFT_TO_VLLM) & ours


def test_names_are_found_wherever_a_class_has_them() -> None:
    class Base:
        field: int

    class One(Base):
        __slots__ = ("slot",)

        def __init__(self) -> None:
            self.slot = self.kept = 1  # type: ignore[attr-defined]

        @property
        def shown(self) -> int:
            return 1

    assert all(has_name(One, name) for name in ("field", "slot", "kept", "shown"))
    assert not has_name(One, "other") and has_name(copy, "deepcopy") and not has_name(copy, "deeper")
