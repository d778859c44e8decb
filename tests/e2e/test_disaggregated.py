"""Disaggregated prefill: one engine computes prompts and only stores, another answers them and only loads.

The engines run one after the other in this process; what they share is a server, or a bucket between two servers.
"""

import os
import shutil
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kit.faults.false_peer import FalsePeer, head
from tests.kit.s3 import S3
from tests.kit.server.machines import door_pid, evict, fleet_key, listening
from tests.kit.server.object_nodes import blob_paths, s3_place, wait_uploaded
from tests.kit.server.operator_server import operator_server, transfer
from tests.kit.server.probe import figures, wait_ended, wait_written
from tests.kit.server.processes import strike
from tests.kit.vllm.cached_engine import CHUNK, TAIL, CachedEngine, assert_same, cached_engine, settings
from tests.kit.vllm.engine_process import IN_ONE_PROCESS, EngineProcess
from tests.kit.vllm.harness import Answer, drain, generate, kv_fingerprint, random_prompt, running
from tiered_kv.tiers.peers.fleet_key import FleetKey

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPTS = [random_prompt(800, 4 * CHUNK + TAIL), random_prompt(801, 2 * CHUNK + 200), random_prompt(802, CHUNK - 9)]
"""With the answer to it the last one is still less than a chunk."""

HINTED = random_prompt(804, 4 * CHUNK + TAIL)
WHOLE = [4 * CHUNK, 2 * CHUNK, 0]
"""What a consumer need not compute: all but the last, partial chunk."""


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> list[Answer]:
    with running(tiny_model) as llm:
        return generate(llm, PROMPTS)


@contextmanager
def engine(model: Path, root: Path, role: str, **more: Any) -> Iterator[CachedEngine]:
    with cached_engine(model, root, kv_transfer_config=transfer(settings(root, **more), role)) as started:
        yield started


def cached(answers: list[Answer]) -> list[int]:
    return [answer.cached_tokens for answer in answers]


def assert_all_same(answers: list[Answer], plain: list[Answer]) -> None:
    for ours, theirs in zip(answers, plain, strict=True):
        assert ours.finish_reason == "length"
        assert_same(ours, theirs)


def test_a_producer_and_a_consumer_on_one_server_divide_the_work(
    tiny_model: Path, tmp_path: Path, plain: list[Answer]
) -> None:
    root, own = tmp_path / "cache", random_prompt(803, 3 * CHUNK)
    with operator_server(root) as server:
        with engine(tiny_model, root, "kv_producer", server=server) as producer:
            cold = producer.ask(PROMPTS[0])
            computed = kv_fingerprint(producer.llm)
            cold += producer.ask(*PROMPTS[1:])
            again = producer.ask(*PROMPTS)
            produced = producer.scheduler_side.counters
        wait_written(root)
        with engine(tiny_model, root, "kv_consumer", server=server) as consumer:
            warm = consumer.ask(PROMPTS[0])
            loaded = kv_fingerprint(consumer.llm)
            warm += consumer.ask(*PROMPTS[1:])
            unknown = consumer.ask(own) + consumer.ask(own)
            consumed = consumer.scheduler_side.counters
        wait_written(root)
        stored = figures(root)["hierarchy"]["host_ready_chunks"]

    assert cached(cold) == cached(again) == [0, 0, 0], "a producer only stores"
    assert (produced["loads"], produced["stores"]) == (0, 6)
    assert cached(warm) == WHOLE
    assert loaded == computed
    assert cached(unknown) == [0, 0], "a consumer only loads"
    assert (consumed["loads"], consumed["stores"]) == (2, 0)
    assert stored == len(list(root.glob("blobs/*/*/*.safetensors"))) == 6
    assert_all_same(cold, plain)
    assert_all_same(again, plain)
    assert_all_same(warm, plain)


def test_a_producer_and_a_consumer_with_servers_of_their_own_share_a_bucket(
    tiny_model: Path, tmp_path: Path, s3: S3, plain: list[Answer]
) -> None:
    prefix = s3.new_prefix()
    place = s3_place(s3, prefix)
    one, other = tmp_path / "prefill", tmp_path / "decode"
    shared = {"storage_uri": place.uri, "storage_options": place.options}
    with engine(tiny_model, one, "kv_producer", **shared, disk_path=str(one)) as producer:
        cold = producer.ask(PROMPTS[0])
        computed = kv_fingerprint(producer.llm)
        cold += producer.ask(*PROMPTS[1:])
        wait_uploaded(one)
    wait_ended(one)
    shutil.rmtree(one)
    with engine(tiny_model, other, "kv_consumer", **shared, disk_path=str(other)) as consumer:
        warm = consumer.ask(PROMPTS[0])
        loaded = kv_fingerprint(consumer.llm)
        warm += consumer.ask(*PROMPTS[1:])
        stored = consumer.scheduler_side.counters["stores"]

    assert cached(cold) == [0, 0, 0] and len(blob_paths(s3, prefix)) == 6
    assert cached(warm) == WHOLE
    assert loaded == computed
    assert stored == 0
    assert_all_same(cold, plain)
    assert_all_same(warm, plain)


