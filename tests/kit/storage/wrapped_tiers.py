"""Tiers inside each wrapper, and inside all of them in the order in which ``tiers/open.py`` stacks them."""

import time
from collections.abc import Callable

from tiered_kv.testing.blobs import SampleChain
from tiered_kv.tiers.base import Tier
from tiered_kv.tiers.wrappers.breaker import Breaker, GuardedTier
from tiered_kv.tiers.wrappers.metered import MeteredTier
from tiered_kv.tiers.wrappers.verified import VerifiedTier


def verified(tier: Tier) -> Tier:
    chain = SampleChain()
    return VerifiedTier(tier, {chain.namespace: chain.form}.get)


def guarded(tier: Tier) -> Tier:
    return GuardedTier(tier, Breaker(time.monotonic))


def metered(tier: Tier) -> Tier:
    return MeteredTier(tier, lambda _operation, _seconds, _bytes, _outcome: None, time.monotonic)


WRAPPINGS: dict[str, Callable[[Tier], Tier]] = {
    "bare": lambda tier: tier,
    "verified": verified,
    "guarded": guarded,
    "metered": metered,
    "all": lambda tier: metered(guarded(verified(tier))),
}
