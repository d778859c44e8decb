"""Coding agents' sessions on a real vLLM: what a follow-up turn computes, beside vLLM's own unlimited prefix cache.

    python benchmarks/agents_engine.py [--trace FILE] [--sessions N] [--turns N] [--keep]

The first turns of the first sessions of a trace (`tests/data/README.md`), scaled down: the first prompt is cut to 512
to 767 tokens, what a turn appends to at most 600, an answer to at most 128; where a turn edits, it keeps the same part
of its parent's prompt. The tokens are random, the answers those that the engine gives, and the next turn has them. One
round has one turn of every session, in one batch.

``plain`` is vLLM with a pool that never evicts: its prefix cache has all there is, answers too, in whole blocks of 32
tokens. In the others the GPU's prefix cache is emptied before each round, so that every hit is ours. "ours" has the
defaults, and each request names its session, as agents' gateways do; in "no names" none does. The CPU build with a
small model in this process, the server in its own. What is on disk is counted when the server has ended, because it
writes tails when it drains. Prints a table, writes build/agents_engine.json.
"""

import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_report as report

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY)]

from agents_trace import BLOCK_TOKENS  # noqa: E402  # beside this script

from tests.kit.server.probe import figures, server_pid, wait_written  # noqa: E402
from tests.kit.server.processes import end_softly  # noqa: E402
from tests.kit.storage.disk_probe import blob_files  # noqa: E402
from tests.kit.vllm.cached_engine import CHUNK, settings  # noqa: E402
from tests.kit.vllm.harness import drain, reset_gpu_cache, running  # noqa: E402  # before vLLM
from tiered_kv.keys.tail_keys import tail_tokens  # noqa: E402
from tiered_kv.testing.model import TINY, build_model  # noqa: E402

TRACE = REPOSITORY / "tests" / "data" / "agent_sessions_small.jsonl"
FIRST_TOKENS, APPENDED_MAX, ANSWER_MAX = 512, 600, 128
SYSTEMS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ours": {},
    "ours, no names": {},
    "ours, no tails": {"tail_tokens": 0},
    "ours, no tails, no answers": {"tail_tokens": 0, "save_decode": False},
}
COLUMNS = {
    "system": "system",
    "follow_ups": "follow-up turns",
    "prompt_mean": "tokens of a prompt",
    "computed_mean": "computed, mean",
    "computed_median": "median",
    "times_plain": "x plain",
    "tails": "tails stored",
    "chunks_written": "chunks on disk",
    "tails_written": "tails on disk",
    "answers": "answers' chunks",
    "answers_asked": "of these asked for",
}


@dataclass(frozen=True, slots=True)
class ScaledTurn:
    """One request of a session.

    Attributes:
        parent: Number of the turn that it goes on from; None: it begins a session.
        kept: Tokens of the parent's prompt that it has; None: all, and the answer.
        appended: New tokens behind them.
        answer: Tokens to be generated.
    """

    parent: int | None
    kept: int | None
    appended: int
    answer: int


def scaled(requests: Sequence[Sequence[int]]) -> list[ScaledTurn]:
    """A session of the trace, cut down."""
    turns: list[ScaledTurn] = []
    lengths: list[int] = []
    for _, tokens, generated, parent, shared_blocks, _ in requests:
        answer = max(1, min(generated, ANSWER_MAX))
        if parent < 0:
            turn = ScaledTurn(None, 0, FIRST_TOKENS + tokens % CHUNK, answer)
        elif shared_blocks == requests[parent][5]:
            more = tokens - requests[parent][1] - requests[parent][2]
            turn = ScaledTurn(parent, None, max(1, min(more, APPENDED_MAX)), answer)
        else:
            kept = lengths[parent] * shared_blocks // max(1, requests[parent][5])
            turn = ScaledTurn(parent, kept, max(1, min(tokens - shared_blocks * BLOCK_TOKENS, APPENDED_MAX)), answer)
        before = 0 if turn.parent is None else lengths[turn.parent] + turns[turn.parent].answer
        lengths.append((before if turn.kept is None else turn.kept) + turn.appended)
        turns.append(turn)
    return turns


class Session:
    """A session as its client sees it: every turn's prompt and answer."""

    def __init__(self, number: int, turns: Sequence[ScaledTurn], *, is_named: bool) -> None:
        self.turns = turns
        named = {"tiered_kv.session_id": f"session {number}"}
        self.extra_args = {"kv_transfer_params": named} if is_named else None
        self.prompts: list[list[int]] = []
        self.answers: list[list[int]] = []
        self._draw = random.Random(f"session {number}")

    def next_prompt(self) -> tuple[list[int], int]:
        """The next turn's prompt, and how many tokens to generate."""
        turn = self.turns[len(self.prompts)]
        before: list[int] = []
        if turn.parent is not None:
            prompt = self.prompts[turn.parent]
            before = [*prompt, *self.answers[turn.parent]] if turn.kept is None else prompt[: turn.kept]
        self.prompts.append(before + [self._draw.randrange(3, TINY.vocab) for _ in range(turn.appended)])
        return self.prompts[-1], turn.answer


