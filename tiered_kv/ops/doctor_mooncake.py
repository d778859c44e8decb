"""Check a Mooncake pool: the package, the master, room for a blob, and its way there and back.

Writes one test blob and removes it. Starts Mooncake's client as a server would, and ends it.
"""

import contextlib
from typing import Final

from tiered_kv.config import Config
from tiered_kv.engine.clock import SystemClock
from tiered_kv.engine.self_test import SELF_TEST_FORMATS, self_test
from tiered_kv.errors import ConfigError
from tiered_kv.ops.doctor_disk import judged
from tiered_kv.ops.findings import DoctorFinding, DoctorMeasurement, error, ok, warning
from tiered_kv.tiers.open import open_pool
from tiered_kv.tiers.wrappers.verified import VerifiedTier

LOOPBACK: Final = ("127.", "localhost:", "[::1]:")


def check_pool(config: Config) -> tuple[list[DoctorFinding], list[DoctorMeasurement]]:
    """Run the checks."""
    try:
        tier = open_pool(config)
    except ConfigError as exc:
        return [error("mooncake", str(exc), "install it where the engines run")], []
    findings = [_network(config)]
    with contextlib.closing(tier):
        result = self_test(VerifiedTier(tier, SELF_TEST_FORMATS.get), SystemClock())
    if result.failure is None and not result.size_bytes:
        hint = "some machine must give the pool memory, e.g. with global_segment_size; or wait until the master evicts"
        return [*findings, error("mooncake test", "the pool has no room for a blob of 4 MiB", hint)], []
    finding, measurements = judged("mooncake", result)
    return [*findings, finding], measurements


def _network(config: Config) -> DoctorFinding:
    location = config.location()
    if location.path.startswith(LOOPBACK):
        return ok("mooncake", f"{location}, on this machine")
    text = "Mooncake encrypts nothing and asks nobody who they are: whoever reaches its ports reads and writes the pool"
    return warning("mooncake", text, "keep it inside a network that you trust (docs/security.md)")
