"""`tiered-kv top`: live rates of a running server."""

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

import msgspec
import typer

from tiered_kv.cli.app import app
from tiered_kv.cli.exits import EXIT_CODES
from tiered_kv.cli.options import Settings
from tiered_kv.cli.output import exit_codes, print_table
from tiered_kv.cli.stat import OptionalUri, ServerOption, connect
from tiered_kv.cli.text import (
    BREAKER,
    KEY_DIGITS,
    age_text,
    capacity_text,
    count_text,
    decisions_text,
    points_text,
    rate_text,
    share_text,
    time_text,
)
from tiered_kv.config import size_text
from tiered_kv.errors import TierUnavailable
from tiered_kv.metrics.figures import HOST_NAME, CurveFigures
from tiered_kv.ops.rates import Rates, TierRates, rates
from tiered_kv.ops.report import Report
from tiered_kv.ops.server_link import ServerLink
from tiered_kv.ops.text import counted

TIERS = ("tier", "used", "capacity", "chunks", "hit tokens/s", "in flight", "waiting", "state")
MOVED = ("tier", "read", "reads/s", "each", "written", "writes/s", "each", "failures/s")
"""Two tables, so that either fits a terminal of 100 columns."""

PLAIN = ("dumb", "unknown")
"""Values of ``TERM`` for which rich, and so ``terminal.screen``, shows nothing live."""

CURVES_SHOWN = 3
"""Namespaces, one line each: those that were looked up last. `tiered-kv stat` shows all."""


class TopReport(Report, frozen=True, kw_only=True):
    """A server between two polls; one object per line and interval.

    Attributes:
        version: Of this description.
        directory: What the server owns, as it sees it.
        at_unix_s: Time of the second poll.
        rates: What happened between the two, and what is as of the second.
    """

    directory: str
    at_unix_s: float
    rates: Rates


@app.command(epilog=EXIT_CODES)
def top(
    uri: OptionalUri = None,
    server: ServerOption = None,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two polls.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one interval and end: the same as --count 1.")] = False,
    count: Annotated[int | None, typer.Option(min=1, help="End after so many intervals. (default: never)")] = None,
    more: Settings = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON (docs/cli-schema.json), one object per line and interval.")
    ] = False,
) -> None:
    """Show what a running server does, live: tokens asked for and hit, bytes moved, queues, drops, per second.

    On a terminal the figures replace each other; in a pipe each interval is a block of text, or with --json a line. The
    server is found as by `tiered-kv stat` and asked once per interval; it does nothing else for it. Ends with Ctrl-C,
    after --count intervals, or with exit code 1 when the server goes away.
    """
    with exit_codes(), _quiet_end():
        link = connect(uri, server, more)
        if link is None:
            raise TierUnavailable("no server is running for it; `tiered-kv stat` shows what the tier itself tells")
        intervals = 1 if once else count
        with link:
            is_live = sys.stdout.isatty() and not as_json and intervals != 1 and os.environ.get("TERM") not in PLAIN
            with _screen() if is_live else _blocks(as_json=as_json) as show:
                for report in itertools.islice(_reports(link, interval), intervals):
                    show(report)


def _reports(link: ServerLink, interval_s: float) -> Iterator[TopReport]:
    before = link.stat()
    while True:
        time.sleep(interval_s)
        after = link.stat()
        yield TopReport(directory=after.directory, at_unix_s=time.time(), rates=rates(before, after))
        before = after


@contextmanager
def _quiet_end() -> Iterator[None]:
    """Ctrl-C, and a reader of the pipe that has seen enough, are ordinary ends."""
    try:
        yield
    except KeyboardInterrupt:
        return
    except BrokenPipeError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it at its end


@contextmanager
def _blocks(*, as_json: bool) -> Iterator[Callable[[TopReport], None]]:
    def show(report: TopReport) -> None:
        if as_json:
            print(msgspec.json.encode(report).decode())
        else:
            print("\n".join(_head(report)))
            for columns, rows in _tables(report.rates):
                print()
                print_table("", columns, rows)
            print("\n".join([*_drops(report.rates), *_curves(report.rates), ""]))
        sys.stdout.flush()

    yield show


