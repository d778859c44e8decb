"""Several nodes on one object store, by the library's door: what is shared, what an outage costs, what is refused."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.faults.proxy import Fault, FaultProxy, Mode
from tests.kit.s3 import S3
from tests.kit.server.object_nodes import (
    FOUND_S,
    NodeProcess,
    Place,
    blob_paths,
    load,
    node,
    object_figures,
    s3_place,
    store,
    wait_loaded,
    wait_uploaded,
)
from tests.kit.server.probe import figures, wait_for
from tests.kit.stores.session import ATOMIC, OVERWRITING, Stores
from tiered_kv.config import Config
from tiered_kv.errors import ConfigError, TierUnavailable
from tiered_kv.server.directory import server_directory

HEADS_MAX = 24
"""For a prompt of 512 chunks: tiering/prefix_search.py."""


@pytest.fixture(params=["memory", "shared+file", pytest.param("s3", marks=pytest.mark.s3), "gs", "az"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty object store."""
    if request.param in ATOMIC:
        served = request.getfixturevalue("stores")(request.param)
        return Place(served.uri(served.new_prefix()), served.options())
    if request.param == "s3":
        s3 = request.getfixturevalue("s3")
        return s3_place(s3, s3.new_prefix())
    if request.param == "memory":
        return Place(f"memory://{tmp_path.name}")
    (tmp_path / "shared").mkdir()
    return Place(f"shared+file://{tmp_path}/shared")


