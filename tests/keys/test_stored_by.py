"""Who stored a chunk: one line, canonical, bounded; whatever versions and encodings are called."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tiered_kv.keys import stored_by as module
from tiered_kv.keys.stored_by import (
    DOORS,
    STORED_BY_CHARS_MAX,
    UNKNOWN,
    StoredBy,
    encoding_text,
    shared_line,
    stored_by,
)

LINE = "tiered_kv/0.9.1 vllm/0.32.0 cpu/CPU_ATTN:amx"


def test_a_line_reads_as_it_was_written():
    assert stored_by("0.9.1", "vllm", "0.32.0", "cpu/CPU_ATTN:amx") == LINE
    told = StoredBy.parse(LINE)
    assert told == StoredBy("0.9.1", "vllm", "0.32.0", "cpu/CPU_ATTN:amx") and str(told) == LINE


@pytest.mark.parametrize("version", ["0.32.1rc1", "0.33.0.dev12+g1a2b3c4d5.cu129", "1!2.0.post1", "dev", "0.32.0+cpu"])
def test_versions_of_every_kind_stay_as_they_are(version):
    assert StoredBy.parse(stored_by("0.1.0", "vllm", version, None)).version == version


def test_what_has_no_place_in_a_line_becomes_another_character_or_is_cut():
    line = stored_by("0.1 final", "vllm", "", 'a "b" \\ c\n')
    assert line == "tiered_kv/0.1_final vllm/_ a__b____c_"
    long = "0.33.0.dev1234+g1a2b3c4d5.d20261122.cu129.torch210"
    assert StoredBy.parse(stored_by("0.1.0", "vllm", long, None)).version == "0.33.0.dev1234"
    assert StoredBy.parse(stored_by("0.1.0", "vllm", "9" * 90, None)).version == "9" * 40
    one, two = (StoredBy.parse(stored_by("0.1.0", "vllm", "0.32.0", "x" * 60 + end)).encoding for end in "ab")
    assert one != two and len(one) == len(two) == 39, "two long ones stay two"


@given(*[st.text(max_size=100)] * 3, st.sampled_from(DOORS))
@example("\n", "\udc80", " ", "vllm")
def test_whatever_they_are_called_a_line_comes_of_it(package, version, encoding, door):
    line = stored_by(package, door, version, encoding)
    assert len(line) <= STORED_BY_CHARS_MAX and line.isascii() and line.isprintable() and line == line.strip(" ")
    assert str(StoredBy.parse(line)) == line == shared_line(line)


@pytest.mark.parametrize(
    "line",
    ["", " ", LINE + " ", LINE + "\n", LINE.upper(), LINE.replace(" ", "  "), LINE + "x" * 100, "vllm/0.32.0", "é"],
)
def test_what_is_no_line_is_refused_with_an_example(line):
    with pytest.raises(ValueError, match=r"reads like 'tiered_kv/0\.9\.1 vllm/0\.32\.0 CPU_ATTN/cpu/amx'") as caught:
        StoredBy.parse(line)
    assert len(str(caught.value)) < 400 and str(caught.value).isascii()
    if line != UNKNOWN:
        with pytest.raises(ValueError, match="reads like"):
            shared_line(line)


def test_lines_are_one_object_each_and_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "_SHARED_MAX", 10)
    first, again = (shared_line(bytes(LINE, "ascii").decode()) for _ in range(2))
    assert first is again
    for number in range(100):
        shared_line(f"tiered_kv/{number} vllm/1 -")
        assert len(module._shared) <= 12
    assert shared_line(UNKNOWN) == UNKNOWN


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([], ""),
        ([None], ""),
        (["fp8"], "fp8"),
        (["CPU_ATTN cpu amx"] * 28, "CPU_ATTN/cpu/amx"),
        (["FLASH_ATTN cuda", "FLASHINFER  cuda", "", "FLASH_ATTN cuda"], "FLASH_ATTN/cuda,FLASHINFER/cuda"),
        ([{"ranks": []}], ""),
    ],
)
def test_the_encodings_of_layers_in_one_word(value, expected):
    assert encoding_text(value) == expected
