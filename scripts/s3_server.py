"""Run a real S3 server on this machine for tests and benchmarks: Ceph's object gateway (radosgw) over one store.

What it installs: Debian's packages radosgw, ceph-mon, ceph-osd and ceph-common (60 MB to download), and only if they
are missing, this is root and there is apt-get. No service of the system is set up or started.
Where its files are: one directory (--directory, by default .cache/s3/default in this repository): configuration, logs,
stored bytes, and server.json with endpoint and credentials. Nothing is written elsewhere.
Which ports: two free ones on 127.0.0.1 between 20000 and 30000 for the gateway and the monitor, and four from 6800 up
for the store. Nothing listens on another address.

Verbs:
  install  install the packages if they are missing, nothing else
  start    bring up what is not running, print one line of JSON: endpoint_url, access_key, secret_key, directory, ...
  stop     end the processes of this directory (SIGKILL: they are built for it), keep the files
  wipe     stop and remove the directory
  status   print the same line and which processes run

Exit codes: 0 done, 1 failed or (status) not running, 2 wrong arguments, 3 this machine cannot run it and why.

The processes are daemons: they outlive whoever started them. They are found by the one argument that only they have,
the path of the configuration file in their directory, so a lost pid file or a reused pid cannot mislead ``stop``.
"""

import argparse
import fcntl
import http.client
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from s3_processes import ROLES, end, processes

TEMPLATE = Path(__file__).with_name("s3_server.conf")
SERVERS = Path(__file__).resolve().parent.parent / ".cache" / "s3"
PACKAGES = ("radosgw", "ceph-mon", "ceph-osd", "ceph-common")
PROGRAMS = ("radosgw", "ceph-mon", "ceph-osd", "radosgw-admin", "ceph", "monmaptool")
POOLS = ("log", "control", "meta", "buckets.index", "buckets.data", "buckets.non-ec")
TRIES = 4
"""About one start in fifty fails for a reason inside Ceph that a second start does not meet."""

STEP_TIMEOUT_S = 60.0
PORTS = range(20000, 30000)
"""Below the range the kernel takes outgoing ports from: a gateway that was killed finds its port free again."""


class StartFailedError(Exception):
    """A step of the start did not end well; the message carries the end of its log."""


class UnsuitableMachineError(Exception):
    """The packages are missing and cannot be installed from here."""


@dataclass(frozen=True, slots=True)
class Server:
    """What a caller needs to know about a server; the content of server.json and of the line on stdout."""

    endpoint_url: str
    access_key: str
    secret_key: str
    directory: str
    store: str
    fsid: str
    mon_port: int

    @property
    def configuration(self) -> Path:
        return Path(self.directory) / "ceph.conf"

    @property
    def port(self) -> int:
        return int(self.endpoint_url.rpartition(":")[2])


# --- starting ------------------------------------------------------------------------------------------------------


