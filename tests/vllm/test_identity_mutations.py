"""Leave out any one thing that the identity of KV is made of, and some check of identity fails.

What there is to leave out is read from the code: the fields of the namespace that engines really make, the fields of a
page, the fields of the extras of a request. So a field that is new and that no check needs fails here. What the checks
are, ``engine_identities`` says; ``test_identity_record.py`` and ``test_request_extras.py`` run them on the code as it
is.
"""

import dataclasses
from pathlib import Path
from typing import get_args

import pytest

from tests.kit.mutants import first_failure, mutants, recompiled
from tests.kit.vllm.engine_identities import BASE, CHANGES, Config, Engine, Identities
from tiered_kv.keys import extras
from tiered_kv.keys.namespace import REQUIRED_FIELDS, Namespace
from tiered_kv.server import members
from tiered_kv.server import protocol as m
from tiered_kv.vllm.identity import record as identity
from tiered_kv.vllm.request_extras import RequestExtras

HERE = Path(__file__).parent

TOLD_TWICE = {"kv_scales": "kv_dtype", "attention_backend": "kv_encoding"}
"""Fields that no engine changes without changing another: the dtype has the scales' mode behind it, the encoding the
backend before it."""

GEOMETRY_ORDER = {
    "order of layers": ("_part_pages", lambda parts: [sorted(pages, key=lambda page: page.layer) for pages in parts]),
    "which layers are on which rank": ("_part_pages", lambda parts: [[page for pages in parts for page in pages]]),
    "all ranks but the first": ("_part_pages", lambda parts: parts[:1]),
    "order of a page's extents": ("_page_record", lambda page: page | {"shape": sorted(page["shape"])}),
}


@pytest.fixture(scope="module")
def identities(tmp_path_factory):
    return Identities(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def names(identities):
    """Every field of any namespace that the engines of the checks have."""
    engines = [engine for pair in CHANGES.values() for engine in pair]
    return set().union(*(identities.namespace(engine).fields for engine in engines))


def noticed(identities):
    """The checks that fail."""
    failed = []
    for change in CHANGES:
        try:
            identities.check_apart(change)
        except AssertionError:
            failed.append(change)
    return failed


def without(monkeypatch, *dropped):
    """Namespaces no longer depend on these fields."""
    make = Namespace.from_fields
    constant = dict.fromkeys(dropped, "dropped")
    monkeypatch.setattr(Namespace, "from_fields", lambda fields: make(dict(fields) | constant))


def test_nothing_dropped_is_noticed_by_no_check(identities):
    assert noticed(identities) == []


def test_no_field_of_the_namespace_can_be_left_out(identities, names):
    unnoticed = set()
    for name in names:
        with pytest.MonkeyPatch.context() as patch:
            without(patch, name)
            if not noticed(identities):
                unnoticed.add(name)
    assert names >= set(REQUIRED_FIELDS)
    assert unnoticed == TOLD_TWICE.keys()


@pytest.mark.parametrize(("name", "other"), TOLD_TWICE.items())
def test_what_two_fields_tell_cannot_be_left_out_of_both(identities, monkeypatch, name, other):
    with pytest.MonkeyPatch.context() as patch:
        without(patch, other)
        alone = noticed(identities)
    without(monkeypatch, name, other)
    assert set(noticed(identities)) > set(alone)


def leaves(config, path=()):
    """Paths of a config's values, through its dicts."""
    for name, value in config.items():
        if value is None or name in identity.COSMETIC_FIELDS:
            continue
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name)


def with_changed(config, path):
    name, *rest = path
    return config | {name: with_changed(config[name], rest) if rest else "another"}


def test_no_field_of_the_models_config_can_be_left_out(identities, monkeypatch):
    """Of the text config, RoPE's included, whatever vLLM and transformers put there: each changes the namespace."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 4096}
    first = identities.config(BASE).model_config.hf_text_config.to_dict() | {"rope_parameters": rope}

    def namespace(config):
        made = Config(**config)
        parts = {"model_config": {"hf_config": made, "hf_text_config": made}}
        return identities.namespace(Engine(parts=parts))

    paths = list(leaves(first))
    assert {path[-1] for path in paths} >= rope.keys() | {"hidden_size", "head_dim", "rms_norm_eps", "dtype"}
    for path in paths:
        other = with_changed(first, path)
        assert namespace(other) != namespace(first), path
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(identity, "COSMETIC_FIELDS", identity.COSMETIC_FIELDS | {path[-1]})
            assert namespace(other) == namespace(first), "the field is not left out by this, so the test shows nothing"
    for name in identity.COSMETIC_FIELDS:
        assert namespace(first | {name: "another"}) == namespace(first), name


@pytest.mark.parametrize("name", sorted({*m.Page.__struct_fields__} - {"encoding"}))
def test_no_entry_of_a_page_can_be_left_out(identities, monkeypatch, name):
    record = members._page_record
    monkeypatch.setattr(members, "_page_record", lambda page: record(page) | {name: "dropped"})
    assert noticed(identities)


def test_the_order_of_the_encodings_cannot_be_left_out(identities, monkeypatch):
    runs = members._runs
    monkeypatch.setattr(members, "_runs", lambda texts: runs(sorted(texts)))
    assert noticed(identities)


@pytest.mark.parametrize("what", GEOMETRY_ORDER)
def test_no_order_of_the_geometry_can_be_left_out(identities, monkeypatch, what):
    function, lose = GEOMETRY_ORDER[what]
    whole = getattr(members, function)
    monkeypatch.setattr(members, function, lambda given: lose(whole(given)))
    assert noticed(identities)


EXTRAS = [(kind, field) for kind in get_args(extras.Extra) for field in dataclasses.fields(kind)]
NOTHING = {str: "", int: 0, bytes: bytes(extras.SHA256_BYTES)}


def extras_fail():
    return first_failure(HERE / "test_request_extras.py")


@pytest.mark.parametrize(("kind", "field"), EXTRAS, ids=lambda value: getattr(value, "__name__", value))
def test_no_part_of_an_extra_can_be_left_out(monkeypatch, kind, field):
    record, constant = extras._record, {field.name: NOTHING[field.type]}

    def lossy(extra):
        return record(dataclasses.replace(extra, **constant) if isinstance(extra, kind) else extra)

    monkeypatch.setattr(extras, "_record", lossy)
    assert extras_fail()


def test_no_kind_of_extra_can_be_left_out(monkeypatch):
    """Which ones apply to a chunk: each condition of that is needed."""
    original = RequestExtras._typed
    monkeypatch.setattr(RequestExtras, "_typed", recompiled(original))
    assert extras_fail() is None
    unnoticed = []
    for mutant in mutants(original):
        monkeypatch.setattr(RequestExtras, "_typed", mutant.function)
        if extras_fail() is None:
            unnoticed.append(mutant.dropped)
    assert not unnoticed
