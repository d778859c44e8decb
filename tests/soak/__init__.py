"""The soak: machines under traffic and faults for minutes or hours, run by scripts/soak.py."""
