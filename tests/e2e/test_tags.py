"""Two tenants on a real engine: one is erased and computed anew, the other still hits, and both answer as before."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.probe import figures, wait_for, wait_written
from tests.kit.verbs import report, run
from tests.kit.vllm.cached_engine import CHUNK, CachedEngine, assert_same, cached_engine
from tests.kit.vllm.harness import Answer, as_answer, drain, random_prompt, reset_gpu_cache
from tiered_kv.keys.tags import tag_digest
from tiered_kv.server.directory import read_info

pytestmark = pytest.mark.vllm

MINE, THEIRS = "Tenant Alpha/4711", "Mieter Bäta\u20ac"
LENGTH, HIT = 2 * CHUNK + 90, 2 * CHUNK


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CachedEngine]:
    place = tmp_path_factory.mktemp("place")
    bucket = {"storage_uri": f"shared+file://{place}/bucket", "disk_path": str(place / "disk")}
    with cached_engine(tiny_model, place / "disk", bucket) as made:
        yield made


def ask(engine: CachedEngine, seed: int, tag: Any, salt: str | None = None) -> Answer:
    """One request with an empty GPU prefix cache; what it stores is in every tier when this returns."""
    from vllm import SamplingParams

    reset_gpu_cache(engine.llm)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=8,
        ignore_eos=True,
        detokenize=False,
        logprobs=2,
        extra_args={"kv_transfer_params": {"tiered_kv.tag": tag}},
    )
    prompt: dict[str, Any] = {"prompt_token_ids": random_prompt(seed, LENGTH)} | ({"cache_salt": salt} if salt else {})
    (output,) = engine.llm.generate([prompt], sampling, use_tqdm=False)
    drain(engine.llm)
    wait_written(engine.root)
    return as_answer(output)


def erase(engine: CachedEngine, tag: str) -> None:
    """As the page says: the server, then the bucket, until neither has anything."""
    info = read_info(engine.root)
    assert info is not None
    wait_for(lambda: figures(engine.root)["hierarchy"]["leased_bytes"] == 0, "the end of leases")
    uri = f"shared+file://{engine.root.parent}/bucket"
    for _ in range(10):
        reports = [
            report("evict", "--server", f"unix://{info.socket}", "--tag", tag, "--yes"),
            report("evict", uri, "--tag", tag, "--yes"),
        ]
        if not any(tier["removed"] for one in reports for tier in one["tiers"]):
            return
    raise AssertionError("there was always more to erase")


def listed(engine: CachedEngine, place: str, tag: str) -> int:
    scheme = "file" if place == "disk" else "shared+file"
    return int(report("ls", f"{scheme}://{engine.root.parent}/{place}", "--tag", tag)["chunk_count"])


def test_one_tenant_is_erased_and_the_other_is_not(
    engine: CachedEngine, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG, "tiered_kv"):
        mine, theirs = [ask(engine, 1, MINE) for _ in range(2)], [ask(engine, 2, THEIRS) for _ in range(2)]
        assert [answer.cached_tokens for answer in mine + theirs] == [0, HIT, 0, HIT]
        places = ("disk", "bucket")
        assert [listed(engine, place, tag) for place in places for tag in (MINE, THEIRS)] == [2, 2, 2, 2]
        erase(engine, MINE)
        assert [listed(engine, place, tag) for place in places for tag in (MINE, THEIRS)] == [0, 2, 0, 2]
        after, other = ask(engine, 1, MINE), ask(engine, 2, THEIRS)
        assert (after.cached_tokens, other.cached_tokens) == (0, HIT)
        assert_same(after, mine[0])
        assert_same(other, theirs[0])
        again = ask(engine, 1, MINE)
        assert again.cached_tokens == HIT, "what was computed anew is stored anew, under the tag"
        assert_same(again, mine[0])
        assert listed(engine, "disk", MINE) == 2
    said = caplog.text + "".join(capfd.readouterr()) + run("stat", f"file://{engine.root}", "--json").output
    assert "pending_writes" in said and MINE not in said and THEIRS not in said
    assert_no_text_at_rest(engine.root.parent)


def assert_no_text_at_rest(place: Path) -> None:
    """No byte and no name below a directory holds a tenant's name; their digests are there."""
    found = b""
    for directory, _, names in os.walk(place):
        for name in names:
            path = Path(directory, name)
            if path.is_file():
                found += os.fsencode(str(path.relative_to(place))) + path.read_bytes()
    for tag in (MINE, THEIRS):
        forms = (tag.encode(), tag.encode("utf-16-le"), ascii(tag).encode(), tag.encode().hex().encode())
        assert not [form for form in forms if form in found]
        assert tag_digest(tag).hex().encode() in found


def test_a_shared_prompt_is_whose_it_was_first_and_a_salt_for_each_parts_them(engine: CachedEngine) -> None:
    first = ask(engine, 3, MINE)
    shared = ask(engine, 3, THEIRS)
    salted = [ask(engine, 4, tag, salt) for tag, salt in ((MINE, "salt-a"), (THEIRS, "salt-b"))]
    assert (first.cached_tokens, shared.cached_tokens) == (0, HIT)
    assert [answer.cached_tokens for answer in salted] == [0, 0]
    erase(engine, THEIRS)
    assert ask(engine, 3, MINE).cached_tokens == HIT, "it was stored for another one"
    assert ask(engine, 4, MINE, "salt-a").cached_tokens == HIT
    anew = ask(engine, 4, THEIRS, "salt-b")
    assert anew.cached_tokens == 0
    assert_same(anew, salted[1])
    erase(engine, MINE)
    after = ask(engine, 3, THEIRS)
    assert after.cached_tokens == 0, "with the one it was stored for it goes for both"
    assert_same(after, first)


@pytest.mark.parametrize("tag", [7, "", "x" * 257])
def test_a_request_whose_tag_cannot_be_read_is_answered_and_not_stored(engine: CachedEngine, tag: Any) -> None:
    refused = engine.scheduler_side.counters["control_refused"]
    answers = [ask(engine, 5, tag) for _ in range(2)]
    assert [answer.cached_tokens for answer in answers] == [0, 0]
    assert engine.scheduler_side.counters["control_refused"] == refused + 2
    assert_same(answers[1], answers[0])