@pytest.fixture
def proxy(s3: S3) -> Iterator[FaultProxy]:
    with FaultProxy(s3.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def prefix(s3: S3) -> str:
    return s3.new_prefix()


# -- sharing -------------------------------------------------------------------------------------------------------


def test_another_node_loads_what_was_stored_and_nobody_restarts(place: Place, tmp_path: Path) -> None:
    with node(place.settings(tmp_path / "a")) as a, node(place.settings(tmp_path / "b")) as b:
        assert store(a, 1, 10) == 10
        wait_uploaded(tmp_path / "a")
        assert load(b, 1, 10) == 10
        assert store(b, 2, 3) == 3
        wait_uploaded(tmp_path / "b")
        assert load(a, 2, 3) == 3

        assert figures(tmp_path / "b")["counters"]["uploaded"] == 3, "what came from the bucket was uploaded again"


def test_an_empty_node_gets_everything_after_all_others_ended(place: Place, tmp_path: Path) -> None:
    with node(place.settings(tmp_path / "a")) as a:
        stored = [store(a, seed, 10) for seed in range(3)]

    with node(place.settings(tmp_path / "empty")) as empty:
        assert [load(empty, seed, 10) for seed in range(3)] == stored == [10, 10, 10]


def test_host_memory_right_above_the_object_store(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with node(place.settings(None)) as diskless:
        assert store(diskless, 1, 10) == 10
    with node(place.settings(None)) as diskless:
        assert load(diskless, 1, 10) == 10
        root = server_directory(Config.from_mapping(place.settings(None)))
        assert [tier["name"] for tier in figures(root)["tiers"]] == ["object"]
        with node(place.settings(tmp_path / "b")) as b:
            assert load(b, 1, 10) == 10


def test_a_node_in_another_process_shares_both_ways(s3: S3, prefix: str, tmp_path: Path) -> None:
    place = s3_place(s3, prefix)
    other = NodeProcess(place.settings(tmp_path / "other"))
    try:
        with node(place.settings(tmp_path / "own")) as own:
            assert load(own, 2, 10) == 0
            assert store(own, 1, 10) == 10
            wait_uploaded(tmp_path / "own")
            assert other.load(1, 10) == 10
            assert other.store(2, 10) == 10
            wait_loaded(own, 2, 10)  # what was not there a moment ago is asked for again after ABSENT_S
    finally:
        other.kill()


# -- uploads -------------------------------------------------------------------------------------------------------

NO_UPLOADS = Fault(Mode.STATUS, kinds={"PUT"}, path=".safetensors", status=503)


@pytest.mark.parametrize("end", ["SIGKILL", "close"])
def test_uploads_that_were_not_made_are_made_after_a_restart(
    s3: S3, prefix: str, proxy: FaultProxy, tmp_path: Path, end: str
) -> None:
    settings = s3_place(s3, prefix, proxy.url).settings(tmp_path / "a", drain_s=0.5, storage_timeout_s=2)
    proxy.set(NO_UPLOADS)

    def wait_on_disk() -> None:
        wait_for(lambda: figures(tmp_path / "a")["tiers"][0]["blobs"] == 10, "the writes to disk")

    if end == "close":
        with node(settings) as first:
            assert store(first, 1, 10) == 10
            wait_on_disk()  # which a busy machine may not do within drain_s
    else:
        killed = NodeProcess(settings)
        assert killed.store(1, 10) == 10
        wait_on_disk()
        killed.kill()
    assert blob_paths(s3, prefix) == []

    proxy.set()
    with node(settings):
        wait_for(lambda: len(blob_paths(s3, prefix)) == 10, "the uploads", deadline_s=FOUND_S)
    with node(s3_place(s3, prefix).settings(tmp_path / "b")) as b:
        assert load(b, 1, 10) == 10


def test_uploads_that_were_made_are_not_made_again_after_a_restart(
    s3: S3, prefix: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    settings = s3_place(s3, prefix, proxy.url).settings(tmp_path / "a")
    with node(settings) as first:
        assert store(first, 1, 10) == 10
    assert len(blob_paths(s3, prefix)) == 10
    proxy.forget()

    with node(settings) as again:
        assert load(again, 1, 10) == 10
        wait_for(lambda: proxy.count("HEAD", prefix) >= 10, "every chunk to be asked for")

    blobs = blob_paths(s3, prefix)
    assert [path for path in blobs if proxy.count("PUT", path)] == []
    assert [path for path in blobs if proxy.count("GET", path)] == []


# -- what is wrong is said ------------------------------------------------------------------------------------------


def test_a_wrong_secret_is_refused_in_plain_words(s3: S3, prefix: str, tmp_path: Path) -> None:
    wrong = Place(s3.uri(prefix), s3.options() | {"secret": "not-the-secret"})
    with pytest.raises(TierUnavailable, match=f"object tier failed .*secret.* store=s3://{s3.bucket}") as caught:
        with node(wrong.settings(tmp_path / "a", strict=True)):
            pass
    assert "not-the-secret" not in str(caught.value)

    with node(wrong.settings(tmp_path / "a", drain_s=1.0)) as cache:
        assert object_figures(tmp_path / "a")["breaker"] != "closed"
        assert store(cache, 1, 10) == 10
        assert load(cache, 1, 10) == 10


def test_a_bucket_that_is_missing_is_used_as_soon_as_it_is_there(s3: S3, tmp_path: Path) -> None:
    bucket = f"{s3.bucket}-later-{s3.run[-6:]}"
    missing = Place(f"s3://{bucket}/p", s3.options())
    with pytest.raises(TierUnavailable, match=f"there is no bucket '{bucket}'; create it"):
        with node(missing.settings(tmp_path / "a", strict=True)):
            pass

    later = replace(s3, on=replace(s3.on, name=bucket))
    settings = {name: missing.settings(tmp_path / name, drain_s=1.0) for name in "ab"}
    with s3.client() as client, node(settings["a"]) as a, node(settings["b"]) as b:
        assert store(a, 1, 10) == 10
        assert load(a, 1, 10) == 10
        assert load(b, 1, 10) == 0
        client.create_bucket(Bucket=bucket)
        try:
            wait_for(lambda: len(blob_paths(later, "p")) == 10, "the uploads", deadline_s=FOUND_S)
            assert object_figures(tmp_path / "a")["breaker_opened"] == 1
            wait_for(lambda: object_figures(tmp_path / "b")["breaker"] == "closed", "the other's trial")
            # Sessions that opened without the bucket share nothing (server/epochs.py); the next ones do.
            with node(settings["a"]) as next_a, node(settings["b"]) as next_b:
                assert store(next_a, 2, 10) == 10
                wait_loaded(next_b, 2, 10)
        finally:
            a.close()
            b.close()
            later.on.empty("p")
            client.delete_bucket(Bucket=bucket)


def test_two_buckets_in_front_of_one_directory_are_refused(tmp_path: Path) -> None:
    one, two = Place("memory://one"), Place("memory://two")
    with node(one.settings(tmp_path / "a")):
        with pytest.raises(
            ConfigError, match=r"keeps it in front of memory://one, this client names memory://two: use"
        ):
            with node(two.settings(tmp_path / "a")):
                pass


@pytest.mark.parametrize("kind", OVERWRITING)
def test_limits_are_refused_on_a_store_that_overwrites(stores: Stores, kind: str, tmp_path: Path) -> None:
    served = stores(kind)
    place = Place(served.uri(served.new_prefix()), served.options())
    with pytest.raises(ConfigError, match=r"cannot create an object only if it is absent.* set single_writer"):
        with node(place.settings(tmp_path / "a", storage_bytes="1GiB")):
            pass
    for seed, promised in enumerate(({}, {"storage_bytes": "1GiB", "single_writer": True})):
        with node(place.settings(tmp_path / f"b{seed}", **promised)) as cache:
            assert store(cache, seed, 10) == 10
        with node(place.settings(tmp_path / f"c{seed}", **promised)) as other:
            assert load(other, seed, 10) == 10


# -- requests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [0, 150])
def test_a_prompt_of_512_chunks_costs_few_requests_and_a_known_one_none(
    s3: S3, prefix: str, proxy: FaultProxy, tmp_path: Path, held: int
) -> None:
    with node(s3_place(s3, prefix).settings(tmp_path / "a")) as a:
        assert store(a, 1, held) == held
    settings = s3_place(s3, prefix, proxy.url).settings(tmp_path / "b", host_bytes="16MiB")
    with node(settings) as b:
        proxy.forget()
        assert load(b, 1, 512) == held
        heads, gets = proxy.count("HEAD"), proxy.count("GET")
        assert load(b, 1, held) == held
        lists = [request for request in proxy.requests if request.kind == "LIST" and "_tiered_kv/" not in request.path]

        assert 1 <= heads <= HEADS_MAX
        assert proxy.count("HEAD") == heads, "what is known was asked for again"
        assert (gets, proxy.count("GET", ".safetensors")) == (held, held)
        assert lists == []
        wait_uploaded(tmp_path / "b")
        assert proxy.count("PUT", ".safetensors") == 0
