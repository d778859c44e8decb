"""Two servers with directories of their own: what one has stored, the engine of the other loads through the door."""

import os
import resource
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.kit.faults.proxy import FaultProxy
from tests.kit.limits import lowest_free
from tests.kit.ports import free_port
from tests.kit.server.clients import SmallEngine, settings
from tests.kit.server.machines import calls, door_pid, evict, fleet_key, machine, tier
from tests.kit.server.object_nodes import blob_paths, s3_place
from tests.kit.server.probe import figures, server_pid, wait_for, wait_written
from tests.kit.server.processes import frozen, strike
from tiered_kv.config import Config
from tiered_kv.errors import ConfigError
from tiered_kv.metrics.recorder import Recorder
from tiered_kv.server.directory import log_path
from tiered_kv.tiers.open import open_tiers

CHUNKS = 20


@pytest.fixture
def key_file(tmp_path):
    return fleet_key(tmp_path / "key")


@pytest.fixture
def producer(tmp_path, key_file):
    """A machine that gives what it has stored; ``url`` is where."""
    port = free_port()
    with machine(tmp_path / "a", peer_listen=f"127.0.0.1:{port}", peer_key_file=str(key_file)) as engine:
        engine.url = f"https://127.0.0.1:{port}"
        yield engine


@pytest.fixture
def consumer(tmp_path, key_file, producer):
    """A machine that reads from the producer."""
    with machine(tmp_path / "b", peers=[producer.url], peer_key_file=str(key_file)) as engine:
        yield engine


def store(engine, first_token=0):
    engine.store(CHUNKS, first_token)
    engine.wait_hits(CHUNKS, first_token)
    wait_written(engine.root)


def test_what_a_door_complains_of_stands_in_the_log_of_its_server(producer):
    """Here that it has no descriptor left for a connection: an engine's server has no standard error."""
    door, port = door_pid(producer.root), int(producer.url.rpartition(":")[2])
    most = lowest_free(door)
    resource.prlimit(door, resource.RLIMIT_NOFILE, (most, most))
    log = log_path(producer.root)
    with socket.create_connection(("127.0.0.1", port)):
        wait_for(lambda: "a connection could not be accepted" in log.read_text(), "the door's complaint")
    (line,) = [line for line in log.read_text().splitlines() if "could not be accepted" in line]
    assert " WARNING tiered_kv.server.door: " in line and "Too many open files" in line


def test_a_prefix_that_another_machine_stored_is_loaded_and_kept(producer, consumer):
    store(producer)
    assert consumer.hits(CHUNKS) == CHUNKS  # hits() compares every byte
    assert calls(consumer.root, "ok") == CHUNKS
    wait_written(consumer.root)
    assert tier(consumer.root, "disk")["blobs"] == CHUNKS, "what came from a peer is on this disk from now on"
    assert tier(consumer.root)["pending_writes"] == 0


def test_one_question_finds_a_prefix(producer, consumer):
    store(producer)
    before = calls(consumer.root, "ok", "contains") + calls(consumer.root, "missing", "contains")
    assert consumer.hits(CHUNKS + 5) == CHUNKS
    assert calls(consumer.root, "ok", "contains") + calls(consumer.root, "missing", "contains") == before + 1
    assert calls(consumer.root, "ok") == CHUNKS and calls(consumer.root, "missing") == 0


def test_the_peer_that_a_lookup_hints_at_is_asked_first(producer, tmp_path, key_file):
    port = free_port()
    with machine(tmp_path / "c", peer_listen=f"127.0.0.1:{port}", peer_key_file=str(key_file)) as empty:
        store(producer)
        both = [f"https://127.0.0.1:{port}", producer.url]
        with machine(tmp_path / "b", peers=both, peer_key_file=str(key_file)) as consumer:
            with frozen(door_pid(empty.root)):
                assert consumer.hits(CHUNKS, hint=producer.url) == CHUNKS
                assert calls(consumer.root, "unavailable", "contains") == 0


def test_what_no_peer_has_is_a_miss_and_stored_here_alone(producer, consumer):
    assert consumer.hits(CHUNKS) == 0
    store(consumer)
    assert tier(consumer.root)["breaker"] == "closed"
    assert tier(producer.root, "disk")["blobs"] == 0


def test_a_damaged_file_of_a_peer_shortens_the_prefix(producer, consumer):
    store(producer)
    keys = producer.keys(CHUNKS)
    (path,) = producer.root.rglob(f"{keys.keys[7].hex()}.safetensors")
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    assert consumer.hits(CHUNKS) == 7
    assert path.exists(), "a peer's blob is nobody's to remove but its own"


