"""Weights identity: a short text that is equal for two models only if their weights are.

Owns which weights have a name and what it is. Must not guess what vLLM read: ``loads.py`` noted it at that moment.
Called by ``identity.py`` in a worker, minutes after the model was loaded.

A name is given to files that vLLM read in one of ``NAMED_FORMATS``, if they are still what they were then. Whatever
else is served has to be named by the user, with ``model_id``. What is hashed of files is in ``files.py``.
"""

from typing import Any, Final

from tiered_kv.errors import ConfigError
from tiered_kv.vllm.files import FileStamp, digest_files, stamps_of
from tiered_kv.vllm.loads import readings_of, watched_loaders

FULL_BYTES: Final = 64 << 20
"""Files up to this size in all are hashed completely: it takes about 50 ms."""

NAMED_FORMATS: Final = frozenset({
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt", "sharded_state",
})  # fmt: skip
"""Formats of vLLM's own loaders that read their weights from the listed files and from nowhere else. Not npcache, which
reads a copy it made of the listed files once."""

_ADVICE: Final = "Set model_id in kv_connector_extra_config to a name that changes whenever the weights do"


def weights_identity(vllm_config: Any, model_id: str | None) -> str:
    """Name the weights of the model vLLM serves.

    Args:
        vllm_config: vLLM's ``VllmConfig``, the one whose ``LoadConfig`` the model was loaded with.
        model_id: The setting of that name: the user's promise that models with this id have equal weights.

    Returns:
        ``user:<model_id>``, ``dummy:<seed>`` or ``sha256v2:<digest of the files>``, several of these joined with ``+``
        where a model's weights lie at several places.

    Raises:
        ConfigError: What was loaded cannot be named; the user has to set ``model_id``.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if model_id is not None:
        return f"user:{model_id}"
    load_format = str(getattr(load.load_format, "value", load.load_format))
    if load_format == "dummy" and not getattr(vllm_config.parallel_config, "enable_elastic_ep", False):
        return f"dummy:{model.seed}"  # elastic expert parallelism fills dummies with its peers' weights
    if load_format not in NAMED_FORMATS:
        raise ConfigError(
            f"weights cannot be named: tiered_kv does not see what this format loads. {_ADVICE}. "
            f"load_format={load_format} named={','.join(sorted(NAMED_FORMATS))} model={model.model}"
        )
    readings = readings_of(load)
    if not readings:
        raise ConfigError(
            "weights cannot be named: they were loaded before tiered_kv's plugin was, or by a loader it does not know. "
            f"Let VLLM_PLUGINS, if it is set, name tiered_kv too. Else: {_ADVICE}. model={model.model}"
        )
    vocabulary = int(getattr(model.hf_text_config, "vocab_size", 0))
    names = []
    for reading in readings:
        if reading.loader not in watched_loaders():
            raise ConfigError(
                f"weights cannot be named: unknown loader. {_ADVICE}. loader={reading.loader.__qualname__}"
            )
        names.append(_name(reading.stamps, vocabulary, str(model.model)))
    if pattern := (load.model_loader_extra_config or {}).get(
        "pattern"
    ):  # which of a folder's files sharded_state reads
        names.append(f"pattern:{pattern}")
    return "+".join(dict.fromkeys(names))


def _name(stamps: tuple[FileStamp, ...], vocabulary: int, model: str) -> str:
    if not stamps:
        raise ConfigError(f"weights cannot be named: their files cannot be read here. {_ADVICE}. model={model}")
    try:
        name = digest_files(stamps, FULL_BYTES, vocabulary)
        now = stamps_of(stamp.path for stamp in stamps)
    except OSError as exc:
        raise ConfigError(f"weights cannot be read. {_ADVICE}. model={model} reason={exc}") from exc
    if now != stamps:
        changed = next((old.path for old, new in zip(stamps, now, strict=False) if old != new), model)
        raise ConfigError(
            "weights changed on disk after vLLM had begun to load them, so which ones it holds cannot be told. Start "
            f"the engine again, from a directory that is not written to any more. Or: {_ADVICE}. file={changed}"
        )
    return name
