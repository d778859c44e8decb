"""Answers through a real server: what a prompt was seen to contain outlives it, what none has is not written."""

from collections.abc import Callable
from pathlib import Path

from tests.kit.server.clients import SmallEngine
from tests.kit.server.probe import figures, wait_ended, wait_written

ASKED, UNASKED = 0, 100_000


def stored(root: Path) -> tuple[int, int, int]:
    """Chunks on disk, answers that came, and of these the ones that were asked for."""
    told = figures(root)
    (disk,) = told["tiers"]
    return disk["blobs"], told["counters"]["answers"], told["counters"]["answers_asked"]


def test_answers_are_found_at_once_and_outlive_the_server_once_they_were_asked_for(
    engine: Callable[..., SmallEngine], root: Path
) -> None:
    first = engine()
    for prompt in (ASKED, UNASKED):
        first.store(2, prompt)
        first.store(3, prompt, start=2, is_answer=True)
    first.wait_hits(2, UNASKED)
    wait_written(root)
    assert stored(root) == (4, 2, 0)
    first.wait_hits(3, ASKED)  # which compares the bytes
    wait_written(root)
    assert stored(root) == (5, 2, 1)
    first.close()
    wait_ended(root)

    second = engine("e2")
    assert (second.hits(3, ASKED), second.hits(3, UNASKED)) == (3, 2)
