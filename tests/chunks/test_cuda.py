"""The bindings of CUDA against a fake library that is as strict as the real one about what a caller can get wrong."""

import mmap
import threading

import numpy as np
import numpy.typing as npt
import pytest

from tests.kit.fake_cuda import FakeCuda
from tiered_kv.chunks import cuda as bindings
from tiered_kv.chunks.cuda import ORDER_ANY, Cuda, CudaError

SIZE = 1 << 20


@pytest.fixture
def memory() -> int:
    return int(np.frombuffer(mmap.mmap(-1, SIZE), np.uint8).ctypes.data)


def test_memory_is_registered_once_and_ends_where_it_began(fake_cuda: FakeCuda, memory: int) -> None:
    cuda = fake_cuda.cuda
    cuda.register(memory, SIZE)
    for address, size in ((memory, SIZE), (memory + 4096, 4096), (memory + SIZE - 4096, SIZE)):
        with pytest.raises(CudaError, match="cudaHostRegister failed. code=712") as raised:
            cuda.register(address, size)
        assert (raised.value.call, raised.value.code) == ("cudaHostRegister", 712)
    with pytest.raises(CudaError, match="cudaHostUnregister failed. code=713"):
        cuda.unregister(memory + 4096)
    assert fake_cuda.is_registered(memory, SIZE)
    cuda.unregister(memory)
    with pytest.raises(CudaError, match="code=713"):
        cuda.unregister(memory)
    assert fake_cuda.registrations == 0
    cuda.register(memory, SIZE)


def test_no_error_stays_in_the_thread_that_met_it(fake_cuda: FakeCuda, memory: int) -> None:
    kept: list[int] = []

    def run() -> None:
        for call in (fake_cuda.cuda.unregister, fake_cuda.cuda.set_device):
            with pytest.raises(CudaError):
                call(memory)
            kept.append(fake_cuda.library.fake_kept_error())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert kept == [0, 0]
    # The fake does keep errors, or this test could not fail.
    assert fake_cuda.library.cudaHostUnregister(None) == fake_cuda.library.fake_kept_error() == 713


def test_an_error_of_another_thread_is_left_to_it(fake_cuda: FakeCuda) -> None:
    assert fake_cuda.library.cudaHostUnregister(None) == 713
    thread = threading.Thread(target=lambda: fake_cuda.cuda.set_device(3))
    thread.start()
    thread.join()
    assert fake_cuda.library.fake_kept_error() == 713


def test_a_device_that_is_not_there_is_an_error(fake_cuda: FakeCuda) -> None:
    fake_cuda.cuda.set_device(7)
    with pytest.raises(CudaError, match="cudaSetDevice failed. code=101"):
        fake_cuda.cuda.set_device(8)


def test_capture_is_relaxed_for_the_calling_thread_alone(fake_cuda: FakeCuda) -> None:
    modes: list[int] = []

    def run() -> None:
        fake_cuda.cuda.relax_capture()
        modes.append(fake_cuda.library.fake_capture_mode())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert modes == [2]
    assert fake_cuda.library.fake_capture_mode() == 0


def batch(count: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    source = np.random.default_rng(count).integers(0, 256, 4096, dtype=np.uint8)
    return source, np.zeros_like(source), np.arange(count, dtype=np.int64) * 100


def test_a_batch_copies_every_range(fake_cuda: FakeCuda) -> None:
    assert fake_cuda.cuda.has_batch
    source, destination, at = batch(7)
    sizes = np.arange(10, 17, dtype=np.int32)  # of another width: converted, not misread
    for order in ({}, {"order": ORDER_ANY}):
        destination[:] = 0
        addresses = (at + destination.ctypes.data, at + source.ctypes.data, sizes)
        fake_cuda.cuda.copy_batch(*addresses, stream=1, **order)  # type: ignore[arg-type]
        expected = np.zeros_like(source)
        for start, size in zip(at, sizes, strict=True):
            expected[start : start + size] = source[start : start + size]
        assert (destination == expected).all()


def test_a_refused_batch_says_at_which_copy(fake_cuda: FakeCuda) -> None:
    source, destination, at = batch(3)
    addresses = (at + destination.ctypes.data, at + source.ctypes.data)
    with pytest.raises(CudaError, match="cuMemcpyBatchAsync failed. code=1 copies=3 copy=1$") as raised:
        fake_cuda.cuda.copy_batch(*addresses, np.array([1, 0, 1]), stream=1)
    assert (raised.value.call, raised.value.code) == ("cuMemcpyBatchAsync", 1)
    with pytest.raises(CudaError, match="copies=3$"):  # the default stream
        fake_cuda.cuda.copy_batch(*addresses, np.array([1, 1, 1]), stream=0)
    with pytest.raises(CudaError, match="copies=3$"):
        fake_cuda.cuda.copy_batch(*addresses, np.array([1, 1, 1]), stream=1, order=2)
    with pytest.raises(AssertionError, match="different length"):
        fake_cuda.cuda.copy_batch(*addresses, np.array([1, 1]), stream=1)


def test_a_driver_without_the_batch_is_none(fake_cuda: FakeCuda) -> None:
    fake_cuda.library.fake_set_batch(0)
    assert not Cuda(fake_cuda.path, fake_cuda.path).has_batch
    assert not Cuda(fake_cuda.path, None).has_batch
    assert not Cuda(fake_cuda.path, "libtiered_kv-no-such-driver.so").has_batch
    assert not Cuda(fake_cuda.path, "libc.so.6").has_batch


def test_the_loaded_runtime_is_found(fake_cuda: FakeCuda, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fake_cuda.path in bindings._mapped_libraries()
    # Not all of this process's: another test's fake and a real one may be among them.
    monkeypatch.setattr(bindings, "_mapped_libraries", lambda: iter(["/lib/libcudadebugger.so", fake_cuda.path]))
    Cuda.loaded().register(memory, SIZE)
    assert fake_cuda.is_registered(memory, SIZE)
    monkeypatch.setattr(bindings, "_mapped_libraries", lambda: iter([]))
    with pytest.raises(CudaError, match="no runtime of a GPU is loaded"):
        Cuda.loaded()


def test_no_runtime_or_one_without_the_calls_is_an_error(fake_cuda: FakeCuda) -> None:
    with pytest.raises(CudaError, match="cannot be used"):
        Cuda("libtiered_kv-no-such-runtime.so", None)
    with pytest.raises(CudaError, match=r"cannot be used\. library=.*hipHostRegister"):
        Cuda(fake_cuda.path, None, "hip")