def rounds(sessions: Sequence[Session]) -> Iterator[list[tuple[Session, ScaledTurn]]]:
    """One turn of every session that has one more."""
    for number in range(max(len(session.turns) for session in sessions)):
        yield [(session, session.turns[number]) for session in sessions if number < len(session.turns)]


def replay(llm: Any, sessions: Sequence[Session], *, forgets: bool) -> list[tuple[int, int]]:
    """Answer all turns; returns tokens and computed tokens of each follow-up's prompt."""
    from vllm import SamplingParams

    taken: list[tuple[int, int]] = []
    for turns in rounds(sessions):
        if forgets:
            reset_gpu_cache(llm)
        asked = [session.next_prompt() for session, _ in turns]
        wanted = [
            SamplingParams(
                temperature=0.0,
                max_tokens=answer,
                ignore_eos=True,
                detokenize=False,
                extra_args=session.extra_args,
            )
            for (session, _), (_, answer) in zip(turns, asked, strict=True)
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in asked], wanted, use_tqdm=False)
        drain(llm)
        for (session, turn), output in zip(turns, outputs, strict=True):
            session.answers.append(list(output.outputs[0].token_ids))
            if turn.parent is not None:
                tokens = len(output.prompt_token_ids)
                taken.append((tokens, tokens - (output.num_cached_tokens or 0)))
    return taken


def measure(
    model: Path,
    root: Path,
    connector: Mapping[str, Any] | None,
    scripts: Sequence[list[ScaledTurn]],
    *,
    is_named: bool,
) -> Any:
    """One system's row, and the answers that it gave."""
    sessions = [Session(number, turns, is_named=is_named) for number, turns in enumerate(scripts)]
    ours = None if connector is None else settings(root, host_bytes="512MiB", disk_bytes="2GiB", **connector)
    with running(
        model, ours, max_model_len=TINY.max_position, max_num_seqs=len(scripts), kv_cache_memory_bytes=1 << 30
    ) as llm:
        taken = replay(llm, sessions, forgets=ours is not None)
        row: dict[str, Any] = {
            "follow_ups": len(taken),
            "prompt_mean": round(statistics.mean(tokens for tokens, _ in taken)),
            "computed_mean": round(statistics.mean(computed for _, computed in taken), 1),
            "computed_median": statistics.median(computed for _, computed in taken),
        }
        if ours is not None:
            wait_written(root)
            told, pid = figures(root), server_pid(root)
            row |= {name: told["counters"].get(name, 0) for name in ("answers", "answers_asked")}
            row["tails"] = told["counters"].get("tail_stored", 0)
    if ours is not None:
        end_softly(pid)  # it writes tails only now
        tails = [tail_tokens(bytes.fromhex(path.stem)) > 0 for path in blob_files(root)]
        row |= {"chunks_written": tails.count(False), "tails_written": tails.count(True)}
    return row, [session.answers for session in sessions]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3, help="of each session")
    options = parser.parse_args()
    if not options.trace.exists():
        sys.exit(f"there is no trace at {options.trace}: name one with --trace")
    with options.trace.open() as lines:
        requests = [json.loads(line)["requests"][: options.turns] for line in lines]
    scripts = [scaled(session) for session in requests[: options.sessions]]
    model = build_model(REPOSITORY / "build" / "models" / "tiny", shape=TINY)
    rows: list[dict[str, Any]] = []
    expected: Any = None
    with tempfile.TemporaryDirectory(prefix="tkv-", ignore_cleanup_errors=True) as directory:
        for number, (system, connector) in enumerate(SYSTEMS.items()):
            root, is_named = Path(directory) / str(number), system != "ours, no names"
            row, answers = measure(model, root, connector, scripts, is_named=is_named and connector is not None)
            expected = expected or answers
            pairs = [
                (a, b) for one, other in zip(answers, expected, strict=True) for a, b in zip(one, other, strict=True)
            ]
            row["same_answers_percent"] = 100 * sum(a == b for a, b in pairs) / len(pairs)
            least = rows[0]["computed_mean"] if rows else row["computed_mean"]
            rows.append({"system": system, **row, "times_plain": round(row["computed_mean"] / least, 3)})
            print(json.dumps(rows[-1]), flush=True)
    print("\n".join(["", *report.table(rows, COLUMNS)]))
    facts = report.machine("agents_engine", sessions=len(scripts), turns=options.turns)
    report.finish("agents_engine", rows, facts, is_kept=options.keep)


if __name__ == "__main__":
    main()
