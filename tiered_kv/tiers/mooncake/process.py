"""The process that holds Mooncake's client, and the only module that imports it.

A process of its own, because the client's start and end stop every thread of the one they run in (90 s, measured, where
no master answers), because calls to a frozen master take no deadline, and because it takes its options from the
environment. Whoever kills it knows that nothing of it writes any more. It sees its lanes' memory and never a slot.
Started by ``client.py``.
"""

import ctypes
import mmap
import os
import signal
import socket
import sys
import threading
import traceback
from typing import Any, Final

import msgspec

from tiered_kv.tiers.mooncake.messages import MESSAGE_BYTES_MAX, PoolAnswer, Request, Settings

INVALID_PARAMS: Final = -600


class _Served:
    """A lane: one socket, its memory, and the thread that serves it."""

    def __init__(self, store: Any, socket_: socket.socket) -> None:
        self._store = store
        self._socket = socket_
        self._decoder = msgspec.msgpack.Decoder(Request)
        self._memory: mmap.mmap | None = None
        self._address = 0

    def serve(self) -> None:
        """Answer requests until the other end is closed. What fails otherwise ends the process: a call would hang."""
        try:
            self._serve()
        except Exception:  # noqa: BLE001 - in the log, and the other side starts a process anew
            traceback.print_exc()
            os._exit(1)

    def _serve(self) -> None:
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES_MAX, 1)
            if not data:
                return
            request = self._decoder.decode(data)
            if descriptors:
                self._take_memory(descriptors[0], request.memory_bytes)
            self._socket.send(msgspec.msgpack.encode(self._perform(request)))

    def _take_memory(self, descriptor: int, size_bytes: int) -> None:
        before, address = self._memory, self._address
        self._memory = mmap.mmap(descriptor, size_bytes)
        os.close(descriptor)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._store.register_buffer(self._address, size_bytes)  # refused: each transfer says so
        if before is not None:
            self._store.unregister_buffer(address)

    def _perform(self, request: Request) -> PoolAnswer:
        key, size = request.keys[0], request.size_bytes
        match request.operation:
            case "put":
                return PoolAnswer([self._store.put_from(key, self._address, size)])
            case "get":
                code = self._store.get_into(key, self._address, size)
                return PoolAnswer([code], self._store.get_size(key) if code == INVALID_PARAMS else -1)
            case "exist":
                return PoolAnswer(self._store.batch_is_exist(request.keys))
            case _:
                return PoolAnswer([self._store.remove(key, True)])  # else one that was asked for lately is kept


def _say(text: str) -> None:
    sys.stdout.write(" ".join(text.split()) + "\n")
    sys.stdout.flush()


def _open(settings: Settings) -> Any:
    """The connected client.

    Raises:
        OSError: There is no way to the pool.
        ImportError: The package is not there, or a library that it needs.
    """
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - for the line that says what is missing

    store = MooncakeDistributedStore()
    code = store.setup(
        settings.local_hostname,
        settings.metadata_server,
        settings.segment_bytes,
        0,  # local buffers: the lanes are
        settings.protocol,
        settings.rdma_devices,
        settings.master,
        tenant_id=settings.tenant_id,
    )
    if code != 0:
        raise OSError(f"Mooncake's client cannot be set up (code {code}): is its master's RPC port there")
    return store


def _main() -> int:
    for number in (signal.SIGINT, signal.SIGHUP):  # from a terminal they are for the server, which ends this
        signal.signal(number, signal.SIG_IGN)
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    try:
        store = _open(settings)
    except (ImportError, OSError) as exc:
        _say(f"error {exc}")
        return 1
    for descriptor in settings.lanes:
        lane = _Served(store, socket.socket(fileno=descriptor))
        threading.Thread(target=lane.serve, name="mooncake-lane", daemon=True).start()
    _say("ready")
    sys.stdin.buffer.read()
    if settings.segment_bytes:
        store.close()  # what it gave to the pool is taken back in good order
    return 0


if __name__ == "__main__":
    os._exit(_main())  # threads may be inside of Mooncake, which its end must not wait for
