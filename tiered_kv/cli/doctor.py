"""`tiered-kv doctor`: would this configuration work on this machine?"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.exits import EXIT_CODES, EXIT_FOUND
from tiered_kv.cli.options import AsJson
from tiered_kv.cli.output import Report, exit_codes, print_json, print_table, progress
from tiered_kv.cli.settings import Settings, parse_settings

if TYPE_CHECKING:
    from tiered_kv.admin.doctor import Examination
    from tiered_kv.admin.findings import Finding

TEXT_BYTES_MAX = 4 << 20


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
        tier: ``disk`` or ``object``.
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


class DoctorReport(Report, frozen=True, kw_only=True):
    """What ``doctor`` finds.

    Attributes:
        works: No finding is an error.
        plan: What the settings come to, in one line; empty where they are wrong.
        errors: How many findings are errors.
        warnings: How many findings are warnings.
        findings: Every check, in the order in which they ran.
        measurements: Times of the tiers that were tested.
    """

    works: bool
    plan: str
    errors: int
    warnings: int
    findings: list[DoctorFinding]
    measurements: list[DoctorMeasurement]


@app.command(epilog=EXIT_CODES)
def doctor(
    uri: Annotated[
        str | None,
        typer.Argument(help="The lowest tier: file:///var/cache/tiered_kv, s3://bucket/prefix.", show_default=False),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="What vLLM gets as --kv-transfer-config, or its kv_connector_extra_config alone: the JSON itself, a "
            "file with it, or - for standard input.",
            show_default=False,
        ),
    ] = None,
    more: Settings = None,
    chunk_bytes: Annotated[
        str | None,
        typer.Option(
            help="What a chunk takes, e.g. 32MiB, for a model of which nothing is stored here yet; vLLM's log says it "
            "as chunk_bytes.",
            show_default=False,
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The longest prompt in tokens; else what is stored tells.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check whether a configuration would work here, and say what it comes to.

    Takes the very JSON that vLLM gets, or a URI with settings by --set; with both, --set replaces single settings of
    the JSON. The plan is printed first, then every check with what was found and what to do: the JSON, connector and
    settings; memory, descriptors, socket and the server that runs, if one does; directory, room, inodes and O_DIRECT;
    credentials, endpoint, conditional writes, round trip and clock of an object store; a blob of 4 MiB written, read,
    compared and removed in each tier; what lies there already, and how many chunks fit.

    Nothing is left behind. A directory that a server owns is not written into: the server's own figures count.
    Credentials are never shown. Ends with 0 if it would work, warnings or not, and with 4 if it would not.
    """
    with exit_codes():
        from tiered_kv.admin.doctor import Examination, examine
        from tiered_kv.errors import ConfigError

        if (uri is None) == (config is None):
            raise ConfigError("name either the storage URI or --config")
        given = parse_settings(more)
        size = None if chunk_bytes is None else _size(chunk_bytes)
        before: list[Finding] = []
        settings: dict[str, object] | None = {"storage_uri": uri}
        if config is not None:
            from tiered_kv.admin.doctor_config import read_text

            read = read_text(_text(config))
            before, settings = read.findings, read.settings
        with progress("checking"):
            found = Examination()
            if settings is not None:
                found = examine({**settings, **given}, chunk_bytes=size, max_model_len=max_model_len)
        found.findings[:0] = before
        if as_json:
            print_json(_report(found))
        else:
            _show(found)
        if not found.works:
            raise typer.Exit(EXIT_FOUND)


def _text(config: str) -> str:
    """The JSON itself, or what the file holds that is named."""
    from tiered_kv.errors import ConfigError

    if config.lstrip().startswith(("{", "[", '"')):
        return config
    try:
        if config == "-":
            return sys.stdin.read(TEXT_BYTES_MAX)
        with Path(config).open(encoding="utf-8") as file:
            return file.read(TEXT_BYTES_MAX)
    except OSError as exc:
        raise ConfigError(f"option --config: no JSON, and no file that can be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise ConfigError("option --config: the file holds no text") from exc


def _report(found: "Examination") -> DoctorReport:
    return DoctorReport(
        works=found.works,
        plan=found.plan,
        errors=_count(found, "error"),
        warnings=_count(found, "warning"),
        findings=[
            DoctorFinding(check=one.check, status=one.status, text=one.text, hint=one.hint, see=one.see)
            for one in found.findings
        ],
        measurements=[
            DoctorMeasurement(
                tier=one.tier,
                operation=one.operation,
                seconds=one.seconds,
                bytes=one.size_bytes,
                bytes_per_s=one.bytes_per_s,
            )
            for one in found.measurements
        ],
    )


def _size(chunk_bytes: str) -> int:
    from tiered_kv.admin.words import option_value
    from tiered_kv.config import parse_size

    return option_value("--chunk-bytes", parse_size, chunk_bytes)


def _count(found: "Examination", status: str) -> int:
    return sum(one.status == status for one in found.findings)


def _show(found: "Examination") -> None:
    if found.plan:
        print(f"{found.plan}\n")
    rows = [(one.status, one.check, one.text + (f" - {one.hint}" if one.hint else "")) for one in found.findings]
    print_table("", ("status", "check", "what"), rows)
    errors, warnings = _count(found, "error"), _count(found, "warning")
    verdict = "It would work" if found.works else "It would not work"
    counts = [f"{n} {word}{'' if n == 1 else 's'}" for n, word in ((errors, "error"), (warnings, "warning")) if n]
    print(f"\n{verdict}{': ' + ', '.join(counts) if counts else ''}.")
    if sections := dict.fromkeys(one.see for one in found.findings if one.see):
        print(f"More: {', '.join(sections)}")