def run(server: Server, *command: str, text: str | None = None) -> None:
    """Run one step; what it prints goes to a log, because a daemon would hold a pipe open for ever."""
    log = Path(server.directory) / "log" / "start.log"
    with log.open("a") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        started = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, cwd=server.directory, text=True
        )
        try:
            started.communicate(text, timeout=STEP_TIMEOUT_S)
        except subprocess.TimeoutExpired as exc:
            started.kill()
            started.wait()
            raise StartFailedError(f"no answer within {STEP_TIMEOUT_S:.0f} s. command={command[0]}") from exc
    if started.returncode != 0:
        tail = " | ".join(log.read_text(errors="replace").splitlines()[-4:])
        raise StartFailedError(f"exit code {started.returncode}. command={command[0]} log={tail}")


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listens on; another may take it before us, then the start is tried again."""
    for port in random.sample(PORTS, 200):
        with closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise StartFailedError(f"no free port was found. range={PORTS.start}-{PORTS.stop}")


def create(directory: Path, options: argparse.Namespace) -> Server:
    """Make the directory's content from nothing and bring the server up."""
    clear(directory)
    for name in ("mon", "osd", "run", "log", "crash"):
        (directory / name).mkdir()
    server = Server(
        endpoint_url=f"http://127.0.0.1:{options.port or free_port()}",
        access_key="test" + secrets.token_hex(8),
        secret_key=secrets.token_hex(20),
        directory=str(directory),
        store=options.store,
        fsid=str(uuid.uuid4()),
        mon_port=free_port(),
    )
    server.configuration.write_text(
        TEMPLATE.read_text().format(**asdict(server), port=server.port, size_bytes=options.size_gib << 30)
    )
    conf, osd_uuid = ("-c", str(server.configuration)), str(uuid.uuid4())
    monitor, monmap = f"[v1:127.0.0.1:{server.mon_port}]", str(directory / "monmap")
    run(server, "monmaptool", "--create", "--fsid", server.fsid, "--addv", "a", monitor, monmap)
    run(server, "ceph-mon", *conf, "--mkfs", "-i", "a", "--monmap", monmap)
    run(server, "ceph-mon", *conf, "-i", "a")
    # One process for all of it: every call of this program costs half a second of Python start-up.
    pools = (".rgw.root", *(f"default.rgw.{name}" for name in POOLS))
    orders = [f"osd new {osd_uuid} 0", "osd crush add osd.0 1.0 root=default host=localhost"]
    orders += [f"osd pool create {pool} 4 4" for pool in pools]
    run(server, "ceph", *conf, text="\n".join(orders) + "\n")
    run(server, "ceph-osd", *conf, "-i", "0", "--mkfs", "--osd-uuid", osd_uuid)
    start_store(server)
    user = ("--uid=test", "--display-name=test")
    keys = (f"--access-key={server.access_key}", f"--secret-key={server.secret_key}")
    run(server, "radosgw-admin", *conf, "-n", "client.rgw.a", "user", "create", *user, *keys)
    start_gateway(server)
    return server


def start_store(server: Server) -> None:
    """Start the store; its first question to a monitor that is itself starting can fail, so it is asked again."""
    for attempt in range(10):
        try:
            run(server, "ceph-osd", "-c", str(server.configuration), "-i", "0")
            return
        except StartFailedError:
            if attempt == 9:
                raise
            time.sleep(0.1)


def start_gateway(server: Server) -> None:
    """Start the gateway and wait until it answers."""
    run(server, "radosgw", "-c", str(server.configuration), "-n", "client.rgw.a")
    deadline = time.monotonic() + STEP_TIMEOUT_S
    while not answers(server):
        if time.monotonic() > deadline:
            raise StartFailedError(f"the gateway does not answer. endpoint={server.endpoint_url}")
        time.sleep(0.05)


def answers(server: Server) -> bool:
    """Whether the gateway answers a request that needs the store."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def resume(server: Server, directory: Path) -> bool:
    """Bring an existing server up again without losing what it stores; False when only a new one helps."""
    running = processes(directory)
    if "osd" not in running and server.store == "memstore":
        return False  # what it stored went with the process
    try:
        if "mon" not in running:
            run(server, "ceph-mon", "-c", str(server.configuration), "-i", "a")
        if "osd" not in running:
            start_store(server)
        if "gateway" not in running or not answers(server):
            end(directory, ("gateway",))
            start_gateway(server)
    except StartFailedError as exc:
        if server.store == "bluestore":
            raise  # never thrown away on our own account: its owner says wipe
        print(f"s3-server: the server cannot go on, making a new one: {exc}", file=sys.stderr)
        return False
    return True


def start(directory: Path, options: argparse.Namespace) -> Server:
    """Bring this directory's server up; what runs already is left alone."""
    known = read(directory)
    if known is not None:
        if known.store != options.store:
            raise StartFailedError(
                f"the directory has another kind of store; wipe it first. found={known.store} wanted={options.store}"
            )
        if resume(known, directory):
            return known
    for attempt in range(1, TRIES + 1):
        try:
            server = create(directory, options)
        except StartFailedError as exc:
            end(directory, tuple(ROLES))
            if attempt == TRIES:
                raise
            print(f"s3-server: start {attempt} of {TRIES} failed, trying again: {exc}", file=sys.stderr)
            continue
        temp = directory / "server.json.tmp"
        temp.touch(mode=0o600)
        temp.write_text(json.dumps(asdict(server)) + "\n")
        temp.replace(directory / "server.json")
        return server
    raise AssertionError("unreachable")


