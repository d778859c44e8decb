"""Check the disk tier: its directory and room, and one blob written, read and removed.

The test blob goes into a scratch directory of its own below the directory, which the server's bookkeeping does not see,
and goes with it; directories that had to be made for it are removed again while they are empty. Nothing is written
where a server or another command owns the directory.
"""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tiered_kv.config import Config, size_text
from tiered_kv.engine.clock import SystemClock
from tiered_kv.engine.self_test import SELF_TEST_FORMATS, SelfTest, self_test
from tiered_kv.errors import CapacityExceeded, ConfigError, TierUnavailable
from tiered_kv.ops.doctor_server import Running
from tiered_kv.ops.findings import DoctorFinding, DoctorMeasurement, error, has_error, measured, ok, warning
from tiered_kv.ops.text import without_paths
from tiered_kv.tiers.disk.files import DIRECTORY_MODE, free_bytes
from tiered_kv.tiers.disk.index import is_on_network
from tiered_kv.tiers.disk.marker import Standing, look_at
from tiered_kv.tiers.disk.pins import read_pins
from tiered_kv.tiers.disk.tier import MIN_BLOB_SPACE_BYTES, MIN_METADATA_RESERVE_BYTES, DiskTier, metadata_reserve
from tiered_kv.tiers.wrappers.verified import VerifiedTier

SCRATCH_BYTES: Final = 64 << 20
INODES_LEAST: Final = 10_000


def check_disk(
    config: Config, running: Running, stored_bytes: int
) -> tuple[list[DoctorFinding], list[DoctorMeasurement]]:
    """All checks of the directory.

    Args:
        stored_bytes: What lies in it already.
    """
    root = config.disk_root()
    if root is None:
        return [], []
    findings = check_directory(root)
    if has_error(findings):
        return findings, []
    findings += check_room(config, root, running, stored_bytes)
    if has_error(findings):
        return findings, []
    findings += _check_pins(root)
    if running.figures is not None or running.is_owned:
        return [*findings, *_figures_of_server(running)], []
    tested, measurements = _test(config, root, stored_bytes)
    return [*findings, *tested], measurements


# -- the directory ----------------------------------------------------------------------------------------------------


def check_marker(root: Path | None) -> list[DoctorFinding]:
    """Report a directory with foreign content; no finding for ours or an empty one."""
    if root is None:
        return []
    try:
        seen = look_at(Path(os.path.realpath(root)))
    except OSError:  # reported by the checks of the directory itself
        return []
    if seen.standing is not Standing.FOREIGN:
        return []
    text, _, hint = without_paths(seen.reason).rpartition(": ")
    return [error("marker", text, hint)]


def check_directory(root: Path) -> list[DoctorFinding]:
    """Check that the directory exists or can be made, its owner and its file system."""
    try:
        found = root.stat()
    except FileNotFoundError:
        return _check_parent(root)
    except OSError as exc:
        return [error("directory", f"it cannot be looked at: {exc.strerror}", "mend the path, or its rights")]
    if not stat.S_ISDIR(found.st_mode):
        return [error("directory", "there is a file in its place", "name a directory")]
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        return [error("directory", "this user may not read and write it", "chown it to the engines' user, mode 0700")]
    findings = [_owner(found)]
    mounts = Path("/proc/self/mounts").read_text("utf-8", "surrogateescape")
    if is_on_network(Path(os.path.realpath(root)), mounts):
        findings.append(
            warning(
                "directory",
                "it lies on a network mount: no index is kept, and every start reads it whole",
                "use a local disk; machines that share a directory name it shared+file://",
            )
        )
    return findings


def _owner(found: os.stat_result) -> DoctorFinding:
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid():
        text = f"it belongs to uid {found.st_uid}, and this is uid {os.geteuid()}"
        return warning("directory", text, "run the engines as its owner; that user may read every prompt in it")
    if mode & 0o022:
        return warning("directory", f"others may write into it (mode {mode:04o})", "chmod 0700: they may replace blobs")
    return ok("directory", f"it is there, belongs to this user, mode {mode:04o}")


def _check_parent(root: Path) -> list[DoctorFinding]:
    parent = _existing_parent(root)
    if not parent.is_dir():
        return [error("directory", "it cannot be made: a part of its path is a file", "name another directory")]
    if not os.access(parent, os.W_OK | os.X_OK):
        return [error("directory", "it is not there, and this user may not make it", "make it: `install -d -m 0700`")]
    return [ok("directory", "it is not there yet and will be made, mode 0700")]


def _existing_parent(root: Path) -> Path:
    while not os.path.lexists(root):
        root = root.parent
    return root


# -- room -------------------------------------------------------------------------------------------------------------


def check_room(config: Config, root: Path, running: Running, stored_bytes: int) -> list[DoctorFinding]:
    """Compare the limit with the free space, the metadata reserve and the inodes."""
    parent = _existing_parent(root)
    limit = capacity_bytes(config, running, stored_bytes)
    free = free_bytes(parent)
    text = (
        f"disk_bytes {size_text(limit)}, {size_text(stored_bytes)} stored already, {size_text(free)} free, "
        f"min_free_bytes {size_text(config.min_free_bytes)}"
    )
    findings = []
    least = metadata_reserve(limit) + MIN_BLOB_SPACE_BYTES
    usable = max(0, free - config.min_free_bytes)
    if limit < least:
        hint = f"set disk_bytes to {size_text(least)} at least, most of which is kept for metadata"
        findings.append(error("room", f"{text}: too little for any blob", hint))
    elif usable == 0 and stored_bytes == 0:
        findings.append(error("room", f"{text}: nothing would ever be stored", "free space, or lower min_free_bytes"))
    elif usable == 0:
        hint = "free space, or lower min_free_bytes"
        findings.append(warning("room", f"{text}: nothing new is stored until space is free", hint))
    elif stored_bytes + usable < limit:
        hint = f"the limit in effect is {size_text(stored_bytes + usable)}; free space, or set disk_bytes to that"
        findings.append(warning("room", f"{text}: the limit can never be reached", hint))
    elif stored_bytes > limit:
        findings.append(warning("room", f"{text}: more than the limit", "the server evicts down to it when it starts"))
    else:
        findings.append(ok("room", text))
    return [*findings, _inodes(parent)]


