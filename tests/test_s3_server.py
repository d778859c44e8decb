"""The S3 server that the other tests rely on: a real one, started and ended without a trace."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import botocore.credentials
import pytest
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.exceptions import ClientError, EndpointConnectionError
from s3_service import REGION, SCRIPT, SERVERS, Bucket, Credentials

from tests.kit.s3 import S3, OwnServer
from tests.kit.server.probe import wait_for

PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw")


def script(*arguments: str, directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [SCRIPT, *arguments, f"--directory={directory}"]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100, env=os.environ | environment
    )


def start(directory: Path, *arguments: str) -> Bucket:
    done = script("start", *arguments, directory=directory)
    if done.returncode == 3:
        pytest.skip(done.stderr)  # the fixture s3 fails under CI for the same reason
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    credentials = Credentials(facts["access_key"], facts["secret_key"])
    return Bucket("of this test", facts["endpoint_url"], credentials, is_ours=True, name="some-bucket")


def running(directory: Path) -> dict[int, str]:
    """Processes that name the directory, by looking at all of them: not the way the script finds them."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(str(directory) in argument for argument in arguments) and arguments[0] in PROGRAMS:
            found[int(entry.name)] = arguments[0]
    return found


@pytest.fixture
def directory(tmp_path: Path):
    """A directory whose server is gone when the test ends."""
    yield tmp_path / "server"
    assert script("wipe", directory=tmp_path / "server").returncode == 0
    assert running(tmp_path) == {}


def test_fixture_gives_a_bucket_that_keeps_objects(s3: S3) -> None:
    prefix = s3.new_prefix()
    with s3.client() as client:
        client.put_object(Bucket=s3.bucket, Key=f"{prefix}/a/b", Body=b"one")
        assert client.get_object(Bucket=s3.bucket, Key=f"{prefix}/a/b")["Body"].read() == b"one"

    assert s3.paths(prefix) == ["a/b"]
    assert s3.paths(s3.new_prefix()) == []


def test_server_refuses_to_replace_what_must_not_exist(s3: S3) -> None:
    """What the janitor's lease is built on; a server that ignores the condition proves nothing to us."""
    key = f"{s3.new_prefix()}/lease"
    with s3.client() as client:
        client.put_object(Bucket=s3.bucket, Key=key, Body=b"first", IfNoneMatch="*")
        with pytest.raises(ClientError, match="PreconditionFailed"):
            client.put_object(Bucket=s3.bucket, Key=key, Body=b"second", IfNoneMatch="*")
        assert client.get_object(Bucket=s3.bucket, Key=key)["Body"].read() == b"first"


def test_server_checks_signatures(s3: S3) -> None:
    stranger = replace(s3.on, credentials=Credentials(s3.access_key, "not the secret"))
    with stranger.client() as client, pytest.raises(ClientError, match=r"SignatureDoesNotMatch|403"):
        client.list_objects_v2(Bucket=s3.bucket)


def test_a_bucket_may_be_named_by_the_host_alone(s3: S3) -> None:
    """For clients that know no other way, LMCache's."""
    if s3.server is None:
        pytest.skip("a server that was named knows its own hosts only")
    with s3.client() as client:
        client.create_bucket(Bucket="localhost")
        client.put_object(Bucket="localhost", Key="x", Body=b"by host")
        client.put_object(Bucket=s3.bucket, Key="x", Body=b"by path")
        assert client.get_object(Bucket=s3.bucket, Key="x")["Body"].read() == b"by path"
    request = AWSRequest("GET", f"http://localhost:{urlsplit(s3.endpoint_url).port}/x")
    S3SigV4QueryAuth(botocore.credentials.Credentials(s3.access_key, s3.secret_key), "s3", REGION).add_auth(request)
    with urlopen(request.url) as answer:
        assert answer.read() == b"by host"


def test_credentials_stay_out_of_the_environment_and_of_messages(s3: S3) -> None:
    if s3.server is not None:
        assert s3.secret_key not in os.environ.values()
    assert s3.secret_key not in repr(s3)


def test_killed_gateway_comes_back_on_its_port_with_its_objects(s3: S3) -> None:
    if s3.server is None:
        pytest.skip("the server is not ours to kill")
    key = f"{s3.new_prefix()}/kept"
    with s3.client() as client:
        client.put_object(Bucket=s3.bucket, Key=key, Body=b"kept")
    s3.server.kill_gateway()
    try:
        with s3.client() as client, pytest.raises(EndpointConnectionError):
            client.head_object(Bucket=s3.bucket, Key=key)
    finally:
        s3.server.start_gateway()

    with s3.client() as client:
        assert client.get_object(Bucket=s3.bucket, Key=key)["Body"].read() == b"kept"


