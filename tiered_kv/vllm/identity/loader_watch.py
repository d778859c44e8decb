"""Notes which files of weights and LoRA adapters vLLM reads, when it reads them.

Neither can be asked for later: a link may have turned and a file may have been replaced by then. So vLLM's loaders are
wrapped, once per process, before any model is loaded (``plugin.py``); the wrappers note stamps and change nothing.
``model_files.py`` and ``adapters.py`` accept only what was noted here, so a loader that this module does not know, or a
vLLM that renames what is wrapped, costs hits and never a wrong byte. ``compat.py`` names what is wrapped.

Threads: vLLM loads models and adapters in a worker's main thread, and these notes are read there.
"""

import functools
import glob
import hashlib
import logging
import os
import sys
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from tiered_kv.vllm.compat import LOAD_ADAPTER, LOAD_WEIGHTS, PREPARE_WEIGHTS
from tiered_kv.vllm.identity.file_digests import FileStamp, local_path, settle, stamps_of

logger = logging.getLogger("vllm." + __name__)

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_FILES: Final = (ADAPTER_CONFIG, "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""What vLLM may read of an adapter's folder. A trainer writes more there, its optimizer's state for one."""

MAX_NOTES: Final = 1 << 14
"""Adapters whose loads are remembered until the next step reports them."""

SHARDS: Final = "model-*-part-*.safetensors"
"""What vLLM's own patterns of a sharded state come to, with and without pipeline stages."""

_MARK: Final = "_tiered_kv_watched"


@dataclass(frozen=True, slots=True)
class Reading:
    """Files that a loader of vLLM was about to read.

    Attributes:
        load_config: A weak reference to the ``LoadConfig`` of the engine that loaded.
        loader: The loader's class.
        stamps: Taken before the first byte was read; () if a file could not be looked at.
        source: The folder, file or repository that the loader was given.
    """

    load_config: "weakref.ref[Any]"
    loader: type
    stamps: tuple[FileStamp, ...]
    source: str = ""


_readings: list[Reading] = []
_adapter_loads: dict[int, tuple[int, str]] = {}
"""By vLLM's id of the adapter, oldest load first: which load of this process it was, and what was loaded."""


def watch_loaders() -> None:
    """Wrap vLLM's loaders of weights and adapters. Idempotent; call it before the model is loaded."""
    try:
        from vllm.lora.worker_manager import WorkerLoRAManager  # noqa: PLC0415 (as plugin.py)

        default, sharded = watched_loaders()
        _wrap(default, PREPARE_WEIGHTS, _noting_weights)
        _wrap(sharded, LOAD_WEIGHTS, _noting_shards)
        _wrap(WorkerLoRAManager, LOAD_ADAPTER, _noting_adapter)
    except (ImportError, AttributeError) as exc:
        logger.warning("vLLM's loaders cannot be watched: weights need model_id, adapters are not cached. %r", exc)


def watched_loaders() -> tuple[type, type]:
    """The loaders whose files are seen; those of other loaders are unknown."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader  # noqa: PLC0415
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader  # noqa: PLC0415

    return DefaultModelLoader, ShardedStateLoader


def readings_of(load_config: Any) -> list[Reading]:
    """Readings for the engine with this very ``LoadConfig``, in order."""
    _readings[:] = [reading for reading in _readings if reading.load_config() is not None]
    return [reading for reading in _readings if reading.load_config() is load_config]


def adapter_loads(after: int) -> tuple[int, dict[int, str]]:
    """Adapters loaded since the load with this number: the newest number, and what each id holds now."""
    newest, found = 0, dict[int, str]()
    for adapter_id, (number, stamps) in reversed(_adapter_loads.items()):  # each step asks, of thousands perhaps
        newest = max(newest, number)
        if number <= after:
            break
        found[adapter_id] = stamps
    return newest, dict(reversed(found.items()))


def adapter_stamps(name: str) -> tuple[FileStamp, ...]:
    """Stamps of an adapter's files, wherever it lies on this machine; () if it is not here."""
    path = local_path(name, ADAPTER_CONFIG)
    if path is None:
        return ()
    try:
        return stamps_of(file for name in ADAPTER_FILES if (file := path / name).exists())
    except OSError:
        return ()


def stamps_text(stamps: tuple[FileStamp, ...]) -> str:
    """Stamps as a short text that crosses from workers to the scheduler; "" where there are none."""
    return hashlib.sha256(repr(stamps).encode()).hexdigest() if stamps else ""


def _wrap(owner: type, name: str, noting: Any) -> None:
    original = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
    if not getattr(original, _MARK, False):
        wrapper = functools.wraps(original)(noting(original, owner))
        setattr(wrapper, _MARK, True)
        setattr(owner, name, wrapper)


def _noting_weights(original: Any, _: type) -> Any:
    def prepare_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)  # its second item lists the files
        source = args[0] if args else kwargs.get("model_name_or_path", "")
        _note_reading(self, str(source), answer[1] if isinstance(answer, tuple) else ())
        return answer

    return prepare_weights


def _noting_shards(original: Any, _: type) -> Any:
    def load_weights(self: Any, model: Any, model_config: Any) -> Any:
        source = str(getattr(model_config, "model_weights", None) or model_config.model)
        pattern = (self.load_config.model_loader_extra_config or {}).get("pattern")
        _note_reading(self, source, _shards(source, pattern))
        return original(self, model, model_config)

    return load_weights


def _shards(folder: str, pattern: str | None) -> list[str]:
    """The files of all ranks: each reads its own, and all of them have to find one name."""
    every = dict.fromkeys(("rank", "tp_rank", "pp_rank", "part"), "*")
    try:
        fitting = (pattern or SHARDS).format(**every)
    except (LookupError, ValueError):  # vLLM refuses it in its own words
        return []
    return glob.glob(os.path.join(glob.escape(folder), fitting))


def _note_reading(loader: Any, source: str, files: Collection[str]) -> None:
    try:
        stamps = stamps_of(files)  # none: vLLM's own loader fails then, or they are not local
        settle(stamps)
    except (OSError, TypeError):
        stamps = ()  # not local, or not what this vLLM should answer
    _readings.append(Reading(weakref.ref(loader.load_config), type(loader), stamps, source))


def _noting_adapter(original: Any, _: type) -> Any:
    def load_adapter(self: Any, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
        name = str(lora_request.lora_path)
        before = adapter_stamps(name) or _fetched(name)
        settle(before)
        loaded = original(self, lora_request, *args, **kwargs)  # if this fails, vLLM keeps what it had
        _note_adapter(int(lora_request.lora_int_id), stamps_text(before) if adapter_stamps(name) == before else "")
        return loaded

    return load_adapter


def _note_adapter(adapter_id: int, stamps: str) -> None:
    number = adapter_loads(sys.maxsize)[0] + 1
    _adapter_loads.pop(adapter_id, None)
    _adapter_loads[adapter_id] = (number, stamps)
    if len(_adapter_loads) > MAX_NOTES:
        del _adapter_loads[next(iter(_adapter_loads))]


def _fetched(name: str) -> tuple[FileStamp, ...]:
    """An adapter of the hub that was never used here: vLLM fetches it in the very call, so let it do that first."""
    from vllm.lora.utils import get_adapter_absolute_path  # noqa: PLC0415

    get_adapter_absolute_path(name)
    return adapter_stamps(name)
