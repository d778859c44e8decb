"""A server as containers run it: a small /dev/shm, other process numbers, no privileges, a memory limit.

Namespaces and control groups are what containers are made of; there is no Docker engine here. Where this machine lets a
test have none, it is skipped with the reason, and ``CI`` does not make it fail: it is the machine's rule, not ours.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.kit.module_process import module_command, module_environment
from tests.kit.server.clients import CHUNK, SmallEngine, payload_bytes, settings
from tests.kit.server.probe import figures, wait_for
from tests.kit.server.processes import start_serve
from tests.kit.storage.stored_prompts import Model, tokens
from tests.kit.verbs import complaint, directory_tier, run

SHM_BYTES = 64 << 20
CHUNKS_PER_PROMPT = 20
NOT_ROOT = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
OWN_SHM = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c")
OWN_MOUNTS = ("unshare", "--mount", "sh", "-c")
BOUND = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
READ_ONLY = """
for place in /tmp /var/tmp; do mount --bind $place $place && mount -o remount,bind,ro $place || exit 1; done
mount -o remount,bind,ro / && mount -t tmpfs none "$1" && mount -t tmpfs none /mnt && cd / && shift && exec "$@"
"""
SMALL_SHM = f'mount -t tmpfs -o size={SHM_BYTES} tmpfs /dev/shm && exec "$@"'


def allowed(*command: str) -> bool:
    """Whether this machine lets us have such namespaces."""
    return subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0


Serve = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def serve_in() -> Iterator[Serve]:
    """Start `tiered-kv serve` behind a command that puts it somewhere; it is ready when this returns."""
    started: list[subprocess.Popen[str]] = []

    def start(before: tuple[str, ...], *arguments: object) -> subprocess.Popen[str]:
        process, line = start_serve(*arguments, before=before)
        started.append(process)
        assert line.startswith("serving "), process.communicate()[1]
        return process

    yield start
    for process in started:
        if process.poll() is None:
            terminate(process)


def terminate(process: subprocess.Popen[str]) -> str:
    """End a server with SIGTERM, as its init would: behind ``unshare`` it is its child, with process number 1."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]) if children else process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return errors


def client(root: Path, socket: Path) -> SmallEngine:
    """An engine of this machine, which knows the server by its socket alone."""
    return SmallEngine.start(settings(root, server=f"unix://{socket}", host_bytes=None, disk_bytes=None))


def test_an_arena_four_times_as_large_as_dev_shm_from_another_process_namespace(serve_in: Serve, root: Path) -> None:
    if not allowed(*OWN_SHM, SMALL_SHM, "sh"):
        pytest.skip("this machine gives out no mount and process namespaces")
    root.mkdir()
    socket = root / "s.sock"
    limits = ("--host-bytes", "256MiB", "--disk-bytes", "1GiB", "--socket", socket)
    serve_in((*OWN_SHM, SMALL_SHM, "sh"), f"file://{root}/kv", *limits)
    prompts = 3 * SHM_BYTES // (CHUNKS_PER_PROMPT * payload_bytes())
    with closing(client(root / "kv", socket)) as engine:
        for number in range(prompts):
            engine.store(CHUNKS_PER_PROMPT, first_token=10_000 * number)
        engine.wait_hits(CHUNKS_PER_PROMPT, first_token=10_000 * (prompts - 1))
        held = figures(root / "kv")["hierarchy"]["host_assigned_bytes"]
        assert held > 2 * SHM_BYTES, "it is in host memory, all of it"
        assert all(  # compares the bytes
            engine.hits(CHUNKS_PER_PROMPT, first_token=10_000 * number) == CHUNKS_PER_PROMPT
            for number in range(prompts)
        )


