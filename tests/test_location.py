"""What a storage URI names, which options it may carry, and that no message shows a secret."""

import inspect

import pytest

from tests.kit.missing import needed
from tiered_kv.errors import ConfigError
from tiered_kv.location import Location, parse_location


@pytest.mark.parametrize(
    ("uri", "kind", "scheme", "path"),
    [
        ("file:///var/cache", "disk", "file", "/var/cache"),
        ("file://localhost/a", "disk", "file", "/a"),
        ("file:///with%20space%3F", "disk", "file", "/with space?"),
        ("shared+file:///mnt/kv", "object", "shared+file", "/mnt/kv"),
        ("shared+file:///mnt//kv/./", "object", "shared+file", "/mnt/kv"),
        ("shared+file:///mnt/../kv", "object", "shared+file", "/mnt/../kv"),
        ("s3://bucket", "object", "s3", "bucket"),
        ("s3://bucket/", "object", "s3", "bucket"),
        ("s3://bucket/a//b/", "object", "s3", "bucket/a/b"),
        ("s3://bucket/a%20b", "object", "s3", "bucket/a b"),
        ("gs://bucket/p", "object", "gs", "bucket/p"),
        ("az://container/p", "object", "az", "container/p"),
        ("memory://x/y", "object", "memory", "x/y"),
        ("mooncake://master:50051", "pool", "mooncake", "master:50051/tiered_kv"),
        ("mooncake://10.0.0.1:50051/llama/v2/", "pool", "mooncake", "10.0.0.1:50051/llama/v2"),
        ("mooncake://[fd00::1]:50051/x", "pool", "mooncake", "[fd00::1]:50051/x"),
    ],
)
def test_a_uri_names_a_place(uri, kind, scheme, path):
    found = parse_location(uri)
    assert (found.kind, found.scheme, found.path, found.options) == (kind, scheme, path, {})


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("", "no scheme in it: a directory is written file:///absolute/path, a bucket s3://bucket/prefix"),
        ("bucket/prefix", "a directory is written file:///absolute/path, a bucket s3://bucket/prefix"),
        ("/var/cache/kv", "no scheme in it: a directory is written file:///var/cache/kv"),
        ("/a b/c%", "a directory is written file:///a%20b/c%25"),
        ("/dir?token=hidden", "a directory is written file:///absolute/path"),
        ("/", "a directory is written file:///absolute/path"),
        ("~/kv", "a directory is written file:///absolute/path"),
        ("http://host/dir", "unknown scheme 'http'; did you mean s3://bucket/prefix"),
        ("gcs://bucket/dir", "unknown scheme 'gcs'; did you mean gs://bucket/prefix"),
        ("nfs:///dir", "unknown scheme 'nfs'; did you mean shared"),
        ("redis://host", "unknown scheme 'redis'; known: file, s3, gs, az, memory, shared"),
        ("s3://", "names no bucket"),
        ("s3:///prefix", "names no bucket"),
        ("s3://bucket:9000/p", "a server's address into the option endpoint_url"),
        ("s3://key:hidden@bucket/p", "Credentials belong into storage_options"),
        ("s3://bucket/../other", "no . or .. in it"),
        ("s3://bucket/p#hidden", "nothing may stand after #"),
        ("s3://bucket?hidden", "expected options such as"),
        ("s3://bucket?region=a&region=b", "stands there twice"),
        ("s3://[x", "not a URI"),
        ("shared+file://host/dir", "three slashes and an absolute directory"),
        ("shared+file:///", "three slashes and an absolute directory"),
        ("file:///dir?a=b", "takes no options"),
        ("s3://b?endpoint_url=host:9000", "expected http://host:port or https://host"),
        ("s3://b?endpoint_url=https://", "expected http://host:port or https://host"),
        ("s3://b?endpoint_url=https:///path", "expected http://host:port or https://host"),
        ("s3://b?endpoint_url=http://:9000", "expected http://host:port or https://host"),
        (
            "s3://b?endpoint_url=http://me:hidden@host:1",
            "alone: what signs requests goes into",
        ),
        ("s3://b?endpoint_url=http://host:1/%3Fa%3Dhidden", "expected http://host:port or https://host, alone"),
        ("gs://b?endpoint_url=http://host:1 hidden", "expected http://host:port or https://host, alone"),
        ("s3://b?addressing_style=hidden", "option addressing_style of storage_uri: expected auto, path or virtual"),
        ("s3://b?key=&secret=", "option key of storage_uri: it is empty; give it a value, or leave it out"),
        ("s3://b?anon=false&key=k&secret=", "option secret of storage_uri: it is empty"),
        ("s3://b?anon=perhaps", "option anon of storage_uri: expected true or false"),
        ("memory://x?region=a", "unknown option 'region'; known options: none"),
        ("mooncake://master/name", "expected mooncake://HOST:PORT/name"),
        ("mooncake://:50051/name", "expected mooncake://HOST:PORT/name"),
        ("mooncake://master:99999", "expected mooncake://HOST:PORT/name"),
        ("mooncake://me:hidden@master:1", "without credentials"),
        ("mooncake://master:1/a#hidden", "without #"),
        ("mooncake://master:1/..", "no part of it is"),
        ("mooncake://master:1/a b", "letters, digits"),
        (f"mooncake://master:1/{'n' * 129}", "up to 128 letters"),
        ("mooncake://master:1?hidden", "expected options such as"),
        ("mooncake://master:1?protocl=hidden", "did you mean protocol?"),
        ("mooncake://master:1?protocol=tcp&protocol=hidden", "option protocol stands there twice"),
        ("mooncake://master:1?local_hostname=%ff", "expected options such as"),
        ("file:///dir%ff", "what %ff and the like stand for is not UTF-8"),
        ("shared+file:///dir%ff", "what %ff and the like stand for is not UTF-8"),
        ("s3://bucket/prefix%ff", "what %ff and the like stand for is not UTF-8"),
        ("s3://bucket?secret=hidden%ff", "expected options such as"),
        ("mooncake://master:1?protocol=udp", "expected tcp or rdma"),
        ("mooncake://master:1?global_segment_size=4GiB", "expected a number of bytes"),
        ("mooncake://master:1?PATH=hidden", "unknown option 'PATH'"),
    ],
)
def test_what_names_no_place_is_told_without_secrets(uri, expected):
    with pytest.raises(ConfigError, match=expected.replace(".", r"\.")) as caught:
        parse_location(uri)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "near"),
    [("endpoint", "endpoint_url"), ("regoin", "region"), ("secrets", "secret"), ("zzz", None)],
)
def test_an_unknown_option_is_told_with_the_nearest_known_one(name, near):
    for uri, options in ((f"s3://b?{name}=hidden", {}), ("s3://b", {name: "hidden"})):
        with pytest.raises(ConfigError, match=f"unknown option '{name}'") as caught:
            parse_location(uri, options)
        assert (f"did you mean {near}?" in str(caught.value)) == (near is not None)
        assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "name", "near"),
    [
        ("gs://b", "endpoint", "endpoint_url"),
        ("gs://b", "tokens", "token"),
        ("az://c", "acount_key", "account_key"),
        ("az://c", "conection_string", "connection_string"),
    ],
)
def test_a_slip_in_an_option_is_told_where_the_client_takes_others_too(uri, name, near):
    """Their clients ignore what they do not know: prompts' KV would go to another service, or without a key."""
    with pytest.raises(ConfigError, match=f"unknown option '{name}'; did you mean {near}?") as caught:
        parse_location(uri, {name: "hidden"})
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "module", "client"), [("gs://b", "gcsfs.core", "GCSFileSystem"), ("az://c", "adlfs", "AzureBlobFileSystem")]
)
def test_every_option_of_the_client_itself_is_passed_on(uri, module, client):
    taken = inspect.signature(getattr(needed(module), client).__init__).parameters.values()
    others = {each.name: None for each in taken if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "self"}
    assert len(others) > 10 and parse_location(uri, others).options == others