def capacity_bytes(config: Config, running: Running, stored_bytes: int) -> int:
    """The limit of the directory: that of the server that runs, else what the settings come to."""
    if running.figures is not None:
        for tier in running.figures.tiers:
            if tier.name == "disk" and tier.capacity_bytes is not None and config.disk_bytes is None:
                blobs = tier.capacity_bytes  # what is left of the limit by the metadata reserve
                return max(blobs + MIN_METADATA_RESERVE_BYTES, -(-blobs * 100 // 99))
    return config.resolved_disk_bytes(existing_bytes=stored_bytes)


def _inodes(parent: Path) -> DoctorFinding:
    status = os.statvfs(parent)
    if not status.f_files:
        return ok("inodes", "the file system makes them as it needs them")
    if not status.f_favail:
        return error("inodes", "the file system has none left: no file can be made", "delete files, or another disk")
    if status.f_favail < INODES_LEAST:
        return warning("inodes", f"{status.f_favail} left; each chunk takes one", "delete files, or another disk")
    return ok("inodes", f"{status.f_favail} left; each chunk takes one")


def _figures_of_server(running: Running) -> list[DoctorFinding]:
    """Statistics of the server that owns the directory, in place of a test."""
    tier = next((t for t in running.figures.tiers if t.name == "disk"), None) if running.figures else None
    if tier is None:
        return [warning("disk test", "left out: the directory is in use, and nobody says how it does")]
    if tier.breaker not in (None, "closed"):
        text = f"the running server leaves the disk out: {tier.breaker_reason or 'no reason given'}"
        return [error("disk test", text, "mend what it says; it tries again by itself")]
    rate = f", reads at {size_text(int(tier.read_bytes_per_s))}/s" if tier.read_bytes_per_s else ""
    return [ok("disk test", f"left out: the running server uses it ({tier.blobs} blobs{rate})")]


def _check_pins(root: Path) -> list[DoctorFinding]:
    """Report pins that cannot be read; no finding for others."""
    try:
        read_pins(root)
    except TierUnavailable as exc:
        text = (
            f"{without_paths(exc)}: a server that starts evicts nothing, and stores nothing new once the disk is full"
        )
        return [warning("pins", text, "mend or remove pins.json")]
    return []


# -- the test ---------------------------------------------------------------------------------------------------------


def _test(config: Config, root: Path, stored_bytes: int) -> tuple[list[DoctorFinding], list[DoctorMeasurement]]:
    try:
        with _scratch(root) as scratch:
            tier = DiskTier(scratch, SCRATCH_BYTES, min_free_bytes=config.min_free_bytes, metadata_reserve_bytes=0)
            try:
                result = self_test(VerifiedTier(tier, SELF_TEST_FORMATS.get), SystemClock())
                findings = [_direct_io(is_direct=tier.direct_io)]
            finally:
                tier.close()
    except (OSError, CapacityExceeded, ConfigError) as exc:  # TierUnavailable is an OSError
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else without_paths(exc)
        return [error("disk test", f"a blob cannot be written there: {reason}", "mend rights, space or the disk")], []
    finding, measurements = judged("disk", result)
    if not result.size_bytes and result.failure is None and stored_bytes:
        return findings, []  # reported by the check of the room
    return [*findings, finding], measurements


def judged(name: str, result: SelfTest) -> tuple[DoctorFinding, list[DoctorMeasurement]]:
    """The outcome of a tier's self-test in words and figures."""
    check = f"{name} test"
    if result.failure is not None:
        return error(check, without_paths(result.failure), "mend what it says"), []
    if not result.size_bytes:
        return error(check, "there is no room for a blob of 4 MiB", "free space, or raise the limit"), []
    measurements = [
        measured(name, "write", result.write_s, result.size_bytes),
        measured(name, "read", result.read_s, result.size_bytes),
    ]
    shown = ", ".join(f"{one.operation} {one.seconds * 1000:.1f} ms ({_rate(one)})" for one in measurements)
    return ok(check, f"a blob of 4 MiB was written, read, compared and removed: {shown}"), measurements


def _rate(one: DoctorMeasurement) -> str:
    return f"{size_text(int(one.bytes_per_s or 0))}/s"


def _direct_io(*, is_direct: bool) -> DoctorFinding:
    if is_direct:
        return ok("O_DIRECT", "works: writes go around the page cache")
    text = "does not work here: writes go through the page cache and cost more CPU and memory"
    return warning("O_DIRECT", text, "use a file system that takes it (ext4, XFS)")


@contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    """A directory of our own below ``root``; what had to be made is gone afterwards, unless it is in use by then."""
    made = [path for path in [root, *root.parents] if not path.exists()]
    try:
        for path in reversed(made):
            path.mkdir(DIRECTORY_MODE)
        with tempfile.TemporaryDirectory(prefix="doctor-", dir=root) as scratch:
            yield Path(scratch)
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # not empty: a server has started in it
                path.rmdir()
