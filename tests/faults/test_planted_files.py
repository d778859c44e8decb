"""Files that somebody put into a cache's directory: nothing outside is read, written or deleted because of them.

Whoever may write into the directory can make a cache useless, and can change what it serves (docs/security.md). This is
about the rest: links, FIFOs, files of any size and records of any content must neither reach beyond the directory nor
hang, crash or bloat what opens it.
"""

import json
import os
import resource
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.kit.storage.disk_probe import open_disk
from tests.kit.verbs import run
from tiered_kv.cli.exits import EXIT_UNAVAILABLE
from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.keys.naming import relative_path
from tiered_kv.server.directory import ServerInfo, read_info, write_info
from tiered_kv.server.epochs import EpochFile
from tiered_kv.testing.blobs import SampleChain
from tiered_kv.tiers.disk.lock import DirectoryLock
from tiered_kv.tiers.disk.pins import changing_pins

CHAIN = SampleChain()
OTHER = SampleChain(seed=1)
PLANTED = SampleChain(seed=2)
RECORD = b'{"a":1}'
MEMORY_MAX = 64 << 20
HUGE = 1 << 36
DEEP = b"[" * 200_000

Plant = Callable[[Path, Path], None]


def space(root: Path, chain: SampleChain = CHAIN) -> Path:
    return root / "blobs" / chain.namespace.hex()


def blob(root: Path, index: int, chain: SampleChain = CHAIN) -> Path:
    return root / "blobs" / relative_path(chain.name(index))


def moved_out(path: Path, outside: Path) -> None:
    """A directory of ours that lies elsewhere now, with a link to it."""
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


def instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    make(path)


def huge(path: Path, head: bytes = b"") -> None:
    with path.open("wb") as file:
        file.write(head)
        file.truncate(HUGE)


def names_of(file: str) -> list[str]:
    """What it was written as before it was renamed, by versions that gave it no random digits."""
    return {"epochs.json": ["epochs.tmp"]}.get(file, [f"{file}.{os.getpid()}"])


def database(root: Path, *statements: str) -> None:
    with closing(sqlite3.connect(root / "index" / "cache.db")) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


