"""The files in deploy/: valid, of one mind, and what they start is started here and serves an engine."""

import configparser
import json
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.kit.module_process import module_command, module_environment
from tests.kit.s3 import S3
from tests.kit.server.clients import CHUNK
from tests.kit.server.object_nodes import wait_uploaded
from tests.kit.server.processes import start_serve
from tiered_kv.config import Config
from tiered_kv.server.http import ASK_S

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
OLDEST, NEWEST = "1.29", "1.37"
PLACES = {"uri": r"s3://my-bucket/kv\?region=eu-central-1", "kv": "/var/cache/tiered_kv", "run": "/run/tiered_kv"}
HIDE = 'while [ "$1" != -- ]; do mount -t tmpfs none "$1" || exit 1; shift; done; shift; exec "$@"'
SIZE = re.compile(r"(--(?:host|disk)-bytes)=\d+GiB")


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def pods(path: Path) -> list[dict[str, Any]]:
    return [document["spec"]["template"]["spec"] for document in documents(path) if "template" in document["spec"]]


def containers(path: Path) -> dict[str, dict[str, Any]]:
    """All containers of a manifest by name; no two have the same."""
    found = [one for pod in pods(path) for one in (*pod.get("initContainers", ()), *pod["containers"])]
    assert len({one["name"] for one in found}) == len(found)
    return {one["name"]: one for one in found}


def words(container: dict[str, Any]) -> list[str]:
    return [*container["command"], *container["args"]]


def extra_config(container: dict[str, Any]) -> dict[str, Any]:
    """The connector's settings that an engine's container is given."""
    given = words(container)
    transfer = json.loads(given[given.index("--kv-transfer-config") + 1])
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("TieredKVConnector", "kv_both")
    settings = transfer["kv_connector_extra_config"]
    assert isinstance(settings, dict)
    return settings


def size(text: str) -> int:
    """Bytes, as our own settings are read."""
    config = Config.from_mapping({"storage_uri": "file:///none", "host_bytes": text})
    assert config.host_bytes is not None
    return config.host_bytes


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_are_valid(path: Path, version: str) -> None:
    found = documents(path)
    for document in found:
        kubernetes_validate.validate(document, version, strict=True)
    assert len(found) == 2


