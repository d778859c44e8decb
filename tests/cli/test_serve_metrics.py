"""`tiered-kv serve --metrics-port`: what a real scrape shows is what docs/metrics.md lists."""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.server.clients import CHUNK, SmallEngine, payload_bytes, settings
from tests.kit.server.probe import figures, wait_for

LIMITS = ("--host-bytes", "8MiB", "--disk-bytes", "160MiB")


def scrape(url: str) -> dict[str, Metric]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        assert answer.status == 200
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    (found,) = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == f"tiered_kv_{name}" and sample.labels == labels
    ]
    return found


def url_of(line: str) -> str:
    found = re.search(r" metrics=(http://127\.0\.0\.1:[0-9]+/metrics)$", line.rstrip("\n"))
    assert found, line
    return found[1]


def documented(repository: Path) -> dict[str, set[str]]:
    """Names of metrics with their labels, from the table."""
    page = (repository / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(tiered_kv_\w+)(?:\{([a-z, ]+)\})?` \|", page, flags=re.MULTILINE)
    assert len(rows) == len({name for name, _ in rows}), "a metric is listed twice"
    return {name: set(labels.split(", ")) - {""} for name, labels in rows}


def test_a_scrape_shows_what_the_table_says(serve, root: Path, repository: Path) -> None:
    uri = f"shared+file://{root}/bucket"
    more = ("--set", f"disk_path={root}/disk", "--set", "storage_bytes=1GiB")
    _, line = serve(uri, *more, "--host-bytes", "64MiB", "--disk-bytes", "1GiB", "--metrics-port", 0)
    assert line.startswith(f"serving {uri} pid=")
    one = SmallEngine.start(settings(root / "disk", storage_uri=uri, disk_path=str(root / "disk"), host_bytes=None,
                                     disk_bytes=None))  # fmt: skip
    one.store(5)
    one.wait_hits(5)
    wait_for(lambda: figures(root / "disk")["pending_writes"] == 0, "the uploads")
    families = scrape(url_of(line))
    one.close()
    table = documented(repository)
    kinds = {family.name + ("_total" if family.type == "counter" else ""): family for family in families.values()}
    assert set(kinds) == set(table)
    seen = {name: {label for sample in family.samples for label in sample.labels} for name, family in kinds.items()}
    assert {name: labels for name, labels in seen.items() if kinds[name].samples} == {
        name: labels for name, labels in table.items() if kinds[name].samples
    }
    silent = {name for name, family in kinds.items() if not family.samples}
    assert silent == {"tiered_kv_dropped_chunks_total", "tiered_kv_removed_chunks_total"}
    assert {family.type for family in families.values()} == {"counter", "gauge"}
    assert value(families, "chunks", tier="disk") == 5
    assert value(families, "operations_total", tier="object", operation="put", outcome="ok") == 5
    assert value(families, "bucket_leader", tier="object") == 1


def test_counters_follow_what_engines_do(serve, root: Path) -> None:
    process, line = serve(f"file://{root}", *LIMITS, "--metrics-port", 0)
    one = SmallEngine.start(settings(root))
    before = scrape(url_of(line))
    assert value(before, "asked_tokens_total") == 0
    one.store(6)
    one.wait_hits(6)
    asked = value(_later(line), "asked_tokens_total")
    assert one.hits(8) == 6
    after = _later(line)
    assert value(after, "asked_tokens_total") == asked + 8 * CHUNK
    assert value(after, "missed_tokens_total") + value(after, "hit_tokens_total", tier="host") == asked + 8 * CHUNK
    assert value(after, "hit_tokens_total", tier="disk") == 0
    assert value(after, "sessions", state="ready") == 1
    wait_for(lambda: figures(root)["pending_writes"] == 0, "the writes")
    moved = value(_later(line), "operation_bytes_total", tier="disk", operation="put")
    assert moved == 6 * (payload_bytes() + 4096)
    one.close()
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url_of(line), timeout=5)


def _later(line: str) -> dict[str, Any]:
    """A scrape whose figures are none that were shared with an earlier one."""
    time.sleep(0.3)
    return scrape(url_of(line))


def test_stored_less_removed_is_what_is_there_in_every_tier(serve, root: Path) -> None:
    limits = ("--host-bytes", "1MiB", "--disk-bytes", "65MiB")  # 28 chunks in memory, about as many on disk
    _, line = serve(f"file://{root}", *limits, "--metrics-port", 0)
    one = SmallEngine.start(settings(root, host_bytes=None, disk_bytes=None))
    for number in range(20):
        one.store(4, first_token=1000 * number)
        one.hits(4, first_token=1000 * max(0, number - 10))
    wait_for(lambda: figures(root)["pending_writes"] == 0, "the writes")
    families = _later(line)
    one.close()
    for tier in ("host", "disk"):
        stored, removed = (sum_of(families, f"{name}_chunks_total", tier) for name in ("stored", "removed"))
        assert removed > 0
        assert stored - removed == value(families, "resident_chunks", tier=tier) == value(families, "chunks", tier=tier)
        stored, removed = (value(families, f"{name}_bytes_total", tier=tier) for name in ("stored", "removed"))
        assert stored - removed == value(families, "resident_bytes", tier=tier)
        assert value(families, "removed_chunks_total", tier=tier, why="evicted") == value(
            families, "evicted_chunks_total", tier=tier
        )
    assert value(families, "resident_bytes", tier="disk") == value(families, "used_bytes", tier="disk")
    hits = sum(value(families, "hit_tokens_total", tier=tier) for tier in ("host", "disk"))
    assert hits + value(families, "missed_tokens_total") == value(families, "asked_tokens_total") > hits > 0


def sum_of(families: dict[str, Metric], name: str, tier: str) -> float:
    """A metric's values of one tier, over all its other labels."""
    samples = [sample for family in families.values() for sample in family.samples]
    return sum(one.value for one in samples if one.name == f"tiered_kv_{name}" and one.labels["tier"] == tier)


def test_a_port_that_is_taken_ends_it_before_the_cache_starts(cli, root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = cli("serve", f"file://{root}", *LIMITS, "--metrics-port", port)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"option --metrics-port: nothing can listen at 127.0.0.1 port {port}: " in done.stderr
    assert done.stderr.count("\n") == 1
    assert not root.exists()


def test_a_host_that_is_not_here_is_a_wrong_setting(cli, root: Path) -> None:
    done = cli("serve", f"file://{root}", *LIMITS, "--metrics-port", 0, "--metrics-host", "192.0.2.1")
    assert done.returncode == 2
    assert "nothing can listen at 192.0.2.1 port 0" in done.stderr


def test_without_the_option_nothing_listens(serve, root: Path) -> None:
    process, line = serve(f"file://{root}", *LIMITS)
    assert "metrics=" not in line
    rows = Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]
    own = {os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()}
    assert not [row for row in rows if f"socket:[{row.split()[9]}]" in own]


def test_the_client_is_imported_only_for_metrics() -> None:
    code = "import sys, tiered_kv.cli.serve, tiered_kv.server.compose; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
