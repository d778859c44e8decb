"""Typed extras of real vLLM requests, and the alarm when vLLM knows something we do not."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import LoRAConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.kit.vllm.tiny_adapters import adapter_files, lora
from tiered_kv.keys.extras import Multimodal, Salt, encode
from tiered_kv.vllm import request_extras as door
from tiered_kv.vllm.identity import adapters as adapters_door
from tiered_kv.vllm.identity.adapters import Adapters, Unaccountable, adapter_numerics
from tiered_kv.vllm.request_extras import RequestExtras, hashes_media

CHUNK = 64
CHUNKS = 3


def request(**fields):
    tokens = fields.pop("prompt_token_ids", list(range(CHUNKS * CHUNK + 10)))
    return Request("id", tokens, SamplingParams(max_tokens=4), None, **fields)


def extras(adapters=None, **fields):
    return RequestExtras(request(**fields), CHUNK, adapters or Adapters("bfloat16"))


def encoded(adapters=None, **fields):
    found = extras(adapters, **fields)
    assert found.is_accountable, found.reason
    return [found.extras_for(index) for index in range(CHUNKS)]


def image(identifier, offset, length):
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=identifier, mm_position=PlaceholderRange(offset=offset, length=length)
    )


def test_plain_request_has_no_extras():
    assert encoded() == [b""] * CHUNKS


def test_salt_stands_in_the_first_chunk_only():
    assert encoded(cache_salt="tenant") == [encode([Salt("tenant")]), b"", b""]
    assert encoded(cache_salt="tenant") != encoded(cache_salt="other")


def test_empty_salt_is_no_salt():
    assert encoded(cache_salt="") == encoded()


def test_adapters_with_other_weights_have_other_extras_in_every_chunk(tmp_path):
    a = encoded(lora_request=lora("a", adapter_files(tmp_path / "a", 1)))
    b = encoded(lora_request=lora("a", adapter_files(tmp_path / "b", 2)))
    assert all(x and y and x != y for x, y in zip(a, b, strict=True))


def test_adapter_is_its_weights_whatever_its_name_and_place(tmp_path):
    a = encoded(lora_request=lora("a", adapter_files(tmp_path / "a", 1)))
    b = encoded(lora_request=lora("b", adapter_files(tmp_path / "elsewhere", 1), number=2))
    assert a == b


def test_adapter_named_like_a_salt_is_not_that_salt(tmp_path):
    named = lora("tenant", adapter_files(tmp_path / "a", 1))
    both = encoded(lora_request=named, cache_salt="tenant")
    assert len({encoded(lora_request=named)[0], encoded(cache_salt="tenant")[0], both[0]}) == 3


def test_dtype_of_adapters_is_part_of_their_identity(tmp_path):
    named = lora("a", adapter_files(tmp_path / "a", 1))
    assert encoded(Adapters("bfloat16"), lora_request=named) != encoded(Adapters("float16"), lora_request=named)


def test_adapter_that_cannot_be_read_makes_a_request_unaccountable(tmp_path):
    found = extras(lora_request=lora("a", tmp_path / "nothing"))
    assert not found.is_accountable and "cannot be read" in found.reason
    with pytest.raises(Unaccountable, match="cannot be read"):
        found.extras_for(0)


def test_adapter_that_changes_on_disk_is_left_alone_from_then_on(tmp_path):
    adapters, folder = Adapters("bfloat16"), adapter_files(tmp_path / "a", 1)
    named = lora("a", folder)
    before = encoded(adapters, lora_request=named)
    assert encoded(adapters, lora_request=named) == before
    os.utime(folder / "adapter_model.safetensors", ns=(1, 1))
    assert "changed" in extras(adapters, lora_request=named).reason


def test_adapters_remembered_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(adapters_door, "MAX_ADAPTERS", 1)
    adapters = Adapters("bfloat16")
    first, second = (lora(name, adapter_files(tmp_path / name, i)) for i, name in enumerate("ab"))
    assert extras(adapters, lora_request=first).is_accountable
    assert not extras(adapters, lora_request=second).is_accountable
    assert extras(adapters, lora_request=first).is_accountable


def test_item_that_vllm_counts_instead_of_hashing_is_left_alone():
    """By its name, whatever version counts it, and by the engine's configuration, whatever its name is."""
    for identifier in ("renderer0-mm-1-image-0", "adapter:renderer12-mm-7-video-3"):
        asked = request(mm_features=[image(identifier, 60, 10)])
        assert "does not hash" in RequestExtras(asked, CHUNK, Adapters("")).reason
    named = request(mm_features=[image("cat", 60, 10)])
    assert "does not hash" in RequestExtras(named, CHUNK, Adapters(""), has_media_hashes=False).reason
    assert RequestExtras(named, CHUNK, Adapters("")).is_accountable
    assert RequestExtras(request(), CHUNK, Adapters(""), has_media_hashes=False).is_accountable


