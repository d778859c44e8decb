"""`tiered-kv export`: one chunk as a file of its own."""

from pathlib import Path
from typing import Annotated

import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.exits import EXIT_CODES, EXIT_FOUND
from tiered_kv.cli.options import AsJson, Settings, Uri, find_stored, look, open_uri
from tiered_kv.cli.output import exit_codes, note, print_json
from tiered_kv.config import size_text
from tiered_kv.ops.forest import Forest
from tiered_kv.ops.inspection import examine, write_new
from tiered_kv.ops.report import Report


class ExportReport(Report, frozen=True, kw_only=True):
    """A chunk that was written to a file, or was not because it is damaged.

    Attributes:
        uri: The tier.
        key: The chunk's key.
        namespace: Digest of its namespace.
        file: The file, as it was named; null if nothing was written.
        size_bytes: Length of the blob.
        is_sound: Whether the blob is what was sealed, byte for byte.
        reason: What is wrong with it; null if it is sound.
        notes: What may make this incomplete, in words.
    """

    uri: str
    key: str
    namespace: str
    file: str | None
    size_bytes: int
    is_sound: bool
    reason: str | None
    notes: list[str]


@app.command(epilog=EXIT_CODES)
def export(
    uri: Uri,
    key: Annotated[str, typer.Argument(help="The chunk's key, or how it begins.", show_default=False)],
    file: Annotated[Path, typer.Argument(help="Where to write it.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it is there.")] = False,
    unverified: Annotated[bool, typer.Option("--unverified", help="Write also a damaged blob.")] = False,
    more: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Write one chunk to a file that safetensors opens.

    The blob is verified first; a damaged one is not written, and this ends with 4. The file appears as a whole or not
    at all, readable by its owner only: whoever has the KV and the model can reconstruct much of the prompt.
    """
    with exit_codes():
        with open_uri(uri, more) as storage:
            content = look(storage)
            blob = find_stored(content, Forest(content.blobs), key)
            finding = examine(storage, blob)
            shown_uri = storage.uri
        is_written = finding.is_sound or unverified
        if is_written:
            write_new(file, finding.data, overwrite=force)
        report = ExportReport(
            uri=shown_uri,
            key=blob.name.key.hex(),
            namespace=blob.name.namespace.hex(),
            file=str(file) if is_written else None,
            size_bytes=len(finding.data),
            is_sound=finding.is_sound,
            reason=None if finding.is_sound else finding.reason,
            notes=content.notes,
        )
        if as_json:
            print_json(report)
        elif is_written:
            print(f"{report.key}  {size_text(report.size_bytes)}  {file}")
        if not finding.is_sound:
            hint = (
                "it was written all the same"
                if is_written
                else "nothing was written; --unverified does it all the same"
            )
            note(f"the blob is damaged: {finding.reason}: {hint}")
        if not is_written:
            raise typer.Exit(EXIT_FOUND)
