"""What one directory has: key, size and time of each blob's file, and the names of whatever else is there.

Most of a listing's time is one ``stat`` for each file, which one thread cannot share with others: Python's lock changes
hands at each. So this file is a program, too: it reads directories that are named on its standard input and writes what
they have, packed, and ``read_ahead.py`` runs some at once. For that it imports nothing of the package, and starts in 10
ms. For each directory::

    0   4    how many files follow, little-endian
    4   4    bytes of the names behind them
    8   32   one file: key 16 | bytes it takes of the disk u64 | when it was written, seconds since 1970, f64
    ...      the other names, each with a NUL behind it
"""

import os
import stat
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

KEY_DIGITS: Final = 32
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_HEAD: Final = struct.Struct("<II")
_FILE: Final = struct.Struct("<16sQd")


class Entries(NamedTuple):
    """What a directory has.

    Attributes:
        files: Regular files with the name of a blob: key, bytes that it takes of the disk, and when it was written,
            seconds since 1970. Can be walked once.
        others: Names of everything else.
    """

    files: Iterable[tuple[bytes, int, float]]
    others: list[str]


def read_entries(directory: str, suffix: str) -> Entries:
    """List a directory; what vanishes meanwhile is left out.

    Args:
        suffix: Ends the name of a blob, after its key's digits.

    Raises:
        OSError: It cannot be listed.
    """
    files: list[tuple[bytes, int, float]] = []
    others: list[str] = []
    length, add, is_regular = KEY_DIGITS + len(suffix), files.append, stat.S_ISREG
    descriptor = os.open(directory, _DIRECTORY)
    try:
        # By descriptor: the kernel then looks up a name, not a path, which takes a third off.
        with os.scandir(descriptor) as entries:
            for entry in entries:
                name = entry.name
                if len(name) == length and name.endswith(suffix) and (key := _key(name)) is not None:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # evicted while it is listed: an ordinary miss
                    if is_regular(status.st_mode):
                        add((key, status.st_blocks * 512, status.st_mtime))
                        continue
                others.append(name)
    finally:
        os.close(descriptor)
    return Entries(files, others)


def _key(name: str) -> bytes | None:
    digits = name[:KEY_DIGITS]
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        return None
    return key if key.hex() == digits else None  # no capitals, no spaces


def pack(entries: Entries) -> bytes:
    """What the program writes of a directory; see the module's drawing."""
    files = [_FILE.pack(*file) for file in entries.files]
    others = b"".join(os.fsencode(name) + b"\0" for name in entries.others)
    return b"".join([_HEAD.pack(len(files), len(others)), *files, others])


def unpack(packed: bytes) -> Iterator[Entries]:
    """What the program wrote, directory by directory; less where it was cut off."""
    view, at = memoryview(packed), 0
    while at + _HEAD.size <= len(view):
        count, others_bytes = _HEAD.unpack_from(view, at)
        others_at = at + _HEAD.size + count * _FILE.size
        end = others_at + others_bytes
        if end > len(view):
            return
        names = bytes(view[others_at:end]).split(b"\0")[:-1]
        yield Entries(_FILE.iter_unpack(view[at + _HEAD.size : others_at]), [os.fsdecode(name) for name in names])
        at = end


def _main() -> None:
    """Read the directories; one that cannot be read ends it, and is read, and complained of, by whoever asked."""
    suffix = sys.argv[1]
    for directory in sys.stdin.buffer.read().split(b"\0")[:-1]:
        try:
            packed = pack(read_entries(os.fsdecode(directory), suffix))
        except OSError:
            return
        sys.stdout.buffer.write(packed)


if __name__ == "__main__":
    _main()
