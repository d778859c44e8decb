"""`python -m tools.kv_size`: what a model's KV takes, worked out from its config.json.

Run it in a clone of the repository. It needs tiered_kv, and neither vLLM nor a GPU.
"""

from dataclasses import replace
from enum import StrEnum
from typing import Annotated

import msgspec
import typer

from tiered_kv.cli.exits import EXIT_CODES
from tiered_kv.cli.options import AsJson
from tiered_kv.cli.output import exit_codes, print_json, print_table
from tiered_kv.config import parse_size, size_text
from tiered_kv.errors import ConfigError
from tiered_kv.ops.report import Report
from tiered_kv.ops.text import option_value
from tools.kv_size.model_config import ModelShape, read_config, shape_of
from tools.kv_size.sizing import (
    Chunk,
    Run,
    States,
    chunk_of,
    fits,
    geometry_of,
    loadable_tokens,
    need_of,
    run_of,
    states_of,
)

app = typer.Typer(
    add_completion=False,
    context_settings={"max_content_width": 120},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

SHOWN_WINDOWS = 4
"""Kinds of layers told in words; models have one or two."""


class SizeFit(msgspec.Struct, frozen=True, kw_only=True):
    """What fits into one tier.

    Attributes:
        tier: ``host``, ``disk`` or ``bucket``.
        limit_bytes: The limit that was given.
        chunks: Chunks that fit; on a disk beside what is kept for metadata.
        tokens: Their tokens.
        prompts: Prompts of ``--tokens`` without a common beginning that fit; null without ``--tokens``, or where such
            a prompt has no whole chunk.
        loadable_tokens: The longest prefix that one request may load; of host memory only, else null.
    """

    tier: str
    limit_bytes: int
    chunks: int
    tokens: int
    prompts: int | None
    loadable_tokens: int | None


class SizeNeed(msgspec.Struct, frozen=True, kw_only=True):
    """What prompts without a common beginning need.

    Attributes:
        tokens: Tokens of each prompt.
        prompts: How many.
        stored_tokens: Tokens of one prompt that are stored: its whole chunks.
        chunks: Chunks of all prompts.
        states: States of all prompts: one each, at the last boundary before its end.
        size_bytes: What they take in each tier that holds them all.
        disk_bytes: The least ``disk_bytes`` that does.
        load_host_bytes: The least ``host_bytes`` with which one request loads such a prompt whole.
    """

    tokens: int
    prompts: int
    stored_tokens: int
    chunks: int
    states: int
    size_bytes: int
    disk_bytes: int
    load_host_bytes: int


class SizeReport(Report, frozen=True, kw_only=True):
    """What a model's KV takes.

    Attributes:
        model_type: As config.json says it.
        layers: Layers that store KV.
        attention: Kind of attention and its heads, in words.
        windows: Windows of the layers in words; ``full attention`` where there is none.
        dtype: Of the KV, as safetensors names it: BF16, F16, F32, F8_E4M3.
        tp: Tensor-parallel ranks.
        block_tokens: Tokens of vLLM's block.
        chunk_tokens: Tokens of a chunk.
        token_bytes: KV per token that is stored, all ranks together, rounded up.
        chunk_data_bytes: KV of one chunk.
        state_layers: Layers with a state instead of KV per token.
        states: Their kind in words; null where there are none.
        state_parts: Parts of the state at one boundary, each as large as a chunk.
        state_data_bytes: State at one boundary, all ranks together, without what its parts leave empty.
        state_bytes: What the state at one boundary takes in every tier: its parts' blobs.
        draft_layers: Layers of a draft among those that store KV.
        header_bytes: Header of a chunk's blob.
        chunk_bytes: All of the blob: KV, header and padding. ``doctor --chunk-bytes`` takes it.
        fits: What fits into the limits that were given.
        need: What ``--tokens`` and ``--prompts`` need; null without ``--tokens``.
        notes: What was assumed, in words.
    """

    model_type: str
    layers: int
    attention: str
    windows: str
    dtype: str
    tp: int
    block_tokens: int
    chunk_tokens: int
    token_bytes: int
    chunk_data_bytes: int
    state_layers: int
    states: str | None
    state_parts: int
    state_data_bytes: int
    state_bytes: int
    draft_layers: int
    header_bytes: int
    chunk_bytes: int
    fits: list[SizeFit]
    need: SizeNeed | None
    notes: list[str]


class KvDtype(StrEnum):
    """A dtype of the KV cache."""

    AUTO = "auto"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"


NAMES = {KvDtype.BF16: "BF16", KvDtype.FP16: "F16", KvDtype.FP32: "F32", KvDtype.FP8: "F8_E4M3"}
LimitOption = Annotated[str | None, typer.Option(metavar="SIZE", help="This limit, to see what fits: 8GiB, 2TiB.")]


@app.command(epilog=EXIT_CODES)
def size(
    model: Annotated[
        str, typer.Argument(help="A directory with the model's config.json, or that file.", show_default=False)
    ],
    dtype: Annotated[
        KvDtype,
        typer.Option("--kv-cache-dtype", "--dtype", help="Of the KV; auto: what vLLM takes for this checkpoint."),
    ] = KvDtype.AUTO,
    draft_layers: Annotated[
        int, typer.Option(min=0, help="Layers of an EAGLE or MTP draft, shaped as the model's: nearly always 1.")
    ] = 0,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    block_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help="vLLM's block size; matters with sliding windows. With recurrent layers what it is a multiple of.",
        ),
    ] = 16,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="The setting chunk_tokens.")] = 256,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt.", show_default=False)] = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many such prompts, without a common beginning.")] = 1,
    host_bytes: LimitOption = None,
    disk_bytes: LimitOption = None,
    bucket_bytes: LimitOption = None,
    as_json: AsJson = False,
) -> None:
    """Say what a model's KV takes: bytes per token and chunk, what fits into a tier, what prompts need.

    Worked out from the model's config.json alone: nothing is downloaded, and neither vLLM nor a GPU is needed. With
    --host-bytes, --disk-bytes or --bucket-bytes it says how many chunks, tokens and prompts fit; with --tokens and
    --prompts how many bytes so many need. A chunk's size is that of the real blob, with header and padding, and the
    disk's reserve for metadata is left out of its room.

    With more ranks than KV heads every rank stores its own copy; what all ranks hold alike (MLA) is stored once.
    Layers with a sliding window store the end of each chunk that the window needs. With recurrent layers (Qwen3-Next,
    Qwen3.5 and 3.6, Granite 4) the chunk is vLLM's block, which is worked out, and a prompt has a state besides. Other
    kinds of state, and fields that are not known here, are an error rather than a guess.
    """
    with exit_codes():
        if prompts > 1 and tokens is None:
            raise ConfigError("option --prompts: say --tokens, too: how long each prompt is")
        limits = {
            "host": _limit("--host-bytes", host_bytes),
            "disk": _limit("--disk-bytes", disk_bytes),
            "bucket": _limit("--bucket-bytes", bucket_bytes),
        }
        shape = shape_of(read_config(model), NAMES.get(dtype))
        shape = with_draft(shape, draft_layers)
        run = run_of(shape, Run(tp, block_tokens, chunk_tokens))
        chunk, states = chunk_of(geometry_of(shape, run)), states_of(shape, run)
        need = None if tokens is None else _need(chunk, tokens, prompts, states.parts)
        report = _report(shape, run, chunk, states, _fits(chunk, limits, tokens, states.parts), need, draft_layers)
        if as_json:
            print_json(report)
        else:
            _show(report)


