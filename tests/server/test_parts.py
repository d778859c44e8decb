"""Ranks with equal KV share one part of the payload: told once, stored once, found by all of them."""

import dataclasses

import msgspec
import pytest

from tests.kit.server.clients import PAGES, worker_part
from tiered_kv.chunks.geometry import LayerPage
from tiered_kv.errors import ConfigError
from tiered_kv.server import protocol as m
from tiered_kv.server.members import check_join, geometry_of, namespace_of, parts_of, recorded_geometry
from tiered_kv.server.sessions import Group, GroupWorker

OTHER_PAGES = [LayerPage("last", "BF16", (2, 16, 8), "HNC")]


def part(rank: int, world_size: int, number: int | None, pages=PAGES) -> m.JoinWorker:
    return msgspec.structs.replace(worker_part(rank, world_size, pages=pages), part=number)


def group(joins) -> Group:
    found = Group("engine", 0, world_size=len(joins))
    found.members = {join.rank: GroupWorker(None, join) for join in joins}
    return found


def test_every_rank_has_a_part_of_its_own_unless_it_says_otherwise():
    joins = [part(rank, 3, None) for rank in range(3)]
    assert parts_of(joins) == [0, 1, 2]
    assert len(geometry_of(joins).ranks) == 3


def test_ranks_with_equal_kv_start_at_one_place_and_are_stored_once():
    joins = [part(rank, 4, rank // 2) for rank in range(4)]
    found = group(joins)
    found.set_geometry()
    assert parts_of(joins) == [0, 0, 1, 1]
    assert found.geometry == geometry_of([part(0, 2, None), part(1, 2, None)])
    first, second = (found.geometry.rank_segments(number)[0].offset_bytes for number in (0, 1))
    assert found.rank_offsets == [first, first, second, second] and first != second


def test_stages_of_a_pipeline_with_equal_ranks_inside_keep_their_own_layers():
    joins = [part(0, 4, 0), part(1, 4, 0), part(2, 4, 1, OTHER_PAGES), part(3, 4, 1, OTHER_PAGES)]
    geometry = geometry_of(joins)
    assert [[page.layer for page in rank] for rank in geometry.ranks] == [[p.layer for p in PAGES], ["last"]]


def test_ranks_that_claim_equal_kv_with_other_layers_are_refused():
    with pytest.raises(ConfigError, match=r"ranks 0 and 1 say that their KV is the same.*part=0"):
        parts_of([part(0, 2, 0), part(1, 2, 0, OTHER_PAGES)])


def test_record_tells_the_geometry_that_made_it_with_windows_and_parts():
    pages = [*PAGES, LayerPage("windowed", "BF16", (2, 16, 8), "HNC", blocks=2)]
    joins = [part(rank, 2, 0, pages) for rank in range(2)]
    fields = namespace_of(joins, epoch="e").fields
    assert recorded_geometry(fields) == geometry_of(joins)
    assert [page.get("blocks") for page in fields["geometry"]["ranks"][0]] == [None] * len(PAGES) + [2]


def test_record_tells_how_many_tokens_a_compressed_state_stands_for():
    joins = [part(0, 1, None, [*PAGES, LayerPage("compressed", "U8", (1, 4, 32), "HNC", tokens_per_state=4)])]
    fields = namespace_of(joins, epoch="e").fields
    assert recorded_geometry(fields) == geometry_of(joins)
    assert recorded_geometry(fields).ranks[0][-1].tokens_per_state == 4
    assert all("tokens_per_state" not in page for page in fields["geometry"]["ranks"][0][: len(PAGES)])


@pytest.mark.parametrize("tokens", [0, -1, 1 << 40])
def test_tokens_per_state_out_of_range_are_refused(tokens):
    with pytest.raises(ConfigError, match=f"tokens_per_state={tokens}"):
        check_join(part(0, 1, None, [LayerPage("l", "U8", (1, 4, 32), "HNC", tokens_per_state=tokens)]))


def test_layer_that_stores_fewer_blocks_takes_so_many_bytes():
    whole = geometry_of([part(0, 1, None, [LayerPage("l", "BF16", (2, 16, 8), "HNC")])])
    windowed = dataclasses.replace(whole.ranks[0][0], blocks=1)
    less = geometry_of([part(0, 1, None, [windowed])])
    assert less.data_bytes * whole.blocks_per_chunk == whole.data_bytes
