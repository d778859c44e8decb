"""A bucket that LMCache's S3 client can name: it knows a bucket by the host alone. Not a benchmark by itself.

It asks ``http://localhost:PORT/NAME``, and the repository's own gateway (scripts/s3-server) takes a host that is no
address for the name of a bucket. Everybody else asks the same gateway by its address and a path.
"""

import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / "scripts")]

from s3_service import REGION, Bucket  # noqa: E402

HOST = "localhost"
IO_THREADS = 4
"""Of LMCache's client, whose default is 64, for machines of more than two cores."""


def open_host_bucket(bucket: Bucket) -> Bucket:
    """The bucket named by its host on the server of another one; it ends with that server.

    Raises:
        RuntimeError: The server is none of ours, and takes hosts as it likes.
    """
    if bucket.directory is None:
        raise RuntimeError(
            f"LMCache's client names a bucket by its host, which scripts/s3-server alone is set up for. "
            f"server={bucket.server} do: unset TIERED_KV_TEST_S3_ENDPOINT"
        )
    with bucket.client() as client:
        client.create_bucket(Bucket=HOST)
    return replace(bucket, name=HOST)


def lmcache_adapter(bucket: Bucket) -> dict[str, object]:
    """LMCache's own settings of its S3 adapter for a bucket of :func:`open_host_bucket`."""
    return {
        "type": "s3",
        "s3_endpoint": f"{HOST}:{urlsplit(bucket.endpoint_url).port}",
        "s3_region": REGION,
        "s3_num_io_threads": IO_THREADS,
        "s3_prefer_http2": False,  # which it agrees on with TLS only
        "disable_tls": True,
        "aws_access_key_id": bucket.credentials.access_key,
        "aws_secret_access_key": bucket.credentials.secret_key,
    }


def object_sizes(bucket: Bucket, prefix: str = "") -> dict[str, int]:
    """Sizes of all objects whose names start with ``prefix``, by name."""
    with bucket.client() as client:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket.name, Prefix=prefix)
        return {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", [])}
