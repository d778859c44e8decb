"""Shares: what the models of one server keep of its tiers, and how much of them they may take.

An engine states ``min_share`` and ``max_share`` when it joins. They hold for its namespace while an engine of it is
connected, and for ``HOLD_S`` after the last one went, so that a model that is restarted finds its chunks. What they do
is in ``hierarchy/shares.py``; this file decides whose count. A server that ends forgets them.
"""

from __future__ import annotations

import logging
from dataclasses import replace
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


class ServerShares:
    """The shares of all sessions.

    Threads: the server's loop only.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._shares = engine.hierarchy.index.shares
        self._stated: dict[bytes, Share] = {}  # by namespace; of those that have a session, or had one lately
        self._sessions: dict[int, bytes] = {}
        self._held_until_s: dict[bytes, float] = {}

    def check(self, namespace: bytes, share: Share) -> None:
        """Judge what a joining engine states.

        Raises:
            ConfigError: All minima would be more than there is, or the maximum holds next to nothing.
        """
        here = {name: self._stated[name] for name in self._sessions.values()} | {namespace: share}
        if (lack := self._lack(here)) is not None:
            others = ", ".join(f"{n.hex()} keeps {s.at_least:g}" for n, s in sorted(here.items()) if n != namespace)
            raise ConfigError(
                f"min_share={share.at_least:g} max_share={share.at_most:g} does not go with what the other models on "
                f"this server keep ({others or 'there are none'}): {lack}"
            )

    def _lack(self, stated: dict[bytes, Share]) -> str | None:
        """Why these cannot share the tiers: each must be able to have some chunks in each."""
        kept = sum(share.at_least for share in stated.values())
        if kept > 1 + _ROUNDING:
            return "all of them together may keep 1 at most"
        for namespace, share in stated.items():
            part = min(share.at_most, 1 - kept + share.at_least)  # what the others' minima leave
            for tier, taken in self._engine.hierarchy.taken.items():
                if taken.capacity_bytes is not None and (share.at_most < 1 or kept > 0):
                    size_bytes = int(part * taken.capacity_bytes)
                    if size_bytes < CHUNKS_MIN * share.slot_bytes:
                        name = "host memory" if tier is None else f"the {self._engine.tiers[tier].traits.name} tier"
                        return (
                            f"that leaves {namespace.hex()} {size_text(size_bytes)} of {name}, less than {CHUNKS_MIN} "
                            f"chunks of {size_text(share.slot_bytes)}"
                        )
        return None

    def opened(self, session: int, namespace: bytes, share: Share) -> None:
        """A session is open; what its engine states counts from now on, also for others of its namespace.

        After a reset there may be more namespaces than minima were checked for: then the new one keeps nothing.
        """
        try:
            self.check(namespace, share)
        except ConfigError as exc:
            logger.warning("share not kept after a reset. namespace=%s reason=%s", namespace.hex(), exc)
            share = replace(share, at_least=0.0)
        before = self._stated.get(namespace)
        if before is not None and before != share and namespace in self._sessions.values():
            logger.warning(
                "engines of one model state other shares, and the newest count. namespace=%s min_share=%g max_share=%g",
                namespace.hex(),
                share.at_least,
                share.at_most,
            )
        self._sessions[session] = namespace
        self._held_until_s.pop(namespace, None)
        self._stated[namespace] = share
        self._shares.set(namespace, share)
        self._make_way()

    def closed(self, session: int, *, is_reset: bool = False) -> None:
        """A session is over; one that a reset ended leaves nothing that is worth keeping."""
        namespace = self._sessions.pop(session)
        if namespace in self._sessions.values():
            return
        if is_reset:
            self._drop(namespace)
        else:
            self._held_until_s[namespace] = self._engine.clock.monotonic() + HOLD_S

    def turn(self) -> None:
        """End what was held long enough."""
        now_s = self._engine.clock.monotonic()
        for namespace in [name for name, until_s in self._held_until_s.items() if now_s >= until_s]:
            self._drop(namespace)

    def _make_way(self) -> None:
        """Those whose engines are gone keep only what those that are here leave; the longest gone loses first."""
        while self._held_until_s and self._lack(self._stated) is not None:
            self._drop(next(iter(self._held_until_s)))

    def _drop(self, namespace: bytes) -> None:
        self._held_until_s.pop(namespace, None)
        del self._stated[namespace]
        self._shares.drop(namespace)