def test_the_validation_finds_what_is_wrong() -> None:
    document = documents(MANIFESTS[0])[0]
    document["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, NEWEST, strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_server_and_engine_are_of_one_mind(path: Path) -> None:
    found = containers(path)
    cache, engine = words(found["cache"]), extra_config(found["vllm"])
    options = dict(word.removeprefix("--").split("=", 1) for word in cache if word.startswith("--"))
    assert engine["storage_uri"] == cache[2]
    assert f"--set=disk_path={engine['disk_path']}" in cache
    assert engine["server"] == f"unix://{options['socket']}"
    for pod in pods(path):
        if any(one["name"] == "cache" for one in (*pod.get("initContainers", ()), *pod["containers"])):
            assert pod["terminationGracePeriodSeconds"] > float(options["drain-s"])
    users = {
        {**pod.get("securityContext", {}), **one.get("securityContext", {})}.get("runAsUser")
        for pod in pods(path)
        for one in (*pod.get("initContainers", ()), *pod["containers"])
        if one["name"] in ("cache", "vllm")
    }
    assert users == {1000}, "the server asks the kernel who connects"
    limit = found["cache"]["resources"]["limits"]["memory"]
    assert size(f"{limit}B") > size(options["host-bytes"]) + (2 << 30)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        if probe in found["cache"]:
            assert found["cache"][probe]["timeoutSeconds"] > ASK_S
    mounts = {one: {mount["mountPath"] for mount in found[one]["volumeMounts"]} for one in ("cache", "vllm")}
    assert str(Path(options["socket"]).parents[0]).startswith(PLACES["run"])
    assert {PLACES["run"], PLACES["kv"]} <= mounts["cache"] & mounts["vllm"]


def started_here(command: list[str], environment: dict[str, str]) -> tuple[subprocess.Popen[str], str]:
    """`tiered-kv` with these words; the process and the line it prints when engines can join."""
    assert (Path(command[0]).name, command[1]) == ("tiered-kv", "serve")
    process, line = start_serve(*command[2:], environment=environment)
    assert line.startswith("serving "), process.communicate()[1]
    return process, line


def end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert all(json.loads(line)["level"] in ("info", "warning") for line in errors.splitlines())


def is_ready(line: str) -> bool:
    url = line.rstrip("\n").partition(" metrics=")[2].replace("/metrics", "/readyz")
    with urllib.request.urlopen(url, timeout=30) as answer:
        return bool(answer.status == 200)


def serve_an_engine(settings: dict[str, Any], kv: Path, unseen: Iterable[Path] = ()) -> None:
    """An engine joins by the socket, stores, and hits what it stored.

    Args:
        unseen: Directories that its container has not.
    """
    given = json.dumps(settings | {"chunk_tokens": CHUNK})
    hidden = ("unshare", "--mount", "sh", "-c", HIDE, "sh", *map(str, unseen), "--") if unseen else ()
    command = [*hidden, *module_command("tests.deploy.joining", given)]
    done = subprocess.run(command, capture_output=True, text=True, env=module_environment(), check=False)
    assert (done.returncode, done.stdout) == (0, "6 hits\n"), done.stderr
    wait_uploaded(kv)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifests_server_serves_its_engine(path: Path, s3: S3, tmp_path: Path, run_directory: Path) -> None:
    """Its own words, but for the bucket, directories, sizes and the port."""
    prefix, options = s3.new_prefix(), s3.options()
    uri = f"{s3.uri(prefix)}?endpoint_url={s3.endpoint_url}"
    (run_directory / "own").mkdir(mode=0o700)

    def here(text: str) -> str:
        text = re.sub(PLACES["uri"], lambda _: uri, text)
        text = text.replace(PLACES["kv"], str(tmp_path)).replace(PLACES["run"], str(run_directory))
        text = SIZE.sub(lambda match: f"{match[1]}={'64MiB' if 'host' in match[1] else '256MiB'}", text)
        return text.replace("--metrics-port=9477", "--metrics-port=0").replace("0.0.0.0", "127.0.0.1")

    found = containers(path)
    environment = {"AWS_ACCESS_KEY_ID": options["key"], "AWS_SECRET_ACCESS_KEY": options["secret"]}
    process, line = started_here([here(word) for word in words(found["cache"])], environment)
    try:
        assert is_ready(line)
        settings = json.loads(here(json.dumps(extra_config(found["vllm"]))))
        volumes = {one: {mount["mountPath"] for mount in found[one]["volumeMounts"]} for one in ("cache", "vllm")}
        unseen = volumes["cache"] - volumes["vllm"] - {"/tmp"}  # each has its own
        serve_an_engine(settings, tmp_path / "kv", [Path(here(path)) for path in sorted(unseen)])
    finally:
        end(process)
    assert len([one for one in s3.paths(prefix) if one.endswith(".safetensors")]) >= 6


def test_the_units_server_serves_an_engine(tmp_path: Path, run_directory: Path) -> None:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # the documented way to keep their case
    unit.read(DEPLOY / "systemd" / "tiered-kv.service")
    service = unit["Service"]
    drain_s = float(re.search(r"--drain-s=(\d+)", service["ExecStart"])[1])  # type: ignore[index]
    assert float(service["TimeoutStopSec"]) > drain_s
    text = service["ExecStart"].replace(PLACES["kv"], str(tmp_path)).replace(PLACES["run"], str(run_directory))
    text = SIZE.sub(lambda match: f"{match[1]}={'64MiB' if 'host' in match[1] else '256MiB'}", text)
    process, line = started_here(shlex.split(text.replace("--metrics-port=9477", "--metrics-port=0")), {})
    try:
        assert is_ready(line)
        settings = {"storage_uri": f"file://{tmp_path}/kv", "server": f"unix://{run_directory}/cache.sock"}
        serve_an_engine(settings, tmp_path / "kv")
    finally:
        end(process)


def test_the_image_passes_its_linter() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [str(hadolint), "--failure-threshold", "style", str(DEPLOY / "Dockerfile")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    bad = subprocess.run(
        [str(hadolint), "-"],
        input="FROM x:latest\nRUN sudo pip install y\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert bad.returncode == 1 and "DL3004" in bad.stdout, "the linter finds what is wrong"
