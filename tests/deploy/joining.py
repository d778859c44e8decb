"""An engine in another process, which sees other directories: run by test_manifests.py with its settings as JSON."""

import json
import sys
from contextlib import closing

from tests.kit.server.clients import SmallEngine
from tiered_kv.config import Config

CHUNKS = 6


def main() -> None:
    with closing(SmallEngine.start(Config.from_mapping(json.loads(sys.argv[1])))) as engine:
        engine.store(CHUNKS)
        engine.wait_hits(CHUNKS)
        print(f"{engine.hits(CHUNKS)} hits")


if __name__ == "__main__":
    main()
