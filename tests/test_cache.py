"""The library's door: what was stored comes back, from this process, another one, and after a restart."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.kit.server.probe import wait_for
from tests.kit.server.processes import stopped_server
from tests.kit.storage.disk_probe import blob_files
from tiered_kv import Cache
from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.errors import Closed, ConfigError, TierUnavailable
from tiered_kv.keys.namespace import FORMAT_VERSION, REQUIRED_FIELDS

PAGES = [LayerPage(f"layer.{i}", "BF16", (2, 16, 64), "HNC") for i in range(3)]
CHUNK = 64
NAMESPACE: dict[str, Any] = {
    name: "test" for name in REQUIRED_FIELDS if name not in ("geometry", "epoch", "chunk_tokens")
} | {"format_version": 1, "block_tokens": 16}


def settings(root: Path, **more: Any) -> dict[str, Any]:
    return {"storage_uri": f"file://{root}", "host_bytes": "8MiB", "disk_bytes": "100MiB", "chunk_tokens": CHUNK} | more


def payload(cache: Cache, index: int, seed: int = 0) -> bytes:
    return random.Random(1000 * seed + index).randbytes(cache.chunk_bytes)


def test_stored_prefix_is_loaded_and_other_tokens_are_not(tmp_path: Path) -> None:
    tokens = list(range(10 * CHUNK + 5))
    with Cache(settings(tmp_path), NAMESPACE, PAGES) as cache:
        assert cache.store(tokens, lambda i: payload(cache, i)) == 10
        with cache.load(tokens) as prefix:
            assert prefix.tokens == 10 * CHUNK
            assert [bytes(chunk) for chunk in prefix.chunks] == [payload(cache, i) for i in range(10)]
        with cache.load([*tokens[: 3 * CHUNK], 7, *tokens[3 * CHUNK + 1 :]]) as prefix:
            assert prefix.tokens == 3 * CHUNK
        with cache.load([1, *tokens[1:]]) as prefix:
            assert prefix.tokens == 0


@pytest.mark.parametrize(
    ("more", "pages"), [({"model": object()}, PAGES), ({"kv_encoding": object()}, PAGES), ({}, [object()])]
)
def test_what_cannot_be_written_down_leaves_no_server_behind(tmp_path: Path, more: Any, pages: Any) -> None:
    """Its thread would keep the directory, and the process from its end."""
    with pytest.raises((TypeError, AttributeError)):
        Cache(settings(tmp_path), NAMESPACE | more, pages)
    assert "tiered_kv-server" not in [thread.name for thread in threading.enumerate()]


def test_a_cache_that_is_closed_while_a_prefix_is_read_says_so_and_leaves_no_server_behind(tmp_path: Path) -> None:
    tokens = list(range(3 * CHUNK))
    cache = Cache(settings(tmp_path), NAMESPACE, PAGES)
    cache.store(tokens, lambda i: payload(cache, i))
    with cache.load(tokens) as prefix:
        with pytest.raises(BufferError):
            cache.close()
        assert [bytes(chunk) for chunk in prefix.chunks] == [payload(cache, i) for i in range(len(prefix.chunks))]
        assert "tiered_kv-server" not in [thread.name for thread in threading.enumerate()]
    cache.close()


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_forked_child_ends_nothing_of_its_parents_cache_and_has_none_itself(tmp_path: Path, goes_on: bool) -> None:
    """It had the parent's socket: leaving a block there ended the lease of what the parent still read."""
    tokens = list(range(4 * CHUNK))
    with Cache(settings(tmp_path), NAMESPACE, PAGES) as cache:
        cache.store(tokens, lambda i: payload(cache, i))
        reading = cache.load(tokens)
        prefix = reading.__enter__()
        child = os.fork()
        if not child:
            ends = "other"
            with contextlib.suppress(BaseException):
                reading.__exit__(None, None, None)
                ends = "left"
                with contextlib.suppress(Closed):
                    ends = "served" if goes_on and cache.store(tokens, lambda i: payload(cache, i)) else "left"
                cache.close()
            os._exit(ends != "left")
        assert os.waitpid(child, 0)[1] == 0
        for number in range(1, 45):  # as much as host memory holds
            cache.store([number, *tokens[1:]], lambda i, seed=number: payload(cache, i, seed))
        assert [bytes(chunk) for chunk in prefix.chunks] == [payload(cache, i) for i in range(4)]
        reading.__exit__(None, None, None)


