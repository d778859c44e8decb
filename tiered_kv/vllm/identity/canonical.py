"""Canonical form of a setting: two values are equal exactly where their forms are.

Owns the content of a value. Must not lose a difference: values that cannot be distinguished are refused, with its class
in the message, and the engine runs without the cache. Must not write an address in memory either, or every start would
be a namespace of its own. Called by ``config_values.py`` and ``record.py``.

    importable function or class     its full name
    other function                   its code, defaults, closure and the globals it names
    bound method, ``partial``        the function, and what it is bound to
    other class                      refused: only a name would tell it, and others may have the same
    object                           its fields or what it dumps, and its text if it has one of its own
    object that shows neither        refused
    container that holds itself      how many levels up
    nested deeper than the record    a digest of the rest
"""

import dataclasses
import enum
import functools
import hashlib
import json
import re
import sys
import types
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Final

import numpy as np
import torch

from tiered_kv.errors import ConfigError

DEPTH_MAX: Final = 12
"""Nesting of a value as it is written, below the record's own limit; what is deeper enters as a digest."""

DEPTH_READ_MAX: Final = 64
"""Nesting that is read at all: an object that makes itself anew whenever it is asked ends there, refused."""

VALUES_MAX: Final = 1 << 16
"""Values within one: an object that is reached by many ways is written at each of them."""

_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")
_MAIN: Final = ("__main__", "__mp_main__")
_HEAP_TYPE: Final = 1 << 9
"""CPython's flag of classes that Python code made; all others are known by their names."""


def plain(value: object) -> object:
    """Any value in one form that is equal on every machine and after a restart: JSON without floats.

    Floats become their ``repr``, classes and functions their full names, enums their names, sets sorted lists,
    dataclasses and objects what they hold.

    Raises:
        ConfigError: It has no such form.
    """
    return _Form().of(value)


def key_text(name: object) -> str:
    """A mapping's key as text: 1 and "1" stay two."""
    if type(name) is str and not name.startswith("<"):
        return name
    return f"<{type(name).__qualname__}> {written(plain(name))}"


def written(form: object) -> str:
    """A canonical form as text."""
    return json.dumps(form, sort_keys=True)


def full_name(value: Any) -> str:
    """Module and name of a class or function."""
    return f"{value.__module__}.{value.__qualname__}"


