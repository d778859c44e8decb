"""Tags: what is kept of them, written down once, and that nothing can be read back from it or from a refusal."""

import hashlib

import pytest

from tiered_kv.keys import tags
from tiered_kv.keys.tags import NO_TAG, TAG_CHARS_MAX, shared_tag, tag_digest, tag_text

GOLDEN = {
    "tenant-a": "80a707af7dc77ee1228f9127180f3964",
    "a": "ca978112ca1bbdcafac231b39a23dc4d",
    "Müller & Söhne 🏭": "2ab246d041457369a65b34311f225c8d",
    "x" * 256: "85e62acd750c4eb56b7b6a1d66dca5bf",
}


@pytest.mark.parametrize(("text", "digest"), GOLDEN.items())
def test_digests_are_the_golden_ones(text: str, digest: str) -> None:
    """A change here leaves every stored chunk of every tenant where nobody finds it."""
    assert tag_digest(text).hex() == digest
    assert tag_digest(text) == hashlib.sha256(text.encode()).digest()[:16]


@pytest.mark.parametrize("text", ["", "x" * (TAG_CHARS_MAX + 1), "secret-\ud800", "secret" * 100])
def test_what_is_no_tag_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(ValueError, match="1 to 256 characters") as caught:
        tag_digest(text)
    assert "secret" not in str(caught.value) and "secret" not in str(caught.value.__cause__)


def test_a_digest_is_one_object_however_often_it_is_read() -> None:
    digest = tag_digest("tenant-a")
    first = shared_tag(bytes(bytearray(digest)))
    assert shared_tag(bytes(bytearray(digest))) is first == digest
    for number in range(tags._SHARED_MAX + 10):
        another = number.to_bytes(16, "big")
        assert shared_tag(another) == another, "one tenant's chunks would be another's"
    assert len(tags._shared) <= tags._SHARED_MAX + 1
    assert shared_tag(digest) == digest


def test_no_tag_is_shown_as_none() -> None:
    assert tag_text(NO_TAG) is None and tag_text(None) is None
    assert tag_text(tag_digest("a")) == GOLDEN["a"]
