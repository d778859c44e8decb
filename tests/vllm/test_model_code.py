"""A model's code that is not vLLM's own: classes that plugins and scripts register, and the transformers package."""

import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
from vllm import ModelRegistry
from vllm.model_executor import custom_op
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.llama import LlamaForCausalLM

from tests.kit.vllm.engine_identities import LAYER, Settings, attention_layer, engine_config, kv_config, with_layers
from tiered_kv.errors import ConfigError
from tiered_kv.vllm.identity import model_code as of_code
from tiered_kv.vllm.identity import record
from tiered_kv.vllm.identity.model_code import TRANSFORMERS_BACKEND, model_code
from tiered_kv.vllm.identity.record import base_fields

ARCHITECTURE = "LlamaForCausalLM"
PLUGIN = "a_plugin_of_models"
SOURCE = """
from vllm.model_executor.models.llama import LlamaForCausalLM


class Own(LlamaForCausalLM):
    FACTOR = {factor}
"""


@pytest.fixture
def vllm_config(tmp_path):
    return engine_config(tmp_path / "model")


@pytest.fixture
def registered(tmp_path, monkeypatch):
    """Installs a plugin whose class is registered in the place of vLLM's, as its newest version has it."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setitem(ModelRegistry.models, ARCHITECTURE, ModelRegistry.models[ARCHITECTURE])

    def register(factor, helper=""):
        package = tmp_path / "site" / PLUGIN
        (package / "models").mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text("")
        (package / "models" / "__init__.py").write_text("")
        (package / "helper.py").write_text(helper)
        (package / "models" / "own.py").write_text(SOURCE.format(factor=factor))
        for name in [name for name in sys.modules if name.partition(".")[0] == PLUGIN]:
            monkeypatch.delitem(sys.modules, name)
        module = __import__(f"{PLUGIN}.models.own", fromlist=["Own"])
        ModelRegistry.register_model(ARCHITECTURE, module.Own)

    return register


def fields(vllm_config, **settings):
    return base_fields(vllm_config, kv_config(), Settings(**settings))


def test_a_plugins_class_in_the_place_of_vllms_makes_another_namespace_and_so_does_its_next_version(
    vllm_config, registered
):
    plain = fields(vllm_config)
    told = []
    for factor, helper in ((2, ""), (3, ""), (2, "HALF = 0.5"), (2, "")):
        registered(factor, helper)
        told.append(fields(vllm_config)["model_code"])

    assert "model_code" not in plain, "vLLM's own code is named by its version"
    assert all(code["classes"] == [f"{PLUGIN}.models.own.Own"] for code in told)
    assert told[0] == told[3] != told[1] != told[2] != told[0]
    registered(2)
    assert {name for name, value in fields(vllm_config).items() if plain.get(name) != value} == {"model_code"}


def test_what_lies_in_a_plugins_package_and_cannot_be_imported_is_none_of_its_code(vllm_config, registered, tmp_path):
    """Emacs marks a file that is being edited by a link to nowhere; the engine ran without the cache for it."""
    registered(2)
    plain = model_code(vllm_config)
    models = tmp_path / "site" / PLUGIN / "models"
    (models / ".#own.py").symlink_to("somebody@host.1234:1700000000")
    (models / "cases.py").mkdir()
    assert model_code(vllm_config) == plain
    (models / "cases.py" / "one.py").write_text("1")
    assert model_code(vllm_config) != plain


def test_of_two_folders_of_a_namespace_package_the_file_counts_that_is_imported(
    vllm_config, registered, tmp_path, monkeypatch
):
    registered(2)
    behind = tmp_path / "older"
    (behind / "models").mkdir(parents=True)
    own, older = tmp_path / "site" / PLUGIN / "models" / "own.py", behind / "models" / "own.py"
    older.write_text(SOURCE.format(factor=1))
    monkeypatch.setattr(sys.modules[PLUGIN], "__path__", [str(tmp_path / "site" / PLUGIN), str(behind)])
    one = model_code(vllm_config)
    own.write_text(SOURCE.format(factor=3))
    assert model_code(vllm_config) != one


def test_a_class_of_a_script_counts_by_the_scripts_file(vllm_config, tmp_path, monkeypatch):
    monkeypatch.setitem(ModelRegistry.models, ARCHITECTURE, ModelRegistry.models[ARCHITECTURE])
    ModelRegistry.register_model(ARCHITECTURE, type("Own", (LlamaForCausalLM,), {"__module__": "__main__"}))
    script = tmp_path / "serve.py"
    script.write_text("1")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)  # xdist runs no file
    one = model_code(vllm_config)
    script.write_text("2")
    assert model_code(vllm_config) != one

    monkeypatch.delattr(sys.modules["__main__"], "__file__")  # typed in
    with pytest.raises(ConfigError, match="in no file.*classes=__main__.Own"):
        model_code(vllm_config)


@pytest.mark.parametrize("part", ["layer", "backend", "impl", "quant_method", "quant_config"])
def test_a_plugins_backend_layer_or_quantisation_counts_too(vllm_config, registered, part):
    plain = fields(vllm_config)
    registered(1)  # the package, which the part is of
    ours = attention_layer("CPU_ATTN")
    own = {"__module__": f"{PLUGIN}.models.own", "get_attn_backend": lambda _: ours.get_attn_backend()}
    foreign = type("Part", (), own)
    backend = type("Part", (foreign,), own | {"get_name": lambda: "CPU_ATTN"})
    layers = {"layer": foreign(), "backend": SimpleNamespace(get_attn_backend=lambda: backend)}
    layer = layers[part] if part in layers else attention_layer("CPU_ATTN", **{part: foreign()})
    ModelRegistry.register_model(ARCHITECTURE, LlamaForCausalLM)
    config = with_layers(vllm_config, {LAYER: layer})
    config.quant_config = foreign() if part == "quant_config" else None

    found = fields(config)
    assert {name for name, value in found.items() if plain.get(name) != value} == {"model_code"}
    assert found["model_code"]["code"].keys() == {PLUGIN}


def test_an_operation_that_a_plugin_registers_in_the_place_of_vllms_counts_by_its_code(
    vllm_config, registered, monkeypatch
):
    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    plain = fields(vllm_config)
    told = []
    for factor in (2, 3, 2):
        registered(factor)
        ModelRegistry.register_model(ARCHITECTURE, LlamaForCausalLM)
        custom_op.op_registry_oot.clear()
        norm = type("Norm", (RMSNorm,), {"__module__": f"{PLUGIN}.models.own"})
        RMSNorm.register_oot(norm, name="RMSNorm")
        told.append(fields(vllm_config))

    assert "model_code" not in plain
    assert [name for name in told[0] if told[0][name] != plain.get(name)] == ["model_code"]
    assert told[0]["model_code"]["classes"] == [f"{PLUGIN}.models.own.Norm"]
    assert told[0] == told[2] != told[1]


def test_of_a_file_that_two_folders_of_a_namespace_have_the_first_counts(tmp_path, monkeypatch):
    folders = [tmp_path / place / "a_namespace" for place in ("patched", "installed")]
    for folder in reversed(folders):
        folder.mkdir(parents=True)
        monkeypatch.syspath_prepend(folder.parent)
    module = import_module("a_namespace")
    monkeypatch.setitem(sys.modules, "a_namespace", module)  # and no longer than the test
    assert next(iter(module.__path__)) == str(folders[0])

    def told(folder, text):
        (folder / "own.py").write_text(text)
        return of_code._package("a_namespace")

    told(folders[1], "HALF = 0.5")
    before = told(folders[0], "HALF = 0.5")
    assert told(folders[1], "HALF = 0.6") == before, "nobody imports this one"
    assert told(folders[0], "HALF = 0.7") != before


def test_layers_that_transformers_computes_are_named_by_its_minor_version(vllm_config, monkeypatch):
    lazily = ModelRegistry.models["TransformersForCausalLM"]
    assert lazily.module_name.startswith(TRANSFORMERS_BACKEND), "vLLM has it elsewhere"
    ours = fields(vllm_config)
    theirs = type("TransformersForCausalLM", (LlamaForCausalLM,), {"__module__": f"{TRANSFORMERS_BACKEND}.causal"})
    monkeypatch.setattr(of_code, "model_class", lambda _: theirs)
    monkeypatch.setattr(record, "transformers_version", lambda: "5.19.1")

    assert "transformers_version" not in ours
    assert fields(vllm_config) == ours | {"transformers_version": "5.19"}
    assert fields(vllm_config, share_vllm_versions=True) == ours | {"vllm_version": None}
