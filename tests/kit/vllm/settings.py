"""The settings of vLLM as a version's source declares them, read without importing that version.

Run as a module it records versions in tests/golden/vllm_settings.json from their overlays (scripts/overlay) or from the
installed vLLM: ``python -m tests.kit.vllm.settings 0.30 0.31 0.32 0.33``. Recorded, so that a test holds the table
of settings (``tiered_kv/vllm/identity/config_values.py``) against every version of the window although one is
installed.
"""

import ast
import json
import sys
from pathlib import Path

from tests.kit.vllm.connector_api import BASE, REPOSITORY, sources

GOLDEN = REPOSITORY / "tests" / "golden" / "vllm_settings.json"
ENVIRONMENT = "environment"


def declared(package: Path) -> dict[str, list[str]]:
    """Class of configuration -> its fields, of all that are made into one; ``environment`` -> the variables."""
    found = {}
    for path in sorted((package / "config").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and _is_config(node):
                fields = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
                found[node.name] = sorted(_name(field) for field in fields if not _is_no_field(field))
    found[ENVIRONMENT] = sorted(_variables(ast.parse((package / "envs.py").read_text())))
    return found


def _is_config(node: ast.ClassDef) -> bool:
    marks = {ast.unparse(mark).partition("(")[0] for mark in node.decorator_list}
    return bool(marks & {"config", "dataclass", "dataclasses.dataclass"})


def _is_no_field(field: ast.AnnAssign) -> bool:
    """Of the class, or an argument that is passed on to another part (``InitVar``)."""
    annotation = ast.unparse(field.annotation)
    return "ClassVar" in annotation or annotation.startswith("InitVar")


def _name(field: ast.AnnAssign) -> str:
    assert isinstance(field.target, ast.Name)
    return field.target.id


def _variables(module: ast.Module) -> list[str]:
    """Keys of the literal that ``environment_variables`` is set to."""
    for node in module.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "environment_variables":
            assert isinstance(node.value, ast.Dict)
            return [str(ast.literal_eval(key)) for key in node.value.keys if key is not None]
    raise ValueError("vllm/envs.py declares no environment_variables")


def recorded() -> dict[str, dict[str, list[str]]]:
    """Minor version -> class -> fields."""
    versions: dict[str, dict[str, list[str]]] = json.loads(GOLDEN.read_text())
    return versions


def packages() -> dict[str, Path]:
    """Minor version -> its package, for the versions that are on this machine."""
    return {version: Path(str(base).removesuffix(str(BASE))) / "vllm" for version, base in sources().items()}


if __name__ == "__main__":
    there = packages()
    versions = {version: declared(there[version]) for version in sys.argv[1:]}
    GOLDEN.write_text(json.dumps(versions, indent=1) + "\n")