def test_options_are_read_and_storage_options_win():
    uri = "s3://b/p?endpoint_url=http%3A%2F%2Fhost:1&region=here&anon=true&verify=/ca.pem"
    found = parse_location(uri, {"region": "there", "verify": False})
    assert found.options == {"endpoint_url": "http://host:1", "region": "there", "anon": True, "verify": False}
    assert parse_location("s3://b?verify=false").options == {"verify": False}


@pytest.mark.parametrize(("uri", "name"), [("s3://b", "secret"), ("az://c", "account_key"), ("mooncake://m:1", "MC_X")])
def test_a_plus_in_an_option_is_a_plus(uri, name):
    """As in half of all secrets, which are base64; a form's blank is written so, and no option has any."""
    assert parse_location(f"{uri}?{name}=a+b%2Bc%20d/e%3D").options == {name: "a+b+c d/e="}


@pytest.mark.parametrize(
    ("uri", "options"),
    [
        ("mooncake://a:1", {"MC_X": [1]}),
        ("s3://b", {"key": 5}),
        ("memory://x", {"a": 1}),
        ("shared+file:///d", {"a": 1}),
        ("file:///d", {"key": "k"}),
    ],
)
def test_options_of_the_wrong_kind_are_refused(uri, options):
    with pytest.raises(ConfigError, match="storage_options|option key|option MC_X"):
        parse_location(uri, options)