DIRECTORIES: dict[str, Plant] = {
    "tmp is a link": lambda root, outside: ((root / "tmp").rmdir(), (root / "tmp").symlink_to(outside)),
    "blobs is a link": lambda root, outside: moved_out(root / "blobs", outside),
    "a namespace is a link": lambda root, outside: moved_out(space(root), outside),
    "another namespace is a link": lambda root, outside: space(root, OTHER).symlink_to(outside),
    "fan-outs are links": lambda root, outside: [moved_out(path, outside) for path in space(root).glob("??")],
    "index is a link": lambda root, outside: moved_out(root / "index", outside),
    "a damaged index is a link": lambda root, outside: (
        (root / "index.damaged-1").symlink_to(outside),
        (root / "index" / "cache.db").write_bytes(b"garbage" * 1000),
    ),
}
BLOBS: dict[str, Plant] = {
    "a blob is a link": lambda root, outside: instead(blob(root, 2), lambda p: p.symlink_to(outside / "victim")),
    "a blob is a device's": lambda root, outside: instead(blob(root, 2), lambda p: p.symlink_to("/dev/zero")),
    "a blob has a second name": lambda root, outside: instead(
        blob(root, 2), lambda p: p.hardlink_to(outside / "victim")
    ),
    "a blob is a FIFO": lambda root, outside: instead(blob(root, 2), os.mkfifo),
    "a blob is a directory": lambda root, outside: instead(blob(root, 2), lambda p: p.mkdir()),
    "a blob is huge": lambda root, outside: instead(blob(root, 2), lambda p: huge(p, CHAIN.blob(2).data)),
    "a blob without a header is huge": lambda root, outside: instead(blob(root, 2), huge),
    "temp files of all kinds": lambda root, outside: (
        (root / "tmp" / "link").symlink_to(outside / "victim"),
        (root / "tmp" / "name").hardlink_to(outside / "victim"),
        (root / "tmp" / "directory").mkdir(),
        os.mkfifo(root / "tmp" / "fifo"),
        [(root / "tmp" / f"{os.getpid()}-{n}").symlink_to(outside / "victim") for n in range(50)],
    ),
    "names for a terminal": lambda root, outside: (
        (space(root) / "\x1b[2J\x1b]0;owned\x07\n").mkdir(),
        (space(root) / "\x1b[2J\x1b]0;owned\x07\n" / "\udcff").write_bytes(b"x"),
    ),
}
INDEX: dict[str, Plant] = {
    "the database is a FIFO": lambda root, outside: instead(root / "index" / "cache.db", os.mkfifo),
    "the database is a link": lambda root, outside: instead(
        root / "index" / "cache.db", lambda p: p.symlink_to(outside / "victim")
    ),
    "a setting that is no argument": lambda root, outside: database(
        root, "INSERT INTO Settings VALUES ('disk_evil', 1)", "INSERT INTO Settings VALUES ('sqlite_x;y', 'z')"
    ),
    "settings of other types": lambda root, outside: database(root, "UPDATE Settings SET value = x'ff00'"),
    "triggers": lambda root, outside: database(
        root, "CREATE TRIGGER evil AFTER UPDATE ON Settings BEGIN DELETE FROM Cache; END"
    ),
    "no tables": lambda root, outside: database(root, "DROP TABLE Cache", "DROP TABLE Settings"),
    "a view in place of a table": lambda root, outside: database(
        root, "DROP TABLE Cache", "CREATE VIEW Cache AS SELECT * FROM Settings"
    ),
}
CONTENTS: dict[str, Callable[[Path, Path], None]] = {
    "a FIFO": lambda path, outside: instead(path, os.mkfifo),
    "a link": lambda path, outside: instead(path, lambda p: p.symlink_to(outside / "victim")),
    "a device's": lambda path, outside: instead(path, lambda p: p.symlink_to("/dev/zero")),
    "a second name": lambda path, outside: instead(path, lambda p: p.hardlink_to(outside / "victim")),
    "a directory": lambda path, outside: instead(path, lambda p: p.mkdir()),
    "huge": lambda path, outside: instead(path, huge),
    "garbage": lambda path, outside: path.write_bytes(b"\xff\x00garbage"),
    "deep": lambda path, outside: path.write_bytes(DEEP),
    "of other types": lambda path, outside: path.write_bytes(b'{"pid": [], "socket": {}, "version": 1e400, "pins": 3}'),
    "a temp file that is a link": lambda path, outside: [
        instead(path.with_name(name), lambda p: p.symlink_to(outside / "victim")) for name in names_of(path.name)
    ],
    "a temp file with a second name": lambda path, outside: [
        instead(path.with_name(name), lambda p: p.hardlink_to(outside / "victim")) for name in names_of(path.name)
    ],
    "a temp file that is a FIFO": lambda path, outside: [
        instead(path.with_name(name), os.mkfifo) for name in names_of(path.name)
    ],
}
FILES = ("namespace.json", "server.json", "epochs.json", "pins.json", "pins.lock", "server.lock")


def planted(file: str, content: Callable[[Path, Path], None]) -> Plant:
    def plant(root: Path, outside: Path) -> None:
        content((space(root) if file == "namespace.json" else root) / file, outside)

    return plant


PLANTS: dict[str, Plant] = {
    **DIRECTORIES,
    **BLOBS,
    **INDEX,
    **{f"{file}: {name}": planted(file, content) for file in FILES for name, content in CONTENTS.items()},
}
REFUSED = {"tmp is a link", "blobs is a link"} | {
    f"server.lock: {name}" for name in ("a link", "a device's", "a directory")
}
"""What no tier is opened over; everything else costs at most the chunks that it is about."""

NO_SERVER = {f"server.json: {name}" for name in CONTENTS if not name.startswith("a temp file")}
"""What no server replaces with its own."""