def _limit(option: str, text: str | None) -> int | None:
    return None if text is None else option_value(option, parse_size, text)


def with_draft(shape: ModelShape, layers: int) -> ModelShape:
    """The model with so many layers of a draft beside its own.

    Raises:
        ConfigError: They are not cached together.
    """
    if not layers:
        return shape
    if shape.recurrent is not None or shape.is_mla or any(shape.windows):
        raise ConfigError(
            "option --draft-layers: it is worked out beside full attention only, not beside windows, MLA or states "
            "(docs/models.md says which drafts are cached)"
        )
    return replace(shape, windows=(*shape.windows, *(None,) * layers))


def _fits(chunk: Chunk, limits: dict[str, int | None], tokens: int | None, parts: int) -> list[SizeFit]:
    per_prompt = 0 if tokens is None or tokens < chunk.tokens else tokens // chunk.tokens + parts
    return [
        SizeFit(
            tier=found.tier,
            limit_bytes=found.limit_bytes,
            chunks=found.chunks,
            tokens=found.chunks * chunk.tokens,
            prompts=found.chunks // per_prompt if per_prompt else None,
            loadable_tokens=loadable_tokens(chunk, found.limit_bytes, parts) if found.tier == "host" else None,
        )
        for found in fits(chunk, limits)
    ]


def _need(chunk: Chunk, tokens: int, prompts: int, parts: int) -> SizeNeed:
    found = need_of(chunk, tokens, prompts, parts)
    return SizeNeed(
        tokens=tokens,
        prompts=prompts,
        stored_tokens=found.chunks * chunk.tokens,
        chunks=found.chunks * prompts,
        states=prompts if found.parts else 0,
        size_bytes=found.all_bytes,
        disk_bytes=found.disk_bytes,
        load_host_bytes=found.load_bytes,
    )


