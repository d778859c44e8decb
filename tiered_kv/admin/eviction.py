"""Evict: from the one tier a URI names, or from the memory of a running server.

What goes is chosen by ``selection.py`` from a listing; this module reads the wishes of an operator, and carries them
out. Called by ``cli/evict.py``.
"""

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

from tiered_kv.admin.forest import Forest
from tiered_kv.admin.selection import Criteria, Selection, select
from tiered_kv.admin.server_link import ServerLink
from tiered_kv.admin.storage import Content, Origin, Removal, Storage, StoredBlob
from tiered_kv.admin.words import option_value
from tiered_kv.config import parse_size, parse_time_s
from tiered_kv.errors import ConfigError
from tiered_kv.keys.conditions import Conditions

HOST = "host"
DISK = "disk"


@dataclass(frozen=True, slots=True)
class Amount:
    """How much shall go, as an operator writes it; at most one of them."""

    free: str | None = None
    to: str | None = None
    older_than: str | None = None


def make_criteria(
    storage: Storage,
    content: Content,
    amount: Amount,
    *,
    place: tuple[bytes | None, StoredBlob | None],
    whose: tuple[bytes | None, Conditions | None],
    is_all: bool,
) -> Criteria:
    """What an operator's words mean for what was found.

    Args:
        place: The namespace and the chunk that were named.
        whose: The digest of the tag, and the conditions on who stored it.

    Raises:
        ConfigError: They mean nothing, contradict each other, or need a capacity that nobody knows.
    """
    (namespace, key), (tag, stored_by) = place, whose
    if amount.free is not None and amount.to is not None:
        raise ConfigError("say either --bytes or --to: they contradict each other")
    free_bytes = None
    if amount.free is not None:
        free_bytes = option_value("--bytes", parse_size, amount.free)
    elif amount.to is not None:
        free_bytes = max(0, used_bytes(storage, content) - _goal(storage, amount.to))
    used_before_s = None
    if amount.older_than is not None:
        used_before_s = time.time() - option_value("--older-than", parse_time_s, amount.older_than)
    return Criteria(
        free_bytes=free_bytes,
        used_before_s=used_before_s,
        key=key,
        tag=tag,
        stored_by=stored_by,
        is_all=is_all,
        namespace=namespace,
    )


def used_bytes(storage: Storage, content: Content) -> int:
    """What counts against the tier's capacity: on disk a reserve beside it is for what is no blob."""
    own_bytes = content.own_bytes if storage.kind == "object" else 0
    return content.blob_bytes + own_bytes + sum(stray.size_bytes for stray in content.strays)


def _goal(storage: Storage, text: str) -> int:
    share = re.fullmatch(r"\s*(\d{1,3}(?:\.\d+)?)\s*%\s*", text)
    if share is None:
        return option_value("--to", parse_size, text)
    percent = float(share[1])
    if percent > 100:
        raise ConfigError(f"option --to: expected at most 100%, got {text!r}")
    capacity = storage.capacity_bytes()
    if capacity is None:
        raise ConfigError(
            "option --to: the capacity is not known, because no server is running that enforces one: give --bytes, "
            "--to with a size such as 10GiB, or the limit of a directory as --set disk_bytes=SIZE"
        )
    return int(capacity * percent / 100)


# -- a running server --------------------------------------------------------------------------------------------------


def open_namespaces(link: ServerLink) -> set[bytes]:
    """Namespaces of the engines that are connected to a server."""
    return {bytes.fromhex(s.namespace) for s in link.stat().sessions if s.namespace is not None}


def lower_tiers(link: ServerLink) -> list[str]:
    """Names of the server's tiers below host memory."""
    return [tier.name for tier in link.stat().tiers]


def erase_host(link: ServerLink, namespace: bytes | None, origin: Origin) -> Removal:
    """Have a server remove what is of an origin, and all behind it, from its memory; what is in use stays."""
    removed, kept, missing = link.erase(HOST, namespace or b"", origin)
    return Removal(removed=removed, kept=kept, missing=missing)


def evict_host(link: ServerLink, namespace: bytes | None, keys: Iterable[bytes] | None) -> Removal:
    """Have a server remove chunks from its memory; those that requests have leased stay.

    Args:
        namespace: None: every one.
        keys: None: all of the namespace.
    """
    removed, kept, missing = link.evict(HOST, namespace or b"", None if keys is None else list(keys), holes=True)
    return Removal(removed=removed, kept=kept, missing=missing)


def host_selection(forest: Forest, key: StoredBlob) -> Selection:
    """A chunk and everything behind it, pinned or not: pins keep what is stored, not what is in memory."""
    unpinned = Forest(blob._replace(pinned_until_s=0.0) for blob in forest.blobs.values())
    return select(unpinned, Criteria(key=key))
