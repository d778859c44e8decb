"""Settings: every wrong one is an error that names the setting, what was expected and what was given."""

import dataclasses
from pathlib import Path

import pytest

from tiered_kv.config import Config, parse_size, parse_time_s, size_text
from tiered_kv.errors import ConfigError
from tiered_kv.location import redact
from tiered_kv.machine import memory_limit_bytes
from tiered_kv.server.directory import server_directory

URI = "file:///var/cache/tiered_kv"


def config(**more: object) -> Config:
    return Config.from_mapping({"storage_uri": URI, **more})


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (1, 1),
        (4294967296, 4 << 30),
        ("4294967296", 4 << 30),
        ("4GiB", 4 << 30),
        (" 4 GiB ", 4 << 30),
        ("4GB", 4_000_000_000),
        ("500 MB", 500_000_000),
        ("0.5KiB", 512),
        ("1.5TiB", 3 << 39),
        ("12B", 12),
        ("9007199254740993", 9007199254740993),
    ],
    ids=repr,
)
def test_sizes_are_read_exactly(value: object, size: int) -> None:
    assert parse_size(value) == size


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, True, 1.5, None, [], "", "GiB", "4gib", "4 G", "-4GiB", "4GiB4", "0GiB", "0.1B", "1e9", "nan"),
        *("9" * 500, f"{'9' * 400}TiB", 1 << 63, "8388608TiB", "4\nGiBs", "٤x"),
    ],
    ids=repr,
)
def test_what_is_no_size_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        parse_size(value)


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("host_bytes", "4 gigs", "expected a size such as 4GiB; units are B, KiB"),
        ("host_bytes", 0, "expected a size above zero"),
        ("host_bytes", True, "expected a size"),
        ("host_bytes", 8, "expected a size of at least 64KiB, such as 4GiB; a number without a unit is bytes"),
        ("host_bytes", "32768", "a number without a unit is bytes"),
        ("storage_bytes", 500, "a number without a unit is bytes"),
        ("disk_bytes", [1], "expected a size"),
        ("disk_bytes", "9" * 400 + "TiB", "expected a size above zero and below 8 EiB"),
        ("min_free_bytes", -1, "expected a size above zero"),
        ("disk_path", "relative", "expected an absolute path"),
        ("disk_path", 7, "expected a non-empty string"),
        ("chunk_tokens", 0, "expected a whole number above zero"),
        ("chunk_tokens", "256", "expected a whole number above zero"),
        ("chunk_tokens", True, "expected a whole number above zero"),
        ("server", "tcp://host", "unix:///path/of/socket"),
        ("server", "unix://relative", "unix:///path/of/socket"),
        ("server", "unix:///", "unix:///path/of/socket"),
        ("server", "", "expected a non-empty string"),
        ("model_id", "", "expected a non-empty string"),
        ("model_id", 3, "expected a non-empty string"),
        ("strict", "yes", "expected true or false"),
        ("strict", 1, "expected true or false"),
        ("lookup_timeout_ms", 0, "expected a number from 1 to 60000"),
        ("lookup_timeout_ms", "250", "expected a number from 1 to 60000"),
        ("lookup_timeout_ms", float("nan"), "expected a number from 1 to 60000"),
        ("lookup_timeout_ms", float("inf"), "expected a number from 1 to 60000"),
        ("tail_tokens", "some", 'expected "auto", 0 or a whole number of tokens'),
        ("tail_tokens", -1, 'expected "auto", 0'),
        ("tail_tokens", True, 'expected "auto", 0'),
        ("promotion_wait_ms", "soon", 'expected "auto" or a number from 0 to 600000'),
        ("promotion_wait_ms", -1, 'expected "auto" or a number'),
        ("promotion_deadline_ms", 0, "expected a number from 1 to 600000"),
        ("lease_s", 0, "expected a number from 1 to 3600"),
        ("eviction", "LRU", "expected multi-queue or lru, got 'LRU'"),
        ("eviction", ["lru"], "expected multi-queue or lru"),
        ("min_share", 1.5, "expected a number from 0 to 1, got 1.5"),
        ("max_share", 0, "expected a number from 0.001 to 1, got 0"),
        ("disk_admission", "tinylfu", "expected all or second-touch, got 'tinylfu'"),
        ("storage_admission", True, "expected all or second-touch"),
        ("drain_s", -1, "expected a number from 0 to 3600"),
        ("drain_s", True, "expected a number from 0 to 3600"),
        ("start_timeout_s", 0.5, "expected a number from 1 to 600"),
        ("pinned_share", 0.6, "expected a number from 0.001 to 0.5"),
        ("storage_bytes", "many", "expected a size such as 4GiB"),
        ("storage_ttl", "7 weeks", "expected a time such as 12h or 7d"),
        ("storage_ttl", 0, "expected a time such as 12h or 7d"),
        ("storage_ttl", "3600", "expected a time such as 12h or 7d, with its unit"),
        ("storage_timeout_s", 0, "expected a number from 0.1 to 600"),
        ("storage_concurrency", 0, "expected a whole number above zero"),
        ("single_writer", "yes", "expected true or false"),
        ("evict_other_namespaces", 1, "expected true or false"),
        ("storage_uri", 5, "expected a non-empty string"),
        ("storage_uri", "file://[bad/x", "expected a URI"),
        ("storage_uri", "file:///a\nb", "expected a URI without control characters"),
        ("storage_ttl", 10**400, "expected a time such as 12h or 7d"),
        ("disk_path", "/a\0b", "expected an absolute path"),
        ("peer_key_file", "/a\0b", "expected an absolute path"),
        ("server", "unix:///a\0b", "expected the socket of a running server"),
    ],
)
def test_a_wrong_value_is_told_with_setting_expectation_and_value(setting: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping({"storage_uri": URI, setting: value})
    message = str(caught.value)
    assert message.startswith(f"setting {setting}: ")
    assert expected in message
    assert message.endswith(f"got {value!r}")


@pytest.mark.parametrize(
    ("name", "near"),
    [("host_byte", "host_bytes"), ("storage_url", "storage_uri"), ("chunk_size", None), ("zzz", None), (5, None)],
)
def test_an_unknown_name_is_told_with_the_nearest_known_one(name: str, near: str | None) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting {name!r}") as caught:
        Config.from_mapping({name: 1})
    assert (f"did you mean {near}?" in str(caught.value)) == (near is not None)
    assert "known settings: chunk_tokens, disk_admission, disk_bytes" in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("", "storage_uri is required|expected a non-empty string"),
        ("/var/cache", "no scheme in it: a directory is written file:///var/cache"),
        ("http://host/dir", "unknown scheme 'http'"),
        ("file://var/cache", "three slashes and an absolute directory"),
        ("file:relative", "three slashes"),
        ("file:///", "three slashes"),
        ("file:////", "three slashes"),
        ("file:///.", "three slashes"),
        ("file:///a/..", "three slashes"),
        ("file:///a%00b", "three slashes"),
        ("file:///a?b=c", "takes no options"),
        ("file:///a#b", "takes no options"),
        ("s3://", "names no bucket"),
    ],
)
def test_a_uri_that_names_no_directory_is_refused_with_an_example(uri: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Config.from_mapping({"storage_uri": uri})


def test_the_uri_is_required() -> None:
    for settings in ({}, {"storage_uri": None}):
        with pytest.raises(ConfigError, match="setting storage_uri is required, e.g."):
            Config.from_mapping(settings)


def test_a_disk_path_beside_a_local_uri_is_refused() -> None:
    with pytest.raises(ConfigError, match="disk_path is only for object stores"):
        config(disk_path="/x")


def test_what_a_model_keeps_is_part_of_what_it_may_take() -> None:
    with pytest.raises(ConfigError, match=r"min_share=0.5 is more than max_share=0.4"):
        config(min_share=0.5, max_share=0.4)
    assert (config(min_share=0.5, max_share=0.5).min_share, config().min_share, config().max_share) == (0.5, None, None)


def test_admission_is_set_for_each_tier_that_is_there() -> None:
    assert config().admissions() == {"disk": "all", "object": "all", "mooncake": "all"}
    assert config(disk_admission="second-touch").admissions()["disk"] == "second-touch"
    bucket = {"storage_uri": "s3://bucket/prefix", "storage_admission": "second-touch"}
    for uri, name in ((bucket["storage_uri"], "object"), ("mooncake://host:50051", "mooncake")):
        assert Config.from_mapping(bucket | {"storage_uri": uri}).admissions()[name] == "second-touch"
    with pytest.raises(ConfigError, match="with file:// it is disk_admission"):
        config(storage_admission="second-touch")
    with pytest.raises(ConfigError, match="set disk_path, or storage_admission"):
        Config.from_mapping(bucket | {"disk_admission": "second-touch"})
    assert Config.from_mapping(bucket | {"disk_admission": "second-touch", "disk_path": "/d"}).disk_path


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        (URI, "/var/cache/tiered_kv"),
        ("file://localhost/a", "/a"),
        ("file:///with%20space%3F", "/with space?"),
        ("file:///a/b@c", "/a/b@c"),
    ],
)
def test_the_uri_names_the_directory(uri: str, path: str) -> None:
    assert Config.from_mapping({"storage_uri": uri}).disk_root() == Path(path)


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        (URI, URI),
        ("file:///a/b@c", "file:///a/b@c"),
        ("s3://bucket/prefix", "s3://bucket/prefix"),
        ("s3://AKIA:hidden@bucket/prefix", "s3://***@bucket/prefix"),
        ("s3://AKIA:hidd/en@bucket/p", "s3://***@bucket/p"),
        ("s3://AKIA:hidd?en#x@bucket/p?token=hidden", "s3://***@bucket/p?***"),
        ("s3://bucket/p?secret=hidden", "s3://bucket/p?***"),
        ("s3://bucket/p#hidden", "s3://bucket/p#***"),
        ("AKIA:hidden@bucket/p", "***@bucket/p"),
        ("http://user:hidden@host:port/x", "http://***@host:port/x"),
        ("file://user:hidden@host/x", "file://***@host/x"),
        ("s3://[hidden@x/p", "s3://***@x/p"),
        ("file:key:hidden@://", "***@://"),
        ("AKIA:hidden@s3://bucket/p", "***@s3://bucket/p"),
        ("", ""),
    ],
)
def test_secrets_in_uris_are_never_shown(uri: str, shown: str) -> None:
    assert redact(uri) == shown
    try:
        text = str(Config.from_mapping({"storage_uri": uri}).describe())
    except ConfigError as exc:
        text = f"{exc}"
    assert "hidden" not in text and "AKIA" not in text


