"""What a test needs of a store besides the code under test: an address, and a way to reach behind it."""

import json
import secrets
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from contextlib import ExitStack
from itertools import count
from typing import Any
from urllib.parse import quote, urlencode

from s3_service import Bucket, Credentials

from tests.kit.stores.server import StoreServer

BUCKET = "tiered-kv-test"


class Store(ABC):
    """A bucket on a server of the session, empty at first.

    Paths are relative to a prefix. Nothing here goes through the package.
    """

    def __init__(self, server: StoreServer) -> None:
        self.server = server
        self._numbers = count()

    def start(self) -> None:
        """Bring the server up, and the bucket, which a server that was killed may have lost."""
        self.server.start()
        self.create_bucket()

    def close(self) -> None:
        """End the server."""
        self.server.kill()

    def new_prefix(self) -> str:
        """A prefix that no other test uses."""
        return f"p{next(self._numbers)}"

    @abstractmethod
    def uri(self, prefix: str) -> str:
        """Without options."""

    @abstractmethod
    def options(self, endpoint_url: str | None = None) -> dict[str, str]:
        """What ``Config`` takes as ``storage_options``; another endpoint, e.g. a proxy's, may be named."""

    @abstractmethod
    def create_bucket(self) -> None:
        """Make the bucket unless it is there."""

    @abstractmethod
    def put(self, prefix: str, path: str, data: bytes) -> None:
        """Store an object in place of what is there."""

    @abstractmethod
    def get(self, prefix: str, path: str) -> bytes | None:
        """An object; None if there is none."""

    @abstractmethod
    def sizes(self, prefix: str) -> dict[str, int]:
        """Every object below a prefix, by its path."""


class GoogleStore(Store):
    """A bucket of a server that speaks Google's JSON API, without credentials."""

    def uri(self, prefix: str) -> str:
        return f"gs://{BUCKET}/{prefix}"

    def options(self, endpoint_url: str | None = None) -> dict[str, str]:
        return {"endpoint_url": endpoint_url or self.server.endpoint_url, "token": "anon"}

    def create_bucket(self) -> None:
        try:
            self._ask("POST", "/storage/v1/b?project=test", json.dumps({"name": BUCKET}).encode(), "application/json")
        except urllib.error.HTTPError as exc:
            if exc.code != 409:
                raise
            exc.close()

    def put(self, prefix: str, path: str, data: bytes) -> None:
        query = urlencode({"uploadType": "media", "name": f"{prefix}/{path}"})
        self._ask("POST", f"/upload/storage/v1/b/{BUCKET}/o?{query}", data, "application/octet-stream")

    def get(self, prefix: str, path: str) -> bytes | None:
        try:
            return self._ask("GET", f"/storage/v1/b/{BUCKET}/o/{quote(f'{prefix}/{path}', safe='')}?alt=media")
        except urllib.error.HTTPError as exc:
            if exc.code != 404:
                raise
            exc.close()
            return None

    def sizes(self, prefix: str) -> dict[str, int]:
        found: dict[str, int] = {}
        query = {"prefix": f"{prefix}/"}
        while True:
            page = json.loads(self._ask("GET", f"/storage/v1/b/{BUCKET}/o?{urlencode(query)}"))
            found |= {item["name"].removeprefix(f"{prefix}/"): int(item["size"]) for item in page.get("items", [])}
            if not page.get("nextPageToken"):
                return found
            query["pageToken"] = page["nextPageToken"]

    def _ask(self, method: str, target: str, body: bytes | None = None, kind: str = "") -> bytes:
        request = urllib.request.Request(self.server.endpoint_url + target, body, method=method)
        if kind:
            request.add_header("Content-Type", kind)
        with urllib.request.urlopen(request, timeout=30) as answer:
            data: bytes = answer.read()
        return data


