"""The table of vLLM's settings against every version of the window, and each row against a real configuration."""

import copy
import dataclasses
import enum
import functools
import json
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm import envs
from vllm.config import DiffusionConfig, ECTransferConfig, MultiModalConfig

from tests.kit.vllm import connector_api
from tests.kit.vllm.engine_identities import Settings, changed, engine_config, kv_config
from tests.kit.vllm.settings import ENVIRONMENT as VARIABLES
from tests.kit.vllm.settings import declared, packages, recorded
from tiered_kv.errors import ConfigError
from tiered_kv.keys.namespace import MAX_RECORD_BYTES
from tiered_kv.vllm.identity import config_values as settings
from tiered_kv.vllm.identity.canonical import plain
from tiered_kv.vllm.identity.config_fields import ENVIRONMENT, OFF, OFF_UNLESS_SET, TABLE
from tiered_kv.vllm.identity.config_values import kind_of, kv_settings, rows
from tiered_kv.vllm.identity.record import base_fields

WINDOW = recorded()
GOLDEN = Path(__file__).parents[1] / "golden" / "settings_that_enter.json"
ENTERING = [
    (path, name, kind)
    for path, section in TABLE.items()
    for name, kind in rows(section)
    if kind in ("enters", "file", "secret")
]
CLASSES = {section.of: path for path, section in TABLE.items()}

NOT_STARTED_WITH = {
    "ModelArchitectureConfig", "SpeechToTextConfig", "SpeechToTextParams", "Range", "BaseDummyOptions",
    "VideoDummyOptions", "ImageDummyOptions", "AudioDummyOptions", "QuantSpec", "QuantizationConfigArgs",
    "PoolerConfig", "HiSparseConfig",
}  # fmt: skip
"""Classes of vLLM's that are values of a field which has a row, or no part of a configuration at all."""


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory):
    """Of an engine with every optional part that enters."""
    config = engine_config(tmp_path_factory.mktemp("model"))
    parts = {"diffusion_config": DiffusionConfig(canvas_length=8), "ec_transfer_config": ECTransferConfig()}
    return changed(config, model_config={"multimodal_config": MultiModalConfig()}, **parts)


def flipped(vllm_config, path, name, value):
    """The configuration with this field of this part set to ``value``."""
    *outer, last = (path or ".").split(".")
    if path == "":
        return changed(vllm_config, **{name: SimpleNamespace(**value) if isinstance(value, dict) else value})
    if not outer:
        return changed(vllm_config, **{last: {name: value}})
    part = copy.copy(getattr(getattr(vllm_config, outer[0]), last))
    object.__setattr__(part, name, value)
    return changed(vllm_config, **{outer[0]: {last: part}})


def fields(vllm_config):
    return base_fields(vllm_config, kv_config(), Settings())


# -- the table and the versions ----------------------------------------------------------------------------------------


def test_every_version_of_the_window_is_recorded():
    assert list(WINDOW) == list(connector_api.recorded())


def test_the_record_says_what_the_versions_here_declare():
    there = {version: path for version, path in packages().items() if version in WINDOW}
    assert there, "not even the installed vLLM is in the window"
    for version, path in there.items():
        assert declared(path) == WINDOW[version], f"record {version} anew: tests/kit/vllm/settings.py"


@pytest.mark.parametrize("version", WINDOW)
def test_every_setting_of_every_version_has_a_row(version):
    unknown = [
        f"{name}.{field}"
        for name, declared_fields in WINDOW[version].items()
        if name not in NOT_STARTED_WITH
        for field in declared_fields
        if name not in CLASSES or kind_of(CLASSES[name], field) == "unknown"
    ]
    assert unknown == [], (
        "new in vLLM: read what it does, then give it a row in tiered_kv/vllm/identity/config_fields.py"
    )


def test_no_row_names_a_setting_that_no_version_has():
    known = {
        name: set().union(*(version.get(name, []) for version in WINDOW.values()))
        for name in set().union(*WINDOW.values())
    }
    stale = [
        f"{path}.{field}"
        for path, section in TABLE.items()
        for field, _ in rows(section)
        if field not in known.get(section.of, ())
    ]
    assert stale == []
    assert {*OFF} <= {f"{path}.{name}" for path, name, _ in ENTERING}
    assert {*OFF_UNLESS_SET.split()} <= {name for path, name, _ in ENTERING if path == ENVIRONMENT}


