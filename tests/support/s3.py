"""The S3 server of a test session: found or started on first use, emptied or ended after the last test.

In this order: the server named by ``TIERED_KV_TEST_S3_ENDPOINT`` (credentials in ``AWS_*``), MinIO in a Docker engine
that runs (docker-compose.yml), a server of our own (scripts/s3-server). If there is none, tests that ask for ``s3`` are
skipped with the reason; with ``CI=true`` they fail instead, so that a suite that proves nothing is never green.

Credentials are handed out as values; the environment of the test process is not touched.
"""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SERVERS = REPOSITORY / ".cache" / "s3"
SCRIPT = REPOSITORY / "scripts" / "s3-server"
BUCKET = "tiered-kv-test"
REGION = "us-east-1"
START_TIMEOUT_S = 300.0
"""Covers the installation of packages and the download of images."""


class NoServerError(Exception):
    """No S3 server can be had here; the message says why."""


@dataclass(frozen=True, slots=True)
class OwnServer:
    """The server that scripts/s3-server runs for this session, as far as a test may break it."""

    directory: Path

    def kill_gateway(self) -> None:
        """SIGKILL what listens on the endpoint; stored objects survive."""
        run_script("stop", "--gateway", f"--directory={self.directory}")

    def start_gateway(self) -> None:
        """Bring it up again on the same port; a gateway that runs is left alone."""
        run_script("start", f"--directory={self.directory}")


@dataclass(frozen=True, slots=True)
class S3:
    """A bucket on a real server.

    Attributes:
        token: Session token of temporary credentials, if the user's are of that kind.
        run: Prefix of everything this session writes.
        server: Control over the server where it is ours, else None: such tests skip themselves.
    """

    endpoint_url: str
    access_key: str
    secret_key: str = field(repr=False)
    bucket: str = BUCKET
    token: str | None = field(default=None, repr=False)
    run: str = field(default_factory=lambda: f"run-{secrets.token_hex(6)}")
    server: OwnServer | None = None
    _numbers: Iterator[int] = field(default_factory=count, repr=False)

    def new_prefix(self) -> str:
        """A prefix that no other test uses."""
        return f"{self.run}/{next(self._numbers)}"

    def uri(self, prefix: str) -> str:
        return f"s3://{self.bucket}/{prefix}"

    def options(self, endpoint_url: str | None = None) -> dict[str, str]:
        """What ``Config`` takes as ``storage_options``; another endpoint, e.g. a proxy's, may be named."""
        options = {
            "endpoint_url": endpoint_url or self.endpoint_url,
            "key": self.access_key,
            "secret": self.secret_key,
        }
        return options if self.token is None else options | {"token": self.token}

    @contextmanager
    def client(self, endpoint_url: str | None = None, **settings: object) -> Iterator[Any]:
        """A botocore client that does not retry, to look at the bucket behind the back of the code under test."""
        import botocore.session  # late, here and below: every test session imports this module
        from botocore.config import Config

        config: dict[str, Any] = {
            "retries": {"max_attempts": 0},
            "s3": {"addressing_style": "path"},
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        }
        client = botocore.session.Session().create_client(
            "s3",
            region_name=os.environ.get("AWS_REGION", REGION),
            endpoint_url=endpoint_url or self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            aws_session_token=self.token,
            config=Config(**(config | settings)),
        )
        try:
            yield client
        finally:
            client.close()

    def paths(self, prefix: str) -> list[str]:
        """Paths of all objects below a prefix, relative to it."""
        with self.client() as client:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=f"{prefix}/")
            return [item["Key"][len(prefix) + 1 :] for page in pages for item in page.get("Contents", [])]

    def delete_all(self, prefix: str) -> None:
        with self.client() as client:
            for path in self.paths(prefix):
                client.delete_object(Bucket=self.bucket, Key=f"{prefix}/{path}")


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    """A bucket on a real S3 server; see the module."""
    try:
        context = choose_server()
    except NoServerError as exc:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI=true, and there is no S3 server to test against: {exc}", pytrace=False)
        pytest.skip(f"no S3 server: {exc}")
    with context as server:
        is_new = create_bucket(server)
        try:
            yield server
        finally:
            if server.server is None:  # our own is thrown away as a whole
                server.delete_all(server.run)
                if is_new:
                    delete_bucket(server)


