"""What starts without torch and vLLM stays so: a CLI that takes five seconds to say --help is not used.

Nor does a server without a bucket import asyncio, 0.03 s of 0.3 on two cores.
"""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path

import pytest

HEAVY = ("torch", "vllm", "transformers", "numpy", "asyncio")

REPORT = f"""
found = sorted(set(sys.modules) & set({HEAVY!r}))
sys.exit("imported: " + ", ".join(found) if found else 0)
"""

CASES = {
    "the package": "import sys, tiered_kv",
    "the server": "import sys, tiered_kv.server.compose, tiered_kv.server.client",
    "tiered-kv --help": """
import sys
from tiered_kv.cli.main import main
sys.argv = ["tiered-kv", "--help"]
try:
    main()
except SystemExit as ended:
    if ended.code:
        raise
""",
}


@pytest.mark.parametrize("case", CASES)
def test_starts_without_torch_or_vllm(case: str) -> None:
    # A process of its own: in this one, other tests have imported torch already.
    result = subprocess.run(
        [sys.executable, "-c", CASES[case] + REPORT], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_a_heavy_import_would_be_noticed() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import sys, numpy" + REPORT], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 1
    assert result.stderr.strip() == "imported: numpy"


def test_vllm_finds_the_connector_by_name() -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="tiered_kv")
    assert callable(plugin.load())


# -- what is imported is declared -------------------------------------------------------------------------------------

EXTRAS = {"vllm": "vllm", "testing": "test"} | {
    f"chunks/{name}.py": "vllm" for name in ("cuda", "device", "device_copy", "layout_test", "paged_layer", "transfer")
}
"""Parts of the package that may need an extra: what runs inside vLLM, and what is for tests."""
MORE = {
    "testing/model.py": "vllm",
    "server/door_listener.py": "peers",
    "tiers/peers": "peers",
    "tiers/object/google.py": "gcs",
    "tiers/object/azure.py": "azure",
    "tiers/mooncake/process.py": "test",  # the extra "mooncake" names the wheel of the same package with CUDA
}


def distribution(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[ \[<>=!~;]", name)[0]).lower()


def imported(source: str) -> set[str]:
    """Top-level packages that a module imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"tiered_kv"}


@cache
def distributions_of_packages() -> dict[str, list[str]]:
    """Read once: it looks into every installed distribution."""
    return dict(packages_distributions())


def undeclared(name: str, source: str, project: dict[str, list[str]]) -> set[str]:
    """What a module imports and neither the package's dependencies nor the extra of its place bring by name."""
    allowed = {distribution(one) for one in project["dependencies"]}
    for places in (EXTRAS, MORE):
        for place, extra in places.items():
            if name == place or name.startswith(f"{place}/"):
                allowed |= {distribution(one) for one in project[extra]}
    brought_by = distributions_of_packages()
    return {
        package
        for package in imported(source)
        if not allowed & {distribution(one) for one in (package, *brought_by.get(package, ()))}
    }


def declared(repository: Path) -> dict[str, list[str]]:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    return {"dependencies": project["dependencies"], **project["optional-dependencies"]}


def test_whatever_is_imported_is_declared_where_it_is_used(repository: Path) -> None:
    package, project = repository / "tiered_kv", declared(repository)
    found = {
        str(module.relative_to(package)): gone
        for module in sorted(package.rglob("*.py"))
        if (gone := undeclared(str(module.relative_to(package)), module.read_text(), project))
    }
    assert found == {}


def test_an_import_that_is_not_declared_is_noticed(repository: Path) -> None:
    project = declared(repository)
    source = (
        "def f():\n    import numpy as np\n    from huggingface_hub.utils import x\n    import os, msgspec, aiohttp\n"
    )
    assert undeclared("server/loop.py", source, project) == {"numpy", "huggingface_hub", "aiohttp"}
    assert undeclared("vllm/loop.py", source, project) == {"aiohttp"}
