"""Digests of weight and adapter files, and stamps that differ once a file changed.

Owns stamps and digests. Must not decide the use of a digest: ``model_files.py`` names models by them, ``adapters.py``
LoRA adapters. Called in workers while vLLM starts, and by the scheduler's side for adapters.

Files up to ``full_bytes`` in all are hashed completely. Of more, these are hashed: names, sizes, the complete
safetensors headers (names, shapes and dtypes of all tensors), every byte of embeddings and output heads, 256 bytes of
every other tensor, and 256 bytes of every MiB of each file at places that follow no row or column. Formats without a
header are hashed completely as far as ``WHOLE_BYTES`` goes, and from there on 256 bytes of every 64 KiB. What this sees
and costs: docs/decisions/0023-naming-weights.md. The digest is the same on every machine; who changes what it covers
raises ``SCHEME``.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import xxhash
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

SCHEME: Final = "sha256v2"
"""Stands before every digest, so that digests of different rules never meet."""

PIECE_BYTES: Final = 256
STRIDE_BYTES: Final = 1 << 20
DENSE_STRIDE_BYTES: Final = 64 << 10
"""For formats whose header does not say which bytes are the vocabulary's."""

MAX_PIECES: Final = 1 << 18
"""Per kind and model: 256 GiB at one piece a MiB; of larger models the pieces lie farther apart."""

WHOLE_BYTES: Final = 8 << 30
"""Vocabularies hashed completely, in all; the largest of public models take 5 GB."""

SMALL_BYTES: Final = 16 << 10
"""Tensors up to this size, as norms and biases are, are hashed completely."""

MAX_HEADER_BYTES: Final = 100 << 20
"""What the safetensors library accepts as a header, too."""

BATCH_BYTES: Final = 16 << 20
BATCH_PIECES: Final = 512
READERS: Final = 16
"""Threads: a disk or network file system with nothing cached answers 16 small reads in the time of one."""

VOCABULARY_NAMES: Final = ("embed", "lm_head", "wte", "tok_", "output.weight")

CLOCK_TICK_NS: Final = 20_000_000
"""File systems note times by the kernel's tick, 4 or 10 ms: two writes within one look like one."""


class FileStamp(NamedTuple):
    """Differs once a file was written, replaced or reached by another link.

    Times can be set back, except ``ctime_ns``.
    """

    path: str
    resolved: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


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


def stamps_of(files: Iterable[str | Path]) -> tuple[FileStamp, ...]:
    """Stamps of these files, sorted by path.

    Raises:
        OSError: One of them is not there.
    """
    found = []
    for path in sorted({os.path.abspath(file) for file in files}):
        at = os.stat(path)
        found.append(FileStamp(path, os.path.realpath(path), at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino))
    return tuple(found)


def settle(stamps: Sequence[FileStamp]) -> None:
    """Wait until a later write of these files could not have their very stamps: 20 ms if one is that young, else 0."""
    age_ns = time.time_ns() - max((stamp.ctime_ns for stamp in stamps), default=0)
    if 0 <= age_ns < CLOCK_TICK_NS:
        time.sleep((CLOCK_TICK_NS - age_ns) / 1e9)


@lru_cache(maxsize=64)
def digest_files(stamps: tuple[FileStamp, ...], full_bytes: int, vocabulary: int = 0) -> str:
    """``SCHEME`` and a SHA-256 (hex) over names and contents, sampled if all files together exceed ``full_bytes``.

    Remembered per process; the stamps in the arguments see to it that changed files are read again.

    Args:
        vocabulary: Rows of the model's embedding; tensors with as many rows or columns are hashed completely.

    Raises:
        OSError: A file cannot be read.
    """
    digest = hashlib.sha256()
    if sum(stamp.size for stamp in stamps) <= full_bytes:
        for stamp in stamps:
            with open(stamp.path, "rb", buffering=0) as file:
                whole = hashlib.file_digest(file, "sha256").digest()
            _add(digest, Path(stamp.path).name.encode(), stamp.size.to_bytes(8, "little"), whole)
        return f"{SCHEME}:{digest.hexdigest()}"
    plan = _Plan(stamps, vocabulary)
    with ThreadPoolExecutor(READERS, thread_name_prefix="tiered_kv-digest") as readers:
        for stamp in stamps:
            _add(digest, Path(stamp.path).name.encode(), stamp.size.to_bytes(8, "little"))
            with open(stamp.path, "rb", buffering=0) as file:
                fd = file.fileno()
                header, spans = plan.spans(fd, stamp)
                _add(digest, header)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # or each piece would read 128 KiB ahead
                for part in readers.map(lambda batch, fd=fd: _digest_spans(fd, batch), _batches(spans)):
                    digest.update(part)
    return f"{SCHEME}:{digest.hexdigest()}"


