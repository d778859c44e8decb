"""`make serve`: a real HTTP client streams chats from vLLM's own server, and what it then scrapes is what it counted.

One server for everything: streams, cached tokens, the figures of ``/metrics``, KV events over ZeroMQ, the dashboard.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.ports import free_port
from tests.kit.server.probe import figures, wait_for, wait_written
from tests.kit.vllm.cached_engine import CHUNK
from tiered_kv.metrics.names import ENGINE_PREFIX as PREFIX
from tiered_kv.ops.server_link import ServerLink
from tiered_kv.ops.storage import RemovalTotals
from tiered_kv.server.directory import read_info
from tiered_kv.vllm.prometheus import definitions

pytestmark = pytest.mark.vllm

BLOCK = 32
BY_SOURCE = "prompt_tokens_cached_by_source"
"""vLLM has it since 0.32."""

START_S = 240.0
ANSWER_TOKENS = 6
SHARED_WORDS, OWN_WORDS = 700, 40
DISK_BYTES_PER_TOKEN = 2 * 4 * 64 * 2 * 2
"""Of the model that `make serve` builds: layers, heads, head's extent, K and V, bfloat16."""


def words(seed: int, count: int) -> str:
    source = random.Random(seed)
    return " ".join(f"t{source.randrange(3, 1024)}" for _ in range(count))


@dataclass
class Served:
    """The server of `make serve`, and what a test asked of it."""

    url: str
    cache: Path
    prompts: list[int] = field(default_factory=list)

    def chat(self, system: str, user: str, **more: object) -> tuple[list[str], int]:
        """Stream an answer: its pieces in the order they came, and how many prompt tokens were cached."""
        body = {
            "model": "tiny",
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        pieces: list[str] = []
        usage: dict[str, Any] = {}
        with self.post("/v1/chat/completions", body) as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            for line in answer:
                data = line.decode().strip().removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                said = json.loads(data)
                usage = said.get("usage") or usage
                pieces += [choice["delta"]["content"] for choice in said["choices"] if choice["delta"].get("content")]
        self.prompts.append(usage["prompt_tokens"])
        return pieces, usage["prompt_tokens_details"]["cached_tokens"]

    def post(self, path: str, body: object = None) -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=100)

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, once everything that was computed is stored."""

        def is_empty() -> bool:  # blocks are held while a copy runs
            with contextlib.suppress(OSError), self.post("/reset_prefix_cache") as answer:
                return answer.status == 200
            return False

        wait_written(self.cache)
        wait_for(is_empty, "an empty prefix cache")

    def scrape(self) -> dict[str, Metric]:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


@pytest.fixture(scope="module")
def events() -> Iterator[Any]:
    """A subscriber as a router has one; it connects before the server listens."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.connect(f"tcp://127.0.0.1:{free_port()}")
        yield subscriber


