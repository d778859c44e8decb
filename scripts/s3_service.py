"""A bucket on a real S3 server: the one that was named, or one that is started and ends with the caller.

In this order: the server named by ``TIERED_KV_TEST_S3_ENDPOINT`` (credentials in ``AWS_*``, another bucket in
``TIERED_KV_TEST_S3_BUCKET``), MinIO in a Docker engine that runs (docker-compose.yml), a server of our own
(scripts/s3-server, which installs its packages where it may). Owns that choice, the server's life and the bucket; must
not know who asks or what is stored there: whether a missing server is a failure is for the caller to say.

Credentials are handed out as values; this process's environment is not touched. Called by the tests
(tests/kit/s3.py), the demo and the benchmarks.
"""

import functools
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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


class ServerFailedError(NoServerError):
    """There should be one, by Docker or the script, and it failed; the message is its own.

    For callers to whom a machine that has no server is no failure, and this is.
    """


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
        """``base`` with these credentials in it, and nothing of others: the environment of another process."""
        result = {name: value for name, value in base.items() if name not in FOREIGN}
        result |= {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}
        return result if self.token is None else result | {"AWS_SESSION_TOKEN": self.token}

    def options(self) -> dict[str, str]:
        """The same as part of ``Config``'s ``storage_options``."""
        options = {"key": self.access_key, "secret": self.secret_key}
        return options if self.token is None else options | {"token": self.token}


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket on a server that answers.

    Attributes:
        server: What kind of server it is, for people.
        is_ours: The server ends with the caller, and everything in it.
        directory: Where scripts/s3-server keeps the server, if it runs it.
    """

    server: str
    endpoint_url: str
    credentials: Credentials
    is_ours: bool
    name: str = NAME
    directory: Path | None = None

    def uri(self, prefix: str) -> str:
        """The storage URI of a prefix; holds no secret."""
        return f"s3://{self.name}/{prefix}?endpoint_url={quote(self.endpoint_url, safe=':/')}"

    @contextmanager
    def client(self, endpoint_url: str | None = None, **settings: object) -> Iterator[Any]:
        """A botocore client; another endpoint, e.g. a proxy's, and more settings of ``Config`` may be named."""
        from botocore.config import Config  # late: whoever may want a server imports this module, and most need none

        config: dict[str, Any] = {
            "s3": {"addressing_style": "path"},
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        }
        with _making_client:
            client = _session().create_client(
                "s3",
                region_name=os.environ.get("AWS_REGION", REGION),
                endpoint_url=endpoint_url or self.endpoint_url,
                aws_access_key_id=self.credentials.access_key,
                aws_secret_access_key=self.credentials.secret_key,
                aws_session_token=self.credentials.token,
                config=Config(**(config | settings)),
            )
        try:
            yield client
        finally:
            client.close()

    def paths(self, prefix: str) -> list[str]:
        """Paths of all objects below a prefix, relative to it."""
        with self.client() as client:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=f"{prefix}/")
            return [item["Key"][len(prefix) + 1 :] for page in pages for item in page.get("Contents", [])]

    def empty(self, prefix: str) -> None:
        """Delete all objects below a prefix."""
        with self.client() as client:
            for path in self.paths(prefix):
                client.delete_object(Bucket=self.name, Key=f"{prefix}/{path}")


_making_client = threading.Lock()
"""A session makes one client at a time."""


@functools.cache
def _session() -> Any:
    """One for all clients of this process: each of its own reads all that AWS says of S3 again, 0.1 s of CPU.

    Tests make a client for every look at a bucket, and wait for what is there by looking again and again.
    """
    import botocore.session

    return botocore.session.Session()


@contextmanager
def open_bucket(
    session: str, prefix: str, *, say: Say = lambda _: None, own_options: Sequence[str] = ()
) -> Iterator[Bucket]:
    """A bucket for as long as the context; what was stored below ``prefix`` is deleted at its end.

    Args:
        session: What kind of session asks, one lowercase word; names a server's directory or Compose project.
        say: Told what takes its time.
        own_options: More arguments for ``scripts/s3-server start``. Who gives some wants that server: Docker is passed
            over. A server that was named still comes first.

    Raises:
        NoServerError: There is no server and none can be started.
        BadServerError: The server refuses us, or was named without credentials.
    """
    with _choose(session, say, own_options) as bucket:
        is_new = _create(bucket)
        try:
            yield bucket
        finally:
            if not bucket.is_ours:  # ours is thrown away as a whole
                bucket.empty(prefix)
                if is_new:
                    _remove(bucket, say)