def test_a_pool_s_options_are_mooncake_s_own_names_and_variables():
    found = parse_location("mooncake://m:1?protocol=rdma&MC_GID_INDEX=3", {"global_segment_size": 1 << 30})
    assert found.options == {"protocol": "rdma", "MC_GID_INDEX": "3", "global_segment_size": 1 << 30}
    assert found.identity == found.storage == "mooncake://m:1/tiered_kv"
    assert parse_location("mooncake://m:1?tenant_id=a").identity == "mooncake://m:1/tiered_kv@a"


def test_options_are_never_shown():
    options = {"endpoint_url": "http://user:hidden@host:1/?hidden", "secret": "hidden", "key": "hidden"}
    found = Location("object", "s3", "b/p", options | {"token": "hidden"})
    for text in (str(found), repr(found), found.identity):
        assert "hidden" not in text
    assert found.identity == "s3://b/p@http://***@host:1/?***"


def test_equal_places_have_equal_identities():
    one = parse_location("s3://b/p/?endpoint_url=http://h:1/", {"key": "a"})
    other = parse_location("s3://b/p", {"endpoint_url": "http://h:1"})
    assert one.identity == other.identity != parse_location("s3://b/p").identity
    assert hash(one) == hash(Location("object", "s3", "b/p"))


@pytest.mark.parametrize(
    ("endpoint", "same"),
    [
        ("HTTP://Host:1/Path", "http://host:1/Path"),
        ("https://[FD00::1]:9000", "https://[fd00::1]:9000"),
        ("http://[FE80::1%25Port0]", "http://[fe80::1%25Port0]"),
    ],
)
def test_an_endpoint_s_capitals_name_no_other_place(endpoint, same):
    """But for those of a path, and of an interface's name."""
    found = parse_location("s3://b/p", {"endpoint_url": endpoint})
    assert found == parse_location("s3://b/p", {"endpoint_url": same}) and found.options["endpoint_url"] == same


@pytest.mark.parametrize(
    ("options", "account"),
    [
        ({"account_name": "one", "account_key": "hidden"}, "one"),
        ({"connection_string": "DefaultEndpointsProtocol=https;AccountName=one;AccountKey=hidden=="}, "one"),
        ({"connection_string": "BlobEndpoint=https://one.host/;SharedAccessSignature=hidden"}, "https://one.host"),
    ],
)
def test_one_container_name_in_two_azure_accounts_is_two_places(options, account):
    found = parse_location("az://box/p", options)
    assert found.identity == f"az://box/p@{account}"


@pytest.mark.parametrize(
    "options",
    [
        {"anon": "true", "key": "", "secret": ""},
        {"key": "", "secret": "", "anon": True},
        {"region": ""},
        {"token": ""},
        {"profile": ""},
        {"requester_pays": ""},
        {"client_kwargs": ""},
    ],
)
def test_an_empty_option_that_signs_nothing_is_taken_as_it_is(options):
    """Templates leave them so, and clients read them as if they were not there."""
    assert parse_location("s3://bucket", options).options.keys() == options.keys()
