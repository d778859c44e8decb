"""A real engine in front of an S3 server that fails in every way: no request fails, no answer changes, hits come back.

One engine lives through all of it, behind the fault proxy. Prefixes that only the bucket has were put there by another
node before; in every case the engine is asked for some of them while the fault is in force, and for others afterwards.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit.faults.proxy import Fault, FaultProxy, Mode
from tests.kit.s3 import S3
from tests.kit.server.object_nodes import FOUND_S, blob_paths, object_figures, s3_place, wait_uploaded
from tests.kit.server.probe import figures, wait_ended, wait_for
from tests.kit.storage.disk_probe import du_bytes, temp_files
from tests.kit.vllm.cached_engine import CHUNK, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import Answer, generate, random_prompt, running
from tiered_kv.testing.blobs import SampleChain

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

TIMEOUT_S = 3.0
MAX_TOKENS = 4
NEW = 5
"""New prompts per case, of a chunk each: as many questions as make the breaker open."""

DOWN = "down"
FAULTS: dict[str, Fault | None] = {
    "500": Fault(Mode.STATUS, status=500),
    "503 SlowDown": Fault(Mode.STATUS, status=503),
    "403": Fault(Mode.STATUS, status=403),
    "reset mid-body": Fault(Mode.RESET),
    "truncated body": Fault(Mode.TRUNCATE),
    "drip": Fault(Mode.DRIP, bytes_per_s=1000),
    "silence": Fault(Mode.SILENCE),
    DOWN: None,
}
NOT_OPENING = {"truncated body", "drip"}
"""Here requests without a body pass, and the breaker opens only for failures in a row: it may open or not."""

DAMAGED = ("flipped at rest", "flipped in flight", "foreign")


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of one case.

    Attributes:
        early, late: In the bucket before; asked during the fault, and after it.
        new: Nobody has them. None where the blobs are bad and not the store.
    """

    early: list[int]
    late: list[int]
    new: tuple[list[int], ...]

    @property
    def all(self) -> list[list[int]]:
        return [self.early, self.late, *self.new]


CASES = {
    name: Case(
        random_prompt(1000 + 20 * number, 2 * CHUNK + 60),
        random_prompt(1001 + 20 * number, 2 * CHUNK + 60),
        tuple(random_prompt(1002 + 20 * number + i, CHUNK + 20) for i in range(NEW if name in FAULTS else 0)),
    )
    for number, name in enumerate([*FAULTS, *DAMAGED])
}


class World:
    """The engine, the proxy it reaches the bucket by, and what vLLM answers without a cache."""

    def __init__(self, engine: CachedEngine, proxy: FaultProxy, s3: S3, prefix: str, plain: dict[str, Any]) -> None:
        self.engine = engine
        self.proxy = proxy
        self.s3 = s3
        self.prefix = prefix
        self._plain = plain

    @property
    def tier(self) -> dict[str, Any]:
        return object_figures(self.engine.root)

    def ask(self, *prompts: list[int]) -> list[Answer]:
        """Ask, and hold every answer against plain vLLM's."""
        answers = self.engine.ask(*prompts, max_tokens=MAX_TOKENS)
        for prompt, ours in zip(prompts, answers, strict=True):
            assert ours.finish_reason == "length"
            assert_same(ours, self._plain[str(prompt)])
        return answers

    def blobs(self) -> set[str]:
        return set(blob_paths(self.s3, self.prefix))

    def assert_sound(self) -> None:
        """Nothing is leased, left over or counted wrongly, and the disk's limit holds."""
        root = self.engine.root
        wait_for(lambda: not temp_files(root), "writes to disk of what came from the bucket")
        state = figures(root)
        disk = next(tier for tier in state["tiers"] if tier["name"] == "disk")
        assert (state["hierarchy"]["leased_bytes"], state["hierarchy"]["lookups"]) == (0, 0)
        assert disk["used_bytes"] == du_bytes(root / "blobs") <= disk["capacity_bytes"]

    def said(self, since: int = 0) -> str:
        """The server's log from a place on."""
        return (self.engine.root / "server.log").read_text()[since:]

    def recovered(self) -> bool:
        return self.tier["breaker"] == "closed" and figures(self.engine.root)["pending_writes"] == 0

    def damage(self, prompt: list[int], chunk: int, data: bytes | None) -> tuple[str, bytes]:
        """Put other bytes in place of a stored chunk, its own with one bit flipped if none are given."""
        path = self.blob_path(prompt, chunk)
        with self.s3.client() as client:
            key = f"{self.prefix}/{path}"
            if data is None:
                flipped = bytearray(client.get_object(Bucket=self.s3.bucket, Key=key)["Body"].read())
                flipped[-5000] ^= 1
                data = bytes(flipped)
            client.put_object(Bucket=self.s3.bucket, Key=key, Body=data)
        return path, data

    def blob_path(self, prompt: list[int], chunk: int) -> str:
        """The object of a prompt's chunk."""
        from tiered_kv.keys.prefix_keys import PrefixKeys

        keys = PrefixKeys(self.engine.scheduler_side._client.namespace, CHUNK)
        keys.extend(prompt)
        (path,) = [path for path in self.blobs() if f"/{keys.keys[chunk].hex()}." in path]
        return path

    def content(self, path: str) -> bytes | None:
        """What lies there; None if nothing does."""
        with self.s3.client() as client:
            try:
                data: bytes = client.get_object(Bucket=self.s3.bucket, Key=f"{self.prefix}/{path}")["Body"].read()
            except client.exceptions.NoSuchKey:
                return None
            return data


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> dict[str, Answer]:
    """What vLLM answers to every prompt without any cache of ours."""
    prompts = [prompt for case in CASES.values() for prompt in case.all]
    with running(tiny_model) as llm:
        return {
            str(prompt): answer
            for prompt, answer in zip(prompts, generate(llm, prompts, max_tokens=MAX_TOKENS), strict=True)
        }


