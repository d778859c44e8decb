"""The simulator's draft: a model whose KV lies in the engine's paged KV, and whose guesses are as good as that KV.

It runs behind the model in a step, for all requests of the step or for none, and before the connector may save. For
each token whose next one is known by then it writes its KV; behind those it writes KV of what it guesses, which a later
step writes anew. It attends to all tokens so far. What it reads is compared with what it must be, and its guesses are
wrong where its KV is: a draft's KV shows nowhere else, because the model verifies every guess. Called by the simulated
workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.sim.vllm.model import NEXT, UNDRAFTED, VOCAB, LayerKV, Model, Reference, mix


@dataclass
class Drafter:
    """One rank's draft.

    Attributes:
        layers: Its layers, each with the number of its KV cache group.
        guesses: How many tokens it guesses in a step.
        drafted_len: Longest sequence it takes, guesses included; None: any (model runner V2 asks nobody).
        findings: Where wrong KV is counted.
    """

    model: Model
    layers: Sequence[tuple[int, LayerKV]]
    guesses: int
    drafted_len: int | None
    findings: Any
    rank: int

    def run(self, rows: Sequence[Any], step: int) -> None:
        """Draft for the requests of a step that was sampled."""
        longest = max((row.end for row in rows), default=0)
        is_drafted = self.drafted_len is None or longest + self.guesses <= self.drafted_len
        for row in rows:
            for group, layer in self.layers:
                self._write(row, layer, row.request.blocks[group], is_drafted=is_drafted)
        for row in rows:
            is_right = is_drafted
            for group, layer in self.layers if is_drafted else ():
                is_right &= self._is_right(row, layer, row.request.blocks[group], step)
            row.request.drafts = self._guess(row.request, is_right=is_right, is_drafted=is_drafted)

    def _write(self, row: Any, layer: LayerKV, table: Sequence[int], *, is_drafted: bool) -> None:
        """KV of the tokens that the step computed, and of what is guessed behind them."""
        request, end = row.request, row.request.computed
        if not is_drafted:
            layer.mark(table, row.first, end)
            return
        layer.write(table, row.first, self._expected(request, layer, row.first, end))
        behind = [mix(request.tokens[-1] * 31 + at) for at in range(end, end + self.guesses + row.end - end)]
        room = len(table) * layer.block_states - end  # vLLM writes what has no block nowhere
        if row.is_sampled and behind[:room]:
            layer.write(table, end, behind[:room])

    def _expected(self, request: Any, layer: LayerKV, first: int, end: int) -> list[int]:
        request.expected = request.expected or Reference(self.model)
        states = request.expected.of(request.tokens).states
        return [
            self.model.draft_state(layer.layer, states[at], request.tokens[at + 1] if layer.layer.draft == NEXT else 0)
            for at in range(first, end)
        ]

    def _is_right(self, row: Any, layer: LayerKV, table: Sequence[int], step: int) -> bool:
        """Compare all that a request's draft attends to with what it must be."""
        request, end = row.request, row.request.computed
        first = max(0, end - layer.layer.window + 1) if layer.layer.window else 0
        words = layer.read(table, first, end)
        wrong = [first + at for at in layer.wrong(words, self._expected(request, layer, first, end))]
        undrafted = {first + int(at) for at in np.flatnonzero(words[:, 0, 0] == np.uint64(UNDRAFTED))}
        neighbours = {at for at in wrong if self._is_neighbour(request, layer, table, at)}
        bad = [at for at in wrong if at not in undrafted | neighbours]
        found = self.findings
        found.checked_draft_tokens += end - first
        found.neighbour_draft_tokens += len(neighbours)
        found.undrafted_tokens += len(undrafted)
        found.wrong_draft_tokens += len(bad)
        if bad:
            found.add(
                f"rank {self.rank} step {step}: the draft of {row.request_id} reads wrong KV of tokens {bad[0]}.."
                f"{bad[-1]} of {end} ({len(bad)} in all, {row.first} computed before) in {layer.layer.name}"
            )
        return not wrong

    def _is_neighbour(self, request: Any, layer: LayerKV, table: Sequence[int], at: int) -> bool:
        """Whether a block's last slot has the KV of this very prefix with another token behind it."""
        if layer.layer.draft != NEXT or (at + 1) % layer.block_states:
            return False
        words, state = layer.read(table, at, at + 1), request.expected.states[at]
        (found,) = layer.state(words)
        others = (self.model.draft_state(layer.layer, state, token) for token in range(VOCAB))
        return found in others and not layer.wrong(words, [found])

    def _guess(self, request: Any, *, is_right: bool, is_drafted: bool) -> list[int]:
        """What comes next: right most of the time, if the draft's KV is; nothing of use where it did not run."""
        if not is_drafted:
            return [0] * self.guesses
        request.guessed = request.guessed or Reference(self.model)
        tokens = list(request.tokens)
        for _ in range(self.guesses):
            luck = mix(sum(tokens) * 31 + len(tokens))
            right = request.guessed.of(tokens).next_token(len(tokens) - 1)
            tokens.append(right if is_right and luck % 8 else (right + 1 + luck % 7) % VOCAB)
        return tokens[len(request.tokens) :]
