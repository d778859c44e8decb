"""Memory over all sockets: what is read of the machine, and what the kernel is asked for. Not run on two nodes."""

import ctypes
import platform
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.chunks import arena as arena_module
from tiered_kv.chunks import numa
from tiered_kv.chunks.arena import Arena, create_slabs
from tiered_kv.chunks.numa import interleaved, memory_nodes

DEFAULT, BIND, INTERLEAVE = 0, 2, 3

pytestmark = pytest.mark.skipif(platform.machine() not in numa._CALLS, reason="no numbers of the system calls")


def machine(root: Path, **lists: str) -> Path:
    for name, text in lists.items():
        (root / name).write_text(text + "\n")
    return root


class Kernel:
    """Takes the two calls as the kernel does, and keeps what they say."""

    def __init__(self, mode: int = DEFAULT, *, refuses: bool = False) -> None:
        self.mode, self.refuses = mode, refuses
        self.asked: list[tuple[int, list[int]]] = []
        self._set, self._get = numa._CALLS[platform.machine()]

    def __call__(self, number: int, *arguments: Any) -> int:
        if number == self._get:
            arguments[0]._obj.value = self.mode
            return 0
        assert number == self._set
        if self.refuses:
            return -1
        self.mode, mask, bits = arguments
        nodes = [] if mask is None else [n for n in range(bits.value - 1) if mask[n // 64] >> n % 64 & 1]
        self.asked.append((self.mode, nodes))
        return 0


def test_memory_is_taken_from_all_sockets_and_then_as_before(tmp_path: Path) -> None:
    nodes = machine(tmp_path, online="0-2,65", has_cpu="0-1,65", has_memory="0-2,65")
    assert memory_nodes(nodes) == [0, 1, 65], "the memory of a GPU has no processors"
    kernel = Kernel()
    with interleaved(nodes, kernel):
        assert kernel.asked == [(INTERLEAVE, [0, 1, 65])]
    assert kernel.asked[1:] == [(DEFAULT, [])]


def test_the_policy_ends_with_an_error(tmp_path: Path) -> None:
    nodes, kernel = machine(tmp_path, online="0-1"), Kernel()
    with pytest.raises(MemoryError), interleaved(nodes, kernel):
        raise MemoryError
    assert kernel.mode == DEFAULT


@pytest.mark.parametrize("lists", [{}, {"online": "0"}, {"online": "0-1", "has_cpu": "0"}, {"online": "none"}])
def test_nothing_is_asked_for_on_one_node(tmp_path: Path, lists: dict[str, str]) -> None:
    kernel = Kernel()
    with interleaved(machine(tmp_path, **lists), kernel):
        pass
    assert kernel.asked == []


def test_a_policy_of_the_operator_stays(tmp_path: Path) -> None:
    kernel = Kernel(BIND)
    with interleaved(machine(tmp_path, online="0-1"), kernel):
        pass
    assert kernel.asked == [] and kernel.mode == BIND


def test_a_kernel_that_refuses_costs_nothing(tmp_path: Path) -> None:
    kernel = Kernel(refuses=True)
    with interleaved(machine(tmp_path, online="0-1"), kernel):
        pass
    assert kernel.asked == []


def test_this_kernel_takes_the_calls(tmp_path: Path) -> None:
    """With the numbers and the arguments as they are, on the node there is; a list of two is enough to try it."""
    mode = ctypes.c_int(-1)
    _, get_policy = numa._CALLS[platform.machine()]
    call = numa._syscall()

    def asked() -> int:
        if call(get_policy, ctypes.byref(mode), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0)) != 0:
            pytest.skip("this kernel has no policies of memory")
        return mode.value

    if asked() != DEFAULT:
        pytest.skip("this process has a policy")
    with interleaved(machine(tmp_path, online="0-1")):
        assert asked() == INTERLEAVE
    assert asked() == DEFAULT


def test_a_slab_gets_its_memory_within_the_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes, kernel, seen = machine(tmp_path, online="0-1"), Kernel(), []
    monkeypatch.setattr(arena_module, "interleaved", lambda: interleaved(nodes, kernel))
    fallocate, populate = arena_module.os.posix_fallocate, Arena._populate

    def fallocate_noted(*arguments: Any) -> None:
        seen.append(kernel.mode)
        fallocate(*arguments)

    def populate_noted(*arguments: Any) -> None:
        seen.append(kernel.mode)
        populate(*arguments)

    monkeypatch.setattr(arena_module.os, "posix_fallocate", fallocate_noted)
    monkeypatch.setattr(Arena, "_populate", populate_noted)
    arena = Arena(create_slabs(1))
    arena.allocate(0, 4096)
    assert seen == [INTERLEAVE, INTERLEAVE] and kernel.mode == DEFAULT
    arena.close()
