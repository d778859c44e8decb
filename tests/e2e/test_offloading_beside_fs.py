"""The same damage below vLLM's own offloading, with our tier and with vLLM's ``fs``: the table of docs/offloading.md.

Each engine starts with empty rows, so what it does not compute comes from files.
"""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.counts import only_in_proofs
from tests.kit.server.probe import wait_ended, wait_written
from tests.kit.storage.disk_probe import blob_files
from tests.kit.vllm.cached_engine import assert_same
from tests.kit.vllm.harness import Answer, close_llm, generate, make_llm, random_prompt, running
from tests.kit.vllm.offloading_engine import MAX_TOKENS, ROW_BYTES, ROW_TOKENS, ask, extra_config, on_disk
from tiered_kv.testing.model import build_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300), only_in_proofs]

ROWS = 3
HIT = ROWS * ROW_TOKENS
PROMPTS = [random_prompt(7_000 + n, HIT + 20) for n in range(2)]


class Cache:
    """A directory that one of the two tiers keeps."""

    def __init__(self, tier: str, root: Path) -> None:
        self.tier = tier
        self.root = root

    def ask(self, model: Path, *prompts: list[int], started: Callable[[], object] = lambda: None) -> list[Answer]:
        """The answers of a new engine; what it stores is in files when this returns."""
        from vllm.config import KVTransferConfig

        extra = extra_config(on_disk(self.root))
        if self.tier == "fs":
            extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(self.root)}]
        transfer: dict[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
        llm = make_llm(model, kv_transfer_config=KVTransferConfig(**transfer, kv_connector_extra_config=extra))
        try:
            started()
            answers = ask(llm, *prompts)
            if self.tier == "ours":
                wait_written(self.root)
        finally:
            close_llm(llm)
        if self.tier == "ours":
            wait_ended(self.root)
        return answers

    def files(self) -> list[Path]:
        return blob_files(self.root) if self.tier == "ours" else sorted(self.root.rglob("*.bin"))


@pytest.fixture(params=["ours", "fs"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Cache:
    return Cache(request.param, tmp_path / "cache")


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> list[Answer]:
    with running(tiny_model) as llm:
        return generate(llm, PROMPTS, max_tokens=MAX_TOKENS)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(("damage", "served"), [(flip, {"ours": 0, "fs": HIT}), (truncate, {"ours": 0, "fs": 0})])
def test_damaged_files(
    tiny_model: Path, plain: list[Answer], cache: Cache, damage: Callable[[Path], None], served: dict[str, int]
) -> None:
    """What is served of files that are all damaged is wrong KV, whether or not a token shows it."""
    cache.ask(tiny_model, *PROMPTS)
    assert len(cache.files()) == ROWS * len(PROMPTS)
    for path in cache.files():
        damage(path)
    answers = cache.ask(tiny_model, *PROMPTS)
    assert [one.cached_tokens for one in answers] == [served[cache.tier]] * len(PROMPTS)
    if not served[cache.tier]:
        for one, theirs in zip(answers, plain, strict=True):
            assert_same(one, theirs)
        again = cache.ask(tiny_model, *PROMPTS)
        # fs deletes the file that it found short, the first one of each prompt, and stores that again.
        mended = HIT if cache.tier == "ours" else ROW_TOKENS
        assert [one.cached_tokens for one in again] == [mended] * len(PROMPTS)


def test_weights_that_changed_below_one_name(plain: list[Answer], cache: Cache, tmp_path: Path) -> None:
    """A directory or a name with other weights in it, as after a fine-tuning was replaced by a better one."""
    model = tmp_path / "model"
    cache.ask(build_model(model, seed=1), *PROMPTS)
    answers = cache.ask(build_model(model, seed=0), *PROMPTS)
    if cache.tier == "fs":
        assert [one.cached_tokens for one in answers] == [HIT] * len(PROMPTS)
        assert all(one.tokens != theirs.tokens for one, theirs in zip(answers, plain, strict=True))
        return
    assert [one.cached_tokens for one in answers] == [0] * len(PROMPTS)
    for one, theirs in zip(answers, plain, strict=True):
        assert_same(one, theirs)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, with room for a few rows."""
    point = tmp_path / "disk"
    point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={64 * ROW_BYTES},mode=700", "none", str(point)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield point
    subprocess.run(["umount", "-l", point], check=True)


@pytest.mark.parametrize("tier", ["ours", "fs"])
def test_a_full_disk(tiny_model: Path, plain: list[Answer], full_disk: Path, tier: str) -> None:
    cache = Cache(tier, full_disk / "cache")
    ballast = full_disk / "ballast"

    def fill() -> None:
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 14)):
                continue

    during = cache.ask(tiny_model, *PROMPTS, started=fill)
    assert ballast.stat().st_size
    assert len(cache.files()) < ROWS * len(PROMPTS)
    ballast.unlink()
    after = cache.ask(tiny_model, *PROMPTS)
    for one, again, theirs in zip(during, after, plain, strict=True):
        assert_same(one, theirs)
        assert_same(again, theirs)
