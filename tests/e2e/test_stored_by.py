"""A real engine's blobs say which vLLM stored them, in which encoding; a patch release hits, and can be told apart."""

import json
from pathlib import Path

import pytest

from tests.kit.server.probe import figures, socket_of, wait_for, wait_written
from tests.kit.verbs import report
from tests.kit.vllm.cached_engine import CHUNK, assert_same, cached_engine
from tests.kit.vllm.harness import random_prompt
from tiered_kv import __version__
from tiered_kv.chunks.header import peek
from tiered_kv.keys.stored_by import NO_ENCODING, StoredBy, encoding_text

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

LENGTH, HIT = 2 * CHUNK + 90, 2 * CHUNK


def lines(root: Path) -> list[str]:
    return sorted(peek(path.read_bytes()[:4096]).record.stored_by for path in (root / "blobs").rglob("*.safetensors"))


def test_blobs_and_records_name_vllm_and_the_encoding_and_a_bad_release_goes_alone(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    root, real = tmp_path / "kv", vllm.__version__
    uri, public = f"file://{root}", real.partition("+")[0]
    one, two = random_prompt(1, LENGTH), random_prompt(2, LENGTH)
    # The same engine as an earlier release of the same minor version: only what it says of itself is another.
    monkeypatch.setattr(vllm, "__version__", f"{public}rc1")
    with cached_engine(tiny_model, root) as engine:
        (plain,) = engine.ask(one)
        wait_written(root)
        (place,) = (root / "blobs").glob("*/namespace.json")
        record = json.loads(place.read_text())
        bad, _ = lines(root)
        told = StoredBy.parse(bad)
        assert (told.package, told.door, told.version) == (__version__, "vllm", f"{public}rc1")
        ((runs,),) = record["kv_encoding"].values()
        assert told.encoding != NO_ENCODING and told.encoding == encoding_text(text for text, _ in runs)
        assert lines(root) == [bad] * 2 and record["first_stored_by"] == bad
    monkeypatch.undo()
    with cached_engine(tiny_model, root) as engine:
        (again,), (other,) = engine.ask(one), engine.ask(two)
        assert (plain.cached_tokens, again.cached_tokens, other.cached_tokens) == (0, HIT, 0), "a release is no miss"
        assert_same(again, plain)
        wait_written(root)
        good = bad.replace(f"vllm/{public}rc1", f"vllm/{real}")
        assert lines(root) == sorted([bad, good] * 2)
        mend = f"vllm<{public}"
        assert report("ls", uri, "--stored-by", mend)["chunk_count"] == 2
        assert report("verify", uri, "--stored-by", mend)["read"] == 2
        wait_for(lambda: figures(root)["hierarchy"]["leased_bytes"] == 0, "the end of leases")
        done = report("evict", "--server", socket_of(root), "--stored-by", mend, "--yes")
        assert [(tier["removed"], tier["kept"]) for tier in done["tiers"]] == [(2, 0), (2, 0)]
        (anew,), (kept,) = engine.ask(one), engine.ask(two)
        assert (anew.cached_tokens, kept.cached_tokens) == (0, HIT), "what the bad one stored, and nothing else"
        assert_same(anew, plain)
        assert_same(kept, other)
        wait_written(root)
        assert lines(root) == [good] * 4
