"""Any other fsspec file system as a medium: Google, Azure, memory.

Owns how a file system of fsspec is called within a deadline. Called by ``store.py`` only.
"""

import contextlib
import datetime
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tiered_kv.location import Location
from tiered_kv.tiers.object.errors import is_missing
from tiered_kv.tiers.object.medium import (
    CallRunner,
    ListPage,
    Medium,
    ObjectInfo,
    check_expected,
    check_size,
    run_on_loop,
)


def open_filesystem(location: Location, timeout_s: float) -> Medium:
    """The file system of a location; nothing is asked of it yet."""
    import fsspec  # noqa: PLC0415  # 0.15 s that processes without an object store need not wait for

    options: dict[str, Any] = {**location.options, "skip_instance_cache": True, "use_listings_cache": False}
    return FilesystemMedium(fsspec.filesystem(location.scheme, **options), location.path, timeout_s)


class FilesystemMedium:
    """Objects in any other fsspec file system: Google, Azure, memory.

    A file system that is asynchronous inside runs on its own loop, any other in threads.
    """

    _create_lock = threading.Lock()
    """fsspec's memory file system looks and then writes: this makes its create atomic within the process."""

    def __init__(self, filesystem: Any, root: str, timeout_s: float) -> None:
        self._fs = filesystem
        self._root = root.strip("/")
        self._timeout_s = timeout_s
        self._runner = CallRunner(timeout_s)

    def get(self, path: str, length: int | None, size_max: int | None) -> bytes:
        if length is None:
            data = self._call("cat_file", self._full(path))
            check_size(path, len(data), size_max)
        else:
            data = self._call("cat_file", self._full(path), start=0, end=length)
        return bytes(data)

    def get_into(self, path: str, buffer: memoryview) -> None:
        data = self.get(path, None, None)
        check_expected(path, len(data), len(buffer))
        buffer[:] = data

    def put(self, path: str, data: bytes | memoryview, only_if_absent: bool) -> None:
        whole = bytes(data)  # a call that was given up goes on with it
        with self._create_lock if only_if_absent and not self._is_async else contextlib.nullcontext():
            mode = {"mode": "create"} if only_if_absent else {}
            self._call("pipe_file", self._full(path), whole, **mode)

    def head(self, path: str) -> ObjectInfo:
        found = self._call("info", self._full(path))
        if found.get("type") == "directory":
            raise FileNotFoundError(path)
        return ObjectInfo(path, int(found["size"]), _modified_s(found))

    def page(self, prefix: str, cursor: object | None) -> ListPage:
        """One directory per page: the cursor holds those still to be read."""
        pending = list(cursor) if isinstance(cursor, tuple) else [prefix.rpartition("/")[0]]
        directory = pending.pop()
        try:
            found = self._call("ls", self._full(directory), detail=True)
        except FileNotFoundError as exc:
            if not is_missing(exc):
                raise
            found = []
        objects: list[ObjectInfo] = []
        for item in found:
            path = str(item["name"]).strip("/").removeprefix(f"{self._root}/").rstrip("/")
            if item["type"] == "directory":
                if path != directory and (path.startswith(prefix) or prefix.startswith(f"{path}/")):
                    pending.append(path)
            elif path.startswith(prefix):
                objects.append(ObjectInfo(path, int(item["size"]), _modified_s(item)))
        return ListPage(sorted(objects, key=lambda info: info.path), tuple(pending) or None)

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            try:
                self._call("rm_file", self._full(path))
            except FileNotFoundError as exc:
                if not is_missing(exc):
                    raise

    def close(self) -> None:
        """Nothing to give back: fsspec closes a file system's connections with the object."""

    @property
    def _is_async(self) -> bool:
        return bool(getattr(self._fs, "async_impl", False))

    def _call(self, method: str, *args: object, **options: object) -> Any:
        if self._is_async:
            return run_on_loop(self._fs.loop, getattr(self._fs, f"_{method}")(*args, **options), self._timeout_s)
        return self._runner.run(lambda: getattr(self._fs, method)(*args, **options))

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root


def _modified_s(info: Mapping[str, Any]) -> float:
    """When an object was written, from the names that file systems have for it."""
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = info.get(name)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            return datetime.datetime.fromisoformat(value).timestamp()
    raise OSError("the store does not say when an object was written")
