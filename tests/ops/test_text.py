"""Numbers with their nouns, as people read them."""

import pytest

from tiered_kv.ops.text import counted


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 chunks stay"), (1, "1 chunk stays"), (2, "2 chunks stay"), (1001, "1001 chunks stay")],
)
def test_one_is_singular_and_all_else_plural(count: int, expected: str) -> None:
    assert counted(count, "chunk", "stay") == expected
    assert counted(count, "chunk") == expected.rpartition(" ")[0]
