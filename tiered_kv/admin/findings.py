"""What ``doctor`` says of one check: a status, what was found, what to do.

No check prints, or raises for what it finds. Called by the ``doctor_*`` modules.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

Status = Literal["ok", "warning", "error"]

TEXT_MAX: Final = 400


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
