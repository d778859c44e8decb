"""What an operator selects by who stored it: the order of PEP 440, whole encodings, and nothing that is not known."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from tiered_kv.errors import ConfigError
from tiered_kv.keys.conditions import CONDITIONS_MAX, Conditions
from tiered_kv.keys.stored_by import stored_by


def line(vllm="0.32.0", package="0.9.1", encoding="cpu/amx", door="vllm"):
    return stored_by(package, door, vllm, encoding)


def selects(condition, **of):
    return Conditions([condition]).matches(line(**of))


RISING = ["0.31.9", "0.32.0.dev3+gabc", "0.32.0rc1", "0.32.0", "0.32.0.post1", "0.32.1.dev1", "0.32.1rc2", "0.32.1"]


@pytest.mark.parametrize("version", RISING)
def test_versions_compare_in_the_order_of_pep_440(version):
    at, mend = RISING.index(version), RISING.index("0.32.1")
    assert selects("vllm<0.32.1", vllm=version) == (at < mend), "a pre-release of the mend comes before it"
    assert selects("vllm>=0.32.1", vllm=version) == (at >= mend)
    assert selects("vllm>0.32.0", vllm=version) == (at > RISING.index("0.32.0"))
    assert selects("vllm<=0.32.0rc1", vllm=version) == (at <= RISING.index("0.32.0rc1"))
    assert selects("vllm==0.32.0", vllm=version) == selects("vllm=0.32.0", vllm=version) == (version == "0.32.0")
    assert selects("vllm!=0.32.0", vllm=version) == (version != "0.32.0")
    assert selects("vllm==0.32.*", vllm=version) == (version != "0.31.9")
    assert selects("vllm!=0.32.*", vllm=version) == (version == "0.31.9")


@pytest.mark.parametrize("condition", ["vllm=0.32", "vllm==0.32"])
def test_a_version_is_meant_whole_and_longer_ones_are_named_with_what_means_them(condition):
    lines = [line(version) for version in ("0.31.9", "0.32.0", "0.32.0+cpu", "0.32.1", "0.32.1rc1", "0.320.1", "dev")]
    conditions = Conditions([condition])
    assert [one for one in lines if conditions.matches(one)] == [line("0.32.0"), line("0.32.0+cpu")]
    assert conditions.longer(lines) == {"vllm==0.32.*": {"0.32.1", "0.32.1rc1"}}
    assert Conditions(["vllm==0.32.*"]).longer(lines) == {}


def test_only_what_a_condition_names_is_named_as_longer():
    lines = [line("0.32.1", package="0.9.1"), line("0.32.1", door="cache")]
    assert Conditions(["tiered_kv=0.9"]).longer(lines) == {"tiered_kv==0.9.*": {"0.9.1"}}
    assert Conditions(["vllm=0.32"]).longer(lines[1:]) == {}
    for text in ("vllm=0.32.1", "vllm!=0.32", "vllm<0.32", "vllm==dev", "encoding=cpu"):
        assert Conditions([text]).longer(lines) == {}, text


@given(st.lists(st.tuples(*[st.integers(0, 12)] * 3), min_size=2, max_size=2))
def test_they_agree_with_packaging_on_every_two_releases(pair):
    one, two = (".".join(map(str, numbers)) for numbers in pair)
    left, right = Version(one), Version(two)
    for sign, holds in (("<", left < right), ("<=", left <= right), ("==", left == right), (">=", left >= right)):
        assert selects(f"vllm{sign}{two}", vllm=one) is holds
        assert selects(f"tiered_kv {sign} {two}", package=one) is holds


def test_a_local_part_counts_where_the_condition_has_one():
    assert selects("vllm==0.32.0", vllm="0.32.0+cpu") and not selects("vllm>0.32.0", vllm="0.32.0+cpu")
    assert selects("vllm==0.32.0+cpu", vllm="0.32.0+cpu") and not selects("vllm==0.32.0+cpu", vllm="0.32.0+cu129")
    assert not selects("vllm==0.32.0+cpu", vllm="0.32.0")


def test_encodings_are_compared_whole_or_by_how_they_begin():
    assert selects("encoding=cpu/amx") and selects("encoding == cpu/amx") and not selects("encoding!=cpu/amx")
    assert not selects("encoding=cpu") and selects("encoding=cpu/*") and not selects("encoding!=cpu/*")
    assert selects("encoding=-", encoding=None)


def test_a_door_selects_only_what_it_stored():
    assert not selects("vllm!=9", door="cache") and not selects("vllm<99", door="cache")
    assert selects("cache<99", door="cache", vllm="0.9.1") and selects("tiered_kv<1", door="cache")


def test_all_conditions_have_to_be_met():
    both = Conditions(["vllm>=0.32.0", "vllm<0.32.1", "encoding=cpu/*"])
    assert both.matches(line("0.32.0")) and not both.matches(line("0.32.1")) and not both.matches(line("0.31.0"))
    assert not both.matches(line("0.32.0", encoding="cuda/FLASH_ATTN"))


def test_who_is_not_known_is_never_meant():
    for text in ("vllm!=1", "tiered_kv>=0", "encoding!=x"):
        assert not Conditions([text]).matches("")


def test_a_version_that_has_no_order_is_told_and_selected_by_its_name_only():
    conditions = Conditions(["vllm<0.32.1"])
    assert not conditions.matches(line("dev")) and conditions.incomparable == {line("dev")}
    assert selects("vllm==dev", vllm="dev") and not selects("vllm!=dev", vllm="dev") and selects("vllm!=dev")
    assert not selects("vllm==0.32.*", vllm="dev") and selects("vllm!=0.32.*", vllm="dev")
    other = Conditions(["vllm<0.32.1", "encoding=cuda"])
    assert not other.matches(line("dev")) and not other.incomparable, "it is not meant anyway"


NONSENSE = [
    *("", "vllm", "vllm<", "<0.32", "vllm 0.32", "vllm~=0.32", "vlm<0.32", "vllm<0.32,vllm>0.31", "vllm<0.32 or 1"),
    *("VLLM<1", "encoding<cpu", "encoding>=cpu", "vllm<dev", "vllm<0.32.*", "vllm==*", "vllm==0.*.1", "vllm==1rc1.*"),
    *("vllm<0.32\x00", "vllm<0.32\n<", "vllm<é", "v" * 200, "encoding=", "format<3", "model==x"),
]


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_is_refused_with_a_sentence(text):
    with pytest.raises(ConfigError, match=r"0\.32|encoding=NAME") as caught:
        Conditions([text])
    assert str(caught.value).isascii() and len(str(caught.value)) < 400


def test_there_is_at_least_one_and_not_any_number():
    for texts in ([], ["vllm<1"] * (CONDITIONS_MAX + 1)):
        with pytest.raises(ConfigError, match="expected 1 to 16 conditions"):
            Conditions(texts)


def test_a_condition_and_its_contrary_part_what_is_known():
    lines = [line(v, p, e) for v, p, e in itertools.product(RISING, ("0.9.0", "0.10.0"), ("cpu/amx", "cpu/vec"))]
    for one, other in (("vllm<0.32.0", "vllm>=0.32.0"), ("tiered_kv==0.9.0", "tiered_kv!=0.9.0")):
        first, second = Conditions([one]), Conditions([other])
        assert all(first.matches(x) != second.matches(x) for x in lines)
    assert Conditions(["tiered_kv<0.10"]).matches(line(package="0.9.0")), "numbers, not text"
