"""Objects as files of a directory that several machines mount (NFS, Lustre, CephFS).

Owns how a file is published: written under another name, then renamed, or linked where nothing may be replaced, so a
reader never sees half of it. Files are 0600, directories 0700. Called by ``tiers/object/store.py`` only.
"""

import contextlib
import errno
import logging
import os
import re
import socket
import stat
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Final

from tiered_kv.tiers.disk.files import is_own_file
from tiered_kv.tiers.object.errors import OtherFileSystem
from tiered_kv.tiers.object.medium import CallRunner, Deadline, ListPage, Medium, ObjectInfo, check_size

logger = logging.getLogger(__name__)

TEMPORARY: Final = "_tiered_kv/tmp"
STALE_S: Final = 3600.0
"""Age of a temporary file whose writer is gone: no write takes that long, its deadline is seconds."""

_NAME = re.compile(rf"{TEMPORARY}/([A-Za-z0-9_-]{{1,32}}-[0-9]{{1,10}}-)?[0-9a-f]{{32}}")


def is_own_temporary(path: str) -> bool:
    """Whether a path is that of a write in flight, or of the probe for the file system's clock."""
    return _NAME.fullmatch(path) is not None


class SharedDirectory(Medium):
    """A medium in a mounted directory.

    Threads: any; each call runs in a thread of its own, because a mount that is gone blocks forever.
    """

    def __init__(self, root: str, timeout_s: float) -> None:
        self._root = root.rstrip("/")
        self._timeout_s = timeout_s
        self._runner = CallRunner(timeout_s)
        self._sweep_lock = threading.Lock()
        self._next_sweep_s = 0.0
        self._found: tuple[int, int] | None = None  # number of its file system, and of its directory for writes

    def get(self, path: str, length: int | None, size_max: int | None) -> bytes:
        return self._runner.run(self._get, path, length, size_max)

    def put(self, path: str, data: bytes | memoryview, only_if_absent: bool) -> None:
        self._runner.run(self._put, path, bytes(data), only_if_absent, Deadline(self._timeout_s))

    def head(self, path: str) -> ObjectInfo:
        return self._runner.run(self._head, path)

    def page(self, prefix: str, cursor: object | None) -> ListPage:
        return self._runner.run(self._page, prefix, cursor)

    def delete(self, paths: Sequence[str]) -> None:
        self._runner.run(self._delete, paths)

    def close(self) -> None:
        """Nothing is held open between calls."""

    def _get(self, path: str, length: int | None, size_max: int | None) -> bytes:
        with self._own_answer(), open(self._full(path), "rb") as file:
            if length is not None:
                return file.read(length)
            check_size(path, os.fstat(file.fileno()).st_size, size_max)
            return file.read()

    def _put(self, path: str, data: bytes, only_if_absent: bool, deadline: Deadline) -> None:
        self._refuse_another_file_system()
        self._sweep_now_and_then()
        place = self._full(path)
        self._make_directories(os.path.dirname(path))
        if self._found is None:
            self._note(os.stat(self._full(TEMPORARY)))
        host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:32]
        temporary = self._full(f"{TEMPORARY}/{host}-{os.getpid()}-{uuid.uuid4().hex}")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            deadline.wait_s(0)  # a mount that hung: whoever asked was told so, and counts on nothing coming later
            if only_if_absent:
                _link(temporary, place)
            else:
                os.replace(temporary, place)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)

    def _head(self, path: str) -> ObjectInfo:
        with self._own_answer():
            found = os.stat(self._full(path))
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(path)
        return ObjectInfo(path, found.st_size, found.st_mtime)

    def _page(self, prefix: str, cursor: object | None) -> ListPage:
        """One directory per page: the cursor holds those still to be read."""
        self._refuse_another_file_system()
        pending = list(cursor) if isinstance(cursor, tuple) else [prefix.rpartition("/")[0]]
        directory = pending.pop()
        objects: list[ObjectInfo] = []
        nothing = FileNotFoundError, NotADirectoryError  # the other: the path goes on below an object
        with contextlib.suppress(*nothing), self._own_answer(), os.scandir(self._full(directory)) as entries:
            for entry in entries:
                path = f"{directory}/{entry.name}" if directory else entry.name
                with contextlib.suppress(FileNotFoundError):  # deleted between the listing and here
                    if entry.is_dir(follow_symlinks=False):
                        if path != TEMPORARY and (path.startswith(prefix) or prefix.startswith(f"{path}/")):
                            pending.append(path)
                    elif path.startswith(prefix) and entry.is_file(follow_symlinks=False):
                        found = entry.stat(follow_symlinks=False)
                        objects.append(ObjectInfo(path, found.st_size, found.st_mtime))
        return ListPage(sorted(objects, key=lambda info: info.path), tuple(pending) or None)

    def _delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            with contextlib.suppress(FileNotFoundError), self._own_answer():
                os.unlink(self._full(path))

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    @contextlib.contextmanager
    def _own_answer(self) -> Iterator[None]:
        """That something is not there is the directory's word only while it is where it was."""
        try:
            yield
        except FileNotFoundError:
            self._refuse_another_file_system()
            raise

    def _refuse_another_file_system(self) -> None:
        """Take what lies below a mount that went away for nothing of ours: it is this machine's own disk.

        Nobody limits what is written there, and what is not there would be forgotten.

        Raises:
            OtherFileSystem: The directory is not where it was found.
        """
        # The root first: the directory for writes changes all the time, and asking for it costs the network.
        if self._found is None or self._device_of_root() == self._found[0]:
            return
        try:
            self._note(os.stat(self._full(TEMPORARY)))
        except FileNotFoundError:
            raise self._other_file_system() from None

    def _device_of_root(self) -> int | None:
        """Number of the file system on which the directory is or would be made; None: on none."""
        for place in (self._root, os.path.dirname(self._root)):
            with contextlib.suppress(FileNotFoundError):
                return os.stat(place).st_dev
        return None

    def _note(self, writes: os.stat_result) -> None:
        """Note where the directory for writes is.

        A mount that comes back may have another number, and has our directory by its own number; what an earlier server
        left below the mount has another.

        Raises:
            OtherFileSystem: It is another one.
        """
        if self._found is not None and writes.st_ino != self._found[1]:
            raise self._other_file_system()
        self._found = writes.st_dev, writes.st_ino

    def _other_file_system(self) -> OtherFileSystem:
        return OtherFileSystem(errno.ESTALE, "it is on another file system than before", self._root)

    def _make_directories(self, path: str) -> None:
        """Make what is missing below the root. Of the root only its last part: a mount that is not there stays so."""
        for below in (TEMPORARY, path):
            place = self._root
            if not os.path.isdir(self._full(below)):
                for part in ("", *below.split("/")):
                    place = f"{place}/{part}" if part else place
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(place, 0o700)

    def _sweep_now_and_then(self) -> None:
        """Remove what dead writers of this user left, at most once an hour; what is called otherwise is not ours."""
        with self._sweep_lock:
            if time.monotonic() < self._next_sweep_s:
                return
            self._next_sweep_s = time.monotonic() + STALE_S
        directory = self._full(TEMPORARY)
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(directory)
            if not names:
                return
            sample = self._sample(directory)
            for name in names:
                place = f"{directory}/{name}"
                with contextlib.suppress(FileNotFoundError):
                    found = os.lstat(place)
                    is_old = sample.st_mtime - found.st_mtime > STALE_S
                    if is_old and is_own_temporary(f"{TEMPORARY}/{name}") and is_own_file(found, (sample.st_uid,)):
                        os.unlink(place)
                        logger.info("removed: a write that was cut off. path=%s", place)

    def _sample(self, directory: str) -> os.stat_result:
        """A file that is written now: its time is that of the file system's clock, from which ours may be hours off,
        and its owner is who we are there, which a mount may map."""
        probe = f"{directory}/{uuid.uuid4().hex}"
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            return os.lstat(probe)
        finally:
            os.unlink(probe)


def _link(temporary: str, place: str) -> None:
    """Publish unless the name is taken. NFS may repeat a request and refuse its own link: then there are two names."""
    try:
        os.link(temporary, place)
    except FileExistsError:
        if os.stat(temporary).st_nlink < 2:
            raise
