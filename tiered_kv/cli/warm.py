"""`tiered-kv warm` and `tiered-kv cp`: copy chunks from one tier to another."""

from collections.abc import Mapping
from typing import Annotated

import msgspec
import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.exits import EXIT_CODES, EXIT_FOUND
from tiered_kv.cli.options import AsJson, NamespaceOption, Settings, find_chunk, find_namespace, look, parse_settings
from tiered_kv.cli.output import exit_codes, note, print_json, progress
from tiered_kv.config import Config, parse_size, size_text
from tiered_kv.errors import ConfigError
from tiered_kv.ops.copy_targets import check_apart, opened_target
from tiered_kv.ops.copying import (
    AT_ONCE,
    Wanted,
    WarmReport,
    barred,
    carry_epochs,
    choose,
    copy,
    is_any_wanted,
    note_on_strays,
    notes_on_barred,
    notes_on_new_epochs,
    notes_on_resets,
)
from tiered_kv.ops.forest import Forest
from tiered_kv.ops.open import open_storage
from tiered_kv.ops.text import counted, option_value

MoreOfSource = Annotated[
    list[str] | None,
    typer.Option("--from-set", metavar="NAME=VALUE", help="Like --set, for the tier that is copied from."),
]
Amount = Annotated[
    str | None,
    typer.Option("--bytes", metavar="SIZE", help="Only the most recently used so much of the source, e.g. 50GiB."),
]


CpReport = WarmReport
"""``cp`` prints the same report."""


@app.command(epilog=EXIT_CODES)
def warm(
    uri: Annotated[
        str,
        typer.Argument(help="The tier to fill: file:///var/cache/tiered_kv, s3://bucket/prefix.", show_default=False),
    ],
    source: Annotated[str, typer.Option("--from", metavar="URI", help="The tier to copy from.", show_default=False)],
    namespace: NamespaceOption = None,
    size: Amount = None,
    more: Settings = None,
    more_of_source: MoreOfSource = None,
    as_json: AsJson = False,
) -> None:
    """Fill a tier from another one: the most recently used prefixes first, as much as fits.

    A directory that does not exist is made. Without --set disk_bytes=SIZE all but 1 GiB of its file system may be used.
    Each blob is verified before it is written; what is there already is skipped, and nothing is overwritten or evicted.
    Where a server runs on the directory the chunks are handed to it, and it writes them. The source is only read.
    """
    with exit_codes():
        settings = parse_settings(more), parse_settings(more_of_source, option="--from-set")
        _finish(*_copy((source, uri), settings, (namespace, None), size), as_json=as_json)


@app.command(epilog=EXIT_CODES)
def cp(
    source: Annotated[str, typer.Argument(metavar="FROM", help="The tier to copy from.", show_default=False)],
    uri: Annotated[str, typer.Argument(metavar="TO", help="The tier to copy to.", show_default=False)],
    namespace: NamespaceOption = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="DIGITS", help="Only the prefix up to this chunk: its key, or how it begins."),
    ] = None,
    size: Amount = None,
    more: Settings = None,
    more_of_source: MoreOfSource = None,
    as_json: AsJson = False,
) -> None:
    """Copy chunks from one tier to another: all, a namespace, or the prefix up to one key.

    The same as `warm`, which names its target first: a directory that does not exist is made, each blob is verified
    before it is written, what is there already is skipped, and nothing is overwritten or evicted.
    """
    with exit_codes():
        settings = parse_settings(more), parse_settings(more_of_source, option="--from-set")
        _finish(*_copy((source, uri), settings, (namespace, key), size), as_json=as_json)


def _copy(
    uris: tuple[str, str],
    settings: tuple[Mapping[str, object], Mapping[str, object]],
    place: tuple[str | None, str | None],
    size: str | None,
) -> tuple[WarmReport, int, bool]:
    """Copy; ``settings`` are those of the target and of the source, ``place`` a namespace and a key.

    Returns:
        The report, how many of its notes have been printed, and whether the source has anything that was to be copied.
    """
    limit = None if size is None else option_value("--bytes", parse_size, size)
    places = [
        Config.from_mapping({"storage_uri": uri} | dict(given)).location()
        for uri, given in zip(uris, reversed(settings), strict=True)
    ]
    check_apart(*places)
    with open_storage(uris[0], settings[1]) as source:
        content = look(source)
        said = len(content.notes)
        forest = Forest(content.blobs)
        chunk = None if place[1] is None else find_chunk(forest, place[1])
        reasons = barred(source, content.records)
        if chunk is not None and (inside := chunk.name.namespace) in reasons:
            raise ConfigError(f"the chunk of --key lies in namespace {inside.hex()}: {reasons[inside]}")
        wanted = Wanted(namespace=find_namespace(content, place[0]), key=chunk, size_bytes=limit, barred=reasons)
        if chunk is None:
            content.notes += notes_on_barred(source, content.blobs, wanted)
            space = wanted.namespace
            below = "" if space is None else source.record_path(space).rpartition("/")[0] + "/"
            content.notes += note_on_strays(content, below)
        is_any = len(content.notes) > said
        blobs = choose(forest, wanted)
        if chunk is not None and not blobs and limit is None:
            raise ConfigError("the prefix before this chunk has a gap, so no request can reach it: nothing was copied")
        if not blobs and is_any_wanted(content.blobs, wanted):
            is_any = True
            content.notes.append("every chunk lies behind a gap, where no request reaches it, or is more than --bytes")
        with opened_target(uris[1], settings[0]) as (storage, target):
            at_once = max(AT_ONCE[source.kind], AT_ONCE[storage.kind])
            spaces = {blob.name.namespace for blob in blobs}
            records = [record for space, record in content.records.items() if space in spaces]
            refusals = carry_epochs(source, storage, records)
            with progress("copying") as tick:
                done = copy(source, target, blobs, content, at_once, tick, refusals)
            late = list[str]()
            if done.copied + done.there:
                taken = [record for record in records if record.digest not in refusals]
                late = notes_on_resets(source, storage, taken) + notes_on_new_epochs(storage, taken)
            return msgspec.structs.replace(done, notes=[*done.notes, *late]), said, is_any or bool(blobs)


def _finish(report: WarmReport, said: int, is_any: bool, *, as_json: bool) -> None:
    """Print it; so many of its notes have been. Ends with 4 where the target has nothing of what was to be copied."""
    if as_json:
        print_json(report)
    else:
        _show(report, said)
    if is_any and report.copied + report.there == 0:
        raise typer.Exit(EXIT_FOUND)


def _show(report: WarmReport, said: int) -> None:
    copied = f"{counted(report.copied, 'chunk')}, {size_text(report.copied_bytes)}"
    print(f"copied {copied}, from {report.source} to {report.target}")
    for count, what in (
        (report.there, "were there already"),
        (report.corrupt, "are damaged in the source and were not copied; `tiered-kv verify` finds them"),
        (report.foreign, "are of another format version or namespace, and were not copied"),
        (report.vanished, "went from the source meanwhile"),
        (report.left_out, "were left out"),
        (report.dropped, "were dropped by the server; say it again when it is less busy"),
        (report.refused, "are of namespaces that were left out"),
    ):
        if count:
            print(f"{count} {what}")
    if report.full:
        print(f"the target is full: {report.full}")
    for text in report.notes[said:]:
        note(text)
