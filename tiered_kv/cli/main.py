"""The entry point of `tiered-kv`: the application with every verb.

Starts without torch and vLLM, and quickly: verbs import what they need when they run.
"""

from tiered_kv.cli.app import app
from tiered_kv.cli.config import config
from tiered_kv.cli.serve import serve
from tiered_kv.cli.stat import stat

VERBS = (config, serve, stat)
"""Importing them has added them to the application."""


def main() -> None:
    """Run the command line."""
    app()
