"""Servers on one Mooncake pool, by the library's door: what is shared, what an outage costs, what is refused."""

import pytest

from tests.kit.server.object_nodes import NodeProcess, Place, load, node, store, wait_loaded, wait_uploaded
from tests.kit.server.probe import figures, wait_for
from tiered_kv.config import Config
from tiered_kv.errors import ConfigError, TierUnavailable


def tier_figures(root):
    (found,) = [tier for tier in figures(root)["tiers"] if tier["name"] == "mooncake"]
    return found


@pytest.fixture
def place(mooncake):
    mooncake.member()
    return Place(mooncake.uri())


def test_another_server_hits_what_one_has_stored(place, tmp_path):
    with node(place.settings(tmp_path / "a")) as a, node(place.settings(tmp_path / "b")) as b:
        assert store(a, 1, 300) == 300
        wait_uploaded(tmp_path / "a")
        assert load(b, 1, 300) == 300
        assert tier_figures(tmp_path / "b")["breaker"] == "closed"
        assert load(b, 2, 3) == 0


def test_a_server_in_another_process_without_a_disk_that_is_killed(place, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    other = NodeProcess(place.settings(None))
    try:
        assert other.store(1, 10) == 10
        with node(place.settings(tmp_path / "own")) as own:
            wait_loaded(own, 1, 10)
            other.kill()
            assert store(own, 2, 5) == 5
            assert load(own, 1, 10) == 10
    finally:
        other.kill()


def test_an_outage_costs_misses_and_what_was_stored_meanwhile_is_uploaded_after_it(place, mooncake, tmp_path):
    with node(place.settings(tmp_path / "a", storage_timeout_s=2.0)) as a:
        assert store(a, 1, 4) == 4
        wait_uploaded(tmp_path / "a")
        mooncake.master.kill()
        assert load(a, 5, 4) == 0
        assert store(a, 2, 4) == 4
        assert load(a, 2, 4) == 4 and load(a, 1, 4) == 4
        mooncake.master.start()
        wait_uploaded(tmp_path / "a")
        with node(place.settings(tmp_path / "b", storage_timeout_s=2.0)) as b:
            wait_loaded(b, 2, 4)


def test_a_server_starts_beside_a_master_that_is_down_and_strict_refuses(place, mooncake, tmp_path):
    mooncake.master.kill()
    with pytest.raises(TierUnavailable, match="connection was refused"):
        with node(place.settings(tmp_path / "strict", strict=True)):
            pass
    with node(place.settings(tmp_path / "a")) as a:
        assert store(a, 1, 4) == 4
        assert tier_figures(tmp_path / "a")["breaker"] != "closed"
        mooncake.master.start()
        wait_for(lambda: tier_figures(tmp_path / "a")["breaker"] == "closed", "a trial", deadline_s=60.0)
        wait_uploaded(tmp_path / "a")
        assert load(a, 1, 4) == 4


def test_a_damaged_object_is_a_miss_and_is_replaced(mooncake, tmp_path):
    """One chunk: of a longer prompt, what lies behind the first damaged one may not have been looked at yet."""
    member = mooncake.member()
    place = Place(mooncake.uri())
    with node(place.settings(tmp_path / "a")) as a:
        assert store(a, 1, 1) == 1
        wait_uploaded(tmp_path / "a")
        (key,) = blob_keys(tmp_path / "a", "test")
    sound = member.get(key)
    damaged = bytearray(sound)
    damaged[-1] ^= 1
    member.put(key, bytes(damaged))
    with node(place.settings(tmp_path / "b")) as b:
        assert load(b, 1, 1) == 0
        assert store(b, 1, 1) == 1
        wait_uploaded(tmp_path / "b")
    assert member.get(key) not in (None, bytes(damaged))
    with node(place.settings(tmp_path / "c")) as c:
        assert load(c, 1, 1) == 1


def blob_keys(root, name):
    """What the blobs of a directory are called in the pool."""
    return [f"{name}/{path.parent.parent.name}/{path.stem}" for path in sorted(root.rglob("*.safetensors"))]


@pytest.mark.parametrize(
    ("name", "value"),
    [("storage_bytes", "1GiB"), ("storage_ttl", "7d"), ("single_writer", True), ("evict_other_namespaces", True)],
)
def test_limits_of_a_bucket_are_refused_with_the_reason(name, value):
    with pytest.raises(ConfigError, match=f"{name} is only for object stores: .* its master evicts"):
        Config.from_mapping({"storage_uri": "mooncake://m:50051", name: value})


def test_peers_are_refused(tmp_path):
    settings = {"storage_uri": "mooncake://m:50051", "disk_path": str(tmp_path), "peer_listen": "0.0.0.0:7460"}
    with pytest.raises(ConfigError, match="not for mooncake://"):
        Config.from_mapping(settings | {"peer_key_file": str(tmp_path / "key")})
