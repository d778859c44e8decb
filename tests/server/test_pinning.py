"""Pins that requests ask for: keep a prefix on a real server's disk and in a bucket, within a share of the limits."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.kit.counts import count, seed
from tests.kit.engine_world import BLOB_BYTES, EngineWorld
from tests.kit.fake_clock import FakeClock
from tests.kit.server.clients import SmallEngine, hello, poll_until, refusal, settings, tell
from tests.kit.server.probe import figures, wait_for, wait_written
from tests.kit.server.processes import end_server
from tests.kit.storage.disk_probe import open_disk
from tiered_kv.fleet.layout import PINS, parse_pin_path, pin_path
from tiered_kv.keys.naming import BlobName
from tiered_kv.keys.tags import NO_TAG, tag_digest
from tiered_kv.location import parse_location
from tiered_kv.server import protocol as m
from tiered_kv.server.pins import _ALL, LOOK_IN_BUCKET_EVERY_S, RECOUNT_S, Pinning, _Kept, _KeptChunks
from tiered_kv.tiers.disk.pins import changing_pins, read_pins
from tiered_kv.tiers.object.store import ObjectStore

EngineStarter = Callable[..., SmallEngine]

REFUSED = "request_pins_refused"

HOST = {"host_bytes": "2MiB"}
SMALL = HOST | {"disk_bytes": "67MiB"}
"""After the reserve for metadata about 80 blobs of 36 KiB fit."""


def name_of(engine: SmallEngine, chunks: int, first_token: int = 0) -> BlobName:
    assert engine.client.namespace is not None
    return BlobName(engine.client.namespace.digest, engine.keys(chunks, first_token=first_token).keys[-1])


def wait_counted(root: Path, counter: str, value: int) -> None:
    wait_for(lambda: figures(root)["counters"].get(counter, 0) == value, f"{counter}={value}")


def store_in_parts(engine: SmallEngine, root: Path, chunks: int, first_token: int) -> None:
    engine.store(chunks, first_token=first_token)
    wait_written(root)


def test_a_pin_keeps_a_prefix_that_would_be_evicted(engine: EngineStarter, root: Path) -> None:
    one = engine(**SMALL)
    store_in_parts(one, root, 5, 0)
    before_s = time.time()
    assert one.client.pin(name_of(one, 5).key, 600)
    wait_counted(root, "request_pins", 1)
    wait_for(lambda: bool(read_pins(root)), "pins.json")
    (until_s,) = read_pins(root).values()
    assert before_s + 600 <= until_s <= time.time() + 1.1 * 600
    store_in_parts(one, root, 5, 1_000_000)
    one.close()
    end_server(root)  # a server reads pins when it starts; one that runs reads them every 5 s
    one = engine(**SMALL)
    for prompt in range(2, 13):
        store_in_parts(one, root, 8, prompt * 1_000_000)
    state = figures(root)
    assert state["counters"]["lower_evicted"] > 5, "nothing was evicted, so nothing was kept from it"
    assert state["tiers"][0]["used_bytes"] <= state["tiers"][0]["capacity_bytes"]
    assert one.hits(5) == 5, "pinned"
    assert one.hits(5, first_token=1_000_000) < 5, "as old, and not pinned"


def test_requests_cannot_pin_more_than_their_share(engine: EngineStarter, root: Path) -> None:
    one = engine(**SMALL, request_pin_share=0.1)
    capacity = figures(root)["tiers"][0]["capacity_bytes"]
    fits = int(0.1 * capacity) // one.client.info.slot_bytes
    one.store(fits + 1)
    one.store(2, first_token=1_000_000)
    assert one.client.pin(name_of(one, fits + 1).key, 600)
    wait_counted(root, "request_pins_refused", 1)
    assert one.client.pin(name_of(one, fits).key, 600) and one.client.pin(name_of(one, fits - 1).key, 60)
    wait_counted(root, "request_pins", 2)  # the second keeps nothing that the first does not
    assert one.client.pin(name_of(one, 2, 1_000_000).key, 600)
    wait_counted(root, "request_pins_refused", 2)
    wait_for(lambda: len(read_pins(root)) == 2, "pins.json")

    wait_written(root)
    one.close()
    end_server(root)
    again = engine(**SMALL, request_pin_share=0.1)
    again.store(2, first_token=1_000_000)
    assert again.client.pin(name_of(again, 2, 1_000_000).key, 600)
    wait_counted(root, "request_pins_refused", 1)  # what requests pinned before the restart still counts


def test_one_tenant_cannot_pin_all_that_requests_may(engine: EngineStarter, root: Path) -> None:
    share = {"request_pin_share": 0.1, "tag_pin_share": 0.5}
    one = engine(**SMALL, **share)
    capacity = figures(root)["tiers"][0]["capacity_bytes"]
    half = int(0.05 * capacity) // one.client.info.slot_bytes
    mine, theirs = tag_digest("mine"), tag_digest("theirs")
    for prompt in range(4):
        one.store(half + 1, first_token=1_000_000 * prompt)

    def pin(prompt: int, chunks: int, tag: bytes, ttl_s: float = 600) -> None:
        assert one.client.pin(name_of(one, chunks, 1_000_000 * prompt).key, ttl_s, tag)

    def counted() -> tuple[int, int, int]:
        counters = figures(root)["counters"]
        return tuple(counters.get(name, 0) for name in ("request_pins", f"{REFUSED}_of_tag", REFUSED))  # type: ignore[return-value]

    pin(0, half + 1, mine)
    wait_for(lambda: counted() == (0, 1, 0), "a refusal: more than one tag may have")
    pin(0, half, mine)
    pin(1, 1, mine)
    wait_for(lambda: counted() == (1, 2, 0), "a refusal: the tag has its part")
    pin(0, 1, theirs, 60)  # shared: it is mine for longer
    pin(1, half, theirs)
    wait_for(lambda: counted() == (3, 2, 0), "another tag's part")
    pin(0, 1, theirs, 3600)  # this would count for them
    wait_for(lambda: counted() == (3, 3, 0), "a refusal: it would be theirs, and they have their part")
    pin(2, 2, NO_TAG)
    wait_for(lambda: counted() == (3, 3, 1), "a refusal: there is no room at all")


def test_after_a_restart_pins_count_for_who_stored_their_chunks(engine: EngineStarter, root: Path) -> None:
    share = {"request_pin_share": 0.1, "tag_pin_share": 0.5}
    one = engine(**SMALL, **share)
    half = int(0.05 * figures(root)["tiers"][0]["capacity_bytes"]) // one.client.info.slot_bytes
    mine, theirs = tag_digest("mine"), tag_digest("theirs")
    one.store(half, tag="mine")
    assert one.client.pin(name_of(one, half).key, 600, mine)
    wait_for(lambda: len(read_pins(root)) == 1, "pins.json")
    wait_written(root)
    one.close()
    end_server(root)
    one = engine(**SMALL, **share)
    one.store(1, first_token=1_000_000)
    assert one.client.pin(name_of(one, 1, 1_000_000).key, 600, mine)
    wait_counted(root, f"{REFUSED}_of_tag", 1)
    assert one.client.pin(name_of(one, 1, 1_000_000).key, 600, theirs)
    wait_counted(root, "request_pins", 1)


def test_the_states_of_a_prefix_count_against_the_share(root: Path) -> None:
    with closing(SmallEngine.start(settings(root, **SMALL, request_pin_share=0.1), state_parts=2)) as one:
        fits = int(0.1 * figures(root)["tiers"][0]["capacity_bytes"]) // one.client.info.slot_bytes
        one.store(fits)
        one.store_state(fits)
        wait_for(lambda: one.state_hit(fits) == fits, "the state")
        assert one.client.pin(name_of(one, fits).key, 600)
        wait_counted(root, "request_pins_refused", 1)
        assert one.client.pin(name_of(one, fits - 1).key, 600)
        wait_counted(root, "request_pins", 1)


def test_no_share_means_no_pins(engine: EngineStarter, root: Path) -> None:
    one = engine(request_pin_share=0)
    one.store(1)
    assert one.client.pin(name_of(one, 1).key, 60)
    wait_counted(root, "request_pins_refused", 1)


def test_a_server_whose_only_tier_is_a_pool_says_that_it_keeps_no_pins(tmp_path: Path) -> None:
    with closing(EngineWorld(open_disk(tmp_path))) as world:  # no tier counts: there is no place for pins
        session = world.open()
        world.store(session, (1,))
        space = world.clients[session].space
        pinning = Pinning(world.engine, lambda task: task(), 0.5, disk_root=None, store=None)
        outcomes = [pinning.pin(space.namespace, m.Pin(space.key((1,)), ttl_s)) for ttl_s in (60, 0)]
        assert outcomes == ["nowhere", "done"], "for no time means: written at once"
        assert world.tiering.counters["request_pins_nowhere"] == 1


def test_pins_are_renewed_now_and_then_and_never_shortened(engine: EngineStarter, root: Path) -> None:
    one = engine()
    one.store(3)
    kept, asked = name_of(one, 2), name_of(one, 3)
    with changing_pins(root) as pins:
        pins[kept] = 0.0
    for ttl_s in (100, 100, 50, 1000):
        assert one.client.pin(asked.key, ttl_s)
    assert one.client.pin(kept.key, 100) and one.client.pin(bytes(16), 100)
    wait_counted(root, "request_pins_of_nothing", 1)
    counters = figures(root)["counters"]
    assert (counters["request_pins"], counters["request_pins_in_force"]) == (3, 2)
    wait_for(lambda: read_pins(root).get(asked, 0) > time.time() + 900, "pins.json")
    assert read_pins(root)[kept] == 0.0, "an operator wants it kept for good"


def test_a_pin_that_an_operator_ended_is_written_again_when_a_request_asks_for_it(
    engine: EngineStarter, root: Path
) -> None:
    one = engine()
    one.store(3)
    asked = name_of(one, 3)
    assert one.client.pin(asked.key, 600)
    wait_for(lambda: asked in read_pins(root), "pins.json")
    with changing_pins(root) as pins:
        pins.clear()
    assert one.client.pin(asked.key, 600)
    wait_for(lambda: asked in read_pins(root), "pins.json again")


def test_pins_that_an_operator_ended_give_their_room_back(engine: EngineStarter, root: Path) -> None:
    one = engine(**SMALL, request_pin_share=0.1)
    fits = int(0.1 * figures(root)["tiers"][0]["capacity_bytes"]) // one.client.info.slot_bytes
    one.store(fits)
    one.store(2, first_token=1_000_000)
    kept, ended, other = name_of(one, 2), name_of(one, fits), name_of(one, 2, 1_000_000)
    assert one.client.pin(kept.key, 600) and one.client.pin(ended.key, 600)
    wait_for(lambda: read_pins(root).keys() == {kept, ended}, "pins.json")
    with changing_pins(root) as pins:
        del pins[ended]
    assert one.client.pin(other.key, 600)
    wait_counted(root, REFUSED, 1)

    def is_granted() -> bool:
        assert one.client.pin(other.key, 600)
        return figures(root)["counters"]["request_pins"] == 3

    wait_for(is_granted, "the room of the pin that was ended")
    assert one.client.pin(ended.key, 600)
    wait_for(lambda: figures(root)["counters"]["request_pins_refused"] > 1, "a refusal: what is left is counted")
    wait_for(lambda: read_pins(root).keys() == {kept, other}, "pins.json")


def test_pins_that_cannot_be_written_cost_a_warning(engine: EngineStarter, root: Path) -> None:
    one = engine()
    one.store(1)
    (root / "pins.json").write_text("nobody's")
    assert one.client.pin(name_of(one, 1).key, 60)
    wait_counted(root, "request_pins", 1)
    wait_for(lambda: "pins of requests were not written" in (root / "server.log").read_text(), "the warning")
    (root / "pins.json").unlink()
    assert one.client.pin(name_of(one, 1).key, 60)
    wait_for(lambda: bool(read_pins(root)), "pins.json")


def test_pins_that_were_not_written_give_their_room_back(engine: EngineStarter, root: Path) -> None:
    one = engine(**SMALL, request_pin_share=0.1)
    fits = int(0.1 * figures(root)["tiers"][0]["capacity_bytes"]) // one.client.info.slot_bytes
    for first_token in (0, 1_000_000):
        one.store(fits, first_token=first_token)
    unwritten, other = name_of(one, fits), name_of(one, fits, 1_000_000)
    (root / "pins.json").write_text("nobody's")
    assert one.client.pin(unwritten.key, 600)
    wait_for(lambda: "pins of requests were not written" in (root / "server.log").read_text(), "the warning")
    (root / "pins.json").unlink()

    def is_written() -> bool:
        assert one.client.pin(other.key, 600)
        return read_pins(root).keys() == {other}

    wait_for(is_written, "the pin that there is room for", deadline_s=30.0)


def test_pins_that_were_written_in_one_place_alone_take_their_room(tmp_path: Path, bucket: ObjectStore) -> None:
    root, mount = tmp_path / "cache", tmp_path / "bucket"
    uri = {"storage_uri": f"shared+file://{mount}", "disk_path": str(root), "storage_bytes": "100MiB"}
    with closing(SmallEngine.start(settings(root, **SMALL, **uri, request_pin_share=0.1))) as one:
        fits = int(0.1 * figures(root)["tiers"][0]["capacity_bytes"]) // one.client.info.slot_bytes
        for first_token in (0, 1_000_000):
            one.store(fits, first_token=first_token)
        pins = mount / PINS
        pins.parent.mkdir(parents=True, exist_ok=True)
        pins.write_text("no directory")
        asked = name_of(one, fits)
        assert one.client.pin(asked.key, 600)
        wait_for(lambda: "pins of requests were not written" in (root / "server.log").read_text(), "the warning")
        assert read_pins(root).keys() == {asked}
        assert one.client.pin(name_of(one, fits, 1_000_000).key, 600)
        wait_counted(root, REFUSED, 1)
    end_server(root)


def test_what_is_wanted_or_pinned_is_written_at_once_where_only_second_touches_are(
    engine: EngineStarter, root: Path
) -> None:
    one = engine(**HOST, disk_admission="second-touch")

    def tier() -> dict[str, int]:
        state: dict[str, int] = figures(root)["tiers"][0]
        return state

    one.store(4)
    wait_for(lambda: tier()["declined_chunks"] == 4, "4 chunks that came once")
    assert (tier()["blobs"], tier()["admitted_chunks"], figures(root)["pending_writes"]) == (0, 0, 0)
    assert one.client.pin(name_of(one, 2).key, 0)
    wait_for(lambda: tier()["blobs"] == 2, "what is handed over, on disk")
    assert one.client.pin(name_of(one, 3).key, 600)
    wait_for(lambda: tier()["blobs"] == 3, "what is pinned, on disk")
    wait_for(lambda: len(read_pins(root)) == 1, "the one pin that keeps anything")
    assert one.hits(4) == 4
    wait_for(lambda: tier()["blobs"] == 4, "what was asked for, on disk")
    assert tier()["admitted_chunks"] == 4


@pytest.mark.parametrize(
    "pin", [m.Pin(b"short", 60), m.Pin(bytes(16), 60, b"short"), m.Pin(bytes(16), -1), m.Pin(bytes(16), float("nan"))]
)
def test_a_bad_pin_ends_the_connection_with_the_reason(served: Path, pin: m.Pin) -> None:
    with hello(settings(served), "scheduler", "bad") as sock:
        tell(sock, m.JoinScheduler(1), pin)
        assert "no open session" in refusal(sock)
    one = SmallEngine.start(settings(served), "good")
    try:
        one.client._send(pin)
        poll_until(one.client, lambda: one.client.generation == 1, "the session's end")
    finally:
        one.close()


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[ObjectStore]:
    store = ObjectStore(parse_location(f"shared+file://{tmp_path}/bucket"))
    yield store
    store.close()


def test_pins_are_written_into_a_bucket_as_an_operator_would(tmp_path: Path, bucket: ObjectStore) -> None:
    root = tmp_path / "cache"
    uri = {"storage_uri": f"shared+file://{tmp_path}/bucket", "disk_path": str(root), "storage_bytes": "100MiB"}
    one = SmallEngine.start(settings(root, **uri))
    try:
        one.store(2)
        asked, other = name_of(one, 2), name_of(one, 1)
        bucket.put(pin_path(asked, int(time.time()) + 10), b"")
        bucket.put(pin_path(other, 0), b"")
        assert one.client.pin(asked.key, 600) and one.client.pin(other.key, 600)
        wait_for(lambda: len(read_pins(root)) == 2, "pins.json")

        def ends() -> dict[BlobName, int]:
            found = [parse_pin_path(info.path) for info in bucket.list(PINS)]
            assert len(found) == len({pin[0] for pin in found if pin}), "two pins of one chunk"
            return dict(pin for pin in found if pin)

        wait_for(lambda: len(list(bucket.list(PINS))) == 2 and max(ends().values()) > time.time() + 599, "the pins")
        assert ends().keys() == {BlobName(asked.namespace, asked.key), BlobName(other.namespace, other.key)}
        assert ends()[other] == 0
    finally:
        one.close()
        end_server(root)


def test_a_pin_that_an_operator_ended_in_a_bucket_is_put_there_again(tmp_path: Path, bucket: ObjectStore) -> None:
    root = tmp_path / "cache"
    uri = {"storage_uri": f"shared+file://{tmp_path}/bucket", "disk_path": str(root), "storage_bytes": "100MiB"}
    with closing(SmallEngine.start(settings(root, **uri))) as one:
        one.store(1)
        for _ in range(2):
            assert one.client.pin(name_of(one, 1).key, 600)
            wait_for(lambda: bool(list(bucket.list(PINS))), "a pin")
            bucket.delete([info.path for info in bucket.list(PINS)])
    end_server(root)


class TwoPlaces:
    """Requests' pins of a disk and a bucket, of which there is room for so many; in one thread."""

    def __init__(self, root: Path, store: ObjectStore, room: int = 1, clock: FakeClock | None = None) -> None:
        self.world = EngineWorld(open_disk(root), clock=clock)
        session = self.world.open()
        self.world.settle()  # slots are granted
        for number in range(3):
            self.world.store(session, (number,))
        self._space = self.world.clients[session].space
        self.first, self.other, self.third = (self._space.key((number,)) for number in range(3))
        self._tasks: list[Callable[[], None]] = []
        self.now_s, share = time.time(), (room + 0.5) * BLOB_BYTES / (16 << 20)
        self.pinning = Pinning(
            self.world.engine, self._tasks.append, share, disk_root=root, store=store, wall=lambda: self.now_s
        )

    def pin(self, key: bytes, ttl_s: float = 600) -> str:
        """What a request is told that asks for a pin."""
        return self.pinning.pin(self._space.namespace, m.Pin(key, ttl_s))

    def work(self) -> None:
        """A turn of the server's loop and what it has begun: pins are written and looked for."""
        self.pinning.step()
        while self._tasks:
            self._tasks.pop()()

    def ask(self, key: bytes) -> str:
        """A request asks for a pin; it is written, or looked at as a refused one has it."""
        self.world.clock.advance(LOOK_IN_BUCKET_EVERY_S)
        outcome = self.pin(key)
        self.work()
        self.pinning.step()
        return outcome


