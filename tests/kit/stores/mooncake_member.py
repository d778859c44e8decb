"""A machine of a Mooncake pool for tests: a client that gives memory, and reads and writes objects past any tier.

Run as a module it is the process: settings as the first line of JSON (``master``, ``segment_bytes``), then an order a
line, ``["put", key, hex]``, ``["begin", key, hex]``, ``["get", key]`` or ``["remove_all", ""]``, each answered by one.
:class:`Member` is the other end.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.kit.line_process import LineProcess
from tests.kit.module_process import module_command, module_environment
from tests.kit.server.processes import freeze


class Member(LineProcess):
    """The test's end; ``close`` leaves the pool in good order."""

    def __init__(self, master: str, segment_bytes: int, log: Path) -> None:
        environment = module_environment(MC_STORE_CLIENT_SETUP_RETRIES="3", MC_TCP_BIND_ADDRESS="127.0.0.1")
        settings = {"master": master, "segment_bytes": segment_bytes}
        super().__init__(module_command(__name__), log, environment, settings)

    def put(self, key: str, data: bytes) -> None:
        """Store an object in place of what is there."""
        self._say(["put", key, data.hex()])
        assert self._hear() == 0

    def begin(self, key: str, data: bytes) -> None:
        """Begin to store an object, and never end it."""
        self._say(["begin", key, data.hex()])
        assert self._hear() == [0]

    def get(self, key: str) -> bytes | None:
        """An object; None when it is not there."""
        self._say(["get", key])
        found = self._hear()
        return None if found is None else bytes.fromhex(found)

    def remove_all(self) -> int:
        """Remove every object of the pool; how many there were."""
        self._say(["remove_all", ""])
        return int(self._hear())

    def kill(self) -> None:
        """SIGKILL; the master finds out by itself."""
        self._process.kill()
        self.close()

    def freeze(self) -> None:
        """Stop it; no thread of it serves anything more when this returns."""
        freeze(self._process.pid)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)


def _main() -> None:
    from mooncake.store import MooncakeDistributedStore

    settings = json.loads(sys.stdin.readline())
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", settings["segment_bytes"], 16 << 20, "tcp", "", settings["master"])
    assert code == 0, code

    def answer(order: str, key: str, data: str = "") -> Any:
        if order == "put":
            return store.upsert(key, bytes.fromhex(data))
        if order == "begin":
            return store.batch_put_session_start([key], [len(data) // 2])
        if order == "remove_all":
            return store.remove_all(True)
        return store.get(key).hex() if store.get_size(key) >= 0 else None

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(*json.loads(line))), flush=True)
    store.close()
    os._exit(0)


if __name__ == "__main__":
    _main()
