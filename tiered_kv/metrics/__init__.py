"""Counting what happens: monotonic counters, snapshots. No I/O, no exporters."""