@pytest.fixture
def places(tmp_path: Path, bucket: ObjectStore) -> Iterator[TwoPlaces]:
    one = TwoPlaces(tmp_path / "disk", bucket)
    yield one
    one.world.close()


def test_a_pin_that_was_ended_in_one_place_gives_its_room_back(places: TwoPlaces, bucket: ObjectStore) -> None:
    """What a tier may evict again is kept by nobody, whatever stands in another one."""
    assert places.ask(places.first) == "done"
    assert places.ask(places.other) == "refused"
    assert places.ask(places.other) == "refused", "nobody has ended the first one"
    bucket.delete([info.path for info in bucket.list(PINS)])
    assert places.ask(places.other) == "refused", "the look is still to come"
    assert not places.pinning.keeps(places.first)
    assert places.ask(places.other) == "done"


def test_a_pin_that_one_place_lacks_takes_its_room_until_it_is_in_none_and_is_written_when_asked_for(
    places: TwoPlaces, bucket: ObjectStore, tmp_path: Path
) -> None:
    way = tmp_path / "bucket" / PINS
    way.parent.mkdir(parents=True, exist_ok=True)
    way.write_text("no directory")
    assert places.ask(places.first) == "done"
    way.unlink()
    for _ in range(2):
        assert places.ask(places.other) == "refused", "the disk keeps the first one"
    assert places.pinning.keeps(places.first)
    assert not list(bucket.list(PINS))
    assert places.ask(places.first) == "done"
    assert len(list(bucket.list(PINS))) == 1, "written where it was not"
    bucket.delete([info.path for info in bucket.list(PINS)])
    assert places.ask(places.other) == "refused"
    assert not places.pinning.keeps(places.first), "it counts as one that was written everywhere now"


