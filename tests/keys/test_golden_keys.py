"""Keys written down once, from docs/format.md, and kept for ever: a change here loses every cache."""

import hashlib
import json
import struct
from pathlib import Path

import pytest
import xxhash

from tiered_kv.keys.extras import Embeds, Lora, Multimodal, Salt, encode
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.rolling import PrefixKeys

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "keys_v1.json").read_text(encoding="utf-8"))
CASES = GOLDEN["cases"]
KINDS = {
    "lora": Lora,
    "salt": Salt,
    "multimodal": Multimodal,
    "embeds": lambda digest: Embeds(bytes.fromhex(digest)),
}


def extras_of(case):
    return lambda index: encode([KINDS[kind](*args) for kind, *args in case["extras"].get(str(index), [])])


def test_there_are_twenty_different_cases():
    assert len({case["name"] for case in CASES}) == 20
    firsts = [case["keys"][0] for case in CASES if case["keys"]]
    # Four cases start with the same chunk; everything else that the cases vary changes the first key.
    assert len(firsts) == 18
    assert len(set(firsts)) == 15


def test_golden_files_are_the_ones_written_for_version_1():
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (Path(__file__).parents[1] / "golden").glob("*_v1.*")
    }
    assert digests == {
        "keys_v1.json": "98c1c7b0c3a78891c3e1cede530697030ce501c155a6f0b6067052923b2d0000",
        "blob_v1.safetensors": "790ee0f5d8ee302c60fa5e53f7d8044a6028308035fb03adf241ed81fb149e6a",
        "cache_v1.tar.xz": "989b3ba990f62349c881e4e87ba05702f2e2940fa05921a6800bba3396e0f3fd",
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_keys_and_digests_are_the_golden_ones(case):
    namespace = Namespace.from_record(GOLDEN["namespaces"][case["namespace"]].encode("ascii"))
    keys = PrefixKeys(namespace, case["chunk_tokens"])
    keys.extend(case["tokens"], extras_of(case))
    assert [key.hex() for key in keys.keys] == case["keys"]
    assert [digest.hex() for digest in keys.digests] == case["digests"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_keys_follow_from_the_description_alone(case):
    size = case["chunk_tokens"]
    digest = hashlib.sha256(GOLDEN["namespaces"][case["namespace"]].encode("ascii")).digest()
    key = digest[:16]
    for index, (golden_key, golden_digest) in enumerate(zip(case["keys"], case["digests"], strict=True)):
        tokens = case["tokens"][index * size : (index + 1) * size]
        body = struct.pack(f"<{size}I", *tokens) + extras_of(case)(index)
        key, digest = xxhash.xxh3_128(key + body).digest(), hashlib.sha256(digest + body).digest()
        assert (key.hex(), digest.hex()) == (golden_key, golden_digest)
    assert len(case["keys"]) == len(case["tokens"]) // size
