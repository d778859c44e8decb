import pytest

from tiered_kv.keys.naming import parse_path, relative_path

NAMESPACE = bytes(range(16))
KEY = bytes(range(0xF0, 0x100))
PATH = "000102030405060708090a0b0c0d0e0f/f0/f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff.safetensors"


def test_path_is_namespace_then_first_digits_then_key():
    assert relative_path((NAMESPACE, KEY)) == PATH


def test_path_gives_the_name_back():
    assert parse_path(PATH) == (NAMESPACE, KEY)


@pytest.mark.parametrize(
    "path",
    [
        "",
        PATH + "\n",
        "/" + PATH,
        "./" + PATH,
        PATH.upper(),
        PATH.replace("f0f1", "F0f1"),
        PATH.replace("/f0/", "/f1/"),
        PATH.replace("/f0/", "/f0//"),
        PATH.replace("/f0/", "\\f0\\"),
        PATH.removesuffix(".safetensors"),
        PATH + ".tmp",
        PATH.replace("feff", "fef"),
        PATH.replace("feff", "fefff"),
        PATH.replace("feff", "fe f"),
        PATH.replace("0f/", "0/"),
        PATH.replace("0001", "\u0660\u0660\u0660\u0661"),
        "namespace.json",
    ],
)
def test_any_other_path_is_no_name(path):
    assert parse_path(path) is None


@pytest.mark.parametrize("name", [(NAMESPACE[:15], KEY), (NAMESPACE, KEY + b"x"), (b"", b"")])
def test_name_of_another_length_has_no_path(name):
    with pytest.raises(ValueError, match="two times 16 bytes"):
        relative_path(name)
