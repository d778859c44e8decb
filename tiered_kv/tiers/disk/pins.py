"""Pins of a disk directory: chunks that an operator wants kept, whatever was used since.

Owns ``pins.json``::

    {"version": 1, "pins": {"<namespace>/<key>": <seconds since 1970, 0 for good>, ...}}

Written by the command line, whether or not a server runs, under ``pins.lock``; a server reads it again when it has
changed. A file that cannot be read is never overwritten: somebody's wishes are in it. A server keeps the pins that it
read before, and one that has read none yet evicts nothing.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from tiered_kv.errors import TierUnavailable
from tiered_kv.keys.naming import NAME_BYTES, BlobName
from tiered_kv.tiers.disk.files import read_small_file, replace_small_file

PINS_FILE: Final = "pins.json"
PINS_LOCK: Final = "pins.lock"
VERSION: Final = 1
BYTES_MAX: Final = 64 << 20


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    pins: dict[str, float]


def read_pins(root: Path) -> dict[BlobName, float]:
    """Pins in force and when they end, 0 for never.

    Raises:
        TierUnavailable: There is a file, and it cannot be read.
    """
    path = root / PINS_FILE
    try:
        data = read_small_file(path, BYTES_MAX)
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise TierUnavailable(f"cannot read the pins: {exc.strerror}. errno={exc.errno} path={path}") from exc
    try:
        content = msgspec.json.decode(data, type=_Content)
        if content.version != VERSION:
            raise ValueError(f"version {content.version}")
        pins = {_name(text): until_s for text, until_s in content.pins.items()}
    except (ValueError, RecursionError) as exc:
        raise TierUnavailable(f"the pins cannot be understood; mend or remove the file. path={path}: {exc}") from exc
    now_s = time.time()
    return {name: until_s for name, until_s in pins.items() if not until_s or until_s > now_s}


@contextmanager
def changing_pins(root: Path) -> Iterator[dict[BlobName, float]]:
    """The pins, to be changed in place; written at the end unless the block raises.

    Raises:
        TierUnavailable: They cannot be read or written.
    """
    try:
        lock = os.open(root / PINS_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise TierUnavailable(f"cannot lock the pins. errno={exc.errno} path={root / PINS_LOCK}") from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other commands, for milliseconds; a server never takes it
        pins = read_pins(root)
        yield pins
        _write(root, pins)
    finally:
        os.close(lock)


def _write(root: Path, pins: Mapping[BlobName, float]) -> None:
    content = _Content(VERSION, {f"{n.namespace.hex()}/{n.key.hex()}": until_s for n, until_s in pins.items()})
    try:
        # Lasting: unlike a blob, nothing gives a wish back.
        replace_small_file(root / PINS_FILE, msgspec.json.encode(content), is_lasting=True)
    except OSError as exc:
        raise TierUnavailable(f"cannot write the pins. errno={exc.errno} path={root / PINS_FILE}") from exc


def _name(text: str) -> BlobName:
    namespace, separator, key = text.partition("/")
    name = BlobName(bytes.fromhex(namespace), bytes.fromhex(key))
    if not separator or len(name.namespace) != NAME_BYTES or len(name.key) != NAME_BYTES:
        raise ValueError(f"not a chunk: {text[:100]!a}")
    return name
