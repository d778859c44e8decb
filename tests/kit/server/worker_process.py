"""A worker in a process of its own, told what to do line by line; arguments: a directory, an engine, a generation.

Prints ``joined <pid>``; then ``unmap`` lets go of the arena and says so, ``drop`` closes the socket and keeps the arena
mapped, ``decline`` says that it cannot take part, and the end of standard input ends the process.
"""

import os
import sys
from pathlib import Path

from tests.kit.server.clients import settings, worker_part
from tiered_kv.server.worker_client import WorkerClient, decline


def main() -> None:
    client = WorkerClient(settings(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3]), worker_part())
    print(f"joined {os.getpid()}", flush=True)
    for line in sys.stdin:
        if line.strip() == "unmap":
            client.leave()
        elif line.strip() == "drop":
            client._sock.close()
        elif line.strip() == "decline":
            decline(settings(Path(sys.argv[1])), sys.argv[2], "a test wants it")
        print("done", flush=True)


if __name__ == "__main__":
    main()
