"""Ancestry, holes, order of eviction and the memory of what one LIST found."""

import random

import pytest

from tests.sim.bucket.world import Chain
from tiered_kv.fleet.listing import Listing
from tiered_kv.keys.chunk_record import ChunkRecord
from tiered_kv.keys.naming import BlobName
from tiered_kv.keys.state_keys import state_records

SPACE, OTHER = b"\x01" * 16, b"\x02" * 16


def inventory_of(*listed):
    """From (chain, index, modified_s)."""
    inventory = Listing()
    for chain, index, modified_s in listed:
        inventory.add(chain.name(index), 100, modified_s)
    inventory.seal()
    inventory.use_prefixes()
    return inventory


def indexes(inventory, rows):
    return [inventory.name(row).chunk_index for row in rows]


def oldest(inventory, excess_bytes, spaces=None, epoch_s=10.0):
    return inventory.oldest(spaces, excess_bytes, epoch_s, bytearray(len(inventory)))


@pytest.mark.parametrize("seed", range(20))
def test_every_key_is_found_again_and_no_other(seed):
    draw = random.Random(seed)
    chains = [Chain(draw.choice([SPACE, OTHER]), number) for number in range(5)]
    names = [chain.name(index) for chain in chains for index in range(draw.randrange(60))]
    draw.shuffle(names)
    inventory = Listing()
    for name in names:
        inventory.add(name, 1, 0)
    inventory.seal()
    assert [inventory.name(inventory.find(name.key)) for name in names] == names
    assert inventory.find(bytes(16)) < 0


def test_an_empty_list_has_nothing_to_find_or_evict():
    inventory = inventory_of()
    assert inventory.find(bytes(16)) < 0 and oldest(inventory, 10) == [] and inventory.holes(None, 1e9) == []


def test_a_use_of_a_chunk_is_a_use_of_its_prefix():
    chain, other = Chain(SPACE, 0), Chain(SPACE, 1)
    inventory = Listing()
    for index in range(4):
        inventory.add(chain.name(index), 100, 0)
        inventory.add(other.name(index), 100, 50)
    inventory.seal()
    inventory.use(chain.key(2), 100)
    inventory.use(chain.key(9), 100)  # not in the bucket
    inventory.use_prefixes()
    rows = oldest(inventory, 800)
    names = [inventory.name(row) for row in rows]
    assert names == [chain.name(3), *(other.name(i) for i in (3, 2, 1, 0)), *(chain.name(i) for i in (2, 1, 0))]


def test_within_an_epoch_the_deepest_goes_first_and_no_more_than_needed():
    chain = Chain(SPACE, 0)
    inventory = inventory_of(*((chain, index, 100 + index) for index in range(8)))
    assert indexes(inventory, oldest(inventory, 250)) == [7, 6, 5]
    assert oldest(inventory, 0) == []
    assert len(oldest(inventory, 10**9)) == 8


def test_only_wanted_namespaces_are_evicted():
    inventory = inventory_of((Chain(SPACE, 0), 0, 100), (Chain(OTHER, 0), 0, 0))
    assert [inventory.name(row).namespace for row in oldest(inventory, 10**9, {SPACE})] == [SPACE]


def test_holes_go_with_everything_below_them_leaves_first():
    chain = Chain(SPACE, 0)
    inventory = inventory_of(*((chain, index, 0) for index in (0, 1, 3, 4, 6)))
    assert indexes(inventory, inventory.holes(None, 10)) == [6, 4, 3]
    assert inventory.holes({OTHER}, 10) == []


def test_a_young_blob_keeps_what_is_above_it():
    chain = Chain(SPACE, 0)
    inventory = inventory_of((chain, 3, 0), (chain, 4, 0), (chain, 5, 20), (chain, 6, 0))
    assert indexes(inventory, inventory.holes(None, 10)) == [6]


