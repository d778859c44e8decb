"""No two settings that differ have one form: what cannot be told apart is refused, not written like something else."""

import functools
import json
import sys
import threading
import types

import numpy as np
import pytest
import torch

from tiered_kv.errors import ConfigError
from tiered_kv.keys.namespace import MAX_DEPTH
from tiered_kv.vllm.identity.canonical import DEPTH_READ_MAX, plain
from tiered_kv.vllm.identity.record import canonical_config

SCALE = 1


class Scaler:
    def __init__(self, scale):
        self.scale = scale

    def apply(self, value):
        return value * self.scale


class Quiet(Scaler):
    def __repr__(self):
        return "Quiet()"


class Located(Scaler):
    def __repr__(self):
        return f"<Located at {hex(id(self))}>"


class Hooked:
    def __init__(self, hook):
        self.hook = hook


class Endless:
    def to_dict(self):
        return {"next": Endless()}


def nested(depth, value):
    for _ in range(depth):
        value = {"in": value}
    return value


def ring(*values):
    made = list(values)
    made.append(made)
    return made


def scaled(scale):
    def inner(value):
        return value * scale

    return inner


def scripted(scale):
    """A function of a script: every script's are called so."""
    script = types.ModuleType("__main__")
    exec(f"SCALE = {scale}\ndef override(value):\n    return value * SCALE\n", vars(script))
    return script.override


def defaulted(scale):
    def inner(value, by=scale):
        return value * by

    return inner


DIFFER = {
    "functions in objects": lambda n: Hooked((scaled, ring)[n]),
    "lambdas": lambda n: (lambda: 1, lambda: 2)[n],
    "lambdas in objects": lambda n: Hooked((lambda x: x + 1, lambda x: x - 1)[n]),
    "lambdas of other globals": lambda n: (lambda: SCALE, lambda: sys.path)[n],
    "lambdas in lambdas": lambda n: (lambda: lambda: 1, lambda: lambda: 2)[n],
    "constants that are equal": lambda n: (lambda: 1, lambda: True)[n],
    "closures": scaled,
    "defaults": defaulted,
    "functions of scripts": scripted,
    "bound methods": lambda n: Scaler(n).apply,
    "bound methods of C": lambda n: [n].count,
    "partials of lambdas": lambda n: functools.partial((lambda: 1, lambda: 2)[n]),
    "partials of objects": lambda n: functools.partial(scaled, Scaler(n)),
    "objects that say little": Quiet,
    "objects that say where they are": Located,
    "keys of other types": lambda n: {(1, "1")[n]: "a"},
    "keys of both types": lambda n: {1: "ab"[n], "1": "b"},
    "keys like our own": lambda n: {(1, "<int> 1")[n]: "a"},
    "keys that are None": lambda n: {(None, "None")[n]: "a"},
    "what lies deep": lambda n: nested(13, n),
    "what lies deeper": lambda n: nested(40, n),
    "deep fields of objects": lambda n: nested(12, Scaler(n)),
    "rings": ring,
    "rings of other length": lambda n: (ring(1), ring([1]))[n],
    "generic classes": lambda n: (list[int], list[str])[n],
    "tensors": lambda n: torch.zeros(5000, dtype=torch.bfloat16).index_fill(0, torch.tensor([2500]), n),
    "arrays": lambda n: np.where(np.arange(5000) == 2500, n, 0),
}


@pytest.mark.parametrize("name", DIFFER)
def test_values_that_differ_have_two_forms_each_the_same_after_a_restart(name):
    make = DIFFER[name]
    one, same, other = (json.dumps(plain(make(n)), sort_keys=True) for n in (0, 0, 1))
    assert one == same
    assert one != other
    assert " at 0x" not in one + other


REFUSED = {
    "local class": (lambda: type("Local", (), {"scale": 1}), "no module has"),
    "too deep": (lambda: nested(DEPTH_READ_MAX + 1, 1), "nested deeper than"),
    "endless": (Endless, "nested deeper than"),
    "lock": (threading.Lock, "shows nothing of what it holds"),
    "lock in an object": (lambda: Hooked(threading.Lock()), "shows nothing of what it holds"),
    "iterator": (lambda: iter([1, 2]), "shows nothing of what it holds"),
    "tensor without data": (lambda: torch.zeros(1, device="meta"), "meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_apart_is_refused_by_its_class(name):
    make, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=rf"cannot be compared\. class=\S+ reason=.*{reason}"):
        plain(make())


def test_a_function_of_a_module_has_its_name():
    assert plain(Hooked(scaled)) == {"class": f"{__name__}.Hooked", "fields": {"hook": f"{__name__}.scaled"}}
    assert plain(len) == "builtins.len"


def test_a_value_that_is_reached_by_many_ways_ends():
    value = [1]
    for _ in range(40):
        value = [value, value]
    with pytest.raises(ConfigError, match="more than"):
        plain(value)


@pytest.mark.parametrize(
    "wrap",
    [Hooked, lambda value: [value], lambda value: functools.partial(scaled, value)],
    ids=["object", "list", "partial"],
)
def test_no_form_is_nested_deeper_than_a_record_may_be(wrap):
    value = 1
    for _ in range(15):
        value = wrap(value)

    def depth(form):
        inner = form.values() if isinstance(form, dict) else form if isinstance(form, list) else ()
        return 1 + max(map(depth, inner), default=0)

    assert depth(plain(value)) < MAX_DEPTH - 6


def test_configs_of_models_differ_by_their_keys_and_by_objects_in_them():
    def made(value):
        return canonical_config(types.SimpleNamespace(to_dict=lambda: {"held": value}))

    values = [{1: "a"}, {"1": "a"}, Located(1), Located(2), {"a", 1}, {"a", "1"}]
    forms = [json.dumps(made(value), sort_keys=True) for value in values]
    assert len({*forms}) == len(values)
