"""The methods of vLLM's connector API as a version's source declares them, read without importing that version.

Run as a module it records versions in tests/golden/connector_api.json from their overlays (scripts/overlay) or from the
installed vLLM: ``python -m tests.kit.vllm.connector_api 0.30 0.31 0.32 0.33``. Recorded, so that a test compares our
connector with every version of the window although one is installed.
"""

import ast
import importlib.util
import json
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
GOLDEN = REPOSITORY / "tests" / "golden" / "connector_api.json"
BASE = Path("vllm/distributed/kv_transfer/kv_connector/v1/base.py")
CLASSES = ("KVConnectorBase_V1", "SupportsHMA")


def declared(base: Path) -> dict[str, str]:
    """Public methods of both classes: name -> what it is and takes, e.g. ``"abstract method (self, request)"``."""
    found = {}
    for node in ast.parse(base.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name in CLASSES:
            for function in node.body:
                if isinstance(function, ast.FunctionDef) and not function.name.startswith("_"):
                    found[function.name] = _describe(function)
    return dict(sorted(found.items()))


def _describe(function: ast.FunctionDef) -> str:
    marks = {ast.unparse(mark) for mark in function.decorator_list}
    kind = next((kind for kind in ("property", "classmethod", "staticmethod") if kind in marks), "method")
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"{'abstract ' if 'abstractmethod' in marks else ''}{kind} ({ast.unparse(function.args)})"


def recorded() -> dict[str, dict[str, str]]:
    """Minor version -> its methods."""
    versions: dict[str, dict[str, str]] = json.loads(GOLDEN.read_text())
    return versions


def sources() -> dict[str, Path]:
    """Minor version -> its ``base.py``, for the versions that are on this machine."""
    found = {}
    for overlay in sorted((REPOSITORY / ".cache").glob("vllm-*/complete")):
        version = overlay.parent.name.removeprefix("vllm-")
        found[version.rpartition(".")[0]] = overlay.parent / BASE
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None, "vLLM is not installed"
    installed = Path(spec.origin).parent
    numbers = ast.parse((installed / "_version.py").read_text())
    version = next(
        str(ast.literal_eval(node.value))
        for node in ast.walk(numbers)
        if isinstance(node, ast.Assign) and "__version__" in [ast.unparse(target) for target in node.targets]
    )
    return found | {".".join(version.split(".")[:2]): installed.parent / BASE}


if __name__ == "__main__":
    there = sources()
    versions = {version: declared(there[version]) for version in sys.argv[1:]}
    GOLDEN.write_text(json.dumps(versions, indent=1) + "\n")
