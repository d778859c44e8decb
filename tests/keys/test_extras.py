import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.keys.extras import Embeds, Lora, Multimodal, Salt, encode

any_text = st.text(st.characters(), max_size=6)
extra = st.one_of(
    st.builds(Lora, any_text),
    st.builds(Salt, any_text),
    st.builds(Multimodal, any_text, st.integers(0, 2**32 - 1)),
    st.builds(Embeds, st.binary(min_size=32, max_size=32)),
)
extras_list = st.lists(extra, max_size=4)


def test_no_extras_are_no_bytes():
    assert encode([]) == b""


def test_each_kind_is_a_tag_a_length_and_a_payload():
    assert encode([Lora("ab")]) == b"\x01\x02\x00\x00\x00ab"
    assert encode([Salt("é")]) == b"\x02\x02\x00\x00\x00\xc3\xa9"
    assert encode([Multimodal("m", 258)]) == b"\x03\x05\x00\x00\x00\x02\x01\x00\x00m"
    assert encode([Embeds(bytes(32))]) == b"\x04\x20\x00\x00\x00" + bytes(32)


@given(extras_list, extras_list)
def test_equal_bytes_mean_equal_extras(a, b):
    same = sorted(map(repr, a)) == sorted(map(repr, b))
    assert (encode(a) == encode(b)) == same


@given(extras_list)
def test_order_in_which_extras_were_found_does_not_matter(extras):
    assert encode(extras) == encode(extras[::-1])


def test_payload_of_one_kind_cannot_look_like_another():
    assert encode([Lora("a"), Salt("b")]) != encode([Lora("a\x02\x01\x00\x00\x00b")])


def test_salt_with_a_lone_surrogate_is_encoded():
    assert encode([Salt("\ud800")]) != encode([Salt("\ud801")])


def test_the_largest_offset_is_encoded():
    assert encode([Multimodal("m", 2**32 - 1)]) == b"\x03\x05\x00\x00\x00\xff\xff\xff\xffm"


@pytest.mark.parametrize("offset", [-1, 2**32])
def test_offset_outside_uint32_is_refused(offset):
    with pytest.raises(ValueError, match=f"offset={offset}"):
        Multimodal("m", offset)


def test_embeds_digest_of_another_length_is_refused():
    with pytest.raises(ValueError, match="observed=31"):
        Embeds(bytes(31))