class AzureStore(Store):
    """A container of an Azurite, which checks the key of its account."""

    def __init__(self, server: StoreServer, account: str, key: str) -> None:
        from azure.storage.blob import ContainerClient

        super().__init__(server)
        self._account = account
        self._key = key
        self._container = ContainerClient.from_connection_string(self.options()["connection_string"], BUCKET)

    def uri(self, prefix: str) -> str:
        return f"az://{BUCKET}/{prefix}"

    def options(self, endpoint_url: str | None = None, key: str = "") -> dict[str, str]:
        """Another key than the account's may be named, too."""
        parts = {
            "DefaultEndpointsProtocol": "http",
            "AccountName": self._account,
            "AccountKey": key or self._key,
            "BlobEndpoint": f"{endpoint_url or self.server.endpoint_url}/{self._account}",
        }
        return {"connection_string": ";".join(f"{name}={value}" for name, value in parts.items())}

    def create_bucket(self) -> None:
        if not self._container.exists():
            self._container.create_container()

    def put(self, prefix: str, path: str, data: bytes) -> None:
        self._container.upload_blob(f"{prefix}/{path}", data, overwrite=True)

    def get(self, prefix: str, path: str) -> bytes | None:
        from azure.core.exceptions import ResourceNotFoundError

        try:
            return bytes(self._container.download_blob(f"{prefix}/{path}").readall())
        except ResourceNotFoundError:
            return None

    def sizes(self, prefix: str) -> dict[str, int]:
        found = self._container.list_blobs(name_starts_with=f"{prefix}/")
        return {blob.name.removeprefix(f"{prefix}/"): blob.size for blob in found}

    def close(self) -> None:
        self._container.close()
        super().close()


class S3Objects:
    """The objects of a bucket on any S3 server, through a client of botocore's."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    def put(self, prefix: str, path: str, data: bytes) -> None:
        """Store an object in place of what is there."""
        self._client.put_object(Bucket=self._bucket, Key=f"{prefix}/{path}", Body=data)

    def get(self, prefix: str, path: str) -> bytes | None:
        """An object; None if there is none."""
        try:
            data: bytes = self._client.get_object(Bucket=self._bucket, Key=f"{prefix}/{path}")["Body"].read()
        except self._client.exceptions.NoSuchKey:
            return None
        return data

    def sizes(self, prefix: str) -> dict[str, int]:
        """Every object below a prefix, by its path."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=f"{prefix}/")
        start = len(prefix) + 1
        return {item["Key"][start:]: item["Size"] for page in pages for item in page.get("Contents", [])}


class S3Store(Store):
    """A bucket of a small S3 server."""

    def __init__(self, server: StoreServer, credentials: Credentials) -> None:
        super().__init__(server)
        self._credentials = credentials
        self._at_end = ExitStack()
        bucket = Bucket(server.name, server.endpoint_url, credentials, is_ours=True, name=BUCKET)
        self._client = self._at_end.enter_context(bucket.client())
        self._objects = S3Objects(self._client, BUCKET)

    def uri(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}"

    def options(self, endpoint_url: str | None = None) -> dict[str, str]:
        return {"endpoint_url": endpoint_url or self.server.endpoint_url, **self._credentials.options()}

    def create_bucket(self) -> None:
        if BUCKET not in (bucket["Name"] for bucket in self._client.list_buckets()["Buckets"]):
            self._client.create_bucket(Bucket=BUCKET)

    def put(self, prefix: str, path: str, data: bytes) -> None:
        self._objects.put(prefix, path, data)

    def get(self, prefix: str, path: str) -> bytes | None:
        return self._objects.get(prefix, path)

    def sizes(self, prefix: str) -> dict[str, int]:
        return self._objects.sizes(prefix)

    def close(self) -> None:
        self._at_end.close()
        super().close()


def new_credentials() -> Credentials:
    """A key and a secret that nobody else has."""
    return Credentials("test" + secrets.token_hex(8), secrets.token_hex(20))
