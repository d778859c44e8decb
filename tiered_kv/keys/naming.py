"""Where a blob lies below a tier's root, and back.

::

    on disk             <namespace>/<kk>/<key>.safetensors
    in an object store  <namespace>/<kk>/<key>.<depth>.<parent>.safetensors

``kk`` are the first two hex digits of the key, ``depth`` is the chunk's position in its prefix. An object's name tells
its ancestry because a LIST is all that whoever cleans a bucket up gets to see: evicting a suffix before its prefix, and
finding chunks whose parent is gone, must not take a GET per object. At most 256 fan-out directories per namespace,
because on disk directories take room that the tier's limit has to cover.

Owns the path layout and nothing else: no root, no file system. Called by the tiers and the CLI.
"""

import re
from typing import Final, Self

import msgspec

from tiered_kv.keys.chunk_record import ChunkRecord

NAME_BYTES: Final = 16
SUFFIX: Final = ".safetensors"
DEPTH_MAX: Final = 10**7 - 1
"""Positions are written with seven digits: sorted by name, the objects of one chain lie in order."""

_PATH = re.compile(r"([0-9a-f]{32})/([0-9a-f]{2})/(\2[0-9a-f]{30})\.safetensors")
_OBJECT_PATH = re.compile(r"([0-9a-f]{32})/([0-9a-f]{2})/(\2[0-9a-f]{30})\.([0-9]{7})\.([0-9a-f]{32})\.safetensors")


class BlobName(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The name of a blob in every tier; equal if namespace and key are.

    A million are made to list a directory, and one for each chunk of a lookup.

    Attributes:
        namespace: Digest of the namespace, 16 bytes.
        key: Key of the chunk, 16 bytes.
        parent: Key of the chunk before it; the namespace digest for the first. Empty where it is not known, e.g. for a
            file on disk that was not opened yet; such a blob has no object path.
        chunk_index: Position of the chunk in its prefix.
    """

    namespace: bytes
    key: bytes
    parent: bytes = b""
    chunk_index: int = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlobName):
            return NotImplemented
        return self.namespace == other.namespace and self.key == other.key

    def __ne__(self, other: object) -> bool:  # a struct has one of its own, which compares identities
        return not self == other

    def __hash__(self) -> int:
        return hash((self.namespace, self.key))

    @classmethod
    def of(cls, record: ChunkRecord) -> Self:
        """The name of a chunk's blob, with its ancestry."""
        return cls(record.namespace, record.key, record.parent, record.chunk_index)

    def is_whole_name_of(self, record: ChunkRecord) -> bool:
        """Whether this is the chunk's name and tells its ancestry right."""
        return self == BlobName.of(record) and (self.parent, self.chunk_index) == (record.parent, record.chunk_index)


def relative_path(name: BlobName) -> str:
    """Path of a blob relative to the root of a disk tier."""
    _check(name.namespace, name.key)
    digits = name.key.hex()
    return f"{name.namespace.hex()}/{digits[:2]}/{digits}{SUFFIX}"


def parse_path(path: str) -> BlobName | None:
    """The name of a path, without its ancestry; None for a path that ``relative_path`` does not write."""
    found = _PATH.fullmatch(path)
    if found is None:
        return None
    return BlobName(bytes.fromhex(found[1]), bytes.fromhex(found[3]))


def object_path(name: BlobName) -> str:
    """Path of a blob relative to the root of an object store."""
    _check(name.namespace, name.key, name.parent)
    if not 0 <= name.chunk_index <= DEPTH_MAX:
        raise ValueError(f"chunk index out of range. observed={name.chunk_index} max={DEPTH_MAX}")
    digits = name.key.hex()
    return f"{name.namespace.hex()}/{digits[:2]}/{digits}.{name.chunk_index:07d}.{name.parent.hex()}{SUFFIX}"


def parse_object_path(path: str) -> BlobName | None:
    """The name of a path; None for a path that ``object_path`` does not write."""
    found = _OBJECT_PATH.fullmatch(path)
    if found is None:
        return None
    return BlobName(bytes.fromhex(found[1]), bytes.fromhex(found[3]), bytes.fromhex(found[5]), int(found[4]))


def _check(*parts: bytes) -> None:
    if any(len(part) != NAME_BYTES for part in parts):
        observed = ",".join(str(len(part)) for part in parts)
        raise ValueError(f"every part of a name has {NAME_BYTES} bytes. observed={observed}")