def test_names_that_lie_about_their_ancestry_are_holes():
    a, b = b"\x0a" * 16, b"\x0b" * 16
    inventory = Listing()
    inventory.add(BlobName(SPACE, a, b, 1), 1, 0)  # a circle
    inventory.add(BlobName(SPACE, b, a, 1), 1, 0)
    inventory.add(BlobName(SPACE, b"\x0c" * 16, a, 0), 1, 0)  # a first chunk with a parent
    inventory.add(BlobName(OTHER, b"\x0d" * 16, SPACE, 0), 1, 0)
    inventory.seal()
    inventory.use_prefixes()
    assert sorted(inventory.holes(None, 10)) == [0, 1, 2, 3]


def test_what_expired_is_taken_once():
    chain = Chain(SPACE, 0)
    inventory = inventory_of((chain, 0, 0), (chain, 1, 0), (Chain(SPACE, 1), 0, 100))
    taken = bytearray(3)
    assert indexes(inventory, inventory.expired(None, 50, taken)) == [1, 0]
    assert inventory.expired(None, 50, taken) == []
    assert indexes(inventory, inventory.oldest(None, 10**9, 10.0, taken)) == [0]


def test_pins_mark_their_prefix_and_nothing_else():
    chain, other = Chain(SPACE, 0), Chain(SPACE, 1)
    listed = [(chain, index, 0) for index in (0, 1, 2, 3)] + [(other, index, 0) for index in (1, 2, 3)]
    inventory = inventory_of(*listed)
    marked = inventory.with_prefixes([chain.key(1), other.key(2), chain.key(9)])
    assert sum(marked) == 4
    names = {inventory.name(row) for row in range(len(inventory)) if marked[row]}
    assert names == {chain.name(0), chain.name(1), other.name(1), other.name(2)}


def test_a_pinned_blob_and_what_is_above_it_are_no_holes_to_collect():
    chain = Chain(SPACE, 0)
    inventory = inventory_of(*((chain, index, 0) for index in (0, 2, 3, 4, 5)))
    assert indexes(inventory, inventory.holes(None, 10, inventory.with_prefixes([chain.key(3)]))) == [5, 4]
    assert indexes(inventory, inventory.holes(None, 10, bytearray(5))) == [5, 4, 3, 2]


def test_a_pin_marks_the_states_along_its_prefix_and_no_others():
    chain, other = Chain(SPACE, 0), Chain(SPACE, 1)
    along = [part for index in (1, 2) for part in state(chain.name(index))]
    beyond = [*state(chain.name(4)), *state(other.name(0))]
    inventory = Listing()
    for name in (*(one.name(index) for one in (chain, other) for index in range(5)), *along, *beyond):
        inventory.add(name, 100, 0)
    inventory.seal()
    marked = inventory.with_prefixes([chain.key(3)])
    found = {inventory.name(row) for row in range(len(inventory)) if marked[row]}
    assert found == {*(chain.name(index) for index in range(4)), *along}
    assert not any(inventory.with_prefixes([]))


def state(name):
    """The parts of the state behind a chunk."""
    chunk = ChunkRecord(name.namespace, name.key, name.parent, name.chunk_index, bytes(32))
    return [BlobName.of(record) for record in state_records(chunk, 2)]


@pytest.mark.parametrize("modified_s", [-5.0, 0.0, 2.0**40])
def test_impossible_times_do_not_stop_a_pass(modified_s):
    assert len(oldest(inventory_of((Chain(SPACE, 0), 0, modified_s)), 1)) == 1


def test_a_million_blobs_fit():
    count = 50_000
    draw, inventory = random.Random(0), Listing()
    parent = SPACE
    for index in range(count):
        depth = index % 500
        key, parent = draw.randbytes(16), SPACE if depth == 0 else parent
        inventory.add(BlobName(SPACE, key, parent, depth), 4 << 20, 1_700_000_000 + index)
        parent = key
    inventory.seal()
    assert inventory.memory_bytes() / count < 90
    assert inventory.holes(None, 2e9) == []
