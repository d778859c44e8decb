"""Quotas: what the models of one server keep of its tiers, and how much of them they may take.

An engine states ``min_share`` and ``max_share`` when it joins. They hold for its namespace while an engine of it is
connected, and for ``HOLD_S`` after the last one went, so that a model that is restarted finds its chunks. What they do
is in ``tiering/quotas.py``; this file decides whose count. A server that ends forgets them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Final

from tiered_kv.config import size_text
from tiered_kv.engine.engine import Engine
from tiered_kv.errors import ConfigError
from tiered_kv.tiering.quotas import Quota

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
    quota: Quota
    is_made: bool


class ServerQuotas:
    """The quotas of all sessions.

    Of a namespace the newest statement counts, until no session that made one is open, and an hour longer. A session
    that states nothing, as that of a copy, changes nothing.

    Threads: the server's loop only.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sessions: dict[int, _Statement] = {}  # oldest first
        self._held: dict[bytes, tuple[Quota, float]] = {}  # until when; longest gone first

    def check(self, namespace: bytes, quota: Quota | None, slot_bytes: int) -> None:
        """Judge what a joining engine states.

        Raises:
            ConfigError: With what the others keep, it or one of them would have next to nothing.
        """
        here = self._connected()
        here[namespace] = replace(quota or here.get(namespace) or Quota(), slot_bytes=slot_bytes)
        if (lack := self._lack(here)) is not None:
            mine = here.pop(namespace)
            others = ", ".join(f"{name.hex()} keeps {one.at_least:g}" for name, one in sorted(here.items()))
            raise ConfigError(
                f"min_share={mine.at_least:g} max_share={mine.at_most:g} does not go with what the other models on "
                f"this server keep ({others or 'there are none'}): {lack}"
            )

    def opened(self, session: int, namespace: bytes, quota: Quota | None, slot_bytes: int) -> None:
        """A session is open; what its engine states counts from now on, also for others of its namespace.

        After a reset there may be more namespaces than minima were checked for: then the new one keeps nothing.
        """
        try:
            self.check(namespace, quota, slot_bytes)
        except ConfigError as exc:
            logger.warning("share not kept after a reset. namespace=%s reason=%s", namespace.hex(), exc)
            quota = None if quota is None else replace(quota, at_least=0.0)
        statement = _Statement(namespace, replace(quota or Quota(), slot_bytes=slot_bytes), quota is not None)
        before = [one.quota for one in self._sessions.values() if one.is_made and one.namespace == namespace]
        if statement.is_made and before and before[-1] != statement.quota:
            logger.warning(
                "engines of one model state other shares, and the newest count. namespace=%s min_share=%g max_share=%g",
                namespace.hex(),
                statement.quota.at_least,
                statement.quota.at_most,
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
        namespace, quota = statement.namespace, self._engine.quota_of(statement.namespace) or Quota()
        left = [n for n, one in self._sessions.items() if one.is_made and one.namespace == namespace]
        for number in left:  # what counted goes on to count: an older statement was not checked beside the others
            old = self._sessions[number]
            self._sessions[number] = replace(old, quota=replace(quota, slot_bytes=old.quota.slot_bytes))
        if statement.is_made and not left and not is_reset:
            self._held[namespace] = (statement.quota, self._engine.clock.monotonic() + HOLD_S)
        self._apply(namespace)

    def turn(self) -> None:
        """End what was held long enough."""
        now_s = self._engine.clock.monotonic()
        for namespace in [name for name, (_, until_s) in self._held.items() if now_s >= until_s]:
            self._drop(namespace)

    def _all_held(self) -> dict[bytes, Quota]:
        return {namespace: quota for namespace, (quota, _) in self._held.items()}

    def _drop(self, namespace: bytes) -> None:
        del self._held[namespace]
        self._apply(namespace)

    def _apply(self, namespace: bytes) -> None:
        held = self._held.get(namespace)
        quota = self._connected().get(namespace) if held is None else held[0]
        self._engine.set_quota(namespace, quota or Quota())

    def _connected(self) -> dict[bytes, Quota]:
        """What the sessions of each namespace state; what is only held for one makes way for those that state."""
        found: dict[bytes, Quota] = {}
        for one in sorted(self._sessions.values(), key=lambda one: one.is_made):  # oldest first, then by what is said
            found[one.namespace] = one.quota
        return found

    def _lack(self, stated: dict[bytes, Quota]) -> str | None:
        """Why these cannot share the tiers: each must be able to have some chunks in each."""
        kept = sum(quota.at_least for quota in stated.values())
        if kept > 1 + _ROUNDING:
            return "all of them together may keep 1 at most"
        for namespace, quota in stated.items():
            part = min(quota.at_most, 1 - kept + quota.at_least)  # what the others' minima leave
            for tier, limit_bytes in self._limits().items():
                size_bytes = int(part * limit_bytes)
                if (quota.at_most < 1 or kept > 0) and size_bytes < CHUNKS_MIN * quota.slot_bytes:
                    return (
                        f"that leaves {namespace.hex()} {size_text(size_bytes)} of {tier}, less than {CHUNKS_MIN} "
                        f"chunks of {size_text(quota.slot_bytes)}"
                    )
        return None

    def _limits(self) -> dict[str, int]:
        """Bytes that quotas are of, by tier; of memory all that may be had, though the machine may refuse some now."""
        limits = {"host memory": self._engine.host_bytes}
        for number, tier in self._engine.tiers.items():
            if (capacity_bytes := self._engine.capacity_bytes(number)) is not None:
                limits[f"the {tier.traits.name} tier"] = capacity_bytes
        return limits
