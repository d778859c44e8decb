"""What vLLM 0.32's CPU build lacks to draft with recurrent layers: two kernels, done by the scalar copies it has.

On a GPU ``precopy_mamba_align_fused_kernel`` and ``postprocess_mamba_fused_kernel`` move states between the blocks of a
request before and after a step. :func:`mamba_drafts` has the same moves made by vLLM's own slower path. For tests only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest


@contextmanager
def mamba_drafts() -> Iterator[None]:
    """Engines started in this process may draft with recurrent layers, for the length of a ``with`` block."""
    import vllm.v1.worker.mamba_utils as mamba

    prepare = mamba.preprocess_mamba
    running: dict[int, int] = {}  # per row of the batch, the place of the request's state

    def preprocess(output: Any, config: Any, cache: Any, places: Any, batch: Any, *more: Any, **named: Any) -> None:
        prepare(output, config, cache, places, batch, *more, **named)
        running.clear()
        running.update({row: places[name] for row, name in enumerate(batch.req_ids)})

    def postprocess(**given: Any) -> None:
        _keep_accepted_states(mamba, running, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mamba, "_resolve_fused_precopy", lambda _: None)
        patch.setattr(mamba, "preprocess_mamba", preprocess)
        patch.setattr(mamba, "postprocess_mamba_align_gpu", postprocess)
        yield


def _keep_accepted_states(
    mamba: Any,
    running: dict[int, int],
    *,
    bufs: Any,
    num_reqs: int,
    num_accepted_tokens_gpu: Any,
    num_accepted_tokens_cpu_tensor: Any,
    input_batch: Any,
    kv_cache_config: Any,
    forward_context: Any,
    mamba_state_copy_funcs: Any,
) -> None:
    """Where accepted guesses pass a boundary, copy the state there from the guess that reached it."""
    align, copies = bufs.postprocess_align, bufs.preprocess
    block, groups = copies.mamba_spec.block_size, copies.mamba_group_ids
    copies.offset = 0
    told = num_accepted_tokens_gpu[:num_reqs].clone()
    for row in range(num_reqs):
        computed = align.num_computed_tokens_buf.gpu[row] + align.num_scheduled_tokens_buf.gpu[row]
        start = int(computed - align.num_draft_tokens_buf.gpu[row])
        boundary = (start + int(num_accepted_tokens_gpu[row]) - 1) // block * block
        if boundary < start:
            continue
        source, target = running[row], boundary // block - 1
        if source == target:
            told[row] = 1
        tables = {g: input_batch.block_table[g].get_device_tensor(num_reqs)[row].tolist() for g in groups}
        mamba.collect_mamba_copy_meta(
            copies,
            kv_cache_config,
            mamba_state_copy_funcs,
            groups,
            source,
            target,
            boundary - start,
            SimpleNamespace(block_ids=tables),
            forward_context,
        )
    mamba.do_mamba_copy_block(copies)
    num_accepted_tokens_cpu_tensor[:num_reqs].copy_(told)
