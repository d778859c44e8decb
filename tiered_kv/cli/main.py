"""The entry point of `tiered-kv`. Verbs are registered in ``app.VERBS`` and imported on first use."""

from tiered_kv.cli.app import VERBS, app

__all__ = ["VERBS", "app", "main"]


def main() -> None:
    """Run the command line."""
    app(prog_name="tiered-kv")