def test_starting_twice_is_one_server(s3: S3) -> None:
    if s3.server is None:
        pytest.skip("the server is not ours")
    before = running(s3.server.directory)
    assert sorted(before.values()) == sorted(PROGRAMS)
    again = json.loads(script("start", directory=s3.server.directory).stdout)

    assert again["endpoint_url"] == s3.endpoint_url
    assert running(s3.server.directory) == before


def test_servers_in_two_directories_do_not_meet(directory: Path, s3: S3) -> None:
    if s3.server is None:
        pytest.skip("the server of the session is not ours")
    other = start(directory)
    assert other.endpoint_url != s3.endpoint_url
    with other.client() as client:
        client.create_bucket(Bucket=other.name)
    ours = running(s3.server.directory)

    assert script("stop", directory=directory).returncode == 0
    assert running(directory) == {}
    assert running(s3.server.directory) == ours
    assert script("status", directory=directory).returncode == 1
    assert script("status", directory=s3.server.directory).returncode == 0


@pytest.mark.slow
def test_bluestore_keeps_objects_through_a_kill_of_everything(directory: Path) -> None:
    server = start(directory, "--store=bluestore", "--size-gib=1")
    with server.client() as client:
        client.create_bucket(Bucket=server.name)
        client.put_object(Bucket=server.name, Key="kept", Body=b"kept")
    for pid in running(directory):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not running(directory), "the end of the killed processes")

    again = start(directory, "--store=bluestore")
    with again.client() as client:
        assert client.get_object(Bucket=server.name, Key="kept")["Body"].read() == b"kept"
    refused = script("start", directory=directory)
    assert refused.returncode == 1
    assert "found=bluestore wanted=memstore" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seen", ["mon.pid", "osd.pid"])
def test_start_after_a_killed_start_succeeds(directory: Path, seen: str) -> None:
    """The starter is killed with some of the daemons up: the next start ends those and makes a whole server."""
    command = [SCRIPT, "start", f"--directory={directory}"]
    starter = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: (directory / seen).exists() or starter.poll() is not None, seen)
    finally:
        starter.kill()
        starter.wait()
    left, was_complete = running(directory), (directory / "server.json").exists()

    server = start(directory)
    assert sorted(running(directory).values()) == sorted(PROGRAMS)
    assert was_complete or not left.keys() & running(directory).keys()
    with server.client() as client:
        client.create_bucket(Bucket=server.name)


def test_stop_leaves_a_stranger_alone_whose_pid_is_in_our_file(directory: Path) -> None:
    directory.mkdir()
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        (directory / "gateway.pid").write_text(f"{stranger.pid}\n")
        assert script("stop", directory=directory).returncode == 0
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_machine_that_cannot_run_it_is_told_why_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "readlink", "python3"):
        found = subprocess.run(["/bin/sh", "-c", f"command -v {tool}"], capture_output=True, text=True, check=True)
        (tmp_path / "bin" / tool).symlink_to(found.stdout.strip())
    done = script("start", directory=tmp_path / "server", PATH=str(tmp_path / "bin"))

    assert done.returncode == 3
    assert done.stdout == ""
    for advice in ("apt-get install", "TIERED_KV_TEST_S3_ENDPOINT", "docker compose up", "missing=radosgw"):
        assert advice in done.stderr


NO_SERVER = """
import s3_service
from tests.kit.s3 import s3


def no_server(*_):
    raise s3_service.NoServerError("nothing here")


s3_service._choose = no_server
"""


def test_session_without_a_server_skips_and_under_ci_fails(tmp_path: Path, repository: Path) -> None:
    """A suite that was skipped proves nothing, and CI must not be green for it."""
    (tmp_path / "test_it.py").write_text("def test_it(s3):\n    assert s3\n")
    (tmp_path / "conftest.py").write_text(NO_SERVER)
    search = os.pathsep.join(str(repository / folder) for folder in (".", "scripts"))
    outcomes = {}
    for ci in ("", "true"):
        command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
        done = subprocess.run(
            [*command, "-c", os.devnull, "-W", "ignore", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"CI": ci, "PYTHONPATH": search},
        )
        outcomes[ci] = (done.returncode, done.stdout)

    assert outcomes[""][0] == 0
    assert "no S3 server: nothing here" in outcomes[""][1]
    assert outcomes["true"][0] == 1
    assert "CI=true, and there is no S3 server to test against: nothing here" in outcomes["true"][1]


def test_own_server_is_named_after_the_session(s3: S3) -> None:
    if s3.server is None:
        pytest.skip("the server is not ours")
    assert s3.server == OwnServer(SERVERS / f"pytest-{os.getpid()}")
