"""Inspect one chunk: check its blob byte for byte, and export it.

Reads the whole blob; changes nothing. Called by ``cli/inspect.py`` and ``cli/export.py``.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import safetensors

from tiered_kv.chunks.header import ParsedHeader, check_blob, read_header
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch, ConfigError, TierUnavailable
from tiered_kv.keys.naming import BlobName
from tiered_kv.ops.storage import Reader, StoredBlob

SOUND: Final = "sound"
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class BlobFinding:
    """What a blob's bytes say.

    Attributes:
        data: The blob.
        parsed: Its header, if that is sound.
        header, payload: ``sound``, or what is wrong; without a sound header the payload is ``unknown``.
    """

    data: bytes
    parsed: ParsedHeader | None
    header: str
    payload: str

    @property
    def is_sound(self) -> bool:
        return self.header == SOUND and self.payload == SOUND

    @property
    def reason(self) -> str:
        """What is wrong with it; ``sound`` if nothing is."""
        return self.payload if self.header == SOUND else self.header


def examine(storage: Reader, blob: StoredBlob) -> BlobFinding:
    """Read a blob and check it, against itself and against its name.

    Raises:
        TierUnavailable: It cannot be read, or is not there any more.
    """
    data = storage.read(blob)
    if data is None:
        raise TierUnavailable(f"the chunk was removed while it was looked at. key={blob.name.key.hex()}")
    try:
        parsed = read_header(memoryview(data))
    except (ChunkCorrupt, ChunkMismatch) as exc:
        return BlobFinding(data, None, str(exc), "unknown")
    wrong = _other_than(parsed, blob.name, has_path_of_its_own=storage.kind == "object")
    try:
        check_blob(memoryview(data))
    except ChunkCorrupt as exc:
        return BlobFinding(data, parsed, wrong or SOUND, str(exc))
    return BlobFinding(data, parsed, wrong or _refused(data) or SOUND, SOUND)


def _refused(data: bytes) -> str:
    """Why the safetensors library does not open a blob that is sound to us; empty if it does.

    The hot path reads headers by itself (fixed places, 4096 bytes of alignment, no copy); here an
    independent reader confirms that our blob is a safetensors file.
    """
    try:
        safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as exc:
        return f"safetensors does not open it: {exc}"
    return ""


def _other_than(parsed: ParsedHeader, name: BlobName, *, has_path_of_its_own: bool) -> str:
    """In what a sound header differs from the name the blob has; empty if in nothing."""
    header = parsed.header
    pairs = [
        ("namespace", name.namespace.hex(), header.record.namespace.hex()),
        ("key", name.key.hex(), header.record.key.hex()),
    ]
    if has_path_of_its_own:  # a directory's names have no ancestry: ours came from this very header
        pairs.append(("parent", name.parent.hex(), header.record.parent.hex()))
        pairs.append(("chunk_index", str(name.chunk_index), str(header.record.chunk_index)))
    return "; ".join(f"another {what} than its name says. name={a} header={b}" for what, a, b in pairs if a != b)


def is_complete(chain: Sequence[StoredBlob]) -> bool:
    """Whether a chain, deepest first, begins where its namespace does."""
    begin = chain[-1].name
    return begin.chunk_index == 0 and begin.parent == begin.namespace


def write_new(path: Path, data: bytes, *, overwrite: bool) -> None:
    """Write a file as a whole or not at all, for the owner only: KV can be turned back into the prompt.

    Raises:
        ConfigError: It is there already, or its directory is not, or it is no place for a file.
        TierUnavailable: It cannot be written.
    """
    _refuse_other_than_file(path)
    temp = path.with_name(f".tiered_kv-{secrets.token_hex(8)}.part")  # as short as any name that may be asked for
    try:
        descriptor = os.open(temp, _CREATE, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            if overwrite:
                os.replace(temp, path)
            else:
                os.link(temp, path)  # unlike a rename, it fails if the file exists by now
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temp)
    except FileExistsError as exc:
        raise ConfigError(f"the file is there already; --force overwrites it. path={path}") from exc
    except FileNotFoundError as exc:
        raise ConfigError(f"there is no such directory. path={path.parent}") from exc
    except OSError as exc:
        raise TierUnavailable(f"the file cannot be written. path={path}: {exc.strerror}") from exc


def _refuse_other_than_file(path: Path) -> None:
    """Refuse what a rename would put the file in place of: /dev/null, say, for every program of the machine."""
    if path.name in ("", ".."):
        raise ConfigError(f"that is no name of a file. path={path}")
    with contextlib.suppress(OSError):  # it is not there, or writing says why it cannot be reached
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ConfigError(f"what is there is no regular file and stays: name a file of its own. path={path}")
