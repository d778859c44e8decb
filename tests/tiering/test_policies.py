"""The seams for other policies: a third one of each kind is registered under a name and runs a whole cache."""

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

import pytest

from tests.kit.tiering.world import SMALL, Story
from tiered_kv.config import _admission, _eviction
from tiered_kv.tiering.admission import ADMISSION_POLICIES
from tiered_kv.tiering.eviction import EVICTION_POLICIES
from tiered_kv.tiering.eviction_policy import UseClock
from tiered_kv.tiering.index import Entry

SIZE = SMALL.slot_bytes


class Fifo:
    """First in, first out, but for chunks behind others: they go first. Uses do not count."""

    needs_uses: ClassVar[bool] = False

    def __init__(self, uses: Callable[[bytes], int], clock: UseClock) -> None:
        del uses
        self._clock = clock
        self._keys: dict[bytes, tuple[int, int]] = {}  # time and depth of the prefix that came at that time

    def add(self, key: bytes, parent: bytes | None) -> None:
        time, depth = self._keys.get(parent or b"", (self._clock.tick(), 0))
        self._keys[key] = (time, depth + 1)

    def remove(self, key: bytes) -> None:
        del self._keys[key]

    def record_use(self, prefix: Iterable[bytes]) -> None:
        """A queue does not look at uses."""

    def move(self, to: "Fifo", is_moved: Callable[[bytes], bool]) -> None:
        for key in list(filter(is_moved, self._keys)):
            to._keys[key] = self._keys.pop(key)

    def candidates(self) -> Iterator[tuple[int, bytes]]:
        first = sorted(self._keys.items(), key=lambda item: (item[1][0], -item[1][1]))
        return ((self._clock.now - time, key) for key, (time, _) in first)

    def __iter__(self) -> Iterator[bytes]:
        return (key for _, key in self.candidates())

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)


class ShortPrefixes:
    """Only the first chunks of a prompt are worth a write."""

    needs_uses: ClassVar[bool] = False

    def admits(self, entry: Entry) -> bool:
        return entry.record.chunk_index < 2


@pytest.fixture
def third_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EVICTION_POLICIES, "fifo", Fifo)
    monkeypatch.setitem(ADMISSION_POLICIES, "short-prefixes", ShortPrefixes)


@pytest.mark.usefixtures("third_policies")
def test_a_third_eviction_policy_orders_what_goes() -> None:
    class FifoStory(Story):
        eviction = "fifo"

    class LruStory(Story):
        eviction = "lru"

    kept = {}
    for kind in (FifoStory, LruStory):
        story = kind(host_bytes=20 * SIZE, capacities=(3 * SIZE,))
        for path in ((1,), (2,), (3,)):
            story.store(path)
        story.release(story.ask((1,)))
        story.store((4,))
        kept[kind] = [path for path in ((1,), (2,), (3,), (4,)) if story.is_below(path)]
        story.tiering.check_integrity()
    assert kept[FifoStory] == [(2,), (3,), (4,)], "the first in is the first out, used or not"
    assert kept[LruStory] == [(1,), (3,), (4,)]


@pytest.mark.usefixtures("third_policies")
def test_a_third_eviction_policy_runs_under_pressure_in_every_tier() -> None:
    class FifoStory(Story):
        eviction = "fifo"

    story = FifoStory(host_bytes=8 * SIZE, capacities=(6 * SIZE, None))
    for number in range(30):
        story.store((number % 7, number, 1))
        lookup = story.ask((number % 7, number, 1))
        story.finish_all()
        story.release(lookup)
        story.tiering.check_integrity()
    assert story.counted("lower_evicted") > 10 and story.counted("host_evicted") > 10


@pytest.mark.usefixtures("third_policies")
def test_a_third_admission_policy_says_what_is_written() -> None:
    class ShortStory(Story):
        admissions = ("short-prefixes",)

    story = ShortStory()
    story.store((1, 2, 3, 4))
    assert story.is_below((1,)) and story.is_below((1, 2))
    assert not story.is_below((1, 2, 3)) and not story.is_below((1, 2, 3, 4))
    usage = story.tiering.tier_usage(1)
    assert (usage.admitted_chunks, usage.declined_chunks) == (2, 2)


def test_the_settings_name_the_policies_that_are_registered() -> None:
    assert [_eviction(name) for name in EVICTION_POLICIES] == list(EVICTION_POLICIES)
    assert [_admission(name) for name in ADMISSION_POLICIES] == list(ADMISSION_POLICIES)
