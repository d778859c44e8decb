"""The fifteen faults that users of tiered caches were hurt by, on a real directory, each with every invariant.

F1 (kill) is in test_disk_kills.py and test_server_kills.py, F8-F10 (S3) and F13 (failed loads) need a store or an
engine: tests/e2e/test_object_faults.py and tests/e2e/test_load_failures.py. docs/reliability.md has the whole table.
"""

import contextlib
import os
import random
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.counts import count, seed
from tests.kit.engine_world import BLOB_BYTES, NAMESPACES, SPACES
from tests.kit.faults.scene import LIMIT_BYTES, OTHERS, PREFIX, Damage, FaultScene
from tests.kit.storage.disk_probe import blob_files
from tiered_kv import Cache
from tiered_kv.chunks import header
from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.errors import ConfigError, TierUnavailable
from tiered_kv.keys.namespace import REQUIRED_FIELDS
from tiered_kv.testing.faults import Fault

LAST = PREFIX
MIDDLE = PREFIX[:2]
CORRUPT = "read_failed_corrupt"
CORRUPT_LINE = r"outcome=corrupt operation=read tier=disk blob=[0-9a-f/]+\.safetensors cause=\S"
REMOVED_LINE = r"files that are not blobs of ours\. path=\S+ left_out=[12]"


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[FaultScene]:
    one = FaultScene(tmp_path)
    yield one
    one.end()


def stored(scene: FaultScene) -> FaultScene:
    """PREFIX on disk and not in host memory."""
    scene.store(PREFIX)
    scene.forget_host()
    return scene


def rewritten(change: Callable[[bytearray], None]) -> Damage:
    """Change a chunk's file in place."""

    def damage(scene: FaultScene) -> None:
        path = scene.file(MIDDLE)
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)

    return damage


def zeros(share: float) -> Damage:
    """What a power failure leaves of a file whose rename reached the disk before its data."""

    def change(data: bytearray) -> None:
        data[int(len(data) * share) :] = bytes(len(data) - int(len(data) * share))

    return rewritten(change)


def resized(size: int) -> Damage:
    return lambda scene: os.truncate(scene.file(MIDDLE), size)


