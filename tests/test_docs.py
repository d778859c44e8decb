"""What the documents show is true: every command is run here or by CI, every setting is one that exists."""

import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

from tiered_kv.chunks.device_copy import CopyEngine
from tiered_kv.config import Config
from tiered_kv.fleet import layout
from tiered_kv.fleet.layout import PINS, pin_path
from tiered_kv.keys.naming import BlobName, object_path
from tiered_kv.ops.doctor_config import CONNECTOR, check_settings, read_text
from tiered_kv.ops.findings import has_error
from tools.gpu_e2e.modes import CUDA, MODES
from tools.gpu_proof import runner as gpu_proof
from tools.gpu_proof.devices import DryDevice

BY_CI = {"make demo", "make test"}
"""Commands that .ci/run runs on a fresh clone."""

SKIP_LOAD = "tiered_kv.skip_load"

NOT_HERE = {
    "pip install '.[vllm]'": "several GB; tests/deploy/test_package.py installs the wheel",
    "vllm serve MODEL": "needs a model of the user's; its configuration is checked by a test of its own",
    "make serve": "tests/e2e/test_served.py runs its recipe",
    "curl -s http://127.0.0.1:8000/metrics": "tests/e2e/test_served.py scrapes it",
    "make gpu-proof": "needs a GPU; tests/tools/test_gpu_proof.py runs it up to its sentence, and dry",
    "make gpu-e2e": "needs a GPU; tests/tools/test_gpu_e2e.py runs the CPU's mode",
    "docker compose up --wait": "needs a Docker engine; scripts/s3_service.py runs it where there is one",
    "(umask 077; openssl rand -hex 32 >": "tests/tiers/test_peers.py reads a key of that form",
    "scripts/s3-server start": "run by tests/test_s3_server.py",
}


NOT_RUN = re.compile(r"<!-- not run here: (.*?) -->\n```console\n.*?```", flags=re.DOTALL)
"""A block of commands that is shown and not run, with the reason in the page."""

GUIDES = ("quickstart-gpu", "migration")


def documents(repository: Path) -> list[Path]:
    return [repository / "README.md", *sorted((repository / "docs").rglob("*.md"))]


def commands(text: str) -> list[str]:
    """Commands of ``console`` blocks, continuation lines joined, comments dropped; without blocks that say why not."""
    found, text = [], NOT_RUN.sub("", text)
    for block in re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL):
        shown = re.split(r"^\$ ", textwrap.dedent(block), flags=re.MULTILINE)[1:]
        found += [c.strip() if "'" in c else " ".join(shlex.split(c, comments=True)) for c in shown]
    return found


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_command_shown_is_run_somewhere(repository: Path) -> None:
    shown = [command for document in documents(repository) for command in commands(document.read_text())]
    unknown = [
        command
        for command in shown
        if command not in BY_CI
        and not command.startswith(("tiered-kv ", "python -m tools.kv_size "))
        and not any(command.startswith(prefix) for prefix in NOT_HERE)
    ]

    assert "make demo" in shown
    assert unknown == []


def test_what_is_not_run_says_why(repository: Path) -> None:
    for document in documents(repository):
        text = document.read_text()
        reasons = NOT_RUN.findall(text)
        assert len(reasons) == text.count("not run here:"), f"a comment stands before no block in {document.name}"
        assert all(len(reason.split()) > 3 for reason in reasons), document.name
        hidden = "".join(found[0] for found in NOT_RUN.finditer(text))
        assert "$ tiered-kv " not in hidden, f"this can be run: {document.name}"


def test_configurations_of_the_guides_would_work(repository: Path) -> None:
    for name in GUIDES:
        text = (repository / "docs" / f"{name}.md").read_text()
        shown = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
        shown += re.findall(r"--kv-transfer-config '(\{.*?\})'\n```", text, flags=re.DOTALL)
        ours = [block for block in shown if json.loads(block)["kv_connector"] == CONNECTOR]
        assert ours, name
        for block in ours:
            given = read_text(block)
            assert given.settings is not None
            config, findings = check_settings(given.settings)
            assert config is not None and not has_error([*given.findings, *findings]), (name, findings)


