"""What a server remembers of each chunk it knows of: the figure that sizing and the soak count with."""

import gc
import hashlib
import importlib
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest

import tiered_kv
from tests.soak.judgement import KNOWN_CHUNK_MIB
from tiered_kv.engine.performer import JobResult
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.tiering.eviction import EvictionOrder
from tiered_kv.tiering.index import BlobState, Entry, HostState, Index
from tiered_kv.tiering.lru import Lru
from tiered_kv.tiering.multi_queue import MultiQueue, _Group
from tiered_kv.tiering.quotas import Quotas
from tiered_kv.tiering.types import (
    Copy,
    Delete,
    Grow,
    Job,
    Outcome,
    Probe,
    Read,
    ReadRow,
    RowUse,
    Seal,
    Write,
    WriteRow,
)

CHUNKS = 20_000
PREFIX = 6


def digest(number: int, length: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8)).digest()[:length]


def fill(index: Index, order: EvictionOrder) -> None:
    """Chunks in a tier that remembers their order, in short prompts."""
    namespace, parent = digest(0, 16), digest(0, 16)
    for number in range(CHUNKS):
        position = number % PREFIX
        key = digest(1 + number, 16)
        record = ChunkRecord(
            namespace,
            key,
            bytes(bytearray(parent)) if position else namespace,
            position,
            digest(1 + CHUNKS + number, 32),
        )
        entry = index.add(record)
        index.set_blob_state(entry, 2, BlobState.PRESENT)
        index.set_blob_bytes(entry, 2, 2 << 20)
        order.add(entry)
        parent = key


@pytest.mark.parametrize("policy", [MultiQueue, Lru])
def test_the_garbage_collector_walks_no_chunk(policy):
    """Every object that it does walk is walked in every full collection, while all lookups wait."""
    index = Index(3)
    order = EvictionOrder(2, index, Quotas(), policy)
    gc.collect()
    before = len(gc.get_objects())
    fill(index, order)
    gc.collect()
    assert len(gc.get_objects()) - before < CHUNKS / PREFIX + 100, "more than one object for each prompt"
    assert not any(map(gc.is_tracked, index.entries()))
    assert not any(map(gc.is_tracked, index._entries._parts))


ATOMS = {bool, int, str, bytes, float, None, type(None), BlobState, HostState, Outcome}
LINKS = {
    (Entry, "kin"): "leads to chunks whose position is higher by one (Index.check_integrity)",
    (_Group, "newer"): "a ring that the queue takes apart when it goes; a group outside it is referred to by nobody",
    (_Group, "older"): "the same",
}
"""Fields of structs without garbage collection that lead to such structs, and why none of them is freed too late."""


def untracked_structs() -> set[type[msgspec.Struct]]:
    """Of the whole package, by its text: not all of it can be imported everywhere."""
    package = Path(tiered_kv.__file__).parent
    paths = [path for path in package.rglob("*.py") if "gc=False" in path.read_text()]
    modules = [
        importlib.import_module(".".join(path.relative_to(package.parent).with_suffix("").parts)) for path in paths
    ]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return {one for one in found if issubclass(one, msgspec.Struct) and not one.__struct_config__.gc}


def leads_to(hint: object) -> Iterator[object]:
    """What a field may refer to, through whatever contains it."""
    parts = get_args(hint)
    if not parts:
        yield hint
    for part in parts:
        if part is not Ellipsis and not isinstance(part, msgspec.Meta):
            yield from leads_to(part)


def test_structs_that_the_garbage_collector_does_not_know_form_no_cycle():
    """A field that is added has to hold values that lead nowhere, or needs a reason here."""
    structs = untracked_structs()
    assert {Entry, _Group, ChunkRecord} <= structs
    links = set()
    for struct in structs:
        for name, hint in get_type_hints(struct).items():
            leaves = set(leads_to(hint))
            assert leaves <= ATOMS | structs, f"{struct.__name__}.{name} may lead back: {leaves - ATOMS - structs}"
            links |= {(struct, name)} if leaves & {Entry, _Group} else set()
    assert links == LINKS.keys()