def everything(directory: Path) -> dict[str, tuple[int, bytes]]:
    """All that lies below a directory, with its size and bytes."""
    return {
        str(path.relative_to(directory)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(directory.rglob("*"))
    }


def use_tier(root: Path) -> bool:
    """Everything a server does with its directory; False where it refuses to begin."""
    try:
        tier = open_disk(root)
    except TieredKVError as exc:
        assert len(str(exc)) < 2000
        return False
    try:
        buffer = bytearray(len(CHAIN.blob(0).data))
        for index in range(6):
            for chain in (CHAIN, OTHER, PLANTED):
                with suppress(TieredKVError):
                    tier.get_into(chain.name(index), memoryview(buffer))
                with suppress(TieredKVError):
                    tier.put(chain.name(index), chain.blob(index).view())
                with suppress(TieredKVError):
                    tier.contains(chain.name(index))
        for chain in (CHAIN, OTHER):
            with suppress(TieredKVError):
                tier.describe(chain.namespace, RECORD)
        assert list(tier.scan()) and tier.usage().blob_count
        with suppress(TieredKVError):
            tier.delete(CHAIN.name(1))
        with suppress(TieredKVError):
            tier.delete(CHAIN.name(2))
        assert tier.get_into(PLANTED.name(3), memoryview(buffer)), "what was put is not there"
        assert bytes(buffer) == PLANTED.blob(3).data
        tier.flush()
    finally:
        tier.close()
    return True


def use_files(root: Path) -> bool:
    """The small files beside the blobs, as the server and the command line use them; False: no server would start."""
    with suppress(TieredKVError):
        EpochFile(root).retire(bytes(16))
    with suppress(TieredKVError), changing_pins(root) as pins:
        pins[CHAIN.name(0)] = 0.0
    with suppress(TieredKVError):
        DirectoryLock(root).release()
    assert read_info(root) is None or read_info(root).pid == 1
    before = (root / "server.json").lstat() if os.path.lexists(root / "server.json") else None
    try:
        write_info(root, ServerInfo("/nowhere", 1, "v", 1, "0" * 16, "x"))
    except ConfigError as exc:
        assert before is not None and os.path.samestat((root / "server.json").lstat(), before), "what is not ours went"
        assert "is not what a cache server writes, so it stays" in str(exc) and len(str(exc)) < 2000
        return False
    return True


def use_verbs(root: Path, *, all_of_them: bool) -> None:
    """Verbs that look, and verbs that remove; the first few meet every small file."""
    uri = f"file://{root}"
    verbs = (
        ["stat", uri],
        ["gc", uri, "--yes"],
        ["ls", uri],
        ["ls", uri, "--json"],
        ["verify", uri],
        ["inspect", uri, CHAIN.key(2).hex()],
        ["verify", uri, "--repair", "--yes"],
        ["evict", uri, "--namespace", CHAIN.namespace.hex(), "--all", "--yes"],
    )
    for verb in verbs if all_of_them else verbs[:2]:
        done = run(*verb)
        assert done.exit_code in range(6), (verb, done.exit_code, done.output)
        assert done.exception is None or isinstance(done.exception, SystemExit), (verb, done.exception)
        assert "\x1b" not in done.output, verb


@pytest.mark.parametrize("case", PLANTS)
def test_what_was_planted_reaches_nothing_beyond_the_directory(tmp_path: Path, case: str) -> None:
    root, outside = tmp_path / "cache", tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_bytes(b"precious")
    tier = open_disk(root)
    for index in range(4):
        tier.put(CHAIN.name(index), CHAIN.blob(index).view())
    tier.describe(CHAIN.namespace, RECORD)
    tier.close()
    PLANTS[case](root, outside)
    before, peak_kb = everything(outside), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    use_verbs(root, all_of_them=": " not in case)
    is_open = use_tier(root)
    assert use_files(root) == (case not in NO_SERVER)
    use_tier(root)
    assert everything(outside) == before
    assert is_open == (case not in REFUSED)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kb) << 10 < MEMORY_MAX


def test_a_bucket_in_a_directory_survives_the_same(tmp_path: Path) -> None:
    """The command line over a directory that machines mount."""
    root = tmp_path / "shared"
    root.mkdir()
    place = space(root).relative_to(root / "blobs")
    (root / place).mkdir(parents=True)
    os.mkfifo(root / place / "namespace.json")
    (root / "_tiered_kv").mkdir()
    huge(root / "_tiered_kv" / "terms")
    done = run("ls", f"shared+file://{root}", "--set", "storage_timeout_s=1")
    assert done.exit_code in (0, EXIT_UNAVAILABLE) and "Traceback" not in done.output


def test_a_record_cannot_speak_to_the_terminal(tmp_path: Path) -> None:
    """What a record says reaches people: as text, not as orders to their terminal."""
    from tests.kit.storage.stored_prompts import Model, tokens
    from tests.kit.verbs import directory_tier

    tier = directory_tier(tmp_path / "kv")
    model = Model(weights="user:\x1b[2J\x1b]0;owned\x07")
    with tier.open() as storage:
        model.store(storage, tokens(1, 2))
    for verb in ("ls", "du", "tree", "stat", "verify", "doctor"):
        done = run(verb, tier.uri)
        assert "\x1b" not in done.output and "\x07" not in done.output, verb
    assert "owned" in json.dumps(json.loads(run("ls", tier.uri, "--json").stdout))
