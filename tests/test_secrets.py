"""Planted secrets in a whole scene: nobody writes them down, in logs, figures, records, files, or a bucket's objects.

Token ids of ten digits that nothing else has, and the credentials of a real S3 server. Everything that the scene leaves
or says is searched, as text and as the bytes that numbers have; the same search finds what is planted on purpose.
"""

import json
import logging
import os
import struct
import subprocess
import sys
import urllib.request
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.kit.s3 import S3
from tests.kit.server.clients import BLOCK, CHUNK, SmallEngine, settings
from tests.kit.server.probe import figures, wait_ended, wait_for, wait_written
from tests.kit.server.processes import private_runtime
from tiered_kv.cli.main import app
from tiered_kv.config import Config
from tiered_kv.server.directory import server_directory

FIRST_TOKEN = 1_970_000_011
CHUNKS = 4
TOKENS = range(FIRST_TOKEN, FIRST_TOKEN + CHUNKS * CHUNK)
SESSION_TOKEN = "planted-session-token-4711"
WRONG_SECRET = "planted-wrong-secret-4711"


@dataclass
class Scene:
    """Everything that was said or written, by where."""

    said: dict[str, bytes] = field(default_factory=dict)

    def take_files(self, name: str, directory: Path) -> None:
        for path in directory.rglob("*"):
            if path.is_file():
                self.said[f"{name}/{path.relative_to(directory)}"] = path.read_bytes()
            self.said[f"{name}: name of {path.relative_to(directory)}"] = os.fsencode(path)

    def places_of(self, *needles: bytes) -> list[str]:
        """Where any of these stands."""
        return [place for place, data in self.said.items() if any(needle in data for needle in needles)]


def forms_of(token: int, following: int) -> list[bytes]:
    """How two token ids could stand in a file; one alone has too few bytes to be looked for in megabytes."""
    pairs = [struct.pack(form, token, following) for form in ("<II", ">II", "<QQ", ">QQ")]
    return [str(token).encode(), f"{token:x}".encode(), *pairs]


def secret_forms(s3: S3) -> dict[str, bytes]:
    return {
        "access key": s3.access_key.encode(),
        "secret key": s3.secret_key.encode(),
        "session token": SESSION_TOKEN.encode(),
        "wrong secret": WRONG_SECRET.encode(),
    }


