"""The command line beside a real engine: it sees what is stored, and whatever it takes away costs misses only."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.probe import figures, wait_for, wait_written
from tests.kit.vllm.cached_engine import CHUNK, TAIL, assert_same, cached_engine
from tests.kit.vllm.harness import random_prompt
from tiered_kv.server.directory import read_info

pytestmark = pytest.mark.vllm


def run(*arguments: object, expected: int = 0) -> Any:
    """The JSON that a verb prints."""
    command = [sys.executable, "-m", "tiered_kv.cli", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == expected, (command, done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    return json.loads(done.stdout)


def blobs(root: Path) -> list[Path]:
    return sorted(root.glob("blobs/*/*/*.safetensors"))


def test_what_an_engine_stored_is_seen_checked_explained_and_taken_away(
    tiny_model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    uri, prompt = f"file://{tmp_path}", random_prompt(1, 4 * CHUNK + TAIL)
    tokens = tmp_path_factory.mktemp("tokens") / "prompt.json"
    tokens.write_text(json.dumps(prompt))
    with cached_engine(tiny_model, tmp_path) as engine:
        (cold,) = engine.ask(prompt)
        wait_written(tmp_path)
        info = read_info(tmp_path)
        assert info is not None
        listed = run("ls", uri)
        assert sorted(chunk["key"] for chunk in listed["chunks"]) == sorted(path.stem for path in blobs(tmp_path))
        assert len(listed["chunks"]) == 4 and {chunk["tokens"] for chunk in listed["chunks"]} == {CHUNK}
        explained = run("explain", uri, "--tokens", tokens)
        assert json.dumps(prompt[4:8])[1:-1] not in json.dumps(explained), "no token ids"
        assert explained["hit_tokens"] == 4 * CHUNK
        run("verify", uri)

        (hit,) = engine.ask(prompt)
        assert hit.cached_tokens == 4 * CHUNK and hit.tokens == cold.tokens
        run("evict", uri, "--all", "--yes")
        assert blobs(tmp_path) == []
        run("evict", "--server", f"unix://{info.socket}", "--tier", "host", "--all", "--yes")
        assert figures(tmp_path)["hierarchy"]["host_ready_chunks"] == 0

        (miss,) = engine.ask(prompt)
        wait_written(tmp_path)
        (again,) = engine.ask(prompt)
    assert (miss.cached_tokens, again.cached_tokens) == (0, 4 * CHUNK)
    assert miss.tokens == again.tokens == cold.tokens
    assert len(blobs(tmp_path)) == 4


def test_answers_stay_right_while_chunks_are_evicted_checked_and_collected(tiny_model: Path, tmp_path: Path) -> None:
    uri, prompts = f"file://{tmp_path}", [random_prompt(seed, 3 * CHUNK + TAIL) for seed in range(6)]
    is_over, calls = threading.Event(), {"evict": 0, "verify": 0, "gc": 0}
    failures: list[BaseException] = []

    def disturb() -> None:
        try:
            while not is_over.is_set():
                run("evict", uri, "--all", "--yes")
                calls["evict"] += 1
                run("verify", uri, "--repair", "--yes")
                calls["verify"] += 1
                run("gc", uri, "--yes")
                calls["gc"] += 1
        except BaseException as exc:
            failures.append(exc)
            raise

    with cached_engine(tiny_model, tmp_path, {"host_bytes": "64MiB"}) as engine:
        cold = engine.ask(*prompts)
        wait_written(tmp_path)
        operator = threading.Thread(target=disturb)
        operator.start()
        try:
            rounds = [engine.ask(*prompts) for _ in range(4)]
            wait_for(lambda: min(calls.values()) > 0 or failures, "every verb to have run", deadline_s=100)
            rounds.append(engine.ask(*prompts))
        finally:
            is_over.set()
            operator.join(200)
        wait_written(tmp_path)
        settled = engine.ask(*prompts)

    assert failures == [] and min(calls.values()) > 0
    for answers in (*rounds, settled):
        for answer, plain in zip(answers, cold, strict=True):
            assert_same(answer, plain)
    assert all(answer.cached_tokens == 3 * CHUNK for answer in settled)