def test_settings_survive_the_way_to_another_process() -> None:
    for given in (
        config(),
        config(
            host_bytes="1GiB", disk_bytes="2GiB", server="unix:///s", strict=True, promotion_wait_ms=0, model_id="m"
        ),
        config(promotion_wait_ms="auto"),
    ):
        assert Config.from_mapping(given.to_mapping()) == given
    assert config().promotion_wait_ms is None
    assert (
        config().tail_tokens is config(tail_tokens="auto").tail_tokens is None
        and config(tail_tokens=0).tail_tokens == 0
    )
    assert config(promotion_wait_ms=5).promotion_wait_ms == 5.0
    assert {config().describe()[name] for name in ("promotion_wait_ms", "tail_tokens")} == {"auto"}


BUCKET = "s3://bucket/prefix"


def bucket(**more: object) -> Config:
    return Config.from_mapping({"storage_uri": BUCKET, **more})


def test_an_object_store_is_a_location_with_its_options() -> None:
    found = bucket(storage_options={"endpoint_url": "http://host:9000"}).location()
    assert (found.kind, found.scheme, found.path) == ("object", "s3", "bucket/prefix")
    assert found.options == {"endpoint_url": "http://host:9000"}
    assert bucket().disk_root() is None
    assert bucket(disk_path="/cache", disk_bytes="1GiB").disk_root() == Path("/cache")