@pytest.mark.parametrize(
    ("prefix_caching", "cache_gb", "hashes"),
    [(False, 0, False), (True, 0, True), (False, 4, True), (False, None, False)],
)
def test_media_are_hashed_while_one_of_vllms_caches_is_on(prefix_caching, cache_gb, hashes):
    media = None if cache_gb is None else SimpleNamespace(mm_processor_cache_gb=cache_gb)
    parts = {"enable_prefix_caching": prefix_caching}, {"multimodal_config": media}
    config = SimpleNamespace(cache_config=SimpleNamespace(**parts[0]), model_config=SimpleNamespace(**parts[1]))
    assert hashes_media(config) is hashes


@pytest.mark.parametrize(
    "change",
    [
        {"target_modules": ["o_proj"]},
        {"target_modules": []},
        {"lora_dtype": "float16"},
        {"enable_tower_connector_lora": True},
        {"enable_mixed_moe_lora_format": True},
        {"enable_moe_shared_loras": True},
    ],
    ids=str,
)
def test_what_decides_how_an_adapter_is_applied_is_in_its_identity(tmp_path, change):
    named = lora("a", adapter_files(tmp_path / "a", 1))
    numerics = [
        adapter_numerics(SimpleNamespace(lora_config=LoRAConfig(**{"lora_dtype": "bfloat16"} | fields)))
        for fields in ({}, change)
    ]
    ours, theirs = (encoded(Adapters(text), lora_request=named) for text in numerics)
    assert ours != theirs


def test_sizes_of_lora_and_the_order_of_its_modules_are_not(tmp_path):
    texts = {
        adapter_numerics(SimpleNamespace(lora_config=LoRAConfig(target_modules=modules, max_loras=count)))
        for modules, count in ((["q_proj", "o_proj"], 1), (["o_proj", "q_proj"], 4))
    }
    assert len(texts) == 1
    assert adapter_numerics(SimpleNamespace(lora_config=None)) == ""


def test_multimodal_item_stands_in_every_chunk_it_reaches_with_its_position():
    assert encoded(mm_features=[image("cat", 60, 10)]) == [encode([Multimodal("cat", 60)])] * 2 + [b""]
    assert encoded(mm_features=[image("cat", 64, 64)]) == [b"", encode([Multimodal("cat", 64)]), b""]
    assert encoded(mm_features=[image("cat", 60, 10)]) != encoded(mm_features=[image("cat", 61, 10)])
    assert encoded(mm_features=[image("cat", 60, 10)]) != encoded(mm_features=[image("dog", 60, 10)])


def test_several_items_of_one_chunk_are_all_there():
    found = encoded(mm_features=[image("cat", 3, 10), image("dog", 20, 100), image("cat", 130, 5)])
    both = encode([Multimodal("cat", 3), Multimodal("dog", 20)])
    assert found == [both, encode([Multimodal("dog", 20)]), encode([Multimodal("cat", 130)])]


def test_what_a_next_turn_brings_behind_a_tail_is_not_part_of_the_tail():
    """Else an image that the next question begins with, in the tail's chunk, keeps it from finding the tail."""
    place = CHUNK + 40
    first, next_turn = extras(mm_features=[image("cat", 60, 10)]), [image("cat", 60, 10), image("dog", place, 50)]
    assert first.extras_of_tail(1, 32) == encode([Multimodal("cat", 60)])
    assert extras(mm_features=next_turn).extras_of_tail(1, 32) == first.extras_of_tail(1, 32)
    both = encode([Multimodal("cat", 60), Multimodal("dog", place)])
    assert extras(mm_features=next_turn).extras_of_tail(1, 41) == both
    rows, end = embeds(1), CHUNK + 32
    ended = extras(prompt_token_ids=list(range(end)), prompt_embeds=rows[:end])
    goes_on = extras(prompt_embeds=rows)
    assert ended.extras_of_tail(1, 32) == goes_on.extras_of_tail(1, 32) != goes_on.extras_of_tail(1, 33)