def _report(
    shape: ModelShape,
    run: Run,
    chunk: Chunk,
    states: States,
    fitting: list[SizeFit],
    need: SizeNeed | None,
    draft_layers: int,
) -> SizeReport:
    return SizeReport(
        model_type=shape.model_type,
        layers=len(shape.windows),
        attention=shape.attention,
        windows=_windows(shape),
        dtype=shape.dtype,
        tp=run.tp,
        block_tokens=run.block_tokens,
        chunk_tokens=run.chunk_tokens,
        token_bytes=chunk.token_bytes,
        chunk_data_bytes=chunk.data_bytes,
        state_layers=0 if shape.recurrent is None else shape.recurrent.layers,
        states=None if shape.recurrent is None else shape.recurrent.kind,
        state_parts=states.parts,
        state_data_bytes=states.data_bytes,
        state_bytes=states.parts * chunk.blob_bytes,
        draft_layers=draft_layers,
        header_bytes=chunk.header_bytes,
        chunk_bytes=chunk.blob_bytes,
        fits=fitting,
        need=need,
        notes=_notes(shape, run, need, draft_layers),
    )


def _notes(shape: ModelShape, run: Run, need: SizeNeed | None, draft_layers: int) -> list[str]:
    """What was assumed, in words."""
    notes = list(shape.notes)
    if shape.is_mla and run.tp > 1:
        notes.append("all ranks hold the same KV, which is stored once (vLLM 0.30: once per rank)")
    elif run.tp > shape.kv_heads:
        copies = run.tp // shape.kv_heads
        notes.append(
            f"more ranks than KV heads: each head's KV is stored {copies} times, once by each rank that has it"
        )
    if any(shape.windows):
        notes.append(f"blocks of {run.block_tokens} tokens, and vLLM's hybrid KV-cache manager on, as is its default")
    if need is not None and not need.chunks:
        notes.append(f"a prompt shorter than a chunk of {run.chunk_tokens} tokens is never stored")
    if draft_layers:
        notes.append(f"{draft_layers} of the layers are the draft's, each with KV as large as one of the model's")
    if shape.recurrent is not None:
        notes.append(
            f"vLLM's block is {run.block_tokens} tokens, whose KV takes as much as one layer's state; its log tells "
            "the real one, which also depends on the attention backend"
        )
        notes.append(
            "one state per prompt, at the last boundary before its end, as vLLM keeps by default; where prompts fork "
            "there is another one"
        )
    return notes


def _windows(shape: ModelShape) -> str:
    """``10 full attention, 52 with a window of 1024 tokens``."""
    kinds = sorted(set(shape.windows), key=lambda window: window or 0)
    words = [
        f"{shape.windows.count(window)} "
        + ("full attention" if window is None else f"with a window of {window} tokens")
        for window in kinds[:SHOWN_WINDOWS]
    ]
    return "full attention" if kinds == [None] else ", ".join(words)


def _show(report: SizeReport) -> None:
    ranks = "one rank" if report.tp == 1 else f"{report.tp} ranks"
    chunk = f"{report.chunk_tokens} tokens: {size_text(report.chunk_bytes)} ({report.chunk_bytes} bytes)"
    rows = [
        ("model", f"{report.model_type}, {report.layers + report.state_layers} layers, {report.attention}"),
        ("layers", report.windows),
        ("KV", f"{report.dtype}, {ranks}"),
        ("per token", f"{size_text(report.token_bytes)} ({report.token_bytes} bytes)"),
        ("per chunk", f"{chunk}, of which {report.header_bytes} are header"),
    ]
    if report.states:
        state = f"{report.state_parts} parts, {size_text(report.state_bytes)} ({report.state_bytes} bytes)"
        rows.append(("states", f"{report.state_layers} layers, {report.states}"))
        rows.append(("per state", f"{state}, of which {report.state_data_bytes} are state"))
    print_table("KV", ("what", "size"), rows)
    if report.fits:
        print()
        print_table(
            "What fits",
            ("tier", "limit", "chunks", "tokens", "prompts", "one request may load"),
            [
                (
                    fit.tier,
                    size_text(fit.limit_bytes),
                    fit.chunks,
                    fit.tokens,
                    "-" if fit.prompts is None else fit.prompts,
                    "-" if fit.loadable_tokens is None else f"{fit.loadable_tokens} tokens",
                )
                for fit in report.fits
            ],
        )
    if report.need is not None:
        _show_need(report.need)
    if report.notes:
        print()
    for text in report.notes:
        print(f"Assumed: {text}.")


def _show_need(need: SizeNeed) -> None:
    print()
    many = "prompt" if need.prompts == 1 else "prompts"
    rows = [
        ("chunks", str(need.chunks)),
        *([("states", str(need.states))] if need.states else []),
        ("each tier that holds all", size_text(need.size_bytes)),
        ("disk_bytes, with its metadata", size_text(need.disk_bytes)),
        ("host_bytes to load one whole", size_text(need.load_host_bytes)),
    ]
    stored = f"{need.stored_tokens} of {need.tokens} tokens are stored"
    print_table(f"What {need.prompts} {many} of {need.tokens} tokens need ({stored} of each)", ("what", "size"), rows)


if __name__ == "__main__":
    app(prog_name="python -m tools.kv_size")