def test_a_limit_of_a_disk_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="set disk_path, or storage_bytes instead"):
        bucket(disk_bytes="1GiB")
    with pytest.raises(ConfigError, match="there is no disk tier"):
        bucket().resolved_disk_bytes()


@pytest.mark.parametrize(
    ("name", "value"),
    [("storage_bytes", "1GiB"), ("storage_ttl", "7d"), ("single_writer", True), ("evict_other_namespaces", True)],
)
def test_settings_of_a_bucket_are_refused_for_a_local_disk(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} is only for object stores: with file:// the limit is disk_bytes"):
        config(**{name: value})


def test_storage_options_beside_a_local_disk_are_refused() -> None:
    with pytest.raises(ConfigError, match="storage_options are only for object stores"):
        config(storage_options={"key": "k"})


@pytest.mark.parametrize(
    "settings",
    [
        {"storage_options": {"key": "AKIAhidden", "secret": "hidden", "client_kwargs": {"x": "hidden"}}},
        {"storage_uri": "s3://b/p?secret=hidden&key=AKIAhidden"},
        {"storage_uri": "s3://b/p?secret=hidden", "storage_options": {"token": "hidden"}},
    ],
)
def test_credentials_are_shown_nowhere_and_reach_another_process(settings: dict[str, object]) -> None:
    given = bucket(**settings)
    for text in (repr(given), str(given), str(given.describe()), repr(given.location()), str(given.location())):
        assert "hidden" not in text and "AKIA" not in text
    assert "hidden" not in given.location().identity
    assert Config.from_mapping(given.to_mapping()) == given
    hash(given)


