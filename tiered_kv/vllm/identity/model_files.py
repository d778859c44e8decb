"""Identity of a model's weights, and digests of the small files beside them.

Owns which weights have a name, what it is, and which other files count. Must not guess what vLLM read:
``loader_watch.py`` noted it at that moment. Called by ``record.py`` in a worker, minutes after the model was loaded.

**Weights** get a name (:func:`weights_identity`): a short text that is equal for two models only if their weights are.
Named are files that vLLM read in one of ``NAMED_FORMATS``, if they are still what they were then. Whatever else is
served has to be named by the user, with ``model_id``. What is hashed of files is in ``file_digests.py``.

**Small files** (:func:`model_files`) decide what vLLM computes: processors, quantisation, code. All JSON files count
but those that are known not to matter, so that a file of an unknown kind counts, and the model's own Python code
where vLLM may run it. Tokenizers, chat templates and generation settings do not count: the engine gets token ids, and
the keys are of those. ``config.json`` does not: the namespace has what vLLM made of it.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tiered_kv.errors import ConfigError
from tiered_kv.vllm.drafts import has_drafts_kv
from tiered_kv.vllm.identity.file_digests import FileStamp, digest_files, local_path, stamps_of
from tiered_kv.vllm.identity.loader_watch import Reading, readings_of, watched_loaders
from tiered_kv.vllm.identity.model_code import is_computed_by_transformers

FULL_BYTES: Final = 64 << 20
"""Files up to this size in all are hashed completely: it takes about 50 ms."""

NAMED_FORMATS: Final = frozenset({
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt", "sharded_state",
})  # fmt: skip
"""Formats of vLLM's own loaders that read their weights from the listed files and from nowhere else. Not npcache, which
reads a copy it made of the listed files once."""

_ADVICE: Final = "Set model_id in kv_connector_extra_config to a name that changes whenever the weights do"

NOT_COUNTED: Final = frozenset({
    "config.json",  # text_config, outer_config_sha256
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.json", "tekken.json", "chat_template.json",  # text to token ids
    "generation_config.json", "trainer_state.json", "training_args.json", "all_results.json", "train_results.json",
    "eval_results.json",  # behind KV, or of the training
    "adapter_config.json",  # of an adapter, which has an identity of its own
})  # fmt: skip

FILES_MAX: Final = 256
"""Files told apart by name, so that a record stays small; of more there is one digest."""

READ_BY_MODELS: Final = ("adapters", "audio_tokenizer")
"""Folders below the model's from which models of vLLM read weights themselves, past its loaders: Jina's merge an
adapter of a task, MiMo's turn sound into tokens."""

CONFIGS: Final = ("config.json", "params.json")
"""What a model's folder has at least one of: Mistral's own format has the second alone."""

READ_SUFFIXES: Final = (".safetensors", ".bin", ".json")
GIT_NAME: Final = 40
"""Digits of a blob's name that is git's own hash of it."""

_SNAPSHOT: Final = re.compile(r"(?P<repository>.*/models--[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")


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
    own = _source(model)
    apart = {_source(vllm_config.speculative_config.draft_model_config)} if has_drafts_kv(vllm_config) else set()
    readings = [reading for reading in readings_of(load) if reading.source not in apart - {own}]
    return _named(vllm_config, model, load, readings)


def draft_weights_identity(vllm_config: Any, model_id: str | None) -> str:
    """Name the weights of the engine's draft in the same way.

    A draft in the model's own files (MTP) has the model's name. Where ``model_id`` is given and the draft's files have
    no name, it stands for them, too.

    Raises:
        ConfigError: As ``weights_identity``.
    """
    speculative = vllm_config.speculative_config
    draft, load = speculative.draft_model_config, speculative.draft_load_config or vllm_config.load_config
    try:
        return _named(vllm_config, draft, load, [r for r in readings_of(load) if r.source == _source(draft)])
    except ConfigError:
        if model_id is None:
            raise
        return f"user:{model_id}"


def _source(model: Any) -> str:
    """What vLLM gives its loader for this model."""
    return str(getattr(model, "model_weights", None) or model.model)


def _named(vllm_config: Any, model: Any, load: Any, readings: list[Reading]) -> str:
    """The name of what these readings read for one model."""
    load_format = str(getattr(load.load_format, "value", load.load_format))
    if load_format == "dummy" and not getattr(vllm_config.parallel_config, "enable_elastic_ep", False):
        return f"dummy:{model.seed}"  # elastic expert parallelism fills dummies with its peers' weights
    if load_format not in NAMED_FORMATS:
        raise ConfigError(
            f"weights cannot be named: tiered_kv does not see what this format loads. {_ADVICE}. "
            f"load_format={load_format} named={','.join(sorted(NAMED_FORMATS))} model={model.model}"
        )
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


