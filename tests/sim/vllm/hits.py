"""Our hits beside vLLM's own: one engine whose pool never evicts, whose cache has room for all, and one history.

The engine computes a history of prompts, from vLLM's own prefix cache alone; the connector stores what it is handed.
Then a prompt is measured twice: what vLLM's real KV cache manager finds for it in its own cache, and what the real
connector offers an engine whose GPU has nothing. What the connector should offer is predicted from the history by its
rules (:meth:`Hits.predicted`), and every difference between the two hits has one of the ``REASONS``; else it is wrong.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request, RequestStatus

from tests.kit.server.clients import poll_until
from tests.sim.vllm.asking import come_to_rest, parameters, random_tokens, settings
from tests.sim.vllm.engine import MAX_MODEL_LEN, Setup, SimulatedEngine
from tests.sim.vllm.families import DRAFTS, LAYER_OUTERMOST, MATCH_UNIT, ONLY_V2, STATES

REASONS = {
    "equal": "as long as vLLM's own",
    "chunk": "ours ends at a whole chunk, vLLM's at a whole block",
    "answer": "a state in an answer: vLLM has it still, and hands it over no more when a prompt goes on from there",
    "last token": "a prompt of whole chunks is loaded whole, and vLLM computes its last token again, not a block",
    "window": "vLLM keeps of a window's blocks those at a prompt's end, ours those at each chunk's",
    "fork": "a state lies where prompts fork, and vLLM gives up the block before it for its draft; ours does not",
    "unit": "vLLM finds a state inside a block (prefix_match_unit); ours are at the ends of blocks",
    "guessed": "a block of an answer that right guesses of its request's last step made whole: vLLM does not cache it",
}
"""Why a hit of ours is not as long as vLLM's own."""

PROMPT_MAX = 130
HISTORY_MAX = 4
MEASURED = 5
"""Prompts measured behind each prompt of a history."""


@dataclass
class Measured:
    """A prompt, what vLLM's own prefix cache gives of it, what we offer, and what we should."""

    prompt: list[int]
    own: int
    ours: int
    predicted: int


