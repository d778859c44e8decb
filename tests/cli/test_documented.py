"""Every command of ours that the documents show does what it says: run here, on a directory and on a bucket.

In place of what stands in a page: /var/cache/tiered_kv, /mnt/... and s3://my-bucket/kv are filled with two models and
a few prompts; keys and namespaces are ones that are there; files and the model named are in the current directory; a
socket is that of a running server.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.kit.samples.model_configs import KNOWN
from tests.kit.server.clients import SmallEngine, settings
from tests.kit.server.probe import socket_of
from tests.kit.storage.stored_prompts import CHUNK, Model, tokens
from tiered_kv.ops.open import open_storage

PAGE = Path(__file__).parent.parent.parent / "docs" / "command-line.md"
DIRECTORY, BUCKET, SOCKET = "/var/cache/tiered_kv", "s3://my-bucket/kv", "unix:///run/tiered_kv/cache.sock"
DIGITS = re.compile(r"(?<![0-9a-z/.:_-])[0-9a-f]{4,32}(?![0-9a-z/.:_-])")
NUMBERS = ("--tokens", "--prompts", "--max-model-len", "--chunk-tokens", "--tp")
"""Options whose numbers are numbers, and not the beginning of a key."""

MODEL = "Llama-3.1-8B"
ENDLESS = ("serve", "top")
TOOL = "python -m tools.kv_size"


GUIDES = ("operations", "sizing", "quickstart-gpu", "migration", "troubleshooting")
"""Pages beside command-line.md whose commands are run, too."""


def commands(text: str) -> list[str]:
    found = []
    for block in re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL):
        lines = textwrap.dedent(re.sub(r"\\\n\s*", " ", block)).splitlines()
        found += [line.removeprefix("$ ") for line in lines if line.startswith(("$ tiered-kv ", f"$ {TOOL} "))]
    return found


COMMANDS = commands(PAGE.read_text())
OF_GUIDES = [c for name in GUIDES for c in commands(PAGE.with_name(f"{name}.md").read_text())]


def test_every_verb_has_an_example_and_a_section() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "tiered_kv.cli", "--help"], capture_output=True, text=True, check=True
    )
    verbs = re.findall(r"^\s*│?\s+([a-z]+)\s{2,}", shown.stdout[shown.stdout.index("ommands") :], flags=re.MULTILINE)
    assert {"ls", "verify", "evict", "explain", "doctor"} <= set(verbs)
    assert set(verbs) <= {command.split()[1] for command in COMMANDS}
    sections = re.findall(r"^## (\w+)", PAGE.read_text(), flags=re.MULTILINE)
    assert set(verbs) - {"unpin"} <= set(sections)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The current directory of the command: a stocked cache directory, a prompt and a configuration in it."""
    (tmp_path / "cache").mkdir()
    stock(f"file://{tmp_path}/cache", {})
    (tmp_path / "prompt.json").write_text(json.dumps(tokens(1, 3) + tokens(9, 1)))
    config = {
        "kv_connector": "TieredKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"storage_uri": f"file://{tmp_path}/cache", "host_bytes": "64MiB"},
    }
    (tmp_path / "vllm.json").write_text(json.dumps(config))
    (tmp_path / MODEL).mkdir()
    (tmp_path / MODEL / "config.json").write_text(json.dumps(KNOWN[MODEL]))
    return tmp_path


def stock(uri: str, more: dict[str, object]) -> None:
    with open_storage(uri, more) as storage:
        prompt = tokens(1, 6)
        Model().store(storage, prompt, prompt[: 3 * CHUNK] + tokens(2, 4))
        Model(weights="hf:fedcba9876543210fedcba9876543210fedcba98").store(storage, tokens(1, 2), tag="tenant-a")


@pytest.mark.parametrize("command", dict.fromkeys([*COMMANDS, *OF_GUIDES]))
def test_a_command_of_the_page_runs(command: str, place: Path, request: pytest.FixtureRequest) -> None:
    environment = os.environ | {"COLUMNS": "200", "PYTHONPATH": str(PAGE.parent.parent)}
    text = command.replace(DIRECTORY, f"{place}/cache").replace("/mnt/", f"{place}/mnt-")
    if BUCKET in text:
        s3 = request.getfixturevalue("s3")
        uri = f"{s3.uri(s3.new_prefix())}?endpoint_url={s3.endpoint_url}"
        environment = s3.on.credentials.environment(environment)
        stock(uri.partition("?")[0], {"storage_options": s3.options()})
        text = text.replace(BUCKET, shlex.quote(uri))
    needs_server = SOCKET in text or command.split()[1] == "top"
    engine = SmallEngine.start(settings(place / "cache")) if needs_server else None
    try:
        if engine is not None:
            text = text.replace(SOCKET, socket_of(place / "cache"))
        run(with_real_names(text), place, environment)
    finally:
        if engine is not None:
            engine.close()


def with_real_names(text: str) -> list[str]:
    """Digits of keys and namespaces as they are in the stocked storage."""
    model = Model()
    name = model.names(tokens(1, 6))[4]
    words = shlex.split(text, comments=True)
    for number, word in enumerate(words):
        if DIGITS.fullmatch(word) and words[number - 1] not in NUMBERS:
            is_namespace = words[number - 1] in ("--namespace", "-n")
            words[number] = (model.namespace.digest if is_namespace else name.key).hex()
    return words


def run(words: list[str], place: Path, environment: dict[str, str]) -> None:
    module = ["tools.kv_size", *words[3:]] if words[0] == "python" else ["tiered_kv.cli", *words[1:]]
    arguments = [sys.executable, "-m", *module]
    if words[1] in ENDLESS and "--once" not in words and "--count" not in words:
        process = subprocess.Popen(
            arguments, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline(), process.communicate(timeout=60)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode in (0, 130), errors
        return
    done = subprocess.run(
        arguments, cwd=place, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, (words, done.returncode, done.stdout, done.stderr)
    assert done.stdout and "Traceback" not in done.stderr
    if "--json" in words and words[1] != "top":
        json.loads(done.stdout)