def test_a_producer_and_a_consumer_with_servers_of_their_own_need_no_bucket(
    tiny_model: Path, tmp_path: Path, plain: list[Answer]
) -> None:
    """Each engine in a process of its own, with a server and a directory of its own; the blobs go from door to peer.

    The consumer's first peer has nothing, and is not asked for a request whose router names the other one.
    """
    key_file = tmp_path / "key"
    key_file.write_text("5a" * 32)
    key_file.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    one, other = tmp_path / "prefill", tmp_path / "decode"
    gives = settings(one, peer_listen=address, peer_key_file=str(key_file))
    log = tmp_path / "producer.log"
    producer = EngineProcess(tiny_model, gives, log, role="kv_producer", environment=IN_ONE_PROCESS)
    try:
        told = producer.ask(*PROMPTS)
        (alone,) = producer.ask(HINTED)
        wait_written(one)
        url, asked = f"https://{address}", list[object]()

        def has_nothing(wire: ssl.SSLSocket) -> None:
            asked.append(wire)
            wire.sendall(head(1) + b"0")

        nothing = FalsePeer(FleetKey.read(key_file), has_nothing)
        takes = {"peers": [nothing.url, url], "peer_key_file": str(key_file)}
        with nothing, engine(tiny_model, other, "kv_consumer", **takes) as consumer:
            asked.clear()  # the self-test asks everybody
            hinted = as_told(consumer, HINTED, {"tiered_kv.peer": url})
            asked_for_hinted = len(asked)
            warm = consumer.ask(*PROMPTS)
            counters = consumer.scheduler_side.counters
            hits = {hit["tier"]: hit["chunks"] for hit in figures(other)["tokens"]["hits"]}
            wait_written(other)
        kept = {path.name: path.read_bytes() for path in other.glob("blobs/*/*/*.safetensors")}
    finally:
        producer.close()

    assert cached(warm) == WHOLE
    assert (counters["loads"], counters["stores"], counters["control_refused"]) == (3, 0, 0)
    assert hits == {"host": 0, "disk": 0, "peers": 6 + 4}
    assert asked_for_hinted == 0 and hinted.num_cached_tokens == 4 * CHUNK
    assert list(hinted.outputs[0].token_ids[:1]) == alone["tokens"][:1]
    assert kept == {path.name: path.read_bytes() for path in one.glob("blobs/*/*/*.safetensors")}
    assert_all_same(warm, plain)
    for answer, theirs in zip(told, plain, strict=True):
        assert answer["tokens"][0] == theirs.tokens[0]


def test_a_consumer_loads_what_is_in_the_producers_memory_alone(
    tiny_model: Path, tmp_path: Path, plain: list[Answer]
) -> None:
    """Without a bucket, and without anything on the producer's disk. Then its door freezes, and is killed."""
    key_file = fleet_key(tmp_path / "key")
    one, other = tmp_path / "prefill", tmp_path / "decode"
    gives = settings(one, **listening(key_file))
    log = tmp_path / "producer.log"
    producer = EngineProcess(tiny_model, gives, log, role="kv_producer", environment=IN_ONE_PROCESS)
    try:
        told = producer.ask(*PROMPTS)
        wait_written(one)
        assert evict(one, "disk") == (6, 0)
        takes = {"peers": [f"https://{gives['peer_listen']}"], "peer_key_file": str(key_file)}
        with engine(tiny_model, other, "kv_consumer", **takes) as consumer:
            warm = consumer.ask(*PROMPTS)
            hits = {hit["tier"]: hit["chunks"] for hit in figures(other)["tokens"]["hits"]}
            failing = with_a_door_that(one, other, consumer, signal.SIGSTOP)
            os.kill(door_pid(one), signal.SIGCONT)
            failing += with_a_door_that(one, other, consumer, signal.SIGKILL)
        lent = figures(one)["counters"]["loans"]
        on_disk = list(one.glob("blobs/*/*/*.safetensors"))
    finally:
        producer.close()

    assert cached(warm) == WHOLE
    assert hits == {"host": 0, "disk": 0, "peers": 6}
    assert lent >= 6 and not on_disk
    assert_all_same(warm, plain)
    assert cached(failing[:3]) == [0] * 3, "a door that is frozen gives nothing"
    assert_all_same(failing, plain * 2)
    for answer, theirs in zip(told, plain, strict=True):
        assert answer["tokens"][0] == theirs.tokens[0]


def with_a_door_that(one: Path, other: Path, consumer: CachedEngine, gets: signal.Signals) -> list[Answer]:
    """What a consumer that has nothing itself answers after its peer's door got a signal."""
    wait_written(other)  # what is being written is on its disk only after it was emptied
    for tier in ("host", "disk"):
        evict(other, tier)
    strike(door_pid(one), gets)
    return consumer.ask(*PROMPTS)


def test_a_consumer_asked_at_once_waits_for_what_the_producer_told(tiny_model: Path, tmp_path: Path) -> None:
    """The producer's answer is out before its chunks are committed; its ``kv_transfer_params`` bridge that."""
    root = tmp_path / "cache"
    prompts = [random_prompt(820 + i, 4 * CHUNK + TAIL) for i in range(6)]
    with operator_server(root) as server:
        shared = settings(root, server=server)
        producer = EngineProcess(tiny_model, shared, tmp_path / "producer.log", role="kv_producer")
        try:
            with engine(tiny_model, root, "kv_consumer", server=server) as consumer:
                handed_over = []
                for prompt in prompts:
                    (answer,) = producer.ask(prompt, max_tokens=1)
                    handed_over.append((answer, as_told(consumer, prompt, answer["kv_transfer_params"])))
                counters = consumer.scheduler_side.counters
        finally:
            producer.close()

    for answer, output in handed_over:
        assert answer["kv_transfer_params"] == {"tiered_kv.stored_tokens": 4 * CHUNK}
        assert output.num_cached_tokens == 4 * CHUNK
        assert list(output.outputs[0].token_ids[:1]) == answer["tokens"]
    assert counters["handovers_short"] == counters["control_refused"] == 0


def as_told(consumer: CachedEngine, prompt: list[int], params: dict[str, Any] | None) -> Any:
    """Send a request as a router does, with the parameters of the producer's answer."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
    parameters.extra_args = {"kv_transfer_params": params} if params else None
    (output,) = consumer.llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
    drain(consumer.llm)
    return output
