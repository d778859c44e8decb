"""Nodes on one object store, without vLLM: where they store, what a chunk holds, and what a server says of its bucket.

A node is a ``Cache`` with host memory and, mostly, a directory of its own. Run as a module it is a node in a process of
its own: one JSON line with its settings, then one command a line, ``{"store": [seed, chunks]}`` or ``{"load": [seed,
chunks]}``, each answered by the number of chunks that were taken or came back right. :class:`NodeProcess` is the other
end.
"""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kit.module_process import module_command, module_environment
from tests.kit.s3 import S3
from tests.kit.server.probe import figures, wait_for
from tiered_kv import Cache
from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.keys.namespace import REQUIRED_FIELDS, SELF_TEST_NAMESPACE

PAGES = [LayerPage("layer.0", "BF16", (2, 16, 16), "HNC")]
"""A chunk is 4 KiB: what counts here are requests, not bytes."""

CHUNK = 64
NAMESPACE: dict[str, Any] = {
    name: "test" for name in REQUIRED_FIELDS if name not in ("geometry", "epoch", "chunk_tokens")
} | {"format_version": 1, "block_tokens": 16}
FOUND_S = 60.0
"""How long something may take to appear in the bucket or to be found there."""


@dataclass(frozen=True, slots=True)
class Place:
    """An object store that nodes share."""

    uri: str
    options: dict[str, str] = field(default_factory=dict, repr=False)

    def settings(self, directory: Path | None, **more: Any) -> dict[str, Any]:
        """A node's settings; without a directory it has no disk tier."""
        given: dict[str, Any] = {"storage_uri": self.uri, "host_bytes": "8MiB", "chunk_tokens": CHUNK, "drain_s": 30.0}
        if self.options:
            given["storage_options"] = self.options
        if directory is not None:
            given |= {"disk_path": str(directory), "disk_bytes": "100MiB"}
        return given | more


def s3_place(s3: S3, prefix: str, endpoint_url: str | None = None) -> Place:
    """A prefix of the test's bucket, reached directly or by another endpoint, e.g. a proxy's."""
    return Place(s3.uri(prefix), s3.options(endpoint_url))


@contextmanager
def node(settings: dict[str, Any]) -> Iterator[Cache]:
    """A node in this process, for the length of a ``with`` block."""
    with Cache(settings, NAMESPACE, PAGES) as cache:
        yield cache


def tokens(seed: int, chunks: int) -> list[int]:
    """A prompt that no other seed shares a chunk with."""
    return [1_000_000 + seed, *range(chunks * CHUNK - 1)]


def payload(cache: Cache, seed: int, index: int) -> bytes:
    return random.Random(f"{seed} {index}").randbytes(cache.chunk_bytes)


def store(cache: Cache, seed: int, chunks: int) -> int:
    """Store a prompt; how many of its chunks were taken."""
    return cache.store(tokens(seed, chunks), lambda index: payload(cache, seed, index))


def load(cache: Cache, seed: int, chunks: int) -> int:
    """Load a prompt; how many chunks came. Each has the bytes that were stored."""
    with cache.load(tokens(seed, chunks)) as prefix:
        for index, chunk in enumerate(prefix.chunks):
            assert chunk == payload(cache, seed, index), f"wrong bytes. seed={seed} index={index}"
        return len(prefix.chunks)


def wait_loaded(cache: Cache, seed: int, chunks: int) -> None:
    """Until the whole prompt can be loaded."""
    wait_for(lambda: load(cache, seed, chunks) == chunks, f"{chunks} chunks of prompt {seed}", deadline_s=FOUND_S)


def object_figures(root: Path) -> dict[str, Any]:
    """What the server of a directory says of its object tier."""
    (found,) = [tier for tier in figures(root)["tiers"] if tier["name"] == "object"]
    assert isinstance(found, dict)
    return found


def wait_uploaded(root: Path) -> None:
    """Until the server of a directory has written everything everywhere."""
    wait_for(lambda: figures(root)["pending_writes"] == 0, "uploads", deadline_s=FOUND_S)


def blob_paths(s3: S3, prefix: str) -> list[str]:
    """Paths of the blobs in the bucket, below ``prefix``; a self-test's own does not count."""
    return sorted(
        path
        for path in s3.paths(prefix)
        if path.endswith(".safetensors") and not path.startswith(SELF_TEST_NAMESPACE.hex())
    )


class NodeProcess:
    """A node in a process of its own, which can be killed."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            module_command(__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=module_environment(),
        )
        assert self._ask(settings) == "open"

    def store(self, seed: int, chunks: int) -> int:
        return int(self._ask({"store": [seed, chunks]}))

    def load(self, seed: int, chunks: int) -> int:
        return int(self._ask({"load": [seed, chunks]}))

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        self._process.kill()
        self._process.communicate()

    def _ask(self, message: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the node's process ended"
        return json.loads(line)


def _main() -> None:
    with node(json.loads(sys.stdin.readline())) as cache:
        print(json.dumps("open"), flush=True)
        for line in sys.stdin:
            ((order, arguments),) = json.loads(line).items()
            print(json.dumps({"store": store, "load": load}[order](cache, *arguments)), flush=True)


if __name__ == "__main__":
    _main()
