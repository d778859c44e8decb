"""The entry point of `tiered-kv`. Verbs are registered in ``app.VERBS``, and imported when they are asked for."""

from tiered_kv.cli.app import VERBS, app

__all__ = ["VERBS", "app", "main"]


def main() -> None:
    """Run the command line."""
    app(prog_name="tiered-kv")