@pytest.fixture(scope="module")
def prefix(tiny_model: Path, s3: S3, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A prefix of the bucket to which another node has stored what the cases need."""
    prefix, root = s3.new_prefix(), tmp_path_factory.mktemp("other")
    place = s3_place(s3, prefix)
    extra = {"storage_uri": place.uri, "storage_options": place.options, "disk_path": str(root)}
    with cached_engine(tiny_model, root, extra) as other:
        for case in CASES.values():
            other.ask(case.early, case.late, max_tokens=1)
        wait_uploaded(root)
    wait_ended(root)
    return prefix


@pytest.fixture(scope="module")
def world(
    tiny_model: Path, s3: S3, prefix: str, plain: dict[str, Answer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    root = tmp_path_factory.mktemp("own")
    with FaultProxy(s3.endpoint_url) as proxy:
        place = s3_place(s3, prefix, proxy.url)
        extra = {
            "storage_uri": place.uri,
            "storage_options": place.options,
            "disk_path": str(root),
            "storage_timeout_s": TIMEOUT_S,
            "drain_s": 1.0,
        }
        with cached_engine(tiny_model, root, extra) as engine:
            yield World(engine, proxy, s3, prefix, plain)
        proxy.set()
        proxy.up()


@pytest.fixture
def calm(world: World) -> Iterator[World]:
    """The world with everything well before and, after a test that failed, for the next one."""
    world.proxy.set()
    world.proxy.up()
    wait_for(world.recovered, "the store to be used again", deadline_s=FOUND_S)
    world.proxy.forget()
    yield world
    world.proxy.set()
    world.proxy.up()


def is_served(answers: Sequence[Answer]) -> list[int]:
    return [answer.cached_tokens for answer in answers]


@pytest.mark.parametrize("name", FAULTS)
def test_fault_costs_hits_and_nothing_else_and_they_come_back(calm: World, name: str) -> None:
    case, fault = CASES[name], FAULTS[name]
    opened, stored, log = calm.tier["breaker_opened"], calm.blobs(), len(calm.said())
    if fault is None:
        calm.proxy.down()
    else:
        calm.proxy.set(fault)

    during = calm.ask(case.early, *case.new)
    again = calm.ask(*case.new)
    if name not in NOT_OPENING:
        wait_for(lambda: calm.tier["breaker_opened"] > opened, "the breaker to open", deadline_s=FOUND_S)
    calm.proxy.set()
    calm.proxy.up()
    wait_for(calm.recovered, "the store to be used again", deadline_s=FOUND_S)
    calm.proxy.forget()
    (late,) = calm.ask(case.late)

    assert is_served(during) == [0] * (1 + NEW), "the fault did not strike"
    assert is_served(again) == [CHUNK] * NEW, "host memory serves on while the bucket is out"
    assert late.cached_tokens == 2 * CHUNK
    assert calm.proxy.count("GET", ".safetensors") >= 2, "hits after the fault come from the bucket"
    assert len(calm.blobs() - stored) == NEW, "what was stored during the outage is in the bucket"
    calm.assert_sound()
    if name not in NOT_OPENING:
        assert re.search(r"tier taken out until it answers again\. tier=object reason=\S", calm.said(log))


def corrupt_reads(world: World) -> int:
    counters: dict[str, int] = figures(world.engine.root)["counters"]
    return sum(count for name, count in counters.items() if name.startswith("read_failed_corrupt"))


def test_blob_that_was_flipped_in_the_bucket_is_never_served(calm: World) -> None:
    case = CASES["flipped at rest"]
    path, damaged = calm.damage(case.early, 1, None)
    before = corrupt_reads(calm)
    (ours,) = calm.ask(case.early)
    wait_for(calm.recovered, "stores", deadline_s=FOUND_S)

    assert ours.cached_tokens == CHUNK, "the sound chunk before it is served"
    assert corrupt_reads(calm) > before
    wait_for(lambda: calm.content(path) not in (None, damaged), "the sound blob", deadline_s=FOUND_S)


def test_bit_that_flips_on_the_way_is_never_served(calm: World) -> None:
    case = CASES["flipped in flight"]
    with calm.proxy.failing(Fault(Mode.FLIP, kinds={"GET"}, path=".safetensors")):
        (ours,) = calm.ask(case.early)
    (late,) = calm.ask(case.late)

    assert ours.cached_tokens == 0
    assert late.cached_tokens == 2 * CHUNK


def test_foreign_blob_under_a_name_of_ours_is_left_alone(calm: World) -> None:
    case = CASES["foreign"]
    path, foreign = calm.damage(case.early, 0, SampleChain(7).blob(0).data)
    answers = calm.ask(case.early)
    wait_for(calm.recovered, "stores", deadline_s=FOUND_S)
    answers += calm.ask(case.early)

    assert is_served(answers) == [0, 2 * CHUNK], "from host memory it may be served again"
    assert calm.content(path) == foreign
