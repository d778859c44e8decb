"""What a tier and its Mooncake client process say to each other.

The process gets ``Settings`` as a line of JSON on its standard input, answers with one line, ``ready`` or ``error`` and
why, and ends when its input does. After that each lane, a pair of connected sockets, carries one request at a time as
msgpack. A request may bring a file descriptor: the lane's memory from now on.
"""

from typing import Final

import msgspec

MESSAGE_BYTES_MAX: Final = 160 << 10
"""Below what a socket takes as one message by Linux's default (``net.core.wmem_default``, 208 KiB)."""


class Settings(msgspec.Struct, frozen=True):
    """How to reach the pool.

    Attributes:
        master: ``HOST:PORT``.
        local_hostname: Where other clients reach this process.
        metadata_server: ``P2PHANDSHAKE``, or the address of one.
        protocol: ``tcp`` or ``rdma``.
        rdma_devices: Names, with commas; empty: all.
        segment_bytes: Memory that this process gives to the pool.
        tenant_id: Whose objects they are, where the master keeps tenants apart.
        lanes: File descriptors of the process's ends of the lanes.
    """

    master: str
    local_hostname: str
    metadata_server: str
    protocol: str
    rdma_devices: str
    segment_bytes: int
    tenant_id: str
    lanes: list[int]


class Request(msgspec.Struct, frozen=True):
    """One call.

    Attributes:
        operation: ``put`` and ``get``: an object from and into the lane's memory, from its start. ``exist``: which of
            these are there. ``delete``.
        keys: One, except for ``exist``.
        size_bytes: Of the object that is put, or expected.
        memory_bytes: Size of the memory that comes with this request; 0: the lane keeps what it has.
    """

    operation: str
    keys: list[str]
    size_bytes: int = 0
    memory_bytes: int = 0


class PoolAnswer(msgspec.Struct, frozen=True):
    """What Mooncake said.

    Attributes:
        codes: One for each key: negative is one of Mooncake's error codes; of ``get`` the object's size, of ``exist``
            1 or 0.
        size_bytes: Size of an object that does not fit; negative: not known.
    """

    codes: list[int]
    size_bytes: int = -1
