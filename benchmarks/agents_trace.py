"""A trace of coding agents' sessions: its turns in order of arrival, their chunks, and what an infinite cache finds.

Form of a line: tests/data/README.md. A prompt is known by blocks of 64 tokens; how much of it is its parent's is known
in whole blocks. Where all of the parent's blocks are shared, the prompt goes on where the parent ended: then the
parent's last, partial block is taken to be shared as well, and its answer behind it, token by token. Owns no cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

BLOCK_TOKENS = 64

GOLDEN = 0.618033988749895
"""Multiples of it, less their whole part, are spread evenly: which answers are dropped."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
        time_s: Of its arrival, since the first one's.
        gap_s: Since the arrival of its parent; None: it has none.
        shared: Leading tokens that its parent's prompt has, too.
        shared_answered: The same with its parent's answer kept.
        chunks: Ids of its whole chunks; equal ids: equal prefixes.
        answered: The same of the prompt with its answer, all but its last token.
        answered_tokens: Tokens of these together.
        number, parent: Its own and its parent's, over all sessions; -1: it has none.
    """

    time_s: float
    gap_s: float | None
    tokens: int
    shared: int
    shared_answered: int
    chunks: list[int]
    answered: list[int]
    answered_tokens: int
    number: int
    parent: int

    def found_ever(self, unit_tokens: int, *, with_answers: bool) -> int:
        """Tokens that an infinite cache of whole units finds. The last token is always computed."""
        shared = self.shared_answered if with_answers else self.shared
        return min(shared, self.tokens - 1) // unit_tokens * unit_tokens


def read(
    trace: Path,
    chunk_tokens: int,
    *,
    every: int = 1,
    sessions_per_hour: float = 60,
    dropped: float = 0.0,
    reasoning: int = 0,
) -> list[Turn]:
    """Every ``every``-th session of a trace, started at a steady rate; all turns by arrival.

    Of the answers the share ``dropped`` does not come back, as if they were reasoning. With ``reasoning`` every answer
    has so many tokens more in front, which the next turn leaves out: then none comes back.
    """
    turns: list[Turn] = []
    ids, numbers = count(), count()
    with trace.open() as lines:
        for number, line in enumerate(lines):
            if number % every == 0:
                start_s = number // every * 3600 / sessions_per_hour
                turns += _session(
                    json.loads(line)["requests"], start_s, chunk_tokens, (ids, numbers), dropped, reasoning
                )
    turns.sort(key=lambda turn: turn.time_s)
    return turns


def _session(
    requests: list[list[int]],
    start_s: float,
    chunk_tokens: int,
    counters: tuple[Iterator[int], Iterator[int]],
    dropped: float,
    reasoning: int,
) -> Iterator[Turn]:
    known: list[Turn] = []
    ids, numbers = counters
    for time_s, tokens, generated, parent, shared_blocks, _ in requests:
        gap_s, shared, answered = None, 0, 0
        chunks: list[int] = []
        if parent >= 0:
            before = known[parent]
            gap_s = max(0.0, start_s + time_s - before.time_s)
            shared = answered = shared_blocks * BLOCK_TOKENS
            if shared_blocks == requests[parent][5]:
                shared = answered = min(before.tokens, tokens)
                if not reasoning and parent * GOLDEN % 1 >= dropped:
                    answered = min(before.tokens + requests[parent][2], tokens)
            chunks = before.answered[: answered // chunk_tokens]
        chunks = chunks + [next(ids) for _ in range(tokens // chunk_tokens - len(chunks))]
        end = tokens + max(generated + reasoning, 1) - 1
        with_answer = chunks + [next(ids) for _ in range(end // chunk_tokens - len(chunks))]
        number, of = next(numbers), known[parent].number if parent >= 0 else -1
        known.append(Turn(start_s + time_s, gap_s, tokens, shared, answered, chunks, with_answer, end, number, of))
    yield from known


def computed_by_unit(turns: list[Turn], units: tuple[int, ...]) -> list[dict[str, float | int | str]]:
    """What is computed with an infinite cache of whole units, with and without answers in it."""
    rows: list[dict[str, float | int | str]] = []
    asked = sum(turn.tokens for turn in turns)
    followed = [turn for turn in turns if turn.gap_s is not None]
    best = _mean_computed(followed, units[0], with_answers=True)
    for with_answers in (False, True):
        for unit in units:
            computed = sum(turn.tokens - turn.found_ever(unit, with_answers=with_answers) for turn in turns)
            mean = _mean_computed(followed, unit, with_answers=with_answers)
            left = sorted(turn.tokens - turn.found_ever(unit, with_answers=with_answers) for turn in followed)
            rows.append(
                {
                    "kept": "prompts and answers" if with_answers else "prompts",
                    "unit_tokens": unit,
                    "computed": computed,
                    "computed_percent": 100 * computed / asked,
                    "follow_up_mean": round(mean),
                    "follow_up_median": left[len(left) // 2],
                    "times_best": mean / best,
                }
            )
    return rows


def _mean_computed(turns: list[Turn], unit: int, *, with_answers: bool) -> float:
    return sum(turn.tokens - turn.found_ever(unit, with_answers=with_answers) for turn in turns) / len(turns)
