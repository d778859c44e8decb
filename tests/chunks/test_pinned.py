"""Registrations of an arena against a fake driver that refuses what the real one refuses."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.fake_cuda import FakeCuda
from tiered_kv.chunks import pinned as pinned_module
from tiered_kv.chunks.arena import SLAB_BYTES, Arena, create_slabs
from tiered_kv.chunks.cuda import CudaError
from tiered_kv.chunks.pinned import PIN_REST, WINDOW_BYTES, PinnedArena, windows

PAGE = 4096
DEVICE = 3


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(create_slabs(2))
    arena.keep_pages([0, 0], is_kept=True)
    yield arena
    arena.close()


@pytest.fixture
def pinned(arena: Arena, fake_cuda: FakeCuda) -> PinnedArena:
    return PinnedArena(fake_cuda.cuda, arena, DEVICE)


def in_another_thread(call: object) -> None:
    thread = threading.Thread(target=call)  # type: ignore[arg-type]
    thread.start()
    thread.join()


def test_a_copy_is_cut_where_a_window_ends() -> None:
    assert windows(WINDOW_BYTES - 10, 10) == [slice(0, 10)]
    assert windows(WINDOW_BYTES - 10, 30) == [slice(0, 10), slice(10, 30)]
    assert windows(5 * WINDOW_BYTES, 2 * WINDOW_BYTES + 1) == [
        slice(0, WINDOW_BYTES),
        slice(WINDOW_BYTES, 2 * WINDOW_BYTES),
        slice(2 * WINDOW_BYTES, 2 * WINDOW_BYTES + 1),
    ]
    assert windows(7, 0) == []


def test_a_slab_is_registered_whole_at_its_first_use_and_not_again(
    arena: Arena, pinned: PinnedArena, fake_cuda: FakeCuda
) -> None:
    size = 2 * WINDOW_BYTES + 3 * PAGE
    arena.allocate(0, size)
    in_another_thread(lambda: pinned.pin_slab(0))
    assert fake_cuda.is_registered(arena.address(0), size, DEVICE), "for the device that copies, not for device 0"
    assert fake_cuda.registered_in(arena.address(0) + size, SLAB_BYTES - size) == 0
    assert pinned.pinned_bytes == size and pinned.pinning_s > 0
    registrations = fake_cuda.registrations
    pinned.pin_slab(0)
    pinned.pin_slab(1)  # has no memory
    assert fake_cuda.registrations == registrations


def test_no_window_is_in_two_registrations_and_no_registration_in_two_windows(
    arena: Arena, pinned: PinnedArena, fake_cuda: FakeCuda
) -> None:
    for size in (WINDOW_BYTES // 3, WINDOW_BYTES + PAGE, 3 * WINDOW_BYTES):
        arena.allocate(0, size)
        pinned.pin_slab(0)
        base = arena.address(0)
        assert fake_cuda.is_registered(base, size)
        cuts = windows(base, size)
        assert [fake_cuda.registered_in(base + cut.start, cut.stop - cut.start) for cut in cuts] == [1] * len(cuts)
        assert fake_cuda.registrations == len(cuts)


def test_ahead_of_need_only_whole_windows_are_registered(
    arena: Arena, pinned: PinnedArena, fake_cuda: FakeCuda
) -> None:
    assert not pinned.pin_some()
    base = arena.address(1)
    first = windows(base, SLAB_BYTES)[0].stop
    arena.allocate(1, first - PAGE)
    assert not pinned.pin_some()
    arena.allocate(1, first + WINDOW_BYTES + PAGE)
    assert pinned.rest_s == 0
    assert pinned.pin_some() and fake_cuda.is_registered(base, first, DEVICE)
    assert pinned.pinned_bytes == first
    assert pinned.rest_s == PIN_REST * pinned.pinning_s > 0
    assert pinned.pin_some() and not pinned.pin_some()
    assert pinned.pinned_bytes == first + WINDOW_BYTES
    pinned.pin_slab(1)
    assert fake_cuda.is_registered(base, first + WINDOW_BYTES + PAGE)


def test_a_rest_is_bounded_however_long_the_driver_took(
    arena: Arena, pinned: PinnedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_module, "PIN_REST", 1e12)
    arena.allocate(1, 2 * WINDOW_BYTES)
    assert pinned.pin_some() and pinned.rest_s == pinned_module.PIN_REST_MAX_S


def test_the_first_and_the_ahead_may_meet_in_one_slab(arena: Arena, pinned: PinnedArena, fake_cuda: FakeCuda) -> None:
    size = 8 * WINDOW_BYTES
    arena.allocate(0, size)
    threads = [threading.Thread(target=pinned.pin_slab, args=(0,)) for _ in range(4)]
    threads += [threading.Thread(target=lambda: [pinned.pin_some() for _ in range(8)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fake_cuda.is_registered(arena.address(0), size) and not pinned.is_refused
    assert pinned.pinned_bytes == size


def test_all_that_has_memory_is_registered_at_once_and_the_caller_captures_as_before(
    arena: Arena, pinned: PinnedArena, fake_cuda: FakeCuda
) -> None:
    arena.allocate(0, WINDOW_BYTES)
    arena.allocate(1, PAGE)
    pinned.pin_all()
    assert pinned.pinned_bytes == WINDOW_BYTES + PAGE
    assert fake_cuda.is_registered(arena.address(1), PAGE, DEVICE)
    assert fake_cuda.library.fake_capture_mode() == 0
    in_another_thread(lambda: (arena.allocate(1, 2 * PAGE), pinned.pin_slab(1)))
    assert fake_cuda.library.fake_capture_mode() == 0


def test_threads_that_copy_relax_capture(arena: Arena, pinned: PinnedArena, fake_cuda: FakeCuda) -> None:
    arena.allocate(0, PAGE)
    modes: list[int] = []
    in_another_thread(lambda: (pinned.pin_slab(0), modes.append(fake_cuda.library.fake_capture_mode())))
    assert modes == [2]


def test_release_ends_every_registration_and_nothing_is_registered_after(
    arena: Arena, pinned: PinnedArena, fake_cuda: FakeCuda
) -> None:
    for slab in range(2):
        arena.allocate(slab, 2 * WINDOW_BYTES)
        pinned.pin_slab(slab)
    assert fake_cuda.registrations > 0
    in_another_thread(pinned.release)
    assert fake_cuda.registrations == pinned.pinned_bytes == 0
    pinned.release()
    pinned.pin_slab(0)
    pinned.pin_all()
    assert not pinned.pin_some() and fake_cuda.registrations == 0


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_refusal_is_said_once_and_costs_nothing_else(
    arena: Arena, pinned: PinnedArena, fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture, taken: int
) -> None:
    fake_cuda.refuse_after(taken)
    arena.allocate(0, 4 * WINDOW_BYTES)
    arena.allocate(1, 4 * WINDOW_BYTES)
    for _ in range(3):
        pinned.pin_slab(0)
        pinned.pin_slab(1)
        assert not pinned.pin_some()
    pinned.pin_all()
    assert pinned.is_refused and fake_cuda.registrations == taken
    assert fake_cuda.library.fake_kept_error() == 0
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "cudaHostRegister failed. code=2" in warnings[0]
    pinned.release()
    assert fake_cuda.registrations == 0


def test_memory_that_is_registered_by_somebody_else_is_left_to_them(
    arena: Arena, pinned: PinnedArena, fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    arena.allocate(0, WINDOW_BYTES)
    fake_cuda.cuda.register(arena.address(0), PAGE)
    for _ in range(2):  # copies through it would go to pages that the driver knows, and the slab has others
        with pytest.raises(CudaError, match="registered by somebody else"):
            pinned.pin_slab(0)
    assert not pinned.pin_some() and caplog.text.count("code=712") == 1
    arena.allocate(1, PAGE)
    pinned.pin_slab(1)
    assert fake_cuda.is_registered(arena.address(1), PAGE), "the driver refused nothing but this slab"
    assert pinned.release() == set()
    assert fake_cuda.is_registered(arena.address(0), PAGE)


def test_a_refusal_at_the_start_is_said_once_for_all_slabs(
    arena: Arena, pinned: PinnedArena, fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    fake_cuda.refuse_after(0)
    for slab in range(2):
        arena.allocate(slab, PAGE)
    pinned.pin_all()
    assert pinned.is_refused and caplog.text.count("is not pinned any further") == 1


@pytest.mark.parametrize("first", ["pin_all", "pin_some", "pin_slab"])
def test_a_registration_of_somebody_else_is_found_below_every_slab_that_it_touches(
    arena: Arena, pinned: PinnedArena, fake_cuda: FakeCuda, first: str
) -> None:
    """What was mapped there before, and was registered, may have been larger than a slab."""
    for slab in range(2):
        arena.allocate(slab, 2 * WINDOW_BYTES)
        fake_cuda.cuda.register(arena.address(slab), PAGE)
    if first != "pin_slab":
        getattr(pinned, first)()
    for slab in (0, 1, 0):
        with pytest.raises(CudaError, match=f"is not copied. slab={slab}"):
            pinned.pin_slab(slab)
    assert pinned.release() == set() and fake_cuda.registrations == 2


def test_a_device_that_is_gone_is_a_refusal(
    arena: Arena, fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    pinned = PinnedArena(fake_cuda.cuda, arena, 99)
    arena.allocate(0, PAGE)
    pinned.pin_slab(0)
    assert pinned.is_refused and fake_cuda.registrations == 0
    assert "cudaSetDevice failed. code=101" in caplog.text


def test_a_driver_that_does_not_let_go_is_said_and_the_rest_is_released(
    arena: Arena, pinned: PinnedArena, fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    for slab in range(2):
        arena.allocate(slab, PAGE)
        pinned.pin_slab(slab)
    fake_cuda.cuda.unregister(arena.address(0))  # behind its back: its own call will fail
    pinned.release()
    assert fake_cuda.registrations == 0
    assert "did not let go" in caplog.text and "code=713" in caplog.text


def test_a_window_is_registered_whole_or_not_at_all_also_after_a_refusal(
    arena: Arena, pinned: PinnedArena, fake_cuda: FakeCuda
) -> None:
    """``pin_all`` saw slab 0 while it was getting its memory; the driver refuses in slab 1; slab 0 is then used."""
    arena.allocate(0, 2 << 20)
    pinned.pin_all()
    arena.allocate(0, 6 << 20)
    arena.allocate(1, 2 << 20)
    fake_cuda.refuse_after(0)
    pinned.pin_slab(1)
    pinned.pin_slab(0)
    for cut in windows(arena.address(0), 6 << 20):
        at, size = arena.address(0) + cut.start, cut.stop - cut.start
        assert fake_cuda.is_registered(at, size) or not fake_cuda.registered_in(at, size)
    assert pinned.release() == set() and pinned.pinned_bytes == 0


def test_registrations_end_beside_a_graph_capture_and_the_thread_is_as_before(
    arena: Arena, pinned: PinnedArena, fake_cuda: FakeCuda
) -> None:
    """The server may die while vLLM captures its graphs; the thread that waits for that never pinned anything."""
    arena.allocate(0, PAGE)
    pinned.pin_all()
    fake_cuda.capture_graphs(in_progress=True)
    with pytest.raises(CudaError, match="code=900"):
        fake_cuda.cuda.unregister(arena.address(0))
    modes: list[int] = []
    kept: list[set[int]] = []

    def leave() -> None:
        kept.append(pinned.release())
        modes.append(fake_cuda.library.fake_capture_mode())

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert kept == [set()] and modes == [0] and fake_cuda.registrations == 0


def test_what_the_driver_does_not_let_go_of_stays_mapped_so_that_nothing_else_gets_its_addresses(
    arena: Arena, pinned: PinnedArena, fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the next arena lies there, and is copied from and to the pages of this one."""
    for slab in range(2):
        arena.allocate(slab, PAGE)
    pinned.pin_slab(0)
    held, free = arena.address(0), arena.address(1)
    fake_cuda.keep_registrations(all_of_them=True)
    assert pinned.release() == {0} and "slabs_left_mapped=1" in caplog.text
    assert pinned.release() == {0}, "who unmaps may have to try again"
    arena.close(left_mapped={0})
    mapped = Path("/proc/self/maps").read_text()
    assert f"{held:x}-" in mapped and f"{free:x}-" not in mapped