@pytest.mark.parametrize("value", ["hidden", ["hidden"], {1: "hidden"}, {"key": object()}, {"key": b"hidden"}])
def test_wrong_options_are_refused_without_being_shown(value: object) -> None:
    with pytest.raises(ConfigError, match="expected a mapping of option names to (plain )?values") as caught:
        bucket(storage_options=value)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(60, 60), (1.5, 1.5), ("90s", 90), ("2m", 120), (" 12 h ", 43200), ("7d", 604800), ("0.5h", 1800)],
)
def test_times_are_read(value: object, seconds: float) -> None:
    assert parse_time_s(value) == seconds


@pytest.mark.parametrize(
    "value", [0, -1, 0.5, True, None, "", "7", "7w", "h", "-1h", "1h1m", float("nan"), float("inf"), "9999999d"]
)
def test_what_is_no_time_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="expected a time"):
        parse_time_s(value)


def test_the_digest_names_the_store_and_its_limits_but_no_secret() -> None:
    digests = {
        bucket(host_bytes="1GiB", **more).digest()
        for more in (
            {},
            {"storage_uri": "s3://bucket/other"},
            {"storage_options": {"endpoint_url": "http://other:1"}},
            {"storage_bytes": "1GiB"},
            {"storage_ttl": "7d"},
            {"single_writer": True},
            {"evict_other_namespaces": True},
        )
    }
    assert len(digests) == 7
    one, other = ({"key": "one", "secret": "s"}, {"key": "two", "secret": "t"})
    assert bucket(storage_options=one).digest() == bucket(storage_options=other).digest()


def test_a_bucket_without_any_limit_is_warned_of() -> None:
    [warning] = bucket().warnings()
    assert "s3://bucket/prefix has no limit" in warning
    [warning] = bucket(storage_ttl=7).warnings()
    assert "storage_ttl is 7 s" in warning and "7 days are 7d" in warning
    assert bucket(storage_bytes="1GiB").warnings() == bucket(storage_ttl="7d").warnings() == config().warnings() == []


def test_a_pool_without_a_disk_is_warned_of_because_it_may_outlive_what_remembers_resets() -> None:
    pool = {"storage_uri": "mooncake://master:50051/kv"}
    [warning] = Config.from_mapping(pool).warnings()
    assert "KV from before a reset is found again; set disk_path" in warning
    assert Config.from_mapping(pool | {"disk_path": "/var/cache/tiered_kv"}).warnings() == []


def test_the_servers_directory_is_the_disks_or_one_for_the_uri(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert config().server_directory() == Path("/var/cache/tiered_kv")
    assert bucket(disk_path="/cache").server_directory() == Path("/cache")
    places = [
        made.server_directory()
        for made in (
            bucket(),
            bucket(storage_uri="s3://bucket/other"),
            bucket(storage_options={"endpoint_url": "http://h:1"}),
        )
    ]
    assert len(set(places)) == 3
    assert all(tmp_path in place.parents and not place.exists() for place in places)
    assert bucket(storage_options={"secret": "x"}).server_directory() == places[0]
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert bucket().server_directory().is_absolute()


def test_the_servers_directory_is_made_private_and_refused_if_it_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = server_directory(bucket())
    assert [path.stat().st_mode & 0o777 for path in (made.parent, made)] == [0o700, 0o700]
    assert server_directory(bucket()) == made
    made.chmod(0o777)
    with pytest.raises(ConfigError, match="must belong to this user alone .* set XDG_STATE_HOME"):
        server_directory(bucket())
    made.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    made.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="must belong to this user alone"):
        server_directory(bucket())


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().host_bytes = 1


def test_none_leaves_a_setting_at_its_default() -> None:
    assert config(host_bytes=None, strict=None) == config()