def run_script(*arguments: str) -> str:
    """Run scripts/s3-server and return what it printed.

    Raises:
        ServerFailedError: It failed; the message is its own.
    """
    done = _run([str(SCRIPT), *arguments])
    if done.returncode != 0:
        raise ServerFailedError(
            f"scripts/s3-server {' '.join(arguments)} failed. code={done.returncode} text={done.stderr.strip()}"
        )
    return done.stdout


def _choose(session: str, say: Say, own_options: Sequence[str]) -> AbstractContextManager[Bucket]:
    """Choose the server; entering the context starts it."""
    endpoint = os.environ.get("TIERED_KV_TEST_S3_ENDPOINT")
    if endpoint:
        return nullcontext(_named(endpoint, os.environ))
    if not own_options and _has_docker():
        say("starting an S3 server: MinIO by docker compose")
        return _docker(session)
    say("starting an S3 server: Ceph's gateway by scripts/s3-server")
    prepared = _run([str(SCRIPT), "install"])
    if prepared.returncode != 0:
        raise NoServerError(prepared.stderr.strip())
    return _own(session, own_options)


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
def _own(session: str, options: Sequence[str]) -> Iterator[Bucket]:
    """A server by scripts/s3-server; what killed sessions of the same kind left is removed first."""
    for left in SERVERS.glob(f"{session}-*"):
        pid = re.fullmatch(rf"{session}-([0-9]+)", left.name)
        if pid is not None and not Path(f"/proc/{pid[1]}").exists():
            run_script("wipe", f"--directory={left}")
    directory = SERVERS / f"{session}-{os.getpid()}"
    try:
        facts = json.loads(run_script("start", *options, f"--directory={directory}"))
        credentials = Credentials(facts["access_key"], facts["secret_key"])
        server = f"Ceph's gateway on this machine, {facts['store']}"
        yield Bucket(server, facts["endpoint_url"], credentials, is_ours=True, directory=directory)
    finally:
        run_script("wipe", f"--directory={directory}")


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
def _docker(session: str) -> Iterator[Bucket]:
    """MinIO by docker-compose.yml under a project name and on ports of its own; volume and containers go after it."""
    credentials = Credentials(f"{session}{secrets.token_hex(8)}", secrets.token_hex(20))
    environment = os.environ | {
        "MINIO_ROOT_USER": credentials.access_key,
        "MINIO_ROOT_PASSWORD": credentials.secret_key,
        "TIERED_KV_MINIO_PORT": str(_free_port()),
        "TIERED_KV_MINIO_CONSOLE_PORT": str(_free_port()),
        "TIERED_KV_BUCKET": NAME,
    }
    project = (f"--project-name=tiered-kv-{session}-{os.getpid()}", f"--project-directory={REPOSITORY}")

    def order(*arguments: str) -> str:
        done = _run(["docker", "compose", *project, *arguments], environment)
        if done.returncode != 0:
            raise ServerFailedError(f"docker compose {arguments[0]} failed. text={done.stderr[-2000:].strip()}")
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


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
    )


# --- the bucket ------------------------------------------------------------------------------------------------------


def _create(bucket: Bucket) -> bool:
    """Make sure the bucket is there; whether we made it.

    Without a location constraint: radosgw refuses the one that s3fs and boto3 add for us-east-1.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    with bucket.client() as client:
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


def _remove(bucket: Bucket, say: Say) -> None:
    """Remove the bucket, unless another session uses it by now; what was done here does not fail for a bucket."""
    from botocore.exceptions import ClientError

    with bucket.client() as client:
        try:
            client.delete_bucket(Bucket=bucket.name)
        except ClientError as exc:
            say(f"the bucket {bucket.name} stays: {exc}")