@pytest.fixture(scope="module")
def served(events: Any, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # Below another make (make test) this one would add a line about the directory it leaves.
    asked = ["make", "--no-print-directory", "-n", "-o", "setup", "serve"]
    recipe = subprocess.run(asked, cwd=repository, capture_output=True, check=True)
    assert recipe.stdout.split()[-1] == b"demo/serve.py"
    folder, port = tmp_path_factory.mktemp("served"), free_port()
    publishing = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port_of(events)}"}
    command = [sys.executable, str(repository / "demo" / "serve.py"), "--cache", str(folder / "cache")]
    command += ["--settings", json.dumps({"strict": True, "promotion_wait_ms": 30_000, "lookup_timeout_ms": 30_000})]
    command += ["--port", str(port), "--kv-events-config", json.dumps(publishing)]
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    one = Served(f"http://127.0.0.1:{port}", folder / "cache")

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()[-5000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{one.url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    try:
        wait_for(is_up, f"the server; see {log}", deadline_s=START_S)
        yield one
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def port_of(events: Any) -> int:
    """Where the subscriber expects the events."""
    return int(events.LAST_ENDPOINT.decode().rstrip("\0").rpartition(":")[2])


@dataclass
class Counted:
    """What the test counted while it asked."""

    cached: list[int]
    chunks: int
    events: list[Any]
    families: dict[str, Metric]


@pytest.fixture(scope="module")
def counted(served: Served, events: Any) -> Counted:
    """Two chats that share a long system prompt, vLLM's own cache emptied between them, and a scrape."""
    shared = words(1, SHARED_WORDS)
    cached = []
    for number in (1, 2):
        pieces, hit = served.chat(shared, words(10 + number, OWN_WORDS))
        assert len(pieces) > 1, "the answer did not come in pieces"
        assert len("".join(pieces).split()) == ANSWER_TOKENS
        cached.append(hit)
        served.forget()
    chunks = SHARED_WORDS // CHUNK
    published: list[Any] = []

    def is_told() -> bool:
        served.chat("t3", "t4")  # too short for a chunk: only to have the engine step and the server asked
        published.extend(receive(events))
        families = served.scrape()
        asked = value(families, "asked_tokens_total", tier="host")
        return asked == 2 * chunks * CHUNK and value(families, "server_resident_chunks", tier="disk") == chunks

    wait_for(is_told, "the figures", deadline_s=100)
    return Counted(cached, chunks, published, served.scrape())


def receive(events: Any) -> list[Any]:
    """All events published so far."""
    from vllm.distributed.kv_events import KVEventBatch

    found = []
    while events.poll(200):
        _topic, _number, payload = events.recv_multipart()
        found += msgspec.msgpack.decode(payload, type=KVEventBatch).events
    return found


def value(families: dict[str, Metric], name: str, prefix: str = PREFIX, **labels: str) -> float:
    """One sample's value; 0 where there is none yet, as PromQL's sum has it."""
    wanted = {"engine": "0", "model_name": "tiny"} | labels
    samples = [sample for family in families.values() for sample in family.samples if sample.name == prefix + name]
    return sum(sample.value for sample in samples if sample.labels == wanted)


def total(families: dict[str, Metric], name: str) -> float:
    """A metric's sum over all labels."""
    return sum(s.value for family in families.values() for s in family.samples if s.name == PREFIX + name)


@pytest.mark.timeout(400)
def test_the_second_chat_is_told_how_much_was_cached(counted: Counted) -> None:
    assert counted.cached == [0, counted.chunks * CHUNK]
    # None of it by vLLM's own prefix cache, all of it from us:
    assert value(counted.families, "external_prefix_cache_hits_total", "vllm:") == counted.chunks * CHUNK
    assert value(counted.families, "prefix_cache_hits_total", "vllm:") == 0
    if f"vllm:{BY_SOURCE}" in counted.families:
        assert value(counted.families, f"{BY_SOURCE}_total", "vllm:", source="host") == counted.chunks * CHUNK


@pytest.mark.timeout(400)
def test_metrics_are_what_was_asked_for(counted: Counted) -> None:
    families, tokens = counted.families, counted.chunks * CHUNK
    assert value(families, "lookups_total") == 2
    assert value(families, "hit_tokens_total", tier="host") == tokens
    assert value(families, "hit_tokens_total", tier="disk") == 0
    assert value(families, "stored_tokens_total") == tokens
    assert value(families, "stored_bytes_total") == tokens * DISK_BYTES_PER_TOKEN
    assert value(families, "loads_total") == 1
    assert value(families, "loaded_tokens_total", tier="host") == tokens
    assert value(families, "loaded_bytes_total") == tokens * DISK_BYTES_PER_TOKEN
    assert value(families, "decisions_total", decision="miss") == 1
    assert value(families, "decisions_total", decision="ready") == 1
    for name, count in (("lookup_wait", 2), ("load", 1), ("save", 1), ("promotion_wait", 0)):
        assert value(families, f"{name}_seconds_count") == count, name
    assert total(families, "failures_total") == total(families, "dropped_chunks_total") == 0
    assert value(families, "connected") == 1
    assert value(families, "server_breaker_open", tier="disk") == 0
    assert value(families, "server_capacity_bytes", tier="host") == 256 << 20


@pytest.mark.timeout(400)
def test_nothing_is_lost_between_what_is_counted(counted: Counted, served: Served) -> None:
    families = counted.families
    for tier, below in (("host", "disk"), ("disk", None)):
        asked, hit, missed = (value(families, f"{n}_tokens_total", tier=tier) for n in ("asked", "hit", "missed"))
        assert asked == hit + missed
        assert below is None or missed == value(families, "asked_tokens_total", tier=below)
        stored, removed = Counter[str](), Counter[str]()
        for counts, name in ((stored, "server_stored_chunks"), (removed, "server_removed_chunks")):
            for sample in families[PREFIX + name].samples if PREFIX + name in families else ():
                counts[sample.labels["tier"]] += int(sample.value)
        assert stored[tier] - removed[tier] == value(families, "server_resident_chunks", tier=tier) == counted.chunks
    # What the engine counted and what its server counted by itself:
    tokens = figures(served.cache)["tokens"]
    assert tokens["asked_tokens"] == value(families, "asked_tokens_total", tier="host")
    assert tokens["hit_tokens"] == total(families, "hit_tokens_total")
    assert tokens["missed_tokens"] == value(families, "missed_tokens_total", tier="disk")


@pytest.mark.timeout(400)
def test_routers_are_told_of_the_same_blocks_as_of_the_gpu(counted: Counted) -> None:
    stored = [event for event in counted.events if type(event).__name__ == "BlockStored"]
    on_gpu = [event for event in stored if event.medium == "GPU"]
    hashes = [block for event in on_gpu for block in event.block_hashes]
    whole = next(event for event in on_gpu if len(event.token_ids) >= counted.chunks * CHUNK)
    for medium in ("CPU", "STORAGE"):
        chunks = [event for event in stored if event.medium == medium][: counted.chunks]
        assert len(chunks) == counted.chunks
        assert {block for event in chunks for block in event.block_hashes} <= set(hashes)
        tokens = [token for event in sorted(chunks, key=lambda e: whole.token_ids.index(e.token_ids[0]))
                  for token in event.token_ids]  # fmt: skip
        assert sorted(tokens) == sorted(whole.token_ids[: counted.chunks * CHUNK])
        parents = {event.parent_block_hash for event in chunks}
        assert None in parents
        assert parents - {None} <= {event.block_hashes[-1] for event in chunks}
        assert {(e.block_size, len(e.block_hashes), e.locality, e.group_idx) for e in chunks} == {
            (BLOCK, CHUNK // BLOCK, "LOCAL", 0)
        }
    assert not [event for event in counted.events if type(event).__name__ == "BlockRemoved" and event.medium != "GPU"]


def dashboard_expressions(repository: Path) -> list[str]:
    """Every query of the dashboard."""
    found = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            found.extend(node[key] for key in ("expr", "definition") if isinstance(node.get(key), str))
            for child in node.values():
                walk(child)
        elif isinstance(node, list):
            for child in node:
                walk(child)

    walk(json.loads((repository / "docs" / "dashboards" / "tiered_kv.json").read_text()))
    return found


@pytest.mark.timeout(400)
def test_every_query_of_dashboard_and_alerts_names_metrics_of_the_scrape(counted: Counted, repository: Path) -> None:
    page = (repository / "docs" / "metrics.md").read_text()
    table = page[page.index("| Alert where |") : page.index("Below vLLM's own offloading the first one")]
    alerts = re.findall(r"^\| `(.+?)` \| ", table, flags=re.MULTILINE)
    assert len(alerts) > 5
    expressions = [*dashboard_expressions(repository), *alerts]
    known = {name for family in counted.families.values() for name in (family.name, *(s.name for s in family.samples))}
    known |= {f"{family.name}_total" for family in counted.families.values() if family.type == "counter"}
    assert len(expressions) > 20
    for expression in expressions:
        names = re.findall(r"\b(?:vllm:|tiered_kv_)\w+", expression)
        assert names, expression
        assert set(names) - {f"vllm:{BY_SOURCE}_total"} <= known, expression


@pytest.mark.timeout(400)
def test_every_metric_is_scraped_under_its_name(counted: Counted) -> None:
    shown = {name.removeprefix(PREFIX) for name in counted.families if name.startswith(PREFIX)}
    shown -= {name for name in shown if name.endswith("_created")}  # what the text format adds
    assert shown == {one.name for one in definitions()}


@pytest.mark.timeout(400)
def test_what_leaves_a_tier_is_told_as_removed(counted: Counted, served: Served, events: Any) -> None:
    stored = [e for e in counted.events if type(e).__name__ == "BlockStored" and e.medium == "STORAGE"]
    info = read_info(served.cache)
    assert info is not None
    with ServerLink.of_socket(f"unix://{info.socket}", 60) as link:
        assert link.evict("disk", b"", None, holes=True) == RemovalTotals(counted.chunks)
    removed: list[Any] = []

    def is_told() -> bool:
        served.chat("t3", "t4")
        removed.extend(e for e in receive(events) if type(e).__name__ == "BlockRemoved" and e.medium != "GPU")
        return value(served.scrape(), "server_removed_chunks", tier="disk", why="removed") == counted.chunks

    wait_for(is_told, "the figures", deadline_s=100)
    assert value(served.scrape(), "server_resident_chunks", tier="disk") == 0
    assert {(event.medium, event.locality) for event in removed} == {("STORAGE", "LOCAL")}
    gone = {block for event in removed for block in event.block_hashes}
    assert gone == {block for event in stored for block in event.block_hashes}


@pytest.mark.timeout(400)
def test_what_is_shown_for_wrong_answers_is_answered_by_no_cache(
    counted: Counted, served: Served, repository: Path
) -> None:
    page = (repository / "docs" / "troubleshooting.md").read_text()
    section = page[page.index("## Wrong answers") : page.index("## No hits")]
    (shown,) = re.findall(r"```json\n(.*?)```", section, flags=re.DOTALL)
    alone = {name: given for name, given in json.loads(shown).items() if name not in ("model", "prompt")}
    prompt = words(1, SHARED_WORDS), words(11, OWN_WORDS)
    served.chat(*prompt)
    cached, hit = served.chat(*prompt)
    stored = value(served.scrape(), "stored_tokens_total")

    computed, none = served.chat(*prompt, **alone)

    assert (hit > 0, none) == (True, 0)
    assert "".join(computed) == "".join(cached)
    assert value(served.scrape(), "stored_tokens_total") == stored


@pytest.mark.timeout(400)
def test_an_idle_engine_shows_how_old_its_figures_are(counted: Counted, served: Served) -> None:
    told_s = value(counted.families, "server_figures_time_seconds")
    assert 0 <= time.time() - told_s < 1000
    assert value(served.scrape(), "server_figures_time_seconds") >= told_s
