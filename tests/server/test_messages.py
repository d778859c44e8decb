"""Frames and messages: whatever arrives, in whatever pieces, is a message or a ProtocolError."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.counts import count
from tiered_kv.errors import ProtocolError
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.server import protocol as m

MESSAGES = [
    m.Hello(1, "v", "worker", 7, "engine", 3, 1, None, 5),
    m.JoinWorker(0, 1, 16, 256, b"{}", [m.Page("l", "BF16", (1, 2), "HN")]),
    m.JoinScheduler(2),
    m.Decline("no"),
    m.Lookup(1, 0, bytes(32), bytes(64)),
    m.Lookup(2, 1, b"", b"", leases=False, names=[bytes(36), bytes(20)]),
    m.Follow(1),
    m.Release(1),
    m.Commit(
        [
            (1, ChunkRecord(bytes(16), bytes(16), bytes(16), 0, bytes(32))),
            (2, ChunkRecord(bytes(16), bytes(16), bytes(16), 1, bytes(32), b"t" * 16)),
        ]
    ),
    m.CommitTail(3, ChunkRecord(bytes(16), bytes(16), bytes(16), 2, bytes(32))),
    m.DropTails([bytes(16), b"k" * 16]),
    m.GiveBack([1, 2]),
    m.Rest(),
    m.Wake(),
    m.Reset(),
    m.Pin(bytes(16), 60.0),
    m.SessionState(bytes(16), bytes(16), bytes(16)),
    m.Hint("prefetch", namespace=bytes(16), keys=bytes(32), digests=bytes(64)),
    m.NamespaceRequest("2c26"),
    m.LendRows(3, 4096),
    m.StoreRows([(1, 2, ChunkRecord(bytes(16), bytes(16), bytes(16), 0, bytes(32)))]),
    m.LoadRows([(3, 0, bytes(36)), (4, 1, bytes(20))], bytes(16), 7),
    m.LoadEnded(7),
    m.TakeRowsBack([3, 4]),
    m.Unmapped(),
    m.StatRequest(),
    m.Evict("disk", bytes(16), bytes(32), True),
    m.Evict("host", b"", b"", False, b"t" * 16),
    m.JoinDoor(),
    m.HeldRequest(1, bytes(16), bytes(32)),
    m.Borrow(2, bytes(16), bytes(16)),
    m.Repay(2),
]


@given(st.lists(st.sampled_from(MESSAGES), max_size=20), st.lists(st.integers(1, 200)))
def test_messages_arrive_whole_whatever_the_pieces(sent: list[m.Message], sizes: list[int]) -> None:
    data = b"".join(map(m.frame, sent))
    reader = m.FrameReader(m.FromClient)
    received: list[m.Message] = []
    for size in [*sizes, len(data)]:
        received.extend(reader.feed(data[:size]))
        data = data[size:]
    assert received == sent


@settings(max_examples=count("MESSAGE_FUZZ", 300))
@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_a_protocol_error(body: bytes) -> None:
    reader = m.FrameReader(m.FromClient)
    try:
        list(reader.feed(m.LENGTH.pack(len(body)) + body))
    except ProtocolError as exc:
        assert len(str(exc)) < 1000


@settings(max_examples=count("MESSAGE_FUZZ", 300))
@given(st.sampled_from(MESSAGES), st.integers(0), st.integers(1, 255))
def test_a_flipped_message_is_a_message_or_a_protocol_error(message: m.Message, position: int, flip: int) -> None:
    data = bytearray(m.frame(message))
    data[4 + position % (len(data) - 4)] ^= flip
    reader = m.FrameReader(m.FromClient)
    try:
        list(reader.feed(bytes(data)))
    except ProtocolError as exc:
        assert len(str(exc)) < 1000


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 100_000,  # arrays in arrays
        b"\x81\xa4type" * 10_000,  # maps in maps
        b"\x82\xa4type\xa6Commit\xa6chunks\xdd\xff\xff\xff\xff",  # four thousand million chunks
        b"\x82\xa4type\xa7Decline\xa6reason\xdb\xff\xff\xff\xff",  # a string of 4 GiB
        b"\x82\xa4type\xa7Decline\xa6reason\xa2\xff\xfe",  # not UTF-8
        b"\x82\xa4type\xa7Release\xa6lookup\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00",  # infinity
        b"\xc1",
        b"",
        msgspec.msgpack.encode({"type": "Release", "lookup": "one"}),
        msgspec.msgpack.encode({"type": "Release", "lookup": 1, "more" * 100_000: 2}),
        msgspec.msgpack.encode({"type": "Nothing"}),
        msgspec.msgpack.encode([1, 2, 3]),
    ],
)
def test_bodies_that_are_no_messages_are_refused_in_few_words(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a message of protocol") as caught:
        list(m.FrameReader(m.FromClient).feed(m.LENGTH.pack(len(body)) + body))
    assert len(str(caught.value)) < 1000


def test_a_frame_is_bounded_before_it_is_read() -> None:
    for length in (m.FRAME_BYTES_MAX + 1, 0xFFFFFFFF):
        with pytest.raises(ProtocolError, match=f"frame too long. bytes={length}"):
            list(m.FrameReader(m.FromClient).feed(m.LENGTH.pack(length)))
    small = m.FrameReader(m.FromClient, m.HELLO_BYTES_MAX)
    with pytest.raises(ProtocolError, match="frame too long"):
        list(small.feed(m.LENGTH.pack(m.HELLO_BYTES_MAX + 1)))


def test_a_message_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="message too large. type=Lookup"):
        m.frame(m.Lookup(1, 0, bytes(m.FRAME_BYTES_MAX), b""))