def test_a_server_that_has_another_directory_under_the_same_path_is_told_from_the_one_here(
    serve_in: Serve, root: Path
) -> None:
    root.mkdir()
    prompt, model = tokens(1, 2), Model()
    here, theirs = (directory_tier(root / name) for name in ("kv", "theirs"))
    for tier in (here, theirs):
        with tier.open() as storage:
            model.store(storage, prompt)
    mounts = (*OWN_MOUNTS, BOUND, "sh", str(root / "theirs"), str(root / "kv"))
    if not allowed(*mounts):
        pytest.skip("this machine gives out no mount namespaces")
    address, limits = f"unix://{root}/s.sock", ("--host-bytes", "64MiB", "--disk-bytes", "1GiB")
    serve_in(mounts, here.uri, *limits, "--socket", root / "s.sock")
    assert "is not its directory" in complaint("evict", "--server", address, "--all", "--yes")
    with here.open() as storage, theirs.open() as other:
        assert storage.contains(model.names(prompt)) == other.contains(model.names(prompt)) == [True, True]
    wrong = "the server that is named serves another directory"
    said = [run("doctor", tier.uri, "--set", f"server={address}").output for tier in (here, theirs)]
    assert [wrong in text for text in said] == [True, False]


def test_containers_that_share_one_of_directory_and_sockets_place_are_told_of_the_other(
    serve_in: Serve, root: Path, run_directory: Path
) -> None:
    root.mkdir()
    for name in ("kv", "theirs"):
        (root / name).mkdir()
    if not allowed(*OWN_MOUNTS, "true"):
        pytest.skip("this machine gives out no mount namespaces")
    own_run = (*OWN_MOUNTS, 'mount -t tmpfs none "$1" && shift && exec "$@"', "sh", str(run_directory))
    own_kv = (*OWN_MOUNTS, BOUND, "sh", str(root / "theirs"), str(root / "kv"))
    more = {"XDG_RUNTIME_DIR": str(run_directory)}
    serve_in(("env", f"XDG_RUNTIME_DIR={run_directory}"), f"file://{root}/kv", "--host-bytes", "8MiB")
    given = json.dumps({"storage_uri": f"file://{root}/kv", "chunk_tokens": CHUNK, "start_timeout_s": 5})
    command = module_command("tests.deploy.joining", given)
    for before, wanted in ((own_run, "its socket is not seen from here"), (own_kv, "or set XDG_RUNTIME_DIR")):
        done = subprocess.run(
            [*before, *command], capture_output=True, text=True, env=module_environment(**more), check=False
        )
        assert wanted in done.stderr, done.stderr


def test_an_engine_that_does_not_see_the_servers_directory_is_told_what_to_mount(serve_in: Serve, root: Path) -> None:
    root.mkdir()
    hidden = (*OWN_MOUNTS, 'mount -t tmpfs none "$1" && shift && exec "$@"', "sh", str(root / "kv"))
    if not allowed(*OWN_MOUNTS, "true"):
        pytest.skip("this machine gives out no mount namespaces")
    limits = ("--host-bytes", "64MiB", "--disk-bytes", "1GiB", "--socket", root / "s.sock")
    serve_in((), f"file://{root}/kv", *limits)
    given = json.dumps({"storage_uri": f"file://{root}/kv", "server": f"unix://{root}/s.sock", "chunk_tokens": CHUNK})
    command = module_command("tests.deploy.joining", given)
    seen, unseen = (
        subprocess.run([*before, *command], capture_output=True, text=True, env=module_environment(), check=False)
        for before in ((), hidden)
    )
    assert seen.stdout == "6 hits\n", seen.stderr
    assert f"{root}/kv, where nothing is seen of a server" in unseen.stderr and "mount it in both" in unseen.stderr


