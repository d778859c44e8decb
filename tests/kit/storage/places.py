"""The same stored prompts on every medium, to be damaged behind the back of the code under test.

A place is a directory, a directory that machines mount, or a prefix on the real S3 server. Paths are those that
``verify`` and ``gc`` print: relative to the root of the tier.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tests.kit.s3 import S3
from tests.kit.storage.stored_prompts import fingerprint
from tiered_kv.cli.app import app
from tiered_kv.ops.open import open_storage
from tiered_kv.ops.storage import Storage


@dataclass(frozen=True)
class Place:
    """Where blobs lie.

    Attributes:
        settings: What ``--set`` has to say.
        directory: The root, unless it is a bucket.
    """

    uri: str
    settings: dict[str, Any]
    directory: Path | None = None
    s3: S3 | None = None
    client: Any = None
    prefix: str = ""

    @classmethod
    def disk(cls, directory: Path) -> "Place":
        directory.mkdir(parents=True, exist_ok=True)
        return cls(f"file://{directory}", {}, directory)

    @classmethod
    def shared(cls, directory: Path) -> "Place":
        return cls(f"shared+file://{directory}", {}, directory)

    @classmethod
    @contextmanager
    def bucket(cls, s3: S3) -> Iterator["Place"]:
        prefix = s3.new_prefix()
        with s3.client() as client:
            yield cls(s3.uri(prefix), {"storage_options": s3.options()}, s3=s3, client=client, prefix=prefix)

    @property
    def is_disk(self) -> bool:
        return self.uri.startswith("file:")

    def open(self) -> Storage:
        return open_storage(self.uri, self.settings)

    def get(self, path: str) -> bytes:
        if self.directory is not None:
            return (self.directory / path).read_bytes()
        assert self.s3 is not None
        data: bytes = self.client.get_object(Bucket=self.s3.bucket, Key=f"{self.prefix}/{path}")["Body"].read()
        return data

    def put(self, path: str, data: bytes) -> None:
        if self.directory is not None:
            (self.directory / path).parent.mkdir(parents=True, exist_ok=True)
            (self.directory / path).write_bytes(data)
            return
        assert self.s3 is not None
        self.client.put_object(Bucket=self.s3.bucket, Key=f"{self.prefix}/{path}", Body=data)

    def delete(self, path: str) -> None:
        if self.directory is not None:
            (self.directory / path).unlink()
            return
        assert self.s3 is not None
        self.client.delete_object(Bucket=self.s3.bucket, Key=f"{self.prefix}/{path}")

    def paths(self) -> set[str]:
        """Blobs, records and strays; of a directory nothing of a server's own."""
        if self.s3 is not None:
            return set(self.s3.paths(self.prefix))
        assert self.directory is not None
        below = self.directory / "blobs" if self.is_disk else self.directory
        return {str(path.relative_to(self.directory)) for path in below.rglob("*") if path.is_file()}

    def content(self) -> dict[str, str]:
        """Everything there, by path: a name for its bytes, which S3 tells in its list."""
        if self.s3 is not None:
            pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.s3.bucket, Prefix=self.prefix)
            start = len(self.prefix) + 1
            return {item["Key"][start:]: item["ETag"] for page in pages for item in page.get("Contents", [])}
        found = {}
        for path in self.paths():
            with suppress(FileNotFoundError):  # evicted meanwhile
                found[path] = fingerprint(self.get(path))
        return found

    def run(self, verb: str, *arguments: object) -> tuple[int, dict[str, Any]]:
        """Run a verb with ``--json`` in this process; its exit code and what it printed."""
        more = [word for name, value in self.settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
        words = [verb, self.uri, *more, "--json", *map(str, arguments)]
        result = CliRunner().invoke(app, words)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, json.loads(result.stdout) if result.stdout else {}


@contextmanager
def open_place(kind: str, directory: Path, fixture: Callable[[str], Any]) -> Iterator[Place]:
    """An empty place of a kind: ``disk`` (or what begins so), ``shared`` or ``s3``, which alone needs its fixture."""
    if kind == "s3":
        with Place.bucket(fixture("s3")) as place:
            yield place
    else:
        yield Place.shared(directory / "bucket") if kind == "shared" else Place.disk(directory / "cache")


def reasons(report: dict[str, Any]) -> dict[str, str]:
    """What ``verify`` found to be bad and still there, by path."""
    return {bad["path"]: bad["reason"] for bad in report["bad"] if not bad["is_mended"]}
