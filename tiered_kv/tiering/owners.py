"""Chunks that one user's session alone has: what may go when the session ends, or goes on elsewhere.

A user's session (vLLM's ``session_id``) is a row of requests, each of which mostly continues the one before. Its name
stands as the owner in the entries of the chunks that are its own: nobody had asked for them when the session's state
was told to go over them, and nobody but the session has since. Whoever else asks makes them shared, for good. What is
not known to be a session's own never goes with it: a chunk found at start, or one that came back after it was evicted.

Pure, like tiering that calls it. What goes so is an ordinary miss from then on, as if it had been evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from tiered_kv.keys.state_keys import is_state
from tiered_kv.tiering.host_tier import HostTier
from tiered_kv.tiering.index import Entry, Index
from tiered_kv.tiering.secondary_tier import SecondaryTier
from tiered_kv.tiering.types import Removal

STEP: Final = 64
"""Chunks that one step looks at."""


class ReleaseCount(NamedTuple):
    """What became of a session's own chunks.

    Attributes:
        removed: Are going, or are gone already.
        busy: Stay because they are in use: try again.
    """

    removed: int
    busy: int


def take_ownership(index: Index, entry: Entry, owner: bytes) -> list[Entry]:
    """A session's newest state ends with a chunk: what of that prefix nobody asked for yet is the session's own.

    Returns the prefix, root first.
    """
    prefix = index.prefix(entry)[::-1]
    for one in index.with_states(prefix):
        if one.owner is None and not one.uses:
            one.owner = owner
        else:
            one.is_asked_for_by(owner)
    return prefix


def deepest(index: Index, keys: Iterable[bytes], owner: bytes) -> Entry | None:
    """How far a session's state is still known, given its last chunk and some before that, the last one first.

    The last chunks of a prefix are evicted first, so it may end between two of these.
    """
    entry: Entry | None = None
    for number, key in enumerate(keys):
        entry = index.get(key)
        if entry is not None:
            return _behind(entry, owner) if number else entry
    return None


def _behind(entry: Entry, owner: bytes) -> Entry:
    while behind := [child for child in entry.children if child.owner == owner and not is_state(child.record)]:
        entry = behind[0]
    return entry


def own_chunks(index: Index, entry: Entry, owner: bytes) -> list[Entry]:
    """A session's own chunks before and behind one of them, their states and tails; the deepest first.

    A tail behind a chunk that nobody else asked for is the session's: who stores one asks for the chunk before it.
    """
    if entry.owner != owner:
        return []
    while (parent := index.parent(entry)) is not None and parent.owner == owner:
        entry = parent
    pending, found = [entry], list[Entry]()
    while pending:
        found.append(pending.pop())
        pending.extend(child for child in found[-1].children if _is_own(child, owner))
    return sorted(found, key=lambda one: one.record.chunk_index, reverse=True)


def _is_own(entry: Entry, owner: bytes) -> bool:
    return entry.owner == owner or entry.tail_tokens > 0


def releasing(
    index: Index,
    host: HostTier,
    disks: Sequence[SecondaryTier],
    cancel_writes: Callable[[Entry], None],
    own: Sequence[Entry],
    owner: bytes,
    is_kept: Callable[[Entry], bool],
) -> Iterator[ReleaseCount | None]:
    """Remove a session's own chunks from host memory and from the tiers of this machine, the deepest first.

    A chunk stays while anything behind it stays, in whatever tier, and while it is in use. In steps, between which
    anything may happen.

    Args:
        own: As :func:`own_chunks` found them; those that are the owner's no longer stay.
        is_kept: Whether a chunk is to stay, and with it all before it.

    Yields:
        None after a step, and at last what became of them.
    """
    gone = set[Entry]()
    removed = busy = 0
    for number, entry in enumerate(own, 1):
        if not number % STEP:
            yield None
        if index.get(entry.record.key) is not entry:
            gone.add(entry)
            continue
        if not _is_own(entry, owner) or not gone.issuperset(entry.children) or is_kept(entry):
            continue
        cancel_writes(entry)
        if entry.is_busy or any(disk.is_used(entry) for disk in disks):
            busy += 1
            continue
        ends = [disk.remove(entry, leaves_hole=False) for disk in disks]
        ends.append(host.remove(entry, leaves_hole=False))
        if Removal.KEPT in ends:
            busy += 1
            continue
        removed += Removal.REMOVED in ends
        gone.add(entry)
    yield ReleaseCount(removed, busy)


def demoting(index: Index, host: HostTier, own: Collection[Entry]) -> Iterator[ReleaseCount | None]:
    """Let a session's own chunks leave host memory, where a tier below has them; in steps, as :func:`releasing`."""
    removed = busy = 0
    for number, entry in enumerate(own, 1):
        if not number % STEP:
            yield None
        if index.get(entry.record.key) is not entry or not host.contains(entry):
            continue
        if entry.is_busy:
            busy += 1
        elif index.source(entry) is not None:
            removed += host.remove(entry, leaves_hole=False) is Removal.REMOVED
    yield ReleaseCount(removed, busy)