def test_settings_of_the_guides_exist(repository: Path) -> None:
    """The second column of the tables of docs/migration.md is ours."""
    text = (repository / "docs" / "migration.md").read_text()
    known = {one.name for one in Config.settings()} | {"endpoint_url", "region", "verify", "key", "secret", "token"}
    known |= {
        "storage_options",
        "kv_connector_extra_config",
        "kv_role",
        "kv_producer",
        "kv_consumer",
        "multi-queue",
        "lru",
    }
    known |= {
        "file:///dir",
        "s3://bucket/prefix",
        "shared+file:///dir",
        "mooncake://host:port/name",
        "stat",
        "top",
        "serve --metrics-port",
    }
    known |= {"--kv-events-config", SKIP_LOAD}
    tables = text[: text.index("## What names the stored KV")]
    cells = re.findall(r"^\| [^|]* \| ([^|]*) \| [^|]*\|$", tables, flags=re.MULTILINE)
    named = {word for cell in cells for word in re.findall(r"`([^`]+)`", cell)}
    assert len(named) > 15
    assert named - known == set()


def test_metrics_of_the_quickstart_exist(repository: Path) -> None:
    listed = (repository / "docs" / "metrics.md").read_text()
    for name in GUIDES:
        text = (repository / "docs" / f"{name}.md").read_text()
        for metric in re.findall(r"`(vllm:\w+)`", text):
            assert f"`{metric}" in listed, metric


def test_the_gpu_quickstart_expects_what_the_proof_shows(repository: Path) -> None:
    """Its sections, their verdicts, the engine's memory, and log lines that are really logged."""
    text = (repository / "docs" / "quickstart-gpu.md").read_text()
    expected = dict(re.findall(r"^\| `(\w+)` \| (right|measured) \|", text, flags=re.MULTILINE))
    assert list(expected) == [section.name for section in gpu_proof.SECTIONS]
    for name, verdict in expected.items():
        source = (repository / "tools" / "gpu_proof" / "sections" / f"{name}.py").read_text()
        assert ("proof.check(" in source) == (verdict == "right"), name
    memory = CopyEngine(DryDevice()).memory_bytes / 2**20
    assert f"copies use {memory:.0f} MiB of memory" in text and f"| {memory:.0f} MiB per rank |" in text
    table = text[text.index("With KV on a GPU also, per rank") : text.index("And `server.log`")]
    lines = [re.split(r" \d", line)[0] for line in re.findall(r"^\| `([^`]+)`", table, flags=re.MULTILINE)]
    logged = "".join(path.read_text() for path in (repository / "tiered_kv").rglob("*.py"))
    assert len(lines) >= 3 and [line for line in lines if line not in logged] == []


def test_the_modes_of_the_gpu_quickstart_exist(repository: Path) -> None:
    text = (repository / "docs" / "quickstart-gpu.md").read_text()
    (shown,) = re.findall(r'MODES="([^"]+)"', text)
    assert set(shown.split()) <= {mode.name for mode in MODES if mode.device == CUDA}
    (sections,) = re.findall(r'SECTIONS="([^"]+)"', text)
    assert set(sections.split()) <= {section.name for section in gpu_proof.SECTIONS}


def test_ci_runs_what_the_readme_promises(repository: Path) -> None:
    text = (repository / ".ci" / "run").read_text()

    for command in BY_CI:
        assert re.search(rf"\b{command.removeprefix('make ')}\b", text), command


