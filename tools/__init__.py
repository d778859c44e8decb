"""Tools beside the package: they run in a clone of the repository and are not installed."""
