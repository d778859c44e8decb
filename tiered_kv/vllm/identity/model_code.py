"""What computes a model besides vLLM: code of plugins and scripts, and the transformers package.

Owns which of that is named, and how. vLLM's own code is named by its version (``record.py``). A class that a plugin or
a script registers may stand in the place of one of vLLM's, with the same configuration and the same weights, so the
classes that vLLM really made count, and the Python files of the packages that they came from. Code that a checkpoint
brings along is in ``model_files.py``. Called by ``record.py`` in a worker, after the model was loaded.
"""

import hashlib
import sys
from collections.abc import Collection, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from tiered_kv.errors import ConfigError
from tiered_kv.vllm.compat import model_class, replaced_layers
from tiered_kv.vllm.identity.canonical import digest, full_name, written

NAMED_BY_VERSION: Final = sys.stdlib_module_names | {"vllm", "torch", "transformers"}
"""Packages whose classes are no plugin's."""

TRANSFORMERS_BACKEND: Final = "vllm.model_executor.models.transformers"
"""vLLM's classes that have transformers compute the model."""


def model_code(vllm_config: Any) -> dict[str, object] | None:
    """What of vLLM's classes is not vLLM's own: the model's, those of its layers, of their backends and quantisation.

    Operations that a plugin registered in the place of vLLM's (``RMSNorm``, ``RotaryEmbedding``) count whether or not
    this model has them: the modules inside of it cannot be asked for here.

    Returns:
        Their names, and digests of the packages that they are made of; None: all are vLLM's.

    Raises:
        ConfigError: Their code is in no file that can be read here.
    """
    return _code({model_class(vllm_config.model_config), *_layer_classes(vllm_config), *replaced_layers()})


def draft_code(model: Any) -> dict[str, object] | None:
    """The same of a draft's model; its layers are among the others."""
    return _code({model_class(model)})


def transformers_version() -> str:
    """Version of the package that this vLLM brought."""
    return version("transformers")


def _layer_classes(vllm_config: Any) -> Iterator[type]:
    yield type(vllm_config.quant_config)
    for layer in vllm_config.compilation_config.static_forward_context.values():
        parts = (layer, getattr(layer, "impl", None), getattr(layer, "quant_method", None))
        yield from map(type, parts)
        backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else None
        yield backend if isinstance(backend, type) else type(backend)


def _code(classes: Collection[type]) -> dict[str, object] | None:
    packages = {of: {one.__module__.partition(".")[0] for one in of.__mro__} - NAMED_BY_VERSION for of in classes}
    foreign = {full_name(of): names for of, names in packages.items() if names}
    if not foreign:
        return None
    code = {name: _package(name) for name in sorted(set().union(*foreign.values()))}
    if None in code.values():
        raise ConfigError(
            "classes of the model are in no file, so engines of other code could not be told apart. Put them into a "
            f"module. classes={','.join(sorted(foreign))}"
        )
    return {"classes": sorted(foreign), "code": code}


def uses_transformers(model: Any) -> bool:
    """Whether transformers computes what KV depends on: the layers, or what becomes of images, videos and sounds."""
    return model.multimodal_config is not None or is_computed_by_transformers(model)


def is_computed_by_transformers(model: Any) -> bool:
    """Whether vLLM has transformers compute the layers."""
    return any(of.__module__.startswith(TRANSFORMERS_BACKEND) for of in model_class(model).__mro__)


def _package(name: str) -> str | None:
    """Digest of all Python files of a package, or of the one file of a module; None without any.

    Of files of one place, in the folders of a namespace package, the first counts: it is the one that is imported.
    """
    try:
        files = {place: hashlib.sha256(path.read_bytes()).hexdigest() for place, path in _files(sys.modules.get(name))}
    except OSError as exc:
        raise ConfigError(f"code of the model cannot be read. package={name} reason={exc}") from exc
    return digest(written(files)) if files else None


def _files(module: Any) -> Iterator[tuple[str, Path]]:
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    for folder in reversed(folders):
        paths = (path for path in sorted(folder.rglob("*.py")) if path.is_file())  # editors leave links to nowhere
        yield from ((path.relative_to(folder).as_posix(), path) for path in paths)
    if not folders and (file := getattr(module, "__file__", None)):
        yield "", Path(file)
