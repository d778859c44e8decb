"""fsspec's memory file system as a medium: the objects of this process, for tests.

Owns how it is called within a deadline. Called by ``store.py`` only.
"""

import contextlib
import datetime
import threading
from collections.abc import Sequence
from typing import Any

from tiered_kv.location import Location
from tiered_kv.tiers.object.medium import CallRunner, ListPage, Medium, ObjectInfo, check_size


def open_memory(location: Location, timeout_s: float) -> Medium:
    """The objects below a name."""
    import fsspec  # noqa: PLC0415  # 0.15 s that processes without an object store need not wait for

    return MemoryMedium(fsspec.filesystem("memory", skip_instance_cache=True), location.path, timeout_s)


class MemoryMedium(Medium):
    """Objects in this process; each call runs in a thread of its own, as those of a mount do."""

    _create_lock = threading.Lock()
    """The file system looks and then writes: this makes its create atomic."""

    def __init__(self, filesystem: Any, root: str, timeout_s: float) -> None:
        self._fs = filesystem
        self._root = root.strip("/")
        self._runner = CallRunner(timeout_s)

    def get(self, path: str, length: int | None, size_max: int | None) -> bytes:
        limits = {} if length is None else {"start": 0, "end": length}
        data = self._call("cat_file", self._full(path), **limits)
        check_size(path, len(data), size_max)
        return bytes(data)

    def put(self, path: str, data: bytes | memoryview, only_if_absent: bool) -> None:
        whole = bytes(data)  # a call that was given up goes on with it
        with self._create_lock if only_if_absent else contextlib.nullcontext():
            mode = {"mode": "create"} if only_if_absent else {}
            self._call("pipe_file", self._full(path), whole, **mode)

    def head(self, path: str) -> ObjectInfo:
        found = self._call("info", self._full(path))
        if found["type"] == "directory":
            raise FileNotFoundError(path)
        return ObjectInfo(path, int(found["size"]), _modified_s(found["created"]))

    def page(self, prefix: str, cursor: object | None) -> ListPage:
        """One directory per page: the cursor holds those still to be read."""
        pending = list(cursor) if isinstance(cursor, tuple) else [prefix.rpartition("/")[0]]
        directory = pending.pop()
        try:
            found = self._call("ls", self._full(directory), detail=True)
        except FileNotFoundError:
            found = []
        objects: list[ObjectInfo] = []
        for item in found:
            path = str(item["name"]).strip("/").removeprefix(f"{self._root}/").rstrip("/")
            if item["type"] == "directory":
                if path != directory and (path.startswith(prefix) or prefix.startswith(f"{path}/")):
                    pending.append(path)
            elif path.startswith(prefix):
                objects.append(ObjectInfo(path, int(item["size"]), _modified_s(item["created"])))
        return ListPage(sorted(objects, key=lambda info: info.path), tuple(pending) or None)

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                self._call("rm_file", self._full(path))

    def close(self) -> None:
        """Nothing to give back."""

    def _call(self, method: str, *args: object, **options: object) -> Any:
        return self._runner.run(lambda: getattr(self._fs, method)(*args, **options))

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root


def _modified_s(created: datetime.datetime | float) -> float:
    """A file's ``info`` tells a datetime, a list seconds."""
    return created.timestamp() if isinstance(created, datetime.datetime) else float(created)
