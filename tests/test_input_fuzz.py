"""Settings, URIs and command lines of any content: a declared error that names what was wrong, or they are taken.

Nothing else may come out: no traceback, no secret, no file outside the directory that was named.
"""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.kit.counts import count, seed
from tests.kit.storage.stored_prompts import Model, tokens
from tests.kit.verbs import directory_tier
from tiered_kv.cli.app import VERBS
from tiered_kv.cli.exits import EXIT_FOUND, EXIT_LOCKED, EXIT_SETTINGS, EXIT_UNAVAILABLE, EXIT_UNCONFIRMED
from tiered_kv.cli.main import app
from tiered_kv.config import Config
from tiered_kv.errors import ConfigError
from tiered_kv.location import OBJECT_OPTIONS, parse_location, redact

EXAMPLES = count("INPUT_FUZZ", 200)
SECRET = "Tr0ub4dor"
"""Stands wherever a user may write a secret; no message may hold it."""

NAMES = [setting.name for setting in Config.settings()]
SCHEMES = ["file", "s3", "gs", "az", "memory", "shared+file", "http", "", "S3", "file:", "s3:/"]

texts = st.text(max_size=40) | st.sampled_from(
    ["", "1GiB", "-1", "1e999", "nan", "auto", "true", "/tmp/x", "../..", "\x00", "\n", "unix:///s", "7d", "9" * 5000]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary(max_size=8) | st.just(10**4000)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=5
)
PLACES = {"endpoint_url", "account_name"}
"""Options that name the place, as a bucket's name does: they are shown."""

options = st.dictionaries(
    st.sampled_from(sorted({name for known in OBJECT_OPTIONS.values() for name in known} - PLACES)) | texts,
    st.just(SECRET) | values,
    max_size=4,
) | st.dictionaries(st.sampled_from(sorted(PLACES)), values, max_size=2)
uris = st.builds(
    lambda scheme, mark, user, place, query, fragment: f"{scheme}{mark}{user}{place}{query}{fragment}",
    st.sampled_from(SCHEMES),
    st.sampled_from(["://", ":///", ":", ""]),
    st.sampled_from(["", f"key:{SECRET}@", f"{SECRET}@", f"key:{SECRET}@x@", f"k:/{SECRET}@"]),
    st.sampled_from(["bucket", "bucket/a/b", "/dir", "[", "[::1]", "a:9", "%00", "..", "é", "b\n", ""]) | texts,
    st.sampled_from(["", "?", f"?secret={SECRET}", f"?key=a&secret={SECRET}&key=b", f"?{SECRET}", f"?x={SECRET}"]),
    st.sampled_from(["", "#", f"#{SECRET}"]),
)


@settings(max_examples=EXAMPLES)
@given(
    st.dictionaries(st.sampled_from(NAMES) | texts, values | uris | options, max_size=6), uris | st.just("file:///d")
)
@example({"storage_options": {"secret": {SECRET: SECRET}}}, "s3://b")
@example({"storage_options": [SECRET]}, "s3://b")
@example({"storage_options": SECRET}, "s3://b")
@example({"storage_uri": {"account_key": SECRET}}, "s3://b")
def test_settings_are_taken_or_refused_by_name(given_: dict[str, Any], uri: str) -> None:
    given_.setdefault("storage_uri", uri)
    try:
        config = Config.from_mapping(given_)
    except ConfigError as exc:
        message = str(exc)
        assert "setting" in message or any(name in message for name in NAMES)
        assert len(message) < 20_000
        # A name may be a secret's only where somebody wrote it as the name of a setting.
        if SECRET not in str(list(given_)) and is_hidden(given_):
            assert SECRET not in message
        return
    assert Config.from_mapping(config.to_mapping()) == config
    json.dumps(config.to_mapping())
    if is_hidden(given_):
        assert SECRET not in repr(config) + str(config.describe()) + config.digest() + str(config.location())


def is_hidden(settings_: dict[str, Any]) -> bool:
    """Whether the secret stands only where one belongs: in options' values and in a URI's user, query or fragment."""
    uri, options_ = settings_.get("storage_uri"), settings_.get("storage_options")
    elsewhere = {k: v for k, v in settings_.items() if k not in ("storage_uri", "storage_options")}
    in_names = isinstance(options_, dict) and SECRET in str(list(options_))
    return SECRET not in str(elsewhere) and not in_names and (not isinstance(uri, str) or hides(uri))


def hides(uri: str) -> bool:
    """Whether the secret of a URI is where one may be written, and not a part of the path."""
    return SECRET not in redact(uri)


@settings(max_examples=EXAMPLES)
@example(f"file:key:{SECRET}@://", None)
@given(uris, st.none() | options)
def test_a_uri_is_a_place_or_an_error_without_the_secret(uri: str, given_: dict[str, Any] | None) -> None:
    shown = redact(uri)
    if "@" in uri and "///" not in uri and "://" in uri:
        assert f"{SECRET}@" not in shown
    if "?" in uri:
        assert SECRET not in shown.partition("?")[2]
    try:
        found = parse_location(uri, given_)
    except ConfigError as exc:
        if hides(uri) and not (given_ and SECRET in str(list(given_))):
            assert SECRET not in str(exc)
        return
    assert found.scheme in OBJECT_OPTIONS or found.kind == "disk"
    assert found.path
    if hides(uri):
        assert SECRET not in f"{found}{found!r}{found.storage}{found.identity}"


