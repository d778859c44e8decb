"""`tiered-kv verify`: read and check blobs, report bad ones, and remove corrupt ones with ``--repair``."""

import re
import secrets
from typing import Annotated

import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.exits import EXIT_CODES, EXIT_FOUND, EXIT_UNAVAILABLE
from tiered_kv.cli.options import (
    AsJson,
    NamespaceOption,
    Settings,
    StoredByOption,
    Uri,
    Yes,
    find_namespace,
    look,
    look_for_origins,
    open_uri,
    parse_stored_by,
)
from tiered_kv.cli.output import confirm, exit_codes, note, print_json, print_table, progress
from tiered_kv.config import size_text
from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.ops.blob_check import CORRUPT, REASONS
from tiered_kv.ops.report import Report
from tiered_kv.ops.scrub import BadBlob, Choice, Repair, Scrub, scrub
from tiered_kv.ops.scrub import repair as remove_corrupt
from tiered_kv.ops.storage import Content, Storage
from tiered_kv.ops.text import counted

LINES_SHOWN = 100


class VerifyReport(Report, frozen=True, kw_only=True):
    """What ``verify`` read, found and did.

    Attributes:
        uri: The tier.
        namespace: The only one that was checked, null for all.
        stored_by: Conditions on who stored what was checked, none for all.
        share: Of the blobs, 1 for all.
        seed: What chose the sample; the same seed chooses the same blobs of the same content.
        blobs: Blobs there are, and files under the name of one.
        read: Blobs that were read and checked.
        read_bytes: All their bytes.
        vanished: Blobs that were evicted before they could be read, which is no fault.
        seconds: What the reading took.
        bad: Everything that is wrong, by reason.
        unreachable: Sound blobs behind a gap or a bad one, no fault either; ``gc`` removes those behind a gap.
        unreachable_bytes: What they take.
        is_repair: Whether ``--repair`` was said.
        removed: Corrupt blobs that ``--repair`` removed.
        removed_bytes: What they took.
        notes: What may make this incomplete, in words.
    """

    uri: str
    namespace: str | None
    stored_by: list[str]
    share: float
    seed: int
    blobs: int
    read: int
    read_bytes: int
    vanished: int
    seconds: float
    bad: list[BadBlob]
    unreachable: int
    unreachable_bytes: int
    is_repair: bool
    removed: int
    removed_bytes: int
    notes: list[str]