FORK_AND_DIE = """
import os, signal, sys, time
from pathlib import Path
from tests.kit.server.probe import wait_written
from tests.test_cache import CHUNK, NAMESPACE, PAGES, Cache, payload, settings
root = Path(sys.argv[1])
cache = Cache(settings(root), NAMESPACE, PAGES)
cache.store(list(range(4 * CHUNK)), lambda i: payload(cache, i))
wait_written(root)  # or a thread of the server has a slot, and a child what that has
if not os.fork():
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
sys.stdin.read()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_child_keeps_no_memory_nor_the_directory_of_a_server_in_its_parent(tmp_path: Path) -> None:
    """Whoever came after a parent that was killed was not answered; and what a parent closed kept its memory."""
    command = [sys.executable, "-c", FORK_AND_DIE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        child = int(parent.stdout.readline())
        try:
            assert not slabs(child)
            parent.stdin.close()
            assert parent.wait() == -signal.SIGKILL
            with Cache(settings(tmp_path), NAMESPACE, PAGES) as cache, cache.load(list(range(4 * CHUNK))) as prefix:
                assert [bytes(chunk) for chunk in prefix.chunks] == [payload(cache, i) for i in range(4)]
        finally:
            os.kill(child, signal.SIGKILL)


def slabs(pid: int) -> set[str]:
    """The slabs that a process has mapped, by their inodes: some that another test has left may be among this one's."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:tiered_kv-slab" in line}


def wait_for_blobs(root: Path, count: int) -> None:
    end_s = time.monotonic() + 60
    while len(blob_files(root)) < count:
        assert time.monotonic() < end_s, "chunks that were stored are not written"
        time.sleep(0.01)


def test_second_store_takes_only_what_is_new(tmp_path: Path) -> None:
    tokens = list(range(8 * CHUNK))
    asked: list[int] = []

    with Cache(settings(tmp_path), NAMESPACE, PAGES) as cache:

        def counted(index: int) -> bytes:
            asked.append(index)
            return payload(cache, index)

        assert cache.store(tokens[: 5 * CHUNK], counted) == 5
        assert cache.store(tokens, counted) == 3

    assert asked == list(range(8))


def test_more_than_host_memory_comes_back_from_disk_after_a_restart(tmp_path: Path) -> None:
    prompts = [[seed, *range(20 * CHUNK - 1)] for seed in range(8)]
    stored = []
    with Cache(settings(tmp_path), NAMESPACE, PAGES) as cache:
        for n, tokens in enumerate(prompts):
            stored.append(cache.store(tokens, lambda i, n=n: payload(cache, i, n)))
            wait_for_blobs(tmp_path, sum(stored))  # else a slow disk is a reason to evict what was not written yet

    with Cache(settings(tmp_path), NAMESPACE, PAGES) as cache:
        for seed, prompt in enumerate(prompts):
            with cache.load(prompt) as prefix:
                assert prefix.tokens == stored[seed] * CHUNK
                assert [bytes(c) for c in prefix.chunks] == [payload(cache, i, seed) for i in range(stored[seed])]

    assert stored == [20] * 8


def test_two_caches_of_one_directory_share_one_server(tmp_path: Path) -> None:
    tokens = list(range(4 * CHUNK))
    with Cache(settings(tmp_path), NAMESPACE, PAGES) as first, Cache(settings(tmp_path), NAMESPACE, PAGES) as second:
        first.store(tokens, lambda i: payload(first, i))
        with second.load(tokens) as prefix:
            assert [bytes(chunk) for chunk in prefix.chunks] == [payload(first, i) for i in range(4)]


SERVE = """
import sys
from pathlib import Path
from tests.test_cache import NAMESPACE, PAGES, Cache, settings
with Cache(settings(Path(sys.argv[1])), NAMESPACE, PAGES):
    print("up", flush=True)
    sys.stdin.read()
"""


