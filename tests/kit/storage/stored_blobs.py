"""Blobs at rest that server/traffic.py stored, looked at from outside: each must hold what belongs to its name."""

import os
from pathlib import Path
from typing import Any

from tests.kit.s3 import S3
from tests.kit.server.traffic import payload_of
from tiered_kv.chunks.header import check_blob
from tiered_kv.errors import ChunkCorrupt, ChunkMismatch
from tiered_kv.keys.namespace import SELF_TEST_NAMESPACE
from tiered_kv.tiers.object.shared_directory import TEMPORARY


def problem_of(path: str, data: bytes) -> str:
    """What is wrong with a blob under this path, of a disk or of a bucket; empty if nothing is."""
    digits = path.rpartition("/")[2].partition(".")[0]
    try:
        parsed = check_blob(memoryview(data))
    except (ChunkCorrupt, ChunkMismatch) as exc:
        return f"{path}: {exc}"
    header = parsed.header
    said = header.record
    if said.key.hex() != digits or said.namespace.hex() not in path:
        return f"{path}: holds the blob of another name. key={said.key.hex()} namespace={said.namespace.hex()}"
    if said.namespace == SELF_TEST_NAMESPACE:
        return ""
    payload, expected = data[header.header_bytes :], payload_of(said.key)
    if payload[: len(expected)] != expected or any(payload[len(expected) :]):
        return f"{path}: its checksums are right and its bytes are those of another chunk"
    return ""


def live_blobs(root: Path) -> list[Path]:
    """Blobs below a directory in which others write and delete."""
    found = [Path(place, name) for place, _, names in os.walk(root) for name in names if name.endswith(".safetensors")]
    return sorted(found)


class BlobReader:
    """Reads the blobs below a directory, each of them once as long as its file is the same.

    Attributes:
        read: How many were read.
        read_bytes: And compared.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: dict[str, tuple[int, int, int]] = {}
        self.read = self.read_bytes = 0

    def problems(self) -> list[str]:
        """What is wrong with the files that came or changed since the last call. Nobody may write meanwhile."""
        found, seen = [], {}
        for place, _, names in os.walk(self._root):
            for name in names:
                if not name.endswith(".safetensors"):
                    continue
                path = os.path.join(place, name)
                status = os.stat(path)
                seen[path] = (status.st_ino, status.st_mtime_ns, status.st_size)
                if self._seen.get(path) != seen[path]:
                    data = Path(path).read_bytes()
                    self.read, self.read_bytes = self.read + 1, self.read_bytes + len(data)
                    if problem := problem_of(path, data):
                        found.append(problem)
        self._seen = seen
        return found


class SharedBucket:
    """An object store in a directory, and a look at what lies there."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._reader = BlobReader(directory)
        self.settings: dict[str, Any] = {"storage_uri": f"shared+file://{directory}"}

    @property
    def read(self) -> int:
        return self._reader.read

    def problems(self) -> list[str]:
        return self._reader.problems()

    def cut_uploads(self) -> int:
        """Uploads that a kill interrupted: their temp files are swept by age."""
        try:
            return len(os.listdir(self._directory / TEMPORARY))
        except FileNotFoundError:
            return 0


class S3Bucket:
    """A prefix of a real S3 server, and a look at what lies there, behind the back of the servers."""

    def __init__(self, s3: S3, prefix: str) -> None:
        self._s3, self._prefix = s3, prefix
        self._seen: set[str] = set()
        self.settings: dict[str, Any] = {"storage_uri": s3.uri(prefix), "storage_options": s3.options()}

    @property
    def read(self) -> int:
        return len(self._seen)

    def problems(self) -> list[str]:
        """What is wrong with the blobs that came since the last call: none is ever replaced."""
        found: list[str] = []
        with self._s3.client() as client:
            for path in self._s3.paths(self._prefix):
                if path.endswith(".safetensors") and path not in self._seen:
                    key = f"{self._prefix}/{path}"
                    data = client.get_object(Bucket=self._s3.bucket, Key=key)["Body"].read()
                    found += filter(None, [problem_of(path, data)])
                    self._seen.add(path)
        return found

    def cut_uploads(self) -> int:
        """Nothing of them is ever seen in S3."""
        return 0
