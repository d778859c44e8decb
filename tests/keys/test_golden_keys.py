"""Keys written down once, from docs/format.md, and kept for ever: a change here loses every cache."""

import hashlib
import json
import struct
from pathlib import Path

import pytest
import xxhash

from tiered_kv.keys.extras import Embeds, Lora, Multimodal, Salt, encode
from tiered_kv.keys.namespace import Namespace
from tiered_kv.keys.prefix_keys import PrefixKeys

PLACE = Path(__file__).parents[1] / "golden"
GOLDEN = {
    version: json.loads((PLACE / f"keys_{version}.json").read_text(encoding="utf-8")) for version in ("v1", "v2", "v3")
}
CASES = [(version, case) for version, golden in GOLDEN.items() for case in golden["cases"]]
KINDS = {
    "lora": Lora,
    "salt": Salt,
    "multimodal": Multimodal,
    "embeds": lambda digest: Embeds(bytes.fromhex(digest)),
}


def extras_of(case):
    return lambda index: encode([KINDS[kind](*args) for kind, *args in case["extras"].get(str(index), [])])


def named(given):
    version, case = given
    return f"{version} {case['name']}"


def test_there_are_twenty_different_cases():
    for golden in GOLDEN.values():
        assert len({case["name"] for case in golden["cases"]}) == 20
        firsts = [case["keys"][0] for case in golden["cases"] if case["keys"]]
        # Four cases start with the same chunk; everything else that the cases vary changes the first key.
        assert len(firsts) == 18
        assert len(set(firsts)) == 15


def test_a_version_changes_every_key():
    """So two versions never meet: the number is part of the namespace's record, and the derivation is the same."""
    named = [
        {key for case in golden["cases"] for key in (*case["keys"], *case["digests"])} for golden in GOLDEN.values()
    ]
    assert len(set().union(*named)) == sum(map(len, named))


def test_golden_files_are_the_ones_written_for_their_version():
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in PLACE.glob("*_v[0-9].*")}
    assert digests == {
        "keys_v1.json": "98c1c7b0c3a78891c3e1cede530697030ce501c155a6f0b6067052923b2d0000",
        "blob_v1.safetensors": "790ee0f5d8ee302c60fa5e53f7d8044a6028308035fb03adf241ed81fb149e6a",
        "cache_v1.tar.xz": "989b3ba990f62349c881e4e87ba05702f2e2940fa05921a6800bba3396e0f3fd",
        "keys_v2.json": "883c344411c1e567195d8896d69d4a8c9668d706baf3238e8baaaf818b3bd1e4",
        "blob_v2.safetensors": "b55c1600b9f462d1a9d6bcb56368de037a2987534606580c4cbc2994a7118fb3",
        "cache_v2.tar.xz": "9edb47a2fecdfa0469a24e76c20282a1a5bc7abc06c5b049788d1b46c589a6b8",
        "keys_v3.json": "1b422c09d2f20b14072b8e665a6d4d38778c82cf3d35d1c3be0c593f213fbfe7",
        "blob_v3.safetensors": "c05a190e9d764c737849c49febb13e1f0832f721f4f2ccbf73364e6524449431",
        "cache_v3.tar.xz": "ca1671df4f9b688d98ee83dd04f7bb313125f6399fc47e6a1ad8986d3220b867",
    }


@pytest.mark.parametrize(("version", "case"), CASES, ids=map(named, CASES))
def test_keys_and_digests_are_the_golden_ones(version, case):
    namespace = Namespace.from_record(GOLDEN[version]["namespaces"][case["namespace"]].encode("ascii"))
    keys = PrefixKeys(namespace, case["chunk_tokens"])
    keys.extend(case["tokens"], extras_of(case))
    assert [key.hex() for key in keys.keys] == case["keys"]
    assert [digest.hex() for digest in keys.digests] == case["digests"]


@pytest.mark.parametrize(("version", "case"), CASES, ids=map(named, CASES))
def test_golden_keys_follow_from_the_description_alone(version, case):
    size = case["chunk_tokens"]
    digest = hashlib.sha256(GOLDEN[version]["namespaces"][case["namespace"]].encode("ascii")).digest()
    key = digest[:16]
    for index, (golden_key, golden_digest) in enumerate(zip(case["keys"], case["digests"], strict=True)):
        tokens = case["tokens"][index * size : (index + 1) * size]
        body = struct.pack(f"<{size}I", *tokens) + extras_of(case)(index)
        key, digest = xxhash.xxh3_128(key + body).digest(), hashlib.sha256(digest + body).digest()
        assert (key.hex(), digest.hex()) == (golden_key, golden_digest)
    assert len(case["keys"]) == len(case["tokens"]) // size
