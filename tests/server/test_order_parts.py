"""Orders that answer before they are through, without a server around them: who goes on where, and with what."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tiered_kv.errors import ProtocolError
from tiered_kv.server import protocol as m
from tiered_kv.server.orders import Orders
from tiered_kv.tiering.types import RemovalCount

ORDER = m.Evict("host", b"", b"", holes=False, tag=b"t" * 16)
OTHER = m.Evict("host", b"", b"", holes=False, tag=b"u" * 16)


class Operator:
    """A connection that keeps what it is sent."""

    pid, role, is_closing = 1, "admin", False

    def __init__(self) -> None:
        self.told: list[m.Evicted] = []

    def send(self, answer: m.Evicted) -> None:
        self.told.append(answer)


@pytest.fixture
def begun() -> list[bytes]:
    """Tags of the erasures that were begun."""
    return []


@pytest.fixture
def orders(begun: list[bytes]) -> Orders:
    """Erasures of two parts."""

    def erasing(_tier: int, _namespace: bytes, tag: bytes):
        begun.append(tag)
        return iter([None, RemovalCount(3, 0, 2), None, RemovalCount(2, 1, 0)])

    engine = SimpleNamespace(tiers={}, clock=SimpleNamespace(monotonic=lambda: 0.0), erasing=erasing)
    return Orders(engine)


def test_the_same_order_again_goes_on_where_it_was(orders: Orders, begun: list[bytes]) -> None:
    one = Operator()
    for expected in ([m.Evicted(3, 0, 0, 2)], [m.Evicted(3, 0, 0, 2), m.Evicted(2, 1, 0)]):
        orders.take(one, ORDER)
        orders.go_on()
        assert one.told == expected and not orders
    assert begun == [ORDER.tag]
    orders.take(one, ORDER)
    assert begun == [ORDER.tag] * 2, "one that is through begins anew"


def test_another_order_or_another_operator_begins_anew(orders: Orders, begun: list[bytes]) -> None:
    one, two = Operator(), Operator()
    for operator, order in ((one, ORDER), (two, ORDER), (one, OTHER), (one, ORDER)):
        orders.take(operator, order)
        orders.go_on()
    assert begun == [ORDER.tag, ORDER.tag, OTHER.tag, ORDER.tag]


def test_an_operator_who_is_gone_leaves_nothing_behind(orders: Orders, begun: list[bytes]) -> None:
    one = Operator()
    orders.take(one, ORDER)
    orders.go_on()
    orders.left(one)
    orders.take(one, ORDER)
    assert len(begun) == 2
    one.is_closing = True
    orders.go_on()
    orders.left(one)
    assert not orders and not orders._answered and len(one.told) == 1


def test_an_operator_gives_one_order_at_a_time(orders: Orders) -> None:
    one = Operator()
    orders.take(one, ORDER)
    with pytest.raises(ProtocolError, match="an order is under way"):
        orders.take(one, OTHER)
