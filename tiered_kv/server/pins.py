"""Pins that requests ask for (``tiered_kv.pin_ttl_s``), written where an operator's pins are.

Owns which are granted and when they are written: into the disk tier's ``pins.json`` and as objects of the bucket, the
same that ``tiered-kv pin --ttl`` writes, so every reader of pins knows them. Requests come from tenants, so what they
can keep is bounded: together at most ``request_pin_share`` of each tier's limit, counted over the chunks that their
pins keep, prefixes included and shared ones once; those of one tag at most ``tag_pin_share`` of that, where a chunk
that several tags pin counts for the one whose pin ends last. A pin that finds no room is refused and counted; the
request knows nothing of it. Pins change who is evicted, never how much is stored: a tier full of them stores less.

A pin is renewed only when less than the wished time is left of it, and written for a tenth more than was wished, so
that a prompt which every request pins is written now and then and not with every request. Operators end pins where they
are written (``unpin``, ``evict``): one that is asked for again is looked for there, and so are all when one is refused.

=====================  ===============================================================
field                  who touches it
=====================  ===============================================================
``_wanted``            put by the loop, taken by the writing thread (under ``_lock``)
``_failed``, ``_gone`` put by the writing thread, taken by the loop (deque: both are atomic)
``_is_writing``        set by the loop, cleared by the writing thread when it ends
everything else        the server's loop
=====================  ===============================================================
"""

import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tiered_kv.config import TTL_MAX_S
from tiered_kv.engine.engine import Engine
from tiered_kv.errors import Closed, ProtocolError, TierUnavailable
from tiered_kv.fleet.layout import PINS, parse_pin_path, pin_path
from tiered_kv.keys.chunk_record import KEY_BYTES
from tiered_kv.keys.naming import BlobName
from tiered_kv.keys.tags import NO_TAG, TAG_BYTES
from tiered_kv.server import protocol as m
from tiered_kv.tiers.disk.pins import changing_pins, read_pins
from tiered_kv.tiers.object.store import ObjectStore

logger = logging.getLogger(__name__)

Submit = Callable[[Callable[[], None]], None]
"""Runs a task in another thread."""

PIN_TTL_MAX_S: Final = 7 * 86400
"""Longest pin of a request. A longer one is renewed, or an operator's: ``tiered-kv pin`` has no limit."""

KEPT_MAX: Final = 1 << 16
"""Chunks that requests' pins may keep where a tier has no limit of its own."""

WRITE_EVERY_S: Final = 1.0
WRITTEN_MAX: Final = 4096
"""Pins of requests at once: each is a line of a file that is written as a whole."""

BATCH_MAX: Final = 64
"""Pins written at once: in a bucket each takes three requests."""

RENEWED_FOR: Final = 1.1

LOOK_EVERY_S: Final = 5.0
"""How old the last look may be at whether pins are still written; servers read those on disk as often."""

LOOK_IN_BUCKET_EVERY_S: Final = 60.0
"""The same with a bucket: a look is a list of its pins."""

RECOUNT_S: Final = 1e-3
"""Of one turn of the loop, for counting anew what pins keep."""

_LookedFor = Sequence[tuple[BlobName, bool]]
"""Pins to look for, and whether one was not written everywhere."""

_ALL: Final = b""
"""In place of a namespace or a tag: of all of them."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A chunk that pins keep.

    Attributes:
        until_s: When the last of them ends.
        tag: Whose that one is.
    """

    until_s: float
    size_bytes: int
    namespace: bytes
    tag: bytes


class _KeptChunks:
    """What pins keep, each chunk once, and how much that is."""

    def __init__(self) -> None:
        self.by_key: dict[bytes, _Kept] = {}
        self.size_bytes: Counter[tuple[bytes, bytes]] = Counter()  # by namespace and tag; _ALL: of all of them
        self.chunks: Counter[bytes] = Counter()  # by tag
        self._ending: dict[float, set[bytes]] = {}  # keys by their ends

    def add(self, namespace: bytes, prefix: Mapping[bytes, int], until_s: float, tag: bytes) -> None:
        """Count a pin of the last of these chunks."""
        for key, size_bytes in prefix.items():
            before = self.by_key.get(key)
            if before is not None and before.until_s >= until_s:
                continue
            if before is not None:
                size_bytes = before.size_bytes
                self._forget(key)
            self.by_key[key] = _Kept(until_s, size_bytes, namespace, tag)
            self._ending.setdefault(until_s, set()).add(key)
            self._count(self.by_key[key], 1)

    def forget_ended(self, now_s: float) -> None:
        """Leave out what is kept no longer. What stays is not looked at: it may be all that tiers have room for."""
        for until_s in [end_s for end_s in self._ending if end_s <= now_s]:
            for key in list(self._ending[until_s]):
                self._forget(key)

    def _forget(self, key: bytes) -> None:
        kept = self.by_key.pop(key)
        self._ending[kept.until_s].remove(key)
        if not self._ending[kept.until_s]:
            del self._ending[kept.until_s]
        self._count(kept, -1)

    def _count(self, kept: _Kept, times: int) -> None:
        """Nothing stays of a tag that has no pin any more: tags come and go with requests."""
        for place in itertools.product((kept.namespace, _ALL), (kept.tag, _ALL)):
            self.size_bytes[place] += times * kept.size_bytes
            if not self.size_bytes[place]:
                del self.size_bytes[place]
        self.chunks[kept.tag] += times
        if not self.chunks[kept.tag]:
            del self.chunks[kept.tag]


