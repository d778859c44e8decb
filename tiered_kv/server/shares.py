"""Shares: what the models of one server keep of its tiers, and how much of them they may take.

An engine states ``min_share`` and ``max_share`` when it joins. They hold for its namespace while an engine of it is
connected, and for ``HOLD_S`` after the last one went, so that a model that is restarted finds its chunks. What they do
is in ``hierarchy/shares.py``; this file decides whose count. A server that ends forgets them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Final

from tiered_kv.config import size_text
from tiered_kv.engine.engine import Engine
from tiered_kv.errors import ConfigError
from tiered_kv.hierarchy.shares import Share

logger = logging.getLogger(__name__)

HOLD_S: Final = 3600.0
"""Long enough for a deployment or a machine that loads a large model; afterwards nobody keeps room for what is gone."""

CHUNKS_MIN: Final = 4
"""Less than this is no cache: one chunk is being filled while another is read."""

_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class _Statement:
    """What one session says of its namespace; ``is_made``: it says anything."""

    namespace: bytes
    share: Share
    is_made: bool


class ServerShares:
    """The shares of all sessions.

    Of a namespace the newest statement counts, until no session that made one is open, and an hour longer. A session
    that states nothing, as that of a copy, changes nothing.

    Threads: the server's loop only.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._shares = engine.hierarchy.index.shares
        self._sessions: dict[int, _Statement] = {}  # oldest first
        self._held: dict[bytes, tuple[Share, float]] = {}  # until when; longest gone first

    def check(self, namespace: bytes, share: Share | None, slot_bytes: int) -> None:
        """Judge what a joining engine states.

        Raises:
            ConfigError: With what the others keep, it or one of them would have next to nothing.
        """
        here = self._connected()
        here[namespace] = replace(share or here.get(namespace) or Share(), slot_bytes=slot_bytes)
        if (lack := self._lack(here)) is not None:
            mine = here.pop(namespace)
            others = ", ".join(f"{name.hex()} keeps {one.at_least:g}" for name, one in sorted(here.items()))
            raise ConfigError(
                f"min_share={mine.at_least:g} max_share={mine.at_most:g} does not go with what the other models on "
                f"this server keep ({others or 'there are none'}): {lack}"
            )

    def opened(self, session: int, namespace: bytes, share: Share | None, slot_bytes: int) -> None:
        """A session is open; what its engine states counts from now on, also for others of its namespace.

        After a reset there may be more namespaces than minima were checked for: then the new one keeps nothing.
        """
        try:
            self.check(namespace, share, slot_bytes)
        except ConfigError as exc:
            logger.warning("share not kept after a reset. namespace=%s reason=%s", namespace.hex(), exc)
            share = None if share is None else replace(share, at_least=0.0)
        statement = _Statement(namespace, replace(share or Share(), slot_bytes=slot_bytes), share is not None)
        before = [one.share for one in self._sessions.values() if one.is_made and one.namespace == namespace]
        if statement.is_made and before and before[-1] != statement.share:
            logger.warning(
                "engines of one model state other shares, and the newest count. namespace=%s min_share=%g max_share=%g",
                namespace.hex(),
                statement.share.at_least,
                statement.share.at_most,
            )
        self._sessions[session] = statement
        if statement.is_made:
            self._held.pop(namespace, None)
        self._apply(namespace)
        while self._held and self._lack(self._connected() | self._all_held()) is not None:
            self._drop(next(iter(self._held)))

    def closed(self, session: int, *, is_reset: bool = False) -> None:
        """A session is over; one that a reset ended leaves nothing that is worth keeping. Idempotent."""
        statement = self._sessions.pop(session, None)
        if statement is None:
            return
        namespace, share = statement.namespace, self._shares.get(statement.namespace) or Share()
        left = [n for n, one in self._sessions.items() if one.is_made and one.namespace == namespace]
        for number in left:  # what counted goes on to count: an older statement was not checked beside the others
            old = self._sessions[number]
            self._sessions[number] = replace(old, share=replace(share, slot_bytes=old.share.slot_bytes))
        if statement.is_made and not left and not is_reset:
            self._held[namespace] = (statement.share, self._engine.clock.monotonic() + HOLD_S)
        self._apply(namespace)

    def turn(self) -> None:
        """End what was held long enough."""
        now_s = self._engine.clock.monotonic()
        for namespace in [name for name, (_, until_s) in self._held.items() if now_s >= until_s]:
            self._drop(namespace)

    def _all_held(self) -> dict[bytes, Share]:
        return {namespace: share for namespace, (share, _) in self._held.items()}

    def _drop(self, namespace: bytes) -> None:
        del self._held[namespace]
        self._apply(namespace)

    def _apply(self, namespace: bytes) -> None:
        held = self._held.get(namespace)
        share = self._connected().get(namespace) if held is None else held[0]
        self._shares.set(namespace, share or Share())

    def _connected(self) -> dict[bytes, Share]:
        """What the sessions of each namespace state; what is only held for one makes way for those that state."""
        found: dict[bytes, Share] = {}
        for one in sorted(self._sessions.values(), key=lambda one: one.is_made):  # oldest first, then by what is said
            found[one.namespace] = one.share
        return found

    def _lack(self, stated: dict[bytes, Share]) -> str | None:
        """Why these cannot share the tiers: each must be able to have some chunks in each."""
        kept = sum(share.at_least for share in stated.values())
        if kept > 1 + _ROUNDING:
            return "all of them together may keep 1 at most"
        for namespace, share in stated.items():
            part = min(share.at_most, 1 - kept + share.at_least)  # what the others' minima leave
            for tier, limit_bytes in self._limits().items():
                size_bytes = int(part * limit_bytes)
                if (share.at_most < 1 or kept > 0) and size_bytes < CHUNKS_MIN * share.slot_bytes:
                    return (
                        f"that leaves {namespace.hex()} {size_text(size_bytes)} of {tier}, less than {CHUNKS_MIN} "
                        f"chunks of {size_text(share.slot_bytes)}"
                    )
        return None

    def _limits(self) -> dict[str, int]:
        """Bytes that shares are of, by tier; of memory all that may be had, though the machine may refuse some now."""
        hierarchy, limits = self._engine.hierarchy, {"host memory": self._engine.hierarchy.slots.host_bytes}
        for number, tier in enumerate(self._engine.tiers):
            if (capacity_bytes := hierarchy.taken[number].capacity_bytes) is not None:
                limits[f"the {tier.traits.name} tier"] = capacity_bytes
        return limits