def _add(digest: Any, *parts: bytes) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)


Span = tuple[int, int]
"""First byte in the file and length."""


class _Plan:
    """Which bytes of a model's files are hashed."""

    def __init__(self, stamps: Sequence[FileStamp], vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._whole_left = WHOLE_BYTES
        total = sum(stamp.size for stamp in stamps)
        self._stride = max(STRIDE_BYTES, -(-total // MAX_PIECES))
        self._dense_stride = max(DENSE_STRIDE_BYTES, -(-total // (4 * MAX_PIECES)))
        self._tensors = MAX_PIECES // max(1, len(stamps))

    def spans(self, fd: int, stamp: FileStamp) -> tuple[bytes, list[Span]]:
        """The file's header, if its format has one, and the spans in it."""
        if not stamp.path.endswith(".safetensors"):
            return b"", self._without_header(stamp.size)
        header = os.pread(fd, min(int.from_bytes(os.pread(fd, 8, 0), "little"), MAX_HEADER_BYTES), 8)
        return header, [*_pieces(stamp.size, self._stride), *self._of_tensors(header)]

    def _without_header(self, size: int) -> list[Span]:
        if size <= self._whole_left:
            self._whole_left -= size
            return [(0, size)]
        return [*_pieces(size, self._dense_stride), (max(0, size - PIECE_BYTES), PIECE_BYTES)]

    def _of_tensors(self, header: bytes) -> Iterator[Span]:
        try:
            tensors = json.loads(header)
            entries = sorted(
                (*entry["data_offsets"], tuple(entry["shape"]), name)
                for name, entry in tensors.items()
                if name != "__metadata__"
            )
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise OSError(f"not a safetensors header. reason={exc}") from exc
        start = 8 + len(header)
        others = []
        for begin, end, shape, name in entries:
            if self._is_vocabulary(name, shape) and end - begin <= self._whole_left:
                self._whole_left -= end - begin
                yield start + begin, end - begin
            elif self._is_vocabulary(name, shape):  # at least one piece of each row that is 8 KiB long
                yield from ((start + begin + at, size) for at, size in _pieces(end - begin, 8 << 10))
            else:
                others.append((start + begin, end - begin))
        for begin, size in _evenly(others, self._tensors):
            yield (begin, size) if size <= SMALL_BYTES else (begin + (size - PIECE_BYTES) // 2, PIECE_BYTES)

    def _is_vocabulary(self, name: str, shape: tuple[int, ...]) -> bool:
        return any(part in name for part in VOCABULARY_NAMES) or (len(shape) == 2 and self._vocabulary in shape)


def _pieces(size: int, stride: int) -> Iterator[Span]:
    """One piece in each stride. Where in it varies, or a matrix with rows of 2^n bytes would show one column only."""
    for index in range(-(-size // stride)):
        at = index * stride + index * 0x9E3779B1 % (stride - PIECE_BYTES)
        yield min(at, max(0, size - PIECE_BYTES)), PIECE_BYTES


def _batches(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Spans in lists that one thread reads at a time, long ones cut."""
    batch: list[Span] = []
    room = BATCH_BYTES
    for begin, size in spans:
        for at in range(begin, begin + size, BATCH_BYTES):
            part = min(BATCH_BYTES, begin + size - at)
            if batch and (part > room or len(batch) == BATCH_PIECES):
                yield batch
                batch, room = [], BATCH_BYTES
            batch.append((at, part))
            room -= part
    if batch:
        yield batch


def _digest_spans(fd: int, spans: Sequence[Span]) -> bytes:
    """XXH3, for its speed: a sample cannot stop an attacker who builds a model that looks like another anyway."""
    digest = xxhash.xxh3_128()
    for begin, size in spans:
        digest.update(os.pread(fd, size, begin))
    return digest.digest()


def _evenly(items: Sequence[Span], limit: int) -> Iterable[Span]:
    if len(items) <= limit:
        return items
    return (items[i * len(items) // limit] for i in range(limit))
