"""The memory of what is gone: bounded by two generations, and nothing is told twice."""

from tiered_kv.tiering.index import GhostList


def test_what_is_gone_is_recalled_once() -> None:
    gone = GhostList(generation_min=4)
    gone.remember(b"a", 3, chunks=0)
    assert (len(gone), gone.recall(b"a"), gone.recall(b"a"), len(gone)) == (1, 3, None, 0)


def test_the_older_generation_counts_and_is_forgotten_as_a_whole() -> None:
    gone = GhostList(generation_min=4)
    for number in range(6):
        gone.remember(bytes([number]), number, chunks=0)
    assert len(gone) == 6, "four of the older generation, two of the younger"
    assert gone.recall(b"\x00") == 0 and gone.recall(b"\x05") == 5 and len(gone) == 4
    for number in range(10, 13):
        gone.remember(bytes([number]), number, chunks=0)
    assert gone.recall(b"\x01") is None, "its generation was full twice"
    assert gone.recall(b"\x04") == 4


def test_a_key_that_went_again_has_its_newer_uses() -> None:
    gone = GhostList(generation_min=2)
    for key, uses in ((b"a", 1), (b"b", 1), (b"a", 7)):
        gone.remember(key, uses, chunks=0)
    assert gone.recall(b"a") == 7 and gone.recall(b"a") is None


def test_as_many_keys_as_there_are_chunks_fit_into_a_generation() -> None:
    gone = GhostList(generation_min=2)
    for number in range(19):
        gone.remember(bytes([number]), number, chunks=10)
    assert len(gone) == 19 and gone.recall(b"\x00") == 0