def flipped(bit: int) -> Damage:
    def change(data: bytearray) -> None:
        data[bit // 8 % len(data)] ^= 1 << bit % 8

    return rewritten(change)


def swapped(scene: FaultScene) -> None:
    """Two sound blobs under each other's name."""
    one, other = scene.file(MIDDLE), scene.file(OTHERS[0])
    aside = scene.root / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def copied_from_another_chunk(scene: FaultScene) -> None:
    shutil.copyfile(scene.file(OTHERS[0]), scene.file(MIDDLE))


HEADER_BOUNDARIES = sorted({0, 1, 8, header.TABLE_OFFSET, 4095, 4096, 8192, BLOB_BYTES - 4096, BLOB_BYTES - 1})
FLIPS = [random.Random(f"flip {seed()} {number}").randrange(BLOB_BYTES * 8) for number in range(count("FLIPS", 12))]

DAMAGES: dict[str, Damage] = {
    "F2 all zeros": zeros(0),
    "F2 second half zeros": zeros(0.5),
    "F2 last page zeros": zeros(1 - 1024 / BLOB_BYTES),
    **{f"F3 cut to {size}": resized(size) for size in HEADER_BOUNDARIES},
    "F3 longer by 1": resized(BLOB_BYTES + 1),
    "F3 longer by a page": resized(BLOB_BYTES + 4096),
    **{f"F4 bit {bit}": flipped(bit) for bit in FLIPS},
    "F5 swapped": swapped,
    "F5 another chunk's": copied_from_another_chunk,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_files_are_misses_and_stored_again(scene: FaultScene, damage: Damage) -> None:
    stored(scene)
    before = scene.file(MIDDLE).read_bytes()
    damage(scene)
    assert scene.load() == 1, "only what lies before the damage is left"
    scene.store(PREFIX)
    assert scene.file(MIDDLE).read_bytes()[: len(before)] == before[: len(before)] or scene.load() == 3
    scene.forget_host()
    assert scene.load() == 3
    scene.check(CORRUPT, CORRUPT_LINE)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_files_are_misses_after_a_restart_too(scene: FaultScene, damage: Damage) -> None:
    """Some are found by the scan, the rest by the read that verifies."""
    stored(scene)
    damage(scene)
    scene.crash()
    is_found_by_the_scan = scene.disk.unreadable_count > 0
    assert scene.load() == 1
    scene.store(PREFIX)
    scene.forget_host()
    assert scene.load() == 3
    scene.check("" if is_found_by_the_scan else CORRUPT, REMOVED_LINE if is_found_by_the_scan else CORRUPT_LINE)


# -- F5: another model's, another rank's ------------------------------------------------------------------------------


def test_a_blob_of_another_namespace_is_never_read_and_never_removed(scene: FaultScene) -> None:
    """Another model, or the same one with other ranks: the namespace covers both. Equal size, equal geometry."""
    stored(scene)
    other = scene.world.open("other")
    scene.world.settle()
    scene.world.store(other, PREFIX)
    theirs = scene.file(MIDDLE, "other").read_bytes()
    shutil.copyfile(scene.file(MIDDLE, "other"), scene.file(MIDDLE))
    assert scene.load() == 1
    scene.store(PREFIX)
    assert scene.load() == 3, "host memory serves what the disk cannot take under this name"
    assert scene.file(MIDDLE).read_bytes() == theirs, "what is somebody else's was overwritten or removed"
    scene.check("read_failed_foreign", r"outcome=foreign operation=read tier=disk blob=\S+ cause=\S")


# -- F6: no room -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that holds some twenty chunks."""
    point = tmp_path / "small"
    point.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m,mode=700", "none", point], check=False)
    if mounted.returncode:
        pytest.skip("mounting needs root")
    yield point
    subprocess.run(["umount", "-l", point], check=True)  # lazy: a failed test may still have files open


def fill_up(disk: Path) -> Path:
    """A file of somebody else's that leaves no room."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            continue
    return ballast


def test_a_full_disk_drops_stores_and_takes_them_again_when_there_is_room(small_disk: Path) -> None:
    """F6, with other files than ours filling it: our own limit is never reached."""
    scene = FaultScene(small_disk)
    scene.store(PREFIX)
    ballast = fill_up(small_disk)
    before = len(blob_files(small_disk))
    scene.forget_host()
    assert scene.counter("write_failed_no_room") > 0
    assert len(blob_files(small_disk)) <= before, "the least recently used made room, and no more than that"
    assert scene.load(OTHERS[-1]) == 1
    ballast.unlink()
    scene.pass_time()
    scene.check("write_failed_no_room", r"outcome=no_room operation=write tier=disk blob=\S+ cause=.*ENOSPC path=\S+")
    scene.end()


def test_a_new_model_starts_on_a_full_disk(small_disk: Path) -> None:
    """F6: not even its namespace.json finds room; it gets a cache in memory, and the disk when there is room."""
    scene = FaultScene(small_disk)
    scene.store(PREFIX)
    ballast = fill_up(small_disk)
    newcomer = scene.world.open("other")
    scene.world.settle()
    scene.world.store(newcomer, PREFIX)
    assert scene.world.loaded(newcomer, PREFIX) == 3
    refused = "namespace.json was not written, and is tried again. tier=disk"
    assert any(refused in line and "ENOSPC" in line for line in scene.log.lines)
    ballast.unlink()
    scene.world.store(newcomer, OTHERS[0])
    scene.pass_time()
    written = {path.parent.parent.name for path in blob_files(small_disk)}
    assert NAMESPACES["other"].digest.hex() in written
    assert (small_disk / "blobs" / NAMESPACES["other"].digest.hex() / "namespace.json").is_file()
    scene.end()


def test_a_server_starts_on_a_full_disk_and_gives_what_is_there(small_disk: Path) -> None:
    """F6: nor is there room for the file that says who owns the directory. A blob or two make way for that."""
    page = LayerPage("layer", "BF16", (2, 16, 64), "HNC")
    skipped = ("geometry", "epoch", "chunk_tokens", "format_version")
    namespace = {name: "test" for name in REQUIRED_FIELDS if name not in skipped} | {"block_tokens": 16}
    limits = {"host_bytes": "8MiB", "disk_bytes": "80MiB", "min_free_bytes": "64KiB", "chunk_tokens": 64}
    settings, tokens = {"storage_uri": f"file://{small_disk}"} | limits, list(range(40 * 64))
    with Cache(settings, namespace, [page]) as cache:
        assert cache.store(tokens, lambda index: bytes([index]) * cache.chunk_bytes) == 40
    assert len(blob_files(small_disk)) == 40
    fill_up(small_disk)
    with Cache(settings, namespace, [page]) as cache, cache.load(tokens) as prefix:
        assert [bytes(chunk[:1]) for chunk in prefix.chunks] == [bytes([index]) for index in range(len(prefix.chunks))]
        assert 30 < len(prefix.chunks) < 40
    assert len(blob_files(small_disk)) == len(prefix.chunks)


def test_a_limit_on_file_sizes_drops_stores(tmp_path: Path) -> None:
    """F6, EFBIG. In a child: the limit is the process's own."""

    def limited() -> None:
        scene = FaultScene(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (BLOB_BYTES - 4096, resource.RLIM_INFINITY))
        scene.store(PREFIX)
        assert blob_files(tmp_path) == []
        assert scene.load() == 3, "host memory serves"
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        scene.pass_time()
        scene.check("write_failed_no_room", "outcome=no_room .*EFBIG path=")
        scene.end()

    in_a_child(limited)


def in_a_child(scenario: Callable[[], None]) -> None:
    """Run a scenario in a process of its own and tell how it failed."""
    reports, report = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            scenario()
            code = 0
        except BaseException as exc:  # noqa: BLE001 - told to the parent, whatever it is
            os.write(report, repr(exc).encode()[:4000])
        finally:
            os._exit(code)
    os.close(report)
    with os.fdopen(reports, "rb") as said:
        failure = said.read().decode()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, failure


# -- F7: no access -----------------------------------------------------------------------------------------------------


def test_a_directory_that_turns_read_only_serves_on_and_is_written_when_it_may(scene: FaultScene) -> None:
    stored(scene)
    fan_out = [path for path in scene.root.rglob("*") if path.is_dir()]
    immutable(fan_out, True)
    try:
        for number in range(8):
            scene.store((200 + number,))
        assert scene.is_open, "every store pays for a medium that refuses them"
        assert scene.load((200 + 7,)) == 1, "host memory serves"
    finally:
        immutable(fan_out, False)
    scene.pass_time()
    assert not scene.is_open
    assert scene.load() == 3
    scene.check("write_failed_unavailable", r"operation=write tier=disk blob=\S+ cause=.*errno=(EPERM|EACCES) path=")


def test_a_disk_that_is_remounted_read_only_gives_what_it_has(scene: FaultScene) -> None:
    """As a kernel does with a file system that it found damaged: what is there can be read for as long as it lasts."""
    stored(scene)
    with read_only(scene.root):
        for number in range(8):
            scene.store((200 + number,))
        scene.forget_host()
        assert not scene.is_open, "reads were refused, too"
        assert scene.load() == 3
    scene.check("write_failed_no_room", r"operation=write tier=disk blob=\S+ cause=the file system is read-only")


@contextlib.contextmanager
def read_only(root: Path) -> Iterator[None]:
    """Mount it over itself: whoever has a file open there for writing keeps that, all else is refused."""
    for command in (["--bind", root, root], ["-o", "remount,bind,ro", root]):
        done = subprocess.run(["mount", *command], check=False, capture_output=True)
        if done.returncode:
            pytest.skip(f"mounting is not allowed here: {done.stderr!r}")
    try:
        yield
    finally:
        subprocess.run(["umount", root], check=True)


def immutable(directories: list[Path], wanted: bool) -> None:
    """Refuse new names; root needs the flag for that, others a mode."""
    if os.geteuid() != 0:
        for directory in directories:
            directory.chmod(0o500 if wanted else 0o700)
        return
    if shutil.which("chattr") is None:
        pytest.skip("root needs chattr to be refused")
    done = subprocess.run(["chattr", "+i" if wanted else "-i", *directories], check=False, capture_output=True)
    if done.returncode:
        pytest.skip(f"chattr is not allowed here: {done.stderr!r}")


def test_a_directory_removed_while_it_is_used_is_a_miss_and_filled_again(scene: FaultScene) -> None:
    """F7: everything but the lock. Without the lock the server ends: test_lost_directory.py."""
    stored(scene)
    for name in ("blobs", "tmp", "index"):
        shutil.rmtree(scene.root / name)
    assert scene.load() == 0
    scene.pass_time()
    scene.store(PREFIX)
    scene.forget_host()
    assert scene.load() == 3
    scene.notice()
    scene.check("read_failed_missing")


def test_a_missing_or_foreign_place_is_told_at_the_start(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_bytes(b"")
    with pytest.raises(TierUnavailable, match=r"errno=\w+ path="):
        FaultScene(place)
    with pytest.raises(ConfigError, match="leaves no room for blobs"):
        FaultScene(tmp_path / "small", limit_bytes=-1)


# -- F11: the same chunk twice, readers during writes ------------------------------------------------------------------


@pytest.mark.parametrize("number", range(seed(), seed() + count("SEEDS", 10)))
def test_two_engines_that_store_one_prefix_at_once_store_it_once(scene: FaultScene, number: int) -> None:
    """In every order of seals, writes and reads that the seed draws."""
    draw = random.Random(f"two {number}")
    sessions = [scene.session, scene.world.open()]
    scene.world.settle()
    for _ in range(3):
        for session in draw.sample(sessions, 2):
            for depth in range(1, len(PREFIX) + 1):
                scene.world.commit(session, PREFIX[:depth])
                if draw.random() < 0.3:
                    scene.world.lookup(session, PREFIX)
                for _ in range(draw.randrange(4)):
                    scene.world.run_one(draw.randrange)
    scene.world.settle(draw.randrange)
    for lookup in list(scene.world.lookups):
        scene.world.release(lookup)
    assert len(blob_files(scene.root)) == len(PREFIX)
    assert scene.load() == 3
    scene.check("store_duplicate")


# -- F12: gone between the answer and the load, and during it ---------------------------------------------------------


def test_what_was_promised_is_loaded_although_its_files_are_removed(scene: FaultScene) -> None:
    stored(scene)
    lookup = scene.world.lookup(scene.session, PREFIX)
    scene.world.settle()
    for file in blob_files(scene.root):
        file.unlink()
    scene.forget_host()
    scene.world.step()  # compares the promised bytes
    update = scene.world.lookups[lookup].update
    assert update is not None and update.ready == 3
    scene.world.release(lookup)
    scene.notice()
    scene.check("host_evicted")


def test_files_removed_after_the_answer_and_before_the_read_are_a_miss(scene: FaultScene) -> None:
    stored(scene)
    lookup = scene.world.lookup(scene.session, PREFIX)
    scene.world.step()  # reads are queued
    scene.file(MIDDLE).unlink()
    scene.world.settle()
    update = scene.world.lookups[lookup].update
    assert update is not None and (update.ready, update.is_done) == (1, True)
    scene.world.release(lookup)
    scene.check("read_failed_missing")


def test_a_file_that_shrinks_while_it_is_read_is_a_miss(scene: FaultScene, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(scene)
    victim, read = scene.file(MIDDLE), os.preadv

    def shrinking(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if os.path.samestat(os.fstat(descriptor), victim.stat()):
            os.truncate(victim, 4096)
            return read(descriptor, [buffers[0][:8192]], offset)
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", shrinking)
    assert scene.load() == 1
    monkeypatch.undo()
    scene.check(CORRUPT, CORRUPT_LINE)


@pytest.mark.slow
def test_files_removed_all_the_time_cost_misses_only(tmp_path: Path) -> None:
    """``rm`` in a loop beside 200 requests."""
    scene, is_over = FaultScene(tmp_path), threading.Event()

    def remove() -> None:
        draw = random.Random(seed())
        while not is_over.wait(0.001):
            if files := blob_files(tmp_path):
                draw.choice(files).unlink(missing_ok=True)

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        hits = 0
        for number in range(200):
            path = (number % 12, 1, 2)
            hits += scene.load(path)
            scene.store(path)
    finally:
        is_over.set()
        remover.join()
    scene.notice()
    assert hits > 0
    scene.check("read_failed_missing")
    scene.end()


# -- F14: clocks that jump ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump_s", [-86_400, 86_400, 10 * 365 * 86_400], ids=["a day back", "a day on", "ten years on"])
def test_files_dated_anew_are_neither_evicted_nor_kept_for_it(scene: FaultScene, jump_s: int) -> None:
    stored(scene)
    for file in blob_files(scene.root):
        status = file.stat()
        os.utime(file, (status.st_atime + jump_s, status.st_mtime + jump_s))
    scene.restart()
    assert scene.load() == 3, "a date expired a chunk"
    scene.check()
    assert scene.world.tiering.counters["lower_evicted"] == 0


def test_a_wall_clock_that_goes_back_keeps_the_order_of_eviction(
    scene: FaultScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least recently used go first, whatever the clock said when they were used."""
    room = LIMIT_BYTES // BLOB_BYTES
    paths = [(number,) for number in range(2 * room)]
    for number, path in enumerate(paths):
        jump = 86_400 * (-1) ** number * number
        monkeypatch.setattr(scene.world.clock, "wall", lambda jump=jump: 1_700_000_000 + jump)
        scene.store(path)
    kept = [path for path in paths if scene.file(path).exists()]
    assert kept == paths[-len(kept) :] and len(kept) > room // 2
    scene.restart()
    scene.store((9_999,))
    assert scene.file(paths[-1]).exists()
    assert scene.file(kept[0]).exists() == (len(kept) < room)
    scene.check("lower_evicted")


# -- F15: nothing left to give -----------------------------------------------------------------------------------------


def test_without_file_descriptors_there_are_misses_and_nothing_spins(tmp_path: Path) -> None:
    def starved() -> None:
        scene = stored(FaultScene(tmp_path))
        taken = []
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        assert scene.load() == 0
        scene.store((5, 5))
        assert scene.load((5, 5)) == 2, "host memory serves"
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        scene.pass_time()
        assert scene.load() == 3
        scene.check("read_failed_unavailable", r"operation=read tier=disk blob=\S+ cause=.*errno=EMFILE path=")
        scene.end()

    in_a_child(starved)


def test_with_every_slot_leased_requests_get_less_and_the_engine_does_not_spin(tmp_path: Path) -> None:
    scene = FaultScene(tmp_path, host_bytes=8 * BLOB_BYTES)
    prefixes = [(number, 1, 2, 3) for number in range(8)]
    for prefix in prefixes:
        scene.store(prefix)
    lookups = [scene.world.lookup(scene.session, prefix) for prefix in prefixes]
    scene.world.settle()
    updates = [scene.world.lookups[lookup].update for lookup in lookups]
    assert all(one is not None and (one.is_done or one.queued) for one in updates), "a request waits for something else"
    ready = [update.ready for update in updates if update is not None]
    assert 0 < sum(ready) <= 8 and min(ready) == 0, "more is leased than there is"
    assert not scene.world.run_one(), "something runs although nothing can be done"
    for lookup in lookups[:2]:
        scene.world.release(lookup)
    scene.world.settle()
    went_on = [scene.world.lookups[lookup].update for lookup in lookups[2:]]
    assert sum(one.ready for one in went_on if one is not None) > sum(ready[2:]), (
        "whose leases end leaves room to nobody"
    )
    for lookup in lookups[2:]:
        scene.world.release(lookup)
    assert scene.load(prefixes[0]) > 0
    scene.check("lease_cap_reached" if scene.counter("lease_cap_reached") else "promotion_without_slot")
    scene.end()


def test_memory_that_runs_out_during_a_read_is_a_miss(scene: FaultScene, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(scene)

    def short(*_arguments: object) -> int:
        raise MemoryError

    monkeypatch.setattr(os, "preadv", short)
    assert scene.load() == 0
    monkeypatch.undo()
    scene.pass_time()
    assert scene.load() == 3
    scene.check("read_failed_unavailable", r"outcome=unavailable operation=read .* cause=MemoryError")


def test_a_garbled_index_is_moved_aside_and_everything_is_found(scene: FaultScene) -> None:
    stored(scene)
    scene.world.close()
    for file in (scene.root / "index").rglob("*"):
        if file.is_file():
            file.write_bytes(b"garbage" * 1000)
    scene.open()
    assert scene.load() == 3
    scene.check("", "index")


# -- the n-th operation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.value)
def test_a_tier_whose_every_operation_fails_costs_hits_and_recovers(tmp_path: Path, fault: Fault) -> None:
    """From the first failure until the fault ends, then as if nothing had been."""
    is_failing = False
    scene = FaultScene(tmp_path, plan=lambda _number: fault if is_failing else None)
    stored(scene)
    is_failing = True
    for number in range(10):
        scene.load((*PREFIX[: number % 3 + 1],))
        scene.store((300 + number, 1))
    is_failing = False
    scene.pass_time()
    scene.store(PREFIX)
    scene.forget_host()
    assert scene.load() == 3
    scene.check()


def test_sizes_and_names_of_this_suite_are_those_of_the_blobs() -> None:
    assert SPACES["small"].slot_bytes == BLOB_BYTES
