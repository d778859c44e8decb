"""The small files beside a model's weights that decide what vLLM computes: processors, quantisation, code.

Owns which files count and their digests. Must not read weights (``weights.py`` does) nor the model's config, which
``identity.py`` takes as vLLM resolved it. Called once by the worker when vLLM registers its KV cache.

Counted are all JSON files but those that are known not to matter, so that a file of a kind nobody knew counts, and the
model's own Python code where vLLM may run it. Tokenizers, chat templates and generation settings are not: the engine
gets token ids, and the keys are of those. ``config.json`` is not: the namespace has what vLLM made of it.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Final

from tiered_kv.errors import ConfigError
from tiered_kv.vllm.files import local_path

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

_SNAPSHOT: Final = re.compile(r"/models--[^/]+/snapshots/([0-9a-f]{40})$")


def model_files(vllm_config: Any, *, is_named: bool) -> dict[str, str] | str:
    """Digests of the files that count: name -> ``sha256:...``; code of another repository is ``repository/name``.

    A snapshot of the hub is named by its commit alone, ``hf:<commit>``, where each of its files is as the hub gave it:
    machines have downloaded more or less of it. One that was edited or put there makes it a folder like any other.

    ``is_named``: the user's ``model_id`` names the model, so files that are not on this machine are named by it, too.

    Raises:
        ConfigError: The files are not on this machine or cannot be read.
    """
    model = vllm_config.model_config
    folder = _folder(str(model.model), model.revision, vllm_config.load_config.download_dir)
    if folder is None:
        if is_named:
            return "model_id"
        raise ConfigError(f"the model's files are not on this machine. Set model_id. model={model.model}")
    repositories = sorted(_code_repositories(model.hf_config)) if model.trust_remote_code else []
    commit = None if is_named or repositories else _SNAPSHOT.search(folder.absolute().as_posix())
    try:
        counted = {path.name: path for path in folder.iterdir() if _counts(path)}
        if model.trust_remote_code:
            counted |= {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py") if path.is_file()}
        if commit is not None and all(_is_of_the_hub(path, folder) for path in counted.values()):
            return f"hf:{commit[1]}"
        for repository in repositories:
            below = _repository(repository, model.code_revision)
            counted |= {f"{repository}/{path.relative_to(below).as_posix()}": path for path in below.rglob("*.py")}
        digests = {name: _digest(path) for name, path in sorted(counted.items())}
    except OSError as exc:
        raise ConfigError(f"a file beside the weights cannot be read. path={folder} reason={exc}") from exc
    if len(digests) > FILES_MAX:
        whole = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
        return f"{len(digests)} files, sha256:{whole}"
    return digests


def _folder(name: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Where vLLM and transformers read the model's config from; a file (GGUF) stands for its folder."""
    for cache_dir in (None, download_dir):
        if (path := local_path(name, "config.json", revision=revision, cache_dir=cache_dir)) is not None:
            return path if path.is_dir() else path.parent
    return None


def _counts(path: Path) -> bool:
    # An index says which file has which tensor, and the weights' identity covers that.
    is_known = path.name in NOT_COUNTED or path.name.endswith(".index.json")
    return path.suffix == ".json" and not is_known and path.is_file()


def _is_of_the_hub(path: Path, snapshot: Path) -> bool:
    """Whether a file of a snapshot is what the hub gave: a link to one that is called by its content's digest.

    Editors write through links, so that the link alone proves nothing. Small files are called by what git calls them.
    """
    blob = path.resolve()
    if not path.is_symlink() or blob.parent != (snapshot.parent.parent / "blobs").resolve():
        return False
    content = blob.read_bytes()
    git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    return blob.name in (git, hashlib.sha256(content).hexdigest())


def _code_repositories(hf_config: Any) -> set[str]:
    """Repositories other than the model's own whose code its config asks for: ``org/model`` of "org/model--m.Class"."""
    given = getattr(hf_config, "auto_map", None) or {}
    named = [part for value in given.values() for part in (value if isinstance(value, list | tuple) else [value])]
    return {str(text).partition("--")[0] for text in named if text and "--" in str(text)}


def _repository(name: str, revision: str | None) -> Path:
    for proof in ("config.json", "README.md"):
        if (path := local_path(name, proof, revision=revision)) is not None:
            return path
    raise ConfigError(
        "the model runs code of another repository that is not on this machine. Download it, or set model_id and give "
        f"the code in the model's own folder. repository={name} revision={revision}"
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
