"""The S3 server of a test session: found or started on first use, emptied or ended after the last test.

Which server that is: scripts/s3_service.py. If there is none, tests that ask for ``s3`` are skipped with the reason;
with ``CI=true`` they fail instead, so that a suite that proves nothing is never green. A server that was named, or that
did not start, fails them anyway.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from s3_service import BadServerError, Bucket, NoServerError, ServerFailedError, open_bucket, run_script


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
    """A session's part of a bucket on a real server.

    Attributes:
        run: Prefix of everything this session writes.
    """

    on: Bucket
    run: str
    _numbers: Iterator[int] = field(default_factory=count, repr=False)

    @property
    def endpoint_url(self) -> str:
        return self.on.endpoint_url

    @property
    def access_key(self) -> str:
        return self.on.credentials.access_key

    @property
    def secret_key(self) -> str:
        return self.on.credentials.secret_key

    @property
    def bucket(self) -> str:
        return self.on.name

    @property
    def server(self) -> OwnServer | None:
        """Control over the server where it is ours, else None: such tests skip themselves."""
        return None if self.on.directory is None else OwnServer(self.on.directory)

    def new_prefix(self) -> str:
        """A prefix that no other test uses."""
        return f"{self.run}/{next(self._numbers)}"

    def uri(self, prefix: str) -> str:
        """Without the endpoint: that is among the options, where a test may replace it."""
        return f"s3://{self.bucket}/{prefix}"

    def options(self, endpoint_url: str | None = None) -> dict[str, str]:
        """What ``Config`` takes as ``storage_options``; another endpoint, e.g. a proxy's, may be named."""
        return {"endpoint_url": endpoint_url or self.endpoint_url, **self.on.credentials.options()}

    def client(self, endpoint_url: str | None = None, **settings: object) -> AbstractContextManager[Any]:
        """A botocore client that does not retry, to look at the bucket behind the back of the code under test."""
        return self.on.client(endpoint_url, **({"retries": {"max_attempts": 0}} | settings))

    def paths(self, prefix: str) -> list[str]:
        """Paths of all objects below a prefix, relative to it."""
        return self.on.paths(prefix)


@contextmanager
def open_s3(session: str) -> Iterator[S3]:
    """A prefix of its own in a bucket, for as long as the context.

    Args:
        session: What kind of session asks; see :func:`s3_service.open_bucket`, also for what is raised.
    """
    run = f"run-{secrets.token_hex(6)}"
    with open_bucket(session, run) as bucket:
        yield S3(bucket, run)


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    """A bucket on a real S3 server; see the module."""
    with ExitStack() as at_end:
        try:
            opened = at_end.enter_context(open_s3("pytest"))
        except (BadServerError, ServerFailedError) as exc:
            pytest.fail(str(exc), pytrace=False)
        except NoServerError as exc:
            if os.environ.get("CI") == "true":
                pytest.fail(f"CI=true, and there is no S3 server to test against: {exc}", pytrace=False)
            pytest.skip(f"no S3 server: {exc}")
        yield opened
