"""What docs/security.md promises of code, files, names and sockets; other promises have tests beside their parts."""

import ast
import logging
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.server.clients import SmallEngine, hello, settings
from tests.kit.server.probe import server_pid, wait_ended, wait_written
from tests.kit.server.processes import end_server
from tiered_kv.fleet.layout import SERVER_ID
from tiered_kv.keys.naming import BlobName, object_path, parse_object_path, parse_path, relative_path
from tiered_kv.server.__main__ import _PrivateLog

# -- nothing that others wrote is ever run -----------------------------------------------------------------------------

RUNS_DATA = {
    *(
        "pickle",
        "cPickle",
        "_pickle",
        "marshal",
        "shelve",
        "dbm",
        "dill",
        "cloudpickle",
        "joblib",
        "jsonpickle",
        "yaml",
    ),
    *("code", "codeop", "runpy", "xmlrpc", "multiprocessing.connection"),
}
"""Modules whose readers run what they read, or that are made to run code."""

CALLS = {"eval", "exec", "compile", "__import__", "breakpoint", "input"}
METHODS = {"os.system", "os.popen", "torch.load", "torch.hub.load", "numpy.load", "np.load", "pty.spawn"}


def dangers(source: str) -> list[str]:
    """What in a module could run data as code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if _is_banned(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            found += [name for name in names if _is_banned(name)][:1]
        elif isinstance(node, ast.Call):
            found += _calls(node)
    return found


def _is_banned(module: str) -> bool:
    return module in RUNS_DATA or module.partition(".")[0] in RUNS_DATA


def _calls(node: ast.Call) -> list[str]:
    name = ast.unparse(node.func)
    given_ = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if name in CALLS or name in METHODS:
        return [name]
    if given_.get("shell", "False") != "False" or given_.get("allow_pickle", "False") != "False":
        return [f"{name} with {given_}"]
    if name.endswith(("Cache", "FanoutCache", "Deque", "Index")) and name.startswith("diskcache"):
        return [] if given_.get("disk") == "BytesOnlyDisk" else [f"{name} with diskcache's own pickling disk"]
    return []


def test_no_module_can_run_what_it_reads(repository: Path) -> None:
    modules = sorted((repository / "tiered_kv").rglob("*.py"))
    found = {str(path.relative_to(repository)): dangers(path.read_text()) for path in modules}
    assert {path: what for path, what in found.items() if what} == {}
    assert any("diskcache.Cache" in path.read_text() for path in modules), "the rule about diskcache is about nothing"


@pytest.mark.parametrize(
    "line",
    [
        *(
            "import pickle",
            "import os, pickle",
            "from pickle import loads",
            "import torch.serialization as p; torch.load(f)",
        ),
        *(
            "from multiprocessing.connection import Client",
            "import yaml",
            "eval(text)",
            "exec(text)",
            "__import__(name)",
        ),
        *("subprocess.run(x, shell=True)", "np.load(f, allow_pickle=True)", "os.system(x)", "diskcache.Cache(d)"),
        *("diskcache.Cache(d, disk=diskcache.JSONDisk)", "import joblib", "import marshal", "import shelve"),
    ],
)
def test_the_lint_notices(line: str) -> None:
    assert dangers(line)


# -- rights, under any umask -------------------------------------------------------------------------------------------

SCENE = """
import os, sys
from pathlib import Path
os.umask(int(sys.argv[2], 8))
from tests.kit.server.clients import SmallEngine, settings
from tests.kit.server.probe import wait_ended, wait_written
from tests.kit.server.object_nodes import Place, node, store
from tiered_kv.server.directory import read_info
from tests.kit.verbs import run
root = Path(sys.argv[1])
one = SmallEngine.start(settings(root / "a" / "cache"), "e")
one.store(4)
one.wait_hits(4)
one.client.reset()
wait_written(root / "a" / "cache")
assert run("pin", f"file://{root}/a/cache", one.keys(4).keys[0].hex()).exit_code == 0
one.close()
wait_ended(root / "a" / "cache")
uri = f"file://{root}/a/cache"
for words in (["verify", uri], ["gc", uri, "--yes"], ["doctor", uri], ["stat", uri]):
    done = run(*words)
    assert done.exit_code in (0, 4), (words, done.output)
key = one.keys(4).keys[0].hex()
assert run("export", uri, key, f"{root}/exported.safetensors").exit_code == 0
(root / "shared").mkdir(0o700)
with node(Place(f"shared+file://{root}/shared").settings(root / "front")) as cache:
    store(cache, 1, 3)
