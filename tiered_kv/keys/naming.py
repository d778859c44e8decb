"""Where a blob lies below a tier's root, and back: ``<namespace>/<first two digits of the key>/<key>.safetensors``.

Owns the path layout and nothing else: no root, no file system. A name is the pair (namespace digest, chunk key), 16
bytes each; ``tiers.base.BlobName`` is such a pair, which this layer may not import. Called by the tiers and the CLI.
At most 256 fan-out directories per namespace, because directories take room that the disk tier's limit has to cover.
"""

import re
from typing import Final

NAME_BYTES: Final = 16
SUFFIX: Final = ".safetensors"

_PATH = re.compile(r"([0-9a-f]{32})/([0-9a-f]{2})/(\2[0-9a-f]{30})\.safetensors")


def relative_path(name: tuple[bytes, bytes]) -> str:
    """Path of the blob ``(namespace, key)`` relative to the tier's root."""
    namespace, key = name
    if len(namespace) != NAME_BYTES or len(key) != NAME_BYTES:
        raise ValueError(f"a name is two times {NAME_BYTES} bytes. observed={len(namespace)},{len(key)}")
    digits = key.hex()
    return f"{namespace.hex()}/{digits[:2]}/{digits}{SUFFIX}"


def parse_path(path: str) -> tuple[bytes, bytes] | None:
    """Give the name whose path this is; None for anything that ``relative_path`` does not write."""
    found = _PATH.fullmatch(path)
    if found is None:
        return None
    return bytes.fromhex(found[1]), bytes.fromhex(found[3])
