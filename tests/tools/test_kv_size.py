"""`python -m tools.kv_size` as its users call it: tables, JSON, errors."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from tests.kit.samples.model_configs import KNOWN, RECURRENT
from tools.kv_size.__main__ import SizeReport, app


def model(tmp_path: Path, name: str) -> Path:
    directory = tmp_path / name
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(KNOWN[name]))
    return directory


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def complaint(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2 and "Traceback" not in result.output
    return result.stderr


def sizes(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    msgspec.convert(found, SizeReport)
    assert isinstance(found, dict)
    return found


def test_a_model_alone_says_what_a_token_and_a_chunk_take(tmp_path: Path) -> None:
    found = sizes(model(tmp_path, "Llama-3.1-8B"))
    assert found["token_bytes"] == 131_072
    assert (found["layers"], found["dtype"], found["tp"], found["chunk_tokens"]) == (32, "BF16", 1, 256)
    assert found["chunk_data_bytes"] == 256 * 131_072
    assert found["chunk_bytes"] == found["header_bytes"] + found["chunk_data_bytes"]
    assert (found["fits"], found["need"], found["notes"]) == ([], None, [])


def test_limits_say_what_fits_and_tokens_what_is_needed(tmp_path: Path) -> None:
    limits = ("--host-bytes", "8GiB", "--disk-bytes", "200GiB", "--bucket-bytes", "2TiB")
    found = sizes(model(tmp_path, "Llama-3.1-8B"), *limits, "--tokens", 8000, "--prompts", 1000)
    host, disk, bucket = found["fits"]
    assert (host["tier"], host["chunks"], host["tokens"], host["prompts"]) == ("host", 255, 255 * 256, 255 // 31)
    assert host["loadable_tokens"] == int((8 << 30) * 0.375) // found["chunk_bytes"] * 256
    assert disk["loadable_tokens"] is None and bucket["limit_bytes"] == 2 << 40
    need = found["need"]
    assert (need["stored_tokens"], need["chunks"]) == (7936, 31_000)
    assert need["size_bytes"] == 31_000 * found["chunk_bytes"] < need["disk_bytes"]


@pytest.mark.parametrize(("dtype", "size"), [("auto", 2), ("bf16", 2), ("fp16", 2), ("fp32", 4), ("fp8", 1)])
@pytest.mark.parametrize("option", ["--kv-cache-dtype", "--dtype"])
def test_a_dtype_may_be_named(tmp_path: Path, option: str, dtype: str, size: int) -> None:
    found = sizes(model(tmp_path, "DeepSeek-V3"), option, dtype)
    assert found["token_bytes"] == 61 * 576 * size


def test_what_was_assumed_is_said(tmp_path: Path) -> None:
    copies = sizes(model(tmp_path, "Llama-3.1-8B"), "--tp", 16)
    assert copies["token_bytes"] == 2 * 131_072 and "stored 2 times" in copies["notes"][0]
    once = sizes(model(tmp_path, "DeepSeek-V3"), "--tp", 8)
    assert "stored once" in once["notes"][-1]
    windows = sizes(model(tmp_path, "gpt-oss-120b"), "--tokens", 100)
    assert windows["windows"] == "18 full attention, 18 with a window of 128 tokens"
    assert "blocks of 16 tokens" in windows["notes"][1] and "never stored" in windows["notes"][2]
    assert windows["need"]["size_bytes"] == 0


def test_people_get_tables(tmp_path: Path) -> None:
    shown = run(model(tmp_path, "gpt-oss-120b"), "--tokens", 8000, "--host-bytes", "8GiB").stdout
    assert "gpt_oss, 36 layers, GQA, 8 KV heads of 64 values" in shown
    assert "54 KiB (55296 bytes)" in shown
    assert "What fits" in shown and "What 1 prompt of 8000 tokens need" in shown
    assert "\nAssumed: " in shown
    (tmp_path / "config.json").write_text(json.dumps(RECURRENT["Qwen3-Next-80B-A3B"]))
    hybrid = run(tmp_path).stdout
    assert "qwen3_next, 48 layers" in hybrid and "36 layers, gated delta nets" in hybrid
    assert "What" not in run(model(tmp_path, "Llama-3.1-8B")).stdout.replace("what", "")


def test_errors_say_what_was_expected(tmp_path: Path) -> None:
    llama = model(tmp_path, "Llama-3.1-8B")
    assert "nothing is downloaded" in complaint("meta-llama/Llama-3.1-8B")
    assert "--prompts: say --tokens" in complaint(llama, "--prompts", 5)
    assert "option --host-bytes: expected a size such as 4GiB" in complaint(llama, "--host-bytes", "many")
    assert "divisor of 32" in complaint(llama, "--tp", 5)
    (llama / "config.json").write_text(json.dumps(KNOWN["Llama-3.1-8B"] | {"mamba_d_state": 16}))
    assert "of a kind that this does not compute" in complaint(llama)