def test_tiered_kv_commands_of_the_readme_run(repository: Path) -> None:
    shown = [c for c in commands((repository / "README.md").read_text()) if c.startswith("tiered-kv ")]
    assert shown
    for command in shown:
        arguments = shlex.split(command, comments=True)[1:]
        done = subprocess.run(
            [Path(sys.executable).with_name("tiered-kv"), *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stderr)


def test_configuration_shown_is_valid(repository: Path) -> None:
    text = (repository / "README.md").read_text()
    (transfer,) = re.findall(r"--kv-transfer-config '(\{.*?\})'\n```", text, flags=re.DOTALL)
    settings = json.loads(transfer)

    assert settings["kv_connector"] == "TieredKVConnector"
    assert Config.from_mapping(settings["kv_connector_extra_config"]).host_bytes == 8 << 30


def test_bucket_shown_is_valid_with_the_disk_in_front_of_it(repository: Path) -> None:
    (block,) = re.findall(r"```json\n(.*?)```", (repository / "README.md").read_text(), flags=re.DOTALL)
    config = Config.from_mapping(json.loads(block))

    assert str(config.location()) == "s3://my-bucket/kv"
    assert config.disk_root() == Path("/var/cache/tiered_kv")
    assert (config.storage_bytes, config.storage_ttl, config.warnings()) == (2 << 40, 7 * 86400, [])


def test_status_table_names_tests_that_exist(repository: Path) -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", (repository / "docs" / "status.md").read_text())

    assert named
    assert [path for path in named if not (repository / path).exists()] == []


def test_the_readme_is_for_a_first_look(repository: Path) -> None:
    """What takes longer to read has a page of its own."""
    text = (repository / "README.md").read_text()
    assert len(text.splitlines()) <= 120


def test_links_lead_to_headings(repository: Path) -> None:
    pages = [*documents(repository), *(repository / name for name in ("CHANGELOG.md", "tests/README.md"))]
    for document in pages:
        for link in re.findall(r"\]\(([^):]*)\)", document.read_text()):
            path, _, anchor = link.partition("#")
            target = document.parent / path if path else document
            assert target.exists(), (document, link)
            assert not anchor or anchor in anchors(target.read_text()), (document, link)


def test_bucket_paths_of_the_format_page_are_those_of_the_code(repository: Path) -> None:
    page = (repository / "docs" / "format.md").read_text()
    rows = dict(re.findall(r"^\| `(_tiered_kv/[^`]+)` \| (.*) \|$", page, flags=re.MULTILINE))
    key, parent = bytes(range(16)), bytes(range(16, 32))
    path = object_path(BlobName(bytes(16), key, parent, 5))

    assert path == f"{bytes(16).hex()}/00/{key.hex()}.{5:07}.{parent.hex()}.safetensors"
    assert pin_path(BlobName(bytes(16), key), 7) == f"{PINS}{bytes(16).hex()}/{key.hex()}.{7:012}"
    assert list(rows) == [
        f"{layout.ROOT}/epochs/<namespace digest>/<number>",
        f"{layout.LEASES}<term, 20 digits>",
        f"{layout.SERVERS}<server>.<session number>",
        f"{layout.RECENCY}<server>/<number>",
        f"{layout.BASES}<term>-<n>-<m>",
        f"{PINS}<namespace>/<key>.<end, 12 digits>",
        f"{layout.PEERS}<host>:<port>",
        layout.USAGE,
        f"{layout.ROOT}/probe/<random>",
    ]
    kinds = (layout.Term, layout.MemberReport, layout.BucketUsage)
    for row, kind in zip((list(rows)[1], list(rows)[2], layout.USAGE), kinds, strict=True):
        named = re.findall(r"`(\w+)`", rows[row].partition("(")[0])
        assert sorted(named) == sorted(kind.__struct_fields__), row
    assert layout.parse_lease_path(layout.lease_path(7)) == 7 and layout.lease_path(7).endswith(f"/{7:020}")


def test_configuration_page_lists_every_setting(repository: Path) -> None:
    """The page is made by ``tiered-kv config --json``; a changed setting must change it, too."""
    command = [Path(sys.executable).with_name("tiered-kv"), "config", "--json"]
    settings = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["settings"]
    rows = [f"| `{s['name']}` | {s['default'] or '-'} | {s['help']} |" for s in settings]

    page = (repository / "docs" / "configuration.md").read_text().splitlines()
    assert [line for line in page if line.startswith("| `")] == rows
