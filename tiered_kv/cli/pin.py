"""`tiered-kv pin` and `tiered-kv unpin`: exempt a prefix from eviction."""

import time
from typing import Annotated

import msgspec
import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.exits import EXIT_CODES
from tiered_kv.cli.options import AsJson, Settings, Uri, find_chunk, find_pin, look, open_uri
from tiered_kv.cli.output import exit_codes, print_json, print_table, progress
from tiered_kv.cli.text import age_text
from tiered_kv.config import parse_time_s, size_text
from tiered_kv.errors import ConfigError
from tiered_kv.keys.naming import BlobName
from tiered_kv.ops.forest import Forest
from tiered_kv.ops.report import Report
from tiered_kv.ops.storage import FOR_GOOD, StoredBlob
from tiered_kv.ops.text import option_value


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """One pin.

    Attributes:
        namespace: Digest of the chunk's namespace.
        key: Key of the pinned chunk.
        until_s: When the pin ends; null for one without an end.
        is_there: Whether the tier has the chunk now.
        prefix_chunks: Chunks that the pin keeps: the chunk, those before it that are there, and parts of states.
        state_parts: How many of these are parts of the states of recurrent layers along the prefix.
        prefix_bytes: What they take.
    """

    namespace: str
    key: str
    until_s: float | None
    is_there: bool
    prefix_chunks: int
    state_parts: int
    prefix_bytes: int


class PinReport(Report, frozen=True, kw_only=True):
    """Pins of a tier.

    Attributes:
        uri: The tier.
        pins: The pin that was just made, or with ``--list`` every pin in force.
        notes: What may make this incomplete, in words.
    """

    uri: str
    pins: list[Pin]
    notes: list[str]


class UnpinReport(Report, frozen=True, kw_only=True):
    """A chunk that is not pinned any more.

    Attributes:
        uri: The tier.
        namespace: Digest of the chunk's namespace.
        key: Key of the chunk.
        was_pinned: Whether there was a pin to end.
    """

    uri: str
    namespace: str
    key: str
    was_pinned: bool


@app.command(epilog=EXIT_CODES)
def pin(
    uri: Uri,
    key: Annotated[str | None, typer.Argument(help="The chunk's key, or how it begins.", show_default=False)] = None,
    ttl: Annotated[
        str | None, typer.Option(metavar="TIME", help="End the pin after 12h, 7d. (default: it has no end)")
    ] = None,
    list_pins: Annotated[bool, typer.Option("--list", help="List the pins in force; pin nothing.")] = False,
    more: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Keep a chunk, and the prefix before it, from eviction.

    Of a model with recurrent layers the states along the prefix are kept, too.

    A pin lies in the tier it names and holds for every server that uses it: a running one reads it within 5 seconds,
    the one that cleans a bucket up at its next pass. `evict` leaves pinned chunks alone, too. Pinning a chunk again
    changes the end of its pin.
    """
    with exit_codes():
        if (key is None) != list_pins:
            raise ConfigError("name either the KEY to pin or --list")
        if list_pins and ttl is not None:
            raise ConfigError("option --ttl goes with a KEY")
        until_s = FOR_GOOD if ttl is None else time.time() + option_value("--ttl", parse_time_s, ttl)
        with open_uri(uri, more, to_change=key is not None) as storage:
            content = look(storage)
            forest = Forest(content.blobs)
            if key is None:
                pins = [_described(forest, name, end_s) for name, end_s in storage.pins().items()]
            else:
                blob = find_chunk(forest, key)
                storage.pin([blob.name], until_s)
                pins = [_described(forest, blob.name, until_s)]
            report = PinReport(
                uri=storage.uri, pins=sorted(pins, key=lambda p: (p.namespace, p.key)), notes=content.notes
            )
        if as_json:
            print_json(report)
        else:
            _show(report)


@app.command(epilog=EXIT_CODES)
def unpin(
    uri: Uri,
    key: Annotated[str, typer.Argument(help="The chunk's key, or how it begins.", show_default=False)],
    more: Settings = None,
    as_json: AsJson = False,
) -> None:
    """End a pin: the chunk and the prefix before it may be evicted again.

    The chunk need not be there any more. Nothing is removed: `evict` does that. A chunk that is not pinned stays so.
    """
    with exit_codes(), open_uri(uri, more, to_change=True) as storage:
        name = find_pin(storage.pins(), key)
        was_pinned = name is not None and storage.unpin([name]) > 0
        if name is None:
            with progress("listing") as tick:
                name = find_chunk(Forest(storage.look(tick).blobs), key).name
        if as_json:
            digits = name.namespace.hex(), name.key.hex()
            print_json(UnpinReport(uri=storage.uri, namespace=digits[0], key=digits[1], was_pinned=was_pinned))
        else:
            print(f"unpinned {name.key.hex()}" if was_pinned else f"{name.key.hex()} was not pinned")


def _described(forest: Forest, name: BlobName, until_s: float) -> Pin:
    blob = forest.find(name)
    kept: list[StoredBlob] = [] if blob is None else forest.with_states([blob])
    return Pin(
        namespace=name.namespace.hex(),
        key=name.key.hex(),
        until_s=None if until_s == FOR_GOOD else until_s,
        is_there=blob is not None,
        prefix_chunks=len(kept),
        state_parts=sum(b.is_state for b in kept),
        prefix_bytes=sum(b.size_bytes for b in kept),
    )


def _show(report: PinReport) -> None:
    if not report.pins:
        print("no pins")
        return
    now_s = time.time()
    rows = [
        (
            p.key,
            p.namespace,
            "for good" if p.until_s is None else f"for {age_text(p.until_s - now_s)}",
            f"{p.prefix_chunks}, {p.state_parts} of them of states" if p.state_parts else p.prefix_chunks,
            size_text(p.prefix_bytes) if p.is_there else "not there",
        )
        for p in report.pins
    ]
    print_table("", ("pinned", "namespace", "ends", "chunks kept", "size"), rows)