def test_a_read_only_file_system_with_one_volume(serve_in: Serve, root: Path) -> None:
    """As ``readOnlyRootFilesystem`` gives, without a volume for /tmp."""
    root.mkdir()
    before = (*OWN_MOUNTS, READ_ONLY, "sh", str(root))
    if not allowed(*before):
        pytest.skip("this machine gives out no mount namespaces")
    disk, bucket = f"file://{root}/kv", f"shared+file://{root}/bucket"
    nowhere, state = ("env", "-u", "XDG_RUNTIME_DIR"), ("env", "-u", "XDG_RUNTIME_DIR", f"XDG_STATE_HOME={root}")
    for uri, here, wanted in (
        (disk, nowhere, "set XDG_RUNTIME_DIR"),
        (bucket, nowhere, "set XDG_STATE_HOME"),
        (bucket, state, "set XDG_RUNTIME_DIR"),
    ):
        refused, line = start_serve(uri, before=(*before, *here))
        assert line == "" and wanted in refused.communicate()[1] and refused.returncode == 2
    short = "XDG_RUNTIME_DIR=/mnt"  # a socket's path has at most 107 bytes
    serve_in((*before, "env", short), disk, "--host-bytes", "8MiB", "--disk-bytes", "160MiB")
    serve_in((*before, *state, short), bucket, "--host-bytes", "8MiB")


def test_without_privileges_and_without_a_name_for_the_user(root: Path) -> None:
    """Server and client as a user that is in no passwd file and has no capabilities, as ``runAsUser: 1000`` gives."""
    if not allowed(*NOT_ROOT):
        pytest.skip("this machine gives out no user namespaces")
    root.mkdir()
    environment = module_environment(HOME="/nonexistent", TMPDIR=str(root))
    done = subprocess.run(
        [*NOT_ROOT, *module_command("tests.deploy.contained", root)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen == {"uid": 1000, "capabilities": 0, "hits": CHUNKS_PER_PROMPT, "hits_after_restart": CHUNKS_PER_PROMPT}


def test_doctor_for_a_user_without_name_and_home() -> None:
    if not allowed(*NOT_ROOT):
        pytest.skip("this machine gives out no user namespaces")
    nobody = ("unshare", "--user", "--map-user=54321", "--map-group=54321", "env", "-u", "HOME")
    more = module_environment(AWS_EC2_METADATA_DISABLED="true")
    words = ("doctor", "s3://bucket/kv?endpoint_url=http://127.0.0.1:9", "--json")
    done = subprocess.run(
        [*nobody, sys.executable, "-m", "tiered_kv.cli", *words],
        capture_output=True, text=True, env=more, timeout=120, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    found = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["credentials"]["status"] == "ok"


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of our own below this process's, version 1 or 2, with 256 MiB."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    found = [re.fullmatch(r"\d+:([^:]*):(.*)", line) for line in lines]
    places = {match[1]: match[2].lstrip("/") for match in found if match}
    if "memory" in places:
        group, limit = Path("/sys/fs/cgroup/memory") / places["memory"], "memory.limit_in_bytes"
    else:
        group, limit = Path("/sys/fs/cgroup") / places.get("", ""), "memory.max"
    own = group / f"tiered-kv-test-{os.getpid()}"
    try:
        own.mkdir()
    except OSError as exc:
        pytest.skip(f"this machine lets us make no control group: {exc}")
    try:
        if not (own / limit).exists():
            pytest.skip("the memory controller is not given to groups here")
        (own / limit).write_text(str(256 << 20))
        yield own
    finally:
        wait_for(lambda: not (own / "cgroup.procs").read_text(), "the group's processes to end")
        own.rmdir()


IN_GROUP = ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"')


def test_host_memory_is_a_tenth_of_the_groups_limit(memory_group: Path, serve_in: Serve, root: Path) -> None:
    server = serve_in((*IN_GROUP, str(memory_group)), f"file://{root}", "--disk-bytes", "1GiB")
    assert figures(root)["hierarchy"]["host_capacity_bytes"] <= (256 << 20) // 10
    with closing(SmallEngine.start(settings(root, host_bytes=None, disk_bytes=None))) as engine:
        for number in range(20):  # 14 MiB a round; more than the arena, and with the page cache more than the group
            engine.store(CHUNKS_PER_PROMPT, first_token=10_000 * number)
        engine.wait_hits(CHUNKS_PER_PROMPT, first_token=10_000 * 19)
    assert terminate(server) == ""