@dataclass
class Hits:
    """One engine and the history it has computed.

    Attributes:
        prompts: Since the last history began.
        answered: The same with their answers.
        kept: The same without the last token of each, whose KV was never computed.
        states: Prefixes whose states vLLM handed over, of all recurrent groups.
        answer_states: The same of prefixes that end in what was generated then. vLLM hands none over again when a
            later prompt goes on from there.
    """

    root: Path
    family: str
    chunk_tokens: int
    windows: tuple[int | None, ...] = (None, None)
    prompts: list[list[int]] = field(default_factory=list)
    answered: list[list[int]] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    states: set[tuple[int, ...]] = field(default_factory=set)
    answer_states: set[tuple[int, ...]] = field(default_factory=set)
    sent: int = 0

    def __post_init__(self) -> None:
        """Start the engine."""
        setup = Setup(
            windows=self.windows,
            family=self.family,
            is_hybrid=bool(self.family) or any(self.windows),
            is_v2=self.family in ONLY_V2,
            layout="LBHNC" if not self.family or self.family in LAYER_OUTERMOST else "BLHNC",
            token_budget=MAX_MODEL_LEN,
            draft_tokens=2 if self.family in DRAFTS else 0,
            match_unit=MATCH_UNIT.get(self.family),
            retention=None if self.family in MATCH_UNIT else 0,
            pool_blocks=4000,
            connector=settings(self.root, self.chunk_tokens) | {"host_bytes": "256MiB", "disk_bytes": "1GiB"},
        )
        self.setup = setup
        self.engine = SimulatedEngine(setup)
        self.side = self.engine.connector._scheduler.side
        if self.family in STATES:
            self.chunk_tokens = setup.block_tokens
            self._watch_states()

    def _watch_states(self) -> None:
        """Note what vLLM hands over, from its own output."""
        plan, requests = self.engine.connector.build_connector_meta, self.engine.scheduler.requests
        groups = self.engine.scheduler.kv_cache_config.kv_cache_groups
        recurrent = {number for number, group in enumerate(groups) if isinstance(group.kv_cache_spec, MambaSpec)}

        def watched(output: Any) -> Any:
            for request_id, offers in output.kv_connector_block_state.boundary_state_offloads.items():
                groups: dict[int, set[int]] = {}
                for number, _, tokens in offers:
                    groups.setdefault(tokens, set()).add(number)
                for tokens, numbers in groups.items():
                    if numbers == recurrent:
                        request = requests[request_id]
                        ends_in_prompt = tokens <= request.num_prompt_tokens
                        known = self.states if ends_in_prompt else self.answer_states
                        known.add(tuple(request.all_token_ids[:tokens]))
            return plan(output)

        self.engine.connector.build_connector_meta = watched

    # -- the history -------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """A new history: vLLM's own cache is emptied; prompts of another one have nothing in common with it."""
        assert self.engine.scheduler.reset_prefix_cache()
        self.prompts, self.answered, self.kept = [], [], []
        self.states.clear()
        self.answer_states.clear()

    def compute(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Answer a prompt from vLLM's own cache, and store it."""
        self.sent += 1
        name, asked = f"h{self.sent}", parameters(max_tokens)
        asked.extra_args = {"kv_transfer_params": {"tiered_kv.skip_load": True}}
        self.engine.add(name, list(prompt), asked)
        # Who may not load does not wait: before it is known what is held, a window would pass what is to be stored.
        poll_until(
            self.side.client, lambda: all(one.is_answered for one in self.side.client.lookups.values()), "answer"
        )
        come_to_rest(self.engine)
        self.prompts.append(list(prompt))
        self.answered.append(self.engine.answers.pop(name).tokens)
        self.kept.append(self.answered[-1][:-1])
        ends = {name for name, n in self.side.counters.items() if name.startswith("store") and n}
        assert ends <= {"store_chunks", "store_held", "stores"}, f"not all is stored: {ends}"

    # -- measuring ---------------------------------------------------------------------------------------------

    def measure(self, prompt: Sequence[int]) -> Measured:
        """What a prompt would hit, in vLLM's own cache and in ours."""
        self.sent += 1
        request = Request(
            f"m{self.sent}", list(prompt), SamplingParams(max_tokens=1), None, block_hasher=self.engine._hasher
        )
        _, own, _ = self.engine.scheduler.kv_cache_manager.get_computed_blocks(request)
        connector = self.engine.connector
        connector.on_new_request(request)
        deadline_s = time.monotonic() + 30
        while (ours := connector.get_num_new_matched_tokens(request, 0)[0]) is None:
            assert time.monotonic() < deadline_s, "no answer"
            time.sleep(0.0002)
        request.status = RequestStatus.FINISHED_ABORTED
        connector.request_finished_all_groups(request, tuple([] for _ in range(self.engine.groups)))
        return Measured(list(prompt), int(own), int(ours), self.predicted(prompt))

    def _common(self, prompt: Sequence[int], others: list[list[int]]) -> int:
        """The longest common prefix with one of the others."""
        longest = 0
        for other in others:
            pairs = zip(prompt, other, strict=False)
            longest = max(longest, next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(prompt), len(other))))
        return longest

    def _held(self, prompt: Sequence[int]) -> int:
        """Tokens of the prompt whose chunks some request of the history stored."""
        return self._common(prompt, self.kept) // self.chunk_tokens * self.chunk_tokens

    def predicted(self, prompt: Sequence[int]) -> int:
        """What the rules say that we offer: whole chunks of the history's requests, as far as the kind allows."""
        chunk, tokens, block = self.chunk_tokens, len(prompt), self.setup.block_tokens
        held = self._held(prompt)
        if self.family in STATES:
            last = tokens // chunk * chunk - chunk if self._drop else (tokens - 1) // chunk * chunk
            ends = range(min(held, last), 0, -chunk)
            return next((end for end in ends if tuple(prompt[:end]) in self.states), 0)
        if self.family in DRAFTS:
            ends_with_prompt = self._drop and self.engine.groups > 1  # the block that vLLM gives up may
            whole = (tokens if ends_with_prompt else tokens - 1) // block * block
            return max(0, min(held, whole) - self._drop)
        # A group's first layer is all that vLLM's scheduler knows of its kinds.
        names = [group.layer_names[0] for group in self.engine.scheduler.kv_cache_config.kv_cache_groups]
        firsts = [one for one in self.engine.model.layers if one.name in names]
        is_plain = all(one.tokens_per_state == 1 and not (one.window or one.local or one.ring) for one in firsts)
        return held if is_plain or held < tokens else (tokens - 1) // chunk * chunk

    def _ends_in_an_answer(self, prompt: Sequence[int], hit: int) -> bool:
        """Whether what is matched for a hit reaches into what was generated."""
        return self._common(prompt, self.prompts) < hit + self._drop

    @property
    def _is_drafted(self) -> bool:
        return self.family in DRAFTS and self.family not in STATES

    @property
    def _drop(self) -> int:
        """Tokens at the end of a match that are given up for a draft, by vLLM and by us."""
        return self.setup.block_tokens if DRAFTS.get(self.family) in ("eagle", "mtp") else 0

    def reason(self, one: Measured) -> str | None:
        """Why our hit is not vLLM's own; None: for no reason that is known, or it is not what it should be."""
        if one.ours != one.predicted:
            return None
        tokens, chunk, block = len(one.prompt), self.chunk_tokens, self.setup.block_tokens
        own, ours, matched = one.own, one.ours, one.own + self._drop
        whole = tuple(one.prompt[: own // block * block])
        asked = self._common(one.prompt, self.kept)
        has_windows = any(layer.window or layer.local for layer in self.engine.model.layers)
        holds = {
            "equal": ours == own,
            "last token": ours == tokens and own == (tokens - 1) // block * block,
            "unit": self.setup.match_unit is not None and own % block and ours == own // block * block,
            "chunk": ours == max(0, matched // chunk * chunk - self._drop) < own,
            "answer": ours < own and (asked < matched or whole in self.answer_states - self.states),
            "fork": ours > own and ours + self._drop > self._held(one.prompt) and self.family in STATES,
            "window": ours > own and has_windows,
            "guessed": ours == own + block and self._ends_in_an_answer(one.prompt, ours) and self._is_drafted,
        }
        return next((name for name, is_so in holds.items() if is_so), None)


def run_histories(hits: Hits, source: random.Random, prompts: int) -> list[tuple[Measured, str | None]]:
    """Measure so many prompts behind random histories that fork, go on where others ended, or are equal."""
    found: list[tuple[Measured, str | None]] = []
    while len(found) < prompts:
        hits.forget()
        trunk = random_tokens(source, PROMPT_MAX)
        for _ in range(source.randrange(1, HISTORY_MAX + 1)):
            hits.compute(_draw(hits, source, trunk), source.choice([1, 2, 6, 12]))
            for _ in range(MEASURED):
                one = hits.measure(_draw(hits, source, trunk))
                found.append((one, hits.reason(one)))
    return found[:prompts]


def _draw(hits: Hits, source: random.Random, trunk: list[int]) -> list[int]:
    """A prompt of the trunk's beginning and a tail of its own, or one of the history, longer or shorter."""
    tail = random_tokens(source, source.choice([0, 0, 1, 3, 12]))
    kind = source.random()
    if hits.answered and kind < 0.3:
        start = source.choice(hits.answered)
        return (start + tail)[: MAX_MODEL_LEN - 16]
    if hits.prompts and kind < 0.5:
        start = source.choice(hits.prompts)
        return start[: source.randrange(1, len(start) + 1)] + tail
    return trunk[: source.randrange(1, PROMPT_MAX + 1)] + tail