class Pinning:
    """Requests' pins of one server.

    Threads: see the table above.
    """

    def __init__(
        self,
        engine: Engine,
        submit: Submit,
        share: float,
        *,
        disk_root: Path | None,
        store: ObjectStore | None,
        tag_share: float = 1.0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Take the places to write to. Reads what earlier servers left on disk.

        Args:
            share: Of each tier's limit, for all pins; 0 refuses every pin.
            tag_share: Of that, for the pins of one tag. Requests without a tag are nobody's: it does not bind them.
        """
        self._engine = engine
        self._submit = submit
        self._share = share
        self._tag_share = tag_share
        self._disk_root = disk_root
        self._store = store
        self._wall = wall  # what an end is compared with, here as on disk and in the bucket
        self._lock = threading.Lock()
        self._wanted: dict[BlobName, float] = {}
        self._failed: deque[BlobName] = deque()
        self._gone: deque[BlobName] = deque()
        self._unwritten: set[BlobName] = set()  # of _pins, and not everywhere; one that is nowhere gives its room back
        self._is_writing = False
        self._write_due_s = self._forget_due_s = self._looked_s = float("-inf")
        self._look_every_s = LOOK_EVERY_S if store is None else LOOK_IN_BUCKET_EVERY_S
        self._is_look_asked_for = False
        self._pins: dict[BlobName, tuple[float, bytes]] = {}  # their ends and tags
        self._kept = _KeptChunks()
        self._recount: Iterator[None] | None = None
        if disk_root is not None:
            self._adopt(disk_root)

    def pin(self, namespace: bytes, pin: m.Pin) -> str:
        """Keep a chunk and the prefix before it, if there is room for that; the loop only.

        What is granted, or asked to be kept for no time, is worth a write to every secondary tier at once.

        Returns:
            ``done``, ``unknown``, ``refused`` or ``nowhere``, as :class:`~protocol.Hinted` says it.

        Raises:
            ProtocolError: The key or the tag has another length, or the time is none.
        """
        is_named = len(pin.key) == KEY_BYTES and len(pin.tag) == TAG_BYTES
        if not is_named or not 0 <= pin.ttl_s <= TTL_MAX_S:  # NaN is not between them either
            raise ProtocolError(f"bad pin. key_bytes={len(pin.key)} ttl_s={pin.ttl_s!r:.40}")
        if not pin.ttl_s:
            self._engine.want(namespace, pin.key)
            return "done"
        if self._disk_root is None and self._store is None:  # a pool evicts as it likes
            self._engine.count("request_pins_nowhere")
            return "nowhere"
        now_s = self._wall()
        name = BlobName(namespace, pin.key)
        is_written = name in self._pins and name not in self._unwritten
        is_in_force = is_written and self._pins[name][0] >= now_s + pin.ttl_s
        if is_in_force and not self._may_look:
            self._engine.count("request_pins_in_force")
            return "done"
        prefix = self._engine.prefix_of(pin.key)
        if prefix is None:
            self._engine.count("request_pins_of_nothing")
            return "unknown"
        if is_in_force:
            self._engine.count("request_pins_in_force")
            self._is_look_asked_for = True
            with self._lock:
                self._wanted[name] = self._pins[name][0]  # written again where somebody has ended it
            return "done"
        self._forget_ended(now_s)
        until_s = now_s + RENEWED_FOR * pin.ttl_s
        form = self._engine.format_of(namespace)
        blob_bytes = form.blob_bytes if form is not None else 0
        kept = [self._kept.by_key[one] for one in prefix if one in self._kept.by_key]
        new = len(prefix) - len(kept)
        if not self._has_room(name, new, blob_bytes):
            return self._refuse("request_pins_refused")
        if pin.tag != NO_TAG:
            taken_over = sum(one.tag != pin.tag and one.until_s < until_s for one in kept)
            if not self._has_tag_room(name, pin.tag, new + taken_over, blob_bytes):
                return self._refuse("request_pins_refused_of_tag")
        self._engine.count("request_pins")
        self._engine.want(namespace, pin.key)
        self._keep(name, dict.fromkeys(prefix, blob_bytes), until_s, pin.tag)
        with self._lock:
            self._wanted[name] = until_s
        return "done"

    def keeps(self, key: bytes) -> bool:
        """Whether a request's pin keeps a chunk, also one that tiers have not read yet."""
        kept = self._kept.by_key.get(key)
        return kept is not None and kept.until_s > self._wall()

    def step(self) -> None:
        """Write what was granted, about once a second; the loop only."""
        now_s = self._engine.clock.monotonic()
        is_writing = self._is_writing  # before what it found is taken in
        while self._failed:
            self._unwritten.add(self._failed.popleft())  # asked for again, it is written again
        self._forget_gone()
        if is_writing or now_s < self._write_due_s:
            return
        looked_for: _LookedFor = ()
        if self._is_look_asked_for and self._may_look:
            looked_for = tuple((name, name in self._unwritten) for name in self._pins)
            self._is_look_asked_for, self._looked_s = False, now_s
        if self._wanted or looked_for:
            self._is_writing, self._write_due_s = True, now_s + WRITE_EVERY_S
            self._submit(partial(self._write, looked_for))

    def flush(self) -> None:
        """Write what still waits, as much as is written at once; at the server's end."""
        if self._wanted:
            self._write(())

    # -- what is kept --------------------------------------------------------------------------------------------------

    def _adopt(self, root: Path) -> None:
        """Count pins with an end that are there already: a restart must not let requests pin as much again.

        Whose they are is not written with them; it is taken for who stored the chunk.
        """
        try:
            pins = read_pins(root)
        except TierUnavailable as exc:
            logger.warning("requests' pins of earlier servers are not counted. cause=%s", exc)
            return
        for name, until_s in pins.items():
            prefix = self._engine.prefix_of(name.key)
            if until_s and prefix is not None:
                self._keep(name, prefix, until_s, self._engine.tag_of(name.key))

    def _keep(self, name: BlobName, prefix: Mapping[bytes, int], until_s: float, tag: bytes) -> None:
        self._pins[name] = until_s, tag
        self._unwritten.discard(name)
        self._kept.add(name.namespace, prefix, until_s, tag)

    @property
    def _may_look(self) -> bool:
        return self._engine.clock.monotonic() >= self._looked_s + self._look_every_s

    def _refuse(self, counter: str) -> str:
        self._engine.count(counter)
        self._is_look_asked_for = True  # what takes the room may be over
        return "refused"

    def _forget_ended(self, now_s: float) -> None:
        """Give the room of ended pins back; looked for only when a pin is asked for, and then at most once a second."""
        if 0 <= self._forget_due_s - now_s <= WRITE_EVERY_S:
            return
        self._forget_due_s = now_s + WRITE_EVERY_S
        self._pins = {name: pin for name, pin in self._pins.items() if pin[0] > now_s}
        self._unwritten &= self._pins.keys()
        self._kept.forget_ended(now_s)

    def _forget_gone(self) -> None:
        """Give the room back of pins that somebody has ended; what the others keep is counted anew, in parts."""
        if self._gone:
            with self._lock:
                gone = {self._gone.popleft() for _ in range(len(self._gone))} - self._wanted.keys()
            self._pins = {name: pin for name, pin in self._pins.items() if name not in gone}
            self._unwritten -= gone
            self._recount = self._count_anew()
        end_s = self._engine.clock.monotonic() + RECOUNT_S
        while self._recount is not None and self._engine.clock.monotonic() < end_s:
            if next(self._recount, self) is self:
                self._recount = None

    def _count_anew(self) -> Iterator[None]:
        """Count what the pins keep, one after the other, and take the result in place of what was counted."""
        kept = _KeptChunks()
        counted: set[tuple[BlobName, float]] = set()
        # Again for those that are new or renewed meanwhile.
        while more := {(name, until_s) for name, (until_s, _) in self._pins.items()} - counted:
            for name, until_s in sorted(more, key=lambda one: one[1], reverse=True):
                counted.add((name, until_s))
                before = kept.by_key.get(name.key)
                pin = self._pins.get(name)
                if pin is None or (before is not None and before.until_s >= pin[0]):
                    continue  # with it all of its prefix is kept for longer
                if prefix := self._engine.prefix_of(name.key):
                    kept.add(name.namespace, prefix, *pin)
                yield
        self._kept = kept

    def _has_room(self, name: BlobName, more_chunks: int, blob_bytes: int) -> bool:
        """Whether pins may keep so many chunks more; one that is there is renewed however many there are."""
        pins, chunks = len(self._pins) + (name not in self._pins), len(self._kept.by_key) + more_chunks
        if not self._share or pins > WRITTEN_MAX or chunks > KEPT_MAX:
            return False
        return self._fits(self._share, name.namespace, _ALL, more_chunks * blob_bytes)

    def _has_tag_room(self, name: BlobName, tag: bytes, more_chunks: int, blob_bytes: int) -> bool:
        """Whether a tag's pins may keep so many chunks more; also where tiers have no limit, or pins are many."""
        pins = sum(one == tag for _, one in self._pins.values()) + (name not in self._pins)
        chunks = self._kept.chunks[tag] + more_chunks
        if pins > self._tag_share * WRITTEN_MAX or chunks > self._tag_share * KEPT_MAX:
            return False
        return self._fits(self._share * self._tag_share, name.namespace, tag, more_chunks * blob_bytes)

    def _fits(self, share: float, namespace: bytes, tag: bytes, more_bytes: int) -> bool:
        """Whether pins of a tag, or of ``_ALL``, keep at most this share of each limit with so many bytes more."""
        everywhere, here = (self._kept.size_bytes[place, tag] + more_bytes for place in (_ALL, namespace))
        quota = self._engine.quota_of(namespace)
        most = 1.0 if quota is None else quota.at_most  # or its pins could fill all that it may have
        limits: Sequence[int | None] = [tier.usage().capacity_bytes for tier in self._engine.tiers.values()]
        return all(
            everywhere <= share * limit and here <= share * most * limit for limit in limits if limit is not None
        )

    # -- the writing thread --------------------------------------------------------------------------------------------

    def _write(self, looked_for: _LookedFor) -> None:
        with self._lock:
            wanted = dict(itertools.islice(self._wanted.items(), BATCH_MAX))
            for name in wanted:
                del self._wanted[name]
        try:
            if self._disk_root is not None:
                self._write_disk(self._disk_root, wanted)
            if self._store is not None:
                self._write_bucket(self._store, wanted)
            if looked_for:
                places = self._places()
                everywhere, anywhere = frozenset.intersection(*places), frozenset.union(*places)
                for name, is_unwritten in looked_for:
                    if name not in (anywhere if is_unwritten else everywhere):
                        self._gone.append(name)
        except (TierUnavailable, Closed) as exc:
            logger.warning("pins of requests were not written everywhere. pins=%d cause=%s", len(wanted), exc)
            self._failed.extend(wanted)
        finally:
            self._is_writing = False

    def _places(self) -> list[frozenset[BlobName]]:
        """Pins that are in force, by the place where they are written."""
        places = []
        if self._disk_root is not None:
            places.append(frozenset(read_pins(self._disk_root)))
        if self._store is not None:
            pins = [parse_pin_path(info.path) for info in self._store.list(PINS)]
            places.append(frozenset(pin[0] for pin in pins if pin and (not pin[1] or pin[1] > self._wall())))
        return places

    @staticmethod
    def _write_disk(root: Path, wanted: dict[BlobName, float]) -> None:
        def longer(pins: Mapping[BlobName, float]) -> dict[BlobName, float]:
            ends = {name: pins.get(name) for name in wanted}  # 0: an operator wants it kept for good
            return {name: wanted[name] for name, end_s in ends.items() if end_s is None or 0 < end_s < wanted[name]}

        if longer(read_pins(root)):
            with changing_pins(root) as pins:
                pins.update(longer(pins))

    @staticmethod
    def _write_bucket(store: ObjectStore, wanted: dict[BlobName, float]) -> None:
        """Put the new pin, then delete the shorter ones of the same chunk; a longer one makes the new one needless."""
        for name, until_s in wanted.items():
            place = f"{PINS}{name.namespace.hex()}/{name.key.hex()}."
            old = {info.path: parse_pin_path(info.path) for info in store.list(place)}
            ends = [pin[1] for pin in old.values() if pin is not None]
            if any(end_s == 0 or end_s >= int(until_s) for end_s in ends):
                continue
            store.put(pin_path(name, int(until_s)), b"")
            store.delete([path for path, pin in old.items() if pin is not None])