def model_files(vllm_config: Any, *, is_named: bool, model: Any = None) -> dict[str, str] | str:
    """Digests of the files that count: name -> ``sha256:...``; code that is not in the folder is ``repository/name``.

    The small files of a hub snapshot are named by its commit, ``hf:<commit>``, while each is as the hub gave it:
    machines have downloaded more or less of it. Weights that models read themselves, and code from elsewhere, are named
    by content there, too.
    A snapshot of a text model in which none counts has no name: its next commit may have another README only.

    ``is_named``: the user's ``model_id`` names the model, so files that are not on this machine are named by it, too.
    ``model``: the configuration of the draft's model, for its files; None: the model that vLLM serves.

    Raises:
        ConfigError: The files are not on this machine or cannot be read.
    """
    model = vllm_config.model_config if model is None else model
    folder = _folder(str(model.model), model.revision, vllm_config.load_config.download_dir)
    if folder is None:
        if is_named:
            return "model_id"
        raise ConfigError(f"the model's files are not on this machine. Set model_id. model={model.model}")
    snapshot = None if is_named else _SNAPSHOT.fullmatch(os.path.realpath(folder))
    needs_more = model.multimodal_config is not None or model.trust_remote_code  # and may download it later
    try:
        counted = {path.name: path for path in folder.iterdir() if _counts(path)}
        if model.trust_remote_code:
            counted |= dict(_python_files(folder))
        elsewhere = _read_by_models(folder)
        if model.trust_remote_code:
            elsewhere |= {name: _digest(path) for name, path in _code_elsewhere(model, folder)}
        if snapshot is not None and not counted and not needs_more:
            snapshot = None
        if snapshot is not None and all(_is_of_the_hub(path, snapshot["repository"]) for path in counted.values()):
            commit = f"hf:{snapshot['commit']}"
            if not elsewhere:
                return commit
            digests = {"snapshot": commit} | elsewhere
        else:
            digests = {name: _digest(path) for name, path in sorted(counted.items())} | elsewhere
    except OSError as exc:
        raise ConfigError(f"a file beside the weights cannot be read. path={folder} reason={exc}") from exc
    if len(digests) > FILES_MAX:
        whole = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
        return f"{len(digests)} files, sha256:{whole}"
    return digests


def _folder(name: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Where vLLM and transformers read the model's config from; a file (GGUF) stands for its folder."""
    for proof in CONFIGS:
        for cache_dir in (None, download_dir):
            if (path := local_path(name, proof, revision=revision, cache_dir=cache_dir)) is not None:
                return path if path.is_dir() else path.parent
    return None


def _counts(path: Path) -> bool:
    # An index says which file has which tensor, and the weights' identity covers that.
    is_known = path.name in NOT_COUNTED or path.name.endswith(".index.json")
    return path.suffix == ".json" and not is_known and path.is_file()


def _code_elsewhere(model: Any, folder: Path) -> Iterator[tuple[str, Path]]:
    """The Python files that transformers reads from elsewhere than the model's folder: ``repository/name``, and path.

    A config names code of its own repository ("m.Class") or of another one ("org/model--m.Class"). Both are read at
    ``code_revision``. A model that transformers computes is made of what main has at that moment, whatever revision was
    asked for: vLLM gives transformers' ``from_config`` none.
    """
    own = str(getattr(model.hf_config, "name_or_path", "") or model.model)  # hf_config_path, where it is given
    maps = [getattr(model.hf_config, "auto_map", None), *_maps_of_processors(folder)]
    references = sorted(set[tuple[str, str]]().union(*map(_code_references, maps)))
    is_made_of_main = bool(references) and is_computed_by_transformers(model)
    for given, file in references:
        name = given or own
        asked_for = local_path(name, file, revision=model.code_revision or (model.revision if name == own else None))
        main = local_path(name, file) if is_made_of_main else None
        if given and is_made_of_main and main is None:
            raise ConfigError(
                "the model runs code of another repository that is not on this machine. Download it, or set model_id "
                f"and give the code in the model's own folder. repository={name} file={file}"
            )
        for mark, below in (("", asked_for), ("@main", None if main == asked_for else main)):
            for place, path in _python_files(below) if below is not None else ():
                beside = folder / place
                if not (beside.is_file() and beside.samefile(path)):
                    yield f"{given or 'own'}{mark}/{place}", path


def _python_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every Python file below a folder, by its place there."""
    return ((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*.py") if path.is_file())


def _maps_of_processors(folder: Path) -> Iterator[Any]:
    """The ``auto_map`` of what prepares images, videos and sounds, which has files of its own."""
    for path in folder.glob("*processor*.json"):
        try:
            yield json.loads(path.read_bytes()).get("auto_map")
        except (ValueError, AttributeError):  # not read by vLLM either; its content counts
            continue


def _code_references(auto_map: Any) -> set[tuple[str, str]]:
    """What an ``auto_map`` names: the repository, empty for its own, and the file of the class."""
    given = auto_map if isinstance(auto_map, dict) else {}
    named = [part for value in given.values() for part in (value if isinstance(value, list | tuple) else [value])]
    split = (str(text).rpartition("--") for text in named if text)
    return {(repository, f"{place.partition('.')[0]}.py") for repository, _, place in split}


def _read_by_models(folder: Path) -> dict[str, str]:
    found = {}
    for name in READ_BY_MODELS:
        if files := [path for path in (folder / name).rglob("*") if path.suffix in READ_SUFFIXES and path.is_file()]:
            found[f"{name}/"] = digest_files(stamps_of(files), FULL_BYTES)
    return found


def _is_of_the_hub(path: Path, repository: str) -> bool:
    """Whether it links to an unchanged blob of the hub: the hub's cache names a blob by a hash of its content.

    That is git's, or SHA-256 for files in large file storage. Editors write through links, and scripts replace them.
    """
    blob = Path(os.path.realpath(path))
    if blob.parent != Path(repository) / "blobs":
        return False
    content = blob.read_bytes()
    if len(blob.name) == GIT_NAME:
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == blob.name
    return hashlib.sha256(content).hexdigest() == blob.name


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