def test_a_pin_that_is_renewed_when_a_look_has_not_found_it_stays(places: TwoPlaces, bucket: ObjectStore) -> None:
    assert places.ask(places.first) == "done"
    bucket.delete([info.path for info in bucket.list(PINS)])
    places.world.clock.advance(LOOK_IN_BUCKET_EVERY_S)
    assert places.pin(places.other) == "refused"
    places.work()
    assert places.pin(places.first, 6000) == "done"
    places.world.clock.advance(LOOK_IN_BUCKET_EVERY_S)
    places.work()
    assert places.pinning.keeps(places.first)
    assert len(list(bucket.list(PINS))) == 1


class TickingClock(FakeClock):
    """Each look at it takes a while, so that a turn of the loop has time for one step of what is done in parts."""

    def monotonic(self) -> float:
        self.advance(0.6 * RECOUNT_S)
        return super().monotonic()


def test_a_pin_that_is_renewed_while_what_pins_keep_is_counted_anew_counts_until_its_new_end(
    tmp_path: Path, bucket: ObjectStore
) -> None:
    places = TwoPlaces(tmp_path / "disk", bucket, room=2, clock=TickingClock())
    with closing(places.world):
        assert places.ask(places.first) == "done"
        (of_first,) = bucket.list(PINS)
        assert places.ask(places.other) == "done"
        bucket.delete([of_first.path])
        assert places.ask(places.third) == "refused"
        assert places.pinning.keeps(places.first), "the others are being counted"
        assert places.pin(places.other, 6000) == "done"
        for _ in range(3):
            places.pinning.step()
        assert not places.pinning.keeps(places.first)
        places.now_s += 1000
        assert places.pinning.keeps(places.other)


