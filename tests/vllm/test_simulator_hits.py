"""Our hits beside vLLM's own for every kind of KV: as long, or longer or shorter for a reason that is counted.

``tests/sim/vllm/hits.py`` says how they are measured and which reasons there are. docs/simulator.md has the counts of
2,000 prompts of each kind.
"""

import random
from collections import Counter

import pytest

from tests.kit.counts import count, seed
from tests.kit.server.processes import end_server
from tests.sim.vllm.families import FAMILIES
from tests.sim.vllm.hits import REASONS, Hits, run_histories

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

PROMPTS = count("HIT_PROMPTS", 25)
CHUNKS = {"state": 8, "state_window": 8, "state_tail": 8, "state_draft": 8}
"""Of families whose chunk is vLLM's block, whatever the setting says."""
WINDOWS = {"full": (None, None), "window": (None, 9, 9)}
"""Kinds without a family."""
MAY_DIFFER = {
    "state": (),
    "state_window": (),
    "state_tail": ("unit", "answer"),
    "state_draft": ("fork", "answer"),
}
"""Reasons that a kind may have, where not any."""


@pytest.mark.parametrize("kind", [*WINDOWS, *FAMILIES])
def test_a_hit_is_as_long_as_vllms_own_or_differs_for_a_known_reason(kind, tmp_path):
    hits = Hits(tmp_path, "" if kind in WINDOWS else kind, CHUNKS.get(kind, 16), WINDOWS.get(kind, (None, None)))
    try:
        found = run_histories(hits, random.Random(seed()), PROMPTS)
    finally:
        hits.engine.close()
        end_server(tmp_path)
    counts = Counter(reason for _, reason in found)
    hit = sum(one.own > 0 for one, _ in found)
    tokens = sum(one.own for one, _ in found), sum(one.ours for one, _ in found)
    print(f"kind={kind} prompts={len(found)} hit={hit} tokens={tokens} {dict(counts)}")
    assert not [one for one, reason in found if reason is None][:3]
    assert hits.engine.findings.wrong == []
    assert hit > len(found) // 4 and counts.keys() <= {"equal", *MAY_DIFFER.get(kind, REASONS)}
