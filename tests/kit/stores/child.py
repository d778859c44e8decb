"""A child process of a test that uses a store which its parent has opened."""

import os

from tiered_kv.tiers.object.store import ObjectStore


def read_by_child(store: ObjectStore, path: str) -> bytes:
    """What a forked child reads through the store that it was forked with; it ends well."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.write(writing, store.get(path) or b"none")
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return data
