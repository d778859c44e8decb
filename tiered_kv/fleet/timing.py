"""How often and how long: every interval and share of the bucket's keepers, as one frozen value.

Owns the arithmetic that ties them together; nothing here reads a clock. Called by everything in this package.
"""

from dataclasses import dataclass
from typing import Final

from tiered_kv.errors import ConfigError

DRIFT: Final = 0.9
"""Share of a validity time that is used: monotonic clocks of machines may run apart by this much."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Intervals of one keeper; all keepers of a bucket should have the same.

    Attributes:
        expiry_s: A lease, or a server's report, that has not changed for so long is void.
        put_timeout_s: Longest a PUT of a blob takes (``storage_timeout_s``): deadline of one operation.
        settle_s: How long after the client gave up a PUT may still land in the bucket.
        heartbeat_s: How often a server and its leader exchange report and answer when nobody is in need.
        watch_s: How often a server without limits looks for somebody else's lease.
        rest_after_s: A server that stored and used nothing for so long exchanges no reports until it does.
        rest_pass_s: How often a leader that rests lists the bucket for what expires.
        recency_s: How often uses are written.
        pass_s: How often the leader lists the bucket when nobody is in need; stretched so that listing takes at most
            one part in twenty of the time.
        hole_grace_s: A blob without its parent is left alone for so long: the parent may be on its way.
        slice_s: Longest that one turn lists or deletes.
        usage_s: How often the figures of the whole bucket are written and read.
        epoch_s: Grain of recency: uses within one epoch count as equally old, the deepest chunk goes first.
        trouble_s: The same trouble is logged once in so long.
        demand_s: Window over which a server's own rate of writing is measured.
        low_water: Share of the capacity that an eviction pass leaves used.
        ahead_bytes: Bytes a server asks for before it knows how fast it writes.
        delete_batch: Blobs deleted between two checks that this server still leads.
    """

    expiry_s: float = 20.0
    put_timeout_s: float = 10.0
    settle_s: float = 3.0
    heartbeat_s: float = 2.0
    watch_s: float = 60.0
    rest_after_s: float = 300.0
    rest_pass_s: float = 3600.0
    recency_s: float = 60.0
    pass_s: float = 300.0
    hole_grace_s: float = 600.0
    slice_s: float = 2.0
    usage_s: float = 15.0
    epoch_s: float = 60.0
    trouble_s: float = 60.0
    demand_s: float = 10.0
    low_water: float = 0.92
    ahead_bytes: int = 64 << 20
    delete_batch: int = 500

    def __post_init__(self) -> None:
        if self.grant_use_s < 2 * self.heartbeat_s:
            raise ConfigError(
                "a grant would run out between two heartbeats: raise expiry_s or lower the timeout of one operation. "
                f"expiry_s={self.expiry_s:g} put_timeout_s={self.put_timeout_s:g} settle_s={self.settle_s:g} "
                f"heartbeat_s={self.heartbeat_s:g}"
            )
        if not 0 < self.low_water < 1 or self.delete_batch < 1:
            raise ConfigError(
                "low_water is a share between 0 and 1 and a batch has at least one blob. "
                f"low_water={self.low_water:g} delete_batch={self.delete_batch}"
            )

    @property
    def grant_use_s(self) -> float:
        """How long after an exchange a server may begin PUTs.

        Whatever it began has landed, or never will, when its report has been unchanged for ``expiry_s``.
        """
        return (self.expiry_s - self.put_timeout_s - self.settle_s) * DRIFT

    @property
    def rest_watch_s(self) -> float:
        """How often a leader that rests looks for servers that want to store.

        Soon enough that one that comes hears of it before it takes the lease for expired.
        """
        return self.expiry_s / 2

    @classmethod
    def for_timeout(cls, put_timeout_s: float) -> "Timing":
        """The defaults, with an expiry that is long enough for this deadline of one operation."""
        usual = cls()
        least_s = put_timeout_s + usual.settle_s + 4 * usual.heartbeat_s
        return cls(put_timeout_s=put_timeout_s, expiry_s=max(usual.expiry_s, least_s))
