"""Weights identity: a short text that is equal for two models only if their weights are.

Owns how files of weights are digested. Must not read whole models: a worker calls it while vLLM starts, so 100 GB have
to take well under a second. Called by ``identity.py`` for the model and by ``extras.py`` for LoRA adapters.

What is hashed of a directory: names and sizes of its weight files, the complete safetensors headers (names, shapes and
dtypes of all tensors), 64 pieces of 4 KiB spread over each file with its first and last bytes, and 256 bytes from the
middle of every tensor. So a fine-tune, which changes whole tensors, gets another identity. Not seen is an edit of a
few numbers inside one tensor; who patches weights like that names them by ``model_id``.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from tiered_kv.errors import ConfigError

WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLE_BYTES: Final = 4096
SAMPLES_PER_FILE: Final = 64
TENSOR_SAMPLE_BYTES: Final = 256
MAX_READS: Final = 16_384
"""Pieces read of one model, at most, per kind: with more files or tensors there are fewer of each."""

MAX_HEADER_BYTES: Final = 100 << 20
"""What the safetensors library accepts as a header, too."""

FULL_BYTES: Final = 64 << 20
"""Files up to this size in all are hashed completely: it takes about 50 ms."""

_SNAPSHOT: Final = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")

FileStamp = tuple[str, int, int]
"""Path, size and modification time in ns."""


def weights_identity(vllm_config: Any, model_id: str | None) -> str:
    """Name the weights of the model vLLM serves.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        model_id: The setting of that name: the user's promise that models with this id have equal weights.

    Returns:
        ``user:<model_id>``, ``dummy:<seed>``, ``hf:<commit>`` or ``sha256:<digest>``.

    Raises:
        ConfigError: No weights can be read where the model is said to be; the user has to set ``model_id``.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if model_id is not None:
        return f"user:{model_id}"
    if str(getattr(load.load_format, "value", load.load_format)) == "dummy":
        return f"dummy:{model.seed}"
    name = str(getattr(model, "model_weights", "") or model.model)
    path = local_path(name, "config.json", revision=model.revision, cache_dir=load.download_dir)
    if path is None:
        raise ConfigError(f"weights cannot be identified: no local files. Set model_id. model={name}")
    for spelling in (path.absolute(), path.resolve()):
        if commit := _SNAPSHOT.search(spelling.as_posix()):
            return f"hf:{commit[1]}"
    stamps = file_stamps(path, WEIGHT_SUFFIXES)
    if not stamps:
        raise ConfigError(f"weights cannot be identified: no {'|'.join(WEIGHT_SUFFIXES)}. Set model_id. model={name}")
    try:
        return f"sha256:{digest_files(stamps, FULL_BYTES)}"
    except OSError as exc:
        raise ConfigError(f"weights cannot be read. Set model_id. model={name} reason={exc}") from exc


def local_path(name: str, proof: str, revision: str | None = None, cache_dir: str | None = None) -> Path | None:
    """Find a model or adapter on this machine: a path as it stands, else the hub cache's snapshot that holds ``proof``.

    Never asks the network.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    try:
        cached = try_to_load_from_cache(name, proof, cache_dir=cache_dir, revision=revision)
    except HFValidationError:  # neither a path nor a repository: an s3:// URI, for instance
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def file_stamps(path: Path, suffixes: Sequence[str]) -> tuple[FileStamp, ...]:
    """The files of ``path`` (a directory or one file) with these suffixes, sorted by name; () if it cannot be read."""
    try:
        files = [path] if path.is_file() else [x for x in path.iterdir() if x.suffix in suffixes and x.is_file()]
        return tuple((str(x), s.st_size, s.st_mtime_ns) for x in sorted(files) for s in [x.stat()])
    except OSError:
        return ()


@lru_cache(maxsize=64)
def digest_files(stamps: tuple[FileStamp, ...], full_bytes: int) -> str:
    """SHA-256 (hex) over names and contents; contents are sampled if all files together exceed ``full_bytes``.

    Remembered per process; the stamps in the arguments see to it that changed files are read again.

    Raises:
        OSError: A file cannot be read.
    """
    digest = hashlib.sha256()
    sampled = sum(size for _, size, _ in stamps) > full_bytes
    for name, size, _ in stamps:
        _add(digest, Path(name).name.encode(), size.to_bytes(8, "little"))
        with open(name, "rb", buffering=0) as file:
            if sampled:
                _add_samples(digest, file.fileno(), size, name, MAX_READS // len(stamps))
            else:
                _add(digest, hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _add(digest: Any, *parts: bytes) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)


def _add_samples(digest: Any, fd: int, size: int, name: str, reads: int) -> None:
    if name.endswith(".safetensors"):
        header = os.pread(fd, min(int.from_bytes(os.pread(fd, 8, 0), "little"), MAX_HEADER_BYTES), 8)
        _add(digest, header)
        _add(digest, *(os.pread(fd, TENSOR_SAMPLE_BYTES, at) for at in _tensor_middles(header, reads)))
    samples = max(2, min(SAMPLES_PER_FILE, reads))
    last = max(0, size - SAMPLE_BYTES)
    _add(digest, *(os.pread(fd, SAMPLE_BYTES, last * i // (samples - 1)) for i in range(samples)))


def _tensor_middles(header: bytes, reads: int) -> Iterator[int]:
    """File offsets in the middle of the tensors; evenly chosen ones if there are more than ``reads``."""
    try:
        tensors = json.loads(header)
        spans = sorted(entry["data_offsets"] for name, entry in tensors.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise OSError(f"not a safetensors header. reason={exc}") from exc
    start = 8 + len(header)
    for begin, end in _evenly(spans, reads):
        yield start + max(begin, (begin + end - TENSOR_SAMPLE_BYTES) // 2)


def _evenly(items: Sequence[Any], limit: int) -> Iterable[Any]:
    if len(items) <= limit:
        return items
    return (items[i * len(items) // limit] for i in range(limit))
