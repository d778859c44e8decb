"""What operators order a server to remove: worked at a few milliseconds in each turn of its loop.

An order is of as many chunks as there are. One that answers before it is through, because so many chunks are on
their way out already, keeps its place until its operator says the same again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from tiered_kv.engine.engine import Engine
from tiered_kv.errors import ConfigError, ProtocolError
from tiered_kv.keys.chunk_record import KEY_BYTES
from tiered_kv.keys.conditions import Conditions
from tiered_kv.keys.tags import NO_TAG, TAG_BYTES
from tiered_kv.metrics.figures import HOST_NAME
from tiered_kv.server import protocol as m
from tiered_kv.server.connection import Connection
from tiered_kv.tiering.types import HOST, RemovalCount

logger = logging.getLogger(__name__)

SLICE_S: Final = 0.001
"""How long a turn of the loop works at what operators ordered."""


class _Removal(NamedTuple):
    """An order under way; ``steps`` give None, or an answer."""

    connection: Connection
    order: m.Evict
    steps: Iterator[m.Evicted | None]


class Orders:
    """The orders of a server's operators, one of each at a time.

    Threads: the server's loop only.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: deque[_Removal] = deque()
        self._answered: dict[Connection, _Removal] = {}  # with more to do, once their operators say so

    def __bool__(self) -> bool:
        """Whether there is something to go on with now."""
        return bool(self._running)

    def take(self, connection: Connection, order: m.Evict) -> None:
        """Begin with an order, or go on with it if its answer said that chunks are left.

        Raises:
            ProtocolError: It means nothing here, or the operator's last one is under way.
        """
        if any(running.connection is connection for running in self._running):
            raise ProtocolError("an order is under way: its answer comes first")
        removal = self._answered.pop(connection, None)
        if removal is None or removal.order != order:
            removal = _Removal(connection, order, evict(self._engine, order))
        self._running.append(removal)

    def go_on(self) -> None:
        """Go on with all of them, in turns, for ``SLICE_S``."""
        until_s = self._engine.clock.monotonic() + SLICE_S
        while self._running:
            removal = self._running.popleft()
            answer = next(removal.steps)
            if answer is None:
                self._running.append(removal)
            elif not removal.connection.is_closing:
                if answer.left:
                    self._answered[removal.connection] = removal
                self._answer(removal.connection, answer)
            if self._engine.clock.monotonic() >= until_s:
                break

    def left(self, connection: Connection) -> None:
        """An operator is gone: what runs goes on to its answer, what was answered is over."""
        self._answered.pop(connection, None)

    def _answer(self, connection: Connection, answer: m.Evicted) -> None:
        try:
            connection.send(answer)
        except (ProtocolError, OSError) as exc:
            logger.info("client gone. pid=%d role=%s: %r", connection.pid, connection.role, exc)
            connection.close_soon()


def evict(engine: Engine, order: m.Evict) -> Iterator[m.Evicted | None]:
    """Remove chunks from one tier of this machine, a few with each step; the last one gives the answer.

    The server's loop only.

    Raises:
        ProtocolError: There is no such tier here, or the namespace, the keys, the tag or the conditions are not such.
    """
    numbers = {HOST_NAME: HOST}
    numbers |= {tier.traits.name: number for number, tier in engine.tiers.items() if not tier.traits.is_shared}
    if order.tier not in numbers:
        raise ProtocolError(f"no tier {order.tier[:100]!a} to evict from; there are {', '.join(numbers)}")
    tier = numbers[order.tier]
    if len(order.keys) % KEY_BYTES:
        raise ProtocolError(f"keys have {KEY_BYTES} bytes each. observed={len(order.keys)}")
    if len(order.namespace) != KEY_BYTES and (order.namespace or order.keys):
        raise ProtocolError(f"a namespace has {KEY_BYTES} bytes. observed={len(order.namespace)}")
    keys = [order.keys[i : i + KEY_BYTES] for i in range(0, len(order.keys), KEY_BYTES)]
    if order.tag and (len(order.tag) != TAG_BYTES or order.tag == NO_TAG or order.keys):
        raise ProtocolError(f"a tag has {TAG_BYTES} bytes, not all zero, and goes without keys. keys={len(keys)}")
    if order.stored_by:
        if order.keys or order.tag:
            raise ProtocolError(f"who stored chunks goes without keys and tag. keys={len(keys)}")
        try:
            conditions = Conditions(order.stored_by)
        except ConfigError as exc:
            raise ProtocolError(f"who stored chunks cannot be understood: {exc}") from exc
        return _answers(engine.erasing_stored_by(tier, order.namespace, conditions.matches), is_erasure=True)
    if order.tag:
        return _answers(engine.erasing(tier, order.namespace, order.tag), is_erasure=True)
    steps = engine.removing(tier, order.namespace, keys or None, leaves_holes=order.holes)
    return _answers(steps, is_erasure=False)


def _answers(steps: Iterator[RemovalCount | None], *, is_erasure: bool) -> Iterator[m.Evicted | None]:
    """Steps of a removal as answers: what an erasure left is to be gone on with, what else is left is not there."""
    for count in steps:
        if count is None:
            yield None
        else:
            removed, kept, left = count
            yield m.Evicted(removed, kept, *((0, left) if is_erasure else (left, 0)))
