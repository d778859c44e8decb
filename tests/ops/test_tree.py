"""The prefix tree as runs: where it branches, what it leaves out, and that depth does not hurt it."""

from collections.abc import Iterable

from tiered_kv.keys.naming import BlobName
from tiered_kv.ops.forest import Forest
from tiered_kv.ops.storage import NamespaceRecord, StoredBlob
from tiered_kv.ops.tree import TreeNamespace, TreeRun, draw_namespace

SPACE = bytes(16)


def key(label: str) -> bytes:
    return label.encode().ljust(16, b".")


def chain(*labels: str, after: str = "", used_s: float = 100.0, pinned: str = "") -> list[StoredBlob]:
    """Chunks one behind the other, of 10 bytes; ``after`` names the one before the first as ``label@index``."""
    label, _, index = after.partition("@")
    parent, start = (key(label), int(index) + 1) if after else (SPACE, 0)
    blobs = []
    for number, name in enumerate(labels):
        until_s = 1e12 if name == pinned else 0.0
        blobs.append(StoredBlob(BlobName(SPACE, key(name), parent, start + number), 10, 50.0, used_s, until_s))
        parent = key(name)
    return blobs


def picture(blobs: Iterable[StoredBlob], levels: int = 10, limit: int | None = None) -> TreeNamespace:
    forest = Forest(blobs)
    return draw_namespace(forest, NamespaceRecord.missing(SPACE), forest.last_uses(), levels, limit)


def first(run: TreeRun) -> bytes:
    return bytes.fromhex(run.first_key)[:1]


def test_chunks_without_a_branch_are_one_run() -> None:
    (run,) = picture(chain("a", "b", "c")).runs
    assert (run.level, run.parent, run.chunks, run.size_bytes, run.continued) == (0, None, 3, 30, 0)
    assert (run.first_key, run.last_key) == (key("a").hex(), key("c").hex())


def test_a_branch_ends_a_run_and_the_most_recent_way_comes_first() -> None:
    found = picture(
        [
            *chain("a", "b"),
            *chain("c", "d", after="b@1", used_s=200.0),
            *chain("e", after="b@1", used_s=300.0),
            *chain("z", used_s=250.0),
        ]
    )
    assert [(first(run), run.level, run.parent, run.chunks) for run in found.runs] == [
        (b"a", 0, None, 2),
        (b"e", 1, 0, 1),
        (b"c", 1, 0, 2),
        (b"z", 0, None, 1),
    ]
    assert [run.continued for run in found.runs] == [2, 0, 0, 0]
    assert found.runs[0].used_s == 300.0, "a use of a chunk is one of the prefix before it"
    assert found.prefixes == 2 and found.hanging_chunks == 0


def test_what_lies_too_deep_or_comes_too_late_is_counted() -> None:
    blobs = [
        *chain("a"),
        *chain("b", after="a@0"),
        *chain("c", "d", after="a@0", used_s=200.0),
        *chain("e", after="d@2"),
        *chain("f", "g", after="d@2"),
    ]
    flat = picture(blobs, levels=1)
    assert [(run.chunks, run.hidden_chunks, run.continued) for run in flat.runs] == [(1, 6, 2)]
    two = picture(blobs, levels=2)
    assert [(first(run), run.hidden_chunks) for run in two.runs] == [
        (b"a", 0),
        (b"c", 3),
        (b"b", 0),
    ]
    cut = picture(blobs, limit=2)
    assert [first(run) for run in cut.runs] == [b"a", b"c"]
    assert (cut.left_out_runs, cut.left_out_chunks) == (3, 4)
    whole = picture(blobs)
    assert sum(run.chunks for run in whole.runs) == len(blobs) and (whole.left_out_runs, whole.left_out_chunks) == (
        0,
        0,
    )
    assert cut.left_out_chunks + sum(run.chunks for run in cut.runs) == len(blobs)


def test_chunks_behind_a_gap_hang_in_the_air() -> None:
    found = picture([*chain("a"), *chain("x", "y", after="gone@4"), *chain("w", after="x@5")])
    assert [first(run) for run in found.runs] == [b"a"]
    assert (found.hanging_chunks, found.hanging_bytes) == (3, 30)


def test_pins_are_counted_in_their_run_only() -> None:
    found = picture([*chain("a", "b", pinned="b"), *chain("c", after="b@1"), *chain("d", after="b@1", pinned="d")])
    assert {first(run): run.pinned for run in found.runs} == {b"a": 1, b"c": 0, b"d": 1}


def test_ten_thousand_chunks_with_a_branch_at_each_do_not_recurse() -> None:
    labels = [f"t{number}" for number in range(10_000)]
    trunk = chain(*labels)
    twigs = [chain(f"s{number}", after=f"t{number}@{number}")[0] for number in range(9_999)]
    found = picture(trunk + twigs, levels=1 << 30)
    assert len(found.runs) == 19_998 + 1
    assert max(run.level for run in found.runs) == 9_999
    (alone,) = picture(trunk).runs
    assert alone.chunks == 10_000