def install() -> None:
    """Install the packages if programs are missing.

    Raises:
        UnsuitableMachineError: This is not root on a system with apt-get, or the packages cannot be had.
    """
    if not (missing := missing_programs()):
        return
    advice = (
        "either install the packages: apt-get install --no-install-recommends " + " ".join(PACKAGES) + "; or name a "
        "server of your own: TIERED_KV_TEST_S3_ENDPOINT, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY; or use Docker: "
        "docker compose up --wait"
    )
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        why = "not root" if os.geteuid() != 0 else "no apt-get here"
        raise UnsuitableMachineError(f"cannot install Ceph's programs ({why}); {advice}. missing={','.join(missing)}")
    print(f"s3-server: installing {' '.join(PACKAGES)} (60 MB, once)", file=sys.stderr)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    wanted = ("apt-get", "install", "--yes", "--no-install-recommends", *PACKAGES)
    for command in (("apt-get", "update"), wanted):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0 and command is wanted:
            print(done.stderr[-2000:], file=sys.stderr)
    if missing := missing_programs():
        raise UnsuitableMachineError(f"apt-get did not bring Ceph's programs; {advice}. missing={','.join(missing)}")


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


# --- the directory ---------------------------------------------------------------------------------------------------


def read(directory: Path) -> Server | None:
    """The server that was brought up in this directory, running or not."""
    try:
        return Server(**json.loads((directory / "server.json").read_text()))
    except FileNotFoundError:
        return None


def clear(directory: Path) -> None:
    """Remove what a server left in the directory; the lock stays."""
    end(directory, tuple(ROLES))
    if (directory / "server.json").exists():
        (directory / "server.json").unlink()  # first: half a directory must not look like a server
    for entry in directory.iterdir():
        if entry.name == "lock":
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """One verb at a time per directory. A lock file that ``wipe`` has removed meanwhile counts for nothing."""
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            try:
                is_current = os.path.samestat(os.fstat(descriptor), os.stat(directory / "lock"))
            except FileNotFoundError:
                is_current = False
            if is_current:
                yield
                return
        finally:
            os.close(descriptor)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="s3-server", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("install", "start", "stop", "wipe", "status"))
    parser.add_argument("--directory", type=Path, default=SERVERS / "default", help="default: .cache/s3/default")
    parser.add_argument("--all", action="store_true", help="stop and wipe: every server below .cache/s3")
    parser.add_argument("--gateway", action="store_true", help="stop: only the gateway, so that stored bytes survive")
    parser.add_argument("--store", choices=("memstore", "bluestore"), default="memstore", help="memory (default), file")
    parser.add_argument("--size-gib", type=int, default=8, help="size of the store, default 8; a file is sparse")
    parser.add_argument("--port", type=int, default=0, help="port of the endpoint; default: a free one")
    options = parser.parse_args(arguments)
    if options.all and options.verb not in ("stop", "wipe"):
        parser.error("--all goes with stop and wipe only")
    if options.gateway and options.verb != "stop":
        parser.error("--gateway goes with stop only")
    if " " in str(options.directory.resolve()) or "," in str(options.directory.resolve()):
        parser.error(f"Ceph's configuration takes no blank or comma in a path. directory={options.directory}")
    return options


def act(options: argparse.Namespace, directory: Path) -> int:
    """Do what the verb says to one directory."""
    if options.verb == "install":
        install()
        return 0
    if options.verb in ("stop", "wipe", "status") and not directory.is_dir():
        return int(options.verb == "status")
    with locked(directory):
        if options.verb == "start":
            install()
            print(json.dumps(asdict(start(directory, options))))
        elif options.verb == "stop":
            end(directory, ("gateway",) if options.gateway else tuple(ROLES))
        elif options.verb == "wipe":
            clear(directory)
            shutil.rmtree(directory)
        else:
            running, server = processes(directory), read(directory)
            print(json.dumps({**(asdict(server) if server is not None else {}), "running": sorted(running)}))
            return int(server is None or set(running) != set(ROLES))
    return 0


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    directories = [options.directory.resolve()]
    if options.all:
        directories = sorted(path for path in SERVERS.glob("*") if path.is_dir())
    try:
        return max((act(options, directory) for directory in directories), default=0)
    except UnsuitableMachineError as exc:
        print(f"s3-server: {exc}", file=sys.stderr)
        return 3
    except (StartFailedError, TimeoutError) as exc:
        print(f"s3-server: {exc}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