# -- the command line --------------------------------------------------------------------------------------------------

DOCUMENTED = {0, EXIT_UNAVAILABLE, EXIT_SETTINGS, EXIT_LOCKED, EXIT_FOUND, EXIT_UNCONFIRMED}
NEVER_ENDS = {"serve", "top"}
"""With good arguments these go on until they are stopped; a bucket that cannot be reached is good enough to serve."""

GOES_ON_S = 5.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a cache and a token file, and others beside it that nothing may touch."""
    root = tmp_path_factory.mktemp("fuzz")
    tier = directory_tier(root / "kv")
    with tier.open() as storage:
        Model().store(storage, tokens(1, 3), tokens(2, 2))
    (root / "beside").mkdir()
    (root / "beside" / "file").write_text("mine")
    (root / "tokens.json").write_text(json.dumps(tokens(1, 3)))
    return root


def drawn_words(source: random.Random, place: Path) -> list[str]:
    """Arguments: those of the verb that click knows, with values that may or may not fit."""
    verb = source.choice(sorted(VERBS))
    group = typer.main.get_command(app)
    with typer.Context(group) as context:
        command = group.get_command(context, verb)
    key = Model().keys(tokens(1, 3)).keys[1].hex()
    uri = f"file://{place / 'kv'}"
    pool = [
        *(
            uri,
            uri,
            uri,
            key,
            key[:6],
            "zz",
            "",
            "-",
            "--",
            "0",
            "-1",
            "1e999",
            "nan",
            "1GiB",
            "7d",
            "\u202e",
            "x" * 5000,
        ),
        *(f"file://{place}/none", "s3://", "s3://k:s@b", "memory://m", "file://", "file:///dev/null", "[", "*", "%s"),
        *("disk_bytes=1GiB", "a=b", "=", "storage_options={}", "storage_options=[", 'strict="x"', "host_bytes=[[[["),
        *(f"{place}/tokens.json", "/dev/null", "/proc/self/mem", "1,2,3", "unix:///none", "host", "disk", "65536"),
    ]
    if verb in NEVER_ENDS:  # mostly bad ones: each good one takes GOES_ON_S
        pool = [word for word in pool if word not in (uri, f"file://{place}/none")]
    words = [verb]
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            if source.random() < 0.9:
                words.append(uri if verb not in NEVER_ENDS and source.random() < 0.6 else source.choice(pool))
        elif source.random() < 2 / max(4, len(command.params)) and parameter.name != "help":
            words.append(source.choice(parameter.opts))
            if not getattr(parameter, "is_flag", False):
                words.append(source.choice(pool))
    if source.random() < 0.1:
        words.insert(source.randrange(1, len(words) + 1), source.choice(["--nothing", *pool]))
    return words


def beside(place: Path) -> dict[str, bytes]:
    """Everything that is not the cache's."""
    return {str(p): p.read_bytes() for p in place.rglob("*") if p.is_file() and not p.is_relative_to(place / "kv")}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, for what is written by a relative name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.timeout(3600)
def test_any_command_line_ends_with_a_documented_code(place: Path, elsewhere: Path) -> None:
    source = random.Random(seed())
    before, codes = beside(place), set()
    for _ in range(count("CLI_FUZZ", 100)):
        words = drawn_words(source, place)
        if "--yes" in words or "-y" in words or words[0] in ("cp", "warm", "export", "doctor"):
            words = [word for word in words if word not in ("--repair",)]
        typed = source.choice(["", "y\n", "[1,2", "\x00"])
        code, output = run_apart(words, typed) if words[0] in NEVER_ENDS else run_here(words, typed)
        codes.add(code)
        assert code in DOCUMENTED, (words, code, output)
        assert "Traceback" not in output, words
        assert not beside_changed(before, place), words
    assert {0, EXIT_SETTINGS} <= codes


def run_here(words: list[str], typed: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, words, input=typed)
    assert done.exception is None or isinstance(done.exception, SystemExit), (words, done.exception)
    return done.exit_code, done.output


def run_apart(words: list[str], typed: str) -> tuple[int, str]:
    """The same in a process that is killed where it goes on, which is no fault."""
    command = (sys.executable, "-m", "tiered_kv.cli", *words)
    try:
        done = subprocess.run(
            command, input=typed, capture_output=True, text=True, errors="replace", timeout=GOES_ON_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 0, ""
    return done.returncode, done.stdout + done.stderr


def beside_changed(before: dict[str, bytes], place: Path) -> set[str]:
    """What was changed or removed that is not the cache's; what a verb was told to make by its full name is new."""
    after = beside(place)
    return {name for name, data in before.items() if after.get(name) != data}
