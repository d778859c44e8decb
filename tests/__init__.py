"""Tests, a folder per package of ``tiered_kv``, and what they share: see README.md."""
