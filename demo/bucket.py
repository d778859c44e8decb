"""A bucket on a real S3 server: the one that was named, or one that is started and ends with the caller.

In this order: the server named by ``TIERED_KV_TEST_S3_ENDPOINT`` (credentials in ``AWS_*``), MinIO in a Docker engine
that runs (docker-compose.yml), a server of our own (scripts/s3-server, which installs its packages where it may). Owns
that choice and the bucket; must not know what is stored there. Credentials are handed out as an environment for another
process; this one's is not touched. Called by ``run.py``.
"""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

REPOSITORY = Path(__file__).resolve().parent.parent
SERVERS = REPOSITORY / ".cache" / "s3"
SCRIPT = REPOSITORY / "scripts" / "s3-server"
NAME = "tiered-kv-test"
REGION = "us-east-1"
START_TIMEOUT_S = 300.0
"""Covers the installation of packages and the download of images."""

FOREIGN = ("AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_PROFILE")
"""What of a user's own AWS settings must not be mixed with the credentials of a server that we start."""

Say = Callable[[str], None]


class NoServerError(Exception):
    """No S3 server can be had here; the message says why."""


class BadServerError(Exception):
    """A server was named and cannot be used as it was named; the message says why."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client needs besides the address.

    Attributes:
        token: Session token of temporary credentials.
    """

    access_key: str
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """``base`` with these credentials in it, and nothing of others."""
        result = {name: value for name, value in base.items() if name not in FOREIGN}
        result |= {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}
        return result if self.token is None else result | {"AWS_SESSION_TOKEN": self.token}


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket on a server that answers.

    Attributes:
        server: What kind of server it is, for people.
        is_ours: The server ends with the caller, and everything in it.
    """

    server: str
    endpoint_url: str
    credentials: Credentials
    is_ours: bool
    name: str = NAME

    def uri(self, prefix: str) -> str:
        """The storage URI of a prefix; holds no secret."""
        return f"s3://{self.name}/{prefix}?endpoint_url={quote(self.endpoint_url, safe=':/')}"


@contextmanager
def open_bucket(prefix: str, say: Say) -> Iterator[Bucket]:
    """A bucket for as long as the context; what was stored below ``prefix`` is deleted at its end.

    Raises:
        NoServerError: There is no server and none can be started.
        BadServerError: The named server refuses us, or was named without credentials.
    """
    with _choose(say) as bucket:
        is_new = _create(bucket)
        try:
            yield bucket
        finally:
            if not bucket.is_ours:  # ours is thrown away as a whole
                _delete(bucket, prefix, with_bucket=is_new)


def _choose(say: Say) -> AbstractContextManager[Bucket]:
    endpoint = os.environ.get("TIERED_KV_TEST_S3_ENDPOINT")
    if endpoint:
        return nullcontext(_named(endpoint, os.environ))
    if _has_docker():
        say("starting an S3 server: MinIO by docker compose")
        return _docker()
    say("starting an S3 server: Ceph's gateway by scripts/s3-server")
    prepared = subprocess.run([SCRIPT, "install"], capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    if prepared.returncode != 0:
        raise NoServerError(prepared.stderr.strip())
    return _own()


def _named(endpoint: str, environment: Mapping[str, str]) -> Bucket:
    missing = [name for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if not environment.get(name)]
    if missing:
        raise BadServerError(f"TIERED_KV_TEST_S3_ENDPOINT is set without credentials. missing={','.join(missing)}")
    credentials = Credentials(
        environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"], environment.get("AWS_SESSION_TOKEN")
    )
    name = environment.get("TIERED_KV_TEST_S3_BUCKET", NAME)
    return Bucket(f"the server at {endpoint}", endpoint, credentials, is_ours=False, name=name)


@contextmanager
def _own() -> Iterator[Bucket]:
    """A server by scripts/s3-server; what killed runs left is removed first."""
    for left in SERVERS.glob("demo-*"):
        pid = re.fullmatch(r"demo-([0-9]+)", left.name)
        if pid is not None and not Path(f"/proc/{pid[1]}").exists():
            _script("wipe", left)
    directory = SERVERS / f"demo-{os.getpid()}"
    try:
        facts = json.loads(_script("start", directory))
        credentials = Credentials(facts["access_key"], facts["secret_key"])
        yield Bucket("Ceph's gateway on this machine", facts["endpoint_url"], credentials, is_ours=True)
    finally:
        _script("wipe", directory)


def _script(verb: str, directory: Path) -> str:
    command = [str(SCRIPT), verb, f"--directory={directory}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise NoServerError(f"scripts/s3-server {verb} failed. code={done.returncode} text={done.stderr.strip()}")
    return done.stdout


# --- Docker ----------------------------------------------------------------------------------------------------------


def _has_docker() -> bool:
    """Whether a Docker engine answers and its client knows compose."""
    if shutil.which("docker") is None:
        return False
    return all(
        subprocess.run(["docker", *command], capture_output=True, timeout=60, check=False).returncode == 0
        for command in (("info",), ("compose", "version"))
    )


@contextmanager
def _docker() -> Iterator[Bucket]:
    """MinIO by docker-compose.yml under a project name and on ports of its own; volume and containers go after it."""
    credentials = Credentials(f"demo{secrets.token_hex(8)}", secrets.token_hex(20))
    environment = os.environ | {
        "MINIO_ROOT_USER": credentials.access_key,
        "MINIO_ROOT_PASSWORD": credentials.secret_key,
        "TIERED_KV_MINIO_PORT": str(_free_port()),
        "TIERED_KV_MINIO_CONSOLE_PORT": str(_free_port()),
        "TIERED_KV_BUCKET": NAME,
    }
    compose = ["docker", "compose", f"--project-name=tiered-kv-demo-{os.getpid()}", f"--project-directory={REPOSITORY}"]

    def order(*arguments: str) -> str:
        done = subprocess.run(
            [*compose, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise NoServerError(f"docker compose {arguments[0]} failed. text={done.stderr[-2000:].strip()}")
        return done.stdout.strip()

    try:
        order("up", "--wait")
        address = order("port", "minio", "9000")
        yield Bucket("MinIO in Docker", f"http://{address}", credentials, is_ours=True)
    finally:
        order("down", "--volumes", "--timeout=1")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


# --- the bucket ------------------------------------------------------------------------------------------------------


@contextmanager
def _client(bucket: Bucket) -> Iterator[Any]:
    import botocore.session  # late: not needed where there is no server
    from botocore.config import Config

    client = botocore.session.Session().create_client(
        "s3",
        region_name=os.environ.get("AWS_REGION", REGION),
        endpoint_url=bucket.endpoint_url,
        aws_access_key_id=bucket.credentials.access_key,
        aws_secret_access_key=bucket.credentials.secret_key,
        aws_session_token=bucket.credentials.token,
        config=Config(
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
    try:
        yield client
    finally:
        client.close()


def _create(bucket: Bucket) -> bool:
    """Make sure the bucket is there; whether we made it.

    Without a location constraint: radosgw refuses the one that s3fs and boto3 add for us-east-1.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    with _client(bucket) as client:
        try:
            try:
                client.head_bucket(Bucket=bucket.name)
                return False
            except ClientError as exc:
                if exc.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                    raise
            client.create_bucket(Bucket=bucket.name)
            return True
        except (BotoCoreError, ClientError) as exc:
            raise BadServerError(f"{bucket.server} does not give us the bucket {bucket.name}: {exc}") from exc


def _delete(bucket: Bucket, prefix: str, *, with_bucket: bool) -> None:
    """Remove what lies below the prefix, and the bucket if it was made for us and nobody else uses it by now."""
    from botocore.exceptions import ClientError

    with _client(bucket) as client:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket.name, Prefix=f"{prefix}/")
        for key in [item["Key"] for page in pages for item in page.get("Contents", [])]:
            client.delete_object(Bucket=bucket.name, Key=key)
        if with_bucket:
            try:
                client.delete_bucket(Bucket=bucket.name)
            except ClientError as exc:
                if exc.response["Error"]["Code"] != "BucketNotEmpty":
                    raise
