"""What ``doctor`` says of one check: a status, what was found, what to do.

No check prints, or raises for what it finds. Called by the ``doctor_*`` modules. Owns also which section of
docs/troubleshooting.md a finding belongs to.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

Status = Literal["ok", "warning", "error"]

TEXT_MAX: Final = 400

TROUBLESHOOTING: Final = "docs/troubleshooting.md"

NO_HITS: Final = f"{TROUBLESHOOTING}#no-hits"
SECTIONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("chunks", "disk content", "object content", "limits"), NO_HITS),
    **dict.fromkeys(("round trip", "O_DIRECT"), f"{TROUBLESHOOTING}#slow-hits"),
    "marker": f"{TROUBLESHOOTING}#not-our-directory",
    **dict.fromkeys(("directory", "room", "inodes", "disk test"), f"{TROUBLESHOOTING}#disk-full"),
    **dict.fromkeys(
        ("credentials", "endpoint", "object store", "object test", "conditional writes", "clock"),
        f"{TROUBLESHOOTING}#s3-403",
    ),
    **dict.fromkeys(
        ("json", "connector", "role", "load failures", "settings"), f"{TROUBLESHOOTING}#the-engine-does-not-start"
    ),
    **dict.fromkeys(("server", "socket"), f"{TROUBLESHOOTING}#the-server-is-gone"),
    **dict.fromkeys(("memory", "descriptors"), f"{TROUBLESHOOTING}#memory"),
}
"""Where each check's warnings and errors are explained."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: What was looked at, one or two words.
        status: ``warning``: it works, with less than one might expect. ``error``: it would not work.
        text: What was found; never a secret.
        hint: What to do about it; empty where nothing is to be done.
    """

    check: str
    status: Status
    text: str
    hint: str = ""

    @property
    def see(self) -> str:
        """The section that says more; empty where nothing is to be done."""
        return "" if self.status == "ok" else SECTIONS.get(self.check, TROUBLESHOOTING)


@dataclass(frozen=True, slots=True)
class Measurement:
    """How long one operation of a tier took.

    Attributes:
        size_bytes: What it moved; 0 where only the time counts.
    """

    tier: str
    operation: str
    seconds: float
    size_bytes: int = 0

    @property
    def bytes_per_s(self) -> float | None:
        return self.size_bytes / max(self.seconds, 1e-9) if self.size_bytes else None


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def warning(check: str, text: str, hint: str = "") -> Finding:
    return Finding(check, "warning", text[:TEXT_MAX], hint)


def error(check: str, text: str, hint: str = "") -> Finding:
    return Finding(check, "error", text[:TEXT_MAX], hint)


def has_error(findings: Iterable[Finding]) -> bool:
    """Whether one of them says that it would not work."""
    return any(finding.status == "error" for finding in findings)
