"""The error tree. Types are split by what the caller does about them; the message says the rest.

Messages are lowercase, name what was observed and what was expected, and put values last as ``name=value``.
Absence is not an error: a lookup of a blob that is not there answers False, and that is an ordinary miss.
"""


class TieredKVError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(TieredKVError, ValueError):
    """A setting is wrong: fix it and start again."""


class UnsupportedModel(ConfigError):
    """The model's KV cache is of a kind that cannot be stored byte for byte; the message says which and why."""


class DirectoryLocked(ConfigError):
    """Another server owns the disk directory; the message names its pid and socket."""


class TierUnavailable(TieredKVError, OSError):
    """A tier failed for now (I/O error, timeout, permission): treat as a miss, try again later."""


class TierBusy(TierUnavailable):
    """A tier has no time for this call, which says nothing against it: a breaker does not count it."""


class CapacityExceeded(TieredKVError):
    """A write would pass a tier's byte limit or the file system is full: drop the write."""


class ChunkCorrupt(TieredKVError):
    """A blob's bytes are not what was sealed (torn, truncated, flipped): delete it and recompute."""


class ChunkMismatch(TieredKVError):
    """A well-formed blob of another namespace or another format version: ignore it, never delete it."""


class ProtocolError(TieredKVError):
    """The peer on the socket sent something the protocol does not allow: close the connection."""


class Closed(TieredKVError):
    """The object was closed; no further calls are allowed."""
