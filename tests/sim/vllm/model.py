"""The simulator's model: KV that says which tokens it was computed from, and text that depends on all of it.

The state of a token is a rolling hash of the weights and of all tokens up to it. Its KV holds that state in every
layer, mixed with the layer's and the rank's number, so KV of another prefix, layer, rank, token or set of weights is
never equal by chance. A compressed layer has one state for several tokens, a hash of theirs. The next token is a
function of the KV a token attends to: all of it under full attention, the last ``window`` tokens in a layer with a
sliding window, its own attention chunk, or the compressed states that are complete. So wrong KV is seen twice: compared
with what it should be, and in the text. Knows nothing of vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

VOCAB = 997
NO_TOKEN = VOCAB + 1
"""Stands where a draft is missing: the model never samples it."""
NEXT, OWN = "next", "own"
UNDRAFTED = 0xD5D5D5D5D5D5D5D5
"""What stands in a draft's layer where the model's KV was computed and the draft did not run."""

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15

Words = npt.NDArray[np.uint64]
States = list[int]


def mix(value: int) -> int:
    """A 64-bit number from which no bit of the old one can be read off (splitmix64)."""
    value = (value + _STEP) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's place, and what it keeps and attends to.

    Attributes:
        number: Of the layer in the model.
        window: Tokens of its sliding window; None: there is none.
        local: Tokens of an attention chunk; None: it attends across them.
        tokens_per_state: Tokens that one of its states stands for; the unit of ``attended`` and of ``LayerKV``.
        span: Tokens that one compressed state is computed from: those up to its end.
        tail: Number of the layer that has the tokens of states which are not complete.
        ring: Capacity of the one block that a request has; None: blocks lie in token order.
        group: Of a ring: tokens of a state; those of the state that is not complete are what it is for.
        replayed: Tokens at the end of a hit that are computed again into this layer; it is never loaded.
        is_recurrent: It keeps one state of all tokens so far, in one block, and goes on from that.
        draft: It is a draft's, which the model does not attend to: ``NEXT`` takes at each position the token behind
            it, as EAGLE and MTP do, ``OWN`` the token there; "" is no draft's.
    """

    name: str
    number: int
    window: int | None = None
    local: int | None = None
    tokens_per_state: int = 1
    span: int = 1
    tail: int | None = None
    ring: int | None = None
    group: int = 1
    replayed: int = 0
    is_recurrent: bool = False
    draft: str = ""

    def attended(self, position: int) -> range:
        """States that the token at ``position`` attends to."""
        end = position + 1
        if self.is_recurrent:
            return range(position, end)
        if self.tokens_per_state > 1:
            return range(end // self.tokens_per_state)
        if self.ring is not None:
            return range(end // self.group * self.group, end)
        if self.local is not None:
            return range(position // self.local * self.local, end)
        return range(max(0, end - self.window) if self.window else 0, end)

    def completed(self, first: int, end: int) -> range:
        """States that computing tokens [first, end) completes."""
        return range(first // self.tokens_per_state, end // self.tokens_per_state)

    def sources(self, state: int) -> range:
        """Tokens that a state is computed from."""
        end = (state + 1) * self.tokens_per_state
        return range(max(0, end - self.span), end)

    def salt(self, rank: int) -> int:
        """What this layer's KV is mixed with on a rank."""
        return mix(self.number * 1009 + rank)


@dataclass
class Model:
    """A model with weights that can be replaced; equal on all ranks."""

    layers: Sequence[Layer]
    weights: int = 1

    def next_state(self, state: int, token: int) -> int:
        """The state of a token, from that of the token before it (``start`` for the first)."""
        return mix(state ^ mix(token * 3 + self.weights))

    @property
    def start(self) -> int:
        return mix(self.weights)

    def extend(self, states: States, tokens: Sequence[int]) -> None:
        """Append the states of further tokens."""
        state = states[-1] if states else self.start
        states.extend(list(accumulate(tokens, self.next_state, initial=state))[1:])

    def compress(self, states: Sequence[int]) -> int:
        """The state of several tokens, from theirs."""
        value = 0
        for state in states:
            value = mix(value ^ state)
        return value

    @property
    def attending(self) -> list[Layer]:
        """The model's own layers, without a draft's."""
        return [layer for layer in self.layers if not layer.draft]

    @staticmethod
    def draft_state(layer: Layer, state: int, next_token: int) -> int:
        """What a draft keeps of a token, from the model's state there."""
        return mix(state ^ mix(next_token + 7 if layer.draft == NEXT else 5))

    def sample(self, attended: Sequence[int]) -> int:
        """The next token, from the sum of attended states of each layer."""
        return mix(sum((n + 1) * total for n, total in enumerate(attended)) & _MASK) % VOCAB


@dataclass
class Reference:
    """What the model says without any cache: states and next tokens of one sequence, for one set of weights."""

    model: Model
    tokens: list[int] = field(default_factory=list)
    states: States = field(default_factory=list)
    sums: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    weights: int = -1

    def of(self, tokens: Sequence[int]) -> "Reference":
        """Make this the reference of ``tokens``; what is shared with the last call is kept."""
        if self.weights != self.model.weights:
            self.tokens, self.states, self.sums, self.weights = [], [], {}, self.model.weights
        shared = next((i for i, (x, y) in enumerate(zip(self.tokens, tokens, strict=False)) if x != y), None)
        keep = min(len(self.tokens), len(tokens)) if shared is None else shared
        del self.tokens[keep:], self.states[keep:]
        for (ratio, _), sums in self.sums.items():
            del sums[keep // ratio + 1 :]
        self.tokens.extend(tokens[keep:])
        self.model.extend(self.states, tokens[keep:])
        return self

    def states_of(self, layer: Layer, units: range) -> States:
        """What a layer's KV must say."""
        if layer.tokens_per_state == 1:
            return self.states[units.start : units.stop]
        return [self.model.compress([self.states[i] for i in layer.sources(unit)]) for unit in units]

    def _sum(self, layer: Layer, units: range) -> int:
        sums = self.sums.setdefault((layer.tokens_per_state, layer.span), [0])
        for state in self.states_of(layer, range(len(sums) - 1, units.stop)):
            sums.append((sums[-1] + state) & _MASK)
        return (sums[units.stop] - sums[units.start]) & _MASK

    def next_token(self, position: int) -> int:
        """The token the model samples at ``position``, when everything it attends to is right."""
        return self.model.sample([self._sum(layer, layer.attended(position)) for layer in self.model.attending])


class LayerKV:
    """One layer's paged KV on one rank: a tensor ``[blocks, heads, states, content]`` seen as 64-bit words.

    A state's words are the state mixed with the layer's salt, and words that follow from the first, so that a changed
    byte anywhere is seen.
    """

    def __init__(self, layer: Layer, rank: int, tensor: Any) -> None:
        import torch

        # [B, H, N, words]; whatever the layout, the content of one token and head is dense.
        self._words: Words = tensor.view(torch.int64).numpy().view(np.uint64)
        self.layer = layer
        self._salt = np.uint64(layer.salt(rank))
        self.block_states = int(self._words.shape[2])
        heads, words = self._words.shape[1], self._words.shape[3]
        self._pattern = (np.arange(heads * words, dtype=np.uint64) * np.uint64(_STEP)).reshape(heads, words)

    def write(self, blocks: Sequence[int], first: int, states: Sequence[int]) -> None:
        """Write states ``first``, ``first + 1``, ... through a block table; of a ring the last ones stay."""
        if self.layer.ring is not None and len(states) > self.layer.ring:
            first, states = first + len(states) - self.layer.ring, states[-self.layer.ring :]
        rows, offsets = self._places(blocks, np.arange(first, first + len(states)))
        self._words[rows, :, offsets, :] = self._encode(states)

    def read(self, blocks: Sequence[int], first: int, end: int) -> Words:
        """The words of states [first, end) through a block table: [states, heads, words]."""
        rows, offsets = self._places(blocks, np.arange(first, end))
        found: Words = self._words[rows, :, offsets, :]
        return found

    def state(self, words: Words) -> list[int]:
        """The states that words stand for, right or wrong."""
        return [int(word) for word in words[:, 0, 0] ^ self._salt]

    def wrong(self, words: Words, states: Sequence[int]) -> list[int]:
        """Which of the states differ from what they should be."""
        differs = (words != self._encode(states)).any(axis=(1, 2))
        return [int(i) for i in np.flatnonzero(differs)]

    def block_of(self, blocks: Sequence[int], state: int) -> int:
        """The block that holds a state."""
        return blocks[0 if self.layer.ring is not None else state // self.block_states]

    def write_block(self, block: int, state: int) -> None:
        """Write the one state of a recurrent layer's block."""
        self._words[block, :, 0, :] = self._encode([state])[0]

    def read_block(self, block: int) -> Words:
        """The words of the one state of a recurrent layer's block: [1, 1, words]."""
        return self._words[block : block + 1, :, 0, :].copy()

    def mark(self, blocks: Sequence[int], first: int, end: int) -> None:
        """Leave states [first, end) undrafted."""
        rows, offsets = self._places(blocks, np.arange(first, end))
        self._words[rows, :, offsets, :] = np.uint64(UNDRAFTED)

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block as it is."""
        self._words[target] = self._words[source]

    def zero(self, blocks: Sequence[int]) -> None:
        """Clear blocks."""
        self._words[list(blocks)] = 0

    def _encode(self, states: Sequence[int]) -> Words:
        salted = np.array(states, dtype=np.uint64)[:, None, None] ^ self._salt
        encoded: Words = salted ^ self._pattern
        return encoded

    def _places(self, blocks: Sequence[int], positions: npt.NDArray[np.intp]) -> tuple[Any, Any]:
        table = np.asarray(blocks, dtype=np.intp)
        if self.layer.ring is not None:
            return table[positions * 0], positions % self.layer.ring
        return table[positions // self.block_states], positions % self.block_states
