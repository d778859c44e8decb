"""A process of clients that break the protocol: its arguments are ``DIRECTORY SEED CLIENTS``.

A process of its own, because a server holds what a worker joined with until the worker's process is gone. Each client
says hello properly, most join properly, and then they send whatever ``hostile_messages.py`` draws, in any order.
"""

import contextlib
import random
import socket
import sys
from pathlib import Path

from tests.kit.faults.hostile_messages import INTEGERS, damaged, hostile_frame, types_of
from tests.kit.server.clients import worker_part
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.namespace import Namespace
from tiered_kv.server import protocol as m
from tiered_kv.server.connect import connect
from tiered_kv.server.directory import read_info

KINDS = types_of(m.FromClient)
MESSAGES_MAX = 12
PATIENCE_S = 0.2
"""How long an answer is waited for: not all messages have one."""


def run(root: Path, seed: int, clients: int) -> int:
    """Returns how many messages were sent."""
    source = random.Random(seed)
    sent = 0
    for number in range(clients):
        info = read_info(root)
        assert info is not None, "the server is gone"
        sock = connect(info.socket)
        assert sock is not None, "the server does not answer"
        with sock, contextlib.suppress(OSError):  # refused, or hung up on: the server's right
            sock.settimeout(PATIENCE_S)
            sent += _client(source, sock, f"fuzz-{seed}-{number}")
    return sent


def _client(source: random.Random, sock: socket.socket, name: str) -> int:
    role = source.choice(("scheduler", "worker", "cache", "cache", "cache", "admin", "door"))
    good = [m.frame(m.Hello(m.PROTOCOL, "v", role, 1, name, source.randrange(3)))]
    if role in ("worker", "cache"):
        good.append(m.frame(worker_part()))
    if role == "door":
        good.append(m.frame(m.JoinDoor()))
    if role in ("scheduler", "cache"):
        good.append(m.frame(m.JoinScheduler(1, is_watching=source.random() < 0.5)))
    if source.random() < 0.2:
        source.shuffle(good)
    if source.random() < 0.2:
        good = [damaged(source, source.choice(good)[m.LENGTH.size :])]
    sock.sendall(b"".join(good))
    namespace = _wait_for_slots(sock) if role == "cache" else bytes(16)
    sent = 0
    with contextlib.suppress(OSError):  # refused, and hung up on
        while sent < MESSAGES_MAX:
            sock.sendall(_senseless(source, namespace) if source.random() < 0.3 else hostile_frame(source, KINDS))
            if source.random() < 0.1:
                with contextlib.suppress(TimeoutError):
                    sock.recv(1 << 16)
            sent += 1
    return sent


def _wait_for_slots(sock: socket.socket) -> bytes:
    """Until the session is open and has slots, or nothing more comes; returns the digest of its namespace."""
    namespace, reader = bytes(16), m.FrameReader(m.FromServer)
    with contextlib.suppress(TimeoutError):
        while data := sock.recv(1 << 16):
            for message in reader.feed(data):
                if isinstance(message, m.Ready):
                    namespace = Namespace.from_record(message.record).digest
                    sock.sendall(m.frame(m.Wake()))
                if isinstance(message, m.Credits):
                    return namespace
    return namespace


def _senseless(source: random.Random, namespace: bytes) -> bytes:
    """Well-formed orders that mean nothing, about slots and lookups that may be somebody's."""
    number = source.choice(INTEGERS[:8])
    keys = source.randrange(4)
    tag = bytes([source.randrange(3)]) * source.choice((0, 15, 16, 16))
    place = bytes(16), source.randbytes(16), source.choice((0, 1, 1 << 20))
    chunk = source.randrange(64), ChunkRecord(source.choice((namespace, bytes(16))), *place, bytes(32), tag)
    messages = (
        m.Lookup(number, source.randrange(5), source.randbytes(16 * keys), source.randbytes(32 * keys)),
        m.Lookup(number, source.randrange(3), b"", b"", leases=False, names=[source.randbytes(36)] * keys),
        m.Release(number),
        m.GiveBack([source.randrange(64), number]),
        m.Rest(),
        m.Wake(),
        m.Commit([chunk] * source.choice((1, 2, 500)), frozenset({chunk[0], number})),
        m.Pin(bytes(16), source.choice((1.0, 1e9))),
        m.SessionState(bytes(16), bytes(16), place[1]),
        m.Hint(source.choice(("release", "prefetch", "demote", "pin")), bytes(source.choice((0, 16)))),
        m.Reset(),
        m.Unmapped(),
        m.Evict(source.choice(("host", "disk", "moon")), bytes(source.choice((0, 16))), bytes(16 * keys), True),
        m.Evict(source.choice(("host", "disk")), b"", bytes(16 * (keys // 3)), False, tag),
        m.StatRequest(),
        m.Decline("no\n" * 100),
        m.JoinDoor(),
        m.HeldRequest(number, namespace, source.randbytes(16 * keys)),
        m.Borrow(number, namespace, place[1]),
        m.Repay(number),
    )
    return m.frame(source.choice(messages))


if __name__ == "__main__":
    print(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])), flush=True)
