"""Simulators: one seed, one run, everything judged."""
