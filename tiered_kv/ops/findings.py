"""Findings and measurements of ``doctor``, and the section of docs/troubleshooting.md that explains each check.

No check prints, or raises for what it finds. Called by the ``doctor_*`` modules.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

TEXT_MAX: Final = 400

TROUBLESHOOTING: Final = "docs/troubleshooting.md"

NO_HITS: Final = f"{TROUBLESHOOTING}#no-hits"
SECTIONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("chunks", "disk content", "object content", "limits"), NO_HITS),
    **dict.fromkeys(("round trip", "O_DIRECT"), f"{TROUBLESHOOTING}#slow-hits"),
    **dict.fromkeys(("marker", "foreign objects"), f"{TROUBLESHOOTING}#not-our-directory"),
    **dict.fromkeys(("directory", "room", "inodes", "pins", "disk test"), f"{TROUBLESHOOTING}#disk-full"),
    **dict.fromkeys(
        ("credentials", "endpoint", "object store", "object test", "conditional writes", "clock"),
        f"{TROUBLESHOOTING}#s3-403",
    ),
    **dict.fromkeys(
        ("json", "connector", "role", "load failures", "settings", "rows"),
        f"{TROUBLESHOOTING}#the-engine-does-not-start",
    ),
    **dict.fromkeys(("server", "socket"), f"{TROUBLESHOOTING}#the-server-is-gone"),
    **dict.fromkeys(("memory", "descriptors"), f"{TROUBLESHOOTING}#memory"),
    **dict.fromkeys(("peers", "peer key", "door"), f"{TROUBLESHOOTING}#peers"),
    **dict.fromkeys(("mooncake", "mooncake test"), f"{TROUBLESHOOTING}#mooncake"),
}
"""Where each check's warnings and errors are explained."""


class DoctorFinding(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one check.

    Attributes:
        check: What was looked at.
        status: ``ok``; ``warning``: it works, with less than one might expect; ``error``: it would not work.
        text: What was found.
        hint: What to do about it; empty where nothing is to be done.
        see: Where the documentation says more of warnings and errors; empty where nothing is to be done.
    """

    check: str
    status: str
    text: str
    hint: str
    see: str


class DoctorMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """How long one operation of a tier took.

    Attributes:
        tier: ``disk``, ``object`` or ``mooncake``.
        operation: ``write``, ``read`` or ``head``.
        seconds: Of one operation; of ``head`` the median of five.
        bytes: What it moved.
        bytes_per_s: Null where nothing was moved.
    """

    tier: str
    operation: str
    seconds: float
    bytes: int
    bytes_per_s: float | None


def measured(tier: str, operation: str, seconds: float, size_bytes: int = 0) -> DoctorMeasurement:
    """One operation's time; ``size_bytes`` 0 where only the time counts."""
    rate = size_bytes / max(seconds, 1e-9) if size_bytes else None
    return DoctorMeasurement(tier=tier, operation=operation, seconds=seconds, bytes=size_bytes, bytes_per_s=rate)


def ok(check: str, text: str) -> DoctorFinding:
    return DoctorFinding(check=check, status="ok", text=text, hint="", see="")


def warning(check: str, text: str, hint: str = "") -> DoctorFinding:
    return _trouble(check, "warning", text, hint)


def error(check: str, text: str, hint: str = "") -> DoctorFinding:
    return _trouble(check, "error", text, hint)


def _trouble(check: str, status: str, text: str, hint: str) -> DoctorFinding:
    see = SECTIONS.get(check, TROUBLESHOOTING)
    return DoctorFinding(check=check, status=status, text=text[:TEXT_MAX], hint=hint, see=see)


def has_error(findings: Iterable[DoctorFinding]) -> bool:
    """Whether one of them is an error."""
    return any(finding.status == "error" for finding in findings)
