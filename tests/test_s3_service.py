"""Which S3 server is chosen, what it is asked and what is left behind. The server itself: test_s3_server.py."""

import json
import os
from pathlib import Path

import pytest
import s3_service
from s3_service import Credentials, NoServerError, ServerFailedError, open_bucket

from tiered_kv.config import Config

STARTED = {"endpoint_url": "http://127.0.0.1:9", "access_key": "me", "secret_key": "hidden", "store": "bluestore"}


@pytest.fixture
def calls(tmp_path: Path, monkeypatch):
    """A machine where all programs are ours: neither a server nor Docker is real; what was asked of them is told."""
    program = tmp_path / "bin" / "s3-server"
    program.parent.mkdir()
    told = tmp_path / "calls"
    told.touch()

    def write(path: Path, body: str) -> None:
        path.write_text(f'#!/bin/sh\necho "${{0##*/}} $*" >> {told}\n{body}\n')
        path.chmod(0o755)

    write(program, f"[ $1 != start ] || echo '{json.dumps(STARTED)}'")
    monkeypatch.setattr(s3_service, "SCRIPT", program)
    monkeypatch.setattr(s3_service, "SERVERS", tmp_path / "servers")
    monkeypatch.setattr(s3_service, "_create", lambda bucket: True)
    monkeypatch.delenv("TIERED_KV_TEST_S3_ENDPOINT", raising=False)
    monkeypatch.setenv("PATH", str(program.parent))
    yield lambda: told.read_text().splitlines(), write
    assert "hidden" not in told.read_text()


def test_own_server_gets_the_options_and_is_wiped(calls, tmp_path):
    """Leftovers of dead sessions of the same kind go; other kinds, live sessions and other names stay."""
    asked, _ = calls
    own = tmp_path / "servers" / f"bench-{os.getpid()}"
    gone = 2**22 + 1  # above the largest pid
    for name in (f"bench-{gone}", f"pytest-{gone}", "bench-1", "bench-mine", "default"):
        (own.parent / name).mkdir(parents=True)
    said = []

    with open_bucket("bench", "prefix", say=said.append, own_options=["--store=bluestore"]) as bucket:
        assert (bucket.directory, bucket.is_ours, bucket.endpoint_url) == (own, True, STARTED["endpoint_url"])
        assert "hidden" not in repr(bucket)

    assert asked() == [
        "s3-server install",
        f"s3-server wipe --directory={own.parent}/bench-{gone}",
        f"s3-server start --store=bluestore --directory={own}",
        f"s3-server wipe --directory={own}",
    ]
    assert len(said) == 1


def test_docker_comes_first_unless_an_own_server_is_wanted(calls, tmp_path):
    asked, write = calls
    write(tmp_path / "bin" / "docker", 'case "$*" in *" port "*) echo 127.0.0.1:9 ;; esac')

    with open_bucket("demo", "prefix") as bucket:
        assert (bucket.server, bucket.directory, bucket.is_ours) == ("MinIO in Docker", None, True)
    project = f"--project-name=tiered-kv-demo-{os.getpid()}"
    assert [line.split()[-1] for line in asked() if project in line] == ["--wait", "9000", "--timeout=1"]
    assert not any(line.startswith("s3-server") for line in asked())

    before = len(asked())
    with open_bucket("demo", "prefix", own_options=["--store=bluestore"]) as bucket:
        assert bucket.directory is not None
    assert all(line.startswith("s3-server") for line in asked()[before:])


def test_server_that_does_not_start_is_told_from_none(calls, tmp_path):
    _, write = calls
    write(tmp_path / "bin" / "s3-server", '[ $1 != start ] || { echo "no answer" >&2; exit 1; }')
    with pytest.raises(ServerFailedError, match=r"start .*code=1 text=no answer$"), open_bucket("demo", "prefix"):
        pass

    write(tmp_path / "bin" / "s3-server", '[ $1 != install ] || { echo "not root" >&2; exit 3; }')
    with pytest.raises(NoServerError, match="^not root$") as caught, open_bucket("demo", "prefix"):
        pass
    assert not isinstance(caught.value, ServerFailedError)


def test_credentials_come_alone_and_are_not_shown():
    base = {"HOME": "/root", "AWS_SESSION_TOKEN": "of another", "AWS_PROFILE": "other", "AWS_ACCESS_KEY_ID": "other"}
    mine, temporary = Credentials("me", "hidden"), Credentials("me", "hidden", "mine")

    assert mine.environment(base) == {"HOME": "/root", "AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "hidden"}
    assert temporary.environment(base)["AWS_SESSION_TOKEN"] == "mine"
    assert mine.options() == {"key": "me", "secret": "hidden"}
    assert temporary.options() == {"key": "me", "secret": "hidden", "token": "mine"}
    assert "hidden" not in repr(temporary)
    assert "mine" not in repr(temporary)


@pytest.fixture
def named(s3, monkeypatch) -> None:
    """The session's server, named as a user names one."""
    monkeypatch.setenv("TIERED_KV_TEST_S3_ENDPOINT", s3.endpoint_url)
    monkeypatch.setenv("TIERED_KV_TEST_S3_BUCKET", s3.bucket)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)


def test_named_server_is_used_and_left_as_it_was(s3, named):
    """On a real server: what is below the prefix goes, what was there before stays."""
    prefix = s3.new_prefix()

    with s3.client() as client:
        client.put_object(Bucket=s3.bucket, Key=f"{prefix}x/other", Body=b"somebody else's")
        with open_bucket("pytest", prefix) as chosen:
            assert (chosen.endpoint_url, chosen.name, chosen.is_ours) == (s3.endpoint_url, s3.bucket, False)
            config = Config.from_mapping({"storage_uri": chosen.uri(prefix)})
            assert config.location().path == f"{s3.bucket}/{prefix}"
            assert config.location().options == {"endpoint_url": s3.endpoint_url}
            client.put_object(Bucket=s3.bucket, Key=f"{prefix}/ours", Body=b"ours")

    assert s3.paths(prefix) == []
    assert s3.paths(f"{prefix}x") == ["other"]


def test_bucket_that_was_made_for_us_goes_unless_it_is_used(s3, named, monkeypatch):
    name = f"{s3.bucket}-new-{s3.run[-6:]}"
    monkeypatch.setenv("TIERED_KV_TEST_S3_BUCKET", name)
    said = []

    with s3.client() as client:
        with open_bucket("pytest", "ours", say=said.append):
            client.put_object(Bucket=name, Key="ours/x", Body=b"x")
        assert name not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]
        assert said == []

        with open_bucket("pytest", "ours", say=said.append):
            client.put_object(Bucket=name, Key="another's", Body=b"x")
        assert len(said) == 1 and "BucketNotEmpty" in said[0]
        client.delete_object(Bucket=name, Key="another's")
        client.delete_bucket(Bucket=name)
