"""One worker of the simulator: what vLLM's model runners remember of requests, around vLLM's own connector code.

Owns the paged KV of a rank, its worker-role connector and the block tables the scheduler sends. The calls into the
connector are vLLM's: ``KVConnectorModelRunnerMixin`` for model runner V1, ``ActiveKVConnector`` for V2. What happens
around them (which request is new, resumed, preempted; which blocks replace and which are appended; what runs before
and after the forward pass) follows ``v1/worker/gpu_model_runner.py`` and ``v1/worker/gpu/model_runner.py`` of vLLM
0.32. The forward pass is :mod:`tests.sim.vllm.model`'s: it reads and writes KV through those tables only.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector, get_kv_connector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache, copy_kv_cache_blocks_inplace

from tests.sim.vllm.drafter import Drafter
from tests.sim.vllm.model import NO_TOKEN, VOCAB, Layer, LayerKV, Model, Reference, mix

NULL_BLOCK = 0
SHOWN_MAX = 10


@dataclass
class Findings:
    """What the model saw: how much KV it checked, and what was wrong, in words.

    Attributes:
        wrong_draft_tokens: Of a draft's KV. Answers are right all the same: the model verifies what a draft guesses.
        neighbour_draft_tokens: A draft's KV of a block's last token that was made with another next token. vLLM's own
            prefix cache has such, where two prompts differ right behind a block.
        undrafted_tokens: Those for which the draft did not run.
        block_copies: Blocks copied so that a request may go on inside one that vLLM's prefix cache keeps.
    """

    checked_tokens: int = 0
    wrong_tokens: int = 0
    wrong_answers: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    checked_draft_tokens: int = 0
    wrong_draft_tokens: int = 0
    neighbour_draft_tokens: int = 0
    undrafted_tokens: int = 0
    block_copies: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, text: str, tokens: int = 0) -> None:
        """Something was wrong; the first few are kept in words."""
        self.wrong_tokens += tokens
        if len(self.wrong) < SHOWN_MAX:
            self.wrong.append(text)


@dataclass
class _Request:
    """What a runner keeps of a request between steps.

    Attributes:
        tokens: Prompt and output so far, as this worker knows them.
        computed: Tokens whose KV this worker has, rejected drafts not counted.
        blocks: The block table, one row per KV cache group.
        drafts: What the drafter proposed to follow ``tokens``.
        state_place: Where in the block table the running states of recurrent layers are; None: not since it is here.
        accepted: Tokens that the last step sampled since the running states were moved: the one behind each guess lies
            in a block of its own.
        replay_start: Where vLLM begins to compute a hit's end again for windows that no hit brings.
    """

    tokens: list[int]
    computed: int
    blocks: tuple[list[int], ...]
    drafts: list[int] = field(default_factory=list)
    replay_start: int = 0
    state_place: int | None = None
    accepted: int = 1
    expected: Reference | None = None
    guessed: Reference | None = None


@dataclass
class _Row:
    """A request in this step's batch: its new tokens are at [first, end) of ``tokens``.

    Attributes:
        carried: By recurrent layer: its state behind each new token, computed from the state it read.
    """

    request_id: str
    request: _Request
    tokens: list[int]
    first: int
    draft_count: int
    carried: dict[int, list[int]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return len(self.tokens)

    @property
    def is_sampled(self) -> bool:
        return self.end - self.draft_count >= len(self.request.tokens)


class SimulatedWorker:
    """One rank. ``execute`` is one step: ``execute_model`` and ``sample_tokens`` of vLLM's worker, in that order."""

    def __init__(self, vllm_config: Any, rank: int, kv_cache_config: Any, model: Model, findings: Findings) -> None:
        self.config = copy(vllm_config)
        self.config.parallel_config = copy(vllm_config.parallel_config)
        self.config.parallel_config.rank = rank
        self.rank = rank
        self.model = model
        self.findings = findings
        self.is_v2 = bool(vllm_config.use_v2_model_runner)
        self._is_async = bool(vllm_config.scheduler_config.async_scheduling)
        self._has_drafter = vllm_config.speculative_config is not None
        self._requests: dict[str, _Request] = {}
        self._drafted: list[str] = []
        self._steps = 0
        self.before_forward: Callable[[], None] = lambda: (
            None
        )  # a place for faults: metadata is bound, nothing computed
        self.connector = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, kv_cache_config)
        layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
        tensors = allocate_kv_cache(kv_cache_config, torch.device("cpu"), layout)
        replicas = int(kv_cache_config.kv_tp_replicas)  # so many ranks in a row hold the same KV
        self._tensors, self._num_blocks = list(tensors.values()), int(kv_cache_config.num_blocks)
        self._state_tokens = next(
            (
                int(group.kv_cache_spec.block_size)
                for group in kv_cache_config.kv_cache_groups
                if isinstance(group.kv_cache_spec, MambaSpec)
            ),
            0,
        )
        by_name = {layer.name: layer for layer in model.layers}
        self._groups = [
            [LayerKV(by_name[name], rank // replicas, tensors[name]) for name in group.layer_names]
            for group in kv_cache_config.kv_cache_groups
        ]
        self._drafter = self._its_drafter(vllm_config)
        self._v2: ActiveKVConnector | None = None
        with self._as_the_process():
            if self.is_v2:
                self._v2 = get_kv_connector(self.config, tensors)
            else:
                self.connector.register_kv_caches(tensors)
                self.connector.set_host_xfer_buffer_ops(copy_kv_blocks)

    def _its_drafter(self, vllm_config: Any) -> Drafter | None:
        """The draft of a model that has one with KV of its own."""
        layers = [(n, layer) for n, group in enumerate(self._groups) for layer in group if layer.layer.draft]
        if not layers:
            return None
        longest = int(vllm_config.speculative_config.draft_model_config.max_model_len)
        guesses = int(vllm_config.num_speculative_tokens)
        return Drafter(self.model, layers, guesses, None if self.is_v2 else longest, self.findings, self.rank)

    @contextmanager
    def _as_the_process(self) -> Iterator[None]:
        """vLLM keeps a worker's connector in a global of the worker's process; here workers take turns."""
        before, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, self.connector
        try:
            yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = before

    # -- one step ----------------------------------------------------------------------------------------------

    def execute(self, output: Any) -> Any:
        """Run a scheduler's step; ``output`` must be this worker's own copy."""
        self._steps += 1
        with self._as_the_process():
            return self._execute_v2(output) if self.is_v2 else self._execute_v1(output)

    def _execute_v1(self, output: Any) -> Any:
        self.connector.handle_preemptions(output.kv_connector_metadata)
        self._update_v1(output)
        if not output.total_num_scheduled_tokens:
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self.config)
        self._move_states(output)
        with (
            set_forward_context(None, self.config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(
                output, defer_finalize=self._has_drafter
            ) as kv_output,
        ):
            rows, attended = self._forward(output)
        sampled = self._sample(rows, attended)
        if self._has_drafter:
            KVConnectorModelRunnerMixin.finalize_kv_connector()
        return self._result(rows, sampled, kv_output)

    def _execute_v2(self, output: Any) -> Any:
        assert self._v2 is not None
        self._update_v2(output)
        if not output.total_num_scheduled_tokens:
            return self._v2.no_forward(output)
        ids = list(output.num_scheduled_tokens)
        batch = SimpleNamespace(
            idx_mapping=torch.arange(len(ids)), req_ids=ids, num_tokens=output.total_num_scheduled_tokens
        )
        self._move_states(output)
        with set_forward_context(None, self.config):
            self._v2.pre_forward(output, batch)
            rows, attended = self._forward(output)
        self._v2.finish_forward()
        sampled = self._sample(rows, attended)
        if not hasattr(self._v2, "finalize_step"):
            return self._result(rows, sampled, self._v2.post_forward(output.finished_req_ids))
        # From 0.33 on: a drafter of the model runner's may save KV, too.
        kv_output = self._v2.post_forward(output.finished_req_ids, defer_finalize=self._has_drafter)
        if self._has_drafter:
            self._v2.finalize_step()
        return self._result(rows, sampled, kv_output)

    def _result(self, rows: Sequence[_Row], sampled: list[list[int]], kv_output: Any) -> Any:
        ids = [row.request_id for row in rows]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: n for n, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=kv_output,
        )

    def draft_tokens(self) -> Any:
        """What the drafter proposes, for a scheduler that asks before it schedules."""
        return DraftTokenIds(list(self._drafted), [list(self._requests[id_].drafts) for id_ in self._drafted])

    # -- what a runner remembers -------------------------------------------------------------------------------

    def _update_v1(self, output: Any) -> None:
        """V1 keeps preempted requests; one that is resumed comes as cached, with a whole new block table."""
        for request_id in output.finished_req_ids:
            self._requests.pop(request_id, None)
        self._prepare_blocks(output)
        for new in output.scheduled_new_reqs:
            assert not new.replay_start, "V1 replays nothing"
            self._requests[new.req_id] = _Request(list(new.prompt_token_ids), new.num_computed_tokens, new.block_ids)
        cached = output.scheduled_cached_reqs
        for n, request_id in enumerate(cached.req_ids):
            request, blocks = self._requests[request_id], cached.new_block_ids[n]
            if request_id in cached.resumed_req_ids:
                assert blocks is not None, "resumed without blocks"
                request.blocks = blocks
                request.computed, request.drafts, request.state_place = cached.num_computed_tokens[n], [], None
                request.accepted = 1
                # Not scheduled in the step before, so the scheduler has sent all it knows. Drafts are not in it, and
                # what was sampled in a step that it dropped is not either.
                request.tokens = list(cached.all_token_ids[request_id])
            else:
                self._append(request, blocks)
            self._check_progress(request_id, request, cached.num_computed_tokens[n])

    def _update_v2(self, output: Any) -> None:
        """V2 forgets preempted requests; one that is resumed comes as new, with all its tokens."""
        for request_id in output.finished_req_ids | (output.preempted_req_ids or set()):
            self._requests.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            assert new.prefill_token_ids is not None
            self._requests[new.req_id] = _Request(
                list(new.prefill_token_ids), new.num_computed_tokens, new.block_ids, replay_start=new.replay_start
            )
        cached = output.scheduled_cached_reqs
        assert not cached.resumed_req_ids, "V2 takes resumed requests as new ones"
        for n, request_id in enumerate(cached.req_ids):
            self._append(self._requests[request_id], cached.new_block_ids[n])
            self._check_progress(request_id, self._requests[request_id], cached.num_computed_tokens[n])
        self._prepare_blocks(output)

    def _append(self, request: _Request, blocks: Any) -> None:
        for row, more in zip(request.blocks, blocks or (), strict=False):
            row.extend(more)

    def _prepare_blocks(self, output: Any) -> None:
        """Zero new blocks, then copy what a request must not write into in place."""
        if output.new_block_ids_to_zero:
            for layers in self._groups:
                for layer in layers:
                    layer.zero(output.new_block_ids_to_zero)
        self.findings.block_copies += len(output.kv_cache_block_copies or ())
        copy_kv_cache_blocks_inplace(self._tensors, self._num_blocks, output.kv_cache_block_copies or ())

    def _move_states(self, output: Any) -> None:
        """Copy states from where the last step left them to the blocks that this step computes in.

        As ``preprocess_mamba`` (V1) and ``preprocess_mamba_align_fused_kernel`` (V2) do, and when: after the block
        tables are known, before the connector begins its loads. A state that a load brings later is not seen.
        """
        if not self._state_tokens:
            return
        for request_id, count in output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            place = request.state_place
            if place is None:
                place = (request.computed - 1) // self._state_tokens  # -1: there is none
            request.state_place = -(-(request.computed + count) // self._state_tokens) - 1
            if place in (-1, request.state_place):
                continue
            self._copy_states(request, place + request.accepted - 1, request.state_place)
            request.accepted = 1

    def _copy_states(self, request: _Request, source: int, target: int) -> None:
        for group, table in zip(self._groups, request.blocks, strict=True):
            for layer in group:
                if layer.layer.is_recurrent:
                    layer.copy_block(table[source], table[target])

    def _keep_boundary(self, row: _Row, accepted: int) -> None:
        """Where accepted guesses crossed the end of a block, copy the state there into that block.

        As ``postprocess_mamba_fused_kernel`` does behind the sampler, before the connector saves.
        """
        request = row.request
        assert request.state_place is not None
        running = row.end - row.draft_count
        aligned = (running + accepted - 1) // self._state_tokens * self._state_tokens
        request.accepted = accepted
        if aligned < running:
            return
        place, bias = aligned // self._state_tokens - 1, aligned - running
        if place == request.state_place:
            request.accepted = 1
        if place != request.state_place or bias:
            self._copy_states(request, request.state_place + bias, place)

    def _check_progress(self, request_id: str, request: _Request, scheduled: int) -> None:
        """The scheduler counts drafts in flight as computed; this worker knows which were rejected."""
        is_ahead = self._is_async and self._has_drafter
        if scheduled != request.computed and not (is_ahead and scheduled >= request.computed):
            self.findings.add(
                f"rank {self.rank} step {self._steps}: {request_id} has {request.computed} tokens computed, "
                f"the scheduler says {scheduled}"
            )

    # -- the forward pass --------------------------------------------------------------------------------------

    def _forward(self, output: Any) -> tuple[list[_Row], list[list[list[int]]]]:
        """Compute and write all new tokens' KV, then read and check what they attend to.

        In the order of the batch: a request may share blocks that one before it fills in this very step.
        """
        self.before_forward()
        rows = [self._row(output, request_id, count) for request_id, count in output.num_scheduled_tokens.items()]
        for row in rows:
            self._write(row)
        return rows, [self._attend(row) for row in rows]

    def _row(self, output: Any, request_id: str, count: int) -> _Row:
        request = self._requests[request_id]
        known = request.tokens[: request.computed + count]
        draft_count = request.computed + count - len(known)
        drafts = list(output.scheduled_spec_decode_tokens.get(request_id, ()))
        if all(token < 0 for token in drafts):
            drafts = list(request.drafts)  # placeholders: the drafts never leave the worker
        drafts = [token if token >= 0 else NO_TOKEN for token in drafts[:draft_count]]
        drafts += [NO_TOKEN] * (draft_count - len(drafts))
        assert self._has_drafter or not draft_count, "more tokens scheduled than there are"
        return _Row(request_id, request, known + drafts, request.computed, draft_count)

    def _write(self, row: _Row) -> None:
        """Write what a row computes: what it needs of earlier tokens is read through the block tables first."""
        states = self._states(row)
        compressed = {
            layer.layer.number: self._compressed(row, layer.layer, states) for group in self._groups for layer in group
        }
        replay_end = self._replay_end(row)
        for group, table in zip(self._groups, row.request.blocks, strict=True):
            for layer in group:
                if layer.layer.draft:
                    continue  # when the next token is known
                if layer.layer.is_recurrent:
                    self._go_on(row, layer, table)
                    continue
                first = row.first if layer.layer.replayed else min(max(row.first, replay_end), row.end)
                units = layer.layer.completed(first, row.end)
                if not units:
                    continue
                self._check_places(row, layer, table, units)
                new = (
                    compressed[layer.layer.number] if layer.layer.tokens_per_state > 1 else states[first - row.first :]
                )
                layer.write(table, units.start, new[-len(units) :])

    def _go_on(self, row: _Row, layer: LayerKV, table: Sequence[int]) -> None:
        """Compute a recurrent layer's states from the one in its running block, and leave the last one there."""
        place = row.request.state_place
        assert place is not None and (not row.draft_count or row.end - row.first == row.draft_count + 1)
        block = table[place + row.request.accepted - 1]
        states: list[int] = []
        if row.first:
            words = layer.read_block(block)
            row.request.expected = row.request.expected or Reference(self.model)
            states = layer.state(words)
            right = row.request.expected.of(row.tokens).states[row.first - 1 : row.first]
            self.findings.checked_tokens += 1
            if layer.wrong(words, right):
                self.findings.add(
                    f"rank {self.rank} step {self._steps}: {row.request_id} goes on from a wrong state behind "
                    f"{row.first} tokens in {layer.layer.name}, block {block}",
                    1,
                )
        if NULL_BLOCK in table[place : place + row.draft_count + 1]:
            self.findings.add(f"rank {self.rank}: {row.request_id} writes a state into the null block")
        self.model.extend(states, row.tokens[row.first :])
        row.carried[layer.layer.number] = states[-(row.end - row.first) :]
        for n in range(row.draft_count + 1):  # the state behind each guess has a block of its own
            layer.write_block(table[place + n], states[n - row.draft_count - 1])

    def _states(self, row: _Row) -> list[int]:
        """The states of a row's tokens, from that of the token before them in the first layer that has it."""
        before: list[int] = []
        if row.first:
            found = self._token_layer(row)
            if found is None:  # all windows are being replayed: nothing has it, and nothing is computed from it
                before = (
                    (row.request.expected or Reference(self.model)).of(row.tokens).states[row.first - 1 : row.first]
                )
            else:
                layer, table = found
                before = layer.state(layer.read(table, row.first - 1, row.first))
        states = list(before)
        self.model.extend(states, row.tokens[row.first :])
        return states[len(before) :]

    def _token_layer(self, row: _Row) -> tuple[LayerKV, list[int]] | None:
        """A layer with one state per token that attends to the token before the row, and its block table."""
        is_replayed = row.first < self._replay_end(row)
        for group, table in zip(self._groups, row.request.blocks, strict=True):
            for layer in group:
                has_it = row.first - 1 in layer.layer.attended(row.first) and layer.layer.tokens_per_state == 1
                if (
                    has_it
                    and not layer.layer.draft
                    and layer.layer.ring is None
                    and not (is_replayed and layer.layer.replayed)
                ):
                    return layer, table
        return None

    def _compressed(self, row: _Row, layer: Layer, states: Sequence[int]) -> list[int]:
        """The compressed states that a row completes; tokens before it are read from the layer's tail."""
        units = layer.completed(max(row.first, self._replay_end(row)), row.end)
        if layer.tokens_per_state == 1 or not units:
            return []
        start = min(layer.sources(units.start).start, row.first)
        group, tail = next(
            (n, one) for n, of in enumerate(self._groups) for one in of if one.layer.number == layer.tail
        )
        every = [*tail.state(tail.read(row.request.blocks[group], start, row.first)), *states]
        return [self.model.compress([every[i - start] for i in layer.sources(unit)]) for unit in units]

    def _replay_end(self, row: _Row) -> int:
        """Up to where a row's request computes tokens again that only replayed windows need; 0: nowhere."""
        window = max(layer.layer.replayed for group in self._groups for layer in group)
        return row.request.replay_start + window if row.request.replay_start else 0

    def _check_places(self, row: _Row, layer: LayerKV, table: Sequence[int], units: range) -> None:
        if NULL_BLOCK in {layer.block_of(table, unit) for unit in units}:
            self.findings.add(f"rank {self.rank}: {row.request_id} writes into the null block")

    def _attend(self, row: _Row) -> list[list[int]]:
        """Sums of attended states, per position that is sampled from and per layer in the model's order."""
        row.request.expected = row.request.expected or Reference(self.model)
        expected = row.request.expected.of(row.tokens)
        last_known = row.end - 1 - row.draft_count
        sums: dict[int, list[int]] = {}
        for group, layers in enumerate(self._groups):
            for layer in layers:
                if layer.layer.draft:
                    continue
                if layer.layer.is_recurrent:
                    sampled = range(last_known, row.end) if row.is_sampled else ()
                    sums[layer.layer.number] = [row.carried[layer.layer.number][at - row.first] for at in sampled]
                    continue
                # A ring has the last tokens only; a window that is replayed, those from the replay's start on.
                from_ = row.first if layer.layer.ring is None else max(row.first, last_known)
                if layer.layer.replayed:
                    from_ = max(from_, min(self._replay_end(row), row.end - 1))
                start, end = layer.layer.attended(from_).start, layer.layer.attended(row.end - 1).stop
                if layer.layer.replayed:
                    start = max(start, row.request.replay_start)
                words = layer.read(row.request.blocks[group], start, end)
                self._compare(
                    row, group, layer, start, layer.wrong(words, expected.states_of(layer.layer, range(start, end)))
                )
                states = layer.state(words)
                places = [layer.layer.attended(at) for at in (range(last_known, row.end) if row.is_sampled else ())]
                sums[layer.layer.number] = [
                    sum(states[units.start - start : units.stop - start]) & ((1 << 64) - 1) for units in places
                ]
        return [list(column) for column in zip(*(sums[layer.number] for layer in self.model.attending), strict=True)]

    def _compare(self, row: _Row, group: int, layer: LayerKV, start: int, wrong: list[int]) -> None:
        self.findings.checked_tokens += layer.layer.attended(row.end - 1).stop - start
        if wrong:
            block = layer.block_of(row.request.blocks[group], start + wrong[0])
            self.findings.add(
                f"rank {self.rank} step {self._steps}: {row.request_id} reads wrong KV of states {start + wrong[0]}.."
                f"{start + wrong[-1]} of {row.end} ({len(wrong)} in all, {row.first} computed before) in "
                f"{layer.layer.name} group {group}, block {block}",
                len(wrong),
            )

    # -- sampling and drafting ---------------------------------------------------------------------------------

    def _sample(self, rows: Sequence[_Row], attended: Sequence[list[list[int]]]) -> list[list[int]]:
        self._drafted = [row.request_id for row in rows if row.is_sampled] if self._has_drafter else []
        sampled = [self._sample_row(row, sums) for row, sums in zip(rows, attended, strict=True)]
        if self._drafter is not None:
            self._drafter.run(rows, self._steps)
        return sampled

    def _sample_row(self, row: _Row, sums: list[list[int]]) -> list[int]:
        request = row.request
        request.computed = row.end
        if not row.is_sampled:
            if self._state_tokens:
                self._keep_boundary(row, 1)
            return []  # a chunk of a prefill that goes on
        sampled = []
        drafts = row.tokens[row.end - row.draft_count :]
        for n, column in enumerate(sums):
            sampled.append(self.model.sample(column))
            if n == len(drafts) or sampled[-1] != drafts[n]:
                break
        rejected = row.draft_count - (len(sampled) - 1)
        request.computed -= rejected
        if self._state_tokens:
            self._keep_boundary(row, len(sampled))
        request.tokens.extend(sampled)
        if self.rank == 0:
            self.findings.accepted_drafts += len(sampled) - 1
            self.findings.rejected_drafts += rejected
        if self._has_drafter and self._drafter is None:
            request.drafts = self._guess(request)
        return sampled

    def _guess(self, request: _Request) -> list[int]:
        """Guess what comes next, as an n-gram drafter does: often right, often not, and the same on every rank."""
        request.guessed = request.guessed or Reference(self.model)
        tokens = list(request.tokens)
        for _ in range(self.config.num_speculative_tokens):
            luck = mix(sum(tokens) * 31 + len(tokens))
            right = request.guessed.of(tokens).next_token(len(tokens) - 1)
            tokens.append(right if luck % 4 else luck % VOCAB)
        drafts = tokens[len(request.tokens) :]
        return drafts if self._is_async else drafts[: mix(len(tokens)) % (len(drafts) + 1)]
