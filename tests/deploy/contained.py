"""Server and client without privileges: run by test_containers.py as a user of a namespace. Prints one JSON line."""

import json
import os
import sys
from contextlib import closing
from pathlib import Path

from tests.kit.server.clients import SmallEngine, settings
from tests.kit.server.probe import wait_ended, wait_written
from tests.kit.server.processes import start_serve

CHUNKS = 20


def main() -> None:
    root = Path(sys.argv[1]) / "kv"
    config = settings(root)
    with closing(SmallEngine.start(config)) as engine:  # starts a server by itself
        engine.store(CHUNKS)
        engine.wait_hits(CHUNKS)
        hits = engine.hits(CHUNKS)
        wait_written(root)
    wait_ended(root)
    server, line = start_serve(f"file://{root}", "--host-bytes", "8MiB", "--disk-bytes", "160MiB")
    assert line.startswith("serving "), server.communicate()[1]
    with closing(SmallEngine.start(config)) as engine:
        again = engine.hits(CHUNKS)
    server.terminate()
    server.communicate()
    (capabilities,) = [
        int(line.split()[1], 16)
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("CapEff:")
    ]
    seen = {"uid": os.getuid(), "capabilities": capabilities, "hits": hits, "hits_after_restart": again}
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