def test_chunks_that_go_are_freed_without_the_garbage_collector():
    """It does not know of them: what led back to itself would stay for ever."""
    index = Index(3)
    order = EvictionOrder(2, index, Quotas(), MultiQueue)
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        fill(index, order)
        full_bytes = tracemalloc.get_traced_memory()[0]
        for entry in reversed(index.entries()):
            order.remove(entry)
            index.set_blob_state(entry, 2, BlobState.ABSENT)
            index.remove_if_gone(entry)
        del entry
        left_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert len(index) == 0 and left_bytes < full_bytes / 5, "more than the empty tables is left"


def test_a_very_long_prompt_and_its_order_are_freed(tmp_path):
    """Chunks that refer to the next one are freed one within the other, unless somebody takes care.

    In a process that may die of it; added as by a scan that finds the last one first.
    """
    script = tmp_path / "script.py"
    script.write_text(
        "import gc, tracemalloc\n"
        "from tiered_kv.keys.chunk_record import ChunkRecord\n"
        "from tiered_kv.tiering.eviction import EvictionOrder\n"
        "from tiered_kv.tiering.index import Index\n"
        "from tiered_kv.tiering.multi_queue import MultiQueue\n"
        "from tiered_kv.tiering.quotas import Quotas\n"
        "def key(number): return number.to_bytes(16)\n"
        "tracemalloc.start()\n"
        "index = Index(2)\n"
        "order = EvictionOrder(1, index, Quotas(), MultiQueue)\n"
        "for number in range(300_000, 0, -1):\n"
        "    record = ChunkRecord(key(0), key(number), key(number - 1), number - 1, bytes(32))\n"
        "    entry = index.add(record)\n"
        "    if number % 100 == 0: order.add(entry)\n"
        "del entry, record, index, order\n"
        "gc.collect()\n"
        "print(tracemalloc.get_traced_memory()[0])\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10 << 20


@pytest.mark.parametrize("is_parent_first", [True, False])
def test_a_chunk_has_its_parents_key_in_common_with_it(is_parent_first):
    """What a client sends, or an index on disk has, is decoded anew for each record."""
    index = Index(2)
    root, leaf = digest(1, 16), digest(2, 16)
    records = [
        ChunkRecord(digest(0, 16), root, digest(0, 16), 0, bytes(32)),
        ChunkRecord(digest(0, 16), leaf, bytes(bytearray(root)), 1, bytes(32)),
    ]
    entries = [index.add(record) for record in (records if is_parent_first else records[::-1])]
    assert {entry.record for entry in entries} == set(records)
    assert index.get(leaf).record.parent is index.get(root).record.key
    index.check_integrity()


def test_a_known_chunk_takes_about_half_a_kilobyte():
    """In a tier that remembers its order: 10,000,000 chunks of a bucket would take 5 GB, so they are bounded."""
    index = Index(3)
    order = EvictionOrder(2, index, Quotas(), MultiQueue)
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        fill(index, order)
        gc.collect()
        each_bytes = (tracemalloc.get_traced_memory()[0] - before) / CHUNKS
    finally:
        tracemalloc.stop()
    assert 0.8 * KNOWN_CHUNK_MIB <= each_bytes / 2**20 <= 1.05 * KNOWN_CHUNK_MIB


def test_jobs_that_wait_are_not_walked_either():
    """A client that fills the cache has the server take in their ends for seconds, 20,000 and more of them."""
    record = ChunkRecord(digest(0, 16), digest(1, 16), digest(0, 16), 0, bytes(32))
    jobs = [
        Seal(record, 1 << 20),
        Write(1, record, 1 << 20),
        Read(1, record, 1 << 20),
        Delete(1, record, 1 << 20),
        Grow(1, 1 << 20),
        Copy(2, 1, record, is_asked_first=True),
        Probe(2, (record,)),
        WriteRow(1, record, RowUse(1, 2, 3)),
        ReadRow(1, record, RowUse(1, 2, 3)),
    ]
    assert {type(job) for job in jobs} == set(Job.__args__), "a kind of job is not looked at here"
    ended = [(job, JobResult(Outcome.OK, b"tag", "somebody")) for job in jobs]
    gc.collect()
    assert not any(map(gc.is_tracked, (*jobs, *ended)))
