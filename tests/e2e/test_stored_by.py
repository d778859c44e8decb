"""A real engine's blobs say which vLLM stored them, in which encoding; a patch release hits, and can be told apart."""

import json
from pathlib import Path

import pytest
from cache_probe import wait_written
from cached_engine import CHUNK, assert_same, cached_engine
from verbs import report
from vllm_harness import random_prompt

from tiered_kv import __version__
from tiered_kv.chunks.header import peek
from tiered_kv.keys.stored_by import StoredBy, encoding_text, stored_by

pytestmark = pytest.mark.vllm

LENGTH, HIT = 2 * CHUNK + 90, 2 * CHUNK


def lines(root: Path) -> list[str]:
    return sorted(peek(path.read_bytes()[:4096]).stored_by for path in (root / "blobs").rglob("*.safetensors"))


def test_blobs_and_records_name_vllm_and_the_encoding_and_a_patch_release_goes_alone(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    root, real = tmp_path / "kv", vllm.__version__
    one, two = random_prompt(1, LENGTH), random_prompt(2, LENGTH)
    with cached_engine(tiny_model, root) as engine:
        (plain,) = engine.ask(one)
        wait_written(root)
        (place,) = (root / "blobs").glob("*/namespace.json")
        record = json.loads(place.read_text())
        first, _ = lines(root)
        told = StoredBy.parse(first)
        assert (told.package, told.door, told.version) == (__version__, "vllm", real)
        ((runs,),) = record["kv_encoding"].values()
        encoding = encoding_text(text for text, _ in runs)
        assert encoding and told.encoding in stored_by("1", "vllm", "1", encoding)
        assert lines(root) == [first] * 2 and record["first_stored_by"] == first

    # The same engine as the next patch release: only what it says of itself is another.
    monkeypatch.setattr("tiered_kv.vllm.worker.vllm.__version__", f"{real.partition('+')[0]}.post1")
    with cached_engine(tiny_model, root) as engine:
        (again,), (other,) = engine.ask(one), engine.ask(two)
        assert (plain.cached_tokens, again.cached_tokens, other.cached_tokens) == (0, HIT, 0)
        assert_same(again, plain)
        wait_written(root)
        assert lines(root) == sorted([first, first.replace(f"vllm/{real}", f"vllm/{vllm.__version__}")] * 2)
        uri, mend = f"file://{root}", f"vllm<{vllm.__version__}"
        assert report("ls", uri, "--stored-by", mend)["chunk_count"] == 2
        assert report("verify", uri, "--stored-by", mend)["read"] == 2
    monkeypatch.undo()
    done = report("evict", uri, "--stored-by", f"vllm=={real}", "--stored-by", mend, "--yes")
    assert done["tiers"][0]["removed"] == 2
    with cached_engine(tiny_model, root) as engine:
        (anew,), (kept,) = engine.ask(one), engine.ask(two)
        assert (anew.cached_tokens, kept.cached_tokens) == (0, HIT), "what the bad one stored, and nothing else"
        assert_same(anew, plain)
        assert_same(kept, other)