"""


def others_may(directory: Path) -> list[str]:
    """What below a directory somebody else may read, write or look into."""
    found = []
    for path in [directory, *directory.rglob("*")]:
        try:
            status = path.lstat()
        except FileNotFoundError:  # a server that is closing its database takes the log of it away
            continue
        if status.st_mode & 0o077 and not stat.S_ISLNK(status.st_mode):
            found.append(f"{path.relative_to(directory)} {stat.S_IMODE(status.st_mode):04o}")
    return found


@pytest.mark.parametrize("umask", ["0000", "0077"])
def test_everything_we_make_is_for_its_owner_alone(tmp_path: Path, runtime: Path, umask: str) -> None:
    place = tmp_path / "all"
    place.mkdir(0o700)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "XDG_STATE_HOME": str(place / "state"),
    }
    subprocess.run([sys.executable, "-c", SCENE, str(place), umask], env=environment, check=True, timeout=110)
    made = [path.relative_to(place) for path in place.rglob("*")]
    kinds = {path.name for path in made} | {path.suffix for path in made}
    assert {
        "namespace.json",
        "cache.db",
        "epochs.json",
        "pins.json",
        "server.log",
        "server.lock",
        ".safetensors",
    } <= kinds
    assert {"tmp", "blobs", "index", "_tiered_kv", "state"} <= kinds | {"state"}
    assert others_may(place) == []
    assert others_may(runtime) == []
    (place / "a").chmod(0o755)
    assert others_may(place) == ["a 0755"], "the look sees nothing"


def test_a_directory_that_others_may_write_into_is_used_with_a_warning(tmp_path: Path, runtime: Path) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(0o777)
    one = SmallEngine.start(settings(root), "e")
    one.store(2)
    one.wait_hits(2)
    wait_written(root)
    one.close()
    wait_ended(root)
    log = (root / "server.log").read_text()
    assert f"another user may write into the disk directory, and so into answers: chmod 0700. {root} owner=" in log
    assert "mode=0777" in log
    assert stat.S_IMODE(root.stat().st_mode) == 0o777  # an operator's own choice
    assert others_may(root) == [". 0777"]


def test_a_log_stays_private_when_it_is_rotated_and_is_no_way_out(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        log = _PrivateLog(tmp_path / "server.log", maxBytes=100, backupCount=1)
        for _ in range(10):
            log.stream.write("x" * 60)
            log.doRollover()
        log.close()
    finally:
        os.umask(before)
    assert others_may(tmp_path) == [f". {stat.S_IMODE(tmp_path.stat().st_mode):04o}"] * bool(
        tmp_path.stat().st_mode & 0o077
    )
    (tmp_path / "victim").write_text("precious")
    for make in (lambda p: p.symlink_to(tmp_path / "victim"), lambda p: p.hardlink_to(tmp_path / "victim"), os.mkfifo):
        place = tmp_path / "planted.log"
        make(place)
        with pytest.raises(OSError):  # noqa: PT011 - ELOOP, EINVAL, ENXIO
            _PrivateLog(place)
        place.unlink()
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_log_that_is_removed_from_a_full_disk_stops_nobody(tmp_path: Path) -> None:
    log = _PrivateLog(tmp_path / "server.log", maxBytes=1000, backupCount=1)
    log.stream.close()
    log.stream = open("/dev/full", "a", encoding="utf-8")  # noqa: SIM115 - the handler closes it
    log.stream.write("what the disk did not take\n")  # closing it fails therefore
    log.emit(logging.makeLogRecord({"msg": "what came later"}))
    log.close()
    assert (tmp_path / "server.log").read_text() == "what came later\n"


# -- names -------------------------------------------------------------------------------------------------------------

PARTS = st.binary(min_size=16, max_size=16)
FIXED = re.compile(r"[0-9a-f./]*safetensors")


@given(PARTS, PARTS, PARTS, st.integers(0, 9_999_999))
def test_names_are_made_of_a_fixed_set_of_characters(space: bytes, key: bytes, parent: bytes, depth: int) -> None:
    name = BlobName(space, key, parent, depth)
    for path in (relative_path(name), object_path(name)):
        assert FIXED.fullmatch(path)
        assert ".." not in path and not path.startswith("/") and path.count("/") == 2
    assert parse_path(relative_path(name)) == parse_object_path(object_path(name)) == name


@given(st.text(max_size=120) | st.from_regex(r"[0-9a-f]{32}/[0-9a-f]{2}/[0-9a-f.]{32,80}\.safetensors"))
def test_a_name_that_we_did_not_make_is_none_of_ours(path: str) -> None:
    for parse, make in ((parse_path, relative_path), (parse_object_path, object_path)):
        name = parse(path)
        assert name is None or make(name) == path
    assert SERVER_ID.fullmatch(path) is None or re.fullmatch(r"[A-Za-z0-9_-]+", path)


# -- sockets -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A private place for sockets, with a short path."""
    from tests.kit.server.processes import private_runtime

    with private_runtime() as directory:
        yield directory


def listening(pid: int) -> list[str]:
    """Addresses at which a process accepts TCP connections."""
    own = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = row.split()
            is_open = columns[3] == "0A" or table.startswith("udp")
            if is_open and f"socket:[{columns[9]}]" in own:
                host = columns[1].partition(":")[0]
                found.append(".".join(str(int(host[i : i + 2], 16)) for i in (6, 4, 2, 0)) if len(host) == 8 else host)
    return found


@pytest.mark.parametrize(
    ("options", "addresses"),
    [
        ((), []),
        (("--metrics-port", "0"), ["127.0.0.1"]),
        (("--metrics-port", "0", "--metrics-host", "127.0.0.2"), ["127.0.0.2"]),
        (("--metrics-port", "0", "--metrics-host", "0.0.0.0"), ["0.0.0.0"]),
    ],
)
def test_nothing_listens_on_the_network_but_what_was_asked_for(
    tmp_path: Path, runtime: Path, options: tuple[str, ...], addresses: list[str]
) -> None:
    limits = ("--host-bytes", "8MiB", "--disk-bytes", "160MiB")
    command = [sys.executable, "-m", "tiered_kv.cli", "serve", f"file://{tmp_path}/cache", *limits, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "serving" in process.stdout.readline()
            assert listening(process.pid) == addresses
        finally:
            process.terminate()


def test_a_server_that_an_engine_started_listens_on_its_socket_only(tmp_path: Path, runtime: Path) -> None:
    root = tmp_path / "cache"
    with hello(settings(root), "worker", "anchor"):
        assert listening(server_pid(root)) == []
    end_server(root)
