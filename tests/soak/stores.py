"""The object store of a soak, and how it fails: a real S3 server behind the fault proxy, or a shared directory.

Each can be made to fail and mended, can be looked at behind the servers' backs, and has blobs that can be damaged.
"""

import os
import random
from pathlib import Path
from typing import Any, Protocol

from tests.kit.faults.proxy import Fault, FaultProxy, Mode
from tests.kit.s3 import S3
from tests.kit.storage.stored_blobs import live_blobs, problem_of

FAULTS: dict[str, Fault | None] = {
    "s3 500": Fault(Mode.STATUS, status=500, probability=0.7),
    "s3 503": Fault(Mode.STATUS, status=503),
    "s3 403": Fault(Mode.STATUS, status=403),
    "s3 reset": Fault(Mode.RESET, probability=0.7),
    "s3 truncated": Fault(Mode.TRUNCATE),
    "s3 flipped": Fault(Mode.FLIP, kinds={"GET"}),
    "s3 answer lost": Fault(Mode.LOST, kinds={"PUT"}),
    "s3 drip": Fault(Mode.DRIP, bytes_per_s=20_000),
    "s3 silence": Fault(Mode.SILENCE),
    "s3 down": None,
}


class Store(Protocol):
    """What the soak wants of an object store."""

    settings: dict[str, Any]
    faults: list[str]
    cli_uri: str
    cli_environment: dict[str, str]

    def fail(self, fault: str) -> None:
        """Let it fail in this way, until ``mend``."""

    def mend(self) -> None:
        """End every fault. Idempotent."""

    def blobs(self) -> dict[str, int]:
        """Sizes of the blobs in it."""

    def read(self, path: str) -> bytes | None:
        """A blob; None when it is gone."""

    def damage(self, path: str, how: str, draw: random.Random) -> None:
        """``flip`` a bit, ``truncate``, or ``remove``; nothing to do where it is gone."""


def problems(store: Store) -> list[str]:
    """What is wrong with the blobs in a store."""
    found = []
    for path in store.blobs():
        data = store.read(path)
        if data is not None and (problem := problem_of(path, data)):
            found.append(problem)
    return found


def damaged(data: bytes, how: str, draw: random.Random) -> bytes:
    """These bytes after a disk or a bucket damaged them."""
    if how == "truncate":
        return data[: draw.randrange(len(data))]
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


def damage_file(path: Path, how: str, draw: random.Random) -> bool:
    """Damage a file in place, as a disk does; False when it is gone or empty."""
    try:
        if how == "remove":
            path.unlink()
            return True
        size = path.stat().st_size
        if not size:
            return False
        if how == "truncate":
            os.truncate(path, draw.randrange(size))
            return True
        with path.open("r+b") as file:
            file.seek(draw.randrange(size))
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1 << draw.randrange(8)]))
    except FileNotFoundError:
        return False
    return True


class S3Store:
    """A prefix of a real S3 server."""

    def __init__(self, s3: S3, proxy: FaultProxy) -> None:
        prefix = s3.new_prefix()
        self._s3, self._proxy, self._prefix = s3, proxy, prefix
        self._client = s3.client().__enter__()  # for the length of the process: making one takes 0.1 s
        self.settings: dict[str, Any] = {"storage_uri": s3.uri(prefix), "storage_options": s3.options(proxy.url)}
        self.faults = list(FAULTS)
        self.cli_uri = s3.on.uri(prefix)
        self.cli_environment = s3.on.credentials.environment(os.environ)

    def fail(self, fault: str) -> None:
        rule = FAULTS[fault]
        if rule is None:
            self._proxy.down()
        else:
            self._proxy.set(rule)

    def mend(self) -> None:
        self._proxy.set()
        self._proxy.up()
        self._proxy.forget()  # its list of requests must not be what grows

    def blobs(self) -> dict[str, int]:
        found = {}
        lister = self._client.get_paginator("list_objects_v2")
        for page in lister.paginate(Bucket=self._s3.bucket, Prefix=f"{self._prefix}/"):
            for item in page.get("Contents", []):
                if item["Key"].endswith(".safetensors"):
                    found[item["Key"][len(self._prefix) + 1 :]] = item["Size"]
        return found

    def read(self, path: str) -> bytes | None:
        try:
            answer = self._client.get_object(Bucket=self._s3.bucket, Key=f"{self._prefix}/{path}")
        except self._client.exceptions.NoSuchKey:
            return None
        data: bytes = answer["Body"].read()
        return data

    def damage(self, path: str, how: str, draw: random.Random) -> None:
        place = {"Bucket": self._s3.bucket, "Key": f"{self._prefix}/{path}"}
        data = None if how == "remove" else self.read(path)
        if data:
            self._client.put_object(**place, Body=damaged(data, how, draw))
        elif how == "remove":
            self._client.delete_object(**place)


class DirectoryStore:
    """A directory that servers share: fails as a mount that is gone."""

    def __init__(self, directory: Path) -> None:
        self._mount, self._away = directory, directory.with_suffix(".away")
        self._directory = directory / "bucket"  # servers make the last part of a path, but not a mount that is gone
        self._directory.mkdir(parents=True)
        self.settings: dict[str, Any] = {"storage_uri": f"shared+file://{self._directory}"}
        self.faults = ["mount gone"]
        self.cli_uri = self.settings["storage_uri"]
        self.cli_environment = dict(os.environ)

    def fail(self, fault: str) -> None:
        del fault
        self._mount.rename(self._away)

    def mend(self) -> None:
        if self._away.exists():
            self._away.rename(self._mount)

    def blobs(self) -> dict[str, int]:
        found = {}
        for path in live_blobs(self._directory):
            try:
                found[str(path.relative_to(self._directory))] = path.stat().st_size
            except FileNotFoundError:
                continue
        return found

    def read(self, path: str) -> bytes | None:
        try:
            return (self._directory / path).read_bytes()
        except FileNotFoundError:
            return None

    def damage(self, path: str, how: str, draw: random.Random) -> None:
        damage_file(self._directory / path, how, draw)
