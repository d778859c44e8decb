"""The engine: drives the hierarchy, performs its jobs on tiers and arena. The only threads of the package."""