@app.command(epilog=EXIT_CODES)
def verify(
    uri: Uri,
    sample: Annotated[
        str, typer.Option(metavar="SHARE", help="Read only so many of the blobs, chosen at random, e.g. 5%.")
    ] = "100%",
    seed: Annotated[
        int | None, typer.Option(min=0, help="Choose the sample by this number. (default: another one every time)")
    ] = None,
    namespace: NamespaceOption = None,
    stored_by: StoredByOption = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove what is corrupt, and make the index of a directory right.")
    ] = False,
    yes: Yes = False,
    more: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Read blobs and check every byte of them; name what is bad, and remove what is corrupt if asked to.

    Each blob is compared with its own checksums, with the name it is stored under and with its namespace. Bad ones are
    listed by reason: header or payload damaged, truncated, longer, swapped, misplaced, misfit; foreign (a sound blob of
    another namespace), version (of another format version), stray (no blob by its name), unreadable, and record
    (namespace.json is missing or wrong). Ends with 4 if anything bad is left. Engines may run meanwhile.

    --stored-by reads only the blobs that such versions stored; in a bucket it reads every header first, and says how
    many of them do not tell.

    --repair removes what no request could ever be answered with: header, payload, truncated, longer, swapped, misplaced
    and misfit, also under a running server, to which they are ordinary misses then. The rest stays, because it may be
    somebody's data, and keeps the exit code at 4: remove it by hand. Without a server, the index of a directory is
    made to agree with its files, too.
    """
    with exit_codes():
        share = _share(sample)
        with open_uri(uri, more, to_change=repair) as storage:
            content = look(storage)
            space, conditions = find_namespace(content, namespace), parse_stored_by(stored_by)
            if conditions is not None:
                look_for_origins(storage, content, space, conditions)
            choice = Choice(namespace=space, share=share, seed=_seed(seed), stored_by=conditions)
            with progress("verifying") as tick:
                found = scrub(storage, content, choice, tick)
            if not as_json:
                _show(found, storage.uri)
            done = None
            if repair:
                try:
                    done = _repair(storage, content, found, is_confirmed=yes)
                except (typer.Exit, TieredKVError, OSError, KeyboardInterrupt) as exc:
                    if as_json:  # it may have taken hours
                        if not isinstance(exc, typer.Exit):
                            content.notes.append("the repair did not end; what it removed until then is listed, too")
                        print_json(_report(storage, content, choice, found, None))
                    raise
            report = _report(storage, content, choice, found, done)
            if as_json:
                print_json(report)
            else:
                _show_end(report)
        if any(not bad.is_mended for bad in report.bad):
            raise typer.Exit(EXIT_FOUND)
        if done is not None and done.problem:  # the index was not made right
            raise typer.Exit(EXIT_UNAVAILABLE)


def _repair(storage: Storage, content: Content, found: Scrub, *, is_confirmed: bool) -> Repair:
    if found.corrupt:
        what = counted(len(found.corrupt), "corrupt blob")
        size = size_text(sum(bad.size_bytes for bad in found.corrupt))
        confirm(f"{what}, {size}, to go from {storage.uri}. Go on?", is_confirmed=is_confirmed)
    with progress("repairing") as tick:
        done = remove_corrupt(storage, content, found, tick)
    if done.problem:
        note(done.problem)
    return done


def _show(found: Scrub, uri: str) -> None:
    if found.bad:
        rows = [(bad.reason, bad.path, size_text(bad.size_bytes), bad.detail) for bad in found.bad[:LINES_SHOWN]]
        print_table(f"Bad in {uri}", ("reason", "path", "size", "detail"), rows)
        if len(found.bad) > LINES_SHOWN:
            print(f"... and {len(found.bad) - LINES_SHOWN} more; --json lists all")
        print()
        for reason, meaning in REASONS.items():
            if count := sum(bad.reason == reason for bad in found.bad):
                print(f"{count} {reason}: {meaning}")
    if found.unreachable:
        size = size_text(sum(blob.size_bytes for blob in found.unreachable))
        many = len(found.unreachable) != 1
        what = f"{len(found.unreachable)} sound blob{'s' if many else ''}, {size}, lie{'' if many else 's'}"
        print(f"{what} behind a gap or a bad one; `tiered-kv gc` removes what is behind a gap")
    rate = size_text(int(found.read_bytes / max(found.seconds, 1e-6)))
    print(
        f"read {found.read} of {counted(found.held, 'blob')}, {size_text(found.read_bytes)} in {found.seconds:.2f} s "
        f"({rate}/s): {len(found.bad) or 'nothing'} bad"
    )


def _show_end(report: VerifyReport) -> None:
    if not report.is_repair:
        if any(bad.reason in CORRUPT for bad in report.bad):
            print("--repair removes what is corrupt")
        return
    left = [bad for bad in report.bad if not bad.is_mended]
    print(f"removed {counted(report.removed, 'corrupt blob')}, {size_text(report.removed_bytes)}")
    if stuck := sum(bad.reason in CORRUPT for bad in left):
        print(f"{counted(stuck, 'corrupt blob')} could not be removed, or may be the right one of two")
    if len(left) > stuck:
        print(f"{len(left) - stuck} not removed: it may be somebody's data, or may be mended in another way")


def _report(storage: Storage, content: Content, choice: Choice, found: Scrub, done: Repair | None) -> VerifyReport:
    return VerifyReport(
        uri=storage.uri,
        namespace=None if choice.namespace is None else choice.namespace.hex(),
        stored_by=[] if choice.stored_by is None else list(choice.stored_by.texts),
        share=choice.share,
        seed=choice.seed,
        blobs=found.held,
        read=found.read,
        read_bytes=found.read_bytes,
        vanished=found.vanished,
        seconds=found.seconds,
        bad=found.bad if done is None else done.bad,
        unreachable=len(found.unreachable),
        unreachable_bytes=sum(blob.size_bytes for blob in found.unreachable),
        is_repair=done is not None,
        removed=0 if done is None else done.removed,
        removed_bytes=0 if done is None else done.removed_bytes,
        notes=[*content.notes, *([done.problem] if done is not None and done.problem else [])],
    )


def _share(text: str) -> float:
    """The value of ``--sample``, above 0 and at most 1.

    Raises:
        ConfigError: It is no such share.
    """
    found = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,9})?) ?%", text)
    share = float(found[1]) / 100 if found else 0.0
    if not 0 < share <= 1:
        raise ConfigError(
            f"option --sample: expected a share such as 5%, above 0% and at most 100%, got {text[:100]!r}"
        )
    return share


def _seed(given: int | None) -> int:
    return secrets.randbits(32) if given is None else given
