"""Coding agents' sessions on a real vLLM: what a follow-up turn computes, beside vLLM's own unlimited prefix cache.

    python benchmarks/agents_engine.py [--trace FILE] [--sessions N] [--turns N] [--systems NAME ...] [--keep]

The first turns of the first sessions of a trace (`tests/data/README.md`), scaled down: the first prompt is cut to 512
to 767 tokens, what a turn appends to at most 600, an answer to at most 128; where a turn edits, it keeps the same part
of its parent's prompt. The tokens are random, and the next turn has the answer before it. One round has one turn of
every session, in one batch.

``plain`` is vLLM with a pool that never evicts: its prefix cache has all there is, answers too, in whole blocks of 32
tokens. In ours the GPU's prefix cache is emptied before each round, so that every hit is ours. "ours" has the
defaults, and each request names its session, as agents' gateways do; in "no names" none does. The CPU build with a
small model in this process, the server in its own. What is on disk is counted when the server has ended, because it
writes tails when it drains. Prints a table, writes build/agents_engine.json.

The answers are plain's in all systems (`forced_answers.py`), so that all get the same prompts. What a system would have
answered its log-probabilities say: ``apart``, how far that of plain's token is from plain's, and how many tokens it
would have chosen otherwise, with the largest lead that such a token of plain's had over the next. Two systems say what
that is worth: without a prefix cache vLLM computes all prompts whole, so it differs by rounding alone; and with its KV
overwritten by zeros before each round its hits are wrong.
"""

import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from tests.kit.vllm.harness import drain, reset_gpu_cache, running, zero_kv  # noqa: E402  # before vLLM
from tiered_kv.keys.tail_keys import tail_tokens  # noqa: E402
from tiered_kv.testing.model import TINY, build_model  # noqa: E402

TRACE = REPOSITORY / "tests" / "data" / "agent_sessions_small.jsonl"
FIRST_TOKENS, APPENDED_MAX, ANSWER_MAX = 512, 600, 128
FORCED = "forced_answers:ForcedAnswers"  # beside this script; vLLM imports it


@dataclass(frozen=True, slots=True)
class System:
    """Who answers.

    Attributes:
        connector: Our settings; None: vLLM alone.
        options: vLLM's own.
        is_named: Each request names its session.
        zeroes: All KV is overwritten before each round, and vLLM's prefix cache goes on believing in it.
    """

    connector: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    is_named: bool = False
    zeroes: bool = False


SYSTEMS = {
    "plain": System(),
    "plain, no prefix cache": System(options={"enable_prefix_caching": False}),
    "plain, KV zeroed": System(zeroes=True),
    "ours": System({}, is_named=True),
    "ours, no names": System({}),
    "ours, no tails": System({"tail_tokens": 0}, is_named=True),
    "ours, no tails, no answers": System({"tail_tokens": 0, "save_decode": False}, is_named=True),
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
    "apart_mean": "log-probability apart from plain's, mean",
    "apart_most": "most",
    "other_choices_percent": "% of tokens chosen otherwise",
    "lead_most": "plain's largest lead there",
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


@dataclass(frozen=True, slots=True)
class Choice:
    """One token of an answer, in log-probabilities.

    Attributes:
        logprob: The token's.
        behind: How far it is behind the best one; 0: an engine that is free to choose takes it, or one that is as good.
        lead: The best one's over the second.
    """

    logprob: float
    behind: float
    lead: float


def choices(completion: Any) -> list[Choice]:
    """Of an answer of vLLM's, with the log-probabilities of two tokens and its own."""
    found = []
    for token, candidates in zip(completion.token_ids, completion.logprobs, strict=True):
        best, second, *_ = sorted((one.logprob for one in candidates.values()), reverse=True)
        own = candidates[token].logprob
        found.append(Choice(own, best - own, best - second))
    return found


def apart(ours: Sequence[Choice], plain: Sequence[Choice]) -> dict[str, float]:
    """How far choices behind the same tokens are apart."""
    pairs = list(zip(ours, plain, strict=True))
    differences = [abs(one.logprob - other.logprob) for one, other in pairs]
    leads = [other.lead for one, other in pairs if one.behind > 0]
    return {
        "apart_mean": statistics.mean(differences),
        "apart_most": max(differences),
        "other_choices_percent": 100 * len(leads) / len(pairs),
        "lead_most": max(leads, default=0.0),
    }


class Session:
    """A session as its client sees it: every turn's prompt and answer; ``given`` are the answers that it is to get."""

    def __init__(
        self, number: int, turns: Sequence[ScaledTurn], given: Sequence[list[int]] | None, *, is_named: bool
    ) -> None:
        self.turns = turns
        self.given = given
        named = {"tiered_kv.session_id": f"session {number}"}
        self._named = {"kv_transfer_params": named} if is_named else {}
        self.prompts: list[list[int]] = []
        self.answers: list[list[int]] = []
        self.choices: list[Choice] = []
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

    @property
    def extra_args(self) -> dict[str, Any]:
        """Of the turn whose prompt was given last."""
        return self._named if self.given is None else {**self._named, "forced": self.given[len(self.answers)]}

    def answered(self, completion: Any) -> None:
        """Note an answer."""
        self.answers.append(list(completion.token_ids))
        assert self.given is None or self.answers[-1] == self.given[len(self.answers) - 1], "the answer was not forced"
        self.choices += choices(completion)


def rounds(sessions: Sequence[Session]) -> Iterator[list[tuple[Session, ScaledTurn]]]:
    """One turn of every session that has one more."""
    for number in range(max(len(session.turns) for session in sessions)):
        yield [(session, session.turns[number]) for session in sessions if number < len(session.turns)]


def replay(llm: Any, sessions: Sequence[Session], *, forgets: bool, zeroes: bool) -> list[tuple[int, int]]:
    """Answer all turns; returns tokens and computed tokens of each follow-up's prompt."""
    from vllm import SamplingParams

    taken: list[tuple[int, int]] = []
    for turns in rounds(sessions):
        if forgets:
            reset_gpu_cache(llm)
        if zeroes:
            zero_kv(llm)
        asked = [session.next_prompt() for session, _ in turns]
        wanted = [
            SamplingParams(
                temperature=0.0,
                max_tokens=answer,
                ignore_eos=True,
                detokenize=False,
                logprobs=2,
                extra_args=session.extra_args,
            )
            for (session, _), (_, answer) in zip(turns, asked, strict=True)
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in asked], wanted, use_tqdm=False)
        drain(llm)
        for (session, turn), output in zip(turns, outputs, strict=True):
            session.answered(output.outputs[0])
            if turn.parent is not None:
                tokens = len(output.prompt_token_ids)
                taken.append((tokens, tokens - (output.num_cached_tokens or 0)))
    return taken


