"""What computes a model besides vLLM: code of plugins and scripts, and the transformers package.

Owns which of that is named, and how. vLLM's own code is named by its version (``record.py``). A class that a plugin or
a script registers may stand in the place of one of vLLM's, with the same configuration and the same weights, so the
class that vLLM really made counts, and the Python files of the package that it came from. Code that a checkpoint brings
along is in ``model_files.py``. Called by ``record.py`` in a worker, after the model was loaded.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tiered_kv.errors import ConfigError
from tiered_kv.vllm.compat import model_class
from tiered_kv.vllm.identity.canonical import digest, full_name

NAMED_BY_VERSION: Final = sys.stdlib_module_names | {"vllm", "torch", "transformers"}
"""Packages whose classes are no plugin's."""

TRANSFORMERS_BACKEND: Final = "vllm.model_executor.models.transformers"
"""vLLM's classes that have transformers compute the model."""


def model_code(model: Any) -> dict[str, str] | None:
    """The class of a model that is not vLLM's own, and digests of the packages that it is made of; None: it is vLLM's.

    Raises:
        ConfigError: Its code is in no file that can be read here.
    """
    made = model_class(model)
    packages = {of.__module__.partition(".")[0] for of in made.__mro__} - NAMED_BY_VERSION
    if not packages:
        return None
    return {"class": full_name(made)} | {name: _package(name, made) for name in sorted(packages)}


def uses_transformers(model: Any) -> bool:
    """Whether transformers computes what KV depends on: the layers, or what becomes of images, videos and sounds."""
    return model.multimodal_config is not None or any(
        of.__module__.startswith(TRANSFORMERS_BACKEND) for of in model_class(model).__mro__
    )


def _package(name: str, made: type) -> str:
    """Digest of all Python files of a package, or of the one file of a module."""
    try:
        files = {place: hashlib.sha256(path.read_bytes()).hexdigest() for place, path in _files(sys.modules.get(name))}
    except OSError as exc:
        raise ConfigError(f"code of the model cannot be read. class={full_name(made)} reason={exc}") from exc
    if not files:
        raise ConfigError(
            "the model's class is in no file, so engines of other code could not be told apart. Put it into a module. "
            f"class={full_name(made)}"
        )
    return digest(json.dumps(files, sort_keys=True))


def _files(module: Any) -> Iterator[tuple[str, Path]]:
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    for folder in folders:
        yield from ((path.relative_to(folder).as_posix(), path) for path in sorted(folder.rglob("*.py")))
    if not folders and (file := getattr(module, "__file__", None)):
        yield "", Path(file)
