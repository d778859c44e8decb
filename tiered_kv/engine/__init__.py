"""The engine: drives tiering, performs its jobs on tiers and arena. The only threads of the package."""
