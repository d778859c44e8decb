"""docs/sizing.md says what `tools.kv_size` says: every row of its tables is worked out again."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.kit.samples.model_configs import KNOWN, RECURRENT
from tiered_kv.cli.text import count_text
from tiered_kv.config import size_text
from tiered_kv.tiering.types import Limits
from tools.kv_size.__main__ import app

LIMITS = ("--host-bytes", "64GiB", "--disk-bytes", "2TiB", "--bucket-bytes", "20TiB")


@pytest.fixture
def page(repository: Path) -> str:
    return (repository / "docs" / "sizing.md").read_text()


def rows(page: str, heading: str) -> list[list[str]]:
    """Cells of the table whose head begins so."""
    table = page[page.index(f"| {heading} |") :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def sizes(tmp_path: Path, name: str, *options: object) -> dict[str, Any]:
    file = tmp_path / "config.json"
    file.write_text(json.dumps((KNOWN | RECURRENT)[name]))
    result = CliRunner().invoke(app, [str(file), *map(str, options), "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_kv_per_token(page: str, tmp_path: Path) -> None:
    made = []
    for name in KNOWN:
        full, half = sizes(tmp_path, name), sizes(tmp_path, name, "--kv-cache-dtype", "fp8")
        cells = [name, f"{full['layers']}, {full['attention']}", f"{full['token_bytes']:,}", f"{half['token_bytes']:,}"]
        made.append([*cells, size_text(full["chunk_bytes"])])
    assert rows(page, "Model | Layers and attention") == made
    assert len(made) == 10


def test_ranks(page: str, tmp_path: Path) -> None:
    shown = rows(page, "Model | Tensor-parallel ranks")
    assert len(shown) == 4
    for name, ranks, size in shown:
        assert size == f"{sizes(tmp_path, name, '--tp', ranks)['token_bytes']:,}"


def test_what_fits(page: str, tmp_path: Path) -> None:
    made = []
    for name in KNOWN:
        found = sizes(tmp_path, name, *LIMITS, "--tokens", 8000, "--prompts", 1000)
        fits = [count_text(fit["tokens"]) for fit in found["fits"]]
        made.append([name, *fits, size_text(found["need"]["size_bytes"])])
    assert rows(page, "Model | host 64 GiB") == made


def test_states(page: str, tmp_path: Path) -> None:
    made = []
    for name in RECURRENT:
        found = sizes(tmp_path, name, *LIMITS, "--tokens", 8000, "--prompts", 1000)
        layers = f"{found['layers']} attend, {found['state_layers']} {found['states']}"
        parts = f"{found['state_parts']} x {size_text(found['chunk_bytes'])}"
        cells = [name, layers, f"{found['token_bytes']:,}", str(found["chunk_tokens"]), parts]
        fit = count_text(found["fits"][0]["prompts"])
        made.append([*cells, size_text(found["state_bytes"]), fit, size_text(found["need"]["size_bytes"])])
        assert found["need"]["states"] == 1000
        assert (
            found["need"]["chunks"] * found["chunk_bytes"] + 1000 * found["state_bytes"] == found["need"]["size_bytes"]
        )
    assert rows(page, "Model | Layers | Bytes per token") == made and len(made) == 3


def test_drafts(page: str, tmp_path: Path) -> None:
    plain = sizes(tmp_path, "Llama-3.1-8B")
    drafted = sizes(tmp_path, "Llama-3.1-8B", "--draft-layers", 1)
    more = drafted["token_bytes"] - plain["token_bytes"]
    assert (drafted["layers"], drafted["draft_layers"]) == (33, 1)
    assert f"{drafted['token_bytes']:,} instead of {plain['token_bytes']:,}" in page
    assert more == plain["token_bytes"] // 32 and f"{100 * more / plain['token_bytes']:.0f} % more" in page
    file = tmp_path / "config.json"
    for name in ("DeepSeek-V3", "Gemma-3-27B", "Qwen3.6-27B"):
        file.write_text(json.dumps((KNOWN | RECURRENT)[name]))
        result = CliRunner().invoke(app, [str(file), "--draft-layers", "1"])
        assert result.exit_code == 2 and "beside full attention only" in result.output


def test_figures_in_the_text(page: str, tmp_path: Path) -> None:
    text = " ".join(page.split())
    found = sizes(tmp_path, "Llama-3.1-8B", *LIMITS, "--tokens", 8000)
    limits = Limits()
    assert f"One request may hold {limits.request_share:.1%}".replace("%", " %") in text
    assert f"all requests together {limits.leased_share * 100:.0f} %" in text
    assert f"at least {1 / limits.request_share:.1f} times the KV of the longest prompt" in text
    assert f"{found['need']['chunks']} chunks, {size_text(found['need']['size_bytes'])}: half a second" in text
    (disk,) = [fit for fit in found["fits"] if fit["tier"] == "disk"]
    chunks = round(disk["chunks"], -3)
    each = re.search(r"about (0\.\d+) KB of memory per chunk", text)
    assert (
        each
        and f"2 TiB of Llama-3.1-8B are {chunks:,} chunks, or {int(chunks * float(each[1]) / 1000 + 0.999)} MB" in text
    )