class _Form:
    """One value on its way into its form.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self._above: list[object] = []  # kept, so that no two of them have one id
        self._count = 0

    def of(self, value: object) -> object:
        self._count += 1
        if (leaf := _leaf(value)) is not None or value is None:
            return leaf
        for levels, above in enumerate(reversed(self._above), 1):
            if above is value:
                return f"<{levels} up>"
        if len(self._above) >= DEPTH_READ_MAX or self._count > VALUES_MAX:
            raise _refusal(value, f"nested deeper than {DEPTH_READ_MAX} or of more than {VALUES_MAX} values")
        self._above.append(value)
        form = self._inner(value)
        self._above.pop()
        return digest(written(form)) if len(self._above) == DEPTH_MAX else form

    def _inner(self, value: Any) -> object:
        if isinstance(value, Mapping):
            items = {key_text(name): self.of(item) for name, item in value.items()}
            if len(items) != len(value):
                raise _refusal(value, "two keys of one form")
            return items
        if isinstance(value, list | tuple):
            return [self.of(item) for item in value]
        if isinstance(value, set | frozenset):
            return sorted((self.of(item) for item in value), key=written)
        if isinstance(value, functools.partial):
            return {"partial": self.of(value.func), "of": self.of([value.args, value.keywords])}
        if isinstance(value, types.MethodType):
            return {"method": self.of(value.__func__), "of": self.of(value.__self__)}
        if isinstance(value, types.BuiltinMethodType):
            return {"method": value.__qualname__, "of": self.of(value.__self__)}
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            raise _refusal(value, f"no module has {full_name(value)} under this name")
        return self._object(value)

    def _function(self, value: types.FunctionType) -> object:
        """Lambdas, inner functions and those of a script: many have one name."""
        codes = _codes(value.__code__)
        named = sorted({name for code in codes for name in code.co_names if name in value.__globals__})
        return {
            "function": full_name(value),
            "code": digest(written([self.of(_instructions(code)) for code in codes])),
            "defaults": self.of([value.__defaults__, value.__kwdefaults__]),
            "closure": [self.of(_content(cell)) for cell in value.__closure__ or ()],
            "globals": {name: self.of(value.__globals__[name]) for name in named},
        }

    def _object(self, value: object) -> object:
        """An object of an unknown class."""
        try:
            fields, text = _fields(value), _text(value)
        except Exception as exc:  # foreign code: vLLM must start all the same, without the cache
            raise _refusal(value, repr(exc)) from exc
        if fields is None and (text is None or _ADDRESS.search(text)):
            raise _refusal(value, "it shows nothing of what it holds")
        if not fields and text is not None:
            return _ADDRESS.sub("", text)
        form = {"class": full_name(type(value)), "fields": self.of(fields)}
        return form if text is None else form | {"text": _ADDRESS.sub("", text)}


def digest(text: str | bytes) -> str:
    """What stands for content that is too long, too deep or not to be shown."""
    return f"sha256:{hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()}"


def _leaf(value: Any) -> object:
    """The form of what holds no other values, or has a name for all of it; None of everything else."""
    if isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return digest(bytes(value))
    if isinstance(value, PurePath | torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype.str} {list(value.shape)} {digest(value.tobytes())}"
    if isinstance(value, types.ModuleType):
        return value.__name__
    return full_name(value) if _is_importable(value) else None


def _tensor(value: torch.Tensor) -> str:
    try:
        flat = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    except (RuntimeError, NotImplementedError) as exc:  # without data, or sparse
        raise _refusal(value, str(exc)) from exc
    return f"{value.dtype} {list(value.shape)} {digest(flat.tobytes())}"


def _is_importable(value: Any) -> bool:
    """Whether a module has this very class or function under its name, so that the name identifies it.

    A script's names do not: every script is called ``__main__``.
    """
    if isinstance(value, type) and not value.__flags__ & _HEAP_TYPE:
        return True
    if not isinstance(value, type) and not callable(value):
        return False
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module in _MAIN:
        return False
    found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """The code of a function and of all that is defined in it."""
    inner = [one for const in code.co_consts if isinstance(const, types.CodeType) for one in _codes(const)]
    return [code, *inner]


def _instructions(code: types.CodeType) -> list[object]:
    """What code does, without where it stands."""
    constants = [None if isinstance(const, types.CodeType) else [type(const), const] for const in code.co_consts]
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return [code.co_code, constants, arguments, names, code.co_exceptiontable]


def _content(cell: types.CellType) -> object:
    try:
        return [cell.cell_contents]
    except ValueError:  # a name that was not bound yet
        return []


def _fields(value: Any) -> object:
    """What an object says it holds; None if its class shows nothing."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)) or callable(dump := getattr(value, "to_dict", None)):
        return dump()
    slots = [vars(of)["__slots__"] for of in type(value).__mro__ if "__slots__" in vars(of)]
    names = {name for some in slots for name in ((some,) if isinstance(some, str) else some)}
    if not names and not hasattr(value, "__dict__"):
        return {} if type(value) is object else None
    held = {name: getattr(value, name, None) for name in names - {"__dict__", "__weakref__"}}
    return held | getattr(value, "__dict__", {})


def _text(value: object) -> str | None:
    """What an object says of itself; None where all of it is in its fields."""
    is_told = dataclasses.is_dataclass(value) or any(
        callable(getattr(value, name, None)) for name in ("model_dump", "to_dict")
    )
    return None if is_told or type(value).__repr__ is object.__repr__ else str(value)


def _refusal(value: object, why: str) -> ConfigError:
    return ConfigError(
        f"a setting of vLLM cannot be read, so it cannot be compared. class={full_name(type(value))} reason={why}"
    )