@pytest.mark.parametrize("most", ["WRITTEN_MAX", "KEPT_MAX"])
def test_a_pin_is_renewed_where_there_is_room_for_no_other(
    places: TwoPlaces, monkeypatch: pytest.MonkeyPatch, most: str
) -> None:
    """It takes none: refused, prompts that are asked for all the time would be evicted at their first end."""
    monkeypatch.setattr(f"tiered_kv.server.pins.{most}", 1)
    assert places.ask(places.first) == "done"
    assert places.pin(places.first, 6000) == "done"
    assert places.ask(places.other) == "refused"


def test_requests_may_pin_a_part_of_what_their_model_may_take(engine: EngineStarter, root: Path) -> None:
    """A tenth of a quarter of 80 blobs; else pins could fill all of it, and nothing would be written any more."""
    one = engine(**SMALL, max_share=0.25)
    store_in_parts(one, root, 5, 0)
    assert one.client.pin(name_of(one, 5).key, 600)
    wait_counted(root, "request_pins_refused", 1)
    assert one.client.pin(name_of(one, 1).key, 600)
    wait_counted(root, "request_pins", 1)


# -- what pins keep ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(seed(), seed() + count("SEEDS", 4)))
def test_what_pins_keep_is_counted_as_they_come_and_end(number: int) -> None:
    """Against a count of all that is kept, after each pin."""
    source, counted, kept = random.Random(number), _KeptChunks(), dict[bytes, _Kept]()
    for now_s in range(200):
        space, tag = source.choice([b"one", b"two"]), bytes([source.randrange(5)])
        prefix = {space + bytes([chunk]): 10 + chunk for chunk in range(source.randrange(1, 20))}
        until_s = now_s + source.randrange(1, 40)
        counted.add(space, prefix, until_s, tag)
        kept |= {
            key: _Kept(until_s, size_bytes, space, tag)
            for key, size_bytes in prefix.items()
            if key not in kept or kept[key].until_s < until_s
        }
        counted.forget_ended(now_s)
        kept = {key: one for key, one in kept.items() if one.until_s > now_s}
        sizes = Counter[tuple[bytes, bytes]]()
        for one in kept.values():
            for place in ((one.namespace, one.tag), (one.namespace, _ALL), (_ALL, one.tag), (_ALL, _ALL)):
                sizes[place] += one.size_bytes
        assert counted.by_key == kept and dict(counted.size_bytes) == dict(sizes)
        assert dict(counted.chunks) == dict(Counter(one.tag for one in kept.values()))


def test_what_stays_pinned_is_not_counted_anew_when_pins_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """65,536 chunks of them: the server's loop would stand still for 0.2 s, once a second."""
    kept, looked_at = _KeptChunks(), []
    kept.add(b"space", {bytes([chunk]): 1 for chunk in range(200)}, 100.0, NO_TAG)
    kept.add(b"space", {bytes([chunk]): 1 for chunk in range(200, 202)}, 10.0, NO_TAG)
    plain = _KeptChunks._count
    monkeypatch.setattr(_KeptChunks, "_count", lambda *given: (looked_at.append(given), plain(*given)))
    kept.forget_ended(5.0)
    assert not looked_at
    kept.forget_ended(10.0)
    assert (len(looked_at), len(kept.by_key), kept.size_bytes[_ALL, _ALL]) == (2, 200, 200)