def test_no_setting_has_two_rows_and_every_part_has_a_section():
    for path, section in TABLE.items():
        twice = [name for name, count in Counter(name for name, _ in rows(section)).items() if count > 1]
        assert twice == [], path
        below = {f"{path}.{name}".removeprefix(".") for name, kind in rows(section) if kind == "part"}
        assert below <= TABLE.keys()


def test_what_versions_lack_and_what_is_off_there_is_left_out_where_versions_share():
    """Every row that enters and that some version lacks says what its absence is worth, or versions never share."""
    partial = {
        f"{path}.{name}"
        for path, name, _ in ENTERING
        if not all(name in version.get(TABLE[path].of, ()) for version in WINDOW.values())
    }
    said = {*OFF} | {f"{ENVIRONMENT}.{name}" for name in OFF_UNLESS_SET.split()}
    assert partial == said


def installed(config, path=""):
    """Every field of the installed vLLM's configuration, through its parts."""
    for name in (field.name for field in dataclasses.fields(config)):
        below = f"{path}.{name}".removeprefix(".")
        yield path, name
        if kind_of(path, name) == "part" and (part := getattr(config, name)) is not None:
            yield from installed(part, below)


def test_every_field_of_a_real_configuration_has_a_row(tmp_path):
    config = engine_config(tmp_path)
    real = vars(config) and [*installed(rebuilt(config))]
    assert len(real) > 300, "the configuration was not walked through"
    assert [(path, name) for path, name in real if kind_of(path, name) == "unknown"] == []
    assert {*envs.environment_variables} == set(WINDOW[".".join(installed_version())][VARIABLES])


def rebuilt(config):
    """The real ``VllmConfig`` class over the same parts: ``engine_config`` gives a plain copy of it."""
    from vllm.config import VllmConfig

    real = object.__new__(VllmConfig)
    for name, value in vars(config).items():
        if name in VllmConfig.__dataclass_fields__:
            object.__setattr__(real, name, value)
    return real


def installed_version():
    import vllm

    return vllm.__version__.split(".")[:2]


# -- each row ----------------------------------------------------------------------------------------------------------


def test_the_rows_that_enter_are_these():
    """A row that is removed is unknown and enters all the same, and one may be excused by mistake: both fail here."""
    assert sorted(f"{path}.{name}".removeprefix(".") for path, name, _ in ENTERING) == json.loads(GOLDEN.read_text())


@pytest.fixture(scope="module")
def first(vllm_config):
    return fields(vllm_config)


@pytest.mark.parametrize(("path", "name", "kind"), ENTERING, ids=lambda text: text or "vllm_config")
def test_each_row_that_enters_makes_another_namespace(vllm_config, first, monkeypatch, tmp_path, path, name, kind):
    value = "another"
    if kind == "file":
        (tmp_path / "scales.json").write_text("{}")
        value = str(tmp_path / "scales.json")
    if path == ENVIRONMENT:
        monkeypatch.setitem(envs.environment_variables, name, lambda: value)
        monkeypatch.setenv(name, value)
        other = fields(vllm_config)
    else:
        other = fields(flipped(vllm_config, path, name, {"a": 1} if kind == "secret" and path == "" else value))
    assert {key for key in first if first[key] != other[key]} == {"settings"}
    part = path or "vllm_config"
    differing = {
        (at, field)
        for at in first["settings"]
        if isinstance(first["settings"][at], dict)
        for field in first["settings"][at].keys() | other["settings"][at].keys()
        if first["settings"][at].get(field) != other["settings"][at].get(field)
    }
    assert differing == {(part, name)}


RECURRENT = [(path, name) for path, section in TABLE.items() for name, kind in rows(section) if kind == "recurrent"]


@pytest.mark.parametrize(("path", "name"), RECURRENT)
def test_what_recurrent_layers_read_enters_where_there_are_some(vllm_config, monkeypatch, path, name):
    def settings_of(has_states: bool) -> tuple[object, object]:
        before = kv_settings(vllm_config, has_states=has_states)
        with monkeypatch.context() as patch:
            config = vllm_config
            if path == ENVIRONMENT:
                patch.setitem(envs.environment_variables, name, lambda: "another")
            else:
                config = flipped(vllm_config, path, name, "another")
            return before, kv_settings(config, has_states=has_states)

    before, after = settings_of(True)
    assert before[path].get(name) != after[path][name] == "another"
    before, after = settings_of(False)
    assert before == after


