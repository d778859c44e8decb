"""Slabs as two processes map them: memory is there before it is used, and nobody takes more than was given."""

import mmap
import os
from pathlib import Path

from tiered_kv.chunks.arena import POPULATE_STEP_BYTES, Arena, create_slabs

PAGE = mmap.PAGESIZE
SIZE = 2 * POPULATE_STEP_BYTES + 3 * PAGE


def mapped_bytes(arena: Arena) -> int:
    """What this process has mapped of a slab's memory, of all mappings of it."""
    inode = str(os.fstat(arena.slab_fds[0]).st_ino)
    total_kib, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:  # a mapping begins: addresses, permissions, offset, device, inode, name
            is_ours = words[4] == inode and "memfd:tiered_kv-slab" in line
        elif is_ours and words[0] == "Rss:":
            total_kib += int(words[1])
    return total_kib << 10


def test_memory_that_is_given_is_mapped_here_at_once() -> None:
    arena = Arena(create_slabs(1))
    arena.allocate(0, SIZE)
    assert mapped_bytes(arena) == SIZE
    arena.close()


def test_another_process_maps_what_was_given_and_takes_no_more() -> None:
    arena = Arena(create_slabs(1))
    arena.allocate(0, SIZE)
    other = Arena([os.dup(arena.slab_fds[0])])
    steps = 0
    while other.populate_some():
        steps += 1
    assert steps == 3
    assert mapped_bytes(other) == 2 * SIZE, "both mappings of this process"
    assert os.fstat(other.slab_fds[0]).st_blocks * 512 == SIZE
    other.close()
    arena.close()


def test_slabs_without_memory_stay_so() -> None:
    arena = Arena(create_slabs(2))
    assert not arena.populate_some()
    arena.allocate(1, PAGE)
    assert arena.populate_some()
    assert not arena.populate_some()
    assert [os.fstat(fd).st_blocks * 512 for fd in arena.slab_fds] == [0, PAGE]
    arena.close()


def test_slab_that_grows_later_is_mapped_then() -> None:
    arena = Arena(create_slabs(1))
    arena.allocate(0, PAGE)
    while arena.populate_some():
        pass
    arena.allocate(0, 4 * PAGE)
    assert arena.populate_some()
    assert not arena.populate_some()
    arena.close()
