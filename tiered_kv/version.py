"""The version of this package: stated here once, and imported by what says it to others."""

__version__ = "0.1.0"
