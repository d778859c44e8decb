from operator import eq, ne

import pytest

from tiered_kv.keys.naming import BlobName, object_path, parse_object_path, parse_path, relative_path

NAMESPACE = bytes(range(16))
KEY = bytes(range(0xF0, 0x100))
PATH = "000102030405060708090a0b0c0d0e0f/f0/f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff.safetensors"
PARENT = b"\xaa" * 16
OBJECT_PATH = PATH.replace(".safetensors", f".0000007.{PARENT.hex()}.safetensors")


def test_path_is_namespace_then_first_digits_then_key():
    assert relative_path(BlobName(NAMESPACE, KEY)) == PATH


def test_path_gives_the_name_back():
    assert parse_path(PATH) == BlobName(NAMESPACE, KEY)


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
    with pytest.raises(ValueError, match="has 16 bytes"):
        relative_path(BlobName(*name))


@pytest.mark.parametrize(
    ("name", "observed"),
    [
        ((NAMESPACE[:15], KEY, PARENT), "15,16,16"),
        ((NAMESPACE, KEY + b"x", PARENT), "16,17,16"),
        ((NAMESPACE, KEY, b""), "16,16,0"),
    ],
)
def test_every_part_of_an_object_path_has_its_length(name, observed):
    with pytest.raises(ValueError, match=f"observed={observed}$"):
        object_path(BlobName(*name))


def test_names_are_equal_whatever_is_known_of_their_ancestry():
    assert BlobName(NAMESPACE, KEY) == BlobName(NAMESPACE, KEY, PARENT, 7)
    assert hash(BlobName(NAMESPACE, KEY)) == hash(BlobName(NAMESPACE, KEY, PARENT, 7))


def test_object_path_tells_depth_and_parent():
    name = BlobName(NAMESPACE, KEY, PARENT, 7)
    assert object_path(name) == OBJECT_PATH
    found = parse_object_path(OBJECT_PATH)
    assert found is not None
    assert (found.namespace, found.key, found.parent, found.chunk_index) == (NAMESPACE, KEY, PARENT, 7)


def test_object_paths_of_a_chain_sort_by_depth():
    paths = [object_path(BlobName(NAMESPACE, KEY, PARENT, depth)) for depth in (0, 9, 10, 512, 9_999_999)]
    assert sorted(paths) == paths


@pytest.mark.parametrize(
    "path",
    [
        PATH,
        OBJECT_PATH + "\n",
        "/" + OBJECT_PATH,
        OBJECT_PATH.upper(),
        OBJECT_PATH.replace("/f0/", "/f1/"),
        OBJECT_PATH.replace(".0000007.", ".7."),
        OBJECT_PATH.replace(".0000007.", ".00000007."),
        OBJECT_PATH.replace(".0000007.", ".-000007."),
        OBJECT_PATH.replace("aaaa", "aaa"),
        "namespace.json",
    ],
)
def test_any_other_path_is_no_object_of_ours(path):
    assert parse_object_path(path) is None


@pytest.mark.parametrize(("parent", "depth"), [(b"", 0), (b"p", 0), (bytes(16), -1), (bytes(16), 10**7)])
def test_name_without_its_ancestry_has_no_object_path(parent, depth):
    with pytest.raises(ValueError, match="observed="):
        object_path(BlobName(NAMESPACE, KEY, parent, depth))


def test_names_are_equal_whose_namespace_and_key_are():
    """A file's name on disk tells no ancestry."""
    namespace, key = bytes(16), bytes(range(16))
    name, same = BlobName(namespace, key), BlobName(namespace, bytes(bytearray(key)), b"p" * 16, 3)
    assert name == same and not ne(name, same) and {name: 1}[same] == 1
    for other in (BlobName(namespace, b"k" * 16), BlobName(b"n" * 16, key), (namespace, key)):
        assert name != other and not eq(name, other)
