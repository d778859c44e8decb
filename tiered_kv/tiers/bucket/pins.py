"""Pins of a bucket: chunks that an operator wants kept, as objects whose names say it all.

::

    _tiered_kv/pins/<namespace>/<key>.<seconds since 1970, 12 digits; 0 for good>

Empty objects: one LIST tells every pin, which the leader's pass makes anyway. Written by the command line; the janitor
reads them and removes those that have ended, by the store's clock.
"""

import re
from typing import Final

from tiered_kv.keys.naming import BlobName
from tiered_kv.tiers.bucket.layout import ROOT

PINS: Final = f"{ROOT}/pins/"
UNTIL_MAX: Final = 10**12 - 1

_PATH = re.compile(re.escape(PINS) + r"([0-9a-f]{32})/([0-9a-f]{32})\.([0-9]{12})")


def pin_path(name: BlobName, until_s: int) -> str:
    """The object of a pin; ``until_s`` 0: for good."""
    return f"{PINS}{name.namespace.hex()}/{name.key.hex()}.{min(until_s, UNTIL_MAX):012d}"


def parse_pin_path(path: str) -> tuple[BlobName, int] | None:
    """The chunk and the end of a pin; None for anything else."""
    found = _PATH.fullmatch(path)
    if found is None:
        return None
    return BlobName(bytes.fromhex(found[1]), bytes.fromhex(found[2])), int(found[3])
