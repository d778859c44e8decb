"""How much of host memory may be held for what. Pure values; the hierarchy's parts enforce them."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the hierarchy, as shares of host memory.

    Attributes:
        leased_share: Host memory that lookups may hold at once.
        request_share: Host memory one lookup may hold.
        credit_share: Host memory that empty granted slots may hold, all sessions together; up to twice as much if that
            is what it takes to give every session one.
        write_queue_share: Host memory that may be held for its write to a lower tier; past it writes are put off, and
            chunks that are evicted before their turn are never written.
    """

    leased_share: float = 0.5
    request_share: float = 0.375
    credit_share: float = 0.25
    write_queue_share: float = 0.5

    def least_host_bytes(self, tokens: int, chunk_tokens: int, chunk_bytes: int) -> int:
        """Host memory with which one lookup may hold a prompt of so many tokens."""
        return math.ceil(-(-tokens // chunk_tokens) * chunk_bytes / self.request_share)
