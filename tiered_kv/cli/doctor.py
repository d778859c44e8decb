"""`tiered-kv doctor`: check a configuration on this machine."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.exits import EXIT_CODES, EXIT_FOUND
from tiered_kv.cli.options import AsJson, Settings, parse_settings
from tiered_kv.cli.output import exit_codes, print_json, print_table, progress
from tiered_kv.config import parse_size
from tiered_kv.errors import ConfigError
from tiered_kv.ops.doctor import DoctorReport, Examination, examine
from tiered_kv.ops.doctor_config import read_text
from tiered_kv.ops.findings import DoctorFinding
from tiered_kv.ops.text import counted, option_value

TEXT_BYTES_MAX = 4 << 20


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
        if (uri is None) == (config is None):
            raise ConfigError("name either the storage URI or --config")
        given = parse_settings(more, names_uri=uri is None)
        size = None if chunk_bytes is None else option_value("--chunk-bytes", parse_size, chunk_bytes)
        before: list[DoctorFinding] = []
        settings: dict[str, object] | None = {"storage_uri": uri}
        is_tier = False
        if config is not None:
            read = read_text(_text(config))
            before, settings, is_tier = read.findings, read.settings, read.is_tier
        with progress("checking"):
            found = Examination(findings=before)
            if settings is not None:
                examine(found, {**settings, **given}, chunk_bytes=size, max_model_len=max_model_len, is_tier=is_tier)
        report = found.report()
        if as_json:
            print_json(report)
        else:
            _show(report)
        if not report.works:
            raise typer.Exit(EXIT_FOUND)


def _text(config: str) -> str:
    """The JSON itself, or what the file holds that is named."""
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


def _show(report: DoctorReport) -> None:
    if report.plan:
        print(f"{report.plan}\n")
    rows = [(one.status, one.check, one.text + (f" - {one.hint}" if one.hint else "")) for one in report.findings]
    print_table("", ("status", "check", "what"), rows)
    verdict = "It would work" if report.works else "It would not work"
    counts = [counted(n, word) for n, word in ((report.errors, "error"), (report.warnings, "warning")) if n]
    print(f"\n{verdict}{': ' + ', '.join(counts) if counts else ''}.")
    if sections := dict.fromkeys(one.see for one in report.findings if one.see):
        print(f"More: {', '.join(sections)}")