EXCUSED = [
    (path, name)
    for path, section in TABLE.items()
    if path not in (ENVIRONMENT, "")
    for names in section.cannot.values()
    for name in names.split()
]


def test_no_row_that_is_excused_changes_anything(vllm_config, first):
    at = {path for path, _ in EXCUSED if _there(vllm_config, path)}
    assert len(at) > 20
    for path, name in EXCUSED:
        if path in at and name != "static_forward_context":
            assert fields(flipped(vllm_config, path, name, "another")) == first, (path, name)


def _there(config, path):
    for name in path.split("."):
        config = getattr(config, name, None)
    return config is not None


def test_no_variable_that_is_excused_changes_anything(vllm_config, first, monkeypatch):
    for names in TABLE[ENVIRONMENT].cannot.values():
        for name in names.split():
            monkeypatch.setitem(envs.environment_variables, name, lambda: "another")
    assert fields(vllm_config) == first


# -- what the table does not know --------------------------------------------------------------------------------------


@pytest.fixture
def logged():
    """Messages of the module's logger; vLLM's loggers do not pass them on to where caplog listens."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    settings.logger.addHandler(handler)
    settings._say_unknown.cache_clear()
    yield messages
    settings.logger.removeHandler(handler)


PARTS = [path for path in TABLE if path not in (ENVIRONMENT, "")]


@pytest.mark.parametrize("path", PARTS)
def test_a_field_that_a_new_vllm_brings_to_any_part_enters(vllm_config, first, path):
    if not _there(vllm_config, path):
        whole = SimpleNamespace(brand_new=1)
        one, other = (flipped(vllm_config, *_split(path), part) for part in (whole, SimpleNamespace(brand_new=2)))
        assert fields(one)["settings"] != fields(other)["settings"]
        return
    one, other, same = (fields(flipped(vllm_config, path, "brand_new", value)) for value in (1, 2, 1))
    assert len({json.dumps(made, sort_keys=True) for made in (first, one, other)}) == 3
    assert one == same


def _split(path):
    outer, _, name = path.rpartition(".")
    return outer, name


def test_a_part_that_a_new_vllm_brings_enters(vllm_config, first):
    @dataclasses.dataclass
    class NewConfig:
        precision: str = "half"

    one, other = (fields(changed(vllm_config, new_config=NewConfig(text))) for text in ("half", "full"))
    assert len({json.dumps(made, sort_keys=True) for made in (first, one, other)}) == 3


def test_a_field_of_a_real_new_class_enters_and_is_said_once_by_name_and_not_by_value(vllm_config, first, logged):
    @dataclasses.dataclass
    class CacheConfigOfANewVersion(type(vllm_config.cache_config)):
        kv_rotation: str = "secret-hadamard"

    newer = object.__new__(CacheConfigOfANewVersion)
    for name, value in vars(vllm_config.cache_config).items():
        object.__setattr__(newer, name, value)
    object.__setattr__(newer, "kv_rotation", "secret-hadamard")
    made = [fields(changed(vllm_config, cache_config=newer)) for _ in range(3)]
    assert made[0] != first
    assert made[0] == made[1] == made[2]
    assert len(logged) == 1
    assert "settings=cache_config.kv_rotation" in logged[0]
    assert "hadamard" not in logged[0] + json.dumps(made)


def test_a_new_variable_enters(vllm_config, first, monkeypatch, logged):
    monkeypatch.setitem(envs.environment_variables, "VLLM_NEW_KERNEL", lambda: "fast")
    assert fields(vllm_config) != first
    assert "settings=environment.VLLM_NEW_KERNEL" in logged[0]


def test_what_is_known_is_said_nowhere(vllm_config, logged):
    kv_settings(vllm_config)
    assert logged == []


# -- values ------------------------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = object()


@dataclasses.dataclass
class Held:
    dtype: torch.dtype
    scale: float


class Plain:
    def __init__(self):
        self.limit = 1.5


class Talkative:
    def __repr__(self):
        return f"<Talkative at {hex(id(self))}>"


def endless():
    held = {}
    held["self"] = held
    return held


HERE = __name__
MADE = {
    "float": (lambda: 0.1, "0.1"),
    "infinity": (lambda: float("-inf"), "-inf"),
    "path": (lambda: Path("/models/x"), "/models/x"),
    "dtype": (lambda: torch.float8_e4m3fn, "float8_e4m3fn"),
    "enum": (lambda: Colour.RED, "RED"),
    "set": (lambda: {3, 1, 2}, [1, 2, 3]),
    "counter": (lambda: Counter("aab"), {"a": 2, "b": 1}),
    "tuple": (lambda: (1, (2.5, None)), [1, ["2.5", None]]),
    "class": (lambda: Plain, f"{HERE}.Plain"),
    "function": (lambda: endless, f"{HERE}.endless"),
    "bytes": (lambda: b"x", "sha256:2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"),
    "dataclass": (
        lambda: Held(torch.float16, 2.0),
        {"class": f"{HERE}.Held", "fields": {"dtype": "float16", "scale": "2.0"}},
    ),
    "plain object": (Plain, {"class": f"{HERE}.Plain", "fields": {"limit": "1.5"}}),
    "object that says where it is": (Talkative, "<Talkative>"),
}


@pytest.mark.parametrize("name", MADE)
def test_any_value_has_one_form(name):
    make, written = MADE[name]
    assert plain(make()) == written
    assert json.loads(json.dumps(plain(make()))) == written


@pytest.mark.parametrize(
    "make", [endless, lambda: functools.partial(plain, 1), object, lambda: lambda: 1], ids=["loop", "partial", "?", "f"]
)
def test_odd_values_are_equal_after_a_restart(make):
    one, other = json.dumps(plain(make())), json.dumps(plain(make()))
    assert one == other
    assert " at 0x" not in one


def test_partial_functions_of_other_arguments_differ():
    assert plain(functools.partial(plain, 1)) != plain(functools.partial(plain, 2))


def test_objects_with_slots_differ_by_what_is_in_them():
    class Slotted:
        __slots__ = ("a", "unset")

        def __init__(self, a):
            self.a = a

    assert plain(Slotted(1)) == plain(Slotted(1)) != plain(Slotted(2))


def test_a_value_whose_own_code_fails_ends_the_cache_and_not_the_engine(vllm_config):
    class Broken:
        def to_dict(self, needed):
            raise AssertionError

    with pytest.raises(ConfigError, match="cannot be read.*Broken"):
        kv_settings(changed(vllm_config, cache_config={"new_field": Broken()}))


def test_a_value_of_any_length_leaves_room_in_the_record(vllm_config):
    made = [
        json.dumps(fields(flipped(vllm_config, "model_config.multimodal_config", "mm_processor_kwargs", {"a": text})))
        for text in ("x" * MAX_RECORD_BYTES, "y" * MAX_RECORD_BYTES)
    ]
    assert made[0] != made[1]
    assert len(made[0]) < 20_000


def test_a_file_enters_by_its_content(vllm_config, tmp_path):
    def made(folder, text):
        (tmp_path / folder).mkdir(exist_ok=True)
        path = tmp_path / folder / "scales.json"
        path.write_text(text)
        return fields(flipped(vllm_config, "model_config.multimodal_config", "mm_encoder_fp8_scale_path", str(path)))

    assert made("a", "1") == made("b", "1") != made("a", "2")
    with pytest.raises(ConfigError, match="mm_encoder_fp8_scale_path names cannot be read"):
        fields(flipped(vllm_config, "model_config.multimodal_config", "mm_encoder_fp8_scale_path", "/nowhere"))


def test_options_of_quantisation_in_a_file_that_an_override_names_count_by_content(tmp_path):
    """vLLM quantises by what lies there, and the model's configuration has its path alone."""

    def made(folder, text):
        options = tmp_path / folder / "torchao_config.json"
        options.parent.mkdir(exist_ok=True)
        options.write_text(text)
        config = engine_config(tmp_path / "model", hf_overrides={"quantization_config_file": str(options)})
        return config, fields(config)

    config, one = made("a", "int8")
    assert made("b", "int8")[1] == one != made("a", "int4")[1]
    (tmp_path / "a" / "torchao_config.json").unlink()
    with pytest.raises(ConfigError, match="quantization_config_file names cannot be read"):
        fields(config)


def test_what_may_be_secret_is_not_written(vllm_config):
    config = changed(vllm_config)
    config.additional_config = {"token": "hunter2"}
    made = fields(config)
    assert made["settings"]["vllm_config"]["additional_config"].startswith("sha256:")
    assert "hunter2" not in json.dumps(made)
