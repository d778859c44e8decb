"""What one directory has: key, size and time of each blob's file, and the names of whatever else is there.

Most of a listing's time is one ``stat`` for each file, which one thread cannot share with others: Python's lock changes
hands at each. So this file is a program, too: it reads directories that are named on its standard input and writes what
they have, packed, and ``read_ahead.py`` runs some at once. For that it imports nothing of the package, and starts in 10
ms. For each directory::

    0   4    how many files follow, little-endian
    4   4    bytes of the names behind them
    8   16   key of a file; then the next key ...
        8    bytes that a file takes of the disk; then the next file's ...
        8    when a file was written, seconds since 1970, f64; then the next file's ...
    ...      the other names, each with a NUL behind it
"""

import os
import struct
import sys
from array import array
from collections.abc import Iterator
from stat import S_ISREG
from typing import Final, NamedTuple

KEY_BYTES: Final = 16
KEY_DIGITS: Final = 2 * KEY_BYTES
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_HEAD: Final = struct.Struct("<II")
_KEY: Final = struct.Struct(f"{KEY_BYTES}s")


class Entries(NamedTuple):
    """What a directory has: regular files with the name of a blob, and the rest.

    Attributes:
        packed_keys: The files' keys, one behind the other.
        sizes: Bytes that each takes of the disk.
        written_s: When each was written, seconds since 1970.
        others: Names of everything else.
    """

    packed_keys: bytes
    sizes: "array[int]"
    written_s: "array[float]"
    others: list[str]

    def keys(self) -> list[bytes]:
        """The files' keys."""
        return [key for (key,) in _KEY.iter_unpack(self.packed_keys)]

    def files(self) -> Iterator[tuple[bytes, int, float]]:
        """Key, size and time of each file."""
        return zip(self.keys(), self.sizes, self.written_s, strict=True)


def read_entries(directory: str, suffix: str) -> Entries:
    """List a directory; what vanishes meanwhile is left out.

    Args:
        suffix: Ends the name of a blob, after its key's digits.

    Raises:
        OSError: It cannot be listed.
    """
    digits, sizes, written_s, others = list[str](), array("q"), array("d"), list[str]()
    add_digits, add_size, add_time = digits.append, sizes.append, written_s.append
    length, is_regular = KEY_DIGITS + len(suffix), S_ISREG
    descriptor = os.open(directory, _DIRECTORY)
    try:
        # By descriptor: the kernel then looks up a name, not a path, which takes a third off.
        with os.scandir(descriptor) as entries:
            for entry in entries:  # nothing is called for a file but what it takes
                name = entry.name
                if len(name) == length and name.endswith(suffix):
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # evicted while it is listed: an ordinary miss
                    if is_regular(status.st_mode):
                        add_digits(name[:KEY_DIGITS])
                        add_size(status.st_blocks * 512)
                        add_time(status.st_mtime)
                        continue
                others.append(name)
    finally:
        os.close(descriptor)
    packed = _packed("".join(digits))
    if packed is None:  # not all of them are digits
        for row in reversed(range(len(digits))):
            if _packed(digits[row]) is None:
                others.append(f"{digits.pop(row)}{suffix}")
                del sizes[row], written_s[row]
        packed = bytes.fromhex("".join(digits))
    return Entries(packed, sizes, written_s, others)


def _packed(digits: str) -> bytes | None:
    """The bytes that are written so; None where they are written otherwise: no capitals, no spaces."""
    try:
        packed = bytes.fromhex(digits)
    except ValueError:
        return None
    return packed if packed.hex() == digits else None


def pack(entries: Entries) -> bytes:
    """What the program writes of a directory; see the module's drawing."""
    others = b"".join(os.fsencode(name) + b"\0" for name in entries.others)
    head = _HEAD.pack(len(entries.sizes), len(others))
    return b"".join([head, entries.packed_keys, entries.sizes.tobytes(), entries.written_s.tobytes(), others])


def unpack(packed: bytes) -> Iterator[Entries]:
    """What the program wrote, directory by directory; less where it was cut off."""
    view, at = memoryview(packed), 0
    while at + _HEAD.size <= len(view):
        count, others_bytes = _HEAD.unpack_from(view, at)
        keys_at = at + _HEAD.size
        sizes_at = keys_at + KEY_BYTES * count
        times_at = sizes_at + 8 * count
        others_at = times_at + 8 * count
        at = others_at + others_bytes
        if at > len(view):
            return
        names = bytes(view[others_at:at]).split(b"\0")[:-1]
        yield Entries(
            bytes(view[keys_at:sizes_at]),
            array("q", view[sizes_at:times_at].tobytes()),
            array("d", view[times_at:others_at].tobytes()),
            [os.fsdecode(name) for name in names],
        )


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
