"""How the command line starts: with little imported, every verb named, and shells able to complete it."""

import ast
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tiered_kv.cli.app import MODULES, VERBS, app

HEAVY = (
    "torch",
    "vllm",
    "numpy",
    "rich",
    "pygments",
    "msgspec",
    "fsspec",
    "s3fs",
    "aiobotocore",
    "botocore",
    "asyncio",
    "diskcache",
    "sqlite3",
    "prometheus_client",
    "xxhash",
    "pydantic",
)
OWN_HEAVY = ("tiered_kv.chunks.", "tiered_kv.engine.", "tiered_kv.server.", "tiered_kv.tiers.", "tiered_kv.tiering.")
"""Packages of our own that a tier or a server takes, and no help."""

LOOKS = ("torch", "vllm", "numpy", "rich", "fsspec", "s3fs", "botocore", "prometheus_client")

MODULES_OF = """
import sys
from tiered_kv.cli.main import main
sys.argv = ["tiered-kv", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    print("\\nmodules:", ended.code, *sorted(sys.modules), file=sys.stderr)
"""


def imported(*arguments: str) -> set[str]:
    """What a call of the command line, which must succeed, has imported."""
    command = [sys.executable, "-c", MODULES_OF, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    words = done.stderr.rpartition("modules: ")[2].split()
    assert words[0] in ("0", "None"), done.stderr
    return set(words[1:])


def test_help_imports_no_verb_and_nothing_heavy() -> None:
    modules = imported("--help")
    assert not modules & set(HEAVY)
    ours = {name for name in modules if name.startswith("tiered_kv")}
    cli = {f"tiered_kv.cli.{name}" for name in ("app", "exits", "main")}
    assert ours == {"tiered_kv", "tiered_kv.version", "tiered_kv.cli"} | cli


@pytest.mark.parametrize("verb", ["ls", "evict", "du", "tree", "pin", "gc"])
def test_the_help_of_a_verb_imports_no_medium_and_no_server(verb: str) -> None:
    modules = imported(verb, "--help")
    assert not modules & {*LOOKS, "sqlite3", "diskcache", "safetensors", "xxhash"}
    assert [name for name in modules if name.startswith(OWN_HEAVY)] == []


def test_looking_at_a_directory_imports_only_what_that_takes(tmp_path: Path) -> None:
    modules = imported("ls", f"file://{tmp_path}")
    assert not modules & set(LOOKS)
    assert "tiered_kv.cli.ls" in modules and "tiered_kv.cli.du" not in modules


def test_evicting_from_a_directory_imports_only_what_that_takes(tmp_path: Path) -> None:
    modules = imported("evict", f"file://{tmp_path}", "--all", "--dry-run")
    assert not modules & set(LOOKS)
    assert "tiered_kv.ops.disk_storage" in modules and "tiered_kv.ops.object_storage" not in modules


def test_a_verb_that_moved_says_where_it_is_now(cli) -> None:
    for arguments in (["size"], ["size", "--help"], ["size", "./model", "--tokens", "8000", "--json"]):
        done = cli(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1 and "`python -m tools.kv_size`" in done.stderr
    assert "size" not in cli("--help").stdout.split()


def test_a_heavy_import_would_be_noticed() -> None:
    assert "msgspec" in imported("ls", "--help")


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_says_of_itself_what_the_list_says(verb: str) -> None:
    """The list stands in a table, so that nothing has to be imported to print it."""
    module = import_module(MODULES.get(verb, f"tiered_kv.cli.{verb}"))
    assert module.__file__ is not None
    functions = [n for n in ast.parse(Path(module.__file__).read_text()).body if isinstance(n, ast.FunctionDef)]
    (command,) = [n for n in functions if n.name == verb and any("command" in ast.unparse(d) for d in n.decorator_list)]
    assert (ast.get_docstring(command) or "").splitlines()[0] == VERBS[verb]


def test_help_names_every_verb_with_its_whole_summary(cli) -> None:
    shown = " ".join(cli("--help").stdout.split())
    for verb, summary in VERBS.items():
        assert f" {verb} {summary} " in shown
    assert "Exit codes: 0 done; 1 the storage or the server cannot be reached;" in shown


def test_a_misspelled_verb_is_guessed(cli) -> None:
    done = cli("inspekt")
    assert done.returncode == 2 and "No such command 'inspekt'. Did you mean 'inspect'?" in done.stderr


def test_shells_complete_verbs_and_options() -> None:
    def complete(words: str) -> set[str]:
        given = {"_TIERED_KV_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        command = [str(Path(sys.executable).with_name("tiered-kv"))]
        done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, check=False, timeout=60)
        assert done.stderr == ""
        return set(done.stdout.split())

    assert complete("tiered-kv ins") == {"inspect"}
    assert {"--namespace", "--sort", "--limit", "--older-than", "--json"} <= complete("tiered-kv ls --")
    assert complete("tiered-kv ls file:///x --sort de") == {"depth"}


def test_completion_is_shown_and_installed(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("tiered-kv"))]
    # typer asks which shell started the process; here that is whatever runs the tests, make's sh for one.
    named = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    for shell in ("bash", "zsh", "fish"):
        shown = subprocess.run(
            [*command, "--show-completion", shell], env=named, capture_output=True, text=True, check=True, timeout=60
        ).stdout
        assert "_TIERED_KV_COMPLETE=complete_" in shown and re.search(r"\btiered-kv\b", shown)
    home = named | {"HOME": str(tmp_path)}
    subprocess.run([*command, "--install-completion", "bash"], env=home, capture_output=True, check=True, timeout=60)
    (script,) = (tmp_path / ".bash_completions").iterdir()
    assert script.name == "tiered-kv.sh" and "_TIERED_KV_COMPLETE=complete_bash" in script.read_text()
    assert str(script) in (tmp_path / ".bashrc").read_text()


def test_every_verb_has_help_for_every_argument(cli) -> None:
    import typer

    group = typer.main.get_command(app)
    with typer.Context(group) as context:
        for verb in VERBS:
            command = group.get_command(context, verb)
            silent = [p.name for p in command.params if not getattr(p, "help", None) and p.name != "help"]
            assert silent == [], verb
            assert command.epilog is not None and command.epilog.startswith("Exit codes:"), verb
