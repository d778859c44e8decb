"""A CUDA on the CPU for tests: ``fake_cuda.c``, compiled when it is first asked for."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kit.missing import missing
from tiered_kv.chunks.cuda import Cuda


class FakeCuda:
    """The library, and what only a test may ask it.

    Attributes:
        path: Of the library: runtime and driver in one.
        cuda: The bindings, as the package uses them.
        library: For the calls that begin with ``fake_``.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.library = ctypes.CDLL(self.path)
        self.library.fake_is_registered.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self.library.fake_registered_in.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self.cuda = Cuda(self.path, self.path)

    @property
    def registrations(self) -> int:
        """How many ranges are registered now."""
        return int(self.library.fake_registrations())

    def is_registered(self, address: int, size_bytes: int, device: int = -1) -> bool:
        """Whether every byte of a range is registered, by a thread of this device (-1: of any)."""
        return bool(self.library.fake_is_registered(address, size_bytes, device))

    def registered_in(self, address: int, size_bytes: int) -> int:
        """How many registrations touch a range."""
        return int(self.library.fake_registered_in(address, size_bytes))

    def capture_graphs(self, *, in_progress: bool) -> None:
        """A thread captures a graph: calls of threads that are not relaxed are refused meanwhile."""
        self.library.fake_set_capturing(in_progress)

    def keep_registrations(self, *, all_of_them: bool) -> None:
        """Refuse to end any registration."""
        self.library.fake_keep_registrations(all_of_them)

    def refuse_after(self, registrations: int) -> None:
        """Take so many more registrations and no others; negative: all of them."""
        self.library.fake_refuse_after(registrations)


@pytest.fixture(scope="session")
def fake_cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled library."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        missing("copies of a GPU cannot be tested", "no C compiler for the fake CUDA")
    path = tmp_path_factory.mktemp("cuda") / "libcudart.so.fake"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", path, source, "-lpthread"], check=True)
    return path


@pytest.fixture
def fake_cuda(fake_cuda_library: Path, tmp_path: Path) -> FakeCuda:
    """A copy per test, which is a library of its own: another test's registrations are not in it."""
    return FakeCuda(Path(shutil.copy(fake_cuda_library, tmp_path)))