def embeds(seed, rows=CHUNKS * CHUNK + 10):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, 8), dtype=np.float32)).bfloat16()


def test_prompt_embeds_are_hashed_per_chunk():
    first = embeds(1)
    changed = first.clone()
    changed[CHUNK + 5] += 1
    a, b = (encoded(prompt_token_ids=None, prompt_embeds=rows) for rows in (first, changed))
    assert a[0] == b[0] and a[1] != b[1] and a[2] == b[2]
    assert len(set(a)) == CHUNKS and b"" not in a


def test_which_positions_take_embeddings_is_part_of_the_extras():
    tokens, rows = [0] * (CHUNKS * CHUNK), torch.zeros(CHUNKS * CHUNK, 8)
    masks = [[True] * len(tokens), [True] * 70 + [False] + [True] * (len(tokens) - 71)]
    a, b = (encoded(prompt_token_ids=tokens, prompt_embeds=rows, prompt_is_token_ids=mask) for mask in masks)
    assert a[0] == b[0] and a[1] != b[1]


def test_chunks_of_the_answer_are_accounted_for_as_they_come():
    asked = request(cache_salt="tenant", mm_features=[image("cat", 60, 10)], prompt_embeds=embeds(1))
    found = RequestExtras(asked, CHUNK, Adapters("bfloat16"))
    asked.append_output_token_ids(list(range(2 * CHUNK)))
    assert len({found.extras_for(index) for index in range(CHUNKS + 2)}) == CHUNKS + 2
    assert found.is_accountable


def test_streaming_session_with_embeddings_is_left_alone():
    assert extras(resumable=True).is_accountable
    assert "streaming" in extras(resumable=True, prompt_embeds=embeds(1)).reason


@pytest.mark.parametrize(
    "yielded",
    [
        (("adapter_revision", "7"),),
        (("cache_salt", "tenant"), ("cache_salt", "tenant")),
        (("cache_salt", "tenant", 3),),
        (3,),
        ((),),
        (),
    ],
)
def test_anything_else_vllm_hashes_raises_the_alarm(monkeypatch, yielded):
    monkeypatch.setattr(door, "generate_block_hash_extra_keys", lambda *_: (yielded or None, 0))
    found = extras(cache_salt="tenant")
    assert not found.is_accountable
    assert "tenant" not in found.reason


def test_alarm_in_a_later_chunk_stops_the_request_from_there(monkeypatch):
    asked = request()
    found = RequestExtras(asked, CHUNK, Adapters("bfloat16"))
    asked.append_output_token_ids(list(range(CHUNK)))
    assert found.extras_for(CHUNKS - 1) == b""
    monkeypatch.setattr(door, "generate_block_hash_extra_keys", lambda *_: ((("new", 1, 2),), 0))
    with pytest.raises(Unaccountable, match="new/3"):
        found.extras_for(CHUNKS)
    assert not found.is_accountable


def test_untagged_keys_of_vllm_0_30_are_understood(monkeypatch, tmp_path):
    untagged = {0: ("a", ("cat", 3), "tenant"), CHUNK: ("a",), 2 * CHUNK: ("a",)}
    monkeypatch.setattr(door, "generate_block_hash_extra_keys", lambda _, start, *__: (untagged[start], 0))
    named = lora("a", adapter_files(tmp_path / "a", 1))
    assert encoded(lora_request=named, cache_salt="tenant", mm_features=[image("cat", 3, 10)])


def test_identifier_that_is_missing_is_not_guessed():
    item = image("cat", 3, 10)
    item.identifier = None
    fake = SimpleNamespace(
        num_tokens=CHUNK, lora_request=None, cache_salt=None, mm_features=[item], prompt_embeds=None, resumable=False
    )
    assert "no identifier" in RequestExtras(fake, CHUNK, Adapters("bfloat16")).reason