@pytest.mark.parametrize("signal_number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_machine_whose_peer_fails_goes_on_alone_and_comes_back_to_it(producer, consumer, signal_number):
    store(producer)
    store(producer, first_token=50_000)
    assert consumer.hits(CHUNKS) == CHUNKS
    door = door_pid(producer.root)
    strike(door, signal_number)
    try:
        if signal_number == signal.SIGSTOP:
            assert consumer.hits(CHUNKS, 50_000) == 0
        store(consumer, first_token=90_000)
        assert consumer.hits(CHUNKS) == CHUNKS
    finally:
        if signal_number == signal.SIGSTOP:
            os.kill(door, signal.SIGCONT)
    wait_for(lambda: consumer.hits(CHUNKS, 50_000) == CHUNKS, "the peer's blobs")


def test_a_server_whose_peers_are_away_starts_and_finds_them_later(tmp_path, key_file):
    port = free_port()
    with machine(
        tmp_path / "b", peers=[f"https://127.0.0.1:{port}"], peer_key_file=str(key_file), strict=True
    ) as consumer:
        assert tier(consumer.root)["breaker"] != "closed"
        assert consumer.hits(CHUNKS) == 0
        with machine(tmp_path / "a", peer_listen=f"127.0.0.1:{port}", peer_key_file=str(key_file)) as producer:
            store(producer)
            wait_for(lambda: consumer.hits(CHUNKS) == CHUNKS, "the peer's blobs")


def test_two_machines_read_from_each_other(tmp_path, key_file):
    ports = free_port(), free_port()

    def of(own, other):
        return {
            "peer_listen": f"127.0.0.1:{ports[own]}",
            "peers": [f"https://127.0.0.1:{ports[other]}"],
            "peer_key_file": str(key_file),
        }

    with machine(tmp_path / "a", **of(0, 1)) as one, machine(tmp_path / "b", **of(1, 0)) as other:
        store(one)
        store(other, first_token=50_000)
        wait_for(lambda: other.hits(CHUNKS) == CHUNKS, "the other's blobs")
        wait_for(lambda: one.hits(CHUNKS, 50_000) == CHUNKS, "the one's blobs")


def test_the_door_ends_with_its_server(producer):
    door = door_pid(producer.root)
    os.kill(server_pid(producer.root), signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{door}").exists(), "the door's end")


def test_a_server_that_cannot_open_its_door_says_why(tmp_path, key_file):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"setting peer_listen: the door cannot listen at {address}"):
            SmallEngine.start(settings(tmp_path / "a", peer_listen=address, peer_key_file=str(key_file)))


def test_without_the_settings_nothing_listens_and_nobody_is_asked(tmp_path):
    with machine(tmp_path / "a") as engine:
        assert [one["name"] for one in figures(engine.root)["tiers"]] == ["disk"]
        with pytest.raises(ValueError, match="not enough values"):
            door_pid(engine.root)


def test_the_key_stands_in_no_log_and_no_command_line(producer, consumer, key_file):
    door = door_pid(producer.root)
    secret = key_file.read_text()
    for place in (
        Path(f"/proc/{door}/cmdline"),
        Path(f"/proc/{door}/environ"),
        *map(log_path, (producer.root, consumer.root)),
    ):
        assert secret.encode() not in place.read_bytes()


# -- beside a bucket ---------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(tmp_path):
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


@pytest.fixture
def sharing(tmp_path, key_file, bucket):
    """Two machines of one bucket, of which the second reads from the first, too."""
    port = free_port()
    given = {"storage_uri": f"shared+file://{bucket}", "peer_key_file": str(key_file), "storage_timeout_s": 5.0}
    listen = {"disk_path": str(tmp_path / "a"), "peer_listen": f"127.0.0.1:{port}"}
    asking = {"disk_path": str(tmp_path / "b"), "peers": ["bucket"]}
    with machine(tmp_path / "a", **given, **listen) as first:
        record = bucket / f"_tiered_kv/peers/127.0.0.1:{port}"
        wait_for(record.exists, "the door's record")
        with machine(tmp_path / "b", **given, **asking) as second:
            wait_for(lambda: "a peer was found" in log_path(second.root).read_text(), "a look at the bucket")
            yield first, second
        os.kill(server_pid(first.root), signal.SIGTERM)
        wait_for(lambda: not record.exists(), "the record's end with its server")


def reads(engine):
    """Blobs that the machine has read from peers and from the bucket."""
    rows = figures(engine.root)["operations"]
    read = {(row["tier"], row["outcome"]): row["calls"] for row in rows if row["operation"] == "get"}
    return read.get(("peers", "ok"), 0), read.get(("object", "ok"), 0)


def test_a_door_that_nobody_could_find_is_refused(tmp_path, key_file, bucket):
    given = {"storage_uri": f"shared+file://{bucket}", "disk_path": str(tmp_path / "a"), "peer_listen": "127.0.0.1:0"}
    config = Config.from_mapping(given | {"peer_key_file": str(key_file)})
    with pytest.raises(ConfigError, match="cannot find peer_listen at https://127.0.0.1:0"):
        open_tiers(config, lambda _: None, Recorder(), time.monotonic)


def test_with_a_bucket_a_prefix_comes_from_the_peer_that_has_it(sharing):
    first, second = sharing
    store(first)
    assert second.hits(CHUNKS + 5) == CHUNKS  # hits() compares every byte
    assert reads(second) == (CHUNKS, 0)
    wait_written(second.root)
    assert tier(second.root, "disk")["blobs"] == CHUNKS


def test_what_the_peer_lacks_comes_from_the_bucket(sharing):
    first, second = sharing
    store(first)
    for key in first.keys(CHUNKS).keys[12:]:
        (path,) = first.root.rglob(f"{key.hex()}.safetensors")
        path.unlink()
    evict(first.root)
    assert second.hits(CHUNKS) == CHUNKS
    assert reads(second) == (12, CHUNKS - 12)


def test_what_a_peer_gives_wrongly_comes_from_the_bucket(sharing):
    first, second = sharing
    store(first)
    (path,) = first.root.rglob(f"{first.keys(CHUNKS).keys[7].hex()}.safetensors")
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    assert second.hits(CHUNKS) == CHUNKS
    assert reads(second) == (CHUNKS - 1, 1)


@pytest.mark.parametrize("signal_number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_peer_that_fails_costs_no_chunk_that_the_bucket_has(sharing, signal_number):
    first, second = sharing
    store(first)
    store(first, first_token=50_000)
    assert second.hits(CHUNKS) == CHUNKS
    door = door_pid(first.root)
    strike(door, signal_number)
    try:
        assert second.hits(CHUNKS, 50_000) == CHUNKS
        assert reads(second) == (CHUNKS, CHUNKS)
        assert tier(second.root, "object")["breaker"] == "closed"
    finally:
        if signal_number == signal.SIGSTOP:
            os.kill(door, signal.SIGCONT)


def test_while_the_bucket_is_down_what_peers_have_comes_from_them(s3, tmp_path, key_file):
    """They were found in that bucket. What lies in it alone is a miss meanwhile."""
    with FaultProxy(s3.endpoint_url) as proxy:
        place = s3_place(s3, s3.new_prefix(), proxy.url)
        given = {"storage_uri": place.uri, "storage_options": place.options, "storage_timeout_s": 3.0}
        given |= {"peer_key_file": str(key_file)}
        listen = {"disk_path": str(tmp_path / "a"), "peer_listen": f"127.0.0.1:{free_port()}"}
        asking = {"disk_path": str(tmp_path / "b"), "peers": ["bucket"]}
        with machine(tmp_path / "a", **given, **listen) as first, machine(tmp_path / "b", **given, **asking) as second:
            store(first)
            store(first, first_token=50_000)
            wait_for(lambda: len(blob_paths(s3, place.uri.partition(s3.bucket + "/")[2])) == 2 * CHUNKS, "the uploads")
            wait_for(lambda: "a peer was found" in log_path(second.root).read_text(), "a look at the bucket")
            assert second.hits(CHUNKS, 50_000) == CHUNKS
            wait_written(second.root)
            for name in ("host", "disk"):
                evict(second.root, name)
            for key in first.keys(CHUNKS, 50_000).keys[5:]:
                next(first.root.rglob(f"{key.hex()}.safetensors")).unlink()
            evict(first.root)
            proxy.down()
            wait_for(lambda: second.hits(1, 70_000) == 0 and is_out(second), "the breakers", deadline_s=60.0)
            before = reads(second)
            assert second.hits(CHUNKS + 5) == CHUNKS  # hits() compares every byte
            assert second.hits(CHUNKS, 50_000) == 5, "what was known of the bucket holds no more"
            assert reads(second) == (before[0] + CHUNKS + 5, before[1]) and is_out(second)
            store(second, first_token=90_000)
            assert second.hits(CHUNKS) == CHUNKS
            proxy.up()
            wait_for(lambda: not is_out(second), "the bucket's return", deadline_s=60.0)
            assert second.hits(CHUNKS, 50_000) == CHUNKS


def is_out(engine):
    return tier(engine.root, "object")["breaker"] != "closed"


@pytest.mark.parametrize("disk_admission", ["all", "second-touch"])
def test_what_other_machines_ask_for_reaches_a_bucket_of_second_touches(tmp_path, key_file, bucket, disk_admission):
    """The machine that has it was asked once: to store it. It lies on its disk, or in its memory alone."""
    given = {"storage_uri": f"shared+file://{bucket}", "storage_timeout_s": 5.0, "storage_admission": "second-touch"}
    listen = {"peer_listen": f"127.0.0.1:{free_port()}", "peer_key_file": str(key_file)}
    with machine(
        tmp_path / "a", disk_path=str(tmp_path / "a"), disk_admission=disk_admission, **given, **listen
    ) as first:
        first.store(CHUNKS)
        wait_for(lambda: figures(first.root)["hierarchy"]["host_ready_chunks"] == CHUNKS, "the seals")
        if disk_admission == "all":
            wait_for(lambda: tier(first.root, "disk")["blobs"] == CHUNKS, "the writes")
            evict(first.root)
        asking = {"peers": [f"https://{listen['peer_listen']}"], "peer_key_file": str(key_file)}
        with machine(tmp_path / "b", disk_path=str(tmp_path / "b"), **given, **asking) as second:
            assert not list(bucket.rglob("*.safetensors"))
            assert second.hits(CHUNKS) == CHUNKS and reads(second) == (CHUNKS, 0)
            wait_for(lambda: len(list(bucket.rglob("*.safetensors"))) == CHUNKS, "the uploads")
    with machine(tmp_path / "c", disk_path=str(tmp_path / "c"), **given) as third:
        assert third.hits(CHUNKS) == CHUNKS and reads(third) == (0, CHUNKS)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"peers": ["https://b:1"]}, "peers needs peer_key_file"),
        ({"peer_listen": "0.0.0.0:1"}, "peer_listen needs peer_key_file"),
        ({"peer_key_file": "/key"}, "peer_key_file is for peers and peer_listen"),
        ({"peer_serve_bytes_s": "1GB"}, "peer_serve_bytes_s is for peer_listen"),
        ({"peers": ["http://b:1"], "peer_key_file": "/key"}, "setting peers: expected a list of 1 to 16 of"),
        ({"peers": ["https://b"], "peer_key_file": "/key"}, "setting peers: expected a list of 1 to 16 of"),
        ({"peers": ["https://b:1/path"], "peer_key_file": "/key"}, "setting peers: expected a list of 1 to 16 of"),
        ({"peers": ["https://u:p@b:1"], "peer_key_file": "/key"}, "setting peers: expected a list of 1 to 16 of"),
        ({"peers": ["https://b:1", "https://b:1"], "peer_key_file": "/key"}, "each once"),
        ({"peers": "https://b:1", "peer_key_file": "/key"}, "setting peers: expected a list of 1 to 16 of"),
        ({"peer_listen": 7460, "peer_key_file": "/key"}, "setting peer_listen: expected HOST:PORT such as"),
        ({"peers": [], "peer_key_file": "/key"}, "setting peers: expected a list of 1 to 16 of"),
        ({"peers": ["bucket"], "peer_key_file": "/key"}, "'bucket' needs an object store"),
        ({"peers": ["dns://b"], "peer_key_file": "/key"}, "setting peers: expected a list of 1 to 16 of"),
        ({"peers": ["https://b:1"], "peer_key_file": "/key", "peer_url": "https://b:1"}, "peer_url is for peer_listen"),
        ({"peer_listen": "b:1", "peer_key_file": "/key", "peer_url": "b:1"}, "setting peer_url: expected a URL"),
        ({"peer_listen": "7460", "peer_key_file": "/key"}, "setting peer_listen: expected HOST:PORT"),
        ({"peer_listen": "host:99999", "peer_key_file": "/key"}, "setting peer_listen: expected HOST:PORT"),
        ({"peer_listen": "host:http", "peer_key_file": "/key"}, "setting peer_listen: expected HOST:PORT"),
        ({"peer_listen": "[::", "peer_key_file": "/key"}, "setting peer_listen: expected HOST:PORT"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given, what):
    with pytest.raises(ConfigError, match=what):
        Config.from_mapping({"storage_uri": "file:///d"} | given)
