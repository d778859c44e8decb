"""Names, kinds and labels of exported metrics, byte for byte: dashboards and alerts are written against them."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiered_kv.metrics.exposition import FiguresCollector
from tiered_kv.metrics.figures import (
    BucketFigures,
    CurveFigures,
    CurvePoint,
    FlowFigures,
    HitFigures,
    OperationFigures,
    ServerFigures,
    SessionFigures,
    TierFigures,
    TokenFigures,
)
from tiered_kv.metrics.names import ENGINE_EVENTS, ENGINE_PREFIX, SERVER_EVENTS, EventName, ShownIn

GOLDEN = Path(__file__).parent / "exported_metrics.txt"


def server() -> ServerFigures:
    """A server of which everything that it may say is said."""
    tokens: dict[str, Any] = dict.fromkeys(TokenFigures.__struct_fields__, 0)
    tokens |= {"hits": [HitFigures(tier="host", chunks=0, tokens=0)], "decisions": {"ready": 0}}
    bucket: dict[str, Any] = dict.fromkeys(BucketFigures.__struct_fields__, 0) | {"role": "leader", "leader": "a"}
    tier: dict[str, Any] = dict.fromkeys(TierFigures.__struct_fields__, 0)
    tier |= {"jobs": {"get": 0}, "breaker": "closed", "breaker_reason": None}
    flow: dict[str, Any] = dict.fromkeys(FlowFigures.__struct_fields__, 0)
    flow |= {"tier": "host", "stored": {"new": 0}, "removed": {"evicted": 0}}
    host = ("lookups", "leased_bytes", "host_assigned_bytes", "host_capacity_bytes", "host_ready_chunks")
    everything: dict[str, Any] = dict.fromkeys(ServerFigures.__struct_fields__, 0)
    everything |= {
        "version": "1.2.3",
        "tokens": TokenFigures(**tokens),
        "hierarchy": dict.fromkeys(host, 0),
        "counters": dict.fromkeys(golden("names that a server counts"), 1),
        "tiers": [
            TierFigures(**tier | {"name": "disk", "bucket": None}),
            TierFigures(**tier | {"name": "object", "bucket": BucketFigures(**bucket)}),
        ],
        "flows": [FlowFigures(**flow)],
        "sessions": [SessionFigures(engine="e/0", namespace=None, workers=1, declined=0, state="ready")],
        "namespaces": [],
        "curves": [
            CurveFigures(
                namespace="ab", chunks=1, points=[CurvePoint(tier="host", times=0.5, size_bytes=1, found_share=0.5)]
            )
        ],
        "operations": [OperationFigures(tier="disk", operation="get", outcome="ok", calls=1, bytes=2, seconds=3.0)],
    }
    return ServerFigures(**everything)


def of_the_server() -> list[str]:
    lines = []
    for family in FiguresCollector(server(), 0.0).collect():
        lines.append(f"server {family.type} {family.name}: {family.documentation}")
        lines += [f"    {one.name} {dict(one.labels)}" for one in family.samples]
    return lines


def of_engines() -> list[str]:
    from tiered_kv.vllm.prometheus import definitions

    return [
        f"engine {one.kind.value.capitalize()} {ENGINE_PREFIX}{one.name} {one.labels}: {one.help}"
        for one in definitions()
    ]


def of_engine_counters() -> list[str]:
    """In which metric each counter of an engine's scheduler side is shown."""
    from tiered_kv.vllm.engine_metrics import SchedulerMeter

    lines = []
    for name in golden("names that an engine counts"):
        client: Any = SimpleNamespace(generation=0)
        meter = SchedulerMeter(client, {name: 1}, chunk_tokens=1)
        meter._take_counters()
        lines += [f"counter {name} {shown} {list(labels)}" for shown, labels in meter._stats.data["counters"].items()]
    return lines


def golden(first: str) -> list[str]:
    parts = GOLDEN.read_text().split("\n\n")
    (part,) = [part for part in parts if part.startswith(f"# {first}\n")]
    return part.rstrip().split("\n")[1:]


def test_metrics_of_a_server_are_those_that_dashboards_know() -> None:
    assert of_the_server() == golden("server")


@pytest.mark.vllm
def test_metrics_of_an_engine_are_those_that_dashboards_know() -> None:
    assert sorted(of_engines()) == sorted(golden("engine"))
    assert of_engine_counters() == golden("counters of an engine")


COUNTED = re.compile(r"counters\[(f?)\"([^\"]+)\"\]")


@pytest.mark.parametrize(
    ("folders", "rows"), [(("tiering", "engine", "server"), SERVER_EVENTS), (("vllm",), ENGINE_EVENTS)]
)
def test_everything_that_is_counted_has_a_row(
    repository: Path, folders: tuple[str, ...], rows: dict[str, EventName]
) -> None:
    """A counter without a row is shown as an event, whatever it means."""
    counted = 0
    for path in (path for folder in folders for path in (repository / "tiered_kv" / folder).rglob("*.py")):
        for is_made, name in COUNTED.findall(path.read_text()):
            counted += 1
            pattern = re.sub(r"\{[^}]*\}", "[a-z_]+", name) if is_made else re.escape(name)
            assert any(re.fullmatch(pattern, row) for row in rows), f"{path.name} counts {name}"
    assert counted > 10


def test_every_reason_is_explained(repository: Path) -> None:
    """Who sees a failure or a drop counted finds what it means."""
    page = (repository / "docs" / "metrics.md").read_text()
    events = [*SERVER_EVENTS.values(), *ENGINE_EVENTS.values()]
    reasons = {one.label or one.name for one in events if one.shown_in in (ShownIn.FAILURES, ShownIn.DROPPED_CHUNKS)}
    assert len(reasons) > 30
    assert {reason for reason in reasons if f"`{reason}`" not in page} == set()