def measure(
    model: Path,
    root: Path,
    system: System,
    scripts: Sequence[list[ScaledTurn]],
    plain: Sequence[Session] | None,
) -> tuple[dict[str, Any], list[Session]]:
    """One system's row, and its sessions; ``plain``: those whose answers it is given."""
    given = [None] * len(scripts) if plain is None else [session.answers for session in plain]
    sessions = [
        Session(number, turns, answers, is_named=system.is_named)
        for number, (turns, answers) in enumerate(zip(scripts, given, strict=True))
    ]
    connector = system.connector
    ours = None if connector is None else settings(root, host_bytes="512MiB", disk_bytes="2GiB", **connector)
    options = {
        "max_model_len": TINY.max_position,
        "max_num_seqs": len(scripts),
        "kv_cache_memory_bytes": 1 << 30,
        "logits_processors": [FORCED],
        **system.options,
    }
    pid: int | None = None
    with running(model, ours, **options) as llm:
        taken = replay(llm, sessions, forgets=ours is not None, zeroes=system.zeroes)
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
    if pid is not None:
        end_softly(pid)  # it writes tails only now
        tails = [tail_tokens(bytes.fromhex(path.stem)) > 0 for path in blob_files(root)]
        row |= {"chunks_written": tails.count(False), "tails_written": tails.count(True)}
    if plain is not None:
        ours_all, plain_all = ([one for session in some for one in session.choices] for some in (sessions, plain))
        row |= apart(ours_all, plain_all)
    return row, sessions


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3, help="of each session")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS)[1:], default=list(SYSTEMS)[1:], metavar="NAME")
    options = parser.parse_args()
    if not options.trace.exists():
        sys.exit(f"there is no trace at {options.trace}: name one with --trace")
    with options.trace.open() as lines:
        requests = [json.loads(line)["requests"][: options.turns] for line in lines]
    scripts = [scaled(session) for session in requests[: options.sessions]]
    model = build_model(REPOSITORY / "build" / "models" / "tiny", shape=TINY)
    rows: list[dict[str, Any]] = []
    plain: list[Session] | None = None
    with tempfile.TemporaryDirectory(prefix="tkv-", ignore_cleanup_errors=True) as directory:
        for number, name in enumerate(["plain", *options.systems]):
            row, sessions = measure(model, Path(directory) / str(number), SYSTEMS[name], scripts, plain)
            plain = plain or sessions
            least = rows[0]["computed_mean"] if rows else row["computed_mean"]
            rows.append({"system": name, **row, "times_plain": round(row["computed_mean"] / least, 3)})
            print(json.dumps(rows[-1]), flush=True)
    print("\n".join(["", *report.table(rows, COLUMNS)]))
    facts = report.machine("agents_engine", sessions=len(scripts), turns=options.turns)
    report.finish("agents_engine", rows, facts, is_kept=options.keep)


if __name__ == "__main__":
    main()