@contextmanager
def _screen() -> Iterator[Callable[[TopReport], None]]:
    from tiered_kv.cli import terminal  # noqa: PLC0415 - on a terminal only

    def blocks(report: TopReport) -> Iterator[terminal.Block]:
        yield from _head(report)
        for columns, rows in _tables(report.rates):
            yield ""
            yield columns, [(row, row[-1].startswith(BREAKER["open"])) for row in rows]
        yield from ["", *_drops(report.rates), *_curves(report.rates)]

    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        with terminal.screen() as show:
            yield lambda report: show(blocks(report))
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(number: int, _frame: object) -> None:
    """End by an exception, so that the terminal is given back: `timeout 60 tiered-kv top` ends so."""
    raise SystemExit(128 + number)


def _head(report: TopReport) -> list[str]:
    now = report.rates
    clock = time.strftime("%H:%M:%S", time.localtime(report.at_unix_s))
    share = "" if now.hit_share is None else f" ({100 * now.hit_share:.0f} %)"
    who = f"{counted(now.clients, 'client')}, {counted(now.sessions, 'session')}"
    server = f"pid {now.pid}, up {age_text(now.uptime_s)}, {who}"
    asked, hit = count_text(now.asked_tokens_per_s), count_text(now.hit_tokens_per_s)
    return [
        f"{clock}  {server}, {counted(now.lookups, 'open lookup')}",
        f"directory {report.directory}",
        f"tokens/s  {asked} asked, {hit} hit{share}, in {count_text(now.lookups_per_s)} lookups/s",
        f"lookups/s {decisions_text({name: count_text(rate) for name, rate in now.decisions_per_s.items()})}",
    ]


Rows = list[tuple[str, ...]]


def _tables(now: Rates) -> list[tuple[tuple[str, ...], Rows]]:
    return [
        (TIERS, [_state_row(tier) for tier in now.tiers]),
        (MOVED, [_moved_row(tier) for tier in now.tiers if tier.tier != HOST_NAME]),
    ]


def _state_row(tier: TierRates) -> tuple[str, ...]:
    queued = f" ({size_text(tier.queued_bytes)})" if tier.queued_bytes else ""
    return (
        tier.tier,
        size_text(tier.used_bytes),
        capacity_text(tier.capacity_bytes),
        str(tier.chunks),
        _some(tier.hit_tokens_per_s),
        _some(tier.jobs),
        f"{tier.backlog_chunks}{queued}" if tier.backlog_chunks else "",
        BREAKER.get(tier.breaker or "", ""),
    )


def _moved_row(tier: TierRates) -> tuple[str, ...]:
    return (
        tier.tier,
        rate_text(tier.read_bytes_per_s),
        _some(tier.reads_per_s),
        time_text(tier.read_s),
        rate_text(tier.written_bytes_per_s),
        _some(tier.writes_per_s),
        time_text(tier.write_s),
        _some(tier.failures_per_s),
    )


def _some(value: float) -> str:
    """A count; empty where there is none, so that the eye finds the others."""
    return count_text(value) if value else ""


def _drops(now: Rates) -> list[str]:
    admissions = [
        f"{tier.tier:<9} {count_text(tier.admitted_per_s)} chunks/s admitted, {count_text(tier.declined_per_s)}/s not"
        for tier in now.tiers
        if tier.declined_per_s
    ]
    return admissions + [f"dropped   {count_text(rate)}/s {reason}" for reason, rate in sorted(now.drops_per_s.items())]


def _curves(now: Rates) -> list[str]:
    return [f"room      {_curve(curve)}" for curve in now.curves[:CURVES_SHOWN]]


def _curve(curve: CurveFigures) -> str:
    tiers = [
        f"{tier} {share_text(curve.found(tier, 1) or 0.0, 1)}, twice {points_text(curve.gain(tier, 2))}"
        for tier in dict.fromkeys(point.tier for point in curve.points)
    ]
    return f"{curve.namespace[:KEY_DIGITS]}: {'; '.join(tiers)}"
