"""Machines of a fleet: an engine with a server, a directory and, if it listens, a door of its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kit.ports import free_port
from tests.kit.server.clients import PAGES, SmallEngine, settings
from tests.kit.server.probe import answer_to, figures, server_pid
from tests.kit.server.processes import end_server
from tiered_kv.server import protocol as m


def fleet_key(path: Path) -> Path:
    """Write the key's file of a fleet."""
    path.write_text("5a" * 32)
    path.chmod(0o600)
    return path


def listening(key_file: Path, **more: Any) -> dict[str, Any]:
    """Settings of a machine that gives."""
    return {"peer_listen": f"127.0.0.1:{free_port()}", "peer_key_file": str(key_file), **more}


@contextmanager
def machine(root: Path, *, pages: Any = PAGES, **more: Any) -> Iterator[SmallEngine]:
    """An engine and its server."""
    engine = SmallEngine.start(settings(root, promotion_wait_ms=20_000, **more), pages=pages)
    try:
        yield engine
    finally:
        engine.close()
        end_server(engine.root)


def url_of(engine: SmallEngine) -> str:
    """Where others reach a machine that listens."""
    return f"https://{engine.config.peer_listen}"


def door_pid(root: Path) -> int:
    """The only child of a server."""
    pid = server_pid(root)
    children = [
        Path(f"/proc/{pid}/task/{task}/children").read_text().split() for task in os.listdir(f"/proc/{pid}/task")
    ]
    (door,) = [int(child) for some in children for child in some]
    return door


def tier(root: Path, name: str = "peers") -> dict[str, Any]:
    """What ``stat`` says of a tier."""
    (found,) = [one for one in figures(root)["tiers"] if one["name"] == name]
    return dict(found)


def calls(root: Path, outcome: str, operation: str = "get", name: str = "peers") -> int:
    """How many calls to a tier ended so."""
    rows = figures(root)["operations"]
    wanted = name, operation, outcome
    return sum(row["calls"] for row in rows if (row["tier"], row["operation"], row["outcome"]) == wanted)


def evict(root: Path, name: str = "host") -> tuple[int, int]:
    """Have all chunks removed from a tier, as an operator would; how many went, and how many stay in use."""
    answer = answer_to(root, m.Evict(name, b"", b"", False))
    assert isinstance(answer, m.Evicted), answer
    return answer.removed, answer.kept