def test_a_stopped_server_is_waited_for_until_a_bound_and_serves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.cache.ANSWER_S", 0.2)
    tokens = list(range(4 * CHUNK))
    command = [sys.executable, "-c", SERVE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"up\n"
        with Cache(settings(tmp_path), NAMESPACE, PAGES) as cache:
            assert cache.store(tokens, lambda i: payload(cache, i)) == 4
            with stopped_server(tmp_path):
                with pytest.raises(TierUnavailable, match=r"has said nothing for 0\.2 s"), cache.load(tokens):
                    pass
                with pytest.raises(TierUnavailable, match=r"has said nothing for 0\.2 s"):
                    cache.store([7, *tokens], lambda i: payload(cache, i))
            monkeypatch.setattr("tiered_kv.cache.ANSWER_S", 60)
            with cache.load(tokens) as prefix:
                assert [bytes(chunk) for chunk in prefix.chunks] == [payload(cache, i) for i in range(4)]


def test_a_load_that_is_interrupted_while_it_waits_leaves_room_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Ctrl-C left leased would stay so for as long as the cache is open; its leases are a share of host memory."""
    with Cache(settings(tmp_path), NAMESPACE, PAGES) as cache:
        chunks = (2 << 20) // cache.chunk_bytes
        prompts = [[first] * chunks * CHUNK for first in range(3)]
        assert [cache.store(prompt, lambda i: payload(cache, i)) for prompt in prompts] == [chunks] * 3
        wait_for_blobs(tmp_path, 3 * chunks)

        def interrupt(_seconds: float) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("tiered_kv.cache.time.sleep", interrupt)
            for prompt in prompts[:2]:
                with pytest.raises(KeyboardInterrupt), cache.load(prompt):
                    pass
        with cache.load(prompts[2], timeout_s=10) as prefix:
            assert prefix.tokens == len(prompts[2])


@pytest.mark.parametrize("read", [partial(numpy.frombuffer, dtype=numpy.uint8), memoryview], ids=["array", "view"])
def test_a_chunk_that_is_read_after_its_block_keeps_its_bytes_and_then_leaves_room_for_the_next(
    tmp_path: Path, read: Callable[[memoryview], Any]
) -> None:
    def keep(prompt: list[int]) -> None:
        with cache.load(prompt) as prefix:
            kept.append((read(prefix.chunks[-1]), len(prefix.chunks) - 1))

    kept: list[Any] = []
    with Cache(settings(tmp_path), NAMESPACE, PAGES) as cache:
        chunks = (2 << 20) // cache.chunk_bytes
        prompts = [[first] * chunks * CHUNK for first in range(5)]
        assert [cache.store(prompt, lambda i: payload(cache, i)) for prompt in prompts[:2]] == [chunks] * 2
        for prompt in prompts[:2]:
            with pytest.raises(BufferError, match="still read"):
                keep(prompt)
        for stored, prompt in enumerate(prompts[2:], 3):
            assert cache.store(prompt, lambda i: payload(cache, i, seed=1)) == chunks
            wait_for_blobs(tmp_path, stored * chunks)  # else a slow disk is a reason to evict what was not written yet
        assert [bytes(chunk) for chunk, _ in kept] == [payload(cache, index) for _, index in kept]
        kept.clear()
        with cache.load(prompts[-1], timeout_s=10) as prefix:
            assert prefix.tokens == len(prompts[-1])


@pytest.mark.parametrize("end", [KeyboardInterrupt, ValueError, GeneratorExit])
def test_what_ends_a_block_is_told_though_a_chunk_is_still_read(tmp_path: Path, end: type[BaseException]) -> None:
    """The block's own names still read it then, so that an interrupt came out as an error of the cache."""
    tokens = list(range(3 * CHUNK))

    def read() -> None:
        with cache.load(tokens) as prefix:
            chunk = numpy.frombuffer(prefix.chunks[0], numpy.uint8)
            raise end(f"in the middle of {chunk.size} bytes")

    with Cache(settings(tmp_path), NAMESPACE, PAGES) as cache:
        cache.store(tokens, lambda i: payload(cache, i))
        with pytest.raises(end, match="in the middle of"):
            read()
        with cache.load(tokens) as prefix:
            assert [bytes(chunk) for chunk in prefix.chunks] == [payload(cache, i) for i in range(3)]


def test_a_cache_is_closed_whose_chunk_nobody_reads_any_more(tmp_path: Path) -> None:
    """Before and after: what was kept for a reader that has gone was not looked at by a close."""
    tokens, others = list(range(3 * CHUNK)), slabs(os.getpid())
    cache = Cache(settings(tmp_path), NAMESPACE, PAGES)
    own = slabs(os.getpid()) - others
    cache.store(tokens, lambda i: payload(cache, i))
    with pytest.raises(BufferError, match="still read"), cache.load(tokens) as prefix:
        early = numpy.frombuffer(prefix.chunks[0], numpy.uint8)
    with pytest.raises(BufferError, match="still read"), cache.load(tokens) as prefix:
        late = numpy.frombuffer(prefix.chunks[0], numpy.uint8)
    del early
    with pytest.raises(BufferError) as told:  # whoever keeps the error keeps no memory by that
        cache.close()
    assert bytes(late[:16]) == payload(cache, 0)[:16]
    assert own & slabs(os.getpid())
    del late
    cache.close()
    assert not own & slabs(os.getpid())
    del told


def test_other_namespace_never_hits(tmp_path: Path) -> None:
    tokens = list(range(4 * CHUNK))
    with Cache(settings(tmp_path), NAMESPACE, PAGES) as cache:
        cache.store(tokens, lambda i: payload(cache, i))
        with Cache(settings(tmp_path), NAMESPACE | {"weights": "other"}, PAGES) as other:
            with other.load(tokens) as prefix:
                assert prefix.tokens == 0
            with cache.load(tokens) as prefix:
                assert prefix.tokens == 4 * CHUNK


def load_all(cache: Cache, tokens: list[int], seed: int, count: int) -> bool:
    """Whether all chunks came; those that did have the right bytes."""
    with cache.load(tokens) as prefix:
        assert [bytes(chunk) for chunk in prefix.chunks] == [payload(cache, i, seed) for i in range(len(prefix.chunks))]
        return len(prefix.chunks) == count


def test_the_format_version_is_ours_whatever_a_caller_wrote_down(tmp_path: Path) -> None:
    """Else a caller's old number would name the blobs of that version, which nobody can read or replace."""
    tokens = list(range(3 * CHUNK))
    with Cache(settings(tmp_path), NAMESPACE | {"format_version": 1}, PAGES) as cache:
        cache.store(tokens, lambda i: payload(cache, i))
    without = {name: value for name, value in NAMESPACE.items() if name != "format_version"}
    with Cache(settings(tmp_path), without, PAGES) as cache, cache.load(tokens) as prefix:
        assert prefix.tokens == 3 * CHUNK
    (record,) = (tmp_path / "blobs").glob("*/namespace.json")
    assert f'"format_version": {FORMAT_VERSION}' in record.read_text()


def test_records_of_namespaces_that_kept_nothing_go_when_the_directory_is_opened_again(tmp_path: Path) -> None:
    for version in range(3):
        with Cache(settings(tmp_path), NAMESPACE | {"model": f"version {version}"}, PAGES) as cache:
            if version == 1:
                cache.store(list(range(CHUNK)), lambda i: payload(cache, i))
    with Cache(settings(tmp_path), NAMESPACE | {"model": "version 1"}, PAGES) as cache:
        records = [record.read_text() for record in (tmp_path / "blobs").glob("*/namespace.json")]
        assert len(records) == 1 and '"version 1"' in records[0]
        with cache.load(list(range(CHUNK))) as prefix:
            assert prefix.tokens == CHUNK


def test_chunks_of_another_size_get_their_share_of_a_full_arena(tmp_path: Path) -> None:
    large = [LayerPage(f"layer.{i}", "BF16", (2, 16, 256), "HNC") for i in range(3)]
    prompts = [[seed, *range(20 * CHUNK - 1)] for seed in range(8)]
    with Cache(settings(tmp_path), NAMESPACE, PAGES) as small_chunks:
        for seed, prompt in enumerate(prompts):
            small_chunks.store(prompt, lambda i, seed=seed: payload(small_chunks, i, seed))
        with Cache(settings(tmp_path), NAMESPACE, large) as large_chunks:
            tokens = list(range(3 * CHUNK))
            # While memory moves from one size to the other, stores and promotions may be dropped: try until it has.
            wait_for(lambda: is_stored(large_chunks, tokens, 0, 3), "room for chunks of the second size")
        wait_for(lambda: is_stored(small_chunks, prompts[5], 5, 20), "chunks of the first size to come back")


def is_stored(cache: Cache, tokens: list[int], seed: int, count: int) -> bool:
    """Whether all chunks are held, once they were stored again."""
    cache.store(tokens, lambda i: payload(cache, i, seed))
    return load_all(cache, tokens, seed, count)


def test_payload_of_the_wrong_size_is_refused_and_costs_no_slot(tmp_path: Path) -> None:
    tokens = list(range(2 * CHUNK))
    with Cache(settings(tmp_path), NAMESPACE, PAGES) as cache:
        for _ in range(100):
            with pytest.raises(ValueError, match="observed=3"):
                cache.store(tokens, lambda _i: b"abc")
        assert cache.store(tokens, lambda i: payload(cache, i)) == 2


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 4 are needed"):
        Cache(settings(tmp_path, host_bytes="100KiB"), NAMESPACE, PAGES)
    with pytest.raises(ConfigError, match="block_tokens"):
        Cache(settings(tmp_path), NAMESPACE | {"block_tokens": None}, PAGES)


def test_closed_cache_says_so(tmp_path: Path) -> None:
    cache = Cache(settings(tmp_path), NAMESPACE, PAGES)
    cache.close()
    cache.close()
    with pytest.raises(Closed):
        cache.store([1], lambda _i: b"")


def test_cache_needs_neither_torch_nor_vllm(tmp_path: Path) -> None:
    code = "import sys; from tiered_kv import Cache; sys.exit(any(m in sys.modules for m in ('torch', 'vllm')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=tmp_path).returncode == 0
