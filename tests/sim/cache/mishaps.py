"""Mishaps of the cache simulation: what happens once, to a server, a client, a clock, a medium, or by an operator.

Each method is a mishap of the plan, by its name; what it hits follows from the number the plan drew.
"""

from collections import Counter
from collections.abc import Callable

from tests.kit.engine_world import Path
from tests.sim.cache.clients import Client
from tests.sim.cache.media import Bucket, Disk, damaged
from tests.sim.cache.node import Node
from tests.sim.cache.oracle import CHUNKS, Asked, Chunk, chunk, prefix
from tests.sim.cache.plan import Mishap, Plan
from tests.sim.virtual_time import Hub
from tiered_kv.keys.naming import object_path
from tiered_kv.tiering.types import HOST
from tiered_kv.tiers.base import BlobName

PINNED_CHUNKS_MAX = 2
"""What an operator pins is small against the smallest disk: a disk full of pins stores nothing, as documented."""

DRAIN_S = 10.0
_WITHOUT_SERVER = frozenset({"damage", "empty", "pin", "unpin", "jump"})


class Mishaps:
    """What may happen to the nodes and clients of one schedule."""

    def __init__(
        self, plan: Plan, hub: Hub, nodes: list[Node], clients: list[Client], counts: Counter[str], asked: Asked
    ) -> None:
        self._plan = plan
        self._hub = hub
        self._nodes = nodes
        self._clients = clients
        self._counts = counts
        self._asked = asked
        self._bucket = nodes[0].bucket
        self._has_swapped = False
        self.boot: Callable[[Node], None] = lambda node: None

    def happen(self, mishap: Mishap) -> None:
        node = self._nodes[mishap.node]
        self._counts[f"mishap {mishap.what}"] += 1
        self._hub.note(f"node{mishap.node} {mishap.what}")
        if mishap.what in _WITHOUT_SERVER or (node.is_up and not node.is_draining):
            getattr(self, f"_{mishap.what}")(node, mishap.pick)

    def _crash(self, node: Node, pick: int) -> None:
        node.crash()
        for client in self._clients:
            if client.node is node:
                client.lose()
        self._hub.after(pick % 40 / 10, lambda: self.boot(node))

    def _power(self, node: Node, pick: int) -> None:
        """The machine loses power: files that were renamed a moment ago may have no or half their data."""
        self._crash(node, pick)
        disk = node.disk
        if disk is None:
            return
        for name, when_s in disk.published.items():
            if name in disk.blobs and self._hub.now_s - when_s < 5.0 and self._hub.draw.random() < 0.5:
                disk.is_tampered = True
                disk.blobs[name] = damaged(disk.blobs[name], "zeros", self._hub.draw.randrange(1 << 16))
                disk.damage.add(name)

    def _stop(self, node: Node, pick: int) -> None:
        """The server ends in an orderly way and starts again."""
        node.is_draining = True
        for client in self._clients:
            if client.node is node:
                client.close()
        node.wake()
        self._drain(node, node.life, self._hub.now_s + DRAIN_S, pick)

    def _drain(self, node: Node, life: int, until_s: float, pick: int) -> None:
        if not node.is_up or node.life != life:
            return
        is_done = not node.engine.tiering.pending_writes or self._hub.now_s >= until_s
        if is_done:
            node.executor.close()
        if is_done and node.executor.is_idle:
            node.close()
            self._hub.after(pick % 20 / 10, lambda: self.boot(node))
        else:
            self._hub.after(0.1, lambda: self._drain(node, life, until_s, pick))

    def _vanish(self, node: Node, pick: int) -> None:
        clients = [client for client in self._clients if client.node is node and client.is_joined]
        if clients:
            clients[pick % len(clients)].vanish(pick % 100 / 20, then_back=True)

    def _jump(self, node: Node, pick: int) -> None:
        node.clock.jumped_s += (-1) ** (pick & 1) * [30.0, 86400.0, 3.2e7, 1e9][pick // 2 % 4]

    def _refuse(self, node: Node, pick: int) -> None:
        arena = node.arena
        arena.is_refused = True

        def allow() -> None:
            arena.is_refused = False

        self._hub.after(pick % 50 / 10, allow)

    def _gpu(self, node: Node, pick: int) -> None:
        """An engine that pins host memory comes, and goes after a while."""
        life = node.life
        node.engine.keep_memory(is_kept=True)

        def leave() -> None:
            if node.is_up and node.life == life:
                node.engine.keep_memory(is_kept=False)
                node.wake()

        self._hub.after(pick % 400 / 10, leave)

    def _freeze(self, node: Node, pick: int) -> None:
        """The server's loop does not turn; its threads go on."""
        node.frozen_until_s = self._hub.now_s + pick % 80 / 10

    def _paths(self) -> list[tuple[str, Path]]:
        return sorted({(self._clients[ask.client].space, ask.path) for ask in self._plan.asks})

    def _pin(self, node: Node, pick: int) -> None:
        if node.disk is None:
            return
        kept = {one.record.key for key in node.disk.pins for one in _prefix_of(key)}
        space, path = self._paths()[pick % len(self._paths())]
        made = prefix(space, path[:PINNED_CHUNKS_MAX])
        if len(kept | {one.record.key for one in made}) <= PINNED_CHUNKS_MAX:
            node.disk.pins[made[-1].record.key] = made[-1].name
            self._asked.has_prompt(made)

    def _unpin(self, node: Node, pick: int) -> None:
        del pick
        if node.disk is not None and node.disk.pins:
            del node.disk.pins[min(node.disk.pins)]

    def _damage(self, node: Node, pick: int) -> None:
        """A medium loses or changes what lies there, behind everybody's back."""
        medium: Disk | Bucket | None = self._bucket if node.disk is None or pick & 1 else node.disk
        if medium is None:
            medium = node.disk
        assert medium is not None
        names = sorted(medium.blobs if isinstance(medium, Disk) else medium.names(), key=lambda name: name.key)
        names = [name for name in names if name.key in CHUNKS]
        if not names:
            return
        victim, how = names[pick % len(names)], ("flip", "cut", "zeros", "swap", "lose")[pick // 8 % 5]
        other = names[pick // 64 % len(names)]
        if how == "swap" and self._has_swapped:
            how = "flip"  # a blob of another namespace keeps its room for good, and a disk full of them takes nothing
        medium.damage.add(victim)
        if isinstance(medium, Disk):
            medium.is_tampered = True
        if how == "swap":
            self._has_swapped = True
            medium.damage.add(other)
            one, two = _raw(medium, victim), _raw(medium, other)
            if len(one) == len(two):  # sizes that others change are not accounted for before the next start
                _set_raw(medium, victim, two)
                _set_raw(medium, other, one)
        elif how == "lose":
            _set_raw(medium, victim, None)
        else:
            _set_raw(medium, victim, damaged(_raw(medium, victim), how, pick))

    def _empty(self, node: Node, pick: int) -> None:
        """Somebody deletes a half of the bucket's blobs, or its oldest ones, or the deepest ones, or all."""
        del node
        bucket = self._bucket
        assert bucket is not None
        for name in [name for name in bucket.names() if name.key in CHUNKS]:
            depth, how = len(CHUNKS[name.key].path), pick % 4
            if how == 0 or (how == 1 and name.key[0] & 1) or (how == 2 and depth <= 2) or (how == 3 and depth > 2):
                bucket.damage.add(name)
                _set_raw(bucket, name, None)

    def _remove(self, node: Node, pick: int) -> None:
        """An operator removes a prompt from one tier; what he pinned he leaves alone."""
        space, path = self._paths()[pick % len(self._paths())]
        pins = node.disk.pins if node.disk is not None else {}
        kept = {one.record.key for key in pins for one in _prefix_of(key)}
        keys = [one.record.key for one in prefix(space, path) if one.record.key not in kept]
        node.acknowledged.difference_update(keys)  # unpinned a moment ago
        tiers = [HOST] if node.disk is None else [HOST, 1]  # never a shared one
        _remove(node, tiers[pick // 64 % len(tiers)], space, keys, leaves_holes=bool(pick & 1))

    def _clear_host(self, node: Node, pick: int) -> None:
        """Everything that may leave host memory leaves it."""
        del pick
        for space in sorted({client.space for client in self._clients}):
            _remove(node, HOST, space, None, leaves_holes=True)


def _remove(node: Node, tier: int, space: str, keys: list[bytes] | None, *, leaves_holes: bool) -> None:
    for _ in node.engine.tiering.removing(tier, chunk(space, (0,)).record.namespace, keys, leaves_holes=leaves_holes):
        pass
    node.wake()


def _prefix_of(key: bytes) -> tuple[Chunk, ...]:
    made = CHUNKS[key]
    return prefix(made.space, made.path)


def _raw(medium: Disk | Bucket, name: BlobName) -> bytes:
    return medium.blobs[name] if isinstance(medium, Disk) else medium.objects[object_path(name)][0]


def _set_raw(medium: Disk | Bucket, name: BlobName, data: bytes | None) -> None:
    if isinstance(medium, Disk):
        if data is None:
            del medium.blobs[name]
        else:
            medium.blobs[name] = data
        return
    path = object_path(name)
    old, when_s = medium.objects.pop(path)
    medium.blob_bytes += len(data or b"") - len(old)
    if data is not None:
        medium.objects[path] = (data, when_s)
