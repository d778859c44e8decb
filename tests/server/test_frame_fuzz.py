"""Every message of the protocol with any content, in any order, against the decoder and against a real server."""

import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.counts import count, seed
from tests.kit.faults.hostile_messages import body, damaged, types_of
from tests.kit.module_process import module_command, module_environment
from tests.kit.server.clients import SmallEngine, settings
from tests.kit.server.probe import figures, server_pid, wait_for
from tests.kit.server.processes import descriptors, end_server, threads
from tiered_kv.errors import ProtocolError
from tiered_kv.server import protocol as m
from tiered_kv.server.server import CLIENTS_MAX

CLIENT = "tests.kit.faults.fuzzing_client"
CLIENTS_PER_PROCESS = 60
PEAK_MAX = 256 << 20
"""Of a server with an arena of 8 MiB, resident at its worst moment: Python, the libraries, and every bound of frames,
outboxes and sessions together."""


@pytest.mark.parametrize("direction", ["FromClient", "FromServer"])
def test_any_message_of_any_content_is_a_message_or_a_protocol_error(direction: str) -> None:
    union = getattr(m, direction)
    source = random.Random(seed())
    taken: set[str] = set()
    refused: set[str] = set()
    for _ in range(count("FRAME_FUZZ", 12_000) // 2):
        kind = source.choice(types_of(union))
        reader = m.FrameReader(union)
        data = damaged(source, body(source, kind, wrong_types=source.choice((0.0, 0.1))))
        try:
            for message in reader.feed(data):
                taken.add(type(message).__name__)
        except ProtocolError as exc:
            refused.add(kind.__name__)
            assert len(str(exc)) < 1000 and str(exc).isprintable()
        assert len(reader._buffer) <= len(data)
    names = {kind.__name__ for kind in types_of(union)}
    assert taken == names, "some message never came through: what is drawn for it is always refused"
    assert refused == names


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[SmallEngine]:
    """An honest engine beside the others; no test may end its session."""
    root = tmp_path / "cache"
    one = SmallEngine.start(settings(root), "witness")
    one.store(4)
    one.wait_hits(4)
    yield one
    one.close()
    end_server(root)


def peak_bytes(pid: int) -> int:
    """The most memory a process ever had resident."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def sessions(root: Path) -> list[str]:
    return [session["engine"] for session in figures(root)["sessions"]]


@pytest.mark.timeout(3600)
def test_a_real_server_outlives_clients_that_send_anything(witness: SmallEngine, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    pid = server_pid(root)
    clients, before = count("FUZZ_CLIENTS", 120), (descriptors(pid), threads(pid))
    assert CLIENTS_PER_PROCESS < CLIENTS_MAX
    sent = 0
    for number in range(-(-clients // CLIENTS_PER_PROCESS)):
        command = module_command(CLIENT, root, seed() + number, CLIENTS_PER_PROCESS)
        environment = module_environment()
        sent += int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
        wait_for(lambda: sessions(root) == ["witness/0"], "the others to be forgotten")
        assert witness.hits(4) == 4, f"processes={number + 1}"
    assert sent > clients
    assert server_pid(root) == pid and witness.client.generation == 0
    wait_for(lambda: (descriptors(pid), threads(pid)) <= before, "descriptors and threads as before")
    assert peak_bytes(pid) < PEAK_MAX
    log = (root / "server.log").read_text()
    assert "client refused" in log and "Traceback" not in log and "internal error" not in log
    witness.store(6, start=4)
    witness.wait_hits(6)
