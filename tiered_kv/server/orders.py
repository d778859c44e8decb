"""What an operator orders a running server to do, through the command line."""

from tiered_kv.engine.engine import Engine
from tiered_kv.errors import ConfigError, ProtocolError
from tiered_kv.keys.conditions import Conditions
from tiered_kv.keys.tags import NO_TAG, TAG_BYTES
from tiered_kv.server import messages as m


def evict(engine: Engine, order: m.Evict) -> m.Evicted:
    """Remove chunks from one tier of this machine; the server's loop only.

    Raises:
        ProtocolError: There is no such tier here, or the namespace, the keys, the tag or the conditions are not such.
    """
    names = ["host", *(tier.traits.name for tier in engine.tiers if not tier.traits.is_shared)]
    if order.tier not in names:
        raise ProtocolError(f"no tier {order.tier[:100]!a} to evict from; there are {', '.join(names)}")
    if len(order.keys) % m.KEY_BYTES:
        raise ProtocolError(f"keys have {m.KEY_BYTES} bytes each. observed={len(order.keys)}")
    if len(order.namespace) != m.KEY_BYTES and (order.namespace or order.keys):
        raise ProtocolError(f"a namespace has {m.KEY_BYTES} bytes. observed={len(order.namespace)}")
    keys = [order.keys[i : i + m.KEY_BYTES] for i in range(0, len(order.keys), m.KEY_BYTES)]
    if order.tag and (len(order.tag) != TAG_BYTES or order.tag == NO_TAG or order.keys):
        raise ProtocolError(f"a tag has {TAG_BYTES} bytes, not all zero, and goes without keys. keys={len(keys)}")
    tier = None if order.tier == names[0] else names.index(order.tier) - 1
    if order.stored_by:
        if order.keys or order.tag:
            raise ProtocolError(f"who stored chunks goes without keys and tag. keys={len(keys)}")
        try:
            conditions = Conditions(order.stored_by)
        except ConfigError as exc:
            raise ProtocolError(f"who stored chunks cannot be understood: {exc}") from exc
        removed, kept, left = engine.hierarchy.erase_stored_by(tier, order.namespace, conditions.matches)
        return m.Evicted(removed, kept, 0, left)
    if order.tag:
        removed, kept, left = engine.hierarchy.erase(tier, order.namespace, order.tag)
        return m.Evicted(removed, kept, 0, left)
    return m.Evicted(*engine.hierarchy.remove(tier, order.namespace, keys or None, leaves_holes=order.holes))
