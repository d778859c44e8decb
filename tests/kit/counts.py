"""How often a test repeats: a small count everywhere, the full one under ``make prove`` (scripts/prove.py).

Called at import by tests that kill, fuzz or try seeds. A count is an environment variable ``TIERED_KV_<NAME>``.
"""

import os

import pytest


def count(name: str, default: int) -> int:
    """The number of repetitions called ``name``: ``TIERED_KV_<NAME>`` if set, else ``default``."""
    return int(os.environ.get(f"TIERED_KV_{name}", default))


def seed() -> int:
    """Where tests that draw their own cases start: ``TIERED_KV_SEED`` if set, else 0. Put it into the test's id."""
    return count("SEED", 0)


only_in_proofs = pytest.mark.skipif(
    not count("MODELS", 0), reason="minutes of engine or store: runs under make prove, or with TIERED_KV_MODELS=1"
)
"""For tests of a path that others prove more cheaply."""