@pytest.fixture(scope="module")
def scene(s3: S3, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A server with a disk and a bucket, engines on it, every verb, and a server that the store refuses."""
    work = tmp_path_factory.mktemp("secrets")
    prefix = s3.new_prefix()
    kept = Scene()
    with pytest.MonkeyPatch.context() as patch, private_runtime() as runtime:
        patch.setenv("XDG_STATE_HOME", str(work / "state"))
        patch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(logging.Formatter().format(record))  # type: ignore[method-assign]
        logger = logging.getLogger("tiered_kv")
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        try:
            _serve(kept, s3, work, prefix)
            _embedded(kept, s3, work, prefix)
            _refused(kept, s3, work)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
        kept.said["logs of this process"] = "\n".join(records).encode()
        kept.take_files("runtime", runtime)
    kept.take_files("work", work)
    with s3.client() as client:
        for path in s3.paths(prefix):
            body = client.get_object(Bucket=s3.bucket, Key=f"{prefix}/{path}")["Body"].read()
            kept.said[f"bucket/{path}"] = path.encode() + b" " + body
    return kept


def _cli(kept: Scene, *words: str, given: str | None = None) -> None:
    done = CliRunner().invoke(app, words, input=given)
    assert done.exit_code in (0, 4), (words, done.output)
    kept.said[f"tiered-kv {' '.join(words)[:60]} #{len(kept.said)}"] = done.output.encode()


def _serve(kept: Scene, s3: S3, work: Path, prefix: str) -> None:
    """An operator's server at the level of debug, its verbs and its metrics; credentials from the environment."""
    uri = f"{s3.uri(prefix)}?endpoint_url={s3.endpoint_url}"
    command = ["serve", uri, "--host-bytes", "8MiB", "--disk-bytes", "160MiB", "--set", f"disk_path={work}/disk"]
    command += ["--set", "storage_timeout_s=60", "--set", "drain_s=20", "--metrics-port", "0", "--log-level", "debug"]
    with (work / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tiered_kv.cli", *command],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        kept.said["serve"] = line.encode()
        with closing(SmallEngine.start(_config(s3, work / "disk", prefix), "e")) as one:
            one.store(CHUNKS, FIRST_TOKEN)
            one.wait_hits(CHUNKS, FIRST_TOKEN)
            one.client.pin(one.keys(CHUNKS, FIRST_TOKEN).keys[-1], 600.0)
            wait_written(work / "disk")
            wait_for(lambda: any(".safetensors" in path for path in s3.paths(prefix)), "an upload")
            key = one.keys(CHUNKS, FIRST_TOKEN).keys[1].hex()
            metrics = line.partition("metrics=")[2].split()[0]
            with urllib.request.urlopen(metrics, timeout=60) as answer:
                kept.said["metrics"] = answer.read()
            kept.said["figures"] = json.dumps(figures(work / "disk")).encode()
            _verbs(kept, f"file://{work}/disk", uri, key)
    finally:
        process.terminate()
        kept.said["serve's end"] = process.communicate(timeout=60)[0].encode()


def _config(s3: S3, disk: Path, prefix: str) -> Config:
    return settings(
        disk,
        storage_uri=s3.uri(prefix),
        storage_options=s3.options(),
        storage_timeout_s=60,
        disk_path=str(disk),
    )


def _verbs(kept: Scene, disk: str, bucket: str, key: str) -> None:
    tokens, patient = json.dumps(list(TOKENS)), ("--set", "storage_timeout_s=60")
    for uri, more in ((disk, ()), (bucket, patient)):
        for verb in ("ls", "du", "tree", "stat", "verify"):
            _cli(kept, verb, uri, *more)
        for verb in ("ls", "stat"):
            _cli(kept, verb, uri, "--json", *more)
        _cli(kept, "inspect", uri, key, *more)
        _cli(kept, "explain", uri, "--tokens", "-", *more, given=tokens)
        _cli(kept, "explain", uri, "--tokens", "-", "--json", *more, given=tokens)
    _cli(kept, "doctor", bucket, *patient)
    _cli(kept, "top", disk, "--once")


def _embedded(kept: Scene, s3: S3, work: Path, prefix: str) -> None:
    """A server that an engine starts; credentials from the settings."""
    config = _config(s3, work / "embedded", prefix)
    with closing(SmallEngine.start(config, "e")) as one:
        one.store(CHUNKS, FIRST_TOKEN)
        one.wait_hits(CHUNKS, FIRST_TOKEN)
        one.client.reset()
    kept.said["describe"] = f"{config!r} {config.describe()} {config.digest()} {config.location()!r}".encode()
    wait_ended(work / "embedded")


def _refused(kept: Scene, s3: S3, work: Path) -> None:
    """What is said where the store refuses: messages of the client library quote what they were given."""
    options = s3.options() | {"secret": WRONG_SECRET, "token": SESSION_TOKEN}
    config = settings(
        work / "refused",
        storage_uri=f"{s3.uri(s3.new_prefix())}?token={SESSION_TOKEN}",
        storage_options=options,
        disk_path=str(work / "refused"),
        drain_s=0.0,
    )
    with closing(SmallEngine.start(config, "e")) as one:
        one.store(1, FIRST_TOKEN)
        one.wait_hits(1, FIRST_TOKEN)
        kept.said["figures of the refused"] = json.dumps(figures(server_directory(config))).encode()
    wait_ended(work / "refused")


@pytest.mark.timeout(600)
def test_no_token_id_is_written_or_said(scene: Scene) -> None:
    for token in TOKENS[:: BLOCK // 2]:
        assert scene.places_of(*forms_of(token, token + 1)) == []


@pytest.mark.timeout(600)
def test_no_credential_is_written_or_said(scene: Scene, s3: S3) -> None:
    for name, secret in secret_forms(s3).items():
        assert scene.places_of(secret) == [], name


@pytest.mark.timeout(600)
def test_the_scene_is_whole_and_the_search_finds_what_is_planted(scene: Scene, s3: S3, tmp_path: Path) -> None:
    places = "\n".join(scene.said)
    for kind in ("namespace.json", "server.log", "serve.log", "epochs.json", "pins.json", "cache.db", ".safetensors"):
        assert kind in places
    assert "bucket/_tiered_kv/" in places and "metrics" in places and "explain" in places
    assert b"INFO tiered_kv." in scene.said["work/serve.log"]
    assert scene.places_of(b"self-test failed"), "the store refused nobody"
    planted = Scene()
    options = s3.options() | {"token": SESSION_TOKEN}
    config = settings(tmp_path, storage_uri=s3.uri("p"), storage_options=options, disk_path=str(tmp_path))
    given: dict[str, Any] = config.to_mapping()  # what goes through the pipe, and nowhere else
    planted.said["pipe"] = json.dumps(given).encode() + WRONG_SECRET.encode()
    planted.said["text"] = f"tokens={list(TOKENS[:3])}".encode()
    planted.said["packed"] = struct.pack(f"<{len(TOKENS)}I", *TOKENS)
    for name, secret in secret_forms(s3).items():
        assert planted.places_of(secret) == ["pipe"], name
    assert planted.places_of(*forms_of(TOKENS[0], TOKENS[1])) == ["text", "packed"]
