"""Slabs as two processes map them: memory is there before it is used, and nobody takes more than was given."""

import errno
import mmap
import os
import resource
from pathlib import Path

import pytest

from tests.kit.limits import lowest_free
from tiered_kv.chunks import arena as arena_module
from tiered_kv.chunks.arena import CLEAR_STEP_BYTES, POPULATE_STEP_BYTES, SLAB_BYTES, Arena, create_slabs
from tiered_kv.errors import CapacityExceeded, ConfigError

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


@pytest.mark.parametrize(
    ("limit", "room", "named"),
    [(resource.RLIMIT_FSIZE, SLAB_BYTES - 1, "ulimit -f"), (resource.RLIMIT_NOFILE, 8, "-n")],
)
def test_a_limit_that_does_not_allow_slabs_is_named(limit: int, room: int, named: str) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    before = resource.getrlimit(limit)
    wanted = room + lowest_free() if limit == resource.RLIMIT_NOFILE else room
    try:
        resource.setrlimit(limit, (wanted, before[1]))
        with pytest.raises(ConfigError, match=rf"cannot make the host arena; raise the limit of .*{named}"):
            Arena(create_slabs(6))
    finally:
        resource.setrlimit(limit, before)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_memory_that_is_given_is_mapped_here_at_once() -> None:
    arena = Arena(create_slabs(1))
    arena.allocate(0, SIZE)
    assert mapped_bytes(arena) == SIZE
    arena.close()


def test_a_slab_gets_its_memory_in_steps_between_which_others_can_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step keeps every thread of the process from mapping anything, the one that answers lookups among them."""
    populate, steps = Arena._populate, []

    def noted(arena: Arena, slab: int, start: int, size_bytes: int, advice: int) -> None:
        steps.append((start, size_bytes))
        populate(arena, slab, start, size_bytes, advice)

    monkeypatch.setattr(Arena, "_populate", noted)
    arena = Arena(create_slabs(1))
    arena.allocate(0, SIZE)
    assert max(size for _, size in steps) == CLEAR_STEP_BYTES <= 1 << 20
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


def memory(arena: Arena) -> list[int]:
    return [os.fstat(fd).st_blocks * 512 for fd in arena.slab_fds]


def test_pages_that_are_kept_are_neither_taken_nor_exchanged() -> None:
    arena = Arena(create_slabs(1))
    arena.allocate(0, 8 * PAGE)
    arena.keep_pages([8 * PAGE], is_kept=True)
    with arena.view(0, 7 * PAGE, 4) as last:
        last[:] = b"kept"
    arena.allocate(0, 2 * PAGE)
    arena.allocate(0, 9 * PAGE)
    assert memory(arena) == [9 * PAGE]
    with arena.view(0, 7 * PAGE, 4) as last:
        assert bytes(last) == b"kept"
    arena.keep_pages([9 * PAGE], is_kept=False)
    arena.allocate(0, 2 * PAGE)
    assert memory(arena) == [2 * PAGE]
    arena.close()


def test_what_a_slab_has_beyond_its_size_is_given_back_before_pages_are_kept() -> None:
    arena = Arena(create_slabs(3))
    for slab in range(3):
        arena.allocate(slab, 8 * PAGE)
    arena.keep_pages([8 * PAGE, 3 * PAGE, 0], is_kept=True)
    assert memory(arena) == [8 * PAGE, 3 * PAGE, 0]
    arena.keep_pages([8 * PAGE, 0, 0], is_kept=False)
    assert memory(arena) == [8 * PAGE, 0, 0]
    arena.close()


def test_a_slab_that_gets_no_more_memory_keeps_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(create_slabs(1))
    arena.allocate(0, 4 * PAGE)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    for is_kept, left in ((True, 4 * PAGE), (False, 0)):
        arena.keep_pages([4 * PAGE], is_kept=is_kept)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", refuse)
            with pytest.raises(CapacityExceeded):
                arena.allocate(0, 8 * PAGE)
        assert memory(arena) == [left]
    arena.close()


def test_what_another_process_brought_back_while_it_was_taken_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker maps a step of a slab at the moment at which the server takes that memory for another slot size."""
    arena = Arena(create_slabs(1))
    arena.allocate(0, 8 * PAGE)
    worker = Arena([os.dup(arena.slab_fds[0])])
    fallocate = os.posix_fallocate

    def meanwhile(fd: int, start: int, size_bytes: int) -> None:
        worker._populate(0, 0, 8 * PAGE, 22)  # it had asked for the size before
        assert memory(arena) == [8 * PAGE], "brought back"
        fallocate(fd, start, size_bytes)

    monkeypatch.setattr(os, "posix_fallocate", meanwhile)
    arena.allocate(0, 2 * PAGE)
    assert memory(arena) == [2 * PAGE]
    worker.close()
    arena.close()


def test_pages_are_kept_also_where_giving_some_back_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks again, and the worker that pins has the slabs by then."""
    arena = Arena(create_slabs(1))
    arena.allocate(0, SIZE)

    def refuse(*_: object) -> None:
        raise OSError(errno.EINTR, "interrupted")

    with monkeypatch.context() as patched:
        patched.setattr(arena_module, "_punch_hole", refuse)
        with pytest.raises(OSError, match="interrupted"):
            arena.keep_pages([0], is_kept=True)
    arena.allocate(0, PAGE)
    assert arena.memory_bytes(0) == SIZE
    arena.close()


def test_a_forked_child_lets_go_of_all_but_what_it_looks_at_also_where_the_parent_could_not_close() -> None:
    arena = Arena(create_slabs(3))
    fds = list(arena.slab_fds)
    with arena.view(1, 0, 16) as looked_at:
        with pytest.raises(BufferError):
            arena.close()
        arena.forget_after_fork()
        assert looked_at == bytes(16)
    assert not arena.slab_fds and not any(Path(f"/proc/self/fd/{fd}").exists() for fd in fds)
    arena.forget_after_fork()
    arena.close()
