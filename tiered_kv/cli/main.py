"""The entry point of `tiered-kv`. Verbs are registered in ``app.VERBS`` and imported on first use."""

import os
import sys

from tiered_kv.cli.app import VERBS, app
from tiered_kv.cli.exits import EXIT_UNAVAILABLE

__all__ = ["VERBS", "app", "main"]


def main() -> None:
    """Run the command line."""
    _open_missing_streams()
    try:
        app(prog_name="tiered-kv")
    finally:
        _end_output()


def _open_missing_streams() -> None:
    """Put /dev/null where a standard stream was closed by who started us (``>&-``), as some supervisors do.

    Python has None there, and what is opened next, a blob or a lock, would get the stream's descriptor.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # and this gets it
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for as long as we run


def _end_output() -> None:
    """Write what is buffered. The interpreter, at its end, would tell an error as a fault of its own, with 120."""
    try:
        sys.stdout.flush()
    except OSError as exc:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        if not isinstance(exc, BrokenPipeError):  # the reader closed the pipe, which is no error
            print(f"tiered-kv: {exc}", file=sys.stderr)
        sys.exit(EXIT_UNAVAILABLE)