def test_the_digest_names_the_limits() -> None:
    same = config(host_bytes="1GiB")
    assert same.digest() == config(host_bytes=1 << 30, lease_s=5).digest()
    assert same.digest() != config(host_bytes="2GiB").digest()
    assert same.digest() != config(host_bytes="1GiB", disk_bytes="1GiB").digest()


def test_every_setting_is_documented_with_its_default() -> None:
    settings = {setting.name: setting for setting in Config.settings()}
    assert [*settings, "host_bytes_default", "is_guest"] == [field.name for field in dataclasses.fields(Config)]
    assert all(setting.help for setting in settings.values())
    assert settings["promotion_wait_ms"].default == settings["tail_tokens"].default == "auto"
    assert settings["strict"].default == "false"
    assert parse_size(settings["min_free_bytes"].default) == config().min_free_bytes


def test_a_default_disk_limit_is_a_share_of_what_is_free_and_what_it_holds(tmp_path: Path) -> None:
    here = Config.from_mapping({"storage_uri": f"file://{tmp_path}/not/yet/there"})
    assert here.resolved_disk_bytes(existing_bytes=1 << 60) - here.resolved_disk_bytes() > (1 << 60) // 11
    assert config(disk_bytes=7).resolved_disk_bytes(existing_bytes=1 << 60) == 7


def test_sizes_are_shown_as_people_write_them() -> None:
    shown = [size_text(n) for n in (0, 1023, 1024, 1536, 4 << 30, 3 << 39, 1 << 50)]
    assert shown == ["0 B", "1023 B", "1 KiB", "1.5 KiB", "4 GiB", "1.5 TiB", "1024 TiB"]


# -- the memory limit --------------------------------------------------------------------------------------------

MACHINE = memory_limit_bytes(Path("/nowhere"), Path("/nowhere"))


@pytest.mark.parametrize(
    ("files", "membership", "limit"),
    [
        ({}, "", MACHINE),
        ({"memory.max": "max"}, "0::/", MACHINE),
        ({"memory.max": "1048576\n"}, "0::/", 1 << 20),
        ({"memory.max": str(1 << 62)}, "0::/", MACHINE),
        ({"memory/memory.limit_in_bytes": "2097152"}, "3:memory:/", 2 << 20),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, "3:memory:/", MACHINE),
        ({"a/memory.max": "4194304", "a/b/memory.max": "max"}, "0::/a/b", 4 << 20),
        ({"a/memory.max": "4194304", "a/b/memory.max": "1048576"}, "0::/a/b", 1 << 20),
        ({"memory/x/memory.limit_in_bytes": "1048576"}, "3:cpu,memory:/x\n1:cpu:/y\n", 1 << 20),
        ({"memory.max": "1048576"}, "nonsense", 1 << 20),
        ({"memory.max": "damaged"}, "0::/../../etc", MACHINE),
    ],
)
def test_the_memory_limit_is_that_of_the_nearest_cgroup(
    tmp_path: Path, files: dict[str, str], membership: str, limit: int
) -> None:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "membership").write_text(membership)
    assert memory_limit_bytes(tmp_path / "cgroup", tmp_path / "membership") == limit


def test_the_default_of_host_memory_is_a_tenth_and_at_most_8_gib() -> None:
    assert 0 < config().resolved_host_bytes() <= min(memory_limit_bytes() // 10, 8 << 30)
    assert config(host_bytes="1GiB").resolved_host_bytes() == 1 << 30


def test_below_vllms_offloading_the_default_of_host_memory_is_small_and_holds_some_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tiered_kv.config.memory_limit_bytes", lambda: 1 << 38)
    assert config().resolved_host_bytes() == 8 << 30
    assert config().below_offloading().resolved_host_bytes() == 1 << 30
    assert config().below_offloading(32 << 20).resolved_host_bytes() == 2 << 30
    assert config().below_offloading(1 << 30).resolved_host_bytes() == 8 << 30, "more than the connector's"
    named = config(host_bytes="3GiB").below_offloading(1)
    assert named.resolved_host_bytes() == 3 << 30
    # A server takes the default of who starts it; who joins one names nothing.
    small = config().below_offloading()
    assert small.host_bytes is None and Config.from_mapping(small.to_mapping()).host_bytes == 1 << 30
    assert Config.from_mapping(config().to_mapping()) == config()