def choose_server() -> AbstractContextManager[S3]:
    """Choose the server; entering the context starts it.

    Raises:
        NoServerError: There is none to be had.
    """
    endpoint = os.environ.get("TIERED_KV_TEST_S3_ENDPOINT")
    if endpoint:
        return nullcontext(named_server(endpoint, os.environ))
    if has_docker():
        return docker_server()
    prepared = subprocess.run([SCRIPT, "install"], capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    if prepared.returncode != 0:
        raise NoServerError(prepared.stderr.strip())
    return own_server()


def named_server(endpoint: str, environment: Mapping[str, str]) -> S3:
    """The server a user named."""
    missing = [name for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if not environment.get(name)]
    if missing:
        pytest.fail(
            f"TIERED_KV_TEST_S3_ENDPOINT is set without credentials. missing={','.join(missing)}", pytrace=False
        )
    return S3(
        endpoint,
        environment["AWS_ACCESS_KEY_ID"],
        environment["AWS_SECRET_ACCESS_KEY"],
        bucket=environment.get("TIERED_KV_TEST_S3_BUCKET", BUCKET),
        token=environment.get("AWS_SESSION_TOKEN"),
    )


@contextmanager
def own_server() -> Iterator[S3]:
    """A server that lives as long as this session; what killed sessions left is removed first."""
    for left in SERVERS.glob("pytest-*"):
        pid = re.fullmatch(r"pytest-([0-9]+)", left.name)
        if pid is not None and not Path(f"/proc/{pid[1]}").exists():
            run_script("wipe", f"--directory={left}")
    directory = SERVERS / f"pytest-{os.getpid()}"
    try:
        facts = json.loads(run_script("start", f"--directory={directory}"))
        yield S3(facts["endpoint_url"], facts["access_key"], facts["secret_key"], server=OwnServer(directory))
    finally:
        run_script("wipe", f"--directory={directory}")


def run_script(*arguments: str) -> str:
    """Run scripts/s3-server and return what it printed.

    Raises:
        RuntimeError: It failed; the message is its own.
    """
    done = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"s3-server {' '.join(arguments)} failed. code={done.returncode} text={done.stderr.strip()}")
    return done.stdout


# --- Docker ----------------------------------------------------------------------------------------------------------


def has_docker() -> bool:
    """Whether a Docker engine answers and its client knows compose."""
    if shutil.which("docker") is None:
        return False
    return all(
        subprocess.run(["docker", *command], capture_output=True, timeout=60, check=False).returncode == 0
        for command in (("info",), ("compose", "version"))
    )


@contextmanager
def docker_server() -> Iterator[S3]:
    """MinIO by docker-compose.yml under a project name and on a port of its own; volume and containers go after it."""
    access_key, secret_key = f"test{secrets.token_hex(8)}", secrets.token_hex(20)
    environment = os.environ | {
        "MINIO_ROOT_USER": access_key,
        "MINIO_ROOT_PASSWORD": secret_key,
        "TIERED_KV_MINIO_PORT": str(free_port()),
        "TIERED_KV_MINIO_CONSOLE_PORT": str(free_port()),
        "TIERED_KV_BUCKET": BUCKET,
    }
    compose = ["docker", "compose", f"--project-name=tiered-kv-test-{os.getpid()}", f"--project-directory={REPOSITORY}"]

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
            raise RuntimeError(f"docker compose {arguments[0]} failed. text={done.stderr[-2000:].strip()}")
        return done.stdout.strip()

    try:
        order("up", "--wait")
        address = order("port", "minio", "9000")
        yield S3(f"http://{address}", access_key, secret_key)
    finally:
        order("down", "--volumes", "--timeout=1")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def create_bucket(s3: S3) -> bool:
    """Make sure the bucket is there; whether we made it.

    Without a location constraint: radosgw refuses the one that s3fs and boto3 add for us-east-1.
    """
    from botocore.exceptions import ClientError

    with s3.client() as client:
        try:
            client.head_bucket(Bucket=s3.bucket)
            return False
        except ClientError as exc:
            if exc.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                raise
        client.create_bucket(Bucket=s3.bucket)
        return True


def delete_bucket(s3: S3) -> None:
    """Remove the bucket unless another session uses it by now."""
    from botocore.exceptions import ClientError

    with s3.client() as client, suppress(ClientError):
        client.delete_bucket(Bucket=s3.bucket)
